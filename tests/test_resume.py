"""Resuming a run: the same numbers as without the interruption, whatever is switched on; faults in
the middle of a run; checkpoints that went bad.
"""

import json
import os
import pickle
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from checkpoint.names import all_checkpoints
from checkpoint.saved import read_state
from checkpoint.weights import load_model
from config import load_config
from data.token_file import write_corpus
from run.log import read_rows
from runtime.cli import ConfigError
from tests.conftest import (
    ALONE,
    COMPILED,
    MODERN,
    at_step,
    console,
    end_of,
    ended,
    flags,
    folder_of,
    log,
    poisoned_at,
    refused,
    reseal,
    run,
    run_ranks,
    start,
    start_ranks,
    wait_for,
)
from train import train

needs_proc = pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="finds workers in /proc"
)
needs_dev_full = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs a device that is always full"
)
PARTS = ["model.safetensors", "optimizer.safetensors", "checkpoint.json", "SHA256SUMS"]
NO_SPACE = "No space left on device"


def newest(run):
    return all_checkpoints(folder_of(run))[-1]


def checkpoints(run):
    return sorted(path.name for path in (folder_of(run) / "checkpoints").iterdir())


# ---- exact


WAYS = {
    "dropout and accumulation": {"dropout": 0.2, "batch_size": 2, "total_batch_tokens": 256},
    "muon": {"optimizer": "muon"} | MODERN | {"embed_lr": 0.01, "scalar_lr": 0.02, "dropout": 0.1},
    "several threads": {"n_embd": 128, "block_size": 128, "seq_len": 128, "batch_size": 2},
    "compile, evaluating": COMPILED | {"eval_every": 2, "val_fraction": 0.3},
    "compile, dropout": COMPILED | {"dropout": 0.1},
}
SLOW = pytest.param("compile, dropout", marks=pytest.mark.slow)  # has kernels of its own to compile


@pytest.mark.parametrize("way", [*list(WAYS)[:-1], SLOW])
def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(way, tiny_config, go, stop_at):
    """test_choices.py does so with every choice of the options, stopped once."""
    options = WAYS[way] | {"max_steps": 7}
    straight = tiny_config(**options, run_name="straight")
    twice = tiny_config(**options, resume="auto")
    before = torch.get_num_threads()
    torch.set_num_threads(2 if "several threads" in way else 1)
    go(straight)
    for at in (3, 2):
        stop_at(at)
        assert go(twice)["interrupted"]
    summary = go(twice)
    torch.set_num_threads(before)
    assert (summary["steps"], summary["resumed_after_step"]) == (7, 5)
    assert end_of(twice) == end_of(straight)
    assert (summary["val_loss"] is None) == ("eval_every" not in options)


def test_a_resume_after_the_last_step_has_nothing_to_do(go, here, capsys):
    go()
    assert go(resume="auto") == {"steps": 6}
    assert "nothing to do: " in capsys.readouterr().out
    (here / "summary.json").unlink()
    assert go(resume="auto")["steps"] == 6
    assert (here / "summary.json").exists()
    shutil.copytree(here / "checkpoints", here.parent / "copied/checkpoints")  # alone
    assert go(load_config(resume=str(here.parent / "copied"))) == {"steps": 6}


def cut(path, lines, torn=""):
    path.write_text("\n".join([*path.read_text().splitlines()[:lines], torn]))


@pytest.mark.parametrize("lost", ["two steps", "evaluations", "summary"])
def test_what_a_kill_has_torn_or_prevented_is_there_once_after_a_resume(lost, go, here):
    options = {"checkpoint_every": 2, "eval_every": 2, "val_fraction": 0.1, "log_every": 4}
    summary = go(**options)
    before = end_of(here)
    shutil.rmtree(here / "checkpoints/best_000006")
    if lost == "summary":  # killed after the last step
        (here / "summary.json").unlink()
        cut(here / "eval.csv", 4, "6,")
    else:
        shutil.rmtree(here / "checkpoints/step_000006")
        cut(here / "log.csv", 9, "7,3.1")
    if lost == "evaluations":
        cut(here / "eval.csv", 3)  # steps 0 and 2
    again = go(**options, resume="auto")
    assert end_of(here) == before
    assert json.loads((here / "summary.json").read_text()) == again
    for name in ("steps", "tokens", "final_loss", "val_loss", "interrupted"):
        assert again[name] == summary[name], name


