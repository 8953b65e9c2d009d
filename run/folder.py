"""A run's folder: made, or continued after a checkpoint's step, or left as it was."""

import contextlib
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from run.log import keep_rows, rewrite
from runtime.console import Console, log
from runtime.errors import UserError, foreseen
from runtime.files import aside, sole_writer
from runtime.signals import Stopped


class RunFolder:
    """Context in which rank 0 of this run alone writes the folder.

    Until `create` or `resume`, nothing is written: a run that cannot start leaves no folder. At an
    error its message goes to console.log; a run that is stopped before its first step leaves an
    earlier run in its place.
    """

    def __init__(self, path: Path, console: Console, advice: Mapping[str, str] = {}):
        """`advice`: messages by kind of failure, see `runtime.errors.reported`."""
        self.path, self._console, self._advice = path, console, advice
        self._lock = contextlib.ExitStack()  # holds the folder's lock
        self._undo = contextlib.ExitStack()  # reverts `create` or `resume`

    def create(self, resumed: Path | None = None, step: int = 0) -> None:
        """Create the folder with an empty log; the folder of an earlier run gets another name.

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
            rewrite(self.path / "log.csv", {})
            if resumed:
                keep_rows(resumed, step, self.path)
            self._console.open(self.path / "console.log")
            if moved_to:
                log.warning(f"the earlier {self.path} is now {moved_to}")
            self._undo = undo.pop_all()

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
        keep_rows(self.path, step, self.path)
        self._console.open(self.path / "console.log")
        (self.path / "summary.json").unlink(missing_ok=True)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_stopped = isinstance(error, Stopped)  # before the first step
        if error is not None and not is_stopped:
            with contextlib.suppress(OSError):  # a full disk may be the error
                message = foreseen(error, str(self.path.parent), self._advice) or error
                for line in str(message).splitlines() or [type(error).__name__]:
                    log.error(line)
        with self._lock:
            if is_stopped:
                self._undo.close()


def how_to_resume(run: Path) -> str:
    """Return the option that resumes from the run's newest checkpoint."""
    return f"to resume: the same command with --resume {shlex.quote(str(run))}"
