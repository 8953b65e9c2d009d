"""The training loop, in process: a step's arithmetic, a run's log and files, and its ends."""

import csv
import dataclasses
import functools
import itertools
import json
import math
import re
import statistics
import sys
from collections import namedtuple

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import checkpoint.files
import runtime.device
from checkpoint.files import CheckpointError, read_json
from checkpoint.weights import build_model
from config import WITHOUT_GRAPHS, Config, load_config
from data.token_file import TokenFileError
from dataloader import open_corpus
from inference.validation import validation_loss
from model import GPT, GPTConfig
from optimizer import learning_rate
from runtime.cli import ConfigError, parse
from runtime.device import NOTED_SLOWDOWN, slowdown
from runtime.errors import TrainingError
from runtime.report import project_files
from runtime.world import World
from tests import conftest
from tests.conftest import (
    ALONE,
    COMPILED,
    CPU,
    TINY_RUN,
    WITH_TEXT,
    at_step,
    console,
    folder_of,
    refused,
    run_ranks,
)
from train import setup, train


def rows(config, name="log.csv"):
    with open(folder_of(config) / name, newline="") as file:
        return list(csv.DictReader(file))


def column(config, name="loss", file="log.csv"):
    return [float(row[name]) for row in rows(config, file)]


# loss and norm as logged, the gradient as the optimizer got it, dtypes of weights and gradients
Step = namedtuple("Step", "loss gradient norm dtypes")


@pytest.fixture
def one_step(tiny_config, go):
    """The only step of a run with these options, as its update saw it."""

    def step(**options):
        weights, gradients = [], []

        def look(optimizer, *_):
            for group in optimizer.param_groups:
                weights.extend(group["params"])
            gradients.extend(p.grad for p in weights)

        config = tiny_config(init="torch", max_steps=1, keep_last=0, **options)
        hook = register_optimizer_step_pre_hook(look)
        go(config)
        hook.remove()
        gradient = torch.cat([each.flatten() for each in gradients])
        dtypes = {tensor.dtype for tensor in weights + gradients}
        return Step(*column(config), gradient, *column(config, "norm"), dtypes)

    return step


