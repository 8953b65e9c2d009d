"""What is timed, one computation of one model, and how: in a fresh process, waiting for the device
around each pass.
"""

import dataclasses
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from benchmarks.tables import Row
from config import Config
from model import GPT, GPTConfig
from optimizer import clip_gradients
from runtime.device import (
    choose_device,
    device_name,
    matmul_dtype,
    matmul_tflops,
    peak_memory_mb,
    synchronize,
)
from runtime.errors import UserError, kind_of_failure
from runtime.signals import end_with
from runtime.start import retain_freed_memory
from runtime.world import World
from train import build

# share of a training step's floating-point operations: the backward pass takes two matrix products
# for each of the forward's
FLOPS_SHARE = {"forward": 1 / 3, "backward": 2 / 3, "forward_backward": 1.0, "training_step": 1.0}

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Job:
    """One computation of one model, timed in a process of its own."""

    size: str  # of the profile, or the config's name
    config: Config
    computation: str  # forward, backward, forward_backward or training_step
    warmup_steps: tuple[int, ...]
    steps: int  # timed passes


def is_mixed(config: Config) -> bool:
    """Whether the config trains in mixed precision."""
    return config.bf16 or config.fp16


def with_mixed_precision_of(device: torch.device, config: Config) -> tuple[Config, list[str]]:
    """The config, with float16 for bfloat16 where the device is a GPU that lacks it; and a note for
    the user if so.
    """
    if (
        not config.bf16
        or device.type != "cuda"
        or torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return config, []
    return (
        config.model_copy(update={"bf16": False, "fp16": True}),
        [f"{device_name(device)} has no bfloat16: mixed precision is float16 here"],
    )


class Workload:
    """A model on its device with one batch of random tokens, and its optimizers."""

    config: Config  # with the mixed precision that the device has
    raw_model: GPT
    model: Any  # raw_model, compiled if the config says so
    optimizers: list[torch.optim.Optimizer]
    notes: list[str]  # for the user

    def __init__(self, config: Config):
        """Raises UserError for what this device cannot do."""
        self.device = choose_device(config.device)
        config, notes = with_mixed_precision_of(self.device, config)
        said: list[str] = []
        self.config, state, self.model, self.autocast = build(
            config, World(self.device), said.append
        )
        self.raw_model, self.optimizers = state.model, state.optimizers
        notes += [note for note in config.notes() if note.startswith("compile_mode")]
        lines = "\n".join(said).splitlines()
        self.notes = notes + [
            line.removeprefix("note: ") for line in lines if line.startswith("note: ")
        ]
        self.x, self.y = self.random_batch()  # (B, T)

    @property
    def tokens(self) -> int:
        """Tokens of one pass."""
        return self.config.batch_size * self.config.seq_len

    def random_batch(self) -> tuple[Tensor, Tensor]:
        """Random tokens and targets, each (B, T) int64, on the device."""
        shape = (2, self.config.batch_size, self.config.seq_len)
        x, y = torch.randint(self.raw_model.config.n_vocab, shape).to(self.device)
        return x, y

    def clear(self) -> None:
        """Drop the gradients."""
        self.raw_model.zero_grad(set_to_none=True)

    def forward(self) -> Tensor:
        """The loss, with the graph that a backward pass needs."""
        with self.autocast():
            return self.model(self.x, self.y)

    def update(self) -> None:
        """Gradient norm, clipping and optimizer step, as in training (but for fp16's loss scaling)."""
        clip_gradients(self.raw_model, self.config.grad_clip)
        for optimizer in self.optimizers:
            optimizer.step()

    def training_step(self) -> None:
        """Forward, backward and update."""
        self.forward().backward()
        self.update()

    def computation(self, name: str) -> tuple[Callable[[], Tensor | None], Callable[[Any], object]]:
        """What to do before each timed pass, and the pass, which gets what that returned."""

        def clear_and_forward() -> Tensor:
            self.clear()
            return self.forward()

        return {
            "forward": (self.clear, lambda _: self.forward()),
            "backward": (
                clear_and_forward,
                lambda loss: loss.backward(),
            ),  # a fresh forward for each, not timed
            "forward_backward": (self.clear, lambda _: self.forward().backward()),
            "training_step": (self.clear, lambda _: self.training_step()),
        }[name]


# ---- timing


def time_passes(
    prepare: Callable[[], Any],
    timed: Callable[[Any], object],
    passes: int,
    device: torch.device,
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Seconds of each pass of `timed`, which gets what the untimed `prepare` returned. Waits for
    the device around each.
    """
    seconds = []
    for _ in range(passes):
        prepared = prepare()
        synchronize(device)
        start = clock()
        result = timed(prepared)
        synchronize(device)
        seconds.append(clock() - start)
        del prepared, result  # freeing a graph is not part of the pass
    return seconds


def measure(job: Job, clock: Clock = time.perf_counter) -> list[Row]:
    """A row for each of the job's numbers of warm-up passes. Raises UserError for what this device
    cannot do.

    The passes are done once: a row of w warm-up passes leaves out the first w of them and counts
    the `steps` that follow. So rows differ in which passes count, not in the noise between two
    measurements.
    """
    work = Workload(job.config)
    prepare, timed = work.computation(job.computation)
    seconds = time_passes(prepare, timed, max(job.warmup_steps) + job.steps, work.device, clock)
    peak = peak_memory_mb(work.device)  # before the measurement below adds to it
    matmul = matmul_tflops(work.device, matmul_dtype(bf16=work.config.bf16, fp16=work.config.fp16))
    flops = (
        work.raw_model.flops_per_token(work.config.seq_len)
        * work.tokens
        * FLOPS_SHARE[job.computation]
    )
    about = settings(work.config) | {
        "device": device_name(work.device),
        "parameters": work.raw_model.num_parameters(),
        "notes": "; ".join(work.notes),
    }
    rows = []
    for warmup in job.warmup_steps:
        counted = seconds[warmup : warmup + job.steps]
        mean = statistics.fmean(counted)
        tflops = flops / mean / 1e12
        rows.append(
            Row(
                job.size,
                job.computation,
                warmup,
                is_mixed(job.config),
                mean_s=mean,
                median_s=statistics.median(counted),
                std_s=statistics.pstdev(counted),
                min_s=min(counted),
                max_s=max(counted),
                total_s=sum(counted),
                steps=len(counted),
                tokens_per_sec=work.tokens / mean,
                tflops=tflops,
                matmul_tflops=matmul,
                utilization=tflops / max(matmul, tflops),
                peak_memory_mb=peak,
                times_s=counted,
                settings=about,
            )
        )
    return rows


def settings(config: Config) -> dict[str, Any]:
    """The model and the profile in full, as results.json and results.csv have them."""
    names = [f.name for f in dataclasses.fields(GPTConfig)]
    names += [
        "batch_size",
        "seq_len",
        "bf16",
        "fp16",
        "tf32",
        "compile",
        "compile_mode",
        "fused_adamw",
        "optimizer",
        "grad_clip",
        "weight_decay",
        "seed",
    ]
    return {name: getattr(config, name) for name in names} | {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


# ---- a process for each job


def time_job(job: Job) -> list[Row]:
    """The rows of a job, timed in a fresh process."""
    rows, error = in_fresh_process(measure, job)
    return rows or failed_rows(job, error)


def failed_rows(job: Job, error: str) -> list[Row]:
    """The job's rows where it could not be measured."""
    return [
        Row(
            job.size,
            job.computation,
            warmup,
            is_mixed(job.config),
            error=error,
            settings=settings(job.config),
        )
        for warmup in job.warmup_steps
    ]


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """The function's result in a fresh process, where nothing is warm and the peak of memory is its
    own; or why there is none.
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(
        target=_serve, args=(os.getpid(), send, function, arguments), daemon=True
    )
    before = signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a Ctrl-C is for the parent, which ends the child
    process.start()
    signal.signal(signal.SIGINT, before)
    send.close()
    try:
        result, error = receive.recv()
    except EOFError:  # it ended without an answer
        process.join()
        killed = process.exitcode == -9  # SIGKILL, a name that Windows lacks
        result, error = (
            None,
            "out of memory: the system killed the process"
            if killed
            else f"exit status {process.exitcode}",
        )
    process.join()
    return result, error


def _serve(
    parent: int, connection: Connection, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    end_with(parent)
    retain_freed_memory()  # as train.py
    _call(connection, function, arguments)


def _call(connection: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Call the function and send its result, or a line that says why there is none."""
    result, reason = None, ""
    try:
        result = function(*arguments)
    except UserError as error:
        reason = str(error)
    except (RuntimeError, MemoryError) as error:
        reason = kind_of_failure(error)[1]
    connection.send((result, reason))
    connection.close()
