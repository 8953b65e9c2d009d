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
import re
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
from data.text import corpus_folder, print_spelled_out
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
AGAIN = "run the same command again to resume"


class WritingOptions(Options):
    """writing"""

    text_column: str = "text"
    """the column of parquet files, and the key in JSON lines, that has the text"""
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


class DocumentsOptions(WritingOptions, ReadingOptions):
    """All options of this command."""


def prepare(
    folder: Path,
    named: Sequence[Path],
    options: WritingOptions,
    command: str,
) -> Manifest:
    """Write the documents of files, and of folders of files, as the corpus of a new `folder`, or
    resume writing it.

    The tokens are in the documents' order, an <|endoftext|> before each, and do not depend on the
    workers. They fill one shard after the other, the first ones for validation; without
    `shard_tokens` a shard has SHARD_TOKENS, those for validation fewer if the corpus is small. The
    folder appears once it is whole; until then the shards are in `unfinished_folder(folder)`, and
    the same call resumes after the last whole one. `command` is what the user typed, for messages.

    Raises UserError for what cannot be read, written or resumed, OSError for a missing file.
    """
    sources = find_sources(named)
    with corpus_writer(folder, new=True):
        for source in sources:
            check_column(source, options.text_column)  # now rather than after hours
        manifest = unfinished(folder)
        if manifest:
            _check_resumable(folder, manifest, sources, options)
            for source, known in zip(sources, manifest.sources, strict=True):
                known.bytes = source.size  # those not read yet may have been corrected
        _delete_strays(folder, manifest)
        if not manifest or manifest.unfinished:
            expected = _expected_tokens(sources, options.text_column, options.skip_bad)
            if not manifest:
                share = expected // VAL_SHARE // max(1, options.val_shards)
                small = max(1, min(SHARD_TOKENS, share))
                manifest = Manifest(
                    corpus=folder.name,
                    shards=[],
                    sources=[SourceFile(file=str(s.path), bytes=s.size) for s in sources],
                    options=CorpusOptions(
                        text_column=options.text_column,
                        shard_tokens=options.shard_tokens or SHARD_TOKENS,
                        val_shards=options.val_shards,
                        val_shard_tokens=options.shard_tokens or small,
                    ),
                    unfinished=Unfinished(command=command),
                )
            _check_space(folder, expected, manifest)
        with _keeping_whole_shards(folder):
            if manifest.unfinished:
                manifest.unfinished.command = command
                _write(folder, manifest, manifest.unfinished, sources, expected, options)
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
    options: WritingOptions,
) -> None:
    """Write the shards from `place` on, and after each the manifest, from which writing can
    resume.
    """
    where, begun = unfinished_folder(folder), time.monotonic()
    where.mkdir(exist_ok=True)
    being_written = where / "shard.tmp"
    before = written = sum(shard.tokens for shard in manifest.shards)
    skipped = sum(known.skipped or 0 for known in manifest.sources[: place.source])
    bad = BadRecords(options.skip_bad, skipped)
    batches = read_batches(sources, manifest.options.text_column, bad, place.source)
    batches, drop = _skip_taken(batches, place, sources[place.source].path)
    workers = options.workers or len(os.sched_getaffinity(0))
    with contextlib.closing(tokenize(batches, workers)) as encoded:
        parts = _take(encoded, manifest, place, drop)
        while count := write_token_file(being_written, parts, _next_size(manifest)):
            i = len(manifest.shards)
            kind = "val" if i < manifest.options.val_shards else "train"
            path = being_written.rename(where / f"{folder.name}_{kind}_{i:06d}.bin")
            manifest.shards.append(Shard(file=path.name, tokens=count, sha256=sha256(path)))
            flush_to_disk(where)
            manifest.write(where)
            written += count
            rate = (written - before) / max(1e-3, time.monotonic() - begun)
            left = duration(max(0, expected - written) / rate)
            print(
                f"{path.name}: {written:,} tokens written, {rate:,.0f} tokens/s, about {left} left",
                file=sys.stderr,
            )
    being_written.unlink()


def _next_size(manifest: Manifest) -> int:
    """Return how many tokens the shard after those of the manifest takes."""
    is_val = len(manifest.shards) < manifest.options.val_shards
    return manifest.options.val_shard_tokens if is_val else manifest.options.shard_tokens


