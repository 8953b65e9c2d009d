"""The estimate of check.py, which takes no step, and the fit to a device, which does."""

import functools
import math
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import run.summary as run_summary
from check import CheckOptions, main
from config import load_config
from measure.preflight import estimate as module
from measure.preflight import fit as fitting
from measure.preflight.estimate import describe_disk, describe_saving, estimate
from measure.preflight.fit import Fit, expected_mb, fit, micro_batches, take_steps
from run.summary import announce_long_run
from runtime.cli import load, parse
from tests.conftest import ALONE, ROOT, refused, run_from_nothing
from train import train


def test_the_estimate_of_gpt2_124m_is_the_arithmetic_of_its_recipe(tmp_path, capsys, monkeypatch):
    places = {"data_dir": str(tmp_path), "log_dir": str(tmp_path / "a/b")}
    config = load_config("gpt2_124m", device="cpu", **places)
    monkeypatch.setattr(module, "matmul_tflops", lambda *_, **__: 250.0)
    estimate(config, ALONE)
    out = capsys.readouterr().out
    flops = 9_999_745_024 * (6 * (124_475_904 - 1024 * 768) + 12 * 12 * 768 * 1024)
    for line in (
        "gpt2_124m: 124,475,904 parameters, on 1 x cpu",
        "9,999,745,024 in 19,073 steps of 524,288",
        f"corpus:  {tmp_path}/fineweb: no such corpus",
        f"{flops:.3g} FLOPs",
        f"time:    about 19 hours, {flops / 1.25e14 / 19073:,.3f} s a step",
        "at 50% MFU of the 250.00 TFLOP/s that a large matmul reaches here, in bfloat16",
        "measured runs had 9% to 82%, which would be 12 hours to 4 days",
        "1.49 GB a checkpoint, at most 5.97 GB for 3 at a time and the best one; ",
    ):
        assert line in out, line
    monkeypatch.setattr(module, "matmul_tflops", lambda *_, **__: None)  # never steady
    estimate(config, ALONE)
    assert "time:    not known: the device could not be measured" in capsys.readouterr().out
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_epochs_are_of_the_corpus_that_is_there_and_nothing_is_trained(tiny_config, capsys):
    train(tiny_config(run_name="first", max_steps=1, n_layer=1), ALONE)
    config = tiny_config(init_from="first", val_fraction=0.1, max_steps=60, n_layer=1)
    capsys.readouterr()
    estimate(config, ALONE)
    out = capsys.readouterr().out
    epochs = f"{60 * 4 * 32 / 3600:.2f} epochs of the 3,600 tokens of {config.data_dir}/tiny"
    assert f"{epochs}, which has 400 more" in out
    assert "\nloss to expect: 4.85 untrained (ln 128), 4.61 from token frequencies alone\n" in out
    assert re.search(r"^saving: ", out.splitlines()[-1])
    assert not Path(config.log_dir, "train").exists()


@pytest.mark.parametrize(
    ("options", "checkpoints"),
    [
        ({"eval_every": 10}, "for 3 at a time and the best one;"),
        ({"checkpoint_every": 10, "keep_last": 1}, "for 2 at a time;"),
        ({"keep_last": 0}, "no checkpoint is saved, as keep_last is 0"),
    ],
)
def test_checkpoints_that_are_there_at_a_time_are_counted(options, checkpoints, tiny_config):
    config = tiny_config(max_steps=50, val_fraction=0.1, **options)
    Path(config.log_dir).mkdir()
    fits, line = describe_disk(config, 1e6)
    assert checkpoints in line
    assert fits
    assert describe_disk(config, 1e18)[0] == (config.keep_last == 0)


def test_check_is_for_a_run_from_its_first_step_and_train_names_it():
    with refused("is for a run from its first step"):
        main(load(CheckOptions, {"resume": "auto", "estimate": True}))
    ran = run_from_nothing(str(ROOT / "train.py"), "--estimate", cwd=ROOT, status=2)
    assert "--estimate: is a command of its own" in ran.stderr


def test_a_long_run_says_how_long_it_takes(monkeypatch):
    monkeypatch.setattr(run_summary, "matmul_tflops", lambda *_: 0.2)
    folder, state = Mock(), Mock(step=0)
    state.model.flops_per_token.return_value = 855_166_464
    announce_long_run(load_config("baseline"), state, ALONE, folder)
    (line,) = folder.message.call_args.args
    assert re.match(r"takes about 15 minutes, at 50% MFU; shorter: --max_steps 5", line)


def test_the_advice_on_saving_is_youngs():
    assert describe_saving(save=2.0, step=0.5) == (
        "saving:  2 s a checkpoint; best is one every 2.0 minutes with a failure an hour "
        "(checkpoint_every 240), 9.8 minutes with a failure a day (checkpoint_every 1,176), at "
        "50% MFU"
    )
    assert "(checkpoint_every 1)," in describe_saving(save=0.001, step=60.0)


# ---- the fit to a device


