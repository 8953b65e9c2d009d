"""The training loop, in process: what a step computes, what a run logs and leaves behind, and what
stops it.
"""

import contextlib
import csv
import importlib.util
import itertools
import json
import math
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import checkpoint.save
import inference.evaluation as evaluation_module
import runtime.device
import train as train_module
from checkpoint.files import CheckpointError
from checkpoint.weights import build_model, load_model
from config import Config, Rung, load_config
from data.token_file import TokenFileError, write_corpus
from dataloader import open_corpus
from inference.sampling import generate
from inference.validation import validation_loss
from measure.summary import mfu
from model import GPT
from runtime.cli import CONFIG_DIR, ConfigError, parse
from runtime.device import (
    attention_kernel,
    bf16_slowdown,
    check_attention,
    check_compiler,
    check_precision,
    matmul_dtype,
    matmul_tflops,
)
from runtime.errors import TrainingError, UserError
from runtime.report import flops_rate
from runtime.runlog import RunFolder
from runtime.world import World
from tests.conftest import ALONE, COMPILED, CPU, at_step, fast_precision, flags, run_ranks
from train import setup, train


def run(config, **options):
    return train(config, ALONE, **options)


def rows(config, name="log.csv"):
    with open(f"{config.log_dir}/{config.run_name}/{name}", newline="") as file:
        return list(csv.DictReader(file))


def column(config, name="loss"):
    return [float(row[name]) for row in rows(config)]


class Step(NamedTuple):
    """What one training step computed."""

    loss: float  # as logged
    gradient: torch.Tensor  # as the optimizer got it, all in one
    norm: float  # as logged
    dtypes: set[torch.dtype]  # of weights and gradients


