"""A model's weights: fresh, from a run of this project, from and to Hugging Face, or from a `.pt`
file of nanoGPT or build-nanogpt; and the model that they make.

No code that a file names is ever run or imported: of a `.pt` file, which is a pickle, only tensors
and plain values are taken.
"""

import dataclasses
import errno
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from model import GPT, GPTConfig
from runtime.cli import ConfigError, Options
from runtime.cli import load as load_options
from runtime.errors import UserError, in_a_line
from runtime.files import flush_to_disk, sha256, write_whole
from runtime.runlog import all_checkpoints
from runtime.shards import SHARD, DamagedShardsError, read_shards

HUGGING_FACE = {
    name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
}
# what has to be the same for weights to fit a model
ARCHITECTURE = (
    "n_layer",
    "n_head",
    "n_embd",
    "block_size",
    "bias",
    "norm",
    "activation",
    "tie_weights",
)
EMBEDDING_AND_HEAD = (
    "transformer.wte.weight",
    "lm_head.weight",
)  # one tensor where weights are tied
CONV1D = (
    "c_attn.weight",
    "c_proj.weight",
    "c_fc.weight",
)  # which transformers keeps as (in, out), nn.Linear as (out, in)
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}  # transformers' names: ours
THEIR_GPT_CONFIG = (
    "__main__.GPTConfig",
    "train_gpt2.GPTConfig",
    "model.GPTConfig",
)  # the dataclass, by the file it was pickled in
MODEL, OPTIMIZER, STATE, SUMS = (
    "model.safetensors",
    "optimizer.safetensors",
    "checkpoint.json",
    "SHA256SUMS",
)
SHARDS = {
    MODEL: "model",
    OPTIMIZER: "optimizer",
}  # the folders that hold the shards of a run with FSDP, in place of these files

O = TypeVar("O", bound=Options)


class CheckpointError(UserError):
    """A checkpoint or weights that cannot be written, found, read or used; the message says which
    and what to do.
    """


# ---- the model of a run


