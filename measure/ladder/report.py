"""Report a ladder and an ablation of speeds."""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from measure.interleaved.ratio import product
from measure.ladder.explain import all_that_ran, card_of_stage, model_of
from measure.ladder.published import factor, published_curve, published_factor
from measure.ladder.quick import SUFFIX
from measure.ladder.record import LIMITS, Record, Run, curve, read_columns
from measure.ladder.results import (
    Result,
    look_up,
    shortened,
    write_results,
)
from measure.ladder.stages import Stage
from measure.ladder.staircase import draw_staircase, staircase_of, summarize
from measure.report.estimate import Estimate
from measure.report.pictures import Curve, draw_panels
from measure.report.report import INTERVALS, PEAK_MEMORY, Figure, Report, Row
from run.log import EVAL_COLUMNS

Done = Sequence[tuple[Stage, Run]]  # the finished stages
COMPARED = range(11, 51)  # steps over which loss curves are compared
# figures of a run's summary in its row; final_loss is missing if the last step was skipped
SUMMARIZED = {"first_step_s", "peak_memory_mb", "utilization", "final_loss", "steps"}
FIGURES = [
    Figure("stage", "stage"),
    Figure(
        "over_base",
        "over base",
        meaning="tokens/s over those of its base, the stage that it changes (or the stage before, "
        "if that one is not in this ladder)",
    ),
    Figure(
        "predicted_over_base",
        "predicted",
        ".2f",
        "the speed over its base, computed before it was timed, from counted work and this "
        "machine's rates (docs/why.md)",
    ),
    Figure(
        "published_over_base",
        "published",
        ".2f",
        "the speed over its base in the published times, on the publisher's GPU. The speedup "
        "ladder's times from speedup1 on are not compared: they were read without waiting for the "
        "GPU. ddp was published for two RTX 4090",
    ),
    Figure(
        "a100_over_base",
        "A100",
        ".2f",
        "the speed over its base in the same step in the a100 series",
    ),
    Figure(
        "over_first",
        "over first",
        meaning="tokens/s over those of the first stage: with an interval, the product of "
        "interleaved factors; without one, the ratio of the two runs",
    ),
    PEAK_MEMORY,
    Figure("final_loss", "loss", ".3f", "of the last step, nats per token"),
    Figure(
        "tokens_per_sec",
        "tokens/s",
        ",.0f",
        "the median without the first steps, which compile and warm up",
    ),
    Figure(
        "loss_difference",
        "diff.",
        ".3f",
        f"mean absolute difference from the published loss curve over steps {COMPARED[0]} to "
        f"{COMPARED[-1]}, or fewer in a shorter run. The published speedup1 to 3 did not do what "
        "their notes claim: `python ladder.py as_logged` compares runs that do",
    ),
    Figure("ms_per_step", "ms/step", ",.0f", "a median, like tokens/s"),
    Figure("first_step_s", "first step, s", ".1f"),
    Figure(
        "utilization",
        "MFU",
        ".0%",
        "the model's FLOPs per second over the measured rate of a large matmul on this device",
    ),
]


# ---- a ladder


class Speed(NamedTuple):
    """The speed of a stage over its base and over the first stage; None if it is not known."""

    over_base: Estimate | None
    over_first: Estimate | None


def speeds_of(results: Sequence[Result]) -> dict[str, Speed]:
    """Return the speeds of each finished stage by its name: interleaved, else from single runs."""
    runs = {result.stage.name: result.run for result in results if result.run}
    first, speeds = next(iter(runs), ""), dict[str, Speed]()
    for result in results:
        name, base = result.stage.name, (result.stage.base or result.stage).name
        if name not in runs:
            continue
        factor, total = ratio(runs[name], runs.get(base)), ratio(runs[name], runs[first])
        if result.comparison:
            factor = result.comparison.ratio()
            # a product, if interleaved factors lead all the way from the first stage
            to_base = speeds[base].over_first if base in speeds else None
            if to_base and (base == first or to_base.low):
                total = product([to_base, factor])
        speeds[name] = Speed(factor, total)
    return speeds


