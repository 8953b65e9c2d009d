"""The estimate of check.py, which takes no step, and the fit to a device, which does."""

import logging
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import run.summary as run_summary
from check import CheckOptions, main
from config import load_config
from measure.preflight.checks import take_updates
from measure.preflight.estimate import describe_disk, describe_saving, estimate, print_estimate
from measure.preflight.fit import Fit, fit, measure_size, measure_sizes, micro_batches
from run.summary import announce_long_run
from runtime.cli import load, parse
from runtime.console import noted
from tests.conftest import ALONE, ROOT, refused, run_from_nothing
from train import setup


def test_the_estimate_of_gpt2_124m_is_the_arithmetic_of_its_recipe(tmp_path, capsys):
    places = {"data_dir": str(tmp_path), "log_dir": str(tmp_path)}
    config = load_config("gpt2_124m", device="cpu", **places)
    print_estimate(config, ALONE, 250.0)
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
    print_estimate(config, ALONE, None)  # never steady
    assert "time:    not known: the device could not be measured" in capsys.readouterr().out
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_epochs_are_of_the_corpus_that_is_there_and_nothing_is_trained(tiny_config, capsys):
    logs = Path(tiny_config().log_dir, "a/b")  # is made
    config = tiny_config(log_dir=str(logs), val_fraction=0.1, max_steps=60)
    estimate(config, ALONE)
    out = capsys.readouterr().out
    epochs = f"{60 * 4 * 32 / 3600:.2f} epochs of the 3,600 tokens of {config.data_dir}/tiny"
    assert f"{epochs}, which has 400 more" in out
    assert "\nloss to expect: 4.85 untrained (ln 128), 4.61 from token frequencies alone\n" in out
    assert re.search(r"^saving: ", out.splitlines()[-1])
    assert [*logs.iterdir()] == []


@pytest.mark.parametrize(
    ("options", "checkpoints"),
    [
        ({"eval_every": 10}, "for 3 at a time and the best one;"),
        ({"checkpoint_every": 10, "keep_last": 1}, "for 2 at a time;"),
        ({"keep_last": 0}, "no checkpoint is saved, as keep_last is 0"),
    ],
)
def test_checkpoints_that_are_there_at_a_time_are_counted(options, checkpoints, tmp_path):
    config = load_config(log_dir=str(tmp_path), **options)
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
    run = Mock(config=load_config("baseline"), world=ALONE, tokens_per_step=2048)
    run.state.step, run.state.model.flops_per_token.return_value = 0, 855_166_464
    with noted(logging.INFO) as lines:
        announce_long_run(run)
    assert re.match(r"takes about 15 minutes, at 50% MFU; shorter: --max_steps 5", lines[0].msg)


def test_the_advice_on_saving_is_youngs():
    assert describe_saving(save=2.0, step=0.5) == (
        "saving:  2 s a checkpoint; best is one every 2.0 minutes with a failure an hour "
        "(checkpoint_every 240), 9.8 minutes with a failure a day (checkpoint_every 1,176), at "
        "50% MFU"
    )
    assert "(checkpoint_every 1)," in describe_saving(save=0.001, step=60.0)


# ---- the fit to a device


@pytest.mark.parametrize(
    ("sequences", "sizes"), [(16, [1, 2, 4, 8, 16]), (75, [1, 3, 15, 75]), (1, [1])]
)
def test_sizes_double_or_grow_more_and_divide_the_step(sequences, sizes, tiny_config):
    tried = micro_batches(tiny_config(batch_size=1, total_batch_tokens=32 * sequences))
    assert [config.batch_size for config in tried] == sizes


def finding(sizes):
    """What measures a micro-batch: it finds its tokens/s and memory here, or why it fails."""

    def measure(config):
        found = sizes[config.batch_size]
        if isinstance(found, str):
            return None, found
        return Fit(config.batch_size, *found, "NVIDIA H200"), ""

    return measure


@pytest.mark.usefixtures("in_tmp_path")
def test_the_fastest_size_that_fits_is_written_for_the_same_step(capsys):
    Path("mine.yaml").write_text("base: quickstart.yaml\nmax_steps: 1000\ndevice: cpu\n")
    mine = load_config("mine", batch_size=8, total_batch_tokens=None, betas=(0.9, 0.98))
    sizes = {1: (100.0, 10.0), 2: (524.288, 20.0), 4: (500.0, 30.0), 8: "out of memory"}
    fit(mine, "mine.yaml", finding(sizes))
    out = capsys.readouterr().out
    assert "batch_size 2: 524 tokens/s, 20 MB\n" in out
    assert "batch_size 8: out of memory\nfastest: batch_size 2, 524 tokens/s, 20 MB at most" in out
    assert out.endswith("python train.py --config mine_fit.yaml\n")
    text = Path("mine_fit.yaml").read_text()
    for words in ("mine on NVIDIA H200", "524 tokens/s", "about 33 minutes", "GB a checkpoint"):
        assert words in text
    assert load_config("mine_fit") == mine.with_options(batch_size=2, total_batch_tokens=1024)
    with refused("mine_fit.yaml would be its own base"):
        main(parse(CheckOptions, ["--fit", "--config", "mine_fit.yaml"], config_file=True))


@pytest.mark.usefixtures("in_tmp_path")
def test_without_a_config_file_the_fit_has_the_options_that_were_given():
    given = {"batch_size": 1, "n_layer": 2, "tf32": True, "device": "cpu"}
    fit(load_config(**given), None, finding({1: (1.0, 1.0)}))
    assert load_config("train_fit") == load_config(**given, total_batch_tokens=1024)


def test_a_fit_is_of_one_device(tiny_config, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    with refused("start it without torchrun"):
        fit(tiny_config(), None)


def test_on_a_cpu_a_size_that_may_take_more_than_is_free_is_not_tried(tiny_config):
    peaks = {1: (1.0, 400.0), 2: (1.0, 600.0)}  # so 4 may take 1000
    found = measure_sizes(tiny_config(), 200.0, 900.0, finding(peaks))
    assert [each.batch_size for each in found] == [1, 2]
    with refused("no step .* may take 200 MB, more than is free"):
        measure_sizes(tiny_config(), 200.0, 100.0, finding({}))


@pytest.mark.usefixtures("forked_processes")
def test_sizes_are_tried_by_real_steps_until_memory_runs_out(tiny_config):
    found, _ = measure_size(tiny_config(batch_size=2))
    assert found.tokens_per_sec > 0
    assert found.peak_mb > 50
    assert measure_size(tiny_config(batch_size=2**40)) == (None, "out of memory")


def test_steps_whose_gradients_overflow_do_not_count_as_tries(tiny_config):
    run = setup(tiny_config(fp16=True), ALONE)
    run.state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    assert len([*take_updates(run)]) > 3
    assert all(optimizer.state for optimizer in run.state.optimizers)
