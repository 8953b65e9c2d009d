"""A run's report about itself: notes before the first step, figures while it trains, and
summary.json at its end.
"""

import datetime
import json
import math
import shlex
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from config import MFU, Config
from kernels.attention import blocked_is_faster
from run.folder import how_to_resume
from run.log import RunLog, describe_duration, duration
from run.state import Run
from runtime.console import log
from runtime.device import (
    check_attention,
    check_compiler,
    check_precision,
    check_version,
    device_name,
    matmul_tflops,
    peak_memory_mb,
)
from runtime.files import write_atomic
from runtime.report import flops_rate, git_commit, machine
from runtime.world import World

# ---- before the first step


def announce_options(config: Config, acting: Config, world: World) -> None:
    """Tell the device and the optimizations that are on, and note options with less effect here.

    `acting`: the options as they act on this device. Raises UserError for an option that the device
    does not support.
    """
    device, ranks = world.device, world.world_size
    log.info(
        f"device: {device_name(device)}, ranks: {ranks}, threads of each: "
        f"{torch.get_num_threads()}, torch {torch.__version__}"
    )
    log.info(acting.describe_optimizations(ranks))
    check_version()
    dtype = getattr(torch, config.matmul_dtype)
    check_precision(device, dtype, config.fp32_precision())
    if config.compile:
        check_compiler(device, config.compile_mode, acting.compile_mode)
    if config.flash:
        B, T, head_size = config.batch_size, config.seq_len, config.n_embd // config.n_head
        blocked = config.compile and blocked_is_faster(device, dtype, T)
        shape = (B, config.n_head, T, head_size)
        check_attention(device, dtype, shape, dropout=config.dropout, blocked=blocked)


# ---- the figures of a run


def summarize(run: Run, runlog: RunLog) -> dict[str, Any]:
    """Return the figures of summary.json: steps, loss, speed, memory and device.

    The matmul rate is measured in the run's dtype.
    """
    config, state, world = run.config, run.state, run.world
    seconds, loss, steps_this_call = state.step_seconds, state.last_loss, len(state.step_seconds)
    if not seconds:  # an earlier call took the last step but wrote no summary: read its log
        seconds, loss = world.broadcast(runlog.times_and_loss())
    left_out = min(5, (len(seconds) - 1) // 2)  # the first steps compile and warm up
    median = statistics.median(seconds[left_out:])
    flops = state.model.flops_per_token(config.seq_len)  # per token
    peak = peak_memory_mb(world.device)  # before the measurement below adds to it
    rate = matmul_tflops(world.device, config.matmul_dtype, seconds=min(0.5, sum(seconds)))
    tflop = flops * run.tokens_per_step / world.world_size / 1e12  # a step of one rank
    if not mfu(tflop / min(seconds), rate):
        rate = None
    return {
        "steps": state.step,
        "interrupted": not run.is_over,
        "tokens": state.step * run.tokens_per_step,
        "parameters": state.model.num_parameters(),
        "skipped_steps": state.skipped_steps,
        "final_loss": loss if math.isfinite(loss) else None,
        "median_dt_ms": median * 1e3,
        "median_tokens_per_sec": run.tokens_per_step / median,
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


def finish(run: Run, summary: dict[str, Any], began: datetime.datetime) -> dict[str, Any]:
    """Write summary.json with the time of the run, and log the main figures and the next commands.

    Returns the whole summary.
    """
    seconds = (datetime.datetime.now(datetime.UTC) - began).total_seconds()
    summary = {**summary, "started": began.isoformat(timespec="seconds"), "seconds": seconds}
    if run.world.rank == 0:
        text = json.dumps(summary, indent=1, allow_nan=False)
        write_atomic(run.path / "summary.json", f"{text}\n")
    for line in describe_summary(summary):
        log.info(line)
    has_checkpoints = run.config.keep_last > 0
    if summary["interrupted"] and has_checkpoints:
        log.info(how_to_resume(run.path))
    files = f"{run.path}/ has log.csv, summary.json, config.yaml and console.log"
    if has_checkpoints:
        sample = f"python sample.py {shlex.quote(str(run.path))}"
        files += f", and checkpoints/; for text: {sample}"
    log.info(files)
    return summary


def describe_summary(summary: Mapping[str, Any]) -> list[str]:
    """Return two lines on a run: its steps and losses, and its speed."""
    steps, this_call = summary["steps"], summary["steps_this_call"]
    loss, val_loss = summary["final_loss"], summary["val_loss"]
    result = (
        f"{'interrupted' if summary['interrupted'] else 'done'}: {steps} steps, "
        f"{summary['tokens']:,} tokens"
        f"{'' if this_call == steps else f', {this_call} of these steps in this call,'} in "
        f"{duration(summary['seconds'])}; loss {math.nan if loss is None else loss:.4f}"
    )
    if val_loss is not None:
        result += f", validation loss {val_loss:.4f}"
    mfu = "no MFU, as other programs kept the device too busy to time a matmul"
    if summary["utilization"]:
        rate = flops_rate(summary["matmul_tflops"])
        mfu = f"MFU {summary['utilization']:.0%} of the {rate} that a large matmul reaches here"
    return [
        result,
        f"median {summary['median_dt_ms']:.2f} ms a step, "
        f"{summary['median_tokens_per_sec']:,.0f} tokens/s (without the first "
        f"{summary['median_leaves_out']}); peak memory {summary['peak_memory_mb']:,.0f} MB; {mfu}",
    ]


def announce_long_run(run: Run) -> None:
    """Tell the expected duration of a run on a CPU that takes minutes or more."""
    config, world = run.config, run.world
    steps = 0 if config.max_minutes else config.max_steps - run.state.step
    tokens = steps * run.tokens_per_step / world.world_size  # one rank's share
    flops = tokens * run.state.model.flops_per_token(config.seq_len)
    if world.device.type == "cuda" or flops < 3e13:
        return
    rate = matmul_tflops(world.device, config.matmul_dtype)
    shorter = "--max_steps 5, or --config quickstart.yaml"
    log.info(describe_duration(rate and flops / (rate * 1e12 * MFU), shorter))


def mfu(reached: float, matmul: float | None) -> float | None:
    """Return training's share of the matmul rate, both in TFLOP/s of one rank.

    MFU as in the PaLM paper (Chowdhery et al. 2022, appendix B), but relative to the measured rate.
    None if that rate is unknown, or below `reached`: other programs slowed its measurement.
    """
    return reached / matmul if matmul and reached <= matmul else None


def live_figures(run: Run) -> Callable[[float], dict[str, float | None]]:
    """Return a function from a step's tokens/s to its MFU and the peak memory.

    First measures the device, for half a second.
    """
    config, world = run.config, run.world
    rate = matmul_tflops(world.device, config.matmul_dtype)
    tflop_per_token = run.state.model.flops_per_token(config.seq_len) / world.world_size / 1e12
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)  # forget the measurement's matrices
    return lambda tokens_per_sec: {
        "utilization": mfu(tflop_per_token * tokens_per_sec, rate),
        "memory_mb": peak_memory_mb(world.device),
    }
