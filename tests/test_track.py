"""Following a run in TensorBoard and Weights & Biases: they have what the logs have, whatever
happens.
"""

import csv
import io
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import runtime.track as track
from runtime.errors import UserError
from runtime.signals import Stopped, StopRequest
from runtime.track import TO_INSTALL, wandb_records
from tests.conftest import (
    ALONE,
    ROOT,
    at_step,
    ended,
    flags,
    run,
    run_from_nothing,
    run_ranks,
    start,
    wait_for,
)
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


def without_extras(curves):
    return {
        name: curve
        for name, curve in curves.items()
        if name not in ("train/utilization", "train/memory_mb")
    }


def same(curves, config):
    """Whether a tracker's curves are the log's: the same steps and values, as far as 32 bits and
    the log's rounding go.
    """
    ours = logged(config)
    assert without_extras(curves).keys() == ours.keys()
    for name, curve in ours.items():
        rounded = {"train/dt_ms": 0.0006, "train/tokens_per_sec": 0.06}.get(name, 0)
        assert curves[name] == pytest.approx(curve, rel=1e-6, abs=rounded), name


def no_step_twice(steps):
    assert len(steps) == len(set(steps)), steps
    return steps


# ---- TensorBoard


@pytest.fixture
def tensorboard():
    """Reads a run as TensorBoard does: curves, and texts by name and step."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    def read(config):
        events = EventAccumulator(
            str(folder_of(config)), tensor_size_guidance=dict.fromkeys(("scalars", "text"), 0)
        )
        events.Reload()
        curves, texts = {}, {}
        for name in events.Tags()["tensors"]:
            points = events.Tensors(name)
            no_step_twice([point.step for point in points])
            is_text = events.SummaryMetadata(name).plugin_data.plugin_name == "text"
            for point in points:
                value = make_ndarray(point.tensor_proto).item()
                (texts if is_text else curves).setdefault(name, {})[point.step] = (
                    value.decode() if is_text else value
                )
        return curves, texts

    return read


def test_tensorboard_has_every_figure_of_the_logs_and_samples_and_options(
    tiny_config, tensorboard, capsys
):
    config = tiny_config(**EVERYTHING, tensorboard=True)
    train(config, ALONE)
    curves, texts = tensorboard(config)
    same(curves, config)
    assert (
        curves["train/memory_mb"].keys()
        == curves["train/utilization"].keys()
        == curves["train/loss"].keys()
    )
    assert all(0 < share <= 1 for share in curves["train/utilization"].values())
    printed = capsys.readouterr().out
    assert f"tensorboard --logdir {config.log_dir}" in printed
    assert texts["sample"].keys() == {4, 8, 9}
    for step, text in texts["sample"].items():
        assert text.startswith("    The")
        assert f"sample after step {step}: {text[4:]}" in "".join(
            f"    {line}\n" for line in printed.splitlines()
        )
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
def test_a_stopped_and_resumed_run_goes_on_with_its_curves(
    at, log_every, tiny_config, tensorboard, monkeypatch
):
    options = EVERYTHING | {"tensorboard": True, "log_every": log_every}
    disarm = at_step(
        monkeypatch, lambda call, _: signal.raise_signal(signal.SIGTERM) if call == at else None
    )
    assert train(tiny_config(**options), ALONE)["interrupted"]
    disarm()
    train(resumed(tiny_config), ALONE)
    curves, texts = tensorboard(tiny_config())
    same(curves, tiny_config())
    assert texts["sample"].keys() == {4, 8, 9}


def test_a_finished_run_that_is_taken_further_goes_on_with_its_curves(tiny_config, tensorboard):
    config = tiny_config(**EVERYTHING, tensorboard=True)
    train(config, ALONE)
    train(resumed(tiny_config, max_steps=11), ALONE)
    curves, _ = tensorboard(config)
    same(curves, config)
    assert max(curves["train/loss"]) == 11


def test_a_run_that_is_followed_only_later_has_its_whole_curves(tiny_config, tensorboard):
    config = tiny_config(**EVERYTHING)
    train(config, ALONE)
    train(resumed(tiny_config, max_steps=11, tensorboard=True), ALONE)
    same(tensorboard(config)[0], config)


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


def killed_and_resumed(config, place):
    """Kill the run twice in the middle of its work, with steps after its newest checkpoint, and let
    it go on to its end.
    """

    def rows():
        log = folder_of(config) / "log.csv"
        return len(log.read_text().splitlines()) if log.exists() else 0

    for enough in (13, 27):  # between two checkpoints
        with ended([start("train.py", *flags(config), "--resume", "auto", cwd=place)]) as (
            process,
        ):
            wait_for(lambda enough=enough: rows() > enough, process)
    with ended([start("train.py", *flags(config), "--resume", "auto", cwd=place)]) as (process,):
        output, errors = process.communicate()
        assert process.returncode == 0, output + errors
    return output


def test_after_kills_tensorboard_has_each_step_once_with_the_logs_values(
    tiny_config, tensorboard, tmp_path
):
    config = tiny_config(**LONGER, tensorboard=True)
    output = killed_and_resumed(config, tmp_path)
    assert "going on from" in output
    assert len(list(folder_of(config).glob("events.*"))) == 3
    same(tensorboard(config)[0], config)


def test_event_files_are_read_in_the_order_they_were_written_in_whatever_the_clock_says(
    tiny_config, tensorboard, monkeypatch
):
    config = tiny_config(**EVERYTHING, tensorboard=True)
    train(config, ALONE)
    monkeypatch.setattr(
        track.time, "time", lambda: 1000.0
    )  # on another machine, whose clock is wrong
    train(resumed(tiny_config, max_steps=11), ALONE)
    same(tensorboard(config)[0], config)


def test_a_run_moved_aside_keeps_its_events(tiny_config, tensorboard):
    for seed in (1, 2):
        train(tiny_config(tensorboard=True, seed=seed), ALONE)
    for name in ("train", "train.1"):
        same_config = tiny_config(run_name=name)
        same(tensorboard(same_config)[0], same_config)
    assert logged(tiny_config(run_name="train")) != logged(tiny_config(run_name="train.1"))


def test_of_several_processes_one_tells_the_tracker(tiny_config, tensorboard, tmp_path):
    config = tiny_config(tensorboard=True, batch_size=2, eval_every=2, val_fraction=0.1)
    for done in run_ranks(2, "train.py", *flags(config), cwd=tmp_path):
        assert done.returncode == 0, done.stderr
    assert len(list(folder_of(config).glob("events.*"))) == 1
    same(tensorboard(config)[0], config)


# ---- Weights & Biases


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """Reads what W&B has of a run that it keeps offline, as `wandb sync` would send it: curves,
    texts and options.
    """
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    for name, value in (
        ("HOME", tmp_path / "home"),
        ("NETRC", tmp_path / "home/netrc"),
        ("WANDB_ERROR_REPORTING", "false"),
    ):
        monkeypatch.setenv(name, str(value))

    def read(config):
        from wandb.proto.wandb_internal_pb2 import Record

        curves, texts, options = {}, {}, {}
        for part in sorted(
            folder_of(config).glob("wandb/offline-run-*"), key=lambda path: path.stat().st_ctime_ns
        ):
            assert {file.stem for file in part.glob("*.wandb")} == {
                f"run-{(folder_of(config) / '.wandb_id').read_text()}"
            }
            for data in wandb_records(next(part.glob("*.wandb")).read_bytes()):
                record = Record.FromString(data)
                step = record.history.step.num
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    if name == "sample/path":
                        no_step_twice([*texts, step])
                        texts[step] = (part / "files" / json.loads(item.value_json)).read_text()
                    elif name.startswith(("train/", "eval/")):
                        assert step not in curves.setdefault(name, {}), (name, step)
                        curves[name][step] = float(json.loads(item.value_json))
                options |= {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
        return curves, texts, options

    return read


def test_without_an_account_wandb_keeps_the_run_offline_with_all_that_the_logs_have(
    tiny_config, wandb, capfd
):
    config = tiny_config(**EVERYTHING, wandb=True)
    train(config, ALONE)
    curves, texts, options = wandb(config)
    same(curves, config)
    assert (
        curves["train/memory_mb"].keys()
        == curves["train/utilization"].keys()
        == curves["train/loss"].keys()
    )
    assert texts.keys() == {4, 8, 9}
    assert all(">The" in text for text in texts.values())
    assert options["max_steps"] == 9
    printed, errors = capfd.readouterr()
    (note,) = [line for line in printed.splitlines() if line.startswith("note: wandb")]
    assert note.startswith(
        "note: wandb keeps this run offline as no account is configured here (`wandb login`); to "
        "send it"
    )
    assert f"wandb sync {folder_of(config)}/wandb/offline-run-*" in note
    assert errors == ""


def test_after_kills_wandb_has_each_step_once_with_the_logs_values(tiny_config, wandb, tmp_path):
    config = tiny_config(**LONGER, wandb=True)
    killed_and_resumed(config, tmp_path)
    assert len(list(folder_of(config).glob("wandb/offline-run-*"))) == 3
    same(wandb(config)[0], config)


def test_a_run_stopped_in_the_middle_goes_on_in_the_same_run_of_wandb(
    tiny_config, wandb, monkeypatch
):
    disarm = at_step(
        monkeypatch, lambda call, _: signal.raise_signal(signal.SIGTERM) if call == 6 else None
    )
    train(tiny_config(**EVERYTHING, wandb=True), ALONE)
    disarm()
    train(resumed(tiny_config), ALONE)
    same(wandb(tiny_config())[0], tiny_config())


def test_wandb_that_cannot_be_reached_keeps_the_run_offline(
    tiny_config, wandb, monkeypatch, capsys
):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setitem(track.PATIENCE, "open", 9.0)
    config = tiny_config(wandb=True)
    train(config, ALONE)
    assert (
        "note: wandb keeps this run offline as W&B cannot be reached (" in capsys.readouterr().out
    )
    same(wandb(config)[0], config)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_run_goes_on_without_wandbs_process(number, tiny_config, wandb, monkeypatch, capsys):
    import wandb as package

    def strike(call, _):
        if call == 3:
            pids.append(package.sdk.wandb_setup.singleton()._connection._proc._process.pid)
            os.kill(pids[0], number)
            time.sleep(0.2)

    pids = []
    at_step(monkeypatch, strike)
    for name in track.PATIENCE:
        monkeypatch.setitem(track.PATIENCE, name, 5.0)
    begun = time.monotonic()
    summary = train(tiny_config(max_steps=8, wandb=True), ALONE)
    assert (summary["steps"], summary["interrupted"]) == (8, False)
    assert time.monotonic() - begun < 30
    assert (
        len(
            [
                line
                for line in capsys.readouterr().out.splitlines()
                if "wandb failed and is left out from here on" in line
            ]
        )
        == 1
    )
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)  # nothing is left that Python would wait for


def test_a_command_ends_after_wandbs_process_was_frozen(tiny_config, wandb, tmp_path):
    code = (
        "import os, signal, sys, train, runtime.track as track, wandb; from config import "
        "load_config\n"
        "track.PATIENCE.update(log=3.0, close=3.0); real = track.WandB.close\n"
        "def close(tracker, failed):\n"
        "    os.kill(wandb.sdk.wandb_setup.singleton()._connection._proc._process.pid, "
        "signal.SIGSTOP); real(tracker, failed)\n"
        "track.WandB.close = close; train.main(load_config(sys.argv[1]))"
    )
    config = tiny_config(wandb=True)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    done = run_from_nothing("-c", code, tmp_path / "config.yaml", cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (
        "note: wandb failed and is left out from here on, the run goes on (TimeoutError: no "
        "answer within 3 s" in done.stdout
    )
    assert done.stderr == ""


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
    assert TO_INSTALL in str(caught.value)
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
    real = track.TensorBoard._write

    def full(tracker, **event):
        if event.get("step") == 3:
            raise OSError(28, "No space left on device")
        real(tracker, **event)

    monkeypatch.setattr(track.TensorBoard, "_write", full)
    config = tiny_config(tensorboard=True)
    assert train(config, ALONE)["steps"] == 6
    assert len(logged(config)["train/loss"]) == 6
    printed = capsys.readouterr().out
    assert (
        printed.count(
            "note: tensorboard failed and is left out from here on, the run goes on (OSError: "
            "[Errno 28] No"
        )
        == 1
    )
    assert printed in (folder_of(config) / "console.log").read_text()
    # once there is room again, a resumed run is followed again
    monkeypatch.setattr(track.TensorBoard, "_write", real)
    train(tiny_config(resume="auto", max_steps=8), ALONE)
    same(tensorboard(config)[0], config)


def test_steps_that_a_call_did_not_follow_are_handed_on_later(tiny_config, tensorboard):
    train(tiny_config(tensorboard=True, max_steps=4), ALONE)
    train(resumed(tiny_config, max_steps=8, tensorboard=False), ALONE)
    train(resumed(tiny_config, max_steps=10, tensorboard=True), ALONE)
    same(tensorboard(tiny_config())[0], tiny_config())


def test_a_run_that_fails_closes_its_tracker_as_failed(tiny_config, monkeypatch):
    pytest.importorskip("tensorboard")
    closed, real = [], track.TensorBoard.close
    monkeypatch.setattr(
        track.TensorBoard,
        "close",
        lambda tracker, failed: (closed.append(failed), real(tracker, failed)),
    )
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


def test_what_takes_too_long_is_a_timeout_and_errors_pass_through():
    with pytest.raises(TimeoutError, match=r"no answer within 0.01 s"):
        track.within(0.01, lambda: time.sleep(1))
    with pytest.raises(ZeroDivisionError):
        track.within(1, lambda: 1 / 0)
    assert track.within(1, lambda: 3) == 3
