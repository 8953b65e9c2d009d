"""What goes wrong among the ranks of one run: one says so, all end, and nobody waits for ever."""

import signal
import socket
import subprocess
import sys
import time

import pytest

from config import Config
from runtime import errors
from runtime.errors import TrainingError, UserError
from runtime.launch import Launch, launch
from runtime.start import parse_command_line
from runtime.world import World, joined_world
from tests.conftest import CPU, ROOT, ended, flags, run_ranks, start_ranks, wait_for
from tests.test_resume import log, needs_proc

WHOLE = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch):
    """Set what torchrun would set, with changes."""

    def put(**changes):
        for name, value in (WHOLE | changes).items():
            monkeypatch.setenv(name, value)

    return put


def cannot_join(error, match, timeout=1):
    with pytest.raises(error, match=match), joined_world(CPU, timeout):
        raise AssertionError("joined")


# ---- the environment, and meeting


@pytest.mark.parametrize(
    "changes",
    [
        {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "0"},
        {"RANK": ""},
        {"MASTER_ADDR": "", "MASTER_PORT": ""},
        {"RANK": "2"},
        {"MASTER_PORT": "99999"},
    ],
)
def test_an_environment_that_contradicts_itself_is_an_error_at_once(changes, environment):
    environment(**changes)
    found = str(changes)[1:-1]
    cannot_join(UserError, f"itself: .*{found}.*; start several ranks with torchrun, or one after")


@pytest.mark.parametrize("size", ["", "1"])
def test_a_rank_left_over_from_another_call_does_not_count_where_there_is_one_process(
    size, environment
):
    environment(WORLD_SIZE=size, RANK="1", LOCAL_RANK="7", MASTER_PORT="http")
    assert launch() == Launch()
    with joined_world(CPU, 1) as world:
        assert world == World(CPU)


@pytest.mark.parametrize(("rank", "reason"), [("0", ".*port"), ("1", ".*imed out")])
def test_ranks_that_cannot_meet_say_where_they_wait_and_then_why(rank, reason, environment, capfd):
    """Rank 0 finds that another program has the port; rank 1, that nobody answers there."""
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        port = str(taken.getsockname()[1])
        environment(RANK=rank, MASTER_PORT=port)
        cannot_join(TrainingError, f"2 ranks of this run cannot meet at localhost:{port}: {reason}")
    assert capfd.readouterr().err.startswith(f"rank {rank} waits at localhost:{port} for the other")


# ---- one of them fails


@pytest.mark.parametrize("is_ended", [True, False])
def test_before_the_ranks_have_joined_another_than_the_first_speaks_unless_it_is_ended(
    is_ended, environment, monkeypatch, capsys
):
    environment(RANK="1", LOCAL_RANK="1")
    monkeypatch.setattr(errors, "_is_ended_by_torchrun", lambda: is_ended)
    with pytest.raises(SystemExit, match="2"):
        parse_command_line(Config, ["--n_layer", "0"])
    assert capsys.readouterr().err.startswith("error: rank 1: --n_layer: ") != is_ended


FAILS = """if True:
    import torch
    from runtime import errors
    from runtime.errors import UserError, reported
    from runtime.world import joined_world

    errors.PATIENCE = 1.0
    with reported("here", advice={{"lost rank": "another rank has died"}}):
        with joined_world(torch.device("cpu"), 60) as world:
            if world.rank in {ranks}:
                raise {error}
            world.sum(1.0)
"""


