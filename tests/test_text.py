"""data/text.py and data/fineweb.py: every token is tiktoken's in every format, also after
kill -9 at any moment.
"""

import contextlib
import csv
import gzip
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from data import fineweb, sources, text
from data.fineweb import FinewebOptions
from data.prepare import prepare_if_missing
from data.sources import kind_of
from data.text import WritingOptions, prepare
from data.token_file import write_token_file
from data.tokenizer import END_OF_TEXT, get_encoding
from dataloader import open_corpus
from runtime.files import unfinished_folder
from tests.conftest import refused, run, run_from_nothing, tokens_in

pytestmark = pytest.mark.usefixtures("in_tmp_path")
MINE, FINEWEB = Path("data/mine"), Path("data/fineweb")
UNFINISHED = unfinished_folder(MINE)
A, B = Path("a.jsonl"), Path("b.jsonl")
FORMATS = ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet"]
WORDS = ["the", "of", "and", "to", "is", "Zürich", "12,345", "'s", "\n\n", "😀", "\t"]
NASTY = ["", " ", "One.\r\nTwo.\r\n", "e\u0301 \u2028 \u00a0", "<|endoftext|> is text", "\ufeffa"]
NASTY += ["a" + " " * 300 + "b", "x1!" * 3000, "words of a long document, " * 6000, "nul \0"]
SEPARATOR = "<|endoftext|>"


