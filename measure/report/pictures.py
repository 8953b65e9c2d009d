"""Draw a report's pictures as PNG files. Imports matplotlib, which takes a second, when drawing."""

import itertools
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Okabe and Ito (2008): distinct for the colour-blind too
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]  # distinct in print too
LOSS = "loss, nats per token"  # label of an axis
Curve = dict[int, float]  # values by x, such as steps
Bar = tuple[float, str, tuple[float, float]]  # length, label, interval


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure; sizes are in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["text.parse_math"] = False  # a name may contain $
    return Figure(figsize=(width, height), layout="constrained")


def draw_panels(
    path: Path, panels: Mapping[str, Mapping[str, Curve]], xlabel: str, ylabel: str = ""
) -> None:
    """Draw a panel of labelled curves for each title, up to four beside each other.

    A label has the same colour and marker in all panels.
    """
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    picture = new_figure(max(8, 4 * columns), max(5, 3 * rows))
    labels = [*dict.fromkeys(itertools.chain(*panels.values()))]
    drawn: dict[str, Any] = {}
    for number, (title, curves) in enumerate(panels.items(), 1):
        axes = picture.add_subplot(rows, columns, number, title=title)
        for label, curve in curves.items():
            look = labels.index(label) % len(COLOURS)
            size = 3 if len(curve) <= 100 else 0  # markers of many points would hide the line
            (drawn[label],) = axes.plot(
                [*curve],
                [*curve.values()],
                color=COLOURS[look],
                marker=MARKERS[look],
                markersize=size,
                alpha=0.7,
                label=label,
            )
        axes.grid(alpha=0.3)
    picture.legend(handles=[*drawn.values()], loc="outside upper center", ncols=3)
    picture.supxlabel(xlabel)
    picture.supylabel(ylabel)
    picture.savefig(path, dpi=130)


def draw_bars(
    path: Path, rows: Mapping[str, Mapping[str, Bar]], xlabel: str, about: str = ""
) -> None:
    """Draw a row of horizontal bars for each name, the first on top, hollow without an interval.

    The key of a bar is its legend, the same in all rows. `about`: the machine and the date.
    """
    heights = [len(bars) + 0.8 for bars in rows.values()]  # in bars, with the gap to the next row
    picture = new_figure(8, 1.3 + 0.16 * sum(heights))
    axes = picture.add_subplot()
    legends = [*dict.fromkeys(itertools.chain(*rows.values()))]
    drawn: dict[str, Any] = {}
    middles, top = [], 0.0
    for bars, height in zip(rows.values(), heights, strict=True):
        middles.append(top + (len(bars) - 1) / 2)
        for i, (legend, (length, label, (low, high))) in enumerate(bars.items()):
            colour = COLOURS[legends.index(legend) % len(COLOURS)]
            bar = axes.barh(
                top + i,
                length,
                0.9,
                color="none" if low == high else colour,
                edgecolor=colour,
                xerr=[[length - low], [high - length]],
                label=legend,
            )
            axes.bar_label(bar, [label], padding=4, fontsize=8)
            drawn.setdefault(legend, bar)
        top += height
    axes.set_yticks(middles, [textwrap.fill(name, 45) for name in rows])
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel(xlabel)
    axes.spines[["top", "right"]].set_visible(False)
    picture.legend(
        handles=[drawn[legend] for legend in legends], loc="outside upper right", ncols=len(legends)
    )
    picture.supxlabel(about, fontsize=7, color="0.4", x=0.01, ha="left")
    picture.savefig(path, dpi=130, bbox_inches="tight")  # labels may reach beyond the axes
