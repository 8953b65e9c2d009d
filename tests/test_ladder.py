"""Ladders climbed for real on tiny models: runs, records, reports, failures."""

import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
import torch

import ladder
from config import Config, load_config
from measure.interleaved.comparison import Comparison
from measure.interleaved.ratio import product
from measure.interleaved.rounds import SideError
from measure.ladder import climb as climbing
from measure.ladder import quick, stages
from measure.ladder import record as records
from measure.ladder import report as ladder_report
from measure.ladder.explain import card_of, card_of_stage
from measure.ladder.record import Device, Record, Run, Summary
from measure.report import tables
from model import GPT, GPTConfig
from run.log import LOG_COLUMNS
from runtime.cli import CONFIG_DIR, Options, parse
from runtime.errors import why_it_failed
from runtime.report import Estimate
from tests.conftest import ALONE, ROOT, TINY, TINY_RUN, cases, ended, refused, run, wait_for
from tests.test_resume import needs_proc
from train import train

HEADER = "step,loss,lr,norm,dt_ms,tokens_per_sec\n"
LADDER = Path("logs/ladder")
FACTORS = "stage,base,over_base,over_base_low,over_base_high,in_place_of_added_bf16\n"
OFF = ("--rounds", "0")


@pytest.fixture(autouse=True)
def nothing_is_known_of_this_machine(in_tmp_path, monkeypatch):
    """But its name: asking it starts a process that imports PyTorch."""
    monkeypatch.setattr(ladder, "measure_device", lambda _: Device(name="cpu"))


@pytest.fixture
def rungs(corpus, tmp_path):
    """Two configs of a tiny model, `plain.yaml` and `flash.yaml`, in the working directory."""
    plain = TINY | TINY_RUN | {"max_steps": 12, "lr": 1e-3, "lr_schedule": "cosine"}
    (tmp_path / "plain.yaml").write_text(json.dumps(plain))
    (tmp_path / "flash.yaml").write_text("{base: plain.yaml, flash: true}")


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
    record = Record.load(Path(folder, stages.ladder_of(configs)[0]))
    return stages.with_bases(stages.plan(configs, record, of_runs, Device(**found)))


def table(path):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return {row.get("stage") or row["optimization"]: row for row in rows}


def results(ladder="ladder"):
    return table(Path("logs", ladder, "results.csv"))


def fake_run(stage):
    """Record a finished run of a stage, without running it."""
    steps, losses = [*range(1, 51)], 50 * [6.0]
    log = {"step": steps, "loss": losses} | dict.fromkeys(LOG_COLUMNS[2:], losses)
    summary = dict.fromkeys(Summary.model_fields, "10") | {"world_size": stage.ranks}
    summary |= {"interrupted": False}
    run = Run(config=stage.config.model_dump(mode="json"), summary=summary, log=log)
    stage.record.runs[stage.name] = run
    stage.record.save()


def finished(*configs, **options):
    stages = plan(*configs, **options)
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


def fake_interleaving(stages, *_):
    """Compare the stages of an ablation with factors 1.5, 2.0, ..."""
    for i, stage in enumerate(stages):
        fake_comparison(stage, 1.5 + i / 2)


# ---- climbing


@pytest.mark.usefixtures("rungs", "forked")
def test_a_failing_stage_is_reported_and_the_others_go_on(capsys):
    Path("bad.yaml").write_text("base: plain.yaml\nlr: 1e30\n")
    assert climb("--nproc_per_node", "2", "bad.yaml", "flash.yaml", *OFF) == 1
    assert list(results()) == ["flash"]
    for text in (capsys.readouterr().out, (LADDER / "report.md").read_text()):
        assert "failed: bad: step " in text
    assert json.loads((LADDER / "flash/summary.json").read_text())["world_size"] == 2


@pytest.mark.usefixtures("rungs", "forked")
def test_a_run_that_starts_from_weights_counts_as_finished():
    train(load_config("plain.yaml", max_steps=1), ALONE)
    Path("tuned.yaml").write_text("{base: plain.yaml, init_from: logs/plain}")
    assert climb("tuned.yaml", *OFF) == 0
    assert list(results()) == ["tuned"]


@pytest.mark.usefixtures("rungs")
def test_ctrl_c_keeps_finished_stages(monkeypatch):
    (done,) = finished("plain.yaml", folder="elsewhere")
    monkeypatch.setattr(climbing, "run_commands", Mock(side_effect=[[None], KeyboardInterrupt]))
    monkeypatch.setattr(Run, "read", lambda *_: done.finished)
    with pytest.raises(KeyboardInterrupt):
        climb("plain.yaml", "flash.yaml", *OFF)
    assert climb("plain.yaml", "flash.yaml", "--report_only") == 0
    assert list(results()) == ["plain"]


STARTS = {
    "run_commands": "from measure.ladder.climb import run_commands; run_commands([CHILD])",
    "Side": "from measure.interleaved.rounds import Side; Side('a', CHILD, {}).__enter__().train()",
    "in_fresh_process": "from measure.interleaved.process import in_fresh_process as call; "
    "call('runpy:run_path', 'child.py')",
}


@needs_proc
@pytest.mark.parametrize("way", STARTS)
def test_processes_end_with_the_command_that_started_them_even_if_it_is_killed(way):
    child = "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()) + '.')\n"
    Path("child.py").write_text(child + "time.sleep(1000)\n")
    code = f"import sys; CHILD = [sys.executable, 'child.py']; {STARTS[way]}"
    environment, pid = os.environ | {"PYTHONPATH": str(ROOT)}, Path("pid")
    with ended([subprocess.Popen([sys.executable, "-c", code], env=environment)]) as (process,):
        wait_for(lambda: pid.exists() and pid.read_text().endswith("."), process)
    wait_for(lambda: not is_running(int(pid.read_text()[:-1])), None)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("rungs")
def test_two_ladders_do_not_climb_in_one_folder():
    """Another thread is refused the lock, as another process would be."""
    said = "^logs/ladder: another process is writing it; wait for it, or choose another name$"
    with ThreadPoolExecutor() as elsewhere, ladder.sole_writer(LADDER), refused(said):
        elsewhere.submit(climb, "plain.yaml", *OFF).result()
    assert not LADDER.exists()


