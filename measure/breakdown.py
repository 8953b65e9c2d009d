"""Where a training step's time and memory go: its parts, its operators, its allocations."""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from config import Config
from data.token_file import TokenFileError
from measure.tables import about_machine, precision
from measure.timing import Clock, in_fresh_process, is_mixed, set_up, settings
from model import GPT, Block
from runtime.device import device_name, synchronize
from runtime.files import write_whole
from runtime.report import Column, field, flops_rate, items, markdown_table, print_table
from train import Batches, Run, train_step

# ---- the parts of a step


class Part(NamedTuple):
    """A part of a training step."""

    part: str
    ms: float
    share: float
    tflops: float  # NaN where it has no matmuls


class Marks:
    """Adds the time since the last mark to a part, waiting for the device at each."""

    def __init__(self, device: torch.device, clock: Clock):
        self.device, self.clock = device, clock

    def start(self) -> None:
        """Forget all times; the first part begins now."""
        self.seconds: dict[str, float] = {}  # by part, in the order of their first marks
        synchronize(self.device)
        self.last = self.clock()

    def mark(self, part: str) -> None:
        """Count the time since the last mark as the part's."""
        synchronize(self.device)
        now = self.clock()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now

    def batches(self, batches: Batches) -> Batches:
        """Yield the batches, and mark the time that each one takes as that of the data."""
        for batch in batches:
            self.mark("data")
            yield batch


