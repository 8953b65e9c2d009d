"""Weights in and out: export.py's folder in the hands of transformers, and nanoGPT's and
build-nanogpt's .pt files.
"""

import dataclasses
import json
import logging
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from checkpoint.weights import build_model, load_model
from data.tokenizer import SEPARATOR, get_encoding
from data.vocabulary import GPT2
from export import export, write_tokenizer
from inference.sampling import Text, seeded
from model import GPT, GPTConfig
from runtime.console import noted
from tests.conftest import ALONE, grown, refused, transformers_pair
from tests.test_peers import PEER
from tests.test_resume import Bomb
from train import train

GPT2_VOCAB = {"vocab_size": 50304, "n_embd": 16, "tie_weights": True}  # padded, as the ladder's
SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32}  # in transformers


def exported(config, name="out", source=None):
    folder = Path(config.log_dir).parent / name
    with noted() as notes:
        export(source or str(config.run_name), folder, config.log_dir)
    return folder, [note.getMessage() for note in notes]


# ---- out


def test_transformers_loads_the_folder_offline_and_writes_our_greedy_text(
    tiny_config, monkeypatch, caplog
):
    config = tiny_config(**GPT2_VOCAB, max_steps=20, lr=1e-2)
    train(config, ALONE)
    folder, _ = exported(config, "my model")
    monkeypatch.setattr("socket.socket.connect", None)  # offline
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    generate_text = pipeline("text-generation", str(folder))
    (theirs,) = generate_text("The value", max_new_tokens=20, do_sample=False)
    prompt = get_encoding().encode_ordinary("The value")
    (text,) = grown(load_model("train", config.log_dir), [prompt], 20)
    assert theirs["generated_text"] == "The value" + get_encoding().decode(text)
    assert not [record for record in caplog.records if record.name != "gpt2"]


@pytest.mark.parametrize(
    "options",
    [
        GPT2_VOCAB,
        {"vocab_size": 50257, "n_embd": 16, "activation": "gelu", "norm_weight": False},
        {"real_vocab_size": 100, "tie_weights": True, "dropout": 0.1},
    ],
)
def test_transformers_has_our_logits_whatever_the_options(options, tiny_config):
    config = tiny_config(**options, max_steps=2, lr=1e-2)
    train(config, ALONE)
    folder, notes = exported(config)
    same_logits(folder, load_model("train", config.log_dir))
    theirs = json.loads((folder / "config.json").read_text())
    assert (theirs["vocab_size"], theirs["resid_pdrop"]) == (config.n_vocab, config.dropout)
    own = config.n_vocab != 50257
    assert theirs["eos_token_id"] == (None if own else 50256)
    assert [note for note in notes if "100 tokens is not known" in note] == notes
    assert (folder / "tokenizer.json").exists() == (not own) == (not notes)


def same_logits(folder, ours):
    """Compare transformers' logits of an exported folder with our model's."""
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    idx = torch.randint(ours.config.n_vocab, (2, 32))
    torch.testing.assert_close(theirs(idx).logits, ours(idx), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [50258, 50304])
def test_rows_of_added_tokens_are_kept_and_only_50304_rows_are_taken_for_padding_with_a_note(
    rows, tiny_config, tmp_path
):
    ours, theirs = transformers_pair(tmp_path / "theirs", **SIZES, vocab_size=rows)
    n_vocab = 50257 if rows == 50304 else rows
    said = "theirs: rows above GPT-2's 50257 tokens are taken for padding"
    idx = torch.tensor([[5, 50256, n_vocab - 1]])
    logits = theirs(idx).logits[..., :n_vocab]
    torch.testing.assert_close(ours(idx), logits, rtol=1e-4, atol=1e-4)

    with noted() as notes:
        export(str(tmp_path / "theirs"), tmp_path / "out")
    assert any(said in note.getMessage() for note in notes) == (rows == 50304)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == n_vocab
    same_logits(tmp_path / "out", ours)
    assert (tmp_path / "out/tokenizer.json").exists() == (n_vocab == 50257)

    config, taken = build_model(
        tiny_config(shape={}, init_from=str(tmp_path / "theirs"), vocab_size=50432)
    )
    assert (said in "".join(config.notes())) == (rows == 50304)
    assert taken.config.n_vocab == n_vocab
    assert torch.equal(taken.lm_head.weight[:n_vocab], ours.lm_head.weight[:n_vocab])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vocab_size": 50000}, r"wte.weight is \(50257, 16\), but its options say \(50000, 16\)"),
        ({"activation_function": "relu"}, "activation_function 'relu' is not one of gelu"),
    ],
)
def test_a_folder_whose_options_are_not_its_weights_is_refused(changed, said, tmp_path):
    transformers_pair(tmp_path, **SIZES)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with refused(said):
        load_model(str(tmp_path))


