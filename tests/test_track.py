"""Following a run in TensorBoard and Weights & Biases: they have what the logs have, whatever
happens.
"""

import csv
import io
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

import runtime.track as track
from runtime.errors import UserError
from runtime.signals import Stopped, StopRequest
from tests.conftest import ALONE, ROOT, at_step, ended, flags, run, run_ranks, start, wait_for
from train import train

EVERYTHING = {
    "vocab_size": 50257,
    "n_layer": 1,
    "n_embd": 16,
    "val_fraction": 0.1,
    "eval_every": 3,
    "sample_every": 4,
    "sample_tokens": 2,
    "checkpoint_every": 2,
    "max_steps": 9,
}
LONGER = {"val_fraction": 0.1, "eval_every": 3, "checkpoint_every": 5, "max_steps": 40}


def resumed(tiny_config, **options):
    """What goes on with a run of `EVERYTHING`; the checkpoint knows whether it is followed."""
    config = tiny_config(resume="auto", **options)
    return config.model_validate(
        config.model_dump(include={"resume", "log_dir", "device", *options})
    )


def folder_of(config):
    return Path(config.log_dir) / config.run_name


def logged(config):
    """What log.csv and eval.csv have: {name: {step: value}}."""
    curves = {}
    for path, group in (
        (folder_of(config) / "log.csv", "train"),
        (folder_of(config) / "eval.csv", "eval"),
    ):
        with open(path, newline="") if path.exists() else io.StringIO() as file:
            for row in csv.DictReader(file):
                for column, value in row.items():
                    if column != "step":
                        curves.setdefault(f"{group}/{column}", {})[int(row["step"])] = float(value)
    return curves


def same(curves, config):
    """Check that a tracker's curves are the log's: the same steps and values, as far as 32 bits
    and the log's rounding go.
    """
    ours = logged(config)
    assert curves.keys() - {"train/utilization", "train/memory_mb"} == ours.keys()
    for name, curve in ours.items():
        rounded = {"train/dt_ms": 0.0006, "train/tokens_per_sec": 0.06}.get(name, 0)
        assert curves[name] == pytest.approx(curve, rel=1e-6, abs=rounded), name


def has_live_figures(curves):
    steps = curves["train/loss"].keys()
    assert curves["train/memory_mb"].keys() == curves["train/utilization"].keys() == steps
    assert all(0 < share <= 1 for share in curves["train/utilization"].values())


def stop_at(monkeypatch, step):
    """SIGTERM in the middle of a step; returns what disarms it."""
    return at_step(
        monkeypatch, lambda call, _: signal.raise_signal(signal.SIGTERM) if call == step else None
    )


# ---- TensorBoard


