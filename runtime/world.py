"""The processes of a run: one, or those that torchrun started.

This is the only reader of torchrun's environment. Importing it does not import torch: a mistake in the options is told at once.
"""

import contextlib
import datetime
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
TOLD_WHEN_WAITING = 10.0  # seconds after which a process that still waits to meet the others says so
TOLD = "told"  # in the store: how many processes were about to tell why the run ends
_store: Any = None  # what the processes of the run share from their meeting on; None alone


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

    run_id, world_size = os.environ.get("TORCHELASTIC_RUN_ID"), max(1, number("WORLD_SIZE", 1))
    several = world_size > 1  # else a rank is left over from another call
    return Launch(rank=number("RANK", 0) * several, local_rank=number("LOCAL_RANK", 0) * several, world_size=world_size,
                  restarts=number("TORCHELASTIC_RESTART_COUNT", 0), agents=number("GROUP_WORLD_SIZE", 1),
                  call=f"{run_id} {os.getppid()}" if run_id else None)


def environment_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would tell a process of a run on this machine alone, whose store is at this port."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _check_launch() -> None:
    """Raises UserError for an environment that no torchrun makes, as where parts of another call are left in it."""
    def fault() -> str | None:
        size, rank, port = (os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"))
        if not size.isdecimal() or size == "0":
            return f"WORLD_SIZE is {size!r}, no number of processes" if size else None
        if int(size) == 1:
            return None
        if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
            return f"WORLD_SIZE is {size}, but {' and '.join(missing)} not set"
        if not rank.isdecimal() or int(rank) >= int(size):
            return f"RANK is {rank!r}, no number below the WORLD_SIZE of {size}"
        return None if port.isdecimal() and 0 < int(port) < 2**16 else f"MASTER_PORT is {port!r}, no port number"

    if said := fault():
        from runtime.errors import UserError

        raise UserError(f"the environment's {said}; start several processes with torchrun, or one after: unset WORLD_SIZE")


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

    def on_each(self, function: Callable[[], T]) -> list[T]:
        """Call a function on every process: every one gets all results, by rank, or raises what the first that failed raised.

        Every process has to call this.
        """
        own: tuple[Any, Exception | None]
        try:
            own = function(), None
        except Exception as error:  # raised below, on every process
            own = None, error
        results: list[Any] = []
        for result, raised in self.gather(own):
            if raised is not None:
                raise raised
            results.append(result)
        return results

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
    """The other processes, if torchrun started any, joined while entered; each gives up on another after `timeout` seconds.

    Raises UserError for an environment that contradicts itself, TrainingError if the processes do not meet.
    """
    _check_launch()
    started = launch()
    if started.world_size > 1:
        _meet(device, started, timeout)
    failed = True
    try:
        yield World(device, started.rank, started.world_size)
        failed = False
    except SystemExit:
        failed = False
        raise
    finally:
        if has_joined() and not failed:  # else end_process leaves them
            sys.modules["torch.distributed"].destroy_process_group()


def _meet(device: "torch.device", started: Launch, timeout: float) -> None:
    global _store
    import torch
    import torch.distributed as dist

    on_gpu, patience = device.type == "cuda", datetime.timedelta(seconds=timeout)
    if on_gpu:
        torch.cuda.set_device(device)
    those = f"the {started.world_size} processes of this run"
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    waiting = threading.Timer(TOLD_WHEN_WAITING, print, (
        f"rank {started.rank} waits at {place} for the others of {those}, for up to {timeout:g} s (started alone by mistake? "
        f"then end it by Ctrl-C twice, and: unset WORLD_SIZE)",), {"file": sys.stderr, "flush": True})
    waiting.daemon = True
    waiting.start()
    try:
        store, *_ = next(dist.rendezvous("env://", started.rank, started.world_size, timeout=patience))
        # torchrun may keep one store through its restarts. Each attempt needs a part of it under a name of its own, or processes
        # would find the addresses of dead ones. With several machines each agent counts only its own restarts, so there the
        # name cannot depend on the count.
        attempt = started.restarts if started.agents == 1 else 0
        _store = dist.PrefixStore(f"attempt {attempt}", store)
        if started.rank == 0:
            _store.delete_key(TOLD)  # by an earlier attempt
        dist.init_process_group("nccl" if on_gpu else "gloo", store=_store, rank=started.rank, world_size=started.world_size,
                                timeout=patience, device_id=device if on_gpu else None)
    except (RuntimeError, ValueError) as error:  # of many classes
        from runtime.errors import TrainingError, kind_of_failure

        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        raise TrainingError(f"{those} could not meet at {place} ({kind_of_failure(error)[1]}): all of them have to be running and "
                            f"to reach that place, whose port no other program may have"
                            + (f", by the network interface {interface} (GLOO_SOCKET_IFNAME)" if interface else "")) from None
    finally:
        waiting.cancel()


def has_joined() -> bool:
    """Whether this process has met others, and not left them yet."""
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def is_first_to_tell() -> bool:
    """Whether no other process of the run has told yet why it ends, as far as can be known; those that ask later find that this
    one has."""
    try:
        if _store is not None:
            _store.set_timeout(datetime.timedelta(seconds=5))
        return _store is None or _store.add(TOLD, 1) == 1
    except RuntimeError:  # whoever kept the store is gone
        return True


def end_process(status: int) -> NoReturn:
    """End this process with a status; at once, if it has joined others and something went wrong.

    PyTorch's threads may then still wait for another process. Python, as it ends, waits for these threads while it holds the lock
    that they need: the process would never end, nor would torchrun.
    """
    if has_joined():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody may read it
                stream.flush()
        os._exit(status)
    raise SystemExit(status)
