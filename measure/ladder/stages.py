"""Plan and run the stages of a ladder, and look up what was published of each."""

import contextlib
import csv
import functools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from config import (
    EXCLUDED_BY,
    Config,
    DataConfig,
    ModelConfig,
    OptimizationConfig,
    load_config,
)
from measure.interleaved.options import to_flags
from measure.interleaved.process import in_fresh_process
from runtime.cli import (
    CONFIG_DIR,
    find_config,
    load,
    parse,
    read_yaml_mapping,
    show,
)
from runtime.errors import UserError, why_it_failed
from runtime.report import machine
from runtime.runlog import Row, curve, read_rows
from runtime.signals import exit_when_parent_dies
from runtime.start import cores

ROOT = CONFIG_DIR.parent
REFERENCE = ROOT / "logs" / "reference"
SPEEDUP = "speedup"
PUBLISHED = REFERENCE / "published.csv"  # what was published of the configs here
SLOW = 1.5  # times as long in bf16 as in fp32, from which a ladder says so
NOT_TIMED = 5  # the first steps, which published times leave out
# what the ladder sets for each run
RESERVED = {"--config", "--run_name", "--log_dir", "--resume", "--print_config"}
# Options that change neither what a run computes nor how fast
IRRELEVANT = {"run_name", "log_dir", "data_dir", "resume", "timeout", "checkpoint_every"}
IRRELEVANT |= {"keep_last", "tensorboard", "wandb"}
OFF = {"false", "none", "null", "0", "0.0", ""}  # values of a stored option, in lower case


class Published(BaseModel, frozen=True):
    """Published figures of a stage; None if there are none."""

    log: str | None = None  # the stem of its log in logs/reference/, or the path of one
    device: str | None = None  # that the times are of
    ms_per_step: float | None = None
    tokens_per_sec: float | None = None
    # with the same optimizations, in the a100 series and in the list of milliseconds gpu_ms
    a100_tokens_per_sec: float | None = None
    gpu_ms: float | None = None


NOTHING_PUBLISHED = Published()


class Summary(BaseModel, allow_inf_nan=False):
    """Hold what a report needs of a run's summary.json."""

    median_dt_ms: float = Field(gt=0)
    median_tokens_per_sec: float = Field(gt=0)
    first_step_s: float
    peak_memory_mb: float
    utilization: float | None  # MFU; None if the matmul could not be timed
    final_loss: float | None
    steps: int
    world_size: int = 1
    machine: str = "unknown machine"  # before 2026-11-22 it was not stored
    device: str
    torch: str
    git: str | None
    started: str
    interrupted: bool = False

    @property
    def day(self) -> str:
        """Return the date on which it started."""
        return self.started[:10]

    @property
    def about(self) -> str:
        """Say where and with what it ran."""
        return f"{self.machine}; device {self.device}, torch {self.torch}, commit {self.git}"


@dataclass(eq=False)
class Stage:
    """Describe one run of a ladder, and find the files that it leaves."""

    name: str
    side: list[str]  # its config, and options that change it
    config: Config
    file: Path  # of its config
    published: Published = NOTHING_PUBLISHED
    base: "Stage | None" = None  # the stage that it is compared with; None for the first
    ranks: int = 1
    error: str | None = None

    @property
    def folder(self) -> Path:
        """Return the folder of its run."""
        return Path(self.config.log_dir) / self.name

    @property
    def command(self) -> list[str]:
        """Return the command that starts its run."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        config, *options = self.side
        return [
            sys.executable,
            *(torchrun if self.ranks > 1 else []),
            str(ROOT / "train.py"),
            f"--config={config}",
            *options,
            f"--log_dir={self.config.log_dir}",
            f"--run_name={self.name}",
        ]

    def summary(self) -> Summary | None:
        """Read the summary of the finished run with these very settings; None if there is none."""
        return self.read()[0]

    def read(self) -> tuple[Summary | None, str]:
        """Read the summary of the finished run with these very settings. Otherwise return None and
        the reason; an empty one if there is no run.
        """
        if not self.folder.is_dir():
            return None, ""
        try:
            summary = Summary.model_validate_json((self.folder / "summary.json").read_bytes())
            read_rows(self.folder / "log.csv")
            ran = stored_config(read_yaml_mapping(self.folder / "config.yaml"))
        except OSError:
            return None, "not finished"
        except ValidationError:
            return None, "summary.json is damaged"
        except UserError as error:
            return None, str(error)
        if summary.interrupted:
            return None, "not finished"
        differing = differences(settings(ran), settings(self.config))
        return (None, differing) if differing else (summary, "")

    def ran_with(self) -> Config | None:
        """Read the config of the run in the folder, or of its first seed's run; None if there is
        neither.
        """
        for name in (self.name, seed_name(self.name, self.config.seed)):
            with contextlib.suppress(UserError):
                path = Path(self.config.log_dir, name, "config.yaml")
                return stored_config(read_yaml_mapping(path))
        return None


def seed_name(name: str, seed: int) -> str:
    """Return the name of a stage's run with this seed, in a ladder that trains several."""
    return f"{name}_seed_{seed}"


