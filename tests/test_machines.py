"""Several machines: the ranks of a run meet, agree, and go on after some were lost, with the
numbers of a run that lost none.
"""

import contextlib
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

import runtime.world
from checkpoint.resume import check_same_tokens
from data.token_file import TokenFileError
from dataloader import DataLoader, open_corpus
from runtime.errors import TrainingError, UserError
from runtime.launch import Launch, describe_call, launch
from runtime.signals import StopRequest, end_unfinished
from runtime.world import World, describe_ranks
from tests import machines
from tests.conftest import CPU, flags, run_ranks
from tests.test_resume import needs_proc

# ---- the ranks meet; they are threads here


def meet(*ranks, size, timeout=60, local_rank=0):
    """Return what each of several ranks gets from the meeting: None, or the error that ends it."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def outcome(rank):
        own = TCPStore("localhost", store.port, wait_for_workers=False)
        started = Launch(rank, local_rank, size, host="localhost", port=store.port)
        try:
            return runtime.world._meet(own, started, timeout)
        except UserError as error:
            return str(error).replace(str(store.port), "PORT")

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(outcome, ranks)]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(runtime.world, "SAY_AFTER", 0.2)
    monkeypatch.setattr(runtime.world, "GRACE", 0.5)


def test_ranks_that_all_come_meet_in_any_order():
    assert meet(3, 0, 2, 1, size=4) == [None] * 4


def test_the_ranks_that_do_not_come_are_named_while_waiting_and_at_the_end(impatient, capsys):
    first, other = meet(0, 2, size=6, timeout=1)
    assert first.startswith(
        "the 6 ranks of this run cannot meet at localhost:PORT: ranks 1 and 3-5 did not come "
        "within 1 s. All of them have to run"
    )
    assert "a rank did not come" in other
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"rank 0 waits at localhost:\d+ for ranks 1 and 3-5 of 6 for up to 1 s", line)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_where_rank_0_does_not_come_the_first_rank_of_each_machine_says_so(
    local_rank, impatient, capsys
):
    (error,) = meet(2, size=4, timeout=1, local_rank=local_rank)
    assert "rank 0 did not come within 1 s" in error
    assert capsys.readouterr().err.count("waits at") == (local_rank == 0)


def test_a_rank_that_comes_twice_is_an_error_at_once(impatient):
    errors = meet(1, 1, size=3, timeout=1)
    (twice,) = (error for error in errors if "twice" in error)
    assert twice.startswith("rank 1 has come to localhost:PORT twice: two runs on one port (give ")


@pytest.mark.parametrize(("has_new_store", "attempt"), [("0", "3"), ("1", "")])
def test_each_attempt_of_torchrun_meets_apart_from_earlier_ones(
    has_new_store, attempt, monkeypatch
):
    """Several machines count attempts differently, and need a new store for each."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", has_new_store)
    assert launch().attempt == attempt


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([1], "rank 1"),
        ([0, 2], "ranks 0 and 2"),
        ([8, 9, 10], "ranks 8-10"),
        ([15, 1, 3, *range(8, 15)], "ranks 1, 3 and 8-15"),
    ],
)
def test_ranks_are_named_briefly(ranks, name):
    assert describe_ranks(ranks) == name


@needs_proc
def test_a_call_of_torchrun_is_told_from_a_later_one_with_the_same_number():
    name = f"job {socket.gethostname()} {os.getpid()} "
    began = int(describe_call("job", os.getpid()).removeprefix(name))
    assert began > int(describe_call("job", 1).split()[-1])


# ---- they agree


def compared(monkeypatch, *differs):
    """Return the world of four ranks on two machines, given what each has of its own."""

    def gather(world, own):
        return [
            own
            | {"host": f"node-{rank // 2}", "call": f"torchrun on node-{rank // 2}"}
            | {kind: own[kind] | theirs.get(kind, {}) for kind in ("need", "should have")}
            for rank, theirs in enumerate(differs)
        ]

    monkeypatch.setattr(World, "gather", gather)
    return runtime.world._compare(CPU, Launch(0, 0, 4), {"lr": "0.1", "seed": "1"})


