"""Write a corpus of your own from text, Markdown, JSON lines, parquet and CSV files, token files of
nanoGPT and build-nanogpt, or folders of them.

    python data/text.py book.txt notes.md --name mine
    python data/text.py dump/ more.jsonl.zst --name mine --val_every 100
    python data/text.py TinyStories-train.txt --name stories --separator '<|endoftext|>'
    python data/text.py book.txt --name mine --vocab_size 4096
    python train.py --config quickstart.yaml --dataset mine

writes data/mine/mine_train_000000.bin, ... JSON lines end in .jsonl, .ndjson or .json, parquet
files in .parquet, CSV in .csv or .tsv, token files in .bin or .npy; .gz and .zst are decompressed.
All other files are UTF-8 text, one document per file. After an interruption, the same command
skips the files whose tokens are written.
"""

import sys

if __name__ == "__main__":
    sys.path[0] += "/.."  # import from the repository, not from data/

import functools
import itertools
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from data.ahead import map_ahead
from data.manifest import MANIFEST, SOURCES, Manifest, Shard, Source, read_sources
from data.sources import find_sources, kind_of, read_pieces, reading
from data.token_file import (
    HEADER_BYTES,
    MAX_VOCAB,
    SHARD_TOKENS,
    TOKEN_BYTES,
    TokenFileError,
    header,
    new_corpus,
    split_of,
)
from data.tokenizer import SEPARATOR
from data.vocabulary import FILE as VOCABULARY
from data.vocabulary import GPT2, Vocabulary, named_vocabulary
from runtime.cli import Name, Options, Positive, ZeroIsOff
from runtime.errors import UserError, reported
from runtime.files import flush_to_disk, sha256, unfinished_folder, write_atomic, writing
from runtime.start import start

RESUME_HINT = "run the same command again to resume"
BATCH = 2**19  # characters and tokens in a batch, about: it takes 30 ms to tokenize
AHEAD = 32  # batches that are read ahead
PROGRESS_S = 5.0  # seconds between two progress lines
SEPARATOR_NOTE = (
    f"{SEPARATOR} in the text becomes ordinary text; if it separates the documents of a "
    f"text file, start again with --separator '{SEPARATOR}'"
)
NO_TOKENS = np.empty(0, "<u2")


class Part(NamedTuple):
    """Consecutive pieces of a source."""

    path: Path
    pieces: Sequence[str | np.ndarray]
    record: dict[str, Any]  # of the source, in its last part


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
    vocab_size: int | None = Field(None, ge=257, le=MAX_VOCAB)
    """learn a vocabulary of N tokens from the text to train on (default: GPT-2's vocabulary)"""
    characters: bool = False
    """learn a vocabulary of the 256 bytes and single characters, of at most N tokens"""
    vocabulary: Name | None = None
    """take the vocabulary of this corpus or run: its name or folder"""
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


@dataclass(frozen=True)
class Corpus:
    """A corpus to write."""

    folder: Path
    paths: Sequence[Path]  # its sources
    options: WritingOptions
    vocabulary: Vocabulary = GPT2
    learned: Mapping[Path, str] = field(default_factory=dict)  # SHA-256 of what it was learned from

    @property
    def unfinished(self) -> Path:
        """The folder until the corpus is finished."""
        return unfinished_folder(self.folder)

    def token_file(self, split: str, number: int) -> Path:
        """Return a token file of the unfinished corpus."""
        return self.unfinished / f"{self.folder.name}_{split}_{number:06d}.bin"

    def read(self, path: Path) -> Iterator[str | np.ndarray | TokenFileError]:
        """Read the pieces of a source."""
        options = self.options
        end_of_text = self.vocabulary.end_of_text
        return read_pieces(path, options.text_column, options.separator, end_of_text)

    def origin(self, path: Path) -> dict[str, Any]:
        """Return the fields of Source that determine a source's tokens and token files."""
        with reading(path):
            digest = sha256(path)
        if self.learned.get(path, digest) != digest:
            raise TokenFileError(
                f"{path}: changed after the vocabulary was learned from it; run the same command "
                "again"
            )
        names = {"text_column", "separator", "val_every", "shard_tokens"}
        options = self.options.model_dump(include=names)
        if self.vocabulary != GPT2:
            options["vocabulary"] = self.vocabulary.identity
        return {"file": str(path), "sha256": digest, "options": options}


