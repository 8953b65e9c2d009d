"""The learning rate of every step, and which parameters decay."""

import csv
import itertools
import logging
import math

import pytest
import torch

from config import Config, load_config
from model import GPT, GPTConfig
from optimizer import Muon, learning_rate, make_optimizers, note_rate_change, orthogonalize
from runtime.cli import parse
from runtime.console import noted
from tests.conftest import ROOT, cases, run_ranks


def rates(**options):
    config = load_config(**options)
    return [learning_rate(step, config) for step in range(1, config.max_steps + 1)]


# ---- learning rate


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize(
    ("warmup", "steps"), [(0, 20), (1, 20), (5, 20), (20, 20), (50, 20), (0, 1), (19, 20)]
)
def test_the_rate_rises_to_its_peak_in_the_warm_up_and_never_after(schedule, warmup, steps):
    options = {"lr": 1e-3, "min_lr": 1e-5, "warmup_steps": warmup, "max_steps": steps}
    lrs = rates(lr_schedule=schedule, **options)
    # a resume asks for the step after the last one
    assert math.isfinite(learning_rate(steps + 1, load_config(lr_schedule=schedule, **options)))
    rising = [1e-3 * step / warmup for step in range(1, warmup + 1)]
    assert lrs[:warmup] == pytest.approx(rising[:steps])
    after = lrs[max(warmup - 1, 0) :]
    assert after == sorted(after, reverse=True)
    assert after[:1] in ([], [1e-3])
    assert min(lrs) > 0


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


# options at first => the last step with them => what then changes => what is told
JUMPS = """
cosine --max_steps 100 => 100 => --max_steps 200 => step 101 is 0.00055, it was 0.0001 at step 100
wsd --max_steps 100 --wsd_decay_fraction 0.3 => 100 => --max_steps 200 => step 101 is 0.001, it \
was 0.0001 at step 100; to train longer with wsd, resume from a checkpoint before the decay began: \
step 70 or earlier
wsd --max_steps 100 => 50 => --max_steps 200 => nothing
cosine --max_minutes 1 => 100 => --max_minutes 2 => step 101 is 0.00055, it was 0.0001 at step 100
cosine --warmup_steps 50 => 1 => --log_every 5 => nothing
"""


@pytest.mark.parametrize(("options", "step", "change", "line"), cases(JUMPS))
def test_a_rate_that_jumps_at_a_resume_is_told_from_what_to_what(options, step, change, line):
    given = f"--lr 1e-3 --min_lr 1e-4 --lr_schedule {options}"
    before, now = (parse(Config, words.split()) for words in (given, f"{given} {change}"))
    with noted() as notes:
        note_rate_change(now, before.model_dump(mode="json"), int(step), 60.0)
    told = [note.getMessage() for note in notes]
    assert told == ([] if line == "nothing" else [f"the learning rate of {line}"])


# ---- parameter groups


def test_weight_decay_groups_of_the_124m_model_hold_every_parameter_once():
    config = load_config("speedup10", fused_adamw=False)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50304, tie_weights=True))
    with noted(logging.DEBUG) as lines:
        (adamw,) = make_optimizers(model, config)
    assert [line.getMessage() for line in lines] == [
        "124,475,904 parameters",
        "num decayed parameter tensors: 50, with 124,354,560 parameters",
        "num non-decayed parameter tensors: 98, with 121,344 parameters",
    ]
    decay = {p: group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert decay == {p: 0.1 * (p.dim() > 1) for p in model.parameters()}
    assert len(decay) == sum(len(group["params"]) for group in adamw.param_groups)


def test_embeddings_head_and_scalars_have_learning_rates_of_their_own(tiny_model):
    model = tiny_model()
    config = load_config(lr=1e-3, embed_lr=0.3, head_lr=0.02, scalar_lr=0.01, weight_decay=0.1)
    (adamw,) = make_optimizers(model, config)
    factors = {p: group["lr_factor"] for group in adamw.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        kind = next((kind for kind in ("wte", "wpe", "lm_head") if kind in name), p.dim() < 2)
        expected = {"wte": 0.3, "wpe": 0.3, "lm_head": 0.02, True: 0.01, False: 1e-3}[kind]
        assert factors[p] == pytest.approx(expected / 1e-3), name
    (adamw,) = make_optimizers(tiny_model(tie_weights=True), config)
    assert {group["lr"] for group in adamw.param_groups} == {0.3, 1e-3, 0.01}


def test_adamw_gets_its_options_and_the_fused_flag_and_everything_decays_by_default(tiny_model):
    options = {"betas": (0.8, 0.9), "eps": 1e-6, "lr": 2e-3, "weight_decay": 0.3}
    for fused in (False, True):
        (adamw,) = make_optimizers(tiny_model(), load_config(fused_adamw=fused, **options))
        assert adamw.defaults["fused"] is (fused or None)  # False would switch foreach off too
        (group,) = adamw.param_groups
        assert options.items() <= group.items()


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest(tiny_model):
    model = tiny_model(tie_weights=True)
    decays = {"weight_decay": 0.1, "muon_weight_decay": 0.2}
    config = load_config(optimizer="muon", lr=1e-3, decay_matrices_only=True, **decays)
    optimizers = make_optimizers(model, config)
    assert {group["lr_factor"] for group in optimizers[1].param_groups} == {20.0}
    taken = [
        [(p, group.get("parts")) for group in one.param_groups for p in group["params"]]
        for one in optimizers
    ]
    assert [{group["weight_decay"] for group in one.param_groups} for one in optimizers] == [
        {0.1, 0.0},
        {0.2},
    ]
    parts = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 1, "mlp.c_proj": 1}
    names = {p: name for name, p in model.named_parameters()}
    assert {names[p]: n for p, n in taken[1]} == {
        f"transformer.h.{layer}.{name}.weight": n
        for layer, (name, n) in itertools.product(range(2), parts.items())
    }
    assert sorted(names[p] for p, _ in taken[0] + taken[1]) == sorted(names.values())


def update(make, weight, gradient):
    """What one step of the optimizer that `make` makes of a parameter subtracts from a matrix."""
    p = torch.nn.Parameter(weight.clone())
    p.grad = gradient
    make(p).step()
    return weight - p.detach()


def muon_of(p, parts=1):
    return Muon([{"params": [p], "parts": parts}], lr=0.02, weight_decay=0.0)


def test_muon_moves_weights_as_pytorchs_own_in_each_step_with_momentum_decay_and_schedule():
    torch.manual_seed(0)
    # the last two are orthogonalized together, one of them transposed
    start = [0.1 * torch.randn(shape) for shape in ((48, 48), (96, 32), (32, 96))]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    muon = Muon([{"params": ours, "parts": 1}], lr=0.02, weight_decay=0.5)
    pytorchs = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.5)
    for step, lr, momentum in (
        (1, 0.02, 0.85 + 0.1 / 300),
        (2, 0.01, 0.85 + 0.2 / 300),
        (999, 0.04, 0.95),
    ):
        for p in ours if step > 1 else ():
            muon.state[p]["step"].fill_(step - 1)
        muon.param_groups[0]["lr"] = lr
        pytorchs.param_groups[0] |= {"lr": lr, "momentum": momentum}
        for p, q in zip(ours, theirs, strict=True):
            p.grad = q.grad = torch.randn(p.shape)
        muon.step()
        pytorchs.step()
        for p, q, first in zip(ours, theirs, start, strict=True):
            assert (p - q).norm() / (q - first).norm() < 0.06  # PyTorch's is in bfloat16


