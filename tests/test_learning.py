"""What optimizers learn from the same tokens: the search for rates, the tokens to a loss, and a
study of tiny runs.
"""

import math
import shutil

import pytest

from benchmarks import learning
from benchmarks.learning import LearningOptions, Study, describe, steps_to, tuned
from runtime.errors import TrainingError
from tests.conftest import ALONE
from train import train


def valley(lowest):
    """A loss that is lowest at these rates, and rises with the logarithm of each."""
    return lambda rates: sum(abs(math.log2(rates[name] / rate)) for name, rate in lowest.items())


@pytest.mark.parametrize(
    "lowest",
    [
        {"lr": 0.01, "muon_lr": 0.04},
        {"lr": 0.0025, "muon_lr": 0.02},
        {"lr": 0.08, "muon_lr": 0.0025},
    ],
)
def test_rates_are_tuned_until_both_neighbours_of_each_are_worse(lowest):
    best, tried = tuned(valley(lowest), {"lr": 0.01, "muon_lr": 0.01})
    assert best == lowest
    for name, rate in lowest.items():
        assert {describe(lowest | {name: rate * factor}) for factor in (0.5, 2)} <= set(tried)
    assert tried[describe(best)] == min(tried.values())


def test_no_rates_are_tried_twice():
    asked = []
    tuned(
        lambda rates: (asked.append(describe(rates)), valley({"lr": 0.02})(rates))[1], {"lr": 0.01}
    )
    assert len(asked) == len(set(asked)) == 3  # the start, twice that, and twice the best


def test_the_step_of_a_loss_lies_on_the_line_between_two_evaluations():
    curve = {10: 5.0, 20: 4.0, 30: 3.5}
    assert steps_to(curve, 4.25) == pytest.approx(17.5)
    assert steps_to(curve, 4.0) == 20
    assert steps_to(curve, 6.0) == 10
    assert steps_to(curve, 3.0) is None


def test_a_study_tunes_trains_every_seed_and_does_no_run_twice(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "STARTS", {"adamw": {"lr": 1e-2}, "muon": {"muon_lr": 0.02}})
    config = tiny_config(
        val_fraction=0.2, eval_every=4, checkpoint_every=4, keep_last=1, max_steps=8
    )
    done = []

    def learn(config):
        if config.muon_lr > 0.03 and config.optimizer == "muon":
            raise TrainingError("the loss is nan")
        done.append(config)
        train(config, ALONE)
        return learning.val_losses(config)

    options = LearningOptions(
        config="tiny.yaml", tune_steps=4, seeds=2, log_dir=str(tmp_path / "study")
    )
    Study(config, options, learn).report()
    assert len({config.run_name for config in done}) == len(done)
    assert {(config.seed, config.max_steps) for config in done} == {
        (learning.TUNING_SEED, 4),
        (1, 8),
        (2, 8),
    }
    text = (tmp_path / "study/report.md").read_text()
    assert "| muon_lr 0.04 | inf |" in text
    first = next(line for line in text.splitlines() if line.startswith("| 1 |"))
    ends = {
        (config.optimizer, config.seed): learning.val_losses(config)[8]
        for config in done
        if config.max_steps == 8
    }
    assert first.startswith(
        "| 1 | {:.4f} | {:.4f} | {:.4f} |".format(
            ends["adamw", 1], ends["muon", 1], ends["adamw", 1] - ends["muon", 1]
        )
    )
    assert (tmp_path / "study/learning.png").stat().st_size > 10_000
    for file in (tmp_path / "study").glob("*/*"):
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name != "eval.csv":
            file.unlink()
    known = len(done)
    Study(config, options, learn).report()  # once more
    assert len(done) == known, "a run was trained again"
    assert (tmp_path / "study/report.md").read_text() == text
