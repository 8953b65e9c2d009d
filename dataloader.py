"""Token files to batches. A batch is a pure function of the step: there is no cursor to save.

The tokens of a split are cut into windows of `seq_len` (window k reads tokens kT .. kT + T
inclusive: its inputs, and its targets one token later); no window crosses the end of a file. A step
takes a global batch of G = batch_size x world_size x accumulation windows, which depend only on the
step and the seed. Ranks and micro-steps divide them up.
"""

import bisect
import hashlib
import itertools
import math
import shlex
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.ahead import map_ahead
from data.manifest import check_shards
from data.token_file import COMPARED_WHOLE, MAX_VOCAB, TokenFile, TokenFileError, split_of
from runtime.console import log

COUNTED_AT_ONCE = 2**20  # tokens; np.bincount makes an int64 of each
READ_AHEAD = 4  # batches read in parallel: a shuffled one waits for the disk several times


class Span(NamedTuple):
    """Tokens start .. stop - 1 of a file."""

    file: TokenFile
    start: int
    stop: int


class TokenStream:
    """One split of a corpus as windows of seq_len tokens and their targets."""

    def __init__(self, spans: Sequence[Span], seq_len: int):
        self.spans, self.seq_len = spans, seq_len
        sizes = [stop - start for _, start, stop in spans]
        self.tokens = sum(sizes)
        windows = [max(0, size - 1) // seq_len for size in sizes]
        # index of each span's first window; at the end, the number of all windows
        self._firsts = [*itertools.accumulate(windows, initial=0)]

    def __len__(self) -> int:
        """Number of windows."""
        return self._firsts[-1]

    def describe(self) -> str:
        """Return the number of sequences that the tokens make, for a message."""
        rule = " (none crosses the end of a file)" if len(self.spans) > 1 else ""
        return f"{self.tokens:,} tokens make {len(self)} sequences of {self.seq_len}{rule}"

    def read(self, windows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each (len(windows), seq_len) int64.

        Raises TokenFileError for a file that went bad.
        """
        rows = np.stack([self._window(window) for window in windows], dtype=np.int64)
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def _window(self, window: int) -> np.ndarray:
        i = bisect.bisect(self._firsts, window) - 1
        file, start, _ = self.spans[i]
        return file.read(start + (window - self._firsts[i]) * self.seq_len, self.seq_len + 1)

    def entropy(self, most: int) -> float:
        """Return the entropy of token frequencies among its first `most` tokens, in nats per token.

        No model that ignores the context has a lower loss on them. Raises TokenFileError for a file
        that went bad.
        """
        counts = np.zeros(MAX_VOCAB, dtype=np.int64)
        for file, start, stop in self.spans:
            stop = min(stop, start + most)
            most -= stop - start
            for first in range(start, stop, COUNTED_AT_ONCE):
                tokens = file.read(first, min(COUNTED_AT_ONCE, stop - first))
                counts += np.bincount(tokens, minlength=MAX_VOCAB)
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log(p)).sum())

    def fingerprint(self) -> str:
        """Return a hash that distinguishes corpora.

        It covers the number of tokens of each file, and the tokens: all of a small corpus, samples
        of a large one. Raises TokenFileError for a file that went bad.
        """
        digest = hashlib.sha256()
        for file, start, stop in self.spans:
            digest.update(f"{start} {stop};".encode() + file.digest(start, stop))
        return "2:" + digest.hexdigest()  # 2: the version of this hash


def open_corpus(
    folder: Path,
    seq_len: int,
    n_vocab: int,
    val_fraction: float = 0.0,
    *,
    to_train: bool = True,
) -> tuple[TokenStream, TokenStream]:
    """Return the training and the validation split of the token files in `folder`.

    Validation is the files that `split_of` calls val, or test if there are none; without either,
    the last `val_fraction` of the tokens. Raises TokenFileError for a folder without files
    `to_train` on, a file without a split in its name beside one with train, a bad file, or a file
    that the corpus's manifest lists and the folder lacks.
    """
    paths = sorted(folder.glob("[!.]*.bin"))  # no hidden files, which editors leave
    n_training = sum(split_of(path) in ("train", None) for path in paths)
    files = [TokenFile(path, n_vocab, COMPARED_WHOLE // max(1, n_training)) for path in paths]
    check_shards(folder, {file.path.name: file.tokens for file in files})
    spans = defaultdict[str | None, list[Span]](list)
    for file in files:
        spans[split_of(file.path)].append(Span(file, 0, file.tokens))
    train, unnamed = spans["train"], spans[None]
    if train and unnamed:
        path = unnamed[0].file.path
        raise TokenFileError(
            f"{path}: its name has neither train nor val, but others here have train: rename it, "
            f"such as {path.stem}_train.bin, or move it away"
        )
    if to_train and not n_training:
        raise TokenFileError(
            f"{folder}: no token files (*.bin) to train on; names with val, valid, validation, dev "
            f"or test are for validation; write some with a script in data/, such as: python "
            f"data/text.py FILE --name {shlex.quote(folder.name)}"
        )
    train, val = train or unnamed, spans["val"] or spans["test"]
    if not val:
        train, val = _cut_tail(train, val_fraction)
    return TokenStream(train, seq_len), TokenStream(val, seq_len)


def _cut_tail(spans: list[Span], fraction: float) -> tuple[list[Span], list[Span]]:
    """Divide whole files so that the second list holds the last `fraction` of the tokens."""
    tokens = sum(span.stop for span in spans)
    keep = tokens - int(tokens * fraction)
    head, tail = [], []
    for file, _, stop in spans:
        cut = min(keep, stop)
        keep -= cut
        if cut:
            head.append(Span(file, 0, cut))
        if cut < stop:
            tail.append(Span(file, cut, stop))
    return head, tail


@dataclass
class DataLoader:
    """Make the batches of one rank: a step is `accumulation` micro-steps of `world_size` ranks.

    Raises TokenFileError if the stream has too few tokens for one step.
    """

    stream: TokenStream
    batch_size: int
    _: KW_ONLY
    world_size: int = 1
    rank: int = 0
    accumulation: int = 1
    seed: int = 1337
    shuffle: bool = False
    overfit_batch: bool = False

    def __post_init__(self) -> None:
        self.global_batch = self.batch_size * self.world_size * self.accumulation
        if len(self.stream) < self.global_batch:
            raise TokenFileError(
                f"the corpus's {self.stream.describe()}, but one step takes {self.global_batch}, "
                f"at least {self.global_batch * self.stream.seq_len + 1:,} tokens; lower "
                "batch_size, seq_len or total_batch_tokens, train on a larger corpus, or start "
                "fewer ranks"
            )

    def announce(self, val: TokenStream) -> None:
        """Tell the tokens, the epochs and a step; note files that are too short for a sequence."""
        T, folder = self.stream.seq_len, self.stream.spans[0].file.path.parent
        validation = f", and {val.tokens:,} for validation" if val.tokens else ""
        log.debug(f"loaded {self.stream.tokens:,} tokens of {folder}{validation}")
        log.debug(f"1 epoch = {self.steps_per_epoch:,} batches")
        log.info(
            f"1 step = {self.global_batch * T:,} tokens: batch_size {self.batch_size} x seq_len "
            f"{T} x {self.world_size} ranks x {self.accumulation} micro-steps"
        )
        if short := sum(stop - start <= T for _, start, stop in self.stream.spans):
            log.warning(
                f"{short} of {len(self.stream.spans)} token files are too short for a "
                f"sequence of {T}, and unused: no sequence crosses the end of a file"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Count the whole steps in one pass over the windows."""
        return len(self.stream) // self.global_batch

    def batch(self, step: int, micro_step: int = 0) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (B, T), int64, of a step (from 1) and micro-step (from 0).

        In order, an epoch is the largest multiple of the global batch that fits. Shuffled, it is
        all windows in a fresh seeded order, and a step may reach from one epoch into the next.
        """
        before = 0 if self.overfit_batch else step - 1  # steps
        first = (micro_step * self.world_size + self.rank) * self.batch_size  # in the global batch
        places, n = range(first, first + self.batch_size), len(self.stream)
        if not self.shuffle:
            start = before % self.steps_per_epoch * self.global_batch
            return self.stream.read(start + place for place in places)
        ordered = (divmod(before * self.global_batch + place, n) for place in places)
        return self.stream.read(permuted(place, n, self.seed, epoch) for epoch, place in ordered)


def permuted(place: int, n: int, seed: int, epoch: int) -> int:
    """Return the element at `place` of an epoch's permutation of 0 .. n - 1.

    A Feistel network computes the permutation, so none is stored. A number is a pair, left < a and
    right < b, with a b equal to n or slightly more. A round adds a keyed hash of one half to the
    other; this is invertible, so no two numbers collide. A result of n or more is permuted again
    until it is below n (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002).
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    digest = hashlib.sha512(f"{seed} {epoch}".encode()).digest()
    while True:
        left, right = divmod(place, b)
        for left_key, right_key in struct.iter_unpack("<QQ", digest):
            left = (left + _hashed(right ^ left_key)) % a
            right = (right + _hashed(left ^ right_key)) % b
        place = left * b + right
        if place < n:
            return place


def _hashed(x: int) -> int:
    """Hash a number of 64 bits to 63, with the finalizer of splitmix64.

    Steele et al. 2014, "Fast splittable pseudorandom number generators".
    """
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) >> 1


def prefetch(
    loader: DataLoader, device: torch.device, first_step: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of every micro-step from `first_step` on, without end, on the device.

    Threads read ahead.
    """
    # Copies from pinned memory to the GPU overlap with computation. Each batch has its own buffer.
    pin = device.type == "cuda"

    def fetch(place: tuple[int, int]) -> list[Tensor]:
        return [tensor.pin_memory() if pin else tensor for tensor in loader.batch(*place)]

    steps = itertools.count(first_step)
    places = ((step, micro_step) for step in steps for micro_step in range(loader.accumulation))
    for x, y in map_ahead(fetch, places, READ_AHEAD, READ_AHEAD):
        yield x.to(device, non_blocking=pin), y.to(device, non_blocking=pin)
