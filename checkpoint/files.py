"""Files of a checkpoint: their names, their checksums, JSON and safetensors."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.errors import UserError, in_a_line
from runtime.files import flush_to_disk, sha256

MODEL, OPTIMIZER = "model", "optimizer"  # each a file, <name>.safetensors; with FSDP, a folder
STATE, SUMS = "checkpoint.json", "SHA256SUMS"
Tensors = dict[str, Tensor]  # by name


class CheckpointError(UserError):
    """Report a checkpoint or weights that cannot be found, read, written or used."""


@contextlib.contextmanager
def refusing(problem: str, *errors: type[BaseException]) -> Iterator[None]:
    """Raise CheckpointError with the problem and its cause in place of these errors."""
    try:
        yield
    except errors as error:
        raise CheckpointError(f"{problem}: {in_a_line(error)}") from None


def reading(path: Path) -> contextlib.AbstractContextManager[None]:
    """Raise CheckpointError, which names the path, where it turns out to be missing or damaged."""
    return refusing(f"{path}: missing or damaged", OSError, ValueError, SafetensorError)


def verify(folder: Path, *parts: str) -> None:
    """Compare files of a checkpoint with their checksums. Raises CheckpointError.

    `parts`: what the names of the files to read for this begin with; none: all files.
    """
    with reading(folder):
        lines = (folder / SUMS).read_text(encoding="ascii").splitlines()
        sums = {folder / file: digest for digest, file in map(str.split, lines)}
        # A file without a checksum is wrong too: PyTorch reads every shard in a folder.
        for path in sorted({*sums, folder / STATE, *folder.rglob("*.safetensors")}):
            is_read = path.relative_to(folder).as_posix().startswith(parts or "")
            if is_read and sha256(path) != sums.get(path):
                raise CheckpointError(f"{path}: damaged: its checksum is not the one in {SUMS}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises CheckpointError."""
    with reading(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        return content


def read_tensors(path: Path) -> Tensors:
    """Read the tensors of a safetensors file to the CPU. Raises CheckpointError."""
    with reading(path):
        return load_file(path)


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write tensors to a safetensors file, flushed to disk. Raises OSError."""
    path.touch()
    mode = path.stat().st_mode  # by the umask; save_file's own file only its owner may read
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)
    flush_to_disk(path)
