"""Ladders climbed for real on tiny models: runs, records, reports, failures."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import ladder
from config import Config, load_config
from measure.interleaved.comparison import Comparison
from measure.interleaved.process import why_it_failed
from measure.interleaved.ratio import product
from measure.ladder import climb as climbing
from measure.ladder import published, quick, stages, staircase
from measure.ladder import report as ladder_report
from measure.ladder.explain import card_of, card_of_stage
from measure.ladder.record import Device, Record, Run, Summary, settings
from measure.ladder.results import look_up
from measure.report import tables
from measure.report.estimate import Estimate
from model import GPT, GPTConfig
from run.log import LOG_COLUMNS
from runtime.cli import CONFIG_DIR, parse
from runtime.files import sole_writer
from tests.conftest import ALONE, ROOT, TINY, TINY_RUN, cases, ended, refused, run, wait_for
from tests.test_resume import needs_proc
from train import train

HEADER = "step,loss,lr,norm,dt_ms,tokens_per_sec\n"
LADDER = Path("logs/ladder")
OFF = ("--rounds", "0")
CPU = Device(name="cpu")  # measuring one starts a process that imports PyTorch
pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture
def configs(corpus, tmp_path):
    """Two configs of a tiny model, `plain.yaml` and `flash.yaml`, in the working directory."""
    plain = TINY | TINY_RUN | {"max_steps": 12, "lr": 1e-3, "lr_schedule": "cosine"}
    (tmp_path / "plain.yaml").write_text(json.dumps(plain))
    (tmp_path / "flash.yaml").write_text("{base: plain.yaml, flash: true}")


def options_of(*arguments):
    own, of_runs = ladder.split_command_line(list(arguments))
    return parse(ladder.LadderOptions, own, positional="configs"), of_runs


def climb(*arguments, device=CPU):
    """The command line `python ladder.py ...` in this process; returns its exit status."""
    try:
        ladder.main(*options_of(*arguments), lambda _: device)
    except SystemExit as stopped:
        return stopped.code
    return 0


def planned(*arguments, **device):
    """The stages that a command line climbs on a device, by name."""
    options, of_runs = options_of(*arguments)
    found = ladder.planned(options, (), of_runs, Device(**device))
    return {stage.name: stage for stage in ladder.with_chosen(options, found)}


def plan(*configs, options=(), **device):
    return stages.with_bases(stages.plan(configs, options, Device(**device)))


def finished(*configs, **options):
    """The record of a ladder whose stages have run, and the stages."""
    record, found = Record(folder=LADDER), plan(*configs, **options)
    for stage in found:
        fake_run(record, stage)
    return record, found


def fake_run(record, stage):
    """Record a finished run of a stage, without running it."""
    steps, losses = [*range(1, 51)], 50 * [6.0]
    log = {"step": steps, "loss": losses} | dict.fromkeys(LOG_COLUMNS[2:], losses)
    summary = dict.fromkeys(Summary.model_fields, "10") | {"world_size": stage.ranks}
    summary |= {"interrupted": False}
    run = Run(config=stage.config.model_dump(mode="json"), summary=summary, log=log)
    record.runs[stage.name] = run
    record.stages[stage.name] = stage.planned
    record.save()


def fake_comparison(record, stage, factor, **about):
    """Record the interleaved runs of a stage and its base, without any."""
    turns = [{"seconds": [1.0], "tokens": 1, "peak_memory_mb": 10.0 * factor}]
    sides = [
        {"name": "any", "tokens_per_sec": [rate] * 6, "turns": turns} for rate in (1.0, factor)
    ]
    configs = [settings(side.config) for side in (stage.base, stage)]
    about = {"machine": "any", "device": "any", "left_out": 3, "settings": configs} | about
    record.comparisons[stage.key] = Comparison(**about, sides=sides)
    record.save()


def table(path):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return {row.get("stage") or row["optimization"]: row for row in rows}


def results(ladder="ladder"):
    return table(Path("logs", ladder, "results.csv"))


def figures(record, found, column):
    """A column of a ladder's table, by stage."""
    rows = ladder_report.rows_of([look_up(record, stage) for stage in found])
    return {row.name: row.values[column] for row in rows}


def bases_of(found):
    return {stage.name: stage.base.name for stage in found if stage.base}


# ---- climbing


@pytest.mark.usefixtures("configs", "forked")
def test_a_failing_stage_is_reported_and_the_others_go_on(capsys):
    Path("bad.yaml").write_text("base: plain.yaml\nlr: 1e30\n")
    assert climb("--nproc_per_node", "2", "bad.yaml", "flash.yaml", *OFF) == 1
    assert list(results()) == ["flash"]
    for text in (capsys.readouterr().out, (LADDER / "report.md").read_text()):
        assert "failed: bad: step " in text
    assert json.loads((LADDER / "flash/summary.json").read_text())["world_size"] == 2


@pytest.mark.usefixtures("configs", "forked")
def test_a_run_that_starts_from_weights_counts_as_finished():
    train(load_config("plain.yaml", max_steps=1), ALONE)
    Path("tuned.yaml").write_text("{base: plain.yaml, init_from: logs/plain}")
    assert climb("tuned.yaml", *OFF) == 0
    assert list(results()) == ["tuned"]


