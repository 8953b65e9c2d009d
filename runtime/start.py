"""All that a command does before torch is imported, in one call: `OPTIONS = start(Options, ...)`.

Ctrl-C, the options, and what the process needs for fast steps on a CPU: its share of the cores,
an allocator that keeps memory, a place for what torch.compile makes.
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
from runtime.signals import end_at_ctrl_c, end_with_parent

# Parameters of glibc's mallopt(3)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8
SMALL_CACHES = "glibc.malloc.tcache_count"


def start(options: type[O], argv: Sequence[str] | None = None, **how: Any) -> O:
    """Read the command line, as `parse_command_line` does, and set the process up."""
    values = parse_command_line(options, argv, **how)
    if launch().call is not None and launch().world_size > 1:
        end_with_parent(os.getppid())  # torchrun
    end_at_ctrl_c()  # torch is imported next: an exception would be lost in there
    set_up_process(getattr(values, "device", "auto"))
    return values


def parse_command_line(options: type[O], argv: Sequence[str] | None = None, **how: Any) -> O:
    """Read options with `parse`, which `how` goes to; None: from sys.argv.

    --help and --print_config end the process, and so do mistakes: one line each, and status 2.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model writes any character
        sys.stdout.reconfigure(errors="replace")
    with reported("stdout"):
        return parse(options, sys.argv[1:] if argv is None else argv, **how)


def set_up_process(device: str = "auto") -> None:
    """Set what has to be set before torch is imported. What the user has set stands."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stacks in warnings
    share_cores()
    if device == "cpu" or not has_nvidia_gpu():
        retain_freed_memory()
    elif not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & {*os.environ}:
        # segments that grow leave fewer gaps: more of the GPU's memory can be used
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    choose_compile_cache()


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
        # the parent started all ranks; they may have been bound to cores of their own since
        share = str(max(1, min(cores(), cores(os.getppid()) // ranks)))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", share)
        if not threads_are_chosen():
            os.environ["OMP_NUM_THREADS"] = share


def cores(pid: int = 0, system: Path = Path("/")) -> int:
    """Count the cores that a process (0: this one) may use.

    Two hardware threads of one core count once, as in PyTorch's own default.
    """
    siblings = set()
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    for cpu in os.sched_getaffinity(pid) if has_affinity else range(os.cpu_count() or 1):
        place = system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            siblings.add(place.read_text())
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
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # whose end is never returned
        libc.mallopt(M_TOP_PAD, 256 * 2**20)  # and which grows in large steps
        libc.mallopt(M_ARENA_MAX, 1)  # one heap for all threads: what one frees serves the others


def trim_memory_if_short(device: str = "cpu") -> None:
    """Return retained memory to the system, and retain no more, if memory is short.

    It is where less is left than half of what the run's ranks on this machine have: retaining
    might take that much more. Call it between two steps. A GPU has memory of its own, and would
    wait for this.
    """
    ranks = launch().local_world_size
    if device == "cpu" and (libc := _glibc()) and memory_left() < ranks * resident_memory() / 2:
        libc.mallopt(M_MMAP_MAX, 2**16)  # what glibc itself sets after some large buffers
        libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
        libc.mallopt(M_TRIM_THRESHOLD, 64 * 2**20)
        libc.mallopt(M_TOP_PAD, 128 * 2**10)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """Return the C library, if it is glibc and the user has not set its allocator up.

    Setting the size of its caches for small buffers does not count: see docs/running.md.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", SMALL_CACHES)
    is_chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if is_chosen or not tunables.startswith(SMALL_CACHES):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def memory_left(system: Path = Path("/")) -> float:
    """Return the bytes of memory that can still be had; infinity where Linux does not tell.

    The machine's, or those of this container (version 2 of cgroups), whichever are fewer.
    """

    def number(path: Path, name: str = "") -> int:
        return int(re.findall(rf"^{name}\s*(\d+)", path.read_text(), re.MULTILINE)[0])

    left = [math.inf]
    with contextlib.suppress(OSError, IndexError):
        left.append(number(system / "proc/meminfo", "MemAvailable:") * 1024)
    group = system / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        group /= (system / "proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    for place in (group, *group.parents):  # a limit may be that of any group above
        with contextlib.suppress(OSError, IndexError):  # "max": no limit
            used = number(place / "memory.current")
            used -= number(place / "memory.stat", "inactive_file")  # files make room
            left.append(number(place / "memory.max") - used)
    return min(left)


def resident_memory() -> int:
    """Return the bytes of memory that this process has; 0 where Linux does not tell."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def choose_compile_cache() -> None:
    """Let torch.compile keep its cache beside PyTorch's downloads, where it outlives a reboot.

    PyTorch's own place is in the system's folder for temporary files. It stays there where the
    user's cannot be written, or has white space in its name, which the C++ compiler would split.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(os.environ.get("TORCH_HOME") or caches / "torch") / "inductor"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and not any(map(str.isspace, str(folder.absolute()))):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute())
