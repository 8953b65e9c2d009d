"""Finding a corpus by its name, and preparing a small one the first time it is asked for."""

import importlib
from collections.abc import Callable
from pathlib import Path

from data.token_file import TokenFileError
from runtime.cli import did_you_mean

SMALL_CORPORA = ("pydocs", "shakespeare")  # prepared when first asked for


def prepare_if_missing(folder: Path, say: Callable[[str], None]) -> None:
    """Write the corpus of `folder` if it is a small one that is not there yet, telling `say`.

    Raises TokenFileError, naming the nearest corpus and what to run, if it is another one that is not there.
    """
    if any(folder.glob("*.bin")):
        return
    if folder.name not in SMALL_CORPORA:
        there = {path.parent.name for path in folder.parent.glob("*/*.bin")}
        script = "python data/fineweb.py" if folder.name == "fineweb" else f"python data/text.py FILE --name {folder.name}"
        nearest = did_you_mean(folder.name, sorted(there.union(SMALL_CORPORA)))
        raise TokenFileError(f"{folder}: no such corpus (a folder of *.bin token files){nearest}; write it with: {script}")
    say(f"preparing {folder}")
    importlib.import_module(f"data.{folder.name}").prepare(folder)
