"""Print tables, draw pictures, describe this machine. Imports neither torch nor matplotlib."""

import hashlib
import itertools
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Scripts and folders of this project; in a copy without git, all others are the user's own
ROOMS = [
    "bench.py",
    "check.py",
    "checkpoint",
    "config.py",
    "configs",
    "data",
    "dataloader.py",
    "evaluate.py",
    "export.py",
    "inference",
    "kernels",
    "ladder.py",
    "measure",
    "model.py",
    "optimizer.py",
    "runtime",
    "sample.py",
    "summary.py",
    "tests",
    "train.py",
]

# Okabe and Ito (2008): distinct for the colour-blind too
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]  # distinct in print too
BLUE, ORANGE = COLOURS[:2]
Curve = tuple[Sequence[int], Sequence[Any]]  # steps, and the value at each
Bar = tuple[str, float, str, tuple[float, float], str]  # name, length, label, interval, colour


# ---- the machine


def machine() -> str:
    """Describe this machine: processor, cores, memory, system."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        text = Path("/proc/cpuinfo").read_text()
        names = re.findall(r"^model name\s*: (.+)$", text, re.MULTILINE)
        processor = names[0] if names else processor
    memory = f"{physical_memory() / 2**30:.0f} GiB"
    return f"{processor}, {os.cpu_count()} cores, {memory}, {platform.system()}"


def physical_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _git(*command: str) -> str | None:
    """Return the output of a git command in this checkout; None without git."""
    command = ("git", *command)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return os.fsdecode(done.stdout).strip()


def git_commit() -> str | None:
    """Return the commit of this code, with -dirty if it was changed since; None without git."""
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def project_files(*patterns: str) -> list[Path]:
    """List the files that git tracks and that match a pattern, such as "configs/**/*.yaml".

    A user's own scripts and environments in the checkout are left out. Without git, as in a
    downloaded archive, only names in ROOMS are searched.
    """
    tracked = _git("ls-files", "-z", "--", *(f":(glob){pattern}" for pattern in patterns))
    if tracked:
        # a set, since git lists a file with a merge conflict three times
        paths = [ROOT / name for name in {*tracked.strip("\0").split("\0")}]
    else:
        found = (path for pattern in patterns for path in ROOT.glob(pattern))
        paths = [path for path in found if path.relative_to(ROOT).parts[0] in ROOMS]
    return sorted(path for path in paths if path.is_file())  # a tracked file may be deleted


def code_hash() -> str:
    """Return a hash of this project's Python files."""
    digest = hashlib.sha256()
    for path in project_files("**/*.py"):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def flops_rate(tflops: float) -> str:
    """Format a rate of floating-point operations: TFLOP/s, or GFLOP/s below 1."""
    return f"{tflops:,.2f} TFLOP/s" if tflops >= 1 else f"{tflops * 1e3:,.3g} GFLOP/s"


def about(seconds: float) -> str:
    """Format a long time: as `12 minutes`, `3.2 hours` or `4 days`."""
    unit, size = next(
        (unit, size)
        for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60))
        if seconds >= 2 * size or unit == "minutes"
    )
    count = seconds / size
    if unit == "hours" and count < 10:
        return f"{count:.1f} hours"
    return f"{count:,.0f} {unit if round(count) != 1 else unit.removesuffix('s')}"


UNKNOWN = "the device could not be measured, or is too busy with other programs"


def describe_duration(seconds: float | None, mfu: float, shorter: str) -> str:
    """Return a line on how long some work takes, estimated at `mfu`, and a shorter alternative."""
    if seconds is None:
        return f"how long this takes is not known: {UNKNOWN}; shorter: {shorter}"
    return f"takes about {about(seconds)}, at {mfu:.0%} MFU; shorter: {shorter}"


# ---- figures with intervals


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval; without one it comes from a single measurement."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval; without one, the value twice."""
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return low, high

    @property
    def width(self) -> float:
        """The interval's width as a share of the value."""
        return (self.ends[1] - self.ends[0]) / self.value

    @property
    def inverse(self) -> "Estimate":
        """The reciprocal."""
        if self.low is None or self.high is None:
            return Estimate(1 / self.value)
        return Estimate(1 / self.value, 1 / self.high, 1 / self.low)

    def __str__(self) -> str:
        """Format a factor: `1.14 (1.09 to 1.19)`, `about 1 (...)` if the interval contains 1."""
        low, high = self.ends
        if self.low is None:
            return f"{self.value:.2f}"
        digits = (
            2
            if high - low >= 0.02
            and (low <= 1 <= high or "1.00" not in (f"{low:.2f}", f"{high:.2f}"))
            else 3
        )
        shown = "about 1" if low <= 1 <= high else f"{self.value:.{digits}f}"
        return f"{shown} ({low:.{digits}f} to {high:.{digits}f})"

    def __format__(self, style: str) -> str:
        """Format as a factor, or in a style such as ".4f" as a mean: `0.3480 +- 0.0480`."""
        if not style:
            return str(self)
        low, high = self.ends
        half = "" if self.low is None else f" +- {high - self.value:{style}}"
        return f"{self.value:{style}}{half}{' (within noise)' * (low <= 0 <= high)}"


