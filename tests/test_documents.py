"""data/documents.py: every token is tiktoken's, whatever the format and the number of workers, also
after kill -9 at any moment.
"""

import contextlib
import fcntl
import functools
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
from data.documents import prepare
from data.manifest import Manifest, read_manifest, unfinished_folder
from data.prepare import prepare_if_missing
from data.sources import BadRecords, find_sources, read_pieces
from data.token_file import TokenFile, TokenFileError, write_token_file
from data.tokenizer import END_OF_TEXT, get_encoding
from dataloader import open_corpus
from runtime.errors import TrainingError
from runtime.files import lock_file
from tests.conftest import ROOT, ended, run, run_from_nothing, start, tokens_in, wait_for

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "Zürich",
    "12,345",
    "'s",
    "\n\n",
    "😀",
    "\t",
    "<|endoftext|>",
]
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
SHARD_OPTIONS = ("--name", "mine", "--shard_tokens", "1000")


def texts(n: int, seed: int = 0) -> list[str]:
    """Documents of many lengths, the nasty ones among them."""
    rng = random.Random(seed)
    plain = [" ".join(rng.choices(WORDS, k=int(rng.lognormvariate(4, 1.2)))) for _ in range(n)]
    for i, nasty in enumerate(NASTY):
        plain.insert(i * len(plain) // len(NASTY), nasty)
    return plain


def expected(documents: list[str]) -> list[int]:
    return [
        token
        for text in documents
        for token in (END_OF_TEXT, *get_encoding().encode_ordinary(text))
    ]


def write_jsonl(path: Path, documents: Sequence[str | None], column: str = "text") -> Path:
    lines = [
        json.dumps({"id": i, column: text}, ensure_ascii=i % 2 == 0)
        for i, text in enumerate(documents)
    ]
    content = "\n".join([*lines, ""]).encode()
    half = len(content) // 2  # in two parts, as parallel writers make them
    packers: dict[str, Callable[[bytes], bytes]]
    packers = {".gz": gzip.compress, ".zst": zstandard.compress}
    pack = packers.get(path.suffix, bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack(content[:half]) + pack(content[half:]))
    return path


def write_parquet(
    path: Path,
    documents: Sequence[str | None],
    column: str = "text",
    kind: pyarrow.DataType | None = None,
    rows: int = 7,
) -> Path:
    values = pyarrow.array(documents, pyarrow.string()).cast(kind or pyarrow.string())
    table = pyarrow.table({"id": list(range(len(documents))), column: values})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=rows)
    return path


WRITERS: dict[str, Callable] = {
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
    """Tokenize in a thread where processes are not the subject, as each takes half a second to
    start. Commands always have processes.
    """
    if "processes" not in request.fixturenames:
        monkeypatch.setattr(
            data.workers, "ProcessPoolExecutor", lambda *args, **kwargs: ThreadPoolExecutor(1)
        )


@pytest.fixture
def processes():
    """For tests of the processes that tokenize."""


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(data.documents, "SAMPLED_CHARS", 100)
    monkeypatch.setattr(data.sources, "BATCH_CHARS", 3000)
    monkeypatch.setattr(data.tokenizer, "CHUNK_CHARS", 1000)
    monkeypatch.setattr(data.workers, "AHEAD", 1)


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


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
    ids=str,
)
def test_every_kind_of_text_column_is_read(kind, tmp_path):
    documents = texts(40) * 2
    path = write_parquet(tmp_path / "a.parquet", documents, kind=kind)
    assert written(tmp_path, path) == expected(documents)


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
        ".cache/x.jsonl": ["hidden"],
    }
    for name, documents in reversed(groups.items()):
        (write_parquet if name.endswith("parquet") else write_jsonl)(raw / name, documents)
    (raw / "dataset_infos.json").write_text("{\n}")
    write_jsonl(tmp_path / "elsewhere" / "7.jsonl", ["7"])
    (raw / "z").symlink_to(tmp_path / "elsewhere")
    tokens = written(tmp_path, raw, raw / "b.parquet", val_shards=0)
    assert tokens == expected(["1", "2", "3", "4", "5", "6", "7"])
    out = capsys.readouterr().err
    assert re.search(r"note: files left out, as their names do not end in \.parquet.*: 1\n", out)
    assert "note: files named more than once, and taken once, at their first place: 1\n" in out


