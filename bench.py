"""Time forward, backward and both of a model, and show where the time goes.

python bench.py                              the published profile: small and medium, with and
without warm-up and bf16 python bench.py --config speedup7.yaml       the model, batch and precision
of a training stage python bench.py --breakdown                  the parts of a training step, and
each one's share python bench.py --scan batch_size=1,2,4,8    tokens/s and memory for each value, up
to out of memory python bench.py --config ddp.yaml --scaling 1,2,4    the same batch on more
processes, in turn: tokens/s, efficiency, waiting python bench.py --compare
logs/reference/timeit.csv    beside earlier results, or the published ones
"""

from runtime.interrupt import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()  # first of all, as imports take seconds

import datetime
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from config import Config, Count, ZeroIsOff, load_config
from measure.ratio import FEWEST
from runtime.cli import ContradictionError, Name, Options, Positive, parse_command_line
from runtime.errors import TrainingError, UserError, reported
from runtime.start import set_up_process

# layers, heads and width
SIZES = {
    "small": (12, 12, 768),
    "medium": (24, 16, 1024),
    "large": (36, 20, 1280),
    "xl": (48, 25, 1600),
}
# the rest of the published profile
PROFILE = {
    "vocab_size": 10_000,
    "norm": "rmsnorm",
    "bias": False,
    "activation": "gelu",
    "tie_weights": False,
    "init": "gpt2",
    "residual_scaling": True,
    "batch_size": 16,
    "seq_len": 128,
    "seed": 20230310,
    "compile": False,
    "flash": False,
}
# options of a training config that are taken over where they are given
GIVEN = ("batch_size", "seq_len", "compile", "flash", "loss_chunks", "device", "seed")

Listed = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)
Size = Literal["small", "medium", "large", "xl"]
Computation = Literal["forward", "backward", "forward_backward", "training_step"]


class WhatOptions(Options):
    """what to time (by default: the published profile)"""

    config: str | None = None
    """time the model, batch and precision of this training config instead: a path, or a name in
    configs/
    """
    size: Annotated[tuple[Size, ...], Listed] = ("small", "medium")
    """sizes of the published profile's model: small, medium, large, xl, separated by commas"""
    computation: Annotated[tuple[Computation, ...], Listed] = (
        "forward",
        "backward",
        "forward_backward",
    )
    """forward, backward, forward_backward; or training_step, which adds clipping and the optimizer
    """
    warmup_steps: Annotated[tuple[ZeroIsOff, ...], Listed] = (0, 1)
    """untimed passes before the timed ones, each number its own row"""
    mixed_precision: bool | None = None
    """only with, or only without, autocast to bf16, or to fp16 on a GPU without bf16 (none: both;
    with --config: as it says)
    """
    steps: Count = 5
    """timed passes"""
    batch_size: Positive | None = None
    """sequences per pass (none: 16; with --config: as it says)"""
    seq_len: Positive | None = None
    """tokens per sequence (none: 128; with --config: as it says)"""
    total_batch_tokens: Positive | None = None
    """tokens per step over all processes, with --scaling (none: as the config says, else those of
    one process)
    """
    compile: bool | None = None
    """torch.compile the model (none: no; with --config: as it says)"""
    flash: bool | None = None
    """fused attention (none: no; with --config: as it says)"""
    loss_chunks: Positive | None = None
    """parts that the loss is computed in (none: 1; with --config: as it says)"""
    device: Literal["auto", "cuda", "mps", "cpu"] | None = None
    """auto: cuda, else mps, else cpu (none: auto; with --config: as it says)"""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """seed of weights and tokens (none: 20230310; with --config: as it says)"""


