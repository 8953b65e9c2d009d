"""HellaSwag: a model's scores, as EleutherAI's harness and build-nanogpt compute them."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from config import Config
from data.hellaswag import ENDINGS, Item, default_path, read_items
from data.tokenizer import END_OF_TEXT, get_encoding
from inference.validation import Autocast, Progress, evaluating, ignore_progress
from model import GPT
from runtime.errors import TrainingError
from runtime.runlog import RunFolder
from runtime.start import trim_memory_if_short
from runtime.world import World


class Row(NamedTuple):
    """Tokens that the model reads, and how many of the last ones are the ending that it is scored
    on.
    """

    tokens: bytes  # uint16: a list of numbers would take twenty times the memory
    scored: int


ANY_ROW = Row(bytes(4), 1)  # two tokens


class Question(NamedTuple):
    """An item in tokens: a row for each ending in the harness's wording, then one for each in the
    file's own.
    """

    item: Item
    rows: list[Row]


class Scores(NamedTuple):
    """How many of the items a model gets right, by each way of comparing their endings."""

    items: int
    right: dict[str, int]  # by the name of a metric

    def figures(self) -> dict[str, float]:
        """The shares that are right, by column of eval.csv."""
        return {f"hellaswag_{metric}": right / self.items for metric, right in self.right.items()}

    def interval(self, metric: str) -> tuple[float, float]:
        """Wilson's 95% interval of a share: where it may lie for all items that could have been
        asked.
        """
        n, p, z = self.items, self.right[metric] / self.items, 1.959964
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


METRICS = {
    "acc": "likeliest ending, as EleutherAI's harness has it",
    "acc_norm": "likeliest per character, the same",
    "acc_bytes": "likeliest per byte, the same",
    "acc_token": "likeliest per token, as build-nanogpt has it",
}


def read_questions(path: Path, block_size: int, world: World) -> list[Question]:
    """This process's share of a file's items, for a model that reads `block_size` tokens. Only rank
    0 needs the file.

    Every process has to call this. Raises UserError if the file cannot be read or is not of
    HellaSwag's form.
    """
    items = world.on_rank0(lambda: read_items(path))
    return [
        Question(item, rows_of(item, block_size)) for item in items[world.rank :: world.world_size]
    ]


def rows_of(item: Item, block_size: int) -> list[Row]:
    """An item's endings in tokens, in both wordings. Of a text longer than the model's context the
    beginning is left out.
    """
    encode = get_encoding().encode_ordinary
    context = (
        item.context.rstrip()
    )  # the harness lets white space at a context's end count to the ending
    space = item.context[len(context) :] + " "
    start = (
        [] if context else [END_OF_TEXT]
    )  # something has to stand before the first token that is scored
    before = len(start or encode(context))
    # the harness encodes context and ending in one piece, build-nanogpt each for itself
    harness = [start + encode(context + space + ending) for ending in item.endings]
    plain_context = encode(item.plain_context) or [END_OF_TEXT]
    plain_endings = [encode(f" {ending}") for ending in item.plain_endings]
    pairs = [
        *((tokens, len(tokens) - before) for tokens in harness),
        *((plain_context + ending, len(ending)) for ending in plain_endings),
    ]
    return [
        Row(np.array(tokens[-block_size - 1 :], dtype=np.uint16).tobytes(), min(scored, block_size))
        for tokens, scored in pairs
    ]


def ending_losses(
    model: GPT,
    rows: Sequence[Row],
    tokens_at_once: int,
    autocast: Autocast = contextlib.nullcontext,
    progress: Progress = ignore_progress,
    world: World | None = None,
) -> list[float]:
    """The loss in nats, summed, of each row's scored tokens.

    The longest rows come first, in batches of up to `tokens_at_once` tokens with their padding, but
    at least one row. Rows that are the same are computed once, so that endings that are the same
    tie. Every process of the `world`, if one is given, has to call this, each with rows of its own:
    all take part in as many batches, as those that share a model by FSDP have to.
    """
    batches = _batches(rows, tokens_at_once)
    most = max(world.gather(len(batches))) if world else len(batches)
    losses: dict[Row, float] = {}
    with evaluating(model):
        for number, batch in enumerate(batches + [[ANY_ROW]] * (most - len(batches)), 1):
            trim_memory_if_short()
            x, y = (t.to(model.lm_head.weight.device) for t in _tensors(batch))
            with autocast():
                # (tokens scored, V): the head is a third of the work, and most tokens are a
                # context's
                logits = model(x, where=y >= 0)
            of_tokens = F.cross_entropy(logits.float(), y[y >= 0], reduction="none").cpu().double()
            parts = of_tokens.split([row.scored for row in batch])
            losses |= {row: part.sum().item() for row, part in zip(batch, parts, strict=True)}
            progress(number / most)
    return [losses[row] for row in rows]


def _batches(rows: Sequence[Row], tokens_at_once: int) -> list[list[Row]]:
    """The rows, each that is different once, the longest first."""
    longest_first, batches = (
        sorted(dict.fromkeys(rows), key=lambda row: len(row.tokens), reverse=True),
        [],
    )
    while longest_first:
        n = max(1, tokens_at_once // (len(longest_first[0].tokens) // 2 - 1))
        batches.append(longest_first[:n])
        longest_first = longest_first[n:]
    return batches


def _tensors(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (B, T) of rows of which the first is the longest; targets that are not
    scored are -1.

    Padding comes after all that counts, so that the causal mask keeps it out.
    """
    T = len(rows[0].tokens) // 2 - 1
    x, y = torch.zeros(len(rows), T, dtype=torch.long), torch.full((len(rows), T), -1)
    for i, row in enumerate(rows):
        tokens = torch.from_numpy(np.frombuffer(row.tokens, dtype=np.uint16).astype(np.int64))
        end = len(tokens) - 1
        x[i, :end] = tokens[:-1]
        y[i, end - row.scored : end] = tokens[
            -row.scored :
        ]  # each where its token is predicted: one place before its own
    return x, y


