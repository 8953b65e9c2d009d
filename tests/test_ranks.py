"""What goes wrong among the processes of one run: one of them says so, the others end, and nobody
waits for ever.
"""

import signal
import socket
import subprocess
import sys
import time

import pytest

import runtime.world
from runtime.errors import TrainingError, UserError
from runtime.launch import Launch, launch
from runtime.signals import Stopped, StopRequest
from runtime.world import World, joined_world
from tests.conftest import CPU, ROOT, ended, flags, run_ranks, start_ranks, wait_for
from tests.test_resume import log, needs_proc

WHOLE = {
    "WORLD_SIZE": "2",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def nobody_asked_to_stop(monkeypatch):
    monkeypatch.setattr(StopRequest, "came", False)  # an earlier test of this process may have


@pytest.fixture
def environment(monkeypatch):
    """Sets what torchrun would set, with changes."""

    def put(**changes):
        for name, value in (WHOLE | changes).items():
            monkeypatch.setenv(name, value)

    return put


@pytest.fixture
def free_port():
    """A port at which nobody listens."""
    with socket.socket() as any_free:
        any_free.bind(("localhost", 0))
        return any_free.getsockname()[1]


# ---- the environment, and meeting


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', no number of processes"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', no number"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2', no number"),
        ({"RANK": ""}, "WORLD_SIZE is 2, but RANK not set"),
        (
            {"MASTER_ADDR": "", "MASTER_PORT": ""},
            "WORLD_SIZE is 2, but MASTER_ADDR and MASTER_PORT not set",
        ),
        ({"RANK": "one"}, "RANK is 'one', no number below the WORLD_SIZE of 2"),
        ({"RANK": "2"}, "RANK is '2', no number below"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0', no port"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999', no port"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http', no port"),
    ],
)
def test_an_environment_that_no_torchrun_makes_is_told_at_once(changes, message, environment):
    environment(**changes)
    with (
        pytest.raises(
            UserError,
            match=rf"{message}.*; start several processes with torchrun, or one after: unset WORLD_SIZE",
        ),
        joined_world(CPU, 1),
    ):
        raise AssertionError("joined")


@pytest.mark.parametrize("size", ["", "1"])
def test_a_rank_left_over_from_another_call_does_not_count_where_there_is_one_process(
    size, environment
):
    environment(WORLD_SIZE=size, RANK="1", LOCAL_RANK="7", MASTER_PORT="http")
    assert launch() == Launch()
    with joined_world(CPU, 1) as world:
        assert world == World(CPU)


def test_a_port_that_another_program_has_is_one_error_that_names_it(environment):
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment(MASTER_PORT=str(port))
        with (
            pytest.raises(
                TrainingError,
                match=rf"the 2 processes of this run could not meet at localhost:{port} \(.*port no",
            ),
            joined_world(CPU, 1),
        ):
            raise AssertionError("joined")


def test_a_process_whose_others_do_not_come_says_what_it_waits_for(
    environment, free_port, monkeypatch, capsys
):
    monkeypatch.setattr(runtime.world, "TOLD_WHEN_WAITING", 0.1)
    environment(MASTER_PORT=str(free_port))
    with (
        pytest.raises(
            TrainingError,
            match=rf"could not meet at localhost:{free_port} \(rank 1 did not come within 1 s\)",
        ),
        joined_world(CPU, 1),
    ):
        raise AssertionError("joined")
    assert capsys.readouterr().err == (
        f"rank 0 waits at localhost:{free_port} for rank 1 of the 2 processes of this run, for "
        f"up to 1 s (--timeout; started alone "
        f"by mistake? then end it by Ctrl-C, and: unset WORLD_SIZE)\n"
    )


def test_a_process_whose_torchrun_has_been_killed_does_not_wait_for_it(environment, free_port):
    environment(MASTER_PORT=str(free_port), TORCHELASTIC_USE_AGENT_STORE="True")
    with (
        pytest.raises(
            TrainingError,
            match=rf"could not meet at localhost:{free_port} \(torchrun has ended there\)",
        ),
        joined_world(CPU, 10),
    ):
        raise AssertionError("joined")


