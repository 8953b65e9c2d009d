"""Draw a report's pictures as PNG files. Imports matplotlib, which takes a second, when drawing."""

import itertools
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.report import Estimate

# Okabe and Ito (2008): distinct for the colour-blind too
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]  # distinct in print too
Curve = dict[int, float]  # values by x, such as steps


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure; sizes are in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["text.parse_math"] = False  # a name may contain $
    return Figure(figsize=(width, height), layout="constrained")


def draw_panels(
    path: Path,
    panels: Mapping[str, Mapping[str, Curve]],
    xlabel: str = "step",
    ylabel: str = "loss, nats per token",
) -> None:
    """Draw a panel of labelled curves for each title, up to four beside each other.

    A label has the same colour, marker and dashes in all panels.
    """
    from matplotlib.rcsetup import cycler

    styles = cycler(linestyle=["-", "--"]) * cycler(color=COLOURS, marker=MARKERS)
    columns = min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    picture = new_figure(max(8, 4 * columns), max(5, 3 * rows))
    labels = [*dict.fromkeys(itertools.chain(*panels.values()))]
    for number, (title, curves) in enumerate(panels.items(), 1):
        axes = picture.add_subplot(rows, columns, number, title=title)
        axes.set_prop_cycle(styles)
        for label in labels:  # a missing one is drawn without points, so that the cycle stays
            curve = curves.get(label, {})
            size = 3 if len(curve) <= 100 else 0  # markers of many points would hide the line
            axes.plot([*curve], [*curve.values()], markersize=size, alpha=0.7, label=label)
        axes.grid(alpha=0.3)
    picture.legend(handles=axes.get_lines(), loc="outside upper center", ncols=3)
    picture.supxlabel(xlabel)
    picture.supylabel(ylabel)
    picture.savefig(path, dpi=130)


def draw_bars(
    path: Path,
    rows: Mapping[str, Mapping[str, Estimate]],
    xlabel: str,
    about: str = "",
    style: str = "",
) -> None:
    """Draw a row of horizontal bars for each name, the first on top, hollow without an interval.

    The key of a bar is its legend, the same in all rows. `about`: the machine and the date.
    """
    legends = [*dict.fromkeys(itertools.chain(*rows.values()))]
    picture = new_figure(8, 1.3 + 0.16 * sum(len(bars) + 0.8 for bars in rows.values()))
    axes = picture.add_subplot()
    drawn: dict[str, Any] = {}
    middles, y = [], 0.0
    for bars in rows.values():
        middles.append(y + (len(bars) - 1) / 2)
        for legend, factor in bars.items():
            colour = COLOURS[legends.index(legend) % len(COLOURS)]
            low, high = factor.ends
            bar = axes.barh(
                y,
                factor.value,
                0.9,
                color="none" if low == high else colour,
                edgecolor=colour,
                xerr=[[factor.value - low], [high - factor.value]],
            )
            axes.bar_label(bar, [format(factor, style)], padding=4, fontsize=8)
            drawn.setdefault(legend, bar)
            y += 1
        y += 0.8  # the gap to the next row
    axes.set_yticks(middles, [textwrap.fill(name, 45) for name in rows])
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel(xlabel)
    axes.spines[["top", "right"]].set_visible(False)
    picture.legend([*drawn.values()], legends, loc="outside upper right", ncols=len(legends))
    picture.supxlabel(about, fontsize=7, color="0.4", x=0.01, ha="left")
    picture.savefig(path, dpi=130, bbox_inches="tight")  # labels may reach beyond the axes
