"""Blocked causal attention for CPUs with fast bfloat16 matmuls: large ones over blocks of queries,
and elementwise code between them, fused by torch.compile.

PyTorch's flash kernel for CPUs multiplies small tiles, at a fifth of the speed of large matmuls.
Here one matmul multiplies a block of queries with all keys up to its end. As in flash attention
(Dao et al. 2022), the scores of all queries never exist at once: the forward pass keeps two numbers
per query, and the backward pass recomputes the scores.

A matmul's result is rounded to bfloat16: a score of 20 is off by up to 0.06, and its weight by 6%.
So the matmul itself subtracts each query's largest score: queries get columns with the negated
score, keys get columns of ones, and q' k'^T = q k^T - score. The scores that matter are then near
zero, so bfloat16 is precise enough. The backward pass centres the gradients of the weights in the
same way.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

BLOCK, SEQUENCES = 256, 2  # queries per block, sequences per matmul


def multiplies_bf16_fast(cpu: Mapping[str, Any]) -> bool:
    """True if a CPU with these capabilities multiplies faster in bfloat16 than in fp32.

    Intel's CPUs run avx512_bf16 at half the rate of fp32. CPUs without instructions emulate it.
    """
    is_intel = "Intel" in cpu.get("cpu_name", "")
    return bool(cpu.get("amx_bf16") or (cpu.get("avx512_bf16") and not is_intel))


CPU_HAS_FAST_BF16 = multiplies_bf16_fast(torch.cpu.get_capabilities())


def blocked_is_faster(device: torch.device, dtype: torch.dtype, T: int) -> bool:
    """True if blocked attention over T tokens beats PyTorch's kernel in a compiled model."""
    return device.type == "cpu" and dtype == torch.bfloat16 and T > BLOCK and CPU_HAS_FAST_BF16


def blocked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(hs), causal) v, all (B, nh, T, hs)."""
    y, _, _ = attention_forward(q, k, v)
    return y


# torch.compile treats this as one operator. Its caches on disk identify the operator by name:
# rename it when its computation changes.
@torch.library.custom_op("gpt2::causal_attention", mutates_args=())
def attention_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and for each query (B, nh, T, 1) its largest score, before scaling, and its sum of
    weights, the softmax's denominator.
    """
    _, nh, T, hs = q.shape
    y, largest, sums = _results(q, k, v)
    for part, (qs, ks, vs) in parts(q, k, v):
        keys, space = append_ones(ks), q.new_empty(len(qs) * BLOCK * T)
        for rows in blocks(T):
            seen = slice(rows.stop)
            scores = matmul_into(space, qs[:, rows], ks[:, seen].mT)
            top = fused(largest_score)(scores)
            weights = matmul_into(space, append_negated(qs[:, rows], top), keys[:, seen].mT)
            total = fused(to_weights)(weights, 1 / math.sqrt(hs))
            for kept, new in (y, weights @ vs[:, seen] / total), (largest, top), (sums, total):
                kept[part, :, rows] = new.unflatten(0, (-1, nh))
    return y, largest, sums


