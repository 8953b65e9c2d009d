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
from inference.validation import Autocast, Progress, evaluating
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


class Question(NamedTuple):
    """An item in tokens: a row per ending in the harness's wording, then one in the file's own."""

    item: Item
    rows: list[Row]


class Scores(NamedTuple):
    """How many of the items a model gets right, by each way of comparing their endings."""

    items: int
    right: dict[str, int]  # by the name of a metric

    def shares(self) -> dict[str, float]:
        """Return the shares that are right, by column of eval.csv."""
        return {f"hellaswag_{metric}": right / self.items for metric, right in self.right.items()}

    def interval(self, metric: str) -> tuple[float, float]:
        """Return Wilson's 95% interval of a share, for all items that could have been asked."""
        n, p, z = self.items, self.right[metric] / self.items, 1.959964
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)

    def with_intervals(self) -> dict[str, dict[str, Any]]:
        """Return the share and its interval for each metric, as evaluate.py's --json has them."""
        return {
            metric: {"score": right / self.items, "interval": self.interval(metric)}
            for metric, right in self.right.items()
        }


def read_questions(path: Path, block_size: int, world: World) -> list[Question]:
    """Return this rank's share of a file's items, for a model with this context.

    Only rank 0 needs the file. All ranks have to call this. Raises UserError if the file cannot be
    read or is not of HellaSwag's form.
    """
    items = world.on_rank0(lambda: read_items(path))
    own = items[world.rank :: world.world_size]
    return [Question(item, rows_of(item, block_size)) for item in own]


def rows_of(item: Item, block_size: int) -> list[Row]:
    """Tokenize an item's endings, in both wordings.

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
    progress: Progress = iter,
) -> list[float]:
    """Return the loss in nats, summed, of each row's scored tokens.

    The longest rows come first, in batches of up to `tokens_at_once` tokens with their padding, but
    at least one row. Equal rows are computed once, so that equal endings tie. All ranks have to
    call this, each with its own rows: all take part in as many batches, which FSDP needs.
    """
    batches = make_batches(rows, tokens_at_once)
    most = max(world.gather(len(batches)))
    losses: dict[Row, float] = {}
    with evaluating(model):
        for batch in progress(batches + [[ANY_ROW]] * (most - len(batches))):
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
        rest = rest[n:]
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


def choices(question: Question, losses: Sequence[float]) -> dict[str, int]:
    """Return the ending that each metric takes, given the losses of the question's rows.

    The first of those that tie. An ending without text is never taken per unit of its length.
    """
    endings, harness, plain = question.item.endings, losses[:ENDINGS], losses[ENDINGS:]

    def likeliest(losses: Sequence[float], lengths: Sequence[int]) -> int:
        pairs = zip(losses, lengths, strict=True)
        per_unit = [loss / length if length else math.inf for loss, length in pairs]
        return per_unit.index(min(per_unit))

    return {
        "acc": likeliest(harness, [1] * ENDINGS),
        "acc_norm": likeliest(harness, [len(text) for text in endings]),
        "acc_bytes": likeliest(harness, [len(text.encode(errors="replace")) for text in endings]),
        "acc_token": likeliest(plain, [row.scored for row in question.rows[ENDINGS:]]),
    }


def score(
    model: GPT,
    questions: Sequence[Question],
    tokens_at_once: int,
    world: World,
    autocast: Autocast = contextlib.nullcontext,
    progress: Progress = iter,
) -> Scores:
    """Score the model over the questions of all ranks. All have to call this, and get the same.

    `tokens_at_once` as for `ending_losses`. Raises TrainingError if a loss is not finite.
    """
    rows = [row for question in questions for row in question.rows]
    losses = ending_losses(model, rows, tokens_at_once, world, autocast, progress)
    right = dict.fromkeys(METRICS, 0)
    for i, question in enumerate(questions):
        of_question = losses[i * 2 * ENDINGS : (i + 1) * 2 * ENDINGS]
        for metric, choice in choices(question, of_question).items():
            right[metric] += choice == question.item.label
    if not math.isfinite(world.sum(sum(losses))):
        raise TrainingError(
            "HellaSwag: the model's losses are not finite: its weights are damaged or have diverged"
        )
    total = {metric: round(world.sum(n)) for metric, n in right.items()}
    return Scores(round(world.sum(len(questions))), total)
