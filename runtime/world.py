"""The processes of a run: one, or those that torchrun started.

This is the only reader of torchrun's environment. Importing it does not import torch: a mistake in the options is told at once.
"""

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """What torchrun told this process through its environment; the defaults are those of a process started without it."""

    rank: int = 0
    local_rank: int = 0  # among the processes of this machine
    world_size: int = 1
    restarts: int = 0  # how often this machine's agent has started its processes again
    agents: int = 1  # machines
    call: str | None = None  # tells one call of torchrun from another, and stays through its restarts


def launch() -> Launch:
    """How this process was started."""
    def number(name: str, default: int) -> int:
        text = os.environ.get(name, "")
        return int(text) if text.isdecimal() else default

    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return Launch(rank=number("RANK", 0), local_rank=number("LOCAL_RANK", 0), world_size=number("WORLD_SIZE", 1),
                  restarts=number("TORCHELASTIC_RESTART_COUNT", 0), agents=number("GROUP_WORLD_SIZE", 1),
                  call=f"{run_id} {os.getppid()}" if run_id else None)


@dataclass(frozen=True)
class World:
    """This process's device and its place among the processes of the run."""

    device: "torch.device"
    rank: int = 0
    world_size: int = 1

    @property
    def distributed(self) -> bool:
        """Whether there are other processes."""
        return self.world_size > 1

    def gather(self, own: T) -> list[T]:
        """What every process gives, by rank. Every process has to call this."""
        if not self.distributed:
            return [own]
        import torch.distributed as dist

        everyones: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyones, own)
        return everyones

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every process. Every process has to call this."""
        if not self.distributed:
            return value
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def on_first(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 alone: every process gets its result, or raises what it raised.

        Every process has to call this.
        """
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = function(), None
            except Exception as error:  # raised below, on every process
                outcome = None, error
        result, raised = self.broadcast(outcome)
        if raised is not None:
            raise raised
        return result

    def sum(self, number: float) -> float:
        """The sum of every process's number."""
        if not self.distributed:
            return number
        import torch
        import torch.distributed as dist

        total = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def share_figures(self, loss: "Tensor", norm: "Tensor", stop: bool) -> tuple[float, float, bool]:
        """Mean loss, mean norm, and whether any process was asked to stop: one transfer for all three."""
        import torch
        import torch.distributed as dist

        figures = torch.stack((loss.float(), norm.float(), torch.tensor(float(stop), device=loss.device)))
        if self.distributed:
            dist.all_reduce(figures)  # a sum: gloo has no average
            figures /= self.world_size
        mean_loss, mean_norm, share_that_stops = figures.tolist()
        return mean_loss, mean_norm, share_that_stops > 0


@contextlib.contextmanager
def joined_world(device: "torch.device", timeout: float) -> Iterator[World]:
    """The other processes, if torchrun started any, joined while entered; each gives up on another after `timeout` seconds."""
    started = launch()
    if started.world_size > 1:
        import torch
        import torch.distributed as dist

        on_gpu, patience = device.type == "cuda", datetime.timedelta(seconds=timeout)
        if on_gpu:
            torch.cuda.set_device(device)
        store, *_ = next(dist.rendezvous("env://", started.rank, started.world_size, timeout=patience))
        # torchrun may keep one store through its restarts. Each attempt needs a part of it under a name of its own, or processes
        # would find the addresses of dead ones. With several machines each agent counts only its own restarts, so there the
        # name cannot depend on the count.
        attempt = started.restarts if started.agents == 1 else 0
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.PrefixStore(f"attempt {attempt}", store),
                                rank=started.rank, world_size=started.world_size, timeout=patience,
                                device_id=device if on_gpu else None)
    failed = True
    try:
        yield World(device, started.rank, started.world_size)
        failed = False
    except SystemExit:
        failed = False
        raise
    finally:
        if started.world_size > 1 and dist.is_initialized() and not failed:  # else end_process leaves them
            dist.destroy_process_group()


def end_process(status: int) -> NoReturn:
    """End this process with a status; at once, if it has joined others and something went wrong.

    PyTorch's threads may then still wait for another process. Python, as it ends, waits for these threads while it holds the lock
    that they need: the process would never end, nor would torchrun.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody may read it
                stream.flush()
        os._exit(status)
    raise SystemExit(status)
