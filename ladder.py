"""Climb a ladder: run its stages one after the other, each in a fresh process, and report what each
is worth here.

python ladder.py speedup                        one of the published series: speedup, a100, mps,
gpu_ms python ladder.py baseline.yaml my.yaml          or any configs python ladder.py speedup --
--max_steps 10      options after -- go to every run python ladder.py --ablate speedup10.yaml
what each optimization of a config is worth at the top of the ladder python ladder.py --across
logs/results/*/speedup    climbed ladders of several machines beside each other python ladder.py
--plot logs/a logs/b           the loss curves of any runs in one picture, validation dashed
"""

from runtime.signals import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()  # also during the imports

import contextlib
import csv
import io
import itertools
import json
import math
import operator
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

import runtime.report as reports
from config import Config, DataConfig, ModelConfig, OptimizationConfig, load_config
from measure.interleaved import module_in
from runtime.cli import (
    CONFIG_DIR,
    ConfigError,
    Options,
    Positive,
    ZeroIsOff,
    find_config,
    parse,
    parse_command_line,
    read_yaml_mapping,
)
from runtime.errors import TrainingError, UserError, exit_with, reported, why_it_failed
from runtime.files import BeingWrittenError, aside, sole_writer, write_whole
from runtime.ratio import FEWEST, Ratio, median_ratio, product
from runtime.report import BLUE, ORANGE, Column
from runtime.runlog import LOG_COLUMNS, curve, duration, read_rows
from runtime.signals import ENDS_WITH

ROOT = Path(__file__).resolve().parent
REFERENCE = ROOT / "logs" / "reference"
SERIES = {
    "speedup": [
        "baseline",
        *(f"speedup{i}" for i in range(1, 6)),
        "speedup5_max_autotune",
        *(f"speedup{i}" for i in range(6, 17)),
    ],
    "a100": ["a100/baseline", *(f"a100/opt{i}" for i in range(9))],
    "mps": [
        f"mps/{stage}"
        for stage in (
            "overfit",
            "dataloader",
            "weight_sharing",
            "init",
            "timing",
            "tf32",
            "cuda_bf16",
        )
    ],
    "gpu_ms": [
        f"gpu_ms/{stage}"
        for stage in ("fp32", "tf32", "bf16", "compile", "flash", "vocab", "fused_adamw")
    ],
}
FIRST_COMPARED, LAST_COMPARED = (
    11,
    50,
)  # steps over which a loss curve is compared with the published one
FIRST_TIMED = 6  # published times: medians from this step on
# The published RTX 3080 times were read without waiting for the GPU from speedup1 on: up to 1.9
# million tokens/s, more than ten times what that card can compute.
UNSYNCHRONIZED = re.compile(r"rtx3080_speedup")
HEADROOM = 1.25  # of memory, for what a process needs besides its peak
MOST_PAIRS = 3  # timed at once
KEEP_NO_MEMORY = {"GLIBC_TUNABLES": ""}  # see runtime/process.py
ON_ANOTHER_GPU = "cuda_bf16"  # than the stage it changes, which ran on an Apple GPU
# what no run's own options may say
OF_THE_LADDER = ("--config", "--run_name", "--log_dir", "--resume", "--print_config", "--estimate")
# What stages of the speedup ladder add, and the stages that add it in the published series whose
# times count
COUNTERPARTS = {
    "speedup2": ("TF32", "a100/opt1", "gpu_ms/tf32"),
    "speedup3": ("bf16", "a100/opt2", "gpu_ms/bf16"),
    "speedup5": ("compile", "a100/opt3", "gpu_ms/compile"),
    "speedup6": ("flash", "a100/opt4", "gpu_ms/flash"),
    "speedup7": ("padding", "a100/opt5", "gpu_ms/vocab"),
    "speedup8": ("clipping", "a100/opt6", None),
    "speedup9": ("schedule", "a100/opt7", None),
    "speedup10": ("fused AdamW", "a100/opt8", "gpu_ms/fused_adamw"),
}
# tokens/s on two RTX 4090, from the same notes as the speedup ladder; there is no log of it
DDP_PUBLISHED = 211_646


class LadderOptions(Options):
    """options"""

    stages: tuple[str, ...] = ()
    """speedup, a100, mps or gpu_ms; or config files; with --plot, folders of runs; with --across,
    folders of ladders
    """
    log_dir: str = "logs"
    """folder for the ladder's folder"""
    nproc_per_node: Positive | None = None
    """processes of each listed config, by torchrun; with speedup, of its last stage, ddp (none: 1;
    in ddp one for each GPU)
    """
    rounds: ZeroIsOff = 20
    """rounds at most in which each stage and its base are timed in turn (0: off)"""
    rerun: bool = False
    """run finished stages again"""
    report_only: bool = False
    """rebuild the report of what is there"""
    ablate: bool = False
    """what each optimization of the given config is worth: switched on first, and switched off last
    """
    across: bool = False
    """set the results of several machines beside each other"""
    plot: bool = False
    """compare the loss curves of the given runs in one picture"""


@dataclass(frozen=True)
class Published:
    """What was published of a stage."""

    log: str | None = None  # its log's name in logs/reference/
    ms_per_step: float | None = None  # where the time was read properly
    tokens_per_sec: float | None = None  # likewise


class Summary(BaseModel, extra="allow", allow_inf_nan=False):
    """What a report needs of a run's summary.json."""

    steps: int
    median_dt_ms: float = Field(gt=0)
    median_tokens_per_sec: float = Field(gt=0)
    first_step_s: float
    peak_memory_mb: float
    utilization: float
    final_loss: float | None
    device: str
    torch: str
    git: str | None
    started: str


