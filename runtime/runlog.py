"""A run's folder: log.csv, eval.csv, config.yaml, summary.json, console.log and checkpoints/; and
the trackers that follow it.

Nothing here needs torch.
"""

import contextlib
import datetime
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import filelock

from runtime.errors import UserError, drop_unread, foreseen
from runtime.files import (
    aside,
    cannot_be_written,
    delete,
    delete_empty,
    locked,
    missing_parents,
    write_whole,
)
from runtime.report import flops_rate
from runtime.signals import Stopped
from runtime.track import Trackers

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
EVAL_COLUMNS = ("step", "val_loss")  # and those of other evaluations, where a run has any
STYLES = {
    "step": "d",
    "dt_ms": ".3f",
    "tokens_per_sec": ".1f",
}  # every other column is written to the last digit
STEP = r"[0-9]{1,18}"  # what a step looks like
START_PATIENCE = 60.0  # seconds that a run waits for another one to begin


class RunFolder:
    """The folder of a run. Every process has one; rank 0's writes, and prints what is said, and the
    others' do nothing.

    Until `begin` or `go_on`, nothing is written: a run that cannot start leaves no folder.
    """

    def __init__(
        self,
        path: Path,
        rank: int = 0,
        advice: Mapping[str, str] | None = None,
        trackers: Sequence[str] = (),
    ):
        """`advice`: what console.log says at kinds of failure, see runtime/errors.py's `reported`.
        `trackers`: see `follow`.

        Raises UserError for a tracker that is not installed.
        """
        self.path, self.rank, self._advice = path, rank, advice or {}
        self._trackers = Trackers(trackers if rank == 0 else (), self.message)
        self._live: Callable[[float], Mapping[str, float]] = lambda _: {}
        self._after_step = 0  # the run goes on
        self._timed_from: tuple[int, float] | None = None  # step, and when it was logged
        self.not_logged: LogRow | None = (
            None  # a row that log.csv did not take: a checkpoint keeps it
        )
        self._lock = filelock.FileLock(path / ".lock", timeout=0)
        self._made = False  # by `begin`
        self._made_for_it: list[Path] = []  # the folders above it
        self._aside: Path | None = None
        self._console: TextIO | None = None
        self._said_before: list[str] = []  # before console.log is there
        self._console_failed = self._print_failed = False

    # ---- starting and ending: called on rank 0 only

    def begin(self) -> Path | None:
        """Create the folder with an empty log; returns where an earlier run of that name was moved
        aside to.

        Raises UserError if another process is writing to the folder. If it cannot be created, all
        is as it was.
        """
        for folder, option in ((self.path.parent, "log_dir"), (self.path, "run_name")):
            if os.path.lexists(folder) and not folder.is_dir():
                raise UserError(
                    f"{folder}: is there and is no folder; move it away or choose another "
                    f"--{option}"
                )
        self._made_for_it = missing_parents(self.path)
        with self._starting():
            try:
                if self.path.exists():
                    self._hold("wait for it or choose another --run_name")
                    self._lock.release()  # Windows moves no folder in which a file is open
                    self._aside = aside(
                        self.path
                    )  # known before: a signal may come as the folder has just been moved
                    try:
                        self.path.rename(self._aside)
                    except OSError as error:  # such as a mount point, or a name that gets too long
                        raise OSError(
                            error.errno,
                            f"cannot be moved aside: {error.strerror}; choose another --run_name",
                            str(self.path),
                        ) from None
                self.path.mkdir(parents=True)
                self._made = True
                self._hold("wait for it or choose another --run_name")
                write_rows(self.path / "log.csv", LOG_COLUMNS, [])
                self._open()
            except BaseException:
                self.abandon()
                raise
        return self._aside

    def abandon(self) -> None:
        """Undo `begin`: the run cannot start. An earlier run that was moved aside gets its name
        back.
        """
        with self._starting():
            self.close()
            if self._made:
                shutil.rmtree(self.path, ignore_errors=True)
            delete_empty([self.path])  # a signal may have come as it had just been made
            if self._aside:
                with contextlib.suppress(
                    OSError
                ):  # what made the run fail is told, and this is seen
                    self._aside.rename(self.path)
            self._made, self._aside = False, None
        delete_empty(self._made_for_it)

    def go_on(
        self,
        step: int,
        log_every: int,
        whole: Path | None = None,
        keep_last: int = 0,
        not_logged: LogRow | None = None,
    ) -> list[str]:
        """Take up the folder after `step`: the rows of later steps leave its log, as those steps
        are taken again, and the one that it did not take before is added.

        First, as the disk may be full, what an interrupted save has left is deleted, and the
        checkpoints that `keep_last` does not keep (0: none of them), but never `whole`, the one to
        go on from. Returns notes for the user. Raises UserError if another process is writing to
        the folder, or has moved it aside, or if a log cannot be read.
        """
        with self._starting():
            if not (whole or self.path).is_dir():
                raise UserError(
                    f"{whole or self.path}: is gone: the run was moved aside or deleted at this "
                    f"moment; start again"
                )
            self._hold("wait for it")
        self._after_step = step
        try:
            return self._take_up(step, log_every, whole, keep_last, not_logged)
        except BaseException:
            self.close()
            raise

    def _take_up(
        self,
        step: int,
        log_every: int,
        whole: Path | None,
        keep_last: int,
        not_logged: LogRow | None,
    ) -> list[str]:
        notes = []
        for leftover in (self.path / "checkpoints").glob(
            "*.tmp"
        ):  # of a save that a kill interrupted
            shutil.rmtree(leftover, ignore_errors=True)
        if keep_last:
            delete(not_kept(self.path, keep_last, before=step + 1, whole=whole))
        for name, columns in (("log.csv", LOG_COLUMNS), ("eval.csv", EVAL_COLUMNS)):
            rows, damaged = self._rows(name, columns)
            # what a kill tore is a row of a later step, or has no number; so it is taken again
            lost = [
                line
                for line, text, torn in damaged
                if (int(found[1]) <= step if (found := re.match(f"({STEP}),", text)) else not torn)
            ]
            if lost:
                which = (
                    f"line {lost[0]} is"
                    if len(lost) == 1
                    else f"lines {', '.join(map(str, lost))} are"
                )
                notes.append(f"{self.path / name}: {which} damaged and left out")
            if name == "log.csv" and not_logged:
                rows.setdefault(not_logged.step, not_logged._asdict())
            kept = [row for at, row in rows.items() if at <= step]
            if name == "log.csv" and step and not kept:
                notes.append(
                    f"{self.path / name}: has no rows of steps 1 to {step}: it begins after them"
                )
            only_as_last = step > 1 and step % log_every and kept and kept[-1]["step"] == step
            if (
                name == "log.csv"
                and only_as_last
                and all(math.isfinite(kept[-1][key] or 0) for key in ("loss", "lr", "norm"))
            ):
                # logged because the run ended there; a step that was left out is logged in any case
                kept.pop()
            if name == "log.csv" or kept:
                write_rows(
                    self.path / name,
                    columns if name == "log.csv" else _columns(columns, kept),
                    kept,
                )
            else:
                (self.path / name).unlink(missing_ok=True)
        self._open()
        (self.path / "summary.json").unlink(missing_ok=True)
        return notes

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """No other run begins, or is taken up, in the same log_dir meanwhile: it could move this
        folder aside, or be moved aside itself after it has found its folder. May be entered again.
        Where nothing was begun, nothing is left. Raises UserError if the others take too long.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path.parent / ".begin.lock", START_PATIENCE))
            except filelock.Timeout:
                raise UserError(
                    f"{self.path.parent}: another process has been about to begin a run here for "
                    f"{START_PATIENCE:g} s; "
                    f"try again, or end it if it hangs"
                ) from None
            # no new file can be made here: then no run begins here either, and this one says why
            except OSError:
                pass
            yield

    def _hold(self, hint: str) -> None:
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise UserError(f"{self.path}: another process is writing this run; {hint}") from None
        except OSError as error:
            raise cannot_be_written(self.path / ".lock", error) from None

    def _open(self) -> None:
        self._console = open(self.path / "console.log", "a", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed by close
        for text in self._said_before:
            self._write(text)

    def close(self) -> None:
        """Let other processes write to the folder."""
        try:
            self._trackers.close(failed=True)  # unless `finish` has closed them
        finally:
            if self._console:
                with contextlib.suppress(
                    OSError
                ):  # what a full disk did not take has been an error before
                    self._console.close()
                self._console = None
            self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if (
            isinstance(error, Stopped) and self._made
        ):  # before the first step: there is nothing to keep
            self.abandon()
        elif self._console and error is not None:
            with contextlib.suppress(OSError):  # a full disk may be the error
                said = foreseen(error, str(self.path.parent), self._advice) or error
                for line in str(said).splitlines() or [type(error).__name__]:
                    self._console.write(f"error: {line}\n")  # the command prints it when it ends
        self.close()

    # ---- writing: called on every process

    def follow(
        self, config: Mapping[str, Any], live: Callable[[], Callable[[float], Mapping[str, float]]]
    ) -> None:
        """Open the trackers, if there are any, and hand them what the logs have and they lack.

        `live()` returns what tells further figures of a step that has just ended, given its
        tokens/s.
        """
        if not self._trackers.names:
            return
        self._live = live()
        self._trackers.open(self.path, self._after_step, config)
        rows = {
            "train": self.rows("log.csv", LOG_COLUMNS),
            "eval": self.rows("eval.csv", EVAL_COLUMNS),
        }
        for step in sorted({*rows["train"], *rows["eval"]}):
            for group, of_step in rows.items():
                self._trackers.log(step, of_step.get(step, {}), group)

    def message(self, text: str) -> None:
        """Print, and keep in console.log. That nobody reads what is printed is no error; a
        console.log that cannot be written is one, once. Raises OSError that names it.
        """
        if self.rank == 0:
            try:
                print(text, flush=True)
            except OSError as error:
                drop_unread(sys.stdout)
                if not self._print_failed:
                    text += f"\nnote: what is printed goes nowhere ({error.strerror}); the run goes on, and console.log has it all"
                self._print_failed = True
            if self._console:
                self._write(text)
            else:
                self._said_before.append(text)

    def _write(self, text: str) -> None:
        if self._console_failed:  # this has been an error already
            return
        try:
            assert self._console is not None
            self._console.write(f"{text}\n")
            self._console.flush()
        except OSError as error:
            self._console_failed = True
            raise cannot_be_written(self.path / "console.log", error) from None

    def write_calls(self, calls: Sequence[str]) -> None:
        """Write which calls of torchrun the run is of, for the processes that these start again
        after a fault.
        """
        if self.rank == 0 and calls:
            write_whole(self.path / ".torchrun", "".join(f"{call}\n" for call in calls))

    def write_config(self, text: str) -> None:
        """Write config.yaml."""
        if self.rank == 0:
            write_whole(self.path / "config.yaml", text)

    def log(self, row: LogRow, max_steps: int) -> None:
        """Print a step and add it to log.csv without delay, so that it survives whatever comes
        next.
        """
        self.not_logged = row
        left = self._time_left(row.step, max_steps)
        self.message(
            f"step {row.step:{len(str(max_steps))}d}/{max_steps} | loss {row.loss:.4f} | lr "
            f"{row.lr:.2e} | "
            f"norm {row.norm:.4f} | dt {row.dt_ms:.2f} ms | {row.tokens_per_sec:,.0f} "
            f"tokens/s{left}"
        )
        if self.rank == 0:
            append_row(self.path / "log.csv", LOG_COLUMNS, row._asdict())
        self.not_logged = None
        self._trackers.log(row.step, {**row._asdict(), **self._live(row.tokens_per_sec)}, "train")

    def _time_left(self, step: int, max_steps: int) -> str:
        """Return the time left by the steps since the first logged one, which compiles."""
        self._timed_from = self._timed_from or (step, time.monotonic())
        first, begun = self._timed_from
        if step == first or step >= max_steps:
            return ""
        seconds = (time.monotonic() - begun) / (step - first) * (max_steps - step)
        return f" | {duration(seconds)} left"

    def log_evaluation(self, step: int, max_steps: int, **figures: float) -> None:
        """Print figures of an evaluation, by column of eval.csv, and add them there to the step's
        row.
        """
        said = (
            f"{name.replace('val_', 'validation ').replace('hellaswag_', 'HellaSwag ')} "
            f"{figure:.4f}"
            for name, figure in figures.items()
        )
        self.message(f"step {step:{len(str(max_steps))}d}/{max_steps} | {' | '.join(said)}")
        if self.rank == 0:
            path, rows = self.path / "eval.csv", self.rows("eval.csv", EVAL_COLUMNS)
            row: Row = {"step": step, **figures}
            columns = _columns(EVAL_COLUMNS, [*rows.values(), row])
            if step in rows or (rows and columns != _columns(EVAL_COLUMNS, rows.values())):
                write_rows(path, columns, [*(rows | {step: rows.get(step, {}) | row}).values()])
            else:
                append_row(path, columns, row)
        self._trackers.log(step, figures, "eval")

    def log_sample(self, step: int, text: str) -> None:
        """Print a sample."""
        self.message(f"sample after step {step}: {text}")
        self._trackers.text(step, "sample", text)

    def finish(self, summary: Mapping[str, Any], *, has_checkpoints: bool) -> None:
        """Write summary.json, and print the figures that people look for and what can be done next."""
        if self.rank == 0:
            write_whole(
                self.path / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n"
            )
        interrupted, loss, val_loss = (
            summary["interrupted"],
            summary["final_loss"],
            summary["val_loss"],
        )
        steps, steps_this_call = summary["steps"], summary["steps_this_call"]
        in_this_call = (
            "" if steps_this_call == steps else f", {steps_this_call} of these steps in this call,"
        )
        self.message(
            f"{'interrupted' if interrupted else 'done'}: {steps} steps, {summary['tokens']:,} "
            f"tokens{in_this_call} in "
            f"{duration(summary['seconds'])}; loss {math.nan if loss is None else loss:.4f}"
            + ("" if val_loss is None else f", validation loss {val_loss:.4f}")
        )
        if summary["median_dt_ms"] is None:
            self.message(
                "how long a step took is not known: the log has no rows, and there was no step "
                "to take"
            )
        else:
            self.message(
                f"median {summary['median_dt_ms']:.2f} ms a step, "
                f"{summary['median_tokens_per_sec']:,.0f} tokens/s (without "
                f"the first {summary['median_leaves_out']}); peak memory "
                f"{summary['peak_memory_mb']:,.0f} MB; "
                f"{summary['utilization']:.0%} of the {flops_rate(summary['matmul_tflops'])} "
                f"that a large matrix product "
                f"reaches here"
            )
        if interrupted and has_checkpoints:
            self.message(self.how_to_go_on())
        self.message(
            f"{self.path}/ has log.csv, summary.json, config.yaml and console.log"
            + (
                f", and checkpoints/; for text: python sample.py {shlex.quote(str(self.path))}"
                if has_checkpoints
                else ""
            )
        )
        self._trackers.close()

    def how_to_go_on(self) -> str:
        """What to type to go on from the run's newest checkpoint."""
        return f"to go on: the same command with --resume auto, or --resume {shlex.quote(str(self.path))}"

    # ---- reading

    def rows(self, name: str, columns: Sequence[str]) -> dict[int, Row]:
        """The rows of log.csv or eval.csv by step; none where there is no such file."""
        return self._rows(name, columns)[0]

    def _rows(
        self, name: str, columns: Sequence[str]
    ) -> tuple[dict[int, Row], list[tuple[int, str, bool]]]:
        path = self.path / name
        return _read(path, columns) if path.exists() and path.stat().st_size else ({}, [])

    def times_and_loss(self) -> tuple[list[float], float]:
        """The seconds of the steps in log.csv, and the last one's loss: nan if there is none."""
        rows = [*self.rows("log.csv", LOG_COLUMNS).values()]
        return [(row["dt_ms"] or 0.0) / 1e3 for row in rows], (
            rows[-1]["loss"] if rows else None
        ) or math.nan

    def evaluations(self) -> tuple[dict[int, float], dict[int, dict[str, float]]]:
        """The validation losses so far, and HellaSwag's scores, by step."""
        rows = self.rows("eval.csv", EVAL_COLUMNS)
        losses = {step: loss for step, row in rows.items() if (loss := row["val_loss"]) is not None}
        scores = {
            step: {
                name: figure
                for name, figure in row.items()
                if name.startswith("hellaswag_") and figure is not None
            }
            for step, row in rows.items()
        }
        return losses, {step: found for step, found in scores.items() if found}

    def is_finished(self) -> bool:
        """Whether a run has ended here."""
        return (self.path / "summary.json").exists()

    def torchrun_calls(self) -> set[str]:
        """The calls of torchrun, one on each machine, that began the run, or went on with it; none
        without torchrun.
        """
        path = self.path / ".torchrun"
        return set(path.read_text().splitlines()) if path.exists() else set()


