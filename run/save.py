"""Save checkpoints: when a run asks for it, the best one, and the last whole step after a fault."""

import contextlib
import math
import shlex
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from checkpoint.files import OPTIMIZER, gather_whole, own_part
from checkpoint.names import all_checkpoints, step_of
from checkpoint.save import keep_best, write_checkpoint
from checkpoint.saved import SavedState
from config import PATH, Config
from run.log import RunFolder
from run.state import State
from runtime.errors import TrainingError, UserError
from runtime.world import World


def save(run: RunFolder, state: State, config: Config, world: World) -> None:
    """Save the run's state, but not before the first step, twice, or with `keep_last` 0.

    All ranks have to call this. Afterwards `state.checkpoint` is the folder. Raises TrainingError
    for weights that are not finite or differ between ranks, OSError if the disk takes no
    checkpoint.
    """
    is_saved = state.checkpoint and step_of(state.checkpoint) == state.step
    if is_saved or not (state.step and config.keep_last):
        return
    # Sums of weights: isfinite of a weight would allocate a mask of its size.
    sums = torch.stack([own_part(p).sum() for p in state.model.parameters()]).tolist()
    if not math.isfinite(world.sum(sum(sums))):
        raise TrainingError(
            f"step {state.step}: the weights are no longer finite and are not saved; "
            f"{hint(run.path, config)}"
        )
    # With FSDP each rank has a shard; ranks with other GPUs may round differently (world.notes).
    others = world.ranks_that_differ(sums)
    if others and not (config.fsdp or world.notes):
        raise TrainingError(
            f"step {state.step}: {others} and rank 0 have different weights, which are not saved; "
            f"a GPU or the network may be faulty; --resume auto resumes from the last checkpoint"
        )
    tokens_per_step = config.tokens_per_step(world.world_size)
    options = config.model_dump(mode="json")
    for name in Config.names_marked(PATH):
        # `reference` may be the name of a curve here
        if options[name] and (name == "data_dir" or Path(options[name]).is_file()):
            options[name] = str(Path(options[name]).resolve())
    saved = SavedState(
        **state.numbers(),
        folder=run.path / f"checkpoints/step_{state.step:06d}",
        tokens=state.step * tokens_per_step,
        tokens_per_step=tokens_per_step,
        corpus=state.corpus,
        random=world.gather(state.random_state),
        config=options,
    )
    files = {file: gather_whole(part, world.rank) for file, part in state.tensors().items()}
    world.on_rank0(
        lambda: write_checkpoint(run.path, saved, files, config.keep_last, state.checkpoint)
    )
    state.checkpoint = saved.folder
    run.message(f"saved {saved.folder}")


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


def check_disk(run: RunFolder, state: State, config: Config, world: World) -> None:
    """Raise UserError if the disk has no room for one checkpoint of a run that is about to start.

    All ranks have to call this.
    """
    if not config.keep_last:
        return
    size = checkpoint_bytes(state)

    def check() -> None:
        place, room = run.path / "checkpoints", 0
        if newest := state.checkpoint:  # a resumed run may delete older ones to make room
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

    world.on_rank0(check)


def save_if_best(
    val_loss: float, run: RunFolder, state: State, config: Config, world: World
) -> None:
    """Keep a checkpoint of this step as `best_<step>`, if no validation loss was lower.

    All ranks have to call this. `keep_last` does not delete it. Raises OSError.
    """
    best = math.inf if state.best_val_loss is None else state.best_val_loss
    if state.step and config.keep_last and val_loss < best:
        save(run, state, config, world)
        state.best_val_loss = val_loss
        if folder := state.checkpoint:
            world.on_rank0(lambda: keep_best(folder))


# ---- faults


def hint(run: Path, config: Config) -> str:
    """Return advice on training that failed: with a checkpoint, to halve all learning rates."""
    advice = f"the log is kept in {run}. Try a lower lr, more warmup_steps or grad_clip 1.0"
    if not all_checkpoints(run):
        return advice
    lower = " ".join(
        f"--{name} {value / 2:g}"
        for name, value in config
        if name.endswith("lr") and value and not config.lacks(name)
    )
    return f"{advice}; --resume {shlex.quote(str(run))} {lower} resumes from its last checkpoint"


def log_steps(
    run: RunFolder,
    state: State,
    config: Config,
    world: World,
    judge: Callable[[int, float], list[str]] = lambda step, loss: [],
) -> str:
    """Log the steps whose figures are read; returns why the last update was skipped, else "".

    `judge`: returns lines on a logged step and its loss. Raises TrainingError after more updates
    with a loss or norm that is not finite than `skip_nonfinite`. An overflow in fp16 does not
    count: the scaler halves its scale.
    """
    while state.taken:
        step, figures, notes, state.problem, is_fatal = state.taken.popleft()
        if is_fatal:
            instead = ", or bf16 instead of fp16" * config.fp16
            raise TrainingError(f"{notes[0]}; {hint(run.path, config)}{instead}")
        ends = step == state.step and (state.stopping or state.is_over(config))
        if ends or state.problem or step == 1 or step % config.log_every == 0:
            tokens = config.tokens_per_step(world.world_size)
            figures["tokens_per_sec"] = tokens / figures["dt_ms"] * 1e3
            run.log(step, config.last_step, figures)
            run.message(*judge(step, figures["loss"]))
        run.message(*notes)
    return state.problem


@contextlib.contextmanager
def emergency_save(run: RunFolder, state: State, config: Config, world: World) -> Iterator[None]:
    """Save the last complete step if the block raises, then raise the error with a note on how to
    resume.

    The step is not saved if its update has begun, or on one of several ranks, as the others may be
    gone: then the last checkpoint counts.
    """
    try:
        yield
    except TrainingError:  # the state cannot be used, and the message has advice
        raise
    except Exception as error:
        if not (state.is_updating or world.distributed):
            try:
                # The traceback holds the step's activations, and memory may be short.
                traceback.clear_frames(error.__traceback__)
                state.settle(config)
                with contextlib.suppress(OSError):  # the disk may be full
                    log_steps(run, state, config, world)
                save(run, state, config, world)
            except Exception as another:
                error.add_note(f"the state after step {state.step} could not be saved: {another}")
        if state.checkpoint:
            error.add_note(run.how_to_resume())
        if state.step and isinstance(error, UserError):
            error.status = 1  # the run has failed: its options were right
        raise
