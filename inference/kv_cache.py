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


class KVCache:
    """Keep keys and values of every layer, each at its token's position in its row.

    Rows may be of different lengths: no token sees a later position, whether that holds padding,
    zeros, or what an earlier text left.
    """

    def __init__(self, model: GPT, rows: int, size: int):
        """Allocate room for `size` positions of `rows` texts, in the model's dtype."""
        c, like = model.config, model.lm_head.weight
        self.attend_to(size)
        shape = (rows, c.n_head, self.span, c.n_embd // c.n_head)  # (B, nh, S, hs)
        self.layers = [
            [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in ("keys", "values")]
            for _ in range(c.n_layer)
        ]

    def attend_to(self, positions: int) -> None:
        """Attend to this many positions, each row's last among them: the fewer, the faster."""
        self.span = math.ceil(positions / MULTIPLE) * MULTIPLE

    def begin(self, rows: Tensor, positions: Tensor) -> None:
        """Tell in which rows (B,) and at which positions (B, T) of them the next tokens are."""
        self.place = rows[:, None], slice(None), positions
        seen = torch.arange(self.span, device=positions.device)
        self.mask = seen <= positions[:, None, :, None]  # (B, 1, T, span)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Add k and v of the next tokens, and attend to all so far; all (B, nh, T, hs)."""
        for cached, new in zip(self.layers[layer], (k, v), strict=True):
            cached[self.place] = new.transpose(1, 2).to(cached.dtype)  # another under autocast
        keys, values = (cached[:, :, : self.span].to(q.dtype) for cached in self.layers[layer])
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask)
