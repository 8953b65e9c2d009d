"""A ladder as one web page, report.html: opened from the disk, without a network.

Each rung has its technique's name, why it helps (the YAML's comment), what the YAML changes, the
lines of code that its options switch, and what it was worth. Below: the loss curves.
"""

import ast
import functools
import itertools
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from config import load_config
from measure.ratio import Ratio
from measure.stages import ROOT, Stage, published_rows, with_bases
from measure.tables import Row
from runtime.cli import find_config, read_yaml_mapping
from runtime.files import write_whole
from runtime.report import COLOURS
from runtime.runlog import Row as LogRow
from runtime.runlog import curve, read_rows

WEB = Path(__file__).parent / "web"
RECIPE = ("train.py", "model.py", "optimizer.py", "dataloader.py")  # where options act
PLACES = 4  # of an option, at most
OTHERS = ("_", "describe", "notes", "to_yaml", "advice")  # methods that speak of options
AGAIN = "The same again"  # title of a stage that repeats its base
OTHER_FACTORS = {
    "predicted": "predicted_over_base",
    "published": "published_over_base",
    "an A100, published": "a100_over_base",
}
FIGURES = {  # columns of results.csv beside the factor
    "tokens_per_sec": ("tokens/s", ",.0f"),
    "ms_per_step": ("ms a step", ",.0f"),
    "peak_memory_mb": ("MB", ",.0f"),
    "final_loss": ("loss", ".3f"),
    "utilization": ("MFU", ".0%"),
    "predicted_arithmetic": ("predicted for arithmetic", ".0%"),
    "predicted_memory": ("for memory", ".0%"),
    "predicted_launches": ("for launches", ".0%"),
    "over_first": ("times the first rung", ""),
}


def write_page(
    path: Path,
    title: str,
    headline: str,
    about: Sequence[str],
    rungs: Sequence[Mapping[str, Any]],
    curves: Sequence[Mapping[str, Any]],
) -> None:
    """Write the page. `rungs`: as `rung` makes them; `curves`: as `curve_of` does."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((WEB / "page.html").read_text(encoding="utf-8"))
    ends = [factor.ends[1] for rung in rungs for _, factor in rung["factors"]]
    write_whole(
        path,
        template.render(
            title=title,
            headline=headline,
            about=about,
            rungs=rungs,
            curves=curves,
            most=1.05 * max([1.0, *ends]),
            colours=COLOURS,
            uplot_js=jinja2.utils.markupsafe.Markup((WEB / "uPlot.iife.min.js").read_text()),
            uplot_css=jinja2.utils.markupsafe.Markup((WEB / "uPlot.min.css").read_text()),
        ),
    )
    print(f"{path}: the same as a page, with pictures to point at")


# ---- a rung


def rung(
    name: str,
    config: str | Path,
    base: str | Path,
    factors: Mapping[str, Ratio | None],
    figures: Iterable[tuple[str, Any, str]],
) -> dict[str, Any]:
    """Return what the page shows of a rung.

    `config`, `base`: its YAML and the one that it changes. `figures`: labels, values as results.csv
    has them, and formats.
    """
    ours, theirs = (find_config(str(file)) for file in (config, base))
    title, why = title_of(name, ours, theirs), explained(ours)[1]
    if title == AGAIN:
        why = ["It differs by its seed alone: its factor is noise (A/A)."]
    here, there = (load_config(str(file)).model_dump() for file in (ours, theirs))
    # What this YAML changes comes first, in its own order: its technique.
    changed = dict.fromkeys(
        name
        for name in (*read_yaml_mapping(ours), *here)
        if name in here and here[name] != there[name] and name != "run_name"
    )
    return {
        "name": name,
        "base": theirs.stem if name != theirs.stem else None,
        "title": title,
        "why": why,
        "yaml": changes(ours),
        "code": {(p["file"], p["line"]): p for option in changed for p in code_of(option)}.values(),
        "factors": [(label, factor) for label, factor in factors.items() if factor],
        "figures": [
            (label, value, f"{value:{style}}")
            for label, value, style in figures
            if value is not None
        ],
    }


def title_of(name: str, file: Path, base: Path) -> str:
    """Return the name of the technique that a stage adds to the stage with the config `base`."""
    is_again = file == base and name != file.stem
    return AGAIN if is_again else explained(file)[0] or name


def explained(file: Path) -> tuple[str, list[str]]:
    """Return the first words of a YAML's first comment, the technique's name, and all of it."""
    text = file.read_text(encoding="utf-8")
    comment = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(True)))
    words = " ".join(line.lstrip("# ") for line in comment.splitlines())
    name = re.split(r"[:,.] |[:.]$| [(]", words, maxsplit=1)[0]
    name = re.sub(r"^(Adds )?(the |The |an? )?", "", name)
    if re.match(r"[A-Za-z'-]+( |$)", name):  # not torch.compile, bf16
        name = name[:1].upper() + name[1:]
    return name, [p for p in re.split(r" (?=Published)", words) if p]


def changes(file: Path) -> str:
    """Return what a YAML sets, without its base and the comment above."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line and not line.startswith(("#", "base:")))


