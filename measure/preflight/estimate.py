"""Estimate a run's time, memory and disk, for check.py.

Memory is counted, not guessed: PyTorch's MemTracker follows every tensor of two training steps of
train.py, on fake tensors, which have shapes but no data. Nothing is allocated.
"""

import bisect
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoint.files import MODEL, OPTIMIZER, write_tensors
from checkpoint.weights import adopt_architecture
from config import LEAST_MFU, MFU, MOST_MFU, Config
from data.prepare import prepare_if_missing
from dataloader import open_corpus
from inference.expected import ExpectedLosses
from kernels.loss import summed_loss
from model import GPT
from runtime.device import choose_device, device_name, matmul_tflops
from runtime.errors import UserError
from runtime.files import sha256
from runtime.launch import launch
from runtime.report import UNKNOWN, about, available_memory, flops_rate
from runtime.world import World
from train import Batches, Run, setup, train_step

MB = 2**20
# A process on a CPU takes ALLOCATOR times its tensors, as the C library keeps gaps between buffers.
# It loads CODE after the model is built. Both are fitted to the uncompiled runs in
# logs/results/epyc-avx512bf16-2cores/estimate.txt: off by 15% at most.
ALLOCATOR, CODE = 1.5, 100 * MB
WORKSPACE = 32 * MB  # cuBLAS's on a GPU; 8 MB before Hopper
# The allocator may lose this share of a GPU's free memory in gaps; not measured.
MARGIN = 0.05
# A compiled run's activations as a share of an uncompiled run's, with recompute_cheap and without:
# the results of fused operations are not stored. With it measured runs had 0.26 (bf16) to 0.65
# (fp32), so the peak may be off by a third. Without it nothing was measured: Inductor's plan of
# memory for an H200 has 0.57 (gpt2_124m at batch_size 64, 34.5 GiB), 0.68 (gpt2_124m_fast) and 0.82
# (gpt2_124m in fp32), extrapolated from 2 and 4 layers. So 0.7 gives 42.2 GiB for the first.
COMPILED = {True: 0.4, False: 0.7}


class Estimated(NamedTuple):
    """Results of an estimate that the checks need."""

    step_seconds: float  # nan if the device could not be measured
    disk: tuple[bool, str]  # from describe_disk


def estimate(config: Config, world: World) -> Estimated:
    """Print the run's tokens, compute, hours on this device, epochs, disk and memory.

    Measures device and disk for some seconds; of the run it creates `log_dir` and a small corpus
    alone. For rank 0. Raises UserError for a precision that this device lacks, and a bad corpus. A
    missing corpus has no epochs, and a device that is too busy to be measured no hours.
    """
    Path(config.log_dir).mkdir(parents=True, exist_ok=True)
    model, moments = trace(config, world)
    ranks, per_step = world.world_size, config.tokens_per_step(world.world_size)
    rate = matmul_tflops(world.device, config.matmul_dtype, seconds=3.0)
    flops_per_step = per_step * model.flops_per_token(config.seq_len)
    step_seconds = flops_per_step / (rate * 1e12 * ranks * MFU) if rate else math.nan
    if config.max_minutes and rate:
        steps = math.ceil(60 * config.max_minutes / step_seconds)
        config = config.with_options(max_steps=steps, max_minutes=None)
        print(f"note: at {MFU:.0%} MFU max_minutes allows {steps:,} steps, assumed in these lines")
    for note in config.notes():
        print(f"note: {note}")
    tokens = config.max_steps * per_step
    print(
        f"{config.run_name}: {model.num_parameters():,} parameters, on {ranks} x "
        f"{device_name(world.device)}"
    )
    print(f"tokens:  {tokens:,} in {config.max_steps:,} steps of {per_step:,}")
    print(describe_corpus(config, tokens, model.config.n_vocab))
    print(f"compute: {config.max_steps * flops_per_step:.3g} FLOPs, forward and backward")
    print(describe_hours(config, rate, step_seconds, per_step))
    shards = ranks if config.fsdp else 1
    size = shards * (moments["kept"].parameters + moments["kept"].optimizer)
    disk = describe_disk(config, size)
    print(disk[1])
    if config.keep_last and rate:
        save_seconds = size / write_rate(config.log_dir, size)
        print(describe_saving(save_seconds, step_seconds))
    print_memory(config, world, moments)
    return Estimated(step_seconds, disk)