def texts(n):
    """Documents of many lengths, the nasty ones among them."""
    rng = random.Random(n)
    plain = [" ".join(rng.choices(WORDS, k=int(rng.lognormvariate(4, 1.2)))) for _ in range(n)]
    for i, nasty in enumerate(NASTY):
        plain.insert(i * len(plain) // len(NASTY), nasty)
    return plain


def expected(documents):
    encode = get_encoding().encode_ordinary
    return [token for text in documents for token in (END_OF_TEXT, *encode(text))]


def write(name, documents, column="text"):
    """Write documents in the format of the file's ending."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": range(len(documents)), column: documents})
        parquet.write_table(table, path, row_group_size=7)
        return path
    file = io.StringIO()
    if kind_of(path) == "record":
        rows = csv.writer(file, "excel-tab" if "tsv" in name.lower() else "excel")
        rows.writerows([("\ufeffid", column), *enumerate(documents), ()])  # lines end with \r\n
    else:
        for i, text in enumerate(documents):
            file.write(json.dumps({"id": i, column: text}, ensure_ascii=i % 2 == 0) + "\n")
    content = file.getvalue().encode()
    half = len(content) // 2  # in two parts, as parallel writers make them
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix.lower(), bytes)
    path.write_bytes(pack(content[:half]) + pack(content[half:]))
    return path


def split_tokens(folder=MINE, split="train"):
    return [t for path in sorted(folder.glob(f"*_{split}_*.bin")) for t in tokens_in(path).tolist()]


def written(*named, folder=MINE, **options):
    """The training tokens of the corpus that is written, or resumed."""
    prepare(folder, named, WritingOptions(**({"shard_tokens": 5000} | options)))
    return split_tokens(folder)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- every token is tiktoken's


TABLES = ["a.csv", "b.TSV", "c.csv.gz", "d.tsv.zst"]


@pytest.mark.parametrize("name", [*FORMATS, "e.NDJSON", "f.JSONL.GZ", *TABLES])
def test_the_tokens_of_every_format_are_tiktokens_and_fill_the_token_files(name):
    documents = [*texts(100), 'a "quote", and a comma']
    tokens = written(write(name, documents))
    if name in TABLES:
        documents = [document.replace("\r\n", "\n") for document in documents]
    assert tokens == expected(documents)
    sizes = {path.name: len(tokens_in(path)) for path in sorted(MINE.glob("*.bin"))}
    assert [*sizes] == [f"mine_train_{i:06d}.bin" for i in range(len(sizes))]
    assert len(sizes) > 2
    assert {*[*sizes.values()][:-1]} == {5000}
    assert [*MINE.parent.iterdir()] == [MINE]  # neither a lock nor a part of it


def test_the_same_command_again_finds_the_corpus_finished_if_its_files_and_options_are_the_same(
    tmp_path,
):
    """A kill between the last rename and the exit leaves a finished corpus."""
    A.write_bytes(LINE * 9)
    B.write_bytes(LINE * 9)
    command = ("data/text.py", "a.jsonl", "b.jsonl", "--name", "mine", "--skip_bad", "3")
    first, again = (run_from_nothing(*command, cwd=tmp_path) for _ in range(2))
    assert again.stdout == first.stdout
    assert again.stderr == "note: data/mine is there already, from the same files\n"
    there = "data/mine: is there already; choose another name or delete it first"
    for named, options in (((A, B), {"val_every": 3}), ((A,), {}), ((B, A), {})):
        with refused(there):
            prepare(MINE, named, WritingOptions(**options))
    B.write_bytes(LINE * 8)
    assert run_from_nothing(*command, cwd=tmp_path, status=2).stderr == f"error: {there}\n"


def test_a_file_of_any_other_ending_is_a_document_without_byte_order_mark_and_windows_line_ends():
    documents = ["a longer text of words. " * 70_000, "One.\r\nTwo.\r\n", "naïve 😀", "", " "]
    names = ["0.md", "1.txt", "2", "3.py", "4.txt.gz"]
    for i, (name, document) in enumerate(zip(names, documents, strict=True)):
        packed = gzip.compress if name.endswith(".gz") else bytes
        Path(name).write_bytes(packed(b"\xef\xbb\xbf" * (i % 2) + document.encode()))
    documents[1] = "One.\nTwo.\n"
    assert written(*names, shard_tokens=10**9) == expected(documents)


def test_a_folder_is_read_in_the_order_of_its_paths_and_names_what_it_leaves_out(capsys):
    names = ["a/1.jsonl", "a/2.jsonl.gz", "b.parquet", "c/d/4.jsonl.zst", "../elsewhere/5.jsonl"]
    for i, name in reversed([*enumerate(names, 1)]):
        write(f"raw/{name}", [f"{i}"])
    for name in (".hidden.txt", "image.png", "dataset_infos.json"):
        Path("raw", name).write_bytes(b"\0")
    for name, target in {"back": ".", "broken": "x", "e.jsonl": "../elsewhere/5.jsonl"}.items():
        Path("raw", name).symlink_to(target)
    assert written("raw", "raw/b.parquet") == expected("12345")
    note = "note: raw: 4 files left out, such as raw/back\n"
    assert capsys.readouterr().err == note


def test_a_pipe_and_a_name_that_is_not_utf8_are_refused():
    os.mkfifo("pipe")
    with refused("pipe: no such file or folder; a pipe's text has to be in a file"):
        written("pipe")
    Path("raw").mkdir()
    Path("raw", os.fsdecode(b"\xe9.jsonl")).touch()
    with refused("its name is not UTF-8"):
        written("raw")


def test_threads_and_batches_change_no_byte(monkeypatch):
    monkeypatch.setattr(text, "BATCH", 3000)
    paths = [write(name, texts(20)) for name in FORMATS]
    Path("b.txt").write_text("a text of words " * 2000)
    written(*paths, "b.txt", folder=Path("one/mine"), workers=1, val_every=3)
    monkeypatch.setattr(text, "BATCH", 2**19)
    written(*paths, "b.txt", folder=Path("two/mine"), workers=3, val_every=3)
    assert content(Path("one/mine")) == content(Path("two/mine"))


def test_json_lines_that_are_unusual_are_read():
    A.write_bytes(
        b'\xef\xbb\xbf{"text": "half \\ud83d of it"}\r\n\r\n   \n'
        b'{"text": "whole \\ud83d\\ude00"}\n{"more": [1], "text": "no last line end"}'
    )
    assert written(A) == expected(["half \ud83d of it", "whole 😀", "no last line end"])


def test_every_nth_document_is_for_validation_counted_over_all_files():
    documents = texts(100)
    for i, document in enumerate(documents):
        write(f"raw/{i:03d}.jsonl", [document])
    train = [text for i, text in enumerate(documents, 1) if i % 7]
    assert written("raw", val_every=7) == expected(train)
    assert split_tokens(split="val") == expected(documents[6::7])
    streams = open_corpus(MINE, 8, 50257)
    assert [s.tokens for s in streams] == [len(expected(train)), len(expected(documents[6::7]))]


def test_a_separator_divides_a_text_file_into_documents(capsys):
    stories = ["Once.\n", *[f"\nA story {i}. " * 4000 + "\n" for i in range(25)], "\nEnd."]
    path = Path("stories.txt")
    path.write_text(SEPARATOR.join([*stories, "\n"]))  # across the megabytes that are read
    stories = [story.strip("\n") for story in stories]
    assert written(path, shard_tokens=10**9, separator=SEPARATOR) == expected(stories)
    assert "note" not in capsys.readouterr().err
    written(path, folder=Path("data/one"))
    (note,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")]
    assert note.endswith("start again with --separator '<|endoftext|>'")
    assert split_tokens(Path("data/one")).count(END_OF_TEXT) == 1


@pytest.mark.parametrize(
    ("separator", "advice"),
    [(r"\n", r"; for a line end, bash takes --separator $'\n'"), ("----", "")],
)
def test_a_separator_that_divides_nothing_is_noted_with_the_spelling_that_bash_takes(
    separator, advice, capsys
):
    Path("a.txt").write_text("one\ntwo\n")
    assert written("a.txt", separator=separator) == expected(["one\ntwo"])
    divides = f"--separator {separator!r} divides no text file: each is one document"
    assert capsys.readouterr().err == f"note: {divides}{advice}\n"


@pytest.mark.parametrize(
    ("separator", "content", "documents"),
    [
        ("\n", b"one\ntwo\n", ["one", "two"]),
        ("\n\n", b"one\r\n1\r\n\r\n\r\ntwo\r\n\r\n", ["one\n1", "two"]),
        ("\r\n\r\n", b"one\r\n1\r\n\r\n\r\ntwo\r\n\r\n", ["one\n1", "two"]),
    ],
)
def test_a_separator_of_line_ends_divides_a_file_also_with_the_line_ends_of_windows(
    separator, content, documents, capsys
):
    Path("a.txt").write_bytes(content)
    assert written("a.txt", separator=separator) == expected(documents)
    assert not capsys.readouterr().err


def test_a_separator_may_cross_the_parts_of_a_text_that_are_read():
    text = "".join(random.Random(1).choices("ab", k=5000))
    parts = [text[i : i + 7] for i in range(0, len(text), 7)]
    for separator in ("b", "ab", "aab", "babab", "a" * 40):
        assert [*sources._split(parts, separator)] == text.split(separator)


def test_the_last_line_has_the_characters_of_a_token_unless_tokens_were_copied(monkeypatch, capsys):
    monkeypatch.setattr(text, "PROGRESS_S", -1)
    Path("a.txt").write_text("hello hello")
    Path("b_val.txt").write_text(" hello")  # its name decides nothing
    written("a.txt", "b_val.txt")
    out, err = capsys.readouterr()
    assert "of 2 documents in data/mine, 0 of them for validation, 5.67 char" in out
    assert err == "".join(f"data/mine: {n} of 2 files, {2 * n + 1} tokens\n" for n in (1, 2))
    write_token_file(Path("c.bin"), [[10]])
    written("a.txt", "c.bin", folder=Path("data/copied"))
    assert "for validation; train" in capsys.readouterr().out


# ---- token files of others

IDS = [END_OF_TEXT, 1, 2, END_OF_TEXT, 3]


def test_nanogpts_and_build_nanogpts_token_files_are_copied_and_their_names_give_the_split():
    Path("openwebtext").mkdir()
    Path("openwebtext/prepare.py").write_text("# left out")
    for name, ids in (("train.bin", IDS * 1000), ("val.bin", IDS)):
        np.array(ids, dtype=np.uint16).tofile(f"openwebtext/{name}")
    np.save("edu_train_000001.npy", np.array([7, 8], dtype=np.uint16))
    np.save("edu_val_000000.npy", np.array([[9]], dtype=np.int64))
    write_token_file(Path("values.bin"), [[10]])  # has a header
    named = ["openwebtext", "edu_train_000001.npy", "edu_val_000000.npy", "values.bin"]
    assert written(*named) == [*IDS * 1000, 7, 8, 10]
    assert split_tokens(split="val") == [*IDS, 9]


BAD_TOKENS = {
    (0, 50257): r"token 1 has the id 50257, beyond GPT-2's vocabulary of",
    (-1,): "token 0 has the id -1",
    (0.0,): "float64, not integers",
    (None,): "Python objects in dtype",
}


@pytest.mark.parametrize("ids", BAD_TOKENS, ids=str)
def test_a_file_without_gpt2s_tokens_is_refused(ids):
    np.save("x.npy", np.array(ids))
    with refused(rf"^x.npy: .*{BAD_TOKENS[ids]}"):
        written("x.npy")


def test_nanogpts_character_level_tokens_are_refused():
    np.array([1, 2], dtype=np.uint16).tofile("train.bin")
    Path("meta.pkl").touch()
    with refused("train.bin: its tokens are not GPT-2's but of the vocabulary in meta.pkl"):
        written("train.bin")


# ---- interruptions


def killed_at(number):
    """Write the corpus in a process that kills itself at its n-th file operation on it."""
    left = itertools.count(number, -1)
    operations = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "open")

    def kill(event, args):
        if event in operations and "mine" in str(args[0]) and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    written("raw", val_every=5, shard_tokens=1000)


@pytest.mark.slow
def test_killed_at_any_file_operation_the_same_command_resumes_to_the_same_bytes():
    documents = texts(60)
    for i, name in enumerate(FORMATS):
        write(f"raw/{i}{name}", documents[i::4])
    written("raw", val_every=5, shard_tokens=1000)
    undisturbed = content(MINE)
    shutil.rmtree(MINE)
    # each process does a little more before its kill than the one before
    for kills in itertools.count():
        life = multiprocessing.get_context("fork").Process(target=killed_at, args=[2 * kills])
        life.start()
        life.join()
        if life.exitcode == 0 or MINE.exists():
            break
        assert life.exitcode == -signal.SIGKILL
    assert kills >= 5
    assert content(MINE) == undisturbed
    assert not UNFINISHED.exists()


def small_files_only():
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))  # fails as a full disk does


WRITE = """from pathlib import Path; from data.token_file import write_corpus
from runtime.errors import reported
with reported(): write_corpus(Path("data/mine"), [range(9999)])"""


@pytest.mark.parametrize("command", [("data/text.py", "mine.txt"), ("-c", WRITE)], ids=str)
def test_a_full_disk_is_told_with_the_file_in_the_corpuss_folder(command, tmp_path):
    Path("mine.txt").write_text("a word " * 10_000)
    full = run(*command, cwd=tmp_path, before=small_files_only, status=1).stderr
    file = r"data/\.mine\.unfinished/mine_train_000000\.bin"
    assert re.fullmatch(f"error: {file}: cannot be written: File too large\n", full)


@contextlib.contextmanager
def full_disk():
    """Let no file become larger than the tokens of a.jsonl and some of b.jsonl."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = 1024 + 2 * len(expected(texts(60))) + 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot be written: File too large") as full:
            yield full
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def swap(path, one, other):
    before = path.read_bytes()
    assert one in before
    path.write_bytes(before.replace(one, other))