@dataclass
class Stage:
    """One run of a ladder, and the files that it leaves."""

    name: str
    config: Config
    given: list[str]  # train.py's arguments
    file: Path  # of its config
    base_file: Path | None  # of the config that it changes, as its `base:` says
    published: Published = field(
        default_factory=Published
    )  # empty, unless its settings are those of the published run
    twin_of: str | None = (
        # the stage whose published run this one's settings are, where they differ from its note
        None
    )
    processes: int = 1
    error: str | None = None

    @property
    def base(self) -> str | None:
        """The name of the config that its own changes."""
        return self.base_file.stem if self.base_file else None

    @property
    def folder(self) -> Path:
        return Path(self.config.log_dir) / self.name

    @property
    def side(self) -> list[str]:
        """Its config, and the options that change it."""
        config, *options, _log_dir, _run_name = self.given
        return [config.removeprefix("--config="), *options]

    @property
    def command(self) -> list[str]:
        """What starts its run."""
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={self.processes}",
        ]
        return [
            sys.executable,
            *(torchrun if self.processes > 1 else []),
            str(ROOT / "train.py"),
            *self.given,
        ]

    def summary(self) -> dict[str, Any] | None:
        """summary.json of the finished run with these very settings; None where there is none, or a
        damaged one.
        """
        try:
            summary = Summary.model_validate_json(
                (self.folder / "summary.json").read_bytes()
            ).model_dump()
            same = _options(load_config(str(self.folder / "config.yaml"))) == _options(self.config)
            read_rows(self.folder / "log.csv")
        except (OSError, ValidationError, UserError):
            return None
        return summary if same and not summary.get("interrupted") else None


# ---- the stages


def plan(
    names: Sequence[str], log_dir: str, extra: list[str], processes: int | None = None
) -> tuple[str, list[Stage]]:
    """Name and stages of the ladder that the user asked for. Raises UserError for unknown stages or
    options.
    """
    ladder = names[0] if len(names) == 1 and names[0] in SERIES else "ladder"
    configs = SERIES.get(names[0], names) if len(names) == 1 else names
    stages: list[Stage] = []
    for config in configs:
        name = Path(config).stem
        if name in [stage.name for stage in stages]:
            name = f"{name}_{len(stages) + 1}"
        stages.append(_stage(name, config, ladder, log_dir, extra))
        as_logged = CONFIG_DIR / "as_logged" / f"{Path(config).stem}.yaml"
        if stages[-1].published.log and as_logged.is_file():
            # this stage's settings are those of the note, not of the log
            published, stages[-1].published = stages[-1].published, Published()
            if ladder == "speedup":
                twin = _stage(f"as_logged_{name}", str(as_logged), ladder, log_dir, extra)
                # a stage before it may be the same run: nothing is run twice
                twin = next(
                    (stage for stage in stages if _options(stage.config) == _options(twin.config)),
                    twin,
                )
                stages.append(replace(twin, published=published, twin_of=name))
    if ladder == "ladder":
        for stage in stages:
            stage.processes = processes or 1
    elif ladder == "speedup" and (processes or 1) > 1:
        stages.append(_stage("ddp", "ddp", ladder, log_dir, extra))
        stages[-1].processes = processes or 1
    return ladder, stages


def _stage(name: str, config: str, ladder: str, log_dir: str, extra: list[str]) -> Stage:
    try:
        path = find_config(config).resolve()
    except ConfigError as error:
        raise UserError(f"{error}; the published series are {', '.join(SERIES)}") from None
    if taken := [
        flag for flag in OF_THE_LADDER if any(word.partition("=")[0] == flag for word in extra)
    ]:
        raise UserError(
            f"{taken[0]} after --: the ladder sets it for each run; configs and --log_dir are "
            f"given before --"
        )
    # a ladder is climbed for its figures: no stage leaves its weights
    given = [
        f"--config={config}",
        "--keep_last=0",
        *extra,
        f"--log_dir={Path(log_dir) / ladder}",
        f"--run_name={name}",
    ]
    resolved = parse(Config, given, config_file=True)
    base = read_yaml_mapping(path).get("base")
    stage = Stage(
        name, resolved, given, path, find_config(base, path.parent).resolve() if base else None
    )
    if path.is_relative_to(CONFIG_DIR) and _same_training(resolved, load_config(config)):
        stage.published = _published(path.relative_to(CONFIG_DIR).with_suffix("").as_posix())
    return stage


def _published(config: str) -> Published:
    """What was published of the stage that a config in configs/ repeats, such as `speedup2` or
    `a100/opt3`.
    """
    series, _, name = config.rpartition("/")
    if series == "gpu_ms":
        with open(REFERENCE / "gpu_ms.csv", newline="") as file:
            return Published(
                ms_per_step={row["stage"]: float(row["dt_ms"]) for row in csv.DictReader(file)}.get(
                    name
                )
            )
    if config == "ddp":
        return Published(tokens_per_sec=DDP_PUBLISHED)
    log = name if name == "cuda_bf16" else f"{series or 'rtx3080'}_{name}"
    if not (REFERENCE / f"{log}.csv").is_file():
        return Published()
    timed = [row for step, row in published_rows(log).items() if step >= FIRST_TIMED]
    times, rates = (
        [value for row in timed if (value := row[key])] for key in ("dt_ms", "tokens_per_sec")
    )
    if UNSYNCHRONIZED.match(log) or not times:
        return Published(log)
    return Published(log, statistics.median(times), statistics.median(rates) if rates else None)


def published_rows(log: str) -> dict[int, dict[str, float | None]]:
    """The rows of a published log by step."""
    return read_rows(REFERENCE / f"{log}.csv")


def _options(config: Config) -> dict[str, Any]:
    """What makes a run another run: not what it is called or what it saves."""
    return config.model_dump(
        exclude={
            "run_name",
            "log_dir",
            "data_dir",
            "resume",
            "timeout",
            "checkpoint_every",
            "keep_last",
            "tensorboard",
            "wandb",
        }
    )


def _same_training(a: Config, b: Config) -> bool:
    """Whether two configs compute the same losses, up to where the shorter run ends."""
    fields = {
        *ModelConfig.model_fields,
        *DataConfig.model_fields,
        *OptimizationConfig.model_fields,
        "seed",
    } - {"data_dir"}
    if a.lr_schedule == "constant":
        fields.discard("max_steps")
    return all(getattr(a, name) == getattr(b, name) for name in fields)


# ---- running


