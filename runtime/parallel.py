"""What wraps a model for training: recomputing its blocks, torch.compile, then data parallelism over the processes."""

import contextlib
import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from runtime.world import World

EVERY = 1.0  # seconds after which the time that compiling takes is shown anew


def recompute(blocks: Iterable[torch.nn.Module]) -> None:
    """From now on the blocks keep nothing but their input for the backward pass, which computes the rest again, with the same
    dropout. Only where they train: without gradients, as in evaluation and sampling, there is nothing to keep.

    In place, so that names stay plain.
    """
    for block in blocks:
        block.forward = _recomputed(block, block.forward)  # type: ignore[method-assign]


def _recomputed(block: torch.nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def forward(*inputs: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            return checkpoint(plain, *inputs, use_reentrant=False)
        return plain(*inputs)

    return forward


def parallelize(model: torch.nn.Module, blocks: Iterable[torch.nn.Module], world: World, config: Any) -> Any:
    """The model to train: recomputing its `blocks` and compiled, if the run's options (config.py's Config) say so, and averaging
    gradients over the processes, if there are several. It shares its parameters with `model`, which is for evaluation, sampling
    and saving: nothing is compiled again for their shapes, and names stay plain."""
    if config.recompute:
        recompute(blocks)
    trained: Any = torch.compile(model, mode=config.compile_mode) if config.compile else model
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


@contextlib.contextmanager
def compiling_told(say: Callable[[str], None], world: World, compiled: bool) -> Iterator[None]:
    """Meanwhile `say` that the model is being compiled, once it is; on a terminal, rank 0 shows the seconds so far too.

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
    """The seconds that compiling has taken so far, shown in one line of a terminal while it goes on."""

    def __init__(self, say: Callable[[str], None], shown: bool):
        self.say, self.shown, self.told = say, shown, False
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, _: object = None) -> None:
        """PyTorch begins to compile something."""
        if not self.told:
            self.told = True
            kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            self.say("compiling the model: a minute or more at the first start"
                     + (f"; later ones find it in {kept}" if kept else ""))
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
