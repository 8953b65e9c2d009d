"""Measure a device, and predict, run and interleave the stages of a ladder on it."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from config import Config
from measure.interleaved.comparison import Comparison
from measure.interleaved.process import in_fresh_process, start_process, why_it_failed
from measure.interleaved.rounds import (
    LEFT_OUT,
    ROUNDS_OF_A_PROCESS,
    Side,
    SideError,
    run_rounds,
    seconds_shown,
    steps_of_a_turn,
    training_side,
)
from measure.ladder.record import Device, Predictions, Record, Run, Summary, settings
from measure.ladder.results import look_up
from measure.ladder.stages import Stage
from run.log import describe_duration
from runtime.console import BRIEF
from runtime.files import sole_writer
from runtime.report import git_commit, git_diff, machine
from runtime.start import cores

# Seconds until the first step, and the seconds that torch.compile adds with a warm cache: measured
# in the quick ladder's runs on two cores of an EPYC.
START, COMPILE = 7.0, 8.0
COLD_COMPILE = 120.0  # if the compile cache is empty
# Seconds for which max-autotune searches for kernels on a GPU: speedup5_max_autotune on an H200
SEARCH = 320.0
HEADROOM = 1.25  # memory of a process over its measured peak
Waiting = contextlib.AbstractContextManager[None]
SHORTER = "fewer --rounds (0: none), or fewer steps: -- --max_steps N; finished runs are kept"


def measure_device(name: str) -> Device:
    """Measure a device (auto, cuda, mps or cpu) in a fresh process; print a note if that fails."""
    with seconds_shown("measuring the device", "5 to 20 s"):
        found, problem = in_fresh_process("measure.ladder.probe:measure", name)
    if problem:
        print(f"note: the device could not be measured: {problem}")
    return found or Device()


def train_and_compare(
    record: Record,
    trained: Mapping[Stage, Sequence[Stage]],
    compared: Sequence[Stage],
    device: Device,
    rounds: int,
    *,
    rerun: bool,
    predicts: bool = True,
) -> None:
    """Predict the `compared` stages, train all seeds of stages, and interleave the `compared` ones
    with their bases. Work that the record has is not repeated without `rerun`.
    """
    # one seed of all stages before the next, so that they can be compared at any time
    stages = [*chain(*zip(*trained.values(), strict=True))]
    with sole_writer(record.folder):
        record.read_again()  # a climb that has just ended may have saved more
        to_train = [s for s in stages if rerun or is_to_be_run(record, s, device)]
        to_compare = [
            s for s in compared if rounds and is_to_be_compared(record, s, device, rerun=rerun)
        ]
        if to_train or to_compare:
            record.keep_changes(git_commit(), git_diff())
            at_once = runs_at_once(record.seeds, to_train, device)
            announce(to_train, to_compare, rounds, device, at_once)
        record.save()
        if predicts:
            predict_stages(record, compared, device)
        run_stages(record, to_train, device)
        if stages:  # some may have failed
            done = record.runs.keys()
            to_compare = [s for s in to_compare if s.base and {s.name, s.base.name} <= done]
        interleave_stages(record, to_compare, rounds, device)


def announce(
    trained: Sequence[Stage],
    compared: Sequence[Stage],
    rounds: int,
    device: Device,
    at_once: int = 1,
) -> None:
    """Print how long it takes to train stages, `at_once` of them side by side, and to interleave
    stages with their bases.
    """
    seconds = None
    if device.tflops:
        of_runs, of_sides = ([stage.config for stage in each] for each in (trained, compared))
        processes = math.ceil(rounds / ROUNDS_OF_A_PROCESS)
        # the two sides of a comparison start beside each other
        seconds = to_start(of_runs) / at_once + processes * to_start(of_sides)
        # runs with the same sizes of matmuls share a search
        searches = {
            (config.batch_size, config.seq_len, config.vocab_size, config.n_embd, config.flash)
            for config in of_runs
            if searches_for_kernels(config, device)
        }
        seconds += SEARCH * len(searches)
        places = at_once if device.gpus else 1  # runs at once on a CPU share the measured rate
        for config in of_runs:
            of_steps = config.max_steps * device.step_seconds(config) / places
            seconds += 60 * config.max_minutes / at_once if config.max_minutes else of_steps
        for step in map(device.step_seconds, 2 * of_sides):
            seconds += (processes * LEFT_OUT + rounds * steps_of_a_turn(step)) * step
    print(describe_duration(seconds, SHORTER), flush=True)


def to_start(configs: Sequence[Config]) -> float:
    """Return the seconds until the first steps of runs that start one after the other."""
    return sum(START + COMPILE * config.compile for config in configs)


def searches_for_kernels(config: Config, device: Device) -> bool:
    """True if torch.compile times kernels on a GPU before the first step."""
    mode = config.on_device("cuda", 1).compile_mode
    return bool(device.gpus and config.compile and "max-autotune" in mode)


def predict_stages(record: Record, stages: Sequence[Stage], device: Device) -> None:
    """Predict the stages of one rank, keep the predictions in the record, print each factor.

    A ladder that is resumed on the same device keeps the rates with which it began, before anything
    was timed.
    """
    alone = [stage for stage in stages if stage.ranks == 1]
    where, kept = f"{machine()}; {device.name}", record.predicted
    if kept.where != where:
        record.predicted = Predictions()
        if not device.tflops or None in (device.gigabytes_per_s, device.launch_us):
            print("note: nothing is predicted, as the device's rates could not be measured")
            return
        kept = Predictions(where=where, rates=device)
    configs = [stage.config for stage in alone]
    with seconds_shown("predicting the factors", "10 to 60 s"):
        call = "measure.ladder.roofline:predict_all"
        found, problem = in_fresh_process(call, configs, kept.rates)
    if problem:
        print(f"note: nothing is predicted: {problem}")
        return
    predicted, record.predicted = kept.stages, kept
    for stage, prediction in zip(alone, found, strict=True):
        prediction.settings = settings(stage.config)
        predicted[stage.name] = prediction
        if stage.base in alone:
            factor = prediction.over(predicted[stage.base.name])
            print(f"predicted: {stage.name} {factor:.2f} times as fast as {stage.base.name}")
    record.save()


# ---- runs


def run_commands(
    commands: Sequence[list[str]], shares: Sequence[dict[str, str]], waiting: Waiting
) -> list[str | None]:
    """Run commands at once, which print to our stdout; return the error line of each, or None.

    `shares`: their environments. `waiting` is entered once all have started.
    """
    started = [
        start_process(command, share | {BRIEF: "1"})
        for command, share in zip(commands, shares, strict=True)
    ]
    with waiting:
        return [
            why_it_failed(process.returncode, errors) if process.wait() else None
            for process, errors in started
        ]


def shares_of_machine(processes: int) -> list[dict[str, str]]:
    """Return the environments of processes at once: one of the user's GPUs each,
    and a share of the cores. One process alone has all.
    """
    if processes == 1:
        return [{}]
    threads, all_gpus = max(1, cores() // processes), ",".join(map(str, range(processes)))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
    return [
        {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]}
        for i in range(processes)
    ]


def is_from_here(found: Summary | Comparison, device: Device) -> bool:
    """True if this machine and device made a result; the device counts only if it is known."""
    return found.machine == machine() and device.name in (None, found.device)


def is_to_be_run(record: Record, stage: Stage, device: Device) -> bool:
    """True unless this machine and device have finished a stage; if losses are compared, any."""
    run = look_up(record, stage).run
    return run is None or not (record.seeds or is_from_here(run.summary, device))


def run_stages(
    record: Record,
    stages: Sequence[Stage],
    device: Device,
    execute: Callable[
        [Sequence[list[str]], Sequence[dict[str, str]], Waiting], list[str | None]
    ] = run_commands,
) -> None:
    """Run stages, and keep the finished runs, and the failures, in the record.

    `execute` runs commands at once. All runs have equal shares of the machine, also one that is
    left alone, so that the times in their logs are of the same share.
    """
    at_once = runs_at_once(record.seeds, stages, device)
    shares = shares_of_machine(at_once)
    for i in range(0, len(stages), at_once):
        together = stages[i : i + at_once]
        names = ", ".join(stage.name for stage in together)
        print(f"== {i + len(together)} of {len(stages)}: {names}", flush=True)
        waiting = until_first_step(record.folder, together, device)
        commands = [stage.command(record.folder) for stage in together]
        errors = execute(commands, shares[: len(together)], waiting)
        for stage, error in zip(together, errors, strict=True):
            keep_run(record, stage, error)


def runs_at_once(seeds: int, stages: Sequence[Stage], device: Device) -> int:
    """Return how many runs train at once.

    With seeds only losses are compared, so several runs of one rank do: at most one per seed, and
    one per GPU, or per core of a CPU. Two runs of configs/recipes/softcap.yaml with a core of an
    EPYC each trained 1.4 times as many tokens/s as one run with both (measured once).
    """
    if any(stage.ranks > 1 for stage in stages):
        return 1
    places = device.gpus or (cores() if device.name == "cpu" else 1)  # Apple's GPU is one place
    return min(seeds, places) or 1


def keep_run(record: Record, stage: Stage, error: str | None) -> None:
    """Keep the run of a stage, or its failure, in the record."""
    found = None if error else Run.read(record.folder / stage.name, settings(stage.config))
    if found and not found.summary.interrupted:
        record.runs[stage.name] = found
    else:
        record.runs.pop(stage.name, None)
        again = "stopped before its last step; the same command runs it again"
        record.fail(stage.name, error or again)
    record.save()


def until_first_step(folder: Path, stages: Sequence[Stage], device: Device) -> Waiting:
    """Show the seconds so far of a run that has not logged a step yet, see `seconds_shown`.

    Nothing is shown of several runs at once, or of one that shows how far its evaluation is.
    """
    stage, begun = stages[0], time.time()
    if len(stages) > 1 or stage.config.eval_every:
        return contextlib.nullcontext()
    log = folder / stage.name / "log.csv"
    usual = f"{START + COMPILE * stage.config.compile:.0f} s"
    if stage.config.compile:
        longest = SEARCH if searches_for_kernels(stage.config, device) else COLD_COMPILE
        usual += f" to {longest / 60:.0f} minutes"

    def has_logged() -> bool:
        # an earlier run's log may be there until this one has moved it aside
        return log.is_file() and log.stat().st_mtime > begun and log.read_text().count("\n") > 1

    return seconds_shown(f"{stage.name} starts", usual, has_logged)


# ---- interleaved runs


def is_to_be_compared(record: Record, stage: Stage, device: Device, *, rerun: bool) -> bool:
    """True if a stage and its base run on one rank each and differ, unless this machine and device
    have interleaved them before.
    """
    if stage.base is None or not stage.is_interleaved:
        return False
    known = None if rerun else look_up(record, stage).comparison
    is_known = known and is_from_here(known, device)
    return not is_known and settings(stage.base.config) != settings(stage.config)


def interleave_stages(record: Record, stages: Sequence[Stage], rounds: int, device: Device) -> None:
    """Interleave stages with their bases, and keep the comparisons, and failures, in the record."""
    for i, stage in enumerate(stages, start=1):
        print(f"== interleaved {i} of {len(stages)}: {stage.key}", flush=True)
        pair = [stage.base or stage, stage]
        try:
            found = run_rounds(sides_of(record, pair, device), rounds)
        except SideError as error:
            record.comparisons.pop(stage.key, None)
            record.fail(stage.key, str(error))
        else:
            found.settings = [settings(side.config) for side in pair]
            record.comparisons[stage.key] = found
        record.save()


def sides_of(record: Record, pair: Sequence[Stage], device: Device) -> list[Side]:
    """Return the sides of two stages.

    If memory may not have room for both, each returns freed memory after its turn: otherwise one
    process would keep memory from the other one, and the comparison would be unfair. The stages of
    an ablation have no runs, so their peaks are not known.
    """
    runs = [record.runs[stage.name] for stage in pair if stage.name in record.runs]
    needed = HEADROOM * sum(run.summary.peak_memory_mb for run in runs)
    fit = device.memory_mb is None or (len(runs) == len(pair) and needed <= device.memory_mb)
    environment = {} if fit else {"FREES_CACHE": "1"}
    return [training_side(stage.name, stage.arguments, environment) for stage in pair]