def describe_hours(config: Config, rate: float | None, step_seconds: float, tokens: int) -> str:
    """Return a line on how long a run takes, if each step has `tokens`, and a matmul reaches `rate`
    TFLOP/s.
    """
    if not rate:
        return f"time:    not known: {UNKNOWN}"
    seconds = config.max_steps * step_seconds
    fastest, slowest = (about(seconds * MFU / mfu) for mfu in (MOST_MFU, LEAST_MFU))
    return (
        f"time:    about {about(seconds)}, {step_seconds:,.3f} s a step, "
        f"{tokens / step_seconds:,.0f} tokens/s, at {MFU:.0%} MFU of the {flops_rate(rate)} that a "
        f"large matmul reaches here, in {config.matmul_dtype}; measured runs had "
        f"{LEAST_MFU:.0%} to {MOST_MFU:.0%}, which would be {fastest} to {slowest}"
    )


def describe_corpus(config: Config, tokens: int, n_vocab: int) -> str:
    """Return lines on the run's epochs and losses, or how to write a corpus that is missing.

    Writes a small corpus that is missing. Raises TokenFileError for a bad corpus.
    """
    folder = Path(config.data_dir) / config.dataset
    try:
        prepare_if_missing(folder)
    except UserError as missing:
        return f"corpus:  {missing}"
    split, val = open_corpus(folder, config.seq_len, n_vocab, config.val_fraction)
    epochs = f"{tokens / split.tokens:,.2f} epochs of the {split.tokens:,} tokens of {folder}"
    more = f", which has {val.tokens:,} more for validation" if val.tokens else ""
    return f"corpus:  {epochs}{more}\n{ExpectedLosses.of(split, n_vocab).description}"


def describe_disk(config: Config, size: float) -> tuple[bool, str]:
    """Return whether checkpoints of `size` bytes fit on the disk, and a line on their space."""
    if not config.keep_last:
        return True, "disk:    no checkpoint is saved, as keep_last is 0"
    best = bool(config.eval_every)  # the best one so far is kept too
    kept = max(config.keep_last, 2)  # the last one goes once the next is complete
    needed, free = size * (kept + best), shutil.disk_usage(config.log_dir).free
    return needed < free, (
        f"disk:    {size / 1e9:,.3g} GB a checkpoint, at most {needed / 1e9:,.3g} GB "
        f"for {kept} at a time{' and the best one' if best else ''}; {free / 1e9:,.3g} GB are free "
        f"in {config.log_dir}"
    )


