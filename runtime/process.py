"""What a process sets before torch is imported: its threads, how it keeps memory, where it keeps
what it compiles, what C++ may print.
"""

import contextlib
import ctypes
import math
import os
import sys
from pathlib import Path

from runtime.world import launch, threads_are_chosen

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = (
    -1,
    -2,
    -3,
    -4,
    -8,
)  # of glibc's mallopt(3)


# a tunable of glibc: buffers of each size that a thread keeps for itself
CACHES = "glibc.malloc.tcache_count"


def before_torch() -> None:
    """Settings that make steps on a CPU and starts faster, and warnings short. What the user has
    set in the environment stands.
    """
    start_without_caches()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stacks in warnings
    share_cores()
    retain_freed_memory()
    keep_compiled()


def share_cores() -> None:
    """Let PyTorch have as many threads as this process's share of the cores, where several
    processes of a run are on this machine.

    Each would take all cores, or under torchrun one. What the user has set stands.
    """
    ranks = launch().local_world_size
    if ranks > 1 and not threads_are_chosen():
        # the parent started them all; they may have been bound to cores of their own since
        os.environ["OMP_NUM_THREADS"] = str(max(1, min(cores(), cores(os.getppid()) // ranks)))


def cores(pid: int = 0, system: Path = Path("/")) -> int:
    """Cores that a process (0: this one) may use. Two threads of one core count once, as PyTorch
    alone counts them too.
    """
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    found = set()
    for cpu in os.sched_getaffinity(pid):
        try:
            found.add(
                (
                    system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
                ).read_text()
            )
        except OSError:
            found.add(str(cpu))
    return len(found)


def start_without_caches() -> None:
    """Start this process anew, once, with a C library that joins all that is freed to what is free
    beside it.

    PyTorch's buffers are aligned, and glibc keeps the small ends that it cuts off for that in
    caches of each thread. There they lie between large buffers, which can then never be joined:
    with them, what `retain_freed_memory` keeps grew to twice what is needed without torch.compile, and to
    another size in each run. glibc can do without these caches only from a process's start. Not
    under a debugger or profiler, which would begin anew too, nor where a GPU computes: there the
    host's buffers are small, and caches help.
    """
    if (
        _glibc() is None
        or "GLIBC_TUNABLES" in os.environ
        or sys.gettrace()
        or sys.getprofile()
        or {"torch", "bdb", "pydevd"} & sys.modules.keys()
        or Path("/dev/nvidiactl").exists()
    ):
        return
    for output in filter(None, (sys.stdout, sys.stderr)):
        output.flush()
    with contextlib.suppress(OSError):
        os.execve(
            sys.executable,
            [sys.executable, *sys.orig_argv[1:]],
            os.environ | {"GLIBC_TUNABLES": f"{CACHES}=0"},
        )


def retain_freed_memory() -> None:
    """Let the C library keep what this process frees, for its next buffers, until
    `trim_memory_if_short`.

    The activations and gradients of every step are large. By default glibc gives such buffers back
    to the system when they are freed, and the system zeroes them and faults them in again, page by
    page, at the next step. Kept buffers of many sizes do not fill each other's gaps, which takes
    more memory: how much, `--estimate` says.
    """
    if libc := _glibc():
        libc.mallopt(M_MMAP_MAX, 0)  # large buffers come from the heap too
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # whose end is never given back
        libc.mallopt(M_TOP_PAD, 256 * 2**20)  # and which grows in large steps
        libc.mallopt(
            M_ARENA_MAX, 1
        )  # one heap for all threads: what one has freed serves the others


def trim_memory_if_short() -> None:
    """Give back what `retain_freed_memory` has kept, and keep no more, if less memory is left than half of
    what the run's processes on this machine have: keeping might take that much more. For between
    two steps.
    """
    started = launch()
    if (libc := _glibc()) and memory_left() < started.local_world_size * resident_memory() / 2:
        libc.mallopt(
            M_MMAP_MAX, 2**16
        )  # glibc's own settings, as they are after some large buffers
        libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        libc.mallopt(M_TRIM_THRESHOLD, 64 * 2**20)
        libc.mallopt(M_TOP_PAD, 128 * 2**10)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc and the user has not set how it keeps memory."""
    if (
        sys.platform != "linux"
        or not os.environ.get("GLIBC_TUNABLES", CACHES).startswith(CACHES)
        or any(name.startswith("MALLOC_") for name in os.environ)
    ):
        return None
    libc = ctypes.CDLL(None)
    return (
        libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
    )  # other C libraries lack them


def memory_left(system: Path = Path("/")) -> float:
    """Bytes of memory that can still be had, of the machine's and of this container's (cgroup),
    whichever are fewer; infinitely many where Linux does not tell. Limits are those of version 2 of
    cgroups.
    """
    left = [math.inf]
    with contextlib.suppress(OSError, ValueError, KeyError):
        machine = dict(
            line.split(":") for line in (system / "proc/meminfo").read_text().splitlines()
        )
        left.append(int(machine["MemAvailable"].split()[0]) * 1024)
    root = system / "sys/fs/cgroup"
    group = root
    with contextlib.suppress(
        OSError, StopIteration
    ):  # version 2 of cgroups is the line that begins with 0
        lines = (system / "proc/self/cgroup").read_text().splitlines()
        group = root / next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    for place in (group, *group.parents):  # a limit may be that of any group above
        if place.is_relative_to(root):
            with contextlib.suppress(
                OSError, ValueError, KeyError
            ):  # the limit is "max" where there is none
                limit, used = (
                    int((place / f"memory.{name}").read_text()) for name in ("max", "current")
                )
                parts = dict(
                    line.split() for line in (place / "memory.stat").read_text().splitlines()
                )
                left.append(limit - used + int(parts["inactive_file"]))  # files that make room
    return min(left)


def resident_memory() -> int:
    """Bytes of memory that this process has; 0 where Linux does not tell."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def keep_compiled() -> None:
    """Let torch.compile keep what it compiles beside PyTorch's other downloads and caches, where it
    outlives a reboot.

    PyTorch's own place is in the system's folder for temporary files. It stays there where the
    user's cannot be written, and where its name has white space, which PyTorch hands to the C++
    compiler as two names.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = (
            Path(os.environ.get("TORCH_HOME") or caches / "torch") / "inductor"
        )  # as torch.hub finds its own
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and not any(map(str.isspace, str(folder.absolute()))):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute())
