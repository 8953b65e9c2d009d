"""Compare how fast this project trains GPT-2 with what people would take instead, interleaved.

python -m measure.peers                               the best rung, the baseline, and transformers
python -m measure.peers --peer ../nanoGPT/model.py    ... and any nanoGPT-like file
python -m measure.peers --no-bf16 --batch_size 1      ... in fp32, for a CPU without bf16

All sides train the same tokens from the same weights in batches of one size, and their first losses
have to agree. The best rung and the peers have the same precision, torch.compile, fused AdamW,
decay groups and clipping; the baseline has none of these. Every peer runs twice: as a user would
start it, and with the settings that train.py makes for its process (how it takes memory from the
system). That shows what our code gains and what these settings gain.
"""

import datetime
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field

from config import Config, DataConfig, load_config
from measure.interleaved import (
    LEFT_OUT,
    WIDTH,
    Side,
    SideError,
    ratio_of,
    run_rounds,
    say,
    training_side,
)
from measure.ladder_report import draw_factors, write_report
from measure.options import given, optional_fields, to_flags
from measure.ratio import FEWEST, Ratio
from runtime.cli import Options
from runtime.errors import TrainingError, UserError, reported
from runtime.files import aside, write_whole
from runtime.report import field, git_commit, machine
from runtime.start import start

TRANSFORMERS = "transformers"
WITH_SETTINGS = " + our settings"  # after a peer's name
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
    settings: bool = True
    """also each peer with train.py's process settings"""
    starts: bool = True
    """also the time from a process's start to the end of its first step, with an empty and with a
    filled compile cache
    """
    rounds: int = Field(20, ge=FEWEST)
    """rounds at most"""
    width: float = Field(WIDTH, ge=0, le=1)
    """stop once every interval is narrower than this share of its median"""
    log_dir: str = "logs"
    """results go to peers/ in this folder"""


class PeersOptions(Overrides, WhatOptions):
    """All options of a comparison with peers."""


@dataclass
class Entry:
    """A side, and its figures."""

    name: str
    side: Side
    rates: list[float] = dataclass_field(default_factory=list)  # tokens/s of each round
    tokens_per_sec: float | None = None
    cold_s: float | None = None
    warm_s: float | None = None
    first_step_s: float | None = None
    peak_memory_mb: float | None = None
    ours_over: Ratio | None = None
    over_plain: Ratio | None = None  # gain of our settings
    memory_ratio: float | None = None
    error: str = ""


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


def peer_paths(options: PeersOptions) -> dict[str, str]:
    """Return the peers to compare with by their names in the tables, the file's and its folder's.

    Raises UserError for a file that is missing, or named twice.
    """
    peers = {TRANSFORMERS: TRANSFORMERS} if find_spec(TRANSFORMERS) else {}
    for path in options.peer:
        resolved = Path(path).resolve()
        name = "/".join(resolved.parts[-2:])
        if name in peers:
            raise UserError(f"--peer: {name} is named twice; names are the file's and its folder's")
        if not resolved.is_file():
            raise UserError(
                f"--peer {path}: no such file; a peer is a Python file with GPT and GPTConfig, "
                "such as nanoGPT's model.py"
            )
        peers[name] = str(resolved)
    return peers