def write_rate(folder: str, size: float) -> float:
    """Measure the bytes/s of saving a checkpoint of `size` bytes, by a file of up to 256 MB."""
    values = torch.rand(int(min(size, 256 * MB)) // 4)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        file, start = Path(place) / "values", time.perf_counter()
        write_tensors(file, {"values": values})
        sha256(file)
        return values.nbytes / (time.perf_counter() - start)


def describe_saving(save: float, step: float) -> str:
    """Return a line on how often to save, from the seconds of a save and of a step.

    Saving more often costs time, less often loses more steps to each failure: least is lost at
    sqrt(2 x save x time between failures) (Young 1974, "A first order approximation to the optimum
    checkpoint interval").
    """
    advice = []
    for hours, often in ((1, "failure an hour"), (24, "failure a day")):
        seconds = math.sqrt(2 * save * hours * 3600)
        steps = max(1, round(seconds / step))
        advice.append(f"{seconds / 60:,.1f} minutes with a {often} (checkpoint_every {steps:,})")
    return (
        f"saving:  {save:,.2g} s a checkpoint; best is one every {', '.join(advice)}, at {MFU:.0%} "
        "MFU"
    )


# ---- memory


class Moment(NamedTuple):
    """Bytes of a rank's tensors at one moment of a training step."""

    parameters: float  # includes the model's buffers
    gradients: float
    optimizer: float  # includes other state in a checkpoint
    activations: float  # includes temporary tensors; grows with the batch
    gathered: float = 0.0  # FSDP's whole parameters

    def total(self, batches: float = 1.0) -> float:
        """Return the sum, with `batches` times the batch."""
        return sum(self) + (batches - 1) * self.activations


Moments = dict[str, Moment]  # the worst ones, by part of a step


def moment_of(
    snapshots: dict[torch.device, dict[Any, int]],
    config: Config,
    world: World,
    model: GPT,
    kept: int,
) -> Moment:
    """Return a moment of a rank of the run, from one of an uncompiled process.

    `kept`: bytes of further state, which MemTracker counts as activations. DDP keeps all gradients
    in its buckets. With FSDP a rank has 1/N of the parameters, gradients and optimizer state.
    Gathered are two blocks, the current and the next, and all parameters outside the blocks, with
    their gradients.
    """
    of = next(snapshot for at, snapshot in snapshots.items() if at.type == world.device.type)
    shards = world.world_size if config.fsdp else 1
    gradients, gathered = of["Gradient"] / shards, 0.0
    whole = 4 * model.num_parameters()
    if shards > 1:
        blocks = 4 * sum(p.numel() for p in model.transformer.h.parameters())
        gathered = 2 * (blocks / config.n_layer + whole - blocks)
    elif world.distributed:
        gradients = whole
    return Moment(
        (of["Parameter"] + of["Buffer"]) / shards,
        gradients,
        (of["Optstate"] + kept) / shards,
        (of["Activation"] + of["Temp"] - kept) * compiled_share(config, world),
        gathered,
    )


def compiled_share(config: Config, world: World) -> float:
    """Return the run's activations as a share of an uncompiled run's."""
    acting = config.on_device(world.device.type, world.world_size)
    return COMPILED[bool(acting.recompute_cheap)] if config.compile else 1.0


def print_memory(config: Config, world: World, moments: Moments) -> None:
    """Print each rank's memory, the largest batch_size, and the rank's peak, which summary.json
    calls memory_growth_mb.
    """
    device, ranks, kept = world.device, world.world_size, moments["kept"]
    worst = max(moments, key=lambda name: moments[name].total())
    tensors = moments[worst].total()
    peak = peak_bytes(moments, device)
    each = f"of each of {ranks} ranks" if ranks > 1 else "of the process"
    beside, left = "the workspace of matmuls", available_memory() / launch().local_world_size
    if device.type == "cpu":
        beside = "loaded code, and gaps between buffers, which the allocator keeps"
    elif device.type == "cuda":
        torch.cuda.empty_cache()  # frees the matrices of the timed matmuls
        left = torch.cuda.mem_get_info(device)[0] * (1 - MARGIN)
    print(
        f"memory:  {each}: {kept.parameters / MB:,.0f} MB parameters, "
        f"{moments['clipping'].gradients / MB:,.0f} MB gradients, {kept.optimizer / MB:,.0f} MB "
        f"optimizer state, {kept.activations / MB:,.0f} MB activations kept for the backward pass\n"
        f"         {tensors / MB:,.0f} MB of tensors at the worst moment, in the {worst}\n"
        f"         {(peak - tensors) / MB:,.0f} MB beside them: {beside}"
    )
    if config.compile:
        print(
            f"         compiled: activations are counted as {compiled_share(config, world)} of an "
            f"uncompiled run's, so the peak may be off by a third"
        )
    if math.isfinite(left):
        size = largest_batch(config, world, moments, left)
        fits = f"the largest batch_size that fits is {size:,}" if size else "no batch_size fits"
        print(f"batch:   {fits}, in the {left / MB:,.0f} MB that are left for a rank")
    print(f"estimated peak: {peak / MB:.0f} MB")


def peak_bytes(moments: Moments, device: torch.device, batches: float = 1.0) -> float:
    """Return the bytes that a process grows by at its worst moment, with `batches` batches."""
    tensors = max(moment.total(batches) for moment in moments.values())
    return ALLOCATOR * tensors + CODE if device.type == "cpu" else tensors + WORKSPACE


def peaks_mb(configs: Sequence[Config]) -> list[float]:
    """Estimate the peak memory in MiB of a process for each config, on one rank."""
    peaks = []
    for config in map(adopt_architecture, configs):
        world = World(choose_device(config.device))
        peaks.append(peak_bytes(trace(config, world)[1], world.device) / MB)
    return peaks


def largest_batch(config: Config, world: World, moments: Moments, left: float) -> int:
    """Return the largest batch_size whose peak is at most `left` bytes; 0 if none fits.

    With total_batch_tokens, only sizes that divide it count.
    """
    sizes: Sequence[int] = range(1, 10**9)
    if config.total_batch_tokens:
        most = config.total_batch_tokens // (config.seq_len * world.world_size)
        sizes = [size for size in range(1, most + 1) if most % size == 0]

    fitting = bisect.bisect(
        sizes, left, key=lambda size: peak_bytes(moments, world.device, size / config.batch_size)
    )
    return sizes[fitting - 1] if fitting else 0


def trace(config: Config, world: World) -> tuple[GPT, Moments]:
    """Take two steps on fake tensors, as in an uncompiled run on one rank.

    Returns the model, and the run's worst moment in each part of a step; "kept" is the end of the
    forward pass.
    """
    tracker, shape = MemTracker(), (config.batch_size, config.seq_len)
    micro_steps = min(2, config.accumulation_steps(world.world_size))  # more are like the second

    def batches() -> Batches:
        # One token, so that the worst moment of the first step is in the update.
        for size in [(1, 1)] * micro_steps + [shape] * micro_steps:
            tracker.reset_mod_stats()  # MemTracker follows one forward pass at a time
            yield torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)

    tokens = micro_steps * config.batch_size * config.seq_len
    one_rank = config.with_options(total_batch_tokens=tokens)
    with FakeTensorMode(), world.device, tracker, Numberless():
        run = fake_run(one_rank, world.device, batches())
        update = tracker.get_tracker_snapshot("peak")
        train_step(run, 2)
    model = run.state.model
    parts = tracker.memory_tracking[model].snapshots
    kept = sum(
        tensor.nbytes
        for file, tensors in run.state.tensors().items()
        if file not in (MODEL, OPTIMIZER)
        for tensor in tensors.values()
    )
    worst = {
        "forward pass": parts["Peak-Forward"][-1],
        "backward pass": parts["Peak-Backward"][-1],
        "clipping": parts["Post-Backward"][-1],  # all gradients exist
        "update": update,
        "kept": parts["Post-Forward"][-1],
    }
    return model, {name: moment_of(at, config, world, model, kept) for name, at in worst.items()}


def fake_run(config: Config, device: torch.device, batches: Batches) -> Run:
    """Set a run up on fake tensors and one rank, uncompiled, and take its first step."""
    # Fresh weights of the same architecture take as much memory and arithmetic.
    config = config.with_options(compile=False, init_from="scratch")
    run = setup(config, World(device), batches=batches)
    update_as_real(run)
    train_step(run, 1)
    return run


def update_as_real(run: Run) -> None:
    """Let a run on fake tensors update as a real one does.

    A scaler may skip its updates, and for fake tensors PyTorch does not make its own choice on a
    GPU: foreach, whose temporary tensors are as large as the weights.
    """
    run.state.scaler = torch.amp.GradScaler(enabled=False)
    for optimizer in run.state.optimizers:
        for group in optimizer.param_groups:
            group["foreach"] = run.world.device.type == "cuda" and not group.get("fused")


class Numberless(TorchDispatchMode):
    """Let fake tensors be read as numbers, and run the chunked loss's own code on them.

    Most operations only ask a fake tensor for its device: to answer at once saves a third of the
    time.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if func is summed_loss._opoverload:
            return summed_loss._init_fn(*args)  # its buffers count too
        return func(*args, **(kwargs or {}))
