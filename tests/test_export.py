"""Weights in and out: export.py's folder in the hands of transformers, and nanoGPT's and
build-nanogpt's .pt files.
"""

import dataclasses
import itertools
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import checkpoint.files
import checkpoint.weights
from checkpoint.files import CheckpointError
from checkpoint.resume import find_checkpoint
from checkpoint.weights import build_model, load_model
from config import load_config
from data.tokenizer import get_encoding
from inference.export_folder import export
from model import GPT, GPTConfig
from runtime.errors import UserError
from tests.conftest import ALONE, flags, generate, run, run_from_nothing
from tests.test_peers import PEER
from train import train

GPT2_VOCAB = {"vocab_size": 50304, "n_embd": 16, "tie_weights": True}  # padded, as the ladder's
# all of an exported folder that follows from the weights alone
OF_THE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
ODD_TEXTS = [
    "Hello  world",
    "\n\n\tdef f(x):\n    return  x ",
    "naïve 日本語 😀",
    "it's we'll 12345 a,b !",
    " ",
    "\r\n\x00\u2028x",
]


def exported(config, name="out", source=None):
    folder = Path(config.log_dir).parent / name
    notes = export(source or str(config.run_name), folder, config.log_dir)
    return folder, notes


# ---- out


def test_a_fresh_process_loads_the_folder_offline_and_has_our_logits_and_our_greedy_text(
    tiny_config, tmp_path
):
    config = tiny_config(**GPT2_VOCAB, max_steps=20, lr=1e-2)
    train(config, ALONE)
    done = run("export.py", "train", "my model", "--log_dir", config.log_dir, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    ours = load_model("train", config.log_dir)
    idx = torch.randint(50257, (2, 32), generator=torch.Generator().manual_seed(0))
    torch.save(ours(idx), tmp_path / "ours.pt")
    torch.save(idx, tmp_path / "idx.pt")
    code = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
model, info = AutoModelForCausalLM.from_pretrained("my model", output_loading_info=True)
assert not any(info.values()), info
with torch.no_grad():
    logits = model(torch.load("idx.pt")).logits
    torch.testing.assert_close(logits, torch.load("ours.pt"), rtol=1e-4, atol=1e-4)
generate = pipeline("text-generation", "my model")
how = {"max_new_tokens": 20, "do_sample": False, "return_full_text": True}
print(generate("The value", **how)[0]["generated_text"], end="")
"""
    theirs = run_from_nothing(
        "-c", code, cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home")
    )
    assert theirs.returncode == 0, theirs.stderr
    assert not re.search("warn|deprecat|setting `", theirs.stderr.lower()), theirs.stderr
    tokens = torch.tensor([get_encoding().encode_ordinary("The value")])
    text = generate(ours, tokens, 20, temperature=0)[0].tolist()
    assert theirs.stdout == get_encoding().decode(text)


@pytest.mark.parametrize(
    "options",
    [
        GPT2_VOCAB,
        GPT2_VOCAB | {"tie_weights": False},
        GPT2_VOCAB | {"vocab_size": 50257, "activation": "gelu", "dropout": 0.1},
        {},
        {"real_vocab_size": 100, "tie_weights": True},
    ],
    ids=["padded", "untied", "exact gelu", "own vocabulary", "padded own vocabulary"],
)
def test_transformers_has_our_logits_whatever_the_options(options, tiny_config):
    config = tiny_config(**options, max_steps=2, lr=1e-2)
    train(config, ALONE)
    folder, notes = exported(config)
    ours, theirs = load_model("train", config.log_dir), AutoModelForCausalLM.from_pretrained(folder)
    idx = torch.randint(100, (2, 32))
    torch.testing.assert_close(theirs(idx).logits, ours(idx), rtol=1e-4, atol=1e-4)
    padding = (
        (config.vocab_size - config.n_vocab) * config.n_embd * (1 if config.tie_weights else 2)
    )
    assert theirs.num_parameters() == ours.num_parameters() - padding
    own = config.n_vocab != 50257
    assert [f"vocabulary of {config.n_vocab} tokens is not GPT-2's" in note for note in notes] == [
        True
    ] * own
    assert (folder / "tokenizer.json").exists() != own
    assert theirs.config.eos_token_id == (None if own else 50256)
    assert (theirs.config.resid_pdrop, theirs.config.n_positions) == (config.dropout, 32)


def test_a_run_exported_taken_up_and_exported_again_has_the_same_files(tiny_config):
    config = tiny_config(**GPT2_VOCAB, max_steps=2)
    train(config, ALONE)
    first, _ = exported(config)
    again, _ = exported(config, "again", source=str(first))
    taken_up = tiny_config(
        shape={},
        max_steps=1,
        init_from=str(first),
        run_name="second",
        lr=1e-30,
        weight_decay=0,
        vocab_size=50304,
    )
    train(taken_up, ALONE)
    second, _ = exported(taken_up, "second")
    for folder, name in itertools.product((again, second), OF_THE_WEIGHTS):
        assert (folder / name).read_bytes() == (first / name).read_bytes(), (folder, name)


def test_what_transformers_wrote_is_exported_as_transformers_wrote_it(tmp_path):
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "theirs")
    export(str(tmp_path / "theirs"), tmp_path / "ours")
    folders = [tmp_path / name for name in ("theirs", "ours")]
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in folders)
    del ours["n_ctx"]
    assert {name: theirs.get(name) for name in ours} == ours
    theirs, ours = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert theirs == ours


def test_the_tokenizer_in_the_folder_cuts_texts_as_ours_does(tiny_config):
    config = tiny_config(**GPT2_VOCAB, max_steps=1)
    train(config, ALONE)
    folder, _ = exported(config)
    theirs, plain = (
        AutoTokenizer.from_pretrained(folder),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    for text in ODD_TEXTS:
        tokens = get_encoding().encode_ordinary(text)
        assert theirs(text)["input_ids"] == plain.encode(text).ids == tokens
        assert theirs.decode(tokens) == text
    assert theirs("<|endoftext|>")["input_ids"] == [theirs.eos_token_id] == [50256]
    assert theirs.model_max_length == 32


def test_the_model_card_tells_history_and_limits_and_the_config_repeats_the_run(
    tiny_config, tmp_path
):
    schedule = {"warmup_steps": 2, "lr_schedule": "cosine"}
    config = tiny_config(
        max_steps=4, eval_every=2, val_fraction=0.1, init_from="scratch", **schedule
    )
    train(config, ALONE)
    folder, _ = exported(config)
    text = (folder / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "transformers"
    for said in (
        "# out\n",
        "trained from scratch on `tiny` (say here what",
        "for 4 steps and 512 tokens (ranks: 1)",
        "from_pretrained('out')",
        "Do not rely on it",
    ):
        assert said in text
    assert str(tmp_path) not in text + (folder / "config.yaml").read_text(), (
        "a folder of this machine is nobody else's business"
    )
    again = load_config(
        str(folder / "config.yaml"), data_dir=config.data_dir, log_dir=str(tmp_path / "again")
    )
    changed = {name: getattr(again, name) for name in ("data_dir", "log_dir")}
    assert again == config.model_copy(update=changed | {"min_lr": config.final_lr()})
    train(again, ALONE)
    one, two = (
        (tmp_path / logs / "train/checkpoints/step_000004/model.safetensors").read_bytes()
        for logs in ("logs", "again")
    )
    assert one == two


def test_a_checkpoint_in_the_middle_has_a_card_that_ends_at_its_step(tiny_config):
    config = tiny_config(max_steps=4, checkpoint_every=2)
    train(config, ALONE)
    folder, _ = exported(config, source=f"{config.log_dir}/train/checkpoints/step_000002")
    assert "for 2 steps and 256 tokens" in (folder / "README.md").read_text()


def test_a_card_names_openais_weights_as_what_the_run_began_with(
    tiny_config, tmp_path, monkeypatch
):
    train(tiny_config(run_name="first", max_steps=1), ALONE)
    cache = tmp_path / "hub/models--openai-community--gpt2/snapshots/1"
    export("first", cache, tiny_config().log_dir)
    monkeypatch.setattr(checkpoint.weights, "download", lambda name: cache)
    config = tiny_config(init_from="gpt2", max_steps=1)
    train(config, ALONE)
    for source in ("train", "gpt2"):
        text = (exported(config, source, source=source)[0] / "README.md").read_text()
        said = "trained from " if source == "train" else "Its weights are those of `"
        assert f"{said}gpt2" in text
        assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm": "rmsnorm"}, "norm rmsnorm and bias True;"),
        ({"bias": False}, "norm layernorm and bias False;"),
        ({"norm": "rmsnorm", "bias": False}, "norm rmsnorm and bias False;"),
    ],
)
def test_a_model_that_gpt2_cannot_be_is_refused_and_leaves_no_folder(
    options, said, tiny_config, tmp_path
):
    config = tiny_config(**options, max_steps=1)
    train(config, ALONE)
    with pytest.raises(CheckpointError, match=said):
        exported(config)
    assert not list(tmp_path.glob("*out*"))


def test_a_folder_that_is_there_is_never_written_to(tiny_config, tmp_path):
    config = tiny_config(max_steps=1)
    train(config, ALONE)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/kept").touch()
    for name in ("full", "full/kept"):
        with pytest.raises(UserError, match="is there already; choose another name"):
            exported(config, name)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["kept"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert exported(config, "link")[0].is_symlink()
    assert (tmp_path / "empty/README.md").exists()


def test_a_disk_that_is_full_leaves_no_folder(tiny_config, tmp_path, monkeypatch):
    config = tiny_config(max_steps=1)
    train(config, ALONE)

    def full(*_, **__):
        raise checkpoint.files.SafetensorError("No space left on device")

    monkeypatch.setattr(checkpoint.files, "save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        exported(config)
    assert not list(tmp_path.glob("*out*"))


# ---- in: nanoGPT's and build-nanogpt's .pt


OPTIONS = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "vocab_size": 50304}


@pytest.fixture
def pickled_from():
    """Makes instances of a dataclass GPTConfig that are pickled as one of the module named, as in a
    script that has ended.
    """

    def make(module, **fields):
        theirs = dataclasses.make_dataclass("GPTConfig", fields)
        theirs.__module__ = module
        module = sys.modules.setdefault(module, type(sys)(module))
        module.GPTConfig = theirs
        made.append(module)
        return theirs(**fields)

    made = []
    yield make
    assert not any(hasattr(module, "GPTConfig") for module in made)


def save(path, content):
    """torch.save, after which no class GPTConfig is to be found any more."""
    torch.save(content, path)
    for name in ("__main__", "train_gpt2"):
        if hasattr(sys.modules.get(name), "GPTConfig"):
            del sys.modules[name].GPTConfig
    return str(path)


def nanogpt(**changed):
    """What nanoGPT saves."""
    model = weights_of(activation="gelu")
    return {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()},
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0)}},
            "param_groups": [{"lr": 1e-3, "params": [0]}],
        },
        "model_args": OPTIONS | {"bias": True, "dropout": 0.2},
        "iter_num": 5,
        "best_val_loss": torch.tensor(4.0),
        "config": {"dataset": "openwebtext"},
    } | changed


def weights_of(**options):
    torch.manual_seed(1)
    model = GPT(GPTConfig(**OPTIONS, tie_weights=True, **options))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def test_a_checkpoint_of_nanogpts_own_model_has_its_logits(tmp_path):
    module = {"__name__": "tests.test_peers"}
    exec(PEER, module)
    torch.manual_seed(0)
    theirs = module["GPT"](module["GPTConfig"](**OPTIONS))
    ours = load_model(save(tmp_path / "ckpt.pt", nanogpt(model=torch.compile(theirs).state_dict())))
    idx = torch.randint(50257, (2, 32))
    torch.testing.assert_close(ours(idx), theirs(idx, idx)[0][..., :50257], rtol=1e-4, atol=1e-4)
    assert (ours.config.n_vocab, ours.config.tie_weights, ours.config.activation) == (
        50257,
        True,
        "gelu",
    )


@pytest.mark.parametrize("script", ["__main__", "train_gpt2"])
def test_a_checkpoint_of_build_nanogpt_is_read_though_its_options_are_a_pickled_dataclass(
    script, pickled_from, tmp_path
):
    model = weights_of()
    theirs = {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    masks = {
        f"_orig_mod.transformer.h.{i}.attn.bias": torch.ones(1, 1, 32, 32).tril() for i in range(2)
    }
    config = pickled_from(script, **OPTIONS)
    before = set(torch.serialization.get_safe_globals())
    ours = load_model(
        save(
            tmp_path / "model_19072.pt", {"model": theirs | masks, "config": config, "step": 19072}
        )
    )
    idx = torch.randint(50257, (2, 32))
    assert torch.equal(ours(idx), model(idx))
    assert ours.config.activation == "gelu_tanh"
    assert set(torch.serialization.get_safe_globals()) == before


def test_a_pt_file_without_biases_trains_samples_and_exports_as_far_as_it_can(
    tiny_config, tmp_path
):
    bare = weights_of(bias=False, activation="gelu")
    path = save(
        tmp_path / "bare.pt", nanogpt(model=bare.state_dict(), model_args=OPTIONS | {"bias": False})
    )
    config, model = build_model(tiny_config(init_from=path, **GPT2_VOCAB))
    assert (config.init_from, config.bias, config.activation) == (path, False, "gelu")
    assert torch.equal(model.state_dict()["lm_head.weight"], bare.lm_head.weight)
    with pytest.raises(
        CheckpointError, match="bias False; GPT-2 in transformers has LayerNorm and biases"
    ):
        export(path, tmp_path / "out")


def test_each_command_takes_a_pt_file(tiny_config, tmp_path):
    path = save(tmp_path / "ckpt.pt", nanogpt())
    given = {
        name: value
        for name, value in tiny_config(init_from=path, max_steps=1)
        .model_dump(exclude_unset=True)
        .items()
        if name not in OPTIONS
    }
    done = run("train.py", *flags(load_config(**given)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = run("sample.py", path, "--max_new_tokens", "3", "--temperature", "0", cwd=tmp_path)
    assert text.returncode == 0, text.stderr
    assert run("export.py", path, "out", cwd=tmp_path).returncode == 0
    ours, theirs = load_model(path), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    idx = torch.randint(50257, (2, 32))
    torch.testing.assert_close(theirs(idx).logits, ours(idx), rtol=1e-4, atol=1e-4)
    assert "those of `ckpt.pt`" in (tmp_path / "out/README.md").read_text()


class Evil:
    """Unpickled, it calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.system, Path.touch])
