"""What the ranks of tests/test_fsdp.py do: actions, one after the other in one process group."""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import checkpoint.shards
import inference.sampling
import measure.summary
from checkpoint.resume import find_checkpoint
from checkpoint.shards import is_sharded, own_part
from config import Config, load_config
from data.tokenizer import END_OF_TEXT
from model import Block, Transformer
from runtime.errors import reported
from runtime.world import World, joined_world
from train import setup, train


def acts() -> None:
    """Do the actions on the command line; rank 0 writes down what they return."""
    measure.summary.matmul_tflops = lambda *_, **__: 1.0  # takes longer than the runs
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


def trained(config: Config, world: World) -> None:
    train(config, world)


def restored(config: Config, world: World) -> tuple[str, float]:
    """The checksum of all that a resumed run begins with, weights and optimizer; the share of the
    weights that this process has.
    """
    resumed, config, _ = find_checkpoint(config, world)
    assert resumed
    state = setup(config, world, resumed).state
    digest = hashlib.sha256()
    for name, tensor in sorted((state.model.state_dict() | state.optimizer_tensors()).items()):
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
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


def sums(config: Config, world: World) -> int:
    """How often a run sums gradients over the processes."""
    return len(summed(config, world))


def summed(config: Config, world: World) -> list[torch.dtype]:
    """The dtypes of the gradients that a run's FSDP sums, one for each time."""
    dtypes = []
    names = ("reduce_scatter_single", "reduce_scatter_tensor")  # the first since PyTorch 2.13
    name = next(name for name in names if hasattr(torch.distributed, name))
    real = getattr(torch.distributed, name)

    def reduce_scatter(*args: Any, **kwargs: Any) -> Any:
        dtypes.append((args[0] if args else kwargs["output"]).dtype)
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, name, reduce_scatter)
        train(config, world)
    return dtypes


def dtypes(config: Config, world: World) -> dict[str, str]:
    """The dtypes that a run has in training: of a block's weights, of the residual stream, of the
    head's weight, of the sums of gradients; and of the sharded weights.
    """
    seen: dict[str, torch.dtype] = {}

    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module.training and isinstance(module, Block):
            seen.update(block=module.mlp.c_fc.weight.dtype, residual=output.dtype)
        if module.training and isinstance(module, Transformer):
            seen["head"] = module.wte.weight.dtype

    def look_at_shards(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen["shards"] = optimizer.param_groups[0]["params"][0].dtype

    hooks = [
        torch.nn.modules.module.register_module_forward_hook(look),
        register_optimizer_step_pre_hook(look_at_shards),
    ]
    (seen["summed"],) = {*summed(config, world)}
    for hook in hooks:
        hook.remove()
    return {name: str(dtype) for name, dtype in seen.items()}


def graphs(config: Config, world: World) -> int:
    """How many graphs a run compiles."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    train(config, world)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train_to_last_save(config: Config, world: World, act: Callable[[], None]) -> None:
    """Train, and call `act` on rank 1 as step 4's checkpoint is being written."""
    real = checkpoint.shards.sha256

    def sha256(path: Path) -> str:
        if world.rank and path.parent.parent.name.startswith("step_000004."):
            act()
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.shards, "sha256", sha256)
        train(config, world)


def not_saved(config: Config, world: World) -> str:
    """What a run says whose last save fails on rank 1, as for a full disk."""

    def full() -> None:
        raise OSError(28, "No space left on device")

    try:
        train_to_last_save(config, world, full)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def killed(config: Config, world: World) -> None:
    """A run whose last save kills rank 1."""
    train_to_last_save(config, world, lambda: os.kill(os.getpid(), signal.SIGKILL))


if __name__ == "__main__":
    acts()
