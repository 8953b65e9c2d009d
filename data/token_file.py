"""The token-file format that llm.c and modded-nanogpt share: 256 int32 (magic, version, token count), then uint16 tokens.

Numbers are little-endian, as those programs write them. A corpus is a folder of such files; those with `_val_` in their
name are for validation.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from runtime.errors import UserError
from runtime.files import whole_folder

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
TOKEN_BYTES = 2
MAX_VOCAB = 2**16  # a token is a uint16
SHARD_TOKENS = 100_000_000
Tokens = Sequence[int] | np.ndarray


class TokenFileError(UserError):
    """A corpus that cannot be read or written; the message says which file, what is wrong and what to do."""


def write_token_file(path: Path, parts: Iterable[Tokens]) -> int:
    """Write tokens, which come in parts, to `path`; returns how many.

    Raises TokenFileError for a token id that does not fit uint16.
    """
    count = 0
    with open(path, "wb") as file:
        file.write(bytes(HEADER_BYTES))
        for part in parts:
            tokens = np.asarray(part, dtype=np.int64)
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < MAX_VOCAB:
                raise TokenFileError(f"{path.name}: token ids {tokens.min()} to {tokens.max()} do not fit this format, "
                                     f"which holds 0 to {MAX_VOCAB - 1}; use a tokenizer with a smaller vocabulary")
            file.write(tokens.astype("<u2").tobytes())
            count += tokens.size
        header = np.zeros(HEADER_INTS, dtype="<i4")
        header[:3] = MAGIC, VERSION, count
        file.seek(0)
        file.write(header.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return count


def write_corpus(folder: Path, parts: Iterable[Tokens], shard_tokens: int = SHARD_TOKENS) -> int:
    """Write tokens, which come in parts, as the training files of a new corpus; returns how many.

    The folder appears whole or not at all. Raises TokenFileError if it is there already, or if there are no tokens.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise TokenFileError(f"{folder}: is there already; choose another name or delete it first")
    count = 0
    try:
        with whole_folder(folder, replace=False) as unfinished:
            count = sum(write_token_file(unfinished / f"{folder.name}_train_{i:06d}.bin", shard)
                        for i, shard in enumerate(_shards(parts, shard_tokens)))
            if not count:
                raise TokenFileError(f"{folder}: there are no tokens to write")
    except OSError as error:
        if not any(folder.glob("*.bin")):  # else another process wrote it in the meantime
            raise TokenFileError(f"{folder}: cannot be written: {error.strerror}") from None
    return count


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
    """Number of tokens in a token file, from its header. Raises TokenFileError if the file is not a whole token file."""
    try:
        size = path.stat().st_size
        header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    except OSError as error:
        raise TokenFileError(f"{path}: cannot be read: {error.strerror}") from None
    remedy = "write it again with a script in data/"
    if header.size < HEADER_INTS:
        raise TokenFileError(f"{path}: not a token file: its {size} bytes are less than a header's {HEADER_BYTES}; {remedy}")
    magic, version, count = (int(n) for n in header[:3])
    if magic != MAGIC:
        raise TokenFileError(f"{path}: not a token file: it begins with {magic}, not with the magic number {MAGIC}; {remedy}")
    if version != VERSION:
        raise TokenFileError(f"{path}: token file of version {version}; only version {VERSION} (uint16) is read; {remedy}")
    expected = HEADER_BYTES + TOKEN_BYTES * count
    if count < 0 or size != expected:
        raise TokenFileError(f"{path}: damaged: its header promises {count:,} tokens, {expected:,} bytes in all, "
                             f"but the file has {size:,} bytes; {remedy}")
    return count


Stamp = tuple[int, int, int]


def stamp(path: Path) -> Stamp:
    """What tells whether a file has been changed or replaced since. Raises TokenFileError if it is gone."""
    try:
        status = path.stat()
    except OSError as error:
        raise TokenFileError(f"{path}: has vanished while in use ({error.strerror}); restore it and start again") from None
    return status.st_ino, status.st_size, status.st_mtime_ns


def map_tokens(path: Path, count: int, expected: Stamp) -> np.ndarray:
    """Memory-map the `count` tokens of a token file, read-only.

    Raises TokenFileError if it is no longer the file of that stamp.
    """
    if stamp(path) != expected:
        raise TokenFileError(f"{path}: was changed or replaced while in use; restore it and start again")
    try:
        return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))
    except (OSError, ValueError):
        raise TokenFileError(f"{path}: cannot be read any more; restore it and start again") from None
