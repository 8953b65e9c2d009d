"""Tables, files and pictures of a benchmark."""

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path

from measure.profile.timing import Key, Timing
from measure.report.report import Figure, Row, write_csv
from measure.report.tables import (
    FLOP_RATE,
    PEAK_MEMORY,
    TOKENS_PER_SEC,
    draw_panels,
    show_table,
    texts_of,
)
from runtime.errors import UserError
from runtime.files import write_json
from runtime.report import BLUE, ORANGE, draw_bars

Means = dict[Key, float]  # seconds

KEY = [
    Figure("size", "size"),
    Figure("computation", "computation"),
    Figure("warmup_steps", "warm"),
    Figure("mixed_precision", "mixed", lambda row: "yes" if row["mixed_precision"] else "no"),
]
RATES = [FLOP_RATE, Figure("utilization", "MFU", ".0%", "against the measured matmul rate")]
COLUMNS = [
    *KEY,
    Figure("mean_s", "mean, s", ".4g"),
    *RATES,  # a terminal of 80 characters has room up to here
    *(Figure(f"{name}_s", name, ".4g") for name in ("median", "std", "min", "max", "total")),
    TOKENS_PER_SEC,
    PEAK_MEMORY,
]


def scan_columns(name: str) -> list[Figure]:
    """Return the columns of a scan over the option `name`."""
    model = [*KEY[:2], KEY[-1]]
    return [*model, Figure(name, name), TOKENS_PER_SEC, PEAK_MEMORY, *RATES]


# ---- files


def write_results(timings: Sequence[Timing], folder: Path) -> None:
    """Write results.csv, and results.json with the seconds of every pass; pandas reads both."""
    rows = [timing.row() for timing in timings]
    write_csv(folder / "results.csv", rows)
    passes = [row | {"times_s": t.seconds} for row, t in zip(rows, timings, strict=True)]
    write_json(folder / "results.json", passes)


def read_results(path: Path) -> tuple[Means, Row]:
    """Read the mean of each row of a results.csv, and its first row. Raises UserError."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        means = {
            (
                r["size"],
                r["computation"],
                int(r["warmup_steps"]),
                r["mixed_precision"].lower() == "true",
            ): float(r["mean_s"])
            for r in rows
            if r["mean_s"]  # empty after an error
        }
        return means, dict(rows[0])
    except (OSError, LookupError, TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: not a results.csv of bench.py: {error!r}") from None


def compare(timings: Sequence[Timing], place: str, means: Means, first: Row) -> str:
    """Print the timings beside the `means` from the file `place`; returns the report's section.

    `first`: a row of that file, or other settings that it was measured with.
    """
    columns = [
        *KEY,
        Figure("mean_s", "mean here, s", ".4g"),
        Figure("there_s", "there, s", ".4g"),
        Figure("over_there", "here / there", ".3f"),
    ]
    shared = [
        timing.row() | {"there_s": mean, "over_there": timing.mean_s / mean}
        for timing in timings
        if (mean := means.get(timing.key))
    ]
    lines = [f"## Beside {place}", "", *show_table(f"beside {place}", *texts_of(columns, shared))]
    row = timings[0].row()
    for name in ("batch_size", "seq_len", "vocab_size", "compile", "flash", "fp16", "device"):
        here, there = str(row[name]), str(first.get(name, row[name]))
        if here.lower() != there.lower():
            lines += [f"{name} differs: {here} here, {there} there.", ""]
            print(f"note: {lines[-2]}")
    return "\n".join(lines).rstrip()


# ---- pictures


def draw_times(timings: Sequence[Timing], path: Path) -> None:
    """Draw bars of the mean seconds: blue in full precision, orange in mixed."""
    bars = []
    for timing in timings:
        row = timing.row()
        name = f"{timing.job.label}, warm-up {timing.warmup_steps}"
        mean, std = row["mean_s"], row["std_s"]
        colour = ORANGE if row["mixed_precision"] else BLUE
        bars.append((name, mean, f"{mean:.3g}", (mean - std, mean + std), colour))
    meanings = {BLUE: "full precision", ORANGE: "mixed precision"}
    draw_bars(path, bars, "seconds per pass: mean, and one standard deviation", meanings)


def draw_scan(name: str, timings: Sequence[Timing], path: Path) -> None:
    """Draw tokens/s and peak memory over the option `name`, a line for each model.

    The timings are sorted by model.
    """
    groups = {
        label: [timing.row() for timing in group]
        for label, group in itertools.groupby(timings, lambda timing: timing.job.label)
    }
    panels = {
        title: {
            label: ([row[name] for row in rows], [row[figure] for row in rows])
            for label, rows in groups.items()
        }
        for title, figure in (("tokens/s", "tokens_per_sec"), ("peak memory, MB", "peak_memory_mb"))
    }
    draw_panels(path, panels, name)
