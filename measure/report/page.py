"""A ladder as one web page, report.html: opened from the disk, without a network.

Each rung has its technique's name, why it helps (the YAML's comment), what the YAML changes, the
lines of code that its options switch, and what it was worth. Below: the loss curves.
"""

import ast
import functools
import itertools
import math
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from measure.ladder.quick import STAGES as CHANGE_SPEED
from measure.ladder.stages import ROOT, Stage, published_rows, skipped
from measure.report.tables import Row
from runtime.cli import find_config, read_yaml, read_yaml_mapping
from runtime.files import write_atomic
from runtime.report import COLOURS, Estimate
from runtime.runlog import curve, read_rows

RECIPE = ("train.py", "model.py", "optimizer.py", "dataloader.py")  # where options act
PLACES = 4  # of an option, at most
BESIDE = ("batch_size", "lr", "min_lr", "run_name")  # what a YAML sets along with its technique
OTHERS = ("_", "describe", "notes", "to_yaml", "advice")  # methods that speak of options
AGAIN = "The same again"  # title of a stage that repeats its base
HERE = "here"  # label of the factor of speed over the base
OTHER_FACTORS = {
    "predicted": "predicted_over_base",
    "published": "published_over_base",
    "an A100, published": "a100_over_base",
}
Figures = Mapping[str, tuple[str, str]]  # by column: label and format
FIGURES = {  # of results.csv, beside the factor
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
INTERVALS = (
    "In brackets: the interval that holds the true median with 95% confidence, from interleaved "
    'runs of both; "about 1" where it holds 1. A factor without brackets is of runs that came one '
    "after the other: a machine whose speed drifts makes such factors too."
)
EXPLAINED = f"""\
- {HERE}: tokens/s over those of the stage that it changes. {INTERVALS}
- predicted: the same factor, before it was timed, from counted work and this machine's rates \
(docs/why.md).
- published: the same factor in the published times, on the GPU of whoever published them.
- an A100, published: the factor of the same step in the a100 series.
- tokens/s and ms a step: medians without the first steps, which compile and warm up.
- MB: peak memory in MiB, of the GPU's tensors on CUDA, else of the process.
- loss: of the last step, nats per token.
- MFU: the model's FLOPs per second as a share of what a large matmul reaches on this device.
- predicted for arithmetic, for memory, for launches: the share of a step that each is predicted \
to take.
- times the first rung: the product of the factors up to here."""


def write_page(
    path: Path,
    title: str,
    headline: str,
    about: Sequence[str],
    rungs: Sequence[Mapping[str, Any]],
    curves: Sequence[Mapping[str, Any]],
    explained: str = "",
) -> None:
    """Write the page.

    `about`: the machines. `rungs`: as `rung` or `card` makes them; `curves`: as `curve_of` does.
    `explained`: what the figures mean, a list in markdown.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "web"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    ends = [factor.ends[1] for rung in rungs for factor in rung["factors"].values()]
    write_atomic(
        path,
        environment.get_template("page.html").render(
            title=title,
            headline=headline,
            about=about,
            explained=explained,
            rungs=rungs,
            curves=curves,
            most=1.05 * max([1.0, *ends]),
            colours=COLOURS,
        ),
    )
    print(f"{path}: the same as a page, with pictures to point at")


# ---- a rung


def rung(
    name: str,
    config: str | Path,
    base: str | Path,
    factors: Mapping[str, Estimate | None],
    row: Row,
    figures: Figures,
) -> dict[str, Any]:
    """Return what the page shows of a rung.

    `config`, `base`: its YAML and the one that it changes. The rest is for `card`.
    """
    ours, theirs = (find_config(str(file)).resolve() for file in (config, base))
    title, why = title_of(name, ours, theirs), explained(ours)[1]
    if title == AGAIN:
        why = ["It differs by its seed alone: its factor is noise (A/A)."]
    options = [option for option in read_yaml_mapping(ours) if option != "base" and ours != theirs]
    options = [option for option in options if option not in BESIDE] or options
    return card(name, title, factors, row, figures) | {
        "base": theirs.stem,
        "why": why,
        "yaml": changes(ours),
        "code": [*dict.fromkeys(itertools.chain(*map(code_of, options)))],
    }


def card(
    name: str, title: str, factors: Mapping[str, Estimate | None], row: Row, figures: Figures
) -> dict[str, Any]:
    """Return what the page shows of anything with factors, and with figures in columns of a row."""
    return {
        "name": name,
        "title": title,
        "factors": {label: factor for label, factor in factors.items() if factor},
        "figures": [
            (label, row[column], f"{row[column]:{style}}")
            for column, (label, style) in figures.items()
            if row[column] is not None
        ],
    }


def title_of(name: str, file: Path, base: Path) -> str:
    """Return the title of a stage over the stage with the config `base`."""
    if file == base and name != file.stem:
        return AGAIN
    title = explained(file)[0] or name
    leaves_out = any(between.stem in CHANGE_SPEED for between in skipped(file, base))
    return f"{title}, and all before it" if leaves_out else title


def explained(file: Path) -> tuple[str, list[str]]:
    """Return the title of a YAML, its first line, and the paragraphs of the comment below it.

    A bare `#` separates paragraphs.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    title, *rest = [line.lstrip("# ") for line in comment] or [""]
    paragraphs = "\n".join(rest).split("\n\n")
    return title.removesuffix("."), [" ".join(p.split()) for p in paragraphs if p]


def changes(file: Path) -> str:
    """Return what a YAML sets, without its base and the comment above."""
    text = file.read_text(encoding="utf-8")
    return re.sub(r"^(#.*|base:.*)?\n", "", text, flags=re.MULTILINE)


def code_of(option: str) -> list[tuple[str, int, str]]:
    """Return the statements of the recipe that read an option, with the comments above them.

    File, line and text of each. If only methods in config.py read the option, the statements that
    call them count; or else the ones that call the callers of these methods.
    """
    names, found = {option, *methods_that_read(option)}, list[tuple[str, int, str]]()
    for _ in range(2):
        found = found or [
            (file, line, text)
            for file in RECIPE
            for line, text in statements_that_read(ROOT / file, names)
        ]
        names |= {caller for name in names for caller in methods_that_read(name)}
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
        inside = (n for n in ast.walk(function) if isinstance(n, ast.stmt) and n is not function)
        for node in sorted(inside, key=lambda node: node.lineno):
            parts = [
                part
                for child in ast.iter_child_nodes(node)
                if not isinstance(child, ast.stmt)
                for part in ast.walk(child)
            ]
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


# ---- curves


def curve_of(
    label: str,
    steps: Sequence[int],
    losses: Sequence[float],
    times: Sequence[float] = (),
    *,
    tokens_per_step: int | None = None,
    published: bool = False,
) -> dict[str, Any]:
    """Return a curve over steps, tokens and seconds; None over what is not known.

    `times`: milliseconds of each step from the first on.
    """
    is_known = steps and len(times) == len(steps) == steps[-1]
    return {
        "label": label,
        "published": published,
        "steps": [*steps],
        "tokens": tokens_per_step and [step * tokens_per_step for step in steps],
        "seconds": [*itertools.accumulate(ms / 1e3 for ms in times)] if is_known else None,
        "loss": [loss if math.isfinite(loss) else None for loss in losses],
    }


def in_place_of_bf16(stages: Sequence[Stage]) -> str:
    """Say which stages have another precision than their config says; empty if none has."""
    instead = ", ".join(
        f"{stage.name} {'fp16' if stage.config.fp16 else 'fp32'}"
        for stage in stages
        if read_yaml(stage.file)[0].get("bf16") == "true" and not stage.config.bf16
    )
    return instead and f"In place of bf16: {instead}."


def write_ladder_page(path: Path, title: str, stages: Sequence[Stage], rows: Sequence[Row]) -> None:
    """Write the page of a ladder whose finished stages have these rows."""
    by_name = {row["stage"]: row for row in rows}
    rungs, curves, published, machines = [], [], [], dict[str, None]()
    for stage in stages:
        base = stage.base or stage
        if not (summary := stage.summary()):
            continue
        row, factors = by_name[stage.name], dict[str, Estimate | None]()
        if stage is not base:
            factors = {name: row[c] and Estimate(row[c]) for name, c in OTHER_FACTORS.items()}
            factors = {HERE: row["over_base"]} | factors
        rungs.append(rung(stage.name, stage.file, base.file, factors, row, FIGURES))
        machines[f"{summary.about}, {summary.day}"] = None
        label, tokens = rungs[-1]["title"], stage.config.tokens_per_step
        log = read_rows(stage.folder / "log.csv")
        _, times = curve(log, "dt_ms")
        curves.append(
            curve_of(label, *curve(log), times, tokens_per_step=tokens(summary.world_size))
        )
        if name := stage.published.log:
            log, label = published_rows(name), f"{label}, published"
            # Times that were read without waiting for the GPU tell nothing.
            _, times = curve(log, "dt_ms") if stage.published.ms_per_step else ([], [])
            published.append(
                curve_of(label, *curve(log), times, tokens_per_step=tokens(1), published=True)
            )
    first, *others = (stage.side for stage in stages)
    options = shlex.join(word for word in first[2:] if all(word in side for side in others))
    notes = [f"All runs with {options}" if options else "", in_place_of_bf16(stages)]
    about = [*machines, *filter(None, notes)]
    # How far the ladder leads, and which rungs are worth most.
    headline = f"{max(row['over_first'].value for row in rows):.1f} times as fast as "
    headline += f"{rungs[0]['title'].lower()}."
    best = sorted(
        (-factor.value, f" {rung['title']}: {factor}.")
        for rung in rungs
        if (factor := rung["factors"].get(HERE)) and factor.ends[0] > 1
    )
    headline += "".join(text for _, text in best[:2])
    write_page(path, title, headline, about, rungs, [*curves, *published], EXPLAINED)
