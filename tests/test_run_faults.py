"""Faults in the middle of a run, or before its first step: nothing is lost, and one line has the
command that resumes.
"""

import errno
import io
import itertools
import os
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import CppCompileError, InductorError, TritonMissing

import run.evaluation as run_evaluation
import run.log as run_log
import run.save as run_save
import runtime.signals
import train as train_module
from checkpoint.saved import read_state
from config import load_config
from data.token_file import TokenFileError
from runtime.errors import TrainingError, kind_of_failure
from runtime.launch import Launch
from runtime.signals import Stopped, StopRequest
from runtime.world import World
from tests.conftest import (
    ALONE,
    ROOT,
    WITH_TEXT,
    at_step,
    end_of,
    flags,
    folder_of,
    log,
    run,
)
from tests.test_resume import checkpoints, needs_dev_full, newest
from train import train


def inject(monkeypatch, module, name, error, when=lambda *args: True):
    """Let a function raise an error, or call `error` if it is no exception, at the first call for
    which `when(*args)` is true.
    """
    real, faults = getattr(module, name), [error]

    def faulty(*args, **kwargs):
        if faults and when(*args):
            fault = faults.pop()
            if isinstance(fault, BaseException):
                raise fault
            fault()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, faulty)


def failing(monkeypatch, at, error):
    """Fail in the middle of the step `at`, after its backward."""

    def fail(call, _):
        if call == at:
            raise error

    at_step(monkeypatch, fail)


def main(config):
    """train.py's main as the command runs it; returns the status that it ends with."""
    with pytest.raises(SystemExit) as stopped:
        train_module.main(config)
    return stopped.value.code


def to_go_on(folder):
    return f"to resume: the same command with --resume {folder}"


# ---- a fault in the middle of a run

EVALUATES = WITH_TEXT | {
    "batch_size": 1,
    "dropout": 0.2,
    "eval_every": 3,
    "eval_tokens": 64,
    "val_fraction": 0.1,
    "sample_every": 3,
    "sample_tokens": 2,
}


@pytest.mark.parametrize(
    ("module", "name", "error", "options"),
    [
        (None, "step", ValueError("failed"), {"batch_size": 2, "total_batch_tokens": 256}),
        (None, "step", TokenFileError("failed"), {"fp16": True, "dropout": 0.3}),
        (run_evaluation, "validation_loss", RuntimeError("failed"), EVALUATES),
        (run_log, "rewrite", OSError(errno.ENOSPC, "failed", "a file"), EVALUATES),
    ],
)
def test_a_fault_in_or_after_a_step_saves_what_is_whole_and_the_run_goes_on_exactly(
    module, name, error, options, go, here, monkeypatch
):
    straight = here.with_name("straight")
    with monkeypatch.context() as patched:
        if name == "step":
            failing(patched, 4, error)
        else:
            logged = (here / "log.csv").exists
            inject(patched, module, name, error, lambda *_: logged() and len(log(here)) == 3)
        with pytest.raises(type(error), match="failed"):
            go(**options)
    assert read_state(newest(here)).step == 3
    assert error.__notes__ == [to_go_on(here)]
    summary = go(**options, resume="auto")
    assert (summary["resumed_after_step"], summary["steps"]) == (3, 6)
    go(**options, run_name="straight")
    assert end_of(here) == end_of(straight)


def test_a_fault_in_the_middle_of_an_update_is_not_saved(go, here, monkeypatch):
    updates = itertools.count(1)
    inject(monkeypatch, torch.optim.AdamW, "step", MemoryError(), lambda *_: next(updates) == 5)
    with pytest.raises(MemoryError) as caught:
        go(checkpoint_every=2)
    assert checkpoints(here) == ["step_000002", "step_000004"]
    assert "--resume" in caught.value.__notes__[0]


def test_a_step_whose_figures_were_not_sent_is_not_saved_with_random_states_of_before(
    go, here, monkeypatch
):
    inject(monkeypatch, train_module, "pending_step", MemoryError(), lambda step, *_: step == 4)
    with pytest.raises(MemoryError):
        go(checkpoint_every=2)
    assert checkpoints(here) == ["step_000002"]


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (4, TrainingError("spoiled by training")),
        (4, KeyboardInterrupt("a user who stops at once")),
        (1, ValueError("nothing to save yet")),
    ],
    ids=str,
)
def test_what_should_not_or_cannot_be_saved_at_a_fault_is_not(step, error, go, here, monkeypatch):
    failing(monkeypatch, step, error)
    with pytest.raises(type(error)) as caught:
        go()
    assert not (here / "checkpoints").exists()
    assert not hasattr(caught.value, "__notes__")


def test_a_save_that_fails_as_well_does_not_hide_the_first_error(tiny_config, monkeypatch, capsys):
    failing(monkeypatch, 4, TokenFileError("a bad file"))
    inject(monkeypatch, run_save, "write_checkpoint", OSError("logs: no space left"))
    main(tiny_config())
    assert capsys.readouterr().err == (
        "error: a bad file; the state after step 3 could not be saved: logs: no space left\n"
    )


def test_the_error_line_says_how_to_resume_quoted_for_the_shell(tiny_config, monkeypatch, capsys):
    config = tiny_config(run_name="it's mine")
    failing(monkeypatch, 3, TokenFileError("a bad file"))
    main(config)
    (line,) = capsys.readouterr().err.splitlines()
    folder = str(folder_of(config))
    assert line == f"error: a bad file; {to_go_on(shlex.quote(folder))}"
    train(load_config(resume=folder), ALONE)
    assert capsys.readouterr().out.endswith(f"for text: python sample.py {shlex.quote(folder)}\n")


