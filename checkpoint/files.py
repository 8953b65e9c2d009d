"""Files of a checkpoint: their names, their checksums, JSON and tensors, whole or in shards."""

import contextlib
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import GPT
from runtime.errors import UserError, in_a_line
from runtime.files import flush_to_disk, sha256
from runtime.world import World

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
    return refusing(f"{path}: missing or damaged", OSError, ValueError, TypeError, SafetensorError)


def verify(folder: Path, *parts: str) -> None:
    """Compare files of a checkpoint with their checksums. Raises CheckpointError.

    `parts`: what the names of the files to read for this begin with; none: all files.
    """
    with reading(folder), open(folder / SUMS) as lines:
        sums = {folder / file: digest for digest, file in map(str.split, lines)}
        # A file without a checksum is wrong too: PyTorch reads every shard in a folder.
        for path in sorted({*sums, folder / STATE, *folder.rglob("*.safetensors")}):
            is_read = path.relative_to(folder).as_posix().startswith(parts or "")
            if is_read and sha256(path) != sums.get(path):
                raise CheckpointError(f"{path}: damaged: its checksum is not the one in {SUMS}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises CheckpointError."""
    with reading(path):
        return {**json.loads(path.read_text(encoding="utf-8"))}  # TypeError: not an object


def read_tensors(path: Path) -> Tensors:
    """Read the tensors of a safetensors file to the CPU. Raises CheckpointError."""
    refuse_pointer(path)
    with reading(path):
        return load_file(path)


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError for a file that git-lfs has not downloaded, or that is missing."""
    with reading(path), open(path, "rb") as file:
        is_pointer = file.read(23) == b"version https://git-lfs"
    if is_pointer:
        raise CheckpointError(
            f"{path}: only a pointer of git-lfs to the file itself; run in its folder: git lfs pull"
        )


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write tensors to a safetensors file, flushed to disk. Raises OSError."""
    path.touch()
    mode = path.stat().st_mode  # by the umask; save_file's own file only its owner may read
    try:
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
    except SafetensorError as error:
        raise OSError(str(error)) from None
    path.chmod(mode)
    flush_to_disk(path)


# ---- tensors that FSDP2 has sharded: each rank holds, writes and reads its own part of them


def is_sharded(tensor: Tensor) -> bool:
    """True if other ranks hold the rest of the tensor (a DTensor)."""
    return hasattr(tensor, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, which may be empty; a plain tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def write_shards(folder: Path, tensors: Tensors, world: World) -> str:
    """Write tensors, each rank its own shards; of plain tensors one rank writes each.

    All ranks have to call this. Returns the lines of all files in SHA256SUMS. Raises OSError or
    TrainingError on all ranks if one cannot write.
    """
    import torch.distributed.checkpoint as dcp

    try:
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
    except dcp.CheckpointException as error:  # the same one on all ranks
        rank, (cause, _) = min(error.failures.items())
        raise OSError(f"on rank {rank}: {cause}") from None

    def own_lines() -> str:
        return "".join(
            f"{sha256(path)}  {folder.name}/{path.name}\n"
            for path in folder.glob(f"shard-{world.rank + 1:05d}-*")
        )

    return "".join(world.gather(world.raise_on_all(own_lines)))


def read_part(folder: Path, part: str, model: GPT | None = None) -> Tensors:
    """Read the model's or the optimizer's tensors from a checkpoint, whole or in shards.

    They are whole and on the CPU. But of a sharded parameter of `model`, and of its averages, each
    rank reads its own shard. Raises CheckpointError.
    """
    place = folder / part
    parameters = model.named_parameters() if model else ()
    sharded: dict[str, Tensor] = {name: p for name, p in parameters if is_sharded(p)}
    if not place.is_dir():
        if not sharded:
            return read_tensors(folder / f"{part}.safetensors")
        place = folder  # which holds the files of both parts
    import torch.distributed.checkpoint as dcp

    tensors = {}
    # A damaged file can raise anything, and CheckpointException is no Exception.
    with refusing(f"{place}: damaged", Exception, dcp.CheckpointException):
        reader: Any = dcp.HuggingFaceStorageReader(str(place))
        for name, stored in reader.read_metadata().state_dict_metadata.items():
            # NaN: what no shard holds would stay as it is, and must not pass for weights.
            if ("/" in name) == (part == OPTIMIZER):
                ours = sharded.get(name.partition("/")[0])
                if ours is None or ours.shape != stored.size:
                    ours = torch.empty(stored.size)
                tensors[name] = torch.full_like(ours, math.nan, dtype=stored.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that each rank reads by itself
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