@pytest.mark.usefixtures("rungs")
def test_a_climb_keeps_what_another_saved_just_before_it(monkeypatch, capsys):
    assert climb("plain.yaml", *OFF) == 0
    path = LADDER / "ladder.json"
    found = path.read_text()
    path.unlink()
    monkeypatch.setattr(ladder, "sole_writer", lambda _: nullcontext(path.write_text(found)))
    capsys.readouterr()
    assert climb("plain.yaml", *OFF) == 0
    assert "== 1 of 1" not in capsys.readouterr().out
    with refused("logs/ladder: has the ladder of plain; name these"):
        climb("flash.yaml", "--report_only")


RUN, SIDE = "runs baseline", "comparisons speedup1 sides 1"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("runs", 1),
        (f"{RUN} summary median_tokens_per_sec", 0),
        (f"{RUN} log loss", [6.0]),
        (f"{RUN} log step", [math.nan] * 50),
        (f"{RUN} log", {"step": [1]}),
        (f"{RUN} eval", {"step": [1]}),
        ("comparisons speedup1 sides", []),
        (f"{SIDE} tokens_per_sec", [1.0]),
        (f"{SIDE} tokens_per_sec", [0.0] * 6),
        (f"{SIDE} turns", []),
        ("size", [4, 4, 256, 0]),
    ],
)
def test_a_damaged_record_is_one_line(place, value):
    found = finished("baseline", "speedup1")
    fake_comparison(found[1], 2.0)
    path = LADDER / "ladder.json"
    record = json.loads(path.read_text())
    *folders, last = [int(part) if part.isdigit() else part for part in place.split()]
    at = record
    for part in folders:
        at = at[part]
    at[last] = value
    for text in (json.dumps(record), "{", "[" * 100_000):
        path.write_text(text)
        with refused(r"^logs/ladder/ladder.json: damaged \(.*; restore it, or delete it"):
            climb("baseline", "speedup1", "--report_only")


MISTAKES = """
speedpu => speedpu: no such config file, here or in configs/; did you mean speedup
configs/mine => configs/mine: no such config file, here or in configs/
ROOT/configs/reference => configs/reference: no such config file
 => name a series such as speedup, a folder of configs, or config files
speedup -- --max_step 3 => --max_step: unknown option; did you mean --max_steps
--plot nowhere => nowhere/log.csv: cannot be read
speedup --report_only => logs/speedup: no finished stage to report
speedup --report_only -- --seed 7 => --report_only: leave the options after -- out
a100 --quick => --quick: is for the speedup ladder
speedup --rounds 3 => --rounds 3: at least 6 make an interval
--ablate baseline speedup1 => --ablate takes one config, such as speedup10.yaml
--ablate baseline => baseline: has no optimization on
baseline speedup1 --seeds 2 => baseline: sets no eval_every, so it has no validation loss
baseline --seeds 2 -- --eval_every 5 --max_minutes 1 => baseline: max_minutes 1: losses are compared
baseline speedup3 --seeds 2 -- --eval_every 5 --val_fraction 0.1 => speedup3 trains for 50 steps
--across ROOT/logs/results/h200/ablate_softcap => results.csv: not the table of a ladder
--ablate --plot x => --ablate has no effect with --plot; leave it out
--across x --rerun => --rerun has no effect with --across; leave it out
baseline -- --config y => --config after --: the ladder sets it for each run
baseline -- --run_name=x => --run_name after --
speedup --report_only --log_dir= => --log_dir: string should have at least 1 character
"""


@pytest.mark.parametrize(("arguments", "message"), cases(MISTAKES))
def test_mistakes_are_one_line_before_anything_runs(arguments, message, tmp_path):
    with refused(re.escape(message)) as raised:
        climb(*arguments.replace("ROOT", str(ROOT)).split())
    assert raised.value.status == 2
    assert len(str(raised.value)) < 300, "a message that lists everything says nothing"
    assert not list(tmp_path.iterdir())


def test_an_option_of_the_runs_goes_after_two_dashes(tmp_path):
    done = run("ladder.py", "speedup", "--no-bf16", "5", cwd=tmp_path, status=2)
    assert "--no-bf16: is an option of the runs, and goes after --" in done.stderr


def test_why_a_stage_is_not_finished_is_said(monkeypatch, capsys):
    for status, printed, reason in (
        (-9, "a warning\n", "killed by signal 9, as the system does when memory runs out"),
        (1, "a warning\nerror: full\nmore\n", "full"),
        (1, "", "exit status 1"),
    ):
        assert why_it_failed(status, io.StringIO(printed)) == reason
    (stage,) = finished("baseline")
    stopped = stage.finished.model_copy(deep=True)
    stopped.summary.interrupted = True
    monkeypatch.setattr(climbing, "run_commands", lambda *_: [None])  # status 0, after a signal
    monkeypatch.setattr(Run, "read", lambda *_: stopped)
    climbing.run_stages(stage.record, [stage], Device())
    message = "failed: baseline: stopped before its last step; the same command runs it again\n"
    assert capsys.readouterr().out.endswith(message)
    assert not Record.load(LADDER).runs
    with refused(f"no finished stage to report\n{message.strip()}$", lines=2):
        ladder_report.report("ladder", [stage])


@pytest.mark.parametrize("lines", [1, 2_000])
def test_changes_that_were_not_committed_are_kept_and_named(lines, monkeypatch):
    diff = "diff --git a/train.py b/train.py\n" + lines * "+print()\ndiff --git a/x b/model.py\n"
    monkeypatch.setattr(records, "git_commit", lambda: "0a1b-dirty")
    monkeypatch.setattr(records, "git_diff", lambda: diff)
    monkeypatch.setattr(ladder, "run_stages", lambda _, stages, *__: [*map(fake_run, stages)])
    for _ in range(2):
        assert climb("baseline", *OFF, "--rerun") == 0
    (kept,) = Record.load(LADDER).changes["0a1b-dirty"]
    assert kept.files[:2] == ["train.py", "model.py"]
    assert kept.diff == diff if lines == 1 else re.fullmatch("sha256 [0-9a-f]{64}", kept.diff)


def test_a_report_names_the_changed_files_of_its_commits():
    found = finished("baseline", "speedup1")
    for stage, commit in zip(found, ("0a1b-dirty", "ffff-dirty"), strict=True):
        stage.finished.summary.git = commit
    changes = [records.Changes.of(f"diff --git a/{name} b/{name}\n") for name in ("a.py", "b.py")]
    found[0].record.changes = {"0a1b-dirty": changes}
    ladder_report.report("ladder", found)
    text = (LADDER / "report.md").read_text()
    assert "- 0a1b-dirty: with changes to a.py, b.py; the diff is in ladder.json\n" in text
    assert "- ffff-dirty: its changes to the commit were not kept\n" in text


