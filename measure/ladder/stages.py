"""Plan the stages of a ladder or of an ablation, and look up their published figures."""

import csv
import functools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from config import (
    EXCLUDED_BY,
    Config,
    DataConfig,
    ModelConfig,
    OptimizationConfig,
    load_config,
)
from measure.interleaved.comparison import Comparison
from measure.interleaved.rounds import python_command, to_flags
from measure.ladder.record import (
    FILE,
    Device,
    Planned,
    Positive,
    Prediction,
    Record,
    Run,
    curve,
    differences,
    read_columns,
)
from runtime.cli import CONFIG_DIR, find_config, parse, read_yaml, read_yaml_mapping
from runtime.errors import UserError, in_a_line

ROOT = CONFIG_DIR.parent
REFERENCE = ROOT / "logs" / "reference"
SPEEDUP = "speedup"
PUBLISHED = REFERENCE / "published.csv"  # the published figures of the configs here
NOT_TIMED = 5  # first steps, which published times leave out
# options that change the losses of a run
CHANGE_LOSS = ModelConfig.model_fields | DataConfig.model_fields | OptimizationConfig.model_fields
# options that the ladder sets for each run
RESERVED = {"--config", "--run_name", "--log_dir", "--resume", "--print_config"}


class Published(BaseModel, frozen=True):
    """Published figures of a stage; None if there are none."""

    log: Path | None = None  # relative to logs/reference/, or absolute
    device: str | None = None  # the times were measured on it
    ms_per_step: Positive | None = None
    tokens_per_sec: Positive | None = None
    # figures for the same optimizations in the a100 series and in the list of milliseconds gpu_ms
    a100_tokens_per_sec: float | None = None
    gpu_ms: float | None = None


NOTHING_PUBLISHED = Published()


@dataclass(eq=False)
class Stage:
    """A config with options, and its base: a rung of a ladder or of an ablation."""

    name: str
    file: Path
    options: list[str]
    config: Config  # includes the options
    record: Record  # the whole ladder's
    base: "Stage | None" = None  # the stage that it is compared with; None for the first
    published: Published = NOTHING_PUBLISHED
    ranks: int = 1
    rung: str = ""  # names its comparison in the record (default: its own name)

    @property
    def key(self) -> str:
        """The name of its comparison in the record."""
        return self.rung or self.name

    @property
    def arguments(self) -> list[str]:
        """The arguments of train.py. A ladder needs no weights, so none are kept."""
        return [f"--config={self.file}", "--keep_last=0", *self.options]

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a step of its run, over all ranks."""
        return self.config.tokens_per_step(self.ranks)

    @property
    def length(self) -> str:
        """The steps and tokens of its run."""
        return f"{self.config.max_steps:,} steps of {self.tokens_per_step:,} tokens"

    @property
    def planned(self) -> Planned:
        """The stage as the ladder's record has it."""
        config = str(self.file).removeprefix(f"{ROOT}/")
        return Planned(config=config, options=self.options, ranks=self.ranks)

    @property
    def command(self) -> list[str]:
        """The command that starts its run."""
        place = [f"--log_dir={self.record.folder}", f"--run_name={self.name}"]
        return python_command(self.ranks, str(ROOT / "train.py"), *self.arguments, *place)

    def variant(self, name: str, options: Sequence[str], **changes: Any) -> "Stage":
        """Return this stage with another name and further options. Raises UserError."""
        options = [*self.options, *options]
        config = parse(Config, [f"--config={self.file}", *options], config_file=True)
        return replace(self, name=name, options=options, config=config, **changes)

    @functools.cached_property
    def runs(self) -> "list[Stage]":
        """The stages to train: this one, or one for each seed, from its config's own on."""
        seeds = range(self.config.seed, self.config.seed + self.record.seeds)
        bases = self.base.runs if self.base else [None for _ in seeds]
        return [
            self.variant(f"{self.name}_seed_{seed}", [f"--seed={seed}"], base=base)
            for seed, base in zip(seeds, bases, strict=False)
        ] or [self]

    @property
    def sides(self) -> list[Config]:
        """The configs that are compared: the base's and its own."""
        return [self.base.config, self.config] if self.base else []

    @property
    def is_interleaved(self) -> bool:
        """True if it has a base, and both run on one rank."""
        return self.base is not None and max(self.ranks, self.base.ranks) == 1

    @property
    def finished(self) -> Run | None:
        """The finished run with these very settings and this number of ranks."""
        run = self.record.runs.get(self.name)
        if not run or run.summary.world_size != self.ranks:
            return None
        return None if differences([run.config], [self.config]) else run

    @property
    def prediction(self) -> Prediction | None:
        """The prediction for these very settings, on one rank."""
        found = self.record.predicted.stages.get(self.name) if self.ranks == 1 else None
        if found and found.settings and differences([found.settings], [self.config]):
            return None
        return found

    @property
    def comparison(self) -> Comparison | None:
        """The comparison of this stage with its base, both with these very settings."""
        found = self.record.comparisons.get(self.key) if self.is_interleaved else None
        return found if found and not differences(found.settings, self.sides) else None


