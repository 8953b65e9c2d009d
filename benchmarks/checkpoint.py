"""What a checkpoint of GPT-2 (124M) costs: seconds that training waits, beside those that the disk
alone takes for its bytes, and as a share of 100 steps of speedup10.

    python benchmarks/checkpoint.py
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.workload import Workload, time_passes
from checkpoint import RandomState, SavedState, read_state, save_checkpoint
from config import load_config

PAIRS = 5


def write_alone(folder: Path, size: int) -> float:
    """Seconds to write as many bytes to one file, from memory, flush them, and delete them again,
    as saving deletes the oldest.
    """
    block = os.urandom(2**24)
    start = time.perf_counter()
    with open(folder / "alone", "wb") as file:
        for first in range(0, size, len(block)):
            file.write(block[: size - first])
        file.flush()
        os.fsync(file.fileno())
    (folder / "alone").unlink()
    return time.perf_counter() - start


def main() -> None:
    """Print the seconds of a save, of the disk alone and of verifying, and the share of a run that
    saving takes.
    """
    config = load_config("speedup10")
    work = Workload(config)
    prepare, timed = work.computation("training_step")
    step_seconds = statistics.median(
        time_passes(prepare, timed, 6, work.device)[2:]
    )  # the first two compile and warm up
    cpu = torch.device("cpu")
    saves, alone, reads = [], [], []
    with tempfile.TemporaryDirectory(dir=".") as place:
        run_folder = Path(place)
        for step in range(1, PAIRS + 2):
            saved = SavedState(
                step=step,
                tokens=0,
                tokens_per_step=6144,
                best_val_loss=None,
                skipped_steps=0,
                corpus="",
                config=config.model_dump(mode="json"),
                scaler={},
                random=[RandomState.take(cpu)],
            )
            start = time.perf_counter()
            folder = save_checkpoint(
                run_folder, work.raw_model, work.optimizers, saved, keep_last=1
            )
            saves.append(time.perf_counter() - start)
            size = sum(path.stat().st_size for path in folder.iterdir())
            alone.append(write_alone(run_folder, size))
            start = time.perf_counter()
            read_state(folder)
            reads.append(time.perf_counter() - start)
    extra = [
        save - disk for save, disk in zip(saves[1:], alone[1:], strict=True)
    ]  # the first pair warms up
    print(
        f"{size / 1e6:,.0f} MB; medians of {PAIRS} pairs, in one process: saving "
        f"{statistics.median(saves[1:]):.2f} s, the disk "
        f"alone {statistics.median(alone[1:]):.2f} s, beyond the disk "
        f"{statistics.median(extra):.2f} s "
        f"({min(extra):.2f} to {max(extra):.2f}); verifying {statistics.median(reads[1:]):.2f} s"
    )
    print(
        f"every 100 steps of {step_seconds:.2f} s: "
        f"{statistics.median(saves[1:]) / (100 * step_seconds):.2%} of the time"
    )


if __name__ == "__main__":
    main()
