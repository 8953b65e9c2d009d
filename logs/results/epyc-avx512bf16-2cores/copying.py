"""Tell how well runs copy: the loss on 128 tokens of validation text in random order, and on the
same 128 tokens again, which only a model that looks them up in the context can predict.

Olsson et al. 2022, "In-context Learning and Induction Heads", call the attention heads that do so
induction heads: they form within a short part of the training, during which the loss falls.

    python ladder.py recipes --seeds 3 --rounds 0 -- --keep_last 1
    python -m logs.results.epyc-avx512bf16-2cores.copying logs/recipes/*_seed_[123] > copying.csv

Each checkpoint in a run's folder has a row. With `--keep_last 8` there is one of each evaluation,
if each loss is the lowest so far, as the best model is saved.
"""

import sys
from itertools import combinations
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from checkpoint.names import all_checkpoints, step_of
from checkpoint.weights import load_model
from dataloader import open_corpus
from measure.ladder.record import curve, read_columns

_, text = open_corpus(Path("data/docs4096"), 256, 4096)
once = text.read(range(128))[0].flatten()
once = once[torch.randperm(len(once), generator=torch.Generator().manual_seed(1))].view(-1, 128)
x = once.repeat(1, 2)  # (256 sequences, 256 tokens)

print("run,step,validation_loss,first,again")
stages: dict[str, list[tuple[float, float]]] = {}  # of each seed's last checkpoint
for run in map(Path, sys.argv[1:]):
    validation = curve(read_columns(run / "eval.csv", ["step", "val_loss"]), "val_loss")
    results = []
    for checkpoint in all_checkpoints(run, "step"):
        with torch.no_grad():
            logits = load_model(str(checkpoint))(x[:, :-1])  # (sequences, 255, vocabulary)
        loss = cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        first, again = (p.mean().item() for p in loss.view(len(x), -1).split([127, 128], dim=1))
        step = step_of(checkpoint)
        print(f"{run.name},{step},{validation[step]:.4f},{first:.4f},{again:.4f}", flush=True)
        results.append((validation[step], first - again))
    stages.setdefault(run.name.partition("_seed_")[0], []).append(results[-1])

for name, seeds in stages.items():
    pairs = list(combinations(seeds, 2))
    agree = sum((a[0] < b[0]) == (a[1] > b[1]) for a, b in pairs)
    print(f"{name}: the better copier ends lower in {agree} of {len(pairs)} pairs", file=sys.stderr)