def prepare(folder: Path, named: Sequence[str], options: WritingOptions) -> None:
    """Write the documents of files and folders as a new corpus; print a summary.

    An <|endoftext|> comes before each document. The folder appears when the corpus is finished;
    until then `unfinished_folder(folder)` has the token files, and a line in sources.jsonl for each
    source whose tokens are written: the same command again skips these. Raises UserError for files
    that cannot be read, OSError for files that cannot be written.
    """
    paths = find_sources(map(Path, named))
    corpus = Corpus(folder, paths, options)
    is_learned = options.vocab_size or options.characters
    if options.vocabulary:
        if is_learned:
            raise UserError("--vocabulary excludes --vocab_size and --characters; choose one")
        vocabulary = named_vocabulary(options.vocabulary, options.data_dir)
        corpus = replace(corpus, vocabulary=vocabulary)
    if is_learned or corpus.vocabulary != GPT2:
        _check_texts(paths)
    if is_learned:
        learned = {path: corpus.origin(path)["sha256"] for path in paths}
        corpus = replace(corpus, vocabulary=_learn(corpus), learned=learned)
    finished = read_sources(folder)
    done = _unchanged(corpus, finished)
    if len(done) == len(paths) == len(finished):
        print(f"note: {folder} is there already, from the same files", file=sys.stderr)
    else:
        done = _make(corpus)
    last, size = done[-1], ""
    if options.separator and last.documents <= len(paths):
        print(f"note: {_undivided(options.separator)}", file=sys.stderr)
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


def _undivided(separator: str) -> str:
    """Describe a separator that is in no text file, and the usual mistake: bash leaves `\\n`."""
    spelling = f"; for a line end, bash takes --separator $'{separator}'"
    advice = spelling if "\\" in separator else ""
    return f"--separator {separator!r} divides no text file: each is one document{advice}"


# ---- the vocabulary


def _check_texts(paths: Sequence[Path]) -> None:
    """Raise TokenFileError for a token file, which cannot have another vocabulary."""
    for path in paths:
        if kind_of(path) == "tokens":
            raise TokenFileError(
                f"{path}: has GPT-2's tokens, and another vocabulary needs its text; give the "
                "text, or leave out --vocab_size, --characters and --vocabulary"
            )


def _learn(corpus: Corpus) -> Vocabulary:
    """Learn a vocabulary from the documents to train on."""
    from data.learn import learn

    size = corpus.options.vocab_size
    vocabulary = learn(_training_texts(corpus), size, corpus.options.characters)
    if size and vocabulary.size < size:
        print(f"note: the text yields {vocabulary.size:,} tokens, not {size:,}", file=sys.stderr)
    return vocabulary


def _training_texts(corpus: Corpus) -> Iterator[str]:
    """Yield the pieces of all documents but those for validation."""
    documents, val_every = 0, corpus.options.val_every
    for path in corpus.paths:
        for piece in corpus.read(path):
            if isinstance(piece, np.ndarray):  # the begin of a document
                documents += 1
            elif isinstance(piece, str) and (not val_every or documents % val_every):
                yield piece


# ---- writing


def _unchanged(corpus: Corpus, sources: Sequence[Source]) -> list[Source]:
    """Return the tokenized sources, up to the first that this command would tokenize otherwise."""
    unchanged = list[Source]()
    for source, path in zip(sources, corpus.paths, strict=False):
        if source != source.model_copy(update=corpus.origin(path)):
            break
        unchanged.append(source)
    return unchanged


