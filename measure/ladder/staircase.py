"""The staircase of a ladder of speeds: the time that each stage leaves and takes away, for its page
and its picture, and the sentences of its summary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measure.ladder.explain import lowered
from measure.ladder.record import LIMITS, Run, curve
from measure.ladder.results import Result
from measure.report.estimate import Estimate
from measure.report.pictures import WIDTH, Pair, Scale, pair_of
from measure.report.report import Row, Summary
from measure.report.tables import markdown_table
from measure.report.templates import render
from runtime.files import write_atomic

PER = 1024  # tokens whose time is shown, if the stages differ in the tokens of a step
CLOSE = 1.25  # a prediction is right if it is at most this factor off
CHANGES = 1.15  # a factor beyond it counts when predictions are judged
# Pixels of the picture: the longest bar, an outline too short for a text, the first row, a row
LONGEST, SHORT, TOP, LINE = 430, 95, 82, 34


@dataclass(eq=False)
class Stair:
    """A finished stage on the staircase. Milliseconds are those of a step, or of PER tokens."""

    row: Row
    run: Run
    base: "Stair | None"  # None for the first stage, and if there is no factor over the base
    ms: float
    ms_text: str
    predicted: dict[str, float]  # predicted milliseconds, by LIMITS; empty without a prediction
    published_ms: float | None  # of a step

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.row.name

    @property
    def title(self) -> str:
        """The title of its technique, or its name."""
        return self.row.card.title or self.name

    @property
    def words(self) -> str:
        """What it changes, within a sentence: `flash attention with a batch of 6`."""
        return " with ".join(filter(None, [lowered(self.title), self.row.card.also]))

    @property
    def factor(self) -> Estimate:
        """The speed over the base."""
        return self.row.values["over_base"] or Estimate(1.0)

    @property
    def predicted_factor(self) -> float | None:
        """The predicted speed over the base."""
        return self.row.values["predicted_over_base"]

    @property
    def published_factor(self) -> float | None:
        """The published speed over the base; on an A100 if that of its own log is not known."""
        values = self.row.values
        return values["published_over_base"] or values["a100_over_base"]

    @property
    def predicted_end(self) -> float | None:
        """The milliseconds at which the prediction puts the end of its bar."""
        if self.base is None or not self.predicted_factor:
            return None
        return self.base.ms / self.predicted_factor

    @property
    def predicted_ms(self) -> float:
        """All predicted milliseconds."""
        return sum(self.predicted.values())

    @property
    def predicted_text(self) -> str:
        """All predicted milliseconds, in three digits."""
        return three_digits(self.predicted_ms)

    @property
    def pieces(self) -> list[tuple[str, float, float]]:
        """Name, start and length in milliseconds of the pieces of its predicted time."""
        starts = [0.0, *(sum([*self.predicted.values()][:i]) for i in (1, 2))]
        pairs = zip(self.predicted.items(), starts, strict=False)
        return [(limit, start, ms) for (limit, ms), start in pairs]

    @property
    def changes_nothing(self) -> bool:
        """True if its factor is about 1."""
        return bool(self.base) and self.factor.is_about_one

    @property
    def longest(self) -> float:
        """The longest time on its card, predicted or measured, before it or with it."""
        both = [self, self.base or self]
        return max(ms for stair in both for ms in (stair.ms, stair.predicted_ms))

    @property
    def losses(self) -> Pair:
        """The training losses of its run and of its base's."""
        ours, theirs = (curve(stair.run.log) for stair in (self, self.base or self))
        return pair_of(ours, theirs, "training loss")

    @property
    def table(self) -> list[tuple[str, str, str]]:
        """Figures before the stage and with it: their names and texts."""
        pair = [(self.base or self).row.values, self.row.values]
        steps = self.row.values["steps"]
        rows = {
            "tokens a second": ("tokens_per_sec", ",.0f"),
            "MFU": ("utilization", ".0%"),
            "peak memory, MiB": ("peak_memory_mb", ",.0f"),
            "first step, s": ("first_step_s", ".1f"),
            f"loss after {steps} steps": ("final_loss", ".3f"),
        }
        return [
            (name, *(format(values[figure], style) for values in pair))  # type: ignore[misc]
            for name, (figure, style) in rows.items()
            if None not in (pair[0].get(figure), pair[1].get(figure))
        ]


