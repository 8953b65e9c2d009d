"""Which of several configs trains faster on this machine, and by how much: a few steps of each in
turn, round after round.

    python -m benchmarks.in_turn speedup9.yaml speedup10.yaml
    python -m benchmarks.in_turn speedup10.yaml "speedup10.yaml --no-flash"
    python -m benchmarks.in_turn quickstart.yaml "OMP_NUM_THREADS=1 quickstart.yaml"    ... in another environment
    python -m benchmarks.in_turn speedup10.yaml --code ../other    ... here and in another copy of this code
    python -m benchmarks.in_turn a.yaml b.yaml -- --batch_size 2   options after -- go to all of them

Each side stays in a process of its own, which sleeps while another has its turn. A machine that
grows slower slows all sides of a round, and as every other round goes backwards, the last side
suffers no more than the first. What counts is the ratio within a round: the median over the rounds,
with an interval.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from runtime.interrupt import end_at_ctrl_c

    end_at_ctrl_c()  # also during the imports

import contextlib
import itertools
import json
import math
import os
import re
import select
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from config import Config
from measure.ratio import FEWEST, Ratio, median_ratio
from runtime.cli import Options, parse, parse_command_line
from runtime.errors import TrainingError, UserError, reported, why_it_failed
from runtime.files import write_whole
from runtime.report import git_commit, items, machine, print_table
from runtime.signals import ENDS_WITH
from runtime.world import environment_of

ROOT = Path(__file__).resolve().parent.parent
# rounds: the first compiles, the second may record CUDA graphs, the third tells how many steps make
# a turn
LEFT_OUT = 3
FEWEST_FOR_AN_EARLY_END = 10  # rounds: of fewer, narrow intervals are too often so by chance
OTHERS_END = 15.0  # seconds within which the processes of a group end after one of them
# at least, as a shorter turn is lost in what the machine does besides; a rehearsal may set less in
# the environment
TURN_SECONDS = float(os.environ.get("TURN_SECONDS", "0.5"))


class InTurnOptions(Options):
    """options"""

    sides: tuple[str, ...] = ()
    """configs, each with options of its own behind it, and variables of the environment before it,
    if quoted together
    """
    rounds: int = Field(20, ge=FEWEST)
    """rounds at most"""
    width: Annotated[float, Field(ge=0, le=1)] = 0.02
    """enough rounds where every interval is narrower than this share of its median"""
    code: str | None = None
    """folder of another copy of this code, in which the one config is trained as the second side"""
    output: str | None = None
    """JSON file for every turn of every side, written as the rounds end"""


# ---- the engine


def take_turns(
    sides: Mapping[str, Callable[[], float]],
    rounds: int,
    enough: Callable[[Mapping[str, Sequence[float]]], bool] = lambda _: False,
    left_out: int = LEFT_OUT,
) -> dict[str, list[float]]:
    """What each side returned in each round, but for the first rounds. Every other round has the
    sides in reverse order.

    Ends after `rounds` rounds that count, or before if what was returned so far is `enough`.
    """
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(left_out + rounds):
        names = list(sides)[:: 1 if i % 2 == 0 else -1]
        for name in names:
            rate = sides[name]()
            if i >= left_out:
                rates[name].append(rate)
        if i >= left_out and enough(rates):
            break
    return rates


def ratios(rates: Mapping[str, Sequence[float]], side: str, base: str) -> list[float]:
    """The rate of a side over that of a base, round by round."""
    return [ours / theirs for ours, theirs in zip(rates[side], rates[base], strict=True)]


class Side:
    """A process that does some steps whenever it is its turn, and sleeps otherwise. Use it as a
    context: it ends there.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ):
        self.name, self.command, self.environment = name, command, environment or {}
        self.turns: list[dict[str, Any]] = []  # its answers
        self.steps = 1

    def __enter__(self) -> "Side":
        self.errors = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, ENDS_WITH: str(os.getpid()), **self.environment},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # it has nothing to save
        self.process.communicate()
        self.errors.close()

    def turn(self) -> float:
        """Let it do its steps; returns tokens/s. Raises TrainingError if it fails."""
        self.ask()
        return self.answer()

    def ask(self, question: str | None = None) -> None:
        """Let it begin its turn, or one that `question` asks for."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended, and has said why
            print(question or self.steps, file=self.process.stdin, flush=True)

    def answer(self) -> float:
        """Wait for the end of its turn; returns tokens/s. Raises TrainingError if it fails."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise TrainingError(f"{self.name}: {why_it_failed(self.process.wait(), self.errors)}")
        answer = json.loads(line)
        if not answer["asleep"]:
            raise TrainingError(
                f"{self.name}: its threads keep computing while another side has its turn; unset "
                f"OMP_WAIT_POLICY "
                f"(now {self.environment.get('OMP_WAIT_POLICY') or os.environ.get('OMP_WAIT_POLICY', 'not set')})"
            )
        self.turns.append(answer)
        seconds = sum(answer["seconds"])
        if len(self.turns) == LEFT_OUT:
            self.steps = max(1, math.ceil(TURN_SECONDS * self.steps / seconds))
        return answer["tokens"] / seconds