# ---- output that nobody reads


def stdout_is(unread):
    os.dup2(unread, 1)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False))


def broken_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    stdout_is(writing)


def full_disk():
    stdout_is(os.open("/dev/full", os.O_WRONLY))


@needs_dev_full
@pytest.mark.parametrize("unread", [broken_pipe, full_disk])
def test_output_that_nobody_reads_does_not_end_a_run(unread, tiny_config, here, tmp_path):
    done = run("train.py", *flags(tiny_config()), cwd=tmp_path, before=unread)
    assert done.stderr == ""
    assert "done: 6 steps" in (here / "console.log").read_text()


def test_a_command_whose_output_nobody_reads_ends_without_a_word():
    pipeline = f"{sys.executable} {ROOT}/train.py --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipeline], capture_output=True)
    assert done.returncode in (0, 128 + signal.SIGPIPE)
    assert done.stderr == b""


# ---- signals


@pytest.mark.parametrize(("before", "steps"), [(signal.SIG_DFL, 3), (signal.SIG_IGN, 6)])
def test_a_closed_terminal_saves_and_ends_like_sigterm_and_under_nohup_changes_nothing(
    before, steps, go, here, monkeypatch
):
    signal.signal(signal.SIGHUP, before)
    at_step(monkeypatch, lambda call, _: signal.raise_signal(signal.SIGHUP) if call == 3 else None)
    assert go()["interrupted"] == (steps == 3)
    assert signal.signal(signal.SIGHUP, signal.SIG_DFL) is before
    assert read_state(newest(here)).step == steps


EARLY = "\nstopped before its first step: nothing is lost, the same command starts again\n"
TOGETHER = f"\nstopping before the first step; once more to stop at once\n{EARLY}"


def stopped_early(monkeypatch, place, config, ranks):
    """Begin a run as the first of so many ranks, with SIGTERM as it enters `place`."""
    module = run_evaluation if place == "validation_loss" else train_module
    with monkeypatch.context() as patched, StopRequest() as stop:
        patched.setattr(runtime.signals, "launch", lambda: Launch(world_size=ranks))
        inject(patched, module, place, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Stopped) as ended:
            train(config, ALONE, stop=stop)
    assert ended.value.code == 0


@pytest.mark.parametrize(
    "place", ["find_checkpoint", "setup", "open_data", "open_run", "validation_loss"]
)
@pytest.mark.parametrize(("ranks", "said"), [(1, EARLY), (2, TOGETHER)])
def test_a_signal_before_the_first_step_leaves_everything_as_it_was(
    place, ranks, said, tiny_config, go, here, monkeypatch, capfd
):
    config = tiny_config(eval_every=2, val_fraction=0.1, dropout=0.1)
    stopped_early(monkeypatch, place, config, ranks)  # a first run
    assert (here.exists(), capfd.readouterr().err) == (False, said)
    go(config.with_options(max_steps=4))
    (here / "eval.csv").unlink()  # so that a run that resumes evaluates before its first step
    before = log(here), newest(here)
    for resume in (None, "auto"):  # a new run of its name, and one that resumes
        config = config.with_options(resume=resume)
        stopped_early(monkeypatch, place, config, ranks)
        assert (log(here), newest(here)) == before
    assert go(config)["resumed_after_step"] == 4
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_rank_ends_before_its_first_step_if_another_was_asked_during_the_evaluation(
    tiny_config, here, monkeypatch
):
    asked = iter([False, True])
    monkeypatch.setattr(World, "any", lambda *_: next(asked))
    with pytest.raises(Stopped):
        train(tiny_config(), ALONE)
    assert not here.exists()


# ---- compilers and other processes


GCC = """/tmp/a.h:9:10: fatal error: Python.h: No such file or directory
    9 | #include <Python.h>
      |          ^~~~~~~~~~
compilation terminated."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory at batch_size 4, seq_len 32. These lower it: "),
        (
            InductorError(CppCompileError(["g++", "main.cpp"], GCC), None),
            "--compile failed: /tmp/a.h:9:10: fatal error: Python.h: No such file or directory; "
            "or run without --compile",
        ),
    ],
    ids=["memory", "compiler"],
)
def test_an_error_of_a_library_is_one_line_with_advice_and_in_console_log_too(
    error, said, tiny_config, here, monkeypatch, capsys
):
    failing(monkeypatch, 3, error)
    assert main(tiny_config()) == 1
    out, err = capsys.readouterr()
    assert "step 2/6" in out
    assert err.startswith(f"error: {said}")
    assert (here / "console.log").read_text() == out + err


CLOSED = "[/pytorch/gloo/pair.cc:538] Connection closed by peer [127.0.0.1]:31415."
TRITON = "TritonMissing: Cannot find a working triton installation. Either the package is not"


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (BackendCompilerFailed("inductor", TritonMissing(None), None), "compiler", TRITON),
        (InductorError(torch.OutOfMemoryError("CUDA out of memory"), None), "memory", "out of"),
        (RuntimeError(CLOSED), "lost rank", CLOSED),
        (RuntimeError("gloomy.txt"), "other", "RuntimeError: gloomy.txt"),
    ],
)
def test_the_librarys_own_reason_is_kept(error, kind, reason):
    found, line = kind_of_failure(error)
    assert (found, line[: len(reason)]) == (kind, reason)


def test_tensors_that_memory_has_no_room_for_are_told_by_pytorchs_words():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**14)
    assert kind_of_failure(caught.value) == ("memory", "out of memory")
