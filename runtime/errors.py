"""Errors that a user can fix: how commands print them, and their exit statuses."""

import contextlib
import json
import os
import re
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn, TextIO

from runtime.launch import launch

WAIT_FOR_TORCHRUN_S = 3.0  # seconds in which torchrun ends a failing rank after another


class UserError(Exception):
    """A mistake or fault that the user can fix.

    A command prints each line of the message and exits with `status`. Notes (Exception.add_note),
    such as how to resume, are part of the message.
    """

    status = 2
    rank: int | None = None  # rank that failed, if another rank may print the error
    lost_rank = False  # True if only another rank failed, and this one noticed

    def __str__(self) -> str:
        text = super().__str__()
        return ("\n" if "\n" in text else "; ").join([text, *getattr(self, "__notes__", [])])


class TrainingError(UserError):
    """A run or another command that cannot continue; the message has the reason and a remedy."""

    status = 1


@contextlib.contextmanager
def reported(
    place: str = "stdout",
    *,
    interrupted: str = "interrupted",
    advice: Mapping[str, str] = {},
) -> Iterator[None]:
    """End the process with error lines instead of a traceback if a command fails foreseeably.

    `place` is named if the system does not name the file that failed. `advice`: messages by kind of
    failure (see `kind_of_failure`), with {reason} in them for the cause. If nobody reads the output
    any more (`| head`), a command ends silently, as other Unix commands do.
    """
    try:
        yield
        if sys.stdout:
            sys.stdout.flush()  # a full disk is an error
    except KeyboardInterrupt:
        exit_with(UserError(interrupted), 130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and error.filename is None:  # stdout
            raise SystemExit(141) from None  # 128 + SIGPIPE
        if expected := foreseen(error, place, advice):
            exit_with(expected)
        if launch().world_size == 1:
            raise
        _end("".join(traceback.format_exception(error)).rstrip("\n"), 1)
    finally:
        # Otherwise Python prints an error as it exits if the reader is gone or a disk is full.
        if sys.stdout and not sys.stdout.closed:
            try:
                sys.stdout.flush()
            except OSError:
                drop(sys.stdout)


def exit_with(error: UserError, status: int | None = None) -> NoReturn:
    """Print each line of the error on stderr and end the process."""
    rank = launch().rank if error.rank is None else error.rank
    prefix = f"error: rank {rank}: " if rank else "error: "
    lines = [prefix + line for line in str(error).splitlines()]
    _end("\n".join(lines), status or error.status, lost_rank=error.lost_rank)


def foreseen(error: BaseException, place: str, advice: Mapping[str, str]) -> UserError | None:
    """Return the UserError for a foreseeable error; `place` and `advice` as in `reported`."""
    if isinstance(error, UserError):
        return error
    kind, reason = kind_of_failure(error)
    if isinstance(error, OSError):
        message = f"{error.filename or place}: {error.strerror or error}"
    elif isinstance(error, RuntimeError | MemoryError) and kind in advice:
        message = advice[kind].replace("{reason}", reason)
    else:
        return None
    expected = TrainingError(message)
    expected.lost_rank = kind == "lost rank"
    for note in getattr(error, "__notes__", []):
        expected.add_note(note)
    return expected


# ---- one of several ranks fails


def _end(text: str, status: int, *, lost_rank: bool = False) -> NoReturn:
    """Print why this process ends, on stderr, and end it; at once if it has joined other ranks.

    torchrun reports the rank that ended first as the cause, and ends the others at once. So a rank
    that only noticed that another one is gone (`lost_rank`) waits to be ended before it prints. If
    all ranks of a machine fail together, the first one prints, and the others wait too.
    """
    if not lost_rank and (path := launch().error_file):
        # torchrun reports its root cause from this file. torch.distributed.elastic's `record`
        # writes the same, but with a traceback, and only once torch is imported.
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torchrun may end this process with it
    if launch().by_torchrun and (lost_rank or launch().local_rank > 0):
        time.sleep(WAIT_FOR_TORCHRUN_S)
    with contextlib.suppress(OSError):  # nobody may read it
        print(text, file=sys.stderr, flush=True)
    # PyTorch's threads may still wait for another rank. Python waits for these threads at its end
    # while it holds the lock that they need, so the process would hang.
    distributed = sys.modules.get("torch.distributed")
    if not (distributed and distributed.is_available() and distributed.is_initialized()):
        raise SystemExit(status)
    with contextlib.suppress(OSError, ValueError):  # nobody may read it
        sys.stdout.flush()
    os._exit(status)


# ---- the output of commands


def drop(stream: TextIO) -> None:
    """Discard all further output on a stream."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def in_a_line(error: BaseException) -> str:
    """Return the class and the beginning of an error of any library, as a part of one line."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return textwrap.shorten(text, 160, placeholder=" ...")


# ---- PyTorch's errors

OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "Storage size calculation overflowed",
)


def kind_of_failure(error: BaseException) -> tuple[str, str]:
    """Return the kind of a failure and its cause in a line.

    The kind is "compiler", "lost rank", "memory" or "other". PyTorch has a class for some of these
    and only a wording for others, which differs from device to device.
    """
    text, kind = str(error), type(error)
    if isinstance(error, MemoryError) or any(words in text for words in OUT_OF_MEMORY):
        return "memory", "out of memory"  # also in the compiler, or in NCCL
    if kind.__module__.startswith(("torch._dynamo", "torch._inductor")):
        return "compiler", _cause(getattr(error, "inner_exception", error))
    # gloo's errors begin with the path of its source file
    of_gloo = kind is RuntimeError and re.search(r"[/\\]gloo[/\\]", text)
    if kind.__module__.startswith("torch.distributed") or of_gloo:
        return "lost rank", textwrap.shorten(text, 200, placeholder=" ...")
    return "other", _cause(error)


def _cause(error: BaseException) -> str:
    """Return the line of a message that names an error, else the error's class and first line.

    A compiler's own message comes after its command.
    """
    lines = str(error).rpartition("Output:\n")[2].strip().splitlines() or [""]
    named = (line.strip() for line in lines if "rror: " in line)
    return next(named, f"{type(error).__name__}: {lines[0]}".rstrip(": "))
