"""What optimizers learn from the same tokens, each at rates tuned for it: validation loss at the
end, and tokens to AdamW's.

    python -m benchmarks.learning learning.yaml --tune_steps 305
    python -m benchmarks.learning quickstart.yaml -- --max_steps 200     options after -- go to every run

Tunes with one seed: each rate is doubled and halved until both neighbours are worse. Then trains
every seed at the best rates. All runs stay in the folder, so that the same command goes on where it
was interrupted; of those that are done their eval.csv is enough.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from runtime.interrupt import end_at_ctrl_c

    end_at_ctrl_c()

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from config import Config, Count
from runtime.cli import Options, parse, parse_command_line
from runtime.errors import TrainingError, UserError, reported
from runtime.files import write_whole
from runtime.report import draw_losses, git_commit, items, machine, markdown_table, print_table
from runtime.runlog import read_rows

# where each side's search for its rates begins
STARTS: dict[str, dict[str, float]] = {"adamw": {"lr": 2e-3}, "muon": {"muon_lr": 0.02, "lr": 4e-3}}
TUNING_SEED = 1337
Curve = dict[int, float]  # validation loss by step
Learn = Callable[[Config], Curve]


class LearningOptions(Options):
    """options"""

    config: str = "learning.yaml"
    """a training config: a path, or a name in configs/"""
    tune_steps: Count | None = None
    """steps of the runs that rates are tuned with (none: as many as the config's)"""
    seeds: Count = 3
    """seeds that each side is trained with at its best rates: 1, 2, ..."""
    log_dir: str = "logs/learning"
    """folder for all runs and the report"""


def tuned(
    loss_of: Callable[[Mapping[str, float]], float], start: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """The rates with the lowest loss, and the loss of all that were tried, in words.

    One rate after the other is doubled, then halved, for as long as the loss falls, until no rate
    changes any more: so both neighbours of each are worse.
    """
    best, tried = dict(start), dict[str, float]()

    def loss(rates: Mapping[str, float]) -> float:
        if describe(rates) not in tried:
            tried[describe(rates)] = loss_of(rates)
        return tried[describe(rates)]

    before: dict[str, float] = {}
    while best != before:
        before = dict(best)
        for name in start:
            for factor in (2, 0.5):
                while loss(best | {name: best[name] * factor}) < loss(best):
                    best[name] *= factor
    return best, tried


def describe(rates: Mapping[str, float]) -> str:
    """Rates, for the user and for the names of folders."""
    return " ".join(f"{name} {rate:g}" for name, rate in rates.items())


def steps_to(curve: Curve, loss: float) -> float | None:
    """The step at which a validation loss is first reached, between two evaluations on the line
    from one to the other.
    """
    before: tuple[int, float] | None = None
    for step, now in sorted(curve.items()):
        if now <= loss:
            return (
                step
                if before is None
                else before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - now)
            )
        before = step, now
    return None


class Study:
    """The runs of both sides in one folder."""

    def __init__(self, config: Config, options: LearningOptions, learn: Learn):
        self.config, self.options, self.learn = config, options, learn

    def run(self, side: str, rates: Mapping[str, float], seed: int, steps: int) -> Curve:
        """The validation losses of one run; infinite at its end if it diverges. A run whose
        eval.csv has its last step is done.
        """
        name = "_".join(f"{side} {describe(rates)} seed {seed} steps {steps}".split())
        changes = {
            "optimizer": side,
            "seed": seed,
            "max_steps": steps,
            "run_name": name,
            "log_dir": self.options.log_dir,
            "resume": "auto",
            "warmup_steps": min(self.config.warmup_steps, steps // 10),
            **rates,
        }
        config = Config.model_validate(self.config.model_dump() | changes)
        try:
            if (Path(self.options.log_dir) / name / "eval.csv").exists() and steps in (
                curve := val_losses(config)
            ):
                return curve
            return self.learn(config)
        except TrainingError as error:
            print(f"{name}: {error}")
            return {steps: math.inf}

    def tune(self, side: str) -> tuple[dict[str, float], dict[str, float]]:
        """As `tuned`, for one side."""
        steps = self.options.tune_steps or self.config.max_steps
        return tuned(lambda rates: last(self.run(side, rates, TUNING_SEED, steps)), STARTS[side])

    def report(self) -> None:
        """Do all runs that are not done yet; print and write what they found."""
        found = {side: self.tune(side) for side in STARTS}
        seeds = range(1, self.options.seeds + 1)
        curves = {
            side: [self.run(side, best, seed, self.config.max_steps) for seed in seeds]
            for side, (best, _) in found.items()
        }
        lines = report(self.config, self.options, found, curves)
        folder = Path(self.options.log_dir)
        write_whole(folder / "report.md", "\n".join(lines) + "\n")
        draw_losses(
            folder / "learning.png",
            {},
            {
                f"{side}, seed {seed}": (list(curve), list(curve.values()))
                for side, some in curves.items()
                for seed, curve in zip(seeds, some, strict=True)
            },
        )
        print(f"{folder}/ has report.md and learning.png")


def val_losses(config: Config) -> Curve:
    """What a run has evaluated. Raises UserError if it has not."""
    rows: dict[int, Any] = read_rows(
        Path(config.log_dir) / str(config.run_name) / "eval.csv", ("step", "val_loss")
    )
    return {step: row["val_loss"] for step, row in rows.items()}


def last(curve: Curve) -> float:
    """The loss at the end."""
    return curve[max(curve)]


ENDS = items("seed", "AdamW", "Muon", "lower by", "tokens to AdamW's loss", "share")


def report(
    config: Config,
    options: LearningOptions,
    found: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]],
    curves: Mapping[str, Sequence[Curve]],
) -> list[str]:
    """Print the table of the seeds; returns the lines of a report."""
    per_step, shares = config.tokens_per_step(1), list[float]()
    rows: list[tuple[str, ...]] = []
    for seed, (adamw, muon) in enumerate(zip(curves["adamw"], curves["muon"], strict=True), 1):
        steps = steps_to(muon, last(adamw))
        shares += [] if steps is None else [steps / config.max_steps]
        rows.append(
            (
                str(seed),
                f"{last(adamw):.4f}",
                f"{last(muon):.4f}",
                f"{last(adamw) - last(muon):.4f}",
                "never" if steps is None else f"{steps * per_step:,.0f}",
                "" if steps is None else f"{shares[-1]:.2f}",
            )
        )
    ends = {side: [last(curve) for curve in some] for side, some in curves.items()}
    rows.append(
        (
            "mean",
            *(f"{statistics.fmean(ends[side]):.4f}" for side in STARTS),
            f"{statistics.fmean(ends['adamw']) - statistics.fmean(ends['muon']):.4f}",
            "",
            f"{statistics.fmean(shares):.2f}" if len(shares) == len(rows) else "",
        )
    )
    rows.append(
        (
            "spread",
            *(f"{max(ends[side]) - min(ends[side]):.4f}" for side in STARTS),
            "",
            "",
            f"{max(shares) - min(shares):.2f}" if shares else "",
        )
    )
    print_table(f"{config.max_steps * per_step:,} tokens", ENDS, rows)
    lines = [
        f"# {Path(options.config).stem}: what AdamW and Muon learn from the same tokens",
        "",
        f"{machine()}; commit {git_commit()}. {config.max_steps:,} steps of {per_step:,} tokens; "
        f"validation loss in nats.",
        "",
        *markdown_table(ENDS, rows),
        "",
        "Spread: the largest less the smallest. Tokens: where Muon's validation loss first is "
        "that of AdamW's end, with the "
        "same seed; between two evaluations, on a straight line. Share: of all tokens.",
        "",
        "![validation losses](learning.png)",
        "",
    ]
    for side, (best, tried) in found.items():
        lines += [
            f"## Rates of {side}",
            "",
            f"Best: {describe(best)}. Seed {TUNING_SEED}, "
            f"{options.tune_steps or config.max_steps:,} steps.",
            "",
            *markdown_table(
                items("rates", "validation loss"),
                [(rates, f"{loss:.4f}") for rates, loss in tried.items()],
            ),
            "",
        ]
    return lines


def main(options: LearningOptions, given: Sequence[str]) -> None:
    """Run the study. Raises UserError."""
    config = parse(Config, ["--config", options.config, *given], config_file=True)
    if not config.eval_every:
        raise UserError(
            f"{options.config}: sets no eval_every, so there is no validation loss to compare"
        )
    from runtime.device import choose_device
    from runtime.world import joined_world, launch
    from train import train

    with joined_world(choose_device(config.device, launch()), config.timeout) as world:

        def learn(config: Config) -> Curve:
            train(config, world)
            return val_losses(config)

        Study(config, options, learn).report()


if __name__ == "__main__":
    AT = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    OPTIONS = parse_command_line(
        LearningOptions, sys.argv[1:AT], description=__doc__, positional="config"
    )
    from runtime.start import set_up_process

    set_up_process()
    with reported(OPTIONS.log_dir):
        main(OPTIONS, sys.argv[AT + 1 :])
