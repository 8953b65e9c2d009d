"""Evaluation: HellaSwag against transformers and by hand, its file, HellaSwag between steps, and
evaluate.py as a command.
"""

import json
import math
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import evaluate
from data.hellaswag import Question, Row, download, read_items
from data.token_file import write_corpus
from data.tokenizer import END_OF_TEXT, get_encoding
from evaluate import EvaluateOptions
from inference.hellaswag import ending_losses, interval, is_right, read_questions, score
from model import GPT, GPTConfig
from runtime.cli import parse
from runtime.console import Console
from runtime.errors import TrainingError
from runtime.files import sha256, write_json
from tests.conftest import (
    ALONE,
    WITH_TEXT,
    cases,
    folder_of,
    refused,
    run_ranks,
    tokens_in,
    transformers_pair,
)
from tests.test_train import rows
from train import train

WORDS = (
    "the a man dog roof water is sits throws shows how to rope slowly then 3.5 naïve 日本語 😀 Ça "
    "don't [title] [step] (x) , ."
)
CONTEXT = 64  # block_size of the models in this file


def item(seed=0, **changes):
    """An item of HellaSwag's form, of random words."""
    draw = random.Random(seed)

    def words(least, most):
        return " ".join(draw.choices(WORDS.split(), k=draw.randint(least, most)))

    return {
        "ctx": words(2, 20),
        "endings": [words(1, 12) for _ in range(4)],
        "label": draw.randrange(4),
    } | changes


ODD = [
    item(101, endings=["dog", "a dog sits", "a man sits", "a man sits"]),  # two are the same
    item(102, ctx=" ".join([WORDS] * 4)),  # far longer than the context
    item(103, endings=[" ".join([WORDS] * n) for n in (1, 2, 3, 4)]),  # the last of them too
    item(
        104,
        ctx="日本語 😀 \u2028 naïve",
        endings=["Ça va 😀😀😀", "café", "日本語日本語", "a\u0085b"],
    ),
    item(105, ctx=""),
    item(106, endings=["", "a", " ", "b"]),
]


def write_items(path, items):
    lines = [json.dumps(values, ensure_ascii=i % 2 == 0) for i, values in enumerate(items)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path):
    return write_items(tmp_path / "items.jsonl", [*map(item, range(6)), *ODD])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Ours and transformers' GPT-2 with the same random weights, and their folder."""
    folder = tmp_path_factory.mktemp("gpt2")
    return *transformers_pair(folder, n_layer=2, n_head=2, n_embd=32, n_positions=CONTEXT), folder


@torch.no_grad()
def their_loss(theirs, context, ending):
    """transformers' loss of an ending; the text is cut from the left to the model's context."""
    tokens = (context + ending)[-CONTEXT - 1 :]
    logits = theirs(torch.tensor([tokens[:-1]])).logits[0]
    losses = F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    return losses[-len(ending) :].sum().item()


def questions_in(file):
    return read_questions(file, get_encoding(), CONTEXT, ALONE)


def rows_in(file):
    return [row for question in questions_in(file) for row in question.rows]


# ---- against transformers


def test_losses_equal_those_of_transformers_whatever_the_batches(pair, file):
    ours, theirs, _ = pair
    encode, expected = get_encoding().encode_ordinary, []
    for values in map(json.loads, file.open(encoding="utf-8")):
        context = encode(values["ctx"]) or [END_OF_TEXT]
        expected += [their_loss(theirs, context, encode(f" {end}")) for end in values["endings"]]
    for tokens_at_once in (1, 150, 100_000):
        losses = ending_losses(ours, rows_in(file), tokens_at_once, ALONE)
        assert [losses[row] for row in rows_in(file)] == pytest.approx(expected, abs=1e-4)


# ---- scored texts