class HowOptions(Options):
    """what to do with it (by default: a table of times)"""

    breakdown: bool = False
    """time the parts of a training step"""
    trace: bool = False
    """profile a training step: top operators, and a trace that ui.perfetto.dev opens"""
    memory: bool = False
    """write a snapshot of the CUDA memory of a training step, which pytorch.org/memory_viz opens"""
    scan: str | None = None
    """tokens/s and memory of training steps over values of batch_size or seq_len, such as
    batch_size=1,2,4
    """
    scaling: Annotated[tuple[Positive, ...], Listed] = ()
    """numbers of processes, such as 1,2,4, that train the same batch in turn: tokens/s, efficiency,
    and the share spent waiting
    """
    rounds: int = Field(20, ge=FEWEST)
    """rounds of --scaling at most; fewer where every interval is narrower than 2%"""
    compare: str | None = None
    """results.json or results.csv of an earlier call, or logs/reference/timeit.csv"""
    log_dir: Name = "logs"
    """results go to bench/<time>/ in this folder"""


class BenchOptions(HowOptions, WhatOptions):
    """All options of a benchmark."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        problems = []
        for name in ("size", "computation", "warmup_steps"):
            if not getattr(self, name):
                problems.append(
                    (name, f"{name} is empty; give at least one, or leave the option out")
                )
        if self.config and "size" in self.model_fields_set:
            problems.append(
                ("size", f"size and config exclude each other: the model is that of {self.config}")
            )
        if self.scan is not None:
            name, _, values = self.scan.partition("=")
            if name not in ("batch_size", "seq_len") or not all(
                re.fullmatch(r"0*[1-9][0-9]{0,15}", v) for v in values.split(",")
            ):
                problems.append(
                    (
                        "scan",
                        f"scan {self.scan!r} is not understood; write batch_size=1,2,4 or "
                        f"seq_len=128,256",
                    )
                )
            elif getattr(self, name) is not None:
                problems.append((name, f"{name} and scan {self.scan} exclude each other"))
            if "warmup_steps" in self.model_fields_set and len(self.warmup_steps) > 1:
                problems.append(("warmup_steps", "scan takes one number of warm-up steps"))
        other = [
            name
            for name in ("breakdown", "trace", "memory", "scan", "scaling")
            if getattr(self, name)
        ]
        inspected = [name for name in other if name != "scan"]
        if self.scaling:
            problems += [
                (name, f"{name} and scaling exclude each other")
                for name in other
                if name != "scaling"
            ]
            if not self.config:
                problems.append(
                    (
                        "scaling",
                        "scaling trains on the config's corpus: name one, such as --config "
                        "quickstart.yaml",
                    )
                )
            if len(set(self.scaling)) < 2:
                problems.append(
                    ("scaling", "scaling compares at least two numbers of processes, such as 1,2")
                )
        problems += [
            (name, f"{name} has no effect without scaling; leave it out")
            for name in ("total_batch_tokens", "rounds")
            if name in self.model_fields_set and not self.scaling
        ]
        for name, without in (
            ("compare", other),
            ("computation", inspected),
            ("warmup_steps", inspected),
            ("steps", [] if self.breakdown or self.scan else inspected),
        ):
            if name in self.model_fields_set and without:
                problems.append(
                    (name, f"{name} has no effect with {' and '.join(without)}; leave it out")
                )
        if problems:
            raise ContradictionError(problems)
        return self


if __name__ == "__main__":
    # before torch is imported, which takes seconds: --help, mistakes and Ctrl-C answer at once
    OPTIONS = parse_command_line(BenchOptions, description=__doc__)
    end_at_ctrl_c()  # again: reading the options ended it
    set_up_process()

from benchmarks.parts import Wanted, inspect_models
from benchmarks.scaling import Scaling
from benchmarks.tables import (
    REPORTED,
    SHOWN,
    Means,
    Row,
    about_machine,
    compare,
    describe,
    draw_scan,
    draw_times,
    published_section,
    read_results,
    scan_columns,
    spread_section,
    write_results,
)
from benchmarks.workload import Job, is_mixed, time_job
from runtime.device import choose_device
from runtime.files import write_whole
from runtime.report import markdown_table, print_table

# ---- what is timed


def job_configs(options: BenchOptions, **changed: Any) -> list[tuple[str, Config]]:
    """The models to time, with and without mixed precision: names and training configs. Raises
    UserError.
    """
    given = {
        name: value for name in GIVEN if (value := getattr(options, name)) is not None
    } | changed
    if options.config:
        given |= {"total_batch_tokens": None}  # a pass is one micro-step
        config = load_config(options.config, **given)
        wanted = is_mixed(config) if options.mixed_precision is None else options.mixed_precision
        if wanted != is_mixed(config):
            config = load_config(options.config, **given, bf16=wanted, fp16=False)
        return [(Path(options.config).stem, config)]
    configs: list[tuple[str, Config]] = []
    for size in options.size:
        layers, heads, width = SIZES[size]
        values: dict[str, Any] = (
            PROFILE | given | {"n_layer": layers, "n_head": heads, "n_embd": width}
        )
        for mixed in (
            (False, True) if options.mixed_precision is None else (options.mixed_precision,)
        ):
            configs.append((size, load_config(**values, block_size=values["seq_len"], bf16=mixed)))
    return configs


def jobs_of(options: BenchOptions, computations: Sequence[str], **changed: Any) -> list[Job]:
    """A job for each model, precision and computation. Raises UserError."""
    return [
        Job(size, config, computation, options.warmup_steps, options.steps)
        for size, config in job_configs(options, **changed)
        for computation in computations
    ]


# ---- the grid: every size, computation, warm-up and precision


def time_all(jobs: Sequence[Job]) -> Iterator[list[Row]]:
    """The rows of each job, with progress shown."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # drawn more often, the progress would disturb what is timed
    with Progress(*columns, refresh_per_second=1) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            label = describe(job.size, job.computation, is_mixed(job.config))
            progress.update(task, description=label)
            yield time_job(job)
            progress.advance(task)
            if not progress.console.is_terminal:
                progress.console.print(f"{label}: done")


