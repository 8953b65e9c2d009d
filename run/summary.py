"""A run's report about itself: notes before the first step, figures while it trains, and
summary.json at its end.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from config import MFU, Config
from kernels.attention import blocked_is_faster
from run.log import RunFolder
from run.state import State
from runtime.device import (
    check_attention,
    check_compiler,
    check_precision,
    check_version,
    device_name,
    matmul_tflops,
    peak_memory_mb,
)
from runtime.report import describe_duration, git_commit, machine
from runtime.world import World

# ---- before the first step


def describe_options(config: Config, acting: Config, world: World) -> list[str]:
    """Return lines on the device, the optimizations that are on, and options with less effect here.

    `acting`: the options as they act on this device. Raises UserError for an option that the device
    does not support.
    """
    device, ranks = world.device, world.world_size
    notes = check_version()
    dtype = getattr(torch, config.matmul_dtype)
    notes += check_precision(device, dtype, config.fp32_precision())
    if config.compile:
        notes += check_compiler(device, config.compile_mode, acting.compile_mode)
    if config.flash:
        B, T, head_size = config.batch_size, config.seq_len, config.n_embd // config.n_head
        blocked = config.compile and blocked_is_faster(device, dtype, T)
        shape = (B, config.n_head, T, head_size)
        notes += check_attention(device, dtype, shape, dropout=config.dropout, blocked=blocked)
    return [
        f"device: {device_name(device)}, ranks: {ranks}, threads of each: "
        f"{torch.get_num_threads()}, torch {torch.__version__}",
        acting.describe_optimizations(ranks),
        *(f"note: {note}" for note in notes),
    ]


# ---- the figures of a run


def summarize(config: Config, state: State, world: World, folder: RunFolder) -> dict[str, Any]:
    """Return the figures of summary.json: steps, loss, speed, memory and device.

    The matmul rate is measured in the run's dtype.
    """
    seconds, loss, steps_this_call = state.step_seconds, state.last_loss, len(state.step_seconds)
    if not seconds:  # an earlier call took the last step but wrote no summary: read its log
        seconds, loss = world.broadcast(folder.times_and_loss())
    left_out = min(5, (len(seconds) - 1) // 2)  # the first steps compile and warm up
    median = statistics.median(seconds[left_out:])
    tokens_per_step = config.tokens_per_step(world.world_size)
    flops = state.model.flops_per_token(config.seq_len)  # per token
    peak = peak_memory_mb(world.device)  # before the measurement below adds to it
    rate = matmul_tflops(world.device, config.matmul_dtype, seconds=min(0.5, sum(seconds)))
    tflop = flops * tokens_per_step / world.world_size / 1e12  # a step of one rank
    if not mfu(tflop / min(seconds), rate):
        rate = None
    return {
        "steps": state.step,
        "interrupted": not state.is_over(config),
        "tokens": state.step * tokens_per_step,
        "parameters": state.model.num_parameters(),
        "skipped_steps": state.skipped_steps,
        "final_loss": loss if math.isfinite(loss) else None,
        "median_dt_ms": median * 1e3,
        "median_tokens_per_sec": tokens_per_step / median,
        "median_leaves_out": left_out,
        "first_step_s": seconds[0],
        "peak_memory_mb": peak,
        "memory_growth_mb": max(0.0, peak - state.memory_before),
        "flops_per_token": flops,
        "matmul_tflops": rate,
        "utilization": mfu(tflop / median, rate),
        "machine": machine(),
        "device": device_name(world.device),
        "world_size": world.world_size,
        "torch": torch.__version__,
        "git": git_commit(),
        "steps_this_call": steps_this_call,
        "resumed_after_step": state.step - steps_this_call or None,
    }


def announce_long_run(config: Config, state: State, world: World, folder: RunFolder) -> None:
    """Print the expected duration of a run on a CPU that takes minutes or more."""
    steps = 0 if config.max_minutes else config.max_steps - state.step
    tokens = steps * config.tokens_per_step(world.world_size) / world.world_size  # of one rank
    flops = tokens * state.model.flops_per_token(config.seq_len)
    if world.device.type == "cuda" or flops < 3e13:
        return
    rate = matmul_tflops(world.device, config.matmul_dtype)
    shorter = "--max_steps 5, or --config quickstart.yaml"
    folder.message(describe_duration(rate and flops / (rate * 1e12 * MFU), MFU, shorter))


def mfu(reached: float, matmul: float | None) -> float | None:
    """Return training's share of the matmul rate, both in TFLOP/s of one rank.

    MFU as in the PaLM paper (Chowdhery et al. 2022, appendix B), but relative to the measured rate.
    None if that rate is unknown, or below `reached`: other programs slowed its measurement.
    """
    return reached / matmul if matmul and reached <= matmul else None


def live_figures(
    config: Config, state: State, world: World
) -> Callable[[float], dict[str, float | None]]:
    """Return a function from a step's tokens/s to its MFU and the peak memory.

    First measures the device, for half a second.
    """
    rate = matmul_tflops(world.device, config.matmul_dtype)
    tflop_per_token = state.model.flops_per_token(config.seq_len) / world.world_size / 1e12
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)  # forget the measurement's matrices
    return lambda tokens_per_sec: {
        "utilization": mfu(tflop_per_token * tokens_per_sec, rate),
        "memory_mb": peak_memory_mb(world.device),
    }
