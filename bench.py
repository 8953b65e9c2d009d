"""Time forward, backward and both of a model, and show where the time goes.

python bench.py                              the published profile: two sizes, with and without
                                             warm-up and mixed precision
python bench.py --config speedup7.yaml       the model, batch and precision of a training stage
python bench.py --breakdown                  the parts of a training step
python bench.py --scan batch_size=1,2,4,8    tokens/s and memory, up to out of memory
python bench.py --config ddp.yaml --scaling 1,2,4         the same batch on more ranks, interleaved
python bench.py --compare logs/reference/timeit.csv       beside earlier or published results
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from config import WITHOUT_GRAPHS, Config, Count, ZeroIsOff, load_config
from measure.interleaved.options import given, optional_fields
from measure.interleaved.ratio import FEWEST
from runtime.cli import ContradictionError, Name, Options, Positive
from runtime.start import start

Size = Literal["small", "medium", "large", "xl"]  # of configs/timeit/
Computation = Literal["forward", "backward", "forward_backward", "training_step"]
Overrides: Any = optional_fields(
    Config,
    *("batch_size", "seq_len", "total_batch_tokens", "compile", "flash", "loss_chunks"),
    *("device", "seed"),
    title="of the model that is timed",
    none="as the config or the profile says",
)


class WhatOptions(Options):
    """what to time (by default: the published profile)"""

    config: str | None = None
    """time the model, batch and precision of this training config instead: a path, or a name in
    configs/
    """
    size: tuple[Size, ...] = ("small", "medium")
    """sizes of the published profile's model: small, medium, large, xl"""
    computation: tuple[Computation, ...] = ("forward", "backward", "forward_backward")
    """forward, backward, forward_backward; or training_step, which adds clipping and the optimizer
    """
    warmup_steps: tuple[ZeroIsOff, ...] = (0, 1)
    """untimed passes before the timed ones, each number its own row; with CUDA graphs, which the
    second pass begins to record, 0 or at least 3
    """
    mixed_precision: bool | None = None
    """only with, or only without, autocast to bf16, or to fp16 on a GPU without bf16 (none: both;
    with --config: as it says)
    """
    steps: Count = 5
    """timed passes"""


class HowOptions(Options):
    """what to do with it (by default: a table of times)"""

    breakdown: bool = False
    """time the parts of a training step"""
    trace: bool = False
    """profile a training step: top operators, and a trace that ui.perfetto.dev opens"""
    memory: bool = False
    """write a snapshot of the CUDA memory of a training step, which pytorch.org/memory_viz opens"""
    scan: str | None = Field(None, pattern=r"^(batch_size|seq_len)=\d{1,15}(,\d{1,15})*$")
    """tokens/s and memory of training steps over values of batch_size or seq_len, such as
    batch_size=1,2,4
    """
    scaling: tuple[Positive, ...] = Field((), min_length=2)
    """numbers of ranks, such as 1,2,4, that train the same batch, interleaved: tokens/s and
    efficiency
    """
    rounds: int = Field(20, ge=FEWEST)
    """rounds of --scaling at most; fewer where every interval is narrower than 2%"""
    compare: str | None = None
    """results.json or results.csv of an earlier call, or logs/reference/timeit.csv"""
    log_dir: Name = "logs"
    """results go to bench/<time>/ in this folder"""


INSPECT = ("breakdown", "trace", "memory")
MODES = (*INSPECT, "scan", "scaling")