def test_ranks_that_are_alike_know_each_others_torchrun_and_what_should_be_alike(monkeypatch):
    world = compared(monkeypatch, {"should have": {"code": "abc"}}, {}, {}, {})
    assert world.calls == ("torchrun on node-0", "torchrun on node-1")
    (note,) = world.notes
    assert note.startswith("code: all ranks should have the same, but it is abc on rank 0 and ")
    assert note.endswith(" on ranks 1-3")


def test_what_differs_is_an_error_with_a_line_each_that_names_values_ranks_and_machine(monkeypatch):
    other = {"lr": "0.2", "seed": "2"}
    with pytest.raises(UserError) as caught:
        compared(monkeypatch, {}, {}, {"need": {"lr": "0.2"}}, {"need": other})
    assert str(caught.value).splitlines() == [
        "lr: all ranks need the same, but it is 0.1 on rank 0 and 0.2 on ranks 2-3 (node-1)",
        "seed: all ranks need the same, but it is 1 on rank 0 and 2 on rank 3 (node-1)",
    ]


DIFFERENT = """if True:
    import os, runpy, sys
    import torch
    if os.environ["RANK"] == "1":
        {on_rank_1}
    sys.argv[0] = {train!r}
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_different(on_rank_1, *options, cwd):
    """Run train.py on two ranks, the second of which does something else first."""
    code = DIFFERENT.format(on_rank_1=on_rank_1, train=str(machines.ROOT / "train.py"))
    return run_ranks(2, "-c", code, *options, cwd=cwd)


def refused(on_rank_1, *options, cwd):
    """Return the lines that rank 0 alone prints where both ranks end with status 2."""
    first, second = run_different(on_rank_1, *options, cwd=cwd)
    assert (first.returncode, second.returncode, second.stderr) == (2, 2, ""), (first, second)
    return first.stderr.splitlines()


def test_ranks_with_other_options_or_another_pytorch_do_not_train_together(tiny_config, tmp_path):
    other = 'torch.__version__ = "2.11.0"; sys.argv += ["--lr", "0.1"]'
    lr, version = refused(other, *flags(tiny_config()), cwd=tmp_path)
    assert lr == "error: lr: all ranks need the same, but it is 0.0003 on rank 0 and 0.1 on rank 1"
    assert re.fullmatch(
        r"error: PyTorch: all ranks need the same, but it is \S+ on rank 0 and 2\.11\.0 on rank 1",
        version,
    )
    assert not Path(tiny_config().log_dir).exists()


def test_a_machine_without_a_gpu_does_not_keep_the_others_waiting():
    """Its NCCL and the others' gloo would never meet."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    there = PrefixStore("train ", store)
    for key, value in {"rank 0": "1", "device of 0": "cuda", "all have come": ""}.items():
        there.set(key, value)
    with pytest.raises(
        UserError,
        match="kind of device: all ranks need the same, but it is cuda on rank 0 and cpu on rank 1",
    ):
        runtime.world._join(CPU, Launch(1, 0, 2, host="localhost", port=store.port), 60)


def test_what_one_rank_cannot_do_all_raise_with_its_number(monkeypatch):
    """As where a machine has no corpus, or not the weights to begin with."""
    errors = [None, UserError("no token files", rank=1), TrainingError("damaged", rank=2)]
    monkeypatch.setattr(
        World, "gather", lambda world, own: [*errors[: world.rank], own, *errors[world.rank + 1 :]]
    )

    def fail():
        raise TrainingError("damaged")

    for rank, function in ((0, lambda: 3), (2, fail)):
        with pytest.raises(UserError, match=r"^no token files$") as caught:
            World(CPU, rank, 3).raise_on_all(function)
        assert (caught.value.rank, caught.value.status) == (1, 2)
    monkeypatch.setattr(World, "gather", lambda _, own: [own, own])
    assert World(CPU, 0, 2).raise_on_all(lambda: 3) == World(CPU).raise_on_all(lambda: 3) == 3
    for world in (World(CPU, 1, 2), World(CPU)):
        with pytest.raises(TrainingError, match=r"^damaged$"):
            world.raise_on_all(fail)


