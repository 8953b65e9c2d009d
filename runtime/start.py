"""Everything that a command does before torch is imported, in one call: `start(Options, ...)`.

It reads the options, and sets this rank's share of the cores and the memory allocator.
"""

import contextlib
import ctypes
import io
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.cli import O, parse
from runtime.errors import reported
from runtime.launch import launch, threads_are_chosen
from runtime.signals import exit_when_parent_dies

# Parameters of glibc's mallopt(3)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8
SMALL_CACHES = "glibc.malloc.tcache_count"


def start(options: type[O], argv: Sequence[str] | None = None, **how: Any) -> O:
    """Read the command line, as `parse_command_line` does, and set up the process."""
    values = parse_command_line(options, argv, **how)
    if launch().by_torchrun:
        exit_when_parent_dies(os.getppid())  # torchrun
    set_up_process(getattr(values, "device", "auto"), getattr(values, "retain_memory", True))
    return values


def parse_command_line(options: type[O], argv: Sequence[str] | None = None, **how: Any) -> O:
    """Parse `argv` (default: sys.argv[1:]); the keywords `how` go to `parse`.

    --help and --print_config end the process, and so do mistakes: one line each, and status 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model writes any character
        sys.stdout.reconfigure(errors="replace")
    with reported():
        return parse(options, sys.argv[1:] if argv is None else argv, **how)


def set_up_process(device: str = "auto", retain_memory: bool = True) -> None:
    """Set variables and allocators before torch is imported, unless the user has set them."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stacks in warnings
    share_cores()
    if device == "cpu" or not has_nvidia_gpu():
        if retain_memory:
            retain_freed_memory()
    elif not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & {*os.environ}:
        # Segments that grow leave fewer gaps, so a run can use more of the GPU's memory.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def has_nvidia_gpu() -> bool:
    """Return True if NVIDIA's driver is loaded and CUDA_VISIBLE_DEVICES does not hide all GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return Path("/dev/nvidiactl").exists() and bool(re.match(r"\d|GPU-|MIG-", visible))


def share_cores() -> None:
    """Give PyTorch and the workers of torch.compile this rank's share of the machine's cores.

    Without this, each of several ranks would take all cores, or under torchrun one.
    """
    ranks = launch().local_world_size
    if ranks > 1:
        share = str(max(1, cores() // ranks))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", share)
        if not threads_are_chosen():
            os.environ["OMP_NUM_THREADS"] = share


def cores() -> int:
    """Count the cores that this process may use.

    Two hardware threads of one core count once, as in PyTorch's own default.
    """
    siblings = set()
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has none
    for cpu in os.sched_getaffinity(0) if has_affinity else range(os.cpu_count() or 1):
        place = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            siblings.add(Path(place).read_text())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)


def retain_freed_memory() -> None:
    """Let glibc keep the memory that this process frees, for its next buffers.

    The activations and gradients of each step are large. By default glibc returns such buffers to
    the system, which zeroes them and faults them in again, page by page, in the next step.
    check.py estimates the size of the gaps between retained buffers.
    """
    if libc := _glibc():
        libc.mallopt(M_MMAP_MAX, 0)  # large buffers come from the heap too
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # the heap's end is never returned
        libc.mallopt(M_TOP_PAD, 256 * 2**20)  # the heap grows in large steps
        libc.mallopt(M_ARENA_MAX, 1)  # one heap for all threads, so that they share freed memory


def trim_memory(device: str = "cpu", steps: int = 0) -> None:
    """Return retained memory to the system after the first of the `steps` that this process has
    taken; if memory is short, always, and stop retaining it.

    The gaps that compilation and the first step leave fit no later buffer: speedup10, 4 x 1024,
    peaks at 3,483 MB without them instead of 3,685. Memory is short if less is available than half
    of the memory in use by this machine's ranks: retention may need that much more. Call this
    between two steps. Runs on a GPU skip it, as a GPU has its own memory and would wait.
    """
    ranks = launch().local_world_size
    if device == "cpu" and steps == 1:
        return_freed_memory()
    if device == "cpu" and (libc := _glibc()) and memory_left() < ranks * resident_memory() / 2:
        libc.mallopt(M_MMAP_MAX, 2**16)  # glibc sets such values itself after some large buffers
        libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        libc.mallopt(M_TRIM_THRESHOLD, 64 * 2**20)
        libc.mallopt(M_TOP_PAD, 128 * 2**10)
        return_freed_memory()


def return_freed_memory() -> None:
    """Return the memory that glibc retains so far to the system."""
    if libc := _glibc():
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc and the user has not configured its allocator.

    The size of its caches for small buffers does not count: see docs/running.md.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", SMALL_CACHES)
    is_chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if is_chosen or not tunables.startswith(SMALL_CACHES):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None


def memory_left() -> float:
    """Return the available memory in bytes; infinity if the system does not report it.

    It is the least of the machine's and of the limits of this process's cgroups (version 2).
    """

    def number(path: Path, name: str = "") -> int:
        return int(re.findall(rf"^{name}\s*(\d+)", path.read_text(), re.MULTILINE)[0])

    left = [math.inf]
    with contextlib.suppress(OSError, IndexError):
        left.append(number(Path("/proc/meminfo"), "MemAvailable:") * 1024)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        group /= Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    for place in (group, *group.parents):  # any of them may have a limit
        with contextlib.suppress(OSError, IndexError):  # "max": no limit
            used = number(place / "memory.current")
            used -= number(place / "memory.stat", "inactive_file")  # files make room
            left.append(number(place / "memory.max") - used)
    return min(left)


def resident_memory() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