class BenchOptions(HowOptions, Overrides, WhatOptions):
    """All options of a benchmark."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        chosen = self.model_fields_set
        scanned = (self.scan or "").partition("=")[0]
        timed_steps = self.breakdown or self.scan
        # options, and with which others they have no effect
        without_effect = {
            **dict.fromkeys(MODES[:-1], ("scaling",)),
            "size": ["config"],
            "compare": MODES,
            "computation": [*INSPECT, "scaling"],
            "warmup_steps": [*INSPECT, "scaling"],
            "steps": [] if timed_steps else ["trace", "memory", "scaling"],
            scanned: ["scan"],
        }
        reasons = {
            name: f"with {other}"
            for name, others in without_effect.items()
            for other in others
            if getattr(self, other)
        }
        if not self.scaling:
            reasons |= dict.fromkeys(("total_batch_tokens", "rounds"), "without scaling")
        problems = [
            (name, f"{name} has no effect {reason}; leave it out")
            for name, reason in reasons.items()
            if name in chosen
        ]
        if self.scan and "warmup_steps" in chosen and len(self.warmup_steps) > 1:
            problems.append(("warmup_steps", "scan takes one number of warm-up steps"))
        if self.scaling and not self.config:
            text = "needs a config, whose corpus it trains on, such as --config quickstart.yaml"
            problems.append(("scaling", f"scaling {text}"))
        if problems:
            raise ContradictionError(problems)
        return self


if __name__ == "__main__":
    OPTIONS = start(BenchOptions, description=__doc__)

from config import MFU, total_seconds
from measure.profile.breakdown import inspect_models
from measure.profile.scaling import measure_scaling
from measure.profile.timing import FLOPS_SHARE, Job, empty_row, settings, time_job
from measure.report.report import Card, Report, Row
from measure.report.tables import (
    COLUMNS,
    Means,
    about_machine,
    compare,
    describe_row,
    draw_scan,
    draw_times,
    key_of,
    new_folder,
    read_results,
    scan_columns,
    write_results,
)
from runtime.device import choose_device, matmul_rates
from runtime.errors import TrainingError, UserError, reported
from runtime.report import describe_duration

# ---- what is timed


def overrides(options: BenchOptions) -> dict[str, Any]:
    """Return the options of the model that are given on the command line."""
    values = given(options, Overrides)
    if options.mixed_precision is not None:
        values |= {"bf16": options.mixed_precision, "fp16": False}
    return values


def job_configs(options: BenchOptions) -> list[tuple[str, Config]]:
    """Return name and config of each model to time, with and without mixed precision.

    Raises UserError.
    """
    values = overrides(options)
    if options.config:
        values |= {"total_batch_tokens": None}  # a pass is one micro-step
        return [(Path(options.config).stem, load_config(options.config, **values))]
    if options.seq_len:
        values |= {"block_size": options.seq_len}
    both = (False, True) if options.mixed_precision is None else (options.mixed_precision,)
    return [
        (size, load_config(f"timeit/{size}", **(values | {"bf16": mixed})))
        for size, mixed in itertools.product(options.size, both)
    ]


def jobs_of(options: BenchOptions) -> list[Job]:
    """Return a job for each model, precision, computation and value of the scan.

    Raises UserError, also for a value of the scan that is no option.
    """
    scanned = [options]
    if options.scan:
        name, _, values = options.scan.partition("=")
        update: dict[str, Any] = {"computation": ("training_step",), "warmup_steps": (1,)}
        update |= options.model_dump(include=options.model_fields_set)
        scanned = [
            options.model_copy(update={**update, name: value})
            for value in sorted(map(int, values.split(",")))
        ]
    return [
        Job(size, config, computation, warm_up(config, each.warmup_steps), each.steps)
        for each in scanned
        for size, config in job_configs(each)
        for computation in each.computation
    ]


def warm_up(config: Config, passes: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of untimed passes: CUDA graphs run from the fourth pass on.

    The first pass compiles, and the next two record.
    """
    has_graphs = config.compile and config.compile_mode in WITHOUT_GRAPHS
    return tuple(dict.fromkeys(max(n, 3) if n and has_graphs else n for n in passes))


