"""Going on with a run: the same numbers as without the interruption, whatever was switched on;
checkpoints that went bad.
"""

import contextlib
import csv
import functools
import hashlib
import itertools
import json
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

import train as train_module
import weights
from checkpoint import newest_whole_checkpoint, read_state
from config import load_config
from data.token_file import TokenFileError, write_corpus
from model import GPT
from runtime.cli import ConfigError
from runtime.errors import TrainingError, UserError
from runtime.signals import StopRequest
from tests import soak
from tests.conftest import (
    ALONE,
    COMPILED,
    ROOT,
    TINY,
    TORCHRUN,
    at_step,
    ended,
    fast_precision,
    flags,
    fork_server,
    forks,
    reseal,
    run,
    run_ranks,
    start,
    start_ranks,
    tokens_in,
    wait_for,
)
from train import train
from weights import CheckpointError, load_model

needs_proc = pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="finds workers in /proc"
)


def folder_of(config):
    return Path(config.log_dir) / config.run_name


def newest(config):
    return newest_whole_checkpoint(folder_of(config))[0][0]


def log(config):
    """Every column of the log but the times."""
    with open(folder_of(config) / "log.csv", newline="") as file:
        return [(row["step"], row["loss"], row["lr"], row["norm"]) for row in csv.DictReader(file)]


def evals(config):
    return (folder_of(config) / "eval.csv").read_text()


def same_end(ours, theirs):
    """Whether two runs ended with the same log and, bit for bit, the same weights and optimizer
    state.
    """
    assert log(ours) == log(theirs)
    for name in ("model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(newest(config) / name) for config in (ours, theirs))
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key], b[key]), (name, key)


@pytest.fixture
def stop_at(monkeypatch):
    """Makes the next run get SIGTERM during a step of its own count."""
    return lambda at: at_step(
        monkeypatch, lambda call, _: signal.raise_signal(signal.SIGTERM) if call == at else None
    )


