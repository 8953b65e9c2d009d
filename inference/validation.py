"""The validation loss: the mean over the same tokens each time, each exactly once."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from dataloader import TokenStream
from model import GPT
from runtime.start import trim_memory_if_short
from runtime.world import World

Autocast = Callable[[], contextlib.AbstractContextManager]
Progress = Callable[[float], None]  # called with the share that is done


def ignore_progress(_: float) -> None:
    pass


@contextlib.contextmanager
def evaluating(model: GPT) -> Iterator[None]:
    """The model without dropout and without gradients; afterwards it trains on, if it did."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def validation_loss(
    model: GPT,
    stream: TokenStream,
    batch_size: int,
    tokens: int | None,
    world: World,
    autocast: Autocast = contextlib.nullcontext,
    progress: Progress = ignore_progress,
) -> float:
    """Mean loss in nats per token over the first `tokens` of the stream (none: all), in whole
    sequences, at least one.

    Give the model without torch.compile, which would compile again for the last, smaller batch.
    Every process has to call this, and every one gets the mean over all.
    """
    sequences = count_sequences(stream, tokens)
    total = 0.0
    own, most = range(world.rank, sequences, world.world_size), -(-sequences // world.world_size)
    with evaluating(model):
        for first in range(0, most, batch_size):
            trim_memory_if_short()
            batch = own[first : first + batch_size]
            # with FSDP a process that has no more sequences still has to take part: with any, which
            # does not count
            x, y = (t.to(world.device) for t in stream.read(batch or range(1)))
            with autocast():
                loss = model(x, y)
            total += loss.item() * len(batch)
            progress(min(1.0, (first + batch_size) / most))
    return world.sum(total) / sequences


def count_sequences(stream: TokenStream, tokens: int | None) -> int:
    return len(stream) if tokens is None else min(len(stream), max(1, tokens // stream.seq_len))
