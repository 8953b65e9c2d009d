"""Compare how fast this project and other trainers train GPT-2, interleaved.

python -m measure.peers                               the best rung and transformers
python -m measure.peers --peer ../nanoGPT/model.py    nanoGPT, or any file like its own
python -m measure.peers --no-bf16 --batch_size 1      ... in fp32; any options of train.py, for all

All sides train the same tokens from the same weights, 4 sequences of 1024 tokens at a time unless
you set --batch_size and --seq_len, with the same precision, torch.compile, fused AdamW, decay
groups and clipping. Their first losses have to agree. A peer runs twice: as a user would start it,
and with the process settings that train.py makes, which on a CPU retain freed memory. The last side
runs the matmuls of a step and nothing else, which leaves little for any of the others to save.
"""

import functools
import math
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from config import Config, load_config
from measure.interleaved.comparison import Comparison
from measure.interleaved.rounds import (
    RoundsOptions,
    Side,
    SideError,
    run_rounds,
    say,
    to_flags,
    training_side,
)
from measure.peers import MATMULS, OURS, TRANSFORMERS
from measure.report.report import PEAK_MEMORY, Figure, Row, write_report
from runtime.errors import UserError, reported
from runtime.files import aside, write_json
from runtime.start import parse_command_line

# how much first losses may differ: sums in another order; roundings to bf16 or TF32
TOLERANCE, ROUNDED_TOLERANCE = 2e-4, 5e-3
# Options that match transformers' and nanoGPT's GPT-2, and a plain training loop.
NEEDED: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "bias": True,
    "tie_weights": True,
    "dropout": 0.0,
    "init_from": "scratch",
    "optimizer": "adamw",
    "fp16": False,
}


class PeersOptions(RoundsOptions):
    """sides"""

    model_config = ConfigDict(extra="allow")  # `model_extra` has the given flags of train.py

    peer: tuple[str, ...] = (TRANSFORMERS,)
    """transformers, and nanoGPT-like Python files, which have GPT and GPTConfig"""
    config: str = "speedup10.yaml"
    """this project's best rung"""
    log_dir: str = "logs"
    """results go to peers/ in this folder"""

    def of_training(self) -> dict[str, Any]:
        """Return the options that every side overrides in the config."""
        return {"batch_size": 4, "seq_len": 1024} | (self.model_extra or {})


# ---- the sides

peer_side = functools.partial(training_side, module="measure.peers.side")


def our_config(options: PeersOptions) -> Config:
    """Return the best rung with the options given. Raises UserError if no peer can match it."""
    config = load_config(options.config, **options.of_training())
    for name, needed in NEEDED.items():
        if (value := getattr(config, name)) != needed:
            raise UserError(
                f"{options.config}: {name} is {value}, in the peers {needed}; choose a config with "
                f"{name} {needed}"
            )
    return config


def short_name(peer: str) -> str:
    """Return a peer's name in the tables: its file and folder."""
    return "/".join(Path(peer).parts[-2:])


def check_peers(peers: Sequence[str], config: Config, place: Path) -> None:
    """Write the weights that all sides start from, and build every peer once in this process.

    So a peer's own errors come before anything is timed. Raises UserError for another loss.
    """
    from measure.peers.side import build_peer, loss_in_fp32, open_loader, write_weights

    loader, ours = open_loader(config), write_weights(config, place)
    loss = loss_in_fp32(OURS, ours, loader)
    config = config.with_options(init_from=str(place))
    for peer in peers:
        theirs = loss_in_fp32(peer, build_peer(peer, config), loader)
        compare_losses(peer, theirs, loss, config, TOLERANCE)


def compare_losses(name: str, loss: float, ours: float, config: Config, tolerance: float) -> None:
    """Raise SideError if a side's first loss differs from our side's."""
    # our model leaves padding rows out of its softmax, a peer's may include them
    padding = math.log(config.vocab_size / config.n_vocab)
    if not -tolerance <= loss - ours <= tolerance + padding:
        raise SideError(
            f"{name}: its first loss is {loss:.5f}, ours {ours:.5f}, from equal weights and "
            f"tokens: a difference of {loss - ours:.2g}, where rounding explains {tolerance:g} and "
            f"padding {padding:.2g}; so it computes something else"
        )


