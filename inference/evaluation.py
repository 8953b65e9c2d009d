"""Evaluate a run's model between two steps: validation loss, HellaSwag, a sample."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checkpoint.save import hint
from config import Config
from data.hellaswag import Item, default_path
from data.tokenizer import get_encoding
from dataloader import TokenStream, is_validation
from inference.hellaswag import METRICS, read_questions, score
from inference.sampling import sample_text
from inference.validation import Autocast, validation_loss
from model import GPT
from runtime.errors import TrainingError, UserError
from runtime.runlog import RunFolder
from runtime.world import World


@dataclass
class Evaluation:
    """Evaluate and sample a run's plain model where it is due; log what comes out.

    Plain: torch.compile would compile again for each new shape. All ranks have to call each of its
    methods. Raises UserError if what will be needed is missing: tokens, HellaSwag, the tokenizer.
    """

    config: Config
    world: World
    model: GPT
    val: TokenStream
    autocast: Autocast
    folder: RunFolder

    def __post_init__(self) -> None:
        config, val = self.config, self.val
        if config.sample_every:
            get_encoding()
        corpus = f"{config.data_dir}/{config.dataset}"
        if config.eval_every and not len(val):
            raise UserError(
                f"{corpus}: eval_every {config.eval_every}, but nothing to validate on: "
                f"{val.tokens:,} tokens make no sequence of {config.seq_len}; raise val_fraction "
                f"above {config.val_fraction:g}, or add a *_val_*.bin file"
            )
        if config.val_fraction and val.spans and is_validation(val.spans[0].file.path):
            self.folder.message(
                f"note: val_fraction has no effect: {corpus} has validation files of its own"
            )
        self.items: list[Item] = []
        if config.hellaswag_every:
            file = Path(config.hellaswag_file or default_path(config.data_dir))
            self.items = read_questions(file, self.world)
        self.figures: dict[int, dict[str, float]] = {}  # by step and column of eval.csv

    def resume(self) -> None:
        """Take over what the run's folder has of earlier calls: nothing is evaluated twice."""
        self.figures = self.world.broadcast(self.folder.evaluations())

    def validate(self, step: int) -> float:
        """Return the validation loss after this step, in nats per token; infinity if not due.

        Raises TrainingError if it is not finite.
        """
        config = self.config
        if not config.is_due(config.eval_every, step):
            return math.inf
        if "val_loss" not in self.figures.get(step, {}):
            counts = config.batch_size, config.eval_tokens
            with self.logged(step) as figures:
                figures["val_loss"] = validation_loss(
                    self.model, self.val, *counts, self.world, self.autocast
                )
        return self.figures[step]["val_loss"]

    def score_hellaswag(self, step: int) -> None:
        """Score the model in HellaSwag if it is due. Raises TrainingError if it has diverged."""
        config = self.config
        is_scored = "hellaswag_acc" in self.figures.get(step, {})
        if not is_scored and config.is_due(config.hellaswag_every, step):
            tokens_at_once = config.batch_size * config.seq_len  # takes less memory than a step
            with self.logged(step) as figures:
                scores = score(self.model, self.items, tokens_at_once, self.world, self.autocast)
                figures |= {f"hellaswag_{name}": scores[name]["score"] for name in METRICS}

    @contextlib.contextmanager
    def logged(self, step: int) -> Iterator[dict[str, float]]:
        """Log the figures that are put into what this yields; if instead the model turns out to
        have diverged, add the step and what to do to the error.
        """
        figures: dict[str, float] = {}
        try:
            yield figures
        except TrainingError as error:
            advice = hint(self.folder.path, self.config.lr)
            raise TrainingError(f"step {step}: {error}; {advice}") from None
        self.figures.setdefault(step, {}).update(figures)
        self.folder.log_evaluation(step, self.config.max_steps, **figures)

    def sample(self, step: int) -> None:
        """Log a text that the model writes, if it is due. Draws from a generator of its own."""
        config = self.config
        if step and config.is_due(config.sample_every, step):
            text = sample_text(
                self.model,
                config.sample_prompt,
                config.sample_tokens,
                seed=config.seed,
                agree=self.world.broadcast,
                autocast=self.autocast,
            )
            self.folder.log_sample(step, text)

    def latest(self) -> dict[str, float | None]:
        """Return the newest validation loss and HellaSwag scores, as summary.json has them."""
        latest: dict[str, float | None] = {"val_loss": None}
        for step in sorted(self.figures):
            latest |= self.figures[step]
        return latest
