"""Write files and folders atomically, one writer at a time."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock

from runtime.errors import UserError


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's content at once: a crash leaves the old or the new. Raises OSError.

    Follows symlinks; writes directly to devices and pipes.
    """
    with writing(path):
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8", newline="")
            return
        target = path.resolve()
        unfinished = target.with_name(f"{target.name}.tmp")
        unfinished.write_text(text, encoding="utf-8", newline="")
        flush_to_disk(unfinished)
        unfinished.replace(target)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file's content at once; a dataclass is written as its fields by name."""
    text = json.dumps(content, indent=1, default=dataclasses.asdict) + "\n"
    # a list of numbers takes one line
    write_atomic(path, re.sub(r'\[\n[^][{}"]*\]', lambda match: " ".join(match[0].split()), text))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an OSError that names the file and the failed operation in place of any other."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from None


def unfinished_folder(folder: Path) -> Path:
    """Return the hidden folder that is filled before it gets the name of `folder`."""
    return folder.with_name(f".{folder.name}.unfinished")


@contextlib.contextmanager
def atomic_folder(folder: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a folder to fill, which gets its name once it is complete and flushed to the disk.

    Call it as the folder's `sole_writer`: a folder that a killed writer left unfinished is deleted
    first. With `replace`, an existing folder of that name is deleted at the end; without,
    OSError is raised unless it is empty. After any error the new folder is deleted.
    """
    unfinished = unfinished_folder(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for place in [*unfinished.rglob("*"), unfinished]:
            flush_to_disk(place)
        if replace and os.path.lexists(folder):  # True for a broken link too
            delete([folder])
        unfinished.rename(folder)
        flush_to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # it may have filled the disk
        raise


@contextlib.contextmanager
def sole_writer(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the right to write a file or folder, which one process has at a time until it ends.

    If another process has it, call `on_wait` once and wait; without `on_wait`, raise
    UserError. May be nested. Raises OSError if the lock file cannot be made.
    """
    lock_path = lock_file(path)
    with writing(path):  # filelock would wait for the lock's file
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        lock_path.touch()
    lock = filelock.FileLock(lock_path, is_singleton=True)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        if on_wait is None:
            raise UserError(
                f"{path}: another process is writing it; wait for it, or choose another name"
            ) from None
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        if lock.lock_counter == 1:  # delete it while held: a waiting process then makes a new one
            lock_path.unlink(missing_ok=True)
        lock.release()


def lock_file(path: Path) -> Path:
    """Return the lock file of `sole_writer`, for a link its target's. A killed writer leaves the
    file, unlocked.
    """
    path = path.resolve()
    return path.with_name(f".{path.name}.lock")


def delete(folders: Iterable[Path]) -> None:
    """Delete folders. Of a link only the link is deleted: its target may belong to another run."""
    for folder in folders:
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)


def aside(path: Path) -> Path:
    """Return the first free name `<name>.1`, `<name>.2`, ... to move a path to."""
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
