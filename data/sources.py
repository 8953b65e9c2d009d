"""Documents from parquet, JSON lines and text files, a piece at a time, from any place on.

What is read is never held as a whole: of a parquet file a few rows, of JSON lines a line, of a text
file a megabyte.
"""

import contextlib
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from data.text import check_unchanged, decoded
from data.token_file import TokenFileError
from data.tokenizer import SEPARATOR, chunks
from runtime.errors import in_a_line

KINDS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".txt": "text"}
NAMED_KINDS = KINDS | {
    ".json": "json"
}  # in a folder it is mostly something else: one object over many lines, about the data
PACKED = (".gz", ".zst")
ENDINGS = ".parquet, .jsonl (.ndjson; .json if the file itself is named) or .txt, the latter two also with .gz or .zst"
BUFFER = 2**16  # bytes that are read at once
ROWS_BYTES = 2**23  # of a parquet file that are in memory at once, about
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """A file with documents."""

    path: Path
    kind: str
    packed: str  # .gz, .zst or nothing
    size: int  # in bytes
    modified: int  # when, in nanoseconds


class Place(NamedTuple):
    """Where in the sources a piece of text begins, and what of its source came before it."""

    source: int = 0  # which one, counted from 0
    offset: int = 0  # in it: rows of a parquet file; of another file bytes, once unpacked
    line: int = 0  # lines, or rows, before it
    chars: int = 0  # of its document before it
    documents: int = 0  # whole ones before it
    skipped: int = 0
    spelled_out: int = 0  # times that the separator of documents stands in the text before it


class Piece(NamedTuple):
    """A part of a document, all of it where it is short; or, without a text, the end of a source."""

    text: str | None
    begins: bool  # a document
    place: Place
    read: int  # bytes of the file that have been read by then


BEGINNING = Place()


# ---- which files


def find_sources(named: Iterable[Path]) -> tuple[list[Source], list[str]]:
    """The files that are named, and those in folders that are named, each once; and what the user
    should know.

    The order is that of the names; in a folder, and the folders in it, it is that of the files'
    paths. What is hidden is left out, and so is what has another ending. Raises TokenFileError for
    a file that is not there or has another ending, and for a folder without any.
    """
    sources: dict[str, Source] = {}
    twice = others = 0
    for name in named:
        is_folder = os.path.isdir(name)
        paths = _files_in(name) if is_folder else [name]
        kinds = KINDS if is_folder else NAMED_KINDS
        of_a_kind = [path for path in paths if _ending(path, kinds)[0]]
        if not of_a_kind:
            if not is_folder:
                _size_and_time(name)  # rather say that it is not there
            raise TokenFileError(
                f"{name}: {'no file in it has a name that ends' if is_folder else 'its name does not end'} in "
                f"{ENDINGS}, which says what a file holds"
            )
        others += len(paths) - len(of_a_kind)
        for path in of_a_kind:
            source = Source(path, *_ending(path, kinds), *_size_and_time(path))
            twice += (real := os.path.realpath(path)) in sources
            sources.setdefault(real, source)
    notes = (
        [
            f"files in the folders that are left out, as their names do not end in {ENDINGS}: "
            f"{others:,}"
        ]
        if others
        else []
    )
    notes += (
        [f"files that are named more than once, and taken once, at their first place: {twice:,}"]
        if twice
        else []
    )
    return list(sources.values()), notes


def _ending(path: Path, kinds: Mapping[str, str]) -> tuple[str, str]:
    """The kind of a file, empty if it is none of ours, and how it is packed."""
    name = path.name.lower()
    packed = next((ending for ending in PACKED if name.endswith(ending)), "")
    kind = kinds.get(os.path.splitext(name.removesuffix(packed))[1], "")
    return ("", "") if packed and kind == "parquet" else (kind, packed)


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise TokenFileError(f"{path}: cannot be read: {error.strerror}") from None
    if not path.is_file():  # a pipe would be waited for
        raise TokenFileError(f"{path}: cannot be read: not a file")
    return status.st_size, status.st_mtime_ns


def _files_in(folder: Path) -> list[Path]:
    """All files in a folder and the folders in it, linked ones too, but for hidden ones."""

    def refuse(error: OSError) -> None:
        raise TokenFileError(f"{error.filename}: cannot be read: {error.strerror}") from None

    found, seen = [], set()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        if (real := os.path.realpath(place)) in seen:  # links can go round in a circle
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place) / name for name in files if not name.startswith(".")]
    return sorted(found)


# ---- what is in them


def read_documents(
    sources: list[Source], column: str, on_bad: Callable[[str], None], start: Place = BEGINNING
) -> Iterator[Piece]:
    """The documents of all sources in order, from the place `start` on, each source followed by its
    end.

    `column` has the text in parquet files and JSON lines. `on_bad` is told of each line or row
    without a text, and may raise. Raises TokenFileError for a file that cannot be read.
    """
    for i in range(start.source, len(sources)):
        yield from _read(sources[i], column, on_bad, start if i == start.source else Place(i))