def test_a_report_says_why_a_stage_or_its_interleaved_rounds_are_left_out(capsys):
    _, older, rounds_of = found = finished("baseline", "speedup1", "speedup2")
    older.finished.config["older"] = 3  # an option that was on
    fake_comparison(rounds_of, 1.5)
    rounds_of.record.comparisons["speedup2"].settings[1]["max_steps"] = 7
    ladder_report.report("ladder", found)
    printed, written = capsys.readouterr().out, (LADDER / "report.md").read_text()
    for line in (
        "note: speedup1 is left out: --older: unknown option",
        "note: the interleaved rounds of speedup2 are left out: max_steps 7 there, 50 here\n",
    ):
        assert line in printed
        assert line in written
    found = plan("baseline", of_runs=["--batch_size=1", "--no-bias"])
    reason = "bias on there, off here, batch_size 2 there, 1 here"
    with refused(f"baseline is left out: {reason}$", lines=2):
        ladder_report.report("ladder", found)


def test_a_report_without_rows_says_what_the_record_has_and_lacks():
    with refused("logs/ladder: no finished stage to report: no ladder.json; the same command"):
        climb("baseline", "--report_only")
    finished("baseline")
    with refused("to report: ladder.json lists no stages, only the runs of baseline; the same"):
        climb("baseline", "--report_only")
    two = plan("baseline")
    two[0].ranks = 2
    with refused("note: baseline is left out: ranks 1 there, 2 here$", lines=2):
        ladder_report.report("ladder", two)
    with refused("note: ladder.json has baseline, but lacks speedup1, speedup2$", lines=2):
        ladder_report.report("ladder", plan("speedup1", "speedup2"))


# ---- a report alone


RESULTS, EPYC = ROOT / "logs" / "results", "epyc-avx512bf16-2cores"
NO_PROCESS_NO_TORCH = """
import atexit, runpy, sys
events = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system")
def watch(event, arguments):
    if event in events:
        raise SystemExit(f"started a process: {arguments}")
sys.addaudithook(watch)
atexit.register(lambda: print("torch" in sys.modules))
sys.path.insert(0, {root!r})
sys.argv = ["ladder.py", *{arguments!r}]
runpy.run_path({root!r} + "/ladder.py", run_name="__main__")
"""


def stored(name, machine=EPYC):
    """Put the record of one of our ladders alone into a folder, and return its path."""
    Path("logs", name).mkdir(parents=True)
    return Path(shutil.copy(RESULTS / machine / name / "ladder.json", Path("logs", name)))


def is_the_stored_report(name, machine=EPYC):
    return all(
        Path("logs", name, file).read_bytes() == (RESULTS / machine / name / file).read_bytes()
        for file in ("report.md", "results.csv")
    )


def test_a_report_alone_starts_no_process_and_does_not_import_torch():
    record = stored("speedup")
    code = NO_PROCESS_NO_TORCH.format(root=str(ROOT), arguments=["speedup", "--report_only"])
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "False"
    # 19 stages with speedup1_medium, climbed with -- --batch_size 1 --max_steps 12
    assert is_the_stored_report("speedup")
    assert record.read_bytes() == (RESULTS / EPYC / "speedup/ladder.json").read_bytes()


class More(Options):
    """more"""

    newer: bool = False
    """an option that runs so far did not have"""


class LaterConfig(More, Config):
    """Options of later code."""


@pytest.mark.parametrize(
    ("machine", "arguments"),
    [(EPYC, "speedup --quick"), ("h200", "modern"), (EPYC, "--ablate speedup10")],
)
def test_a_stored_ladder_gives_the_same_report_with_later_code(machine, arguments, monkeypatch):
    """Which has one option more, and one less."""
    name = arguments.replace(" --", "_").replace("--ablate ", "ablate_")
    path = stored(name, machine)
    path.write_text(path.read_text().replace('"n_layer"', '"older": false, "n_layer"'))
    monkeypatch.setattr(records, "Config", LaterConfig)
    assert climb(*arguments.split(), "--report_only") == 0
    assert is_the_stored_report(name, machine)


def test_every_file_that_the_results_page_names_exists():
    page = ROOT / "docs/results.md"
    named = {*re.findall(r"\]\((?!http)([^)#]+)", page.read_text())}
    assert len(named) > 20
    assert [path for path in named if not (page.parent / path).exists()] == []


def test_a_report_alone_has_the_options_and_the_stages_of_the_climb(monkeypatch):
    found = {"bf16": False, "medium": True, "gpus": 2}
    options = ["--batch_size", "1", "--betas", "0.8,0.9"]
    runs = climbed(monkeypatch, found, "speedup", "--nproc_per_node", "2", *OFF, "--", *options)
    names = ["baseline", "speedup1", "speedup1_medium", "speedup3", "speedup15", "ddp"]
    for name in names:
        fake_run(runs[name])
    monkeypatch.setattr(ladder, "measure_device", None)
    assert climb("speedup", "--report_only") == 0
    assert list(results("speedup")) == names


def test_a_report_alone_of_an_ablation_has_the_options_of_the_climb(monkeypatch):
    monkeypatch.setattr(ladder, "measure_device", lambda _: Device(bf16=False))
    monkeypatch.setattr(ladder, "interleave_stages", fake_interleaving)
    assert climb("--ablate", "speedup3", "--", "--batch_size=1") == 0
    assert Path("logs/ablate_speedup3/worth.svg").is_file()
    monkeypatch.setattr(ladder, "measure_device", None)
    Path("logs/ablate_speedup3/results.csv").unlink()
    assert climb("--ablate", "speedup3", "--report_only") == 0
    assert {name: row["first"] for name, row in results("ablate_speedup3").items()} == {
        "tie_weights": "1.5",
        "tf32": "2.5",
        "fp16": "3.5",
    }


# ---- interleaved runs


