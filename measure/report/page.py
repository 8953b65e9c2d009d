"""A report as one web page, report.html: opened from the disk, without a network.

At its top a view: all factors in one picture. Each row has a card with its figures; a rung's card
also its technique's name, the YAML's changes, the code that its options switch, and why it helps.
The loss curves come last, or first in a report on learning.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from runtime.files import write_atomic


def write_page(path: Path, *, rungs: Sequence[tuple[Any, ...]] = (), **parts: Any) -> None:
    """Write the page with the parts of a report; all but `title` may be missing.

    `where`: the machine. `about`: lines on the runs. `meanings`: lines that explain the `figures`.
    `rungs`: the card, the factors to draw, and the row of each row. `curves`: from `curve_of`.
    `learns`: the curves come first.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "web"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    ends = [end for _, factors, _ in rungs for factor in factors.values() for end in factor.ends]
    more = {"rungs": rungs, "ends": [0.9, 1.1, *ends], "log": math.log}
    page = environment.get_template("page.html").render(parts, **more)
    write_atomic(path, page)


def curve_of(
    label: str,
    losses: Mapping[int, float],
    tokens_per_step: int | None = None,
    times: Mapping[int, float] | None = None,
    *,
    published: bool = False,
) -> dict[str, Any]:
    """Return a curve over steps, tokens and seconds; None for an axis that is not known.

    `times`: milliseconds of each step, all of which are needed for an axis of seconds.
    """
    steps, times = [*losses], times or {}
    is_known = steps and len(times) == len(steps) == steps[-1]
    return {
        "label": label,
        "published": published,
        "steps": steps,
        "tokens": tokens_per_step and [step * tokens_per_step for step in steps],
        "seconds": [*itertools.accumulate(ms / 1e3 for ms in times.values())] if is_known else None,
        "loss": [loss if math.isfinite(loss) else None for loss in losses.values()],
    }
