"""The ranks of a run: one process, or those that torchrun started."""

import contextlib
import datetime
import itertools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.errors import TrainingError, UserError, foreseen, kind_of_failure
from runtime.launch import Launch, contradiction, launch
from runtime.report import code_version
from runtime.signals import killed_by_ctrl_c

T = TypeVar("T")
SAY_AFTER = 10.0  # seconds after which a rank that waits for others to join says so, and for whom


@dataclass(frozen=True)
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
        result: Any = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                result = function()
            except Exception as raised:
                error = raised
        result, error = self.broadcast((result, error))
        if error is not None:
            raise error
        return result

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
            if raised_there is not None:
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

    def all_reduce_metrics(self, loss: Tensor, norm: Tensor) -> tuple[float, float]:
        """Return the means of loss and norm over all ranks, by one all-reduce and one read."""
        metrics = torch.stack((loss.float(), norm.float()))
        if self.distributed:
            dist.all_reduce(metrics)  # a sum: gloo has no average
            metrics /= self.world_size
        mean_loss, mean_norm = metrics.tolist()
        return mean_loss, mean_norm


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
    """Meet all ranks at a store, and join them in PyTorch's process group."""
    on_gpu, limit = device.type == "cuda", datetime.timedelta(seconds=timeout)
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        store = dist.TCPStore(
            started.host,
            started.port,
            is_master=started.hosts_store,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
        )
        # torchrun may keep its store, and so what an earlier attempt has left there
        own = dist.PrefixStore(f"train {started.attempt}", store)
        own.set(f"device of {started.rank}", device.type)
        _meet(own, started, timeout)
        # compared before joining: ranks on a GPU cannot join others on a CPU, but wait in vain
        devices = [own.get(f"device of {rank}").decode() for rank in range(started.world_size)]
        if problems := _differences("need", [{"kind of device": kind} for kind in devices]):
            raise UserError(problems[0])
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=own,
            rank=started.rank,
            world_size=started.world_size,
            timeout=limit,
            device_id=device if on_gpu else None,
        )
    except (RuntimeError, ValueError) as error:  # of many classes
        raise _cannot_meet(started, kind_of_failure(error)[1]) from None


def _meet(store: "dist.Store", started: Launch, timeout: float) -> None:
    """Wait until all ranks have come to the store."""
    if store.add(f"rank {started.rank}", 1) > 1:
        raise UserError(
            f"rank {started.rank} has come to {_place(started)} twice: two runs on one port (give "
            f"each run its own --master_port, or its own --rdzv_endpoint and --rdzv_id), two "
            f"machines with one --node_rank, or ranks that torchrun has started again with its "
            f"old store (export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all machines)"
        )
    ranks = range(started.world_size)

    def missing(seconds: float) -> str:
        """Wait for all ranks; returns those that have not come."""
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"rank {rank}" for rank in ranks], datetime.timedelta(seconds=seconds))
        return describe_ranks([rank for rank in ranks if not store.check([f"rank {rank}"])])

    said_after = min(SAY_AFTER, timeout)
    if (absent := missing(said_after)) and started.local_rank == 0:
        print(
            f"rank {started.rank} waits at {_place(started)} for {absent} of "
            f"{started.world_size} for up to {timeout:g} s (--timeout); if this process was "
            f"started alone by mistake: unset WORLD_SIZE",
            file=sys.stderr,
            flush=True,
        )
    if absent and (absent := missing(max(timeout - said_after, 0.1))):
        raise _cannot_meet(started, f"{absent} did not come within {timeout:g} s")


def _place(started: Launch) -> str:
    return f"{started.host}:{started.port}"


def _cannot_meet(started: Launch, problem: str) -> TrainingError:
    return TrainingError(
        f"the {started.world_size} ranks of this run cannot meet at {_place(started)}: {problem}. "
        f"All of them have to run and to reach that address, whose port no other program may have, "
        f"by the network interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, if set"
    )


def _compare(device: torch.device, started: Launch, alike: Mapping[str, Any]) -> World:
    """Gather what the ranks have to have alike. Raises UserError on all ranks if they do not."""
    world = World(device, started.rank, started.world_size)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    own = (
        {**alike, "PyTorch": str(torch.__version__)},
        {"code": code_version(), "GPU": gpu},
        started.call,
    )
    needed, wanted, calls = zip(*world.gather(own), strict=True)
    if problems := _differences("need", needed):
        raise UserError("\n".join(problems))
    torchruns = tuple(sorted({call for call in calls if call}))
    notes = tuple(_differences("should have", wanted))
    return World(device, started.rank, started.world_size, torchruns, notes)


def _differences(kind: str, everyones: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each item that the ranks do not have alike: which has which value."""
    lines = []
    for name in dict.fromkeys(itertools.chain(*everyones)):
        ranks_with: dict[str, list[int]] = {}
        for rank, own in enumerate(everyones):
            ranks_with.setdefault(str(own.get(name)), []).append(rank)
        (first, _), *others = ranks_with.items()
        elsewhere = [f"{value} on {describe_ranks(ranks)}" for value, ranks in others]
        if elsewhere:
            lines.append(
                f"{name}: all ranks {kind} the same, but it is {first} on rank 0 and "
                f"{' and '.join(elsewhere)}"
            )
    return lines


def describe_ranks(ranks: Collection[int]) -> str:
    """Name ranks briefly, such as `rank 1` or `ranks 1, 3 and 8-15`; "" for none."""
    if not ranks:
        return ""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    *most, last = [str(first) if first == end else f"{first}-{end}" for first, end in spans]
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"ranks {listed}" if len(ranks) > 1 else f"rank {listed}"
