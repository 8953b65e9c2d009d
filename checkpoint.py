"""A run on disk: saving its state, finding it, and going on from it as if the run had never stopped.

A checkpoint is a folder `<run>/checkpoints/step_<step>/` of plain data, nothing in it is ever unpickled:

- `model.safetensors`: the weights under GPT-2's own names; a tied output head is stored once, as `transformer.wte.weight`
- `optimizer.safetensors`: the optimizers' state, `<parameter>/<name>`
- `checkpoint.json`: step, options, random states and whatever else a run needs beside the tensors
- `SHA256SUMS`: the checksums of these files, which loading verifies (and `sha256sum -c`)

It is written under another name, flushed to disk and renamed, so it is there whole or not at all.
"""

import base64
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from config import Config
from model import GPT
from runtime.cli import ConfigError, ContradictionError, load
from runtime.errors import TrainingError, UserError
from runtime.files import delete, flush_to_disk, sha256, whole_folder
from runtime.runlog import RunFolder, all_checkpoints, step_of
from runtime.world import World, launch
from weights import ARCHITECTURE, MODEL, OPTIMIZER, STATE, SUMS, CheckpointError, read_json, read_tensors, verify

# What a run cannot change without being another run: the model, and which tokens a step trains on. All else may change.
FIXED = (*ARCHITECTURE, "vocab_size", "real_vocab_size", "seq_len", "shuffle", "overfit_batch", "val_fraction", "seed", "optimizer")
OF_THIS_CALL = ("resume", "device", "timeout", "log_dir", "run_name")  # never taken from the checkpoint
WITHOUT_EFFECT = ("init_from", "init", "residual_scaling")  # they made the first weights


@dataclass
class State:
    """All of a run that changes from step to step, but for the random generators, which are the process's own."""

    model: GPT  # without torch.compile and DDP
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler  # of the loss; does nothing without fp16
    step: int = 0  # steps taken
    skipped_steps: int = 0  # of these, left out for a loss or norm that was not finite
    best_val_loss: float | None = None


