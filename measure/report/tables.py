"""Print tables, and write them in Markdown."""

from collections.abc import Sequence
from itertools import chain


def _are_figures(cells: Sequence[str]) -> bool:
    return all(cell[:1].isdigit() or not cell for cell in cells)


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with right-aligned figures; columns that do not fit the terminal are dropped.

    Only texts longer than 24 characters, in the first column 20, are broken into lines, between
    words: rich would break figures too.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)  # a name may contain brackets
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    space = console.width
    for heading, *texts in zip(headings, *rows, strict=True):
        longest = max(map(len, [heading, *texts]))
        words = chain(*(text.split() for text in [heading, *texts]))
        most = 24 if table.columns else 20
        space -= max(min(longest, most), *map(len, words)) + 2
        if space < 0 and table.columns:
            break
        table.add_column(
            heading,
            justify="right" if _are_figures(texts) else "left",
            no_wrap=longest <= most,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row[: len(table.columns)])
    console.print(table)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, with figures on the right."""
    alignments = ["---:" if _are_figures(texts) else "---" for texts in zip(*rows, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, alignments, *rows))
