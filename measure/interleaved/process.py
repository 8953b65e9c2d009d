"""Start processes that end with this one, and call functions in them. Does not import torch."""

import functools
import multiprocessing
import os
import pkgutil
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TextIO

from runtime.errors import UserError, kind_of_failure
from runtime.signals import exit_when_parent_dies


def start_process(
    command: Sequence[str], environment: Mapping[str, str], **pipes: Any
) -> tuple[subprocess.Popen[str], TextIO]:
    """Start a command with further environment variables; return it, and an open file with its
    stderr.
    """
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    process = subprocess.Popen(
        command,
        stderr=errors,
        text=True,
        env={**os.environ, **environment},
        preexec_fn=functools.partial(exit_when_parent_dies, os.getpid()),
        **pipes,
    )
    return process, errors


def why_it_failed(status: int, stderr: TextIO) -> str:
    """Return the reason of a command's failure in a line, from its exit status and its stderr."""
    stderr.seek(0)
    # torchrun's report ends with a line of `=`
    lines = [line.strip() for line in stderr if re.search(r"\w", line)]
    if errors := [line for line in lines if line.startswith("error: ")]:
        return errors[-1].removeprefix("error: ")
    if status < 0:
        of_memory = status == -signal.SIGKILL
        why = ", as the system does when memory runs out" if of_memory else ""
        return f"killed by signal {-status}{why}"
    return (lines or [f"exit status {status}"])[-1]


def in_fresh_process(function: str, *arguments: Any) -> tuple[Any, str]:
    """Call a function, `module:name`, in a fresh process: nothing is warm, peak memory is its own.

    Returns its result, or None and the reason. Ctrl-C interrupts both processes.
    """
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, context, _prepare) as pool:
            return pool.submit(call, function, *arguments).result()
    except BrokenProcessPool:
        return None, "its process was killed, as the system does when memory runs out"


def _prepare() -> None:
    exit_when_parent_dies(os.getppid())


def call(function: str, *arguments: Any) -> tuple[Any, str]:
    """Call a function, `module:name`; return its result, or None and the reason."""
    try:
        return pkgutil.resolve_name(function)(*arguments), ""
    except UserError as error:
        return None, str(error)
    except (RuntimeError, MemoryError, LookupError) as error:
        return None, kind_of_failure(error)[1]
