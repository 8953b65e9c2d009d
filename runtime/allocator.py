"""Memory of a CPU run: keeping what a step has freed for the next step. Importing it does not import torch."""

import ctypes
import os
import sys

# glibc's mallopt(3)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8


def keep_memory() -> None:
    """Let this process keep the memory that it frees, in large pages. Call it before torch is imported; what the user has set in
    the environment stands.

    The activations and gradients of every step are large. By default the C library gives such buffers back to the system when they
    are freed, which zeroes them and faults them in again, page by page, at the next step.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch's CPU allocator then asks Linux for large pages
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    if mallopt:
        mallopt(M_MMAP_MAX, 0)  # large buffers come from the heap too
        mallopt(M_TRIM_THRESHOLD, -1)  # and the heap's end is never given back
        mallopt(M_TOP_PAD, 256 * 2**20)  # it grows in large steps
