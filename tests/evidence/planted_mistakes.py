"""Does a run note that it is off its curve? Plant ten usual mistakes in the quickstart, one at a
time, and train the unchanged quickstart with many seeds.

    python tests/evidence/planted_mistakes.py --seeds 20             ten mistakes, and 20 clean runs
    python tests/evidence/planted_mistakes.py --seeds 10 --curve     writes the curve that judges

A mistake counts as found if the run prints a note or, in its first half, an evaluation that is off
the curve. A clean run should print neither.
"""

import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from runtime.cli import Name, Options, Positive, ZeroIsOff
from runtime.start import start


class MistakesOptions(Options):
    """options"""

    seeds: ZeroIsOff = 20
    """clean runs"""
    curve: bool = False
    """write the curve from these runs"""
    mistake: Name | None = None
    """plant this one only, and let the run print"""
    steps: Positive = 200
    """steps of a run with a mistake"""
    log_dir: Name = "logs"
    """folder for that run"""


if __name__ == "__main__":
    OPTIONS = start(MistakesOptions)  # before torch is imported

import torch
from torch import Tensor

import model
import train
from config import load_config
from dataloader import DataLoader
from run.log import EVAL_COLUMNS, read_rows
from run.reference import CURVES
from runtime.world import World

FIRST_OF_CURVE, FIRST_CLEAN = 1000, 2000  # seeds: the curve judges other runs than its own
SIGMAS = 5.0  # a curve's tolerance, in standard deviations over its seeds
Patch = contextlib.AbstractContextManager[Any]
Batch = tuple[Tensor, Tensor]  # inputs and targets
Read = Callable[[int], Batch]  # a step's batch


def training_batches(change: Callable[[Read, int], Batch]) -> Patch:
    """Change the batches of training; validation reads the stream itself."""
    original = DataLoader.batch

    def batch(self: DataLoader, step: int, micro_step: int = 0) -> Batch:
        return change(lambda step: original(self, step, micro_step), step)

    return mock.patch.object(DataLoader, "batch", batch)


def shifted(read: Read, step: int) -> Batch:
    """Targets are the tokens after the next ones."""
    x, y = read(step)
    return x, y.roll(-1, dims=1)


def other_vocabulary(read: Read, step: int) -> Batch:
    """The training text was tokenized by another vocabulary than the validation text."""
    x, y = read(step)
    return (x * 7919 + 1) % 50257, (y * 7919 + 1) % 50257


def repeated(read: Read, step: int) -> Batch:
    """The same eight batches again and again."""
    return read(1 + step % 8)


def permuted_positions() -> Patch:
    """In training, each batch has its positions in another order."""
    original = model.Transformer.forward

    def forward(
        self: model.Transformer, idx: Tensor, attend: Any = None, positions: Any = None
    ) -> Tensor:
        if self.training:
            positions = torch.randperm(idx.size(1)).expand_as(idx)
        return original(self, idx, attend, positions)

    return mock.patch.object(model.Transformer, "forward", forward)


QUICKSTART = load_config("quickstart.yaml")


def scaled(factor: float, name: str) -> dict[str, Any]:
    """Scale an option of the quickstart, AdamW's and Muon's."""
    return {key: factor * getattr(QUICKSTART, key) for key in (name, f"muon_{name}")}


# mistakes in the options, and in the code
OPTIONS_CHANGED: dict[str, dict[str, Any]] = {
    "rates x 10": scaled(10, "lr"),
    "rates / 10": scaled(0.1, "lr"),
    "no warm-up": {"warmup_steps": 0},
    "weight decay x 100": scaled(100, "weight_decay"),
    "dropout left on": {"dropout": 0.2},
    "clipping at 0.01": {"grad_clip": 0.01},
}
CODE_CHANGED: dict[str, Callable[[], Patch]] = {
    "targets shifted": lambda: training_batches(shifted),
    "wrong vocabulary": lambda: training_batches(other_vocabulary),
    "data repeated": lambda: training_batches(repeated),
    "positions permuted": permuted_positions,
}
MISTAKES = [*OPTIONS_CHANGED, *CODE_CHANGED]


