"""Profile a model on random tokens: times of passes, parts and operators of a training step."""

import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from config import Config, ModelConfig, SpeedConfig
from measure.interleaved.side import without_end
from measure.report.tables import markdown_table
from model import GPT, Block
from run.summary import mfu
from runtime.console import noted
from runtime.device import (
    choose_device,
    device_name,
    has_bf16,
    matmul_tflops,
    peak_memory_mb,
    synchronize,
    timed,
)
from runtime.start import retain_freed_memory
from runtime.world import World
from train import Run, setup, train_step

# Share of a training step's FLOPs: the backward pass has two matmuls for each of the forward pass.
FLOPS_SHARE = {"forward": 1 / 3, "backward": 2 / 3, "forward_backward": 1.0, "training_step": 1.0}


def set_up(config: Config) -> tuple[Run, list[str]]:
    """Set a run up on this process alone, on one batch of random tokens; returns notes too.

    On a GPU without bf16, fp16 replaces it. Raises UserError for options that this device lacks.
    """
    device, notes = choose_device(config.device), list[str]()
    if device.type == "cpu" and config.retain_memory:
        retain_freed_memory()
    config = without_end(config)
    if config.bf16 and not has_bf16(device):
        config = config.with_options(bf16=False, fp16=True)
        name = device_name(device)
        notes.append(f"{name} has no bfloat16: mixed precision is float16 here")
    generator = torch.Generator().manual_seed(config.seed)
    shape = (2, config.batch_size, config.seq_len)
    x, y = torch.randint(config.n_vocab, shape, generator=generator).to(device)  # (B, T) each
    with noted() as records:
        run = setup(config, World(device), batches=itertools.repeat((x, y)))
    notes += [record.getMessage() for record in records]
    if "compile_mode" in config.model_fields_set and not config.compile:
        notes.append("compile_mode has no effect: compile is off")
    return run, [f"note: {note}" for note in notes]


# ---- times of passes


def prepare(run: Run, computation: str) -> Callable[[], object]:
    """Return a pass, ready to be timed: gradients are cleared, and backward has its forward."""

    def forward() -> Tensor:
        x, y = next(run.batches)
        with run.autocast():
            return run.model(x, y)

    run.state.model.zero_grad(set_to_none=True)
    if computation == "backward":
        return forward().backward
    return {
        "forward": forward,
        "forward_backward": lambda: forward().backward(),
        "training_step": lambda: train_step(run, 1),
    }[computation]


def time_passes(
    config: Config, computation: str, warmup_steps: Sequence[int], steps: int
) -> list[dict[str, Any]]:
    """Time passes of a model; returns a row for each number of warm-up passes.

    All rows come from the same passes: with w passes of warm-up, the first w are left out and the
    next `steps` count. So rows differ in the passes that count, not in the noise between two
    measurements. Raises UserError for options that this device lacks.
    """
    run, notes = set_up(config)
    device = run.world.device
    passes = range(max(warmup_steps) + steps)
    seconds = [timed(prepare(run, computation), device) for _ in passes]
    peak = peak_memory_mb(device)  # before the matmul adds to it
    tokens = config.batch_size * config.seq_len
    flops = run.state.model.flops_per_token(config.seq_len) * tokens
    tflop = flops * FLOPS_SHARE[computation] / 1e12
    rate = matmul_tflops(device, run.config.matmul_dtype)
    options = {*ModelConfig.model_fields, *SpeedConfig.model_fields, "batch_size", "seq_len"}
    about = {
        "peak_memory_mb": peak,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "notes": "; ".join(notes),
        **run.config.model_dump(mode="json", include=options),
    }
    return [
        {"warmup_steps": w} | figures(seconds[w : w + steps], tokens, tflop, rate) | about
        for w in warmup_steps
    ]


def figures(seconds: list[float], tokens: int, tflop: float, rate: float | None) -> dict[str, Any]:
    """Return the figures of passes. `tokens`, `tflop`: of each pass; `rate`: a large matmul's."""
    mean = statistics.fmean(seconds)
    # a matmul slower than some pass was timed in a busy moment
    rate = rate if mfu(tflop / min(seconds), rate) else None
    return {
        "times_s": seconds,
        "mean_s": mean,
        "median_s": statistics.median(seconds),
        "std_s": statistics.pstdev(seconds),  # the published profile has it too
        "min_s": min(seconds),
        "max_s": max(seconds),
        "total_s": sum(seconds),
        "steps": len(seconds),
        "tokens_per_sec": tokens / mean,
        "tflops": tflop / mean,
        "matmul_tflops": rate,
        "utilization": mfu(tflop / mean, rate),
    }