# ---- the CSV files


def read_rows(path: Path, columns: Sequence[str] = LOG_COLUMNS) -> dict[int, Row]:
    """The rows of a log by step. Those that a kill or a disk damaged are left out.

    Raises UserError if the file cannot be read or lacks one of the columns.
    """
    return _read(path, columns)[0]


def curve(rows: Mapping[int, Row], column: str = "loss") -> tuple[list[int], list[Any]]:
    """The steps at which a log has a value in the column, and the values."""
    found = {step: row[column] for step, row in rows.items() if row[column] is not None}
    return list(found), list(found.values())


def _read(path: Path, columns: Sequence[str]) -> tuple[dict[int, Row], list[tuple[int, str, bool]]]:
    """The rows of a log by step; and the damaged lines: their numbers, their text, and whether it
    is the torn last one.
    """
    try:
        text = path.read_text(
            encoding="utf-8-sig", errors="replace"
        )  # an editor may have put a mark first
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    *lines, torn = text.split("\n")  # a kill may have torn the last line
    header = lines[0].rstrip("\r").split(",") if lines else []
    if missing := [column for column in columns if column not in header]:
        raise UserError(f"{path}: has no column {missing[0]}; a log has {','.join(columns)}")
    rows: dict[int, Row] = {}
    damaged = [(len(lines) + 1, torn, True)] if torn else []
    for number, line in enumerate(lines[1:], 2):
        cells = line.split(",")
        if (
            len(cells) == len(header)
            and re.fullmatch(STEP, cells[header.index("step")])
            and all(map(_is_number, cells))
        ):
            row: Row = {
                column: float(cell) if cell else None
                for column, cell in zip(header, cells, strict=True)
            }
            rows[int(cells[header.index("step")])] = row
        elif line:
            damaged.append((number, line, False))
    return rows, damaged


