"""Write files and folders that are there whole or not at all, whatever happens meanwhile."""

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

MARK = ".unfinished"  # a file in the folders that `whole_folder` fills: no other is ever deleted


class BeingWrittenError(OSError):
    """Another process is writing the folder."""


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content at once: a crash leaves the old or the new. Raises OSError.

    Of a link, what it leads to is replaced. What is no file, such as a device, is written to.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", newline="")
        else:
            _replace(path.resolve(), text)
    except OSError as error:
        raise cannot_be_written(path, error) from None


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with open(unfinished, "w", newline="", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def cannot_be_written(path: Path, error: OSError) -> OSError:
    """Return the same error with the file's name and what was tried."""
    return OSError(error.errno, f"cannot be written: {error.strerror}", str(path))


@contextlib.contextmanager
def whole_folder(folder: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a folder to fill, which gets its name once it is complete and flushed to the disk.

    With `replace`, a folder that has the name already is deleted then; without, FileExistsError
    is raised unless it is empty. After any error nothing is left of the new folder.
    """
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    discard(unfinished)
    unfinished.mkdir(parents=True)
    try:
        (unfinished / MARK).touch()
        yield unfinished
        for place in [*unfinished.rglob("*/"), unfinished]:
            flush_to_disk(place)
        if replace and os.path.lexists(folder):  # also a link that leads nowhere
            delete([folder])
        elif folder.is_dir() and any(folder.iterdir()):
            raise FileExistsError(errno.EEXIST, "is there already", str(folder))
        (unfinished / MARK).unlink()
        unfinished.rename(folder)
        flush_to_disk(folder)
        flush_to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # it may have filled the disk
        raise


def discard(unfinished: Path) -> None:
    """Delete a folder if `whole_folder` began it, or if it is empty."""
    if (unfinished / MARK).is_file():
        shutil.rmtree(unfinished, ignore_errors=True)
    delete_empty([unfinished])


@contextlib.contextmanager
def sole_writer(folder: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the right to write a folder, which one process has at a time until it ends or dies.

    What dead writers left in `whole_folder` is deleted first. If another process has the right,
    call `on_wait` once and wait; without `on_wait`, raise BeingWrittenError. May be nested.
    """
    with contextlib.ExitStack() as stack:
        try:
            outermost = stack.enter_context(locked(lock_file(folder), patience=0))
        except filelock.Timeout:
            if on_wait is None:
                message = "another process is writing it"
                raise BeingWrittenError(errno.EBUSY, message, str(folder)) from None
            on_wait()
            outermost = stack.enter_context(locked(lock_file(folder), patience=-1))
        for other in list(folder.parent.iterdir()) if outermost else []:
            if re.fullmatch(rf"{re.escape(folder.name)}\.\d+\.tmp", other.name):
                discard(other)
        yield


def lock_file(folder: Path) -> Path:
    """Return the file that `sole_writer` holds locked. A dead writer leaves it, unlocked."""
    return folder.parent / f".{folder.name}.lock"


@contextlib.contextmanager
def locked(path: Path, patience: float) -> Iterator[bool]:
    """Hold a lock file, as one process at a time can; yields False if nested in itself.

    Afterwards the file is gone, and so are parents made for it that are empty. Raises
    filelock.Timeout after `patience` seconds (-1: never), OSError if the file cannot be made.
    """
    path = path.absolute()
    made = missing_parents(path)
    lock = filelock.FileLock(path, is_singleton=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # raises where no file can be made; there filelock would wait for one
        with lock.acquire(timeout=patience):
            outermost = lock.lock_counter == 1
            try:
                yield outermost
            finally:
                if outermost:  # deleted while held: who waits for it then makes a new one
                    path.unlink(missing_ok=True)
    finally:
        delete_empty(made)


def missing_parents(path: Path) -> list[Path]:
    """Return the folders above a path that have to be made, the innermost first."""
    return [parent for parent in path.parents if not parent.exists()]


def delete_empty(folders: Iterable[Path]) -> None:
    """Delete those of the folders that are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def delete(folders: Iterable[Path]) -> None:
    """Delete folders so that half of one is never taken for a whole one. Of a link only the link
    goes: what it leads to was put there by hand, or belongs to another run.
    """
    for folder in folders:
        if folder.is_symlink():
            folder.unlink()
            continue
        doomed = folder.with_name(f"{folder.name}.deleted.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def aside(path: Path) -> Path:
    """Return where to move a path so that its name is free: the first free `<name>.1`, `.2`, ..."""
    names = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    return next(free for free in names if not os.path.lexists(free))


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the checksum of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
