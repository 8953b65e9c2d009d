"""Write a corpus of your own from text, Markdown, JSON lines, parquet and CSV files, token files of
nanoGPT and build-nanogpt, or folders of them.

    python data/text.py book.txt notes.md --name mine
    python data/text.py dump/ more.jsonl.zst --name mine --val_every 100
    python data/text.py TinyStories-train.txt --name stories --separator '<|endoftext|>'
    python train.py --config quickstart.yaml --dataset mine

writes data/mine/mine_train_000000.bin, ... JSON lines end in .jsonl, .ndjson or .json, parquet
files in .parquet, CSV in .csv or .tsv, token files in .bin or .npy; .gz and .zst are decompressed.
All other files are UTF-8 text, one document per file. After an interruption, the same command
skips the files whose tokens are written.
"""

import sys

if __name__ == "__main__":
    sys.path[0] += "/.."  # import from the repository, not from data/

import os
import shlex
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from data.manifest import MANIFEST, SOURCES, Manifest, Shard, Source, read_sources
from data.sources import BadRecords, Piece, find_sources, kind_of, read_pieces, reading
from data.token_file import (
    HEADER_BYTES,
    SHARD_TOKENS,
    TOKEN_BYTES,
    TokenFileError,
    header,
    new_corpus,
    split_of,
)
from data.tokenizer import END_OF_TEXT, SEPARATOR, encode
from runtime.cli import Name, Options, Positive, ZeroIsOff
from runtime.errors import UserError, reported
from runtime.files import flush_to_disk, sha256, unfinished_folder, write_atomic, writing
from runtime.start import start

RESUME_HINT = "run the same command again to resume"
BATCH = 2**19  # characters and tokens in a batch, about: it takes 30 ms to tokenize
AHEAD = 32  # batches that are read ahead
PROGRESS_S = 5.0  # seconds between two progress lines
SEPARATOR_NOTE = f"{SEPARATOR} in the text becomes ordinary text, 7 tokens"
SEPARATOR_ADVICE = f"; if it separates documents, start again with --separator '{SEPARATOR}'"
BEGIN = np.array([END_OF_TEXT], "<u2")


class Part(NamedTuple):
    """Consecutive pieces of a source, by split."""

    pieces: Mapping[str, list[Piece]]
    ends: Source | None = None  # the source, in its last part


class Tokens(NamedTuple):
    """The tokens of a part, by split."""

    ids: Mapping[str, np.ndarray]
    ends: Source | None


class WritingOptions(Options):
    """writing"""

    text_column: str = "text"
    """the key in JSON lines, and the column of parquet and CSV files, that holds the text"""
    separator: Name | None = None
    """text between the documents of a text file, such as '<|endoftext|>', or $'\\n' for a line end
    (default: each text file is one document)
    """
    val_every: ZeroIsOff = 0
    """keep every Nth document for validation; 0 keeps none (see train.py's --val_fraction)"""
    shard_tokens: int = Field(SHARD_TOKENS, ge=1, le=2**31 - 1)
    """most tokens in one token file"""
    skip_bad: ZeroIsOff = 0
    """leave out up to N lines or rows without text"""
    workers: Positive | None = None
    """threads that tokenize (default: one per core)"""
    data_dir: Name = "data"
    """folder of the corpora"""


class ReadingOptions(Options):
    """reading"""

    sources: tuple[Name, ...] = Field(min_length=1)
    """files, or folders of files"""
    name: Name | None = None
    """name of the corpus, for --dataset (default: the name of the first file, without endings)"""


class TextOptions(WritingOptions, ReadingOptions):
    """All options of this command."""


def prepare(folder: Path, named: Sequence[str], options: WritingOptions) -> None:
    """Write the documents of files and folders as a new corpus; print a summary.

    An <|endoftext|> comes before each document. The folder appears when the corpus is finished;
    until then `unfinished_folder(folder)` has the token files, and a line in sources.jsonl for each
    source whose tokens are written: the same command again skips these. Raises UserError for files
    that cannot be read, OSError for files that cannot be written.
    """
    paths = find_sources(map(Path, named))
    done = _unchanged(folder, paths, options)
    if len(done) == len(paths) == len(read_sources(folder)):
        print(f"note: {folder} is there already, from the same files", file=sys.stderr)
    else:
        done = _make(folder, paths, options)
    last, size = done[-1], ""
    if last.skipped:
        print(f"note: lines or rows without text, left out: {last.skipped:,}", file=sys.stderr)
    total = sum(last.tokens.values())
    if last.characters and all(kind_of(path) != "tokens" for path in paths):
        size = f", {last.characters / (total - last.documents):.2f} characters per token"
    is_default = folder.parent == Path("data")
    place = "" if is_default else f" --data_dir {shlex.quote(str(folder.parent))}"
    print(
        f"{total:,} tokens of {last.documents:,} documents in {folder}, {last.tokens['val']:,} of "
        f"them for validation{size}; train on them with --dataset {shlex.quote(folder.name)}{place}"
    )


