"""The benchmark on tiny models: what is inside the clock, the arithmetic, a slow part found, runs
that fail.
"""

import csv
import itertools
import json
import math
import signal
import statistics
import sys

import pytest
import torch

import bench
from bench import BenchOptions
from benchmarks import parts, tables, workload
from benchmarks.workload import Job, Workload
from config import load_config
from model import GPT, GPTConfig
from runtime.cli import load, parse_command_line
from runtime.errors import UserError
from runtime.report import markdown_table, print_table
from tests.conftest import ROOT, TINY, run


@pytest.fixture
def tiny_yaml(tmp_path):
    """A training config of a tiny model, in a file."""
    (tmp_path / "tiny.yaml").write_text(
        "".join(
            f"{name}: {value}\n"
            for name, value in (TINY | {"seq_len": 32, "batch_size": 2, "device": "cpu"}).items()
        )
    )
    return str(tmp_path / "tiny.yaml")


@pytest.fixture
def in_this_process(monkeypatch):
    """Jobs are measured in this process, as a fresh one takes seconds to import torch, and the
    matrix-product rate is not.
    """
    monkeypatch.setattr(workload, "matmul_tflops", lambda *_: 1.0)
    for module in (workload, parts):
        monkeypatch.setattr(module, "in_fresh_process", answer)


class Connection(list):
    """The end of a pipe that a job answers through."""

    send = list.append

    def close(self):
        pass


def answer(function, *arguments):
    sent = Connection()
    workload._call(sent, function, arguments)
    return sent[0]


def command_line(*arguments):
    """What bench.py does with these arguments; returns its exit status."""
    try:
        bench.main(parse_command_line(BenchOptions, [str(argument) for argument in arguments]))
    except SystemExit as ended:
        return ended.code
    return 0


def tiny_job(computation="forward_backward", warmup_steps=(0, 2), steps=3, **options):
    config = load_config(**(TINY | {"seq_len": 32, "batch_size": 2, "device": "cpu"} | options))
    return Job("tiny", config, computation, warmup_steps, steps)


def test_only_the_pass_is_timed_between_two_synchronizations(monkeypatch):
    events = []
    monkeypatch.setattr(workload, "synchronize", lambda _: events.append("synchronize"))
    seconds = workload.time_passes(
        lambda: events.append("prepare") or "prepared",
        lambda given: events.append(given),
        2,
        torch.device("cpu"),
        clock=lambda: events.append("clock") or float(len(events)),
    )
    assert events == ["prepare", "synchronize", "clock", "prepared", "synchronize", "clock"] * 2
    assert seconds == [3.0, 3.0]


def test_the_table_is_whole_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    row = tables.Row(
        "medium",
        "forward_backward",
        0,
        False,
        mean_s=0.01234,
        tokens_per_sec=123456,
        tflops=654.32,
        utilization=0.5,
        peak_memory_mb=123456,
    )
    print_table("", tables.SHOWN, [row])
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert any(
        all(column.cell(row) in line for column in tables.SHOWN) for line in shown.splitlines()
    ), "a row has wrapped"
    assert any(
        all(column.heading in line for column in tables.SHOWN) for line in shown.splitlines()
    ), "the headings have wrapped"


def test_figures_follow_from_the_clock(monkeypatch):
    monkeypatch.setattr(workload, "matmul_tflops", lambda *_: 2e-5)
    durations = [8.0, 4.0, 2.0, 1.0, 3.0]
    ticks = iter(itertools.chain.from_iterable((0.0, seconds) for seconds in durations))
    cold, warm = workload.measure(tiny_job(), clock=lambda: next(ticks))
    assert (cold.warmup_steps, warm.warmup_steps) == (0, 2)
    assert (cold.times_s, warm.times_s) == ([8.0, 4.0, 2.0], [2.0, 1.0, 3.0])
    assert (warm.mean_s, warm.median_s, warm.min_s, warm.max_s, warm.total_s, warm.steps) == (
        2.0,
        2.0,
        1.0,
        3.0,
        6.0,
        3,
    )
    assert warm.std_s == statistics.pstdev([1, 2, 3])
    assert warm.tokens_per_sec == 2 * 32 / 2.0
    # 2 blocks of 12 C^2 + 13 C, the last norm, the tied-size head of 128 rows; 6 operations each,
    # and 12 L C T for attention
    multiplied = 2 * (12 * 32**2 + 13 * 32) + 2 * 32 + 128 * 32
    flops = 2 * 32 * (6 * multiplied + 12 * 2 * 32 * 32)
    assert warm.tflops == pytest.approx(flops / 2.0 / 1e12)
    assert warm.utilization == pytest.approx(warm.tflops / 2e-5)
    assert warm.settings["n_layer"] == 2
    assert warm.settings["batch_size"] == 2


