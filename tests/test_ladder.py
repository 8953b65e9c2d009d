"""Ladders climbed for real on tiny models: runs, records, reports, failures."""

import csv
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import ladder
import runtime.report as reports
from config import Config
from measure.interleaved import rounds
from measure.interleaved.comparison import Comparison
from measure.interleaved.ratio import product
from measure.interleaved.rounds import SideError
from measure.ladder import quick, stages
from measure.ladder import record as records
from measure.ladder import report as ladder_report
from measure.ladder import rungs as comparison
from measure.ladder.device import Device, measure_device
from measure.ladder.record import Record, Summary
from measure.report import pictures, tables
from runtime.cli import CONFIG_DIR, Options, parse
from runtime.errors import UserError, why_it_failed
from tests.conftest import ROOT, TINY, ended, forks, run, start, wait_for
from tests.test_resume import needs_proc

HEADER = "step,loss,lr,norm,dt_ms,tokens_per_sec\n"
FACTORS = "stage,base,over_base,over_base_low,over_base_high\n"
OFF = ("--rounds", "0")


@pytest.fixture(autouse=True)
def nothing_is_known_of_this_machine(monkeypatch):
    """But its name: asking it starts a process that imports PyTorch."""
    monkeypatch.setattr(ladder, "measure_device", lambda _: Device(name="cpu"))


@pytest.fixture
def rungs(corpus, tmp_path, monkeypatch):
    """Two configs of a tiny model, `plain.yaml` and `flash.yaml`, in the working directory."""
    monkeypatch.chdir(tmp_path)
    plain = TINY | {"dataset": "tiny", "device": "cpu", "seq_len": 32, "batch_size": 4}
    plain |= {"max_steps": 12, "lr": 1e-3, "lr_schedule": "cosine"}
    (tmp_path / "plain.yaml").write_text(json.dumps(plain))
    (tmp_path / "flash.yaml").write_text("{base: plain.yaml, flash: true}")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "logs" / "ladder"


def climb(*arguments):
    """The command line `python ladder.py ...` in this process; returns its exit status."""
    own, of_runs = ladder.split_command_line(list(arguments))
    options = parse(ladder.LadderOptions, own, positional="configs")
    try:
        ladder.main(options, of_runs)
    except SystemExit as stopped:
        return stopped.code
    return 0


def plan(*configs, folder="logs", of_runs=(), **found):
    return stages.plan(configs, str(folder), of_runs, Device(**found))[1]


def table(path):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return {row.get("stage") or row["optimization"]: row for row in rows}


def fake_run(stage, rate=100.0):
    """Write the files of a finished run, without running it."""
    stage.folder.mkdir(parents=True, exist_ok=True)
    (stage.folder / "config.yaml").write_text(stage.config.to_yaml())
    rows = "".join(f"{step},6.0,0.1,1.0,10,{rate}\n" for step in range(1, 51))
    (stage.folder / "log.csv").write_text(HEADER + rows)
    summary = dict.fromkeys(Summary.model_fields, "10")
    summary |= {"median_tokens_per_sec": rate, "interrupted": False, "world_size": stage.ranks}
    (stage.folder / "summary.json").write_text(json.dumps(summary))
    stage.forget()


def finished(*configs, folder):
    stages = plan(*configs, folder=folder)
    for stage in stages:
        fake_run(stage)
    return stages


def fake_comparison(stage, factor, **about):
    """Record the interleaved runs of a stage and its base, without any."""
    turns = [{"seconds": [1.0], "tokens": 1, "peak_memory_mb": 10.0 * factor}]
    sides = [
        {"name": "any", "tokens_per_sec": [rate] * 6, "turns": turns} for rate in (1.0, factor)
    ]
    configs = [records.settings(side.config) for side in (stage.base, stage)]
    about = {"machine": "any", "device": "any", "left_out": 3, "settings": configs} | about
    record = stage.record
    record.comparisons |= {stage.name: Comparison(**about, sides=sides)}
    record.save()


# ---- climbing


def test_a_run_whose_schedule_ends_at_a_rate_that_is_not_set_counts_as_finished(tmp_path):
    (stage,) = finished("quickstart", folder=tmp_path)  # its config.yaml contains min_lr
    assert stage.config.min_lr is None
    assert stage.finished


@pytest.mark.usefixtures("rungs", "forked")
def test_a_failing_stage_is_reported_and_the_others_go_on(tmp_path, folder, capsys):
    (tmp_path / "bad.yaml").write_text("base: plain.yaml\nlr: 1e30\n")
    assert climb("--nproc_per_node", "2", "bad.yaml", "flash.yaml", *OFF) == 1
    assert list(table(folder / "results.csv")) == ["flash"]
    for text in (capsys.readouterr().out, (folder / "report.md").read_text()):
        assert "failed: bad: step " in text
    assert json.loads((folder / "flash/summary.json").read_text())["world_size"] == 2


@pytest.mark.usefixtures("rungs", "forked")
def test_a_run_ends_with_its_ladder_at_ctrl_c(tmp_path, folder):
    (tmp_path / "long.yaml").write_text("base: plain.yaml\nmax_steps: 1000000\n")
    command, log = ["plain.yaml", "long.yaml", *OFF], folder / "long/log.csv"
    with ended([start("ladder.py", *command, cwd=tmp_path, before=forks)]) as (process,):
        wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 3, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert "interrupted; finished stages are kept, the same command resumes" in errors
    assert any(map(is_at_rest, [log] * 20)), "the run goes on writing"
    assert climb("--report_only", *command) == 0
    assert list(table(folder / "results.csv")) == ["plain"]


STARTS = {
    "run_commands": "from measure.ladder.stages import run_commands; run_commands([CHILD], [{}])",
    "Side": "from measure.interleaved.rounds import Side; Side('any', CHILD).__enter__().train()",
    "in_fresh_process": "from measure.interleaved.process import in_fresh_process as call; "
    "call('runpy:run_path', 'child.py')",
}


