"""Run one side of an interleaved comparison: set a training run up, then take steps when asked.

echo 3 | python -m measure.interleaved.side --config speedup10.yaml

A line of stdin is a number of steps; the answer is a line of JSON. rounds.py starts this, or any
program that answers in the same way.
"""

from config import Config
from runtime.start import start

if __name__ == "__main__":
    OPTIONS = start(Config, description=__doc__, config_file=True)

import datetime
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.distributed as dist

from measure.interleaved.options import without_end
from runtime.clock import mark_time, seconds_between
from runtime.device import choose_device, peak_memory_mb
from runtime.errors import reported
from runtime.start import return_freed_memory
from runtime.world import World, joined_world
from train import Run, setup, take_step

ASLEEP = 0.1  # a process that uses less of one core counts as asleep
# Set if two sides do not fit in memory together: each returns freed memory to the system after its
# turn, and gets it again in an untimed first step of the next.
FREES_CACHE = bool(os.environ.get("FREES_CACHE"))


def take_stdout() -> TextIO:
    """Return stdout, for the answers alone; later prints go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, take_steps: Callable[[int], dict[str, Any]], world: World) -> None:
    """Take the number of steps on each line of stdin, and answer with their figures.

    The answer waits until this process sleeps; `asleep` is false if it keeps computing. Of several
    ranks, rank 0 reads and answers; `ranks` in its answer has the figures of each.
    """
    # Until the next turn, gloo lets the other ranks sleep; NCCL would keep their GPUs busy.
    day = datetime.timedelta(days=1)
    waiting = dist.new_group(backend="gloo", timeout=day) if world.distributed else None
    while True:
        line = [sys.stdin.readline() if world.rank == 0 else ""]
        if waiting:
            dist.broadcast_object_list(line, src=0, group=waiting)
        if not line[0]:
            return
        figures = take_steps(int(line[0])) | {"asleep": falls_asleep()}
        if waiting:
            ranks = world.gather(figures)
            figures |= {"ranks": ranks, "asleep": all(rank["asleep"] for rank in ranks)}
        if world.rank == 0:
            print(json.dumps(figures, default=float), file=answers, flush=True)


def serve_timed(answers: TextIO, step: Callable[[], dict[str, Any]], device: torch.device) -> None:
    """Time calls of `step` by the clock of a run; stdin has their number.

    `step` returns its tokens and other figures, a loss as a tensor: to read it would wait.
    """

    def take_steps(count: int) -> dict[str, Any]:
        taken, marks = list[dict[str, Any]](), [mark_time(device)]
        for _ in range(count):
            taken.append(step())
            marks.append(mark_time(device))
        return taken[-1] | {
            "tokens": sum(figures["tokens"] for figures in taken),
            "seconds": list(itertools.starmap(seconds_between, itertools.pairwise(marks))),
            "peak_memory_mb": peak_memory_mb(device),
        }

    serve(answers, take_steps, World(device))


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


def take_steps(run: Run, count: int) -> dict[str, Any]:
    """Take `count` steps of the run; return the figures to answer with."""
    state, device, world = run.state, run.world.device, run.world
    for _ in range(FREES_CACHE + count):
        take_step(run)
    state.settle(run.config)
    state.taken.clear()  # nothing is logged
    if FREES_CACHE:
        torch.cuda.empty_cache()
        return_freed_memory()
    return {
        "seconds": state.step_seconds[-count:],  # the step after freed memory is not timed
        "tokens": count * run.config.tokens_per_step(world.world_size),
        "loss": state.last_loss,
        "peak_memory_mb": peak_memory_mb(device),
        "threads": torch.get_num_threads(),
    }


def main(config: Config) -> None:
    """Train with the options of the command line, by the steps on stdin."""
    answers = take_stdout()
    with joined_world(choose_device(config.device), config.timeout) as world:
        run = setup(without_end(config), world)
        serve(answers, functools.partial(take_steps, run), world)


if __name__ == "__main__":
    with reported("stdout", advice=OPTIONS.advice()):
        main(OPTIONS)
