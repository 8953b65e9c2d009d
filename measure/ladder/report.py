"""Report a ladder, an ablation, and ladders of several machines."""

import csv
import math
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from config import load_config
from measure.interleaved.comparison import Comparison, Result
from measure.interleaved.ratio import product
from measure.ladder.explain import all_that_ran, card_of, card_of_stage, is_124m
from measure.ladder.quick import SUFFIX
from measure.ladder.record import (
    DIRTY,
    FILE,
    LIMITS,
    Record,
    Run,
    Summary,
    curve,
    differences,
    read_columns,
)
from measure.ladder.stages import (
    REFERENCE,
    Stage,
    factor,
    in_place_of_added_bf16,
    in_place_of_bf16,
    published,
    published_factor,
    series,
    series_folder,
)
from measure.report.pictures import Curve, draw_panels
from measure.report.report import PEAK_MEMORY, Card, Figure, Row, curve_of, write_report
from measure.report.steps import StepTime, draw_steps
from run.log import EVAL_COLUMNS
from runtime.errors import UserError, in_a_line
from runtime.report import Estimate

COMPARED = range(11, 51)  # steps over which loss curves are compared
# figures of a run's summary in its row; final_loss is missing if the last step was skipped
SUMMARIZED = {"first_step_s", "peak_memory_mb", "utilization", "final_loss", "steps"}
FIGURES = [
    Figure("stage", "stage"),
    Figure(
        "over_base",
        "x base",
        meaning="tokens/s over those of its base, the stage that it changes (or the stage before, "
        "if that one is not in this ladder)",
        bar=True,
        over="base",
    ),
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
        "over_first",
        "x first",
        meaning="tokens/s over those of the first stage: with an interval, the product of "
        "interleaved factors; without one, the ratio of the two runs",
        over="first",
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
    Figure("tokens_per_step", "tokens/step", ",.0f", "of all ranks and micro-steps"),
    Figure("base", "base"),
    Figure("first_step_s", "first step, s", ".1f"),
    Figure(
        "utilization",
        "MFU",
        ".0%",
        "the model's FLOPs per second over the measured rate of a large matmul on this device",
    ),
    Figure("published_tokens_per_sec", "published tokens/s", ",.0f"),
    *(Figure(f"predicted_{limit}", limit, ".0%", "predicted share of a step") for limit in LIMITS),
]


def report_stages(
    stages: Sequence[Stage],
    results: Iterable[Summary | Comparison],
    notes: Iterable[str] = (),
    about: Iterable[str] = (),
    **parts: Any,
) -> None:
    """Write a report with these parts. Raises TrainingError if nothing is finished.

    It names each machine of the results once, with its days.
    """
    record, days = stages[0].record, dict[str, set[str]]()
    results = [*results]
    for found in results:
        days.setdefault(found.place, set()).update(filter(None, [found.date]))
    remarks = [*record.failures, *left_out(stages), *notes]
    if not (parts["rows"] or remarks):
        remarks += lacking(stages)
    write_report(
        folder=record.folder,
        remarks=remarks,
        where="; ".join(", ".join([place, *sorted(days[place])]) for place in days),
        about=[*about, *uncommitted(record, results)],
        **parts,
    )


def uncommitted(record: Record, results: Iterable[Result]) -> Iterator[str]:
    """Yield a line for each commit that was changed when it made results: its changed files."""
    for commit in dict.fromkeys(found.git for found in results):
        if commit and commit.endswith(DIRTY):
            known = record.changes.get(commit, [])
            files = shortened([*dict.fromkeys(chain(*(changes.files for changes in known)))])
            yield f"{commit}: " + (
                f"with changes to {files}; the diff is in {FILE}"
                if known
                else "its changes to the commit were not kept"
            )


def left_out(stages: Iterable[Stage]) -> Iterator[str]:
    """Yield a line for each run and comparison that has other settings."""
    for stage in stages:
        run = stage.record.runs.get(stage.name)
        found = stage.record.comparisons.get(stage.key) if stage.base else None
        if run and (differing := differences([run.config], [stage.config])):
            yield f"note: {stage.name} is left out: {differing}"
        elif run and run.summary.world_size != stage.ranks:
            there = run.summary.world_size
            yield f"note: {stage.name} is left out: ranks {there} there, {stage.ranks} here"
        elif found and (differing := differences(found.settings, stage.sides)):
            yield f"note: the interleaved rounds of {stage.key} are left out: {differing}"