def test_a_circle_of_linked_folders_ends_with_each_file_once(tmp_path):
    write_jsonl(tmp_path / "raw" / "a.jsonl", ["1"])
    (tmp_path / "raw" / "round").symlink_to(tmp_path / "raw")
    assert written(tmp_path, tmp_path / "raw", val_shards=0) == expected(["1"])


@pytest.mark.parametrize("chunk_chars", [1, 50])
def test_the_number_of_workers_and_how_texts_are_cut_change_no_byte(
    chunk_chars, processes, tmp_path, monkeypatch
):
    paths = [WRITERS[name](tmp_path / name, texts(20)) for name in WRITERS]
    (tmp_path / "b.txt").write_text("a text of words " * 2000)
    paths.append(tmp_path / "b.txt")
    prepare(tmp_path / "one" / "mine", paths, shard_tokens=5000, workers=1)
    monkeypatch.setattr(data.tokenizer, "CHUNK_CHARS", chunk_chars)
    monkeypatch.setattr(data.sources, "BATCH_CHARS", 3000)
    prepare(tmp_path / "three" / "mine", paths, shard_tokens=5000, workers=3)
    assert content(tmp_path / "one" / "mine") == content(tmp_path / "three" / "mine")


@pytest.mark.parametrize(
    ("lines", "documents"),
    [
        (
            b'{"text": "half \\ud83d of it"}\n{"text": "whole \\ud83d\\ude00"}\n',
            ["half \ud83d of it", "whole 😀"],
        ),
        (b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"more": [1], "text": "b"}', ["a", "b"]),
    ],
    ids=["half a character", "a mark, empty lines, no last line end"],
)
def test_json_lines_that_are_unusual_are_read(lines, documents, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines)
    assert written(tmp_path, tmp_path / "a.jsonl", val_shards=0) == expected(documents)


def test_the_manifest_counts_and_names_the_files_with_their_sha256(tmp_path):
    documents = texts(50)
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    tokens = written(tmp_path, path)
    folder = tmp_path / "data" / "mine"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["documents"], manifest["tokens"]) == (len(documents), len(tokens))
    assert (manifest["val_tokens"], manifest["train_tokens"]) == (1000, len(tokens) - 1000)
    assert manifest["sources"] == [
        {
            "file": str(path),
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "documents": len(documents),
            "skipped": 0,
            "end_of_text_spelled_out": sum(text.count("<|endoftext|>") for text in documents),
        }
    ]
    for shard in manifest["shards"]:
        assert shard["sha256"] == hashlib.sha256((folder / shard["file"]).read_bytes()).hexdigest()


def test_without_a_number_of_tokens_a_small_corpus_keeps_about_a_tenth_for_validation(tmp_path):
    prepare(tmp_path / "mine", [write_jsonl(tmp_path / "a.jsonl", texts(500))])
    train, val = open_corpus(tmp_path / "mine", 16, 50257)
    assert 0.05 < val.tokens / (train.tokens + val.tokens) < 0.2
    assert len(shards(tmp_path / "mine")) == 2


SMALLEST = (
    *("--n_layer", "1", "--n_head", "1", "--n_embd", "8", "--block_size", "16", "--seq_len", "16"),
    *("--batch_size", "1", "--max_steps", "1", "--device", "cpu", "--keep_last", "0"),
)


