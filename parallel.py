"""The processes of a run: one, or those that torchrun started."""

import dataclasses
import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from config import Config, UserError
from device import choose_device


@dataclasses.dataclass(frozen=True)
class Process:
    """This process's place among those that torchrun started; alone without torchrun."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def distributed(self) -> bool:
        return self.world_size > 1

    def say(self, text: str) -> None:
        """Print, on one process only."""
        if self.rank == 0:
            print(text, flush=True)


def start_process(config: Config) -> Process:
    """Choose this process's device and, under torchrun, join the others. Raises UserError."""
    rank, local_rank, world_size = (int(os.environ.get(name, default)) for name, default in
                                    (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    device = choose_device(config.device, local_rank)
    if world_size > 1:
        if device.type == "mps":
            raise UserError("--device mps: several processes cannot share it; use --device cpu or start one process")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        on_gpu, timeout = device.type == "cuda", datetime.timedelta(seconds=config.timeout)
        store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
        # torchrun may keep one store through its restarts: without a name of their own, processes would find the addresses of
        # dead ones in it. With several machines each counts by itself, so there the name cannot depend on it.
        one_machine = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_machine else "0"
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank,
                                world_size=world_size, timeout=timeout, device_id=device if on_gpu else None)
    return Process(device, rank, world_size)


def gather(own: Any, process: Process) -> list[Any]:
    """What every process gives, by rank."""
    if not process.distributed:
        return [own]
    everyones = [None] * process.world_size
    dist.all_gather_object(everyones, own)
    return everyones


def average(loss: Tensor, norm: Tensor, stop: bool, process: Process) -> tuple[float, float, bool]:
    """Mean loss and norm over the processes, and whether any of them was asked to stop, read in one transfer."""
    figures = torch.stack((loss.float(), norm.float(), torch.tensor(float(stop), device=loss.device)))
    if process.distributed:
        dist.all_reduce(figures)  # a sum: gloo has no average
        figures /= process.world_size
    mean_loss, mean_norm, any_stop = figures.tolist()
    return mean_loss, mean_norm, any_stop > 0