def test_the_ending_with_the_lowest_mean_loss_is_chosen_and_of_two_the_first():
    rows = [Row((i,), scored) for i, scored in enumerate((6, 1, 4, 4))]
    # means: 1.5, 2, 1, 1
    losses = dict(zip(rows, [9.0, 2.0, 4.0, 4.0], strict=True))
    assert [is_right(Question(rows, right), losses) for right in range(4)] == [0, 0, 1, 0]


@pytest.mark.parametrize("training", [True, False])
def test_scoring_leaves_out_dropout_and_leaves_the_model_as_it_was_even_if_it_fails(training, file):
    model = GPT(GPTConfig(1, 2, 16, CONTEXT, dropout=0.5)).train(training)
    rows = rows_in(file)[:16]
    assert ending_losses(model, rows, 200, ALONE) == ending_losses(model, rows, 200, ALONE)
    assert model.training is training
    torch.nn.init.constant_(model.transformer.ln_f.weight, math.nan)
    with pytest.raises(TrainingError, match="losses are not finite"):
        score(model, questions_in(file), 200, ALONE)
    assert model.training is training


def test_the_interval_is_wilsons():
    assert interval(0, 10) == pytest.approx((0, 0.27753), abs=1e-4)
    assert interval(2967, 10042) == pytest.approx((0.28662, 0.30445), abs=1e-4)


# ---- the file


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"\xff\xfe{", "Invalid JSON"),
        (json.dumps(item(endings=list("abcde"))).encode(), "endings List should have at most 4"),
        (json.dumps(item(label=4)).encode(), "label Input should be 0"),
    ],
)
def test_a_damaged_line_is_one_line_that_names_it(line, said, file):
    file.write_bytes(file.read_bytes() + line)
    with refused(rf"{file}, line 13: {said}"):
        read_items(file)


def test_labels_may_be_text_and_empty_lines_do_not_count(tmp_path):
    path = write_items(tmp_path / "items.jsonl", [item(label="2")])
    path.write_text(f"\n{path.read_text()}\n\n")
    assert [question.right for question in questions_in(path)] == [2]


def test_a_download_is_kept_only_if_it_is_the_file_that_is_known(tmp_path):
    source = write_items(tmp_path / "source", [item()])
    with refused("could not be read from .*expected SHA-256 0aa3b88"):
        download(str(tmp_path), str(source))
    assert not any(tmp_path.glob("*/*"))
    path = download(str(tmp_path), str(source), sha256(source))
    assert path.read_bytes() == source.read_bytes()
    source.unlink()
    assert download(str(tmp_path), str(source)) == path


# ---- between the steps of a run


@pytest.fixture
def scored_config(tiny_config, tmp_path):
    items = write_items(tmp_path / "few.jsonl", [*map(item, range(5))])

    options = WITH_TEXT | {"hellaswag_every": 2, "hellaswag_file": str(items), "batch_size": 1}
    return lambda **changes: tiny_config(**options | changes)


COLUMNS = ["step", "val_loss", "bits_per_byte", "hellaswag_acc_norm"]


def test_a_run_is_scored_before_its_steps_every_so_many_and_at_the_end(scored_config, capsys):
    config = scored_config(max_steps=5, eval_every=3, val_fraction=0.02)
    summary = train(config, ALONE)
    found = rows(config, "eval.csv")
    assert list(found[0]) == COLUMNS
    steps = {name: [row["step"] for row in found if row[name]] for name in COLUMNS[1:]}
    assert steps == {
        "val_loss": [*"035"],
        "bits_per_byte": [*"035"],
        "hellaswag_acc_norm": [*"0245"],
    }
    for name in COLUMNS[1:]:
        assert summary[name] == float(found[-1][name])
    share = float(found[1]["hellaswag_acc_norm"])
    assert f"step 2/5 | HellaSwag acc_norm {share:.4f}" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_scores_of_an_earlier_version_by_what_they_were(scored_config):
    config = scored_config(max_steps=2)
    train(config, ALONE)
    (folder_of(config) / "eval.csv").write_text(
        "step,val_loss,hellaswag_acc,hellaswag_acc_norm,hellaswag_acc_bytes,hellaswag_acc_token\n"
        "0,,0.1,0.2,0.3,0.4\n2,,0.1,0.2,0.3,0.4\n"
    )
    train(scored_config(max_steps=4, resume="auto"), ALONE)
    *kept, last = rows(config, "eval.csv")
    for row in kept:  # once per character, and per token as now
        assert (row["hellaswag_acc_chars"], row["hellaswag_acc_norm"]) == ("0.2", "0.4")
    assert last["hellaswag_acc_norm"]


