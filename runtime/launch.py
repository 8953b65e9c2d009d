"""How torchrun started this process: the only reader of torchrun's environment.

This imports nothing of the project, and not torch: reading the options needs it.
"""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Launch:
    """Describe this process's place in its run; the defaults are those of a process alone."""

    rank: int = 0
    local_rank: int = 0  # among the ranks of this machine
    world_size: int = 1
    local_world_size: int = 1  # ranks of this machine
    agents: int = 1  # machines: each has a torchrun
    call: str | None = None  # tells one call of torchrun from another, the same through restarts
    attempt: str = ""  # which start of the ranks, if torchrun keeps their store through all of them
    address: str = ""  # of the store where the ranks meet


def launch() -> Launch:
    """Read torchrun's environment. What contradicts itself there counts as missing."""
    world_size = _number("WORLD_SIZE", 1)
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    call = describe_call(run_id, os.getppid()) if run_id else None
    if world_size < 2:  # a RANK would be left over from another call
        return Launch(call=call)
    agents = _number("GROUP_WORLD_SIZE", 1)
    torchrun_keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(
        rank=_number("RANK", 0),
        local_rank=_number("LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=_number("LOCAL_WORLD_SIZE", max(1, world_size // agents)),
        agents=agents,
        call=call,
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if torchrun_keeps_store else "",
        address=f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
    )


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


def contradiction() -> str | None:
    """Say what is wrong with an environment that no torchrun makes; None if it is right."""
    names = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    found = {name: os.environ.get(name, "") for name in names}
    size, rank, host, port = found.values()
    if size in ("", "1"):
        return None
    with contextlib.suppress(ValueError):
        if 0 <= int(rank) < int(size) and host and 0 < int(port) < 2**16:
            return None
    return (
        f"the environment contradicts itself: {found}; start several ranks with torchrun, or one "
        f"after: unset WORLD_SIZE"
    )


def describe_call(run_id: str, agent: int) -> str:
    """Name the torchrun with this process id so that no other has the same name.

    Containers have the same ids and host names again and again, but not the same start time.
    """
    try:
        start_time = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):  # not Linux
        start_time = "?"
    return f"{run_id} {socket.gethostname()} {agent} {start_time}"


def error_file() -> str | None:
    """Return the path where torchrun looks for the error of a rank that failed."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def environment_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun would set for a rank on this machine alone, with a store at `port`."""
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
    """Return whether the user has set the number of threads, by OMP_NUM_THREADS.

    torchrun sets it to 1 where it is not set, which looks the same. But on Linux the environment
    that torchrun was started with can be read, and has none then; elsewhere the 1 counts as the
    user's.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads != "1" or launch().call is None:
        return threads is not None
    try:
        environment = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True
    return any(text.startswith(b"OMP_NUM_THREADS=") for text in environment.split(b"\0"))
