"""What the key-value cache is worth: seconds for 256 tokens of GPT-2 (124M), with random weights,
cached as sample.py draws them, and by a plain loop that reads all of the text again for each token.

    python benchmarks/decoding.py
    python benchmarks/decoding.py --rounds 1 --bf16

Both sides continue the same text, in turn, 16 tokens of one and 16 of the other, and every other
turn has them in reverse order: so a machine that grows slower slows both. A round is one text of
256 tokens; its ratio is that of the two sums.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from config import load_config
from model import GPT, GPTConfig
from runtime.errors import reported
from runtime.report import git_commit, machine
from sample import chooser, seeded

PROMPT, NEW, TURN = 16, 256, 16  # tokens


def cached(model: GPT, prompt: list[int], seed: int) -> Iterator[int]:
    """The text's tokens, as sample.py draws them."""
    for tokens in model.stream([prompt], NEW, None, chooser([seeded(seed)], 0.8, 50)):
        assert tokens[0] is not None
        yield tokens[0]


def uncached(model: GPT, prompt: list[int], seed: int) -> Iterator[int]:
    """The same tokens from a plain loop."""
    text, choose = list(prompt), chooser([seeded(seed)], 0.8, 50)
    for _ in range(NEW):
        with torch.no_grad():
            x = model.transformer(torch.tensor([text[-model.config.block_size :]]))
            logits = model.lm_head(x[0, -1])[
                : model.config.n_vocab
            ].float()  # of the last token alone, as with the cache
        text.append(choose(logits, 0, text))
        yield text[-1]


def one_round(model: GPT, seed: int) -> tuple[float, float]:
    """Seconds of both sides for one text."""
    prompt = torch.randint(0, model.config.n_vocab, (PROMPT,), generator=seeded(seed)).tolist()
    sides = (cached(model, prompt, seed), uncached(model, prompt, seed))
    seconds = [0.0, 0.0]
    texts: tuple[list[int], list[int]] = ([], [])
    for turn in range(NEW // TURN):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            start = time.perf_counter()
            texts[side].extend(next(sides[side]) for _ in range(TURN))
            seconds[side] += time.perf_counter() - start
    same = sum(a == b for a, b in zip(*texts, strict=True))
    print(
        f"  cached {seconds[0]:.2f} s, uncached {seconds[1]:.2f} s: "
        f"{seconds[1] / seconds[0]:.2f} times as fast; "
        f"{same} of {NEW} tokens the same",
        flush=True,
    )
    return seconds[0], seconds[1]


def main() -> None:
    """Print each round, and medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="texts of 256 tokens [5]")
    parser.add_argument("--bf16", action="store_true", help="weights in bfloat16")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = load_config(init="gpt2", tie_weights=True)
    model = GPT(GPTConfig.of(config)).eval().to(torch.bfloat16 if args.bf16 else torch.float32)
    print(
        f"GPT-2 (124M), {NEW} tokens after {PROMPT}, in {'bf16' if args.bf16 else 'fp32'}, "
        f"{torch.get_num_threads()} threads"
    )
    print(f"{machine()}, torch {torch.__version__}, commit {git_commit()}")
    rounds = [one_round(model, seed) for seed in range(args.rounds)]
    ours, theirs = (statistics.median(side) for side in zip(*rounds, strict=True))
    ratio = statistics.median(plain / fast for fast, plain in rounds)
    print(
        f"medians of {len(rounds)}: cached {ours:.2f} s, {NEW / ours:.1f} tokens/s; uncached "
        f"{theirs:.2f} s, "
        f"{NEW / theirs:.1f} tokens/s; {ratio:.2f} times as fast"
    )


if __name__ == "__main__":
    with reported("the benchmark"):
        main()
