"""Show a run's figures in TensorBoard and in Weights & Biases (W&B).

Their packages are optional (requirements-track.txt) and imported only by a run that asks for them.
log.csv, eval.csv and metrics.csv have the figures of all steps; a tracker has those that this
process takes while it is on, and also MFU and memory. If it fails, the run continues without it,
with one note.
"""

import contextlib
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


class Trackers:
    """The trackers of a run, by name. Only the constructor raises: later failures are notes."""

    def __init__(self, names: Sequence[str], message: Callable[[str], None]):
        """`names`: some of `tensorboard`, `wandb`. Raises UserError if one is not installed."""
        for name in names:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:  # W&B makes a folder of its name
                raise UserError(
                    f"{name}: the package is not installed; install it with `{TO_INSTALL}`, or go "
                    f"without: --no-{name}"
                )
        self.names, self._message = names, message
        self._open: dict[str, TensorBoard | WandB] = {}

    def open(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        """Open the trackers of the run in `folder`, which has taken `step` steps."""
        kinds: dict[str, type[TensorBoard | WandB]] = {"tensorboard": TensorBoard, "wandb": WandB}
        for name in self.names:
            with self._left_out_if_it_fails(name):
                self._open[name] = kinds[name](folder, step, config)
                self._message(f"note: {self._open[name].place}")

    def log(self, step: int, figures: Mapping[str, float | None], group: str) -> None:
        """Log a step's figures as `group/name`."""
        tagged = {f"{group}/{name}": value for name, value in figures.items() if value is not None}
        self._each(lambda tracker: tracker.log(step, tagged))

    def text(self, step: int, name: str, text: str) -> None:
        """Log a text of a step."""
        self._each(lambda tracker: tracker.text(step, name, text))

    def close(self, failed: bool = False) -> None:
        """Close the trackers. May be called again. `failed`: the run has failed."""
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
                    f"note: {name} failed, the run continues without it ({in_a_line(error)})"
                )


class TensorBoard:
    """An event file in the run's folder for each call of the run; TensorBoard joins them.

    It is flushed after each step, so that a kill loses nothing.
    """

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        # Discard events of steps that will be repeated.
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        self.text(step, "config", "\n".join(f"{name}: {value}" for name, value in config.items()))
        self.place = f"to watch this run: tensorboard --logdir {shlex.quote(str(folder.parent))}"

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a step's figures to their curves."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text of a step."""
        # TensorBoard renders Markdown, in which indented text is code and keeps its line breaks.
        self._writer.add_text(name, textwrap.indent(text, "    ", lambda line: True), step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Write the rest. `failed` has no effect here."""
        self._writer.close()


class WandB:
    """A run of W&B. Its id is in `<run>/.wandb_id`, so that a resumed run adds to its curves.

    Without an account it stays offline in `<run>/wandb/`, for `wandb sync` to send. After a kill,
    an offline run has repeated steps twice.
    """

    def __init__(self, folder: Path, step: int, config: Mapping[str, Any]):
        import wandb

        # no output of W&B on the console, none of the console in W&B
        settings = wandb.Settings(
            silent=True, console="off", init_timeout=INIT_TIMEOUT, finish_timeout=60
        )
        mode = wandb.setup(settings).settings.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        file = folder / ".wandb_id"
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            id=file.read_text(),
            resume="allow",
            name=folder.name,
            dir=folder,
            config=dict(config),
            settings=settings,
            mode=mode,
        )
        runs = shlex.quote(str(folder / "wandb"))
        self.place = f"wandb: {self._run.url}"
        if self._run.offline:
            self.place = (
                f"wandb keeps this run offline; to send it: wandb sync {runs}/offline-run-*"
            )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a step's figures to their curves."""
        self._run.log(dict(figures), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text of a step."""
        import wandb

        page = f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>"
        self._run.log({name: wandb.Html(page, inject=False)}, step=step)

    def close(self, failed: bool) -> None:
        """Write the rest. `failed`: the run has failed."""
        self._run.finish(exit_code=int(failed))
