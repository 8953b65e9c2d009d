"""Tokenizing in several processes: texts in, tokens out, in the order of the texts.

Threads would do, as tiktoken lets others run while it works; but two of them in a process are
slower than two processes, and all that Python does between its calls they do one at a time.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Self

sys.path.insert(
    0, os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
)  # found also when run as a script

import numpy as np
import tiktoken

from data.sources import Piece
from data.tokenizer import END_OF_TEXT, get_encoding
from runtime.errors import TrainingError, UserError, why_it_failed

DOCUMENT_BEGINS = np.array([END_OF_TEXT], dtype=np.uint32)
AHEAD = 8  # batches for each worker that are read and not yet taken


Tokens = tuple[
    np.ndarray, np.ndarray
]  # how many tokens each text of a batch has; the tokens of all


class Workers:
    """Processes that tokenize. They start when there is work, and end when this process ends, even
    if it is killed: the pipe that they read from is closed then.
    """

    def __init__(self, n: int):
        self.n = n
        self._threads = ThreadPoolExecutor(n)  # each asks a process of its own
        self._own = threading.local()
        self._processes: list[subprocess.Popen] | None = []  # None: no more are started
        self._lock = threading.Lock()
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            processes, self._processes = self._processes or [], None
        for process in processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in processes:
            process.communicate()
        self._stderr.close()

    def encode(
        self, batches: Iterable[Sequence[Piece]]
    ) -> Iterator[tuple[Sequence[Piece], Tokens]]:
        """Each batch with its tokens, in order. Raises TrainingError if a process died, and what
        `batches` raises: after the batches before it.
        """
        waiting: deque[tuple[Sequence[Piece], Future[Tokens]]] = deque()
        rest, fault = iter(batches), None
        while True:
            try:
                batch = next(rest, None)
            except UserError as error:
                fault = error
                break
            if batch is None:
                break
            waiting.append(
                (
                    batch,
                    self._threads.submit(
                        self._ask, [(piece.text, piece.begins) for piece in batch]
                    ),
                )
            )
            while len(waiting) > AHEAD * self.n or (waiting and waiting[0][1].done()):
                first, answer = waiting.popleft()
                yield first, answer.result()
        for first, answer in waiting:
            yield first, answer.result()
        if fault:
            raise fault

    def _ask(self, batch: list[tuple[str | None, bool]]) -> Tokens:
        if not hasattr(self._own, "process"):
            self._own.process = self._start()
        process = self._own.process
        try:
            pickle.dump(batch, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError, ValueError):
            raise TrainingError(
                f"a process that tokenizes has ended: "
                f"{why_it_failed(process.wait(), self._stderr)}; "
                f"take fewer --workers if memory is short"
            ) from None

    def _start(self) -> subprocess.Popen:
        with self._lock:
            if self._processes is None:
                raise RuntimeError("no longer needed")
            try:  # a session of its own: Ctrl-C in the terminal is for the process that asks
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, Path(__file__).resolve()],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=self._stderr,
                        start_new_session=True,
                    )
                )
            except OSError as error:
                raise TrainingError(
                    f"a process to tokenize cannot be started: {error.strerror}; take fewer "
                    f"--workers"
                ) from None
            return self._processes[-1]


def encode(encoding: tiktoken.Encoding, batch: Iterable[tuple[str | None, bool]]) -> Tokens:
    """The tokens of texts, each of which begins a document or not."""
    parts, counts = [np.empty(0, dtype=np.uint32)], []
    for text, begins in batch:
        if begins:
            parts.append(DOCUMENT_BEGINS)
        if text:
            # this form of tiktoken makes no list of Python's numbers, which takes a fifth of the
            # time
            try:
                parts.append(encoding.encode_to_numpy(text, disallowed_special=()))
            except UnicodeEncodeError:  # half a character, as JSON can have: becomes U+FFFD
                parts.append(np.array(encoding.encode_ordinary(text), dtype=np.uint32))
        counts.append(begins + (len(parts[-1]) if text else 0))
    return np.array(counts, dtype=np.int64), np.concatenate(parts).astype("<u2")


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Tokenize the batches that come, until no more can come."""
    encoding = get_encoding()
    with contextlib.suppress(
        EOFError, pickle.UnpicklingError, BrokenPipeError
    ):  # whoever asks has gone
        while True:
            pickle.dump(encode(encoding, pickle.load(questions)), answers)
            answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)  # nothing is left to flush, and nobody to complain to
