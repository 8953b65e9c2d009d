"""The validation loss: always over the same tokens, each exactly once, shared out among the processes."""

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from dataloader import TokenStream
from model import GPT


@torch.no_grad()
def validation_loss(model: GPT, stream: TokenStream, batch_size: int, tokens: int | None, device: torch.device, *,
                    rank: int = 0, world_size: int = 1,
                    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext) -> float:
    """Mean loss in nats per token over the first `tokens` of the stream (none: all), in whole sequences, at least one.

    Give the model without torch.compile, which would compile again for the last, smaller batch. With world_size above 1
    every process has to call this, and every one gets the mean over all.
    """
    sequences = len(stream) if tokens is None else min(len(stream), max(1, tokens // stream.seq_len))
    was_training = model.training
    model.eval()
    total = 0.0
    mine = range(rank, sequences, world_size)
    for first in range(0, len(mine), batch_size):
        x, y = (t.to(device) for t in stream.read(mine[first:first + batch_size]))
        with autocast():
            loss = model(x, y)
        total += loss.item() * len(x)
    model.train(was_training)
    if world_size > 1:
        sums = torch.tensor(total, dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        total = sums.item()
    return total / sequences