def check_peers(peers: Mapping[str, str], config: Config, place: Path) -> None:
    """Write the weights that all sides start from, and build every peer once in this process.

    So what is wrong with one is reported before anything is timed. Raises UserError.
    """
    import torch

    from checkpoint.hugging_face import write_hugging_face
    from measure.peer_side import build_peer, loss_in_fp32, open_loader
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
) -> list[list[Side]]:
    """Return groups of sides: ours alone, then those to be interleaved with it.

    Groups are small, as each side keeps its memory.
    """

    def flags(file: str, names: Iterable[str], weights: str) -> list[str]:
        values = {name: getattr(config, name) for name in names}
        return ["--config", file, *to_flags(values | {"init_from": f"{place}/{weights}"})]

    chosen = flags(options.config, Overrides.model_fields, "tied")
    groups = [[training_side(Path(options.config).stem, chosen)]]
    for peer, path in peers.items():
        sides = {peer: [*chosen, "--peer", path]}
        if options.settings:
            sides[peer + WITH_SETTINGS] = [*sides[peer], "--process_settings"]
        module = "measure.peer_side"
        groups.append([training_side(*side, module=module) for side in sides.items()])
    if options.baseline:
        shape = ("n_layer", "n_head", "n_embd", "block_size", "device", "seed")
        plain = flags("baseline.yaml", [*DataConfig.model_fields, *shape], "untied")
        groups.append([training_side("baseline", plain)])
    if options.starts:  # each with its own compile cache
        for i, side in enumerate(itertools.chain(*groups)):
            # no name in the path: white space would break torch.compile's calls of g++
            side.environment["TORCHINDUCTOR_CACHE_DIR"] = str(place / "caches" / str(i))
    return groups


# ---- measuring


class Comparison:
    """The sides and what is measured of them."""

    def __init__(
        self, options: PeersOptions, config: Config, peers: Mapping[str, str], place: Path
    ):
        """`place`: a folder with the weights that `check_peers` wrote, and for compile caches."""
        self.options, self.config, self.peers = options, config, peers
        groups = plan(options, config, peers, place)
        (self.ours,), *self.groups = [[Entry(side.name, side) for side in each] for each in groups]
        self.entries = {entry.name: entry for entry in (self.ours, *itertools.chain(*self.groups))}
        self.first_loss: float | None = None  # ours
        self.rounds: list[list[dict[str, Any]]] = []  # the answers of each group's sides

    @property
    def failed(self) -> list[str]:
        """Why sides failed."""
        return [entry.error for entry in self.entries.values() if entry.error]

    def check(self, side: Side) -> None:
        """Note a side's first step, and compare its loss with ours. Raises SideError."""
        first, entry, config = side.answers[0], self.entries[side.name], self.config
        entry.first_step_s = entry.first_step_s or first["seconds"][0]
        self.first_loss = self.first_loss or first["loss"]
        rounded = config.bf16 or config.tf32 or config.matmul_precision != "highest"
        tolerance = ROUNDED_TOLERANCE if rounded else TOLERANCE
        compare_losses(side.name, first["loss"], self.first_loss, config, tolerance)

    def measure(self) -> Iterator[None]:
        """Measure the starts and then each group, and yield after each.

        A peer that fails loses only its own group. Raises SideError if ours fails.
        """
        if self.options.starts:
            for entry in self.entries.values():
                self.attempt(self.start, [entry])
            yield
        for group in self.groups:
            self.attempt(self.interleave, group)
            yield

    def attempt(self, measure: Callable[[Sequence[Entry]], None], entries: Sequence[Entry]) -> None:
        """Measure those entries that have not failed; note it if one does now."""
        try:
            if able := [entry for entry in entries if not entry.error]:
                measure(able)
        except SideError as error:
            if error.name == self.ours.name:
                raise
            self.entries[error.name].error = str(error)
            say(f"failed: {error}")

    def start(self, entries: Sequence[Entry]) -> None:
        """Time starts to the end of the first step, with an empty and a filled compile cache."""
        for entry in entries:
            seconds = []
            for _ in range(2):
                begun = time.perf_counter()
                with entry.side as side:
                    side.train()
                    seconds.append(time.perf_counter() - begun)
                self.check(side)
            entry.cold_s, entry.warm_s = seconds
            say(
                f"{entry.name}: {entry.cold_s:.1f} s to the end of the first step with an empty "
                f"compile cache, {entry.warm_s:.1f} s with a filled one"
            )

    def interleave(self, group: Sequence[Entry]) -> None:
        """Interleave our side with those of a group."""
        entries, options = [self.ours, *group], self.options
        sides = [entry.side for entry in entries]
        rates = run_rounds(sides, options.rounds, options.width, check=self.check)
        self.rounds.append(
            [
                {"side": side.name, "tokens_per_sec": rates[side.name], "turns": side.answers}
                for side in sides
            ]
        )
        memory = {side.name: side.answers[-1]["peak_memory_mb"] for side in sides}
        for entry in entries:
            entry.rates += rates[entry.name]
            entry.tokens_per_sec = statistics.median(entry.rates)
            entry.peak_memory_mb = memory[entry.name]
        for entry in group:
            entry.ours_over = ratio_of(rates, self.ours.name, entry.name)
            entry.memory_ratio = memory[self.ours.name] / memory[entry.name]
        for with_settings in group[1:]:
            with_settings.over_plain = ratio_of(rates, with_settings.name, group[0].name)