# ---- tables


def _are_figures(cells: Sequence[str]) -> bool:
    return all(cell[:1].isdigit() or not cell for cell in cells)


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with right-aligned figures; columns that do not fit the terminal are dropped.

    Only texts longer than 24 characters are broken into lines: rich would break figures too.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)  # a name may contain brackets
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    space, shown = console.width, list[Sequence[str]]()
    for heading, *texts in zip(headings, *rows, strict=True):
        longest = max(map(len, [heading, *texts]))
        space -= min(longest, 24) + 2
        if space < 0 and shown:
            break
        shown.append(texts)
        justify: Any = "right" if _are_figures(texts) else "left"
        table.add_column(heading, justify=justify, no_wrap=longest <= 24, overflow="fold")
    for line in zip(*shown, strict=True):
        table.add_row(*line)
    console.print(table)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown, with figures on the right."""
    cells = [[" ".join(text.split()).replace("|", r"\|") for text in row] for row in rows]
    alignments = ["---:" if _are_figures(texts) else "---" for texts in zip(*cells, strict=True)]
    return ["| " + " | ".join(line) + " |" for line in (headings, alignments, *cells)]


# ---- pictures


def new_figure(*shape: int, **options: Any) -> tuple[Any, Any]:
    """Return a matplotlib figure and its axes, as `pyplot.subplots` does, for drawing to files.

    `figsize` is in inches; further options go to `Figure.subplots`.
    """
    from matplotlib.figure import Figure  # imported here, as it takes a second

    figure = Figure(figsize=options.pop("figsize", (8, 5)), layout="constrained")
    return figure, figure.subplots(*shape, **options)


def plain(name: str) -> str:
    """Escape a name for matplotlib: $ begins a formula, and _ hides it from a legend."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def save_picture(figure: Any, path: Path, about: str = "") -> None:
    """Write a picture to a file. `about`: the machine and the date, for a line below it."""
    if about:
        figure.supxlabel(plain(about), fontsize=7, color="0.4", x=0.01, ha="left")
    figure.savefig(path, dpi=130)


def draw_losses(path: Path, training: Mapping[str, Curve], validation: Mapping[str, Curve]) -> None:
    """Draw loss curves by the name of their run, validation losses dashed in the same colour."""
    figure, axes = new_figure()
    colours = dict(zip([*training, *validation], itertools.cycle(COLOURS), strict=False))
    for name, curve in training.items():
        axes.plot(*curve, color=colours[name], label=plain(name))
    for number, (name, curve) in enumerate(validation.items()):
        label, marker = plain(f"{name}, validation"), "os^"[number // len(COLOURS) % 3]
        axes.plot(*curve, f"{marker}--", color=colours[name], markersize=3, label=label)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3)
    save_picture(figure, path)


def draw_bars(
    path: Path, bars: Sequence[Bar], xlabel: str, meanings: Mapping[str, str], about: str = ""
) -> None:
    """Draw horizontal bars, the first on top, hollow without an interval.

    `meanings`: the legend's text for each colour. `about`: the machine and the date.
    """
    from matplotlib.patches import Patch

    figure, axes = new_figure(figsize=(8, 1.2 + 0.32 * len(bars)))
    names, lengths, labels, intervals, colours = zip(*bars, strict=True)
    rows = range(len(bars))
    drawn = axes.barh(rows, lengths, color=colours, tick_label=[plain(name) for name in names])
    for row, (bar, label, (low, high)) in enumerate(zip(drawn, labels, intervals, strict=True)):
        end = max(high, bar.get_width()), row
        axes.annotate(label, end, (5, 0), textcoords="offset points", va="center")
        if low == high:
            bar.set(facecolor="none", edgecolor=colours[row])
    axes.hlines(rows, *zip(*intervals, strict=True), colors="black")
    axes.margins(x=0.4)  # room for the labels
    axes.invert_yaxis()
    axes.set_xlabel(plain(xlabel))
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour, label=text) for colour, text in meanings.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches))
    save_picture(figure, path, about)
