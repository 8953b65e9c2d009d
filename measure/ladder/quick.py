"""The speedup ladder with a small model: `python ladder.py speedup --quick`, in ten minutes."""

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import Config, load_config, step_seconds
from measure.ladder.stages import (
    Stage,
    instead_of_bf16,
    make_stage,
    make_stage_here,
    stored_config,
    training_config,
    with_bases,
)
from runtime.cli import read_yaml_mapping
from runtime.errors import UserError

# Those that can change the speed of a step; the others change what is learned.
STAGES = ("baseline", *(f"speedup{step}" for step in (1, 2, 3, 5, 6, 7, 8, 10, 13, 15)))
AGAIN = "baseline_again"  # the first stage with another seed: what it seems to be worth is noise
SUFFIX = "_quick"  # of the ladder's name
STEPS = 10  # of each run
ROUNDS = 12  # whose intervals leave out two outliers on each side
LONGEST_STEP = 1.2  # seconds, at 50% MFU, on average over the stages


class Size(NamedTuple):
    """Describe a small GPT-2, and by what it divides a stage's context."""

    n_layer: int
    n_head: int
    n_embd: int
    shorter: int
    batches: int = 1  # how many of the stage's batches make one

    def changes(self, config: Config) -> dict[str, Any]:
        """Return the options that it changes in a stage's config."""
        return {
            "batch_size": self.batches * config.batch_size,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_embd": self.n_embd,
            "block_size": config.block_size // self.shorter,
            "seq_len": config.seq_len // self.shorter,
            "max_steps": STEPS,
            "dataset": "pydocs",  # which needs no network
            "compile_mode": "default",  # max-autotune compiles for minutes
        }


SIZES = (Size(2, 2, 128, 8), Size(4, 4, 256, 4), Size(4, 12, 768, 1))
# GPT-2 (124M): on a GPU, launches would take nearly all the time of a smaller model's step.
ON_GPU = Size(12, 12, 768, 1)
MOST_BATCHES = 8
# MiB on a GPU: BATCH_MB for the activations of one batch of speedup3, the stage that needs the most
# (counted by measure/estimate.py), and BESIDE_MB for the rest of two processes: parameters,
# gradients, moments, CUDA contexts.
BATCH_MB, BESIDE_MB = 3_650, 5_000


def size_for(device: Mapping[str, Any], folder: str) -> Size:
    """Return the size of the ladder in the folder; else the largest that fits the device and has
    short steps, or the smallest.

    `device`: the findings of `probe`.
    """
    found, sizes = SIZES[0], [*SIZES]
    with contextlib.suppress(UserError):
        begun = stored_config(read_yaml_mapping(Path(folder, STAGES[0], "config.yaml")))
        alike = [size for size in (*SIZES, ON_GPU) if size.n_embd == begun.n_embd]
        found = min(alike or SIZES, key=lambda size: abs(size.n_layer - begun.n_layer))
        plain = load_config(STAGES[0])
        return found._replace(batches=max(1, begun.batch_size // plain.batch_size))
    if device.get("gpus"):
        fit = int((device["memory_mb"] - BESIDE_MB) / BATCH_MB)
        sizes += [ON_GPU._replace(batches=n) for n in range(1, 1 + min(fit, MOST_BATCHES))]
    configs = [training_config([n, *instead_of_bf16(load_config(n), device)]) for n in STAGES]
    tflops: Mapping[str, float] = device.get("tflops", {})
    for size in sizes if tflops else ():
        small = [config.model_copy(update=size.changes(config)) for config in configs]
        if statistics.fmean(step_seconds(config, tflops) for config in small) < LONGEST_STEP:
            found = size
    return found


def quick_stages(folder: str, of_runs: Sequence[str], device: Mapping[str, Any]) -> list[Stage]:
    """Return the stages with the largest small model for this device, whose `probe` found so much.

    Options of `of_runs` come last. Raises UserError for wrong ones.
    """
    size = size_for(device, folder)
    stages = []
    for name in STAGES:
        changes = size.changes(load_config(name))
        options = [*(f"--{option}={value}" for option, value in changes.items()), *of_runs]
        stages.append(make_stage_here(name, name, folder, options, device))
    first = stages[0]
    seed = f"--seed={first.config.seed + 1}"
    again = make_stage(AGAIN, STAGES[0], folder, [*first.side[2:], seed])
    return with_bases([first, again, *stages[1:]])
