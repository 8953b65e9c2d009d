"""What a benchmark found: its rows, the files they are kept in, tables and pictures. Importing it
does not import torch.
"""

import csv
import dataclasses
import datetime
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.files import write_whole
from runtime.report import (
    BLUE,
    COLOURS,
    MARKERS,
    ORANGE,
    Column,
    draw_bars,
    field,
    flops_rate,
    git_commit,
    items,
    machine,
    markdown_table,
    new_figure,
    plain,
    print_table,
    save_picture,
)

Key = tuple[str, str, int, bool]  # size, computation, warm-up passes, mixed precision
Means = dict[Key, float]  # seconds
PUBLISHED_STEPS = 5  # timed passes of each row of the published profile


@dataclasses.dataclass
class Row:
    """A job's result after one number of warm-up passes. Times in seconds, memory in MiB; NaN where
    the job failed.
    """

    size: str
    computation: str
    warmup_steps: int
    mixed_precision: bool
    mean_s: float = math.nan
    median_s: float = math.nan
    std_s: float = math.nan  # the population's, as in the published profile
    min_s: float = math.nan
    max_s: float = math.nan
    total_s: float = math.nan
    steps: int = 0
    tokens_per_sec: float = math.nan
    tflops: float = math.nan  # 10^12 floating-point operations per second
    matmul_tflops: float = (
        math.nan
    )  # what a large matrix product in the same precision reaches on this device
    utilization: float = math.nan  # tflops over matmul_tflops, at most 1
    peak_memory_mb: float = math.nan
    error: str = ""
    times_s: list[float] = dataclasses.field(default_factory=list)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> Key:
        """What makes two rows of two files the same measurement."""
        return self.size, self.computation, self.warmup_steps, self.mixed_precision


def precision(mixed: bool) -> str:
    """Mixed precision or not, in a word."""
    return "mixed" if mixed else "full"


def describe(size: str, computation: str, mixed: bool) -> str:
    """What is timed, for the user."""
    return f"{size} {computation}, {precision(mixed)} precision"


def about_machine(rows: Sequence[Row]) -> str:
    """Where and when the rows were measured."""
    about = next((row.settings for row in rows if not row.error), rows[0].settings)
    return (
        f"{machine()}; device {about.get('device', 'not reached')}, {about['threads']} threads, "
        f"torch {about['torch']}, "
        f"commit {git_commit()}, {datetime.date.today()}."
    )


# ---- columns


def measured(heading: str, name: str, style: str) -> Column:
    """A column that shows a figure of a Row; nothing where the job failed."""
    return Column(heading, lambda row: "" if row.error else format(getattr(row, name), style))


SIZE, COMPUTATION = field("size", "size"), field("computation", "computation")
MIXED = Column("mixed", lambda row: "yes" if row.mixed_precision else "no")
KEY = [SIZE, COMPUTATION, field("warm", "warmup_steps"), MIXED]
MEAN = Column("mean, s", lambda row: row.error or f"{row.mean_s:.4g}")
TOKENS_PER_SEC = measured("tokens/s", "tokens_per_sec", ",.0f")
RATE = Column("FLOP rate", lambda row: "" if row.error else flops_rate(row.tflops))
OF_MATMUL = measured("of matmul", "utilization", ".0%")
PEAK_MEMORY = measured("MB", "peak_memory_mb", ",.0f")
REPORTED = [
    *KEY,
    MEAN,
    measured("median", "median_s", ".4g"),
    measured("std", "std_s", ".4g"),
    measured("min", "min_s", ".4g"),
    measured("max", "max_s", ".4g"),
    measured("total", "total_s", ".4g"),
    TOKENS_PER_SEC,
    RATE,
    OF_MATMUL,
    PEAK_MEMORY,
]
SHOWN = [*KEY, MEAN, RATE, OF_MATMUL]  # what 80 characters of a terminal hold


def scan_columns(name: str) -> list[Column]:
    """The columns of a scan over the option `name`."""
    return [
        Column("", lambda row: describe(row.size, row.computation, row.mixed_precision)),
        Column(name, lambda row: str(row.settings[name])),
        TOKENS_PER_SEC,
        PEAK_MEMORY,
        RATE,
        OF_MATMUL,
    ]


# ---- files


def write_results(rows: Sequence[Row], folder: Path) -> None:
    """Write results.json and results.csv, one object or line for each row; pandas reads both."""
    flat = []
    for row in rows:
        values = dataclasses.asdict(row)
        flat.append(values | values.pop("settings"))
    plain = [
        {name: None if value != value else value for name, value in row.items()} for row in flat
    ]  # None for NaN
    write_whole(folder / "results.json", json.dumps(plain, indent=1, allow_nan=False) + "\n")
    lines = io.StringIO()
    names = list(dict.fromkeys(name for row in plain for name in row if name != "times_s"))
    writer = csv.DictWriter(lines, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in row.items()
        }
        for row in plain
    )
    write_whole(folder / "results.csv", lines.getvalue())


