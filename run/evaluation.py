"""Evaluate a run's model between two steps: validation loss, HellaSwag, a sample."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from config import Config
from data.hellaswag import Question, default_path
from dataloader import TokenStream
from inference.hellaswag import read_questions, score
from inference.sampling import Text, encoding_of, grow, seeded
from inference.validation import check_split, evaluating, validation_loss
from model import GPT
from run.log import RunFolder
from run.reference import Reference
from runtime.world import World


def is_due(every: int, step: int, last: bool) -> bool:
    """True if `step` is a multiple of `every` or the last step; 0 means never."""
    return every > 0 and (last or step % every == 0)


def read_needed(
    config: Config, world: World, val: TokenStream
) -> tuple[Reference | None, list[Question], list[str]]:
    """Read the reference curve, and this rank's questions of HellaSwag, if they will be needed.

    Returns them and notes. Raises UserError if one of them, the tokenizer or the validation split
    will be needed and is missing.
    """
    reference = Reference.read(config.reference) if config.reference else None
    questions: list[Question] = []
    if config.sample_every or config.hellaswag_every:
        encoding = encoding_of(config.n_vocab)
    if config.hellaswag_every:
        file = Path(config.hellaswag_file or default_path(config.data_dir))
        questions = read_questions(file, encoding, config.block_size, world)
    corpus, is_needed = f"{config.data_dir}/{config.dataset}", config.eval_every > 0
    notes = check_split(val, corpus, config.val_fraction, is_needed)
    if reference and (others := ", ".join(reference.differences(config))):
        notes.append(f"note: not the recipe of {reference.name}'s curve: {others}")
    return reference, questions, notes


@dataclass
class Evaluation:
    """Evaluate and sample a run's uncompiled model when it is due, and log the results.

    torch.compile would compile again for each new shape, so only the validation loss, whose batches
    have one shape, has a compiled graph. All ranks have to call each method. Raises UserError, as
    `read_needed` does.
    """

    config: Config
    world: World
    model: GPT
    val: TokenStream
    autocast: Callable[[], contextlib.AbstractContextManager]
    folder: RunFolder

    def __post_init__(self) -> None:
        config = self.config
        # This graph without gradients is not training's. Mode default compiles in seconds, records
        # no CUDA graph, and gives the same loss after a resume, because no autotuning picks other
        # kernels. FSDP gathers weights between blocks, so it evaluates uncompiled.
        self.compiled = torch.compile(self.model) if config.compile and not config.fsdp else None
        # step -> column of eval.csv -> value
        self.figures = defaultdict[int, dict[str, float]](dict)
        self.reference, self.questions, notes = read_needed(config, self.world, self.val)
        for note in notes:
            self.folder.message(note)

    def resume(self, repeat: int | None) -> None:
        """Load the evaluations of earlier calls, so that none is repeated but the one of the step
        `repeat`, whose loss is one of other tokens.
        """
        self.figures |= self.world.broadcast(self.folder.evaluations())
        if repeat is not None:
            self.figures[repeat].pop("val_loss", None)

    def validate(self, step: int, last: bool) -> float:
        """Return the validation loss after this step, in nats per token; infinity if there is none.

        Computes it if it is due, and logs whether the run is on track, if the config names its
        curve. Raises TrainingError if it is not finite.
        """
        config, known = self.config, self.figures[step]
        if is_due(config.eval_every, step, last) and "val_loss" not in known:
            with self.autocast():
                loss = validation_loss(
                    self.model,
                    self.val,
                    config.batch_size,
                    config.eval_tokens,
                    self.world,
                    self.compiled,
                )
            self._log(step, {"val_loss": loss})
            if self.reference and not self.world.rank:
                tokens = step * config.tokens_per_step(self.world.world_size)
                if verdict := self.reference.judge(tokens, loss):
                    self.folder.message(f"step {step}: {verdict}")
        return known.get("val_loss", math.inf)

    def score_hellaswag(self, step: int, last: bool) -> None:
        """Score the model on HellaSwag if it is due. Raises TrainingError if it has diverged."""
        config, known = self.config, self.figures[step]
        if is_due(config.hellaswag_every, step, last) and "hellaswag_acc_norm" not in known:
            with self.autocast():
                # A training step of the same number of tokens takes more memory.
                scores = score(
                    self.model, self.questions, config.batch_size * config.seq_len, self.world
                )
            self._log(step, {"hellaswag_acc_norm": scores["acc_norm"]["score"]})

    def _log(self, step: int, figures: dict[str, float]) -> None:
        self.figures[step] |= figures
        self.folder.log_evaluation(step, self.config.last_step, **figures)

    def sample(self, step: int, last: bool) -> None:
        """Log a text of the model, if it is due. It is drawn from a generator of its own.

        Raises UserError unless the vocabulary is GPT-2's.
        """
        config, prompt = self.config, self.config.sample_prompt
        if step and is_due(config.sample_every, step, last):
            text = Text(prompt, encoding_of(config.n_vocab), seeded(config.seed))
            steps = grow(
                self.model,
                [text],
                config.sample_tokens,
                # Ranks that share a model by FSDP round differently, so they agree on each token.
                self.world.broadcast,
                temperature=config.sample_temperature,
                top_k=50,
            )
            with self.autocast(), evaluating(self.model):
                list(steps)
            self.folder.log_sample(step, text.string)

    def latest(self) -> dict[str, float | None]:
        """Return the newest validation loss and HellaSwag score, as summary.json has them."""
        latest: dict[str, float | None] = {"val_loss": None}
        for figures in self.figures.values():  # in the order of steps
            latest |= figures
        return latest
