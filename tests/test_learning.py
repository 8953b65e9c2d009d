"""What configs learn: the tokens to a loss, and a study of tiny runs."""

import math
import re
import shutil
import statistics

import pytest

from measure import learning
from measure.learning import LearningOptions, last, main, plan, steps_to, val_losses
from runtime.errors import TrainingError, UserError
from tests.conftest import flags
from train import train


def test_the_step_of_a_loss_lies_on_the_line_between_two_evaluations():
    curve = {10: 5.0, 20: 4.0, 30: 3.5}
    found = [steps_to(curve, loss) for loss in (4.25, 4.0, 6.0, 3.0)]
    assert found == [pytest.approx(17.5), 20, 10, None]


@pytest.fixture
def study(tiny_config, tmp_path):
    """The command line of a study of two optimizers and two seeds."""
    path = tmp_path / "tiny.yaml"
    path.write_text("eval_every: 4\nval_fraction: 0.2\ncheckpoint_every: 4\n")
    sides = (str(path), f"{path} --optimizer muon")
    options = LearningOptions(sides=sides, seeds=2, log_dir=str(tmp_path / "study"))
    return options, flags(tiny_config(max_steps=8, muon_lr=0.02))


def test_a_study_trains_every_config_and_seed_once_and_compares_them(study, tmp_path, monkeypatch):
    done = []

    def counted(config, world):
        done.append((config.optimizer, config.seed))
        return train(config, world)

    monkeypatch.setattr(learning, "train", counted)
    main(*study)
    assert done == [("adamw", 1), ("muon", 1), ("adamw", 2), ("muon", 2)]
    sides, folder = plan(*study), tmp_path / "study"
    adamw, muon = ([last(val_losses(config)) for config in configs] for configs in sides.values())
    report = (folder / "report.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in report.splitlines() if line[:2] == "| "][2:]
    assert [row[:2] for row in rows] == [
        [name, which] for name in sides for which in ("1", "2", "mean", "spread")
    ]
    assert rows[4][2:4] == [f"{muon[0]:.4f}", f"{adamw[0] - muon[0]:.4f}"]
    mean = statistics.fmean(muon)
    assert rows[6][2:4] == [f"{mean:.4f}", f"{statistics.fmean(adamw) - mean:.4f}"]
    assert rows[0][4] == f"{8 * 4 * 32:,}"  # the tokens to its own loss: all
    assert (folder / "learning.png").is_file()
    for checkpoints in folder.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)
    main(*study)
    assert (folder / "report.md").read_text() == report
    assert len(done) == 4, "a run was trained again"


def test_a_run_that_diverges_has_an_infinite_loss_at_its_end(study, monkeypatch, capsys):
    def diverge(*_):
        raise TrainingError("the loss is nan")

    monkeypatch.setattr(learning, "train", diverge)
    config = next(iter(plan(*study).values()))[0]
    assert learning.learned(config, None) == {8: math.inf}
    assert "the loss is nan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (["learning.yaml"], "at least two different configs"),
        (["learning.yaml", "quickstart.yaml --eval_every 0"], "sets no eval_every"),
        (["learning.yaml", "A=1 learning.yaml"], "all runs share one environment"),
    ],
)
def test_what_cannot_be_compared_is_one_error_line(sides, message):
    with pytest.raises(UserError, match=message):
        plan(LearningOptions(sides=sides), [])


def test_names_of_runs_have_the_options_of_all():
    sides = plan(LearningOptions(sides=["learning.yaml", "quickstart.yaml"]), ["--lr", "1e-4"])
    names = [config.run_name for configs in sides.values() for config in configs]
    assert re.fullmatch(r"learning\.yaml_lr_1e_4_[0-9a-f]{8}_seed_1", names[0])
    assert len(set(names)) == 6