def test_other_tokens_are_an_error_with_the_ranks_that_have_them(monkeypatch):
    monkeypatch.setattr(World, "gather", lambda _, own: [own, "another", own, "another"])
    monkeypatch.setattr(World, "broadcast", lambda _, own: own)
    with pytest.raises(
        UserError, match="data/mine: ranks 1 and 3 did not find the same tokens there as rank 0; "
    ):
        check_same_tokens("data/mine", "one", World(CPU, 0, 4))


def test_more_ranks_than_windows_says_that_fewer_would_do(corpus):
    split, _ = open_corpus(corpus / "tiny", 32, 100, 0.985)
    with pytest.raises(
        TokenFileError, match=r"tokens make 1 sequences of 32, but one step takes 3, .*or start few"
    ):
        DataLoader(split, 1, world_size=3)


def test_a_machine_that_does_not_see_the_runs_folder_gets_a_line_and_cannot_resume(
    tiny_config, tmp_path
):
    """Other code on rank 1 is a note too."""
    (tmp_path / "elsewhere").mkdir()
    apart = (
        'os.chdir("elsewhere"); import runtime.world; '
        'runtime.world.code_version = lambda: "other code"'
    )
    options = [*flags(tiny_config(max_steps=2)), "--log_dir", "logs"]
    resume = [*options, "--max_steps", "4", "--resume", "auto"]
    (line,) = refused(apart, *options, "--fsdp", cwd=tmp_path)
    assert line.startswith("error: logs/train is not there for rank 1; put --log_dir on ")
    assert "as every rank saves its shards" in line
    assert not (tmp_path / "logs").exists()
    for done in run_different(apart, *options, cwd=tmp_path):
        assert (done.returncode, done.stderr) == (0, "")
    console = (tmp_path / "logs/train/console.log").read_text()
    assert re.search(
        r"^note: code: all ranks .* \S.* on rank 0 and other code on rank 1$", console, re.M
    )
    assert "note: logs/train is not there for rank 1; put --log_dir on a file system" in console
    (line,) = refused(apart, *resume, cwd=tmp_path)
    assert line.startswith("error: logs/train/checkpoints/step_000002 is there for rank 0 but not ")
    (tmp_path / "logs").rename(tmp_path / "elsewhere/logs")  # now rank 0 would begin anew
    (line,) = refused(apart, *resume, cwd=tmp_path)
    assert line.startswith("error: logs/train/checkpoints is there for rank 0 but not for rank 1, ")
    assert not (tmp_path / "logs").exists()


# ---- machines that are lost


@pytest.mark.parametrize(
    ("agents", "received", "ends"), [("2", None, True), ("2", 1.0, False), ("1", None, False)]
)
def test_where_another_machine_was_told_to_stop_this_one_ends_so_that_it_is_started_again(
    agents, received, ends, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_WORLD_SIZE", agents)
    stop = StopRequest()
    stop.received = received
    with pytest.raises(SystemExit, match="1") if ends else contextlib.nullcontext():
        end_unfinished({"interrupted": True}, stop)
    end_unfinished({"interrupted": False}, stop)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An undisturbed run of two ranks."""
    with machines.run_in(tmp_path_factory.mktemp("straight"), "straight") as run:
        run.let_through(machines.STEPS)
        for done in run_ranks(2, *run.training(), cwd=run.place):
            assert done.returncode == 0, done.stderr
        yield run


@needs_proc
@pytest.mark.parametrize("way", [machines.one_rank, machines.leaves_and_comes_back])
def test_a_run_on_two_machines_goes_on_after_a_loss(way, straight, tmp_path):
    with machines.run_in(tmp_path, "run", workers=1) as run:
        way(run)
        run.end()
        assert machines.difference(run, straight) < 1e-5
        assert [path.name for path in (run.place / "logs").iterdir()] == ["run"]  # not begun anew
