"""Compare the newer recipe's model with nanochat's: logits, gradients, and 20 steps of training.

    git clone https://github.com/karpathy/nanochat && git -C nanochat checkout e1770a3
    PYTHONPATH=nanochat python -O -m logs.results.counted.against_nanochat

Both models have the same weights and tokens, in fp32 on a small shape. nanochat's trains with
PyTorch's own AdamW and Muon, and takes this project's epsilon in norms and its cosines, which it
would round to bf16 (-O: it asserts that they are).

On 2 cores of an AMD EPYC with avx512_bf16, 2026-11-28:

    logits differ by 9.5e-07 at most
    gradients differ by 5.6e-07 of their norm at most
    losses of 20 steps of AdamW and Muon differ by 3.9e-04 at most
"""

from typing import Any

import nanochat.gpt as nanochat
import torch
import torch.nn.functional as F

from config import load_config
from model import GPT, GPTConfig
from optimizer import make_optimizers
from tests.conftest import MODERN

SHAPE: dict[str, Any] = {"n_layer": 3, "n_head": 4, "n_embd": 64, "vocab_size": 256}
OFF = dict.fromkeys(("zero_init", "value_residual", "value_embeds", "bigram_embed"), False)
OURS = SHAPE | MODERN | OFF | {"block_size": 64}
ADAMW: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
RATES: dict[str, Any] = {"lr": 0.01, "embed_lr": 0.2, "head_lr": 0.004, "muon_lr": 0.02}


def split_qkv(tensors: Any) -> dict[str, Any]:
    """Name tensors as nanochat does, where queries, keys and values are three matrices."""
    named = {}
    for name, tensor in tensors:
        if "shortcut" in name:  # (1, 0): adds nothing
            continue
        parts = tensor.chunk(3) if "c_attn" in name else [tensor]
        for x, part in zip("qkv", parts, strict=False):
            named[name.replace("c_attn", f"c_{x}")] = part
    return named


torch.manual_seed(0)
ours = GPT(GPTConfig(**OURS))
theirs = nanochat.GPT(nanochat.GPTConfig(sequence_len=64, n_kv_head=4, **SHAPE)).float()
nanochat.norm = lambda x: F.rms_norm(x, (x.size(-1),), eps=1e-5)
theirs.cos, theirs.sin = ours.transformer.rotation[:, None, :, None]  # (1, T, 1, hs / 2) each
theirs.load_state_dict(split_qkv(ours.state_dict().items()))

for block in ours.transformer.h:
    block.shortcut.requires_grad_(False)
config = load_config(seq_len=64, optimizer="muon", muon_weight_decay=0.0, **OURS, **RATES, **ADAMW)
groups = [
    {"params": theirs.transformer.wte.parameters(), "lr": RATES["embed_lr"]},
    {"params": theirs.lm_head.parameters(), "lr": RATES["head_lr"]},
]
muon = torch.optim.Muon(theirs.transformer.h.parameters(), lr=0.02, weight_decay=0.0, nesterov=True)
optimizers = [*make_optimizers(ours, config), torch.optim.AdamW(groups, **ADAMW), muon]

x, y = torch.randint(256, (2, 4, 64))
print(f"logits differ by {(ours(x) - theirs(x)).abs().max():.1e} at most")
apart = []
for step in range(1, 21):
    muon.param_groups[0]["momentum"] = 0.85 + 0.1 * step / 300  # warmed up as ours is
    losses = ours(x, y), theirs(x, y)
    apart.append(abs(losses[0].item() - losses[1].item()))
    sum(losses).backward()
    if step == 1:
        own = split_qkv((name, p.grad) for name, p in ours.named_parameters())
        off = [(own[n] - p.grad).norm() / p.grad.norm() for n, p in theirs.named_parameters()]
        print(f"gradients differ by {max(off):.1e} of their norm at most")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
print(f"losses of {len(apart)} steps of AdamW and Muon differ by {max(apart):.1e} at most")
