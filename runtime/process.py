"""What a process sets before torch is imported: how it keeps memory, and what C++ may print."""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8  # of glibc's mallopt(3)


def before_torch() -> None:
    """Settings that make steps on a CPU faster, and warnings short. What the user has set in the environment stands."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stacks in warnings
    keep_memory()


def keep_memory() -> None:
    """Let the C library keep what this process frees, for its next buffers.

    The activations and gradients of every step are large. By default glibc gives such buffers back to the system when they are
    freed, and the system zeroes them and faults them in again, page by page, at the next step.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    if mallopt:
        mallopt(M_MMAP_MAX, 0)  # large buffers come from the heap too
        mallopt(M_TRIM_THRESHOLD, -1)  # whose end is never given back
        mallopt(M_TOP_PAD, 256 * 2**20)  # and which grows in large steps
        mallopt(M_ARENA_MAX, 1)  # one heap for all threads: what one has freed serves the others
