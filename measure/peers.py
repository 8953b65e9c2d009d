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

import contextlib
import datetime
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from config import Config, load_config
from measure.interleaved import (
    LEFT_OUT,
    ROOT,
    Side,
    SideError,
    module_in,
    ratio_of,
    run_rounds,
    say,
    started,
    training_side,
)
from measure.options import given, optional_fields, to_flags
from measure.ratio import FEWEST, Ratio
from runtime.cli import Options
from runtime.errors import TrainingError, UserError, reported
from runtime.files import aside, write_whole
from runtime.report import (
    Column,
    draw_bars,
    field,
    git_commit,
    machine,
    markdown_table,
    print_table,
)
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
SHAPE = ("batch_size", "seq_len", "device", "n_layer", "n_head", "n_embd", "dataset", "data_dir")
# what the baseline takes over from the best rung, so that both train the same tokens
OF_THE_RUNG = (
    *SHAPE,
    *("block_size", "shuffle", "overfit_batch", "val_fraction", "seed", "total_batch_tokens"),
)
Overrides: Any = optional_fields(
    Config,
    *SHAPE,
    "bf16",
    "compile",
    title="of every side; the baseline has neither bf16 nor compile",
    none="as the config says, but 4 sequences of 1024 tokens",
)


class WhatOptions(Options):
    """what to compare"""

    peer: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value),
    ] = ()
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
    width: float = Field(0.02, ge=0, le=1)
    """stop once every interval is narrower than this share of its median"""
    log_dir: str = "logs"
    """results go to peers/ in this folder"""


class PeersOptions(Overrides, WhatOptions):
    """All options of a comparison with peers."""


@dataclass
class Entry:
    """A side, and its figures."""

    name: str
    command: Callable[[], Side]  # a fresh process of it
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
    wrong = {name: value for name, value in NEEDED.items() if getattr(config, name) != value}
    if wrong:
        has = ", ".join(f"{name} {getattr(config, name)}" for name in wrong)
        need = ", ".join(f"{name} {value}" for name, value in wrong.items())
        raise UserError(
            f"{options.config}: has {has}, which the peers have not; choose a config with {need}"
        )
    return config


def shown(path: str) -> str:
    """Return a peer's name in the tables: its file's, and its folder's."""
    return "/".join(Path(path).resolve().parts[-2:]) if path != TRANSFORMERS else path


def check_peers(peers: Sequence[str], config: Config, place: Path) -> None:
    """Write the weights that all sides start from, and build every peer once in this process.

    So what is wrong with one is reported before anything is timed. Raises UserError.
    """
    import torch

    from checkpoint.hugging_face import write_hugging_face
    from measure.peer_side import build_peer, loss_in_fp32, open_loader
    from model import GPT, GPTConfig
    from runtime.device import choose_device

    choose_device(config.device)
    loader = open_loader(config)
    torch.manual_seed(config.seed)
    ours = GPT(GPTConfig.of(config))
    weights = ours.state_dict()
    weights["lm_head.weight"] = weights["lm_head.weight"].clone()
    for name, tied in (("tied", True), ("untied", False)):
        (place / name).mkdir()
        write_hugging_face(place / name, replace(ours.config, tie_weights=tied), weights)
    loss = loss_in_fp32(ours, lambda model, x, y: model(x, y), loader)
    config = config.model_copy(update={"init_from": str(place / "tied")})
    for peer in peers:
        theirs = loss_in_fp32(*build_peer(peer, config), loader)
        compare_losses(shown(peer), theirs, loss, config, rounded=False)


def compare_losses(name: str, loss: float, ours: float, config: Config, *, rounded: bool) -> None:
    """Raise SideError if a side's first loss is not ours."""
    tolerance = ROUNDED_TOLERANCE if rounded else TOLERANCE
    # rows of padding take part in the softmax of models that do not leave them out, as ours does
    padding = math.log(config.vocab_size / config.n_vocab)
    if not -tolerance <= loss - ours <= tolerance + padding:
        raise SideError(
            name,
            f"its first loss is {loss:.5f}, ours {ours:.5f}, from equal weights and tokens: a "
            f"difference of {loss - ours:.2g}, where rounding explains {tolerance:g} and padding "
            f"{padding:.2g}; so it computes something else",
        )


