"""Find a corpus by its name, and write a small one that is missing."""

import shlex
from pathlib import Path

from data import pydocs, shakespeare
from data.manifest import MANIFEST, read_manifest
from data.token_file import TokenFileError
from data.vocabulary import FILE as VOCABULARY
from data.vocabulary import Vocabulary, read_vocabulary
from runtime.cli import did_you_mean
from runtime.console import log
from runtime.files import lock_file, sole_writer

WRITERS = {  # of small corpora
    "pydocs": pydocs.prepare,
    pydocs.OWN: pydocs.prepare_own,
    "shakespeare": shakespeare.prepare,
}


def prepare_if_missing(folder: Path) -> Vocabulary:
    """Write the corpus of `folder` if it is missing and small; returns its vocabulary.

    Waits for another process that is writing the corpus. Raises TokenFileError if another corpus is
    missing; the message has the command to run, and the nearest name.
    """
    waiting = f"another process is writing {folder}: waiting for it"
    write = WRITERS.get(folder.name)
    if not is_there(folder) and (write or lock_file(folder).exists()):
        with sole_writer(folder, on_wait=lambda: log.info(waiting)):
            if write and not is_there(folder):
                log.info(f"preparing {folder}")
                write(folder)
    if is_there(folder):
        return vocabulary_of(folder)
    there = {path.parent.name for path in folder.parent.glob("[!.]*/*.bin")}
    script = f"python data/text.py FILE --name {shlex.quote(folder.name)}"
    if folder.name == "fineweb":
        script = "python data/fineweb.py"
    if folder.parent != Path("data"):
        script += f" --data_dir {shlex.quote(str(folder.parent))}"
    nearest = did_you_mean(folder.name, sorted(there.union(WRITERS)))
    raise TokenFileError(
        f"{folder}: no such corpus (a folder of *.bin token files){nearest}; write it with: "
        f"{script}; or say with --data_dir which folder holds it"
    )


def known_vocabulary(folder: Path) -> Vocabulary | None:
    """Return a corpus's vocabulary; None if it is missing.

    Writes a missing one that learns its vocabulary, in seconds. Raises UserError.
    """
    known = folder.name == pydocs.OWN or is_there(folder)
    return prepare_if_missing(folder) if known else None


def vocabulary_of(folder: Path) -> Vocabulary:
    """Return the vocabulary of a corpus that is there.

    Raises UserError for a damaged one, and for another than the corpus was written in.
    """
    vocabulary, manifest = read_vocabulary(folder), read_manifest(folder)
    if manifest and manifest.vocabulary not in (None, vocabulary.identity):
        raise TokenFileError(
            f"{folder}: has {vocabulary}, but its tokens are of another vocabulary, by "
            f"{MANIFEST}; restore its {VOCABULARY}, which lay beside the token files"
        )
    return vocabulary


def is_there(folder: Path) -> bool:
    """True if a corpus has been written to the folder."""
    return any(folder.glob("*.bin"))
