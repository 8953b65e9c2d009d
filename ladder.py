"""Climb a ladder: run its stages one after the other, and report the factor of each here.

python ladder.py speedup --quick       with a small model, in ten minutes
python ladder.py speedup               a series: speedup, or a folder of configs/ such as a100
python ladder.py modern                the losses of newer recipes, over 3 seeds
python ladder.py baseline.yaml my.yaml                any configs
python ladder.py a.yaml b.yaml --seeds 3              their losses and their speeds
python ladder.py speedup --stages 2,3,5               some stages, over the first
python ladder.py speedup -- --max_steps 10            options after -- go to every run
python ladder.py --ablate speedup10.yaml              the factor of each optimization of a config
python ladder.py --ablate my.yaml --seeds 3           the loss, tokens and time that each saves
python ladder.py --across logs/results/*/speedup      ladders of several machines beside each other
python ladder.py --plot logs/a logs/b                 loss curves of any runs in one picture
"""

import re
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from config import Config
from measure.interleaved.ratio import FEWEST
from measure.interleaved.rounds import ROUNDS, split_command_line
from measure.ladder.climb import (
    announce,
    interleave_stages,
    is_to_be_compared,
    is_to_be_run,
    measure_device,
    predict_stages,
    run_stages,
)
from measure.ladder.learning import report_learned_ablation, report_learning
from measure.ladder.quick import ROUNDS as QUICK_ROUNDS
from measure.ladder.quick import SUFFIX, quick_stages
from measure.ladder.record import Device, Record
from measure.ladder.report import across, plot_runs, report, report_ablation
from measure.ladder.stages import (
    Stage,
    ablated,
    ladder_of,
    make_stage,
    plan,
    planned_before,
    with_bases,
)
from runtime.cli import Name, Options, Positive, ZeroIsOff
from runtime.errors import UserError, reported
from runtime.files import sole_writer
from runtime.start import start


class LadderOptions(Options):
    """options"""

    configs: tuple[Name, ...] = ()
    """a series: speedup, or a folder of YAMLs by its path or by its name in configs/; or config
    files; with --plot, folders of runs; with --across, folders of ladders
    """
    quick: bool = False
    """climb the stages of speedup that change the speed, with a small model"""
    stages: tuple[str, ...] = ()
    """climb only these stages, and the first: 2,3,5 are speedup2, speedup3 and speedup5; with
    --ablate, only these optimizations (default: all)
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
    rounds: ZeroIsOff = ROUNDS
    """maximum number of interleaved rounds of each stage with its base; 0 disables them"""
    rerun: bool = False
    """run finished stages again"""
    report_only: bool = False
    """rebuild the last climb's report from the finished runs, on any machine"""
    ablate: bool = False
    """compare each optimization of the given config: switched on first, and switched on last; with
    --seeds only last, and aa is the config itself with other seeds
    """
    across: bool = False
    """set the results of several machines beside each other"""
    plot: bool = False
    """compare the loss curves of the given runs in one picture"""


def check(options: LadderOptions) -> None:
    """Raise UserError for options that contradict each other."""
    if not options.configs:
        raise UserError("name a series such as speedup, a folder of configs, or config files")
    of_climbs = ("ablate", "stages", "nproc_per_node", "seeds", "rounds", "rerun", "report_only")
    without_effect = {
        "across": ("plot", *of_climbs),
        "plot": ("log_dir", *of_climbs),
        "ablate": ("quick", "nproc_per_node"),
        "quick": ("nproc_per_node", "seeds"),
    }
    for mode, names in without_effect.items():
        for name in names:
            if getattr(options, mode) and name in options.model_fields_set:
                raise UserError(f"--{name} has no effect with --{mode}; leave it out")
    if 0 < options.rounds < FEWEST:
        raise UserError(f"--rounds {options.rounds}: at least {FEWEST} make an interval")
    if options.quick and options.configs != ("speedup",):
        raise UserError("--quick: is for the speedup ladder: python ladder.py speedup --quick")
    if options.ablate and len(options.configs) > 1:
        raise UserError("--ablate takes one config, such as speedup10.yaml")


def name_of(options: LadderOptions) -> str:
    """Return the ladder's name, which is its folder's."""
    if options.ablate:
        return f"ablate_{Path(options.configs[0]).stem}"
    return ladder_of(options.configs)[0] + SUFFIX * options.quick


