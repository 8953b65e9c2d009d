"""What a process sets before torch is imported: how it keeps memory, where it keeps what it compiles, what C++ may print."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8  # of glibc's mallopt(3)


def before_torch() -> None:
    """Settings that make steps on a CPU and starts faster, and warnings short. What the user has set in the environment stands."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no C++ stacks in warnings
    keep_memory()
    keep_compiled()


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


def keep_compiled() -> None:
    """Let torch.compile keep what it compiles beside PyTorch's other downloads and caches, where it outlives a reboot.

    PyTorch's own place is in the system's folder for temporary files. It stays there where the user's cannot be written, and
    where its name has white space, which PyTorch hands to the C++ compiler as two names.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = Path(os.environ.get("TORCH_HOME") or caches / "torch") / "inductor"  # as torch.hub finds its own
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and not any(map(str.isspace, str(folder.absolute()))):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute())
