"""Documents at scale: parquet, JSON lines and text files, or folders of them, as a corpus of token
files.

    python data/documents.py raw/ --name mine              writes data/mine: mine_val_000000.bin, mine_train_000001.bin, ...
    python train.py --config quickstart.yaml --dataset mine

Run the same command again after an interruption: it goes on after the last whole shard.
"""

import os
import sys

sys.path.insert(
    0, os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
)  # found also when run as a script

from runtime.signals import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()  # first of all: imports take a moment

import argparse
import bisect
import contextlib
import errno
import hashlib
import itertools
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np

from data.manifest import (
    MANIFEST,
    Manifest,
    Options,
    Shard,
    SourceFile,
    Unfinished,
    unfinished,
    unfinished_folder,
)
from data.sources import ENDINGS, Piece, Place, Source, find_sources, open_parquet, read_documents
from data.text import corpus_folder, spelled_out_note
from data.token_file import (
    SHARD_TOKENS,
    TOKEN_BYTES,
    TokenFileError,
    corpus_writer,
    count_tokens,
    header,
    write_token_file,
)
from data.tokenizer import get_encoding, size
from data.workers import Tokens, Workers, encode
from runtime.errors import UserError, reported
from runtime.files import flush_to_disk, sha256
from runtime.runlog import duration

BATCH_CHARS, BATCH_PIECES = 2**19, 2**12  # that are handed to a worker at once: 30 ms of work
SAMPLED_FILES, SAMPLED_CHARS = (
    8,
    2**22,
)  # the number of tokens is estimated from so many files, and so much of them together
VAL_SHARE = 10  # of a small corpus at most one part in so many is for validation
BEING_WRITTEN = "shard.tmp"
AGAIN = "run the same command again to go on"


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
    """Write the documents of files, and of folders of files, as the corpus of a new `folder`, or go
    on with it.

    The tokens are in the documents' order, an <|endoftext|> before each, and do not depend on
    `workers`. They fill the shards one after the other; the first `val_shards` are for validation.
    Without `shard_tokens` a shard has SHARD_TOKENS, those for validation fewer where the corpus is
    small. The folder appears once it is whole; until then the shards lie in
    `unfinished_folder(folder)`, and the same call goes on after the last whole one. Up to
    `skip_bad` records without a text are left out. `command` is what the user has typed, for
    messages.

    Raises UserError for what cannot be read, written or gone on with.
    """
    sources, notes = find_sources(named)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    with corpus_writer(folder, new=True):
        for source in sources:
            if source.kind == "parquet":
                open_parquet(source, text_column)  # rather now than after hours
        manifest = unfinished(folder)
        if manifest:
            asked = {
                "text_column": text_column,
                "shard_tokens": shard_tokens,
                "val_shards": val_shards,
            }
            _check_same(folder, manifest, sources, asked)
            for source, known in zip(sources, manifest.sources, strict=True):
                known.bytes = source.size  # those that are still to be read may have been corrected
        _delete_strays(folder, manifest)
        if not manifest or manifest.unfinished:
            expected = round(
                _tokens_per_byte(sources, text_column, _at_most(skip_bad))
                * sum(source.size for source in sources)
            )
            manifest = manifest or _begin(
                folder, sources, expected, text_column, shard_tokens, val_shards
            )
            _check_space(folder, sources, expected, manifest)
        with _keeping_whole_shards(folder):
            if manifest.unfinished:
                manifest.unfinished.command = _name(command)
                _write(
                    folder, manifest, manifest.unfinished, sources, workers or _cores(), skip_bad
                )
                _finish(folder, manifest)
            flush_to_disk(unfinished_folder(folder))
            unfinished_folder(folder).rename(folder)
            flush_to_disk(folder.parent)
    return manifest