@pytest.mark.usefixtures("configs")
def test_ctrl_c_keeps_finished_stages_and_one_that_was_stopped_counts_as_failed():
    found, record = plan("plain.yaml", "flash.yaml", "flash.yaml"), Record(folder=LADDER)
    record.stages = {stage.name: stage.planned for stage in found}
    fake_run(record, found[1])  # an older run, which the failed one replaces

    def run(commands, *_):
        (command,) = commands
        if "--run_name=flash_3" in command:
            raise KeyboardInterrupt
        config = parse(Config, command[2:], config_file=True)
        train(config, ALONE)
        if config.run_name == "flash":  # its status is 0 after a signal
            path = LADDER / "flash/summary.json"
            path.write_text(path.read_text().replace('"interrupted": false', '"interrupted": true'))
        return [None]

    with pytest.raises(KeyboardInterrupt):
        climbing.run_stages(record, found, Device(), run)
    again = "stopped before its last step; the same command runs it again"
    assert record.failures == [f"failed: flash: {again}"]
    assert climb("plain.yaml", "--report_only") == 0
    assert list(results()) == ["plain"]


@pytest.mark.parametrize(
    ("status", "printed", "reason"),
    [
        (-9, "a warning\n", "killed by signal 9, as the system does when memory runs out"),
        (1, "a warning\nerror: full\nmore\n", "full"),
        (1, "", "exit status 1"),
    ],
)
def test_why_a_command_failed_is_a_line(status, printed, reason):
    assert why_it_failed(status, io.StringIO(printed)) == reason


STARTS = {
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


@pytest.mark.usefixtures("configs")
def test_two_ladders_do_not_climb_in_one_folder():
    """Another thread is refused the lock, as another process would be."""
    said = "^logs/ladder: another process is writing it; wait for it, or choose another name$"
    with ThreadPoolExecutor() as elsewhere, sole_writer(LADDER), refused(said):
        elsewhere.submit(climb, "plain.yaml", *OFF).result()
    assert not LADDER.exists()


def test_a_climb_keeps_what_another_saved_just_before_it():
    begun = Record.load(LADDER)
    saved, _ = finished("baseline")
    begun.read_again()
    assert begun.runs == saved.runs
    with refused("logs/ladder: has the ladder of baseline; name these"):
        climb("speedup1", "--report_only")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"runs": 1}', '{"size": [4, 4, 256, 0]}'])