def _make(corpus: Corpus) -> list[Source]:
    """Write a new corpus, or resume an unfinished one; returns its sources."""
    with new_corpus(corpus.folder):
        done = _resume(corpus)
        try:
            _write(corpus, done)
            _finish(corpus, done)
            corpus.unfinished.rename(corpus.folder)
            flush_to_disk(corpus.folder.parent)
        except (UserError, OSError) as error:
            if done:
                error.add_note(RESUME_HINT)
            raise
        finally:
            if not done:
                shutil.rmtree(corpus.unfinished, ignore_errors=True)
    return done


def _resume(corpus: Corpus) -> list[Source]:
    """Return the sources that need not be tokenized again. Cut the token files after their tokens.

    The tokens of a source follow those of the source before, so the first that changed and all
    after it are tokenized again. A vocabulary is learned again from all sources: if it is another
    one, all are tokenized again.
    """
    unfinished, limit = corpus.unfinished, corpus.options.shard_tokens
    done = _unchanged(corpus, read_sources(unfinished))
    totals = done[-1].tokens if done else {}
    sizes = {
        corpus.token_file(split, number): HEADER_BYTES + TOKEN_BYTES * min(limit, total - first)
        for split, total in totals.items()
        for number, first in enumerate(range(0, total, limit))
    }
    if any(not path.exists() or path.stat().st_size < size for path, size in sizes.items()):
        done, sizes = [], {}
    if unfinished.exists():
        kept = f"{len(done):,} of {len(corpus.paths):,} files are done"
        print(f"note: {corpus.folder} was not finished: {kept}", file=sys.stderr)
    unfinished.mkdir(exist_ok=True)
    write_atomic(unfinished / SOURCES, "".join(f"{source.model_dump_json()}\n" for source in done))
    (unfinished / VOCABULARY).unlink(missing_ok=True)
    if corpus.vocabulary != GPT2:
        write_atomic(unfinished / VOCABULARY, corpus.vocabulary.json)
    for path in unfinished.glob("*.bin"):
        if path in sizes:
            os.truncate(path, sizes[path])
        else:
            path.unlink()
    return done


def _write(corpus: Corpus, done: list[Source]) -> None:
    """Write the tokens of the remaining sources; add each to `done` at its end."""
    counts, printed = done[-1].model_copy(deep=True) if done else Source(), time.monotonic()
    options, batches = corpus.options, _batches(corpus, len(done), counts.skipped)
    encode = functools.partial(_encode, corpus.vocabulary)
    encoded = map_ahead(encode, batches, options.workers or os.cpu_count(), AHEAD)
    for part, ids in itertools.chain.from_iterable(encoded):
        begins = ids == corpus.vocabulary.end_of_text
        is_val = _is_val(part.path, counts.documents + np.cumsum(begins), options.val_every)
        _append(corpus, counts, "train", ids[~is_val])
        _append(corpus, counts, "val", ids[is_val])
        counts.documents += int(begins.sum())
        counts.characters += sum(len(piece) for piece in part.pieces if isinstance(piece, str))
        if part.record:
            tokens = counts.tokens.copy()
            done.append(counts.model_copy(update=part.record | {"tokens": tokens}))
            path = corpus.unfinished / SOURCES
            with writing(path), open(path, "a", encoding="utf-8") as file:
                file.write(f"{done[-1].model_dump_json()}\n")
        if time.monotonic() > printed + PROGRESS_S:
            printed = time.monotonic()
            files = f"{len(done):,} of {len(corpus.paths):,} files"
            total = sum(counts.tokens.values())
            print(f"{corpus.folder}: {files}, {total:,} tokens", file=sys.stderr)


def _is_val(path: Path, documents: np.ndarray, val_every: int) -> np.ndarray:
    """Return whether each token is for validation. `documents`: the number of its document."""
    if kind_of(path) == "tokens":  # it keeps the split of its name
        return np.full(documents.shape, split_of(path) in ("val", "test"))
    return documents % val_every == 0 if val_every else np.zeros(documents.shape, bool)


