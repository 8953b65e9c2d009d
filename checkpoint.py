"""Saving a model and loading it again: from a run of this project, or from Hugging Face.

A checkpoint is a folder `<run>/checkpoints/step_<step>/` with `model.safetensors`, the weights under GPT-2's own names
(a tied output head is stored once, as `transformer.wte.weight`), and `checkpoint.json`: the step and the options of the
run. It is written under another name and renamed, so it is there whole or not at all.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import GPT, GPTConfig

HUGGING_FACE = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}
# what has to be the same for weights to fit a model
ARCHITECTURE = ("n_layer", "n_head", "n_embd", "block_size", "bias", "norm", "activation", "tie_weights")


class CheckpointError(Exception):
    """A checkpoint that cannot be written, found, read or used; the message says which and what to do."""


def save_checkpoint(run: Path, model: GPT, step: int, config: dict[str, Any]) -> Path:
    """Write the model (not wrapped by DDP or torch.compile) as a checkpoint of the run's folder; returns its folder.

    Raises CheckpointError if it cannot be written.
    """
    folder = run / "checkpoints" / f"step_{step:06d}"
    unfinished = folder.with_name(f"{folder.name}.tmp")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_weights:
        del weights["lm_head.weight"]
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
        (unfinished / "checkpoint.json").write_text(json.dumps({"step": step, "config": config}, indent=1) + "\n")
        for path in (*unfinished.iterdir(), unfinished):
            _flush_to_disk(path)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from None
    return folder


def _flush_to_disk(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows flushes only what is open for writing
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    whole = any((folder / name).is_file() for name in ("checkpoint.json", "config.json"))
    return folder if whole else newest_checkpoint(folder)


def read_weights(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options of the model (fields of GPTConfig) and weights, on the CPU, of a folder that `find_weights` gives.

    Raises CheckpointError.
    """
    return _read_hugging_face(folder) if (folder / "config.json").is_file() else _read_checkpoint(folder)


def newest_checkpoint(run: Path) -> Path:
    """The run's checkpoint of the latest step. Raises CheckpointError if it has none."""
    checkpoints = [path for path in (run / "checkpoints").glob("step_*") if path.name.removeprefix("step_").isdigit()]
    if not checkpoints:
        raise CheckpointError(f"{run}: has no checkpoint (one is saved at the end of a run, or by --checkpoint_every N)")
    return max(checkpoints, key=lambda path: int(path.name.removeprefix("step_")))


def _read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    options = _read_json(folder / "checkpoint.json").get("config")
    options = options if isinstance(options, dict) else {}
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    if missing := [name for name in fields if name not in options]:
        raise CheckpointError(f"{folder / 'checkpoint.json'}: not a checkpoint of this project: it lacks {', '.join(missing)}")
    return {name: options[name] for name in fields}, _read_safetensors(folder / "model.safetensors")


def _read_hugging_face(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options and weights as transformers' `save_pretrained` writes a GPT-2."""
    theirs = _read_json(folder / "config.json")
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    unsupported = {
        "model_type": theirs.get("model_type") != "gpt2",
        "activation_function": str(theirs.get("activation_function", "gelu_new")) not in activations,
        "layer_norm_epsilon": theirs.get("layer_norm_epsilon", 1e-5) != 1e-5,
        "n_inner": theirs.get("n_inner") not in (None, 4 * theirs.get("n_embd", 768)),
        "scale_attn_weights": not theirs.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": bool(theirs.get("scale_attn_by_inverse_layer_idx")),
    }
    if wrong := [f"{name} {theirs.get(name)}" for name, is_wrong in unsupported.items() if is_wrong]:
        raise CheckpointError(f"{folder}: not a GPT-2 that this project can load: {', '.join(wrong)}")
    options = {
        "n_layer": theirs.get("n_layer", 12), "n_head": theirs.get("n_head", 12), "n_embd": theirs.get("n_embd", 768),
        "block_size": theirs.get("n_positions", 1024), "vocab_size": theirs.get("vocab_size", 50257), "bias": True,
        "norm": "layernorm", "activation": activations[theirs.get("activation_function", "gelu_new")],
        "tie_weights": theirs.get("tie_word_embeddings", True),
    }
    weights = {}
    for name, tensor in _read_safetensors(folder / "model.safetensors").items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # the causal mask of older files
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.t().contiguous()  # transformers' Conv1D keeps (in, out), nn.Linear (out, in)
        weights[name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"] = tensor
    return options, weights


def load_weights(model: GPT, weights: dict[str, Tensor], source: str) -> None:
    """Copy weights into the model. Tied and padded or not, on either side: padding rows stay as they are in the model.

    Raises CheckpointError for weights that are missing, unknown or of another shape.
    """
    weights = dict(weights)
    weights.setdefault("lm_head.weight", weights.get("transformer.wte.weight", torch.empty(0)))
    ours = model.state_dict()
    problems = [f"lacks {name}" for name in ours if name not in weights]
    problems += [f"has an unknown {name}" for name in weights if name not in ours]
    for name in ours.keys() & weights.keys():
        rows = model.config.n_tokens if name in ("transformer.wte.weight", "lm_head.weight") else None
        if ours[name][:rows].shape != weights[name][:rows].shape:
            problems.append(f"has {name} of shape {tuple(weights[name].shape)}, the model {tuple(ours[name].shape)}")
        elif not problems:
            ours[name][:rows].copy_(weights[name][:rows])
    if problems:
        raise CheckpointError(f"{source}: weights that do not fit the model: it {sorted(problems)[0]}"
                              + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))


def load_model(source: str, log_dir: str = "logs") -> GPT:
    """The model of a checkpoint, in evaluation mode on the CPU; `source` as for `find_weights`. Raises CheckpointError."""
    options, weights = read_weights(find_weights(source, log_dir))
    try:
        model = GPT(GPTConfig(**options))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{source}: its options do not make a model: {error}") from None
    load_weights(model, weights, source)
    return model.eval()


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(HUGGING_FACE[name], allow_patterns=["config.json", "model.safetensors"]))
    except Exception as error:  # its HTTP library's, or its own
        raise CheckpointError(f"{name} could not be downloaded from Hugging Face ({type(error).__name__}); "
                              f"give the folder of a copy instead") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: damaged: not a JSON object")
    return content


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; only weights in safetensors are read") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
