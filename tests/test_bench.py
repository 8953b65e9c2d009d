"""The benchmark on tiny models: what is inside the clock, the arithmetic, a slow part found, runs that fail."""

import csv
import itertools
import json
import math
import signal
import statistics
import time

import pytest
import torch

import bench
from bench import BenchOptions, Job
from config import UserError, load, load_config
from tests.conftest import ROOT, TINY, run


@pytest.fixture
def tiny_yaml(tmp_path):
    """A training config of a tiny model, in a file."""
    (tmp_path / "tiny.yaml").write_text("".join(f"{name}: {value}\n" for name, value in
                                                (TINY | {"seq_len": 32, "batch_size": 2, "device": "cpu"}).items()))
    return str(tmp_path / "tiny.yaml")


def tiny_job(computation="forward_backward", warmup_steps=(0, 2), steps=3, **options):
    config = load_config(**(TINY | {"seq_len": 32, "batch_size": 2, "device": "cpu"} | options))
    return Job("tiny", config, computation, warmup_steps, steps)


def test_only_the_pass_is_timed_between_two_synchronizations(monkeypatch):
    events = []
    monkeypatch.setattr(bench, "synchronize", lambda _: events.append("synchronize"))
    seconds = bench.time_passes(lambda: events.append("prepare") or "prepared", lambda given: events.append(given), 2,
                                torch.device("cpu"), clock=lambda: events.append("clock") or float(len(events)))
    assert events == ["prepare", "synchronize", "clock", "prepared", "synchronize", "clock"] * 2
    assert seconds == [3.0, 3.0]


def test_the_table_is_whole_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    row = bench.Row("medium", "forward_backward", 0, False, mean_s=0.01234, tokens_per_sec=123456, tflops=654.32,
                    utilization=0.5, peak_memory_mb=123456)
    bench.show("", [bench.HEADER[i] for i in bench.SHOWN], [[bench.cells(row)[i] for i in bench.SHOWN]])
    assert "…" not in capsys.readouterr().out


def test_figures_follow_from_the_clock(monkeypatch):
    monkeypatch.setattr(bench, "matmul_tflops", lambda *_: 2e-6)
    durations = [8.0, 4.0, 2.0, 1.0, 3.0]
    ticks = iter(itertools.chain.from_iterable((0.0, seconds) for seconds in durations))
    cold, warm = bench.measure(tiny_job(), clock=lambda: next(ticks))
    assert (cold.warmup_steps, warm.warmup_steps) == (0, 2)
    assert (cold.times_s, warm.times_s) == ([8.0, 4.0, 2.0], [2.0, 1.0, 3.0])
    assert (warm.mean_s, warm.median_s, warm.min_s, warm.max_s, warm.total_s, warm.steps) == (2.0, 2.0, 1.0, 3.0, 6.0, 3)
    assert warm.std_s == statistics.pstdev([1, 2, 3])
    assert warm.tokens_per_sec == 2 * 32 / 2.0
    # 2 blocks of 12 C^2 + 13 C, the last norm, the tied-size head of 128 rows; 6 operations each, and 12 L C T for attention
    multiplied = 2 * (12 * 32**2 + 13 * 32) + 2 * 32 + 128 * 32
    flops = 2 * 32 * (6 * multiplied + 12 * 2 * 32 * 32)
    assert warm.tflops == pytest.approx(flops / 2.0 / 1e12)
    assert warm.utilization == pytest.approx(warm.tflops / 2e-6)
    assert warm.settings["n_layer"] == 2
    assert warm.settings["batch_size"] == 2


def test_forward_is_a_third_of_the_operations_and_backward_two(monkeypatch):
    monkeypatch.setattr(bench, "matmul_tflops", lambda *_: 1.0)
    rates = {}
    for computation in ("forward", "backward", "forward_backward"):
        ticks = itertools.count()
        rates[computation] = bench.measure(tiny_job(computation, (0,), 2), clock=lambda ticks=ticks: next(ticks))[0].tflops
    assert rates["forward"] * 3 == pytest.approx(rates["forward_backward"])
    assert rates["backward"] * 3 / 2 == pytest.approx(rates["forward_backward"])


