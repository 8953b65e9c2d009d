"""Compare how fast this project, transformers and others generate text, interleaved.

python -m measure.peers.generate --texts 16
python -m measure.peers.generate --texts 1 --peer ../nanoGPT/model.py

All sides have the same random weights of GPT-2 (124M), and their likeliest tokens have to agree.
Ours loads them as sample.py does. A peer runs its own `generate`, as a user would start it.
"""

import tempfile
from pathlib import Path

from config import load_config
from measure.interleaved.__main__ import print_comparison
from measure.interleaved.rounds import RoundsOptions, Side, SideError, run_rounds, to_flags
from measure.peers import OURS, TRANSFORMERS
from measure.peers.__main__ import peer_side, short_name
from runtime.cli import Device, Positive
from runtime.errors import reported
from runtime.start import parse_command_line


class GenerateOptions(RoundsOptions):
    """generated texts"""

    texts: Positive = 16
    """texts at a time"""
    tokens: Positive = 100
    """tokens of each text, after a line break"""
    bf16: bool = False
    """weights in bfloat16"""
    device: Device = "auto"
    """auto, cuda, mps or cpu"""
    config: str = "gpt2_124m.yaml"
    """config of the model"""
    peer: tuple[str, ...] = (TRANSFORMERS,)
    """transformers, and nanoGPT-like Python files whose GPT has nanoGPT's generate"""
    output: str | None = None
    """JSON file for the rounds of every side, written after each"""


def main(options: GenerateOptions) -> None:
    """Compare, and print a row for each side. Raises UserError and SideError."""
    from measure.peers.side import write_weights  # imports torch

    how = to_flags(options.model_dump(include={"texts", "tokens", "bf16", "device"}))
    with tempfile.TemporaryDirectory() as folder:
        # Weights so large that every part of the model changes the choices.
        write_weights(load_config(options.config), Path(folder), std=0.2)
        how += ["--init_from", folder]
        sides = [
            peer_side(short_name(peer), [*how, "--peer", peer]) for peer in (OURS, *options.peer)
        ]

        def check(side: Side) -> None:
            theirs, ours = (s.turns[0].likeliest for s in (side, sides[0]))
            if theirs != ours:
                raise SideError(f"{side.name}: its likeliest tokens are {theirs}, ours {ours}")

        found = run_rounds(
            sides, options.rounds, options.width, results=options.output, check=check
        )
    print_comparison(found, f"{options.texts} texts at a time, ")
    ours = found.sides[0]
    for i, side in enumerate(found.sides[1:], start=1):
        memory = ours.peak_memory_mb / side.peak_memory_mb
        print(f"ours over {side.name}: tokens/s {found.ratio(0, i)}, MB {memory:.2f}")


if __name__ == "__main__":
    # Not `start`: the sides would inherit settings that a user of a peer does not have.
    OPTIONS = parse_command_line(GenerateOptions)
    with reported("the comparison"):
        main(OPTIONS)
