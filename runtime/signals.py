"""Signals: end a run after its step, and a process with its parent."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from runtime.launch import launch

# SIGHUP comes from a closed terminal; SIGUSR1 or SIGUSR2 from Slurm or Grid Engine, on request,
# before the time is up.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SAME_SIGNAL_S = 1.0  # torchrun forwards Ctrl-C: a second one within this time is the same
PR_SET_PDEATHSIG = 1  # an option of Linux's prctl(2)


def say_at_once(line: str) -> None:
    """Write a line to stderr, also from a signal handler."""
    with contextlib.suppress(OSError):  # a closed terminal takes no more
        os.write(2, f"\n{line}\n".encode())


@contextlib.contextmanager
def default_sigint() -> Iterator[None]:
    """Let the system end this process at Ctrl-C: a blocking call of PyTorch answers no signal."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def exit_when_parent_dies(parent: int) -> None:
    """Let the system send SIGTERM to this process when its parent ends, even if by kill -9.

    `parent`: its process id, as it may have ended before this call. Has no effect except on Linux.
    """
    with contextlib.suppress(AttributeError):  # no prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


# ---- training


class Stopped(SystemExit):
    """End a run that was asked to stop before its first step, with status 0."""


class StopRequest:
    """Context in which signals ask a run to stop.

    Before the first step nothing can be lost: a single process ends at once, and several ranks end
    together in `end_early`. Once `has_begun` is set, the run ends after its step; a second signal
    has the system's default action. nohup keeps SIGHUP ignored.
    """

    def __init__(self) -> None:
        self.received: float | None = None  # time.monotonic() of the first signal
        self.has_begun = False  # True from the first step on
        self._handlers: dict[signal.Signals, Any] = {}  # to restore

    def __enter__(self) -> "StopRequest":
        if self._handlers:  # entered already
            return self
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if number != signal.SIGHUP or handler is not signal.SIG_IGN:
                self._handlers[number] = handler
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def end_early(self, asked: bool) -> None:
        """End the run before its first step if any rank was asked to stop. Raises Stopped."""
        if asked:
            if launch().rank == 0:
                say_at_once(
                    "stopped before its first step: nothing is lost, the same command starts again"
                )
            raise Stopped(0)

    def _on_signal(self, number: int, _: object) -> None:
        if self.received is None:
            self.received = time.monotonic()
            if not self.has_begun:
                self.end_early(launch().world_size == 1)
            if launch().rank == 0:
                when = "after this step" if self.has_begun else "before the first step"
                say_at_once(f"stopping {when}; once more to stop at once")
        elif time.monotonic() - self.received > SAME_SIGNAL_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
