"""Tokenizing in several processes: batches of text in, tokens out, in the order of the batches."""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from data.sources import Batch
from data.tokenizer import END_OF_TEXT, get_encoding
from runtime.errors import TrainingError
from runtime.files import sha256

AHEAD = 8  # batches for each worker that are read and not yet taken


class Encoded(NamedTuple):
    """The tokens of a batch."""

    tokens: np.ndarray  # uint16
    digest: str  # of the batch's texts
    sha256: str | None  # of the source file, with its last batch


def tokenize(batches: Iterable[Batch], workers: int) -> Generator[tuple[Batch, Encoded]]:
    """Tokenize batches in processes of their own. Raises TrainingError if one of them dies.

    This is not multiprocessing.Pool.imap because that reads all batches ahead, and waits for ever
    for a worker that was killed, as the system does when memory runs out.
    """
    spawn = multiprocessing.get_context("spawn")  # forking beside pyarrow's threads can deadlock
    waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
    try:
        with ProcessPoolExecutor(workers, spawn, initializer=_begin) as pool:
            for batch in batches:
                waiting.append((batch, pool.submit(encode, batch)))
                if len(waiting) > AHEAD * workers:
                    first, encoded = waiting.popleft()
                    yield first, encoded.result()
            for first, encoded in waiting:
                yield first, encoded.result()
    except BrokenProcessPool:
        raise TrainingError(
            "a process that tokenizes has died, as happens when memory runs out; "
            "take fewer --workers"
        ) from None


def _begin() -> None:
    """Let a worker ignore Ctrl-C, which its parent handles, and end when its parent has died."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def encode(batch: Batch) -> Encoded:
    """Tokenize a batch; hash the source's file too if the batch is its last. Raises OSError."""
    file_hash = sha256(batch.ends) if batch.ends else None
    return Encoded(encode_pieces(batch.pieces), digest(batch), file_hash)


def encode_pieces(pieces: Iterable[tuple[str, bool]]) -> np.ndarray:
    """Tokenize pieces of documents, (tokens,) uint16. An <|endoftext|> begins each document."""
    encoding = get_encoding()
    parts = [np.empty(0, dtype=np.uint32)]
    for text, begins in pieces:
        if begins:
            parts.append(np.array([END_OF_TEXT], dtype=np.uint32))
        # encode_to_numpy makes no Python list of the tokens, which saves a fifth of the time
        try:
            parts.append(encoding.encode_to_numpy(text, disallowed_special=()))
        except UnicodeEncodeError:  # half a character, as JSON can hold: becomes U+FFFD
            parts.append(np.array(encoding.encode_ordinary(text), dtype=np.uint32))
    return np.concatenate(parts).astype("<u2")


def digest(batch: Batch) -> str:
    """Hash the texts of a batch."""
    return hashlib.sha256(json.dumps(batch.pieces).encode()).hexdigest()
