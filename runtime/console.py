"""Lines and notes of a command for its user, through one logger of Python's `logging`.

`log.info(text)` is a line, `log.debug(text)` a detail, which a ladder's runs keep for the file
alone, `log.warning(text)` a note, which begins with `note: `, and `log.error(text)` an error for
the file alone: the command prints it on stderr as it ends.
"""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TextIO

from runtime.errors import drop
from runtime.files import writing

log = logging.getLogger("gpt2")
log.setLevel(logging.DEBUG)
log.propagate = False  # libraries may give the root logger handlers of their own
log.addHandler(logging.NullHandler())  # code that opens no console prints nothing

BRIEF = "BRIEF_CONSOLE"  # environment variable: details are not printed
LEAST = logging.INFO if BRIEF in os.environ else logging.DEBUG  # level that is printed
PREFIXES = {logging.WARNING: "note: ", logging.ERROR: "error: "}


class Console(logging.Handler):
    """Context in which rank 0 prints all lines, and keeps them for a file that is opened later.

    The command continues if stdout is closed or full. A file that cannot be written raises OSError.
    """

    def __init__(self, rank: int = 0, *, on_stderr: bool = False):
        super().__init__()
        self._rank, self._on_stderr, self._path = rank, on_stderr, Path()
        self._file: TextIO = io.StringIO()  # until `open`

    def __enter__(self) -> "Console":
        if self._rank == 0:
            log.addHandler(self)
        return self

    def emit(self, record: logging.LogRecord) -> None:
        """Print and keep a record; logging's own handlers would not raise its errors."""
        text = PREFIXES.get(record.levelno, "") + record.getMessage()
        stream = sys.stderr if self._on_stderr else sys.stdout
        if stream and LEAST <= record.levelno < logging.ERROR:  # None: closed before Python started
            try:
                print(text, file=stream, flush=True)
            except OSError:
                drop(stream)
        self._keep(f"{text}\n")

    def open(self, path: Path) -> None:
        """Append all lines to a file, with the earlier ones. Raises OSError."""
        early = self._file
        self._path, self._file = path, open(path, "a", encoding="utf-8", errors="replace")  # noqa: SIM115
        if isinstance(early, io.StringIO):
            self._keep(early.getvalue())

    def _keep(self, text: str) -> None:
        with writing(self._path):
            self._file.write(text)
            self._file.flush()

    def __exit__(self, *_: object) -> None:
        log.removeHandler(self)
        with contextlib.suppress(OSError):  # a full disk was an error before
            self._file.close()


@contextlib.contextmanager
def noted(level: int = logging.WARNING) -> Iterator[list[logging.LogRecord]]:
    """Collect the records of a block from a level on: its notes."""
    collector = BufferingHandler(capacity=1000)
    collector.setLevel(level)
    log.addHandler(collector)
    try:
        yield collector.buffer
    finally:
        log.removeHandler(collector)