def _unchanged(folder: Path, paths: Sequence[Path], options: WritingOptions) -> list[Source]:
    """Return the tokenized sources, up to the first that this command would tokenize otherwise."""
    unchanged = list[Source]()
    for source, path in zip(read_sources(folder), paths, strict=False):
        is_same = source.options == _fixed(options) and source.file == str(path)
        if not is_same or source.sha256 != sha256(path):
            break
        unchanged.append(source)
    return unchanged


def _fixed(options: WritingOptions) -> dict[str, Any]:
    """Return the options that determine the tokens and token files."""
    return options.model_dump(include={"text_column", "separator", "val_every", "shard_tokens"})


def _make(folder: Path, paths: Sequence[Path], options: WritingOptions) -> list[Source]:
    """Write a new corpus, or resume an unfinished one; returns its sources."""
    with new_corpus(folder):
        done = _resume(folder, paths, options)
        try:
            _write(folder, paths, done, options)
            _finish(folder, done, options.shard_tokens)
            unfinished_folder(folder).rename(folder)
            flush_to_disk(folder.parent)
        except (UserError, OSError) as error:
            if done:
                error.add_note(RESUME_HINT)
            raise
        finally:
            if not done:
                shutil.rmtree(unfinished_folder(folder), ignore_errors=True)
    return done


def _resume(folder: Path, paths: Sequence[Path], options: WritingOptions) -> list[Source]:
    """Return the sources that need not be tokenized again. Cut the token files after their tokens.

    The tokens of a source follow those of the source before, so the first that changed and all
    after it are tokenized again.
    """
    unfinished = unfinished_folder(folder)
    done = _unchanged(unfinished, paths, options)
    files = token_files(folder, done, options.shard_tokens)
    sizes = {path: HEADER_BYTES + TOKEN_BYTES * tokens for path, tokens in files.items()}
    if any(not path.exists() or path.stat().st_size < size for path, size in sizes.items()):
        done, sizes = [], {}
    if unfinished.exists():
        kept = f"{len(done):,} of {len(paths):,} files are done"
        print(f"note: {folder} was not finished: {kept}", file=sys.stderr)
    unfinished.mkdir(exist_ok=True)
    lines = "".join(f"{source.model_dump_json()}\n" for source in done)
    write_atomic(unfinished / SOURCES, lines)
    for path in sorted(unfinished.glob("*.bin")):
        if path in sizes:
            os.truncate(path, sizes[path])
        else:
            path.unlink()
    return done


def token_files(folder: Path, done: Sequence[Source], limit: int) -> dict[Path, int]:
    """Map each token file of an unfinished corpus to its number of tokens, at most `limit`."""
    totals = done[-1].tokens if done else {}
    return {
        token_file(folder, split, i): min(limit, total - first)
        for split, total in totals.items()
        for i, first in enumerate(range(0, total, limit))
    }


def token_file(folder: Path, split: str, number: int) -> Path:
    return unfinished_folder(folder) / f"{folder.name}_{split}_{number:06d}.bin"


def _write(
    folder: Path, paths: Sequence[Path], done: list[Source], options: WritingOptions
) -> None:
    """Write the tokens of the remaining sources; add each to `done` at its end."""
    last, printed = done[-1] if done else Source(), time.monotonic()
    totals = last.tokens.copy()
    batches = _batches(paths[len(done) :], last, options)
    for tokens in _tokenize(batches, options.workers):
        for split, ids in tokens.ids.items():
            _append(folder, split, totals[split], ids, options.shard_tokens)
            totals[split] += ids.size
        if source := tokens.ends:
            source.tokens = totals.copy()
            done.append(source)
            path = unfinished_folder(folder) / SOURCES
            with writing(path), open(path, "a", encoding="utf-8") as file:
                file.write(f"{source.model_dump_json()}\n")
        if time.monotonic() > printed + PROGRESS_S:
            files = f"{len(done):,} of {len(paths):,} files"
            print(f"{folder}: {files}, {sum(totals.values()):,} tokens", file=sys.stderr)
            printed = time.monotonic()


def _append(folder: Path, split: str, total: int, ids: np.ndarray, limit: int) -> None:
    """Append tokens to a split that has `total` tokens, at most `limit` in each file."""
    while ids.size:
        number, used = divmod(total, limit)
        part, ids = np.split(ids, [limit - used])
        path = token_file(folder, split, number)
        with writing(path), open(path, "ab") as file:
            file.write(b"" if used else bytes(HEADER_BYTES))
            file.write(part.data)
        total += part.size


