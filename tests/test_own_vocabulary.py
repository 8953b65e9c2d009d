"""Runs of a corpus with a vocabulary of its own: trained, resumed, sampled, evaluated, exported."""

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer, pipeline

from checkpoint.files import SUMS, read_json
from checkpoint.weights import adopt_architecture, load_model, read_weights
from data.text import WritingOptions, prepare
from data.token_file import write_corpus
from data.tokenizer import SEPARATOR
from data.vocabulary import BYTES, CHARACTERS, FILE, GPT2, WORDS, Vocabulary, to_json
from evaluate import EvaluateOptions, evaluate
from export import export
from runtime.errors import UserError
from runtime.start import start
from sample import SampleOptions
from sample import main as sample
from tests.conftest import ALONE, WITH_TEXT, console, end_of, grown, refused, reseal
from train import train

pytestmark = pytest.mark.usefixtures("in_tmp_path")
MERGES = [["t", "h"], ["th", "e"], ["Ġ", "the"], ["a", "n"]]
MINE = Vocabulary(261, to_json([*BYTES, *map("".join, MERGES)], MERGES, WORDS))
OTHER = Vocabulary(261, to_json([*BYTES, *map("".join, MERGES[::-1])], MERGES[::-1], WORDS))
LETTERS = Vocabulary(258, to_json([*BYTES, "Ã¤"], [], CHARACTERS))
TEXT = "the hen and the ant\n" * 60
SHAPE = {"val_fraction": 0.3, "eval_every": 3, "eval_tokens": 64, "sample_every": 3}
QUESTION = {"ctx": "the hen", "endings": ["and", "the", "a", "n"], "label": 1}


def write(name="mine", vocabulary=MINE, text=TEXT):
    """Write a corpus; returns its tokens."""
    tokens = [vocabulary.end_of_text, *vocabulary.encode(text).tolist()]
    write_corpus(Path("data", name), [tokens])
    if vocabulary.json:
        Path("data", name, FILE).write_text(vocabulary.json)
    return tokens


@pytest.fixture
def trained(tiny_config):
    """A run of 6 steps, with its tokens."""
    tokens = write()
    Path("questions.jsonl").write_text(json.dumps(QUESTION))
    config = tiny_config(
        dataset="mine",
        vocab_size=50304,
        **SHAPE,
        hellaswag_every=3,
        hellaswag_file="questions.jsonl",
    )
    return config, train(config, ALONE), tokens


def command(words):
    return evaluate(start(EvaluateOptions, words.split(), positional="run"), ALONE)


def test_a_run_takes_its_corpuss_vocabulary_and_keeps_it_in_its_checkpoints(trained):
    config, summary, _ = trained
    found = read_weights("train")
    assert found.vocabulary == MINE
    assert (found.config.n_vocab, found.config.vocab_size) == (261, 384)  # padded, as 50304 is
    assert f"{FILE}\n" in (found.path / SUMS).read_text()
    assert adopt_architecture(config).vocab_size == 384
    assert f"a vocabulary of 261 tokens ({MINE.identity[:8]})" in console(config)
    assert "sample after step 6: " in console(config)
    assert 0 <= summary["hellaswag_acc_norm"] <= 1


@pytest.mark.parametrize(("given", "rows"), [({}, 261), ({"vocab_size": 384}, 261)])
def test_without_padding_the_model_has_a_row_for_each_token(given, rows, tiny_config):
    write()
    train(tiny_config(dataset="mine", max_steps=1, **{"vocab_size": 128} | given), ALONE)
    assert load_model("train").lm_head.weight.shape == (rows, 32)


def test_a_corpuss_vocabulary_is_no_difference_from_the_recipe_of_a_curve(tiny_config):
    write()
    config = tiny_config(dataset="mine", **SHAPE)
    options = config.model_dump(mode="json", exclude_unset=True)
    Path("usual.yaml").write_text(yaml.safe_dump(options))
    Path("usual.csv").write_text("tokens,val_loss,tolerance\n0,5,1\n9,5,1\n")
    train(config.with_options(reference="usual.csv"), ALONE)
    assert "not the recipe" not in console(config)
    train(config.with_options(reference="usual.csv", lr=0.01), ALONE)
    assert "note: not the recipe of usual's curve: lr 0.01 instead of 0.0003\n" in console(config)