def test_documents_and_train_are_one_command_each(tmp_path):
    write_jsonl(tmp_path / "raw" / "a.jsonl", texts(100), "content")
    command = ("data/documents.py", "raw", "--name", "mine", "--text_column", "content")
    done = run_from_nothing(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "of 111 documents in data/mine, " in done.stdout
    assert "--dataset mine" in done.stdout
    assert re.search(r"mine_train_000001\.bin: [\d,]+ tokens written, [\d,]+ tokens/s", done.stderr)
    trained = run("train.py", *SMALLEST, "--dataset", "mine", cwd=tmp_path)
    assert "step 1/1 | loss" in trained.stdout, trained.stderr


# ---- kill -9


def fork_workers() -> None:
    """Let this process fork its workers: they start faster than others."""
    real = multiprocessing.get_context
    multiprocessing.get_context = lambda method: real("fork")  # type: ignore[assignment]


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

    fork_workers()
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


def test_killed_at_any_file_operation_the_same_command_resumes_to_the_same_bytes(
    undisturbed, tmp_path
):
    shutil.copytree(undisturbed / "raw", tmp_path / "raw")
    corpus = tmp_path / "data" / "mine"
    # each life does a little more before its kill, from wherever the last one stopped
    for kills in itertools.count():
        before = functools.partial(kill_at, 3 * kills)
        done = run("data/documents.py", *OPTIONS, cwd=tmp_path, before=before)
        if done.returncode == 0 or corpus.exists():
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert kills >= 5
    assert content(corpus) == content(undisturbed / "data" / "mine")
    assert not unfinished_folder(corpus).exists()


def written_shards(tmp_path: Path) -> list[Path]:
    return list(unfinished_folder(tmp_path / "data/mine").glob("mine_*.bin"))


@contextlib.contextmanager
def writing(tmp_path: Path, *options: str, at_least: int = 1, before=fork_workers) -> Iterator[Any]:
    """A data/documents.py that has written some shards of the corpus `mine`."""
    with ended([start("data/documents.py", *options, cwd=tmp_path, before=before)]) as (writer,):
        wait_for(lambda: len(written_shards(tmp_path)) >= at_least, writer)
        yield writer


def test_killed_eight_times_at_random_moments_no_document_is_lost_or_doubled(tmp_path):
    rng, documents = random.Random(14), texts(3000, seed=1)
    for i, (name, write) in enumerate(WRITERS.items()):
        write(tmp_path / "raw" / f"{i}{name}", documents * 2)
    options = ("raw", "--name", "mine", "--shard_tokens", "40000", "--workers", "2")
    for _ in range(8):
        shards_more = len(written_shards(tmp_path)) + 1
        with writing(tmp_path, *options, at_least=shards_more) as writer:
            time.sleep(rng.uniform(0, 0.1))  # any moment of the next shards
            assert writer.poll() is None, "raise the number of documents: it was done too soon"
            writer.kill()
            writer.wait()
    assert run("data/documents.py", *options, cwd=tmp_path).returncode == 0
    assert tokens_of(tmp_path / "data" / "mine") == expected(documents) * 8


def is_running(pid: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_workers_end_with_the_process_that_asks_them(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(2000))
    with writing(tmp_path, "a.jsonl", *SHARD_OPTIONS, before=None) as writer:
        threads = Path(f"/proc/{writer.pid}/task").glob("*/children")
        workers = [pid for children in threads for pid in children.read_text().split()]
        assert workers
        writer.kill()
        writer.wait()
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))


# ---- an unfinished corpus


def begun(tmp_path: Path, documents: list[str], monkeypatch, **options) -> Path:
    """A corpus of a.jsonl and b.jsonl, 3 shards of which were written when the disk was full."""
    for name, part in (("a.jsonl", documents[:60]), ("b.jsonl", documents[60:])):
        write_jsonl(tmp_path / name, part)
    fails_after(3, tmp_path, monkeypatch)
    return tmp_path / "data" / "mine"


def fails_after(shards: int, tmp_path: Path, monkeypatch) -> None:
    left = itertools.count(shards, -1)

    def write(path, parts):
        if next(left) <= 0:
            path.write_bytes(b"a part of it")
            raise OSError(28, "No space left on device")
        return write_token_file(path, parts)

    monkeypatch.setattr(data.documents, "write_token_file", write)
    with pytest.raises(
        TokenFileError,
        match=r"data/mine: cannot be written: No space left on device; whole shards that are kept: "
        r"\d+; run the same command again to resume",
    ):
        resume(tmp_path)
    monkeypatch.setattr(data.documents, "write_token_file", write_token_file)


def resume(tmp_path: Path, *more: Path, **options) -> Manifest:
    usual: dict[str, Any] = {"shard_tokens": 1000, "command": "python documents.py a b"}
    sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", *more]
    return prepare(tmp_path / "data" / "mine", sources, **(usual | options))


def test_a_disk_that_fills_up_keeps_the_whole_shards_and_training_says_how_to_resume(
    tmp_path, monkeypatch
):
    documents = texts(120)
    folder = begun(tmp_path, documents, monkeypatch)
    names = ["mine_train_000001.bin", "mine_train_000002.bin", "mine_val_000000.bin"]
    assert sorted(content(unfinished_folder(folder))) == ["manifest.json", *names]
    for refused in (
        lambda: prepare_if_missing(folder, print),
        lambda: open_corpus(unfinished_folder(folder), 16, 50257),
    ):
        with pytest.raises(
            TokenFileError,
            match=r"is not finished: 3 shards, 3,000 tokens; resume with: python documents.py a b$",
        ):
            refused()
    resume(tmp_path, workers=3)
    assert tokens_of(folder) == expected(documents)


