"""The optimizer, its weight-decay groups, and the learning rate of each step."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from config import Config
from kernels.attention import CPU_HAS_FAST_BF16
from runtime.console import log


def make_optimizers(
    model: nn.Module, config: Config, rank: int = 0, world_size: int = 1
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of the config's choice; tells the numbers of decayed parameters.

    Each parameter is in exactly one group, and each group has `lr_factor`, by which the learning
    rate of the step is multiplied. Each rank takes a share of Muon's work.
    """
    optimizers = OPTIMIZERS[config.optimizer](model, config, rank, world_size)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr_factor"] = group["lr"] / config.lr
    params = list(model.parameters())  # a tied matrix comes once
    log.info(f"{sum(p.numel() for p in params):,} parameters")
    for kind, decays in (("decayed", True), ("non-decayed", False)):
        sizes = [p.numel() for p in params if is_decayed(p, config) == decays]
        log.debug(f"num {kind} parameter tensors: {len(sizes)}, with {sum(sizes):,} parameters")
    return optimizers


def is_decayed(p: Tensor, config: Config) -> bool:
    """True if weight decay pulls the parameter towards 0.

    That regularizes matrices and embeddings; biases and norms have no reason to be small, so GPT
    (Radford et al. 2018, section 4.1) does not decay them.
    """
    return p.dim() >= 2 or not config.decay_matrices_only


def rate_of(p: Tensor, module: nn.Module, model: nn.Module, config: Config) -> float:
    """Return the learning rate of a module's parameter: the option of its kind, else lr."""
    rate = None
    if p.dim() < 2:
        rate = config.scalar_lr
    elif isinstance(module, nn.Embedding):
        rate = config.embed_lr
    elif module is model.lm_head:
        rate = config.head_lr
    return rate or config.lr


def parameter_groups(
    model: nn.Module, config: Config, without: Iterable[Tensor] = ()
) -> list[dict[str, Any]]:
    """Group the parameters, except `without`, by learning rate and weight decay."""
    groups, seen = defaultdict[tuple[float, float], list[Tensor]](list), {*without}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p not in seen:  # a tied matrix comes twice, as the embedding first
                decay = config.weight_decay if is_decayed(p, config) else 0.0
                groups[rate_of(p, module, model, config), decay].append(p)
                seen.add(p)
    return [
        {"params": group, "lr": rate, "weight_decay": decay}
        for (rate, decay), group in groups.items()
    ]


def adamw(groups: list[dict[str, Any]], config: Config) -> torch.optim.Optimizer:
    """Build AdamW for groups of parameters."""
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        # One kernel for the whole update instead of several passes over each tensor; None is
        # PyTorch's own choice.
        fused=config.fused_adamw or None,
    )


def make_adamw(
    model: nn.Module, config: Config, rank: int, world_size: int
) -> list[torch.optim.Optimizer]:
    """Build AdamW for all parameters."""
    return [adamw(parameter_groups(model, config), config)]


def make_muon(
    model: nn.Module, config: Config, rank: int, world_size: int
) -> list[torch.optim.Optimizer]:
    """Build Muon for the blocks' matrices, and AdamW for all other parameters."""
    modules = model.get_submodule("transformer.h").named_modules()
    matrices = {name: module.weight for name, module in modules if isinstance(module, nn.Linear)}
    # c_attn is three matrices in one matmul: queries, keys and values
    qkv = [p for name, p in matrices.items() if "c_attn" in name]
    others = [p for name, p in matrices.items() if "c_attn" not in name]
    groups = [{"params": qkv, "parts": 3}, {"params": others, "parts": 1}]
    muon = Muon(
        groups,
        config.muon_lr,
        config.muon_weight_decay,
        config.compile,
        rank,
        world_size,
        normalized=config.normuon,
    )
    return [adamw(parameter_groups(model, config, without=matrices.values()), config), muon]


class Update(NamedTuple):
    """A matrix of a parameter, and the momentum that updates it; rows <= columns."""

    weights: Tensor  # (rows, columns), a view of the parameter
    momentum: Tensor  # (rows, columns)
    size: float  # the step along the direction
    squares: Tensor | None  # normuon: (rows, 1) or, of a transposed matrix, (1, columns)


