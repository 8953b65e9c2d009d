"""A run on disk: saving its state, finding it, and going on from it as if the run had never
stopped.

A checkpoint is a folder `<run>/checkpoints/step_<step>/` of plain data, nothing in it is ever
unpickled:

- `model.safetensors`: the weights under GPT-2's own names; a tied output head is stored once, as
  `transformer.wte.weight`
- `optimizer.safetensors`: the optimizers' state, `<parameter>/<name>`
- `checkpoint.json`: step, options, random states and whatever else a run needs beside the tensors
- `SHA256SUMS`: the checksums of these files, which loading verifies (and `sha256sum -c`)

With FSDP `model/` and `optimizer/` stand in place of the first two: a safetensors file for each
process, by torch.distributed.checkpoint. Both forms are read the same, by any number of processes,
with FSDP or without.

It is written under another name, flushed to disk and renamed, so it is there whole or not at all.
"""

import base64
import contextlib
import functools
import json
import math
import os
import random
import shlex
import shutil
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from config import Config
from model import GPT
from runtime.cli import ConfigError, ContradictionError, load
from runtime.errors import TrainingError, UserError
from runtime.files import delete, flush_to_disk, sha256, whole_folder
from runtime.runlog import LogRow, RunFolder, all_checkpoints, not_kept, step_of
from runtime.shards import is_sharded, own_part, write_shards
from runtime.world import World, describe_ranks
from weights import (
    ARCHITECTURE,
    MODEL,
    OPTIMIZER,
    SHARDS,
    STATE,
    SUMS,
    CheckpointError,
    read_json,
    read_part,
    verify,
    write_tensors,
)

# What a run cannot change without being another run: the model, and which tokens a step trains on.
# All else may change.
FIXED = (
    *ARCHITECTURE,
    "vocab_size",
    "real_vocab_size",
    "seq_len",
    "shuffle",
    "overfit_batch",
    "val_fraction",
    "seed",
    "optimizer",
)
OF_THIS_CALL = (
    "resume",
    "device",
    "timeout",
    "log_dir",
    "run_name",
    "estimate",
)  # never taken from the checkpoint
PLACES = ("data_dir", "hellaswag_file")  # what a run reads, in a checkpoint with its whole path
WITHOUT_EFFECT = ("init_from", "init", "residual_scaling")  # they made the first weights


class NotSavedError(CheckpointError):
    """A checkpoint that cannot be written; the message says which, why, and what the run still has."""

    status = 1  # a fault of the disk, not of the command


