"""Time one computation of one model in a fresh process."""

import itertools
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from config import Config, ModelConfig, SpeedConfig
from measure.interleaved.side import without_end
from measure.report.report import Row
from runtime.device import (
    choose_device,
    device_name,
    has_bf16,
    matmul_tflops,
    peak_memory_mb,
    timed,
)
from runtime.start import retain_freed_memory
from runtime.world import World
from summary import mfu
from train import Run, setup, train_step

# Share of a training step's FLOPs: the backward pass has two matmuls for each of the forward pass.
FLOPS_SHARE = {"forward": 1 / 3, "backward": 2 / 3, "forward_backward": 1.0, "training_step": 1.0}

KEY = ("size", "computation", "warmup_steps", "mixed_precision")  # columns that identify a row


def key_of(row: Row) -> tuple[str, ...]:
    """Return the identity of a measurement: equal in two files, it is the same one."""
    return tuple(str(row[name]).lower() for name in KEY)


def label_of(row: Row) -> str:
    """Describe the model and the computation of a row."""
    bits = "mixed" if row["mixed_precision"] else "full"
    return f"{row['size']} {row['computation']}, {bits} precision"


class Job(NamedTuple):
    """A computation of a model, timed in a process of its own."""

    size: str  # a size of the published profile, or the config's name
    config: Config
    computation: str  # forward, backward, forward_backward or training_step
    warmup_steps: tuple[int, ...]
    steps: int  # timed passes

    def row(self, warmup_steps: int) -> Row:
        """Return the part of a row that identifies it."""
        return {
            "size": self.size,
            "computation": self.computation,
            "warmup_steps": warmup_steps,
            "mixed_precision": self.config.matmul_dtype != "float32",
        }


def with_mixed_precision_of(device: torch.device, config: Config) -> tuple[Config, list[str]]:
    """Return the config and notes: on a GPU without bf16, fp16 replaces it."""
    if has_bf16(device) or not config.bf16:
        return config, []
    note = f"note: {device_name(device)} has no bfloat16: mixed precision is float16 here"
    return config.with_options(bf16=False, fp16=True), [note]


def set_up(config: Config) -> Run:
    """Set a run up on this process alone, on one batch of random tokens.

    Only notes on options are kept. Raises UserError for options that this device lacks.
    """
    device = choose_device(config.device)
    if device.type == "cpu" and config.retain_memory:
        retain_freed_memory()
    config, notes = with_mixed_precision_of(device, without_end(config))
    generator = torch.Generator().manual_seed(config.seed)
    shape = (2, config.batch_size, config.seq_len)
    x, y = torch.randint(config.n_vocab, shape, generator=generator).to(device)  # (B, T) each
    run = setup(config, World(device), batches=itertools.repeat((x, y)))
    notes += [note for note in run.notes if note.startswith("note: ")]
    notes += [f"note: {note}" for note in config.notes() if note.startswith("compile_mode")]
    run.notes = notes
    return run


def passes(run: Run, computation: str) -> Callable[[], Callable[[], object]]:
    """Return a function that prepares a pass, which is not timed, and returns the pass."""

    def forward() -> Tensor:
        x, y = next(run.batches)
        with run.autocast():
            return run.model(x, y)

    def prepare() -> Callable[[], object]:
        run.state.model.zero_grad(set_to_none=True)
        if computation == "backward":
            return forward().backward
        return {
            "forward": forward,
            "forward_backward": lambda: forward().backward(),
            "training_step": lambda: train_step(run, 1),
        }[computation]

    return prepare


# ---- timing


def measure(job: Job) -> list[Row]:
    """Time the job's passes; returns a row for each of its numbers of warm-up passes.

    All come from the same passes: with w passes of warm-up, the first w are left out and the next
    `steps` count. So rows differ in the passes that count, not in the noise between two
    measurements. Raises UserError for options that this device lacks.
    """
    run = set_up(job.config)
    config, device = run.config, run.world.device
    prepare = passes(run, job.computation)
    seconds = [timed(prepare(), device) for _ in range(max(job.warmup_steps) + job.steps)]
    peak = peak_memory_mb(device)  # before the matmul adds to it
    tokens = config.batch_size * config.seq_len
    flops = run.state.model.flops_per_token(config.seq_len) * tokens
    tflop = flops * FLOPS_SHARE[job.computation] / 1e12
    rate = matmul_tflops(device, config.matmul_dtype)
    about = {
        "peak_memory_mb": peak,
        **settings(config),
        "device": device_name(device),
        "notes": "; ".join(run.notes),
    }
    return [
        job.row(w) | figures(seconds[w : w + job.steps], tokens, tflop, rate) | about
        for w in job.warmup_steps
    ]


def figures(seconds: list[float], tokens: int, tflop: float, rate: float | None) -> Row:
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


def settings(config: Config) -> Row:
    """Return the options that affect the figures."""
    names = {"batch_size", "seq_len", "seed", "optimizer", "grad_clip", "weight_decay"}
    names |= ModelConfig.model_fields.keys() | SpeedConfig.model_fields.keys()
    about = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    return config.model_dump(mode="json", include=names) | about
