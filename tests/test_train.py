"""The training loop, in process: what a step computes, what a run logs and leaves behind, and what stops it."""

import csv
import json
import math
import signal
import time

import pytest
import torch

import train as train_module
from checkpoint import CheckpointError, load_model
from config import CONFIG_DIR, ConfigError, UserError, load_config
from dataloader import open_corpus
from device import attention_kernel, autocast_for, check_compiler, matmul_tflops, set_precision
from evaluate import validation_loss
from runlog import start_run_folder
from train import Process, TrainingError, build_model, compute_gradients, train, update_weights

CPU = torch.device("cpu")


def run(config, **options):
    return train(config, Process(CPU), **options)


def rows(config, name="log.csv"):
    with open(f"{config.log_dir}/{config.run_name}/{name}", newline="") as file:
        return list(csv.DictReader(file))


def column(config, name="loss"):
    return [float(row[name]) for row in rows(config)]


class Recorder(torch.optim.SGD):
    """Keeps the gradients of its last step and changes nothing."""

    def __init__(self, params):
        super().__init__(list(params), lr=0.0)

    def step(self):
        self.grads = [p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None]


def gradients(model, batches, *, grad_clip=0.0, **speed):
    """Loss, gradients and norm of one training step."""
    recorder = Recorder(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=speed.get("fp16", False))
    autocast = autocast_for(load_config(**speed), CPU)
    loss, norm = compute_gradients(model, iter(batches), len(batches), [recorder], scaler, grad_clip, autocast)
    update_weights([recorder], scaler)
    model.zero_grad(set_to_none=True)
    return loss, torch.cat([g.flatten() for g in recorder.grads]), norm


def batch(B=8, T=32, seed=0):
    x = torch.randint(0, 128, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return x[:, :-1], x[:, 1:]


# ---- one step


def test_four_micro_steps_of_two_make_the_loss_and_gradient_of_one_of_eight(tiny_model):
    x, y = batch()
    whole = gradients(tiny_model(), [(x, y)])
    parts = gradients(tiny_model(), list(zip(x.split(2), y.split(2), strict=True)))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("speed", "loss_tolerance", "grad_tolerance"), [
    ({"bf16": True}, 2e-3, 0.03), ({"fp16": True}, 5e-4, 0.01), ({"flash": True}, 1e-6, 1e-5),
    ({"compile": True}, 1e-6, 1e-5), ({"bf16": True, "flash": True, "compile": True}, 2e-3, 0.03),
], ids=lambda value: "+".join(value) if isinstance(value, dict) else "")
def test_each_speed_flag_computes_the_same_within_its_precision(tiny_model, speed, loss_tolerance, grad_tolerance):
    plain_loss, plain, _ = gradients(tiny_model(n_embd=64), [batch()])
    model = tiny_model(n_embd=64, flash=speed.get("flash", False))
    loss, grad, _ = gradients(torch.compile(model) if "compile" in speed else model, [batch()], **speed)
    assert loss.item() == pytest.approx(plain_loss.item(), rel=loss_tolerance)
    assert (grad - plain).norm() / plain.norm() < grad_tolerance
    if "bf16" in speed or "fp16" in speed:
        assert loss.item() != plain_loss.item(), "autocast did not reach the model"


def test_weights_and_gradients_stay_fp32_under_autocast(tiny_model):
    model = tiny_model()
    _, grad, _ = gradients(model, [batch()], bf16=True)
    assert {p.dtype for p in model.parameters()} == {grad.dtype} == {torch.float32}


def test_grad_clip_0_is_off_and_does_not_zero_the_gradients(tiny_model):
    _, grad, norm = gradients(tiny_model(), [batch()], grad_clip=0.0)
    assert norm.item() == pytest.approx(grad.norm().item(), rel=1e-5)
    assert norm.item() > 0.1


def test_clipping_bounds_the_gradient_once_and_the_norm_is_from_before(tiny_model):
    x, y = batch()
    _, free, norm = gradients(tiny_model(), [(x, y)])
    _, clipped, logged = gradients(tiny_model(), list(zip(x.split(2), y.split(2), strict=True)), grad_clip=0.05)
    assert logged.item() == pytest.approx(norm.item(), rel=1e-5)
    assert clipped.norm().item() == pytest.approx(0.05, rel=1e-4)
    torch.testing.assert_close(clipped / 0.05, free / norm, rtol=1e-3, atol=1e-5)


