"""Compare the losses of a ladder's rungs over several seeds, and the tokens and the time to reach
the first rung's final loss.

All compare runs of equal tokens, seed by seed: equal seeds have the same data in the same order.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from measure.interleaved.ratio import mean_over_seeds, product
from measure.ladder import rungs as speeds
from measure.ladder.explain import card_of
from measure.ladder.report import where_of, write_report
from measure.ladder.stages import Stage, make_stage, with_bases
from measure.report.page import curve_of
from measure.report.pictures import draw_losses
from measure.report.report import Card, Figure, Row
from runtime.errors import UserError
from runtime.report import Estimate
from runtime.runlog import curve

Curve = dict[int, float]  # validation loss by step
Rungs = Mapping[str, Sequence[Stage]]  # the runs of each rung, one per seed
NOISE = (
    "after +-: the half width of the mean's 95% interval over the seeds, by Student's t; within "
    "noise: the interval contains 0. The apparent worth of a rung that adds nothing is noise too"
)
FIGURES = [
    Figure("stage", "rung"),
    Figure(
        "loss",
        "validation loss",
        ".4f",
        "of the last step, in nats per token, the mean over the seeds",
    ),
    Figure(
        "lower",
        "lower than base's by",
        ".4f",
        f"the mean difference from the rung that it changes, seed by seed; {NOISE}",
        over="base",
    ),
    Figure("base", "base"),
    Figure(
        "tokens_share",
        "tokens to the first's loss",
        meaning="the share of all tokens after which a rung reaches the first rung's final loss, "
        "on straight lines between evaluations; geometric mean over the seeds",
        bar=True,
        over="first",
    ),
    Figure("speed", "speed", meaning="tokens/s over the first rung's", over="first"),
    Figure(
        "time_share",
        "time to the first's loss",
        meaning="the share of tokens over the speed, with the intervals of both combined",
        bar=True,
        over="first",
    ),
]
WORTH = [
    Figure("optimization", "optimization"),
    Figure(
        "first",
        "on first",
        ".4f",
        "the decrease of the final validation loss from none to this optimization alone, in nats "
        f"per token; {NOISE}",
    ),
    Figure("last", "on last", ".4f", "the decrease from all but this one to all"),
]


def with_seeds(stage: Stage, seeds: int, name: str = "") -> list[Stage]:
    """Return a run of the stage for each seed: the one of its config, the next, ...

    With 0 seeds, return the stage itself. `name`: of the runs, without the seed. Raises UserError
    for a config that does not evaluate.
    """
    if not seeds:
        return [stage]
    name, first = name or stage.name, stage.config.seed
    if not stage.config.eval_every:
        raise UserError(f"{name}: sets no eval_every, so it has no validation loss")
    return [
        make_stage(
            f"{name}_seed_{seed}",
            str(stage.file),
            stage.record,
            [*stage.options, f"--seed={seed}"],
            ranks=stage.ranks,
        )
        for seed in range(first, first + seeds)
    ]


def runs_of_ablation(
    rungs: Mapping[str, tuple[Stage, Stage]], seeds: int
) -> dict[str, list[Stage]]:
    """Return the runs of an ablation: of `none` and `all` optimizations, of each alone
    (`NAME_first`), and of all but each (`NAME_last`).
    """
    named = dict[str, Stage | None]()
    for first, last in rungs.values():
        named |= {"none": first.base, "all": last, first.name: first, last.name: last.base}
    return {name: with_seeds(stage, seeds, name) for name, stage in named.items() if stage}


def val_losses(run: Stage) -> Curve:
    """Return the validation losses of a finished run."""
    assert run.finished
    return dict(zip(*curve(run.finished.eval, "val_loss"), strict=True))


def last(losses: Curve) -> float:
    """Return the final loss."""
    return losses[max(losses)]


def finished(rungs: Rungs) -> Rungs:
    """Return the rungs whose runs have all finished."""
    return {name: runs for name, runs in rungs.items() if all(run.finished for run in runs)}


def steps_to(losses: Curve, loss: float) -> float | None:
    """Return the step at which a loss is first reached, on straight lines between evaluations."""
    steps = sorted(losses)
    for before, step in zip([steps[0], *steps], steps, strict=False):
        if losses[step] <= loss:
            drop = losses[before] - losses[step] or 1.0
            return step - (step - before) * (loss - losses[step]) / drop
    return None


def share_of_tokens(ours: Sequence[Curve], first: Sequence[Curve]) -> Estimate | None:
    """Return the share of the tokens that a rung needs to reach the first rung's final loss.

    The geometric mean over the seeds, with its interval. None if a seed never reaches it.
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
    """Return the mean decrease of the loss from the base to a rung, seed by seed."""
    return mean_over_seeds([theirs - loss for theirs, loss in zip(base, ours, strict=True)])