@pytest.fixture
def threads():
    """Sets the number of PyTorch's threads for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ---- exact


RUNGS = ["baseline", *(f"speedup{i}" for i in range(1, 14))]
WAYS = {rung: {"config": rung} for rung in RUNGS} | {
    "dropout": {"dropout": 0.2},
    "muon": {"optimizer": "muon"},
    "shuffled over epochs": {"shuffle": True, "batch_size": 40},
    "accumulation": {"batch_size": 2, "total_batch_tokens": 256},
    "wsd": {"lr_schedule": "wsd", "warmup_steps": 2},
    "fp16": {"fp16": True},
    "one batch": {"overfit_batch": True},
    "evaluating": {"eval_every": 2, "val_fraction": 0.1},
    "sparse log": {"log_every": 4},
    "several threads": {
        "n_layer": 1,
        "n_embd": 128,
        "block_size": 256,
        "seq_len": 256,
        "batch_size": 2,
    },
    "compile": {
        "compile": True,
        "dropout": 0.1,
        "n_layer": 1,
        "n_embd": 128,
        "block_size": 256,
        "seq_len": 256,
    },
}
LARGE = ("several threads", "compile")  # enough for several threads to share the work


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(
    way, tiny_config, stop_at, corpus, threads
):
    options = dict(WAYS[way])
    threads(2 if way in LARGE else 1)
    if "config" in options:  # the rung itself, on a tiny model; compiling is tested once, below
        options = {
            "config": options["config"],
            "compile": way == "compile",
            **TINY,
            "seq_len": 32,
            "dataset": "tiny",
            "data_dir": str(corpus),
            "device": "cpu",
            **fast_precision(),
        }
        if options["config"] == "speedup13":
            options |= {"total_batch_tokens": 32 * load_config("speedup13").batch_size}

    def configure(name, **more):
        values = options | {"max_steps": 7, "run_name": name} | more
        if "config" in values:
            return load_config(values.pop("config"), **values, log_dir=tiny_config().log_dir)
        return tiny_config(**values)

    straight, twice = configure("straight"), configure("twice")
    train(straight, ALONE)
    for at in (3, 2):
        disarm = stop_at(at)
        summary = train(configure("twice", resume="auto"), ALONE)
        disarm()
        assert summary["interrupted"]
    summary = train(configure("twice", resume="auto"), ALONE)
    assert (summary["steps"], summary["resumed_after_step"], summary["interrupted"]) == (
        7,
        5,
        False,
    )
    same_end(twice, straight)
    if way == "evaluating":
        assert evals(twice) == evals(straight)
        assert json.loads((folder_of(twice) / "summary.json").read_text())["val_loss"] is not None


def test_the_fp16_loss_scale_and_its_count_of_good_steps_go_on(tiny_config, monkeypatch, stop_at):
    def train_with_another_scale_from_step_2(config):
        real, calls = torch.amp.GradScaler.scale, itertools.count(1)
        with monkeypatch.context() as patch:
            patch.setattr(
                torch.amp.GradScaler,
                "scale",
                lambda scaler, loss: (
                    scaler.update(2.0**15) if next(calls) == 2 else None,
                    real(scaler, loss),
                )[1],
            )
            train(config, ALONE)

    straight, twice = (
        tiny_config(run_name="straight", fp16=True),
        tiny_config(run_name="twice", fp16=True),
    )
    train_with_another_scale_from_step_2(straight)
    disarm = stop_at(4)
    train_with_another_scale_from_step_2(twice)
    disarm()
    train(tiny_config(run_name="twice", fp16=True, resume="auto"), ALONE)
    assert read_state(newest(twice)).scaler == read_state(newest(straight)).scaler
    assert read_state(newest(twice)).scaler["scale"] == 2.0**15
    same_end(twice, straight)


def test_a_resume_after_the_last_step_has_nothing_to_do(tiny_config, capsys):
    config = tiny_config()
    train(config, ALONE)
    before = {path: path.stat().st_mtime_ns for path in folder_of(config).rglob("*")}
    assert train(tiny_config(resume="auto"), ALONE) == {"steps": 6}
    assert "nothing to do: " in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder_of(config).rglob("*")} == before
    longer = train(tiny_config(resume="auto", max_steps=8), ALONE)
    assert (longer["steps"], len(log(config))) == (8, 8)


def test_steps_behind_the_checkpoint_are_logged_once(tiny_config):
    config = tiny_config(checkpoint_every=2, eval_every=2, val_fraction=0.1)
    train(config, ALONE)
    for name in ("step_000006", "best_000006"):
        shutil.rmtree(folder_of(config) / "checkpoints" / name)
    with open(folder_of(config) / "log.csv", "a") as file:
        file.write("7,3.1")  # torn by a kill
    before, evaluated = log(config)[:6], evals(config)
    train(tiny_config(checkpoint_every=2, eval_every=2, val_fraction=0.1, resume="auto"), ALONE)
    assert log(config) == before
    assert evals(config) == evaluated


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(tiny_config):
    options = {"checkpoint_every": 2, "eval_every": 2, "val_fraction": 0.1}
    config = tiny_config(**options)
    train(config, ALONE)
    evaluated = evals(config)
    shutil.rmtree(folder_of(config) / "checkpoints/step_000006")
    (folder_of(config) / "eval.csv").write_text(
        "\n".join(evaluated.splitlines()[:3]) + "\n"
    )  # steps 0 and 2
    shutil.rmtree(folder_of(config) / "checkpoints/best_000006")
    train(tiny_config(**options, resume="auto"), ALONE)
    assert evals(config) == evaluated
    assert (folder_of(config) / "checkpoints/best_000006").is_dir()


def working_in(folder):
    """The numbers of the processes that work in a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or it has ended meanwhile
            if (process / "cwd").readlink() == folder:
                yield int(process.name)


@needs_proc
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_processes_under_torchrun_go_on_exactly(ranks, tiny_config, tmp_path):
    """kill -9 of one worker: torchrun starts all again, and they go on from the newest checkpoint
    without being told to.
    """
    options = flags(
        tiny_config(dropout=0.1, max_steps=16, checkpoint_every=1, batch_size=2, shuffle=True)
    )
    for done in run_ranks(ranks, "train.py", *options, "--run_name", "straight", cwd=tmp_path):
        assert done.returncode == 0, done.stderr
    command = [
        *TORCHRUN,
        f"--nproc_per_node={ranks}",
        "--max_restarts=2",
        ROOT / "train.py",
        *options,
        "--run_name",
        "killed",
    ]
    with ended([start(*command, cwd=tmp_path, before=forks, OMP_NUM_THREADS="1")]) as (process,):
        wait_for(lambda: (tmp_path / "logs/killed/checkpoints/step_000002").exists(), process)
        workers = sorted(
            {*working_in(tmp_path)} - {process.pid}
        )  # forked, they are not torchrun's children
        assert len(workers) == ranks
        os.kill(workers[-1], signal.SIGKILL)
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, output + errors
    assert "going on from logs/killed/checkpoints/step_0000" in output.replace(
        str(tmp_path) + "/", ""
    )
    same_end(tiny_config(run_name="killed"), tiny_config(run_name="straight"))


