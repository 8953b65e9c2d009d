"""Evaluate a model: `python evaluate.py quickstart`, or `python evaluate.py gpt2 --hellaswag
download`.

Prints the validation loss, perplexity and bits per byte, always over the same tokens, each exactly
once, and the HellaSwag score. Under torchrun the ranks share the work.
"""

import math
import warnings
from pathlib import Path
from typing import Any

from pydantic import Field

from runtime.cli import ConfigError, Device, Name, Options, Positive
from runtime.errors import UserError, reported
from runtime.start import start

warnings.filterwarnings("ignore", 'Field name "json"')  # pydantic has a method of this name


class EvaluateOptions(Options):
    """options"""

    run: Name
    """a run's name or folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl, a Hugging Face model
    folder, or a .pt file of nanoGPT
    """
    dataset: Name | None = None
    """corpus whose validation split gives the loss (default: the run's own)"""
    data_dir: Name | None = None
    """folder of the corpora (default: the run's own, or data)"""
    val_fraction: float | None = Field(None, ge=0, le=1)
    """share at the end of a corpus without validation files (default: the run's own)"""
    seq_len: Positive | None = None
    """tokens per sequence (default: the run's own, or the model's whole context)"""
    tokens: Positive | None = None
    """tokens to average the loss over (default: the run's own eval_tokens, or all)"""
    batch_size: Positive | None = None
    """sequences per batch and rank (default: the run's own, or 4)"""
    bf16: bool | None = None
    """bfloat16 autocast (default: the run's own precision, or fp32)"""
    hellaswag: Name | None = None
    """also score HellaSwag: a file in its format, or download, to data_dir/hellaswag"""
    json: Name | None = None  # type: ignore[assignment]
    """JSON file for the results, at full precision"""
    device: Device = "auto"
    """auto, cuda, mps or cpu"""
    log_dir: Name = "logs"
    """folder of the runs"""


if __name__ == "__main__":
    # Read options before importing torch, which takes seconds, so that --help and errors are quick.
    OPTIONS = start(EvaluateOptions, positional="run")

import torch

from checkpoint.weights import Weights, find_weights, read_weights
from config import Config
from data.hellaswag import download
from data.prepare import prepare_if_missing
from data.vocabulary import Vocabulary, check_same
from dataloader import TokenStream, open_corpus
from inference.hellaswag import read_questions, score
from inference.validation import (
    bits_per_byte,
    bytes_per_target,
    check_split,
    count_sequences,
    validation_loss,
)
from model import GPT
from run.start import check_same_tokens
from runtime.console import Console, log
from runtime.device import (
    check_precision,
    choose_device,
    device_name,
    make_repeatable,
    usable_precision,
)
from runtime.files import write_json
from runtime.world import World, joined_world

Results = dict[str, Any]  # the content of --json, or a part of it
TIMEOUT = 3600.0  # seconds after which a rank gives up waiting for another one


def evaluate(options: EvaluateOptions, world: World) -> Results:
    """Evaluate a model; returns the content of --json. All ranks have to call this.

    Raises UserError.
    """
    # Rank 0 chooses the checkpoint for all ranks: the run may save another one meanwhile.
    path = world.on_rank0(lambda: find_weights(options.run, options.log_dir)).absolute()
    weights = read_weights(str(path))
    config, model = merge_options(options, weights), weights.model().to(world.device)
    results: Results = {
        "run": options.run,
        "weights": str(path),
        "step": weights.saved.step if weights.saved else None,
        "parameters": model.num_parameters(),
        "device": device_name(world.device),
        "dtype": config.matmul_dtype,
        "processes": world.world_size,
        "batch_size": config.batch_size,
        "torch": torch.__version__,
    }
    log.info(
        f"{path}: {results['parameters']:,} parameters, {config.matmul_dtype}, batch_size "
        f"{config.batch_size}; device {results['device']}, processes: {world.world_size}"
    )
    dtype = set_precision(config, weights, world.device)
    # Read everything before computing anything, so that mistakes end the command at once.
    file = options.hellaswag
    if file == "download":
        file = str(world.on_rank0(lambda: download(config.data_dir)))
    if file:
        encoding = weights.vocabulary.encoding_for(config.n_vocab)
        questions = read_questions(Path(file), encoding, config.block_size, world)
    val = open_validation(options, config, weights, world)
    with torch.autocast(world.device.type, dtype=dtype, enabled=dtype != torch.float32):
        if val:
            results["validation"] = validate(model, val, config, weights.vocabulary, world)
        if file:
            scores = score(model, questions, config.batch_size * config.block_size, world)
            print_score(scores)
            results["hellaswag"] = {"file": file} | scores
    return results