def settings(config: Config) -> dict[str, Any]:
    """Return the options, as in JSON, that two runs must share to count as the same run."""
    # a run's config.yaml contains the learning rate at the end of its schedule, set or not
    resolved = {"min_lr": config.final_lr()}
    return config.model_dump(mode="json", exclude=IRRELEVANT) | resolved


def stored_config(values: Mapping[str, Any]) -> Config:
    """Make a config of options that another version of this code has stored.

    An option that is missing has its default. An unknown one is ignored if it is off. Raises
    ConfigError.
    """
    known = Config.model_fields
    kept = {n: v for n, v in values.items() if n in known or str(v).lower() not in OFF}
    return load(Config, kept)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """List the settings in which a stored run differs: `batch_size 1 there, 2 here`."""
    return ", ".join(
        f"{name} {show(there[name])} there, {show(here[name])} here"
        for name in here
        if there[name] != here[name]
    )


def options_in_common(runs: Sequence[tuple[Config, Config]]) -> list[str]:
    """Return the options, as flags, that all runs of a ladder were given.

    `runs`: the config that each stage ran with, and the config of its file. If the two differ in an
    option, the most frequent of the other values counts as given, unless at least as many runs
    agree with their files.
    """

    def value(config: Config, name: str) -> Any:
        return config.final_lr() if name == "min_lr" else getattr(config, name)

    common: dict[str, Any] = {}
    names = [name for name in Config.model_fields if name not in {"min_lr", *IRRELEVANT}]
    for name in [*names, "min_lr"]:  # unless it is set, min_lr follows from lr
        there = [value(ran, name) for ran, _ in runs]
        here = [value(planned.model_copy(update=common), name) for _, planned in runs]
        others = [a for a, b in zip(there, here, strict=True) if a != b]
        usual = max(others, key=others.count, default=None)
        if there.count(usual) > len(runs) - len(others):
            common[name] = usual
    return to_flags(
        {
            name: ",".join(map(str, value)) if isinstance(value, tuple) else value
            for name, value in common.items()
        }
    )


# ---- which stages there are


def series_folder(name: str) -> Path | None:
    """Return the folder of a series: one with YAMLs, by its path or by its name in configs/.

    The speedup series is in configs/ itself. None: there is no such folder.
    """
    folder = CONFIG_DIR if name == SPEEDUP else Path(name)
    places = (folder, CONFIG_DIR / name)
    return next((f for f in places if f.is_dir() and any(f.glob("*.yaml"))), None)


def series_names() -> list[str]:
    """List the series of this project: speedup, and the folders of configs/ whose YAMLs build on
    each other.
    """
    folders = {path.parent.name for path in CONFIG_DIR.glob("*/*.yaml") if base_of(path)}
    return [SPEEDUP, *sorted(folders)]


def series(folder: Path) -> list[Path]:
    """List the YAMLs of a series, each after its base. Raises ConfigError."""
    pattern = "speedup*.yaml" if folder == CONFIG_DIR else "*.yaml"
    files = {path.resolve(): base_of(path) for path in sorted(folder.glob(pattern))}
    first = [base for base in files.values() if folder == CONFIG_DIR and base not in files]
    files = dict.fromkeys(base for base in first if base) | files  # baseline.yaml

    def after(base: Path | None) -> Iterator[Path]:
        for path in files:
            if (files[path] if files[path] in files else None) == base:
                yield from (path, *after(path))

    return [*after(None)]