def _read(
    source: Source, column: str, on_bad: Callable[[str], None], start: Place
) -> Iterator[Piece]:
    try:
        with open(source.path, "rb") as file:
            before = os.fstat(file.fileno())
            if (before.st_size, before.st_mtime_ns) != (source.size, source.modified):
                raise TokenFileError(
                    f"{source.path}: was changed since this command began; run it again once it "
                    f"stays as it is"
                )
            if source.kind == "text":
                yield from _text(source, file, start)
            else:
                records = (
                    _rows(source, column, start)
                    if source.kind == "parquet"
                    else _lines(source, file, column, start)
                )
                yield from _pieces(source, records, on_bad, start)
            check_unchanged(source.path, before, os.fstat(file.fileno()))
    except OSError as error:
        raise TokenFileError(
            f"{source.path}: cannot be read: {error.strerror or in_a_line(error)}"
        ) from None


class _Record(NamedTuple):
    """A line or row: the text of its document, or what is wrong with it."""

    text: str | None
    problem: str
    offset: int
    line: int
    read: int


def _pieces(
    source: Source, records: Iterator[_Record], on_bad: Callable[[str], None], start: Place
) -> Iterator[Piece]:
    place = start
    for text, problem, offset, line, read in records:
        place = place._replace(offset=offset, line=line)
        if text is None:
            on_bad(
                f"{source.path}: {'row' if source.kind == 'parquet' else 'line'} {line + 1}: "
                f"{problem}"
            )
            place = place._replace(skipped=place.skipped + 1)
            continue
        chars = start.chars if offset == start.offset else 0
        for chunk in chunks([text[chars:]]) if text else [""]:
            yield Piece(chunk, chars == 0, place._replace(chars=chars), read)
            chars += len(chunk)
        place = place._replace(
            chars=0,
            documents=place.documents + 1,
            spelled_out=place.spelled_out + text.count(SEPARATOR),
        )
    yield Piece(None, False, place._replace(chars=0), source.size)


def _text(source: Source, file: BinaryIO, start: Place) -> Iterator[Piece]:
    """A text file is one document."""
    unpacked, place = _unpacked(source, file), start
    with _damage_reported(source):
        _forward(unpacked, start.offset, seekable=not source.packed)
        bom = len(BOM) if start.offset == 0 and unpacked.peek(len(BOM)).startswith(BOM) else 0
        unpacked.read(bom)
        for chunk in chunks(decoded(source.path, unpacked, "utf-8")):
            after = place._replace(
                offset=place.offset + len(chunk.encode()) + bom,
                spelled_out=place.spelled_out + chunk.count(SEPARATOR),
            )
            yield Piece(
                chunk, place.offset == 0, place, file.tell() if source.packed else after.offset
            )
            place, bom = after, 0
    if place.offset == 0:
        yield Piece("", True, place, source.size)
    yield Piece(None, False, place._replace(documents=1), source.size)


# ---- JSON lines


def _lines(source: Source, file: BinaryIO, column: str, start: Place) -> Iterator[_Record]:
    unpacked, offset = _unpacked(source, file), start.offset
    with _damage_reported(source):
        _forward(unpacked, offset, seekable=not source.packed)
        for number, line in enumerate(unpacked, start.line):
            content = line.removeprefix(BOM) if offset == 0 else line
            if content.strip():
                yield _Record(*_json_text(content, column), offset, number, file.tell())
            offset += len(line)


def _json_text(line: bytes, column: str) -> tuple[str | None, str]:
    """The text in a line of JSON; or None, and what is wrong with it."""
    try:
        value = json.loads(line.decode())
    except json.JSONDecodeError as error:
        return None, f"not a line of JSON: {error.msg}, column {error.colno}"
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error.reason}, byte {error.start + 1}"
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits, brackets in brackets in brackets
        return None, f"not a line of JSON that can be read: {in_a_line(error)}"
    if not isinstance(value, dict):
        return (
            None,
            f"must be a JSON object with the text under {json.dumps(column)}, and is "
            f"{_json_kind(value)}",
        )
    if column not in value:
        return (
            None,
            f"has no {json.dumps(column)}; it has {_listed(value)}; say with --text_column where "
            f"the text is",
        )
    if not isinstance(value[column], str):
        return None, f"{json.dumps(column)} is {_json_kind(value[column])}, not a text"
    return value[column], ""


def _json_kind(value: object) -> str:
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else kinds[type(value)]


def _listed(names: Iterable[str]) -> str:
    """Names for a message, the first ones if there are many."""
    quoted = [json.dumps(name) for name in names]
    return (
        ", ".join(quoted[:20]) + (f" and {len(quoted) - 20} more" if len(quoted) > 20 else "")
        if quoted
        else "nothing"
    )


# ---- parquet