@pytest.mark.usefixtures("rungs", "forked")
def test_each_rung_runs_once_and_is_interleaved_once_with_its_base():
    Path("tied.yaml").write_text("base: flash.yaml\ntie_weights: true\n")
    command = ["plain.yaml", "flash.yaml", "tied.yaml", "--rounds", "6"]
    assert climb(*command) == 0
    assert {"report.md", "speed.svg"} <= set(os.listdir(LADDER))
    rows, record = results(), Record.load(LADDER)
    assert list(record.runs) == list(rows) == ["plain", "flash", "tied"]
    ratios = []
    for name in ("flash", "tied"):
        found = record.comparisons[name]
        assert found.date
        ratios.append(found.ratio())
        assert float(rows[name]["over_base_low"]) == pytest.approx(ratios[-1].low)
        assert int(rows[name]["rounds"]) == found.rounds >= 6
    assert f"| {product(ratios)} |" in (LADDER / "report.md").read_text()

    # finished work is not repeated, unless another machine did it: its speed is another one
    record.runs["plain"].summary.machine = "another"
    record.save()
    logs = [LADDER / name / "log.csv" for name in rows]
    before = [path.stat().st_mtime_ns for path in logs]
    assert climb(*command) == 0
    after = [path.stat().st_mtime_ns for path in logs]
    assert [a == b for a, b in zip(after, before, strict=True)] == [False, True, True]
    assert Record.load(LADDER).comparisons == record.comparisons

    # a report needs no run folders
    for name in rows:
        shutil.rmtree(LADDER / name)
    written = (LADDER / "report.md").read_bytes()
    assert climb("--report_only", *command) == 0
    assert (LADDER / "report.md").read_bytes() == written
    assert plan("plain.yaml", "flash.yaml")[1].comparison
    assert not plan("plain.yaml", "flash.yaml", of_runs=["--lr=2e-3"])[1].comparison
    flash = plan("plain.yaml", "flash.yaml")[1]
    flash.ranks = 2
    assert not flash.comparison


@pytest.mark.parametrize(("memory", "fits"), [(250, True), (249, False), (None, True)])
def test_sides_that_have_no_room_together_free_memory_after_their_turns(memory, fits, monkeypatch):
    """And nothing else: a rung may be the retention of freed memory itself."""
    ran = Mock(side_effect=SideError("side: x"))
    monkeypatch.setattr(climbing, "run_rounds", ran)
    found = finished("baseline", "speedup1")
    for stage in found:
        stage.finished.summary.peak_memory_mb = 100
    without_runs = plan("baseline", "speedup1", folder="without/runs")
    for stages_of, has_room in ((found, fits), (without_runs, memory is None)):
        climbing.interleave_stages(stages_of[1:], 6, Device(memory_mb=memory))
        given = [
            {*side.environment} - {"PYTHONPATH", "PYTHONSAFEPATH"} for side in ran.call_args.args[0]
        ]
        assert given == [set() if has_room else {"FREES_CACHE"}] * 2


@pytest.mark.usefixtures("rungs")
def test_a_side_that_fails_is_reported_and_so_is_the_rest(monkeypatch, capsys):
    monkeypatch.setattr(ladder, "run_stages", lambda _, stages, *__: [*map(fake_run, stages)])
    failing = Mock(side_effect=SideError("side: out of memory"))
    monkeypatch.setattr(climbing, "run_rounds", failing)
    assert climb("plain.yaml", "flash.yaml", "--rounds", "6") == 1
    assert "failed: flash: side: out of memory" in capsys.readouterr().out
    assert list(results()) == ["plain", "flash"]


# ---- bases and published figures


def test_stages_are_compared_with_the_one_whose_file_theirs_names():
    found = plan("baseline", "a100/baseline", "a100/opt0", "a100/opt0", "speedup6")
    assert found[0].base is None
    assert bases_of(found) == {
        "baseline_2": "baseline",
        "opt0": "baseline_2",
        "opt0_4": "baseline_2",
        "speedup6": "opt0_4",  # its base is not in the list
    }


# published logs by series
SERIES = {"speedup": 8, "a100": 10, "mps": 7, "gpu_ms": 0, "modern": 0, "as_logged": 3}
BATCH = {"batch_size", "seq_len", "block_size", "total_batch_tokens"}
RATES = {"lr", "min_lr", "embed_lr", "head_lr", "scalar_lr", "warmup_steps", "lr_schedule"}
OWN_RATES = {"untied.yaml", "value_residual.yaml"}  # for parameters that their bases do not have


@pytest.mark.parametrize("name", [*SERIES, "cpu"])
def test_a_stage_changes_neither_the_batch_nor_a_learning_rate_beside_anything_else(name):
    """Its factor, or its loss, would be credited to what its title names."""
    files = stages.series(stages.series_folder(name))
    for path in (file for file in files if {*stages.bases(file)[:1]} & {*files}):
        own, base = load_config(str(path)), load_config(str(stages.bases(path)[0]))
        changed = {o for o in type(own).model_fields if getattr(own, o) != getattr(base, o)}
        changed -= {"run_name"}
        if own.tokens_per_step(1) != base.tokens_per_step(1):
            assert changed <= BATCH, path
        elif changed & RATES and path.name not in OWN_RATES:
            assert changed <= RATES, path


def test_runs_of_two_machines_have_no_ratio():
    found = finished("baseline", "speedup1", "speedup2")
    found[1].record.runs["speedup1"].summary.machine = "another"
    baseline, other, again = ladder_report.rows_of(found)
    assert (baseline["over_first"], again["over_first"]) == (Estimate(1.0), Estimate(1.0))
    assert (other["over_base"], other["over_first"], again["over_base"]) == (None, None, None)


def test_a_config_is_not_compared_with_itself():
    assert not climbing.is_to_be_compared(plan("speedup1", "speedup1")[1], True, Device())


def across(factors, *machines):
    """The report of machines beside each other; the last one's table has these rows."""
    folders = [Path(machine) for machine in machines]
    folders[-1].mkdir(parents=True, exist_ok=True)
    (folders[-1] / "results.csv").write_text(factors)
    assert climb("--across", *machines) == 0
    return Path("logs/across/report.md").read_text()


