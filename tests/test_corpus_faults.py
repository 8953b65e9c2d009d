"""What can happen to a corpus while it is written or in use: two writers, kill -9, Ctrl-C, touch, a
moved project, odd names.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import data.pydocs
import data.token_file
import dataloader
from config import load_config
from data import text
from data.prepare import prepare_if_missing
from data.sources import BadRecords, find_source, read_pieces
from data.text import TextOptions
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
        if event == "open" and str(args[0]).endswith("_train_000000.bin") and args[1] == "w":
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(stop)


@contextlib.contextmanager
def stopped_in_the_middle(*command):
    """A process that is writing a corpus, and has stopped."""
    with begin(*command, before=stop_in_the_middle) as (writer,):
        state = Path(f"/proc/{writer.pid}/stat")
        wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", writer)
        assert list(DATA.glob("*.tmp"))
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
    assert f"{len(tokens_of())} tokens in data/mine" in out
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


def test_two_first_runs_at_once_share_the_corpus_that_one_of_them_prepares():
    sizes = "--n_layer 1 --n_head 1 --n_embd 8 --block_size 16 --seq_len 16 --batch_size 1"
    command = f"train.py {sizes} --max_steps 1 --device cpu --keep_last 0 --run_name".split()
    with stopped_in_the_middle(*command, "a") as first, begin(*command, "b") as (second,):
        wait_until_it_waits(second, "pydocs")
        first.send_signal(signal.SIGCONT)
        outputs = [process.communicate() for process in (first, second)]
    assert ["preparing data/pydocs" in out for out, _ in outputs] == [True, False], outputs
    assert all("step 1/1 | loss" in out for out, _ in outputs), outputs
    assert names() == ["pydocs"]


def test_a_run_waits_for_a_text_that_is_being_written_and_then_finds_it(being_written):
    said = []

    def go_on(line):
        said.append(line)
        being_written.send_signal(signal.SIGCONT)

    prepare_if_missing(MINE, go_on)
    assert said == [WAITING.format("mine")]
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


def test_what_a_killed_writer_left_is_deleted_by_the_next_and_nothing_else(being_written):
    being_written.kill()
    being_written.wait()
    (leftover,) = DATA.glob("mine.*.tmp")
    others = ["mine.2", "mine.more.77.tmp", "77.tmp", "yours.77.tmp", "xmine.77.tmp"]
    for name in [*others, "mine.4711.tmp"]:  # the last: of an older writer
        (DATA / name).mkdir()
    with refused("minf: no such corpus .*: python data/text.py FILE --name minf;") as error:
        prepare_if_missing(DATA / "minf", print)
    assert leftover.name not in str(error.value)
    text.prepare(MINE, [ROOT / "LICENSE"])
    assert names() == sorted(["mine", *others])


def test_ctrl_c_says_so_and_leaves_nothing_behind(being_written):
    with begin("-c", PREPARE, "data/mine") as (waiter,):
        wait_until_it_waits(waiter)
        for process in (waiter, being_written):
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGCONT)
            assert process.communicate()[1] == "error: interrupted\n"
            assert process.returncode == 130
    assert names(Path()) == ["mine.txt"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("data_dir", "a.txt", r"^a.txt/mine: cannot be written: File exists \(/"),
        ("data_dir", "/proc/no", r"^/proc/no/mine: cannot be written: No such file .* \(/"),
        ("name", "fineweb", "is the corpus that data/fineweb.py writes"),
        ("name", "x" * 250, "cannot be written: File name too long"),
        *(
            ("name", name, "must be a plain name")
            for name in ("a/b", "..", "mine.1.tmp", "-x", "a\nb")
        ),
    ],
)
def test_a_place_or_a_name_that_no_corpus_can_have_is_one_line(option, value, message):
    A.write_text("A text.")
    with refused(message) as error:
        text.main(TextOptions(**({"files": ("a.txt",), "name": "mine"} | {option: value})))
    assert "\n" not in str(error.value)
    assert names(Path()) == ["a.txt"]


def test_a_corpus_that_is_there_already_takes_no_right_to_write(monkeypatch):
    write_corpus(MINE, [[1, 2]])
    monkeypatch.setattr("data.prepare.corpus_writer", None)
    prepare_if_missing(MINE, print)


def test_the_command_that_writes_a_missing_corpus_is_quoted_for_the_shell():
    with refused("--data_dir 'my corpora';"):
        prepare_if_missing(Path("my corpora/mine"), print)


# ---- texts


def test_a_text_that_is_changed_while_it_is_read_is_refused():
    A.write_text("A text." * 2**19)
    pieces = read_pieces(find_source(A, ".txt"), "", BadRecords(0))
    next(pieces)
    A.write_text("")
    with refused(r"a\.txt: was changed while it was read"):
        list(pieces)


def test_end_of_text_in_a_text_stays_text_and_is_told_once(capsys):
    separator, b = "<|endoftext|>", Path("b.txt")
    A.write_text("None here.")
    # the first lies across two of the pieces that are read
    b.write_text("x" * (2**20 - 5) + separator + " and\n" + separator)
    text.prepare(MINE, [A, b])
    *_, note = capsys.readouterr().err.splitlines()
    start = f"note: {separator} is in the text of b.txt, 2 times in all: it was written"
    assert note.startswith(f"{start} as ordinary text, ")
    assert tokens_of().count(END_OF_TEXT) == 2
    assert tokens_of()[-7:] == get_encoding().encode_ordinary(separator)


# ---- a corpus that is touched, or changed, while in use


TOUCHES = {
    "touched": lambda path: os.utime(path, (1, 1)),
    "copied over itself": lambda path: path.write_bytes(path.read_bytes()),
    "replaced by its like": lambda path: Path(shutil.copy(path, "new")).replace(path),
    "gone and restored": lambda path: shutil.copy(path.rename("away"), path),
}


def change_the_last_token(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("large", [False, True], ids=["compared whole", "compared by samples"])
@pytest.mark.parametrize("touch", TOUCHES)
def test_a_file_whose_content_stays_the_same_can_be_touched_while_in_use(touch, large, monkeypatch):
    if large:
        monkeypatch.setattr(dataloader, "COMPARED_WHOLE", 0)
        monkeypatch.setattr(data.token_file, "SAMPLE", 10)
    write_corpus(MINE, [range(2000)])
    path = MINE / "mine_train_000000.bin"
    train_split, val = open_corpus(MINE, 4, 2**16, 0.1)
    reads = [lambda: str(val.read([0])), train_split.fingerprint]
    expected = [read() for read in reads]
    for _ in range(2):
        TOUCHES[touch](path)
        assert [read() for read in reads] == expected
    change_the_last_token(path)
    os.utime(path, (2, 2))  # the system's clock of files has steps of some milliseconds
    for read in reads:
        with refused("was changed or replaced while in use; restore it, then resume with --resume"):
            read()
    change_the_last_token(path)  # restored
    assert [read() for read in reads] == expected


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


# ---- files that are not what they seem


def test_a_file_that_is_rewritten_in_place_is_noticed_though_its_mtime_is_put_back():
    write_corpus(MINE, [range(2000)])
    path = MINE / "mine_train_000000.bin"
    split, _ = open_corpus(MINE, 4, 2**16)
    before = path.stat().st_mtime_ns
    time.sleep(0.02)  # the system's clock of files has steps of some milliseconds
    change_the_last_token(path)
    os.utime(path, ns=(before, before))
    with refused("was changed or replaced while in use"):
        split.read([0])


@pytest.mark.parametrize(
    "shards", [{}, {"shards": [{"file": "../x.bin", "tokens": 1, "sha256": ""}]}], ids=str
)
def test_a_manifest_without_shards_or_with_one_of_another_folder_is_refused(shards):
    write_corpus(MINE, [range(2000)])
    counts = dict.fromkeys(("shard_tokens", "val_shards", "val_shard_tokens"), 1)
    manifest = {"corpus": "mine", "options": {"text_column": "text", **counts}, "sources": []}
    (MINE / "manifest.json").write_text(json.dumps(manifest | shards))
    with refused("damaged or edited"):
        open_corpus(MINE, 4, 2**16)


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
