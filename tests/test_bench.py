"""The benchmark on tiny models: what is timed, arithmetic, a slow part found, runs that fail, and
the same batch on more ranks.
"""

import csv
import itertools
import json
import random
import re
import signal
import statistics
import types

import pytest
import torch

import bench
from bench import BenchOptions
from config import Config, load_config
from measure.interleaved import process
from measure.ladder.record import Device
from measure.profile import breakdown, tables, timing
from measure.profile.breakdown import break_down
from measure.profile.scaling import batch_size_of
from measure.profile.timing import Job, measure, passes, set_up
from model import GPT, GPTConfig
from runtime import device
from runtime.cli import parse
from runtime.errors import TrainingError
from runtime.report import about, describe_duration, flops_rate, project_files
from tests.conftest import CPU, ROOT, TINY, cases, refused, run_from_nothing

BATCH = {"seq_len": 32, "batch_size": 2, "device": "cpu"}


@pytest.fixture
def tiny_yaml(tmp_path):
    """A training config of a tiny model, in a file."""
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY | BATCH))
    return str(tmp_path / "tiny.yaml")


@pytest.fixture
def in_this_process(monkeypatch):
    """Jobs are measured in this process, as a fresh one takes seconds to import torch, and the
    matmul rate is not.
    """
    monkeypatch.setattr(timing, "matmul_tflops", lambda *_: 2e-5)
    for module in (bench, breakdown):
        monkeypatch.setattr(module, "in_fresh_process", process.call)


def command_line(*arguments):
    """What bench.py does with these arguments."""
    bench.main(parse(BenchOptions, [str(argument) for argument in arguments], others=Config))


def tiny_job(computation="forward_backward", warmup_steps=(0, 2), steps=3, **options):
    config = load_config(**(TINY | BATCH | options))
    return Job("tiny", config, computation, warmup_steps, steps)


# ---- timing


def test_a_pass_is_timed_between_synchronizations_and_its_graph_freed_afterwards(
    monkeypatch,
):
    events = []

    class Graph:
        def __del__(self):
            events.append("freed")

    monkeypatch.setattr(device, "synchronize", lambda _: events.append("synchronize"))
    clock = types.SimpleNamespace(perf_counter=lambda: events.append("clock") or len(events))
    monkeypatch.setattr(device, "time", clock)
    seconds = device.timed(lambda: events.append("work") or Graph(), CPU)
    assert events == ["synchronize", "clock", "work", "synchronize", "clock", "freed"]
    assert seconds == 3


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("computation", "share"), [("forward_backward", 3), ("forward", 1), ("backward", 2)]
)
def test_figures_follow_from_the_clock(computation, share, monkeypatch):
    durations = iter([8.0, 4.0, 2.0, 1.0, 3.0])
    monkeypatch.setattr(timing, "timed", lambda work, _: (work(), next(durations))[1])
    cold, row = measure(tiny_job(computation))
    assert (cold["times_s"], row["times_s"]) == ([8.0, 4.0, 2.0], [2.0, 1.0, 3.0])
    figures = {"mean_s": 2, "min_s": 1, "max_s": 3, "total_s": 6, "tokens_per_sec": 32, "steps": 3}
    assert row.items() >= figures.items()
    assert row["std_s"] == statistics.pstdev([1, 2, 3])
    flops = GPT(GPTConfig(**TINY)).flops_per_token(32) * 2 * 32 * share / 3
    assert row["tflops"] == pytest.approx(flops / 2.0 / 1e12)
    assert row["utilization"] == pytest.approx(row["tflops"] / 2e-5)
    assert flops_rate(0.0042) == "4.2 GFLOP/s"


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
    now = 0.0

    def timed(n, _):
        nonlocal now
        taken = seconds(n, now)
        now += taken
        return taken

    monkeypatch.setattr(device.time, "perf_counter", lambda: now)
    monkeypatch.setattr(device, "matmul", lambda n, *_: n)
    monkeypatch.setattr(device, "timed", timed)
    assert device.matmul_tflops(CPU, "float32") == (rate and pytest.approx(rate))
    assert bool(device.matmul_rates(CPU)) == bool(rate)


