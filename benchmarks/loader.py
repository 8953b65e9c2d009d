"""What a large corpus costs: seconds to open it and to its first batch, memory, and sequences per
second, in order and shuffled.

    python -m benchmarks.loader

A corpus of 100 billion tokens: 1,000 shards that are sparse files, which take no space and are read
as zeros. With `--written` they hold random tokens, so fewer are wanted. The processes, 1 and then 8
on this machine, are the ranks of one run, and the files are dropped from the system's cache before
each turn. The memory of a process is its peak over what it had once PyTorch was imported and in
use.
"""

import argparse
import itertools
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

GPT2_TOKENS = 50257
MB = 1e6


class Figures(NamedTuple):
    """What one process measured."""

    opened: float  # seconds until the corpus was open and its fingerprint known
    first: float  # seconds until the first batch
    memory: float  # MB
    rate: float  # sequences per second


def memory(line: str) -> float:
    """This process's memory in MB, now (`VmRSS`) or at its peak (`VmHWM`); 0 where the system does
    not tell.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(text.split()[1]) * 1024 / MB for text in lines if text.startswith(line))


def process(
    folder: Path,
    rank: int,
    args: argparse.Namespace,
    world_size: int,
    shuffle: bool,
    ready: Any,
    results: Any,
) -> None:
    """One rank: open the corpus and read its batches for some seconds."""
    torch.set_num_threads(1)
    torch.ones(8, 8) @ torch.ones(8, 8)
    own = memory("VmRSS")
    from dataloader import DataLoader, open_corpus, prefetch

    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far, of importing
    ready.wait()
    start = time.perf_counter()
    stream, _ = open_corpus(folder, args.seq_len, GPT2_TOKENS)
    stream.fingerprint()
    opened = time.perf_counter() - start
    loader = DataLoader(stream, args.batch_size, world_size=world_size, rank=rank, shuffle=shuffle)
    batches = prefetch(loader, torch.device("cpu"), itertools.count(1))
    next(batches)
    first = time.perf_counter() - start
    ready.wait()
    start, n = time.perf_counter(), 0
    while time.perf_counter() - start < args.seconds:
        next(batches)
        n += args.batch_size
    rate = n / (time.perf_counter() - start)
    results.put(Figures(opened, first, memory("VmHWM") - own, rate))


def turn(folder: Path, args: argparse.Namespace, world_size: int, shuffle: bool) -> list[Figures]:
    """What all processes measured, each a fresh one."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    spawn = multiprocessing.get_context("spawn")
    ready, results = spawn.Barrier(world_size), spawn.Queue()
    ranks = [
        spawn.Process(
            target=process,
            args=(folder, rank, args, world_size, shuffle, ready, results),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    figures = [results.get(timeout=600) for _ in ranks]
    for rank in ranks:
        rank.join()
    return figures


def write(folder: Path, args: argparse.Namespace) -> None:
    """The shards, sparse or written."""
    from data.token_file import HEADER_BYTES, TOKEN_BYTES, header, write_token_file

    rng = np.random.default_rng(0)
    for i in range(args.shards):
        path = folder / f"large_train_{i:06d}.bin"
        if args.written:
            write_token_file(
                path, [rng.integers(0, GPT2_TOKENS, size=args.shard_tokens, dtype=np.uint16)]
            )
        else:
            with open(path, "wb") as file:
                file.write(header(args.shard_tokens))
                file.truncate(HEADER_BYTES + TOKEN_BYTES * args.shard_tokens)


def main() -> None:
    """Print a line for each number of processes and order."""
    from runtime.report import git_commit, machine

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--shard_tokens", type=int, default=100_000_000)
    parser.add_argument(
        "--written", action="store_true", help="shards of random tokens, which take two bytes each"
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="for which batches are read in each turn [5]"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each; medians are printed [3]"
    )
    parser.add_argument("--place", help="folder for the files [that for temporary files]")
    args = parser.parse_args()
    print(
        f"{machine()}; Python {sys.version.split()[0]}, torch {torch.__version__}; commit "
        f"{git_commit()}"
    )
    place = Path(tempfile.mkdtemp(dir=args.place))
    try:
        write(place, args)
        print(
            f"{args.shards:,} {'written' if args.written else 'sparse'} shards of "
            f"{args.shard_tokens:,} tokens, "
            f"{args.shards * args.shard_tokens:,} in all; batch_size {args.batch_size}, seq_len "
            f"{args.seq_len}\n"
        )
        for world_size in args.processes:
            for shuffle in (False, True):
                turns = [turn(place, args, world_size, shuffle) for _ in range(args.rounds)]
                opened, first, most = (
                    statistics.median(
                        max(getattr(each, name) for each in figures) for figures in turns
                    )
                    for name in ("opened", "first", "memory")
                )
                each = statistics.median(
                    statistics.median(figures.rate for figures in ranks) for ranks in turns
                )
                total = statistics.median(sum(figures.rate for figures in ranks) for ranks in turns)
                print(
                    f"{world_size} process{'es' if world_size > 1 else ''}, "
                    f"{'shuffled' if shuffle else 'in order'}: open in "
                    f"{opened:.2f} s, first batch after {first:.2f} s, {most:.0f} MB a process, "
                    f"{each:,.0f} sequences/s a "
                    f"process, {total:,.0f} in all",
                    flush=True,
                )
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
