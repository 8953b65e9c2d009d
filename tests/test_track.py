"""Following a run in TensorBoard and Weights & Biases: they have the figures of the logs."""

import importlib.metadata
import json
import math
import os
import re
import shutil

import pytest
import torch

import train as train_module
from config import load_config
from run.log import LOG_COLUMNS, read_rows
from tests.conftest import WITH_TEXT, at_step, console, refused

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


def check_same(curves, folder):
    """Check that a tracker has the curves of the logs, and of each step also MFU and memory."""
    expected = {}
    for file, group in (("log.csv", "train"), ("eval.csv", "eval")):
        for step, row in read_rows(folder / file, ()).items():
            for name in row.keys() - {"step"}:
                expected.setdefault(f"{group}/{name}", {})[step] = row[name]
    flops = json.loads((folder / "summary.json").read_text())["flops_per_token"]
    speed = expected["train/tokens_per_sec"]
    # of 1 TFLOP/s
    expected["train/utilization"] = {step: speed[step] * flops / 1e12 for step in speed}
    assert curves.keys() == expected.keys() | {"train/memory_mb"}
    assert curves["train/memory_mb"].keys() == speed.keys()
    for name, values in expected.items():
        assert curves[name] == pytest.approx(values, rel=1e-3), name  # the log rounds times


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
            points = events.Tensors(name)
            values = {point.step: make_ndarray(point.tensor_proto).item() for point in points}
            assert len(values) == len(points), "a step twice"
            (texts if name.endswith("/text_summary") else curves)[name] = values
        return curves, texts

    return read


def test_tensorboard_has_each_figure_of_the_logs_once_samples_and_options_also_after_a_kill(
    go, here, tensorboard
):
    go(**EVERYTHING, tensorboard=True)
    # killed in step 9 after the checkpoint of step 6, while an event was written
    for lost in here.glob("checkpoints/*_00000[89]"):
        shutil.rmtree(lost)
    (events,) = here.glob("events.*")
    os.truncate(events, events.stat().st_size - 20)
    go(load_config(resume=str(here)))
    curves, texts = tensorboard(here)
    check_same(curves, here)
    assert f"tensorboard --logdir {here.parent}" in console(here)
    samples = texts["sample/text_summary"]
    assert samples.keys() == {4, 8, 9}
    assert all(text.startswith(b"    The") for text in samples.values())
    assert b"    max_steps: 9\n" in texts["config/text_summary"][0]


def test_one_more_figure_of_a_step_reaches_metrics_csv_and_trackers_once_for_each_step(
    go, here, tensorboard, monkeypatch
):
    """An earlier version of the code logged another figure."""
    go(tensorboard=True, max_steps=2)
    (here / "metrics.csv").write_text("step,old\n1,7\n2,8\n3,9\n")
    step_of = train_module.train_step

    def with_new(run, step):
        figures = step_of(run, step)
        return {**figures, "new": figures["loss"] + figures["norm"]}

    monkeypatch.setattr(train_module, "train_step", with_new)
    go(tensorboard=True, resume="auto", max_steps=4)
    log = read_rows(here / "log.csv")
    assert [*log[1]] == [*LOG_COLUMNS]
    new = {step: pytest.approx(log[step]["loss"] + log[step]["norm"]) for step in (3, 4)}
    cells = [(1, 7, None), (2, 8, None), (3, None, new[3]), (4, None, new[4])]
    metrics = read_rows(here / "metrics.csv", ("step", "old", "new")).values()
    assert [tuple(row.values()) for row in metrics] == cells
    assert tensorboard(here)[0]["train/new"] == new
    assert re.search(r"^step 4/4 .* tokens/s \| new \d", console(here), re.MULTILINE)


# ---- Weights & Biases


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """A real W&B without an account; returns what runs log, by name and step, and id, last step and
    exit code of each call.
    """
    package = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    package.teardown()  # an earlier test's settings
    logged, calls = {}, []
    real_log, real_finish = package.Run.log, package.Run.finish

    def log(run, figures, step):
        for name, value in figures.items():
            values = logged.setdefault(name, {})
            assert step not in values, "a step twice"
            values[step] = value
        real_log(run, figures, step=step)

    def finish(run, exit_code):
        calls.append((run.id, run.config["max_steps"], exit_code))
        real_finish(run, exit_code)

    monkeypatch.setattr(package.Run, "log", log)
    monkeypatch.setattr(package.Run, "finish", finish)
    return logged, calls


def test_without_an_account_wandb_keeps_a_run_of_two_calls_offline_with_all_that_the_logs_have(
    go, here, wandb, stop_at
):
    stop_at(6)
    go(**EVERYTHING, wandb=True)
    go(load_config(resume=str(here)))
    curves, (first, second) = wandb
    samples = curves.pop("sample")
    check_same(curves, here)
    assert samples.keys() == {4, 8, 9}
    assert all(">The" in sample.html for sample in samples.values())
    assert first == second
    assert first[1:] == (9, 0)
    assert len([*here.glob("wandb/offline-run-*")]) == 2
    assert "note: wandb keeps this run offline: UsageError: No API key" in console(here)


def test_a_run_that_fails_is_shown_as_failed(go, wandb, monkeypatch):
    at_step(monkeypatch, lambda call, _: torch.tensor(math.nan) if call == 3 else None)
    with refused("the loss is"):
        go(wandb=True)
    ((_, _, exit_code),) = wandb[1]
    assert exit_code == 1


# ---- either


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_an_error_before_anything_is_done(
    name, go, here, monkeypatch
):
    def version(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", version)
    says = rf"^{name}: the package is not installed; .*requirements-track.txt.* --no-{name}$"
    with refused(says) as caught:
        go(**{name: True})
    assert caught.value.status == 2
    assert not here.parent.exists()