def test_bits_per_byte_are_of_the_bytes_of_the_evaluated_targets(trained, capsys):
    config, summary, tokens = trained
    header, *_, last = Path("logs/train/eval.csv").read_text().splitlines()
    assert header == "step,val_loss,bits_per_byte,hellaswag_acc_norm"
    first = len(tokens) - int(0.3 * len(tokens))  # where the validation split begins
    found = command("train --device cpu")["validation"]
    bits = [float(last.split(",")[2]), summary["bits_per_byte"], found["bits_per_byte"]]
    size = [
        len(MINE.encoding.decode_bytes(tokens[at + 1 : at + 65]))
        for at in (first, first - 1, first + 1)
    ]
    assert bits == pytest.approx([bits[0]] * 3)
    assert any(bits[0] == pytest.approx(summary["val_loss"] / math.log(2) * 64 / n) for n in size)
    assert f"bits per byte {bits[0]:.4f}" in console(config)


def test_a_run_resumes_from_a_checkpoint_and_a_log_without_bits_goes_on(trained, tiny_config):
    whole = end_of(trained[0])
    shutil.rmtree("logs/train")
    half = trained[0].with_options(max_steps=3)
    train(half, ALONE)
    log = Path("logs/train/eval.csv")
    train(trained[0].with_options(resume="auto"), ALONE)
    assert end_of(trained[0]) == whole
    header, *rows = [line.split(",") for line in log.read_text().splitlines()]
    earlier = [f"{step},{loss},{accuracy}\n" for step, loss, _, accuracy in rows]
    log.write_text("".join(["step,val_loss,hellaswag_acc_norm\n", *earlier]))
    train(trained[0].with_options(resume="auto", max_steps=9), ALONE)
    with open(log, newline="") as file:
        again = [*csv.DictReader(file)]
    assert again[0].keys() == {*header}
    assert [row["bits_per_byte"] == "" for row in again] == [True] * 3 + [False]


def test_sampling_reads_prompt_and_stop_in_the_runs_vocabulary(trained, capsys):
    words = ["train", "--prompt", "the hen", "--temperature", "0", "--max_new_tokens", "9"]
    sample(start(SampleOptions, words, positional="run"))
    (drawn,) = grown(
        load_model("train"), [MINE.encode("the hen").tolist()], 9, encoding=MINE.encoding
    )
    kept = drawn[: drawn.index(260)] if 260 in drawn else drawn
    assert capsys.readouterr().out == f"the hen{MINE.decode(kept)}\n"
    sample(start(SampleOptions, [*words, "--stop", MINE.decode(kept)[:2]], positional="run"))
    assert capsys.readouterr().out == "the hen\n"