def test_a_run_killed_at_random_moments_ends_like_an_undisturbed_one(
    go, here, tiny_config, tmp_path
):
    options = {"dropout": 0.1, "shuffle": True, "max_steps": 60, "checkpoint_every": 1}
    options |= {"eval_every": 10, "val_fraction": 0.1}
    go(**options, run_name="straight")
    command = flags(tiny_config(**options, run_name="train", resume="auto"))
    # At length: logs/results/epyc-2cores/soak.sh.
    for seconds in (0.03, 0.1):
        before = all_checkpoints(here)
        with ended([start("train.py", *command, cwd=tmp_path, OMP_NUM_THREADS="1")]) as (process,):
            wait_for(lambda before=before: all_checkpoints(here)[-1:] != before[-1:], process)
            time.sleep(seconds)
    assert newest(here).name < "step_000060"
    go(**options, resume="auto")
    assert end_of(here) == end_of(here.with_name("straight"))


def test_a_signal_in_the_last_step_does_not_leave_out_the_last_evaluation(go, stop_at):
    stop_at(6)
    summary = go(eval_every=4, val_fraction=0.1)
    assert not summary["interrupted"]
    assert summary["val_loss"] is not None


@pytest.mark.parametrize("fused", [False, True])
def test_a_checkpoint_from_before_the_first_update_can_be_resumed(go, monkeypatch, fused):
    options = {"skip_nonfinite": 1, "fused_adamw": fused}
    at_step(monkeypatch, poisoned_at(1))
    for resume in (None, "auto"):
        with refused("the update of the last step, 1, was skipped") as ended:
            go(**options, max_steps=1, resume=resume)
        assert ended.value.status == 1
    summary = go(**options, resume="auto")
    assert (summary["resumed_after_step"], summary["skipped_steps"], summary["steps"]) == (1, 1, 6)


def curves(run):
    """The losses and validation losses of a run by step."""
    columns = (("log.csv", "loss"), ("eval.csv", "val_loss"))
    return [
        {step: row[column] for step, row in read_rows(run / name, ("step", column)).items()}
        for name, column in columns
    ]


def test_on_another_number_of_ranks_batches_stay_and_steps_are_evaluated_once(
    go, here, tiny_config, tmp_path
):
    """The evaluations of steps that are taken again are in the file as the ranks start: all must
    forget them.
    """
    options = {"eval_every": 3, "val_fraction": 0.1, "checkpoint_every": 2, "shuffle": True}
    go(**options, total_batch_tokens=256, batch_size=2, keep_last=9)
    straight, before = curves(here), checkpoints(here)
    for name in ("step_000004", "step_000006", "best_000006"):
        shutil.rmtree(here / "checkpoints" / name)
    again = flags(tiny_config(**options, batch_size=2, resume="auto"))  # its total is kept
    run_ranks(2, "train.py", *again, cwd=tmp_path)
    assert checkpoints(here) == before
    assert curves(here) == [pytest.approx(curve, abs=1e-5) for curve in straight]


# ---- options


def test_options_that_contradict_the_checkpoint_name_both_values(go):
    go()
    with pytest.raises(ConfigError) as caught:
        go(
            resume="auto",
            n_layer=3,
            shuffle=True,
            optimizer="muon",
            normuon=True,
            total_batch_tokens=256,
        )
    for said in (
        "n_layer 3 .* 2",
        "shuffle True .* False",
        "optimizer muon .* adamw",
        "normuon True .* False",
        "total_batch_tokens 256 .* 128",
    ):
        assert re.search(f"^{said}", str(caught.value), re.MULTILINE)


def test_another_corpus_is_refused_naming_both(go, corpus):
    go()
    shutil.rmtree(corpus / "tiny")
    write_corpus(corpus / "tiny", [[token % 99 for token in range(4000)]])
    said = r"another corpus than .*tiny: its fingerprint is 2:\w{10}, this one's 2:\w{10}; .*"
    said += "start a new run from the weights: --init_from .*step_000006"
    with refused(said):
        go(resume="auto", max_steps=9)


def test_options_that_may_change_are_said(go, here):
    go()
    go(resume="auto", max_steps=8, lr=1e-4, batch_size=2)
    (note,) = re.findall("note: changed since the checkpoint: .*", console(here))
    for change in ("lr 0.0003 -> 0.0001", "batch_size 4 -> 2", "total_batch_tokens None -> 128"):
        assert change in note
    said = "note: the learning rate of step 7 is 0.0001, it was 0.0003 at step 6\n"
    assert said in console(here)
    assert log(here)[-1][2] == "0.0001"


def test_a_path_alone_is_enough(go, here):
    go(dropout=0.1, max_steps=4)
    # everything else is the checkpoint's
    assert go(load_config(resume=str(here), max_steps=6))["steps"] == len(log(here)) == 6
    for resume, message in (
        (f"{here}/checkpoints/step_000004", "has later checkpoints, up to step_000006"),
        ("nowhere", "nowhere: has no whole checkpoint"),
        (f"{here}/step_000006", "is not in its run's checkpoints/"),
    ):
        with refused(message):
            go(load_config(resume=resume, max_steps=9))