def test_a_process_that_cannot_reach_rank_0_says_why_and_hears_signals_meanwhile(
    environment, free_port, monkeypatch, capfd
):
    environment(RANK="1", MASTER_PORT=str(free_port))
    with (
        pytest.raises(
            TrainingError,
            match=rf"could not meet at localhost:{free_port} \(Connection refused, for 1 s\)",
        ),
        joined_world(CPU, 1),
    ):
        raise AssertionError("joined")
    monkeypatch.setattr(StopRequest, "came", True)
    with pytest.raises(Stopped), joined_world(CPU, 20):
        raise AssertionError("joined")
    assert capfd.readouterr().err == ""  # no stack of PyTorch's


# ---- one of them fails


FAILS = """if True:
    import torch
    from runtime.errors import UserError, reported
    from runtime.world import joined_world

    with reported("here", advice={{"lost rank": "another process died"}}), joined_world(torch.device("cpu"), 60) as world:
        if world.rank in {ranks}:
            raise {error}
        world.sum(1.0)
"""


@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize(
    "error", ["UserError('wrong here')", "RuntimeError('anything')", "KeyboardInterrupt"]
)
def test_of_several_processes_one_tells_why_the_run_ends(error, ranks, tmp_path):
    done = run_ranks(2, "-c", FAILS.format(ranks=ranks, error=error), cwd=tmp_path)
    assert all(each.returncode for each in done)
    (told,) = (each.stderr for each in done if each.stderr)
    last = told.splitlines()[-1]
    who = "" if 0 in ranks else "rank 1: "
    assert (
        last
        == {
            "U": f"error: {who}wrong here",
            "R": "RuntimeError: anything",
            "K": f"error: {who}interrupted",
        }[error[0]]
    )
    assert error[0] == "R" or told == f"{last}\n"


TOGETHER = """if True:
    import torch
    from runtime.errors import reported
    from runtime.world import joined_world

    def read():
        if world.rank:
            raise OSError(5, "Input/output error", "data/mine")

    with reported("here"), joined_world(torch.device("cpu"), 60) as world:
        world.raise_on_all(read)
"""


def test_what_one_process_cannot_read_rank_0_tells_with_its_rank(tmp_path):
    first, second = run_ranks(2, "-c", TOGETHER, cwd=tmp_path)
    assert (first.stderr, second.stderr) == ("error: rank 1: data/mine: Input/output error\n", "")
    assert (first.returncode, second.returncode) == (1, 1)


@needs_proc
def test_a_second_ctrl_c_ends_a_process_that_waits_for_another_one(tiny_config, tmp_path):
    options = flags(tiny_config(max_steps=100_000))
    with ended(start_ranks(2, "train.py", *options, cwd=tmp_path)) as (waiting, stopped):
        wait_for(lambda: (tmp_path / "logs/train/log.csv").exists() and log(tiny_config()), waiting)
        stopped.send_signal(signal.SIGSTOP)
        for _ in range(2):
            waiting.send_signal(signal.SIGINT)
            time.sleep(1.3)  # sooner, it would be torchrun passing the same one on
        assert waiting.communicate(timeout=60)[1].splitlines()[-1] == (
            "error: stopped at once, while waiting for another process, a device or a disk"
        )
    assert waiting.returncode == 130


ASKED = """if True:
    import time
    from pathlib import Path
    from runtime.signals import StopRequest, end_with
    with StopRequest() as stop:
        end_with()
        Path("ready").touch()
        while stop.received is None:
            time.sleep(0.05)
        Path("asked").touch()
"""


@needs_proc
def test_processes_whose_torchrun_was_killed_are_asked_to_stop(tmp_path):
    def wait_for_file(name):
        deadline = time.monotonic() + 60
        while not (tmp_path / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.05)

    killed = subprocess.Popen(
        ["bash", "-c", '"$0" -c "$1" & wait', sys.executable, ASKED],
        cwd=tmp_path,
        env={**WHOLE, "TORCHELASTIC_RUN_ID": "any", "PYTHONPATH": str(ROOT)},
    )
    wait_for_file("ready")
    killed.kill()
    killed.wait()
    wait_for_file("asked")
