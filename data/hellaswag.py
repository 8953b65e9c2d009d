"""Download HellaSwag (Zellers et al. 2019): 10,042 situations from videos and how-to articles, each
with four endings, one of them right.

    python data/hellaswag.py    downloads the validation split to data/hellaswag/hellaswag_val.jsonl

`train.py --hellaswag_every N` reads it there; `evaluate.py --hellaswag` also takes other files in
this format.
"""

import sys

if __name__ == "__main__":
    sys.path[0] += "/.."  # import from the repository, not from data/

from pathlib import Path
from typing import Literal, NamedTuple

import pydantic
from tiktoken import Encoding

from data.download import read_known_file
from runtime.cli import Name, Options
from runtime.errors import UserError, reported
from runtime.files import sole_writer, write_atomic
from runtime.start import start

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
# Several public projects have the same hash.
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
ENDINGS = 4


class HellaswagOptions(Options):
    """options"""

    data_dir: Name = "data"
    """folder of the corpora"""


class Line(pydantic.BaseModel):
    """A line of the file: a situation and its endings."""

    ctx: str
    endings: list[str] = pydantic.Field(min_length=ENDINGS, max_length=ENDINGS)
    label: Literal[0, 1, 2, 3, "0", "1", "2", "3"]  # the right ending; text in Hugging Face's copy


class Row(NamedTuple):
    """A text of tokens; the last `scored` of them are the ending."""

    tokens: tuple[int, ...]
    scored: int


class Question(NamedTuple):
    """An item in tokens: a row for each ending, and the index of the right one."""

    rows: list[Row]
    right: int


def default_path(data_dir: str) -> Path:
    """Return the file of the validation split in a folder of corpora."""
    return Path(data_dir) / "hellaswag" / "hellaswag_val.jsonl"


def download(data_dir: str, url: str = URL, sha256: str = SHA256) -> Path:
    """Download the validation split if it is missing; returns its path. Raises UserError if that
    fails.
    """
    path = default_path(data_dir)
    with sole_writer(path, on_wait=lambda: None):
        if not path.exists():
            hint = f"download it in another way and put it at {path}"
            content = read_known_file("HellaSwag's validation split", url, sha256, hint)
            write_atomic(path, content.decode())
    return path


def read_items(path: Path) -> list[Line]:
    """Read the items of a file in HellaSwag's format, JSON lines. Raises UserError with the line of
    the first mistake.
    """
    try:
        # splitlines() would also split at U+2028, which a text may contain.
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; HellaSwag's validation split is downloaded by: python "
            "data/hellaswag.py (--data_dir FOLDER)"
        ) from None
    items = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                items.append(Line.model_validate_json(line))
        except pydantic.ValidationError as error:
            problem = error.errors()[0]
            said = " ".join(map(str, (*problem["loc"], problem["msg"])))
            raise UserError(
                f"{path}, line {number}: {said}; a line is a JSON object with ctx, {ENDINGS} "
                f"endings and the label of the right one, 0 to {ENDINGS - 1}, which the test split "
                "lacks"
            ) from None
    if not items:
        raise UserError(f"{path}: has no items")
    return items


def tokenize(item: Line, encoding: Encoding, block_size: int) -> Question:
    """Tokenize the situation with each ending, as build-nanogpt does.

    A text longer than the model's context loses its beginning.
    """
    # A token to read comes before the first one to score.
    context = encoding.encode_ordinary(item.ctx) or [encoding.eot_token]
    rows = []
    for ending in item.endings:
        scored = encoding.encode_ordinary(f" {ending}")
        tokens = (context + scored)[-block_size - 1 :]
        rows.append(Row(tuple(tokens), min(len(scored), block_size)))
    return Question(rows, int(item.label))


if __name__ == "__main__":
    OPTIONS = start(HellaswagOptions)
    with reported():
        PATH = download(OPTIONS.data_dir)
        print(f"{len(read_items(PATH)):,} items in {PATH}")
