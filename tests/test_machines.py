"""Several machines: the processes of a run meet, agree, and go on after some were lost, with the
numbers of one that lost none.
"""

import contextlib
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import runtime.world
from checkpoint.resume import check_same_tokens
from data.token_file import TokenFileError
from dataloader import DataLoader, open_corpus
from runtime.errors import TrainingError, UserError
from runtime.signals import Stopped, StopRequest, end_unfinished
from runtime.world import Launch, World, _call, _Meeting, describe_ranks
from tests import machines
from tests.conftest import CPU, flags, run_ranks
from tests.test_resume import needs_proc


@pytest.fixture(autouse=True)
def nobody_asked_to_stop(monkeypatch):
    monkeypatch.setattr(StopRequest, "came", False)  # an earlier test of this process may have
    monkeypatch.setattr(runtime.world, "_store", None)  # is None again afterwards


# ---- the meeting, of processes that are threads here


@contextlib.contextmanager
def serving():
    """The port of a store that outlives the processes, as that of torchrun's agent."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield store.port


@pytest.fixture
def port(monkeypatch):
    with serving() as port:
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port))
        yield port


def meet(port, rank, size, *, timeout=60, process=None, code="abc", **differs):
    """What one process gets from the meeting: rank 0's verdict, or the error that ends it."""
    own = {
        "process": process or str(rank),
        "host": f"node-{rank // 2}",
        "call": f"torchrun on node-{rank // 2}",
        "need": {"lr": "0.1", "device": "cpu"} | differs,
        "should have": {"code": code},
    }
    meeting = _Meeting(Launch(rank, rank % 2, size), timeout)
    try:
        return meeting.agree(TCPStore("localhost", port, wait_for_workers=False), own)
    finally:
        meeting.waiting.cancel()


def meet_all(port, *ranks, size=None, timeout=60):
    """What each of several processes gets, in order: given its rank, or its rank and what it has
    that differs.
    """

    def outcome(which):
        rank, differs = which if isinstance(which, tuple) else (which, {})
        try:
            return meet(port, rank, size or len(ranks), timeout=timeout, **differs)
        except (UserError, SystemExit) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(outcome, ranks)]


def test_processes_that_are_alike_agree_and_know_each_others_torchrun(port):
    verdicts = meet_all(port, 3, 2, 1, (0, {"code": "abd"}))
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert verdicts[0]["calls"] == ["torchrun on node-0", "torchrun on node-1"]
    assert verdicts[0]["notes"] == [
        "code: all ranks should have the same, but it is abd on rank 0 and abc on ranks 1-3"
    ]


def test_what_differs_is_told_by_rank_0_in_a_line_each_and_the_others_end(port):
    told, *others = meet_all(port, 0, 1, (2, {"lr": "0.2"}), (3, {"lr": "0.2", "device": "cuda"}))
    assert str(told).splitlines() == [
        "lr: all ranks need the same, but it is 0.1 on rank 0 and 0.2 on ranks 2-3 (node-1)",
        "device: all ranks need the same, but it is cpu on rank 0 and cuda on rank 3 (node-1)",
    ]
    assert [error.code for error in others] == [2, 2, 2]


def test_the_ranks_that_do_not_come_are_named_while_waiting_and_at_the_end(
    port, monkeypatch, capsys
):
    monkeypatch.setattr(runtime.world, "TOLD_WHEN_WAITING", 1.5)
    told, *others = meet_all(port, 0, 2, size=6, timeout=3)
    assert "(ranks 1 and 3-5 did not come within 3 s)" in str(told)
    assert [error.code for error in others] == [1]
    assert capsys.readouterr().err == (
        f"rank 0 waits at localhost:{port} for ranks 1 and 3-5 of the 6 processes of this run, for "
        f"up to 3 s (--timeout)\n"
    )


def test_where_rank_0_does_not_come_the_first_process_of_each_machine_says_so(
    port, monkeypatch, capsys
):
    monkeypatch.setattr(runtime.world, "TOLD_WHEN_WAITING", 0)
    monkeypatch.setattr(runtime.world, "GRACE", 0)
    assert all(
        "(rank 0 did not come within 1 s)" in str(error)
        for error in meet_all(port, 2, 3, size=4, timeout=1)
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"rank 2 waits at localhost:{port} for rank 0 of the 4 processes of this run"
    )


def test_a_rank_that_comes_twice_is_told_at_once(port):
    told, *others = meet_all(port, 0, (1, {"process": "a"}), (1, {"process": "b"}), size=3)
    assert re.match(
        r"rank 1 has come to localhost:\d+ twice, from node-0 and node-0: two runs on one port \(give .*--node_rank$",
        str(told),
    )
    assert [error.code for error in others] == [2, 2]


def test_a_process_asked_to_stop_does_not_wait_for_others(port, monkeypatch):
    monkeypatch.setattr(StopRequest, "came", True)
    with pytest.raises(Stopped):
        meet(port, 0, 2)


