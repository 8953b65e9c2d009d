"""What a model has learned: `python evaluate.py quickstart`, or `python evaluate.py gpt2
--hellaswag download`.

The validation loss and its perplexity, always over the same tokens, each exactly once; and the
scores in HellaSwag. The processes that torchrun starts share the work.
"""

from runtime.interrupt import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()  # first of all: imports take a moment

import contextlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from runtime.cli import ConfigError, Name, Options, Positive, parse_command_line, reconfigure_output
from runtime.errors import TrainingError, UserError, reported
from runtime.start import set_up_process, trim_memory_if_short

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # json is also the name of a method that pydantic has given up

    class EvaluateOptions(Options):
        """options"""

        run: Name
        """a run's name or folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl, a Hugging Face model
        folder, or a .pt file of nanoGPT
        """
        dataset: Name | None = None
        """corpus whose validation split gives the loss (none: the one that the run trained on)"""
        data_dir: Name | None = None
        """folder that holds the corpora (none: the run's own, or data)"""
        val_fraction: float | None = Field(None, ge=0, le=1)
        """share of the tokens, off the tail, of a corpus without *_val_* files; 1: all (none: the
        run's own)
        """
        seq_len: Positive | None = None
        """tokens per sequence (none: the run's own, or the model's whole context)"""
        tokens: Positive | None = None
        """tokens that the loss is the mean of (none: the run's own eval_tokens, or the whole split)
        """
        batch_size: Positive | None = None
        """sequences at once in each process (none: the run's own, or 4)"""
        bf16: bool | None = None
        """bfloat16 autocast (none: the precision that the run trained in, or fp32)"""
        hellaswag: Name | None = None
        """also score HellaSwag: a file of its form, or download, which keeps it in
        data_dir/hellaswag
        """
        json: Name | None = None  # type: ignore[assignment]
        """file for the results, with all digits"""
        device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
        """auto, cuda, mps or cpu"""
        log_dir: Name = "logs"
        """folder that holds the runs"""


if __name__ == "__main__":
    # before torch is imported, which takes seconds: --help, mistakes and Ctrl-C answer at once
    OPTIONS = parse_command_line(EvaluateOptions, description=__doc__, positional="run")
    end_at_ctrl_c()  # again: reading the options ended it
    set_up_process()

import numpy as np
import torch
import torch.nn.functional as F

from data.hellaswag import ENDINGS, Item, default_path, download, read_items
from data.prepare import is_there, prepare_if_missing
from data.tokenizer import END_OF_TEXT, get_encoding
from dataloader import TokenStream, is_validation, open_corpus
from model import GPT
from runtime.device import (
    autocast_to,
    choose_device,
    device_name,
    make_repeatable,
    matmul_dtype,
    set_precision,
)
from runtime.files import write_whole
from runtime.runlog import RunFolder
from runtime.world import World, joined_world, launch
from weights import STATE, find_weights, load_model, read_json

Autocast = Callable[[], contextlib.AbstractContextManager]
Progress = Callable[[float], None]  # is told the share that is done
TIMEOUT = 3600.0  # seconds after which a process gives up waiting for another one


def _untold(_: float) -> None:
    pass


@contextlib.contextmanager
def _evaluating(model: GPT) -> Iterator[None]:
    """The model without dropout and without gradients; afterwards it trains on, if it did."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


# ---- the validation loss


def validation_loss(
    model: GPT,
    stream: TokenStream,
    batch_size: int,
    tokens: int | None,
    world: World,
    autocast: Autocast = contextlib.nullcontext,
    progress: Progress = _untold,
) -> float:
    """Mean loss in nats per token over the first `tokens` of the stream (none: all), in whole
    sequences, at least one.

    Give the model without torch.compile, which would compile again for the last, smaller batch.
    Every process has to call this, and every one gets the mean over all.
    """
    sequences = _sequences(stream, tokens)
    total = 0.0
    own, most = range(world.rank, sequences, world.world_size), -(-sequences // world.world_size)
    with _evaluating(model):
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


def _sequences(stream: TokenStream, tokens: int | None) -> int:
    return len(stream) if tokens is None else min(len(stream), max(1, tokens // stream.seq_len))


# ---- HellaSwag


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
    progress: Progress = _untold,
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
    with _evaluating(model):
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
    progress: Progress = _untold,
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

    def __init__(self, config: Any, world: World):
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


# ---- the command


class Subject(NamedTuple):
    """A model to evaluate, and how."""

    folder: Path
    state: dict[
        str, Any
    ]  # the run's, as its checkpoint.json has it; empty for weights that are no run's
    model: GPT
    batch_size: int
    autocast: Autocast

    @property
    def trained(self) -> dict[str, Any]:
        """The options of the run; empty for weights that are no run's."""
        return self.state.get("config", {})