@contextlib.contextmanager
def marked(model: GPT, marks: Marks) -> Iterator[None]:
    """Mark the parts of the model's forward and backward passes while entered.

    The residual stream runs through all parts: a part's forward ends where the stream has its
    result, its backward where the gradient reaches the stream before it. So the norm before
    attention or MLP and the sum after it belong to them.
    """

    def forward_ends(part: str) -> Callable[..., None]:
        return lambda *_: marks.mark(part)

    def backward_ends(part: str) -> Callable[..., None]:
        def watch(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
            inputs[0].register_hook(lambda _: marks.mark(f"{part}, backward"))

        return watch

    parts = model.transformer
    handles = [parts.h[0].register_forward_pre_hook(forward_ends("embedding"))]
    for block in parts.h:
        assert isinstance(block, Block)
        handles += [
            block.register_forward_pre_hook(backward_ends("attention")),
            block.ln_2.register_forward_pre_hook(forward_ends("attention")),
            block.ln_2.register_forward_pre_hook(backward_ends("MLP")),
            block.register_forward_hook(forward_ends("MLP")),
        ]
    handles += [
        parts.ln_f.register_forward_pre_hook(backward_ends("head and loss")),
        model.register_forward_hook(forward_ends("head and loss")),
    ]
    handles += [
        embedding.weight.register_post_accumulate_grad_hook(forward_ends("embedding, backward"))
        for embedding in (parts.wte, parts.wpe)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def part_flops(config: Config, tokens: int) -> dict[str, float]:
    """Return the FLOPs of the matmuls in each part, forward and backward, which has twice those."""
    C, L = config.n_embd, config.n_layer
    forward: dict[str, float] = {
        "attention": tokens * L * (2 * 4 * C * C + 4 * config.seq_len * C),
        "MLP": tokens * L * 2 * 8 * C * C,
        "head and loss": tokens * 2 * C * config.vocab_size,
    }
    return forward | {f"{part}, backward": 2 * flops for part, flops in forward.items()}


def break_down(run: Run, steps: int, clock: Clock = time.perf_counter) -> list[Part]:
    """Return the parts of a step of the uncompiled model, medians over `steps` after one step more.

    The part `backward` is all of the backward pass; the parts after it are what it consists of.
    """
    marks = Marks(run.world.device, clock)
    plain = dataclasses.replace(run, model=run.state.model, batches=marks.batches(run.batches))
    of_steps = []  # seconds by part
    with marked(run.state.model, marks):
        for _ in range(1 + steps):
            marks.start()
            train_step(plain, 1)
            marks.mark("optimizer")
            of_steps.append(marks.seconds)
    names = list(marks.seconds)
    ms = {name: 1e3 * statistics.median(step[name] for step in of_steps[1:]) for name in names}
    total = sum(ms.values()) or 1.0
    flops = part_flops(run.config, run.config.batch_size * run.config.seq_len)
    of_backward = [name for name in names if name.endswith(", backward")]
    for quantity in (ms, flops):
        quantity["backward"] = sum(quantity.get(name, 0) for name in of_backward)
    forward = ["data", "embedding", "attention", "MLP", "head and loss"]
    return [
        Part(
            name, ms[name], ms[name] / total, flops.get(name, math.nan) / max(ms[name], 1e-9) / 1e9
        )
        for name in [*forward, "backward", *of_backward, "optimizer"]
    ]


def part_name(part: Part) -> str:
    """Return the part's name, indented if it is one of the backward pass."""
    name = part.part.removesuffix(", backward")
    return name if name == part.part else f"  of which {name}"


PART = [
    Column("part", part_name),
    field("ms", "ms", ".1f"),
    field("share", "share", ".1%"),
    Column("FLOP rate", lambda part: "" if math.isnan(part.tflops) else flops_rate(part.tflops)),
]


# ---- operators and memory


OPERATOR = items("operator", "calls", "ms", "share")  # ms: in itself, not in those that it calls


def trace(run: Run, path: Path, rows: int = 12) -> list[tuple[str, ...]]:
    """Write a Chrome trace of a step, after two of warm-up; returns rows of its operators."""
    device = run.world.device
    for _ in range(2):
        train_step(run, 1)
    with torch.profiler.profile() as profile:
        train_step(run, 1)
        synchronize(device)
    profile.export_chrome_trace(str(path))
    # an operator has the time of the kernels that it started; the kernels are listed again as
    # events of the device
    attribute = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    operators = [
        (getattr(event, attribute) / 1e3, event.count, event.key)
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CPU
    ]
    total = sum(ms for ms, *_ in operators) or 1.0
    return [
        (f"{name:.60}", f"{calls:,}", f"{ms:.1f}", f"{ms / total:.1%}")
        for ms, calls, name in sorted(operators, reverse=True)[:rows]
    ]


def snapshot(run: Run, path: Path) -> None:
    """Write every allocation of a step as a snapshot of CUDA's memory."""
    torch.cuda.memory._record_memory_history()
    train_step(run, 1)
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


# ---- of each model


def inspect_models(
    wanted: Collection[str],
    models: Sequence[tuple[str, Config]],
    folder: Path,
    *,
    steps: int,
    from_corpus: bool,
) -> None:
    """Inspect each named model in a fresh process, and write parts.md with the tables.

    `wanted`: any of breakdown, trace, memory. `steps` and `from_corpus` (else random tokens) are
    the breakdown's.
    """
    lines = ["# Where a training step's time goes", ""]
    for name, config in models:
        label = f"{name}_{precision(is_mixed(config))}"
        title = f"{name}, {precision(is_mixed(config))} precision, {config.batch_size} x "
        title += f"{config.seq_len} tokens"
        found, error = in_fresh_process(
            inspect_model, wanted, config, label, title, folder, steps, from_corpus
        )
        if error:
            print(f"{title}: {error}")
        lines += [f"## {title}", "", *(found or [error]), ""]
        write_whole(folder / "parts.md", "\n".join(lines))


def inspect_model(
    wanted: Collection[str],
    config: Config,
    label: str,
    title: str,
    folder: Path,
    steps: int,
    from_corpus: bool,
) -> list[str]:
    """Print and write what `inspect_models` says of one model; returns its part of the report.

    Raises UserError for what this device cannot do.
    """
    data = f"{config.data_dir}/{config.dataset}"
    try:
        run = set_up(config, from_corpus=from_corpus and "breakdown" in wanted)
    except TokenFileError as error:
        print(f"note: data is random tokens: {error}")
        run, from_corpus = set_up(config), False
    for note in run.notes:
        print(f"note: {note}")
    device = run.world.device
    lines = [about_machine(settings(run.config) | {"device": device_name(device)}), ""]
    if "memory" in wanted:
        snapshot(run, folder / f"memory_{label}.pickle")
    if "breakdown" in wanted:
        if config.compile:
            print("note: the breakdown is of the uncompiled model: compiled, its parts are fused")
        parts = break_down(run, steps)
        print_table(f"{title}; data: {data if from_corpus else 'random tokens'}", PART, parts)
        lines += [f"Medians of {steps} steps of the uncompiled model.", ""]
        lines += [*markdown_table(PART, parts), ""]
    if "trace" in wanted:
        if device.type == "mps":
            print("note: the trace has no Apple GPU: PyTorch's profiler does not see it")
        operators = trace(run, folder / f"trace_{label}.json.gz")
        print_table(f"{title}: top operators", OPERATOR, operators)
        lines += [*markdown_table(OPERATOR, operators), ""]
    return lines
