"""Peers: what is one, equal first losses, and whole comparisons of tiny models."""

import json
import re
import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from config import Config
from measure.interleaved.comparison import Comparison
from measure.peers import __main__ as peers
from measure.peers import generate
from measure.peers import side as peers_side
from measure.peers.__main__ import (
    ROUNDED_TOLERANCE,
    TOLERANCE,
    PeersOptions,
    check_peers,
    compare_losses,
    main,
    our_config,
    plan,
    rows_of,
)
from measure.peers.side import PeerConfig, build_peer, loss_of, matmuls_of, training_step
from runtime.cli import parse
from runtime.errors import TrainingError
from tests.conftest import ALONE, CPU, refused
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
def options(corpus):
    return PeersOptions(**SIZES, dataset="tiny", data_dir=str(corpus))


def test_peers_have_our_loss_and_our_gradients_from_equal_weights(options, peer, tmp_path):
    config, paths = our_config(options), ["transformers", peer(), "model.py"]  # the last one: ours
    check_peers(paths, config, tmp_path)
    config = config.model_copy(update={"init_from": str(tmp_path)})
    x, y = torch.randint(50257, (2, 2, 16)).unbind()
    found = []
    for path in paths:
        model = build_peer(path, config)
        loss = loss_of(path, model, x, y)
        loss.backward()
        found.append((loss.item(), model.transformer.h[1].mlp.c_fc.weight.grad))
    # transformers keeps (in, out); only ours leaves padding rows out of its softmax
    (loss, transposed), *others = found
    for their_loss, grad in others:
        assert their_loss == pytest.approx(loss, abs=2e-3)
        assert torch.allclose(transposed.t(), grad, atol=1e-5, rtol=0.02)


@pytest.fixture(params=["transformers", "a file"])
def sides(request, options, peer, tmp_path, monkeypatch):
    """Returns our run and a peer's training step with these options, from equal weights."""
    monkeypatch.setattr(peers_side, "without_end", lambda config: config)  # keeps the rates
    tanh = peer(("F.gelu(self.c_fc(x))", 'F.gelu(self.c_fc(x), approximate="tanh")'))

    def build(**more):
        config = our_config(options.model_copy(update=more))
        name = tanh if request.param == "a file" else request.param
        check_peers([name], config, tmp_path)
        values = config.model_dump() | {"init_from": str(tmp_path), "peer": name}
        theirs = training_step(PeerConfig(**values), CPU)
        return setup(config.with_options(init_from=str(tmp_path)), ALONE), theirs

    return build


def test_the_second_loss_of_a_peer_is_ours_so_it_clips_decays_and_learns_alike(sides):
    """With a large eps, AdamW's first update depends on the size of the gradient."""
    strong = {"grad_clip": 0.05, "lr": 0.02, "weight_decay": 2.0, "eps": 1e-3}
    rates = {"lr_schedule": "constant", "warmup_steps": 0}
    ours, theirs = sides(vocab_size=128, **strong, **rates)  # no padding
    losses = [(train_step(ours, step).loss.item(), theirs()["loss"].item()) for step in (1, 2)]
    for our_loss, their_loss in losses:
        assert their_loss == pytest.approx(our_loss, rel=2e-6)