def test_machines_are_set_beside_each_other_and_beside_the_published_factors():
    across(f"{FACTORS}baseline,baseline,1.0,,\nspeedup2,speedup1,3.0,,\n", "server/speedup")
    both = ("server/speedup", "laptop/speedup")
    text = across(f"{FACTORS}speedup2,speedup1,1.1,1.05,1.2\nspeedup3,speedup2,0.9,,,fp32\n", *both)
    assert "speedup3" not in text
    assert "| stage | server | laptop | A100, published | one GPU, published |" in text
    assert "| TF32 (speedup2) | 3.00 | 1.10 (1.05 to 1.20) | 2.44 | 3.00 |" in text
    assert "baseline" not in text
    text = across(f"{FACTORS}speedup2,baseline,2.0,,\n", *both)
    assert "| TF32 (speedup2 over speedup1) | 3.00 |" in text
    assert Path("logs/across/across.svg").is_file()
    across(f"{FACTORS}speedup5,speedup3,,,\n", "server/speedup")  # nothing to draw
    assert "speedup5, over speedup3" in Path("logs/across/report.html").read_text()
    own = across(f"{FACTORS}speedup2,speedup1,1.5,,\n", "own/ladder")
    assert "| speedup2 | 1.50 |\n" in own


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: No such file or directory; --across takes folders of ladders"),
        ("", "not the table of a ladder: has no column base"),
        ("a,b\n1,2\n", "not the table of a ladder: has no column base"),
        (FACTORS, "has no stage with a base, so no factor"),
        (f"{FACTORS}b,a,fast,,,\n", "not the table of a ladder (ValueError: could not convert"),
        (f"{FACTORS}b,a,0,,,\n", "not the table of a ladder (ValueError: bad row of b)"),
        (f"{FACTORS}b,a,2.0,-1,3,\n", "not the table of a ladder (ValueError: bad row of b)"),
        (f"{FACTORS}b,a,nan,,,\n", "not the table of a ladder (ValueError: bad row of b)"),
        (f"{FACTORS}b\n", "not the table of a ladder (ValueError: bad row of b)"),
        (f"{FACTORS}b,a,\xff\n".encode("latin-1"), "not the table of a ladder (UnicodeDecode"),
        (f'{FACTORS}b,"a\n', "not the table of a ladder (Error: unexpected end of data"),
    ],
)
def test_a_bad_table_beside_others_is_one_line(content, reason):
    Path("m/speedup").mkdir(parents=True)
    if content is not None:
        content = content if isinstance(content, bytes) else content.encode()
        Path("m/speedup/results.csv").write_bytes(content)
    with refused(rf"^m/speedup/results\.csv: {re.escape(reason)}"):
        climb("--across", "m/speedup")


def test_pictures_of_factors_name_gpus_machines_and_days():
    rungs = stages.ablated(plan("speedup2")[0])
    fake_comparison(rungs["tf32"][0], 1.1, date="2026-11-24", device="NVIDIA H200")
    ladder_report.report_ablation("speedup2", rungs)
    picture = (rungs["tf32"][0].record.folder / "worth.svg").read_text()
    assert ">NVIDIA H200; any, 2026-11-24<" in picture


def bases_of(found):
    return {stage.name: stage.base.name for stage in found if stage.base}


def figures(found, column):
    """A column of a ladder's table, by stage."""
    return {row["stage"]: row[column] for row in ladder_report.rows_of(found)}


def test_published_figures_are_those_of_the_logs():
    with open(stages.PUBLISHED, newline="") as file:
        rows = {row["config"]: row for row in csv.DictReader(file)}
    logs = {row["log"] for row in rows.values() if row["log"]}
    known = {path.name for path in stages.REFERENCE.glob("*_*.csv")} - {"gpu_ms.csv"}
    assert logs == known, "every published log belongs to a config"
    speeds = {row["tokens_per_sec"] for name, row in rows.items() if name.startswith("a100/opt")}
    for name, row in rows.items():
        assert (CONFIG_DIR / f"{name}.yaml").is_file()
        if row["log"] and row["device"]:
            for column, figure in (("dt_ms", "ms_per_step"), ("tokens_per_sec",) * 2):
                assert float(row[figure]) == stages.median_of(stages.REFERENCE / row["log"], column)
        if name.startswith("gpu_ms/"):
            listed = (stages.REFERENCE / "gpu_ms.csv").read_text()
            assert f"{name[7:]},{float(row['ms_per_step']):g}\n" in listed
        # the a100 stage and the timing with the same optimizations
        assert row["a100_tokens_per_sec"] in {"", *speeds}


def test_the_series_of_ones_own_in_the_docs_is_climbed_and_compared_with_its_log():
    text = (ROOT / "docs/measuring.md").read_text().partition("## A series of your own")[2]
    block = re.search(r"\n\n((    .*\n|\n)+)", text)[1]
    subprocess.run(["bash", "-c", textwrap.dedent(block)], check=True)
    rows = "".join(f"{step},6.5,,,100,1000\n" for step in range(1, 51))
    Path("configs/mine/clipped.csv").write_text(HEADER + rows)
    found = finished("configs/mine")
    assert found[0].record.folder == Path("logs/mine")
    assert bases_of(found) == {"faster": "start", "clipped": "faster"}
    rows = ladder_report.rows_of(found)
    assert [row["loss_difference"] for row in rows] == [None, None, 0.5]
    assert rows[-1]["published_tokens_per_sec"] == 1000


def own_series(**published):
    """A series of two stages, with the content of `<stage>.csv` beside their YAMLs."""
    folder = Path(f"series{len([*Path().iterdir()])}")  # what is published is read once
    folder.mkdir()
    (folder / "a.yaml").write_text("# First\n")
    (folder / "b.yaml").write_text("# Second\nbase: a.yaml\n")
    for stage, text in published.items():
        (folder / f"{stage}.csv").write_text(text)
    return str(folder)


def test_one_row_with_a_speed_is_what_was_published(capsys):
    rows = {"a": "device,ms_per_step\nRTX 3090,20\n", "b": "device,ms_per_step\nRTX 3090,16\n"}
    series = own_series(**rows)
    found = finished(series)
    assert figures(found, "published_over_base") == {"a": None, "b": 20 / 16}
    assert found[0].published.device == "RTX 3090"
    ladder_report.report("ladder", found)
    assert "published losses" not in capsys.readouterr().out
    ladder_report.report("ladder", finished(series, of_runs=["--n_layer=1"]))
    said = "published losses and times of a, b are left out: those runs were made without --n_layer"
    assert f"note: the {said}=1\n" in capsys.readouterr().out
    other = own_series(**rows | {"b": "device,tokens_per_sec\nA100,9\n"})
    assert figures(finished(other), "published_over_base") == {"a": None, "b": None}


def test_a_published_log_that_is_too_short_is_noted_and_another_table_is_refused(capsys):
    steps = "".join(f"{step},6.5,,,100,1000\n" for step in range(1, 7))
    short = own_series(a=HEADER + steps[: steps.rindex("6,6.5")], b=HEADER + steps)
    assert [stage.published.tokens_per_sec for stage in plan(short)] == [None, 1000]
    note = f"note: {Path(short).resolve()}/a.csv: 5 steps, of which the first 5 do not count, so"
    assert capsys.readouterr().out.startswith(note)
    for text in (
        "ms_per_step\n20\n16\n",
        "ms_per_step\nfast\n",
        "ms_per_step\n0\n",
        "speed\n5\n",
    ):
        with refused(r"a.csv: needs one row with a positive ms_per_step or tokens_per_sec"):
            plan(own_series(a=text))


