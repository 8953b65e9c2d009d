"""What rungs learn: the tokens to a loss, means over seeds, and a ladder of tiny runs."""

import json

import pytest

import ladder
from config import load_config
from measure.ladder import stages
from measure.ladder.learning import (
    means_of,
    rows_of,
    share_of_tokens,
    steps_to,
    with_seeds,
)
from runtime.errors import UserError
from runtime.runlog import read_rows
from tests.conftest import TINY
from tests.test_ladder import (
    OFF,
    climb,
    fake_run,
    nothing_is_known_of_this_machine,  # noqa: F401  # applies to each test here too
    plan,
    table,
)

EVAL = "step,val_loss\n"


@pytest.fixture
def configs(corpus, tmp_path):
    """Configs of a tiny model in the working directory: adamw.yaml, muon.yaml, aa.yaml."""
    adamw = TINY | {"dataset": "tiny", "device": "cpu", "seq_len": 32, "batch_size": 4, "seed": 1}
    adamw |= {"max_steps": 8, "eval_every": 4, "val_fraction": 0.2, "init": "gpt2"}
    (tmp_path / "adamw.yaml").write_text(json.dumps(adamw))
    (tmp_path / "muon.yaml").write_text("{base: adamw.yaml, optimizer: muon}")
    (tmp_path / "aa.yaml").write_text("{base: adamw.yaml, seed: 101}")


def test_the_step_of_a_loss_is_on_the_line_between_two_evaluations():
    curve = {10: 5.0, 20: 4.0, 30: 3.5}
    found = [steps_to(curve, loss) for loss in (4.25, 4.0, 6.0, 3.0)]
    assert found == [pytest.approx(17.5), 20, 10, None]


def test_the_share_of_tokens_is_seed_by_seed_and_none_if_one_never_gets_there():
    first = [{0: 5.0, 10: 4.0}, {0: 5.0, 10: 3.0}]
    ours = [{0: 5.0, 10: 3.0}, {0: 5.0, 10: 1.0}]  # halfway: after 5 steps
    ratio = share_of_tokens(ours, first)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))
    assert share_of_tokens(first, ours) is None
    assert share_of_tokens(first[:1], first[:1]).low is None  # one seed has no interval


def fake_losses(run, *losses):
    fake_run(run)
    rows = "".join(f"{4 * i},{loss}\n" for i, loss in enumerate(losses))
    (run.folder / "eval.csv").write_text(EVAL + rows)


@pytest.mark.usefixtures("configs")
def test_a_curve_leaves_out_the_loss_before_the_first_step_unless_it_is_the_only_common_one():
    (stage,) = plan("adamw.yaml")
    runs = with_seeds(stage, 2)
    fake_losses(runs[0], 6.0, 5.0)
    fake_losses(runs[1], 7.0, 4.0)
    assert means_of({"adamw": runs}) == {"adamw": ([4], [4.5])}
    (runs[1].folder / "eval.csv").write_text(f"{EVAL}0,7.0\n3,4.0\n")  # the clock ended it
    runs[1].forget()
    assert means_of({"adamw": runs}) == {"adamw": ([0], [6.5])}


@pytest.mark.usefixtures("configs")
def test_a_row_has_loss_difference_tokens_speed_and_time_and_noise_is_said():
    rungs = {
        stage.name: with_seeds(stage, 3) for stage in plan("adamw.yaml", "aa.yaml", "muon.yaml")
    }
    seeds = [[run.config.seed for run in runs] for runs in rungs.values()]
    assert seeds == [[1, 2, 3], [101, 102, 103], [1, 2, 3]]
    for i in range(3):
        noise = 0.01 * i
        fake_losses(rungs["adamw"][i], 6.0, 5.0, 4.0 + noise)
        fake_losses(rungs["aa"][i], 6.0, 5.0, 4.02 - noise)
        fake_losses(rungs["muon"][i], 6.0, 4.0 + noise, 3.0 + noise)
    adamw, aa, muon = rows_of(rungs)
    assert (f"{adamw['loss']:.4f}", adamw["lower"]) == ("4.0100 +- 0.0248", None)
    assert f"{aa['lower']:.4f}".endswith(" (within noise)")
    assert (muon["base"], f"{muon['lower']:.4f}") == ("adamw", "1.0000 +- 0.0000")
    assert str(muon["tokens_share"]) == "0.500 (0.500 to 0.500)"
    assert muon["time_share"].value == pytest.approx(0.5)  # at the same speed
    (rungs["muon"][2].folder / "summary.json").unlink()
    rungs["muon"][2].forget()
    assert [row["stage"] for row in rows_of(rungs)] == ["adamw", "aa"]


