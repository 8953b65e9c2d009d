"""Time one computation of one model in a fresh process, waiting for the device around each pass."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from config import Config, ModelConfig, SpeedConfig
from measure.interleaved.options import without_end
from measure.interleaved.process import in_fresh_process
from measure.report.report import Row
from measure.report.tables import FIGURES
from runtime.device import (
    choose_device,
    device_name,
    has_bf16,
    matmul_dtype,
    matmul_tflops,
    peak_memory_mb,
    synchronize,
)
from runtime.world import World
from summary import mfu
from train import Run, setup, train_step

# Share of a training step's FLOPs: the backward pass has two matmuls for each of the forward pass.
FLOPS_SHARE = {"forward": 1 / 3, "backward": 2 / 3, "forward_backward": 1.0, "training_step": 1.0}


@dataclasses.dataclass(frozen=True)
class Job:
    """A computation of a model, timed in a process of its own."""

    size: str  # of the profile, or the config's name
    config: Config
    computation: str  # forward, backward, forward_backward or training_step
    warmup_steps: tuple[int, ...]
    steps: int  # timed passes


def is_mixed(config: Config) -> bool:
    """True if the config trains in mixed precision."""
    return config.bf16 or config.fp16


def with_mixed_precision_of(device: torch.device, config: Config) -> tuple[Config, list[str]]:
    """Return the config, and a note: with fp16 for bf16 where the device is a GPU without bf16."""
    if has_bf16(device) or not config.bf16:
        return config, []
    note = f"{device_name(device)} has no bfloat16: mixed precision is float16 here"
    return config.model_copy(update={"bf16": False, "fp16": True}), [note]


def set_up(config: Config, *, from_corpus: bool = False) -> Run:
    """Set a run up on this process alone, on its corpus or on one batch of random tokens.

    Its notes are only those on options. Raises UserError for what this device cannot do, and for
    a corpus that cannot be had.
    """
    device = choose_device(config.device)
    config, notes = with_mixed_precision_of(device, without_end(config))
    generator = torch.Generator().manual_seed(config.seed)
    shape = (2, config.batch_size, config.seq_len)
    x, y = torch.randint(config.n_vocab, shape, generator=generator).to(device)  # (B, T) each
    batches = None if from_corpus else itertools.repeat((x, y))
    run = setup(config, World(device), batches=batches)
    notes += [note.removeprefix("note: ") for note in run.notes if note.startswith("note: ")]
    notes += [note for note in config.notes() if note.startswith("compile_mode")]
    return dataclasses.replace(run, notes=notes)


def passes(run: Run, computation: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return what to do before each timed pass, and the pass, which gets what that returned."""

    def forward() -> Tensor:
        x, y = next(run.batches)
        with run.autocast():
            return run.model(x, y)

    def prepare() -> Tensor | None:
        run.state.model.zero_grad(set_to_none=True)
        return forward() if computation == "backward" else None

    timed: dict[str, Callable[[Any], object]] = {
        "forward": lambda _: forward(),
        "backward": lambda loss: loss.backward(),
        "forward_backward": lambda _: forward().backward(),
        "training_step": lambda _: train_step(run, 1),
    }
    return prepare, timed[computation]


# ---- timing


def time_passes(
    prepare: Callable[[], Any],
    timed: Callable[[Any], object],
    count: int,
    device: torch.device,
) -> list[float]:
    """Return the seconds of each pass of `timed`, which gets the result of `prepare`."""
    seconds = []
    for _ in range(count):
        prepared = prepare()
        synchronize(device)
        start = perf_counter()
        result = timed(prepared)
        synchronize(device)
        seconds.append(perf_counter() - start)
        del prepared, result  # freeing a graph is not part of the pass
    return seconds


def measure(job: Job) -> list[Row]:
    """Return a row for each of the job's numbers of warm-up passes.

    The passes are done once: a row of w warm-up passes leaves out the first w of them and counts
    the `steps` that follow. So rows differ in which passes count, not in the noise between two
    measurements. Raises UserError for what this device cannot do.
    """
    run = set_up(job.config)
    config, model, device = run.config, run.state.model, run.world.device
    prepare, timed = passes(run, job.computation)
    seconds = time_passes(prepare, timed, max(job.warmup_steps) + job.steps, device)
    peak = peak_memory_mb(device)  # before the measurement below adds to it
    matmul = matmul_tflops(device, matmul_dtype(bf16=config.bf16, fp16=config.fp16))
    tokens = config.batch_size * config.seq_len
    flops = model.flops_per_token(config.seq_len) * tokens * FLOPS_SHARE[job.computation]
    about = settings(config) | {
        "device": device_name(device),
        "parameters": model.num_parameters(),
        "notes": "; ".join(run.notes),
    }
    rows = []
    for warmup in job.warmup_steps:
        counted = seconds[warmup : warmup + job.steps]
        mean = statistics.fmean(counted)
        tflops = flops / mean / 1e12
        known = matmul if mfu(flops / min(counted) / 1e12, matmul) else None
        figures = {
            "mean_s": mean,
            "median_s": statistics.median(counted),
            "std_s": statistics.pstdev(counted),
            "min_s": min(counted),
            "max_s": max(counted),
            "total_s": sum(counted),
            "steps": len(counted),
            "tokens_per_sec": tokens / mean,
            "tflops": tflops,
            "matmul_tflops": known,
            "utilization": mfu(tflops, known),
            "peak_memory_mb": peak,
            "times_s": counted,
        }
        rows.append(empty_row(job, warmup) | figures | about)
    return rows


def empty_row(job: Job, warmup: int, error: str = "") -> Row:
    """Return the row of a job without figures; with an error, it could not be measured."""
    key = {
        "size": job.size,
        "computation": job.computation,
        "warmup_steps": warmup,
        "mixed_precision": is_mixed(job.config),
    }
    return (
        key
        | dict.fromkeys(FIGURES)
        | {"error": error, "notes": "", "times_s": []}
        | settings(job.config)
    )


def settings(config: Config) -> dict[str, Any]:
    """Return the options that make the figures, as results.json and results.csv have them."""
    names = {*ModelConfig.model_fields, *SpeedConfig.model_fields, "batch_size", "seq_len", "seed"}
    names |= {"optimizer", "grad_clip", "weight_decay"}
    about = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    return config.model_dump(mode="json", include=names) | about


# ---- a process for each job


def time_job(job: Job) -> list[Row]:
    """Time a job in a fresh process; returns its rows, which say why where it fails."""
    rows, error = in_fresh_process("measure.profile.timing:measure", job)
    return rows or [empty_row(job, warmup, error) for warmup in job.warmup_steps]
