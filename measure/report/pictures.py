"""Draw a report's pictures as SVG files. All sizes and places are in pixels."""

import itertools
import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure.report.estimate import Estimate
from measure.report.templates import render
from runtime.files import write_atomic

WIDTH, MARGIN = 800, 16
LEFT, RIGHT = 260, 545  # ends of the longest bar: its name and its figures are beside it
BAR, LINE = 15, 17  # heights of a bar and of a line of text
MOST_POINTS = 500  # of a curve
Curve = dict[int, float]  # values by x, such as steps


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


def legend_of(groups: Iterable[Iterable[str]]) -> dict[str, tuple[int, int, int]]:
    """Return a number and a place for each label, in columns; picture.svg has the numbers' colours
    and dashes.
    """
    labels = [*dict.fromkeys(itertools.chain(*groups))]
    column = 50 + 7 * max(map(len, labels))
    columns = max(1, (WIDTH - 2 * MARGIN) // column)
    return {
        label: (i, MARGIN + i % columns * column, 22 + i // columns * 20)
        for i, label in enumerate(labels)
    }


def draw_bars(path: Path, rows: Mapping[str, Mapping[str, Estimate]], about: str = "") -> None:
    """Draw a group of factors as horizontal bars for each name, hollow without an interval.

    The key of a bar is its legend, the same in all groups. `about`: the machine and the date.
    """
    legend = legend_of(rows.values())
    top = bottom = max(y for _, _, y in legend.values()) + 24
    groups = []
    for name, bars in rows.items():
        lines = textwrap.wrap(name, 32)
        height = max(BAR * len(bars), LINE * len(lines))
        middle = bottom + height / 2
        groups.append((name, centred(lines, middle, LINE), centred([*bars.items()], middle, BAR)))
        bottom += height + 10
    longest = max(bar.ends[1] for bars in rows.values() for bar in bars.values())
    described = textwrap.wrap(about, 120)
    parts = {
        "width": WIDTH,
        "height": bottom + 48 + 16 * len(described),
        "about": described,
        "legend": legend,
        "scale": Scale(0.0, longest, LEFT, RIGHT),
        "groups": groups,
        "ends": (top - 4, bottom),
    }
    write_atomic(path, render("bars.svg", parts))


def centred(items: Sequence[Any], middle: float, size: float) -> list[tuple[Any, float]]:
    """Return each item with the middle of its row; the rows are centred around `middle`."""
    first = middle - size * (len(items) - 1) / 2
    return [(item, first + size * i) for i, item in enumerate(items)]


def draw_panels(path: Path, panels: Mapping[str, Mapping[str, Curve]]) -> None:
    """Draw a panel of loss curves for each title, up to three beside each other.

    A label has the same colour and dashes in all panels.
    """
    legend = legend_of(panels.values())
    columns = min(3, len(panels))
    width = (WIDTH - 2 * MARGIN) / columns
    height = max(140, width / 2)
    top = lower = max(y for _, _, y in legend.values()) + 30.0
    drawn = []
    for i, (title, curves) in enumerate(panels.items()):
        row, column = divmod(i, columns)
        left, lower = MARGIN + width * column, top + 26 + (height + 60) * row + height
        lines = {label: points for label in legend if (points := points_of(curves.get(label, {})))}
        points = [*itertools.chain(*lines.values())]
        across = Scale(*span([x for x, _ in points]), left + 46, left + width - 8)
        up = Scale(*span([y for _, y in points]), lower, lower - height)
        drawn.append((title, lines, across, up))
    parts = {"width": WIDTH, "height": lower + 48, "top": top, "legend": legend, "panels": drawn}
    write_atomic(path, render("curves.svg", parts))


def points_of(curve: Curve) -> list[tuple[int, float]]:
    """Return the finite points of a curve: of a long one, some and the last."""
    points = [(x, y) for x, y in curve.items() if math.isfinite(y)]
    return [*points[: -1 : 1 + len(points) // MOST_POINTS], *points[-1:]]


def span(values: Collection[float]) -> tuple[float, float]:
    """Return the ends of an axis, slightly beyond the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


class Pair(NamedTuple):
    """A curve beside its base's, as a card's small picture of 340 x 166 pixels."""

    what: str
    lines: list[tuple[str, str]]  # class and points: of the base, then its own
    ticks: list[tuple[float, str]]  # heights and texts
    labels: list[tuple[str, float, str]]  # class, height and text at the ends
    steps: tuple[int, int]  # at the ends of the axis
    about: str


def pair_of(own: Curve, base: Curve, what: str) -> Pair:
    """Draw the last two thirds of a curve and of its base's, in nats per token."""
    steps = sorted(own)
    start, end = steps[len(steps) // 3], steps[-1]
    tails = [
        points_of({x: y for x, y in curve.items() if start <= x <= end}) for curve in (base, own)
    ]
    low, high = span([y for tail in tails for _, y in tail])
    across, up = Scale(start, max(end, start + 1), 34, 240), Scale(low, high, 130, 8)
    lines = [" ".join(f"{across.at(x)},{up.at(y)}" for x, y in tail) for tail in tails]
    before, ours = (curve.get(end, math.nan) for curve in (base, own))
    heights = [up.at(y) + 4 if math.isfinite(y) else 69 for y in (before, ours)]
    if abs(before - ours) < 0.0005:
        labels = [("own", heights[1], f"{ours:.3f}, as before")]
    else:
        if abs(heights[0] - heights[1]) < 13:
            middle, up_first = sum(heights) / 2, before >= ours
            heights = [middle - 7, middle + 7] if up_first else [middle + 7, middle - 7]
        texts = (f"{before:.3f} before", f"{ours:.3f} with it")
        labels = [*zip(("base", "own"), heights, texts, strict=True)]
    return Pair(
        what,
        [*zip(("base", "own"), lines, strict=True)],
        up.ticks,
        labels,
        (start, end),
        f"{what}: {ours:.3f} at the end, before {before:.3f}",
    )
