"""Find the checkpoint to resume from, merge its options with the given ones, restore its state."""

import functools
import os
import shlex
from pathlib import Path

from checkpoint.files import MODEL, STATE, CheckpointError, read_tensors, refusing
from checkpoint.names import all_checkpoints, find_folder, run_and_checkpoint, step_of
from checkpoint.saved import SavedState, read_state
from checkpoint.weights import check_given
from config import FIXED, INITIAL, PATH, THIS_CALL, Config
from data.vocabulary import GPT2
from optimizer import note_rate_change
from options import ARCHITECTURE
from run.folder import RunFolder
from run.state import Run, State, put_random_state
from runtime.cli import ConfigError, load
from runtime.console import log
from runtime.errors import UserError
from runtime.files import write_atomic
from runtime.launch import launch
from runtime.world import World


def is_finished(saved: SavedState, config: Config, world: World) -> bool:
    """True, with a message, if the run has ended with the checkpoint's step."""
    # A log without a summary: the run was killed before it wrote one. No log: only checkpoints were
    # copied.
    is_complete = (saved.run / "summary.json").exists() or not (saved.run / "log.csv").exists()
    is_over = world.broadcast(is_complete) and config.is_over(saved.step, saved.seconds)
    if is_over:
        limit = "max_minutes" if config.max_minutes else "max_steps"
        log.info(f"nothing to do: {saved.folder} is the last step; raise {limit} to resume")
    return is_over


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
    if others := world.ranks_that_differ(Path(config.init_from).name):
        raise UserError(
            f"--init_from {config.init_from}: {others} found another checkpoint than rank 0; name "
            f"one checkpoint, not the run"
        )
    if saved is None:
        return
    if corpus != saved.corpus:
        raise CheckpointError(
            f"{saved.folder} was trained on another corpus than {folder}: its fingerprint is "
            f"{saved.corpus[:12]}, this one's {corpus[:12]}; restore it, or start a new run from "
            f"the weights: --init_from {shlex.quote(str(saved.folder))}"
        )
    for name in sorted(state.tensors(), key=MODEL.__eq__):  # the weights last, see State.load
        file = saved.folder / name
        state.load(file, world.raise_on_all(functools.partial(read_tensors, file)))
    world.raise_on_all(functools.partial(restore_numbers, saved, state, world))
    state.checkpoint = saved.folder if saved.run == folder_of(saved.run, config) else None


def restore_numbers(saved: SavedState, state: State, world: World) -> None:
    """Restore everything that is not a tensor. Raises CheckpointError."""
    # Values of the right type may still be no state of a generator, which can raise anything.
    with refusing(f"{saved.folder / STATE}: damaged", Exception):
        state.load_numbers(saved)
        if world.rank < len(saved.random):  # a rank that is new keeps its seed
            put_random_state(saved.random[world.rank], world.device)


# ---- finding the checkpoint


def find_checkpoint(config: Config, world: World) -> tuple[SavedState | None, Config]:
    """Find the checkpoint that `resume` names; returns it, and the run's config.

    It is None if the run begins at its first step. All ranks have to call this; rank 0 searches.
    Raises UserError or CheckpointError if `resume` names a checkpoint that is absent, damaged, not
    the newest or not seen by all ranks, or if its run's folder cannot be written; ConfigError for
    options that contradict it or, in a new run, each other.
    """
    named = config.resume and run_and_checkpoint(Path(config.resume))[1]
    if launch().max_restarts and (named or config.resume is None):
        raise UserError(
            "--max_restarts: after a fault torchrun starts the same command again, which would "
            f"begin {'at the same checkpoint' if named else 'a new run'}; "
            f"{'name the run instead' if named else 'add --resume auto'}"
        )
    saved = world.on_rank0(lambda: _find_checkpoint(config))
    folder = saved.folder if saved else Path(f"{config.log_dir}/{config.run_name}/checkpoints")
    if others := world.ranks_that_differ(bool(config.resume) and folder.is_dir()):
        raise CheckpointError(
            f"{folder} is there for rank 0 but not for {others}, or vice versa: to resume, all "
            f"machines have to see the run's folder; put --log_dir on a file system that they "
            f"share, at the same path, or copy it to each"
        )
    if saved:
        check_place(saved.run, folder_of(saved.run, config), world)
        config = resumed_config(config, saved, world.world_size)
    elif config.resume is not None:
        # There is nothing to resume, so the options have to be valid for a new run.
        config = load(Config, config.model_dump(exclude_unset=True) | {"resume": None})
    if config.fsdp and not world.distributed:
        config = config.with_options(fsdp=False)
        log.warning("fsdp has no effect: there is one rank")
    return saved, config


