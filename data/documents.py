"""Documents at scale: parquet, JSON lines and text files, or folders of them, as a corpus of token
files.

    python data/documents.py raw/ --name mine
    python train.py --config quickstart.yaml --dataset mine

The first writes data/mine/mine_val_000000.bin, mine_train_000001.bin, ...

Run the same command again after an interruption: it resumes after the last whole shard.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports are looked up in the repository, not in data/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import contextlib
import hashlib
import itertools
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np
from pydantic import Field

from data.manifest import (
    MANIFEST,
    CorpusOptions,
    Manifest,
    Shard,
    SourceFile,
    Unfinished,
    unfinished,
    unfinished_folder,
)
from data.sources import (
    ENDINGS,
    BadRecords,
    Batch,
    Source,
    check_column,
    find_sources,
    read_batches,
    read_pieces,
)
from data.text import corpus_folder, spelled_out_note
from data.token_file import (
    SHARD_TOKENS,
    TOKEN_BYTES,
    TokenFileError,
    corpus_writer,
    count_tokens,
    write_token_file,
)
from data.tokenizer import size
from data.workers import Encoded, digest, encode_pieces, tokenize
from runtime.cli import Name, Options, Positive, ZeroIsOff
from runtime.errors import reported
from runtime.files import flush_to_disk, sha256
from runtime.runlog import duration
from runtime.start import start

# The number of tokens is estimated from so many files, and so much of them together.
SAMPLED_FILES, SAMPLED_CHARS = 8, 2**22
VAL_SHARE = 10  # of a small corpus at most one part in so many is for validation
BEING_WRITTEN = "shard.tmp"
AGAIN = "run the same command again to resume"


class WritingOptions(Options):
    """writing"""

    shard_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    """tokens of a shard (none: 100,000,000, and fewer for validation if the corpus is small)"""
    val_shards: ZeroIsOff = 1
    """how many shards, the first, are for validation"""
    workers: Positive | None = None
    """processes that tokenize (none: one for each core)"""
    skip_bad: ZeroIsOff = 0
    """leave out up to N lines or rows without a text, instead of ending at the first"""
    data_dir: Name = "data"
    """folder that holds the corpora"""


class ReadingOptions(Options):
    """reading"""

    sources: tuple[Name, ...] = Field(
        min_length=1, description=f"files, or folders of files: {ENDINGS}"
    )
    name: Name
    """name of the corpus, for --dataset"""
    text_column: str = "text"
    """the column of parquet files, and the key in JSON lines, that has the text"""


class DocumentsOptions(WritingOptions, ReadingOptions):
    """All options of this command."""


def prepare(
    folder: Path,
    named: Sequence[Path],
    *,
    text_column: str = "text",
    shard_tokens: int | None = None,
    val_shards: int = 1,
    workers: int | None = None,
    skip_bad: int = 0,
    command: str = "",
) -> Manifest:
    """Write the documents of files, and of folders of files, as the corpus of a new `folder`, or
    resume writing it.

    The tokens are in the documents' order, an <|endoftext|> before each, and do not depend on
    `workers`. They fill one shard after the other; the first `val_shards` are for validation.
    Without `shard_tokens` a shard has SHARD_TOKENS, those for validation fewer if the corpus is
    small. The folder appears once it is whole; until then the shards are in
    `unfinished_folder(folder)`, and the same call resumes after the last whole one. Up to
    `skip_bad` records without a text are left out. `command` is what the user typed, for messages.

    Raises UserError for what cannot be read, written or resumed.
    """
    sources, notes = find_sources(named)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    with corpus_writer(folder, new=True):
        for source in sources:
            check_column(source, text_column)  # now rather than after hours
        manifest = unfinished(folder)
        if manifest:
            _check_resumable(
                folder,
                manifest,
                sources,
                text_column=text_column,
                shard_tokens=shard_tokens,
                val_shards=val_shards,
            )
            for source, known in zip(sources, manifest.sources, strict=True):
                known.bytes = source.size  # those not read yet may have been corrected
        _delete_strays(folder, manifest)
        if not manifest or manifest.unfinished:
            per_byte = _tokens_per_byte(sources, text_column, skip_bad)
            expected = round(per_byte * sum(source.size for source in sources))
            small = max(1, min(SHARD_TOKENS, expected // VAL_SHARE // max(1, val_shards)))
            manifest = manifest or Manifest(
                corpus=folder.name,
                sources=[SourceFile(file=str(s.path), bytes=s.size) for s in sources],
                options=CorpusOptions(
                    text_column=text_column,
                    shard_tokens=shard_tokens or SHARD_TOKENS,
                    val_shards=val_shards,
                    val_shard_tokens=shard_tokens or small,
                ),
                unfinished=Unfinished(command=command),
            )
            _check_space(folder, expected, manifest)
        with _keeping_whole_shards(folder):
            if manifest.unfinished:
                manifest.unfinished.command = command
                workers = workers or len(os.sched_getaffinity(0))
                _write(folder, manifest, manifest.unfinished, sources, expected, workers, skip_bad)
                _finish(folder, manifest)
            flush_to_disk(unfinished_folder(folder))
            unfinished_folder(folder).rename(folder)
            flush_to_disk(folder.parent)
    return manifest


def _write(
    folder: Path,
    manifest: Manifest,
    place: Unfinished,
    sources: list[Source],
    expected: int,
    workers: int,
    skip_bad: int,
) -> None:
    """Write the shards from `place` on, and after each the manifest, from which writing can
    resume.
    """
    where, options, begun = unfinished_folder(folder), manifest.options, time.monotonic()
    where.mkdir(exist_ok=True)
    before = written = sum(shard.tokens for shard in manifest.shards)
    bad = BadRecords(
        skip_bad, sum(known.skipped or 0 for known in manifest.sources[: place.source])
    )
    batches = read_batches(sources, options.text_column, bad, place.source)
    batches, drop = _skip_taken(batches, place, sources[place.source].path)
    with contextlib.closing(tokenize(batches, workers)) as encoded:
        stream = _Stream(encoded, manifest, place, drop)
        for i in itertools.count(len(manifest.shards)):
            kind, tokens = "train", options.shard_tokens
            if i < options.val_shards:
                kind, tokens = "val", options.val_shard_tokens
            path = where / f"{folder.name}_{kind}_{i:06d}.bin"
            count = write_token_file(where / BEING_WRITTEN, stream.take(tokens))
            if count:
                (where / BEING_WRITTEN).rename(path)
                manifest.shards.append(Shard(file=path.name, tokens=count, sha256=sha256(path)))
                flush_to_disk(where)
                manifest.write(where)
                written += count
                rate = (written - before) / max(1e-3, time.monotonic() - begun)
                left = duration(max(0, expected - written) / rate)
                print(
                    f"{path.name}: {written:,} tokens written, {rate:,.0f} tokens/s, about {left} "
                    "left",
                    file=sys.stderr,
                )
            if count < tokens:
                break
    (where / BEING_WRITTEN).unlink(missing_ok=True)


class _Stream:
    """The tokens of all batches. What is taken of them is recorded in the manifest."""

    def __init__(
        self,
        encoded: Iterator[tuple[Batch, Encoded]],
        manifest: Manifest,
        place: Unfinished,
        drop: int,
    ):
        """`drop`: how many tokens of the first batch are in the shards already."""
        self.encoded, self.manifest, self.place, self.drop = encoded, manifest, place, drop
        self.rest = np.empty(0, dtype="<u2")  # of the batch that is being taken

    def take(self, n: int) -> Iterator[np.ndarray]:
        """Take the next n tokens, in parts; fewer at the end."""
        while n and (self.rest.size or self._next_batch()):
            part, self.rest = self.rest[:n], self.rest[n:]
            n -= part.size
            self.place.into += part.size
            yield part

    def _next_batch(self) -> bool:
        batch, encoded = next(self.encoded, (None, None))
        if not batch or not encoded:
            return False
        place = self.place
        if batch.source != place.source:
            place.source, place.batches, place.taken = batch.source, 0, ""
        place.batches += 1
        place.taken = _chained(place.taken, encoded.digest)
        place.into, self.rest, self.drop = self.drop, encoded.tokens[self.drop :], 0
        if batch.ends:
            known = self.manifest.sources[batch.source]
            known.documents, known.skipped = batch.documents, batch.skipped
            known.end_of_text_spelled_out, known.sha256 = batch.spelled_out, encoded.sha256
        return True


def _skip_taken(
    batches: Iterator[Batch], place: Unfinished, path: Path
) -> tuple[Iterator[Batch], int]:
    """Skip the batches that are in the shards, but for the last one, of which more may be to come;
    returns the rest, and how many of their tokens are in the shards.

    Raises TokenFileError if their texts have changed.
    """
    last, before, taken = [], "", ""
    for batch in itertools.islice(batches, place.batches):
        last, before, taken = [batch], taken, _chained(taken, digest(batch))
    if taken != place.taken:
        raise TokenFileError(f"{path}: has changed since the shards were written; restore it")
    drop = place.into
    place.batches, place.into, place.taken = max(0, place.batches - 1), 0, before
    return itertools.chain(last, batches), drop


def _chained(taken: str, following: str) -> str:
    return hashlib.sha256(f"{taken} {following}".encode()).hexdigest()


def _delete_strays(folder: Path, manifest: Manifest | None) -> None:
    """Delete what a writer left of an unfinished corpus and its manifest does not name."""
    known = {MANIFEST, *(shard.file for shard in manifest.shards)} if manifest else set()
    for path in unfinished_folder(folder).glob("*"):
        if path.name not in known:
            path.unlink()


def _finish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a corpus whose shards are all there. Raises TokenFileError if there is
    nothing to train on.
    """
    manifest.documents = sum(source.documents or 0 for source in manifest.sources)
    manifest.skipped = sum(source.skipped or 0 for source in manifest.sources)
    sizes, n_val = [shard.tokens for shard in manifest.shards], manifest.options.val_shards
    manifest.tokens, manifest.val_tokens = sum(sizes), sum(sizes[:n_val])
    manifest.train_tokens = manifest.tokens - manifest.val_tokens
    manifest.unfinished = None
    if not manifest.train_tokens:
        shutil.rmtree(unfinished_folder(folder))
        if manifest.tokens == manifest.documents:  # one <|endoftext|> each
            raise TokenFileError(
                f"{folder}: there is no text to write: {manifest.documents:,} documents, all of "
                "them empty"
            )
        raise TokenFileError(
            f"{folder}: all {manifest.tokens:,} tokens go into the validation shards, of "
            f"{manifest.options.val_shard_tokens:,} tokens each, and none are left to train on; "
            f"run this again with --shard_tokens {max(1, manifest.tokens // VAL_SHARE // n_val)}, "
            "or with --val_shards 0"
        )
    manifest.write(unfinished_folder(folder))


