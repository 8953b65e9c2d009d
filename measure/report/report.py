"""One report from figures declared once: console, report.md, results.csv, picture, page."""

import csv
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure.report.pictures import draw_bars
from measure.report.tables import markdown_table, print_table
from measure.report.templates import render
from runtime.errors import TrainingError
from runtime.files import write_atomic
from runtime.report import Estimate

Row = dict[str, Any]
INTERVALS = (
    "In brackets: the interval that contains the true median with 95% confidence, from interleaved "
    'runs of both; an interval that contains 1 is "no difference" within 0.95 to 1.05, else '
    '"unclear". A factor without brackets compares runs that came one after the other: a machine '
    "whose speed drifts produces such factors too."
)


class Figure(NamedTuple):
    """A figure of every row: the row's key, and how all parts of a report show and explain it."""

    name: str
    heading: str
    style: str | Callable[[Row], str] = ""  # a format such as ",.0f", or a row's text
    meaning: str = ""
    bar: bool = False  # a factor, drawn as a bar with its interval
    over: str = ""  # the row that a factor compares with: base, first or a name

    def text(self, row: Row) -> str:
        """Format the figure of a row; empty without one."""
        if callable(self.style):
            return self.style(row)
        value = row.get(self.name)
        return "" if value is None else format(value, self.style)

    def factor(self, row: Row) -> Estimate | None:
        """Return the figure of a row to draw as a bar; None if the row compares with itself."""
        value = row.get(self.name)
        factor = value if value is None or isinstance(value, Estimate) else Estimate(value)
        name = next(iter(row.values()))
        return None if factor == Estimate(1.0) and row.get("base", name) == name else factor


class Card(NamedTuple):
    """The page's explanation of a row."""

    name: str
    title: str
    base: str = ""
    why: Sequence[str] = ()
    yaml: str = ""
    code: Sequence[tuple[str, int, str]] = ()  # file, line, text
    ran: str = ""  # sizes of the model and of the run

    @property
    def label(self) -> str:
        """The name in pictures."""
        return self.name if self.title == self.name else f"{self.title} ({self.name})"


PEAK_MEMORY = Figure(
    "peak_memory_mb",
    "MB",
    ",.0f",
    "peak memory in MiB, of the GPU's tensors on CUDA, else of the process",
)


def write_report(
    folder: Path,
    title: str,
    figures: Sequence[Figure],  # the first one names the row
    rows: Sequence[Row],
    *,
    ran: str = "",  # sizes of the model and of the run
    result: str = "",  # the whole report in a sentence
    remarks: Sequence[str] = (),  # failures and notes
    about: Sequence[str] = (),  # machines and versions
    meaning: str = "",  # explains all figures together
    pictures: Mapping[str, str] = {},  # caption by file
    bars: str = "",  # file for a picture of the bars
    where: str = "",  # machine and date, for that picture and the page
    cards: Sequence[Card] = (),  # one per row
    curves: Sequence[Mapping[str, Any]] = (),  # from curve_of
    learns: bool = False,  # the page shows the curves first
) -> None:
    """Print a table of figures, and write it with all that explains it: report.md, report.html,
    results.csv, and a picture of the bars. Raises TrainingError without rows.
    """
    if not rows:
        nothing = f"{folder}: no finished stage to report"
        raise TrainingError("\n".join([nothing, *remarks]))
    figures = [figure for figure in figures if any(map(figure.text, rows))]
    headings = [figure.heading for figure in figures]
    cells = [[figure.text(row) for figure in figures] for row in rows]
    cards = cards or [Card(name, name) for name, *_ in cells]
    drawn = [figure for figure in figures if figure.bar]
    factors = [
        {figure: factor for figure in drawn if (factor := figure.factor(row))} for row in rows
    ]
    rungs = [*zip(cards, factors, rows, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    if bars and any(factors):
        pictures = {bars: "factors with their intervals", **pictures}
        factors_of = {
            card.label: {figure.heading: factor for figure, factor in of_row.items()}
            for card, of_row, _ in rungs
            if of_row
        }
        draw_bars(folder / bars, factors_of, where)
    parts = {
        "title": title,
        "lead": [*filter(None, [ran, result])],
        "table": markdown_table(headings, cells),
        "where": where,
        "about": about,
        "remarks": remarks,
        "meanings": [f"{figure.heading}: {figure.meaning}" for figure in figures if figure.meaning],
        "notes": [*filter(None, [meaning, INTERVALS if drawn and not learns else ""])],
        "pictures": pictures,
        "figures": figures,
        "rungs": rungs,
        "curves": curves,
        "learns": learns,
    }
    write_atomic(folder / "report.md", render("report.md", parts))
    write_atomic(folder / "report.html", render("page.html", parts))
    write_csv(folder / "results.csv", rows)
    print_table(title, headings, [*map(brief, itertools.repeat(figures), cells, cards)])
    print(*remarks, f"{folder}: report.html, report.md and results.csv", sep="\n")
    if result:
        print(result)


def brief(figures: Sequence[Figure], cells: Sequence[str], card: Card) -> list[str]:
    """Return a row's cells for a terminal: with its title, and the total without an interval."""
    name, *others = cells
    label = name if card.title == card.name else f"{name}: {card.title}"
    totals = [figure.over == "first" and not figure.bar for figure in figures[1:]]
    return [
        label,
        *(
            c.partition(" (")[0] if is_total else c
            for c, is_total in zip(others, totals, strict=True)
        ),
    ]


def curve_of(
    label: str,
    losses: Mapping[int, float],
    tokens_per_step: int,
    times: Mapping[int, float],
    *,
    published: bool = False,
) -> dict[str, Any]:
    """Return a loss curve over steps, tokens and seconds, for the page.

    `times`: milliseconds of each step; without all of them there are no seconds.
    """
    steps = [*losses]
    is_known = steps and len(times) == len(steps) == steps[-1]
    return {
        "label": label,
        "published": published,
        "steps": steps,
        "tokens": [step * tokens_per_step for step in steps],
        "seconds": [*itertools.accumulate(ms / 1e3 for ms in times.values())] if is_known else None,
        "loss": [loss if math.isfinite(loss) else None for loss in losses.values()],
    }


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a CSV file with a column for every key, except lists.

    An Estimate `x` takes the columns x, x_low and x_high.
    """
    lines = list[Row]()
    for row in rows:
        line: Row = {}
        for name, value in row.items():
            if isinstance(value, Estimate):
                line |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
            elif not isinstance(value, list):
                line[name] = value
        lines.append(line)
    text = io.StringIO()
    columns = itertools.chain(*sorted(lines, key=len, reverse=True))  # x_low belongs after x
    writer = csv.DictWriter(text, dict.fromkeys(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomic(path, text.getvalue())
