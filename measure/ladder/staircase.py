"""The staircase of a ladder of speeds: the time that each stage leaves and takes away, for its page
and its picture, and the sentences of its summary.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from measure.ladder.explain import lowered, phrase_of
from measure.ladder.published import published_curve
from measure.ladder.record import LIMITS, Record, Run, curve
from measure.ladder.results import Result, look_up
from measure.ladder.stages import Stage
from measure.report.estimate import SAME, Estimate, three_digits
from measure.report.pictures import WIDTH, Pair, Scale, pair_of
from measure.report.report import Row, Summary
from measure.report.templates import render
from runtime.files import write_atomic

PER = 1024  # tokens whose time is shown, if the stages differ in the tokens of a step
TOTAL = "fastest over first"  # name of this comparison in the record
CLOSE = 1.25  # a prediction is right if it is at most this factor off
CHANGES = 1.15  # a factor beyond it counts when predictions are judged
TOP, LINE = 82, 34  # of the picture, in pixels: the first row, and a row


@dataclass(eq=False)
class Stair:
    """A finished stage on the staircase. Milliseconds are those of a step, or of PER tokens."""

    row: Row
    stage: Stage
    run: Run
    base: "Stair | None"  # None for the first stage, and if there is no factor over the base
    ms: float
    predicted: dict[str, float]  # predicted milliseconds by LIMITS; empty without a prediction

    @property
    def factor(self) -> Estimate:
        """The speed over the base."""
        return self.row.values["over_base"] or Estimate(1.0)

    @property
    def changes_speed(self) -> bool:
        """True unless its factor is 0.95 to 1.05, and its interval, if it has one, contains 1."""
        factor, (low, high) = self.factor, SAME
        is_about_one = low <= factor.value <= high and (factor.low is None or factor.verdict)
        return self.base is None or not is_about_one

    @property
    def predicted_end(self) -> float | None:
        """The milliseconds at which the prediction puts the end of its bar."""
        guess = self.row.values["predicted_over_base"]
        return self.base.ms / guess if self.base and guess else None

    @property
    def published(self) -> float | None:
        """The published speed over the base, of the stage's own series or an A100's."""
        return self.row.values["published_over_base"] or self.row.values["a100_over_base"]

    @property
    def losses(self) -> Pair:
        """The training losses of its run, of its base's, and published ones."""
        ours, theirs = (curve(stair.run.log) for stair in (self, self.base or self))
        return pair_of(ours, theirs, "training loss", published_curve(self.stage.published))