def _begin(
    folder: Path,
    sources: list[Source],
    expected: int,
    text_column: str,
    shard_tokens: int | None,
    val_shards: int,
) -> Manifest:
    """The manifest of a corpus that is about to be written, of an `expected` number of tokens."""
    val_tokens = shard_tokens or max(
        1, min(SHARD_TOKENS, expected // VAL_SHARE // max(1, val_shards))
    )
    return Manifest(
        corpus=folder.name,
        sources=[SourceFile(file=_name(source.path), bytes=source.size) for source in sources],
        options=Options(
            text_column=text_column,
            shard_tokens=shard_tokens or SHARD_TOKENS,
            val_shards=val_shards,
            val_shard_tokens=val_tokens,
        ),
        unfinished=Unfinished(command="", place=list(Place()), into=0, taken="", modified=0),
    )


def _write(
    folder: Path,
    manifest: Manifest,
    going_on: Unfinished,
    sources: list[Source],
    workers: int,
    skip_bad: int,
) -> None:
    """Write the shards that are not there yet, and after each the manifest, which says how to go
    on.
    """
    place, options = Place(*going_on.place), manifest.options
    unfinished_folder(folder).mkdir(exist_ok=True)
    skipped = place.skipped + sum(
        source.skipped or 0 for source in manifest.sources[: place.source]
    )

    pieces = read_documents(sources, options.text_column, _at_most(skip_bad, skipped), place)
    with (
        Workers(workers) as pool,
        _Hashes(sources) as hashes,
        _Progress(sources, place) as progress,
    ):
        stream = _Stream(pool.encode(_batches(pieces, hashes.begin)), going_on, progress.after)
        for i in itertools.count(len(manifest.shards)):
            kind, tokens = (
                ("val", options.val_shard_tokens)
                if i < options.val_shards
                else ("train", options.shard_tokens)
            )
            path, digest = unfinished_folder(folder) / BEING_WRITTEN, hashlib.sha256(header(tokens))
            count = write_token_file(path, _told(stream.take(tokens), digest.update))
            if count:
                shard = Shard(
                    file=f"{folder.name}_{kind}_{i:06d}.bin",
                    tokens=count,
                    sha256=digest.hexdigest() if count == tokens else sha256(path),
                )
                path.rename(path.with_name(shard.file))
                manifest.shards.append(shard)
            else:
                path.unlink()
            while stream.ends:
                end = stream.ends.pop()
                source = manifest.sources[end.source]
                source.documents, source.skipped, source.end_of_text_spelled_out = (
                    end.documents,
                    end.skipped,
                    end.spelled_out,
                )
            for k, sha in hashes.before(len(sources) if count < tokens else stream.place.source):
                manifest.sources[k].sha256 = sha
            if count < tokens:
                break
            going_on.place, going_on.into, going_on.taken = (
                list(stream.place),
                stream.into,
                stream.taken,
            )
            going_on.modified = sources[stream.place.source].modified
            flush_to_disk(path.parent)
            manifest.write(path.parent)
        progress.end()


def _told(parts: Iterable[np.ndarray], tell: Callable[[Any], None]) -> Iterator[np.ndarray]:
    """The same parts; `tell` is given each before it is taken."""
    for part in parts:
        tell(part)
        yield part


def _delete_strays(folder: Path, manifest: Manifest | None) -> None:
    """Delete what a writer has left of an unfinished corpus that its manifest does not name."""
    known = {MANIFEST, *(shard.file for shard in manifest.shards)} if manifest else set()
    for path in unfinished_folder(folder).glob("*"):
        if path.name not in known:
            path.unlink()


def _at_most(skip_bad: int, skipped: int = 0) -> Callable[[str], None]:
    """What raises TokenFileError at a bad record, once more have been left out than may be."""

    def on_bad(problem: str) -> None:
        nonlocal skipped
        skipped += 1
        if skipped > skip_bad:
            before = (
                f"the {skipped - 1:,} before it were left out, as --skip_bad allows; "
                if skip_bad
                else ""
            )
            raise TokenFileError(
                f"{problem}; {before}correct it, or leave out up to N like it with --skip_bad N"
            )

    return on_bad


def _finish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a corpus whose shards are all there. Raises TokenFileError if there is
    nothing to train on.
    """
    manifest.documents = sum(source.documents or 0 for source in manifest.sources)
    manifest.skipped = sum(source.skipped or 0 for source in manifest.sources)
    manifest.tokens = sum(shard.tokens for shard in manifest.shards)
    manifest.val_tokens = sum(
        shard.tokens for shard in manifest.shards[: manifest.options.val_shards]
    )
    manifest.train_tokens = manifest.tokens - manifest.val_tokens
    manifest.unfinished = None
    if not manifest.train_tokens:
        shutil.rmtree(unfinished_folder(folder))  # nothing can go on with it
        if manifest.tokens == manifest.documents:  # nothing but what begins a document
            raise TokenFileError(
                f"{folder}: there is no text to write: {manifest.documents:,} documents, all of "
                f"them empty"
            )
        smaller = max(1, manifest.tokens // VAL_SHARE // manifest.options.val_shards)
        raise TokenFileError(
            f"{folder}: all {manifest.tokens:,} tokens go into the validation shards, of "
            f"{manifest.options.val_shard_tokens:,} tokens each, and none are left to train on; "
            f"run this again "
            f"with --shard_tokens {smaller}, or with --val_shards 0"
        )
    manifest.write(unfinished_folder(folder))


@contextlib.contextmanager
def _keeping_whole_shards(folder: Path) -> Iterator[None]:
    """Keep the whole shards of a corpus whose writing fails, and say so; without any, leave nothing
    of it.
    """
    try:
        try:
            yield
        except OSError as error:
            hint = "free some space" if error.errno == errno.ENOSPC else "mend that"
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise TokenFileError(f"{folder}: cannot be written: {reason}; {hint}") from None
    except BaseException as error:
        if begun := unfinished(folder):
            with contextlib.suppress(OSError):
                _delete_strays(folder, begun)  # what they take of a full disk
            n = len(begun.shards)
            error.add_note(f"{n} whole shard{'s are' if n > 1 else ' is'} kept: {AGAIN}")
        else:
            shutil.rmtree(unfinished_folder(folder), ignore_errors=True)
        raise


# ---- going on


def _check_same(
    folder: Path, manifest: Manifest, sources: list[Source], asked: dict[str, Any]
) -> None:
    """Raises TokenFileError unless an unfinished corpus can be gone on with, with these sources and
    options.

    Sources may have changed where nothing in the shards comes from: those that have not been read
    yet, and the one that is being read after what was taken of it.
    """
    where = unfinished_folder(folder)
    anew = f"or delete {where} to begin anew"
    again = (
        f"go on with: {manifest.unfinished.command}"
        if manifest.unfinished
        else "go on with the command that it was begun with"
    )
    for name, value in asked.items():
        then = getattr(manifest.options, name)
        if value is not None and value != then:
            raise TokenFileError(
                f"{folder}: is not finished, and was begun with --{name} {then}, not {value}; "
                f"{again}; {anew}"
            )

    def refuse(what: str) -> NoReturn:
        raise TokenFileError(
            f"{folder}: cannot be gone on with: {what} since it was begun; put the files back as "
            f"they were, "
            f"{anew}"
        )

    were, are = (
        [source.file for source in manifest.sources],
        [_name(source.path) for source in sources],
    )
    if were != are:
        gone, new = sorted(set(were) - set(are)), sorted(set(are) - set(were))
        refuse(
            f"{gone[0]} has gone from the sources"
            if gone
            else f"{new[0]} has come to the sources"
            if new
            else "the order of the sources has changed"
        )
    going_on = manifest.unfinished
    n = going_on.place[0] if going_on else len(sources)  # sources that have been read
    read = list(zip(sources[:n], manifest.sources, strict=False))
    if read:
        print(
            f"checking that what has been read is unchanged: {n:,} file{'s' if n > 1 else ''}, "
            f"{size(sum(source.size for source, _ in read))}",
            file=sys.stderr,
        )
    for source, before in read:
        if source.size != before.bytes or _sha256(source.path) != before.sha256:
            refuse(f"{source.path} has changed")
    if going_on and (sources[n].size, sources[n].modified) != (
        manifest.sources[n].bytes,
        going_on.modified,
    ):
        print(
            f"{sources[n].path} has been written anew: comparing what has been read of it",
            file=sys.stderr,
        )
        place = _where_taken_ends(sources[: n + 1], manifest.options.text_column, going_on)
        if place is None:
            refuse(f"{sources[n].path} has changed")
        going_on.place = list(place)
    for shard in manifest.shards:
        if count_tokens(where / shard.file) != shard.tokens:
            raise TokenFileError(
                f"{where / shard.file}: is not the shard that was written; restore it, {anew}"
            )


def _where_taken_ends(sources: list[Source], column: str, going_on: Unfinished) -> Place | None:
    """The place of the last text that the shards have of the last source, which has changed; None
    if not all of them are in it.
    """
    taken = ""
    for piece in read_documents(sources, column, lambda problem: None, Place(len(sources) - 1)):
        taken = _digest_with(taken, piece)
        if taken == going_on.taken:
            return piece.place
    return None


def _digest_with(taken: str, piece: Piece) -> str:
    """The digest of a source's texts up to a piece, from that of the texts before; empty at the
    source's end.
    """
    if piece.text is None:
        return ""
    return hashlib.sha256(
        f"{taken} {piece.begins:d} ".encode() + piece.text.encode("utf-8", "surrogatepass")
    ).hexdigest()


def _name(path: str | Path) -> str:
    """A file's name, or a command, for the manifest, also where it is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


# ---- what will be needed


def _tokens_per_byte(sources: list[Source], column: str, on_bad: Callable[[str], None]) -> float:
    """The tokens of a source by its size, estimated from the beginnings of some."""
    tokens = read = 0
    sampled = sources[:: -(-len(sources) // SAMPLED_FILES)]
    for source in sampled:
        chars, piece = 0, None
        for piece in read_documents([source], column, on_bad):
            tokens += int(encode(get_encoding(), [(piece.text, piece.begins)])[0][0])
            chars += len(piece.text or "")
            if chars > SAMPLED_CHARS // len(sampled):
                break
        read += piece.read if piece else 0
    return tokens / max(1, read)


def _check_space(folder: Path, sources: list[Source], expected: int, manifest: Manifest) -> None:
    """Say how much is ahead. Raises TokenFileError if the disk has no space for it."""
    done = sum(shard.tokens for shard in manifest.shards)
    needed, free = max(0, expected - done) * TOKEN_BYTES, shutil.disk_usage(folder.parent).free
    about = f"about {expected:,} tokens in {len(sources):,} file{'s' if len(sources) > 1 else ''}"
    if done:
        about += f", {done:,} of them written"
    if needed > free:
        raise TokenFileError(
            f"{folder}: the disk has too little space: {size(needed)} are needed ({about}), "
            f"{size(free)} are "
            f"free; free some, name another place with --data_dir, or give fewer files"
        )
    print(
        f"{about}: {size(needed)} of disk space are needed, {size(free)} are free", file=sys.stderr
    )


def _cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- from documents to tokens


def _batches(pieces: Iterable[Piece], on_source: Callable[[int], None]) -> Iterator[list[Piece]]:
    """Pieces to hand to a worker at once, those before a fault too; `on_source` is told of each
    source that begins.
    """
    batch, chars, source, fault = [], 0, -1, None
    try:
        for piece in pieces:
            if piece.place.source != source:
                source = piece.place.source
                on_source(source)
            batch.append(piece)
            chars += len(piece.text or "")
            if chars >= BATCH_CHARS or len(batch) == BATCH_PIECES:
                yield batch
                batch, chars = [], 0
    except UserError as error:
        fault = error
    if batch:
        yield batch
    if fault:
        raise fault


class _Stream:
    """The tokens of all pieces one after the other, and the place in the sources of the last one
    that was taken.
    """

    def __init__(
        self,
        batches: Iterator[tuple[Sequence[Piece], Tokens]],
        going_on: Unfinished,
        on_batch: Callable[[Sequence[Piece], int], None],
    ):
        """The batches begin at the place to go on from. `on_batch` is told of pieces and their
        tokens.
        """
        self.batches, self.drop, self.on_batch = batches, going_on.into, on_batch
        self.place, self.into, self.taken = Place(*going_on.place), going_on.into, going_on.taken
        self.ends: list[Place] = []  # of the sources that have been passed
        self._pieces: Sequence[Piece] = []  # the batch at hand
        self._tokens, self._stops = (
            np.empty(0, dtype="<u2"),
            np.empty(0, dtype=np.int64),
        )  # where in its tokens each piece stops
        self._taken = self._passed = 0  # tokens of it, and pieces that they are of

    def take(self, n: int) -> Iterator[np.ndarray]:
        """The next n tokens, in parts; fewer at the end."""
        while n and (self._taken < len(self._tokens) or self._next_batch()):
            part = self._tokens[self._taken : self._taken + n]
            self._taken, n = self._taken + len(part), n - len(part)
            if part.size:
                # the piece that the last of them belongs to
                i = int(bisect.bisect_left(self._stops, self._taken))
                self._pass(i + 1)
                self.place, self.into = (
                    self._pieces[i].place,
                    self._taken - int(self._stops[i - 1] if i else 0),
                )
            yield part

    def _next_batch(self) -> bool:
        self._pass(len(self._pieces))
        batch = next(self.batches, None)
        if batch is None:
            return False
        self._pieces, (counts, self._tokens) = batch
        self._stops = np.cumsum(counts)
        self._taken, self._passed, self.drop = self.drop, int(self.drop > 0), 0
        self.on_batch(self._pieces, len(self._tokens) - self._taken)
        return True

    def _pass(self, stop: int) -> None:
        for piece in self._pieces[self._passed : stop]:
            self.ends += [piece.place] if piece.text is None else []
            self.taken = _digest_with(self.taken, piece)
        self._passed = stop


class _Hashes:
    """The SHA-256 of sources, computed by a thread beside the reading, while the file is in memory
    anyway.
    """

    def __init__(self, sources: list[Source]):
        self.sources, self.digests = sources, dict[int, Future[str]]()
        self.thread, self.stop = ThreadPoolExecutor(1), threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.shutdown(cancel_futures=True)

    def begin(self, i: int) -> None:
        """Begin with the source of that number."""
        self.digests[i] = self.thread.submit(self._digest, self.sources[i].path)

    def before(self, stop: int) -> Iterator[tuple[int, str]]:
        """The digests of the sources before the number `stop` that were begun and not given out
        yet; waits for them.
        """
        for i in [i for i in self.digests if i < stop]:
            yield i, self.digests.pop(i).result()

    def _digest(self, path: Path) -> str:
        return _sha256(path, self.stop.is_set)


def _sha256(path: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while not stopped() and (block := file.read(2**20)):
                digest.update(block)
    except OSError as error:
        raise TokenFileError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


class _Progress:
    """Tells on stderr how far it is, how fast, and for how long still: each second in a terminal,
    else each half minute.
    """

    def __init__(self, sources: list[Source], place: Place):
        self.before = [
            0,
            *itertools.accumulate(source.size for source in sources),
        ]  # bytes of the sources before each
        self.begun = self.told = time.monotonic()
        self.documents = self.tokens = 0
        self.first: int | None = None  # bytes read when this began
        self.in_place = bool(sys.stderr) and sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error and self.in_place:
            print(file=sys.stderr)  # what is said next begins a line

    def after(self, pieces: Sequence[Piece], tokens: int) -> None:
        self.documents += sum(piece.begins for piece in pieces)
        self.tokens += tokens
        read = self.before[pieces[-1].place.source] + pieces[-1].read
        if self.first is None:
            self.first = self.before[pieces[0].place.source] + pieces[0].read
        now = time.monotonic()
        if now - self.told >= (1 if self.in_place else 30):
            self.told, left = (
                now,
                (self.before[-1] - read) * (now - self.begun) / max(1, read - self.first),
            )
            line = f"{100 * read / max(1, self.before[-1]):.1f}%, {self.rates()}, {duration(left)} left"
            print(
                f"\r{line}" if self.in_place else line,
                end=" " * 9 if self.in_place else "\n",
                file=sys.stderr,
                flush=True,
            )

    def rates(self) -> str:
        seconds = max(1e-3, time.monotonic() - self.begun)
        return f"{self.documents / seconds:,.0f} documents/s, {self.tokens / seconds:,.0f} tokens/s"

    def end(self) -> None:
        line = f"{self.documents:,} documents in {duration(time.monotonic() - self.begun)}: {self.rates()}"
        print(f"\r{line}{' ' * 20}" if self.in_place else line, file=sys.stderr)


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that this command shares with data/fineweb.py."""
    parser.add_argument(
        "--shard_tokens",
        type=_at_least(1, 2**31 - 1),
        metavar="N",
        help="tokens of a shard [100_000_000; those for validation have fewer where the corpus is small]",
    )
    parser.add_argument(
        "--val_shards",
        type=_at_least(0),
        default=1,
        metavar="N",
        help="how many shards, the first, are for validation [1]",
    )
    parser.add_argument(
        "--workers",
        type=_at_least(1),
        metavar="N",
        help="processes that tokenize [one for each core]",
    )
    parser.add_argument(
        "--skip_bad",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="leave out up to N lines or rows without a text, instead of ending at the first [0]",
    )
    parser.add_argument("--data_dir", default="data", help="folder that holds the corpora [data]")


def _at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least or (most and value > most):
            at_most = f" and at most {most:,}" if most else ""
            raise argparse.ArgumentTypeError(f"must be at least {least}{at_most}, not {value}")
        return value

    return number


def write(
    folder: Path, named: Sequence[Path], text_column: str, args: argparse.Namespace, script: str
) -> None:
    """Write the corpus as the options say, and tell what it is."""
    manifest = prepare(
        folder,
        named,
        text_column=text_column,
        shard_tokens=args.shard_tokens,
        val_shards=args.val_shards,
        workers=args.workers,
        skip_bad=args.skip_bad,
        command=shlex.join(["python", script, *sys.argv[1:]]),
    )
    if note := spelled_out_note(
        {s.file: s.end_of_text_spelled_out for s in manifest.sources if s.end_of_text_spelled_out}
    ):
        print(note, file=sys.stderr)
    if manifest.skipped:
        print(
            f"note: {manifest.skipped:,} lines or rows without a text were left out",
            file=sys.stderr,
        )
    with reported("stdout"):
        print(
            f"{manifest.tokens:,} tokens of {manifest.documents:,} documents in {folder}, "
            f"{manifest.val_tokens:,} of them for "
            f"validation; train on them with --dataset {shlex.quote(folder.name)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "sources",
        nargs="+",
        type=Path,
        metavar="SOURCE",
        help=f"files or folders of files: {ENDINGS}",
    )
    parser.add_argument("--name", required=True, help="name of the corpus, for --dataset")
    parser.add_argument(
        "--text_column",
        default="text",
        metavar="NAME",
        help="the column of parquet files, and the key in JSON lines [text]",
    )
    add_options(parser)
    args = parser.parse_args()
    with reported(
        str(Path(args.data_dir) / args.name), status=1, interrupted=f"interrupted; {AGAIN}"
    ):
        write(
            corpus_folder(args.data_dir, args.name),
            args.sources,
            args.text_column,
            args,
            "data/documents.py",
        )


if __name__ == "__main__":
    main()
