"""A run's figures in the tools that people watch runs with: TensorBoard, and Weights & Biases
(W&B).

Their packages are optional (requirements-track.txt) and imported only by a run that asks for them.
log.csv and eval.csv stay what counts: a tracker that fails, or does not answer, is left out with a
note, and the run goes on.
"""

import contextlib
import html
import importlib.util
import os
import queue
import secrets
import shlex
import socket
import struct
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from runtime.errors import UserError, in_a_line

TO_INSTALL = "pip install -r requirements-track.txt"
PATIENCE = {"open": 90.0, "log": 10.0, "close": 60.0}  # seconds that a run waits for W&B
EVENTS = "events.out.tfevents"  # how a name begins that TensorBoard takes for its own


class Tracker(Protocol):
    """What a run tells a tracker. Any of these may raise any Exception."""

    def lacks(self, name: str, step: int) -> bool:
        """Whether the tracker has not got the figure of this step from an earlier call of the run."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add figures of a step to their curves."""

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text that belongs to a step."""

    def close(self, failed: bool) -> None:
        """Write all that is left; `failed`: whether the run has."""

    def abandon(self) -> None:
        """Let go of the tracker after it has raised something, without waiting for it."""


class Trackers:
    """The trackers of a run, by name: `tensorboard`, `wandb`. Nothing raises but the constructor:
    what fails is said once.
    """

    def __init__(self, names: Sequence[str], say: Callable[[str], None]):
        """Raises UserError for one that is not installed."""
        if missing := [name for name in names if not is_installed(name)]:
            raise UserError(
                "\n".join(
                    f"{name}: the package is not installed; install it with `{TO_INSTALL}`, or "
                    f"go without: "
                    f"--no-{name}"
                    for name in missing
                )
            )
        self.names, self._say, self._open = names, say, dict[str, Tracker]()

    def open(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        """Open the trackers of the run in this folder, which goes on after `step` (0: begins)."""
        kinds: dict[str, Callable[[], Tracker]] = {
            "tensorboard": lambda: TensorBoard(folder, step, config, self._say),
            "wandb": lambda: WandB(folder, config, self._say),
        }
        for name in self.names:
            with self._left_out_if_it_fails(name):
                self._open[name] = kinds[name]()

    def log(self, step: int, figures: Mapping[str, float | None], group: str) -> None:
        """Hand on what is known of a step, as `group/name`, to those that lack it."""
        for name, tracker in list(self._open.items()):
            with self._left_out_if_it_fails(name):
                tracker.log(
                    step,
                    {
                        tag: value
                        for key, value in figures.items()
                        if key != "step"
                        and value is not None
                        and tracker.lacks(tag := f"{group}/{key}", step)
                    },
                )

    def text(self, step: int, name: str, text: str) -> None:
        """Hand on a text that belongs to a step."""
        for tracker_name, tracker in list(self._open.items()):
            with self._left_out_if_it_fails(tracker_name):
                if tracker.lacks(name, step):
                    tracker.text(step, name, text)

    def close(self, failed: bool = False) -> None:
        """Close the trackers. May be called again."""
        for name, tracker in list(self._open.items()):
            with self._left_out_if_it_fails(name):
                tracker.close(failed)
                del self._open[name]

    @contextlib.contextmanager
    def _left_out_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if tracker := self._open.pop(name, None):
                with contextlib.suppress(Exception):
                    tracker.abandon()
            with contextlib.suppress(
                OSError
            ):  # console.log may be on the same full disk, and says so itself
                self._say(
                    f"note: {name} failed and is left out from here on, the run goes on "
                    f"({in_a_line(error)})"
                )


# ---- TensorBoard


class TensorBoard:
    """An event file in the run's folder for each call of the run: `tensorboard --logdir logs` shows
    them as one curve.

    Records are written at once and by this thread: nothing is left to do if the process dies.
    """

    def __init__(
        self, folder: Path, step: int, config: Mapping[str, Any], say: Callable[[str], None]
    ):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._metadata, self._tensor = (
            Event,
            Summary,
            SummaryMetadata,
            TensorProto,
        )
        files = [path for path in folder.glob(f"{EVENTS}.*") if path.name.split(".")[3].isdecimal()]
        # files are read in the order of their names, which begin with the time
        begun = max([int(time.time()), *(int(path.name.split(".")[3]) + 1 for path in files)])
        path = folder / f"{EVENTS}.{begun:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = RecordWriter(open(path, "xb"))  # noqa: SIM115  # closed by close
        # from the step that the run goes on after, or from an earlier one if its last calls were
        # not followed to their ends
        self._first = min(step, last_event(max(files)) + 1) if files else 0
        self._write(file_version="brain.Event:2")
        # what the files before this one have of this step and later ones does not count any more
        self._write(step=self._first, session_log=SessionLog(status=SessionLog.START))
        self.text(
            self._first, "config", "\n".join(f"{name}: {value}" for name, value in config.items())
        )
        say(f"note: to watch this run: tensorboard --logdir {shlex.quote(str(folder.parent))}")

    def lacks(self, name: str, step: int) -> bool:
        return step >= self._first

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if figures:
            values = [
                self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()
            ]
            self._write(step=step, summary=self._summary(value=values))

    def text(self, step: int, name: str, text: str) -> None:
        as_it_is = textwrap.indent(
            text, "    ", lambda line: True
        )  # it is shown as Markdown, in which this is code
        plugin = self._metadata.PluginData(plugin_name="text")
        tensor = self._tensor(dtype="DT_STRING", string_val=[as_it_is.encode(errors="replace")])
        value = self._summary.Value(
            tag=name, metadata=self._metadata(plugin_data=plugin), tensor=tensor
        )
        self._write(step=step, summary=self._summary(value=[value]))

    def close(self, failed: bool) -> None:
        self._file.close()

    def abandon(self) -> None:
        self._file.close()

    def _write(self, **event: Any) -> None:
        self._file.write(self._event(wall_time=time.time(), **event).SerializeToString())
        self._file.flush()


def last_event(path: Path) -> int:
    """The last step in an event file; -1 if there is none."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return max(
        (event.step for event in EventFileLoader(str(path)).Load() if event.HasField("summary")),
        default=-1,
    )