def test_forward_is_a_third_of_the_operations_and_backward_two(monkeypatch):
    monkeypatch.setattr(workload, "matmul_tflops", lambda *_: 1.0)
    rates = {}
    for computation in ("forward", "backward", "forward_backward"):
        ticks = itertools.count()
        rates[computation] = workload.measure(
            tiny_job(computation, (0,), 2), clock=lambda ticks=ticks: next(ticks)
        )[0].tflops
    assert rates["forward"] * 3 == pytest.approx(rates["forward_backward"])
    assert rates["backward"] * 3 / 2 == pytest.approx(rates["forward_backward"])


def test_backward_gets_a_fresh_untimed_forward_and_cleared_gradients():
    work = Workload(tiny_job().config)
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
        work = Workload(tiny_job().config)
        before = work.raw_model.lm_head.weight.clone()
        prepare, timed = work.computation(computation)
        timed(prepare())
        assert torch.equal(before, work.raw_model.lm_head.weight) is not changes


def test_the_default_is_the_published_profile():
    jobs = bench.jobs_of(BenchOptions(), BenchOptions().computation)
    with open(ROOT / "logs/reference/timeit.csv", newline="") as file:
        published = {
            (
                row["size"],
                row["computation"],
                int(row["warmup_steps"]),
                row["mixed_precision"] == "true",
            )
            for row in csv.DictReader(file)
        }
    assert {
        (job.size, job.computation, warmup, job.config.bf16)
        for job in jobs
        for warmup in job.warmup_steps
    } == published
    assert {job.steps for job in jobs} == {5}
    medium = next(job.config for job in jobs if job.size == "medium")
    assert (medium.n_embd, medium.n_layer, medium.n_head, medium.batch_size, medium.seq_len) == (
        1024,
        24,
        16,
        16,
        128,
    )
    assert (medium.vocab_size, medium.norm, medium.bias, medium.activation) == (
        10_000,
        "rmsnorm",
        False,
        "gelu",
    )
    assert not medium.tie_weights
    assert medium.seed == 20230310


def test_the_profile_is_initialized_as_published():
    (_, config), _ = bench.job_configs(BenchOptions(size=("small",)))
    assert (config.init, config.residual_scaling) == ("gpt2", True)
    assert workload.settings(config).items() >= {"init": "gpt2", "residual_scaling": True}.items()
    small = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 64,
        "block_size": 32,
        "seq_len": 32,
        "batch_size": 2,
        "device": "cpu",
    }
    model = Workload(load_config(**(bench.PROFILE | small))).raw_model
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert model.transformer.h[0].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.transformer.h[0].mlp.c_proj.weight.std().item() == pytest.approx(
        0.02 / 2, rel=0.05
    )  # over sqrt(2 n_layer)


@pytest.mark.parametrize(
    ("has_bfloat16", "precision"), [(True, (True, False)), (False, (False, True))]
)
def test_mixed_rows_use_float16_where_a_gpu_lacks_bfloat16(monkeypatch, has_bfloat16, precision):
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation: has_bfloat16 or including_emulation,
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    full, mixed = load_config(**TINY, seq_len=32), load_config(**TINY, seq_len=32, bf16=True)
    config, notes = workload.with_mixed_precision_of(gpu, mixed)
    assert (config.bf16, config.fp16) == precision
    assert notes == (
        [] if has_bfloat16 else ["Old GPU has no bfloat16: mixed precision is float16 here"]
    )
    assert workload.with_mixed_precision_of(gpu, full) == (full, [])
    assert workload.with_mixed_precision_of(cpu, mixed) == (mixed, [])


