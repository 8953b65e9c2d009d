"""Time a model's forward and backward passes, and break its training step down.

python bench.py                              the published profile: two sizes, with and without
                                             warm-up and mixed precision
python bench.py --no-bf16 --batch_size 8     any options of train.py, for the models that are timed
python bench.py --config speedup7.yaml       the model, batch and precision of a training stage
python bench.py --breakdown                  the parts of a training step
python bench.py --scan batch_size=1,2,4,8    tokens/s and memory, up to out of memory
python bench.py --config ddp.yaml --scaling 1,2,4         the same batch on more ranks, interleaved
python bench.py --compare logs/reference/timeit.csv       beside earlier or published results
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from config import GRAPHS_RECORDED, Config, Count, RunConfig, ZeroIsOff, load_config
from measure.interleaved.ratio import FEWEST
from runtime.cli import ContradictionError, Name, Options, Positive
from runtime.start import start

Size = Literal["small", "medium", "large", "xl"]  # configs/timeit/ has these
Computation = Literal["forward", "backward", "forward_backward", "training_step"]


class WhatOptions(Options):
    """models and passes (default: the published profile)"""

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
    steps: Count = 5
    """timed passes"""


# Options of the corpus. Passes of one model are on random tokens.
DATA = ("dataset", "data_dir", "shuffle", "overfit_batch", "val_fraction")
# Options with an effect in each mode, or without one, besides config, log_dir and train.py's own.
USES = {
    "": ("size", "computation", "warmup_steps", "steps", "compare"),
    "breakdown": ("size", "steps"),
    "trace": ("size",),
    "memory": ("size",),
    "scan": ("size", "steps"),
    "scaling": ("rounds", "total_batch_tokens", *DATA),
}
INSPECT = ("breakdown", "trace", "memory")
OF_RUNS = {*RunConfig.model_fields, "max_steps", "max_minutes"} - {"device", "seed", "log_dir"}


class BenchOptions(WhatOptions):
    """measurements (default: a table of times)"""

    model_config = ConfigDict(extra="allow")  # `model_extra` has the given flags of train.py

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
    """numbers of ranks, such as 1,2,4, that train the same batch of --config [baseline],
    interleaved: tokens/s and efficiency
    """
    rounds: int = Field(20, ge=FEWEST)
    """rounds of --scaling at most; fewer once every interval is narrower than 2%"""
    compare: str | None = None
    """results.csv of an earlier call, or logs/reference/timeit.csv"""
    log_dir: Name = "logs"
    """results go to bench/<time>/ in this folder"""

    @property
    def scanned(self) -> str:
        """The option whose values are scanned; empty without --scan."""
        return (self.scan or "").partition("=")[0]

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        modes = [mode for mode in USES if getattr(self, mode, False)] or [""]
        if self.scaling:
            modes = ["scaling"]
        used = {*modes, *chain(*(USES[mode] for mode in modes))}
        without_effect = {*USES, *chain(*USES.values()), *OF_RUNS} - used | {self.scanned}
        if self.config:
            without_effect.add("size")
        if given := sorted(without_effect & self.model_fields_set):
            text = "has no effect in this benchmark; leave it out"
            raise ContradictionError(*((name, f"{name} {text}") for name in given))
        return self


if __name__ == "__main__":
    OPTIONS = start(BenchOptions, others=Config)

from measure.interleaved.process import in_fresh_process
from measure.profile.breakdown import inspect_models
from measure.profile.scaling import measure_scaling
from measure.profile.tables import new_folder, read_results, report_times
from measure.profile.timing import Job, label_of
from measure.report.report import Row, write_csv
from runtime.errors import TrainingError, reported
from runtime.files import write_json

# ---- the jobs


def job_configs(options: BenchOptions) -> list[tuple[str, Config]]:
    """Return name and config of each model to time, with and without mixed precision.

    Raises UserError.
    """
    values = options.model_extra or {}
    if options.config:
        values = values | {"total_batch_tokens": None}  # a pass is one micro-step
        return [(Path(options.config).stem, load_config(options.config, **values))]
    if "seq_len" in values:
        values = {"block_size": values["seq_len"]} | values
    is_chosen = {"bf16", "fp16"} & values.keys()
    precisions = [values.get("bf16", False)] if is_chosen else [False, True]
    return [
        (size, load_config(f"timeit/{size}", **(values | {"bf16": bf16})))
        for size in options.size
        for bf16 in precisions
    ]


def jobs_of(options: BenchOptions) -> list[Job]:
    """Return a job for each model, precision, computation and value of the scan.

    Raises UserError, also for a value of the scan that the option does not allow.
    """
    scanned = [options]
    if options.scan:
        steps = options.with_options(computation=("training_step",), warmup_steps=(1,))
        values = sorted(map(int, options.scan.partition("=")[2].split(",")))
        scanned = [steps.with_options(**{options.scanned: n}) for n in values]
    return [
        Job(size, config, computation, warm_up(config, each.warmup_steps), each.steps)
        for each in scanned
        for size, config in job_configs(each)
        for computation in each.computation
    ]


def warm_up(config: Config, passes: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of untimed passes, after which CUDA graphs run."""
    least = GRAPHS_RECORDED if config.has_graphs else 0
    return tuple(dict.fromkeys(n and max(n, least) for n in passes))


def time_jobs(jobs: Sequence[Job], folder: Path) -> tuple[list[Row], list[str]]:
    """Time the jobs one after the other; after a failure, skip that model's larger batches.

    Returns the rows, and a line for each failure. Writes results.csv and results.json, which also
    has the seconds of every pass, after each job, so that an interrupted call keeps them. Raises
    TrainingError if no job can be measured.
    """
    rows: list[Row] = []
    failed: dict[str, str] = {}  # line by label
    for job in jobs:
        label = label_of(job.row(0))
        if label in failed:
            continue
        found, error = in_fresh_process("measure.profile.timing:measure", job)
        speed = "{tokens_per_sec:,.0f} tokens/s, {peak_memory_mb:,.0f} MB"
        line = f"{label}, {job.config.batch_size} x {job.config.seq_len}: "
        line += error or speed.format(**found[-1])
        print(line, flush=True)
        if error:
            failed[label] = line
            continue
        rows += found
        write_csv(folder / "results.csv", rows)
        write_json(folder / "results.json", rows)
    if not rows:
        raise TrainingError(f"nothing could be measured: {error}")
    return rows, [*failed.values()]


# ---- the command


def main(options: BenchOptions) -> None:
    """Measure. Raises UserError, for a mistake before anything is measured, and OSError."""
    if options.scaling:
        name, values = options.config or "baseline", options.model_extra or {}
        measure_scaling(name, values, options.scaling, options.rounds, options.log_dir)
        return
    jobs = jobs_of(options)
    earlier = read_results(Path(options.compare)) if options.compare else {}
    folder = new_folder(options.log_dir)
    inspected = [name for name in INSPECT if getattr(options, name)]
    if inspected:
        inspect_models(inspected, job_configs(options), folder, options.steps)
    if options.scan or not inspected:
        rows, failed = time_jobs(jobs, folder)
        report_times(options.scanned, rows, failed, folder, earlier, options.compare)
    print(f"{folder}/ has {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    with reported(OPTIONS.log_dir, interrupted="interrupted; what was measured is kept"):
        main(OPTIONS)