@needs_proc
@pytest.mark.parametrize("way", STARTS)
def test_processes_end_with_the_command_that_started_them_even_if_it_is_killed(way, tmp_path):
    child = "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()) + '.')\n"
    (tmp_path / "child.py").write_text(child + "time.sleep(1000)\n")
    code = f"import sys; CHILD = [sys.executable, 'child.py']; {STARTS[way]}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command, pid = [sys.executable, "-c", code], tmp_path / "pid"
    with ended([subprocess.Popen(command, cwd=tmp_path, env=environment)]) as (process,):
        wait_for(lambda: pid.exists() and pid.read_text().endswith("."), process)
    wait_for(lambda: not is_running(int(pid.read_text()[:-1])), None)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_at_rest(log):
    size = log.stat().st_size
    time.sleep(0.5)
    return log.stat().st_size == size


@pytest.mark.usefixtures("rungs")
def test_two_ladders_do_not_climb_in_one_folder(tmp_path, folder):
    with ladder.sole_writer(folder):
        done = run("ladder.py", "plain.yaml", *OFF, cwd=tmp_path, before=forks)
    assert done.returncode == 1
    assert done.stderr == "error: logs/ladder: another process is writing it\n"
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("speedpu", "speedpu: no such config file, here or in configs/; did you mean speedup?"),
        ("configs/mine", "configs/mine: no such config file, here or in configs/, which has "),
        (f"{ROOT}/configs/reference", "configs/reference: no such config file"),
        ("", "name a series (speedup, a100, as_logged, cpu, gpu_ms, modern, mps, timeit), a"),
        ("speedup -- --max_step 3", "--max_step: unknown option; did you mean --max_steps"),
        ("speedup -- --n_embd 100", "n_embd 100 does not divide into 12 heads"),
        ("--plot nowhere", "nowhere/log.csv: cannot be read"),
        ("speedup --report_only", "logs/speedup: no finished stage to report"),
        ("speedup --reruns", "--reruns: unknown option; did you mean --rerun?"),
        ("a100 --quick", "--quick: is for the speedup ladder"),
        ("speedup --rounds 3", "--rounds 3: at least 6 make an interval"),
        ("--ablate speedup", "--ablate takes one config, such as speedup10.yaml"),
        ("--ablate baseline", "baseline: has no optimization on"),
        ("--ablate --plot x", "--ablate, --across and --plot exclude each other"),
        ("--configs", "--configs: is given without a flag"),
        ("baseline -- --config y", "--config after --: the ladder sets it for each run"),
        ("baseline -- --run_name=x", "--run_name after --"),
        ("speedup --report_only --log_dir=", "--log_dir: string should have at least 1 character"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        climb(*arguments.split())
    assert raised.value.status == 2
    assert len(str(raised.value)) < 300, "a message that lists everything says nothing"
    assert not list(tmp_path.iterdir())


def test_an_option_of_the_runs_goes_after_two_dashes(tmp_path):
    done = run("ladder.py", "speedup", "--no-bf16", "5", cwd=tmp_path)
    assert done.returncode == 2
    assert "--no-bf16: is an option of the runs, and goes after --" in done.stderr


@pytest.mark.parametrize("damage", ["[]", '{"steps": ' + "9" * 5000, "NaN"])
def test_a_stage_whose_summary_is_damaged_counts_as_not_finished(damage, tmp_path):
    (stage,) = finished("baseline", folder=tmp_path)
    path = stage.folder / "summary.json"
    assert stage.finished
    path.write_text(damage if damage != "NaN" else path.read_text().replace('"10"', damage))
    stage.forget()
    assert stage.run_or_reason == (None, "summary.json is damaged")


def test_why_a_stage_is_not_finished_is_said(tmp_path, monkeypatch):
    for status, printed, reason in (
        (-9, "a warning\n", "killed by signal 9, as the system does when memory runs out"),
        (1, "a warning\nerror: full\nmore\n", "full"),
        (1, "", "exit status 1"),
    ):
        assert why_it_failed(status, io.StringIO(printed)) == reason
    monkeypatch.setattr(stages, "run_commands", lambda *_: [None])  # status 0, after a signal
    (stage,) = plan("baseline", folder=tmp_path)
    stages.run_stages([stage], rerun=False)
    assert stage.error == "stopped before its last step; the same command runs it again"
    # one of which no stage could run has failed, one that did not run is a mistake
    for stage.error, status in (("boom", 1), (None, 2)):
        with pytest.raises(UserError, match="no finished stage to report") as raised:
            ladder_report.report("ladder", [stage])
        assert raised.value.status == status


def test_a_report_says_why_a_stage_or_its_interleaved_rounds_are_left_out(tmp_path, capsys):
    names = ["baseline", "speedup1", "speedup2", "speedup3", "speedup4", "speedup5"]
    _, damaged, gone, begun, _, old = found = finished(*names, folder=tmp_path)
    (damaged.folder / "summary.json").write_text("{}")
    shutil.rmtree(gone.folder)
    (begun.folder / "summary.json").unlink()
    fake_comparison(old, 1.5)
    old.record.comparisons["speedup5"].settings[1]["max_steps"] = 7
    assert ladder_report.report("ladder", found) == []
    folder = old.record.folder
    printed, written = capsys.readouterr().out, (folder / "report.md").read_text()
    for line in (
        f"note: speedup1 is left out: {damaged.folder}: summary.json is damaged\n",
        f"note: speedup3 is left out: {begun.folder}: not finished\n",
        "note: the interleaved rounds of speedup5 are left out: "
        f"{folder}: max_steps 7 there, 50 here\n",
    ):
        assert line in printed
        assert line in written
    assert "speedup2" not in written.replace("speedup2 and", "")
    found = plan("baseline", of_runs=["--batch_size=1", "--no-bias"], folder=tmp_path)
    reason = "bias on there, off here, batch_size 2 there, 1 here"
    with pytest.raises(UserError, match=f"baseline is left out: .*: {reason}$"):
        ladder_report.report("ladder", found)


def test_what_is_the_same_of_several_runs_is_reported_once(tmp_path):
    found = finished("baseline", "a100/opt0", "a100/opt1", folder=tmp_path)
    ladder_report.report("ladder", found)
    text = (tmp_path / "ladder/report.md").read_text()
    assert "- `baseline`: 10 steps of 2 x 1024 tokens\n" in text
    assert "- `opt0`, `opt1`: 10 steps of 8 x 1024 tokens\n" in text


# ---- a report alone


RESULTS = ROOT / "logs" / "results" / "epyc-avx512bf16-2cores"
NO_PROCESS_NO_TORCH = """
import atexit, runpy, sys
events = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system")
def watch(event, arguments):
    if event in events and "fc-list" not in str(arguments):  # matplotlib's list of fonts
        raise SystemExit(f"started a process: {arguments}")
sys.addaudithook(watch)
atexit.register(lambda: print("torch" in sys.modules))
sys.path.insert(0, {root!r})
sys.argv = ["ladder.py", *{arguments!r}]
runpy.run_path({root!r} + "/ladder.py", run_name="__main__")
"""


def stored(name, tmp_path):
    """The record of one of our ladders, alone in a folder."""
    (tmp_path / name).mkdir()
    return Path(shutil.copy(RESULTS / name / "ladder.json", tmp_path / name))


def is_the_stored_report(name, tmp_path):
    return all(
        (tmp_path / name / file).read_bytes() == (RESULTS / name / file).read_bytes()
        for file in ("report.md", "results.csv")
    )


def test_a_report_alone_starts_no_process_and_does_not_import_torch(tmp_path):
    record = stored("speedup", tmp_path)
    arguments = ["speedup", "--report_only", "--log_dir", str(tmp_path)]
    code = NO_PROCESS_NO_TORCH.format(root=str(ROOT), arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "False"
    # 19 stages with speedup1_medium, climbed with -- --batch_size 1 --max_steps 12
    assert is_the_stored_report("speedup", tmp_path)
    assert record.read_bytes() == (RESULTS / "speedup/ladder.json").read_bytes()


class More(Options):
    """more"""

    newer: bool = False
    """an option that runs so far did not have"""


class LaterConfig(More, Config):
    """Options of later code."""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("speedup_quick", ["speedup", "--quick"]),
        ("modern", ["modern"]),
        ("ablate_speedup10", ["--ablate", "speedup10"]),
    ],
)
def test_a_stored_ladder_gives_the_same_report_with_later_code(
    name, arguments, tmp_path, monkeypatch
):
    """Which has one option more, and one less."""
    record = stored(name, tmp_path)
    record.write_text(record.read_text().replace('"n_layer"', '"older": false, "n_layer"'))
    monkeypatch.setattr(records, "Config", LaterConfig)
    assert climb(*arguments, "--report_only", "--log_dir", str(tmp_path)) == 0
    assert is_the_stored_report(name, tmp_path)


