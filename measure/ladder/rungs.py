"""Compare the stages of a ladder: speed from interleaved runs, loss curves with published ones."""

import contextlib
import shlex
import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from config import Config
from measure.interleaved.comparison import Comparison
from measure.interleaved.options import to_flags
from measure.interleaved.ratio import product
from measure.interleaved.rounds import SideError, run_rounds, training_side
from measure.ladder.prediction import SHARES, Prediction, predictions
from measure.ladder.stages import (
    Published,
    Stage,
    differences,
    published,
    published_rows,
    settings,
    stored_config,
    training_config,
)
from measure.report.tables import Row
from runtime.cli import show
from runtime.errors import UserError
from runtime.files import write_json
from runtime.report import Estimate, machine
from runtime.runlog import curve, read_rows

COMPARED = range(11, 51)  # steps over which loss curves are compared
HEADROOM = 1.25  # of memory, for what a process needs besides its peak
# what a row has of a run's summary; no final loss where the last step was left out
SUMMARIZED = {"first_step_s", "peak_memory_mb", "utilization", "final_loss", "steps"}


# ---- interleaved runs


def configs_of(comparison: Comparison) -> list[Config]:
    """Return the configs of the base and of the other side. Raises ConfigError."""
    return [stored_config(settings) for settings in comparison.settings]


@dataclass
class Pair:
    """Name two configs, each with options, to be compared, and the file for the result."""

    name: str
    base: list[str]
    other: list[str]
    path: Path
    peak_memory_mb: float = 0.0  # of both together, if known
    error: str | None = None

    def settings(self) -> list[dict[str, Any]]:
        """Return the options of both, which the file has to agree with."""
        return [settings(training_config(side)) for side in (self.base, self.other)]

    def result(self) -> Comparison | None:
        """Read the result for these very settings; None if there is none."""
        return None if self.error else self.read()[0]

    def read(self) -> tuple[Comparison | None, str]:
        """Read the result for these very settings. Otherwise return None and the reason; an empty
        one if there is no result.
        """
        try:
            result = Comparison.model_validate_json(self.path.read_bytes())
            stored = [settings(config) for config in configs_of(result)]
        except (OSError, ValidationError):
            return None, ""
        except UserError as error:
            return None, str(error)
        both = zip(stored, self.settings(), strict=True)
        differing = " and ".join(dict.fromkeys(filter(None, (differences(*pair) for pair in both))))
        return (None, differing) if differing else (result, "")


def pairs_of(stages: Sequence[Stage]) -> dict[str, Pair]:
    """Return a pair for each finished stage whose base is finished too, of one rank each."""
    pairs = {}
    for stage in stages:
        base = stage.base or stage
        ours, theirs = stage.summary(), base.summary()
        if ours and theirs and ours.world_size == theirs.world_size == 1:
            memory = ours.peak_memory_mb + theirs.peak_memory_mb
            path = stage.folder / "interleaved.json"
            pairs[stage.name] = Pair(stage.name, base.side, stage.side, path, memory)
    return pairs


def compare_pairs(
    pairs: Sequence[Pair], rounds: int, rerun: bool, device: Mapping[str, Any]
) -> None:
    """Interleave the runs of each pair that this machine has not compared with the same settings.

    `device`: what `probe` found. One that fails is marked, and the others are compared. Raises
    KeyboardInterrupt if the user stops.
    """
    for i, pair in enumerate(pairs, start=1):
        known, (base, other) = pair.result(), pair.settings()
        here = (machine(), device.get("device"))
        is_known = known and not rerun and (known.machine, known.device) == here
        if is_known or base == other:  # a mode of torch.compile does nothing where it is off
            continue
        print(f"== interleaved {i} of {len(pairs)}: {pair.name}", flush=True)
        # Where two have no room, both do without retained memory. Otherwise one of them would
        # retain memory until the other one comes, and be the faster for it, or leave it too little.
        fits = HEADROOM * pair.peak_memory_mb <= device.get("memory_mb", float("inf"))
        environment = {} if fits else {"GLIBC_TUNABLES": "", "FREES_CACHE": "1"}
        sides = [
            training_side(shlex.join(side), [f"--config={side[0]}", *side[1:]], environment)
            for side in (pair.base, pair.other)
        ]
        try:
            result = run_rounds(sides, rounds)
        except SideError as error:
            pair.error = str(error)
            print(f"failed: {pair.name}: {error}", flush=True)
            continue
        about = {"device": str(here[1]), "settings": [base, other], "retained_memory": fits}
        write_json(pair.path, result.model_copy(update=about).dump())


def ablated(
    config: str, of_runs: Sequence[str], among: Container[str] = Config.model_fields
) -> dict[str, tuple[list[str], list[str], list[str], list[str]]]:
    """Return four sides for each optimization, of those `among`, that a config has on.

    With none of them, with it alone, with all but it, with all.
    """
    off = switched_off(training_config([config, *of_runs]))
    off = {name: options for name, options in off.items() if name in among}

    def without(*names: str) -> list[str]:
        options = dict(chain(*(off[name].items() for name in names)))
        return [config, *of_runs, *to_flags(options)]

    return {
        name: (
            without(*off),
            without(*(other for other in off if other != name)),
            without(name),
            without(),
        )
        for name in off
    }


