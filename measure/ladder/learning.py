"""Compare what the rungs of a ladder learn: their losses over several seeds, and the tokens and the
time after which they have the loss that the first rung ends with.

All compare runs of equal tokens, seed by seed: equal seeds have the same data in the same order.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from config import DataConfig, ModelConfig, OptimizationConfig
from measure.interleaved.ratio import mean_over_seeds, product
from measure.ladder.report import failures_of, left_out
from measure.ladder.rungs import Pair, ablated, compare, pairs_of
from measure.ladder.stages import Stage, make_stage, seed_name, with_bases
from measure.report.page import INTERVALS, curve_of, rung, write_page
from measure.report.tables import Row, write_csv, write_report
from runtime.errors import UserError
from runtime.report import Estimate, draw_losses, field
from runtime.runlog import EVAL_COLUMNS, curve, read_rows

Curve = dict[int, float]  # validation loss by step
COLUMNS = [
    field("rung", "stage"),
    field("validation loss", "loss", ".4f"),
    field("lower than base's by", "lower", ".4f"),
    field("base", "base"),
    field("tokens to the first's loss", "tokens_share"),
    field("speed", "speed"),
    field("time to the first's loss", "time_share"),
]
FIGURES = {
    "loss": ("validation loss", ".4f"),
    "lower": ("lower than base's by", ".4f"),
    "speed": ("speed", ""),
}
EXPLAINED = f"""\
- validation loss: at the end, in nats per token, the mean over the seeds.
- lower than base's by: the mean difference from the rung that it changes, seed by seed. After \
+-: the half width of the mean's 95% interval, by Student's t; within noise: it holds 0. What a \
rung that adds nothing seems to be worth is noise too.
- tokens to the first's loss: after which share of all tokens a rung has the loss that the first \
one ends with, on straight lines between evaluations; geometric mean over the seeds.
- speed: tokens/s over the first rung's. {INTERVALS}
- time: the share of tokens over the speed, with the intervals of both combined."""


def with_seeds(stage: Stage, seeds: int) -> list[Stage]:
    """Return a run of the stage for each seed: the one of its config, the next, ...

    Raises UserError for a config that does not evaluate.
    """
    if not stage.config.eval_every:
        raise UserError(f"{stage.name}: sets no eval_every, so it has no validation loss")
    first, (config, _, *options) = stage.config.seed, stage.side  # _: --keep_last=0
    runs = [
        make_stage(
            seed_name(stage.name, n), config, stage.config.log_dir, [*options, f"--seed={n}"]
        )
        for n in range(first, first + seeds)
    ]
    for run in runs:
        run.ranks = stage.ranks
    return runs


def ablation_rungs(
    config: str, of_runs: Sequence[str], folder: str, seeds: int
) -> tuple[list[str], dict[str, list[Stage]]]:
    """Return which optimizations of a config change what is learned, and the rungs that tell by
    how much: `none` and `all` of them, each alone (`NAME_first`), and all but each (`NAME_last`).
    """
    sections = (ModelConfig, DataConfig, OptimizationConfig)
    sides = ablated(config, of_runs, {name for s in sections for name in s.model_fields})
    named: dict[str, list[str]] = {}
    for name, (none, alone, without, with_all) in sides.items():
        named |= {"none": none, "all": with_all, f"{name}_first": alone, f"{name}_last": without}
    return [*sides], {
        name: with_seeds(make_stage(name, side[0], folder, side[1:]), seeds)
        for name, side in named.items()
    }


def val_losses(run: Stage) -> Curve:
    """Read what a run has evaluated."""
    steps, losses = curve(read_rows(run.folder / "eval.csv", EVAL_COLUMNS), "val_loss")
    return dict(zip(steps, losses, strict=True))


def last(losses: Curve) -> float:
    """Return the loss at the end."""
    return losses[max(losses)]


def steps_to(losses: Curve, loss: float) -> float | None:
    """Return the step at which a loss is first reached, on straight lines between evaluations."""
    steps = sorted(losses)
    for before, step in zip([steps[0], *steps], steps, strict=False):
        if losses[step] <= loss:
            drop = losses[before] - losses[step] or 1.0
            return step - (step - before) * (loss - losses[step]) / drop
    return None


def share_of_tokens(ours: Sequence[Curve], first: Sequence[Curve]) -> Estimate | None:
    """Return after which share of the first rung's tokens a rung has its loss at the end.

    The geometric mean over the seeds, with its interval. None: not with every seed.
    """
    logs = []
    for losses, theirs in zip(ours, first, strict=True):
        step = steps_to(losses, last(theirs))
        if not step:
            return None
        logs.append(math.log(step / max(theirs)))
    mean = mean_over_seeds(logs)
    return Estimate(*(math.exp(end) for end in dataclasses.astuple(mean) if end is not None))


def lower_by(base: Sequence[float], ours: Sequence[float]) -> Estimate:
    """Return by how much our losses are lower than the base's, seed by seed."""
    return mean_over_seeds([theirs - loss for theirs, loss in zip(base, ours, strict=True)])


