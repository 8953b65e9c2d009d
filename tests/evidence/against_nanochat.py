"""Compare the newer recipe's model with nanochat's: logits, gradients, and 20 steps of training.

    python -m tests.evidence.against_nanochat nanochat/gpt.py

The file has to be of one of nanochat's commits 3a5e0bc to e1770a3, in 2025. Both models have the
same weights and tokens, in fp32 on a small shape. nanochat's trains with PyTorch's own AdamW and
Muon, and takes this project's epsilon in norms and its cosines, which it would round to bf16.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor

from config import load_config
from model import GPT, GPTConfig
from optimizer import make_optimizers
from runtime.cli import Name, Options
from runtime.errors import TrainingError, UserError, reported
from runtime.start import start
from tests.conftest import MODERN

SHAPE: dict[str, Any] = {"n_layer": 3, "n_head": 4, "n_embd": 64, "vocab_size": 256}
FLAGS = MODERN | {"zero_init": False, "value_residual": False}
FLAGS |= {"block_size": 64, "real_vocab_size": 256}
RATES: dict[str, Any] = {
    "lr": 0.01,
    "embed_lr": 0.2,
    "head_lr": 0.004,
    "muon_lr": 0.02,
    "muon_weight_decay": 0.0,
}
ADAMW: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
STEPS = 20


def load_peer(path: Path) -> Any:
    """Import nanochat's gpt.py without the rest of nanochat. Raises UserError."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give nanochat's gpt.py")
    for name in ("nanochat", "nanochat.common", "nanochat.muon", "nanochat.adamw"):
        sys.modules[name] = MagicMock()
    module: Any = ModuleType("nanochat_gpt")
    sys.modules[module.__name__] = module  # where its dataclass looks for annotations
    # Without assertions, one of which wants the rotation in bf16.
    exec(compile(path.read_text(), str(path), "exec", optimize=1), module.__dict__)
    module.norm = lambda x: F.rms_norm(x, (x.size(-1),), eps=1e-5)
    return module


def build(module: Any) -> tuple[GPT, torch.nn.Module]:
    """Build ours and theirs with the same random weights."""
    torch.manual_seed(0)
    ours = GPT(GPTConfig(**SHAPE, **FLAGS))
    theirs = module.GPT(module.GPTConfig(sequence_len=64, n_kv_head=SHAPE["n_head"], **SHAPE))
    theirs = theirs.float()
    theirs.cos, theirs.sin = ours.transformer.rotation[:, None, :, None]  # (1, T, 1, hs / 2) each
    theirs.load_state_dict(with_their_names(ours.state_dict()))
    return ours, theirs


def with_their_names(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Split queries, keys and values; drop the shortcuts: from (1, 0) on nothing is added."""
    named = {}
    for name, tensor in tensors.items():
        if tensor is not None and "c_attn" in name:
            for x, part in zip("qkv", tensor.chunk(3), strict=True):
                named[name.replace("c_attn", f"c_{x}")] = part
        elif tensor is not None and "shortcut" not in name:
            named[name] = tensor
    return named


def train_both(ours: GPT, theirs: Any, x: Tensor, y: Tensor) -> list[tuple[float, float]]:
    """Take the same steps with both; returns their losses."""
    config = load_config(seq_len=64, **SHAPE, **FLAGS, **RATES, **ADAMW, optimizer="muon")
    for block in ours.transformer.h:
        block.shortcut.requires_grad_(False)
    own, _ = make_optimizers(ours, config)
    groups = [
        {"params": theirs.transformer.wte.parameters(), "lr": RATES["embed_lr"]},
        {"params": theirs.lm_head.parameters(), "lr": RATES["head_lr"]},
    ]
    adamw = torch.optim.AdamW(groups, **ADAMW)
    muon = torch.optim.Muon(
        theirs.transformer.h.parameters(), lr=RATES["muon_lr"], weight_decay=0.0, nesterov=True
    )
    losses = []
    for step in range(1, STEPS + 1):
        muon.param_groups[0]["momentum"] = 0.85 + 0.1 * step / 300  # the warm-up of ours
        both = ours(x, y), theirs(x, y)
        for loss, optimizers in zip(both, (own, [adamw, muon]), strict=True):
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        losses.append((both[0].item(), both[1].item()))
    return losses


class PeerOptions(Options):
    """options"""

    file: Name
    """nanochat's gpt.py"""


def main(options: PeerOptions) -> None:
    """Compare, and print the largest differences. Raises UserError, TrainingError if too large."""
    ours, theirs = build(load_peer(Path(options.file)))
    x, y = torch.randint(SHAPE["vocab_size"], (2, 4, 64))
    logits = (ours(x) - theirs(x)).abs().max().item()
    ours(x, y).backward()
    theirs(x, y).backward()
    own = with_their_names({name: p.grad for name, p in ours.named_parameters()})
    worst = max(
        float((own[name] - p.grad).norm() / p.grad.norm())
        for name, p in theirs.named_parameters()
        if p.grad is not None
    )
    for model in (ours, theirs):
        model.zero_grad()
    apart = max(abs(a - b) for a, b in train_both(ours, theirs, x, y))
    print(f"logits differ by {logits:.1e} at most, gradients by {worst:.1e} of their norm")
    print(f"losses of {STEPS} steps of AdamW and Muon differ by {apart:.1e} at most")
    if logits > 1e-5 or worst > 1e-5 or apart > 1e-3:
        raise TrainingError("they should be within 1e-5, 1e-5 and 1e-3")


if __name__ == "__main__":
    OPTIONS = start(PeerOptions, positional="file")
    with reported("stdout"):
        main(OPTIONS)
