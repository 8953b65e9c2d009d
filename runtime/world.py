"""The processes of a run: one, or those that torchrun started.

This is the only reader of torchrun's environment. Importing it does not import torch: a mistake in
the options is told at once.
"""

import contextlib
import datetime
import functools
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
TOLD_WHEN_WAITING = (
    10.0  # seconds after which a process that still waits to meet the others says so, and for whom
)
GRACE = 10.0  # seconds by which the others give up later than rank 0, which says why
PAUSE = 0.1  # seconds between two looks at who has come
A_TRY = 10.0  # seconds that a try to reach the meeting place may take
OWN_PORT = "give each run its own --master_port, or its own --rdzv_endpoint and --rdzv_id"
TOLD = "told"  # in the store: how many processes were about to tell why the run ends
_store: Any = None  # what the processes of the run share from their meeting on; None alone


@dataclass(frozen=True)
class Launch:
    """What torchrun told this process through its environment; the defaults are those of a process
    started without it.
    """

    rank: int = 0
    local_rank: int = 0  # among the processes of this machine
    world_size: int = 1
    local_world_size: int = 1  # processes of this machine
    agents: int = 1  # machines: each has a torchrun
    call: str | None = (
        None  # tells one call of torchrun from another, and stays through its restarts
    )


def launch() -> Launch:
    """How this process was started."""

    def number(name: str, default: int) -> int:
        text = os.environ.get(name, "")
        return int(text) if text.isdecimal() else default

    run_id, world_size = os.environ.get("TORCHELASTIC_RUN_ID"), max(1, number("WORLD_SIZE", 1))
    several = world_size > 1  # else a rank is left over from another call
    agents = number("GROUP_WORLD_SIZE", 1)
    here = number("LOCAL_WORLD_SIZE", world_size // max(1, agents)) if several else 1
    return Launch(
        rank=number("RANK", 0) * several,
        local_rank=number("LOCAL_RANK", 0) * several,
        world_size=world_size,
        local_world_size=max(1, here),
        agents=agents,
        call=_call(run_id, os.getppid()) if run_id else None,
    )


@functools.cache
def _call(run_id: str, agent: int) -> str:
    """The torchrun with this process number, in words that tell it from all others: containers have
    the same numbers, and names of machines, again and again, but not at the same moment after the
    machine's start.
    """
    try:
        begun = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # only Linux tells
        begun = "?"
    return f"{run_id} {socket.gethostname()} {agent} {begun}"


def environment_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would tell a process of a run on this machine alone, whose store is at this
    port.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def threads_are_chosen() -> bool:
    """Whether the user has set how many threads a process has, by OMP_NUM_THREADS.

    torchrun sets it to 1 where it is not set, which looks the same. But on Linux the environment
    that torchrun was started with can be read, and has none then; elsewhere that 1 counts as the
    user's.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads != "1" or launch().call is None:
        return threads is not None
    try:
        torchruns = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True
    return any(variable.startswith(b"OMP_NUM_THREADS=") for variable in torchruns.split(b"\0"))


def _check_launch() -> None:
    """Raises UserError for an environment that no torchrun makes, as where parts of another call
    are left in it.
    """

    def fault() -> str | None:
        size, rank, port = (
            os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_PORT")
        )
        if not size.isdecimal() or size == "0":
            return f"WORLD_SIZE is {size!r}, no number of processes" if size else None
        if int(size) == 1:
            return None
        if missing := [
            name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)
        ]:
            return f"WORLD_SIZE is {size}, but {' and '.join(missing)} not set"
        if not rank.isdecimal() or int(rank) >= int(size):
            return f"RANK is {rank!r}, no number below the WORLD_SIZE of {size}"
        return (
            None
            if port.isdecimal() and 0 < int(port) < 2**16
            else f"MASTER_PORT is {port!r}, no port number"
        )

    if said := fault():
        from runtime.errors import UserError

        raise UserError(
            f"the environment's {said}; start several processes with torchrun, or one after: "
            f"unset WORLD_SIZE"
        )


@dataclass(frozen=True)
class World:
    """This process's device and its place among the processes of the run."""

    device: "torch.device"
    rank: int = 0
    world_size: int = 1
    calls: tuple[str, ...] = ()  # of torchrun, one on each machine
    notes: tuple[str, ...] = ()  # what the user should know of processes that are not alike

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

    def on_rank0(self, function: Callable[[], T]) -> T:
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
            raised.of_all = True  # type: ignore[attr-defined]  # see UserError
            raise raised
        return result

    def raise_on_all(self, function: Callable[[], T]) -> T:
        """Call a function on every process. If it raises UserError or OSError on some, all raise
        what the first of them did, and rank 0 tells whose it is.

        Every process has to call this, and the function must not wait for the others.
        """
        from runtime.errors import UserError

        result, fault = None, None
        try:
            result = function()
        except (UserError, OSError) as error:
            fault = error
        for rank, raised in enumerate(self.gather(fault)):
            if raised is not None:
                raised.found_by, raised.of_all = rank, True  # type: ignore[union-attr]  # see UserError
                raise raised
        return result  # type: ignore[return-value]  # it has not failed

    def sum(self, number: float) -> float:
        """The sum of every process's number."""
        if not self.distributed:
            return number
        import torch
        import torch.distributed as dist

        total = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def any(self, flag: bool) -> bool:
        """True if the flag is set on any rank. All ranks have to call this."""
        return self.sum(flag) > 0

    def all_reduce_metrics(self, loss: "Tensor", norm: "Tensor") -> tuple[float, float]:
        """Return the means over all ranks of loss and norm, in one transfer and one read."""
        import torch
        import torch.distributed as dist

        metrics = torch.stack((loss.float(), norm.float()))
        if self.distributed:
            dist.all_reduce(metrics)  # a sum: gloo has no average
            metrics /= self.world_size
        mean_loss, mean_norm = metrics.tolist()
        return mean_loss, mean_norm


@contextlib.contextmanager
def joined_world(
    device: "torch.device", timeout: float, alike: dict[str, Any] | None = None
) -> Iterator[World]:
    """The other processes, if torchrun started any, joined while entered; each gives up on another
    after `timeout` seconds.

    `alike`: options, as JSON has them, that all processes need to have alike. Raises UserError for
    an environment that contradicts itself and for processes that are not alike, TrainingError if
    the processes do not meet: rank 0 does, the others end.
    """
    _check_launch()
    started = launch()
    if started.world_size > 1:
        world = _meet(device, started, timeout, alike or {})
    else:
        world = World(device, calls=(started.call,) if started.call else ())
    failed = True
    try:
        yield world
        failed = False
    except SystemExit:
        failed = False
        raise
    finally:
        if has_joined() and not failed:  # else end_process leaves them
            sys.modules["torch.distributed"].destroy_process_group()


def _meet(device: "torch.device", started: Launch, timeout: float, alike: dict[str, Any]) -> World:
    import torch
    import torch.distributed as dist

    on_gpu, patience = device.type == "cuda", datetime.timedelta(seconds=timeout)
    if on_gpu:
        torch.cuda.set_device(device)
    meeting = _Meeting(started, timeout)
    try:
        store = dist.PrefixStore("train", meeting.reach())
        verdict = meeting.agree(store, _own(device, started, alike))
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=_share(store, verdict["name"]),
            rank=started.rank,
            world_size=started.world_size,
            timeout=patience,
            device_id=device if on_gpu else None,
        )
    except (RuntimeError, ValueError) as error:  # of many classes
        from runtime.errors import TrainingError, kind_of_failure

        raise TrainingError(meeting.failed(kind_of_failure(error)[1])) from None
    finally:
        meeting.waiting.cancel()
    return World(
        device, started.rank, started.world_size, tuple(verdict["calls"]), tuple(verdict["notes"])
    )


