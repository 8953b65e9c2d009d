"""Tensors that FSDP2 has sharded: each rank holds, writes and reads its own part of them."""

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.files import OPTIMIZER, Tensors, read_tensors, refusing
from model import GPT
from runtime.files import sha256
from runtime.world import World


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
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
    except CheckpointException as error:  # the same one on all ranks
        rank, (cause, _) = min(error.failures.items())
        raise OSError(f"on rank {rank}: {cause}") from None

    def own_lines() -> str:
        paths = folder.glob(f"shard-{world.rank + 1:05d}-*")
        return "".join(f"{sha256(path)}  {folder.name}/{path.name}\n" for path in paths)

    return "".join(world.gather(world.raise_on_all(own_lines)))


def read_part(folder: Path, part: str, model: GPT | None = None) -> Tensors:
    """Read the model's or the optimizer's tensors from a checkpoint, whole or in shards.

    They are whole and on the CPU. But of a sharded parameter of `model`, and of its averages, each
    rank reads its own shard. Raises CheckpointError.
    """
    shards = folder / part
    parameters = model.named_parameters() if model else ()
    sharded: dict[str, Tensor] = {name: p for name, p in parameters if is_sharded(p)}
    if not shards.is_dir() and not sharded:
        return read_tensors(folder / f"{part}.safetensors")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    place = shards if shards.is_dir() else folder  # which holds both parts
    tensors = {}
    # A damaged file can raise anything, and CheckpointException is no Exception.
    with refusing(f"{place}: damaged", Exception, CheckpointException):
        reader = dcp.HuggingFaceStorageReader(str(place))
        entries: dict[str, Any] = reader.read_metadata().state_dict_metadata
        for name, stored in entries.items():
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