def test_the_report_of_the_profile_tells_the_spread_and_what_is_not_as_published(
    tmp_path, monkeypatch, capsys
):
    def timed(job):
        rows = workload.failed_rows(job, "")
        for row in rows:
            row.mean_s, row.std_s, row.steps = (
                1.0,
                0.5 if row.warmup_steps == 0 else 0.125,
                job.steps,
            )
            row.settings["device"] = "cpu"
        return rows

    monkeypatch.setattr(bench, "time_job", timed)
    status = command_line(
        "--size", "small", "--warmup_steps", "0,1,3", "--batch_size", 2, "--log_dir", tmp_path
    )
    assert status == 0, capsys.readouterr().err
    report = next((tmp_path / "bench").iterdir()).joinpath("report.md").read_text()
    spread = report.partition("## What warm-up does to the spread")[2].partition("##")[0]
    assert "mean of 0.260 s and a std of 0.077 s" in spread
    assert (
        "lowers the std in 6 of 6 measurements; the median quotient, without over with, is 4."
        in spread
    )
    for computation in ("forward", "backward", "forward_backward"):
        for mixed in ("no", "yes"):
            assert f"| small | {computation} | {mixed} | 3 | 0.5 | 0.125 | 4 |" in spread
    unlike = report.partition("## What is not like the published code")[2]
    for difference in (
        "Device: cpu here",
        "Tokens: ",
        "bfloat16 autocast here, float16 autocast there",
        "Warm-up: ",
        "batch_size: 2 here, 16 there",
    ):
        assert difference in unlike
    assert "init" not in unlike


def test_rates_below_one_tflops_are_shown_in_gflops():
    row = tables.Row("small", "forward", 0, False, mean_s=1.0, tflops=0.0042)
    part = parts.Part("MLP", 1.0, 0.5, 0.0042)
    for columns, of in ((tables.REPORTED, row), (tables.SHOWN, row), (parts.PART, part)):
        table = "\n".join(markdown_table(columns, [of]))
        assert "| 4.2 GFLOP/s |" in table
        assert "TFLOP/s" not in table
    row.settings["batch_size"] = 1
    assert "| 4.2 GFLOP/s |" in markdown_table(tables.scan_columns("batch_size"), [row])[-1]


def test_a_training_config_gives_model_batch_and_precision(tiny_yaml):
    ((name, config),) = bench.job_configs(BenchOptions(config="speedup7"))
    assert (name, config.batch_size, config.vocab_size) == ("speedup7", 6, 50304)
    assert (config.bf16, config.compile, config.flash) == (True, True, True)
    ((_, config),) = bench.job_configs(
        BenchOptions(
            config="speedup7", mixed_precision=False, batch_size=2, compile=False, loss_chunks=8
        )
    )
    assert (config.batch_size, config.bf16, config.compile, config.loss_chunks) == (
        2,
        False,
        False,
        8,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"size": "tiny"},
            "--size: input should be 'small', 'medium', 'large' or 'xl', not 'tiny'",
        ),
        ({"computation": "fwd"}, "did you mean forward?"),
        (
            {"warmup_steps": "0,-1"},
            "--warmup_steps: input should be greater than or equal to 0, not '-1'",
        ),
        ({"steps": "0"}, "--steps: input should be greater than or equal to 1"),
        ({"scan": "lr=1,2"}, "write batch_size=1,2,4 or seq_len=128,256"),
        ({"scan": "batch_size=1,0"}, "write batch_size=1,2,4"),
        ({"scan": "batch_size=1", "batch_size": "3"}, "exclude each other"),
        ({"config": "speedup7", "size": "small"}, "exclude each other"),
        (
            {"compare": "x.csv", "breakdown": True},
            "compare has no effect with breakdown; leave it out",
        ),
        ({"steps": "3", "trace": True}, "steps has no effect with trace"),
        ({"scan": "batch_size=1", "warmup_steps": "0,1"}, "scan takes one number of warm-up steps"),
        ({"scan": "batch_size=\u00b2"}, "write batch_size=1,2,4"),
        ({"scan": "batch_size=" + "9" * 5000}, "write batch_size=1,2,4"),
        (
            {"steps": "9999999999999"},
            "--steps: input should be less than or equal to 1,000,000,000",
        ),
        ({"stepz": "1"}, "did you mean --steps?"),
    ],
)
def test_mistakes_are_one_line(options, message, capsys):
    argv = [f"--{name}" + ("" if value is True else f"={value}") for name, value in options.items()]
    with pytest.raises(SystemExit) as exit_:
        parse_command_line(BenchOptions, argv)
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(message in line for line in lines), lines
    assert all(line.startswith("error: ") for line in lines)