class RandomState(BaseModel):
    """The random generators of one process."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]
    torch_cpu: str  # base64
    device: str  # cpu, cuda or mps
    torch_device: str | None  # base64; of the CUDA device or of MPS

    @classmethod
    def take(cls, device: torch.device) -> "RandomState":
        """The random state of this process."""
        name, keys, *rest = np.random.get_state(legacy=True)
        gpu = _generator_of(device)
        return cls.model_validate({
            "python": random.getstate(), "numpy": (name, np.asarray(keys).tolist(), *rest),
            "torch_cpu": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
            "device": device.type, "torch_device": gpu and base64.b64encode(gpu.get_rng_state().numpy().tobytes()).decode()})

    def put(self, device: torch.device) -> None:
        """Make it the random state of this process. Raises ValueError, TypeError or RuntimeError if it is none."""
        random.setstate(self.python)
        name, keys, position, has_gauss, gauss = self.numpy
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(self.torch_cpu)), dtype=torch.uint8))
        gpu = _generator_of(device)
        if gpu and self.torch_device and self.device == device.type:  # else it was saved on another kind of device
            gpu.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(self.torch_device)), dtype=torch.uint8))


def _generator_of(device: torch.device) -> Any:
    return {"cuda": torch.cuda, "mps": torch.mps}.get(device.type)


class SavedState(BaseModel):
    """checkpoint.json: what a State holds beside the tensors, and what tells whether a run can go on from it."""

    step: int = Field(ge=0)
    tokens: int  # trained on so far
    tokens_per_step: int = Field(ge=1)
    best_val_loss: float | None
    skipped_steps: int
    corpus: str  # the training tokens' fingerprint
    config: dict[str, Any]
    scaler: dict[str, int | float]  # the loss scaler's state; empty without fp16
    random: list[RandomState]  # of each process


# ---- saving


def save(run: RunFolder, state: State, config: Config, corpus: str, world: World) -> Path | None:
    """Save the run's state; every process has to call this. Returns the checkpoint's folder, None where none are kept.

    `corpus`: the training tokens' fingerprint. Raises TrainingError for weights that are no longer finite, CheckpointError if
    the checkpoint cannot be written.
    """
    if not config.keep_last:
        return None
    if not all(parameter.isfinite().all() for parameter in state.model.parameters()):
        raise TrainingError(f"step {state.step}: the weights are no longer finite and are not saved; {remedy(run.path, config.lr)}")
    tokens_per_step = config.tokens_per_step(world.world_size)
    saved = SavedState(
        step=state.step, tokens=state.step * tokens_per_step, tokens_per_step=tokens_per_step, best_val_loss=state.best_val_loss,
        skipped_steps=state.skipped_steps, corpus=corpus, scaler=state.scaler.state_dict(),
        random=world.gather(RandomState.take(world.device)),
        config=config.model_dump(mode="json") | {"data_dir": str(Path(config.data_dir).resolve())})
    folder = world.on_first(lambda: save_checkpoint(run.path, state.model, state.optimizers, saved, keep_last=config.keep_last))
    run.say(f"saved {folder}")
    return folder


def save_checkpoint(run: Path, model: GPT, optimizers: list[torch.optim.Optimizer], saved: SavedState, *,
                    keep_last: int | None = None) -> Path:
    """Write the checkpoint `step_<step>` of the run's folder; returns its folder.

    Afterwards the `keep_last` newest are kept (none: all). Raises CheckpointError if it cannot be written; the others are then
    as they were.
    """
    folder = run / "checkpoints" / f"step_{saved.step:06d}"
    weights = model.state_dict()
    if model.config.tie_weights:
        del weights["lm_head.weight"]
    try:
        with whole_folder(folder, replace=True) as unfinished:
            if (run / "log.csv").exists():
                flush_to_disk(run / "log.csv")  # a checkpoint's steps are in the log
            with ThreadPoolExecutor() as pool:  # one file's copying overlaps with the other's hashing and the disk
                files = {MODEL: weights, OPTIMIZER: optimizer_tensors(model, optimizers)}
                sums = dict(zip(files, pool.map(lambda file: _write_tensors(unfinished / file, files[file]), files), strict=True))
            (unfinished / STATE).write_text(saved.model_dump_json() + "\n", encoding="utf-8", newline="\n")
            sums[STATE] = sha256(unfinished / STATE)
            (unfinished / SUMS).write_text("".join(f"{digest}  {file}\n" for file, digest in sums.items()), newline="\n")
            for path in (unfinished / STATE, unfinished / SUMS):
                flush_to_disk(path)
    except (OSError, SafetensorError, ValueError) as error:  # ValueError: a state that is no JSON
        raise CheckpointError(f"{folder}: cannot be written: {error}") from None
    if keep_last is not None:
        # checkpoints of later steps are damaged, else the run would have gone on from them: they do not count
        delete([path for path in all_checkpoints(run) if step_of(path) <= saved.step][:-keep_last])
    return folder


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors to disk; returns the file's checksum."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    flush_to_disk(path)
    return sha256(path)


def keep_best(run: RunFolder, folder: Path | None, world: World) -> None:
    """Keep a checkpoint as `best_<step>`, the run's best so far, which `keep_last` does not delete; nothing without a checkpoint.

    Every process has to call this. The files are linked, not copied, where the file system can. Raises CheckpointError.
    """
    if folder is not None:
        world.on_first(lambda: _keep_best(run.path, folder))


def _keep_best(run: Path, folder: Path) -> None:
    best = folder.with_name(f"best_{step_of(folder):06d}")
    try:
        with whole_folder(best, replace=True) as unfinished:
            for path in folder.iterdir():
                try:
                    os.link(path, unfinished / path.name)
                except OSError:
                    shutil.copy2(path, unfinished / path.name)
                    flush_to_disk(unfinished / path.name)
    except OSError as error:
        raise CheckpointError(f"{best}: cannot be written: {error}") from None
    delete(path for path in all_checkpoints(run, "best") if path != best)


def remedy(run: Path, lr: float) -> str:
    """What to do when training has failed at the learning rate `lr`."""
    lower = f"--resume {run} --lr {lr / 2:g} goes on from its last checkpoint"
    return (f"the log is kept in {run}. Try a lower lr, more warmup_steps or grad_clip 1.0"
            + (f"; {lower}" if all_checkpoints(run) else ""))


# ---- the optimizers' state


def optimizer_tensors(model: GPT, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimizers' state as named tensors, `<parameter>/<name of the state>`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {f"{names[id(parameter)]}/{key}": torch.as_tensor(value) for optimizer in optimizers
            for parameter, state in optimizer.state.items() for key, value in state.items()}


def load_optimizers(folder: Path, model: GPT, optimizers: list[torch.optim.Optimizer]) -> None:
    """Restore the optimizers' state from a checkpoint. Raises CheckpointError if it does not fit."""
    tensors = read_tensors(folder / OPTIMIZER)
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