def plant(name: str, folder: str, steps: int) -> None:
    """Train the first steps of the quickstart with a mistake."""
    values = OPTIONS_CHANGED.get(name, {})
    patch = contextlib.nullcontext if values else CODE_CHANGED[name]
    config = load_config("quickstart.yaml", **values, log_dir=folder, keep_last=0, sample_every=0)
    original = train.take_step

    def take_step(run: train.Run, *args: Any) -> None:
        if run.state.step == steps:
            raise KeyboardInterrupt
        original(run, *args)

    with (
        patch(),
        mock.patch.object(train, "take_step", take_step),
        contextlib.suppress(KeyboardInterrupt),
    ):
        train.train(config, World(torch.device("cpu")))


def run_all(commands: dict[str, list[str]], folder: Path) -> Iterator[str]:
    """Run commands one after the other; yields the name of each that is done."""
    for name, words in commands.items():
        command = [sys.executable, *words, f"--log_dir={folder / name}"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        yield name


def verdicts_of(run: Path) -> list[str]:
    """Return a run's notes on its options and on evaluations that are not on track."""
    console = (run / "quickstart" / "console.log").read_text()
    said = r"^note: not the recipe.*$|^step \d+: (?:ahead|behind).*$"
    return re.findall(said, console, re.MULTILINE)


def losses_of(run: Path) -> dict[int, float]:
    """Return a run's validation losses by step."""
    rows = read_rows(run / "quickstart" / "eval.csv", EVAL_COLUMNS)
    return {step: row["val_loss"] for step, row in rows.items() if row["val_loss"] is not None}


def write_curve(runs: list[dict[int, float]]) -> None:
    """Write the mean validation losses of several runs, and how far one may be off them."""
    lines = [
        f"# quickstart.yaml with {len(runs)} seeds: python tests/evidence/planted_mistakes.py "
        f"--seeds {len(runs)} --curve",
        f"# tolerance: {SIGMAS:g} standard deviations over the seeds",
        "tokens,val_loss,tolerance",
    ]
    for step in runs[0]:
        losses = [losses[step] for losses in runs]
        tolerance = SIGMAS * statistics.stdev(losses)
        tokens = step * QUICKSTART.tokens_per_step(1)
        lines.append(f"{tokens},{statistics.fmean(losses):.4f},{tolerance:.4f}")
    (CURVES / "quickstart.csv").write_text("\n".join(lines) + "\n")


def main(options: MistakesOptions) -> None:
    """Train, and print the notes of each run."""
    if options.mistake:
        plant(options.mistake, options.log_dir, options.steps)
        return
    first = FIRST_OF_CURVE if options.curve else FIRST_CLEAN
    train_py = [str(ROOT / "train.py"), "--config=quickstart.yaml", "--keep_last=0"]
    train_py += ["--sample_every=0"] + ["--reference=none"] * options.curve
    clean = {
        str(seed): [*train_py, f"--seed={seed}"] for seed in range(first, first + options.seeds)
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        planted = (
            {} if options.curve else {name: [__file__, f"--mistake={name}"] for name in MISTAKES}
        )
        for name in run_all(planted, folder):
            told = verdicts_of(folder / name)
            print("\n    ".join([f"{name}: {'TOLD' if told else 'not told'}", *told]))
            print(f"    validation losses {losses_of(folder / name)}", flush=True)
        alarms, curves = 0, list[dict[int, float]]()
        for name in run_all(clean, folder):
            curves.append(losses_of(folder / name))
            told = verdicts_of(folder / name)
            alarms += bool(told)
            print(f"clean, seed {name}: {told or 'no alarm'}; {curves[-1]}", flush=True)
        if options.curve:
            write_curve(curves)
        else:
            print(f"clean runs: {options.seeds}, of which {alarms} raised an alarm")


if __name__ == "__main__":
    main(OPTIONS)
