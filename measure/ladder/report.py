"""Report a ladder, an ablation, and ladders of several machines."""

import csv
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from measure.interleaved.comparison import Comparison
from measure.ladder.explain import card_of
from measure.ladder.quick import SUFFIX
from measure.ladder.record import Run
from measure.ladder.rungs import COMPARED, counterpart, rows_of
from measure.ladder.stages import (
    Stage,
    in_place_of_bf16,
    published_rows,
    series,
    series_folder,
)
from measure.report.page import curve_of
from measure.report.pictures import draw_losses, draw_panels
from measure.report.report import PEAK_MEMORY, Card, Figure, Report, Row
from runtime.errors import UserError
from runtime.report import Estimate
from runtime.runlog import EVAL_COLUMNS, curve, read_rows

FIGURES = [
    Figure("stage", "stage"),
    Figure(
        "tokens_per_sec",
        "tokens/s",
        ",.0f",
        "the median without the first steps, which compile and warm up",
    ),
    Figure(
        "over_base",
        "x base",
        meaning="tokens/s over those of its base, the stage that it changes (or the stage before, "
        "if that one is not in this ladder)",
        bar=True,
        over="base",
    ),
    Figure(
        "over_first",
        "x first",
        meaning="tokens/s over those of the first stage, the product of such factors",
        over="first",
    ),
    Figure("final_loss", "loss", ".3f", "of the last step, nats per token"),
    PEAK_MEMORY,
    Figure(
        "predicted_over_base",
        "predicted",
        ".2f",
        "x base, computed before it was timed from counted work and this machine's rates "
        "(docs/why.md)",
        bar=True,
        over="base",
    ),
    Figure(
        "published_over_base",
        "published",
        ".2f",
        "x base in the published times, on the publisher's GPU. The speedup ladder's times from "
        "speedup1 on are not compared: they were read without waiting for the GPU. ddp was "
        "published for two RTX 4090",
        bar=True,
        over="base",
    ),
    Figure(
        "a100_over_base",
        "A100",
        ".2f",
        "x base of the same step in the a100 series",
        bar=True,
        over="base",
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
    Figure("base", "base"),
    Figure("first_step_s", "first step, s", ".1f"),
    Figure(
        "utilization",
        "MFU",
        ".0%",
        "the model's FLOPs per second over the measured rate of a large matmul on this device",
    ),
    Figure("published_tokens_per_sec", "published tokens/s", ",.0f"),
    Figure("predicted_arithmetic", "arithmetic", ".0%", "predicted share of a step"),
    Figure("predicted_memory", "memory", ".0%", "predicted share of a step"),
    Figure("predicted_launches", "launches", ".0%", "predicted share of a step"),
]


def write_report(stages: Sequence[Stage], **parts: Any) -> list[str]:
    """Write a report with these parts, and copy the finished runs into the ladder's record.

    Returns a line for each stage that failed. Raises UserError, or TrainingError after failures, if
    nothing is finished.
    """
    record = stages[0].record
    failures = [f"failed: {stage.name}: {stage.error}" for stage in stages if stage.error]
    Report(folder=record.folder, remarks=failures + left_out(stages), **parts).write()
    record.runs |= {stage.name: stage.finished for stage in stages if stage.finished}
    record.save()
    return failures


def left_out(stages: Iterable[Stage]) -> list[str]:
    """Return a line for each run and comparison that does not count, with the reason."""
    lines = list[str]()
    for stage in stages:
        if stage.error:
            continue
        if reason := stage.run_or_reason[1]:
            lines.append(f"note: {stage.name} is left out: {stage.folder}: {reason}")
        elif reason := stage.comparison()[1]:
            rounds = f"note: the interleaved rounds of {stage.name} are left out"
            lines.append(f"{rounds}: {stage.record.folder}: {reason}")
    return lines


def where_of(places: Iterable[tuple[str, str | None]]) -> str:
    """Return each machine once, with its days, from machines and days."""
    days = dict[str, set[str]]()
    for machine, day in places:
        days.setdefault(machine, set()).update(filter(None, [day]))
    return "; ".join(", ".join([machine, *sorted(days[machine])]) for machine in days)


# ---- a ladder


def report(ladder: str, stages: Sequence[Stage]) -> list[str]:
    """Report the finished stages, with speed.png and loss.png, as in `write_report`."""
    done = [(stage, stage.finished) for stage in stages if stage.finished]
    name = f"quick {ladder.removesuffix(SUFFIX)}" if ladder.endswith(SUFFIX) else ladder
    runs = dict[str, list[str]]()  # names of stages by the description of their runs
    for stage, run in done:
        summary = run.summary
        tokens = f"{stage.config.batch_size} x {stage.config.seq_len} tokens"
        if stage.config.total_batch_tokens:
            tokens = f"{stage.config.total_batch_tokens:,} tokens"
        elif summary.world_size > 1:
            tokens = f"{summary.world_size} x {tokens}"
        for about in (f"{summary.steps} steps of {tokens}", f"{summary.about}, {summary.day}"):
            runs.setdefault(about, []).append(f"`{stage.name}`")
    options = shlex.join(
        word for word in stages[0].options if all(word in stage.options for stage in stages)
    )
    cards = [
        card_of(stage.name, stage.file, stage.base.file if stage.base else stage.file)
        for stage, _ in done
    ]
    published = {
        stage.name: {
            "published": curve(published_rows(stage.published.log)),
            "measured": curve(run.log),
        }
        for stage, run in done
        if stage.published.log
    }
    if published:
        picture = stages[0].record.folder / "loss.png"
        draw_panels(picture, published, "step", "loss, nats per token")
    return write_report(
        stages,
        title="A ladder" if ladder == "ladder" else f"The {name} ladder",
        figures=FIGURES,
        rows=rows_of(stages),
        about=[
            *(
                f"{', '.join(names) if len(names) < len(done) else 'all'}: {about}"
                for about, names in sorted(runs.items(), key=lambda run: -len(run[1]))
            ),
            *filter(None, [options and f"All runs with {options}", in_place_of_bf16(stages)]),
        ],
        pictures={"loss.png": "loss curves, measured over published"} if published else {},
        bars="speed.png",
        where=where_of((run.summary.machine, run.summary.day) for _, run in done),
        cards=cards,
        curves=loss_curves(done, cards),
    )


def loss_curves(done: Sequence[tuple[Stage, Run]], cards: Sequence[Card]) -> list[dict[str, Any]]:
    """Return the loss curves of finished stages, then the published ones."""
    curves, published = [], []
    for (stage, run), card in zip(done, cards, strict=True):
        log, ranks = run.log, run.summary.world_size
        tokens, times = stage.config.tokens_per_step, curve(log, "dt_ms")[1]
        curves.append(curve_of(card.title, *curve(log), times, tokens_per_step=tokens(ranks)))
        if name := stage.published.log:
            log, label = published_rows(name), f"{card.title}, published"
            # Times that were read without waiting for the GPU mean nothing.
            times = curve(log, "dt_ms")[1] if stage.published.ms_per_step else []
            published.append(
                curve_of(label, *curve(log), times, tokens_per_step=tokens(1), published=True)
            )
    return [*curves, *published]


def plot_runs(folders: Sequence[str], path: Path) -> None:
    """Draw the loss curves of any runs in one picture. Raises UserError for one without a log."""
    training, validation = {}, {}
    for folder in map(Path, folders):
        training[str(folder)] = curve(read_rows(folder / "log.csv"))
        if (folder / "eval.csv").exists():
            rows = read_rows(folder / "eval.csv", EVAL_COLUMNS)
            validation[str(folder)] = curve(rows, "val_loss")
    draw_losses(path, training, validation)
    print(f"wrote {path}")


# ---- an ablation


WORTH = [
    Figure("optimization", "optimization"),
    Figure(
        "first",
        "on first",
        "",
        "the speed with it alone over the speed with none",
        bar=True,
        over="none",
    ),
    Figure(
        "last",
        "on last",
        "",
        "the speed with all over the speed with all but it",
        bar=True,
        over="all but it",
    ),
    Figure("memory_mb_without", "MB without", ",.0f", "peak memory in MiB with all but it"),
    Figure("memory_mb_with", "MB with", ",.0f", "peak memory in MiB with all"),
]


def report_ablation(title: str, rungs: Mapping[str, tuple[Stage, Stage]]) -> list[str]:
    """Report two rungs for each optimization, on first and on last, as in `write_report`."""
    rows, found = list[Row](), list[Comparison]()
    for optimization, both in rungs.items():
        first, last = (stage.comparison()[0] for stage in both)
        found += filter(None, (first, last))
        if first or last:
            rows.append(
                {
                    "optimization": optimization,
                    "first": first and first.ratio(),
                    "last": last and last.ratio(),
                    "memory_mb_without": last and last.sides[0].peak_memory_mb,
                    "memory_mb_with": last and last.sides[1].peak_memory_mb,
                }
            )
    return write_report(
        [*chain(*rungs.values())],
        title=f"What each optimization of {title} is worth",
        figures=WORTH,
        rows=rows,
        about=[*dict.fromkeys(f"{r.machine}; device {r.device}, commit {r.git}" for r in found)],
        bars="worth.png",
        where=where_of((r.machine, r.date) for r in found),
    )


# ---- several machines


def across(folders: Sequence[str], out: Path) -> None:
    """Report ladders of several machines, and the published factors, beside each other.

    A machine is named after the parent of its ladder's folder. Raises UserError.
    """
    factors: dict[str, dict[str, Estimate | None]] = {}  # over the base, by machine and stage
    bases: dict[str, str] = {}
    files: dict[str, Path] = {}  # configs of the stages of known series
    for folder in map(Path, folders):
        name = folder.resolve().parent.name
        name = str(folder) if name in factors else name
        factors[name], of_stages = read_factors(folder / "results.csv")
        bases |= of_stages
        if place := series_folder(folder.name.removesuffix(SUFFIX)):
            files |= {path.stem: path for path in series(place)}
    known = [stage for stage, base in bases.items() if {stage, base} <= files.keys()]
    for name, column in {
        "A100, published": "a100_tokens_per_sec",
        "one GPU, published": "gpu_ms",
    }.items():
        published = {s: counterpart(files[s], files[bases[s]], column) for s in known}
        factors[name] = {stage: Estimate(factor) for stage, factor in published.items() if factor}
    cards = [
        card_of(stage, files[stage], files[bases[stage]]) if stage in known else Card(stage, stage)
        for stage in bases
    ]
    Report(
        out,
        "The factor of each optimization, by machine",
        [
            Figure("stage", "stage"),
            *(Figure(name, name, bar=True, over="base") for name in factors),
        ],
        [
            {"stage": card.label, **{name: of.get(card.name) for name, of in factors.items()}}
            for card in cards
        ],
        meaning="The speed of each stage over that of the stage that it changes. Published: the "
        "same step in the a100 series and in the list of timings on one GPU (`logs/reference/`).",
        bars="across.png",
        cards=cards,
    ).write()


def read_factors(path: Path) -> tuple[dict[str, Estimate | None], dict[str, str]]:
    """Read the factor of each stage over its base, and that base, from a ladder's results.csv.

    Raises OSError and UserError.
    """
    names = ("over_base", "over_base_low", "over_base_high")
    factors, bases = {}, {}
    try:
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            values = [float(row[name]) for name in names if row[name]]
            if row["base"] != row["stage"]:
                bases[row["stage"]] = row["base"]
                factors[row["stage"]] = Estimate(*values) if values else None
    except (KeyError, ValueError) as error:
        raise UserError(f"{path}: is not the table of a ladder: {error}") from None
    return factors, bases
