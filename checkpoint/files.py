"""Files of a checkpoint: their names, checksums, JSON and tensors."""

import contextlib
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.vocabulary import FILE as VOCABULARY
from runtime.errors import UserError, in_a_line
from runtime.files import flush_to_disk, sha256

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
STATE, SUMS = "checkpoint.json", "SHA256SUMS"
Tensors = dict[str, Tensor]  # the key is the name


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
    """Raise CheckpointError, which names the path, for errors of a missing or damaged file."""
    errors = (OSError, ValueError, TypeError, RecursionError, SafetensorError)
    return refusing(f"{path}: missing or damaged", *errors)


def verify(folder: Path, *files: str) -> None:
    """Compare files of a checkpoint (default: all) with their checksums. Raises CheckpointError."""
    with reading(folder), open(folder / SUMS) as lines:
        sums = {file: digest for digest, file in map(str.split, lines)}
        # not only the listed files: a list without the weights would hide damage to them
        expected = {*(files or (*sums, MODEL, OPTIMIZER, STATE))}
        if VOCABULARY in sums or (folder / VOCABULARY).exists():
            expected.add(VOCABULARY)
        for file in sorted(expected):
            if sha256(folder / file) != sums.get(file):
                raise CheckpointError(f"{folder / file}: damaged: its checksum is not in {SUMS}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises CheckpointError."""
    with reading(path):
        if isinstance(content := json.loads(path.read_text(encoding="utf-8")), dict):
            return content
        raise TypeError("no JSON object")


def read_tensors(path: Path) -> Tensors:
    """Read the tensors of a safetensors file to the CPU. Raises CheckpointError."""
    with reading(path):
        with open(path, "rb") as file:
            if file.read(23) == b"version https://git-lfs":
                raise CheckpointError(
                    f"{path}: only a pointer of git-lfs to the file itself; run in its folder: "
                    f"git lfs pull"
                )
        return load_file(path)


@torch.no_grad()
def copy_tensors(tensors: Tensors, into: Tensors, file: Path) -> None:
    """Copy tensors that were read from a file into the tensors of a run, sharded or not.

    Raises CheckpointError unless names and shapes are the same.
    """
    shapes = {(name, tensor.shape) for name, tensor in tensors.items()}
    if differing := shapes ^ {(name, tensor.shape) for name, tensor in into.items()}:
        raise CheckpointError(f"{file}: does not fit the run: {min(differing)[0]} differs")
    for name, ours in into.items():
        theirs = tensors[name]
        if is_sharded(ours):
            from torch.distributed.tensor import distribute_tensor

            theirs = distribute_tensor(
                theirs,
                ours.device_mesh,  # type: ignore[attr-defined]
                ours.placements,  # type: ignore[attr-defined]
                src_data_rank=None,  # every rank has read the file, so nothing is sent
            )
        ours.copy_(theirs)


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write tensors to a safetensors file, flushed to disk. Raises OSError."""
    path.touch()
    mode = path.stat().st_mode  # save_file makes a file that only its owner may read
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from None
    path.chmod(mode)
    flush_to_disk(path)


# ---- tensors that FSDP2 has sharded (DTensor): each rank has a part of them


def is_sharded(tensor: Tensor) -> bool:
    """True if other ranks have the rest of the tensor."""
    return hasattr(tensor, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, which may be empty; a plain tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def gather_whole(tensors: Tensors, rank: int) -> Tensors:
    """Return whole tensors on the CPU of rank 0; nothing on other ranks.

    All ranks have to call this. A GPU has one whole tensor at a time.
    """
    whole = {}
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            tensor = tensor.full_tensor()  # type: ignore[attr-defined]
        if rank == 0:
            whole[name] = tensor.cpu()
    return whole
