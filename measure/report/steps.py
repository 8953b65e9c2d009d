"""Draw the milliseconds of a step, stage after stage, as an SVG picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from measure.report.estimate import Estimate
from measure.report.pictures import WIDTH, Scale
from measure.report.templates import render
from runtime.files import write_atomic

LEFT, RIGHT, TOP, ROW = 200, 600, 66, 30  # pixels: ends of the longest bar, first row, height


class StepTime(NamedTuple):
    """The time of a stage's step, and its speed over the stage before."""

    name: str
    ms: float
    factor: Estimate | None  # None for the first stage
    published_ms: float | None


def draw_steps(path: Path, title: str, about: str, steps: Sequence[StepTime]) -> None:
    """Write a bar for each stage: the time of a step, and the saved time as an outline."""
    parts = {
        "width": WIDTH,
        "height": TOP + ROW * len(steps) + 8,
        "title": title,
        "about": about,
        "steps": [(step, TOP + i * ROW) for i, step in enumerate(steps)],
        "scale": Scale(0.0, max(step.ms for step in steps), LEFT, RIGHT),
    }
    write_atomic(path, render("steps.svg", parts))