def chosen(known: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the known names that are among `names`, or whose numbers are; all if `names` is empty.

    Raises UserError.
    """

    def short(name: str) -> str:
        return re.sub(r"^(speedup|opt)(?=\d)", "", name)

    there_are, wanted = [*map(short, known)], {*map(short, names)}
    if unknown := wanted - {*there_are}:
        raise UserError(f"--stages {min(unknown)}: no such stage; there are {', '.join(there_are)}")
    return [name for name in known if not names or short(name) in wanted]


def planned(
    options: LadderOptions, record: Record, of_runs: list[str], device: Device
) -> list[Stage]:
    """Return the stages on a device; of an ablation, the one of its config. Raises UserError."""
    if options.ablate:
        return [make_stage("all", options.configs[0], record, of_runs, device)]
    if options.quick:
        return quick_stages(record, of_runs, device)
    stages = plan(options.configs, record, of_runs, device)
    ranks = options.nproc_per_node or device.gpus
    if name_of(options) != "speedup":
        for stage in stages:
            stage.ranks = options.nproc_per_node or 1
    elif ranks > 1:
        ddp = make_stage("ddp", "ddp", record, of_runs, device)
        ddp.ranks = ranks
        corpus = Path(ddp.config.data_dir, ddp.config.dataset)
        if options.nproc_per_node or any(corpus.glob("*.bin")):
            stages.append(ddp)
    return stages


def climb(options: LadderOptions, of_runs: list[str]) -> None:
    """Run the stages, interleave each with its base, and report. Raises SystemExit if one fails."""
    name, device = name_of(options), Device()
    record = Record.load(Path(options.log_dir, name))
    if options.report_only:  # the record has the stages that were climbed
        if of_runs:
            raise UserError("--report_only: leave the options after -- out; the record has them")
        stages, record.seeds = planned_before(record), options.seeds or record.seeds
        named = {Path(config).stem for config in ladder_of(options.configs)[1]}
        if name == "ladder" and named.isdisjoint(record.stages):
            raise UserError(
                f"{record.folder}: has the ladder of {', '.join(record.stages)}; name these "
                "configs, or leave --report_only out"
            )
    else:
        device = measure_device(planned(options, Record(), of_runs, device)[0].config.device)
        stages = planned(options, record, of_runs, device)
        compares_losses = stages[0].config.eval_every and not options.ablate
        record.seeds = options.seeds or (3 if compares_losses else 0)
        record.stages = {stage.name: stage.planned for stage in stages}
    rungs = dict[str, list[Stage]]()
    if options.ablate:
        rungs = ablated(stages[0])
        if not rungs:
            raise UserError(f"{options.configs[0]}: has no optimization on, so nothing to ablate")
        rungs = {name: rungs[name] for name in chosen([*rungs], options.stages)}
        compared = [*chain(*rungs.values())]
        # all, and all but each; speeds are compared without runs
        stages = [stages[0], *(rung.base for rung in compared if rung.base)] if record.seeds else []
    else:
        names = chosen([stage.name for stage in stages], options.stages)
        stages = with_bases([s for s in stages if s.name in (stages[0].name, *names)])
        record.stages = {stage.name: stage.planned for stage in stages}
        compared = stages
    if record.seeds:
        for stage in stages:
            if not stage.config.eval_every:
                raise UserError(f"{stage.name}: sets no eval_every, so it has no validation loss")
            if stage.config.max_minutes:
                raise UserError(
                    f"{stage.name}: max_minutes {stage.config.max_minutes:g}: losses are compared "
                    "step by step; set max_steps instead"
                )
            if stage.length != stages[0].length:
                raise UserError(
                    f"{stage.name} trains for {stage.length}, {stages[0].name} for "
                    f"{stages[0].length}: losses are compared step by step"
                )
    compared = [stage.runs[0] for stage in compared]
    if not options.report_only:
        run(options, stages, compared, device)
    if options.ablate and record.seeds:
        report_learned_ablation(name, rungs, stages)
    elif options.ablate:
        report_ablation(name, rungs)
    else:
        (report_learning if record.seeds else report)(name, stages)
    if record.failures:
        raise SystemExit(1)


def run(
    options: LadderOptions, stages: Sequence[Stage], compared: Sequence[Stage], device: Device
) -> None:
    """Run stages, and interleave the `compared` ones with their bases."""
    record, rounds = compared[0].record, options.rounds
    if options.quick and "rounds" not in options.model_fields_set:
        rounds = QUICK_ROUNDS
    # one seed of all stages before the next, so that they can be compared at any time
    runs = [*chain(*zip(*(stage.runs for stage in stages), strict=True))]
    with sole_writer(record.folder):
        now = Record.load(record.folder)  # a climb that has just ended may have saved more
        record.runs, record.comparisons, record.predicted = now.runs, now.comparisons, now.predicted
        record.changes = now.changes
        to_run = [run for run in runs if options.rerun or is_to_be_run(run, device)]
        to_compare = [s for s in compared if rounds and is_to_be_compared(s, options.rerun, device)]
        if to_run or to_compare:
            record.keep_changes()
        record.save()
        if to_run or to_compare:
            announce(to_run, to_compare, rounds, device)
        if not options.ablate:
            predict_stages(compared, device)
        run_stages(record, to_run, device)
        ran = [s for s in to_compare if s.finished and s.base and s.base.finished]
        interleave_stages(ran if stages else to_compare, rounds, device)


def main(options: LadderOptions, of_runs: list[str]) -> None:
    """Climb, ablate or report. Raises UserError."""
    check(options)
    if options.across:
        across(options.configs, Path(options.log_dir, "across"))
    elif options.plot:
        plot_runs(options.configs)
    else:
        climb(options, of_runs)


if __name__ == "__main__":
    OWN, OF_RUNS = split_command_line(sys.argv[1:])
    after = "is an option of the runs, and goes after --: python ladder.py speedup -- --max_steps 5"
    OPTIONS = start(
        LadderOptions,
        OWN,
        positional="configs",
        elsewhere=dict.fromkeys({"config", *Config.model_fields} - {"log_dir"}, after),
    )
    with reported(
        "the report",
        interrupted="interrupted; finished stages are kept: the same command without --rerun "
        "resumes",
    ):
        main(OPTIONS, OF_RUNS)