@dataclass
class State:
    """All of a run that changes from step to step, but for the random generators, which are the
    process's own.
    """

    model: GPT  # without torch.compile and DDP; sharded, with FSDP
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler  # of the loss; does nothing without fp16
    memory_before: float = 0.0  # MiB that the process had before all this was built
    corpus: str = ""  # the training tokens' fingerprint
    step: int = 0  # steps taken
    skipped_steps: int = 0  # of these, left out for a loss or norm that was not finite
    best_val_loss: float | None = None
    checkpoint: Path | None = None  # the newest one that is known to be whole
    is_whole: bool = True  # not while a step's update changes it
    before_step: tuple[int, Tensor, Tensor | None] | None = (
        None  # PyTorch's random states after so many steps: CPU's, device's
    )

    def begin_step(self, device: torch.device) -> int:
        """Remember PyTorch's random states, which a step that fails would leave somewhere in its
        middle.
        """
        gpu = _generator_of(device)
        self.before_step = self.step, torch.get_rng_state(), gpu and gpu.get_rng_state()
        return self.step + 1

    def finish_step(self, step: int) -> None:
        """Count a step whose update is complete."""
        self.step, self.is_whole = step, True

    def undo_step(self, device: torch.device) -> None:
        """Take back what a step that failed before its update has changed: gradients and random
        states.
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.before_step and self.before_step[0] == self.step:
            torch.set_rng_state(self.before_step[1])
            if gpu := _generator_of(device):
                gpu.set_rng_state(self.before_step[2])


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
        return cls.model_validate(
            {
                "python": random.getstate(),
                "numpy": (name, np.asarray(keys).tolist(), *rest),
                "torch_cpu": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
                "device": device.type,
                "torch_device": gpu
                and base64.b64encode(gpu.get_rng_state().numpy().tobytes()).decode(),
            }
        )

    def put(self, device: torch.device) -> None:
        """Make it the random state of this process. Raises ValueError, TypeError or RuntimeError if
        it is none.
        """
        random.setstate(self.python)
        name, keys, position, has_gauss, gauss = self.numpy
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        torch.set_rng_state(
            torch.frombuffer(bytearray(base64.b64decode(self.torch_cpu)), dtype=torch.uint8)
        )
        gpu = _generator_of(device)
        if (
            gpu and self.torch_device and self.device == device.type
        ):  # else it was saved on another kind of device
            gpu.set_rng_state(
                torch.frombuffer(bytearray(base64.b64decode(self.torch_device)), dtype=torch.uint8)
            )


def _generator_of(device: torch.device) -> Any:
    return {"cuda": torch.cuda, "mps": torch.mps}.get(device.type)


class SavedState(BaseModel):
    """checkpoint.json: what a State holds beside the tensors, and what tells whether a run can go
    on from it.
    """

    step: int = Field(ge=0)
    tokens: int  # trained on so far
    tokens_per_step: int = Field(ge=1)
    best_val_loss: float | None
    skipped_steps: int
    corpus: str  # the training tokens' fingerprint
    config: dict[str, Any]
    scaler: dict[str, int | float]  # the loss scaler's state; empty without fp16
    random: list[RandomState]  # of each process
    not_logged: LogRow | None = None  # the row of a step that log.csv did not take


# ---- saving


def save(run: RunFolder, state: State, config: Config, world: World) -> Path | None:
    """Save the run's state; every process has to call this. Returns the checkpoint's folder, None
    where none are kept.

    `corpus`: the training tokens' fingerprint. Raises TrainingError for weights that are no longer
    finite, NotSavedError if the checkpoint cannot be written.
    """
    if not config.keep_last:
        return None
    if state.checkpoint and step_of(state.checkpoint) == state.step:
        return state.checkpoint
    # the extremes rather than isfinite of all: that would take as much memory as the largest matrix
    parts = [part for parameter in state.model.parameters() if len(part := own_part(parameter))]
    if world.sum(not all(torch.stack(part.aminmax()).isfinite().all() for part in parts)):
        raise TrainingError(
            f"step {state.step}: the weights are no longer finite and are not saved; "
            f"{hint(run.path, config.lr)}"
        )
    tokens_per_step = config.tokens_per_step(world.world_size)
    saved = SavedState(
        step=state.step,
        tokens=state.step * tokens_per_step,
        tokens_per_step=tokens_per_step,
        best_val_loss=state.best_val_loss,
        skipped_steps=state.skipped_steps,
        corpus=state.corpus,
        scaler=state.scaler.state_dict(),
        random=world.gather(RandomState.take(world.device)),
        not_logged=run.not_logged,
        config=config.model_dump(mode="json")
        | {  # from wherever the run is resumed
            name: str(Path(value).resolve())
            for name in PLACES
            if (value := getattr(config, name)) is not None
        },
    )
    arguments = run.path, state.model, state.optimizers, saved, config.keep_last, state.checkpoint
    folder = (
        save_shards(*arguments, world)
        if config.fsdp
        else world.on_rank0(lambda: save_checkpoint(*arguments))
    )
    state.checkpoint = folder
    run.message(f"saved {folder}")
    return folder


def save_checkpoint(
    run: Path,
    model: GPT,
    optimizers: list[torch.optim.Optimizer],
    saved: SavedState,
    keep_last: int | None = None,
    whole: Path | None = None,
) -> Path:
    """Write the checkpoint `step_<step>` of the run's folder; returns its folder.

    Afterwards the `keep_last` newest are kept (none: all). Those that go are deleted before it is
    written, as the disk may be full of them, except `whole`, the newest checkpoint known to be
    whole, which goes last. Raises NotSavedError if it cannot be written; those that are kept are
    then as they were.
    """
    sums: dict[str, str] = {}
    with (
        _being_saved(run, saved, sums, keep_last, whole) as unfinished,
        ThreadPoolExecutor() as pool,
    ):
        files = _tensors(
            model, optimizers
        )  # one file's copying overlaps with the other's hashing and the disk
        sums |= zip(
            files,
            pool.map(lambda file: write_tensors(unfinished / file, files[file]), files),
            strict=True,
        )
    return _folder_of(run, saved)


def save_shards(
    run: Path,
    model: GPT,
    optimizers: list[torch.optim.Optimizer],
    saved: SavedState,
    keep_last: int | None,
    whole: Path | None,
    world: World,
) -> Path:
    """The same for a model that FSDP has sharded: every process has to call this, and writes its
    shards.
    """
    sums: dict[str, str] = {}
    with (
        contextlib.ExitStack() as stack
    ):  # of rank 0; the others write into the folder that it makes
        unfinished = world.on_rank0(
            lambda: stack.enter_context(_being_saved(run, saved, sums, keep_last, whole))
        )
        if unseen := [
            rank for rank, there in enumerate(world.gather(unfinished.is_dir())) if not there
        ]:
            raise _not_shared(unfinished, unseen)
        for file, tensors in _tensors(model, optimizers).items():
            for name, digest in write_shards(unfinished / SHARDS[file], tensors, world).items():
                sums[f"{SHARDS[file]}/{name}"] = digest
            if not tensors:  # as no step has been taken yet
                sums[file] = world.on_rank0(functools.partial(write_tensors, unfinished / file, {}))
        world.on_rank0(stack.close)
    return _folder_of(run, saved)


def _folder_of(run: Path, saved: SavedState) -> Path:
    return run / "checkpoints" / f"step_{saved.step:06d}"


def _tensors(model: GPT, optimizers: list[torch.optim.Optimizer]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint, by file."""
    weights = (
        model.state_dict()
    )  # first of all: after an evaluation this makes shards again of what FSDP has gathered
    if model.config.tie_weights:
        del weights["lm_head.weight"]
    return {MODEL: weights, OPTIMIZER: optimizer_tensors(model, optimizers)}


