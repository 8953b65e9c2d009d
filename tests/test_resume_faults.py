"""Beginning and resuming with obstacles: full disks, links, other runs, damaged logs, odd names."""

import json
import os
import shutil

import pytest
from safetensors.torch import load_file, save_file

import checkpoint.files
from checkpoint.saved import read_state
from checkpoint.weights import find_weights, load_model
from config import Config, load_config
from run.log import read_rows
from run.start import resumed_config
from runtime.cli import ConfigError, parse
from tests.conftest import at_step, console, end_of, flags, refused, reseal, run
from tests.test_resume import NO_SPACE, PARTS, checkpoints, newest


def contents(folder):
    """Every file below a folder, with its bytes."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


# ---- several runs at once


def test_of_two_runs_of_one_name_the_second_is_refused_while_the_first_trains(
    tiny_config, go, here, tmp_path, monkeypatch
):

    def begin_second(*_):
        done = run("train.py", *flags(tiny_config()), cwd=tmp_path, status=2)
        busy = "another process is writing it; wait for it, or choose another name"
        assert done.stderr == f"error: {here}: {busy}\n"

    at_step(monkeypatch, begin_second)
    go(max_steps=1)


# ---- a full disk


@pytest.fixture
def disk(monkeypatch, here):
    """Makes a disk with room for a number of the run's checkpoints."""

    def make(checkpoints):
        real = checkpoint.files.save_file

        def save_file(tensors, path, **options):
            real(tensors, path, **options)
            if len([*here.rglob("checkpoints/**/*.safetensors")]) > 2 * checkpoints:
                os.truncate(path, 1000)
                raise OSError(28, NO_SPACE)

        monkeypatch.setattr(checkpoint.files, "save_file", save_file)

    return make


def test_a_full_disk_keeps_the_checkpoints_before_and_a_lower_keep_last_makes_room(
    go, here, disk, tmp_path
):
    options = {"checkpoint_every": 2, "max_steps": 8}
    disk(3)
    with pytest.raises(OSError, match=NO_SPACE) as no:
        go(**options, keep_last=9)
    not_saved, how_to_resume = no.value.__notes__
    assert not_saved.startswith("the state after step 8 could not be saved: ")
    assert how_to_resume == f"to resume: the same command with --resume {here}"
    assert checkpoints(here) == ["step_000002", "step_000004", "step_000006"]
    assert go(**options, keep_last=1, resume="auto")["resumed_after_step"] == 6
    assert checkpoints(here) == ["step_000008"]
    go(max_steps=8, keep_last=1, run_name="straight")
    assert end_of(here) == end_of(tmp_path / "logs/straight")


def test_a_disk_without_room_for_one_checkpoint_is_an_error_before_the_first_step(
    go, here, monkeypatch
):
    go(checkpoint_every=3)
    size = sum(file.stat().st_size for file in newest(here).glob("*.safetensors"))
    disk = shutil.disk_usage(here)

    def leave_room(share):
        left = disk._replace(free=int(share * size))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: left)

    leave_room(0.8)  # a file of tensors has their names too
    with refused(f"{here.parent}: the disk has room for .* GB, a checkpoint takes "):
        go(run_name="new")
    assert not here.with_name("new").exists()
    go(max_steps=7, resume="auto")  # it may delete step 3
    leave_room(1)
    go(run_name="new")


def test_the_newest_whole_checkpoint_is_never_deleted_for_room(go, here, disk):
    go(checkpoint_every=2)
    for step in (4, 6):
        (here / f"checkpoints/step_{step:06d}/model.safetensors").write_bytes(b"")
    disk(0)
    with pytest.raises(OSError, match=NO_SPACE):
        go(resume="auto", checkpoint_every=5, max_steps=9, keep_last=1)
    assert go(resume="auto", checkpoint_every=5, max_steps=2)["resumed_after_step"] == 2


# ---- options that only the checkpoint can judge


def test_options_of_a_resumed_run_are_judged_with_the_runs_own(go, here):
    options = {"lr": 1e-2, "n_head": 4, "n_embd": 20, "block_size": 2048, "seq_len": 48}
    go(**options, batch_size=1, total_batch_tokens=96, max_steps=2)
    resumes = f"--resume {here} --max_steps 3 --lr_schedule cosine --n_head 4 --seq_len 48 ".split()
    with pytest.raises(ConfigError) as caught:
        go(parse(Config, [*resumes, "--min_lr", "0.1", "--fp16", "--bf16"]))
    first, second, third = str(caught.value).splitlines()
    assert "bf16 and fp16 exclude each other" in first
    assert "min_lr 0.1 is above lr 0.01" in second
    assert third == f"other options come from {newest(here)}; a step keeps its 96 tokens"
    assert (
        go(parse(Config, [*resumes, "--min_lr", "1e-3", "--total_batch_tokens", "96"]))["steps"]
        == 3
    )


@pytest.mark.parametrize(
    ("ranks", "batch_size", "said"),
    [
        (1, 64, "batch_size 64 does not divide the 4 sequences .* 128 tokens; .*: 4$"),
        (1, 3, "batch_size 3 .*nearest that work: 2 or 4$"),
        (2, 4, "batch_size 4 .* the 2 sequences of each rank; .*nearest that work: 2$"),
        (3, 1, "4 sequences, which 3 ranks cannot share equally; .*: 2 or 4 ranks$"),
    ],
)
def test_a_step_that_ranks_cannot_share_says_what_works(ranks, batch_size, said, go, here):
    go(max_steps=1)
    saved = read_state(newest(here))
    with refused(said):
        resumed_config(load_config(batch_size=batch_size), saved, ranks)


