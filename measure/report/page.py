"""A report as one web page, report.html: opened from the disk, without a network.

Each row has its bars and figures; a rung's row also its technique's name, why it helps, the YAML's
changes and the code that its options switch. Below: the loss curves.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from measure.report.pictures import COLOURS
from runtime.files import write_atomic


def write_page(
    path: Path,
    *,
    title: str,
    headline: str = "",
    about: Sequence[str] = (),
    meanings: Sequence[str] = (),
    cards: Sequence[Mapping[str, Any]] = (),
    curves: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the page.

    `about`: the machines. `meanings`: lines that explain the figures. `cards`: a report's rows.
    `curves`: from `curve_of`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "web"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    ends = [factor.ends[1] for card in cards for factor in card["factors"].values()]
    page = environment.get_template("page.html").render(
        title=title,
        headline=headline,
        about=about,
        meanings=meanings,
        cards=cards,
        curves=curves,
        most=1.05 * max([1.0, *ends]),
        colours=COLOURS,
    )
    write_atomic(path, page)


def curve_of(
    label: str,
    steps: Sequence[int],
    losses: Sequence[float],
    times: Sequence[float] = (),
    *,
    tokens_per_step: int | None = None,
    published: bool = False,
) -> dict[str, Any]:
    """Return a curve over steps, tokens and seconds; None for an axis that is not known.

    `times`: milliseconds of each step from the first on.
    """
    is_known = steps and len(times) == len(steps) == steps[-1]
    return {
        "label": label,
        "published": published,
        "steps": [*steps],
        "tokens": tokens_per_step and [step * tokens_per_step for step in steps],
        "seconds": [*itertools.accumulate(ms / 1e3 for ms in times)] if is_known else None,
        "loss": [loss if math.isfinite(loss) else None for loss in losses],
    }
