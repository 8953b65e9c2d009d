"""A corpus's own vocabulary: every id is that of tokenizers and transformers, and the same text
gives the same bytes.
"""

import hashlib
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from data import learn as learning
from data import text
from data.learn import CUT, every_kth, learn
from data.text import WritingOptions, prepare
from data.tokenizer import SEPARATOR, chunks
from data.vocabulary import BYTES, FILE, GPT2, read_vocabulary
from tests.conftest import ROOT, refused, run_from_nothing, tokens_in

pytestmark = pytest.mark.usefixtures("in_tmp_path")
MINE = Path("data/mine")
CODE = (ROOT / "model.py").read_text()
RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастлива по-своему. "
CHINESE = "学而时习之，不亦说乎？有朋自远方来，不亦乐乎？"
BENGALI = "আমার সোনার বাংলা, আমি তোমায় ভালোবাসি। "
EMOJI = "👩‍👩‍👧 🏳️‍🌈 😀😀 e\u0301 "
RNG = random.Random(1)
POINTS = [*range(0xD800), *range(0xE000, 0x110000)]
TEXTS = {
    "English and code": CODE,
    "Russian": RUSSIAN * 20,
    "Chinese": CHINESE * 20,
    "Bengali": BENGALI * 20,
    "emoji": EMOJI * 20,
    "bytes": bytes(RNG.choices(range(256), k=5000)).decode("latin-1"),
    "damaged bytes": bytes(RNG.choices(range(256), k=5000)).decode(errors="replace"),
    "code points": "".join(map(chr, RNG.choices(POINTS, k=5000))),
    "white space": "".join(
        RNG.choices(" \n\t\r\x0b\x1c\x1d\x1e\x1f\x85\u00a0\u2028\u3000ab1'", k=5000)
    ),
    "runs": "=" * 5000 + "\n" * 5000 + "a" * 5000 + "中" * 5000,
    "empty": "",
}
KINDS = {
    "byte pairs": (1500, False),
    "bytes": (257, False),
    "characters": (None, True),
    "few characters": (270, True),
}


def learned(kind="byte pairs"):
    return learn([CODE, RUSSIAN, CHINESE, BENGALI, EMOJI], *KINDS[kind])


@pytest.fixture(params=KINDS)
def vocabulary(request):
    return learned(request.param)


# ---- every id


@pytest.mark.parametrize("name", TEXTS)
def test_every_id_is_that_of_tokenizers_and_transformers_and_decodes_to_the_text(name, vocabulary):
    content = TEXTS[name]
    ids = vocabulary.encode(content).tolist()
    Path(FILE).write_text(vocabulary.json)
    assert ids == Tokenizer.from_file(FILE).encode(content).ids
    assert ids == PreTrainedTokenizerFast(tokenizer_file=FILE)(content)["input_ids"]
    assert vocabulary.decode(ids) == content
    pieces = chunks(content[i : i + 700] for i in range(0, len(content), 700))
    assert [*itertools.chain(*map(vocabulary.encode, pieces))] == ids


def test_end_of_text_is_the_last_id_as_a_token_and_ordinary_text_as_a_text(vocabulary):
    both, end = Tokenizer.from_str(vocabulary.json), f"a{SEPARATOR}b"
    as_token = vocabulary.encoding.encode(end, allowed_special="all")
    assert as_token == both.encode(end).ids
    assert vocabulary.end_of_text == vocabulary.size - 1 == as_token[1]
    both.encode_special_tokens = True
    assert vocabulary.encode(end).tolist() == both.encode(end).ids
    assert vocabulary.end_of_text not in vocabulary.encode(end)


def test_half_a_surrogate_pair_becomes_the_replacement_character(vocabulary):
    assert vocabulary.decode(vocabulary.encode("a\ud83db")) == "a\ufffdb"
    assert learn(["a\ud83db"], 300, True).size == 257


def test_gpt2s_vocabulary_answers_in_the_same_way():
    assert (GPT2.size, GPT2.end_of_text, GPT2.identity) == (50257, 50256, "gpt2")
    assert GPT2.encode("Hello world").tolist() == [15496, 995]
    assert GPT2.decode([15496, 995]) == "Hello world"
    assert read_vocabulary(Path()) is GPT2