def plan(options: PeersOptions, config: Config, place: Path) -> tuple[Entry, list[list[Entry]]]:
    """Return our side, and groups of others to interleave with it.

    Groups are small, as each side keeps its memory.
    """
    chosen = {name: getattr(config, name) for name in Overrides.model_fields}
    chosen |= {"init_from": f"{place}/tied"}
    flags = ["--config", options.config, *to_flags(chosen)]
    name = Path(options.config).stem
    ours = Entry(name, lambda: training_side(name, flags))

    def peer_entry(peer: str, with_settings: bool) -> Entry:
        label = shown(peer) + WITH_SETTINGS * with_settings
        path = peer if peer == TRANSFORMERS else str(Path(peer).resolve())
        command, environment = module_in(ROOT, "measure.peer_side")
        command += ["--peer", path, *["--process_settings"] * with_settings, *flags]
        return Entry(label, lambda: Side(label, command, environment))

    both = (False, True) if options.settings else (False,)
    groups = [[peer_entry(peer, settings) for settings in both] for peer in peers_of(options)]
    if options.baseline and name != "baseline":
        same = {name: getattr(config, name) for name in OF_THE_RUNG}
        same |= {"init_from": f"{place}/untied"}
        of_baseline = ["--config", "baseline.yaml", *to_flags(same)]
        groups.append([Entry("baseline", lambda: training_side("baseline", of_baseline))])
    return ours, groups


def peers_of(options: PeersOptions) -> list[str]:
    """Return the peers to compare with. Raises UserError for a file that is missing, or twice."""
    names = [shown(peer) for peer in options.peer]
    for path in options.peer:
        if names.count(shown(path)) > 1:
            raise UserError(
                f"--peer: {shown(path)} is named twice; a peer's name is its file's and its "
                f"folder's"
            )
        if not Path(path).is_file():
            raise UserError(
                f"--peer {path}: no such file; a peer is a Python file with GPT and GPTConfig, "
                f"such as nanoGPT's model.py"
            )
    return [*([TRANSFORMERS] if find_spec(TRANSFORMERS) else []), *options.peer]


# ---- measuring


