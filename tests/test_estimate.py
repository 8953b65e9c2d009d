"""The estimate of check.py: arithmetic, corpus, memory of real runs; no run is started."""

import contextlib
import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import summary
from check import CheckOptions, main
from checkpoint.state import State
from config import load_config
from measure.preflight import estimate as module
from measure.preflight.estimate import (
    Moment,
    describe_disk,
    describe_saving,
    estimate,
    largest_batch,
    peak_bytes,
    print_memory,
    trace,
)
from model import GPT, GPTConfig
from runtime.cli import load
from runtime.world import World
from summary import announce_long_run
from tests.conftest import ALONE, CPU, ROOT, flags, refused, run, run_from_nothing
from train import train

MB = 2**20


def test_the_estimate_of_gpt2_124m_is_the_arithmetic_of_its_recipe(tmp_path, capsys, monkeypatch):
    places = {"data_dir": str(tmp_path), "log_dir": str(tmp_path / "a/b")}
    config = load_config("gpt2_124m", device="cpu", **places)
    numbers = 124_475_904
    at = Moment(4 * numbers, 4 * numbers, 8 * numbers, 0)
    with torch.device("meta"):
        model = GPT(GPTConfig.of(config))
    traced = dict.fromkeys(("backward pass", "clipping", "update", "kept"), at)
    monkeypatch.setattr(module, "trace", lambda *_: (model, traced))  # takes many seconds
    monkeypatch.setattr(module, "matmul_tflops", lambda *_, **__: 250.0)
    estimate(config, ALONE)
    out = capsys.readouterr().out
    flops = 9_999_745_024 * (6 * (numbers - 1024 * 768) + 12 * 12 * 768 * 1024)
    for line in (
        "gpt2_124m: 124,475,904 parameters, on 1 x cpu",
        "9,999,745,024 in 19,073 steps of 524,288",
        f"corpus:  {tmp_path}/fineweb: no such corpus",
        f"{flops:.3g} FLOPs",
        f"time:    about 19 hours, {flops / 1.25e14 / 19073:,.3f} s a step",
        "at 50% MFU of the 250.00 TFLOP/s that a large matmul reaches here, in bfloat16",
        "measured runs had 9% to 82%, which would be 12 hours to 4 days",
        "1.49 GB a checkpoint, at most 5.97 GB for 3 at a time and the best one; ",
        "memory:  of the process: 475 MB parameters, 475 MB gradients, 950 MB optimizer state, ",
        "compiled: activations are counted as",
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
    assert re.search(
        r"\nbatch:   the largest batch_size that fits is [\d,]+, in the [\d,]+ MB", out
    )
    assert re.fullmatch(r"estimated peak: \d+ MB", out.splitlines()[-1])
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
    monkeypatch.setattr(summary, "matmul_tflops", lambda *_: 0.2)
    folder, state = Mock(), Mock(step=0)
    state.model.flops_per_token.return_value = 855_166_464
    announce_long_run(load_config("baseline"), state, ALONE, folder)
    (line,) = folder.message.call_args.args
    assert re.match(r"takes about 15 minutes, at 50% MFU; shorter: --max_steps 5", line)


# ---- memory


def moments_of(config, ranks=1):
    """The moments of a step, by name."""
    return trace(config, World(CPU, world_size=ranks))[1]


def test_all_tensors_of_a_checkpoint_are_counted_and_do_not_grow_with_the_batch(
    tiny_config, monkeypatch
):
    config = tiny_config(n_layer=1)
    before, real = moments_of(config), State.tensors
    more = {"more.safetensors": {"numbers": torch.zeros(1000)}}
    monkeypatch.setattr(State, "tensors", lambda state: real(state) | more)
    for name, moment in moments_of(config).items():
        assert moment.optimizer == before[name].optimizer + 4000
        assert moment.activations == before[name].activations - 4000


def test_on_a_gpu_an_update_that_is_not_fused_needs_room_for_another_copy_of_the_weights(
    tiny_config, monkeypatch
):
    config = tiny_config(n_layer=1)
    plain = moments_of(config)["update"].total()
    real, on_gpu = module.update_as_real, World(torch.device("cuda"))
    monkeypatch.setattr(
        module, "update_as_real", lambda run: real(Mock(state=run.state, world=on_gpu))
    )
    assert moments_of(config)["update"].total() > plain


def peak(config, ranks=1):
    """The most bytes of tensors that a rank has at once."""
    return max(moment.total() for moment in moments_of(config, ranks).values())


@pytest.mark.parametrize(
    "options",
    [
        {"bf16": True, "flash": True, "total_batch_tokens": 256},
        {"recompute": True},
        {"loss_chunks": 4},
        {"optimizer": "muon"},
    ],
    ids=str,
)
def test_fake_steps_take_what_real_ones_do(options, tiny_config, monkeypatch):
    common = {"tie_weights": True, "fused_adamw": True, "grad_clip": 1.0, "n_layer": 1}
    config = tiny_config(**common, **options)
    fake = moments_of(config)
    monkeypatch.setattr(module, "FakeTensorMode", contextlib.nullcontext)
    for name, moment in moments_of(config).items():
        assert fake[name] == pytest.approx(moment, rel=0.01), name
        assert moment.total() > 0


def test_what_saves_memory_is_estimated_to_save_it(tiny_config):
    def most(ranks=1, **options):
        common = {"tie_weights": True, "fused_adamw": True, "n_layer": 1}
        return peak(tiny_config(**common, **options), ranks)

    assert most(flash=True, batch_size=16) < most(batch_size=16)
    large = {"n_embd": 256, "batch_size": 2}
    ddp = most(2, **large)
    assert most(4, fsdp=True, **large) < ddp
    assert most(**large) < ddp, "which has buckets"


def test_the_largest_batch_that_is_said_to_fit_is_the_largest_that_does(tiny_config):
    config = tiny_config(tie_weights=True, fused_adamw=True, n_layer=1)

    def takes(batch_size):
        return peak_bytes(moments_of(config.model_copy(update={"batch_size": batch_size})), CPU)

    moments = moments_of(config)
    assert largest_batch(config, ALONE, moments, takes(40)) in range(38, 42)
    assert largest_batch(config, ALONE, moments, 0) == 0
    config = config.model_copy(update={"total_batch_tokens": 48 * config.seq_len})
    assert largest_batch(config, ALONE, moments, takes(48) - MB / 4) == 24, "it divides the 48"


def test_a_gpu_has_the_memory_that_is_free_once_the_timed_matmuls_are(
    tiny_config, monkeypatch, capsys
):
    free = [100 * MB]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(1000 * MB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[-1], None))
    moment = Moment(0, 0, 0, MB)
    moments = dict.fromkeys(("kept", "clipping"), moment)
    print_memory(tiny_config(batch_size=1), World(torch.device("cuda")), moments)
    assert "largest batch_size that fits is 918, in the 950 MB" in capsys.readouterr().out


