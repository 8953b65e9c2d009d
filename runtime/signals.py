"""Ending a run cleanly on Ctrl-C, SIGTERM or SIGUSR1, and with the command that started it."""

import os
import signal
import threading
import time
from typing import Any

# SIGUSR1 is what Slurm can be asked to send before the time is up; Windows has none
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


ENDS_WITH = "RUN_ENDS_WITH_PROCESS"  # in the environment: the number of the process that started this one, see end_with


def end_with(process: int | None = None) -> None:
    """End this process, without saving, within a second after `process` has ended (default: the one that ENDS_WITH names, if any).

    So what a command started does not outlive it, however the command ended.
    """
    number = process or int(os.environ.get(ENDS_WITH, "0"))
    if not number:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and _is_alive(number):
            time.sleep(0.3)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


class StopRequest:
    """While entered, the first SIGINT (Ctrl-C), SIGTERM or SIGUSR1 sets `received`; a second one acts as it would outside."""

    def __init__(self, announce: bool = True) -> None:
        """`announce`: say on stderr that the request was heard."""
        self.received: float | None = None  # when it came, on the clock time.monotonic
        self.announce = announce

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: Any) -> None:
        if self.received is None:
            self.received = time.monotonic()
            if self.announce:
                os.write(2, b"\nstopping after this step; once more to stop at once\n")
        elif time.monotonic() - self.received > 1:  # sooner, it is torchrun passing the same Ctrl-C on
            self.__exit__()
            signal.raise_signal(number)
