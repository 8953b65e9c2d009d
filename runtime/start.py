"""Everything that a command does before torch is imported, in one call: `start(Options, ...)`.

It reads the options, and sets this rank's share of the cores and the memory allocator.
"""

import ctypes
import io
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
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8


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
    share_cores(cores())
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


def share_cores(count: int) -> None:
    """Give PyTorch and the workers of torch.compile this rank's share of `count` cores.

    Without this, each of several ranks would take all cores, or under torchrun one.
    """
    ranks = launch().local_world_size
    if ranks > 1:
        share = str(max(1, count // ranks))
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
    """
    if libc := _glibc():
        libc.mallopt(M_MMAP_MAX, 0)  # large buffers come from the heap too
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # the heap's end is never returned
        libc.mallopt(M_TOP_PAD, 256 * 2**20)  # the heap grows in large steps
        libc.mallopt(M_ARENA_MAX, 1)  # one heap for all threads, so that they share freed memory


def return_freed_memory() -> None:
    """Return the memory that glibc retains so far to the system.

    A run does so once, after its first step: compilation and that step leave gaps that fit no later
    buffer. speedup10, 4 x 1024, then peaks at 3,483 MB instead of 3,685.
    """
    if libc := _glibc():
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None
