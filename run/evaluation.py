"""Evaluate a run's model between two steps: validation loss, HellaSwag, a sample."""

import functools
import math
from collections import defaultdict
from pathlib import Path

import torch

from config import Config
from data.hellaswag import Question, default_path
from data.vocabulary import Vocabulary
from dataloader import TokenStream
from inference.hellaswag import read_questions, score
from inference.sampling import Text, grow, seeded
from inference.validation import (
    bits_per_byte,
    bytes_per_target,
    check_split,
    evaluating,
    validation_loss,
)
from run.log import RunLog
from run.reference import Reference
from run.state import Run
from runtime.console import log
from runtime.errors import UserError
from runtime.world import World


def is_due(every: int, step: int, last: bool) -> bool:
    """True if `step` is a multiple of `every` or the last step; 0 means never."""
    return every > 0 and (last or step % every == 0)


def read_needed(
    config: Config, world: World, val: TokenStream, vocabulary: Vocabulary
) -> tuple[Reference | None, list[Question]]:
    """Read the reference curve, and this rank's questions of HellaSwag, if they will be needed.

    All ranks have to call this. Raises UserError if one of them, the tokenizer or the validation
    split will be needed and is missing.
    """
    reference = Reference.read(config.reference) if config.reference else None
    questions: list[Question] = []
    if config.sample_every or config.hellaswag_every:
        encoding = vocabulary.encoding_for(config.n_vocab)
    if config.hellaswag_every:
        file = Path(config.hellaswag_file or default_path(config.data_dir))
        questions = read_questions(file, encoding, config.block_size, world)
    corpus, is_needed = f"{config.data_dir}/{config.dataset}", config.eval_every > 0
    check_split(val, corpus, config.val_fraction, is_needed)
    if reference and (others := ", ".join(reference.differences(config, vocabulary))):
        log.warning(f"not the recipe of {reference.name}'s curve: {others}")
    return reference, questions


class Evaluation:
    """Evaluate and sample a run's uncompiled model when it is due, and log the results.

    torch.compile would compile again for each new shape, so only the validation loss, whose batches
    have one shape, has a compiled graph. All ranks have to call each method. Raises UserError, as
    `read_needed` does.
    """

    def __init__(self, run: Run, runlog: RunLog):
        config = run.config
        self.run, self.runlog = run, runlog
        # This graph without gradients is not training's. Mode default compiles in seconds, records
        # no CUDA graph, and gives the same loss after a resume, because no autotuning picks other
        # kernels. FSDP gathers weights between blocks, so it evaluates uncompiled.
        is_compiled = config.compile and not config.fsdp
        self.compiled = torch.compile(run.state.model) if is_compiled else None
        # step -> column of eval.csv -> value
        self.figures = defaultdict[int, dict[str, float]](dict)
        self.reference, self.questions = read_needed(config, run.world, run.val, run.vocabulary)

    def resume(self, repeat: int | None) -> None:
        """Load the evaluations of earlier calls, so that none is repeated but the one of the step
        `repeat`, whose loss is one of other tokens.
        """
        self.figures |= self.run.world.broadcast(self.runlog.evaluations())
        if repeat is not None:
            for name in ("val_loss", "bits_per_byte"):
                self.figures[repeat].pop(name, None)

    def validate(self, step: int, last: bool) -> float:
        """Return the validation loss after this step, in nats per token; infinity if there is none.

        Computes it if it is due, and logs whether the run is on track, if the config names its
        curve. Raises TrainingError if it is not finite.
        """
        run, config = self.run, self.run.config
        if self._is_due("val_loss", config.eval_every, step, last):
            with run.autocast():
                loss = validation_loss(
                    run.state.model,
                    run.val,
                    config.batch_size,
                    config.eval_tokens,
                    run.world,
                    self.compiled,
                )
            figures = {"val_loss": loss}
            if self.target_bytes:
                figures["bits_per_byte"] = bits_per_byte(loss, self.target_bytes)
            self._log(step, figures)
            if self.reference and (
                verdict := self.reference.judge(step * run.tokens_per_step, loss)
            ):
                log.info(f"step {step}: {verdict}")
        return self.figures.get(step, {}).get("val_loss", math.inf)

    @functools.cached_property
    def target_bytes(self) -> float:
        """The mean bytes of a validation target's text; 0 if the vocabulary is not known.

        All ranks have to ask for it.
        """
        run, config = self.run, self.run.config
        if run.vocabulary.size != config.n_vocab:
            return 0.0
        try:
            return run.world.on_rank0(
                lambda: bytes_per_target(run.val, config.eval_tokens, run.vocabulary.encoding)
            )
        except UserError as error:  # nothing else may need GPT-2's vocabulary, a download
            log.warning(f"no bits per byte: {error}")
            return 0.0

    def score_hellaswag(self, step: int, last: bool) -> None:
        """Score the model on HellaSwag if it is due. Raises TrainingError if it has diverged."""
        run, config = self.run, self.run.config
        if self._is_due("hellaswag_acc_norm", config.hellaswag_every, step, last):
            with run.autocast():
                # A training step of the same number of tokens takes more memory.
                tokens = config.batch_size * config.seq_len
                scores = score(run.state.model, self.questions, tokens, run.world)
            self._log(step, {"hellaswag_acc_norm": scores["acc_norm"]["score"]})

    def _is_due(self, figure: str, every: int, step: int, last: bool) -> bool:
        """True if a figure is due, and no earlier call has it."""
        return is_due(every, step, last) and figure not in self.figures.get(step, {})

    def _log(self, step: int, figures: dict[str, float]) -> None:
        self.figures[step] |= figures
        self.runlog.log_evaluation(step, **figures)

    def sample(self, step: int, last: bool) -> None:
        """Log a text of the model, if it is due. It is drawn from a generator of its own."""
        config, model = self.run.config, self.run.state.model
        prompt = config.sample_prompt
        if step and is_due(config.sample_every, step, last):
            text = Text(prompt, self.run.vocabulary.encoding, seeded(config.seed))
            steps = grow(
                model,
                [text],
                config.sample_tokens,
                # Ranks that share a model by FSDP round differently, so they agree on each token.
                self.run.world.broadcast,
                temperature=config.sample_temperature,
                top_k=50,
            )
            with self.run.autocast(), evaluating(model):
                list(steps)
            self.runlog.log_sample(step, text.string)

    def latest(self) -> dict[str, float | None]:
        """Return the newest validation loss and HellaSwag score, as summary.json has them."""
        latest: dict[str, float | None] = {"val_loss": None}
        for figures in self.figures.values():  # in the order of steps
            latest |= figures
        return latest
