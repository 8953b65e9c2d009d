"""Time one computation of one model in a fresh process."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from config import Config, ModelConfig, SpeedConfig
from measure.interleaved.options import without_end
from measure.interleaved.process import in_fresh_process
from measure.report.report import Row
from runtime.device import (
    choose_device,
    device_name,
    has_bf16,
    matmul_dtype,
    matmul_tflops,
    peak_memory_mb,
    timed,
)
from runtime.world import World
from summary import mfu
from train import Run, setup, train_step

# Share of a training step's FLOPs: the backward pass has two matmuls for each of the forward pass.
FLOPS_SHARE = {"forward": 1 / 3, "backward": 2 / 3, "forward_backward": 1.0, "training_step": 1.0}


Key = tuple[str, str, int, bool]  # size, computation, warm-up passes, mixed precision


def precision(config: Config) -> str:
    """Return `mixed` or `full`."""
    return "mixed" if config.bf16 or config.fp16 else "full"


@dataclasses.dataclass(frozen=True)
class Job:
    """A computation of a model, timed in a process of its own."""

    size: str  # a size of the published profile, or the config's name
    config: Config
    computation: str  # forward, backward, forward_backward or training_step
    warmup_steps: tuple[int, ...]
    steps: int  # timed passes

    @property
    def label(self) -> str:
        """Describe the model and the computation."""
        return f"{self.size} {self.computation}, {precision(self.config)} precision"

    def key(self, warmup_steps: int) -> Key:
        """Return the identity of a measurement: equal in two files, it is the same one."""
        is_mixed = precision(self.config) == "mixed"
        return self.size, self.computation, warmup_steps, is_mixed


@dataclasses.dataclass(frozen=True)
class Timing:
    """The timed passes of a job, or the error that ended it."""

    job: Job
    warmup_steps: int  # passes before the timed ones
    seconds: Sequence[float] = ()  # one entry per timed pass
    flops: float = 0.0  # per pass
    matmul_tflops: float | None = None  # rate of a large matmul in this precision on this device
    peak_memory_mb: float = 0.0
    about: Row = dataclasses.field(default_factory=dict)  # the model and the device
    error: str = ""

    @property
    def key(self) -> Key:
        """Return the identity of this measurement."""
        return self.job.key(self.warmup_steps)

    @property
    def mean_s(self) -> float:
        """Return the mean seconds of a pass."""
        return statistics.fmean(self.seconds)

    def row(self) -> Row:
        """Return the row in tables and files: key, figures unless there is an error, settings."""
        config, names = self.job.config, ("size", "computation", "warmup_steps", "mixed_precision")
        row: Row = dict(zip(names, self.key, strict=True))
        if not self.error:
            # a matmul slower than some pass was timed in a busy moment
            is_known = mfu(self.flops / min(self.seconds) / 1e12, self.matmul_tflops)
            matmul = self.matmul_tflops if is_known else None
            tflops = self.flops / self.mean_s / 1e12
            row |= {
                "mean_s": self.mean_s,
                "median_s": statistics.median(self.seconds),
                "std_s": statistics.pstdev(self.seconds),  # the published profile has it too
                "min_s": min(self.seconds),
                "max_s": max(self.seconds),
                "total_s": sum(self.seconds),
                "steps": len(self.seconds),
                "tokens_per_sec": config.batch_size * config.seq_len / self.mean_s,
                "tflops": tflops,
                "matmul_tflops": matmul,
                "utilization": mfu(tflops, matmul),
                "peak_memory_mb": self.peak_memory_mb,
            }
        return row | {"error": self.error} | settings(config) | self.about


def with_mixed_precision_of(device: torch.device, config: Config) -> tuple[Config, list[str]]:
    """Return the config and notes: on a GPU without bf16, fp16 replaces it."""
    if has_bf16(device) or not config.bf16:
        return config, []
    note = f"{device_name(device)} has no bfloat16: mixed precision is float16 here"
    return config.model_copy(update={"bf16": False, "fp16": True}), [note]


def set_up(config: Config, *, from_corpus: bool = False) -> Run:
    """Set a run up on this process alone, on its corpus or on one batch of random tokens.

    Only notes on options are kept. Raises UserError for options that this device lacks, and for a
    corpus that cannot be opened.
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
    """Return an untimed function that prepares a pass, and the pass, which takes its result."""

    def forward() -> Tensor:
        x, y = next(run.batches)
        with run.autocast():
            return run.model(x, y)

    def prepare() -> Tensor | None:
        run.state.model.zero_grad(set_to_none=True)
        return forward() if computation == "backward" else None

    work: dict[str, Callable[[Any], object]] = {
        "forward": lambda _: forward(),
        "backward": lambda loss: loss.backward(),
        "forward_backward": lambda _: forward().backward(),
        "training_step": lambda _: train_step(run, 1),
    }
    return prepare, work[computation]


# ---- timing


def measure(job: Job) -> list[Timing]:
    """Time the job's passes; returns a Timing for each of its numbers of warm-up passes.

    All come from the same passes: with w passes of warm-up, the first w are left out and the next
    `steps` count. So timings differ in the passes that count, not in the noise between two
    measurements. Raises UserError for options that this device lacks.
    """
    run = set_up(job.config)
    config, model, device = run.config, run.state.model, run.world.device
    prepare, work = passes(run, job.computation)
    seconds = [
        timed(functools.partial(work, prepare()), device)
        for _ in range(max(job.warmup_steps) + job.steps)
    ]
    peak = peak_memory_mb(device)  # before the matmul adds to it
    tokens = config.batch_size * config.seq_len
    timing = Timing(
        dataclasses.replace(job, config=config),
        warmup_steps=0,
        flops=model.flops_per_token(config.seq_len) * tokens * FLOPS_SHARE[job.computation],
        matmul_tflops=matmul_tflops(device, matmul_dtype(bf16=config.bf16, fp16=config.fp16)),
        peak_memory_mb=peak,
        about={
            "device": device_name(device),
            "parameters": model.num_parameters(),
            "notes": "; ".join(run.notes),
        },
    )
    return [
        dataclasses.replace(timing, warmup_steps=w, seconds=seconds[w : w + job.steps])
        for w in job.warmup_steps
    ]


def settings(config: Config) -> Row:
    """Return the options that affect the figures."""
    names = {*ModelConfig.model_fields, *SpeedConfig.model_fields, "batch_size", "seq_len", "seed"}
    names |= {"optimizer", "grad_clip", "weight_decay"}
    about = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    return config.model_dump(mode="json", include=names) | about


def time_job(job: Job) -> list[Timing]:
    """Time a job in a fresh process; if it fails, each Timing has the error."""
    timings, error = in_fresh_process("measure.profile.timing:measure", job)
    return timings or [Timing(job, warmup, error=error) for warmup in job.warmup_steps]
