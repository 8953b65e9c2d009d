"""The page of a ladder of losses: its curves, what each stage changes, and its summary."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from measure.ladder.explain import lowered, phrase_of
from measure.report.estimate import Estimate
from measure.report.pictures import Curve, Scale, pair_of, points_of, polyline, span
from measure.report.report import Row, Summary

LABEL = 16  # height of a label beside the chart, in pixels
LEAST = 330  # height of the chart, if its labels need less


class Line(NamedTuple):
    """The mean loss of a stage on the chart. Places are in percent, from the top left."""

    row: Row
    kind: str  # base: the first stage; again: it with other seeds; latest: the last stage; other
    points: str
    end: float  # height of the last loss
    label: float  # height of its label


class Chart(NamedTuple):
    """The mean losses of all stages over the later steps."""

    lines: list[Line]
    height: int  # pixels
    across: Scale
    up: Scale
    goal: float  # the first stage's last loss
    step: float | None  # the last stage reaches that loss here, if it is lower at the end


def page_of(rows: Sequence[Row], means: Mapping[str, Curve], again: str) -> dict[str, Any]:
    """Return what learn.html needs. `means`: the mean losses by stage; `again`: the name of the
    first stage with other seeds, or empty.
    """
    by_name = {row.name: row for row in rows}
    effects = [
        (row, by_name[row.base], pair_of(means[row.name], means[row.base], "validation loss"))
        for row in rows
        if row.values["lower"]
    ]
    both = [(row.values["lower"], row.values.get("among_others")) for row, _, _ in effects]
    ends = [end for value in itertools.chain(*both) if value for end in value.ends]
    return {
        "chart": chart_of(rows, means, again),
        "effects": effects,
        "scale": Scale(*span([0.0, *ends]), 0.0, 100.0),
        "noise": by_name[again].values["lower"] if again in by_name else None,
        "kind_of": kind_of,
        "is_unclear": is_unclear,
        "way_of": way_of,
        "words_of": words_of,
        "interval_of": interval_of,
    }


def chart_of(rows: Sequence[Row], means: Mapping[str, Curve], again: str) -> Chart:
    """Return the chart. It leaves out the first steps, and losses above the first stage's loss in
    the middle of its run, which would hide the differences of the last ones.
    """
    first, last = rows[0].name, rows[-1].name
    steps, goal = sorted(means[first]), rows[0].values["loss"].value
    share = rows[-1].values["tokens_share"]
    step = share.value * steps[-1] if share and last != first and share.value < 1 else None
    early = steps[len(steps) // 5]
    start = max((s for s in steps[:-1] if s <= min(early, step or early)), default=0)
    ends = {row.name: means[row.name][steps[-1]] for row in rows}
    top = max(means[first][steps[len(steps) // 2]], *ends.values())
    lowest = min(min(means[row.name].values()) for row in rows)
    height = max(LEAST, LABEL * (len(rows) + 2))
    across, up = Scale(start, steps[-1], 0.0, 100.0), Scale(*span([lowest, top]), 100.0, 0.0)
    places = apart({name: up.at(loss) for name, loss in ends.items()}, 100 * LABEL / height)
    kinds = {last: "latest", again: "again", first: "base"}
    lines = [
        Line(
            row,
            kinds.get(row.name, "other"),
            polyline(points_of(means[row.name]), across, up),
            up.at(ends[row.name]),
            places[row.name],
        )
        for row in rows
    ]
    return Chart(lines, height, across, up, goal, step)


def apart(places: Mapping[str, float], gap: float) -> dict[str, float]:
    """Return heights of labels near their places, none closer to another than a gap."""
    order = sorted(places, key=lambda name: places[name])
    found, above = dict[str, float](), -math.inf
    for name in order:
        above = found[name] = max(places[name], above + gap)
    below = 100.0 + gap
    for name in reversed(order):
        below = found[name] = min(found[name], below - gap)
    return {name: round(place, 1) for name, place in found.items()}


def kind_of(lower: Estimate) -> str:
    """Return `better` or `worse`, or `none` if the interval contains 0 or is not known."""
    if lower.low is None or lower.low <= 0 <= lower.ends[1]:
        return "none"
    return "better" if lower.value > 0 else "worse"


def is_unclear(lower: Estimate) -> bool:
    """True if a change of the loss has an interval, which contains 0."""
    return lower.low is not None and kind_of(lower) == "none"


def way_of(lower: Estimate) -> str:
    """Return the direction of a change of the loss."""
    return "lower" if lower.value > 0 else "higher"


def words_of(lower: Estimate) -> str:
    """Return a change of the loss in words."""
    return "no clear change" if is_unclear(lower) else f"{abs(lower.value):.3f} {way_of(lower)}"


def interval_of(lower: Estimate) -> str:
    """Return the interval of a change of the loss, in its direction."""
    if lower.low is None:
        return "one seed: no interval"
    low, high = sorted(end if lower.value > 0 else -end for end in lower.ends)
    return f"{low:.3f} to {high:.3f} with 95% confidence"


# ---- the summary


def summarize(rows: Sequence[Row], seeds: int, again: str) -> Summary:
    """Return the summary of a ladder: the tokens that its last stage needs, and by what."""
    first, last = rows[0], rows[-1]
    share, changes = last.values["tokens_share"], [r for r in rows if r.values["lower"]]
    changes = [row for row in changes if row.name != again]
    headline = f"Validation loss {first.values['loss'].value:.3f}"
    if share and share.high is not None and share.high < 1:
        headline = f"The loss of {lowered(first.title)} after {share.value:.2f} of the tokens"
    elif last is not first:
        headline += f" with {lowered(first.title)}, {last.values['loss'].value:.3f} with "
        headline += lowered(last.title)
    runs = f"Means over {seeds} seeds" if seeds > 1 else "One run"
    return Summary(
        headline,
        f"{counted(changes)} {largest(changes)}".strip(),
        f"{runs} of each stage. A loss that is 0.1 lower gives the right token 1.11 times the "
        "probability, as a geometric mean.",
    )


def counted(changes: Sequence[Row]) -> str:
    """Return a sentence on how many stages lower the loss; of a single one, by how much."""
    if len(changes) == 1:
        lower = changes[0].values["lower"]
        unclear = "no clear change, " if is_unclear(lower) else ""
        difference = f"{abs(lower.value):.4f} nats per token {way_of(lower)}, {interval_of(lower)}"
        return f"{changes[0].title}: {unclear}{difference}."
    if any(row.values["lower"].low is None for row in changes):
        return f"{len(changes)} stages with one seed each: no intervals."
    kinds = [kind_of(row.values["lower"]) for row in changes]
    each = {"better": "lower the loss", "worse": "raise it", "none": "show no clear change"}
    texts = [f"{kinds.count(kind)} {words}" for kind, words in each.items() if kind in kinds]
    return f"Of {len(changes)} stages {', '.join(texts)}." if changes else ""


def largest(changes: Sequence[Row]) -> str:
    """Return a sentence on the two stages that lower the loss most, alone among all others too."""
    ranked = sorted(changes, key=lambda row: -row.values["lower"].value)[:2]
    most = [row for row in ranked if kind_of(row.values["lower"]) == "better"]
    if len(changes) < 2 or not most:
        return ""
    names = [f"{phrase_of(row)} ({row.values['lower'].value:.3f})" for row in most]
    text = f"The most came from {' and '.join(names)}."
    among = [each for row in most if (each := row.values.get("among_others"))]
    if len(among) == len(most):
        worth = " and ".join(f"{each.value:.3f}" for each in among)
        text += f" To all the others together they add {worth}."
    return text