def test_the_tokenizer_in_the_folder_cuts_prompts_as_ours_does_end_of_text_is_one_token(tmp_path):
    write_tokenizer(tmp_path, GPT2, 32)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (
        f"{SEPARATOR} a {SEPARATOR}  b{SEPARATOR}{SEPARATOR}\n",
        "<|endoftext |> Hello  world\n\n\tdef f(x): ",
        "naïve 日本語 😀 we'll 12345,b !\r\x00\u2028x",
    ):
        tokens = Text(text, get_encoding(), seeded(0)).tokens
        assert theirs(text)["input_ids"] == plain.encode(text).ids == tokens
        assert theirs.decode(tokens) == text
        assert tokens.count(50256) == text.count(SEPARATOR)
    assert Text("", get_encoding(), seeded(0)).tokens == [theirs.eos_token_id] == [50256]
    assert theirs.model_max_length == 32


def test_the_model_card_has_the_runs_history_and_limits_and_no_folder_of_this_machine(
    tiny_config, tmp_path
):
    config = tiny_config(max_steps=4, checkpoint_every=2)
    train(config, ALONE)
    folder, _ = exported(config, "mine", f"{config.log_dir}/train/checkpoints/step_000002")
    text = (folder / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "transformers"
    for said in (
        "# mine\n",
        "trained from scratch on `tiny` (say here what",
        "for 2 steps and 256 tokens (ranks: 1)",
        "from_pretrained('mine')",
    ):
        assert said in text
    # a folder of this machine is nobody else's business
    assert str(tmp_path) not in text + (folder / "config.yaml").read_text()


def test_gpt2_means_openais_weights_even_if_a_run_has_that_name_and_a_card_says_so(
    tiny_config, tmp_path, monkeypatch
):
    cache = tmp_path / "hub/models--openai-community--gpt2/snapshots/1"
    answers = Mock(side_effect=[OSError("no network"), cache, cache])
    monkeypatch.setattr("huggingface_hub.snapshot_download", answers)
    train(tiny_config(run_name="first", max_steps=1), ALONE)
    export("first", cache, tiny_config().log_dir)
    config = tiny_config(run_name="gpt2", init_from="gpt2", max_steps=1)
    with refused("gpt2 could not be downloaded from Hugging Face"):
        train(config, ALONE)
    train(config, ALONE)
    sources = {f"{config.log_dir}/gpt2": "trained from gpt2", "gpt2": "weights are those of `gpt2`"}
    for name, (source, said) in enumerate(sources.items()):
        text = (exported(config, str(name), source)[0] / "README.md").read_text()
        assert said in text
        assert str(tmp_path) not in text


def test_an_export_that_fails_leaves_no_folder(tiny_config, tmp_path, monkeypatch):
    config = tiny_config(max_steps=1)
    train(config, ALONE)
    with monkeypatch.context() as environment, refused("transformers is missing: pip install"):
        environment.setitem(sys.modules, "transformers", None)
        exported(config)
    full = Mock(side_effect=SafetensorError("No space left on device"))
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with refused("cannot be written: .*No space left on device"):
        exported(config)
    assert not list(tmp_path.glob("*out*"))


def test_a_folder_that_is_there_is_never_written_to(tiny_config, tmp_path):
    config = tiny_config(max_steps=1)
    train(config, ALONE)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/kept").touch()
    for name in ("full", "full/kept"):
        with refused("is there already; choose another name"):
            exported(config, name)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["kept"]
    (tmp_path / "empty").mkdir()
    assert (exported(config, "empty")[0] / "README.md").exists()


# ---- in: nanoGPT's and build-nanogpt's .pt


OPTIONS = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "vocab_size": 50304}