def test_only_a_run_of_the_published_settings_is_compared_with_the_published_one():
    Path("speedup7.yaml").write_text("lr: 1e-3\n")
    named = [str(ROOT / "configs/mps/cuda_bf16.yaml"), "speedup6.yaml", "speedup1", "speedup1"]
    compared = [stage.published.log for stage in plan(*named, "./speedup7.yaml")]
    assert [log and log.stem for log in compared] == ["cuda_bf16", "rtx3080_speedup6", *3 * [None]]
    assert not any(stage.published.log for stage in plan("speedup", of_runs=["--n_layer", "2"]))
    found = plan("speedup", of_runs=["--max_steps", "20", "--bf16"])
    logs = {stage.published.log.stem for stage in found if stage.published.log}
    assert logs >= {"rtx3080_baseline", "rtx3080_speedup8"}
    assert "rtx3080_speedup9" not in logs, "a shorter cosine is another schedule"


def test_the_difference_of_two_curves_is_over_steps_11_to_50(monkeypatch):
    (stage,) = finished("baseline")  # its losses are 6.0, up to step 50
    for losses, difference in (
        ({s: 9.0 if s < 11 else 6.5 if s % 2 else 5.75 for s in range(1, 31)}, 0.375),
        ({1: 1.0}, None),
    ):
        rows = {"step": [*losses], "loss": [*losses.values()]}
        monkeypatch.setattr(ladder_report, "read_columns", lambda _, rows=rows: rows)
        assert ladder_report.published_difference(stage, stage.finished) == difference


def test_runs_as_logged_are_compared_with_the_logs_and_unsynchronized_times_are_not(tmp_path):
    (tied,) = ladder_report.rows_of(finished("speedup2", folder=tmp_path))
    assert tied["loss_difference"] is None, "its note is not the run that was logged"
    found = finished("as_logged", folder=tmp_path)
    rows = ladder_report.rows_of(found)
    assert all(row["loss_difference"] for row in rows)
    assert all(row["published_tokens_per_sec"] is None for row in rows)
    ladder_report.report("as_logged", found)
    assert (tmp_path / "as_logged/loss.svg").is_file()
    assert (tmp_path / "as_logged/report.html").read_text().count('"published": true') == 3
    (baseline,) = ladder_report.rows_of(finished("baseline", folder=tmp_path))
    assert baseline["published_tokens_per_sec"] == pytest.approx(11_570, rel=0.01)


def test_each_series_knows_its_logs_and_the_factors_of_published_times_that_can_be_used():
    factors = {}
    for series, logs in SERIES.items():
        found = finished(series)
        assert found[0].base is None
        assert len({stage.published.log for stage in found} - {None}) == logs
        factors[series] = figures(found, "published_over_base")
    assert factors["gpu_ms"]["tf32"] == pytest.approx(1000 / 333)
    assert factors["a100"]["opt2_bf16"] == pytest.approx(40_214 / 34_541, rel=1e-3)
    assert factors["a100"]["opt3"] == pytest.approx(104_613 / 40_214, rel=1e-3)
    assert [s for s, factor in factors["a100"].items() if not factor] == ["baseline", "opt2"]
    # cuda_bf16 ran on another GPU
    assert [stage for stage, factor in factors["mps"].items() if factor] == ["tf32"]
    assert not any(factors["speedup"].values())


def test_a_factor_of_an_a100_is_of_the_same_steps():
    over_base = figures(finished("speedup"), "a100_over_base")
    some = figures(finished("speedup1", "speedup3_bf16"), "a100_over_base")["speedup3_bf16"]
    assert some == pytest.approx(over_base["speedup2"] * over_base["speedup3_bf16"])
    assert over_base["speedup6_flash"] == pytest.approx(145_842 / 104_613)
    assert over_base["speedup6"] is None
    both = figures(finished("speedup5", "speedup6"), "a100_over_base")
    assert both["speedup6"] is None, "published at one batch, and this stage has twice its base's"
    other = figures(finished("a100/baseline", "speedup2"), "a100_over_base")
    assert other["speedup2"] is None


# ---- machines


def test_a_step_takes_twice_as_long_as_its_operations_at_the_matmul_rate():
    config = load_config(n_layer=12, vocab_size=50304, tie_weights=True)
    with torch.device("meta"):
        per_token = GPT(GPTConfig.of(config)).flops_per_token(config.seq_len)
    device = Device(tflops={"float32": 2e-12})  # 1 FLOP/s at 50% MFU
    assert device.step_seconds(config) == pytest.approx(4 * 1024 * per_token, rel=2e-3)


def test_a_gpu_without_bf16_climbs_with_fp16_and_with_muon_in_fp32(monkeypatch):
    found = {"name": "Tesla T4", "bf16": False}
    runs = climbed(monkeypatch, found, "speedup", "--stages", "2,3_bf16,15", *OFF)
    kinds = {name: (run.config.bf16, run.config.fp16) for name, run in runs.items()}
    assert kinds["speedup2"] == (False, False)
    assert kinds["speedup3_bf16"] == (False, True)
    assert kinds["speedup15"] == (False, False)
    assert "--fp16" in runs["speedup3_bf16"].command
    runs = climbed(monkeypatch, found | {"gpus": 2}, "speedup", "--nproc_per_node", "2", *OFF)
    assert "ddp" in runs
    assert not any(run.config.bf16 for run in runs.values())
    slow = finished("speedup2", "speedup3_bf16", "speedup4", bf16=False)
    assert [*figures(slow, "in_place_of_added_bf16").values()] == ["", "fp16", ""]
    both = finished("speedup2", "speedup3", "speedup4", bf16=False)  # as older ladders have it
    assert [*figures(both, "in_place_of_added_bf16").values()] == ["", "fp16", ""]
    ladder_report.report("ladder", slow)
    for name in ("report.md", "report.html"):
        text = (LADDER / name).read_text()
        assert "In place of bf16: speedup3_bf16 fp16, speedup4 fp16." in text
    assert "bf16 autocast, in fp16 here" in text


def test_speedup_climbs_medium_where_it_has_an_effect():
    found = plan("speedup", medium=True)
    names = [stage.name for stage in found]
    assert names[1:4] == ["speedup1", "speedup1_medium", "speedup2"]
    assert names[:2] + names[3:] == [stage.name for stage in plan("speedup")]
    assert {(stage.config.max_steps, *stage.config.notes()) for stage in found} == {(50,)}


