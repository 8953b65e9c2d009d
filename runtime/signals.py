"""Ctrl-C and other signals: end a command in one line, and a run after its step; end with the
process that started this one.
"""

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runtime.launch import launch

# SIGHUP comes from a closed terminal; SIGUSR1 or SIGUSR2 from Slurm or Grid Engine, on request,
# before the time is up; SIGXCPU at a limit of CPU time (`ulimit -S -t`), every second.
SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
COPY = 1.0  # seconds in which torchrun passes on a Ctrl-C that this process has got already
STUCK = 3.0  # seconds that a process has to answer a second signal
UNHEARD = 30.0  # seconds, or three steps, that one of several ranks has to answer a first one
COMPILING = 600.0  # seconds likewise, in the first step

# In the environment: the number of the process that this one ends with, see end_with.
ENDS_WITH = "RUN_ENDS_WITH_PROCESS"


def say_at_once(line: str) -> None:
    """Write a line to stderr, also from a signal handler."""
    with contextlib.suppress(OSError):  # a closed terminal takes no more
        os.write(2, f"\n{line}\n".encode())


# ---- all commands


def end_at_ctrl_c() -> None:
    """Let Ctrl-C end this process with one line and status 130, until `raise_at_ctrl_c`.

    For the import of torch, which takes seconds. Python's own answer is an exception: inside an
    import it prints a traceback, or gets lost.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_interrupted)


def raise_at_ctrl_c() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, after `end_at_ctrl_c`."""
    if signal.getsignal(signal.SIGINT) is _end_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_interrupted(*_: object) -> None:
    if launch().local_rank == 0:
        say_at_once("error: interrupted")
    os._exit(130)


@contextlib.contextmanager
def killed_by_ctrl_c() -> Iterator[None]:
    """Let the system end this process at Ctrl-C, while Python is in a call that answers none."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_with(process: int | None = None) -> None:
    """End this process within a second after `process` has ended, however that ended.

    Default: the process that ENDS_WITH names, if any. A rank whose torchrun has been killed gets
    SIGTERM, and so saves.
    """
    number = process or int(os.environ.get(ENDS_WITH, "0"))
    started, parent = launch(), os.getppid()
    if not number and (started.call is None or started.world_size == 1):
        return

    def watch() -> None:
        while os.getppid() == parent and (not number or _is_alive(number)):
            time.sleep(0.3)
        if number:
            os._exit(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


# ---- training


class Stopped(SystemExit):
    """Ends a run that was asked to stop before its first step, with status 0."""


class StopRequest:
    """Note the signals that ask a run to stop, while entered.

    Before the first step nothing can be lost: a process alone ends at once, and one of several
    ranks in `end_early`, together with the others. From `begin_steps` on, the run ends after its
    step; a second signal acts as it would outside, except SIGXCPU, which comes again by itself.
    A rank that hears no signal, because it waits for one that died, ends all the same. nohup keeps
    SIGHUP ignored.
    """

    def __init__(self) -> None:
        self.received: float | None = None  # time.monotonic() of the first signal
        self._has_begun = False  # the first step
        self._patience = math.inf  # seconds that a signal may stay unheard
        self._handlers: dict[signal.Signals, Any] = {}  # those from before
        self._pipe: int | None = None  # Python writes the numbers of signals there

    def __enter__(self) -> "StopRequest":
        if self._pipe is not None:  # entered already
            return self
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._end_if_stuck, args=(reading,), daemon=True).start()
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if number != signal.SIGHUP or handler is not signal.SIG_IGN:
                self._handlers[number] = handler
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe)
            self._pipe = None

    def begin_step(self, seconds: Sequence[float]) -> None:
        """Stop after the current step from now on. `seconds`: those of the steps before it."""
        self._has_begun = True
        if launch().world_size > 1:
            self._patience = max(UNHEARD, 3 * seconds[-1] if seconds else COMPILING)

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
            if not self._has_begun:
                self.end_early(launch().world_size == 1)
            elif launch().rank == 0:
                say_at_once("stopping after this step; once more to stop at once")
        elif number != signal.SIGXCPU and time.monotonic() - self.received > COPY:
            self.__exit__()
            signal.raise_signal(number)

    def _end_if_stuck(self, pipe: int) -> None:
        """End the process if a first signal stays unheard, or a second one gets no answer.

        Python answers none while PyTorch waits for another rank, or the system for a disk.
        """
        first, number = math.inf, 0  # time of the first signal; the last signal
        with open(pipe, "rb", buffering=0) as signals:
            while True:
                left = first + self._patience - time.monotonic()
                unheard = self.received is None and math.isfinite(left)
                if not select.select([signals], [], [], max(0.0, left) if unheard else None)[0]:
                    if self.received is None:
                        break
                    continue
                if not (read := signals.read(1)):
                    return
                if read[0] in SIGNALS:
                    number, now = read[0], time.monotonic()
                    first = min(first, now)
                    if now - first > COPY and number != signal.SIGXCPU:
                        time.sleep(STUCK)
                        if not self._handlers:  # left
                            return
                        break
        say_at_once("error: stopped while waiting for another rank, a device or a disk")
        os._exit(128 + number)


def end_unfinished(summary: Mapping[str, Any], stop: StopRequest) -> None:
    """End with status 1 after a run that only other machines were told to stop. Raises SystemExit.

    So this machine's torchrun, given --max_restarts, starts its ranks again, with the machines
    that are left or come.
    """
    if summary.get("interrupted") and stop.received is None and launch().agents > 1:
        raise SystemExit(1)
