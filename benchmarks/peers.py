"""How fast this project trains GPT-2 beside what people would take instead, on this machine: a few
steps of each in turn.

    python -m benchmarks.peers                                   the best rung, the baseline, and transformers' GPT2LMHeadModel
    python -m benchmarks.peers --peer ../nanoGPT/model.py        ... and any nanoGPT-like file, one with GPT and GPTConfig
    python -m benchmarks.peers --no-bf16 --batch_size 1          ... in fp32, as a processor without bf16 instructions takes

All sides train the same tokens from the same weights in batches of one size, and their first losses
have to agree. The best rung and the peers have the same precision, torch.compile, fused AdamW,
decay groups and clipping; the baseline has none of these. Every peer runs twice: as a user would
start it, and with the settings that train.py makes for its process (how it takes memory from the
system), so that it shows what the code gains and what these settings gain.
"""

import contextlib
import datetime
import importlib.metadata
import importlib.util
import io
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from benchmarks.in_turn import (
    FEWEST,
    LEFT_OUT,
    ROOT,
    Side,
    all_sides,
    narrow_enough,
    over,
    take_turns,
    training_side,
)
from config import Config, load_config
from measure.ratio import Ratio
from runtime.cli import Options, Positive, parse_command_line
from runtime.errors import TrainingError, UserError, reported
from runtime.files import aside, write_whole
from runtime.report import (
    BLUE,
    COLOURS,
    ORANGE,
    Column,
    draw_bars,
    git_commit,
    machine,
    markdown_table,
    print_table,
)
from runtime.runlog import duration

TRANSFORMERS = "transformers"
WITH_SETTINGS = " + our settings"  # after a peer's name
# by how much first losses may differ: sums in another order, and roundings to bf16 or TF32
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
# what the baseline takes over from the best rung, so that both train the same tokens in the same
# shape
OF_THE_RUNG = (
    "dataset",
    "data_dir",
    "shuffle",
    "overfit_batch",
    "val_fraction",
    "seed",
    "batch_size",
    "seq_len",
    "total_batch_tokens",
    "n_layer",
    "n_head",
    "n_embd",
    "block_size",
    "device",
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
    width: Annotated[float, Field(ge=0, le=1)] = 0.02
    """enough rounds where every interval is narrower than this share of its median"""
    log_dir: str = "logs"
    """results go to peers/ in this folder"""


class RunOptions(Options):
    """of every side (none: as the config says)"""

    batch_size: Positive = 4
    """sequences per step"""
    seq_len: Positive = 1024
    """tokens per sequence"""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """auto: cuda, else mps, else cpu"""
    bf16: bool | None = None
    """bfloat16 autocast of all but the baseline"""
    compile: bool | None = None
    """torch.compile of all but the baseline"""
    n_layer: Positive | None = None
    """transformer blocks"""
    n_head: Positive | None = None
    """attention heads per block"""
    n_embd: Positive | None = None
    """width of the residual stream"""
    dataset: str | None = None
    """corpus"""
    data_dir: str | None = None
    """folder that holds the corpora"""


class PeersOptions(RunOptions, WhatOptions):
    """All options of a comparison with peers."""


@dataclass
class Entry:
    """A side, and what is known of it."""

    name: str
    command: Callable[[], Side]  # a fresh process of it
    rates: list[float] = field(default_factory=list)  # tokens/s of each round
    cold_s: float | None = None
    warm_s: float | None = None
    first_step_s: float | None = None
    peak_memory_mb: float | None = None
    ours_over: Ratio | None = None
    memory_ratio: float | None = None
    error: str = ""

    @property
    def tokens_per_sec(self) -> float | None:
        """Its median rate."""
        return statistics.median(self.rates) if self.rates else None


# ---- the sides


def our_config(options: PeersOptions) -> Config:
    """The best rung with the options given. Raises UserError if no peer could train likewise."""
    given = {
        name: value
        for name in RunOptions.model_fields
        if (value := getattr(options, name)) is not None
    }
    config = load_config(options.config, **given)
    if wrong := [
        f"{name} {getattr(config, name)}"
        for name, value in NEEDED.items()
        if getattr(config, name) != value
    ]:
        raise UserError(
            f"{options.config}: has {', '.join(wrong)}, which the peers have not; choose a "
            f"config with "
            + ", ".join(f"{word.split()[0]} {NEEDED[word.split()[0]]}" for word in wrong)
        )
    return config


def flags(config: Config, names: Sequence[str]) -> list[str]:
    """Some of a config's values as flags of train.py."""
    words: list[str] = []
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def shown(path: str) -> str:
    """A peer's name in the tables: its file's, and its folder's."""
    return "/".join(Path(path).resolve().parts[-2:]) if path != TRANSFORMERS else path


def check_peers(peers: Sequence[str], config: Config, place: Path) -> None:
    """Write the weights that all sides start from, and make every peer once, in this process: what
    is wrong with one is told before anything is timed. Raises UserError.
    """
    import torch

    from benchmarks.peer_side import build_peer, loss_in_fp32, open_loader
    from model import GPT, GPTConfig
    from runtime.device import choose_device
    from weights import write_hugging_face

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
    for peer in peers:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):  # what they say of themselves
            model, loss_of = build_peer(
                peer, config.model_copy(update={"init_from": str(place / "tied")})
            )
            theirs = loss_in_fp32(model, loss_of, loader)
        compare_losses(shown(peer), theirs, loss, config, rounded=False)


