"""The validation loss: the mean over the same tokens each time, each exactly once."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from dataloader import TokenStream
from model import GPT
from runtime.start import trim_memory_if_short
from runtime.world import World

T = TypeVar("T")
Autocast = Callable[[], contextlib.AbstractContextManager]
# Iterates over batches and shows how many are done.
Progress = Callable[[list[T]], Iterable[T]]


@contextlib.contextmanager
def evaluating(model: GPT) -> Iterator[None]:
    """Switch dropout and gradients off; afterwards the model trains again, if it did before."""
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
    progress: Progress = iter,
) -> float:
    """Return the mean loss in nats per token over the first `tokens` of the stream (none: all), in
    whole sequences, at least one.

    Give the model without torch.compile, which would compile again for the last, smaller batch.
    All ranks have to call this; all get the mean over all.
    """
    sequences = count_sequences(stream, tokens)
    own, most = range(world.rank, sequences, world.world_size), -(-sequences // world.world_size)
    total = 0.0
    with evaluating(model):
        for first in progress([*range(0, most, batch_size)]):
            trim_memory_if_short()
            batch = own[first : first + batch_size]
            # With FSDP a rank without sequences has to take part all the same: with one that does
            # not count.
            x, y = (t.to(world.device) for t in stream.read(batch or range(1)))  # (B, T) each
            with autocast():
                loss = model(x, y)
            total += loss.item() * len(batch)
    return world.sum(total) / sequences


def count_sequences(stream: TokenStream, tokens: int | None) -> int:
    """Count the sequences that `validation_loss` reads for so many tokens (none: all)."""
    return len(stream) if tokens is None else min(len(stream), max(1, tokens // stream.seq_len))
