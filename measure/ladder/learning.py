"""Compare the losses of a ladder's stages over several seeds, and the tokens and the time to reach
the first stage's final loss.

All compare runs of equal tokens, seed by seed: equal seeds have the same data in the same order.
"""

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

from measure.interleaved.ratio import means_over_seeds, product
from measure.ladder.explain import all_that_ran, card_of_stage
from measure.ladder.losses import kind_of, page_of, summarize
from measure.ladder.record import Record, curve, settings
from measure.ladder.report import speeds_of
from measure.ladder.results import Result, look_up, write_results
from measure.ladder.stages import (
    Stage,
    ablated_losses,
    is_numeric,
    own_options,
    planned_before,
    with_seeds,
)
from measure.report.estimate import Estimate
from measure.report.pictures import Curve, draw_panels
from measure.report.report import Card, Figure, Report, Row, Summary

Seeds = Mapping[Stage, Sequence[Stage]]  # the trained stages, by the planned one
Results = Mapping[Stage, Sequence[Result]]  # one result per seed

NOISE = (
    "after +-: the half width of the mean's 95% interval, by Student's t, with the variance over "
    "the seeds pooled over all rows; within noise: the interval contains 0. Equal seeds have the "
    "same data in the same order; a stage with other seeds than its base (aa) has its own variance"
)
BRACKETS = (
    "In brackets: a 95% interval, of the speed by the sign test over interleaved rounds, of the "
    "tokens by Student's t over the seeds, of the time by both."
)


def figures_of_shares(to: str, reached: str, than: str) -> list[Figure]:
    """Return the columns of `shares`, in the words of one table."""
    return [
        Figure(
            "tokens_share",
            f"tokens to {to}",
            meaning=f"the share of all tokens after which {reached}, on straight lines between "
            "evaluations; geometric mean over the seeds; empty if a seed never does, or before its "
            "first step",
        ),
        Figure("speed", "speed", meaning=f"tokens/s over {than}, interleaved"),
        Figure(
            "time_share",
            f"time to {to}",
            meaning="the share of tokens over the speed, with the intervals of both combined",
        ),
    ]


LOSSES = [
    Figure("stage", "stage"),
    Figure(
        "loss",
        "validation loss",
        ".4f",
        "of the last step, in nats per token, the mean over the seeds",
    ),
    Figure("bits_per_byte", "bits per byte", ".4f", "the loss over ln 2 and the bytes of a token"),
    Figure(
        "lower",
        "lower than base's by",
        ".4f",
        f"the mean difference from the stage that it changes, seed by seed; {NOISE}",
    ),
    Figure(
        "sd",
        "sd of the loss",
        ".4f",
        "the standard deviation of the loss over the stage's own seeds; where stages differ in it, "
        "the pooled intervals are too wide for some and too narrow for others",
    ),
    Figure("base", "base"),
]
FIGURES = [
    *LOSSES,
    Figure(
        "among_others",
        "among all the others",
        ".4f",
        "how much the stage lowers the loss of all the others together, from the ablation of the "
        "last stage: the first option of the stage's file, with those that need it",
    ),
    *figures_of_shares(
        "the first's loss",
        "a stage reaches the first stage's final loss",
        "the first stage's",
    ),
]
WORTH = [
    Figure("optimization", "optimization"),
    Figure(
        "lower",
        "lowers the loss by",
        ".4f",
        "the mean difference of the final validation loss from all but this one to all, in nats "
        f"per token; {NOISE}; as all rows share the runs of all, of three seeds 94% of the "
        "intervals of two rows contain the true value, and 93% of those of twelve",
    ),
    *figures_of_shares(
        "the loss without it",
        "all reach the final loss of all but it",
        "those with all but it",
    ),
]

# ---- means over the seeds


class Learned(NamedTuple):
    """Validation losses, a curve per seed, of a stage and of the stages to compare it with."""

    name: str
    losses: list[Curve]
    base: list[Curve]  # its final loss is compared; empty without a base
    goal: list[Curve]  # its final loss is to be reached; empty for the first stage
    is_paired: bool  # the base has the same seeds
    speed: Estimate | None  # over the stage of `goal`


def losses_of(results: Sequence[Result], column: str = "val_loss") -> list[Curve]:
    """Return a column of the evaluations of each seed of a stage; none unless all have it."""
    runs = [result.run for result in results if result.run and column in result.run.eval]
    return [curve(run.eval, column) for run in runs] if len(runs) == len(results) else []


