"""What wraps a model for training: torch.compile, then data parallelism over the processes."""

import contextlib
import inspect
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from runtime.world import World


def parallelize(model: torch.nn.Module, world: World, compile_mode: str | None) -> Any:
    """The model to train: compiled, if there is a mode of torch.compile, and averaging gradients over the processes, if there are
    several. It shares its parameters with `model`, which is for evaluation, sampling and saving: nothing is compiled again for
    their shapes, and names stay plain."""
    trained: Any = torch.compile(model, mode=compile_mode) if compile_mode else model
    if world.distributed:
        # the buffers are constants; the option has a new name since PyTorch 2.13
        known = inspect.signature(DistributedDataParallel).parameters
        options: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
        trained = DistributedDataParallel(trained, device_ids=[world.device.index] if world.device.type == "cuda" else None,
                                          gradient_as_bucket_view=True, **options)
    return trained


def gradients_averaged(model: Any, now: bool) -> contextlib.AbstractContextManager:
    """Around forward and backward of a micro-step: DDP averages the gradients over the processes only if `now`, which is in the
    last micro-step. It has to cover the forward too: DDP decides there."""
    return contextlib.nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()