@pytest.mark.parametrize("place", ["model", "config", "unused", "whole"])
def test_a_pickle_that_would_run_something_is_refused_in_one_line_and_runs_nothing(
    function, place, tmp_path
):
    victim = tmp_path / "victim"
    evil = Evil(function, victim if function is Path.touch else f"touch {victim}")
    path = save(tmp_path / "evil.pt", evil if place == "whole" else nanogpt(**{place: evil}))
    with pytest.raises(
        CheckpointError, match=r"evil\.pt: refused: it names [\w.]+, which is code"
    ) as refused:
        load_model(path)
    assert "\n" not in str(refused.value)
    assert not victim.exists()


def without(content, *names):
    return {name: value for name, value in content.items() if name not in names}


BAD_FILES = {
    "a list": (lambda good: [1, 2], r"it has \['list'\]"),
    "a tensor": (lambda good: torch.zeros(3), r"it has \['Tensor'\]"),
    "an optimizer": (lambda good: good["optimizer"], r"it has \['state', 'param_groups'\]$"),
    "nothing": (lambda good: {}, r"it has \[\]"),
    "weights alone": (lambda good: good["model"], "not a checkpoint of nanoGPT"),
    "no options": (lambda good: without(good, "model_args"), "not a checkpoint of nanoGPT"),
    "no weights": (lambda good: without(good, "model"), "not a checkpoint of nanoGPT"),
    "an option that is missing": (
        lambda good: good | {"model_args": without(good["model_args"], "n_head")},
        "n_head: ",
    ),
    "an option of another kind": (
        lambda good: good | {"model_args": good["model_args"] | {"n_layer": torch.ones(2)}},
        "n_layer: ",
    ),
    "an option of a fork": (
        lambda good: good | {"model_args": good["model_args"] | {"rope": True}},
        "rope: unknown option",
    ),
    "names that are no names": (
        lambda good: {("a\nb",): 1, 2: 3},
        r"it has \[\('a\\nb',\), 2\]$",
    ),
    "heads that do not divide": (
        lambda good: good | {"model_args": good["model_args"] | {"n_head": 3}},
        "into 3 heads",
    ),
    "bias of another kind": (
        lambda good: good | {"model_args": good["model_args"] | {"bias": torch.ones(2)}},
        "bias: ",
    ),
    "more layers": (
        lambda good: good | {"model_args": good["model_args"] | {"n_layer": 3}},
        r"Missing key\(s\) in state_dict: \"transformer\.h\.2",
    ),
    "a missing weight": (
        lambda good: good | {"model": without(good["model"], "_orig_mod.transformer.ln_f.bias")},
        r"Missing key.*transformer\.ln_f\.bias",
    ),
    "a wrong shape": (
        lambda good: (
            good | {"model": good["model"] | {"_orig_mod.transformer.ln_f.bias": torch.zeros(15)}}
        ),
        r"size mismatch for transformer\.ln_f\.bias",
    ),
    "a head of another type": (
        lambda good: (
            good
            | {
                "model": good["model"]
                | {"_orig_mod.lm_head.weight": torch.zeros(50304, 16, dtype=torch.int8)}
            }
        ),
        "of type torch.int8",
    ),
    "a whole module": (
        lambda good: torch.nn.Linear(2, 2),
        r"it names torch\.nn\.modules\.linear\.Linear",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_pt_file_of_something_else_is_one_line(case, tmp_path):
    change, said = BAD_FILES[case]
    path = save(tmp_path / "x.pt", change(nanogpt()))
    with pytest.raises(CheckpointError, match=said) as refused:
        load_model(path)
    assert str(refused.value).startswith(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "cut",
    [
        lambda whole: b"",
        lambda whole: b"text",
        lambda whole: whole[:2000],
        lambda whole: whole[:-100],
    ],
    ids=["empty", "text", "its beginning", "without its end"],
)
def test_a_damaged_pt_file_is_one_line(cut, tmp_path):
    path = Path(save(tmp_path / "x.pt", nanogpt()))
    path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(
        CheckpointError, match=r"x\.pt: damaged, or not written by torch\.save"
    ) as refused:
        load_model(str(path))
    assert "\n" not in str(refused.value)


def test_a_file_where_a_folder_belongs_says_what_to_give_and_the_other_way_round(
    tiny_config, tmp_path
):
    path = save(tmp_path / "ckpt.pt", nanogpt())
    with pytest.raises(
        UserError,
        match=r"no such run or checkpoint folder; .* --init_from",
    ):
        find_checkpoint(load_config(resume=path), ALONE)
    with pytest.raises(CheckpointError, match="no such run with a checkpoint"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"or \.pt file of nanoGPT"):
        load_model(str(tmp_path / "model.safetensors"))