def test_backward_gets_a_fresh_untimed_forward_and_cleared_gradients():
    work = bench.Workload(tiny_job().config)
    prepare, timed = work.computation("backward")
    gradients = []
    for _ in range(2):
        loss = prepare()
        assert all(p.grad is None for p in work.raw_model.parameters())
        timed(loss)
        gradients.append(work.raw_model.lm_head.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_a_training_step_changes_the_weights_and_forward_backward_does_not():
    for computation, changes in (("training_step", True), ("forward_backward", False)):
        work = bench.Workload(tiny_job().config)
        before = work.raw_model.lm_head.weight.clone()
        prepare, timed = work.computation(computation)
        timed(prepare())
        assert torch.equal(before, work.raw_model.lm_head.weight) is not changes


def test_the_default_is_the_published_profile():
    jobs = bench.jobs_of(BenchOptions(), BenchOptions().computation)
    with open(ROOT / "logs/reference/timeit.csv", newline="") as file:
        published = {(row["size"], row["computation"], int(row["warmup_steps"]), row["mixed_precision"] == "true")
                     for row in csv.DictReader(file)}
    assert {(job.size, job.computation, warmup, job.config.bf16) for job in jobs for warmup in job.warmup_steps} == published
    assert {job.steps for job in jobs} == {5}
    medium = next(job.config for job in jobs if job.size == "medium")
    assert (medium.n_embd, medium.n_layer, medium.n_head, medium.batch_size, medium.seq_len) == (1024, 24, 16, 16, 128)
    assert (medium.vocab_size, medium.norm, medium.bias, medium.activation) == (10_000, "rmsnorm", False, "gelu")
    assert not medium.tie_weights
    assert medium.seed == 20230310


def test_a_training_config_gives_model_batch_and_precision(tiny_yaml):
    (name, config), = bench.job_configs(BenchOptions(config="speedup7"))
    assert (name, config.batch_size, config.vocab_size) == ("speedup7", 6, 50304)
    assert (config.bf16, config.compile, config.flash) == (True, True, True)
    (_, config), = bench.job_configs(BenchOptions(config="speedup7", mixed_precision=False, batch_size=2, compile=False))
    assert (config.batch_size, config.bf16, config.compile) == (2, False, False)


@pytest.mark.parametrize(("options", "message"), [
    ({"size": "tiny"}, "--size: input should be 'small', 'medium', 'large' or 'xl', not 'tiny'"),
    ({"computation": "fwd"}, "did you mean forward?"),
    ({"warmup_steps": "0,-1"}, "--warmup_steps: input should be greater than or equal to 0, not '-1'"),
    ({"steps": "0"}, "--steps: input should be greater than or equal to 1"),
    ({"scan": "lr=1,2"}, "write batch_size=1,2,4 or seq_len=128,256"),
    ({"scan": "batch_size=1,0"}, "write batch_size=1,2,4"),
    ({"scan": "batch_size=1", "batch_size": "3"}, "exclude each other"),
    ({"config": "speedup7", "size": "small"}, "exclude each other"),
    ({"compare": "x.csv", "breakdown": True}, "compare has no effect with breakdown; leave it out"),
    ({"steps": "3", "trace": True}, "steps has no effect with trace"),
    ({"scan": "batch_size=1", "warmup_steps": "0,1"}, "scan takes one number of warm-up steps"),
    ({"scan": "batch_size=\u00b2"}, "write batch_size=1,2,4"),
    ({"stepz": "1"}, "did you mean --steps?"),
])
def test_mistakes_are_one_line(options, message, capsys):
    argv = [f"--{name}" + ("" if value is True else f"={value}") for name, value in options.items()]
    with pytest.raises(SystemExit) as exit_:
        bench.parse_command_line(BenchOptions, argv)
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(message in line for line in lines), lines
    assert all(line.startswith("error: ") for line in lines)


def test_the_breakdown_finds_a_planted_slow_part(monkeypatch):
    work = bench.Workload(tiny_job().config)
    mlp = work.raw_model.transformer.h[1].mlp
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda x: time.sleep(0.05) or forward(x))
    parts = {part.part: part for part in bench.break_down(work, work.random_batch, steps=2)}
    assert list(parts) == ["data", "embedding", "attention", "MLP", "head and loss", "backward", "head and loss, backward",
                           "MLP, backward", "attention, backward", "embedding, backward", "optimizer"]
    assert max(parts.values(), key=lambda part: part.ms).part == "MLP"
    assert parts["MLP"].ms > 50
    assert sum(part.share for part in parts.values() if ", backward" not in part.part) == pytest.approx(1)
    assert parts["backward"].ms == pytest.approx(sum(part.ms for part in parts.values() if ", backward" in part.part))


