"""Plan the stages of a ladder or of an ablation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from config import (
    EXCLUDED_BY,
    Config,
    DataConfig,
    ModelConfig,
    OptimizationConfig,
    load_config,
)
from measure.interleaved.rounds import python_command, to_flags
from measure.ladder.published import Published, published
from measure.ladder.record import FILE, Device, Planned, Record
from runtime.cli import CONFIG_DIR, find_config, parse, read_yaml, read_yaml_mapping
from runtime.errors import UserError

ROOT = CONFIG_DIR.parent
SPEEDUP = "speedup"
# options that change the losses of a run
CHANGE_LOSS = ModelConfig.model_fields | DataConfig.model_fields | OptimizationConfig.model_fields
# options that the ladder sets for each run
RESERVED = {"--config", "--run_name", "--log_dir", "--resume", "--print_config"}


@dataclass(eq=False)
class Stage:
    """A config with options, as a ladder or an ablation trains it, and the stage that it changes.

    Its results are in `Result`.
    """

    name: str
    file: Path
    options: list[str]
    config: Config  # includes the options
    wants_bf16: bool  # in its file; a device may replace it
    listed: Published  # the published figures of its file
    published: Published  # the same, but empty if its options change the losses
    ranks: int = 1
    base: "Stage | None" = None  # the stage that it is compared with; None for the first
    comparison: str = ""  # its comparison's name in the record (default: its own)

    @property
    def key(self) -> str:
        """The name of its comparison in the record."""
        return self.comparison or self.name

    @property
    def arguments(self) -> list[str]:
        """The arguments of train.py. A ladder needs no weights, so none are kept."""
        return [f"--config={self.file}", "--keep_last=0", *self.options]

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a step, over all ranks."""
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
    def is_interleaved(self) -> bool:
        """True if it has a base, and both run on one rank."""
        return self.base is not None and max(self.ranks, self.base.ranks) == 1

    @property
    def instead_of_bf16(self) -> str:
        """The precision in place of the bf16 of its file; empty if it has bf16."""
        if self.config.bf16 or not self.wants_bf16:
            return ""
        return "fp16" if self.config.fp16 else "fp32"

    @property
    def instead_of_added_bf16(self) -> str:
        """Return `instead_of_bf16` if the stage adds bf16; empty if its base has it."""
        return "" if self.base and self.base.wants_bf16 else self.instead_of_bf16

    def command(self, folder: Path) -> list[str]:
        """Return the command that starts its run, in a ladder's folder."""
        place = [f"--log_dir={folder}", f"--run_name={self.name}"]
        return python_command(self.ranks, str(ROOT / "train.py"), *self.arguments, *place)

    def variant(self, name: str, options: Iterable[str], base: "Stage | None" = None) -> "Stage":
        """Return this stage with further options and another base. Raises UserError."""
        options = [*self.options, *options]
        config = parse(Config, [f"--config={self.file}", *options], config_file=True)
        return replace(self, name=name, options=options, config=config, base=base)


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
    names: Sequence[str], options: Sequence[str], device: Device, ranks: int = 1
) -> list[Stage]:
    """Return the stages of a ladder on a device, given a series or configs.

    Raises UserError for an unknown config or wrong options.
    """
    configs, stages = ladder_of(names)[1], list[Stage]()
    for config in configs:
        name = Path(config).stem
        if name in [stage.name for stage in stages]:
            name += f"_{len(stages) + 1}"
        stage = make_stage(name, config, options, device, ranks)
        if configs == [*names] or can_gain(stage, device):
            stages.append(stage)
        elif device.name:
            print(f"note: {name} is left out: {device.name} gains nothing from it")
    return stages


def plan_sweep(text: str, config: str, options: Sequence[str], device: Device) -> list[Stage]:
    """Return a stage for each value in `lr=1e-4,3e-4`, numbers in ascending order.

    Raises UserError.
    """
    option, _, values = text.partition("=")
    try:
        listed = yaml.safe_load(f"[{values}]")
    except yaml.YAMLError:
        listed = []
    stages = [
        make_stage(f"{option}={value}", config, [*options, *to_flags({option: value})], device)
        for value in listed
    ]
    if option == "seed" or "/" in values or not 1 < len({s.name for s in stages}) == len(stages):
        takes = "takes different values without /, of any option but seed: lr=1e-4,3e-4"
        raise UserError(f"--sweep {text}: {takes}")
    if is_numeric(option, stages[0]):
        stages.sort(key=lambda stage: getattr(stage.config, option))
    return stages


def own_options(file: Path) -> dict[str, Any]:
    """Return the options that a YAML changes, in its order."""
    return {name: value for name, value in read_yaml_mapping(file).items() if name != "base"}


def is_numeric(option: str, stage: Stage) -> bool:
    """True if the value of an option is a number."""
    return type(getattr(stage.config, option)) in (int, float)


def can_gain(stage: Stage, device: Device) -> bool:
    """False if a stage only adds a precision that the device lacks or is slow in."""
    added = own_options(stage.file)
    if added == {"matmul_precision": "medium"}:
        return device.medium
    return {*added} != {"bf16"} or stage.instead_of_bf16 != "fp32"


def planned_before(record: Record) -> list[Stage]:
    """Return the stages of a ladder's record. Raises UserError if it has none."""
    if not record.stages:
        runs = ", ".join(record.runs)
        has = f"{FILE} lists no stages, only the runs of {runs}" if runs else f"no {FILE}"
        raise UserError(
            f"{record.folder}: no finished stage to report: {has}; "
            "the same command without --report_only runs the ladder, and keeps finished runs"
        )
    return [
        make_stage(name, str(ROOT / planned.config), planned.options, Device(), planned.ranks)
        for name, planned in record.stages.items()
    ]