def test_backward_gets_a_fresh_untimed_forward_and_cleared_gradients():
    work = set_up(tiny_job().config)
    prepare = passes(work, "backward")
    gradients = []
    for _ in range(2):
        backward = prepare()
        assert all(p.grad is None for p in work.state.model.parameters())
        backward()
        gradients.append(work.state.model.lm_head.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("computation", ["training_step", "forward_backward"])
def test_a_training_step_changes_the_weights_and_forward_backward_does_not(computation):
    work = set_up(tiny_job().config)
    before = work.state.model.lm_head.weight.clone()
    passes(work, computation)()()
    is_changed = not torch.equal(before, work.state.model.lm_head.weight)
    assert is_changed == (computation == "training_step")


def test_mixed_rows_use_float16_where_a_gpu_lacks_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")
    # emulated bf16 does not count
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    mixed = tiny_job(bf16=True).config
    config, notes = timing.with_mixed_precision_of(torch.device("cuda", 0), mixed)
    assert (config.bf16, config.fp16) == (False, True)
    assert notes == ["note: Old GPU has no bfloat16: mixed precision is float16 here"]
    assert timing.with_mixed_precision_of(CPU, mixed) == (mixed, [])


@pytest.mark.parametrize("retains", [True, False])
def test_what_is_timed_retains_freed_memory_if_its_config_does(retains, monkeypatch):
    calls = []
    monkeypatch.setattr(timing, "retain_freed_memory", lambda: calls.append(0))
    set_up(tiny_job(retain_memory=retains).config)
    assert bool(calls) == retains


@pytest.mark.usefixtures("forked_processes")
def test_out_of_memory_and_a_killed_process_are_lines_and_the_rest_goes_on(tmp_path):
    _, error = process.in_fresh_process("signal:raise_signal", signal.SIGKILL)
    assert error == "its process was killed, as the system does when memory runs out"

    jobs = [tiny_job(batch_size=2**40), tiny_job("forward")]  # more than there is
    rows, failed = bench.time_jobs(jobs, tmp_path)
    assert failed == [f"tiny forward_backward, full precision, {2**40} x 32: out of memory"]
    read = tables.read_results(tmp_path / "results.csv")
    assert {key: row["mean_s"] for key, row in read.items()} == {
        timing.key_of(row): row["mean_s"] for row in rows
    }


# ---- the published profile


def test_the_default_is_the_published_profile():
    jobs = bench.jobs_of(BenchOptions())
    published = tables.read_results(ROOT / "logs/reference/timeit.csv")
    keys = {timing.key_of(job.row(n)) for job in jobs for n in job.warmup_steps}
    assert keys == published.keys()
    assert {job.steps for job in jobs} == {5}
    medium = next(job.config for job in jobs if job.size == "medium")
    assert (medium.n_embd, medium.n_layer, medium.n_head) == (1024, 24, 16)


def configs(words):
    return bench.job_configs(parse(BenchOptions, words.split(), others=Config))


def test_a_training_config_gives_model_batch_and_precision():
    words = "--config=speedup7 --batch_size=2 --no-compile --no-bf16 --betas 0.9 0.95"
    given = {"batch_size": 2, "compile": False, "bf16": False, "betas": (0.9, 0.95)}
    assert configs(words) == [
        ("speedup7", load_config("speedup7", **given, total_batch_tokens=None))
    ]


def test_the_profile_takes_options_of_training_and_a_precision_is_the_only_one():
    ((_, config),) = configs("--size=small --no-bf16 --seq_len=64 --warmup_steps=2")
    shown = (config.bf16, config.seq_len, config.block_size, config.warmup_steps)
    assert shown == (False, 64, 64, 0)


@pytest.mark.parametrize(
    ("options", "warmup_steps"),
    [
        ({"config": "speedup5"}, (0, 1)),
        ({"config": "speedup10"}, (0, 3)),  # max-autotune
        ({"config": "speedup10", "scan": "batch_size=1,2"}, (3,)),
    ],
)
def test_a_warm_row_leaves_out_the_passes_that_record_cuda_graphs(options, warmup_steps):
    jobs = bench.jobs_of(BenchOptions(**options))
    assert {job.warmup_steps for job in jobs} == {warmup_steps}


# ---- tables


@pytest.mark.parametrize("content", ["a,b\n1,2\n", f"{','.join(timing.KEY)},mean_s\n1,2,3,4,x\n"])
def test_a_bad_results_file_is_one_clear_error(tmp_path, content):
    (tmp_path / "r.csv").write_text(content)
    with refused(r"^\S+: not a results.csv of bench.py: .+$"):
        tables.read_results(tmp_path / "r.csv")


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
        import runtime.report, runtime.runlog, runtime.signals, runtime.start
        assert not {"torch", "matplotlib"} & {*sys.modules}, "imports"
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
--scan=lr=1,2 => --scan: string should match pattern '^(batch_size|seq_len)=
--scan=batch_size=9999999999999999 => --scan: string should match pattern
--scan=batch_size=1 --batch_size=3 => batch_size has no effect in this benchmark; leave it out
--config=speedup7 --size=small => size has no effect
--compare=x.csv --breakdown => compare has no effect
--steps=3 --trace => steps has no effect
--scan=batch_size=1 --warmup_steps=0,1 => warmup_steps has no effect
--max_steps=9 => --max_steps: max_steps has no effect
--config=TINY --scaling=1,2 --scan=batch_size=1 => scan has no effect
--rounds=9 => rounds has no effect
--dataset=nowhere => dataset has no effect
--bf16 --fp16 => bf16 and fp16 exclude each other
--total_batch_tokens=64 => total_batch_tokens has no effect
--config=TINY --scaling=1,3 => total_batch_tokens 64 is not a multiple of the 96 tokens of one micro
"""


@pytest.mark.parametrize(("arguments", "message"), cases(MISTAKES))
def test_a_mistake_is_told_and_nothing_is_written(arguments, message, tiny_yaml, tmp_path):
    words = arguments.replace("TINY", tiny_yaml).split()
    with refused(re.escape(message)):
        command_line(*words, "--log_dir", tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


# ---- the parts of a step


@pytest.mark.parametrize(
    ("module", "hook", "slow"),
    [
        ("mlp", "register_forward_hook", {"MLP"}),
        ("attn", "register_full_backward_hook", {"backward", "  of which attention"}),
    ],
)
def test_the_breakdown_finds_a_planted_slow_part(module, hook, slow, monkeypatch):
    """The clock is the test's own, so that no other process can make it fail."""
    work, now = set_up(tiny_job(tie_weights=True).config), [0.0]
    part = work.state.model.transformer.h[1].get_submodule(module)
    getattr(part, hook)(lambda *_: now.append(now[-1] + 0.06))
    monkeypatch.setattr(breakdown, "perf_counter", lambda: now[-1])
    parts = {name: (ms, share) for name, ms, share in break_down(work, steps=2) if ms}
    assert parts == {name: (pytest.approx(60), pytest.approx(1)) for name in slow}


def test_the_operations_of_a_token_are_the_models():
    config = load_config(n_layer=12, vocab_size=50304, tie_weights=True)
    with torch.device("meta"):
        per_token = GPT(GPTConfig.of(config)).flops_per_token(config.seq_len)
    device = Device(tflops={"float32": 2e-12})  # 1 FLOP/s at 50% MFU
    assert device.step_seconds(config) == pytest.approx(4 * 1024 * per_token, rel=2e-3)
    unknown = describe_duration(None, 0.5, "less")
    assert unknown.startswith("how long this takes is not known: the device could not be measured")
    spoken = "2 minutes, 2.0 hours, 10 hours, 2 days, 93 days"
    assert ", ".join(map(about, (90, 7200, 36_000, 172_800, 8e6))) == spoken


@pytest.mark.gpu
def test_a_memory_snapshot_and_a_trace_of_a_gpu(tmp_path):
    work = set_up(load_config(**TINY, seq_len=32, device="cuda"))
    breakdown.snapshot(work, tmp_path / "memory.pickle")
    assert (tmp_path / "memory.pickle").stat().st_size
    assert breakdown.trace(work, tmp_path / "trace.json.gz")


# ---- the whole command


@pytest.mark.usefixtures("in_this_process")
def test_a_scan_goes_from_the_smallest_value_until_out_of_memory(tiny_yaml, tmp_path, capsys):
    tiny = ("--config", tiny_yaml, "--steps", 1, "--log_dir", tmp_path, "--scan")
    with refused("seq_len 64 is longer than block_size 32"):
        command_line(*tiny, "seq_len=8,16,64")
    assert not (tmp_path / "bench").exists()
    with pytest.raises(TrainingError, match="nothing could be measured: out of memory"):
        command_line(*tiny, f"batch_size={10**12}", "--log_dir", tmp_path / "failed")
    command_line(*tiny, f"batch_size={10**13},1,{10**12},2")
    assert f", {10**13} x 32: " not in capsys.readouterr().out
    (report,) = tmp_path.glob("bench/*/report.md")
    assert f", {10**12} x 32: out of memory" in report.read_text()
    rows = json.loads(report.with_name("results.json").read_text())
    passes = [(each["batch_size"], len(each["times_s"])) for each in rows]
    assert passes == [(1, 1), (2, 1)]
    assert report.with_name("scan.png").is_file()


@pytest.mark.usefixtures("in_this_process")
def test_a_grid_is_measured_and_compared_with(tiny_yaml, tmp_path):
    tiny = ("--config", tiny_yaml, "--steps", "2")
    command_line(*tiny, "--computation", "forward,training_step", f"--log_dir={tmp_path}")
    (folder,) = (tmp_path / "bench").iterdir()
    assert (folder / "times.png").is_file()
    rows = json.loads((folder / "results.json").read_text())
    assert {(each["computation"], each["warmup_steps"]) for each in rows} == {
        *itertools.product(("forward", "training_step"), (0, 1))
    }
    again = ("--computation", "forward", f"--log_dir={tmp_path}/again", "--batch_size=1")
    command_line(*tiny, *again, "--compare", folder / "results.csv")
    (report,) = tmp_path.glob("again/bench/*/report.md")
    assert "| there, s | here / there |" in report.read_text()
    assert "\nnote: batch_size differs: 1 here, 2 there\n" in report.read_text()


@pytest.mark.usefixtures("in_this_process")
def test_a_step_is_traced_and_broken_down(tiny_yaml, tmp_path, capsys):
    given = ("--trace", "--breakdown", "--steps", 1, "--log_dir", tmp_path)
    command_line("--config", tiny_yaml, *given)
    printed = capsys.readouterr().out
    assert "of which attention" in printed
    assert "aten::" in printed
    files = {path.name for path in tmp_path.glob("bench/*/*")}
    assert files == {"parts.md", "trace_tiny_full.json.gz"}
    with refused("nothing could be measured: --memory: only CUDA records its allocations"):
        command_line("--config", tiny_yaml, "--memory", "--log_dir", tmp_path / "memory")


# ---- the same batch on more ranks


def test_one_rank_and_two_train_the_same_batch_interleaved(tiny_yaml, corpus, tmp_path, forked):
    given = ("--scaling", "2,1", "--rounds", "6", "--log_dir", tmp_path / "logs")
    command_line("--config", tiny_yaml, *given, "--dataset=tiny", f"--data_dir={corpus}")
    (folder,) = (tmp_path / "logs/bench").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names == {"interleaved.json", "report.html", "report.md", "results.csv", "scaling.png"}

    one, two = json.loads((folder / "interleaved.json").read_text())["sides"]
    assert "--total_batch_tokens=64 --batch_size=1" in two["command"]
    # the same sequences
    assert one["turns"][0]["loss"] == pytest.approx(two["turns"][0]["loss"], abs=1e-5)
    for turn in two["turns"]:
        assert [rank["tokens"] for rank in turn["ranks"]] == [turn["tokens"]] * 2

    with (folder / "results.csv").open(newline="") as file:
        one, two = csv.DictReader(file)
    assert (one["ranks"], one["efficiency"]) == ("1", "1.0")
    assert (two["ranks"], two["batch_size"], two["micro_steps"]) == ("2", "1", "1")
    share = float(two["over_first"]) / float(two["hardware"])
    assert float(two["efficiency"]) == pytest.approx(share)


def test_a_batch_is_split_into_the_largest_micro_steps_that_fit(tiny_config):
    config = tiny_config(batch_size=8, total_batch_tokens=32 * 32)
    assert [batch_size_of(config, n) for n in (1, 2, 4, 8, 32)] == [8, 8, 8, 4, 1]