def _find_checkpoint(config: Config) -> SavedState | None:
    """Find the checkpoint that `resume` names, or the newest whole one of the run.

    Notes each damaged one.
    """
    resume, run = config.resume, Path(f"{config.log_dir}/{config.run_name}")
    if resume is None:
        return None
    if resume != "auto":
        run, named = run_and_checkpoint(find_folder(resume, config.log_dir))
        if named:
            if named.parent.name != "checkpoints":
                raise CheckpointError(
                    f"--resume {resume}: is not in its run's checkpoints/, where a run continues; "
                    f"move it there, or start a new run with --init_from {shlex.quote(resume)}"
                )
            later = [path for path in all_checkpoints(run) if step_of(path) > step_of(named)]
            if later and folder_of(run, config) == run:
                raise UserError(
                    f"--resume {resume}: {run} has later checkpoints, up to {later[-1].name}, "
                    f"whose steps would be repeated; move them away first, resume in another "
                    f"--log_dir, or start a new run with --init_from {shlex.quote(resume)}"
                )
            return read_state(named)
    for folder in reversed(all_checkpoints(run)):
        try:
            return read_state(folder)
        except CheckpointError as error:
            log.warning(f"skipping a checkpoint: {error}")
    if resume == "auto":
        return None
    raise CheckpointError(
        f"--resume {resume}: has no whole checkpoint; give auto, a run's folder or one of its "
        f"checkpoints/step_*, or start a new run with --init_from"
    )


def folder_of(run: Path, config: Config) -> Path:
    """Return the folder in which a resumed run continues: its own, or one in the given log_dir."""
    given = Path(config.log_dir, run.name)
    moves = "log_dir" in config.model_fields_set
    return given if moves and os.path.realpath(given) != os.path.realpath(run) else run


def check_place(run: Path, place: Path, world: World) -> None:
    """Raise UserError if a resumed run cannot continue in `place`. All ranks have to call this."""
    if place == run and not world.broadcast(os.access(run, os.W_OK)):
        raise UserError(
            f"{run}: cannot be written; to resume in FOLDER/{run.name}, add --log_dir FOLDER"
        )
    if place != run and launch().max_restarts:
        raise UserError(
            f"--max_restarts: after a fault torchrun starts the same command again, which would "
            f"begin at the same checkpoint; copy {run} to {place} and add --resume auto"
        )


def check_same_tokens(folder: str, corpus: str, world: World) -> None:
    """Raise UserError on all ranks unless all find the same corpus in their `folder`.

    `corpus`: the training tokens' fingerprint.
    """
    if others := world.ranks_that_differ(corpus):
        raise UserError(
            f"{folder}: {others} did not find the same tokens there as rank 0; copy one corpus to "
            f"all machines"
        )


# ---- the options of a resumed run