@contextlib.contextmanager
def _being_saved(
    run: Path, saved: SavedState, sums: dict[str, str], keep_last: int | None, whole: Path | None
) -> Iterator[Path]:
    """What `save_checkpoint` does around writing the tensors, into the folder given, and their
    checksums into `sums`, by file.
    """
    folder = _folder_of(run, saved)
    try:
        if keep_last and whole:
            with contextlib.suppress(
                OSError
            ):  # one that cannot be deleted: there may be room all the same
                delete(not_kept(run, keep_last - 1, before=saved.step, whole=whole))
        with whole_folder(folder, replace=True) as unfinished:
            with contextlib.suppress(
                OSError
            ):  # a checkpoint's steps are in the log, if that can be written
                flush_to_disk(run / "log.csv")
            yield unfinished
            # json rather than pydantic: in ASCII, so it also takes a path that is not UTF-8
            (unfinished / STATE).write_text(
                json.dumps(saved.model_dump()) + "\n", encoding="ascii", newline="\n"
            )
            sums[STATE] = sha256(unfinished / STATE)
            (unfinished / SUMS).write_text(
                "".join(f"{digest}  {file}\n" for file, digest in sums.items()), newline="\n"
            )
            for path in (unfinished / STATE, unfinished / SUMS):
                flush_to_disk(path)
        if keep_last:
            delete(not_kept(run, keep_last, before=saved.step + 1, whole=folder))
    except (OSError, SafetensorError, ValueError) as error:  # ValueError: a state that is no JSON
        left = (
            f"once it can be, --resume {shlex.quote(str(run))} goes on from {whole.name}"
            if whole
            else "the run has no checkpoint yet"
        )
        raise NotSavedError(f"{folder}: cannot be written: {error}; {left}") from None


def save_if_best(
    val_loss: float, run: RunFolder, state: State, config: Config, world: World
) -> None:
    """Keep a checkpoint of this step, if no validation loss was lower."""
    best = math.inf if state.best_val_loss is None else state.best_val_loss
    if state.step and val_loss < best:
        folder = save(run, state, config, world)
        state.best_val_loss = val_loss
        keep_best(run, folder, world)


