"""The model of a run: fresh, or with weights of a run, of Hugging Face or of nanoGPT."""

import os
import pickle
import re
import reprlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from checkpoint.files import (
    MODEL,
    STATE,
    CheckpointError,
    Tensors,
    read_tensors,
    refuse_pointer,
    refusing,
)
from checkpoint.hugging_face import (
    HUGGING_FACE,
    download,
    is_hugging_face,
    read_hugging_face,
    with_our_names,
)
from checkpoint.state import read_state
from config import ARCHITECTURE, GPT2_TOKENS, Config
from model import GPT, GPTConfig
from runtime.cli import ConfigError, load
from runtime.errors import in_a_line
from runtime.runlog import all_checkpoints


def build_model(config: Config, resumes: bool = False) -> tuple[Config, GPT]:
    """Build the model, fresh or with the weights of `init_from`, unless the run resumes: then
    `checkpoint.resume.restore` loads its weights.

    Returns the config too, which takes over the architecture of the weights in `init_from`. Raises
    CheckpointError for weights that cannot be loaded, ConfigError for options that contradict them.
    """
    if resumes or config.init_from == "scratch":
        return config, GPT(GPTConfig.of(config))
    path = find_weights(config.init_from, config.log_dir)
    theirs, weights = read_weights(path)
    given = config.model_dump(exclude_unset=True)
    fixed = {name: getattr(theirs, name) for name in Config.names_marked(ARCHITECTURE)}
    fixed["block_size"] = min(theirs.block_size, given.get("block_size", theirs.block_size))
    check_given(given, fixed, f"init_from {config.init_from}")
    # A given vocab_size may pad the same vocabulary to another size.
    own = {"vocab_size": theirs.vocab_size, "real_vocab_size": theirs.real_vocab_size} | given
    # The path that the name means now: tomorrow it may mean another run.
    config = load(Config, own | fixed | {"init_from": str(path)})
    if config.n_vocab != theirs.n_vocab:
        raise ConfigError(
            f"vocab_size {config.vocab_size} makes {config.n_vocab} tokens, but init_from {path} "
            f"has {theirs.n_vocab}; leave vocab_size and real_vocab_size out"
        )
    return config, load_weights(GPT(GPTConfig.of(config)), weights, path)


def check_given(given: dict[str, Any], fixed: dict[str, Any], source: object) -> None:
    """Raise ConfigError if given options differ from the values that `source` fixes."""
    if problems := [
        f"{name} {given[name]} contradicts {source}, which has {value}; leave {name} out"
        for name, value in fixed.items()
        if given.get(name, value) != value
    ]:
        raise ConfigError("\n".join(problems))


def load_model(source: str, log_dir: str = "logs") -> GPT:
    """Return the model of `source` (see `find_weights`) in evaluation mode, on the CPU.

    Raises CheckpointError.
    """
    path = find_weights(source, log_dir)
    config, weights = read_weights(path)
    return load_weights(GPT(config), weights, path).eval()


def weight_notes(path: Path, config: GPTConfig) -> list[str]:
    """Return `Config.weight_notes` of the weights at a path of `find_weights`.

    `config`: the model's options by `read_weights`.
    """
    options = vars(config) | {"init_from": str(path)}
    if (path / STATE).is_file():
        options = read_state(path, STATE).config
    return Config.model_construct(**options).weight_notes()


def load_weights(model: GPT, weights: Tensors, source: object) -> GPT:
    """Copy weights into the model, tied or not and padded or not on either side; returns it.

    Padding rows that only one side has stay as they are. A model with a shorter context gets the
    first positions. Raises CheckpointError for weights that do not fit.
    """
    problem = f"{source}: weights that do not fit the model"
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"{problem}: it has {name} of type {tensor.dtype}")
    ours, n_vocab = model.state_dict(), model.config.n_vocab
    positions = "transformer.wpe.weight"
    with refusing(problem, LookupError, RuntimeError, TypeError):
        embedding = weights["transformer.wte.weight"]
        weights = {"lm_head.weight": embedding} | weights
        if model.config.tie_weights and not torch.equal(weights["lm_head.weight"], embedding):
            raise CheckpointError(
                f"{problem}: it has an lm_head.weight other than its transformer.wte.weight, and "
                f"the model ties them"
            )
        if positions in ours:
            weights[positions] = weights[positions][: model.config.block_size]
        for name in ("transformer.wte.weight", "lm_head.weight"):
            theirs, padding = weights[name], ours[name][n_vocab:]
            if n_vocab <= len(theirs) != len(ours[name]):
                weights[name] = torch.cat((theirs[:n_vocab].to(padding), padding))
        model.load_state_dict(weights)
    return model


# ---- finding and reading


def find_folder(name: str, log_dir: str) -> Path | None:
    """Return a folder by name: a run below `log_dir`, or any path."""
    return next((path for path in (Path(log_dir) / name, Path(name)) if path.is_dir()), None)


def run_and_checkpoint(path: Path) -> tuple[Path, Path | None]:
    """Return the run's folder, and the checkpoint if the path names one.

    `path`: a run's folder, or a checkpoint in its checkpoints/.
    """
    # Not resolved: checkpoints/ may be a link to a larger disk, and the run's folder has the link.
    path = Path(os.path.abspath(path))
    if path.parent.name == "checkpoints" and not (path / "checkpoints").is_dir():
        return path.parent.parent, path
    return path, None


