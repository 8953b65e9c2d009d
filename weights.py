"""A model's weights: fresh, from a run of this project, or from Hugging Face; and the model that they make.

Nothing that is read here is ever unpickled.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from model import GPT, GPTConfig, ModelError
from runtime.cli import ConfigError, Options
from runtime.cli import load as load_options
from runtime.errors import UserError, in_a_line
from runtime.files import sha256
from runtime.runlog import all_checkpoints

HUGGING_FACE = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
# what has to be the same for weights to fit a model
ARCHITECTURE = ("n_layer", "n_head", "n_embd", "block_size", "bias", "norm", "activation", "tie_weights")
EMBEDDING_AND_HEAD = ("transformer.wte.weight", "lm_head.weight")  # one tensor where weights are tied
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # which transformers keeps as (in, out), nn.Linear as (out, in)
MODEL, OPTIMIZER, STATE, SUMS = "model.safetensors", "optimizer.safetensors", "checkpoint.json", "SHA256SUMS"

O = TypeVar("O", bound=Options)


class CheckpointError(UserError):
    """A checkpoint or weights that cannot be written, found, read or used; the message says which and what to do."""


# ---- the model of a run


def build_model(config: O, checkpoint: Path | None = None) -> tuple[O, GPT]:
    """The model: from a checkpoint of the run, or fresh, or from the weights that `init_from` names, whose architecture the
    options then take over.

    `config` are a run's options, config.py's Config. Raises CheckpointError for weights that cannot be had, ConfigError for
    options that contradict them.
    """
    values = config.model_dump()
    if checkpoint is not None:
        _, weights = read_weights(checkpoint)  # before the model: this checks its size
        return config, _model_of(GPTConfig.of(config), weights, str(checkpoint))
    if values["init_from"] == "scratch":
        return config, GPT(GPTConfig.of(config))
    folder, theirs, weights = _find_and_read(values["init_from"], values["log_dir"])
    given = config.model_dump(include=config.model_fields_set)
    fixed = {name: theirs[name] for name in ARCHITECTURE}
    if wrong := [name for name in fixed if name in given and given[name] != fixed[name]]:
        raise ConfigError("\n".join(f"{name} {given[name]} contradicts init_from {values['init_from']}, which has {fixed[name]}; "
                                    f"leave {name} out" for name in wrong))
    n_vocab = _config_of(theirs, str(folder)).n_vocab
    # the checkpoint's own path, as the name may mean another run tomorrow
    vocabulary = {"vocab_size": theirs["vocab_size"], "real_vocab_size": theirs.get("real_vocab_size")}
    config = load_options(type(config), vocabulary | given | fixed | {"init_from": str(folder)})
    ours = GPTConfig.of(config)
    if ours.n_vocab != n_vocab:
        raise ConfigError(f"vocab_size {ours.vocab_size} makes {ours.n_vocab} tokens, but init_from {folder} has "
                          f"{n_vocab}; leave vocab_size and real_vocab_size out")
    return config, _model_of(ours, weights, str(folder))


def load_model(source: str, log_dir: str = "logs") -> GPT:
    """The model of `source`, as `find_weights` takes it, in evaluation mode on the CPU. Raises CheckpointError."""
    _, options, weights = _find_and_read(source, log_dir)
    return _model_of(_config_of(options, source), weights, source).eval()


def _config_of(options: dict[str, Any], source: str) -> GPTConfig:
    try:
        return GPTConfig(**options)
    except (TypeError, ModelError) as error:
        raise CheckpointError(f"{source}: its options do not make a model: {error}") from None


def _model_of(config: GPTConfig, weights: dict[str, Tensor], source: str) -> GPT:
    try:
        model = GPT(config)
    except (TypeError, RuntimeError) as error:
        raise CheckpointError(f"{source}: its options do not make a model: {error}") from None
    load_weights(model, weights, source)
    return model


def load_weights(model: GPT, weights: dict[str, Tensor], source: str) -> None:
    """Copy weights into the model, tied and padded or not on either side: padding rows that only one side has stay as they are.

    Raises CheckpointError for weights that are missing, unknown or of another shape.
    """
    weights = dict(weights)
    weights.setdefault("lm_head.weight", weights.get("transformer.wte.weight", torch.empty(0)))
    ours = model.state_dict()
    problems = [f"lacks {name}" for name in ours if name not in weights]
    problems += [f"has an unknown {name}" for name in weights if name not in ours]
    wte, head = (weights.get(name, torch.empty(0)) for name in EMBEDDING_AND_HEAD)
    if model.config.tie_weights and head is not wte and not torch.equal(head, wte):
        problems.append("has an lm_head.weight other than its transformer.wte.weight, and the model ties them")
    for name in ours.keys() & weights.keys():
        rows = model.config.n_vocab if name in EMBEDDING_AND_HEAD else None
        rows = None if ours[name].shape == weights[name].shape else rows
        if not weights[name].dim() or ours[name][:rows].shape != weights[name][:rows].shape:
            problems.append(f"has {name} of shape {tuple(weights[name].shape)}, the model {tuple(ours[name].shape)}")
        elif not weights[name].is_floating_point():
            problems.append(f"has {name} of type {str(weights[name].dtype).removeprefix('torch.')}, no floating-point numbers")
        elif not problems:
            ours[name][:rows].copy_(weights[name][:rows])
    if problems:
        raise CheckpointError(f"{source}: weights that do not fit the model: it {sorted(problems)[0]}"
                              + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))


# ---- finding and reading


def find_weights(source: str, log_dir: str = "logs") -> Path:
    """The folder that `source` means: OpenAI's weights for gpt2 .. gpt2-xl (downloaded once), else the newest checkpoint of
    the run of that name or folder, else a checkpoint's or a Hugging Face model's folder itself. Raises CheckpointError."""
    if source in HUGGING_FACE:
        return _download(source)
    folder = next((path for path in (Path(log_dir) / source, Path(source)) if path.is_dir()), None)
    if folder is None:
        runs = sorted(path.parent.name for path in Path(log_dir).glob("*/checkpoints"))
        raise CheckpointError(f"{source}: no such run or folder; {log_dir}/ has {', '.join(runs) or 'no runs with checkpoints'}"
                              f", and {', '.join(HUGGING_FACE)} name OpenAI's weights")
    if any((folder / name).is_file() for name in (STATE, "config.json")):
        return folder
    if folder.absolute().name == "checkpoints" and not (folder / "checkpoints").is_dir():
        folder = folder.absolute().parent
    if not (checkpoints := all_checkpoints(folder)):
        raise CheckpointError(f"{folder}: has no checkpoint (one is saved at the end of a run, or by --checkpoint_every N), "
                              f"nor the config.json of a Hugging Face model")
    return checkpoints[-1]


def _find_and_read(source: str, log_dir: str) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """The folder that `source` means, and what `read_weights` gives of it."""
    before = None
    while True:
        folder = find_weights(source, log_dir)
        try:
            return folder, *read_weights(folder)
        except CheckpointError:
            if folder.is_dir() or folder == before:
                raise  # else the run is training, and has just deleted this checkpoint after a newer one
            before = folder


def read_weights(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options of the model (fields of GPTConfig) and weights, on the CPU, of a folder that `find_weights` gives.

    Raises CheckpointError.
    """
    return _read_hugging_face(folder) if (folder / "config.json").is_file() else _read_checkpoint(folder)