def test_the_files_of_earlier_versions_are_a_record_too(tmp_path):
    found = plan("baseline", "speedup1", folder=tmp_path)
    for stage in found:
        fake_run(stage)
    fake_comparison(found[1], 1.5)
    ladder_report.report("ladder", found)
    folder = found[0].record.folder
    (interleaved,) = json.loads((folder / "ladder.json").read_text())["comparisons"].values()
    for path in ("speedup1/interleaved.json", "speedup1_first.json"):
        (folder / path).write_text(json.dumps(interleaved))
    rates = {"tflops": {"float32": 1.0}, "gigabytes_per_s": 1.0, "launch_us": 1.0}
    (folder / "predicted.json").write_text(json.dumps({"rates": rates, "stages": {}}))
    (folder / "ladder.json").unlink()
    earlier = Record.load(folder)
    assert earlier.comparisons.keys() == {"speedup1", "speedup1_first"}
    assert earlier.comparisons["speedup1"].ratio().value == 1.5
    assert earlier.predicted.rates == Device(**rates)


def test_every_file_that_the_results_page_names_exists():
    page = ROOT / "docs/results.md"
    named = {*re.findall(r"\]\((?!http)([^)#]+)", page.read_text())}
    assert len(named) > 20
    assert [path for path in named if not (page.parent / path).exists()] == []


def test_a_damaged_record_is_one_clear_error(tmp_path):
    (tmp_path / "ladder").mkdir()
    (tmp_path / "ladder/ladder.json").write_text('{"runs": {')
    with pytest.raises(UserError, match=r"^\S+ladder.json: is damaged: .*; delete it or restore"):
        plan("baseline", folder=tmp_path)


