"""Explain a stage by its YAML: title, reasons, changes, and the code that does it."""

import ast
import itertools
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from config import Config
from measure.ladder.stages import ROOT, Stage, bases, own_options
from measure.report.report import Card, Row
from runtime.cli import CONFIG_DIR

# The stages of speedup that can change the speed of a step; the other ones change the learning.
# A larger batch only fills the device, and the quick ladder's batch suits the machine anyway.
CHANGE_SPEED = (
    "baseline",
    *(f"speedup{step}" for step in (1, 2, "3_bf16", 5, "6_flash", 7, 8, 10, 13, 15)),
)
Code = tuple[str, int, str]  # file, line, text
CODE = "# Code: "  # begins a line that names code, in the comment of a YAML
MOST_LINES = 25  # of a function on a card
GPT2 = "GPT-2 (124M)"
RESULTS = ("Published", "The record", "Here (")


def card_of(name: str, file: Path, base: Path) -> Card:
    """Explain the stage of a config over the stage of another one."""
    title, why, others = explained(file)
    title, also, below = title or name, "", bases(file)
    skipped = [
        path
        for path in (below[: below.index(base)] if base in below else [])
        if path.stem in CHANGE_SPEED or path.parent != CONFIG_DIR
    ]
    files = [file]  # the YAMLs of the change
    if file == base and name != file.stem:
        title, why = "The same again", ["At most its seed differs: its factor is noise (A/A)."]
    elif len(skipped) == 1:  # two changes at once: the title names both
        files = [*skipped, file]
        before, why_before, others_before = explained(skipped[0])
        title, also = before, lowered(title)
        why, others = [*why_before, *why], [*others_before, *others]
    elif skipped:
        also = "all before it"
    # the options alone, without the base and the comment above them
    texts = [path.read_text(encoding="utf-8") for path in files]
    yaml = "".join(re.sub(r"(?m)^(#.*|base:.*)?\n", "", text) for text in texts)
    code = [*dict.fromkeys(itertools.chain(*map(code_of, files)))]
    return Card(title, also, why, others, yaml, code)


def lowered(title: str) -> str:
    """Return a title as it is written within a sentence: `a batch of 6`, `TF32`, `Muon`."""
    return re.sub("^(?!Muon)[A-Z](?=[a-z-]*( |$))", lambda first: first[0].lower(), title)


def phrase_of(row: Row) -> str:
    """Return what a stage changes, within a sentence: `flash attention with a batch of 6`."""
    return " with ".join(filter(None, [lowered(row.card.title or row.name), row.card.also]))


def card_of_stage(stage: Stage) -> Card:
    """Explain a stage over its base, with the values that ran in place of those in the YAML."""
    card = card_of(stage.name, file_with_effect(stage), (stage.base or stage).file)
    title, also, yaml, config = card.title, card.also, card.yaml, stage.config
    title = title.replace(GPT2, model_of(config))
    given = {re.sub("^--(no-)?|=.*", "", word) for word in stage.options}
    ran = config.model_dump(mode="json", include=given)
    for name, value in re.findall(r"(?m)^(\w+): *([^#\n]+?) *$", yaml):
        here = json.dumps(ran.get(name, value)).strip('"')
        if here != value:
            yaml = yaml.replace(f"{name}: {value}", f"{name}: {here}  # in the YAML {value}")
            # a number in a title, but not the one in GPT-2
            title, also = (
                re.sub(rf"(?<!\S){re.escape(value)}(?!\S)", here, text) for text in (title, also)
            )
    return card._replace(title=title, also=also, yaml=yaml)


def model_of(config: Config) -> str:
    """Name a model by its layers and its width: `GPT-2 (124M)`, `GPT-2 (4 layers, width 256)`."""
    if (config.n_layer, config.n_embd) == (12, 768):
        return GPT2
    return f"GPT-2 ({config.n_layer} layers, width {config.n_embd})"


def file_with_effect(stage: Stage) -> Path:
    """Return a stage's YAML, or the one it builds on if its own options ran in the base too."""
    below = bases(stage.file)[:1]
    if stage.base is None or not below or below[0] == stage.base.file:
        return stage.file
    ran, before = stage.config, stage.base.config
    own = own_options(stage.file)
    has_effect = any(getattr(ran, name) != getattr(before, name) for name in own)
    return stage.file if has_effect else below[0]


def what_ran(stage: Stage) -> list[str]:
    """Return the sizes of a stage's model and run."""
    config = stage.config
    return [
        f"{config.n_layer} layers",
        f"width {config.n_embd}",
        f"context {config.seq_len}",
        f"batch {config.batch_size}",
        f"{stage.tokens_per_step:,} tokens a step",
        f"{config.max_minutes:g} minutes" if config.max_minutes else f"{config.max_steps:,} steps",
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


def explained(file: Path) -> tuple[str, list[str], list[str]]:
    """Return the title of a YAML, its first line, and the paragraphs of the comment below it: those
    that explain it, and those with results, from the first that begins as RESULTS do.

    A bare `#` separates paragraphs; lines that name code are left out.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    words = [line.lstrip("# ") for line in comment if not line.startswith(CODE)]
    title, _, rest = "\n".join(words).partition("\n")
    paragraphs = [" ".join(part.split()) for part in rest.split("\n\n") if part.strip()]
    why = [*itertools.takewhile(lambda text: not text.startswith(RESULTS), paragraphs)]
    return title.removesuffix("."), why, paragraphs[len(why) :]


def code_of(file: Path) -> list[Code]:
    """Return the code that the comment of a YAML names, which is there."""
    lines = file.read_text(encoding="utf-8").splitlines()
    named = [line.removeprefix(CODE) for line in lines if line.startswith(CODE)]
    return [*filter(None, map(code_at, ", ".join(named).split(", ")))]


def code_at(place: str) -> Code | None:
    """Return the code at a place, with the comments, conditions and decorators right above it.

    `place`: a file of this project, and a function or class by its name, or a statement by a text
    that only one line has, as in `optimizer.py:rate_of` and `train.py:torch.compile(`. None if
    there is no such code, or more than one.
    """
    file, _, name = place.partition(":")
    path = ROOT / file
    text = path.read_text(encoding="utf-8") if path.suffix == ".py" and path.is_file() else ""
    lines = text.splitlines()
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    found = [node for node in statements if getattr(node, "name", None) == name]
    numbers = [number for number, line in enumerate(lines, 1) if name in line]
    if not found and len(numbers) == 1:
        around = [s for s in statements if s.lineno <= numbers[0] <= (s.end_lineno or 0)]
        found = around[-1:]  # the innermost: ast.walk yields a statement before those in it
    if len(found) != 1:
        return None
    first = found[0].lineno - 1
    while first and lines[first - 1].lstrip().startswith(("#", "@", "if ", "elif ")):
        first -= 1
    shown = lines[first : found[0].end_lineno]
    more = "\n..." if len(shown) > MOST_LINES else ""
    return file, first + 1, textwrap.dedent("\n".join(shown[:MOST_LINES])) + more