def probe(device: str) -> dict[str, Any]:
    """What a fresh process finds of the `device`: its name, how many `gpus`, their or this
    machine's `memory_mb`, and `bf16_slowdown`, bfloat16's time over float32's, None where bfloat16
    is not slow. Empty if it fails.
    """
    command = [sys.executable, "-m", "measure.probe", device]
    found = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    return json.loads(found.stdout) if found.returncode == 0 else {}


def bf16_warning(
    stages: Sequence[Stage], slowdown: float | None, command: Sequence[str]
) -> str | None:
    """What to say before stages are run that bfloat16 makes slow on this machine, and how to go
    without it.
    """
    slow = [stage.name for stage in stages if stage.config.bf16]
    if slowdown is None or not slow:
        return None
    without = shlex.join(
        ["python", "ladder.py", *command, *([] if "--" in command else ["--"]), "--no-bf16"]
    )
    return (
        f"note: matrix products in bf16 take {slowdown:.1f} times as long as in fp32 on this "
        f"machine, which makes "
        f"{', '.join(slow)} slow; without bf16: {without}"
    )


@contextlib.contextmanager
def only_ladder(folder: Path) -> Iterator[None]:
    """No other ladder climbs in the folder meanwhile: it would move this one's stages aside. Raises
    UserError if one does.
    """
    try:
        with sole_writer(folder):
            yield
    except BeingWrittenError:
        raise UserError(
            f"{folder}: another ladder is being climbed there; wait for it, or give another "
            f"--log_dir"
        ) from None


def make_way(folder: Path, stages: Sequence[Stage]) -> Path | None:
    """Move a ladder of entirely other configs aside, so that each keeps its report; returns where
    it is now, if there was one.
    """
    there = {log.parent.name for log in folder.glob("*/log.csv")}
    if not there or there & {stage.name for stage in stages}:
        return None
    return folder.rename(aside(folder))


@contextlib.contextmanager
def bars(unit: str) -> Iterator[Any]:
    """Progress bars, counting steps or rounds."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=reports.console()) as progress:
        yield progress


def climb(stages: list[Stage], rerun: bool) -> None:
    """Run the stages that have no finished log with the same settings from this machine. A failed
    one is marked, the others go on.

    Raises KeyboardInterrupt when the user stops; what is finished stays.
    """
    here = reports.machine()
    with bars("steps") as progress:
        for i, stage in enumerate(stages, start=1):
            task = progress.add_task(
                f"{i}/{len(stages)} {stage.name}", total=stage.config.max_steps, note=""
            )
            summary = stage.summary()
            if (
                summary and not rerun and summary.get("machine", here) == here
            ):  # another machine's speed says nothing here
                progress.update(task, completed=summary["steps"], note="finished before")
                continue
            stage.error = _run(stage, partial(_update, progress, task))
            _end(progress, task, stage.name, stage.error)


def _update(progress: Any, task: Any, step: int, note: str) -> None:
    progress.update(task, completed=step, note=note)


def _end(progress: Any, task: Any, name: str, error: str | None) -> None:
    """Say how a task of the progress bars ended."""
    progress.update(task, note=f"failed: {error}" if error else "finished")
    if not progress.console.is_terminal:
        progress.console.print(f"{name}: {'failed: ' + error if error else 'done'}")


def _run(stage: Stage, tell: Callable[[int, str], None]) -> str | None:
    """Run a stage in its own process and `tell` its last step and how it is doing; returns the
    error if it fails.
    """
    started = time.time()
    tell(0, "starting")
    error = _watch(stage.command, lambda: _tell_progress(stage, started, tell))
    return error or (
        None
        if stage.summary()
        else "stopped by a signal before its last step; the same command runs it again"
    )


def _watch(
    command: Sequence[str], look: Callable[[], None], environment: Mapping[str, str] | None = None
) -> str | None:
    """Run a command, and `look` how it is doing every two seconds and at its end; returns its error
    line if it fails.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**(environment or {}), **os.environ, ENDS_WITH: str(os.getpid())},
        )
        try:
            looked = time.monotonic()
            while process.poll() is None:
                time.sleep(0.2)
                if (
                    time.monotonic() - looked > 2
                ):  # reading a long log more often would disturb the run that is timed
                    look()
                    looked = time.monotonic()
        except KeyboardInterrupt:
            process.send_signal(
                signal.SIGINT
            )  # it ends after its step; the Ctrl-C of a shared terminal counts as the same request
            process.wait()
            raise
        look()
        return None if process.returncode == 0 else why_it_failed(process.returncode, errors)


def _tell_progress(stage: Stage, started: float, tell: Callable[[int, str], None]) -> None:
    """Tell the last step in the stage's log, unless the log is still that of a run from before
    `started`.
    """
    log = stage.folder / "log.csv"
    try:
        rows = read_rows(log) if log.stat().st_mtime >= started else {}
    except (OSError, UserError):  # not there yet, or being moved aside
        return
    if rows:
        step = max(rows)
        # the first step compiles
        seconds = [(row["dt_ms"] or 0.0) / 1e3 for at, row in rows.items() if at > 1]
        left = (
            f", {duration(statistics.median(seconds) * (stage.config.max_steps - step))} left"
            if seconds
            else ""
        )
        tell(step, f"loss {rows[step]['loss']:.4f}{left}")


# ---- in turn


@dataclass
class Pair:
    """Two configs that are timed in turn, and the file that keeps what came out."""

    name: str
    base: list[str]  # a config, and options of train.py
    other: list[str]
    path: Path
    peaks_mb: tuple[float | None, float | None] = (None, None)  # of memory, where they are known
    error: str | None = None

    def settings(self) -> list[dict[str, Any]]:
        """What makes a comparison another one: both configs' options."""
        both = [
            _options(parse(Config, [f"--config={side[0]}", *side[1:]], config_file=True))
            for side in (self.base, self.other)
        ]
        return json.loads(json.dumps(both))

    def found(self) -> dict[str, Any]:
        """What the file says of these very settings: `factors`, the speed of the other over the
        base round by round, `machine`, and both sides. Empty where there is none.
        """
        try:
            found = json.loads(self.path.read_text())
            same = found["settings"] == self.settings() and len(found["factors"]) >= FEWEST
            return (
                found
                if same
                and not self.error
                and all(0 < factor < math.inf for factor in found["factors"])
                else {}
            )
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}

    @property
    def factors(self) -> list[float]:
        """The speed of the other over the base, round by round; empty if they were not timed."""
        return self.found().get("factors", [])

    @property
    def ratio(self) -> Ratio | None:
        """The speed of the other over the base; None if they were not timed."""
        return median_ratio(factors) if (factors := self.factors) else None

    def memory_mb(self, side: int) -> float | None:
        """Peak memory of the base (0) or the other (1)."""
        sides = self.found().get("sides")
        return sides and max(turn["peak_memory_mb"] for turn in sides[side]["turns"])


