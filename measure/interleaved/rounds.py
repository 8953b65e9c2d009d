"""The engine of interleaved comparisons: a few steps of each side, round after round."""

import contextlib
import datetime
import math
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.interleaved.comparison import Comparison, MeasuredSide, Turn
from measure.interleaved.process import start_process, why_it_failed
from measure.interleaved.ratio import FEWEST
from runtime.errors import TrainingError
from runtime.files import write_json
from runtime.report import ROOT, git_commit, machine

# Rounds of a side's first process that do not count: the first compiles, the second may record CUDA
# graphs, the third sets the steps of a round. Later processes need no third.
LEFT_OUT = 3
# Then every side starts anew. Memory layout and core belong to a process and change its speed by
# about half a percent, which more rounds of the same processes would not average out.
ROUNDS_OF_A_PROCESS = 4
ROUNDS = 16
WIDTH = 0.02  # stop once every interval is narrower than this share of its median
# Train at least this long at a time: less is lost in the machine's noise. Rehearsals set less.
TURN_SECONDS = float(os.environ.get("TURN_SECONDS", "0.5"))

USUAL_START = "5 to 20 s, or minutes to compile"


# ---- the engine


@contextlib.contextmanager
def seconds_shown(
    text: str, usual: str, is_over: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Show a line with the seconds so far on a terminal, until `is_over` or the end.

    Whatever is printed next replaces the line. Nothing is shown in a pipe or a file.
    """
    ended, begun = threading.Event(), time.monotonic()

    def show() -> None:
        while not ended.wait(1.0) and not is_over():
            line = f"{text}: {time.monotonic() - begun:.0f} s, usually {usual}"
            print(line[: shutil.get_terminal_size().columns - 1], end="\r", flush=True)

    if not sys.stdout.isatty():
        yield
        return
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        print("\033[K", end="", flush=True)  # clears the line


def steps_of_a_turn(seconds: float) -> int:
    """Return the number of steps that a side trains at a time, from the seconds of one step."""
    return max(1, math.ceil(TURN_SECONDS / seconds))


def interleave(
    sides: Sequence[Callable[[bool], object]], rounds: range, warm_up: int
) -> Iterator[None]:
    """Call every side once a round, in reverse order every other round; yield after each round.

    A side is told whether the round counts: `warm_up` further rounds come first, and yield nothing.
    """
    for i in range(rounds.start - warm_up, rounds.stop):
        for train in reversed(sides) if i % 2 else sides:
            train(i >= rounds.start)
        if i >= rounds.start:
            yield


class SideError(TrainingError):
    """A side has failed; the message begins with its name."""


@dataclass
class Side:
    """A process that trains some steps on request and sleeps otherwise.

    A context manager, which starts and ends the process, perhaps several times. It answers like
    side.py.
    """

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    steps: int = 1  # steps per turn that counts

    def __post_init__(self) -> None:
        command = shlex.join(["python", *self.command[1:]])
        # from all its processes
        self.measured = MeasuredSide(name=self.name, command=command, tokens_per_sec=[], turns=[])

    def __enter__(self) -> "Side":
        self.process, self.errors = start_process(
            self.command, self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # it has nothing to save
        self.process.communicate()
        self.errors.close()

    def train(self, counts: bool = False) -> None:
        """Take the steps of a turn, and keep their figures. A turn of warm-up, of one step, does
        not count. Raises SideError if the process fails.
        """
        requests, answers = self.process.stdin, self.process.stdout
        assert requests
        assert answers
        with contextlib.suppress(BrokenPipeError):  # it has ended; stderr has the error
            print(self.steps if counts else 1, file=requests, flush=True)
        line = answers.readline()
        if not line:
            raise SideError(f"{self.name}: {why_it_failed(self.process.wait(), self.errors)}")
        turn = Turn.model_validate_json(line)
        if not turn.asleep:
            raise SideError(
                f"{self.name}: its threads keep computing while another side trains; unset "
                f"OMP_WAIT_POLICY"
            )
        self.measured.turns.append(turn)
        seconds = sum(turn.seconds)
        if counts:
            self.measured.tokens_per_sec.append(turn.tokens / seconds)
        elif not self.measured.tokens_per_sec:  # the first process; its last such turn decides
            self.steps = steps_of_a_turn(seconds)


def training_side(
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] = {},
    ranks: int = 1,
    module: str = "measure.interleaved.side",
) -> Side:
    """Make a side that trains with these arguments of train.py, on several ranks by torchrun.

    `module`: its program, which answers like side.py.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # PYTHONSAFEPATH: without it, a copy in the working directory would come first
    paths = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    return Side(name, python_command(ranks, "-m", module, *arguments), {**paths, **environment})


def python_command(ranks: int, *arguments: str) -> list[str]:
    """Return the command of a Python program: alone, or on several ranks by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else []), *arguments]


def run_rounds(
    sides: Sequence[Side],
    rounds: int,
    width: float = WIDTH,
    *,
    results: str | Path | None = None,
) -> Comparison:
    """Start the sides, interleave them, and return the figures of each in each round.

    `results`: a JSON file to write after each round. Raises SideError.
    """
    comparison = Comparison(
        machine=machine(),
        date=str(datetime.date.today()),
        git=git_commit(),
        left_out=LEFT_OUT,
        rounds_of_a_process=ROUNDS_OF_A_PROCESS,
        sides=[side.measured for side in sides],
    )
    for begin in range(0, rounds, ROUNDS_OF_A_PROCESS):
        block = range(begin, min(begin + ROUNDS_OF_A_PROCESS, rounds))
        with contextlib.ExitStack() as running:
            for side in sides:
                running.enter_context(side)
            for side in sides:  # the first steps alone, since the compiler times kernels
                with seconds_shown(f"{side.name} starts", USUAL_START):
                    side.train()
            comparison.device = comparison.sides[0].turns[0].device
            warm_up = LEFT_OUT - 1 if begin == 0 else LEFT_OUT - 2
            for _ in interleave([side.train for side in sides], block, warm_up):
                if results:
                    write_json(Path(results), comparison.model_dump(exclude_unset=True))
                print(describe_round(comparison, rounds), flush=True)
                if comparison.is_narrow(width):
                    return comparison
    return comparison


def describe_round(comparison: Comparison, rounds: int) -> str:
    """Return a line on the last round: the speeds in it, and the ratios so far."""
    speeds = ", ".join(f"{side.tokens_per_sec[-1]:,.0f}" for side in comparison.sides)
    line = f"round {comparison.rounds} of at most {rounds}: {speeds} tokens/s"
    if comparison.rounds >= FEWEST:
        ratios = [str(comparison.ratio(i)) for i in range(1, len(comparison.sides))]
        line += f"; over first {', '.join(ratios)}"
    return line


# ---- command lines


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """Return options as flags of train.py."""
    flags: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            parts = value if isinstance(value, list | tuple) else [value]
            flags.append(f"--{name}={','.join(map(str, parts))}")
    return flags


def split_command_line(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments at `--`: the command's own options, and the options of every run."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]
