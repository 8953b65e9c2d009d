"""Read what torch.compile generates for an H200, without a GPU: nothing is computed.

    python -m tests.inductor_cuda gpt2_124m.yaml batch_size=64

prints the kernels of a micro-step's forward and backward pass with the bytes that they have to
move and their FLOPs, and the least time that a step takes on some GPUs. Needs a C++ compiler and
triton, which requirements-dev.txt has.
"""

import contextlib
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from config import Config, load_config
from model import GPT, GPTConfig
from runtime.world import World
from tests.conftest import ROOT
from tests.fake_cuda import GPU, OnGPU, attention, environment, fake_h200

Kernel = dict[str, Any]
FLASH = torch.ops.aten._scaled_dot_product_flash_attention
# Dense bf16 matmuls that add up in fp32, and memory: TFLOPS and TB/s of NVIDIA's data sheets.
GPUS = {
    "H200 SXM": (989.5, 4.8),
    "A100 SXM 40 GB": (312, 1.555),
    "RTX 3080 10 GB": (59.5, 0.76),
}


def read_kernels(folder: Path, config: str, *options: str) -> list[Kernel] | None:
    """Return the kernels of a micro-step, in a process of its own. None: no C++ compiler."""
    variables = environment(folder)
    if variables is None:
        return None
    # Compiled here and now: what comes from the cache has no graph.
    variables |= {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    result = folder / "kernels.json"
    command = [sys.executable, "-m", "tests.inductor_cuda", config, *options, f"to={result}"]
    done = subprocess.run(
        command, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True
    )
    assert result.exists(), done.stderr
    return json.loads(result.read_text())


class CompiledError(Exception):
    """Raised in place of running what was compiled."""


def compile_step(settings: Config) -> list[Kernel]:
    """Compile a micro-step as train.py does, on fake tensors; returns its kernels in order."""
    kernels: list[Kernel] = []

    def run(_: Any) -> None:
        raise CompiledError

    def keep_kernels(graph: Any) -> Any:
        graph.codegen()
        of = "backward" if kernels else "forward"
        for node in graph.scheduler.nodes:
            kernel = {"pass": of} | kernel_of(node, graph)
            if kernel["name"]:
                kernels.append(kernel)
            else:
                kernels[-1]["bytes"] += kernel["bytes"]
        return SimpleNamespace(call=run, __file__=os.devnull)

    # Inductor folds constants, of a few numbers each, for which it allocates memory.
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "CUDA")
    library.impl("_fused_sdp_choice", lambda *_, **__: 1, "Meta")  # flash
    torch.version.cuda = "13.0"
    with fake_h200(), contextlib.suppress(CompiledError), GPU:
        # Imported now, as Inductor keeps the functions of torch.cuda that it finds.
        from torch._functorch import config as autograd
        from torch._inductor.graph import GraphLowering
        from torch._subclasses.fake_tensor import FakeTensorMode

        from train import setup, train_step

        target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
        driver = importlib.import_module("triton.runtime").driver
        driver.set_active(SimpleNamespace(get_current_target=lambda: target))
        autograd.force_non_lazy_backward_lowering = (
            True  # the backward pass before the forward runs
        )
        FakeTensorMode.avoid_device_init = True  # type: ignore[assignment, method-assign]
        GraphLowering.compile_to_module = keep_kernels  # type: ignore[assignment, method-assign]
        flash = patch.object(F, "scaled_dot_product_attention", flash_attention)
        with flash, FakeTensorMode():
            shape = settings.batch_size, settings.seq_len
            x, y = (torch.zeros(shape, dtype=torch.long) for _ in "xy")
            train_step(setup(settings, World(GPU), batches=itertools.repeat((x, y))), 1)
    return kernels