def _own(device: "torch.device", started: Launch, alike: dict[str, Any]) -> dict[str, Any]:
    """What a process tells of itself when it comes to the meeting."""
    import torch

    from runtime.report import code_version

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "process": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "call": started.call,
        "need": alike
        | {
            "WORLD_SIZE": started.world_size,
            "PyTorch": str(torch.__version__),
            "kind of device": device.type,
        },
        "should have": {"code": code_version(), "GPU": gpu},
    }


class _Meeting:
    """The processes of a run come to a place, a store, and go on together once all are there and
    rank 0 finds them alike.

    torchrun may keep one store through its restarts, of which each machine counts only its own. So
    each attempt gets a name, from its rank 0: processes that come read it, take part under it, and
    go on only by a verdict that counts them in; what an earlier attempt has left in the store
    counts none of them. In the store: `meeting`, the name of the latest attempt; and below that
    name `<rank>`, what a process tells of itself, `again`, what another process of the same rank
    does, `verdict`, and `read`, how many have read it.
    """

    def __init__(self, started: Launch, timeout: float):
        self.rank, self.size, self.timeout = started.rank, started.world_size, timeout
        self.those = f"the {started.world_size} processes of this run"
        self.address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.place = "{}:{}".format(*self.address)
        # for whom this process says that it waits. Rank 0 speaks; where it is not there, the first
        # process of each machine does
        self.awaited = (
            describe_ranks(range(1, self.size))
            if self.rank == 0
            else None
            if started.local_rank
            else "rank 0"
        )
        self.alone, self.begun = True, time.monotonic()
        self.waiting = threading.Timer(TOLD_WHEN_WAITING * (1.2 if self.rank else 1), self._tell)
        self.waiting.daemon = True
        self.waiting.start()

    def reach(self) -> Any:
        """The store at the meeting place, once somebody listens there. Raises TrainingError, at
        once if torchrun has ended there, and SystemExit if this process is asked to stop: PyTorch's
        own tries answer no signal.
        """
        import torch.distributed as dist

        from runtime.errors import TrainingError

        # torchrun's agent on the first machine keeps a store, since before it started a process; by
        # hand, rank 0 does
        of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        keeps_it = self.rank == 0 and not of_torchrun
        while not keeps_it and (fault := _fault_of(self.address)):
            if of_torchrun and isinstance(fault, ConnectionRefusedError):
                raise TrainingError(self.failed("torchrun has ended there"))
            if self._is_late():
                raise TrainingError(
                    self.failed(f"{fault.strerror or fault}, for {self.timeout:g} s")
                )
        return dist.TCPStore(
            *self.address,
            is_master=keeps_it,
            timeout=datetime.timedelta(seconds=self.timeout),
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=sys.platform != "win32",
        )

    def agree(self, store: Any, own: dict[str, Any]) -> dict[str, Any]:
        """Meet the others; returns rank 0's verdict: the `name` of this attempt, the `calls` of
        torchrun, `notes` for the user.

        Raises UserError on rank 0 if the processes are not alike, TrainingError if they do not
        come; SystemExit on the others.
        """
        return self._lead(store, own) if self.rank == 0 else self._follow(store, own)

    def failed(self, why: str) -> str:
        """What to say if the processes do not meet."""
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        return (
            f"{self.those} could not meet at {self.place} ({why}): all of them have to be "
            f"running and to reach that place, "
            f"whose port no other program or run may have"
            + (f", by the network interface {interface} (GLOO_SOCKET_IFNAME)" if interface else "")
        )

    def _lead(self, store: Any, own: dict[str, Any]) -> dict[str, Any]:
        from runtime.errors import TrainingError, UserError

        name, come = own["process"], {0: own}
        notes: list[str] = []
        error: UserError | None = None
        here = _share(store, name)
        store.set("meeting", name)
        while error is None and len(come) < self.size:
            missing = [rank for rank in range(self.size) if rank not in come]
            self.awaited, self.alone = describe_ranks(missing), len(come) == 1
            come |= {
                rank: json.loads(here.get(str(rank))) for rank in missing if here.check([str(rank)])
            }
            if here.check(["again"]):
                come[-1] = again = json.loads(here.get("again"))  # no rank, but counted in
                first = come.get(again["rank"], again)
                error = UserError(
                    f"rank {again['rank']} has come to {self.place} twice, from {first['host']} "
                    f"and {again['host']}: "
                    f"two runs on one port ({OWN_PORT}), or two machines with one --node_rank"
                )
            elif store.get("meeting").decode() != name:
                error = UserError(
                    f"another rank 0 has come to {self.place}: two runs on one port; {OWN_PORT}"
                )
            elif len(come) < self.size and self._is_late():
                error = TrainingError(
                    self.failed(f"{self.awaited} did not come within {self.timeout:g} s")
                )
        self.awaited, self.alone = "an answer from the others", False
        if error is None:
            faults, notes = _differences([come[rank] for rank in range(self.size)])
            error = UserError("\n".join(faults)) if faults else None
        verdict = {
            "name": name,
            "counts": [each["process"] for each in come.values()],
            "notes": notes,
            "calls": sorted({each["call"] for each in come.values()} - {None}),
            "status": error.status if error else 0,
        }
        here.set("verdict", json.dumps(verdict))
        if error is not None:
            until = time.monotonic() + 5
            while (
                here.add("read", 0) < len(come) - 1 and time.monotonic() < until
            ):  # the store may go with this process
                time.sleep(PAUSE)
            raise error
        return verdict

    def _follow(self, store: Any, own: dict[str, Any]) -> dict[str, Any]:
        from runtime.errors import TrainingError

        here, name, rank_0, is_open = store, None, self.awaited, False
        while not self._is_late(GRACE):
            if store.check(["meeting"]) and (latest := store.get("meeting").decode()) != name:
                here, name, is_open, self.awaited = _share(store, latest), latest, True, None
                is_first = here.add(f"{self.rank} came", 1) == 1
                here.set(
                    str(self.rank) if is_first else "again", json.dumps(own | {"rank": self.rank})
                )
            if is_open and here.check(["verdict"]):
                verdict = json.loads(here.get("verdict"))
                if own["process"] in verdict["counts"]:
                    here.add("read", 1)
                    if verdict["status"]:  # rank 0 says why
                        raise SystemExit(verdict["status"])
                    return verdict
                is_open, self.awaited = (
                    False,
                    rank_0,
                )  # an earlier attempt's meeting, or another run has this port
        raise TrainingError(self.failed(f"rank 0 did not come within {self.timeout:g} s"))

    def _is_late(self, grace: float = 0) -> bool:
        """Pause, and tell whether it is time to give up. Ends the process if it has been asked to
        stop: nobody has begun.
        """
        from runtime.signals import StopRequest

        if StopRequest.came:
            StopRequest("set-up").end_early(True)
        time.sleep(PAUSE)
        return time.monotonic() - self.begun > self.timeout + grace

    def _tell(self) -> None:
        if self.awaited:
            alone = (
                "; started alone by mistake? then end it by Ctrl-C, and: unset WORLD_SIZE"
                if self.alone
                else ""
            )
            print(
                f"rank {self.rank} waits at {self.place} for {self.awaited} of {self.those}, for "
                f"up to {self.timeout:g} s "
                f"(--timeout{alone})",
                file=sys.stderr,
                flush=True,
            )


