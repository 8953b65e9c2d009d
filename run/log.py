"""A run's folder: log.csv, eval.csv, metrics.csv, config.yaml, summary.json, console.log and the
names in checkpoints/. Its figures go to trackers too.

Nothing here needs torch.
"""

import contextlib
import datetime
import io
import json
import math
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from run.track import Trackers
from runtime.errors import UserError, drop_stdout, foreseen
from runtime.files import (
    aside,
    sole_writer,
    write_atomic,
    writing,
)
from runtime.report import flops_rate
from runtime.signals import Stopped

Row = dict[str, float | None]  # a row of a CSV file by column; an empty cell is None
ExtraMetrics = Callable[[float], Mapping[str, float | None]]  # from the step's tokens/s


# step counts from 1; loss is in nats per token; norm is the gradient norm before clipping
LOG_COLUMNS = ("step", "loss", "lr", "norm", "dt_ms", "tokens_per_sec")
EVAL_COLUMNS = ("step", "val_loss")  # then hellaswag_acc_norm, if the run is scored
# Names in eval.csv of an earlier version, whose acc_norm was per character: the name now
OLD_SCORES = {
    "hellaswag_acc_norm": "hellaswag_acc_chars",
    "hellaswag_acc_token": "hellaswag_acc_norm",
}
COLUMNS = {"log.csv": LOG_COLUMNS, "eval.csv": EVAL_COLUMNS, "metrics.csv": ("step",)}
FORMATS = {"step": ".0f", "dt_ms": ".3f", "tokens_per_sec": ".1f"}  # the rest keep all digits


