"""Actions of the ranks of tests/test_fsdp.py, one after the other in one process group."""

import functools
import json
import sys
from pathlib import Path

import pytest
import torch

import checkpoint.files
import inference.sampling
from config import load_config
from data.tokenizer import END_OF_TEXT
from model import Block, Transformer
from runtime.errors import reported
from runtime.world import joined_world
from train import train


def acts():
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


def saved_again(config, world):
    """Resume a run, which has ended, in another folder: all that it does is to save its state."""
    world.on_rank0(lambda: Path(config.resume, "summary.json").unlink(missing_ok=True))
    train(config, world)


def sampled(config, world):
    """A run whose rank 1 draws other tokens than rank 0, as it may on another kind of processor."""
    real = inference.sampling.draw
    with pytest.MonkeyPatch.context() as patch:
        if world.rank:
            patch.setattr(inference.sampling, "draw", lambda *given: real(*given) and END_OF_TEXT)
        train(config, world)


def looked_at(config, world):
    """The dtypes that a run has in training: of a block's weights, of the residual stream, of the
    head's weight, and of each sum of gradients over the processes.
    """
    seen, sums = {}, []
    names = ("reduce_scatter_single", "reduce_scatter_tensor")  # the first since PyTorch 2.13
    name = next(name for name in names if hasattr(torch.distributed, name))
    real = getattr(torch.distributed, name)

    def reduce_scatter(*args, **kwargs):
        sums.append(str((args[0] if args else kwargs["output"]).dtype))
        return real(*args, **kwargs)

    def look(module, inputs, output):
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


def graphs(config, world):
    """How many graphs a run compiles. The C++ compiler would be waited for, and decides nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        train(config, world)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def not_saved(config, world):
    """Return rank 1's error if saving step 4 fails on rank 0, as on a full disk."""
    real, said = checkpoint.files.save_file, ""

    def save_file(tensors, path, **options):
        if "step_000004" in str(path):
            raise OSError(28, "No space left on device")
        real(tensors, path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.files, "save_file", save_file)
        try:
            train(config, world)
        except OSError as error:
            said = str(error)
    return world.gather(said)[1]


if __name__ == "__main__":
    acts()