@pytest.fixture
def tensorboard():
    """Reads a run as TensorBoard does: curves, and texts by name and step."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    def read(config):
        all_of_them = dict.fromkeys(("scalars", "text"), 0)
        events = EventAccumulator(str(folder_of(config)), tensor_size_guidance=all_of_them)
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
    tiny_config, tensorboard, capsys
):
    config = tiny_config(**EVERYTHING, tensorboard=True)
    train(config, ALONE)
    curves, texts = tensorboard(config)
    same(curves, config)
    has_live_figures(curves)
    printed = capsys.readouterr().out
    assert f"tensorboard --logdir {config.log_dir}" in printed
    assert texts["sample"].keys() == {4, 8, 9}
    for step, text in texts["sample"].items():
        assert text.startswith("    The")
        indented = "".join(f"    {line}\n" for line in printed.splitlines())
        assert f"sample after step {step}: {text[4:]}" in indented
    assert "    max_steps: 9\n" in texts["config"][0]


def test_a_followed_run_has_the_losses_of_any_other(tiny_config):
    pytest.importorskip("tensorboard")
    plain, followed = (
        tiny_config(run_name=f"{on}", tensorboard=on, dropout=0.1) for on in (False, True)
    )
    for config in (plain, followed):
        train(config, ALONE)
    for name in ("train/loss", "train/norm"):
        assert logged(plain)[name] == logged(followed)[name]


@pytest.mark.parametrize(("at", "log_every"), [(4, 1), (3, 4), (6, 4)])
def test_a_stopped_and_resumed_run_continues_its_curves(
    at, log_every, tiny_config, tensorboard, monkeypatch
):
    disarm = stop_at(monkeypatch, at)
    options = EVERYTHING | {"tensorboard": True, "log_every": log_every}
    assert train(tiny_config(**options), ALONE)["interrupted"]
    disarm()
    train(resumed(tiny_config), ALONE)
    curves, texts = tensorboard(tiny_config())
    same(curves, tiny_config())
    assert texts["sample"].keys() == {4, 8, 9}


@pytest.mark.parametrize(
    "calls",
    [[(9, True), (11, True)], [(9, False), (11, True)], [(4, True), (8, False), (10, True)]],
    ids=["taken further", "followed only later", "not followed for a while"],
)
def test_a_run_of_several_calls_has_its_whole_curves(calls, tiny_config, tensorboard):
    (steps, followed), *rest = calls
    config = tiny_config(**EVERYTHING | {"max_steps": steps}, tensorboard=followed)
    train(config, ALONE)
    for steps, followed in rest:
        train(resumed(tiny_config, max_steps=steps, tensorboard=followed), ALONE)
    curves, _ = tensorboard(config)
    same(curves, config)
    assert max(curves["train/loss"]) == steps


def test_figures_and_samples_of_steps_that_are_taken_again_are_there_once(tiny_config, tensorboard):
    config = tiny_config(**EVERYTHING, tensorboard=True)
    train(config, ALONE)
    for path in (folder_of(config) / "checkpoints").iterdir():
        if int(path.name[-6:]) > 6:  # as if it had been killed right after step 9
            shutil.rmtree(path)
    train(resumed(tiny_config, max_steps=10), ALONE)
    curves, texts = tensorboard(config)
    same(curves, config)
    assert texts["sample"].keys() == {4, 8, 10}


def test_after_kills_tensorboard_has_each_step_once_with_the_logs_values(
    tiny_config, tensorboard, tmp_path
):
    config = tiny_config(
        val_fraction=0.1, eval_every=3, checkpoint_every=5, max_steps=40, tensorboard=True
    )
    log = folder_of(config) / "log.csv"
    for rows in (13, 27, None):  # killed between two checkpoints, twice
        command = ["train.py", *flags(config), "--resume", "auto"]
        with ended([start(*command, cwd=tmp_path)]) as (process,):
            if rows:
                wait_for(
                    lambda rows=rows: log.exists() and log.read_text().count("\n") > rows, process
                )
            else:
                _, errors = process.communicate()
                assert process.returncode == 0, errors
    assert len(list(folder_of(config).glob("events.*"))) == 3
    same(tensorboard(config)[0], config)


def test_a_run_moved_aside_keeps_its_events(tiny_config, tensorboard):
    for seed in (1, 2):
        train(tiny_config(tensorboard=True, seed=seed), ALONE)
    configs = [tiny_config(run_name=name) for name in ("train", "train.1")]
    for config in configs:
        same(tensorboard(config)[0], config)
    assert logged(configs[0]) != logged(configs[1])


def test_of_several_ranks_one_hands_on_the_figures(tiny_config, tensorboard, tmp_path):
    config = tiny_config(tensorboard=True, batch_size=2, eval_every=2, val_fraction=0.1)
    for done in run_ranks(2, "train.py", *flags(config), cwd=tmp_path):
        assert done.returncode == 0, done.stderr
    assert len(list(folder_of(config).glob("events.*"))) == 1
    same(tensorboard(config)[0], config)


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


def offline_runs(config):
    return list(folder_of(config).glob("wandb/offline-run-*"))


def test_without_an_account_wandb_keeps_the_run_offline_with_all_that_the_logs_have(
    tiny_config, wandb, capfd
):
    config = tiny_config(**EVERYTHING, wandb=True)
    train(config, ALONE)
    curves, texts, [(_, options)] = wandb
    same(curves, config)
    has_live_figures(curves)
    assert texts["sample"].keys() == {4, 8, 9}
    assert all(">The" in text for text in texts["sample"].values())
    assert options["max_steps"] == 9
    assert len(offline_runs(config)) == 1
    printed, errors = capfd.readouterr()
    (note,) = [line for line in printed.splitlines() if line.startswith("note: wandb")]
    assert note.startswith(
        "note: wandb keeps this run offline as no account is configured here (`wandb login`); to "
        "send it"
    )
    assert f"wandb sync {folder_of(config)}/wandb/offline-run-*" in note
    assert errors == ""


def test_a_run_stopped_in_the_middle_resumes_the_same_run_of_wandb(tiny_config, wandb, monkeypatch):
    disarm = stop_at(monkeypatch, 6)
    train(tiny_config(**EVERYTHING, wandb=True), ALONE)
    disarm()
    train(resumed(tiny_config), ALONE)
    curves, _, calls = wandb
    same(curves, tiny_config())
    assert len({id for id, _ in calls}) == 1
    assert len(offline_runs(tiny_config())) == 2


def test_wandb_that_cannot_be_reached_keeps_the_run_offline(
    tiny_config, wandb, monkeypatch, capsys
):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(track, "INIT_TIMEOUT", 3)
    config = tiny_config(wandb=True)
    train(config, ALONE)
    printed = capsys.readouterr().out
    assert "note: wandb keeps this run offline as W&B cannot be reached (" in printed
    same(wandb[0], config)
    assert len(offline_runs(config)) == 1


KILLS_WANDB = """if True:
    import os, signal, sys, train
    from pathlib import Path
    from config import load_config

    def clip_gradients(*args, real=train.clip_gradients):
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if "wandb" in Path(f"/proc/{child}/comm").read_text():
                os.kill(int(child), signal.SIGKILL)
        return real(*args)

    train.clip_gradients = clip_gradients
    train.main(load_config(sys.argv[1]))
