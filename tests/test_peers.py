"""Comparing with peers: what is a peer, equal first losses, and a whole comparison of tiny models."""

import json
import sys

import pytest
import torch

from benchmarks import in_turn
from benchmarks.in_turn import Side
from benchmarks.peer_side import build_peer
from benchmarks.peers import (
    WITH_SETTINGS,
    Comparison,
    PeersOptions,
    check_peers,
    compare_losses,
    main,
    our_config,
    plan,
)
from runtime.errors import UserError
from tests.conftest import run

# a small file in nanoGPT's manner
PEER = """
from dataclasses import dataclass
import torch
import torch.nn as nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.n_head
        self.c_attn, self.c_proj = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias), nn.Linear(c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=2))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias), nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(c.n_embd), Attention(c), nn.LayerNorm(c.n_embd), MLP(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd), "wpe": nn.Embedding(config.block_size, config.n_embd),
            "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]), "ln_f": nn.LayerNorm(config.n_embd)})
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
SIZES = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "seq_len": 16,
    "batch_size": 2,
    "device": "cpu",
    "compile": False,
    "bf16": False,
}


@pytest.fixture
def peer(tmp_path):
    """Writes a peer's file, with some of its text replaced."""

    def write(*replaced, text=PEER):
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "model.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def options(corpus):
    return PeersOptions(**SIZES, dataset="tiny", data_dir=str(corpus))


def check(path, options, place):
    place.mkdir()
    check_peers([path], our_config(options), place)


def test_peers_have_our_loss_and_our_gradients_from_equal_weights(options, peer, tmp_path):
    config, place = our_config(options), tmp_path / "place"
    paths = ["transformers", peer()]
    place.mkdir()
    check_peers(paths, config, place)
    config = config.model_copy(update={"init_from": str(place / "tied")})
    x, y = torch.randint(50257, (2, 2, 16)).unbind()
    found = []
    for path in paths:
        model, loss_of = build_peer(path, config)
        loss = loss_of(model, x, y)
        loss.backward()
        found.append((loss.item(), model.transformer.h[1].mlp.c_fc.weight.grad))
    (loss, grad), (their_loss, their_grad) = found
    assert their_loss == pytest.approx(
        loss, abs=2e-3
    )  # the file's model has padding rows in its softmax
    assert torch.allclose(
        grad.t(), their_grad, atol=1e-5, rtol=0.02
    )  # transformers keeps (in, out)


def test_this_projects_own_model_is_a_peer_too(options, tmp_path):
    check("model.py", options, tmp_path / "place")


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ([("is_causal=True", "is_causal=False")], "so it computes something else"),
        ([("x = x + self.attn", "x = self.attn")], "so it computes something else"),
        ([("class GPT(", "class Gpt(")], "has no GPT;"),
        (
            [("class GPTConfig", "class Config"), ("class GPT(", "class Gpt(")],
            "has no GPT and no GPTConfig",
        ),
        ([("n_embd: int = 768", "width: int = 768")], "its GPTConfig has no n_embd"),
        (
            [("    block_size: int", "    experts: int\n    block_size: int")],
            "its GPTConfig asks for experts",
        ),
        (
            [('"ln_f"', '"norm"'), ("transformer.ln_f", "transformer.norm")],
            "has no transformer.ln_f.bias (and 3 more)",
        ),
        ([("4 * c.n_embd", "3 * c.n_embd")], "has transformer.h."),
        ([("self.lm_head.weight = self.transformer.wte.weight", "pass")], "are two matrices"),
        ([("return logits, F", "return {}, logits, F")], "must return the loss"),
        (
            [("def forward(self, idx, targets=None)", "def forward(self, tokens)")],
            "its forward(idx, targets) fails: TypeError",
        ),
        (
            [("import torch\n", "import torch, nowhere\n")],
            "cannot be imported: ModuleNotFoundError: No module named 'nowhere'",
        ),
        ([("class GPT(", "class GPT[(")], "cannot be imported: SyntaxError"),
    ],
)
def test_a_file_that_is_no_peer_is_one_error_line(replaced, said, options, peer, tmp_path):
    with pytest.raises(UserError) as error:
        check(peer(*replaced), options, tmp_path / "place")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peer", "nowhere.py"], "--peer nowhere.py: no such file"),
        (["--peer", "a/model.py", "b/../a/model.py"], "a/model.py is named twice"),
        (["--config", "baseline.yaml"], "tie_weights False, which the peers have not"),
        (["--rounds", "3"], "greater than or equal to 6"),
        (["--no-flash"], "unknown option"),
    ],
)
def test_what_cannot_be_compared_is_told_before_anything_starts(arguments, said, corpus, tmp_path):
    ran = run(
        "-m",
        "benchmarks.peers",
        "--dataset",
        "tiny",
        "--data_dir",
        corpus,
        "--log_dir",
        tmp_path / "logs",
        "--n_layer",
        "1",
        "--n_head",
        "2",
        "--n_embd",
        "16",
        "--seq_len",
        "16",
        *arguments,
        cwd=tmp_path.parent,
    )
    assert ran.returncode == 2, ran.stderr
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "logs").exists()


