"""One side of a comparison in turn: `train.py` with the options given, taking a few of its steps each time it is asked to.

    echo 3 | python -m benchmarks.side --config speedup10.yaml --log_dir /tmp/side

A line of stdin is a number of steps; the answer is a line of JSON. benchmarks/in_turn.py starts it; any program that answers
likewise can be a side.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from runtime.process import before_torch

    before_torch()  # as train.py

SETTLED_AT = 0.1  # of one core, where a process counts as asleep


class Turns:
    """The questions on stdin and the answers on what was stdout; whatever else this process prints goes to stderr."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def wait(self) -> int:
        """The number of steps to take, when they are asked for; ends the process where nobody asks any more."""
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # there is nothing to save
        return int(line)

    def answer(self, **figures: Any) -> None:
        """Answer, once this process sleeps: `asleep` says whether it does."""
        print(json.dumps(figures | {"asleep": falls_asleep()}), file=self.answers, flush=True)


def falls_asleep(patience: float = 2.0) -> bool:
    """Wait until the threads of this process use no more CPU: after a parallel region they spin for a while.

    False if they still do after `patience` seconds, as with OMP_WAIT_POLICY=active.
    """
    end = time.monotonic() + patience
    while time.monotonic() < end:
        used, begun = time.process_time(), time.monotonic()
        time.sleep(0.005)
        if time.process_time() - used < SETTLED_AT * (time.monotonic() - begun):
            return True
    return False


def main() -> None:
    """Train with the options of the command line, for as many steps as are asked for."""
    turns = Turns()

    from config import Config
    from runtime.cli import parse_command_line
    from runtime.errors import reported
    from runtime.signals import StopRequest

    class Pace(StopRequest):
        """Holds `train` before each step until that step's turn. `clock` is its clock: it reads it first when a step begins, then
        when it ends."""

        def __init__(self) -> None:
            self.readings: list[float] = []
            self.seconds: list[float] = []
            self.left = 0
            super().__init__("set-up")

        def clock(self) -> float:
            self.readings.append(time.perf_counter())
            return self.readings[-1]

        def __setattr__(self, name: str, value: Any) -> None:
            if (name, value) == ("phase", "steps"):
                self.next_step()
            super().__setattr__(name, value)

        def next_step(self) -> None:
            if self.left:
                self.seconds.append(self.readings[1] - self.readings[0])
                self.left -= 1
                if not self.left:
                    _, row = read_rows(log).popitem()
                    turns.answer(seconds=self.seconds, tokens=len(self.seconds) * tokens_per_step, loss=row["loss"],
                                 peak_memory_mb=peak_memory_mb(device))
            if not self.left:
                self.left, self.seconds = turns.wait(), []
            self.readings = []

    options = parse_command_line(Config, description=__doc__, config_file=True)
    with reported(options.log_dir, advice=options.advice()):
        from runtime.device import choose_device
        from runtime.measure import peak_memory_mb
        from runtime.runlog import read_rows
        from runtime.world import World
        from train import train

        # as many steps as it takes; at these rates the weights hardly move, so that none of them diverges
        config = options.model_copy(update={"max_steps": 10**9, "lr": 1e-6, "min_lr": None, "muon_lr": 1e-6, "log_every": 1,
                                            "eval_every": 0, "hellaswag_every": 0, "sample_every": 0, "checkpoint_every": 0,
                                            "keep_last": 0, "tensorboard": False, "wandb": False})
        tokens_per_step, log = config.tokens_per_step(1), Path(config.log_dir) / str(config.run_name) / "log.csv"
        device, pace = choose_device(config.device), Pace()
        train(config, World(device), clock=pace.clock, stop=pace)


if __name__ == "__main__":
    main()
