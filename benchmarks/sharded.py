"""Peak memory of each process and seconds of a step on 2 and 4 processes of this machine: DDP,
--fsdp, each with --recompute.

    python benchmarks/sharded.py --config model/gpt2.yaml --batch_size 1 --seq_len 256 --flash --device cpu

Takes train.py's options. The peak is that of the tensors on a GPU; on a CPU it is what the process
grows by from before the model is built, with a C library that gives back at once what is freed
(which costs time).
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.memory import output
from config import Config
from runtime.cli import parse_command_line
from runtime.errors import reported
from runtime.launch import launch
from runtime.report import items, print_table
from runtime.start import set_up_process

RANKS = (2, 4)
SIDES: dict[str, list[str]] = {
    "DDP": [],
    "DDP, recompute": ["--recompute"],
    "FSDP": ["--fsdp"],
    "FSDP, recompute": ["--fsdp", "--recompute"],
}
GIVE_BACK = {
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "MALLOC_ARENA_MAX": "1",
}  # of glibc's malloc
STEPS = 5  # of which the first two are left out of the time


def measure(config: Config) -> None:
    """Train in this process, one of several; rank 0 prints the figures of all as a line of JSON."""
    set_up_process()
    import torch.distributed.fsdp  # noqa: F401  # code is no part of what either side takes

    from runtime.device import choose_device
    from runtime.runlog import read_rows
    from runtime.world import joined_world
    from train import train

    with (
        tempfile.TemporaryDirectory() as folder,
        joined_world(choose_device(config.device, launch()), config.timeout) as world,
    ):
        summary = train(
            config.model_copy(update={"log_dir": folder, "keep_last": 0, "max_steps": STEPS}), world
        )
        peaks = world.gather(summary["memory_growth_mb"])
        if world.rank == 0:
            rows = read_rows(Path(folder) / str(config.run_name) / "log.csv")
            seconds = (
                statistics.median(row["dt_ms"] or 0.0 for step, row in rows.items() if step > 2)
                / 1e3
            )
            print(
                json.dumps({"peaks_mb": peaks, "seconds": seconds, "loss": rows[STEPS]["loss"]}),
                flush=True,
            )


def figures(ranks: int, options: list[str]) -> dict[str, Any]:
    """What `measure` prints of so many processes, with these options of train.py. Raises
    TrainingError if they fail.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    return json.loads(output(ranks, Path(__file__), options, threads | GIVE_BACK).splitlines()[-1])


def main(config: Config) -> None:
    """Print a row for each number of processes and each way of sharing the work."""
    rows = []
    for ranks in RANKS:
        for side, options in SIDES.items():
            found = figures(ranks, [*sys.argv[1:], *options])
            rows.append(
                (
                    str(ranks),
                    side,
                    f"{max(found['peaks_mb']):,.0f}",
                    f"{min(found['peaks_mb']):,.0f}",
                    f"{found['seconds']:.2f}",
                    f"{found['loss']:.4f}",
                )
            )
            print(", ".join(rows[-1]), flush=True)
    print_table(
        f"{config.run_name}: {config.batch_size} x {config.seq_len} tokens a process",
        items("processes", "", "most MB", "least MB", "s/step", f"loss of step {STEPS}"),
        rows,
    )


if __name__ == "__main__":
    CONFIG = parse_command_line(Config, description=__doc__, config_file=True)
    with reported("the measurement"):
        (measure if launch().world_size > 1 else main)(CONFIG)
