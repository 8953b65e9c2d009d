"""How torchrun started this process: the only reader of torchrun's environment.

This imports nothing of the project, and not torch: reading the options needs it.
"""

import dataclasses
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process's place in its run; the defaults are for a process alone."""

    rank: int = 0
    local_rank: int = 0  # among the ranks of this machine
    world_size: int = 1
    local_world_size: int = 1  # ranks of this machine
    agents: int = 1  # machines: each has a torchrun
    by_torchrun: bool = False
    max_restarts: int = 0  # times that torchrun may start the ranks again
    restart: str = ""  # restarts so far; empty if each restart has a fresh store
    address: str = ""  # host:port of the store that the ranks meet at
    error_file: str = ""  # torchrun reports its root cause from this file


def launch() -> Launch:
    """Read torchrun's environment."""
    world_size = _number("WORLD_SIZE", 1)
    alone = Launch(
        by_torchrun="TORCHELASTIC_RUN_ID" in os.environ,
        max_restarts=_number("TORCHELASTIC_MAX_RESTARTS", 0),
        error_file=os.environ.get("TORCHELASTIC_ERROR_FILE", ""),
    )
    if world_size < 2:  # a RANK would be left over from another call
        return alone
    agents = _number("GROUP_WORLD_SIZE", 1)
    torchrun_keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dataclasses.replace(
        alone,
        rank=_number("RANK", 0),
        local_rank=_number("LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=_number("LOCAL_WORLD_SIZE", max(1, world_size // agents)),
        agents=agents,
        restart=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if torchrun_keeps_store else "",
        address=f"{os.environ.get('MASTER_ADDR')}:{_number('MASTER_PORT', 0)}",
    )


def _number(name: str, default: int) -> int:
    """Return a variable's whole number; 0 and "" mean the default."""
    return int(os.environ.get(name) or 0) or default


def threads_are_chosen() -> bool:
    """True if the user has set OMP_NUM_THREADS.

    torchrun sets it to 1 if the user has not. On Linux, torchrun's own environment shows which it
    was; elsewhere the 1 counts as the user's.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads != "1" or not launch().by_torchrun:
        return threads is not None
    try:
        environment = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True
    return any(text.startswith(b"OMP_NUM_THREADS=") for text in environment.split(b"\0"))
