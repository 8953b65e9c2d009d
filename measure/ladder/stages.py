"""Plan and run the stages of a ladder, and look up their published figures."""

import contextlib
import csv
import functools
import itertools
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ValidationError

from config import (
    EXCLUDED_BY,
    Config,
    DataConfig,
    ModelConfig,
    OptimizationConfig,
    load_config,
)
from measure.interleaved.comparison import Comparison
from measure.interleaved.process import start_process
from measure.ladder.device import Device
from measure.ladder.record import Planned, Record, Run, differences
from runtime.cli import CONFIG_DIR, find_config, parse, read_yaml, read_yaml_mapping
from runtime.errors import UserError, why_it_failed
from runtime.report import machine
from runtime.runlog import Row, curve, read_rows
from runtime.start import cores

ROOT = CONFIG_DIR.parent
REFERENCE = ROOT / "logs" / "reference"
SPEEDUP = "speedup"
PUBLISHED = REFERENCE / "published.csv"  # the published figures of the configs here
CORES_OF_A_RUN = 8  # more of them speed up a small model's run little
NOT_TIMED = 5  # first steps, which published times leave out
# options that change the losses of a run
CHANGE_LOSS = ModelConfig.model_fields | DataConfig.model_fields | OptimizationConfig.model_fields
# options that the ladder sets for each run
RESERVED = {"--config", "--run_name", "--log_dir", "--resume", "--print_config"}


class Published(BaseModel, frozen=True):
    """Published figures of a stage; None if there are none."""

    log: str | None = None  # the stem of its log in logs/reference/, or the path of one
    device: str | None = None  # the times were measured on it
    ms_per_step: float | None = None
    tokens_per_sec: float | None = None
    # figures for the same optimizations in the a100 series and in the list of milliseconds gpu_ms
    a100_tokens_per_sec: float | None = None
    gpu_ms: float | None = None


NOTHING_PUBLISHED = Published()


@dataclass(eq=False)
class Stage:
    """A config with options, its run, and its base: a rung of a ladder or of an ablation."""

    name: str
    file: Path
    options: list[str]
    config: Config  # includes the options
    record: Record  # the whole ladder's
    base: "Stage | None" = None  # the stage that it is compared with; None for the first
    published: Published = NOTHING_PUBLISHED
    ranks: int = 1
    error: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of its run."""
        return self.record.folder / self.name

    @property
    def arguments(self) -> list[str]:
        """The arguments of train.py. A ladder needs no weights, so none are kept."""
        return [f"--config={self.file}", "--keep_last=0", *self.options]

    @property
    def planned(self) -> Planned:
        """The stage as the ladder's record has it."""
        inside = self.file.is_relative_to(ROOT)
        config = self.file.relative_to(ROOT) if inside else self.file
        return Planned(config=config.as_posix(), options=self.options, ranks=self.ranks)

    @property
    def command(self) -> list[str]:
        """The command that starts its run."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        return [
            sys.executable,
            *(torchrun if self.ranks > 1 else []),
            str(ROOT / "train.py"),
            *self.arguments,
            f"--log_dir={self.record.folder}",
            f"--run_name={self.name}",
        ]

    @functools.cached_property
    def run_or_reason(self) -> tuple[Run | None, str]:
        """The finished run with these very settings, from its folder or the ladder's record.

        Otherwise None and the reason, which is empty if there is no run. It is read once; `forget`
        it after a new run.
        """
        try:
            if self.folder.is_dir():
                run = Run.read(self.folder)
            elif self.name in self.record.runs:
                run = self.record.runs[self.name]
            else:
                return None, ""
        except OSError:
            return None, "not finished"
        except ValidationError:
            return None, "summary.json is damaged"
        except UserError as error:
            return None, str(error)
        if run.summary.interrupted:
            return None, "not finished"
        differing = differences(run.config, self.config)
        return (None, differing) if differing else (run, "")

    @property
    def finished(self) -> Run | None:
        """The finished run with these very settings."""
        return self.run_or_reason[0]

    def forget(self) -> None:
        """Read the run again at its next use."""
        self.__dict__.pop("run_or_reason", None)

    def comparison(self) -> tuple[Comparison | None, str]:
        """Return the comparison of this stage with its base, both with these very settings.

        Otherwise None and the reason, which is empty if there is no comparison.
        """
        found = self.record.comparisons.get(self.name)
        if not (found and self.base) or self.error:
            return None, ""
        both = zip(found.settings, (self.base.config, self.config), strict=True)
        differing = " and ".join(dict.fromkeys(filter(None, (differences(*pair) for pair in both))))
        return (None, differing) if differing else (found, "")


# ---- which stages there are


def series_folder(name: str) -> Path | None:
    """Return the folder of a series: one with YAMLs, by its path or by its name in configs/.

    The speedup series is in configs/ itself. None: there is no such folder.
    """
    folder = CONFIG_DIR if name == SPEEDUP else Path(name)
    places = (folder, CONFIG_DIR / name)
    found = (folder.resolve() for folder in places)
    return next((f for f in found if f.is_dir() and any(f.glob("*.yaml"))), None)


def series_names() -> list[str]:
    """List the series of this project: speedup, and the folders of configs/ whose YAMLs build on
    each other.
    """
    folders = {path.parent.name for path in CONFIG_DIR.glob("*/*.yaml") if base_of(path)}
    return [SPEEDUP, *sorted(folders)]


def series(folder: Path) -> list[Path]:
    """List the YAMLs of a series, each after its base. Raises ConfigError."""
    patterns = ("baseline.yaml", "speedup*.yaml") if folder == CONFIG_DIR else ("*.yaml",)
    files = [path.resolve() for pattern in patterns for path in sorted(folder.glob(pattern))]
    bases = {path: {*files} & {base_of(path)} for path in files}
    try:
        return [*TopologicalSorter(bases).static_order()]
    except CycleError as error:
        names = " -> ".join(path.name for path in error.args[1])
        raise UserError(f"{folder}: circular base: {names}") from None


def base_of(path: Path) -> Path | None:
    """Return the config that a config names as its base; None without one. Raises ConfigError."""
    name = read_yaml_mapping(path).get("base")
    return find_config(str(name), path.parent).resolve() if name else None


def ladder_of(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return a ladder's name, and its configs: of a series, or `names` themselves."""
    if len(names) == 1 and (place := series_folder(names[0])):
        name = SPEEDUP if place == CONFIG_DIR else place.name
        return name, [str(path) for path in series(place)]
    return "ladder", [*names]