def pairs_of(stages: Sequence[Stage]) -> dict[str, Pair]:
    """For each finished stage whose base is finished too, both in turn. What runs on several
    processes is left out.
    """
    return {
        stage.name: Pair(
            stage.name,
            base.side,
            stage.side,
            stage.folder / "in_turn.json",
            (ours["peak_memory_mb"], theirs["peak_memory_mb"]),
        )
        for stage, base in with_bases(stages)
        if stage.side != base.side
        and stage.processes == base.processes == 1
        and (ours := base.summary())
        and (theirs := stage.summary())
    }


def take_turns(pairs: Sequence[Pair], rounds: int, rerun: bool, device: Mapping[str, Any]) -> None:
    """Time the pairs that were not timed on this machine and device with the same settings, as many
    at once as the device's memory holds. `device`: what `probe` has found of it.

    A failed one is marked, the others go on. Raises KeyboardInterrupt when the user stops; what is
    finished stays, and so do the rounds so far of what is not.
    """
    here, memory_mb = (
        {"machine": reports.machine(), "device": device.get("device", "")},
        device.get("memory_mb", 0.0),
    )
    wanted = [
        pair
        for pair in pairs
        if rerun or not here.items() <= (found := pair.found()).items() or found.get("interrupted")
    ]
    groups = grouped(wanted, memory_mb)
    with bars("rounds") as progress:
        while groups:
            group = groups.pop(0)
            names = ", ".join(pair.name for pair in group)
            task = progress.add_task(f"in turn: {names}", total=rounds, note="")
            keep = bool(device.get("gpus")) or needed_mb(group, unknown=0.0) <= memory_mb
            error = _take_turns(
                group, rounds, here["device"], keep, partial(_update, progress, task)
            )
            _end(progress, task, f"in turn: {names}", error)
            if error and len(group) > 1:  # one side of it failed, or the memory did not suffice
                groups[:0] = [[pair] for pair in group]
            elif error:
                group[0].error = error


def grouped(pairs: Sequence[Pair], memory_mb: float) -> list[list[Pair]]:
    """The pairs in groups: a pair joins the one before where they share a side, and all sides
    together stay within the memory.

    A side that two pairs share is timed once for both. A group is finished as a whole, and lost as
    a whole: so it is small.
    """
    groups: list[list[Pair]] = []
    for pair in pairs:
        group = [*groups[-1], pair] if groups else []
        shared = any(pair.base in (member.base, member.other) for member in group[:-1])
        if shared and len(group) <= MOST_PAIRS and needed_mb(group, unknown=math.inf) <= memory_mb:
            groups[-1] = group
        else:
            groups.append([pair])
    return groups


def needed_mb(pairs: Sequence[Pair], unknown: float) -> float:
    """Memory that all sides take together, in MiB; `unknown`: what counts for one whose peak is not
    known.
    """
    peaks = {
        tuple(side): memory or unknown
        for pair in pairs
        for side, memory in zip((pair.base, pair.other), pair.peaks_mb, strict=True)
    }
    return sum(HEADROOM * peak for peak in peaks.values())


def _take_turns(
    pairs: Sequence[Pair], rounds: int, device: str, keep: bool, tell: Callable[[int, str], None]
) -> str | None:
    """Time pairs in turn, all at once, and write the file of each; returns the error if a side
    fails. Unless they `keep` the memory that their steps free (runtime/process.py), they take less
    of it, and none is faster for what another has left it.
    """
    sides = list(
        dict.fromkeys(shlex.join(side) for pair in pairs for side in (pair.base, pair.other))
    )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "turns.json"
        command, paths = module_in(ROOT, "measure.interleaved")

        def look() -> None:
            if output.exists():
                tell(len(json.loads(output.read_text())["sides"][0]["tokens_per_sec"]), "")

        def keep_rounds(interrupted: bool) -> None:
            found = json.loads(output.read_text()) if output.exists() else {}
            for pair in pairs if found else ():
                two = [
                    found["sides"][sides.index(shlex.join(side))]
                    for side in (pair.base, pair.other)
                ]
                rates = [side["tokens_per_sec"] for side in two]
                factors = [other / base for base, other in zip(*rates, strict=True)]
                kept = found | {
                    "device": device,
                    "settings": pair.settings(),
                    "factors": factors,
                    "sides": two,
                    "memory_kept": keep,
                    "interrupted": interrupted,
                }
                if not interrupted or (len(factors) >= FEWEST and not pair.found()):
                    write_whole(pair.path, json.dumps(kept, indent=1) + "\n")

        tell(0, "starting")
        try:
            error = _watch(
                [
                    *command,
                    *sides,
                    "--rounds",
                    str(rounds),
                    "--output",
                    str(output),
                ],
                look,
                paths if keep else {**paths, **KEEP_NO_MEMORY},
            )
        except KeyboardInterrupt:
            keep_rounds(interrupted=True)  # for the report; the next climb times them anew
            raise
        if error is None:
            keep_rounds(interrupted=False)
        return error


# ---- comparing


@dataclass
class Row:
    """A finished stage in figures. Losses and difference in nats per token, memory in MB."""

    stage: str
    ms_per_step: float
    tokens_per_sec: float
    # what it is compared with: the stage that it changes, or the stage before where that is not in
    # the ladder
    base: str
    over_base: Ratio | None  # in turn, else of the tokens/s; None if the base has not run
    rounds: int  # in turn
    published_over_base: float | None
    over_first: (
        Ratio  # the first finished stage: a product of factors in turn, else of the tokens/s
    )
    first_step_s: float
    peak_memory_mb: float
    utilization: float
    final_loss: float | None  # None where the last step was left out
    steps: int
    published_tokens_per_sec: float | None
    loss_difference: float | None  # from the published curve
    compared: str  # which run's steps were compared