def test_without_its_file_a_run_does_not_begin(scored_config):
    config = scored_config(hellaswag_file=None, max_steps=1)
    with refused(r"/hellaswag/hellaswag_val.jsonl: No such file or directory; .*python"):
        train(config, ALONE)
    assert not Path(config.log_dir, "train").exists()
    path = Path(config.data_dir, "hellaswag/hellaswag_val.jsonl")
    path.parent.mkdir()
    write_items(path, [item()])
    assert train(config, ALONE)["hellaswag_acc_norm"] in (0, 1)


# ---- the command


def command(words):
    """The results of evaluate.py with this command line."""
    with Console():
        return evaluate.evaluate(parse(EvaluateOptions, words.split(), positional="run"), ALONE)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"eval_tokens": 100}, 96),
        ({"flash": True, "loss_chunks": 3, "dropout": 0.3, "tie_weights": True}, 768),
        ({"bf16": True}, 768),
    ],
)
def test_a_runs_loss_is_bit_for_bit_what_the_run_logged_last(options, tokens, tiny_config):
    config = tiny_config(eval_every=4, val_fraction=0.2, batch_size=3, **options)
    logged = train(config, ALONE)["val_loss"]
    results = command(f"train --log_dir {config.log_dir}")
    assert results["step"] == 6
    assert results["dtype"] == config.matmul_dtype
    assert results["validation"] == {
        "corpus": f"{config.data_dir}/tiny",
        "loss": logged,
        "perplexity": math.exp(logged),
        "tokens": tokens,
        "seq_len": 32,
        "bits_per_byte": None,  # its vocabulary is not GPT-2's
    }


def test_a_hugging_face_folder_on_a_corpus_and_hellaswag(pair, corpus, file, capsys):
    ours, theirs, folder = pair
    words = f"{folder} --dataset tiny --data_dir {corpus} --val_fraction 1 --tokens 640"
    results = command(f"{words} --hellaswag {file}")
    tokens = tokens_in(next((corpus / "tiny").glob("*.bin")))[:641].astype("int64")
    x, y = (torch.from_numpy(part).view(10, CONTEXT) for part in (tokens[:-1], tokens[1:]))
    with torch.no_grad():
        loss = F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten()).item()
    assert results["validation"]["loss"] == pytest.approx(loss, abs=1e-4)
    scores = score(ours, questions_in(file), 10**6, ALONE)
    assert results["hellaswag"] == {"file": str(file)} | scores
    out = capsys.readouterr().out
    assert f"validation loss {loss:.4f} nats per token" in out
    assert f"12 items: acc_norm {scores['acc_norm']['score']:.4f} (95%" in out


