"""The figures of a run: on the console, in its CSV files, and in trackers.

Nothing here needs torch.
"""

import contextlib
import datetime
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from config import MFU
from run.track import Trackers
from runtime.console import log
from runtime.errors import UserError
from runtime.files import write_atomic, writing
from runtime.report import about

Row = dict[str, float | None]  # a row of a CSV file by column; an empty cell is None
ExtraMetrics = Callable[[float], Mapping[str, float | None]]  # from the step's tokens/s


# step counts from 1; loss is in nats per token; norm is the gradient norm before clipping
LOG_COLUMNS = ("step", "loss", "lr", "norm", "dt_ms", "tokens_per_sec")
# then bits_per_byte, if the vocabulary is known, and hellaswag_acc_norm, if the run is scored
EVAL_COLUMNS = ("step", "val_loss")
# Names in eval.csv of an earlier version, whose acc_norm was per character: the name now
OLD_SCORES = {
    "hellaswag_acc_norm": "hellaswag_acc_chars",
    "hellaswag_acc_token": "hellaswag_acc_norm",
}
COLUMNS = {"log.csv": LOG_COLUMNS, "eval.csv": EVAL_COLUMNS, "metrics.csv": ("step",)}
FORMATS = {"step": ".0f", "dt_ms": ".3f", "tokens_per_sec": ".1f"}  # the rest keep all digits


class RunLog:
    """Context of a run's figures. All ranks have one; only rank 0's writes."""

    def __init__(
        self, path: Path, rank: int = 0, last_step: int | None = None, trackers: Sequence[str] = ()
    ):
        """`last_step`: None if the clock ends the run. `trackers`: names, see `run.track`.

        Raises UserError for a tracker that is not installed.
        """
        self.path, self.rank, self.last_step = path, rank, last_step
        self.trackers = Trackers(trackers if rank == 0 else ())
        self._extra_metrics: ExtraMetrics = lambda tokens_per_sec: {}
        self._timed_from: tuple[int, float] | None = None  # a step, and when it was logged
        self._metric_columns: list[str] = []  # metrics.csv's, once this process has written it

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.trackers.close(failed=kind is not None)

    def open_trackers(self, step: int, config: Mapping[str, Any], extra: ExtraMetrics) -> None:
        """Open the trackers after `step`; `extra` makes figures for them alone."""
        self.trackers.open(self.path, step, config)
        self._extra_metrics = extra

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Print a step's figures and add them to log.csv at once, so that a crash cannot lose them.

        Figures without a column in log.csv are printed at the end of the line and go to
        metrics.csv. The trackers have them all.
        """
        # The mean since the first logged step, which may compile
        self._timed_from = self._timed_from or (step, time.monotonic())
        (first, begun), time_left = self._timed_from, ""
        if self.last_step and first < step < self.last_step:
            each = (time.monotonic() - begun) / (step - first)
            time_left = f" | {duration(each * (self.last_step - step))} left"
        further = {name: figures[name] for name in figures if name not in LOG_COLUMNS}
        log.info(
            f"{self._label(step)} | loss {figures['loss']:.4f} | lr {figures['lr']:.2e} | "
            f"norm {figures['norm']:.4f} | dt {figures['dt_ms']:.2f} ms | "
            f"{figures['tokens_per_sec']:,.0f} tokens/s"
            + "".join(f" | {name} {value:.4g}" for name, value in further.items())
            + time_left
        )
        row = {"step": step, **figures}
        if self.rank == 0:
            append_row(self.path / "log.csv", LOG_COLUMNS, row)
            if further and self._metric_columns:
                append_row(self.path / "metrics.csv", self._metric_columns, row)
            elif further:  # an earlier version of the code may have logged other figures
                self._metric_columns = update(self.path / "metrics.csv", step, further)
        extra = self._extra_metrics(figures["tokens_per_sec"])
        self.trackers.log(step, {**figures, **extra}, "train")

    def log_evaluation(self, step: int, **figures: float) -> None:
        """Print figures of an evaluation and add them to the step's row of eval.csv."""
        text = " | ".join(f"{name} {figure:.4f}" for name, figure in figures.items())
        text = text.replace("val_", "validation ").replace("hellaswag_", "HellaSwag ")
        text = text.replace("bits_per_byte", "bits per byte")
        log.info(f"{self._label(step)} | {text}")
        if self.rank == 0:
            update(self.path / "eval.csv", step, figures)
        self.trackers.log(step, figures, "eval")

    def log_sample(self, step: int, text: str) -> None:
        """Print a sample."""
        log.info(f"sample after step {step}: {text}")
        self.trackers.text(step, "sample", text)

    def _label(self, step: int) -> str:
        last = self.last_step
        return f"step {step:{len(str(last))}d}/{last}" if last else f"step {step}"

    # ---- reading

    def times_and_loss(self) -> tuple[list[float], float]:
        """Return the seconds of the steps in log.csv, and the last one's loss: nan if none."""
        rows = rows_of(self.path / "log.csv").values()
        losses = [math.nan, *self.losses().values()]
        return [row["dt_ms"] / 1e3 for row in rows if row["dt_ms"]], losses[-1]

    def losses(self) -> dict[int, float]:
        """Return the losses in log.csv by step."""
        rows = rows_of(self.path / "log.csv").items()
        return {step: row["loss"] for step, row in rows if row["loss"] is not None}

    def evaluations(self) -> dict[int, dict[str, float]]:
        """Return the figures in eval.csv by step and column."""
        return {
            step: {
                name: figure
                for name, figure in row.items()
                if figure is not None and name != "step"
            }
            for step, row in rows_of(self.path / "eval.csv").items()
        }


def duration(seconds: float) -> str:
    """Return seconds as h:mm:ss, after days if there are any."""
    return str(datetime.timedelta(seconds=round(seconds)))


UNKNOWN = "the device could not be measured, or is too busy with other programs"


def describe_duration(seconds: float | None, shorter: str) -> str:
    """Return a line on how long training takes, estimated at MFU, and a shorter alternative."""
    if seconds is None:
        return f"how long this takes is not known: {UNKNOWN}; shorter: {shorter}"
    return f"takes about {about(seconds)}, at {MFU:.0%} MFU; shorter: {shorter}"


# ---- the CSV files


def keep_rows(run: Path, step: int, to: Path) -> None:
    """Write the logs of a run to the folder `to`, without the rows of steps after `step`.

    Raises UserError for a log that cannot be read.
    """
    for name in COLUMNS:
        if (run / name).exists():
            rows = rows_of(run / name).items()
            rewrite(to / name, {at: row for at, row in rows if at <= step})


def rows_of(path: Path) -> dict[int, Row]:
    """Return the rows of a log by step; none without the file."""
    return read_rows(path, COLUMNS[path.name]) if path.exists() and path.stat().st_size else {}


def update(path: Path, step: int, figures: Mapping[str, float]) -> list[str]:
    """Add figures to a step's row of a log; returns its columns."""
    rows = rows_of(path)
    rows[step] = {**rows.get(step, {}), "step": step, **figures}
    return rewrite(path, rows)


def rewrite(path: Path, rows: Mapping[int, Row]) -> list[str]:
    """Replace a log at once; returns its columns: the required ones and the rows' own."""
    columns = list(dict.fromkeys(chain(COLUMNS[path.name], *rows.values())))
    lines = [",".join(columns), *(_line(columns, row) for row in rows.values())]
    write_atomic(path, "".join(f"{line}\n" for line in lines))
    return columns


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