@contextlib.contextmanager
def _keeping_whole_shards(folder: Path) -> Iterator[None]:
    """Keep the whole shards of a corpus whose writing fails, and say so; without any, leave nothing
    of it.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, OSError):
            error = TokenFileError(f"{folder}: cannot be written: {error.strerror or error}")
        if kept := unfinished(folder):
            with contextlib.suppress(OSError):
                _delete_strays(folder, kept)  # they take space on a disk that may be full
            error.add_note(f"whole shards that are kept: {len(kept.shards)}; {AGAIN}")
        else:
            shutil.rmtree(unfinished_folder(folder), ignore_errors=True)
        raise error from None


# ---- resuming


def _check_resumable(
    folder: Path,
    manifest: Manifest,
    sources: list[Source],
    **asked: str | int | None,
) -> None:
    """Raises TokenFileError unless an unfinished corpus can be resumed with these sources and
    options, of which None is one that the user has not given.

    Sources that no shard has tokens of may have changed; `_skip_taken` checks the one that is read
    next.
    """
    where, place = unfinished_folder(folder), manifest.unfinished

    def refuse(what: str) -> NoReturn:
        command = place.command if place else "the command that it was begun with"
        raise TokenFileError(
            f"{folder}: is not finished and cannot be resumed: {what}; undo that and run: "
            f"{command}; or delete {where} to begin anew"
        )

    for name, value in asked.items():
        then = getattr(manifest.options, name)
        if value is not None and value != then:
            refuse(f"it was begun with --{name} {then}, not {value}")
    files, known_files = [str(s.path) for s in sources], [known.file for known in manifest.sources]
    if files != known_files:
        others = sorted(set(files) ^ set(known_files))
        refuse(f"the sources are others than before: {', '.join(others[:3]) or 'their order'}")
    read = sources[: place.source if place else len(sources)]
    if read:
        total = size(sum(source.size for source in read))
        print(f"checking that what was read is unchanged: {total}", file=sys.stderr)
    for source, known in zip(read, manifest.sources, strict=False):
        if source.size != known.bytes or sha256(source.path) != known.sha256:
            refuse(f"{source.path} has changed")
    for shard in manifest.shards:
        if count_tokens(where / shard.file) != shard.tokens:
            refuse(f"{where / shard.file} is not the shard that was written")


# ---- what will be needed


def _tokens_per_byte(sources: list[Source], column: str, skip_bad: int) -> float:
    """Estimate the tokens for each byte of the sources, from the beginnings of some."""
    tokens = read = 0
    bad = BadRecords(skip_bad)
    sampled = sources[:: -(-len(sources) // SAMPLED_FILES)]
    for source in sampled:
        chars = 0
        for piece in read_pieces(source, column, bad):
            tokens += encode_pieces([(piece.text, piece.begins)]).size
            chars += len(piece.text)
            if chars > SAMPLED_CHARS // len(sampled):
                read += piece.read
                break
        else:
            read += source.size
    return tokens / max(1, read)


def _check_space(folder: Path, expected: int, manifest: Manifest) -> None:
    """Say how much is to be written. Raises TokenFileError if the disk has no space for it."""
    done = sum(shard.tokens for shard in manifest.shards)
    needed, free = max(0, expected - done) * TOKEN_BYTES, shutil.disk_usage(folder.parent).free
    about = f"about {expected:,} tokens, {done:,} of them written: {size(needed)} of disk space"
    if needed > free:
        raise TokenFileError(
            f"{folder}: the disk has too little space: {about} are needed, {size(free)} are free; "
            "free some, name another place with --data_dir, or give fewer files"
        )
    print(f"{about} are needed, {size(free)} are free", file=sys.stderr)


# ---- the command


def write(
    folder: Path,
    named: Sequence[str],
    text_column: str,
    options: WritingOptions,
    script: str,
) -> None:
    """Write the corpus as the options say, and report what it is."""
    # a manifest is UTF-8, the names in a command may be anything
    command = shlex.join(["python", script, *sys.argv[1:]])
    manifest = prepare(
        folder,
        [Path(name) for name in named],
        text_column=text_column,
        command=command.encode(errors="backslashreplace").decode(),
        **options.model_dump(include={"shard_tokens", "val_shards", "workers", "skip_bad"}),
    )
    times = {source.file: source.end_of_text_spelled_out or 0 for source in manifest.sources}
    if note := spelled_out_note(times):
        print(note, file=sys.stderr)
    if manifest.skipped:
        print(
            f"note: lines or rows without a text, left out: {manifest.skipped:,}", file=sys.stderr
        )
    with reported("stdout"):
        print(
            f"{manifest.tokens:,} tokens of {manifest.documents:,} documents in {folder}, "
            f"{manifest.val_tokens:,} of them for validation; train on them with --dataset "
            f"{shlex.quote(folder.name)}",
        )


def main(options: DocumentsOptions) -> None:
    folder = corpus_folder(options.data_dir, options.name)
    write(folder, options.sources, options.text_column, options, "data/documents.py")


if __name__ == "__main__":
    OPTIONS = start(DocumentsOptions, description=__doc__, positional="sources")
    with reported(OPTIONS.name, status=1, interrupted=f"interrupted; {AGAIN}"):
        main(OPTIONS)
