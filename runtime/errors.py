"""What the commands say when something is wrong, and the status that they end with."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import NoReturn

from runtime.world import launch


class UserError(Exception):
    """Something the user can put right. A command prints each line of the message and ends with `status`."""

    status = 2


class TrainingError(UserError):
    """A run that cannot go on; the message says why and what may help."""

    status = 1


def exit_with(error: UserError, status: int | None = None) -> NoReturn:
    """Print each line of the error on stderr and end the process with its status.

    Under torchrun, what one process finds the others mostly find too. Rank 0 speaks and ends first, and torchrun then ends the
    others; another rank speaks only if it is the only one that failed.
    """
    rank = launch().rank
    if rank:
        time.sleep(5)
    prefix = f"error: rank {rank}: " if rank else "error: "
    print("\n".join(prefix + line for line in str(error).splitlines()), file=sys.stderr, flush=True)
    raise SystemExit(error.status if status is None else status)


@contextlib.contextmanager
def reported(place: str, *, status: int | None = None, interrupted: str = "interrupted",
             advice: Mapping[str, str] | None = None) -> Iterator[None]:
    """End the process with an error line for each foreseeable way in which a command fails, and no traceback.

    `place` is named where the system does not say which file a fault is about; `status`, if given, is that of every UserError.
    `advice` has a message for kinds of failure (see `kind_of_failure`), in which {reason} stands for the cause.
    """
    try:
        yield
    except UserError as error:
        exit_with(error, status)
    except KeyboardInterrupt:
        exit_with(UserError(interrupted), status=130)
    except OSError as error:
        exit_with(UserError(f"{error.filename or place}: {error.strerror or error}"), status=1)
    except (RuntimeError, MemoryError) as error:
        kind, reason = kind_of_failure(error)
        if kind not in (advice or {}):
            raise
        exit_with(TrainingError((advice or {})[kind].replace("{reason}", reason)))


def kind_of_failure(error: BaseException) -> tuple[str, str]:
    """What failed, and the cause in a line: "compiler", "other process", "memory", or "other".

    PyTorch has a class for some of these and only a wording for others, which differs from device to device.
    """
    text = str(error)
    lines = [line.strip() for line in text.splitlines()] + [type(error).__name__]
    cause = next((line for line in lines if "rror" in line), lines[0])
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return "compiler", cause
    if type(error).__module__.startswith("torch.distributed") or type(error).__name__.startswith("Dist") or "gloo" in text:
        return "other process", text.rpartition("] ")[2][:60]
    if isinstance(error, MemoryError) or any(words in text for words in (
            "out of memory", "not enough memory", "can't allocate memory")):
        return "memory", "out of memory"
    return "other", cause