def with_bases(stages: list[Stage]) -> list[Stage]:
    """Return the stages, each with its base: the stage before it which its config changes, or the
    one right before it if there is none.
    """
    for i, stage in enumerate(stages[1:], 1):
        changes = bases(stage.file)[:1]
        changed = (other for other in stages[:i] if other.file in changes)
        stage.base = next(changed, stages[i - 1])
    return stages


def with_seeds(stages: Sequence[Stage], seeds: int) -> dict[Stage, list[Stage]]:
    """Return the stages to train for each stage: one per seed, from its config's own on; without
    seeds, itself. Raises UserError for stages whose losses cannot be compared.
    """
    if not seeds:
        return {stage: [stage] for stage in stages}
    check_losses(stages)
    found = dict[Stage, list[Stage]]()
    for stage in stages:
        own = range(stage.config.seed, stage.config.seed + seeds)
        found[stage] = [
            stage.variant(
                f"{stage.name}_seed_{seed}",
                [f"--seed={seed}"],
                base=found[stage.base][i] if stage.base else None,
            )
            for i, seed in enumerate(own)
        ]
    return found


def check_losses(stages: Sequence[Stage]) -> None:
    """Raise UserError for stages whose losses cannot be compared step by step."""
    first = stages[0]
    for stage in stages:
        if not stage.config.eval_every:
            raise UserError(f"{stage.name}: sets no eval_every, so it has no validation loss")
        if stage.config.max_minutes:
            raise UserError(
                f"{stage.name}: max_minutes {stage.config.max_minutes:g}: losses are compared "
                "step by step; set max_steps instead"
            )
        if stage.length != first.length:
            raise UserError(
                f"{stage.name} trains for {stage.length}, {first.name} for {first.length}: "
                "losses are compared step by step"
            )
        for name in ("dataset", "val_fraction", "eval_tokens"):
            if getattr(stage.config, name) != getattr(first.config, name):
                raise UserError(
                    f"{stage.name}: its {name} is not that of {first.name}: losses on other tokens "
                    "cannot be compared"
                )


def make_stage(
    name: str, config: str, options: Sequence[str], device: Device, ranks: int = 1
) -> Stage:
    """Make the stage of a config with options, as a device can run it. Raises UserError."""
    path = find_config(config, also=series_names).resolve()
    if taken := RESERVED & {word.partition("=")[0] for word in options}:
        raise UserError(
            f"{min(taken)}: the ladder sets it for each run; configs and --log_dir are given "
            "before --"
        )
    resolved = parse(Config, [f"--config={config}", *options], config_file=True)
    written, listed = load_config(config), published(path)
    stage = Stage(
        name,
        path,
        [*options],
        resolved,
        wants_bf16=written.bf16,
        listed=listed,
        published=listed if same_training(resolved, written) else Published(),
        ranks=ranks,
    )
    instead = [] if "--bf16" in options else flags_instead_of_bf16(resolved, device)
    return stage.variant(name, instead) if instead else stage


def flags_instead_of_bf16(config: Config, device: Device) -> list[str]:
    """Return the options that replace a config's bf16 on a device without it.

    On a GPU before Ampere that is fp16 with the loss scaler, or fp32 if the optimizer excludes
    fp16; on a CPU that is slow in bf16, fp32.
    """
    if not config.bf16 or (device.bf16 and not device.slow_bf16):
        return []
    is_excluded = device.slow_bf16 or "fp16" in EXCLUDED_BY.get(config.optimizer, {})
    return ["--no-bf16"] if is_excluded else ["--no-bf16", "--fp16"]


def same_training(a: Config, b: Config) -> bool:
    """True if two configs compute the same losses, until the shorter run ends."""
    names = {"seed", *CHANGE_LOSS} - {"data_dir"}
    if a.lr_schedule == "constant":
        names.remove("max_steps")
    return a.model_dump(include=names) == b.model_dump(include=names)


# ---- ablations


def ablated_speeds(whole: Stage) -> dict[str, list[Stage]]:
    """Return two stages with their bases for each optimization that a stage has on.

    On first: it alone over none. On last: all over all but it.
    """
    off = switched_off(whole.config)

    def without(name: str, optimizations: Iterable[str], base: Stage | None = None) -> Stage:
        flags: dict[str, Any] = {}
        for other in optimizations:
            flags |= off[other]
        return whole.variant(name, to_flags(flags), base)

    none = without("none", off)
    return {
        name: [
            without(f"{name}_first", [other for other in off if other != name], none),
            replace(whole, comparison=f"{name}_last", base=without(f"without_{name}", [name])),
        ]
        for name in off
    }


def ablated_losses(whole: Stage) -> dict[str, Stage]:
    """Return the stage to compare a stage with, for each optimization that changes the loss: the
    stage without it. For `aa`, the stage itself with other seeds.

    On first is left out, as learning rates are tuned for all.
    """
    off = switched_off(whole.config)
    found = {
        name: whole.variant(f"without_{name}", to_flags(off[name]))
        for name in off
        if name in CHANGE_LOSS
    }
    if found:
        found["aa"] = whole.variant("aa", [f"--seed={whole.config.seed + 100}"])
    return found


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