def test_a_run_killed_at_random_moments_ends_like_an_undisturbed_one(capsys):
    fork_server()  # the tests' own, which has PyTorch at hand
    assert soak.main(soak.SoakOptions(kills=3, longest_life=1.0)) == 0, (
        capsys.readouterr()
    )  # at length: python tests/soak.py
    assert "0 run(s) ended with other weights" in capsys.readouterr().out


def test_two_processes_resume_with_evaluation_where_it_was_interrupted(tiny_config, tmp_path):
    """The evaluations of steps that are taken again are in the file when the processes start: all
    must forget them.
    """
    given = {
        "eval_every": 3,
        "val_fraction": 0.1,
        "checkpoint_every": 2,
        "max_steps": 8,
        "batch_size": 2,
        "keep_last": 9,
    }

    def train_on_two(**options):
        for done in run_ranks(2, "train.py", *flags(tiny_config(**given, **options)), cwd=tmp_path):
            assert done.returncode == 0, done.stderr

    train_on_two(run_name="straight")
    shutil.copytree(tmp_path / "logs/straight", tmp_path / "logs/cut")
    for step in (6, 8):
        shutil.rmtree(tmp_path / f"logs/cut/checkpoints/step_{step:06d}")
    for best in (tmp_path / "logs/cut/checkpoints").glob("best_*"):
        shutil.rmtree(best)
    train_on_two(run_name="cut", resume="auto")
    straight, cut = tiny_config(run_name="straight"), tiny_config(run_name="cut")
    same_end(cut, straight)
    assert evals(cut) == evals(straight)
    assert [path.name for path in (tmp_path / "logs/cut/checkpoints").glob("best_*")] == [
        "best_000008"
    ]


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_run_killed_after_its_last_step_is_finished_by_the_next_call(log_every, tiny_config):
    options = {"eval_every": 4, "val_fraction": 0.1, "log_every": log_every}
    config = tiny_config(**options)
    summary = train(config, ALONE)
    evaluated, logged = evals(config), log(config)
    (folder_of(config) / "summary.json").unlink()
    (folder_of(config) / "eval.csv").write_text(
        "\n".join(evaluated.splitlines()[:3]) + "\n6,"
    )  # torn
    shutil.rmtree(folder_of(config) / "checkpoints/best_000006")
    again = train(tiny_config(**options, resume="auto"), ALONE)
    assert evals(config) == evaluated
    assert (folder_of(config) / "checkpoints/best_000006").is_dir()
    assert log(config) == logged
    for name in ("steps", "tokens", "final_loss", "val_loss", "interrupted"):
        assert again[name] == summary[name], name
    assert json.loads((folder_of(config) / "summary.json").read_text())["steps"] == 6


def test_a_signal_in_the_last_step_does_not_leave_out_the_last_evaluation(tiny_config, stop_at):
    config = tiny_config(eval_every=4, val_fraction=0.1)
    stop_at(6)
    summary = train(config, ALONE)
    assert not summary["interrupted"]
    assert summary["val_loss"] is not None


def test_a_changed_log_every_keeps_the_rows_that_are_there(tiny_config, stop_at):
    config = tiny_config(max_steps=9)
    disarm = stop_at(5)
    train(config, ALONE)
    disarm()
    train(tiny_config(max_steps=9, log_every=3, resume="auto"), ALONE)
    assert [row[0] for row in log(config)] == ["1", "2", "3", "4", "6", "9"]


def test_a_checkpoint_from_before_the_first_update_can_be_resumed(tiny_config, monkeypatch):
    def poison_then_die(call, model):
        if call == 2:
            raise ZeroDivisionError
        return poisoned(model)

    disarm = at_step(monkeypatch, poison_then_die)
    with pytest.raises(ZeroDivisionError):
        train(tiny_config(skip_nonfinite=2, checkpoint_every=1), ALONE)
    disarm()
    summary = train(tiny_config(skip_nonfinite=2, resume="auto"), ALONE)
    assert (summary["resumed_after_step"], summary["skipped_steps"], summary["steps"]) == (1, 1, 6)