@pytest.mark.parametrize("vocabulary", [MINE, LETTERS], ids=["byte pairs", "characters"])
def test_transformers_encodes_an_exported_run_alike_and_generates_its_tokens(
    vocabulary, tiny_config, tmp_path
):
    write("mine", vocabulary)
    train(tiny_config(dataset="mine", max_steps=20, lr=1e-2), ALONE)
    export("train", tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained("out")
    for text in (TEXT, "  naïve 日本 ä\n\n😀 the\tthe", f"a{SEPARATOR}b"):
        ids = vocabulary.encoding.encode(text, allowed_special="all")
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert (theirs.eos_token_id, theirs.model_max_length) == (vocabulary.end_of_text, 32)
    assert read_json(tmp_path / "out/config.json")["eos_token_id"] == vocabulary.end_of_text
    (said,) = pipeline("text-generation", "out")("the h", max_new_tokens=9, do_sample=False)
    prompt = vocabulary.encode("the h").tolist()
    (drawn,) = grown(load_model("train"), [prompt], 9, encoding=vocabulary.encoding)
    assert said["generated_text"] == f"the h{vocabulary.decode(drawn)}"


def test_a_second_corpus_has_the_vocabulary_of_a_corpus_a_run_or_a_checkpoint(trained, capsys):
    Path("more.txt").write_text("the ant and the hen")
    places = ("mine", "train", "logs/train", "data/mine", "logs/train/checkpoints/step_000006")
    for place in places:
        prepare(Path("data/more"), ["more.txt"], WritingOptions(vocabulary=place))
        assert Path("data/more", FILE).read_text() == MINE.json
        shutil.rmtree("data/more")
    prepare(Path("data/more"), ["more.txt"], WritingOptions(vocabulary="mine"))
    assert command("train --dataset more --val_fraction 1 --seq_len 4")["validation"]["loss"] > 0
    for options, said in (
        ({"vocabulary": "nine"}, "^--vocabulary nine: no corpus in data/ or run with a checkpoint"),
        ({"vocabulary": "mine", "vocab_size": 300}, "--vocabulary excludes --vocab_size and"),
    ):
        with refused(said):
            prepare(Path("data/bad"), ["more.txt"], WritingOptions(**options))
    Path("train.bin").write_bytes(bytes(100))
    with refused("^train.bin: has GPT-2's tokens, and another vocabulary needs its text"):
        prepare(Path("data/bad"), ["train.bin"], WritingOptions(vocabulary="mine"))


@pytest.mark.parametrize("vocabulary", [OTHER, GPT2], ids=["another", "GPT-2's"])
def test_a_run_and_a_corpus_of_different_vocabularies_are_refused(vocabulary, trained, tiny_config):
    write("other", vocabulary)
    said = rf"train/.* has a vocabulary of 261 tokens \({MINE.identity[:8]}\), but the corpus .*"
    said += rf"other has {'GPT' if vocabulary == GPT2 else 'a vocabulary'}.* --vocabulary .*train"
    with refused(said):
        train(tiny_config(init_from="train", dataset="other", run_name="new"), ALONE)
    with refused(said):
        train(tiny_config(resume="train", dataset="other", max_steps=9), ALONE)
    with refused(said):
        command("train --dataset other --val_fraction 1")
    assert not Path("logs/new").exists()
    train(tiny_config(init_from="train", dataset="mine", run_name="new", max_steps=1), ALONE)
    assert read_weights("new").vocabulary == MINE


def test_weights_of_gpt2s_vocabulary_refuse_a_corpus_with_its_own(tiny_config):
    write()
    write("english", GPT2)
    options = {"vocab_size": 50257, "n_layer": 1, "n_embd": 8, "max_steps": 1}
    train(tiny_config(dataset="english", **options), ALONE)
    with refused("has GPT-2's vocabulary, but the corpus .* without a vocabulary of its own$"):
        command("train --dataset mine --val_fraction 1")


def test_a_damaged_vocabulary_is_refused_and_an_older_checkpoint_has_gpt2s(trained):
    folder = read_weights("train").path
    path = folder / FILE
    for damage in (lambda: path.write_text(OTHER.json), path.unlink):
        damage()
        with refused(f"step_000006.*damaged.*({FILE}|SHA256SUMS|No such file)"):
            read_weights("train")
    reseal(folder)
    assert read_weights("train").vocabulary == GPT2
    with refused("a model of 261 tokens cannot have GPT-2's vocabulary, of 50,257"):
        sample(start(SampleOptions, ["train"], positional="run"))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text(OTHER.json)])
def test_a_corpus_whose_vocabulary_is_lost_or_another_is_refused(damage, tiny_config):
    Path("text.txt").write_text(TEXT)
    prepare(Path("data/mine"), ["text.txt"], WritingOptions(vocab_size=261))
    damage(Path("data/mine", FILE))
    with refused("data/mine: has .*but its tokens are of another vocabulary, by manifest.json"):
        train(tiny_config(dataset="mine", **SHAPE), ALONE)


def test_a_run_whose_vocabulary_is_not_known_trains_and_makes_no_text(go, corpus):
    assert go(val_fraction=0.3, eval_every=3)["val_loss"] > 0
    assert Path("logs/train/eval.csv").read_text().startswith("step,val_loss\n")
    assert not torch.isnan(load_model("train").lm_head.weight).any()
    with refused("a model of 128 tokens cannot have GPT-2's vocabulary, of 50,257"):
        go(sample_every=3)


def test_a_run_without_texts_does_not_need_gpt2s_vocabulary(go, corpus, here, monkeypatch):
    def unavailable():
        raise UserError("GPT-2's vocabulary could not be downloaded")

    monkeypatch.setattr("data.vocabulary.get_encoding", unavailable)
    assert go(**WITH_TEXT, val_fraction=0.1, eval_every=3)["val_loss"] > 0
    assert console(here).count("note: no bits per byte: GPT-2's vocabulary could not be down") == 1
    with refused("could not be downloaded"):
        go(**WITH_TEXT, sample_every=3)