def time_grid(
    options: BenchOptions,
    jobs: Sequence[Job],
    folder: Path,
    theirs: Means,
    their_settings: dict[str, Any],
) -> None:
    """The table of times, its files and its picture; beside the rows of an earlier call, `theirs`."""
    rows: list[Row] = []
    for found in time_all(jobs):
        rows = sorted([*rows, *found], key=lambda row: (bool(row.error), row.mean_s))
        write_results(rows, folder)  # at once: what is measured stays, whatever follows
    print_table("seconds per pass", SHOWN, rows)
    notes = sorted({row.settings["notes"] for row in rows if row.settings.get("notes")})
    print("".join(f"note: {note}\n" for note in notes), end="")
    lines = [
        "# Forward, backward and both",
        "",
        about_machine(rows),
        "",
        *markdown_table(REPORTED, rows),
        "",
        "Rows that differ in warm-up only are of the same passes: one leaves out the first of "
        "them. std: the population's. "
        "MB: peak memory, of the GPU's tensors on CUDA, else of the process.",
        *(f"Note: {note}." for note in notes),
        "",
    ]
    measured = [row for row in rows if not row.error]
    if measured:
        draw_times(measured, folder / "times.png")
        lines += [
            "![seconds per pass](times.png)",
            "",
            *spread_section(measured, is_profile=not options.config),
        ]
    if options.compare and any(row.key in theirs for row in measured):
        lines += compare(measured, options.compare, theirs, PROFILE | their_settings)
    elif options.compare:
        print(f"note: no row of {options.compare} could be measured")
    if measured and not options.config:
        lines += published_section(measured, PROFILE)
    write_whole(folder / "report.md", "\n".join(lines).rstrip("\n") + "\n")
    if not measured:
        raise TrainingError(f"nothing could be measured: {rows[0].error}")


# ---- the scan: one option's values, up to out of memory


