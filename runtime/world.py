"""The ranks of a run: one process, or several that torchrun started."""

import contextlib
import dataclasses
import datetime
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from runtime.device import device_name
from runtime.errors import TrainingError, UserError, foreseen, kind_of_failure
from runtime.launch import Launch, launch
from runtime.report import code_hash, machine
from runtime.signals import default_sigint

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class World:
    """This process's device and its place among the ranks of the run."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    notes: tuple[str, ...] = ()  # for the user: the ranks' GPUs differ

    @property
    def distributed(self) -> bool:
        """True if there are other ranks."""
        return self.world_size > 1

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in the order of ranks. All ranks have to call this."""
        if not self.distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's value. All ranks have to call this."""
        if not self.distributed:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def on_rank0(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 alone; all ranks return its result or raise its error.

        All ranks have to call this.
        """
        outcome: Any = None
        if self.rank == 0:
            try:
                outcome = function()
            except Exception as error:
                outcome = error
        outcome = self.broadcast(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def raise_on_all(self, function: Callable[[], T]) -> T:
        """Call `function` on all ranks; if it raises UserError or OSError on any, all raise it.

        It is the first rank's error, as a UserError with that rank. All ranks have to call this,
        and the function must not wait for the others.
        """
        result: Any = None
        error: Any = None
        try:
            result = function()
        except (UserError, OSError) as raised:
            error = foreseen(raised, "a file", {})
        for rank, raised_there in enumerate(self.gather(error)):
            if raised_there:
                raised_there.rank = rank
                raise raised_there
        return result

    def sum(self, number: float) -> float:
        """Return the sum of a number over all ranks. All ranks have to call this."""
        if not self.distributed:
            return number
        total = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank. All ranks have to call this."""
        return self.sum(flag) > 0

    def ranks_that_differ(self, value: object) -> str:
        """Name the ranks whose value is not rank 0's, such as `rank 1` or `ranks 1, 3`.

        Returns "" if there are none. All ranks have to call this.
        """
        values = self.gather(value)
        ranks = [str(rank) for rank, other in enumerate(values) if other != values[0]]
        if not ranks:
            return ""
        return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}"

    def all_reduce_metrics(self, *metrics_here: Tensor) -> Tensor:
        """Return the means of metrics () over all ranks, (metrics,), on the device."""
        metrics = torch.stack([metric.float() for metric in metrics_here])
        if self.distributed:
            dist.all_reduce(metrics)  # a sum: gloo has no average
            metrics /= self.world_size
        return metrics


@contextlib.contextmanager
def joined_world(
    device: torch.device, timeout: float, must_match: Mapping[str, Any] = {}
) -> Iterator[World]:
    """Join the other ranks if torchrun started any, and leave them at the end.

    A rank gives another one up after `timeout` seconds. `must_match`: values that have to be the
    same on all ranks, by name. Raises UserError on all ranks if they, PyTorch or the code differ;
    TrainingError if the ranks cannot meet.
    """
    started = launch()
    if started.world_size == 1:
        yield World(device)
        return
    with default_sigint():
        _join(device, started, timeout)
    try:
        yield _check_match(World(device, started.rank, started.world_size), must_match)
    except SystemExit:
        dist.destroy_process_group()
        raise
    # After an error the ranks are no longer in step: `reported` ends this process at once.
    dist.destroy_process_group()


def _join(device: torch.device, started: Launch, timeout: float) -> None:
    """Join all ranks in PyTorch's process group. Raises TrainingError if they cannot meet."""
    if started.local_rank == 0 and not (started.by_torchrun or started.restart):
        print(
            f"rank {started.rank} waits at {started.address} for the other ranks, "
            f"{started.world_size} in all, for up to {timeout:g} s (--timeout); if this process "
            f"was started alone by mistake: unset WORLD_SIZE",
            file=sys.stderr,
        )
    limit, begun = datetime.timedelta(seconds=timeout), time.monotonic()
    gpu = device if device.type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=limit))
        # torchrun may keep its store through restarts, with entries of the earlier ranks
        store = dist.PrefixStore(f"restart {started.restart}", store)
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=limit,
            device_id=gpu,
        )
    except (RuntimeError, ValueError) as error:  # base classes of PyTorch's many
        reason = kind_of_failure(error)[1].rstrip(".")
        raise TrainingError(
            f"the {started.world_size} ranks of this run cannot meet at {started.address}: "
            f"{reason}, after {time.monotonic() - begun:.0f} s. All ranks have to run, on the same "
            f"kind of device, and to reach that address through the network interface in "
            f"GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; no other program may use its port"
        ) from None


def _check_match(world: World, must_match: Mapping[str, Any]) -> World:
    """Raise UserError on all ranks unless all have the same values; notes other devices."""
    own = {**must_match, "PyTorch": torch.__version__, "hash of the code": code_hash()}
    device = device_name(world.device)
    if world.device.type == "cpu":  # sums depend on the number of threads
        device = f"{machine()}, {torch.get_num_threads()} threads of a rank"
    everyones, devices = world.gather(own), sorted({*world.gather(device)})
    problems = []
    for name in own:
        values = [str(theirs.get(name)) for theirs in everyones]
        if len({*values}) > 1:
            found = [f"{value} on rank {values.index(value)}" for value in dict.fromkeys(values)]
            problems.append(f"{name}: all ranks need the same, but it is {' and '.join(found)}")
    if problems:
        raise UserError("\n".join(problems))
    if len(devices) == 1:
        return world
    note = (
        f"the ranks have different devices ({'; '.join(devices)}): each step waits for the slowest"
    )
    return dataclasses.replace(world, notes=(note,))


def no_sync(model: Any, accumulating: bool) -> contextlib.AbstractContextManager[None]:
    """Keep DDP and FSDP2 from averaging gradients, in all micro-steps but the last one.

    The context has to cover the forward pass too: DDP decides there.
    """
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(not accumulating)
    is_ddp = isinstance(model, DistributedDataParallel)
    return model.no_sync() if is_ddp and accumulating else contextlib.nullcontext()