@pytest.fixture
def one_step(tiny_config):
    """The first step of a run of `train` with these options, as its update saw it."""

    def step(**options):
        taken = []

        def look(optimizer, *_):
            parameters = [
                p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            taken.append(
                (
                    torch.cat([p.grad.flatten().clone() for p in parameters]),
                    {t.dtype for p in parameters for t in (p, p.grad)},
                )
            )

        config = tiny_config(max_steps=1, keep_last=0, run_name="step", init="torch", **options)
        hook = register_optimizer_step_pre_hook(look)
        try:
            run(config)
        finally:
            hook.remove()
        ((gradient, dtypes),) = taken
        return Step(column(config)[0], gradient, column(config, "norm")[0], dtypes)

    return step


def batch(B=8, T=32, seed=0):
    x = torch.randint(0, 128, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return x[:, :-1], x[:, 1:]


# ---- one step


def test_four_micro_steps_of_two_make_the_loss_and_gradient_of_one_of_eight(one_step):
    whole = one_step(batch_size=8)
    parts = one_step(batch_size=2, total_batch_tokens=8 * 32)
    for a, b in zip(whole[:3], parts[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("speed", "loss_tolerance", "grad_tolerance"),
    [
        ({"bf16": True}, 2e-3, 0.03),
        ({"fp16": True}, 5e-4, 0.01),
        ({"flash": True}, 1e-6, 1e-5),
        ({"compile": True}, 1e-6, 1e-5),
        ({"bf16": True, "flash": True, "compile": True, "loss_chunks": 4}, 2e-3, 0.03),
        ({"loss_chunks": 4}, 1e-6, 1e-6),
        ({"bf16": True, "loss_chunks": 4}, 2e-3, 0.03),
        ({"fp16": True, "loss_chunks": 4}, 5e-4, 0.01),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_each_speed_flag_computes_the_same_within_its_precision(
    one_step, speed, loss_tolerance, grad_tolerance
):
    shape = (
        {**COMPILED, "compile": False} if "compile" in speed else {"n_embd": 64, "batch_size": 8}
    )
    graphs = ("compile" in speed) * (
        1 + ("loss_chunks" in speed)
    )  # of the model, and of what is done with a part's logits
    plain = one_step(**shape)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fast = one_step(**(shape | speed))
    assert fast.loss == pytest.approx(plain.loss, rel=loss_tolerance)
    assert (fast.gradient - plain.gradient).norm() / plain.gradient.norm() < grad_tolerance
    if "bf16" in speed or "fp16" in speed:
        assert fast.loss != plain.loss, "autocast did not reach the model"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_weights_and_gradients_stay_fp32_under_autocast(one_step):
    assert one_step(bf16=True).dtypes == {torch.float32}


def test_grad_clip_0_is_off_and_does_not_zero_the_gradients(one_step):
    step = one_step(grad_clip=0.0, batch_size=8)
    assert step.norm == pytest.approx(step.gradient.norm().item(), rel=1e-5)
    assert step.norm > 0.1


def test_clipping_bounds_the_gradient_once_and_the_norm_is_from_before(one_step, monkeypatch):
    free = one_step(batch_size=8)
    calls = []
    at_step(monkeypatch, lambda call, _: calls.append(call))
    clipped = one_step(batch_size=2, total_batch_tokens=8 * 32, grad_clip=0.05)
    assert calls == [1]
    assert clipped.norm == pytest.approx(free.norm, rel=1e-5)
    assert clipped.gradient.norm().item() == pytest.approx(0.05, rel=1e-4)
    torch.testing.assert_close(
        clipped.gradient / 0.05, free.gradient / free.norm, rtol=1e-3, atol=1e-5
    )


def test_fp16_gradients_are_unscaled_before_clipping(one_step):
    step = one_step(fp16=True, grad_clip=0.05, batch_size=8)
    assert step.norm < 100  # 65,536 times that, if the scale were still in it
    assert step.gradient.norm().item() == pytest.approx(0.05, rel=1e-2)


# ---- flags reach what they switch


def test_tf32_on_a_cpu_is_said_to_do_nothing_and_precision_is_set_in_every_run(tiny_config):
    torch.set_float32_matmul_precision("high")
    try:
        assert check_precision(CPU, tf32=True) == [
            "tf32 has no effect on cpu: fp32 matmuls stay fp32"
        ]
        setup(tiny_config(tf32=True), ALONE)
        assert torch.get_float32_matmul_precision() == "highest"
        assert check_precision(CPU) == []
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
def test_tf32_on_a_gpu_sets_the_precision(tiny_config):
    gpu = torch.device("cuda", 0)
    try:
        assert check_precision(gpu, tf32=True) == []
        setup(tiny_config(tf32=True), World(gpu))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_flash_says_which_kernel_runs():
    assert attention_kernel(CPU, torch.float32, (2, 2, 32, 16), dropout=0.0) == "flash_attention"
    assert attention_kernel(CPU, torch.float32, (2, 2, 32, 16), dropout=0.1) == "math"
    for dropout, ours in ((0.0, True), (0.1, False)):
        shape = (2, 2, 512, 16)
        (note,) = check_attention(CPU, torch.bfloat16, shape, dropout=dropout, blocked=True)
        assert ("blocked attention" in note) == ours


@pytest.mark.gpu
@pytest.mark.parametrize("speed", [{"bf16": True}, {"fp16": True}])
def test_flash_on_a_gpu_is_a_fused_kernel_and_autocast_works_on_an_indexed_device(
    speed, tiny_model
):
    cuda = torch.device("cuda", 0)
    kernel = attention_kernel(cuda, matmul_dtype(**speed), (2, 12, 1024, 64), dropout=0.0)
    assert kernel in ("flash_attention", "cudnn_attention")
    x, y = (t.to(cuda) for t in batch())
    with torch.autocast("cuda", matmul_dtype(**speed)):
        assert tiny_model(flash=True).to(cuda)(x, y).isfinite()


@pytest.mark.gpu
def test_a_run_on_a_gpu_has_the_losses_of_the_cpu(tiny_config):
    on_cpu, on_gpu = tiny_config(run_name="cpu"), tiny_config(run_name="gpu", device="cuda")
    run(on_cpu)
    train(on_gpu, World(torch.device("cuda", 0)))
    assert column(on_gpu) == pytest.approx(column(on_cpu), rel=1e-4)


def test_compile_without_a_compiler_is_an_error_that_says_what_to_do(monkeypatch):
    import torch._inductor.cpp_builder as cpp_builder

    def none(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(
        UserError,
        match=r"--compile: no C\+\+ compiler found; install g\+\+ .*or run without --compile",
    ):
        check_compiler(CPU)


def test_cuda_graphs_and_accumulation_are_refused_and_max_autotune_goes_without_them(monkeypatch):
    cuda = torch.device("cuda")  # none is needed to say so
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # Triton
    monkeypatch.setattr(shutil, "which", lambda name: name)
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(
            UserError,
            match=rf"compile_mode {mode} with 2 micro-steps: its CUDA graphs would overwrite the "
            r"accumulated gradients; use default or max-autotune-no-cudagraphs",
        ):
            check_compiler(cuda, mode, 2)
        assert len(check_compiler(cuda, mode, 1)) == 1  # how long it takes
    assert (
        load_config(compile_mode="max-autotune-no-cudagraphs").compile_mode
        == "max-autotune-no-cudagraphs"
    )
    for mode in ("default", "max-autotune-no-cudagraphs"):
        assert len(check_compiler(cuda, mode, 2)) == 1
    assert len(check_compiler(CPU, "max-autotune", 2)) == 1  # no CUDA graphs there
    _, note = check_compiler(CPU, "reduce-overhead", 2)
    assert "no effect without CUDA" in note


def test_training_compiles_once_although_it_evaluates_and_samples_other_shapes(
    tiny_config, monkeypatch
):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    sampled = []

    def sample(
        model, prompt, tokens, **_
    ):  # as sample_text does, with a vocabulary that shares the other tests' compilation
        sampled.append(generate(model, torch.tensor([[1] * len(prompt)]), tokens))
        return "a text"

    monkeypatch.setattr(evaluation_module, "sample_text", sample)
    config = tiny_config(**COMPILED, max_steps=5, eval_every=1, val_fraction=0.05)
    run(config.model_copy(update={"sample_every": 2, "sample_tokens": 2}))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert (Path(config.log_dir) / str(config.run_name) / "console.log").read_text().count(
        "compiling takes a minute"
    ) == 1
    assert [tuple(tokens.shape) for tokens in sampled] == [(1, 5)] * 3
    assert len(rows(config, "eval.csv")) == 6
    assert set(load_model(f"{config.log_dir}/{config.run_name}").state_dict()) == set(
        build_model(config)[1].state_dict()
    )


def test_train_passes_every_flag_on_to_what_it_switches(tiny_config, monkeypatch):
    seen, forward = {}, []

    def spy(place, name):
        real = getattr(place, name)

        def record(*args, **kwargs):
            result = real(*args, **kwargs)
            seen[name] = (args, kwargs, result)
            return result

        monkeypatch.setattr(place, name, record)

    for name in ("setup", "prefetch", "clip_gradients"):
        spy(train_module, name)
    spy(evaluation_module, "validation_loss")
    real_forward = GPT.forward

    def record_forward(model, *args):
        if model.training:
            forward.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return real_forward(model, *args)

    monkeypatch.setattr(GPT, "forward", record_forward)
    monkeypatch.setattr(
        torch, "compile", lambda model, **options: seen.update(compile=options) or model
    )
    run(
        tiny_config(
            fp16=True,
            flash=True,
            fused_adamw=True,
            compile=True,
            compile_mode="max-autotune",
            grad_clip=0.5,
            eval_every=1,
            eval_tokens=64,
            val_fraction=0.1,
            max_steps=1,
            batch_size=2,
            total_batch_tokens=128,
        )
    )
    taken = seen["setup"][2]
    state, autocast = taken.state, taken.autocast
    (loader, *_), (model, grad_clip) = seen["prefetch"][0], seen["clip_gradients"][0]
    (adamw,) = state.optimizers
    assert model is state.model
    assert model.config.flash is True
    assert all(block.attn.config.flash for block in model.transformer.h)
    assert loader.accumulation == 2
    assert adamw.defaults["fused"] is True
    assert state.scaler.is_enabled()
    assert grad_clip == 0.5
    assert seen["compile"] == {"mode": "max-autotune"}
    with autocast():
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_enabled("cpu")
    assert forward == [(True, torch.float16)] * 2
    assert seen["validation_loss"][0][3] == 64
    assert seen["validation_loss"][0][5] is autocast


def test_an_fp16_overflow_skips_the_step_and_the_run_goes_on(tiny_config, monkeypatch):
    real, calls, weights = torch.amp.GradScaler.scale, iter(range(1, 100)), []

    def overflowing(scaler, loss):
        if next(calls) == 2:
            scaler.update(2.0**120)  # far more than fp16 holds: the gradients overflow
        return real(scaler, loss)

    monkeypatch.setattr(torch.amp.GradScaler, "scale", overflowing)
    at_step(
        monkeypatch, lambda _, model: weights.append(model.lm_head.weight.detach().clone())
    )  # before the step's update
    config = tiny_config(fp16=True)
    assert run(config)["steps"] == 6
    assert not math.isfinite(column(config, "norm")[1])
    assert all(math.isfinite(loss) for loss in column(config))
    assert [torch.equal(a, b) for a, b in itertools.pairwise(weights)][:2] == [False, True]


def test_bf16_where_it_is_slow_is_noted_with_the_factor_and_what_to_do(
    tiny_config, monkeypatch, capsys
):
    monkeypatch.setattr(runtime.device, "bf16_slowdown", lambda device: 12.0)
    run(tiny_config(bf16=True, max_steps=1))
    (note,) = (line for line in capsys.readouterr().out.splitlines() if "bf16 is slow" in line)
    assert note.startswith("note: ")
    assert "12.0 times" in note
    assert "--no-bf16" in note
    monkeypatch.setattr(runtime.device, "bf16_slowdown", lambda device: 0.5)
    run(tiny_config(bf16=True, max_steps=1))
    assert "bf16 is slow" not in capsys.readouterr().out


def test_what_bf16_costs_is_a_ratio_and_measuring_it_draws_nothing_from_the_random_state():
    before = torch.get_rng_state()
    assert 0 < bf16_slowdown(CPU) < math.inf
    assert torch.equal(torch.get_rng_state(), before)


def test_every_optimization_of_the_ladder_is_said_to_be_on_or_off(tiny_config, capsys):
    labels = [Config.marks(name, Rung)[0].label or name for name in Config.names_marked(Rung)]
    off = f"off: {', '.join(labels)}, several ranks"
    assert load_config().describe_optimizations(1) == f"optimizations on: none; {off}"
    on = {
        "tf32": True,
        "bf16": True,
        "compile": True,
        "compile_mode": "max-autotune-no-cudagraphs",
        "flash": True,
        "vocab_size": 50304,
        "fused_adamw": True,
        "optimizer": "adamw",
        "loss_chunks": 8,
        "grad_clip": 1.0,
        "lr_schedule": "cosine",
        "warmup_steps": 10,
        "decay_matrices_only": True,
    }
    said = load_config(**on).describe_optimizations(2).removeprefix("optimizations on: ")
    said_on, said_off = (part.split(", ") for part in said.split("; off: "))
    for line in (
        *("tf32", "bf16", "compile", "compile_mode max-autotune-no-cudagraphs", "flash"),
        *("padded vocabulary 50304", "fused_adamw", "loss_chunks 8", "grad_clip 1.0"),
        *("lr_schedule cosine", "warmup_steps 10", "decay_matrices_only", "2 ranks"),
    ):
        assert line in said_on
    assert {"fp16", "fsdp", "recompute", "optimizer", "init", "shuffle"} <= {*said_off}
    run(tiny_config(flash=True, grad_clip=0.5, max_steps=1))
    assert "optimizations on: init gpt2, grad_clip 0.5, flash; off: " in capsys.readouterr().out


# ---- a run


def test_the_loss_falls_and_the_log_has_every_step_once(tiny_config):
    config = tiny_config(max_steps=40, lr=1e-2)
    summary = run(config)
    assert [int(row["step"]) for row in rows(config)] == list(range(1, 41))
    losses = column(config)
    assert losses[0] == pytest.approx(math.log(128), abs=0.3)
    assert losses[-1] < losses[0] - 1.0
    assert summary["final_loss"] == losses[-1]


def test_the_files_of_a_run_have_their_fixed_form(tiny_config):
    config = tiny_config(eval_every=3, val_fraction=0.2)
    run(config)
    folder = Path(config.log_dir) / "train"
    assert (folder / "log.csv").read_text().splitlines()[
        0
    ] == "step,loss,lr,norm,dt_ms,tokens_per_sec"
    assert (folder / "eval.csv").read_text().splitlines()[0] == "step,val_loss"
    assert [row["step"] for row in rows(config, "eval.csv")] == ["0", "3", "6"]
    assert load_config(str(folder / "config.yaml")) == config
    assert (folder / "checkpoints" / "step_000006" / "model.safetensors").is_file()
    summary = json.loads((folder / "summary.json").read_text())
    assert {
        "steps",
        "tokens",
        "parameters",
        "median_dt_ms",
        "median_tokens_per_sec",
        "first_step_s",
        "peak_memory_mb",
        "flops_per_token",
        "matmul_tflops",
        "utilization",
        "final_loss",
        "val_loss",
        "device",
        "torch",
        "git",
        "started",
        "median_leaves_out",
    } <= set(summary)
    assert summary["tokens"] == 6 * 4 * 32
    assert summary["device"] == "cpu"
    assert summary["val_loss"] == float(rows(config, "eval.csv")[-1]["val_loss"])
    assert 0 < summary["utilization"] < 1


def test_the_console_says_what_runs_before_the_first_step(tiny_config, capsys):
    run(tiny_config(eval_every=6, val_fraction=0.1, tf32=True, flash=True, warmup_steps=50))
    text = capsys.readouterr().out
    before, _, after = text.partition("step 1/6")
    for line in (
        "device: cpu",
        "loaded 3,600 tokens",
        "and 400 for validation",
        "1 epoch = 28 batches",
        "parameters",
        "num decayed parameter tensors: 29, with",
        "num non-decayed parameter tensors: 0, with 0",
        "optimizations on: init gpt2, warmup_steps 50, tf32, flash; off",
        "note: tf32 has no effect on cpu",
        "note: flash runs PyTorch's flash_attention",
        "note: warmup_steps 50 > max_steps 6",
        "step 0/6 | validation loss",
    ):
        assert line in before, line
    assert " left" in after
    assert "done: 6 steps, 768 tokens" in after


def test_a_run_is_repeatable_and_the_seed_matters(tiny_config):
    configs = [
        tiny_config(run_name=name, seed=seed, dropout=0.1, shuffle=True)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    for config in configs:
        run(config)
    assert column(configs[0]) == column(configs[1])
    assert column(configs[0]) != column(configs[2])


def test_evaluating_sampling_and_saving_do_not_change_the_losses(tiny_config):
    plain = tiny_config(
        run_name="plain", vocab_size=50257, dropout=0.1, max_steps=3, val_fraction=0.1, n_layer=1
    )
    busy = tiny_config(
        run_name="busy",
        vocab_size=50257,
        dropout=0.1,
        max_steps=3,
        val_fraction=0.1,
        n_layer=1,
        eval_every=1,
        sample_every=1,
        sample_tokens=3,
        checkpoint_every=1,
    )
    run(plain)
    run(busy)
    assert column(plain) == column(busy)
    assert len(list((Path(busy.log_dir) / "busy" / "checkpoints").glob("step_*"))) == 3


def test_accumulation_makes_the_same_run_as_a_large_batch_and_logs_the_whole_steps_loss(
    tiny_config,
):
    whole = tiny_config(run_name="whole", batch_size=8)
    parts = tiny_config(run_name="parts", batch_size=2, total_batch_tokens=8 * 32)
    run(whole)
    run(parts)
    assert column(parts) == pytest.approx(column(whole), rel=1e-5)
    assert column(parts, "norm") == pytest.approx(column(whole, "norm"), rel=1e-4)


def test_overfitting_one_batch_brings_its_loss_to_nearly_nothing(tiny_config):
    config = tiny_config(overfit_batch=True, max_steps=80, lr=1e-2, batch_size=2, log_every=80)
    assert run(config)["final_loss"] < 0.1
    assert [row["step"] for row in rows(config)] == ["1", "80"]


def test_muon_trains(tiny_config):
    config = tiny_config(optimizer="muon", max_steps=40, lr=1e-2)
    assert run(config)["final_loss"] < column(config)[0] - 1.0


RECIPES = ("gpt2_124m", "gpt2_350m", "gpt2_774m", "gpt2_1558m", "finetune")


@pytest.mark.parametrize(
    "stage", [path.stem for path in sorted(CONFIG_DIR.glob("*.yaml")) if path.stem not in RECIPES]
)
def test_every_stage_takes_steps_on_a_tiny_model_with_its_own_vocabulary(stage, corpus, tmp_path):
    config = load_config(
        stage,
        n_layer=1,
        n_head=1,
        n_embd=16,
        block_size=32,
        seq_len=32,
        batch_size=2,
        total_batch_tokens=128,
        dataset="tiny",
        data_dir=str(corpus),
        log_dir=str(tmp_path),
        max_steps=2,
        eval_every=0,
        sample_every=0,
        compile=False,
        device="cpu",
        **fast_precision(),
    )
    run(config)
    assert column(config) == pytest.approx([math.log(50257)] * 2, abs=0.5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_to_its_end_on_a_corpus_of_ones_own(recipe, tmp_path, capsys):
    write_corpus(tmp_path / "data/mine", [[token * 7 % 50257 for token in range(4000)]])
    (tmp_path / "data/hellaswag").mkdir()
    (tmp_path / "data/hellaswag/hellaswag_val.jsonl").write_text(
        json.dumps(
            {
                "activity_label": "Roofing",
                "ctx_a": "A man is on a roof.",
                "ctx_b": "he",
                "label": 3,
                "endings": ["falls.", "sings.", "eats.", "works."],
            }
        )
    )
    small = (
        "--n_layer 2 --n_head 2 --n_embd 64 --block_size 64 --seq_len 64 --batch_size 2 "
        "--total_batch_tokens 512 --max_steps 4"
    )
    words = [
        f"--config={recipe}",
        *small.split(),
        "--dataset=mine",
        "--val_fraction=0.1",
        "--sample_tokens=2",
        "--no-compile",
        "--device=cpu",
        *(["--no-bf16"] if fast_precision() else []),
        f"--data_dir={tmp_path / 'data'}",
        f"--log_dir={tmp_path / 'logs'}",
    ]
    if recipe == "finetune":  # another run's weights stand for OpenAI's
        run(
            parse(
                Config,
                ["--config=gpt2_124m", "--run_name=first", "--keep_last=1", *words[1:]],
                config_file=True,
            )
        )
        words.append("--init_from=first")
    capsys.readouterr()
    config = parse(Config, words, config_file=True)
    summary = run(config)
    assert (config.run_name, summary["steps"], summary["tokens"]) == (recipe, 4, 4 * 512)
    assert summary["val_loss"] < 11
    assert ("hellaswag_acc_norm" in summary) == (recipe != "finetune")
    printed = capsys.readouterr().out
    assert "flash" in printed.partition("optimizations on: ")[2].partition("; off")[0]
    assert "sample after step 4" in printed
    assert (Path(config.log_dir) / recipe / "checkpoints/step_000004").is_dir()


# ---- timing


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_dt_is_the_step_alone_without_evaluation_sampling_or_saving(tiny_config, monkeypatch):
    clock = Clock()
    seconds = iter([10.0, 0.5, 0.25, 0.25, 0.25, 0.25])

    def takes(duration, place, name):
        real = getattr(place, name)

        def timed(*args, **kwargs):
            clock.now += next(duration) if not isinstance(duration, float) else duration
            return real(*args, **kwargs)

        monkeypatch.setattr(place, name, timed)

    takes(seconds, train_module, "clip_gradients")
    for place, name in (
        (evaluation_module, "validation_loss"),
        (evaluation_module, "sample_text"),
        (checkpoint.save, "save_checkpoint"),
        (checkpoint.save, "_keep_best"),
        (RunFolder, "log"),
    ):
        takes(1000.0, place, name)
    config = tiny_config(
        vocab_size=50257,
        n_layer=1,
        eval_every=1,
        val_fraction=0.05,
        sample_every=1,
        sample_tokens=2,
        checkpoint_every=1,
    )
    summary = run(config, clock=clock)
    assert column(config, "dt_ms") == [10_000, 500, 250, 250, 250, 250]
    assert column(config, "tokens_per_sec") == [12.8, 256, 512, 512, 512, 512]  # 4 x 32 tokens
    assert summary["first_step_s"] == 10.0
    assert summary["median_leaves_out"] == 2
    assert summary["median_dt_ms"] == 250
    assert summary["median_tokens_per_sec"] == 512


@pytest.fixture
def products(monkeypatch):
    """Makes a matrix product of each size take a given time on a clock of its own; the sizes that
    were taken.
    """

    def arm(seconds):
        clock, sizes = Clock(), []

        def product(a, b):
            sizes.append(len(a))
            clock.now += seconds(len(a))

        monkeypatch.setattr(torch, "mm", product)
        monkeypatch.setattr(runtime.device.time, "perf_counter", clock)
        return sizes

    return arm


def test_the_matmul_rate_is_a_rate():
    assert 1e-4 < matmul_tflops(CPU, torch.float32, seconds=0.01) < 100


def test_the_matmul_rate_of_a_slow_precision_takes_small_products(products):
    sizes = products(lambda n: 0.02 * (n / 128) ** 3)
    rate = matmul_tflops(CPU, torch.float16, seconds=0.01)
    assert set(sizes) == {128, 256}
    assert rate == pytest.approx(2 * 256**3 / 0.16 / 1e12)


def test_the_matmul_rate_is_the_best_of_all_sizes(products):
    sizes = products(lambda n: 2 * n**3 / (9e12 if n == 512 else 3e12))
    assert matmul_tflops(CPU, torch.float32) == pytest.approx(9.0)
    assert set(sizes) == {128, 256, 512, 1024, 2048}


def test_mfu_is_never_above_1_however_fast_a_step_was():
    assert mfu(10**9, 1e12, 2.0, ALONE) == 1.0
    assert mfu(10**6, 1e6, 2.0, ALONE) == pytest.approx(0.5)
    assert mfu(10**6, 1e6, 2.0, World(CPU, world_size=2)) == pytest.approx(0.25)


def test_a_rate_is_shown_in_gflops_where_teraflops_would_show_nothing():
    assert [flops_rate(tflops) for tflops in (1234.5, 1.0, 0.0474, 0.00012)] == [
        "1,234.50 TFLOP/s",
        "1.00 TFLOP/s",
        "47.4 GFLOP/s",
        "0.12 GFLOP/s",
    ]


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
        assert world.gather(world.rank) == [0, 1]
        assert world.sum(world.rank + 1.0) == 3.0
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
        assert metrics == (1.5, 3.0)
        assert (world.any(world.rank == 1), world.any(False)) == (True, False)
        world.on_rank0(lambda: fail(TokenFileError("the last")))
"""


def test_what_rank_0_finds_or_raises_every_rank_gets(tmp_path):
    for done in run_ranks(2, "-c", ON_FIRST, cwd=tmp_path):
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == "data.token_file.TokenFileError: the last"


def test_two_processes_with_the_loss_in_parts_make_the_run_of_one_with_the_whole_loss(
    tiny_config, tmp_path
):
    options = {
        "real_vocab_size": 100,
        "tie_weights": True,
        "max_steps": 3,
        "val_fraction": 0.1,
        "eval_every": 2,
    }
    run(tiny_config(**options, run_name="one"))
    two = tiny_config(
        **options, run_name="two", batch_size=1, total_batch_tokens=4 * 32, loss_chunks=3
    )
    for done in run_ranks(2, "train.py", *flags(two), cwd=tmp_path):
        assert done.returncode == 0, done.stderr
    for name, file in (("loss", "log.csv"), ("norm", "log.csv"), ("val_loss", "eval.csv")):
        one_run, two_runs = (
            [float(row[name]) for row in rows(tiny_config(run_name=run), file)]
            for run in ("one", "two")
        )
        assert two_runs == pytest.approx(one_run, rel=1e-5)


FAILS = """if True:
    import threading, torch
    from runtime.errors import UserError, reported
    from runtime.world import joined_world

    with reported("here"), joined_world(torch.device("cpu"), timeout=60) as world:
        if world.rank == 0:
            # as PyTorch's threads that wait for another rank
            threading.Thread(target=threading.Event().wait).start()
            raise UserError("rank 0 alone")
"""


def test_a_process_that_fails_ends_even_if_threads_still_wait_for_another(tmp_path):
    failed, other = run_ranks(2, "-c", FAILS, cwd=tmp_path)
    assert (failed.returncode, failed.stderr) == (2, "error: rank 0 alone\n")
    assert (other.returncode, other.stderr) == (0, "")


def test_one_process_alone_needs_no_others():
    assert ALONE.broadcast(3) == ALONE.on_rank0(lambda: 3) == 3
    assert ALONE.gather(3) == [3]
    assert ALONE.sum(3.0) == 3.0
    assert ALONE.all_reduce_metrics(torch.tensor(1.0), torch.tensor(2.0)) == (1.0, 2.0)
    assert (ALONE.any(True), ALONE.any(False)) == (True, False)
    with pytest.raises(TokenFileError, match="a bad file"):
        ALONE.on_rank0(lambda: (_ for _ in ()).throw(TokenFileError("a bad file")))


# ---- evaluation


def test_validation_is_the_mean_over_a_fixed_set_each_sequence_once_and_repeatable(
    tiny_config, tiny_model
):
    config = tiny_config(val_fraction=0.3)
    _, val = open_corpus(Path(config.data_dir) / "tiny", 32, 128, 0.3)
    model = tiny_model(dropout=0.5)
    losses = [validation_loss(model, val, batch_size, None, ALONE) for batch_size in (4, 4, 7)]
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert model.training
    model.eval()
    with torch.no_grad():
        one_by_one = [model(*val.read([i])).item() for i in range(len(val))]
    assert losses[0] == pytest.approx(sum(one_by_one) / len(val), rel=1e-5)
    assert validation_loss(model, val, 4, 64, ALONE) == pytest.approx(
        sum(one_by_one[:2]) / 2, rel=1e-5
    )


def test_evaluation_runs_under_the_same_autocast(tiny_config, tiny_model):
    config = tiny_config()
    _, val = open_corpus(Path(config.data_dir) / "tiny", 32, 128, 0.3)
    plain, bf16 = (
        validation_loss(tiny_model(), val, 4, None, ALONE, autocast)
        for autocast in (contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16))
    )
    assert plain != bf16
    assert plain == pytest.approx(bf16, rel=1e-2)


def test_evaluating_without_a_validation_split_is_an_error_that_says_what_to_set(tiny_config):
    with pytest.raises(UserError, match=r"nothing to validate on.*raise val_fraction"):
        run(tiny_config(eval_every=1))


# ---- folders, checkpoints, weights from elsewhere


def test_an_earlier_run_is_moved_aside_not_overwritten(tiny_config, capsys):
    for seed in (1, 2, 3):
        run(tiny_config(seed=seed))
    logs = Path(tiny_config().log_dir)
    assert sorted(path.name for path in logs.iterdir()) == ["train", "train.1", "train.2"]
    seeds = [
        load_config(str(logs / name / "config.yaml")).seed
        for name in ("train.1", "train.2", "train")
    ]
    assert seeds == [1, 2, 3]
    assert (
        f"note: the earlier {logs / 'train'} is now {logs / 'train.2'}" in capsys.readouterr().out
    )


def test_a_run_that_cannot_start_leaves_the_earlier_one_in_place(tiny_config):
    run(tiny_config())
    with pytest.raises(TokenFileError, match="no such corpus"):
        run(tiny_config(dataset="missing"))
    with pytest.raises(CheckpointError, match="no such run"):
        run(tiny_config(init_from="missing"))
    assert [path.name for path in Path(tiny_config().log_dir).iterdir()] == ["train"]


def test_init_from_a_run_goes_on_with_its_weights_and_takes_over_its_shape(tiny_config, tmp_path):
    first = tiny_config(run_name="first", tie_weights=True, max_steps=30, lr=1e-2)
    run(first)
    second = load_config(
        dataset="tiny",
        data_dir=first.data_dir,
        log_dir=first.log_dir,
        seq_len=32,
        max_steps=1,
        run_name="second",
        device="cpu",
        init_from="first",
    )
    run(second)
    assert column(second)[0] < column(first)[0] - 1.0
    written = load_config(f"{first.log_dir}/second/config.yaml")
    assert (written.n_layer, written.n_embd, written.vocab_size, written.tie_weights) == (
        2,
        32,
        128,
        True,
    )


def test_init_from_keeps_padding_rows_padding_and_refuses_another_vocabulary(tiny_config):
    run(tiny_config(run_name="first", real_vocab_size=100, max_steps=1))
    options = {
        name: value
        for name, value in tiny_config().model_dump(exclude_unset=True).items()
        if name != "vocab_size"
    }
    config, model = build_model(load_config(**(options | {"init_from": "first"})))
    assert (config.vocab_size, config.real_vocab_size, model.config.n_vocab) == (128, 100, 100)
    assert config.init_from.endswith("first/checkpoints/step_000001"), (
        "the name may mean another run tomorrow"
    )
    with pytest.raises(ConfigError, match=r"makes 64 tokens, but init_from .* has 100"):
        build_model(
            load_config(
                **(options | {"init_from": "first", "vocab_size": 64, "real_vocab_size": None})
            )
        )


def test_a_run_that_starts_from_the_run_it_moves_aside_can_be_repeated(tiny_config):
    run(tiny_config(max_steps=1))
    run(tiny_config(max_steps=2, init_from="train"))
    first = column(tiny_config())
    run(load_config(f"{tiny_config().log_dir}/train/config.yaml"))
    assert column(tiny_config()) == first


def test_gpt2_means_openais_weights_even_if_a_run_has_that_name(tiny_config, monkeypatch):
    run(tiny_config(run_name="gpt2", max_steps=1))

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(CheckpointError, match="gpt2 could not be downloaded from Hugging Face"):
        build_model(tiny_config(init_from="gpt2"))


def test_two_runs_of_one_name_at_once_do_not_touch_each_other(tiny_config):
    config = tiny_config(run_name="busy")
    folder = Path(config.log_dir) / "busy"
    other = RunFolder(folder)
    other.create()
    with pytest.raises(
        UserError,
        match=r"busy: another process is writing this run; wait for it or choose another",
    ):
        run(config)
    other.close()
    run(config)
    assert len(rows(config)) == 6


def test_options_that_contradict_init_from_are_errors_that_name_both_values(tiny_config):
    run(tiny_config(run_name="first"))
    with pytest.raises(
        ConfigError, match=r"n_layer 3 contradicts init_from first, which has 2; leave n_layer out"
    ) as caught:
        build_model(tiny_config(init_from="first", n_layer=3, tie_weights=True))
    assert "tie_weights True contradicts" in str(caught.value)


# ---- stopping


def test_a_non_finite_loss_stops_the_run_naming_step_loss_norm_and_lr(tiny_config, monkeypatch):
    real, calls = GPT.forward, iter([0.0, 0.0, math.nan])
    monkeypatch.setattr(
        GPT, "forward", lambda *args: real(*args) + next(calls)
    )  # of a constant: the gradient stays as it is
    config = tiny_config()
    with pytest.raises(
        TrainingError,
        match=r"step 3: the loss is nan, the gradient norm [\d.]+, the learning rate 0.0003;",
    ):
        run(config)
    assert len(rows(config)) == 2
    assert not (Path(config.log_dir) / "train" / "checkpoints").exists()


def test_a_diverging_run_stops_by_itself(tiny_config):
    with pytest.raises(TrainingError, match="Try a lower lr"):
        run(tiny_config(lr=1e30, max_steps=20))


def test_ctrl_c_finishes_the_step_and_keeps_log_checkpoint_and_summary(
    tiny_config, monkeypatch, capfd
):
    at_step(monkeypatch, lambda call, _: signal.raise_signal(signal.SIGINT) if call == 3 else None)
    before = signal.getsignal(signal.SIGINT)
    config = tiny_config(max_steps=50)
    summary = run(config)
    assert summary["interrupted"] is True
    assert summary["steps"] == 3
    assert len(rows(config)) == 3
    assert load_model("train", config.log_dir).config.n_layer == 2
    assert "stopping after this step" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


# ---- console.log


def console(config):
    return Path(config.log_dir, config.run_name, "console.log").read_text()


def test_console_log_has_what_was_printed_also_of_a_resumed_run(tiny_config, capsys):
    config = tiny_config(tf32=True, eval_every=3, val_fraction=0.1, checkpoint_every=4)
    run(config)
    first = capsys.readouterr().out
    assert "note: tf32 has no effect" in first
    assert console(config) == first
    run(tiny_config(resume="auto", max_steps=8))
    second = capsys.readouterr().out
    assert "resumes from " in second
    assert console(config) == first + second
    run(config)  # a new one of that name
    assert console(config) == capsys.readouterr().out
    assert Path(config.log_dir, "train.1", "console.log").read_text() == first + second


@pytest.mark.parametrize(
    ("error", "printed", "kept"),
    [
        (TrainingError("too steep"), "error: too steep\n", None),
        (UserError("one\ntwo"), "error: one\nerror: two\n", None),
        (
            OSError(28, "cannot be written: No space left on device", "logs/x"),
            "error: logs/x: cannot be written: No space",
            None,
        ),
        (KeyboardInterrupt(), "error: interrupted\n", "error: KeyboardInterrupt\n"),
        (MemoryError(), "error: out of memory at batch_size 4, seq_len 32.", None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_console_log_has_the_error_of_a_failed_run_as_it_was_printed(
    error, printed, kept, tiny_config, monkeypatch, capsys
):
    def fail(call, _):
        if call == 3:
            raise error

    at_step(monkeypatch, fail)
    config = tiny_config()
    with pytest.raises(SystemExit):
        train_module.main(config)
    out, err = capsys.readouterr()
    assert "step 2/6" in out
    assert err.startswith(printed)
    assert console(config) == out + (kept or err)