def choices(question: Question, losses: Sequence[float]) -> dict[str, int]:
    """The ending that each metric takes, given the losses of the question's rows; the first of
    those that tie.
    """
    endings, harness, plain = question.item.endings, losses[:ENDINGS], losses[ENDINGS:]

    def likeliest(losses: Sequence[float], lengths: Sequence[int]) -> int:
        per_unit = [
            loss / length if length else math.inf
            for loss, length in zip(losses, lengths, strict=True)
        ]
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
    progress: Progress = ignore_progress,
) -> Scores:
    """The model's scores over the questions of all processes. Every process has to call this, and
    every one gets the same.

    `tokens_at_once` as for `ending_losses`. Raises TrainingError for a model whose losses are not
    finite.
    """
    rows = [row for question in questions for row in question.rows]
    losses = ending_losses(model, rows, tokens_at_once, autocast, progress, world)
    right = dict.fromkeys(METRICS, 0)
    for i, question in enumerate(questions):
        for metric, choice in choices(
            question, losses[i * 2 * ENDINGS : (i + 1) * 2 * ENDINGS]
        ).items():
            right[metric] += choice == question.item.label
    everyones = world.gather((len(questions), right, math.isfinite(sum(losses))))
    if not all(is_finite for *_, is_finite in everyones):
        raise TrainingError(
            "HellaSwag: the model's losses are not finite: its weights are damaged or have diverged"
        )
    return Scores(
        sum(n for n, *_ in everyones),
        {metric: sum(right[metric] for _, right, _ in everyones) for metric in METRICS},
    )


class HellaSwag:
    """HellaSwag between the steps of a run: how often, this process's questions, and the scores so
    far, by step.
    """

    def __init__(self, config: Config, world: World):
        """`config`: the run's options (config.py's Config). The items are read if they are ever
        needed.

        Every process has to call this. Raises UserError if they cannot be read.
        """
        path = Path(config.hellaswag_file or default_path(config.data_dir))
        self.every, self.max_steps, self.world = config.hellaswag_every, config.max_steps, world
        self.tokens_at_once = config.batch_size * config.seq_len  # takes less memory than a step
        self.questions = read_questions(path, config.block_size, world) if self.every else []
        self.scores: dict[int, dict[str, float]] = {}

    def score_if_due(self, step: int, model: GPT, run: RunFolder, autocast: Autocast) -> None:
        """Score the model and log it: before the first step, after every so many, and after the
        last; once each.

        Every process has to call this. Give the model without torch.compile, as for
        `validation_loss`.
        """
        if (
            self.every
            and (step % self.every == 0 or step >= self.max_steps)
            and step not in self.scores
        ):
            try:
                self.scores[step] = score(
                    model, self.questions, self.tokens_at_once, self.world, autocast
                ).figures()
            except TrainingError as error:
                raise TrainingError(
                    f"step {step}: {error}; the log is kept in {run.path}; try a lower lr"
                ) from None
            run.log_evaluation(step, self.max_steps, **self.scores[step])

    def latest(self) -> dict[str, float]:
        """The scores after the last step that has any."""
        return self.scores[max(self.scores)] if self.scores else {}
