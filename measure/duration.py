"""Estimate how long training steps take, from their FLOPs and the rate of a large matmul."""

from collections.abc import Iterable, Mapping

from config import Config
from runtime.report import about

# The share of a large matmul's rate that training is assumed to reach, and the range of the
# measured runs in logs/results/*/speedup/results.csv.
MFU, LEAST_MFU, MOST_MFU = 0.5, 0.14, 0.77
# Seconds until the first step, and those that torch.compile adds where it has compiled the same
# before: of the quick ladder's runs on two cores of an EPYC (docs/results.md).
START, COMPILE = 7.0, 8.0
UNKNOWN = "the device could not be measured, or is too busy with other programs"


def part_flops(config: Config, tokens: int) -> dict[str, float]:
    """Return the FLOPs of the matmuls in each part, forward and backward, which has twice those."""
    C, L = config.n_embd, config.n_layer
    forward: dict[str, float] = {
        "attention": tokens * L * (2 * 4 * C * C + 4 * config.seq_len * C),
        "MLP": tokens * L * 2 * 8 * C * C,
        "head and loss": tokens * 2 * C * config.vocab_size,
    }
    return forward | {f"{part}, backward": 2 * flops for part, flops in forward.items()}


def step_seconds(config: Config, tflops: Mapping[str, float], ranks: int = 1) -> float:
    """Estimate the seconds of a step on so many ranks. `tflops`: as for `describe_duration`."""
    dtype = "bfloat16" if config.bf16 else "float16" if config.fp16 else "float32"
    rate = tflops.get(dtype, tflops["float32"]) * 1e12 * MFU
    return sum(part_flops(config, config.tokens_per_step(ranks)).values()) / rate / ranks


def describe_duration(
    work: Iterable[tuple[Config, float]],
    tflops: Mapping[str, float] | None,
    shorter: str,
    processes: Iterable[Config] = (),
) -> str:
    """Say how long so many steps of each config take, and what is shorter.

    `tflops`: the rate of a large matmul, by the name of its dtype; empty or None: not known.
    `processes`: the configs of those that have to be started.
    """
    if not tflops:
        return f"how long this takes is not known: {UNKNOWN}; shorter: {shorter}"
    seconds = sum(START + COMPILE * config.compile for config in processes)
    for config, steps in work:
        minutes = config.max_minutes
        seconds += 60 * minutes if minutes else steps * step_seconds(config, tflops)
    return f"takes about {about(seconds)}, at {MFU:.0%} MFU; shorter: {shorter}"