class Group(Side):
    """Several processes that train together, as torchrun would start them on this machine: one
    side. Its steps and its figures are those of the first; `ranks` of an answer has the answers of
    all.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None, ranks: int
    ):
        super().__init__(name, command, environment)
        self.ranks = ranks

    def __enter__(self) -> "Group":
        from torch.distributed import TCPStore

        self.store = TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False
        )  # lives as long as they do
        self.members = [
            Side(
                self.name,
                self.command,
                {**self.environment, **environment_of(rank, self.ranks, self.store.port)},
            )
            for rank in range(self.ranks)
        ]
        with contextlib.ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member)
            self.leave = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave.close()

    def ask(self, question: str | None = None) -> None:
        """Let all begin their turn."""
        for member in self.members:
            member.steps = self.members[0].steps
            member.ask(question)

    def answer(self) -> float:
        """Wait for the end of all turns; returns tokens/s. Raises TrainingError if one fails, with
        its reason.
        """
        try:
            rates = {member: member.answer() for member in self.as_they_answer()}
        except TrainingError as error:
            has_ended = any(member.process.poll() is not None for member in self.members)
            raise TrainingError(self.why() if has_ended else str(error)) from None
        answers = [member.turns[-1] for member in self.members]
        self.turns.append(answers[0] | {"ranks": answers})
        return rates[self.members[0]]

    def as_they_answer(self) -> Iterator[Side]:
        """Those that have something to say, or have ended: one that fails does not wait for its
        turn among the others.
        """
        left = {pipe: member for member in self.members if (pipe := member.process.stdout)}
        while left:
            for pipe in select.select(list(left), [], [])[0]:
                yield left.pop(pipe)

    def why(self) -> str:
        """Why they have ended: one of them failed, and the others, which only lost it, have no
        reason of their own to tell.
        """
        deadline, reasons = time.monotonic() + OTHERS_END, []
        for member in self.members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = member.process.wait(max(0, deadline - time.monotonic()))
                reasons.append(why_it_failed(status, member.errors))
        return f"{self.name}: " + min(
            reasons, key=lambda reason: ("another process" in reason, "exit status" in reason)
        )


def training_side(
    name: str,
    arguments: Sequence[str],
    log_dir: str,
    code: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    ranks: int = 1,
) -> Side:
    """`train.py` with these arguments, in this copy of the code or another, as one process or
    several.
    """
    command = [
        sys.executable,
        str(code / "benchmarks" / "side.py"),
        *arguments,
        "--log_dir",
        log_dir,
        "--run_name",
        "side",
    ]
    return (
        Group(name, command, environment, ranks) if ranks > 1 else Side(name, command, environment)
    )


@contextlib.contextmanager
def all_sides(sides: Sequence[Side]) -> Iterator[dict[str, Callable[[], float]]]:
    """Start the sides; gives what `take_turns` takes, and ends them."""
    with contextlib.ExitStack() as stack:
        yield {side.name: stack.enter_context(side).turn for side in sides}


def narrow_enough(width: float) -> Callable[[Mapping[str, Sequence[float]]], bool]:
    """Whether the interval of every side over every other is narrower than `width`.

    Only the width ends the rounds, not where the interval lies: stopping at a pleasant ratio would
    make it a false one.
    """

    def enough(rates: Mapping[str, Sequence[float]]) -> bool:
        pairs = itertools.combinations(rates, 2)
        return len(next(iter(rates.values()))) >= FEWEST_FOR_AN_EARLY_END and all(
            over(rates, side, base).width <= width for base, side in pairs
        )

    return enough


# ---- the command


class Planned(NamedTuple):
    """What makes a training side."""

    name: str
    arguments: list[str]  # of train.py
    environment: dict[str, str]
    code: Path = ROOT


def plan(options: InTurnOptions, extra: Sequence[str]) -> list[Planned]:
    """The sides that the command line names. Raises UserError for what is no comparison."""
    texts = list(options.sides)
    if options.code and len(texts) != 1:
        raise UserError(f"--code compares one config here and there, not {len(texts)}")
    if not options.code and len(texts) < 2:
        raise UserError(
            f"at least two sides are needed, not {len(texts)}: "
            f"python -m benchmarks.in_turn speedup9.yaml speedup10.yaml; or one and --code FOLDER"
        )
    if len(set(texts)) < len(texts):
        raise UserError(
            'two sides are the same; give one of them an option: "speedup10.yaml --no-flash"'
        )
    sides = []
    for text in texts:
        try:
            words, environment = shlex.split(text) or [""], {}
        except ValueError as error:
            raise UserError(
                f'{text}: {str(error).lower()}; a side is quoted as a whole: "speedup10.yaml '
                f'--no-flash"'
            ) from None
        while len(words) > 1 and re.match(r"[A-Z]\w*=", words[0]):
            name, _, environment[name] = words.pop(0).partition("=")
        sides.append(Planned(text, [f"--config={words[0]}", *extra, *words[1:]], environment))
        parse(
            Config, sides[-1].arguments, config_file=True
        )  # a mistake is told before anything starts
    if options.code:
        code = Path(options.code)
        if not (code / "benchmarks" / "side.py").is_file():
            raise UserError(f"--code {code}: is no copy of this code: it has no benchmarks/side.py")
        sides.append(sides[0]._replace(name=f"{texts[0]} in {code}", code=code.resolve()))
    return sides


def compare(
    planned: Sequence[Planned],
    rounds: int,
    width: float,
    results: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, list[float]], list[Side]]:
    """tokens/s of each side in each round, and the sides with all their answers. Raises UserError
    if one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        sides = [
            training_side(
                side.name, side.arguments, str(Path(folder) / str(i)), side.code, side.environment
            )
            for i, side in enumerate(planned)
        ]
        with all_sides(sides) as turns:
            return do_rounds(sides, turns, rounds, width, results, tell), sides