def loss_difference(ours: dict[int, dict], published: dict[int, dict]) -> tuple[float, int] | None:
    """Mean absolute difference of two loss curves over steps 11 to 50, and the last step compared;
    None if they share none.
    """
    steps = [s for s in range(FIRST_COMPARED, LAST_COMPARED + 1) if s in ours and s in published]
    if not steps:
        return None
    return statistics.fmean(abs(ours[s]["loss"] - published[s]["loss"]) for s in steps), steps[-1]


def with_bases(stages: Sequence[Stage]) -> list[tuple[Stage, Stage]]:
    """Each stage that is not another's twin, and what it is compared with: the stage that its file
    changes, or the one before it where that is not in the ladder; the first is then compared with
    itself.
    """
    own = [stage for stage in stages if not stage.twin_of]
    bases = (
        next((other for other in own if stage.base_file and other.file == stage.base_file), before)
        for before, stage in zip([own[0], *own], own, strict=False)
    )
    return list(zip(own, bases, strict=True))


def compare(stages: list[Stage]) -> list[Row]:
    """A row for each finished stage that is not another's twin."""
    rows: list[Row] = []
    rates: dict[str, float] = {}
    in_turn = {
        name: factors for name, pair in pairs_of(stages).items() if (factors := pair.factors)
    }
    chains: dict[str, list[Ratio]] = {}  # the factors that lead from the first stage to each
    for stage, base in with_bases(stages):
        summary = stage.summary()
        if summary is None:
            continue
        as_published = next((s for s in stages if s.twin_of == stage.name and s.summary()), stage)
        difference, compared = None, ""
        if as_published.published.log:
            found = loss_difference(
                read_rows(as_published.folder / "log.csv"),
                published_rows(as_published.published.log),
            )
            if found:
                difference, compared = (
                    found[0],
                    f"{as_published.name}, steps {FIRST_COMPARED} to {found[1]}",
                )
        rates[stage.name] = rate = summary["median_tokens_per_sec"]
        base_rate, first_rate = rates.get(base.name), next(iter(rates.values()))
        factors = in_turn.get(stage.name, [])
        over_base = (
            median_ratio(factors) if factors else Ratio(rate / base_rate) if base_rate else None
        )
        if not rows:
            chains[stage.name] = []
        elif factors and over_base and base.name in chains:
            chains[stage.name] = [*chains[base.name], over_base]
        over_first = (
            product(chain) if (chain := chains.get(stage.name)) else Ratio(rate / first_rate)
        )
        rows.append(
            Row(
                stage.name,
                summary["median_dt_ms"],
                rate,
                base.name,
                over_base,
                len(factors),
                _published_factor(stage, base),
                over_first,
                summary["first_step_s"],
                summary["peak_memory_mb"],
                summary["utilization"],
                summary["final_loss"],
                summary["steps"],
                as_published.published.tokens_per_sec,
                difference,
                compared,
            )
        )
    return rows


def _published_factor(stage: Stage, base: Stage) -> float | None:
    """The published speed over that of the base, in tokens/s, or in steps/s for a list that names
    no batch.
    """
    ours, theirs = stage.published, base.published
    if stage is base or ours.log == ON_ANOTHER_GPU:
        return None
    if ours.tokens_per_sec and theirs.tokens_per_sec:
        return ours.tokens_per_sec / theirs.tokens_per_sec
    if (
        ours.ms_per_step
        and theirs.ms_per_step
        and not (ours.tokens_per_sec or theirs.tokens_per_sec)
    ):
        return theirs.ms_per_step / ours.ms_per_step
    return None


# ---- reporting


COLUMNS = [
    reports.field("stage", "stage"),
    reports.field("tokens/s", "tokens_per_sec", ",.0f"),
    reports.field("x base", "over_base"),
    reports.field("x first", "over_first"),
    reports.field("loss", "final_loss", ".3f"),
    reports.field("MB", "peak_memory_mb", ",.0f"),  # so many have room in a terminal
    reports.field("published", "published_over_base", ".2f"),
    reports.field("diff.", "loss_difference", ".3f"),
    reports.field("ms/step", "ms_per_step", ",.0f"),
    reports.field("base", "base"),
    reports.field("first step, s", "first_step_s", ".1f"),
    reports.field("of matmul", "utilization", ".0%"),
    reports.field("published tokens/s", "published_tokens_per_sec", ",.0f"),
]
IN_TERMINAL = COLUMNS[:9]