TOKEN_FILE = UNFINISHED / "mine_train_000000.bin"
HARM = {
    "nothing": (lambda: None, 1, {}),
    "source, same size": (lambda: swap(A, b"the", b"teh"), 0, {}),
    "source not read yet": (lambda: swap(B, b"the", b"teh"), 1, {}),
    "token file gone": (TOKEN_FILE.unlink, 0, {}),
    "token file shorter": (lambda: os.truncate(TOKEN_FILE, 2000), 0, {}),
    "progress cut": (lambda: os.truncate(UNFINISHED / "sources.jsonl", 100), 0, {}),
    "another split": (lambda: None, 0, {"val_every": 2}),
    "other token files": (lambda: None, 0, {"shard_tokens": 5000}),
}


@pytest.mark.parametrize("case", HARM)
def test_whatever_changes_before_resuming_the_corpus_is_that_of_a_fresh_start(case, capsys):
    harm, kept, options = HARM[case]
    options = {"shard_tokens": 10**6} | options
    write(A, texts(60))
    write(B, texts(61))
    with full_disk() as full:
        written(A, B, shard_tokens=10**6)
    assert full.value.__notes__ == ["run the same command again to resume"]
    with refused("mine: no such corpus .*token files.; write it with: .* FILE --name mine;"):
        prepare_if_missing(MINE)
    harm()
    written(A, B, **options)
    assert f"note: data/mine was not finished: {kept} of 2 files" in capsys.readouterr().err
    resumed = content(MINE)
    shutil.rmtree(MINE)
    written(A, B, **options)
    assert resumed == content(MINE)


