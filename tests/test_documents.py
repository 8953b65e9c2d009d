"""data/documents.py: every token is tiktoken's, whatever the format and the number of workers, also
after kill -9 at any moment.
"""

import contextlib
import errno
import fcntl
import functools
import gzip
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

import data.documents
import data.manifest
import data.sources
import data.tokenizer
import data.workers
from data import fineweb
from data.documents import prepare
from data.manifest import (
    Manifest,
    Options,
    Shard,
    SourceFile,
    Unfinished,
    read_manifest,
    unfinished_folder,
)
from data.prepare import prepare_if_missing
from data.sources import Piece, Place, find_sources, read_documents
from data.token_file import TokenFile, TokenFileError, write_token_file
from data.tokenizer import END_OF_TEXT, get_encoding
from dataloader import open_corpus
from runtime.errors import TrainingError
from runtime.files import cannot_be_written, lock_file
from tests.conftest import ROOT, ended, forks, run, run_from_nothing, start, tokens_in, wait_for

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
    "words of a long document, " * 9000,
    "nul \0 in JSON",
]


def texts(n: int, seed: int = 0) -> list[str]:
    """Documents of many lengths, the nasty ones among them."""
    rng = random.Random(seed)
    words = [
        "the",
        "of",
        "and",
        "to",
        "in",
        "is",
        "that",
        "it",
        "was",
        "for",
        "on",
        "are",
        "Zürich",
        "12,345",
        "'s",
        "\n\n",
        "😀",
        "\t",
        "def f(x):",
        "<|endoftext|>",
    ]
    plain = [" ".join(rng.choices(words, k=int(rng.lognormvariate(4, 1.2)))) for _ in range(n)]
    for i, nasty in enumerate(NASTY):
        plain.insert(i * len(plain) // len(NASTY), nasty)
    return plain


def expected(documents: list[str]) -> list[int]:
    return [
        token
        for text in documents
        for token in (END_OF_TEXT, *get_encoding().encode_ordinary(text))
    ]


def write_jsonl(path: Path, documents: list[str], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(
        json.dumps({"id": i, column: text}, ensure_ascii=i % 2 == 0) + "\n"
        for i, text in enumerate(documents)
    )
    packed = content.encode()
    if path.suffix == ".gz":
        packed = gzip.compress(packed[: len(packed) // 2]) + gzip.compress(
            packed[len(packed) // 2 :]
        )
    if path.suffix == ".zst":  # in two frames, as parallel writers make them
        packed = b"".join(
            zstandard.compress(part)
            for part in (packed[: len(packed) // 2], packed[len(packed) // 2 :])
        )
    path.write_bytes(packed)
    return path


def write_parquet(
    path: Path,
    documents: Sequence[str | None],
    kind: pyarrow.DataType | None = None,
    column: str = "text",
    rows: int = 7,
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    column_of_texts = pyarrow.array(documents, pyarrow.string()).cast(kind or pyarrow.string())
    table = pyarrow.table({"id": list(range(len(documents))), column: column_of_texts})
    parquet.write_table(table, path, row_group_size=rows)
    return path


WRITERS = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_jsonl,
    "a.jsonl.zst": write_jsonl,
    "a.parquet": write_parquet,
}


def shards(folder: Path) -> list[Path]:
    """The token files in the order of their tokens."""
    return sorted(folder.glob("*.bin"), key=lambda path: path.stem.rpartition("_")[2])


def tokens_of(folder: Path) -> list[int]:
    return np.concatenate([tokens_in(path) for path in shards(folder)]).tolist()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def tokenized_here(request, monkeypatch):
    """No processes where they are not the subject, as each takes half a second to start."""
    if "processes" not in request.fixturenames:
        monkeypatch.setattr(
            data.workers.Workers,
            "_ask",
            lambda self, batch: data.workers.encode(get_encoding(), batch),
        )


@pytest.fixture
def processes():
    """For tests of the processes that tokenize. Commands, which run in processes of their own,
    always have them.
    """


def written(tmp_path: Path, *sources: Path, name: str = "mine", **options) -> list[int]:
    prepare(tmp_path / "data" / name, sources, **({"shard_tokens": 1000} | options))
    return tokens_of(tmp_path / "data" / name)


# ---- every token is tiktoken's


@pytest.mark.parametrize("name", WRITERS)
def test_the_tokens_of_every_format_are_tiktokens_and_fill_the_shards_validation_first(
    name, processes, tmp_path
):
    documents = texts(300)
    path = WRITERS[name](tmp_path / name, documents)
    tokens = written(tmp_path, path, val_shards=2)
    assert tokens == expected(documents)
    folder = tmp_path / "data" / "mine"
    names = [path.name for path in shards(folder)]
    assert names == [f"mine_{'val' if i < 2 else 'train'}_{i:06d}.bin" for i in range(len(names))]
    assert [TokenFile(path).tokens for path in shards(folder)][:-1] == [1000] * (len(names) - 1)
    train, val = open_corpus(folder, 16, 50257)
    assert (val.tokens, train.tokens) == (2000, len(tokens) - 2000)
    assert [path.name for path in (tmp_path / "data").iterdir()] == [
        "mine"
    ]  # neither a lock nor a part of it


KINDS = [
    pyarrow.large_string(),
    pyarrow.string_view(),
    pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_text_column_is_read(kind, tmp_path):
    documents = texts(40) * 2
    assert written(tmp_path, write_parquet(tmp_path / "a.parquet", documents, kind)) == expected(
        documents
    )


def test_each_text_file_is_a_document_with_its_line_ends_and_without_a_byte_order_mark(tmp_path):
    documents = ["a longer text of words. " * 70_000]
    documents += [text for text in texts(20) if "\0" not in text and not text.startswith("\ufeff")]
    for i, text in enumerate(documents):
        (tmp_path / f"{i:03d}.txt").write_bytes(b"\xef\xbb\xbf" * (i % 3 == 0) + text.encode())
    assert written(tmp_path, tmp_path) == expected(documents)


def test_a_folder_is_read_in_the_order_of_its_paths_with_folders_in_it_formats_mixed(
    tmp_path, capsys
):
    raw = tmp_path / "raw"
    groups = {
        "a/1.jsonl": ["1"],
        "a/2.jsonl.gz": ["2", "3"],
        "b.parquet": ["4"],
        "c/d/5.jsonl.zst": ["5"],
        "e.JSONL": ["6"],
    }
    for name, documents in reversed(groups.items()):
        (write_parquet if name.endswith("parquet") else write_jsonl)(raw / name, documents)
    write_jsonl(raw / ".cache" / "x.jsonl", ["hidden"])
    (raw / "dataset_infos.json").write_text("{\n}")
    write_jsonl(tmp_path / "elsewhere" / "7.jsonl", ["7"])
    (raw / "z").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "round").symlink_to(raw)  # in a circle
    assert written(tmp_path, raw, raw / "b.parquet", val_shards=0) == expected(
        ["1", "2", "3", "4", "5", "6", "7"]
    )
    said = capsys.readouterr().err
    assert re.search(
        r"note: files in the folders that are left out, as their names do not end in \.parquet.*: 1\n",
        said,
    )
    assert (
        "note: files that are named more than once, and taken once, at their first place: 1\n"
        in said
    )


@pytest.mark.parametrize("chunk_chars", [1, 50])
def test_the_number_of_workers_and_how_texts_are_cut_change_no_byte(
    chunk_chars, processes, tmp_path, monkeypatch
):
    documents = texts(20)
    paths = [WRITERS[name](tmp_path / name, documents) for name in WRITERS]
    (tmp_path / "b.txt").write_text("a text of words " * 2000)
    prepare(tmp_path / "one" / "mine", [*paths, tmp_path / "b.txt"], shard_tokens=5000, workers=1)
    monkeypatch.setattr(data.tokenizer, "CHUNK_CHARS", chunk_chars)
    monkeypatch.setattr(data.documents, "BATCH_CHARS", 3000)
    prepare(tmp_path / "three" / "mine", [*paths, tmp_path / "b.txt"], shard_tokens=5000, workers=3)
    assert content(tmp_path / "one" / "mine") == content(tmp_path / "three" / "mine")


def test_half_a_character_in_json_becomes_what_tiktoken_makes_of_it(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "half \\ud83d of it"}\n{"text": "whole \\ud83d\\ude00"}\n'
    )
    assert written(tmp_path, tmp_path / "a.jsonl", val_shards=0) == expected(
        ["half \ud83d of it", "whole 😀"]
    )


def test_json_lines_may_have_a_mark_empty_lines_and_no_last_line_end(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"more": [1], "text": "b"}'
    )
    assert written(tmp_path, tmp_path / "a.jsonl", val_shards=0) == expected(["a", "b"])


def test_the_manifest_counts_and_names_the_files_with_their_sha256(tmp_path):
    documents = texts(50)
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    tokens = written(tmp_path, path, name="m")
    manifest = json.loads((tmp_path / "data" / "m" / "manifest.json").read_text())
    assert (manifest["documents"], manifest["tokens"], manifest["val_tokens"]) == (
        len(documents),
        len(tokens),
        1000,
    )
    assert manifest["train_tokens"] == len(tokens) - 1000
    (sources,) = manifest["sources"]
    assert (sources["file"], sources["bytes"]) == (str(path), path.stat().st_size)
    assert sources["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sources["end_of_text_spelled_out"] == sum(
        text.count("<|endoftext|>") for text in documents
    )
    for shard in manifest["shards"]:
        assert (
            shard["sha256"]
            == hashlib.sha256((tmp_path / "data" / "m" / shard["file"]).read_bytes()).hexdigest()
        )


def test_without_a_number_of_tokens_a_small_corpus_keeps_about_a_tenth_for_validation(tmp_path):
    prepare(tmp_path / "mine", [write_jsonl(tmp_path / "a.jsonl", texts(500))])
    train, val = open_corpus(tmp_path / "mine", 16, 50257)
    assert 0.05 < val.tokens / (train.tokens + val.tokens) < 0.2
    assert len(shards(tmp_path / "mine")) == 2


def test_documents_and_train_are_one_command_each(tmp_path):
    write_jsonl(tmp_path / "raw" / "a.jsonl", texts(100), "content")
    done = run_from_nothing(
        "data/documents.py", "raw", "--name", "mine", "--text_column", "content", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "of 111 documents in data/mine, " in done.stdout
    assert "--dataset mine" in done.stdout
    assert "documents/s" in done.stderr
    assert "tokens/s" in done.stderr
    trained = run(
        "train.py",
        "--n_layer",
        "1",
        "--n_head",
        "1",
        "--n_embd",
        "8",
        "--block_size",
        "16",
        "--seq_len",
        "16",
        "--batch_size",
        "1",
        "--max_steps",
        "1",
        "--device",
        "cpu",
        "--keep_last",
        "0",
        "--dataset",
        "mine",
        cwd=tmp_path,
    )
    assert "step 1/1 | loss" in trained.stdout, trained.stderr


# ---- kill -9


def kill_at(number: int) -> None:
    """Let this process kill itself at its n-th file operation on the corpus that it writes."""
    left = itertools.count(number, -1)

    def kill(event, args):
        if (
            event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "open")
            and "mine" in str(args[0])
            and next(left) == 0
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    forks()
    sys.addaudithook(kill)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with sources, and the corpus that they make."""
    place = tmp_path_factory.mktemp("undisturbed")
    documents = texts(400)
    for i, (name, write) in enumerate(WRITERS.items()):
        write(place / "raw" / f"{i}{name}", documents[i::4])
    (place / "raw" / "z.txt").write_text("words of a text file " * 20_000)
    done = run("data/documents.py", *OPTIONS, cwd=place)
    assert done.returncode == 0, done.stderr
    return place


OPTIONS = ("raw", "--name", "mine", "--shard_tokens", "25000", "--workers", "1")


def test_killed_at_any_file_operation_the_same_command_goes_on_to_the_same_bytes(
    undisturbed, tmp_path
):
    shutil.copytree(undisturbed / "raw", tmp_path / "raw")
    kills = 0
    for number in itertools.count(
        0, 3
    ):  # each life does a little more before its kill, from wherever the last one stopped
        done = run(
            "data/documents.py", *OPTIONS, cwd=tmp_path, before=functools.partial(kill_at, number)
        )
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        kills += 1
        if (tmp_path / "data" / "mine").exists():
            break
    assert kills >= 5
    assert content(tmp_path / "data" / "mine") == content(undisturbed / "data" / "mine")
    assert not unfinished_folder(tmp_path / "data" / "mine").exists()


def test_killed_eight_times_at_random_moments_no_document_is_lost_or_doubled(tmp_path):
    rng = random.Random(14)
    documents = texts(3000, seed=1) * 8
    for i, (name, write) in enumerate(WRITERS.items()):
        write(
            tmp_path / "raw" / f"{i}{name}",
            documents[len(documents) * i // 4 : len(documents) * (i + 1) // 4],
        )
    folder, command = (
        tmp_path / "data" / "mine",
        ("data/documents.py", "raw", "--name", "mine", "--shard_tokens", "40000"),
    )
    kills, seconds = 0, 0.0  # of a shard
    while not folder.exists():
        with ended([start(*command, "--workers", "2", cwd=tmp_path, before=forks)]) as (writer,):
            before = len(list(unfinished_folder(folder).glob("*.bin")))
            if kills < 8:
                wait_for(
                    lambda n=before + 1: len(list(unfinished_folder(folder).glob("*.bin"))) >= n,
                    writer,
                )
                if not kills:
                    begun = time.monotonic()
                    wait_for(
                        lambda: len(list(unfinished_folder(folder).glob("*.bin"))) >= 6, writer
                    )
                    seconds = (time.monotonic() - begun) / 5
                time.sleep(rng.uniform(0, seconds))  # any moment of the next shard
                assert writer.poll() is None, (
                    "raise the number of documents: it was done before it could be killed"
                )
                writer.kill()
                kills += 1
            writer.wait()
            assert kills < 8 or folder.exists() or writer.returncode == -signal.SIGKILL, (
                writer.communicate()
            )
    assert kills == 8
    assert tokens_of(folder) == expected(documents[: len(documents) // 8]) * 8


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux, to see processes")
def test_workers_end_with_the_process_that_asks_them(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(2000))
    with ended(
        [
            start(
                "data/documents.py",
                "a.jsonl",
                "--name",
                "mine",
                "--shard_tokens",
                "1000",
                cwd=tmp_path,
            )
        ]
    ) as (writer,):
        wait_for(lambda: list(unfinished_folder(tmp_path / "data/mine").glob("*.bin")), writer)
        threads = Path(f"/proc/{writer.pid}/task").glob(
            "*/children"
        )  # each has those that it started
        workers = [int(number) for children in threads for number in children.read_text().split()]
        assert workers
        writer.kill()
        writer.wait()
    deadline = time.monotonic() + 20
    while (
        any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


# ---- an unfinished corpus


def begun(tmp_path: Path, documents: list[str], monkeypatch, **options) -> Path:
    """A corpus of a.jsonl and b.jsonl, 3 shards of which have been written when the disk was full."""
    for name, part in (("a.jsonl", documents[:60]), ("b.jsonl", documents[60:])):
        write_jsonl(tmp_path / name, part)
    fail_after(monkeypatch, 3)
    with pytest.raises(TokenFileError) as full:
        go_on(tmp_path, **options)
    monkeypatch.undo()
    assert str(full.value) == (
        f"{tmp_path}/data/mine: cannot be written: No space left on device; free some space; 3 "
        f"whole "
        f"shards are kept: run the same command again to go on"
    )
    return tmp_path / "data" / "mine"


def fail_after(monkeypatch, shards: int) -> None:
    left = itertools.count(shards, -1)

    def write(path, parts):
        if next(left) <= 0:
            path.write_bytes(b"a part of it")
            raise OSError(28, "No space left on device")
        return write_token_file(path, parts)

    monkeypatch.setattr(data.documents, "write_token_file", write)


def go_on(tmp_path: Path, *more: Path, **options):
    usual: dict[str, Any] = {"shard_tokens": 1000, "command": "python documents.py a b"}
    return prepare(
        tmp_path / "data" / "mine",
        [tmp_path / "a.jsonl", tmp_path / "b.jsonl", *more],
        **(usual | options),
    )


def test_a_disk_that_fills_up_keeps_the_whole_shards_and_training_is_told_how_to_go_on(
    tmp_path, monkeypatch
):
    documents = texts(120)
    folder = begun(tmp_path, documents, monkeypatch)
    assert sorted(content(unfinished_folder(folder))) == [
        "manifest.json",
        "mine_train_000001.bin",
        "mine_train_000002.bin",
        "mine_val_000000.bin",
    ]
    for refused in (
        lambda: prepare_if_missing(folder, print),
        lambda: open_corpus(unfinished_folder(folder), 16, 50257),
    ):
        with pytest.raises(
            TokenFileError,
            match=r"is not finished: 3 shards are written, 3,000 tokens; "
            r"go on with: python documents.py a b$",
        ):
            refused()
    go_on(tmp_path, workers=3)
    assert tokens_of(folder) == expected(documents)


def swap(path: Path, one: bytes, other: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(one, other))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda place: write_jsonl(place / "a.jsonl", ["other"]),
            r"a\.jsonl has changed since it was begun; put the files back",
        ),
        (lambda place: swap(place / "a.jsonl", b"the", b"teh"), r"a\.jsonl has changed"),
        (lambda place: (place / "b.jsonl").unlink(), r"b\.jsonl: cannot be read: No such file"),
        (
            lambda place: (place / "data/mine.unfinished.tmp/mine_val_000000.bin").unlink(),
            r"mine_val_000000\.bin: cannot be read",
        ),
        (
            lambda place: (place / "data/mine.unfinished.tmp/manifest.json").write_text("{"),
            r"damaged; delete .*tmp to begin .* anew",
        ),
    ],
    ids=["rewritten", "same size", "gone", "shard gone", "manifest"],
)
def test_a_corpus_whose_files_have_changed_is_not_gone_on_with(
    change, message, tmp_path, monkeypatch
):
    begun(tmp_path, texts(120), monkeypatch)
    change(tmp_path)
    with pytest.raises(TokenFileError, match=message):
        go_on(tmp_path)


def cut_short(path: Path, documents: list[str]) -> None:
    write_jsonl(path, documents)
    os.truncate(path, path.stat().st_size * 9 // 10)


def with_a_bad_line(path: Path, documents: list[str]) -> None:
    write_jsonl(path, documents)
    swap(path, b"marked", b'"')


DAMAGED = {
    "a.jsonl": with_a_bad_line,
    "a.jsonl.gz": cut_short,
    "a.jsonl.zst": cut_short,
    "a.parquet": lambda path, documents: write_parquet(
        path, [None if text == "marked" else text for text in documents]
    ),
    "a.txt": lambda path, documents: path.write_bytes(
        "".join(documents).encode().replace(b"marked", b"\xff")
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_source_that_is_mended_is_gone_on_with_and_the_shards_before_stay(
    name, tmp_path, monkeypatch
):
    documents = [text for text in texts(300) if "\0" not in text and "\ufeff" not in text]
    documents.insert(-20, "marked")
    if name == "a.txt":  # is read a megabyte at a time
        documents.insert(0, "words of a text " * 80_000)
    path, folder, options = (
        tmp_path / name,
        tmp_path / "data" / "mine",
        {"shard_tokens": 50_000 if name == "a.txt" else 1000},
    )
    monkeypatch.setattr(data.documents, "SAMPLED_CHARS", 100)
    monkeypatch.setattr(data.documents, "BATCH_CHARS", 3000)
    monkeypatch.setattr(data.tokenizer, "CHUNK_CHARS", 1000)
    DAMAGED[name](path, documents)
    with pytest.raises(
        TokenFileError, match=r"whole shards are kept: run the same command again to go on"
    ):
        written(tmp_path, path, **options)
    kept = {path.name: path.stat().st_ino for path in unfinished_folder(folder).glob("*.bin")}
    assert len(kept) > 3
    if name == "a.txt":
        path.write_text("".join(documents), newline="")
        documents = ["".join(documents)]
    else:
        WRITERS[name](path, documents)
    assert written(tmp_path, path, **options) == expected(documents)
    assert kept.items() <= {path.name: path.stat().st_ino for path in folder.glob("*.bin")}.items()
    assert read_manifest(folder).sources[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_source_that_has_not_been_read_yet_may_change_and_one_that_is_only_touched_is_the_same(
    tmp_path, monkeypatch
):
    documents = texts(120)
    folder = begun(tmp_path, documents, monkeypatch)
    write_jsonl(tmp_path / "b.jsonl", ["other"])
    for shards_more in (1, 2):  # what was taken is known also after going on more than once
        os.utime(tmp_path / "a.jsonl")
        fail_after(monkeypatch, shards_more)
        with pytest.raises(TokenFileError, match="whole shards are kept"):
            go_on(tmp_path)
        monkeypatch.undo()
    assert read_manifest(unfinished_folder(folder)).unfinished.place[0] == 0
    os.utime(tmp_path / "a.jsonl")
    go_on(tmp_path)
    assert tokens_of(folder) == expected([*documents[:60], "other"])
    assert read_manifest(folder).sources[1].bytes == (tmp_path / "b.jsonl").stat().st_size


def test_a_shard_counts_as_kept_before_the_source_it_is_from_has_been_hashed(tmp_path, monkeypatch):
    real, path, folder = (
        data.documents._sha256,
        write_jsonl(tmp_path / "a.jsonl", texts(50)),
        tmp_path / "data" / "mine",
    )

    def after_two_shards(source, stopped):
        while not stopped() and len(list(unfinished_folder(folder).glob("*.bin"))) < 2:
            time.sleep(0.01)
        return real(source)

    monkeypatch.setattr(data.documents, "_sha256", after_two_shards)
    written(tmp_path, path)
    assert read_manifest(folder).sources[0].sha256 == real(path)


def test_a_corpus_is_not_gone_on_with_by_another_command(tmp_path, monkeypatch):
    begun(tmp_path, texts(120), monkeypatch)
    write_jsonl(tmp_path / "c.jsonl", ["new"])
    with pytest.raises(
        TokenFileError,
        match=r"was begun with --shard_tokens 1000, not 2000; go on with: python documents.py a b; "
        r"or delete .*mine\.unfinished\.tmp to begin anew",
    ):
        go_on(tmp_path, shard_tokens=2000)
    with pytest.raises(TokenFileError, match=r"begun with --text_column text, not content"):
        go_on(tmp_path, text_column="content")
    with pytest.raises(
        TokenFileError, match=r"c\.jsonl has come to the sources since it was begun"
    ):
        go_on(tmp_path, tmp_path / "c.jsonl")


def test_of_two_writers_the_second_is_refused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(3000))
    command = ("data/documents.py", "a.jsonl", "--name", "mine", "--shard_tokens", "1000")
    with ended([start(*command, cwd=tmp_path)]) as (first,):
        wait_for(lambda: unfinished_folder(tmp_path / "data/mine").exists(), first)
        first.send_signal(signal.SIGSTOP)
        second = run(*command, cwd=tmp_path)
        assert (second.returncode, second.stdout) == (1, "")
        assert (
            second.stderr
            == "error: data/mine: another process is writing this corpus; wait for it, or choose another name\n"
        )
        first.send_signal(signal.SIGCONT)
        out, err = first.communicate()
        assert "--dataset mine" in out, err


def test_ctrl_c_keeps_the_shards_and_says_how_to_go_on(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(3000))
    command = ("data/documents.py", "a.jsonl", "--name", "mine", "--shard_tokens", "1000")
    with ended([start(*command, cwd=tmp_path)]) as (writer,):
        wait_for(
            lambda: len(list(unfinished_folder(tmp_path / "data/mine").glob("*.bin"))) > 4, writer
        )  # one may have no name yet
        writer.send_signal(signal.SIGINT)
        _, err = writer.communicate()
        assert (writer.returncode, err.splitlines()[-1]) == (
            130,
            "error: interrupted; run the same command again to go on",
        )
    assert len(list(unfinished_folder(tmp_path / "data/mine").glob("*.bin"))) > 3
    done = run(*command, cwd=tmp_path)
    assert "of them written" in done.stderr
    assert tokens_of(tmp_path / "data/mine") == expected(texts(3000))


def test_a_worker_that_is_killed_is_one_line(processes, tmp_path, monkeypatch):
    real = data.documents.Workers._start

    def start_and_kill(self):
        process = real(self)
        process.kill()
        return process

    monkeypatch.setattr(data.documents.Workers, "_start", start_and_kill)
    with pytest.raises(
        TrainingError,
        match=r"a process that tokenizes has ended: killed by signal 9, as the system does when",
    ):
        written(tmp_path, write_jsonl(tmp_path / "a.jsonl", ["a"]))
    assert not (tmp_path / "data").exists()


def test_a_worker_that_dies_in_the_middle_takes_no_document_with_it(tmp_path, monkeypatch):
    documents, asked = texts(200), itertools.count()
    path = write_jsonl(tmp_path / "a.jsonl", documents)

    def ask(self, batch):
        if next(asked) == 5:
            raise TrainingError("a process that tokenizes has ended")
        return data.workers.encode(get_encoding(), batch)

    monkeypatch.setattr(data.documents, "BATCH_CHARS", 5000)
    monkeypatch.setattr(data.workers.Workers, "_ask", ask)
    with pytest.raises(TrainingError, match="has ended"):
        written(tmp_path, path, shard_tokens=300, workers=1)
    kept = tokens_of(unfinished_folder(tmp_path / "data" / "mine"))
    assert kept == expected(documents)[: len(kept)]
    assert written(tmp_path, path, shard_tokens=300) == expected(documents)


# ---- bad input

LINE = '{"text": "good"}\n'
BAD_LINES = {
    "no JSON": ('{"text": "bad"', "not a line of JSON: Expecting ',' delimiter, column"),
    "no object": ('["text"]', 'must be a JSON object with the text under "text", and is a list'),
    "no such key": (
        '{"content": "x", "id": 1}',
        'has no "text"; it has "content", "id"; say with --text_column where the text is',
    ),
    "no keys": ("{}", 'has no "text"; it has nothing'),
    "null": ('{"text": null}', '"text" is null, not a text'),
    "a number": ('{"text": 1.5}', '"text" is a number, not a text'),
    "a list": ('{"text": ["a"]}', '"text" is a list, not a text'),
    "brackets in brackets": ("[" * 100_000, "not a line of JSON that can be read: RecursionError"),
    "a long number": (
        '{"text": ' + "1" * 5000 + "}",
        "not a line of JSON that can be read: ValueError",
    ),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8: invalid start byte, byte 11"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_by_file_and_number_and_can_be_left_out(case, tmp_path):
    bad, message = BAD_LINES[case]
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b"".join(
            [
                LINE.encode(),
                b"\n",
                bad if isinstance(bad, bytes) else bad.encode(),
                b"\n",
                LINE.encode(),
            ]
        )
    )
    with pytest.raises(TokenFileError) as refused:
        written(tmp_path, path)
    assert str(refused.value).startswith(f"{path}: line 3: {message}")
    assert str(refused.value).endswith(
        "; correct it, or leave out up to N like it with --skip_bad N"
    )
    assert not (tmp_path / "data").exists()
    assert written(tmp_path, path, skip_bad=1, val_shards=0) == expected(["good", "good"])
    assert read_manifest(tmp_path / "data" / "mine").skipped == 1


def test_more_bad_lines_than_may_be_left_out_end_it_and_with_more_it_goes_on_where_it_was(
    tmp_path, monkeypatch
):
    documents = texts(100)
    lines = [json.dumps({"text": text}) for text in documents]
    for i in (80, 50, 20):
        lines.insert(i, "bad")
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(data.documents, "SAMPLED_CHARS", 100)
    with pytest.raises(
        TokenFileError,
        match=r"line 83: not a line of JSON.*; the 2 before it were left out, as --skip_bad allows; "
        r".*; \d+ whole shards are kept: run the same command again to go on",
    ):
        written(tmp_path, tmp_path / "a.jsonl", skip_bad=2, shard_tokens=100)
    assert written(tmp_path, tmp_path / "a.jsonl", skip_bad=3, shard_tokens=100) == expected(
        documents
    )
    assert read_manifest(tmp_path / "data" / "mine").skipped == 3


def test_a_wrong_text_column_of_json_lines_ends_at_the_first_line_before_anything_is_written(
    tmp_path, monkeypatch
):
    path = write_jsonl(tmp_path / "a.jsonl", texts(50))
    monkeypatch.setattr(data.documents, "_write", None)
    with pytest.raises(
        TokenFileError, match=r'line 3: has no "content"; .*; the 2 before it were left out'
    ):
        written(tmp_path, path, text_column="content", skip_bad=2)


def test_json_lines_that_are_called_json_are_read_if_the_file_itself_is_named(tmp_path):
    path = write_jsonl(tmp_path / "raw" / "a.json.gz", ["a", "b"])
    assert written(tmp_path, path, val_shards=0) == expected(["a", "b"])
    with pytest.raises(
        TokenFileError,
        match=r"raw: no file in it has a name that ends in .*\.json if the file itself is named",
    ):
        written(tmp_path, tmp_path / "raw", name="other")


def test_a_parquet_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", ["a"])

    def refuse(*args, **kwargs):  # as it is refused to anybody but root
        raise PermissionError(
            errno.EACCES,
            f"Failed to open local file '{path}'. Detail: [errno 13] Permission denied",
        )

    monkeypatch.setattr(parquet, "ParquetFile", refuse)
    with pytest.raises(TokenFileError, match=r"a\.parquet: cannot be read: Permission denied$"):
        written(tmp_path, path)


def test_a_missing_column_of_a_parquet_file_names_those_that_are_there(tmp_path):
    good, bad = (
        write_parquet(tmp_path / "a.parquet", ["a"]),
        write_parquet(tmp_path / "b.parquet", ["b"], column="content"),
    )
    with pytest.raises(
        TokenFileError,
        match=r'b\.parquet: has no column "text"; it has "id", "content"; say with --text_column',
    ):
        written(tmp_path, good, bad)
    with pytest.raises(
        TokenFileError,
        match=r'the column "id" holds int64, not text; columns with text: "content"; say with',
    ):
        written(tmp_path, bad, text_column="id")


def test_null_in_a_parquet_file_is_a_bad_row(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["a", None, "b"])
    with pytest.raises(
        TokenFileError,
        match=r"a\.parquet: row 2: null, not a text; correct it, or leave out up to N like it",
    ):
        written(tmp_path, path)
    assert written(tmp_path, path, skip_bad=1, val_shards=0) == expected(["a", "b"])


def test_bytes_in_a_text_column_that_are_no_text_are_a_bad_row(tmp_path):
    texts_of_bytes = pyarrow.array([b"a", b"\xff", b"b"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": texts_of_bytes}), tmp_path / "a.parquet")
    with pytest.raises(TokenFileError, match=r"a\.parquet: row 2: not UTF-8: invalid start byte"):
        written(tmp_path, tmp_path / "a.parquet")
    assert written(tmp_path, tmp_path / "a.parquet", skip_bad=1, val_shards=0) == expected(
        ["a", "b"]
    )


DAMAGES = {
    "cut short": lambda content: content[: len(content) * 2 // 3],
    "empty": lambda content: b"",
    "another content": lambda content: b"<html>no such page</html>",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_damaged_file_is_one_line_that_names_it(name, damage, tmp_path):
    path = WRITERS[name](tmp_path / name, texts(200))
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(TokenFileError) as refused:
        written(tmp_path, path)
    if damage == "empty" and name != "a.parquet":  # an empty file unpacks to nothing
        assert str(refused.value).endswith(
            "there is no text to write: 0 documents, all of them empty"
        )
    else:
        assert str(refused.value).startswith(
            f"{path}: not a whole {path.suffix} file, but cut short or damaged ("
        )
        assert str(refused.value).endswith("; fetch or write it again")
    assert not (tmp_path / "data").exists()


def test_a_parquet_file_that_is_damaged_within_is_one_line_that_names_it(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", texts(200), rows=1000)
    harmed = bytearray(path.read_bytes())
    harmed[2000:3000] = bytes(1000)
    path.write_bytes(harmed)
    with pytest.raises(
        TokenFileError, match=r"a\.parquet: (not a whole \.parquet file|row \d+: not UTF-8)"
    ):
        written(tmp_path, path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "Müller".encode("latin-1") * 9, r"a\.txt: not UTF-8 text"),
        ("a.txt", "good".encode("utf-16-le"), r"a\.txt: .*NUL"),
        (
            "a.csv",
            b"x",
            r"a\.csv: its name does not end in \.parquet, \.jsonl .*which says what a file holds",
        ),
        ("missing.jsonl", None, r"missing\.jsonl: cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_document_is_one_line_that_names_it(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenFileError, match=message):
        written(tmp_path, tmp_path / name)
    assert not (tmp_path / "data").exists()


def test_a_folder_without_documents_and_one_with_a_link_that_leads_nowhere_are_named(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.md").write_text("x")
    with pytest.raises(
        TokenFileError, match=r"raw: no file in it has a name that ends in \.parquet"
    ):
        written(tmp_path, tmp_path / "raw")
    (tmp_path / "raw" / "a.jsonl").symlink_to("nowhere")
    with pytest.raises(TokenFileError, match=r"raw/a\.jsonl: cannot be read: No such file"):
        written(tmp_path, tmp_path / "raw")


def test_too_little_space_is_told_beforehand_with_what_is_needed(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", texts(300))
    monkeypatch.setattr(
        shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**6, 10**6 - 5000, 5000)
    )
    with pytest.raises(
        TokenFileError,
        match=r"mine: the disk has too little space: .* are needed \(about [\d,]+ tokens in 1 "
        r"file\), 5 kB are free; free some, name another place with --data_dir",
    ):
        written(tmp_path, path)
    assert not (tmp_path / "data").exists()


def test_going_on_frees_what_a_killed_writer_left_before_it_asks_for_space(tmp_path, monkeypatch):
    documents = texts(120)
    folder = begun(tmp_path, documents, monkeypatch)
    strays = [unfinished_folder(folder) / name for name in ("shard.tmp", "mine_train_000003.bin")]
    for stray in strays:
        stray.write_bytes(b"a part of it")
    free = lambda place: shutil._ntuple_diskusage(
        10**9, 0, 0 if any(stray.exists() for stray in strays) else 10**9
    )  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", free)
    go_on(tmp_path)
    assert tokens_of(folder) == expected(documents)


def test_a_disk_that_is_full_at_the_manifest_is_told_once_and_no_shard_that_it_does_not_name_stays(
    tmp_path, monkeypatch
):
    path, folder, left = (
        write_jsonl(tmp_path / "a.jsonl", texts(100)),
        tmp_path / "data" / "mine",
        itertools.count(2, -1),
    )
    real = data.manifest.write_whole

    def write(path, text):
        if next(left) == 0:
            raise cannot_be_written(path, OSError(errno.ENOSPC, "No space left on device"))
        real(path, text)

    monkeypatch.setattr(data.manifest, "write_whole", write)
    with pytest.raises(
        TokenFileError,
        match=r"mine: cannot be written: No space left on device; free some space; 2 ",
    ):
        written(tmp_path, path)
    assert len(shards(unfinished_folder(folder))) == 2
    assert written(tmp_path, path) == expected(texts(100))


def test_a_name_that_is_not_utf8_in_the_command_leaves_a_manifest_that_can_be_read(
    tmp_path, monkeypatch
):
    begun(tmp_path, texts(120), monkeypatch, command="python data/documents.py caf\udce9.jsonl")
    assert read_manifest(unfinished_folder(tmp_path / "data/mine")).unfinished.command.endswith(
        r"caf\xe9.jsonl"
    )
    go_on(tmp_path)


def test_the_time_left_is_that_of_what_is_still_to_be_read_also_after_going_on(
    tmp_path, monkeypatch, capsys
):
    sources, _ = find_sources([write_jsonl(tmp_path / "a.jsonl", ["a" * 100_000])])
    seconds = itertools.count(0, 100)
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    progress = data.documents._Progress(sources, Place())
    for share in (0.5, 0.75):  # from half of the file on
        progress.after([Piece("a", True, Place(), int(share * sources[0].size))], 1)
    assert re.fullmatch(
        r"75\.0%, .*, 0:05:00 left", capsys.readouterr().err.splitlines()[-1]
    )  # a quarter took 300 seconds


def test_a_corpus_that_would_be_all_validation_says_what_to_do(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["a b c d"] * 20)
    with pytest.raises(
        TokenFileError,
        match=r"all 100 tokens go into the validation shards, of 1,000 tokens each, and none are "
        r"left to train on; run this again with --shard_tokens 10, or with --val_shards 0",
    ):
        written(tmp_path, path)
    assert len(written(tmp_path, path, shard_tokens=10)) == 100


def test_a_file_that_is_changed_while_it_is_read_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", texts(10))
    sources, _ = find_sources([path])
    pieces = read_documents(sources, "text", print)
    next(pieces)
    path.write_bytes(path.read_bytes() + LINE.encode())
    with pytest.raises(TokenFileError, match=r"a\.jsonl: was changed while it was read"):
        list(pieces)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "a/b"], "--name a/b: must be a plain name"),
        (["--name", "fineweb"], "is the corpus that data/fineweb.py writes"),
        (["--name", "mine", "--workers", "0"], "argument --workers: must be at least 1, not 0"),
        ([], "--name"),
        (["--name", "mine", "--shard_tokens", "-5"], "argument --shard_tokens: must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    done = run("data/documents.py", "a.jsonl", *options, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert message in done.stderr.splitlines()[-1]
    assert not (tmp_path / "data").exists()


def test_a_corpus_that_is_there_is_not_overwritten(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["a b c"] * 9)
    tokens = written(tmp_path, path, val_shards=0)
    with pytest.raises(
        TokenFileError, match=r"mine: is there already; choose another name or delete it first"
    ):
        written(tmp_path, path, val_shards=0)
    assert tokens_of(tmp_path / "data" / "mine") == tokens


# ---- training by the manifest


def test_a_shard_that_is_missing_by_the_manifest_is_refused_wherever_it_is(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", texts(100))
    for i in (0, 2, -1):
        written(tmp_path, path, name=f"c{i}", shard_tokens=500)
        folder = tmp_path / "data" / f"c{i}"
        lost = shards(folder)[i]
        lost.unlink()
        with pytest.raises(
            TokenFileError,
            match=rf"{lost.name} is missing: manifest\.json names \d+ token files; restore what is "
            r"missing, or delete manifest\.json to train on the files that are there",
        ):
            open_corpus(folder, 16, 50257)
    (folder / "manifest.json").unlink()
    open_corpus(folder, 16, 50257)


def test_train_refuses_a_corpus_with_a_shard_missing_in_a_line(tmp_path):
    written(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts(100)), shard_tokens=500)
    (tmp_path / "data/mine/mine_train_000002.bin").unlink()
    (tmp_path / "data/mine/mine_train_000003.bin").unlink()
    done = run(
        "train.py",
        "--dataset",
        "mine",
        "--n_layer",
        "1",
        "--n_head",
        "1",
        "--n_embd",
        "8",
        "--seq_len",
        "16",
        "--block_size",
        "16",
        "--device",
        "cpu",
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: data/mine: mine_train_000002.bin and 1 more are missing: manifest.json names "
    )
    assert len(done.stderr.splitlines()) == 1


def test_a_shard_of_another_length_and_a_damaged_manifest_are_refused_and_more_files_are_not(
    tmp_path,
):
    written(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts(100)), shard_tokens=500)
    folder = tmp_path / "data" / "mine"
    write_token_file(folder / "more_val_000000.bin", [range(100)])
    open_corpus(folder, 16, 50257)
    write_token_file(folder / "mine_train_000001.bin", [range(100)])
    with pytest.raises(
        TokenFileError,
        match=r"mine_train_000001\.bin: holds 100 tokens, not the 500 that manifest\.json names",
    ):
        open_corpus(folder, 16, 50257)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(
        TokenFileError, match=r"manifest\.json: damaged, or not written by data/documents\.py"
    ):
        open_corpus(folder, 16, 50257)


def test_the_sources_which_may_be_a_million_are_not_read_to_train(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    write_token_file(folder / "mine_train_000000.bin", [range(100)])
    whole = Manifest(
        corpus="mine",
        options=Options(text_column="text", shard_tokens=100, val_shards=0, val_shard_tokens=0),
        shards=[Shard(file="mine_train_000000.bin", tokens=100, sha256="any")],
        sources=[SourceFile(file='",sources":[', bytes=1)] * 1000,
    )
    whole.write(folder)
    texts_read, parse = [], Manifest.model_validate_json
    monkeypatch.setattr(
        Manifest, "model_validate_json", lambda text: texts_read.append(text) or parse(text)
    )
    open_corpus(folder, 16, 50257)
    assert sum(map(len, texts_read)) < 1000
    assert read_manifest(folder, with_sources=False) == whole.model_copy(update={"sources": []})
    path = folder / "manifest.json"
    for cut in (-1, -2, -100):  # the end of it is not as it was written: then all of it counts
        path.write_bytes(path.read_bytes()[:cut])
        with contextlib.suppress(TokenFileError):
            assert read_manifest(folder, with_sources=False).sources == whole.sources
    path.write_text(whole.model_dump_json(indent=1))
    assert read_manifest(folder, with_sources=False) == whole
    whole.unfinished = Unfinished(command="[]", place=[], into=0, taken="", modified=0)
    whole.write(folder)
    with pytest.raises(TokenFileError, match="is not finished"):
        open_corpus(folder, 16, 50257)


# ---- FineWeb-Edu's original


def test_fineweb_takes_parquet_files_of_the_original(tmp_path):
    documents = texts(50)
    write_parquet(tmp_path / "sample" / "000_00000.parquet", documents)
    done = run("data/fineweb.py", "--source", "sample", "--shard_tokens", "1000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tokens_of(tmp_path / "data" / "fineweb") == expected(documents)
    with pytest.raises(
        TokenFileError,
        match=r"fineweb: holds a corpus that was written with --source; choose another place",
    ):
        fineweb.prepare(tmp_path / "data" / "fineweb", 1)
    for options, message in (
        (["--source", "sample", "--shards", "3"], "--shards is how many ready shards to download"),
        (["--workers", "3"], "have no effect without --source"),
    ):
        done = run("data/fineweb.py", *options, cwd=tmp_path)
        assert done.returncode == 2
        assert message in done.stderr


def test_ready_shards_of_fineweb_are_kept_without_a_network_and_a_damaged_one_is_fetched_again(
    tmp_path, monkeypatch
):
    asked = []

    def download(repository, name, *, repo_type, local_dir):
        asked.append(name)
        assert not (Path(local_dir) / name).exists()
        write_token_file(Path(local_dir) / name, [range(10)])

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    for name in ("val_000000", "train_000001", "train_000002"):
        write_token_file(tmp_path / f"finewebedu_{name}.bin", [range(9)])
    assert fineweb.prepare(tmp_path, 2) == 18
    assert asked == []
    os.truncate(tmp_path / "finewebedu_train_000001.bin", 1030)
    assert fineweb.prepare(tmp_path, 2) == 19
    assert asked == ["finewebedu_train_000001.bin"]


def test_a_download_of_fineweb_beside_another_writer_of_the_corpus_is_refused(tmp_path):
    with open(lock_file(tmp_path / "fineweb"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another process holds it
        with pytest.raises(TokenFileError, match="fineweb: another process is writing this corpus"):
            fineweb.prepare(tmp_path / "fineweb", 1)


def test_training_never_pays_for_parquet(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train; "
        f"assert not {{'pyarrow', 'zstandard', 'data.documents'}} & set(sys.modules)"
    )
    done = run_from_nothing("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
