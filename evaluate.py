"""What a model has learned: `python evaluate.py quickstart`, or `python evaluate.py gpt2
--hellaswag download`.

The validation loss and its perplexity, always over the same tokens, each exactly once; and the
scores in HellaSwag. The processes that torchrun starts share the work.
"""

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from runtime.cli import ConfigError, Name, Options, Positive
from runtime.errors import TrainingError, UserError, reported
from runtime.start import reconfigure_output, start

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
    # Before torch is imported, which takes seconds: --help and mistakes answer at once.
    OPTIONS = start(EvaluateOptions, description=__doc__, positional="run")

import torch

from checkpoint.files import STATE, read_json
from checkpoint.weights import find_weights, load_model
from data.hellaswag import download
from data.prepare import is_there, prepare_if_missing
from data.tokenizer import get_encoding
from dataloader import TokenStream, is_validation, open_corpus
from inference.hellaswag import METRICS, Question, read_questions, score
from inference.validation import (
    Autocast,
    Progress,
    count_sequences,
    ignore_progress,
    validation_loss,
)
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
from runtime.launch import launch
from runtime.world import World, joined_world

TIMEOUT = 3600.0  # seconds after which a process gives up waiting for another one


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
            else ignore_progress
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
        count, perplexity = (
            count_sequences(stream, tokens) * stream.seq_len,
            math.exp(min(loss, 700)),
        )
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
        "lost rank": f"another rank has died, or did not answer within {TIMEOUT:g} s ({{reason}}); "
        f"its own message, if it left one, says why",
    }
    with (
        reported(options.run, advice=advice),
        joined_world(choose_device(options.device, launch()), TIMEOUT) as world,
    ):
        evaluate(options, world)


if __name__ == "__main__":
    main(OPTIONS)
