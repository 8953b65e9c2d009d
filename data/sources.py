"""Read documents of text, JSON lines, parquet and CSV files, and tokens of other trainers' token
files, piece by piece, without a whole file in memory.
"""

import contextlib
import csv
import io
import json
import os
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data.token_file import HEADER_BYTES, MAGIC, TokenFileError, count_tokens
from data.tokenizer import chunks
from data.vocabulary import GPT2
from runtime.errors import UserError, in_a_line

# The kind of a file by the ending of its name; all other files are text.
KIND = re.compile(
    r"\.(?:(?P<row>parquet)|(?P<tokens>bin|npy)"
    r"|(?:(?P<line>jsonl?|ndjson)|(?P<record>csv|tsv))(?:\.gz|\.zst)?)$",
    re.IGNORECASE,
)
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
ROWS = 128  # rows of a parquet file in memory at once
TOKENS = 2**18  # tokens of a token file in memory at once


# ---- the files


def kind_of(path: Path) -> str:
    """Return the kind of a file: row (parquet), line (JSON), record (CSV), tokens or text."""
    match = KIND.search(path.name)
    return str(match.lastgroup) if match else "text"


def find_sources(named: Iterable[Path]) -> list[Path]:
    """Return the files in `named`, and in its folders in the order of their paths, each file once.

    Raises TokenFileError for a folder without a usable file, for a name that is not UTF-8, and for
    a path that is missing, cannot be read, or is a pipe or device.
    """
    sources: dict[str, Path] = {}
    for name in named:
        if not name.is_dir() and not name.is_file():
            raise TokenFileError(
                f"{name}: no such file or folder; a pipe's text has to be in a file"
            )
        for path in _usable_below(name) if name.is_dir() else [name]:
            if any("\ud800" <= letter <= "\udfff" for letter in str(path)):
                raise TokenFileError(f"{path}: its name is not UTF-8; rename it")
            sources.setdefault(os.path.realpath(path), path)
    return [*sources.values()]


def _usable_below(folder: Path) -> list[Path]:
    """Return a folder's token files, or if it has none, its other files.

    Left out, with a note, are .json files, which mostly describe the data, binary files, broken
    links, links to folders and, beside token files, all other files.
    """
    found = _paths_below(folder)
    files = [path for path in found if path.is_file()]
    usable = [path for path in files if kind_of(path) == "tokens"]
    usable = usable or [path for path in files if _is_usable(path)]
    left_out, note = sorted({*found}.difference(usable)), "empty"
    if left_out:
        note = f"{len(left_out):,} files left out, such as {left_out[0]}"
    if not usable:
        raise TokenFileError(
            f"{folder}: no text, JSON lines, parquet, CSV or token files here ({note})"
        )
    if left_out:
        print(f"note: {folder}: {note}", file=sys.stderr)
    return usable


def _paths_below(folder: Path) -> list[Path]:
    """Return the files below a folder and its links, but hidden ones, in the order of their paths.

    A link to a folder is not followed: it may lead back.
    """
    with reading(folder):
        children = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    found = list[Path]()
    for path in children:
        found += _paths_below(path) if path.is_dir() and not path.is_symlink() else [path]
    return found


def _is_usable(path: Path) -> bool:
    if kind_of(path) != "text":
        return ".json" not in path.suffixes
    with reading(path), _open(path) as file:
        return b"\0" not in file.peek(1)  # a binary file has a NUL in its first kilobytes


# ---- reading a file


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into a TokenFileError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a library may raise anything if the content is not as it expects
        problem = f"cut short or damaged ({in_a_line(error)}); fetch or write it again"
        if isinstance(error, OSError) and error.errno:
            problem = f"cannot be read: {os.strerror(error.errno)}"
        elif isinstance(error, UnicodeError):
            problem = "not UTF-8 text; convert it, for example with iconv"
        raise TokenFileError(f"{path}: {problem}") from None


def read_pieces(
    path: Path, column: str, separator: str | None, end_of_text: int
) -> Iterator[str | np.ndarray | TokenFileError]:
    """Read the documents of a file as texts, one or more for each document after an array with
    `end_of_text`; the tokens of a token file as uint16 arrays.

    `column`: the key of JSON lines, or the column of a parquet or CSV file, with the text; a record
    without a text is yielded as an error. `separator`: the text between the documents of a text
    file, with the line ends around it; without it, the file is one document. Raises TokenFileError
    for a file that cannot be read.
    """
    with reading(path):
        if kind_of(path) == "tokens":
            yield from _read_tokens(path)
            return
        for document in _documents(path, column, separator):
            if isinstance(document, TokenFileError):
                yield document
            else:
                yield np.array([end_of_text], "<u2")
                yield from chunks(document)


