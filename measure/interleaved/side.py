"""Run one side of an interleaved comparison: set a training run up, then take steps when asked.

echo 3 | python -m measure.interleaved.side --config speedup10.yaml

A line of stdin is a number of steps; the answer is a line of JSON. rounds.py starts this, or any
program that answers in the same way.
"""

from config import Config
from runtime.start import start

if __name__ == "__main__":
    OPTIONS = start(Config, config_file=True)

import datetime
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.clock import mark_time, seconds_between
from runtime.device import choose_device, device_name, peak_memory_mb
from runtime.errors import reported
from runtime.start import return_freed_memory
from runtime.world import World, joined_world
from train import Run, setup, train_step

Step = Callable[[], Tensor]  # takes a step; returns its loss, which is not read here
ASLEEP = 0.1  # a process that uses less of one core counts as asleep
# Set if two sides do not fit in memory together: each returns freed memory to the system after its
# turn, and gets it again in an untimed first step of the next.
FREES_CACHE = bool(os.environ.get("FREES_CACHE"))


def without_end(config: Config) -> Config:
    """Return the config without its last step, at learning rates that barely change the weights."""
    names = [name for name in Config.model_fields if name.endswith("lr")]
    rates = {name: 1e-6 for name in names if getattr(config, name)}
    return config.with_options(max_steps=10**9, max_minutes=None, **rates)


def take_stdout() -> TextIO:
    """Return stdout, for the answers alone; later prints go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, step: Step, tokens_per_step: int, world: World) -> None:
    """Take the number of steps on each line of stdin, and answer with their figures.

    The answer waits until this process sleeps; `asleep` is false if it keeps computing. Of several
    ranks, rank 0 reads and answers; `ranks` in its answer has the figures of each.
    """
    # Until the next turn, gloo lets the other ranks sleep; NCCL would keep their GPUs busy.
    day = datetime.timedelta(days=1)
    waiting = dist.new_group(backend="gloo", timeout=day) if world.distributed else None
    for turn in itertools.count():
        line = [sys.stdin.readline() if world.rank == 0 else ""]
        if waiting:
            dist.broadcast_object_list(line, src=0, group=waiting)
        if not line[0]:
            return
        count = int(line[0])
        figures = take_steps(step, count, world.device) | {"tokens": count * tokens_per_step}
        if turn == 0:
            return_freed_memory()  # as train.py does after the first step
        figures["asleep"] = falls_asleep()
        if waiting:
            ranks = world.gather(figures)
            figures |= {"ranks": ranks, "asleep": all(rank["asleep"] for rank in ranks)}
        if world.rank == 0:
            print(json.dumps(figures), file=answers, flush=True)


def take_steps(
    step: Step, count: int, device: torch.device, frees_cache: bool = FREES_CACHE
) -> dict[str, Any]:
    """Take steps, timed by the clock of a run; returns the figures to answer with."""
    if frees_cache:
        step()
    marks = [mark_time(device)]
    for _ in range(count):
        loss = step()
        marks.append(mark_time(device))
    figures = {
        "loss": float(loss),
        "seconds": list(itertools.starmap(seconds_between, itertools.pairwise(marks))),
        "peak_memory_mb": peak_memory_mb(device),
        "threads": torch.get_num_threads(),
        "device": device_name(device),
    }
    if frees_cache:
        torch.cuda.empty_cache()
        return_freed_memory()
    return figures


def falls_asleep() -> bool:
    """Wait until this process's threads use no CPU: after a parallel region they spin for a while.

    False if they still do after two seconds, as with OMP_WAIT_POLICY=active.
    """
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        used, begun = time.process_time(), time.monotonic()
        time.sleep(0.005)
        if time.process_time() - used < ASLEEP * (time.monotonic() - begun):
            return True
    return False


def step_of(run: Run) -> Step:
    """Return a function that takes the next step of a run."""
    steps = itertools.count(1)
    return lambda: train_step(run, next(steps))["loss"]


def main(config: Config) -> None:
    """Train with the options of the command line, by the steps on stdin."""
    answers = take_stdout()
    with joined_world(choose_device(config.device), config.timeout) as world:
        run = setup(without_end(config), world)
        serve(answers, step_of(run), run.config.tokens_per_step(world.world_size), world)


if __name__ == "__main__":
    with reported("stdout", advice=OPTIONS.advice()):
        main(OPTIONS)
