"""The token-file format that llm.c and modded-nanogpt share: 256 int32 (magic, version, token
count), then uint16 tokens, all little-endian.

A corpus is a folder of such files, whose names give their splits (dataloader.py).
"""

import contextlib
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path

import numpy as np

from runtime.errors import UserError
from runtime.files import BeingWrittenError, sole_writer, whole_folder

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
TOKEN_BYTES = 2
MAX_VOCAB = 2**16  # a token is a uint16
SHARD_TOKENS = 100_000_000
SAMPLES, SAMPLE = 16, 2**12  # of a large file: how many, and how many tokens each
COMPARED_WHOLE = 2**26  # corpora of up to so many tokens are compared whole, in half a second
PIECE = 2**16  # tokens that are read at a time where a file is compared whole
RESTORE = "restore it, then resume with --resume auto"
Tokens = Sequence[int] | np.ndarray


class TokenFileError(UserError):
    """A corpus cannot be read or written; the message says which file, what is wrong and what to
    do.
    """


class TokenFileChangedError(TokenFileError):
    """A token file went bad while in use."""

    status = 1


def write_token_file(path: Path, parts: Iterable[Tokens], enough: float = math.inf) -> int:
    """Write tokens, which come in parts, to `path`; returns how many.

    Takes no further part once there are `enough` tokens. Raises TokenFileError for a token id that
    does not fit uint16.
    """
    count = 0
    with open(path, "wb") as file:
        file.write(bytes(HEADER_BYTES))
        for part in parts:
            tokens = np.asarray(part)
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < MAX_VOCAB:
                raise TokenFileError(
                    f"{path.name}: token ids {tokens.min()} to {tokens.max()} do not fit this "
                    f"format, which holds 0 to {MAX_VOCAB - 1}; use a smaller vocabulary"
                )
            file.write(tokens.astype("<u2").tobytes())
            count += tokens.size
            if count >= enough:
                break
        file.seek(0)
        file.write(header(count))
        file.flush()
        os.fsync(file.fileno())
    return count


def header(count: int) -> bytes:
    """Make the header of a file with `count` tokens."""
    ints = np.zeros(HEADER_INTS, dtype="<i4")
    ints[:3] = MAGIC, VERSION, count
    return ints.tobytes()


def write_corpus(folder: Path, parts: Iterable[Tokens], shard_tokens: int = SHARD_TOKENS) -> int:
    """Write tokens, which come in parts, as the training files of a new corpus; returns how many.

    Each file but the last has at least `shard_tokens`, as no part is divided. The folder appears
    whole or not at all. Raises TokenFileError if it exists already, if another process is writing
    it, or if there are no tokens.
    """
    with corpus_writer(folder, new=True), whole_folder(folder, replace=False) as unfinished:
        rest, total = iter(parts), 0
        for i in itertools.count():
            path = unfinished / f"{folder.name}_train_{i:06d}.bin"
            count = write_token_file(path, rest, shard_tokens)
            if not count:
                path.unlink()
                break
            total += count
        if not total:
            raise TokenFileError(f"{folder}: there are no tokens to write")
    return total


@contextlib.contextmanager
def corpus_writer(
    folder: Path, on_wait: Callable[[], None] | None = None, *, new: bool = False
) -> Iterator[None]:
    """Hold the right to write a corpus, which one process has at a time (see `sole_writer`).

    Raises TokenFileError if the folder cannot be written, or if another process is writing it; with
    `on_wait`, calls that and waits for the other process. If the corpus is to be `new`, only an
    empty folder may exist.
    """
    try:
        with sole_writer(folder, on_wait):
            if new and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise TokenFileError(
                    f"{folder}: is there already; choose another name or delete it first"
                )
            yield
    except BeingWrittenError:
        raise TokenFileError(
            f"{folder}: another process is writing this corpus; wait for it, or choose another name"
        ) from None
    except OSError as error:
        raise TokenFileError(
            f"{folder}: cannot be written: {error.strerror} ({error.filename or folder})"
        ) from None


def count_tokens(path: Path) -> int:
    """Read the number of tokens from a token file's header. Raises TokenFileError if the file is
    not a whole token file.
    """
    hint = "write it again with a script in data/"
    try:
        size = path.stat().st_size
        ints = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    except OSError as error:
        raise TokenFileError(f"{path}: cannot be read: {error.strerror}") from None
    if ints.size < HEADER_INTS or ints[0] != MAGIC or ints[1] != VERSION:
        raise TokenFileError(
            f"{path}: not a token file of version {VERSION}: its {size:,} bytes begin with the "
            f"numbers {ints[:2].tolist()}, not with {[MAGIC, VERSION]}; {hint}"
        )
    count = int(ints[2])
    expected = HEADER_BYTES + TOKEN_BYTES * count
    if count < 0 or size != expected:
        raise TokenFileError(
            f"{path}: damaged: its header promises {count:,} tokens, {expected:,} bytes in all, "
            f"but the file has {size:,} bytes; {hint}"
        )
    return count