def plan(options: PeersOptions, place: Path) -> tuple[Side, list[Side]]:
    """Return our side, and those to compare it with: the peers, and the matmuls of a step.

    `place`: the weights that `check_peers` wrote.
    """
    shape = ["--config", options.config, *to_flags(options.of_training())]
    flags = [*shape, "--init_from", str(place)]
    others = list[Side]()
    for peer in options.peer:
        name, of_peer = short_name(peer), [*flags, "--peer", peer]
        others.append(peer_side(name, of_peer))
        others.append(peer_side(f"{name}, our settings", [*of_peer, "--our_settings"]))
    stem = Path(options.config).stem
    matmuls = [*shape, "--peer", MATMULS, "--our_settings"]
    others.append(peer_side(f"{stem}, matmuls only", matmuls))
    return training_side(stem, flags), others


# ---- the report


def rows_of(groups: Sequence[Comparison]) -> list[Row]:
    """Return the figures of our side, in the first group, and of the other side of each group.

    Ratios are those of a group: the later ones find our side's code in the compile cache.
    """
    return [
        {
            "side": side.name,
            "tokens_per_sec": side.median,
            "peak_memory_mb": side.peak_memory_mb,
            "first_step_s": side.turns[0].seconds[0],
            "ours_over": group and group.ratio(0, 1),
            "memory_ratio": group and group.sides[0].peak_memory_mb / side.peak_memory_mb,
        }
        for side, group in [
            (groups[0].sides[0], None),
            *((group.sides[1], group) for group in groups),
        ]
    ]


FIGURES = [
    Figure("side", "side"),
    Figure(
        "tokens_per_sec",
        "tokens/s",
        ",.0f",
        "the median of a side's own rounds; for the first row, of its first comparison",
    ),
    Figure("ours_over", "ours over it", "", "tokens/s of the first row over the side's", bar=True),
    PEAK_MEMORY,
    Figure("memory_ratio", "MB, ours over its", ".2f", "MB of our side beside it over its own"),
    Figure(
        "first_step_s",
        "first step, s",
        ".1f",
        "with compilation, unless the compile cache has its result",
    ),
]


def report(groups: Sequence[Comparison], config: Config, folder: Path) -> None:
    """Report the groups that are measured: report.md, report.html, results.json and peers.png."""
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("torch", TRANSFORMERS) if find_spec(name)
    )
    shown = ("batch_size", "seq_len", "n_layer", "n_head", "n_embd", "bf16", "compile")
    described = ", ".join(f"{name} {getattr(config, name)}" for name in shown)
    rows = rows_of(groups)
    first = groups[0]
    about = (
        f"{first.place}; {versions}, commit {first.git}, {first.date}. "
        f"{rows[0]['side']}: {described}."
    )
    write_report(
        folder,
        "Training speed of this project and of others",
        FIGURES,
        rows,
        about=[about],
        bars="peers.png",
        where=f"{first.place}, {first.date}",
    )
    rounds = [group.model_dump(exclude_unset=True) for group in groups]
    write_json(folder / "results.json", rounds)


def main(options: PeersOptions) -> None:
    """Compare our side with each peer. Raises UserError, TrainingError if a side fails."""
    config, groups = our_config(options), list[Comparison]()
    rounded = config.bf16 or config.fp32_precision() != "highest"
    tolerance = ROUNDED_TOLERANCE if rounded else TOLERANCE
    folder = Path(options.log_dir) / "peers"
    with tempfile.TemporaryDirectory() as place:
        check_peers(options.peer, config, Path(place))
        if folder.exists():
            folder.rename(moved := aside(folder))
            say(f"note: {folder} is now {moved}")
        folder.mkdir(parents=True)
        ours, others = plan(options, Path(place))

        def check(side: Side) -> None:
            loss, our_loss = side.turns[0].loss, ours.turns[0].loss
            if loss is not None and our_loss is not None:  # the matmuls have none
                compare_losses(side.name, loss, our_loss, config, tolerance)

        for other in others:
            sides = (ours, other)
            groups.append(run_rounds(sides, options.rounds, options.width, check=check))
            report(groups, config, folder)


if __name__ == "__main__":
    # Not `start`: the sides would inherit settings that a user of a peer does not have.
    OPTIONS = parse_command_line(PeersOptions, others=Config)
    with reported(
        OPTIONS.log_dir, interrupted="interrupted; the groups that were finished are kept"
    ):
        main(OPTIONS)
