"""The rows of a benchmark, the files they are kept in, tables and pictures. Does not import torch.

A row is a flat dict, as the files have it: size, computation, warmup_steps, mixed_precision, the
FIGURES (None where the pass failed), error, times_s, and the settings of `timing.settings`.
"""

import csv
import datetime
import io
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measure.report.report import Figure, Row, write_csv
from runtime.errors import UserError
from runtime.files import write_json
from runtime.report import (
    BLUE,
    COLOURS,
    MARKERS,
    ORANGE,
    Curve,
    draw_bars,
    flops_rate,
    git_commit,
    machine,
    markdown_table,
    new_figure,
    plain,
    print_table,
    save_picture,
)

Key = tuple[str, str, int, bool]  # size, computation, warm-up passes, mixed precision
Means = dict[Key, float]  # seconds
FIGURES = (
    "mean_s",
    "median_s",
    "std_s",  # the population's, as in the published profile
    "min_s",
    "max_s",
    "total_s",
    "steps",
    "tokens_per_sec",
    "tflops",
    "matmul_tflops",  # of a large matmul in the same precision on this device
    "utilization",  # MFU: tflops over matmul_tflops; None if a pass was faster
    "peak_memory_mb",
)


def key_of(row: Row) -> Key:
    """Return what makes two rows of two files the same measurement."""
    return row["size"], row["computation"], row["warmup_steps"], row["mixed_precision"]


def precision(mixed: bool) -> str:
    """Return `mixed` or `full`."""
    return "mixed" if mixed else "full"


def describe_row(row: Row) -> str:
    """Describe what is timed in a row."""
    return f"{row['size']} {row['computation']}, {precision(row['mixed_precision'])} precision"


def about_machine(about: Mapping[str, Any]) -> str:
    """Say where and when something was measured, with the device and the threads of `about`."""
    return (
        f"{machine()}; device {about['device']}, {about['threads']} threads, "
        f"torch {version('torch')}, commit {git_commit()}, {datetime.date.today()}."
    )


def new_folder(log_dir: str) -> Path:
    """Make a fresh folder for the results of a call of bench.py."""
    folder = Path(log_dir) / "bench" / f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder.mkdir(parents=True)
    return folder


# ---- columns


KEY = [
    Figure("size", "size"),
    Figure("computation", "computation"),
    Figure("warmup_steps", "warm"),
    Figure("mixed_precision", "mixed", lambda row: "yes" if row["mixed_precision"] else "no"),
]
TOKENS_PER_SEC = Figure("tokens_per_sec", "tokens/s", ",.0f")
FLOP_RATE = Figure(
    "tflops", "FLOP rate", lambda row: "" if row["tflops"] is None else flops_rate(row["tflops"])
)
RATES = [FLOP_RATE, Figure("utilization", "MFU", ".0%", "against the measured matmul rate")]
PEAK_MEMORY = Figure(
    "peak_memory_mb",
    "MB",
    ",.0f",
    "peak memory in MiB, of the GPU's tensors on CUDA, else of the process",
)
COLUMNS = [
    *KEY,
    Figure("mean_s", "mean, s", lambda row: row["error"] or f"{row['mean_s']:.4g}"),
    *RATES,  # so far what 80 characters of a terminal hold
    *(Figure(f"{name}_s", name, ".4g") for name in ("median", "std", "min", "max", "total")),
    TOKENS_PER_SEC,
    PEAK_MEMORY,
]


def scan_columns(name: str) -> list[Figure]:
    """Return the figures of a scan over the option `name`."""
    return [Figure("", "", describe_row), Figure(name, name), TOKENS_PER_SEC, PEAK_MEMORY, *RATES]


def show_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Print a table; returns its lines in Markdown, for a report."""
    print_table(title, headings, rows)
    return [*markdown_table(headings, rows), ""]


def texts_of(figures: Sequence[Figure], rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the cells of a table."""
    return [f.heading for f in figures], [[f.text(row) for f in figures] for row in rows]


# ---- files


def write_results(rows: Sequence[Row], folder: Path) -> None:
    """Write results.json and results.csv; pandas reads both."""
    write_json(folder / "results.json", rows)
    write_csv(folder / "results.csv", rows)


