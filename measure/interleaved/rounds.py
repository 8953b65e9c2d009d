"""The engine of interleaved comparisons: a few steps of each side, round after round."""

import contextlib
import datetime
import functools
import itertools
import math
import os
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field

from measure.interleaved.comparison import Comparison, MeasuredSide, Turn
from measure.interleaved.process import start_process
from measure.interleaved.ratio import FEWEST, median_ratio
from runtime.cli import Options
from runtime.errors import TrainingError, why_it_failed
from runtime.files import write_json
from runtime.launch import environment_of
from runtime.report import git_commit, machine

ROOT = Path(__file__).resolve().parent.parent.parent
# The first round compiles, the second may record CUDA graphs, the third sets the steps of a round.
LEFT_OUT = 3
WIDTH = 0.02  # stop once every interval is narrower than this share of its median
FEWEST_FOR_AN_EARLY_END = 10  # rounds: in fewer, intervals are too often narrow by chance
OTHERS_END = 15.0  # seconds within which the other ranks of a run end after one has failed
# Train at least this long at a time: less is lost in the machine's noise. Rehearsals set less.
TURN_SECONDS = float(os.environ.get("TURN_SECONDS", "0.5"))

Rates = Sequence[Sequence[float]]  # tokens/s of each side, in each round
say = functools.partial(print, flush=True)


# ---- the engine


def steps_of_a_turn(seconds: float) -> int:
    """Return the number of steps that a side trains at a time, from the seconds of one step."""
    return max(1, math.ceil(TURN_SECONDS / seconds))


def interleave(
    sides: Sequence[Callable[[], float]], rounds: int, enough: Callable[[Rates], bool]
) -> Rates:
    """Call every side once a round, in reverse order every other round; return their results.

    Two rounds come before the ones that count. Ends after `rounds`, or once `enough` is true.
    """
    rates: list[list[float]] = [[] for _ in sides]
    turns = list(zip(sides, rates, strict=True))
    for i in range(1 - LEFT_OUT, rounds):
        for side, of_side in turns[:: 1 if i % 2 == 0 else -1]:
            rate = side()
            if i >= 0:
                of_side.append(rate)
        if i >= 0 and enough(rates):
            break
    return rates


def is_narrow(rates: Rates, width: float) -> bool:
    """True if the interval of every side over every other one is narrower than `width`.

    Only the width ends the rounds, not the ratio: stopping at a pleasant one would make it false.
    """
    return len(rates[0]) >= FEWEST_FOR_AN_EARLY_END and all(
        median_ratio(ours, theirs).width <= width
        for theirs, ours in itertools.combinations(rates, 2)
    )


class SideError(TrainingError):
    """A side has failed; the message begins with its name."""