@dataclass
class Staircase:
    """The stages of a ladder of speeds that have finished, at least one."""

    stairs: Sequence[Stair]
    unit: str  # of all times
    total: Estimate | None = None  # of the two stages of `pair`, if these were interleaved

    @property
    def shown(self) -> list[Stair]:
        """The stages that change the speed, and the first."""
        return [stair for stair in self.stairs if stair.changes_speed]

    @property
    def folded(self) -> list[Stair]:
        """The stages that do not change the speed."""
        return [stair for stair in self.stairs if not stair.changes_speed]

    @property
    def folded_text(self) -> str:
        """A sentence on the stages that do not change the speed."""
        factors = [stair.factor.value for stair in self.folded]
        return (
            f"{len(factors)} more, {min(factors):.2f} to {max(factors):.2f} times as fast: they "
            "change what the model learns, or nothing here"
        )

    @property
    def most(self) -> float:
        """The longest time, measured or predicted."""
        return max(max(stair.ms, stair.predicted_end or 0.0) for stair in self.stairs)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places in percent, and texts, of round times."""
        return Scale(0.0, self.most, 0.0, 100.0).ticks

    @property
    def fastest(self) -> Stair:
        """The fastest stage, of those that change the speed and ran where the first did."""
        here = [stair for stair in self.shown if stair.row.values["over_first"]]
        return max(here, key=lambda stair: stair.row.values["over_first"].value)

    @property
    def pair(self) -> Stage | None:
        """The fastest stage with the first one as its base, to interleave the two; None if no stage
        is faster, or if the fastest takes other tokens a step.
        """
        first, best = self.stairs[0].stage, self.fastest.stage
        if best is first or best.tokens_per_step != first.tokens_per_step:
            return None
        return best if best.base is first else replace(best, comparison=TOTAL, base=first)


def staircase_of(record: Record, results: Sequence[Result], rows: Sequence[Row]) -> Staircase:
    """Return the staircase of finished stages, given one row for each."""
    done = [(result.stage, result.run) for result in results if result.run]
    tokens = {row.values["tokens_per_step"] for row in rows}
    stairs = dict[str, Stair]()
    for row, (stage, run) in zip(rows, done, strict=True):
        share = 1.0 if len(tokens) == 1 else PER / row.values["tokens_per_step"]
        guesses = {limit: row.values[f"predicted_{limit}_ms"] for limit in LIMITS}
        stairs[row.name] = Stair(
            row,
            stage,
            run,
            stairs.get(row.base) if row.values["over_base"] else None,
            share * row.values["ms_per_step"],
            {limit: share * ms for limit, ms in guesses.items() if ms is not None},
        )
    size = f"a step of {min(tokens):,}" if len(tokens) == 1 else f"per {PER:,}"
    found = Staircase([*stairs.values()], f"milliseconds {size} tokens")
    if found.pair and (timed := look_up(record, found.pair).comparison):
        found.total = timed.ratio()
    return found


def draw_staircase(path: Path, stairs: Staircase, title: str) -> None:
    """Write the stages that change the speed as a picture: a bar is the time that is left, its
    outline the time that the stage took away.
    """
    rows = [
        (stair, lowered(stair.row.card.title), TOP + LINE * i)
        for i, stair in enumerate(stairs.shown)
    ]
    height = TOP + LINE * len(rows) + (24 if stairs.folded else 0)
    parts = {"width": WIDTH, "height": height, "title": title, "stairs": stairs, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, render("first.svg", parts))


# ---- the summary


def device_of(run: Run) -> str:
    """Name the device of a run, with its article: `an NVIDIA H200`, `an AMD EPYC, 2 cores`."""
    noise = r"; .*|, \d+ GiB.*|\(R\)|\(TM\)| Processor"
    name = re.sub(noise, "", run.summary.place)
    return f"{'an' if name[:1] in 'AEION' else 'a'} {name}"  # NVIDIA begins with a vowel's sound


def summarize(stairs: Staircase) -> Summary:
    """Return the summary of a ladder: how many times as fast, by what, and as predicted?"""
    first, best, device = stairs.stairs[0], stairs.fastest, device_of(stairs.fastest.run)
    values, start = best.row.values, first.row.values
    speed = f"{values['tokens_per_sec']:,.0f} tokens a second"
    if values["utilization"]:
        speed += f", MFU {values['utilization']:.0%}"
    if best is first:
        others = "; no later stage is faster" if len(stairs.stairs) > 1 else ""
        return Summary(f"{three_digits(first.ms)} {stairs.unit} on {device}{others}", f"{speed}.")
    total = stairs.total or values["over_first"]
    times = f"{three_digits(total.value)} times as fast"
    how = "interleaved" if stairs.total or best.base is first else "a product of interleaved ones"
    how = (
        f"in single runs; the factor is {how}, {total}"
        if total.low
        else "a ratio of two single runs"
    )
    if values["tokens_per_step"] != start["tokens_per_step"]:
        how += f", at {start['tokens_per_step']:,} and {values['tokens_per_step']:,} tokens a step"
    memory = values["peak_memory_mb"] / start["peak_memory_mb"]
    return Summary(
        f"{'No clear change of speed' if total.verdict else times} on {device}",
        f"{three_digits(first.ms)} {stairs.unit} became {three_digits(best.ms)} with "
        f"{phrase_of(best.row)}, {how}.{largest(stairs)}",
        f"{speed}, {memory:.2f} of the memory.{judged(stairs)}",
    )


def largest(stairs: Staircase) -> str:
    """Return a sentence on the two largest factors."""
    ranked = sorted(stairs.shown, key=lambda stair: -stair.factor.value)[:2]
    names = [f"{phrase_of(s.row)} ({s.factor.value:.2f})" for s in ranked if s.factor.ends[0] > 1]
    return f" The most came from {' and '.join(names)}." if names else ""


def judged(stairs: Staircase) -> str:
    """Return sentences on the predicted total, and on how often the predictions were right, beside
    predicting no change; empty without predictions.
    """
    first, best = stairs.stairs[0].predicted, stairs.fastest.predicted
    if not (first and best):
        return ""
    changed = [
        (stair.factor.value, stair.row.values["predicted_over_base"])
        for stair in stairs.shown
        if stair.predicted_end and not is_close(stair.factor.value, 1.0, CHANGES)
    ]
    hits = sum(is_close(real, guess) for real, guess in changed)
    null = sum(is_close(real, 1.0) for real, _ in changed)
    total = three_digits(sum(first.values()) / sum(best.values()))
    return (
        f" Predicted before it was timed: {total}. Of the stages that change the speed by more "
        f"than 15%, the prediction is within 25% for {hits} of {len(changed)}; always predicting "
        f"1 would be for {null}."
    )


def is_close(a: float, b: float, most: float = CLOSE) -> bool:
    """True if two factors differ by at most a factor of `most`."""
    return max(a / b, b / a) <= most
