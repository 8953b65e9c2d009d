"""The learning rate of every step, and which parameters decay."""

import csv
import math

import pytest
import torch

from config import load_config
from model import GPT, GPTConfig
from optimizer import learning_rate, make_optimizers
from tests.conftest import ROOT


def rates(**options):
    config = load_config(**options)
    return [learning_rate(step, config) for step in range(1, config.max_steps + 1)]


# ---- learning rate


def test_constant_is_constant():
    assert rates(lr=1e-3, max_steps=4) == [1e-3] * 4


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 20), (1, 20), (5, 20), (20, 20), (50, 20), (0, 1), (19, 20)])
def test_endpoints_no_step_is_off_by_one(schedule, warmup, steps):
    lrs = rates(lr=1e-3, min_lr=1e-5, warmup_steps=warmup, lr_schedule=schedule, max_steps=steps)
    assert all(0 < lr <= 1e-3 for lr in lrs)
    if warmup:
        assert lrs[0] == pytest.approx(1e-3 / warmup)
    if warmup <= steps:
        peak = max(warmup - 1, 0)
        assert lrs[peak] == 1e-3
        assert all(a >= b for a, b in zip(lrs[peak:], lrs[peak + 1:], strict=False)), "rises after the peak"
    if schedule == "wsd" and max(warmup, 1) < steps:
        assert lrs[-1] == pytest.approx(1e-5)
    if schedule == "cosine" and warmup < steps:
        assert lrs[warmup] == 1e-3, "the peak is held for one more step"
        assert lrs[-1] > 1e-5, "the last step is one short of the minimum"


def test_cosine_is_halfway_in_the_middle():
    lrs = rates(lr=1.0, min_lr=0.0, warmup_steps=2, lr_schedule="cosine", max_steps=12)
    assert lrs[7] == pytest.approx(0.5)
    assert lrs[5] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.3)))


def test_wsd_is_stable_then_decays_linearly():
    lrs = rates(lr=1.0, min_lr=0.0, lr_schedule="wsd", wsd_decay_fraction=0.4, max_steps=10)
    assert lrs == pytest.approx([1.0] * 6 + [0.75, 0.5, 0.25, 0.0])


@pytest.mark.parametrize("stage", ["opt7", "opt8"])
def test_cosine_gives_every_rate_of_the_published_a100_logs_to_the_last_digit(stage):
    config = load_config(f"a100/{stage}")
    with open(ROOT / f"logs/reference/a100_{stage}.csv", newline="") as file:
        published = {int(row["step"]): row["lr"] for row in csv.DictReader(file)}
    assert len(published) == 50
    assert {step: f"{learning_rate(step, config):.6f}" for step in published} == published


# ---- parameter groups


def groups_of(optimizers):
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def test_weight_decay_groups_of_the_124m_model_hold_every_parameter_once():
    config = load_config("speedup10", fused_adamw=False)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50304, tie_weights=True))
    optimizers, lines = make_optimizers(model, config)
    assert lines == ["num decayed parameter tensors: 50, with 124,354,560 parameters",
                     "num non-decayed parameter tensors: 98, with 121,344 parameters"]
    decayed, plain = groups_of(optimizers)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    ids = [id(p) for group in (decayed, plain) for p in group["params"]]
    assert sorted(ids) == sorted({id(p) for p in model.parameters()})


def test_without_decay_groups_everything_decays(tiny_model):
    optimizers, lines = make_optimizers(tiny_model(), load_config(weight_decay=0.3))
    assert [group["weight_decay"] for group in groups_of(optimizers)] == [0.3]
    assert lines[1] == "num non-decayed parameter tensors: 0, with 0 parameters"


def test_adamw_gets_its_options_and_the_fused_flag_is_not_ignored(tiny_model):
    options = {"betas": (0.8, 0.9), "eps": 1e-6, "lr": 2e-3}
    for fused in (False, True):
        (adamw,), _ = make_optimizers(tiny_model(), load_config(fused_adamw=fused, **options))
        assert isinstance(adamw, torch.optim.AdamW)
        assert {name: adamw.defaults[name] for name in options} == options
        assert bool(adamw.defaults["fused"]) is fused


def test_fused_adamw_makes_the_same_update(tiny_model):
    after = []
    for fused in (False, True):
        model = tiny_model()
        (adamw,), _ = make_optimizers(model, load_config(fused_adamw=fused, weight_decay=0.1))
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            adamw.step()
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*after, rtol=1e-5, atol=1e-6)


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest(tiny_model):
    model = tiny_model(tie_weights=True)
    (adamw, muon), _ = make_optimizers(model, load_config(optimizer="muon", decay_matrices_only=True))
    names = {id(p): name for name, p in model.named_parameters()}
    taken = [names[id(p)] for group in groups_of([muon]) for p in group["params"]]
    assert len(taken) == 2 * 4
    assert all(".h." in name and name.endswith("weight") and "ln_" not in name for name in taken)
    ids = [id(p) for group in groups_of([adamw, muon]) for p in group["params"]]
    assert sorted(ids) == sorted({id(p) for p in model.parameters()})