def test_rounding_explains_more_in_bf16_and_padding_only_a_higher_loss(options):
    config = our_config(options)  # 47 rows of padding
    compare_losses("peer", 10.0009, 10.0, config, rounded=False)
    compare_losses("peer", 10.0035, 10.0, config, rounded=True)
    for loss, rounded in ((9.9991, False), (10.0035, False), (10.01, True)):
        with pytest.raises(UserError, match="a difference of"):
            compare_losses("peer", loss, 10.0, config, rounded=rounded)


def answering(name, loss=10.0, seconds=0.5):
    """A side that answers at once."""
    code = (
        "import json\nfor steps in map(int, open(0)):\n"
        f" print(json.dumps({{'seconds': [{seconds}] * steps, 'tokens': 7 * steps, 'asleep': True, 'loss': {loss},"
        " 'peak_memory_mb': 100}), flush=True)"
    )
    return lambda: Side(name, [sys.executable, "-c", code])


def test_a_side_whose_first_loss_differs_is_left_out_and_the_others_are_not(options, tmp_path):
    found = Comparison(options.model_copy(update={"rounds": 6}), our_config(options), tmp_path)
    names = [entry.name for entry in found.entries]
    assert names == ["speedup10", "transformers", f"transformers{WITH_SETTINGS}", "baseline"]
    for entry, loss, seconds in zip(
        found.entries, (10.0, 10.2, 10.0, 10.0), (0.5, 0.5, 1.0, 2.0), strict=True
    ):
        entry.command = answering(entry.name, loss, seconds)
    for _ in found.measure():
        pass
    ours, plain, with_settings, baseline = found.entries
    assert found.failed == [plain.error]
    assert plain.error.startswith("transformers: its first loss is 10.2")
    assert plain.ours_over is None
    assert with_settings.ours_over.median == 2
    assert baseline.ours_over.median == 4
    assert ours.rates == [14.0] * 12
    assert all(entry.cold_s > 0 and entry.warm_s > 0 for entry in (ours, with_settings, baseline))


def test_a_peer_with_our_settings_differs_from_the_plain_one_in_these_alone(
    options, peer, tmp_path
):
    config = our_config(options)
    _, groups = plan(options.model_copy(update={"peer": (peer(),)}), config, tmp_path)
    for group in groups[:-1]:
        plain, with_settings = (entry.command().command for entry in group)
        assert [word for word in with_settings if word not in plain] == ["--process_settings"]
        assert plain == [word for word in with_settings if word != "--process_settings"]


def test_starts_are_timed_with_an_empty_and_then_with_the_filled_compile_cache(options, tmp_path):
    found = Comparison(options, our_config(options), tmp_path)
    folder = found.side(found.ours).environment["TORCHINDUCTOR_CACHE_DIR"]
    folders = {found.side(entry).environment["TORCHINDUCTOR_CACHE_DIR"] for entry in found.entries}
    assert len(folders) == len(found.entries)
    assert not any(
        " " in folder for folder in folders
    )  # torch.compile cannot call g++ with such paths
    leave = (
        "import json, os, pathlib\nfolder = "
        "pathlib.Path(os.environ['TORCHINDUCTOR_CACHE_DIR'])\nseen = folder.exists()\n"
        "folder.mkdir(parents=True, exist_ok=True)\nfor _ in open(0):\n"
        " print(json.dumps({'seconds': [1], 'tokens': 1, 'asleep': True, 'loss': 10 + seen / "
        "1000}), flush=True)"
    )
    sides = []
    found.ours.command = lambda: (
        sides.append(Side("ours", [sys.executable, "-c", leave])) or sides[-1]
    )
    found.start(found.ours)
    assert [side.turns[0]["loss"] for side in sides] == [10, 10.001]
    assert folder.startswith(str(tmp_path))


def test_tiny_models_are_compared_whole(peer, corpus, tmp_path, monkeypatch, forked):
    monkeypatch.setattr(in_turn, "TURN_SECONDS", 0.01)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sizes = [
        word
        for name, value in SIZES.items()
        if not isinstance(value, bool)
        for word in (f"--{name}", str(value))
    ]
    main(
        [
            "--peer",
            peer(),
            "--dataset",
            "tiny",
            "--data_dir",
            str(corpus),
            "--log_dir",
            str(tmp_path / "logs"),
            "--no-starts",
            "--no-baseline",
            "--no-settings",
            "--no-compile",
            "--no-bf16",
            "--rounds",
            "6",
            "--width",
            "1",
            *sizes,
        ]
    )
    folder = tmp_path / "logs" / "peers"
    assert sorted(path.name for path in folder.iterdir()) == [
        "peers.png",
        "report.md",
        "results.json",
    ]
    report = (folder / "report.md").read_text()
    name = f"{tmp_path.name}/model.py"
    for side in ("speedup10", "transformers", name):
        assert f"| {side} |" in report
    groups = json.loads((folder / "results.json").read_text())["in_turn"]
    assert [[side["side"] for side in group] for group in groups] == [
        ["speedup10", "transformers"],
        ["speedup10", name],
    ]
    for group in groups:
        assert {len(side["tokens_per_sec"]) for side in group} == {6}
        ours, theirs = (side["turns"][0]["loss"] for side in group)
        assert theirs == pytest.approx(ours, abs=2e-3)