def do_rounds(
    sides: Sequence[Side],
    turns: Mapping[str, Callable[[], float]],
    rounds: int,
    width: float,
    results: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, list[float]]:
    """tokens/s of each side, which has been started, in each round. Raises UserError if one fails."""

    def enough(rates: Mapping[str, Sequence[float]]) -> bool:
        done = len(rates[sides[0].name])
        if results:
            write_results(results, rates, sides)
        tell(
            f"round {done} of at most {rounds}: "
            + ", ".join(f"{rate[-1]:,.0f}" for rate in rates.values())
            + " tokens/s"
            + describe(rates)
        )
        return narrow_enough(width)(rates)

    for side in (
        sides
    ):  # the first turn, in which they compile: alone, as the compiler times what it chooses from
        side.turn()
    return take_turns(turns, rounds, enough, left_out=LEFT_OUT - 1)


def describe(rates: Mapping[str, Sequence[float]]) -> str:
    """How each side compares with the first so far, if there are rounds enough."""
    base, *others = rates
    return (
        ""
        if len(rates[base]) < FEWEST
        else "; x first " + ", ".join(str(over(rates, side, base)) for side in others)
    )


def over(rates: Mapping[str, Sequence[float]], side: str, base: str) -> Ratio:
    """How many times as fast a side is as a base."""
    return median_ratio(ratios(rates, side, base))


def write_results(path: Path, rates: Mapping[str, Sequence[float]], sides: Sequence[Side]) -> None:
    """Write every turn to a JSON file, with the machine and the code."""
    found = {
        "machine": machine(),
        "git": git_commit(),
        "left_out": LEFT_OUT,
        "sides": [
            {
                "name": side.name,
                "command": shlex.join(["python", *side.command[1:]]),
                "tokens_per_sec": rates[side.name],
                "turns": side.turns,
            }
            for side in sides
        ],
    }
    write_whole(path, json.dumps(found, indent=1) + "\n")


def main(argv: Sequence[str]) -> None:
    """Compare what the command line names. Raises UserError."""
    at = argv.index("--") if "--" in argv else len(argv)
    options = parse_command_line(InTurnOptions, argv[:at], description=__doc__, positional="sides")
    if options.output and not Path(options.output).absolute().parent.is_dir():
        raise UserError(f"--output {options.output}: no such folder")
    rates, sides = compare(
        plan(options, argv[at + 1 :]),
        options.rounds,
        options.width,
        Path(options.output) if options.output else None,
        tell=lambda line: print(line, flush=True),
    )
    base = sides[0].name
    rows = [
        (
            side.name,
            f"{statistics.median(rates[side.name]):,.0f}",
            "" if side.name == base else str(over(rates, side.name, base)),
            f"{side.turns[-1]['peak_memory_mb']:,.0f}",
        )
        for side in sides
    ]
    print_table(
        f"{len(rates[base])} rounds in turn", items("side", "tokens/s", "x first", "MB"), rows
    )


if __name__ == "__main__":
    with reported("the comparison"):
        main(sys.argv[1:])
