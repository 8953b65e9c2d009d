"""Tensors of which each process has a shard, as FSDP2 holds them: in memory, and on disk by
torch.distributed.checkpoint.

On disk they are a folder of safetensors files, one for each process, whose headers say which part
of each tensor they hold. So nothing is ever unpickled, as it would be from the `.metadata` of
PyTorch's own format.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import in_a_line
from runtime.files import sha256
from runtime.world import World

# torch.distributed.checkpoint's name of a process's file
SHARD = r"shard-\d{5}-model-00001-of-00001\.safetensors"


class DamagedShardsError(Exception):
    """A folder of shards that cannot be read."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether other processes have the rest of the tensor (a DTensor)."""
    return hasattr(tensor, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: its shard, which may be empty, or all of a plain one."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def write_shards(folder: Path, tensors: Mapping[str, Tensor], world: World) -> dict[str, str]:
    """Write tensors to a folder on disk, each process its own shards; of plain tensors one process
    writes each.

    Every process has to call this. Returns the checksums of all files, by name. Raises OSError on
    every process if one cannot write.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    if not tensors:
        return {}
    try:
        dcp.save(
            dict(tensors),
            storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True),
        )
    except CheckpointException as error:  # the same on every process
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise OSError(f"on rank {rank}: {cause}") from None

    def checksums() -> dict[str, str]:
        return {path.name: sha256(path) for path in folder.glob(f"shard-{world.rank + 1:05d}-*")}

    return {
        name: digest
        for own in world.gather(world.raise_on_all(checksums))
        for name, digest in own.items()
    }


def read_shards(
    folder: Path, wanted: Callable[[str], bool] = bool, like: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The tensors of the `wanted` names in a folder's safetensors files, whole or in shards of any
    number of processes.

    They are whole and on the CPU, but sharded where `like` has a sharded tensor of that name and
    shape: of these a process reads its own part alone. Raises DamagedShardsError.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    tensors: dict[str, Any] = {}
    try:
        reader = dcp.HuggingFaceStorageReader(str(folder))
        of_each: dict[str, Any] = reader.read_metadata().state_dict_metadata
        for name, stored in of_each.items():
            if wanted(name):
                if math.prod(stored.size) != sum(math.prod(chunk.sizes) for chunk in stored.chunks):
                    raise DamagedShardsError(f"{folder}: damaged: a part of {name} is missing")
                model = like.get(name) if like else None
                if model is not None and is_sharded(model) and model.shape == stored.size:
                    tensors[name] = torch.empty_like(model)
                else:
                    tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that each process reads for itself
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except DamagedShardsError:
        raise
    except (Exception, CheckpointException) as error:  # of any kind
        raise DamagedShardsError(f"{folder}: damaged ({in_a_line(error)})") from None
    return tensors
