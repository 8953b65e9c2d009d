"""Finding a corpus by its name, and preparing a small one the first time it is asked for."""

import importlib
import shlex
from pathlib import Path

from data.manifest import how_to_finish
from data.token_file import TokenFileError, corpus_writer
from runtime.cli import did_you_mean
from runtime.files import lock_file

SMALL_CORPORA = ("pydocs", "shakespeare")  # prepared when first asked for


def prepare_if_missing(folder: Path) -> None:
    """Write the corpus of `folder` if it is missing and a small one.

    Waits for another process that is writing the corpus. Raises TokenFileError if it is missing and
    not a small one, or not finished; the message has the command to run, and the corpus with the
    nearest name.
    """
    if is_there(folder):
        return
    is_small = folder.name in SMALL_CORPORA
    if is_small or lock_file(folder).exists():
        with corpus_writer(
            folder,
            on_wait=lambda: print(
                f"another process is writing {folder}: waiting for it", flush=True
            ),
        ):
            if is_there(folder):
                return
            if is_small:
                print(f"preparing {folder}", flush=True)
                importlib.import_module(f"data.{folder.name}").prepare(folder)
                return
    if problem := how_to_finish(folder):
        raise TokenFileError(f"{folder}: {problem}")
    corpora = {path.parent for path in folder.parent.glob("*/*.bin")}
    there = {corpus.name for corpus in corpora if corpus.suffix not in (".tmp", ".unfinished")}
    script = f"python data/text.py FILE --name {shlex.quote(folder.name)}"
    if folder.name == "fineweb":
        script = "python data/fineweb.py"
    if folder.parent != Path("data"):
        script += f" --data_dir {shlex.quote(str(folder.parent))}"
    nearest = did_you_mean(folder.name, sorted(there.union(SMALL_CORPORA)))
    raise TokenFileError(
        f"{folder}: no such corpus (a folder of *.bin token files){nearest}; write it with: "
        f"{script}; or say with --data_dir which folder holds it"
    )


def is_there(folder: Path) -> bool:
    """True if a corpus has been written to the folder."""
    return any(folder.glob("*.bin"))
