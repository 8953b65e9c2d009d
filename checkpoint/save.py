"""Write checkpoints."""

import contextlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from checkpoint.files import STATE, SUMS, Tensors, write_tensors
from checkpoint.names import all_checkpoints, delete_old, step_of
from checkpoint.saved import SavedState
from data.vocabulary import FILE as VOCABULARY
from runtime.files import atomic_folder, delete, flush_to_disk, sha256, write_atomic


def write_checkpoint(
    run: Path,
    saved: SavedState,
    files: dict[str, Tensors],
    keep_last: int,
    newest: Path | None,
) -> None:
    """Write the checkpoint `saved.folder` of a run. Raises OSError.

    The `keep_last` newest checkpoints are kept. The oldest of them makes room before the new one is
    written, but never `newest`, the newest that is known to be whole.
    """

    def write_file(name: str) -> str:
        """Write a file of tensors; return the line of SHA256SUMS of this or any other file."""
        if name in files:
            write_tensors(unfinished / name, files[name])
        return f"{sha256(unfinished / name)}  {name}\n"

    with contextlib.suppress(OSError):  # the disk may still have room
        # First, as old checkpoints may fill the disk.
        delete_old(run, keep_last - 1, before=saved.step, protect=newest)
        flush_to_disk(run / "log.csv")  # a checkpoint's steps are in the log
    with atomic_folder(saved.folder, replace=True) as unfinished:
        text = json.dumps(saved.model_dump(), default=np.ndarray.tolist)  # NumPy's random state
        write_atomic(unfinished / STATE, f"{text}\n")
        names = [*files, STATE]
        if saved.vocabulary.json:
            write_atomic(unfinished / VOCABULARY, saved.vocabulary.json)
            names.append(VOCABULARY)
        with ThreadPoolExecutor() as pool:  # one is hashed while the other is flushed
            lines = pool.map(write_file, names)
        write_atomic(unfinished / SUMS, "".join(lines))
    delete_old(run, keep_last, before=saved.step + 1, protect=saved.folder)


def keep_best(folder: Path) -> None:
    best = folder.with_name(f"best_{step_of(folder):06d}")
    with atomic_folder(best, replace=True) as unfinished:
        shutil.copytree(folder, unfinished, copy_function=_link_or_copy, dirs_exist_ok=True)
    delete(path for path in all_checkpoints(folder.parent.parent, "best") if path != best)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
        flush_to_disk(Path(target))
