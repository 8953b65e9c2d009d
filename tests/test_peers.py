"""Peers: their steps have our losses and matmuls, and they are sides of interleaved runs."""

import functools
import json
from collections import Counter

import pytest

from config import load_config
from measure.ladder.roofline import Counter as Operations
from measure.peer import training_step
from tests.conftest import ALONE, CPU, refused
from tests.test_interleaved import TINY, compare
from train import setup, train_step

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

    def write(*replaced):
        text = PEER
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "model.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def config(corpus):
    corpus_options = {"dataset": "tiny", "data_dir": str(corpus)}
    return functools.partial(load_config, "speedup10.yaml", **SIZES, **corpus_options)


@pytest.fixture(params=["transformers", "a file"])
def sides(request, config, peer):
    """Returns our run and a peer's training step with these options, from equal weights."""
    tanh = peer(("F.gelu(self.c_fc(x))", 'F.gelu(self.c_fc(x), approximate="tanh")'))
    name = tanh if request.param == "a file" else request.param

    def build(**more):
        ours = config(**more)
        return setup(ours, ALONE), training_step(name, ours, CPU)

    return build


def test_the_second_loss_of_a_peer_is_ours_so_it_clips_decays_and_learns_alike(sides):
    """With a large eps, AdamW's first update depends on the size of the gradient."""
    strong = {"grad_clip": 0.05, "lr": 0.02, "weight_decay": 2.0, "eps": 1e-3}
    rates = {"lr_schedule": "constant", "warmup_steps": 0}
    ours, theirs = sides(vocab_size=128, **strong, **rates)  # no padding
    losses = [(train_step(ours, step)["loss"].item(), theirs().item()) for step in (1, 2)]
    for our_loss, their_loss in losses:
        assert their_loss == pytest.approx(our_loss, rel=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_peers_step_has_our_matmuls_in_number_size_and_dtype_padding_included(sides, dtype):
    ours, theirs = sides(bf16=dtype == "bfloat16", vocab_size=50304)
    found = []
    for step in (lambda: train_step(ours, 1), theirs):
        with Operations() as counted:
            step()
        matmuls = [op for op in counted.operations if op.name in ("mm", "addmm")]
        found.append(Counter((op.dtype, op.flops) for op in matmuls))
    assert found[0] == found[1]
    assert found[0][dtype, 2 * 16 * 32 * 50304] == 3  # forward, and two gradients


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ([("is_causal=True", "is_causal=False")], "computes something else"),
        (
            [('"ln_f"', '"norm"'), ("transformer.ln_f", "transformer.norm")],
            "has no transformer.ln_f.weight, ",
        ),
        (
            [("self.lm_head.weight = self.transformer.wte.weight", "pass")],
            "it has 1,632,704 parameters, ours 827,840",
        ),
        ([("class GPT(", "class GPT2(")], "AttributeError: .* no attribute 'GPT'"),
    ],
)
def test_a_file_that_is_no_gpt2_is_an_error(replaced, message, config, peer):
    with refused(rf"model\.py: .*{message}"):
        training_step(peer(*replaced), config(), CPU)


def test_a_config_that_no_peer_can_follow_is_an_error(config):
    with refused("transformers: has tie_weights True, not False"):
        training_step("transformers", config(tie_weights=False), CPU)


def test_a_peer_on_several_ranks_is_an_error(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with refused("a peer trains on one rank"):
        training_step("transformers", config(), CPU)


def test_a_peer_is_a_side_of_interleaved_runs_and_its_failure_is_one_line(corpus, peer, tmp_path):
    ours, output = tmp_path / "tiny.yaml", tmp_path / "rounds.json"
    ours.write_text(f"dataset: tiny\ndata_dir: {corpus}\ntie_weights: true\n")
    theirs = f"-m measure.peer {peer()} --config {ours} --no-retain_memory"
    words = ["--rounds", "6", "--output", output, "--", *TINY]
    ran = compare(ours, theirs, *words, COLUMNS="300")
    assert "MB over first" in ran.stdout
    sides = json.loads(output.read_text())["sides"]
    our_loss, loss = (side["turns"][0]["loss"] for side in sides)
    assert loss == pytest.approx(our_loss, abs=2e-3)
    for side in sides:
        last = side["turns"][-1]
        assert last["tokens"] == 2 * 16 * len(last["seconds"])
        assert side["tokens_per_sec"][5] == pytest.approx(last["tokens"] / sum(last["seconds"]))
        assert last["peak_memory_mb"] > 50

    missing = f"-m measure.peer nowhere.py --config {ours}"
    ran = compare(ours, missing, "--", *TINY, status=1)
    assert ran.stderr == f"error: {missing}: nowhere.py: No such file or directory\n"
