"""Compare how fast this project trains GPT-2 with what people would take instead, interleaved.

python -m measure.peers                               the best rung, the baseline, and transformers
python -m measure.peers --peer ../nanoGPT/model.py    ... and any nanoGPT-like file
python -m measure.peers --no-bf16 --batch_size 1      ... in fp32, for a CPU without bf16

All sides train the same tokens from the same weights in batches of one size, and their first losses
have to agree. The best rung and the peers have the same precision, torch.compile, fused AdamW,
decay groups and clipping; the baseline has none of these. A peer runs as a user would start it,
without the settings that train.py makes for its process (how it takes memory from the system).
"""

import datetime
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from config import Config, DataConfig, load_config
from measure.interleaved.comparison import Comparison
from measure.interleaved.options import given, optional_fields, to_flags
from measure.interleaved.rounds import (
    LEFT_OUT,
    RoundsOptions,
    Side,
    SideError,
    run_rounds,
    say,
    training_side,
)
from measure.report.report import Figure, Report, Row
from measure.report.tables import PEAK_MEMORY
from runtime.cli import Options
from runtime.errors import TrainingError, UserError, reported
from runtime.files import aside, write_json
from runtime.report import git_commit, machine
from runtime.start import start

TRANSFORMERS = "transformers"
# how much first losses may differ: sums in another order; roundings to bf16 or TF32
TOLERANCE, ROUNDED_TOLERANCE = 2e-4, 5e-3
# what transformers' and nanoGPT's models are, and the plain loop around them does
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
Overrides: Any = optional_fields(
    Config,
    *("batch_size", "seq_len", "device", "n_layer", "n_head", "n_embd", "dataset", "data_dir"),
    *("bf16", "compile"),
    title="of every side; the baseline has neither bf16 nor compile",
    none="as the config says, but 4 sequences of 1024 tokens",
)


class WhatOptions(Options):
    """what to compare"""

    peer: tuple[str, ...] = ()
    """nanoGPT-like Python files, which have GPT and GPTConfig"""
    config: str = "speedup10.yaml"
    """this project's best rung"""
    baseline: bool = True
    """also baseline.yaml"""
    log_dir: str = "logs"
    """results go to peers/ in this folder"""


class PeersOptions(RoundsOptions, Overrides, WhatOptions):
    """All options of a comparison with peers."""


# ---- the sides


def our_config(options: PeersOptions) -> Config:
    """Return the best rung with the options given. Raises UserError if no peer trains likewise."""
    values = {"batch_size": 4, "seq_len": 1024} | given(options, Overrides)
    config = load_config(options.config, **values)
    for name, needed in NEEDED.items():
        if (value := getattr(config, name)) != needed:
            raise UserError(
                f"{options.config}: has {name} {value}, which the peers have not; choose a config "
                f"with {name} {needed}"
            )
    return config


def peer_name(path: str) -> str:
    """Return a peer's name in the tables: the file's and its folder's."""
    return "/".join(Path(path).resolve().parts[-2:])


def peer_paths(options: PeersOptions) -> dict[str, str]:
    """Return the peers to compare with by their names.

    Raises UserError for a file that is missing, or named twice.
    """
    peers = {TRANSFORMERS: TRANSFORMERS} if find_spec(TRANSFORMERS) else {}
    for path in options.peer:
        if (name := peer_name(path)) in peers:
            raise UserError(f"--peer: {name} is named twice; names are the file's and its folder's")
        if not Path(path).is_file():
            raise UserError(
                f"--peer {path}: no such file; a peer is a Python file with GPT and GPTConfig, "
                "such as nanoGPT's model.py"
            )
        peers[name] = path
    return peers


def check_peers(peers: Mapping[str, str], config: Config, place: Path) -> None:
    """Write the weights that all sides start from, and build every peer once in this process.

    So what is wrong with one is reported before anything is timed. Raises UserError.
    """
    import torch

    from checkpoint.hugging_face import write_hugging_face
    from measure.peers.side import build_peer, loss_in_fp32, open_loader
    from model import GPT, GPTConfig

    loader = open_loader(config)
    torch.manual_seed(config.seed)
    ours = GPT(GPTConfig.of(config))
    weights = ours.state_dict()
    weights["lm_head.weight"] = weights["lm_head.weight"].clone()
    for name, tied in (("tied", True), ("untied", False)):
        (place / name).mkdir()
        write_hugging_face(place / name, replace(ours.config, tie_weights=tied), weights)
    loss = loss_in_fp32("GPT", ours, lambda model, x, y: model(x, y), loader)
    config = config.model_copy(update={"init_from": str(place / "tied")})
    for name, path in peers.items():
        theirs = loss_in_fp32(name, *build_peer(path, config), loader)
        compare_losses(name, theirs, loss, config, TOLERANCE)


def compare_losses(name: str, loss: float, ours: float, config: Config, tolerance: float) -> None:
    """Raise SideError if a side's first loss is not ours."""
    # rows of padding take part in the softmax of models that do not leave them out, as ours does
    padding = math.log(config.vocab_size / config.n_vocab)
    if not -tolerance <= loss - ours <= tolerance + padding:
        raise SideError(
            name,
            f"its first loss is {loss:.5f}, ours {ours:.5f}, from equal weights and tokens: a "
            f"difference of {loss - ours:.2g}, where rounding explains {tolerance:g} and padding "
            f"{padding:.2g}; so it computes something else",
        )


