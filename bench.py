"""Time forward, backward and both of a model, and show where the time goes.

    python bench.py                              the published profile: small and medium, with and without warm-up and bf16
    python bench.py --config speedup7.yaml       the model, batch and precision of a training stage
    python bench.py --breakdown                  the parts of a training step, and each one's share
    python bench.py --scan batch_size=1,2,4,8    tokens/s and memory for each value, up to out of memory
    python bench.py --compare logs/reference/timeit.csv    beside earlier results, or the published ones
"""

import contextlib
import csv
import dataclasses
import datetime
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from config import (
    Config,
    ContradictionError,
    Options,
    Positive,
    UserError,
    ZeroIsOff,
    exit_with,
    load_config,
    parse_command_line,
)

# layers, heads and width
SIZES = {"small": (12, 12, 768), "medium": (24, 16, 1024), "large": (36, 20, 1280), "xl": (48, 25, 1600)}
# the rest of the published profile
PROFILE = {"vocab_size": 10_000, "norm": "rmsnorm", "bias": False, "activation": "gelu", "tie_weights": False,
           "batch_size": 16, "seq_len": 128, "seed": 20230310, "compile": False, "flash": False}
# share of a training step's floating-point operations: the backward pass takes two matrix products for each of the forward's
FLOPS_SHARE = {"forward": 1 / 3, "backward": 2 / 3, "forward_backward": 1.0, "training_step": 1.0}

Listed = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
Size = Literal["small", "medium", "large", "xl"]
Computation = Literal["forward", "backward", "forward_backward", "training_step"]


class WhatOptions(Options):
    """what to time (by default: the published profile)"""

    config: str | None = None
    """time the model, batch and precision of this training config instead: a path, or a name in configs/"""
    size: Annotated[tuple[Size, ...], Listed] = ("small", "medium")
    """sizes of the published profile's model: small, medium, large, xl, separated by commas"""
    computation: Annotated[tuple[Computation, ...], Listed] = ("forward", "backward", "forward_backward")
    """forward, backward, forward_backward; or training_step, which adds clipping and the optimizer"""
    warmup_steps: Annotated[tuple[ZeroIsOff, ...], Listed] = (0, 1)
    """untimed passes before the timed ones, each number its own row"""
    mixed_precision: bool | None = None
    """only with, or only without, bf16 autocast (none: both; with --config: as it says)"""
    steps: Positive = 5
    """timed passes"""
    batch_size: Positive | None = None
    """sequences per pass (none: 16; with --config: as it says)"""
    seq_len: Positive | None = None
    """tokens per sequence (none: 128; with --config: as it says)"""
    compile: bool | None = None
    """torch.compile the model (none: no; with --config: as it says)"""
    flash: bool | None = None
    """fused attention (none: no; with --config: as it says)"""
    device: Literal["auto", "cuda", "mps", "cpu"] | None = None
    """auto: cuda, else mps, else cpu (none: auto; with --config: as it says)"""
    seed: ZeroIsOff | None = None
    """seed of weights and tokens (none: 20230310; with --config: as it says)"""


class HowOptions(Options):
    """what to do with it (by default: a table of times)"""

    breakdown: bool = False
    """time the parts of a training step"""
    trace: bool = False
    """profile a training step: top operators, and a trace that ui.perfetto.dev opens"""
    memory: bool = False
    """write a snapshot of the CUDA memory of a training step, which pytorch.org/memory_viz opens"""
    scan: str | None = None
    """tokens/s and memory of training steps over values of batch_size or seq_len, such as batch_size=1,2,4"""
    compare: str | None = None
    """results.json or results.csv of an earlier call, or logs/reference/timeit.csv"""
    log_dir: str = "logs"
    """results go to bench/<time>/ in this folder"""