def check_finite(
    loss: float, norm: float, lr: float, run: RunFolder, state: State, config: Config
) -> bool:
    """Return whether the step changed the weights.

    It did not where loss or norm is not finite. Raises TrainingError after more such steps than
    `skip_nonfinite`. An overflow in fp16 is none: the scaler halves its scale and goes on.
    """
    overflow = config.fp16 and math.isfinite(loss) and state.scaler.get_scale() >= 0.5
    if math.isfinite(loss + norm) or overflow:
        return True
    problem = (
        f"step {state.step}: the loss is {loss}, the gradient norm {norm}, the learning rate {lr:g}"
    )
    if state.skipped_steps == config.skip_nonfinite:
        instead = ", or bf16 instead of fp16" if config.fp16 else ""
        raise TrainingError(f"{problem}; {hint(run.path, config.lr)}{instead}")
    state.skipped_steps += 1
    run.message(f"{problem}: left out, {state.skipped_steps} of {config.skip_nonfinite}")
    return False


def keep_best(run: RunFolder, folder: Path | None, world: World) -> None:
    """Keep a checkpoint as `best_<step>`, the run's best so far, which `keep_last` does not delete;
    nothing without a checkpoint.

    Every process has to call this. The files are linked, not copied, where the file system can.
    Raises NotSavedError.
    """
    if folder is not None:
        world.on_rank0(lambda: _keep_best(run.path, folder))


def _keep_best(run: Path, folder: Path) -> None:
    best = folder.with_name(f"best_{step_of(folder):06d}")
    try:
        with whole_folder(best, replace=True) as unfinished:
            for path in folder.rglob("*"):
                copy = unfinished / path.relative_to(folder)
                if path.is_dir():
                    copy.mkdir()
                    continue
                try:
                    os.link(path, copy)
                except OSError:
                    shutil.copy2(path, copy)
                    flush_to_disk(copy)
        delete(path for path in all_checkpoints(run, "best") if path != best)
    except OSError as error:
        raise NotSavedError(
            f"{best}: cannot be written: {error}; once it can be, --resume "
            f"{shlex.quote(str(run))} goes on from "
            f"{folder.name}"
        ) from None


def hint(run: Path, lr: float) -> str:
    """What to do when training has failed at the learning rate `lr`."""
    lower = f"--resume {shlex.quote(str(run))} --lr {lr / 2:g} goes on from its last checkpoint"
    return f"the log is kept in {run}. Try a lower lr, more warmup_steps or grad_clip 1.0" + (
        f"; {lower}" if all_checkpoints(run) else ""
    )


@contextlib.contextmanager
def emergency_save(run: RunFolder, state: State, config: Config, world: World) -> Iterator[None]:
    """Save the state after the last whole step if anything fails: a corpus that goes bad, a log
    that cannot be written, memory.

    The error is raised all the same, with a note on how to go on. Not saved is what a save itself
    could not write, a state that training has spoiled (TrainingError), one in the middle of its
    update, and any of several processes', as the others may be gone or have failed elsewhere: then
    the last checkpoint counts.
    """

    def update_begins(*_: object) -> None:
        state.is_whole = False

    hooks = [optimizer.register_step_pre_hook(update_begins) for optimizer in state.optimizers]
    try:
        yield
    except (CheckpointError, TrainingError):
        raise
    except Exception as error:
        if (
            config.keep_last
            and state.is_whole
            and not world.distributed
            and state.step > _saved_step(state)
        ):
            try:
                traceback.clear_frames(
                    error.__traceback__
                )  # they hold the step's activations, and memory may be the fault
                state.undo_step(world.device)
                save(run, state, config, world)
            except Exception as another:  # the first error is the one to tell
                if state.step > _saved_step(state):
                    error.add_note(
                        f"the state after step {state.step} could not be saved: {another}"
                    )
        if (
            state.checkpoint and state.before_step
        ):  # a resume that failed before its first step needs no more than a mended cause
            error.add_note(run.how_to_resume())
        if isinstance(error, UserError) and state.before_step:
            error.status = (
                1  # a step has begun: it is a run that failed, not a mistake in its options
            )
        raise
    finally:
        for hook in hooks:
            hook.remove()


def _saved_step(state: State) -> int:
    return step_of(state.checkpoint) if state.checkpoint else 0


# ---- the optimizers' state


