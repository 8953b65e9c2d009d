"""A ladder as one web page, report.html: opened from the disk, without a network.

Each rung has its technique's name, why it helps (the YAML's comment), what the YAML changes, the
lines of code that its options switch, and what it was worth. Below: the loss curves.
"""

import ast
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml

from config import Config, load_config
from measure.ratio import Ratio
from measure.stages import ROOT, Stage, published_rows, with_bases
from measure.tables import Row
from runtime.cli import find_config, read_yaml_mapping
from runtime.files import write_whole
from runtime.runlog import Row as LogRow
from runtime.runlog import curve, read_rows

WEB = Path(__file__).parent / "web"
RECIPE = ("train.py", "model.py", "optimizer.py", "dataloader.py")  # where options act
PLACES, LONG = 4, 12  # places of an option, and lines of a statement, that are shown at most
OTHERS = ("_", "describe", "notes", "to_yaml", "advice")  # methods that speak of options
COLOURS = ("var(--bar)", "var(--other)", "#7a8b3f", "#8a5fb0", "#4d9a94", "#b34d6d")
FIGURES = {  # columns of results.csv beside the factor
    "tokens_per_sec": ("tokens/s", ",.0f"),
    "ms_per_step": ("ms a step", ",.0f"),
    "peak_memory_mb": ("MB", ",.0f"),
    "final_loss": ("loss", ".3f"),
    "utilization": ("MFU", ".0%"),
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
    ends = [
        factor[end] for rung in rungs for factor in rung["factors"] for end in ("median", "high")
    ]
    write_whole(
        path,
        template.render(
            title=title,
            headline=headline,
            about=about,
            rungs=rungs,
            curves=curves,
            most=1.05 * max([1.0, *filter(None, ends)]),
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
    title, why = explained(ours)
    changed = changed_options(load_config(str(ours)), load_config(str(theirs)))
    return {
        "name": name,
        "base": theirs.stem if theirs != ours else None,
        "title": title or name,
        "why": why,
        "yaml": changes(ours),
        "code": [*itertools.chain(*map(code_of, changed))],
        "factors": bars(factors),
        "figures": [
            {
                "label": label,
                "value": value.median if isinstance(value, Ratio) else value,
                "text": f"{value:{style}}",
            }
            for label, value, style in figures
            if value is not None
        ],
    }


def bars(factors: Mapping[str, Ratio | None]) -> list[dict[str, Any]]:
    """Return the bars of a rung, one for each machine or source that has a factor."""
    return [
        {
            "label": label,
            "median": factor.median,
            "low": factor.low,
            "high": factor.high,
            "text": str(factor),
            "colour": colour,
        }
        for (label, factor), colour in zip(factors.items(), itertools.cycle(COLOURS), strict=False)
        if factor
    ]


def explained(file: Path) -> tuple[str, list[str]]:
    """Return the first words of a YAML's first comment, the technique's name, and all of it."""
    text = file.read_text(encoding="utf-8")
    comment = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(True)))
    words = " ".join(line.lstrip("# ") for line in comment.splitlines())
    name = re.split(r"[:,.] |[:.]$| [(]", words, maxsplit=1)[0]
    name = re.sub(r"^(Adds )?(the |The |an? )?", "", name)
    if name.partition(" ")[0].isalpha():  # not torch.compile, bf16
        name = name[:1].upper() + name[1:]
    return name, [p for p in re.split(r" (?=Published)", words) if p]


def changes(file: Path) -> str:
    """Return what a YAML sets, without its base and its comments."""
    values = {name: value for name, value in read_yaml_mapping(file).items() if name != "base"}
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=False) if values else ""


def changed_options(ours: Config, theirs: Config) -> list[str]:
    """Return the options in which two configs differ."""
    names = Config.model_fields.keys() - {"run_name", "log_dir"}
    return sorted(name for name in names if getattr(ours, name) != getattr(theirs, name))


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
    for node in ast.walk(ast.parse((ROOT / "config.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(OTHERS):
            yield from [node.name] * any(getattr(n, "attr", "") == option for n in ast.walk(node))


def statements_that_read(path: Path, names: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line number and text of the statements with one of these attributes, and of those that
    read a variable which such a statement sets.

    Of a long one that has others in it, such as `with`, its first lines. Comments above belong to
    it.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    for function in ast.walk(ast.parse("\n".join(lines))):
        set_there = set[str]()
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            if not isinstance(node, ast.stmt) or node is function:
                continue
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            own = [child for child in ast.iter_child_nodes(node) if child not in inner]
            read = {*itertools.chain(*(map(name_of, ast.walk(child)) for child in own))}
            if read & (names | set_there):
                if isinstance(node, ast.Assign) and read & names:
                    set_there |= {*map(name_of, node.targets)} - {""}
                first, end = node.lineno, node.end_lineno or node.lineno
                if inner and end - first > LONG:
                    end = inner[0].end_lineno or end
                while lines[first - 2].lstrip().startswith("#"):
                    first -= 1
                yield first, textwrap.dedent("\n".join(lines[first - 1 : end]))


def name_of(node: ast.AST) -> str:
    """Return the name of an attribute or a variable; "" of anything else."""
    return getattr(node, "attr", getattr(node, "id", ""))


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
            published = row["published_over_base"]
            factors = {"here": row["over_base"], "published": published and Ratio(published)}
        figures = [(label, row[name], style) for name, (label, style) in FIGURES.items()]
        rungs.append(rung(stage.name, stage.file, base.file, factors, figures))
    titles = {rung["name"]: rung["title"] for rung in rungs}
    curves, machines = [], dict[str, None]()
    for stage, _ in done:
        tokens = stage.config.tokens_per_step(stage.ranks)
        log = logged(read_rows(stage.folder / "log.csv"))
        curves.append(curve_of(titles[stage.name], *log, tokens_per_step=tokens))
        if summary := stage.summary():
            about = f"{summary.machine}; device {summary.device}, torch {summary.torch}"
            machines[f"{about}, commit {summary.git}, {summary.started[:10]}"] = None
    for stage, _ in done:
        if name := stage.published.log:
            steps, losses, times = logged(published_rows(name))
            # Times that were read without waiting for the GPU tell nothing.
            times = times if stage.published.ms_per_step else []
            label, tokens = f"{titles[stage.name]}, published", stage.config.tokens_per_step(1)
            curves.append(
                curve_of(label, steps, losses, times, tokens_per_step=tokens, published=True)
            )
    write_page(path, title, headline(rows, titles), [*machines], rungs, curves)


def headline(rows: Sequence[Row], titles: Mapping[str, str]) -> str:
    """Say in a sentence how far the ladder leads, and which rungs are worth most."""
    best = max(rows, key=lambda row: row["over_first"].median)
    resolved = [row for row in rows if (row["over_base"] or Ratio(1.0)).ends[0] > 1]
    resolved.sort(key=lambda row: -row["over_base"].median)
    names = [f"{titles[row['stage']]} ({row['over_base'].median:.2f})" for row in resolved[:2]]
    worth = f" {' and '.join(names)} {'is' if len(names) == 1 else 'are'} worth most here."
    far = f"{best['over_first'].median:.1f} times as fast as {titles[rows[0]['stage']].lower()}."
    return (far[:1].upper() + far[1:] if best is not rows[0] else "") + worth * bool(names)