def three_digits(value: float) -> str:
    """Format a positive number with at least three digits: `2.39`, `29.2`, `1,234`."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


@dataclass(frozen=True)
class Staircase:
    """The stages of a ladder of speeds that have finished, at least one."""

    stairs: Sequence[Stair]
    is_per_step: bool  # all take the same tokens a step
    total: Estimate | None  # of the fastest stage over the first, if these two were interleaved

    @property
    def unit(self) -> str:
        """The unit of all times."""
        return "milliseconds a step" if self.is_per_step else f"milliseconds per {PER:,} tokens"

    @property
    def shown(self) -> list[Stair]:
        """The stages that change the speed, and the first."""
        return [stair for stair in self.stairs if not stair.changes_nothing]

    @property
    def folded(self) -> list[Stair]:
        """The stages that do not change the speed."""
        return [stair for stair in self.stairs if stair.changes_nothing]

    @property
    def folded_text(self) -> str:
        """A sentence on the stages that do not change the speed."""
        factors = sorted(stair.factor.value for stair in self.folded)
        count = f"{len(factors)} more stages, each" if len(factors) > 1 else "1 more stage,"
        ends = dict.fromkeys(f"{factor:.2f}" for factor in (factors[0], factors[-1]))
        return (
            f"{count} {' to '.join(ends)} times as fast: they change what the model learns, or "
            "nothing here"
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
    def published_heading(self) -> str:
        """The heading of published factors: of the stages' own logs, or of the a100 series."""
        others = [stair.row.values["published_over_base"] for stair in self.stairs if stair.base]
        return "published" if any(others) else "A100"


def staircase_of(
    results: Sequence[Result], rows: Sequence[Row], total: Estimate | None
) -> Staircase:
    """Return the staircase of finished stages, given one row for each."""
    found = {result.stage.name: result for result in results}
    is_per_step = len({row.values["tokens_per_step"] for row in rows}) == 1
    stairs = dict[str, Stair]()
    times = [
        row.values["ms_per_step"] * (1 if is_per_step else PER / row.values["tokens_per_step"])
        for row in rows
    ]
    for row, ms in zip(rows, times, strict=True):
        result = found[row.name]
        assert result.run  # only finished stages have a row
        base = stairs.get(row.base) if row.base != row.name and row.values["over_base"] else None
        predicted = dict[str, float]()
        if guess := result.prediction:
            each = 1e3 if is_per_step else 1e3 * PER / guess.tokens
            predicted = {limit: getattr(guess, limit) * each for limit in LIMITS}
        text = f"{ms:,.0f}" if min(times) >= 10 else three_digits(ms)
        listed = result.stage.published.ms_per_step
        stairs[row.name] = Stair(
            row, result.run, base, ms, text, predicted, listed if is_per_step else None
        )
    return Staircase([*stairs.values()], is_per_step, total)


# ---- the summary


def device_of(run: Run) -> str:
    """Name the device of a run, with its article: `an NVIDIA H200`, `an AMD EPYC, 2 cores`."""
    summary = run.summary
    is_cpu = summary.device in (None, "cpu")
    name = ", ".join(summary.machine.split(", ")[:2]) if is_cpu else str(summary.device)
    name = name.replace("(R)", "").replace("(TM)", "").replace(" Processor", "")
    return f"{'an' if name[:1] in 'AEION' else 'a'} {name}"  # NVIDIA begins with a vowel's sound


def summarize(stairs: Staircase) -> Summary:
    """Return the summary of a ladder: how many times as fast, by what, and as predicted?"""
    first, best = stairs.stairs[0], stairs.fastest
    values, device = best.row.values, device_of(best.run)
    speed = f"{values['tokens_per_sec']:,.0f} tokens a second"
    if values["utilization"]:
        speed += f", MFU {values['utilization']:.0%}"
    if best is first:
        others = "; no later stage is faster" if len(stairs.stairs) > 1 else ""
        return Summary(f"{first.ms_text} {stairs.unit} on {device}{others}", f"{speed}.")
    total = stairs.total or values["over_first"]
    memory = values["peak_memory_mb"] / first.row.values["peak_memory_mb"]
    return Summary(
        f"{total.short} times as fast on {device}",
        f"{how_fast(stairs, total)} {largest(stairs)}".strip(),
        f"{speed}, {memory:.2f} of the memory. {judged(stairs)}".strip(),
        f"How many times as fast on {device}?",
    )


