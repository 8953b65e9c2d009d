"""Compare stages with their bases: speed from interleaved runs, loss curves with published ones."""

import statistics
from collections.abc import Container, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from config import Config
from measure.interleaved.options import to_flags
from measure.interleaved.process import in_fresh_process
from measure.interleaved.ratio import product
from measure.interleaved.rounds import SideError, run_rounds, training_side
from measure.ladder.device import Device
from measure.ladder.record import LIMITS, Record, settings
from measure.ladder.stages import Published, Stage, make_stage, published, published_rows
from runtime.cli import show
from runtime.report import Estimate, machine
from runtime.runlog import curve

COMPARED = range(11, 51)  # steps over which loss curves are compared
HEADROOM = 1.25  # memory of a process over its measured peak
# figures of a run's summary in its row; final_loss is missing if the last step was skipped
SUMMARIZED = {"first_step_s", "peak_memory_mb", "utilization", "final_loss", "steps"}
ReportRow = dict[str, Any]


# ---- interleaved runs


def interleave_stages(stages: Sequence[Stage], rounds: int, rerun: bool, device: Device) -> None:
    """Interleave each stage with its base, unless this machine has done so with these settings.

    A stage that fails is marked, and the other ones are compared. Raises KeyboardInterrupt if the
    user stops.
    """
    for i, stage in enumerate(stages, start=1):
        if not is_to_be_compared(stage, rerun, device):
            continue
        base = stage.base or stage
        print(f"== interleaved {i} of {len(stages)}: {stage.name}", flush=True)
        # If both do not fit in memory, each returns freed memory after its turn: otherwise one
        # process would keep memory from the other one, and the comparison would be unfair.
        environment = {} if fit_together(base, stage, device) else {"FREES_CACHE": "1"}
        sides = [training_side(side.name, side.arguments, environment) for side in (base, stage)]
        try:
            found = run_rounds(sides, rounds)
        except SideError as error:
            stage.error = str(error)
            print(f"failed: {stage.name}: {error}", flush=True)
            continue
        both = [settings(side.config) for side in (base, stage)]
        about = {"device": str(device.name), "settings": both}
        stage.record.comparisons[stage.name] = found.model_copy(update=about)
        stage.record.save()


def fit_together(base: Stage, stage: Stage, device: Device) -> bool:
    """True if memory has room for both, or is not known. An ablation has no runs: estimate them."""
    if device.memory_mb is None:
        return True
    peaks = [side.finished.summary.peak_memory_mb for side in (base, stage) if side.finished]
    if len(peaks) < 2:
        call = "measure.preflight.estimate:peaks_mb"
        peaks = in_fresh_process(call, [base.config, stage.config])[0] or []
    return HEADROOM * sum(peaks) <= device.memory_mb


def is_to_be_compared(stage: Stage, rerun: bool, device: Device) -> bool:
    """True unless this machine has interleaved a stage with its base, or both are the same, as a
    mode of torch.compile without compile.
    """
    known = stage.comparison()[0]
    is_known = known and (known.machine, known.device) == (machine(), str(device.name))
    base = stage.base or stage
    return (rerun or not is_known) and settings(base.config) != settings(stage.config)


def run_alone(stage: Stage) -> bool:
    """True if a stage and its base have finished on one rank each, so they can be interleaved."""
    both = [side.finished for side in (stage, stage.base) if side]
    return len(both) == 2 and all(run and run.summary.world_size == 1 for run in both)


def ablated(
    config: str, options: Sequence[str], record: Record, among: Container[str]
) -> dict[str, tuple[Stage, Stage]]:
    """Return two rungs for each optimization that a config has on, of those `among`.

    On first: it alone over none. On last: all over all but it.
    """
    off = switched_off(make_stage("all", config, record, options).config)
    off = {name: flags for name, flags in off.items() if name in among}

    def rung(name: str, without: Container[str], base: Stage | None = None) -> Stage:
        flags = dict(chain(*(off[other].items() for other in off if other in without)))
        return make_stage(name, config, record, [*options, *to_flags(flags)], base)

    none = rung("none", off)
    return {
        name: (
            rung(f"{name}_first", off.keys() - {name}, none),
            rung(f"{name}_last", (), rung(f"without {name}", {name})),
        )
        for name in off
    }


def switched_off(config: Config) -> dict[str, dict[str, Any]]:
    """Return, for each optimization that is on, the options that switch it off and no other.

    Optimizations that need it are switched off with it: they would have no effect.
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


def rows_of(stages: Sequence[Stage]) -> list[ReportRow]:
    """Return a row for each finished stage. Losses in nats per token, memory in MiB."""
    rows: dict[str, ReportRow] = {}
    predictions = stages[0].record.predicted
    predicted = predictions.stages if predictions else {}
    for stage in stages:
        base = stage.base or stage
        if stage.finished is None:
            continue
        summary, result = stage.finished.summary, stage.comparison()[0]
        rate = summary.median_tokens_per_sec
        ours, theirs = (predicted.get(side.name) for side in (stage, base))
        first, before = next(iter(rows.values()), None), rows.get(base.name)
        over_base = Estimate(rate / before["tokens_per_sec"]) if before else None
        over_first = Estimate(rate / first["tokens_per_sec"]) if first else Estimate(1.0)
        if result:
            over_base = result.ratio()
            # a product, if interleaved factors lead all the way from the first stage
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
            "predicted_over_base": ours.tokens_per_sec / theirs.tokens_per_sec
            if ours and theirs
            else None,
            **{f"predicted_{limit}": ours and ours.share(limit) for limit in LIMITS},
            "over_first": over_first,
            **summary.model_dump(include=SUMMARIZED),
            "published_tokens_per_sec": stage.published.tokens_per_sec,
            "loss_difference": published_difference(stage),  # from the published curve
        }
    return list(rows.values())


def factor(ours: float | None, theirs: float | None) -> float | None:
    """Return the ratio of two published figures; None if one is missing, or both are the same."""
    return ours / theirs if ours and theirs and ours != theirs else None


def published_factor(ours: Published, theirs: Published) -> float | None:
    """Return the ratio of two published speeds on one device; None if it is not known."""
    if ours.device != theirs.device:
        return None
    # a list of times names no batch, so it has no tokens/s
    return factor(ours.tokens_per_sec, theirs.tokens_per_sec) or factor(
        theirs.ms_per_step, ours.ms_per_step
    )


def counterpart(stage: Path, base: Path, column: str) -> float | None:
    """Return a stage's factor over its base in another published series, of the same optimizations.

    `column`: `a100_tokens_per_sec` or `gpu_ms`. `stage`, `base`: their configs. None if the stage
    adds nothing in that series.
    """
    ours, theirs = (getattr(published(path), column) for path in (stage, base))
    return factor(theirs, ours) if column == "gpu_ms" else factor(ours, theirs)


def published_difference(stage: Stage) -> float | None:
    """Return the mean absolute difference from the published loss curve over steps 11 to 50.

    Only steps that both have count; None if there are none, or no published curve.
    """
    if not (stage.published.log and stage.finished):
        return None
    ours, published = (
        dict(zip(*curve(rows), strict=True))
        for rows in (stage.finished.log, published_rows(stage.published.log))
    )
    differences = [abs(ours[s] - published[s]) for s in COMPARED if s in ours and s in published]
    return statistics.fmean(differences) if differences else None
