"""Climb a ladder: run its stages one after the other, and report what each is worth here.

python ladder.py speedup --quick       with a small model, in ten minutes
python ladder.py speedup               a series: speedup, or a folder of configs/ such as a100
python ladder.py modern                what newer recipes learn, over 3 seeds
python ladder.py baseline.yaml my.yaml                any configs
python ladder.py a.yaml b.yaml --seeds 3              what they learn, and how fast
python ladder.py speedup --stages 2,3,5               some stages, over the first
python ladder.py speedup -- --max_steps 10            options after -- go to every run
python ladder.py --ablate speedup10.yaml              what each optimization of a config is worth
python ladder.py --ablate my.yaml --seeds 3           in loss, where it changes what is learned
python ladder.py --across logs/results/*/speedup      ladders of several machines beside each other
python ladder.py --plot logs/a logs/b                 loss curves of any runs in one picture
"""

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from config import MFU, Config, step_seconds, total_seconds
from measure.interleaved.options import without_end
from measure.interleaved.ratio import FEWEST
from measure.interleaved.rounds import LEFT_OUT, split_command_line, steps_of_a_turn
from measure.ladder.learning import (
    ablation_rungs,
    report_learned_ablation,
    report_learning,
    with_seeds,
)
from measure.ladder.prediction import predict_stages
from measure.ladder.quick import ROUNDS, SUFFIX, quick_stages
from measure.ladder.report import across, plot_runs, report, report_ablation
from measure.ladder.rungs import Pair, ablation, compare_pairs, compared_with_all, pairs_of
from measure.ladder.stages import (
    Stage,
    instead_of_bf16,
    make_stage,
    make_stage_here,
    note_slow_bf16,
    options_in_common,
    plan,
    probe,
    run_stages,
    series_folder,
    series_names,
    with_bases,
)
from runtime.cli import Name, Options, Positive, ZeroIsOff
from runtime.errors import UserError, reported
from runtime.files import sole_writer
from runtime.report import describe_duration
from runtime.start import cores, start

CORES_OF_A_RUN = 8  # more than so many give a small model's run little
SHORTER = "--rounds 6 or 0, and -- --max_steps 10; what is finished is kept"


class LadderOptions(Options):
    """options"""

    configs: tuple[str, ...] = ()
    """a series: speedup, or a folder of YAMLs by its path or by its name in configs/; or config
    files; with --plot, folders of runs; with --across, folders of ladders
    """
    quick: bool = False
    """climb the stages of speedup that change the speed, with a small model"""
    stages: tuple[str, ...] = ()
    """climb only these stages, and the first: 2,3,5 are speedup2, speedup3 and speedup5 (none: all)
    """
    log_dir: Name = "logs"
    """folder for the ladder's folder"""
    seeds: Positive | None = None
    """seeds that each config is trained with, to compare what it learns (none: 3 with modern; else
    only speeds are compared)
    """
    nproc_per_node: Positive | None = None
    """ranks of each listed config, by torchrun; with speedup, of its last stage, ddp (none: 1; in
    ddp one for each GPU)
    """
    rounds: ZeroIsOff = 20
    """rounds at most in which the runs of each stage and its base are interleaved (0: off)"""
    rerun: bool = False
    """run finished stages again"""
    report_only: bool = False
    """rebuild the report from the finished runs, on any machine; options after -- are not needed"""
    ablate: bool = False
    """what each optimization of the given config is worth: switched on first, and switched on last
    """
    across: bool = False
    """set the results of several machines beside each other"""
    plot: bool = False
    """compare the loss curves of the given runs in one picture"""


def check(options: LadderOptions) -> None:
    """Raise UserError for options that contradict each other."""
    if not options.configs:
        names = ", ".join(series_names())
        raise UserError(f"name a series ({names}), a folder of configs, or config files")
    if options.ablate + options.across + options.plot > 1:
        raise UserError("--ablate, --across and --plot exclude each other; choose one")
    needs_rounds = options.ablate and not options.seeds
    if 0 < options.rounds < FEWEST or (needs_rounds and not options.rounds):
        raise UserError(f"--rounds {options.rounds}: at least {FEWEST} make an interval")
    if options.quick and (options.configs != ("speedup",) or options.seeds or options.ablate):
        raise UserError("--quick: is for the speedup ladder: python ladder.py speedup --quick")
    if options.ablate and (len(options.configs) > 1 or series_folder(options.configs[0])):
        raise UserError("--ablate takes one config, such as speedup10.yaml")