def test_a_cpu_slow_in_bf16_leaves_out_its_rungs_and_runs_the_rest_in_fp32(capsys):
    found = plan("cpu", name="a CPU", slow_bf16=True)
    assert [stage.name for stage in found[:4]] == ["plain", "retain_memory", "compile", "flash"]
    assert not any(stage.config.bf16 for stage in found)
    assert capsys.readouterr().out == "".join(
        f"note: {name} is left out: a CPU gains nothing from it\n" for name in ("medium", "bf16")
    )
    wanted = plan("cpu", name="a CPU", slow_bf16=True, medium=True, of_runs=["--bf16"])
    assert [stage.name for stage in wanted[2:5]] == ["medium", "bf16", "compile"]
    assert wanted[3].config.bf16
    Path("mine").mkdir()
    Path("mine/a.yaml").write_text("seed: 2")
    Path("mine/b.yaml").write_text("{base: a.yaml, bf16: yes}")
    assert [stage.name for stage in plan("mine", name="a CPU", slow_bf16=True)] == ["a"]


def test_configs_that_are_each_others_base_are_one_error_line():
    Path("mine").mkdir()
    Path("mine/a.yaml").write_text("base: b.yaml")
    Path("mine/b.yaml").write_text("base: a.yaml")
    with refused(r"circular base: b\.yaml -> a\.yaml"):
        climb("mine")


def test_several_runs_have_a_gpu_each_of_those_that_the_user_has_chosen(monkeypatch):
    started = []

    def start_process(command, environment):
        started.append(environment["CUDA_VISIBLE_DEVICES"])
        return Mock(wait=lambda: 0), io.StringIO()

    monkeypatch.setattr(climbing, "start_process", start_process)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    climbing.run_commands([["a"], ["b"]])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7")
    climbing.run_commands([["a"], ["b"]])
    assert started == ["0", "1", "2", "GPU-7"]


def test_some_stages_are_climbed_by_their_numbers_over_the_first(monkeypatch):
    runs = climbed(monkeypatch, {}, "a100", "--stages", "3,1,opt8", *OFF)
    assert bases_of([*runs.values()]) == {"opt1": "baseline", "opt3": "opt1", "opt8": "opt3"}
    files = [runs[name].file for name in ("opt3", "opt1")]
    assert card_of("opt3", *files).title == "torch.compile, and all before it"
    with refused(r"--stages 99: no such stage; there are baseline, 0, 1,"):
        climb("a100", "--stages", "99", *OFF)


def test_a_gpu_searches_for_kernels_once_per_size_of_matmuls(capsys):
    gpu = Device(gpus=1, tflops={"float32": 50.0})
    for options, text in (([], "34 minutes"), (["--compile_mode=default"], "7 minutes")):
        climbing.announce(stages.plan(["speedup"], Record(), options, gpu), [], 0, gpu)
        assert f"takes about {text}" in capsys.readouterr().out


def test_the_quick_ladder_is_of_a_small_model_and_has_a_rung_of_noise(monkeypatch, capsys):
    found = {"tflops": {"float32": 0.2, "bfloat16": 0.4}}
    runs = climbed(monkeypatch, found, "speedup", "--quick", "--", "--lr", "0.5")
    assert [*runs][:3] == ["baseline", "baseline_again", "speedup1"]
    assert runs["speedup10"].base is runs["speedup8"]
    first, again = (runs[name].config for name in ("baseline", "baseline_again"))
    assert again.seed != first.seed
    assert again.model_copy(update={"seed": first.seed}) == first
    for config in (stage.config for stage in runs.values()):
        assert (config.n_embd, config.lr) == (256, 0.5)
        assert (config.dataset, config.compile_mode) == ("pydocs", "default")
    shapes = {name: (run.config.batch_size, run.config.seq_len) for name, run in runs.items()}
    longer = ["speedup13", "speedup15"]
    assert [shapes.pop(name) for name in longer] == [(2, 512)] * 2
    assert {*shapes.values()} == {(4, 256)}, "a larger batch would be credited to a stage"
    assert {"speedup3_bf16", "speedup6_flash"} < {*shapes}
    assert "shorter: fewer --rounds" in capsys.readouterr().out
    assert runs["speedup6_flash"].record.folder == Path("logs/speedup_quick")


def test_the_pages_of_a_small_model_name_what_ran():
    stored("speedup_quick")
    assert climb("speedup", "--quick", "--report_only") == 0
    for name in ("report.md", "report.html"):
        text = Path("logs/speedup_quick", name).read_text()
        assert "The quick speedup ladder, with a small model" in text
        assert "4 layers, width 256, context 256, batch 2, 512 tokens a step, 10 steps, co" in text
        assert "GPT-2 (124M)" not in text
    assert "A context of 512 tokens" in text
    assert "seq_len: 512  # in the YAML 2048" in text
    assert "max_steps: 10  # in the YAML 50" in text
    found = plan("speedup2", "speedup3", of_runs=["--batch_size=1"])
    assert card_of_stage(found[1]).title == "bf16 autocast", "both had a batch of 1"
    assert card_of_stage(plan("speedup2", "speedup3")[1]).title == "bf16 autocast, and a batch of 3"
    (small,) = plan("baseline", of_runs=["--batch_size=4", "--n_layer=3", "--n_embd=48"])
    # the YAML's batch_size of 2 is not the 2 in the model's name
    assert card_of_stage(small).title == "GPT-2 (3 layers, width 48) in plain fp32"
    (whole,) = finished("baseline")
    ladder_report.report("ladder", [whole])
    assert "GPT-2 (124M) in plain fp32" in (LADDER / "report.html").read_text()


def rates_of(fp32, bf16=None, fp16=None):
    return {"float32": fp32, "bfloat16": bf16 or 2 * fp32, "float16": fp16 or bf16 or 2 * fp32}


@pytest.mark.parametrize(
    ("gpu", "layers", "batches"),
    [
        ({"memory_mb": 80_000, "tflops": rates_of(50.0, 600.0)}, 12, 16),  # H100
        ({"memory_mb": 24_000, "tflops": rates_of(50.0, 100.0)}, 12, 5),  # RTX 4090
        ({"memory_mb": 15_000, "tflops": rates_of(4.5, 0.5, 25.0), "bf16": False}, 12, 2),  # T4
        ({"memory_mb": 8_000, "tflops": rates_of(10.0)}, 4, 2),
        ({"memory_mb": 80_000, "tflops": rates_of(50.0, 600.0), "gpus": 0}, 4, 2),
    ],
)
def test_the_quick_ladder_of_a_gpu_has_all_layers_and_the_batches_that_fit(gpu, layers, batches):
    """Otherwise launches would take all the time of a step."""
    device = Device(**{"gpus": 1} | gpu)
    found = {s.name: s.config for s in quick.quick_stages(Record(), [], device)}
    assert {config.n_layer for config in found.values()} == {layers}
    shapes = {"baseline": (2, 1024), "speedup6_flash": (2, 1024), "speedup13": (1, 2048)}
    for name, (batch_size, seq_len) in shapes.items():
        assert (found[name].batch_size, found[name].seq_len) == (batches * batch_size, seq_len)


