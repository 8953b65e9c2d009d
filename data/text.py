"""Write a corpus of your own from text, Markdown, JSON lines, parquet and CSV files, token files of
nanoGPT and build-nanogpt, or folders of them.

    python data/text.py book.txt notes.md --name mine
    python data/text.py dump/ more.jsonl.zst --name mine --val_every 100
    python data/text.py TinyStories-train.txt --name stories --separator '<|endoftext|>'
    python train.py --config quickstart.yaml --dataset mine

writes data/mine/mine_train_000000.bin, ... JSON lines end in .jsonl, .ndjson or .json, parquet
files in .parquet, CSV in .csv or .tsv, token files in .bin or .npy; .gz and .zst are decompressed.
All other files are UTF-8 text, one document per file. After an interruption, the same command
resumes after the last whole file.
"""

import sys

if __name__ == "__main__":
    sys.path[0] += "/.."  # import from the repository, not from data/

import itertools
import os
import shlex
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from data.manifest import (
    MANIFEST,
    SOURCES,
    UNFINISHED,
    Begun,
    Manifest,
    Shard,
    Source,
    read_progress,
    unfinished_folder,
)
from data.sources import BadRecords, find_sources, kind_of, read_pieces, reading
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
from runtime.files import flush_to_disk, sha256, write_atomic, writing
from runtime.start import start

RESUME_HINT = "run the same command again to resume"
BATCH = 2**19  # characters and tokens in a batch, about: it takes 30 ms to tokenize
AHEAD = 32  # batches that are read ahead
PROGRESS_S = 5.0  # seconds between two progress lines
SEPARATOR_NOTE = f"{SEPARATOR} in the text becomes ordinary text, 7 tokens"
SEPARATOR_ADVICE = f"; if it separates documents, start again with --separator '{SEPARATOR}'"
BEGIN = np.array([END_OF_TEXT], "<u2")

# Consecutive (split, Piece), and ("", Source) after a file's last piece. Tokenizing replaces the
# pieces of a split by one array.
Batch = list[tuple[str, Any]]


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
    """Write the documents of files and folders as a new corpus, or resume; print a summary.

    An <|endoftext|> comes before each document. The folder appears when the corpus is finished;
    until then `unfinished_folder(folder)` has the token files, and a line in sources.jsonl for each
    file that was read to its end. Raises UserError for files that cannot be read, OSError for files
    that cannot be written.
    """
    sources = find_sources(map(Path, named))
    if last := _find_finished(folder, sources, options):
        print(f"note: {folder} is there already, from the same files", file=sys.stderr)
    else:
        last = _make(folder, sources, options)
    if last.skipped:
        print(f"note: lines or rows without text, left out: {last.skipped:,}", file=sys.stderr)
    total, size = sum(last.tokens.values()), ""
    if last.characters and all(kind_of(path) != "tokens" for path in sources):
        size = f", {last.characters / (total - last.documents):.2f} characters per token"
    place = f" --data_dir {shlex.quote(str(folder.parent))}" * (folder.parent != Path("data"))
    print(
        f"{total:,} tokens of {last.documents:,} documents in {folder}, {last.tokens['val']:,} of "
        f"them for validation{size}; train on them with --dataset {shlex.quote(folder.name)}{place}"
    )


def _find_finished(folder: Path, sources: Sequence[Path], options: WritingOptions) -> Source | None:
    """Return the last file of a finished corpus that this command would write again, else None."""
    progress = read_progress(folder)
    if progress and progress[0].options == _fixed(options):
        files = [(str(path), sha256(path)) for path in sources]
        if files == [(source.file, source.sha256) for source in progress[1]]:
            return progress[1][-1]
    return None


