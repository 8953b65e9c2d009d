"""What the commands say when something is wrong, and the status that they end with."""

import contextlib
import os
import re
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import NoReturn, TextIO

from runtime.interrupt import raise_at_ctrl_c
from runtime.signals import StopRequest
from runtime.world import end_process, has_joined, is_first_to_tell, launch


class UserError(Exception):
    """Something the user can put right. A command prints each line of the message and ends with
    `status`.

    Notes (Exception.add_note), such as how to go on, are part of the message.
    """

    status = 2
    of_all = False  # whether every process of the run raises it, so that rank 0 tells
    found_by: int | None = None  # the rank that has found it, if that is not the one that tells

    def __str__(self) -> str:
        text = super().__str__()
        return ("\n" if "\n" in text else "; ").join([text, *getattr(self, "__notes__", [])])


class TrainingError(UserError):
    """A run that cannot go on, or another command; the message says why and what may help."""

    status = 1


def exit_with(error: UserError, status: int | None = None, *, of_others: bool = False) -> NoReturn:
    """Print each line of the error on stderr and end the process with its status.

    Of several processes one speaks. What one finds the others mostly find too: then it is rank 0,
    which ends first, and torchrun then ends the others. One that fails alone speaks before it ends,
    so those that only notice its end (`of_others`) need not.
    """
    rank = launch().rank
    if rank and error.of_all:
        time.sleep(1)  # torchrun reports the process that ends first
        end_process(error.status if status is None else status)
    if rank and not of_others:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # this is how torchrun ends it
        time.sleep(
            1 if has_joined() else 5 + (launch().local_rank > 0)
        )  # on each machine one speaks
    ended_already = (
        rank and not has_joined() and StopRequest.came
    )  # by torchrun, as another process has failed and told why
    if not ended_already and is_first_to_tell():
        found_by = rank if error.found_by is None else error.found_by
        prefix = f"error: rank {found_by}: " if found_by else "error: "
        with contextlib.suppress(OSError):  # nobody may read it
            print(
                "\n".join(prefix + line for line in str(error).splitlines()),
                file=sys.stderr,
                flush=True,
            )
    end_process(error.status if status is None else status)


