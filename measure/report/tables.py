"""Write reports, tables, files and pictures. Does not import torch."""

import datetime
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measure.report.report import Figure, Row
from runtime.report import (
    COLOURS,
    MARKERS,
    Curve,
    flops_rate,
    git_commit,
    machine,
    markdown_table,
    new_figure,
    plain,
    print_table,
    save_picture,
)


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


TOKENS_PER_SEC = Figure("tokens_per_sec", "tokens/s", ",.0f")
FLOP_RATE = Figure(
    "tflops", "FLOP rate", lambda row: "" if row["tflops"] is None else flops_rate(row["tflops"])
)
PEAK_MEMORY = Figure(
    "peak_memory_mb",
    "MB",
    ",.0f",
    "peak memory in MiB, of the GPU's tensors on CUDA, else of the process",
)


def show_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Print a table; returns its lines in Markdown, for a report."""
    print_table(title, headings, rows)
    return [*markdown_table(headings, rows), ""]


def texts_of(figures: Sequence[Figure], rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the cells of a table."""
    return [f.heading for f in figures], [[f.text(row) for f in figures] for row in rows]


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
