"""The model of a run: fresh, or with weights of a run, of Hugging Face or of nanoGPT."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpoint.files import MODEL, STATE, CheckpointError, Tensors, read_tensors, refusing
from checkpoint.hugging_face import (
    CONFIG,
    HUGGING_FACE,
    download,
    read_hugging_face,
    with_our_names,
)
from checkpoint.names import all_checkpoints, find_folder
from checkpoint.saved import SavedState, read_state
from config import Config
from data.prepare import known_vocabulary
from data.vocabulary import GPT2, Vocabulary, check_same
from model import GPT, GPTConfig
from options import ARCHITECTURE
from runtime.cli import ConfigError, load
from runtime.console import log

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
POSITIONS = "transformer.wpe.weight"


class Weights(NamedTuple):
    """Weights on the CPU, and the options of their model."""

    path: Path  # a checkpoint, a Hugging Face folder or a `.pt` file
    config: GPTConfig
    tensors: Tensors
    saved: SavedState | None  # the run's state, if they are a checkpoint

    @property
    def vocabulary(self) -> Vocabulary:
        """Their vocabulary, if its size is that of the model; those of other projects: GPT-2's."""
        return self.saved.vocabulary if self.saved else GPT2

    def model(self) -> GPT:
        """Return their model in evaluation mode. Raises CheckpointError."""
        return load_weights(GPT(self.config), self.tensors, self.path).eval()

    def note_options(self) -> None:
        """Tell the notes on the options that they were trained with."""
        options = vars(self.config) | {"init_from": str(self.path)}
        if self.saved:
            self.saved.note_unknown()
            options = self.saved.config
        for note in Config.model_construct(**options).weight_notes():
            log.warning(note)


def adopt_architecture(config: Config) -> Config:
    """Return the config as `build_model` does; GPT-2's vocabulary if the corpus is missing."""
    folder = Path(config.data_dir) / config.dataset
    vocabulary = known_vocabulary(folder)
    if config.init_from == "scratch":
        return adopt_vocabulary(config, vocabulary)
    return build_model(config, vocabulary)[0]


