"""Compare the training speed of configs: a few steps of each, interleaved round after round.

python -m measure.interleaved speedup9.yaml speedup10.yaml
python -m measure.interleaved speedup10.yaml "speedup10.yaml --no-flash"
python -m measure.interleaved quickstart.yaml "OMP_NUM_THREADS=1 quickstart.yaml"  other environment
python -m measure.interleaved a.yaml "PYTHONPATH=../other a.yaml"   another copy of this code
python -m measure.interleaved a.yaml "RANKS=2 a.yaml"              several ranks, by torchrun
python -m measure.interleaved a.yaml b.yaml -- --batch_size 2  options after -- go to all of them

Each side is a process of its own, which sleeps while another one trains. A machine that becomes
slower slows all sides of a round. Every other round runs backwards, so the last side is no worse
off than the first. The result is the ratio within a round: its median, with a confidence interval.
"""

import re
import shlex
import sys
from collections.abc import Sequence

from pydantic import Field

from config import Config
from measure.interleaved.comparison import Comparison
from measure.interleaved.rounds import (
    RoundsOptions,
    Side,
    run_rounds,
    split_command_line,
    training_side,
)
from measure.report.tables import print_table
from runtime.cli import parse
from runtime.errors import UserError, reported
from runtime.start import start


class InterleavedOptions(RoundsOptions):
    """the sides"""

    sides: tuple[str, ...] = Field(min_length=2)
    """configs; quote one together with options after it, environment variables and RANKS=N
    before it
    """
    output: str | None = None
    """JSON file for the steps of every side, written after each round"""


def parse_side(text: str, of_all: Sequence[str]) -> Side:
    """Make the side of `[NAME=VALUE ...] CONFIG [options]`: environment and options of train.py.

    With `RANKS=N` among the variables, torchrun starts the side on N ranks. Raises UserError for a
    mistake in it, before anything starts.
    """
    try:
        words = shlex.split(text) or [""]
    except ValueError as error:
        raise UserError(f"{text}: {error}") from None
    environment = {}
    while len(words) > 1 and re.match(r"[A-Z]\w*=", words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    ranks = environment.pop("RANKS", "1")
    if not re.fullmatch(r"[1-9]\d{0,4}", ranks):
        raise UserError(f"{text}: RANKS is a number of ranks, such as 2, not {ranks!r}")
    arguments = [f"--config={words[0]}", *of_all, *words[1:]]
    parse(Config, arguments, config_file=True)
    return training_side(text, arguments, environment, int(ranks))


def print_comparison(found: Comparison, about: str = "") -> None:
    """Print a row for each side; the title begins with `about`."""
    rows = [
        (
            side.name,
            f"{side.median:,.0f}",
            str(found.ratio(i)) if i else "",
            f"{side.peak_memory_mb:,.0f}",
        )
        for i, side in enumerate(found.sides)
    ]
    headings = ("side", "tokens/s", "x first", "MB")
    print_table(f"{about}{found.rounds} interleaved rounds", headings, rows)


def main(options: InterleavedOptions, of_all: Sequence[str]) -> None:
    """Compare the sides of the command line. Raises UserError."""
    sides = [parse_side(text, of_all) for text in options.sides]
    print_comparison(run_rounds(sides, options.rounds, options.width, results=options.output))


if __name__ == "__main__":
    OWN, OF_ALL = split_command_line(sys.argv[1:])
    OPTIONS = start(InterleavedOptions, OWN, positional="sides")
    with reported("the comparison"):
        main(OPTIONS, OF_ALL)