def test_a_number_of_processes_that_does_not_fit_says_what_to_change(tiny_config):
    train(tiny_config(), ALONE)
    config = tiny_config(max_steps=9, batch_size=3)
    with pytest.raises(
        ConfigError,
        match=r"batch_size 3 on 1 processes takes 96 tokens at once, and a step of .* takes 128",
    ):
        train(config.model_copy(update={"resume": "auto"}), ALONE)


def test_a_second_signal_acts_at_once():
    with StopRequest() as stop:
        stop.begin_steps()
        signal.raise_signal(signal.SIGINT)
        assert stop.received is not None
        stop.received -= 2  # later than torchrun's copy of the same Ctrl-C
        if hasattr(signal, "SIGXCPU"):  # comes every second, once the limit is reached
            signal.raise_signal(signal.SIGXCPU)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_to_one_of_several_processes_stops_and_saves_on_all(tiny_config, tmp_path):
    options = flags(tiny_config(max_steps=100_000, batch_size=2))
    with ended(start_ranks(2, "train.py", *options, cwd=tmp_path)) as processes:
        wait_for(
            lambda: (tmp_path / "logs/train/log.csv").exists() and log(tiny_config()), processes[0]
        )
        processes[-1].send_signal(signal.SIGUSR1)
        for process in processes:
            output = process.communicate(timeout=60)
            assert process.returncode == 0, output
    assert read_state(newest(tiny_config())).step == len(log(tiny_config()))


def test_another_number_of_processes_keeps_the_global_batches(tiny_config, tmp_path, stop_at):
    options = {"batch_size": 2, "total_batch_tokens": 256, "shuffle": True, "max_steps": 6}
    config = tiny_config(**options, run_name="straight")
    train(config, ALONE)
    disarm = stop_at(3)
    train(tiny_config(**options, run_name="wider"), ALONE)
    disarm()
    given = flags(
        tiny_config(batch_size=2, shuffle=True, max_steps=6, run_name="wider", resume="auto")
    )  # its total is kept
    for done in run_ranks(2, "train.py", *given, cwd=tmp_path):
        assert done.returncode == 0, done.stderr
    wider = tiny_config(run_name="wider")
    assert [row[0] for row in log(wider)] == [row[0] for row in log(config)]
    for ours, theirs in zip(log(wider), log(config), strict=True):
        assert float(ours[1]) == pytest.approx(float(theirs[1]), abs=1e-5)


# ---- options


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"n_layer": 3}, ["n_layer 3 contradicts", "which has 2"]),
        (
            {"vocab_size": 256, "seq_len": 16},
            ["vocab_size 256 contradicts", "seq_len 16 contradicts", "which has 32"],
        ),
        (
            {"shuffle": True, "seed": 5},
            ["shuffle True contradicts", "seed 5 contradicts", "which has 1337"],
        ),
        ({"optimizer": "muon"}, ["optimizer muon contradicts", "which has adamw"]),
        (
            {"total_batch_tokens": 256},
            ["total_batch_tokens 256 contradicts", "whose steps take 128"],
        ),
    ],
)
def test_options_that_contradict_the_checkpoint_name_both_values(options, messages, tiny_config):
    train(tiny_config(), ALONE)
    with pytest.raises(ConfigError) as caught:
        train(tiny_config(resume="auto", max_steps=9, **options), ALONE)
    for message in messages:
        assert message in str(caught.value)


def test_another_corpus_is_refused_naming_both(tiny_config, corpus):
    train(tiny_config(), ALONE)
    shutil.rmtree(corpus / "tiny")
    write_corpus(corpus / "tiny", [[token % 99 for token in range(4000)]])
    with pytest.raises(
        CheckpointError,
        match=r"another corpus than .*tiny: its fingerprint is 2:\w{10}, this one's 2:\w{10}",
    ):
        train(tiny_config(resume="auto", max_steps=9), ALONE)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_checkpoint_of_before_the_computed_order_is_gone_on_with_and_that_is_told_once(
    shuffle, tiny_config, corpus, capsys
):
    def resumed(steps):
        train(tiny_config(resume="auto", max_steps=steps), ALONE)
        return "shuffled otherwise" in capsys.readouterr().out

    def saved_with(fingerprint):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"corpus": fingerprint}))
        reseal(path.parent)

    train(tiny_config(shuffle=shuffle), ALONE)
    path, tokens = (
        newest(tiny_config()) / "checkpoint.json",
        tokens_in(next((corpus / "tiny").glob("*.bin"))),
    )
    saved_with("0" * 64)
    with pytest.raises(
        CheckpointError,
        match=r"another corpus than .*: its fingerprint is 0{12}, this one's [0-9a-f]{12};",
    ):
        resumed(8)
    saved_with(hashlib.sha256(f"0 {len(tokens)};".encode() + 16 * tokens.tobytes()).hexdigest())
    assert [resumed(8), resumed(9)] == [shuffle, False]