def _is_number(text: str) -> bool:
    try:
        float(text or 0)
    except ValueError:
        return False
    return True


def write_rows(
    path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, float | None]]
) -> None:
    """Write a log anew, whole or not at all. Raises OSError that names it."""
    write_whole(
        path,
        "".join(
            f"{line}\n" for line in (",".join(columns), *(_line(columns, row) for row in rows))
        ),
    )


def _columns(first: Sequence[str], rows: Iterable[Mapping[str, float | None]]) -> list[str]:
    """The columns of a file with these rows, of which it has `first` in any case."""
    return [*dict.fromkeys([*first, *(name for row in rows for name in row)])]


def append_row(path: Path, columns: Sequence[str], row: Mapping[str, float | None]) -> None:
    """Add a row to a log without delay; a new file begins with its header. Raises OSError that
    names the file.
    """
    try:
        header = "" if path.exists() else ",".join(columns) + "\n"
        with open(path, "a", newline="", encoding="utf-8") as file:
            file.write(f"{header}{_line(columns, row)}\n")
    except OSError as error:
        raise cannot_be_written(path, error) from None


def _line(columns: Sequence[str], row: Mapping[str, float | None]) -> str:
    cells = []
    for column in columns:
        value = row.get(column)
        whole = int(value) if column == "step" and value is not None else value
        cells.append(
            ""
            if whole is None
            else format(whole, STYLES[column])
            if column in STYLES
            else repr(whole)
        )
    return ",".join(cells)