def build_model(config: O, checkpoint: Path | None = None) -> tuple[O, GPT]:
    """The model: from a checkpoint of the run, or fresh, or from the weights that `init_from`
    names, whose architecture the options then take over.

    `config` are a run's options, config.py's Config. Raises CheckpointError for weights that cannot
    be had, ConfigError for options that contradict them.
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
        raise ConfigError(
            "\n".join(
                f"{name} {given[name]} contradicts init_from {values['init_from']}, which has "
                f"{fixed[name]}; "
                f"leave {name} out"
                for name in wrong
            )
        )
    n_vocab = _config_of(theirs, str(folder)).n_vocab
    # the checkpoint's own path, as the name may mean another run tomorrow
    vocabulary = {
        "vocab_size": theirs["vocab_size"],
        "real_vocab_size": theirs.get("real_vocab_size"),
    }
    config = load_options(type(config), vocabulary | given | fixed | {"init_from": str(folder)})
    ours = GPTConfig.of(config)
    if ours.n_vocab != n_vocab:
        raise ConfigError(
            f"vocab_size {ours.vocab_size} makes {ours.n_vocab} tokens, but init_from {folder} has "
            f"{n_vocab}; leave vocab_size and real_vocab_size out"
        )
    return config, _model_of(ours, weights, str(folder))


def load_model(source: str, log_dir: str = "logs") -> GPT:
    """The model of `source`, as `find_weights` takes it, in evaluation mode on the CPU. Raises
    CheckpointError.
    """
    return find_model(source, log_dir)[1]


def find_model(source: str, log_dir: str = "logs") -> tuple[Path, GPT]:
    """Where the weights of `source` lie, and the model that `load_model` gives. Raises
    CheckpointError.
    """
    path, options, weights = _find_and_read(source, log_dir)
    return path, _model_of(_config_of(options, source), weights, source).eval()


def _config_of(options: dict[str, Any], source: str) -> GPTConfig:
    try:
        return GPTConfig(**options)
    except TypeError as error:
        raise CheckpointError(f"{source}: its options do not make a model: {error}") from None


def _model_of(config: GPTConfig, weights: dict[str, Tensor], source: str) -> GPT:
    try:
        model = GPT(config)
    except (TypeError, RuntimeError) as error:
        raise CheckpointError(f"{source}: its options do not make a model: {error}") from None
    load_weights(model, weights, source)
    return model


def load_weights(model: GPT, weights: dict[str, Tensor], source: str) -> None:
    """Copy weights into the model, tied and padded or not on either side: padding rows that only
    one side has stay as they are.

    Raises CheckpointError for weights that are missing, unknown or of another shape.
    """
    weights = dict(weights)
    weights.setdefault("lm_head.weight", weights.get("transformer.wte.weight", torch.empty(0)))
    ours = model.state_dict()
    problems = [f"lacks {name}" for name in ours if name not in weights]
    problems += [f"has an unknown {name}" for name in weights if name not in ours]
    wte, head = (weights.get(name, torch.empty(0)) for name in EMBEDDING_AND_HEAD)
    if model.config.tie_weights and head is not wte and not torch.equal(head, wte):
        problems.append(
            "has an lm_head.weight other than its transformer.wte.weight, and the model ties them"
        )
    for name in ours.keys() & weights.keys():
        rows = model.config.n_vocab if name in EMBEDDING_AND_HEAD else None
        rows = None if ours[name].shape == weights[name].shape else rows
        if not weights[name].dim() or ours[name][:rows].shape != weights[name][:rows].shape:
            problems.append(
                f"has {name} of shape {tuple(weights[name].shape)}, the model "
                f"{tuple(ours[name].shape)}"
            )
        elif not weights[name].is_floating_point():
            problems.append(
                f"has {name} of type {str(weights[name].dtype).removeprefix('torch.')}, no "
                f"floating-point numbers"
            )
        elif not problems:
            ours[name][:rows].copy_(weights[name][:rows])
    if problems:
        raise CheckpointError(
            f"{source}: weights that do not fit the model: it {sorted(problems)[0]}"
            + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
        )


# ---- finding and reading


def find_weights(source: str, log_dir: str = "logs") -> Path:
    """The folder that `source` means: OpenAI's weights for gpt2 .. gpt2-xl (downloaded once), else
    the newest checkpoint of the run of that name or folder, else a checkpoint's or a Hugging Face
    model's folder itself; or the `.pt` file that it names. Raises CheckpointError.
    """
    if source in HUGGING_FACE:
        return _download(source)
    folder = next((path for path in (Path(log_dir) / source, Path(source)) if path.is_dir()), None)
    if folder is None and Path(source).is_file():
        if Path(source).suffix != ".pt":
            raise CheckpointError(
                f"{source}: is a file; give the folder it lies in, or a .pt file of nanoGPT or "
                f"build-nanogpt"
            )
        return Path(source)
    if folder is None:
        runs = sorted(path.parent.name for path in Path(log_dir).glob("*/checkpoints"))
        raise CheckpointError(
            f"{source}: no such run or folder; {log_dir}/ has "
            f"{', '.join(runs) or 'no runs with checkpoints'}"
            f", and {', '.join(HUGGING_FACE)} name OpenAI's weights"
        )
    if any((folder / name).is_file() for name in (STATE, "config.json")):
        return folder
    if folder.absolute().name == "checkpoints" and not (folder / "checkpoints").is_dir():
        folder = folder.absolute().parent
    if not (checkpoints := all_checkpoints(folder)):
        files = "".join(
            f"; give {path} itself, if that is meant" for path in sorted(folder.glob("*.pt"))[-1:]
        )
        raise CheckpointError(
            f"{folder}: has no checkpoint (one is saved at the end of a run, or by "
            f"--checkpoint_every N), "
            f"nor the config.json of a Hugging Face model{files}"
        )
    return checkpoints[-1]


def _find_and_read(source: str, log_dir: str) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """The folder or file that `source` means, and what `read_weights` gives of it."""
    before = None
    while True:
        folder = find_weights(source, log_dir)
        try:
            return folder, *read_weights(folder)
        except CheckpointError:
            if folder.exists() or folder == before:
                # else the run is training, and has just deleted this checkpoint after a newer one
                raise
            before = folder


def read_weights(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options of the model (fields of GPTConfig) and weights, on the CPU, of a folder or file that
    `find_weights` gives.

    Raises CheckpointError.
    """
    if folder.is_file():
        return _read_pt(folder)
    return (
        _read_hugging_face(folder)
        if (folder / "config.json").is_file()
        else _read_checkpoint(folder)
    )