def _read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    verify(folder, (MODEL, STATE))
    options = read_json(folder / STATE).get("config")
    options = options if isinstance(options, dict) else {}
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    if missing := [name for name in fields if name not in options and name != "loss_chunks"]:
        raise CheckpointError(f"{folder / STATE}: not a checkpoint of this project: it lacks {', '.join(missing)}")
    weights = read_tensors(folder / MODEL)
    _check_size(options, weights, folder)
    return {name: options[name] for name in fields if name in options}, weights


def _check_size(options: dict[str, Any], weights: dict[str, Tensor], folder: Path) -> None:
    """Compare the options with the weights before a model is made of them: a wrong number could ask for any size."""
    none = torch.empty(0, 0)
    wte, wpe = (weights.get(f"transformer.{name}.weight", none) for name in ("wte", "wpe"))
    layers = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
    wte, wpe = (tensor if tensor.dim() == 2 else none for tensor in (wte, wpe))
    theirs = {"n_layer": len(layers), "vocab_size": wte.shape[0], "n_embd": wte.shape[-1], "block_size": wpe.shape[0]}
    for name, value in theirs.items():
        if options[name] != value:
            raise CheckpointError(f"{folder}: weights that do not fit the model: {name} is {repr(options[name])[:40]} in its "
                                  f"options, {value} in its weights")


