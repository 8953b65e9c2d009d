"""What wraps a model for training: recomputing its blocks, torch.compile, then data parallelism
over the processes: DDP, where each has the whole model, or FSDP2, where each has a shard of it.
"""

import contextlib
import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from runtime.world import World

EVERY = 1.0  # seconds after which the time that compiling takes is shown anew


def recompute(blocks: Iterable[torch.nn.Module]) -> None:
    """From now on the blocks keep nothing but their input for the backward pass, which computes the
    rest again, with the same dropout. Only where they train: without gradients, as in evaluation
    and sampling, there is nothing to keep.
    """
    for block in blocks:
        _replace_in_training(
            block, functools.partial(checkpoint, block.forward, use_reentrant=False)
        )


def _replace_in_training(block: torch.nn.Module, trained: Callable[..., Any]) -> None:
    """Let the block call `trained` in place of its forward where it trains. In place, so that names
    stay plain.
    """
    plain = block.forward

    @functools.wraps(plain)
    def forward(*inputs: Any) -> Any:
        return trained(*inputs) if block.training and torch.is_grad_enabled() else plain(*inputs)

    block.forward = forward


def parallelize(
    model: torch.nn.Module, blocks: Iterable[torch.nn.Module], world: World, config: Any
) -> Any:
    """The model to train, on its device: recomputing its `blocks` and compiled, if the run's
    options (config.py's Config) say so, and averaging gradients over the processes, if there are
    several. It shares its parameters with `model`, which is for evaluation, sampling and saving:
    nothing is compiled again for their shapes, and names stay plain.
    """
    blocks = [*blocks]
    if config.recompute:
        recompute(blocks)
    if config.fsdp and world.distributed:
        return _shard(model, blocks, world, config)
    model.to(world.device)
    trained: Any = torch.compile(model, mode=config.compile_mode) if config.compile else model
    return averaging(trained, world) if world.distributed else trained


def averaging(model: Any, world: World, **options: Any) -> DistributedDataParallel:
    """The model, whose gradients are averaged over the processes. `options` of DDP, such as
    `bucket_cap_mb`.
    """
    # the buffers are constants; the option has a new name since PyTorch 2.13
    known = inspect.signature(DistributedDataParallel).parameters
    options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = (
        False
    )
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **options,
    )


def _shard(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module], world: World, config: Any
) -> Any:
    """The model itself, of whose weights, gradients and optimizer state each process keeps a shard
    from now on. A block is whole only while it computes; what is in no block, such as a tied output
    head with its embedding, is whole from the forward pass to its gradients.

    Under bf16 the blocks are gathered in bfloat16, in which they compute anyway, and gradients
    summed over the processes in float32. The residual stream stays float32, as without FSDP, and so
    does what is in no block: the gradient of a frequent token's embedding is a sum of many small
    ones. No device ever holds the whole model: each part is moved there as it is sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, policy = init_device_mesh(world.device.type, (world.world_size,)), MixedPrecisionPolicy()
    if config.bf16:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in blocks:
            take_float32_input(block, world.device)
    for block in blocks:
        if config.compile:  # in place, so that FSDP's hooks stay outside
            _replace_in_training(block, torch.compile(block.forward, mode=config.compile_mode))
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh)


def take_float32_input(block: torch.nn.Module, device: torch.device) -> None:
    """Let a block whose weights are gathered in bfloat16 compute with float32 inputs wherever it is
    called, as by sampling, which has no autocast.
    """
    block.forward = functools.partial(_in_bfloat16, block.forward, device.type)
    ours: dict[type, Any] = {torch.nn.RMSNorm: _RMSNorm}
    if (
        device.type == "cpu"
    ):  # whose autocast leaves all norms alone; CUDA's takes care of LayerNorm
        ours[torch.nn.LayerNorm] = _LayerNorm
    for norm in block.modules():
        if (
            type(norm) in ours
        ):  # its class, as a forward of each one's own would be compiled for each
            norm.__class__ = ours[type(norm)]


def _in_bfloat16(plain: Callable[..., Any], device: str, *inputs: Any) -> Any:
    with torch.autocast(
        device, dtype=torch.bfloat16
    ):  # made here: one for each block would be compiled for each
        return plain(*inputs)


class _LayerNorm(torch.nn.LayerNorm):
    """LayerNorm that takes weights of another dtype than its input's."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class _RMSNorm(torch.nn.RMSNorm):
    """The same of RMSNorm, which would warn and be slow."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def gradients_averaged(model: Any, now: bool) -> contextlib.AbstractContextManager:
    """Around forward and backward of a micro-step: DDP and FSDP average the gradients over the
    processes only if `now`, which is in the last micro-step. It has to cover the forward too: DDP
    decides there.
    """
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(now)
    return (
        model.no_sync()
        if isinstance(model, DistributedDataParallel) and not now
        else contextlib.nullcontext()
    )


@contextlib.contextmanager
def compiling_told(say: Callable[[str], None], world: World, compiled: bool) -> Iterator[None]:
    """Meanwhile `say` that the model is being compiled, once it is; on a terminal, rank 0 shows the
    seconds so far too.

    Compiling begins in the first step, and may take minutes in which nothing else is heard.
    """
    if not compiled:
        yield
        return
    from torch._dynamo.callback import callback_handler

    progress = _Progress(say, shown=bool(sys.stderr) and sys.stderr.isatty() and world.rank == 0)
    callback_handler.register_start_callback(progress.start)
    callback_handler.register_end_callback(progress.end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(progress.start)
        callback_handler.remove_end_callback(progress.end)


class _Progress:
    """The seconds that compiling has taken so far, shown in one line of a terminal while it goes
    on.
    """

    def __init__(self, say: Callable[[str], None], shown: bool):
        self.say, self.shown, self.told = say, shown, False
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, _: object = None) -> None:
        """PyTorch begins to compile something."""
        if not self.told:
            self.told = True
            kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            self.say(
                "compiling the model: a minute or more at the first start"
                + (f"; later ones find it in {kept}" if kept else "")
            )
        if self.shown:
            self.ended.clear()
            self.thread = threading.Thread(target=self._show, args=(time.monotonic(),), daemon=True)
            self.thread.start()

    def end(self, _: object = None) -> None:
        """PyTorch has compiled it, or failed to."""
        self.ended.set()
        if self.thread:
            self.thread.join()  # so that what is printed next finds an empty line
            self.thread = None

    def _show(self, begun: float) -> None:
        width = 0
        while not self.ended.wait(EVERY):
            line = f"compiling: {time.monotonic() - begun:.0f} s"
            width = len(line)
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
        print(f"\r{' ' * width}\r", end="", file=sys.stderr, flush=True)
