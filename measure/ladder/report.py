"""Report a ladder, an ablation, and ladders of several machines: tables and pictures."""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path

from measure.ladder.quick import SUFFIX
from measure.ladder.rungs import COMPARED, Pair, compare, counterpart, pairs_of
from measure.ladder.stages import Stage, published_rows, series, series_folder
from measure.report.page import (
    INTERVALS,
    card,
    curve_of,
    in_place_of_bf16,
    rung,
    title_of,
    write_ladder_page,
    write_page,
)
from measure.report.tables import (
    PEAK_MEMORY,
    TOKENS_PER_SEC,
    Row,
    draw_panels,
    write_csv,
    write_report,
)
from runtime.errors import UserError
from runtime.report import (
    COLOURS,
    Estimate,
    draw_bars,
    draw_losses,
    field,
    items,
)
from runtime.runlog import EVAL_COLUMNS, curve, read_rows

COLUMNS = [
    field("stage", "stage"),
    TOKENS_PER_SEC,
    field("x base", "over_base"),
    field("x first", "over_first"),
    field("loss", "final_loss", ".3f"),
    PEAK_MEMORY,
    field("predicted", "predicted_over_base", ".2f"),
    field("published", "published_over_base", ".2f"),
    field("A100", "a100_over_base", ".2f"),
    field("diff.", "loss_difference", ".3f"),
    field("ms/step", "ms_per_step", ",.0f"),
    field("base", "base"),
    field("first step, s", "first_step_s", ".1f"),
    field("MFU", "utilization", ".0%"),
    field("published tokens/s", "published_tokens_per_sec", ",.0f"),
]
COLUMNS_EXPLAINED = f"""\
- x base: speed over that of its base, the stage that it changes (or the stage before, where that \
is not in this ladder). {INTERVALS}
- x first: speed over that of the first stage, the product of such factors.
- tokens/s and ms/step: medians without the first steps, which compile and warm up.
- MB: peak memory in MiB, of the GPU's tensors on CUDA, else of the process.
- loss: of the last step, nats per token.
- diff.: mean absolute difference from the published curve over steps {COMPARED[0]} to \
{COMPARED[-1]}, or as many of them as ran. The published speedup1 to 3 did not do \
what their notes claim: `python ladder.py as_logged` compares runs that do.
- MFU: the model's FLOPs per second as a share of what a large matmul reaches on this device.
- predicted: the same factor over the base, before it was timed, from counted work and this \
machine's rates (docs/why.md).
- published: the same factor over the base in the published times, on the GPU of whoever \
published them. Those of the speedup ladder from speedup1 on are not compared: they were read \
without waiting for the GPU. ddp was published of two RTX 4090.
- A100: the factor of the same step in the a100 series."""


def failures_of(parts: Iterable[Stage | Pair]) -> list[str]:
    """Return a line for each stage or pair that failed."""
    return [f"failed: {part.name}: {part.error}" for part in parts if part.error]


def left_out(parts: Iterable[Stage | Pair]) -> list[str]:
    """Return a line for each stage or pair whose stored results do not count, with the reason."""
    return [
        f"note: {part.name} is left out: {place}: {reason}"
        for part in parts
        if not part.error and (reason := part.read()[1])
        for place in [part.folder if isinstance(part, Stage) else part.path]
    ]


# ---- a ladder


