"""Following a run in TensorBoard and Weights & Biases: they have the figures of the logs."""

import math
import os
import shutil
from collections import namedtuple

import pytest
import torch

import run.state as run_state
import run.track as track
import train as train_module
from config import load_config
from run.log import LOG_COLUMNS, read_rows
from tests.conftest import WITH_TEXT, at_step, refused

EVERYTHING = WITH_TEXT | {
    "batch_size": 1,
    "val_fraction": 0.02,
    "eval_every": 3,
    "sample_every": 4,
    "sample_prompt": "The",
    "sample_tokens": 2,
    "checkpoint_every": 2,
    "max_steps": 9,
}


def logged(folder):
    """What log.csv and eval.csv have: {name: {step: value}}."""
    curves = {}
    for path, group in ((folder / "log.csv", "train"), (folder / "eval.csv", "eval")):
        for step, row in read_rows(path, ()).items() if path.exists() else ():
            for column in row.keys() - {"step"}:
                curves.setdefault(f"{group}/{column}", {})[step] = row[column]
    return curves


def same(curves, folder):
    """Check that a tracker's curves are the log's: the same steps and values, as far as 32 bits
    and the log's rounding go; and that the figures which only trackers have are shares and there.
    """
    curves, ours = dict(curves), logged(folder)
    utilization, memory = curves.pop("train/utilization"), curves.pop("train/memory_mb")
    assert curves.keys() == ours.keys()
    for name, expected in ours.items():
        rounded = {"train/dt_ms": 0.0006, "train/tokens_per_sec": 0.06}.get(name, 0)
        assert curves[name] == pytest.approx(expected, rel=1e-6, abs=rounded), name
    assert memory.keys() | utilization.keys() <= ours["train/loss"].keys()
    assert all(0 < share <= 1 for share in utilization.values())


# ---- TensorBoard