def graphs():
    """The graphs that PyTorch has compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def graphs_are_counted_anew():
    torch._dynamo.utils.counters.clear()


# ---- one step


@pytest.mark.parametrize(
    "flags",
    [
        *("bf16", "fp16", "flash", "compile", "loss_chunks", "bf16 loss_chunks"),
        *("fp16 loss_chunks", "bf16 residual_bf16", "bf16 residual_bf16 flash compile loss_chunks"),
    ],
)
def test_each_speed_flag_computes_the_same_within_its_precision(one_step, flags):
    speed = {name: 4 if name == "loss_chunks" else True for name in flags.split()}
    tolerances = {"bf16": (2e-3, 0.03), "fp16": (5e-4, 0.01)}
    loss_tolerance, grad_tolerance = tolerances.get(flags[:4], (1e-6, 1e-5))
    shape, compiled = {"n_embd": 64, "batch_size": 8}, 0
    if "compile" in speed:
        shape = {**COMPILED, "compile": False}
        compiled = len({"compile", "loss_chunks"} & speed.keys())  # the model, and a part's logits
    plain, fast = one_step(**shape), one_step(**(shape | speed))
    assert fast.loss == pytest.approx(plain.loss, rel=loss_tolerance)
    assert (fast.gradient - plain.gradient).norm() / plain.gradient.norm() < grad_tolerance
    assert fast.dtypes == {torch.float32}, "weights and gradients"
    if flags[:4] in tolerances:
        assert fast.loss != plain.loss, "autocast did not reach the model"
    assert graphs() == compiled


@pytest.mark.parametrize(("precision", "rel"), [({}, 1e-4), ({"fp16": True}, 1e-2)])
def test_clipping_bounds_the_gradient_of_all_micro_steps_and_the_norm_is_from_before_and_0_is_off(
    one_step, precision, rel
):
    """In fp16, loss and gradients are scaled by 65,536 until then."""
    free = one_step(batch_size=2, seq_len=8, grad_clip=0, **precision)
    assert free.norm == pytest.approx(free.gradient.norm().item(), rel=rel)
    assert 1 < free.norm < 100
    halves = {"batch_size": 1, "seq_len": 8, "total_batch_tokens": 16}
    clipped = one_step(**halves, grad_clip=0.05, **precision)
    assert clipped.norm == pytest.approx(free.norm, rel=rel)
    assert clipped.gradient.norm().item() == pytest.approx(0.05, rel=rel)
    directions = clipped.gradient / 0.05, free.gradient / free.norm
    torch.testing.assert_close(*directions, rtol=10 * rel, atol=rel)


def test_the_seed_decides_the_weights_and_the_order_of_the_data(tiny_config):
    def drawn(seed):
        taken = setup(tiny_config(seed=seed, shuffle=True), ALONE)
        return next(taken.batches)[0], taken.model.lm_head.weight

    for one, same, other in zip(drawn(1), drawn(1), drawn(2), strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


# ---- flags reach their switches


def test_tf32_sets_the_precision_of_the_process_in_every_run_where_the_device_has_it(
    tiny_config, monkeypatch
):
    def precision(**options):
        setup(tiny_config(**options), ALONE)
        return torch.get_float32_matmul_precision()

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert precision(matmul_precision="medium") == "medium"
    assert precision(tf32=True) == "highest"  # a CPU has none
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert precision(matmul_precision="medium") == "highest"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_on_a_gpu_flash_is_a_fused_kernel_tf32_is_on_and_autocast_takes_an_indexed_device(
    precision, tiny_config, here
):
    config = tiny_config(flash=True, tf32=True, device="cuda", **{precision: True})
    assert train(config, World(torch.device("cuda", 0)))["skipped_steps"] == 0
    assert re.search("(flash|cudnn)_attention kernel", console(here))
    assert torch.get_float32_matmul_precision() == "high"


def test_a_run_compiles_in_its_mode_and_says_which_kernel_flash_runs_and_what_has_no_effect(
    go, here, monkeypatch
):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda model, mode=None: modes.append(mode) or model)
    go(flash=True, compile=True, compile_mode="max-autotune", max_steps=1)
    assert modes[0] == "max-autotune"
    assert "flash runs PyTorch's flash_attention kernel" in console(here)
    go(flash=True, dropout=0.1, compile=True, compile_mode="reduce-overhead", max_steps=1)
    assert "flash has no effect" in console(here)
    assert "has no effect without CUDA" in console(here)


@pytest.mark.parametrize("options", [{"loss_chunks": 2}, {"total_batch_tokens": 256}, {}], ids=str)
@pytest.mark.parametrize("mode", WITHOUT_GRAPHS)
def test_cuda_graphs_are_for_one_rank_one_micro_step_and_one_chunk_of_the_loss(
    mode, options, tiny_config
):
    config = tiny_config(compile_mode=mode, **options)
    ranks = 1 if options else 2
    assert config.on_device("cuda", ranks).compile_mode == WITHOUT_GRAPHS[mode]
    assert tiny_config(compile_mode=mode).on_device("cuda", 1).compile_mode == mode
    assert config.on_device("cpu", ranks).compile_mode == mode


def test_before_torch_2_12_autotuned_matmuls_do_not_count_beyond_32_bits(monkeypatch):
    config = load_config("gpt2_124m", batch_size=64)  # 2^31.6 logits
    wanted = config.compile_mode
    for version, acting in (("2.11.0+cu128", "default"), ("2.12.0", wanted)):
        monkeypatch.setattr("config.version", lambda _, version=version: version)
        assert config.on_device("cuda", 1).compile_mode == acting
    assert config.on_device("cpu", 1).compile_mode == wanted != "default"


@pytest.mark.parametrize(("val_fraction", "compiled"), [(0.05, 1), (0.5, 2)])
def test_training_compiles_once_and_validation_once_if_its_whole_batches_are_many_no_other_shape(
    val_fraction, compiled, go, here, monkeypatch
):
    """Validation has one whole batch and a part of one, or 15 of them, for which a graph pays.

    The C++ compiler would be waited for, and decides nothing.
    """
    compile = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile)
    options = {"compile": True, "eval_every": 1, "sample_every": 2, "sample_tokens": 2}
    go(**WITH_TEXT, **options, max_steps=5, val_fraction=val_fraction)
    assert graphs() == compiled
    printed = console(here)
    assert printed.count("compiling takes a minute") == 1
    assert printed.count("sample after step") == 3
    assert printed.count("| validation loss") == 6


@pytest.fixture
def large_scale(monkeypatch):
    """A loss scale of fp16 with which the first steps overflow."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**22)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)


@pytest.mark.usefixtures("large_scale")
@pytest.mark.parametrize("fused", [False, True])
def test_fp16_overflows_are_counted_and_noted_with_the_new_scale_and_the_run_goes_on(
    go, here, fused
):
    summary = go(fp16=True, fused_adamw=fused, log_every=6)
    *overflows, last = column(here, "step")
    assert len(overflows) > 1
    norms = column(here, "norm")
    assert [*map(math.isfinite, norms)] == [False] * len(overflows) + [True]
    assert (summary["steps"], summary["skipped_steps"], last) == (6, len(overflows), 6)
    noted = re.findall(
        r"^step (\d+): fp16 overflow, update skipped; loss scale now (\d+)$",
        console(here),
        re.M,
    )
    assert noted == [(f"{step:.0f}", f"{2 ** (22 - step):.0f}") for step in overflows]
    saved = read_json(here / "checkpoints/step_000006/checkpoint.json")
    assert saved["skipped_overflows"] == len(overflows)


@pytest.mark.usefixtures("large_scale")
def test_a_loss_that_is_not_finite_ends_a_run_in_fp16_whatever_overflowed_before(go, monkeypatch):
    real, calls = GPT.forward, itertools.count(1)
    monkeypatch.setattr(
        GPT, "forward", lambda *args: real(*args) + (math.nan if next(calls) == 3 else 0.0)
    )
    with pytest.raises(TrainingError, match=r"step 3: the loss is nan.* or bf16 instead of fp16"):
        go(fp16=True)


def test_bf16_is_noted_with_the_factor_and_what_to_do_where_it_is_slow_alone(go, here, monkeypatch):
    for factor in (12.0, 0.5):
        monkeypatch.setattr(runtime.device, "slowdown", lambda *_, factor=factor: factor)
        go(bf16=True, max_steps=1)
        noted = re.search("note: bf16 is slow.* 12\\.0 times.* --no-bf16", console(here))
        assert bool(noted) == (factor > 1)


def test_what_bf16_costs_is_a_ratio_and_measuring_it_draws_nothing_from_the_random_state():
    before = torch.get_rng_state()
    assert 0 < slowdown(CPU) < math.inf
    assert torch.equal(torch.get_rng_state(), before)


def test_the_tokens_of_a_step_are_of_all_ranks(tiny_config):
    run = setup(tiny_config(batch_size=4), ALONE)
    of_two = dataclasses.replace(run, world=World(CPU, world_size=2))
    assert of_two.tokens_per_step == 2 * run.tokens_per_step == 2 * 4 * 32


def test_a_run_lists_its_optimizations_and_of_the_others_only_the_ladders_ten():
    words = (
        "--vocab_size 50304 --optimizer adamw --warmup_steps 10 --lr_schedule cosine --tf32 --bf16 "
        "--decay_matrices_only --grad_clip 1 --compile --compile_mode max-autotune --flash "
        "--fused_adamw --loss_chunks 8"
    )
    assert parse(Config, words.split()).describe_optimizations(2).removesuffix("; off: none") == (
        "optimizations on: padded vocabulary 50304, warmup_steps 10, lr_schedule cosine, "
        "decay_matrices_only, grad_clip 1.0, tf32, bf16, compile, compile_mode max-autotune, "
        "flash, fused_adamw, loss_chunks 8, several ranks"
    )
    assert load_config(rope=True, optimizer="muon").describe_optimizations(1) == (
        "optimizations on: rope, optimizer muon; off: padded vocabulary, lr_schedule, "
        "decay_matrices_only, grad_clip, tf32, bf16, compile, flash, fused_adamw, several ranks"
    )


# ---- a run


@pytest.mark.parametrize(("optimizer", "groups"), [("adamw", 2), ("muon", 4)])
def test_the_loss_falls_and_the_log_has_every_step_once_with_the_rate_of_its_update(
    optimizer, groups, tiny_config, go
):
    """`groups`: of all optimizers."""
    used = []
    hook = register_optimizer_step_pre_hook(
        lambda one, *_: used.extend(group["lr"] / group["lr_factor"] for group in one.param_groups)
    )
    options = {"scalar_lr": 5e-3, "lr_schedule": "cosine", "warmup_steps": 2}
    config = tiny_config(max_steps=40, lr=1e-2, optimizer=optimizer, **options)
    summary = go(config)
    hook.remove()
    steps = [*range(1, 41)]
    assert column(config, "step") == steps
    rates = [learning_rate(step, config) for step in steps]
    assert column(config, "lr") == pytest.approx(rates)
    assert used == pytest.approx([rate for rate in rates for _ in range(groups)])
    first, *_, last = column(config)
    assert first == pytest.approx(math.log(128), abs=0.3)
    assert last < first - 1.0
    assert summary["final_loss"] == last


def test_a_run_has_files_of_a_fixed_form_and_says_what_runs_before_its_first_step(
    tiny_config, go, here, capsys
):
    options = {"eval_every": 3, "val_fraction": 0.1, "tf32": True, "flash": True}
    config = tiny_config(**options, warmup_steps=50)
    go(config)
    before, _, after = capsys.readouterr().out.partition("step 1/6")
    for line in (
        "device: cpu",
        "loaded 3,600 tokens",
        "and 400 for validation",
        "1 epoch = 28 batches",
        "num decayed parameter tensors: 29, with",
        "num non-decayed parameter tensors: 0, with 0",
        "optimizations on: init gpt2, warmup_steps 50, tf32, flash; off: padded vocabulary, ",
        "note: warmup_steps 50 > max_steps 6",
        "step 0/6 | validation loss",
    ):
        assert line in before, line
    assert " left" in after
    assert "done: 6 steps, 768 tokens" in after
    log = (here / "log.csv").read_text()
    assert log.startswith("step,loss,lr,norm,dt_ms,tokens_per_sec\n")
    assert (here / "eval.csv").read_text().startswith("step,val_loss\n")
    assert load_config(str(here / "config.yaml")) == config
    summary = json.loads((here / "summary.json").read_text())
    names = (
        "steps parameters median_dt_ms median_tokens_per_sec median_leaves_out first_step_s "
        "peak_memory_mb flops_per_token matmul_tflops utilization final_loss torch git started "
        "machine"
    )
    assert {*names.split()} <= summary.keys()
    assert (summary["tokens"], summary["device"]) == (6 * 4 * 32, "cpu")
    assert summary["val_loss"] == column(config, "val_loss", "eval.csv")[-1]


SMALL = TINY_RUN | {
    "n_layer": 1,
    "n_head": 1,
    "n_embd": 16,
    "block_size": 32,
    "batch_size": 1,
    "total_batch_tokens": 64,
    "val_fraction": 0.1,
    "sample_tokens": 2,
    "max_steps": 2,
    "compile": False,
}


@pytest.fixture
def hellaswag(corpus):
    """The file of HellaSwag's items that runs look for, with one."""
    file = corpus / "hellaswag/hellaswag_val.jsonl"
    file.parent.mkdir()
    file.write_text(
        '{"ctx": "A man is on a roof. he", "label": 3, '
        '"endings": ["falls.", "sings.", "eats.", "works."]}'
    )


@pytest.mark.usefixtures("hellaswag")
def test_evaluating_sampling_and_saving_do_not_change_the_losses(go, here):
    plain = WITH_TEXT | {"dropout": 0.1, "max_steps": 3, "batch_size": 1, "val_fraction": 0.02}
    kinds = ("eval", "sample", "checkpoint", "hellaswag")
    busy = {"sample_tokens": 3} | {f"{kind}_every": 1 for kind in kinds}
    go(**plain)
    losses = column(here)
    go(**plain, **busy)
    assert column(here) == losses
    assert len(list(here.glob("checkpoints/step_*"))) == 3


def test_overfitting_one_batch_brings_its_loss_to_nearly_nothing(go, here):
    options = {"overfit_batch": True, "max_steps": 80, "lr": 1e-2, "batch_size": 2}
    assert go(**options, log_every=80)["final_loss"] < 0.1
    assert column(here, "step") == [1, 80]


@pytest.mark.usefixtures("hellaswag")
@pytest.mark.parametrize("stage", [path.stem for path in project_files("configs/*.yaml")])
def test_every_stage_and_recipe_runs_to_its_end_on_a_tiny_model_with_its_own_vocabulary(
    stage, go, corpus, tmp_path, capsys
):
    options = SMALL | {"data_dir": str(corpus), "log_dir": str(tmp_path)}
    if slowdown(CPU) > NOTED_SLOWDOWN:  # bfloat16 would take most of the time
        options["bf16"] = False
    if stage == "finetune":  # another run's weights in place of OpenAI's
        go(load_config("gpt2_124m", **options, run_name="first"))
        options["init_from"] = "first"
    config = load_config(stage, **options)
    summary = go(config)
    first, second = column(config)
    assert first == pytest.approx(math.log(50257), abs=0.5)
    assert second < first + 1  # high rates overshoot on so few tokens
    assert (summary["steps"], summary["tokens"]) == (2, 128)
    assert ("hellaswag_acc_norm" in summary) == bool(config.hellaswag_every)
    assert ("sample after step 2" in capsys.readouterr().out) == bool(config.sample_every)


# ---- timing


def test_dt_is_the_step_alone_without_evaluation_sampling_saving_or_printing(go, here, monkeypatch):
    """The medians, and MFU, leave out at most five steps."""
    times = [9.0] * 5 + [0.1 * n for n in range(1, 16)]
    passed, seconds = [], iter(times)

    def slow(owner, name):
        real = getattr(owner, name)

        def called(*args, **kwargs):
            passed.append(1000)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    at_step(monkeypatch, lambda *_: passed.append(next(seconds)))
    slow(GPT, "eval")  # before an evaluation, and before a sample
    slow(checkpoint.files, "save_file")
    slow(sys.stdout, "write")
    monkeypatch.setattr("time.perf_counter", lambda: sum(passed))
    every = {f"{what}_every": 2 for what in ("eval", "sample", "checkpoint")}
    summary = go(**WITH_TEXT, max_steps=20, val_fraction=0.01, sample_tokens=2, **every)
    assert column(here, "dt_ms") == pytest.approx([1000 * each for each in times], rel=1e-3)
    rates = [128 / each for each in times]  # 4 x 32 tokens a step
    assert column(here, "tokens_per_sec") == pytest.approx(rates, abs=0.05)
    assert (summary["first_step_s"], summary["median_leaves_out"]) == (9.0, 5)
    medians = summary["median_dt_ms"], summary["median_tokens_per_sec"]
    assert medians == pytest.approx((800, 128 / 0.8))
    mfu = summary["flops_per_token"] * 128 / 0.8 / 1e12  # of 1 TFLOP/s
    assert summary["utilization"] == pytest.approx(mfu)


@pytest.mark.parametrize("tflops", [1e-12, None], ids=["too low", "not steady"])
def test_a_summary_stores_no_mfu_and_no_matmul_rate_that_a_step_disproves(
    tflops, go, monkeypatch, capsys
):
    monkeypatch.setattr("run.summary.matmul_tflops", lambda *_, **__: tflops)
    summary = go(max_steps=3)
    assert (summary["utilization"], summary["matmul_tflops"]) == (None, None)
    assert "no MFU, as other programs kept the device too busy" in capsys.readouterr().out


# ---- several processes


ON_FIRST = """if True:
    import pathlib, sys, torch
    from data.token_file import TokenFileError
    from runtime.world import joined_world

    def fail(error):
        raise error

    with joined_world(torch.device("cpu"), timeout=60) as world:
        assert world.broadcast({"of": world.rank}) == {"of": 0}
        assert world.on_rank0(lambda: world.rank) == 0
        n = world.world_size
        assert world.gather(world.rank) == [*range(n)]
        assert world.sum(world.rank + 1.0) == n * (n + 1) / 2
        called = []
        world.on_rank0(lambda: called.append(1))
        assert called == [1] * (world.rank == 0)
        for error in (TokenFileError("a bad file"), OSError(28, "No space left", "x.bin")):
            try:
                world.on_rank0(lambda: fail(error))
            except type(error) as raised:
                assert (str(raised), raised.args) == (str(error), error.args)
            else:
                raise AssertionError("nothing was raised")
        metrics = world.all_reduce_metrics(torch.tensor(1.0 + world.rank), torch.tensor(3.0))
        assert metrics.tolist() == [(n + 1) / 2, 3.0]
        assert (world.any(world.rank == n - 1), world.any(False)) == (True, False)
        world.on_rank0(lambda: fail(TokenFileError("the last")))
"""


def test_what_rank_0_finds_or_raises_every_rank_gets(tmp_path):
    for done in run_ranks(2, "-c", ON_FIRST, cwd=tmp_path, status=1):
        assert done.stderr.splitlines()[-1] == "data.token_file.TokenFileError: the last"


# ---- evaluation


def test_validation_is_the_mean_over_a_fixed_set_each_sequence_once_and_repeatable(
    corpus, tiny_model
):
    _, val = open_corpus(corpus / "tiny", 32, 128, 0.3)
    model = tiny_model(dropout=0.5)
    calls = ((4, None), (4, None), (7, None), (4, 64))
    losses = [validation_loss(model, val, *call, ALONE) for call in calls]
    assert model.training
    model.eval()
    with torch.no_grad():
        one_by_one = [model(*val.read([i])).item() for i in range(len(val))]
    mean = statistics.mean(one_by_one)
    assert losses == pytest.approx([mean, mean, mean, sum(one_by_one[:2]) / 2], rel=1e-5)
    assert losses[0] == losses[1]


# ---- folders, checkpoints, weights from elsewhere


def test_an_earlier_run_is_moved_aside_not_overwritten_unless_the_new_one_cannot_start(
    go, here, capsys
):
    for seed in (1, 2):
        go(seed=seed)
    assert f"note: the earlier {here} is now {here}.1" in capsys.readouterr().out
    with pytest.raises(TokenFileError, match="no such corpus"):
        go(dataset="missing")
    with pytest.raises(CheckpointError, match="no such run"):
        go(init_from="missing.pt")
    seeds = {
        path.name: load_config(str(path / "config.yaml")).seed for path in here.parent.iterdir()
    }
    assert seeds == {"train.1": 1, "train": 2}
    (here / "log.csv").unlink()
    with refused("train: is not the folder of a run"):
        go()


def test_init_from_a_run_goes_on_with_its_weights_in_its_shape_and_refuses_another(tiny_config, go):
    first = tiny_config(tie_weights=True, real_vocab_size=100, run_name="a", max_steps=30, lr=1e-2)
    go(first)
    second = functools.partial(tiny_config, shape={}, init_from="a")
    config = second(run_name="b", max_steps=1)
    go(config)
    assert column(config)[0] < column(first)[0] - 1.0
    written = load_config(f"{first.log_dir}/b/config.yaml")
    assert GPTConfig.of(written) == GPTConfig.of(first)
    # the name may mean another run tomorrow
    assert written.init_from.endswith("/a/checkpoints/step_000030")
    for options, said in (
        ({"vocab_size": 64, "real_vocab_size": None}, "makes 64 tokens, but init_from .* has 100"),
        ({"block_size": 64}, "block_size 64 contradicts init_from a, which has 32; leave "),
        ({"n_layer": 3, "bias": False}, r"n_layer 3 [^\n]*\n.*bias False contradicts"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_model(second(**options))
    # a smaller block_size keeps the first positions
    whole, cropped = (
        build_model(second(seq_len=8, **size))[1].eval() for size in ({}, {"block_size": 8})
    )
    assert (whole.config.block_size, cropped.config.block_size) == (32, 8)
    idx = torch.arange(16).view(2, 8)
    assert torch.equal(whole(idx), cropped(idx))


def test_positions_that_are_never_trained_are_noted_by_the_run_and_by_what_uses_its_weights(
    tiny_config, go, here, tmp_path
):
    for options in ({"seq_len": 32}, {"seq_len": 31, "rope": True}, {"init_from": "gpt2"}):
        assert not tiny_config(**options).weight_notes()
    go(**WITH_TEXT, max_steps=1, val_fraction=0.2, seq_len=31)
    printed = [console(here)]
    for command in ("sample.py --max_new_tokens 1", "evaluate.py", "export.py out"):
        name, *options = command.split()
        done = conftest.run(name, "logs/train", *options, cwd=tmp_path)
        printed.append(done.stdout + done.stderr)
    said = "note: positions 31 to 31 are never trained (seq_len 31 < block_size 32)\n"
    assert [text.count(said) for text in printed] == [1] * 4


def test_console_log_has_what_was_printed_also_of_a_resumed_run(go, here, capsys):
    for more in ({"tf32": True}, {"resume": "auto", "max_steps": 8}):
        go(eval_every=3, val_fraction=0.1, **more)
    printed = capsys.readouterr().out
    assert "note: tf32 has no effect" in printed
    assert "resumes from " in printed
    assert console(here) == printed
