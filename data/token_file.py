"""The token-file format that llm.c and modded-nanogpt share: 256 int32 (magic, version, token
count), then uint16 tokens, all little-endian.

A corpus is a folder of such files; their names determine their splits (`split_of`).
"""

import contextlib
import hashlib
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from runtime.errors import UserError
from runtime.files import atomic_folder, flush_to_disk, sole_writer, writing

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
TOKEN_BYTES = 2
MAX_VOCAB = 2**16  # a token is a uint16
SHARD_TOKENS = 100_000_000
N_SAMPLES, SAMPLE_TOKENS = 16, 2**12  # samples of a large file that identify it
COMPARED_WHOLE = 2**26  # tokens of a corpus that are all compared, in half a second
PIECE = 2**16  # tokens read at a time to compare a whole file
Tokens = Sequence[int] | np.ndarray


# Words in token files' names, and their splits
VAL = dict.fromkeys(("val", "valid", "validation", "dev"), "val")
SPLITS = VAL | {"train": "train", "test": "test"}


class TokenFileError(UserError):
    """A corpus cannot be read or written. The message has the file, the fault and a remedy."""


def split_of(path: Path) -> str | None:
    """Return the split in a token file's name: train, val, test or None.

    The last word counts: my_test_val_000000.bin belongs to a corpus named my_test.
    """
    words = re.split("[_.-]", path.stem.lower())
    return next((SPLITS[word] for word in reversed(words) if word in SPLITS), None)


def write_token_file(path: Path, parts: Iterable[Tokens]) -> int:
    """Write tokens, given in parts, to `path`; returns their number. Raises OverflowError for a
    token that does not fit uint16.
    """
    tokens = np.concatenate([np.asarray(part, "<u2") for part in parts])
    with writing(path):
        path.write_bytes(header(tokens.size) + tokens.tobytes())
        flush_to_disk(path)
    return tokens.size


def header(count: int) -> bytes:
    """Return the header of a file with `count` tokens."""
    return np.array([MAGIC, VERSION, count], "<i4").tobytes().ljust(HEADER_BYTES, b"\0")


def write_corpus(folder: Path, parts: Iterable[Tokens]) -> int:
    """Write tokens, given in parts, as a new corpus of one training file; returns their number.

    The folder appears whole or not at all. Raises TokenFileError if it exists already or another
    process is writing it.
    """
    with new_corpus(folder), atomic_folder(folder, replace=False) as unfinished:
        return write_token_file(unfinished / f"{folder.name}_train_000000.bin", parts)


@contextlib.contextmanager
def new_corpus(folder: Path) -> Iterator[None]:
    """Make this process the only writer of a new corpus (see `sole_writer`).

    Raises TokenFileError if the folder or a link exists, UserError if another process is
    writing it, OSError if it cannot be written.
    """
    if os.path.lexists(folder):  # True for a broken link too
        raise TokenFileError(f"{folder}: is there already; choose another name or delete it first")
    with sole_writer(folder):
        yield


def count_tokens(path: Path) -> int:
    """Read the number of tokens from a token file's header. Raises TokenFileError if the file is
    not a whole token file, OSError if it cannot be read.
    """
    hint = "write it again with a script in data/"
    size = path.stat().st_size
    ints = np.fromfile(path, "<i4", 3).tolist()
    if len(ints) < 3 or ints[:2] != [MAGIC, VERSION]:
        raise TokenFileError(
            f"{path}: not a token file of version {VERSION}: its {size:,} bytes begin with the "
            f"numbers {ints[:2]}, not with {[MAGIC, VERSION]}; {hint}"
        )
    count = ints[2]
    expected = HEADER_BYTES + TOKEN_BYTES * count
    if size != expected:
        raise TokenFileError(
            f"{path}: damaged: by its header it has {count:,} tokens, {expected:,} bytes in all, "
            f"but the file has {size:,} bytes; {hint}"
        )
    return count


class TokenFile:
    """An open token file, which may be moved, replaced or deleted meanwhile."""

    def __init__(self, path: Path, n_vocab: int = MAX_VOCAB, compared_whole: int = COMPARED_WHOLE):
        """`n_vocab`: size of the model's vocabulary. Files of up to `compared_whole` tokens are
        compared as a whole, larger ones by samples.

        Raises TokenFileError if the file is not a whole token file, or has a compared token beyond
        the vocabulary.
        """
        self.path, self.n_vocab = path, n_vocab
        self.tokens = count_tokens(path)
        self._is_whole = self.tokens <= max(compared_whole, N_SAMPLES * SAMPLE_TOKENS)
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._content = self._hash(0, self.tokens)

    def digest(self, start: int, stop: int) -> bytes:
        """Hash tokens start .. stop - 1, or samples of them. The whole file's hash is from the time
        when it was opened.
        """
        return self._content if (start, stop) == (0, self.tokens) else self._hash(start, stop)

    def _hash(self, start: int, stop: int) -> bytes:
        digest = hashlib.sha256()
        if self._is_whole:
            size, starts = PIECE, np.arange(start, stop, PIECE)
        else:  # samples overlap in a short range
            last = max(0, stop - start - SAMPLE_TOKENS)
            size, starts = SAMPLE_TOKENS, start + np.linspace(0, last, N_SAMPLES, dtype=np.int64)
        for first in starts.tolist():
            digest.update(self.read(first, min(size, stop - first)).data)
        return digest.digest()

    def read(self, start: int, n: int) -> np.ndarray:
        """Read `n` tokens from `start` on, (n,) uint16.

        Not mapped: a file that shrinks is an error instead of a crash, and a long run's memory does
        not grow. Raises TokenFileError for missing tokens and for an id beyond the vocabulary.
        """
        content = os.pread(self._descriptor, TOKEN_BYTES * n, HEADER_BYTES + TOKEN_BYTES * start)
        if len(content) < TOKEN_BYTES * n:
            raise TokenFileError(f"{self.path}: became shorter while in use; restore it")
        tokens = np.frombuffer(content, dtype="<u2")
        if n and tokens.max() >= self.n_vocab:
            i = int(np.argmax(tokens >= self.n_vocab))
            raise TokenFileError(
                f"{self.path}: token {start + i:,} has the id {tokens[i]}, beyond the model's "
                f"vocabulary of {self.n_vocab:,}; raise vocab_size and real_vocab_size, or write "
                "the file again with GPT-2's tokenizer"
            )
        return tokens