# ---- learning


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_has_the_asked_size_the_bytes_first_and_comes_back_from_its_file(kind):
    vocabulary = learned(kind)
    assert vocabulary.size == (
        KINDS[kind][0]
        or 257 + len({*CODE, *RUSSIAN, *CHINESE, *BENGALI, *EMOJI} - {*map(chr, range(128))})
    )
    assert [*json.loads(vocabulary.json)["model"]["vocab"]][:256] == [*BYTES]
    Path(FILE).write_text(vocabulary.json)
    again = read_vocabulary(Path())
    assert again == vocabulary
    assert again.identity == hashlib.sha256(Path(FILE).read_bytes()).hexdigest()
    assert len({learned(other).identity for other in KINDS}) == len(KINDS)


LEARN = f"""import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path; from data.learn import learn
paths = sorted(Path({str(ROOT)!r}, "data").glob("*.py"))
print(learn([path.read_text() for path in paths], 2000, False).identity)"""


def test_the_same_text_gives_the_same_bytes_on_any_number_of_threads():
    found = [
        subprocess.run(
            [sys.executable, "-c", LEARN],
            env=os.environ | {"RAYON_NUM_THREADS": str(threads), "PYTHONHASHSEED": str(threads)},
            capture_output=True,
            check=True,
        ).stdout
        for threads in (1, 2, 5)
    ]
    assert len(found[0]) == 65
    assert len({*found}) == 1


def test_of_more_text_than_the_most_every_kth_piece_is_kept():
    pieces = [f"{i:09}\n" for i in range(1000)]
    assert every_kth(pieces, 10_000) == pieces
    assert every_kth(iter(pieces), 9_999) == pieces[::2]
    assert every_kth(iter(pieces), 1_300) == pieces[::8]
    assert every_kth(["ab"] * 3 + ["é\ud83d"], 9) == ["ab"] * 3 + ["é?"]


def test_a_text_is_learned_in_pieces_that_end_before_white_space_if_there_is_some():
    words, one_word = "a few words " * 500, CHINESE * 100
    for content in (words, one_word, "", "\n" * 3000):
        pieces = CUT.findall(content)
        assert "".join(pieces) == content
        assert all(len(piece) <= 1000 for piece in pieces)
    assert all(piece.startswith(" ") for piece in CUT.findall(words)[1:])
    assert len(CUT.findall(one_word)) == 3


def test_the_commonest_characters_come_first():
    names = json.loads(learn(["ééé中中é1😀"], 259, True).json)["model"]["vocab"]
    assert [*names][256:] == ["Ã©", "ä¸Ń"]


# ---- reading


def edited(change):
    content = json.loads(learned().json)
    change(content)
    return json.dumps(content, ensure_ascii=False) + "\n"


def swap_ids(content):
    vocab = content["model"]["vocab"]
    first, second = [*vocab][300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]