def test_the_quick_ladders_model_suits_the_machine_but_stays_once_it_is_begun():
    for rates, n_embd in (
        ({}, 128),
        (rates_of(0.02), 128),
        (rates_of(0.2, 0.02), 128),
        (rates_of(0.2), 256),
        (rates_of(20.0), 768),
    ):
        first = quick.quick_stages(Record(), [], Device(tflops=rates))[0]
        assert first.config.n_embd == n_embd
    assert quick.quick_stages(first.record, [], Device())[0].config.n_embd == 768


def climbed(monkeypatch, found, *arguments):
    """The stages that a ladder would run on a machine of which `found` is known."""
    runs = []
    monkeypatch.setattr(ladder, "measure_device", lambda _: Device(**found))
    monkeypatch.setattr(ladder, "run_stages", lambda _, stages, *__: runs.extend(stages))
    with refused("no finished stage"):
        climb(*arguments)
    return {stage.name: stage for stage in runs}


def test_ddp_ends_the_speedup_ladder_where_there_are_gpus_and_its_corpus(monkeypatch):
    for gpus in (1, 2):
        assert "ddp" not in climbed(monkeypatch, {"gpus": gpus}, "speedup")
    asked = climbed(monkeypatch, {}, "speedup", "--nproc_per_node", "2")
    assert (asked["ddp"].ranks, asked["baseline"].ranks) == (2, 1)
    chosen = ("speedup", "--nproc_per_node", "2", "--stages")
    assert "ddp" not in climbed(monkeypatch, {}, *chosen, "2")
    assert [*climbed(monkeypatch, {}, *chosen, "ddp", *OFF)] == ["baseline", "ddp"]
    assert asked["ddp"].published.tokens_per_sec == 211_646
    Path("data/fineweb").mkdir(parents=True)
    Path("data/fineweb/fineweb_train_000000.bin").touch()
    assert "ddp" in climbed(monkeypatch, {"gpus": 2}, "speedup")


def test_what_a_machine_is_asked_before_a_ladder_is_answered(forked_processes, capsys):
    found = climbing.measure_device("cpu")
    assert found.gpus == 0
    assert found.memory_mb > 1000
    # missing if the other tests keep this machine too busy to measure it
    rates = [*found.tflops.values(), found.gigabytes_per_s, found.launch_us]
    assert all(rate is None or rate > 0 for rate in rates)
    assert climbing.measure_device("no-such-device") == Device()
    assert capsys.readouterr().out.startswith("note: the device could not be measured: ")


# ---- pictures, tables, versions


def test_plot_draws_the_losses_of_runs_with_those_of_validation():
    Path("a$b$").mkdir()
    Path("a$b$/log.csv").write_text(f"{HEADER}1,5.0,0.1,1.0,10,9\n2,4.0,0.1,,10,9\n")
    Path("a$b$/eval.csv").write_text("step,val_loss,hellaswag\n0,6.0,\n1,,0.25\n2,4.5,0.3\n")
    assert climb("--plot", "a$b$") == 0
    picture = Path("comparison.svg").read_text()
    ElementTree.fromstring(picture)
    training, validation = re.findall(r'<polyline.* points="(.*?)"', picture)
    places = [[*map(float, place.split(","))] for place in training.split()]
    assert places[0][0] < places[1][0], "steps go to the right"
    assert places[0][1] < places[1][1], "a lower loss is drawn lower"
    assert len(places) == len(validation.split()) == 2
    Path("begun").mkdir()
    Path("begun/log.csv").write_text(HEADER)
    assert climb("--plot", "a$b$", "begun") == 0
    Path("a$b$/log.csv").write_text("step,loss,lr\n1,5.0,0.1\n")
    with refused(r"log.csv: has no column norm"):
        climb("--plot", "a$b$")


def test_a_terminal_of_80_columns_shows_titles_factors_and_the_total(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    stored("speedup_quick")
    assert climb("speedup", "--quick", "--report_only") == 0
    printed = capsys.readouterr().out
    columns = ["stage", "x base", "predicted", "A100", "x first"]
    assert re.split("  +", printed.splitlines()[2].strip()) == columns
    assert "speedup5: torch.compile" in printed
    assert max(map(len, printed.partition("\nlogs/")[0].splitlines())) <= 80
    assert printed.splitlines()[-1].startswith("speedup15 trains 2.00 (1.83 to 2.23) times as fast")


@pytest.mark.parametrize(
    ("interleaved", "options", "how"),
    [
        ("", [], "1.00 times as fast as baseline (the ratio of two single runs)"),
        ("speedup1", [], "1.00 times as fast as baseline (the ratio of two single runs)"),
        ("speedup1 speedup2", [], "6.000 (6.000 to 6.000) times as fast as baseline (the product "),
    ],
)
def test_the_last_line_says_how_many_times_as_fast_and_how_that_is_known(
    interleaved, options, how, capsys
):
    found = finished("baseline", "speedup1", "speedup2", of_runs=options)
    for stage, factor in zip(found[1:], (2.0, 3.0), strict=True):
        if stage.name in interleaved:
            fake_comparison(stage, factor)
    ladder_report.report("ladder", found)
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"speedup2 trains {how}" in last
    most = {"": "", "speedup1": "; most: Weight tying, 2.000 (2.000 to 2.000)"}
    assert last.endswith(most.get(interleaved, "; most: TF32, 3.000 (3.000 to 3.000)"))


def test_a_total_over_another_batch_says_so(capsys):
    first, second = finished("baseline", "speedup13")
    fake_comparison(second, 2.0)
    ladder_report.report("ladder", [first, second])
    said = (
        "2.000 (2.000 to 2.000) times as fast as baseline (interleaved, at 2,048 and 6,144 tokens"
    )
    assert said in capsys.readouterr().out


def test_a_narrow_terminal_cuts_no_name_and_no_figure(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    row = ["speedup5_max_auto", "12,345", "[2] (1 to 3)", "a longer text that may be broken"]
    tables.print_table("title", ["stage", "ms/step", "x base", "note"], [row])
    printed = capsys.readouterr().out
    assert [cell for cell in row if cell in printed] == row[:2]
    assert "…" not in printed