def optimizer_tensors(model: GPT, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimizers' state as named tensors, `<parameter>/<name of the state>`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": torch.as_tensor(value)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def load_optimizers(folder: Path, model: GPT, optimizers: list[torch.optim.Optimizer]) -> None:
    """Restore the optimizers' state from a checkpoint. Raises CheckpointError if it does not fit."""
    parameters = dict(model.named_parameters())
    like = {
        f"{name}/{key}": parameter
        for name, parameter in parameters.items()
        if is_sharded(parameter)
        for key in ("exp_avg", "exp_avg_sq")
    }
    tensors = read_part(folder, OPTIMIZER, like)
    if not tensors:  # saved before the first update, as every step so far was left out
        return
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        ours = optimizer.state_dict()
        for index, parameter in enumerate(
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ):
            prefix = f"{names[id(parameter)]}/"
            state = {
                key.removeprefix(prefix): tensors.pop(key).clone()
                for key in list(tensors)
                if key.startswith(prefix)
            }
            expected = {
                "step",
                *(
                    ["exp_avg", "exp_avg_sq"]
                    if isinstance(optimizer, torch.optim.AdamW)
                    else ["momentum_buffer"]
                ),
            }
            if set(state) != expected or any(
                t.shape != (torch.Size() if key == "step" else parameter.shape)
                for key, t in state.items()
            ):
                raise CheckpointError(
                    f"{folder}: the optimizer's state does not fit {names[id(parameter)]}; it "
                    f"was saved with "
                    f"another optimizer or model"
                )
            ours["state"][index] = state
        optimizer.load_state_dict(ours)
    if tensors:
        raise CheckpointError(f"{folder}: has optimizer state for an unknown {next(iter(tensors))}")


# ---- finding


def read_state(folder: Path) -> SavedState:
    """The state of a whole checkpoint. Raises CheckpointError if any of its files is missing or
    damaged.
    """
    verify(folder)
    try:
        return SavedState(**read_json(folder / STATE))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise CheckpointError(
            f"{folder / STATE}: not a checkpoint of this project: {where}: {problem['msg'].lower()}"
        ) from None


def newest_whole_checkpoint(run: Path) -> tuple[tuple[Path, SavedState] | None, list[str]]:
    """The run's latest checkpoint that is whole, and its state, if there is one; and a line for
    each damaged one skipped.
    """
    skipped: list[str] = []
    for folder in sorted(
        [*all_checkpoints(run, "best"), *all_checkpoints(run)], key=step_of, reverse=True
    ):
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

    def is_finished(self, run: RunFolder, config: Config, world: World) -> bool:
        """True, with a message, if the run has ended with this step."""
        is_over = self.saved.step >= config.max_steps and world.broadcast(run.is_finished())
        if is_over:
            run.message(
                f"nothing to do: {self.folder} is step {self.saved.step} of {config.max_steps}; "
                f"raise max_steps to go on"
            )
        return is_over

    def restore(self, state: State, config: Config, world: World) -> None:
        """Put optimizers, loss scaler, counts and random states back; the model has its weights
        already.

        Raises CheckpointError for what does not fit.
        """
        corpus = state.corpus
        if corpus != self.saved.corpus:
            raise CheckpointError(
                f"{self.folder} was trained on another corpus than "
                f"{config.data_dir}/{config.dataset}: its fingerprint is "
                f"{self.saved.corpus[:12]}, this one's {corpus[:12]}; restore it, or begin a new "
                f"run"
            )
        load_optimizers(self.folder, state.model, state.optimizers)
        try:
            if self.saved.scaler and state.scaler.is_enabled():
                state.scaler.load_state_dict(self.saved.scaler)
            if world.rank < len(self.saved.random):  # a process more than there were keeps its seed
                self.saved.random[world.rank].put(world.device)
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.folder}: its scaler or random states do not fit: {error}"
            ) from None
        state.step, state.skipped_steps = self.saved.step, self.saved.skipped_steps
        state.best_val_loss, state.checkpoint = self.saved.best_val_loss, self.folder


