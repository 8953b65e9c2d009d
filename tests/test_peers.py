"""Peers: what is one, equal first losses, and a whole comparison of tiny models."""

import json
import sys

import pytest
import torch

from measure import interleaved
from measure.interleaved import Side
from measure.peer_side import build_peer
from measure.peers import (
    WITH_SETTINGS,
    Comparison,
    PeersOptions,
    check_peers,
    compare_losses,
    main,
    our_config,
    plan,
)
from runtime.cli import parse
from runtime.errors import UserError
from runtime.start import parse_command_line

# a small file in nanoGPT's manner
PEER = """
from dataclasses import dataclass
import torch
from torch import nn
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
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        qkv = self.c_attn(x).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))

class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(c.n_embd), Attention(c)
        self.ln_2, self.mlp = nn.LayerNorm(c.n_embd), MLP(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(c.vocab_size, c.n_embd),
            "wpe": nn.Embedding(c.block_size, c.n_embd),
            "h": nn.ModuleList([Block(c) for _ in range(c.n_layer)]),
            "ln_f": nn.LayerNorm(c.n_embd)})
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, idx, targets=None):
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
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
        ([("class GPT(", "class Gpt(")], "has no attribute 'GPT'"),
        ([("n_embd: int = 768", "width: int = 768")], "unexpected keyword argument 'n_embd'"),
        ([("    block_size: int", "    experts: int\n    block_size: int")], "argument: 'experts'"),
        (
            [('"ln_f"', '"norm"'), ("transformer.ln_f", "transformer.norm")],
            "transformer.ln_f.weight, transformer.norm.bias",
        ),
        ([("4 * c.n_embd", "3 * c.n_embd")], "size mismatch for transformer.h."),
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
    ("arguments", "message"),
    [
        (["--peer", "nowhere.py"], "--peer nowhere.py: no such file"),
        (["--peer", "a/model.py", "b/../a/model.py"], "a/model.py is named twice"),
        (["--config", "baseline.yaml"], "tie_weights False, which the peers have not"),
    ],
)
def test_what_cannot_be_compared_is_told_before_anything_starts(arguments, message, tmp_path):
    with pytest.raises(UserError, match=message):
        main(parse(PeersOptions, [*arguments, f"--log_dir={tmp_path}/logs"]))
    assert not (tmp_path / "logs").exists()


def test_the_command_line_has_the_training_options_and_their_bounds(capsys):
    with pytest.raises(SystemExit):
        parse_command_line(PeersOptions, ["--batch_size", "0", "--no-flash", "--rounds", "3"])
    said = capsys.readouterr().err
    assert "--batch_size: input should be greater than or equal to 1" in said
    assert "--rounds: input should be greater than or equal to 6" in said
    assert "--no-flash: unknown option" in said


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
        "import json\n"
        f"answer = {{'asleep': True, 'loss': {loss}, 'peak_memory_mb': 100}}\n"
        "for steps in map(int, open(0)):\n"
        f"    figures = {{'seconds': [{seconds}] * steps, 'tokens': 7 * steps}}\n"
        "    print(json.dumps(answer | figures), flush=True)"
    )
    return lambda: Side(name, [sys.executable, "-c", code])


def test_a_side_whose_first_loss_differs_is_left_out_and_the_others_are_not(options, tmp_path):
    found = Comparison(options.model_copy(update={"rounds": 6}), our_config(options), tmp_path)
    ours, plain, with_settings, baseline = found.entries
    names = [entry.name for entry in found.entries]
    assert names == ["speedup10", "transformers", f"transformers{WITH_SETTINGS}", "baseline"]
    ours.command = answering(ours.name)
    plain.command = answering(plain.name, loss=10.2)
    with_settings.command = answering(with_settings.name, seconds=1.0)
    baseline.command = answering(baseline.name, seconds=2.0)
    for _ in found.measure():
        pass
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
    folders = [found.side(entry).environment["TORCHINDUCTOR_CACHE_DIR"] for entry in found.entries]
    assert len(set(folders)) == len(found.entries)
    assert not any(" " in folder for folder in folders)  # torch.compile cannot call g++ with such
    code = (
        "import json, os, pathlib\n"
        "folder = pathlib.Path(os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
        "loss = 10.001 if folder.exists() else 10\n"
        "folder.mkdir(parents=True, exist_ok=True)\n"
        "answer = {'seconds': [1], 'tokens': 1, 'asleep': True, 'loss': loss}\n"
        "for _ in open(0): print(json.dumps(answer), flush=True)"
    )
    sides = [Side("ours", [sys.executable, "-c", code]) for _ in range(2)]
    left = list(sides)
    found.ours.command = lambda: left.pop(0)
    found.start(found.ours)
    assert [side.answers[0]["loss"] for side in sides] == [10, 10.001]


def test_tiny_models_are_compared_whole(options, peer, tmp_path, monkeypatch, forked):
    monkeypatch.setattr(interleaved, "TURN_SECONDS", 0.01)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    less = {"starts": False, "baseline": False, "settings": False, "rounds": 6, "width": 1.0}
    more = {"peer": (peer(),), "log_dir": str(tmp_path / "logs")}
    main(options.model_copy(update=less | more))
    folder = tmp_path / "logs" / "peers"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["peers.png", "report.md", "results.json"]
    name = f"{tmp_path.name}/model.py"
    for side in ("speedup10", "transformers", name):
        assert f"| {side} |" in (folder / "report.md").read_text()
    groups = json.loads((folder / "results.json").read_text())["in_turn"]
    sides = [[side["side"] for side in group] for group in groups]
    assert sides == [["speedup10", "transformers"], ["speedup10", name]]
    for group in groups:
        assert {len(side["tokens_per_sec"]) for side in group} == {6}
        ours, theirs = (side["turns"][0]["loss"] for side in group)
        assert theirs == pytest.approx(ours, abs=2e-3)