def report(
    ladder: str, stages: Sequence[Stage], folder: Path, pairs: Sequence[Pair] = ()
) -> list[str]:
    """Report what is finished, with speed.png and loss.png; returns what failed.

    Raises UserError, or TrainingError after failures, if nothing is finished.
    """
    rows = compare(stages)
    name = f"quick {ladder.removesuffix(SUFFIX)}" if ladder.endswith(SUFFIX) else ladder
    title = "A ladder" if ladder == "ladder" else f"The {name} ladder"
    failures = failures_of([*stages, *pairs])
    alike: dict[str, list[str]] = {}  # the names of the runs of which the same is to be said
    for stage in stages:
        if s := stage.summary():
            tokens = f"{stage.config.batch_size} x {stage.config.seq_len} tokens"
            about = f"{s.steps} steps of {tokens}; {s.about}, {s.day}"
            alike.setdefault(about, []).append(f"`{stage.name}`")
    curves = {
        stage.name: {
            "published": curve(published_rows(stage.published.log)),
            "measured": curve(read_rows(stage.folder / "log.csv")),
        }
        for stage in stages
        if stage.published.log and stage.summary()
    }
    write_report(
        folder / "report.md",
        title,
        [column for column in COLUMNS if any(map(column.cell, rows))],
        rows,
        failures + left_out([*stages, *pairs_of(stages).values()]),
        COLUMNS_EXPLAINED,
        "![what each stage is worth](speed.png)",
        "![loss curves, measured over published](loss.png)" if curves else "",
        in_place_of_bf16(stages),
        "\n".join(f"- {', '.join(names)}: {about}" for about, names in alike.items()),
    )
    write_csv(folder / "results.csv", rows)
    draw_worth(folder / "speed.png", stages, rows)
    if curves:
        draw_panels(folder / "loss.png", curves, "step", "loss, nats per token")
    write_ladder_page(folder / "report.html", title, stages, rows)
    return failures


def draw_worth(path: Path, stages: Sequence[Stage], rows: Sequence[Row]) -> None:
    """Draw the factor of each finished stage over its base, beside that of an A100."""
    rows = rows[1:]
    done = [stage for row in rows for stage in stages if stage.name == row["stage"]]
    series = {"here, over the stage that it changes": [row["over_base"] for row in rows]}
    if any(row["a100_over_base"] for row in rows):
        on_a100 = [row["a100_over_base"] for row in rows]
        series["an A100, published"] = [factor and Estimate(factor) for factor in on_a100]
    summaries = filter(None, (stage.summary() for stage in stages))
    about = dict.fromkeys(f"{summary.machine}, {summary.day}" for summary in summaries)
    if done:
        titles = [title_of(s.name, s.file, s.base.file if s.base else s.file) for s in done]
        names = [f"{title} ({stage.name})" for title, stage in zip(titles, done, strict=True)]
        draw_factors(path, names, series, "; ".join(about))


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
    named = training | {f"{name}, validation": run for name, run in validation.items()}
    curves = [curve_of(name, *run) for name, run in named.items() if run[0]]
    write_page(path.with_suffix(".html"), "Loss curves", "", list(training), [], curves)


# ---- an ablation


WORTH = [
    field("optimization", "optimization"),
    field("on first", "first"),
    field("on last", "last"),
    field("MB without", "memory_mb_without", ",.0f"),
    field("MB with", "memory_mb_with", ",.0f"),
]
WORTH_EXPLAINED = f"""\
- on first: the speed with this optimization alone, over that with none.
- on last: the speed with all of them, over that with all but this one.
- MB: peak memory in MiB with all but this one, and with all.

{INTERVALS}"""


def report_ablation(name: str, pairs: Mapping[str, Sequence[Pair]], folder: Path) -> list[str]:
    """Report two pairs for each optimization: on first, and on last; returns what failed.

    Raises UserError, or TrainingError after failures, if nothing is compared.
    """
    rows: list[Row] = []
    where, drawn = dict[str, None](), dict[str, None]()  # sets in order
    for optimization, (first, last) in pairs.items():
        alone, top = first.result(), last.result()
        for r in filter(None, (alone, top)):
            where[f"{r.machine}; device {r.device}, commit {r.git}"] = None
            drawn[", ".join(filter(None, (r.machine, r.date)))] = None
        without, everything = (s.peak_memory_mb for s in top.sides) if top else (None, None)
        if alone or top:
            rows.append(
                {
                    "optimization": optimization,
                    "first": alone.ratio() if alone else None,
                    "last": top.ratio() if top else None,
                    "memory_mb_without": without,
                    "memory_mb_with": everything,
                }
            )
    failures = failures_of(chain(*pairs.values()))
    write_report(
        folder / "report.md",
        f"What each optimization of {name} is worth",
        WORTH,
        rows,
        failures + left_out(chain(*pairs.values())),
        WORTH_EXPLAINED,
        "\n".join(where),
        "![factors with their intervals](worth.png)",
    )
    write_csv(folder / "results.csv", rows)
    series = {"switched on first": [r["first"] for r in rows], "last": [r["last"] for r in rows]}
    names = [row["optimization"] for row in rows]
    draw_factors(folder / "worth.png", names, series, "; ".join(drawn))
    return failures


