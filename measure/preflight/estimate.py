"""Estimate a run's time and disk before its first step, for check.py."""

import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from checkpoint.files import write_tensors
from config import LEAST_MFU, MFU, MOST_MFU, Config
from data.prepare import prepare_if_missing
from dataloader import open_corpus
from model import GPT, GPTConfig
from optimizer import make_optimizers
from run.expected import ExpectedLosses
from run.log import UNKNOWN
from run.save import checkpoint_bytes
from run.state import State
from runtime.console import Console
from runtime.device import device_name, matmul_tflops
from runtime.errors import UserError
from runtime.files import sha256
from runtime.report import about, flops_rate
from runtime.world import World

MB = 2**20


class Estimated(NamedTuple):
    """Results of an estimate that the checks need."""

    step_seconds: float  # nan if the device could not be measured
    disk: tuple[bool, str]  # from describe_disk


def estimate(config: Config, world: World) -> Estimated:
    """Print the run's tokens, compute, hours on this device, epochs and disk.

    Measures device and disk for some seconds; of the run it creates `log_dir` and a small corpus
    alone. For rank 0. Raises UserError for a bad corpus. A missing corpus has no epochs, and a
    device that is too busy to be measured no hours.
    """
    Path(config.log_dir).mkdir(parents=True, exist_ok=True)
    rate = matmul_tflops(world.device, config.matmul_dtype, seconds=3.0)
    return print_estimate(config, world, rate)


def print_estimate(config: Config, world: World, rate: float | None) -> Estimated:
    """Do what `estimate` does, on a device whose large matmuls reach `rate` TFLOP/s."""
    state = without_data(config)
    model, size = state.model, checkpoint_bytes(state)
    ranks, per_step = world.world_size, config.tokens_per_step(world.world_size)
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
    disk = describe_disk(config, size)
    print(disk[1])
    if config.keep_last and rate:
        save_seconds = size / write_rate(config.log_dir, size)
        print(describe_saving(save_seconds, step_seconds))
    return Estimated(step_seconds, disk)


def without_data(config: Config) -> State:
    """Return the state of a run before its first step, of tensors that have shapes but no data."""
    with torch.device("meta"):
        model = GPT(GPTConfig.of(config))
    return State(model, make_optimizers(model, config), torch.amp.GradScaler(enabled=False))


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
        with Console():
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
    best = 1 if config.eval_every else 0  # the best one so far is kept too
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