def adopt_vocabulary(config: Config, vocabulary: Vocabulary | None) -> Config:
    """Return the config with the size of a corpus's own vocabulary; if it pads, to a multiple of
    128.
    """
    if vocabulary is None or vocabulary == GPT2:
        return config
    size = rows = vocabulary.size
    if config.vocab_size > config.n_vocab:
        rows = -(-size // 128) * 128
    return config.with_options(vocab_size=rows, real_vocab_size=size)


def build_model(
    config: Config, vocabulary: Vocabulary | None = None, resumed: SavedState | None = None
) -> tuple[Config, GPT]:
    """Build the model, fresh or with the weights of `init_from`, unless the run resumes: then
    `run.start.restore` loads its weights.

    Returns the config too, which takes over the architecture of the weights in `init_from`, and the
    size of the corpus's own `vocabulary`. Raises CheckpointError for weights that cannot be loaded,
    ConfigError for options that contradict them, UserError for weights of another vocabulary.
    """
    folder = Path(config.data_dir) / config.dataset
    if resumed and vocabulary:
        check_same(resumed.folder, resumed.vocabulary, folder, vocabulary)
    config = adopt_vocabulary(config, vocabulary)
    if resumed or config.init_from == "scratch":
        return config, GPT(GPTConfig.of(config))
    found = read_weights(config.init_from, config.log_dir)
    path, theirs, weights = found.path, found.config, found.tensors
    if vocabulary:
        check_same(path, found.vocabulary, folder, vocabulary)
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
    return read_weights(source, log_dir).model()


def load_weights(model: GPT, weights: Tensors, source: object) -> GPT:
    """Copy weights into the model, tied or not and padded or not on either side; returns it.

    Padding rows that only one side has stay as they are. A model with a shorter context gets the
    first positions. Raises CheckpointError for weights that do not fit.
    """
    problem = f"{source}: weights that do not fit the model"
    ours, config = model.state_dict(), model.config
    with refusing(problem, LookupError, RuntimeError, TypeError):
        weights = {HEAD: weights[EMBEDDING]} | weights
        if not all(map(torch.is_floating_point, weights.values())):
            raise CheckpointError(f"{problem}: not all are floating-point numbers")
        if config.tie_weights and not torch.equal(weights[HEAD], weights[EMBEDDING]):
            raise CheckpointError(
                f"{problem}: their {HEAD} is not their {EMBEDDING}, and the model ties them"
            )
        if POSITIONS in ours:
            weights[POSITIONS] = weights[POSITIONS][: config.block_size]
        for name in ours.keys() & weights:
            theirs, own = weights[name], ours[name]
            # Tensors with a row for each token may differ in their padding rows.
            if config.n_vocab <= len(theirs) != len(own) == config.vocab_size:
                padding = own[config.n_vocab :]
                weights[name] = torch.cat((theirs[: config.n_vocab].to(padding), padding))
        model.load_state_dict(weights)
    return model


# ---- finding and reading


def find_weights(source: str, log_dir: str) -> Path:
    """Return the path of weights: a checkpoint, a Hugging Face folder or a `.pt` file.

    `source`: gpt2 .. gpt2-xl for OpenAI's weights, downloaded once; else the name or folder of a
    run, for its newest checkpoint; or one of these paths. Raises CheckpointError.
    """
    if source in HUGGING_FACE:
        return download(source)
    path = find_folder(source, log_dir)
    if any(file.is_file() for file in (path, path / STATE, path / CONFIG)):
        return path
    if checkpoints := all_checkpoints(path.absolute()):
        return checkpoints[-1]
    runs = sorted(path.parent.name for path in Path(log_dir).glob("*/checkpoints"))
    raise CheckpointError(
        f"{source}: no such run with a checkpoint (one is saved at its end, or by "
        f"--checkpoint_every N), Hugging Face folder or .pt file of nanoGPT; {log_dir}/ has "
        f"{', '.join(runs) or 'no runs with checkpoints'}, and {', '.join(HUGGING_FACE)} name "
        f"OpenAI's weights"
    )


def read_weights(source: str, log_dir: str = "logs") -> Weights:
    """Read the weights of `source` (see `find_weights`). Raises CheckpointError."""
    path, saved = find_weights(source, log_dir), None
    if path.is_file():
        options, tensors = read_pt(path)
    elif (path / CONFIG).is_file():
        options, tensors = read_hugging_face(path)
    else:
        saved, tensors = read_state(path, MODEL, STATE), read_tensors(path / MODEL)
        options = {name: saved.config[name] for name in vars(GPTConfig()) if name in saved.config}
    with refusing(f"{path}: its options do not make a model", ConfigError):
        # seq_len, an option of training, has to fit any block_size.
        config = GPTConfig.of(load(Config, options | {"seq_len": 1}))
    if not saved and config.vocab_size > GPT2.size:
        # Other projects do not store how many rows are tokens. 50304 rows are GPT-2's 50257 tokens
        # and padding; any other number of rows includes added tokens.
        n_vocab = GPT2.size if config.vocab_size == 50304 else config.vocab_size
        config = replace(config, real_vocab_size=n_vocab)
    # All else is compared when a model loads the weights, but it takes another number of rows.
    sizes = {
        EMBEDDING: (config.vocab_size, config.n_embd),
        POSITIONS: (config.block_size, config.n_embd),
    }
    for name, size in sizes.items():
        shape = tuple(getattr(tensors.get(name), "shape", size))  # a .pt file may have any value
        if shape != size:
            raise CheckpointError(f"{path}: its {name} is {shape}, but its options say {size}")
    return Weights(path, config, tensors, saved)


# ---- .pt files of nanoGPT and build-nanogpt: pickles, of which only tensors and plain values are
# taken; no code that a file names is ever imported or run


class _TheirGPTConfig:
    """Stand for the dataclass of that name in a file; its fields become attributes."""


def read_pt(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Read the model's options (fields of GPTConfig) and weights. Raises CheckpointError.

    nanoGPT's file has the options as a dict `model_args`, build-nanogpt's as a dataclass `config`.
    """
    allowed: list[Any] = [
        (_TheirGPTConfig, f"{pickled_in}.GPTConfig")
        for pickled_in in ("__main__", "train_gpt2", "model")
    ]
    with refusing(
        f"{path}: not a whole checkpoint of nanoGPT (model, model_args) or build-nanogpt (model, "
        f"config); of a .pt file only tensors, plain values and their GPTConfig are read",
        Exception,  # a damaged pickle can raise anything
    ):
        with torch.serialization.safe_globals(allowed):
            # Mapped into memory, the optimizer's state, twice the model, is never read.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        theirs, activation = content.get("model_args"), "gelu"  # nanoGPT's is the exact one
        if theirs is None:
            theirs, activation = vars(content["config"]), "gelu_tanh"
        theirs = dict(theirs)
        weights = with_our_names(content["model"])
    # An option that is missing has no default, and one of a fork may change the model.
    sizes = {"n_layer", "n_head", "n_embd", "block_size", "vocab_size"}
    if wrong := (theirs.keys() - {"bias", "dropout"}) ^ sizes:
        names = ", ".join(sorted(map(str, wrong)))
        raise CheckpointError(f"{path}: options of a fork, or missing: {names}")
    return {**theirs, "activation": activation, "tie_weights": True}, weights