# ---- which stages there are


def series_folder(name: str) -> Path | None:
    """Return the folder of a series: one with YAMLs, by its path or by its name in configs/.

    The speedup series is in configs/ itself. None: there is no such folder.
    """
    places = (CONFIG_DIR if name == SPEEDUP else Path(name), CONFIG_DIR / name)
    return next((place.resolve() for place in places if any(place.glob("*.yaml"))), None)


def series_names() -> list[str]:
    """List names that `series_folder` may know, for a message."""
    return [SPEEDUP, *(path.name for path in CONFIG_DIR.iterdir() if path.is_dir())]


def series(folder: Path) -> list[Path]:
    """List the YAMLs of a series, each after its base. Raises ConfigError."""
    patterns = ("baseline.yaml", "speedup*.yaml") if folder == CONFIG_DIR else ("*.yaml",)
    files = [path.resolve() for pattern in patterns for path in folder.glob(pattern)]
    return sorted(files, key=lambda file: (len(bases(file)), file))


def bases(path: Path) -> list[Path]:
    """Return the configs that a config builds on, the nearest first. Raises ConfigError."""
    read_yaml(path)  # refuses a circular base
    found = [path]
    while name := read_yaml_mapping(found[-1]).get("base"):
        found.append(find_config(name, found[-1].parent).resolve())
    return found[1:]


