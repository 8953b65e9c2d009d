"""Print how much each stage of recipes lowers the validation loss of the one before during the runs.

    python -m logs.results.epyc-avx512bf16-2cores.recipes_short.by_step

In nats per token, the mean over the seeds; after ±: half of its 95% interval by Student's t, with
the stage's own variance; in the last row with the variance pooled over the stages.
"""

import json
from itertools import pairwise
from pathlib import Path

from measure.interleaved.ratio import means_over_seeds

STEPS = [200, 400, 600, 800]

ladder = json.loads((Path(__file__).parent / "../recipes/ladder.json").read_text())
seeds = [f"_seed_{seed + 1}" for seed in range(ladder["seeds"])]
rows = dict[str, list[str]]()
pooled = list[str]()
for step in STEPS:
    lower = dict[str, list[float]]()
    for base, stage in pairwise(ladder["stages"]):
        logs = [[ladder["runs"][name + seed]["eval"] for name in (base, stage)] for seed in seeds]
        at = logs[0][0]["step"].index(step)
        lower[stage] = [before["val_loss"][at] - after["val_loss"][at] for before, after in logs]
    for stage, differences in lower.items():
        own = means_over_seeds({stage: differences})[stage]
        rows.setdefault(stage, []).append(f"{own.value:.3f} ± {own.high - own.value:.3f}")
        together = means_over_seeds(lower)[stage]
    pooled.append(f"± {together.high - together.value:.3f}")

print("| stage |", " | ".join(f"step {step}" for step in STEPS), "|")
print("|---" + "|---:" * len(STEPS) + "|")
for stage, cells in {**rows, "pooled": pooled}.items():
    print(f"| {stage} |", " | ".join(cells).replace("-", "−"), "|")
