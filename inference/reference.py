"""Is a run on track? Its validation losses beside a curve that its recipe is known to take.

A curve is a CSV file with the columns tokens, val_loss and tolerance: after so many tokens the
validation loss is that, and runs that differ in nothing but the seed stay within the tolerance, in
nats. Lines that begin with # say where the curve comes from. `configs/reference/` has some, each
under the name of the config that it belongs to.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from config import PATH, Config, DataConfig, ModelConfig, OptimizationConfig, load_config
from runtime.cli import CONFIG_DIR, show
from runtime.errors import UserError, in_a_line
from runtime.runlog import Row

CURVES = CONFIG_DIR / "reference"
# The options that decide what a run learns, in the order in which messages name them
LEARNING = (*OptimizationConfig.model_fields, *DataConfig.model_fields, *ModelConfig.model_fields)
HARDLY = 0.25  # of the way from expected back to untrained: frequencies of tokens, and no more
GAP = 1.0  # nats between training and validation loss, from which tokens seem to be repeated
CLIPPED = 20  # times grad_clip, from which hardly anything is left of a gradient


@dataclass(frozen=True)
class Reference:
    """Hold a curve, and the config that it is of, if that is known."""

    name: str
    tokens: list[float]
    losses: list[float]
    tolerances: list[float]
    config: Config | None = None

    @classmethod
    def read(cls, source: str) -> "Reference":
        """Read a file, or one of configs/reference/ by its name. Raises UserError."""
        named = CURVES / f"{source}.csv"
        path = named if named.is_file() else Path(source)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            rows = [*csv.DictReader(line for line in lines if not line.startswith("#"))]
            tokens, losses, tolerances = (
                [float(row[name]) for row in rows] for name in ("tokens", "val_loss", "tolerance")
            )
            if len(rows) < 2 or tokens != sorted(set(tokens)):
                raise ValueError("at least two rows are needed, whose tokens rise")
        except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
            known = ", ".join(sorted(curve.stem for curve in CURVES.glob("*.csv")))
            raise UserError(
                f"reference {source}: is no validation curve with the columns tokens, val_loss, "
                f"tolerance ({in_a_line(error)}); give such a CSV file, or one of {known}"
            ) from None
        recipe = CONFIG_DIR / f"{path.stem}.yaml"
        config = load_config(str(recipe)) if recipe.is_file() else None
        return cls(path.stem, tokens, losses, tolerances, config)

    def differences(self, config: Config) -> Iterator[str]:
        """Name the options that decide what is learned and are not as the curve's own config has
        them, each with both values.
        """
        irrelevant = {*Config.names_marked(PATH)}
        if config.total_batch_tokens:  # a step has as many tokens, however they are divided up
            irrelevant.add("batch_size")
        for name in LEARNING if self.config else ():
            ours, theirs = getattr(config, name), getattr(self.config, name)
            if ours != theirs and name not in irrelevant:
                yield f"{name} {show(ours)} instead of {show(theirs)}"

    def judge(
        self, tokens: int, loss: float, before: float, config: Config, row: Row | None
    ) -> str | None:
        """Say whether a validation loss is on track, or how far behind and what to look at first.

        `before`: the lowest validation loss so far; `row`: the last one of the run's log. None
        where the curve has nothing to compare with.
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
            return f"ahead: {-behind:.3f} below {usual}; if you changed nothing, do targets leak?"
        late = ""
        if loss < self.losses[1]:  # straight lines over the logarithm of tokens
            reached = np.interp(-loss, np.negative(self.losses[1:]), np.log(self.tokens[1:]))
            late = f", as after {math.exp(reached) / tokens:.0%} of these tokens"
        row = row or {}
        trained, norm = row.get("loss") or loss, row.get("norm") or 0.0
        causes = dict.fromkeys(self.differences(config), True) | {
            f"the training loss is only {trained:.2f}: are the same few tokens repeated?": (
                loss - trained > GAP
            ),
            f"a gradient norm of {norm:.3g} is clipped to {config.grad_clip:g}": (
                norm > CLIPPED * config.grad_clip > 0
            ),
            "the validation loss rises: a lower learning rate, or a longer warm-up": loss > before,
            "little is learned but how frequent tokens are: are targets the next tokens, are "
            "positions in order, is the vocabulary the tokenizer's?": (
                behind > HARDLY * (self.losses[0] - expected)
            ),
            "the learning rate: try half of it, and twice": True,
            "the text: another corpus or tokenizer has other losses": True,
            "changes to the code: does the unchanged recipe follow the curve?": True,
        }
        first = [cause for cause, is_likely in causes.items() if is_likely][:3]
        listed = "; ".join(f"({i}) {cause}" for i, cause in enumerate(first, start=1))
        return f"behind: {behind:.3f} above {usual}{late}. Look first at: {listed}"