DAMAGED = {
    "swapped ids": (lambda: edited(swap_ids), "it was edited, or another program wrote it"),
    "swapped merges": (
        lambda: edited(lambda content: content["model"]["merges"].reverse()),
        "or rank its merges in another way",
    ),
    "other splitting": (
        lambda: edited(lambda content: content["pre_tokenizer"].update(add_prefix_space=True)),
        "tiktoken would split its text",
    ),
    "a byte is missing": (
        lambda: learn(["a"], 257, False).json.replace('"ÿ"', '"ÿÿ"'),
        "or rank its merges in another way",
    ),
    "cut": (lambda: learned().json[:-100], "JSONDecodeError"),
    "deep": (lambda: "[" * 10**5, "RecursionError"),
    "a list": (lambda: "[]", "TypeError"),
    "no model": (lambda: "{}", "KeyError"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_that_tiktoken_would_encode_differently_is_refused(case):
    content, message = DAMAGED[case]
    Path(FILE).write_text(content())
    with refused(rf"^{FILE}: not a vocabulary of data/text\.py \(.*{message}.*\); restore it"):
        read_vocabulary(Path())


# ---- the corpus


def write(name, documents):
    Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return Path(name)


def written(*named, **options):
    prepare(MINE, named, WritingOptions(**({"vocab_size": 400, "shard_tokens": 2000} | options)))
    return content_of(MINE)


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents_of(split):
    """The texts of a split's documents, by the vocabulary in the corpus's folder."""
    vocabulary = read_vocabulary(MINE)
    paths = sorted(MINE.glob(f"*_{split}_*.bin"))
    tokens = np.concatenate([tokens_in(path) for path in paths])
    begins = np.flatnonzero(tokens == vocabulary.end_of_text)
    assert begins[0] == 0
    return [vocabulary.decode(part[1:].tolist()) for part in np.split(tokens, begins[1:])]


DOCUMENTS = [f"{i}: {part}" for i, part in enumerate(CODE.split("\n\n"))]


@pytest.mark.parametrize("options", [{}, {"characters": True, "vocab_size": None}], ids=str)
def test_a_corpus_has_the_tokens_of_its_own_vocabulary_which_knows_no_validation_text(options):
    documents = [*DOCUMENTS]
    documents[2::3] = [f"{document} ≠≠≠≠≠≠" * 9 for document in documents[2::3]]
    path = write("a.jsonl", documents)
    written(path, val_every=3, **options)
    assert documents_of("train") == [text for i, text in enumerate(documents, 1) if i % 3]
    assert documents_of("val") == documents[2::3]
    names = [*json.loads((MINE / FILE).read_text())["model"]["vocab"]]
    assert "âī" not in "".join(names[256:])


def test_the_same_command_again_is_finished_and_another_vocabulary_is_another_corpus(tmp_path):
    write("a.jsonl", DOCUMENTS)
    command = ("data/text.py", "a.jsonl", "--name", "mine", "--vocab_size")
    first, again = (run_from_nothing(*command, "400", cwd=tmp_path) for _ in range(2))
    assert again.stdout == first.stdout
    assert again.stderr == "note: data/mine is there already, from the same files\n"
    for options in ({"vocab_size": 401}, {"characters": True}, {"vocab_size": None}):
        with refused("data/mine: is there already; choose another name or delete it first"):
            written("a.jsonl", shard_tokens=10**8, **options)


def test_an_interrupted_corpus_resumes_with_its_vocabulary_or_starts_anew_if_a_source_changed(
    capsys,
):
    a, b = write("a.jsonl", DOCUMENTS), write("b.jsonl", [f"{text} 2" for text in DOCUMENTS])
    options = {"shard_tokens": 10**8}
    whole = written(a, b, **options)
    size = len(whole["mine_train_000000.bin"])
    for is_changed, kept in ((False, 1), (True, 0)):
        shutil.rmtree(MINE)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            written(a, b, **options)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if is_changed:  # only the second source, but the vocabulary is of both
            write("b.jsonl", [f"{text} зима" for text in DOCUMENTS])
        resumed = written(a, b, **options)
        assert f"not finished: {kept} of 2 files are done" in capsys.readouterr().err
        assert (resumed == whole) is not is_changed
    shutil.rmtree(MINE)
    assert resumed == written(a, b, **options)


def test_a_source_that_changes_between_learning_and_encoding_is_refused(monkeypatch):
    path = write("a.jsonl", DOCUMENTS)

    def learn_and_change(*given):
        vocabulary = learn(*given)
        write("a.jsonl", DOCUMENTS[1:])
        return vocabulary

    monkeypatch.setattr(learning, "learn", learn_and_change)
    with refused("^a.jsonl: changed after the vocabulary was learned from it; run the same comm"):
        written(path)
    assert not MINE.exists()


def test_fewer_tokens_than_asked_are_noted_and_token_files_are_refused(capsys, tmp_path):
    written(write("a.jsonl", ["abcdefghijklmnopqrstuvwxyz"]), vocab_size=4096)
    assert "note: the text yields 282 tokens, not 4,096\n" in capsys.readouterr().err
    np.array([1, 2], dtype=np.uint16).tofile("train.bin")
    for options in ({}, {"vocab_size": None, "characters": True}):
        with refused("^train.bin: has GPT-2's tokens, and another vocabulary needs its text; give"):
            written("a.jsonl", "train.bin", **options)
    command = ("data/text.py", "a.jsonl", "--vocab_size", "256")
    done = run_from_nothing(*command, cwd=tmp_path, status=2)
    assert "--vocab_size: input should be greater than or equal to 257" in done.stderr


def test_threads_and_batches_change_no_byte_of_a_corpus_with_its_own_vocabulary(monkeypatch):
    path = write("a.jsonl", DOCUMENTS)
    whole = written(path, workers=3, val_every=4)
    shutil.rmtree(MINE)
    monkeypatch.setattr(text, "BATCH", 1000)
    assert written(path, workers=1, val_every=4) == whole
