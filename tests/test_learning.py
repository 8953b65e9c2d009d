"""Losses of stages: the tokens to a loss, means over seeds, and a ladder of tiny runs."""

import json
from pathlib import Path

import pytest

from config import load_config
from measure.ladder.learning import (
    Learned,
    best_of,
    compare,
    is_again,
    mean_of,
    rows_of,
    steps_to,
)
from measure.ladder.losses import summarize
from measure.ladder.record import Device, Record
from measure.ladder.results import look_up
from measure.ladder.stages import ablated_losses, plan_sweep, with_bases, with_seeds
from measure.report.estimate import Estimate
from measure.report.report import Row
from run.log import read_rows
from tests.conftest import TINY, TINY_RUN, refused
from tests.test_ladder import climb, fake_comparison, fake_run, plan, table

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture
def configs(corpus, tmp_path):
    """Configs of a tiny model in the working directory: adamw.yaml, muon.yaml, aa.yaml."""
    adamw = TINY | TINY_RUN | {"seed": 1, "init": "gpt2"}
    adamw |= {"max_steps": 8, "eval_every": 4, "val_fraction": 0.2}
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
    cases = {"half": (ours, first), "never": (first, ours), "one": (first[:1], first[:1])}
    found = compare(
        [Learned(name, own, [], goal, True, None) for name, (own, goal) in cases.items()]
    )
    shares = {name: values["tokens_share"] for name, values in found.items()}
    assert shares["half"] == Estimate(*3 * [pytest.approx(0.5)])
    assert (shares["never"], shares["one"].value) == (None, 1.0)


def test_a_mean_curve_leaves_out_the_loss_before_the_first_step():
    assert mean_of([{0: 6.0, 4: 5.0}, {0: 7.0, 4: 4.0}]) == {4: 4.5}


def fake_losses(record, stage, *losses, every=4):
    """Record a finished run with these validation losses, without running it."""
    fake_run(record, stage)
    steps = [every * i for i in range(len(losses))]
    record.runs[stage.name].eval |= {"step": steps, "val_loss": [*losses]}


def results_of(record, seeds):
    return {stage: [look_up(record, own) for own in of] for stage, of in seeds.items()}


@pytest.mark.usefixtures("configs")
def test_a_row_has_loss_difference_tokens_speed_and_time_and_noise_is_said():
    record, seeds = Record(), with_seeds(plan("adamw.yaml", "aa.yaml", "muon.yaml"), 3)
    numbers = [[stage.config.seed for stage in own] for own in seeds.values()]
    assert numbers == [[1, 2, 3], [101, 102, 103], [1, 2, 3]]
    for i, (adamw, aa, muon) in enumerate(zip(*seeds.values(), strict=True)):
        noise = 0.01 * i
        fake_losses(record, adamw, 6.0, 5.0, 4.0 + noise)
        fake_losses(record, aa, 6.0, 5.0, 4.02 - noise)
        fake_losses(record, muon, 6.0, 4.0 + noise, 3.0 + noise)
        fake_comparison(record, muon, 2.0)
    adamw, aa, muon = (row.values for row in rows_of(record, results_of(record, seeds)))
    assert (f"{adamw['loss']:.4f}", adamw["lower"]) == ("4.0100 +- 0.0141", None)
    assert [values["sd"] for values in (adamw, muon)] == 2 * [pytest.approx(0.01)]
    # its seeds are not paired with the base's: a variance of its own, not the pool's
    assert f"{aa['lower']:.4f}".endswith("0.0000 +- 0.0497 (within noise)")
    assert (muon["base"], f"{muon['lower']:.4f}") == ("adamw", "1.0000 +- 0.0000")
    assert str(muon["tokens_share"]) == "0.500 (0.500 to 0.500)"
    assert (adamw["speed"].value, aa["speed"], muon["speed"].value) == (1.0, None, 2.0)
    assert muon["time_share"].value == pytest.approx(0.5 / 2.0)
    del record.runs["muon_seed_3"]
    assert [row.name for row in rows_of(record, results_of(record, seeds))] == ["adamw", "aa"]


