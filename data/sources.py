"""Documents from parquet, JSON lines and text files, a piece at a time.

No file is held in memory as a whole: of a parquet file a few rows, of JSON lines a line, of a text
file a megabyte.
"""

import codecs
import contextlib
import functools
import gzip
import io
import json
import os
import re
import reprlib
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from data.token_file import TokenFileError
from data.tokenizer import SEPARATOR, chunks
from runtime.errors import in_a_line

ENDING = re.compile(r"(\.parquet(?=$)|\.jsonl|\.ndjson|\.json|\.txt)(\.gz|\.zst)?$")
ENDINGS = (
    ".parquet, .jsonl (.ndjson; .json if the file itself is named) or .txt, "
    "the latter two also with .gz or .zst"
)
BATCH_CHARS, BATCH_PIECES = 2**19, 2**12  # of a batch, at most: about 30 ms of tokenizing
BUFFER = 2**16  # bytes that are read at once
LINE_BYTES = 2**28  # of a line of JSON, at most: it is in memory as a whole, several times
ROWS = 128  # of a parquet file that are in memory at once
BOM = b"\xef\xbb\xbf"


class Source(NamedTuple):
    """A file with documents."""

    path: Path
    size: int  # in bytes
    modified: int  # in nanoseconds
    kind: str  # the name's ending, without .gz and .zst
    packed: str  # .gz, .zst or nothing


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    begins: bool  # True if it is the document's first
    read: int  # bytes of the file that have been read by then


class Batch(NamedTuple):
    """Consecutive pieces of a source, to be tokenized together; counts are up to its end.

    Where a source is cut into batches depends on its texts alone.
    """

    source: int  # its index
    pieces: list[tuple[str, bool]]  # a text, and whether a document begins with it
    documents: int
    skipped: int  # records without a text
    spelled_out: int  # how often the separator of documents is in their text
    ends: Path | None  # the source's file, with its last batch


@dataclass
class BadRecords:
    """Lines and rows without a text: up to `allowed` of them are left out."""

    allowed: int
    count: int = 0

    def add(self, problem: str) -> None:
        """Count one. Raises TokenFileError if it is one too many."""
        self.count += 1
        if self.count > self.allowed:
            before = f"the {self.allowed:,} before it were left out; " if self.allowed else ""
            raise TokenFileError(
                f"{problem}; {before}correct it, or leave out up to N like it with --skip_bad N"
            )


# ---- which files


def find_sources(named: Iterable[Path]) -> list[Source]:
    """Find the files that are named, and those in folders that are named, each once.

    The order is that of the names; in a folder, and the folders in it, that of the files' paths.
    Hidden files and those with another ending are left out; a note on stderr says how many were.
    Raises TokenFileError for a file that has another ending, and for a folder without any, OSError
    for a file that is missing.
    """
    sources: dict[str, Source] = {}
    taken = others = 0
    for name in named:
        is_folder, before = name.is_dir(), taken
        for path in _files_in(name) if is_folder else [name]:
            match = ENDING.search(path.name.lower())
            # in a folder, .json is mostly one object about the data
            if match and not (is_folder and match[1] == ".json"):
                taken += 1
                source = find_source(path, match[1], match[2] or "")
                sources.setdefault(os.path.realpath(path), source)
            else:
                others += 1
        if taken == before:
            what = "no file in it has a name that ends" if is_folder else "its name does not end"
            raise TokenFileError(f"{name}: {what} in {ENDINGS}, which says what a file holds")
    left_out = f"files left out, as their names do not end in {ENDINGS}"
    once = "files named more than once, and taken once, at their first place"
    for note, count in ((left_out, others), (once, taken - len(sources))):
        if count:
            print(f"note: {note}: {count:,}", file=sys.stderr)
    return list(sources.values())


def find_source(path: Path, kind: str, packed: str = "") -> Source:
    """Look up a file of a known kind. Raises OSError if it is missing, TokenFileError if a manifest
    cannot hold its name.
    """
    try:
        str(path).encode()  # for the manifest
    except UnicodeEncodeError:
        raise TokenFileError(f"{path}: its name is not UTF-8; rename it") from None
    status = path.stat()
    return Source(path, status.st_size, status.st_mtime_ns, kind, packed)


def _files_in(folder: Path) -> list[Path]:
    """List all files in a folder and the folders in it, linked ones too, but for hidden ones."""

    def refuse(error: OSError) -> None:
        raise error

    paths = []
    for place, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(place) / name for name in files if not name.startswith(".")]
    return sorted(paths)


# ---- what is in them


def read_batches(
    sources: list[Source], column: str, bad: BadRecords, start: int = 0
) -> Iterator[Batch]:
    """Read the sources from the one with index `start` on, each as one batch or more.

    Raises TokenFileError as `read_pieces` does.
    """
    for i, source in enumerate(sources[start:], start):
        pieces: list[tuple[str, bool]] = []
        documents = spelled_out = chars = 0
        bad_before = bad.count
        for text, begins, _ in read_pieces(source, column, bad):
            if chars >= BATCH_CHARS or len(pieces) == BATCH_PIECES:
                yield Batch(i, pieces, documents, bad.count - bad_before, spelled_out, None)
                pieces, chars = [], 0
            pieces.append((text, begins))
            chars += len(text)
            documents += begins
            spelled_out += text.count(SEPARATOR)  # no piece ends within one
        yield Batch(i, pieces, documents, bad.count - bad_before, spelled_out, source.path)


