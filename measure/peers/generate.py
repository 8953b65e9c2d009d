"""Compare how fast this project, transformers and others generate text, interleaved.

python -m measure.peers.generate --texts 16
python -m measure.peers.generate --texts 1 --peer ../nanoGPT/model.py

All sides have the same random weights of GPT-2 (124M), and their likeliest tokens have to agree.
Ours loads them as sample.py does; a peer runs its own `generate`, as a user would start it.
"""

import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from config import Config
from measure.interleaved.options import given, optional_fields, to_flags
from measure.interleaved.ratio import median_ratio
from measure.interleaved.rounds import RoundsOptions, Side, SideError, run_rounds, training_side
from measure.peers.generate_side import GenerateOptions
from runtime.cli import Options
from runtime.errors import reported
from runtime.report import items, print_table
from runtime.start import start

Shape: Any = optional_fields(
    Config, "n_layer", "n_head", "n_embd", "block_size", title="of the model", none="as GPT-2 has"
)


class CompareOptions(Options):
    """what to compare"""

    peer: tuple[str, ...] = ()
    """nanoGPT-like Python files whose GPT has nanoGPT's generate; transformers is always compared,
    if it is installed
    """
    output: str | None = None
    """JSON file for the rounds of every side, written after each"""


class AllOptions(RoundsOptions, CompareOptions, Shape, GenerateOptions):
    """All options of a comparison of generation."""


def write_weights(options: AllOptions, folder: Path) -> None:
    """Write random weights, which all sides load."""
    import torch

    from checkpoint.hugging_face import write_hugging_face
    from model import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(**given(options, Shape), tie_weights=True))
    for p in model.parameters():  # every part of the model has to change the choices
        torch.nn.init.normal_(p, std=0.2)
    write_hugging_face(folder, model.config, model.state_dict())


def main(options: AllOptions) -> None:
    """Compare, and print a row for each side. Raises SideError."""
    peers = ["transformers"] if find_spec("transformers") else []
    how = to_flags(options.model_dump(include=set(GenerateOptions.model_fields)))
    results = Path(options.output) if options.output else None
    with tempfile.TemporaryDirectory() as folder:
        write_weights(options, Path(folder))
        sides = [
            training_side(
                "/".join(Path(peer).parts[-2:]) or "ours",
                [*how, "--folder", folder, "--peer", peer],
                module="measure.peers.generate_side",
            )
            for peer in ["", *peers, *options.peer]
        ]

        def check(side: Side) -> None:
            its, ours = (s.answers[0]["likeliest"] for s in (side, sides[0]))
            if its != ours:
                raise SideError(side.name, f"its likeliest tokens are {its}, ours {ours}")

        rates = run_rounds(sides, options.rounds, options.width, results=results, check=check)
    rows = [
        (
            side.name,
            f"{statistics.median(of_side):,.1f}",
            "" if side is sides[0] else str(median_ratio(rates[0], of_side)),
        )
        for side, of_side in zip(sides, rates, strict=True)
    ]
    title = f"{options.texts} texts at a time, {len(rates[0])} interleaved rounds"
    print_table(title, items("side", "tokens/s", "ours over it"), rows)


if __name__ == "__main__":
    OPTIONS = start(AllOptions, description=__doc__)
    with reported("the comparison"):
        main(OPTIONS)
