"""Faults of a corpus while it is written or in use: two writers, kill -9, Ctrl-C, a file that
shrinks, a moved project, odd names.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from config import load_config
from data.prepare import prepare_if_missing
from data.token_file import TokenFileError, write_corpus, write_token_file
from data.tokenizer import END_OF_TEXT, get_encoding
from dataloader import open_corpus
from runtime.errors import reported
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
MINE, PYDOCS, TINY_CORPUS = DATA / "mine", DATA / "pydocs", DATA / "tiny"
A = Path("a.txt")
WAITING = "another process is writing data/{}: waiting for it"
PREPARE = f"""import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from data.prepare import prepare_if_missing
from runtime.errors import reported
with reported("data"):
    prepare_if_missing(Path(sys.argv[1]))
"""


def tokens_of(folder=MINE):
    return [token for path in sorted(folder.glob("*.bin")) for token in tokens_in(path).tolist()]


def names(folder=DATA):
    return sorted(path.name for path in folder.iterdir())


def begin(*command, before=None):
    """A command in the background, which is gone at the end."""
    return ended([start(*command, cwd=Path.cwd(), before=before)])


def wait_until_it_waits(process, corpus="mine"):
    wait_for(lambda: WAITING.format(corpus) in process.out.read_text(), process)


def stop_in_the_middle():
    """Let this process stop, until SIGCONT, when it opens the first token file to write."""

    def stop(event, args):
        is_written = event == "open" and args[1] in ("w", "a")
        if is_written and str(args[0]).endswith("_train_000000.bin"):
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(stop)


@contextlib.contextmanager
def stopped_in_the_middle(*command):
    """A process that is writing a corpus, and has stopped."""
    with begin(*command, before=stop_in_the_middle) as (writer,):
        state = Path(f"/proc/{writer.pid}/stat")
        wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", writer)
        assert list(DATA.glob("*.unfinished*"))
        yield writer


@pytest.fixture
def being_written(in_tmp_path):
    """A data/text.py stopped in the middle of writing the corpus data/mine."""
    Path("mine.txt").write_text("It was a bright cold day in April.")
    with stopped_in_the_middle("data/text.py", "mine.txt") as writer:
        yield writer


# ---- two writers


def test_of_two_texts_for_one_name_the_second_is_refused_at_once_and_none_is_lost(
    being_written, tmp_path
):
    A.write_text("Another text.")
    second = run("data/text.py", "a.txt", "--name", "mine", cwd=tmp_path)
    assert (second.returncode, second.stdout) == (1, "")
    message = "data/mine: another process is writing this corpus; wait for it, or choose another"
    assert second.stderr == f"error: {message} name\n"
    being_written.send_signal(signal.SIGCONT)
    out, _ = being_written.communicate()
    assert f"{len(tokens_of())} tokens of 1 documents in data/mine" in out
    assert get_encoding().decode(tokens_of()[1:]) == "It was a bright cold day in April."
    assert names() == ["mine"]


def test_a_corpus_that_is_copied_there_while_another_is_written_is_not_replaced_nor_taken_for_it():
    def parts():
        yield [1, 2, 3]
        MINE.mkdir()
        write_token_file(MINE / "mine_train_000000.bin", [[7]])

    with refused("mine: cannot be written: is there already"):
        write_corpus(MINE, parts())
    assert tokens_of() == [7]
    assert names() == ["mine"]


def test_a_run_waits_for_a_text_that_is_being_written_and_then_finds_it(being_written):
    with begin("-c", PREPARE, "data/mine") as (waiter,):
        wait_until_it_waits(waiter)
        being_written.send_signal(signal.SIGCONT)
        out, err = waiter.communicate()
    assert (out, err) == (WAITING.format("mine") + "\n", "")
    assert tokens_of()[0] == END_OF_TEXT


def test_who_waits_for_a_writer_that_dies_writes_the_corpus_itself():
    with (
        stopped_in_the_middle("data/pydocs.py") as writer,
        begin("-c", PREPARE, "data/pydocs") as (waiter,),
    ):
        wait_until_it_waits(waiter, "pydocs")
        writer.kill()
        out, err = waiter.communicate()
    assert out.splitlines()[1:] == ["preparing data/pydocs"], err
    assert tokens_of(PYDOCS)[0] == END_OF_TEXT
    assert names() == ["pydocs"]


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


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("a.txt/mine", r"^a.txt/mine: cannot be written: File exists \(/"),
        ("/proc/no/mine", r"^/proc/no/mine: cannot be written: No such file .* \(/"),
        ("data/" + "x" * 250, "cannot be written: File name too long"),
    ],
)
def test_a_place_that_no_corpus_can_have_is_one_line(folder, message):
    A.write_text("A text.")
    with refused(message) as error:
        write_corpus(Path(folder), [[1]])
    assert "\n" not in str(error.value)
    assert not [*Path().rglob("*x*/*"), *Path().glob("data/*")]


def test_a_corpus_that_is_there_already_takes_no_right_to_write(monkeypatch):
    write_corpus(MINE, [[1, 2]])
    monkeypatch.setattr("data.prepare.corpus_writer", None)
    prepare_if_missing(MINE)


def test_a_missing_corpus_is_named_with_the_command_that_writes_it_quoted_for_the_shell():
    Path("my corpora").mkdir()
    with refused("python data/text.py FILE --name minf --data_dir 'my corpora';"):
        prepare_if_missing(Path("my corpora/minf"))


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
        with refused(f"{path}: became shorter while in use; restore it, then resume") as lost:
            read()
        assert lost.value.status == 1  # nobody typed anything wrong
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


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TokenFileError("x\x1b[31m"), r"x\x1b[31m"),
        (
            RuntimeError("can't start new thread"),
            "can't start new thread: raise the limit of processes (ulimit -u)",
        ),
    ],
    ids=["control characters", "threads"],
)
def test_an_error_is_a_line_that_a_terminal_shows_as_it_is(error, line, capsys):
    with pytest.raises(SystemExit), reported("data"):
        raise error
    assert capsys.readouterr().err == f"error: {line}\n"