def scan(options: BenchOptions, folder: Path) -> None:
    """Tokens/s and memory over the values of one option, up to out of memory. Raises UserError
    where nothing can be measured.
    """
    assert options.scan is not None
    name, _, values = options.scan.partition("=")
    given = options.model_fields_set
    computations = options.computation if "computation" in given else ("training_step",)
    warmup = options.warmup_steps[0] if "warmup_steps" in given else 1
    planned = [
        (value, jobs_of(options, computations, **{name: value}))
        for value in sorted({int(v) for v in values.split(",")})
    ]
    rows: list[Row] = []
    ended: dict[str, str] = {}  # by what is timed: why no larger value is tried
    for value, jobs in planned:  # every value was checked before the first was measured
        for job in jobs:
            label = describe(job.size, job.computation, is_mixed(job.config))
            if label in ended:
                continue
            (row,) = time_job(replace(job, warmup_steps=(warmup,)))
            rows.append(row)
            write_results(rows, folder)
            if row.error:
                ended[label] = f"{label}: {row.error} at {value}."
                print(f"{label}: stopped at {name} {value}: {row.error}", flush=True)
            else:
                print(
                    f"{label}: {name} {value}: {row.tokens_per_sec:,.0f} tokens/s, "
                    f"{row.peak_memory_mb:,.0f} MB",
                    flush=True,
                )
    measured = [row for row in rows if not row.error]
    if not measured:
        raise TrainingError(f"--scan {options.scan}: nothing could be measured: {rows[0].error}")
    order = [row.key for row in rows]
    measured.sort(
        key=lambda row: order.index(row.key)
    )  # one model and precision after the other, each by value
    print_table(f"over {name}", scan_columns(name), measured)
    draw_scan(name, measured, folder / "scan.png")
    write_whole(
        folder / "scan.md",
        "\n".join(
            [
                f"# Over {name}",
                "",
                about_machine(rows),
                "",
                *markdown_table(scan_columns(name), measured),
                "",
                *ended.values(),
                "![over the values](scan.png)",
            ]
        )
        + "\n",
    )


def measure_scaling(options: BenchOptions) -> None:
    """The same batch on more processes. Raises UserError."""
    given = {
        name: value
        for name in (*GIVEN, "total_batch_tokens")
        if (value := getattr(options, name)) is not None
    }
    if options.mixed_precision is not None:
        given |= {"bf16": options.mixed_precision, "fp16": False}
    scaling = Scaling(
        str(options.config),
        load_config(options.config, **given),
        list(given),
        sorted(set(options.scaling)),
    )
    folder = new_folder(options.log_dir)
    scaling.measure(options.rounds, folder)
    tell_files(folder)


def new_folder(log_dir: str) -> Path:
    """A fresh folder for the results of this call."""
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    place = Path(log_dir) / "bench"
    folder = next(
        path
        for n in itertools.count()
        if not (path := place / (f"{now}.{n}" if n else now)).exists()
    )
    folder.mkdir(parents=True)
    return folder


def tell_files(folder: Path) -> None:
    """Say what was written."""
    print(f"{folder}/ has {', '.join(sorted(path.name for path in folder.iterdir()))}")


def bench(options: BenchOptions) -> None:
    """Do what the options ask for. Raises UserError, for a mistake before anything is measured, and
    OSError.
    """
    if options.scaling:
        measure_scaling(options)
        return
    jobs = jobs_of(options, options.computation)
    device = choose_device(jobs[0].config.device)
    if options.memory and device.type != "cuda":
        raise UserError(f"--memory: needs CUDA, the device is {device.type}; leave it out")
    theirs, their_settings = read_results(Path(options.compare)) if options.compare else ({}, {})
    wanted = {
        (job.size, job.computation, warmup, is_mixed(job.config))
        for job in jobs
        for warmup in job.warmup_steps
    }
    if options.compare and not wanted & theirs.keys():
        have = (
            ", ".join(sorted({f"{size} {computation}" for size, computation, *_ in theirs}))
            or "no finished run"
        )
        raise UserError(f"{options.compare}: has none of the rows to be measured; it has {have}")
    folder = new_folder(options.log_dir)
    inspected = options.breakdown or options.trace or options.memory
    if inspected:
        inspect_models(
            Wanted(
                options.breakdown,
                options.trace,
                options.memory,
                options.steps,
                from_corpus=bool(options.config),
            ),
            job_configs(options),
            folder,
        )
    if options.scan:
        scan(options, folder)
    if not (inspected or options.scan):
        time_grid(options, jobs, folder, theirs, their_settings)
    tell_files(folder)


def main(options: BenchOptions) -> None:
    """Do what the options ask for; ends the process with a message and a status other than 0 if
    that fails.
    """
    with reported(options.log_dir, interrupted="interrupted; what was measured is kept"):
        bench(options)


if __name__ == "__main__":
    main(OPTIONS)