@pytest.mark.usefixtures("configs")
def test_only_the_first_stage_itself_with_other_seeds_is_noise(tmp_path):
    (tmp_path / "mine.yaml").write_text("{base: adamw.yaml, optimizer: muon, seed: 7}")
    adamw, aa, mine = plan("adamw.yaml", "aa.yaml", "mine.yaml")
    assert [is_again(stage, adamw) for stage in (adamw, aa, mine)] == [False, True, False]


@pytest.mark.usefixtures("configs", "forked")
def test_every_stage_is_trained_once_with_every_seed_side_by_side_and_reported(tmp_path, capsys):
    command = ["adamw.yaml", "muon.yaml", "--seeds", "2", "--rounds", "0"]
    two_gpus = Device(name="cpu", gpus=2)
    assert climb(*command, device=two_gpus) == 0
    assert "== 2 of 4: adamw_seed_1, muon_seed_1\n" in capsys.readouterr().out
    folder = tmp_path / "logs/ladder"
    names = [f"{kind}_seed_{seed}" for kind in ("adamw", "muon") for seed in (1, 2)]
    logs = [folder / name / "log.csv" for name in names]
    assert len({tuple(row["loss"] for row in read_rows(log).values()) for log in logs}) == 4
    rows = table(folder / "results.csv")
    assert list(rows) == ["adamw", "muon"]
    page = (folder / "report.html").read_text()
    assert page.index('class="chart"') < page.index('id="muon"') < page.index("How this was")
    assert (folder / "learning.svg").is_file()
    before = [log.stat().st_mtime_ns for log in logs]
    record = Record.load(folder)
    record.runs[names[0]].summary.machine = "another"  # its loss counts
    record.save()
    assert climb(*command, device=two_gpus) == 0
    assert [log.stat().st_mtime_ns for log in logs] == before
    (folder / "results.csv").unlink()
    assert climb("adamw.yaml", "--report_only") == 0
    again = table(folder / "results.csv")
    assert [row["lower"] for row in again.values()] == [row["lower"] for row in rows.values()]
    assert not rows["muon"]["speed"], "side by side, not interleaved"


@pytest.mark.parametrize(
    ("lower", "text"),
    [
        (
            Estimate(0.2, 0.1, 0.3),
            "0.2000 nats per token lower, 0.100 to 0.300 with 95% confidence",
        ),
        (Estimate(-0.2, -0.3, -0.1), "0.2000 nats per token higher, 0.100 to 0.300"),
        (Estimate(-0.1, -0.4, 0.2), "no clear change, 0.1000 nats per token higher, -0.200 to 0.4"),
        (Estimate(-0.1), "0.1000 nats per token higher, one seed: no interval"),
    ],
)
def test_the_summary_of_two_stages_says_the_direction_of_their_difference(lower, text):
    loss = Estimate(4.0)
    rows = [
        Row("adamw", {"loss": loss, "lower": None}),
        Row("lion", {"loss": loss, "lower": lower, "tokens_share": None}),
    ]
    assert f"lion: {text}" in str(summarize(rows, 1, ""))


def test_of_one_seed_the_summary_counts_no_stage_as_unclear():
    rows = [Row("adamw", {"loss": Estimate(4.0), "lower": None})]
    for name, lower in (("lion", 0.2), ("muon", -0.1)):
        values = {"loss": Estimate(4.0 - lower), "lower": Estimate(lower), "tokens_share": None}
        rows.append(Row(name, values))
    rows[-1].values["tokens_share"] = Estimate(0.5)
    summary = str(summarize(rows, 1, ""))
    assert "2 stages with one seed each: no intervals." in summary
    assert summary.startswith("Validation loss 4.000 with adamw, 4.100 with muon")


@pytest.mark.usefixtures("configs")
def test_the_best_value_of_a_sweep_is_named_with_neighbours_within_noise_and_at_an_edge():
    values = with_bases(plan_sweep("lr=1e-1,1e-4,1e-2,1e-3", "adamw.yaml", [], Device()))
    record, seeds = Record(seeds=2), with_seeds(values, 2)
    for i, (_, *finished) in enumerate(zip(*seeds.values(), strict=True)):
        for stage, loss in zip(finished, (4.0, 4.01 + 0.1 * i, 5.0), strict=True):
            fake_losses(record, stage, 6.0, loss)
    rows = rows_of(record, results_of(record, {stage: seeds[stage] for stage in values[1:]}))
    loss = "Best: lr=1e-3, validation loss 4.0000 +- 0.0919: neighbours that may be as good: "
    assert str(best_of(rows, values)) == f"{loss}lr=1e-2\n\nlr: 1e-3"
    edge = "; it is at the edge of the sweep: try lower values"
    assert str(best_of(rows, values[1:])) == f"{loss}lr=1e-2{edge}\n\nlr: 1e-3"