def test_an_option_that_is_gone_but_was_on_makes_other_settings(tmp_path):
    stage, _ = found = finished("baseline", "speedup1", folder=tmp_path)
    path = stage.folder / "config.yaml"
    path.write_text(f"older: 3\n{path.read_text()}")
    stage.forget()
    assert "baseline is left out" in ladder_report.left_out(found)[0]
    assert "older: unknown option" in ladder_report.left_out(found)[0]


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "a GPU without it"])
def test_a_report_alone_has_the_options_and_the_stages_of_the_climb(bf16, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {"bf16": bf16, "medium": True, "gpus": 2}
    options = ["--batch_size", "1", "--betas", "0.8,0.9"]
    runs = climbed(monkeypatch, found, "speedup", "--nproc_per_node", "2", *OFF, "--", *options)
    names = ["baseline", "speedup1", "speedup1_medium", "speedup3", "speedup15", "ddp"]
    for name in names:
        fake_run(runs[name])
    monkeypatch.setattr(ladder, "measure_device", None)
    assert climb("speedup", "--report_only") == 0
    assert list(table(Path("logs/speedup/results.csv"))) == names
    # options that are given now count too
    with pytest.raises(UserError, match=r"speedup3 is left out: .*: n_layer 12 there, 2 here"):
        climb("speedup", "--report_only", "--", "--n_layer", "2")


def test_a_report_alone_of_an_ablation_has_the_options_of_the_climb(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "measure_device", lambda _: Device(bf16=False))

    def interleave_stages(found, *_):
        for stage in found:
            fake_comparison(stage, 1.5)

    monkeypatch.setattr(ladder, "interleave_stages", interleave_stages)
    assert climb("--ablate", "speedup3", "--", "--batch_size=1") == 0
    monkeypatch.setattr(ladder, "measure_device", None)
    folder = Path("logs/ablate_speedup3")
    (folder / "results.csv").unlink()
    assert climb("--ablate", "speedup3", "--report_only") == 0
    rows = table(folder / "results.csv")
    assert rows.keys() == {"fp16", "tf32", "tie_weights"}
    assert {row["first"] for row in rows.values()} == {"1.5"}
    with pytest.raises(UserError, match=r"of tf32_first .*: seed 1337 there, 7 here"):
        climb("--ablate", "speedup3", "--report_only", "--", "--seed", "7")


# ---- interleaved runs


@pytest.mark.usefixtures("rungs", "forked")
def test_each_rung_runs_once_and_is_interleaved_once_with_its_base(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(rounds, "TURN_SECONDS", 0.01)
    (tmp_path / "tied.yaml").write_text("base: flash.yaml\ntie_weights: true\n")
    command = ["plain.yaml", "flash.yaml", "tied.yaml", "--rounds", "6"]
    assert climb(*command) == 0
    assert {"report.md", "speed.png"} <= set(os.listdir(folder))
    rows = table(folder / "results.csv")
    assert list(rows) == ["plain", "flash", "tied"]
    record = json.loads((folder / "ladder.json").read_text())
    assert list(record["runs"]) == list(rows)
    ratios = []
    for name in ("flash", "tied"):
        found = Comparison.model_validate(record["comparisons"][name])
        assert found.date
        ratios.append(found.ratio())
        assert float(rows[name]["over_base_low"]) == pytest.approx(ratios[-1].low)
        assert int(rows[name]["rounds"]) == found.rounds >= 6
    assert f"| {product(ratios)} |" in (folder / "report.md").read_text()

    # finished work is not repeated, unless another machine did it: its speed is another one
    summary = folder / "plain" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"machine": "another"}))
    logs = [folder / name / "log.csv" for name in rows]
    before = [path.stat().st_mtime_ns for path in logs]
    assert climb(*command) == 0
    after = [path.stat().st_mtime_ns for path in logs]
    assert [a == b for a, b in zip(after, before, strict=True)] == [False, True, True]
    assert json.loads((folder / "ladder.json").read_text())["comparisons"] == record["comparisons"]

    # a report needs no run folders, and with other settings nothing counts
    for name in rows:
        shutil.rmtree(folder / name)
    written = (folder / "report.md").read_bytes()
    assert climb("--report_only", *command) == 0
    assert (folder / "report.md").read_bytes() == written
    with pytest.raises(UserError, match="no finished stage to report"):
        climb("--report_only", *command, "--", "--seed", "7")
    assert plan("plain.yaml", "flash.yaml")[1].comparison()[0]
    assert not plan("plain.yaml", "flash.yaml", of_runs=["--lr=2e-3"])[1].comparison()[0]


@pytest.mark.parametrize(
    ("peak", "device", "environment"),
    [
        (200, {"memory_mb": 250}, {}),
        (200, {"memory_mb": 249}, {"GLIBC_TUNABLES": "", "FREES_CACHE": "1"}),
        (0, {}, {}),
    ],
)
def test_sides_that_have_no_room_together_retain_no_memory(
    peak, device, environment, tmp_path, monkeypatch
):
    """Otherwise one would, until the other one comes, and be the faster for it."""
    ran = Mock(side_effect=SideError("side", "x"))
    monkeypatch.setattr(comparison, "run_rounds", ran)
    found = finished("baseline", "speedup1", folder=tmp_path)
    for stage in found:
        stage.finished.summary.peak_memory_mb = peak / 2
    comparison.interleave_stages(found[1:], 6, False, Device(**device))
    for side in ran.call_args.args[0]:
        assert environment.items() <= side.environment.items()
        assert environment or "FREES_CACHE" not in side.environment


@pytest.mark.usefixtures("rungs")
def test_a_side_that_fails_is_reported_and_so_is_the_rest(folder, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "run_stages", lambda stages, *_, **__: [*map(fake_run, stages)])
    failing = Mock(side_effect=SideError("side", "out of memory"))
    monkeypatch.setattr(comparison, "run_rounds", failing)
    assert climb("plain.yaml", "flash.yaml", "--rounds", "6") == 1
    assert "failed: flash: side: out of memory" in capsys.readouterr().out
    assert list(table(folder / "results.csv")) == ["plain", "flash"]