# ---- several machines


def across(folders: Sequence[str], out: Path) -> None:
    """Report ladders of several machines, and what was published, beside each other.

    A machine is named after the parent of its ladder's folder. Raises UserError.
    """
    found: dict[str, dict[str, Estimate | None]] = {}  # factors of each stage over its base
    bases: dict[str, str] = {}
    files: dict[str, Path] = {}  # configs of stages and bases, where they are known
    about: list[str] = []  # the machines, each with the last day of its ladder
    for folder in folders:
        name = Path(folder).resolve().parent.name
        name = folder if name in found else name
        found[name], of_stages = read_factors(Path(folder) / "results.csv")
        bases |= of_stages
        files |= configs_of(Path(folder).name.removesuffix(SUFFIX), chain(*of_stages.items()))
        summaries = (path.read_text() for path in Path(folder).glob("*/summary.json"))
        days = re.findall(r'"started": "(.{10})', "".join(summaries))
        about.append(", ".join([name, *sorted(days)[-1:]]))
    stages = list(dict.fromkeys(chain(*found.values())))
    for name, column in {
        "A100, published": "a100_tokens_per_sec",
        "one GPU, published": "gpu_ms",
    }.items():
        known = [stage for stage in stages if stage in files and bases[stage] in files]
        published = {s: counterpart(files[s], files[bases[s]], column) for s in known}
        found[name] = {stage: Estimate(factor) for stage, factor in published.items() if factor}
    series = {name: [factors.get(s) for s in stages] for name, factors in found.items()}
    names, pages = list[str](), []
    for stage in stages:
        factors = {name: of_machine.get(stage) for name, of_machine in found.items()}
        names.append(stage)
        if (file := files.get(stage)) and (base := files.get(bases[stage])):
            pages.append(rung(stage, file, base, factors, {}, {}))
            names[-1] = f"{pages[-1]['title']} ({stage})"
        else:
            pages.append(card(stage, stage, factors, {}, {}))
    rows = [[str(cell or "") for cell in row] for row in zip(names, *series.values(), strict=True)]
    title = "What each optimization is worth where"
    write_report(
        out / "report.md",
        title,
        items("stage", *series),
        rows,
        [],
        f"The speed of each stage over that of the stage that it changes. {INTERVALS} Published: "
        "the same step in the a100 series and in the list of timings on one GPU "
        "(`logs/reference/`).",
        "![factors by stage and machine](across.png)",
    )
    draw_factors(out / "across.png", names, series, "; ".join(about))
    write_page(out / "report.html", title, "", about, pages, [], INTERVALS)


def configs_of(ladder: str, stages: Iterable[str]) -> dict[str, Path]:
    """Return the config of each stage of a series in configs/; of other ladders none is known."""
    place = series_folder(ladder)
    known = {path.stem: path for path in series(place)} if place else {}
    return {stage: known[stage] for stage in stages if stage in known}


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


def draw_factors(
    path: Path,
    names: Sequence[str],
    series: Mapping[str, Sequence[Estimate | None]],
    about: str = "",
) -> None:
    """Draw a bar for the factor of speed that each series has for each name, with its interval.

    `about`: the machine and the date.
    """
    bars = [
        (name, factor.value, str(factor), factor.ends, colour)
        for name, *factors in zip(names, *series.values(), strict=True)
        for factor, colour in zip(factors, cycle(COLOURS), strict=False)
        if factor
    ]
    meanings = dict(zip(COLOURS, series, strict=False))
    if bars:
        draw_bars(path, bars, "factor of speed", meanings, about)