# ---- the parts of a step

OF_BACKWARD = "  of which "  # begins the names of the parts of the backward pass


def mark_parts(model: GPT, mark: Callable[[str], None]) -> None:
    """Call `mark` at the end of each part of the model's forward and backward passes.

    The residual stream runs through all parts: a part's forward ends when its result is added to
    the stream, its backward when the gradient reaches the stream before it. So attention and MLP
    include the norm before them and the sum after them.
    """

    def ends(part: str) -> Callable[..., None]:
        return lambda *_: mark(part)

    def backward_ends(part: str) -> Callable[..., None]:
        def watch(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
            inputs[0].register_hook(ends(OF_BACKWARD + part))

        return watch

    parts = model.transformer
    parts.h[0].register_forward_pre_hook(ends("embedding"))
    parts.ln_f.register_forward_pre_hook(backward_ends("head and loss"))
    model.register_forward_hook(ends("head and loss"))
    for block in parts.h:
        assert isinstance(block, Block)
        block.register_forward_pre_hook(backward_ends("attention"))
        block.ln_2.register_forward_pre_hook(ends("attention"))
        block.ln_2.register_forward_pre_hook(backward_ends("MLP"))
        block.register_forward_hook(ends("MLP"))
    for part in parts.children():
        if isinstance(part, torch.nn.Embedding):
            part.weight.register_post_accumulate_grad_hook(ends(OF_BACKWARD + "embedding"))


def break_down(
    run: Run, steps: int, clock: Callable[[], float] = perf_counter
) -> list[tuple[str, float, float]]:
    """Time the parts of a step of the uncompiled model: medians over `steps`, after one more step.

    Returns each part's name, milliseconds and share. The part `backward` is the whole backward
    pass; the parts after it are its own. The model keeps the hooks that time them.
    """
    # seconds by part, in the order of their first marks
    of_steps = list[defaultdict[str, float]]()
    last = clock()

    def mark(part: str) -> None:
        """Count the time since the last mark as the part's; waits for the device."""
        nonlocal last
        synchronize(run.world.device)
        before, last = last, clock()
        of_steps[-1][part] += last - before

    plain = dataclasses.replace(run, model=run.state.model)
    mark_parts(run.state.model, mark)
    for _ in range(1 + steps):
        of_steps.append(defaultdict(float))
        train_step(plain, 1)
        mark("optimizer")
    parts = [
        (part, 1e3 * statistics.median(step[part] for step in of_steps[1:])) for part in of_steps[0]
    ]
    total = sum(ms for _, ms in parts)
    of_backward = [(i, ms) for i, (part, ms) in enumerate(parts) if part.startswith(OF_BACKWARD)]
    parts.insert(of_backward[0][0], ("backward", sum(ms for _, ms in of_backward)))
    return [(part, ms, ms / total) for part, ms in parts]


def trace(run: Run, path: Path) -> str:
    """Write a Chrome trace of a step, after two of warm-up; returns a table of its operators."""
    for _ in range(2):
        train_step(run, 1)
    with torch.profiler.profile() as profile:
        train_step(run, 1)
        synchronize(run.world.device)
    profile.export_chrome_trace(str(path))
    device = "cuda" if run.world.device.type == "cuda" else "cpu"
    return profile.key_averages().table(f"self_{device}_time_total", row_limit=20, time_unit="ms")


def inspect_step(config: Config, steps: int, trace_file: Path | None) -> str:
    """Break a training step down, with medians over `steps` unless that is 0, and trace one if
    there is a `trace_file`. Returns notes and tables in Markdown.

    Raises UserError for options that this device lacks.
    """
    if not trace_file:  # the breakdown needs no compiled model
        config = config.with_options(compile=False)
    run, notes = set_up(config)
    lines = [*notes, f"{device_name(run.world.device)}, {torch.get_num_threads()} threads", ""]
    if trace_file:
        lines += ["```", trace(run, trace_file), "```", ""]
    if steps:  # last, as its hooks stay
        lines += [f"Medians of {steps} steps of the uncompiled model.", ""]
        parts = break_down(run, steps)
        cells = [[name, f"{ms:.1f}", f"{share:.1%}"] for name, ms, share in parts]
        lines += [markdown_table(["part", "ms", "share"], cells), ""]
    return "\n".join(lines)