class BenchOptions(HowOptions, WhatOptions):
    """All options of a benchmark."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        problems = []
        for name in ("size", "computation", "warmup_steps"):
            if not getattr(self, name):
                problems.append((name, f"{name} is empty; give at least one, or leave the option out"))
        if self.config and "size" in self.model_fields_set:
            problems.append(("size", f"size and config exclude each other: the model is that of {self.config}"))
        if self.scan is not None:
            name, _, values = self.scan.partition("=")
            if name not in ("batch_size", "seq_len") or not all(v.isdecimal() and int(v) for v in values.split(",")):
                problems.append(("scan", f"scan {self.scan!r} is not understood; write batch_size=1,2,4 or seq_len=128,256"))
            elif getattr(self, name) is not None:
                problems.append((name, f"{name} and scan {self.scan} exclude each other"))
            if "warmup_steps" in self.model_fields_set and len(self.warmup_steps) > 1:
                problems.append(("warmup_steps", "scan takes one number of warm-up steps"))
        other = [name for name in ("breakdown", "trace", "memory", "scan") if getattr(self, name)]
        inspected = [name for name in other if name != "scan"]
        for name, without in (("compare", other), ("computation", inspected), ("warmup_steps", inspected),
                              ("steps", [] if self.breakdown or self.scan else inspected)):
            if name in self.model_fields_set and without:
                problems.append((name, f"{name} has no effect with {' and '.join(without)}; leave it out"))
        if problems:
            raise ContradictionError(problems)
        return self


if __name__ == "__main__":
    # before torch is imported, which takes seconds: --help and mistakes answer at once
    OPTIONS = parse_command_line(BenchOptions, description=__doc__)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as in train.py

import torch
from torch import Tensor

from checkpoint import CheckpointError
from data.token_file import TokenFileError
from dataloader import DataLoader, open_corpus
from device import (
    autocast_for,
    check_compiler,
    choose_device,
    device_name,
    flash_note,
    is_out_of_memory,
    make_repeatable,
    matmul_tflops,
    peak_memory_mb,
    product_dtype,
    set_precision,
    synchronize,
)
from ladder import BLUE, COLOURS, MARKERS, ORANGE, markdown_table, pyplot, show
from machine import machine
from model import GPT, Block, GPTConfig
from optimizer import clip_gradients, make_optimizers
from resume import build_model
from runlog import git_commit

Clock = Callable[[], float]
Means = dict[tuple[str, str, int, bool], float]  # seconds by (size, computation, warm-up passes, mixed precision)


# ---- what is timed


@dataclasses.dataclass(frozen=True)
class Job:
    """One computation of one model, timed in a process of its own."""

    size: str  # of the profile, or the config's name
    config: Config
    computation: str
    warmup_steps: tuple[int, ...]
    steps: int


@dataclasses.dataclass
class Row:
    """A job's result after one number of warm-up passes. Times in seconds, memory in MiB; NaN where the run failed."""

    size: str
    computation: str
    warmup_steps: int
    mixed_precision: bool
    mean_s: float = math.nan
    median_s: float = math.nan
    std_s: float = math.nan
    min_s: float = math.nan
    max_s: float = math.nan
    total_s: float = math.nan
    steps: int = 0
    tokens_per_sec: float = math.nan
    tflops: float = math.nan  # 10^12 floating-point operations per second
    matmul_tflops: float = math.nan  # what a large matrix product in the same precision reaches on this device
    utilization: float = math.nan  # tflops over matmul_tflops
    peak_memory_mb: float = math.nan
    error: str = ""
    times_s: list[float] = dataclasses.field(default_factory=list)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int, bool]:
        """What makes two rows of two files the same measurement."""
        return self.size, self.computation, self.warmup_steps, self.mixed_precision


def is_mixed(config: Config) -> bool:
    """Whether the config trains in mixed precision."""
    return config.bf16 or config.fp16


def precision(mixed: bool) -> str:
    """Mixed precision or not, in a word."""
    return "mixed" if mixed else "full"


def job_configs(options: BenchOptions, **changed: Any) -> list[tuple[str, Config]]:
    """The models to time, with and without mixed precision: names and training configs. Raises UserError."""
    given = {name: value for name in ("batch_size", "seq_len", "compile", "flash", "device", "seed")
             if (value := getattr(options, name)) is not None} | changed
    if options.config:
        given |= {"total_batch_tokens": None}  # a pass is one micro-step
        config = load_config(options.config, **given)
        wanted = is_mixed(config) if options.mixed_precision is None else options.mixed_precision
        if wanted != is_mixed(config):
            config = load_config(options.config, **given, bf16=wanted, fp16=False)
        return [(Path(options.config).stem, config)]
    configs: list[tuple[str, Config]] = []
    for size in options.size:
        layers, heads, width = SIZES[size]
        values: dict[str, Any] = PROFILE | given | {"n_layer": layers, "n_head": heads, "n_embd": width}
        for mixed in (False, True) if options.mixed_precision is None else (options.mixed_precision,):
            configs.append((size, load_config(**values, block_size=values["seq_len"], bf16=mixed)))
    return configs