class Comparison:
    """The sides and what is measured of them."""

    def __init__(self, options: PeersOptions, config: Config, place: Path):
        """`place`: a folder with the weights that `check_peers` wrote, and for compile caches."""
        self.options, self.config, self.place = options, config, place
        self.ours, self.groups = plan(options, config, place)
        self.entries = [self.ours, *(entry for group in self.groups for entry in group)]
        self.first_loss: float | None = None  # ours
        self.rounds: list[list[dict[str, Any]]] = []  # the answers of each group's sides

    @property
    def failed(self) -> list[str]:
        """Why sides failed."""
        return [entry.error for entry in self.entries if entry.error]

    def side(self, entry: Entry) -> Side:
        """Make a process of the entry; where starts are timed, with its own compile cache."""
        side = entry.command()
        if self.options.starts:
            # no name in the path: white space would break torch.compile's calls of g++
            cache = self.place / "caches" / str(self.entries.index(entry))
            side.environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        return side

    def check(self, side: Side) -> None:
        """Compare a side's first loss with ours. Raises SideError."""
        loss = side.answers[0]["loss"]
        if self.first_loss is None:
            self.first_loss = loss
        rounded = self.config.bf16 or self.config.tf32
        compare_losses(side.name, loss, self.first_loss, self.config, rounded=rounded)

    def measure(self) -> Iterator[None]:
        """Measure one thing after the other, and yield after each.

        A peer that fails loses only its own group. Raises SideError if ours fails.
        """
        if self.options.starts:
            for entry in self.entries:
                with self.tolerated():
                    self.start(entry)
            yield
        for group in self.groups:
            if able := [entry for entry in group if not entry.error]:
                with self.tolerated():
                    self.compare_with(able)
                yield

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Note why a peer failed, and go on."""
        try:
            yield
        except SideError as error:
            if error.name == self.ours.name:
                raise
            for entry in self.entries:
                if entry.name == error.name:
                    entry.error = str(error)
            say(f"failed: {error}")

    def start(self, entry: Entry) -> None:
        """Time a start to the end of the first step, with an empty and a filled compile cache."""
        seconds = []
        for _ in range(2):
            begun = time.perf_counter()
            with self.side(entry) as side:
                side.train()
                seconds.append(time.perf_counter() - begun)
            self.check(side)
            entry.first_step_s = entry.first_step_s or side.answers[0]["seconds"][0]
        entry.cold_s, entry.warm_s = seconds
        say(
            f"{entry.name}: {entry.cold_s:.1f} s to the end of the first step with an empty "
            f"compile cache, {entry.warm_s:.1f} s with a filled one"
        )

    def compare_with(self, group: Sequence[Entry]) -> None:
        """Interleave our side with those of a group."""
        entries = [self.ours, *group]
        sides = [self.side(entry) for entry in entries]
        options = self.options
        with started(sides):
            rates = run_rounds(sides, options.rounds, options.width, check=self.check, say=say)
        ours = self.ours.name
        for entry, side in zip(entries, sides, strict=True):
            memory = side.answers[-1]["peak_memory_mb"]
            entry.rates += rates[side.name]
            entry.tokens_per_sec = statistics.median(entry.rates)
            entry.first_step_s = entry.first_step_s or side.answers[0]["seconds"][0]
            entry.peak_memory_mb = max(entry.peak_memory_mb or 0.0, memory)
            if entry is not self.ours:
                entry.ours_over = ratio_of(rates, ours, entry.name)
                entry.memory_ratio = sides[0].answers[-1]["peak_memory_mb"] / max(memory, 1e-9)
        self.rounds.append(
            [
                {"side": side.name, "tokens_per_sec": rates[side.name], "turns": side.answers}
                for side in sides
            ]
        )
        if len(group) == 2:
            plain, with_settings = group
            with_settings.over_plain = ratio_of(rates, with_settings.name, plain.name)


# ---- the report

COLUMNS = [
    field("side", "name"),
    field("tokens/s", "tokens_per_sec", ",.0f"),
    Column("ours over it", lambda entry: str(entry.ours_over or "")),
    Column("our settings", lambda entry: str(entry.over_plain or "")),
    field("MB", "peak_memory_mb", ",.0f"),
    field("MB, ours over its", "memory_ratio", ".2f"),
    field("first step, s", "first_step_s", ".1f"),
    field("cold start, s", "cold_s", ".1f"),
    field("warm start, s", "warm_s", ".1f"),
]


def write_report(found: Comparison, folder: Path) -> None:
    """Write what is known so far: report.md, results.json and, once there are rates, peers.png."""
    config, entries, ours = found.config, found.entries, found.ours.name
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("torch", TRANSFORMERS) if find_spec(name)
    )
    lines = [
        "# Beside what people would take instead",
        "",
        f"{machine()}; {versions}, commit {git_commit()}, {datetime.date.today()}. {ours}: "
        f"batch_size {config.batch_size}, seq_len {config.seq_len}, {config.n_layer} layers, "
        f"{config.n_head} heads, width {config.n_embd}, {'bf16' if config.bf16 else 'fp32'}, "
        f"{'compiled' if config.compile else 'not compiled'}.",
        "",
        *markdown_table(COLUMNS, entries),
        "",
        f"Ours over it: tokens/s of {ours} over the side's, the median of the rounds' ratios, with "
        f"its 95% interval. Our settings: likewise the peer with them over the peer without. "
        f"tokens/s: the median of a side's own rounds. MB: peak memory, of the "
        f"GPU's tensors on CUDA, else of the process; and that of {ours} over the side's. Cold and "
        f"warm start: from the process's start to the end of the first step, with an empty and "
        f"with a filled compile cache. First step: of the cold start, or of the first round where "
        f"starts were not timed.",
        "",
    ]
    if any(entry.ours_over for entry in entries):
        draw(found, folder / "peers.png")
        lines += ["![ours over each](peers.png)", ""]
    lines += [f"Failed: {line}" for line in found.failed]
    write_whole(folder / "report.md", "\n".join(lines).rstrip("\n") + "\n")
    chosen = found.options.model_dump(mode="json", exclude={"log_dir", "data_dir"})
    starts = [
        {"side": e.name, "cold_s": e.cold_s, "warm_s": e.warm_s, "first_step_s": e.first_step_s}
        for e in entries
    ]
    results = {
        "machine": machine(),
        "git": git_commit(),
        "versions": versions,
        "options": chosen | {"peer": [shown(path) for path in found.options.peer]},
        "left_out": LEFT_OUT,
        "starts": starts,
        "in_turn": found.rounds,
        "failed": found.failed,
    }
    write_whole(folder / "results.json", json.dumps(results, indent=1) + "\n")


def draw(found: Comparison, path: Path) -> None:
    """Draw how many times as fast as each side ours is."""
    measured = [(entry.name, entry.ours_over) for entry in found.entries if entry.ours_over]
    draw_bars(
        path,
        [name for name, _ in measured],
        [ratio.median for _, ratio in measured],
        [str(ratio) for _, ratio in measured],
        f"tokens/s of {found.ours.name} over those of each",
        [ratio.ends for _, ratio in measured],
    )


def main(options: PeersOptions) -> None:
    """Compare with what the options name. Raises UserError."""
    config = our_config(options)
    peers = peers_of(options)
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
        found = Comparison(options, config, Path(place))
        for _ in found.measure():
            write_report(found, folder)
    write_report(found, folder)
    print_table("interleaved", COLUMNS, found.entries)
    say(f"{folder}/ has {', '.join(sorted(path.name for path in folder.iterdir()))}")
    if found.failed:
        raise TrainingError("\n".join(found.failed))


if __name__ == "__main__":
    OPTIONS = start(PeersOptions, description=__doc__)
    with reported(
        OPTIONS.log_dir, interrupted="interrupted; the groups that were finished are kept"
    ):
        main(OPTIONS)
