"""Time a model's forward and backward passes, and break its training step down.

python bench.py                              the published profile: two sizes, with and without
                                             warm-up and mixed precision, and the published seconds
python bench.py --no-bf16 --batch_size 8     any options of train.py, for the models that are timed
python bench.py --config speedup7.yaml       the model, batch and precision of a training stage
python bench.py --config speedup7.yaml --breakdown      the parts of its training step
python bench.py --config speedup7.yaml --trace          the operators of its training step
"""

from collections.abc import Collection, Iterator
from typing import Literal

from pydantic import ConfigDict

from config import GRAPHS_RECORDED, Config, Count, RunConfig, ZeroIsOff, load_config
from runtime.cli import Name, Options
from runtime.start import start

Size = Literal["small", "medium", "large", "xl"]  # configs/timeit/ has these
Computation = Literal["forward", "backward", "forward_backward", "training_step"]

# Options of a run and its corpus: one model computes passes over one batch of random tokens.
WITHOUT_EFFECT = {*RunConfig.model_fields} - {"device", "seed", "log_dir"}
WITHOUT_EFFECT |= {"max_steps", "max_minutes", "total_batch_tokens"}
WITHOUT_EFFECT |= {"dataset", "data_dir", "shuffle", "overfit_batch", "val_fraction"}


class BenchOptions(Options):
    """models and measurements (default: the published profile)"""

    model_config = ConfigDict(extra="allow")  # `model_extra` has the given flags of train.py

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
    """timed passes, or steps of --breakdown"""
    breakdown: bool = False
    """time the parts of a training step"""
    trace: bool = False
    """profile a training step: top operators, and a trace that ui.perfetto.dev opens"""
    log_dir: Name = "logs"
    """results go to bench/<time>/ in this folder"""

    def mistakes(self, given: Collection[str], world_size: int) -> Iterator[tuple[str, str]]:
        """Yield the options that have no effect in this benchmark."""
        without_effect = set(WITHOUT_EFFECT)
        if self.config:
            without_effect.add("size")
        if self.breakdown or self.trace:
            without_effect |= {"computation", "warmup_steps"}
        if not self.breakdown and self.trace:
            without_effect.add("steps")
        for name in sorted(without_effect & self.model_fields_set):
            yield name, f"{name} has no effect in this benchmark; leave it out"


if __name__ == "__main__":
    OPTIONS = start(BenchOptions, others=Config)

import csv
import datetime
import itertools
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measure.interleaved.process import in_fresh_process
from measure.report.report import PEAK_MEMORY, Figure, Report, Row, write_csv, write_report
from runtime.errors import TrainingError, reported
from runtime.files import write_atomic, write_json
from runtime.report import ROOT, flops_rate, git_commit, machine

Model = tuple[str, Config]  # a size of the published profile, or a config's name; its options


# ---- what is timed


def models_of(options: BenchOptions) -> list[Model]:
    """Return the models to time; sizes of the profile with and without mixed precision.

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


def warm_up(config: Config, passes: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of untimed passes, after which CUDA graphs run."""
    least = GRAPHS_RECORDED if config.has_graphs else 0
    return tuple(dict.fromkeys(max(n, least) if n else 0 for n in passes))


def bits(config: Config) -> str:
    """Return the precision of a model as a word."""
    return "full" if config.matmul_dtype == "float32" else "mixed"


def place() -> str:
    """Describe this machine, the versions and the day."""
    return f"{machine()}; torch {version('torch')}, commit {git_commit()}, {datetime.date.today()}."


# ---- times of passes

KEY = ("size", "computation", "warmup_steps", "mixed_precision")  # identifies a published row
COLUMNS = [
    Figure("label", "model and pass"),
    Figure("warmup_steps", "warm"),
    Figure("mean_s", "mean, s", ".4g"),
    Figure("published_s", "published", ".4g", "the mean in seconds, on an unnamed GPU"),
    Figure("over_published", "x published", ".3f"),
    Figure("tflops", "FLOP rate", lambda row: flops_rate(row["tflops"])),
    Figure("utilization", "MFU", ".0%", "against the measured matmul rate"),
    *(Figure(f"{name}_s", name, ".4g") for name in ("median", "std", "min", "max")),
    Figure("tokens_per_sec", "tokens/s", ",.0f"),
    PEAK_MEMORY,
]
FROM_THE_SAME_PASSES = (
    "Rows that differ only in warm-up come from the same passes: with w warm-up passes the first w "
    "are left out. std: of the population."
)


