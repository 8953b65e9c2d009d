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
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.token_file import HEADER_BYTES, MAGIC, TokenFileError, count_tokens
from data.tokenizer import END_OF_TEXT, chunks
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
BOM = "\ufeff"


class Piece(NamedTuple):
    """A document or a part of one, or tokens of several documents."""

    content: str | np.ndarray  # a text, or uint16 tokens
    begins: int  # number of documents that begin in it; 0 or 1 for a text


@dataclass
class BadRecords:
    """Lines and rows without text: up to `allowed` of them are left out."""

    allowed: int
    count: int = 0

    def add(self, problem: str) -> None:
        """Count one. Raises TokenFileError if there are more than `allowed`."""
        self.count += 1
        if self.count > self.allowed:
            raise TokenFileError(
                f"{problem}; correct it, or leave out up to N such records with --skip_bad N "
                f"(now {self.allowed})"
            )


# ---- the files


def kind_of(path: Path) -> str:
    """Return the kind of a file: row (parquet), line (JSON), record (CSV), tokens or text."""
    match = KIND.search(path.name)
    return str(match.lastgroup) if match else "text"


def find_sources(named: Iterable[Path]) -> list[Path]:
    """Return the files in `named`, and in its folders in the order of their paths, each file once.

    In folders, hidden files are skipped. So are .json files, which mostly describe the data, binary
    files, broken links, links to folders and, beside token files, all other files; a note names
    one. Raises TokenFileError for a folder without a usable file, for a pipe, and for a file or
    folder that is missing or cannot be read.
    """
    sources: dict[str, Path] = {}
    for name in named:
        with reading(name):
            name.stat()
        usable = [name]
        if name.is_dir():
            found = _files_below(name)
            files = [path for path in found if path.is_file()]
            usable = [path for path in files if kind_of(path) == "tokens"]
            usable = usable or [path for path in files if _is_usable(path)]
            left_out = sorted({*found}.difference(usable))
            note = (
                f"{len(left_out):,} files left out, such as {left_out[0]}" if left_out else "empty"
            )
            if not usable:
                raise TokenFileError(
                    f"{name}: no text, JSON lines, parquet, CSV or token files here ({note})"
                )
            if left_out:
                print(f"note: {name}: {note}", file=sys.stderr)
        elif not name.is_file():
            raise TokenFileError(f"{name}: a pipe or device; write its text to a file first")
        for path in usable:
            sources.setdefault(os.path.realpath(path), path)
    return [*sources.values()]


def _files_below(folder: Path) -> list[Path]:
    """Return the files below a folder that are not hidden, and its links, sorted by path.

    A link to a folder is not followed: it may lead back. Raises TokenFileError for a folder that
    cannot be read, and for a name that cannot be written as UTF-8.
    """

    def fail(error: OSError) -> None:
        raise TokenFileError(f"{error.filename}: cannot be read: {error.strerror}")

    found = list[Path]()
    for where, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if Path(where, name).is_symlink()]
        found += [Path(where, name) for name in (*links, *names) if not name.startswith(".")]
    for path in found:
        if any("\ud800" <= letter <= "\udfff" for letter in str(path)):
            raise TokenFileError(f"{path}: its name is not UTF-8; rename it")
    return sorted(found)


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
        elif "too much memory" in str(error):
            problem = f"has a window above 128 MB (zstd --long); run: zstd -d --long=31 {path}"
        raise TokenFileError(f"{path}: {problem}") from None


def read_pieces(path: Path, column: str, separator: str | None, bad: BadRecords) -> Iterator[Piece]:
    """Read the documents of a file.

    `column`: the key of JSON lines, or the column of a parquet or CSV file, with the text; records
    without text go to `bad`. `separator`: the text between the documents of a text file, with the
    line ends around it; without it, the file is one document. Raises TokenFileError for a file that
    cannot be read.
    """
    kind = kind_of(path)
    with reading(path):
        if kind == "tokens":
            yield from _read_tokens(path)
        elif kind == "text" and separator:
            for document in _split(_read_text(path), separator.replace("\r\n", "\n")):
                if document.strip():
                    yield from _cut([document.strip("\n")])
        elif kind == "text":
            yield from _cut(_read_text(path))
        else:
            read = _read_rows if kind == "row" else _read_csv
            records = _read_lines(path) if kind == "line" else read(path, column)
            for number, record in enumerate(records, 1):
                text = record.get(column) if isinstance(record, dict) else None
                if isinstance(text, str):
                    yield from _cut([text])
                elif record != "":
                    bad.add(f"{path}: {kind} {number}: {_describe(record, column)}")