def read_results(path: Path) -> tuple[Means, Row]:
    """Read the mean of each row of a results file, and its first row. Raises UserError."""
    means: Means = {}
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if path.suffix == ".json" else [*csv.DictReader(io.StringIO(text))]
        for row in rows:
            mixed = str(row["mixed_precision"]).lower() == "true"
            if mean := float(row["mean_s"] or 0):  # else it could not be measured
                means[row["size"], row["computation"], int(row["warmup_steps"]), mixed] = mean
        return means, dict(rows[0])
    except (OSError, LookupError, TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: no results.json or results.csv of bench.py: {error!r}") from None


# ---- beside earlier results


def ratios(means: Means) -> dict[str, float]:
    """Return quotients of rows that carry over to other machines.

    No warm-up over the most, and of rows with that: mixed over full, backward over forward.
    """
    most = max((key[2] for key in means), default=0)
    found: dict[str, float] = {}
    for (size, computation, warmup, mixed), mean in means.items():
        what, bits = f"{size} {computation}", precision(mixed)
        bases: dict[str, Key] = {}  # what the mean is divided by
        if warmup == 0 < most:
            bases[f"warm-up 0 over {most}: {what}, {bits}"] = size, computation, most, mixed
        if warmup == most and mixed:
            bases[f"mixed over full: {what}"] = size, computation, most, False
        if warmup == most and computation == "backward":
            bases[f"backward over forward: {size}, {bits}"] = size, "forward", most, mixed
        found |= {name: mean / means[base] for name, base in bases.items() if base in means}
    return dict(sorted(found.items()))


def compare(rows: Sequence[Row], place: str, theirs: Means, about_them: Row) -> str:
    """Print measured rows beside those of the file `place`, and the ratios within each.

    `about_them` is what is known of how theirs were measured. Returns the report's section.
    """
    columns = [
        *KEY,
        Figure("mean_s", "mean here, s", ".4g"),
        Figure("there_s", "there, s", ".4g"),
        Figure("over_there", "here / there", ".3f"),
    ]
    shared = [
        row | {"there_s": mean, "over_there": row["mean_s"] / mean}
        for row in rows
        if (mean := theirs.get(key_of(row)))
    ]
    lines = [f"## Beside {place}", "", *show_table(f"beside {place}", *texts_of(columns, shared))]
    for name in ("batch_size", "seq_len", "vocab_size", "compile", "flash", "fp16", "device"):
        here, there = str(rows[0][name]), str(about_them.get(name, rows[0][name]))
        if here.lower() != there.lower():
            lines += [f"{name} differs: {here} here, {there} there.", ""]
            print(f"note: {lines[-2]}")
    ours, their = ratios({key_of(row): row["mean_s"] for row in rows}), ratios(theirs)
    both = [(name, f"{ours[name]:.3f}", f"{their[name]:.3f}") for name in ours if name in their]
    if both:
        lines += show_table("ratios within each", ["ratio", "here", "there"], both)
    return "\n".join(lines).rstrip()


# ---- pictures


def draw_times(rows: Sequence[Row], path: Path) -> None:
    """Draw bars of the mean seconds: blue in full precision, orange in mixed."""
    bars = []
    for row in rows:
        name = f"{describe_row(row)}, warm-up {row['warmup_steps']}"
        mean, std = row["mean_s"], row["std_s"]
        colour = ORANGE if row["mixed_precision"] else BLUE
        bars.append((name, mean, f"{mean:.3g}", (mean - std, mean + std), colour))
    meanings = {BLUE: "full precision", ORANGE: "mixed precision"}
    draw_bars(path, bars, "seconds per pass: mean, and one standard deviation", meanings)


def draw_panels(
    path: Path, panels: Mapping[str, Mapping[str, Curve]], xlabel: str, ylabel: str = ""
) -> None:
    """Draw a panel for each title, up to four beside each other: x and y of labelled lines."""
    width = min(4, len(panels))
    height = math.ceil(len(panels) / width)
    size = 4 * width, 3 * height
    picture, grid = new_figure(height, width, figsize=size, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
        axes.set_prop_cycle(color=COLOURS, marker=MARKERS)
        for label, curve in lines.items():
            axes.plot(*curve, markersize=3, alpha=0.7, label=plain(label))
        axes.set_title(title)
        axes.grid(alpha=0.3)
    grid[0, 0].legend()
    picture.supxlabel(xlabel)
    picture.supylabel(ylabel)
    save_picture(picture, path)


def draw_scan(name: str, rows: Sequence[Row], path: Path) -> None:
    """Draw tokens/s and peak memory over the option `name`, a line for each model.

    The rows are sorted by model.
    """
    groups = {model: [*group] for model, group in itertools.groupby(rows, describe_row)}
    panels = {
        title: {
            model: ([row[name] for row in of_model], [row[figure] for row in of_model])
            for model, of_model in groups.items()
        }
        for title, figure in (("tokens/s", "tokens_per_sec"), ("peak memory, MB", "peak_memory_mb"))
    }
    draw_panels(path, panels, name)
