"""The validation loss: always over the same tokens, each exactly once, shared out among the processes."""

import contextlib
from collections.abc import Callable

import torch

from dataloader import TokenStream
from model import GPT
from runtime.world import World


@torch.no_grad()
def validation_loss(model: GPT, stream: TokenStream, batch_size: int, tokens: int | None, world: World,
                    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext) -> float:
    """Mean loss in nats per token over the first `tokens` of the stream (none: all), in whole sequences, at least one.

    Give the model without torch.compile, which would compile again for the last, smaller batch. Every process has to call this,
    and every one gets the mean over all.
    """
    sequences = len(stream) if tokens is None else min(len(stream), max(1, tokens // stream.seq_len))
    was_training = model.training
    model.eval()
    total = 0.0
    own = range(world.rank, sequences, world.world_size)
    for first in range(0, len(own), batch_size):
        x, y = (t.to(world.device) for t in stream.read(own[first:first + batch_size]))
        with autocast():
            loss = model(x, y)
        total += loss.item() * len(x)
    model.train(was_training)
    return world.sum(total) / sequences