def open_parquet(source: Source, column: str) -> Any:
    """A pyarrow.parquet.ParquetFile with a column of texts. Raises TokenFileError if it is none."""
    try:
        import pyarrow
        from pyarrow import parquet, types
    except ImportError:
        raise TokenFileError(
            f"{source.path}: needs the package pyarrow; run: pip install -r requirements.txt"
        ) from None
    with _damage_reported(source):
        opened = parquet.ParquetFile(
            source.path, buffer_size=2**20, pre_buffer=False
        )  # else it holds a row group as a whole
        schema = opened.schema_arrow
    if column not in schema.names:
        raise TokenFileError(
            f"{source.path}: has no column {json.dumps(column)}; it has {_listed(schema.names)}; "
            f"say with "
            f"--text_column which has the text"
        )
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (
        types.is_string(kind) or types.is_large_string(kind) or (kind == pyarrow.string_view())
    ):
        texts = [name for name in schema.names if "string" in str(schema.field(name).type)]
        raise TokenFileError(
            f"{source.path}: the column {json.dumps(column)} holds {kind}, not text; columns "
            f"with text: "
            f"{_listed(texts)}; say with --text_column which one"
        )
    return opened


def _rows(source: Source, column: str, start: Place) -> Iterator[_Record]:
    opened = open_parquet(source, column)
    with _damage_reported(source):
        rows, total = 0, opened.metadata.num_rows
        for i in range(opened.metadata.num_row_groups):
            group = opened.metadata.row_group(i)
            if rows + group.num_rows <= start.offset:
                rows += group.num_rows
                continue
            size = next(
                (
                    group.column(k).total_uncompressed_size
                    for k in range(group.num_columns)
                    if group.column(k).path_in_schema == column
                ),
                group.total_byte_size,
            )
            at_once = max(1, min(1024, ROWS_BYTES * group.num_rows // max(1, size)))
            for batch in opened.iter_batches(
                at_once, row_groups=[i], columns=[column], use_threads=False
            ):
                first = max(0, start.offset - rows)
                for row, (text, problem) in enumerate(_texts(batch.column(0), first), rows + first):
                    yield _Record(text, problem, row, row, source.size * (row + 1) // total)
                rows += len(batch)


def _texts(values: Any, first: int) -> list[tuple[str | None, str]]:
    """The texts of a column's values, from the first on; in place of one that is none, None and
    what is wrong with it.
    """
    try:
        texts = values[first:].to_pylist()
    except UnicodeDecodeError:
        return [_one_text(value) for value in values[first:]]
    return [(text, "null, not a text") for text in texts]


def _one_text(value: Any) -> tuple[str | None, str]:
    try:
        return value.as_py(), "null, not a text"
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error.reason}"


# ---- packed files


class _Unzstd(io.RawIOBase):
    """What a .zst file unpacks to. Unlike the package's own reader it tells a file that is cut
    short from a whole one.
    """

    def __init__(self, file: BinaryIO):
        import zstandard

        self.file, self.left = file, memoryview(b"")
        self.fresh = lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
        self.frame, self.begun = self.fresh(), False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.left:
            packed = self.frame.unused_data if self.frame.eof else b""
            if self.frame.eof:
                self.frame, self.begun = self.fresh(), False
            packed = packed or self.file.read(BUFFER // 4)
            if not packed:
                if self.begun:
                    raise EOFError("the last frame is cut short")
                return 0
            self.left, self.begun = memoryview(self.frame.decompress(packed)), True
        n = min(len(buffer), len(self.left))
        buffer[:n], self.left = self.left[:n], self.left[n:]
        return n


def _unpacked(source: Source, file: BinaryIO) -> io.BufferedReader:
    if source.packed == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), BUFFER)
    if source.packed == ".zst":
        try:
            return io.BufferedReader(_Unzstd(file), BUFFER)
        except ImportError:
            raise TokenFileError(
                f"{source.path}: needs the package zstandard; run: pip install -r requirements.txt"
            ) from None
    return file  # type: ignore[return-value]  # open() gives one


def _forward(file: io.BufferedReader, offset: int, *, seekable: bool) -> None:
    if seekable:
        file.seek(offset)
        return
    while offset and (skipped := len(file.read(min(offset, 2**20)))):
        offset -= skipped


@contextlib.contextmanager
def _damage_reported(source: Source) -> Iterator[None]:
    """Turn the errors of a file that is damaged into a TokenFileError."""
    try:
        yield
    except _damages(source) as error:
        if isinstance(error, OSError) and error.errno:  # the file may be as it should
            raise TokenFileError(
                f"{source.path}: cannot be read: {os.strerror(error.errno)}"
            ) from None
        raise TokenFileError(
            f"{source.path}: not a whole {source.packed or '.parquet'} file, but cut short or "
            f"damaged "
            f"({in_a_line(error)}); fetch or write it again"
        ) from None


def _damages(source: Source) -> tuple[type[Exception], ...]:
    """What reading a damaged file of this kind raises."""
    if source.kind == "parquet":
        import pyarrow

        return pyarrow.ArrowException, OSError
    if source.packed == ".zst":
        import zstandard

        return EOFError, zstandard.ZstdError
    return EOFError, zlib.error, gzip.BadGzipFile
