"""Run the matmuls of a training step, and nothing else, as a side beside the peers.

echo 3 | python -m measure.peers.matmuls --config speedup10.yaml

It answers like measure/interleaved/side.py. Shapes, strides and types are the config's own, the
kernels PyTorch's own, uncompiled. A fused attention kernel is not a matmul.
"""

from config import Config
from runtime.start import start

if __name__ == "__main__":
    OPTIONS = start(Config, description=__doc__, config_file=True)

from collections.abc import Callable
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from measure.interleaved.side import serve, take_stdout
from measure.ladder.roofline import count
from runtime.device import choose_device, peak_memory_mb, timed, usable_precision
from runtime.errors import reported

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def matmuls_of(config: Config, device: torch.device) -> list[Call]:
    """Return the matmuls of a training step, with their arguments: random numbers."""
    tensors: dict[tuple[Any, ...], Tensor] = {}

    def random(like: Tensor) -> Tensor:
        size, stride, dtype = like.size(), like.stride(), like.dtype
        key = (size, stride, dtype)
        if key not in tensors:
            tensors[key] = torch.empty_strided(size, stride, dtype=dtype, device=device).normal_()
        return tensors[key]

    return [
        (op.call, tree_map_only(Tensor, random, op.arguments))
        for op in count(config, device)
        if op.call and op.flops and "attention" not in op.name
    ]


def run_matmuls(config: Config, answers: TextIO) -> None:
    """Run the matmuls of as many steps as stdin asks for. Raises UserError."""
    device = choose_device(config.device)
    torch.set_float32_matmul_precision(usable_precision(device, config.fp32_precision()))
    matmuls = matmuls_of(config, device)

    @torch.no_grad()
    def step() -> None:
        for call, arguments in matmuls:
            call(*arguments)

    def take_steps(count: int) -> dict[str, Any]:
        return {
            "seconds": [timed(step, device) for _ in range(count)],
            "tokens": count * config.tokens_per_step(1),
            "peak_memory_mb": peak_memory_mb(device),
        }

    serve(answers, take_steps)


if __name__ == "__main__":
    with reported("stdout", advice=OPTIONS.advice()):
        run_matmuls(OPTIONS, take_stdout())