def test_another_run_name_than_the_resumed_runs_says_what_to_do(go, here):
    go(max_steps=1)
    for resume in map(str, (here, newest(here))):
        with refused(f"--run_name: run_name other does not match resume {resume}; leave "):
            load_config(resume=resume, run_name="other")
        load_config(resume=resume, run_name="train")


# ---- logs


def test_damaged_rows_of_a_log_are_left_out(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(f"\ufeffstep,val_loss\n1,2\n2,x\n\0\0\n3\n{'9' * 5000},1\n4,3\n5,4", "utf-8")
    assert [*read_rows(path, ("step", "val_loss"))] == [1, 4]


# ---- links and places


@pytest.fixture
def linked(go, here, tmp_path):
    """A run of 4 steps whose checkpoints/ is a link to another folder."""
    go(max_steps=4)
    (tmp_path / "disk").mkdir()
    (here / "checkpoints").rename(tmp_path / "disk/of_train")
    (here / "checkpoints").symlink_to(tmp_path / "disk/of_train")
    return here


@pytest.mark.parametrize("way", ["{run}/", "{run}/checkpoints/step_000004", "train", "auto"])
def test_a_run_and_its_weights_are_found_through_linked_checkpoints_however_it_is_named(
    way, linked, go
):
    source, log_dir = way.format(run=linked), str(linked.parent)
    if way != "auto":
        assert find_weights(source, log_dir).name == "step_000004"
    resumed = load_config(resume=source, max_steps=6, log_dir=log_dir)
    assert go(resumed)["resumed_after_step"] == 4
    assert checkpoints(linked) == ["step_000004", "step_000006"]
    assert (linked / "checkpoints").is_symlink()


READ_ONLY = {"checkpoint_every": 2, "eval_every": 2, "val_fraction": 0.1, "dropout": 0.1}


def test_a_run_resumed_in_another_log_dir_ends_exactly_and_its_own_folder_is_only_read(
    go, here, tmp_path, monkeypatch
):
    go(**READ_ONLY, run_name="straight")
    go(**READ_ONLY, max_steps=4)
    before, other = contents(here), tmp_path / "other"
    monkeypatch.setattr(os, "access", lambda path, _: path != here)
    with refused(f"{here}: cannot be written; to resume in FOLDER/train, add --log_dir FOLDER"):
        go(**READ_ONLY, resume=str(here))
    for source in (here, here / "checkpoints/step_000002"):  # whose later steps are not lost
        go(**READ_ONLY, resume=str(source), log_dir=str(other))
        assert end_of(other / "train") == end_of(here.with_name("straight"))
        assert contents(here) == before
    assert checkpoints(other / "train.1")[-1] == "step_000006"
    again = go(**READ_ONLY, max_steps=8, resume="auto", log_dir=str(other))
    assert again["resumed_after_step"] == 6


def test_a_file_in_place_of_its_checkpoint_names_the_folder(go, here):
    go(max_steps=1)
    file = newest(here) / PARTS[0]
    said = f"{file}: is only a file of a checkpoint; give its folder, {newest(here)}$"
    for use in (load_model, lambda file: go(load_config(resume=file))):
        with refused(said):
            use(str(file))


def test_checkpoints_that_cannot_be_seen_now_are_not_taken_for_none(linked, go, tmp_path):
    (tmp_path / "disk").rename(tmp_path / "away")
    for act in (
        lambda: go(resume="auto"),
        lambda: load_model("train", str(linked.parent)),
    ):
        with pytest.raises(OSError, match="checkpoints") as caught:
            act()
        assert caught.value.filename == str(linked / "checkpoints")


def test_a_run_of_which_only_the_best_checkpoint_is_left_has_weights_and_resumes(go, here):
    go(max_steps=4, eval_every=4, val_fraction=0.1)
    shutil.rmtree(here / "checkpoints/step_000004")
    (best,) = (here / "checkpoints").iterdir()
    assert find_weights("train", str(here.parent)) == best
    assert go(load_config(resume=str(here), max_steps=5))["resumed_after_step"] == 4


def test_a_tensor_that_is_missing_is_refused(go, here):
    go(max_steps=2)
    path = newest(here) / "optimizer.safetensors"
    tensors = load_file(path)
    del tensors["transformer.wte.weight/exp_avg"]
    save_file(tensors, path)
    reseal(path.parent)
    with refused("does not fit the run: transformer.wte.weight/exp_avg differs"):
        go(resume="auto", max_steps=3)


def test_a_checkpoint_of_another_version_resumes_with_a_note(go, here):
    go(max_steps=2)
    folder = newest(here)
    state = json.loads((folder / "checkpoint.json").read_text())
    state["config"] |= {"later": 7, "skip_spikes": 0}
    for name in ("init_from", "lr", "grad_clip"):  # the run has their defaults
        del state["config"][name]
    state["skipped_spikes"] = 0
    (folder / "checkpoint.json").write_text(json.dumps(state))
    reseal(folder)
    go(load_config(resume=str(folder), max_steps=4))
    assert f"note: {folder}: has later, an option that this code lacks" in console(here)
    go(run_name="straight", max_steps=4)
    assert end_of(here) == end_of(here.with_name("straight"))