def compare(stages: Sequence[Learned]) -> dict[str, dict[str, Any]]:
    """Return, by name, how much each stage lowers the loss, and its shares of tokens and time."""
    unpaired = {stage.name for stage in stages if not stage.is_paired}
    lower = pooled(
        {stage.name: lower_by(stage.base, stage.losses) for stage in stages if stage.base},
        unpaired,
    )
    logs = {
        stage.name: shares
        for stage in stages
        if stage.goal and (shares := share_of_tokens(stage.losses, stage.goal))
    }
    tokens = {
        name: Estimate(*(math.exp(end) for end in dataclasses.astuple(mean) if end is not None))
        for name, mean in pooled(logs, unpaired).items()
    }
    found = {}
    for stage in stages:
        share = tokens.get(stage.name) if stage.goal else Estimate(1.0)
        found[stage.name] = {
            "lower": lower.get(stage.name),
            "tokens_share": share,
            "speed": stage.speed,
            "time_share": product([share, stage.speed.inverse]) if share and stage.speed else None,
        }
    return found


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
    """Return the logarithm of the share of the tokens that a stage needs to reach the first
    stage's final loss, for each seed. None if a seed never reaches it.
    """
    logs = []
    for losses, theirs in zip(ours, first, strict=True):
        step = steps_to(losses, theirs[max(theirs)])
        if not step:  # never, or before the first step
            return None
        logs.append(math.log(step / max(theirs)))
    return logs


def lower_by(base: Sequence[Curve], ours: Sequence[Curve]) -> list[float]:
    """Return the decrease of the final loss from the base to a stage, for each seed."""
    return [theirs - loss for theirs, loss in zip(last(base), last(ours), strict=True)]


def pooled(values: Mapping[str, Sequence[float]], unpaired: Collection[str]) -> dict[str, Estimate]:
    """Return the mean over the seeds of each stage's values, with its interval.

    `unpaired`: stages with other seeds than their base. Their differences vary more, so they have a
    variance of their own.
    """
    apart = {name: of_seeds for name, of_seeds in values.items() if name in unpaired}
    together = {name: of_seeds for name, of_seeds in values.items() if name not in unpaired}
    return means_over_seeds(together) | means_over_seeds(apart)


def mean_of(curves: Sequence[Curve]) -> Curve:
    """Return the mean of the losses of all seeds, which evaluate at the same steps."""
    steps = [*curves[0]][1:]  # the first evaluation comes before any training
    return {step: statistics.fmean(losses[step] for losses in curves) for step in steps}


# ---- reports


def rows_of(record: Record, results: Results) -> list[Row]:
    """Return a row for each finished stage; none if the first one is not finished."""
    losses = {stage: found for stage, each in results.items() if (found := losses_of(each))}
    first = next(iter(results))
    if first not in losses:
        return []
    speeds = interleaved_speeds(results)
    final = {stage.name: last(found) for stage, found in losses.items()}
    means = means_over_seeds(final)
    bits = means_over_seeds(
        {
            stage.name: last(found)
            for stage in losses
            if (found := losses_of(results[stage], "bits_per_byte"))
        }
    )
    among = among_others(record, [*losses])
    compared = compare(
        [
            Learned(
                stage.name,
                found,
                losses.get(stage.base, []) if stage.base else [],
                [] if stage is first else losses[first],
                stage.base is None or stage.config.seed == stage.base.config.seed,
                speeds.get(stage),
            )
            for stage, found in losses.items()
        ]
    )
    rows = list[Row]()
    for stage in losses:
        base = (stage.base or stage).name
        values = {"base": base, "loss": means[stage.name], **compared[stage.name]}
        values |= {"bits_per_byte": bits.get(stage.name), "among_others": among.get(stage.name)}
        values["sd"] = statistics.stdev(final[stage.name]) if len(final[stage.name]) > 1 else None
        rows.append(Row(stage.name, values, card_of_stage(stage)))
    return rows


def interleaved_speeds(results: Results) -> dict[Stage, Estimate]:
    """Return the speeds of interleaved stages over the first one. Runs of several seeds train side
    by side, which changes their own speeds.
    """
    speeds = speeds_of([each[0] for each in results.values()])
    found = {
        stage: speed.over_first
        for stage, (own, *_) in results.items()
        if (speed := speeds.get(own.stage.name)) and speed.over_first and speed.over_first.low
    }
    return {next(iter(results)): Estimate(1.0)} | found if found else {}


def ablated_rows(record: Record, results: Results, pairs: Mapping[str, Stage]) -> list[Row]:
    """Return a row for each optimization: the loss, the tokens and the time that it saves as the
    last one. `results`: of all, then of all but each.
    """
    (whole, of_whole), *others = results.items()
    losses, found = losses_of(of_whole), list[Learned]()
    for (optimization, pair), (stage, each) in zip(pairs.items(), others, strict=True):
        without, comparison = losses_of(each), look_up(record, pair).comparison
        if losses and without:
            is_paired = stage.config.seed == whole.config.seed
            speed = comparison.ratio() if comparison else None
            found.append(Learned(optimization, losses, without, without, is_paired, speed))
    return [Row(name, values) for name, values in compare(found).items()]


