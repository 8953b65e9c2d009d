"""Compute after what share of AdamW's tokens normuon reaches AdamW's loss.

    python -m logs.results.epyc-avx512bf16-2cores.recipes_short.tokens_share

Two short lengths of normuon, each run with a schedule of its own, end above and below AdamW's mean
loss; between them the loss is taken to be a line in the logarithm of the steps. The interval is
Student's t for the difference of two means, with Satterthwaite's degrees of freedom rounded down.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, variance

from measure.interleaved.ratio import student_t

ADAMW_STEPS = 800
SHORT = {160: "160_betas", 200: "200_betas"}


def losses(name: str, stage: str) -> list[float]:
    """Return the final loss of each seed of a stage of a stored ladder."""
    runs = json.loads((Path(__file__).parent / f"{name}.json").read_text())["runs"]
    return [run["eval"]["val_loss"][-1] for key, run in runs.items() if key.startswith(f"{stage}_")]


def share(goal: Sequence[float]) -> str:
    """Return the share of the tokens after which normuon has these losses, with its interval."""
    (fewer, above), (more, below) = ((n, losses(name, "normuon")) for n, name in SHORT.items())
    drop = fmean(above) - fmean(below)
    place = (fmean(above) - fmean(goal)) / drop
    there = [a + place * (b - a) for a, b in zip(above, below, strict=True)]
    pairs = [(variance(values) / len(values), len(values) - 1) for values in (there, goal)]
    error = sum(part for part, _ in pairs)
    freedom = error**2 / sum(part**2 / degrees for part, degrees in pairs)
    steps = fewer * (more / fewer) ** place
    half = student_t(int(freedom)) * math.sqrt(error) / drop * math.log(more / fewer)
    low, high = (steps * math.exp(end) / ADAMW_STEPS for end in (-half, half))
    return (
        f"loss {fmean(goal):.4f} after {steps:.0f} steps: {steps / ADAMW_STEPS:.3f} "
        f"({low:.3f} to {high:.3f}) of the tokens; {freedom:.1f} degrees of freedom"
    )


print("rates:", share(losses("../recipes/ladder", "rates")))
print("rates_tuned:", share(losses("rates_tuned", "rates")))
