"""Explain a rung by its YAML: title, reasons, changes, and the recipe's code that they switch."""

import ast
import functools
import itertools
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from measure.ladder.stages import ROOT, Stage, bases
from measure.report.report import Card
from runtime.cli import CONFIG_DIR, read_yaml_mapping

# The stages of speedup that can change the speed of a step; the other ones change the learning.
# A larger batch only fills the device, and the quick ladder's batch suits the machine anyway.
CHANGE_SPEED = (
    "baseline",
    *(f"speedup{step}" for step in (1, 2, "3_bf16", 5, "6_flash", 7, 8, 10, 13, 15)),
)
RECIPE = ("train.py", "model.py", "optimizer.py", "dataloader.py")  # options act in these files
PLACES = 4  # most statements shown for an option
BESIDE = (
    "batch_size",
    "lr",
    "min_lr",
    "run_name",
)  # options set beside a technique
# methods that describe options, or only replace them
OTHERS = ("_", "describe", "notes", "to_yaml", "advice", "on_device")


def card_of(name: str, file: Path, base: Path) -> Card:
    """Explain the stage of a config over the stage of another one."""
    title, why = explained(file)
    title, below = title or name, bases(file)
    skipped = [
        path
        for path in (below[: below.index(base)] if base in below else [])
        if path.stem in CHANGE_SPEED or path.parent != CONFIG_DIR
    ]
    files = [file] if file != base else []  # the YAMLs that say what changed
    if file == base and name != file.stem:
        title, why = "The same again", ["At most its seed differs: its factor is noise (A/A)."]
    elif len(skipped) == 1:  # two changes at once: the title names both
        files = [*skipped, file]
        before, why_before = explained(skipped[0])
        title = f"{before}, and {re.sub('^A ', 'a ', title)}"
        why = [*why_before, *why]
    elif skipped:
        title += ", and all before it"
    options = [*itertools.chain(*map(read_yaml_mapping, files))]
    options = [option for option in options if option not in ("base", *BESIDE)] or options
    code = [*dict.fromkeys(itertools.chain(*map(code_of, options)))]
    # the options alone, without the base and the comment above them
    texts = [path.read_text(encoding="utf-8") for path in files or [file]]
    yaml = "".join(re.sub(r"(?m)^(#.*|base:.*)?\n", "", text) for text in texts)
    return Card(name, title, base.stem, why, yaml, code)


def card_of_stage(stage: Stage) -> Card:
    """Explain a stage over its base, with the values that ran in place of those in the YAML."""
    card = card_of(stage.name, file_with_effect(stage), (stage.base or stage).file)
    title, yaml, config = card.title, card.yaml, stage.config
    if (config.n_layer, config.n_embd) != (12, 768):
        small = f"GPT-2 ({config.n_layer} layers, width {config.n_embd})"
        title = title.replace("GPT-2 (124M)", small)
    given = {re.sub("^--(no-)?|=.*", "", word) for word in stage.options}
    ran = config.model_dump(mode="json", include=given)
    for name, value in re.findall(r"(?m)^(\w+): *([^#\n]+?) *$", yaml):
        here = json.dumps(ran.get(name, value)).strip('"')
        if here != value:
            yaml = yaml.replace(f"{name}: {value}", f"{name}: {here}  # in the YAML {value}")
            title = re.sub(rf"\b{re.escape(value)}\b", here, title)
    return card._replace(title=title, yaml=yaml, ran=", ".join(what_ran(stage)))


def file_with_effect(stage: Stage) -> Path:
    """Return a stage's YAML, or the one it builds on if its own options ran in the base too."""
    below = bases(stage.file)[:1]
    if stage.base is None or not below or below[0] == stage.base.file:
        return stage.file
    own, ran, before = read_yaml_mapping(stage.file), stage.config, stage.base.config
    names = [name for name in own if name != "base"]
    has_effect = any(getattr(ran, name) != getattr(before, name) for name in names)
    return stage.file if has_effect else below[0]


def what_ran(stage: Stage) -> list[str]:
    """Return the sizes of a stage's model and run."""
    config = stage.config
    steps = f"{config.max_steps:,} steps"
    return [
        f"{config.n_layer} layers",
        f"width {config.n_embd}",
        f"context {config.seq_len}",
        f"batch {config.batch_size}",
        f"{stage.tokens_per_step:,} tokens a step",
        f"{config.max_minutes:g} minutes" if config.max_minutes else steps,
        f"corpus {config.dataset}",
    ]


def all_that_ran(stages: Sequence[Stage]) -> str:
    """Return the sizes of the first stage, and those in which others differ from it."""
    first, others = what_ran(stages[0]), dict[str, list[str]]()
    for stage in stages[1:]:
        pairs = zip(first, what_ran(stage), strict=True)
        if change := ", ".join(here for there, here in pairs if here != there):
            others.setdefault(change, []).append(stage.name)
    differing = [f"{', '.join(names)}: {change}" for change, names in others.items()]
    return "; ".join([", ".join(first), *differing])


def explained(file: Path) -> tuple[str, list[str]]:
    """Return the title of a YAML, its first line, and the paragraphs of the comment below it.

    A bare `#` separates paragraphs.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    title, _, rest = "\n".join(line.lstrip("# ") for line in comment).partition("\n")
    return title.removesuffix("."), [" ".join(p.split()) for p in rest.split("\n\n") if p]


def code_of(option: str) -> list[tuple[str, int, str]]:
    """Return the statements of the recipe that read an option, with the comments above them.

    File, line and text of each. If only methods in config.py read the option, the statements that
    call them count; or else the ones that call the callers of these methods.
    """
    names, found = {option}, list[tuple[str, int, str]]()
    methods = [m for m in parsed("config.py")[1] if not m.name.startswith(OTHERS)]
    for _ in range(2):
        names |= {method.name for method in methods if attributes(method) & names}
        found = found or [s for file in RECIPE for s in statements_that_read(file, names)]
    return found[:PLACES]


@functools.cache
def attributes(node: ast.AST) -> set[str]:
    """Return the names of the attributes in some code."""
    return {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def statements_that_read(file: str, names: set[str]) -> Iterator[tuple[str, int, str]]:
    """Yield file, line and text of the statements with one of these attributes. Comments above a
    statement belong to it.
    """
    lines, shown_to = parsed(file)[0], 0
    for node in statements(file):
        parts = (n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt))
        if node.lineno > shown_to and any(attributes(part) & names for part in parts):
            first = node.lineno
            shown_to = node.end_lineno or first
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            yield file, first, textwrap.dedent("\n".join(lines[first - 1 : shown_to]))


@functools.cache
def statements(file: str) -> list[ast.stmt]:
    """Return the statements in a file's functions."""
    functions = parsed(file)[1]
    inside = {
        node for function in functions for node in ast.walk(function) if isinstance(node, ast.stmt)
    }
    return sorted(inside.difference(functions), key=lambda node: node.lineno)


@functools.cache
def parsed(file: str) -> tuple[list[str], list[ast.FunctionDef]]:
    """Return the lines of a file of this project, and the syntax trees of its functions."""
    text = (ROOT / file).read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(text))
    return text.splitlines(), [node for node in nodes if isinstance(node, ast.FunctionDef)]
