"""Break down a training step's time and memory by parts, operators and allocations."""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch

from config import Config
from measure.interleaved.process import in_fresh_process
from measure.profile.tables import about_machine
from measure.profile.timing import set_up
from measure.report.tables import markdown_table
from model import GPT, Block
from runtime.device import choose_device, device_name, synchronize
from runtime.errors import TrainingError, UserError
from runtime.files import write_atomic
from train import Run, train_step

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


def break_down(run: Run, steps: int) -> list[tuple[str, float, float]]:
    """Time the parts of a step of the uncompiled model: medians over `steps`, after one more step.

    Returns each part's name, milliseconds and share. The part `backward` is the whole backward
    pass; the parts after it are its own. The model keeps the hooks that time them.
    """
    # seconds by part, in the order of their first marks
    of_steps = list[defaultdict[str, float]]()
    last = perf_counter()

    def mark(part: str) -> None:
        """Count the time since the last mark as the part's; waits for the device."""
        nonlocal last
        synchronize(run.world.device)
        before, last = last, perf_counter()
        of_steps[-1][part] += last - before

    plain = dataclasses.replace(run, model=run.state.model)
    mark_parts(run.state.model, mark)
    for _ in range(1 + steps):
        of_steps.append(defaultdict(float))
        train_step(plain, 1)
        mark("optimizer")
    names = list(of_steps[-1])
    ms = {name: 1e3 * statistics.median(step[name] for step in of_steps[1:]) for name in names}
    total = sum(ms.values())
    of_backward = [name for name in names if name.startswith(OF_BACKWARD)]
    ms["backward"] = sum(ms[name] for name in of_backward)
    names.insert(names.index(of_backward[0]), "backward")
    return [(name, ms[name], ms[name] / total) for name in names]


# ---- operators and memory


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


def snapshot(run: Run, path: Path) -> None:
    """Write every allocation of a step as a snapshot of CUDA's memory."""
    torch.cuda.memory._record_memory_history()
    train_step(run, 1)
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


# ---- each model in its own process


def inspect_models(
    wanted: Sequence[str], models: Sequence[tuple[str, Config]], folder: Path, steps: int
) -> None:
    """Inspect each named model in a fresh process, and write parts.md with the tables.

    `wanted`: any of breakdown, trace, memory. `steps`: for the breakdown. Raises TrainingError if
    no model can be measured.
    """
    text, is_measured = "# Where a training step's time goes\n", False
    for name, config in models:
        bits = "full" if config.matmul_dtype == "float32" else "mixed"
        title = f"\n## {name}, {bits} precision, {config.batch_size} x {config.seq_len} tokens\n"
        print(title, flush=True)
        call, label = "measure.profile.breakdown:inspect_model", f"{name}_{bits}"
        found, error = in_fresh_process(call, wanted, config, folder, label, steps)
        section = found or error
        print(section)
        is_measured |= not error
        text += f"{title}\n{section}\n"
        write_atomic(folder / "parts.md", text)
    if not is_measured:
        raise TrainingError(f"nothing could be measured: {error}")


def inspect_model(
    wanted: Sequence[str], config: Config, folder: Path, label: str, steps: int
) -> str:
    """Inspect one model; returns its section in the report.

    Files are named after `label`. Raises UserError for options that this device lacks.
    """
    if "memory" in wanted and choose_device(config.device).type != "cuda":
        raise UserError("--memory: only CUDA records its allocations; leave it out here")
    if wanted == ["breakdown"]:  # is of the uncompiled model
        config = config.with_options(compile=False)
    run = set_up(config)
    about = {"device": device_name(run.world.device), "threads": torch.get_num_threads()}
    lines = [*run.notes, about_machine(about), ""]
    if "memory" in wanted:
        snapshot(run, folder / f"memory_{label}.pickle")
    if "trace" in wanted:
        lines += ["```", trace(run, folder / f"trace_{label}.json.gz"), "```", ""]
    if "breakdown" in wanted:  # last, as its hooks stay
        lines += [f"Medians of {steps} steps of the uncompiled model.", ""]
        parts = break_down(run, steps)
        cells = [[name, f"{ms:.1f}", f"{share:.1%}"] for name, ms, share in parts]
        lines += [markdown_table(["part", "ms", "share"], cells), ""]
    return "\n".join(lines)