def test_each_attempt_meets_apart_from_what_earlier_ones_have_left_in_the_store(port):
    """As torchrun starts processes again: in any order, with another number of machines, and after
    some died while they met.
    """
    names = {meet_all(port, 0, 1, 2)[1]["name"]}
    with ThreadPoolExecutor() as pool:
        for attempt, size in enumerate((3, 2, 4), 1):
            early = [
                pool.submit(meet, port, rank, size, process=f"{attempt} {rank}")
                for rank in range(1, size)
            ]
            time.sleep(
                0.4
            )  # they find the earlier attempt's verdict, or a meeting whose rank 0 has died, and wait
            assert not any(process.done() for process in early)
            if attempt == 2:
                TCPStore("localhost", port, wait_for_workers=False).set(
                    "meeting", "of a rank 0 that has died"
                )
                time.sleep(0.3)
            verdict = meet(port, 0, size, process=f"{attempt} 0")
            assert [process.result() for process in early] == [verdict] * (size - 1)
            assert verdict["name"] not in names
            names.add(verdict["name"])


def test_a_rank_0_left_over_from_an_earlier_attempt_gives_way_to_the_next(port):
    with ThreadPoolExecutor() as pool:
        left_over = pool.submit(meet, port, 0, 3, process="old")
        time.sleep(0.4)
        assert all(isinstance(verdict, dict) for verdict in meet_all(port, 0, 1))
        with pytest.raises(UserError, match="another rank 0 has come to localhost:"):
            left_over.result()


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([1], "rank 1"),
        ([0, 2], "ranks 0 and 2"),
        ([8, 9, 10], "ranks 8-10"),
        ([15, 1, 3, *range(8, 15)], "ranks 1, 3 and 8-15"),
    ],
)
def test_ranks_are_named_in_few_words(ranks, words):
    assert describe_ranks(ranks) == words


@needs_proc
def test_a_call_of_torchrun_is_told_from_a_later_one_with_the_same_number():
    began = int(
        _call("job", os.getpid()).removeprefix(f"job {socket.gethostname()} {os.getpid()} ")
    )
    assert began > int(_call("job", 1).split()[-1])


# ---- the processes of train.py