@pytest.mark.usefixtures("configs", "forked")
def test_every_rung_is_trained_once_with_every_seed_side_by_side_and_reported(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(stages, "cores", lambda: 2 * stages.CORES_OF_A_RUN)
    command = ["adamw.yaml", "muon.yaml", "--seeds", "2", "--rounds", "0"]
    assert climb(*command) == 0
    assert "== 2 of 4: adamw_seed_1, muon_seed_1\n" in capsys.readouterr().out
    folder = tmp_path / "logs/ladder"
    names = [f"{kind}_seed_{seed}" for kind in ("adamw", "muon") for seed in (1, 2)]
    logs = [folder / name / "log.csv" for name in names]
    assert len({tuple(row["loss"] for row in read_rows(log).values()) for log in logs}) == 4
    rows = table(folder / "results.csv")
    assert list(rows) == ["adamw", "muon"]
    page = (folder / "report.html").read_text()
    assert page.index('id="chart"') < page.index('id="view"') < page.index("<article")
    assert (folder / "learning.png").is_file()
    before = [log.stat().st_mtime_ns for log in logs]
    summary = folder / names[0] / "summary.json"  # of another machine: its loss counts
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"machine": "another"}))
    assert climb(*command) == 0
    assert [log.stat().st_mtime_ns for log in logs] == before
    (folder / "results.csv").unlink()
    assert climb("adamw.yaml", "--report_only") == 0
    assert table(folder / "results.csv") == rows


@pytest.mark.usefixtures("configs")
def test_every_seed_of_a_rung_runs_on_as_many_ranks(monkeypatch):
    ranks = []
    monkeypatch.setattr(
        ladder, "run_stages", lambda runs, *_, **__: ranks.extend(run.ranks for run in runs)
    )
    with pytest.raises(UserError, match="no finished stage"):
        climb("adamw.yaml", "muon.yaml", "--seeds", "2", *OFF, "--nproc_per_node", "2")
    assert ranks == [2] * 4


@pytest.mark.usefixtures("configs")
def test_a_config_without_evaluations_has_nothing_to_compare(tmp_path):
    with pytest.raises(UserError, match="sets no eval_every"):
        with_seeds(plan("baseline", folder=tmp_path)[0], 2)


@pytest.mark.usefixtures("configs", "forked")
def test_an_ablation_over_seeds_trains_each_optimization_on_first_and_off_last(tmp_path):
    (tmp_path / "both.yaml").write_text(
        "{base: adamw.yaml, optimizer: muon, grad_clip: 1.0, flash: true}"
    )
    command = ["--ablate", "both.yaml", "--seeds", "1", "--rounds", "0"]
    assert climb(*command) == 0
    folder = tmp_path / "logs/ablate_both"
    ended = {}
    for run in folder.glob("*/eval.csv"):
        config = load_config(str(run.parent / "config.yaml"))
        assert config.flash  # what changes no loss stays as it is
        rows = read_rows(run, ("step", "val_loss"))
        ended[run.parent.name] = (config.optimizer, config.grad_clip), rows[8]["val_loss"]
    assert {name: options for name, (options, _) in ended.items()} == {
        "none_seed_1": ("adamw", 0.0),
        "init_first_seed_1": ("adamw", 0.0),
        "init_last_seed_1": ("muon", 1.0),
        "optimizer_first_seed_1": ("muon", 0.0),
        "optimizer_last_seed_1": ("adamw", 1.0),
        "grad_clip_first_seed_1": ("adamw", 1.0),
        "grad_clip_last_seed_1": ("muon", 0.0),
        "all_seed_1": ("muon", 1.0),
    }
    loss = {name.removesuffix("_seed_1"): loss for name, (_, loss) in ended.items()}
    rows = table(folder / "results.csv")
    assert float(rows["optimizer"]["first"]) == loss["none"] - loss["optimizer_first"]
    assert float(rows["optimizer"]["last"]) == loss["optimizer_last"] - loss["all"]
    (folder / "results.csv").unlink()
    assert climb("--ablate", "both.yaml", "--report_only") == 0
    assert table(folder / "results.csv") == rows