def chosen(stages: list[Stage], names: Sequence[str]) -> list[Stage]:
    """Return the first stage and those named, by name or number; all if none are. UserError."""
    numbers = {re.sub(r"^(speedup|opt)(?=\d)", "", stage.name): stage for stage in stages}
    known = numbers | {stage.name: stage for stage in stages}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--stages {unknown[0]}: no such stage; there are {', '.join(numbers)}")
    wanted = [stages[0], *(known[name] for name in names)] if names else stages
    return [stage for stage in stages if stage in wanted]


def ask(device: str) -> dict[str, Any]:
    """Measure the device. If that fails, it counts as one with bf16 and without `medium`."""
    return {"bf16": True, "medium": False} | probe(device)


def planned(
    options: LadderOptions, of_runs: list[str], device: Mapping[str, Any]
) -> tuple[str, list[Stage]]:
    """Return the ladder's name and its stages on a device, as in `plan`. Raises UserError."""
    if options.quick:
        ladder = f"speedup{SUFFIX}"
        return ladder, quick_stages(f"{options.log_dir}/{ladder}", of_runs, device)
    ladder, stages = plan(options.configs, options.log_dir, of_runs, device)
    ranks, folder = options.nproc_per_node, f"{options.log_dir}/{ladder}"
    if ladder == "ladder":
        for stage in stages:
            stage.ranks = ranks or 1
    elif ladder == "speedup":
        ran = options.report_only and Path(folder, "ddp").is_dir()
        gpus = ranks or device.get("gpus", 1)
        if gpus > 1 or ran:
            ddp = make_stage_here("ddp", "ddp", folder, of_runs, device)
            ddp.ranks = gpus
            if ran or ranks or any(Path(ddp.config.data_dir, ddp.config.dataset).glob("*.bin")):
                stages.append(ddp)
            else:
                print("note: no stage ddp without its corpus: python data/fineweb.py writes it")
    return ladder, stages


def stages_here(
    options: LadderOptions, of_runs: list[str]
) -> tuple[str, list[Stage], dict[str, Any]]:
    """Return the ladder's name, its stages as this machine can climb them, and the findings of
    `probe`. Raises UserError.

    For a report alone nothing is measured: the runs in the folder decide.
    """
    ladder, stages = planned(options, of_runs, {})
    device = {} if options.report_only else ask(stages[0].config.device)
    if options.report_only and not of_runs:
        runs = [(ran, stage.config) for stage in stages if (ran := stage.ran_with())]
        of_runs = options_in_common(runs)
    _, stages = planned(options, of_runs, device)
    return ladder, with_bases(chosen(stages, options.stages)), device


def seeds_of(options: LadderOptions, first: Stage) -> int:
    """Return the number of seeds to train each config with; 0 compares only speeds. A report alone
    counts the runs of the first stage.
    """
    if options.seeds or not options.report_only:
        return options.seeds or (3 if first.config.eval_every else 0)
    runs = first.folder.parent.glob(f"{first.name}_seed_*")
    trained = [run for run in runs if run.name.rpartition("_")[2].isdigit()]
    return 0 if first.folder.is_dir() else len(trained)


def climb(options: LadderOptions, of_runs: list[str]) -> list[str]:
    """Run the stages, interleave each with its base, and report; returns what failed."""
    ladder, stages, device = stages_here(options, of_runs)
    seeds = seeds_of(options, stages[0])
    rungs = {stage.name: with_seeds(stage, seeds) for stage in stages if seeds}
    if seeds:
        stages = with_bases([runs[0] for runs in rungs.values()])
    folder = Path(options.log_dir) / ladder
    pairs: list[Pair] = []
    if not options.report_only:
        if "tflops" in device:
            note_slow_bf16(stages, device["tflops"])
        rounds = options.rounds
        if options.quick and "rounds" not in options.model_fields_set:
            rounds = ROUNDS
        runs = by_seed(rungs) if seeds else stages
        with sole_writer(folder):
            announce(runs, stages[1:] if rounds else [], rounds, options, device)
            predict_stages(stages, folder, device)
            run_stages(runs, options.rerun, anywhere=seeds > 0, **side_by_side(seeds, device))
            pairs = list(pairs_of(stages).values())
            if rounds:
                compare_pairs(pairs, rounds, options.rerun, device)
    if seeds:
        return report_learning(ladder, rungs, folder, pairs)
    return report(ladder, stages, folder, pairs)