def test_a_run_that_begins_anew_keeps_its_config_files_name(go, here, tmp_path):
    go(max_steps=1)
    file, mine = tmp_path / "mine.yaml", here.with_name("mine")
    file.write_text((here / "config.yaml").read_text().replace("run_name: train\n", ""))
    assert go(load_config(str(file), resume="auto"))["resumed_after_step"] is None
    assert load_config(str(mine / "config.yaml")).resume is None


# ---- the checkpoints that are kept, and their content


def test_the_newest_checkpoints_and_the_best_are_kept_also_after_a_resume(go, here):
    """The learning rate rises until the loss does, in step 3."""
    options = {"checkpoint_every": 1, "keep_last": 2, "eval_every": 1, "val_fraction": 0.1}
    options |= {"lr": 1.0, "warmup_steps": 30}
    go(**options, max_steps=4)
    go(**options, max_steps=6, resume="auto")
    assert checkpoints(here) == ["best_000002", "step_000005", "step_000006"]
    assert read_state(newest(here)).best_val_loss == curves(here)[1][2]
    go(**options, max_steps=7, eval_tokens=64, resume="auto")  # losses of other tokens
    assert "best_000002" not in checkpoints(here)


def test_no_checkpoint_is_saved_where_none_are_kept(go, here):
    go(keep_last=0, eval_every=2, val_fraction=0.1)
    assert not (here / "checkpoints").exists()


# ---- signals


SLOW_SAVE = """if True:
    import runpy, sys, time
    from pathlib import Path
    import checkpoint.files

    def save_slowly(*args, **options):
        if not Path("saving").exists():
            Path("saving").touch()
            time.sleep(3)
        real(*args, **options)

    real, checkpoint.files.save_file = checkpoint.files.save_file, save_slowly
    sys.argv[0] = "train.py"
    runpy.run_module("train", run_name="__main__", alter_sys=True)
"""


def test_a_signal_to_one_rank_during_a_slow_save_stops_all_saved_and_says_how_to_go_on(
    tiny_config, tmp_path, here
):
    """Rank 1 hears no signal while it waits for rank 0, which writes."""
    config = tiny_config(max_steps=100_000, batch_size=2, checkpoint_every=3, tensorboard=True)
    with ended(start_ranks(2, "-c", SLOW_SAVE, *flags(config), cwd=tmp_path)) as ranks:
        wait_for((tmp_path / "saving").exists, ranks[0])
        ranks[1].send_signal(signal.SIGUSR1)
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "to resume: the same command with --resume " in outputs[0][0]
    assert len([*here.glob("events.*")]) == 1
    assert checkpoints(here) == ["step_000003", f"step_{len(log(here)):06d}"]


TWO_SIGNALS = """if True:
    import signal
    from runtime.signals import StopRequest
    with StopRequest() as stop:
        stop.has_begun = True
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # torchrun's copy of the same Ctrl-C
        print("is stopping", flush=True)
        stop.received -= 2
        signal.raise_signal(signal.{second})
        print("was not stopped", flush=True)
"""


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_signal_kills_but_a_copy_of_the_first_one_does_not(second, tmp_path):
    status = -signal.Signals[second]
    done = run("-c", TWO_SIGNALS.format(second=second), cwd=tmp_path, status=status)
    assert done.stdout == "is stopping\n"


def test_a_rank_that_hangs_ends_the_others_which_save_nothing_and_say_how_to_resume(
    tiny_config, tmp_path, here
):
    """test_ranks.py has one that dies."""
    options = flags(tiny_config(max_steps=100_000, timeout=4, checkpoint_every=1))
    with ended(start_ranks(2, "train.py", *options, cwd=tmp_path)) as ranks:
        wait_for(lambda: all_checkpoints(here)[1:], ranks[0])
        ranks[1].send_signal(signal.SIGSTOP)
        errors = ranks[0].communicate(timeout=60)[1]
    said = "another rank has died, or did not answer within --timeout 4 s"
    assert re.search(
        f"error: {said} .*; to resume: the same command with --resume {here}\n", errors
    )
    assert "could not be saved" not in errors
    assert "Traceback" not in errors


# ---- faults


def test_a_non_finite_step_keeps_the_last_good_checkpoint_and_says_how_to_go_on(
    go, here, monkeypatch
):
    at_step(monkeypatch, poisoned_at(5))
    figures = r"step 5: the loss is [\d.]+, the gradient norm nan, the learning rate 0.0003; "
    advice = r".*--resume .*train --lr 0.00015 --muon_lr 0.01 resumes from its last checkpoint$"
    with refused(figures + advice):
        go(checkpoint_every=2, optimizer="muon")
    assert checkpoints(here)[-1] == "step_000004"