# ---- finding


def read_state(folder: Path) -> SavedState:
    """The state of a whole checkpoint. Raises CheckpointError if any of its files is missing or damaged."""
    sums = verify(folder)
    if missing := {MODEL, OPTIMIZER, STATE} - set(sums):
        raise CheckpointError(f"{folder / SUMS}: damaged: it lacks {', '.join(sorted(missing))}")
    try:
        return SavedState(**read_json(folder / STATE))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise CheckpointError(f"{folder / STATE}: not a checkpoint of this project: {where}: {problem['msg'].lower()}") from None


def newest_whole_checkpoint(run: Path) -> tuple[tuple[Path, SavedState] | None, list[str]]:
    """The run's latest checkpoint that is whole, and its state, if there is one; and a line for each damaged one skipped."""
    skipped: list[str] = []
    for folder in sorted([*all_checkpoints(run, "best"), *all_checkpoints(run)], key=step_of, reverse=True):
        try:
            return (folder, read_state(folder)), skipped
        except CheckpointError as error:
            skipped.append(f"skipping a checkpoint: {error}")
    return None, skipped


@dataclass
class Resumed:
    """A whole checkpoint to go on from."""

    folder: Path
    saved: SavedState

    def restore(self, state: State, config: Config, corpus: str, world: World) -> None:
        """Put optimizers, loss scaler, counts and random states back; the model has its weights already.

        `corpus`: the training tokens' fingerprint. Raises CheckpointError for what does not fit.
        """
        if corpus != self.saved.corpus:
            raise CheckpointError(
                f"{self.folder} was trained on another corpus than {config.data_dir}/{config.dataset}: its fingerprint is "
                f"{self.saved.corpus[:12]}, this one's {corpus[:12]}; restore it, or begin a new run")
        load_optimizers(self.folder, state.model, state.optimizers)
        try:
            if self.saved.scaler and state.scaler.is_enabled():
                state.scaler.load_state_dict(self.saved.scaler)
            if world.rank < len(self.saved.random):  # a process more than there were keeps its seed
                self.saved.random[world.rank].put(world.device)
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, RuntimeError) as error:
            raise CheckpointError(f"{self.folder}: its scaler or random states do not fit: {error}") from None
        state.step, state.skipped_steps = self.saved.step, self.saved.skipped_steps
        state.best_val_loss = self.saved.best_val_loss


def find_checkpoint(config: Config, world: World) -> tuple[Resumed | None, Config, list[str]]:
    """The whole checkpoint that `resume` means, if the run does not begin at its first step; the run's config; notes for the user.

    Every process has to call this, and every one gets what rank 0 finds. Processes that torchrun started again after one of
    them died go on from the run's newest checkpoint. Raises UserError or CheckpointError if `resume` names a checkpoint that
    is not there, damaged or not the newest, ConfigError for options that contradict it.
    """
    # an agent counts the restarts of its own machine only
    restarted = any(world.gather(launch().restarts > 0))
    resumed, notes = world.on_first(lambda: _find_checkpoint(config, restarted))
    if resumed is None:
        return None, config, notes
    config, changes = resumed_config(config, resumed.folder, resumed.saved, world.world_size)
    return resumed, config, notes + changes


