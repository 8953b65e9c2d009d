"""What `--estimate` says: the arithmetic, the corpus that is there, and that nothing is begun."""

import re
from pathlib import Path

import pytest

import estimate as estimate_module
from config import load_config
from estimate import checkpoint_bytes, estimate, hours
from runtime.cli import ConfigError
from tests.conftest import ALONE, flags, run
from train import main, train
from weights import build_model


@pytest.fixture(autouse=True)
def the_matmul_rate_is_given(monkeypatch):
    """Measuring it takes a second or two."""
    monkeypatch.setattr(estimate_module, "matmul_tflops", lambda *_, **__: 250.0)


def test_the_estimate_of_gpt2_124m_is_the_arithmetic_of_its_recipe(tmp_path, capsys):
    config = load_config("gpt2_124m", device="cpu", data_dir=str(tmp_path), log_dir=str(tmp_path / "a/b"))
    estimate(config, ALONE)
    said = capsys.readouterr().out
    flops = 9_999_745_024 * (6 * (124_475_904 - 1024 * 768) + 12 * 12 * 768 * 1024)
    for line in ("gpt2_124m: 124,475,904 parameters, on 1 x cpu", "9,999,745,024 in 19,073 steps of 524,288",
                 f"{tmp_path}/fineweb is not there yet", f"{flops:.3g} FLOPs", "250.00 TFLOP/s here, in bfloat16",
                 f"at 40% of that: {flops / 1e14 / 3600:.3g} hours, {flops / 1e14 / 19073:.3f} s a step",
                 "at 30% of that: ", "at 50% of that: ",
                 "1.49 GB a checkpoint, at most 5.97 GB for 3 at a time and the best one; "):
        assert line in said, line
    assert list(tmp_path.iterdir()) == []


def test_epochs_are_of_the_corpus_that_is_there_and_nothing_is_trained(tiny_config, capsys):
    config = tiny_config(val_fraction=0.1, max_steps=60, estimate=True, keep_last=0)
    main(config)
    said = capsys.readouterr().out
    assert f"{60 * 4 * 32 / 3600:.2f} epochs of the 3,600 tokens of {config.data_dir}/tiny, which has 400 more" in said
    assert "no checkpoint is saved, as keep_last is 0" in said
    assert not Path(config.log_dir).exists()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_takes_the_disk_that_was_estimated(optimizer, tiny_config):
    config = tiny_config(optimizer=optimizer, n_embd=128, tie_weights=True, max_steps=1)
    train(config, ALONE)
    files = (Path(config.log_dir) / "train/checkpoints/step_000001").glob("*.safetensors")
    assert sum(file.stat().st_size for file in files) == pytest.approx(checkpoint_bytes(config, build_model(config)[1]), rel=0.02)


@pytest.mark.parametrize(("options", "said"), [
    ({}, "for 1 at a time;"), ({"eval_every": 10}, "for 3 at a time and the best one;"),  # each that is better is saved
    ({"checkpoint_every": 10, "keep_last": 1}, "for 2 at a time;")])  # the one before stays until the new one is whole
def test_checkpoints_that_are_there_at_a_time_are_counted(options, said, tiny_config, capsys):
    estimate(tiny_config(max_steps=50, val_fraction=0.1, **options), ALONE)
    assert said in capsys.readouterr().out


def test_the_command_says_it_and_ends_also_for_weights_that_exist(tiny_config, tmp_path):
    train(tiny_config(run_name="first", max_steps=1, tie_weights=True), ALONE)
    done = run("train.py", *flags(tiny_config(init_from="first", estimate=True)), "--tie_weights", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^train: [\d,]+ parameters, on 1 x cpu$", done.stdout, re.MULTILINE)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["first"]


def test_an_estimate_is_of_a_whole_run(tiny_config):
    with pytest.raises(ConfigError, match="estimate and resume exclude each other"):
        tiny_config(estimate=True, resume="auto")


def test_a_time_is_in_hours_and_in_days_where_it_is_long():
    assert [hours(seconds) for seconds in (36, 5400, 100 * 3600, 999.7 * 3600, 1e7)] == [
        "0.01 hours", "1.5 hours", "100 hours (4 days)", "1,000 hours (42 days)", "2,778 hours (116 days)"]
