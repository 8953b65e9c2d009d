"""What can happen to a corpus while it is written or in use: two writers, kill -9, Ctrl-C, touch, a
moved project, odd names.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import data.pydocs
import data.token_file
import dataloader
from checkpoint.files import CheckpointError
from config import load_config
from data import text
from data.prepare import prepare_if_missing
from data.sources import BadRecords, find_source, read_pieces
from data.token_file import TokenFile, TokenFileError, write_corpus, write_token_file
from data.tokenizer import END_OF_TEXT, get_encoding, size
from dataloader import DataLoader, open_corpus
from runtime.files import lock_file, sole_writer
from tests.conftest import (
    ALONE,
    ROOT,
    TINY,
    at_step,
    ended,
    run,
    start,
    tokens_in,
    wait_for,
    write_tiny_corpus,
)
from train import train

BEGIN = f"import sys, time; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path\n"


def tokens_of(folder):
    return [token for path in sorted(folder.glob("*.bin")) for token in tokens_in(path).tolist()]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def printed(process):
    return process.out.read_text() if process.out.exists() else ""


def stop_in_the_middle():
    """Let this process stop, until SIGCONT, when it opens the first token file to write."""

    def stop(event, args):
        if event == "open" and str(args[0]).endswith("_train_000000.bin") and args[1] == "w":
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(stop)


@contextlib.contextmanager
def stopped_in_the_middle(*command, cwd):
    """A process that is writing a corpus, and has stopped."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs Linux, to see that a process has stopped")
    with ended([start(*command, cwd=cwd, before=stop_in_the_middle)]) as (writer,):
        wait_for(
            lambda: (
                Path(f"/proc/{writer.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
            ),
            writer,
        )
        assert list(cwd.glob("data/*.tmp"))
        yield writer


@pytest.fixture
def being_written(tmp_path):
    """A data/text.py stopped in the middle of writing the corpus data/mine."""
    (tmp_path / "mine.txt").write_text("It was a bright cold day in April.")
    with stopped_in_the_middle("data/text.py", "mine.txt", cwd=tmp_path) as writer:
        yield writer


# ---- two writers


def test_of_two_texts_for_one_name_the_second_is_refused_at_once_and_none_is_lost(
    being_written, tmp_path
):
    (tmp_path / "other.txt").write_text("Another text.")
    second = run("data/text.py", "other.txt", "--name", "mine", cwd=tmp_path)
    assert (second.returncode, second.stdout) == (1, "")
    message = "data/mine: another process is writing this corpus; wait for it, or choose another"
    assert second.stderr == f"error: {message} name\n"
    being_written.send_signal(signal.SIGCONT)
    out, _ = being_written.communicate()
    assert being_written.returncode == 0
    assert f"{len(tokens_of(tmp_path / 'data/mine'))} tokens in data/mine" in out
    assert (
        get_encoding().decode(tokens_of(tmp_path / "data/mine")[1:])
        == "It was a bright cold day in April."
    )
    assert names(tmp_path / "data") == ["mine"]


def test_of_many_writers_at_one_moment_exactly_one_says_that_it_wrote(tmp_path):
    code = (
        f"{BEGIN}from data.token_file import write_corpus\n"
        f"write_corpus(Path('new/mine'), [[int(sys.argv[1])] * 9]); print(sys.argv[1])"
    )
    with ended([start("-c", code, str(i), cwd=tmp_path) for i in range(6)]) as writers:
        all_printed = [writer.communicate() for writer in writers]
    (winner,) = [out for out, _ in all_printed if out]
    assert tokens_of(tmp_path / "new" / "mine") == [int(winner)] * 9
    for out, err in all_printed:
        assert out or "is there already" in err or "another process is writing this corpus" in err
    assert names(tmp_path / "new") == ["mine"]


def test_a_corpus_that_is_copied_there_while_another_is_written_is_not_replaced_nor_taken_for_it(
    tmp_path,
):
    folder = tmp_path / "mine"

    def parts():
        yield [1, 2, 3]
        write_token_file((tmp_path / "theirs.bin"), [[7]])
        folder.mkdir()
        (tmp_path / "theirs.bin").rename(folder / "mine_train_000000.bin")

    with pytest.raises(TokenFileError, match=r"mine: cannot be written: is there already"):
        write_corpus(folder, parts())
    assert tokens_of(folder) == [7]
    assert names(tmp_path) == ["mine"]


def test_two_first_runs_at_once_share_the_corpus_that_one_of_them_prepares(tmp_path):
    sizes = "--n_layer 1 --n_head 1 --n_embd 8 --block_size 16 --seq_len 16 --batch_size 1"
    options = f"{sizes} --max_steps 1 --device cpu --keep_last 0".split()
    with (
        stopped_in_the_middle("train.py", *options, "--run_name", "a", cwd=tmp_path) as first,
        ended([start("train.py", *options, "--run_name", "b", cwd=tmp_path)]) as (second,),
    ):
        wait_for(
            lambda: "another process is writing data/pydocs: waiting for it" in printed(second),
            second,
        )
        first.send_signal(signal.SIGCONT)
        outputs = [process.communicate() for process in (first, second)]
        assert [first.returncode, second.returncode] == [0, 0], outputs
    assert ["preparing data/pydocs" in out for out, _ in outputs] == [True, False]
    assert all("step 1/1 | loss" in out for out, _ in outputs)
    assert names(tmp_path / "data") == ["pydocs"]


def test_a_run_waits_for_a_text_that_is_being_written_and_then_finds_it(being_written, tmp_path):
    said = []

    def go_on(line):
        said.append(line)
        being_written.send_signal(signal.SIGCONT)

    prepare_if_missing(tmp_path / "data/mine", go_on)
    assert said == [f"another process is writing {tmp_path}/data/mine: waiting for it"]
    assert tokens_of(tmp_path / "data/mine")[0] == END_OF_TEXT


def test_who_waits_for_a_writer_that_dies_writes_the_corpus_itself(tmp_path):
    with stopped_in_the_middle("data/pydocs.py", cwd=tmp_path) as writer:
        code = (
            f"{BEGIN}from data.prepare import prepare_if_missing\n"
            f"prepare_if_missing(Path('data/pydocs'), lambda line: print(line, flush=True))"
        )
        with ended([start("-c", code, cwd=tmp_path)]) as (waiter,):
            wait_for(lambda: "waiting for it" in printed(waiter), waiter)
            writer.kill()
            out, err = waiter.communicate()
            assert waiter.returncode == 0, err
    assert out.splitlines()[1] == "preparing data/pydocs"
    assert tokens_of(tmp_path / "data/pydocs")[0] == END_OF_TEXT
    assert names(tmp_path / "data") == ["pydocs"]


def test_who_has_the_right_to_write_may_enter_it_again_and_gives_it_back_at_the_end(tmp_path):
    folder = tmp_path / "deep" / "mine"
    with sole_writer(folder):
        with sole_writer(folder):
            pass
        assert lock_file(folder).exists()
    assert list(tmp_path.iterdir()) == []


# ---- writers that die, are interrupted or fail


def test_what_a_killed_writer_left_is_deleted_by_the_next_and_nothing_else(being_written, tmp_path):
    being_written.kill()
    being_written.wait()
    (leftover,) = tmp_path.glob("data/mine.*.tmp")
    others = ["mine.2", "mine.more.77.tmp", "77.tmp", "yours.77.tmp", "xmine.77.tmp"]
    for name in others:
        (tmp_path / "data" / name).mkdir()
    (tmp_path / "data" / "mine.4711.tmp").mkdir()  # of an older writer
    with pytest.raises(
        TokenFileError,
        match=r"minf: no such corpus .*: python data/text.py FILE --name minf --data_dir ",
    ) as error:
        prepare_if_missing(tmp_path / "data/minf", print)
    assert leftover.name not in str(error.value)
    text.prepare(tmp_path / "data/mine", [ROOT / "LICENSE"])
    assert names(tmp_path / "data") == sorted(["mine", *others])


def test_ctrl_c_while_a_text_is_written_says_so_and_leaves_nothing_behind(being_written, tmp_path):
    being_written.send_signal(signal.SIGINT)
    being_written.send_signal(signal.SIGCONT)
    out, err = being_written.communicate()
    assert (being_written.returncode, out, err) == (130, "", "error: interrupted\n")
    assert names(tmp_path) == ["mine.txt"]


def test_ctrl_c_while_another_is_waited_for_says_so(being_written, tmp_path):
    code = (
        f"{BEGIN}from data.prepare import prepare_if_missing\nfrom runtime.errors import reported\n"
        f"with reported('data'): prepare_if_missing(Path('data/mine'), lambda line: print(line, "
        f"flush=True))"
    )
    with ended([start("-c", code, cwd=tmp_path)]) as (waiter,):
        wait_for(lambda: "waiting for it" in printed(waiter), waiter)
        waiter.send_signal(signal.SIGINT)
        _, err = waiter.communicate()
        assert (waiter.returncode, err) == (130, "error: interrupted\n")
    being_written.send_signal(signal.SIGCONT)
    assert "tokens in data/mine" in being_written.communicate()[0]


def test_a_text_that_cannot_be_written_leaves_no_folder_that_was_made_for_it(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"good text, then \xff")
    with pytest.raises(TokenFileError, match="not UTF-8"):
        text.prepare(tmp_path / "new" / "data" / "bad", [tmp_path / "bad.txt"])
    assert names(tmp_path) == ["bad.txt"]
    with pytest.raises(TokenFileError, match="not UTF-8"):
        text.prepare(tmp_path / "bad", [tmp_path / "bad.txt"])
    assert names(tmp_path) == ["bad.txt"]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file.txt", "File exists"),
        ("file.txt/deeper", "Not a directory"),
        ("/proc/nothing", "No such file or directory"),
    ],
)
def test_a_place_where_no_corpus_can_be_written_is_one_line(place, reason, tmp_path):
    (tmp_path / "file.txt").write_text("A text.")
    done = run("data/text.py", "file.txt", "--name", "mine", "--data_dir", place, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {place}/mine: cannot be written: {reason} (/")
    assert names(tmp_path) == ["file.txt"]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_read_only_place_is_one_line_and_what_is_there_already_can_be_used(tmp_path):
    write_corpus(tmp_path / "mine", [[1, 2]])
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(TokenFileError, match=r"pydocs: cannot be written: Permission denied"):
            prepare_if_missing(tmp_path / "pydocs", print)
        prepare_if_missing(tmp_path / "mine", print)
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize(
    "name", ["a/b", "..", "mine.1.tmp", "-x", "a\nb", "shakespeare", "x" * 250]
)
def test_a_name_that_no_corpus_can_have_is_one_line(name, tmp_path):
    (tmp_path / "a.txt").write_text("A text.")
    done = run("data/text.py", "a.txt", f"--name={name}", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    message = "must be a plain name|is the corpus that data/shakespeare.py|File name too long"
    assert re.match(rf"error: .*({message})", line)
    assert names(tmp_path) == ["a.txt"]


def test_a_corpus_that_cannot_be_looked_into_is_not_taken_for_a_missing_one(tmp_path):
    (tmp_path / "pydocs").symlink_to("pydocs")
    with pytest.raises(TokenFileError, match="pydocs: cannot be read: "):
        prepare_if_missing(tmp_path / "pydocs", print)


def test_the_command_that_writes_a_missing_corpus_is_quoted_for_the_shell(tmp_path):
    with pytest.raises(TokenFileError, match=r"--data_dir '.*my corpora';"):
        prepare_if_missing(tmp_path / "my corpora" / "mine", print)


def with_stdout(stdout, *command, cwd):
    command = [sys.executable, ROOT / command[0], *command[1:]]
    return subprocess.run(command, cwd=cwd, text=True, stdout=stdout, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    "command", [("data/text.py", "a.txt"), ("data/tokenizer.py", "Hello, you")]
)
def test_a_reader_that_goes_away_is_no_traceback(command, tmp_path):
    (tmp_path / "a.txt").write_text("A text.")
    reader, writer = os.pipe()
    os.close(reader)
    done = with_stdout(writer, *command, cwd=tmp_path)
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_output_that_cannot_be_written_is_not_said_to_be_a_fault_of_the_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("A text.")
    with open("/dev/full", "w") as full:
        done = with_stdout(full, "data/text.py", "a.txt", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("error: stdout: No space left on device\n")
    assert names(tmp_path / "data" / "a") == ["a_train_000000.bin"]


def test_a_corpus_has_the_permissions_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        write_corpus(tmp_path / "mine", [[1, 2]])
    finally:
        os.umask(before)
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "mine" / "mine_train_000000.bin").stat().st_mode & 0o777 == 0o640


# ---- texts


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    for name, content in (("a", b"\xef\xbb\xbfHello\xef\xbb\xbf"), ("b", b"\xef\xbb\xbfHello")):
        (tmp_path / name).write_bytes(content)
    text.prepare(tmp_path / "mine", [tmp_path / "a", tmp_path / "b"])
    encode = get_encoding().encode_ordinary
    assert tokens_of(tmp_path / "mine") == [
        END_OF_TEXT,
        *encode("Hello\ufeff"),
        END_OF_TEXT,
        *encode("Hello"),
    ]


def test_a_text_that_is_nothing_but_a_byte_order_mark_is_empty(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(TokenFileError, match=r"a\.txt: is empty"):
        text.prepare(tmp_path / "mine", [tmp_path / "a.txt"])
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("content", ["", "other words" * 2**18], ids=["cut short", "rewritten"])
def test_a_text_that_is_changed_while_it_is_read_is_refused(content, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("A text." * 2**19)
    pieces = read_pieces(find_source(path, ".txt"), "", BadRecords(0))
    next(pieces)
    path.write_text(content)
    with pytest.raises(TokenFileError, match=r"a\.txt: was changed while it was read"):
        list(pieces)


def test_end_of_text_in_a_text_stays_text_and_is_told_once(tmp_path, capsys):
    separator = "<|endoftext|>"
    across = (
        "x" * (2**20 - 5) + separator + " and " + separator * 2
    )  # the first lies across two of the pieces that are read
    for name, content in (("a.txt", "None here."), ("b.txt", across), ("c.txt", separator)):
        (tmp_path / name).write_text(content)
    text.prepare(tmp_path / "mine", [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")])
    *_, note = capsys.readouterr().err.splitlines()
    assert note.startswith(
        f"note: {separator} is in the text of {tmp_path}/b.txt and 1 more, 4 times in all: it was "
        "written as ordinary text, "
    )
    tokens = tokens_of(tmp_path / "mine")
    assert tokens.count(END_OF_TEXT) == 3
    assert tokens[-7:] == get_encoding().encode_ordinary(separator)
    text.prepare(tmp_path / "never", [tmp_path / "a.txt"])
    assert "endoftext" not in capsys.readouterr().err


def test_the_size_of_a_short_text_is_told_in_kb(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("Hello" * 5)
    text.prepare(tmp_path / "mine", [tmp_path / "a.txt"])
    assert capsys.readouterr().err == "tokenized a.txt: 0.025 kB\n"
    assert [size(n) for n in (1, 12_345, 99_999, 100_000, 8_666_348)] == [
        "0.001 kB",
        "12.3 kB",
        "100 kB",
        "0.1 MB",
        "8.7 MB",
    ]


# ---- a corpus that is touched, or changed, while in use

TOUCHES = {
    "touched": lambda path: os.utime(path, (1, 1)),
    "copied over itself": lambda path: path.write_bytes(path.read_bytes()),
    "replaced by its like": lambda path: (
        shutil.copy(path, path.with_suffix(".new")) and path.with_suffix(".new").replace(path)
    ),
    "gone and restored": lambda path: (
        path.rename(path.with_suffix(".away")),
        shutil.copy(path.with_suffix(".away"), path),
    ),
}


def change_a_token(path, token=1999):
    content = bytearray(path.read_bytes())
    content[1024 + 2 * token] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("large", [False, True], ids=["compared whole", "compared by samples"])
@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES.keys())
def test_a_file_whose_content_stays_the_same_can_be_touched_while_in_use(
    touch, large, tmp_path, monkeypatch
):
    if large:
        monkeypatch.setattr(dataloader, "COMPARED_WHOLE", 0)
        monkeypatch.setattr(data.token_file, "SAMPLE", 10)
    write_corpus(tmp_path / "c", [range(2000)])
    path = tmp_path / "c" / "c_train_000000.bin"
    train_split, val = open_corpus(tmp_path / "c", 4, 2**16, 0.1)
    loader = DataLoader(train_split, batch_size=2)
    expected, fingerprint = loader.batch(3), train_split.fingerprint()
    for _ in range(2):
        touch(path)
        assert all(
            torch.equal(now, before) for now, before in zip(loader.batch(3), expected, strict=True)
        )
        assert train_split.fingerprint() == fingerprint
        assert int(val.read([0])[0][0, 0]) == 1800
    change_a_token(path)
    for read in (lambda: loader.batch(3), lambda: val.read([0]), train_split.fingerprint):
        with pytest.raises(
            TokenFileError,
            match=r"was changed or replaced while in use; restore it, then resume with --resume",
        ):
            read()
    change_a_token(path)  # restored
    assert torch.equal(loader.batch(3)[0], expected[0])


def test_a_large_file_is_compared_by_its_count_and_the_fingerprints_samples(tmp_path):
    path = tmp_path / "x.bin"
    tokens = torch.arange(3_000_000).remainder(50_000).numpy()
    write_token_file(path, [tokens])
    file = TokenFile(path, compared_whole=1000)
    change_a_token(path, token=2**12 + 1)  # between the first sample and the second
    file.read([0], 1)
    change_a_token(path, token=2_999_999)  # the last token is in the last sample
    with pytest.raises(TokenFileError, match="was changed or replaced"):
        file.read([0], 1)
    write_token_file(path, [tokens[:-1]])
    with pytest.raises(TokenFileError, match="was changed or replaced"):
        file.read([0], 1)


def test_a_run_goes_on_through_touches_of_its_corpus_to_the_same_losses(tiny_config, monkeypatch):
    def losses(name):
        train(tiny_config(run_name=name, max_steps=8, eval_every=4, val_fraction=0.2), ALONE)
        return [
            line.split(",")[:2]
            for line in (Path(tiny_config().log_dir) / name / "log.csv").read_text().splitlines()
        ]

    undisturbed = losses("undisturbed")
    (path,) = Path(tiny_config().data_dir).glob("tiny/*.bin")
    # of the ways to do it, those that leave no moment without the file: it is read ahead in a
    # thread
    touches = itertools.cycle([TOUCHES["touched"], TOUCHES["replaced by its like"]])
    at_step(monkeypatch, lambda *_: next(touches)(path) and None)
    assert losses("touched") == undisturbed


# ---- a project that was moved


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a run of 2 steps, moved from `old` to `new`, where we are; returns a function
    that resumes the run.
    """

    def config(**options):
        return load_config(**TINY, device="cpu", seq_len=32, batch_size=4, max_steps=2, **options)

    def resume(dataset="tiny", **options):
        return train(
            load_config(resume=f"logs/{dataset}", device="cpu", **({"max_steps": 4} | options)),
            ALONE,
        )

    old, new = tmp_path / "old", tmp_path / "new"
    write_tiny_corpus(old)
    (old / "data" / "tiny").rename(old / "data" / "pydocs")
    shutil.copytree(old / "data" / "pydocs", old / "data" / "tiny")
    monkeypatch.chdir(old)
    for dataset in ("tiny", "pydocs"):
        train(config(run_name=dataset, dataset=dataset), ALONE)
    monkeypatch.chdir(tmp_path)
    old.rename(new)
    monkeypatch.chdir(new)
    return resume


@pytest.mark.parametrize("dataset", ["tiny", "pydocs"])
def test_a_moved_project_goes_on_with_the_corpus_that_moved_with_it(
    dataset, project, tmp_path, capsys
):
    assert project(dataset)["steps"] == 4
    assert (
        f"note: the corpus is no longer in {tmp_path}/old/data: it is read from data/{dataset}\n"
        in capsys.readouterr().out
    )
    assert "data_dir: data\n" in Path(f"logs/{dataset}/config.yaml").read_text()
    project(dataset, max_steps=5)  # its checkpoints name the new place
    assert "no longer" not in capsys.readouterr().out
    assert names(tmp_path) == ["new"]


def test_a_moved_project_does_not_go_on_with_another_corpus_of_that_name(project, tmp_path):
    shutil.rmtree("data/tiny")
    write_corpus(Path("data/tiny"), [[5] * 4000])
    with pytest.raises(CheckpointError, match=r"was trained on another corpus than data/tiny"):
        project()


def test_a_small_corpus_of_a_moved_project_is_prepared_where_it_is_now(
    project, tmp_path, monkeypatch
):
    corpus = tokens_of(Path("data/pydocs"))
    monkeypatch.setattr(data.pydocs, "prepare", lambda folder: write_corpus(folder, [corpus]))
    shutil.rmtree("data")
    assert project("pydocs")["steps"] == 4
    assert names(Path("data")) == ["pydocs"]
    assert names(tmp_path) == ["new"]


def test_without_the_corpus_a_moved_project_says_how_to_name_its_place(project, tmp_path):
    Path("data").rename(tmp_path / "elsewhere")
    with pytest.raises(
        TokenFileError,
        match=r"data/tiny: no such corpus .*or say with --data_dir which folder holds it",
    ):
        project()
    assert project(data_dir=str(tmp_path / "elsewhere"))["steps"] == 4


def test_a_data_dir_that_was_given_or_is_still_there_is_kept(project, tmp_path):
    with pytest.raises(TokenFileError, match=rf"{tmp_path}/no/tiny: no such corpus"):
        project(data_dir=str(tmp_path / "no"))
    (tmp_path / "old").mkdir()
    Path("data").rename(tmp_path / "old" / "data")
    write_corpus(Path("data/tiny"), [[5] * 4000])
    assert project()["steps"] == 4