@pytest.fixture
def tensorboard():
    """Reads a run as TensorBoard does: curves, and texts by name and step."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    def read(folder):
        all_of_them = dict.fromkeys(("scalars", "text"), 0)
        events = EventAccumulator(str(folder), tensor_size_guidance=all_of_them)
        events.Reload()
        curves, texts = {}, {}
        for name in events.Tags()["tensors"]:
            is_text = events.SummaryMetadata(name).plugin_data.plugin_name == "text"
            values = (texts if is_text else curves).setdefault(name, {})
            for point in events.Tensors(name):
                value = make_ndarray(point.tensor_proto).item()
                assert point.step not in values, "a step twice"
                values[point.step] = value.decode() if is_text else value
        return curves, {name.removesuffix("/text_summary"): text for name, text in texts.items()}

    return read


def test_tensorboard_has_every_figure_of_the_logs_and_samples_and_options(
    go, here, tensorboard, capsys
):
    go(**EVERYTHING, tensorboard=True)
    curves, texts = tensorboard(here)
    same(curves, here)
    assert curves["train/memory_mb"].keys() == curves["train/utilization"].keys() == {*range(1, 10)}
    assert f"tensorboard --logdir {here.parent}" in capsys.readouterr().out
    assert texts["sample"].keys() == {4, 8, 9}
    assert all(text.startswith("    The") for text in texts["sample"].values())
    assert "    max_steps: 9\n" in texts["config"][0]


def test_a_run_that_was_killed_has_its_whole_curves_with_each_step_once(go, here, tensorboard):
    go(**EVERYTHING, tensorboard=True)
    # killed in step 9 after the checkpoint of step 6, while an event was written
    for lost in here.glob("checkpoints/*_00000[89]"):
        shutil.rmtree(lost)
    (events,) = here.glob("events.*")
    os.truncate(events, events.stat().st_size - 20)
    go(load_config(resume=str(here)))
    same(tensorboard(here)[0], here)


def test_one_more_figure_of_a_step_reaches_metrics_csv_and_trackers_once_for_each_step(
    go, here, tensorboard, monkeypatch
):
    """A later version of the code resumes the run with another figure in place of the first."""
    options, known = {"tensorboard": True, "checkpoint_every": 2}, run_state.Figures._fields
    go(**options)
    assert (here / "metrics.csv").exists() == (len(known) > 2)
    for name, changes in (("old", {}), ("new", {"resume": "auto", "max_steps": 7})):
        More = namedtuple("More", [*known, name])
        monkeypatch.setattr(run_state, "Figures", More)
        monkeypatch.setattr(train_module, "Figures", lambda *two, More=More: More(*two, sum(two)))
        shutil.rmtree(here / "checkpoints/step_000006")
        go(**options | changes)
    log, metrics = read_rows(here / "log.csv"), read_rows(here / "metrics.csv", ())
    assert [*log[1]] == [*LOG_COLUMNS]
    sums = {step: pytest.approx(row["loss"] + row["norm"]) for step, row in log.items()}
    old, new = (
        {step: row[name] for step, row in metrics.items() if row[name] is not None}
        for name in ("old", "new")
    )
    assert (len(old), old | new) == (4, sums)
    curves, _ = tensorboard(here)
    assert curves["train/old"] | curves["train/new"] == sums


# ---- Weights & Biases


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """A real W&B without an account; returns what runs hand it: curves, texts, id and options of
    each call.
    """
    package = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    package.teardown()  # an earlier test's settings
    curves, texts, calls = {}, {}, []
    real_init, real_log = package.init, package.Run.log

    def init(**options):
        run = real_init(**options)
        calls.append((run.id, options["config"]))
        return run

    def log(run, figures, step):
        for name, value in figures.items():
            values = curves if isinstance(value, float) else texts
            assert step not in values.setdefault(name, {}), "a step twice"
            values[name][step] = value if isinstance(value, float) else value.html
        real_log(run, figures, step=step)

    monkeypatch.setattr(package, "init", init)
    monkeypatch.setattr(package.Run, "log", log)
    return curves, texts, calls


def test_without_an_account_wandb_keeps_a_run_of_two_calls_offline_with_all_that_the_logs_have(
    go, here, wandb, stop_at, capsys
):
    disarm = stop_at(6)
    go(**EVERYTHING, wandb=True)
    disarm()
    printed = capsys.readouterr().out
    go(load_config(resume=str(here)))
    curves, texts, calls = wandb
    same(curves, here)
    assert texts["sample"].keys() == {4, 8, 9}
    assert all(">The" in text for text in texts["sample"].values())
    (first, options), (second, _) = calls
    assert first == second
    assert options["max_steps"] == 9
    assert len([*here.glob("wandb/offline-run-*")]) == 2
    assert "note: wandb keeps this run offline: UsageError: No API key" in printed


@pytest.mark.slow
def test_a_run_for_which_wandb_cannot_be_reached_is_kept_offline(
    go, here, wandb, monkeypatch, capsys
):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    assert go(wandb=True)["steps"] == 6
    assert "note: wandb keeps this run offline: CommError: " in capsys.readouterr().out
    assert len([*here.glob("wandb/offline-run-*")]) == 1


# ---- either


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_an_error_before_anything_is_done(
    name, go, here, monkeypatch
):
    def version(name):
        raise track.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(track.importlib.metadata, "version", version)
    says = rf"^{name}: the package is not installed; .*{track.TO_INSTALL}.* --no-{name}$"
    with refused(says) as caught:
        go(**{name: True})
    assert caught.value.status == 2
    assert not here.parent.exists()


def test_a_run_that_fails_closes_its_trackers_as_failed(go, monkeypatch):
    closed = []
    monkeypatch.setattr(track.Trackers, "close", lambda _, failed: closed.append(failed))
    go()
    at_step(monkeypatch, lambda call, _: torch.tensor(math.nan) if call == 3 else None)
    with refused("the loss is"):
        go()
    assert closed == [False, True]