def plan(
    names: Sequence[str], log_dir: str, of_runs: Sequence[str], device: Device
) -> tuple[str, list[Stage]]:
    """Return the name and the stages of a ladder on a device, given a series or configs.

    Raises UserError for an unknown config or wrong options.
    """
    ladder, configs = ladder_of(names)
    record, stages = Record.load(Path(log_dir, ladder)), list[Stage]()
    for config in configs:
        name = Path(config).stem
        if name in [stage.name for stage in stages]:
            name += f"_{len(stages) + 1}"
        stage = make_stage_here(name, config, record, of_runs, device)
        if configs == [*names] or can_gain(stage, device):
            stages.append(stage)
        elif device.name:
            print(f"note: {name} is left out: {device.name} gains nothing from it")
    return ladder, with_bases(stages)


def can_gain(stage: Stage, device: Device) -> bool:
    """False if a stage only adds a precision that the device does not have, or only emulates."""
    added = read_yaml_mapping(stage.file)
    if added.get("matmul_precision") == "medium":
        return device.medium
    is_replaced = not (stage.config.bf16 or stage.config.fp16)
    return added.keys() != {"base", "bf16"} or not is_replaced


def planned_before(record: Record, of_runs: Sequence[str]) -> list[Stage]:
    """Return the stages of a ladder's record, with further options. Raises UserError."""
    stages = list[Stage]()
    for name, planned in record.stages.items():
        options = [*planned.options, *of_runs]
        config = str(ROOT / planned.config)
        stages.append(make_stage(name, config, record, options, ranks=planned.ranks))
    if not stages:
        raise UserError(f"{record.folder}: no finished stage to report")
    return with_bases(stages)


def with_bases(stages: list[Stage]) -> list[Stage]:
    """Return the stages, each with its base: the stage which its config changes, or the one before
    it if that is not in the list. Raises UserError for no stages.
    """
    if not stages:
        raise UserError("the ladder has no stages")
    stages[0].base = None
    for before, stage in pairwise(stages):
        file = base_of(stage.file)
        stage.base = next((other for other in stages if other.file == file), before)
    return stages


def make_stage_here(
    name: str, config: str, record: Record, of_runs: Sequence[str], device: Device
) -> Stage:
    """Make the stage of a config as a device can run it. Raises UserError."""
    stage = make_stage(name, config, record, of_runs)
    instead = [] if "--bf16" in of_runs else instead_of_bf16(stage.config, device)
    return make_stage(name, config, record, [*of_runs, *instead]) if instead else stage


def instead_of_bf16(config: Config, device: Device) -> list[str]:
    """Return the options that replace a config's bf16 on a device without it.

    On a GPU before Ampere that is fp16 with the loss scaler, or fp32 if the optimizer excludes
    fp16; on a CPU that emulates bf16, fp32.
    """
    if not config.bf16 or (device.bf16 and not device.slow_bf16):
        return []
    if device.slow_bf16:
        return ["--no-bf16"]
    return ["--no-bf16", *["--fp16"] * ("fp16" not in EXCLUDED_BY.get(config.optimizer, {}))]


def in_place_of_bf16(stages: Sequence[Stage]) -> str:
    """List the stages whose precision is not the one in their config; empty if there are none."""
    instead = ", ".join(
        f"{stage.name} {'fp16' if stage.config.fp16 else 'fp32'}"
        for stage in stages
        if read_yaml(stage.file)[0].get("bf16") == "true" and not stage.config.bf16
    )
    return instead and f"In place of bf16: {instead}."


