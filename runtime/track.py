"""Show a run's figures in TensorBoard and in Weights & Biases (W&B).

Their packages are optional (requirements-track.txt) and imported only by a run that asks for them.
log.csv and eval.csv stay what counts: a tracker that fails is left out with one note, and the run
continues.
"""

import contextlib
import functools
import html
import importlib.util
import secrets
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import UserError, in_a_line

TO_INSTALL = "pip install -r requirements-track.txt"
INIT_TIMEOUT = 30  # seconds that W&B may take to answer at its start
Rows = Mapping[int, Mapping[str, float | None]]  # of a CSV file, by step


class Trackers:
    """The trackers of a run, by name. Only the constructor raises: what fails later is a note."""

    def __init__(self, names: Sequence[str], message: Callable[[str], None]):
        """`names`: of `tensorboard`, `wandb`. Raises UserError for one that is not installed."""
        for name in names:
            if not is_installed(name):
                raise UserError(
                    f"{name}: the package is not installed; install it with `{TO_INSTALL}`, or go "
                    f"without: --no-{name}"
                )
        self.names, self._message = names, message
        self._open: dict[str, TensorBoard | WandB] = {}

    def open(
        self, folder: Path, step: int, config: Mapping[str, Any], rows: Mapping[str, Rows]
    ) -> None:
        """Open the trackers of the run in `folder`, after `step`, and hand on what they lack.

        `rows`: the logs so far, by group.
        """
        kinds: dict[str, type[TensorBoard | WandB]] = {"tensorboard": TensorBoard, "wandb": WandB}
        for name in self.names:
            with self._left_out_if_it_fails(name):
                tracker = self._open[name] = kinds[name](folder, step, config, self._message)
                for at in sorted(set().union(*rows.values())):
                    for group in rows if at >= tracker.first else ():
                        tracker.log(at, _tagged(group, rows[group].get(at, {})))

    def log(self, step: int, figures: Mapping[str, float | None], group: str) -> None:
        """Hand on a step's figures as `group/name`."""
        self._each(lambda tracker: tracker.log(step, _tagged(group, figures)))

    def text(self, step: int, name: str, text: str) -> None:
        """Hand on a text that belongs to a step."""
        self._each(lambda tracker: tracker.text(step, name, text))

    def close(self, failed: bool = False) -> None:
        """Close the trackers. May be called again."""
        self._each(lambda tracker: tracker.close(failed))
        self._open.clear()

    def _each(self, act: Callable[[Any], None]) -> None:
        for name, tracker in list(self._open.items()):
            with self._left_out_if_it_fails(name):
                act(tracker)

    @contextlib.contextmanager
    def _left_out_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            with contextlib.suppress(OSError):  # the disk of console.log may be full too
                self._message(
                    f"note: {name} failed and is left out from here on, the run goes on "
                    f"({in_a_line(error)})"
                )


def _tagged(group: str, figures: Mapping[str, float | None]) -> dict[str, float]:
    return {
        f"{group}/{name}": value
        for name, value in figures.items()
        if name != "step" and value is not None
    }


def is_installed(name: str) -> bool:
    """True if a package can be imported. A mere folder of that name, as W&B makes, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


class TensorBoard:
    """An event file in the run's folder for each call of the run; TensorBoard joins them.

    It is flushed after each step, so that a kill loses nothing. `first`: the step that the rows of
    earlier calls that it lacks begin at.
    """

    def __init__(
        self, folder: Path, step: int, config: Mapping[str, Any], message: Callable[[str], None]
    ):
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from torch.utils.tensorboard import SummaryWriter

        files = sorted(folder.glob("events.out.tfevents.*"))  # their names begin with the time
        events = EventFileLoader(str(files[-1])).Load() if files else ()
        last = max((event.step for event in events if event.HasField("summary")), default=-1)
        # of steps that are taken again, what earlier files have does not count any more; earlier
        # than those are steps that a call did not hand on
        self.first = min(step, last + 1)
        self._writer = SummaryWriter(str(folder), purge_step=self.first)
        self.text(
            self.first, "config", "\n".join(f"{name}: {value}" for name, value in config.items())
        )
        message(f"note: to watch this run: tensorboard --logdir {shlex.quote(str(folder.parent))}")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a step's figures to their curves."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text that belongs to a step."""
        # it is shown as Markdown, in which indented text is code: shown as it is
        self._writer.add_text(name, textwrap.indent(text, "    ", lambda line: True), step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Write what is left; `failed`: the run has."""
        self._writer.close()


class WandB:
    """A run of W&B. Its files are in `<run>/wandb/`, its id in `<run>/.wandb_id`, so that a
    resumed run adds to its curves.

    Without an account or a connection the run is kept offline, for `wandb sync` to send. After a
    kill, an offline run has the steps that were taken again twice.
    """

    def __init__(
        self, folder: Path, step: int, config: Mapping[str, Any], message: Callable[[str], None]
    ):
        import wandb

        # nothing of W&B on the console, nothing of the console in W&B; a network that does not
        # answer must not hold up the run
        settings = wandb.Settings(
            silent=True, console="off", init_timeout=INIT_TIMEOUT, finish_timeout=60
        )
        file = folder / ".wandb_id"
        is_new = not file.exists()
        if is_new:
            file.write_text(secrets.token_hex(4))

        start = functools.partial(
            wandb.init,
            id=file.read_text(),
            resume="allow",
            name=folder.name,
            dir=folder,
            config=dict(config),
            settings=settings,
        )
        mode, why = wandb.setup(settings).settings.mode, ""
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode, why = "offline", " as no account is configured here (`wandb login`)"
        try:
            self._run = start(mode=mode)
        except Exception as error:
            if mode != "online":
                raise
            wandb.teardown()  # the id is in use else
            self._run = start(mode="offline")
            why = f" as W&B cannot be reached ({in_a_line(error)})"
        self.first = 0 if is_new else step + 1
        where = shlex.quote(str(folder / "wandb"))
        message(
            f"note: wandb keeps this run offline{why}; to send it, once it has ended: wandb sync "
            f"{where}/offline-run-*"
            if self._run.offline
            else f"note: wandb: {self._run.url}"
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a step's figures to their curves."""
        self._run.log(dict(figures), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text that belongs to a step."""
        import wandb

        page = f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>"
        self._run.log({name: wandb.Html(page, inject=False)}, step=step)

    def close(self, failed: bool) -> None:
        """Write what is left; `failed`: the run has."""
        self._run.finish(exit_code=int(failed))
