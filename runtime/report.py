"""Tables, pictures, and the machine in words. Importing it imports neither torch nor matplotlib."""

import hashlib
import itertools
import operator
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from runtime.errors import TrainingError, drop
from runtime.ratio import Ratio

# Okabe and Ito (2008): told apart by the colour-blind too
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]  # told apart in print too
BLUE, ORANGE = COLOURS[:2]
Curve = tuple[Sequence[int], Sequence[Any]]  # steps, and the value at each


# ---- the machine


def machine() -> str:
    """Processor, cores, memory, system."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        names = re.findall(
            r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
        processor = names[0] if names else processor
    memory = physical_memory()
    return (
        f"{processor}, {os.cpu_count()} cores"
        + (f", {memory / 2**30:.0f} GiB" if memory else "")
        + f", {platform.system()}"
    )


def physical_memory() -> int:
    """Bytes of memory of this machine; 0 where the system does not tell."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def git_commit() -> str | None:
    """Commit of this code, with -dirty if it was changed since; None where there is no git, or one
    that does not answer.
    """
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            text=True,
            check=True,
            errors="replace",
            timeout=10,
            capture_output=True,
            cwd=Path(__file__).parent,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def code_version() -> str:
    """This code in a few words, others where any of its files differ: the commit, if git knows it,
    and a hash of the files.
    """
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(
        path
        for rooms in ("*.py", "data/*.py", "kernels/*.py", "runtime/*.py")
        for path in root.glob(rooms)
    ):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return f"{git_commit() or 'no commit'} (files {digest.hexdigest()[:8]})"


def flops_rate(tflops: float) -> str:
    """A rate of floating-point operations in a unit that shows it: TFLOP/s, or GFLOP/s below 1."""
    return f"{tflops:,.2f} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:,.3g} GFLOP/s"


# ---- tables


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and the text of a row's cell in it."""

    heading: str
    cell: Callable[[Any], str]


def field(heading: str, name: str, style: str = "") -> Column:
    """A column that shows a row's attribute in a format such as ",.0f"; nothing where it is None."""
    return Column(
        heading, lambda row: "" if (value := getattr(row, name)) is None else format(value, style)
    )


def items(*headings: str) -> list[Column]:
    """Columns of rows that are sequences of texts."""
    return [Column(heading, operator.itemgetter(i)) for i, heading in enumerate(headings)]


LONGEST_WHOLE = 24  # characters of a text that is not broken into lines


def print_table(title: str, columns: Sequence[Column], rows: Sequence[Any]) -> None:
    """Print a table; columns of figures are set to the right. The last columns are left out where
    the terminal is too narrow.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    body = [[column.cell(row) for column in columns] for row in rows]
    terminal = console()
    space = terminal.width
    shown = 0
    for i, column in enumerate(columns):
        cells = [line[i] for line in body]
        is_figure = _are_figures(cells)
        # a name, a figure or an interval is whole or not there; only longer texts are broken into
        # lines
        longest = max(map(len, [column.heading, *cells]))
        is_whole = is_figure or i == 0 or longest <= LONGEST_WHOLE
        space -= 2 + (longest if is_whole else len(column.heading))
        if space < 0 and i:
            break
        table.add_column(
            column.heading,
            justify="right" if is_figure else "left",
            no_wrap=is_whole,
            overflow="fold",
        )
        shown += 1
    for line in body:
        table.add_row(*line[:shown])
    terminal.print(table)


def console() -> Any:
    """The terminal. Text is printed as it is: a name may hold brackets, which are no markup."""
    from rich.console import Console

    width, height = shutil.get_terminal_size()
    return Console(
        file=cast(TextIO, Heedless(sys.stdout)), markup=False, width=width, height=height
    )


class Heedless:
    """A stream whose reader may go, or whose disk may be full: what is measured meanwhile goes on,
    and its files are written.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write at once, or drop what cannot be written."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            drop(self._stream)
            if not isinstance(error, BrokenPipeError):
                print(f"note: what is printed goes nowhere ({error.strerror})", file=sys.stderr)
        return len(text)

    def flush(self) -> None:
        """Nothing is left to write."""


def markdown_table(columns: Sequence[Column], rows: Sequence[Any]) -> list[str]:
    """A table as lines of markdown; columns of figures are set to the right."""
    body = [[column.cell(row) for column in columns] for row in rows]
    rulers = (
        "---:" if _are_figures([line[i] for line in body]) else "---" for i in range(len(columns))
    )
    return [
        "| " + " | ".join(column.heading for column in columns) + " |",
        "|" + "|".join(rulers) + "|",
        *(
            "| " + " | ".join(" ".join(cell.split()).replace("|", r"\|") for cell in line) + " |"
            for line in body
        ),
    ]


def _are_figures(cells: Sequence[str]) -> bool:
    return all(cell[:1].isdigit() or not cell for cell in cells)