def compare_losses(name: str, loss: float, ours: float, config: Config, *, rounded: bool) -> None:
    """Raise a UserError if a side's first loss is not ours."""
    tolerance = ROUNDED_TOLERANCE if rounded else TOLERANCE
    # rows of padding take part in the softmax of models that do not leave them out, as ours does
    padding = math.log(config.vocab_size / config.n_vocab)
    if not -tolerance <= loss - ours <= tolerance + padding:
        raise UserError(
            f"{name}: its first loss is {loss:.5f}, ours {ours:.5f}, from equal weights and "
            f"tokens: a difference of "
            f"{loss - ours:.2g}, where rounding explains {tolerance:g}"
            + (f" and padding {padding:.2g}" if padding else "")
            + "; so it computes something else"
        )


def plan(options: PeersOptions, config: Config, place: Path) -> tuple[Entry, list[list[Entry]]]:
    """Our side, and groups of others that take turns with it: few at a time, as all of them
    together would need much memory.
    """
    given = [
        "--config",
        options.config,
        *flags(config, list(RunOptions.model_fields)),
        "--init_from",
        str(place / "tied"),
    ]
    ours = Entry(
        Path(options.config).stem,
        lambda: training_side(Path(options.config).stem, given, str(place / "ours")),
    )

    def peer_entry(peer: str, with_settings: bool) -> Entry:
        name = shown(peer) + WITH_SETTINGS * with_settings
        path = peer if peer == TRANSFORMERS else str(Path(peer).resolve())
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "peer_side.py"),
            "--peer",
            path,
            *["--process_settings"] * with_settings,
            *given,
        ]
        return Entry(name, lambda: Side(name, command))

    groups = [
        [
            peer_entry(peer, with_settings)
            for with_settings in ((False, True) if options.settings else (False,))
        ]
        for peer in peers_of(options)
    ]
    if options.baseline and ours.name != "baseline":
        of_baseline = [
            "--config",
            "baseline.yaml",
            *flags(config, OF_THE_RUNG),
            "--init_from",
            str(place / "untied"),
        ]
        groups.append(
            [
                Entry(
                    "baseline",
                    lambda: training_side("baseline", of_baseline, str(place / "baseline")),
                )
            ]
        )
    return ours, groups