def test_muon_makes_queries_keys_and_values_orthogonal_each_by_itself():
    torch.manual_seed(0)
    weight, gradient = torch.randn(2, 3 * 16, 16)
    gradient[:16] *= 1000  # the queries: as one matrix, they would leave nothing of the others
    together = update(lambda p: muon_of(p, parts=3), weight, gradient)
    each = [update(muon_of, *pair) for pair in zip(weight.chunk(3), gradient.chunk(3), strict=True)]
    torch.testing.assert_close(together, torch.cat(each), rtol=1e-4, atol=1e-5)


def test_normuon_brings_each_neuron_of_a_muon_update_to_the_size_of_the_others():
    """Li et al. 2025, algorithm 1, with the norm of Muon's own update; a stack's matrices apart."""
    torch.manual_seed(0)
    start, parts = [torch.randn(shape) for shape in ((48, 16), (64, 16), (16, 64))], (3, 1, 1)
    plain, normalized = (
        Muon(
            [
                {"params": [torch.nn.Parameter(p.clone())], "parts": n}
                for p, n in zip(start, parts, strict=True)
            ],
            lr=1.0,
            weight_decay=0.0,
            normalized=on,
        )
        for on in (False, True)
    )
    averages = [torch.zeros(len(p)) for p in start]
    for _ in range(3):
        moved = []
        gradients = [torch.randn(p.shape) * torch.rand(len(p), 1) for p in start]
        for muon in (plain, normalized):
            params = [p for group in muon.param_groups for p in group["params"]]
            before = [p.detach().clone() for p in params]
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient.clone()
            muon.step()
            moved.append([p.detach() - q for p, q in zip(params, before, strict=True)])
        for update, ours, average, n in zip(*moved, averages, parts, strict=True):
            shape = max(1.0, len(update) / n / update.size(1)) ** 0.5  # of a tall matrix's update
            average += 0.05 * ((update / shape).square().mean(1) - average)
            for part, own, rows in zip(*(t.chunk(n) for t in (update, ours, average)), strict=True):
                expected = part / rows.sqrt()[:, None]
                expected *= part.norm() / expected.norm()
                torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)


def test_orthogonalizing_moves_singular_values_near_1():
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(2, n, n))[0] for n in (32, 48))
    values = torch.logspace(-2.4, 0, 32)
    result = orthogonalize(left * values @ right[:, :32])
    spread = left.mT @ result @ right[:, :32].mT
    ends = spread.diagonal(dim1=1, dim2=2)
    assert ends.min() > 0.68
    assert ends.max() < 1.21
    torch.testing.assert_close(spread, ends.diag_embed(), rtol=0, atol=1e-3)


# on every rank: three steps with a share of the matrices, and the same alone
SHARED = """if True:
    import torch
    from optimizer import Muon
    from runtime.world import joined_world

    def steps(**ranks):
        torch.manual_seed(0)
        shapes = {3: [(96, 48)] * 3, 1: [(48, 96)] * 2 + [(96, 48)] + [(64, 64)]}
        groups = [
            {"params": [torch.nn.Parameter(torch.randn(shape)) for shape in each], "parts": parts}
            for parts, each in shapes.items()
        ]
        params = [p for group in groups for p in group["params"]]
        muon = Muon(groups, lr=0.02, weight_decay=0.01, normalized=True, **ranks)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            muon.step()
        kept = ("momentum_buffer", "row_squares")
        return [*params, *(muon.state[p][name] for p in params for name in kept)]

    with joined_world(torch.device("cpu"), timeout=60) as world:
        shared = steps(rank=world.rank, world_size=world.world_size)
        assert all(map(torch.equal, shared, steps())), world.rank
"""


def test_ranks_that_share_muons_matrices_have_the_weights_of_one_to_the_last_bit(tmp_path):
    """Of one shape there are nine matrices, of others three and one: no share is even."""
    run_ranks(2, "-c", SHARED, cwd=tmp_path)