"""


def test_a_run_ends_well_without_wandbs_process(tiny_config, wandb, tmp_path):
    config = tiny_config(wandb=True, run_name="bereft")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    done = run("-c", KILLS_WANDB, tmp_path / "config.yaml", cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wandb failed and is left out from here on") == 1
    assert len(logged(config)["train/loss"]) == 6


# ---- either


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_an_error_before_anything_is_done(
    name, tiny_config, monkeypatch
):
    monkeypatch.setattr(track.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=rf"^{name}: the package is not installed; .* --no-{name}$"
    ) as caught:
        train(tiny_config(**{name: True}), ALONE)
    assert caught.value.status == 2
    assert track.TO_INSTALL in str(caught.value)
    assert not Path(tiny_config().log_dir).exists()


def test_a_folder_of_a_packages_name_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "no_such_package").mkdir()
    assert not track.is_installed("no_such_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not track.is_installed("no_such_package")
    assert track.is_installed("pytest")


def test_a_run_that_nobody_follows_imports_no_tracker(tiny_config, tmp_path):
    (tmp_path / "config.yaml").write_text(tiny_config().to_yaml())
    code = (
        "import sys, train; from config import load_config; train.main(load_config(sys.argv[1]))\n"
        "assert not {'tensorboard', 'wandb'} & set(sys.modules)"
    )
    done = run("-c", code, tmp_path / "config.yaml", cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_tracker_that_fails_is_one_note_and_the_run_goes_on(
    tiny_config, tensorboard, monkeypatch, capsys
):
    real = track.TensorBoard.log

    def full(tracker, step, figures):
        if step == 3:
            raise OSError(28, "No space left on device")
        real(tracker, step, figures)

    config = tiny_config(tensorboard=True)
    with monkeypatch.context() as patched:
        patched.setattr(track.TensorBoard, "log", full)
        assert train(config, ALONE)["steps"] == 6
    assert len(logged(config)["train/loss"]) == 6
    printed = capsys.readouterr().out
    note = "note: tensorboard failed and is left out from here on, the run goes on (OSError: [Errno"
    assert printed.count(note) == 1
    assert printed in (folder_of(config) / "console.log").read_text()
    # once there is room again, a resumed run is followed again
    train(tiny_config(resume="auto", max_steps=8), ALONE)
    same(tensorboard(config)[0], config)


def test_a_run_that_fails_closes_its_tracker_as_failed(tiny_config, monkeypatch):
    pytest.importorskip("tensorboard")
    closed = []
    monkeypatch.setattr(track.TensorBoard, "close", lambda _, failed: closed.append(failed))
    train(tiny_config(tensorboard=True), ALONE)
    at_step(monkeypatch, lambda call, _: torch.tensor(math.nan) if call == 3 else None)
    with pytest.raises(Exception, match="the loss is"):
        train(tiny_config(tensorboard=True), ALONE)
    assert closed == [False, True]


def test_a_run_stopped_before_its_first_step_leaves_nothing_of_its_tracker(tiny_config):
    pytest.importorskip("tensorboard")
    stop = StopRequest()
    stop.received = signal.SIGTERM
    with pytest.raises(Stopped):
        train(tiny_config(tensorboard=True), ALONE, stop=stop)
    assert not folder_of(tiny_config()).exists()
