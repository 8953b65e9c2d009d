"""Compare a run's validation losses with the known curve of its recipe.

A curve is a CSV file with the columns tokens, val_loss and tolerance (in nats): runs of the same
recipe with other seeds stay within the tolerance. Lines that begin with # are comments.
`configs/reference/` has curves, each named after its config.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from config import PATH, Config, DataConfig, ModelConfig, OptimizationConfig
from data.vocabulary import GPT2, Vocabulary
from runtime.cli import CONFIG_DIR, load, show
from runtime.errors import UserError, in_a_line

CURVES = CONFIG_DIR / "reference"
# The options that affect learning, in the order of messages
LEARNING = (*OptimizationConfig.model_fields, *DataConfig.model_fields, *ModelConfig.model_fields)


@dataclass(frozen=True)
class Reference:
    """A curve, and its config if it is known."""

    name: str
    tokens: list[float]
    losses: list[float]
    tolerances: list[float]
    config: Config | None = None

    @classmethod
    def read(cls, source: str) -> "Reference":
        """Read a file, or a curve of configs/reference/ by its name. Raises UserError."""
        named = CURVES / f"{source}.csv"
        path = named if named.is_file() else Path(source)
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            rows = [*csv.DictReader(line for line in lines if not line.startswith("#"))]
            tokens, losses, tolerances = (
                [float(row[name]) for row in rows] for name in ("tokens", "val_loss", "tolerance")
            )
            if len(rows) < 2 or tokens != sorted(set(tokens)):
                raise ValueError("it needs at least two rows, with rising tokens")
        except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
            known = ", ".join(sorted(curve.stem for curve in CURVES.glob("*.csv")))
            raise UserError(
                f"reference {source}: is not a validation curve: it needs the columns tokens, "
                f"val_loss, tolerance ({in_a_line(error)}); give such a CSV file, or one of {known}"
            ) from None
        recipe = (CONFIG_DIR if path == named else path.parent) / f"{path.stem}.yaml"
        # Its batch may not divide among this run's ranks.
        config = load(Config, {}, str(recipe), world_size=1) if recipe.is_file() else None
        return cls(path.stem, tokens, losses, tolerances, config)

    def differences(self, config: Config, vocabulary: Vocabulary) -> Iterator[str]:
        """Yield the options that affect learning and differ from the curve's config, with both
        values.
        """
        irrelevant = {*Config.names_marked(PATH)}
        if vocabulary != GPT2:  # a run takes its size from the corpus, which is an option too
            irrelevant |= {"vocab_size", "real_vocab_size"}
        if config.total_batch_tokens:  # then batch_size does not change a step's tokens
            irrelevant.add("batch_size")
        for name in LEARNING if self.config else ():
            value, usual = getattr(config, name), getattr(self.config, name)
            if value != usual and name not in irrelevant:
                yield f"{name} {show(value)} instead of {show(usual)}"

    def judge(self, tokens: int, loss: float) -> str | None:
        """Judge a validation loss after `tokens`: on track, ahead, or how far behind.

        None outside the curve's tokens.
        """
        if not self.tokens[0] <= tokens <= self.tokens[-1]:
            return None
        expected = np.interp(tokens, self.tokens, self.losses)
        tolerance = np.interp(tokens, self.tokens, self.tolerances)
        behind = loss - expected
        usual = f"{self.name}'s curve, which has {expected:.3f} (usual: within {tolerance:.3f})"
        if abs(behind) <= tolerance:
            return f"on track: {behind:+.3f} from {usual}"
        if behind < 0:
            return f"ahead: {-behind:.3f} below {usual}; on the same corpus, do targets leak?"
        return f"behind: {behind:.3f} above {usual}"