def test_the_breakdown_finds_a_planted_slow_part(monkeypatch):
    work = Workload(tiny_job().config)
    mlp = work.raw_model.transformer.h[1].mlp
    forward = mlp.forward
    clock = [0.0]  # moves on in the planted part alone: no other process can make this test fail
    monkeypatch.setattr(
        mlp, "forward", lambda x: clock.__setitem__(0, clock[0] + 0.06) or forward(x)
    )
    found = {
        part.part: part
        for part in parts.break_down(work, work.random_batch, steps=2, clock=lambda: clock[0])
    }
    assert list(found) == [
        "data",
        "embedding",
        "attention",
        "MLP",
        "head and loss",
        "backward",
        "head and loss, backward",
        "MLP, backward",
        "attention, backward",
        "embedding, backward",
        "optimizer",
    ]
    assert max(found.values(), key=lambda part: part.ms).part == "MLP"
    assert found["MLP"].ms > 50
    assert sum(
        part.share for part in found.values() if ", backward" not in part.part
    ) == pytest.approx(1)
    assert found["backward"].ms == pytest.approx(
        sum(part.ms for part in found.values() if ", backward" in part.part)
    )


def test_the_breakdown_finds_a_slow_backward():
    clock = [0.0]

    class SlowBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            clock[0] += 0.06
            return gradient

    work = Workload(tiny_job().config)
    work.raw_model.transformer.h[0].attn.register_forward_hook(
        lambda *args: SlowBackward.apply(args[-1])
    )
    ms = {
        part.part: part.ms
        for part in parts.break_down(work, work.random_batch, steps=2, clock=lambda: clock[0])
    }
    assert ms["attention, backward"] > 50
    assert (
        max((part for part in ms if ", backward" in part), key=ms.__getitem__)
        == "attention, backward"
    )


def test_the_parts_operations_add_up_to_the_models():
    config = load_config(n_layer=12, vocab_size=50304, tie_weights=True)
    with torch.device("meta"):
        per_token = GPT(GPTConfig.of(config)).flops_per_token(config.seq_len)
    assert 3 * sum(parts.part_flops(config, tokens=1).values()) == pytest.approx(
        per_token, rel=2e-3
    )


def pages_of_a_large_buffer():
    """New pages that a large buffer takes once some of its size have been freed."""
    import resource

    def pages():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    return min(pages() for _ in range(5))


@pytest.mark.skipif(sys.platform != "linux", reason="keeping memory is for Linux's C library")
def test_what_is_timed_keeps_memory_from_step_to_step_as_training_does():
    pages, error = workload.in_fresh_process(pages_of_a_large_buffer)
    assert error == ""
    assert pages < 1000  # of 16,384