def _documents(
    path: Path, column: str, separator: str | None
) -> Iterator[Iterable[str] | TokenFileError]:
    """Yield the parts of each document's text."""
    kind = kind_of(path)
    if kind == "text" and separator:
        for document in _split(_read_text(path), separator.replace("\r\n", "\n")):
            if document.strip():
                yield [document.strip("\n")]
    elif kind == "text":
        yield _read_text(path)
    else:
        read = {"line": _read_lines, "row": _read_rows, "record": _read_csv}[kind]
        for number, record in enumerate(read(path, column), 1):
            text = record.get(column) if isinstance(record, dict) else None
            if isinstance(text, str):
                yield [text]
            elif record != "":
                yield TokenFileError(
                    f"{path}: {kind} {number}: {_describe(record, column)}; correct it, or leave "
                    "out up to N such records with --skip_bad N"
                )


def _describe(record: Any, column: str) -> str:
    if isinstance(record, Exception):
        return f"cannot be read: {in_a_line(record)}"
    return f'no text under "{column}" (--text_column) in {reprlib.repr(record)}'


def _open(path: Path) -> io.BufferedReader:
    """Open a file, decompressed."""
    import pyarrow

    compression = COMPRESSION.get(path.suffix.lower())
    return io.BufferedReader(pyarrow.input_stream(str(path), compression), 2**16)


def _open_text(path: Path) -> io.TextIOWrapper:
    """Open a text file without its byte order mark. The line ends of Windows and old Macs become
    "\\n", as in sample.py's --prompt_file.
    """
    return io.TextIOWrapper(_open(path), "utf-8-sig")


def _read_text(path: Path) -> Iterator[str]:
    """Read a text file, a megabyte at a time."""
    with _open_text(path) as file:
        while text := file.read(2**20):
            if "\0" in text:  # a binary file, or UTF-16
                raise UnicodeError
            yield text


def _split(texts: Iterable[str], separator: str) -> Iterator[str]:
    """Split a text, which arrives in parts, at each separator. Each part is searched once."""
    begun, rest = list[str](), ""  # `rest` may end within a separator, `begun` does not
    for text in texts:
        *documents, rest = (rest + text).split(separator)
        for document in documents:
            yield "".join([*begun, document])
            begun = []
        searched = max(0, len(rest) - len(separator) + 1)
        begun.append(rest[:searched])
        rest = rest[searched:]
    yield "".join([*begun, rest])


def _read_lines(path: Path, _: str) -> Iterator[Any]:
    """Read JSON lines. Yield "" for a blank line, and the error for a line that is not JSON."""
    with _open(path) as file:
        for line in file:
            try:
                yield json.loads(line) if line.strip() else ""
            except (ValueError, RecursionError) as error:
                yield error


def _read_rows(path: Path, column: str) -> Iterator[Any]:
    """Read one column of a parquet file, row by row. Yield the error for one that is not UTF-8."""
    from pyarrow import parquet

    # With the defaults a whole row group would be in memory.
    opened = parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
    if column not in opened.schema_arrow.names:
        names = opened.schema_arrow.names
        raise TokenFileError(
            f'{path}: no column "{column}"; choose one of {names} with --text_column'
        )
    for batch in opened.iter_batches(ROWS, columns=[column], use_threads=False):
        for value in batch.column(0):
            try:
                yield {column: value.as_py()}
            except ValueError as error:
                yield error


def _read_csv(path: Path, column: str) -> Iterator[Any]:
    """Read a CSV or TSV file, whose first row has the names of the columns, row by row. Yield an
    error for a row of another length. Blank rows are skipped.
    """
    csv.field_size_limit(2**31 - 1)  # the default is 131,072 characters
    delimiter = "\t" if ".tsv" in path.name.lower() else ","
    rows = csv.DictReader(_open_text(path), delimiter=delimiter, strict=True)
    try:
        for row in rows:
            is_whole = None not in (*row, *row.values())  # None marks a field too many or missing
            yield row if is_whole else ValueError(f"not one field per column: {reprlib.repr(row)}")
    except csv.Error as error:  # rows after a wrong quote may be lost, so --skip_bad does not apply
        raise ValueError(f"line {rows.reader.line_num}: {error}") from None


def _read_tokens(path: Path) -> Iterator[np.ndarray]:
    """Read nanoGPT's uint16 .bin, a .bin with a header (llm.c, this project), or a NumPy array."""
    if path.with_name("meta.pkl").exists():  # nanoGPT's shakespeare_char has one
        raise TokenFileError(
            f"{path}: its tokens are not GPT-2's but of the vocabulary in meta.pkl; give the text"
        )
    if path.suffix.lower() == ".npy":
        tokens = np.lib.format.open_memmap(path, mode="r").reshape(-1)
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"{tokens.dtype}, not integers")
    else:
        has_header = np.fromfile(path, "<i4", 1).tolist() == [MAGIC]
        if has_header:
            count_tokens(path)  # raises TokenFileError for a damaged file
        tokens = np.memmap(path, "<u2", "r", HEADER_BYTES if has_header else 0)
    for start in range(0, len(tokens), TOKENS):
        part = tokens[start : start + TOKENS]
        bad = (part < 0) | (part >= GPT2.size)
        if bad.any():
            i = int(bad.argmax())
            raise TokenFileError(
                f"{path}: token {start + i:,} has the id {part[i]}, beyond GPT-2's vocabulary of "
                f"{GPT2.size:,}"
            )
        yield part.astype("<u2")