def test_weights_that_are_no_longer_finite_are_not_saved(go, here, monkeypatch):
    """A finite gradient can still make an update that overflows."""

    def overflow(call, model):
        if call == 4:
            next(model.parameters()).data[0] = float("inf")

    at_step(monkeypatch, overflow)
    with refused(r"step 4: the weights are no longer finite and are not saved; .*Try a lower lr"):
        go(checkpoint_every=2)
    assert checkpoints(here) == ["step_000002"]


@pytest.mark.parametrize("fused", [False, True])
def test_non_finite_steps_change_nothing_and_are_skipped_as_often_as_asked(
    go, here, monkeypatch, fused
):
    options = {"skip_nonfinite": 2, "fused_adamw": fused, "checkpoint_every": 1, "keep_last": 9}
    at_step(monkeypatch, poisoned_at(2, 4))
    summary = go(**options)
    assert (summary["steps"], summary["skipped_steps"]) == (6, 2)
    assert [row[0] for row in log(here) if row[3] == "nan"] == ["2", "4"]
    assert "skipped, 2 of at most 2" in console(here)
    for name in PARTS[:2]:
        before, skipped, after = (
            (here / f"checkpoints/step_00000{step}" / name).read_bytes() for step in (3, 4, 5)
        )
        assert before == skipped != after
    at_step(monkeypatch, poisoned_at(1, 2, 3))
    with refused("step 3: "):
        go(**options)


# ---- bad checkpoints


@pytest.fixture
def saved(go, here):
    """The only checkpoint of a run."""
    go(max_steps=2)
    return newest(here)


def resume(folder, **options):
    return train(load_config(resume=str(folder), max_steps=9, **options), ALONE)


def flip(path):
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("harm", [Path.unlink, flip, empty])
def test_a_damaged_checkpoint_is_skipped_or_refused_in_one_line(name, harm, saved, go, here):
    harm(saved / name)
    with refused(r"damaged|missing"):
        resume(saved)
    # the line that is flipped in SHA256SUMS is the optimizer's
    if name != "optimizer.safetensors" and (name, harm) != ("SHA256SUMS", flip):
        with refused(r"damaged|missing"):
            load_model(str(saved))
    assert go(max_steps=3, resume="auto")["resumed_after_step"] is None  # a fresh start
    assert "note: skipping a checkpoint: " in console(here)
    assert f"is now {here}.1" in console(here)  # the old folder is kept


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_unless_all_are(go, here, capsys):
    go(checkpoint_every=2)
    straight = log(here)
    empty(newest(here) / "model.safetensors")
    assert go(checkpoint_every=2, resume="auto")["resumed_after_step"] == 4
    assert log(here) == straight
    for path in all_checkpoints(here):
        empty(path / "model.safetensors")
    capsys.readouterr()
    with refused("has no whole checkpoint"):
        resume(here)
    noted = capsys.readouterr().out.splitlines()
    assert [
        *map(re.compile(r"note: skipping a checkpoint: .*/step_(\d+)/\S+ damaged").findall, noted)
    ] == [["000006"], ["000004"], ["000002"]]


def test_a_checkpoint_under_the_name_of_another_step_is_refused_or_skipped(go, here):
    go(checkpoint_every=4)
    renamed = newest(here).rename(here / "checkpoints/step_000009")
    said = f"{renamed}: has step 6; rename it to step_000006"
    for act in (resume, load_model):
        with refused(said):
            act(str(renamed))
    assert go(max_steps=9, resume="auto")["resumed_after_step"] == 4
    assert f"note: skipping a checkpoint: {said}" in console(here)
    assert read_state(newest(here)).step == 9


@pytest.mark.parametrize(
    "forged",
    [
        {"step": -6},
        {"config": {"lr": {"a": 1}, "seq_len": "long"}},
        {"random": [{}]},
        {"scaler": {"growth_factor": 2.0}},
    ],
    ids=str,
)
def test_a_forged_state_is_one_line_that_names_the_file(forged, saved):
    file = saved / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | forged))
    reseal(saved)
    with refused(rf"^{file}: .*(damaged|not valid): .*$"):
        resume(saved, fp16="scaler" in forged)


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize("name", PARTS[:3])
@pytest.mark.usefixtures("in_tmp_path")
def test_nothing_in_a_checkpoint_is_executed(name, saved, tmp_path):
    (saved / name).write_bytes(pickle.dumps(Bomb()))
    reseal(saved)
    with refused("damaged"):
        resume(saved)
    assert not (tmp_path / "exploded").exists()