def jobs_of(options: BenchOptions, computations: Sequence[str], **changed: Any) -> list[Job]:
    """A job for each model, precision and computation. Raises UserError."""
    return [Job(size, config, computation, options.warmup_steps, options.steps)
            for size, config in job_configs(options, **changed) for computation in computations]


class Workload:
    """A model on its device with one batch of random tokens, and an optimizer."""

    def __init__(self, config: Config):
        """Raises UserError for what this device cannot do."""
        self.device = choose_device(config.device)
        self.notes = [note for note in config.notes() if note.startswith("compile_mode")] + set_precision(config, self.device)
        make_repeatable(self.device)
        if config.compile:
            check_compiler(self.device)
        torch.manual_seed(config.seed)
        self.config, self.raw_model = build_model(config)
        self.raw_model.to(self.device)
        self.notes += flash_note(config, self.device)
        self.model: Any = torch.compile(self.raw_model, mode=config.compile_mode) if config.compile else self.raw_model
        self.autocast = autocast_for(config, self.device)
        self.optimizers, _ = make_optimizers(self.raw_model, config)
        self.x, self.y = self.random_batch()  # (B, T)

    @property
    def tokens(self) -> int:
        """Tokens of one pass."""
        return self.config.batch_size * self.config.seq_len

    def random_batch(self) -> tuple[Tensor, Tensor]:
        """Random tokens and targets, each (B, T) int64, on the device."""
        shape = (2, self.config.batch_size, self.config.seq_len)
        x, y = torch.randint(self.raw_model.config.n_tokens, shape).to(self.device)
        return x, y

    def clear(self) -> None:
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
        self.forward().backward()
        self.update()

    def computation(self, name: str) -> tuple[Callable[[], Tensor | None], Callable[[Any], object]]:
        """What to do before each timed pass, and the pass, which gets what that returned."""
        def clear_and_forward() -> Tensor:
            self.clear()
            return self.forward()

        return {
            "forward": (self.clear, lambda _: self.forward()),
            "backward": (clear_and_forward, lambda loss: loss.backward()),  # a fresh forward for each, not timed
            "forward_backward": (self.clear, lambda _: self.forward().backward()),
            "training_step": (self.clear, lambda _: self.training_step()),
        }[name]


# ---- timing


def time_passes(prepare: Callable[[], Any], timed: Callable[[Any], object], passes: int, device: torch.device,
                clock: Clock = time.perf_counter) -> list[float]:
    """Seconds of each pass of `timed`, which gets what the untimed `prepare` returned. Waits for the device around each."""
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
    """A row for each of the job's numbers of warm-up passes. Raises UserError for what this device cannot do.

    The passes are run once: a row of w warm-up passes leaves out the first w of them and counts the `steps` that follow. So
    rows differ in which passes count, not in the noise between two runs.
    """
    work = Workload(job.config)
    prepare, timed = work.computation(job.computation)
    seconds = time_passes(prepare, timed, max(job.warmup_steps) + job.steps, work.device, clock)
    peak = peak_memory_mb(work.device)  # before the measurement below adds to it
    rate = matmul_tflops(work.device, product_dtype(job.config))
    flops = work.raw_model.flops_per_token(job.config.seq_len) * work.tokens * FLOPS_SHARE[job.computation]
    about = settings(job) | {"device": device_name(work.device), "parameters": work.raw_model.num_parameters(),
                             "notes": "; ".join(work.notes)}
    return [row_of(job, warmup, seconds[warmup:warmup + job.steps], work.tokens, flops, rate, peak, about)
            for warmup in job.warmup_steps]


def row_of(job: Job, warmup: int, seconds: list[float], tokens: int, flops: float, matmul: float, peak: float,
           about: dict[str, Any]) -> Row:
    """The figures of some timed passes. std is the population's, as in the published profile."""
    mean = statistics.fmean(seconds)
    tflops = flops / mean / 1e12
    return Row(job.size, job.computation, warmup, is_mixed(job.config), mean, statistics.median(seconds),
               statistics.pstdev(seconds), min(seconds), max(seconds), sum(seconds), len(seconds), tokens / mean, tflops,
               matmul, tflops / matmul, peak, times_s=seconds, settings=about)


def settings(job: Job) -> dict[str, Any]:
    """The model and the profile in full."""
    names = [f.name for f in dataclasses.fields(GPTConfig)]
    names += ["batch_size", "seq_len", "bf16", "fp16", "tf32", "compile", "compile_mode", "fused_adamw", "optimizer", "grad_clip",
              "weight_decay", "seed"]
    return {name: getattr(job.config, name) for name in names} | {
        "threads": torch.get_num_threads(), "torch": torch.__version__}


