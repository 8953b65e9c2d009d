"""Find the checkpoint to resume from, merge its options with the given ones, restore its state."""

import functools
import shlex
from pathlib import Path

from checkpoint.files import CheckpointError, refusing
from checkpoint.state import SavedState, State, put_random_state, read_state
from checkpoint.weights import check_given, find_folder, run_and_checkpoint
from config import ARCHITECTURE, FIXED, INITIAL, PATH, THIS_CALL, Config
from runtime.cli import ConfigError, load
from runtime.errors import UserError
from runtime.files import write_atomic
from runtime.launch import launch
from runtime.runlog import RunFolder, all_checkpoints, step_of
from runtime.world import World, describe_ranks


def is_finished(saved: SavedState, run: RunFolder, config: Config, world: World) -> bool:
    """True, with a message, if the run has ended with the checkpoint's step."""
    has_summary = (run.path / "summary.json").exists()
    if not config.is_over(saved.step, saved.seconds) or not world.broadcast(has_summary):
        return False
    end = config.last_step or f"{config.max_minutes:g} minutes"
    run.message(
        f"nothing to do: {saved.folder} is step {saved.step} of {end}; raise "
        f"{'max_minutes' if config.max_minutes else 'max_steps'} to resume"
    )
    return True


def restore(
    saved: SavedState | None, state: State, corpus: str, config: Config, world: World
) -> None:
    """Note the fingerprint of the training tokens; if the run resumes, restore all of its state.

    Raises UserError on all ranks unless they have the same tokens and initial weights,
    CheckpointError for a state that does not fit.
    """
    state.corpus, folder = corpus, f"{config.data_dir}/{config.dataset}"
    check_same_tokens(folder, corpus, world)
    # A run may save another checkpoint while the ranks look for its newest one.
    if others := ranks_that_differ(Path(config.init_from).name, world):
        raise UserError(
            f"--init_from {config.init_from}: {describe_ranks(others)} found another checkpoint "
            f"than rank 0; name one checkpoint, not the run"
        )
    if saved is None:
        return
    if corpus != saved.corpus:
        raise CheckpointError(
            f"{saved.folder} was trained on another corpus than {folder}: its fingerprint is "
            f"{saved.corpus[:12]}, this one's {corpus[:12]}; restore it, or start a new run"
        )
    for name in state.tensors():
        world.raise_on_all(functools.partial(state.load, saved.folder / name))
    # States saved by other versions of PyTorch, NumPy or Python can raise any error.
    with refusing(f"{saved.folder}: its scaler or random states do not fit", Exception):
        state.load_numbers(saved)
        if world.rank < len(saved.random):  # a rank that is new keeps its seed
            put_random_state(saved.random[world.rank], world.device)
    state.checkpoint = saved.folder


# ---- finding the checkpoint


def find_checkpoint(config: Config, world: World) -> tuple[SavedState | None, Config, list[str]]:
    """Find the checkpoint that `resume` names; returns it, the run's config, and notes.

    It is None if the run begins at its first step. All ranks have to call this; rank 0 searches.
    Raises UserError or CheckpointError if `resume` names a checkpoint that is absent, damaged, not
    the newest or not seen by all ranks; ConfigError for options that contradict it or, in a new
    run, each other.
    """
    if launch().max_restarts and config.resume is None:
        raise UserError(
            "--max_restarts: after a fault torchrun starts the same command again, which would "
            "begin a new run; add --resume auto"
        )
    run = Path(f"{config.log_dir}/{config.run_name}")
    saved, skipped = world.on_rank0(lambda: _find_checkpoint(run, config))
    folder = saved.folder if saved else run / "checkpoints"
    if others := ranks_that_differ(bool(config.resume) and folder.is_dir(), world):
        raise CheckpointError(
            f"{folder} is there for rank 0 but not for {describe_ranks(others)}, or vice versa: to "
            f"resume, all machines have to see the run's folder; put --log_dir on a file system "
            f"that they share, at the same path, or copy it to each"
        )
    notes = [*world.notes, *skipped]
    if saved:
        config, changes = resumed_config(config, saved, world.world_size)
        notes += changes
    elif config.resume is not None:
        # There is nothing to resume, so the options have to be valid for a new run.
        config = load(Config, config.model_dump(exclude_unset=True) | {"resume": None})
    if config.fsdp and not world.distributed:
        config = config.model_copy(update={"fsdp": False})
        notes.append("fsdp has no effect: there is one rank")
    return saved, config, notes


def _find_checkpoint(run: Path, config: Config) -> tuple[SavedState | None, list[str]]:
    """Find the checkpoint named by `resume`, else the newest of `run`; returns notes too."""
    resume = config.resume
    if resume is None:
        return None, []
    if resume == "auto":
        return newest_whole_checkpoint(run)
    path = find_folder(resume, config.log_dir)
    if not path:
        raise UserError(
            f"--resume {resume}: no such run or checkpoint folder; give auto, a run's folder "
            f"or one of its checkpoints/step_*, or start a new run with --init_from"
        )
    run, named = run_and_checkpoint(path)
    if not named:
        newest, skipped = newest_whole_checkpoint(run)
        if not newest:
            problem = f"--resume {resume}: has no whole checkpoint (checkpoints/step_*)"
            raise CheckpointError("\n".join([problem, *skipped]))
        return newest, skipped
    saved = read_state(named)
    later = [path for path in all_checkpoints(run) if step_of(path) > saved.step]
    if later:
        raise UserError(
            f"--resume {resume}: {run} has later checkpoints, up to {later[-1].name}, whose "
            f"steps would be repeated; move them away first, or start a new run with "
            f"--init_from {shlex.quote(resume)}"
        )
    return saved, []