# ---- the names in checkpoints/


def all_checkpoints(run: Path, name: str = "step") -> list[Path]:
    """The run's checkpoints `<name>_<step>`, by step.

    Raises OSError, naming it, if checkpoints/ is there and cannot be read: what cannot be seen is
    not taken for nothing.
    """
    folder = run / "checkpoints"
    try:
        names = os.listdir(folder)
    except OSError as error:
        if (
            isinstance(error, FileNotFoundError) and not folder.is_symlink()
        ):  # a link may lead to a disk that is not there now
            return []
        raise OSError(error.errno, f"cannot be read: {error.strerror}", str(folder)) from None
    return sorted(
        (folder / other for other in names if re.fullmatch(rf"{name}_\d+", other)), key=step_of
    )


def not_kept(run: Path, keep: int, *, before: int, whole: Path | None) -> list[Path]:
    """The run's checkpoints that go if the `keep` newest of those before a step stay, and `whole`
    in any case.

    Checkpoints of that step or later do not count: they are damaged, else the run would have gone
    on from them.
    """
    counted = [path for path in all_checkpoints(run) if step_of(path) < before]
    return [
        path
        for path in counted[: max(len(counted) - keep, 0)]
        if whole is None or path.name != whole.name
    ]


def step_of(folder: Path) -> int:
    """The step of a checkpoint, by its folder's name."""
    return int(folder.name.rpartition("_")[2])


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss, and as `over 1,000 days` where that says enough."""
    return (
        "over 1,000 days"
        if seconds > 1000 * 86400
        else str(datetime.timedelta(seconds=round(seconds)))
    )