def peers_of(options: PeersOptions) -> list[str]:
    """The peers to compare with. Raises UserError for a file that is not there, or is there twice."""
    peers = [*([TRANSFORMERS] if importlib.util.find_spec(TRANSFORMERS) else []), *options.peer]
    names = [shown(peer) for peer in peers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"--peer: {twice[0]} is named twice; a peer's name is its file's and its folder's"
        )
    for path in options.peer:
        if not Path(path).is_file():
            raise UserError(
                f"--peer {path}: no such file; a peer is a Python file with GPT and GPTConfig, "
                f"such as nanoGPT's "
                f"model.py"
            )
    return peers


# ---- measuring


class Comparison:
    """What is measured; it is written after the starts and after each group."""

    def __init__(self, options: PeersOptions, config: Config, place: Path):
        """`place`: a folder that lasts as long as the comparison, with the weights that
        `check_peers` wrote.
        """
        self.options, self.config, self.place = options, config, place
        self.ours, self.groups = plan(options, config, place)
        self.first_loss: float | None = None  # ours
        self.gains: list[
            tuple[str, Ratio, Ratio, Ratio]
        ] = []  # peer: by the settings, by our code beside them, by both
        self.rounds: list[list[dict[str, Any]]] = []  # of each group, what each side did
        self.failed: list[str] = []
        self.at = ""  # the name of the side whose turn it is

    @property
    def entries(self) -> list[Entry]:
        """All sides, ours first."""
        return [self.ours, *(entry for group in self.groups for entry in group)]

    def side(self, entry: Entry) -> Side:
        """A process of the entry; where starts are timed, with a compile cache of its own."""
        side = entry.command()
        if self.options.starts:
            # not by its name: a path with spaces breaks torch.compile's calls of g++
            number = [other.name for other in self.entries].index(entry.name)
            side.environment = {"TORCHINDUCTOR_CACHE_DIR": str(self.place / "caches" / str(number))}
        return side

    def check(self, side: Side) -> None:
        """Compare a side's first loss with ours. Raises UserError."""
        loss = side.turns[0]["loss"]
        if self.first_loss is None:
            self.first_loss = loss
        compare_losses(
            side.name,
            loss,
            self.first_loss,
            self.config,
            rounded=self.config.bf16 or self.config.tf32,
        )

    def measure(self) -> Iterator[None]:
        """Measure one thing after the other; a peer that fails loses only its own. Raises UserError
        if ours fails.
        """
        if self.options.starts:
            for entry in self.entries:
                with self.failures_told(entry):
                    self.start(entry)
            yield
        for group in self.groups:
            if able := [entry for entry in group if not entry.error]:
                with self.failures_told(*able):
                    self.take_turns(able)
                yield

    @contextlib.contextmanager
    def failures_told(self, *entries: Entry) -> Iterator[None]:
        """Note why the entries failed, and go on, unless it is ours."""
        try:
            yield
        except UserError as error:
            if self.at == self.ours.name:
                raise
            for entry in entries:
                if entry.name == self.at:
                    entry.error = str(error)
            self.failed.append(str(error))
            say(f"failed: {error}")

    def start(self, entry: Entry) -> None:
        """Time its first step from the process's start, with an empty compile cache, then with the
        one that this has filled.
        """
        self.at = entry.name
        for what in ("cold_s", "warm_s"):
            begun = time.perf_counter()
            with self.side(entry) as side:
                side.turn()
                setattr(entry, what, time.perf_counter() - begun)
            self.check(side)
            entry.first_step_s = entry.first_step_s or side.turns[0]["seconds"][0]
        say(
            f"{entry.name}: {entry.cold_s:.1f} s to the end of the first step with an empty "
            f"compile cache, {entry.warm_s:.1f} s "
            f"with a filled one; first loss {side.turns[0]['loss']:.4f}"
        )

    def take_turns(self, group: Sequence[Entry]) -> None:
        """Let our side and those of a group take turns, and keep what they did."""
        entries = [self.ours, *group]
        sides = [self.side(entry) for entry in entries]

        def checked(side: Side) -> float:
            self.at = side.name
            rate = side.turn()
            if len(side.turns) == 1:
                self.check(side)
            return rate

        def enough(rates: Mapping[str, Sequence[float]]) -> bool:
            done = len(rates[self.ours.name])
            ratios = (
                [f"{over(rates, self.ours.name, entry.name)}" for entry in group]
                if done >= FEWEST
                else []
            )
            say(
                f"round {done} of at most {self.options.rounds}: "
                + ", ".join(f"{name} {rate[-1]:,.0f}" for name, rate in rates.items())
                + " tokens/s"
                + (
                    f"; ours over {'each of the others' if len(ratios) > 1 else 'it'} "
                    f"{', '.join(ratios)}"
                    if ratios
                    else ""
                )
            )
            return narrow_enough(self.options.width)(rates)

        with all_sides(sides):
            rates = take_turns(
                {side.name: partial(checked, side) for side in sides}, self.options.rounds, enough
            )
        for entry, side in zip(entries, sides, strict=True):
            entry.rates += rates[side.name]
            entry.first_step_s = entry.first_step_s or side.turns[0]["seconds"][0]
            entry.peak_memory_mb = max(
                entry.peak_memory_mb or 0.0, side.turns[-1]["peak_memory_mb"]
            )
        self.rounds.append(
            [
                {"side": side.name, "tokens_per_sec": rates[side.name], "turns": side.turns}
                for side in sides
            ]
        )
        for entry, side in zip(group, sides[1:], strict=True):
            entry.ours_over = over(rates, self.ours.name, entry.name)
            entry.memory_ratio = sides[0].turns[-1]["peak_memory_mb"] / max(
                side.turns[-1]["peak_memory_mb"], 1e-9
            )
        if len(group) == 2:
            plain, with_settings = (entry.name for entry in group)
            self.gains.append(
                (
                    plain,
                    over(rates, with_settings, plain),
                    over(rates, self.ours.name, with_settings),
                    over(rates, self.ours.name, plain),
                )
            )