def how_fast(stairs: Staircase, total: Estimate) -> str:
    """Return a sentence on the time of the first and the fastest stage, and on how the total is
    known.
    """
    first, best = stairs.stairs[0], stairs.fastest
    stage = "" if best is stairs.stairs[-1] else f" with {best.words}"
    times = f"{first.ms_text} {stairs.unit} became {best.ms_text}{stage}"
    tokens = [f"{stair.row.values['tokens_per_step']:,}" for stair in (first, best)]
    at = "" if tokens[0] == tokens[1] else f", at {' and '.join(tokens)} tokens a step"
    if total.low is None:
        return f"{times} (a ratio of two single runs{at})."
    is_direct = stairs.total or best.base is first
    how = "interleaved" if is_direct else "by the product of the interleaved factors"
    return f"{times} in single runs; {how} it is {total} times as fast{at}."


def largest(stairs: Staircase) -> str:
    """Return a sentence on the two largest factors up to the fastest stage."""
    until = stairs.stairs[: stairs.stairs.index(stairs.fastest) + 1]
    faster = [stair for stair in until if stair.base and stair.factor.ends[0] > 1]
    two = sorted(faster, key=lambda stair: -stair.factor.value)[:2]
    names = [f"{stair.words} ({stair.factor.short})" for stair in sorted(two, key=until.index)]
    return f"The most came from {' and '.join(names)}." if names else ""


def is_close(a: float, b: float) -> bool:
    """True if two factors differ by at most CLOSE."""
    return max(a / b, b / a) <= CLOSE


def judged(stairs: Staircase) -> str:
    """Return sentences on the predicted total, and on how often the predictions were right, beside
    predicting no change; empty without predictions.
    """
    first, best = stairs.stairs[0], stairs.fastest
    text = ""
    if best is not first and first.predicted and best.predicted:
        total = Estimate(first.predicted_ms / best.predicted_ms)
        text = f"Predicted before it was timed: {total.short}. "
    changed = [
        (stair.words, stair.factor.value, stair.predicted_factor)
        for stair in stairs.stairs
        if stair.base
        and stair.predicted_factor
        and max(stair.factor.value, 1 / stair.factor.value) > CHANGES
    ]
    if not changed:
        return text
    missed = [
        f"{words} ({guess:.2f})" for words, real, guess in changed if not is_close(real, guess)
    ]
    null = sum(is_close(real, 1.0) for _, real, _ in changed)
    but = f", all but {' and '.join(missed)}" if 0 < len(missed) < 3 else ""
    return (
        f"{text}Within 25% for {len(changed) - len(missed)} of the {len(changed)} stages that "
        f"change the speed by more than 15%{but}; predicting 1 for all would be right for {null}."
    )


def markdown_of(stairs: Staircase, summary: Summary, command: str) -> str:
    """Return the summary and a table of the stages that change the speed, to paste elsewhere."""
    headings = ["stage", stairs.unit, "times as fast", "95%", "predicted", stairs.published_heading]
    cells = []
    for stair in stairs.shown:
        guesses = (stair.predicted_factor, stair.published_factor)
        texts = ["" if factor is None else f"{factor:.2f}" for factor in guesses]
        figures = [stair.factor.short, stair.factor.interval, *texts] if stair.base else [""] * 4
        cells.append([stair.row.title, stair.ms_text, *figures])
    run = stairs.stairs[0].run.summary
    about = f"PyTorch {run.torch.partition('+')[0]}, {run.date}. Yours: `{command}`"
    sentences = " ".join(filter(None, [summary.lead, summary.more]))
    table = markdown_table(headings, cells)
    return "\n\n".join([f"**{summary.headline}**", sentences, table, about])


def draw_staircase(path: Path, stairs: Staircase, title: str, about: str) -> None:
    """Write the stages that change the speed as a picture: a bar is the time that is left, its
    outline the time that the stage took away.
    """
    shown, bars = stairs.shown, []
    scale = Scale(0.0, max(stair.ms for stair in shown), 0.0, LONGEST)
    for i, stair in enumerate(shown):
        name = f"+ {lowered(stair.title)}" if stair.base else stair.title
        end, outline = (scale.at((of or stair).ms) for of in (stair, stair.base))
        # beside the bar, but not across the end of a short outline
        label = max(end, outline) if outline - end < SHORT else end
        bars.append((name, stair, TOP + LINE * i, end, outline, label + 8))
    height = TOP + LINE * len(bars) + (28 if stairs.folded else 8)
    parts = {"width": WIDTH, "height": height, "title": title, "about": about}
    write_atomic(path, render("first.svg", parts | {"stairs": stairs, "bars": bars}))
