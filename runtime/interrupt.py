"""Ending a command at Ctrl-C while it still imports. This imports next to nothing itself, so that
it comes early.
"""

import _signal as signal  # type: ignore[import-not-found]  # the part of `signal` that Python has at hand: the rest imports enum, which takes milliseconds
import os


def end_at_ctrl_c() -> None:
    """Let Ctrl-C end this process with a line and status 130 while a command imports;
    `raise_at_ctrl_c` ends that.

    Python's own answer is an exception, which an import cannot handle: it prints a traceback, or is
    lost.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_interrupted)


def raise_at_ctrl_c() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, after `end_at_ctrl_c`."""
    if signal.getsignal(signal.SIGINT) is _end_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say_at_once(line: str) -> None:
    """Write a line to stderr, also from a signal handler."""
    try:  # noqa: SIM105
        os.write(2, f"\n{line}\n".encode())
    except OSError:  # a closed terminal takes no more
        pass


def _end_interrupted(*_: object) -> None:
    say_at_once("error: interrupted")
    os._exit(130)