def failed_rows(job: Job, error: str) -> list[Row]:
    """The job's rows where it could not be measured."""
    mixed = is_mixed(job.config)
    return [Row(job.size, job.computation, warmup, mixed, error=error, settings=settings(job)) for warmup in job.warmup_steps]


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """The function's result in a fresh process, where nothing is warm and the peak of memory is its own; or why there is none."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(send, function, arguments), daemon=True)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which ends the child
    process.start()
    signal.signal(signal.SIGINT, before)
    send.close()
    try:
        result, error = receive.recv()
    except EOFError:  # it ended without an answer
        process.join()
        killed = process.exitcode == -9
        result, error = None, "out of memory: the system killed the process" if killed else f"exit status {process.exitcode}"
    process.join()
    return result, error


def _call(connection: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    result, reason = None, ""
    try:
        result = function(*arguments)
    except (UserError, CheckpointError) as error:
        reason = str(error)
    except (RuntimeError, MemoryError) as error:
        lines = [*str(error).splitlines(), type(error).__name__]
        reason = "out of memory" if is_out_of_memory(error) else next((line for line in lines if "rror" in line), lines[0])
    connection.send((result, reason))
    connection.close()


def run(job: Job) -> list[Row]:
    """The rows of a job, timed in a fresh process."""
    rows, error = in_fresh_process(measure, job)
    return rows or failed_rows(job, error)


def run_all(jobs: Sequence[Job]) -> Iterator[list[Row]]:
    """The rows of each job, with progress shown."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, refresh_per_second=1) as progress:  # drawn more often, it would disturb what is timed
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=f"{job.size} {job.computation}, {precision(is_mixed(job.config))} precision")
            yield run(job)
            progress.advance(task)
            if not progress.console.is_terminal:
                progress.console.print(f"{progress.tasks[0].description}: done")


# ---- where the time goes


@dataclasses.dataclass
class Part:
    """A part of a training step. TFLOP/s are NaN where it multiplies no matrices."""

    part: str
    ms: float
    share: float
    tflops: float


class Marks:
    """Adds the time since the last mark to a part, waiting for the device at each."""

    def __init__(self, device: torch.device, clock: Clock):
        self.device, self.clock = device, clock
        self.seconds: dict[str, float] = {}

    def start(self) -> None:
        self.seconds = {}
        synchronize(self.device)
        self.last = self.clock()

    def mark(self, part: str) -> None:
        synchronize(self.device)
        now = self.clock()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now


