"""The benchmark on tiny models: what is timed, figures, a slow part found, models that fail."""

import csv
import json
import random
import re
import signal

import pytest
import torch

import bench
from bench import BenchOptions
from config import Config, load_config
from measure import profile
from measure.interleaved.process import in_fresh_process
from measure.ladder.probe import matmul_rates
from model import GPT, GPTConfig
from run.log import describe_duration
from runtime import device
from runtime.cli import parse
from runtime.report import about, flops_rate, project_files
from tests.conftest import CPU, ROOT, TINY, cases, refused, run_from_nothing

BATCH = {"seq_len": 32, "batch_size": 2, "device": "cpu"}


@pytest.fixture
def tiny_yaml(tmp_path):
    """A training config of a tiny model, in a file."""
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY | BATCH))
    return str(tmp_path / "tiny.yaml")


def options(*arguments):
    return parse(BenchOptions, [str(argument) for argument in arguments], others=Config)


def tiny(**values):
    return load_config(**(TINY | BATCH | values))


# ---- timing


def test_figures_of_passes():
    figures = profile.figures([2.0, 1.0, 3.0], tokens=64, tflop=0.5, rate=1.0)
    expected = {"mean_s": 2, "min_s": 1, "max_s": 3, "total_s": 6, "tokens_per_sec": 32, "steps": 3}
    expected |= {"tflops": 0.25, "utilization": 0.25, "std_s": pytest.approx((2 / 3) ** 0.5)}
    assert {name: figures[name] for name in expected} == expected
    busy = profile.figures([2.0, 1.0, 3.0], tokens=64, tflop=0.5, rate=0.4)
    assert busy["utilization"] is None  # a pass was faster than the matmul


def test_rows_with_more_warm_up_leave_out_passes_of_the_same_measurement():
    cold, warm = profile.time_passes(tiny(), "forward", (0, 2), steps=3)
    assert cold["times_s"][2:] == warm["times_s"][:1]
    flops = GPT(GPTConfig(**TINY)).flops_per_token(32) * 2 * 32 / 3  # forward: a third of a step's
    assert warm["tflops"] * warm["mean_s"] == pytest.approx(flops / 1e12)


def steady(n, now):  # 0.5 TFLOP/s
    return 4e-12 * n**3


def without_room(n, now):
    if n > 512:
        raise torch.OutOfMemoryError
    return steady(n, now)


NOISE = random.Random(0)
MATMULS = {
    "steady": (steady, 0.5),
    "without room for large matrices": (without_room, 0.5),
    "of a busy first second": (lambda n, now: steady(n, now) + 0.1 * (now < 1.0), 0.5),
    "never steady": (lambda n, now: steady(n, now) * 10 ** NOISE.uniform(0, 3), None),
}