def _find_checkpoint(config: Config, restarted: bool) -> tuple[Resumed | None, list[str]]:
    run, resume = Path(config.log_dir) / str(config.run_name), config.resume
    if resume is None and not (restarted and launch().call == RunFolder(run).torchrun_call()):
        return None, []  # also where the folder is an earlier run's, because this one died before it had begun its own
    if resume not in (None, "auto"):
        path = next((p for p in (Path(config.log_dir) / resume, Path(resume)) if p.is_dir()), Path(resume))
        if not path.is_dir():
            what = "is a file, and a checkpoint is a folder" if path.exists() else "no such run or checkpoint"
            raise UserError(f"--resume {resume}: {what}; give auto, a run's folder or one of its checkpoints/step_*")
        run = path = path.resolve()
        if path.parent.name == "checkpoints":
            run = path.parent.parent
            if not restarted:
                saved = read_state(path)
                if later := [other.name for other in all_checkpoints(run) if step_of(other) > saved.step]:
                    raise UserError(f"--resume {resume}: {run} has later checkpoints, {', '.join(later)}, whose steps would be "
                                    f"taken again; move them away first, or begin a new run with --init_from {resume}")
                return Resumed(path, saved), []
    found, skipped = newest_whole_checkpoint(run)
    if found is None and resume not in (None, "auto"):
        raise CheckpointError(f"--resume {resume}: has no whole checkpoint (checkpoints/step_*)")
    return Resumed(*found) if found else None, skipped


# ---- going on


def resumed_config(config: Config, folder: Path, saved: SavedState, world_size: int) -> tuple[Config, list[str]]:
    """The checkpoint's options with those of this call over them, and a note for those that changed.

    A step keeps its tokens at any number of processes: where they would be others, `total_batch_tokens` is set. Raises
    ConfigError, naming both values, for options that contradict the checkpoint.
    """
    theirs = {name: value for name, value in saved.config.items() if name in Config.model_fields and name not in OF_THIS_CALL}
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
    if total != saved.tokens_per_step:
        if given.get("total_batch_tokens"):
            problems.append(f"total_batch_tokens {total} contradicts {folder}, whose steps take {saved.tokens_per_step}; "
                            f"leave it out, or begin a new run")
        values["total_batch_tokens"] = saved.tokens_per_step
        if saved.tokens_per_step % per_micro_step:
            problems.append(f"batch_size {values['batch_size']} on {world_size} processes takes {per_micro_step} tokens at once, "
                            f"and a step of {folder} takes {saved.tokens_per_step}, no multiple of it; choose another batch_size")
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        resumed = load(Config, values)
        resumed.accumulation_steps(world_size)
    except (ConfigError, ContradictionError) as error:
        raise ConfigError(f"{folder}: its options and those given do not fit together: {error}") from None
    changed = [f"{name} {theirs[name]} -> {new}" for name, new in resumed.model_dump(mode="json").items()
               if name in theirs and name not in (*OF_THIS_CALL, *WITHOUT_EFFECT, "data_dir") and theirs[name] != new]
    return resumed, [f"changed since the checkpoint: {', '.join(changed)}"] if changed else []


def open_run(run: RunFolder, config: Config, resumed: Resumed | None, world: World) -> list[str]:
    """Create the run's folder, or take it up after the checkpoint's step, and write config.yaml; returns notes for the user.

    Every process has to call this. Raises UserError if another run is writing to the folder.
    """
    def open_folder() -> list[str]:
        if resumed:
            run.go_on(resumed.saved.step, config.log_every)
            run.write_config(config.to_yaml())
            return []
        aside = run.begin()
        written = config
        if aside and Path(config.init_from).is_relative_to(run.path):
            written = config.model_copy(update={"init_from": str(aside / Path(config.init_from).relative_to(run.path))})
        run.write_config(written.to_yaml())
        return [f"the earlier {run.path} is now {aside}"] if aside else []

    return world.on_first(open_folder)
