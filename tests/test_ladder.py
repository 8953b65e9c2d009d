"""A ladder climbed for real on tiny models: what runs, what is kept, what the report says, what a
failing stage does.
"""

import csv
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ladder
import runtime.report as reports
from runtime.errors import UserError, why_it_failed
from runtime.ratio import Ratio, median_ratio, product
from runtime.runlog import read_rows
from tests.conftest import ROOT, flags, forks, run


@pytest.fixture
def rungs(tiny_config, tmp_path):
    """Two configs, `plain.yaml` and `flash.yaml`, and the options that make them tiny."""
    (tmp_path / "plain.yaml").write_text("lr: 1e-3\n")
    (tmp_path / "flash.yaml").write_text("base: plain.yaml\nflash: true\n")
    given = flags(tiny_config(max_steps=12))
    for name in ("--log_dir", "--run_name"):
        at = given.index(name)
        del given[at : at + 2]
    return ["plain.yaml", "flash.yaml", "--rounds", "0", "--", *given]


def results(tmp_path):
    with open(tmp_path / "logs/ladder/results.csv", newline="") as file:
        return {row["stage"]: row for row in csv.DictReader(file)}


def climb(*arguments):
    """The command line `python ladder.py ...` in this process; returns its exit status."""
    try:
        ladder.main(list(arguments))
    except SystemExit as stopped:
        return stopped.code
    return 0


def test_a_ladder_runs_each_rung_once_and_reports_it(rungs, tmp_path, monkeypatch, capsys, forked):
    monkeypatch.chdir(tmp_path)
    assert climb(*rungs) == 0
    folder = tmp_path / "logs/ladder"
    for name in ("report.md", "results.csv", "speed.png", "plain/log.csv", "flash/log.csv"):
        assert (folder / name).is_file(), name
    rows = results(tmp_path)
    assert list(rows) == ["plain", "flash"]
    summaries = {name: json.loads((folder / name / "summary.json").read_text()) for name in rows}
    assert float(rows["flash"]["over_base"]) == pytest.approx(
        summaries["flash"]["median_tokens_per_sec"] / summaries["plain"]["median_tokens_per_sec"]
    )
    assert "| flash |" in (folder / "report.md").read_text()
    assert "plain" in capsys.readouterr().out

    # a finished rung is not run again, unless asked for or changed
    before = {name: (folder / name / "log.csv").stat().st_mtime_ns for name in rows}
    assert climb(*rungs) == 0
    assert {name: (folder / name / "log.csv").stat().st_mtime_ns for name in rows} == before
    assert climb(*rungs, "--seed", "7") == 0
    assert {name: (folder / name / "log.csv").stat().st_mtime_ns for name in rows} != before
    assert climb("--report_only", *rungs, "--seed", "7") == 0

    # nor taken from another machine, whose speed says nothing here
    before = {name: (folder / name / "log.csv").stat().st_mtime_ns for name in rows}
    summary = json.loads((folder / "plain" / "summary.json").read_text())
    (folder / "plain" / "summary.json").write_text(json.dumps(summary | {"machine": "another"}))
    assert climb(*rungs, "--seed", "7") == 0
    after = {name: (folder / name / "log.csv").stat().st_mtime_ns for name in rows}
    assert [name for name in rows if after[name] != before[name]] == ["plain"]


def test_each_stage_and_its_base_are_timed_in_turn_once(rungs, tmp_path, monkeypatch, forked):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TURN_SECONDS", "0.01")
    (tmp_path / "tied.yaml").write_text("base: flash.yaml\ntie_weights: true\n")
    at = rungs.index("--rounds")
    ladder_of_three = [*rungs[:at], "tied.yaml", "--rounds", "6", *rungs[at + 2 :]]
    assert climb(*ladder_of_three) == 0
    rows = results(tmp_path)
    files = {name: tmp_path / "logs/ladder" / name / "in_turn.json" for name in ("flash", "tied")}
    kept = {name: json.loads(path.read_text()) for name, path in files.items()}
    # all three at once: the side that two pairs share was timed once
    assert kept["flash"]["sides"][1] == kept["tied"]["sides"][0]
    for name, found in kept.items():
        base, other = (side["tokens_per_sec"] for side in found["sides"])
        assert found["factors"] == [o / b for o, b in zip(other, base, strict=True)]
        ratio = median_ratio(found["factors"])
        assert [
            float(rows[name][f"over_base{end}"]) for end in ("", "_low", "_high")
        ] == pytest.approx([ratio.median, ratio.low, ratio.high])
        assert int(rows[name]["rounds"]) == len(found["factors"]) >= 6
    whole = product([median_ratio(found["factors"]) for found in kept.values()])
    assert float(rows["tied"]["over_first"]) == pytest.approx(whole.median)
    assert f"| {whole} |" in (tmp_path / "logs/ladder/report.md").read_text()
    assert rows["plain"]["over_base_low"] == ""

    # a comparison without kept memory is told apart
    report = tmp_path / "logs/ladder/report.md"
    assert "without keeping" not in report.read_text()
    files["tied"].write_text(json.dumps(kept["tied"] | {"memory_kept": False}))
    assert climb("--report_only", *ladder_of_three) == 0
    assert "which two at once had no room: tied.\n" in report.read_text()

    # with other settings a comparison does not count
    (tmp_path / "plain.yaml").write_text("lr: 2e-3\n")
    _, stages = ladder.plan(rungs[:2], "logs", rungs[at + 3 :])
    assert not any(pair.factors for pair in ladder.pairs_of(stages).values())