# ---- Weights & Biases


class WandB:
    """A run of W&B. Its files are in `<run>/wandb/`, and its id in `<run>/.wandb_id`, so that a
    resumed run adds to its curves.

    Without an account the run is kept offline: then `wandb sync` sends it. W&B has a process of its
    own, which may hang, be killed or wait for a network: so the run waits for it no longer than
    `PATIENCE`.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], say: Callable[[str], None]):
        self._folder, self._last, self._default_last = (
            folder,
            dict[str, int](),
            -1,
        )  # the last step that W&B has, by name
        try:
            self._run, note = within(PATIENCE["open"], lambda: self._begin(config))
        except BaseException:
            self.abandon()
            raise
        say(f"note: {note}")

    def _begin(self, config: Mapping[str, Any]) -> tuple[Any, str]:
        import wandb
        from wandb.sdk.lib import wbauth

        # nothing of it on the console, nothing of the console in it: console.log is the run's own
        settings = wandb.setup(
            wandb.Settings(silent=True, console="off", init_timeout=PATIENCE["open"] / 3)
        ).settings
        mode: Any = "offline" if settings.mode == "dryrun" else settings.mode
        why = ""
        if mode == "online" and not wbauth.authenticate_session(
            host=settings.base_url, source="", prompt=False
        ):
            mode, why = "offline", " as no account is configured here (`wandb login`)"
        file = self._folder / ".wandb_id"
        is_new = not file.exists()
        if is_new:
            file.write_text(secrets.token_hex(4))

        def start() -> Any:
            return wandb.init(
                id=file.read_text(),
                resume="allow",
                name=self._folder.name,
                dir=self._folder,
                config={**config},
                mode=mode,
            )

        try:
            run = start()
        except Exception as error:
            if mode != "online":
                raise
            wandb.teardown()
            wandb.setup(wandb.Settings(silent=True, console="off"))
            mode, why = "offline", f" as W&B cannot be reached ({in_a_line(error)})"
            run = start()
        if mode == "offline":
            self._last = {} if is_new else last_steps(self._folder / "wandb", run.id)
            return run, (
                f"wandb keeps this run offline{why}; to send it, once it has ended: wandb sync "
                f"{shlex.quote(str(self._folder / 'wandb'))}/offline-run-*"
            )
        self._default_last = run.step - 1 if run.resumed else -1
        if (
            self._default_last >= 0
        ):  # what is here of the run tells more: which of its figures the last step has
            self._last = last_steps(self._folder / "wandb", run.id)
        return run, f"wandb: {run.url}" if run.url else f"wandb: mode {mode}"

    def lacks(self, name: str, step: int) -> bool:
        return step > self._last.get(name, self._default_last)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if figures:
            within(PATIENCE["log"], lambda: self._run.log({**figures}, step=step))

    def text(self, step: int, name: str, text: str) -> None:
        import wandb

        page = f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>"
        within(
            PATIENCE["log"],
            lambda: self._run.log({name: wandb.Html(page, inject=False)}, step=step),
        )

    def close(self, failed: bool) -> None:
        import wandb

        def finish() -> None:
            self._run.finish(exit_code=int(failed))
            # else it is done as Python ends, where nothing could be done about one that hangs
            wandb.teardown()

        try:
            within(PATIENCE["close"], finish)
        except TimeoutError as error:
            raise TimeoutError(
                f"{error}; for what it has not sent: wandb sync "
                f"{shlex.quote(str(self._folder / 'wandb'))}/*run-*"
            ) from None

    def abandon(self) -> None:
        """End W&B's process, for which Python would wait when it ends."""
        with contextlib.suppress(Exception):
            connection = sys.modules["wandb"].sdk.wandb_setup.singleton()._connection
            connection._proc._process.kill()
            connection._proc._process.wait()
            within(PATIENCE["log"], lambda: connection.teardown(1))
        with contextlib.suppress(Exception):
            sys.modules["wandb"].sdk.wandb_setup._singleton = None