@torch.library.custom_op("gpt2::causal_attention_backward", mutates_args=())
def attention_backward(
    y_grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    largest: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    _, nh, T, hs = q.shape
    q_grad, k_grad, v_grad = _gradients(y_grad, q, k, v)
    for part, (gs, qs, ks, vs, ys, top, totals) in parts(y_grad, q, k, v, y, largest, sums):
        queries, keys, values = append_negated(qs, top), append_ones(ks), append_ones(vs)
        centred = append_negated(gs, (gs.float() * ys).sum(-1, keepdim=True))
        ks_grad, vs_grad = (torch.zeros_like(x, dtype=torch.float32) for x in (ks, vs))
        spaces = q.new_empty(2, len(qs) * BLOCK * T)
        for rows in blocks(T):
            seen = slice(rows.stop)
            weights = matmul_into(spaces[0], queries[:, rows], keys[:, seen].mT)
            scores_grad = matmul_into(spaces[1], centred[:, rows], values[:, seen].mT)
            fused(to_weights_and_gradients)(
                weights, scores_grad, totals[:, rows], 1 / math.sqrt(hs)
            )
            q_grad[part, :, rows] = (scores_grad @ ks[:, seen]).unflatten(0, (-1, nh))
            ks_grad[:, seen] += scores_grad.mT @ qs[:, rows]
            vs_grad[:, seen] += weights.mT @ gs[:, rows]
        k_grad[part], v_grad[part] = ks_grad.unflatten(0, (-1, nh)), vs_grad.unflatten(0, (-1, nh))
    return q_grad, k_grad, v_grad


def parts(*tensors: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Split tensors (B, nh, T, _) into a few sequences each: yields the slice of B, and each
    tensor's part (N, T, _), with N = sequences x heads.
    """
    for start in range(0, len(tensors[0]), SEQUENCES):
        part = slice(start, start + SEQUENCES)
        yield part, [x[part].reshape(-1, *x.shape[2:]) for x in tensors]


def blocks(T: int) -> list[slice]:
    """Return the slice of queries of each block."""
    return [slice(start, min(start + BLOCK, T)) for start in range(0, T, BLOCK)]


def matmul_into(space: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute a b (N, R, S) in the larger buffer `space`: a new buffer per block size would
    fragment the memory.
    """
    N, R, S = len(a), a.size(1), b.size(2)
    return torch.bmm(a, b, out=space[: N * R * S].view(N, R, S))


def append_negated(x: Tensor, subtracted: Tensor) -> Tensor:
    """Append two columns whose sum is `-subtracted`; one bfloat16 column would be too coarse."""
    first = -subtracted.to(x.dtype)
    return torch.cat((x, first, -(subtracted + first.float()).to(x.dtype)), dim=-1)


def append_ones(x: Tensor) -> Tensor:
    """Append two columns of ones, the counterparts of `append_negated` in a matmul."""
    return torch.cat((x, x.new_ones(*x.shape[:2], 2)), dim=-1)


# ---- between the matmuls; scores are (N, R, S), for the last R of S tokens


@functools.cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the function for blocks of any length."""
    return torch.compile(function, dynamic=True)


def later(scores: Tensor) -> Tensor:
    """Return a mask (R, S), True for keys after the query."""
    R, S = scores.shape[1:]
    return (
        torch.arange(S, device=scores.device)
        > torch.arange(S - R, S, device=scores.device)[:, None]
    )


def largest_score(scores: Tensor) -> Tensor:
    """Return the largest score of each query (N, R, 1)."""
    return scores.masked_fill(later(scores), -math.inf).amax(-1, keepdim=True)


def to_weights(scores: Tensor, scale: float) -> Tensor:
    """Turn scores into weights, in place; returns each query's sum (N, R, 1)."""
    weights = (scores.float() * scale).exp().masked_fill(later(scores), 0.0)
    scores.copy_(weights)
    return weights.sum(-1, keepdim=True)


def to_weights_and_gradients(
    scores: Tensor, weights_grad: Tensor, sums: Tensor, scale: float
) -> None:
    """Turn scores into weights, and gradients of weights into gradients of scores, in place."""
    weights = (scores.float() * scale).exp().masked_fill(later(scores), 0.0) / sums
    weights_grad.copy_(weights * weights_grad.float() * scale)
    scores.copy_(weights)


# ---- the operator


def _joined(x: Tensor) -> Tensor:
    """Allocate a tensor of the shape of x (B, nh, T, hs), with a token's heads adjacent in memory,
    as in the layers before and after.
    """
    B, nh, T, hs = x.shape
    return x.new_empty(B, T, nh, hs).transpose(1, 2)


@attention_forward.register_fake
def _results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the results; torch.compile takes their shapes and strides from here too."""
    B, nh, T, _ = q.shape
    return _joined(q), q.new_empty(B, nh, T, 1), q.new_empty(B, nh, T, 1, dtype=torch.float32)


@attention_backward.register_fake
def _gradients(
    y_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _joined(q), _joined(k), _joined(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # only y gets a gradient
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, y_grad: Tensor, *_: None) -> tuple[Tensor, ...]:
    return attention_backward(y_grad, *ctx.saved_tensors)


attention_forward.register_autograd(_backward, setup_context=_keep)