def test_options_that_may_change_are_said(tiny_config, capsys):
    train(tiny_config(), ALONE)
    train(tiny_config(resume="auto", max_steps=8, lr=1e-4, batch_size=2), ALONE)
    output = capsys.readouterr().out
    assert "note: changed since the checkpoint: " in output
    for change in (
        "lr 0.0003 -> 0.0001",
        "max_steps 6 -> 8",
        "batch_size 4 -> 2",
        "total_batch_tokens None -> 128",
    ):
        assert change in output
    assert log(tiny_config())[-1][2] == "0.0001"


def test_a_path_alone_is_enough(tiny_config, capsys):
    config = tiny_config(dropout=0.1, max_steps=4)
    train(config, ALONE)
    where = load_config(
        resume=str(folder_of(config)), max_steps=6
    )  # everything else is the checkpoint's
    assert train(where, ALONE)["steps"] == 6
    assert len(log(config)) == 6
    with pytest.raises(UserError, match="has later checkpoints, step_000006"):
        train(
            load_config(resume=str(folder_of(config) / "checkpoints/step_000004"), max_steps=9),
            ALONE,
        )
    for resume, message in (
        ("nowhere", "no such run or checkpoint"),
        (str(folder_of(config) / "log.csv"), "is a file"),
    ):
        with pytest.raises(UserError, match=message):
            train(load_config(resume=resume), ALONE)


def test_auto_begins_where_there_is_nothing_to_go_on_from(tiny_config):
    assert train(tiny_config(resume="auto"), ALONE)["resumed_after_step"] is None


def test_a_run_that_is_repeated_from_its_config_yaml_does_not_resume(tiny_config):
    config = tiny_config(resume="auto")
    train(config, ALONE)
    assert load_config(str(folder_of(config) / "config.yaml")).resume is None


# ---- which checkpoints are kept


def test_the_newest_checkpoints_and_the_best_are_kept(tiny_config, monkeypatch):
    losses = iter([9.0, 3.0, 1.0, 2.0, 5.0, 4.0, 6.0])
    monkeypatch.setattr(train_module, "validation_loss", lambda *_, **__: next(losses))
    config = tiny_config(checkpoint_every=1, keep_last=2, eval_every=1, val_fraction=0.1)
    train(config, ALONE)
    names = {path.name for path in (folder_of(config) / "checkpoints").iterdir()}
    assert names == {"step_000005", "step_000006", "best_000002"}
    assert read_state(folder_of(config) / "checkpoints/best_000002").step == 2
    assert read_state(newest(config)).best_val_loss == 1.0


def test_no_checkpoint_is_saved_where_none_are_kept(tiny_config):
    config = tiny_config(keep_last=0, eval_every=2, val_fraction=0.1)
    train(config, ALONE)
    assert not (folder_of(config) / "checkpoints").exists()


