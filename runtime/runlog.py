"""A run's folder: log.csv, eval.csv, config.yaml, summary.json, console.log and checkpoints/. Nothing here needs torch."""

import contextlib
import csv
import datetime
import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import filelock

from runtime.errors import UserError
from runtime.files import cannot_be_written, write_whole
from runtime.report import flops_rate
from runtime.world import launch

Row = dict[str, float | None]  # a row of a CSV file by column; an empty cell is None


class LogRow(NamedTuple):
    """A step's figures, as log.csv has them."""

    step: int  # from 1
    loss: float  # nats per token
    lr: float
    norm: float  # of the gradient, before clipping
    dt_ms: float
    tokens_per_sec: float


LOG_COLUMNS = LogRow._fields
EVAL_COLUMNS = ("step", "val_loss")
STYLES = {"step": "d", "dt_ms": ".3f", "tokens_per_sec": ".1f"}  # every other column is written to the last digit


class RunFolder:
    """The folder of a run. Every process has one; rank 0's writes, and prints what is said, and the others' do nothing.

    Until `begin` or `go_on`, nothing is written: a run that cannot start leaves no folder.
    """

    def __init__(self, path: Path, rank: int = 0):
        self.path, self.rank = path, rank
        self._lock = filelock.FileLock(path / ".lock", timeout=0)
        self._console: TextIO | None = None
        self._said_before: list[str] = []  # before console.log is there

    # ---- starting and ending: called on rank 0 only

    def begin(self) -> Path | None:
        """Create the folder with an empty log; returns where an earlier run of that name was moved aside to.

        Raises UserError if another process is writing to the folder.
        """
        aside = None
        if self.path.exists():
            with self._held("wait for it or choose another --run_name"):
                pass
            aside = next(path for n in itertools.count(1) if not (path := self.path.with_name(f"{self.path.name}.{n}")).exists())
            self.path.rename(aside)
        self.path.mkdir(parents=True)
        self._held("wait for it or choose another --run_name")
        write_rows(self.path / "log.csv", LOG_COLUMNS, [])
        self._open()
        return aside

    def go_on(self, step: int, log_every: int) -> None:
        """Take up the folder after `step`: the rows of later steps leave its log, as those steps are taken again.

        Raises UserError if another process is writing to the folder, or if a log cannot be read.
        """
        self._held("wait for it")
        for name, columns in (("log.csv", LOG_COLUMNS), ("eval.csv", EVAL_COLUMNS)):
            kept = [row for at, row in self.rows(name, columns).items() if at <= step]
            only_as_last = step > 1 and step % log_every and kept and kept[-1]["step"] == step
            if name == "log.csv" and only_as_last and all(math.isfinite(kept[-1][key] or 0) for key in ("loss", "lr", "norm")):
                kept.pop()  # logged because the run ended there; a step that was left out is logged in any case
            if name == "log.csv" or (self.path / name).exists():
                write_rows(self.path / name, columns, kept)
        (self.path / "summary.json").unlink(missing_ok=True)
        for leftover in (self.path / "checkpoints").glob("*.tmp"):  # of a save that a kill interrupted
            shutil.rmtree(leftover, ignore_errors=True)
        self._open()

    def _held(self, remedy: str) -> filelock.BaseFileLock | Any:
        try:
            return self._lock.acquire()
        except filelock.Timeout:
            raise UserError(f"{self.path}: another process is writing this run; {remedy}") from None

    def _open(self) -> None:
        if call := launch().call:
            (self.path / ".torchrun").write_text(call)
        self._console = open(self.path / "console.log", "a", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed by close
        for text in self._said_before:
            self._write(text)

    def close(self) -> None:
        """Let other processes write to the folder."""
        if self._console:
            with contextlib.suppress(OSError):  # what a full disk did not take has been an error before
                self._console.close()
            self._console = None
        self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self._console and error is not None:
            with contextlib.suppress(OSError):  # a full disk may be the error
                for line in str(error).splitlines() or [type(error).__name__]:
                    self._console.write(f"error: {line}\n")  # the command prints it when it ends
        self.close()

    # ---- writing: called on every process

    def say(self, text: str) -> None:
        """Print, and keep in console.log."""
        if self.rank == 0:
            print(text, flush=True)
            if self._console:
                self._write(text)
            else:
                self._said_before.append(text)

    def _write(self, text: str) -> None:
        assert self._console is not None
        try:
            self._console.write(f"{text}\n")
            self._console.flush()
        except OSError as error:
            raise cannot_be_written(self.path / "console.log", error) from None

    def write_config(self, text: str) -> None:
        """Write config.yaml."""
        if self.rank == 0:
            write_whole(self.path / "config.yaml", text)

    def log(self, row: LogRow, max_steps: int, seconds_left: float | None) -> None:
        """Print a step and add it to log.csv without delay, so that it survives whatever comes next."""
        left = "" if seconds_left is None else f" | {duration(seconds_left)} left"
        self.say(f"step {row.step:{len(str(max_steps))}d}/{max_steps} | loss {row.loss:.4f} | lr {row.lr:.2e} | "
                 f"norm {row.norm:.4f} | dt {row.dt_ms:.2f} ms | {row.tokens_per_sec:,.0f} tokens/s{left}")
        if self.rank == 0:
            append_row(self.path / "log.csv", LOG_COLUMNS, row._asdict())

    def log_evaluation(self, step: int, max_steps: int, val_loss: float) -> None:
        """Print a validation loss and add it to eval.csv."""
        self.say(f"step {step:{len(str(max_steps))}d}/{max_steps} | validation loss {val_loss:.4f}")
        if self.rank == 0:
            append_row(self.path / "eval.csv", EVAL_COLUMNS, {"step": step, "val_loss": val_loss})

    def finish(self, summary: Mapping[str, Any], *, has_checkpoints: bool) -> None:
        """Write summary.json, and print the figures that people look for and what can be done next."""
        if self.rank == 0:
            write_whole(self.path / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
        interrupted, loss, val_loss = summary["interrupted"], summary["final_loss"], summary["val_loss"]
        self.say(f"{'interrupted' if interrupted else 'done'}: {summary['steps']} steps, {summary['tokens']:,} tokens in "
                 f"{duration(summary['seconds'])}; loss {math.nan if loss is None else loss:.4f}"
                 + ("" if val_loss is None else f", validation loss {val_loss:.4f}"))
        self.say(f"median {summary['median_dt_ms']:.2f} ms a step, {summary['median_tokens_per_sec']:,.0f} tokens/s (without the "
                 f"first {summary['median_leaves_out']}); peak memory {summary['peak_memory_mb']:,.0f} MB; "
                 f"{summary['utilization']:.0%} of the {flops_rate(summary['matmul_tflops'])} that a large matrix product reaches "
                 f"here")
        if interrupted and has_checkpoints:
            self.say(f"to go on: the same command with --resume auto, or --resume {self.path}")
        self.say(f"{self.path}/ has log.csv, summary.json, config.yaml and console.log"
                 + (f", and checkpoints/; for text: python sample.py {self.path}" if has_checkpoints else ""))

    # ---- reading

    def rows(self, name: str, columns: Sequence[str]) -> dict[int, Row]:
        """The rows of log.csv or eval.csv by step; none where there is no such file."""
        return read_rows(self.path / name, columns) if (self.path / name).exists() else {}

    def evaluations(self) -> dict[int, float]:
        """The validation losses so far, by step."""
        rows = self.rows("eval.csv", EVAL_COLUMNS)
        return {step: loss for step, row in rows.items() if (loss := row["val_loss"]) is not None}

    def is_finished(self) -> bool:
        """Whether a run has ended here."""
        return (self.path / "summary.json").exists()

    def torchrun_call(self) -> str | None:
        """The call of torchrun that began the run, or went on with it; None without one."""
        path = self.path / ".torchrun"
        return path.read_text() if path.exists() else None


# ---- the CSV files


def read_rows(path: Path, columns: Sequence[str] = LOG_COLUMNS) -> dict[int, Row]:
    """The rows of a log by step. Those that a kill or a disk damaged are left out.

    Raises UserError if the file cannot be read or lacks one of the columns.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    lines = text.rpartition("\n")[0].split("\n")  # a kill may have torn the last line
    header = next(csv.reader(lines[:1]), [])
    if missing := [column for column in columns if column not in header]:
        raise UserError(f"{path}: has no column {missing[0]}; a log has {','.join(columns)}")
    rows = {}
    for line in lines[1:]:
        cells = line.split(",")
        if len(cells) == len(header) and cells[header.index("step")].isdecimal() and all(map(_is_number, cells)):
            row: Row = {column: float(cell) if cell else None for column, cell in zip(header, cells, strict=True)}
            rows[int(cells[header.index("step")])] = row
    return rows


def _is_number(text: str) -> bool:
    try:
        float(text or 0)
    except ValueError:
        return False
    return True


def write_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, float | None]]) -> None:
    """Write a log anew, whole or not at all. Raises OSError that names it."""
    write_whole(path, "".join(f"{line}\n" for line in (",".join(columns), *(_line(columns, row) for row in rows))))


def append_row(path: Path, columns: Sequence[str], row: Mapping[str, float | None]) -> None:
    """Add a row to a log without delay; a new file begins with its header. Raises OSError that names the file."""
    header = "" if path.exists() else ",".join(columns) + "\n"
    try:
        with open(path, "a", newline="", encoding="utf-8") as file:
            file.write(f"{header}{_line(columns, row)}\n")
    except OSError as error:
        raise cannot_be_written(path, error) from None


def _line(columns: Sequence[str], row: Mapping[str, float | None]) -> str:
    cells = []
    for column in columns:
        value = row[column]
        whole = int(value) if column == "step" and value is not None else value
        cells.append("" if whole is None else format(whole, STYLES[column]) if column in STYLES else repr(whole))
    return ",".join(cells)


# ---- the names in checkpoints/


def all_checkpoints(run: Path, name: str = "step") -> list[Path]:
    """The run's checkpoints `<name>_<step>`, by step."""
    return sorted((path for path in (run / "checkpoints").glob(f"{name}_*") if path.name.removeprefix(f"{name}_").isdecimal()),
                  key=step_of)


def step_of(folder: Path) -> int:
    """The step of a checkpoint, by its folder's name."""
    return int(folder.name.rpartition("_")[2])


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    return str(datetime.timedelta(seconds=round(seconds)))