def ablation(config: str, of_runs: Sequence[str], folder: Path) -> dict[str, tuple[Pair, Pair]]:
    """Return two pairs for each optimization that a config has on: on first, and on last."""
    return {
        name: (
            Pair(f"{name} first", none, alone, folder / f"{name}_first.json"),
            Pair(f"{name} last", without, with_all, folder / f"{name}_last.json"),
        )
        for name, (none, alone, without, with_all) in ablated(config, of_runs).items()
    }


def compared_with_all(folder: Path) -> list[Config]:
    """Return the config with all optimizations from each result of an ablation in the folder."""
    configs = []
    for path in sorted(folder.glob("*_last.json")):
        with contextlib.suppress(OSError, ValidationError, UserError):
            configs.append(configs_of(Comparison.model_validate_json(path.read_bytes()))[1])
    return configs


def switched_off(config: Config) -> dict[str, dict[str, Any]]:
    """Return, for each optimization that is on, the options that switch it off and no other.

    With it go the optimizations that need it, which would have no effect any more.
    """
    on, off = config.optimizations_on(), {}
    for name in on:
        without = config.model_copy(update={name: config.off_value(name)}).optimizations_on()
        off[name] = {
            other: False if getattr(config, other) is True else show(config.off_value(other))
            for other in on
            if other not in without
        }
    return off


# ---- the stages in figures


def compare(stages: Sequence[Stage]) -> list[Row]:
    """Return a row for each finished stage. Losses in nats per token, memory in MiB."""
    rows: dict[str, Row] = {}
    pairs = pairs_of(stages)
    predicted = predictions(stages[0].folder.parent)
    for stage in stages:
        base = stage.base or stage
        summary = stage.summary()
        if summary is None:
            continue
        rate = summary.median_tokens_per_sec
        first, before = next(iter(rows.values()), None), rows.get(base.name)
        result = pairs[stage.name].result() if stage.name in pairs else None
        over_base = Estimate(rate / before["tokens_per_sec"]) if before else None
        over_first = Estimate(rate / first["tokens_per_sec"]) if first else Estimate(1.0)
        if result:
            over_base = result.ratio()
            # a product, where interleaved factors lead all the way from the first stage
            if before and (before is first or before["over_first"].low):
                over_first = product([before["over_first"], over_base])
        rows[stage.name] = {
            "stage": stage.name,
            "ms_per_step": summary.median_dt_ms,
            "tokens_per_sec": rate,
            "base": base.name,
            # interleaved, else of the tokens/s; None if the base has not run
            "over_base": Estimate(1.0) if stage is base else over_base,
            "rounds": result.rounds if result else 0,
            "published_over_base": published_factor(stage.published, base.published),
            "a100_over_base": counterpart(stage.file, base.file, "a100_tokens_per_sec"),
            **predicted_figures(predicted, stage.name, base.name),
            "over_first": over_first,
            **summary.model_dump(include=SUMMARIZED),
            "published_tokens_per_sec": stage.published.tokens_per_sec,
            "loss_difference": published_difference(stage),  # from the published curve
        }
    return list(rows.values())


def predicted_figures(
    predicted: Mapping[str, Prediction], stage: str, base: str
) -> dict[str, float | None]:
    """Return a stage's predicted speed over its base, and what is predicted to limit it.

    All None if nothing is predicted of them.
    """
    figures: dict[str, float | None] = dict.fromkeys(["predicted_over_base", *SHARES])
    if stage in predicted and base in predicted:
        speeds = [predicted[name].tokens_per_sec for name in (stage, base)]
        figures |= {"predicted_over_base": speeds[0] / speeds[1], **predicted[stage].shares()}
    return figures


def published_factor(ours: Published, theirs: Published) -> float | None:
    """Return the ratio of two published speeds on one device; None if it is not known."""
    if ours == theirs or ours.device != theirs.device:
        return None
    if ours.tokens_per_sec and theirs.tokens_per_sec:
        return ours.tokens_per_sec / theirs.tokens_per_sec
    if ours.ms_per_step and theirs.ms_per_step:  # a list of times that names no batch
        return theirs.ms_per_step / ours.ms_per_step
    return None


def counterpart(stage: Path, base: Path, column: str) -> float | None:
    """Return the published factor of the optimizations that a stage of the speedup ladder adds to
    its base, in another series: `a100_tokens_per_sec` or `gpu_ms`. None if it adds nothing there.

    `stage`, `base`: their configs.
    """
    ours, theirs = (getattr(published(path), column) for path in (stage, base))
    if not (ours and theirs) or ours == theirs:
        return None
    return theirs / ours if column == "gpu_ms" else ours / theirs


def published_difference(stage: Stage) -> float | None:
    """Return the mean absolute difference from the published loss curve over steps 11 to 50.

    As many of these steps as both have; None if there are none, and where none was published.
    """
    if not (stage.published.log and stage.summary()):
        return None
    ours, published = (
        dict(zip(*curve(rows), strict=True))
        for rows in (read_rows(stage.folder / "log.csv"), published_rows(stage.published.log))
    )
    differences = [abs(ours[s] - published[s]) for s in COMPARED if s in ours and s in published]
    return statistics.fmean(differences) if differences else None
