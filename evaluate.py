"""What a model has learned: `python evaluate.py quickstart`, or `python evaluate.py gpt2
--hellaswag download`.

The validation loss and its perplexity, always over the same tokens, each exactly once; and the
scores in HellaSwag. The processes that torchrun starts share the work.
"""

import functools
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from runtime.cli import ConfigError, Name, Options, Positive
from runtime.errors import UserError, reported
from runtime.start import start

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
from checkpoint.resume import check_same_tokens
from checkpoint.weights import find_weights, load_model
from data.hellaswag import download
from data.prepare import is_there, prepare_if_missing
from dataloader import TokenStream, is_validation, open_corpus
from inference.hellaswag import METRICS, read_questions, score
from inference.sampling import encode
from inference.validation import Autocast, count_sequences, validation_loss
from model import GPT, GPTConfig
from runtime.device import (
    check_precision,
    choose_device,
    device_name,
    make_repeatable,
    matmul_dtype,
    usable_precision,
)
from runtime.files import write_whole
from runtime.launch import launch
from runtime.world import World, joined_world

TIMEOUT = 3600.0  # seconds after which a rank gives up waiting for another one
Say = Callable[[str], None]
RESULTS = (
    "{weights}: {parameters:,} parameters, {dtype}, batch_size {batch_size}; device {device}, "
    "processes: {processes}"
)
VALIDATION = (
    "{corpus}: validation loss {loss:.4f} nats per token, perplexity {perplexity:,.2f}, over "
    "{tokens:,} tokens in sequences of {seq_len}"
)


def evaluate(options: EvaluateOptions, world: World) -> dict[str, Any]:
    """Print what a model has learned; returns what --json holds. All ranks have to call this.

    Raises UserError.
    """

    def say(text: str) -> None:
        if world.rank == 0:
            print(text, flush=True)

    folder, state, model = read_model(options, world)
    trained = state.get("config", {})  # empty for weights that are no run's
    dtype = choose_dtype(options, trained)
    batch_size = options.batch_size or trained.get("batch_size", 4)
    results: dict[str, Any] = {
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
    say(RESULTS.format(**results))
    make_repeatable(world.device)
    wanted = "high" if trained.get("tf32") else trained.get("matmul_precision", "highest")
    autocast, notes = set_precision(world.device, dtype, wanted)
    for note in notes:
        say(f"note: {note}")

    # all that is read, before anything is computed: mistakes are told at once
    file = world.on_rank0(lambda: find_hellaswag(options, model, trained))
    items = read_questions(file, world) if file else []
    validation = open_validation(options, state, model.config, world, say)
    if validation:
        _, stream, tokens = validation
        loss = validation_loss(model, stream, batch_size, tokens, world, autocast)
        results["validation"] = describe_loss(loss, *validation)
        say(VALIDATION.format(**results["validation"]))
    if file:
        scores = score(model, items, batch_size * model.config.block_size, world, autocast)
        results["hellaswag"] = {"file": str(file)} | scores
        say(describe_scores(scores))
    if options.json and world.rank == 0:
        write_whole(Path(options.json), json.dumps(results, indent=1, allow_nan=False) + "\n")
    return results


def choose_dtype(options: EvaluateOptions, trained: dict[str, Any]) -> torch.dtype:
    """Return the dtype of matmuls: that of --bf16, else the run's."""
    precision = trained if options.bf16 is None else {"bf16": options.bf16}
    return matmul_dtype(bf16=precision.get("bf16", False), fp16=precision.get("fp16", False))


def set_precision(
    device: torch.device, dtype: torch.dtype, matmul_precision: str
) -> tuple[Autocast, list[str]]:
    """Set the process's precision as train.setup does; returns its autocast, and notes."""
    torch.set_float32_matmul_precision(usable_precision(device, matmul_precision))
    mixed, is_bf16 = dtype != torch.float32, dtype == torch.bfloat16
    autocast = functools.partial(torch.autocast, device.type, dtype=dtype, enabled=mixed)
    return autocast, check_precision(device, matmul_precision=matmul_precision, bf16=is_bf16)


def read_model(options: EvaluateOptions, world: World) -> tuple[Path, dict[str, Any], GPT]:
    """Return the folder of the weights, what its checkpoint.json holds (nothing for weights that
    are no run's), and the model on its device.

    Raises UserError, also if there is nothing to evaluate on, or no place for the results.
    """
    # one answer for all ranks: the run may be training, and save meanwhile
    folder = world.on_rank0(lambda: find_weights(options.run, options.log_dir)).absolute()
    state = read_json(folder / STATE) if (folder / STATE).is_file() else {}
    if not (state or options.dataset or options.hellaswag):
        raise ConfigError(
            f"{options.run}: evaluate it on what? Name a corpus, --dataset NAME, or give "
            f"--hellaswag FILE or --hellaswag download"
        )
    if options.json and not Path(options.json).absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: cannot be written: its folder is not there")
    return folder, state, load_model(str(folder)).to(world.device)


def describe_loss(
    loss: float, corpus: Path, stream: TokenStream, tokens: int | None
) -> dict[str, Any]:
    """Return what --json holds of a validation loss."""
    return {
        "corpus": str(corpus),
        "tokens": count_sequences(stream, tokens) * stream.seq_len,
        "seq_len": stream.seq_len,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),
    }