def test_bits_per_byte_divides_the_loss_of_the_targets_by_the_bytes_of_their_text(
    pair, tmp_path, capsys
):
    """Tokens beyond the last whole sequence, the first token, and <|endoftext|> have no bytes."""
    _, theirs, folder = pair
    encoding = get_encoding()
    texts = ["naïve, 日本語 😀 don't\n\n", " a  rope sits" * 9, "The end, 3.5 Ça"]
    tokens = [token for text in texts for token in [END_OF_TEXT, *encoding.encode_ordinary(text)]]
    write_corpus(tmp_path / "texts", [tokens])
    targets = tokens[1:41]
    x, y = torch.tensor(tokens[:40]).view(5, 8), torch.tensor(targets)
    with torch.no_grad():
        loss = F.cross_entropy(theirs(x).logits.flatten(0, 1), y, reduction="sum").item()
    size = len(encoding.decode_bytes([token for token in targets if token != END_OF_TEXT]))
    expected = loss / math.log(2) / size
    assert END_OF_TEXT in targets
    assert len(tokens) > 41
    words = f"{folder} --dataset texts --data_dir {tmp_path} --val_fraction 1 --seq_len 8"
    results = command(f"{words} --tokens 41 --batch_size 2")["validation"]
    assert results["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    assert f", {expected:.4f} bits per byte, over 40 tokens" in capsys.readouterr().out


def test_two_processes_share_the_work_and_come_to_the_same(pair, corpus, file, tmp_path):
    words = f"{pair[2]} --dataset tiny --data_dir {corpus} --val_fraction 0.5 --hellaswag {file}"
    one = command(words)
    words += " --device cpu --json new/both.json --batch_size 3"
    done = run_ranks(2, "evaluate.py", *words.split(), cwd=tmp_path)
    assert done[1].stdout == ""
    both = json.loads((tmp_path / "new/both.json").read_text())
    assert both.keys() == one.keys()
    assert both["hellaswag"] == json.loads(json.dumps(one["hellaswag"]))
    for figure in ("loss", "bits_per_byte"):
        assert both["validation"][figure] == pytest.approx(one["validation"][figure], rel=1e-6)


def test_a_run_whose_corpus_was_changed_or_deleted(tiny_config, corpus, file, capsys):
    config = tiny_config(**WITH_TEXT, val_fraction=0.2, max_steps=1)
    train(config, ALONE)
    run = f"train --log_dir {config.log_dir}"
    (path,) = (corpus / "tiny").glob("*.bin")
    good = path.read_bytes()
    path.write_bytes(good[:-100] + bytes(100))
    command(run)
    # only the end has changed, which the run did not train on
    assert "note" not in capsys.readouterr().out
    said = f"note: the run trained on other tokens of {corpus}/tiny"
    for content, words in (
        (good[:1024] + good[1026:] + good[1024:1026], run),
        (good, f"{run} --val_fraction 0.5"),
    ):
        path.write_bytes(content)
        command(words)
        assert said in capsys.readouterr().out
    (corpus / "other").mkdir()
    path.rename(corpus / "other/val.bin")  # no training files
    assert command(f"{run} --dataset other")["validation"]["tokens"] > 3000
    shutil.rmtree(corpus / "tiny")
    with refused("no such corpus"):
        command(run)
    assert "validation" not in command(f"{run} --hellaswag {file}")
    assert f"note: no validation loss: {corpus}/tiny: no such corpus" in capsys.readouterr().out


MISTAKES = """
none => none: no such run
HF => HF: evaluate it on what? Name a corpus, --dataset NAME
HF --dataset tiny --val_fraction 0.001 => 4 tokens make 0 sequences of 64; raise val_fra
HF --dataset tinny => no such corpus (a folder of *.bin token files); did you mean tiny?
HF --dataset tiny --seq_len 65 => longer than the model's context, 64
HF --hellaswag none.jsonl => none.jsonl: No such file or directory; HellaSwag's validation split is
HF --hellaswag empty => empty: has no items
"""


@pytest.mark.parametrize(("words", "said"), cases(MISTAKES))
def test_mistakes_of_the_command_are_one_line(words, said, pair, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("HF").symlink_to(pair[2])
    with refused(re.escape(said)):
        command(words)


def test_results_can_go_into_a_pipe(tmp_path):
    """A device, such as /dev/null, is like a pipe: a file that replaced it would break much."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    write_json(fifo, {"loss": 1.5})
    assert json.loads(os.read(reader, 100)) == {"loss": 1.5}
    assert fifo.is_fifo()
