"""Training on real GPUs, against the CPU and against itself."""

import functools

import pytest
import torch

from config import load_config
from runtime.world import World
from tests.conftest import ALONE, flags, run_ranks, tiny_run, write_tiny_corpus
from tests.test_train import column
from train import setup, train

pytestmark = pytest.mark.gpu
GPU = World(torch.device("cuda", 0))


@pytest.mark.parametrize(("bf16", "error"), [(False, 1e-3), (True, 0.03)])
def test_compiled_gradients_are_those_of_eager(bf16, error):
    # Reductions of several orders in one kernel once gave wrong ones: pytorch#190796.
    batch, gradients = torch.randint(50257, (2, 8, 1024), device=GPU.device).unbind(), []
    options = {
        "n_layer": 2,
        "batch_size": 8,
        "vocab_size": 50304,
        "device": "cuda",
        "bf16": bf16,
        "flash": True,
    }
    for compiled in (False, True):
        run = setup(load_config("model/gpt2.yaml", **options, compile=compiled), GPU, batches=[])
        with run.autocast():
            run.model(*batch).backward()
        gradients.append([p.grad for p in run.state.model.parameters()])
    for eager, compiled in zip(*gradients, strict=True):
        assert (compiled - eager).norm() < error * eager.norm()


FP32 = {"fp16": False, "fused_adamw": False, "compile": False}
OPTIONS = [
    {"fp16": True, "fused_adamw": True, "grad_clip": 1.0},
    {"optimizer": "muon"},
    {"fused_adamw": True, "skip_nonfinite": 1, "log_every": 2},
    {"loss_chunks": 4, "tie_weights": True},
    {"compile": True, "compile_mode": "reduce-overhead"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_losses_are_those_of_a_cpu_and_resuming_draws_the_same_dropout(options, tiny_config):
    train(tiny_config(run_name="cpu", **options | FP32), ALONE)
    at = functools.partial(tiny_config, device="cuda", keep_last=1, **options)
    gpu, whole = at(run_name="gpu"), at(run_name="whole", dropout=0.1)
    half = at(run_name="half", dropout=0.1, max_steps=4)
    for config in (gpu, whole, half, at(resume="half", dropout=0.1)):
        train(config, GPU)
    assert column(gpu) == pytest.approx(column(tiny_config(run_name="cpu")), rel=1e-2)
    assert column(half) == pytest.approx(column(whole), rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", [{}, {"fsdp": True}, {"optimizer": "muon"}], ids=str)
def test_two_nccl_ranks_have_the_losses_of_one(options, tmp_path):
    write_tiny_corpus(tmp_path)
    at = functools.partial(tiny_run, tmp_path, device="cuda", total_batch_tokens=256)
    one, two = at(run_name="one", **options | {"fsdp": False}), at(run_name="two", **options)
    train(one, GPU)
    run_ranks(2, "train.py", *flags(two), cwd=tmp_path)
    rel = 1e-3 if options.get("optimizer") else 1e-4  # Muon rounds to bf16
    assert column(two) == pytest.approx(column(one), rel=rel)
