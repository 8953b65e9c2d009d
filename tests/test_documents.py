"""data/documents.py and data/fineweb.py: every token is tiktoken's, whatever the format and the
number of workers, also after kill -9 at any moment.
"""

import contextlib
import functools
import gzip
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

import data.documents
import data.sources
import data.tokenizer
import data.workers
from data import fineweb
from data.documents import DocumentsOptions, WritingOptions, prepare
from data.fineweb import FinewebOptions
from data.manifest import read_manifest, unfinished_folder
from data.prepare import prepare_if_missing
from data.token_file import TokenFile, write_token_file
from data.tokenizer import END_OF_TEXT, get_encoding
from dataloader import open_corpus
from runtime.errors import TrainingError
from runtime.files import sha256, sole_writer
from tests.conftest import ended, refused, run, run_from_nothing, start, tokens_in, wait_for

pytestmark = pytest.mark.usefixtures("in_tmp_path")
MINE, FINEWEB = Path("data/mine"), Path("data/fineweb")
UNFINISHED = unfinished_folder(MINE)
A, B = Path("a.jsonl"), Path("b.jsonl")
FORMATS = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"]
WORDS = ["the", "of", "and", "to", "in", "is", "Zürich", "12,345", "'s", "\n\n", "😀", "\t"]
WORDS += ["<|endoftext|>"]
NASTY = [
    "",
    " ",
    "a",
    "One document.\r\nTwo lines.\r\n",
    "naïve 😀 中文字符 e\u0301 \u2028 \u00a0",
    "<|endoftext|> is text <|endoftext|>",
    "\ufeffa mark",
    "a" + " " * 300 + "b" + "\n" * 50,
    "x1!" * 3000,
    "words of a long document, " * 3000,
    "nul \0 in JSON",
]


