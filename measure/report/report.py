"""One report from figures declared once: console, report.md, results.csv, picture, page."""

import csv
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from measure.report.estimate import Estimate
from measure.report.pictures import draw_bars
from measure.report.tables import markdown_table, print_table
from measure.report.templates import render
from runtime.errors import TrainingError
from runtime.files import write_atomic

Values = Mapping[str, Any]
INTERVALS = (
    "In brackets: the interval that contains the true median with 95% confidence, from interleaved "
    'runs of both; an interval that contains 1 is "no difference" within 0.95 to 1.05, else '
    '"unclear". A factor without brackets compares runs that came one after the other: a machine '
    "whose speed drifts produces such factors too."
)


class Card(NamedTuple):
    """The page's explanation of a row."""

    title: str
    why: Sequence[str] = ()
    yaml: str = ""
    code: Sequence[tuple[str, int, str]] = ()  # file, line, text
    ran: str = ""  # sizes of the model and of the run


class Row(NamedTuple):
    """A row of a report: its name, its figures by their names, and its card."""

    name: str
    values: dict[str, Any]
    card: Card = Card("")

    @property
    def title(self) -> str:
        """The title of its card, or its name."""
        return self.card.title or self.name

    @property
    def label(self) -> str:
        """The name in pictures."""
        return self.name if self.title == self.name else f"{self.title} ({self.name})"

    @property
    def base(self) -> str:
        """The name of the row that it changes; its own or empty if there is none."""
        return self.values.get("base", "")


class Figure(NamedTuple):
    """A figure of every row: its name, and how all parts of a report show and explain it."""

    name: str
    heading: str
    style: str | Callable[[Values], str] = ""  # a format such as ",.0f", or the text of a row
    meaning: str = ""
    bar: bool = False  # a factor, drawn as a bar with its interval
    over: str = ""  # the row that a factor compares with: base, first or a name

    def text(self, row: Row) -> str:
        """Format the figure of a row; empty without one."""
        if callable(self.style):
            return self.style(row.values)
        value = row.values.get(self.name)
        return "" if value is None else format(value, self.style)

    def factor(self, row: Row) -> Estimate | None:
        """Return the figure of a row to draw as a bar; None if the row compares with itself."""
        value = row.values.get(self.name)
        factor = value if value is None or isinstance(value, Estimate) else Estimate(value)
        is_own_base = row.base in ("", row.name)
        return None if factor == Estimate(1.0) and is_own_base else factor


PEAK_MEMORY = Figure(
    "peak_memory_mb",
    "MB",
    ",.0f",
    "peak memory in MiB, of the GPU's tensors on CUDA, else of the process",
)


@dataclass
class Report:
    """All parts of a report."""

    folder: Path
    title: str
    figures: Sequence[Figure]  # the first one is the name of the rows
    rows: Sequence[Row]
    ran: str = ""  # sizes of the model and of the run
    result: str = ""  # the whole report in a sentence
    remarks: Sequence[str] = ()  # failures and notes
    about: Sequence[str] = ()  # machines and versions
    meaning: str = ""  # explains all figures together
    pictures: Mapping[str, str] = field(default_factory=dict)  # caption by file
    bars: str = ""  # file for a picture of the bars
    where: str = ""  # machine and date, for that picture and the page
    curves: Sequence[Values] = ()  # from curve_of
    learns: bool = False  # the page shows the curves first


def write_report(report: Report) -> None:
    """Print a table of figures, and write it with all that explains it: report.md, report.html,
    results.csv, and a picture of the bars. Raises TrainingError without rows.
    """
    folder, rows = report.folder, report.rows
    if not rows:
        nothing = f"{folder}: no finished stage to report"
        raise TrainingError("\n".join([nothing, *report.remarks]))
    names, *others = report.figures
    figures = [figure for figure in others if any(map(figure.text, rows))]
    headings = [figure.heading for figure in (names, *figures)]
    cells = [[names.text(row) or row.name, *(f.text(row) for f in figures)] for row in rows]
    factors = [factors_of(row, figures) for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    bars = {
        row.label: {figure.heading: factor for figure, factor in of_row.items()}
        for row, of_row in zip(rows, factors, strict=True)
        if of_row
    }
    pictures = report.pictures
    if report.bars and bars:
        pictures = {report.bars: "factors with their intervals", **pictures}
        draw_bars(folder / report.bars, bars, report.where)
    intervals = INTERVALS if any(figure.bar for figure in figures) and not report.learns else ""
    parts = vars(report) | {
        "lead": [line for line in (report.ran, report.result) if line],
        "table": markdown_table(headings, cells),
        "meanings": [f"{figure.heading}: {figure.meaning}" for figure in figures if figure.meaning],
        "notes": [note for note in (report.meaning, intervals) if note],
        "pictures": pictures,
        "figures": figures,
        "rows": [*zip(rows, factors, strict=True)],
    }
    write_atomic(folder / "report.md", render("report.md", parts))
    write_atomic(folder / "report.html", render("page.html", parts))
    write_csv(folder / "results.csv", [{names.name: row.name} | row.values for row in rows])
    lines = [brief(row, texts, figures) for row, texts in zip(rows, cells, strict=True)]
    print_table(report.title, headings, lines)
    print(*report.remarks, f"{folder}: report.html, report.md and results.csv", sep="\n")
    if report.result:
        print(report.result)


def factors_of(row: Row, figures: Sequence[Figure]) -> dict[Figure, Estimate]:
    """Return the factors of a row that are drawn as bars."""
    factors = {figure: figure.factor(row) for figure in figures if figure.bar}
    return {figure: factor for figure, factor in factors.items() if factor is not None}


def brief(row: Row, cells: Sequence[str], figures: Sequence[Figure]) -> list[str]:
    """Return a row's cells for a terminal: with its title, and the total without an interval."""
    name, *others = cells
    short = [name if row.title == row.name else f"{name}: {row.title}"]
    for figure, cell in zip(figures, others, strict=True):
        is_total = figure.over == "first" and not figure.bar
        short.append(cell.partition(" (")[0] if is_total else cell)
    return short


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


def write_csv(path: Path, rows: Sequence[Values]) -> None:
    """Write rows to a CSV file with a column for every key, except lists.

    An Estimate `x` takes the columns x, x_low and x_high.
    """
    lines = list[dict[str, Any]]()
    for row in rows:
        line: dict[str, Any] = {}
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
