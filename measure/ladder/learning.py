"""Compare the losses of a ladder's rungs over several seeds, and the tokens and the time to reach
the first rung's final loss.

All compare runs of equal tokens, seed by seed: equal seeds have the same data in the same order.
"""

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from measure.interleaved.ratio import means_over_seeds, product
from measure.ladder.explain import all_that_ran, card_of_stage
from measure.ladder.record import curve
from measure.ladder.report import report_stages
from measure.ladder.report import rows_of as speeds_of
from measure.ladder.stages import Stage
from measure.report.pictures import Curve, draw_panels
from measure.report.report import Card, Figure, Row, curve_of
from runtime.report import Estimate

NOISE = (
    "after +-: the half width of the mean's 95% interval, by Student's t, with the variance over "
    "the seeds pooled over all rows; within noise: the interval contains 0. Equal seeds have the "
    "same data in the same order; a rung with other seeds than its base (aa) has its own variance"
)
BRACKETS = (
    "In brackets: a 95% interval, of the speed by the sign test over interleaved rounds, of the "
    "tokens by Student's t over the seeds, of the time by both."
)


def figures_of_shares(over: str, to: str, reached: str, than: str) -> list[Figure]:
    """Return the columns of `shares`, in the words of one table."""
    return [
        Figure(
            "tokens_share",
            f"tokens to {to}",
            meaning=f"the share of all tokens after which {reached}, on straight lines between "
            "evaluations; geometric mean over the seeds; empty if a seed never does",
            bar=True,
            over=over,
        ),
        Figure("speed", "speed", meaning=f"tokens/s over {than}", over=over),
        Figure(
            "time_share",
            f"time to {to}",
            meaning="the share of tokens over the speed, with the intervals of both combined",
            bar=True,
            over=over,
        ),
    ]


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
    *figures_of_shares(
        "first",
        "the first's loss",
        "a rung reaches the first rung's final loss",
        "the first rung's",
    ),
]
WORTH = [
    Figure("optimization", "optimization"),
    Figure(
        "lower",
        "lowers the loss by",
        ".4f",
        "the mean difference of the final validation loss from all but this one to all, in nats "
        f"per token; {NOISE}",
        over="all but it",
    ),
    *figures_of_shares(
        "all but it",
        "the loss without it",
        "all reach the final loss of all but it",
        "those with all but it",
    ),
]


def losses_of(stage: Stage) -> list[Curve]:
    """Return the validation losses of each seed of a stage; none unless all have finished."""
    finished = [run.finished for run in stage.runs]
    return [curve(run.eval, "val_loss") for run in finished if run and all(finished)]


def last(curves: Sequence[Curve]) -> list[float]:
    """Return the final loss of each seed."""
    return [losses[max(losses)] for losses in curves]


def steps_to(losses: Curve, loss: float) -> float | None:
    """Return the step at which a loss is first reached, on straight lines between evaluations."""
    steps = sorted(losses)
    for before, step in pairwise([steps[0], *steps]):
        if losses[step] <= loss:
            drop = losses[before] - losses[step] or 1.0
            return step - (step - before) * (loss - losses[step]) / drop
    return None


def share_of_tokens(ours: Sequence[Curve], first: Sequence[Curve]) -> list[float] | None:
    """Return the logarithm of the share of the tokens that a rung needs to reach the first rung's
    final loss, for each seed. None if a seed never reaches it.
    """
    logs = []
    for losses, theirs in zip(ours, first, strict=True):
        step = steps_to(losses, theirs[max(theirs)])
        if not step:
            return None
        logs.append(math.log(step / max(theirs)))
    return logs


def lower_by(base: Sequence[Curve], ours: Sequence[Curve]) -> list[float]:
    """Return the decrease of the final loss from the base to a rung, for each seed."""
    return [theirs - loss for theirs, loss in zip(last(base), last(ours), strict=True)]


def pooled(values: Mapping[str, Sequence[float]], unpaired: Collection[str]) -> dict[str, Estimate]:
    """Return the mean over the seeds of each rung's values, with its interval.

    `unpaired`: rungs with other seeds than their base. Their differences vary more, so they have a
    variance of their own.
    """
    apart = {name: of_seeds for name, of_seeds in values.items() if name in unpaired}
    together = {name: of_seeds for name, of_seeds in values.items() if name not in unpaired}
    return means_over_seeds(together) | means_over_seeds(apart)


def unpaired_among(stages: Iterable[tuple[str, Stage]]) -> set[str]:
    """Return the names of the stages with another seed than their base."""
    return {name for name, s in stages if s.base and s.config.seed != s.base.config.seed}


def shares_of_tokens(
    pairs: Mapping[str, tuple[list[Curve], list[Curve]]], unpaired: Collection[str] = ()
) -> dict[str, Estimate]:
    """Return the share of tokens of each name's losses, which come with the losses to reach: the
    geometric mean over the seeds, with its interval. Names with a seed that never gets there are
    left out.
    """
    logs = {name: share_of_tokens(ours, first) for name, (ours, first) in pairs.items()}
    means = pooled({name: values for name, values in logs.items() if values}, unpaired)
    return {
        name: Estimate(*(math.exp(end) for end in dataclasses.astuple(mean) if end is not None))
        for name, mean in means.items()
    }


