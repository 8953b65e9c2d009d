"""Draw the milliseconds of a step, stage after stage, as an SVG picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from measure.report.templates import render
from runtime.files import write_atomic
from runtime.report import Estimate

WIDTH, LEFT, RIGHT = 800, 200, 600  # pixels: the picture, and the ends of its longest bar
TOP, ROW = 66, 30


class StepTime(NamedTuple):
    """The time of a stage's step, and its speed over the stage before."""

    name: str
    ms: float
    factor: Estimate | None  # None for the first stage
    published_ms: float | None


def draw_steps(path: Path, title: str, about: str, steps: Sequence[StepTime]) -> None:
    """Write a bar for each stage: the time of a step, and outlined what the stage takes away."""
    rows, before = [], steps[0].ms
    scale = (RIGHT - LEFT) / max(step.ms for step in steps)
    for i, step in enumerate(steps):
        bar, outline = scale * step.ms, scale * before
        # beside the bar, but not across the end of a short outline
        label = max(bar, outline) if outline - bar < 60 else bar
        rows.append(
            {
                "name": step.name,
                "ms": f"{step.ms:,.0f} ms",
                "factor": f"{step.factor.value:.2f}" if step.factor else "",
                "has_interval": step.factor and step.factor.low is not None,
                "published": f"{step.published_ms:,.0f} ms" if step.published_ms else "",
                "y": TOP + i * ROW,
                "bar": round(bar, 1),
                "saved": round(outline, 1) if outline > bar else 0,
                "label": round(LEFT + label + 8, 1),
            }
        )
        before = step.ms
    parts = {
        "width": WIDTH,
        "height": TOP + ROW * len(rows) + 8,
        "left": LEFT,
        "title": title,
        "about": about,
        "rows": rows,
        "published": "published, another GPU" if any(row["published"] for row in rows) else "",
    }
    write_atomic(path, render("steps.svg", parts))