def find_checkpoint(config: Config, world: World) -> tuple[Resumed | None, Config, list[str]]:
    """The whole checkpoint that `resume` means, if the run does not begin at its first step; the
    run's config; notes for the user.

    Every process has to call this, and every one gets what rank 0 finds. Processes that torchrun
    started again, after some of them died or a machine came or went, go on from the run's newest
    checkpoint. Raises UserError or CheckpointError if `resume` names a checkpoint that is not
    there, damaged or not the newest, or that not all processes see, ConfigError for options that
    contradict it or, in a new run, each other.
    """
    if config.fsdp and not world.distributed and not world.calls:
        raise UserError(
            "--fsdp: shards the model over several processes, and there is one; start them with "
            "torchrun --nproc_per_node=N train.py ..., or leave fsdp out"
        )
    resumed, notes = world.on_rank0(lambda: _find_checkpoint(config, world.calls))
    _check_same_folder(config, resumed, world)
    notes = [*world.notes, *notes]
    if resumed is None:
        if (
            config.resume is not None
        ):  # only now are the options known to be a new run's, and judged as such
            config = load(
                Config, config.model_dump(include=config.model_fields_set) | {"resume": None}
            )
        return None, *_without_fsdp_alone(config, world, notes)
    data_dir_given = "data_dir" in config.model_fields_set
    given = config
    config, changes = world.raise_on_all(
        lambda: resumed_config(given, resumed.folder, resumed.saved, world.world_size)
    )
    if not data_dir_given and (moved := world.on_rank0(lambda: _moved_data_dir(config))):
        changes.append(
            f"the corpus is no longer in {config.data_dir}: it is read from "
            f"{Path(moved) / config.dataset}"
        )
        config = config.model_copy(update={"data_dir": moved})
    return resumed, *_without_fsdp_alone(config, world, notes + changes)


def _without_fsdp_alone(config: Config, world: World, notes: list[str]) -> tuple[Config, list[str]]:
    """A run that has shrunk to one process, or goes on in one, has the whole model there."""
    if config.fsdp and not world.distributed:
        return config.model_copy(update={"fsdp": False}), [
            *notes,
            "fsdp has no effect: there is one process",
        ]
    return config, notes


def _check_same_folder(config: Config, resumed: Resumed | None, world: World) -> None:
    """Raises CheckpointError if a process does not see the checkpoint that rank 0 has found, or
    sees some where rank 0 sees none.
    """
    run, seen = Path(config.log_dir) / str(config.run_name), False
    with contextlib.suppress(OSError):  # what this process cannot read
        seen = (
            resumed.folder.is_dir()
            if resumed
            else (config.resume == "auto" or _is_of(run, world.calls))
            and bool(all_checkpoints(run))
        )
    on_first, *others = world.gather(seen)

    def check() -> None:
        if differ := [
            rank
            for rank, sees in enumerate(others, 1)
            if sees != on_first and sees != bool(resumed)
        ]:
            what = (
                f"{resumed.folder} is there for rank 0, but not"
                if resumed
                else f"{run} has no checkpoint for rank 0, but some"
            )
            raise CheckpointError(
                f"{what} for {describe_ranks(differ)}: a run on several machines goes on where "
                f"all see its "
                f"folder; put --log_dir on a file system that they share, at the same place, or "
                f"copy it to each"
            )

    world.on_rank0(check)


def check_same_tokens(folder: str, corpus: str, world: World) -> None:
    """Raises UserError unless all processes find the same corpus in their `folder`. `corpus`: the
    training tokens' fingerprint.
    """
    everyones = world.gather(corpus)

    def check() -> None:
        if others := [rank for rank, theirs in enumerate(everyones) if theirs != everyones[0]]:
            raise UserError(
                f"{folder}: {describe_ranks(others)} did not find the same tokens there as rank "
                f"0; copy one corpus to "
                f"all machines"
            )

    world.on_rank0(check)


def _moved_data_dir(config: Config) -> str | None:
    """The `data_dir` of a new run, if the one that the checkpoint names is gone, as where the
    project's folder has been moved.

    `Resumed.restore` finds out whether the corpus is the same.
    """
    there, here = Path(config.data_dir), Path(Config.model_fields["data_dir"].default)
    is_there, is_here = (any((folder / config.dataset).glob("*.bin")) for folder in (there, here))
    return None if is_there or (there.is_dir() and not is_here) else str(here)


def _is_of(run: Path, calls: Sequence[str]) -> bool:
    """Whether one of these calls of torchrun began the run, or went on with it: then its processes
    have been started again.
    """
    return not RunFolder(run).torchrun_calls().isdisjoint(calls)