def code_of(option: str) -> list[dict[str, Any]]:
    """Return the statements of the recipe that read an option, with the comments above them.

    An option that only config.py reads, in a method, is found where that method is called.
    """
    names = {option, *methods_that_read(option)}
    found = [
        {"file": file, "line": line, "text": text}
        for file in RECIPE
        for line, text in statements_that_read(ROOT / file, names)
    ]
    return found[:PLACES]


def methods_that_read(option: str) -> Iterator[str]:
    """Yield the methods and properties of Config that read an option for others."""
    for node in ast.walk(parsed(ROOT / "config.py")[1]):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(OTHERS):
            yield from [node.name] * any(getattr(n, "attr", "") == option for n in ast.walk(node))


def statements_that_read(path: Path, names: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line number and text of the statements with one of these attributes, and of those that
    read a variable which such a statement sets. Comments above a statement belong to it.
    """
    lines, tree = parsed(path)
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name.startswith("check"):
            continue
        set_there, shown_to = set[str](), 0
        for node in sorted(statements_in(function), key=lambda node: node.lineno):
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            own = (child for child in ast.iter_child_nodes(node) if child not in inner)
            parts = [*itertools.chain(*map(ast.walk, own))]
            reads_it = any(getattr(part, "attr", "") in names for part in parts)
            if node.lineno <= shown_to or not (
                reads_it or any(getattr(part, "id", "") in set_there for part in parts)
            ):
                continue
            if isinstance(node, ast.Assign) and reads_it:
                set_there |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            first = node.lineno
            shown_to = node.end_lineno or first
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            yield first, textwrap.dedent("\n".join(lines[first - 1 : shown_to]))


@functools.cache
def parsed(path: Path) -> tuple[list[str], ast.Module]:
    """Return the lines of a file, and what they say."""
    text = path.read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text)


def statements_in(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return all statements inside a function, but not those of functions inside it."""
    nodes = (node for node in ast.walk(function) if node is not function)
    return [node for node in nodes if isinstance(node, ast.stmt)]


# ---- curves


def curve_of(
    label: str,
    steps: Sequence[int],
    losses: Sequence[float],
    times: Sequence[float | None] = (),
    *,
    tokens_per_step: int | None = None,
    published: bool = False,
) -> dict[str, Any]:
    """Return a curve over steps, tokens and seconds; None over what is not known.

    `times`: milliseconds of each step from the first on.
    """
    known = len(times) == len(steps) == steps[-1] and all(times)
    return {
        "label": label,
        "published": published,
        "steps": [*steps],
        "tokens": tokens_per_step and [step * tokens_per_step for step in steps],
        "seconds": [*itertools.accumulate((time or 0) / 1e3 for time in times)] if known else None,
        "loss": [*losses],
    }


def logged(rows: Mapping[int, LogRow]) -> tuple[list[int], list[Any], list[Any]]:
    """Return the steps, losses and milliseconds of a log for `curve_of`."""
    return (*curve(rows), [row.get("dt_ms") for row in rows.values()])


def write_ladder_page(path: Path, title: str, stages: Sequence[Stage], rows: Sequence[Row]) -> None:
    """Write the page of a ladder whose finished stages have these rows."""
    by_name = {row["stage"]: row for row in rows}
    done = [(stage, base) for stage, base in with_bases(stages) if stage.name in by_name]
    rungs = []
    for stage, base in done:
        row, factors = by_name[stage.name], dict[str, Ratio | None]()
        if stage is not base:
            factors = {"here": row["over_base"]}
            for label, column in OTHER_FACTORS.items():
                factors[label] = row[column] and Ratio(row[column])
        figures = [(label, row[name], style) for name, (label, style) in FIGURES.items()]
        rungs.append(rung(stage.name, stage.file, base.file, factors, figures))
    titles = {rung["name"]: rung["title"] for rung in rungs}
    curves, machines = [], dict[str, None]()
    for stage, _ in done:
        tokens = stage.config.tokens_per_step(stage.ranks)
        log = logged(read_rows(stage.folder / "log.csv"))
        curves.append(curve_of(titles[stage.name], *log, tokens_per_step=tokens))
        if summary := stage.summary():
            machines[f"{summary.about}, {summary.started[:10]}"] = None
    for stage, _ in done:
        if name := stage.published.log:
            steps, losses, times = logged(published_rows(name))
            # Times that were read without waiting for the GPU tell nothing.
            times = times if stage.published.ms_per_step else []
            label, tokens = f"{titles[stage.name]}, published", stage.config.tokens_per_step(1)
            curves.append(
                curve_of(label, steps, losses, times, tokens_per_step=tokens, published=True)
            )
    options = shlex.join(stages[0].side[2:])  # after --keep_last=0
    about = [*machines, *([f"All runs with {options}"] if options else [])]
    write_page(path, title, headline(rows, titles), about, rungs, curves)


def headline(rows: Sequence[Row], titles: Mapping[str, str]) -> str:
    """Say in a sentence or two how far the ladder leads, and which rungs are worth most."""
    most = max(row["over_first"].median for row in rows)
    said = f"{most:.1f} times as fast as {titles[rows[0]['stage']].lower()}."
    resolved = [row for row in rows if row["over_base"] and row["over_base"].ends[0] > 1]
    for row in sorted(resolved, key=lambda row: -row["over_base"].median)[:2]:
        said += f" {titles[row['stage']]}: {row['over_base']}."
    return said
