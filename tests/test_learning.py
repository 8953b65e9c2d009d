"""What configs learn: the tokens to a loss, and a study of tiny runs."""

import math
import re
import shutil

import pytest

from measure import learning
from measure.learning import LearningOptions, learned, plan, report, rows_of, steps_to
from runtime.errors import TrainingError, UserError
from tests.conftest import ALONE, flags
from train import train


def test_the_step_of_a_loss_lies_on_the_line_between_two_evaluations():
    curve = {10: 5.0, 20: 4.0, 30: 3.5}
    assert steps_to(curve, 4.25) == pytest.approx(17.5)
    assert steps_to(curve, 4.0) == 20
    assert steps_to(curve, 6.0) == 10
    assert steps_to(curve, 3.0) is None


@pytest.fixture
def study(tiny_config, tmp_path):
    """The sides of a study of two optimizers and two seeds, and its folder."""
    (tmp_path / "tiny.yaml").write_text("eval_every: 4\nval_fraction: 0.2\ncheckpoint_every: 4\n")
    given = flags(tiny_config(max_steps=8, muon_lr=0.02))
    config = str(tmp_path / "tiny.yaml")
    options = LearningOptions(
        sides=(config, f"{config} --optimizer muon"), seeds=2, log_dir=str(tmp_path / "study")
    )
    return plan(options, given), tmp_path / "study"


def test_a_study_trains_every_config_and_seed_once_and_compares_them(study):
    sides, folder = study
    done = []

    def learn(config):
        done.append((config.optimizer, config.seed))
        train(config, ALONE)

    def learn_all():
        return {name: [learned(config, learn) for config in sides[name]] for name in sides}

    curves = learn_all()
    assert done == [("adamw", 1), ("adamw", 2), ("muon", 1), ("muon", 2)]
    adamw, muon = ([curve[8] for curve in some] for some in curves.values())
    rows = rows_of(sides, curves, ranks=1)
    first, second = sides
    assert [row[:2] for row in rows[:4]] == [(first, n) for n in ("1", "2", "mean", "spread")]
    assert rows[4][:4] == (second, "1", f"{muon[0]:.4f}", f"{adamw[0] - muon[0]:.4f}")
    assert rows[6][2:4] == (f"{sum(muon) / 2:.4f}", f"{(sum(adamw) - sum(muon)) / 2:.4f}")
    assert rows[3][2] == f"{max(adamw) - min(adamw):.4f}"
    assert rows[0][4] == f"{8 * 4 * 32:,}"  # the tokens to its own loss: all
    report(sides, curves, folder, ranks=1)
    assert f"| {first} | 1 | {adamw[0]:.4f} |" in (folder / "report.md").read_text()
    assert (folder / "learning.png").stat().st_size > 10_000
    for checkpoints in folder.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)
    assert learn_all() == curves
    assert len(done) == 4, "a run was trained again"


def test_a_run_that_diverges_has_an_infinite_loss_at_its_end(study, capsys):
    def learn(config):
        raise TrainingError("the loss is nan")

    (configs, _), _ = study[0].values(), None
    assert learned(configs[0], learn) == {8: math.inf}
    assert "the loss is nan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (["learning.yaml"], "at least two different configs"),
        (["learning.yaml"] * 2, "at least two different configs"),
        (["learning.yaml", "quickstart.yaml --eval_every 0"], "sets no eval_every"),
        (["learning.yaml", "A=1 learning.yaml"], "all runs share one environment"),
    ],
)
def test_what_cannot_be_compared_is_one_error_line(sides, message):
    with pytest.raises(UserError, match=message):
        plan(LearningOptions(sides=sides), [])


def test_names_of_runs_have_the_options_of_all():
    sides = plan(LearningOptions(sides=["learning.yaml", "quickstart.yaml"]), ["--lr", "1e-4"])
    names = [str(config.run_name) for configs in sides.values() for config in configs]
    assert re.fullmatch(r"learning\.yaml_lr_1e_4_[0-9a-f]{8}_seed_1", names[0])
    assert len(set(names)) == 6
    assert learning.val_losses(sides["learning.yaml"][0]) == {}