def swap(path: Path, one: bytes, other: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(one, other))


HARM: dict[str, tuple[Callable, str]] = {
    "rewritten": (
        lambda place: write_jsonl(place / "a.jsonl", ["other"]),
        r"a\.jsonl: has changed since the shards were written; restore it",
    ),
    "same size": (
        lambda place: swap(place / "a.jsonl", b"the", b"teh"),
        r"a\.jsonl: has changed",
    ),
    "gone": (
        lambda place: (place / "b.jsonl").unlink(),
        r"b\.jsonl: cannot be read: No such file",
    ),
    "shard gone": (
        lambda place: (place / "data/mine.unfinished.tmp/mine_val_000000.bin").unlink(),
        r"mine_val_000000\.bin: cannot be read",
    ),
    "shard cut": (
        lambda place: write_token_file(
            place / "data/mine.unfinished.tmp/mine_val_000000.bin", [[1]]
        ),
        r"mine_val_000000\.bin is not the shard that was written; .* or delete .* to begin anew",
    ),
    "manifest": (
        lambda place: (place / "data/mine.unfinished.tmp/manifest.json").write_text("{"),
        r"damaged, .* or delete it: .* an unfinished corpus is begun anew",
    ),
}


@pytest.mark.parametrize("case", HARM)
def test_a_corpus_whose_files_have_changed_is_not_resumed(case, tmp_path, monkeypatch):
    begun(tmp_path, texts(120), monkeypatch)
    harm, message = HARM[case]
    harm(tmp_path)
    with pytest.raises(TokenFileError, match=message):
        resume(tmp_path)


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
def test_a_damaged_source_that_is_mended_is_resumed_and_the_shards_before_stay(
    name, small_batches, tmp_path
):
    documents = [text for text in texts(300) if "\0" not in text and "\ufeff" not in text]
    documents.insert(-20, "marked")
    path, folder, options = tmp_path / name, tmp_path / "data" / "mine", {"shard_tokens": 1000}
    if name == "a.txt":  # is read a megabyte at a time
        documents.insert(0, "words of a text " * 80_000)
        options = {"shard_tokens": 50_000}
    DAMAGED[name](path, documents)
    with pytest.raises(TokenFileError, match=r"kept: \d+; run the same command again to resume"):
        written(tmp_path, path, workers=1, **options)
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
    for shards_more in (1, 2):  # what was taken is known also after resuming more than once
        os.utime(tmp_path / "a.jsonl")
        fails_after(shards_more, tmp_path, monkeypatch)
    assert read_manifest(unfinished_folder(folder)).unfinished.source == 0
    resume(tmp_path)
    assert tokens_of(folder) == expected([*documents[:60], "other"])
    assert read_manifest(folder).sources[1].bytes == (tmp_path / "b.jsonl").stat().st_size


def test_a_source_that_was_read_to_its_end_may_not_change(tmp_path, monkeypatch):
    documents = ["a short text"] * 60 + texts(120)
    begun(tmp_path, documents, monkeypatch)  # of a.jsonl, all is in the first shard
    resume_refused = pytest.raises(
        TokenFileError, match=r"cannot be resumed: .*a\.jsonl has changed"
    )
    swap(tmp_path / "a.jsonl", b"short", b"shorn")
    with resume_refused:
        resume(tmp_path)
    swap(tmp_path / "a.jsonl", b"shorn", b"short")
    resume(tmp_path)
    assert tokens_of(tmp_path / "data" / "mine") == expected(documents)


def test_a_corpus_is_not_resumed_by_another_command(tmp_path, monkeypatch):
    begun(tmp_path, texts(120), monkeypatch)
    another = write_jsonl(tmp_path / "c.jsonl", ["new"])
    for sources, options, message in (
        (
            [],
            {"shard_tokens": 2000},
            r"it was begun with --shard_tokens 1000, not 2000; undo that and run: "
            r"python documents.py a b; or delete .*mine\.unfinished\.tmp to begin anew",
        ),
        ([], {"text_column": "content"}, r"begun with --text_column text, not content"),
        ([another], {}, r"the sources are others than before: .*c\.jsonl;"),
    ):
        with pytest.raises(TokenFileError, match=message):
            resume(tmp_path, *sources, **options)