def without_published(stages: Sequence[Stage], options: str) -> Iterator[str]:
    """Yield a line on the stages that `options` made incomparable with the published ones."""
    kept = ("log", "ms_per_step", "tokens_per_sec")
    names = [
        stage.name
        for stage in stages
        if stage.finished
        and any(getattr(published(stage.file), n) != getattr(stage.published, n) for n in kept)
    ]
    if names:
        yield (
            f"note: the published losses and times of {shortened(names)} are left out: those runs "
            f"were made without {options or 'the options given'}"
        )


def lacking(stages: Sequence[Stage]) -> Iterator[str]:
    """Yield a line on finished work in a record that makes no row."""
    record = stages[0].record
    if has := [*record.runs, *(f"rounds of {name}" for name in record.comparisons)]:
        lacks = [stage.key for stage in stages if not (stage.finished or stage.comparison)]
        yield f"note: {FILE} has {shortened(has)}, but lacks {shortened(lacks)}"


def shortened(names: Sequence[str], most: int = 6) -> str:
    """Return names in a line, at most `most` of them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# ---- a ladder


def rows_of(stages: Sequence[Stage]) -> list[Row]:
    """Return a row for each finished stage. Losses in nats per token, memory in MiB."""
    rows, places = dict[str, Row](), dict[str, str]()
    for stage in stages:
        base = stage.base or stage
        run, result = stage.finished, stage.comparison
        if run is None:
            continue
        summary = run.summary
        rate = summary.median_tokens_per_sec
        ours, theirs = stage.prediction, base.prediction
        row = rows[stage.name] = {
            "stage": stage.name,
            "ms_per_step": summary.median_dt_ms,
            "tokens_per_sec": rate,
            "tokens_per_step": stage.tokens_per_step,
            "base": base.name,
        }
        first, before = next(iter(rows.values())), rows.get(base.name)  # perhaps this row
        place = places[stage.name] = summary.place
        # runs on two machines have no ratio
        over_base = over_first = None
        if before and places[base.name] == place:
            over_base = Estimate(rate / before["tokens_per_sec"])
        if places[first["stage"]] == place:
            over_first = Estimate(rate / first["tokens_per_sec"])
        if result:
            over_base = result.ratio()
            # a product, if interleaved factors lead all the way from the first stage
            to_base = before and before["over_first"]
            if to_base and (before is first or to_base.low):
                over_first = product([to_base, over_base])
        row |= {
            # interleaved, else of the tokens/s; None if the base has not run
            "over_base": over_base,
            "rounds": result.rounds if result else 0,
            "published_over_base": published_factor(stage.published, base.published),
            # published at one batch: no factor for a stage with another batch than its base
            "a100_over_base": factor(
                published(stage.file), published(base.file), "a100_tokens_per_sec"
            )
            if stage.tokens_per_step == base.tokens_per_step
            else None,
            "predicted_over_base": ours.tokens_per_sec / theirs.tokens_per_sec
            if ours and theirs
            else None,
            **{f"predicted_{limit}": ours and ours.share(limit) for limit in LIMITS},
            "over_first": over_first,
            **summary.model_dump(include=SUMMARIZED),
            "published_tokens_per_sec": stage.published.tokens_per_sec,
            "loss_difference": published_difference(stage, run),  # from the published curve
            "in_place_of_added_bf16": in_place_of_added_bf16(stage),
        }
    return list(rows.values())


def total_of(rows: Sequence[Row], cards: Sequence[Card]) -> str:
    """Return a sentence on the last stage's speed over the first's; empty with one stage."""
    if len(rows) < 2 or rows[-1]["over_first"] is None:
        return ""
    first, last = rows[0], rows[-1]
    total, tokens = last["over_first"], [row["tokens_per_step"] for row in (first, last)]
    how = "the ratio of two single runs"
    if total.low is not None:
        is_one = last["base"] == first["stage"]
        how = "interleaved" if is_one else "the product of the interleaved factors"
    if tokens[0] != tokens[1]:
        how += f", at {tokens[0]:,} and {tokens[1]:,} tokens a step"
    verdict = total.verdict and f", {total.verdict}"
    times = f"{total}".removesuffix(verdict)
    text = f"{last['stage']} trains {times} times as fast as {first['stage']}{verdict} ({how})"
    factors = [(row["over_base"], card.title) for row, card in zip(rows, cards, strict=True)]
    faster = [(factor, title) for factor, title in factors if factor and factor.ends[0] > 1]
    if faster:
        factor, title = max(faster, key=lambda pair: pair[0].value)
        text += f"; most: {title}, {factor}"
    return text


def published_difference(stage: Stage, run: Run) -> float | None:
    """Return the mean absolute difference from the published loss curve over steps 11 to 50.

    Only steps that both have count; None if there are none, or no published curve.
    """
    ours, published = curve(run.log), published_curve(stage)
    differences = [abs(ours[s] - published[s]) for s in COMPARED if s in ours and s in published]
    return statistics.fmean(differences) if differences else None


def published_curve(stage: Stage, column: str = "loss") -> Curve:
    """Return a column of the published log by step; empty without a log."""
    log = stage.published.log
    return curve(read_columns(REFERENCE / log), column) if log else {}


def report(ladder: str, stages: Sequence[Stage]) -> None:
    """Report the finished stages, with speed.svg and loss.svg, as in `report_stages`."""
    done = [(stage, stage.finished) for stage in stages if stage.finished]
    is_quick = ladder.endswith(SUFFIX)  # of another model than the published one
    name = f"quick {ladder.removesuffix(SUFFIX)}" if is_quick else ladder
    small = ", with a small model" * (is_quick and not is_124m(stages[0].config))
    options = shlex.join(
        word for word in stages[0].options if all(word in stage.options for stage in stages)
    )
    cards, panels, instead = list[Card](), dict[str, dict[str, Curve]](), list[str]()
    curves, published = [], []  # for the page
    for stage, run in done:
        card = card_of_stage(stage)
        if precision := in_place_of_bf16(stage):
            instead.append(f"{stage.name} {precision}")
        if precision := in_place_of_added_bf16(stage):
            card = card._replace(title=f"{card.title}, in {precision} here")
        cards.append(card)
        measured, times = curve(run.log), curve(run.log, "dt_ms")
        curves.append(curve_of(card.title, measured, stage.tokens_per_step, times))
        if losses := published_curve(stage):
            panels[stage.name] = {"published": losses, "measured": measured}
            label, tokens = f"{card.title}, published", stage.config.tokens_per_step(1)
            # Times that were read without waiting for the GPU mean nothing.
            times = published_curve(stage, "dt_ms") if stage.published.tokens_per_sec else {}
            published.append(curve_of(label, losses, tokens, times, published=True))
    if panels:
        draw_panels(stages[0].record.folder / "loss.svg", panels)
    rows, summaries = rows_of(stages), [run.summary for _, run in done]
    draw_times(done, rows, cards)
    report_stages(
        stages,
        [*summaries, *filter(None, (stage.comparison for stage, _ in done))],
        title="A ladder" if ladder == "ladder" else f"The {name} ladder{small}",
        ran=all_that_ran([stage for stage, _ in done] or stages),
        result=total_of(rows, cards),
        figures=FIGURES,
        rows=rows,
        notes=[] if is_quick else without_published(stages, options),
        about=[
            *dict.fromkeys(f"{s.steps} steps; {s.about}, {s.date}" for s in summaries),
            *([f"All runs with {options}"] if options else []),
            *([f"In place of bf16: {', '.join(instead)}."] if instead else []),
        ],
        pictures={"loss.svg": "loss curves, measured over published"} if panels else {},
        bars="speed.svg",
        cards=cards,
        curves=[*curves, *published],
    )


def draw_times(
    done: Sequence[tuple[Stage, Run]], rows: Sequence[Row], cards: Sequence[Card]
) -> None:
    """Draw the milliseconds of a step in steps.svg, if every stage adds to the one before and all
    take the same tokens a step. `rows` and `cards`: one per finished stage.
    """
    stages = [stage for stage, _ in done]
    follows = all(stage.base is before for before, stage in pairwise(stages))
    if len(stages) < 2 or not follows or len({s.tokens_per_step for s in stages}) > 1:
        return
    times = [
        StepTime(
            card.title,
            row["ms_per_step"],
            row["over_base"] if row["stage"] != row["base"] else None,
            stage.published.ms_per_step,
        )
        for stage, card, row in zip(stages, cards, rows, strict=True)
    ]
    first, run = done[0]
    summary = run.summary
    device = summary.machine if summary.device == "cpu" else summary.device
    batch = f"{first.config.batch_size} x {first.config.seq_len:,} tokens a step"
    draw_steps(
        first.record.folder / "steps.svg",
        f"{times[0].ms:,.0f} to {times[-1].ms:,.0f} milliseconds a step",
        f"{batch}, {device}; factors over the stage before, grey ones from single runs",
        times,
    )


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


def report_ablation(ladder: str, rungs: Mapping[str, Sequence[Stage]]) -> None:
    """Report two rungs for each optimization, on first and on last, as in `report_stages`."""
    rows, found = list[Row](), list[Comparison]()
    for optimization, both in rungs.items():
        first, last = (stage.comparison for stage in both)
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
    report_stages(
        [*chain(*rungs.values())],
        found,
        title=f"What each optimization of {ladder.removeprefix('ablate_')} is worth",
        figures=WORTH,
        rows=rows,
        about=[*dict.fromkeys(f"{r.machine}; device {r.device}, commit {r.git}" for r in found)],
        bars="worth.svg",
    )


# ---- several machines

PUBLISHED = {"A100, published": "a100_tokens_per_sec", "one GPU, published": "gpu_ms"}


def factors_in(table: Path) -> dict[tuple[str, str], Estimate | None]:
    """Return the factor of each stage over its base in the results of a ladder, by both names.

    A stage that ran another precision in place of bf16 is left out. Raises UserError for any other
    file.
    """
    found = dict[tuple[str, str], Estimate | None]()
    try:
        lines = csv.DictReader(table.read_text(encoding="utf-8").splitlines(), strict=True)
        if missing := {"stage", "base", "over_base"} - {*(lines.fieldnames or ())}:
            raise UserError(f"{table}: not the table of a ladder: has no column {min(missing)}")
        for line in lines:
            stage, base = line["stage"], line["base"]
            ends = [line["over_base"], *map(line.get, ("over_base_low", "over_base_high"))]
            values = [float(end) for end in ends if end]
            if not base or len(values) == 2 or not all(0 < value < math.inf for value in values):
                raise ValueError(f"bad row of {stage}")
            if stage != base and not line.get("in_place_of_added_bf16"):
                found[stage, base] = Estimate(*values) if values else None
    except OSError as error:
        raise UserError(
            f"{table}: cannot be read: {error.strerror}; --across takes folders of ladders"
        ) from None
    except (ValueError, csv.Error) as error:
        raise UserError(f"{table}: not the table of a ladder ({in_a_line(error)})") from None
    if not found:
        raise UserError(f"{table}: has no stage with a base, so no factor")
    return found


def across(folders: Sequence[str], out: Path) -> None:
    """Report ladders of several machines, and the published factors, beside each other.

    A machine is named after the parent of its ladder's folder.
    """
    rows = dict[tuple[str, str], Row]()  # by stage and base: their factor on each machine
    files = dict[str, Path]()  # configs of the stages of known series
    machines = list[str]()
    for folder in map(Path, folders):
        name = folder.resolve().parent.name
        name += ", small model" * folder.name.endswith(SUFFIX)
        machines.append(str(folder) if name in machines else name)
        for rung, over_base in factors_in(folder / "results.csv").items():
            rows.setdefault(rung, {})[machines[-1]] = over_base
        if place := series_folder(folder.name.removesuffix(SUFFIX)):
            files |= {path.stem: path for path in series(place)}
    cards = list[Card]()
    for (stage, base), row in rows.items():
        others = [name for name, _ in rows].count(stage) > 1  # other bases
        name = f"{stage} over {base}" if others else stage
        card, file, base_file = Card(name, name), files.get(stage), files.get(base)
        if file and base_file:
            card = card_of(name, file, base_file)
            tokens = [load_config(str(path)).tokens_per_step(1) for path in (file, base_file)]
            for where, figure in PUBLISHED.items() if len({*tokens}) == 1 else ():
                over = factor(published(file), published(base_file), figure)
                row[where] = over and Estimate(over)
        row["stage"] = card.label
        cards.append(card)
    write_report(
        out,
        "The factor of each optimization, by machine",
        [
            Figure("stage", "stage"),
            *(Figure(name, name, bar=True, over="base") for name in (*machines, *PUBLISHED)),
        ],
        [*rows.values()],
        meaning="The speed of each stage over that of the stage that it changes. Published: the "
        "same step in the a100 series and in the list of timings on one GPU (`logs/reference/`). A "
        "machine that ran another precision in place of bf16 has no factor for bf16.",
        bars="across.svg",
        cards=cards,
    )