@pytest.mark.parametrize(("seconds", "rate"), MATMULS.values(), ids=MATMULS)
def test_a_matmul_has_a_rate_once_it_is_steady(seconds, rate, monkeypatch):
    clock = [0.0]

    def timed(n, _):
        clock.append(clock[-1] + seconds(n, clock[-1]))
        return clock[-1] - clock[-2]

    monkeypatch.setattr(device.time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr(device, "matmul", lambda n, *_: n)
    monkeypatch.setattr(device, "timed", timed)
    assert device.matmul_tflops(CPU, "float32") == (rate and pytest.approx(rate))
    assert bool(matmul_rates(CPU)) == bool(rate)


def test_passes_begin_without_gradients_and_a_training_step_alone_changes_the_weights():
    (work, _), gradients = profile.set_up(tiny()), []
    weight = work.state.model.lm_head.weight
    before = weight.clone()
    for computation in ("backward", "backward", "forward_backward"):
        ready = profile.prepare(work, computation)
        assert all(p.grad is None for p in work.state.model.parameters())
        ready()
        gradients.append(weight.grad.clone())
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(before, weight)
    profile.prepare(work, "training_step")()
    assert not torch.equal(before, weight)


def test_mixed_precision_is_float16_where_a_gpu_lacks_bfloat16(monkeypatch):
    monkeypatch.setattr(profile, "has_bf16", lambda _: False)
    work, notes = profile.set_up(tiny(bf16=True))
    assert (work.config.bf16, work.config.fp16) == (False, True)
    assert "note: cpu has no bfloat16: mixed precision is float16 here" in notes


@pytest.mark.usefixtures("forked_processes")
def test_out_of_memory_and_a_killed_process_are_lines_and_the_rest_goes_on(tmp_path, capsys):
    _, error = in_fresh_process("signal:raise_signal", signal.SIGKILL)
    assert error == "its process was killed, as the system does when memory runs out"

    large = ("large", tiny(batch_size=2**40))  # more than there is
    given = options("--computation", "forward", "--steps", 1)
    with refused("^nothing could be measured: large .*: out of memory$"):
        bench.time_models(given, [large], tmp_path)
    # a tiny model in place of the profile's, beside the published seconds
    bench.time_models(given, [large, ("small", tiny())], tmp_path)
    failure = "large forward, full precision: out of memory"
    assert capsys.readouterr().out.count(failure) == 3
    assert failure in (tmp_path / "report.md").read_text()
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = {row["warmup_steps"]: row for row in csv.DictReader(file)}
    row = rows["0"]
    assert row["size"] == "small"
    assert row["published_s"] == "0.074113"
    ratio = float(row["mean_s"]) / 0.074113
    assert float(row["over_published"]) == pytest.approx(ratio)


# ---- the published profile


def test_the_default_is_the_published_profile():
    default = BenchOptions()
    published = bench.published_seconds(default)
    precisions = [(size, str(c.bf16).lower()) for size, c in bench.models_of(default)]
    assert published.keys() == {
        (size, computation, warm, bf16)
        for size, bf16 in precisions
        for computation in default.computation
        for warm in "01"
    }
    assert published["small", "backward", "0", "false"] == 0.149865
    assert bench.published_seconds(options("--device=cpu", "--no-bf16"))
    for other in ("--batch_size=8", "--config=speedup5"):
        assert not bench.published_seconds(options(other))


def test_models_take_options_of_training():
    words = ("--config=speedup7", "--batch_size=2", "--no-bf16")
    expected = load_config("speedup7", batch_size=2, bf16=False, total_batch_tokens=None)
    assert bench.models_of(options(*words)) == [("speedup7", expected)]
    # a precision is then the only one
    words = ("--size=small", "--no-bf16", "--seq_len=64", "--warmup_steps=2")
    expected = load_config("timeit/small", bf16=False, seq_len=64, block_size=64)
    assert bench.models_of(options(*words)) == [("small", expected)]


def test_a_warm_row_leaves_out_the_passes_that_record_cuda_graphs():
    assert bench.warm_up(load_config("speedup5"), (0, 1)) == (0, 1)
    assert bench.warm_up(load_config("speedup10"), (0, 1)) == (0, 3)  # max-autotune


# ---- options


def test_every_command_answers_help_and_prints_a_config_without_torch():
    files = project_files("*.py", "measure/*/*.py")
    commands = [str(path) for path in files if "if __name__" in path.read_text()]
    code = """if True:
        import runpy, sys
        import config
        config.load_config("baseline")
        assert not {"torch", "numpy"} & {*sys.modules}, "config.py"
        import ladder, runtime.cli, runtime.errors, runtime.files, runtime.launch
        import runtime.report, run.log, runtime.signals, runtime.start
        assert "torch" not in sys.modules, "imports"
        commands = [[path, "--help"] for path in sys.argv[1:]]
        for command in [*commands, ["train.py", "--config", "speedup8", "--print_config"]]:
            sys.argv = command
            try:
                runpy.run_path(command[0], run_name="__main__")
            except SystemExit as stopped:
                assert stopped.code == 0, command
            assert "torch" not in sys.modules, command
    """
    ran = run_from_nothing("-c", code, *commands, cwd=ROOT)
    assert ran.stdout.count("usage: ") == len(commands) > 8
    assert "grad_clip: 1.0" in ran.stdout


MISTAKES = """
--config=speedup7 --size=small => size has no effect in this benchmark; leave it out
--max_steps=9 => --max_steps: max_steps has no effect
--dataset=nowhere => dataset has no effect
--breakdown --computation=forward => computation has no effect
--trace --steps=3 => steps has no effect
--bf16 --fp16 => bf16 and fp16 exclude each other
"""


@pytest.mark.parametrize(("arguments", "message"), cases(MISTAKES))
def test_a_mistake_is_told_and_nothing_is_written(arguments, message, tmp_path):
    with refused(re.escape(message)):
        bench.main(options(*arguments.split(), "--log_dir", tmp_path / "logs"))
    assert not (tmp_path / "logs").exists()


# ---- the parts of a step


def test_the_breakdown_finds_planted_slow_parts():
    """The clock is the test's own, so that no other process can make it fail."""
    (work, _), now = profile.set_up(tiny(tie_weights=True)), [0.0]
    block = work.state.model.transformer.h[1]
    block.mlp.register_forward_hook(lambda *_: now.append(now[-1] + 0.06))
    block.attn.register_full_backward_hook(lambda *_: now.append(now[-1] + 0.02))
    found = profile.break_down(work, steps=2, clock=lambda: now[-1])
    parts = {name: [ms, share] for name, ms, share in found if ms}
    slow = {"MLP": [60, 0.75], "backward": [20, 0.25], "  of which attention": [20, 0.25]}
    assert parts == {name: pytest.approx(figures) for name, figures in slow.items()}


def test_rates_and_durations_in_words():
    assert flops_rate(0.0042) == "4.2 GFLOP/s"
    unknown = describe_duration(None, "less")
    assert unknown.startswith("how long this takes is not known: the device could not be measured")
    spoken = "2 minutes, 2.0 hours, 10 hours, 2 days, 93 days"
    assert ", ".join(map(about, (90, 7200, 36_000, 172_800, 8e6))) == spoken


@pytest.mark.gpu
def test_a_trace_of_a_gpu(tmp_path):
    work, _ = profile.set_up(load_config(**TINY, seq_len=32, device="cuda"))
    assert profile.trace(work, tmp_path / "trace.json.gz")


# ---- the whole command


@pytest.mark.usefixtures("forked_processes")
def test_passes_are_timed_and_reported(tiny_yaml, tmp_path):
    given = ("--steps", 2, "--computation", "forward,training_step", "--log_dir", tmp_path)
    bench.main(options("--config", tiny_yaml, *given))
    files = {path.name: path for path in tmp_path.glob("bench/*/*")}
    assert files.keys() == {"report.html", "report.md", "results.csv", "results.json"}
    rows = json.loads(files["results.json"].read_text())
    found = [(row["computation"], row["warmup_steps"]) for row in rows]
    assert found == [("forward", 0), ("forward", 1), ("training_step", 0), ("training_step", 1)]
    assert "| tiny forward, full precision |" in files["report.md"].read_text()


@pytest.mark.usefixtures("forked_processes")
def test_a_step_is_traced_and_broken_down(tiny_yaml, tmp_path, capsys):
    given = ("--trace", "--breakdown", "--steps", 1, "--log_dir", tmp_path)
    bench.main(options("--config", tiny_yaml, *given))
    printed = capsys.readouterr().out
    assert "of which attention" in printed
    assert "aten::" in printed
    files = {path.name for path in tmp_path.glob("bench/*/*")}
    assert files == {"parts.md", "trace_tiny_full.json.gz"}
