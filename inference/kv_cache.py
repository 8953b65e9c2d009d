"""A KV cache: a text grows token by token without reading all of it again for each token.

Prefill reads the prompts once and keeps their keys and values; each decode step then reads one
token per text.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from model import GPT

# cuDNN's attention, which GPUs since Hopper take in bf16, builds a plan for each number of keys. So
# the keys are a multiple of this, and 128 tokens in a row share a plan; the rest is masked.
MULTIPLE = 128


def keys_for(positions: int) -> int:
    """Return how many keys attention sees for so many positions: the fewer, the faster."""
    return math.ceil(positions / MULTIPLE) * MULTIPLE


def make_cache(model: GPT, rows: int, positions: int) -> list[Tensor]:
    """Allocate the keys and values (2, B, nh, S, hs) of each layer, in the model's dtype."""
    c, like = model.config, model.lm_head.weight
    shape = (2, rows, c.n_head, keys_for(positions), c.n_embd // c.n_head)
    return [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(c.n_layer)]


def next_logits(
    model: GPT, cache: list[Tensor], keys: int, idx: Tensor, positions: Tensor, ends: Tensor
) -> Tensor:
    """Return logits (B, V) after the token `ends` (B,) of each row of idx (B, T).

    The rows' tokens are at `positions` (B, T) of their texts: there the cache takes them in, and
    each attends to those of the first `keys` that are not after it. Rows may be of different
    lengths: no token sees a later position, whether that holds padding, zeros, or what an earlier
    text left.
    """
    rows = torch.arange(len(idx), device=idx.device)
    seen = torch.arange(keys, device=idx.device) <= positions[:, None, :, None]  # (B, 1, T, keys)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Add k and v to the cache, and attend to what is in there; all (B, nh, T, hs)."""
        for cached, new in zip(cache[layer], (k, v), strict=True):
            cached[rows[:, None], :, positions] = new.transpose(1, 2).to(cached.dtype)
        k, v = cache[layer][..., :keys, :].to(q.dtype)  # another than the cache's under autocast
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    return model(idx, where=(rows, ends), attend=attend, positions=positions)
