"""Where a training step's time and memory go: its parts, a trace of its operators, a snapshot of
its memory.
"""

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.tables import Row, about_machine, precision
from benchmarks.workload import Clock, Workload, in_fresh_process, is_mixed, settings
from config import Config
from data.token_file import TokenFileError
from dataloader import DataLoader, open_corpus
from model import GPT, Block
from runtime.device import device_name, synchronize
from runtime.files import write_whole
from runtime.report import Column, field, flops_rate, markdown_table, print_table

# ---- the parts of a step


@dataclasses.dataclass(frozen=True)
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
        self.seconds: dict[str, float] = {}  # by part, in the order of their first marks

    def start(self) -> None:
        """Forget all times; the first part begins now."""
        self.seconds = {}
        synchronize(self.device)
        self.last = self.clock()

    def mark(self, part: str) -> None:
        """Count the time since the last mark as the part's."""
        synchronize(self.device)
        now = self.clock()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now


@contextlib.contextmanager
def marked(model: GPT, marks: Marks) -> Iterator[None]:
    """Mark the parts of the model's forward pass, and of the backward pass through it, while
    entered.

    The residual stream runs through all parts: a part's forward ends where the stream has its
    result, its backward where the gradient reaches the stream before it. So the norm before
    attention or MLP and the sum after it belong to them.
    """

    def forward_ends(part: str) -> Callable[..., None]:
        return lambda *_: marks.mark(part)

    def backward_ends(part: str) -> Callable[..., None]:
        return lambda _, inputs: (
            inputs[0].register_hook(lambda _: marks.mark(f"{part}, backward")) and None
        )

    handles = [model.transformer.h[0].register_forward_pre_hook(forward_ends("embedding"))]
    for block in model.transformer.h:
        assert isinstance(block, Block)
        handles += [
            block.register_forward_pre_hook(backward_ends("attention")),
            block.ln_2.register_forward_pre_hook(forward_ends("attention")),
            block.ln_2.register_forward_pre_hook(backward_ends("MLP")),
            block.register_forward_hook(forward_ends("MLP")),
        ]
    handles += [
        model.transformer.ln_f.register_forward_pre_hook(backward_ends("head and loss")),
        model.register_forward_hook(forward_ends("head and loss")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def part_flops(config: Config, tokens: int) -> dict[str, float]:
    """Floating-point operations of the matrix products in each part's forward pass; the backward
    pass has twice as many.
    """
    C, L = config.n_embd, config.n_layer
    return {
        "attention": tokens * L * (2 * 4 * C * C + 4 * config.seq_len * C),
        "MLP": tokens * L * 2 * 8 * C * C,
        "head and loss": tokens * 2 * C * config.vocab_size,
    }


def break_down(
    work: Workload,
    next_batch: Callable[[], tuple[Tensor, Tensor]],
    steps: int,
    clock: Clock = time.perf_counter,
) -> list[Part]:
    """The parts of a training step of the uncompiled model, medians over `steps` after one step of
    warm-up.

    `next_batch` gives tokens and targets, each (B, T) int64, on the device. The part `backward` is
    all of the backward pass; the parts after it say what each part takes of it.
    """
    marks = Marks(work.device, clock)
    of_steps = []  # seconds by part
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
            of_steps.append(marks.seconds)
    seconds = {
        part: statistics.median(of_step[part] for of_step in of_steps[1:]) for part in of_steps[-1]
    }
    total = sum(seconds.values())
    flops = part_flops(work.config, work.tokens)
    flops |= {f"{part}, backward": 2 * count for part, count in flops.items()}
    backward = [part for part in seconds if part.endswith(", backward")]
    seconds["backward"], flops["backward"] = (
        sum(seconds[part] for part in backward),
        sum(flops.get(part, 0) for part in backward),
    )
    order = [
        "data",
        "embedding",
        "attention",
        "MLP",
        "head and loss",
        "backward",
        *backward,
        "optimizer",
    ]
    return [
        Part(
            part,
            seconds[part] * 1e3,
            seconds[part] / total if total else 0.0,
            flops[part] / seconds[part] / 1e12 if part in flops and seconds[part] else math.nan,
        )
        for part in order
    ]


def batches_of(config: Config, work: Workload) -> tuple[Callable[[], tuple[Tensor, Tensor]], str]:
    """A function that gives the next batch of the config's corpus on the device, each (B, T) int64,
    and the corpus's name.

    Random tokens, and a line printed that says why, where there is no such corpus.
    """
    corpus = Path(config.data_dir) / config.dataset
    try:
        stream, _ = open_corpus(
            corpus, config.seq_len, work.raw_model.config.n_vocab, config.val_fraction
        )
        loader = DataLoader(stream, config.batch_size, seed=config.seed, shuffle=config.shuffle)
    except TokenFileError as error:
        print(f"note: data is random tokens: {error}")
        return work.random_batch, "random tokens"
    step = itertools.count(1)

    def next_batch() -> tuple[Tensor, Tensor]:
        x, y = loader.batch(next(step))
        return x.to(work.device), y.to(work.device)

    return next_batch, str(corpus)


PART = [
    Column(
        "part",
        lambda part: (
            f"  of which {name}"
            if (name := part.part.removesuffix(", backward")) != part.part
            else name
        ),
    ),
    field("ms", "ms", ".1f"),
    field("share", "share", ".1%"),
    Column("FLOP rate", lambda part: "" if math.isnan(part.tflops) else flops_rate(part.tflops)),
]


# ---- operators and memory


class Operator(NamedTuple):
    """What a trace says of an operator."""

    name: str
    calls: int
    ms: float  # in the operator itself, not in those that it calls
    share: float  # of all operators' time


OPERATOR = [
    field("operator", "name", ".60"),
    field("calls", "calls", ","),
    field("ms", "ms", ".1f"),
    field("share", "share", ".1%"),
]


def trace(work: Workload, path: Path, rows: int = 12) -> list[Operator]:
    """Profile one training step, after two of warm-up, into a Chrome trace; returns the operators
    that take longest.
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
    # an operator has the time of the kernels that it started; the kernels are listed again as
    # events of the device
    operators = [
        (
            event.key,
            event.count,
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3,
        )
        for event in profiler.key_averages()
        if event.device_type == torch.autograd.DeviceType.CPU
    ]
    total = sum(ms for *_, ms in operators) or 1.0
    return [
        Operator(name, calls, ms, ms / total)
        for name, calls, ms in sorted(operators, key=lambda row: -row[2])[:rows]
    ]


def snapshot(work: Workload, path: Path) -> None:
    """Write every allocation of a training step as a snapshot of CUDA's memory."""
    torch.cuda.memory._record_memory_history()
    work.clear()
    work.training_step()
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


# ---- of each model


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to find out about a model."""

    breakdown: bool
    trace: bool
    memory: bool
    steps: int  # of the breakdown
    from_corpus: bool  # the breakdown reads the config's corpus; else random tokens


def inspect_models(wanted: Wanted, models: Sequence[tuple[str, Config]], folder: Path) -> None:
    """Breakdown, trace and memory snapshot of each named model, each in a fresh process, and
    parts.md with the tables.
    """
    lines = ["# Where a training step's time goes", ""]
    for name, config in models:
        title = f"{name}, {precision(is_mixed(config))} precision, {config.batch_size} x {config.seq_len} tokens"
        found, error = in_fresh_process(inspect_model, wanted, name, config, title, folder)
        if error:
            print(f"{title}: {error}")
        lines += found or [f"## {title}", "", error, ""]
        write_whole(folder / "parts.md", "\n".join(lines))


def inspect_model(wanted: Wanted, name: str, config: Config, title: str, folder: Path) -> list[str]:
    """What `inspect_models` prints and writes of one model; returns its part of the report.

    Raises UserError for what this device cannot do.
    """
    label = f"{name}_{precision(is_mixed(config))}"
    work = Workload(config)
    for note in work.notes:
        print(f"note: {note}")
    about = settings(work.config) | {"device": device_name(work.device)}
    lines = [
        f"## {title}",
        "",
        about_machine([Row(name, "training_step", 0, is_mixed(config), settings=about)]),
        "",
    ]
    if wanted.memory:
        snapshot(work, folder / f"memory_{label}.pickle")
    if wanted.breakdown:
        if config.compile:
            print("note: the breakdown is of the uncompiled model: compiled, its parts are fused")
        next_batch, source = (
            batches_of(work.config, work)
            if wanted.from_corpus
            else (work.random_batch, "random tokens")
        )
        parts = break_down(work, next_batch, wanted.steps)
        print_table(f"{title}; data: {source}", PART, parts)
        lines += [
            f"Medians of {wanted.steps} steps of the uncompiled model. Data: {source}, read "
            f"while the step waits; training "
            "reads it ahead.",
            "",
            *markdown_table(PART, parts),
            "",
        ]
    if wanted.trace:
        if work.device.type == "mps":
            print(
                "note: the trace has the CPU's side only: PyTorch's profiler does not see the "
                "Apple GPU"
            )
        operators = trace(work, folder / f"trace_{label}.json.gz")
        print_table(f"{title}: top operators", OPERATOR, operators)
        lines += [*markdown_table(OPERATOR, operators), ""]
    return lines