def test_pairs_share_a_group_while_the_memory_holds_all_sides():
    stages = ["a", "b", "c", "d", "e"]
    pairs = [
        ladder.Pair(other, [base], [other], Path(other), (100, 100))
        for base, other in itertools.pairwise(stages)
    ]
    for memory, sizes in (
        (10_000, [ladder.MOST_PAIRS, 1]),
        (3 * 100 * ladder.HEADROOM, [2, 2]),
        (0, [1] * 4),
    ):
        assert [len(group) for group in ladder.grouped(pairs, memory)] == sizes
    unknown = [ladder.Pair(other, ["a"], [other], Path(other)) for other in "bc"]
    assert len(ladder.grouped(unknown, 10**9)) == 2
    apart = [pairs[0], pairs[2]]
    assert len(ladder.grouped(apart, 10**9)) == 2


def test_rounds_before_an_interruption_count_until_the_next_climb(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text("base: quickstart.yaml\n")
    pair = ladder.Pair(
        "b", [str(tmp_path / "a.yaml")], [str(tmp_path / "b.yaml")], tmp_path / "b.json"
    )
    here, asked = {"device": "any", "gpus": 1}, []

    def interrupted_after(rounds):
        def watch(command, look, environment):
            asked.append(rounds)
            turns = {
                "machine": reports.machine(),
                "sides": [{"tokens_per_sec": [base] * rounds} for base in (100, 150)],
            }
            Path(command[-1]).write_text(json.dumps(turns))
            raise KeyboardInterrupt

        monkeypatch.setattr(ladder, "_watch", watch)
        with pytest.raises(KeyboardInterrupt):
            ladder.take_turns([pair], 20, False, here)

    interrupted_after(5)
    assert not pair.path.exists()  # too few for an interval
    interrupted_after(7)
    assert pair.factors == [1.5] * 7
    interrupted_after(6)  # it was asked for again, and took nothing away
    assert pair.factors == [1.5] * 7
    pair.path.write_text(json.dumps(pair.found() | {"interrupted": False}))
    ladder.take_turns([pair], 20, False, here)
    assert asked == [5, 7, 6]


def test_sides_that_have_no_room_at_once_keep_no_memory_from_step_to_step(tmp_path, monkeypatch):
    """Else one would, until the other has come, and be the faster for it."""

    def environment(peaks, **device):
        pair, given = ladder.Pair("a", ["baseline"], ["speedup1"], tmp_path / "a.json", peaks), []
        monkeypatch.setattr(
            ladder, "_watch", lambda _, look, environment: given.append(environment) or "stopped"
        )
        ladder.take_turns([pair], 6, False, {"device": "any"} | device)
        assert pair.error == "stopped"
        return given

    room = 200 * ladder.HEADROOM
    for peaks, device in (
        ((100, 100), {"memory_mb": room}),
        ((None, None), {}),
        ((100, 100), {"memory_mb": 1, "gpus": 1}),
    ):
        assert environment(peaks, **device) == [{}]
    assert environment((100, 100), memory_mb=room - 1) == [{"GLIBC_TUNABLES": ""}]


def test_a_side_that_fails_in_turn_is_told_and_the_rest_is_reported(
    rungs, tmp_path, monkeypatch, capsys, forked
):
    monkeypatch.chdir(tmp_path)
    at = rungs.index("--rounds")
    watch = ladder._watch
    monkeypatch.setattr(
        ladder,
        "_watch",
        lambda command, look, environment=None: (
            "side: out of memory"
            if "in_turn.py" in str(command)
            else watch(command, look, environment)
        ),
    )
    assert climb(*rungs[:at], "--rounds", "6", *rungs[at + 2 :]) == 1
    assert "failed: flash in turn with its base: side: out of memory" in capsys.readouterr().out
    assert list(results(tmp_path)) == ["plain", "flash"]


def test_a_config_without_each_of_its_optimizations_is_timed_in_turn(
    tmp_path, corpus, monkeypatch, capsys
):
    """What `--ablate` takes turns with; the turns themselves are tested above."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "both.yaml").write_text(
        f"device: cpu\ndataset: tiny\ndata_dir: {corpus}\nflash: true\ngrad_clip: 1.0\n"
    )
    taken = []

    def take_turns(pairs, rounds, rerun, device):
        for i, pair in enumerate(pairs):
            taken.append((pair.name, pair.base[1:], pair.other[1:]))
            turns = [{"peak_memory_mb": 10.0 * (i + 1)}]
            pair.path.write_text(
                json.dumps(
                    {
                        "settings": pair.settings(),
                        "factors": [1.5 + i] * 6,
                        "machine": "here",
                        "git": "0",
                        "device": device["device"],
                        "sides": [{"turns": turns}, {"turns": turns}],
                    }
                )
            )

    monkeypatch.setattr(ladder, "take_turns", take_turns)
    assert climb("--ablate", "both.yaml", "--", "--n_layer", "2") == 0
    extra = ["--n_layer", "2"]
    no_flash, no_clip = ["--no-flash"], ["--grad_clip", "0"]
    assert taken == [
        ("flash first", [*extra, *no_flash, *no_clip], [*extra, *no_clip]),
        ("flash last", [*extra, *no_flash], extra),
        ("grad_clip first", [*extra, *no_flash, *no_clip], [*extra, *no_flash]),
        ("grad_clip last", [*extra, *no_clip], extra),
    ]
    folder = tmp_path / "logs/ablate_both"
    with open(folder / "results.csv", newline="") as file:
        rows = {row["optimization"]: row for row in csv.DictReader(file)}
    assert (rows["flash"]["first"], rows["flash"]["last"], rows["grad_clip"]["memory_mb_with"]) == (
        "1.5",
        "2.5",
        "40.0",
    )
    assert (
        "| flash | 1.500 (1.500 to 1.500) | 2.500 (2.500 to 2.500) | 20 | 20 |"
        in (folder / "report.md").read_text()
    )
    assert (folder / "worth.png").read_bytes().startswith(b"\x89PNG")


def test_stages_are_paired_by_their_files_and_a_config_is_not_timed_against_itself(tmp_path):
    _, stages = ladder.plan(
        ["baseline", "a100/baseline", "a100/opt0", "a100/opt0"], str(tmp_path), []
    )
    assert [(stage.name, base.name) for stage, base in ladder.with_bases(stages)] == [
        ("baseline", "baseline"),
        ("baseline_2", "baseline"),
        ("opt0", "baseline_2"),
        ("opt0_4", "baseline_2"),
    ]
    _, stages = ladder.plan(["speedup1", "speedup1"], str(tmp_path), [])
    for stage in stages:
        fake_run(stage, 100.0)
    assert not ladder.pairs_of(stages)


def test_machines_are_set_beside_each_other_and_beside_the_published_factors(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    header = "stage,base,over_base,over_base_low,over_base_high\n"
    for machine, value in (("laptop", "1.1,1.05,1.2"), ("server", "3.0,,")):
        folder = tmp_path / machine / "speedup"
        folder.mkdir(parents=True)
        (folder / "results.csv").write_text(
            f"{header}baseline,baseline,1.0,,\nspeedup2,speedup1,{value}\n"
        )
    assert (
        climb(
            "--across",
            str(tmp_path / "laptop/speedup"),
            str(tmp_path / "server/speedup"),
            "--log_dir",
            str(tmp_path),
        )
        == 0
    )
    text = (tmp_path / "across/report.md").read_text()
    assert "| stage | laptop | server | A100, published | one GPU, published |" in text
    assert (
        "| speedup2: TF32 | 1.10 (1.05 to 1.20) | 3.00 | 2.44 | 3.00 |" in text
    )  # 577.7 over 237.2 ms, 1000 over 333 ms
    assert "baseline" not in text
    assert (tmp_path / "across/across.png").read_bytes().startswith(b"\x89PNG")
    for damaged, said in (
        ("stage,over_previous\nbaseline,1\n", "is not the table of a ladder"),
        (header, "no stage there has a base"),
        (
            f"{header}speedup2,speedup1,1.0,1.5,2.0\n",
            "is not the table of a ladder: speedup2 has the factor",
        ),
    ):
        (tmp_path / "server/speedup/results.csv").write_text(damaged)
        with pytest.raises(UserError, match=said):
            ladder.main(["--across", str(tmp_path / "server/speedup")])


def test_every_published_counterpart_has_a_factor():
    names = [name for _, *both in ladder.COUNTERPARTS.values() for name in both if name]
    assert len(names) == 14
    assert all(ladder._counterpart(name) for name in names)
    assert ladder._counterpart("gpu_ms/fused_adamw").median == pytest.approx(93 / 90)


def test_a_failing_stage_is_reported_and_the_others_go_on(rungs, tmp_path):
    (tmp_path / "bad.yaml").write_text("base: plain.yaml\nlr: 1e30\n")
    # the first of the others runs on two processes
    done = run(
        "ladder.py", "--nproc_per_node", "2", "bad.yaml", *rungs[1:], cwd=tmp_path, before=forks
    )
    assert done.returncode == 1
    assert "failed: bad: step " in done.stdout
    assert list(results(tmp_path)) == ["flash"]
    assert "Failed: bad: step " in (tmp_path / "logs/ladder/report.md").read_text()
    assert json.loads((tmp_path / "logs/ladder/flash/summary.json").read_text())["world_size"] == 2


def test_ctrl_c_keeps_what_is_finished_and_the_next_call_goes_on(
    rungs, tmp_path, monkeypatch, forked
):
    at = rungs.index("--max_steps")
    short, options = rungs[:at], rungs[at + 2 :]
    # the second rung is too long to finish
    (tmp_path / "plain.yaml").write_text("lr: 1e-3\nmax_steps: 12\n")
    (tmp_path / "long.yaml").write_text("base: plain.yaml\nmax_steps: 1000000\n")
    command = ["plain.yaml", "long.yaml", *short[2:], *options]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "ladder.py"), *command],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    log, deadline = tmp_path / "logs/ladder/long/log.csv", time.monotonic() + 100
    try:
        while (
            not (log.exists() and len(log.read_text().splitlines()) > 3)
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted; 1 of 2 stages are finished and kept, the same command goes on" in err
    before = (tmp_path / "logs/ladder/plain/log.csv").stat().st_mtime_ns
    (tmp_path / "long.yaml").write_text("base: plain.yaml\nmax_steps: 3\n")
    monkeypatch.chdir(tmp_path)
    assert climb(*command) == 0
    assert list(results(tmp_path)) == ["plain", "long"]
    assert (tmp_path / "logs/ladder/plain/log.csv").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speedpu"], "speedpu: no such config file"),
        ([], "name a series (speedup, a100, mps, gpu_ms)"),
        (
            ["speedup", "--", "--max_step", "3"],
            "--max_step: unknown option; did you mean --max_steps?",
        ),
        (["speedup", "--", "--n_embd", "100"], "n_embd 100 does not divide into 12 heads"),
        (["--plot", "nowhere"], "nowhere/log.csv: cannot be read"),
        (["speedup", "--report_only"], "no finished stage to report"),
        (["speedup", "--reruns"], "--reruns: unknown option; did you mean --rerun?"),
        (["speedup", "--rounds", "3"], "--rounds 3: at least 6 make an interval; 0 is off"),
        (["--ablate", "speedup"], "--ablate takes one config, such as speedup10.yaml"),
        (["--ablate", "baseline"], "baseline: has no optimization on"),
        (["--across", "nowhere"], "nowhere/results.csv: cannot be read"),
        (["--ablate", "--plot", "x"], "--ablate and --plot exclude each other"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(arguments, message, tmp_path):
    done = run("ladder.py", *arguments, cwd=tmp_path)  # half a second each: torch is not imported
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_plot_compares_any_runs_and_names_a_missing_column(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.csv").write_text(
            "step,loss,lr,norm,dt_ms,tokens_per_sec\n1,5.0,0.1,1.0,10,9\n2,4.0,0.1,,10,9\n"
        )
    done = run("ladder.py", "--plot", "a", "b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "b" / "log.csv").write_text("step,loss,lr\n1,5.0,0.1\n")
    with pytest.raises(UserError, match=r"log.csv: has no column norm"):
        read_rows(tmp_path / "b" / "log.csv")


def test_plot_draws_validation_dashed_in_the_colour_of_its_run_where_there_is_one(
    tmp_path, monkeypatch
):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.csv").write_text(
            "step,loss,lr,norm,dt_ms,tokens_per_sec\n1,5.0,0.1,1.0,10,9\n2,4.0,0.1,1,10,9\n"
        )
    (tmp_path / "b" / "eval.csv").write_text(
        "step,val_loss,hellaswag\n0,6.0,\n1,,0.25\n2,4.5,0.3\n"
    )
    drawn = []
    monkeypatch.setattr(
        reports, "save_picture", lambda figure, path: drawn.extend(figure.axes[0].get_lines())
    )
    monkeypatch.chdir(tmp_path)
    ladder.main(["--plot", "a", "b"])
    a, b, validation = drawn
    assert [line.get_label() for line in drawn] == ["a", "b", "b, validation"]
    assert [line.get_linestyle() for line in drawn] == ["-", "-", "--"]
    assert a.get_color() != b.get_color() == validation.get_color()
    assert [list(axis) for axis in validation.get_data()] == [[0, 2], [6.0, 4.5]]


def test_every_series_is_whole_and_knows_its_published_logs(tmp_path):
    published = {}
    for name in ladder.SERIES:
        _, stages = ladder.plan([name], str(tmp_path), [])
        published[name] = {
            stage.twin_of or stage.name: stage.published.log
            for stage in stages
            if stage.published.log
        }
    assert len(published["speedup"]) == 11
    _, stages = ladder.plan(["speedup"], str(tmp_path), [])
    names = {stage.published.log: stage.name for stage in stages}
    assert names["rtx3080_speedup2"] == "as_logged_speedup2", "its note and what really ran differ"
    assert names["rtx3080_speedup1"] == "baseline", (
        "untied, speedup1 is the baseline: nothing is run twice"
    )
    assert [stage.name for stage in stages].count("baseline") == 2
    assert len(published["a100"]) == 10
    assert published["mps"]["cuda_bf16"] == "cuda_bf16"
    assert len(published["mps"]) == 7
    assert not published["gpu_ms"]


def test_a_published_stage_is_compared_in_any_list_but_not_one_that_ran_otherwise(tmp_path):
    (tmp_path / "speedup7.yaml").write_text("lr: 1e-3\n")
    configs = [
        str(ROOT / "configs/mps/cuda_bf16.yaml"),
        "speedup6.yaml",
        "speedup1",
        "speedup1",
        str(tmp_path / "speedup7.yaml"),
    ]
    _, stages = ladder.plan(configs, str(tmp_path), [])
    assert [stage.published.log for stage in stages] == [
        "cuda_bf16",
        "rtx3080_speedup6",
        None,
        None,
        None,
    ]


def test_options_that_change_the_run_are_not_compared_with_the_published_one(tmp_path):
    _, stages = ladder.plan(["speedup"], str(tmp_path), ["--n_layer", "2"])
    assert not any(stage.published != ladder.Published() or stage.twin_of for stage in stages)
    _, stages = ladder.plan(["speedup"], str(tmp_path), ["--max_steps", "20", "--bf16"])
    assert {stage.published.log for stage in stages} >= {"rtx3080_baseline", "rtx3080_speedup8"}
    assert "rtx3080_speedup9" not in {stage.published.log for stage in stages}, (
        "a shorter cosine is another schedule"
    )


def test_the_difference_of_two_curves_is_over_steps_11_to_50():
    ours = {step: {"loss": 1.0} for step in range(1, 31)}
    published = {
        step: {"loss": 9.0 if step < 11 else 1.5 if step % 2 else 0.75} for step in range(1, 51)
    }
    assert ladder.loss_difference(ours, published) == (0.375, 30)
    assert ladder.loss_difference({1: {"loss": 1.0}}, published) is None


def test_a_twin_lends_its_curve_and_unsynchronized_times_are_not_compared(tmp_path):
    _, stages = ladder.plan(["speedup"], str(tmp_path), [])
    stages = [
        stage
        for stage in stages
        if stage.name in ("baseline", "speedup2", "as_logged_speedup2", "speedup3")
        and stage.twin_of != "speedup1"
    ]
    for i, stage in enumerate(stages):
        stage.folder.mkdir(parents=True)
        (stage.folder / "config.yaml").write_text(stage.config.to_yaml())
        (stage.folder / "log.csv").write_text(
            "step,loss,lr,norm,dt_ms,tokens_per_sec\n"
            + "".join(f"{step},{6.0 + i},0.1,1.0,10,100\n" for step in range(1, 51))
        )
        (stage.folder / "summary.json").write_text(
            json.dumps(
                {
                    "steps": 50,
                    "median_dt_ms": 10,
                    "median_tokens_per_sec": 100.0 * 2**i,
                    "first_step_s": 1,
                    "peak_memory_mb": 5,
                    "utilization": 0.5,
                    "final_loss": 6.0,
                    "device": "cpu",
                    "torch": "2",
                    "git": None,
                    "started": "2026-01-01T00:00:00",
                }
            )
        )
    rows = {row.stage: row for row in ladder.compare(stages)}
    assert list(rows) == ["baseline", "speedup2", "speedup3"]
    assert rows["speedup2"].compared == "as_logged_speedup2, steps 11 to 50"
    assert rows["speedup3"].compared == ""  # its twin did not run
    assert (rows["speedup3"].over_base, rows["speedup3"].over_first) == (Ratio(4.0), Ratio(8.0))
    assert rows["baseline"].published_tokens_per_sec == pytest.approx(11_570, rel=0.01)
    assert rows["speedup2"].published_tokens_per_sec is None
    ladder.report("speedup", stages, tmp_path / "speedup")
    text = (tmp_path / "speedup/report.md").read_text()
    assert "they were read without waiting for the GPU" in text
    assert "do as logged" in text
    assert (tmp_path / "speedup/loss.png").is_file()


def fake_run(stage, rate, losses=()):
    """What a finished run leaves, without running it."""
    stage.folder.mkdir(parents=True)
    (stage.folder / "config.yaml").write_text(stage.config.to_yaml())
    (stage.folder / "log.csv").write_text(
        "step,loss,lr,norm,dt_ms,tokens_per_sec\n"
        + "".join(f"{step},{loss},0.1,1.0,10,{rate}\n" for step, loss in enumerate(losses, start=1))
    )
    (stage.folder / "summary.json").write_text(
        json.dumps(
            {
                "steps": 50,
                "median_dt_ms": 10,
                "median_tokens_per_sec": rate,
                "first_step_s": 1,
                "peak_memory_mb": 5,
                "utilization": 0.5,
                "final_loss": 6.0,
                "device": "cpu",
                "torch": "2",
                "git": None,
                "started": "2026-01-01T00:00:00",
            }
        )
    )


def test_the_published_factor_stands_beside_the_measured_one_where_published_times_can_be_used(
    tmp_path, capsys
):
    factors = {}
    for series in ("a100", "gpu_ms", "mps", "speedup"):
        _, stages = ladder.plan([series], str(tmp_path / series), [])
        for i, stage in enumerate(stage for stage in stages if not stage.twin_of):
            fake_run(stage, 100.0 * (i + 1))
        factors[series] = {row.stage: row.published_over_base for row in ladder.compare(stages)}
        ladder.report(series, stages, tmp_path / series / series)
        has_column = "| published |" in (tmp_path / series / series / "report.md").read_text()
        assert has_column is (series != "speedup")
    assert factors["gpu_ms"]["tf32"] == pytest.approx(1000 / 333)
    assert factors["gpu_ms"]["fused_adamw"] == pytest.approx(93 / 90)
    assert factors["a100"]["opt3"] == pytest.approx(104_613 / 40_214, rel=1e-3)
    assert [stage for stage, factor in factors["a100"].items() if factor is None] == ["baseline"]
    assert [stage for stage, factor in factors["mps"].items() if factor] == ["tf32"], (
        "cuda_bf16 ran on another GPU"
    )
    assert not any(factors["speedup"].values())


def test_ddp_ends_the_speedup_ladder_by_torchrun_and_a_list_takes_the_number_for_every_config(
    tmp_path,
):
    _, stages = ladder.plan(["speedup"], str(tmp_path), [], 2)
    assert (stages[-1].name, stages[-1].processes, stages[-1].base) == ("ddp", 2, "speedup10")
    assert stages[-1].published.tokens_per_sec == 211_646
    assert {stage.processes for stage in stages[:-1]} == {1}
    assert stages[-1].command[1:5] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
    ]
    assert "torch.distributed.run" not in stages[0].command
    for processes in (None, 1):
        assert "ddp" not in [
            stage.name for stage in ladder.plan(["speedup"], str(tmp_path), [], processes)[1]
        ]
    assert [
        stage.processes for stage in ladder.plan(["baseline", "speedup1"], str(tmp_path), [], 2)[1]
    ] == [2, 2]


def test_stages_that_bf16_makes_slow_are_named_before_anything_runs(tmp_path, monkeypatch, capsys):
    def nothing_runs(stages, rerun):
        assert (
            "note: matrix products in bf16 take 12.3 times as long as in fp32"
            in capsys.readouterr().out
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "probe", lambda _: {"gpus": 0, "bf16_slowdown": 12.3})
    monkeypatch.setattr(ladder, "climb", nothing_runs)
    with pytest.raises(UserError, match="no finished stage"):
        ladder.main(["speedup", "--", "--n_layer", "2"])
    _, stages = ladder.plan(["baseline", "speedup3", "speedup4"], str(tmp_path), [])
    warning = ladder.bf16_warning(stages, 12.3, ["baseline", "speedup3", "speedup4"])
    assert "makes speedup3, speedup4 slow" in warning
    assert warning.endswith("python ladder.py baseline speedup3 speedup4 -- --no-bf16")
    assert ladder.bf16_warning(stages, None, []) is None
    _, stages = ladder.plan(["speedup3"], str(tmp_path), ["--no-bf16"])
    assert ladder.bf16_warning(stages, 12.3, []) is None


def test_ddp_is_left_out_without_its_corpus_and_not_run_on_one_gpu(tmp_path, monkeypatch, capsys):
    climbed = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        ladder, "climb", lambda stages, _: climbed.append([stage.name for stage in stages])
    )
    for gpus in (1, 2):
        monkeypatch.setattr(
            ladder, "probe", lambda _, gpus=gpus: {"gpus": gpus, "bf16_slowdown": None}
        )
        with pytest.raises(UserError, match="no finished stage"):
            ladder.main(["speedup"])
    assert (
        "note: the stage ddp is left out: its corpus data/fineweb is not there"
        in capsys.readouterr().out
    )
    (tmp_path / "data/fineweb").mkdir(parents=True)
    (tmp_path / "data/fineweb/fineweb_train_000000.bin").touch()
    with pytest.raises(UserError, match="no finished stage"):
        ladder.main(["speedup"])
    assert ["ddp" in names for names in climbed] == [False, False, True]


def test_what_a_machine_is_asked_before_a_ladder_is_answered():
    found = ladder.probe("cpu")
    assert found["gpus"] == 0
    assert found["memory_mb"] > 1000
    assert found["bf16_slowdown"] is None or found["bf16_slowdown"] > 1.5
    assert ladder.probe("no-such-device") == {}


def test_an_option_of_the_runs_goes_after_the_dashes_and_what_the_ladder_sets_is_refused_there(
    tmp_path,
):
    for arguments, message in (
        (
            ["speedup", "--max_steps", "5"],
            "--max_steps: is an option of the runs, and goes after --: python ladder.py ",
        ),
        (["speedup", "--no-bf16"], "--no-bf16: is an option of the runs"),
        (["--stages"], "--stages: is given without a flag"),
        (
            ["baseline", "--", "--config", "y.yaml"],
            "--config after --: the ladder sets it for each run",
        ),
        (["baseline", "--", "--run_name=x"], "--run_name after --"),
    ):
        done = run("ladder.py", *arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {message}"), done.stderr


def test_a_ladder_of_entirely_other_configs_is_moved_aside_and_one_that_shares_a_stage_is_not(
    tmp_path,
):
    folder = tmp_path / "ladder"
    _, stages = ladder.plan(["baseline", "speedup1"], str(tmp_path), [])
    (folder / "other").mkdir(parents=True)
    assert ladder.make_way(folder, stages) is None, "nothing has run there"
    (folder / "speedup1").mkdir()
    for name in ("other", "speedup1"):
        (folder / name / "log.csv").touch()
    (folder / "results.csv").write_bytes(
        b"\xff"
    )  # the folders say what has run, whatever became of the report
    assert ladder.make_way(folder, stages) is None
    (folder / "speedup1" / "log.csv").unlink()
    assert ladder.make_way(folder, stages) == tmp_path / "ladder.1"
    assert not folder.exists()
    assert ladder.make_way(folder, stages) is None


def test_a_stage_whose_base_is_not_in_the_list_says_what_it_is_compared_with(tmp_path):
    _, stages = ladder.plan(["baseline", "speedup5", "speedup6"], str(tmp_path), [])
    for i, stage in enumerate(stages):
        fake_run(stage, 100.0 * (i + 1))
    compared = [(row.base, row.over_base) for row in ladder.compare(stages)]
    assert compared == [
        ("baseline", Ratio(1.0)),
        ("baseline", Ratio(2.0)),
        ("speedup5", Ratio(1.5)),
    ]


def test_runs_end_with_the_ladder_that_started_them_even_if_it_is_killed(rungs, tmp_path):
    (tmp_path / "plain.yaml").write_text("lr: 1e-3\nmax_steps: 1000000\n")
    at = rungs.index("--max_steps")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "ladder.py"), "plain.yaml", *rungs[2:at], *rungs[at + 2 :]],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log, deadline = tmp_path / "logs/ladder/plain/log.csv", time.monotonic() + 100
    while (
        not (log.exists() and len(log.read_text().splitlines()) > 3) and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    process.kill()
    process.wait()
    size = -1
    while size != log.stat().st_size and time.monotonic() < deadline:
        size = log.stat().st_size
        time.sleep(0.7)
    assert time.monotonic() < deadline, "the run goes on writing"


def test_odd_names_are_drawn_as_they_are_and_narrow_terminals_keep_the_names(
    tmp_path, monkeypatch, capsys
):
    for name in ("a$b$", "_hidden", "\u65e5\u672c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.csv").write_text(
            "step,loss,lr,norm,dt_ms,tokens_per_sec\n1,5.0,0.1,1.0,10,9\n2,4.0,0.1,,10,9\n"
        )
    monkeypatch.chdir(tmp_path)
    ladder.main(["--plot", "a$b$", "_hidden", "\u65e5\u672c"])
    assert (tmp_path / "comparison.png").is_file()
    assert (reports.plain("a$b"), reports.plain("_x")) == (r"a\$b", " _x")
    row = ["speedup5_max_autotune", "12,345", "2.22", "9,999", "a longer text that may be broken"]
    for columns in ("40", "60", "\u00b2"):
        monkeypatch.setenv("COLUMNS", columns)
        capsys.readouterr()
        reports.print_table(
            "title", reports.items("stage", "ms/step", "x base", "MB", "note"), [row]
        )
        printed = capsys.readouterr().out
        assert "speedup5_max_autotune" in printed
        assert "12,345" in printed
        assert "\u2026" not in printed


@pytest.mark.parametrize(
    "damage",
    [
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        '{"steps": 1}',
        "9" * 5000,
        b"\xff",
        ("median_tokens_per_sec", 0),
        ("median_tokens_per_sec", None),
        ("median_dt_ms", float("nan")),
        ("started", None),
    ],
    ids=lambda damage: str(damage)[:30],
)
def test_a_stage_whose_summary_is_damaged_counts_as_not_finished(damage, tmp_path):
    _, stages = ladder.plan(["baseline"], str(tmp_path), [])
    fake_run(stages[0], 100.0)
    path = stages[0].folder / "summary.json"
    summary = stages[0].summary()
    assert summary
    if isinstance(damage, tuple):
        damage = json.dumps(summary | {damage[0]: damage[1]})
    path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    assert stages[0].summary() is None


def test_why_a_stage_is_not_finished_is_told_in_words(tmp_path, monkeypatch):
    assert (
        why_it_failed(-9, io.StringIO("a warning\n"))
        == "killed by signal 9, as the system does when memory runs out"
    )
    assert why_it_failed(1, io.StringIO("a warning\nerror: full\nmore\n")) == "full"
    assert why_it_failed(1, io.StringIO("")) == "exit status 1"
    monkeypatch.setattr(ladder, "_watch", lambda *_: None)  # it ends with status 0, after a signal
    _, (stage,) = ladder.plan(["baseline"], str(tmp_path), [])
    assert str(ladder._run(stage, lambda *_: None)).startswith(
        "stopped by a signal before its last step; the same command"
    )


def test_a_ladder_of_which_no_stage_could_run_has_failed_and_one_not_run_is_a_mistake(tmp_path):
    _, stages = ladder.plan(["baseline"], str(tmp_path), [])
    for error, status in (("boom", 1), (None, 2)):
        stages[0].error = error
        with pytest.raises(UserError, match="no finished stage to report") as raised:
            ladder.report("ladder", stages, tmp_path)
        assert raised.value.status == status


def test_two_ladders_do_not_climb_in_one_folder(rungs, tmp_path):
    with ladder.only_ladder(tmp_path / "logs" / "ladder"):
        done = run("ladder.py", *rungs, cwd=tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: logs/ladder: another ladder is being climbed there; wait for it, or give another --log_dir\n"
    )
    assert not (tmp_path / "logs").exists()


def test_what_is_wrong_with_matplotlib_costs_no_figures(tmp_path, monkeypatch):
    _, stages = ladder.plan(["baseline"], str(tmp_path), [])
    fake_run(stages[0], 100.0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails
    with pytest.raises(
        UserError, match=r"no picture can be drawn: .*matplotlib.*pip install -r requirements.txt"
    ):
        ladder.report("ladder", stages, tmp_path / "ladder")
    assert "| baseline |" in (tmp_path / "ladder/report.md").read_text()
    assert (tmp_path / "ladder/results.csv").is_file()


def test_a_stages_name_may_begin_with_a_dash(rungs, tmp_path):
    (tmp_path / "-x.yaml").write_text("lr: 1e-3\n")
    _, (stage,) = ladder.plan(
        [str(tmp_path / "-x.yaml")], str(tmp_path), rungs[rungs.index("--") + 1 :]
    )
    assert (stage.name, stage.config.run_name) == ("-x", "-x")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no /dev/full")
@pytest.mark.parametrize("full", [True, False], ids=["a full disk", "a reader that has gone"])
def test_a_table_that_nobody_reads_costs_no_report(full, tmp_path):
    _, stages = ladder.plan(["baseline"], str(tmp_path / "logs"), [])
    fake_run(stages[0], 100.0)
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") if full else os.fdopen(writer, "w") as unread:
        done = subprocess.run(
            [
                sys.executable,
                ROOT / "ladder.py",
                "--report_only",
                "baseline",
                "--log_dir",
                tmp_path / "logs",
            ],
            stdout=unread,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (
        0,
        "note: what is printed goes nowhere (No space left on device)\n" if full else "",
    )
    assert (tmp_path / "logs/ladder/speed.png").is_file()


def test_a_name_may_not_break_a_table():
    assert (
        reports.markdown_table(reports.items("stage", "n"), [("a|b\nc", "1")])[-1]
        == r"| a\|b c | 1 |"
    )


def test_a_git_that_does_not_answer_costs_no_run_its_summary(monkeypatch):
    def hangs(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(reports.subprocess, "run", hangs)
    assert reports.git_commit() is None