def say(line: str) -> None:
    """Tell the user at once."""
    print(line, flush=True)


# ---- the report


def figure(heading: str, name: str, style: str) -> Column:
    """A column of an entry's figures; nothing where there is none."""
    return Column(
        heading,
        lambda entry: "" if getattr(entry, name) is None else format(getattr(entry, name), style),
    )


COLUMNS = [
    figure("side", "name", ""),
    figure("tokens/s", "tokens_per_sec", ",.0f"),
    Column("ours over it", lambda entry: str(entry.ours_over or "")),
    figure("MB", "peak_memory_mb", ",.0f"),
    figure("MB, ours over its", "memory_ratio", ".2f"),
    figure("first step, s", "first_step_s", ".1f"),
    figure("cold start, s", "cold_s", ".1f"),
    figure("warm start, s", "warm_s", ".1f"),
]
GAINS = [
    Column("peer", lambda gain: gain[0]),
    Column("our settings", lambda gain: str(gain[1])),
    Column("our code", lambda gain: str(gain[2])),
    Column("both", lambda gain: str(gain[3])),
]


def write_report(found: Comparison, folder: Path) -> None:
    """Write what is known by now: report.md, results.json and, once there are rates, peers.png."""
    options, config, entries = found.options, found.config, found.entries
    measured = [entry for entry in entries if entry.ours_over]
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", TRANSFORMERS)
        if importlib.util.find_spec(name)
    )
    about = (
        f"{machine()}; {versions}, commit {git_commit()}, {datetime.date.today()}. "
        f"{found.ours.name}: batch_size "
        f"{config.batch_size}, seq_len {config.seq_len}, {config.n_layer} layers, "
        f"{config.n_head} heads, width "
        f"{config.n_embd}, {'bf16' if config.bf16 else 'fp32'}, "
        f"{'compiled' if config.compile else 'not compiled'}."
    )
    lines = [
        "# Beside what people would take instead",
        "",
        about,
        "",
        *markdown_table(COLUMNS, entries),
        "",
        f"Ours over it: tokens/s of {found.ours.name} over the side's, the median of the rounds' "
        f"ratios, with its 95% "
        f"interval. tokens/s: the median of a side's own rounds. MB: peak memory, of the GPU's "
        f"tensors on CUDA, else of the "
        f"process; and that of {found.ours.name} over the side's. Cold and warm start: from the "
        f"process's start to the end of "
        f"the first step, with an empty and with a filled compile cache. First step: of the cold "
        f"start, or of the first turn "
        f"where starts were not timed.",
        "",
    ]
    if found.gains:
        lines += [
            "## What the process settings give, and what the code",
            "",
            *markdown_table(GAINS, found.gains),
            "",
            f"Our settings: the peer with them over the peer without. Our code: "
            f"{found.ours.name} over the peer with them. "
            f"Both: {found.ours.name} over the peer as a user starts it.",
            "",
        ]
    if measured:
        colours = [
            COLOURS[2]
            if entry.name == "baseline"
            else ORANGE
            if entry.name.endswith(WITH_SETTINGS)
            else BLUE
            for entry in measured
        ]
        meanings = {
            BLUE: "as a user starts it",
            ORANGE: "with our process settings",
            COLOURS[2]: "this project's baseline",
        }
        draw_bars(
            folder / "peers.png",
            [entry.name for entry in measured],
            [entry.ours_over.median for entry in measured if entry.ours_over],
            [str(entry.ours_over) for entry in measured],
            f"tokens/s of {found.ours.name} over those of each",
            whiskers=[entry.ours_over.ends for entry in measured if entry.ours_over],
            colours=colours,
            meanings={colour: meaning for colour, meaning in meanings.items() if colour in colours},
        )
        lines += ["![ours over each](peers.png)", ""]
    lines += [f"Failed: {line}" for line in found.failed]
    write_whole(folder / "report.md", "\n".join(lines).rstrip("\n") + "\n")
    kept = options.model_dump(mode="json", exclude={"log_dir", "data_dir"}) | {
        "peer": [shown(path) for path in options.peer]
    }
    starts = [
        {
            "side": entry.name,
            "cold_s": entry.cold_s,
            "warm_s": entry.warm_s,
            "first_step_s": entry.first_step_s,
        }
        for entry in entries
    ]
    write_whole(
        folder / "results.json",
        json.dumps(
            {
                "machine": machine(),
                "git": git_commit(),
                "versions": versions,
                "options": kept,
                "left_out": LEFT_OUT,
                "starts": starts,
                "in_turn": found.rounds,
                "failed": found.failed,
            },
            indent=1,
        )
        + "\n",
    )


def main(argv: Sequence[str]) -> None:
    """Compare with what the command line names. Raises UserError."""
    options = parse_command_line(PeersOptions, argv, description=__doc__)
    config, begun = our_config(options), time.monotonic()
    if TRANSFORMERS not in (peers := peers_of(options)):
        say(
            "note: transformers is not installed (pip install -r requirements-dev.txt): compared "
            "without it"
        )
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
    print_table("in turn", COLUMNS, found.entries)
    if found.gains:
        print_table("what the settings give, and what the code", GAINS, found.gains)
    say(
        f"{folder}/ has {', '.join(sorted(path.name for path in folder.iterdir()))}; "
        f"{duration(time.monotonic() - begun)} in all"
    )
    if found.failed:
        raise TrainingError("\n".join(found.failed))


if __name__ == "__main__":
    with reported(
        "the comparison", interrupted="interrupted; the groups that were finished are kept"
    ):
        main(sys.argv[1:])