def rows_of(rungs: Mapping[str, Sequence[Stage]]) -> list[Row]:
    """Return a row for each rung whose runs are finished, as the first rung's have to be."""
    done = {name: runs for name, runs in rungs.items() if all(run.summary() for run in runs)}
    curves = {name: [val_losses(run) for run in runs] for name, runs in done.items()}
    names = {runs[0].name: name for name, runs in rungs.items()}
    heads = with_bases([runs[0] for runs in rungs.values()])
    bases = {names[stage.name]: names[(stage.base or stage).name] for stage in heads}
    speeds = {names[row["stage"]]: row["over_first"] for row in compare(heads)}
    first, rows = next(iter(rungs)), list[Row]()
    for name in done if first in done else []:
        ends, base = [last(losses) for losses in curves[name]], bases[name]
        lower = None
        if base in curves and base != name:
            lower = lower_by([last(losses) for losses in curves[base]], ends)
        tokens = Estimate(1.0) if name == first else share_of_tokens(curves[name], curves[first])
        speed = speeds[name]
        rows.append(
            {
                "stage": name,
                "base": base,
                "loss": mean_over_seeds(ends),
                "lower": lower,
                "tokens_share": tokens,
                "speed": speed,
                "time_share": tokens and product([tokens, speed.inverse]),
            }
        )
    return rows


def report_learned_ablation(
    title: str, names: Sequence[str], rungs: Mapping[str, Sequence[Stage]], folder: Path
) -> list[str]:
    """Report by how much each optimization lowers the loss, on first and on last; returns what
    failed.

    Raises UserError, or TrainingError after failures, if nothing is finished.
    """
    done = {name: runs for name, runs in rungs.items() if all(run.summary() for run in runs)}
    ends = {name: [last(val_losses(run)) for run in runs] for name, runs in done.items()}
    rows = list[Row]()
    for name in names:
        row: Row = {"optimization": name}
        pairs = {"first": ("none", f"{name}_first"), "last": (f"{name}_last", "all")}
        for column, (base, other) in pairs.items():
            if base in ends and other in ends:
                row[column] = lower_by(ends[base], ends[other])
        if len(row) > 1:
            rows.append(row)
    failures = failures_of(chain(*rungs.values()))
    write_report(
        folder / "report.md",
        f"What each optimization of {title} learns",
        [
            field("optimization", "optimization"),
            field("on first", "first", ".4f"),
            field("last", "last", ".4f"),
        ],
        rows,
        failures + left_out(chain(*rungs.values())),
        "on first: by how much the validation loss at the end is lower with this optimization "
        "alone than with none, in nats per token. last: with all than with all but this one. After "
        "+-: the half width of the 95% interval over the seeds, by Student's t; within noise: it "
        "holds 0. All other options, such as learning rates, stay as they are.",
    )
    write_csv(folder / "results.csv", rows)
    draw_curves(folder, done)
    return failures


def draw_curves(folder: Path, rungs: Mapping[str, Sequence[Stage]]) -> list[dict[str, Any]]:
    """Draw the validation losses of each rung, means over the seeds, as learning.png; returns them
    for a page.
    """
    means = {}
    for name, runs in rungs.items():
        of_seeds = [val_losses(run) for run in runs]
        steps = [step for step in of_seeds[0] if all(step in losses for losses in of_seeds)]
        steps = steps[1:] or steps  # the first is before the first step, where all guess
        means[name] = steps, [statistics.fmean(c[step] for c in of_seeds) for step in steps]
    draw_losses(folder / "learning.png", {}, means)
    tokens = next(iter(rungs.values()))[0].config.tokens_per_step(1)
    return [curve_of(name, *losses, tokens_per_step=tokens) for name, losses in means.items()]


def report_learning(
    ladder: str, rungs: Mapping[str, Sequence[Stage]], folder: Path, pairs: Sequence[Pair]
) -> list[str]:
    """Report what the finished rungs have learned, with learning.png; returns what failed.

    Raises UserError, or TrainingError after failures, if nothing is finished.
    """
    rows, runs = rows_of(rungs), [*chain(*rungs.values())]
    failures, config = failures_of([*runs, *pairs]), runs[0].config
    where = dict.fromkeys(summary.about for run in runs if (summary := run.summary()))
    title = f"What the rungs of {ladder} learn"
    write_report(
        folder / "report.md",
        title,
        COLUMNS,
        rows,
        failures + left_out([*runs, *pairs_of([of[0] for of in rungs.values()]).values()]),
        EXPLAINED,
        f"{config.max_steps:,} steps of {config.tokens_per_step(1):,} tokens; seeds of each rung: "
        f"{len(next(iter(rungs.values())))}. {'; '.join(where)}.",
        "![validation losses](learning.png)",
    )
    write_csv(folder / "results.csv", rows)
    curves = draw_curves(folder, {row["stage"]: rungs[row["stage"]] for row in rows})
    files = {name: runs[0].file for name, runs in rungs.items()}
    pages = []
    for row in rows:
        name, shares = row["stage"], {"tokens": row["tokens_share"], "time": row["time_share"]}
        pages.append(rung(name, files[name], files[row["base"]], shares, row, FIGURES))
    headline, first = "", rows[0]["stage"]
    if ends := [(row["tokens_share"].value, row["stage"]) for row in rows if row["tokens_share"]]:
        least, best = min(ends)
        headline = f"{best} has the loss that {first} ends with after {least:.0%} of the tokens."
    write_page(folder / "report.html", title, headline, [*where], pages, curves, EXPLAINED)
    return failures
