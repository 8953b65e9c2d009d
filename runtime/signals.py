"""Ending a run cleanly on Ctrl-C and other signals, from its first moment on, and with the command
that started it.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

from runtime.interrupt import say_at_once
from runtime.world import launch

# SIGHUP is what a closed terminal sends; SIGUSR1 or SIGUSR2 what Slurm or Grid Engine can be asked
# to send before the time is up; SIGXCPU what a limit of CPU time (`ulimit -S -t`) sends, every
# second. Windows has none of these.
SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    if hasattr(signal, name)
]
SIGXCPU = getattr(signal, "SIGXCPU", None)

# in the environment: the number of the process that started this one, see end_with
ENDS_WITH = "RUN_ENDS_WITH_PROCESS"


def end_with(process: int | None = None) -> None:
    """End this process, without saving, within a second after `process` has ended (default: the one
    that ENDS_WITH names, if any).

    So what a command started does not outlive it, however the command ended. One of several
    processes whose torchrun has been killed is asked to stop: they end as at SIGTERM.
    """
    number = process or int(os.environ.get(ENDS_WITH, "0"))
    under_torchrun = launch().call is not None and launch().world_size > 1
    if not number and not under_torchrun:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and (not number or _is_alive(number)):
            time.sleep(0.3)
        if number:
            os._exit(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def end_unfinished(summary: Mapping[str, Any], stop: "StopRequest | None") -> None:
    """End with status 1 after a run that was interrupted by a signal to other machines alone: this
    machine's torchrun, if it may start its processes again (--max_restarts), then goes on with
    those that are left or come. Raises SystemExit.
    """
    if summary.get("interrupted") and stop and stop.received is None and launch().agents > 1:
        raise SystemExit(1)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


class Stopped(SystemExit):
    """Ends a run that was asked to stop before its first step, with status 0."""


Phase = Literal["imports", "set-up", "steps"]


class StopRequest:
    """A user's wish to end the run, by Ctrl-C or one of the other SIGNALS (of these, nohup keeps
    SIGHUP ignored).

    While entered, the first such signal sets `received`, and the run ends after its step. A second
    one acts as it would outside, except SIGXCPU, which comes again by itself. In its first two
    phases a run has nothing to save: alone, it ends at once; one of several processes waits for
    `end_early`.
    """

    came = False  # whether any such signal has come to this process

    def __init__(self, phase: Phase = "steps") -> None:
        self.received: float | None = None  # when it came, on the clock time.monotonic
        self.phase = phase
        self._before: dict[Any, Any] = {}  # the handlers that were there
        self._pipe: int | None = None  # Python writes there which signals come, see _end_if_stuck
        self._answered = threading.Event()  # there is nothing left to end

    def hear(self, phase: Phase) -> "StopRequest":
        """Answer the signals from here on, as in this phase. During imports the process ends, as
        nothing could handle an exception.
        """
        self.phase = phase
        if self._pipe is None and os.name != "nt":
            reading, self._pipe = os.pipe()
            os.set_blocking(self._pipe, False)
            signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
            self._answered.clear()
            threading.Thread(target=self._end_if_stuck, args=(reading,), daemon=True).start()
        for number in SIGNALS:
            before = signal.getsignal(number)
            under_nohup = number == getattr(signal, "SIGHUP", None) and before is signal.SIG_IGN
            if number not in self._before and not under_nohup:
                self._before[number] = before or signal.SIG_DFL
                signal.signal(number, self._on_signal)
        return self

    def __enter__(self) -> "StopRequest":
        return self.hear(self.phase)

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
        self._answered.set()
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe)
            self._pipe = None

    def _end_if_stuck(self, reading: int) -> None:
        """End the process if it does not answer a second signal within three seconds: while PyTorch
        waits for another process, or the system for a disk, Python answers none.
        """
        first: float | None = None
        while came := os.read(reading, 1):
            now = time.monotonic()
            if first is None and came[0] in SIGNALS:
                first = now
            elif (
                first is not None and now - first > 1 and came[0] in SIGNALS and came[0] != SIGXCPU
            ):
                if not self._answered.wait(3):
                    say_at_once(
                        "error: stopped at once, while waiting for another process, a device or "
                        "a disk"
                    )
                    os._exit(128 + came[0])
                break
        os.close(reading)

    def end_early(self, asked: float) -> None:
        """End the run before its first step, if one of its processes was `asked` to. Raises
        Stopped.
        """
        if asked:
            if launch().rank == 0:
                say_at_once(
                    "stopped before its first step: nothing is lost, the same command starts again"
                )
            if self.phase == "imports":
                os._exit(0)
            raise Stopped(0)

    def _on_signal(self, number: int, _: Any) -> None:
        StopRequest.came = True
        if self.received is None:
            self.received = time.monotonic()
            if self.phase != "steps":
                self.end_early(launch().world_size == 1)
            elif launch().rank == 0:
                say_at_once("stopping after this step; once more to stop at once")
        elif (
            number != SIGXCPU and time.monotonic() - self.received > 1
        ):  # sooner, it is torchrun passing the same Ctrl-C on
            self.__exit__()
            signal.raise_signal(number)
