"""The speedup ladder with a small model: `python ladder.py speedup --quick`, in 15 minutes."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from config import Config, load_config
from measure.interleaved.rounds import to_flags
from measure.ladder.explain import CHANGE_SPEED
from measure.ladder.record import Device
from measure.ladder.stages import Stage, can_gain, make_stage

AGAIN = "baseline_again"  # the first stage with another seed: its factor is noise
SUFFIX = "_quick"  # ends the ladder's name
STEPS = 10  # per run
ROUNDS = 12  # their intervals leave out two outliers on each side
LONGEST_STEP = 1.2  # seconds, at 50% MFU, on average over the stages
TOKENS = 2 * 1024  # in a batch before the context is divided: all stages take the same


class Size(NamedTuple):
    """A small GPT-2, and the divisor of a stage's context."""

    n_layer: int
    n_head: int
    n_embd: int
    shorter: int
    batches: int = 1  # a step has this many times TOKENS

    def changes(self, config: Config) -> dict[str, Any]:
        """Return the options that it changes in a stage's config."""
        return {
            "batch_size": self.batches * TOKENS // config.seq_len,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_embd": self.n_embd,
            "block_size": config.block_size // self.shorter,
            "seq_len": config.seq_len // self.shorter,
            "max_steps": STEPS,
            "dataset": "pydocs",  # needs no network
            "compile_mode": "default",  # max-autotune compiles for minutes
        }


SIZES = (Size(2, 2, 128, 8, 2), Size(4, 4, 256, 4, 2), Size(4, 12, 768, 1, 2))
# GPT-2 (124M): on a GPU, launches would take nearly all the time of a smaller model's step.
ON_GPU = Size(12, 12, 768, 1)
MOST_BATCHES = 16
# MiB on a GPU: BATCH_MB for the activations of one batch of baseline, the stage that needs the most
# (counted), and BESIDE_MB for the rest of two processes: parameters, gradients, moments, CUDA
# contexts.
BATCH_MB, BESIDE_MB = 3_500, 5_000


def size_for(device: Device) -> Size:
    """Return the largest size that fits the device and has short steps, or the smallest."""
    found, sizes = SIZES[0], [*SIZES]
    if device.gpus and device.memory_mb:
        fit = int((device.memory_mb - BESIDE_MB) / BATCH_MB)
        sizes += [ON_GPU._replace(batches=n) for n in range(1, 1 + min(fit, MOST_BATCHES))]
    configs = [make_stage(name, name, [], device).config for name in CHANGE_SPEED]
    for size in sizes if device.tflops else ():
        small = [config.with_options(**size.changes(config)) for config in configs]
        if statistics.fmean(map(device.step_seconds, small)) < LONGEST_STEP:
            found = size
    return found


def quick_stages(size: Size, options: Sequence[str], device: Device) -> list[Stage]:
    """Return the stages with a small model on a device. `options` come last.

    Raises UserError for wrong options.
    """
    changes = [to_flags(size.changes(load_config(name))) for name in CHANGE_SPEED]
    first, *others = [
        make_stage(name, name, [*flags, *options], device)
        for name, flags in zip(CHANGE_SPEED, changes, strict=True)
    ]
    again = first.variant(AGAIN, [f"--seed={first.config.seed + 1}"])
    return [first, again, *(stage for stage in others if can_gain(stage, device))]
