"""The cache that lets a text grow token by token: the plain form reads all of it again for each
token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values, of every layer, of the tokens that a model has already read, each at its
    token's position in its row.

    Rows may be of different lengths: no token sees a later position, be there padding, zeros, or
    what an earlier text left.
    """

    def __init__(self, weight: Tensor, n_layer: int, shape: Sequence[int]):
        """An empty cache with the type and device of a weight, for keys and values of shape (B, nh,
        S, hs).
        """
        self.layers = [
            tuple(torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in "kv")
            for _ in range(n_layer)
        ]
        self.span = shape[
            2
        ]  # positions that are looked at: the fewer, the faster, as long as each row's last is among them

    def begin(self, positions: Tensor) -> None:
        """Tell at which positions (B, T) the next tokens stand."""
        self.place = (
            torch.arange(len(positions), device=positions.device)[:, None],
            slice(None),
            positions,
        )
        self.mask = (
            torch.arange(self.span, device=positions.device) <= positions[:, None, :, None]
        )  # (B, 1, T, span)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k and v (B, nh, T, hs) of the next tokens to a layer; returns its keys and values,
        (B, nh, span, hs).
        """
        for kept, new in zip(self.layers[layer], (k, v), strict=True):
            kept[self.place] = new.transpose(1, 2).to(kept.dtype)  # another under autocast
        keys, values = self.layers[layer]
        return keys[:, :, : self.span], values[:, :, : self.span]