def _find_checkpoint(config: Config, calls: Sequence[str]) -> tuple[Resumed | None, list[str]]:
    run, resume = Path(config.log_dir) / str(config.run_name), config.resume
    if resume is None and not _is_of(run, calls):
        return (
            None,
            [],
        )  # also where the folder is an earlier run's, because this one died before it had begun its own
    if resume not in (None, "auto"):
        run, folder = _run_and_checkpoint(resume, config.log_dir)
        if folder and not _is_of(run, calls):
            saved = read_state(folder)
            if later := [
                other.name for other in all_checkpoints(run) if step_of(other) > saved.step
            ]:
                raise UserError(
                    f"--resume {resume}: {run} has later checkpoints, {', '.join(later)}, whose "
                    f"steps would be "
                    f"taken again; move them away first, or begin a new run with --init_from "
                    f"{shlex.quote(resume)}"
                )
            return Resumed(folder, saved), []
    found, skipped = newest_whole_checkpoint(run)
    if found is None and resume not in (None, "auto"):
        raise CheckpointError(
            "\n".join(
                [f"--resume {resume}: has no whole checkpoint (checkpoints/step_*)", *skipped]
            )
        )
    return Resumed(*found) if found else None, skipped


def _run_and_checkpoint(resume: str, log_dir: str) -> tuple[Path, Path | None]:
    """The folder of the run that `--resume` names, and that of the checkpoint, if it names one.
    Raises UserError.
    """
    path = next((p for p in (Path(log_dir) / resume, Path(resume)) if p.is_dir()), Path(resume))
    if not path.is_dir():
        what = (
            "is a file, and a checkpoint is a folder"
            if path.exists()
            else "no such run or checkpoint"
        )
        if path.suffix == ".pt" and path.exists():
            what += f" (a new run begins with it by --init_from {shlex.quote(resume)})"
        raise UserError(
            f"--resume {resume}: {what}; give auto, a run's folder or one of its checkpoints/step_*"
        )
    # links are not followed yet: where checkpoints/ is one, to a larger disk, the run is where the
    # link is
    path = path.resolve() if ".." in path.parts else path.absolute()
    if not (path / "checkpoints").is_dir():
        if path.name == "checkpoints":
            return path.parent.resolve(), None
        if path.parent.name == "checkpoints":
            run = path.parent.parent.resolve()
            return run, run / "checkpoints" / path.name
        if (path / STATE).is_file() or any(path.glob(f"step_*/{STATE}")):
            raise UserError(
                f"--resume {resume}: is not in a run's folder, which has the log to go on with; "
                f"give <run>, or "
                f"<run>/checkpoints/step_*, or begin a new run with --init_from and a step_* folder"
            )
    return path.resolve(), None


# ---- going on


