"""Faults of a corpus while it is written or in use: two writers, kill -9, Ctrl-C, a file that
shrinks, a moved project, odd names.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from config import load_config
from data.token_file import write_corpus, write_token_file
from data.tokenizer import get_encoding
from dataloader import open_corpus
from tests.conftest import (
    ALONE,
    ROOT,
    TINY,
    ended,
    refused,
    run,
    start,
    tokens_in,
    wait_for,
    write_tiny_corpus,
)
from train import train

pytestmark = pytest.mark.usefixtures("in_tmp_path")
DATA = Path("data")
MINE = DATA / "mine"
A = Path("a.txt")
WAITING = "another process is writing data/mine: waiting for it"
PREPARE = f"""import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from data.prepare import prepare_if_missing
from runtime.console import Console
from runtime.errors import reported
with reported("data"), Console():
    prepare_if_missing(Path(sys.argv[1]))
"""


def tokens_of():
    return [token for path in sorted(MINE.glob("*.bin")) for token in tokens_in(path).tolist()]


def names():
    return sorted(path.name for path in DATA.iterdir())


def begin(*command, before=None):
    """A command in the background, which is gone at the end."""
    return ended([start(*command, cwd=Path.cwd(), before=before)])


def wait_until_it_waits(process):
    wait_for(lambda: WAITING in process.out.read_text(), process)


def stop_in_the_middle():
    """Let this process stop, until SIGCONT, when it opens the first token file to write."""

    def stop(event, args):
        is_written = event == "open" and args[1] in ("w", "a")
        if is_written and str(args[0]).endswith("_train_000000.bin"):
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(stop)


@pytest.fixture
def being_written(in_tmp_path):
    """A data/text.py stopped in the middle of writing the corpus data/mine."""
    Path("mine.txt").write_text("It was a bright cold day in April.")
    with begin("data/text.py", "mine.txt", before=stop_in_the_middle) as (writer,):
        state = Path(f"/proc/{writer.pid}/stat")
        wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", writer)
        assert list(DATA.glob("*.unfinished*"))
        yield writer


# ---- two writers


def test_of_two_texts_for_one_name_the_second_is_refused_and_a_run_waits_for_the_first(
    being_written, tmp_path
):
    A.write_text("Another text.")
    second = run("data/text.py", "a.txt", "--name", "mine", cwd=tmp_path, status=2)
    assert second.stdout == ""
    message = "data/mine: another process is writing it; wait for it, or choose another"
    assert second.stderr == f"error: {message} name\n"
    with begin("-c", PREPARE, "data/mine") as (waiter,):
        wait_until_it_waits(waiter)
        being_written.send_signal(signal.SIGCONT)
        out, _ = being_written.communicate()
        assert waiter.communicate() == (f"{WAITING}\n", "")
    assert f"{len(tokens_of())} tokens of 1 documents in data/mine" in out
    assert get_encoding().decode(tokens_of()[1:]) == "It was a bright cold day in April."
    assert names() == ["mine"]


# ---- writers that die, are interrupted or fail


def test_ctrl_c_says_so_and_leaves_nothing_behind(being_written):
    with begin("-c", PREPARE, "data/mine") as (waiter,):
        wait_until_it_waits(waiter)
        again = "; run the same command again to resume"
        for process, what_next in ((waiter, ""), (being_written, again)):
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGCONT)
            assert process.communicate()[1] == f"error: interrupted{what_next}\n"
            assert process.returncode == 130
    assert not names()


# ---- a corpus that changes while in use


def test_a_file_in_use_may_be_replaced_or_deleted_and_one_that_shrinks_is_an_error_not_a_crash():
    write_corpus(MINE, [range(2000)])
    path = MINE / "mine_train_000000.bin"
    split, val = open_corpus(MINE, 4, 2**16, 0.1)
    reads = [lambda: str(split.read([100])), lambda: str(val.read([0])), split.fingerprint]
    before = [read() for read in reads]
    path.rename("away")
    write_token_file(path, [[7]])
    assert [read() for read in reads] == before
    path.unlink()
    assert [read() for read in reads] == before
    os.truncate("away", 3000)
    for read in (reads[1], lambda: split.read([0, 300])):
        with refused(f"{path}: became shorter while in use; restore it"):
            read()
    split.read([0])


# ---- a project that was moved


def test_a_moved_project_says_how_to_name_its_corpus_and_resumes_with_it(tmp_path, monkeypatch):
    old = tmp_path / "old"
    (write_tiny_corpus(old) / "tiny").rename(old / "data/mine")
    monkeypatch.chdir(old)
    options = {"seq_len": 32, "batch_size": 4, "max_steps": 2, "device": "cpu"}
    train(load_config(**TINY, **options, run_name="run", dataset="mine"), ALONE)
    monkeypatch.chdir(old.rename(tmp_path / "new"))
    resume = {"max_steps": 4, "device": "cpu", "resume": "logs/run"}
    with refused("data/mine: no such corpus .*or say with --data_dir which folder holds it"):
        train(load_config(**resume), ALONE)
    assert train(load_config(**resume, data_dir="data"), ALONE)["steps"] == 4
    assert train(load_config(**resume | {"max_steps": 5}), ALONE)["steps"] == 5