def _finish(folder: Path, done: list[Source], limit: int) -> None:
    """Write headers and manifest.json. Raises TokenFileError if there is nothing to train on."""
    last, files = done[-1], token_files(folder, done, limit)
    if not last.tokens["train"] or sum(last.tokens.values()) <= last.documents:
        done.clear()  # nothing to resume
        raise TokenFileError(
            f"{folder}: too short to train on: {last.documents:,} documents have "
            f"{last.tokens['train']:,} tokens for training and {last.tokens['val']:,} for "
            "validation, one <|endoftext|> each included"
        )
    for path, tokens in files.items():
        with writing(path):
            with open(path, "r+b") as file:
                file.write(header(tokens))
            flush_to_disk(path)
    shards = [Shard(file=path.name, tokens=tokens) for path, tokens in files.items()]
    manifest = Manifest(documents=last.documents, shards=shards)
    write_atomic(unfinished_folder(folder) / MANIFEST, manifest.model_dump_json(indent=1) + "\n")


# ---- reading and tokenizing


def _batches(paths: Sequence[Path], last: Source, options: WritingOptions) -> Iterator[list[Part]]:
    """Read sources in batches of similar size. `last` has the counts of the sources before."""
    counts, bad = last.model_copy(), BadRecords(options.skip_bad, last.skipped)
    batch, size = list[Part](), 0
    most, every, is_noted = 0, options.val_every, False  # `most`: documents in a text file
    for path in paths:
        with reading(path):
            digest = sha256(path)
        split = "val" if split_of(path) in ("val", "test") else "train"
        before, pieces = counts.documents, defaultdict[str, list[Piece]](list)
        for piece in read_pieces(path, options.text_column, options.separator, bad):
            counts.documents += piece.begins
            if isinstance(piece.content, str):  # a token file keeps the split of its name
                counts.characters += len(piece.content)
                if piece.begins:
                    split = "train" if not every or counts.documents % every else "val"
                if SEPARATOR in piece.content and not is_noted:
                    is_noted = True
                    advice = SEPARATOR_ADVICE if kind_of(path) == "text" else ""
                    print(f"note: {path}: {SEPARATOR_NOTE}{advice}", file=sys.stderr)
            pieces[split].append(piece)
            size += len(piece.content) + 100  # a short piece takes time too
            if size >= BATCH:
                yield [*batch, Part(pieces)]
                batch, size, pieces = [], 0, defaultdict(list)
        if kind_of(path) == "text":
            most = max(most, counts.documents - before)
        counts.file, counts.sha256, counts.options = str(path), digest, _fixed(options)
        counts.skipped = bad.count
        batch.append(Part(pieces, counts.model_copy()))
    if options.separator and most == 1:
        print(f"note: {_undivided(options.separator)}", file=sys.stderr)
    yield batch


def _undivided(separator: str) -> str:
    """Describe a separator that is in no text file, and the usual mistake: bash leaves `\\n`."""
    spelling = f"; for a line end, bash takes --separator $'{separator}'"
    advice = spelling if "\\" in separator else ""
    return f"--separator {separator!r} divides no text file: each is one document{advice}"


def _tokenize(batches: Iterator[list[Part]], workers: int | None) -> Iterator[Tokens]:
    """Tokenize batches in threads, and yield their parts in order."""
    waiting = deque[Future[list[Tokens]]]()
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for batch in batches:
            waiting.append(pool.submit(_encode, batch))
            if len(waiting) > AHEAD:
                yield from waiting.popleft().result()
        for future in waiting:
            yield from future.result()


def _encode(batch: list[Part]) -> list[Tokens]:
    return [
        Tokens({split: _join(pieces) for split, pieces in part.pieces.items()}, part.ends)
        for part in batch
    ]


def _join(pieces: Sequence[Piece]) -> np.ndarray:
    """Return the tokens of pieces, with an <|endoftext|> before each document."""
    parts: list[np.ndarray] = []
    for content, begins in pieces:
        if isinstance(content, str):
            parts += BEGIN[:begins], encode(content)
        else:
            parts.append(content)
    return np.concatenate(parts, dtype="<u2", casting="unsafe")


# ---- the command


def main(options: TextOptions) -> None:
    first = os.path.basename(os.path.abspath(options.sources[0]))
    name = options.name or first.lstrip(".").partition(".")[0] or "text"
    if "/" in name or name.startswith("."):
        raise UserError(
            f"--name {name}: has to be a plain folder name, without / or a dot at its beginning; "
            "--data_dir sets the folder that it is made in"
        )
    prepare(Path(options.data_dir) / name, options.sources, options)


if __name__ == "__main__":
    OPTIONS = start(TextOptions, positional="sources")
    with reported(interrupted=f"interrupted; {RESUME_HINT}"):
        main(OPTIONS)