def test_out_of_memory_and_a_killed_process_are_rows_and_the_rest_goes_on(tmp_path, monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    sent = Connection()
    workload._call(sent, out_of_memory, ())
    assert sent == [(None, "out of memory")]
    assert (
        workload.in_fresh_process(signal.raise_signal, signal.SIGKILL)[1]
        == "out of memory: the system killed the process"
    )
    assert [
        (row.error, row.warmup_steps) for row in workload.failed_rows(tiny_job(), "out of memory")
    ] == [("out of memory", 0), ("out of memory", 2)]

    with monkeypatch.context() as patch:
        patch.setattr(workload, "in_fresh_process", answer)
        rows = workload.time_job(tiny_job(batch_size=2**40))  # more than there is: a real failure
    assert rows[0].error
    assert math.isnan(rows[0].mean_s)
    rows += workload.time_job(tiny_job())  # a real process
    tables.write_results(rows, tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())
    assert [bool(row["error"]) for row in written] == [True, True, False, False]
    assert written[0]["mean_s"] is None
    assert written[2]["n_embd"] == 32
    means, settings = tables.read_results(tmp_path / "results.json")
    assert means == tables.read_results(tmp_path / "results.csv")[0]
    assert set(means) == {row.key for row in rows[2:]}
    assert settings["n_embd"] == 32


@pytest.mark.usefixtures("in_this_process")
def test_a_grid_of_which_nothing_could_be_measured_has_failed_and_says_why(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(bench, "time_job", lambda job: workload.failed_rows(job, "out of memory"))
    with pytest.raises(SystemExit) as ended:
        bench.main(BenchOptions(log_dir=str(tmp_path), size=("small",), device="cpu"))
    assert ended.value.code == 1
    assert "error: nothing could be measured: out of memory" in capsys.readouterr().err
    assert next(tmp_path.glob("bench/*/report.md")).is_file()


@pytest.mark.usefixtures("in_this_process")
def test_a_scan_stops_at_out_of_memory_and_keeps_what_fitted(
    tiny_yaml, tmp_path, monkeypatch, capsys
):
    real = bench.time_job
    monkeypatch.setattr(
        bench,
        "time_job",
        lambda job: (
            workload.failed_rows(job, "out of memory") if job.config.batch_size > 2 else real(job)
        ),
    )
    bench.scan(BenchOptions(config=tiny_yaml, scan="batch_size=8,1,4,2", steps=1), tmp_path)
    text = (tmp_path / "scan.md").read_text()
    assert "out of memory at 4." in text
    assert "batch_size 8" not in capsys.readouterr().out
    assert [row["batch_size"] for row in json.loads((tmp_path / "results.json").read_text())] == [
        1,
        2,
        4,
    ]
    assert (tmp_path / "scan.png").is_file()


def test_ratios_are_of_the_rows_that_differ_in_one_thing():
    means = {
        ("small", "forward", 0, False): 4.0,
        ("small", "forward", 1, False): 2.0,
        ("small", "forward", 1, True): 1.0,
        ("small", "backward", 1, False): 5.0,
    }
    assert tables.ratios(means) == {
        "backward over forward: small, full": 2.5,
        "mixed over full: small forward": 0.5,
        "warm-up 0 over 1: small forward, full": 2.0,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "has no column"),
        (
            '[{"size": "s", "computation": "c", "warmup_steps": 0, "mixed_precision": false, '
            '"mean_s": 0}]',
            "that is no duration",
        ),
        ("[1, 2]", "not a results file"),
        ("{", "not a results file"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_results_file_is_one_clear_error(tmp_path, content, message):
    path = tmp_path / ("r.csv" if content and content[0] == "a" else "r.json")
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        tables.read_results(path)


@pytest.mark.usefixtures("in_this_process")
def test_the_command_line_measures_compares_scans_and_traces(
    tiny_yaml, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert (
        command_line("--config", tiny_yaml, "--steps", 2, "--computation", "forward,training_step")
        == 0
    ), capsys.readouterr().err
    (folder,) = (tmp_path / "logs/bench").iterdir()
    assert {path.name for path in folder.iterdir()} == {
        "report.md",
        "results.csv",
        "results.json",
        "times.png",
    }
    rows = json.loads((folder / "results.json").read_text())
    assert {(row["size"], row["computation"], row["warmup_steps"]) for row in rows} == {
        ("tiny", computation, warmup)
        for computation in ("forward", "training_step")
        for warmup in (0, 1)
    }
    assert [row["mean_s"] for row in rows] == sorted(row["mean_s"] for row in rows)
    # the whole program, and a fresh process for its job
    again = run(
        "bench.py",
        "--config",
        tiny_yaml,
        "--steps",
        "2",
        "--computation",
        "forward",
        "--compare",
        folder / "results.csv",
        "--log_dir",
        "other",
        cwd=tmp_path,
    )
    assert again.returncode == 0, again.stderr
    assert (
        "here / there"
        in next((tmp_path / "other/bench").iterdir()).joinpath("report.md").read_text()
    )
    assert command_line("--config", tiny_yaml, "--compare", ROOT / "logs/reference/timeit.csv") == 2
    assert "has none of the rows to be measured" in capsys.readouterr().err

    scan = ("--config", tiny_yaml, "--steps", 1, "--log_dir", "scan", "--scan")
    assert command_line(*scan, "seq_len=8,16,64") == 2
    assert "seq_len 64 is longer than block_size 32" in capsys.readouterr().err
    status = command_line(*scan, "batch_size=2,1")
    out, err = capsys.readouterr()
    assert status == 0, err
    assert out.index("batch_size 1:") < out.index("batch_size 2:")
    status = command_line(
        "--config", tiny_yaml, "--trace", "--breakdown", "--steps", 1, "--log_dir", "parts"
    )
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "of which attention" in out
    assert "aten::" in out
    (folder,) = (tmp_path / "parts/bench").iterdir()
    assert {path.name for path in folder.iterdir()} == {"parts.md", "trace_tiny_full.json.gz"}


def test_memory_snapshots_need_cuda(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status = command_line("--memory", "--device", "cpu")
    assert (status, capsys.readouterr().err) == (
        2,
        "error: --memory: needs CUDA, the device is cpu; leave it out\n",
    )


@pytest.mark.gpu
def test_a_memory_snapshot_and_a_trace_of_a_gpu(tmp_path):
    work = Workload(load_config(**TINY, seq_len=32, device="cuda"))
    parts.snapshot(work, tmp_path / "memory.pickle")
    assert (tmp_path / "memory.pickle").stat().st_size
    assert parts.trace(work, tmp_path / "trace.json.gz")


def test_a_comma_list_is_read_from_the_command_line():
    assert load(BenchOptions, {"size": "small,xl", "warmup_steps": "0,5"}).warmup_steps == (0, 5)
