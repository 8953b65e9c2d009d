"""The names of runs and of the folders in checkpoints/."""

import os
import re
import shlex
from pathlib import Path

from checkpoint.files import SUMS, CheckpointError
from runtime.files import delete


def find_folder(name: str, log_dir: str) -> Path:
    """Return the run called `name` in `log_dir`; without such a folder, `name` itself as a path.

    Raises CheckpointError for a file of a checkpoint.
    """
    path = Path(log_dir) / name
    if path.is_dir():
        return path
    path = Path(name)
    if path.is_file() and (path.suffix in (".safetensors", ".json") or path.name == SUMS):
        folder = shlex.quote(str(path.absolute().parent))
        raise CheckpointError(f"{name}: is only a file of a checkpoint; give its folder, {folder}")
    return path


def run_and_checkpoint(path: Path) -> tuple[Path, Path | None]:
    """Return the run's folder, and the checkpoint if the path names one.

    `path`: a run's folder, or a checkpoint in its checkpoints/.
    """
    # Not resolved: checkpoints/ may be a link to a larger disk, and the run's folder has the link.
    path = Path(os.path.abspath(path))
    is_checkpoint = re.fullmatch(r"(best|step)_\d+", path.name)
    return (path.parent.parent, path) if is_checkpoint else (path, None)


def all_checkpoints(run: Path, name: str = "best|step") -> list[Path]:
    """Return the run's checkpoints `<name>_<step>`, by step; of one step, `best` comes first.

    Raises OSError if checkpoints/ is there, such as a link to another disk, and cannot be read.
    """
    folder = run / "checkpoints"
    paths = folder.iterdir() if os.path.lexists(folder) else ()
    named = [path for path in paths if re.fullmatch(rf"({name})_\d+", path.name)]
    return sorted(sorted(named), key=step_of)


def delete_old(run: Path, keep: int, *, before: int, protect: Path | None) -> None:
    """Delete the checkpoints before a step except the `keep` newest and `protect`.

    Later ones are left alone: they are damaged, since the run did not resume from them.
    """
    counted = [path for path in all_checkpoints(run, "step") if step_of(path) < before]
    older = counted[: -keep or None]
    delete(path for path in older if protect is None or path.name != protect.name)


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint, by its folder's name."""
    return int(folder.name.rpartition("_")[2])
