"""Files and folders that are there whole or not at all, whatever happens while they are written."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or as it was. Raises OSError that names it."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with open(unfinished, "w", newline="", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise cannot_be_written(path, error) from None


def cannot_be_written(path: Path, error: OSError) -> OSError:
    """The same error with the file's name and what was tried."""
    return OSError(error.errno, f"cannot be written: {error.strerror}", str(path))


@contextlib.contextmanager
def whole_folder(folder: Path, *, replace: bool) -> Iterator[Path]:
    """A folder to fill, which gets its name once it is whole and on the disk.

    One that has the name already is deleted then, if `replace`; else it stays and FileExistsError is raised, unless it is
    empty. Raises OSError if the folder cannot be written; nothing is left of it in that case.
    """
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        flush_to_disk(unfinished)
        if replace and folder.exists():
            delete([folder])
        elif folder.is_dir() and any(folder.iterdir()):
            raise FileExistsError(17, "is there already", str(folder))
        unfinished.rename(folder)
        flush_to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # what it took of a full disk
        raise


def delete(folders: Iterable[Path]) -> None:
    """Delete folders so that half of one is never taken for a whole one."""
    for folder in folders:
        doomed = folder.with_name(f"{folder.name}.deleted.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows flushes only what is open for writing
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The checksum of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