def merge_options(options: EvaluateOptions, weights: Weights) -> Config:
    """Return the run's options, overridden by the given ones.

    Without a run, they are the model's and the defaults, without a corpus. Raises ConfigError if
    there is nothing to evaluate on, or the model's context is too short.
    """
    block_size = weights.config.block_size
    config = vars(weights.config) | {"dataset": "", "seq_len": block_size}
    if weights.saved:
        config = dict(weights.saved.config)
    elif not (options.dataset or options.hellaswag):
        raise ConfigError(
            f"{options.run}: evaluate it on what? Name a corpus, --dataset NAME, or give "
            "--hellaswag FILE or --hellaswag download"
        )
    if options.dataset not in (None, config["dataset"]):
        config |= {"val_fraction": 0.0, "eval_tokens": None}  # the run's are for its own corpus
    config |= options.model_dump(include={*Config.model_fields}, exclude_none=True)
    if options.tokens:
        config["eval_tokens"] = options.tokens
    if options.bf16 is not None:
        config["fp16"] = False
    if config["seq_len"] > block_size:
        raise ConfigError(
            f"--seq_len {options.seq_len}: longer than the model's context, {block_size}"
        )
    return Config.model_construct(**config)


def set_precision(config: Config, weights: Weights, device: torch.device) -> torch.dtype:
    """Set the precision of the whole process, like train.setup, and tell notes.

    Returns the dtype of matmuls. Raises UserError if the device lacks it.
    """
    dtype, precision = getattr(torch, config.matmul_dtype), config.fp32_precision()
    make_repeatable(device)
    torch.set_float32_matmul_precision(usable_precision(device, precision))
    weights.note_options()
    check_precision(device, dtype, precision)
    return dtype


def open_validation(
    options: EvaluateOptions, config: Config, weights: Weights, world: World
) -> TokenStream | None:
    """Open the validation split. None without a corpus, or if a run's own is missing and only
    HellaSwag is needed.
    """
    if not config.dataset:
        for name in sorted({"tokens", "seq_len", "val_fraction"} & options.model_fields_set):
            log.warning(f"{name} has no effect without a validation loss")
        return None
    folder, saved = Path(config.data_dir, config.dataset), weights.saved
    try:
        val, trained_on = open_split(folder, config, weights, world)
    except UserError as error:
        if options.dataset or not options.hellaswag:
            raise
        log.warning(f"no validation loss: {error}")
        return None
    if saved and saved.config["dataset"] == config.dataset and saved.corpus != trained_on:
        log.warning(f"the run trained on other tokens of {folder}, perhaps on this split's too")
    return val


def open_split(
    folder: Path, config: Config, weights: Weights, world: World
) -> tuple[TokenStream, str]:
    """Open the validation split of a corpus; returns the training split's fingerprint too.

    Raises UserError on all ranks unless all have the same tokens, of the weights' vocabulary, and
    at least one sequence.
    """
    vocabulary = world.on_rank0(lambda: prepare_if_missing(folder))
    check_same(weights.path, weights.vocabulary, folder, vocabulary)
    train, val = world.raise_on_all(
        lambda: open_corpus(
            folder, config.seq_len, config.n_vocab, config.val_fraction, to_train=False
        )
    )
    of_training, of_validation = world.raise_on_all(
        lambda: (train.fingerprint(), val.fingerprint())
    )
    check_same_tokens(str(folder), of_training + of_validation, world)
    check_split(val, str(folder), config.val_fraction)
    return val, of_training


def validate(
    model: GPT, val: TokenStream, config: Config, vocabulary: Vocabulary, world: World
) -> Results:
    """Compute and print the validation loss; returns its part of --json."""
    tokens = count_sequences(val, config.eval_tokens) * val.seq_len
    size = 0.0  # mean bytes of a target's text, if the vocabulary is known
    if config.n_vocab == vocabulary.size:
        size = world.on_rank0(lambda: bytes_per_target(val, tokens, vocabulary.encoding))
    loss = validation_loss(model, val, config.batch_size, tokens, world)
    results = {
        "corpus": str(val.spans[0].file.path.parent),
        "tokens": tokens,
        "seq_len": val.seq_len,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700)),  # exp overflows from 710 on
        "bits_per_byte": bits_per_byte(loss, size) if size else None,
    }
    in_bits = f", {results['bits_per_byte']:.4f} bits per byte" if size else ""
    log.info(
        f"{results['corpus']}: validation loss {loss:.4f} nats per token, perplexity "
        f"{results['perplexity']:,.2f}{in_bits}, over {tokens:,} tokens in sequences of "
        f"{val.seq_len}"
    )
    return results


def print_score(scores: Results) -> None:
    """Print HellaSwag's score."""
    accuracy = scores["acc_norm"]
    low, high = accuracy["interval"]
    log.info(
        f"HellaSwag, {scores['items']:,} items: acc_norm {accuracy['score']:.4f} (95% interval "
        f"{low:.4f} to {high:.4f})"
    )


def main(options: EvaluateOptions) -> None:
    """Evaluate a model, alone or with the other ranks of torchrun, and write --json."""
    advice = {
        "memory": "out of memory; take a smaller --batch_size, or --bf16",
        "lost rank": f"another rank has died, or did not answer within {TIMEOUT:g} s ({{reason}}); "
        "its own message may have the reason",
    }
    with (
        reported(options.run, advice=advice),
        joined_world(choose_device(options.device), TIMEOUT) as world,
        Console(world.rank),
    ):
        report = Path(options.json) if options.json else None
        if report and report.is_dir():  # known before hours of evaluation
            raise UserError(f"--json {report}: is a folder; name a file")
        results = evaluate(options, world)
        if report and not world.rank:
            report.parent.mkdir(parents=True, exist_ok=True)
            write_json(report, results)


if __name__ == "__main__":
    main(OPTIONS)