def test_fp16_gradients_are_unscaled_before_clipping(tiny_model):
    _, grad, norm = gradients(tiny_model(), [batch()], fp16=True, grad_clip=0.05)
    assert norm.item() < 100  # 65,536 times that, if the scale were still in it
    assert grad.norm().item() == pytest.approx(0.05, rel=1e-2)


# ---- flags reach what they switch


def test_tf32_on_a_cpu_is_said_to_do_nothing_and_precision_is_set_in_every_run():
    torch.set_float32_matmul_precision("high")
    try:
        assert set_precision(load_config(tf32=True), CPU) == ["tf32 has no effect on cpu: fp32 products stay fp32"]
        assert torch.get_float32_matmul_precision() == "highest"
        assert set_precision(load_config(), CPU) == []
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
def test_tf32_on_a_gpu_sets_the_precision():
    try:
        assert set_precision(load_config(tf32=True), torch.device("cuda", 0)) == []
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_flash_says_which_kernel_runs():
    assert attention_kernel(load_config(), CPU, (2, 2, 32, 16), dropout=0.0) == "flash_attention"
    assert attention_kernel(load_config(), CPU, (2, 2, 32, 16), dropout=0.1) == "math"


@pytest.mark.gpu
@pytest.mark.parametrize("speed", [{"bf16": True}, {"fp16": True}])
def test_flash_on_a_gpu_is_a_fused_kernel_and_autocast_works_on_an_indexed_device(speed, tiny_model):
    cuda = torch.device("cuda", 0)
    kernel = attention_kernel(load_config(**speed), cuda, (2, 12, 1024, 64), dropout=0.0)
    assert kernel in ("flash_attention", "cudnn_attention")
    x, y = (t.to(cuda) for t in batch())
    with autocast_for(load_config(**speed), cuda)():
        assert tiny_model(flash=True).to(cuda)(x, y).isfinite()


@pytest.mark.gpu
def test_a_run_on_a_gpu_has_the_losses_of_the_cpu(tiny_config):
    on_cpu, on_gpu = tiny_config(run_name="cpu"), tiny_config(run_name="gpu", device="cuda")
    run(on_cpu)
    train(on_gpu, Process(torch.device("cuda", 0)))
    assert column(on_gpu) == pytest.approx(column(on_cpu), rel=1e-4)


