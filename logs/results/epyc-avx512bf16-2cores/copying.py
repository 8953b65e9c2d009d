"""Tell how well runs copy: the loss on 128 tokens of validation text in random order, and on the
same 128 tokens again, which only a model that looks them up in the context can predict.

Olsson et al. 2022, "In-context Learning and Induction Heads", call the attention heads that do so
induction heads: they form within a short part of the training, during which the loss falls.

    python ladder.py recipes --seeds 3 --rounds 0 -- --keep_last 1
    python -m logs.results.epyc-avx512bf16-2cores.copying logs/recipes/*_seed_[123] > copying.csv

Each checkpoint in a run's folder has a row. With `--keep_last 8` there is one of each evaluation,
if each loss is the lowest so far, as the best model is saved.
"""

import csv
import sys
from itertools import combinations
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from checkpoint.weights import load_model
from dataloader import open_corpus

_, text = open_corpus(Path("data/docs4096"), 256, 4096)
once = text.read(range(128))[0].flatten()
once = once[torch.randperm(len(once), generator=torch.Generator().manual_seed(1))].view(-1, 128)
x = once.repeat(1, 2)  # (256 sequences, 256 tokens)

print("run,step,validation_loss,first,again")
stages: dict[str, list[tuple[float, float]]] = {}
for run in map(Path, sys.argv[1:]):
    losses = {int(row["step"]): row for row in csv.DictReader((run / "eval.csv").open())}
    for checkpoint in sorted((run / "checkpoints").glob("step_*")):
        step = int(checkpoint.name.removeprefix("step_"))
        validation = float(losses[step]["val_loss"])
        with torch.no_grad():
            logits = load_model(str(checkpoint))(x[:, :-1])  # (sequences, 255, vocabulary)
        loss = cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        first, again = (part.mean().item() for part in loss.view(256, -1).split([127, 128], dim=1))
        print(f"{run.name},{step},{validation:.4f},{first:.4f},{again:.4f}", flush=True)
    stages.setdefault(run.name.partition("_seed_")[0], []).append((validation, first - again))

for name, seeds in stages.items():
    pairs = list(combinations(seeds, 2))
    agree = sum((a[0] < b[0]) == (a[1] > b[1]) for a, b in pairs)
    print(f"{name}: the better copier ends lower in {agree} of {len(pairs)} pairs", file=sys.stderr)