# ---- bad input

CUT = r"cut short or damaged \(.*\); fetch or write it again$"
NPY = b"\x93NUMPY\1\0\x88\x13"
BAD_FILES = {
    "cut.jsonl.gz": (gzip.compress(os.urandom(9999))[:5000], CUT),
    "page.parquet": (b"<html>no such page</html>", CUT),
    "other.npy": (b"PK", CUT),
    "deep.npy": (NPY + b"(" * 5000, CUT),
    "cut.npy": (NPY + b"{'descr': '<u2', 'shape': (4,), 'fortran_order': False}".ljust(5000), CUT),
    "odd.bin": (b"abc", "Size of available data is not a multiple"),
    "cut.bin": (np.array([20240520, 1, 9], "<i4").tobytes(), "damaged: by its header it has 9"),
    "latin.txt": ("naïve".encode("latin-1"), "not UTF-8 text; convert it"),
    "wide.txt": ("good text".encode("utf-16-le"), "not UTF-8 text; convert it"),
    "keys.jsonl": (
        b'{"content": "x", "id": 1}',
        r"""line 1: no text under "text" \(--text_column\) in {'content': 'x', 'id': 1}; correct""",
    ),
    "array.json": (b'[{"text": "a"}]', r"""line 1: no text .* in \[{'text': 'a'}\]"""),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_line_that_names_it_and_leaves_nothing_behind(name):
    bad, message = BAD_FILES[name]
    Path(name).write_bytes(bad)
    with refused(rf"^{name}: .*{message}"):
        written(name)
    assert [path for path in Path().rglob("*") if path != MINE.parent] == [Path(name)]


LINE = b'{"text": "good"}\n'
BAD_LINES = {
    b'{"text": "bad"': "cannot be read: JSONDecodeError: Expecting ',' delimiter",
    b"[" * 99_999: "cannot be read: RecursionError: maximum recursion depth exceeded",
    b'["text"]': """no text under "text" (--text_column) in ['text']""",
    b'{"text": 1.5}': """no text under "text" (--text_column) in {'text': 1.5}""",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20])
