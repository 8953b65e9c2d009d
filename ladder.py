"""Climb a ladder: run its stages one after the other, and report the factor of each here.

python ladder.py speedup --quick       with a small model, in ten minutes
python ladder.py speedup               a series: speedup, or a folder of configs/ such as a100
python ladder.py modern                the losses of newer recipes, over 3 seeds
python ladder.py baseline.yaml my.yaml                any configs
python ladder.py a.yaml b.yaml --seeds 3              their losses and their speeds
python ladder.py speedup --stages 2,3,5               some stages, over the first
python ladder.py speedup -- --max_steps 10            options after -- go to every run
python ladder.py --ablate speedup10.yaml              the factor of each optimization of a config
python ladder.py --ablate my.yaml --seeds 3           how much each lowers the loss
python ladder.py --across logs/results/*/speedup      ladders of several machines beside each other
python ladder.py --plot logs/a logs/b                 loss curves of any runs in one picture
"""

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from config import MFU, Config, step_seconds, total_seconds
from measure.interleaved.options import without_end
from measure.interleaved.ratio import FEWEST
from measure.interleaved.rounds import LEFT_OUT, split_command_line, steps_of_a_turn
from measure.ladder.device import Device, measure_device
from measure.ladder.learning import (
    report_learned_ablation,
    report_learning,
    runs_of_ablation,
    with_seeds,
)
from measure.ladder.prediction import predict_stages
from measure.ladder.quick import ROUNDS, SUFFIX, quick_stages
from measure.ladder.record import Record
from measure.ladder.report import across, plot_runs, report, report_ablation
from measure.ladder.rungs import ablated, interleave_stages, is_to_be_compared, run_alone
from measure.ladder.stages import (
    CHANGE_LOSS,
    Stage,
    ladder_of,
    make_stage,
    make_stage_here,
    plan,
    planned_before,
    run_stages,
    series_folder,
    series_names,
    to_be_run,
    with_bases,
)
from runtime.cli import Name, Options, Positive, ZeroIsOff
from runtime.errors import UserError, reported
from runtime.files import sole_writer
from runtime.report import describe_duration
from runtime.start import start

QUICK = f"speedup{SUFFIX}"
SHORTER = "--rounds 6 or 0, and -- --max_steps 10; finished runs are kept"


class LadderOptions(Options):
    """options"""

    configs: tuple[Name, ...] = ()
    """a series: speedup, or a folder of YAMLs by its path or by its name in configs/; or config
    files; with --plot, folders of runs; with --across, folders of ladders
    """
    quick: bool = False
    """climb the stages of speedup that change the speed, with a small model"""
    stages: tuple[str, ...] = ()
    """climb only these stages, and the first: 2,3,5 are speedup2, speedup3 and speedup5 (default:
    all)
    """
    log_dir: Name = "logs"
    """folder for the ladder's folder"""
    seeds: Positive | None = None
    """seeds to train each config with, to compare losses (default: 3 if the configs evaluate, as in
    modern; else only speeds are compared)
    """
    nproc_per_node: Positive | None = None
    """ranks of each config, by torchrun; with speedup, of its last stage, ddp (default: 1; in ddp
    one per GPU)
    """
    rounds: ZeroIsOff = 20
    """maximum number of interleaved rounds of each stage with its base; 0 disables them"""
    rerun: bool = False
    """run finished stages again"""
    report_only: bool = False
    """rebuild the report from the finished runs, on any machine; options after -- are not needed"""
    ablate: bool = False
    """compare each optimization of the given config: switched on first, and switched on last"""
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
    without_effect = {
        "stages": ("ablate", "across", "plot"),
        "nproc_per_node": ("quick", "ablate", "across", "plot"),
        "seeds": ("across", "plot"),
    }
    for name, others in without_effect.items():
        for other in others:
            if name in options.model_fields_set and getattr(options, other):
                raise UserError(f"--{name} has no effect with --{other}; leave it out")
    needs_rounds = options.ablate and not options.seeds
    if 0 < options.rounds < FEWEST or (needs_rounds and not options.rounds):
        raise UserError(f"--rounds {options.rounds}: at least {FEWEST} make an interval")
    if options.quick and (options.configs != ("speedup",) or options.seeds or options.ablate):
        raise UserError("--quick: is for the speedup ladder: python ladder.py speedup --quick")
    if options.ablate and (len(options.configs) > 1 or series_folder(options.configs[0])):
        raise UserError("--ablate takes one config, such as speedup10.yaml")


def chosen(stages: list[Stage], names: Sequence[str]) -> list[Stage]:
    """Return the first stage and the named ones, by name or number, or all. UserError."""
    numbers = {re.sub(r"^(speedup|opt)(?=\d)", "", stage.name): stage for stage in stages}
    known = numbers | {stage.name: stage for stage in stages}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--stages {unknown[0]}: no such stage; there are {', '.join(numbers)}")
    wanted = [stages[0], *(known[name] for name in names)] if names else stages
    return [stage for stage in stages if stage in wanted]