@pytest.mark.usefixtures("rungs")
def test_a_config_without_each_of_its_optimizations_is_compared(tmp_path, monkeypatch):
    (tmp_path / "both.yaml").write_text("{base: flash.yaml, lr_schedule: constant, grad_clip: 1}")
    compared = []

    def interleave_stages(found, *_):
        for i, stage in enumerate(found):
            compared.append((stage.name, stage.base.options, stage.options))
            fake_comparison(stage, 1.5 + i)

    monkeypatch.setattr(ladder, "interleave_stages", interleave_stages)
    assert climb("--ablate", "both.yaml", "--", "--n_layer", "2") == 0
    extra, no_flash, no_clip = ["--n_layer", "2"], ["--no-flash"], ["--grad_clip", "0.0"]
    nothing = [*extra, *no_clip, *no_flash]
    assert compared == [
        ("grad_clip_first", nothing, [*extra, *no_flash]),
        ("grad_clip_last", [*extra, *no_clip], extra),
        ("flash_first", nothing, [*extra, *no_clip]),
        ("flash_last", [*extra, *no_flash], extra),
    ]
    folder = tmp_path / "logs/ablate_both"
    line = "| grad_clip | 1.500 (1.500 to 1.500) | 2.500 (2.500 to 2.500) | 25 | 25 |"
    assert line in (folder / "report.md").read_text()
    assert {"results.csv", "worth.png"} <= set(os.listdir(folder))


# ---- bases and published figures


def test_stages_are_compared_with_the_one_whose_file_theirs_names(tmp_path):
    found = plan("baseline", "a100/baseline", "a100/opt0", "a100/opt0", "speedup6", folder=tmp_path)
    assert found[0].base is None
    assert [(stage.name, stage.base.name) for stage in found[1:]] == [
        ("baseline_2", "baseline"),
        ("opt0", "baseline_2"),
        ("opt0_4", "baseline_2"),
        ("speedup6", "opt0_4"),  # its base is not in the list
    ]


def test_a_config_is_not_compared_with_itself(tmp_path, monkeypatch):
    found = finished("speedup1", "speedup1", folder=tmp_path)
    monkeypatch.setattr(comparison, "run_rounds", None)  # is not called
    comparison.interleave_stages(found[1:], 6, False, Device())


def test_machines_are_set_beside_each_other_and_beside_the_published_factors(tmp_path):
    for machine, value in (("laptop", "1.1,1.05,1.2"), ("server", "3.0,,")):
        folder = tmp_path / machine / "speedup"
        folder.mkdir(parents=True)
        text = f"{FACTORS}baseline,baseline,1.0,,\nspeedup2,speedup1,{value}\n"
        (folder / "results.csv").write_text(text)
    ladders = [str(tmp_path / name / "speedup") for name in ("laptop", "server")]
    assert climb("--across", *ladders, "--log_dir", str(tmp_path)) == 0
    text = (tmp_path / "across/report.md").read_text()
    assert "| stage | laptop | server | A100, published | one GPU, published |" in text
    assert "| TF32 (speedup2) | 1.10 (1.05 to 1.20) | 3.00 | 2.44 | 3.00 |" in text
    assert "baseline" not in text
    assert (tmp_path / "across/across.png").is_file()
    (folder / "results.csv").write_text(f"{FACTORS}speedup5,speedup3,,,\n")  # none to draw
    assert climb("--across", ladders[1], "--log_dir", str(tmp_path / "quick")) == 0
    page = (tmp_path / "quick/across/report.html").read_text()
    assert "speedup5, over speedup3" in page
    own = tmp_path / "own/ladder"
    own.mkdir(parents=True)
    (own / "results.csv").write_text(f"{FACTORS}speedup2,speedup1,1.5,,\n")
    assert climb("--across", str(own), "--log_dir", str(tmp_path / "own")) == 0
    assert "| speedup2 | 1.50 |\n" in (tmp_path / "own/across/report.md").read_text()
    (folder / "results.csv").write_text("stage,over_previous\nbaseline,1\n")
    with pytest.raises(UserError, match="is not the table of a ladder"):
        climb("--across", ladders[1])


def test_pictures_of_factors_name_machines_and_days(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "measure.report.report.draw_bars", lambda *arguments: drawn.append(arguments[-1])
    )
    for machine, days in (("laptop", ("2026-11-23", "2026-11-24")), ("server", ())):
        folder = tmp_path / machine / "speedup"
        folder.mkdir(parents=True)
        (folder / "results.csv").write_text(f"{FACTORS}speedup2,speedup1,1.1,1.05,1.2\n")
        found = plan("speedup", folder=tmp_path / machine)[: len(days) or 1]
        for stage, day in zip(found, days, strict=False):
            fake_run(stage)
            path = stage.folder / "summary.json"
            path.write_text(path.read_text().replace('"started": "10"', f'"started": "{day}T10"'))
        ladder_report.keep(found)
    ladder_report.across([f"{tmp_path}/{name}/speedup" for name in ("laptop", "server")], tmp_path)
    rungs = comparison.ablated("speedup2", [], Record(folder=tmp_path))
    first, last = rungs["tf32"]
    fake_comparison(first, 1.1, date="2026-11-24")
    fake_comparison(last, 1.1)
    ladder_report.report_ablation("speedup2", rungs)
    assert drawn == ["laptop, 2026-11-24; server", "any, 2026-11-24"]


SERIES = {"speedup": 8, "a100": 10, "mps": 7, "gpu_ms": 0, "modern": 0, "as_logged": 3}


def test_every_series_of_this_project_is_a_folder_and_knows_its_published_logs(tmp_path):
    assert SERIES.keys() <= {*stages.series_names()}
    for name, logs in SERIES.items():
        found = plan(name, folder=tmp_path)
        assert found[0].base is None
        assert len({stage.published.log for stage in found} - {None}) == logs


