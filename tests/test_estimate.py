"""What `--estimate` says: the arithmetic, the corpus that is there, and that nothing is begun."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch

import estimate as estimate_module
from benchmarks import memory
from checkpoint.weights import build_model
from config import load_config
from estimate import PHASES, checkpoint_bytes, estimate, figures, hours, largest_batch, whole
from runtime.cli import ConfigError
from tests.conftest import ALONE, CPU, flags, run
from train import main, train


@pytest.fixture(autouse=True)
def the_matmul_rate_is_given(monkeypatch):
    """Measuring it takes a second or two."""
    monkeypatch.setattr(estimate_module, "matmul_tflops", lambda *_, **__: 250.0)


def test_the_estimate_of_gpt2_124m_is_the_arithmetic_of_its_recipe(tmp_path, capsys):
    config = load_config(
        "gpt2_124m",
        device="cpu",
        compile=False,
        data_dir=str(tmp_path),
        log_dir=str(tmp_path / "a/b"),
    )
    estimate(config, ALONE)
    said = capsys.readouterr().out
    flops = 9_999_745_024 * (6 * (124_475_904 - 1024 * 768) + 12 * 12 * 768 * 1024)
    for line in (
        "gpt2_124m: 124,475,904 parameters, on 1 x cpu",
        "9,999,745,024 in 19,073 steps of 524,288",
        f"{tmp_path}/fineweb is not there yet",
        f"{flops:.3g} FLOPs",
        "250.00 TFLOP/s here, in bfloat16",
        f"at 40% of that: {flops / 1e14 / 3600:.3g} hours, {flops / 1e14 / 19073:.3f} s a step",
        "at 30% of that: ",
        "at 50% of that: ",
        "1.49 GB a checkpoint, at most 5.97 GB for 3 at a time and the best one; ",
    ):
        assert line in said, line
    assert list(tmp_path.iterdir()) == []


def test_epochs_are_of_the_corpus_that_is_there_and_nothing_is_trained(tiny_config, capsys):
    config = tiny_config(val_fraction=0.1, max_steps=60, estimate=True, keep_last=0)
    main(config)
    said = capsys.readouterr().out
    assert (
        f"{60 * 4 * 32 / 3600:.2f} epochs of the 3,600 tokens of {config.data_dir}/tiny, which "
        f"has 400 more" in said
    )
    assert "no checkpoint is saved, as keep_last is 0" in said
    assert not Path(config.log_dir).exists()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_takes_the_disk_that_was_estimated(optimizer, tiny_config):
    config = tiny_config(optimizer=optimizer, n_embd=128, tie_weights=True, max_steps=1)
    train(config, ALONE)
    files = (Path(config.log_dir) / "train/checkpoints/step_000001").glob("*.safetensors")
    assert sum(file.stat().st_size for file in files) == pytest.approx(
        checkpoint_bytes(config, build_model(config)[1]), rel=0.02
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "for 1 at a time;"),
        ({"eval_every": 10}, "for 3 at a time and the best one;"),  # each that is better is saved
        ({"checkpoint_every": 10, "keep_last": 1}, "for 2 at a time;"),
    ],
)  # the one before stays until the new one is whole
def test_checkpoints_that_are_there_at_a_time_are_counted(options, said, tiny_config, capsys):
    estimate(tiny_config(max_steps=50, val_fraction=0.1, **options), ALONE)
    assert said in capsys.readouterr().out


def test_the_command_says_it_and_ends_also_for_weights_that_exist(tiny_config, tmp_path):
    train(tiny_config(run_name="first", max_steps=1, tie_weights=True), ALONE)
    done = run(
        "train.py",
        *flags(tiny_config(init_from="first", estimate=True)),
        "--tie_weights",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^train: [\d,]+ parameters, on 1 x cpu$", done.stdout, re.MULTILINE)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["first"]


def test_an_estimate_is_of_a_whole_run(tiny_config):
    with pytest.raises(ConfigError, match="estimate and resume exclude each other"):
        tiny_config(estimate=True, resume="auto")


def test_a_time_is_in_hours_and_in_days_where_it_is_long():
    assert [hours(seconds) for seconds in (36, 5400, 100 * 3600, 999.7 * 3600, 1e7)] == [
        "0.01 hours",
        "1.5 hours",
        "100 hours (4 days)",
        "1,000 hours (42 days)",
        "2,778 hours (116 days)",
    ]


# ---- memory

WAYS = {
    "nothing on": {},
    "flash": {"flash": True},
    "bf16": {"bf16": True, "flash": True},
    "recompute": {"recompute": True},
    "loss in parts": {"loss_chunks": 4},
    "muon": {"optimizer": "muon"},
    "accumulation": {"total_batch_tokens": 256},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_what_is_counted_without_numbers_is_what_a_step_with_numbers_takes(
    options, tiny_config, monkeypatch
):
    config = tiny_config(tie_weights=True, fused_adamw=True, grad_clip=1.0, **options)
    counted = figures(config, 1, CPU)
    monkeypatch.setattr(estimate_module, "FakeTensorMode", contextlib.nullcontext)
    real = figures(config, 1, CPU)
    assert counted == pytest.approx(real, rel=0.01)
    assert min(counted.values()) >= 0
    assert all(
        counted[part] > 0
        for part in ("parameters", "optimizer", "activations", "forward", "backward", "update")
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_parameters_gradients_and_optimizer_state_are_the_bytes_of_a_model(optimizer, tiny_config):
    config = tiny_config(optimizer=optimizer, tie_weights=True)
    model = build_model(config)[1]
    found = figures(config, 1, CPU)
    assert found["parameters"] == found["gradients"] == 4 * model.num_parameters()
    assert found["optimizer"] == pytest.approx(
        checkpoint_bytes(config, model) - 4 * model.num_parameters(), rel=0.01
    )


@pytest.mark.parametrize("flash", [False, True])
def test_activations_are_what_autograd_keeps_for_the_backward_pass(flash, tiny_config):
    config = tiny_config(tie_weights=True, batch_size=8, flash=flash)
    model = build_model(config)[1]
    own, kept = (
        {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())},
        {},
    )

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = (
                tensor.untyped_storage()
            )  # alive, so that no other one takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(*torch.zeros(2, 8, config.seq_len, dtype=torch.long))
    assert loss.requires_grad
    assert figures(config, 1, CPU)["activations"] == pytest.approx(
        sum(storage.nbytes() for storage in kept.values()), rel=0.02
    )


def test_what_saves_memory_is_estimated_to_save_it(tiny_config):
    def most(world_size=1, **options):
        found = figures(
            tiny_config(tie_weights=True, seq_len=64, block_size=64, **options), world_size, CPU
        )
        return max(found[phase] for phase in PHASES)

    wide, compiled = (
        {"batch_size": 16, "n_layer": 4},
        {"batch_size": 16, "n_layer": 1, "n_embd": 16, "compile": True},
    )
    assert most(flash=True, **wide) < most(**wide)
    assert most(recompute=True, **wide) < most(**wide)
    assert most(loss_chunks=8, **wide) < most(**wide)
    assert most(bf16=True, **wide) < most(**wide)
    assert most(**compiled) < most(**compiled | {"compile": False})
    assert most(loss_chunks=8, **compiled) < most(**compiled)
    large = {"n_embd": 256, "batch_size": 1}
    assert most(4, fsdp=True, **large) < most(2, fsdp=True, **large) < most(2, **large)
    assert most(4, fsdp=True, bf16=True, **large) < most(4, fsdp=True, **large)
    assert most(2, **large) > most(**large), "DDP has buckets"


def test_layers_that_are_not_traced_are_extrapolated(tiny_config, monkeypatch):
    config = tiny_config(compile=True, n_layer=5, n_embd=16)
    monkeypatch.setattr(estimate_module, "MOST_LAYERS", 3)
    extrapolated = figures(config, 1, CPU)
    monkeypatch.setattr(estimate_module, "MOST_LAYERS", 5)
    assert extrapolated == pytest.approx(figures(config, 1, CPU), rel=0.02)


def test_the_largest_batch_that_is_said_to_fit_is_the_largest_that_does(tiny_config):
    config = tiny_config(tie_weights=True)

    def takes(batch_size):
        found = figures(config.model_copy(update={"batch_size": batch_size}), 1, CPU)
        return whole(max(found[phase] for phase in PHASES), config, CPU)

    for size in (1, 4):
        config = config.model_copy(update={"batch_size": size})
        found = figures(config, 1, CPU)
        assert largest_batch(config, 1, CPU, takes(40), found) in (39, 40)
        assert largest_batch(config, 1, CPU, takes(1) - 2**20, found) == 0
    in_steps = config.model_copy(update={"total_batch_tokens": 48 * config.seq_len})
    found = figures(in_steps, 1, CPU)
    assert largest_batch(in_steps, 1, CPU, takes(40), found) == 24, (
        "it divides the sequences of a step"
    )
    assert largest_batch(in_steps, 1, CPU, 2**40, found) == 48
    config = in_steps  # gradients are there while the next micro-step goes forward
    assert largest_batch(in_steps, 1, CPU, takes(24) + 2**16, found) == 24


def test_the_estimate_ends_with_the_peak_and_a_run_says_what_it_took(tiny_config, capsys):
    config = tiny_config(max_steps=3, estimate=True)
    main(config)
    said = capsys.readouterr().out
    assert re.search(r"^memory:  of the process: [\d,]+ MB parameters, ", said, re.MULTILINE)
    assert re.search(
        r"^batch:   the largest batch_size that fits is [\d,]+, in the [\d,]+ MB",
        said,
        re.MULTILINE,
    )
    assert re.fullmatch(r"estimated peak: \d+ MB", said.splitlines()[-1])
    train(config.model_copy(update={"estimate": False}), ALONE)
    summary = json.loads((Path(config.log_dir) / "train/summary.json").read_text())
    assert 0 <= summary["memory_growth_mb"] < summary["peak_memory_mb"]


@pytest.mark.usefixtures("forked")
def test_the_script_sets_estimates_beside_what_runs_took(
    tiny_config, tmp_path, monkeypatch, capsys
):
    config = tiny_config(max_steps=2)
    (tmp_path / "tiny.yaml").write_text(
        json.dumps(config.model_dump(mode="json", exclude_unset=True, exclude={"max_steps"}))
    )
    monkeypatch.setattr(memory, "RUNS", [(1, f"{tmp_path}/tiny.yaml --n_layer 1")])
    memory.main(["--dataset", config.dataset, "--max_steps", "2"])
    said = capsys.readouterr().out
    assert re.search(r"tiny.yaml --n_layer 1, \d+, \d+, [+-][\d.]+%$", said, re.MULTILINE)
    assert re.search(r"off by [\d.]+% in the median, [\d.]+% at most", said)