@pytest.mark.parametrize("speed", ["compile", "fp16"])
def test_a_checkpoint_holds_plain_names_and_all_state(speed, tiny_config):
    config = tiny_config(**(COMPILED | {"compile": speed == "compile", "fp16": speed == "fp16"}))
    train(config, ALONE)
    weights, state = load_file(newest(config) / "model.safetensors"), read_state(newest(config))
    assert not any(name.startswith(("module.", "_orig_mod.")) for name in weights)
    assert "lm_head.weight" not in weights  # it is transformer.wte.weight
    assert state.scaler == {} if speed == "compile" else state.scaler["scale"] == 65536.0
    assert (state.step, state.tokens, state.config["n_embd"], len(state.random)) == (
        6,
        6 * 128,
        32,
        1,
    )
    assert "transformer.wte.weight/exp_avg" in load_file(newest(config) / "optimizer.safetensors")
    for line in (newest(config) / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((newest(config) / name).read_bytes()).hexdigest() == digest


# ---- signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_a_signal_ends_the_run_with_status_0_and_how_to_go_on(name, tiny_config, tmp_path):
    options = flags(tiny_config(max_steps=100_000))
    with ended([start("train.py", *options, cwd=tmp_path)]) as (process,):
        wait_for(lambda: (tmp_path / "logs/train/log.csv").exists() and log(tiny_config()), process)
        process.send_signal(getattr(signal, name))
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, output + errors
    assert "to go on: the same command with --resume auto, or --resume " in output
    assert read_state(newest(tiny_config())).step == len(log(tiny_config()))


# ---- faults


def test_a_full_disk_while_saving_keeps_the_checkpoint_before(tiny_config, monkeypatch):
    config = tiny_config(checkpoint_every=2)
    real, calls = weights.save_file, iter(range(1, 100))

    def full(tensors, path, **options):
        if next(calls) == 4:  # the optimizer's file of the second checkpoint
            real(tensors, path, **options)
            os.truncate(path, 1000)
            raise OSError(28, "No space left on device")
        real(tensors, path, **options)

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(
        CheckpointError, match=r"step_000004: cannot be written: .*No space left on device"
    ):
        train(config, ALONE)
    assert [path.name for path in (folder_of(config) / "checkpoints").iterdir()] == ["step_000002"]
    monkeypatch.setattr(weights, "save_file", real)
    straight = tiny_config(run_name="straight")
    train(straight, ALONE)
    train(tiny_config(resume="auto"), ALONE)
    same_end(config, straight)


def limit_file_size(limit):
    """As a disk that is full once a file has this many bytes; what is printed is not kept, so it is
    not limited.
    """
    import resource

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@pytest.mark.parametrize("what", ["log", "checkpoint"])
def test_a_file_size_limit_ends_the_run_with_a_message(what, tiny_config, tmp_path):
    options = flags(tiny_config(max_steps=400, checkpoint_every=1 if what == "checkpoint" else 0))
    limit = 16_000 if what == "log" else 30_000
    done = run("train.py", *options, cwd=tmp_path, before=functools.partial(limit_file_size, limit))
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert (
        "console.log: cannot be written: File too large" if what == "log" else "cannot be written: "
    ) in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("name", ["log.csv", "eval.csv", "console.log"])
def test_a_disk_that_fills_up_in_the_middle_of_a_run_names_the_file(
    name, tiny_config, monkeypatch, capsys
):
    config = tiny_config(eval_every=3, val_fraction=0.1)

    def fill_up(call, _):
        if call == 3:
            path = folder_of(config) / name
            if name == "console.log":  # the file itself stays open during the run
                with open("/dev/full", "w") as full:
                    os.dup2(full.fileno(), descriptor_of(path))
            else:
                path.unlink()
                path.symlink_to("/dev/full")

    at_step(monkeypatch, fill_up)
    with pytest.raises(SystemExit) as stopped:
        train_module.main(config)
    assert stopped.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: {folder_of(config) / name}: cannot be written: No space left on device"
    )


def descriptor_of(path):
    """The number under which this process has a file open."""
    return next(
        int(link.name)
        for link in Path("/proc/self/fd").iterdir()
        if link.exists() and link.resolve() == path.resolve()
    )


def test_a_corpus_that_goes_bad_stops_the_run_and_it_goes_on_once_restored(
    tiny_config, corpus, monkeypatch
):
    config = tiny_config(checkpoint_every=2, max_steps=40)
    (path,) = (corpus / "tiny").glob("*.bin")
    good = path.read_bytes()
    disarm = at_step(
        monkeypatch, lambda call, _: path.write_bytes(good[:3000]) and None if call == 5 else None
    )
    with pytest.raises(TokenFileError, match="was changed or replaced while in use"):
        train(config, ALONE)
    assert read_state(newest(config)).step >= 4
    with pytest.raises(TokenFileError, match="damaged"):
        train(tiny_config(resume="auto", max_steps=40), ALONE)
    path.write_bytes(good)
    straight = tiny_config(run_name="straight", max_steps=40)
    disarm()
    train(straight, ALONE)
    train(tiny_config(resume="auto", max_steps=40), ALONE)
    same_end(config, straight)


def poisoned(model):
    """Harm the gradients, as a step does that went wrong; returns their norm."""
    for p in model.parameters():
        p.grad.fill_(float("nan"))
    return torch.tensor(float("nan"))


def poison(monkeypatch, *bad_calls):
    return at_step(monkeypatch, lambda call, model: poisoned(model) if call in bad_calls else None)


