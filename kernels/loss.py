"""Chunked cross-entropy: the logits of a few tokens at a time, so that all logits (B, T, V) never
exist at once.

The forward pass computes the gradients of each chunk together with its logits, and the backward
pass only scales them. To recompute the logits instead would cost a tenth of a step's arithmetic.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Keep logits within +-cap, smoothly (Gemma 2, Gemma Team 2024, section 2); 0 is off."""
    return cap * torch.tanh(logits / cap) if cap else logits


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, n_vocab: int, chunks: int, cap: float = 0.0
) -> Tensor:
    """Return the mean loss in nats per token of the last layer's output x (B, T, C), given the
    head's weight (V, C) and targets (B, T).

    The tokens are split into `chunks` chunks of one size; the last one may be smaller. Rows of the
    head from n_vocab on are padding. `cap`: see `soft_cap`. Matmuls run in autocast's dtype.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    total, _, _ = summed_loss(
        x.flatten(0, 1).to(dtype),
        weight,
        targets.flatten(),
        n_vocab,
        chunks,
        cap,
        torch.is_grad_enabled(),
        torch.compiler.is_compiling(),
    )
    return total / targets.numel()


# torch.compile treats this as one operator; otherwise it would keep all logits for the backward
# pass. Its caches on disk identify the operator by name: rename it when its computation changes.
@torch.library.custom_op("gpt2::summed_loss", mutates_args=())
def summed_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    n_vocab: int,
    chunks: int,
    cap: float,
    with_gradients: bool,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the losses of N tokens, and its gradients with respect to x (N, C) and
    weight (V, C), which are empty without `with_gradients`.
    """
    of_chunk = compiled_chunk() if compiled else loss_of_chunk
    total = torch.zeros((), device=x.device)
    x_grads, weight_grad = [], torch.zeros_like(weight) if with_gradients else weight.new_empty(0)
    cast_weight = weight.to(x.dtype)
    for chunk, chunk_targets in zip(x.chunk(chunks), targets.chunk(chunks), strict=True):
        loss, gradient = of_chunk(chunk, cast_weight, chunk_targets, n_vocab, cap, with_gradients)
        total += loss
        if gradient is not None:
            x_grads.append(gradient @ cast_weight)
            weight_grad += gradient.t() @ chunk  # sums in fp32
        del gradient  # free it before the next chunk
    return total, torch.cat(x_grads) if with_gradients else x.new_empty(0), weight_grad


def loss_of_chunk(
    x: Tensor, weight: Tensor, targets: Tensor, n_vocab: int, cap: float, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the losses of R tokens, and its gradient with respect to their logits (R,
    V), in the dtype of x (R, C).
    """
    rows = torch.arange(weight.size(0), device=x.device)  # rows of the head
    capped = soft_cap((x @ weight.t()).float(), cap)
    log_p = F.log_softmax(capped.masked_fill(rows >= n_vocab, float("-inf")), dim=-1)
    loss = F.nll_loss(log_p, targets, reduction="sum")
    if not with_gradient:
        return loss, None
    gradient = log_p.exp() - (rows == targets[:, None]).float()
    if cap:
        gradient = gradient * (1 - (capped / cap) ** 2)  # derivative of tanh
    # divided by the number of tokens later: float16 would underflow
    return loss, gradient.to(x.dtype)


@functools.cache
def compiled_chunk() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Compile `loss_of_chunk`, which fuses everything after the matmul."""
    return torch.compile(loss_of_chunk, dynamic=False)


@summed_loss.register_fake
def _shapes(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    n_vocab: int,
    chunks: int,
    cap: float,
    with_gradients: bool,
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty((), device=x.device)
    if not with_gradients:
        return total, x.new_empty(0), weight.new_empty(0)
    return total, torch.empty_like(x), torch.empty_like(weight)


def _keep_gradients(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    x_grad, weight_grad = ctx.saved_tensors
    return x_grad * grad, weight_grad * grad, None, None, None, None, None, None


summed_loss.register_autograd(_backward, setup_context=_keep_gradients)
