"""The token-file format that llm.c and modded-nanogpt share: 256 int32 (magic, version, token
count), then uint16 tokens.

Numbers are little-endian, as those programs write them. A corpus is a folder of such files; those
with `_val_` in their name are for validation.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedReader, FileIO
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
LONGEST_NAME = 255 - len(
    "_train_000000.bin"
)  # of a corpus, in bytes: file systems take names of 255
SAMPLES, SAMPLE = 16, 2**12  # of a large file: how many, and how many tokens each
COMPARED_WHOLE = (
    2**26
)  # tokens of a corpus whose files are compared whole, not by samples: half a second
PIECE = 2**16  # tokens of a file that is compared whole that are read at a time
Tokens = Sequence[int] | np.ndarray


class TokenFileError(UserError):
    """A corpus that cannot be read or written; the message says which file, what is wrong and what
    to do.
    """


class TokenFileChangedError(TokenFileError):
    """A token file that went bad while in use."""

    status = 1


def write_token_file(path: Path, parts: Iterable[Tokens]) -> int:
    """Write tokens, which come in parts, to `path`; returns how many.

    Raises TokenFileError for a token id that does not fit uint16.
    """
    count = 0
    with open(path, "wb") as file:
        file.write(bytes(HEADER_BYTES))
        for part in parts:
            tokens = (
                part
                if isinstance(part, np.ndarray) and part.dtype == "<u2"
                else _checked(part, path)
            )
            file.write(tokens.tobytes())
            count += tokens.size
        file.seek(0)
        file.write(header(count))
        file.flush()
        os.fsync(file.fileno())
    return count


def header(count: int) -> bytes:
    """The header of a file with so many tokens."""
    ints = np.zeros(HEADER_INTS, dtype="<i4")
    ints[:3] = MAGIC, VERSION, count
    return ints.tobytes()


def _checked(part: Tokens, path: Path) -> np.ndarray:
    tokens = np.asarray(part, dtype=np.int64)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < MAX_VOCAB:
        raise TokenFileError(
            f"{path.name}: token ids {tokens.min()} to {tokens.max()} do not fit this format, "
            f"which holds 0 to {MAX_VOCAB - 1}; use a tokenizer with a smaller vocabulary"
        )
    return tokens.astype("<u2")


def write_corpus(folder: Path, parts: Iterable[Tokens], shard_tokens: int = SHARD_TOKENS) -> int:
    """Write tokens, which come in parts, as the training files of a new corpus; returns how many.

    The folder appears whole or not at all. Raises TokenFileError if it is there already, if another
    process is writing it, or if there are no tokens.
    """
    with corpus_writer(folder, new=True), whole_folder(folder, replace=False) as unfinished:
        count = sum(
            write_token_file(unfinished / f"{folder.name}_train_{i:06d}.bin", shard)
            for i, shard in enumerate(_shards(parts, shard_tokens))
        )
        if not count:
            raise TokenFileError(f"{folder}: there are no tokens to write")
    return count


@contextlib.contextmanager
def corpus_writer(
    folder: Path, on_wait: Callable[[], None] | None = None, *, new: bool = False
) -> Iterator[None]:
    """Hold the right to write a corpus, which one process has at a time (see `sole_writer`).

    Raises TokenFileError if the folder cannot be written, or if another process is writing it; with
    `on_wait`, that is called and then waited for the other process. If the corpus is to be `new`,
    only an empty folder may be there.
    """
    size = len(os.fsencode(folder.name))
    if size > LONGEST_NAME:
        raise TokenFileError(
            f"{folder.name[:20]}...: a corpus's name may have {LONGEST_NAME} bytes, and this one "
            f"has {size}; "
            f"choose a shorter one"
        )
    try:
        with sole_writer(folder, on_wait):
            if new and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
                raise TokenFileError(
                    f"{folder}: is there already; choose another name or delete it first"
                )
            yield
    except BeingWrittenError:
        raise TokenFileError(
            f"{folder}: another process is writing this corpus; wait for it, or choose another name"
        ) from None
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise TokenFileError(f"{folder}: cannot be written: {error.strerror}{where}") from None


def _shards(parts: Iterable[Tokens], shard_tokens: int) -> Iterator[Iterator[Tokens]]:
    """Group the parts so that each group but the last has at least shard_tokens tokens."""
    rest = iter(parts)

    def shard(first: Tokens) -> Iterator[Tokens]:
        yield first
        count = len(first)
        while count < shard_tokens and (part := next(rest, None)) is not None:
            yield part
            count += len(part)

    for first in rest:
        yield shard(first)


def count_tokens(path: Path) -> int:
    """Number of tokens in a token file, from its header. Raises TokenFileError if the file is not a
    whole token file.
    """
    hint = "write it again with a script in data/"
    try:
        size = path.stat().st_size
        if not path.is_file():  # a pipe would be waited for
            raise TokenFileError(f"{path}: cannot be read: not a file; delete it, or {hint}")
        ints = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    except OSError as error:
        raise TokenFileError(f"{path}: cannot be read: {error.strerror}") from None
    if ints.size < HEADER_INTS:
        raise TokenFileError(
            f"{path}: not a token file: its {size} bytes are less than a header's "
            f"{HEADER_BYTES}; {hint}"
        )
    magic, version, count = (int(n) for n in ints[:3])
    if magic != MAGIC:
        raise TokenFileError(
            f"{path}: not a token file: it begins with {magic}, not with the magic number "
            f"{MAGIC}; {hint}"
        )
    if version != VERSION:
        raise TokenFileError(
            f"{path}: token file of version {version}; only version {VERSION} (uint16) is read; "
            f"{hint}"
        )
    expected = HEADER_BYTES + TOKEN_BYTES * count
    if count < 0 or size != expected:
        raise TokenFileError(
            f"{path}: damaged: its header promises {count:,} tokens, {expected:,} bytes in all, "
            f"but the file has {size:,} bytes; {hint}"
        )
    return count


RESTORE = "restore it, then go on with --resume auto"


class TokenFile:
    """A token file in use. It may be touched, or replaced by its like, but what it holds stays the
    same.
    """

    def __init__(self, path: Path, n_vocab: int = MAX_VOCAB, compared_whole: int = COMPARED_WHOLE):
        """`n_vocab`: size of the model's vocabulary. All tokens are compared where there are up to
        `compared_whole`, else samples.

        Raises TokenFileError if the file is not a whole token file, or holds an id beyond the
        vocabulary in what is compared.
        """
        self.path, self.n_vocab = path, n_vocab
        try:
            self._stamp = _stamp(
                path.stat()
            )  # first, so that a change while the file is being opened is noticed
            self.tokens = count_tokens(path)
            self._is_whole = self.tokens <= max(compared_whole, SAMPLES * SAMPLE)
            with self._open() as file:
                self._content = self._hash(file, 0, self.tokens, checked=True)
        except OSError as error:
            raise TokenFileError(f"{path}: cannot be read: {error.strerror}") from None

    def read(self, starts: Iterable[int], n: int) -> np.ndarray:
        """The `n` tokens from each of the `starts` on, (len(starts), n) uint16.

        Read, not mapped: a file that shrinks meanwhile is no crash, and of what lies scattered the
        disk gives no more than is asked for. Raises TokenFileError if the tokens are gone or others
        than at first, or for an id beyond the vocabulary.
        """
        starts = list(starts)
        rows = np.empty((len(starts), n), dtype="<u2")
        with self._in_use() as file:
            for row, start in zip(rows, starts, strict=True):
                file.seek(HEADER_BYTES + TOKEN_BYTES * start)
                if file.readinto(row.data) != row.nbytes:
                    raise self._changed()
                self._check_ids(row, start)
        return rows

    def digest(self, start: int, stop: int) -> bytes:
        """A hash that tells tokens start .. stop - 1 from others, of all of them or of samples.

        Raises TokenFileError if they are gone or others than at first; for all of the file, it is
        what was read at first.
        """
        if (start, stop) == (0, self.tokens):
            return self._content
        with self._in_use() as file:
            return self._hash(file, start, stop)

    def _open(self) -> BufferedReader:
        return BufferedReader(
            FileIO(self.path), HEADER_BYTES
        )  # a larger buffer would be filled with what nobody has asked for

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[BufferedReader]:
        try:
            with self._open() as file:
                now = _stamp(os.fstat(file.fileno()))
                if now != self._stamp:
                    if (
                        now[1] != HEADER_BYTES + TOKEN_BYTES * self.tokens
                        or self._hash(file, 0, self.tokens) != self._content
                    ):
                        raise self._changed()
                    self._stamp = now
                yield file
        except FileNotFoundError as error:
            raise TokenFileChangedError(
                f"{self.path}: has vanished while in use ({error.strerror}); {RESTORE}"
            ) from None
        except OSError as error:
            raise TokenFileChangedError(
                f"{self.path}: cannot be read any more: {error.strerror}; {RESTORE}"
            ) from None

    def _changed(self) -> TokenFileChangedError:
        return TokenFileChangedError(
            f"{self.path}: was changed or replaced while in use; {RESTORE}"
        )

    def _hash(self, file: BufferedReader, start: int, stop: int, checked: bool = False) -> bytes:
        digest = hashlib.sha256()
        if self._is_whole:
            size, starts = PIECE, list(range(start, stop, PIECE))
        else:
            size, starts = SAMPLE, [start + first for first in sample_starts(stop - start, SAMPLE)]
        for first in starts:
            file.seek(HEADER_BYTES + TOKEN_BYTES * first)
            n = min(size, stop - first)
            content = file.read(TOKEN_BYTES * n)
            if len(content) < TOKEN_BYTES * n:
                raise self._changed()
            digest.update(content)
            if checked:
                self._check_ids(np.frombuffer(content, dtype="<u2"), first)
        return digest.digest()

    def _check_ids(self, tokens: np.ndarray, start: int) -> None:
        if tokens.size and tokens.max() >= self.n_vocab:
            i = int(np.argmax(tokens >= self.n_vocab))
            raise TokenFileError(
                f"{self.path}: token {start + i:,} has the id {tokens[i]}, beyond the model's "
                f"vocabulary of "
                f"{self.n_vocab:,}; raise vocab_size, or write the file again with GPT-2's "
                f"tokenizer"
            )


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    """What tells whether a file has been changed or replaced since."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def sample_starts(n_tokens: int, sample: int) -> list[int]:
    """The first tokens of the samples, of `sample` tokens each, that tell `n_tokens` tokens from
    others; together all of few.
    """
    return [
        int(start) for start in np.linspace(0, max(0, n_tokens - sample), SAMPLES, dtype=np.int64)
    ]