def test_sizes_double_or_grow_more_and_divide_the_step():
    assert [*micro_batches(16)] == [1, 2, 4, 8, 16]
    assert [*micro_batches(6)] == [1, 2, 6]
    assert [*micro_batches(75)] == [1, 3, 15, 75]
    assert [*micro_batches(1)] == [1]


def fit_with(found, *words):
    """Call check.py --fit, where the tries of the sizes find this."""

    def try_size(_, config):
        rate_and_peak = found[config.batch_size]
        if isinstance(rate_and_peak, str):
            return None, rate_and_peak
        return Fit(config.batch_size, *rate_and_peak, "NVIDIA H200"), ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "in_fresh_process", try_size)
        patch.setattr(fitting, "available_memory", lambda: math.inf)
        main(parse(CheckOptions, ["--fit", *words], config_file=True))


@pytest.mark.usefixtures("in_tmp_path")
def test_the_fastest_size_that_fits_is_written_for_the_same_step(capsys):
    Path("mine.yaml").write_text("base: gpt2_124m.yaml\nmax_steps: 1000\ndevice: cpu\n")
    found = {1: (100.0, 10.0), 2: (524.288, 20.0), 4: (500.0, 30.0), 8: "out of memory"}
    fit_with(found, "--config", "mine.yaml", "--betas", "0.9", "0.98")
    out = capsys.readouterr().out
    assert "batch_size 2: 524 tokens/s, 20 MB\n" in out
    assert "batch_size 8: out of memory\nfastest: batch_size 2, 524 tokens/s, 20 MB at most" in out
    assert "about 12 days" in out
    assert "1.49 GB a checkpoint" in out
    assert out.endswith("python train.py --config mine_fit.yaml\n")
    text = Path("mine_fit.yaml").read_text()
    for words in ("mine on NVIDIA H200", "524 tokens/s", "about 12 days", "1.49 GB a checkpoint"):
        assert words in text
    own = load_config("mine", betas=(0.9, 0.98), batch_size=2)
    assert load_config("mine_fit") == own
    with refused("mine_fit.yaml would be its own base"):
        fit_with(found, "--config", "mine_fit.yaml")


@pytest.mark.usefixtures("in_tmp_path")
def test_without_a_config_file_the_fit_has_the_options_that_were_given():
    fit_with({1: (1.0, 1.0)}, "--batch_size", "1", "--n_layer", "2", "--tf32", "--device", "cpu")
    assert load_config("train_fit") == load_config(
        batch_size=1, n_layer=2, tf32=True, device="cpu", total_batch_tokens=1024
    )


@pytest.mark.usefixtures("in_tmp_path")
def test_if_nothing_fits_the_reason_is_the_error_and_nothing_is_written():
    with refused("no step could be taken: batch_size 1: out of memory"):
        fit_with({1: "out of memory"}, "--device", "cpu")
    assert not Path("train_fit.yaml").exists()


def test_a_fit_is_of_one_device(tiny_config, monkeypatch):
    monkeypatch.setattr(fitting, "launch", lambda: Mock(by_torchrun=True))
    with refused("start it without torchrun"):
        fit(tiny_config(), None)


def test_on_a_cpu_a_size_that_may_take_more_than_is_free_is_not_tried(tiny_config, monkeypatch):
    assert expected_mb(1, [(0, 300.0)]) == 300
    assert expected_mb(8, [(0, 300.0), (2, 400.0), (4, 600.0)]) == 1000
    tried, peaks = [], {1: 400.0, 2: 600.0, 4: 1000.0}

    def try_size(_, config):
        tried.append(config.batch_size)
        return Fit(config.batch_size, 1.0, peaks[config.batch_size], "cpu"), ""

    monkeypatch.setattr(fitting, "in_fresh_process", try_size)
    monkeypatch.setattr(fitting, "available_memory", lambda: 900 * module.MB)
    found = fitting.measure_sizes(tiny_config(), 200.0)
    assert [each.batch_size for each in found] == tried == [1, 2]


@pytest.mark.usefixtures("forked_processes")
def test_sizes_are_tried_by_real_steps_until_memory_runs_out(tiny_config, monkeypatch, capsys):
    monkeypatch.setattr(fitting, "available_memory", lambda: math.inf)
    monkeypatch.setattr(fitting, "micro_batches", lambda _: [2, 2**40])
    config = tiny_config(total_batch_tokens=2**41 * 32)
    (found,) = fitting.measure_sizes(config, 1.0)
    assert found.batch_size == 2
    assert found.tokens_per_sec > 0
    assert found.peak_mb > 50
    assert capsys.readouterr().out.endswith(f"batch_size {2**40}: out of memory\n")


def test_steps_whose_gradients_overflow_do_not_count_as_tries(tiny_config, monkeypatch):
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**24)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    steps, real = [], fitting.take_step
    monkeypatch.setattr(fitting, "take_step", lambda run: [steps.append(run), real(run)])
    monkeypatch.setattr(fitting, "set_up_process", lambda *_: None)
    take_steps(tiny_config(fp16=True))
    state = steps[-1].state
    assert len(steps) > 3
    assert all(optimizer.state for optimizer in state.optimizers)
