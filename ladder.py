"""Climb a ladder: run its stages one after the other, and report the factor of each here.

python ladder.py speedup --quick       with a small model, in 15 minutes
python ladder.py speedup               a series: speedup, or a folder of configs/ such as a100
python ladder.py recipes               the losses of newer recipes, over 3 seeds
python ladder.py baseline.yaml my.yaml                any configs
python ladder.py a.yaml b.yaml --seeds 3              their losses and their speeds
python ladder.py mine.yaml --sweep lr=1e-4,3e-4,1e-3  the value of an option with the lowest loss
python ladder.py speedup --stages 2,3,5               some stages, over the first
python ladder.py speedup -- --max_steps 10            options after -- go to every run
python ladder.py --ablate speedup10.yaml              the factor of each optimization of a config
python ladder.py --ablate my.yaml --seeds 3           the loss, tokens and time that each saves
python ladder.py --across logs/results/*/gpu_ms       ladders of several machines beside each other
python ladder.py --plot logs/a logs/b                 loss curves of any runs in one picture
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from config import Config
from measure.interleaved.ratio import FEWEST
from measure.interleaved.rounds import ROUNDS, split_command_line
from measure.ladder.climb import (
    measure_device,
    train_and_compare,
)
from measure.ladder.learning import report_learned_ablation, report_learning, report_sweep
from measure.ladder.machines import write_machines
from measure.ladder.quick import ROUNDS as QUICK_ROUNDS
from measure.ladder.quick import SIZES, SUFFIX, Size, quick_stages, size_for
from measure.ladder.record import Device, Record
from measure.ladder.report import (
    fastest_over_first,
    plot_runs,
    report_ablation,
    report_speeds,
)
from measure.ladder.stages import (
    SPEEDUP,
    Stage,
    ablated_losses,
    ablated_speeds,
    ladder_of,
    make_stage,
    plan,
    plan_sweep,
    planned_before,
    with_bases,
    with_seeds,
)
from runtime.cli import Name, Options, Positive, ZeroIsOff
from runtime.errors import UserError, reported
from runtime.start import start

Measure = Callable[[str], Device]  # measures a device by its name


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
    recipes, or with --sweep; else only speeds are compared)
    """
    sweep: Name | None = None
    """train one config with each value of an option, such as lr=1e-4,3e-4,1e-3, and report the
    value with the lowest loss
    """
    nproc_per_node: Positive | None = None
    """ranks of each config, by torchrun; with speedup, of its last stage, ddp (default: 1; in ddp
    one per GPU)
    """
    rounds: ZeroIsOff = ROUNDS
    """maximum number of interleaved rounds of each stage with its base; 0 disables them, as does
    --sweep without --rounds
    """
    rerun: bool = False
    """run finished stages again"""
    report_only: bool = False
    """rebuild the last climb's report from the finished runs, on any machine"""
    ablate: bool = False
    """compare each optimization of the given config: switched on first, and switched on last; with
    --seeds only last, and aa is the config itself with other seeds
    """
    across: bool = False
    """write the ladders of several machines beside each other, into machines.md in log_dir"""
    plot: bool = False
    """compare the loss curves of the given runs in one picture"""


def check(options: LadderOptions) -> None:
    """Raise UserError for options that contradict each other."""
    if not options.configs:
        raise UserError("name a series such as speedup, a folder of configs, or config files")
    of_climbs = ("ablate", "stages", "nproc_per_node", "seeds", "rounds", "rerun", "report_only")
    without_effect = {
        "across": ("plot", "sweep", *of_climbs),
        "plot": ("log_dir", "sweep", *of_climbs),
        "sweep": ("ablate", "quick", "stages", "nproc_per_node"),
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
    for mode in ("ablate", "sweep"):
        if getattr(options, mode) and len(options.configs) > 1:
            raise UserError(f"--{mode} takes one config, such as speedup10.yaml")


def folder_of(options: LadderOptions) -> Path:
    """Return the ladder's folder, which has its name."""
    if options.ablate:
        name = f"ablate_{Path(options.configs[0]).stem}"
    elif options.sweep:
        name = f"sweep_{Path(options.configs[0]).stem}_{options.sweep.partition('=')[0]}"
    else:
        name = ladder_of(options.configs)[0] + (SUFFIX if options.quick else "")
    return Path(options.log_dir, name)


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
    options: LadderOptions, size: Sequence[int], of_runs: Sequence[str], device: Device
) -> list[Stage]:
    """Return the stages of a ladder on a device. `size`: of the model of a quick ladder.

    Raises UserError.
    """
    if options.quick:
        return quick_stages(Size(*size) if size else SIZES[0], of_runs, device)
    if options.sweep:
        return plan_sweep(options.sweep, options.configs[0], of_runs, device)
    if ladder_of(options.configs)[0] != SPEEDUP:
        return plan(options.configs, of_runs, device, options.nproc_per_node or 1)
    stages, ranks = plan(options.configs, of_runs, device), options.nproc_per_node or device.gpus
    if ranks > 1:
        ddp = make_stage("ddp", "ddp", of_runs, device, ranks)
        corpus = Path(ddp.config.data_dir, ddp.config.dataset)
        if options.nproc_per_node or any(corpus.glob("*.bin")):
            stages.append(ddp)
    return stages