def empty(size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Allocate a tensor on the fake GPU."""
    return OnGPU(torch.empty(size, dtype=dtype, device="cpu"))


def flash_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call flash attention of GPUs, which scaled_dot_product_attention does not find here."""
    return attention(q, k, v, **options, fused=FLASH)


def kernel_of(node: Any, graph: Any) -> Kernel:
    """Describe a node of Inductor's schedule; its name is "" if it is a result of the last kernel.

    `bytes`: what the kernel has to read and write at least, each buffer once. Inductor's own count
    stops at 10^9 elements of a buffer, and takes a gather for reading all of it.
    """
    sizes: dict[str, int] = {}
    reads, operations = set(), set()
    for part in node.get_nodes():
        numel = math.prod(part.group[1]) if hasattr(part, "group") else math.inf
        reads |= {access.name for access in part.read_writes.reads}
        for access in part.read_writes.reads_and_writes():
            name, indexed = access.name, access.numel_hint()
            if indexed and name not in graph.removed_buffers:
                share = min(indexed, numel, graph.get_numel(name)) / indexed
                sizes[name] = max(sizes.get(name, 0), int(access.numbytes_hint() * share))
        operations |= {origin.name.rstrip("_0123456789") for origin in part.node.get_origins()}
    kind = "triton"
    if node.is_extern():
        kind = getattr(node.node, "python_kernel_name", None) or ""
    elif reads and reads <= graph.removed_buffers:
        kind = "sum"  # of what the blocks of a Triton kernel have summed, by PyTorch's own kernel
    return {
        "name": kind,
        "operations": " ".join(sorted(operations)),
        "bytes": sum(sizes.values()),
        "flops": (node.is_extern() and node.estimate_flops()) or 0,
    }


def least_seconds(settings: Config, kernels: list[Kernel], gpu: str) -> tuple[list[float], float]:
    """Return the least time of each kernel on a GPU, and of the rest of a step."""
    flops, memory = (rate * 1e12 for rate in GPUS[gpu])
    seconds = [max(kernel["bytes"] / memory, kernel["flops"] / flops) for kernel in kernels]
    # Per parameter: the norm reads the gradient, clipping reads and writes it, AdamW reads 16 bytes
    # and writes 12. A micro-step after the first adds its gradient to the one before.
    accumulated = 12 * (settings.accumulation_steps(1) - 1)
    update = 4 + (8 if settings.grad_clip else 0) + 28
    with torch.device("meta"):
        parameters = GPT(GPTConfig.of(settings)).num_parameters()
    return seconds, (update + accumulated) * parameters / memory


def report(settings: Config, kernels: list[Kernel]) -> None:
    """Print launches, bytes and FLOPs of a micro-step, and the least time of a step on `GPUS`."""
    B, T, C = settings.batch_size, settings.seq_len, settings.n_embd
    for kernel in kernels:
        if "flash" in kernel["name"]:  # half of the T x T scores; backward has 5 matmuls, not 2
            kernel["flops"] = (5 if "backward" in kernel["name"] else 2) * B * T * T * C
    seconds, _ = least_seconds(settings, kernels, "H200 SXM")
    for keys in (("pass", "name"), ("pass", "name", "operations")):
        groups: dict[tuple[str, ...], list[float]] = {}
        for kernel, time in zip(kernels, seconds, strict=True):
            numbers = (1, kernel["bytes"] / 1e9, kernel["flops"] / 1e12, time)
            key = tuple(kernel[key] for key in keys)
            groups[key] = [
                sum(pair) for pair in zip(numbers, groups.get(key, [0] * 4), strict=True)
            ]
        print("launches      GB  TFLOP  share of the H200's time")
        for key, (launches, gigabytes, tflop, time) in sorted(
            groups.items(), key=lambda group: -group[1][3]
        )[:25]:
            share = time / sum(seconds)
            print(f"{launches:8} {gigabytes:7.2f} {tflop:6.2f} {share:6.1%}  {' '.join(key)[:120]}")
    steps = settings.accumulation_steps(1)
    for gpu in GPUS:
        seconds, rest = least_seconds(settings, kernels, gpu)
        step = steps * sum(seconds) + rest
        print(f"{gpu}: at least {step * 1e3:.1f} ms a step, {steps * B * T / step:,.0f} tokens/s")


def main(config: str, *words: str) -> None:
    """Compile here with `to=FILE`, for `read_kernels`; else report."""
    options = dict(word.split("=") for word in words)
    to = options.pop("to", None)
    settings = load_config(config, **{"device": "cuda", **options, "compile_mode": "default"})
    if to:
        Path(to).write_text(json.dumps(compile_step(settings)))
        return
    with tempfile.TemporaryDirectory() as folder:
        kernels = read_kernels(Path(folder), config, *words)
    if not kernels:
        raise SystemExit("needs a C++ compiler: install g++ or clang++, or set CXX to one")
    report(settings, kernels)


if __name__ == "__main__":
    main(*sys.argv[1:])