def find_weights(source: str, log_dir: str = "logs") -> Path:
    """Return the path of weights: a checkpoint, a Hugging Face folder or a `.pt` file.

    `source`: gpt2 .. gpt2-xl for OpenAI's weights, downloaded once; else the name or folder of a
    run, for its newest checkpoint; or one of these paths. Raises CheckpointError.
    """
    if source in HUGGING_FACE:
        return download(source)
    path = find_folder(source, log_dir) or Path(source)
    is_pt = path.suffix == ".pt" and path.is_file()
    if is_pt or (path / STATE).is_file() or is_hugging_face(path):
        return path
    run, _ = run_and_checkpoint(path)
    if path.is_dir() and (checkpoints := all_checkpoints(run)):
        return checkpoints[-1]
    runs = sorted(path.parent.name for path in Path(log_dir).glob("*/checkpoints"))
    raise CheckpointError(
        f"{source}: no such run with a checkpoint (one is saved at its end, or by "
        f"--checkpoint_every N), Hugging Face folder or .pt file of nanoGPT; {log_dir}/ has "
        f"{', '.join(runs) or 'no runs with checkpoints'}, and {', '.join(HUGGING_FACE)} name "
        f"OpenAI's weights"
    )


def read_weights(path: Path) -> tuple[GPTConfig, Tensors]:
    """Read the model's options and its weights, on the CPU, from a path of `find_weights`.

    Raises CheckpointError.
    """
    if path.is_file():
        options, weights = read_pt(path)
    elif is_hugging_face(path):
        options, weights = read_hugging_face(path)
    else:
        saved, weights = read_state(path, MODEL, STATE).config, read_tensors(path / MODEL)
        options = {name: saved[name] for name in vars(GPTConfig()) if name in saved}
    with refusing(f"{path}: its options do not make a model", ConfigError):
        # seq_len, an option of training, has to fit any block_size.
        config = GPTConfig.of(load(Config, options | {"seq_len": 1}))
    if config.vocab_size > GPT2_TOKENS and not (path / STATE).is_file():
        # Other projects do not store how many rows are tokens. 50304 rows are GPT-2's 50257 tokens
        # padded to a multiple of 64; another number includes tokens that were added.
        padded = config.vocab_size == -(-GPT2_TOKENS // 64) * 64
        config = replace(config, real_vocab_size=GPT2_TOKENS if padded else config.vocab_size)
    shape = weights.get("transformer.wte.weight", torch.empty(0)).shape
    if shape[:1] != (config.vocab_size,):  # more rows would be dropped as padding
        raise CheckpointError(
            f"{path}: weights that do not fit the model: transformer.wte.weight is {[*shape]}, by "
            f"its options it has {config.vocab_size} rows"
        )
    return config, weights


# ---- .pt files of nanoGPT and build-nanogpt: pickles, of which only tensors and plain values are
# taken; no code that a file names is ever imported or run


class _TheirGPTConfig:
    """Stand for the dataclass of that name in a file; its fields become attributes."""


def read_pt(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Read the model's options (fields of GPTConfig) and weights. Raises CheckpointError.

    nanoGPT's file has the options as a dict `model_args`, build-nanogpt's as a dataclass `config`.
    """
    content = _load(path)
    if not isinstance(content, dict):
        content = {type(content).__name__: content}
    theirs, config, weights = map(content.get, ("model_args", "config", "model"))
    activation = "gelu"  # nanoGPT's is the exact one
    if isinstance(config, _TheirGPTConfig):
        theirs, activation = vars(config), "gelu_tanh"
    if not (
        isinstance(theirs, dict)
        and isinstance(weights, dict)
        and all(map(torch.is_tensor, weights.values()))
    ):
        raise CheckpointError(
            f"{path}: not a checkpoint of nanoGPT (model, model_args) or build-nanogpt (model, "
            f"config), whose model is tensors: it has {reprlib.repr([*content])}"
        )
    # An option that is not in the file has no default: of a fork, it may have another meaning.
    sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size", "vocab_size"))
    if unknown := theirs.keys() - {*sizes, "bias", "dropout"}:
        raise CheckpointError(f"{path}: an option of a fork: {', '.join(map(str, unknown))}")
    options = {**sizes, **theirs, "activation": activation, "tie_weights": True}
    return options, with_our_names(weights)


def _load(path: Path) -> Any:
    """Load what torch.save wrote, if it is of tensors, plain values, and their GPTConfig."""
    refuse_pointer(path)
    allowed: list[Any] = [
        (_TheirGPTConfig, f"{pickled_in}.GPTConfig")
        for pickled_in in ("__main__", "train_gpt2", "model")
    ]
    try:
        with torch.serialization.safe_globals(allowed):
            # Mapped into memory, the optimizer's state, twice the model, is never read.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle can raise anything
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{path}: refused: it names {named[1][:80]}, which is code; of a .pt file only "
                f"tensors, plain values and the GPTConfig of nanoGPT and build-nanogpt are read"
            ) from None
        why = "" if isinstance(error, pickle.UnpicklingError) else f" ({in_a_line(error)})"
        raise CheckpointError(f"{path}: damaged, or not written by torch.save{why}") from None