def last_steps(folder: Path, run_id: str) -> dict[str, int]:
    """The last step of each figure in the files that earlier calls of a run have left in its folder
    `wandb`.

    Some steps before a kill may be missing there: W&B's process writes 32 KiB at a time.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    last: dict[str, int] = {}
    for path in folder.glob(f"*/run-{run_id}.wandb"):
        for data in wandb_records(path.read_bytes()):
            record = Record.FromString(data)
            for item in record.history.item:
                name = item.key or item.nested_key[0]
                last[name] = max(last.get(name, -1), record.history.step.num)
    return last


def wandb_records(file: bytes) -> Iterator[bytes]:
    """The whole records in a .wandb file, LevelDB's log format: blocks of 32 KiB with pieces of
    records, each after a header of checksum, length and kind (whole, first, middle, last).
    """
    at, record = 7, b""  # after the file's own header
    while at + 7 <= len(file):
        if (left := 32768 - at % 32768) < 7:  # a header does not cross blocks
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", file, at)
        if kind not in (1, 2, 3, 4) or at + 7 + length > len(file):  # nothing, or torn
            return
        record += file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def is_installed(name: str) -> bool:
    """Whether a package can be imported. A mere folder of that name, as W&B leaves where it has
    been used, is none.
    """
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def within(seconds: float, act: Callable[[], Any]) -> Any:
    """What `act` returns, or its Exception. Raises TimeoutError where it takes longer, and then
    lets it be.
    """
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((act(), None))
        except BaseException as error:  # such as SystemExit: no reason for the run to end
            done.put(
                (None, error if isinstance(error, Exception) else RuntimeError(in_a_line(error)))
            )

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error:
        raise error
    return result