DIFFERENT = """if True:
    import os, runpy, sys
    import torch
    if os.environ["RANK"] == "1":
        {on_rank_1}
    sys.argv[0] = {train!r}
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_different(on_rank_1, *options, cwd):
    """train.py on two ranks, the second of which does something else first."""
    return run_ranks(
        2,
        "-c",
        DIFFERENT.format(on_rank_1=on_rank_1, train=str(machines.ROOT / "train.py")),
        *options,
        cwd=cwd,
    )


def test_processes_with_other_options_or_another_pytorch_do_not_train_together(
    tiny_config, tmp_path
):
    first, second = run_different(
        'torch.__version__ = "2.11.0"; sys.argv += ["--lr", "0.1"]',
        *flags(tiny_config()),
        cwd=tmp_path,
    )
    lr, version = first.stderr.splitlines()
    assert re.fullmatch(
        r"error: PyTorch: all ranks need the same, but it is \S+ on rank 0 and 2\.11\.0 on rank 1",
        version,
    )
    assert lr == "error: lr: all ranks need the same, but it is 0.0003 on rank 0 and 0.1 on rank 1"
    assert (first.returncode, second.returncode, second.stderr) == (2, 2, "")
    assert not Path(tiny_config().log_dir).exists()


def test_what_one_process_cannot_do_all_raise_so_that_rank_0_tells(monkeypatch):
    """As where a machine has no corpus, or not the weights to begin with."""
    found = [None, UserError("no token files"), TrainingError("damaged")]
    monkeypatch.setattr(
        World, "gather", lambda world, own: [*found[: world.rank], own, *found[world.rank + 1 :]]
    )

    def fail():
        raise TrainingError("damaged")

    for rank, function in ((0, lambda: 3), (2, fail)):
        with pytest.raises(UserError, match=r"^no token files$") as caught:
            World(CPU, rank, 3).raise_on_all(function)
        assert (caught.value.found_by, caught.value.of_all, caught.value.status) == (1, True, 2)
    monkeypatch.setattr(World, "gather", lambda _, own: [own, own])
    assert World(CPU, 0, 2).raise_on_all(lambda: 3) == World(CPU).raise_on_all(lambda: 3) == 3
    for world in (World(CPU, 1, 2), World(CPU)):
        with pytest.raises(TrainingError, match=r"^damaged$"):
            world.raise_on_all(fail)


def test_other_tokens_are_told_with_the_ranks_that_have_them(monkeypatch):
    monkeypatch.setattr(World, "gather", lambda _, own: [own, "another", own, "another"])
    monkeypatch.setattr(World, "broadcast", lambda _, own: own)
    with pytest.raises(
        UserError, match="data/mine: ranks 1 and 3 did not find the same tokens there as rank 0; "
    ):
        check_same_tokens(Path("data/mine"), "one", World(CPU, 0, 4))


def test_more_ranks_than_windows_says_that_fewer_would_do(corpus):
    split, _ = open_corpus(corpus / "tiny", 32, 100, 0.985)
    with pytest.raises(
        TokenFileError,
        match=r"tokens make 1 sequences of 32, but one step takes 3, .*or start fewer processes$",
    ):
        DataLoader(split, 1, world_size=3)


def test_a_machine_that_does_not_see_the_runs_folder_is_told_at_the_start_and_cannot_go_on(
    tiny_config, tmp_path
):
    """Other code on rank 1 is a note too."""
    (tmp_path / "elsewhere").mkdir()
    apart = 'os.chdir("elsewhere"); import runtime.report; runtime.report.code_version = lambda: "other code"'
    options = [*flags(tiny_config(max_steps=2)), "--log_dir", "logs"]
    first, second = run_different(apart, *options, "--fsdp", cwd=tmp_path)
    (line,) = first.stderr.splitlines()
    assert line.startswith(
        "error: logs/train is not there for rank 1; put --log_dir on a file system that all "
        "machines share, as every rank saves its shards"
    )
    assert (first.returncode, second.returncode, second.stderr) == (2, 2, "")
    assert not (tmp_path / "logs").exists()
    for done in run_different(apart, *options, cwd=tmp_path):
        assert (done.returncode, done.stderr) == (0, "")
    console = (tmp_path / "logs/train/console.log").read_text()
    assert re.search(
        r"^note: code: all ranks should have the same, but it is \S.* on rank 0 and other code on rank 1$",
        console,
        re.MULTILINE,
    )
    assert (
        "note: logs/train is not there for rank 1; put --log_dir on a file system that all "
        "machines share, else the run cannot resume after a fault" in console
    )
    first, second = run_different(
        apart, *options, "--max_steps", "4", "--resume", "auto", cwd=tmp_path
    )
    (line,) = first.stderr.splitlines()
    assert line.startswith(
        "error: logs/train/checkpoints/step_000002 is there for rank 0 but not for rank 1, or "
    )
    assert (first.returncode, second.returncode, second.stderr) == (2, 2, "")
    (tmp_path / "logs").rename(tmp_path / "elsewhere/logs")  # now rank 0 would begin anew
    first, second = run_different(
        apart, *options, "--max_steps", "4", "--resume", "auto", cwd=tmp_path
    )
    (line,) = first.stderr.splitlines()
    assert line.startswith(
        "error: logs/train/checkpoints is there for rank 0 but not for rank 1, or the other way"
    )
    assert not (tmp_path / "logs").exists()


# ---- machines that are lost


@pytest.mark.parametrize(
    ("agents", "received", "ends"), [("2", None, True), ("2", 1.0, False), ("1", None, False)]
)
def test_where_another_machine_was_told_to_stop_this_one_ends_so_that_it_is_started_again(
    agents, received, ends, monkeypatch
):
    monkeypatch.setenv("GROUP_WORLD_SIZE", agents)
    stop = StopRequest()
    stop.received = received
    with pytest.raises(SystemExit, match="1") if ends else contextlib.nullcontext():
        end_unfinished({"interrupted": True}, stop)
    end_unfinished({"interrupted": False}, stop)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An undisturbed run of two processes."""
    with machines.run_in(tmp_path_factory.mktemp("straight"), "straight") as run:
        run.let_through(machines.STEPS)
        for done in run_ranks(2, *run.training(), cwd=run.place):
            assert done.returncode == 0, done.stderr
        yield run


def ends_like(ours, theirs):
    assert machines.difference(ours, theirs) < 1e-5
    assert [path.name for path in (ours.place / "logs").iterdir()] == [
        ours.name
    ]  # it was not begun anew


@needs_proc
def test_a_run_on_two_machines_one_of_which_starts_its_processes_again_goes_on(straight, tmp_path):
    """torchrun keeps one store through this, and one of the two machines counts no restart."""
    with machines.run_in(tmp_path, "killed", workers=1) as run:
        for name in "ab":
            run.start(name)
        run.until(5)
        run.kill_processes("b", 1)
        run.until(7, attempts=2)
        run.end()
        ends_like(run, straight)


@needs_proc
def test_a_run_that_loses_a_machine_goes_on_with_the_other_and_then_with_a_new_one(
    straight, tmp_path
):
    with machines.run_in(tmp_path, "lost", workers=1) as run:
        for name in "ab":
            run.start(name, "1:2", **machines.REJOIN)
        run.until(5, world=2)
        run.kill("b")
        run.lose("b")
        run.until(8, world=1)
        run.start("b", "1:2", **machines.REJOIN)
        run.until_joined(2)
        run.end()
        ends_like(run, straight)