def resumed_config(config: Config, saved: SavedState, world_size: int) -> Config:
    """Return the checkpoint's options with the given ones over them.

    A step keeps its number of tokens at any number of ranks: `total_batch_tokens` is set if it
    would differ. Raises ConfigError for options that contradict the checkpoint.
    """
    tokens, place = saved.tokens_per_step, folder_of(saved.run, config)
    theirs = {
        name: value
        for name, value in saved.config.items()
        if name in Config.model_fields and not Config.marks(name, THIS_CALL)
    }
    # A corpus's own vocabulary decides its size, whatever the command gives.
    decided = {"vocab_size", "real_vocab_size"} if saved.vocabulary != GPT2 else set()
    given = config.model_dump(mode="json", exclude_unset=True, exclude=decided)
    marked = Config.names_marked(ARCHITECTURE, FIXED)
    fixed = {name: theirs[name] for name in marked if name in theirs}
    if given.get("total_batch_tokens"):
        fixed["total_batch_tokens"] = tokens
    check_given(given, fixed, saved.folder)
    own = {
        "init_from": theirs["init_from"],
        "log_dir": str(place.parent),
        "run_name": place.name,
        "resume": None,
        "total_batch_tokens": tokens,
    }
    check_batch((theirs | given)["batch_size"], tokens, theirs["seq_len"], world_size)
    try:
        resumed = load(Config, theirs | given | own, world_size=world_size)
    except ConfigError as error:
        error.add_note(f"other options come from {saved.folder}; a step keeps its {tokens} tokens")
        raise
    if not theirs.get("total_batch_tokens") and resumed.accumulation_steps(world_size) == 1:
        resumed = resumed.with_options(total_batch_tokens=None)
    return resumed


def note_options(config: Config, saved: SavedState | None, world: World) -> None:
    """Note options with no effect, and what differs between the ranks and from the checkpoint."""
    for note in world.notes:
        log.warning(note)
    if saved:
        note_changes(config, saved)
    for note in config.notes():
        log.warning(note)


def note_changes(config: Config, saved: SavedState) -> None:
    """Note what differs from the checkpoint: its options, and the next learning rate."""
    saved.note_unknown()
    now = config.model_dump(mode="json")
    may_differ = {*Config.names_marked(INITIAL, PATH, THIS_CALL)}
    changed = [
        f"{name} {value} -> {now[name]}"
        for name, value in saved.config.items()
        if name in now.keys() - may_differ and value != now[name]
    ]
    if changed:
        log.warning(f"changed since the checkpoint: {', '.join(changed)}")
    note_rate_change(config, saved.config, saved.step, saved.seconds)


def check_batch(batch_size: int, tokens: int, seq_len: int, world_size: int) -> None:
    """Raise ConfigError, which names values that work, unless ranks and batches divide a step."""
    sequences = tokens // seq_len
    share, rest = divmod(sequences, world_size)
    if rest:
        raise ConfigError(
            f"a step keeps its {sequences} sequences, which {world_size} ranks cannot share "
            f"equally; nearest that work: {nearest_divisors(sequences, world_size)} ranks"
        )
    if share % batch_size:
        raise ConfigError(
            f"batch_size {batch_size} does not divide the {share} sequences of each rank; a step "
            f"keeps its {tokens:,} tokens; nearest that work: {nearest_divisors(share, batch_size)}"
        )


def nearest_divisors(number: int, near: int) -> str:
    """Name the largest divisor of a number below `near`, and the smallest above if there is one."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    nearest = [n for n in divisors if n < near][-1:] + [n for n in divisors if n > near][:1]
    return " or ".join(map(str, nearest))


# ---- the run's folder


def open_run(run: Run, folder: RunFolder, saved: SavedState | None) -> None:
    """Create the run's folder, or continue it after the checkpoint's step.

    All ranks have to call this. Raises UserError if another run is writing to the folder. A new
    run that cannot be written leaves everything as it was.
    """

    def open_folder() -> None:
        if saved is None:
            folder.create()
        elif saved.run == folder.path:
            folder.resume(saved.step)
            log.warning(f"resumes from {saved.folder}, after step {saved.step}")
        else:
            folder.create(saved.run, saved.step)
            log.warning(f"resumes from {saved.folder}, after step {saved.step}, in {folder.path}")
        write_atomic(run.path / "config.yaml", run.config.to_yaml())

    run.world.on_rank0(open_folder)
    if others := run.world.ranks_that_differ((run.path / "config.yaml").exists()):
        log.warning(
            f"{run.path} is not there for {others}; put --log_dir on a file system that all "
            f"machines share, else the run cannot resume after a fault"
        )
