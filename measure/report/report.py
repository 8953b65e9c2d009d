"""One report from figures declared once: console, report.md, results.csv, page."""

import csv
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from measure.report.estimate import Estimate
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
    also: str = ""  # what changes beside the technique of the title, such as a batch of 6
    why: Sequence[str] = ()
    elsewhere: Sequence[str] = ()  # published results, and results on other machines
    yaml: str = ""
    code: Sequence[tuple[str, int, str]] = ()  # file, line, text


class Row(NamedTuple):
    """A row of a report: its name, its figures by their names, and its card."""

    name: str
    values: dict[str, Any]
    card: Card = Card("")

    @property
    def title(self) -> str:
        """The title of its card, or its name."""
        return ", and ".join(filter(None, [self.card.title, self.card.also])) or self.name

    @property
    def label(self) -> str:
        """The name in tables."""
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

    def text(self, row: Row) -> str:
        """Format the figure of a row; empty without one."""
        if callable(self.style):
            return self.style(row.values)
        value = row.values.get(self.name)
        return "" if value is None else format(value, self.style)


PEAK_MEMORY = Figure(
    "peak_memory_mb",
    "MB",
    ",.0f",
    "peak memory in MiB, of the GPU's tensors on CUDA, else of the process",
)


class Summary(NamedTuple):
    """A report in a few sentences: at the top of its page and of report.md, in the last line on the
    console, in link previews, and as the text of its picture.
    """

    headline: str
    lead: str = ""
    more: str = ""

    def __str__(self) -> str:
        """Return the line for the console."""
        return f"{self.headline}: {self.lead}" if self.lead else self.headline


@dataclass
class Report:
    """All parts of a report."""

    folder: Path
    title: str
    figures: Sequence[Figure]  # the first one is the name of the rows
    rows: Sequence[Row]
    ran: str = ""  # sizes of the model and of the run
    summary: Summary | None = None
    remarks: Sequence[str] = ()  # failures and notes
    about: Sequence[str] = ()  # machines and versions
    meaning: str = ""  # explains all figures together
    pictures: Mapping[str, str] = field(default_factory=dict)  # caption by file, which is there
    page: str = "page.html"  # the template of its page
    parts: Mapping[str, Any] = field(default_factory=dict)  # further ones of the templates


def write_report(report: Report) -> None:
    """Print a table of figures, and write it with all that explains it: report.md, report.html and
    results.csv. Raises TrainingError without rows.
    """
    folder, rows = report.folder, report.rows
    if not rows:
        nothing = f"{folder}: no finished stage to report"
        raise TrainingError("\n".join([nothing, *report.remarks]))
    names, *others = report.figures
    figures = [figure for figure in others if any(map(figure.text, rows))]
    headings = [figure.heading for figure in (names, *figures)]
    cells = [[names.text(row) or row.label, *(f.text(row) for f in figures)] for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    parts = vars(report) | {
        "table": markdown_table(headings, cells),
        "headings": headings,
        "shown": figures,
        "cells": cells,
        "meanings": [f"{figure.heading}: {figure.meaning}" for figure in figures if figure.meaning],
        **report.parts,
    }
    parts["copied"] = render("summary.md", parts)
    for file, template in (("report.md", "report.md"), ("report.html", report.page)):
        write_atomic(folder / file, render(template, parts))
    write_csv(folder / "results.csv", [{names.name: row.name} | row.values for row in rows])
    print_table(report.title, headings, cells)
    print(*report.remarks, f"{folder}: report.html, report.md and results.csv", sep="\n")
    if report.summary:
        print(report.summary)


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
