"""Run one side of an interleaved comparison: set a training run up, then take steps when asked.

echo 3 | python -m measure.side --config speedup10.yaml

A line of stdin is a number of steps; the answer is a line of JSON. measure/interleaved.py starts
this, and takes any program that answers likewise.
"""

from config import Config
from runtime.start import start

if __name__ == "__main__":
    OPTIONS = start(Config, description=__doc__, config_file=True)

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from measure.options import without_end
from runtime.device import choose_device, peak_memory_mb
from runtime.errors import reported
from runtime.launch import launch
from runtime.start import trim_memory_if_short
from runtime.world import joined_world
from train import Run, setup, timed_step

ASLEEP = 0.1  # of one core, below which a process counts as asleep


class Requests:
    """The requests on stdin and the answers on stdout; what others print goes to stderr."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def __iter__(self) -> Iterator[int]:
        """Yield the steps to take, until nobody asks any more."""
        for line in sys.stdin:
            yield int(line)

    def answer(self, **figures: Any) -> None:
        """Answer once this process sleeps; `asleep` says whether it does."""
        print(json.dumps(figures | {"asleep": falls_asleep()}), file=self.answers, flush=True)


def falls_asleep(patience: float = 2.0) -> bool:
    """Wait until this process's threads use no CPU: after a parallel region they spin for a while.

    False if they still do after `patience` seconds, as with OMP_WAIT_POLICY=active.
    """
    end = time.monotonic() + patience
    while time.monotonic() < end:
        used, begun = time.process_time(), time.monotonic()
        time.sleep(0.005)
        if time.process_time() - used < ASLEEP * (time.monotonic() - begun):
            return True
    return False


def take_steps(run: Run, count: int) -> dict[str, Any]:
    """Take so many steps of the run; returns the figures to answer with. See `Requests`."""
    state, device, world = run.state, run.world.device, run.world
    seconds: list[float] = []
    for _ in range(count):
        trim_memory_if_short()
        loss, _, step_seconds = timed_step(run, state.step + 1)
        state.step += 1
        seconds.append(step_seconds)
    return {
        "seconds": seconds,
        "tokens": count * run.config.tokens_per_step(world.world_size),
        "loss": loss,
        "peak_memory_mb": peak_memory_mb(device),
        "threads": torch.get_num_threads(),
    }


def main(config: Config) -> None:
    """Train with the options of the command line, as many steps as are asked for."""
    requests = Requests()
    with joined_world(choose_device(config.device, launch()), config.timeout) as world:
        run = setup(without_end(config), world)
        for steps in requests:
            requests.answer(**take_steps(run, steps))


if __name__ == "__main__":
    with reported("stdout", advice=OPTIONS.advice()):
        main(OPTIONS)
