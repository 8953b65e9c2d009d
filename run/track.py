"""Log a run's figures to TensorBoard and to Weights & Biases (W&B).

Their packages are optional (requirements-track.txt) and imported only by a run that asks for them.
log.csv, eval.csv and metrics.csv have the figures of all steps; a tracker has the steps of
this process alone, and also MFU and memory.
"""

import functools
import html
import importlib.metadata
import secrets
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.console import log
from runtime.errors import UserError, in_a_line

TO_INSTALL = "pip install -r requirements-track.txt"


class Trackers:
    """The trackers of a run: TensorBoard's writer, W&B's run, both or neither."""

    def __init__(self, names: Sequence[str]):
        """`names`: some of `tensorboard`, `wandb`. Raises UserError if one is not installed."""
        for name in names:
            try:
                importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                raise UserError(
                    f"{name}: the package is not installed; install it with `{TO_INSTALL}`, or go "
                    f"without: --no-{name}"
                ) from None
        self.names = names
        self._writer: Any = None
        self._wandb_run: Any = None

    def open(self, folder: Path, step: int, config: Mapping[str, Any]) -> None:
        """Open the trackers of the run in `folder`, which has taken `step` steps."""
        if "tensorboard" in self.names:
            from torch.utils.tensorboard import SummaryWriter

            # Discard events of steps that will be repeated.
            self._writer = SummaryWriter(str(folder), purge_step=step + 1)
            self.text(step, "config", "\n".join(f"{name}: {config[name]}" for name in config))
            runs = shlex.quote(str(folder.parent))
            log.warning(f"to watch this run: tensorboard --logdir {runs}")
        if "wandb" in self.names:
            self._wandb_run = _open_wandb(folder, config)

    def log(self, step: int, figures: Mapping[str, float | None], group: str) -> None:
        """Log a step's figures as `group/name`."""
        tagged = {f"{group}/{name}": value for name, value in figures.items() if value is not None}
        if self._writer:
            for name, value in tagged.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()  # a kill then loses nothing
        if self._wandb_run:
            self._wandb_run.log(tagged, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Log a text of a step."""
        if self._writer:
            # TensorBoard renders Markdown, where indented text is code and keeps its line breaks.
            self._writer.add_text(name, textwrap.indent(text, "    ", lambda line: True), step)
        if self._wandb_run:
            import wandb

            page = f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>"
            self._wandb_run.log({name: wandb.Html(page, inject=False)}, step=step)

    def close(self, failed: bool) -> None:
        """Close the trackers. `failed`: the run has failed, which W&B shows."""
        if self._writer:
            self._writer.close()
        if self._wandb_run:
            self._wandb_run.finish(exit_code=int(failed))


def _open_wandb(folder: Path, config: Mapping[str, Any]) -> Any:
    """Start the W&B run, or resume the one whose id is in `<run>/.wandb_id`.

    It is kept offline in `<run>/wandb/` if W&B refuses, as without an account, or is unreachable.
    """
    import wandb

    file = folder / ".wandb_id"
    if not file.exists():
        file.write_text(secrets.token_hex(4))
    start = functools.partial(
        wandb.init,
        id=file.read_text(),
        resume="allow",
        name=folder.name,
        dir=folder,
        config=dict(config),
    )
    try:
        return start()
    except wandb.Error as error:
        log.warning(f"wandb keeps this run offline: {in_a_line(error)}")
        wandb.teardown()  # ends the service, which still has the id
        return start(mode="offline")
