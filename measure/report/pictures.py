"""Draw a report's pictures as SVG files. All sizes and places are in pixels."""

import itertools
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure.report.templates import render
from runtime.files import write_atomic
from runtime.report import Estimate

WIDTH, MARGIN = 800, 16
COLOURS = 7  # in picture.svg
DASHES = ("", "7 3", "2 3", "9 3 2 3")  # distinct in print too
LEFT, RIGHT = 260, 545  # ends of the longest bar: its name and its figures are beside it
BAR, LINE = 15, 17  # heights of a bar and of a line of text
MOST_POINTS = 500  # of a curve
Curve = dict[int, float]  # values by x, such as steps
Legend = dict[str, dict[str, Any]]  # place, colour and dashes of each label


class Scale(NamedTuple):
    """An axis: the values at its ends, and the places of its ends."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the place of a value."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places and texts of round values, at most seven."""
        least = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(least))
        step = next((n * power for n in (1, 2, 5) if n * power >= least), 10 * power)
        numbers = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return [(self.at(n * step), f"{n * step:,.10g}") for n in numbers]


def legend_of(labels: Sequence[str]) -> Legend:
    """Place the entries of a legend in columns."""
    column = 50 + 7 * max(map(len, labels))
    columns = max(1, (WIDTH - 2 * MARGIN) // column)
    return {
        label: {
            "colour": i % COLOURS,
            "dash": DASHES[i % len(DASHES)],
            "x": MARGIN + i % columns * column,
            "y": 22 + i // columns * 20,
        }
        for i, label in enumerate(labels)
    }


# ---- bars


def draw_bars(
    path: Path,
    rows: Mapping[str, Mapping[str, Estimate]],
    about: str = "",
) -> None:
    """Draw a group of factors as horizontal bars for each name, hollow without an interval.

    The key of a bar is its legend, the same in all groups. `about`: the machine and the date.
    """
    legend = legend_of([*dict.fromkeys(itertools.chain(*rows.values()))])
    longest = max(bar.ends[1] for bars in rows.values() for bar in bars.values())
    scale = Scale(0.0, longest, LEFT, RIGHT)
    top = bottom = max(entry["y"] for entry in legend.values()) + 24
    groups = []
    for name, bars in rows.items():
        lines = textwrap.wrap(name, 32)
        height = max(BAR * len(bars), LINE * len(lines))
        middle = bottom + height / 2
        groups.append(
            {
                "name": name,
                "lines": [*zip(lines, rows_around(middle, len(lines), LINE), strict=True)],
                "bars": bars_of(bars, middle, legend, scale),
            }
        )
        bottom += height + 10
    described = textwrap.wrap(about, 120)
    parts = {
        "width": WIDTH,
        "height": bottom + 48 + 16 * len(described),
        "title": "factor of speed",
        "about": described,
        "legend": legend,
        "ticks": scale.ticks,
        "groups": groups,
        "box": (LEFT, RIGHT, top - 4, bottom),
    }
    write_atomic(path, render("bars.svg", parts))


def rows_around(middle: float, count: int, size: float) -> list[float]:
    """Return the middles of rows that are centred around `middle`."""
    return [middle + size * (i - (count - 1) / 2) for i in range(count)]


def bars_of(
    bars: Mapping[str, Estimate],
    middle: float,
    legend: Legend,
    scale: Scale,
) -> list[dict[str, Any]]:
    """Return the places of a group's bars and of their intervals, and their figures as text."""
    places = []
    for y, (label, bar) in zip(rows_around(middle, len(bars), BAR), bars.items(), strict=True):
        low, high = bar.ends
        places.append(
            {
                "legend": label,
                "colour": legend[label]["colour"],
                "y": y,
                "width": round(scale.at(bar.value) - LEFT, 1),
                "interval": (scale.at(low), scale.at(high)) if low < high else None,
                "label": str(bar),
                "label_x": scale.at(high) + 8,
            }
        )
    return places


# ---- curves


def draw_panels(path: Path, panels: Mapping[str, Mapping[str, Curve]]) -> None:
    """Draw a panel of loss curves for each title, up to three beside each other.

    A label has the same colour and dashes in all panels.
    """
    legend = legend_of([*dict.fromkeys(itertools.chain(*panels.values()))])
    columns = min(3, len(panels))
    width = (WIDTH - 2 * MARGIN) / columns
    height = max(140, width / 2)
    top = max(entry["y"] for entry in legend.values()) + 30
    drawn = list[dict[str, Any]]()
    lower = 0.0
    for i, (title, curves) in enumerate(panels.items()):
        row, column = divmod(i, columns)
        left, upper = MARGIN + width * column, top + 26 + (height + 60) * row
        lower = upper + height
        box = left + 46, left + width - 8, upper, lower
        drawn.append({"title": title, "box": box, **panel_of(curves, legend, box)})
    parts = {
        "width": WIDTH,
        "height": lower + 48,
        "top": top,
        "title": f"{', '.join(panels)}: loss in nats per token",
        "legend": legend,
        "panels": drawn,
    }
    write_atomic(path, render("curves.svg", parts))


def panel_of(
    curves: Mapping[str, Curve],
    legend: Legend,
    box: tuple[float, float, float, float],
) -> dict[str, Any]:
    """Return the ticks and curves of a panel, whose box has the places left, right, upper, lower.

    Values that are not finite are left out.
    """
    finite = {
        label: {x: y for x, y in curve.items() if math.isfinite(y)}
        for label, curve in curves.items()
    }
    left, right, upper, lower = box
    across = Scale(*span([*itertools.chain(*finite.values())]), left, right)
    up = Scale(*span([y for curve in finite.values() for y in curve.values()]), lower, upper)
    lines = []
    for label, entry in legend.items():
        if points := [*finite.get(label, {}).items()]:
            shown = [*points[: -1 : 1 + len(points) // MOST_POINTS], points[-1]]
            places = [(across.at(x), up.at(y)) for x, y in shown]
            last = f"{points[-1][1]:,.4g}"
            lines.append({**entry, "label": label, "points": places, "last": last})
    return {"x_ticks": across.ticks, "y_ticks": up.ticks, "lines": lines}


def span(values: Collection[float]) -> tuple[float, float]:
    """Return the ends of an axis, slightly beyond the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin
