"""The training loop, in process: a step's arithmetic, a run's log and files, and its ends."""

import csv
import functools
import itertools
import json
import math
import re
import statistics
from collections import namedtuple
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import run.evaluation as evaluation_module
import run.save as run_save
import runtime.clock
import runtime.device
import train as train_module
from checkpoint.files import CheckpointError, read_tensors
from checkpoint.saved import read_state
from checkpoint.weights import build_model
from config import WITHOUT_GRAPHS, Config, load_config
from data.token_file import TokenFileError
from dataloader import open_corpus
from evaluate import EvaluateOptions, evaluate
from export import export
from inference.validation import validation_loss
from model import GPT, GPTConfig
from optimizer import learning_rate
from run.log import RunFolder
from run.summary import live_figures, summarize
from runtime.cli import ConfigError, parse
from runtime.device import check_attention, check_compiler, slowdown
from runtime.errors import TrainingError, UserError
from runtime.report import project_files
from runtime.world import World
from sample import SampleOptions, load_sampled_model
from tests.conftest import (
    ALONE,
    COMPILED,
    CPU,
    WITH_TEXT,
    at_step,
    fast_precision,
    folder_of,
    run_ranks,
)
from train import setup, take_step, train, train_step


def run(config, **options):
    return train(config, ALONE, **options)


def rows(config, name="log.csv"):
    with open(folder_of(config) / name, newline="") as file:
        return list(csv.DictReader(file))


def column(config, name="loss", file="log.csv"):
    return [float(row[name]) for row in rows(config, file)]


# loss and norm as logged, the gradient as the optimizer got it, dtypes of weights and gradients
Step = namedtuple("Step", "loss gradient norm dtypes")


@pytest.fixture
def one_step(tiny_config):
    """The first step of a run with these options, as its update saw it."""

    def step(**options):
        taken = setup(tiny_config(init="torch", **options), ALONE)
        (optimizer,), weights = taken.state.optimizers, list(taken.model.parameters())
        gradients = []
        optimizer.register_step_pre_hook(lambda *_: gradients.extend(p.grad for p in weights))
        loss, norm = map(float, train_step(taken, 1)[:2])
        gradient = torch.cat([each.flatten() for each in gradients])
        return Step(loss, gradient, norm, {tensor.dtype for tensor in weights + gradients})

    return step


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
    shape, graphs = {"n_embd": 64, "batch_size": 8}, 0
    if "compile" in speed:
        shape = {**COMPILED, "compile": False}
        graphs = len({"compile", "loss_chunks"} & speed.keys())  # the model, and a part's logits
    plain = one_step(**shape)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fast = one_step(**(shape | speed))
    assert fast.loss == pytest.approx(plain.loss, rel=loss_tolerance)
    assert (fast.gradient - plain.gradient).norm() / plain.gradient.norm() < grad_tolerance
    assert fast.dtypes == {torch.float32}, "weights and gradients"
    if flags[:4] in tolerances:
        assert fast.loss != plain.loss, "autocast did not reach the model"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_clipping_bounds_the_gradient_once_and_the_norm_is_from_before_and_0_is_off(
    one_step, monkeypatch
):
    free = one_step(batch_size=8, grad_clip=0)
    assert free.norm == pytest.approx(free.gradient.norm().item(), rel=1e-5)
    assert free.norm > 0.1
    loud = one_step(batch_size=1, grad_clip=0)
    assert 1 < loud.norm == pytest.approx(loud.gradient.norm().item(), rel=1e-5)
    calls = []
    at_step(monkeypatch, lambda call, _: calls.append(call))
    clipped = one_step(batch_size=2, total_batch_tokens=8 * 32, grad_clip=0.05)
    assert calls == [1]
    assert clipped.norm == pytest.approx(free.norm, rel=1e-5)
    assert clipped.gradient.norm().item() == pytest.approx(0.05, rel=1e-4)
    directions = clipped.gradient / 0.05, free.gradient / free.norm
    torch.testing.assert_close(*directions, rtol=1e-3, atol=1e-5)


def test_fp16_gradients_are_unscaled_before_clipping(one_step):
    step = one_step(fp16=True, grad_clip=0.05, batch_size=8)
    assert step.norm < 100  # 65,536 times that, if the scale were still in it
    assert step.gradient.norm().item() == pytest.approx(0.05, rel=1e-2)


def test_the_seed_decides_the_weights_and_the_order_of_the_data(tiny_config):
    def drawn(seed):
        taken = setup(tiny_config(seed=seed, shuffle=True), ALONE)
        return next(taken.batches)[0], taken.state.model.lm_head.weight

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

    assert precision(tf32=True) == "highest"  # a CPU has none
    has_bf16 = {"amx_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has_bf16)
    assert [precision(matmul_precision="medium"), precision(tf32=True)] == ["medium", "highest"]
    has_bf16.clear()
    assert precision(matmul_precision="medium") == "highest"
    monkeypatch.setattr(train_module, "usable_precision", lambda device, wanted: wanted)
    assert [precision(tf32=True), precision()] == ["high", "highest"]


@pytest.mark.parametrize(
    ("dropout", "blocked", "said"),
    [
        (0.0, False, "flash runs PyTorch's flash_attention kernel"),
        (0.0, True, "flash runs blocked attention"),
        (0.1, True, "flash has no effect"),
    ],
)
def test_flash_says_which_kernel_runs(dropout, blocked, said):
    shape = (2, 2, 512, 16)
    (note,) = check_attention(CPU, torch.bfloat16, shape, dropout=dropout, blocked=blocked)
    assert note.startswith(said)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_on_a_gpu_flash_is_a_fused_kernel_tf32_is_on_and_autocast_takes_an_indexed_device(
    precision, tiny_config
):
    config = tiny_config(flash=True, tf32=True, device="cuda", **{precision: True})
    taken = setup(config, World(torch.device("cuda", 0)))
    assert re.search("(flash|cudnn)_attention kernel", "".join(taken.notes))
    assert torch.get_float32_matmul_precision() == "high"
    assert all(map(math.isfinite, train_step(taken, 1)))


@pytest.mark.parametrize("options", [{"loss_chunks": 2}, {"total_batch_tokens": 256}, {}], ids=str)
@pytest.mark.parametrize("mode", WITHOUT_GRAPHS)
def test_cuda_graphs_are_for_one_rank_one_micro_step_and_one_chunk_of_the_loss(
    mode, options, tiny_config
):
    config = tiny_config(compile=True, compile_mode=mode, **options)
    ranks = 1 if options else 2
    acting = config.on_device("cuda", ranks).compile_mode
    assert acting == WITHOUT_GRAPHS[mode]
    assert f"{mode} runs as {acting}: " in check_compiler(CPU, mode, acting)[-1]
    assert tiny_config(compile_mode=mode).on_device("cuda", 1).compile_mode == mode
    assert config.on_device("cpu", ranks).compile_mode == mode


def test_before_torch_2_12_autotuned_matmuls_do_not_count_beyond_32_bits(monkeypatch):
    config = load_config("gpt2_124m", batch_size=64)  # 2^31.6 logits
    for version, changed in (("2.11.0+cu128", True), ("2.12.0", False)):
        monkeypatch.setattr("config.version", lambda _, version=version: version)
        acting = config.on_device("cuda", 1).compile_mode
        assert (acting == "default") == (acting != config.compile_mode) == changed
    assert config.on_device("cpu", 1).compile_mode == config.compile_mode


def test_a_search_for_kernels_takes_five_minutes_and_cuda_graphs_alone_do_nothing_on_a_cpu():
    (note,) = check_compiler(torch.device("cuda"), "max-autotune")
    assert note.startswith("compiling takes five minutes or more at the first start")
    assert "no effect without CUDA" in check_compiler(CPU, "reduce-overhead")[1]


@pytest.mark.parametrize(("val_fraction", "graphs"), [(0.05, 1), (0.5, 2)])
def test_training_compiles_once_and_validation_once_if_its_whole_batches_are_many_no_other_shape(
    val_fraction, graphs, tiny_config, monkeypatch, capsys
):
    """Validation has one whole batch and a part of one, or 15 of them, for which a graph pays."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    # another vocabulary than GPT-2's shares the other tests' compilation
    monkeypatch.setattr(evaluation_module, "encode", lambda *_: [1, 1, 1])
    config = tiny_config(**COMPILED, max_steps=5, eval_every=1, val_fraction=val_fraction)
    sampled = {"sample_every": 2, "sample_tokens": 2}
    run(config.model_copy(update=sampled))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    printed = capsys.readouterr().out
    assert printed.count("compiling takes a minute") == 1
    assert printed.count("sample after step") == 3
    assert len(rows(config, "eval.csv")) == 6


def test_freed_memory_is_returned_once_after_a_processs_first_step(tiny_config, monkeypatch):
    returned, calls = Mock(), []
    monkeypatch.setattr(train_module, "return_freed_memory", returned)
    taken = setup(tiny_config(), ALONE)
    for _ in range(3):
        take_step(taken)
        calls.append(returned.call_count)
    assert calls == [0, 1, 1]


def test_the_mode_reaches_torch_compile(tiny_config, monkeypatch):
    compiled = Mock()
    monkeypatch.setattr(torch, "compile", compiled)
    taken = setup(tiny_config(compile=True, compile_mode="max-autotune"), ALONE)
    compiled.assert_called_once_with(taken.state.model, mode="max-autotune")
    assert taken.model is compiled.return_value


@pytest.fixture
def large_scale(monkeypatch):
    """A loss scale of fp16 with which the first steps overflow."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**22)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)


@pytest.mark.usefixtures("large_scale")
@pytest.mark.parametrize("fused", [False, True])
def test_fp16_overflows_are_counted_and_noted_with_the_new_scale_and_the_run_goes_on(
    tiny_config, here, fused
):
    config = tiny_config(fp16=True, fused_adamw=fused, log_every=6)
    summary = run(config)
    *overflows, last = column(config, "step")
    norms = column(config, "norm")
    assert [*map(math.isfinite, norms)] == [False] * len(overflows) + [True]
    assert (summary["steps"], summary["skipped_steps"], last) == (6, len(overflows), 6)
    noted = re.findall(
        r"^step (\d+): fp16 overflow, update skipped; loss scale now (\d+)$",
        (here / "console.log").read_text(),
        re.M,
    )
    assert noted == [(f"{step:.0f}", f"{2 ** (22 - step):.0f}") for step in overflows]
    assert read_state(here / "checkpoints/step_000006").skipped_overflows == len(overflows) > 1


@pytest.mark.usefixtures("large_scale")
def test_a_run_whose_last_step_overflows_in_fp16_is_saved_and_not_done(tiny_config, here, capsys):
    config = tiny_config(fp16=True, fused_adamw=True, max_steps=2)
    torch.manual_seed(config.seed)
    first = build_model(config)[1].state_dict()
    with pytest.raises(SystemExit) as ended:
        train_module.main(config)
    assert ended.value.code == 1
    output = capsys.readouterr()
    assert output.err.startswith(
        "error: the update of the last step, 2, was skipped: its gradients overflow"
    )
    assert "done" not in output.out
    saved = here / "checkpoints/step_000002"
    weights = read_tensors(saved / "model.safetensors")
    assert all(torch.equal(weights[name], first[name]) for name in weights)
    assert read_state(saved).skipped_steps == 2


@pytest.mark.usefixtures("large_scale")
def test_a_loss_that_is_not_finite_ends_a_run_in_fp16_whatever_overflowed_before(
    tiny_config, monkeypatch
):
    real, calls = GPT.forward, itertools.count(1)
    monkeypatch.setattr(
        GPT, "forward", lambda *args: real(*args) + (math.nan if next(calls) == 3 else 0.0)
    )
    with pytest.raises(TrainingError, match=r"step 3: the loss is nan.* or bf16 instead of fp16"):
        run(tiny_config(fp16=True))


@pytest.mark.parametrize(("factor", "noted"), [(12.0, 1), (0.5, 0)])
def test_bf16_where_it_is_slow_is_noted_with_the_factor_and_what_to_do(
    factor, noted, tiny_config, monkeypatch
):
    monkeypatch.setattr(runtime.device, "slowdown", lambda *_: factor)
    notes = "\n".join(setup(tiny_config(bf16=True), ALONE).notes)
    assert len(re.findall(r"note: bf16 is slow.* 12\.0 times.* --no-bf16", notes)) == noted


def test_what_bf16_costs_is_a_ratio_and_measuring_it_draws_nothing_from_the_random_state():
    before = torch.get_rng_state()
    assert 0 < slowdown(CPU) < math.inf
    assert torch.equal(torch.get_rng_state(), before)


OFF = (
    "padded vocabulary, lr_schedule, decay_matrices_only, grad_clip, tf32, bf16, compile, flash, "
    "fused_adamw, several ranks"
)


def test_a_run_lists_its_optimizations_and_of_the_others_only_the_ladders_ten():
    words = (
        "--vocab_size 50304 --optimizer adamw --warmup_steps 10 --lr_schedule cosine --tf32 --bf16 "
        "--decay_matrices_only --grad_clip 1 --compile --compile_mode max-autotune --flash "
        "--fused_adamw --loss_chunks 8"
    )
    on, _, off = parse(Config, words.split()).describe_optimizations(2).partition("; off: ")
    assert on == (
        "optimizations on: padded vocabulary 50304, warmup_steps 10, lr_schedule cosine, "
        "decay_matrices_only, grad_clip 1.0, tf32, bf16, compile, compile_mode max-autotune, "
        "flash, fused_adamw, loss_chunks 8, several ranks"
    )
    assert not off
    said = load_config().describe_optimizations(1)
    assert said == f"optimizations on: none; off: {OFF}"
    modern = load_config(rope=True, optimizer="muon").describe_optimizations(1)
    assert modern == f"optimizations on: rope, optimizer muon; off: {OFF}"


# ---- a run


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_falls_and_the_log_has_every_step_once_with_the_rate_of_its_update(
    optimizer, tiny_config
):
    used = []
    hook = register_optimizer_step_pre_hook(
        lambda one, *_: used.extend(group["lr"] / group["lr_factor"] for group in one.param_groups)
    )
    options = {"scalar_lr": 5e-3, "lr_schedule": "cosine", "warmup_steps": 2}
    config = tiny_config(max_steps=40, lr=1e-2, optimizer=optimizer, **options)
    summary = run(config)
    hook.remove()
    assert column(config, "step") == [*range(1, 41)]
    rates = [learning_rate(step, config) for step in range(1, 41)]
    assert column(config, "lr") == pytest.approx(rates)
    groups = {"adamw": 2, "muon": 4}[optimizer]  # of all optimizers
    assert used == pytest.approx([rate for rate in rates for _ in range(groups)])
    first, *_, last = column(config)
    assert first == pytest.approx(math.log(128), abs=0.3)
    assert last < first - 1.0
    assert summary["final_loss"] == last


def test_a_run_has_files_of_a_fixed_form_and_says_what_runs_before_its_first_step(
    tiny_config, here, capsys
):
    options = {"eval_every": 3, "val_fraction": 0.1, "tf32": True, "flash": True}
    config = tiny_config(**options, warmup_steps=50)
    run(config)
    before, _, after = capsys.readouterr().out.partition("step 1/6")
    for line in (
        "device: cpu",
        "loaded 3,600 tokens",
        "and 400 for validation",
        "1 epoch = 28 batches",
        "loss to expect: 4.85 untrained (ln 128), 4.61 from token frequencies alone",
        "num decayed parameter tensors: 29, with",
        "num non-decayed parameter tensors: 0, with 0",
        "optimizations on: init gpt2, warmup_steps 50, tf32, flash; off: padded vocabulary, ",
        "note: warmup_steps 50 > max_steps 6",
        "step 0/6 | validation loss",
    ):
        assert line in before, line
    assert " left" in after
    assert "done: 6 steps, 768 tokens" in after

    for name, header in (
        ("log.csv", "step,loss,lr,norm,dt_ms,tokens_per_sec"),
        ("eval.csv", "step,val_loss"),
    ):
        assert (here / name).read_text().splitlines()[0] == header
    assert column(config, "step", "eval.csv") == [0, 3, 6]
    assert load_config(str(here / "config.yaml")) == config
    assert (here / "checkpoints/step_000006/model.safetensors").is_file()
    summary = json.loads((here / "summary.json").read_text())
    names = (
        "steps parameters median_dt_ms median_tokens_per_sec median_leaves_out first_step_s "
        "peak_memory_mb flops_per_token matmul_tflops final_loss torch git started machine"
    )
    assert {*names.split()} <= summary.keys()
    assert (summary["tokens"], summary["device"]) == (6 * 4 * 32, "cpu")
    assert summary["val_loss"] == column(config, "val_loss", "eval.csv")[-1]
    assert 0 < summary["utilization"] < 1


def test_evaluating_sampling_and_saving_do_not_change_the_losses(tiny_config, here):
    plain = WITH_TEXT | {
        "dropout": 0.1,
        "max_steps": 3,
        "batch_size": 1,
        "val_fraction": 0.02,
        "hellaswag_file": str(here.parent.with_suffix(".jsonl")),
    }
    here.parent.with_suffix(".jsonl").write_text(ITEM)
    kinds = ("eval", "sample", "checkpoint", "hellaswag")
    busy = {"sample_tokens": 3} | {f"{kind}_every": 1 for kind in kinds}
    losses = []
    for options in (plain, plain | busy):
        run(tiny_config(**options))
        losses.append(column(tiny_config()))
    assert losses[0] == losses[1]
    assert len(list(here.glob("checkpoints/step_*"))) == 3


def test_overfitting_one_batch_brings_its_loss_to_nearly_nothing(tiny_config):
    config = tiny_config(overfit_batch=True, max_steps=80, lr=1e-2, batch_size=2, log_every=80)
    assert run(config)["final_loss"] < 0.1
    assert [row["step"] for row in rows(config)] == ["1", "80"]


SMALL = {
    "n_layer": 1,
    "n_head": 1,
    "n_embd": 16,
    "block_size": 16,
    "seq_len": 16,
    "batch_size": 2,
    "total_batch_tokens": 64,
    "dataset": "tiny",
    "val_fraction": 0.1,
    "sample_tokens": 2,
    "max_steps": 2,
    "compile": False,
    "device": "cpu",
}
ITEM = (
    '{"ctx": "A man is on a roof. he", "label": 3, '
    '"endings": ["falls.", "sings.", "eats.", "works."]}'
)


@pytest.mark.parametrize("stage", [path.stem for path in project_files("configs/*.yaml")])
def test_every_stage_and_recipe_runs_to_its_end_on_a_tiny_model_with_its_own_vocabulary(
    stage, corpus, tmp_path, capsys
):
    (corpus / "hellaswag").mkdir()
    (corpus / "hellaswag/hellaswag_val.jsonl").write_text(ITEM)
    options = SMALL | {"data_dir": str(corpus), "log_dir": str(tmp_path)} | fast_precision()
    if stage == "finetune":  # another run's weights in place of OpenAI's
        run(load_config("gpt2_124m", **options, run_name="first"))
        options["init_from"] = "first"
    config = load_config(stage, **options)
    summary = run(config)
    first, second = column(config)
    assert first == pytest.approx(math.log(50257), abs=0.5)
    assert second < first + 1  # high rates overshoot on so few tokens
    assert (summary["steps"], summary["tokens"]) == (2, 128)
    assert ("hellaswag_acc_norm" in summary) == bool(config.hellaswag_every)
    assert ("sample after step 2" in capsys.readouterr().out) == bool(config.sample_every)


# ---- timing


def test_dt_is_the_step_alone_without_evaluation_sampling_or_saving(tiny_config, monkeypatch):
    times = [10.0, 0.5, 0.25, 0.26, 0.27, 0.28]  # medians of all and of the last four differ
    passed, seconds = [], iter(times)

    def slow(real):
        def called(*args, **kwargs):
            passed.append(1000)
            return real(*args, **kwargs)

        return called

    at_step(monkeypatch, lambda *_: passed.append(next(seconds)))
    for place, name in (
        (evaluation_module, "validation_loss"),
        (evaluation_module, "encode"),
        (run_save, "write_checkpoint"),
        (RunFolder, "log"),
    ):
        monkeypatch.setattr(place, name, slow(getattr(place, name)))
    every = {f"{what}_every": 1 for what in ("eval", "sample", "checkpoint")}
    config = tiny_config(**WITH_TEXT, val_fraction=0.01, sample_tokens=2, **every)
    monkeypatch.setattr(runtime.clock, "time", Mock(perf_counter=lambda: sum(passed)))
    summary = run(config)
    assert column(config, "dt_ms") == pytest.approx([1000 * each for each in times], rel=1e-3)
    # 4 x 32 tokens
    assert column(config, "tokens_per_sec") == pytest.approx([128 / x for x in times], rel=1e-3)
    assert (summary["first_step_s"], summary["median_leaves_out"]) == (10.0, 2)
    medians = summary["median_dt_ms"], summary["median_tokens_per_sec"]
    assert medians == pytest.approx((265, 128 / 0.265))


@pytest.mark.parametrize("ranks", [1, 2])
def test_mfu_is_of_one_ranks_tokens_and_medians_leave_out_at_most_five_steps(ranks, tiny_config):
    config, world = tiny_config(seq_len=16), World(CPU, world_size=ranks)
    state = setup(config, ALONE).state
    state.step_seconds = [9.0] * 5 + [0.1 * n for n in range(1, 16)]
    summary = summarize(config, state, world, Mock())
    tokens_per_sec = 4 * 16 / 0.8  # of one rank
    assert summary["median_tokens_per_sec"] == pytest.approx(ranks * tokens_per_sec)
    mfu = state.model.flops_per_token(16) * tokens_per_sec / 1e12  # of 1 TFLOP/s
    live = live_figures(config, state, world)(summary["median_tokens_per_sec"])
    assert (summary["utilization"], live["utilization"]) == pytest.approx((mfu, mfu))


@pytest.mark.parametrize("tflops", [1e-12, None], ids=["too low", "not steady"])
def test_a_summary_stores_no_mfu_and_no_matmul_rate_that_a_step_disproves(
    tflops, tiny_config, here, monkeypatch, capsys
):
    monkeypatch.setattr("run.summary.matmul_tflops", lambda *_, **__: tflops)
    run(tiny_config(max_steps=3))
    summary = json.loads((here / "summary.json").read_text())
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
    assert losses[0] == losses[1]
    assert model.training
    model.eval()
    with torch.no_grad():
        one_by_one = [model(*val.read([i])).item() for i in range(len(val))]
    mean = statistics.mean(one_by_one)
    assert losses[1:] == pytest.approx([mean, mean, sum(one_by_one[:2]) / 2], rel=1e-5)


# ---- folders, checkpoints, weights from elsewhere


def test_an_earlier_run_is_moved_aside_not_overwritten_unless_the_new_one_cannot_start(
    tiny_config, here, capsys
):
    for seed in (1, 2, 3):
        run(tiny_config(seed=seed))
    assert f"note: the earlier {here} is now {here}.2" in capsys.readouterr().out
    with pytest.raises(TokenFileError, match="no such corpus"):
        run(tiny_config(dataset="missing"))
    with pytest.raises(CheckpointError, match="no such run"):
        run(tiny_config(init_from="missing.pt"))
    seeds = {
        path.name: load_config(str(path / "config.yaml")).seed for path in here.parent.iterdir()
    }
    assert seeds == {"train.1": 1, "train.2": 2, "train": 3}
    (here / "log.csv").unlink()
    with pytest.raises(UserError, match="train: is not the folder of a run"):
        run(tiny_config())


def test_init_from_a_run_goes_on_with_its_weights_in_its_shape_and_refuses_another(tiny_config):
    first = tiny_config(tie_weights=True, real_vocab_size=100, run_name="a", max_steps=30, lr=1e-2)
    run(first)
    second = tiny_config(shape={}, run_name="b", max_steps=1, init_from="a")
    run(second)
    assert column(second)[0] < column(first)[0] - 1.0
    written = load_config(f"{first.log_dir}/b/config.yaml")
    assert GPTConfig.of(written) == GPTConfig.of(first)
    # the name may mean another run tomorrow
    assert written.init_from.endswith("/a/checkpoints/step_000030")
    for options, said in (
        ({"vocab_size": 64, "real_vocab_size": None}, "makes 64 tokens, but init_from .* has 100"),
        ({"n_layer": 3}, "n_layer 3 contradicts init_from a, which has 2; leave n_layer out"),
        ({"n_layer": 3, "bias": False}, r"n_layer 3 [^\n]*\n.*bias False contradicts"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_model(tiny_config(shape={}, init_from="a", **options))


def test_a_smaller_block_size_keeps_the_first_positions_of_init_from(tiny_config):
    run(tiny_config(run_name="a", max_steps=1))
    options = {"shape": {}, "init_from": "a", "seq_len": 8}
    whole, cropped = (
        build_model(tiny_config(**options, **size))[1].eval() for size in ({}, {"block_size": 8})
    )
    assert (whole.config.block_size, cropped.config.block_size) == (32, 8)
    idx = torch.arange(16).view(2, 8)
    assert torch.equal(whole(idx), cropped(idx))
    with pytest.raises(ConfigError, match="block_size 64 contradicts init_from a, which has 32"):
        build_model(tiny_config(**options, block_size=64))


def test_positions_that_are_never_trained_are_noted_by_the_run_and_by_what_uses_its_weights(
    tiny_config, tmp_path, capsys
):
    for options in ({"seq_len": 32}, {"seq_len": 31, "rope": True}, {"init_from": "gpt2"}):
        assert not tiny_config(**options).weight_notes()
    config = tiny_config(max_steps=1, val_fraction=0.2, seq_len=31)
    run(config)
    load_sampled_model(SampleOptions(run="train", log_dir=config.log_dir, device="cpu"))
    evaluate(EvaluateOptions(run="train", log_dir=config.log_dir, device="cpu"), ALONE)
    out, err = capsys.readouterr()
    noted = [*(out + err).splitlines(), *export("train", tmp_path / "out", config.log_dir)]
    said = "positions 31 to 31 are never trained (seq_len 31 < block_size 32)"
    assert [line.removeprefix("note: ") for line in noted if "never trained" in line] == [said] * 4


def test_console_log_has_what_was_printed_also_of_a_resumed_run(tiny_config, here, capsys):
    printed, log = [], here / "console.log"
    config = tiny_config(tf32=True, eval_every=3, val_fraction=0.1, checkpoint_every=4)
    for each in (config, tiny_config(resume="auto", max_steps=8), config):
        run(each)
        printed.append(capsys.readouterr().out)
    assert "note: tf32 has no effect" in printed[0]
    assert "resumes from " in printed[1]
    assert log.read_text() == printed[2]  # the last is a new run of that name
    assert Path(f"{here}.1", log.name).read_text() == printed[0] + printed[1]