# ---- pictures


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files; imported only where a picture is drawn, as that takes a
    second.

    Raises TrainingError where it cannot be imported.
    """
    os.environ["MPLBACKEND"] = "Agg"  # what the user's says may not be there
    try:
        import matplotlib.pyplot
    except (ImportError, ValueError) as error:
        raise TrainingError(
            f"no picture can be drawn: {error}; pip install -r requirements.txt, then the same "
            f"command"
        ) from None

    return matplotlib.pyplot


def plain(name: str) -> str:
    """A name as matplotlib shows it: $ begins no formula, a legend does not leave out what begins
    with _, and what is no text, as in a folder's name, is a question mark.
    """
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$").encode(
        errors="replace"
    ).decode()


def save_picture(figure: Any, path: Path) -> None:
    """Write a picture to a file and forget it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # it is drawn as a box
        figure.savefig(path, dpi=130)
    pyplot().close(figure)


def draw_losses(path: Path, training: Mapping[str, Curve], validation: Mapping[str, Curve]) -> None:
    """Loss curves of runs, by name, and those of their validation losses."""
    figure, axes = pyplot().subplots(figsize=(8, 5), layout="constrained")
    colours = dict(
        zip(dict.fromkeys([*training, *validation]), itertools.cycle(COLOURS), strict=False)
    )
    for name, curve in training.items():
        axes.plot(*curve, color=colours[name], linewidth=1.4, label=plain(name))
    for name, curve in validation.items():
        axes.plot(
            *curve,
            "o--",
            color=colours[name],
            markersize=3,
            linewidth=1,
            label=plain(f"{name}, validation"),
        )
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    save_picture(figure, path)


def draw_bars(
    path: Path,
    names: Sequence[str],
    lengths: Sequence[float],
    labels: Sequence[str],
    xlabel: str,
    *,
    colours: Sequence[str] | str = BLUE,
    meanings: Mapping[str, str] | None = None,
    whiskers: Sequence[tuple[float, float]] | None = None,
) -> None:
    """Horizontal bars, the first on top, each with a label at its end and, if given, a whisker from
    one value to another.

    `meanings`: what each colour stands for, for a legend.
    """
    figure, axes = pyplot().subplots(figsize=(8, 1.2 + 0.32 * len(names)), layout="constrained")
    ends = list(whiskers or [(length, length) for length in lengths])
    bars = axes.barh(
        range(len(names)), lengths, color=colours, xerr=_arms(lengths, ends) if whiskers else None
    )
    axes.set_yticks(range(len(names)), [plain(name) for name in names], fontsize=9)
    axes.bar_label(bars, labels, padding=5, fontsize=9)
    axes.set_xlim(0, 1.25 * max(high for _, high in ends))
    axes.invert_yaxis()
    axes.set_xlabel(plain(xlabel))
    axes.spines[["top", "right"]].set_visible(False)
    if meanings:
        patches = [pyplot().Rectangle((0, 0), 1, 1, color=colour) for colour in meanings]
        figure.legend(
            patches,
            list(meanings.values()),
            loc="outside upper right",
            ncols=len(meanings),
            fontsize=9,
        )
    save_picture(figure, path)


def draw_factors(
    path: Path, names: Sequence[str], series: Mapping[str, Sequence[Ratio | None]], xlabel: str
) -> None:
    """For each name, the first on top, the factor that each series has for it, with a whisker over
    its interval.
    """
    figure, axes = pyplot().subplots(
        figsize=(8, 1.5 + (0.16 + 0.08 * len(series)) * len(names)), layout="constrained"
    )
    for i, (label, factors) in enumerate(series.items()):
        offset = 0.8 * (
            (i + 0.5) / len(series) - 0.5
        )  # so that points of one name do not cover each other
        heights = [y + offset for y, factor in enumerate(factors) if factor]
        shown = [factor for factor in factors if factor]
        values = [factor.median for factor in shown]
        axes.errorbar(
            values,
            heights,
            xerr=_arms(values, [factor.ends for factor in shown]),
            fmt=MARKERS[i % len(MARKERS)],
            color=COLOURS[i % len(COLOURS)],
            markersize=5,
            linewidth=1.2,
            label=plain(label),
        )
    for y in range(1, len(names)):
        axes.axhline(y - 0.5, color="0.9", linewidth=0.8)
    axes.axvline(1, color="0.4", linewidth=0.8)
    axes.set_xscale("log")
    ticks = [
        tick
        for tick in (0.25, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 12)
        if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]
    ]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.set_yticks(range(len(names)), [plain(name) for name in names], fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(plain(xlabel))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=min(3, len(series)), fontsize=9)
    save_picture(figure, path)


def _arms(values: Sequence[float], ends: Sequence[tuple[float, float]]) -> list[list[float]]:
    """How far whiskers reach to the left and to the right of their values."""
    return [
        [value - low for value, (low, _) in zip(values, ends, strict=True)],
        [high - value for value, (_, high) in zip(values, ends, strict=True)],
    ]
