"""Print how much each stage of recipes lowers the loss of the one before, at steps of the runs.

    python -m logs.results.epyc-avx512bf16-2cores.recipes_short.by_step

Validation loss in nats per token, the mean over the seeds; after ±: half of its 95% interval by
Student's t, with the stage's own variance; in the last row with the variance pooled over all.
"""

import json
from itertools import pairwise
from pathlib import Path

from measure.interleaved.ratio import Estimate, means_over_seeds
from measure.ladder.record import curve
from measure.report.tables import markdown_table

STEPS = [200, 400, 600, 800]

ladder = json.loads((Path(__file__).parent / "../recipes/ladder.json").read_text())
runs, seeds = ladder["runs"], range(1, ladder["seeds"] + 1)


def losses(stage: str, step: int) -> list[float]:
    """Return the validation loss of each seed of a stage at a step."""
    return [curve(runs[f"{stage}_seed_{seed}"]["eval"], "val_loss")[step] for seed in seeds]


def half(mean: Estimate) -> str:
    """Return half of a mean's interval."""
    assert mean.high is not None
    return f"± {mean.high - mean.value:.3f}"


rows, pooled = dict[str, list[str]](), ["pooled"]
for step in STEPS:
    lower = {
        stage: [a - b for a, b in zip(losses(base, step), losses(stage, step), strict=True)]
        for base, stage in pairwise(ladder["stages"])
    }
    for stage, differences in lower.items():
        mean = means_over_seeds({stage: differences})[stage]
        rows.setdefault(stage, []).append(f"{mean.value:.3f} {half(mean)}".replace("-", "−"))
    pooled.append(half(means_over_seeds(lower)["rates"]))  # the same half in all rows

headings = ["stage", *(f"step {step}" for step in STEPS)]
print(markdown_table(headings, [*([name, *cells] for name, cells in rows.items()), pooled]))
