"""The optimizer, its weight-decay groups, and the learning rate of each step."""

import math

import torch
from torch import Tensor

from config import Config


def make_optimizers(model: torch.nn.Module, config: Config) -> tuple[list[torch.optim.Optimizer], list[str]]:
    """AdamW over all parameters, or with `optimizer: muon` Muon for the blocks' matrices and AdamW for the rest.

    Every parameter is in exactly one group. Returns the optimizers and lines that say what each group holds.
    """
    params = dict(model.named_parameters())  # a tied matrix comes once
    hidden = [p for name, p in params.items() if ".h." in name and p.dim() == 2] if config.optimizer == "muon" else []
    rest = [p for p in params.values() if not any(p is q for q in hidden)]
    decayed = [p for p in rest if p.dim() >= 2 or not config.decay_matrices_only]
    plain = [p for p in rest if p.dim() < 2 and config.decay_matrices_only]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    fused = True if config.fused_adamw else None  # None: PyTorch's own choice
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)]
    if hidden:
        # this scaling makes Muon's updates as large as AdamW's, so that both follow one learning rate
        optimizers.append(torch.optim.Muon(hidden, lr=config.lr, weight_decay=config.weight_decay,
                                           adjust_lr_fn="match_rms_adamw"))
    lines = [f"num {name} parameter tensors: {len(ps)}, with {sum(p.numel() for p in ps):,} parameters"
             for name, ps in (("decayed", decayed + hidden), ("non-decayed", plain))]
    return optimizers, lines


def clip_gradients(model: torch.nn.Module, grad_clip: float) -> Tensor:
    """Clip the global gradient norm to `grad_clip` (0: leave it); returns the norm before, on the device."""
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if grad_clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    return norm


def learning_rate(step: int, config: Config) -> float:
    """Learning rate of a step, counted from 1: linear warm-up to `lr`, which step `warmup_steps` has, then the schedule.

    cosine: Loshchilov & Hutter 2017 (SGDR), without restarts, with the published logs' count: the step after the warm-up
    still has the full rate, and step `max_steps` is one short of min_lr. wsd (warmup-stable-decay): Hu et al. 2024
    (MiniCPM), section 4; step `max_steps` has min_lr.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    if config.lr_schedule == "cosine":
        progress = (step - 1 - config.warmup_steps) / (config.max_steps - config.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        decay_steps = max(1, round(config.wsd_decay_fraction * config.max_steps))
        last_stable = max(1, config.warmup_steps, config.max_steps - decay_steps)
        share = min(1.0, 1 - (step - last_stable) / max(1, config.max_steps - last_stable))
    return config.final_lr() + share * (config.lr - config.final_lr())