def read_pieces(source: Source, column: str, bad: BadRecords) -> Iterator[Piece]:
    """Read the documents of a source.

    `column` is where parquet files and JSON lines have the text; what has none goes to `bad`.
    Raises TokenFileError for a file that cannot be read, is damaged, or was changed since `source`
    was made.
    """
    with _reading(source), open(source.path, "rb") as file:
        if source.packed and not source.size:  # as after a download that failed
            raise EOFError("it is empty")
        if source.kind == ".txt":
            yield from _text(source, file)
        elif source.kind == ".parquet":
            yield from _rows(source, column, bad)
        else:
            yield from _lines(source, file, column, bad)
        status = source.path.stat()
    if (status.st_size, status.st_mtime_ns) != (source.size, source.modified):
        raise TokenFileError(
            f"{source.path}: was changed while it was read; run this again once it stays as it is"
        )


@contextlib.contextmanager
def _reading(source: Source) -> Iterator[None]:
    """Turn the errors of reading a file into a TokenFileError."""
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error) as error:  # pyarrow's are ValueErrors
        if isinstance(error, OSError) and error.errno:
            reason = os.strerror(error.errno)
            raise TokenFileError(f"{source.path}: cannot be read: {reason}") from None
        raise TokenFileError(
            f"{source.path}: not a whole {source.packed or source.kind} file, but cut short or "
            f"damaged ({in_a_line(error)}); fetch or write it again"
        ) from None


def _unpacked(source: Source, file: BinaryIO) -> io.BufferedReader:
    """Unpack a .gz or .zst file, and skip a byte order mark.

    Reading the stream raises OSError, EOFError or zlib.error where the file is damaged or cut
    short.
    """
    stream: Any = file
    if source.packed == ".gz":
        stream = io.BufferedReader(gzip.GzipFile(fileobj=file), BUFFER)
    elif source.packed == ".zst":
        import pyarrow

        stream = io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), BUFFER)
    if stream.peek(len(BOM)).startswith(BOM):
        stream.read(len(BOM))
    return stream


def _document(text: str, read: int) -> Iterator[Piece]:
    for i, chunk in enumerate(chunks([text]) if text else [""]):
        yield Piece(chunk, i == 0, read)


def _text(source: Source, file: BinaryIO) -> Iterator[Piece]:
    """Read a text file, which is one document."""
    stream = _unpacked(source, file)
    read, begins = file.tell(), True
    for text in chunks(_decoded(source.path, stream)):
        read = file.tell() if source.packed else read + len(text.encode())
        yield Piece(text, begins, read)
        begins = False
    if begins:
        yield Piece("", True, source.size)


def _decoded(path: Path, stream: io.BufferedReader) -> Iterator[str]:
    """Decode UTF-8 text, a megabyte at a time, with its line ends as they are."""
    try:
        for text in codecs.iterdecode(iter(functools.partial(stream.read, 2**20), b""), "utf-8"):
            if "\0" in text:  # English in UTF-16 is valid UTF-8
                raise TokenFileError(
                    f"{path}: not UTF-8 text (it holds NUL characters, as UTF-16 and damaged files "
                    "do); convert it, for example with iconv -f UTF-16LE -t UTF-8, or leave them "
                    "out with tr -d '\\0'"
                )
            yield text
    except UnicodeDecodeError as error:
        raise TokenFileError(
            f"{path}: not UTF-8 text ({error.reason}); convert it, for example with iconv"
        ) from None


def _lines(source: Source, file: BinaryIO, column: str, bad: BadRecords) -> Iterator[Piece]:
    read_line = functools.partial(_unpacked(source, file).readline, LINE_BYTES)
    for number, line in enumerate(iter(read_line, b""), 1):
        if not line.strip():
            continue
        if len(line) == LINE_BYTES:
            raise TokenFileError(
                f"{source.path}: line {number}: longer than {LINE_BYTES >> 20} MB; a document that "
                f"long has to be a .txt file"
            )
        try:
            value = json.loads(line.decode())
            problem = (
                f'no text under "{column}" in {reprlib.repr(value)}; '
                "say with --text_column where the text is"
            )
        except (ValueError, RecursionError) as error:
            value, problem = None, f"not a line of JSON: {in_a_line(error)}"
        text = value.get(column) if isinstance(value, dict) else None
        if isinstance(text, str):
            yield from _document(text, file.tell())
        else:
            bad.add(f"{source.path}: line {number}: {problem}")


def check_column(source: Source, column: str) -> None:
    """Raises TokenFileError if the source is a parquet file without such a column of text."""
    if source.kind == ".parquet":
        with _reading(source):
            _open_parquet(source, column)


def _open_parquet(source: Source, column: str) -> Any:
    from pyarrow import parquet

    # by default, pyarrow holds a row group as a whole
    opened = parquet.ParquetFile(source.path, buffer_size=2**20, pre_buffer=False)
    fields = [(field.name, str(field.type)) for field in opened.schema_arrow]
    kinds = [kind for name, kind in fields if name == column]
    if len(kinds) != 1 or not re.match(r"(dictionary<values=)?(large_)?string", kinds[0]):
        columns = ", ".join(f'"{name}" ({kind})' for name, kind in fields)
        has = f'{len(kinds)} columns "{column}"' if kinds[1:] else f'no column "{column}" of text'
        raise TokenFileError(
            f"{source.path}: has {has}; it has {columns}; say with --text_column which has the text"
        )
    return opened


def _rows(source: Source, column: str, bad: BadRecords) -> Iterator[Piece]:
    opened, number = _open_parquet(source, column), 0
    for batch in opened.iter_batches(ROWS, columns=[column], use_threads=False):
        for value in batch.column(column):  # with "a.b" comes also a field b of a column a
            number += 1
            try:
                text, problem = value.as_py(), "null, not a text"
            except UnicodeDecodeError as error:
                text, problem = None, f"not UTF-8: {error.reason}"
            if text is None:
                bad.add(f"{source.path}: row {number}: {problem}")
            else:
                yield from _document(text, source.size * number // opened.metadata.num_rows)
