"""Resuming, and beginning, where something is in the way: full disks, links, other runs, damaged
logs, odd names.
"""

import functools
import json
import os
import re
import shutil
import signal
import stat
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import checkpoint.files
import checkpoint.save
import runtime.runlog
from checkpoint.resume import resumed_config
from checkpoint.save import NotSavedError
from checkpoint.state import read_state
from checkpoint.weights import build_model, find_weights, load_model
from config import Config, load_config
from runtime.cli import ConfigError, parse
from runtime.errors import UserError
from runtime.files import write_atomic
from runtime.runlog import RunFolder
from runtime.signals import Stopped
from tests.conftest import TINY, flags, fork_server, refused, reseal, run
from tests.test_resume import (
    NO_SPACE,
    PARTS,
    checkpoints,
    log,
    newest,
    same_end,
)


def limit_file_size(limit):
    """As a disk that is full once a file has this many bytes; what is printed is not kept, so it is
    not limited.
    """
    import resource

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def contents(folder):
    """Every file below a folder, and what is in it."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


# ---- several runs at once


def _begin(folder, barrier, outcomes):
    """Begin a run at the same moment as others; tell how it went."""
    run_folder = RunFolder(folder)
    barrier.wait(60)
    try:
        run_folder.create()
        outcomes.put("began")
    except UserError as error:
        outcomes.put(str(error))
    barrier.wait(60)


def test_of_runs_that_start_at_the_same_moment_one_begins_and_the_others_are_told(tmp_path):
    context, folder, rounds = fork_server(), tmp_path / "logs/train", 4
    (folder / "checkpoints").mkdir(parents=True)
    busy = "another process is writing this run; wait for it or choose another --run_name"
    for _ in range(rounds):
        given = folder, context.Barrier(3), context.Queue()
        processes = [context.Process(target=_begin, args=given) for _ in range(3)]
        for process in processes:
            process.start()
        told = sorted(given[-1].get(timeout=60) for _ in processes)
        for process in processes:
            process.join(60)
        assert told == [f"{folder}: {busy}", f"{folder}: {busy}", "began"]
    names = {path.name for path in folder.parent.iterdir() if not path.name.startswith(".")}
    assert names == {"train", *(f"train.{n}" for n in range(1, rounds + 1))}


# ---- a full disk


@pytest.fixture
def disk(monkeypatch, here):
    """Makes a disk on which there is room for so many checkpoints of the run."""

    def make(checkpoints):
        real = checkpoint.files.save_file

        def save_file(tensors, path, **options):
            real(tensors, path, **options)
            if len([*here.rglob("checkpoints/**/*.safetensors")]) > 2 * checkpoints:
                os.truncate(path, 1000)
                raise OSError(28, NO_SPACE)

        monkeypatch.setattr(checkpoint.files, "save_file", save_file)

    return make


def test_a_save_first_deletes_what_keep_last_does_not_keep(go, here, disk):
    disk(3)
    go(checkpoint_every=1, keep_last=3)
    assert checkpoints(here) == ["step_000004", "step_000005", "step_000006"]


def test_a_full_disk_keeps_the_checkpoints_before_and_a_lower_keep_last_makes_room(
    go, here, disk, tmp_path
):
    options = {"checkpoint_every": 2, "max_steps": 8}
    disk(3)
    with refused(f"step_000008: cannot be written: .*{NO_SPACE}") as no:
        go(**options, keep_last=9)
    assert no.value.__notes__ == [RunFolder(here).how_to_resume()]
    assert checkpoints(here) == ["step_000002", "step_000004", "step_000006"]
    assert go(**options, keep_last=1, resume="auto")["resumed_after_step"] == 6
    assert checkpoints(here) == ["step_000008"]
    go(max_steps=8, keep_last=1, run_name="straight")
    same_end(here, tmp_path / "logs/straight")


def test_a_resume_makes_room_before_it_writes_anything(go, here, monkeypatch):
    go(checkpoint_every=2)
    (here / "checkpoints/.step_000006.unfinished").mkdir()

    def full(*_):
        raise OSError(28, NO_SPACE)

    monkeypatch.setattr(runtime.runlog, "write_rows", full)
    with pytest.raises(OSError, match=NO_SPACE):
        go(resume="auto", max_steps=9, keep_last=1)
    assert checkpoints(here) == ["step_000006"]


def test_the_newest_whole_checkpoint_is_never_deleted_for_room(go, here, disk):
    go(checkpoint_every=2)
    for step in (4, 6):
        (here / f"checkpoints/step_{step:06d}/model.safetensors").write_bytes(b"")
    disk(0)
    with pytest.raises(NotSavedError):
        go(resume="auto", checkpoint_every=5, max_steps=9, keep_last=1)
    assert newest(here).name == "step_000002"


def test_a_run_that_cannot_write_its_first_files_leaves_all_as_it_was(go, tiny_config, tmp_path):
    go(max_steps=1)
    before = contents(tmp_path / "logs")
    options = flags(tiny_config(max_steps=1))
    done = run("train.py", *options, cwd=tmp_path, before=functools.partial(limit_file_size, 500))
    said = r"error: .*/logs/train/console.log: cannot be written: File too large\n"
    assert re.fullmatch(said, done.stderr)
    assert contents(tmp_path / "logs") == before


def test_a_file_that_cannot_be_written_leaves_nothing_unfinished(tmp_path):
    (tmp_path / "log.csv").mkdir()
    with pytest.raises(OSError, match="cannot be written"):
        write_atomic(tmp_path / "log.csv", "step\n")
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_checkpoints_files_follow_the_umask(umask, go, here):
    before = os.umask(umask)
    try:
        go(max_steps=1)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in newest(here).iterdir()}
    assert modes == dict.fromkeys(PARTS, 0o666 & ~umask)


# ---- options that only the checkpoint can judge


@pytest.fixture
def steep(go, here):
    """A run whose options are far from the defaults."""
    options = {"lr": 1e-2, "n_head": 4, "n_embd": 20, "block_size": 2048, "seq_len": 48}
    go(**options, batch_size=1, total_batch_tokens=96, max_steps=2)
    return ["--resume", str(here), "--max_steps", "3"]


@pytest.mark.parametrize(
    "flag",
    [
        "--lr_schedule cosine --min_lr 1e-3",
        "--total_batch_tokens 96",
        "--block_size 2048",
        "--n_embd 20",
        "--seq_len 48",
        "--batch_size 2",
        "--n_head 4",
    ],
)
def test_options_of_a_resumed_run_are_judged_with_the_runs_own(flag, steep, go):
    assert go(parse(Config, [*steep, *flag.split()]))["steps"] == 3


def test_options_that_exclude_the_runs_own_are_told_with_its_values(steep, go, here):
    with pytest.raises(ConfigError) as caught:
        go(parse(Config, [*steep, "--min_lr", "0.1", "--fp16", "--bf16"]))
    assert str(newest(here)) in str(caught.value)
    first, second = str(caught.value).splitlines()
    assert "bf16 and fp16 exclude each other" in first
    assert "min_lr 0.1 is above lr 0.01" in second


def test_where_auto_finds_nothing_options_are_judged_as_a_new_runs(go, tiny_config, tmp_path):
    options = parse(Config, [*flags(tiny_config()), "--min_lr", "1e-3", "--resume", "auto"])
    with refused(r"--min_lr: min_lr 0.001 is above lr"):
        go(options)
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("auto --n_layr 2 --n_layer 0 --norm batch", ["--n_layr", "--n_layer", "--norm"]),
        ("", ["--resume"]),
    ],
)
def test_a_resume_is_told_wrong_values_and_names_at_once(argv, named):
    with pytest.raises(ConfigError) as caught:
        parse(Config, ["--resume", *argv.split(" ")])
    assert [line.partition(": ")[0] for line in str(caught.value).splitlines()] == named


@pytest.mark.parametrize(("ranks", "batch_size"), [(3, 4), (2, 4), (1, 3)])
def test_a_step_that_ranks_cannot_share_says_what_works(ranks, batch_size, go, here):
    go(max_steps=1)
    said = (
        f"takes 4 sequences, no multiple of batch_size {batch_size} on {ranks} ranks; "
        "choose a batch_size and a number of ranks whose product divides 4"
    )
    with refused(said):
        resumed_config(load_config(batch_size=batch_size), read_state(newest(here)), ranks)


def test_another_run_name_than_the_resumed_runs_says_what_to_do(go, here, tmp_path):
    go()
    for resume in map(str, (here, here / "checkpoints", newest(here))):
        said = f"--run_name: run_name other is not the run that resume {resume} is of; leave "
        with refused(said):
            load_config(resume=resume, run_name="other")
        assert load_config(resume=resume, run_name="train").resume == resume
    (tmp_path / "any.yaml").write_text("max_steps: 7")  # its own name is not given
    assert go(load_config(str(tmp_path / "any.yaml"), resume=str(here)))["steps"] == 7
    aside = here.rename(here.with_name("train.1"))  # whose config.yaml has the name from before
    config = load_config(str(aside / "config.yaml"), resume=str(aside), max_steps=8)
    assert go(config)["steps"] == 8


# ---- what a resumed run says of itself


def test_a_resumed_runs_time_is_beside_the_steps_it_is_of(go, here, capsys):
    go(max_steps=4)
    summary = go(resume="auto")
    said = r"done: 6 steps, 768 tokens, 2 of these steps in this call, in 0:00:\d\d; loss "
    assert re.search(said, capsys.readouterr().out)
    assert (summary["steps"], summary["steps_this_call"]) == (6, 2)


def test_damaged_rows_of_a_log_are_left_out(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(f"\ufeffstep,val_loss\n1,2\n2,x\n\0\0\n3\n{'9' * 5000},1\n4,3\n5,4", "utf-8")
    assert [*runtime.runlog.read_rows(path, ("step", "val_loss"))] == [1, 4]


# ---- links and places


@pytest.fixture
def linked(go, here, tmp_path):
    """A run of 4 steps whose checkpoints/ is a link to another disk, so to say."""
    go(max_steps=4)
    (tmp_path / "disk").mkdir()
    (here / "checkpoints").rename(tmp_path / "disk/of_train")
    (here / "checkpoints").symlink_to(tmp_path / "disk/of_train")
    return here


WAYS = ["{run}/", "{run}/checkpoints", "{run}/checkpoints/step_000004", "train"]


@pytest.mark.parametrize("way", [*WAYS, "auto"])
def test_a_run_and_its_weights_are_found_through_linked_checkpoints_however_it_is_named(
    way, linked, go
):
    source, log_dir = way.format(run=linked), str(linked.parent)
    if way != "auto":
        config, _ = build_model(load_config(init_from=source, log_dir=log_dir, seq_len=32))
        assert (config.n_layer, config.run_name) == (TINY["n_layer"], "train")
        assert Path(config.init_from).name == "step_000004"
    resumed = load_config(resume=source, max_steps=6, log_dir=log_dir)
    assert go(resumed)["resumed_after_step"] == 4
    assert checkpoints(linked) == ["step_000004", "step_000006"]
    assert (linked / "checkpoints").is_symlink()


@pytest.mark.parametrize(("where", "resume"), [("", "."), ("checkpoints/step_000004", ".")])
def test_a_run_is_resumed_from_within_its_folder(where, resume, go, here, monkeypatch):
    go(max_steps=4)
    monkeypatch.chdir(here / where)
    assert go(load_config(resume=resume, max_steps=6))["resumed_after_step"] == 4
    assert len(log(here)) == 6


@pytest.mark.parametrize("there", ["link", "file"])
def test_checkpoints_that_cannot_be_seen_now_are_not_taken_for_none(there, linked, go, tmp_path):
    (tmp_path / "disk").rename(tmp_path / "away")
    if there == "file":
        (tmp_path / "disk").mkdir()
        (tmp_path / "disk/of_train").write_text("")
    for act in (
        lambda: go(resume="auto"),
        lambda: go(resume=str(linked)),
        lambda: load_model("train", str(linked.parent)),
    ):
        with pytest.raises(OSError, match="checkpoints") as caught:
            act()
        assert caught.value.filename == str(linked / "checkpoints")


@pytest.mark.parametrize("call", ["rename", "mkdir"])
def test_a_signal_as_a_folder_has_just_been_moved_or_made_leaves_all_as_it_was(
    call, go, here, monkeypatch
):
    go(max_steps=1)
    before, real = contents(here.parent), getattr(Path, call)

    def then_stop(path, *args, **kwargs):
        real(path, *args, **kwargs)
        if path == here:
            raise Stopped(0)

    with monkeypatch.context() as patched:
        patched.setattr(Path, call, then_stop)
        with pytest.raises(Stopped):
            go(max_steps=1)
    assert contents(here.parent) == before


@pytest.mark.parametrize("name", ["log.csv", "console.log"])
def test_a_resume_that_cannot_begin_leaves_all_as_it_was_and_gives_no_advice_that_was_followed(
    name, go, here
):
    go()
    (here / name).unlink()
    (here / name).mkdir()
    before = contents(here)
    with pytest.raises((OSError, UserError), match=r"Is a directory") as caught:
        go(resume="auto", max_steps=8)
    assert not hasattr(caught.value, "__notes__")
    assert contents(here) == before


def test_a_run_of_which_only_the_best_checkpoint_is_left_has_weights_and_resumes(go, here):
    go(max_steps=4, eval_every=4, val_fraction=0.1)
    shutil.rmtree(here / "checkpoints/step_000004")
    (best,) = (here / "checkpoints").iterdir()
    assert find_weights("train", str(here.parent)) == best
    assert go(load_config(resume=str(here), max_steps=5))["resumed_after_step"] == 4


@pytest.mark.parametrize("harm", ["one missing", "half precision", "no file"])
def test_tensors_that_are_missing_or_of_another_dtype_are_refused(harm, go, here):
    go(max_steps=2)
    path = newest(here) / "optimizer.safetensors"
    tensors = load_file(path)
    name, said = "transformer.wte.weight/exp_avg", "the optimizer's state does not fit the model's"
    tensor = tensors.pop(name)
    if harm == "half precision":
        tensors[name] = tensor.half()
    save_file(tensors, path)
    if harm == "no file":
        path.unlink()
        said = "step_000002: has no optimizer.safetensors; leave out the option that needs it"
    reseal(path.parent)
    with refused(said):
        go(resume="auto", max_steps=3)


def test_options_of_a_checkpoint_that_this_version_does_not_know_are_noted(go, here, capsys):
    go(max_steps=2)
    path = newest(here) / "checkpoint.json"
    path.write_text(path.read_text().replace('"config": {', '"config": {"later": 7, '))
    reseal(path.parent)
    go(resume="auto", max_steps=3)
    assert "later 7 -> (unknown to this version)" in capsys.readouterr().out


def test_a_checkpoint_of_an_earlier_version_and_another_name_resumes_and_is_saved_under_its_own(
    go, here, tmp_path
):
    go(max_steps=2)
    renamed = (here / "checkpoints/step_000002").rename(here / "checkpoints/final")
    state = json.loads((renamed / "checkpoint.json").read_text())
    (renamed / "checkpoint.json").write_text(json.dumps(state | {"run_id": "0123"}))
    reseal(renamed)
    go(load_config(resume=str(renamed), max_steps=4))
    assert checkpoints(here) == ["final", "step_000004"]
    go(run_name="straight", max_steps=4)
    same_end(here, tmp_path / "logs/straight")