def planned(options: LadderOptions, of_runs: list[str], device: Device) -> tuple[str, list[Stage]]:
    """Return the ladder's name and its stages on a device, as in `plan`. Raises UserError."""
    if options.quick:
        return QUICK, quick_stages(Path(options.log_dir, QUICK), of_runs, device)
    ladder, stages = plan(options.configs, options.log_dir, of_runs, device)
    ranks = options.nproc_per_node or device.gpus
    if ladder != "speedup":
        for stage in stages:
            stage.ranks = options.nproc_per_node or 1
    elif ranks > 1:
        ddp = make_stage_here("ddp", "ddp", stages[0].record, of_runs, device)
        ddp.ranks = ranks
        corpus = Path(ddp.config.data_dir, ddp.config.dataset)
        if options.nproc_per_node or any(corpus.glob("*.bin")):
            stages.append(ddp)
        else:
            print("note: no stage ddp without its corpus: python data/fineweb.py writes it")
    return ladder, stages


def climb(options: LadderOptions, of_runs: list[str]) -> list[str]:
    """Run the stages, interleave each with its base, and report; returns the failures."""
    device = None
    if options.report_only:  # the record has the stages that were climbed
        ladder = QUICK if options.quick else ladder_of(options.configs)[0]
        record = Record.load(Path(options.log_dir, ladder))
        stages, seeds = planned_before(record, of_runs), options.seeds or record.seeds
    else:
        _, stages = planned(options, of_runs, Device())
        device = measure_device(stages[0].config.device)
        ladder, stages = planned(options, of_runs, device)
        record, seeds = stages[0].record, options.seeds or (3 if stages[0].config.eval_every else 0)
        record.stages, record.seeds = {stage.name: stage.planned for stage in stages}, seeds
    rungs = {stage.name: with_seeds(stage, seeds) for stage in chosen(stages, options.stages)}
    stages = with_bases([runs[0] for runs in rungs.values()])
    if device:
        rounds = options.rounds
        if options.quick and "rounds" not in options.model_fields_set:
            rounds = ROUNDS
        with sole_writer(record.folder):
            record.save()
            runs = by_seed(rungs)
            runs_now = to_be_run(runs, options.rerun, seeds, device)
            compared = [
                stage
                for stage in stages[1:]
                if rounds and is_to_be_compared(stage, options.rerun, device)
            ]
            announce(runs_now, compared, rounds, options, device)
            predict_stages(stages, device)
            run_stages(runs, options.rerun, seeds, device)
            if rounds:
                alone = [stage for stage in stages if run_alone(stage)]
                interleave_stages(alone, rounds, options.rerun, device)
    return report_learning(ladder, rungs) if seeds else report(ladder, stages)


def announce(
    runs: Sequence[Stage],
    compared: Sequence[Stage],
    rounds: int,
    options: LadderOptions,
    device: Device,
) -> None:
    """Print how long it takes to run stages, and to interleave stages with their bases."""
    work = [(run.config, run.config.max_steps) for run in runs]
    for stage in compared if device.tflops else ():
        turn = steps_of_a_turn(step_seconds(stage.config, device.tflops))
        work.append((without_end(stage.config), 2 * (LEFT_OUT + rounds * turn)))
    processes = [stage.config for stage in (*runs, *compared, *compared)]
    has_quick = options.configs == ("speedup",) and not options.quick
    shorter = f"--quick, {SHORTER}" if has_quick else SHORTER
    print(
        describe_duration(total_seconds(work, device.tflops, processes), MFU, shorter), flush=True
    )


def by_seed(rungs: Mapping[str, Sequence[Stage]]) -> list[Stage]:
    """List one seed of all rungs before the next, so finished runs can be compared at any time."""
    return [*chain(*zip(*rungs.values(), strict=True))]


def ablate(options: LadderOptions, of_runs: list[str]) -> list[str]:
    """Compare and report the optimizations of a config; returns the failures."""
    (config,) = options.configs
    title, device = Path(config).stem, None
    record = Record.load(Path(options.log_dir) / f"ablate_{title}")
    seeds = options.seeds or (record.seeds if options.report_only else 0)
    if not options.report_only:
        record.seeds = seeds
        device = measure_device(make_stage("all", config, record, of_runs).config.device)
        with_all = make_stage_here("all", config, record, of_runs, device)
        record.stages["all"], of_runs = with_all.planned, with_all.options
    elif "all" in record.stages:
        of_runs = [*record.stages["all"].options, *of_runs]
    rungs = ablated(config, of_runs, record, CHANGE_LOSS if seeds else Config.model_fields)
    if not rungs:
        what = "that changes the loss" if seeds else "on"
        raise UserError(f"{config}: has no optimization {what}, so there is nothing to ablate")
    runs_of = runs_of_ablation(rungs, seeds) if seeds else {}
    if device:
        with sole_writer(record.folder):
            if seeds:
                runs = by_seed(runs_of)
                announce(to_be_run(runs, options.rerun, seeds, device), [], 0, options, device)
                run_stages(runs, options.rerun, seeds, device)
            else:
                interleave_stages([*chain(*rungs.values())], options.rounds, options.rerun, device)
    if seeds:
        return report_learned_ablation(title, [*rungs], runs_of)
    return report_ablation(title, rungs)


def main(options: LadderOptions, of_runs: list[str]) -> None:
    """Climb, ablate or report. Raises UserError."""
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
