"""Saving a run and restoring it, and loading the weights of a model: a run's of this project, or Hugging Face's.

A checkpoint is a folder `<run>/checkpoints/step_<step>/` of plain data, nothing in it is ever unpickled:

- `model.safetensors`: the weights under GPT-2's own names; a tied output head is stored once, as `transformer.wte.weight`
- `optimizer.safetensors`: the optimizers' state, `<parameter>/<name>`
- `checkpoint.json`: step, options, random states and whatever else a run needs to go on as if it had never stopped
- `SHA256SUMS`: the checksums of these files, which loading verifies (and `sha256sum -c`)

It is written under another name, flushed to disk and renamed, so it is there whole or not at all.
"""

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import GPT, GPTConfig
from pretrained import HUGGING_FACE, download, our_options, our_weights

# what has to be the same for weights to fit a model
ARCHITECTURE = ("n_layer", "n_head", "n_embd", "block_size", "bias", "norm", "activation", "tie_weights")
MODEL, OPTIMIZER, STATE, SUMS = "model.safetensors", "optimizer.safetensors", "checkpoint.json", "SHA256SUMS"


class CheckpointError(Exception):
    """A checkpoint that cannot be written, found, read or used; the message says which and what to do."""


class RandomState(BaseModel):
    """The random generators of one process."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]
    torch_cpu: str  # base64
    device: str  # cpu, cuda or mps
    torch_device: str | None  # base64; of the CUDA device or of MPS

    @classmethod
    def take(cls, device: torch.device) -> "RandomState":
        """Those of this process."""
        name, keys, *rest = np.random.get_state(legacy=True)
        gpu = _generator_of(device)
        return cls.model_validate({
            "python": random.getstate(), "numpy": (name, np.asarray(keys).tolist(), *rest),
            "torch_cpu": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
            "device": device.type, "torch_device": gpu and base64.b64encode(gpu.get_rng_state().numpy().tobytes()).decode()})

    def put(self, device: torch.device) -> None:
        """Set those of this process. Raises ValueError, TypeError or RuntimeError if they are no such states."""
        random.setstate(self.python)
        name, keys, position, has_gauss, gauss = self.numpy
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(self.torch_cpu)), dtype=torch.uint8))
        gpu = _generator_of(device)
        if gpu and self.torch_device and self.device == device.type:  # else it was saved on another kind of device
            gpu.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(self.torch_device)), dtype=torch.uint8))


def _generator_of(device: torch.device) -> Any:
    return {"cuda": torch.cuda, "mps": torch.mps}.get(device.type)


class RunState(BaseModel):
    """checkpoint.json: all that a run needs beside the tensors to go on as if it had never stopped."""

    step: int = Field(ge=0)
    tokens: int  # trained on so far
    tokens_per_step: int = Field(ge=1)
    best_val_loss: float | None
    skipped_steps: int  # those left out for a loss or norm that was not finite
    corpus: str  # the training tokens' fingerprint
    config: dict[str, Any]
    scaler: dict[str, int | float]  # the loss scaler's state; empty without fp16
    random: list[RandomState]  # of each process


# ---- writing


def save_checkpoint(run: Path, model: GPT, optimizers: list[torch.optim.Optimizer], state: RunState, *,
                    keep_last: int | None = None) -> Path:
    """Write the checkpoint `step_<step>` of the run's folder; returns its folder.

    `model` is the one without DDP and torch.compile. Afterwards the `keep_last` newest are kept (none: all). Raises
    CheckpointError if it cannot be written; the others are then as they were.
    """
    folder = run / "checkpoints" / f"step_{state.step:06d}"
    weights = model.state_dict()
    if model.config.tie_weights:
        del weights["lm_head.weight"]
    with _appearing(folder) as unfinished:
        if (run / "log.csv").exists():
            _flush_to_disk(run / "log.csv")  # a checkpoint's steps are in the log
        with ThreadPoolExecutor() as pool:  # one file's copying overlaps with the other's hashing and the disk
            files = {MODEL: weights, OPTIMIZER: optimizer_tensors(model, optimizers)}
            sums = dict(zip(files, pool.map(lambda file: _write_tensors(unfinished / file, files[file]), files), strict=True))
        (unfinished / STATE).write_text(state.model_dump_json() + "\n", encoding="utf-8", newline="\n")
        sums[STATE] = _sha256(unfinished / STATE)
        (unfinished / SUMS).write_text("".join(f"{digest}  {file}\n" for file, digest in sums.items()), newline="\n")
        for path in (unfinished / STATE, unfinished / SUMS):
            _flush_to_disk(path)
    if keep_last is not None:
        # later ones are damaged, or this save would not be: they do not push it out
        _delete([path for path in all_checkpoints(run) if step_of(path) <= state.step][:-keep_last])
    return folder


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors to disk; returns the file's checksum."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    _flush_to_disk(path)
    return _sha256(path)


def keep_best(run: Path, folder: Path) -> Path:
    """Keep a checkpoint as the run's best so far, beside the ones that come and go; returns its folder `best_<step>`.

    Its files are linked, not copied, where the file system can. Raises CheckpointError.
    """
    best = folder.with_name(f"best_{folder.name.rpartition('_')[2]}")
    with _appearing(best) as unfinished:
        for path in folder.iterdir():
            try:
                os.link(path, unfinished / path.name)
            except OSError:
                shutil.copy2(path, unfinished / path.name)
                _flush_to_disk(unfinished / path.name)
    _delete(path for path in all_checkpoints(run, "best") if path != best)
    return best


@contextlib.contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name once it is whole; one that has the name already goes. Raises CheckpointError."""
    unfinished = folder.with_name(f"{folder.name}.tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        _flush_to_disk(unfinished)
        if folder.exists():
            _delete([folder])
        unfinished.rename(folder)
        _flush_to_disk(folder.parent)
    except (OSError, SafetensorError, ValueError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)  # what it took of a full disk
        raise CheckpointError(f"{folder}: cannot be written: {error}") from None


def _delete(folders: Iterable[Path]) -> None:
    for folder in folders:
        doomed = folder.with_name(f"{folder.name}.deleted.tmp")  # half deleted, it is not taken for a checkpoint
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows flushes only what is open for writing
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- the optimizers' state


def optimizer_tensors(model: GPT, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimizers' state as named tensors, `<parameter>/<name of the state>`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {f"{names[id(parameter)]}/{key}": torch.as_tensor(value) for optimizer in optimizers
            for parameter, state in optimizer.state.items() for key, value in state.items()}


def load_optimizers(folder: Path, model: GPT, optimizers: list[torch.optim.Optimizer]) -> None:
    """Restore the optimizers' state from a checkpoint. Raises CheckpointError if it does not fit."""
    tensors = _read_safetensors(folder / OPTIMIZER)
    if not tensors:  # saved before the first update, as every step so far was left out
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        ours = optimizer.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            prefix = f"{names[id(parameter)]}/"
            state = {key.removeprefix(prefix): tensors.pop(key).clone() for key in list(tensors) if key.startswith(prefix)}
            expected = {"step", "exp_avg", "exp_avg_sq"} if isinstance(optimizer, torch.optim.AdamW) else {"momentum_buffer"}
            if set(state) != expected or any(
                    t.shape != (torch.Size() if key == "step" else parameter.shape) for key, t in state.items()):
                raise CheckpointError(f"{folder}: the optimizer's state does not fit {names[id(parameter)]}; it was saved with "
                                      f"another optimizer or model")
            ours["state"][index] = state
        optimizer.load_state_dict(ours)
    if tensors:
        raise CheckpointError(f"{folder}: has optimizer state for an unknown {next(iter(tensors))}")


# ---- finding and reading


def read_state(folder: Path) -> RunState:
    """The state of a whole checkpoint. Raises CheckpointError if any of its files is missing or damaged."""
    sums = _verify(folder)
    if missing := {MODEL, OPTIMIZER, STATE} - set(sums):
        raise CheckpointError(f"{folder / SUMS}: damaged: it lacks {', '.join(sorted(missing))}")
    try:
        return RunState(**_read_json(folder / STATE))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise CheckpointError(f"{folder / STATE}: not a checkpoint of this project: {where}: {problem['msg'].lower()}") from None


def _verify(folder: Path, files: Iterable[str] | None = None) -> dict[str, str]:
    """The checksums of a checkpoint, after comparing those of `files` (none: all). Raises CheckpointError."""
    path = folder / SUMS
    try:
        pairs = [line.split("  ") for line in path.read_text(encoding="ascii").splitlines()]
        sums = {file: digest for digest, file in pairs}
        for file in sums if files is None else files:
            if file not in (MODEL, OPTIMIZER, STATE):
                raise CheckpointError(f"{path}: damaged: it names {file[:80]!r}")
            if file not in sums or _sha256(folder / file) != sums[file]:
                raise CheckpointError(f"{folder / file}: damaged: it does not match its checksum in {SUMS}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename}: is missing; not a whole checkpoint of this project") from None
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path}: damaged: not a list of checksums") from None
    return sums