def test_compile_without_a_compiler_is_an_error_that_says_what_to_do(monkeypatch):
    import torch._inductor.cpp_builder as cpp_builder

    def none(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(UserError, match=r"--compile: no C\+\+ compiler found; install g\+\+ .*or run without --compile"):
        check_compiler(CPU)


def test_training_compiles_once_although_it_evaluates_and_samples_other_shapes(tiny_config):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = tiny_config(compile=True, max_steps=5, eval_every=1, val_fraction=0.05, sample_every=2, sample_tokens=2,
                         vocab_size=50257, n_layer=1)
    run(config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert set(load_model(f"{config.log_dir}/{config.run_name}").state_dict()) == set(build_model(config)[1].state_dict())


def test_train_passes_every_flag_on_to_what_it_switches(tiny_config, monkeypatch):
    seen = {}

    def spy(name, target=train_module):
        real = getattr(target, name)

        def record(*args, **kwargs):
            seen[name] = (args, kwargs)
            return real(*args, **kwargs)

        monkeypatch.setattr(target, name, record)

    spy("compute_gradients")
    spy("validation_loss")
    monkeypatch.setattr(torch, "compile", lambda model, **options: seen.update(compile=options) or model)
    run(tiny_config(fp16=True, flash=True, fused_adamw=True, compile=True, compile_mode="max-autotune", grad_clip=0.5, eval_every=1,
                    eval_tokens=64, val_fraction=0.1, max_steps=1, batch_size=2, total_batch_tokens=128))
    model, _, accumulation, (adamw,), scaler, grad_clip, autocast = seen["compute_gradients"][0]
    assert model.config.flash is True
    assert all(block.attn.config.flash for block in model.transformer.h)
    assert accumulation == 2
    assert adamw.defaults["fused"] is True
    assert scaler.is_enabled()
    assert grad_clip == 0.5
    assert seen["compile"] == {"mode": "max-autotune"}
    with autocast():
        assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_enabled("cpu")
    assert seen["validation_loss"][0][3] == 64
    assert seen["validation_loss"][1]["autocast"] is autocast


def test_an_fp16_overflow_skips_the_step_and_the_run_goes_on(tiny_config, monkeypatch):
    real, calls = train_module.compute_gradients, iter(range(1, 100))

    def overflowing(model, batches, accumulation, optimizers, scaler, *rest):
        if next(calls) == 2:
            scaler.update(2.0**120)  # far more than fp16 holds: the gradients overflow
        return real(model, batches, accumulation, optimizers, scaler, *rest)

    monkeypatch.setattr(train_module, "compute_gradients", overflowing)
    config = tiny_config(fp16=True)
    assert run(config)["steps"] == 6
    assert not math.isfinite(column(config, "norm")[1])
    assert all(math.isfinite(loss) for loss in column(config))


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
    folder = train_module.Path(config.log_dir) / "train"
    assert (folder / "log.csv").read_text().splitlines()[0] == "step,loss,lr,norm,dt_ms,tokens_per_sec"
    assert (folder / "eval.csv").read_text().splitlines()[0] == "step,val_loss"
    assert [row["step"] for row in rows(config, "eval.csv")] == ["0", "3", "6"]
    assert load_config(str(folder / "config.yaml")) == config
    assert (folder / "checkpoints" / "step_000006" / "model.safetensors").is_file()
    summary = json.loads((folder / "summary.json").read_text())
    assert {"steps", "tokens", "parameters", "median_dt_ms", "median_tokens_per_sec", "first_step_s", "peak_memory_mb",
            "flops_per_token", "matmul_tflops", "utilization", "final_loss", "val_loss", "device", "torch", "git", "started",
            "median_leaves_out"} <= set(summary)
    assert summary["tokens"] == 6 * 4 * 32
    assert summary["device"] == "cpu"
    assert summary["val_loss"] == float(rows(config, "eval.csv")[-1]["val_loss"])
    assert 0 < summary["utilization"] < 1


def test_the_console_says_what_runs_before_the_first_step(tiny_config, capsys):
    run(tiny_config(eval_every=6, val_fraction=0.1, tf32=True, flash=True, warmup_steps=50))
    text = capsys.readouterr().out
    before, _, after = text.partition("step 1/6")
    for line in ("device: cpu", "loaded 3,600 tokens", "and 400 for validation", "1 epoch = 28 batches", "parameters",
                 "num decayed parameter tensors: 29, with", "num non-decayed parameter tensors: 0, with 0",
                 "optimizations on: tf32, flash", "note: tf32 has no effect on cpu", "note: flash runs PyTorch's flash_attention",
                 "note: warmup_steps 50 > max_steps 6", "step 0/6 | validation loss"):
        assert line in before, line
    assert " left" in after
    assert "done: 6 steps, 768 tokens" in after


def test_a_run_is_repeatable_and_the_seed_matters(tiny_config):
    configs = [tiny_config(run_name=name, seed=seed, dropout=0.1, shuffle=True) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    for config in configs:
        run(config)
    assert column(configs[0]) == column(configs[1])
    assert column(configs[0]) != column(configs[2])


def test_evaluating_sampling_and_saving_do_not_change_the_losses(tiny_config):
    plain = tiny_config(run_name="plain", vocab_size=50257, dropout=0.1, max_steps=3, val_fraction=0.1, n_layer=1)
    busy = tiny_config(run_name="busy", vocab_size=50257, dropout=0.1, max_steps=3, val_fraction=0.1, n_layer=1,
                       eval_every=1, sample_every=1, sample_tokens=3, checkpoint_every=1)
    run(plain)
    run(busy)
    assert column(plain) == column(busy)
    assert len(list((train_module.Path(busy.log_dir) / "busy" / "checkpoints").glob("step_*"))) == 3


def test_accumulation_makes_the_same_run_as_a_large_batch_and_logs_the_whole_steps_loss(tiny_config):
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


@pytest.mark.parametrize("stage", [path.stem for path in sorted(CONFIG_DIR.glob("*.yaml"))])
def test_every_stage_takes_steps_on_a_tiny_model_with_its_own_vocabulary(stage, corpus, tmp_path):
    config = load_config(stage, n_layer=1, n_head=1, n_embd=16, block_size=32, seq_len=32, batch_size=2, total_batch_tokens=128,
                         dataset="tiny", data_dir=str(corpus), log_dir=str(tmp_path), max_steps=2, eval_every=0, sample_every=0,
                         compile=False, device="cpu")
    run(config)
    assert column(config) == pytest.approx([math.log(50257)] * 2, abs=0.5)


# ---- timing


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_dt_is_the_step_alone_without_evaluation_sampling_or_saving(tiny_config, monkeypatch):
    clock, real = Clock(), train_module.compute_gradients
    seconds = iter([10.0, 0.5, 0.25, 0.25, 0.25, 0.25])

    def takes(duration, function):
        def timed(*args, **kwargs):
            clock.now += next(duration) if not isinstance(duration, float) else duration
            return function(*args, **kwargs)
        return timed

    monkeypatch.setattr(train_module, "compute_gradients", takes(seconds, real))
    for name in ("validation_loss", "sample_text", "save_checkpoint"):
        monkeypatch.setattr(train_module, name, takes(1000.0, getattr(train_module, name)))
    config = tiny_config(vocab_size=50257, n_layer=1, eval_every=1, val_fraction=0.05, sample_every=1, sample_tokens=2,
                         checkpoint_every=1)
    summary = run(config, clock=clock)
    assert column(config, "dt_ms") == [10_000, 500, 250, 250, 250, 250]
    assert column(config, "tokens_per_sec") == [12.8, 256, 512, 512, 512, 512]  # 4 x 32 tokens
    assert summary["first_step_s"] == 10.0
    assert summary["median_leaves_out"] == 2
    assert summary["median_dt_ms"] == 250
    assert summary["median_tokens_per_sec"] == 512


def test_the_matmul_rate_is_a_rate():
    assert 1e-4 < matmul_tflops(CPU, torch.float32, seconds=0.01) < 100


def test_the_matmul_rate_of_a_slow_precision_takes_small_products(monkeypatch):
    sizes = []

    def slow(a, b):
        sizes.append(len(a))
        time.sleep(0.02 * (len(a) / 128) ** 3)

    monkeypatch.setattr(torch, "mm", slow)
    rate = matmul_tflops(CPU, torch.float16, seconds=0.01)
    assert set(sizes) == {128, 256}
    assert rate == pytest.approx(2 * 256**3 / 0.16 / 1e12, rel=0.2)


# ---- evaluation


def test_validation_is_the_mean_over_a_fixed_set_each_sequence_once_and_repeatable(tiny_config, tiny_model):
    config = tiny_config(val_fraction=0.3)
    _, val = open_corpus(train_module.Path(config.data_dir) / "tiny", 32, 128, 0.3)
    model = tiny_model(dropout=0.5)
    losses = [validation_loss(model, val, batch_size, None, CPU) for batch_size in (4, 4, 7)]
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert model.training
    model.eval()
    with torch.no_grad():
        one_by_one = [model(*val.read([i])).item() for i in range(len(val))]
    assert losses[0] == pytest.approx(sum(one_by_one) / len(val), rel=1e-5)
    assert validation_loss(model, val, 4, 64, CPU) == pytest.approx(sum(one_by_one[:2]) / 2, rel=1e-5)


def test_evaluation_runs_under_the_same_autocast(tiny_config, tiny_model):
    config = tiny_config()
    _, val = open_corpus(train_module.Path(config.data_dir) / "tiny", 32, 128, 0.3)
    plain, bf16 = (validation_loss(tiny_model(), val, 4, None, CPU, autocast=autocast_for(load_config(bf16=on), CPU))
                   for on in (False, True))
    assert plain != bf16
    assert plain == pytest.approx(bf16, rel=1e-2)


def test_evaluating_without_a_validation_split_is_an_error_that_says_what_to_set(tiny_config):
    with pytest.raises(ValueError, match=r"nothing to validate on.*raise val_fraction"):
        run(tiny_config(eval_every=1))


# ---- folders, checkpoints, weights from elsewhere


def test_an_earlier_run_is_moved_aside_not_overwritten(tiny_config, capsys):
    for seed in (1, 2, 3):
        run(tiny_config(seed=seed))
    logs = train_module.Path(tiny_config().log_dir)
    assert sorted(path.name for path in logs.iterdir()) == ["train", "train.1", "train.2"]
    seeds = [load_config(str(logs / name / "config.yaml")).seed for name in ("train.1", "train.2", "train")]
    assert seeds == [1, 2, 3]
    assert f"note: the earlier {logs / 'train'} is now {logs / 'train.2'}" in capsys.readouterr().out


def test_a_run_that_cannot_start_leaves_the_earlier_one_in_place(tiny_config):
    run(tiny_config())
    with pytest.raises(ValueError, match="no such corpus"):
        run(tiny_config(dataset="missing"))
    with pytest.raises(CheckpointError, match="no such run"):
        run(tiny_config(init_from="missing"))
    assert [path.name for path in train_module.Path(tiny_config().log_dir).iterdir()] == ["train"]


def test_init_from_a_run_goes_on_with_its_weights_and_takes_over_its_shape(tiny_config, tmp_path):
    first = tiny_config(run_name="first", tie_weights=True, max_steps=30, lr=1e-2)
    run(first)
    second = load_config(dataset="tiny", data_dir=first.data_dir, log_dir=first.log_dir, seq_len=32, max_steps=1,
                         run_name="second", device="cpu", init_from="first")
    run(second)
    assert column(second)[0] < column(first)[0] - 1.0
    written = load_config(f"{first.log_dir}/second/config.yaml")
    assert (written.n_layer, written.n_embd, written.vocab_size, written.tie_weights) == (2, 32, 128, True)


def test_init_from_keeps_padding_rows_padding_and_refuses_another_vocabulary(tiny_config):
    run(tiny_config(run_name="first", real_vocab_size=100, max_steps=1))
    options = {name: value for name, value in tiny_config().model_dump(exclude_unset=True).items() if name != "vocab_size"}
    config, model = build_model(load_config(**(options | {"init_from": "first"})))
    assert (config.vocab_size, config.real_vocab_size, model.config.n_tokens) == (128, 100, 100)
    assert config.init_from.endswith("first/checkpoints/step_000001"), "the name may mean another run tomorrow"
    with pytest.raises(ConfigError, match=r"makes 64 tokens, but init_from .* has 100"):
        build_model(load_config(**(options | {"init_from": "first", "vocab_size": 64, "real_vocab_size": None})))


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
    folder = train_module.Path(config.log_dir) / "busy"
    _, lock = start_run_folder(folder, config)
    with pytest.raises(UserError, match=r"busy: another process is writing this run; wait for it or choose another --run_name"):
        run(config)
    lock.release()
    run(config)
    assert len(rows(config)) == 6


def test_options_that_contradict_init_from_are_errors_that_name_both_values(tiny_config):
    run(tiny_config(run_name="first"))
    with pytest.raises(ConfigError, match=r"n_layer 3 contradicts init_from first, which has 2; leave n_layer out") as caught:
        build_model(tiny_config(init_from="first", n_layer=3, tie_weights=True))
    assert "tie_weights True contradicts" in str(caught.value)


# ---- stopping


def test_a_non_finite_loss_stops_the_run_naming_step_loss_norm_and_lr(tiny_config, monkeypatch):
    real, calls = train_module.compute_gradients, iter([False, False, True])

    def poisoned(*args):
        loss, norm = real(*args)
        return (loss * math.nan if next(calls) else loss), norm

    monkeypatch.setattr(train_module, "compute_gradients", poisoned)
    config = tiny_config()
    with pytest.raises(TrainingError, match=r"step 3: the loss is nan, the gradient norm [\d.]+, the learning rate 0.0003;"):
        run(config)
    assert len(rows(config)) == 2
    assert not (train_module.Path(config.log_dir) / "train" / "checkpoints").exists()


def test_a_diverging_run_stops_by_itself(tiny_config):
    with pytest.raises(TrainingError, match="Try a lower lr"):
        run(tiny_config(lr=1e30, max_steps=20))


def test_ctrl_c_finishes_the_step_and_keeps_log_checkpoint_and_summary(tiny_config, monkeypatch, capfd):
    real, calls = train_module.compute_gradients, iter(range(1, 100))

    def interrupted(*args):
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(train_module, "compute_gradients", interrupted)
    before = signal.getsignal(signal.SIGINT)
    config = tiny_config(max_steps=50)
    summary = run(config)
    assert summary["interrupted"] is True
    assert summary["steps"] == 3
    assert len(rows(config)) == 3
    assert load_model("train", config.log_dir).config.n_layer == 2
    assert "stopping after this step" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