def update_of(weights: Tensor, momentum: Tensor, lr: float, squares: Tensor | None) -> Update:
    """Return a matrix's update; with more rows than columns, the transposed one."""
    rows, columns = weights.shape
    size = lr * max(1.0, rows / columns) ** 0.5
    if rows > columns:  # the matmuls are smaller with fewer rows
        weights, momentum = weights.T, momentum.T
        squares = None if squares is None else squares.T
    return Update(weights, momentum, size, squares)


def normalize_rows(direction: Tensor, squares: Tensor) -> Tensor:
    """Divide the rows of a direction by their root mean square of the last steps, keep its norm.

    NorMuon (Li et al. 2025, algorithm 1): neurons, the rows of a matrix, then learn at the same
    speed. `squares` has the averages, which this updates. The norm is kept as in modded-nanogpt.
    """
    direction = direction.float()
    sums = direction.square().sum_to_size(squares.shape)
    squares.lerp_(sums * (squares.numel() / direction.numel()), 1 - 0.95)
    scaled = direction * squares.clamp_min(1e-10).rsqrt()
    return scaled * (direction.norm() / scaled.norm().clamp_min(1e-10))


class Muon(torch.optim.Optimizer):
    """Update matrices by their orthogonalized momentum.

    Jordan et al. 2024, kellerjordan.github.io/posts/muon. For the matrices of the hidden layers.
    `parts` of a group: each of its parameters is a stack of this many matrices. The Nesterov
    momentum rises from 0.85 to 0.95 over the first 300 steps. An update's largest singular value is
    about lr, times sqrt(rows / columns) for a matrix with more rows than columns, as in the post.
    Matrices of one shape are orthogonalized together; several ranks share the work.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        weight_decay: float,
        compiled: bool = False,
        rank: int = 0,
        world_size: int = 1,
        normalized: bool = False,
    ):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self.rank, self.world_size, self.normalized = rank, world_size, normalized
        self.orthogonalize = (
            torch.compile(orthogonalize, dynamic=False) if compiled else orthogonalize
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Update every parameter; all must have a gradient."""
        by_shape = defaultdict[torch.Size, list[Update]](list)
        for group in self.param_groups:
            params, parts = group["params"], group["parts"]
            momenta = [part for whole in self._momentum(params) for part in whole.chunk(parts)]
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            matrices = [part for p in params for part in p.chunk(parts)]
            squares = [None] * len(matrices)
            if self.normalized:
                whole = [self.state[p]["row_squares"] for p in params]
                squares = [part for rows in whole for part in rows.chunk(parts)]
            for weights, momentum, of_rows in zip(matrices, momenta, squares, strict=True):
                update = update_of(weights, momentum, group["lr"], of_rows)
                by_shape[update.weights.shape].append(update)
        gathered = [
            self._directions([update.momentum for update in updates])
            for updates in by_shape.values()
        ]
        for updates, (directions, work) in zip(by_shape.values(), gathered, strict=True):
            if work:
                work.wait()  # other ranks' directions arrive while the next ones are computed
            # With several ranks, the directions end with padding.
            for update, direction in zip(updates, directions[: len(updates)], strict=True):
                if update.squares is not None:
                    direction = normalize_rows(direction, update.squares)
                update.weights.sub_(direction, alpha=update.size)

    def _directions(self, parts: list[Tensor]) -> tuple[Tensor, dist.Work | None]:
        """Orthogonalize matrices of one shape: returns (n, rows, columns), with several ranks more.

        All ranks have the same momentum, so each can take any share; shares are padded to equal
        size with the last matrix. The result is complete after `wait` on the second value.
        """
        share = -(-len(parts) // self.world_size)  # rounded up
        first = self.rank * share
        own = [parts[min(i, len(parts) - 1)] for i in range(first, first + share)]
        dtype = torch.bfloat16 if has_fast_bf16(parts[0].device) else torch.float32
        directions = self.orthogonalize(torch.stack(own).to(dtype))
        if self.world_size == 1:
            return directions, None
        everyones = directions.new_empty(self.world_size * share, *directions.shape[1:])
        # all_gather_into_tensor is named all_gather_single since PyTorch 2.13
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return everyones, gather(everyones, directions, async_op=True)

    def _momentum(self, params: list[Tensor]) -> Sequence[Tensor]:
        """Add the gradients to the momentum of the parameters; returns Nesterov's look-ahead.

        All parameters at once (foreach): on a GPU, launching many small kernels takes longer than
        running them.
        """
        for p in params:
            if not self.state[p]:
                self.state[p] = {"step": torch.tensor(0.0), "momentum_buffer": torch.zeros_like(p)}
                if self.normalized:
                    self.state[p]["row_squares"] = torch.zeros_like(p[:, :1])
            self.state[p]["step"] += 1
        states = [self.state[p] for p in params]
        averages = [state["momentum_buffer"] for state in states]
        gradients = [p.grad for p in params if p.grad is not None]
        momentum = 0.85 + 0.1 * min(1.0, states[0]["step"].item() / 300)
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        return torch._foreach_lerp(gradients, averages, momentum)


# The function that builds the optimizers of each choice of config.optimizer. A checkpoint keeps an
# optimizer's whole state of every parameter. To create it, a resumed run calls `step()` with zero
# gradients, after the weights are restored: it must leave finite weights. With `defaults["fused"]`
# an optimizer skips an update itself, on the device, if `found_inf` is 1. EXCLUDED_BY in config.py
# has the options that a choice excludes; mark options that it does not use with Needs.
OPTIMIZERS = {"adamw": make_adamw, "muon": make_muon}


def orthogonalize(x: Tensor) -> Tensor:
    """Move the singular values of matrices (n, rows, columns), rows <= columns, close to 1.

    They end between about 0.7 and 1.2, except values below 0.0015 of the matrix's norm. Five
    steps of a Newton-Schulz iteration, with the coefficients of the post above: they raise small
    values quickly instead of converging, and tolerate the rounding of bfloat16.
    """
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # singular values are at most 1
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def has_fast_bf16(device: torch.device) -> bool:
    """True if matmuls are faster in bf16 than in fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and CPU_HAS_FAST_BF16


def clip_gradients(model: torch.nn.Module, grad_clip: float) -> Tensor:
    """Clip the global gradient norm to `grad_clip`; 0 leaves the gradients as they are.

    Returns the norm before clipping, on the device: to read it would wait for the device.
    """
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if hasattr(norm, "full_tensor"):  # FSDP: combine the shards of all ranks
        norm = norm.full_tensor()
    if grad_clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    return norm


def learning_rate(step: int, config: Config, seconds: float = 0.0) -> float:
    """Return the learning rate of a step, counted from 1, `seconds` after the run's first one.

    Linear warm-up reaches `lr` at step `warmup_steps`, then the schedule begins. cosine: Loshchilov
    & Hutter 2017 (SGDR), without restarts. As in the published logs, the first step after the
    warm-up still has the full rate, and step `max_steps` is one short of min_lr. wsd
    (warmup-stable-decay): Hu et al. 2024 (MiniCPM), section 4; step `max_steps` has min_lr. With
    max_minutes, the schedule follows the elapsed time instead of the steps.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    progress = config.progress(step, seconds)
    if config.lr_schedule == "cosine":
        if not config.max_minutes:
            decay_steps = max(1, config.max_steps - config.warmup_steps)
            progress = (step - 1 - config.warmup_steps) / decay_steps
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        assert config.lr_schedule == "wsd"
        last_stable = last_stable_step(config)
        share = min(1.0, 1 - (step - last_stable) / max(1, config.max_steps - last_stable))
        if config.max_minutes:
            share = min(1.0, (1 - progress) / config.wsd_decay_fraction)
    return config.final_lr() + share * (config.lr - config.final_lr())


def last_stable_step(config: Config) -> int:
    """Return the last step with the full learning rate, after which wsd decays."""
    decay_steps = max(1, round(config.wsd_decay_fraction * config.max_steps))
    return max(1, config.warmup_steps, config.max_steps - decay_steps)


def note_rate_change(config: Config, saved: Mapping[str, Any], step: int, seconds: float) -> None:
    """Note that a run which resumes after `step` continues at another learning rate.

    `saved`: its options until then. `seconds`: time since the run's first step.
    """
    before = config.with_options(**saved)
    old, new = learning_rate(step, before, seconds), learning_rate(step + 1, config, seconds)
    if math.isclose(new, learning_rate(step + 1, before, seconds), rel_tol=0.01):
        return
    line = f"the learning rate of step {step + 1} is {new:.3g}, it was {old:.3g} at step {step}"
    if config.lr_schedule == "wsd" and not config.max_minutes and step > last_stable_step(before):
        line += (
            f"; to train longer with wsd, resume from a checkpoint before the decay began: step "
            f"{last_stable_step(before)} or earlier"
        )
    log.warning(line)
