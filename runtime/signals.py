"""Ending a run cleanly on Ctrl-C, SIGTERM or SIGUSR1."""

import os
import signal
import time
from typing import Any

# SIGUSR1 is what Slurm can be asked to send before the time is up; Windows has none
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


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
