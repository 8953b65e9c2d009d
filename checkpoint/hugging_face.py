"""Hugging Face's form of GPT-2: OpenAI's own weights, and what transformers writes and reads."""

import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from checkpoint.files import (
    CheckpointError,
    Tensors,
    read_json,
    read_tensors,
    refusing,
)
from config import Config
from model import GPTConfig
from options import ARCHITECTURE

HUGGING_FACE = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # OpenAI's weights there
CONFIG, WEIGHTS = "config.json", "model.safetensors"
# transformers keeps these matrices as (in, out), nn.Linear as (out, in)
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
# name in transformers: name in Config
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
# name in transformers: name in GPTConfig
OPTIONS = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "n_positions": "block_size",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_weights",
    "resid_pdrop": "dropout",
}
# Options that our model does not have, each with the only value that it could have
REQUIRED = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}


def download(name: str) -> Path:
    """Return the folder of OpenAI's weights, gpt2 .. gpt2-xl, which are downloaded once.

    Raises CheckpointError.
    """
    with refusing(
        f"{name} could not be downloaded from Hugging Face; give the folder of a copy instead",
        Exception,  # huggingface_hub raises errors of its own and of its HTTP library
    ):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(f"openai-community/{name}", allow_patterns=[CONFIG, WEIGHTS]))


def read_hugging_face(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """Read the model's options (fields of GPTConfig) and weights that transformers has written.

    Raises CheckpointError, also for a model that differs from GPT-2.
    """
    theirs = read_json(folder / CONFIG)
    activation = str(theirs.get("activation_function", "gelu_new"))
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{folder}: activation_function {activation!r} is not one of {', '.join(ACTIVATIONS)}"
        )
    if wrong := [
        f"{name} {theirs[name]!r} (here always {value!r})"
        for name, value in REQUIRED.items()
        if theirs.get(name, value) != value
    ]:
        raise CheckpointError(
            f"{folder}: not a GPT-2 that this project can load: {', '.join(wrong)}"
        )
    if not (folder / WEIGHTS).exists():  # weights in several files, or in a pickle
        raise CheckpointError(
            f"{folder}: has no {WEIGHTS}; write it to another folder in Python: "
            f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})"
            f".save_pretrained('NEW', max_shard_size='100GB')"
        )
    # transformers' defaults are GPT-2 (124M)'s, like GPTConfig's, except for these two.
    options = {"tie_weights": True, "activation": ACTIVATIONS[activation]}
    options |= {ours: theirs[name] for name, ours in OPTIONS.items() if name in theirs}
    return options, transpose_conv1d(with_our_names(read_tensors(folder / WEIGHTS)))


def with_our_names(theirs: Tensors) -> Tensors:
    """Drop the causal masks of older files, and name weights as in GPT-2.

    torch.compile puts `_orig_mod.` before the names, DDP `module.`; some files lack `transformer.`.
    """
    ours = {}
    for name, tensor in theirs.items():
        name = re.sub(r"^((_orig_mod|module|transformer)\.)*", "", name)
        if not name.endswith((".attn.bias", ".attn.masked_bias")):
            ours[name if name.startswith("lm_head.") else f"transformer.{name}"] = tensor
    return ours


def transpose_conv1d(weights: Tensors) -> Tensors:
    """Turn transformers' matrices (in, out) into nn.Linear's (out, in), or the other way round."""
    return {
        name: tensor.transpose(0, -1) if name.endswith(CONV1D) else tensor
        for name, tensor in weights.items()
    }


def write_hugging_face(
    folder: Path, config: GPTConfig, weights: Tensors, end_of_text: int | None
) -> None:
    """Write a folder that transformers loads, by its own GPT2LMHeadModel, without padding rows.

    `weights`: a model's state_dict(). `end_of_text`: its token, if the vocabulary is known. Raises
    CheckpointError for a model that GPT-2 in transformers cannot be, without transformers, and if
    the weights cannot be written; otherwise OSError.
    """
    if wrong := [
        f"{name} {getattr(config, name)}"
        for name in Config.names_marked(ARCHITECTURE)
        if name not in (*OPTIONS.values(), "norm_weight")  # acts with rmsnorm alone
        and getattr(config, name) not in (getattr(GPTConfig, name), *ACTIVATIONS.values())
    ]:
        raise CheckpointError(
            f"the model has {', '.join(wrong)}, which GPT-2 in transformers cannot have"
        )
    with refusing("transformers is missing: pip install -r requirements-track.txt", ImportError):
        from transformers import GPT2Config, GPT2LMHeadModel
    options = {name: getattr(config, ours) for name, ours in OPTIONS.items()} | {
        "vocab_size": config.n_vocab,  # without the padding rows
        "activation_function": "gelu_new" if config.activation == "gelu_tanh" else "gelu",
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }
    model = GPT2LMHeadModel(GPT2Config(**options))
    model.generation_config.pad_token_id = end_of_text
    theirs = transpose_conv1d(weights)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        theirs[name] = theirs[name][: config.n_vocab]
    model.load_state_dict(theirs)
    with refusing(f"{folder}: cannot be written", SafetensorError):
        model.save_pretrained(folder)
