"""Files and folders that are there whole or not at all, whatever happens while they are written."""

import contextlib
import errno
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import filelock


class BeingWrittenError(OSError):
    """Another process is writing the folder."""


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or as it was, and nothing else. Raises OSError that
    names it.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with open(unfinished, "w", newline="", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise cannot_be_written(path, error) from None


def cannot_be_written(path: Path, error: OSError) -> OSError:
    """The same error with the file's name and what was tried."""
    return OSError(error.errno, f"cannot be written: {error.strerror}", str(path))


@contextlib.contextmanager
def whole_folder(folder: Path, *, replace: bool) -> Iterator[Path]:
    """A folder to fill, which gets its name once it is whole and on the disk.

    One that has the name already is deleted then, if `replace`; else it stays and FileExistsError
    is raised, unless it is empty. Raises OSError if the folder cannot be written; nothing is left
    of it in that case.
    """
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        for place in [*unfinished.rglob("*/"), unfinished]:  # the folders in it too
            flush_to_disk(place)
        if replace and (folder.exists() or folder.is_symlink()):  # also a link that leads nowhere
            delete([folder])
        elif folder.is_dir() and any(folder.iterdir()):
            raise FileExistsError(17, "is there already", str(folder))
        unfinished.rename(folder)
        flush_to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # what it took of a full disk
        raise


@contextlib.contextmanager
def sole_writer(folder: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the right to write a folder, whose parents are made: one process has it at a time, and
    none once it has died.

    What writers that died left of the folder (see `whole_folder`) is deleted first; afterwards
    nothing is there but what was written. Where another process has the right, `on_wait` is called
    once and then waited for it; without `on_wait`, BeingWrittenError is raised. May be entered
    again by who has it. Raises OSError if nothing can be written there.
    """
    with contextlib.ExitStack() as stack:
        try:
            outermost = stack.enter_context(locked(lock_file(folder), patience=0))
        except filelock.Timeout:
            if on_wait is None:
                raise BeingWrittenError(
                    errno.EBUSY, "another process is writing it", str(folder)
                ) from None
            on_wait()
            outermost = stack.enter_context(locked(lock_file(folder), patience=-1))
        for other in [*folder.parent.iterdir()] if outermost else []:
            if re.fullmatch(rf"{re.escape(folder.name)}\.\d+\.tmp", other.name):
                shutil.rmtree(other, ignore_errors=True)
        yield


def lock_file(folder: Path) -> Path:
    """The file that the folder's writer holds locked (see `sole_writer`). A writer that died leaves
    it behind, unlocked.
    """
    return folder.parent / f".{folder.name}.lock"


@contextlib.contextmanager
def locked(path: Path, patience: float) -> Iterator[bool]:
    """Hold a lock file, whose parents are made: one process has it at a time, and none once it has
    died.

    Afterwards the file is gone, and so are the folders that were made for it, if nothing else is in
    them. May be entered again by who has it: what is given tells whether this is the outermost
    time. Raises filelock.Timeout after `patience` seconds (-1: never), OSError if no such file can
    be made.
    """
    made = missing_parents(path)
    lock = filelock.FileLock(path, is_singleton=True)
    try:
        try:
            lock.acquire(timeout=patience)
        except (
            FileNotFoundError
        ):  # another process failed at this moment, and has taken back the parent that it had made
            lock.acquire(timeout=patience)
        outermost = lock.lock_counter == 1
        try:
            yield outermost
        finally:
            # deleted while held: who waits for it finds that the file has lost its name, and makes
            # a new one
            if outermost:
                with contextlib.suppress(OSError):
                    path.unlink()
            lock.release()
    finally:
        delete_empty(made)


def missing_parents(path: Path) -> list[Path]:
    """The folders that have to be made before a path, the innermost first."""
    return [parent for parent in path.parents if not parent.exists()]


def delete_empty(folders: Iterable[Path]) -> None:
    """Delete folders as far as nothing is in them."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def delete(folders: Iterable[Path]) -> None:
    """Delete folders so that half of one is never taken for a whole one. Of a link only the link
    goes.
    """
    for folder in folders:
        # what it leads to is another's: put there by hand, such as on another disk, or by another
        # run
        if folder.is_symlink():
            folder.unlink()
            continue
        doomed = folder.with_name(f"{folder.name}.deleted.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def aside(path: Path) -> Path:
    """Where to move what has this name, so that the name is free: the first of `<name>.1`, `.2`,
    ... that is not there.
    """
    return next(
        free
        for n in itertools.count(1)
        if not os.path.lexists(free := path.with_name(f"{path.name}.{n}"))
    )


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(
        path, os.O_RDWR if os.name == "nt" else os.O_RDONLY
    )  # Windows flushes only what is open for writing
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The checksum of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
