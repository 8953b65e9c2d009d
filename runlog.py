"""What a run leaves behind in its folder: config.yaml, log.csv, eval.csv and summary.json."""

import csv
import datetime
import itertools
import math
import os
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import filelock
import torch

from config import Config, UserError
from device import device_name, matmul_tflops, peak_memory_mb, product_dtype
from machine import machine
from model import GPT

LOG_COLUMNS = ("step", "loss", "lr", "norm", "dt_ms", "tokens_per_sec")
EVAL_COLUMNS = ("step", "val_loss")


def start_run_folder(run: Path, config: Config) -> tuple[list[str], filelock.BaseFileLock]:
    """Create the run's folder with config.yaml and an empty log, moving an earlier run of that name aside.

    Returns notes, and a lock on the folder to hold while writing to it. Raises UserError if another process holds that lock.
    """
    notes, lock = [], run / ".lock"
    if run.exists():
        try:
            with filelock.FileLock(lock, timeout=0):
                pass
        except filelock.Timeout:
            raise UserError(f"{run}: another process is writing this run; wait for it or choose another --run_name") from None
        aside = next(path for n in itertools.count(1) if not (path := run.with_name(f"{run.name}.{n}")).exists())
        run.rename(aside)
        notes.append(f"the earlier {run} is now {aside}")
        if Path(config.init_from).is_relative_to(run):
            config = config.model_copy(update={"init_from": str(aside / Path(config.init_from).relative_to(run))})
    run.mkdir(parents=True)
    if call := torchrun_call():
        (run / ".torchrun").write_text(call)
    held = filelock.FileLock(lock)
    held.acquire()
    write_whole(run / "config.yaml", config.to_yaml())
    append_row(run / "log.csv", LOG_COLUMNS)
    return notes, held


def torchrun_call() -> str | None:
    """What tells one call of torchrun from another; the same after it has started its processes again. None without it."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{name} {os.getppid()}" if name else None


def read_torchrun_call(run: Path) -> str | None:
    """The call of torchrun that began the run; None without one."""
    path = run / ".torchrun"
    return path.read_text() if path.exists() else None


def continue_run_folder(run: Path, config: Config, step: int) -> filelock.BaseFileLock:
    """Prepare the folder of a run that goes on after `step`: the rows of later steps leave its log, as they are taken again.

    Returns a lock on the folder to hold while writing to it. Raises UserError if another process holds that lock, or if the
    log cannot be read.
    """
    held = filelock.FileLock(run / ".lock", timeout=0)
    try:
        held.acquire()
    except filelock.Timeout:
        raise UserError(f"{run}: another process is writing this run; wait for it") from None
    for name, columns in (("log.csv", LOG_COLUMNS), ("eval.csv", EVAL_COLUMNS)):
        path = run / name
        kept = [row for row in read_rows(path) if int(row[0]) <= step]
        only_as_last = step > 1 and step % config.log_every and kept and int(kept[-1][0]) == step
        if name == "log.csv" and only_as_last and all(math.isfinite(float(value)) for value in kept[-1][1:4]):
            kept.pop()  # logged because the run ended there; a step that was left out is logged in any case
        if name == "log.csv" or path.exists():
            write_whole(path, "".join(",".join(row) + "\n" for row in [columns, *kept]))
    write_whole(run / "config.yaml", config.to_yaml())
    (run / "summary.json").unlink(missing_ok=True)
    if call := torchrun_call():
        (run / ".torchrun").write_text(call)
    for leftover in (run / "checkpoints").glob("*.tmp"):  # of a save that a kill interrupted
        shutil.rmtree(leftover, ignore_errors=True)
    return held


def read_rows(path: Path) -> list[list[str]]:
    """The rows of a log that are whole, without its header; none where it does not exist."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0]  # a kill may have torn the last line
    header, *rows = [line.split(",") for line in text.split("\n")]
    return [row for row in rows if len(row) == len(header) and row[0].isdecimal() and all(map(_is_number, row))]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or as it was. Raises OSError that names it."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with open(unfinished, "w", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from None


def append_row(path: Path, header: tuple[str, ...], row: tuple[Any, ...] | None = None) -> None:
    """Add a row to a CSV file at once, so that it survives whatever follows; a new file begins with its header.

    Raises OSError that names the file.
    """
    rows = ([] if path.exists() else [header]) + ([] if row is None else [row])
    try:
        with open(path, "a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from None


def log_line(row: tuple[int, float, float, float, float, float], max_steps: int) -> str:
    """A row of the log as a line for the console."""
    step, loss, lr, norm, dt_ms, tokens_per_sec = row
    return (f"step {step:{len(str(max_steps))}d}/{max_steps} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.4f} | "
            f"dt {dt_ms:.2f} ms | {tokens_per_sec:,.0f} tokens/s")


def summarize(config: Config, model: GPT, device: torch.device, world_size: int, step_seconds: list[float],
              tokens_per_step: int) -> dict[str, Any]:
    """Figures of summary.json that follow from the steps' times, the model and the device."""
    left_out = min(5, (len(step_seconds) - 1) // 2)  # the first steps compile and warm up
    median = statistics.median(step_seconds[left_out:])
    flops = model.flops_per_token(config.seq_len)
    peak = peak_memory_mb(device)  # before the measurement below adds to it
    rate = matmul_tflops(device, product_dtype(config), seconds=min(0.5, sum(step_seconds)))
    return {
        "steps": len(step_seconds), "tokens": len(step_seconds) * tokens_per_step, "parameters": model.num_parameters(),
        "median_dt_ms": median * 1e3, "median_tokens_per_sec": tokens_per_step / median, "median_leaves_out": left_out,
        "first_step_s": step_seconds[0], "peak_memory_mb": peak, "flops_per_token": flops, "matmul_tflops": rate,
        "utilization": flops * tokens_per_step / median / (rate * 1e12 * world_size),
        "machine": machine(), "device": device_name(device), "world_size": world_size, "torch": torch.__version__,
        "git": git_commit(),
    }


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    return str(datetime.timedelta(seconds=round(seconds)))


def git_commit() -> str | None:
    """Commit of this code, with -dirty if it was changed since; None where there is no git."""
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], text=True, check=True,
                              capture_output=True, cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