def read_results(path: Path) -> tuple[Means, dict[str, Any]]:
    """The mean of each row of a results file that has one, and what the file says of its first row.
    Raises UserError.
    """
    try:
        text = path.read_text(encoding="utf-8")
        rows = (
            json.loads(text) if path.suffix == ".json" else list(csv.DictReader(text.splitlines()))
        )
        means = {
            (
                row["size"],
                row["computation"],
                int(row["warmup_steps"]),
                str(row["mixed_precision"]).lower() == "true",
            ): float(row["mean_s"])
            for row in rows
            if row["mean_s"] not in (None, "")
        }
        if not all(0 < mean < math.inf for mean in means.values()):
            raise ValueError("a mean_s that is no duration")
        return means, dict(rows[0]) if rows else {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except KeyError as error:
        raise UserError(
            f"{path}: has no column {error.args[0]}; it should be results.json or results.csv of "
            f"bench.py"
        ) from None
    except (TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: not a results file: {error}") from None


# ---- beside earlier results


def ratios(means: Means) -> dict[str, float]:
    """Quotients of rows that say something beyond one machine: no warm-up over warm-up, mixed over
    full precision, backward over forward. The last two are of the rows with the most warm-up.
    """
    found = {}
    most = max((key[2] for key in means), default=0)
    for (size, computation, warmup, mixed), mean in means.items():
        if warmup == 0 and (warm := means.get((size, computation, most, mixed))) and most:
            found[f"warm-up 0 over {most}: {size} {computation}, {precision(mixed)}"] = mean / warm
        if warmup == most and mixed and (full := means.get((size, computation, most, False))):
            found[f"mixed over full: {size} {computation}"] = mean / full
        if (
            warmup == most
            and computation == "backward"
            and (forward := means.get((size, "forward", most, mixed)))
        ):
            found[f"backward over forward: {size}, {precision(mixed)}"] = mean / forward
    return dict(sorted(found.items()))


def compare(
    rows: Sequence[Row], place: str, theirs: Means, their_settings: Mapping[str, Any]
) -> list[str]:
    """Print the rows' means beside those of the results file `place`, and the ratios within each;
    returns both for the report.

    `rows` are measured ones, at least one; `their_settings` are what is known of how theirs were
    measured.
    """
    shared = [row for row in rows if row.key in theirs]
    columns = [
        *KEY,
        field("mean here, s", "mean_s", ".4g"),
        Column("there, s", lambda row: f"{theirs[row.key]:.4g}"),
        Column("here / there", lambda row: f"{row.mean_s / theirs[row.key]:.3f}"),
    ]
    print_table(f"beside {place}", columns, shared)
    lines = [f"## Beside {place}", "", *markdown_table(columns, shared), ""]
    about = rows[0].settings
    for name in ("batch_size", "seq_len", "vocab_size", "compile", "flash", "fp16", "device"):
        if str(their_settings.get(name, about[name])).lower() != str(about[name]).lower():
            difference = f"{name} differs: {about[name]} here, {their_settings[name]} there."
            lines += [difference, ""]
            print(f"note: {difference}")
    here, there = ratios({row.key: row.mean_s for row in rows}), ratios(theirs)
    if within := [
        (name, f"{here[name]:.3f}", f"{there[name]:.3f}") for name in here if name in there
    ]:
        print_table("ratios within each", items("ratio", "here", "there"), within)
        lines += [*markdown_table(items("ratio", "here", "there"), within), ""]
    return lines


# ---- warm-up, and the published profile


@dataclasses.dataclass(frozen=True)
class Spread:
    """The standard deviation of one measurement's passes in seconds, without warm-up and with
    `warmup_steps` passes of it.
    """

    size: str
    computation: str
    mixed_precision: bool
    warmup_steps: int
    without_s: float
    with_s: float


SPREAD = [
    SIZE,
    COMPUTATION,
    MIXED,
    field("passes of warm-up", "warmup_steps"),
    field("std without, s", "without_s", ".4g"),
    field("std with, s", "with_s", ".4g"),
    Column(
        "without / with",
        lambda spread: f"{spread.without_s / spread.with_s:.3g}" if spread.with_s else "",
    ),
]


def spreads(rows: Sequence[Row]) -> list[Spread]:
    """What the most warm-up does to the std of each measurement that was also made without any."""
    warm: dict[tuple[str, str, bool], Row] = {}
    for row in sorted(rows, key=lambda row: row.warmup_steps):
        warm[row.size, row.computation, row.mixed_precision] = row
    pairs = [
        (row, warm[row.size, row.computation, row.mixed_precision])
        for row in rows
        if row.warmup_steps == 0
    ]
    return [
        Spread(
            cold.size,
            cold.computation,
            cold.mixed_precision,
            most.warmup_steps,
            cold.std_s,
            most.std_s,
        )
        for cold, most in pairs
        if most.warmup_steps
    ]


def spread_section(rows: Sequence[Row], *, is_profile: bool) -> list[str]:
    """The report's section on warm-up; nothing where no measurement was made with and without it.

    `is_profile`: add what the published profile found.
    """
    if not (found := spreads(rows)):
        return []
    lines = ["## What warm-up does to the spread", ""]
    if is_profile:
        lines += [
            "The published notes time forward and backward of the small model without warm-up at "
            "a mean of 0.260 s and a "
            "std of 0.077 s (the first pass took 0.414 s), and after one step of warm-up at "
            "0.221 s and 0.0003 s: the reason "
            "to warm up.",
            "",
        ]
    quotients = [spread.without_s / spread.with_s for spread in found if spread.with_s]
    lowered = sum(spread.with_s < spread.without_s for spread in found)
    return [
        *lines,
        f"Here warm-up lowers the std in {lowered} of {len(found)} measurements"
        + (
            f"; the median quotient, without over with, is {statistics.median(quotients):.3g}."
            if quotients
            else "."
        ),
        "",
        *markdown_table(SPREAD, found),
        "",
    ]


def published_section(rows: Sequence[Row], profile: Mapping[str, Any]) -> list[str]:
    """The report's section on what is not like the published code, as far as that is known.

    `rows` are measured ones, at least one; `profile` are the published options.
    """
    about = rows[0].settings
    lines = [
        f"- Device: {about['device']} here; a GPU there that its notes do not name. Seconds do "
        f"not carry over, ratios may.",
        f"- Tokens: random in both, with seed {profile['seed']} there; but that code has a "
        f"generator of its own, so they are "
        f"not the same tokens.",
    ]
    if any(row.mixed_precision and row.settings["bf16"] for row in rows):
        lines.append("- Mixed precision: bfloat16 autocast here, float16 autocast there.")
    if len({row.warmup_steps for row in rows}) > 1:
        lines.append(
            "- Warm-up: rows that differ in warm-up only are of the same passes here; there, "
            "each has passes of its own."
        )
    lines += [
        f"- {name}: {about[name]} here, {value} there."
        for name, value in profile.items()
        if about[name] != value
    ]
    if rows[0].steps != PUBLISHED_STEPS:
        lines.append(f"- Timed passes: {rows[0].steps} here, {PUBLISHED_STEPS} there.")
    if unpublished := {row.size for row in rows} - {"small", "medium"}:
        lines.append(f"- Sizes: {', '.join(sorted(unpublished))} were not published.")
    if any(row.computation == "training_step" for row in rows):
        lines.append("- Computations: training_step was not published.")
    return ["## What is not like the published code", "", *lines, ""]


# ---- pictures


def draw_times(rows: Sequence[Row], path: Path) -> None:
    """Bars of the mean seconds, one for each measured row, blue in full and orange in mixed
    precision.
    """
    names = [
        f"{row.size} {row.computation}, warm-up {row.warmup_steps}, "
        f"{precision(row.mixed_precision)}"
        for row in rows
    ]
    draw_bars(
        path,
        names,
        [row.mean_s for row in rows],
        [f"{row.mean_s:.3g}" for row in rows],
        "seconds per pass: mean, and one standard deviation",
        whiskers=[(row.mean_s - row.std_s, row.mean_s + row.std_s) for row in rows],
        colours=[ORANGE if row.mixed_precision else BLUE for row in rows],
        meanings={BLUE: "full precision", ORANGE: "mixed precision"},
    )


def draw_scan(name: str, rows: Sequence[Row], path: Path) -> None:
    """Tokens/s and peak memory over the values of the option `name`, a line for each model and
    precision.
    """
    figure, both = new_figure(1, 2, figsize=(9, 3.6))
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(describe(row.size, row.computation, row.mixed_precision), []).append(row)
    ticks = sorted({row.settings[name] for row in rows})
    for axes, what, figure_of in zip(
        both, ("tokens/s", "peak memory, MB"), ("tokens_per_sec", "peak_memory_mb"), strict=True
    ):
        axes.set_prop_cycle(color=COLOURS, marker=MARKERS)
        for label, points in lines.items():
            axes.plot(
                [row.settings[name] for row in points],
                [getattr(row, figure_of) for row in points],
                label=plain(label),
            )
        axes.set(xlabel=name, ylabel=what)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(value) for value in ticks])
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    both[0].legend(fontsize=8)
    save_picture(figure, path)