def _take(
    encoded: Iterator[tuple[Batch, Encoded]], manifest: Manifest, place: Unfinished, drop: int
) -> Iterator[np.ndarray]:
    """Take the tokens of all batches, in parts that end where a shard ends; `place` and the
    manifest record what has been taken. `drop`: how many tokens of the first batch are in the
    shards already.
    """
    left = _next_size(manifest)  # tokens that the shard which is being written still takes
    for batch, (tokens, batch_digest, file_hash) in encoded:
        if batch.source != place.source:
            place.source, place.batches, place.taken = batch.source, 0, ""
        place.batches += 1
        place.taken = _chained(place.taken, batch_digest)
        if batch.ends:
            known = manifest.sources[batch.source]
            known.documents, known.skipped = batch.documents, batch.skipped
            known.end_of_text_spelled_out, known.sha256 = batch.spelled_out, file_hash
        place.into, drop = drop, 0
        while place.into < len(tokens):
            part = tokens[place.into : place.into + left]
            place.into += len(part)
            yield part
            left = left - len(part) or _next_size(manifest)  # the full shard is in the manifest now


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
    """Delete what a writer left of an unfinished corpus and its manifest does not name.

    Only files with a writer's names: the folder may be one that somebody put there. Raises
    TokenFileError for a link: another folder's files are not ours.
    """
    where = unfinished_folder(folder)
    if where.is_symlink():
        raise TokenFileError(f"{where}: is a link; delete it, or choose another name")
    known = {MANIFEST, *(shard.file for shard in manifest.shards)} if manifest else set()
    ours = rf"shard\.tmp|{re.escape(MANIFEST)}(\.tmp)?|{re.escape(folder.name)}_[a-z]+_\d+\.bin"
    for path in where.glob("*"):
        if path.name not in known and re.fullmatch(ours, path.name):
            path.unlink()


def _delete_all(folder: Path) -> None:
    """Delete an unfinished corpus, but no file that no writer made."""
    with contextlib.suppress(OSError):
        _delete_strays(folder, None)
        unfinished_folder(folder).rmdir()


def _finish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a corpus whose shards are all written. Raises TokenFileError if one of
    them has gone, or if there is nothing to train on.
    """
    for shard in manifest.shards:
        count_tokens(unfinished_folder(folder) / shard.file)
    manifest.documents = sum(source.documents or 0 for source in manifest.sources)
    manifest.skipped = sum(source.skipped or 0 for source in manifest.sources)
    sizes, n_val = [shard.tokens for shard in manifest.shards], manifest.options.val_shards
    manifest.tokens, manifest.val_tokens = sum(sizes), sum(sizes[:n_val])
    manifest.train_tokens = manifest.tokens - manifest.val_tokens
    manifest.unfinished = None
    if manifest.tokens <= manifest.documents:
        _delete_all(folder)
        raise TokenFileError(f"{folder}: none of the {manifest.documents:,} documents has any text")
    if not manifest.train_tokens:
        _delete_all(folder)
        raise TokenFileError(
            f"{folder}: none of the {manifest.tokens:,} tokens, of {manifest.documents:,} "
            f"documents, are left to train on: a validation shard takes "
            f"{manifest.options.val_shard_tokens:,}; give more text, or run this again with "
            f"--shard_tokens {max(1, manifest.tokens // VAL_SHARE // max(1, n_val))}, or with "
            "--val_shards 0"
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
            _delete_all(folder)
        raise error from None


# ---- resuming


def _check_resumable(
    folder: Path,
    manifest: Manifest,
    sources: list[Source],
    options: WritingOptions,
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

    fixed = {"text_column", "shard_tokens", "val_shards"}
    for name, value in options.model_dump(include=fixed, exclude_none=True).items():
        if value != (then := getattr(manifest.options, name)):
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


def _expected_tokens(sources: list[Source], column: str, skip_bad: int) -> int:
    """Estimate the tokens of the sources from the beginnings of some."""
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
    return round(tokens / max(1, read) * sum(source.size for source in sources))


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
    options: WritingOptions,
    script: str,
) -> None:
    """Write the corpus as the options say, and report what it is."""
    command = shlex.join(["python", script, *sys.argv[1:]])
    manifest = prepare(folder, [Path(name) for name in named], options, command)
    print_spelled_out({s.file: s.end_of_text_spelled_out or 0 for s in manifest.sources})
    if manifest.skipped:
        print(
            f"note: lines or rows without a text, left out: {manifest.skipped:,}", file=sys.stderr
        )
    print(
        f"{manifest.tokens:,} tokens of {manifest.documents:,} documents in {folder}, "
        f"{manifest.val_tokens:,} of them for validation; train on them with --dataset "
        f"{shlex.quote(folder.name)}",
    )


def main(options: DocumentsOptions) -> None:
    folder = corpus_folder(options.data_dir, options.name)
    write(folder, options.sources, options, "data/documents.py")


if __name__ == "__main__":
    OPTIONS = start(DocumentsOptions, description=__doc__, positional="sources")
    with reported("stdout", status=1, interrupted=f"interrupted; {AGAIN}"):
        main(OPTIONS)