def newest_whole_checkpoint(run: Path) -> tuple[SavedState | None, list[str]]:
    """Return the state in the run's latest whole checkpoint, and a line for each damaged one."""
    skipped: list[str] = []
    for folder in reversed(all_checkpoints(run)):
        try:
            return read_state(folder), skipped
        except CheckpointError as error:
            skipped.append(f"skipping a checkpoint: {error}")
    return None, skipped


def check_same_tokens(folder: str, corpus: str, world: World) -> None:
    """Raise UserError on all ranks unless all find the same corpus in their `folder`.

    `corpus`: the training tokens' fingerprint.
    """
    if others := ranks_that_differ(corpus, world):
        raise UserError(
            f"{folder}: {describe_ranks(others)} did not find the same tokens there as rank 0; "
            f"copy one corpus to all machines"
        )


def ranks_that_differ(value: object, world: World) -> list[int]:
    """Return the ranks whose value differs from rank 0's."""
    values = world.gather(value)
    return [rank for rank, theirs in enumerate(values) if theirs != values[0]]


# ---- the options of a resumed run


def resumed_config(config: Config, saved: SavedState, world_size: int) -> tuple[Config, list[str]]:
    """Return the checkpoint's options with the given ones over them, and a note on changes.

    A step keeps its number of tokens at any number of ranks: `total_batch_tokens` is set if it
    would differ. Raises ConfigError for options that contradict the checkpoint.
    """
    tokens = saved.tokens_per_step
    this_call = Config.names_marked(THIS_CALL)
    theirs = {
        name: value
        for name, value in saved.config.items()
        if name in Config.model_fields and name not in this_call
    }
    given = config.model_dump(mode="json", exclude_unset=True)
    marked = Config.names_marked(ARCHITECTURE, FIXED)
    fixed = {name: theirs[name] for name in marked if name in theirs}
    if given.get("total_batch_tokens"):
        fixed["total_batch_tokens"] = tokens
    check_given(given, fixed, saved.folder)
    run = saved.folder.parent.parent
    own = {
        "init_from": theirs.get("init_from", "scratch"),
        "log_dir": str(run.parent),
        "run_name": run.name,
        "resume": None,
        "total_batch_tokens": None,  # set below
    }
    try:
        resumed = load(Config, theirs | given | own)
    except ConfigError as error:
        raise ConfigError(
            f"{saved.folder}: the given options do not fit its own: {error}"
        ) from None
    micro_step = resumed.tokens_per_step(world_size)
    if tokens % micro_step:
        raise ConfigError(
            f"a step of {saved.folder} takes {tokens // resumed.seq_len} sequences, no multiple of "
            f"batch_size {resumed.batch_size} on {world_size} ranks; choose a batch_size and a "
            f"number of ranks whose product divides {tokens // resumed.seq_len}"
        )
    if theirs.get("total_batch_tokens") or tokens != micro_step:
        resumed = resumed.model_copy(update={"total_batch_tokens": tokens})
    return resumed, _describe_changes(saved, resumed)


def _describe_changes(saved: SavedState, resumed: Config) -> list[str]:
    """Return a line on options that differ from the checkpoint's, or none."""
    now, unknown = resumed.model_dump(mode="json"), "(unknown to this version)"
    may_differ = Config.names_marked(THIS_CALL, INITIAL, PATH)
    changed = [
        f"{name} {value} -> {now.get(name, unknown)}"
        for name, value in saved.config.items()
        if name not in may_differ and value != now.get(name, unknown)
    ]
    return [f"changed since the checkpoint: {', '.join(changed)}"] if changed else []


# ---- the run's folder


def open_run(run: RunFolder, config: Config, saved: SavedState | None, world: World) -> list[str]:
    """Create the run's folder, or continue it after the checkpoint's step; returns notes.

    All ranks have to call this. Raises UserError if another run is writing to the folder. A new
    run that cannot be written leaves everything as it was.
    """

    def open_folder() -> list[str]:
        if saved:
            run.resume(saved.step)
            notes = [f"resumes from {saved.folder}, after step {saved.step}"]
        else:
            aside = run.create()
            notes = [f"the earlier {run.path} is now {aside}"] if aside else []
        write_atomic(run.path / "config.yaml", config.to_yaml())
        return notes

    notes = world.on_rank0(open_folder)
    if others := ranks_that_differ((run.path / "config.yaml").exists(), world):
        notes.append(
            f"{run.path} is not there for {describe_ranks(others)}; put --log_dir on a file system "
            f"that all machines share, else the run cannot resume after a fault"
        )
    return notes