def _fault_of(address: tuple[str, int]) -> OSError | None:
    """Why no program can be reached at an address, if none can."""
    try:
        socket.create_connection(address, timeout=A_TRY).close()
    except OSError as error:
        return error
    return None


def _share(store: Any, name: str) -> Any:
    """The part of the store that is the attempt's; is_first_to_tell asks there from now on."""
    global _store
    import torch.distributed as dist

    _store = dist.PrefixStore(name, store)
    return _store


def _differences(everyones: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """What the processes of a run, by rank, need to have alike and do not, and what they should
    have alike and do not; in lines.
    """
    lines: dict[str, list[str]] = {"need": [], "should have": []}
    hosts = [theirs["host"] for theirs in everyones]
    for kind, found in lines.items():
        for name in dict.fromkeys(name for theirs in everyones for name in theirs[kind]):
            values: dict[str, list[int]] = {}
            for rank, theirs in enumerate(everyones):
                values.setdefault(str(theirs[kind].get(name, "not known")), []).append(rank)
            if len(values) > 1:
                (mine, _), *others = values.items()
                elsewhere = " and ".join(
                    f"{value} on {describe_ranks(ranks, hosts)}" for value, ranks in others
                )
                found.append(
                    f"{name}: all ranks {kind} the same, but it is {mine} on rank 0 and {elsewhere}"
                )
    return lines["need"], lines["should have"]


def describe_ranks(ranks: Collection[int], hosts: Sequence[str] = ()) -> str:
    """Ranks in few words, such as `rank 1` or `ranks 1, 3 and 8-15`; and their machine, if it is
    one and not that of rank 0.

    `hosts`: the machine of every rank.
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    *most, last = [str(first) if first == end else f"{first}-{end}" for first, end in spans]
    words = f"rank{'s' if most or '-' in last else ''} " + (
        f"{', '.join(most)} and {last}" if most else last
    )
    theirs = {hosts[rank] for rank in ranks} if hosts else set()
    return words + (f" ({theirs.pop()})" if len(theirs) == 1 and theirs != {hosts[0]} else "")


def has_joined() -> bool:
    """Whether this process has met others, and not left them yet."""
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def is_first_to_tell() -> bool:
    """Whether no other process of the run has told yet why it ends, as far as can be known; those
    that ask later find that this one has.
    """
    try:
        if _store is not None:
            _store.set_timeout(datetime.timedelta(seconds=5))
        return _store is None or _store.add(TOLD, 1) == 1
    except RuntimeError:  # whoever kept the store is gone
        return True


def end_process(status: int) -> NoReturn:
    """End this process with a status; at once, if it has joined others and something went wrong.

    PyTorch's threads may then still wait for another process. Python, as it ends, waits for these
    threads while it holds the lock that they need: the process would never end, nor would torchrun.
    """
    if has_joined():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody may read it
                stream.flush()
        os._exit(status)
    raise SystemExit(status)
