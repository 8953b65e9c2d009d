"""The result of interleaved runs: the figures of each side, turn by turn, as in its JSON file."""

import itertools
import statistics
from typing import Any

from pydantic import BaseModel

from measure.interleaved.ratio import median_ratio
from measure.report.estimate import Estimate

FEWEST_FOR_AN_EARLY_END = 10  # rounds: in fewer, intervals are too often narrow by chance


class Origin(BaseModel):
    """The hardware and the code that a result comes from."""

    machine: str = "unknown machine"  # runs before 2026-11-22 do not store it
    device: str | None = None  # of a comparison, the first side's
    git: str | None = None

    @property
    def place(self) -> str:
        """The machine, after its GPU if that computed."""
        return self.machine if self.device in (None, "cpu") else f"{self.device}; {self.machine}"


class Turn(BaseModel):
    """The figures of one turn: the steps that a side trained in one round."""

    seconds: list[float] = []  # one entry per step
    tokens: int = 0
    asleep: bool = True
    loss: float | None = None
    peak_memory_mb: float = 0.0
    threads: int = 1
    device: str | None = None
    ranks: list["Turn"] = []  # one turn per rank of a run with several


class MeasuredSide(BaseModel):
    """The figures of one side."""

    name: str
    command: str = ""
    tokens_per_sec: list[float]  # one entry per round
    turns: list[Turn]  # includes the rounds that are left out

    @property
    def median(self) -> float:
        """The median of its tokens/s."""
        return statistics.median(self.tokens_per_sec)

    @property
    def peak_memory_mb(self) -> float:
        """The peak memory of its largest rank, in MiB."""
        return max(rank.peak_memory_mb for turn in self.turns for rank in [turn, *turn.ranks])


class Comparison(Origin, extra="allow"):
    """The result of interleaving several sides. Files of earlier versions lack some fields, and
    keep others.
    """

    date: str | None = None
    left_out: int  # the first turns of a process, which compile and warm up
    rounds_of_a_process: int | None = None  # then the sides start anew; None: they never do
    sides: list[MeasuredSide]
    settings: list[dict[str, Any]] = []  # a ladder adds the options of both sides

    @property
    def rounds(self) -> int:
        """The number of rounds that count."""
        return len(self.sides[0].tokens_per_sec)

    def ratio(self, side: int = 1, base: int = 0) -> Estimate:
        """Return the speed of a side over another, from at least FEWEST rounds."""
        return median_ratio(self.sides[side].tokens_per_sec, self.sides[base].tokens_per_sec)

    def is_narrow(self, width: float) -> bool:
        """True if the interval of every side over every other one is narrower than `width`.

        Only the width ends the rounds, not the ratio: stopping at a pleasant one would make it
        false.
        """
        return self.rounds >= FEWEST_FOR_AN_EARLY_END and all(
            self.ratio(side, base).width <= width
            for base, side in itertools.combinations(range(len(self.sides)), 2)
        )