def evaluate(options: EvaluateOptions, world: World) -> dict[str, Any]:
    """Print what a model has learned; returns what --json holds. Every process has to call this.
    Raises UserError.
    """

    def say(text: str) -> None:
        with reported("stdout"):
            if world.rank == 0:
                print(text, flush=True)

    def progress(what: str) -> Progress:
        shown = world.rank == 0 and bool(sys.stderr) and sys.stderr.isatty()
        return (
            (
                lambda share: print(
                    f"\r{what}: {share:.0%}", end="\n" * (share == 1), file=sys.stderr, flush=True
                )
            )
            if shown
            else _untold
        )

    subject, results = _load(options, world, say)
    # all that is read, before anything is computed: mistakes are told at once
    file, questions = _questions(options, subject, world) if options.hellaswag else (None, [])
    validation = (
        _open_validation(options, subject, world, say)
        if options.dataset or subject.trained
        else None
    )
    for name in ("tokens", "seq_len", "val_fraction") if validation is None else ():
        if getattr(options, name) is not None:
            say(f"note: {name} has no effect without a validation loss")
    if validation:
        corpus, stream, tokens = validation
        loss = validation_loss(
            subject.model,
            stream,
            subject.batch_size,
            tokens,
            world,
            subject.autocast,
            progress("validation loss"),
        )
        if not math.isfinite(loss):
            raise TrainingError(
                f"{subject.folder}: the validation loss is {loss}: its weights are damaged or "
                f"have diverged"
            )
        count, perplexity = _sequences(stream, tokens) * stream.seq_len, math.exp(min(loss, 700))
        results["validation"] = {
            "corpus": str(corpus),
            "tokens": count,
            "seq_len": stream.seq_len,
            "loss": loss,
            "perplexity": perplexity,
        }
        say(
            f"{corpus}: validation loss {loss:.4f} nats per token, perplexity {perplexity:,.2f}, "
            f"over {count:,} tokens in "
            f"sequences of {stream.seq_len}"
        )
    if file:
        at_once = subject.batch_size * subject.model.config.block_size
        scores = score(
            subject.model, questions, at_once, world, subject.autocast, progress("HellaSwag")
        )
        results["hellaswag"] = {"file": str(file), "items": scores.items} | {
            metric: {"score": right / scores.items, "interval": scores.interval(metric)}
            for metric, right in scores.right.items()
        }
        say(f"HellaSwag, {scores.items:,} items, each score with its 95% interval:")
        for metric, words in METRICS.items():
            low, high = scores.interval(metric)
            say(
                f"  {metric:<9}  {scores.right[metric] / scores.items:.4f}  ({low:.4f} to "
                f"{high:.4f})  {words}"
            )
    if options.json and world.rank == 0:
        write_whole(Path(options.json), json.dumps(results, indent=1, allow_nan=False) + "\n")
    return results


def _load(
    options: EvaluateOptions, world: World, say: Callable[[str], None]
) -> tuple[Subject, dict[str, Any]]:
    """The model, and what the results say of it."""
    # one answer for all processes: the run may be training, and save meanwhile
    folder = world.on_rank0(lambda: find_weights(options.run, options.log_dir)).absolute()
    state = read_json(folder / STATE) if (folder / STATE).is_file() else {}
    if not (state or options.dataset or options.hellaswag):
        raise ConfigError(
            f"{options.run}: evaluate it on what? Name a corpus, --dataset NAME, or give "
            f"--hellaswag FILE or "
            f"--hellaswag download"
        )
    if options.json:
        path = Path(options.json)
        world.on_rank0(lambda: _check_writable(path))
    model = load_model(str(folder)).to(world.device)
    trained = state.get("config", {})
    tf32, bf16, fp16 = (bool(trained.get(name)) for name in ("tf32", "bf16", "fp16"))
    if options.bf16 is not None:
        bf16, fp16 = options.bf16, False
    dtype, batch_size = (
        matmul_dtype(bf16=bf16, fp16=fp16),
        options.batch_size or trained.get("batch_size", 4),
    )
    make_repeatable(world.device)
    notes = set_precision(world.device, tf32=tf32, bf16=bf16)
    results = {
        "run": options.run,
        "weights": str(folder),
        "step": state.get("step"),
        "parameters": model.num_parameters(),
        "device": device_name(world.device),
        "dtype": str(dtype).removeprefix("torch."),
        "processes": world.world_size,
        "batch_size": batch_size,
        "torch": torch.__version__,
    }
    say(
        f"{folder}: {results['parameters']:,} parameters, {results['dtype']}, batch_size "
        f"{batch_size}; device {results['device']}, "
        f"processes: {world.world_size}"
    )
    for note in notes:
        say(f"note: {note}")
    return Subject(folder, state, model, batch_size, autocast_to(dtype, world.device)), results


