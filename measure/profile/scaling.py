"""Measure how a run scales: the same batch on one rank and on several, interleaved."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from config import Config, load_config
from measure.interleaved.comparison import Comparison
from measure.interleaved.options import to_flags
from measure.interleaved.rounds import LEFT_OUT, run_rounds, training_side
from measure.profile.tables import about_machine, new_folder
from measure.report.report import PEAK_MEMORY, Figure, Report, Row
from runtime.device import choose_device, device_name
from runtime.errors import UserError
from runtime.launch import launch
from runtime.report import Estimate, machine
from runtime.start import cores


def split(config: Config, ranks: int) -> tuple[int, int]:
    """Share the tokens of one rank's step among `ranks`, in the largest micro-steps that fit.

    Returns the sequences of a micro-step and the micro-steps of each rank. Raises UserError if the
    sequences do not divide among the ranks.
    """
    sequences = config.tokens_per_step(1) // config.seq_len
    if sequences % ranks:
        raise UserError(
            f"--scaling {ranks}: the {sequences} sequences of a step do not divide among {ranks} "
            f"ranks; choose divisors of {sequences}"
        )
    each = sequences // ranks
    batch = max(n for n in range(1, min(each, config.batch_size) + 1) if each % n == 0)
    return batch, each // batch


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
    if launch().world_size > 1:
        raise UserError("--scaling: starts its ranks itself; run it without torchrun")
    config, counts = load_config(name, **values), sorted(counts)
    most, tokens = counts[-1], config.tokens_per_step(1)
    device = choose_device(config.device)
    batch_sizes = [split(config, ranks)[0] for ranks in counts]
    folder = new_folder(log_dir)
    if device.type == "cpu" and most > cores():
        print(
            f"note: {most} ranks share {cores()} cores, so this does not show how more cores scale"
        )
    sides = []
    for ranks, batch_size in zip(counts, batch_sizes, strict=True):
        given = {"total_batch_tokens": tokens, "batch_size": batch_size}
        arguments = ["--config", name, *to_flags({**values, **given})]
        sides.append(training_side(f"{ranks} rank{'s' * (ranks > 1)}", arguments, ranks=ranks))
    found = run_rounds(sides, rounds, results=folder / "interleaved.json")
    rows = rows_of(found, counts, config, device)
    Report(
        folder,
        f"{Path(name).stem}: the same batch on more ranks",
        FIGURES,
        rows,
        about=[
            f"{about_machine(rows[0])} {tokens:,} tokens a "
            f"step, {found.rounds} interleaved rounds after the first {LEFT_OUT}."
        ],
        where=machine(),
        bars="scaling.png",
    ).write()


def rows_of(
    found: Comparison, counts: Sequence[int], config: Config, device: torch.device
) -> list[Row]:
    """Return the figures of each number of ranks in `counts`."""
    rows = list[Row]()
    used = []  # GPUs, or cores
    for i, (ranks, side) in enumerate(zip(counts, found.sides, strict=True)):
        batch_size, micro_steps = split(config, ranks)
        threads = side.turns[-1].threads
        used.append(ranks if device.type == "cuda" else min(cores(), ranks * threads))
        hardware = used[i] / used[0]
        factor = found.ratio(i) if i else Estimate(1.0)
        rows.append(
            {
                "device": device_name(device),
                "ranks": ranks,
                "threads": threads,
                "batch_size": batch_size,
                "micro_steps": micro_steps,
                "tokens_per_sec": side.median,
                "peak_memory_mb": side.peak_memory_mb,
                "over_first": factor,
                "hardware": hardware,
                "efficiency": factor.value / hardware,
            }
        )
    return rows
