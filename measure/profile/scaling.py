"""Measure how a run scales: the same batch on one rank and on several, interleaved."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from config import Config, load_config
from measure.interleaved.comparison import Comparison
from measure.interleaved.rounds import LEFT_OUT, Side, run_rounds, to_flags, training_side
from measure.profile.tables import about_machine, new_folder
from measure.report.report import PEAK_MEMORY, Figure, Row, write_report
from runtime.cli import load
from runtime.report import Estimate
from runtime.start import cores


def batch_size_of(config: Config, ranks: int) -> int:
    """Return the sequences of a micro-step if `ranks` share the tokens of one rank's step."""
    each = config.tokens_per_step(1) // config.seq_len // ranks
    return max(1, min(each, config.batch_size))


FIGURES = [
    Figure("ranks", "ranks"),
    Figure("threads", "threads"),
    Figure(
        "batch_size",
        "batch",
        lambda row: f"{row['batch_size']} x {row['micro_steps']}",
        "sequences of a micro-step x micro-steps, of each rank",
    ),
    Figure("tokens_per_sec", "tokens/s", ",.0f", "of all ranks, the median of the rounds"),
    Figure("over_first", "x first", "", "tokens/s over those of the first row", bar=True),
    Figure(
        "efficiency",
        "efficiency",
        ".0%",
        "x first over the factor of hardware: GPUs or, on a CPU, cores in use",
    ),
    PEAK_MEMORY,
]


def measure_scaling(
    name: str, values: Mapping[str, Any], counts: Sequence[int], rounds: int, log_dir: str
) -> None:
    """Interleave runs of the config `name` on each number of ranks in `counts`, and report.

    Results go to a new folder in `log_dir`. Raises UserError for what cannot be measured
    here, TrainingError if a side fails.
    """
    sides, configs = list[Side](), list[tuple[int, Config]]()
    config = load_config(name, **values)
    tokens = config.tokens_per_step(1)
    for ranks in sorted(counts):
        batch_size = batch_size_of(config, ranks)
        given = {**values, "total_batch_tokens": tokens, "batch_size": batch_size}
        configs.append((ranks, load(Config, given, name, ranks)))  # UserError for an odd share
        arguments = ["--config", name, *to_flags(given)]
        sides.append(training_side(f"{ranks} rank{'s' * (ranks > 1)}", arguments, ranks=ranks))
    folder = new_folder(log_dir)
    found = run_rounds(sides, rounds, results=folder / "interleaved.json")
    rows = rows_of(found, configs)
    write_report(
        folder,
        f"{Path(name).stem}: the same batch on more ranks",
        FIGURES,
        rows,
        about=[
            f"{about_machine(rows[0])} {tokens:,} tokens a "
            f"step, {found.rounds} interleaved rounds after the first {LEFT_OUT}."
        ],
        where=found.place,
        bars="scaling.png",
    )


def rows_of(found: Comparison, configs: Sequence[tuple[int, Config]]) -> list[Row]:
    """Return the figures of each number of ranks and its config."""
    rows = list[Row]()
    used = []  # GPUs, or cores
    for i, (ranks, config) in enumerate(configs):
        side = found.sides[i]
        threads = side.turns[-1].threads
        used.append(min(cores(), ranks * threads) if found.device == "cpu" else ranks)
        hardware = used[i] / used[0]
        factor = found.ratio(i) if i else Estimate(1.0)
        rows.append(
            {
                "device": found.device,
                "ranks": ranks,
                "threads": threads,
                "batch_size": config.batch_size,
                "micro_steps": config.accumulation_steps(ranks),
                "tokens_per_sec": side.median,
                "peak_memory_mb": side.peak_memory_mb,
                "over_first": factor,
                "hardware": hardware,
                "efficiency": factor.value / hardware,
            }
        )
    return rows