def texts(n, seed=0):
    """Documents of many lengths, the nasty ones among them."""
    rng = random.Random(seed)
    plain = [" ".join(rng.choices(WORDS, k=int(rng.lognormvariate(4, 1.2)))) for _ in range(n)]
    for i, nasty in enumerate(NASTY):
        plain.insert(i * len(plain) // len(NASTY), nasty)
    return plain


def expected(documents):
    encode = get_encoding().encode_ordinary
    return [token for text in documents for token in (END_OF_TEXT, *encode(text))]


def write(name, documents, column="text", kind=None, rows=7):
    """Write documents in the format that the file's name says."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [{"id": i, column: text} for i, text in enumerate(documents)]
    if path.suffix == ".txt":
        path.write_text(*documents, newline="")
    elif path.suffix == ".parquet":
        schema = {"id": pyarrow.int64(), column: kind or pyarrow.string()}
        table = pyarrow.Table.from_pylist(records, pyarrow.schema(schema))
        parquet.write_table(table, path, row_group_size=rows)
    else:
        lines = [json.dumps(record, ensure_ascii=record["id"] % 2 == 0) for record in records]
        content = "\n".join([*lines, ""]).encode()
        half = len(content) // 2  # in two parts, as parallel writers make them
        pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(content[:half]) + pack(content[half:]))
    return path


def shards(folder=MINE):
    """The token files in the order of their tokens."""
    return sorted(folder.glob("*.bin"), key=lambda path: path.stem.rpartition("_")[2])


def tokens_of(folder=MINE):
    return np.concatenate([*map(tokens_in, shards(folder))]).tolist()


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def tokenized_here(monkeypatch):
    """Tokenize in a thread where processes are not the subject, as each takes half a second to
    start. Commands always have processes.
    """
    monkeypatch.setattr(data.workers, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(data.documents, "SAMPLED_CHARS", 100)
    monkeypatch.setattr(data.sources, "BATCH_CHARS", 3000)
    monkeypatch.setattr(data.tokenizer, "CHUNK_CHARS", 1000)
    monkeypatch.setattr(data.workers, "AHEAD", 1)


def written(*sources, folder=MINE, **options):
    """The tokens of the corpus that is written, or resumed."""
    how = WritingOptions(**({"shard_tokens": 1000} | options))
    prepare(folder, sources, how, "python documents.py a b")
    return tokens_of(folder)


# ---- every token is tiktoken's


@pytest.mark.parametrize("name", FORMATS)
def test_the_tokens_of_every_format_are_tiktokens_and_fill_the_shards_validation_first(name):
    documents = texts(100)
    path = write(name, documents)
    tokens = written(path, val_shards=2)
    assert tokens == expected(documents)
    sizes = {path.name: TokenFile(path).tokens for path in shards()}
    kinds = ["val", "val", *["train"] * (len(sizes) - 2)]
    assert [*sizes] == [f"mine_{kind}_{i:06d}.bin" for i, kind in enumerate(kinds)]
    assert {*[*sizes.values()][:-1]} == {1000}
    with refused("mine: is there already; choose another name or delete it first"):
        written(path)
    assert tokens_of() == tokens
    assert [*MINE.parent.iterdir()] == [MINE]  # neither a lock nor a part of it


@pytest.mark.parametrize("kind", ["large_string", "string_view", "dictionary"])
def test_every_kind_of_text_column_is_read(kind):
    documents, make = texts(40) * 2, getattr(pyarrow, kind)
    kind = make(pyarrow.int32(), pyarrow.string()) if kind == "dictionary" else make()
    assert written(write("a.parquet", documents, kind=kind)) == expected(documents)


def test_a_column_is_not_taken_for_a_field_of_another():
    table = {"a": pyarrow.array([{"b": "field"}] * 2), "a.b": pyarrow.array(["column"] * 2)}
    parquet.write_table(pyarrow.table(table), "a.parquet")
    tokens = written(Path("a.parquet"), text_column="a.b", val_shards=0)
    assert tokens == expected(["column"] * 2)


def test_each_text_file_is_a_document_with_its_line_ends_and_without_a_byte_order_mark():
    documents = ["a longer text of words. " * 70_000, "One.\r\nTwo.\r\n", "naïve 😀", "", " "]
    for i, text in enumerate(documents):
        Path(f"{i}.txt").write_bytes(b"\xef\xbb\xbf" * (i % 2) + text.encode())
    assert written(Path(), shard_tokens=50_000) == expected(documents)


def test_a_folder_is_read_in_the_order_of_its_paths_with_folders_in_it_formats_mixed(capsys):
    raw = Path("raw")
    names = ["a/1.jsonl", "a/2.jsonl.gz", "b.parquet", "c/d/4.jsonl.zst", "e.JSONL"]
    names += ["../elsewhere/6.jsonl", ".cache/hidden.jsonl"]
    for i, name in reversed([*enumerate(names, 1)]):
        write(raw / name, [f"{i}"])
    (raw / "dataset_infos.json").write_text("{\n}")
    (raw / "y").symlink_to(raw.absolute())  # a circle
    (raw / "z").symlink_to(Path("elsewhere").absolute())
    assert written(raw, val_shards=0) == expected("123456")
    out = capsys.readouterr().err
    assert re.search(r"note: files left out, as their names do not end in \.parquet.*: \d", out)
    assert "note: files named more than once, and taken once, at their first place: " in out


def test_the_number_of_workers_and_how_texts_are_cut_change_no_byte(monkeypatch):
    paths = [write(name, texts(20)) for name in FORMATS]
    paths.append(write("b.txt", ["a text of words " * 2000]))
    one, three = Path("one/mine"), Path("three/mine")
    written(*paths, folder=one, shard_tokens=5000, workers=1)
    monkeypatch.setattr(data.workers, "ProcessPoolExecutor", ProcessPoolExecutor)
    monkeypatch.setattr(data.tokenizer, "CHUNK_CHARS", 1)
    monkeypatch.setattr(data.sources, "BATCH_CHARS", 3000)
    written(*paths, folder=three, shard_tokens=5000, workers=3)
    assert content(one) == content(three)


def test_json_lines_that_are_unusual_are_read():
    A.write_bytes(
        b'\xef\xbb\xbf{"text": "half \\ud83d of it"}\r\n\r\n   \n'
        b'{"text": "whole \\ud83d\\ude00"}\n{"more": [1], "text": "no last line end"}'
    )
    documents = ["half \ud83d of it", "whole 😀", "no last line end"]
    assert written(A, val_shards=0) == expected(documents)


def test_the_manifest_counts_and_names_the_files_with_their_sha256():
    documents = texts(50)
    n = len(written(write(A, documents)))
    manifest = json.loads((MINE / "manifest.json").read_text())
    counts = {"documents": len(documents), "tokens": n, "val_tokens": 1000}
    assert manifest.items() >= counts.items()
    assert manifest["train_tokens"] == n - 1000
    file = {"file": "a.jsonl", "bytes": A.stat().st_size, "sha256": sha256(A)}
    spelled_out = sum(text.count("<|endoftext|>") for text in documents)
    of_file = {"documents": len(documents), "skipped": 0, "end_of_text_spelled_out": spelled_out}
    assert manifest["sources"] == [file | of_file]
    digests = {shard["file"]: shard["sha256"] for shard in manifest["shards"]}
    assert digests == {path.name: sha256(path) for path in shards()}


def test_without_a_number_of_tokens_a_small_corpus_keeps_about_a_tenth_for_validation():
    written(write(A, texts(200)), shard_tokens=None)
    val, train = (TokenFile(path).tokens for path in shards())
    assert 0.05 < val / (train + val) < 0.2


def test_documents_and_train_are_one_command_each(tmp_path):
    write("raw/a.jsonl", texts(100), "content")
    command = ("data/documents.py", "raw", "--name", "mine", "--text_column", "content")
    done = run_from_nothing(*command, cwd=tmp_path)
    assert "of 111 documents in data/mine, " in done.stdout, done.stderr
    assert "--dataset mine" in done.stdout
    assert re.search(r"mine_train_000001\.bin: [\d,]+ tokens written, [\d,]+ tokens/s", done.stderr)
    sizes = "--n_layer 1 --n_head 1 --n_embd 8 --block_size 16 --seq_len 16 --batch_size 1"
    options = f"{sizes} --max_steps 1 --device cpu --keep_last 0 --dataset mine".split()
    trained = run("train.py", *options, cwd=tmp_path)
    assert "step 1/1 | loss" in trained.stdout, trained.stderr


def test_training_never_pays_for_parquet(tmp_path):
    imported = "sys.modules.keys() & {'pyarrow', 'zstandard', 'data.documents'}"
    done = run("-c", f"import sys, train; print({imported})", cwd=tmp_path)
    assert done.stdout == "set()\n", done.stderr


# ---- kill -9


def fork_workers():
    """Let this process fork its workers: they start faster than others."""
    real = multiprocessing.get_context
    multiprocessing.get_context = lambda method: real("fork")


def killed_at(number):
    """Write the corpus in a process that kills itself at its n-th file operation on it."""
    left = itertools.count(number, -1)
    operations = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "open")

    def kill(event, args):
        if event in operations and "mine" in str(args[0]) and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    written(Path("raw"))


COMMAND = ["data/documents.py", "raw", "--name=mine", "--workers=2", "--shard_tokens=1000"]


@contextlib.contextmanager
def writing(before=fork_workers):
    """A data/documents.py that has written some shards of the corpus `mine`, of more to come."""
    write("raw/a.jsonl", texts(500))
    with ended([start(*COMMAND, cwd=Path.cwd(), before=before)]) as (writer,):
        wait_for(lambda: len(shards(UNFINISHED)) >= 3, writer)
        yield writer


def test_killed_at_any_file_operation_the_same_command_resumes_to_the_same_bytes():
    documents = texts(60)
    for i, name in enumerate(FORMATS):
        write(f"raw/{i}{name}", documents[i::4])
    write("raw/z.txt", ["words of a text file " * 200])
    written(Path("raw"))
    undisturbed = content(MINE)
    shutil.rmtree(MINE)
    # each life does a little more before its kill, from wherever the last one stopped
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


def is_running(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_workers_end_with_the_process_that_asks_them():
    with writing(before=None) as writer:
        threads = Path(f"/proc/{writer.pid}/task").glob("*/children")
        workers = [pid for children in threads for pid in children.read_text().split()]
        assert workers
        writer.kill()
        writer.wait()
    wait_for(lambda: not any(map(is_running, workers)), None, 20)


def test_ctrl_c_keeps_the_shards_and_says_how_to_resume(tmp_path):
    with writing() as writer:
        writer.send_signal(signal.SIGINT)
        _, err = writer.communicate()
        assert writer.returncode == 130
        assert err.splitlines()[-1] == "error: interrupted; run the same command again to resume"
    assert len(shards(UNFINISHED)) >= 2  # the last may not have been in the manifest yet
    done = run(*COMMAND, cwd=tmp_path, before=fork_workers)
    assert "of them written" in done.stderr
    assert tokens_of() == expected(texts(500))


@pytest.mark.parametrize("command", ["data/documents.py a.jsonl --name mine", "data/fineweb.py"])
def test_a_corpus_that_another_process_is_writing_is_refused(command, tmp_path):
    write(A, ["a"])
    with sole_writer(MINE), sole_writer(FINEWEB):
        done = run(*command.split(), cwd=tmp_path)
    assert ": another process is writing this corpus; wait for it" in done.stderr


# ---- an unfinished corpus


@contextlib.contextmanager
def full_disk(n=3):
    """Let the disk be full once `n` more shards are written, which ends the writing."""

    def write_part(path, *_):
        path.write_bytes(b"a part of it")
        raise OSError(28, "No space left on device")

    writes = itertools.chain([write_token_file] * n, [write_part])
    message = "mine: cannot be written: No space left on device; whole shards that are kept: "
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.documents, "write_token_file", lambda *given: next(writes)(*given))
        with refused(rf"{message}\d+; run the same command again to resume"):
            yield


def begin(documents):
    """Write 3 shards of a corpus of a.jsonl and b.jsonl, until the disk is full."""
    write(A, documents[:60])
    write(B, documents[60:])
    with full_disk():
        written(A, B)


def test_a_disk_that_fills_up_keeps_the_whole_shards_and_training_says_how_to_resume():
    documents = texts(120)
    begin(documents)
    names = ["mine_train_000001.bin", "mine_train_000002.bin", "mine_val_000000.bin"]
    assert sorted(content(UNFINISHED)) == ["manifest.json", *names]
    message = "is not finished: 3 shards, 3,000 tokens; resume with: python documents.py a b$"
    with refused(message):
        prepare_if_missing(MINE, print)
    with refused(message):
        open_corpus(UNFINISHED, 16, 50257)
    assert written(A, B, workers=3) == expected(documents)


def swap(path, one, other):
    before = path.read_bytes()
    assert one in before
    path.write_bytes(before.replace(one, other))


VAL_SHARD, MANIFEST = UNFINISHED / "mine_val_000000.bin", UNFINISHED / "manifest.json"
EDITED = (
    r"manifest\.json: damaged or edited, .* or delete it: .* an unfinished corpus is begun anew"
)
HARM = {
    "same size": (
        lambda: swap(A, b"the", b"teh"),
        r"a\.jsonl: has changed since the shards were written; restore it",
    ),
    "shard gone": (VAL_SHARD.unlink, r"mine_val_000000\.bin: cannot be read"),
    "shard cut": (
        lambda: write_token_file(VAL_SHARD, [[1]]),
        r"mine_val_000000\.bin is not the shard that was written; .* or delete .* to begin anew",
    ),
    "manifest cut": (lambda: MANIFEST.write_text("{"), EDITED),
    "less of a batch": (lambda: swap(MANIFEST, b'"into":', b'"into":1'), EDITED),
    "larger shards": (lambda: swap(MANIFEST, b'_tokens":1000', b'_tokens":2000'), EDITED),
    "another folder's shard": (lambda: swap(MANIFEST, b'"mine_val', b'"../../mine_val'), EDITED),
}


@pytest.mark.parametrize("case", HARM)
def test_a_corpus_whose_files_have_changed_is_not_resumed(case):
    begin(texts(120))
    harm, message = HARM[case]
    harm()
    with refused(message):
        written(A, B)


def test_a_shard_that_goes_while_others_are_written_ends_it_with_an_error(monkeypatch):
    monkeypatch.setattr(data.documents, "flush_to_disk", lambda _: VAL_SHARD.unlink(True))
    with refused(r"mine_val_000000\.bin: cannot be read: No such file"):
        written(write(A, texts(120)))
    assert not MINE.exists()


def test_an_unfinished_folder_that_is_somebody_elses_is_left_as_it_is():
    precious = Path("user/precious")
    precious.parent.mkdir()
    precious.write_text("x")
    MINE.parent.mkdir()
    UNFINISHED.symlink_to(precious.parent.absolute())
    with refused(rf"{UNFINISHED}: is a link; delete it, or choose another name"):
        written(write(A, ["a"]), val_shards=0)
    UNFINISHED.unlink()
    precious.parent.rename(UNFINISHED)
    with refused("none of the 2 tokens"):
        written(A)
    assert (UNFINISHED / "precious").read_text() == "x"


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        (
            [A, B],
            {"shard_tokens": 2000},
            "it was begun with --shard_tokens 1000, not 2000; undo that and run: "
            r"python documents.py a b; or delete .*mine\.unfinished\.tmp to begin anew",
        ),
        ([A, B], {"text_column": "content"}, "begun with --text_column text, not content"),
        ([A], {}, r"the sources are others than before: b\.jsonl;"),
    ],
)
def test_a_corpus_is_not_resumed_by_another_command(sources, options, message):
    begin(texts(120))
    with refused(message):
        written(*sources, **options)


def cut_short(path, documents):
    write(path, documents)
    os.truncate(path, path.stat().st_size * 9 // 10)


DAMAGED = {
    "a.jsonl.gz": cut_short,
    "a.jsonl.zst": cut_short,
    "a.parquet": lambda path, documents: write(
        path, [None if text == "marked" else text for text in documents]
    ),
    "a.txt": lambda path, documents: swap(write(path, documents), b"marked", b"\xff"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_source_that_is_mended_is_resumed_and_the_shards_before_stay(name, small_batches):
    documents = [text for text in texts(200) if "\0" not in text and "\ufeff" not in text]
    documents.insert(-20, "marked")
    path, shard_tokens = Path(name), 1000
    if name == "a.txt":  # is read a megabyte at a time
        documents, shard_tokens = ["words of a text " * 80_000 + "".join(documents)], 50_000

    def inodes(folder):
        return {(shard.name, shard.stat().st_ino) for shard in shards(folder)}

    DAMAGED[name](path, documents)
    with refused(r"kept: \d+; run the same command again to resume"):
        written(path, workers=1, shard_tokens=shard_tokens)
    kept = inodes(UNFINISHED)
    assert len(kept) > 3
    write(path, documents)
    assert written(path, shard_tokens=shard_tokens) == expected(documents)
    assert inodes(MINE) > kept


def test_a_source_that_has_not_been_read_yet_may_change_and_one_that_is_only_touched_is_the_same():
    documents = texts(120)
    begin(documents)
    write(B, ["other"])
    for shards_more in (1, 2):  # what was taken is known also after resuming more than once
        os.utime(A)
        with full_disk(shards_more):
            written(A, B)
    assert read_manifest(UNFINISHED).unfinished.source == 0
    assert written(A, B) == expected([*documents[:60], "other"])
    assert read_manifest(MINE).sources[1].bytes == B.stat().st_size


def test_a_source_that_was_read_to_its_end_may_not_change():
    documents = ["a short text"] * 60 + texts(120)
    begin(documents)  # of a.jsonl, all is in the first shard
    swap(A, b"short", b"shorn")
    with refused(r"cannot be resumed: .*a\.jsonl has changed"):
        written(A, B)
    swap(A, b"shorn", b"short")
    assert written(A, B) == expected(documents)


def test_a_worker_that_is_killed_is_one_line(monkeypatch):
    monkeypatch.setattr(data.workers, "ProcessPoolExecutor", ProcessPoolExecutor)
    monkeypatch.setattr(data.workers, "_begin", functools.partial(os._exit, 9))
    message = "a process that tokenizes has died, as happens when memory runs out"
    with pytest.raises(TrainingError, match=message):
        written(write(A, ["a"]))
    assert not MINE.parent.exists()


# ---- bad input

LINE = b'{"text": "good"}\n'
BAD_LINES = {
    "no JSON": (b'{"text": "bad"', "not a line of JSON: JSONDecodeError: Expecting ',' delimiter"),
    "no object": (b'["text"]', """no text under "text" in ['text']; say with --text_column"""),
    "no such key": (
        b'{"content": "x", "id": 1}',
        """no text under "text" in {'content': 'x', 'id': 1}; say with --text_column where""",
    ),
    "a number": (b'{"text": 1.5}', """no text under "text" in {'text': 1.5}"""),
    "brackets in brackets": (b"[" * 100_000, "not a line of JSON: RecursionError"),
    "a long number": (b'{"text": ' + b"1" * 5000 + b"}", "not a line of JSON: ValueError"),
    "not UTF-8": (b'{"text": "\xff"}', "not a line of JSON: UnicodeDecodeError: 'utf-8' codec"),
}


@pytest.mark.parametrize("case", [*BAD_LINES, None, b"\xff"], ids=str)
def test_a_record_without_a_text_is_named_by_file_and_number_and_can_be_left_out(case):
    if case in BAD_LINES:
        (bad, message), path = BAD_LINES[case], A
        path.write_bytes(LINE + b"\n" + bad + b"\n" + LINE)
        message = f"line 3: {re.escape(message)}"
    else:
        path, message = Path("a.parquet"), "row 2: (not UTF-8: invalid start byte|null, not a text)"
        values = pyarrow.array([b"good", case, b"good"]).view(pyarrow.string())
        parquet.write_table(pyarrow.table({"text": values}), path)
    with refused(f"^{path}: {message}.*; correct it, or leave out up to N .* --skip_bad N$"):
        written(path)
    assert not MINE.parent.exists()
    assert written(path, skip_bad=1, val_shards=0) == expected(["good", "good"])
    assert read_manifest(MINE).skipped == 1


def test_more_bad_lines_than_may_be_left_out_end_it_and_with_more_it_resumes(small_batches):
    documents = texts(100)
    lines = [json.dumps({"text": text}) for text in documents]
    for path, part in ((A, lines[:50]), (B, lines[50:])):
        path.write_text("\n".join([*part[:40], "bad", *part[40:]]))
    for _ in range(2):  # what was left out counts after resuming too
        with refused(
            r"b\.jsonl: line 41: not .*; the 1 before it were left out; .* kept: \d+; run"
        ):
            written(A, B, skip_bad=1, shard_tokens=500, workers=1)
    assert written(A, B, skip_bad=2, shard_tokens=500) == expected(documents)
    assert read_manifest(MINE).skipped == 2


def test_a_wrong_text_column_ends_it_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(data.documents, "_write", None)
    with refused('line 3: no text under "content" in .*; the 2 before'):
        written(write(A, texts(50)), text_column="content", skip_bad=2)
    twice = pyarrow.Table.from_arrays([["a"], [1]], names=["text", "text"])
    parquet.write_table(twice, "twice.parquet")
    with refused('has 2 columns "text"; it has "text" '):
        written(Path("twice.parquet"))
    good, bad = write("a.parquet", "a"), write("b.parquet", "b", column="content")
    there = r'it has "id" \(int64\), "content" \(string\); say with --text_column'
    for paths, column in (([good, bad], "text"), ([bad], "id")):
        with refused(rf'b\.parquet: has no column "{column}" of text; {there}'):
            written(*paths, text_column=column)


def test_json_lines_that_are_called_json_are_read_if_the_file_itself_is_named():
    path = write("raw/a.json.gz", "ab")
    with refused(
        r"raw: no file in it has a name that ends in .*\.json if the file itself is named"
    ):
        written(path.parent)
    assert written(path, val_shards=0) == expected("ab")


NO_FILE = r": not a whole \.\w+ file, but cut short or damaged \(.*\); fetch or write it again$"
DAMAGES = {
    "cut short": (lambda content: content[: len(content) * 2 // 3], NO_FILE),
    "another content": (lambda content: b"<html>no such page</html>", NO_FILE),
    "zeros": (
        lambda content: content[:2000] + bytes(1000) + content[3000:],
        rf"({NO_FILE}|: row \d+: not UTF-8)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FORMATS[1:])
def test_a_damaged_file_is_one_line_that_names_it(name, damage):
    path = write(name, texts(200), rows=1000)
    harm, message = DAMAGES[damage]
    path.write_bytes(harm(path.read_bytes()))
    with refused(f"^{path}{message}"):
        written(path)
    assert not MINE.parent.exists()


def test_documents_without_text_and_lines_without_end_are_refused(monkeypatch):
    with refused("none of the 50 documents has any text"):
        written(write(A, [""] * 50), val_shards=0)
    with refused("none of the 0 documents has any text"):
        written(write(A, []), val_shards=0)
    monkeypatch.setattr(data.sources, "LINE_BYTES", 2**20)
    with refused("a.jsonl: line 2: longer than 1 MB; a document that long has to be a .txt file"):
        written(write(A, ["short", "long " * 2**18]))
    assert not MINE.parent.exists()


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_packed_file_of_no_bytes_is_no_corpus_without_documents(packed):
    Path(f"b.jsonl{packed}").touch()
    with refused(rf"b\.jsonl{packed}{NO_FILE}"):
        written(write(A, texts(20)), Path(f"b.jsonl{packed}"), val_shards=0)
    assert not MINE.parent.exists()


NO_DOCUMENTS = {
    "ending": ("a.csv", b"x", r"a\.csv: its name does not end in \.parquet, .*what a file holds"),
    "name": ("caf\udce9.jsonl", LINE, "its name is not UTF-8; rename it"),
    "folder": ("raw/a.md", b"x", r"raw: no file in it has a name that ends in \.parquet"),
}


@pytest.mark.parametrize("case", NO_DOCUMENTS)
def test_a_file_that_is_no_document_is_one_line_that_names_it(case):
    name, file_content, message = NO_DOCUMENTS[case]
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(file_content)
    with refused(message):
        written(Path(path.parts[0]))
    assert not MINE.parent.exists()


def test_too_little_space_is_said_beforehand_with_what_is_needed(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=5000))
    with refused(
        r"mine: the disk has too little space: about [\d,]+ tokens, 0 of them written: .* are "
        "needed, 5 kB are free; free some, name another place with --data_dir"
    ):
        written(write(A, texts(300)))
    assert not MINE.parent.exists()


def test_a_corpus_that_would_be_all_validation_says_what_to_do():
    with refused(
        "none of the 100 tokens, of 20 documents, are left to train on: a validation shard takes "
        "1,000; .* run this again with --shard_tokens 10, or with --val_shards 0"
    ):
        written(write(A, ["a b c d"] * 20))
    assert len(written(A, shard_tokens=10)) == 100


def test_the_name_of_finewebs_corpus_is_not_for_others():
    with refused("is the corpus that data/fineweb.py writes"):
        data.documents.main(DocumentsOptions(sources=("a.jsonl",), name="fineweb"))


# ---- training by the manifest


def test_a_corpus_that_is_not_as_its_manifest_says_is_refused_and_more_files_are_not():
    written(write(A, texts(10)), shard_tokens=500)
    write_token_file(MINE / "more_val_000000.bin", [range(100)])
    manifest, lost = MINE / "manifest.json", shards()[2]
    open_corpus(MINE, 16, 50257)
    for harm, message in (
        (
            lost.unlink,
            rf"^{lost}: is missing; {manifest.name} names it with 500 tokens; restore it, or "
            f"delete {manifest.name} to train on the files that are there",
        ),
        (
            lambda: write_token_file(lost, [range(100)]),
            rf"^{lost}: holds 100 tokens; {manifest.name} names it with 500 ",
        ),
        (
            lambda: manifest.write_text("{}"),
            rf"{manifest}: damaged or edited, or not written by data/documents\.py",
        ),
    ):
        harm()
        with refused(message):
            open_corpus(MINE, 16, 50257)
    manifest.unlink()
    open_corpus(MINE, 16, 50257)


# ---- FineWeb-Edu


def test_fineweb_takes_parquet_files_of_the_original():
    documents, source = texts(50), ("sample",)
    write("sample/000_00000.parquet", documents)
    fineweb.main(FinewebOptions(source=source, shard_tokens=1000))
    assert tokens_of(FINEWEB) == expected(documents)
    with refused("fineweb: holds a corpus that was written with --source; choose another place"):
        fineweb.prepare(FINEWEB, 1)
    with refused("no effect with --source: shards"):
        fineweb.main(FinewebOptions(source=source, shards=3))
    with refused("no effect without --source: workers"):
        fineweb.main(FinewebOptions(workers=3))


def test_fineweb_downloads_the_shards_that_are_missing_or_damaged(monkeypatch):
    asked = []

    def download(repository, name, *, repo_type, local_dir):
        assert (repository, repo_type) == (fineweb.REPOSITORY, "dataset")
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
    for arrives, message in (
        (lambda *_, **__: (FINEWEB / names[0]).write_bytes(b"no tokens"), ": not a token file"),
        (None, r" could not be downloaded from .* \(TypeError: .*; run this again to resume"),
    ):
        (FINEWEB / names[0]).unlink()
        monkeypatch.setattr("huggingface_hub.hf_hub_download", arrives)
        with refused(rf"{names[0]}{message}"):
            fineweb.prepare(FINEWEB, 1)
