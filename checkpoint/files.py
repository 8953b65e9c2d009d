"""Files of a checkpoint: their names, their checksums, JSON and safetensors."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.errors import UserError
from runtime.files import flush_to_disk, sha256

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
STATE, SUMS = "checkpoint.json", "SHA256SUMS"
PARTS = (MODEL, OPTIMIZER, STATE)
SHARDS = {MODEL: "model", OPTIMIZER: "optimizer"}  # with FSDP, these folders replace the files


class CheckpointError(UserError):
    """Report a checkpoint or weights that cannot be found, read, written or used."""


def verify(folder: Path, parts: Collection[str] = PARTS) -> None:
    """Compare files of a checkpoint with their checksums; no file of it may be missing.

    `parts`: which of PARTS to read for this. Raises CheckpointError.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="ascii").splitlines()
        sums = {file: digest for digest, file in (line.split("  ") for line in lines)}
        for file, digest in sums.items():
            if _part_of(file) in parts and sha256(folder / file) != digest:
                raise CheckpointError(f"{folder / file}: damaged: its checksum in {SUMS} differs")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: a file is missing or damaged: {error}") from None
    if missing := {*PARTS} - {_part_of(file) for file in sums}:
        raise CheckpointError(f"{folder / SUMS}: damaged: it lacks {', '.join(sorted(missing))}")
    # PyTorch reads every shard in a folder, so one that is left over would be read too.
    on_disk = {f"{place}/{p.name}" for place in SHARDS.values() for p in (folder / place).glob("*")}
    if unknown := on_disk - sums.keys():
        raise CheckpointError(f"{folder / min(unknown)}: damaged: {SUMS} does not name it")


def _part_of(file: str) -> str:
    """Return which of PARTS a file of a checkpoint is, or is a shard of."""
    place, _, shard = file.partition("/")
    return f"{place}.safetensors" if shard else file


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: missing or damaged: {error}") from None
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file to the CPU. Raises CheckpointError."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: missing or damaged: {error}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to a safetensors file, flushed to disk; returns its checksum.

    Raises OSError.
    """
    path.touch()
    mode = path.stat().st_mode  # by the umask; save_file's own file only its owner may read
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)
    flush_to_disk(path)
    return sha256(path)