def among_others(record: Record, stages: Sequence[Stage]) -> dict[str, Estimate]:
    """Return how much each stage lowers the loss of all the others, from the ablation of the last
    one beside the ladder's folder; empty without it.
    """
    whole = stages[-1]
    ablation = Record.load(record.folder.parent / f"ablate_{whole.file.stem}")
    planned = planned_before(ablation) if ablation.seeds else []
    if [settings(stage.config) for stage in planned] != [settings(whole.config)]:
        return {}
    without = ablated_losses(planned[0])
    seeds = with_seeds([planned[0], *without.values()], ablation.seeds)
    pairs = {option: seeds[stage][0] for option, stage in without.items()}
    rows = ablated_rows(ablation, results_of(ablation, seeds), pairs)
    lower = {row.name: row.values["lower"] for row in rows}
    found = dict[str, Estimate]()
    for stage in stages:
        option = next(iter(own_options(stage.file)), "")
        if option in lower and getattr(stage.config, option) == getattr(whole.config, option):
            found[stage.name] = lower[option]
    return found


def report_learning(ladder: str, record: Record, seeds: Seeds) -> None:
    """Report the losses of the finished stages, as `write_losses` does."""
    results = results_of(record, seeds)
    title = f"What the stages of {ladder} learn"
    write_losses(
        record,
        results,
        Report(record.folder, title, FIGURES, rows_of(record, results), meaning=BRACKETS),
    )


def report_learned_ablation(
    ladder: str, record: Record, seeds: Seeds, pairs: Mapping[str, Stage]
) -> None:
    """Report the loss, the tokens and the time that each optimization saves as the last one, as
    `write_losses` does. `pairs`: the stages that were interleaved.
    """
    results = results_of(record, seeds)
    title = f"What each optimization of {ladder.removeprefix('ablate_')} learns"
    meaning = f"All other options, such as learning rates, stay as they are. {BRACKETS}"
    rows = ablated_rows(record, results, pairs)
    write_losses(record, results, Report(record.folder, title, WORTH, rows, meaning=meaning))


def report_sweep(ladder: str, record: Record, seeds: Seeds) -> None:
    """Report the losses of the values whose runs have finished, and the best value, as
    `write_losses` does.
    """
    results = results_of(record, seeds)
    finished = {stage: each for stage, each in results.items() if losses_of(each)}
    rows = rows_of(record, finished) if finished else []
    rows = [row._replace(card=Card("")) for row in rows]
    title, best = f"The losses of {ladder}", best_of(rows, [*results]) if rows else None
    write_losses(record, results, Report(record.folder, title, LOSSES, rows, summary=best))


def best_of(rows: Sequence[Row], stages: Sequence[Stage]) -> Summary:
    """Return the value with the lowest loss, and as the last line the YAML to paste.

    `stages`: all values of the sweep, finished or not.
    """
    best = min(rows, key=lambda row: row.values["loss"].value)
    beside = {
        row.base if row is best else row.name: row.values["lower"]
        for row in rows
        if best.name in (row.name, row.base) and row.values["lower"]
    }
    like = [name for name, lower in beside.items() if kind_of(lower) == "none"]
    text = f"neighbours that may be as good: {', '.join(like) or 'none'}"
    option, names = best.name.partition("=")[0], [stage.name for stage in stages]
    stage = stages[names.index(best.name)]
    if stage in (stages[0], stages[-1]) and is_numeric(option, stage):
        beyond = "lower" if stage is stages[0] else "higher"
        text += f"; it is at the edge of the sweep: try {beyond} values"
    headline = f"Best: {best.name}, validation loss {best.values['loss']:.4f}"
    return Summary(headline, f"{text}\n\n{best.name.replace('=', ': ', 1)}")


def results_of(record: Record, seeds: Seeds) -> Results:
    """Look up the results of all seeds."""
    return {stage: [look_up(record, each) for each in own] for stage, own in seeds.items()}


def is_again(stage: Stage, first: Stage) -> bool:
    """True if a stage is the first one with other seeds."""
    seed = first.config.seed
    with_its_seed = settings(stage.config.with_options(seed=seed))
    return stage.config.seed != seed and with_its_seed == settings(first.config)


def write_losses(record: Record, results: Results, report: Report) -> None:
    """Write a report with the mean losses of the finished stages, on its page and in learning.svg.

    Raises TrainingError if nothing is finished.
    """
    first, all_results = next(iter(results)), [*chain(*results.values())]
    summaries = [result.run.summary for result in all_results if result.run]
    timed = record.comparisons.values()  # perhaps on another machine than the runs
    about = [f"{first.length}; seeds of each stage: {len(results[first])}."]
    about += dict.fromkeys(summary.about for summary in summaries)
    about += dict.fromkeys(f"speeds: {c.place}, commit {c.git}, {c.date}" for c in timed)
    means = {s.name: mean_of(found) for s, each in results.items() if (found := losses_of(each))}
    report = dataclasses.replace(
        report,
        ran=all_that_ran([stage for stage in results if stage.name in means] or [*results]),
        about=about,
        pictures={"learning.svg": "validation losses"} if report.rows else {},
    )
    if report.rows:
        draw_panels(record.folder / "learning.svg", {"validation": means})
    if report.rows and "loss" in report.rows[0].values:
        again = next((stage.name for stage in results if is_again(stage, first)), "")
        report.summary = report.summary or summarize(report.rows, len(results[first]), again)
        report.page, report.parts = (
            "learn.html",
            {**report.parts, **page_of(report.rows, means, again)},
        )
    write_results(record, all_results, report)