def test_of_two_writers_the_second_is_refused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(3000))
    with writing(tmp_path, "a.jsonl", *SHARD_OPTIONS) as first:
        first.send_signal(signal.SIGSTOP)
        second = run("data/documents.py", "a.jsonl", *SHARD_OPTIONS, cwd=tmp_path)
        assert (second.returncode, second.stdout) == (1, "")
        assert second.stderr == (
            "error: data/mine: another process is writing this corpus; wait for it, or choose "
            "another name\n"
        )
        first.send_signal(signal.SIGCONT)
        out, err = first.communicate()
        assert "--dataset mine" in out, err


def test_ctrl_c_keeps_the_shards_and_says_how_to_resume(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(3000))
    with writing(tmp_path, "a.jsonl", *SHARD_OPTIONS, at_least=5) as writer:
        writer.send_signal(signal.SIGINT)
        _, err = writer.communicate()
        assert writer.returncode == 130
        assert err.splitlines()[-1] == "error: interrupted; run the same command again to resume"
    assert len(written_shards(tmp_path)) > 3
    done = run("data/documents.py", "a.jsonl", *SHARD_OPTIONS, cwd=tmp_path)
    assert "of them written" in done.stderr
    assert tokens_of(tmp_path / "data/mine") == expected(texts(3000))


