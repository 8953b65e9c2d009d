"""Actions of the ranks of tests/test_fsdp.py, one after the other in one process group."""

import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint.save
import inference.sampling
from checkpoint.files import gather_whole, own_part
from config import Config, load_config
from data.tokenizer import END_OF_TEXT
from model import Block, Transformer
from run.start import find_checkpoint
from runtime.errors import reported
from runtime.world import World, joined_world
from train import setup, train


def acts() -> None:
    """Do the actions on the command line; rank 0 writes their results to a file."""
    with (
        reported("here", advice={"lost rank": "another process died"}),
        joined_world(torch.device("cpu"), 600) as world,
    ):
        results = [
            globals()[action](load_config(**options), world)
            for action, options in json.loads(sys.argv[1])
        ]
        if world.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(results))


def restored(config: Config, world: World) -> tuple[str, float]:
    """The checksum of all that a resumed run begins with, weights and optimizer; the share of the
    weights that this process has.
    """
    resumed, config, _ = find_checkpoint(config, world)
    assert resumed
    state = setup(config, world, resumed).state
    digest = hashlib.sha256()
    for tensors in state.tensors().values():
        for name, whole in sorted(gather_whole(tensors, rank=0).items()):
            digest.update(name.encode() + whole.numpy().tobytes())
    own = sum(own_part(p).numel() for p in state.model.parameters())
    return digest.hexdigest(), own / state.model.num_parameters()


def sampled(config: Config, world: World) -> None:
    """A run whose rank 1 draws other tokens than rank 0, as it may on another kind of processor."""
    real = inference.sampling.draw
    with pytest.MonkeyPatch.context() as patch:
        if world.rank:
            patch.setattr(inference.sampling, "draw", lambda *given: real(*given) and END_OF_TEXT)
        train(config, world)


def looked_at(config: Config, world: World) -> dict[str, Any]:
    """The dtypes that a run has in training: of a block's weights, of the residual stream, of the
    head's weight, and of each sum of gradients over the processes.
    """
    seen: dict[str, Any] = {}
    sums: list[str] = []
    names = ("reduce_scatter_single", "reduce_scatter_tensor")  # the first since PyTorch 2.13
    name = next(name for name in names if hasattr(torch.distributed, name))
    real = getattr(torch.distributed, name)

    def reduce_scatter(*args: Any, **kwargs: Any) -> Any:
        sums.append(str((args[0] if args else kwargs["output"]).dtype))
        return real(*args, **kwargs)

    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module.training and isinstance(module, Block):
            seen.update(block=str(module.mlp.c_fc.weight.dtype), residual=str(output[0].dtype))
        if module.training and isinstance(module, Transformer):
            seen["head"] = str(module.wte.weight.dtype)

    hook = torch.nn.modules.module.register_module_forward_hook(look)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, name, reduce_scatter)
        train(config, world)
    hook.remove()
    return {**seen, "sums": sums}


def graphs(config: Config, world: World) -> int:
    """How many graphs a run compiles. The C++ compiler would be waited for, and decides nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        train(config, world)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def not_saved(config: Config, world: World) -> str:
    """Return rank 1's error if saving step 4 fails on rank 0, as on a full disk."""
    real = checkpoint.save.sha256

    def sha256(path: Path) -> str:
        if path.parent.name.startswith(".step_000004."):
            raise OSError(28, "No space left on device")
        return real(path)

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.save, "sha256", sha256)
        try:
            train(config, world)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return world.gather(said)[1]


if __name__ == "__main__":
    acts()
