"""Measure how a run scales: the same batch on one rank and on several, interleaved."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from config import Config, load_config
from measure.interleaved import (
    LEFT_OUT,
    Rates,
    Side,
    ratio_of,
    run_rounds,
    say,
    started,
    training_side,
)
from measure.options import to_flags
from measure.ratio import Ratio
from measure.tables import Row, about_machine, draw_panels, figure
from runtime.device import choose_device, device_name
from runtime.errors import UserError
from runtime.files import write_whole
from runtime.launch import launch
from runtime.report import (
    Column,
    git_commit,
    machine,
    markdown_table,
    print_table,
)
from runtime.start import cores

WIDTH = 0.02  # stop once every interval is narrower than this share of its median


def split(config: Config, ranks: int) -> tuple[int, int]:
    """Share the tokens of one rank's step among `ranks`, in the largest micro-steps that fit.

    Returns the sequences of a micro-step and the micro-steps of each rank.
    """
    each = config.tokens_per_step(1) // config.seq_len // ranks
    batch = max(n for n in range(1, min(each, config.batch_size) + 1) if each % n == 0)
    return batch, each // batch


def check_ranks(counts: Sequence[int], config: Config, device: torch.device) -> None:
    """Raise UserError for numbers of ranks that cannot train this batch here."""
    if launch().world_size > 1:
        raise UserError("--scaling: starts its ranks itself; run it without torchrun")
    if device.type == "mps":
        raise UserError("--scaling: several ranks cannot share the Apple GPU; use --device cpu")
    tokens = config.tokens_per_step(1)
    sequences = tokens // config.seq_len
    divisors = [n for n in range(1, sequences + 1) if sequences % n == 0]
    for n in counts:
        if n not in divisors:
            nearest = [m for m in divisors if m < n][-1:] + [m for m in divisors if m > n][:1]
            raise UserError(
                f"--scaling {n}: the {sequences} sequences of a step ({tokens:,} tokens) do not "
                f"divide among {n} ranks; nearest that work: {' or '.join(map(str, nearest))}"
            )
    if device.type == "cuda" and max(counts) > torch.cuda.device_count():
        raise UserError(
            f"--scaling {max(counts)}: each rank takes a GPU, and there are "
            f"{torch.cuda.device_count()} here; leave larger numbers out, or use --device cpu"
        )


def measure_scaling(
    name: str,
    values: Mapping[str, Any],
    counts: Sequence[int],
    rounds: int,
    make_folder: Callable[[], Path],
) -> Path:
    """Interleave so many ranks on the config `name` with `values`, and report.

    The folder is made once the options are checked. Raises UserError for what cannot be measured
    here, TrainingError if a side fails.
    """
    config, counts = load_config(name, **values), sorted(set(counts))
    device = choose_device(config.device)
    check_ranks(counts, config, device)
    folder = make_folder()
    if device.type == "cpu" and max(counts) > cores():
        print(
            f"note: {max(counts)} ranks share {cores()} cores: what they reach says nothing of "
            f"more cores"
        )
    sides = []
    for n in counts:
        given = {"total_batch_tokens": config.tokens_per_step(1), "batch_size": split(config, n)[0]}
        flags = to_flags({**values, **given})
        label = f"{n} rank{'s' * (n > 1)}"
        sides.append(training_side(label, ["--config", name, *flags], ranks=n))
    with started(sides):
        results = folder / "in_turn.json"
        rates = run_rounds(sides, rounds, WIDTH, results=results, say=say)
    rows = [row_of(config, device, n, side, rates) for n, side in zip(counts, sides, strict=True)]
    for row in rows:
        row["hardware"] = row["used"] / rows[0]["used"]
        row["efficiency"] = row["over_first"]["median"] / row["hardware"]
    write_report(rows, name, folder, device, len(rates[sides[0].name]))
    return folder


def row_of(config: Config, device: torch.device, ranks: int, side: Side, rates: Rates) -> Row:
    """Return the figures of a number of ranks, as results.json has them.

    Efficiency is how many times as fast as the first it is, over how many times as much hardware
    it uses.
    """
    last = side.answers[-1]
    answers = last.get("ranks", [last])
    first = next(iter(rates))
    batch_size, micro_steps = split(config, ranks)
    tokens, tokens_per_sec = config.tokens_per_step(1), statistics.median(rates[side.name])
    over_first = Ratio(1.0) if side.name == first else ratio_of(rates, side.name, first)
    return {
        "ranks": ranks,
        "threads": last["threads"],  # of each rank
        "batch_size": batch_size,
        "micro_steps": micro_steps,
        "tokens": tokens,  # of a step, of all ranks
        "tokens_per_sec": tokens_per_sec,
        "over_first": dataclasses.asdict(over_first),
        "x_first": str(over_first),
        # GPUs, or cores
        "used": ranks if device.type == "cuda" else min(cores(), ranks * last["threads"]),
        "step_s": tokens / tokens_per_sec,
        "memory_mb": max(answer["peak_memory_mb"] for answer in answers),
    }


# ---- the report

COLUMNS = [
    figure("ranks", "ranks"),
    figure("threads", "threads"),
    Column("batch", lambda row: f"{row['batch_size']} x {row['micro_steps']}"),
    figure("tokens/s", "tokens_per_sec", ",.0f"),
    figure("x first", "x_first"),
    figure("efficiency", "efficiency", ".0%"),
    figure("MB each", "memory_mb", ",.0f"),
]
MEANING = (
    "batch: sequences of a micro-step x micro-steps, of each rank. tokens/s: of all ranks, the "
    "median of the rounds. x first: the median of the rounds' ratios, with its 95% interval. "
    "Efficiency: that over how much more hardware it has, GPUs or, on a CPU, cores in use. "
    "MB: peak memory, of the GPU's tensors on CUDA, else of a rank's process."
)


def write_report(
    rows: Sequence[Row], name: str, folder: Path, device: torch.device, rounds: int
) -> None:
    """Print the figures and write them: report.md, results.json and a picture."""
    print_table(f"{rows[0]['tokens']:,} tokens a step, {rounds} rounds", COLUMNS, rows)
    ranks = [row["ranks"] for row in rows]
    factors = {
        "measured": (ranks, [row["over_first"]["median"] for row in rows]),
        "hardware": (ranks, [row["hardware"] for row in rows]),
    }
    panels = {f"tokens/s over those of {ranks[0]}": factors}
    draw_panels(folder / "scaling.png", "ranks", panels)
    about = {"torch": torch.__version__, "threads": rows[0]["threads"]}
    lines = [
        f"# {Path(name).stem}: the same batch on more ranks",
        "",
        f"{about_machine({**about, 'device': device_name(device)})} {rows[0]['tokens']:,} tokens a "
        f"step, {rounds} interleaved rounds after the first {LEFT_OUT}.",
        "",
        *markdown_table(COLUMNS, rows),
        "",
        MEANING,
        "",
        "![tokens/s](scaling.png)",
    ]
    write_whole(folder / "report.md", "\n".join(lines) + "\n")
    results = {
        "machine": machine(),
        "git": git_commit(),
        "torch": torch.__version__,
        "config": name,
        "rounds": rounds,
        "counts": rows,
    }
    write_whole(folder / "results.json", json.dumps(results, indent=1) + "\n")