def resumed_config(
    config: Config, folder: Path, saved: SavedState, world_size: int
) -> tuple[Config, list[str]]:
    """The checkpoint's options with those of this call over them, and a note for those that
    changed.

    A step keeps its tokens at any number of processes: where they would be others,
    `total_batch_tokens` is set. Raises ConfigError, naming both values, for options that contradict
    the checkpoint.
    """
    theirs = {
        name: value
        for name, value in saved.config.items()
        if name in Config.model_fields and name not in OF_THIS_CALL
    }
    given = config.model_dump(mode="json", include=config.model_fields_set)
    problems = [
        f"{name} {given[name]} contradicts {folder}, which has {theirs[name]}; leave it out, or "
        f"begin a new run"
        for name in FIXED
        if name in given and name in theirs and given[name] != theirs[name]
    ]
    # init_from: where the first weights came from. Without resume, the options are judged as what
    # they now are: a whole run's
    values = theirs | given | {"init_from": theirs.get("init_from", "scratch"), "resume": None}
    run = folder.parent.parent
    values |= {"log_dir": str(run.parent), "run_name": run.name}
    try:
        batch_size, seq_len = int(values["batch_size"]), int(values["seq_len"])
        sequences, rest = divmod(saved.tokens_per_step, seq_len)
        total = int(values.get("total_batch_tokens") or batch_size * seq_len * world_size)
        if rest or batch_size < 1:
            raise ValueError(
                f"{saved.tokens_per_step} tokens a step, batch_size {batch_size}, seq_len {seq_len}"
            )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{folder}: its options are not those of a run: {error}") from None
    if total != saved.tokens_per_step:
        if given.get("total_batch_tokens"):
            problems.append(
                f"total_batch_tokens {total} contradicts {folder}, whose steps take "
                f"{saved.tokens_per_step}; "
                f"leave it out, or begin a new run"
            )
        values["total_batch_tokens"] = saved.tokens_per_step
    if sequences % (batch_size * world_size):
        problems.append(
            f"batch_size {batch_size} on {world_size} processes takes "
            f"{batch_size * seq_len * world_size} tokens at "
            f"once, and a step of {folder} takes {saved.tokens_per_step}, no multiple of it; "
            f"{_what_fits(sequences, batch_size, world_size)}"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        resumed = load(Config, values)
        resumed.accumulation_steps(world_size)
    except (ConfigError, ContradictionError) as error:
        raise ConfigError(
            "\n".join(
                f"{folder}: its options and those given do not fit together: {line}"
                for line in str(error).splitlines()
            )
        ) from None
    changed = [
        f"{name} {theirs[name]} -> {new}"
        for name, new in resumed.model_dump(mode="json").items()
        if name in theirs
        and name not in (*OF_THIS_CALL, *WITHOUT_EFFECT, *PLACES)
        and theirs[name] != new
    ]
    notes = [f"changed since the checkpoint: {', '.join(changed)}"] if changed else []
    return resumed, notes


def _what_fits(sequences: int, batch_size: int, world_size: int) -> str:
    """What to change where a step's sequences do not divide into micro-steps."""
    each, rest = divmod(sequences, world_size)
    if rest:
        return (
            f"no batch_size fits: the {sequences} sequences of a step divide among "
            f"{_factors_of(sequences, near=world_size)} "
            f"processes, not {world_size}"
        )
    return f"a batch_size that fits is {_factors_of(each, near=batch_size)}"


def _factors_of(number: int, near: int) -> str:
    """Up to eight factors of a number, those nearest to `near`, in words."""
    factors = [n for n in range(1, min(number, 100_000) + 1) if number % n == 0]
    *most, last = map(str, sorted(sorted(factors, key=lambda n: abs(n - near))[:8]))
    return f"{', '.join(most)} or {last}" if most else last


def open_run(run: RunFolder, config: Config, resumed: Resumed | None, world: World) -> list[str]:
    """Create the run's folder, or take it up after the checkpoint's step, and write config.yaml;
    returns notes for the user.

    Every process has to call this. Raises UserError if another run is writing to the folder, and
    with fsdp if not every process finds it. A new run that cannot be written leaves everything as
    it was.
    """

    def open_folder() -> list[str]:
        if resumed:
            step, is_over = resumed.saved.step, resumed.saved.step >= config.max_steps
            log_every = (
                1 if is_over else config.log_every
            )  # if it is over, its last row stays, whatever log_every says
            run.resume(
                step,
                log_every,
                resumed.folder,
                0 if is_over else config.keep_last,
                resumed.saved.not_logged,
            )
            run.write_calls(world.calls)
            run.write_config(config.to_yaml())
            return []
        aside = run.create()
        written = config
        if aside and Path(config.init_from).is_relative_to(run.path):
            written = config.model_copy(
                update={"init_from": str(aside / Path(config.init_from).relative_to(run.path))}
            )
        try:
            run.write_calls(world.calls)
            run.write_config(written.to_yaml())
        except BaseException:
            run.abandon()
            raise
        return [f"the earlier {run.path} is now {aside}"] if aside else []

    notes = world.on_rank0(open_folder)
    if resumed:
        notes.append(f"resumes from {resumed.folder}, after step {resumed.saved.step}")
    if unseen := [
        rank
        for rank, there in enumerate(world.gather((run.path / "config.yaml").exists()))
        if not there
    ]:
        if config.fsdp and config.keep_last:
            world.on_rank0(run.abandon)
            raise _not_shared(run.path, unseen)
        notes.append(
            f"{run.path} is not there for {describe_ranks(unseen)}: the run trains, but can go "
            f"on after a fault only "
            f"where all processes see its folder; put --log_dir on a file system that they share"
        )
    return notes


def _not_shared(folder: Path, unseen: Sequence[int]) -> UserError:
    """What every process raises where some do not find a folder that rank 0 has made."""
    error = UserError(
        f"{folder}: is not there for {describe_ranks(unseen)}, and with fsdp every process "
        f"writes its shards there; "
        f"put --log_dir on a file system that all machines share, or --keep_last 0 to save nothing"
    )
    error.of_all = True
    return error
