"""Going on, and beginning, where something is in the way: odd folder names, full disks, links,
other runs, damaged logs.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
from pathlib import Path

import filelock
import pytest
import torch
from safetensors.torch import load_file

import checkpoint
import runtime.runlog
import weights
from checkpoint import NotSavedError, newest_whole_checkpoint, read_state, resumed_config
from config import Config, load_config
from runtime.cli import ConfigError, parse, parse_command_line
from runtime.errors import UserError
from runtime.files import write_whole
from runtime.runlog import RunFolder
from runtime.signals import Stopped
from tests.conftest import (
    ALONE,
    TINY,
    flags,
    fork_server,
    run,
    run_from_nothing,
    tiny_run,
    write_tiny_corpus,
)
from tests.test_resume import folder_of, limit_file_size, log, newest, same_end
from train import train
from weights import CheckpointError, build_model, load_model, verify


def summary_of(config):
    return json.loads((folder_of(config) / "summary.json").read_text())


def checkpoints(config):
    return sorted(path.name for path in (folder_of(config) / "checkpoints").iterdir())


# ---- folders whose names are no text


@pytest.fixture
def odd_place(tmp_path):
    """A folder with a corpus, in a folder whose name is not UTF-8."""
    place = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        place.mkdir()
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    write_tiny_corpus(place)
    return place


@pytest.mark.parametrize("log_dir", ["absolute", "relative"])
def test_a_run_below_a_folder_that_is_not_utf8_is_saved_resumed_and_read_again(
    log_dir, odd_place, tiny_config, monkeypatch
):
    monkeypatch.chdir(odd_place)
    given = {} if log_dir == "absolute" else {"log_dir": "logs", "data_dir": "data"}
    train(tiny_run(odd_place, max_steps=4, **given), ALONE)
    train(load_config(resume=str(odd_place / "logs/train"), max_steps=6), ALONE)
    straight, odd = tiny_config(run_name="straight"), tiny_run(odd_place)
    train(straight, ALONE)
    assert log(odd) == log(straight)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (newest(odd) / name).read_bytes() == (newest(straight) / name).read_bytes()
    again = load_config(str(odd_place / "logs/train/config.yaml"), run_name="again", max_steps=1)
    assert Path(again.data_dir).resolve() == odd_place / "data"
    train(again.model_copy(update={"init_from": "train"}), ALONE)
    assert load_model("again", str(odd_place / "logs")).config.n_layer == 2
    assert train(tiny_run(odd_place, resume="auto", **given), ALONE) == {"steps": 6}


def test_paths_that_the_locale_cannot_write_neither_stop_a_run_nor_its_output(odd_place):
    options = flags(tiny_run(odd_place, max_steps=1, log_dir="logs/é", data_dir="data"))
    where = {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii:strict",
    }
    done = run_from_nothing("train.py", *options, cwd=odd_place, **where)
    assert done.returncode == 0, done.stderr
    assert "saved logs/??/train/checkpoints/step_000001" in done.stdout
    assert load_model("train", str(odd_place / "logs/é")).config.n_layer == 2
    config = odd_place / "logs/é/train/config.yaml"
    shown = run_from_nothing(
        "train.py", "--config", config, "--print_config", cwd=odd_place, **where
    )
    assert shown.returncode == 0, shown.stderr
    assert "log_dir: " in shown.stdout


def test_yaml_may_escape_the_bytes_of_a_path_and_nothing_else_that_is_no_text(tmp_path):
    (tmp_path / "f.yaml").write_text(r'data_dir: "caf\udce9"')
    assert os.fsencode(load_config(str(tmp_path / "f.yaml")).data_dir) == b"caf\xe9"
    for escape in (r"\ud83d", r"\udc7f", r"\udd00", r"\udfff"):
        (tmp_path / "f.yaml").write_text(f'data_dir: "caf{escape}"')
        with pytest.raises(ConfigError, match="half a character"):
            load_config(str(tmp_path / "f.yaml"))


# ---- several runs at once


def _start_together(folder, barrier, outcomes, rounds):
    """Begin a run of that name in each round, at the same moment as others; tell how it went."""
    for number in range(rounds):
        one = RunFolder(folder)
        barrier.wait(60)
        try:
            one.create()
            (folder / "mine").write_text(str(os.getpid()))
            barrier.wait(60)
            outcomes.put((number, "began", (folder / "mine").read_text() == str(os.getpid())))
        except UserError as error:
            barrier.wait(60)
            outcomes.put((number, str(error), None))
        except BaseException as error:
            outcomes.put((number, repr(error), None))
            barrier.abort()
            raise
        barrier.wait(60)
        one.close()


def test_of_runs_that_start_at_the_same_moment_one_begins_and_the_others_are_told(tmp_path):
    context, folder, rounds = fork_server(), tmp_path / "logs/train", 8
    (folder / "checkpoints").mkdir(parents=True)
    barrier, outcomes = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_start_together, args=(folder, barrier, outcomes, rounds))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    told = sorted(outcomes.get(timeout=60) for _ in range(3 * rounds))
    for process in processes:
        process.join(60)
    busy = (
        f"{folder}: another process is writing this run; wait for it or choose another --run_name"
    )
    assert told == sorted(
        outcome
        for number in range(rounds)
        for outcome in ((number, "began", True), (number, busy, None), (number, busy, None))
    )
    assert sorted(
        path.name for path in folder.parent.iterdir() if not path.name.startswith(".")
    ) == ["train", *(f"train.{n}" for n in range(1, rounds + 1))]


def test_a_run_that_hangs_while_it_begins_is_waited_for_a_while_only(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.runlog, "START_PATIENCE", 0.1)
    lock = tmp_path / "logs/.begin.lock"
    with (
        filelock.FileLock(lock),
        pytest.raises(
            UserError, match=r"logs: another process has been about to begin .* for 0.1 s"
        ),
    ):
        RunFolder(tmp_path / "logs/b").create()
    assert [path.name for path in lock.parent.iterdir()] == [lock.name]
    RunFolder(tmp_path / "logs/b").create()
    assert [path.name for path in lock.parent.iterdir()] == ["b"]


def test_a_run_that_was_moved_aside_before_it_is_taken_up_is_left_alone(tiny_config):
    train(tiny_config(), ALONE)
    resumed, config, _ = checkpoint.find_checkpoint(tiny_config(resume="auto", max_steps=9), ALONE)
    run_folder = RunFolder(folder_of(config))
    newer = RunFolder(folder_of(config))
    newer.create()
    newer.close()
    with pytest.raises(
        UserError, match=r"step_000006: is gone: the run was moved aside or deleted at this moment"
    ):
        checkpoint.open_run(run_folder, config, resumed, ALONE)
    assert not (folder_of(config) / "config.yaml").exists()


# ---- a full disk


@pytest.fixture
def disk(monkeypatch):
    """Makes a disk that is full once a run's checkpoints would take more than so many times what
    the first one takes.
    """

    def make(config, checkpoints):
        real, place, sizes = weights.save_file, folder_of(config) / "checkpoints", {}

        def save_file(tensors, path, **options):
            used = sum(file.stat().st_size for file in place.rglob("*.safetensors"))
            size = sum(tensor.nbytes for tensor in tensors.values())
            sizes.setdefault(path.name, size)
            if (
                used + size > checkpoints * sizes["model.safetensors"] * 3.1
            ):  # AdamW's state is twice the weights
                raise OSError(28, "No space left on device")
            real(tensors, path, **options)

        class InTurn(checkpoint.ThreadPoolExecutor):
            def __init__(self):
                super().__init__(max_workers=1)

        monkeypatch.setattr(checkpoint, "ThreadPoolExecutor", InTurn)
        monkeypatch.setattr(weights, "save_file", save_file)

    return make


def test_a_save_first_deletes_what_keep_last_does_not_keep(tiny_config, disk):
    config = tiny_config(checkpoint_every=1, keep_last=3)
    disk(config, 3)
    train(config, ALONE)
    assert checkpoints(config) == ["step_000004", "step_000005", "step_000006"]


def test_a_lower_keep_last_makes_room_on_a_full_disk(tiny_config, disk):
    options = {"checkpoint_every": 2, "max_steps": 8}
    config = tiny_config(**options, keep_last=9)
    disk(config, 3)
    with pytest.raises(
        NotSavedError,
        match=r"step_000008: cannot be written: .*No space left on device; once it can be, "
        r"--resume .*/train goes on from step_000006",
    ) as caught:
        train(config, ALONE)
    assert caught.value.status == 1
    assert checkpoints(config) == ["step_000002", "step_000004", "step_000006"]
    assert (
        train(tiny_config(**options, keep_last=1, resume="auto"), ALONE)["resumed_after_step"] == 6
    )
    assert checkpoints(config) == ["step_000008"]


def test_a_resume_makes_room_before_it_writes_anything(tiny_config, monkeypatch):
    config = tiny_config(checkpoint_every=2)
    train(config, ALONE)
    (folder_of(config) / "checkpoints/step_000006.1.tmp").mkdir()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runtime.runlog, "write_rows", full)
    with pytest.raises(OSError, match="No space left"):
        train(tiny_config(resume="auto", max_steps=9, keep_last=1), ALONE)
    assert checkpoints(config) == ["step_000006"]


def test_the_newest_whole_checkpoint_is_never_deleted_for_room(tiny_config, disk):
    config = tiny_config(checkpoint_every=2)
    train(config, ALONE)
    for step in (4, 6):
        (folder_of(config) / f"checkpoints/step_{step:06d}/model.safetensors").write_bytes(b"")
    disk(config, 0)
    with pytest.raises(NotSavedError):
        train(tiny_config(resume="auto", checkpoint_every=5, max_steps=9, keep_last=1), ALONE)
    (whole, saved), _ = newest_whole_checkpoint(folder_of(config))
    assert (whole.name, saved.step) == ("step_000002", 2)


def test_a_run_that_is_over_deletes_no_checkpoints_when_it_is_finished_again(tiny_config):
    config = tiny_config(checkpoint_every=2)
    train(config, ALONE)
    (folder_of(config) / "summary.json").unlink()
    train(tiny_config(resume="auto", keep_last=1), ALONE)
    assert checkpoints(config) == ["step_000002", "step_000004", "step_000006"]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_run_that_cannot_write_its_first_files_leaves_all_as_it_was(
    earlier, tiny_config, tmp_path
):
    config = tiny_config(max_steps=1)
    if earlier:
        train(config, ALONE)
    before = {path: path.read_bytes() for path in tmp_path.glob("logs/**/*") if path.is_file()}
    done = run("train.py", *flags(config), cwd=tmp_path, before=_full_after_500_bytes)
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: .*/logs/train/console.log: cannot be written: File too large\n", done.stderr
    )
    after = {path: path.read_bytes() for path in tmp_path.glob("logs/**/*") if path.is_file()}
    assert after == before
    assert [path.name for path in tmp_path.glob("logs/*")] == ["train"] * earlier


def test_a_file_that_cannot_be_written_leaves_nothing_unfinished(tmp_path):
    (tmp_path / "log.csv").mkdir()
    with pytest.raises(OSError, match="cannot be written"):
        write_whole(tmp_path / "log.csv", "step\n")
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def _full_after_500_bytes():
    limit_file_size(500)


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_a_checkpoints_files_follow_the_umask(umask, tiny_config):
    before = os.umask(umask)
    try:
        train(tiny_config(max_steps=1), ALONE)
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in newest(tiny_config()).iterdir()
    }
    assert modes == dict.fromkeys(
        ["model.safetensors", "optimizer.safetensors", "checkpoint.json", "SHA256SUMS"],
        0o666 & ~umask,
    )


# ---- options that only the checkpoint can judge


@pytest.fixture
def steep(tiny_config):
    """A run whose options are far from the defaults."""
    config = tiny_config(
        lr=1e-2,
        n_head=4,
        n_embd=20,
        block_size=2048,
        seq_len=48,
        batch_size=1,
        total_batch_tokens=96,
        max_steps=2,
    )
    train(config, ALONE)
    return config


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
def test_options_of_a_resumed_run_are_judged_with_the_runs_own(flag, steep):
    config = parse(Config, ["--resume", str(folder_of(steep)), "--max_steps", "3", *flag.split()])
    assert train(config, ALONE)["steps"] == 3


def test_options_that_exclude_the_runs_own_are_told_with_its_values(steep):
    config = parse(
        Config,
        [
            "--resume",
            str(folder_of(steep)),
            "--min_lr",
            "0.1",
            "--fp16",
            "--bf16",
            "--max_steps",
            "3",
        ],
    )
    with pytest.raises(ConfigError) as caught:
        train(config, ALONE)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    for line, message in zip(
        lines, ("bf16 and fp16 exclude each other", "min_lr 0.1 is above lr 0.01"), strict=True
    ):
        assert str(newest(steep)) in line
        assert message in line


def test_where_auto_finds_nothing_options_are_judged_as_a_new_runs(tiny_config):
    argv = [*flags(tiny_config()), "--min_lr", "1e-3", "--n_head", "5"]
    with pytest.raises(ConfigError) as fresh:
        parse(Config, argv)
    with pytest.raises(ConfigError) as auto:
        train(parse(Config, [*argv, "--resume", "auto"]), ALONE)
    assert str(auto.value) == str(fresh.value)
    assert "--min_lr: min_lr 0.001 is above lr 0.0003" in str(fresh.value)
    assert not Path(tiny_config().log_dir).exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--n_layer 0", "--n_layer: input should be greater than or equal to 1"),
        ("--n_layr 2", "--n_layr: unknown option"),
        ("--run_name a/b", "--run_name: run_name 'a/b' is not a plain folder name"),
        ("--norm batch", "--norm: "),
    ],
)
def test_a_resume_is_told_wrong_values_and_names_at_once(argv, message):
    with pytest.raises(ConfigError) as caught:
        parse(Config, ["--resume", "auto", *argv.split()])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("processes", "batch_size", "message"),
    [
        (
            3,
            4,
            "no batch_size fits: the 4 sequences of a step divide among 1, 2 or 4 processes, not 3",
        ),
        (
            8,
            4,
            "no batch_size fits: the 4 sequences of a step divide among 1, 2 or 4 processes, not 8",
        ),
        (2, 4, "a batch_size that fits is 1 or 2"),
        (1, 3, "a batch_size that fits is 1, 2 or 4"),
        (4, 4, "a batch_size that fits is 1"),
    ],
)
@pytest.mark.parametrize("total", [None, 128])
def test_a_step_that_processes_cannot_share_says_what_can(
    processes, batch_size, message, total, tiny_config
):
    train(tiny_config(max_steps=1, total_batch_tokens=total), ALONE)
    folder = newest(tiny_config())
    with pytest.raises(ConfigError) as caught:
        resumed_config(
            load_config(max_steps=9, batch_size=batch_size, resume="auto"),
            folder,
            read_state(folder),
            processes,
        )
    assert str(caught.value) == (
        f"batch_size {batch_size} on {processes} processes takes {batch_size * processes * 32} "
        f"tokens at "
        f"once, and a step of {folder} takes 128, no multiple of it; {message}"
    )


@pytest.mark.parametrize(
    "given", [["--resume", ""], ["--resume="], ["--resume", "", "--run_name", ""]]
)
def test_an_empty_resume_is_a_mistake_and_no_new_run(given, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_command_line(Config, given)
    assert stopped.value.code == 2
    message = "error: --resume: string should have at least 1 character"
    assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--resume: string should have at least 1 character"):
        load_config(resume="")


def test_another_run_name_than_the_resumed_runs_says_what_to_do(tiny_config, tmp_path):
    train(tiny_config(), ALONE)
    run_folder = folder_of(tiny_config())
    for resume in (run_folder, run_folder / "checkpoints", newest(tiny_config())):
        with pytest.raises(
            ConfigError,
            match=rf"--run_name: run_name other is not the run that resume {resume} goes on with; "
            rf"leave run_name out, or .*: --init_from {resume} in place of --resume",
        ):
            load_config(resume=str(resume), run_name="other")
        assert load_config(resume=str(resume), run_name="train").resume == str(resume)
    (tmp_path / "any.yaml").write_text("max_steps: 7")  # its own name is not given
    assert (
        train(load_config(str(tmp_path / "any.yaml"), resume=str(run_folder)), ALONE)["steps"] == 7
    )
    run_folder.rename(run_folder.with_name("train.1"))
    aside = run_folder.with_name("train.1")  # whose config.yaml has the name from before
    assert (
        train(load_config(str(aside / "config.yaml"), resume=str(aside), max_steps=8), ALONE)[
            "steps"
        ]
        == 8
    )
    assert load_config(str(aside / "config.yaml")).run_name == "train.1"


# ---- what a resumed run says of itself


def test_a_resumed_runs_time_stands_beside_the_steps_it_is_of(tiny_config, capsys):
    assert train(tiny_config(max_steps=4), ALONE)["steps_this_call"] == 4
    assert re.search(
        r"^done: 4 steps, 512 tokens in 0:00:\d\d; loss ", capsys.readouterr().out, re.MULTILINE
    )
    summary = train(tiny_config(max_steps=6, resume="auto"), ALONE)
    assert (summary["steps"], summary["steps_this_call"]) == (6, 2)
    assert summary_of(tiny_config())["steps_this_call"] == 2
    assert re.search(
        r"^done: 6 steps, 768 tokens, 2 of these steps in this call, in 0:00:\d\d; loss ",
        capsys.readouterr().out,
        re.MULTILINE,
    )


@pytest.mark.parametrize("harm", ["gone", "empty", "header"])
def test_a_finished_run_without_its_log_and_summary_is_summed_up_without_times(
    harm, tiny_config, capsys
):
    config = tiny_config(eval_every=6, val_fraction=0.1)
    before = train(config, ALONE)
    path = folder_of(config) / "log.csv"
    header = path.read_text().splitlines(keepends=True)[0]
    (folder_of(config) / "summary.json").unlink()
    path.unlink()
    if harm != "gone":
        path.write_text("" if harm == "empty" else header)
    capsys.readouterr()
    summary = train(tiny_config(resume="auto", eval_every=6, val_fraction=0.1), ALONE)
    assert (summary["steps"], summary["tokens"], summary["val_loss"]) == (
        6,
        768,
        before["val_loss"],
    )
    unknown = ("median_dt_ms", "median_tokens_per_sec", "first_step_s", "utilization", "final_loss")
    assert [summary[name] for name in unknown] == [None] * 5
    assert summary_of(config) == summary
    output = capsys.readouterr().out
    assert f"note: {path}: has no rows of steps 1 to 6: it begins after them" in output
    assert "how long a step took is not known" in output
    assert path.read_text() == header


@pytest.mark.parametrize(
    ("harm", "note"),
    [
        (lambda lines: [*lines[:3], "3,x,0,1,2,3\n", *lines[4:]], "line 4 is damaged and left out"),
        (
            lambda lines: [*lines[:3], "\0\0\0\0\n", "4,4.\n", *lines[5:]],
            "lines 4, 5 are damaged and left out",
        ),
        (lambda lines: [*lines[:-1], "6,4.8"], "line 7 is damaged and left out"),
        (lambda lines: [*lines, f"{'9' * 5000},1,1,1,1,1\n"], "line 8 is damaged and left out"),
        (
            lambda lines: [
                "\ufeff" + lines[0],
                *(line.replace("\n", "\r\n") for line in lines[1:]),
            ],
            None,
        ),
        (lambda lines: [*lines, "7,4.8"], None),
        (lambda lines: [*lines, "7,4.8\n", "8,4."], None),
        (lambda lines: [*lines, "7"], None),
    ],
)
def test_a_damaged_row_of_a_step_that_is_not_taken_again_is_told(harm, note, tiny_config, capsys):
    config = tiny_config()
    train(config, ALONE)
    path = folder_of(config) / "log.csv"
    path.write_text("".join(harm(path.read_text().splitlines(keepends=True))))
    capsys.readouterr()
    train(tiny_config(resume="auto", max_steps=8), ALONE)
    output = capsys.readouterr().out
    assert output.count("left out\n") == (note is not None)
    assert note is None or f"note: {path}: {note}\n" in output


# ---- links and places


@pytest.fixture
def linked(tiny_config, tmp_path):
    """A run of 4 steps whose checkpoints/ is a link to another disk, so to say."""
    config = tiny_config(max_steps=4)
    train(config, ALONE)
    (tmp_path / "disk").mkdir()
    (folder_of(config) / "checkpoints").rename(tmp_path / "disk/of_train")
    (folder_of(config) / "checkpoints").symlink_to(tmp_path / "disk/of_train")
    return config


WAYS = [
    "{run}",
    "{run}/",
    "{run}/checkpoints",
    "{run}/checkpoints/",
    "{run}/checkpoints/step_000004",
    "{run}/checkpoints/step_000004/",
    "train",
    "train/checkpoints",
    "train/checkpoints/step_000004",
]


@pytest.mark.parametrize("way", [*WAYS, "auto"])
def test_a_run_is_resumed_through_linked_checkpoints_however_it_is_named(way, linked, tiny_config):
    resume = way.format(run=folder_of(linked))
    given = (
        tiny_config(max_steps=6, resume="auto")
        if way == "auto"
        else load_config(resume=resume, log_dir=linked.log_dir, max_steps=6)
    )
    assert train(given, ALONE)["resumed_after_step"] == 4
    straight = tiny_config(run_name="straight")
    train(straight, ALONE)
    same_end(linked, straight)
    assert (folder_of(linked) / "checkpoints").is_symlink()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("link", [True, False])
def test_weights_are_found_however_a_run_or_its_checkpoints_are_named(way, link, linked):
    if not link:
        (folder_of(linked) / "checkpoints").unlink()
        shutil.move(
            Path(linked.log_dir).parent / "disk/of_train", folder_of(linked) / "checkpoints"
        )
    config, _ = build_model(
        load_config(init_from=way.format(run=folder_of(linked)), log_dir=linked.log_dir, seq_len=32)
    )
    assert (config.n_layer, config.run_name) == (TINY["n_layer"], "train")
    assert Path(config.init_from).name == "step_000004"


@pytest.mark.parametrize(
    ("where", "resume"),
    [
        ("", "."),
        ("", "checkpoints"),
        ("checkpoints", "."),
        ("checkpoints", "step_000004"),
        ("checkpoints", ".."),
        ("checkpoints/step_000004", "."),
    ],
)
def test_a_run_is_resumed_from_within_its_folder(where, resume, tiny_config, monkeypatch):
    train(tiny_config(max_steps=4), ALONE)
    monkeypatch.chdir(folder_of(tiny_config()) / where)
    assert train(load_config(resume=resume, max_steps=6), ALONE)["resumed_after_step"] == 4
    assert len(log(tiny_config())) == 6


@pytest.mark.parametrize("place", ["disk/of_train", "disk/of_train/step_000004"])
def test_checkpoints_that_are_in_no_runs_folder_say_so(place, linked, tmp_path):
    with pytest.raises(
        UserError,
        match=r"is not in a run's folder, .*; give <run>, or <run>/checkpoints/step_\*, or .*init_from",
    ):
        train(load_config(resume=str(tmp_path / place), max_steps=6), ALONE)


@pytest.mark.parametrize("there", ["link", "file", "loop"])
def test_checkpoints_that_cannot_be_seen_now_are_not_taken_for_none(there, tiny_config, tmp_path):
    config = tiny_config()
    train(config, ALONE)
    place = folder_of(config) / "checkpoints"
    place.rename(tmp_path / "away")
    place.symlink_to(
        {"link": tmp_path / "disk", "loop": place}[there]
    ) if there != "file" else place.write_text("")
    for resume in ("auto", str(folder_of(config))):
        with pytest.raises(OSError, match="cannot be read") as caught:
            train(tiny_config(resume=resume, max_steps=8), ALONE)
        assert caught.value.filename == str(place)
    with pytest.raises(OSError, match="cannot be read"):
        load_model("train", config.log_dir)
    place.unlink()
    (tmp_path / "away").rename(place)
    assert train(tiny_config(resume="auto", max_steps=8), ALONE)["resumed_after_step"] == 6


def test_a_run_without_a_whole_checkpoint_says_what_is_wrong_with_each(tiny_config):
    train(tiny_config(checkpoint_every=3), ALONE)
    for path in (folder_of(tiny_config()) / "checkpoints").iterdir():
        (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        train(load_config(resume=str(folder_of(tiny_config())), max_steps=9), ALONE)
    first, *others = str(caught.value).splitlines()
    assert "has no whole checkpoint" in first
    assert [line.partition("step_")[2][:6] for line in others] == ["000006", "000003"]


@pytest.mark.parametrize("target", ["there", "gone"])
def test_of_a_linked_checkpoint_only_the_link_is_deleted(target, tiny_config, tmp_path):
    config = tiny_config(checkpoint_every=2, max_steps=4, keep_last=2)
    train(config, ALONE)
    link, elsewhere = folder_of(config) / "checkpoints/step_000002", tmp_path / "elsewhere"
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    whole = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    if target == "gone":
        elsewhere.rename(tmp_path / "moved")
    train(tiny_config(checkpoint_every=2, max_steps=6, keep_last=2, resume="auto"), ALONE)
    assert checkpoints(config) == ["step_000004", "step_000006"]
    kept = elsewhere if target == "there" else tmp_path / "moved"
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == whole


@pytest.mark.parametrize("target", ["there", "gone"])
def test_a_linked_checkpoint_whose_step_is_taken_again_is_replaced_and_what_it_leads_to_is_not(
    target, tiny_config, tmp_path
):
    config = tiny_config(checkpoint_every=2)
    train(config, ALONE)
    link, elsewhere = folder_of(config) / "checkpoints/step_000006", tmp_path / "elsewhere"
    link.rename(elsewhere)
    link.symlink_to(elsewhere if target == "there" else tmp_path / "nowhere")
    (elsewhere / "model.safetensors").write_bytes(b"damaged")
    train(tiny_config(checkpoint_every=2, resume="auto"), ALONE)
    assert not link.is_symlink()
    assert read_state(link).step == 6
    assert (elsewhere / "model.safetensors").read_bytes() == b"damaged"
    assert checkpoints(config) == ["step_000002", "step_000004", "step_000006"]


def test_a_stop_while_a_run_begins_leaves_no_folder(tiny_config, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "write_config", stop)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(), ALONE)
    assert not Path(tiny_config().log_dir).exists()


@pytest.mark.parametrize("call", ["rename", "mkdir"])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_signal_as_a_folder_has_just_been_moved_or_made_leaves_all_as_it_was(
    earlier, call, tiny_config, monkeypatch
):
    config = tiny_config(max_steps=1)
    if earlier:
        train(config, ALONE)
    real = getattr(Path, call)

    def then_stop(path, *args, **kwargs):
        real(path, *args, **kwargs)
        if path == folder_of(config):
            raise Stopped(0)

    with (
        monkeypatch.context() as patched,
        pytest.raises(Stopped) if earlier or call == "mkdir" else contextlib.nullcontext(),
    ):
        patched.setattr(Path, call, then_stop)
        train(config, ALONE)
    if earlier:
        assert [path.name for path in folder_of(config).parent.iterdir()] == ["train"]
        assert read_state(newest(config)).step == 1
    else:
        assert folder_of(config).exists() == (call == "rename")


@pytest.mark.parametrize(("name", "option"), [("logs", "log_dir"), ("logs/train", "run_name")])
@pytest.mark.parametrize("what", ["file", "link"])
def test_what_is_no_folder_in_the_place_of_one_is_named_with_the_option(
    what, name, option, tiny_config, tmp_path
):
    place = tmp_path / name
    place.parent.mkdir(exist_ok=True)
    place.write_text("mine") if what == "file" else place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        UserError,
        match=rf"{name}: is there and is no folder; move it away or choose another --{option}",
    ):
        train(tiny_config(), ALONE)
    assert place.is_symlink() or place.read_text() == "mine"
    assert not (tmp_path / "logs/.begin.lock").exists()


def test_a_link_that_leads_nowhere_is_no_free_name(tiny_config, tmp_path):
    train(tiny_config(max_steps=1), ALONE)
    (tmp_path / "logs/train.1").symlink_to(tmp_path / "nowhere")
    train(tiny_config(max_steps=1), ALONE)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "train",
        "train.1",
        "train.2",
    ]
    assert (tmp_path / "logs/train.1").is_symlink()


def test_a_run_that_cannot_be_moved_aside_is_left_as_it_is(tiny_config, tmp_path):
    config = tiny_config(max_steps=1, run_name="r" * 255)
    train(config, ALONE)
    with pytest.raises(
        OSError, match="cannot be moved aside: File name too long; choose another --run_name"
    ):
        train(config, ALONE)
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["r" * 255]
    assert read_state(newest(config)).step == 1


@pytest.mark.parametrize("name", ["log.csv", "console.log"])
def test_a_resume_that_cannot_begin_leaves_all_as_it_was_and_gives_no_advice_that_was_followed(
    name, tiny_config
):
    train(tiny_config(), ALONE)
    (folder_of(tiny_config()) / name).unlink()
    (folder_of(tiny_config()) / name).mkdir()
    before = {
        path: path.is_file() and path.read_bytes() for path in folder_of(tiny_config()).rglob("*")
    }
    with pytest.raises((OSError, UserError), match=r"Is a directory") as caught:
        train(tiny_config(resume="auto", max_steps=8), ALONE)
    assert not hasattr(caught.value, "__notes__")
    assert {
        path: path.is_file() and path.read_bytes() for path in folder_of(tiny_config()).rglob("*")
    } == before


def test_a_file_that_cannot_be_put_in_its_place_leaves_no_other(tmp_path):
    (tmp_path / "log.csv").mkdir()
    with pytest.raises(OSError, match="cannot be written"):
        write_whole(tmp_path / "log.csv", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.parametrize("what", ["flush_to_disk", "delete"])
def test_a_log_that_cannot_be_flushed_or_a_checkpoint_that_cannot_be_deleted_hinders_no_save(
    what, tiny_config, monkeypatch
):
    config, real = tiny_config(checkpoint_every=2, keep_last=1), getattr(checkpoint, what)

    def fail(paths):
        paths = [*paths] if what == "delete" else paths
        if paths == folder_of(config) / "log.csv" or (
            what == "delete" and folder_of(config) / "checkpoints/step_000002" in paths
        ):
            raise OSError(errno.EPERM, "Operation not permitted", "it")
        real(paths)

    monkeypatch.setattr(checkpoint, what, fail)
    with (
        contextlib.nullcontext()
        if what == "flush_to_disk"
        else pytest.raises(NotSavedError, match="not permitted")
    ):
        train(config, ALONE)
    assert checkpoints(config) == (
        ["step_000006"] if what == "flush_to_disk" else ["step_000002", "step_000004"]
    )


def test_a_state_is_plain_ascii_json(tiny_config):
    train(tiny_config(sample_prompt="naïve"), ALONE)
    text = (newest(tiny_config()) / "checkpoint.json").read_bytes().decode("ascii")
    assert json.loads(text)["config"]["sample_prompt"] == "naïve"
    assert read_state(newest(tiny_config())).random[0].torch_cpu
    assert torch.is_tensor(load_model("train", tiny_config().log_dir).lm_head.weight)


def test_weights_are_read_from_the_next_checkpoint_where_a_run_deletes_the_newest_meanwhile(
    tiny_config, monkeypatch
):
    config = tiny_config(checkpoint_every=3)
    train(config, ALONE)
    first, second = sorted(Path(config.log_dir).glob("train/checkpoints/step_*"))
    monkeypatch.setattr(
        "weights.verify",
        lambda folder, files: shutil.rmtree(second, ignore_errors=True) or verify(folder, files),
    )
    ours = load_model("train", config.log_dir).state_dict()
    assert torch.equal(
        ours["lm_head.weight"], load_file(first / "model.safetensors")["lm_head.weight"]
    )


def test_weights_behind_a_link_that_leads_nowhere_are_told_and_not_looked_for_without_end(tmp_path):
    checkpoints = tmp_path / "run/checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step_000010").symlink_to(tmp_path / "a disk that is not there")
    with pytest.raises(CheckpointError, match="step_000010"):
        load_model("run", str(tmp_path))