def announce(
    runs: Sequence[Stage],
    compared: Sequence[Stage],
    rounds: int,
    options: LadderOptions,
    device: Mapping[str, Any],
) -> None:
    """Say how long it takes to finish the runs, and to compare stages with their bases in so many
    rounds.
    """
    runs = [run for run in runs if options.rerun or not run.summary()]
    work = [(run.config, run.config.max_steps) for run in runs]
    if rates := device.get("tflops"):
        for stage in compared:
            turn = steps_of_a_turn(step_seconds(stage.config, rates))
            work.append((without_end(stage.config), 2 * (LEFT_OUT + rounds * turn)))
    processes = [stage.config for stage in (*runs, *compared, *compared)]
    has_quick = options.configs == ("speedup",) and not options.quick
    shorter = f"--quick, {SHORTER}" if has_quick else SHORTER
    print(describe_duration(total_seconds(work, rates, processes), MFU, shorter), flush=True)


def by_seed(rungs: Mapping[str, Sequence[Stage]]) -> list[Stage]:
    """List one seed of all rungs before the next: what there is can be compared at any time."""
    return [*chain(*zip(*rungs.values(), strict=True))]


def side_by_side(seeds: int, device: Mapping[str, Any]) -> dict[str, int]:
    """Return how many runs of so many seeds to run at once, and on how many GPUs."""
    gpus = device.get("gpus", 0)
    return {"at_once": min(seeds, gpus or cores() // CORES_OF_A_RUN) or 1, "gpus": gpus}


def ablate(options: LadderOptions, of_runs: list[str]) -> list[str]:
    """Compare and report the optimizations of a config; returns what failed."""
    (config,) = options.configs
    stem = Path(config).stem
    folder = Path(options.log_dir) / f"ablate_{stem}"
    with_all = make_stage("all", config, str(folder), of_runs)
    device, ran_with = dict[str, Any](), list[Config]()
    if options.report_only:
        ran = with_all.ran_with() if options.seeds else None
        ran_with = [ran] if ran else compared_with_all(folder)
        of_runs = of_runs or options_in_common([(ran, with_all.config) for ran in ran_with])
    else:
        device = ask(with_all.config.device)
    of_runs = [*of_runs, *instead_of_bf16(with_all.config, device, *ran_with[:1])]
    if options.seeds:
        names, rungs = ablation_rungs(config, of_runs, str(folder), options.seeds)
        if not names:
            raise UserError(f"{config}: has no optimization on that changes what is learned")
        if not options.report_only:
            runs = by_seed(rungs)
            with sole_writer(folder):
                announce(runs, [], 0, options, device)
                at_once = side_by_side(options.seeds, device)
                run_stages(runs, options.rerun, anywhere=True, **at_once)
        return report_learned_ablation(stem, names, rungs, folder)
    pairs = ablation(config, of_runs, folder)
    if not pairs:
        raise UserError(f"{config}: has no optimization on, so there is nothing to switch off")
    folder.mkdir(parents=True, exist_ok=True)
    if not options.report_only:
        both = list(chain(*pairs.values()))
        compare_pairs(both, options.rounds, options.rerun, device)
    return report_ablation(stem, pairs, folder)


def main(options: LadderOptions, of_runs: list[str]) -> None:
    """Do what the command line asks for. Raises UserError."""
    check(options)
    if options.across:
        across(options.configs, Path(options.log_dir) / "across")
    elif options.plot:
        plot_runs(options.configs, Path("comparison.png"))
    elif (ablate if options.ablate else climb)(options, of_runs):
        raise SystemExit(1)


if __name__ == "__main__":
    OWN, OF_RUNS = split_command_line(sys.argv[1:])
    after = "is an option of the runs, and goes after --: python ladder.py speedup -- --max_steps 5"
    OPTIONS = start(
        LadderOptions,
        OWN,
        description=__doc__,
        positional="configs",
        elsewhere=dict.fromkeys({"config", *Config.model_fields} - {"log_dir"}, after),
    )
    with reported(
        "the report", interrupted="interrupted; finished stages are kept, the same command resumes"
    ):
        main(OPTIONS, OF_RUNS)
