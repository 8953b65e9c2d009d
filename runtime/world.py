"""The ranks of a run: one process, or those that torchrun started."""

import contextlib
import dataclasses
import datetime
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from runtime.device import device_name
from runtime.errors import TrainingError, UserError, foreseen, kind_of_failure
from runtime.launch import Launch, contradiction, launch
from runtime.report import code_version
from runtime.signals import killed_by_ctrl_c

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class World:
    """This process's device and its place among the ranks of the run."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    calls: tuple[str, ...] = ()  # the torchruns that started the ranks, one on each machine
    notes: tuple[str, ...] = ()  # for the user: what the ranks should have alike and do not

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
        error: UserError | None = None
        try:
            result = function()
        except (UserError, OSError) as raised:
            error = foreseen(raised, "a file", {})
            if error:
                error.rank = self.rank
        for raised_there in self.gather(error):
            if raised_there:
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

    def all_reduce_metrics(self, *metrics_here: Tensor) -> Tensor:
        """Return the means of metrics () over all ranks, (metrics,), on the device."""
        metrics = torch.stack([metric.float() for metric in metrics_here])
        if self.distributed:
            dist.all_reduce(metrics)  # a sum: gloo has no average
            metrics /= self.world_size
        return metrics


@contextlib.contextmanager
def joined_world(
    device: torch.device, timeout: float, alike: Mapping[str, Any] | None = None
) -> Iterator[World]:
    """Join the other ranks, if torchrun started any, and leave them at the end.

    A rank gives another one up after `timeout` seconds. `alike`: options that have to be the same
    on all ranks. Raises UserError on all ranks if they are not alike, or for an environment that
    contradicts itself; TrainingError if the ranks cannot meet.
    """
    if problem := contradiction():
        raise UserError(problem)
    started = launch()
    if started.world_size == 1:
        yield World(device, calls=(started.call,) if started.call else ())
        return
    with killed_by_ctrl_c():
        _join(device, started, timeout)
    try:
        yield _compare(device, started, alike or {})
    except SystemExit:
        dist.destroy_process_group()
        raise
    # After an error the ranks are not in step any more: `reported` ends this process at once.
    dist.destroy_process_group()


def _join(device: torch.device, started: Launch, timeout: float) -> None:
    """Join all ranks in PyTorch's process group. Raises TrainingError if they cannot meet."""
    if started.local_rank == 0 and not (started.call or started.attempt):
        print(
            f"rank {started.rank} waits at {started.address} for the other ranks, "
            f"{started.world_size} in all, for up to {timeout:g} s (--timeout); if this process "
            f"was started alone by mistake: unset WORLD_SIZE",
            file=sys.stderr,
        )
    # A rank that torchrun started just before it was killed would try to reach its store for long.
    if started.attempt and _refuses(started.address):
        raise TrainingError(f"torchrun has ended: nobody answers at {started.address}")
    limit = datetime.timedelta(seconds=timeout)
    gpu = device if device.type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=limit))
        # torchrun may keep its store through restarts, with what earlier ranks have left there
        store = dist.PrefixStore(f"attempt {started.attempt}", store)
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=limit,
            device_id=gpu,
        )
    except (RuntimeError, ValueError) as error:  # of many classes
        raise TrainingError(
            f"the {started.world_size} ranks of this run cannot meet at {started.address}: "
            f"{kind_of_failure(error)[1]}. All of them have to run, on the same kind of device, "
            f"and to reach that address, whose port no other program may have, by the network "
            f"interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, if set"
        ) from None


def _refuses(address: str) -> bool:
    """Return True if no process listens at the address, False if one does or may do."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _compare(device: torch.device, started: Launch, alike: Mapping[str, Any]) -> World:
    """Gather what the ranks have to have alike. Raises UserError on all ranks if they do not."""
    world = World(device, started.rank, started.world_size)
    needs = {**alike, "PyTorch": str(torch.__version__)}
    wants = {"code": code_version(), "GPU": device_name(device)}
    needed, wanted, calls = zip(*world.gather((needs, wants, started.call)), strict=True)
    if problems := _differences("need", needed):
        raise UserError("\n".join(problems))
    notes = _differences("should have", wanted)
    return dataclasses.replace(world, calls=tuple(sorted({*calls} - {None})), notes=tuple(notes))


def _differences(kind: str, everyones: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each item that the ranks do not have alike: which has which value."""
    lines = []
    for name in everyones[0]:
        ranks_with: dict[str, list[int]] = {}
        for rank, own in enumerate(everyones):
            ranks_with.setdefault(str(own.get(name)), []).append(rank)
        if len(ranks_with) > 1:
            values = [
                f"{value} on {describe_ranks(having)}" for value, having in ranks_with.items()
            ]
            lines.append(f"{name}: all ranks {kind} the same, but it is {' and '.join(values)}")
    return lines


def describe_ranks(ranks: Collection[int]) -> str:
    """Name ranks briefly, such as `rank 1` or `ranks 1, 3, 8-15`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    listed = ", ".join("-".join(map(str, span)) for span in spans)
    return f"ranks {listed}" if len(ranks) > 1 else f"rank {listed}"


def no_sync(model: Any, accumulating: bool) -> contextlib.AbstractContextManager[None]:
    """Keep DDP and FSDP2 from averaging gradients, in all micro-steps but the last one.

    The context has to cover the forward pass too: DDP decides there.
    """
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(not accumulating)
    is_ddp = isinstance(model, DistributedDataParallel)
    return model.no_sync() if is_ddp and accumulating else contextlib.nullcontext()
