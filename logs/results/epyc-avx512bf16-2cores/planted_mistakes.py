"""Plant ten usual mistakes in the quickstart, one at a time. Which runs report one by half-time?

    python -m logs.results.epyc-avx512bf16-2cores.planted_mistakes
    grep -E "^note: not the recipe|^step +(100|200): (behind|ahead)" logs/mistakes/*/console.log

20 clean runs, which should print neither:

    for seed in {2000..2019}; do python train.py --config quickstart.yaml --seed $seed \\
        --log_dir logs/mistakes --run_name clean_$seed; done
"""

import sys
from typing import Any

import torch
from torch import Tensor

from config import load_config
from dataloader import DataLoader
from model import Transformer
from runtime.world import World
from train import train

MISTAKES: dict[str, dict[str, Any]] = {
    "rates x 10": {"lr": 0.16, "muon_lr": 0.2},
    "rates x 0.1": {"lr": 0.0016, "muon_lr": 0.002},
    "no warm-up": {"warmup_steps": 0},
    "weight decay x 100": {"weight_decay": 10.0, "muon_weight_decay": 1.0},
    "dropout left on": {"dropout": 0.2},
    "clipping at 0.01": {"grad_clip": 0.01},
    "targets shifted": {},
    "wrong vocabulary": {},
    "data repeated": {},
    "positions permuted": {},
}
read_batch, forward = DataLoader.batch, Transformer.forward


def batch(self: DataLoader, step: int, micro_step: int = 0) -> tuple[Tensor, Tensor]:
    """Read a batch of training; validation has its own way to the text."""
    x, y = read_batch(self, 1 + step % 8 if mistake == "data repeated" else step, micro_step)
    if mistake == "targets shifted":
        y = y.roll(-1, dims=1)
    if mistake == "wrong vocabulary":
        x, y = (x * 7919 + 1) % 50257, (y * 7919 + 1) % 50257
    return x, y


def forward_permuted(
    self: Transformer, idx: Tensor, attend: Any = None, positions: Tensor | None = None
) -> Tensor:
    """In training, give the tokens positions in another order."""
    if self.training and mistake == "positions permuted":
        positions = torch.randperm(idx.size(1)).expand_as(idx)
    return forward(self, idx, attend, positions)


DataLoader.batch = batch  # type: ignore[method-assign]
Transformer.forward = forward_permuted  # type: ignore[method-assign]
for mistake in sys.argv[1:] or MISTAKES:
    options = {"log_dir": "logs/mistakes", "run_name": mistake} | MISTAKES[mistake]
    train(load_config("quickstart.yaml", **options), World(torch.device("cpu")))
