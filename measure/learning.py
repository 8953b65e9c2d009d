"""Compare what configs learn: their validation losses over several seeds, and tokens to a loss.

python -m measure.learning learning.yaml "learning.yaml --optimizer muon --lr 4e-3"
python -m measure.learning a.yaml b.yaml --seeds 5 -- --max_steps 200   options after -- go to all

All runs stay in the folder, and the same command resumes where it was interrupted. Of a run that is
done, its eval.csv is enough.
"""

import hashlib
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from config import Config, Count
from measure.interleaved import parse_side, split_command_line
from runtime.cli import Options, parse
from runtime.start import start


class LearningOptions(Options):
    """options"""

    sides: tuple[str, ...] = ()
    """configs that evaluate; quote one together with options after it"""
    seeds: Count = 3
    """seeds that each is trained with: 1, 2, ..."""
    log_dir: str = "logs/learning"
    """folder for all runs and the report"""


if __name__ == "__main__":
    OWN, OF_ALL = split_command_line(sys.argv[1:])
    OPTIONS = start(LearningOptions, OWN, description=__doc__, positional="sides")

from measure.tables import write_report
from runtime.device import choose_device
from runtime.errors import TrainingError, UserError, reported
from runtime.launch import launch
from runtime.report import draw_losses, git_commit, items, machine
from runtime.runlog import read_rows
from runtime.world import World, joined_world
from train import train

Curve = dict[int, float]  # validation loss by step
MEANING = (
    "Lower by: than the first config with the same seed. Spread: the largest less the smallest. "
    "Tokens: after which the validation loss first is that of the first config's end, with the "
    "same seed."
)


def plan(options: LearningOptions, of_all: Sequence[str]) -> dict[str, list[Config]]:
    """Return a config for each side and seed. Raises UserError for what is no comparison."""
    if len(set(options.sides)) < max(2, len(options.sides)):
        raise UserError(
            "at least two different configs are needed: python -m measure.learning learning.yaml "
            '"learning.yaml --optimizer muon"'
        )
    sides: dict[str, list[Config]] = {}
    for text in options.sides:
        arguments, environment = parse_side(text, of_all)
        if environment:
            raise UserError(f"{text}: all runs share one environment; leave {environment} out")
        words = " ".join([text, *of_all])
        digest = hashlib.sha256(words.encode()).hexdigest()[:8]  # as names have to be short
        name = f"{re.sub(r'[^a-zA-Z0-9.]+', '_', words)[:60]}_{digest}"
        own = [*arguments, f"--log_dir={options.log_dir}", "--resume=auto"]
        sides[text] = [
            parse(Config, [*own, f"--seed={i}", f"--run_name={name}_seed_{i}"], config_file=True)
            for i in range(1, options.seeds + 1)
        ]
        if not sides[text][0].eval_every:
            raise UserError(f"{text}: sets no eval_every, so it has no validation loss")
    return sides


def val_losses(config: Config) -> Curve:
    """Read what a run has evaluated so far."""
    path = Path(config.log_dir) / str(config.run_name) / "eval.csv"
    rows: dict[int, Any] = read_rows(path, ("step", "val_loss")) if path.exists() else {}
    return {step: row["val_loss"] for step, row in rows.items()}


def learned(config: Config, world: World) -> Curve:
    """Return the validation losses of a run, after training it if it is not done.

    A run that diverges has an infinite loss at its end.
    """
    if config.max_steps not in val_losses(config):
        try:
            if train(config, world).get("interrupted"):
                raise KeyboardInterrupt
        except TrainingError as error:
            print(f"{config.run_name}: {error}")
            return {config.max_steps: math.inf}
    return val_losses(config)


def last(curve: Curve) -> float:
    """Return the loss at the end."""
    return curve[max(curve)]


def steps_to(curve: Curve, loss: float) -> float | None:
    """Return the step at which a loss is first reached, on straight lines between evaluations."""
    steps = sorted(curve)
    for before, step in zip([steps[0], *steps], steps, strict=False):
        if curve[step] <= loss:
            drop = curve[before] - curve[step] or 1.0
            return step - (step - before) * (loss - curve[step]) / drop
    return None


def rows_of(
    sides: Mapping[str, Sequence[Config]], curves: Mapping[str, Sequence[Curve]], ranks: int
) -> list[tuple[str, ...]]:
    """Return the report's rows: the seeds of each side, their mean, and the spread of their losses.

    Each seed is compared with the same seed of the first side.
    """
    rows: list[tuple[str, ...]] = []
    bases = [last(curve) for curve in next(iter(curves.values()))]
    for name, configs in sides.items():
        losses = [last(curve) for curve in curves[name]]
        for config, curve, loss, base in zip(configs, curves[name], losses, bases, strict=True):
            steps = steps_to(curve, base)
            tokens = "never" if steps is None else f"{steps * config.tokens_per_step(ranks):,.0f}"
            rows.append((name, str(config.seed), f"{loss:.4f}", f"{base - loss:.4f}", tokens))
        mean = statistics.fmean(losses)
        rows.append((name, "mean", f"{mean:.4f}", f"{statistics.fmean(bases) - mean:.4f}", ""))
        rows.append((name, "spread", f"{max(losses) - min(losses):.4f}", "", ""))
    return rows


def report(
    sides: Mapping[str, Sequence[Config]],
    curves: Mapping[str, Sequence[Curve]],
    folder: Path,
    ranks: int,
) -> None:
    """Print and write what the runs have learned: report.md and a picture."""
    write_report(
        folder / "report.md",
        "What these configs learn",
        items("config", "seed", "loss", "lower by", "tokens to the first's loss"),
        rows_of(sides, curves, ranks),
        [],
        f"{machine()}; commit {git_commit()}. Validation loss at the end, in nats per token.",
        MEANING,
        "![validation losses](learning.png)",
    )
    pictured = {
        f"{name}, seed {config.seed}": (list(curve), list(curve.values()))
        for name in sides
        for config, curve in zip(sides[name], curves[name], strict=True)
    }
    draw_losses(folder / "learning.png", {}, pictured)


def main(options: LearningOptions, of_all: Sequence[str]) -> None:
    """Do all runs that are not done yet, and report. Raises UserError."""
    sides = plan(options, of_all)
    a_config = next(iter(sides.values()))[0]
    with joined_world(choose_device(a_config.device, launch()), a_config.timeout) as world:
        # one seed of all after the other, so that an interrupted study can be compared
        of_seeds = [
            [learned(config, world) for config in configs]
            for configs in zip(*sides.values(), strict=True)
        ]
        curves = dict(zip(sides, zip(*of_seeds, strict=True), strict=True))
        if world.rank == 0:
            report(sides, curves, Path(options.log_dir), world.world_size)


if __name__ == "__main__":
    with reported(OPTIONS.log_dir):
        main(OPTIONS, OF_ALL)
