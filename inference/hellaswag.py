"""HellaSwag: a model's scores, as EleutherAI's harness and build-nanogpt compute them."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.hellaswag import ENDINGS, Item, read_items
from data.tokenizer import END_OF_TEXT, get_encoding
from inference.validation import Autocast, evaluating, with_progress
from model import GPT
from runtime.errors import TrainingError
from runtime.start import trim_memory_if_short
from runtime.world import World

METRICS = {
    "acc": "likeliest ending, as EleutherAI's harness has it",
    "acc_norm": "likeliest per character, the same",
    "acc_bytes": "likeliest per byte, the same",
    "acc_token": "likeliest per token, as build-nanogpt has it",
}


class Row(NamedTuple):
    """Tokens that the model reads, and how many of the last ones are the ending to score."""

    tokens: bytes  # uint16: a list of numbers would take twenty times the memory
    scored: int


ANY_ROW = Row(bytes(4), 1)  # two tokens
NOTHING = 1e-9  # length of an ending without text: none is worse per unit of its length


def read_questions(path: Path, world: World) -> list[Item]:
    """Return this rank's share of a file's items.

    Only rank 0 needs the file. All ranks have to call this. Raises UserError if the file cannot be
    read or is not of HellaSwag's form.
    """
    return world.on_rank0(lambda: read_items(path))[world.rank :: world.world_size]


def rows_of(item: Item, block_size: int) -> list[Row]:
    """Tokenize an item's endings: four rows in the harness's wording, then four in the file's own.

    The beginning of a text that is longer than the model's context is left out.
    """
    encode = get_encoding().encode_ordinary
    # the harness lets white space at a context's end count to the ending
    context = item.context.rstrip()
    space = item.context[len(context) :] + " "
    # the model has to read something before the first token that is scored
    start = [] if context else [END_OF_TEXT]
    before = len(start or encode(context))
    # the harness encodes context and ending in one piece, build-nanogpt each for itself
    harness = [start + encode(context + space + ending) for ending in item.endings]
    plain_context = encode(item.plain_context) or [END_OF_TEXT]
    plain_endings = [encode(f" {ending}") for ending in item.plain_endings]
    pairs = [(tokens, len(tokens) - before) for tokens in harness]
    pairs += [(plain_context + ending, len(ending)) for ending in plain_endings]
    return [
        Row(np.array(tokens[-block_size - 1 :], dtype=np.uint16).tobytes(), min(scored, block_size))
        for tokens, scored in pairs
    ]


def ending_losses(
    model: GPT,
    rows: Sequence[Row],
    tokens_at_once: int,
    world: World,
    autocast: Autocast = contextlib.nullcontext,
) -> list[float]:
    """Return the loss in nats, summed, of each row's scored tokens.

    The longest rows come first, in batches of up to `tokens_at_once` tokens with their padding, but
    at least one row. Equal rows are computed once, so that equal endings tie. All ranks have to
    call this, each with its own rows: all take part in as many batches, which FSDP needs.
    """
    batches = make_batches(rows, tokens_at_once)
    batches += [[ANY_ROW]] * (max(world.gather(len(batches))) - len(batches))
    losses: dict[Row, float] = {}
    with evaluating(model):
        for batch in with_progress(batches, "HellaSwag", world):
            trim_memory_if_short()
            x, y = (t.to(world.device) for t in inputs_and_targets(batch))  # (B, T) each
            scored = y >= 0
            with autocast():
                # most tokens are a context's: they do without the head, a third of the work
                logits = model(x, where=scored)  # (tokens scored, V)
            of_tokens = F.cross_entropy(logits.float(), y[scored], reduction="none").cpu().double()
            of_rows = of_tokens.split([row.scored for row in batch])
            losses |= {row: loss.sum().item() for row, loss in zip(batch, of_rows, strict=True)}
    return [losses[row] for row in rows]


def make_batches(rows: Sequence[Row], tokens_at_once: int) -> list[list[Row]]:
    """Batch the rows, equal ones once, the longest first."""
    rest = sorted(dict.fromkeys(rows), key=lambda row: len(row.tokens), reverse=True)
    batches = []
    while rest:
        n = max(1, tokens_at_once // (len(rest[0].tokens) // 2 - 1))
        batches.append(rest[:n])
        del rest[:n]
    return batches


def inputs_and_targets(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (B, T) of rows; targets that are not scored are -1.

    Padding comes after all that counts, so that the causal mask keeps it out.
    """
    texts = [torch.tensor(np.frombuffer(row.tokens, np.uint16).astype(np.int64)) for row in rows]
    targets = [text[1:].clone() for text in texts]
    for target, row in zip(targets, rows, strict=True):
        target[: -row.scored] = -1
    x = pad_sequence([text[:-1] for text in texts], batch_first=True)
    return x, pad_sequence(targets, batch_first=True, padding_value=-1)


def choices(item: Item, rows: Sequence[Row], losses: Sequence[float]) -> dict[str, int]:
    """Return the ending that each metric takes, given the item's rows and their losses.

    The first of those that tie. An ending without text is never taken per unit of its length.
    """
    harness, plain = np.reshape(losses, (2, ENDINGS))
    characters = [len(ending) or NOTHING for ending in item.endings]
    in_bytes = [len(ending.encode(errors="replace")) or NOTHING for ending in item.endings]
    per_unit = {
        "acc": harness,
        "acc_norm": harness / characters,
        "acc_bytes": harness / in_bytes,
        "acc_token": plain / [row.scored for row in rows[ENDINGS:]],
    }
    return {metric: int(values.argmin()) for metric, values in per_unit.items()}


def interval(right: int, items: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share, for all items that could have been asked."""
    z = 1.959964
    n, wrong = items + z * z, items - right
    middle, half = (right + z * z / 2) / n, z / n * math.sqrt(right * wrong / items + z * z / 4)
    return middle - half, middle + half


def score(
    model: GPT,
    items: Sequence[Item],
    tokens_at_once: int,
    world: World,
    autocast: Autocast = contextlib.nullcontext,
) -> dict[str, Any]:
    """Score the model over the items of all ranks. All have to call this, and get the same.

    Returns the number of items, and for each metric the share that is right and its interval, as
    evaluate.py's --json has them. `tokens_at_once` as for `ending_losses`. Raises TrainingError if
    a loss is not finite.
    """
    rows = [row for item in items for row in rows_of(item, model.config.block_size)]
    losses = ending_losses(model, rows, tokens_at_once, world, autocast)
    if not math.isfinite(world.sum(sum(losses))):
        raise TrainingError(
            "HellaSwag: the model's losses are not finite: its weights are damaged or have diverged"
        )
    right = dict.fromkeys(METRICS, 0)
    for i, item in enumerate(items):
        own = slice(i * 2 * ENDINGS, (i + 1) * 2 * ENDINGS)
        for metric, choice in choices(item, rows[own], losses[own]).items():
            right[metric] += choice == item.label
    total = round(world.sum(len(items)))
    scores: dict[str, Any] = {"items": total}
    for metric, of_rank in right.items():
        n = round(world.sum(of_rank))
        scores[metric] = {"score": n / total, "interval": interval(n, total)}
    return scores