def rows_of(rungs: Rungs) -> list[Row]:
    """Return a row for each finished rung; none if the first one is not finished."""
    curves = {name: [val_losses(run) for run in runs] for name, runs in finished(rungs).items()}
    ends = {name: [last(losses) for losses in of_seeds] for name, of_seeds in curves.items()}
    heads = with_bases([runs[0] for runs in rungs.values()])
    names = {stage.name: name for stage, name in zip(heads, rungs, strict=True)}
    speed_rows = {row["stage"]: row for row in speeds.rows_of(heads)}
    first, rows = next(iter(rungs)), list[Row]()
    for name in curves if first in curves else []:
        head = rungs[name][0]
        base, speed = names[(head.base or head).name], speed_rows[head.name]["over_first"]
        is_compared = base in curves and base != name
        tokens = Estimate(1.0) if name == first else share_of_tokens(curves[name], curves[first])
        rows.append(
            {
                "stage": name,
                "base": base,
                "loss": mean_over_seeds(ends[name]),
                "lower": lower_by(ends[base], ends[name]) if is_compared else None,
                "tokens_share": tokens,
                "speed": speed,
                "time_share": tokens and product([tokens, speed.inverse]),
            }
        )
    return rows


def report_learned_ablation(title: str, names: Sequence[str], rungs: Rungs) -> list[str]:
    """Report the decrease of the loss by each optimization: on first, and on last."""
    ends = {name: [last(val_losses(run)) for run in runs] for name, runs in finished(rungs).items()}
    rows = list[Row]()
    for name in names:
        pairs = {"first": ("none", f"{name}_first"), "last": (f"{name}_last", "all")}
        row: Row = {
            column: lower_by(ends[base], ends[other])
            for column, (base, other) in pairs.items()
            if base in ends and other in ends
        }
        if row:
            rows.append({"optimization": name, **row})
    return write_losses(
        rungs,
        title=f"What each optimization of {title} learns",
        figures=WORTH,
        rows=rows,
        meaning="All other options, such as learning rates, stay as they are.",
    )


def means_of(rungs: Rungs) -> dict[str, tuple[list[int], list[float]]]:
    """Return the validation losses of each finished rung, means over the seeds."""
    means = {}
    for name, runs in rungs.items():
        of_seeds = [val_losses(run) for run in runs]
        steps = [step for step in of_seeds[0] if all(step in losses for losses in of_seeds)]
        steps = steps[1:] or steps  # the first evaluation comes before any training
        means[name] = steps, [statistics.fmean(c[step] for c in of_seeds) for step in steps]
    return means


def write_losses(
    rungs: Rungs, about: Sequence[str] = (), cards: Sequence[Card] = (), **parts: Any
) -> list[str]:
    """Write a report with the mean losses of the finished rungs, as `write_report` does."""
    runs, means = [*chain(*rungs.values())], means_of(finished(rungs))
    summaries = [run.finished.summary for run in runs if run.finished]
    titles = {card.name: card.title for card in cards}
    failures = write_report(
        runs,
        about=[*about, *dict.fromkeys(summary.about for summary in summaries)],
        where=where_of((summary.machine, summary.day) for summary in summaries),
        pictures={"learning.png": "validation losses"},
        cards=cards,
        curves=[
            curve_of(
                titles.get(name, name),
                *losses,
                tokens_per_step=rungs[name][0].config.tokens_per_step(rungs[name][0].ranks),
            )
            for name, losses in means.items()
        ],
        learns=True,
        **parts,
    )
    draw_losses(runs[0].record.folder / "learning.png", {}, means)
    return failures


def report_learning(ladder: str, rungs: Rungs) -> list[str]:
    """Report the losses of the finished rungs, with learning.png, as in `write_report`."""
    rows, first = rows_of(rungs), next(iter(rungs.values()))
    config, tokens = first[0].config, first[0].config.tokens_per_step(first[0].ranks)
    cards = [
        card_of(row["stage"], rungs[row["stage"]][0].file, rungs[row["base"]][0].file)
        for row in rows
    ]
    return write_losses(
        rungs,
        title=f"What the rungs of {ladder} learn",
        figures=FIGURES,
        rows=rows,
        about=[
            f"{config.max_steps:,} steps of {tokens:,} tokens; seeds of each rung: {len(first)}.",
        ],
        cards=cards,
        meaning="In brackets: a 95% interval, of the speed by the sign test over interleaved "
        "rounds, of the tokens by Student's t over the seeds, of the time by both.",
    )