def with_chosen(options: LadderOptions, stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages of --stages and the first one, each with its base. Raises UserError."""
    names = chosen([stage.name for stage in stages], options.stages)
    return with_bases([s for s in stages if s.name in (stages[0].name, *names)])


Pairs = dict[str, list[Stage]]  # stages to interleave with their bases, by optimization


def planned_ablation(
    options: LadderOptions, whole: Stage, seeds: int
) -> tuple[dict[Stage, list[Stage]], Pairs]:
    """Return the stages to train with each seed, and the stages to interleave with their bases.

    With seeds: all, and all but each optimization. Speeds are compared without runs.
    Raises UserError.
    """
    without = ablated_losses(whole) if seeds else {}
    pairs = {} if seeds else ablated_speeds(whole)
    if not (without or pairs):
        raise UserError(f"{options.configs[0]}: has no optimization on, so nothing to ablate")
    names = chosen([*without, *pairs], options.stages)
    if not seeds:
        return {}, {name: pairs[name] for name in names}
    trained = with_seeds([whole, *(without[name] for name in names)], seeds)
    for name in names:
        base = trained[without[name]][0]
        pairs[name] = [replace(trained[whole][0], comparison=f"{name}_last", base=base)]
    return trained, pairs


# ---- the command


def climb(options: LadderOptions, of_runs: list[str], measure: Measure) -> Record:
    """Run the stages of a ladder, interleave each with its base, and report. Raises UserError."""
    record = Record.load(folder_of(options))
    first = planned(options, record.size, of_runs, Device())[0]
    device = measure(first.config.device)
    if options.quick:
        record.size = record.size or size_for(device)
    stages = with_chosen(options, planned(options, record.size, of_runs, device))
    learns = bool(options.sweep or stages[0].config.eval_every)
    record.seeds = options.seeds or 3 * learns
    record.stages = {stage.name: stage.planned for stage in stages}
    trained = with_seeds(stages, record.seeds)
    compared, rounds = [seeds[0] for seeds in trained.values()], options.rounds
    if "rounds" not in options.model_fields_set:
        rounds = QUICK_ROUNDS if options.quick else 0 if options.sweep else rounds
    predicts = not options.sweep
    train_and_compare(
        record, trained, compared, device, rounds, rerun=options.rerun, predicts=predicts
    )
    total = fastest_over_first(record, stages)
    if rounds and total and total.comparison and not record.seeds:
        train_and_compare(record, {}, [total], device, rounds, rerun=options.rerun, predicts=False)
    report(options, record, trained)
    return record


def ablate(options: LadderOptions, of_runs: list[str], measure: Measure) -> Record:
    """Interleave a config with and without each optimization, with seeds train both, and report.

    Raises UserError.
    """
    record, config = Record.load(folder_of(options)), options.configs[0]
    device = measure(make_stage("all", config, of_runs, Device()).config.device)
    whole = make_stage("all", config, of_runs, device)
    record.seeds, record.stages = options.seeds or 0, {"all": whole.planned}
    trained, pairs = planned_ablation(options, whole, record.seeds)
    compared = [*chain(*pairs.values())]
    train_and_compare(
        record, trained, compared, device, options.rounds, rerun=options.rerun, predicts=False
    )
    report_pairs(record, trained, pairs)
    return record


def rebuild(options: LadderOptions, of_runs: list[str]) -> None:
    """Report the stages of the last climb from its record. Raises UserError."""
    if of_runs:
        raise UserError("--report_only: leave the options after -- out; the record has them")
    record = Record.load(folder_of(options))
    stages, record.seeds = planned_before(record), options.seeds or record.seeds
    if options.ablate:
        report_pairs(record, *planned_ablation(options, stages[0], record.seeds))
        return
    name, configs = ladder_of(options.configs)
    is_named = name == "ladder" and not options.sweep
    if is_named and {Path(config).stem for config in configs}.isdisjoint(record.stages):
        raise UserError(
            f"{record.folder}: has the ladder of {', '.join(record.stages)}; name these configs, "
            "or leave --report_only out"
        )
    report(options, record, with_seeds(with_chosen(options, stages), record.seeds))


def report(
    options: LadderOptions, record: Record, trained: Mapping[Stage, Sequence[Stage]]
) -> None:
    """Report the losses of a ladder, or without seeds the speeds."""
    if options.sweep:
        report_sweep(record.folder.name, record, trained)
    elif record.seeds:
        report_learning(record.folder.name, record, trained)
    else:
        report_speeds(record.folder.name, record, [*trained])


def report_pairs(record: Record, trained: Mapping[Stage, Sequence[Stage]], pairs: Pairs) -> None:
    """Report an ablation of losses, or without seeds of speeds."""
    if record.seeds:
        last = {name: stages[0] for name, stages in pairs.items()}
        report_learned_ablation(record.folder.name, record, trained, last)
    else:
        report_ablation(record.folder.name, record, pairs)


def main(options: LadderOptions, of_runs: list[str], measure: Measure = measure_device) -> None:
    """Climb, ablate or report. Raises UserError, and SystemExit if a stage fails.

    `measure` measures a device.
    """
    check(options)
    if options.across:
        write_machines(options.configs, Path(options.log_dir))
    elif options.plot:
        plot_runs(options.configs)
    elif options.report_only:
        rebuild(options, of_runs)
    else:
        record = (ablate if options.ablate else climb)(options, of_runs, measure)
        if record.failures:
            raise SystemExit(1)


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
