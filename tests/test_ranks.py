"""Faults among the ranks of one run: one rank prints the error, and all end."""

import re
import socket
import subprocess
import sys

import pytest

from runtime.errors import TrainingError
from runtime.launch import Launch, launch
from runtime.world import World, joined_world
from tests.conftest import CPU, ROOT, flags, log, run_ranks, torchrun, wait_for
from tests.test_resume import needs_proc

WHOLE = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch):
    """Set what torchrun would set, with changes."""

    def put(**changes):
        for name, value in (WHOLE | changes).items():
            monkeypatch.setenv(name, value)

    return put


# ---- the environment, and meeting


@pytest.mark.parametrize("size", ["", "0", "1"])
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
        said = f"2 ranks of this run cannot meet at localhost:{port}: {reason}.*, after \\d+ s"
        with pytest.raises(TrainingError, match=said), joined_world(CPU, timeout=1):
            raise AssertionError("joined")
    line = f"rank {rank} waits at localhost:{port} for the other ranks"
    assert capfd.readouterr().err.startswith(line)


# ---- one of them fails


FAILS = """if True:
    import os, sys, threading, torch
    sys.path.insert(0, {root!r})
    from runtime.errors import UserError, reported
    from runtime.world import joined_world

    with reported("here", advice={{"lost rank": "another rank has died"}}):
        with joined_world(torch.device("cpu"), 60) as world:
            if world.rank in {ranks}:
                # as PyTorch's threads that wait for another rank
                threading.Thread(target=threading.Event().wait).start()
                raise {error}
            world.sum(1.0)
"""
KILLED = "SystemExit(os.kill(os.getpid(), 9))"


def failing(ranks, error):
    """Return code that raises the error on these ranks while the others wait for them."""
    return FAILS.format(ranks=ranks, error=error, root=str(ROOT))


@pytest.mark.parametrize(
    ("ranks", "error", "printed", "cause"),
    [
        ({1}, "UserError('wrong')", ["error: rank 1: wrong"], "error: rank 1: wrong"),
        ({0, 1}, "UserError('wrong')", ["error: wrong"], "error: (rank 1: )?wrong"),
        ({1}, KILLED, [], r"Signal 9 \(SIGKILL\)"),
    ],
    ids=["rank 1 fails", "both fail", "rank 1 is killed"],
)
def test_torchrun_names_the_rank_that_failed_and_others_add_at_most_a_line(
    ranks, error, printed, cause, tmp_path
):
    (tmp_path / "fails.py").write_text(failing(ranks, error))
    done = torchrun(tmp_path / "fails.py", cwd=tmp_path, status=1)
    before, report = done.stderr.split("Root Cause")
    lines = re.findall("^error: .*", before, re.MULTILINE)
    assert lines in (printed, [*printed, "error: another rank has died"])
    assert re.search(f"^  traceback : {cause}", report, re.MULTILINE)


TOGETHER = """if True:
    import torch
    from runtime.errors import reported
    from runtime.world import joined_world

    def read():
        if world.rank:
            raise OSError(5, "bad disk", "data/mine")

    with reported("here"), joined_world(torch.device("cpu"), 60) as world:
        world.raise_on_all(read)
"""


def test_what_one_rank_cannot_do_all_say_with_that_ranks_number(tmp_path):
    for done in run_ranks(2, "-c", TOGETHER, cwd=tmp_path, status=1):
        assert done.stderr == "error: rank 1: data/mine: bad disk\n"


LIKE_MACOS = """if True:
    import ctypes, os, runpy, signal, sys
    del os.sched_getaffinity, signal.sigtimedwait
    ctypes.CDLL = lambda name: object()  # no prctl
    sys.path.insert(0, {root!r})
    sys.argv[0] = {train!r}
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_torchrun_starts_ranks_of_which_one_prints_and_logs_without_linuxs_functions_too(
    tiny_config, tmp_path, here
):
    """test_ddp.py compares their losses with one rank's."""
    script = tmp_path / "like_macos.py"
    script.write_text(LIKE_MACOS.format(root=str(ROOT), train=str(ROOT / "train.py")))
    options = flags(tiny_config(batch_size=2, total_batch_tokens=8 * 32))
    done = torchrun(script, *options, cwd=tmp_path)
    assert "Traceback" not in done.stderr
    assert done.stdout.count("step 1/6 | loss") == 1
    assert "2 ranks x 2 micro-steps" in done.stdout
    assert len(log(here)) == 6


# ---- torchrun asks to stop, or is killed


ASKED = """if True:
    import time
    from pathlib import Path
    from config import Config
    from runtime.signals import StopRequest
    from runtime.start import start
    with StopRequest() as stop:
        stop.has_begun = True
        start(Config, [])
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
        env={
            **WHOLE,
            "TORCHELASTIC_RUN_ID": "any",
            "PYTHONPATH": str(ROOT),
        },
    )
    wait_for((tmp_path / "ready").exists, killed)
    killed.kill()
    killed.wait()
    wait_for((tmp_path / "asked").exists, None)
