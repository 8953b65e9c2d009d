"""A run knows whether it is on track: validation losses beside a curve, slow steps; and it may end
by the clock.
"""

import math
import re

import pytest

from config import load_config
from optimizer import learning_rate
from run.expected import ExpectedLosses
from run.reference import Reference
from run.steps import slowness
from runtime.report import project_files
from tests.conftest import at_step, refused
from tests.test_train import column

# ---- a curve


@pytest.fixture
def curve(tmp_path):
    """A curve from 5 nats to 2 over 768 tokens, six steps of `tiny_config`."""
    path = tmp_path / "curve.csv"
    path.write_text("# made up\ntokens,val_loss,tolerance\n0,5,0.1\n384,3,0.1\n768,2,0.2\n")
    return path


def test_a_loss_is_judged_by_the_tolerance_between_the_points_of_the_curve(curve):
    judge = Reference.read(str(curve)).judge
    on_track = "on track: +0.090 from curve's curve, which has 4.000 (usual: within 0.100)"
    assert judge(192, 4.09) == on_track
    assert judge(768, 1.85).startswith("on track: -0.150")
    assert judge(576, 2.1).startswith("ahead: 0.400 below")  # halfway: 2.5, within 0.15
    assert judge(768, 2.6).startswith("behind: 0.600 above curve's curve, which has 2.000")
    assert judge(769, 2.0) is None  # beyond the end of the curve


@pytest.mark.parametrize(
    "text", ["", "tokens,val_loss\n0,1\n", "tokens,val_loss,tolerance\n0,x,1\n", None]
)
def test_a_file_that_is_no_curve_is_refused_by_name(tmp_path, text):
    path = tmp_path / "bad.csv"
    if text is not None:
        path.write_text(text)
    with refused(f"reference {path}: is not a validation curve: .* one of .*quickstart"):
        Reference.read(str(path))


@pytest.mark.parametrize("path", project_files("configs/reference/*.csv"))
def test_each_curve_here_says_its_source_and_belongs_to_a_config_that_names_it(path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")  # more ranks than a step of its config has micro-steps
    reference = Reference.read(path.stem)
    assert path.read_text().startswith("# ")
    assert reference.config.reference == path.stem
    assert reference.losses == sorted(reference.losses, reverse=True)


def test_a_run_names_at_once_the_options_that_differ_from_its_curves_own(go, here):
    """`weight_decay` is the recipe's, paths do not matter."""
    go(reference="quickstart", eval_every=6, val_fraction=0.1, weight_decay=0.1)
    (note,) = re.findall(r"^note: not the recipe.*$", (here / "console.log").read_text(), re.M)
    assert "lr 0.0003 instead of 0.004" in note
    assert not re.search("weight_decay|data_dir", note)


def test_each_evaluation_of_a_run_is_judged_once_also_from_another_folder(
    go, here, curve, monkeypatch
):
    monkeypatch.chdir(curve.parent)
    go(max_steps=3, eval_every=3, val_fraction=0.2, reference=curve.name)
    monkeypatch.chdir("/")
    go(resume="auto", max_steps=6)
    console = (here / "console.log").read_text()
    judged = re.findall(r"^step (\d+): (?:behind|on track|ahead)", console, re.MULTILINE)
    assert judged == ["0", "3", "6"]


# ---- losses to expect


@pytest.mark.parametrize(
    ("losses", "passed"),
    [
        ([4.1, 0, 9, 4, 4, 2.9, 2, 1, 0, 5, 9, 9, 0, 0], [6, 9]),
        ([3.9, 5, 5, 1, 1, 1, 1], [7]),  # below the first one from the start, as in fine-tuning
        ([4.1, math.nan, 3, 3, 3, 3, 3], [7]),
    ],
)
def test_an_expected_loss_is_passed_once_when_the_mean_of_five_logged_losses_is_lower(
    losses, passed
):
    judge = ExpectedLosses({"untrained": 4.0, "token frequencies alone": 2.0})
    assert [step for step, loss in enumerate(losses, 1) for _ in judge.add(step, loss)] == passed


def lines_on_losses(run):
    text = (run / "console.log").read_text()
    return re.findall("^loss to expect.*|^.*is below.*", text, re.MULTILINE)


def test_a_run_says_once_when_its_loss_has_passed_those_to_expect_also_resumed(go, here):
    """100 of the vocabulary's 128 tokens are in the corpus, equally often."""
    options = {"init": "torch", "lr": 1e-3, "log_every": 2, "val_fraction": 0.2}
    go(**options, max_steps=40, run_name="straight")
    head, first, second = lines_on_losses(here.with_name("straight"))
    assert head == "loss to expect: 4.85 untrained (ln 128), 4.61 from token frequencies alone"
    step, said = first.removeprefix("step ").split(":")
    assert said == " the mean of the last 5 logged losses is below 4.85 (untrained)"
    go(**options, max_steps=int(step))
    go(resume="auto", max_steps=40)
    assert lines_on_losses(here) == [head, first, head, second]


# ---- slow steps


def test_a_step_that_takes_three_times_the_median_of_the_last_128_is_noted():
    assert not slowness(9.0, 15 * [1.0])  # too few steps
    before = 200 * [9.0] + 128 * [1.0]
    assert not slowness(2.9, before)
    assert slowness(3.3, before) == ["took 3.30 s, 3.3 times the median of the last steps"]


# ---- an end by the clock


@pytest.fixture
def clock(monkeypatch):
    """A clock by which each step takes a second, and nothing else does."""
    passed = []
    monkeypatch.setattr("time.perf_counter", lambda: sum(passed))
    at_step(monkeypatch, lambda *_: passed.append(1.0))


@pytest.mark.usefixtures("clock")
def test_a_run_ends_by_the_clock_with_all_that_the_end_of_a_run_has(go, here, tiny_config):
    options = {"lr_schedule": "cosine", "eval_every": 100, "val_fraction": 0.2}
    options |= {"max_minutes": 0.2, "max_steps": 3, "log_every": 5}
    summary = go(**options)
    assert (summary["steps"], summary["interrupted"]) == (12, False)
    assert summary["val_loss"] is not None
    steps, config = [1, 5, 10, 12], tiny_config(**options)
    assert column(here, "step") == steps
    rates = [learning_rate(step, config, seconds=step - 1) for step in steps]
    assert column(here, "lr") == rates
    assert rates[-1] == pytest.approx(config.final_lr(), rel=0.2)


@pytest.mark.usefixtures("clock")
def test_a_resumed_run_has_the_rest_of_its_minutes(go, here, stop_at, capsys):
    options = {"lr_schedule": "wsd", "max_minutes": 0.2}
    stop_at(5)
    assert go(**options)["interrupted"]
    assert go(**options, resume="auto")["resumed_after_step"] == 5
    assert column(here, "step") == [*range(1, 13)]
    assert go(**options, resume="auto") == {"steps": 12}
    assert "step_000012 is the last step; raise max_minutes to resume" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "halfway", "late"), [("cosine", 0.5, 0.0245), ("wsd", 1.0, 0.5)]
)
def test_by_the_clock_a_schedule_follows_the_time_whatever_the_steps(schedule, halfway, late):
    config = load_config(lr_schedule=schedule, lr=1.0, min_lr=0.0, warmup_steps=50, max_minutes=1)
    assert learning_rate(25, config, 20.0) == 0.5
    shown = [learning_rate(51 + second, config, second) for second in (0, 30, 54, 60)]
    assert shown == pytest.approx([1.0, halfway, late, 0.0], abs=1e-3)