def base_of(path: Path) -> Path | None:
    """Return the config that a config names as its base; None without one. Raises ConfigError."""
    name = read_yaml_mapping(path).get("base")
    return find_config(name, path.parent).resolve() if name else None


def plan(
    names: Sequence[str], log_dir: str, of_runs: Sequence[str], device: Mapping[str, Any]
) -> tuple[str, list[Stage]]:
    """Return the name and the stages of a ladder on a device, given a series or configs.

    `device`: the findings of `probe`. Without `medium` and `bf16` among them, the runs in the
    ladder's folder decide. Raises UserError for an unknown config or wrong options.
    """
    ladder, configs, is_series = "ladder", [*names], False
    if len(names) == 1 and (place := series_folder(names[0])):
        ladder = SPEEDUP if place == CONFIG_DIR else place.resolve().name
        configs, is_series = [str(path) for path in series(place)], True
    folder, stages = f"{log_dir}/{ladder}", list[Stage]()
    for config in configs:
        name = Path(config).stem
        if name in [stage.name for stage in stages]:
            name += f"_{len(stages) + 1}"
        stage = make_stage_here(name, config, folder, of_runs, device)
        is_medium = stage.config.matmul_precision == "medium"  # which few CPUs have
        if is_series and is_medium and not device.get("medium", stage.folder.is_dir()):
            continue
        stages.append(stage)
    return ladder, with_bases(stages)


def with_bases(stages: list[Stage]) -> list[Stage]:
    """Return the stages, each with its base: the stage which its config changes, or the one before
    it if that is not in the list.
    """
    stages[0].base = None
    for before, stage in pairwise(stages):
        file = base_of(stage.file)
        stage.base = next((other for other in stages if other.file == file), before)
    return stages


def skipped(file: Path, base: Path) -> list[Path]:
    """Return the configs that lie between a config and one that it changes, the nearest first."""
    found: list[Path] = []
    while below := base_of(file):
        if below == base:
            return found
        found.append(file := below)
    return []


def training_config(side: Sequence[str], *more: str) -> Config:
    """Return the config that a side trains with. Raises UserError."""
    return parse(Config, [f"--config={side[0]}", *side[1:], *more], config_file=True)


def make_stage_here(
    name: str, config: str, folder: str, of_runs: Sequence[str], device: Mapping[str, Any]
) -> Stage:
    """Make the stage of a config as a device can run it. Raises UserError."""
    stage = make_stage(name, config, folder, of_runs)
    ran = None if "bf16" in device else stage.ran_with()
    instead = instead_of_bf16(stage.config, device, ran)
    return make_stage(name, config, folder, [*of_runs, *instead]) if instead else stage


def instead_of_bf16(
    config: Config, device: Mapping[str, Any], ran: Config | None = None
) -> list[str]:
    """Return the options that a config takes on a device without bfloat16, a GPU before Ampere.

    fp16 with the loss scaler takes its place, or fp32 if the optimizer excludes fp16. An earlier
    run, `ran`, decides in place of the device.
    """
    has_bf16 = device.get("bf16", True)
    fp16 = "fp16" not in EXCLUDED_BY.get(config.optimizer, {})
    if ran:
        has_bf16, fp16 = ran.bf16, ran.fp16
    return [] if has_bf16 or not config.bf16 else ["--no-bf16", *["--fp16"] * fp16]


def make_stage(name: str, config: str, folder: str, of_runs: Sequence[str]) -> Stage:
    """Make the stage of a config, whose run is `folder`/`name`. Raises UserError."""
    path = find_config(config, also=[*series_names()]).resolve()
    if taken := RESERVED & {word.partition("=")[0] for word in of_runs}:
        raise UserError(
            f"{min(taken)} after --: the ladder sets it for each run; configs and --log_dir are "
            "given before --"
        )
    side = [config, "--keep_last=0", *of_runs]  # a ladder is climbed for its figures: no weights
    resolved = training_config(side, f"--log_dir={folder}", f"--run_name={name}")
    stage = Stage(name, side, resolved, path)
    if _same_training(resolved, load_config(config)):
        stage.published = published(path)
    return stage


