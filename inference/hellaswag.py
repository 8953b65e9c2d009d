"""Score a model on HellaSwag like EleutherAI's harness and like build-nanogpt."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.hellaswag import ENDINGS, Line, Row, read_items, rows_of
from inference.validation import evaluating, with_progress
from model import GPT
from runtime.errors import TrainingError
from runtime.world import World

METRICS = {
    "acc": "likeliest ending, in EleutherAI's harness",
    "acc_norm": "likeliest per character, in EleutherAI's harness",
    "acc_bytes": "likeliest per byte, in EleutherAI's harness",
    "acc_token": "likeliest per token, in build-nanogpt",
}
Losses = dict[Row, float]  # in nats
ANY_ROW = Row((0, 0), 1)
EMPTY_LENGTH = 1e-9  # length of an empty ending: its loss per length is huge


def read_questions(path: Path, world: World) -> list[Line]:
    """Return this rank's share of a file's items; only rank 0 reads it.

    All ranks have to call this. Raises UserError if the file cannot be read or has another format.
    """
    return world.on_rank0(lambda: read_items(path))[world.rank :: world.world_size]


def ending_losses(model: GPT, rows: Iterable[Row], tokens_at_once: int, world: World) -> Losses:
    """Return each row's loss in nats, summed over its scored tokens.

    The longest rows come first, in batches of up to `tokens_at_once` tokens, but at least one row.
    Equal rows are computed once, so that equal endings tie. All ranks have to call this, each with
    its own rows. All run the same number of batches, which FSDP needs.
    """
    by_length = sorted(dict.fromkeys(rows), key=lambda row: len(row.tokens), reverse=True)
    longest = len(by_length[0].tokens) if by_length else 1
    size = max(1, tokens_at_once // longest)
    batches = [by_length[i : i + size] for i in range(0, len(by_length), size)]
    batches += [[ANY_ROW]] * (max(world.gather(len(batches))) - len(batches))
    losses: Losses = {}
    with evaluating(model):
        for batch in with_progress(batches, "HellaSwag", world):
            tokens, scored = (t.to(world.device) for t in padded(batch))
            # Only the endings need logits: without the contexts' logits, a third less work.
            logits = model(tokens[:, :-1], where=scored[:, 1:])  # (tokens scored, V)
            of_tokens = F.cross_entropy(logits.float(), tokens[scored], reduction="none")
            of_rows = of_tokens.cpu().double().split([row.scored for row in batch])
            losses |= {row: loss.sum().item() for row, loss in zip(batch, of_rows, strict=True)}
    return losses


def padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Return the tokens (B, T + 1) of rows, and a mask of the tokens to score.

    Padding is at the end, hidden by the causal mask.
    """
    texts = [torch.tensor(row.tokens) for row in rows]
    masks = [torch.arange(-len(row.tokens), 0) >= -row.scored for row in rows]
    return pad_sequence(texts, batch_first=True), pad_sequence(masks, batch_first=True)


def choices(item: Line, rows: Sequence[Row], losses: Losses) -> dict[str, int]:
    """Return the ending that each metric chooses, given the item's rows and all rows' losses.

    The first one wins a tie. Metrics per length never choose an empty ending.
    """
    harness, plain = np.reshape([losses[row] for row in rows], (2, ENDINGS))
    endings = item.harness_endings
    per_unit = {
        "acc": harness,
        "acc_norm": harness / [len(ending) or EMPTY_LENGTH for ending in endings],
        "acc_bytes": harness / [len(ending.encode()) or EMPTY_LENGTH for ending in endings],
        "acc_token": plain / [row.scored for row in rows[ENDINGS:]],
    }
    return {metric: int(values.argmin()) for metric, values in per_unit.items()}


def interval(right: int, items: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of the share of right items."""
    z = 1.959964
    n, wrong = items + z * z, items - right
    middle, half = (right + z * z / 2) / n, z / n * math.sqrt(right * wrong / items + z * z / 4)
    return middle - half, middle + half


def score(model: GPT, items: Sequence[Line], tokens_at_once: int, world: World) -> dict[str, Any]:
    """Score the model over the items of all ranks, which all have to call this.

    Returns the number of items, and each metric's share of right items with its interval, in the
    format of evaluate.py's --json. `tokens_at_once`: see `ending_losses`. Raises TrainingError if a
    loss is not finite.
    """
    rows = [rows_of(item, model.config.block_size) for item in items]
    losses = ending_losses(model, itertools.chain(*rows), tokens_at_once, world)
    if not math.isfinite(world.sum(sum(losses.values()))):
        raise TrainingError(
            "HellaSwag: the model's losses are not finite: its weights are damaged or have diverged"
        )
    right = Counter(items=len(items))
    for item, of_item in zip(items, rows, strict=True):
        taken = choices(item, of_item, losses).items()
        right.update(metric for metric, choice in taken if choice == int(item.label))
    right = sum(world.gather(right), Counter[str]())
    n = right["items"]
    return {"items": n} | {
        metric: {"score": right[metric] / n, "interval": interval(right[metric], n)}
        for metric in METRICS
    }
