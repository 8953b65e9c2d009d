"""The speedup ladder with a small model: `python ladder.py speedup --quick`, in ten minutes."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from config import Config, load_config, step_seconds
from measure.ladder.stages import Stage, make_stage, make_stage_here
from runtime.errors import UserError

# Those that can change the speed of a step; the others change what is learned.
STAGES = ("baseline", *(f"speedup{step}" for step in (1, 2, 3, 5, 6, 7, 8, 10, 13, 15)))
AGAIN = "baseline_again"  # the first stage with another seed: what it seems to be worth is noise
SUFFIX = "_quick"  # of the ladder's name
STEPS = 10  # of each run
ROUNDS = 12  # whose intervals leave out two outliers on each side
LONGEST_STEP = 1.2  # seconds, at 50% MFU


class Size(NamedTuple):
    """Describe a small GPT-2, and by what it divides a stage's context."""

    n_layer: int
    n_head: int
    n_embd: int
    shorter: int

    def changes(self, config: Config) -> dict[str, Any]:
        """Return what it changes in a stage's config. The batch stays the stage's own."""
        return {
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


def size_for(tflops: Mapping[str, float], folder: str) -> Size:
    """Return the size of the ladder in the folder; else the largest whose steps are short in all
    stages, or the smallest.

    `tflops`: the rate of a large matmul, by dtype; empty if it is not known.
    """
    configs, found = [load_config(name) for name in STAGES], SIZES[0]
    with contextlib.suppress(UserError):
        begun = load_config(f"{folder}/{STAGES[0]}/config.yaml")
        return next((size for size in SIZES if size.n_embd == begun.n_embd), found)
    for size in SIZES if tflops else ():
        small = [config.model_copy(update=size.changes(config)) for config in configs]
        if all(step_seconds(config, tflops) < LONGEST_STEP for config in small):
            found = size
    return found


def quick_stages(folder: str, of_runs: Sequence[str], device: Mapping[str, Any]) -> list[Stage]:
    """Return the stages with the largest small model for this device, whose `probe` found so much.

    Options of `of_runs` come last. Raises UserError for wrong ones.
    """
    size = size_for(device.get("tflops", {}), folder)
    stages = []
    for name in STAGES:
        changes = size.changes(load_config(name))
        options = [*(f"--{option}={value}" for option, value in changes.items()), *of_runs]
        stages.append(make_stage_here(name, name, folder, options, device))
    first = stages[0]
    seed = f"--seed={first.config.seed + 1}"
    return [first, make_stage(AGAIN, STAGES[0], folder, [*first.side[2:], seed]), *stages[1:]]