def test_a_record_without_a_text_is_named_by_file_and_number_and_can_be_left_out(line):
    A.write_bytes(LINE + b"\n" + line + b"\n" + LINE)
    message = re.escape(BAD_LINES[line])
    with refused(rf"^a\.jsonl: line 3: {message}.*; .* leave out up to N .* --skip_bad N"):
        written(A)
    assert written(A, skip_bad=1) == expected(["good", "good"])


def test_what_was_left_out_counts_over_all_files_and_after_resuming(monkeypatch, capsys):
    monkeypatch.setattr(text, "AHEAD", 0)
    monkeypatch.setattr(text, "BATCH", 1)  # a.jsonl is written before the error
    for path in (A, B):
        path.write_bytes(LINE + b"bad\n" + LINE)
    for _ in range(2):
        with refused(r"^b\.jsonl: line 2: .*--skip_bad N; run the same command again"):
            written(A, B, skip_bad=1)
    assert written(A, B, skip_bad=2) == expected(["good"] * 4)
    assert "note: lines or rows without text, left out: 2" in capsys.readouterr().err


def test_a_parquet_file_without_the_column_says_what_there_is():
    write("a.parquet", ["a"], column="body")
    with refused(
        r"""a\.parquet: no column "text"; choose one of \['id', 'body'\] with --text_col"""
    ):
        written("a.parquet")


def test_a_parquet_row_with_a_null_or_bytes_that_are_not_utf8_can_be_left_out():
    column = pyarrow.array([b"good", None, b"na\xefve", b"good"], pyarrow.binary())
    parquet.write_table(pyarrow.table({"text": column.view(pyarrow.string())}), "a.parquet")
    with refused("a.parquet: row 2: no text under"):
        written("a.parquet")
    with refused("a.parquet: row 3: cannot be read: UnicodeDecodeError: .*--skip_bad N"):
        written("a.parquet", skip_bad=1)
    assert written("a.parquet", skip_bad=2) == expected(["good", "good"])


def test_a_csv_row_of_another_length_can_be_left_out_and_one_that_is_never_closed_cannot():
    Path("a.csv").write_text("id,text\n1,good\n2,a comma, unquoted\n3\n\n4,good\n")
    with refused(r"a\.csv: record 2: cannot be read: ValueError: not one field per column: .*2"):
        written("a.csv")
    assert written("a.csv", skip_bad=2) == expected(["good", "good"])
    Path("b.csv").write_text('id,text\n1,good\n2,"never closed\n3,lost\n')
    with refused(r"b\.csv: cut short or damaged \(ValueError: line 4: unexpected end of data\)"):
        written("b.csv", skip_bad=9, folder=Path("data/other"))


def test_nothing_to_train_on_is_an_error():
    Path("raw").mkdir()
    with refused(r"raw: no text, JSON lines, parquet, CSV or token files here \(empty\)"):
        written("raw")
    Path("raw/a.png").write_bytes(b"\0")
    with refused(r"here \(1 files left out, such as raw/a\.png\)"):
        written("raw")
    with refused("too short to train on: 50 documents have 50 tokens for training and 0 for"):
        written(write(A, [""] * 50))
    with refused("too short to train on: .* 0 tokens for training"):
        written(write(A, ["text"]), val_every=1)
    assert not [*MINE.parent.glob("*")]


