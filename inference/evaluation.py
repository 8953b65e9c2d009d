"""What a run does with its model between two steps: validation loss, HellaSwag, a sample."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

from checkpoint.save import hint
from config import Config
from data.tokenizer import get_encoding
from dataloader import TokenStream, is_validation
from inference.hellaswag import HellaSwag
from inference.sampling import sample_text
from inference.validation import validation_loss
from model import GPT
from runtime.errors import TrainingError, UserError
from runtime.runlog import RunFolder
from runtime.world import World


class Evaluation:
    """Evaluate and sample a run's plain model where it is due; log what comes out.

    All ranks have to call each of its methods.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        model: GPT,
        val: TokenStream,
        autocast: Callable[[], AbstractContextManager],
        folder: RunFolder,
    ):
        """Raise UserError if what will be needed is missing: tokens, HellaSwag, the tokenizer."""
        if config.sample_every:
            get_encoding()
        if config.eval_every and not len(val):
            raise UserError(
                f"{config.data_dir}/{config.dataset}: eval_every {config.eval_every}, but nothing "
                f"to validate on: {val.tokens:,} tokens make no sequence of {config.seq_len}; "
                f"raise val_fraction (now {config.val_fraction:g}), such as to 0.1, or add a "
                f"*_val_*.bin file"
            )
        if config.val_fraction and val.spans and is_validation(val.spans[0].path):
            place = f"{config.data_dir}/{config.dataset}"
            folder.message(
                f"note: val_fraction has no effect: {place} has validation files of its own"
            )
        self.config, self.world, self.model, self.val = config, world, model, val
        self.autocast, self.folder = autocast, folder
        self.hellaswag = HellaSwag(config, world)
        self.losses: dict[int, float] = {}  # by step

    def resume(self) -> None:
        """Take over what the run's folder has of earlier calls: nothing is evaluated twice."""
        self.losses, self.hellaswag.scores = self.world.broadcast(self.folder.evaluations())

    def is_due(self, every: int, step: int) -> bool:
        """True after every so many steps (0: never), and after the last."""
        return every > 0 and (step % every == 0 or step >= self.config.max_steps)

    def validate(self, step: int) -> float:
        """Return the validation loss after this step, in nats per token; infinity if not due.

        Raises TrainingError if it is not finite.
        """
        config = self.config
        if not self.is_due(config.eval_every, step):
            return math.inf
        if step not in self.losses:
            loss = validation_loss(
                self.model,
                self.val,
                config.batch_size,
                config.eval_tokens,
                self.world,
                self.autocast,
            )
            if not math.isfinite(loss):
                raise TrainingError(
                    f"step {step}: the validation loss is {loss}; "
                    f"{hint(self.folder.path, config.lr)}"
                )
            self.losses[step] = loss
            self.folder.log_evaluation(step, config.max_steps, val_loss=loss)
        return self.losses[step]

    def score_hellaswag(self, step: int) -> None:
        """Score the model in HellaSwag if it is due."""
        self.hellaswag.score_if_due(step, self.model, self.folder, self.autocast)

    def sample(self, step: int) -> None:
        """Log a text that the model writes, if it is due. Draws from a generator of its own."""
        config = self.config
        if step and self.is_due(config.sample_every, step):
            texts = sample_text(
                self.model,
                config.sample_prompt,
                config.sample_tokens,
                seed=config.seed,
                agree=self.world.broadcast,
                autocast=self.autocast,
            )
            self.folder.log_sample(step, texts[0])

    def latest(self) -> dict[str, float | None]:
        """Return the newest validation loss and HellaSwag scores, as summary.json has them."""
        val_loss = self.losses[max(self.losses)] if self.losses else None
        return {"val_loss": val_loss, **self.hellaswag.latest()}
