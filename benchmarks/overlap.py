"""How far DDP's transfers go on beside the backward pass of a compiled model, by the order of
wrapping and the size of buckets.

    OMP_NUM_THREADS=1 python -m benchmarks.overlap --config model/gpt2.yaml --compile --flash --bf16 --batch_size 1 --seq_len 512

Takes train.py's options. Two processes for each way, in turn; then some steps of each under
PyTorch's profiler.
"""

import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.in_turn import Group, all_sides, do_rounds, over
from config import Config
from runtime.cli import parse_command_line
from runtime.errors import reported
from runtime.report import git_commit, items, machine, print_table

RANKS = 2
ROUNDS = 8
PROFILED_STEPS = 6  # the first does not count
WAY = "WAY_OF_WRAPPING"  # in a process's environment: how it wraps the model


def whole(model: Any, blocks: Any, average: Callable[[Any], Any]) -> Any:
    """DDP around the compiled model, which PyTorch then divides where a bucket is full: what
    `runtime/parallel.py` does.
    """
    import torch

    return average(torch.compile(model))


def one_piece(model: Any, blocks: Any, average: Callable[[Any], Any]) -> Any:
    """The same, without that division."""
    import torch

    torch._dynamo.config.optimize_ddp = False
    return whole(model, blocks, average)


def outside(model: Any, blocks: Any, average: Callable[[Any], Any]) -> Any:
    """The compiler around DDP."""
    import torch

    return torch.compile(average(model))


def by_block(model: Any, blocks: Any, average: Callable[[Any], Any]) -> Any:
    """DDP around a model whose blocks are compiled, each by itself."""
    for block in blocks:
        block.compile()
    return average(model)


WRAPPED = {
    "DDP(compile)": whole,
    "DDP(compile), undivided": one_piece,
    "compile(DDP)": outside,
    "DDP(compiled blocks)": by_block,
}
BUCKETS = (25, 5, 100, 10_000)  # MB, DDP's default first; the last is more than all gradients


def train_wrapped(way: str, bucket_mb: int) -> None:
    """One process of a side, which wraps the model in this way."""
    import train
    from benchmarks import side
    from runtime.parallel import averaging

    def wrapped(model: Any, blocks: Any, world: Any, config: Any) -> Any:
        return WRAPPED[way](
            model, blocks, functools.partial(averaging, world=world, bucket_cap_mb=bucket_mb)
        )

    train.parallelize = wrapped
    side.main()


def compare(ways: Sequence[tuple[str, int]], config: Config, given: Sequence[str]) -> None:
    """Print a row for each of these ways to wrap the model, with buckets of so many MB. Raises
    TrainingError if one fails.
    """
    with tempfile.TemporaryDirectory() as place:
        sides = [
            Group(
                f"{name}, {bucket_mb} MB",
                [
                    sys.executable,
                    __file__,
                    *given,
                    "--log_dir",
                    f"{place}/{i}",
                    "--run_name",
                    "side",
                ],
                {WAY: json.dumps((name, bucket_mb))},
                RANKS,
            )
            for i, (name, bucket_mb) in enumerate(ways)
        ]
        with all_sides(sides) as turns:
            rates = do_rounds(sides, turns, ROUNDS, 0.0, tell=lambda line: print(line, flush=True))
            for side in sides:
                side.ask(f"{PROFILED_STEPS} {2**20}")
                side.answer()
    rows = []
    for side in sides:
        ranks = side.turns[-1]["ranks"]
        share = {
            name: statistics.fmean(
                sum(rank["profile"][name][1:]) / sum(rank["profile"]["step"][1:]) for rank in ranks
            )
            for name in ("transfer", "waiting")
        }
        rows.append(
            (
                side.name,
                f"{statistics.median(rates[side.name]):,.0f}",
                "" if side is sides[0] else str(over(rates, side.name, sides[0].name)),
                f"{share['transfer']:.1%}",
                f"{share['waiting']:.1%}",
                f"{max(rank['peak_memory_mb'] for rank in ranks):,.0f}",
            )
        )
    print_table(
        f"{RANKS} processes, {config.batch_size} x {config.seq_len} tokens each, {ROUNDS} rounds "
        f"in turn",
        items(
            "order of wrapping, buckets", "tokens/s", "x first", "transfers", "waiting", "MB each"
        ),
        rows,
    )


def main(config: Config, given: Sequence[str]) -> None:
    """Compare the orders, then the sizes of buckets in the first one."""
    print(f"{machine()}; torch {version('torch')}, commit {git_commit()}", flush=True)
    compare([(name, BUCKETS[0]) for name in WRAPPED], config, given)
    compare([(next(iter(WRAPPED)), bucket_mb) for bucket_mb in BUCKETS], config, given)


if __name__ == "__main__":
    if WAY in os.environ:
        from runtime.start import set_up_process

        set_up_process()
        train_wrapped(*json.loads(os.environ[WAY]))
    else:
        CONFIG = parse_command_line(Config, description=__doc__, config_file=True)
        with reported("the comparison"):
            main(CONFIG, sys.argv[1:])
