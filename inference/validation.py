"""Compute the validation loss: the mean over the same tokens each time, each exactly once."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import track
from tiktoken import Encoding
from torch import Tensor

from data.token_file import split_of
from dataloader import TokenStream
from model import GPT
from runtime.console import log
from runtime.errors import TrainingError, UserError
from runtime.world import World

T = TypeVar("T")
# Compiling pays from this number of whole batches on. The number is the same at every evaluation of
# a run and after a resume, and so is the loss.
WORTH_COMPILING = 8


def check_split(val: TokenStream, corpus: str, val_fraction: float, is_needed: bool = True) -> None:
    """Note that validation files take the place of `val_fraction`.

    Raises UserError if the split is needed and makes no sequence.
    """
    if is_needed and not len(val):
        raise UserError(
            f"{corpus}: nothing to validate on: {val.describe()}; raise val_fraction above "
            f"{val_fraction:g}, lower seq_len, or add a *_val_*.bin file"
        )
    if val_fraction and val.spans and split_of(val.spans[0].file.path) in ("val", "test"):
        log.warning(f"val_fraction has no effect: {corpus} has validation files of its own")


@contextlib.contextmanager
def evaluating(model: GPT, stance: str = "force_eager") -> Iterator[None]:
    """Switch dropout and gradients off, and restore the model's mode afterwards.

    With FSDP the model's blocks are compiled for training. The stance of torch.compile keeps them
    from compiling again for each layer and shape here.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance(stance):
            yield
    finally:
        model.train(was_training)


def with_progress(batches: Sequence[T], name: str, world: World) -> Iterable[T]:
    """Yield the batches, with a progress bar on a terminal."""
    console = Console(stderr=True)
    hidden = world.rank > 0 or not console.is_terminal
    return track(batches, name, console=console, transient=True, disable=hidden)


def validation_loss(
    model: GPT,
    stream: TokenStream,
    batch_size: int,
    tokens: int | None,
    world: World,
    compiled: Callable[..., Tensor] | None = None,
) -> float:
    """Return the mean loss in nats per token over the first `tokens` of the stream (None means
    all), in whole sequences, at least one.

    `compiled` computes whole batches from WORTH_COMPILING of them on. The last, smaller batch
    runs uncompiled, because its shape would compile again. All ranks have to call this, and get the
    mean over all ranks. Raises TrainingError if it is not finite.
    """
    sequences = count_sequences(stream, tokens)
    at_once, total = batch_size * world.world_size, 0.0  # sequences of all ranks in a batch
    if sequences // at_once < WORTH_COMPILING:
        compiled = None
    with evaluating(model, "force_eager" if compiled is None else "default"):
        for first in with_progress(range(0, sequences, at_once), "validation loss", world):
            batch = range(sequences)[first : first + at_once][world.rank :: world.world_size]
            # FSDP needs every rank in every forward pass: a rank without sequences runs one that
            # does not count.
            x, y = (t.to(world.device) for t in stream.read(batch or range(1)))  # (B, T) each
            compute = model if compiled is None or len(batch) < batch_size else compiled
            total += compute(x, y).item() * len(batch)  # from the mean over (B, T)
    mean = world.sum(total) / sequences
    if not math.isfinite(mean):
        raise TrainingError(
            f"the validation loss is {mean}: the weights are damaged or have diverged"
        )
    return mean


def count_sequences(stream: TokenStream, tokens: int | None) -> int:
    """Return the number of sequences in `tokens` (None means all), at least one."""
    return len(stream) if tokens is None else min(len(stream), max(1, tokens // stream.seq_len))


def bytes_per_target(stream: TokenStream, tokens: int | None, encoding: Encoding) -> float:
    """Return the mean UTF-8 bytes of the targets of the first `tokens`, as in `validation_loss`;
    <|endoftext|> has none.
    """
    sizes = [len(encoding.decode_single_token_bytes(token)) for token in range(encoding.n_vocab)]
    sizes[encoding.eot_token] = 0
    of_token, windows = torch.tensor(sizes), range(count_sequences(stream, tokens))
    total = sum(int(of_token[stream.read([window])[1]].sum()) for window in windows)
    return total / (len(windows) * stream.seq_len)


def bits_per_byte(loss: float, bytes_per_target: float) -> float:
    """Return a loss in nats per token as bits per byte, which compares vocabularies."""
    return loss / math.log(2) / bytes_per_target
