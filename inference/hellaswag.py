"""Score a model on HellaSwag by the mean loss of each ending's tokens, like build-nanogpt."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiktoken import Encoding
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.hellaswag import Question, Row, read_items, tokenize
from inference.validation import evaluating, with_progress
from model import GPT
from runtime.errors import TrainingError
from runtime.world import World

Losses = dict[Row, float]  # in nats
ANY_ROW = Row((0, 0), 1)


def read_questions(path: Path, encoding: Encoding, block_size: int, world: World) -> list[Question]:
    """Return this rank's share of a file's questions, in tokens; only rank 0 reads the file.

    All ranks have to call this. Raises UserError if the file cannot be read or has another format.
    """
    items = world.on_rank0(lambda: read_items(path))[world.rank :: world.world_size]
    return [tokenize(item, encoding, block_size) for item in items]


def ending_losses(model: GPT, rows: Iterable[Row], tokens_at_once: int, world: World) -> Losses:
    """Return each row's loss in nats, summed over its scored tokens.

    The longest rows come first, in batches of up to `tokens_at_once` tokens, but at least one row.
    Equal rows are computed once, so that equal endings tie. All ranks have to call this, each with
    its own rows. All run the same number of batches, which FSDP needs.
    """
    by_length = sorted(dict.fromkeys(rows), key=lambda row: len(row.tokens), reverse=True)
    by_length = by_length or [ANY_ROW]  # fewer items than ranks
    size = max(1, tokens_at_once // len(by_length[0].tokens))
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


def is_right(question: Question, losses: Losses) -> bool:
    """True if the right ending has the lowest mean loss of its tokens; the first one wins a tie."""
    means = [losses[row] / row.scored for row in question.rows]
    return means.index(min(means)) == question.right


def interval(right: int, items: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of the share of right items."""
    z = 1.959964
    n, wrong = items + z * z, items - right
    middle, half = (right + z * z / 2) / n, z / n * math.sqrt(right * wrong / items + z * z / 4)
    return middle - half, middle + half


def score(
    model: GPT, questions: Sequence[Question], tokens_at_once: int, world: World
) -> dict[str, Any]:
    """Score the model over the questions of all ranks, which all have to call this.

    Returns the number of items, and the share of right ones, `acc_norm`, with its interval, in the
    format of evaluate.py's --json. `tokens_at_once`: see `ending_losses`. Raises TrainingError if a
    loss is not finite.
    """
    rows = [row for question in questions for row in question.rows]
    losses = ending_losses(model, rows, tokens_at_once, world)
    if not math.isfinite(world.sum(sum(losses.values()))):
        raise TrainingError(
            "HellaSwag: the model's losses are not finite: its weights are damaged or have diverged"
        )
    right = int(world.sum(sum(is_right(question, losses) for question in questions)))
    n = int(world.sum(len(questions)))
    return {"items": n, "acc_norm": {"score": right / n, "interval": interval(right, n)}}