def step_of(folder: Path) -> int:
    """The step of a checkpoint, by its folder's name."""
    return int(folder.name.rpartition("_")[2])


def all_checkpoints(run: Path, name: str = "step") -> list[Path]:
    """The run's checkpoints `<name>_<step>`, by step."""
    return sorted((path for path in (run / "checkpoints").glob(f"{name}_*") if path.name.removeprefix(f"{name}_").isdecimal()),
                  key=step_of)


def newest_checkpoint(run: Path) -> Path:
    """The run's checkpoint of the latest step. Raises CheckpointError if it has none."""
    if not (paths := all_checkpoints(run)):
        raise CheckpointError(f"{run}: has no checkpoint (one is saved at the end of a run, or by --checkpoint_every N)")
    return paths[-1]


def newest_whole_checkpoint(run: Path) -> tuple[tuple[Path, RunState] | None, list[str]]:
    """The run's latest checkpoint that is whole, and its state, if there is one; and a line for each damaged one skipped."""
    skipped: list[str] = []
    for folder in sorted([*all_checkpoints(run, "best"), *all_checkpoints(run)], key=step_of, reverse=True):
        try:
            return (folder, read_state(folder)), skipped
        except CheckpointError as error:
            skipped.append(f"skipping a checkpoint: {error}")
    return None, skipped


