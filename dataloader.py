"""Token files to batches. A batch is a pure function of the step: there is no cursor to save or to drift.

The tokens of a split are cut into windows of `seq_len` (window k reads tokens kT .. kT + T inclusive: its inputs and,
one further on, its targets); no window crosses the end of a file. A step takes a global batch of
G = batch_size x world_size x accumulation windows, and which ones depends on the step and the seed alone. Processes and
micro-steps only divide them up.
"""

import hashlib
import shlex
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.manifest import check_shards
from data.token_file import SAMPLE, TokenFile, TokenFileError, sample_starts

CHECKED_AT_ONCE = 2**20  # tokens per file whose ids are checked when it is opened; all are checked when read


@dataclass(frozen=True)
class Span:
    """Tokens start .. stop - 1 of a file."""

    file: TokenFile
    start: int
    stop: int

    @property
    def path(self) -> Path:
        return self.file.path


class TokenStream:
    """One split of a corpus as windows of seq_len tokens and their targets."""

    def __init__(self, spans: Sequence[Span], seq_len: int, n_vocab: int):
        """`n_vocab`: size of the model's vocabulary. Raises TokenFileError if a file holds an id beyond it."""
        self.spans, self.seq_len, self.n_vocab = list(spans), seq_len, n_vocab
        self.tokens = sum(span.stop - span.start for span in spans)
        windows = [max(0, span.stop - span.start - 1) // seq_len for span in spans]
        self._ends = list(accumulate(windows))  # windows in the spans up to and including each
        for span in spans:
            self._check(span.file.map()[:CHECKED_AT_ONCE], span.path)

    def __len__(self) -> int:
        """Number of windows."""
        return self._ends[-1] if self._ends else 0

    def read(self, windows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (len(windows), seq_len) int64. Raises TokenFileError for a file that went bad."""
        rows = np.empty((len(windows), self.seq_len + 1), dtype=np.int64)
        mapped: dict[Path, np.ndarray] = {}  # not kept: pages of a long-lived map would count as this process's memory
        for row, window in zip(rows, windows, strict=True):
            i = bisect_right(self._ends, window)
            span = self.spans[i]
            start = span.start + (window - (self._ends[i - 1] if i else 0)) * self.seq_len
            if span.path not in mapped:
                mapped[span.path] = span.file.map()
            row[:] = mapped[span.path][start:start + self.seq_len + 1]
        if rows.size and rows.max() >= self.n_vocab:
            for path, tokens in mapped.items():
                self._check(tokens, path)
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def fingerprint(self) -> str:
        """A hash of the tokens that tells corpora apart: of how many each file holds, and of 16 samples of them.

        Whole, a large corpus would take minutes to hash. Raises TokenFileError for a file that went bad.
        """
        digest = hashlib.sha256()
        for span in self.spans:
            digest.update(f"{span.start} {span.stop};".encode())
            tokens = span.file.map()[span.start:span.stop]
            for first in sample_starts(len(tokens)):
                digest.update(tokens[first:first + SAMPLE].tobytes())
        return digest.hexdigest()

    def _check(self, tokens: np.ndarray, path: Path) -> None:
        if tokens.size and tokens.max() >= self.n_vocab:
            position = int(np.argmax(tokens >= self.n_vocab))
            raise TokenFileError(f"{path}: token {position:,} has the id {tokens[position]}, beyond the model's vocabulary of "
                                 f"{self.n_vocab:,}; raise vocab_size, or write the file again with GPT-2's tokenizer")


def open_corpus(folder: Path, seq_len: int, n_vocab: int, val_fraction: float = 0.0) -> tuple[TokenStream, TokenStream]:
    """The training and the validation split of the token files in `folder`.

    Validation is the files with `_val_` in their name; where there are none, the last `val_fraction` of the tokens.
    Raises TokenFileError for a folder without training files, a bad file, or one that is missing by the corpus's manifest.
    """
    files = [TokenFile(path) for path in sorted(folder.glob("*.bin"))]
    check_shards(folder, {file.path.name: file.tokens for file in files})
    spans: dict[bool, list[Span]] = {True: [], False: []}  # keyed by: is it for validation?
    for file in files:
        spans[is_validation(file.path)].append(Span(file, 0, file.tokens))
    if not spans[False]:
        raise TokenFileError(f"{folder}: no token files (*.bin) to train on; write some with a script in data/, "
                             f"such as: python data/text.py FILE --name {shlex.quote(folder.name)}")
    if not spans[True]:
        spans[False], spans[True] = _cut_tail(spans[False], val_fraction)
    return TokenStream(spans[False], seq_len, n_vocab), TokenStream(spans[True], seq_len, n_vocab)


def is_validation(path: Path) -> bool:
    """Whether a token file's name says that it is for validation: `<corpus>_val_<number>.bin`."""
    return f"{path.stem}_".rfind("_val_") > path.stem.rfind("_train_")


def _cut_tail(spans: list[Span], fraction: float) -> tuple[list[Span], list[Span]]:
    """Divide the spans so that the second list holds the last `fraction` of the tokens."""
    keep = sum(span.stop for span in spans)
    keep -= int(keep * fraction)
    head, tail = [], []
    for span in spans:
        cut = min(keep, span.stop)
        keep -= cut
        head += [replace(span, start=0, stop=cut)] if cut else []
        tail += [replace(span, start=cut)] if cut < span.stop else []
    return head, tail


class DataLoader:
    """The batches of one process. `accumulation` micro-steps of every one of `world_size` processes make up a step."""

    def __init__(self, stream: TokenStream, batch_size: int, *, world_size: int = 1, rank: int = 0, accumulation: int = 1,
                 seed: int = 1337, shuffle: bool = False, overfit_batch: bool = False):
        """Raises TokenFileError if the stream has too few tokens for one step."""
        self.stream, self.batch_size, self.world_size, self.rank = stream, batch_size, world_size, rank
        self.accumulation, self.seed, self.shuffle, self.overfit_batch = accumulation, seed, shuffle, overfit_batch
        self.global_batch = batch_size * world_size * accumulation
        if len(stream) < self.global_batch:
            T = stream.seq_len
            raise TokenFileError(
                f"{stream.spans[0].path.parent if stream.spans else 'the corpus'}: {stream.tokens:,} tokens make {len(stream)} "
                f"sequences of {T}, but one step takes {self.global_batch}, at least {self.global_batch * T + 1:,} tokens; "
                f"lower batch_size, seq_len or total_batch_tokens, or train on a larger corpus")

    def in_words(self) -> str:
        """What an epoch and a step are, for the user."""
        return (f"1 epoch = {self.steps_per_epoch:,} batches\n"
                f"1 step = {self.global_batch * self.stream.seq_len:,} tokens: batch_size {self.batch_size} x seq_len "
                f"{self.stream.seq_len} x {self.world_size} processes x {self.accumulation} micro-steps")

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in one pass over the windows."""
        return len(self.stream) // self.global_batch

    def batch(self, step: int, micro_step: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (batch_size, seq_len) int64, of this process at a step (from 1) and micro-step (from 0)."""
        if step < 1 or not 0 <= micro_step < self.accumulation:
            raise IndexError(f"no step {step}, micro-step {micro_step}: steps count from 1, micro-steps from 0")
        step = 1 if self.overfit_batch else step
        first = (micro_step * self.world_size + self.rank) * self.batch_size
        return self.stream.read(self._windows(step, first))

    def _windows(self, step: int, first: int) -> Sequence[int]:
        """Windows first .. first + batch_size - 1 of a step's global batch, which is the same however it is divided up.

        In order, an epoch is the largest multiple of the global batch that fits; shuffled, it is all windows in a fresh
        seeded order, and a step may lie across the end of one epoch and the start of the next.
        """
        if not self.shuffle:
            first += (step - 1) % self.steps_per_epoch * self.global_batch
            return range(first, first + self.batch_size)
        n = len(self.stream)
        first += (step - 1) * self.global_batch
        positions = np.arange(first, first + self.batch_size)
        return [int(w) for epoch in range(first // n, positions[-1] // n + 1)
                for w in _permutation(n, self.seed, epoch)[positions[positions // n == epoch] % n]]


@lru_cache(maxsize=2)  # a batch may need two epochs
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState: numpy promises that its stream never changes, so a run can be repeated with a later numpy
    return np.random.RandomState([seed % 2**32, epoch]).permutation(n)


def prefetch(loader: DataLoader, device: torch.device, steps: Iterable[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """The loader's batches, every micro-step of every step, on the device. A thread reads the next one ahead."""
    pin = device.type == "cuda"  # pinned memory is copied to the GPU while both go on; each batch has its own

    def fetch(step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        x, y = loader.batch(step, micro_step)
        return (x.pin_memory(), y.pin_memory()) if pin else (x, y)

    def on_device(batch: Future[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, y = batch.result()
        return x.to(device, non_blocking=pin), y.to(device, non_blocking=pin)

    with ThreadPoolExecutor(max_workers=1) as pool:
        ahead = None
        for step in steps:
            for micro_step in range(loader.accumulation):
                current, ahead = ahead, pool.submit(fetch, step, micro_step)
                if current is not None:
                    yield on_device(current)
        if ahead is not None:
            yield on_device(ahead)