@pytest.mark.usefixtures("configs", "forked")
def test_a_sweep_trains_each_value_once_without_those_that_diverge_and_ends_in_the_best_line(
    capsys,
):
    sweep = ["adamw.yaml", "--seeds", "1", "--sweep"]
    assert climb(*sweep, "lr=1e-2,1e-4") == 0
    said = capsys.readouterr().out
    assert "neighbours that may be as good: lr=1e-4; it is at the edge" in said
    assert said.endswith(": try higher values\n\nlr: 1e-2\n")
    logs = [Path(f"logs/sweep_adamw_lr/lr={rate}_seed_1/log.csv") for rate in ("1e-4", "1e-2")]
    before = [log.stat().st_mtime_ns for log in logs]
    assert climb(*sweep, "lr=1e-2,1e30,1e-4") == 1
    said = capsys.readouterr().out
    assert "failed: lr=1e30_seed_1: " in said
    assert said.endswith("lr=1e-4\n\nlr: 1e-2\n")
    assert [log.stat().st_mtime_ns for log in logs] == before
    assert climb("adamw.yaml", "--sweep", "lr", "--report_only") == 0
    assert capsys.readouterr().out.endswith("lr=1e-4\n\nlr: 1e-2\n")
    assert list(table(Path("logs/sweep_adamw_lr/results.csv"))) == ["lr=1e-4", "lr=1e-2"]


@pytest.mark.usefixtures("configs", "forked")
def test_an_ablation_over_seeds_switches_each_optimization_off_and_compares_with_other_seeds(
    tmp_path,
):
    (tmp_path / "both.yaml").write_text(
        "{base: adamw.yaml, optimizer: muon, grad_clip: 1.0, flash: true}"
    )
    options = "--seeds 1 --rounds 6 --stages optimizer,aa"
    assert climb("--ablate", "both.yaml", *options.split()) == 0
    folder = tmp_path / "logs/ablate_both"
    ended, loss = {}, {}
    for run in folder.glob("*/eval.csv"):
        config = load_config(str(run.parent / "config.yaml"))
        assert config.flash  # what changes no loss stays as it is
        ended[run.parent.name] = config.optimizer, config.grad_clip, config.seed
        loss[run.parent.name] = read_rows(run, ("step", "val_loss"))[8]["val_loss"]
    assert ended == {
        "without_optimizer_seed_1": ("adamw", 1.0, 1),
        "aa_seed_101": ("muon", 1.0, 101),
        "all_seed_1": ("muon", 1.0, 1),
    }
    rows = table(folder / "results.csv")
    bases = {"optimizer": "without_optimizer_seed_1", "aa": "aa_seed_101"}
    assert [*rows] == [*bases]
    (folder / "results.csv").unlink()
    assert climb("--ablate", "both.yaml", "--report_only") == 0
    assert table(folder / "results.csv") == rows
    lacks = "note: ladder.json has all_seed_1, .*, but lacks all_seed_2, "  # no speed is left out
    with refused(f"^logs/ablate_both: no finished stage to report\n{lacks}", lines=2):
        climb("--ablate", "both.yaml", "--report_only", "--seeds", "2")
    (whole,) = plan("both.yaml")
    assert [*ablated_losses(whole)] == ["init", "optimizer", "grad_clip", "aa"]
    for name, base in bases.items():
        figures = {key: float(value or 0) for key, value in rows[name].items() if value != name}
        assert figures["lower"] == loss[base] - loss["all_seed_1"]
        assert (figures["tokens_share"] > 0) == (figures["lower"] >= 0)
        assert figures["time_share"] == pytest.approx(figures["tokens_share"] / figures["speed"])