def _describe(record: Any, column: str) -> str:
    if isinstance(record, Exception):
        return f"cannot be read: {in_a_line(record)}"
    return f'no text under "{column}" (--text_column) in {reprlib.repr(record)}'


def _open(path: Path) -> io.BufferedReader:
    """Open a file, decompressed."""
    import pyarrow

    compression = COMPRESSION.get(path.suffix.lower())
    if compression and not path.stat().st_size:
        raise EOFError("it is empty")  # pyarrow would read no lines
    return io.BufferedReader(pyarrow.input_stream(str(path), compression), 2**16)


def _cut(texts: Iterable[str]) -> Iterator[Piece]:
    """Cut a document, which arrives in parts, into pieces."""
    for i, chunk in enumerate(chunks(texts)):
        yield Piece(chunk, int(i == 0))


def _read_text(path: Path, by_line: bool = False) -> Iterator[str]:
    """Decode a text file, a megabyte or a line at a time, without a byte order mark. The line ends
    of Windows and old Macs become "\\n", as in sample.py's --prompt_file.
    """
    with io.TextIOWrapper(_open(path), "utf-8-sig") as file:
        try:
            while text := file.readline() if by_line else file.read(2**20):
                if "\0" in text:
                    raise UnicodeError("NUL, as in binary files and UTF-16")
                yield text
        except UnicodeError as error:
            reason = getattr(error, "reason", error)
            raise TokenFileError(
                f"{path}: not UTF-8 text ({reason}); convert it, for example with iconv"
            ) from None


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


def _read_lines(path: Path) -> Iterator[Any]:
    """Read JSON lines. Yield "" for a blank line, and the error for a line that is not JSON."""
    with _open(path) as file:
        if file.peek(1).removeprefix(BOM.encode()).lstrip().startswith(b"["):
            raise TokenFileError(
                f"{path}: a JSON array, not JSON lines; convert it: jq -c '.[]' "
                f"{shlex.quote(str(path))} > lines.jsonl"
            )
        for number, line in enumerate(file):
            try:
                text = line.decode().removeprefix("" if number else BOM)
                yield json.loads(text) if text.strip() else ""
            except (ValueError, RecursionError) as error:
                yield error


def _read_rows(path: Path, column: str) -> Iterator[Any]:
    """Read one column of a parquet file, row by row."""
    from pyarrow import parquet

    # With the defaults a whole row group would be in memory.
    opened = parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
    _check_column(path, column, opened.schema_arrow.names)
    for batch in opened.iter_batches(ROWS, columns=[column], use_threads=False):
        for value in batch.column(0):
            try:
                yield {column: value.as_py()}
            except ValueError as error:  # not UTF-8
                yield error


def _read_csv(path: Path, column: str) -> Iterator[Any]:
    """Read a CSV or TSV file, whose first row has the names of the columns, row by row. Yield ""
    for a blank row, and an error for a row of another length.
    """
    csv.field_size_limit(2**31 - 1)  # the default is 131,072 characters
    delimiter = "\t" if ".tsv" in path.name.lower() else ","
    rows = csv.reader(_read_text(path, by_line=True), delimiter=delimiter, strict=True)
    try:
        names = next(rows, [])
        _check_column(path, column, names)
        for row in rows:
            if row and len(row) != len(names):
                yield ValueError(f"{len(row)} fields, not {len(names)}: {reprlib.repr(row)}")
            else:
                yield dict(zip(names, row, strict=True)) if row else ""
    except csv.Error as error:  # rows after a wrong quote may be lost, so --skip_bad does not apply
        raise ValueError(f"line {rows.line_num}: {error}") from None


def _check_column(path: Path, column: str, names: Sequence[str]) -> None:
    """Raise TokenFileError unless there is one column of this name."""
    if names.count(column) != 1:
        raise TokenFileError(
            f'{path}: no column "{column}", or several; choose one of {names} with --text_column'
        )


def _read_tokens(path: Path) -> Iterator[Piece]:
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
        if not 0 <= part.min() <= part.max() <= END_OF_TEXT:
            i = int(np.argmax((part < 0) | (part > END_OF_TEXT)))
            raise TokenFileError(
                f"{path}: token {start + i:,} has the id {part[i]}, beyond GPT-2's vocabulary of "
                f"{END_OF_TEXT + 1:,}"
            )
        yield Piece(part.astype("<u2"), int(np.count_nonzero(part == END_OF_TEXT)))