def test_the_breakdown_finds_a_slow_backward():
    class SlowBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(0.05)
            return gradient

    work = bench.Workload(tiny_job().config)
    work.raw_model.transformer.h[0].attn.register_forward_hook(lambda *args: SlowBackward.apply(args[-1]))
    parts = {part.part: part.ms for part in bench.break_down(work, work.random_batch, steps=2)}
    assert parts["attention, backward"] > 50
    assert max((part for part in parts if ", backward" in part), key=parts.__getitem__) == "attention, backward"


def test_the_parts_operations_add_up_to_the_models():
    config = load_config(n_layer=12, vocab_size=50304, tie_weights=True)
    with torch.device("meta"):
        per_token = bench.GPT(bench.GPTConfig.of(config)).flops_per_token(config.seq_len)
    assert 3 * sum(bench.part_flops(config, tokens=1).values()) == pytest.approx(per_token, rel=2e-3)


def test_out_of_memory_and_a_killed_process_are_rows_and_the_rest_goes_on(tmp_path):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    class Connection(list):
        send = list.append

        def close(self):
            pass

    sent = Connection()
    bench._call(sent, out_of_memory, ())
    assert sent == [(None, "out of memory")]
    assert bench.in_fresh_process(signal.raise_signal, signal.SIGKILL)[1] == "out of memory: the system killed the process"
    assert [(row.error, row.warmup_steps) for row in bench.failed_rows(tiny_job(), "out of memory")] == [
        ("out of memory", 0), ("out of memory", 2)]

    rows = bench.run(tiny_job(batch_size=2**40))  # more than there is: a real process, a real failure
    assert rows[0].error
    assert math.isnan(rows[0].mean_s)
    rows += bench.run(tiny_job())
    bench.write_results(rows, tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())
    assert [bool(row["error"]) for row in written] == [True, True, False, False]
    assert written[0]["mean_s"] is None
    assert written[2]["n_embd"] == 32
    means, settings = bench.read_results(tmp_path / "results.json")
    assert means == bench.read_results(tmp_path / "results.csv")[0]
    assert set(means) == {row.key for row in rows[2:]}
    assert settings["n_embd"] == 32


def test_a_scan_stops_at_out_of_memory_and_keeps_what_fitted(tiny_yaml, tmp_path, monkeypatch, capsys):
    real = bench.run
    monkeypatch.setattr(
        bench, "run", lambda job: bench.failed_rows(job, "out of memory") if job.config.batch_size > 2 else real(job))
    bench.scan(BenchOptions(config=tiny_yaml, scan="batch_size=8,1,4,2", steps=1), tmp_path)
    text = (tmp_path / "scan.md").read_text()
    assert "out of memory at 4." in text
    assert "batch_size 8" not in capsys.readouterr().out
    assert [row["batch_size"] for row in json.loads((tmp_path / "results.json").read_text())] == [1, 2, 4]
    assert (tmp_path / "scan.png").is_file()