def test_a_worker_that_is_killed_is_one_line(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(data.workers, "_begin", functools.partial(os._exit, 9))
    with pytest.raises(TrainingError, match=r"a process that tokenizes has died, as happens when"):
        written(tmp_path, write_jsonl(tmp_path / "a.jsonl", ["a"]))
    assert not (tmp_path / "data").exists()


def test_a_worker_that_dies_in_the_middle_takes_no_document_with_it(
    small_batches, tmp_path, monkeypatch
):
    documents, calls, real = texts(200), itertools.count(), data.workers.encode
    path = write_jsonl(tmp_path / "a.jsonl", documents)

    def encode(batch):
        if next(calls) == 9:
            raise TrainingError("a process that tokenizes has died")
        return real(batch)

    monkeypatch.setattr(data.workers, "encode", encode)
    with pytest.raises(TrainingError, match="has died"):
        written(tmp_path, path, shard_tokens=300, workers=1)
    kept = tokens_of(unfinished_folder(tmp_path / "data" / "mine"))
    assert kept == expected(documents)[: len(kept)]
    assert written(tmp_path, path, shard_tokens=300) == expected(documents)


# ---- bad input

LINE = b'{"text": "good"}\n'
BAD_LINES = {
    "no JSON": (b'{"text": "bad"', "not a line of JSON: JSONDecodeError: Expecting ',' delimiter"),
    "no object": (b'["text"]', """no text under "text" in ['text']; say with --text_column"""),
    "no such key": (
        b'{"content": "x", "id": 1}',
        """no text under "text" in {'content': 'x', 'id': 1}; say with --text_column where""",
    ),
    "null": (b'{"text": null}', """no text under "text" in {'text': None}"""),
    "a number": (b'{"text": 1.5}', """no text under "text" in {'text': 1.5}"""),
    "brackets in brackets": (b"[" * 100_000, "not a line of JSON: RecursionError"),
    "a long number": (b'{"text": ' + b"1" * 5000 + b"}", "not a line of JSON: ValueError"),
    "not UTF-8": (b'{"text": "\xff"}', "not a line of JSON: UnicodeDecodeError: 'utf-8' codec"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_by_file_and_number_and_can_be_left_out(case, tmp_path):
    bad, message = BAD_LINES[case]
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b"\n" + bad + b"\n" + LINE)
    with pytest.raises(TokenFileError) as refused:
        written(tmp_path, path)
    assert str(refused.value).startswith(f"{path}: line 3: {message}")
    hint = "; correct it, or leave out up to N like it with --skip_bad N"
    assert str(refused.value).endswith(hint)
    assert not (tmp_path / "data").exists()
    assert written(tmp_path, path, skip_bad=1, val_shards=0) == expected(["good", "good"])
    assert read_manifest(tmp_path / "data" / "mine").skipped == 1


def test_more_bad_lines_than_may_be_left_out_end_it_and_with_more_it_resumes(
    small_batches, tmp_path
):
    documents = texts(100)
    lines = [json.dumps({"text": text}) for text in documents]
    for i in (80, 50, 20):
        lines.insert(i, "bad")
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(
        TokenFileError,
        match=r"line 83: not a line of JSON.*; the 2 before it were left out; .* kept: \d+; "
        r"run the same command again to resume",
    ):
        written(tmp_path, path, skip_bad=2, shard_tokens=100, workers=1)
    assert written(tmp_path, path, skip_bad=3, shard_tokens=100) == expected(documents)
    assert read_manifest(tmp_path / "data" / "mine").skipped == 3


def test_a_wrong_text_column_of_json_lines_ends_at_the_first_line_before_anything_is_written(
    tmp_path, monkeypatch
):
    path = write_jsonl(tmp_path / "a.jsonl", texts(50))
    monkeypatch.setattr(data.documents, "_write", None)
    with pytest.raises(
        TokenFileError, match=r'line 3: no text under "content" in .*; the 2 before'
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


def test_a_column_of_a_parquet_file_that_is_missing_or_no_text_names_those_that_are_there(tmp_path):
    good = write_parquet(tmp_path / "a.parquet", ["a"])
    bad = write_parquet(tmp_path / "b.parquet", ["b"], column="content")
    for paths, column in (([good, bad], "text"), ([bad], "id")):
        with pytest.raises(
            TokenFileError,
            match=rf'b\.parquet: has no column "{column}" of text; it has "id" \(int64\), '
            r'"content" \(string\); say with --text_column',
        ):
            written(tmp_path, *paths, text_column=column)


@pytest.mark.parametrize(
    ("value", "message"), [(None, "null, not a text"), (b"\xff", "not UTF-8: invalid start byte")]
)
def test_a_row_of_a_parquet_file_without_a_text_is_a_bad_row(value, message, tmp_path):
    path = tmp_path / "a.parquet"
    values = pyarrow.array([b"a", value, b"b"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": values}), path)
    with pytest.raises(
        TokenFileError, match=rf"a\.parquet: row 2: {message}; correct it, or leave"
    ):
        written(tmp_path, path)
    assert written(tmp_path, path, skip_bad=1, val_shards=0) == expected(["a", "b"])


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
    message = r"a\.parquet: (not a whole \.parquet file|row \d+: not UTF-8)"
    with pytest.raises(TokenFileError, match=message):
        written(tmp_path, path)


NO_DOCUMENTS = {
    "Latin-1": ("a.txt", "Müller".encode("latin-1") * 9, r"a\.txt: not UTF-8 text"),
    "UTF-16": ("a.txt", "good".encode("utf-16-le"), r"a\.txt: .*NUL"),
    "ending": ("a.csv", b"x", r"a\.csv: its name does not end in \.parquet, .*what a file holds"),
    "missing": ("missing.jsonl", None, r"missing\.jsonl: cannot be read: No such file"),
    "name": ("caf\udce9.jsonl", LINE, r"its name is not UTF-8; rename it"),
    "folder": ("raw/a.md", b"x", r"raw: no file in it has a name that ends in \.parquet"),
}


@pytest.mark.parametrize("case", NO_DOCUMENTS)
def test_a_file_that_is_no_document_is_one_line_that_names_it(case, tmp_path):
    name, file_content, message = NO_DOCUMENTS[case]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    if file_content is not None:
        (tmp_path / name).write_bytes(file_content)
    with pytest.raises(TokenFileError, match=message):
        written(tmp_path, tmp_path / (name.partition("/")[0]))
    assert not (tmp_path / "data").exists()


def test_a_link_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.jsonl").symlink_to("nowhere")
    with pytest.raises(TokenFileError, match=r"raw/a\.jsonl: cannot be read: No such file"):
        written(tmp_path, tmp_path / "raw")


def free_space(monkeypatch, n_bytes: Callable[[], int]) -> None:
    usage = lambda place: shutil._ntuple_diskusage(10**9, 0, n_bytes())  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_too_little_space_is_said_beforehand_with_what_is_needed(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", texts(300))
    free_space(monkeypatch, lambda: 5000)
    with pytest.raises(
        TokenFileError,
        match=r"mine: the disk has too little space: about [\d,]+ tokens, 0 of them written: .* "
        r"are needed, 5 kB are free; free some, name another place with --data_dir",
    ):
        written(tmp_path, path)
    assert not (tmp_path / "data").exists()


def test_resuming_frees_what_a_killed_writer_left_before_it_asks_for_space(tmp_path, monkeypatch):
    documents = texts(120)
    folder = begun(tmp_path, documents, monkeypatch)
    strays = [unfinished_folder(folder) / name for name in ("shard.tmp", "mine_train_000003.bin")]
    for stray in strays:
        stray.write_bytes(b"a part of it")
    free_space(monkeypatch, lambda: 0 if any(stray.exists() for stray in strays) else 10**9)
    resume(tmp_path)
    assert tokens_of(folder) == expected(documents)


def test_a_disk_that_is_full_at_the_manifest_leaves_no_shard_that_it_does_not_name(
    tmp_path, monkeypatch
):
    path, left = write_jsonl(tmp_path / "a.jsonl", texts(100)), itertools.count(2, -1)
    real = Manifest.write

    def write(self, folder):
        if next(left) == 0:
            raise OSError(28, "No space left on device")
        real(self, folder)

    monkeypatch.setattr(Manifest, "write", write)
    with pytest.raises(TokenFileError, match=r"mine: cannot be written: No space .* kept: 2;"):
        written(tmp_path, path)
    assert len(written_shards(tmp_path)) == 2
    assert written(tmp_path, path) == expected(texts(100))


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
    (source,), _ = find_sources([path])
    pieces = read_pieces(source, "text", BadRecords(0))
    next(pieces)
    path.write_bytes(path.read_bytes() + LINE)
    with pytest.raises(TokenFileError, match=r"a\.jsonl: was changed while it was read"):
        list(pieces)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "a/b"], "--name 'a/b': must be a plain name"),
        (["--name", "fineweb"], "is the corpus that data/fineweb.py writes"),
        (["--name", "mine", "--workers", "0"], "--workers: input should be greater than or equal"),
        ([], "name: "),
        (["--name", "mine", "--shard_tokens", "-5"], "--shard_tokens: input should be greater"),
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
            match=rf"{lost.name} is missing: manifest\.json names \d+ token files; restore it, "
            r"or delete manifest\.json to train on the files that are there",
        ):
            open_corpus(folder, 16, 50257)
    (folder / "manifest.json").unlink()
    open_corpus(folder, 16, 50257)


def test_train_refuses_a_corpus_with_a_shard_missing_in_a_line(tmp_path):
    written(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts(100)), shard_tokens=500)
    (tmp_path / "data/mine/mine_train_000002.bin").unlink()
    done = run("train.py", "--dataset", "mine", *SMALLEST, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: data/mine: mine_train_000002.bin is missing: manifest.json names"
    )


def test_a_shard_of_another_length_and_a_damaged_manifest_are_refused_and_more_files_are_not(
    tmp_path,
):
    written(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts(100)), shard_tokens=500)
    folder = tmp_path / "data" / "mine"
    write_token_file(folder / "more_val_000000.bin", [range(100)])
    open_corpus(folder, 16, 50257)
    write_token_file(folder / "mine_train_000001.bin", [range(100)])
    message = r"mine_train_000001\.bin: holds 100 tokens, not the 500 that manifest\.json names"
    with pytest.raises(TokenFileError, match=message):
        open_corpus(folder, 16, 50257)
    (folder / "manifest.json").write_text("{}")
    message = r"manifest\.json: damaged, or not written by data/documents\.py"
    with pytest.raises(TokenFileError, match=message):
        open_corpus(folder, 16, 50257)


# ---- FineWeb-Edu's original


def test_fineweb_takes_parquet_files_of_the_original(tmp_path):
    documents = texts(50)
    write_parquet(tmp_path / "sample" / "000_00000.parquet", documents)
    done = run("data/fineweb.py", "--source", "sample", "--shard_tokens", "1000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tokens_of(tmp_path / "data" / "fineweb") == expected(documents)
    message = r"fineweb: holds a corpus that was written with --source; choose another place"
    with pytest.raises(TokenFileError, match=message):
        fineweb.prepare(tmp_path / "data" / "fineweb", 1)
    for options, message in (
        (["--source", "sample", "--shards", "3"], "--shards is how many ready shards to download"),
        (["--workers", "3"], "no effect without --source: workers"),
    ):
        done = run("data/fineweb.py", *options, cwd=tmp_path)
        assert done.returncode == 1
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