def test_published_figures_are_those_of_the_logs():
    with open(stages.PUBLISHED, newline="") as file:
        rows = {row["config"]: row for row in csv.DictReader(file)}
    logs = {row["log"] for row in rows.values() if row["log"]}
    known = {path.stem for path in stages.REFERENCE.glob("*_*.csv")} - {"gpu_ms"}
    assert logs == known, "every published log belongs to a config"
    for name, row in rows.items():
        assert (CONFIG_DIR / f"{name}.yaml").is_file()
        if row["log"] and row["device"]:
            times = stages.times_of(stages.REFERENCE / f"{row['log']}.csv")
            assert {key: float(row[key]) for key in times} == times
        if name.startswith("gpu_ms/"):
            listed = (stages.REFERENCE / "gpu_ms.csv").read_text()
            assert f"{name[7:]},{float(row['ms_per_step']):g}\n" in listed
        # the a100 stage and the timing with the same optimizations
        if speed := row["a100_tokens_per_sec"]:
            speeds = {r["tokens_per_sec"] for n, r in rows.items() if n.startswith("a100/opt")}
            assert speed in speeds


def test_the_series_of_ones_own_in_the_docs_is_climbed_and_compared_with_its_log(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/measuring.md").read_text().partition("## A series of your own")[2]
    block = re.search(r"\n\n((    .*\n|\n)+)", text)[1]
    subprocess.run(["bash", "-c", textwrap.dedent(block)], check=True)
    rows = "".join(f"{step},6.5,,,100,1000\n" for step in range(1, 51))
    Path("configs/mine/clipped.csv").write_text(HEADER + rows)
    found = plan("configs/mine")
    assert [stage.name for stage in found] == ["start", "faster", "clipped"]
    assert [stage.base and stage.base.name for stage in found] == [None, "start", "faster"]
    assert {stage.folder.parent for stage in found} == {Path("logs/mine")}
    for stage in found:
        fake_run(stage)
    rows = comparison.rows_of(found)
    assert [row["loss_difference"] for row in rows] == [None, None, 0.5]
    assert rows[-1]["published_tokens_per_sec"] == 1000


def test_only_a_run_of_the_published_settings_is_compared_with_the_published_one(tmp_path):
    (tmp_path / "speedup7.yaml").write_text("lr: 1e-3\n")
    named = [str(ROOT / "configs/mps/cuda_bf16.yaml"), "speedup6.yaml", "speedup1", "speedup1"]
    found = plan(*named, str(tmp_path / "speedup7.yaml"))
    compared = [stage.published.log for stage in found]
    assert compared == ["cuda_bf16", "rtx3080_speedup6", None, None, None]
    assert not any(stage.published.log for stage in plan("speedup", of_runs=["--n_layer", "2"]))
    found = plan("speedup", of_runs=["--max_steps", "20", "--bf16"])
    logs = {stage.published.log for stage in found}
    assert logs >= {"rtx3080_baseline", "rtx3080_speedup8"}
    assert "rtx3080_speedup9" not in logs, "a shorter cosine is another schedule"


def test_the_difference_of_two_curves_is_over_steps_11_to_50(tmp_path, monkeypatch):
    (stage,) = finished("baseline", folder=tmp_path)  # its losses are 6.0, up to step 50
    published = {
        step: {"loss": 9.0 if step < 11 else 6.5 if step % 2 else 5.75} for step in range(1, 31)
    }
    monkeypatch.setattr(comparison, "published_rows", lambda _: published)
    assert comparison.published_difference(stage) == 0.375
    published = {1: {"loss": 1.0}}
    assert comparison.published_difference(stage) is None


def test_runs_as_logged_are_compared_with_the_logs_and_unsynchronized_times_are_not(tmp_path):
    (tied,) = comparison.rows_of(finished("speedup2", folder=tmp_path))
    assert tied["loss_difference"] is None, "its note is not the run that was logged"
    found = finished("as_logged", folder=tmp_path)
    rows = comparison.rows_of(found)
    assert all(row["loss_difference"] for row in rows)
    assert all(row["published_tokens_per_sec"] is None for row in rows)
    ladder_report.report("as_logged", found)
    assert (tmp_path / "as_logged/loss.png").is_file()
    (baseline,) = comparison.rows_of(finished("baseline", folder=tmp_path))
    assert baseline["published_tokens_per_sec"] == pytest.approx(11_570, rel=0.01)


def test_factors_are_of_published_times_that_can_be_used(tmp_path):
    factors = {}
    for series in SERIES:
        rows = comparison.rows_of(finished(series, folder=tmp_path))
        factors[series] = {row["stage"]: row["published_over_base"] for row in rows}
    assert factors["gpu_ms"]["tf32"] == pytest.approx(1000 / 333)
    assert factors["a100"]["opt3"] == pytest.approx(104_613 / 40_214, rel=1e-3)
    assert [stage for stage, factor in factors["a100"].items() if not factor] == ["baseline"]
    # cuda_bf16 ran on another GPU
    assert [stage for stage, factor in factors["mps"].items() if factor] == ["tf32"]
    assert not any(factors["speedup"].values())


def test_a_factor_of_an_a100_is_of_the_same_steps(tmp_path):
    rows = comparison.rows_of(finished("speedup", folder=tmp_path))
    factors = {row["stage"]: row["a100_over_base"] for row in rows}
    assert [n for n in factors if factors[n]] == [f"speedup{i}" for i in (2, 3, *range(5, 11))]
    rows = comparison.rows_of(finished("baseline", "speedup3", "speedup6", folder=tmp_path))
    assert rows[1]["a100_over_base"] == pytest.approx(factors["speedup2"] * factors["speedup3"])
    assert rows[2]["a100_over_base"] == pytest.approx(factors["speedup5"] * factors["speedup6"])
    rows = comparison.rows_of(finished("a100/baseline", "speedup2", folder=tmp_path))
    assert rows[1]["a100_over_base"] is None


# ---- machines


def test_a_gpu_without_bf16_climbs_with_fp16_and_with_muon_in_fp32(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = {"name": "Tesla T4", "bf16": False}
    runs = climbed(monkeypatch, found, "speedup", "--stages", "2,3,15", *OFF)
    kinds = {name: (run.config.bf16, run.config.fp16) for name, run in runs.items()}
    assert kinds["speedup2"] == (False, False)
    assert kinds["speedup3"] == (False, True)
    assert kinds["speedup15"] == (False, False)
    assert "--fp16" in runs["speedup3"].command
    runs = climbed(monkeypatch, found | {"gpus": 2}, "speedup", "--nproc_per_node", "2", *OFF)
    assert "ddp" in runs
    assert not any(run.config.bf16 for run in runs.values())
    stages_of = plan("speedup2", "speedup3", folder=tmp_path, bf16=False)
    for stage in stages_of:
        fake_run(stage)
    ladder_report.report("ladder", stages_of)
    for name in ("report.md", "report.html"):
        assert "In place of bf16: speedup3 fp16." in (tmp_path / "ladder" / name).read_text()


def test_speedup_climbs_medium_where_it_makes_the_fp32_matmuls_of_a_cpu_faster():
    names = [stage.name for stage in plan("speedup", medium=True)]
    assert names[1:4] == ["speedup1", "speedup1_medium", "speedup2"]
    assert names[:2] + names[3:] == [stage.name for stage in plan("speedup")]


def test_a_cpu_that_emulates_bf16_leaves_out_its_rungs_and_runs_the_rest_in_fp32(capsys):
    found = plan("cpu", name="a CPU", slow_bf16=True)
    assert [stage.name for stage in found[:4]] == ["plain", "retain_memory", "compile", "flash"]
    assert not any(stage.config.bf16 for stage in found)
    assert capsys.readouterr().out == "".join(
        f"note: {name} is left out: a CPU gains nothing from it\n" for name in ("medium", "bf16")
    )
    wanted = plan("cpu", name="a CPU", slow_bf16=True, medium=True, of_runs=["--bf16"])
    assert [stage.name for stage in wanted[2:5]] == ["medium", "bf16", "compile"]
    assert wanted[3].config.bf16


def test_some_stages_are_climbed_by_their_numbers_over_the_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runs = climbed(monkeypatch, {}, "a100", "--stages", "3,1,opt8", *OFF)
    assert list(runs) == ["baseline", "opt1", "opt3", "opt8"]
    bases = [stage.base.name for stage in [*runs.values()][1:]]
    assert bases == ["baseline", "opt1", "opt3"]
    with pytest.raises(UserError, match=r"--stages 99: no such stage; there are baseline, 0, 1,"):
        climb("a100", "--stages", "99", *OFF)


def test_the_quick_ladder_is_of_a_small_model_and_has_a_rung_of_noise(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    found = {"tflops": {"float32": 0.2, "bfloat16": 0.4}}
    runs = climbed(monkeypatch, found, "speedup", "--quick", "--", "--lr", "0.5")
    names = [
        "baseline",
        "baseline_again",
        *(f"speedup{i}" for i in (1, 2, 3, 5, 6, 7, 8, 10, 13, 15)),
    ]
    assert list(runs) == names
    bases = [stage.base.name for stage in [*runs.values()][1:]]
    assert bases == ["baseline"] * 2 + names[2:-1]
    first, again = (runs[name].config for name in names[:2])
    assert again.model_dump(exclude={"seed", "run_name"}) == first.model_dump(
        exclude={"seed", "run_name"}
    )
    assert again.seed != first.seed
    for config in (stage.config for stage in runs.values()):
        assert (config.n_embd, config.lr) == (256, 0.5)
        assert (config.dataset, config.compile_mode) == ("pydocs", "default")
    shapes = [(runs[name].config.batch_size, runs[name].config.seq_len) for name in names]
    assert shapes == [*[(2, 256)] * 4, *[(3, 256)] * 2, *[(6, 256)] * 4, *[(3, 512)] * 2]
    assert "shorter: --rounds 6" in capsys.readouterr().out
    assert runs["speedup6"].folder == Path("logs/speedup_quick/speedup6")


def rates_of(fp32, bf16=None):
    return {"float32": fp32, "bfloat16": bf16 or 2 * fp32}


@pytest.mark.parametrize(
    ("gpu", "layers", "batches"),
    [
        ({"memory_mb": 80_000, "tflops": rates_of(50.0, 600.0)}, 12, 8),  # H100
        ({"memory_mb": 24_000, "tflops": rates_of(50.0, 100.0)}, 12, 5),  # RTX 4090
        # T4
        (
            {"memory_mb": 15_000, "tflops": rates_of(4.5, 0.5) | {"float16": 25.0}, "bf16": False},
            12,
            1,
        ),
        ({"memory_mb": 8_000, "tflops": rates_of(10.0)}, 4, 1),
        ({"memory_mb": 80_000, "tflops": rates_of(50.0, 600.0), "gpus": 0}, 4, 1),
    ],
)
def test_the_quick_ladder_of_a_gpu_has_all_layers_and_the_batches_that_fit(
    gpu, layers, batches, tmp_path
):
    """Otherwise launches would take all the time of a step."""
    found = quick.quick_stages(tmp_path, [], Device(**{"gpus": 1} | gpu))
    assert {stage.config.n_layer for stage in found} == {layers}
    sizes = [
        (s.config.batch_size, s.config.seq_len)
        for s in found
        if s.name in ("baseline", "speedup6", "speedup13")
    ]
    assert sizes == [(2 * batches, 1024), (6 * batches, 1024), (3 * batches, 2048)]


def test_the_quick_ladders_model_suits_the_machine_but_stays_once_it_is_begun(tmp_path):
    sizes = [
        quick.size_for(Device(tflops=rates)).n_embd
        for rates in ({}, rates_of(0.02), rates_of(0.2), rates_of(0.2, 0.02), rates_of(20.0))
    ]
    assert sizes == [128, 128, 256, 128, 768]
    quick.quick_stages(tmp_path, [], Device(tflops=rates_of(20.0)))[0].record.save()
    assert quick.quick_stages(tmp_path, [], Device())[0].config.n_embd == 768


def climbed(monkeypatch, found, *arguments):
    """The stages that a ladder would run on a machine of which `found` is known."""
    runs = []
    monkeypatch.setattr(ladder, "measure_device", lambda _: Device(**found))
    monkeypatch.setattr(ladder, "run_stages", lambda stages, *_, **__: runs.extend(stages))
    with pytest.raises(UserError, match="no finished stage"):
        climb(*arguments)
    return {stage.name: stage for stage in runs}


def test_ddp_ends_the_speedup_ladder_where_there_are_gpus_and_its_corpus(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for gpus in (1, 2):
        assert "ddp" not in climbed(monkeypatch, {"gpus": gpus}, "speedup")
    assert "note: no stage ddp without its corpus: python data/" in capsys.readouterr().out
    asked = climbed(monkeypatch, {}, "speedup", "--nproc_per_node", "2")
    assert (asked["ddp"].ranks, asked["baseline"].ranks) == (2, 1)
    chosen = ("speedup", "--nproc_per_node", "2", "--stages")
    assert "ddp" not in climbed(monkeypatch, {}, *chosen, "2")
    assert [*climbed(monkeypatch, {}, *chosen, "ddp", *OFF)] == ["baseline", "ddp"]
    assert asked["ddp"].published.tokens_per_sec == 211_646
    (tmp_path / "data/fineweb").mkdir(parents=True)
    (tmp_path / "data/fineweb/fineweb_train_000000.bin").touch()
    assert "ddp" in climbed(monkeypatch, {"gpus": 2}, "speedup")


def test_a_climb_runs_again_what_has_other_settings_though_its_device_could_not_be_measured(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for stage in plan("speedup", of_runs=["--batch_size=1"], bf16=False, medium=True):
        fake_run(stage)
    ran = []
    monkeypatch.setattr(ladder, "measure_device", lambda _: Device())
    monkeypatch.setattr(stages, "run_commands", lambda commands, _: ran.extend(commands) or [None])
    with pytest.raises(UserError, match="stopped before its last step"):
        climb("speedup", "--stages", "3", *OFF)
    names = [command[-1].removeprefix("--run_name=") for command in ran]
    assert names == ["baseline", "speedup3"]
    assert {"--batch_size=1", "--no-bf16"}.isdisjoint(itertools.chain(*ran))


def test_interleaved_rounds_that_last_half_a_second_are_announced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rates = rates_of(1e6)  # TFLOP/s: steps take no time
    climbed(monkeypatch, {"tflops": rates}, "baseline", "speedup1", "--rounds", "600")
    # 2 x 600 turns of 0.5 s, and 4 processes of which each takes 7 s to start
    assert "takes about 10 minutes" in capsys.readouterr().out
    climbed(monkeypatch, {"tflops": rates}, "baseline", "speedup1", "--rounds", "1200")
    assert "takes about 20 minutes" in capsys.readouterr().out


def test_what_a_machine_is_asked_before_a_ladder_is_answered(forked_processes, capsys):
    found = measure_device("cpu")
    assert found.gpus == 0
    assert found.memory_mb > 1000
    # missing if the other tests keep this machine too busy to measure it
    rates = [*found.tflops.values(), found.gigabytes_per_s, found.launch_us]
    assert all(rate is None or rate > 0 for rate in rates)
    assert measure_device("no-such-device") == Device()
    assert capsys.readouterr().out.startswith("note: the device could not be measured: ")


# ---- pictures, tables, versions


@pytest.mark.usefixtures("in_tmp_path")
def test_plot_draws_the_losses_of_runs_with_those_of_validation():
    Path("a$b$").mkdir()
    Path("a$b$/log.csv").write_text(f"{HEADER}1,5.0,0.1,1.0,10,9\n2,4.0,0.1,,10,9\n")
    Path("a$b$/eval.csv").write_text("step,val_loss,hellaswag\n0,6.0,\n1,,0.25\n2,4.5,0.3\n")
    assert climb("--plot", "a$b$") == 0
    assert Path("comparison.png").read_bytes().startswith(b"\x89PNG")
    Path("begun").mkdir()
    Path("begun/log.csv").write_text(HEADER)
    assert climb("--plot", "a$b$", "begun") == 0
    Path("a$b$/log.csv").write_text("step,loss,lr\n1,5.0,0.1\n")
    with pytest.raises(UserError, match=r"log.csv: has no column norm"):
        climb("--plot", "a$b$")


def test_a_narrow_terminal_cuts_no_name_and_no_figure(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    row = ["speedup5_max_auto", "12,345", "[2] (1 to 3)", "a longer text that may be broken"]
    tables.print_table("title", ["stage", "ms/step", "x base", "note"], [row])
    printed = capsys.readouterr().out
    assert [cell for cell in row if cell in printed] == row[:2]
    assert "…" not in printed


def test_a_name_may_not_break_a_table_or_a_picture():
    lines = tables.markdown_table(["stage", "n"], [("a|b\nc", "1")])
    assert lines[-1] == r"| a\|b c | 1 |"
    assert pictures.plain("_a$b") == r" _a\$b"


@pytest.mark.parametrize("has_git", [True, False])
def test_the_code_has_another_version_for_each_file_of_a_room_and_the_same_for_a_users_files(
    has_git, monkeypatch, tmp_path
):
    monkeypatch.setattr(reports, "ROOT", tmp_path)
    versions = []
    for name in ("train.py", "runtime/new.py", "measure/new/room.py", "mine.py", "env/lib/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
        if has_git and name not in ("mine.py", "env/lib/a.py"):
            subprocess.run(f"git init -q && git add {name}", shell=True, cwd=tmp_path, check=True)
        versions.append(reports.code_hash())
    assert len({*versions[:3]}) == 3
    assert versions[3:] == [versions[2]] * 2