def time_jobs(jobs: Sequence[Job], folder: Path) -> list[Row]:
    """Time the jobs one after the other; what has failed is not tried in a larger batch.

    Writes the results after each, so that what is measured stays. Raises TrainingError if nothing
    could be measured.
    """
    rows: list[Row] = []
    failed: set[str] = set()
    rates = matmul_rates(choose_device(jobs[0].config.device))
    work = [
        (job.config, FLOPS_SHARE[job.computation] * (max(job.warmup_steps) + job.steps))
        for job in jobs
    ]
    shorter = "--size small, --computation training_step, --steps 2"
    print(describe_duration(total_seconds(work, rates), MFU, shorter), flush=True)
    for job in jobs:
        label, config = describe_row(empty_row(job, 0)), job.config
        if label in failed:
            continue
        rows += time_job(job)
        write_results(rows, folder)
        figures = f"stopped: {rows[-1]['error']}"
        if rows[-1]["error"]:
            failed.add(label)
        else:
            figures = "{tokens_per_sec:,.0f} tokens/s, {peak_memory_mb:,.0f} MB".format(**rows[-1])
        print(f"{label}, {config.batch_size} x {config.seq_len}: {figures}", flush=True)
    if all(row["error"] for row in rows):
        raise TrainingError(f"nothing could be measured: {rows[0]['error']}")
    return rows


# ---- the grid: every size, computation, warm-up and precision


def time_grid(
    options: BenchOptions, jobs: Sequence[Job], folder: Path, theirs: Means, about_them: Row
) -> None:
    """Write the table of times and its picture, beside the rows of an earlier call, `theirs`."""
    rows = sorted(time_jobs(jobs, folder), key=lambda row: row["mean_s"] or math.inf)
    measured = [row for row in rows if not row["error"]]
    write_results(rows, folder)
    draw_times(measured, folder / "times.png")
    beside = ""
    if options.compare:
        profile = settings(load_config("timeit/small"))  # whose published file does not say it
        beside = compare(measured, options.compare, theirs, profile | about_them)
    Report(
        folder,
        "Seconds per pass: forward, backward and both",
        COLUMNS,
        rows,
        remarks=[f"note: {note}" for note in sorted({row["notes"] for row in measured} - {""})],
        about=[about_machine(measured[0])],
        meaning="Rows that differ in warm-up only are of the same passes: one leaves out the first "
        "of them. std: the population's.",
        appendix=beside,
        pictures={"times.png": "seconds per pass"},
        cards=[Card(describe_row(row), describe_row(row)) for row in rows],
    ).write()


# ---- the scan: one option's values, up to out of memory


def scan(name: str, jobs: Sequence[Job], folder: Path) -> None:
    """Measure tokens/s and memory over the values of the option `name`, up to out of memory.

    Raises TrainingError if nothing can be measured.
    """
    rows = time_jobs(jobs, folder)
    measured = sorted((row for row in rows if not row["error"]), key=describe_row)
    draw_scan(name, measured, folder / "scan.png")
    Report(
        folder,
        f"Over {name}",
        scan_columns(name),
        measured,
        remarks=[
            f"{describe_row(row)}: {row['error']} at {row[name]}." for row in rows if row["error"]
        ],
        about=[about_machine(measured[0])],
        pictures={"scan.png": "over the values"},
    ).write()


# ---- the command


def main(options: BenchOptions) -> None:
    """Measure. Raises UserError, for a mistake before anything is measured, and OSError."""
    if options.scaling:
        name, values = str(options.config), overrides(options)
        measure_scaling(name, values, options.scaling, options.rounds, options.log_dir)
        return
    jobs = jobs_of(options)
    device = choose_device(jobs[0].config.device)
    if options.memory and device.type != "cuda":
        raise UserError(f"--memory: needs CUDA, the device is {device.type}; leave it out")
    theirs, about_them = read_results(Path(options.compare)) if options.compare else ({}, {})
    wanted = {key_of(empty_row(job, warmup)) for job in jobs for warmup in job.warmup_steps}
    if options.compare and not wanted & theirs.keys():
        raise UserError(f"{options.compare}: has none of the rows to be measured")
    folder = new_folder(options.log_dir)
    inspected = [name for name in INSPECT if getattr(options, name)]
    if inspected:
        models, from_corpus = job_configs(options), bool(options.config)
        inspect_models(inspected, models, folder, steps=options.steps, from_corpus=from_corpus)
    if options.scan:
        scan(options.scan.partition("=")[0], jobs, folder)
    elif not inspected:
        time_grid(options, jobs, folder, theirs, about_them)
    print(f"{folder}/ has {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    with reported(OPTIONS.log_dir, interrupted="interrupted; what was measured is kept"):
        main(OPTIONS)