class TokenFile:
    """A token file in use. It may be touched, or replaced by its like, but its tokens must stay
    the same.
    """

    def __init__(self, path: Path, n_vocab: int = MAX_VOCAB, compared_whole: int = COMPARED_WHOLE):
        """`n_vocab`: size of the model's vocabulary. All tokens are compared if there are up to
        `compared_whole`, else samples.

        Raises TokenFileError if the file is not a whole token file, or if the tokens that are
        compared have an id beyond the vocabulary.
        """
        self.path, self.n_vocab = path, n_vocab
        self.tokens = count_tokens(path)
        self._is_whole = self.tokens <= max(compared_whole, SAMPLES * SAMPLE)
        with self._open() as file:
            self._stamp = _stamp(file)
            self._content = self._hash(file, 0, self.tokens)

    def read(self, starts: Iterable[int], n: int) -> np.ndarray:
        """Read the `n` tokens from each of the `starts` on, (len(starts), n) uint16.

        Read, not mapped: a file that shrinks meanwhile is no crash, and a long run's memory does
        not grow. Raises TokenFileError if the tokens have gone or changed, or for an id beyond the
        vocabulary.
        """
        with self._open_unchanged() as file:
            return np.stack([self._tokens_at(file, start, n) for start in starts])

    def digest(self, start: int, stop: int) -> bytes:
        """Hash tokens start .. stop - 1, all of them or samples.

        Raises TokenFileError if they have gone or changed; for the whole file, it is the hash from
        the time it was opened.
        """
        if (start, stop) == (0, self.tokens):
            return self._content
        with self._open_unchanged() as file:
            return self._hash(file, start, stop)

    @contextlib.contextmanager
    def _open(self) -> Iterator[FileIO]:
        try:
            # unbuffered: a buffer would read more than the tokens that are asked for
            with FileIO(self.path) as file:
                yield file
        except OSError as error:
            raise TokenFileChangedError(
                f"{self.path}: cannot be read any more: {error.strerror}; {RESTORE}"
            ) from None

    @contextlib.contextmanager
    def _open_unchanged(self) -> Iterator[FileIO]:
        with self._open() as file:
            now = _stamp(file)
            if now != self._stamp:
                expected = HEADER_BYTES + TOKEN_BYTES * self.tokens
                if now[1] != expected or self._hash(file, 0, self.tokens) != self._content:
                    raise self._changed()
                self._stamp = now
            yield file

    def _changed(self) -> TokenFileChangedError:
        return TokenFileChangedError(
            f"{self.path}: was changed or replaced while in use; {RESTORE}"
        )

    def _hash(self, file: FileIO, start: int, stop: int) -> bytes:
        digest = hashlib.sha256()
        if self._is_whole:
            size, starts = PIECE, np.arange(start, stop, PIECE)
        else:  # few tokens are covered wholly
            last = max(0, stop - start - SAMPLE)
            size, starts = SAMPLE, start + np.linspace(0, last, SAMPLES, dtype=np.int64)
        for first in starts.tolist():
            digest.update(self._tokens_at(file, first, min(size, stop - first)).data)
        return digest.digest()

    def _tokens_at(self, file: FileIO, start: int, n: int) -> np.ndarray:
        file.seek(HEADER_BYTES + TOKEN_BYTES * start)
        content = file.read(TOKEN_BYTES * n)
        if len(content) < TOKEN_BYTES * n:
            raise self._changed()
        tokens = np.frombuffer(content, dtype="<u2")
        if n and tokens.max() >= self.n_vocab:
            i = int(np.argmax(tokens >= self.n_vocab))
            raise TokenFileError(
                f"{self.path}: token {start + i:,} has the id {tokens[i]}, beyond the model's "
                f"vocabulary of {self.n_vocab:,}; raise vocab_size, or write the file again with "
                "GPT-2's tokenizer"
            )
        return tokens


def _stamp(file: FileIO) -> tuple[int, ...]:
    """Return what changes when a file is changed or replaced; st_mtime alone can be put back."""
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