# ---- the report

COLUMNS = [
    field("side", "name"),
    field("tokens/s", "tokens_per_sec", ",.0f"),
    field("ours over it", "ours_over"),
    field("our settings", "over_plain"),
    field("MB", "peak_memory_mb", ",.0f"),
    field("MB, ours over its", "memory_ratio", ".2f"),
    field("first step, s", "first_step_s", ".1f"),
    field("cold start, s", "cold_s", ".1f"),
    field("warm start, s", "warm_s", ".1f"),
]
MEANING = (
    "Ours over it: tokens/s of our side, the first, over the side's, the median of the rounds' "
    "ratios, with its 95% interval. Our settings: likewise the peer with them over the peer "
    "without. tokens/s: the median of a side's own rounds. MB: peak memory, of the GPU's tensors "
    "on CUDA, else of the process; and that of ours over the side's. Cold and warm start: from the "
    "process's start to the end of the first step, with an empty and with a filled compile cache. "
    "First step: of the cold start, or of the first round where starts were not timed."
)


def report(found: Comparison, folder: Path) -> None:
    """Report what is known so far: report.md, results.json and, once there are rates, peers.png."""
    config, entries = found.config, list(found.entries.values())
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("torch", TRANSFORMERS) if find_spec(name)
    )
    shown = ("batch_size", "seq_len", "n_layer", "n_head", "n_embd", "bf16", "compile")
    described = ", ".join(f"{name} {getattr(config, name)}" for name in shown)
    measured = {entry.name: entry.ours_over for entry in entries if entry.ours_over}
    write_report(
        folder,
        "Beside what people would take instead",
        COLUMNS,
        entries,
        [f"failed: {line}" for line in found.failed],
        f"{machine()}; {versions}, commit {git_commit()}, {datetime.date.today()}. "
        f"{found.ours.name}: {described}.",
        MEANING,
        "![ours over each](peers.png)" if measured else "",
    )
    if measured:
        series = {f"tokens/s of {found.ours.name} over those of each": list(measured.values())}
        draw_factors(folder / "peers.png", list(measured), series)
    chosen = found.options.model_dump(mode="json", exclude={"log_dir", "data_dir"})
    times = ("cold_s", "warm_s", "first_step_s")
    results = {
        "machine": machine(),
        "git": git_commit(),
        "versions": versions,
        "options": chosen | {"peer": [name for name in found.peers if name != TRANSFORMERS]},
        "left_out": LEFT_OUT,
        "starts": [{"side": e.name} | {name: getattr(e, name) for name in times} for e in entries],
        "in_turn": found.rounds,
        "failed": found.failed,
    }
    write_whole(folder / "results.json", json.dumps(results, indent=1) + "\n")


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
        found = Comparison(options, config, peers, Path(place))
        for _ in found.measure():
            report(found, folder)
    if found.failed:
        raise TrainingError("\n".join(found.failed))


if __name__ == "__main__":
    OPTIONS = start(PeersOptions, description=__doc__)
    with reported(
        OPTIONS.log_dir, interrupted="interrupted; the groups that were finished are kept"
    ):
        main(OPTIONS)