@contextlib.contextmanager
def reported(
    place: str,
    *,
    status: int | None = None,
    interrupted: str = "interrupted",
    advice: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """End the process with an error line for each foreseeable way in which a command fails, and no
    traceback.

    `place` is named where the system does not say which file a fault is about; `status`, if given,
    is that of every UserError. `advice` has a message for kinds of failure (see `kind_of_failure`),
    in which {reason} stands for the cause. Where nobody reads the output any more (`| head`), a
    command that still has some ends as other Unix commands do, without a word.
    """
    try:
        raise_at_ctrl_c()
        yield
        if (fault := drop_unread(sys.stdout)) and not isinstance(fault, BrokenPipeError):
            exit_with(UserError(f"stdout: cannot be written: {fault.strerror}"), status=1)
    except UserError as error:
        exit_with(error, status)
    except KeyboardInterrupt:
        exit_with(UserError(interrupted), status=130)
    except (OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, BrokenPipeError) and error.filename is None:  # of stdout
            raise SystemExit(141) from None  # 128 + SIGPIPE
        if (said := foreseen(error, place, advice or {})) is None:
            _end_unforeseen(error)
        exit_with(
            said,
            of_others=isinstance(error, RuntimeError)
            and kind_of_failure(error)[0] == "other process",
        )
    except Exception as error:
        _end_unforeseen(error)
    finally:
        drop_unread(sys.stdout)
        drop_unread(sys.stderr)


def _end_unforeseen(error: Exception) -> NoReturn:
    """Let an error that nobody foresaw end the process with its traceback."""
    if not has_joined():
        raise error
    if is_first_to_tell():
        traceback.print_exception(error)
    end_process(1)


def foreseen(error: BaseException, place: str, advice: Mapping[str, str]) -> UserError | None:
    """What is said of an error, with its notes, if it is of a kind that can be foreseen; `place`
    and `advice` as for `reported`.
    """
    if isinstance(error, UserError):
        return error
    said = None
    if isinstance(error, OSError):
        said = TrainingError(f"{error.filename or place}: {error.strerror or error}")
    elif isinstance(error, RuntimeError | MemoryError):
        kind, reason = kind_of_failure(error)
        said = TrainingError(advice[kind].replace("{reason}", reason)) if kind in advice else None
    if said:
        said.of_all, said.found_by = (
            getattr(error, "of_all", False),
            getattr(error, "found_by", None),
        )
        for note in getattr(error, "__notes__", []):
            said.add_note(note)
    return said


def why_it_failed(status: int, stderr: TextIO) -> str:
    """Why a command failed, in a line, from its exit status and the file that its stderr went to."""
    stderr.seek(0)
    lines = [line.strip() for line in stderr if line.strip()]
    if named := [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]:
        return named[-1]
    if status < 0:
        return f"killed by signal {-status}" + (
            ", as the system does when memory runs out" if status == -9 else ""
        )
    return (lines or [f"exit status {status}"])[-1]


def drop_unread(stream: TextIO | None) -> OSError | None:
    """Why a stream takes no more output, if so: a reader that has gone, a closed terminal, a full
    disk. What is printed from then on is dropped, so that Python has nothing left to complain about
    when it ends.
    """
    try:
        if stream:
            stream.flush()
    except OSError as error:
        drop(stream)  # type: ignore[arg-type]  # it was flushed
        return error
    except ValueError:  # closed
        pass
    return None


def drop(stream: TextIO) -> None:
    """Let what is printed on the stream from here on go nowhere."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def in_a_line(error: BaseException) -> str:
    """What an error of any library says, as a part of one line: its kind and the beginning of its
    message.
    """
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return "".join(c for c in textwrap.shorten(said, 160, placeholder=" ...") if c.isprintable())


# ---- what PyTorch's errors mean

MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "Storage size calculation overflowed",
)


def kind_of_failure(error: BaseException) -> tuple[str, str]:
    """What failed, and the cause in a line: "C++", "compiler", "other process", "memory",
    "overflow", or "other".

    PyTorch has a class for some of these and only a wording for others, which differs from device
    to device.
    """
    text = str(error)
    lines = [line.strip() for line in text.splitlines()] + [type(error).__name__]
    cause = next((line for line in lines if "rror" in line), lines[0])
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return ("C++", said) if (said := _compiler_said(text)) else ("compiler", cause)
    if (
        type(error).__module__.startswith("torch.distributed")
        or type(error).__name__.startswith("Dist")
        or "gloo" in text
    ):
        return "other process", _first_sentence(text)
    if isinstance(error, MemoryError) or any(words in text for words in MEMORY):
        return "memory", "out of memory"
    if "without overflow" in text:
        return "overflow", lines[0]
    return "other", cause


HEADERS = "install Python's headers (python3-dev on Debian and Ubuntu, python3-devel on Fedora)"


def _compiler_said(text: str) -> str | None:
    """What the C++ compiler or linker said was wrong, and what to install; None where it is not to
    blame.
    """
    if "returned non-zero exit status" in text:  # Triton's C compiler, which prints for itself
        return f"the C compiler failed, its own lines stand above; if it lacks Python.h, {HEADERS}"
    if "C++ compile error" not in text:
        return None
    output = text.rpartition("Output:")[2].strip()
    said = re.search(r"((fatal )?error( C\d+)?: |cannot find -l).*", output)
    line = said[0] if said else output.partition("\n")[0]
    return f"{line.strip()}; {HEADERS if 'Python.h' in line else 'install g++ (or set CXX to a C++ compiler that works)'}"


def _first_sentence(text: str) -> str:
    """The first sentence of an error of torch.distributed, without the place in PyTorch's source
    that may stand before it.
    """
    sentence = (
        re.sub(r"^\[[^]]*:\d+\] (\S+ != \S+\. )?", "", text.strip())
        .partition("\n")[0]
        .partition(". ")[0]
        .rstrip(".")
    )
    return textwrap.shorten(sentence, 200, placeholder=" ...")
