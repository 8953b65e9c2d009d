"""What --estimate says of memory beside what a run takes: `python benchmarks/memory.py [--device
cpu]`.

Each row is one config and its options: first `train.py ... --estimate`, whose last line is the
estimated peak, then the run itself, whose summary.json says what rank 0's process grew by (on a
CUDA GPU, its tensors' peak). Options given are added to every row. On GPUs, rows of more processes
than there are GPUs are left out.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE))

from runtime.errors import TrainingError, reported, why_it_failed
from runtime.report import items, print_table

STEPS = 12  # what the C library keeps grows in the first ones
SMALL = "speedup10.yaml --n_layer 4 --n_head 8 --n_embd 512 --seq_len 512 --batch_size 4"
# processes, config and options; what is switched off comes after what is on
RUNS: list[tuple[int, str]] = [
    (1, "quickstart.yaml"),
    (1, "quickstart.yaml --optimizer adamw --batch_size 16"),
    (1, "baseline.yaml --n_layer 4 --batch_size 4 --seq_len 256"),
    (1, "baseline.yaml --n_layer 2"),
    (1, SMALL),
    (1, f"{SMALL} --no-bf16"),
    (1, f"{SMALL} --no-flash"),
    (1, f"{SMALL} --batch_size 12"),
    (1, f"{SMALL} --recompute"),
    (1, f"{SMALL} --loss_chunks 8"),
    (1, f"{SMALL} --no-compile"),
    (1, f"{SMALL} --no-compile --no-bf16"),
    (1, f"{SMALL} --no-compile --no-flash"),
    (1, f"{SMALL} --no-compile --recompute"),
    (1, f"{SMALL} --no-compile --loss_chunks 8"),
    (1, "speedup10.yaml --batch_size 2"),
    (2, SMALL),
    (2, f"{SMALL} --no-compile"),
    (2, f"{SMALL} --fsdp --compile_mode default"),
    (2, f"{SMALL} --fsdp --no-compile"),
]


def output(
    processes: int, script: Path, options: list[str], environment: Mapping[str, str] | None = None
) -> str:
    """What a script prints, on so many processes. Raises TrainingError if it fails."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        if processes > 1
        else []
    )
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        done = subprocess.run(
            [sys.executable, *launcher, str(script), *options],
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        if done.returncode:
            raise TrainingError(
                f"{' '.join(options)} on {processes} processes: "
                f"{why_it_failed(done.returncode, errors)}"
            )
    return done.stdout


def main(given: list[str]) -> None:
    """Print a row for each of RUNS, and how far the estimates are off. Raises TrainingError if a
    run fails.
    """
    import torch

    rows, off = [], []
    for processes, options in RUNS:
        if "cpu" not in given and processes > (torch.cuda.device_count() or processes):
            continue
        with tempfile.TemporaryDirectory() as folder:
            line = [
                "--config",
                *options.split(),
                "--dataset",
                "shakespeare",
                "--val_fraction",
                "0",
                "--eval_every",
                "0",
                "--sample_every",
                "0",
                "--max_steps",
                str(STEPS),
                "--keep_last",
                "0",
                "--log_dir",
                folder,
                "--run_name",
                "run",
                *given,
            ]
            said = output(processes, HERE / "train.py", [*line, "--estimate"]).splitlines()
            estimated = float(said[-1].removeprefix("estimated peak: ").removesuffix(" MB"))
            output(processes, HERE / "train.py", line)
            measured = json.loads((Path(folder) / "run" / "summary.json").read_text())[
                "memory_growth_mb"
            ]
        off.append(estimated / measured - 1)
        rows.append(
            (str(processes), options, f"{estimated:,.0f}", f"{measured:,.0f}", f"{off[-1]:+.1%}")
        )
        print(", ".join(rows[-1]), flush=True)
    print_table(
        "peak memory of a process, MB",
        items("processes", "config and options", "estimated", "measured", "off by"),
        rows,
    )
    print(
        f"off by {statistics.median(map(abs, off)):.1%} in the median, {max(map(abs, off)):.1%} "
        f"at most"
    )


if __name__ == "__main__":
    with reported("the measurement"):
        main(sys.argv[1:])