def rows_of(stages: Sequence[Stage]) -> list[Row]:
    """Return a row for each finished rung; none if the first one is not finished."""
    of_speed = speeds_of([stage.runs[0] for stage in stages])
    speeds = {row["stage"]: row["over_first"] for row in of_speed}
    curves = {stage.name: losses for stage in stages if (losses := losses_of(stage))}
    first = curves.get(stages[0].name)
    if not first:
        return []
    done = [stage for stage in stages if stage.name in curves]
    loss = means_over_seeds({name: last(losses) for name, losses in curves.items()})
    differences = {
        stage.name: lower_by(curves[stage.base.name], curves[stage.name])
        for stage in done
        if stage.base and stage.base.name in curves
    }
    unpaired = unpaired_among((stage.name, stage) for stage in done)
    lower = pooled(differences, unpaired)
    to_first = {stage.name: (curves[stage.name], first) for stage in done[1:]}
    tokens = shares_of_tokens(to_first, unpaired)
    tokens[stages[0].name] = Estimate(1.0)
    return [
        {
            "stage": stage.name,
            "base": (stage.base or stage).name,
            "loss": loss[stage.name],
            "lower": lower.get(stage.name),
            **shares(tokens.get(stage.name), speeds[stage.runs[0].name]),
        }
        for stage in done
    ]


def shares(tokens: Estimate | None, speed: Estimate | None) -> Row:
    """Return the share of the tokens to a loss, the speed, and the share of the time from both."""
    time = product([tokens, speed.inverse]) if tokens and speed else None
    return {"tokens_share": tokens, "speed": speed, "time_share": time}


def mean_of(curves: Sequence[Curve]) -> Curve:
    """Return the mean of the losses of all seeds, which evaluate at the same steps."""
    steps = [*curves[0]][1:]  # the first evaluation comes before any training
    return {step: statistics.fmean(losses[step] for losses in curves) for step in steps}


def write_losses(stages: Sequence[Stage], cards: Sequence[Card] = (), **parts: Any) -> None:
    """Write a report with the mean losses of the finished rungs, as `report_stages` does."""
    first, runs = stages[0], [*chain(*(stage.runs for stage in stages))]
    about = f"{first.length}; seeds of each rung: {len(first.runs)}."
    summaries = [run.finished.summary for run in runs if run.finished]
    timed = first.record.comparisons.values()  # perhaps on another machine than the runs
    speeds = [f"speeds: {c.place}, commit {c.git}, {c.date}" for c in timed]
    means = {stage.name: mean_of(curves) for stage in stages if (curves := losses_of(stage))}
    titles, tokens = {card.name: card.title for card in cards}, first.tokens_per_step
    report_stages(
        runs,
        [*summaries, *timed],
        ran=all_that_ran([stage for stage in stages if stage.name in means] or stages),
        about=[about, *dict.fromkeys([*(summary.about for summary in summaries), *speeds])],
        pictures={"learning.svg": "validation losses"},
        cards=cards,
        curves=[
            curve_of(titles.get(name, name), losses, tokens, {}) for name, losses in means.items()
        ],
        learns=True,
        **parts,
    )
    draw_panels(first.record.folder / "learning.svg", {"validation": means})


def report_learned_ablation(
    ladder: str, rungs: Mapping[str, Sequence[Stage]], stages: Sequence[Stage]
) -> None:
    """Report the loss, the tokens and the time that each optimization saves as the last one.

    `stages`: all sides of the rungs.
    """
    pairs = dict[str, tuple[list[Curve], list[Curve]]]()  # losses with all, and with all but it
    for optimization, (rung,) in rungs.items():
        assert rung.base
        ours, without = losses_of(rung), losses_of(rung.base)
        if ours and without:
            pairs[optimization] = ours, without
    unpaired = unpaired_among((name, rung) for name, (rung,) in rungs.items())
    differences = {name: lower_by(without, ours) for name, (ours, without) in pairs.items()}
    lower, tokens = pooled(differences, unpaired), shares_of_tokens(pairs, unpaired)
    rows = list[Row]()
    for optimization in pairs:
        comparison = rungs[optimization][0].comparison
        row = {"optimization": optimization, "lower": lower[optimization]}
        speed = comparison.ratio() if comparison else None
        rows.append(row | shares(tokens.get(optimization), speed))
    write_losses(
        stages,
        title=f"What each optimization of {ladder.removeprefix('ablate_')} learns",
        figures=WORTH,
        rows=rows,
        meaning=f"All other options, such as learning rates, stay as they are. {BRACKETS}",
    )


def report_learning(ladder: str, stages: Sequence[Stage]) -> None:
    """Report the losses of the finished rungs, with learning.svg, as in `report_stages`."""
    done = [stage for stage in stages if losses_of(stage)]
    write_losses(
        stages,
        title=f"What the rungs of {ladder} learn",
        figures=FIGURES,
        rows=rows_of(stages),
        cards=[*map(card_of_stage, done)],
        meaning=BRACKETS,
    )
