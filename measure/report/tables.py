"""Write reports, tables, files and pictures. Does not import torch."""

import csv
import dataclasses
import datetime
import io
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runtime.errors import TrainingError, UserError
from runtime.files import write_atomic
from runtime.report import (
    COLOURS,
    MARKERS,
    Column,
    Curve,
    field,
    flops_rate,
    git_commit,
    machine,
    markdown_table,
    new_figure,
    plain,
    print_table,
    save_picture,
)

Row = dict[str, Any]


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


TOKENS_PER_SEC = field("tokens/s", "tokens_per_sec", ",.0f")
FLOP_RATE = Column(
    "FLOP rate", lambda row: "" if row["tflops"] is None else flops_rate(row["tflops"])
)
PEAK_MEMORY = field("MB", "peak_memory_mb", ",.0f")


def show_table(title: str, columns: Sequence[Column], rows: Sequence[Any]) -> list[str]:
    """Print a table; returns its lines in markdown, for a report."""
    print_table(title, columns, rows)
    return [*markdown_table(columns, rows), ""]


# ---- files


def write_report(
    path: Path,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Any],
    remarks: Sequence[str],
    *about: str,
) -> None:
    """Print a table and remarks, such as failures, and write them, with paragraphs about them.

    Raises UserError, or TrainingError with the remarks, if there are no rows.
    """
    if not rows:
        kind = TrainingError if remarks else UserError
        raise kind("\n".join([f"{path.parent}: no finished stage to report", *remarks]))
    table = "\n".join(markdown_table(columns, rows))
    text = "\n\n".join([f"# {title}", table, *remarks, *filter(None, about)])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text + "\n")
    print_table(title, columns, rows)
    print("\n".join([*remarks, f"{path} has this table, and there are pictures"]))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all; a Ratio has its median, low and high there."""
    write_atomic(path, json.dumps(content, indent=1, default=dataclasses.asdict) + "\n")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a CSV file, with a column for every key.

    Booleans are written as JSON has them; a Ratio or Mean `x` takes the columns x, x_low and
    x_high.
    """
    lines: list[Row] = []
    for row in rows:
        line: Row = {}
        lines.append(line)
        for name, value in row.items():
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                names = name, f"{name}_low", f"{name}_high"
                line.update(zip(names, dataclasses.astuple(value), strict=True))
            else:
                line[name] = json.dumps(value) if isinstance(value, bool) else value
    text = io.StringIO()
    columns = itertools.chain(*sorted(lines, key=len, reverse=True))  # x_low belongs after x
    writer = csv.DictWriter(text, dict.fromkeys(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomic(path, text.getvalue())


# ---- pictures


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