def _same_training(a: Config, b: Config) -> bool:
    """True if two configs compute the same losses, up to where the shorter run ends."""
    fields = ModelConfig.model_fields | DataConfig.model_fields | OptimizationConfig.model_fields
    names = {"seed", *fields} - {"data_dir"}
    if a.lr_schedule == "constant":
        names.remove("max_steps")
    return a.model_dump(include=names) == b.model_dump(include=names)


# ---- what was published


@functools.cache
def published(path: Path) -> Published:
    """Return what was published of a config.

    Of a config of the user's own: <stage>.csv beside it, or logs/reference/<series>_<stage>.csv.
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
    columns = {"ms_per_step": "dt_ms", "tokens_per_sec": "tokens_per_sec"}
    values = {name: curve(read_rows(log), column)[1] for name, column in columns.items()}
    timed = {name: of[NOT_TIMED:] for name, of in values.items()}
    return {name: statistics.median(of) for name, of in timed.items() if of}


def published_rows(log: str) -> dict[int, Row]:
    """Return the rows of a published log by step."""
    return read_rows(Path(log) if log.endswith(".csv") else REFERENCE / f"{log}.csv")


# ---- running


def run_stages(
    stages: Sequence[Stage],
    rerun: bool,
    *,
    anywhere: bool = False,
    at_once: int = 1,
    gpus: int = 0,
) -> None:
    """Run the stages that are not finished with the same settings, `at_once` of them at a time.

    `anywhere`: what another machine has finished counts too, as where only losses do. `gpus`: how
    many to spread runs over. One that fails is marked, and the others are run. Raises
    KeyboardInterrupt if the user stops.
    """
    to_run: list[Stage] = []
    for stage in stages:
        finished = stage.summary()
        if finished and not rerun and (anywhere or finished.machine == machine()):
            print(f"== {stage.name}: finished before", flush=True)
        else:
            to_run.append(stage)
    for i in range(0, len(to_run), at_once):
        together = to_run[i : i + at_once]
        print(f"== {i + len(together)} of {len(to_run)}: {', '.join(s.name for s in together)}")
        sys.stdout.flush()
        shares = {"OMP_NUM_THREADS": str(max(1, cores() // at_once))} if at_once > 1 else {}
        environments = [
            shares | ({"CUDA_VISIBLE_DEVICES": str(j % gpus)} if shares and gpus else {})
            for j in range(len(together))
        ]
        errors = run_commands([stage.command for stage in together], environments)
        for stage, error in zip(together, errors, strict=True):
            stage.error = error
            if error is None and stage.summary() is None:
                stage.error = "stopped before its last step; the same command runs it again"
            if stage.error:
                print(f"failed: {stage.name}: {stage.error}", flush=True)


def run_commands(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]
) -> list[str | None]:
    """Run commands side by side, which print to our stdout; returns the error lines of those that
    fail.

    At Ctrl-C they are asked to stop, too, and KeyboardInterrupt is raised once they have.
    """
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in commands
        ]
        processes = [
            subprocess.Popen(
                command,
                stderr=file,
                env={**os.environ, **more},
                preexec_fn=functools.partial(exit_when_parent_dies, os.getpid()),
            )
            for command, file, more in zip(commands, files, environments, strict=True)
        ]
        try:
            for process in processes:
                process.wait()
        except KeyboardInterrupt:
            for process in processes:
                process.send_signal(signal.SIGINT)
            for process in processes:
                process.wait()
            raise
        return [
            why_it_failed(process.returncode, file) if process.returncode else None
            for process, file in zip(processes, files, strict=True)
        ]


def probe(device: str) -> dict[str, Any]:
    """Ask a fresh process about the device; see measure/ladder/probe.py. Empty if that fails."""
    found, problem = in_fresh_process("measure.ladder.probe:find_out", device)
    if problem:
        print(f"note: the device could not be measured: {problem}")
    return found or {}


def note_slow_bf16(stages: Sequence[Stage], tflops: Mapping[str, float]) -> None:
    """Print which stages are slow because this machine emulates bfloat16, if any are."""
    names = ", ".join(stage.name for stage in stages if stage.config.bf16)
    slowdown = tflops["float32"] / tflops["bfloat16"]
    if slowdown > SLOW and names:
        print(
            f"note: matmuls in bf16 take {slowdown:.1f} times as long as in fp32 on this machine, "
            f"which makes {names} slow; `-- --no-bf16` goes without",
            flush=True,
        )
