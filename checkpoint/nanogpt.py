"""`.pt` files of nanoGPT and build-nanogpt.

They are pickles, of which only tensors and plain values are taken: no code that a file names is
ever imported or run.
"""

import pickle
import re
import reprlib
import warnings
from pathlib import Path
from typing import Any

import torch

from checkpoint.files import CheckpointError, Tensors
from checkpoint.hugging_face import with_our_names
from runtime.errors import in_a_line

# their dataclass of options, by the module it was pickled in
THEIR_GPT_CONFIG = ("__main__.GPTConfig", "train_gpt2.GPTConfig", "model.GPTConfig")


class _TheirGPTConfig:
    """Stand for the dataclass of that name in a file; its fields become attributes."""


def read_pt(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Read the model's options (fields of GPTConfig) and weights. Raises CheckpointError.

    nanoGPT's file has the options as a dict `model_args`, build-nanogpt's as a dataclass `config`.
    """
    content = _load(path)
    if not isinstance(content, dict):
        content = {type(content).__name__: content}
    theirs, config, weights = (content.get(key) for key in ("model_args", "config", "model"))
    activation = "gelu"  # nanoGPT's is the exact one
    if isinstance(config, _TheirGPTConfig):
        theirs, activation = vars(config), "gelu_tanh"
    if (
        not isinstance(theirs, dict)
        or not isinstance(weights, dict)
        or not all(map(torch.is_tensor, weights.values()))
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
    allowed: list[Any] = [(_TheirGPTConfig, name) for name in THEIR_GPT_CONFIG]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore")
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
