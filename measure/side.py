"""One side of a comparison in turn: `train.py` with the options given, taking a few of its steps
each time it is asked to.

    echo 3 | python -m benchmarks.side --config speedup10.yaml --log_dir /tmp/side

A line of stdin is a number of steps; the answer is a line of JSON. benchmarks/in_turn.py starts it;
any program that answers likewise can be a side. A second number on the line asks for more: the
steps are profiled, and if there are other processes, which torchrun's environment tells, their link
is timed with transfers of so many bytes.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from runtime.start import set_up_process

    set_up_process()  # as train.py

SETTLED_AT = 0.1  # of one core, where a process counts as asleep


class Turns:
    """The questions on stdin and the answers on what was stdout; whatever else this process prints
    goes to stderr.
    """

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        self.message: int | None = None  # the second number of the last question
        os.dup2(2, 1)

    def wait(self) -> int:
        """The number of steps to take, when they are asked for; ends the process where nobody asks
        any more.
        """
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # there is nothing to save
        steps, *more = map(int, line.split())
        self.message = more[0] if more else None
        return steps

    def answer(self, **figures: Any) -> None:
        """Answer, once this process sleeps: `asleep` says whether it does."""
        print(json.dumps(figures | {"asleep": falls_asleep()}), file=self.answers, flush=True)


def falls_asleep(patience: float = 2.0) -> bool:
    """Wait until the threads of this process use no more CPU: after a parallel region they spin for
    a while.

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
        """Holds `train` before each step until that step's turn. `clock` is its clock: it reads it
        first when a step begins, then when it ends.
        """

        def __init__(self) -> None:
            self.readings: list[float] = []
            self.seconds: list[float] = []
            self.left = 0
            self.profile: StepProfile | None = None
            super().__init__("set-up")

        def clock(self) -> float:
            self.readings.append(time.perf_counter())
            if self.profile and len(self.readings) == 1:
                self.profile.begin_step()
            elif self.profile and len(self.readings) == 2:
                self.profile.end_step()
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
                    turns.answer(
                        seconds=self.seconds,
                        tokens=len(self.seconds) * config.tokens_per_step(world.world_size),
                        loss=read_rows(log).popitem()[1]["loss"] if world.rank == 0 else None,
                        peak_memory_mb=peak_memory_mb(device),
                        **self.closer_look(),
                    )
            if not self.left:
                self.left, self.seconds = turns.wait(), []
                self.profile = StepProfile(device) if turns.message else None
            self.readings = []

        def closer_look(self) -> dict[str, Any]:
            if not self.profile:
                return {}
            threads = {"threads": torch.get_num_threads(), "profile": self.profile.figures()}
            return threads | (
                {"link_gb_s": link_speed(world, turns.message or 0)} if world.distributed else {}
            )

    options = parse_command_line(Config, description=__doc__, config_file=True)
    with reported(options.log_dir, advice=options.advice()):
        import torch

        from benchmarks.exchange import StepProfile, link_speed
        from runtime.device import choose_device, peak_memory_mb
        from runtime.runlog import read_rows
        from runtime.world import joined_world, launch
        from train import train

        # as many steps as it takes; at these rates the weights hardly move, so that none of them
        # diverges
        config = options.model_copy(
            update={
                "max_steps": 10**9,
                "lr": 1e-6,
                "min_lr": None,
                "muon_lr": 1e-6,
                "log_every": 1,
                "eval_every": 0,
                "hellaswag_every": 0,
                "sample_every": 0,
                "checkpoint_every": 0,
                "keep_last": 0,
                "tensorboard": False,
                "wandb": False,
            }
        )
        log, pace = Path(config.log_dir) / str(config.run_name) / "log.csv", Pace()
        device = choose_device(config.device, launch())
        with joined_world(device, config.timeout) as world:
            train(config, world, clock=pace.clock, stop=pace)


if __name__ == "__main__":
    main()