def filled(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns that have something in them."""
    return [column for column in columns if any(column.cell(row) for row in rows)]


def report(ladder: str, stages: list[Stage], folder: Path, pairs: Sequence[Pair] = ()) -> None:
    """Write report.md, results.csv, speed.png and loss.png of what is finished, and print the
    table.
    """
    rows = compare(stages)
    failed = [f"{one.name}: {one.error}" for one in stages if one.error]
    failed += [f"{pair.name} in turn with its base: {pair.error}" for pair in pairs if pair.error]
    if not rows:
        kind = TrainingError if failed else UserError
        raise kind(
            "\n".join(
                [f"{folder}: no finished stage to report", *(f"failed: {line}" for line in failed)]
            )
        )
    reports.print_table(f"{ladder}: what each stage is worth here", filled(IN_TERMINAL, rows), rows)
    for line in failed:
        print(f"failed: {line}")

    write_csv(folder / "results.csv", rows)
    curves = with_published_curve(stages)
    write_whole(folder / "report.md", markdown(ladder, stages, rows, failed, bool(curves)))
    # the pictures last: what is wrong with matplotlib costs no figures
    reports.draw_bars(
        folder / "speed.png",
        [row.stage for row in rows],
        [row.over_first.median for row in rows],
        [f"{row.over_first}" for row in rows],
        f"speed over {rows[0].stage}, which does {rows[0].tokens_per_sec:,.0f} tokens/s",
        whiskers=[row.over_first.ends for row in rows],
    )
    if curves:
        plot_losses(curves, folder / "loss.png")
    print(f"{folder}/ has report.md, results.csv, speed.png" + (" and loss.png" if curves else ""))


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    """Write rows of one dataclass to a file; a Ratio `x` takes the columns x, x_low and x_high."""
    columns: list[str] = []
    for name, declared in rows[0].__dataclass_fields__.items():
        columns += (
            [name, f"{name}_low", f"{name}_high"] if "Ratio" in str(declared.type) else [name]
        )
    lines = io.StringIO()
    writer = csv.DictWriter(lines, fieldnames=columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = dict(vars(row))
        for name, ratio in vars(row).items():
            if isinstance(ratio, Ratio):
                values |= {name: ratio.median, f"{name}_low": ratio.low, f"{name}_high": ratio.high}
        writer.writerow(values)
    write_whole(path, lines.getvalue())


def read_factors(path: Path) -> dict[str, Ratio | None]:
    """The factor of each stage over the one that it changes, from a ladder's results.csv. Raises
    UserError.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["base"] != row["stage"]]
        ends = [
            (row["over_base"], row.get("over_base_low"), row.get("over_base_high")) for row in rows
        ]
        factors = {
            row["stage"]: Ratio(float(value), *(float(end) if end else None for end in interval))
            if value
            else None
            for row, (value, *interval) in zip(rows, ends, strict=True)
        }
        for stage, factor in factors.items():
            if factor and not 0 < factor.ends[0] <= factor.median <= factor.ends[1] < math.inf:
                raise ValueError(f"{stage} has the factor {factor}")
        return factors
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}; --across takes folders that python "
            f"ladder.py left"
        ) from None
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is not the table of a ladder: {error}") from None


def markdown(
    ladder: str, stages: list[Stage], rows: list[Row], failed: list[str], plotted: bool
) -> str:
    """The report as text."""
    summaries = {stage.name: summary for stage in stages if (summary := stage.summary())}
    measured = list(
        dict.fromkeys(
            f"{s.get('machine', reports.machine())}; device {s['device']}, torch {s['torch']}, "
            f"commit {s['git']}, {s['started'][:10]}."
            for s in summaries.values()
        )
    )
    missing = dict.fromkeys(
        stage.name for stage in stages if stage.name not in summaries and not stage.error
    )
    twins = [stage for stage in stages if stage.twin_of]
    lines = [
        f"# The {ladder} ladder" if ladder in SERIES else "# A ladder",
        "",
        *measured,
        "",
        *reports.markdown_table(filled(COLUMNS, rows), rows),
        "",
        "x base: speed over that of its base, the stage that it changes (or the stage before, "
        "where that is not in this ladder). "
        "x first: over that of the first in the table, the product of such factors. "
        + _how_timed(rows)
        + " tokens/s and ms/step: medians without the first steps, which compile and warm up (`first step` is apart), of runs that "
        "came one after the other. MB: peak memory, of the GPU's tensors on CUDA, else of the "
        "process. "
        "loss: of the last step, nats per token. diff.: mean absolute difference "
        f"from the published curve over steps {FIRST_COMPARED} to {LAST_COMPARED}, or as many of "
        f"them as ran. of matmul: share of "
        "what a large matrix product reaches on this device.",
        "",
    ]
    if any(row.published_over_base for row in rows):
        lines += [
            "published: the same factor over the base in the published times, on the GPU of "
            "whoever published them.",
            "",
        ]
    if any(stage.published.log and UNSYNCHRONIZED.match(stage.published.log) for stage in stages):
        lines += [
            "Published times of speedup1 and later are not compared: they were read without "
            "waiting for the GPU.",
            "",
        ]
    if any(stage.name == "ddp" for stage in stages):
        lines += [
            f"ddp: {stages[-1].processes} processes; {DDP_PUBLISHED:,} tokens/s were published, "
            f"of two RTX 4090.",
            "",
        ]
    if twins:
        lines += [
            f"The published runs of {', '.join(str(t.twin_of) for t in twins)} did not do what "
            f"their notes say (their "
            "weights were not tied). Their curves are compared with runs that do as logged "
            "(`configs/as_logged/`).",
            "",
        ]
    if cramped := [
        name for name, pair in pairs_of(stages).items() if pair.found().get("memory_kept") is False
    ]:
        lines += [
            f"Timed in turn without keeping the memory that a step frees for the next, for which "
            f"two at once had no room: "
            f"{', '.join(cramped)}.",
            "",
        ]
    lines += [f"Failed: {line}\n" for line in failed]
    lines += [f"Not run: {', '.join(missing)}.", ""] if missing else []
    lines += ["![speed of each stage over the first](speed.png)", ""]
    lines += ["![loss curves, measured over published](loss.png)", ""] if plotted else []
    ran = {
        stage.name: f"`{stage.name}`: {summaries[stage.name]['steps']} steps of {stage.config.batch_size} x "
        f"{stage.config.seq_len} tokens"
        for stage in stages
        if stage.name in summaries
    }
    return "\n".join([*lines, "Settings: " + "; ".join(ran.values()) + "."]) + "\n"


def _how_timed(rows: Sequence[Row]) -> str:
    """What the intervals are."""
    rounds = sorted({row.rounds for row in rows if row.rounds})
    if not rounds:
        return "Not timed in turn: a machine whose speed drifts makes such factors too."
    many = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    return (
        f"In brackets: the interval that holds the true median with 95% confidence, of {many} "
        f"rounds in which both were timed "
        f'in turn; "about 1" where it holds 1. A factor without brackets was not timed in turn.'
    )


# ---- loss curves


def with_published_curve(stages: Sequence[Stage]) -> list[tuple[Stage, str]]:
    """The finished stages with a published log, and its name."""
    return [
        (stage, stage.published.log) for stage in stages if stage.published.log and stage.summary()
    ]