def test_a_non_finite_step_keeps_the_last_good_checkpoint_and_says_how_to_go_on(
    tiny_config, monkeypatch
):
    config = tiny_config(checkpoint_every=2)
    poison(monkeypatch, 5)
    with pytest.raises(
        TrainingError,
        match=r"step 5: .* norm nan.*--resume .*train --lr 0.00015 goes on from its last checkpoint",
    ):
        train(config, ALONE)
    assert read_state(newest(config)).step == 4


def test_weights_that_are_no_longer_finite_are_not_saved(tiny_config):
    """A finite gradient can still make an update that overflows."""
    config, calls = tiny_config(checkpoint_every=2), itertools.count(1)

    def overflow(optimizer, *_):
        if next(calls) == 4:
            optimizer.param_groups[0]["params"][0].data[0] = float("inf")

    hook = register_optimizer_step_post_hook(overflow)
    try:
        with pytest.raises(
            TrainingError,
            match=r"step 4: the weights are no longer finite and are not saved; .*Try a lower lr",
        ):
            train(config, ALONE)
    finally:
        hook.remove()
    assert read_state(newest(config)).step == 2


def test_non_finite_steps_are_skipped_as_often_as_asked_and_logged(
    tiny_config, monkeypatch, capsys
):
    config = tiny_config(skip_nonfinite=2, checkpoint_every=1)
    poison(monkeypatch, 2, 4)
    summary = train(config, ALONE)
    assert (summary["steps"], summary["skipped_steps"]) == (6, 2)
    assert [row[3] for row in log(config)].count("nan") == 2
    assert "left out, 2 of 2" in capsys.readouterr().out
    before, after = (
        load_file(folder_of(config) / f"checkpoints/step_{step:06d}/model.safetensors")
        for step in (4, 5)
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(tensor.isfinite().all() for tensor in after.values())
    poison(monkeypatch, 1, 2, 3)
    with pytest.raises(TrainingError, match="step 3: "):
        train(tiny_config(skip_nonfinite=2, run_name="more"), ALONE)


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_a_non_finite_step_touches_neither_weights_nor_optimizer(what, tiny_config, monkeypatch):
    if what == "norm":
        poison(monkeypatch, 3)
    else:  # whose gradients are finite
        real, calls = GPT.forward, itertools.count(1)
        monkeypatch.setattr(
            GPT, "forward", lambda *args: real(*args) + (float("inf") if next(calls) == 3 else 0.0)
        )
    config = tiny_config(skip_nonfinite=1, checkpoint_every=1, keep_last=9, max_steps=4)
    assert train(config, ALONE)["skipped_steps"] == 1
    for name in ("model.safetensors", "optimizer.safetensors"):
        before, skipped, after = (
            (folder_of(config) / f"checkpoints/step_{step:06d}" / name).read_bytes()
            for step in (2, 3, 4)
        )
        assert before == skipped != after


def test_skipping_costs_nothing_in_exactness(tiny_config):
    train(tiny_config(run_name="a"), ALONE)
    train(tiny_config(run_name="b", skip_nonfinite=3), ALONE)
    same_end(tiny_config(run_name="a"), tiny_config(run_name="b"))


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_rank_that_dies_or_hangs_ends_the_others_with_a_message(how, tiny_config, tmp_path):
    options = flags(tiny_config(max_steps=100_000, timeout=5))
    with ended(start_ranks(2, "train.py", *options, cwd=tmp_path)) as workers:
        wait_for(
            lambda: (tmp_path / "logs/train/log.csv").exists() and log(tiny_config()), workers[0]
        )
        workers[1].send_signal(signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        errors = workers[0].communicate(timeout=60)[1]
        assert workers[0].returncode == 1
        assert "another rank has died, or did not answer within --timeout 5 s" in errors
        assert "Traceback" not in errors


# ---- bad checkpoints


@pytest.fixture
def saved(tiny_config):
    """A config and its run's only checkpoint."""
    config = tiny_config(max_steps=2)
    train(config, ALONE)
    return config, newest(config)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "checkpoint.json", "SHA256SUMS"]
)
@pytest.mark.parametrize("harm", ["truncated", "flipped", "empty", "missing"])
def test_a_damaged_checkpoint_is_skipped_or_refused_in_one_line(
    name, harm, saved, tiny_config, capsys
):
    config, folder = saved
    whole = (folder / name).read_bytes()
    if harm == "missing":
        (folder / name).unlink()
    else:
        middle = len(whole) // 2
        (folder / name).write_bytes(
            {
                "truncated": whole[:-10],
                "empty": b"",
                "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            }[harm]
        )
    with pytest.raises(CheckpointError, match=r"damaged|missing") as caught:
        train(load_config(resume=str(folder), max_steps=9), ALONE)
    assert "\n" not in str(caught.value)
    if name != "optimizer.safetensors" and (name, harm) != (
        "SHA256SUMS",
        "flipped",
    ):  # the flipped line is the optimizer's
        with pytest.raises(CheckpointError, match=r"damaged|missing"):
            load_model("train", config.log_dir)
    assert (
        train(tiny_config(max_steps=3, resume="auto"), ALONE)["resumed_after_step"] is None
    )  # a fresh start
    output = capsys.readouterr().out
    assert "note: skipping a checkpoint: " in output
    assert "is now " in output  # the old folder is kept


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tiny_config, capsys):
    config = tiny_config(checkpoint_every=2)
    train(config, ALONE)
    straight = log(config)
    (newest(config) / "model.safetensors").write_bytes(b"")
    assert train(tiny_config(checkpoint_every=2, resume="auto"), ALONE)["resumed_after_step"] == 4
    assert "step_000006/model.safetensors: damaged" in capsys.readouterr().out
    assert log(config) == straight
    assert read_state(newest(config)).step == 6


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