def ladder_of(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return a ladder's name, and its configs: of a series, or `names` themselves."""
    if len(names) == 1 and (place := series_folder(names[0])):
        name = SPEEDUP if place == CONFIG_DIR else place.name
        return name, [str(path) for path in series(place)]
    return "ladder", [*names]


def plan(
    names: Sequence[str], record: Record, of_runs: Sequence[str], device: Device
) -> list[Stage]:
    """Return the stages of a ladder on a device, given a series or configs.

    Raises UserError for an unknown config or wrong options.
    """
    configs, stages = ladder_of(names)[1], list[Stage]()
    for config in configs:
        name = Path(config).stem
        if name in [stage.name for stage in stages]:
            name += f"_{len(stages) + 1}"
        stage = make_stage(name, config, record, of_runs, device)
        if configs == [*names] or can_gain(stage, device):
            stages.append(stage)
        elif device.name:
            print(f"note: {name} is left out: {device.name} gains nothing from it")
    return stages


def can_gain(stage: Stage, device: Device) -> bool:
    """False if a stage only adds a precision that the device lacks or is slow in."""
    added = read_yaml_mapping(stage.file)
    added.pop("base", None)
    if added == {"matmul_precision": "medium"}:
        return device.medium
    return {*added} != {"bf16"} or in_place_of_bf16(stage) != "fp32"


def planned_before(record: Record) -> list[Stage]:
    """Return the stages of a ladder's record. Raises UserError if it has none."""
    stages = list[Stage]()
    for name, planned in record.stages.items():
        stage = make_stage(name, str(ROOT / planned.config), record, planned.options, Device())
        stage.ranks = planned.ranks
        stages.append(stage)
    if not stages:
        runs = ", ".join(record.runs)
        has = f"{FILE} lists no stages, only the runs of {runs}" if runs else f"no {FILE}"
        raise UserError(
            f"{record.folder}: no finished stage to report: {has}; "
            "the same command without --report_only runs the ladder, and keeps finished runs"
        )
    return stages


def with_bases(stages: list[Stage]) -> list[Stage]:
    """Return the stages, each with its base: the stage before it which its config changes, or the
    one right before it if there is none.
    """
    for i, stage in enumerate(stages[1:], 1):
        changes = bases(stage.file)[:1]
        changed = (other for other in stages[:i] if other.file in changes)
        stage.base = next(changed, stages[i - 1])
    return stages


def make_stage(
    name: str, config: str, record: Record, options: Sequence[str], device: Device
) -> Stage:
    """Make the stage of a config with options, as a device can run it. Raises UserError."""
    path = find_config(config, also=series_names).resolve()
    if taken := RESERVED & {word.partition("=")[0] for word in options}:
        raise UserError(
            f"{min(taken)} after --: the ladder sets it for each run; configs and --log_dir are "
            "given before --"
        )
    resolved = parse(Config, [f"--config={config}", *options], config_file=True)
    stage = Stage(name, path, [*options], resolved, record)
    if _same_training(resolved, load_config(config)):
        stage.published = published(path)
    instead = [] if "--bf16" in options else instead_of_bf16(resolved, device)
    return stage.variant(name, instead)


def instead_of_bf16(config: Config, device: Device) -> list[str]:
    """Return the options that replace a config's bf16 on a device without it.

    On a GPU before Ampere that is fp16 with the loss scaler, or fp32 if the optimizer excludes
    fp16; on a CPU that is slow in bf16, fp32.
    """
    if not config.bf16 or (device.bf16 and not device.slow_bf16):
        return []
    is_excluded = device.slow_bf16 or "fp16" in EXCLUDED_BY.get(config.optimizer, {})
    return ["--no-bf16"] if is_excluded else ["--no-bf16", "--fp16"]


def in_place_of_bf16(stage: Stage) -> str:
    """Return the precision of a stage whose config file wants bf16; empty if it has bf16."""
    if stage.config.bf16 or not load_config(str(stage.file)).bf16:
        return ""
    return "fp16" if stage.config.fp16 else "fp32"


def in_place_of_added_bf16(stage: Stage) -> str:
    """Return `in_place_of_bf16`, but only if the stage adds bf16; empty if its base has it."""
    has_it = stage.base and load_config(str(stage.base.file)).bf16
    return "" if has_it else in_place_of_bf16(stage)


def _same_training(a: Config, b: Config) -> bool:
    """True if two configs compute the same losses, until the shorter run ends."""
    names = {"seed", *CHANGE_LOSS} - {"data_dir"}
    if a.lr_schedule == "constant":
        names.remove("max_steps")
    return a.model_dump(include=names) == b.model_dump(include=names)


# ---- ablations


def ablated(whole: Stage) -> dict[str, list[Stage]]:
    """Return two rungs for each optimization that a stage has on; none if it has none on.

    On first: it alone over none. On last: all over all but it. With seeds, which compare losses,
    only on last, as learning rates are tuned for all; only for the optimizations that change the
    loss, and for `aa`, the stage itself with other seeds.
    """
    off = {
        name: flags
        for name, flags in switched_off(whole.config).items()
        if name in CHANGE_LOSS or not whole.record.seeds
    }

    def without(names: Iterable[str], name: str, base: Stage | None = None) -> Stage:
        flags = dict(chain(*(off[other].items() for other in names)))
        return whole.variant(name, to_flags(flags), base=base)

    bases = {name: without([name], f"without_{name}") for name in off}
    if off and whole.record.seeds:
        bases["aa"] = whole.variant("aa", [f"--seed={whole.config.seed + 100}"])
    rungs = {name: [replace(whole, rung=f"{name}_last", base=base)] for name, base in bases.items()}
    if not whole.record.seeds:
        none = without(off, "none")
        for name in off:
            first = without([other for other in off if other != name], f"{name}_first", none)
            rungs[name].insert(0, first)
    return rungs


def switched_off(config: Config) -> dict[str, dict[str, Any]]:
    """Return, for each optimization that is on, the options that switch it off and no other.

    Optimizations that need it are switched off with it: they would have no effect.
    """
    on, off = config.optimizations_on(), {}
    for name in on:
        without = config.with_options(**{name: config.off_value(name)}).optimizations_on()
        off[name] = {
            other: False if getattr(config, other) is True else config.off_value(other)
            for other in on
            if other not in without
        }
    return off


# ---- published figures


@functools.cache
def published(path: Path) -> Published:
    """Look up the published figures of a config. Raises UserError for a file that has none.

    The file of a user's own config is <stage>.csv beside it, or
    logs/reference/<series>_<stage>.csv: a log, or one row with a speed.
    """
    with open(PUBLISHED, newline="") as file:
        for row in csv.DictReader(file):
            if path == CONFIG_DIR / f"{row['config']}.yaml":
                return Published.model_validate({k: v for k, v in row.items() if v})
    for log in (path.with_suffix(".csv"), REFERENCE / f"{path.parent.name}_{path.stem}.csv"):
        if log.is_file():
            return published_by_a_user(log)
    return NOTHING_PUBLISHED


def published_by_a_user(path: Path) -> Published:
    """Read the published figures of a user's own config. Raises UserError."""
    try:
        rows = [*csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines(), strict=True)]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({in_a_line(error)})") from None
    names = ("device", "ms_per_step", "tokens_per_sec")
    if rows and "step" not in rows[0]:
        values = {"device": "published"} | {n: rows[0][n] for n in names if rows[0].get(n)}
        try:
            found = Published.model_validate(values)
        except ValueError:
            found = NOTHING_PUBLISHED
        if len(rows) > 1 or not (found.ms_per_step or found.tokens_per_sec):
            raise UserError(
                f"{path}: needs one row with a positive ms_per_step or tokens_per_sec, and perhaps "
                "a device; or the columns of log.csv"
            )
        return found
    speed = median_of(path)
    if speed is None:
        print(
            f"note: {path}: {len(rows)} steps, of which the first {NOT_TIMED} do not count, so it "
            "has no published speed; one row with ms_per_step or tokens_per_sec is enough"
        )
    return Published(log=path, device="published", tokens_per_sec=speed)


def median_of(log: Path, column: str = "tokens_per_sec") -> float | None:
    """Return the median of a log's speeds, without the first steps; None if it has none."""
    values = [*curve(read_columns(log), column).values()][NOT_TIMED:]
    return statistics.median(values) if values else None


def factor(ours: Published, theirs: Published, figure: str) -> float | None:
    """Return the ratio of two published speeds; None if one is missing, or both are the same.

    `figure`: `tokens_per_sec`, `ms_per_step`, or one in another published series of the same
    optimizations, `a100_tokens_per_sec` or `gpu_ms`.
    """
    a, b = getattr(ours, figure), getattr(theirs, figure)
    if not a or not b or a == b:
        return None
    return b / a if "ms" in figure else a / b


def published_factor(ours: Published, theirs: Published) -> float | None:
    """Return the ratio of two published speeds on one device; None if it is not known."""
    if ours.device != theirs.device:
        return None
    # a list of times names no batch, so it has no tokens/s
    return factor(ours, theirs, "tokens_per_sec") or factor(ours, theirs, "ms_per_step")
