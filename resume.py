"""Where a run begins: with fresh weights, with those of another model, or from one of its own checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from checkpoint import (
    ARCHITECTURE,
    CheckpointError,
    RunState,
    find_weights,
    load_optimizers,
    load_weights,
    newest_whole_checkpoint,
    read_state,
    read_weights,
)
from config import Config, ConfigError, UserError, load
from model import GPT, GPTConfig
from parallel import Process

# What a run cannot change without being another run: the model, and which tokens a step trains on. All else may change.
FIXED = (*ARCHITECTURE, "vocab_size", "real_vocab_size", "seq_len", "shuffle", "overfit_batch", "val_fraction", "seed", "optimizer")
OF_THIS_CALL = ("resume", "device", "log_dir", "run_name")  # never taken from the checkpoint


def find_checkpoint(config: Config, say: Callable[[str], None]) -> tuple[Path, RunState] | None:
    """The checkpoint that `resume` means, whole, and its state; None where the run begins at its first step.

    Raises UserError or CheckpointError if `resume` names a checkpoint that is not there, damaged or not the newest.
    """
    resume = config.resume
    if resume is None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        resume = "auto"  # torchrun starts the processes again after one of them died
    if resume is None:
        return None
    if resume != "auto":
        path = next((p for p in (Path(config.log_dir) / resume, Path(resume)) if p.is_dir()), Path(resume))
        if not path.is_dir():
            what = "is a file, and a checkpoint is a folder" if path.exists() else "no such run or checkpoint"
            raise UserError(f"--resume {resume}: {what}; give auto, a run's folder or one of its checkpoints/step_*")
        if path.parent.name == "checkpoints":
            state = read_state(path)
            run = path.parent.parent
            later = [other.name for other in path.parent.glob("step_*") if other.name.removeprefix("step_").isdigit()
                     and int(other.name.removeprefix("step_")) > state.step]
            if later:
                raise UserError(f"--resume {resume}: {run} has later checkpoints, {', '.join(sorted(later))}, whose steps would be "
                                f"taken again; move them away first, or begin a new run with --init_from {resume}")
            return path, state
    run = Path(config.log_dir) / str(config.run_name) if resume == "auto" else path
    folder, skipped = newest_whole_checkpoint(run)
    for line in skipped:
        say(f"note: {line}")
    if folder is not None:
        return folder, read_state(folder)
    if resume != "auto":
        raise CheckpointError(f"--resume {resume}: has no whole checkpoint (checkpoints/step_*)")
    return None


def resumed_config(config: Config, folder: Path, state: RunState, world_size: int) -> tuple[Config, list[str]]:
    """The checkpoint's options with those of this call over them, and a note for those that changed.

    A step keeps its tokens at any number of processes: where they would be others, `total_batch_tokens` is set. Raises
    ConfigError, naming both values, for options that contradict the checkpoint.
    """
    theirs = {name: value for name, value in state.config.items() if name in Config.model_fields and name not in OF_THIS_CALL}
    given = config.model_dump(mode="json", include=config.model_fields_set)
    problems = [f"{name} {given[name]} contradicts {folder}, which has {theirs[name]}; leave it out, or begin a new run"
                for name in FIXED if name in given and name in theirs and given[name] != theirs[name]]
    values = theirs | given | {"init_from": theirs.get("init_from", "scratch")}  # where the first weights came from
    run = folder.parent.parent
    values |= {"log_dir": str(run.parent), "run_name": run.name}
    try:
        per_micro_step = int(values["batch_size"]) * int(values["seq_len"]) * world_size
        total = int(values.get("total_batch_tokens") or per_micro_step)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: its options are not those of a run: {error}") from None
    if total != state.tokens_per_step:
        if given.get("total_batch_tokens"):
            problems.append(f"total_batch_tokens {total} contradicts {folder}, whose steps take {state.tokens_per_step}; "
                            f"leave it out, or begin a new run")
        values["total_batch_tokens"] = state.tokens_per_step
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        resumed = load(Config, values)
        resumed.accumulation_steps(world_size)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{folder}: its options and those given do not fit together: {error}") from None
    changed = [f"{name} {theirs[name]} -> {new}" for name, new in resumed.model_dump(mode="json").items()
               if name in theirs and name not in OF_THIS_CALL and theirs[name] != new]
    return resumed, [f"changed since the checkpoint: {', '.join(changed)}"] if changed else []


def build_model(config: Config, checkpoint: Path | None = None) -> tuple[Config, GPT]:
    """The model: from a checkpoint of the run, or fresh, or from other weights, whose architecture the config then takes over.

    Raises CheckpointError for weights that cannot be had, ConfigError for options that contradict them.
    """
    if checkpoint is not None:
        _, weights = read_weights(checkpoint)  # before the model: this checks its size
        try:
            model = GPT(GPTConfig.of(config))
        except ValueError as error:
            raise CheckpointError(f"{checkpoint}: its options do not make a model: {error}") from None
        load_weights(model, weights, str(checkpoint))
        return config, model
    if config.init_from == "scratch":
        return config, GPT(GPTConfig.of(config))
    folder = find_weights(config.init_from, config.log_dir)
    theirs, weights = read_weights(folder)
    given = config.model_dump(include=config.model_fields_set)
    fixed = {name: theirs[name] for name in ARCHITECTURE}
    if wrong := [name for name in fixed if name in given and given[name] != fixed[name]]:
        raise ConfigError("\n".join(f"{name} {given[name]} contradicts init_from {config.init_from}, which has {fixed[name]}; "
                                    f"leave {name} out" for name in wrong))
    try:
        n_tokens = GPTConfig(**theirs).n_tokens
    except ValueError as error:
        raise CheckpointError(f"{folder}: its options do not make a model: {error}") from None
    # the checkpoint's own path, as the name may mean another run tomorrow
    vocabulary = {"vocab_size": theirs["vocab_size"], "real_vocab_size": theirs.get("real_vocab_size")}
    config = load(Config, vocabulary | given | fixed | {"init_from": str(folder)})
    model = GPT(GPTConfig.of(config))
    if model.config.n_tokens != n_tokens:
        raise ConfigError(f"vocab_size {config.vocab_size} makes {model.config.n_tokens} tokens, but init_from {folder} has "
                          f"{n_tokens}; leave vocab_size and real_vocab_size out")
    load_weights(model, weights, str(folder))
    return config, model


def restore(checkpoint: Path, state: RunState, model: GPT, optimizers: list[torch.optim.Optimizer],
            scaler: torch.amp.GradScaler, process: Process) -> None:
    """Put optimizers, loss scaler and random states back. Raises CheckpointError for what does not fit."""
    load_optimizers(checkpoint, model, optimizers)
    try:
        if state.scaler and scaler.is_enabled():
            scaler.load_state_dict(state.scaler)
        if process.rank < len(state.random):  # a process more than there were keeps its seed
            state.random[process.rank].put(process.device)
    except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint}: its scaler or random states do not fit: {error}") from None