def test_nothing_in_a_checkpoint_is_executed(saved, tmp_path, monkeypatch):
    _, folder = saved
    monkeypatch.chdir(tmp_path)
    for name in ("model.safetensors", "optimizer.safetensors", "checkpoint.json"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Bomb()))
        reseal(folder)
        with pytest.raises(CheckpointError, match="damaged"):
            train(load_config(resume=str(folder), max_steps=9), ALONE)
        (folder / name).write_bytes(whole)
    torch.save(Bomb(), tmp_path / "evil.pt")
    with pytest.raises(UserError, match="is a file, and a checkpoint is a folder"):
        train(load_config(resume=str(tmp_path / "evil.pt")), ALONE)
    assert not (tmp_path / "exploded").exists()


def edit(folder, change):
    state = json.loads((folder / "checkpoint.json").read_text())
    change(state)
    (folder / "checkpoint.json").write_text(json.dumps(state))
    reseal(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.clear(),
        lambda s: s.update(step="many"),
        lambda s: s.update(config=[]),
        lambda s: s.update(config={}),
        lambda s: s["config"].update(n_embd=64),
        lambda s: s["config"].update(n_head=5),
        lambda s: s["config"].update(batch_size="x"),
        lambda s: s["config"].update(norm="batchnorm"),
        lambda s: s["config"].update(optimizer="muon"),
        lambda s: s["random"][0].update(torch_cpu="AAAA"),
        lambda s: s["random"][0].update(numpy=["MT19937", [1], 0, 0, 0.0]),
        lambda s: s["random"][0].update(python=[3, [1, 2], None]),
        lambda s: s.update(tokens_per_step=100),
    ],
)
def test_a_foreign_or_inconsistent_state_is_one_clear_error(change, saved):
    _, folder = saved
    edit(folder, change)
    with pytest.raises((CheckpointError, UserError)) as caught:
        train(load_config(resume=str(folder), max_steps=9), ALONE)
    assert str(folder) in str(caught.value)


def test_a_checkpoint_from_before_loss_chunks_is_gone_on_with_in_parts_and_gives_a_model(
    saved, tiny_config
):
    config, folder = saved
    edit(folder, lambda state: state["config"].pop("loss_chunks"))
    assert load_model(str(folder)).config.loss_chunks == 1
    train(load_config(resume=str(folder), max_steps=9, loss_chunks=4), ALONE)
    assert read_state(newest(config)).config["loss_chunks"] == 4


def test_another_architectures_weights_are_refused(saved, tiny_config):
    _, folder = saved
    other = tiny_config(n_embd=64, run_name="other", max_steps=1)
    train(other, ALONE)
    for name in ("model.safetensors", "optimizer.safetensors"):
        whole = (folder / name).read_bytes()
        shutil.copy(newest(other) / name, folder / name)
        reseal(folder)
        with pytest.raises(CheckpointError, match="fit"):
            train(load_config(resume=str(folder), max_steps=9), ALONE)
        (folder / name).write_bytes(whole)


def test_a_hugging_face_folder_is_no_run_to_go_on_with(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no whole checkpoint"):
        train(load_config(resume=str(tmp_path / "hf")), ALONE)