def ratio(ours: Run, theirs: Run | None) -> Estimate | None:
    """Return the ratio of the speeds of two runs; None if they are from two machines."""
    if theirs is None or ours.summary.place != theirs.summary.place:
        return None
    return Estimate(ours.summary.median_tokens_per_sec / theirs.summary.median_tokens_per_sec)


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Return a row for each finished stage. Losses in nats per token, memory in MiB."""
    rows, speeds = list[Row](), speeds_of(results)
    predictions = {result.stage.name: result.prediction for result in results}
    for result in results:
        stage, run, ours = result.stage, result.run, result.prediction
        if run is None:
            continue
        base, summary, speed = stage.base or stage, run.summary, speeds[stage.name]
        theirs = predictions[base.name]
        # published at one batch: no factor for a stage with another batch than its base
        is_one_batch = stage.tokens_per_step == base.tokens_per_step
        a100 = factor(stage.listed, base.listed, "a100_tokens_per_sec") if is_one_batch else None
        values = {
            "ms_per_step": summary.median_dt_ms,
            "tokens_per_sec": summary.median_tokens_per_sec,
            "tokens_per_step": stage.tokens_per_step,
            "base": base.name,
            "over_base": speed.over_base,
            "rounds": result.comparison.rounds if result.comparison else 0,
            "published_over_base": published_factor(stage.published, base.published),
            "a100_over_base": a100,
            "predicted_over_base": ours.over(theirs) if ours and theirs else None,
            **{f"predicted_{limit}_ms": ours and 1e3 * getattr(ours, limit) for limit in LIMITS},
            "published_ms_per_step": stage.published.ms_per_step,
            "over_first": speed.over_first,
            **summary.model_dump(include=SUMMARIZED),
            "published_tokens_per_sec": stage.published.tokens_per_sec,
            "loss_difference": mean_difference(curve(run.log), published_curve(stage.published)),
            "in_place_of_added_bf16": stage.instead_of_added_bf16,
        }
        card = card_of_stage(stage)
        if precision := stage.instead_of_added_bf16:
            card = card._replace(title=f"{card.title}, in {precision} here")
        rows.append(Row(stage.name, values, card))
    return rows


def fastest_over_first(record: Record, stages: Sequence[Stage]) -> Stage | None:
    """Return the stage to interleave for the total of a ladder, see `Staircase.pair`."""
    results = [look_up(record, stage) for stage in stages]
    rows = rows_of(results)
    return staircase_of(record, results, rows).pair if rows else None


def mean_difference(ours: Curve, theirs: Curve) -> float | None:
    """Return the mean absolute difference of two loss curves over the steps COMPARED.

    Only steps that both have count; None if there are none.
    """
    steps = [step for step in COMPARED if step in ours and step in theirs]
    return statistics.fmean(abs(ours[s] - theirs[s]) for s in steps) if steps else None


def report_speeds(ladder: str, record: Record, stages: Sequence[Stage]) -> None:
    """Report the finished stages, with first.svg.

    Raises TrainingError if none is finished.
    """
    results = [look_up(record, stage) for stage in stages]
    rows = rows_of(results)
    done = [(result.stage, result.run) for result in results if result.run]
    is_quick = ladder.endswith(SUFFIX)  # its model is not the published one
    options = shlex.join(
        word for word in stages[0].options if all(word in stage.options for stage in stages)
    )
    report = Report(
        record.folder,
        "A ladder" if ladder == "ladder" else f"The {ladder} ladder",
        FIGURES,
        rows,
        ran=all_that_ran([stage for stage, _ in done] or stages),
        remarks=[] if is_quick else without_published(done, options),
        about=about_runs(done, options),
        meaning=INTERVALS,
    )
    if rows:
        stairs = staircase_of(record, results, rows)
        summary, model = summarize(stairs), model_of(stages[0].config)
        draw_staircase(record.folder / "first.svg", stairs, f"{model}: {summary.headline}")
        report.summary, report.page = summary, "speed.html"
        report.pictures = {"first.svg": summary.headline}
        report.parts = {
            "stairs": stairs,
            "what": f"{report.title}: {model}",
            "command": f"python ladder.py {ladder.replace(SUFFIX, ' --quick')}",
        }
    write_results(record, results, report)


def about_runs(done: Done, options: str) -> list[str]:
    """Return lines on the steps, the machines, the options and the precision of finished runs."""
    summaries = [run.summary for _, run in done]
    lines = [f"{s.steps} steps; {s.about}, {s.date}" for s in summaries]
    if options:
        lines.append(f"All runs with {options}")
    instead = [f"{s.name} {s.instead_of_bf16}" for s, _ in done if s.instead_of_bf16]
    if instead:
        lines.append(f"In place of bf16: {', '.join(instead)}.")
    return [*dict.fromkeys(lines)]


def without_published(done: Done, options: str) -> list[str]:
    """Return a line on the stages that `options` made incomparable with the published ones."""
    names = [
        stage.name for stage, _ in done if stage.published != stage.listed and stage.listed.has_run
    ]
    if not names:
        return []
    return [
        f"note: the published losses and times of {shortened(names)} are left out: those runs were "
        f"made without {options or 'the options given'}"
    ]


def plot_runs(folders: Sequence[str]) -> None:
    """Draw the loss curves of any runs in one picture. Raises UserError for one without a log."""
    path = Path("comparison.svg")
    training, validation = {}, {}
    for folder in folders:
        training[folder] = curve(read_columns(Path(folder, "log.csv")))
        evaluated = Path(folder, "eval.csv")
        if evaluated.exists():
            validation[folder] = curve(read_columns(evaluated, EVAL_COLUMNS), "val_loss")
    panels = {"training": training}
    if validation:
        panels["validation"] = validation
    draw_panels(path, panels)
    print(f"wrote {path}")


# ---- an ablation


WORTH = [
    Figure("optimization", "optimization"),
    Figure("first", "on first", "", "the speed with it alone over the speed with none"),
    Figure("last", "on last", "", "the speed with all over the speed with all but it"),
    Figure("memory_mb_without", "MB without", ",.0f", "peak memory in MiB with all but it"),
    Figure("memory_mb_with", "MB with", ",.0f", "peak memory in MiB with all"),
]


def report_ablation(ladder: str, record: Record, pairs: Mapping[str, Sequence[Stage]]) -> None:
    """Report each optimization on first and on last.

    Raises TrainingError if nothing is finished.
    """
    rows, results = list[Row](), list[Result]()
    for optimization, pair in pairs.items():
        both = [look_up(record, stage) for stage in pair]
        results += both
        first, last = (result.comparison for result in both)
        if first or last:
            memory = [side.peak_memory_mb for side in last.sides] if last else [None, None]
            values = {
                "first": first.ratio() if first else None,
                "last": last.ratio() if last else None,
                "memory_mb_without": memory[0],
                "memory_mb_with": memory[1],
            }
            rows.append(Row(optimization, values))
    found = [result.comparison for result in results if result.comparison]
    about = dict.fromkeys(f"{c.machine}; device {c.device}, commit {c.git}" for c in found)
    title = f"What each optimization of {ladder.removeprefix('ablate_')} is worth"
    report = Report(record.folder, title, WORTH, rows, about=[*about], meaning=INTERVALS)
    write_results(record, results, report)