def find_weights(source: str, log_dir: str = "logs") -> Path:
    """The folder that `source` means: OpenAI's weights for gpt2 .. gpt2-xl (downloaded once), else the newest checkpoint of
    the run of that name or folder, else a checkpoint's or a Hugging Face model's folder itself. Raises CheckpointError."""
    if source in HUGGING_FACE:
        try:
            return download(source)
        except OSError as error:
            raise CheckpointError(str(error)) from None
    folder = next((path for path in (Path(log_dir) / source, Path(source)) if path.is_dir()), None)
    if folder is None:
        runs = sorted(path.parent.name for path in Path(log_dir).glob("*/checkpoints"))
        raise CheckpointError(f"{source}: no such run or folder; {log_dir}/ has {', '.join(runs) or 'no runs with checkpoints'}"
                              f", and {', '.join(HUGGING_FACE)} name OpenAI's weights")
    whole = any((folder / name).is_file() for name in (STATE, "config.json"))
    return folder if whole else newest_checkpoint(folder)


def read_weights(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options of the model (fields of GPTConfig) and weights, on the CPU, of a folder that `find_weights` gives.

    Raises CheckpointError.
    """
    return _read_hugging_face(folder) if (folder / "config.json").is_file() else _read_checkpoint(folder)


def _read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    _verify(folder, (MODEL, STATE))
    options = _read_json(folder / STATE).get("config")
    options = options if isinstance(options, dict) else {}
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    if missing := [name for name in fields if name not in options]:
        raise CheckpointError(f"{folder / STATE}: not a checkpoint of this project: it lacks {', '.join(missing)}")
    weights = _read_safetensors(folder / MODEL)
    _check_size(options, weights, folder)
    return {name: options[name] for name in fields}, weights


def _check_size(options: dict[str, Any], weights: dict[str, Tensor], folder: Path) -> None:
    """Compare the options with the weights before a model is made of them: a wrong number could ask for any size."""
    none = torch.empty(0, 0)
    wte, wpe = (weights.get(f"transformer.{name}.weight", none) for name in ("wte", "wpe"))
    layers = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
    wte, wpe = (tensor if tensor.dim() == 2 else none for tensor in (wte, wpe))
    theirs = {"n_layer": len(layers), "vocab_size": wte.shape[0], "n_embd": wte.shape[-1], "block_size": wpe.shape[0]}
    for name, value in theirs.items():
        if options[name] != value:
            raise CheckpointError(f"{folder}: weights that do not fit the model: {name} is {str(options[name])[:40]} in its "
                                  f"options, {value} in its weights")


def _read_hugging_face(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        options = our_options(_read_json(folder / "config.json"))
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    weights = our_weights(_read_safetensors(folder / MODEL))
    _check_size(options, weights, folder)
    return options, weights


def load_weights(model: GPT, weights: dict[str, Tensor], source: str) -> None:
    """Copy weights into the model, tied and padded or not on either side: padding rows that only one side has are left alone.

    Raises CheckpointError for weights that are missing, unknown or of another shape.
    """
    weights = dict(weights)
    weights.setdefault("lm_head.weight", weights.get("transformer.wte.weight", torch.empty(0)))
    ours = model.state_dict()
    problems = [f"lacks {name}" for name in ours if name not in weights]
    problems += [f"has an unknown {name}" for name in weights if name not in ours]
    for name in ours.keys() & weights.keys():
        rows = model.config.n_tokens if name in ("transformer.wte.weight", "lm_head.weight") else None
        rows = None if ours[name].shape == weights[name].shape else rows
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