def _check_writable(path: Path) -> None:
    """Raises UserError for a file that cannot be written."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(
            f"--json {path}: cannot be written: "
            + (
                "is a folder"
                if path.is_dir()
                else f"{folder} is not there, or nothing may be written to it"
            )
        )


def _questions(
    options: EvaluateOptions, subject: Subject, world: World
) -> tuple[Path, list[Question]]:
    """The file that --hellaswag means, and this process's share of its items."""
    config, n_vocab = subject.model.config, get_encoding().n_vocab
    if config.n_vocab != n_vocab:
        raise UserError(
            f"--hellaswag: a vocabulary of {config.n_vocab} is not that of GPT-2's tokenizer, "
            f"{n_vocab}"
        )
    file = Path(str(options.hellaswag))
    if options.hellaswag == "download":
        data_dir = options.data_dir or subject.trained.get("data_dir", "data")
        file = world.on_rank0(lambda: download(data_dir))
    return file, read_questions(file, config.block_size, world)


def _open_validation(
    options: EvaluateOptions,
    subject: Subject,
    world: World,
    say: Callable[[str], None],
) -> tuple[Path, TokenStream, int | None] | None:
    """The corpus that the options mean, its validation split, and of how many tokens the loss is
    the mean (none: all).

    None where nobody asked for it and it cannot be had: a run's own corpus, beside --hellaswag.
    """
    trained, config = subject.trained, subject.model.config
    dataset = options.dataset or trained["dataset"]
    own = dataset == trained.get("dataset")
    defaults = trained if own else {}
    seq_len = options.seq_len or trained.get("seq_len", config.block_size)
    if seq_len > config.block_size:
        raise ConfigError(
            f"--seq_len {seq_len}: longer than the model's context, {config.block_size}"
        )
    problem, found = None, ""
    places = (
        [options.data_dir]
        if options.data_dir
        else [*filter(None, [trained.get("data_dir")]), "data"]
    )
    try:
        folder = world.on_rank0(
            lambda: _find_corpus([Path(place) / dataset for place in places], say)
        )
        fraction = (
            defaults.get("val_fraction", 0.0)
            if options.val_fraction is None
            else options.val_fraction
        )
        rest, stream = open_corpus(folder, seq_len, config.n_vocab, fraction)
        if not stream.tokens:
            raise UserError(
                f"{folder}: nothing to validate on: it has no *_val_*.bin file; say which share "
                f"of its tokens to take, "
                f"off the tail: --val_fraction 0.1, or 1 for all of them"
            )
        if not len(stream):
            raise UserError(
                f"{folder}: {stream.tokens:,} tokens for validation make no sequence of "
                f"{seq_len}; lower --seq_len or "
                f"raise --val_fraction"
            )
        found = rest.fingerprint() + stream.fingerprint()
    except UserError as error:
        problem = str(error)
    # what one process cannot read or finds different, another one may have on its own disk: they go
    # on together or not at all
    everyones = world.gather((problem, found))
    if told := next((problem for problem, _ in everyones if problem), None):
        if options.dataset or not options.hellaswag:
            raise UserError(told)
        say(f"note: no validation loss: {told}")
        return None
    if len(set(everyones)) > 1:
        raise UserError(
            f"{folder}: the processes do not find the same tokens there; copy one corpus to all "
            f"machines"
        )
    if options.val_fraction is not None and is_validation(stream.spans[0].path):
        say(f"note: val_fraction has no effect: {folder} has validation files of its own")
    corpus = subject.state.get("corpus", "")
    if own and fraction == trained["val_fraction"] and rest.fingerprint() != corpus:
        say(f"note: {folder} is not the corpus that the run trained on: its tokens differ")
    return folder, stream, options.tokens or defaults.get("eval_tokens")


def _find_corpus(folders: Sequence[Path], say: Callable[[str], None]) -> Path:
    """The first of the folders that has token files; else the last, if it is that of a small
    corpus, which is prepared.
    """
    folder = next((folder for folder in folders if is_there(folder)), folders[-1])
    prepare_if_missing(folder, say)
    return folder


def main(options: EvaluateOptions) -> None:
    """Evaluate a model, alone or beside the other processes of torchrun."""
    reconfigure_output()
    advice = {
        "memory": "out of memory; take a smaller --batch_size, or --bf16",
        "other process": f"another process died or did not answer within {TIMEOUT:g} s ({{reason}})",
    }
    with (
        reported(options.run, advice=advice),
        joined_world(choose_device(options.device, launch()), TIMEOUT) as world,
    ):
        evaluate(options, world)


if __name__ == "__main__":
    main(OPTIONS)