@dataclass
class Side:
    """A process, or the ranks of one run, that trains some steps on request and sleeps otherwise.

    A context manager, which starts and ends the processes. They answer like side.py.
    """

    name: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    ranks: int = 1

    def __enter__(self) -> "Side":
        self.turns: list[Turn] = []  # rank 0's, with the turns of all ranks in it
        self.steps = 1  # to take at a time
        of_ranks: list[dict[str, str]] = [{}]
        if self.ranks > 1:
            from torch.distributed import TCPStore

            # torchrun's agent has one too; it lives as long as this object
            self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            of_ranks = [environment_of(i, self.ranks, self.store.port) for i in range(self.ranks)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.processes, self.errors = [], []  # one of each per rank
        for of_rank in of_ranks:
            process, errors = start_process(self.command, self.environment | of_rank, **pipes)
            self.processes.append(process)
            self.errors.append(errors)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()  # it has nothing to save
            process.communicate()
        for file in self.errors:
            file.close()

    def train(self) -> float:
        """Take the steps; returns tokens/s. Raises SideError if a rank fails."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):  # it has ended; stderr has the error
                print(self.steps, file=process.stdin, flush=True)
        answers = self._receive()
        if not all(answer.asleep for answer in answers):
            raise SideError(
                f"{self.name}: its threads keep computing while another side trains; unset "
                f"OMP_WAIT_POLICY"
            )
        ranks = {"ranks": answers} if self.ranks > 1 else {}
        self.turns.append(answers[0].model_copy(update=ranks))
        seconds = sum(answers[0].seconds)
        if len(self.turns) == LEFT_OUT:
            self.steps = steps_of_a_turn(seconds / self.steps)
        return answers[0].tokens / seconds

    def _receive(self) -> list[Turn]:
        """Read the answers as they come: one rank may fail while the others wait for it."""
        answers: dict[int, Turn] = {}
        pipes: dict[Any, int] = {p.stdout: rank for rank, p in enumerate(self.processes)}
        while pipes:
            for pipe in select.select(list(pipes), [], [])[0]:
                line = pipe.readline()
                if not line:
                    raise SideError(f"{self.name}: {self._why_it_ended()}")
                answers[pipes.pop(pipe)] = Turn.model_validate_json(line)
        return [answers[rank] for rank in range(self.ranks)]

    def _why_it_ended(self) -> str:
        """Return the error of the rank that failed first: the others only report losing it."""
        deadline, reasons = time.monotonic() + OTHERS_END, []
        for process, errors in zip(self.processes, self.errors, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(max(0, deadline - time.monotonic()))
                reasons.append(why_it_failed(status, errors))
        other_failed = re.compile("another (process|rank)").search
        return min(reasons, key=lambda why: (bool(other_failed(why)), "exit status" in why))


def training_side(
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    ranks: int = 1,
    module: str = "measure.interleaved.side",
) -> Side:
    """Make a side that trains with these arguments of train.py."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # PYTHONSAFEPATH: without it, a copy in the working directory would come first
    paths = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", module, *arguments]
    return Side(name, command, {**paths, **(environment or {})}, ranks)


def run_rounds(
    sides: Sequence[Side],
    rounds: int,
    width: float = WIDTH,
    *,
    results: Path | None = None,
    check: Callable[[Side], None] = lambda _: None,
) -> Comparison:
    """Start the sides, interleave them, and return the figures of each in each round.

    `results`: a JSON file to write after each round. `check`: called with every side after its
    first steps. Raises SideError.
    """

    about: Any = {"machine": machine(), "date": str(datetime.date.today()), "git": git_commit()}

    def compared(rates: Rates) -> Comparison:
        measured = [
            MeasuredSide(
                name=side.name,
                command=shlex.join(["python", *side.command[1:]]),
                tokens_per_sec=[*of_side],
                turns=side.turns,
            )
            for side, of_side in zip(sides, rates, strict=True)
        ]
        return Comparison(**about, left_out=LEFT_OUT, sides=measured)

    def enough(rates: Rates) -> bool:
        found = compared(rates)
        if results:
            write_json(results, found.dump())
        line = f"round {found.rounds} of at most {rounds}: "
        line += ", ".join(f"{rate[-1]:,.0f}" for rate in rates) + " tokens/s"
        if found.rounds >= FEWEST:
            line += "; x first " + ", ".join(map(found.ratio_text, range(1, len(sides))))
        say(line)
        return is_narrow(rates, width)

    with contextlib.ExitStack() as running:
        for side in sides:
            running.enter_context(side)
        for side in sides:  # the first steps alone, since the compiler times kernels to choose one
            side.train()
            check(side)
        return compared(interleave([side.train for side in sides], rounds, enough))


# ---- options of commands that interleave


class RoundsOptions(Options):
    """how long"""

    rounds: int = Field(20, ge=FEWEST)
    """rounds at most"""
    width: float = Field(WIDTH, ge=0, le=1)
    """stop once every interval is narrower than this share of its median"""


def split_command_line(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split arguments at `--`: the command's own options, and the options of every run."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]
