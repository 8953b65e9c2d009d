"""Where a run begins: with fresh weights, with those of another model, or from one of its own checkpoints."""

import os
from pathlib import Path
from typing import Any

import torch

from checkpoint import (
    ARCHITECTURE,
    CheckpointError,
    RunState,
    all_checkpoints,
    find_weights,
    load_optimizers,
    load_weights,
    newest_whole_checkpoint,
    read_state,
    read_weights,
    step_of,
)
from config import Config, ConfigError, UserError, load
from model import GPT, GPTConfig
from parallel import Process, gather
from runlog import read_torchrun_call, torchrun_call

# What a run cannot change without being another run: the model, and which tokens a step trains on. All else may change.
FIXED = (*ARCHITECTURE, "vocab_size", "real_vocab_size", "seq_len", "shuffle", "overfit_batch", "val_fraction", "seed", "optimizer")
OF_THIS_CALL = ("resume", "device", "timeout", "log_dir", "run_name")  # never taken from the checkpoint
WITHOUT_EFFECT = ("init_from", "init", "residual_scaling")  # they made the first weights


def find_checkpoint(config: Config, process: Process) -> tuple[Path, RunState] | None:
    """The checkpoint that `resume` means, whole, and its state; None where the run begins at its first step.

    Every process has to call this, and every one gets what rank 0 finds. Processes that torchrun started again after one of
    them died go on from the run's newest checkpoint. Raises UserError or CheckpointError if `resume` names a checkpoint that
    is not there, damaged or not the newest.
    """
    # an agent counts the restarts of its own machine only
    restarted = any(gather(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0", process))
    found: Any = None
    if process.rank == 0:
        try:
            found = _find_checkpoint(config, restarted, process)
        except (UserError, CheckpointError) as error:
            found = error
    found = gather(found, process)[0]
    if isinstance(found, Exception):
        raise found
    return found


def _find_checkpoint(config: Config, restarted: bool, process: Process) -> tuple[Path, RunState] | None:
    run, resume = Path(config.log_dir) / str(config.run_name), config.resume
    if resume is None and not (restarted and torchrun_call() == read_torchrun_call(run)):
        return None  # also where the folder is an earlier run's, because this one died before it had begun its own
    if resume not in (None, "auto"):
        path = next((p for p in (Path(config.log_dir) / resume, Path(resume)) if p.is_dir()), Path(resume))
        if not path.is_dir():
            what = "is a file, and a checkpoint is a folder" if path.exists() else "no such run or checkpoint"
            raise UserError(f"--resume {resume}: {what}; give auto, a run's folder or one of its checkpoints/step_*")
        run = path = path.resolve()
        if path.parent.name == "checkpoints":
            run = path.parent.parent
            if not restarted:
                state = read_state(path)
                if later := [other.name for other in all_checkpoints(run) if step_of(other) > state.step]:
                    raise UserError(f"--resume {resume}: {run} has later checkpoints, {', '.join(later)}, whose steps would be "
                                    f"taken again; move them away first, or begin a new run with --init_from {resume}")
                return path, state
    found, skipped = newest_whole_checkpoint(run)
    for line in skipped:
        process.say(f"note: {line}")
    if found is None and resume not in (None, "auto"):
        raise CheckpointError(f"--resume {resume}: has no whole checkpoint (checkpoints/step_*)")
    return found


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
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{folder}: its options are not those of a run: {error}") from None
    if total != state.tokens_per_step:
        if given.get("total_batch_tokens"):
            problems.append(f"total_batch_tokens {total} contradicts {folder}, whose steps take {state.tokens_per_step}; "
                            f"leave it out, or begin a new run")
        values["total_batch_tokens"] = state.tokens_per_step
        if state.tokens_per_step % per_micro_step:
            problems.append(f"batch_size {values['batch_size']} on {world_size} processes takes {per_micro_step} tokens at once, "
                            f"and a step of {folder} takes {state.tokens_per_step}, no multiple of it; choose another batch_size")
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        resumed = load(Config, values)
        resumed.accumulation_steps(world_size)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{folder}: its options and those given do not fit together: {error}") from None
    changed = [f"{name} {theirs[name]} -> {new}" for name, new in resumed.model_dump(mode="json").items()
               if name in theirs and name not in (*OF_THIS_CALL, *WITHOUT_EFFECT, "data_dir") and theirs[name] != new]
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
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint}: its scaler or random states do not fit: {error}") from None
