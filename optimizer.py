"""The optimizer, its weight-decay groups, and the learning rate of each step."""

import math
from typing import Any

import torch
from torch import Tensor

from config import Config


def make_optimizers(
    model: torch.nn.Module, config: Config
) -> tuple[list[torch.optim.Optimizer], list[str]]:
    """AdamW over all parameters, or with `optimizer: muon` Muon for the blocks' matrices and AdamW
    for the rest.

    Every parameter is in exactly one group, and each group has `lr_factor`: its learning rate over
    the step's. Returns the optimizers, and lines that count the parameters that decay and those
    that do not.
    """
    params = dict(model.named_parameters())  # a tied matrix comes once
    hidden = (
        {name: p for name, p in params.items() if ".h." in name and p.dim() == 2}
        if config.optimizer == "muon"
        else {}
    )
    rest = [p for name, p in params.items() if name not in hidden]
    decayed = [p for p in rest if p.dim() >= 2 or not config.decay_matrices_only]
    plain = [p for p in rest if p.dim() < 2 and config.decay_matrices_only]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    fused = True if config.fused_adamw else None  # None: PyTorch's own choice
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=fused,
        )
    ]
    if hidden:
        # queries, keys and values are three matrices that c_attn computes in one product
        three = [p for name, p in hidden.items() if name.endswith("c_attn.weight")]
        one = [p for name, p in hidden.items() if not name.endswith("c_attn.weight")]
        optimizers.append(
            Muon(
                [{"params": three, "parts": 3}, {"params": one, "parts": 1}],
                lr=config.muon_lr,
                weight_decay=config.muon_weight_decay,
                compiled=config.compile,
            )
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr_factor"] = group["lr"] / config.lr
    lines = [
        f"num {name} parameter tensors: {len(ps)}, with {sum(p.numel() for p in ps):,} parameters"
        for name, ps in (("decayed", [*decayed, *hidden.values()]), ("non-decayed", plain))
    ]
    return optimizers, lines


class Muon(torch.optim.Optimizer):
    """Momentum whose every update is made orthogonal (Jordan et al. 2024,
    kellerjordan.github.io/posts/muon).

    For the matrices of the hidden layers. A group's `parts` says how many matrices, one above the
    other, each of its parameters holds. Momentum is Nesterov's, and rises from 0.85 to 0.95 over
    the first 300 steps. An update's largest singular value is about lr, times sqrt(rows / columns)
    for a matrix with more rows than columns, as in that post. All matrices of one shape are made
    orthogonal at once.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, weight_decay: float, compiled: bool = False
    ):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "parts": 1})
        self.orthogonalize = (
            torch.compile(orthogonalize, dynamic=False) if compiled else orthogonalize
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Update every parameter that has a gradient."""
        updates: dict[
            tuple[int, int], list[tuple[Tensor, Tensor, float]]
        ] = {}  # by shape: weights, directions, size
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["momentum_buffer"] = torch.tensor(0.0), torch.zeros_like(p)
                state["step"] += 1
                momentum = 0.85 + 0.1 * min(1.0, state["step"].item() / 300)
                average = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                ahead = p.grad.lerp(average, momentum)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                for weights, direction in zip(
                    p.chunk(group["parts"]), ahead.chunk(group["parts"]), strict=True
                ):
                    rows, columns = weights.shape
                    size = group["lr"] * max(1.0, rows / columns) ** 0.5
                    if (
                        rows > columns
                    ):  # with as few rows as there are, the products below are smallest
                        weights, direction = weights.T, direction.T
                    updates.setdefault((weights.size(0), weights.size(1)), []).append(
                        (weights, direction, size)
                    )
        for same_shape in updates.values():
            directions = torch.stack(
                [direction for _, direction, _ in same_shape]
            )  # (matrices, rows, columns)
            dtype = torch.bfloat16 if has_bf16_products(directions.device) else torch.float32
            for (weights, _, size), direction in zip(
                same_shape, self.orthogonalize(directions.to(dtype)), strict=True
            ):
                weights.sub_(direction, alpha=size)


def orthogonalize(x: Tensor) -> Tensor:
    """Each of the matrices (n, rows, columns), rows <= columns, with its singular values moved to
    between about 0.7 and 1.2, but for those below about a thousandth of the matrix's norm.

    Five steps of a Newton-Schulz iteration with the coefficients of the post above, which rise
    steeply from 0 rather than converge. It forgives bfloat16's rounding.
    """
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # singular values are at most 1
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def has_bf16_products(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16 matrix products, so that they are not slower
    than float32's.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # of PyTorch's own
    return device.type == "cpu" and any(getattr(torch.cpu, name, bool)() for name in known)


def clip_gradients(model: torch.nn.Module, grad_clip: float) -> Tensor:
    """Clip the global gradient norm to `grad_clip` (0: leave it); returns the norm before, on the
    device.
    """
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if hasattr(norm, "full_tensor"):  # with FSDP: over the shards of all processes
        norm = norm.full_tensor()
    if grad_clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    return norm


def learning_rate(step: int, config: Config) -> float:
    """Learning rate of a step, counted from 1: linear warm-up to `lr`, which step `warmup_steps`
    has, then the schedule.

    cosine: Loshchilov & Hutter 2017 (SGDR), without restarts, with the published logs' count: the
    step after the warm-up still has the full rate, and step `max_steps` is one short of min_lr. wsd
    (warmup-stable-decay): Hu et al. 2024 (MiniCPM), section 4; step `max_steps` has min_lr.
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