def test_a_damaged_record_is_one_line(text):
    LADDER.mkdir(parents=True)
    (LADDER / "ladder.json").write_text(text)
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
--across ROOT/logs/results/epyc-avx512bf16-2cores/recipes => recipes: no finished stage
--ablate --plot x => --ablate has no effect with --plot; leave it out
--across x --rerun => --rerun has no effect with --across; leave it out
baseline -- --config y => --config: the ladder sets it for each run
baseline -- --run_name=x => --run_name: the ladder
learning --sweep lrr=1,2 => --lrr: unknown option; did you mean --lr?
learning --sweep optimizer=adamw,moun => 'muon', not 'moun'; did you mean muon?
learning --sweep lr=[ => --sweep lr=[: takes different values without /, of any option but seed
learning --sweep seed=1,2 => --sweep seed=1,2: takes different values
learning --sweep lr=1,1 => --sweep lr=1,1: takes different values
learning --sweep init_from=a/b,c => --sweep init_from=a/b,c: takes different values without /
learning --sweep eval_tokens=2,4 => eval_tokens=4: its eval_tokens is not that of eval_tokens=2:
learning --sweep lr=1,2 --stages lr => --stages has no effect with --sweep; leave it out
learning mine --sweep lr=1,2 => --sweep takes one config
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


@pytest.mark.parametrize("lines", [1, 2_000])
def test_changes_that_were_not_committed_are_kept_once_and_named(lines):
    diff = "diff --git a/train.py b/train.py\n" + lines * "+print()\ndiff --git a/x b/model.py\n"
    record, found = finished("baseline", "speedup1")
    for _ in range(2):
        record.keep_changes("0a1b-dirty", diff)
    (kept,) = record.changes["0a1b-dirty"]
    assert kept.diff == diff if lines == 1 else re.fullmatch("sha256 [0-9a-f]{64}", kept.diff)
    for name, commit in (("baseline", "0a1b-dirty"), ("speedup1", "ffff-dirty")):
        record.runs[name].summary.git = commit
    ladder_report.report_speeds("ladder", record, found)
    text = (LADDER / "report.md").read_text()
    assert "- 0a1b-dirty: with changes to train.py, model.py" in text
    assert "- ffff-dirty: its changes to the commit were not kept\n" in text


def test_a_report_says_why_a_stage_or_its_interleaved_rounds_are_left_out(capsys):
    record, found = finished("baseline", "speedup1", "speedup2")
    record.runs["speedup1"].config["older"] = 3  # an option that was on
    fake_comparison(record, found[2], 1.5)
    record.comparisons["speedup2"].settings[1]["max_steps"] = 7
    ladder_report.report_speeds("ladder", record, found)
    printed, written = capsys.readouterr().out, (LADDER / "report.md").read_text()
    for line in (
        "note: speedup1 is left out: --older: unknown option",
        "note: the interleaved rounds of speedup2 are left out: max_steps 7 there, 50 here\n",
    ):
        assert line in printed
        assert line in written


@pytest.mark.parametrize(
    ("named", "options", "ranks", "reason"),
    [
        (["baseline"], ["--batch_size=1", "--no-bias"], 1, "bias on there, off here, batch_size 2"),
        (["baseline"], [], 2, "note: baseline is left out: ranks 1 there, 2 here$"),
        (
            ["speedup1", "speedup2"],
            [],
            1,
            "ladder.json has baseline, but lacks speedup1, speedup2$",
        ),
    ],
)
def test_a_report_without_rows_says_what_the_record_has_and_lacks(named, options, ranks, reason):
    record, _ = finished("baseline")
    found = stages.plan(named, options, Device(), ranks)
    with refused(f"no finished stage to report\nnote: .*{reason.removeprefix('note: ')}", lines=2):
        ladder_report.report_speeds("ladder", record, found)


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
    """True if a ladder's folder has the stored table, text and pictures, and no others."""
    folders = Path("logs", name), RESULTS / machine / name
    made, kept = ({path.name: path for path in folder.iterdir()} for folder in folders)
    compared = kept.keys() - {"ladder.json", "report.html"}
    return made.keys() == {*compared, "ladder.json", "report.html"} and all(
        made[file].read_bytes() == kept[file].read_bytes() for file in compared
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


@pytest.mark.parametrize(
    ("machine", "arguments"),
    [
        (EPYC, "speedup --quick"),
        ("h200", "gpu_ms"),
        (EPYC, "recipes"),
        (EPYC, "--ablate speedup10"),
    ],
)
def test_a_stored_ladder_gives_the_same_report_with_later_code(machine, arguments):
    """Which has one option more, and one less."""
    name = arguments.replace("--ablate ", "ablate_").replace(" --", "_")
    path = stored(name, machine)
    if name == "recipes":
        stored("ablate_normuon", machine)  # its column "among all the others"
    text = path.read_text().replace('"n_layer"', '"older": false, "n_layer"')
    assert '"dropout": 0.0' in text
    path.write_text(re.sub(r'"dropout": 0.0,\s*', "", text))
    assert climb(*arguments.split(), "--report_only") == 0
    assert is_the_stored_report(name, machine)


def test_the_record_has_the_options_and_the_ranks_of_all_stages():
    words = "speedup --nproc_per_node 2 -- --batch_size 1 --betas 0.8,0.9"
    found = planned(*words.split(), bf16=False, medium=True, gpus=2)
    record = Record(stages={name: stage.planned for name, stage in found.items()})
    before = stages.planned_before(Record.model_validate_json(record.model_dump_json()))
    assert [stage.name for stage in before] == [*found]
    assert {"speedup1_medium", "ddp"} < found.keys()
    for was, stage in zip(before, found.values(), strict=True):
        assert (was.config, was.ranks) == (stage.config, stage.ranks)


def test_an_ablation_switches_each_optimization_on_first_and_on_last():
    (whole,) = plan("speedup3", options=["--batch_size=1"], bf16=False)
    pairs = stages.ablated_speeds(whole)
    on = {
        name: [
            [stage.base.config.optimizations_on(), stage.config.optimizations_on()]
            for stage in both
        ]
        for name, both in pairs.items()
    }
    all_on = ["tie_weights", "tf32", "fp16"]
    assert on == {
        name: [[[], [name]], [[other for other in all_on if other != name], all_on]]
        for name in all_on
    }


# ---- interleaved runs


@pytest.mark.usefixtures("configs", "forked")
def test_each_stage_runs_once_and_is_interleaved_once_with_its_base():
    Path("tied.yaml").write_text("base: flash.yaml\ntie_weights: true\n")
    command = ["plain.yaml", "flash.yaml", "tied.yaml", "--rounds", "6"]
    assert climb(*command) == 0
    assert {"report.md", "first.svg"} <= set(os.listdir(LADDER))
    rows, record = results(), Record.load(LADDER)
    assert list(record.runs) == list(rows) == ["plain", "flash", "tied"]
    ratios = {}
    for name in ("flash", "tied"):
        found = record.comparisons[name]
        assert found.date
        ratios[name] = found.ratio()
        assert float(rows[name]["over_base_low"]) == pytest.approx(ratios[name].low)
        assert int(rows[name]["rounds"]) == found.rounds >= 6
    assert f"| {product([*ratios.values()])} |" in (LADDER / "report.md").read_text()

    climbed = stages.with_bases(stages.plan(command[:3], [], CPU))
    total = ladder_report.fastest_over_first(record, climbed)
    assert (staircase.TOTAL in record.comparisons) == bool(total and total.comparison)

    # finished work is not repeated, unless another machine did it: its speed is another one
    record.runs["plain"].summary.machine = "another"
    record.save()
    logs = [LADDER / name / "log.csv" for name in rows]
    before = [path.stat().st_mtime_ns for path in logs]
    assert climb(*command) == 0
    after = [path.stat().st_mtime_ns for path in logs]
    assert [a == b for a, b in zip(after, before, strict=True)] == [False, True, True]
    again = Record.load(LADDER).comparisons
    assert [again[name] for name in ratios] == [record.comparisons[name] for name in ratios]

    # a report needs no run folders
    for name in rows:
        shutil.rmtree(LADDER / name)
    written = (LADDER / "report.md").read_bytes()
    assert climb("--report_only", *command) == 0
    assert (LADDER / "report.md").read_bytes() == written
    for options, ranks, is_known in (([], 1, True), (["--lr=2e-3"], 1, False), ([], 2, False)):
        flash = stages.with_bases(stages.plan(command[:2], options, Device(), ranks))[1]
        assert bool(look_up(record, flash).comparison) == is_known


@pytest.mark.parametrize(("memory", "fits"), [(250, True), (249, False), (None, True)])
def test_sides_that_have_no_room_together_free_memory_after_their_turns(memory, fits):
    """And nothing else: a stage may be the retention of freed memory itself."""
    record, pair = finished("baseline", "speedup1")
    for finished_run in record.runs.values():
        finished_run.summary.peak_memory_mb = 100
    for known, has_room in ((record, fits), (Record(), memory is None)):
        sides = climbing.sides_of(known, pair, Device(memory_mb=memory))
        given = [{*side.environment} - {"PYTHONPATH", "PYTHONSAFEPATH"} for side in sides]
        assert given == [set() if has_room else {"FREES_CACHE"}] * 2


@pytest.mark.usefixtures("configs", "forked")
def test_a_side_that_fails_is_reported_and_so_is_the_rest():
    record, found = finished("plain.yaml", "flash.yaml", options=["--data_dir=nowhere"])
    climbing.interleave_stages(record, found[1:], 6, Device())
    assert record.failures[0].startswith("failed: flash: plain: ")
    ladder_report.report_speeds("ladder", record, found)
    assert list(results()) == ["plain", "flash"]
    assert record.failures[0] in (LADDER / "report.md").read_text()


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
SERIES = {
    "speedup": 8,
    "a100": 10,
    "mps": 7,
    "gpu_ms": 0,
    "recipes": 0,
    "as_logged": 3,
}
BATCH = {"batch_size", "seq_len", "block_size", "total_batch_tokens"}
RATES = {"lr", "min_lr", "embed_lr", "head_lr", "scalar_lr", "warmup_steps", "lr_schedule"}
OWN_RATES = {"untied.yaml", "value_residual.yaml"}  # their parameters are not those of their bases


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
    record, found = finished("baseline", "speedup1", "speedup2")
    record.runs["speedup1"].summary.machine = "another"
    same = Estimate(1.0)
    assert [*figures(record, found, "over_first").values()] == [same, None, same]
    assert [*figures(record, found, "over_base").values()] == [same, None, None]


def test_a_config_is_not_compared_with_itself():
    _, again, other = plan("speedup1", "speedup1", "speedup2")
    for stage, differs in ((again, False), (other, True)):
        assert climbing.is_to_be_compared(Record(), stage, Device(), rerun=True) == differs


def test_the_page_of_machines_has_a_column_for_each_and_the_published_factors():
    for machine, factor in (("server", 3.0), ("laptop", 1.1)):
        record, found = finished("speedup1", "speedup2", "speedup3")
        record.folder = Path(machine, "speedup")
        record.runs["speedup2"].summary.median_tokens_per_sec = 20
        fake_comparison(record, found[1], factor)
    del record.runs["speedup2"]
    record.save()
    assert climb("--across", "server/speedup", "laptop/speedup", "--log_dir", "out") == 0
    text = Path("out/machines.md").read_text()
    server, laptop = "[server](../server/speedup)", "[laptop](../laptop/speedup)"
    assert f"## `python ladder.py speedup`\n\n| stage | {server} | {laptop} | published" in text
    assert "\n| TF32 | 3.000 (3.000 to 3.000) |  | 2.44 |\n" in text
    assert "\n| fastest over first | 3.000 (3.000 to 3.000) | 1.00 |  |\n" in text
    with refused("^nowhere: no finished stage to report: no ladder.json; "):
        climb("--across", "server/speedup", "nowhere")


def test_the_committed_page_of_machines_is_written_from_the_committed_ladders():
    Path("logs").symlink_to(ROOT / "logs")
    folders = sorted(map(str, Path("logs/results").glob("*/gpu_ms")))
    folders += sorted(map(str, Path("logs/results").glob("*/speedup_quick")))
    assert climb("--across", *folders, "--log_dir", "docs") == 0
    assert Path("docs/machines.md").read_text() == (ROOT / "docs/machines.md").read_text()


def test_published_figures_are_those_of_the_logs():
    with open(published.PUBLISHED, newline="") as file:
        rows = {row["config"]: row for row in csv.DictReader(file)}
    logs = {row["log"] for row in rows.values() if row["log"]}
    known = {path.name for path in published.REFERENCE.glob("*_*.csv")} - {"gpu_ms.csv"}
    assert logs == known, "every published log belongs to a config"
    speeds = {row["tokens_per_sec"] for name, row in rows.items() if name.startswith("a100/opt")}
    for name, row in rows.items():
        assert (CONFIG_DIR / f"{name}.yaml").is_file()
        if row["log"] and row["device"]:
            for column, figure in (("dt_ms", "ms_per_step"), ("tokens_per_sec",) * 2):
                assert float(row[figure]) == published.median_of(
                    published.REFERENCE / row["log"], column
                )
        if name.startswith("gpu_ms/"):
            listed = (published.REFERENCE / "gpu_ms.csv").read_text()
            assert f"{name[7:]},{float(row['ms_per_step']):g}\n" in listed
        # the a100 stage and the timing with the same optimizations
        assert row["a100_tokens_per_sec"] in {"", *speeds}


def test_the_series_of_ones_own_in_the_docs_is_climbed_and_compared_with_its_log():
    text = (ROOT / "docs/measuring.md").read_text().partition("## A series of your own")[2]
    block = re.search(r"\n\n((    .*\n|\n)+)", text)[1]
    subprocess.run(["bash", "-c", textwrap.dedent(block)], check=True)
    rows = "".join(f"{step},6.5,,,100,1000\n" for step in range(1, 51))
    Path("configs/mine/clipped.csv").write_text(HEADER + rows)
    assert ladder.folder_of(options_of("configs/mine")[0]) == Path("logs/mine")
    record, found = finished("configs/mine")
    assert bases_of(found) == {"faster": "start", "clipped": "faster"}
    assert [*figures(record, found, "loss_difference").values()] == [None, None, 0.5]
    assert figures(record, found, "published_tokens_per_sec")["clipped"] == 1000


def own_series(**published):
    """A series of two stages, with the content of `<stage>.csv` beside their YAMLs."""
    folder = Path(f"series{len([*Path().iterdir()])}")  # published figures are read once
    folder.mkdir()
    (folder / "a.yaml").write_text("# First\n")
    (folder / "b.yaml").write_text("# Second\nbase: a.yaml\n")
    for stage, text in published.items():
        (folder / f"{stage}.csv").write_text(text)
    return str(folder)


def test_one_row_with_a_speed_is_what_was_published(capsys):
    rows = {"a": "device,ms_per_step\nRTX 3090,20\n", "b": "device,ms_per_step\nRTX 3090,16\n"}
    series = own_series(**rows)
    record, found = finished(series)
    assert figures(record, found, "published_over_base") == {"a": None, "b": 20 / 16}
    assert found[0].published.device == "RTX 3090"
    ladder_report.report_speeds("ladder", record, found)
    assert "published losses" not in capsys.readouterr().out
    ladder_report.report_speeds("ladder", *finished(series, options=["--n_layer=1"]))
    said = "published losses and times of a, b are left out: those runs were made without --n_layer"
    assert f"note: the {said}=1\n" in capsys.readouterr().out
    other = finished(own_series(**rows | {"b": "device,tokens_per_sec\nA100,9\n"}))
    assert figures(*other, "published_over_base") == {"a": None, "b": None}


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
    assert not any(stage.published.log for stage in plan("speedup", options=["--n_layer", "2"]))
    found = plan("speedup", options=["--max_steps", "20", "--bf16"])
    logs = {stage.published.log.stem for stage in found if stage.published.log}
    assert logs >= {"rtx3080_baseline", "rtx3080_speedup8"}
    assert "rtx3080_speedup9" not in logs, "a shorter cosine is another schedule"


def test_the_difference_of_two_curves_is_over_steps_11_to_50():
    ours = dict.fromkeys(range(1, 51), 6.0)
    theirs = {s: 9.0 if s < 11 else 6.5 if s % 2 else 5.75 for s in range(1, 31)}
    assert ladder_report.mean_difference(ours, theirs) == 0.375
    assert ladder_report.mean_difference(ours, {1: 1.0, 51: 1.0}) is None


def test_runs_as_logged_are_compared_with_the_logs_and_unsynchronized_times_are_not():
    difference = figures(*finished("speedup2"), "loss_difference")
    assert difference == {"speedup2": None}, "its note is not the run that was logged"
    record, found = finished("as_logged")
    assert all(figures(record, found, "loss_difference").values())
    assert not any(figures(record, found, "published_tokens_per_sec").values())
    ladder_report.report_speeds("as_logged", record, found)
    assert (LADDER / "report.html").read_text().count('<polyline class="published"') == 2
    (speed,) = figures(*finished("baseline"), "published_tokens_per_sec").values()
    assert speed == pytest.approx(11_570, rel=0.01)


def test_each_series_knows_its_logs_and_the_factors_of_published_times_that_can_be_used():
    factors = {}
    for series, logs in SERIES.items():
        record, found = finished(series)
        assert found[0].base is None
        assert len({stage.published.log for stage in found} - {None}) == logs
        factors[series] = figures(record, found, "published_over_base")
    assert factors["gpu_ms"]["tf32"] == pytest.approx(1000 / 333)
    assert factors["a100"]["opt2_bf16"] == pytest.approx(40_214 / 34_541, rel=1e-3)
    assert factors["a100"]["opt3"] == pytest.approx(104_613 / 40_214, rel=1e-3)
    assert [s for s, factor in factors["a100"].items() if not factor] == ["baseline", "opt2"]
    # cuda_bf16 ran on another GPU
    assert [stage for stage, factor in factors["mps"].items() if factor] == ["tf32"]
    assert not any(factors["speedup"].values())


def test_a_factor_of_an_a100_is_of_the_same_steps():
    def a100(*configs):
        return figures(*finished(*configs), "a100_over_base")

    over_base = a100("speedup")
    some = a100("speedup1", "speedup3_bf16")["speedup3_bf16"]
    assert some == pytest.approx(over_base["speedup2"] * over_base["speedup3_bf16"])
    assert over_base["speedup6_flash"] == pytest.approx(145_842 / 104_613)
    assert over_base["speedup6"] is None
    both = a100("speedup5", "speedup6")["speedup6"]
    assert both is None, "published at one batch, and this stage has twice its base's"
    assert a100("a100/baseline", "speedup2")["speedup2"] is None


# ---- machines


def test_a_step_takes_twice_as_long_as_its_operations_at_the_matmul_rate():
    config = load_config(n_layer=12, vocab_size=50304, tie_weights=True)
    with torch.device("meta"):
        per_token = GPT(GPTConfig.of(config)).flops_per_token(config.seq_len)
    device = Device(tflops={"float32": 2e-12})  # 1 FLOP/s at 50% MFU
    assert device.step_seconds(config) == pytest.approx(4 * 1024 * per_token, rel=2e-3)


def test_a_gpu_without_bf16_climbs_with_fp16_and_with_muon_in_fp32():
    t4 = {"name": "Tesla T4", "bf16": False}
    some = planned("speedup", "--stages", "2,3_bf16,15", **t4)
    kinds = {name: (stage.config.bf16, stage.config.fp16) for name, stage in some.items()}
    assert kinds["speedup2"] == kinds["speedup15"] == (False, False)
    assert kinds["speedup3_bf16"] == (False, True)
    assert "--fp16" in some["speedup3_bf16"].command(LADDER)
    assert not any(stage.config.bf16 for stage in planned("speedup", **t4, gpus=2).values())
    for added in ("speedup3", "speedup3_bf16"):  # older ladders have the first
        record, found = finished("speedup2", added, "speedup4", bf16=False)
        instead = figures(record, found, "in_place_of_added_bf16")
        assert [*instead.values()] == ["", "fp16", ""]
    ladder_report.report_speeds("ladder", record, found)
    for name in ("report.md", "report.html"):
        text = (LADDER / name).read_text()
        assert "In place of bf16: speedup3_bf16 fp16, speedup4 fp16." in text
    assert "bf16 autocast, in fp16 here" in text


def test_speedup_climbs_medium_where_it_has_an_effect():
    found, without = planned("speedup", medium=True), planned("speedup")
    assert found.keys() - without.keys() == {"speedup1_medium"}
    assert {(s.config.max_steps, *s.config.notes()) for s in found.values()} == {(50,)}


def test_a_cpu_slow_in_bf16_leaves_out_its_stages_and_runs_the_rest_in_fp32(capsys):
    slow = {"name": "a CPU", "slow_bf16": True}
    found = plan("cpu", **slow)
    assert [stage.name for stage in found[:4]] == ["plain", "retain_memory", "compile", "flash"]
    assert not any(stage.config.bf16 for stage in found)
    assert capsys.readouterr().out == "".join(
        f"note: {name} is left out: a CPU gains nothing from it\n" for name in ("medium", "bf16")
    )
    wanted = plan("cpu", **slow, medium=True, options=["--bf16"])
    assert [stage.name for stage in wanted[2:5]] == ["medium", "bf16", "compile"]
    assert wanted[3].config.bf16


def test_several_runs_have_a_gpu_each_of_those_that_the_user_has_chosen(monkeypatch):
    def gpus(count):
        return [share.get("CUDA_VISIBLE_DEVICES") for share in climbing.shares_of_machine(count)]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (gpus(1), gpus(2)) == ([None], ["0", "1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7")
    assert gpus(3) == ["2", "GPU-7", "2"]


@pytest.mark.parametrize(
    ("device", "seeds", "ranks", "at_once"),
    [
        (Device(name="cpu"), 3, 1, 2),
        (Device(name="cpu"), 0, 1, 1),
        (Device(name="cpu"), 3, 2, 1),
        (Device(name="mps"), 3, 1, 1),
        (Device(name="a GPU", gpus=8), 3, 1, 3),
        (Device(), 3, 1, 1),
    ],
)
def test_runs_whose_losses_are_compared_train_at_once_one_per_gpu_or_core(
    device, seeds, ranks, at_once, monkeypatch
):
    monkeypatch.setattr(climbing, "cores", lambda: 2)
    (stage,) = plan("speedup1")
    stage.ranks = ranks
    assert climbing.runs_at_once(seeds, [stage], device) == at_once


def test_a_run_that_is_left_alone_has_the_share_of_the_others(monkeypatch):
    monkeypatch.setattr(climbing, "cores", lambda: 2)
    seen = list[str]()

    def run(commands, shares, _):
        seen.extend(share["OMP_NUM_THREADS"] for _, share in zip(commands, shares, strict=True))
        return ["not run"] * len(commands)

    found = plan("speedup1", "speedup2", "speedup3")
    climbing.run_stages(Record(seeds=3, folder=LADDER), found, Device(name="cpu"), run)
    assert seen == ["1", "1", "1"]


def test_some_stages_are_climbed_by_their_numbers_over_the_first():
    found = planned("a100", "--stages", "3,1,opt8")
    assert bases_of([*found.values()]) == {"opt1": "baseline", "opt3": "opt1", "opt8": "opt3"}
    files = [found[name].file for name in ("opt3", "opt1")]
    assert card_of("opt3", *files)[:2] == ("torch.compile", "all before it")
    with refused(r"--stages 99: no such stage; there are baseline, 0, 1,"):
        planned("a100", "--stages", "99")


def test_a_gpu_searches_for_kernels_once_per_size_of_matmuls(capsys):
    gpu = Device(gpus=1, tflops={"float32": 50.0})
    for options, text in (([], "34 minutes"), (["--compile_mode=default"], "7 minutes")):
        climbing.announce(stages.plan(["speedup"], options, gpu), [], 0, gpu)
        assert f"takes about {text}" in capsys.readouterr().out


def test_runs_at_once_share_a_cpu_but_have_a_gpu_each(capsys):
    for gpus, at_once, text in ((2, 1, "26 hours"), (2, 2, "13 hours"), (0, 2, "26 hours")):
        device = Device(gpus=gpus, tflops={"float32": 0.002, "bfloat16": 0.002})
        climbing.announce(plan("recipes/base"), [], 0, device, at_once)
        assert f"takes about {text}" in capsys.readouterr().out
    fast = Device(gpus=2, tflops={"float32": 1e9})
    for at_once, text in ((1, "6 minutes"), (2, "3 minutes")):  # to start 24 times, 15 s each
        climbing.announce(24 * plan("recipes/base"), [], 0, fast, at_once)
        assert f"takes about {text}" in capsys.readouterr().out


def test_the_quick_ladder_is_of_a_small_model_and_has_a_stage_of_noise():
    found = planned("speedup", "--quick", "--", "--lr", "0.5")
    assert [*found][:3] == ["baseline", "baseline_again", "speedup1"]
    assert found["speedup10"].base is found["speedup8"]
    first, again = (found[name].config for name in ("baseline", "baseline_again"))
    assert again.seed != first.seed
    assert again.model_copy(update={"seed": first.seed}) == first
    shapes = {name: (s.config.batch_size, s.config.seq_len) for name, s in found.items()}
    for config in (stage.config for stage in found.values()):
        assert (config.n_embd, config.lr) == (128, 0.5)
        assert (config.dataset, config.compile_mode) == ("pydocs", "default")
    assert [shapes.pop(name) for name in ("speedup13", "speedup15")] == [(2, 256)] * 2
    assert {*shapes.values()} == {(4, 128)}, "a larger batch would be credited to a stage"
    assert {"speedup3_bf16", "speedup6_flash"} < {*shapes}


def test_the_pages_of_a_small_model_name_what_ran():
    stored("speedup_quick")
    assert climb("speedup", "--quick", "--report_only") == 0
    text = Path("logs/speedup_quick/report.html").read_text()
    for part in (
        "The speedup_quick ladder: GPT-2 (4 layers, width 256)",
        "4 layers, width 256, context 256, batch 4, 1,024 tokens a step, 10 steps, c",
        "A context of 512 tokens",
        "seq_len: 512  # in the YAML 2048",
        "max_steps: 10  # in the YAML 50",
    ):
        assert part in text
    assert "GPT-2 (124M)" not in text


@pytest.mark.parametrize(
    ("configs", "options", "title"),
    [
        ("speedup2 speedup3", "--batch_size=1", ("bf16 autocast", "")),  # both had a batch of 1
        ("speedup2 speedup3", "", ("bf16 autocast", "a batch of 3")),
        # the YAML's batch_size of 2 is not the 2 in the model's name
        (
            "baseline",
            "--batch_size=4 --n_layer=3",
            ("GPT-2 (3 layers, width 768) in plain fp32", ""),
        ),
        ("baseline", "", ("GPT-2 (124M) in plain fp32", "")),
    ],
)
def test_a_card_has_the_title_of_what_ran(configs, options, title):
    *_, stage = plan(*configs.split(), options=options.split())
    found = card_of_stage(stage)
    assert (found.title, found.also) == title


@pytest.mark.parametrize(
    ("gpus", "memory_mb", "fp32", "bf16", "width", "layers", "batches"),
    [
        # otherwise launches would take all the time of a GPU's step
        (1, 80_000, 50.0, 600.0, 768, 12, 16),  # H100
        (1, 24_000, 50.0, 100.0, 768, 12, 5),
        (1, 15_000, 4.5, None, 768, 12, 2),  # fp16 instead
        (1, 8_000, 10.0, 20.0, 768, 4, 2),
        (0, 80_000, 50.0, 600.0, 768, 4, 2),
        (0, None, 0.02, 0.04, 128, 2, 2),
        (0, None, 0.2, 0.02, 128, 2, 2),
        (0, None, 0.2, 0.4, 256, 4, 2),
    ],
)
def test_the_quick_ladders_model_is_the_largest_that_suits_the_machine(
    gpus, memory_mb, fp32, bf16, width, layers, batches
):
    rates = {"float32": fp32, "bfloat16": bf16 or 0.5, "float16": bf16 or 25.0}
    device = Device(gpus=gpus, memory_mb=memory_mb, tflops=rates, bf16=bool(bf16))
    assert quick.size_for(device.model_copy(update={"tflops": {}})) == quick.SIZES[0]
    size = quick.size_for(device)
    assert (size.n_embd, size.n_layer, size.batches) == (width, layers, batches)
    again = ladder.planned(options_of("speedup", "--quick")[0], size, [], Device())
    assert again[0].config.n_embd == width, "it stays once it is begun"
    tokens = {stage.tokens_per_step for stage in again}
    assert tokens == {quick.TOKENS * batches // size.shorter}


def test_ddp_ends_the_speedup_ladder_where_there_are_gpus_and_its_corpus():
    for gpus in (1, 2):
        assert "ddp" not in planned("speedup", gpus=gpus)
    command = ("speedup", "--nproc_per_node", "2")
    asked = planned(*command)
    assert (asked["ddp"].ranks, asked["baseline"].ranks) == (2, 1)
    assert "ddp" not in planned(*command, "--stages", "2")
    assert [*planned(*command, "--stages", "ddp")] == ["baseline", "ddp"]
    assert asked["ddp"].published.tokens_per_sec == 211_646
    Path("data/fineweb").mkdir(parents=True)
    Path("data/fineweb/fineweb_train_000000.bin").touch()
    assert "ddp" in planned("speedup", gpus=2)
    assert planned("a100", "--nproc_per_node", "2")["opt8"].ranks == 2


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
    Path("begun").mkdir()
    Path("begun/log.csv").write_text(HEADER)
    assert climb("--plot", "a$b$", "begun") == 0
    picture = Path("comparison.svg").read_text()
    ElementTree.fromstring(picture)
    training, validation = re.findall(r'<polyline.* points="(.*?)"', picture)
    places = [[*map(float, place.split(","))] for place in training.split()]
    assert places[0][0] < places[1][0], "steps go to the right"
    assert places[0][1] < places[1][1], "a lower loss is drawn lower"
    assert len(places) == len(validation.split()) == 2


def test_a_terminal_of_80_columns_shows_titles_factors_and_the_total(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    stored("speedup_quick")
    assert climb("speedup", "--quick", "--report_only") == 0
    printed = capsys.readouterr().out
    columns = ["stage", "over base", "predicted", "A100"]
    assert re.split("  +", printed.splitlines()[2].strip()) == columns
    assert "torch.compile" in printed
    assert max(map(len, printed.partition("\nlogs/")[0].splitlines())) <= 80
    assert printed.splitlines()[-1].startswith("2.27 times as fast on an AMD EPYC, 2 cores: ")


@pytest.mark.parametrize(
    ("configs", "factors", "total", "how"),
    [
        (
            "baseline speedup1 speedup2",
            {},
            None,
            "10.0 milliseconds a step of 2,048 tokens on a 10; no later stage",
        ),
        (
            "baseline speedup1 speedup2",
            {"speedup1": 2.0, "speedup2": 3.0},
            None,
            "10.0 with TF32, in single runs; the factor is a product of interleaved ones, 6.000 "
            "(6.000 to 6.000). The most came from TF32 (3.00) and weight tying (2.00).",
        ),
        (
            "baseline speedup1 speedup2",
            {"speedup1": 2.0, "speedup2": 3.0},
            5.0,
            "10.0 with TF32, in single runs; the factor is interleaved, 5.000 (5.000 to 5.000). ",
        ),
        (
            "baseline speedup13",
            {"speedup13": 2.0},
            None,
            ", in single runs; the factor is interleaved, 2.000 (2.000 to 2.000), at 2,048 and "
            "6,144 tokens a step. The most came from a context of 2048 tokens with all before it "
            "(2.00).",
        ),
    ],
)
def test_the_last_line_says_how_many_times_as_fast_and_how_that_is_known(
    configs, factors, total, how, capsys
):
    record, found = finished(*configs.split())
    for stage in found:
        if stage.name in factors:
            fake_comparison(record, stage, factors[stage.name])
    if total:
        fake_comparison(record, ladder_report.fastest_over_first(record, found), total)
    ladder_report.report_speeds("ladder", record, found)
    assert how in capsys.readouterr().out.splitlines()[-1]


def test_a_narrow_terminal_cuts_no_name_and_no_figure(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    row = ["speedup5_max_auto", "12,345", "[2] (1 to 3)", "a longer text that may be broken"]
    tables.print_table("title", ["stage", "ms/step", "x base", "note"], [row])
    printed = capsys.readouterr().out
    assert [cell for cell in row if cell in printed] == row[:2]
    assert "…" not in printed