def test_a_run_grows_by_what_was_estimated(tiny_config, tmp_path):
    """Within a quarter, which half of ALLOCATOR, or one and a half times it, is not.

    With the C library's caches the gaps between buffers vary by half from run to run.
    """
    sizes = {"n_embd": 128, "vocab_size": 50257, "seq_len": 128, "block_size": 128}
    config = tiny_config(**sizes, max_steps=3, keep_last=0)
    tunables = "glibc.malloc.tcache_count=0"
    run("train.py", *flags(config), cwd=tmp_path, OMP_NUM_THREADS="1", GLIBC_TUNABLES=tunables)
    summary = json.loads((tmp_path / "logs/train/summary.json").read_text())
    estimated = peak_bytes(moments_of(config), CPU) / MB
    assert summary["memory_growth_mb"] == pytest.approx(estimated, rel=0.25)


def test_the_advice_on_saving_is_youngs():
    assert describe_saving(save=2.0, step=0.5) == (
        "saving:  2 s a checkpoint; best is one every 2.0 minutes with a failure an hour "
        "(checkpoint_every 240), 9.8 minutes with a failure a day (checkpoint_every 1,176), at "
        "50% MFU"
    )
    assert "(checkpoint_every 1)," in describe_saving(save=0.001, step=60.0)
