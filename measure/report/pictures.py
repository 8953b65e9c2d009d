"""Draw a report's pictures as SVG files. All sizes and places are in pixels."""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from measure.report.templates import render
from runtime.files import write_atomic

WIDTH, MARGIN = 800, 16
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


def polyline(points: Iterable[tuple[int, float]], across: Scale, up: Scale) -> str:
    """Return the places of a curve's points, as an SVG's polyline has them."""
    return " ".join(f"{across.at(x)},{up.at(y)}" for x, y in points)


def span(values: Collection[float]) -> tuple[float, float]:
    """Return the ends of an axis, slightly beyond the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


class Pair(NamedTuple):
    """A curve beside its base's, as a card's small picture of 250 x 166 pixels."""

    what: str
    lines: dict[str, str]  # points by class: published, base, own
    ticks: list[tuple[float, str]]  # heights and texts
    steps: tuple[int, int]  # at the ends of the axis
    last: dict[str, float]  # the last values by class


def pair_of(own: Curve, base: Curve, what: str, published: Curve | None = None) -> Pair:
    """Draw the last two thirds of a curve, of its base's and of a published one."""
    steps = sorted(own)
    start, end = steps[len(steps) // 3], steps[-1]
    tails = {
        kind: points_of({x: y for x, y in curve.items() if start <= x <= end})
        for kind, curve in (("published", published or {}), ("base", base), ("own", own))
    }
    across = Scale(start, max(end, start + 1), 34, 240)
    up = Scale(*span([y for tail in tails.values() for _, y in tail]), 130, 8)
    lines = {kind: polyline(tail, across, up) for kind, tail in tails.items()}
    last = {"own": own[end], "base": base.get(end, math.nan)}
    return Pair(what, lines, up.ticks, (start, end), last)