def published_seconds(options: BenchOptions) -> dict[tuple[str, ...], float]:
    """Return the published means by KEY; empty if the options make other models or batches."""
    given = {*(options.model_extra or {})} - {"device", "bf16", "fp16"}
    if options.config or given:
        return {}
    with (ROOT / "logs/reference/timeit.csv").open(newline="", encoding="utf-8") as file:
        return {tuple(row[k] for k in KEY): float(row["mean_s"]) for row in csv.DictReader(file)}


def time_models(options: BenchOptions, models: Sequence[Model], folder: Path) -> None:
    """Time the passes of each model, and report them from fast to slow.

    Writes results.csv and results.json, which also has the seconds of every pass, after each model
    and computation, so that an interrupted call keeps them. A failure is a line of the report.
    Raises TrainingError if nothing can be measured.
    """
    published = published_seconds(options)
    rows, failed = list[dict[str, Any]](), list[str]()
    for (size, config), computation in itertools.product(models, options.computation):
        warmup_steps = warm_up(config, options.warmup_steps)
        call = "measure.profile:time_passes", config, computation, warmup_steps, options.steps
        found, error = in_fresh_process(*call)
        label = f"{size} {computation}, {bits(config)} precision"
        speed = "{tokens_per_sec:,.0f} tokens/s, {peak_memory_mb:,.0f} MB"
        line = f"{label}: {error or speed.format(**found[-1])}"
        print(line, flush=True)
        if error:
            failed.append(line)
            continue
        for figures in found:
            row: dict[str, Any] = {"label": label, "size": size, "computation": computation}
            row |= {"mixed_precision": bits(config) == "mixed"} | figures
            if there := published.get(tuple(str(row[name]).lower() for name in KEY)):
                row |= {"published_s": there, "over_published": row["mean_s"] / there}
            rows.append(row)
        write_csv(folder / "results.csv", rows)
        write_json(folder / "results.json", rows)
    if not rows:
        raise TrainingError(f"nothing could be measured: {failed[-1]}")
    report(rows, failed, folder)


def report(rows: Sequence[dict[str, Any]], failed: Sequence[str], folder: Path) -> None:
    """Print the rows and the failures, and write them to report.md and report.html."""
    about = "{device}, {threads} threads; ".format(**rows[0]) + place()
    write_report(
        Report(
            folder,
            "Seconds per pass: forward, backward and both",
            COLUMNS,
            [Row(row["label"], row) for row in sorted(rows, key=lambda row: row["mean_s"])],
            remarks=[*sorted({row["notes"] for row in rows} - {""}), *failed],
            about=[about],
            meaning=FROM_THE_SAME_PASSES,
        )
    )


# ---- the parts of a step


def inspect_models(options: BenchOptions, models: Sequence[Model], folder: Path) -> None:
    """Break down or trace a step of each model, and write the tables to parts.md.

    Raises TrainingError if nothing can be measured.
    """
    text = f"# Where a training step's time goes\n\n{place()}\n"
    errors = list[str]()
    for name, config in models:
        title = f"\n## {name}, {bits(config)} precision, {config.batch_size} x {config.seq_len}\n"
        print(title, flush=True)
        steps = options.steps if options.breakdown else 0
        path = folder / f"trace_{name}_{bits(config)}.json.gz" if options.trace else None
        found, error = in_fresh_process("measure.profile:inspect_step", config, steps, path)
        section = found or error
        print(section)
        text += f"{title}\n{section}\n"
        write_atomic(folder / "parts.md", text)
        errors.append(error)
    if all(errors):
        raise TrainingError(f"nothing could be measured: {error}")


# ---- the command


def main(options: BenchOptions) -> None:
    """Measure. Raises UserError, for a mistake before anything is measured, and OSError."""
    models = models_of(options)
    folder = Path(options.log_dir) / "bench" / f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder.mkdir(parents=True)
    if options.breakdown or options.trace:
        inspect_models(options, models, folder)
    else:
        time_models(options, models, folder)
    print(f"{folder}/ has {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    with reported(OPTIONS.log_dir, interrupted="interrupted; what was measured is kept"):
        main(OPTIONS)