def plot_losses(shown: Sequence[tuple[Stage, str]], path: Path) -> None:
    """A small picture for each stage with a published log, measured over published."""
    columns = min(4, len(shown))
    height = -(-len(shown) // columns)
    figure, grid = reports.pyplot().subplots(
        height,
        columns,
        figsize=(3 * columns, 2.4 * height + 0.5),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for axes, (stage, log) in zip(grid.flat, shown, strict=False):
        ours, published = read_rows(stage.folder / "log.csv"), published_rows(log)
        axes.plot(*curve(published), color=ORANGE, linewidth=2.4, label="published")
        axes.plot(*curve(ours), color=BLUE, linewidth=1.2, label="measured")
        found = loss_difference(ours, published)
        name = f"{stage.twin_of}, as logged" if stage.twin_of else stage.name
        axes.set_title(
            reports.plain(name) + (f"\ndifference {found[0]:.3f}" if found else ""), fontsize=9
        )
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    for axes in list(grid.flat)[
        max(0, len(shown) - columns) : len(shown)
    ]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
    figure.supxlabel("step")
    figure.supylabel("loss, nats per token")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    reports.save_picture(figure, path)


def plot_runs(folders: Sequence[str], path: Path) -> None:
    """The loss curves of any runs in one picture, with the validation losses of those that have
    some. Raises UserError for a folder without a log.
    """
    logs = {folder: read_rows(Path(folder) / "log.csv", LOG_COLUMNS) for folder in folders}
    evaluated = {
        folder: read_rows(Path(folder) / "eval.csv", ("step", "val_loss"))
        for folder in folders
        if (Path(folder) / "eval.csv").exists()
    }
    reports.draw_losses(
        path,
        {folder: curve(log) for folder, log in logs.items()},
        {folder: curve(log, "val_loss") for folder, log in evaluated.items()},
    )
    print(f"wrote {path}")


# ---- what an optimization is worth first, last, and elsewhere


@dataclass
class Worth:
    """An optimization's factor of speed: alone, switched on first; and with all others on, switched
    on last. Memory in MB.
    """

    optimization: str
    first: Ratio | None
    last: Ratio | None
    memory_mb_without: float | None  # with all others on
    memory_mb_with: float | None


WORTH = [
    reports.field("optimization", "optimization"),
    reports.field("on first", "first"),
    reports.field("on last", "last"),
    reports.field("MB without", "memory_mb_without", ",.0f"),
    reports.field("MB with", "memory_mb_with", ",.0f"),
]


def ablate(config: str, extra: list[str], options: LadderOptions) -> None:
    """Time each optimization of a config in turn: it alone against none, and all against all but
    it.

    Leaves report.md, results.csv and worth.png in logs/ablate_<config>/. Raises UserError.
    """
    stage = _stage("ablate", config, "ladder", options.log_dir, extra)
    off = stage.config.switched_off()
    if not off:
        raise UserError(f"{config}: has no optimization on, so there is nothing to switch off")
    folder = Path(options.log_dir) / f"ablate_{Path(config).stem}"
    folder.mkdir(parents=True, exist_ok=True)
    everything = [config, *extra]
    nothing = [*everything, *itertools.chain(*off.values())]
    pairs = {}
    for name, flags in off.items():
        alone = [
            *everything,
            *itertools.chain(*(others for other, others in off.items() if other != name)),
        ]
        stem = "_".join(name.split())
        pairs[name] = (
            Pair(f"{name} first", nothing, alone, folder / f"{stem}_first.json"),
            Pair(f"{name} last", everything + flags, everything, folder / f"{stem}_last.json"),
        )
    both = [
        pair for two in pairs.values() for pair in two if operator.ne(*pair.settings())
    ]  # a mode of compile alone is nothing
    if not options.report_only:
        try:
            take_turns(
                both, options.rounds, options.rerun, probe(stage.config.device) | {"memory_mb": 0.0}
            )
        except KeyboardInterrupt:
            exit_with(
                UserError("interrupted; what is finished is kept, the same command goes on"),
                status=130,
            )
    rows = [
        Worth(name, first.ratio, last.ratio, last.memory_mb(0), last.memory_mb(1))
        for name, (first, last) in pairs.items()
        if first.ratio or last.ratio
    ]
    failed = [f"{pair.name}: {pair.error}" for pair in both if pair.error]
    if not rows:
        raise UserError(
            "\n".join([f"{folder}: nothing to report", *(f"failed: {line}" for line in failed)])
        )
    title = f"What each optimization of {Path(config).stem} is worth"
    reports.print_table(title, WORTH, rows)
    for line in failed:
        print(f"failed: {line}")
    write_csv(folder / "results.csv", rows)
    reports.draw_factors(
        folder / "worth.png",
        [row.optimization for row in rows],
        {
            "switched on first": [row.first for row in rows],
            "switched on last": [row.last for row in rows],
        },
        "factor of speed",
    )
    where = dict.fromkeys(
        f"{found['machine']}; device {found['device']}, commit {found['git']}."
        for pair in both
        if (found := pair.found())
    )
    write_whole(
        folder / "report.md",
        "\n".join(
            [
                f"# {title}",
                "",
                *where,
                "",
                *reports.markdown_table(WORTH, rows),
                "",
                "on first: the speed with this optimization alone, over that with none. on last: "
                "the speed with all of them, over that "
                "with all but this one. Each two were timed in turn; in brackets the interval "
                "that holds the true median with 95% "
                'confidence, "about 1" where it holds 1. MB: peak memory with all but this one, '
                "and with all.",
                "",
                *(f"Failed: {line}\n" for line in failed),
                "![factors with their intervals](worth.png)",
            ]
        )
        + "\n",
    )
    print(f"{folder}/ has report.md, results.csv and worth.png")
    if failed:
        raise SystemExit(1)


def across(folders: Sequence[str], out: Path) -> None:
    """Set the factors of ladders from several machines beside each other, and beside the published
    ones whose times count.

    Leaves report.md and across.png in `out`. A machine is called as the folder that holds its
    ladder's folder. Raises UserError.
    """
    found: dict[str, dict[str, Ratio | None]] = {}
    for folder in folders:
        machine = Path(folder).resolve().parent.name
        found[folder if machine in found else machine] = read_factors(Path(folder) / "results.csv")
    stages = list(dict.fromkeys(stage for factors in found.values() for stage in factors))
    if not stages:
        raise UserError(
            f"{', '.join(folders)}: no stage there has a base to be compared with; climb more of "
            f"the ladder first"
        )
    for i, name in enumerate(("A100, published", "one GPU, published"), start=1):
        published = {
            stage: _counterpart(counterpart[i])
            for stage, counterpart in COUNTERPARTS.items()
            if stage in stages
        }
        if any(published.values()):
            found[name] = published
    columns = [Column("stage", _with_what_it_adds)]
    columns += [Column(name, partial(_factor_of, factors)) for name, factors in found.items()]
    reports.print_table("speed over the stage that it changes", columns, stages)
    out.mkdir(parents=True, exist_ok=True)
    series = {name: [factors.get(stage) for stage in stages] for name, factors in found.items()}
    reports.draw_factors(
        out / "across.png",
        list(map(_with_what_it_adds, stages)),
        series,
        "speed over the stage that it changes",
    )
    write_whole(
        out / "report.md",
        "\n".join(
            [
                "# What each optimization is worth where",
                "",
                *reports.markdown_table(columns, stages),
                "",
                "The speed of each stage over that of the stage that it changes. In brackets: "
                "the interval that holds the true median with "
                "95% confidence, where both were timed in turn; a factor without brackets is of "
                "runs that came one after the other. "
                "Published: the same step in the a100 series and in the list of timings on one "
                "GPU (`logs/reference/`).",
                "",
                "![factors by stage and machine](across.png)",
            ]
        )
        + "\n",
    )
    print(f"{out}/ has report.md and across.png")


def _factor_of(factors: Mapping[str, Ratio | None], stage: str) -> str:
    return str(factors.get(stage) or "")


def _with_what_it_adds(stage: str) -> str:
    return f"{stage}: {COUNTERPARTS[stage][0]}" if stage in COUNTERPARTS else stage


def _counterpart(name: str | None) -> Ratio | None:
    """The published speed of a stage of the a100 or gpu_ms series over that of the stage that it
    changes.
    """
    if name is None:
        return None
    base = (
        Path(name)
        .with_name(Path(str(read_yaml_mapping(CONFIG_DIR / f"{name}.yaml")["base"])).stem)
        .as_posix()
    )
    ours, theirs = _published(name).ms_per_step, _published(base).ms_per_step
    return Ratio(theirs / ours) if ours and theirs else None


def main(argv: Sequence[str]) -> None:
    """Do what the command line asks for. Raises UserError."""
    at = argv.index("--") if "--" in argv else len(argv)
    runs_option = (
        "is an option of the runs, and goes after --: python ladder.py speedup -- --max_steps 5"
    )
    options = parse_command_line(
        LadderOptions,
        argv[:at],
        description=__doc__,
        positional="stages",
        elsewhere=dict.fromkeys({"config", *Config.model_fields} - {"log_dir"}, runs_option),
    )
    if not options.stages:
        raise UserError(
            f"name a series ({', '.join(SERIES)}) or config files; python ladder.py --help says "
            f"more"
        )
    modes = [name for name in ("ablate", "across", "plot") if getattr(options, name)]
    if len(modes) > 1:
        raise UserError(f"--{modes[0]} and --{modes[1]} exclude each other; choose one")
    if 0 < options.rounds < FEWEST:
        raise UserError(f"--rounds {options.rounds}: at least {FEWEST} make an interval; 0 is off")
    if options.across:
        across(options.stages, Path(options.log_dir) / "across")
        return
    if options.ablate:
        if len(options.stages) != 1 or options.stages[0] in SERIES or not options.rounds:
            raise UserError(
                "--ablate takes one config, such as speedup10.yaml, and times it in turn: "
                "--rounds cannot be 0"
            )
        ablate(options.stages[0], list(argv[at + 1 :]), options)
        return
    if options.plot:
        if (
            options.rerun
            or options.report_only
            or "log_dir" in options.model_fields_set
            or at < len(argv)
        ):
            raise UserError(
                "--plot takes folders of runs and nothing else; it writes comparison.png here"
            )
        plot_runs(options.stages, Path("comparison.png"))
        return
    extra, processes = list(argv[at + 1 :]), options.nproc_per_node
    ladder, stages = plan(options.stages, options.log_dir, extra, processes)
    found = {} if options.report_only else probe(stages[0].config.device)
    if warning := bf16_warning(stages, found.get("bf16_slowdown"), argv):
        print(warning, flush=True)
    if ladder == "speedup" and processes is None and found.get("gpus", 0) > 1:
        ladder, stages = plan(options.stages, options.log_dir, extra, found["gpus"])
        ddp = stages[-1].config
        if not any((Path(ddp.data_dir) / ddp.dataset).glob("*.bin")):
            stages.pop()
            print(
                f"note: the stage ddp is left out: its corpus {ddp.data_dir}/{ddp.dataset} is "
                f"not there; write it with: "
                f"python data/fineweb.py",
                flush=True,
            )
    folder = Path(options.log_dir) / ladder
    with contextlib.nullcontext() if options.report_only else only_ladder(folder):
        if ladder == "ladder" and not options.report_only and (moved := make_way(folder, stages)):
            print(f"note: the ladder of other configs that was {folder} is now {moved}", flush=True)
        runs = [
            stage
            for i, stage in enumerate(stages)
            if stage.name not in [earlier.name for earlier in stages[:i]]
        ]
        pairs: list[Pair] = []
        if not options.report_only:
            try:
                climb(runs, options.rerun)
                pairs = list(pairs_of(stages).values())
                if options.rounds and pairs:
                    take_turns(pairs, options.rounds, options.rerun, found)
            except KeyboardInterrupt:
                finished = sum(stage.summary() is not None for stage in runs)
                exit_with(
                    UserError(
                        f"interrupted; {finished} of {len(runs)} stages are finished and kept, "
                        f"the same command goes on"
                    ),
                    status=130,
                )
        report(ladder, stages, folder, pairs)
    if any(stage.error for stage in stages) or any(pair.error for pair in pairs):
        raise SystemExit(1)


if __name__ == "__main__":
    with reported(
        "the report", interrupted="interrupted; finished stages are kept, the same command goes on"
    ):
        main(sys.argv[1:])
