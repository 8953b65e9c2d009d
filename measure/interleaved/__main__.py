"""Compare the training speed of configs: a few steps of each, interleaved round after round.

python -m measure.interleaved speedup9.yaml speedup10.yaml
python -m measure.interleaved speedup10.yaml "speedup10.yaml --no-flash"
python -m measure.interleaved quickstart.yaml "OMP_NUM_THREADS=1 quickstart.yaml"  other environment
python -m measure.interleaved a.yaml "PYTHONPATH=../other a.yaml"   another copy of this code
python -m measure.interleaved a.yaml "RANKS=2 a.yaml"              several ranks, by torchrun
python -m measure.interleaved a.yaml b.yaml -- --batch_size 2  options after -- go to all of them
python -m measure.interleaved a.yaml "-m measure.peer transformers --config a.yaml"

Each side is a process of its own, which sleeps while another one trains. A machine that becomes
slower slows all sides of a round. Every other round runs backwards, so the last side is no worse
off than the first. The result is the ratio within a round: its median, with a confidence interval.
A side that begins with -m MODULE is any program that answers like measure/interleaved/side.py.
measure/peer.py is one, for transformers and for files like nanoGPT's model.py.
"""

import re
import shlex
import sys
from collections.abc import Sequence

from pydantic import Field

from config import Config
from measure.interleaved.comparison import Comparison
from measure.interleaved.ratio import FEWEST
from measure.interleaved.rounds import (
    ROUNDS,
    WIDTH,
    Side,
    run_rounds,
    split_command_line,
    training_side,
)
from measure.report.tables import print_table
from runtime.cli import Options, parse
from runtime.errors import UserError, reported
from runtime.start import parse_command_line


class InterleavedOptions(Options):
    """the sides, and how long"""

    sides: tuple[str, ...] = Field(min_length=2)
    """configs, or -m MODULE; quote one together with options after it, environment variables and
    RANKS=N before it
    """
    rounds: int = Field(ROUNDS, ge=FEWEST)
    """rounds at most"""
    width: float = Field(WIDTH, ge=0, le=1)
    """stop once every interval is narrower than this share of its median"""
    output: str | None = None
    """JSON file for the steps of every side, written after each round"""


def parse_side(text: str, of_all: Sequence[str]) -> Side:
    """Make the side of `[NAME=VALUE ...] CONFIG [options]`: environment and options of train.py.

    `-m MODULE [words]` instead of CONFIG: the side is this module's program. With `RANKS=N` among
    the variables, torchrun starts the side on N ranks. Options `of_all` come before its own, which
    take precedence. Raises UserError for a mistake in it, before anything starts.
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
    module = "measure.interleaved.side"
    if words[0] == "-m" and len(words) > 1:
        _, module, *words = words
        flags = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        arguments = [*words[:flags], *of_all, *words[flags:]]
    else:
        arguments = [f"--config={words[0]}", *of_all, *words[1:]]
        parse(Config, arguments, config_file=True)
    return training_side(text, arguments, environment, int(ranks), module)


def print_comparison(found: Comparison) -> None:
    """Print a row for each side, with its speed and memory over the first side's."""
    first = found.sides[0].peak_memory_mb
    rows = [
        (
            side.name,
            f"{side.median:,.0f}",
            str(found.ratio(i)) if i else "",
            f"{side.peak_memory_mb:,.0f}",
            f"{side.peak_memory_mb / first:.2f}" if i and first else "",
        )
        for i, side in enumerate(found.sides)
    ]
    headings = ("side", "tokens/s", "over first", "MB", "MB over first")
    print_table(f"{found.rounds} interleaved rounds", headings, rows)


def main(options: InterleavedOptions, of_all: Sequence[str]) -> None:
    """Compare the sides of the command line. Raises UserError."""
    sides = [parse_side(text, of_all) for text in options.sides]
    print_comparison(run_rounds(sides, options.rounds, options.width, results=options.output))


if __name__ == "__main__":
    OWN, OF_ALL = split_command_line(sys.argv[1:])
    # Not `start`: a peer would inherit settings that its users do not have.
    OPTIONS = parse_command_line(InterleavedOptions, OWN, positional="sides")
    with reported("the comparison"):
        main(OPTIONS, OF_ALL)