def verify(folder: Path, files: Iterable[str] | None = None) -> dict[str, str]:
    """The checksums of a checkpoint, after comparing those of `files` (none: all). Raises CheckpointError."""
    path = folder / SUMS
    try:
        lines = [line.partition("  ") for line in path.read_text(encoding="ascii").splitlines()]
        sums = {file: digest for digest, _, file in lines}
        for file in sums if files is None else files:
            if file not in (MODEL, OPTIMIZER, STATE):
                raise CheckpointError(f"{path}: damaged: it names {file[:80]!r}")
            if file not in sums or sha256(folder / file) != sums[file]:
                raise CheckpointError(f"{folder / file}: damaged: it does not match its checksum in {SUMS}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename}: is missing; not a whole checkpoint of this project") from None
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: damaged: not a list of checksums") from None
    return sums


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: damaged: not a JSON object")
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. Raises CheckpointError."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise CheckpointError(f"{path}: cannot be read: not a file")
        if not _is_utf8(path):  # safetensors writes to such a path, but cannot open it: the file is read into memory instead
            return load(path.read_bytes())
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; weights are read from this one file, not from several or from *.bin "
                              f"(transformers' save_pretrained(..., max_shard_size='100GB') writes it)") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- Hugging Face: OpenAI's own weights, or any folder that transformers' `save_pretrained` wrote


def _download(name: str) -> Path:
    """The folder of OpenAI's weights, gpt2 .. gpt2-xl, downloaded once."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(HUGGING_FACE[name], allow_patterns=["config.json", "model.safetensors"]))
    except Exception as error:  # its HTTP library's, or its own
        raise CheckpointError(f"{name} could not be downloaded from Hugging Face ({in_a_line(error)}); "
                              f"give the folder of a copy instead") from None


def _read_hugging_face(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    options = _our_options(read_json(folder / "config.json"), folder)
    weights = _our_weights(read_tensors(folder / MODEL))
    _check_size(options, weights, folder)
    return options, weights


def _our_options(theirs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """transformers' config.json as fields of GPTConfig. Raises CheckpointError for what this project's model cannot be."""
    n_embd = theirs.get("n_embd", 768)
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    unsupported = {
        "model_type": theirs.get("model_type") != "gpt2",
        "activation_function": str(theirs.get("activation_function", "gelu_new")) not in activations,
        "layer_norm_epsilon": theirs.get("layer_norm_epsilon", 1e-5) != 1e-5,
        "n_inner": theirs.get("n_inner") not in (None, 4 * n_embd if isinstance(n_embd, int) else None),
        "scale_attn_weights": not theirs.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": bool(theirs.get("scale_attn_by_inverse_layer_idx")),
    }
    if wrong := [f"{name} {theirs.get(name)!r}" for name, is_wrong in unsupported.items() if is_wrong]:
        raise CheckpointError(f"{folder}: not a GPT-2 that this project can load: {', '.join(wrong)}")
    return {
        "n_layer": theirs.get("n_layer", 12), "n_head": theirs.get("n_head", 12), "n_embd": n_embd,
        "block_size": theirs.get("n_positions", 1024), "vocab_size": theirs.get("vocab_size", 50257), "bias": True,
        "norm": "layernorm", "activation": activations[theirs.get("activation_function", "gelu_new")],
        "tie_weights": theirs.get("tie_word_embeddings", True),
    }


def _our_weights(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' weights under this project's names and in its shapes."""
    weights = {}
    for name, tensor in theirs.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # the causal mask of older files
        if name.endswith(CONV1D) and tensor.dim() == 2:
            tensor = tensor.t().contiguous()
        weights[name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"] = tensor
    return weights