class Matmuls(TorchDispatchMode):
    """Counts the matmuls of each dtype and size."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            a, b = args[-2:]
            self.found[a.dtype, *sorted((*a.shape, b.size(1)))] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_peers_step_has_our_matmuls_in_number_size_and_dtype_padding_included(sides, dtype):
    ours, theirs = sides(bf16=dtype == torch.bfloat16, vocab_size=50304)
    found = []
    for step in (lambda: train_step(ours, 1), theirs):
        with Matmuls() as matmuls:
            step()
        found.append(matmuls.found)
    assert found[0] == found[1]
    assert found[0][dtype, 16, 32, 50304] == 3  # forward, and two gradients


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ([("is_causal=True", "is_causal=False")], "so it computes something else"),
        (
            [('"ln_f"', '"norm"'), ("transformer.ln_f", "transformer.norm")],
            "has no transformer.ln_f.bias, ",
        ),
        ([("self.lm_head.weight = self.transformer.wte.weight", "pass")], "are two matrices"),
        ([("class GPT(", "class GPT2(")], "has no GPT or no GPTConfig"),
    ],
)
def test_a_file_that_is_no_gpt2_is_an_error(replaced, said, options, peer, tmp_path):
    with refused(said):
        check_peers([peer(*replaced)], our_config(options), tmp_path)


def test_what_cannot_be_compared_is_told_before_anything_starts(tmp_path):
    with refused("tie_weights is False, in the peers True"):
        main(parse(PeersOptions, ["--no-tie_weights", f"--log_dir={tmp_path}/logs"], others=Config))
    assert not (tmp_path / "logs").exists()


def test_rounding_explains_more_in_bf16_and_padding_only_a_higher_loss(options):
    config = our_config(options)  # 47 rows of padding
    for loss, tolerance in ((10.0009, TOLERANCE), (10.0035, ROUNDED_TOLERANCE)):
        compare_losses("peer", loss, 10.0, config, tolerance)
    for loss, tolerance in ((9.9991, TOLERANCE), (10.0035, TOLERANCE), (10.01, ROUNDED_TOLERANCE)):
        with refused("a difference of"):
            compare_losses("peer", loss, 10.0, config, tolerance)


def answering(loss=10.0, seconds=0.5):
    """The command of a side that answers at once."""
    code = (
        "import json\n"
        "for steps in map(int, open(0)):\n"
        f"    figures = {{'seconds': [{seconds}] * steps, 'tokens': 7 * steps, 'loss': {loss}}}\n"
        "    print(json.dumps({'asleep': True, 'peak_memory_mb': 1} | figures), flush=True)"
    )
    return [sys.executable, "-c", code]


def test_a_side_whose_first_loss_differs_ends_the_comparison_and_what_is_finished_is_kept(
    options, tmp_path, monkeypatch
):
    options = options.model_copy(update={"rounds": 6, "log_dir": str(tmp_path)})
    ours, others = plan(options.model_copy(update={"peer": ("nanoGPT/model.py",)}), tmp_path)
    sides = (ours, *others)
    commands = (answering(), answering(seconds=2.0), answering(loss=10.2), [])
    for side, command in zip(sides, commands, strict=True):
        side.command = command
    monkeypatch.setattr(peers, "plan", lambda *_: (ours, others))
    with pytest.raises(TrainingError, match=r"^nanoGPT/model.py, our settings: its first"):
        main(options)
    (found,) = json.loads((tmp_path / "peers/results.json").read_text())
    sides = found["sides"]
    more = [sides[0] | {"turns": sides[1]["turns"]}, sides[1] | {"name": "more"}]
    sides[0]["turns"] = [turn | {"peak_memory_mb": 9} for turn in sides[0]["turns"]]
    groups = [Comparison(machine="any", left_out=3, sides=of) for of in (sides, more)]
    first, second, third = rows_of(groups)
    assert (first["side"], first["tokens_per_sec"], first.get("ours_over")) == (
        "speedup10",
        14,
        None,
    )
    assert (second["side"], second["ours_over"].value) == ("nanoGPT/model.py", 4)
    assert (second["first_step_s"], second["memory_ratio"]) == (2, 9)
    assert third["memory_ratio"] == 1, "of its own comparison"


def test_tiny_models_are_compared_whole(options, peer, tmp_path, forked):
    less = {"rounds": 6, "peer": (peer(),), "log_dir": str(tmp_path / "logs")}
    main(options.model_copy(update=less))
    folder = tmp_path / "logs/peers"
    assert {path.name for path in folder.iterdir()} == {
        "peers.png",
        "report.html",
        "report.md",
        "results.csv",
        "results.json",
    }
    report = (folder / "report.md").read_text()
    assert all(f"| {side} |" in report for side in ("speedup10", f"{tmp_path.name}/model.py"))
    groups = json.loads((folder / "results.json").read_text())
    others = [group["sides"][1] for group in groups]
    assert ["--our_settings" in side["command"] for side in others] == [False, True, True]
    assert others[2]["name"] == "speedup10, matmuls only"
    for group in groups:
        assert {len(side["tokens_per_sec"]) for side in group["sides"]} == {6}
    for group in groups[:2]:
        ours, theirs = (side["turns"][0]["loss"] for side in group["sides"])
        assert theirs == pytest.approx(ours, abs=2e-3)


def test_the_matmuls_alone_have_all_the_arithmetic_of_a_step_but_attention(options):
    matmuls = matmuls_of(our_config(options), torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        for matmul in matmuls:
            matmul()
    weights, tokens = 2 * 12 * 16**2 + 50304 * 16, 2 * 16  # two blocks and the head
    assert counter.get_total_flops() == 6 * weights * tokens


# nanoGPT's generate, but for temperature: the likeliest token alone
GENERATE = """
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            logits, _ = self(idx, idx)
            idx = torch.cat((idx, logits[:, -1:].argmax(-1)), dim=1)
        return idx
"""


def test_generation_is_compared_from_equal_weights_and_not_with_a_peer_of_other_tokens(
    tmp_path, forked, capsys
):
    config, path, output = (tmp_path / name for name in ("tiny.yaml", "model.py", "o.json"))
    config.write_text(
        "n_layer: 2\nn_head: 2\nn_embd: 16\nblock_size: 64\nseq_len: 64\ntie_weights: true\n"
    )
    words = ["--texts=2", "--tokens=5", "--device=cpu", "--rounds=6"]
    words += [f"--config={config}", f"--output={output}", "--peer", "transformers", str(path)]
    options = parse(generate.GenerateOptions, words)
    path.write_text(PEER + GENERATE)
    generate.main(options)
    sides = json.loads(output.read_text())["sides"]
    assert [side["name"] for side in sides] == ["ours", "transformers", f"{tmp_path.name}/model.py"]
    assert {turn["tokens"] % 10 for side in sides for turn in side["turns"]} == {0}
    printed = capsys.readouterr().out
    assert "2 texts at a time, 6 interleaved rounds" in printed
    assert re.search(r"ours over transformers: tokens/s .+, MB \d+\.\d\d\n", printed)
    path.write_text(PEER + GENERATE.replace("argmax", "argmin"))
    with pytest.raises(TrainingError, match=r"model\.py: its likeliest tokens are"):
        generate.main(options)