@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("UserError('wrong here')", "error: {}wrong here"),
        ("OSError(5, 'bad disk', 'mine')", "error: {}mine: bad disk"),
        ("KeyboardInterrupt", "error: {}interrupted"),
        ("RuntimeError('anything')", "RuntimeError: anything"),
    ],
)
def test_of_several_ranks_one_says_why_the_run_ends(error, line, ranks, tmp_path):
    done = run_ranks(2, "-c", FAILS.format(ranks=ranks, error=error), cwd=tmp_path)
    assert all(each.returncode for each in done)
    (printed,) = (each.stderr for each in done if each.stderr)
    last = line.format("" if 0 in ranks else "rank 1: ")
    assert printed.splitlines()[-1] == last
    assert "Traceback" in printed or printed == f"{last}\n"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_loses_another_one_says_so_in_a_line(victim, tmp_path):
    killed = "SystemExit(os.kill(os.getpid(), 9))"
    code = FAILS.replace("import torch", "import os, torch").format(ranks={victim}, error=killed)
    done = run_ranks(2, "-c", code, cwd=tmp_path)
    prefix = "" if victim else "rank 1: "
    assert done[1 - victim].stderr == f"error: {prefix}another rank has died\n"
    assert [each.returncode for each in done] == ([-9, 1] if victim == 0 else [1, -9])


TOGETHER = """if True:
    import torch
    from runtime.errors import UserError, reported
    from runtime.world import joined_world

    def read():
        if world.rank:
            raise {error}

    with reported("here"), joined_world(torch.device("cpu"), 60) as world:
        world.raise_on_all(read)
"""


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        ("OSError(5, 'Input/output error', 'data/mine')", "data/mine: Input/output error", 1),
        ("UserError('no tokens')", "no tokens", 2),
    ],
)
def test_what_one_rank_cannot_do_rank_0_says_with_that_ranks_number(error, line, status, tmp_path):
    first, second = run_ranks(2, "-c", TOGETHER.format(error=error), cwd=tmp_path)
    assert (first.stderr, second.stderr) == (f"error: rank 1: {line}\n", "")
    assert first.returncode == second.returncode == status


@needs_proc
def test_a_second_ctrl_c_ends_a_rank_that_waits_for_another_one(tiny_config, tmp_path):
    options = flags(tiny_config(max_steps=100_000))
    with ended(start_ranks(2, "train.py", *options, cwd=tmp_path)) as (waiting, stopped):
        wait_for(lambda: (tmp_path / "logs/train/log.csv").exists() and log(tiny_config()), waiting)
        stopped.send_signal(signal.SIGSTOP)
        for _ in range(2):
            waiting.send_signal(signal.SIGINT)
            time.sleep(1.3)  # sooner, it would be torchrun passing the same one on
        assert waiting.communicate(timeout=60)[1].splitlines()[-1] == (
            "error: stopped while waiting for another rank, a device or a disk"
        )
    assert waiting.returncode == 130


DEAF = """if True:
    import ctypes, os, signal, threading
    import runtime.signals
    runtime.signals.UNHEARD = 0.5
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    with runtime.signals.StopRequest() as stop:
        stop.begin_step([0.1])
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        # Python hears no signal in here, as where NCCL waits for a rank that died
        libc.pthread_mutex_lock(mutex)
"""


def test_one_of_several_ranks_that_hears_no_signal_ends_all_the_same():
    environment = {**WHOLE, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", DEAF], env=environment, capture_output=True, text=True, timeout=60
    )
    assert "stopped while waiting for another rank" in ran.stderr
    assert ran.returncode == 128 + signal.SIGTERM


ASKED = """if True:
    import time
    from pathlib import Path
    from runtime.signals import StopRequest, end_with
    with StopRequest() as stop:
        stop.begin_step([1.0])
        end_with()
        Path("ready").touch()
        while stop.received is None:
            time.sleep(0.05)
        Path("asked").touch()
"""


@needs_proc
def test_ranks_whose_torchrun_was_killed_are_asked_to_stop(tmp_path):
    killed = subprocess.Popen(
        ["bash", "-c", '"$0" -c "$1" & wait', sys.executable, ASKED],
        cwd=tmp_path,
        env={**WHOLE, "TORCHELASTIC_RUN_ID": "any", "PYTHONPATH": str(ROOT)},
    )
    wait_for((tmp_path / "ready").exists, killed)
    killed.kill()
    killed.wait()
    wait_for((tmp_path / "asked").exists, None)