def _make(folder: Path, sources: Sequence[Path], options: WritingOptions) -> Source:
    """Write a new corpus, or resume; returns the last file, which has the corpus's counts."""
    where, done = unfinished_folder(folder), list[Source]()
    try:
        with new_corpus(folder):
            done = _resume(folder, sources, options)
            try:
                _write(folder, sources, done, options)
                last = _finish(folder, done, options.shard_tokens)
            finally:
                if not done:
                    shutil.rmtree(where, ignore_errors=True)
            where.rename(folder)
            flush_to_disk(folder.parent)
            return last
    except (UserError, OSError) as error:
        if done:
            error.add_note(RESUME_HINT)
        raise


def _fixed(options: WritingOptions) -> dict[str, Any]:
    """Return the options that determine the tokens and token files."""
    return options.model_dump(include={"text_column", "separator", "val_every", "shard_tokens"})


def _resume(folder: Path, sources: Sequence[Path], options: WritingOptions) -> list[Source]:
    """Return the finished files, and truncate the token files after their tokens.

    A changed file and all files after it are read again; with other options, all files are.
    """
    where, done, fixed = unfinished_folder(folder), list[Source](), _fixed(options)
    if (progress := read_progress(where)) and progress[0].options == fixed:
        for source, path in zip(progress[1], sources, strict=False):
            if source.file != str(path) or source.sha256 != sha256(path):
                break
            done.append(source)
    files = token_files(folder, done, options.shard_tokens)
    sizes = {path: HEADER_BYTES + TOKEN_BYTES * tokens for path, tokens in files.items()}
    if any(not path.exists() or path.stat().st_size < size for path, size in sizes.items()):
        done, sizes = [], {}
    if where.exists():
        kept = f"{len(done):,} of {len(sources):,} files are done"
        print(f"note: {folder} was not finished: {kept}", file=sys.stderr)
    where.mkdir(exist_ok=True)
    command = shlex.join(["python", *sys.argv])  # this one, for messages
    lines = [Begun(command=command, options=fixed), *done]
    write_atomic(where / SOURCES, "".join(f"{line.model_dump_json()}\n" for line in lines))
    for path in {*where.iterdir()}.difference(sizes, [where / SOURCES]):
        path.unlink()
    for path, size in sizes.items():
        os.truncate(path, size)
    return done


def token_files(folder: Path, done: Sequence[Source], limit: int) -> dict[Path, int]:
    """Map each token file of an unfinished corpus to its number of tokens, at most `limit`."""
    return {
        token_file(folder, split, i): min(limit, total - first)
        for split, total in [Source(), *done][-1].tokens.items()
        for i, first in enumerate(range(0, total, limit))
    }


def token_file(folder: Path, split: str, number: int) -> Path:
    return unfinished_folder(folder) / f"{folder.name}_{split}_{number:06d}.bin"


def _write(
    folder: Path, sources: Sequence[Path], done: list[Source], options: WritingOptions
) -> None:
    """Write the tokens of the remaining files; add each to `done` at its end."""
    totals, printed = [Source(), *done][-1].tokens.copy(), time.monotonic()
    for encoded in _tokenize(_batches(sources, done, options), options.workers):
        for split, content in encoded:
            if not split:
                content.tokens = totals.copy()
                done.append(content)
                path = unfinished_folder(folder) / SOURCES
                with writing(path), open(path, "a", encoding="utf-8") as file:
                    file.write(f"{content.model_dump_json()}\n")
            else:
                _append(folder, split, totals[split], content, options.shard_tokens)
                totals[split] += content.size
        if time.monotonic() > printed + PROGRESS_S:
            files = f"{len(done):,} of {len(sources):,} files"
            print(f"{folder}: {files}, {sum(totals.values()):,} tokens", file=sys.stderr)
            printed = time.monotonic()


def _append(folder: Path, split: str, total: int, tokens: np.ndarray, limit: int) -> None:
    """Append tokens to a split that has `total` tokens, at most `limit` in each file."""
    while tokens.size:
        number, used = divmod(total, limit)
        part, tokens = np.split(tokens, [limit - used])
        path = token_file(folder, split, number)
        with writing(path), open(path, "ab") as file:
            file.write(b"" if used else bytes(HEADER_BYTES))
            file.write(part.data)
        total += part.size