def _append(corpus: Corpus, counts: Source, split: str, ids: np.ndarray) -> None:
    """Append tokens to a split, at most `shard_tokens` in each file, and count them."""
    limit = corpus.options.shard_tokens
    while ids.size:
        number, used = divmod(counts.tokens[split], limit)
        part, ids = np.split(ids, [limit - used])
        path = corpus.token_file(split, number)
        with writing(path), open(path, "ab") as file:
            file.write(b"" if used else bytes(HEADER_BYTES))
            file.write(part.data)
        counts.tokens[split] += part.size


def _finish(corpus: Corpus, done: list[Source]) -> None:
    """Write headers and manifest.json. Raises TokenFileError if there is nothing to train on."""
    unfinished, last, shards = corpus.unfinished, done[-1], list[Shard]()
    if not last.tokens["train"] or sum(last.tokens.values()) <= last.documents:
        done.clear()  # nothing to resume
        raise TokenFileError(
            f"too short to train on: {last.documents:,} documents have {last.tokens['train']:,} "
            f"tokens for training and {last.tokens['val']:,} for validation, each document's "
            "<|endoftext|> included"
        )
    for path in sorted(unfinished.glob("*.bin")):
        tokens = (path.stat().st_size - HEADER_BYTES) // TOKEN_BYTES
        with writing(path):
            with open(path, "r+b") as file:
                file.write(header(tokens))
            flush_to_disk(path)
        shards.append(Shard(file=path.name, tokens=tokens))
    identity = corpus.vocabulary.identity
    manifest = Manifest(documents=last.documents, vocabulary=identity, shards=shards)
    write_atomic(unfinished / MANIFEST, manifest.model_dump_json(indent=1) + "\n")


# ---- reading and tokenizing


def _batches(corpus: Corpus, done: int, skipped: int) -> Iterator[list[Part]]:
    """Read sources in batches of similar size, but the `done` first ones, of which `skipped`
    records were left out.
    """
    batch, size, is_noted = list[Part](), 0, False
    for path in corpus.paths[done:]:
        record, pieces = corpus.origin(path), list[str | np.ndarray]()
        for piece in corpus.read(path):
            if isinstance(piece, TokenFileError):
                skipped += 1
                if skipped > corpus.options.skip_bad:
                    raise piece
                continue
            if not is_noted and isinstance(piece, str) and SEPARATOR in piece:
                is_noted = True
                print(f"note: {path}: {SEPARATOR_NOTE}", file=sys.stderr)
            pieces.append(piece)
            size += len(piece) + 100  # a short piece takes time too
            if size >= BATCH:
                yield [*batch, Part(path, pieces, {})]
                batch, size, pieces = [], 0, []
        batch.append(Part(path, pieces, record | {"skipped": skipped}))
    yield batch


def _encode(vocabulary: Vocabulary, batch: list[Part]) -> list[tuple[Part, np.ndarray]]:
    """Return each part and its tokens."""
    return [(part, _join(vocabulary, part.pieces)) for part in batch]


def _join(vocabulary: Vocabulary, pieces: Sequence[str | np.ndarray]) -> np.ndarray:
    encode = vocabulary.encode
    tokens = [encode(piece) if isinstance(piece, str) else piece for piece in pieces]
    return np.concatenate([NO_TOKENS, *tokens], dtype="<u2", casting="unsafe")


# ---- the command


def main(options: TextOptions) -> None:
    first = os.path.basename(os.path.abspath(options.sources[0]))
    name = options.name or first.lstrip(".").partition(".")[0] or "text"
    prepare(Path(options.data_dir) / name, options.sources, options)


if __name__ == "__main__":
    OPTIONS = start(TextOptions, positional="sources")
    with reported(interrupted=f"interrupted; {RESUME_HINT}"):
        main(OPTIONS)