@contextlib.contextmanager
def marked(model: GPT, marks: Marks) -> Iterator[None]:
    """Mark the parts of the model's forward pass, and of the backward pass through it, while entered.

    The residual stream runs through all parts: a part's forward ends where the stream has its result, its backward where the
    gradient reaches the stream in front of it. So the norm before attention or MLP and the sum behind it belong to them.
    """
    def behind(part: str) -> Callable[..., None]:
        return lambda *_: marks.mark(part)

    def gradient_in_front(part: str) -> Callable[..., None]:
        return lambda _, inputs: inputs[0].register_hook(lambda _: marks.mark(f"{part}, backward")) and None

    handles = [model.transformer.h[0].register_forward_pre_hook(behind("embedding"))]
    for block in model.transformer.h:
        assert isinstance(block, Block)
        handles += [block.register_forward_pre_hook(gradient_in_front("attention")),
                    block.ln_2.register_forward_pre_hook(behind("attention")),
                    block.ln_2.register_forward_pre_hook(gradient_in_front("MLP")),
                    block.register_forward_hook(behind("MLP"))]
    handles += [model.transformer.ln_f.register_forward_pre_hook(gradient_in_front("head and loss")),
                model.register_forward_hook(behind("head and loss"))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def part_flops(config: Config, tokens: int) -> dict[str, float]:
    """Floating-point operations of the matrix products in each part's forward pass; the backward pass has twice as many."""
    C, L = config.n_embd, config.n_layer
    return {"attention": tokens * L * (2 * 4 * C * C + 4 * config.seq_len * C),
            "MLP": tokens * L * 2 * 8 * C * C,
            "head and loss": tokens * 2 * C * config.vocab_size}


def break_down(work: Workload, next_batch: Callable[[], tuple[Tensor, Tensor]], steps: int,
               clock: Clock = time.perf_counter) -> list[Part]:
    """The parts of a training step of the uncompiled model, medians over `steps` after one step of warm-up.

    `backward` is all of the backward pass; below it stands what each part takes of it.
    """
    marks = Marks(work.device, clock)
    runs = []
    with marked(work.raw_model, marks):
        for _ in range(1 + steps):
            work.clear()
            marks.start()
            x, y = next_batch()
            marks.mark("data")
            with work.autocast():
                loss = work.raw_model(x, y)
            loss.backward()
            marks.mark("embedding, backward")
            work.update()
            marks.mark("optimizer")
            runs.append(marks.seconds)
    seconds = {part: statistics.median(run[part] for run in runs[1:]) for part in runs[-1]}
    total = sum(seconds.values())
    flops = part_flops(work.config, work.tokens)
    flops |= {f"{part}, backward": 2 * count for part, count in flops.items()}
    backward = [part for part in seconds if part.endswith(", backward")]
    seconds["backward"], flops["backward"] = sum(seconds[part] for part in backward), sum(flops.get(part, 0) for part in backward)
    order = ["data", "embedding", "attention", "MLP", "head and loss", "backward", *backward, "optimizer"]
    return [Part(part, seconds[part] * 1e3, seconds[part] / total if total else 0.0,
                 flops[part] / seconds[part] / 1e12 if part in flops and seconds[part] else math.nan) for part in order]


def batches_of(config: Config, work: Workload) -> tuple[Callable[[], tuple[Tensor, Tensor]], str]:
    """A function that gives the next batch of the config's corpus on the device, and the corpus; random tokens without it."""
    corpus = Path(config.data_dir) / config.dataset
    try:
        stream, _ = open_corpus(corpus, config.seq_len, work.raw_model.config.n_tokens, config.val_fraction)
        loader = DataLoader(stream, config.batch_size, seed=config.seed, shuffle=config.shuffle)
    except TokenFileError as error:
        print(f"note: data is random tokens: {error}")
        return work.random_batch, "random tokens"
    step = itertools.count(1)

    def next_batch() -> tuple[Tensor, Tensor]:
        x, y = loader.batch(next(step))
        return x.to(work.device), y.to(work.device)

    return next_batch, str(corpus)


def trace(work: Workload, path: Path, rows: int = 12) -> list[tuple[str, int, float, float]]:
    """Profile one training step, after two of warm-up, into a Chrome trace.

    Returns the top operators: name, calls, milliseconds in the operator itself, share of all operators.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (work.device.type == "cuda")
    for _ in range(2):
        work.clear()
        work.training_step()
    work.clear()
    with profile(activities=activities) as profiler:
        work.training_step()
        synchronize(work.device)
    profiler.export_chrome_trace(str(path))
    on_gpu = work.device.type == "cuda"
    # an operator has the time of the kernels that it started; the kernels are listed again as events of the device
    operators = [(event.key, event.count, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3)
                 for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CPU]
    total = sum(ms for *_, ms in operators) or 1.0
    return [(name, calls, ms, ms / total) for name, calls, ms in sorted(operators, key=lambda row: -row[2])[:rows]]


def snapshot(work: Workload, path: Path) -> None:
    """Write every allocation of a training step as a snapshot of CUDA's memory."""
    torch.cuda.memory._record_memory_history()
    work.clear()
    work.training_step()
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


# ---- results: files, tables, pictures


def write_results(rows: Sequence[Row], folder: Path) -> None:
    """Write results.json and results.csv, one object or line for each row; pandas reads both."""
    flat = []
    for row in rows:
        values = dataclasses.asdict(row)
        flat.append(values | values.pop("settings"))
    plain = [{name: None if value != value else value for name, value in row.items()} for row in flat]  # None for NaN
    (folder / "results.json").write_text(json.dumps(plain, indent=1, allow_nan=False) + "\n")
    with open(folder / "results.csv", "w", newline="") as file:
        names = list(dict.fromkeys(name for row in plain for name in row if name != "times_s"))
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: str(value).lower() if isinstance(value, bool) else value for name, value in row.items()}
                         for row in plain)


