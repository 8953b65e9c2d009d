"""Tokens per second that the loader delivers, in order and shuffled, from a corpus of random tokens.

    python benchmarks/loader.py
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import GPT2_TOKENS
from data.token_file import write_corpus
from dataloader import DataLoader, open_corpus


def main() -> None:
    """Print a rate for each batch size and order."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "random"
        tokens = np.random.default_rng(0).integers(0, GPT2_TOKENS, size=50_000_000)
        write_corpus(corpus, np.split(tokens, 50), shard_tokens=25_000_000)
        stream, _ = open_corpus(corpus, seq_len=1024, n_vocab=GPT2_TOKENS)
        for batch_size in (4, 64):
            for shuffle in (False, True):
                loader = DataLoader(stream, batch_size, shuffle=shuffle)
                rates = []
                for repeat in range(6):
                    steps = range(1 + repeat * 200, 1 + (repeat + 1) * 200)
                    start = time.perf_counter()
                    for step in steps:
                        loader.batch(step)
                    rates.append(len(steps) * batch_size * 1024 / (time.perf_counter() - start))
                median = statistics.median(rates[1:])  # the first repeat draws the permutation
                print(f"batch_size {batch_size:3d}, {'shuffled' if shuffle else 'in order':8s}: "
                      f"{median / 1e6:7.1f} million tokens/s (median of 5)")


if __name__ == "__main__":
    main()