def save(path, content):
    torch.save(content, path)
    return str(path)


def nanogpt(**changed):
    """What nanoGPT saves."""
    model = weights_of(activation="gelu")
    return {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": []},
        "model_args": OPTIONS | {"bias": True, "dropout": 0.2},
        "best_val_loss": torch.tensor(4.0),
    } | changed


def weights_of(**options):
    torch.manual_seed(1)
    return GPT(GPTConfig(**OPTIONS, tie_weights=True, **options)).eval()


def test_a_checkpoint_of_nanogpts_own_model_has_its_logits(tmp_path):
    module = {"__name__": "tests.test_peers"}
    exec(PEER, module)
    torch.manual_seed(0)
    theirs = module["GPT"](module["GPTConfig"](**OPTIONS))
    ours = load_model(save(tmp_path / "ckpt.pt", nanogpt(model=torch.compile(theirs).state_dict())))
    idx = torch.randint(50257, (2, 32))
    torch.testing.assert_close(ours(idx), theirs(idx, idx)[0][..., :50257], rtol=1e-4, atol=1e-4)
    c = ours.config
    assert (c.n_vocab, c.tie_weights, c.activation) == (50257, True, "gelu")


def test_a_checkpoint_of_build_nanogpt_is_read_though_its_options_are_a_pickled_dataclass(
    tmp_path, monkeypatch
):
    model = weights_of()
    theirs = {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    theirs["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()  # a mask
    options = dataclasses.make_dataclass("GPTConfig", OPTIONS)
    options.__module__ = "__main__"  # the script has ended when the file is read
    path = tmp_path / "model_19072.pt"
    with monkeypatch.context() as script:
        script.setattr("__main__.GPTConfig", options, raising=False)
        save(path, {"model": theirs, "config": options(**OPTIONS), "step": 19072})
    ours = load_model(str(path))
    idx = torch.randint(50257, (2, 32))
    assert torch.equal(ours(idx), model(idx))
    assert ours.config.activation == "gelu_tanh"


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path, in_tmp_path):
    path = save(tmp_path / "evil.pt", nanogpt(model=Bomb()))
    with refused(r"^\S+evil\.pt: not a whole checkpoint .*$"):
        load_model(path)
    assert not Path("exploded").exists()


def changed(part, **values):
    """What nanoGPT saves, with other values in a part of it."""
    good = nanogpt()
    return good | {part: good[part] | values}


BAD_FILES = [
    (lambda: nanogpt()["optimizer"], "not a whole checkpoint of nanoGPT"),
    (lambda: changed("model", extra=1.5), "do not fit the model: TypeError"),
    (lambda: changed("model_args", rope=True), "options of a fork, or missing: rope"),
    (
        lambda: changed("model_args", n_embd=10**14),
        r"wte.weight is \(50304, 16\), but its options say",
    ),
    (
        lambda: changed("model", **{"_orig_mod.transformer.ln_f.bias": torch.zeros(15)}),
        "size mismatch for transf",
    ),
]


@pytest.mark.parametrize(("content", "said"), BAD_FILES)
def test_a_pt_file_of_something_else_is_one_line(content, said, tmp_path):
    path = save(tmp_path / "x.pt", content())
    with refused(rf"^{path}.*{said}.*$"):  # `.` is no line break
        load_model(path)


@pytest.mark.parametrize("cut", [slice(0), slice(-100)])
def test_a_damaged_pt_file_is_one_line(cut, tmp_path):
    path = Path(save(tmp_path / "x.pt", nanogpt()))
    path.write_bytes(path.read_bytes()[cut])
    with refused(r"^\S+x\.pt: not a whole checkpoint .*$"):
        load_model(str(path))