def read_results(path: Path) -> tuple[Means, dict[str, Any]]:
    """The mean of each row of a results file, and the settings of the first; the published profile's where it has none.

    Raises UserError.
    """
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if path.suffix == ".json" else list(csv.DictReader(text.splitlines()))
        means = {(row["size"], row["computation"], int(row["warmup_steps"]), str(row["mixed_precision"]).lower() == "true"):
                 float(row["mean_s"]) for row in rows if row["mean_s"] not in (None, "")}
        if not all(0 < mean < math.inf for mean in means.values()):
            raise ValueError("a mean_s that is no duration")
        return means, PROFILE | rows[0] if rows else {}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except KeyError as error:
        raise UserError(f"{path}: has no column {error.args[0]}; it should be results.json or results.csv of bench.py") from None
    except (TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: not a results file: {error}") from None


def ratios(means: Means) -> dict[str, float]:
    """Quotients of rows that say something beyond one machine: no warm-up over warm-up, mixed over full precision, backward
    over forward. The last two are of the rows with the most warm-up."""
    found = {}
    most = max((key[2] for key in means), default=0)
    for (size, computation, warmup, mixed), mean in means.items():
        if warmup == 0 and (warm := means.get((size, computation, most, mixed))) and most:
            found[f"warm-up 0 over {most}: {size} {computation}, {precision(mixed)}"] = mean / warm
        if warmup == most and mixed and (full := means.get((size, computation, most, False))):
            found[f"mixed over full: {size} {computation}"] = mean / full
        if warmup == most and computation == "backward" and (forward := means.get((size, "forward", most, mixed))):
            found[f"backward over forward: {size}, {precision(mixed)}"] = mean / forward
    return dict(sorted(found.items()))


SHOWN = (0, 1, 2, 3, 4, 11, 12, 13)  # the columns that 80 characters hold, for the terminal; the report has all
HEADER = ["size", "computation", "warm", "mixed", "mean, s", "median", "std", "min", "max", "total", "tokens/s", "TFLOP/s",
          "of matmul", "MB"]


def cells(row: Row) -> list[str]:
    """A row as text, in the order of HEADER."""
    start = [row.size, row.computation, str(row.warmup_steps), "yes" if row.mixed_precision else "no"]
    if row.error:
        return [*start, row.error, *[""] * (len(HEADER) - 5)]
    seconds = (row.mean_s, row.median_s, row.std_s, row.min_s, row.max_s, row.total_s)
    return [*start, *(f"{s:.4g}" for s in seconds), f"{row.tokens_per_sec:,.0f}", f"{row.tflops:.2f}", f"{row.utilization:.0%}",
            f"{row.peak_memory_mb:,.0f}"]


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Bars of the mean seconds, one for each row, blue in full and orange in mixed precision."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.28 * len(rows)), layout="constrained")
    names = [f"{row.size} {row.computation}, warm-up {row.warmup_steps}, {precision(row.mixed_precision)}" for row in rows]
    bars = axes.barh(names, [row.mean_s for row in rows], xerr=[row.std_s for row in rows],
                     color=[ORANGE if row.mixed_precision else BLUE for row in rows])
    axes.bar_label(bars, [f"{row.mean_s:.3g}" for row in rows], padding=6, fontsize=8)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel("seconds per pass: mean, and one standard deviation")
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_scan(name: str, series: dict[str, list[tuple[int, Row]]], path: Path) -> None:
    """Tokens/s and peak memory over the scanned values, a line for each model and precision."""
    plt = pyplot()
    figure, both = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes in both:
        axes.set_prop_cycle(color=COLOURS, marker=MARKERS)
    for label, points in series.items():
        values = [value for value, _ in points]
        both[0].plot(values, [row.tokens_per_sec for _, row in points], label=label)
        both[1].plot(values, [row.peak_memory_mb for _, row in points], label=label)
    for axes, what in zip(both, ("tokens/s", "peak memory, MB"), strict=True):
        axes.set(xlabel=name, ylabel=what)
        axes.set_xscale("log", base=2)
        ticks = sorted({value for points in series.values() for value, _ in points})
        axes.set_xticks(ticks, [str(value) for value in ticks])
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    both[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# ---- what a call does


def time_grid(jobs: Sequence[Job], folder: Path, compared: str | None, theirs: Means, their_settings: dict[str, Any]) -> None:
    """The table of times, its files and its picture; beside those of the file `compared`."""
    rows: list[Row] = []
    for found in run_all(jobs):
        rows = sorted([*rows, *found], key=lambda row: (bool(row.error), row.mean_s))
        write_results(rows, folder)  # at once: what is measured stays, whatever follows
    show("seconds per pass", [HEADER[i] for i in SHOWN], [[cells(row)[i] for i in SHOWN] for row in rows])
    notes = sorted({row.settings["notes"] for row in rows if row.settings.get("notes")})
    print("".join(f"note: {note}\n" for note in notes), end="")
    lines = ["# Forward, backward and both", "", about_machine(rows), "", *markdown_table(HEADER, [cells(row) for row in rows]), "",
             "Rows that differ in warm-up only are of the same passes: one leaves out the first of them. std: the population's. "
             "MB: peak memory, of the GPU's tensors on CUDA, else of the process.", *(f"Note: {note}." for note in notes)]
    measured = [row for row in rows if not row.error]
    if measured:
        plot_rows(measured, folder / "times.png")
        lines += ["", "![seconds per pass](times.png)"]
    ours = {row.key: row.mean_s for row in measured}
    if shared := [key for key in ours if key in theirs]:
        header = ["size", "computation", "warm", "mixed", "mean here, s", "there, s", "here / there"]
        body = [[size, computation, str(warmup), "yes" if mixed else "no", f"{ours[key]:.4g}", f"{theirs[key]:.4g}",
                 f"{ours[key] / theirs[key]:.3f}"] for key in shared for size, computation, warmup, mixed in [key]]
        show(f"beside {compared}", header, body)
        lines += ["", f"## Beside {compared}", "", *markdown_table(header, body)]
        about = measured[0].settings
        for name in ("batch_size", "seq_len", "vocab_size", "compile", "flash", "fp16", "device"):
            if str(their_settings.get(name, about[name])).lower() != str(about[name]).lower():
                lines += ["", f"{name} differs: {about[name]} here, {their_settings[name]} there."]
                print(f"note: {lines[-1]}")
        ours_within, theirs_within = ratios(ours), ratios(theirs)
        within = [[name, f"{ours_within[name]:.3f}", f"{theirs_within[name]:.3f}"] for name in ours_within if name in theirs_within]
        if within:
            show("ratios within each", ["ratio", "here", "there"], within)
            lines += ["", *markdown_table(["ratio", "here", "there"], within)]
    elif compared:
        print(f"note: no row of {compared} could be measured")
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def about_machine(rows: Sequence[Row]) -> str:
    """Where and when the rows were measured."""
    about = next((row.settings for row in rows if not row.error), rows[0].settings)
    return (f"{machine()}; device {about.get('device', 'not reached')}, {about['threads']} threads, torch {about['torch']}, "
            f"commit {git_commit()}, {datetime.date.today()}.")


def scan(options: BenchOptions, folder: Path) -> None:
    """Tokens/s and memory over the values of one option, up to out of memory."""
    assert options.scan is not None
    name, _, values = options.scan.partition("=")
    given = options.model_fields_set
    computations = options.computation if "computation" in given else ("training_step",)
    warmup = options.warmup_steps[0] if "warmup_steps" in given else 1
    planned = [(value, jobs_of(options, computations, **{name: value})) for value in sorted({int(v) for v in values.split(",")})]
    series: dict[str, list[tuple[int, Row]]] = {}
    rows: list[Row] = []
    ended: dict[str, Row] = {}  # no larger value is tried on these
    for value, jobs in planned:  # every value was checked before the first run
        for job in jobs:
            label = f"{job.size} {job.computation}, {precision(is_mixed(job.config))} precision"
            if label in ended:
                continue
            row = run(dataclasses.replace(job, warmup_steps=(warmup,)))[0]
            rows.append(row)
            write_results(rows, folder)
            if row.error:
                ended[label] = row
                print(f"{label}: stopped at {name} {value}: {row.error}", flush=True)
            else:
                series.setdefault(label, []).append((value, row))
                print(f"{label}: {name} {value}: {row.tokens_per_sec:,.0f} tokens/s, {row.peak_memory_mb:,.0f} MB", flush=True)
    if not series:
        raise UserError(f"--scan {options.scan}: nothing could be measured: {rows[0].error}")
    header = ["", name, "tokens/s", "MB", "TFLOP/s", "of matmul"]
    body = [[label, str(value), f"{row.tokens_per_sec:,.0f}", f"{row.peak_memory_mb:,.0f}", f"{row.tflops:.2f}",
             f"{row.utilization:.0%}"] for label, points in series.items() for value, row in points]
    show(f"over {name}", header, body)
    plot_scan(name, series, folder / "scan.png")
    ends = [f"{label}: {row.error} at {row.settings[name]}." for label, row in ended.items()]
    (folder / "scan.md").write_text("\n".join([f"# Over {name}", "", about_machine(rows), "", *markdown_table(header, body), "",
                                               *ends, "![over the values](scan.png)"]) + "\n")


def inspect(options: BenchOptions, folder: Path) -> None:
    """Breakdown, trace and memory snapshot of each model, each in a fresh process."""
    lines = ["# Where a training step's time goes", ""]
    for size, config in job_configs(options):
        title = f"{size}, {precision(is_mixed(config))} precision, {config.batch_size} x {config.seq_len} tokens"
        found, error = in_fresh_process(inspect_model, options, size, config, title, folder)
        if error:
            print(f"{title}: {error}")
        lines += found or [f"## {title}", "", error, ""]
        (folder / "parts.md").write_text("\n".join(lines))


def inspect_model(options: BenchOptions, size: str, config: Config, title: str, folder: Path) -> list[str]:
    """What `inspect` prints and writes of one model; returns its part of the report."""
    label = f"{size}_{precision(is_mixed(config))}"
    work = Workload(config)
    for note in work.notes:
        print(f"note: {note}")
    about = settings(Job(size, config, "training_step", (0,), 1)) | {"device": device_name(work.device)}
    lines = [f"## {title}", "", about_machine([Row(size, "training_step", 0, is_mixed(config), settings=about)]), ""]
    if options.memory:
        snapshot(work, folder / f"memory_{label}.pickle")
    if options.breakdown:
        if config.compile:
            print("note: the breakdown is of the uncompiled model: compiled, its parts are fused")
        next_batch, source = batches_of(config, work) if options.config else (work.random_batch, "random tokens")
        parts = break_down(work, next_batch, options.steps)
        header = ["part", "ms", "share", "TFLOP/s"]
        body = [[f"  of which {p.part.removesuffix(', backward')}" if p.part.endswith(", backward") else p.part, f"{p.ms:.1f}",
                 f"{p.share:.1%}", "" if math.isnan(p.tflops) else f"{p.tflops:.2f}"] for p in parts]
        show(f"{title}; data: {source}", header, body)
        lines += [f"Medians of {options.steps} steps of the uncompiled model. Data: {source}, read while the step waits; training "
                  "reads it ahead.", "", *markdown_table(header, body), ""]
    if options.trace:
        if work.device.type == "mps":
            print("note: the trace has the CPU's side only: PyTorch's profiler does not see the Apple GPU")
        operators = trace(work, folder / f"trace_{label}.json.gz")
        header = ["operator", "calls", "ms", "share"]
        body = [[name[:60], f"{calls:,}", f"{ms:.1f}", f"{share:.1%}"] for name, calls, ms, share in operators]
        show(f"{title}: top operators", header, body)
        lines += [*markdown_table(header, body), ""]
    return lines


def main(options: BenchOptions) -> None:
    """Do what the options ask for. Raises UserError, for a mistake before anything is run, and OSError."""
    jobs = jobs_of(options, options.computation)
    device = choose_device(jobs[0].config.device)
    if options.memory and device.type != "cuda":
        raise UserError(f"--memory: needs CUDA, the device is {device.type}; leave it out")
    theirs, their_settings = read_results(Path(options.compare)) if options.compare else ({}, {})
    wanted = {(job.size, job.computation, warmup, is_mixed(job.config)) for job in jobs for warmup in job.warmup_steps}
    if options.compare and not wanted & theirs.keys():
        have = ", ".join(sorted({f"{size} {computation}" for size, computation, *_ in theirs})) or "no finished run"
        raise UserError(f"{options.compare}: has none of the rows to be measured; it has {have}")
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    place = Path(options.log_dir) / "bench"
    folder = next(path for n in itertools.count() if not (path := place / (f"{now}.{n}" if n else now)).exists())
    folder.mkdir(parents=True)
    inspected = options.breakdown or options.trace or options.memory
    if inspected:
        inspect(options, folder)
    if options.scan:
        scan(options, folder)
    if not (inspected or options.scan):
        time_grid(jobs, folder, options.compare, theirs, their_settings)
    print(f"{folder}/ has {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    try:
        main(OPTIONS)
    except UserError as error:
        exit_with(error)
    except OSError as error:
        exit_with(UserError(f"{error.filename or OPTIONS.log_dir}: {error.strerror or error}"), status=1)
    except KeyboardInterrupt:
        exit_with(UserError("interrupted; what was measured is kept"), status=130)