def plan(
    options: PeersOptions, config: Config, peers: Mapping[str, str], place: Path
) -> tuple[Side, list[Side]]:
    """Return our side, and those to be interleaved with it one by one, as each keeps its memory.

    `place`: the weights that `check_peers` wrote.
    """

    def flags(file: str, names: Iterable[str], weights: str) -> list[str]:
        values = {name: getattr(config, name) for name in names}
        return ["--config", file, *to_flags(values | {"init_from": f"{place}/{weights}"})]

    chosen = flags(options.config, Overrides.model_fields, "tied")
    others = [
        training_side(peer, [*chosen, "--peer", path], module="measure.peers.side")
        for peer, path in peers.items()
    ]
    if options.baseline:
        shape = ("n_layer", "n_head", "n_embd", "block_size", "device", "seed")
        plain = flags("baseline.yaml", [*DataConfig.model_fields, *shape], "untied")
        others.append(training_side("baseline", plain))
    return training_side(Path(options.config).stem, chosen), others


# ---- measuring


def interleave(ours: Side, other: Side, options: PeersOptions, config: Config) -> Comparison:
    """Interleave our side with another. Raises SideError, also if first losses differ."""

    def check(side: Side) -> None:
        loss, our_loss = side.turns[0].loss or math.nan, ours.turns[0].loss or math.nan
        rounded = config.bf16 or config.tf32 or config.matmul_precision != "highest"
        tolerance = ROUNDED_TOLERANCE if rounded else TOLERANCE
        compare_losses(side.name, loss, our_loss, config, tolerance)

    sides = (ours, other)
    return run_rounds(sides, options.rounds, options.width, check=check)


def rows_of(groups: Sequence[Comparison]) -> list[Row]:
    """Return the figures of each side. Every group begins with ours."""
    rows: dict[str, Row] = {}
    for group in groups:
        ours = group.sides[0]
        for i, side in enumerate(group.sides):
            memory = side.peak_memory_mb
            row = {
                "side": side.name,
                "tokens_per_sec": side.median,
                "ours_over": None,
                "peak_memory_mb": memory,
                "memory_ratio": None,
                "first_step_s": side.turns[0].seconds[0],
            }
            if i:
                row["ours_over"] = group.ratio(0, i)
                row["memory_ratio"] = rows[ours.name]["peak_memory_mb"] / memory
            rows.setdefault(side.name, row)
    return list(rows.values())


# ---- the report

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
    Figure("memory_ratio", "MB, ours over its", ".2f", "MB of the first row over the side's"),
    Figure(
        "first_step_s",
        "first step, s",
        ".1f",
        "with compilation, unless the compile cache has its result",
    ),
]


def report(
    groups: Sequence[Comparison],
    failed: Sequence[str],
    options: PeersOptions,
    config: Config,
    folder: Path,
) -> None:
    """Report the groups that are measured: report.md, report.html, results.json and peers.png."""
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("torch", TRANSFORMERS) if find_spec(name)
    )
    shown = ("batch_size", "seq_len", "n_layer", "n_head", "n_embd", "bf16", "compile")
    described = ", ".join(f"{name} {getattr(config, name)}" for name in shown)
    rows = rows_of(groups)
    title = "Beside what people would take instead"
    where, today = machine(), datetime.date.today()
    about = f"{where}; {versions}, commit {git_commit()}, {today}. {rows[0]['side']}: {described}."
    Report(
        folder,
        title,
        FIGURES,
        rows,
        remarks=[f"failed: {line}" for line in failed],
        about=[about],
        bars="peers.png",
        where=f"{where}, {today}",
    ).write()
    results = {
        "machine": machine(),
        "git": git_commit(),
        "versions": versions,
        "options": options.model_dump(mode="json", exclude={"log_dir", "data_dir"})
        | {"peer": [peer_name(path) for path in options.peer]},
        "left_out": LEFT_OUT,
        "in_turn": [group.dump()["sides"] for group in groups],
        "failed": failed,
    }
    write_json(folder / "results.json", results)


def main(options: PeersOptions) -> None:
    """Compare with what the options name. Raises UserError."""
    config = our_config(options)
    peers = peer_paths(options)
    if TRANSFORMERS not in peers:
        say("note: transformers is not installed (pip install -r requirements-dev.txt)")
    folder = Path(options.log_dir) / "peers"
    with tempfile.TemporaryDirectory() as place:
        check_peers(peers, config, Path(place))
        say("from equal weights and tokens, all models have the same loss in fp32")
        if folder.exists():
            folder.rename(moved := aside(folder))
            say(f"note: {folder} is now {moved}")
        folder.mkdir(parents=True)
        ours, others = plan(options, config, peers, Path(place))
        groups: list[Comparison] = []
        failed: list[str] = []
        for other in others:
            try:
                groups.append(interleave(ours, other, options, config))
            except SideError as error:
                if error.name == ours.name:
                    raise
                failed.append(str(error))
                say(f"failed: {error}")
            if groups:
                report(groups, failed, options, config, folder)
    if failed:
        raise TrainingError("\n".join(failed))


if __name__ == "__main__":
    OPTIONS = start(PeersOptions, description=__doc__)
    with reported(
        OPTIONS.log_dir, interrupted="interrupted; the groups that were finished are kept"
    ):
        main(OPTIONS)
