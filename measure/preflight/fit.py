"""Fit a config to this device, for check.py --fit: real steps with larger and larger batches.

Each batch_size is tried in a fresh process, until one does not fit in memory. The fastest goes into
a config with the same tokens per step.
"""

import datetime
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from checkpoint.weights import adopt_architecture
from config import Config, load_config
from measure.interleaved.process import in_fresh_process
from measure.interleaved.rounds import USUAL_START, seconds_shown
from measure.preflight.checks import take_updates
from measure.preflight.estimate import MB, describe_disk, without_data
from run.save import checkpoint_bytes
from runtime.cli import find_config
from runtime.device import choose_device, device_name, peak_memory_mb
from runtime.errors import TrainingError, UserError
from runtime.files import write_atomic
from runtime.launch import launch
from runtime.report import about, available_memory
from runtime.start import set_up_process
from runtime.world import World
from train import setup

SEQUENCES = 8  # of a timed step, so that the update's share is small; at least two micro-steps
MOST = 0.9  # share of the free memory that the next batch_size may be expected to take


class Fit(NamedTuple):
    """Measured steps with one batch_size."""

    batch_size: int
    tokens_per_sec: float
    peak_mb: float
    device: str


Measure = Callable[[Config], tuple[Fit | None, str]]


def measure_size(config: Config) -> tuple[Fit | None, str]:
    """Measure the config's batch_size in a fresh process; returns it, or None and the reason."""
    with seconds_shown(f"batch_size {config.batch_size}", USUAL_START):
        return in_fresh_process("measure.preflight.fit:take_steps", config)


def fit(config: Config, base: str | None, measure: Measure = measure_size) -> None:
    """Measure the sizes of a micro-batch that fit; write <run_name>_fit.yaml with the fastest.

    `base`: the name of the config file, which the new one takes over. Raises UserError under
    torchrun, and TrainingError if no step could be taken.
    """
    if launch().by_torchrun:
        raise UserError("--fit: tries the memory of one device; start it without torchrun")
    file = Path(f"{config.run_name}_fit.yaml")
    if base and find_config(base).resolve() == file.resolve():
        raise UserError(f"--fit: {file} would be its own base; fit its base again")
    tried = adopt_architecture(config).with_options(init_from="scratch")  # the same shapes
    size = checkpoint_bytes(without_data(tried))
    # CUDA refuses what does not fit. On other devices the system would end other programs.
    on_cuda = choose_device(config.device).type == "cuda"
    free_mb = math.inf if on_cuda else MOST * available_memory() / MB
    print(f"{config.run_name}: steps of {config.tokens_per_step(1):,} tokens", flush=True)
    sizes = measure_sizes(tried, size / MB, free_mb, measure)
    best = max(sizes, key=lambda found: found.tokens_per_sec)

    Path(config.log_dir).mkdir(parents=True, exist_ok=True)
    seconds = config.max_steps * config.tokens_per_step(1) / best.tokens_per_sec
    if config.max_minutes:
        seconds = 60 * config.max_minutes
    lines = [
        f"fastest: batch_size {best.batch_size}, {best.tokens_per_sec:,.0f} tokens/s, "
        f"{best.peak_mb:,.0f} MB at most",
        f"time:    about {about(seconds)}, without evaluation, sampling and saving",
        describe_disk(config, size)[1],
    ]
    print("\n".join(lines))
    title = f"{config.run_name} on {best.device}, by check.py --fit on {datetime.date.today()}"
    comment = "\n".join(f"# {line}" for line in (title, *lines))
    write_atomic(file, f"{comment}\n\n{changes(config, base, best.batch_size)}")
    print(f"wrote {file}; train with it: python train.py --config {file}")


def measure_sizes(config: Config, state_mb: float, free_mb: float, measure: Measure) -> list[Fit]:
    """Try each size of a micro-batch until one does not fit, and print a line for each.

    `state_mb`: the memory of weights and optimizer; `free_mb`: memory that a size may be expected
    to take. Raises TrainingError if the first one fails.
    """
    found, peaks = list[Fit](), [(0, state_mb)]  # peaks: by batch_size
    for tried in micro_batches(config):
        expected = expected_mb(tried.batch_size, peaks)
        result, problem = None, f"not tried, as it may take {expected:,.0f} MB, more than is free"
        if expected <= free_mb:
            result, problem = measure(tried)
        line = f"batch_size {tried.batch_size}: {problem}"
        if result is None:
            if not found:
                raise TrainingError(f"no step could be taken: {line}")
            print(line)
            break
        found.append(result)
        peaks.append((result.batch_size, result.peak_mb))
        print(f"{line}{result.tokens_per_sec:,.0f} tokens/s, {result.peak_mb:,.0f} MB", flush=True)
    return found


def micro_batches(config: Config) -> Iterator[Config]:
    """Yield configs with larger and larger micro-batches, and steps of a few micro-steps.

    Their sizes divide a step's sequences; each is at least twice the one before.
    """
    sequences, least = config.tokens_per_step(1) // config.seq_len, 1
    for size in range(1, sequences + 1):
        if size >= least and sequences % size == 0:
            timed = min(sequences // size, max(2, SEQUENCES // size))
            tokens = timed * size * config.seq_len
            yield config.with_options(batch_size=size, total_batch_tokens=tokens)
            least = 2 * size


def expected_mb(size: int, peaks: list[tuple[int, float]]) -> float:
    """Extrapolate the peak memory to a batch_size, by the line through the last two peaks."""
    if len(peaks) < 2:
        return peaks[0][1]
    (n, mb), (more, more_mb) = peaks[-2:]
    return more_mb + (size - more) * (more_mb - mb) / (more - n)


def take_steps(config: Config) -> Fit:
    """Take real steps of random tokens, and time the last ones. For a fresh process."""
    set_up_process(config.device, config.retain_memory)
    device = choose_device(config.device)
    shape = (config.batch_size, config.seq_len)
    tokens = torch.randint(config.n_vocab, shape, device=device)
    run = setup(config, World(device), batches=itertools.repeat((tokens, tokens)))
    for _ in take_updates(run):  # without an update there is no optimizer state
        pass
    seconds = sum(run.state.step_seconds[-2:])
    return Fit(
        batch_size=config.batch_size,
        tokens_per_sec=2 * config.tokens_per_step(1) / seconds,
        peak_mb=peak_memory_mb(device),
        device=device_name(device),
    )


def changes(config: Config, base: str | None, batch_size: int) -> str:
    """Return YAML with the batch_size, and with the options that differ from those of `base`."""
    of_base = load_config(base).model_dump(mode="json")
    values = {
        name: value
        for name, value in config.model_dump(mode="json").items()
        if value != of_base[name]
    }
    values |= {
        "run_name": config.run_name,
        "batch_size": batch_size,
        "total_batch_tokens": config.tokens_per_step(1),
    }
    if base is not None:
        values = {"base": base} | values
    return yaml.safe_dump(values, sort_keys=False)