def _finish(folder: Path, done: list[Source], limit: int) -> Source:
    """Write headers and manifest.json; returns the last file, which has the corpus's counts. Raises
    TokenFileError if there is nothing to train on.
    """
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
    return last


# ---- reading and tokenizing


def _batches(
    sources: Sequence[Path], done: Sequence[Source], options: WritingOptions
) -> Iterator[Batch | UserError]:
    """Read the remaining files in batches of similar size. An error is the last item."""
    last, every, is_noted = [Source(), *done][-1], options.val_every, False
    documents, characters = last.documents, last.characters
    bad, texts = BadRecords(options.skip_bad, last.skipped), list[int]()  # `texts` counts documents
    batch, size = Batch(), 0
    try:
        for path in sources[len(done) :]:
            with reading(path):
                digest = sha256(path)
            split = "val" if split_of(path) in ("val", "test") else "train"
            before = documents
            for piece in read_pieces(path, options.text_column, options.separator, bad):
                documents += piece.begins
                if isinstance(piece.content, str):  # a token file keeps the split of its name
                    characters += len(piece.content)
                    if piece.begins:
                        split = "train" if not every or documents % every else "val"
                    if SEPARATOR in piece.content and not is_noted:
                        is_noted = True
                        advice = SEPARATOR_ADVICE if kind_of(path) == "text" else ""
                        print(f"note: {path}: {SEPARATOR_NOTE}{advice}", file=sys.stderr)
                batch.append((split, piece))
                size += len(piece.content) + 100  # a short piece takes time too
                if size >= BATCH:
                    yield batch
                    batch, size = [], 0
            source = Source(
                file=str(path),
                sha256=digest,
                documents=documents,
                characters=characters,
                skipped=bad.count,
            )
            batch.append(("", source))
            if kind_of(path) == "text":
                texts.append(documents - before)
        if options.separator and texts and max(texts) <= 1:
            print(f"note: {_undivided(options.separator)}", file=sys.stderr)
        yield batch
    except UserError as error:
        yield from (batch, error)


def _undivided(separator: str) -> str:
    """Describe a separator that is in no text file, and the usual mistake: bash leaves `\\n`."""
    spelling = f"; for a line end, bash takes --separator $'{separator}'" * ("\\" in separator)
    return f"--separator {separator!r} divides no text file: each is one document{spelling}"


def _tokenize(batches: Iterator[Batch | UserError], workers: int | None) -> Iterator[Batch]:
    """Tokenize batches in threads, and yield them in order."""
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        encoding = (pool.submit(_encode, batch) for batch in batches)
        waiting = deque(itertools.islice(encoding, AHEAD))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(itertools.islice(encoding, 1))


def _encode(batch: Batch | UserError) -> Batch:
    """Tokenize a batch, with an <|endoftext|> before each document."""
    if isinstance(batch, UserError):
        raise batch
    encoded: Batch = []
    for split, items in itertools.groupby(batch, key=lambda item: item[0]):
        if not split:
            encoded += items
            continue
        parts: list[np.ndarray] = []
        for _, piece in items:
            if isinstance(piece.content, str):
                parts += BEGIN[: piece.begins], encode(piece.content)
            else:
                parts.append(piece.content)
        encoded.append((split, np.concatenate(parts, dtype="<u2", casting="unsafe")))
    return encoded


# ---- the command


def main(options: TextOptions) -> None:
    first = os.path.basename(os.path.abspath(options.sources[0]))
    name = options.name or first.lstrip(".").partition(".")[0] or "text"
    if "/" in name or name.startswith(".") or name.endswith(UNFINISHED):
        raise UserError(
            f"--name {name}: has to be a plain folder name, without /, a dot at its beginning or "
            f"{UNFINISHED} at its end; --data_dir sets the folder that it is made in"
        )
    prepare(Path(options.data_dir) / name, options.sources, options)


if __name__ == "__main__":
    OPTIONS = start(TextOptions, positional="sources")
    with reported(interrupted=f"interrupted; {RESUME_HINT}"):
        main(OPTIONS)