def describe_scores(scores: dict[str, Any]) -> str:
    """Return lines on HellaSwag's scores."""
    lines = [f"HellaSwag, {scores['items']:,} items, each score with its 95% interval:"]
    for metric, meaning in METRICS.items():
        share, (low, high) = scores[metric].values()
        lines.append(f"  {metric:<9}  {share:.4f}  ({low:.4f} to {high:.4f})  {meaning}")
    return "\n".join(lines)


def find_hellaswag(options: EvaluateOptions, model: GPT, trained: dict[str, Any]) -> Path | None:
    """Return the file that --hellaswag means, if any; downloads it if asked to."""
    if options.hellaswag is None:
        return None
    encode(model, "")  # raises UserError for another vocabulary than GPT-2's
    if options.hellaswag == "download":
        return download(options.data_dir or trained.get("data_dir", "data"))
    return Path(options.hellaswag)


def open_validation(
    options: EvaluateOptions, state: dict[str, Any], config: GPTConfig, world: World, say: Say
) -> tuple[Path, TokenStream, int | None] | None:
    """Return the corpus that the options mean, its validation split, and the number of tokens that
    the loss is the mean of (none: all).

    None without a corpus, or where a run's own cannot be had and nobody asked for it.
    """
    trained = state.get("config", {})
    if not (dataset := options.dataset or trained.get("dataset")):
        for name in {"tokens", "seq_len", "val_fraction"} & options.model_fields_set:
            say(f"note: {name} has no effect without a validation loss")
        return None
    own = trained if dataset == trained.get("dataset") else {}
    seq_len = options.seq_len or trained.get("seq_len", config.block_size)
    fraction = options.val_fraction
    if fraction is None:
        fraction = own.get("val_fraction", 0.0)
    if seq_len > config.block_size:
        raise ConfigError(
            f"--seq_len {seq_len}: longer than the model's context, {config.block_size}"
        )
    places = [options.data_dir] if options.data_dir else [trained.get("data_dir", "data"), "data"]
    folders = [Path(place) / dataset for place in places]
    try:
        folder = world.on_rank0(lambda: next(filter(is_there, folders), folders[-1]))
        world.on_rank0(lambda: prepare_if_missing(folder, say))
        rest, stream = world.raise_on_all(
            lambda: open_split(folder, seq_len, config.n_vocab, fraction)
        )
    except UserError as error:
        if options.dataset or not options.hellaswag:
            raise
        say(f"note: no validation loss: {error}")
        return None
    check_same_tokens(str(folder), rest.fingerprint() + stream.fingerprint(), world)
    if options.val_fraction is not None and is_validation(stream.spans[0].path):
        say(f"note: val_fraction has no effect: {folder} has validation files of its own")
    if fraction == own.get("val_fraction") and rest.fingerprint() != state["corpus"]:
        say(f"note: {folder} is not the corpus that the run trained on: its tokens differ")
    return folder, stream, options.tokens or own.get("eval_tokens")


def open_split(
    folder: Path, seq_len: int, n_vocab: int, fraction: float
) -> tuple[TokenStream, TokenStream]:
    """Open a corpus and its validation split. Raises UserError if that is less than a sequence."""
    rest, stream = open_corpus(folder, seq_len, n_vocab, fraction)
    if not len(stream):
        raise UserError(
            f"{folder}: {stream.tokens:,} tokens for validation make no sequence of {seq_len}: "
            f"without *_val_*.bin files, give the share of its tokens to take, off the tail, such "
            f"as --val_fraction 0.1, or 1 for all; or lower --seq_len"
        )
    return rest, stream


def main(options: EvaluateOptions) -> None:
    """Evaluate a model, alone or with the other ranks of torchrun."""
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