def _read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    verify(folder, lambda file: is_part_of(STATE, file) or is_part_of(MODEL, file))
    options = read_json(folder / STATE).get("config")
    options = options if isinstance(options, dict) else {}
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    if missing := [name for name in fields if name not in options and name != "loss_chunks"]:
        raise CheckpointError(
            f"{folder / STATE}: not a checkpoint of this project: it lacks {', '.join(missing)}"
        )
    weights = read_part(folder, MODEL)
    _check_size(options, weights, folder)
    return {name: options[name] for name in fields if name in options}, weights


def is_part_of(whole: str, file: str) -> bool:
    """Whether a file of a checkpoint is the `whole` one of that name, or one of the shards of a run
    with FSDP.
    """
    return file == whole or (
        whole in SHARDS and re.fullmatch(f"{SHARDS[whole]}/{SHARD}", file) is not None
    )


def read_part(
    folder: Path, whole: str, like: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The tensors of a checkpoint's file, on the CPU, or of its shards; sharded themselves, each
    process reading its own part, if they are `like` sharded ones. Raises CheckpointError.
    """
    if (folder / SHARDS[whole]).is_dir() or like:
        if not _is_utf8(folder):
            raise CheckpointError(
                f"{folder}: shards cannot be read from a path that is not UTF-8; move the run's "
                f"folder"
            )
        place = folder / SHARDS[whole] if (folder / SHARDS[whole]).is_dir() else folder
        try:
            return read_shards(place, lambda name: ("/" in name) == (whole == OPTIMIZER), like)
        except DamagedShardsError as error:
            raise CheckpointError(str(error)) from None
    return read_tensors(folder / whole)


def _check_size(options: dict[str, Any], weights: dict[str, Tensor], folder: Path) -> None:
    """Compare the options with the weights before a model is made of them: a wrong number could ask
    for any size.
    """
    none = torch.empty(0, 0)
    wte, wpe = (weights.get(f"transformer.{name}.weight", none) for name in ("wte", "wpe"))
    layers = {name.split(".")[2] for name in weights if name.startswith("transformer.h.")}
    wte, wpe = (tensor if tensor.dim() == 2 else none for tensor in (wte, wpe))
    theirs = {
        "n_layer": len(layers),
        "vocab_size": wte.shape[0],
        "n_embd": wte.shape[-1],
        "block_size": wpe.shape[0],
    }
    for name, value in theirs.items():
        if options[name] != value:
            raise CheckpointError(
                f"{folder}: weights that do not fit the model: {name} is "
                f"{repr(options[name])[:40]} in its "
                f"options, {value} in its weights"
            )


def verify(folder: Path, wanted: Callable[[str], bool] = bool) -> None:
    """Compare the checksums of a checkpoint's `wanted` files, and see that none of any kind is
    missing. Raises CheckpointError.
    """
    path = folder / SUMS
    try:
        lines = [line.partition("  ") for line in path.read_text(encoding="ascii").splitlines()]
        sums = {file: digest for digest, _, file in lines}
        for file in sums:
            if not any(is_part_of(whole, file) for whole in (MODEL, OPTIMIZER, STATE)):
                raise CheckpointError(f"{path}: damaged: it names {file[:80]!r}")
            if wanted(file) and sha256(folder / file) != sums[file]:
                raise CheckpointError(
                    f"{folder / file}: damaged: it does not match its checksum in {SUMS}"
                )
        if missing := [
            whole
            for whole in (MODEL, OPTIMIZER, STATE)
            if not any(is_part_of(whole, file) for file in sums)
        ]:
            raise CheckpointError(f"{path}: damaged: it lacks {', '.join(missing)}")
        on_disk = [
            file
            for place in SHARDS.values()
            if (folder / place).is_dir()
            for file in (folder / place).iterdir()
        ]
        if unknown := [file for file in on_disk if file.relative_to(folder).as_posix() not in sums]:
            raise CheckpointError(f"{unknown[0]}: damaged: {SUMS} does not name it")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{error.filename}: is missing; not a whole checkpoint of this project"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: damaged: not a list of checksums") from None


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
        if not _is_utf8(
            path
        ):  # safetensors writes to such a path, but cannot open it: the file is read into memory instead
            return load(path.read_bytes())
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: is missing; weights are read from this one file, not from several or from "
            f"*.bin "
            f"(transformers' save_pretrained(..., max_shard_size='100GB') writes it)"
        ) from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to a safetensors file on disk; returns its checksum. Raises OSError or
    SafetensorError.
    """
    path.touch()
    mode = (
        path.stat().st_mode
    )  # as the umask has it; save_file puts a file in its place that only its owner may read
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
    path.chmod(mode)
    flush_to_disk(path)
    return sha256(path)


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

        return Path(
            snapshot_download(
                HUGGING_FACE[name], allow_patterns=["config.json", "model.safetensors"]
            )
        )
    except Exception as error:  # its HTTP library's, or its own
        raise CheckpointError(
            f"{name} could not be downloaded from Hugging Face ({in_a_line(error)}); "
            f"give the folder of a copy instead"
        ) from None


def _read_hugging_face(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    options = _our_options(read_json(folder / "config.json"), folder)
    weights = {
        name: tensor.t().contiguous() if name.endswith(CONV1D) and tensor.dim() == 2 else tensor
        for name, tensor in _under_our_names(read_tensors(folder / MODEL)).items()
    }
    _check_size(options, weights, folder)
    return options, weights


def _our_options(theirs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """transformers' config.json as fields of GPTConfig. Raises CheckpointError for what this
    project's model cannot be.
    """
    n_embd = theirs.get("n_embd", 768)
    unsupported = {
        "model_type": theirs.get("model_type") != "gpt2",
        "activation_function": str(theirs.get("activation_function", "gelu_new"))
        not in ACTIVATIONS,
        "layer_norm_epsilon": theirs.get("layer_norm_epsilon", 1e-5) != 1e-5,
        "n_inner": theirs.get("n_inner")
        not in (None, 4 * n_embd if isinstance(n_embd, int) else None),
        "scale_attn_weights": not theirs.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": bool(theirs.get("scale_attn_by_inverse_layer_idx")),
    }
    if wrong := [
        f"{name} {theirs.get(name)!r}" for name, is_wrong in unsupported.items() if is_wrong
    ]:
        raise CheckpointError(
            f"{folder}: not a GPT-2 that this project can load: {', '.join(wrong)}"
        )
    return {
        "n_layer": theirs.get("n_layer", 12),
        "n_head": theirs.get("n_head", 12),
        "n_embd": n_embd,
        "block_size": theirs.get("n_positions", 1024),
        "vocab_size": theirs.get("vocab_size", 50257),
        "bias": True,
        "norm": "layernorm",
        "activation": ACTIVATIONS[theirs.get("activation_function", "gelu_new")],
        "tie_weights": theirs.get("tie_word_embeddings", True),
        "dropout": theirs.get("resid_pdrop", 0.1),
    }


def _under_our_names(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without what torch.compile and DDP put before their names, and without the causal
    masks of older files.
    """
    plain = {
        re.sub(r"^((_orig_mod|module)\.)+", "", name): tensor for name, tensor in theirs.items()
    }
    return {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": tensor
        for name, tensor in plain.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))
    }


def write_hugging_face(folder: Path, config: GPTConfig, weights: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors into a folder as `transformers` writes its
    GPT2LMHeadModel: without padding rows, a tied head stored once. `weights` are a model's
    state_dict().

    Raises CheckpointError for a model that GPT-2 in `transformers` cannot be, OSError or
    SafetensorError if it cannot be written.
    """
    if wrong := [
        f"{name} {getattr(config, name)}"
        for name, its in (("norm", "layernorm"), ("bias", True))
        if getattr(config, name) != its
    ]:
        raise CheckpointError(
            f"the model has {', '.join(wrong)}; GPT-2 in transformers has LayerNorm and biases, "
            f"and cannot be it"
        )
    end_of_text = 50256 if config.n_vocab == 50257 else None  # another vocabulary may have none
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    options = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "dtype": "float32",
        "activation_function": activation,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_inner": None,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "vocab_size": config.n_vocab,
        "tie_word_embeddings": config.tie_weights,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "use_cache": True,
    }
    write_whole(folder / "config.json", json.dumps(options, indent=2) + "\n")
    theirs = {}
    for name, tensor in weights.items():
        if name in EMBEDDING_AND_HEAD:
            tensor = tensor[: config.n_vocab]
        elif name.endswith(CONV1D):
            tensor = tensor.t()
        if name != "lm_head.weight" or not config.tie_weights:
            theirs[name] = tensor
    write_tensors(folder / MODEL, theirs)


# ---- nanoGPT's and build-nanogpt's checkpoints


class _TheirGPTConfig:
    """Stands for their dataclass of that name where a file holds one: its fields become attributes."""


def _read_pt(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """nanoGPT's file has its model's options as a dict `model_args`, build-nanogpt's as its
    dataclass, `config`.
    """
    content = _load_pt(path)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: not a checkpoint of nanoGPT or build-nanogpt: it holds a "
            f"{type(content).__name__}"
        )
    theirs, config = content.get("model_args"), content.get("config")
    activation = "gelu"  # nanoGPT's is the exact one
    if not isinstance(theirs, dict) and isinstance(config, _TheirGPTConfig):
        theirs, activation = vars(config), "gelu_tanh"
    weights = content.get("model")
    if not isinstance(theirs, dict) or not isinstance(weights, dict):
        raise CheckpointError(
            f"{path}: not a checkpoint of nanoGPT (model, model_args) or build-nanogpt (model, "
            f"config): "
            f"it has {_listed(content) or 'nothing'}"
        )
    options = {
        name: theirs.get(name)
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    }
    options["bias"] = theirs.get("bias", True)
    if wrong := [
        name
        for name, value in options.items()
        if type(value) is not (bool if name == "bias" else int)
    ]:
        raise CheckpointError(
            f"{path}: its model's options are no GPT-2's: {wrong[0]} is "
            f"{_listed([repr(theirs.get(wrong[0]))])}"
        )
    if unknown := [name for name in theirs if name not in (*options, "dropout")]:
        raise CheckpointError(
            f"{path}: its model has options that this project's has not: {_listed(unknown)}"
        )
    for name, tensor in weights.items():
        is_plain = (
            isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout is torch.strided
        )
        if not is_plain or tensor.is_nested or tensor.device.type != "cpu":
            raise CheckpointError(
                f"{path}: damaged: {_listed([name])} in its model is no plain tensor"
            )
    weights = _under_our_names(weights)
    wte, head = (weights.get(name) for name in EMBEDDING_AND_HEAD)
    options |= {
        "norm": "layernorm",
        "activation": activation,
        "tie_weights": wte is None or head is None or torch.equal(wte, head),
    }
    _check_size(options, weights, path)
    return options, weights


def _listed(names: Iterable[Any]) -> str:
    """Names from a file, which may hold anything, as a part of one line."""
    return "".join(c for c in ", ".join(map(str, names)) if c.isprintable())[:80]


def _load_pt(path: Path) -> Any:
    """What torch.save wrote, of tensors and plain values. Nothing else is taken but the two
    projects' GPTConfig, by its name.
    """
    try:
        with (
            warnings.catch_warnings(),
            torch.serialization.safe_globals(
                [(_TheirGPTConfig, name) for name in THEIR_GPT_CONFIG]
            ),
        ):
            warnings.simplefilter("ignore")
            mapped = _is_utf8(path) and zipfile.is_zipfile(
                path
            )  # then the optimizer's state, twice the model, is never read
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged pickle can fail in any way
        if (
            isinstance(error, OSError) and error.errno != errno.EINVAL
        ):  # that is a damaged file's, which has no such place
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{path}: refused: it names {named[1][:80]}, which is code; of a .pt file only "
                f"tensors, plain "
                f"values and the GPTConfig of nanoGPT and build-nanogpt are read"
            ) from None
        why = "" if isinstance(error, pickle.UnpicklingError) else f" ({in_a_line(error)})"
        raise CheckpointError(f"{path}: damaged, or not written by torch.save{why}") from None