class RunFolder:
    """The folder of a run. All ranks have one; only rank 0's writes and prints.

    Until `create` or `resume`, nothing is written: a run that cannot start leaves no folder.
    """

    def __init__(
        self,
        path: Path,
        rank: int = 0,
        advice: Mapping[str, str] = {},
        trackers: Sequence[str] = (),
    ):
        """`advice`: messages for console.log by kind of failure, see `runtime.errors.reported`.
        `trackers`: names, see `open_trackers`.

        Raises UserError for a tracker that is not installed.
        """
        self.path, self.rank, self._advice = path, rank, advice
        self._started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._trackers = Trackers(trackers if rank == 0 else ())
        self._extra_metrics: ExtraMetrics = lambda tokens_per_sec: {}
        self._resumed_after = 0
        self._timed_from: tuple[int, float] | None = None  # a step, and when it was logged
        self._metric_columns: list[str] = []  # metrics.csv's, once this process has written it
        self._lock = contextlib.ExitStack()  # holds the folder's lock
        self._undo = contextlib.ExitStack()  # reverts `create` or `resume`
        self._console: TextIO = io.StringIO()  # until console.log is open

    # ---- starting and ending, on rank 0

    def create(self, resumed: Path | None = None, step: int = 0) -> Path | None:
        """Create the folder with an empty log; return the new name of an earlier run's folder.

        `resumed`: the folder of a run that continues in this one after `step`; its logs are copied.
        Raises UserError if another process is writing to the folder. If the new one cannot be
        created, the earlier one stays as it was.
        """
        self._lock.enter_context(sole_writer(self.path))
        moved_to = None
        with contextlib.ExitStack() as undo:
            if self.path.exists():
                if any(self.path.glob("*")) and not (self.path / "log.csv").exists():
                    raise UserError(
                        f"{self.path}: is not the folder of a run; choose another run_name"
                    )
                moved_to = aside(self.path)
                self.path.rename(moved_to)
                undo.callback(moved_to.rename, self.path)
            undo.callback(shutil.rmtree, self.path, ignore_errors=True)
            self.path.mkdir()
            self._rewrite("log.csv", {})
            if resumed:
                self._keep_rows(resumed, step)
            self._open_console()
            self._undo = undo.pop_all()
        return moved_to

    def resume(self, step: int) -> None:
        """Continue the folder after `step`: remove the rows of later steps from its logs.

        First, as the disk may be full, leftovers of interrupted saves are deleted. Raises UserError
        if another process is writing to the folder, or if a log cannot be read.
        """
        self._lock.enter_context(sole_writer(self.path))
        for file in (self.path / "config.yaml", self.path / "summary.json"):
            if file.exists():
                self._undo.callback(file.write_bytes, file.read_bytes())
        for leftover in (self.path / "checkpoints").glob(".*.unfinished"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._keep_rows(self.path, step)
        self._open_console()
        (self.path / "summary.json").unlink(missing_ok=True)

    def _keep_rows(self, run: Path, step: int) -> None:
        """Write the logs with the rows of a run's logs, without those of steps after `step`."""
        self._resumed_after = step
        for name in COLUMNS:
            if (run / name).exists():
                rows = self._rows(name, run).items()
                self._rewrite(name, {at: row for at, row in rows if at <= step})

    def _open_console(self) -> None:
        early = self._console
        self._console = open(self.path / "console.log", "a", encoding="utf-8", errors="replace")  # noqa: SIM115
        early.seek(0)
        for line in early:
            self._write(line.rstrip("\n"))

    def close(self, *, undo: bool = False) -> None:
        """Close the files and let other processes write to the folder.

        `undo`: the run does not start, so revert `create`: an earlier run gets its name back.
        """
        with self._lock:
            with contextlib.suppress(OSError):  # a full disk was an error before
                self._console.close()
            if undo:
                self._undo.close()

    def __enter__(self) -> "RunFolder":
        self._begun = time.monotonic()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_stopped = isinstance(error, Stopped)  # before the first step
        if error is not None and not is_stopped:
            with contextlib.suppress(OSError):  # a full disk may be the error
                message = foreseen(error, str(self.path.parent), self._advice) or error
                for line in str(message).splitlines() or [type(error).__name__]:
                    self._write(f"error: {line}")  # the command prints it at its end
        try:
            self._trackers.close(failed=error is not None)
        finally:
            self.close(undo=is_stopped)

    # ---- writing, on all ranks

    def open_trackers(
        self, config: Mapping[str, Any], extra_metrics: Callable[[], ExtraMetrics]
    ) -> None:
        """Open the trackers. `extra_metrics()` makes the function of figures for them alone."""
        if self._trackers.names:
            self._extra_metrics = extra_metrics()
            self._trackers.open(self.path, self._resumed_after, config, self.message)

    def message(self, *texts: str) -> None:
        """Print texts, each in lines of its own, and keep them in console.log.

        The run continues if stdout is closed or full. A console.log that cannot be written raises
        OSError.
        """
        text = "\n".join(texts)
        if self.rank or not text:
            return
        try:
            print(text, flush=True)
        except OSError:
            drop_stdout()
        self._write(text)

    def _write(self, text: str) -> None:
        with writing(self.path / "console.log"):
            print(text, file=self._console, flush=True)

    def log(self, step: int, last_step: int | None, figures: Mapping[str, float]) -> None:
        """Print a step's figures and add them to log.csv at once, so that a crash cannot lose them.

        `last_step` is None if the clock ends the run. Figures go to the trackers too, and those
        without a column in log.csv to metrics.csv.
        """
        # The mean since the first logged step, which may compile
        self._timed_from = self._timed_from or (step, time.monotonic())
        (first, begun), time_left = self._timed_from, ""
        if last_step and first < step < last_step:
            each = (time.monotonic() - begun) / (step - first)
            time_left = f" | {duration(each * (last_step - step))} left"
        self.message(
            f"{_step_label(step, last_step)} | loss {figures['loss']:.4f} | "
            f"lr {figures['lr']:.2e} | norm {figures['norm']:.4f} | dt {figures['dt_ms']:.2f} ms | "
            f"{figures['tokens_per_sec']:,.0f} tokens/s{time_left}"
        )
        row = {"step": step, **figures}
        further = {name: figures[name] for name in figures if name not in LOG_COLUMNS}
        if self.rank == 0:
            append_row(self.path / "log.csv", LOG_COLUMNS, row)
            if further and self._metric_columns:
                append_row(self.path / "metrics.csv", self._metric_columns, row)
            elif further:  # an earlier version of the code may have logged other figures
                self._metric_columns = self._update("metrics.csv", step, further)
        extra = self._extra_metrics(figures["tokens_per_sec"])
        self._trackers.log(step, {**figures, **extra}, "train")

    def log_evaluation(self, step: int, last_step: int | None, **figures: float) -> None:
        """Print figures of an evaluation and add them to the step's row of eval.csv."""
        text = " | ".join(f"{name} {figure:.4f}" for name, figure in figures.items())
        text = text.replace("val_", "validation ").replace("hellaswag_", "HellaSwag ")
        self.message(f"{_step_label(step, last_step)} | {text}")
        if self.rank == 0:
            self._update("eval.csv", step, figures)
        self._trackers.log(step, figures, "eval")

    def _update(self, name: str, step: int, figures: Mapping[str, float]) -> list[str]:
        """Add figures to a step's row of a CSV file; returns its columns."""
        rows = self._rows(name)
        rows[step] = {**rows.get(step, {}), "step": step, **figures}
        return self._rewrite(name, rows)

    def _rewrite(self, name: str, rows: Mapping[int, Row]) -> list[str]:
        """Replace a CSV file at once; returns its columns: the required ones and the rows' own."""
        columns = list(dict.fromkeys(chain(COLUMNS[name], *rows.values())))
        lines = [",".join(columns), *(_line(columns, row) for row in rows.values())]
        write_atomic(self.path / name, "".join(f"{line}\n" for line in lines))
        return columns

    def log_sample(self, step: int, text: str) -> None:
        """Print a sample."""
        self.message(f"sample after step {step}: {text}")
        self._trackers.text(step, "sample", text)

    def finish(self, summary: Mapping[str, Any], *, has_checkpoints: bool) -> dict[str, Any]:
        """Write summary.json, and print the main figures and the next commands.

        Returns the summary, with the run's start and duration.
        """
        summary = {**summary, "started": self._started, "seconds": time.monotonic() - self._begun}
        if self.rank == 0:
            text = json.dumps(summary, indent=1, allow_nan=False)
            write_atomic(self.path / "summary.json", f"{text}\n")
        self.message(*describe_summary(summary))
        if summary["interrupted"] and has_checkpoints:
            self.message(self.how_to_resume())
        files = f"{self.path}/ has log.csv, summary.json, config.yaml and console.log"
        if has_checkpoints:
            sample = f"python sample.py {shlex.quote(str(self.path))}"
            files += f", and checkpoints/; for text: {sample}"
        self.message(files)
        return summary

    def how_to_resume(self) -> str:
        """Return the option that resumes from the run's newest checkpoint."""
        run = shlex.quote(str(self.path))
        return f"to resume: the same command with --resume {run}"

    # ---- reading

    def _rows(self, name: str, run: Path | None = None) -> dict[int, Row]:
        path = (run or self.path) / name
        return read_rows(path, COLUMNS[name]) if path.exists() and path.stat().st_size else {}

    def times_and_loss(self) -> tuple[list[float], float]:
        """Return the seconds of the steps in log.csv, and the last one's loss: nan if none."""
        rows = self._rows("log.csv").values()
        losses = [math.nan, *self.losses().values()]
        return [row["dt_ms"] / 1e3 for row in rows if row["dt_ms"]], losses[-1]

    def losses(self) -> dict[int, float]:
        """Return the losses in log.csv by step."""
        rows = self._rows("log.csv").items()
        return {step: row["loss"] for step, row in rows if row["loss"] is not None}

    def evaluations(self) -> dict[int, dict[str, float]]:
        """Return the figures in eval.csv by step and column."""
        return {
            step: {
                name: figure
                for name, figure in row.items()
                if figure is not None and name != "step"
            }
            for step, row in self._rows("eval.csv").items()
        }


def _step_label(step: int, last_step: int | None) -> str:
    return f"step {step:{len(str(last_step))}d}/{last_step}" if last_step else f"step {step}"


def describe_summary(summary: Mapping[str, Any]) -> list[str]:
    """Return two lines on a run: its steps and losses, and its speed."""
    steps, this_call = summary["steps"], summary["steps_this_call"]
    loss, val_loss = summary["final_loss"], summary["val_loss"]
    result = (
        f"{'interrupted' if summary['interrupted'] else 'done'}: {steps} steps, "
        f"{summary['tokens']:,} tokens"
        f"{'' if this_call == steps else f', {this_call} of these steps in this call,'} in "
        f"{duration(summary['seconds'])}; loss {math.nan if loss is None else loss:.4f}"
    )
    if val_loss is not None:
        result += f", validation loss {val_loss:.4f}"
    mfu = "no MFU, as other programs kept the device too busy to time a matmul"
    if summary["utilization"]:
        rate = flops_rate(summary["matmul_tflops"])
        mfu = f"MFU {summary['utilization']:.0%} of the {rate} that a large matmul reaches here"
    return [
        result,
        f"median {summary['median_dt_ms']:.2f} ms a step, "
        f"{summary['median_tokens_per_sec']:,.0f} tokens/s (without the first "
        f"{summary['median_leaves_out']}); peak memory {summary['peak_memory_mb']:,.0f} MB; {mfu}",
    ]


# ---- the CSV files


def read_rows(path: Path, required: Sequence[str] = LOG_COLUMNS) -> dict[int, Row]:
    """Read the rows of a log by step, without lines that a kill or a disk damaged.

    Raises UserError if the file cannot be read or lacks one of the required columns.
    """
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")  # an editor may add a BOM
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    complete = text[: text.rfind("\n") + 1]  # a kill may have torn the last line
    header, *lines = (complete or "\n").splitlines()
    names = header.split(",")
    if "hellaswag_acc_token" in names:  # an earlier version had four scores
        names = [OLD_SCORES.get(name, name) for name in names]
    if missing := [column for column in required if column not in names]:
        raise UserError(f"{path}: has no column {missing[0]}; a log has {','.join(required)}")
    rows: dict[int, Row] = {}
    for line in lines:
        with contextlib.suppress(ValueError, OverflowError):
            cells = [float(cell) if cell else None for cell in line.split(",")]
            row = dict(zip(names, cells, strict=True))
            rows[int(row["step"] or 0)] = row
    return rows


def append_row(path: Path, columns: Sequence[str], row: Mapping[str, float | None]) -> None:
    """Add a row to a log at once. Raises OSError that names the file."""
    with writing(path), open(path, "a", newline="", encoding="utf-8") as file:
        file.write(f"{_line(columns, row)}\n")


def _line(columns: Sequence[str], row: Mapping[str, float | None]) -> str:
    values = [(row.get(column), FORMATS.get(column, "")) for column in columns]
    return ",".join("" if value is None else format(value, style) for value, style in values)


def duration(seconds: float) -> str:
    """Return seconds as h:mm:ss, after days if there are any."""
    return str(datetime.timedelta(seconds=round(seconds)))