def test_a_broken_link_in_the_corpuss_place_is_refused_before_any_work():
    Path("data").mkdir()
    MINE.symlink_to("far/away")
    with refused("data/mine: is there already; choose another name or delete it first"):
        written(write(A, texts(10)))
    assert [*MINE.parent.iterdir()] == [MINE]


def test_a_missing_source_is_bad_input(tmp_path):
    done = run_from_nothing("data/text.py", "no.txt", cwd=tmp_path, status=2)
    assert (
        done.stderr == "error: no.txt: no such file or folder; a pipe's text has to be in a file\n"
    )


# ---- training on it


def test_a_corpus_is_one_command_and_the_first_file_gives_its_name(tmp_path):
    write("raw/mine.jsonl.gz", texts(100), "content")
    command = ("data/text.py", "raw/mine.jsonl.gz", "--text_column", "content")
    done = run_from_nothing(*command, cwd=tmp_path)
    assert "of 110 documents in data/mine, 0 of them for validation" in done.stdout, done.stderr
    assert "--dataset mine" in done.stdout


def test_a_corpus_of_a_mistaken_name_is_told_with_the_nearest_and_the_command_that_writes_it():
    with refused(r"did you mean shakespeare\?; write it with: .*text.py FILE --name shakespear;"):
        prepare_if_missing(Path("data/shakespear"))


def test_training_imports_nothing_that_only_other_runs_need(tmp_path):
    packages = "'pyarrow', 'zstandard', 'tokenizers', 'data.text', 'tensorboard', 'wandb'"
    imported = f"sys.modules.keys() & {{{packages}}}"
    done = run("-c", f"import sys, train; print({imported})", cwd=tmp_path)
    assert done.stdout == "set()\n", done.stderr


def test_a_corpus_that_lacks_a_token_file_of_its_manifest_is_refused():
    written(write(A, texts(100)))
    lost, manifest = MINE / "mine_train_000001.bin", MINE / "manifest.json"
    write_token_file(MINE / "more_val_000000.bin", [range(100)])
    open_corpus(MINE, 16, 50257)
    for harm, message in (
        (lambda: write_token_file(lost, [range(100)]), f"{lost}: has 100 tokens; manifest.json "),
        (lost.unlink, f"{lost}: is missing; manifest.json lists it with 5,000 tokens; restore"),
        (lambda: manifest.write_text("{}"), f"{manifest}: damaged or edited; restore or delete it"),
    ):
        harm()
        with refused(message):
            open_corpus(MINE, 16, 50257)
    manifest.unlink()
    open_corpus(MINE, 16, 50257)


# ---- FineWeb-Edu


def test_fineweb_takes_parquet_files_of_the_original():
    documents, source = texts(190), ("sample",)
    write("sample/000_00000.parquet", documents)
    fineweb.main(FinewebOptions(source=source))
    val = documents[99::100]
    assert split_tokens(FINEWEB, "val") == expected(val)
    assert split_tokens(FINEWEB) == expected(text for text in documents if text not in val)
    with refused("fineweb: holds a corpus that was written with --source; choose another place"):
        fineweb.prepare(FINEWEB, 1)
    with refused("no effect with --source: shards"):
        fineweb.main(FinewebOptions(source=source, shards=3))
    with refused("no effect without --source: workers"):
        fineweb.main(FinewebOptions(workers=3))


def test_fineweb_downloads_the_shards_that_are_missing_or_damaged(monkeypatch):
    asked = []

    def download(repository, name, *, repo_type, local_dir):
        assert not (local_dir / name).exists()
        asked.append(name)
        local_dir.mkdir(parents=True, exist_ok=True)
        write_token_file(local_dir / name, [range(10 + len(asked))])

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    names = ["val_000000", "train_000001", "train_000002"]
    names = [f"finewebedu_{name}.bin" for name in names]
    assert fineweb.prepare(FINEWEB, 1) == 12
    assert fineweb.prepare(FINEWEB, 2) == 12 + 13
    os.truncate(FINEWEB / names[2], 1030)
    assert fineweb.prepare(FINEWEB, 2) == 12 + 14
    assert asked == [*names, names[2]]
    (FINEWEB / names[0]).unlink()
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)
    with refused(r"could not be downloaded from .* \(TypeError: .*; run this again to resume"):
        fineweb.prepare(FINEWEB, 1)
