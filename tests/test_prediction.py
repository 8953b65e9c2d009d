"""Predictions of a stage's speed, from counted work and the rates of a device."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config import load_config
from measure.ladder.climb import predict_stages
from measure.ladder.record import Device, Predictions, Record
from measure.ladder.results import look_up
from measure.ladder.roofline import Counter, count, fuse, predict, rate_of_fp32
from tests.conftest import CPU, MODERN, ROOT, TINY, TINY_RUN
from tests.test_ladder import plan

SMALL = TINY | TINY_RUN | {"n_layer": 1}
FAST = {"float32": 1e9, "bfloat16": 1e9}
BF16 = {"avx512_bf16": True}


def rates(**changes):
    return Device(
        **{"name": "cpu", "tflops": FAST, "gigabytes_per_s": 1e9, "launch_us": 0.0} | changes
    )


def config_of(**options):
    return load_config(**SMALL | options)


@pytest.mark.parametrize("flash", [False, True])
def test_a_steps_arithmetic_is_that_of_the_model(flash):
    flops = sum(op.flops for op in count(config_of(n_layer=2, flash=flash), CPU))
    matrices = 2 * 12 * 32**2 + 128 * 32
    # Forward and backward: 12 n_layer n_embd T; flash attention computes the scores twice.
    attention = (14 if flash else 12) * 2 * 32 * 32
    assert flops == pytest.approx(4 * 32 * (6 * matrices + attention), rel=1e-3)


def test_the_newer_recipes_are_counted():
    options = MODERN | {"optimizer": "muon"}
    more = sum(op.flops for op in count(config_of(**options), CPU))
    assert more > sum(op.flops for op in count(config_of(), CPU)), "Muon's matmuls"


def test_fp16_is_counted_with_its_update():
    bf16, fp16 = ([op.name for op in count(config_of(**{t: True}), CPU)] for t in ("bf16", "fp16"))
    assert fp16 == bf16


def test_views_move_nothing_and_a_sum_moves_what_it_reads_and_writes():
    operations = count(config_of(), CPU)
    names = {op.name for op in operations}
    assert not names & {"view", "t", "transpose", "expand", "detach", "split"}
    (lookup,) = (op for op in operations if op.name == "embedding")
    assert lookup.bytes == 2 * 4 * 32 * 32 * 4  # rows, not the matrix


def test_a_mask_that_fills_a_copy_moves_the_scores_four_times():
    scores, mask = torch.zeros(4, 32, 32), torch.ones(32, 32, dtype=torch.bool)
    with Counter() as counter:
        scores.masked_fill(mask, 0.0)
    with torch.profiler.profile() as trace:
        scores.masked_fill(mask, 0.0)
    names = ["clone", "masked_fill_"]
    assert [op.name for op in counter.operations] == names
    assert {f"aten::{name}" for name in names} <= {event.name for event in trace.events()}
    assert sum(op.bytes for op in counter.operations) == 4 * scores.nbytes + mask.nbytes


def test_fused_operations_move_about_as_much_as_inductors_kernels():
    path = ROOT / "logs/results/counted/speedup10_8.txt"
    text = path.read_text()
    triton = sum(float(n) for n in re.findall(r"(\S+)\s+0\.00\s+\S+%\s+\w+ward triton\n", text))
    config = load_config("speedup10", batch_size=8)
    operations = fuse(count(config, CPU))
    fused = sum(op.bytes for op in operations if op.name == "fused") / 1e9
    assert triton == pytest.approx(15.23)
    assert fused == pytest.approx(triton, rel=0.2)


def test_the_slowest_of_arithmetic_memory_and_launch_is_what_an_operation_takes():
    config = config_of()
    operations = count(config, CPU)
    by_arithmetic = predict(config, rates(tflops={"float32": 1e-3}), CPU)
    assert by_arithmetic.arithmetic == pytest.approx(sum(op.flops for op in operations) / 1e9)
    by_memory = predict(config, rates(gigabytes_per_s=1e-3), CPU)
    assert by_memory.memory == pytest.approx(sum(op.bytes for op in operations) / 1e6)
    by_launches = predict(config, rates(launch_us=5.0), CPU)
    assert by_launches.launches == pytest.approx(5e-6 * len(operations))
    assert by_launches.tokens_per_sec == pytest.approx(128 / by_launches.launches, rel=1e-3)
    assert by_launches.launches == pytest.approx(by_launches.seconds, rel=1e-3)


def test_micro_steps_and_chunks_of_the_loss_cost_what_one_batch_does():
    slow = rates(tflops={"float32": 1e-3})
    whole = predict(config_of(), slow, CPU)
    halves = predict(config_of(batch_size=2, total_batch_tokens=128), slow, CPU)
    assert halves.tokens_per_sec == pytest.approx(whole.tokens_per_sec, rel=1e-3)
    chunks = predict(config_of(loss_chunks=4), slow, CPU)
    assert chunks.arithmetic == pytest.approx(whole.arithmetic, rel=1e-3)


def test_compiled_models_launch_less():
    plain, compiled = (
        predict(config_of(compile=compiles), rates(launch_us=1.0), CPU).launches
        for compiles in (False, True)
    )
    assert compiled < 0.9 * plain


@pytest.mark.parametrize(
    ("device", "precision", "amx", "rate"),
    [
        ("cpu", "medium", True, "bfloat16"),
        ("cpu", "medium", False, "float32"),
        ("cpu", "highest", True, "float32"),
        ("cuda", "high", True, "tf32"),
        ("cuda", "medium", True, "tf32"),
        ("cuda", "highest", True, "float32"),
    ],
)
def test_fp32_is_as_fast_as_the_precision_of_its_matmuls(device, precision, amx, rate, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: BF16 | {"amx_bf16": amx})
    config = config_of(matmul_precision=precision)
    assert rate_of_fp32(config, torch.device(device)) == rate
    if device == "cpu":
        slow = rates(tflops={"float32": 1e-3, "bfloat16": 2e-3})
        plain = predict(config_of(), slow, CPU).arithmetic
        halves = 2 if rate == "bfloat16" else 1
        assert predict(config, slow, CPU).arithmetic == pytest.approx(plain / halves, rel=0.01)


@pytest.fixture
def configs(in_tmp_path, forked_processes):
    """plain.yaml and bf16.yaml, which are predicted in processes that have PyTorch."""
    Path("plain.yaml").write_text(json.dumps(SMALL))
    Path("bf16.yaml").write_text("{base: plain.yaml, bf16: true}")


@pytest.mark.usefixtures("configs")
def test_what_cannot_be_predicted_is_noted_and_an_older_prediction_goes(capsys):
    record, found = Record(), plan("plain.yaml")
    record.predicted = Predictions(where="elsewhere", rates=rates())
    predict_stages(record, found, rates(tflops={"bfloat16": 1.0}))
    assert capsys.readouterr().out == "note: nothing is predicted: KeyError: 'float32'\n"
    assert record.predicted == Predictions()
    predict_stages(record, found, Device(name="cpu"))
    assert "rates could not be measured" in capsys.readouterr().out


@pytest.mark.usefixtures("configs")
def test_a_ladder_that_is_resumed_predicts_with_the_rates_of_its_beginning(capsys):
    record, (plain, bf16) = Record(), plan("plain.yaml", "bf16.yaml")
    for tflops in (1e-3, 5e-3):
        predict_stages(record, [plain, bf16], rates(tflops={"float32": tflops, "bfloat16": 2e-3}))
        assert capsys.readouterr().out == "predicted: bf16 2.00 times as fast as plain\n"
    record = Record.load(record.folder)
    ours, theirs = (look_up(record, stage).prediction for stage in (bf16, plain))
    assert ours.over(theirs) == pytest.approx(2, rel=0.01)  # its own matmuls' rate
    assert not look_up(record, plan("plain.yaml", options=["--lr=1"])[0]).prediction
    assert not look_up(record, replace(plain, ranks=2)).prediction
    predict_stages(record, [plain, replace(bf16, ranks=2)], rates(name="another GPU"))
    assert record.predicted.stages.keys() == {"plain"}