def test_ratios_are_of_the_rows_that_differ_in_one_thing():
    means = {("small", "forward", 0, False): 4.0, ("small", "forward", 1, False): 2.0, ("small", "forward", 1, True): 1.0,
             ("small", "backward", 1, False): 5.0}
    assert bench.ratios(means) == {"backward over forward: small, full": 2.5, "mixed over full: small forward": 0.5,
                                   "warm-up 0 over 1: small forward, full": 2.0}


@pytest.mark.parametrize(("content", "message"), [
    ("a,b\n1,2\n", "has no column"),
    ('[{"size": "s", "computation": "c", "warmup_steps": 0, "mixed_precision": false, "mean_s": 0}]', "that is no duration"),
    ("[1, 2]", "not a results file"), ("{", "not a results file"), (None, "cannot be read")])
def test_a_bad_results_file_is_one_clear_error(tmp_path, content, message):
    path = tmp_path / ("r.csv" if content and content[0] == "a" else "r.json")
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        bench.read_results(path)


def test_the_command_line_measures_compares_scans_and_traces(tiny_yaml, tmp_path):
    first = run("bench.py", "--config", tiny_yaml, "--steps", "2", "--computation", "forward,training_step", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    folder, = (tmp_path / "logs/bench").iterdir()
    assert {path.name for path in folder.iterdir()} == {"report.md", "results.csv", "results.json", "times.png"}
    rows = json.loads((folder / "results.json").read_text())
    assert {(row["size"], row["computation"], row["warmup_steps"]) for row in rows} == {
        ("tiny", computation, warmup) for computation in ("forward", "training_step") for warmup in (0, 1)}
    assert [row["mean_s"] for row in rows] == sorted(row["mean_s"] for row in rows)
    again = run("bench.py", "--config", tiny_yaml, "--steps", "2", "--computation", "forward", "--compare", folder / "results.csv",
                "--log_dir", "other", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "here / there" in next((tmp_path / "other/bench").iterdir()).joinpath("report.md").read_text()
    unlike = run("bench.py", "--config", tiny_yaml, "--compare", ROOT / "logs/reference/timeit.csv", cwd=tmp_path)
    assert unlike.returncode == 2
    assert "has none of the rows to be measured" in unlike.stderr

    scanned = run("bench.py", "--config", tiny_yaml, "--steps", "1", "--scan", "seq_len=8,16,64", "--log_dir", "scan", cwd=tmp_path)
    assert scanned.returncode == 2
    assert "seq_len 64 is longer than block_size 32" in scanned.stderr
    scanned = run("bench.py", "--config", tiny_yaml, "--steps", "1", "--scan", "batch_size=2,1", "--log_dir", "scan", cwd=tmp_path)
    assert scanned.returncode == 0, scanned.stderr
    assert scanned.stdout.index("batch_size 1:") < scanned.stdout.index("batch_size 2:")
    inspected = run("bench.py", "--config", tiny_yaml, "--trace", "--breakdown", "--steps", "1", "--log_dir", "parts", cwd=tmp_path)
    assert inspected.returncode == 0, inspected.stderr
    assert "of which attention" in inspected.stdout
    assert "aten::" in inspected.stdout
    folder, = (tmp_path / "parts/bench").iterdir()
    assert {path.name for path in folder.iterdir()} == {"parts.md", "trace_tiny_full.json.gz"}


def test_memory_snapshots_need_cuda(tmp_path):
    done = run("bench.py", "--memory", "--device", "cpu", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: --memory: needs CUDA, the device is cpu; leave it out\n")


@pytest.mark.gpu
def test_a_memory_snapshot_and_a_trace_of_a_gpu(tmp_path):
    work = bench.Workload(load_config(**TINY, seq_len=32, device="cuda"))
    bench.snapshot(work, tmp_path / "memory.pickle")
    assert (tmp_path / "memory.pickle").stat().st_size
    assert bench.trace(work, tmp_path / "trace.json.gz")


def test_a_comma_list_is_read_from_the_command_line():
    assert load(BenchOptions, {"size": "small,xl", "warmup_steps": "0,5"}).warmup_steps == (0, 5)
