"""HellaSwag (Zellers et al. 2019): 10,042 situations from videos and how-to articles, each with
four endings, one of them right.

    python data/hellaswag.py    downloads the validation split to data/hellaswag/hellaswag_val.jsonl

`train.py --hellaswag_every N` reads it there; `evaluate.py --hellaswag` also takes any other file
of that form.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports are looked up in the repository, not in data/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hashlib
import json
import re
import shlex
import urllib.request
from http.client import HTTPException
from typing import Any, NamedTuple

from runtime.cli import Name, Options
from runtime.errors import UserError, in_a_line, reported
from runtime.files import locked, write_whole
from runtime.start import start

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
# as several public projects give it
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
ENDINGS = 4


class HellaswagOptions(Options):
    """options"""

    data_dir: Name = "data"
    """folder that holds the corpora"""


class Item(NamedTuple):
    """A situation and its endings, in the two wordings that published scores are of."""

    context: str  # as EleutherAI's harness words it, with what the situation is about first
    endings: list[str]
    plain_context: str  # as the file has it, which is what build-nanogpt scores
    plain_endings: list[str]
    label: int  # the right ending, from 0


def default_path(data_dir: str) -> Path:
    """Name the file of the validation split in a folder of corpora."""
    return Path(data_dir) / "hellaswag" / "hellaswag_val.jsonl"


def download(data_dir: str) -> Path:
    """Download the validation split if it is missing; returns its path. Raises UserError if it
    cannot be had.
    """
    path = default_path(data_dir)
    with locked(path.with_name(f".{path.name}.lock"), patience=-1):
        if not path.exists():
            _download(path)
    return path


def _download(path: Path) -> None:
    try:
        content = urllib.request.urlopen(URL, timeout=20).read()
    # ValueError: a proxy or redirection that is not an address
    except (OSError, HTTPException, ValueError) as error:
        raise UserError(
            f"HellaSwag could not be downloaded from {URL} ({in_a_line(error)}); fetch that file "
            f"by other means and "
            f"put it at {path}"
        ) from None
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise UserError(
            f"{URL}: not HellaSwag's validation split: SHA-256 {digest}, expected {SHA256}"
        )
    write_whole(path, content.decode())


def read_items(path: Path) -> list[Item]:
    """Read the items of a file in HellaSwag's form: a JSON object on each line. Raises UserError
    that names the line of the first mistake.
    """
    try:
        # splitlines would also cut at U+2028, which can be in a text
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        data_dir = str(path.parent.parent)
        is_elsewhere = path == default_path(data_dir) != default_path("data")
        elsewhere = f" --data_dir {shlex.quote(data_dir)}" * is_elsewhere
        raise UserError(
            f"{path}: no such file; HellaSwag's validation split is downloaded by: python "
            f"data/hellaswag.py{elsewhere}"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    items = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                items.append(_item(json.loads(line)))
        except ValueError as error:
            reason = error if type(error) is ValueError else "not JSON"
            raise UserError(
                f"{path}, line {number}: {reason}; an item of HellaSwag is one JSON object with "
                f"activity_label, ctx_a, ctx_b, {ENDINGS} endings and the label of the right one, "
                f"0 to {ENDINGS - 1}"
            ) from None
    if not items:
        raise UserError(f"{path}: has no items")
    return items


def _item(values: Any) -> Item:
    """Make an item of a line's JSON. Raises ValueError if that is not one."""
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    for name in ("activity_label", "ctx_a", "ctx_b"):
        if not isinstance(values.get(name), str):
            raise ValueError(
                f"{name} is {_shown(values[name])}, no text" if name in values else f"lacks {name}"
            )
    endings, label = values.get("endings"), values.get("label")
    if not isinstance(endings, list) or not all(isinstance(ending, str) for ending in endings):
        raise ValueError(f"endings are {_shown(endings)}, not {ENDINGS} texts")
    if len(endings) != ENDINGS:
        raise ValueError(f"endings: {len(endings)} of them, not {ENDINGS}")
    if str(label) not in map(str, range(ENDINGS)):  # Hugging Face's copy has labels as text
        hint = "" if label else " (the test split has no labels)"
        raise ValueError(f"label is {_shown(label)}{hint}")
    ctx_a, ctx_b = values["ctx_a"], values["ctx_b"]
    plain = values.get("ctx")
    return Item(
        clean(f"{values['activity_label']}: {ctx_a} {ctx_b.capitalize()}"),
        [clean(ending) for ending in endings],
        plain if isinstance(plain, str) else f"{ctx_a} {ctx_b}" if ctx_b else ctx_a,
        endings,
        int(str(label)),
    )


def clean(text: str) -> str:
    """Remove the marks that the how-to articles came with, such as [header], [title] and [step]."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _shown(value: object) -> str:
    return repr(value)[:60]


def main(options: HellaswagOptions) -> None:
    path = download(options.data_dir)
    count = len(read_items(path))
    with reported("stdout"):
        print(f"{count:,} items in {path}")


if __name__ == "__main__":
    OPTIONS = start(HellaswagOptions, description=__doc__)
    with reported(OPTIONS.data_dir, status=1):
        main(OPTIONS)
