"""Save a run and its best state, and advise how to resume after a fault."""

import contextlib
import math
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from checkpoint.files import OPTIMIZER, gather_whole, own_part
from checkpoint.names import all_checkpoints, step_of
from checkpoint.save import keep_best, write_checkpoint
from checkpoint.saved import SavedState
from config import PATH, Config
from run.folder import how_to_resume
from run.state import Run, State, take_random_state
from runtime.console import log
from runtime.errors import TrainingError, UserError
from runtime.launch import launch
from runtime.signals import StopRequest


def save(run: Run, random_state: dict[str, Any] | None = None) -> None:
    """Save the run's state, but not before the first step, twice, or with `keep_last` 0.

    `random_state`: this process's after the step; default: its state now. All ranks have to call
    this. Afterwards `state.checkpoint` is the folder. Raises TrainingError as `check_weights`,
    OSError if the disk takes no checkpoint.
    """
    config, state, world = run.config, run.state, run.world
    is_saved = state.checkpoint and step_of(state.checkpoint) == state.step
    if is_saved or not (state.step and config.keep_last):
        return
    check_weights(run)
    saved = SavedState(
        **state.numbers(),
        folder=run.path / f"checkpoints/step_{state.step:06d}",
        tokens=state.step * run.tokens_per_step,
        tokens_per_step=run.tokens_per_step,
        corpus=state.corpus,
        vocabulary=run.vocabulary,
        random=world.gather(random_state or take_random_state(world.device)),
        config=options_to_save(config),
    )
    files = {file: gather_whole(part, world.rank) for file, part in state.tensors().items()}
    world.on_rank0(
        lambda: write_checkpoint(run.path, saved, files, config.keep_last, state.checkpoint)
    )
    state.checkpoint = saved.folder
    log.info(f"saved {saved.folder}")


def check_weights(run: Run) -> None:
    """Raise TrainingError for weights that are not finite or differ between ranks.

    All ranks have to call this.
    """
    config, state, world = run.config, run.state, run.world
    # Sums of weights: isfinite of a weight would allocate a mask of its size.
    sums = torch.stack([own_part(p).sum() for p in state.model.parameters()]).tolist()
    if not math.isfinite(world.sum(sum(sums))):
        raise TrainingError(
            f"step {state.step}: the weights are no longer finite and are not saved; {hint(run)}"
        )
    # With FSDP each rank has a shard; ranks with other GPUs may round differently (world.notes).
    others = world.ranks_that_differ(sums)
    if others and not (config.fsdp or world.notes):
        raise TrainingError(
            f"step {state.step}: {others} and rank 0 have different weights, which are not saved; "
            f"a GPU or the network may be faulty; --resume auto resumes from the last checkpoint"
        )


def options_to_save(config: Config) -> dict[str, Any]:
    """Return the options for a checkpoint, with absolute paths."""
    options = config.model_dump(mode="json")
    for name in Config.names_marked(PATH):
        # `reference` may be the name of a curve here
        if options[name] and (name == "data_dir" or Path(options[name]).is_file()):
            options[name] = str(Path(options[name]).resolve())
    return options


def checkpoint_bytes(state: State) -> int:
    """Return the bytes of the tensors of a checkpoint. All ranks have to call this."""
    files = state.tensors()
    size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    if not files[OPTIMIZER]:  # the first step creates it
        # AdamW keeps two averages of each parameter, other optimizers at least one.
        for optimizer in state.optimizers:
            averages = 2 if isinstance(optimizer, torch.optim.AdamW) else 1
            size += averages * sum(p.nbytes for g in optimizer.param_groups for p in g["params"])
    return size


def check_disk(run: Run) -> None:
    """Raise UserError if the disk has no room for one checkpoint of a run that is about to start.

    All ranks have to call this.
    """
    if not run.config.keep_last:
        return
    size = checkpoint_bytes(run.state)

    def check() -> None:
        place, room = run.path / "checkpoints", 0
        if newest := run.state.checkpoint:  # a resumed run may delete older ones to make room
            older = [*place.glob("step_*/*"), *place.glob(".*.unfinished/*")]
            room = sum(file.stat().st_size for file in older if file.parent != newest)
        while not place.exists():
            place = place.parent
        disk = shutil.disk_usage(place)
        room += disk.free
        if room < size and disk.total:  # some network file systems report 0
            raise UserError(
                f"{place}: the disk has room for {room / 1e9:,.3g} GB, a checkpoint takes "
                f"{size / 1e9:,.3g} GB; delete something, choose another --log_dir, or save none: "
                f"--keep_last 0"
            )

    run.world.on_rank0(check)


def save_if_best(val_loss: float, run: Run) -> None:
    """Keep a checkpoint of this step as `best_<step>`, if no validation loss was lower.

    All ranks have to call this. `keep_last` does not delete it. Raises OSError.
    """
    state = run.state
    best = math.inf if state.best_val_loss is None else state.best_val_loss
    if state.step and run.config.keep_last and val_loss < best:
        save(run)
        state.best_val_loss = val_loss
        if folder := state.checkpoint:
            run.world.on_rank0(lambda: keep_best(folder))


# ---- faults


def hint(run: Run) -> str:
    """Return advice on training that failed: with a checkpoint, to halve all learning rates."""
    advice = f"the log is kept in {run.path}. Try a lower lr, more warmup_steps or grad_clip 1.0"
    if not all_checkpoints(run.path):
        return advice
    lower = " ".join(
        f"--{name} {value / 2:g}"
        for name, value in run.config
        if name.endswith("lr") and value and not run.config.lacks(name)
    )
    folder = shlex.quote(str(run.path))
    return f"{advice}; --resume {folder} {lower} resumes from its last checkpoint"


@contextlib.contextmanager
def advising(run: Run) -> Iterator[None]:
    """Add how to resume to an error of the block."""
    try:
        yield
    except TrainingError:  # the message has advice
        raise
    except Exception as error:
        if run.state.checkpoint:
            error.add_note(how_to_resume(run.path))
        if run.state.step and isinstance(error, UserError):
            error.status = 1  # the run has failed: its options were right
        raise


def end_unfinished(summary: Mapping[str, Any], stop: StopRequest) -> None:
    """Raise SystemExit(1) after a run that stopped for a signal to another machine.

    This machine's torchrun then starts its ranks again (--max_restarts), together with the
    machines that remain or join.
    """
    if summary.get("interrupted") and stop.received is None and launch().agents > 1:
        raise SystemExit(1)