def make_stage(
    name: str,
    config: str,
    record: Record,
    options: Sequence[str],
    base: Stage | None = None,
    ranks: int = 1,
) -> Stage:
    """Make the stage of a config with options. Raises UserError."""
    path = find_config(config, also=series_names).resolve()
    if taken := RESERVED & {word.partition("=")[0] for word in options}:
        raise UserError(
            f"{min(taken)} after --: the ladder sets it for each run; configs and --log_dir are "
            "given before --"
        )
    resolved = parse(Config, [f"--config={config}", *options], config_file=True)
    stage = Stage(name, path, [*options], resolved, record, base, ranks=ranks)
    if _same_training(resolved, load_config(config)):
        stage.published = published(path)
    return stage


def _same_training(a: Config, b: Config) -> bool:
    """True if two configs compute the same losses, until the shorter run ends."""
    names = {"seed", *CHANGE_LOSS} - {"data_dir"}
    if a.lr_schedule == "constant":
        names.remove("max_steps")
    return a.model_dump(include=names) == b.model_dump(include=names)


# ---- published figures


@functools.cache
def published(path: Path) -> Published:
    """Look up the published figures of a config.

    The log of a user's own config is <stage>.csv beside it, or logs/reference/<series>_<stage>.csv.
    """
    if path.is_relative_to(CONFIG_DIR):
        name = path.relative_to(CONFIG_DIR).with_suffix("").as_posix()
        with open(PUBLISHED, newline="") as file:
            for row in csv.DictReader(file):
                if row.pop("config") == name:
                    return Published.model_validate({k: v or None for k, v in row.items()})
    for log in (path.with_suffix(".csv"), REFERENCE / f"{path.parent.name}_{path.stem}.csv"):
        if log.is_file():
            return Published(log=str(log), device="published", **times_of(log))
    return NOTHING_PUBLISHED


def times_of(log: Path) -> dict[str, float]:
    """Return the medians of a log's times, without the first steps; empty if it has none."""
    rows = read_rows(log)
    timed = {
        "ms_per_step": curve(rows, "dt_ms")[1][NOT_TIMED:],
        "tokens_per_sec": curve(rows, "tokens_per_sec")[1][NOT_TIMED:],
    }
    return {name: statistics.median(values) for name, values in timed.items() if values}


def published_rows(log: str) -> dict[int, Row]:
    """Return the rows of a published log by step."""
    return read_rows(Path(log) if log.endswith(".csv") else REFERENCE / f"{log}.csv")


# ---- running


def to_be_run(stages: Sequence[Stage], rerun: bool, seeds: int, device: Device) -> list[Stage]:
    """Return the stages without a finished run on this machine and device; with seeds, which
    compare losses, without a finished run on any.
    """

    def is_done(run: Run) -> bool:
        here = run.summary.machine == machine() and device.name in (None, run.summary.device)
        return seeds > 0 or here

    return [s for s in stages if rerun or not (s.finished and is_done(s.finished))]


def run_stages(stages: Sequence[Stage], rerun: bool, seeds: int, device: Device) -> None:
    """Run the stages that are not finished with the same settings.

    With seeds only losses are compared: a run that another machine finished counts too, and several
    runs of one rank train at once, as many as there are seeds, GPUs, or cores for them. A stage
    that fails is marked, and the other ones run. Raises KeyboardInterrupt if the user stops.
    """
    to_run = to_be_run(stages, rerun, seeds, device)
    for stage in stages:
        if stage not in to_run:
            print(f"== {stage.name}: finished before", flush=True)
    at_once = min(seeds, device.gpus or cores() // CORES_OF_A_RUN) or 1
    if any(stage.ranks > 1 for stage in to_run):
        at_once = 1
    for i in range(0, len(to_run), at_once):
        together = to_run[i : i + at_once]
        names = ", ".join(stage.name for stage in together)
        print(f"== {i + len(together)} of {len(to_run)}: {names}", flush=True)
        errors = run_commands([stage.command for stage in together])
        for stage, error in zip(together, errors, strict=True):
            stage.error = error
            stage.forget()
            if error is None and stage.finished is None:
                stage.error = "stopped before its last step; the same command runs it again"
            if stage.error:
                print(f"failed: {stage.name}: {stage.error}", flush=True)


def run_commands(commands: Sequence[Sequence[str]]) -> list[str | None]:
    """Run commands at once, which print to our stdout; return the error line of each, or None.

    Several have a GPU each, and share the cores. Ctrl-C interrupts the commands too, and
    KeyboardInterrupt is raised once they have ended.
    """
    share, several = str(max(1, cores() // len(commands))), len(commands) > 1
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = chosen.split(",") if chosen else [str(gpu) for gpu in range(len(commands))]
    with contextlib.ExitStack() as files:
        started = []
        for command, gpu in zip(commands, itertools.cycle(gpus), strict=False):
            variables = {"OMP_NUM_THREADS": share, "CUDA_VISIBLE_DEVICES": gpu}
            process, errors = start_process(command, variables if several else {})
            started.append((process, files.enter_context(errors)))
        try:
            for process, _ in started:
                process.wait()
        except KeyboardInterrupt:
            for process, _ in started:
                process.send_signal(signal.SIGINT)
            for process, _ in started:
                process.wait()
            raise
        return [
            why_it_failed(process.returncode, errors) if process.returncode else None
            for process, errors in started
        ]
