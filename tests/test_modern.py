"""The flags of newer recipes: each computes its paper's formula, and works with everything else."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from checkpoint.weights import load_model
from model import BlockInputs, rms_norm, rotate
from tests.conftest import ALONE, MODERN, grown, refused
from tests.test_export import exported
from tests.test_model import assert_same, close, tokens
from tests.test_sample import PROMPTS, alone, seeded
from train import train

FLAGS = [{name: value} for name, value in MODERN.items() if name not in ("norm", "norm_weight")]
FLAGS += [{"norm": "rmsnorm", "norm_weight": False}, MODERN]


@pytest.fixture
def shaken(tiny_model):
    """Build a tiny model with random parameters, the same for all: so that every term matters."""

    def build(**options):
        model = tiny_model(**options).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += 0.3 * torch.randn(p.shape, generator=seeded(len(name) + p.numel()))
        return model

    return build


# ---- each computes its paper's formula


def test_a_rotation_is_a_multiplication_of_complex_numbers():
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(5, 4)
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones(5, 4), -angles)
    rotation = torch.stack((angles.cos(), angles.sin()))
    close(rotate(x, rotation), torch.cat((turned.real, turned.imag), dim=-1))


def test_with_rope_it_counts_how_far_apart_tokens_are_and_not_where(shaken):
    model, idx = shaken(rope=True).transformer, tokens(T=12)
    positions = torch.arange(12).expand(2, -1)
    close(model(idx, positions=positions), model(idx))
    close(model(idx, positions=positions + 20), model(idx), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(idx, positions=2 * positions), model(idx), atol=1e-2)


def test_the_angles_of_rope_are_those_of_the_paper(shaken):
    """Section 3.4.2: at position m, pair i of d / 2 turns by m 10000^(-2i / d)."""
    cos, sin = shaken(rope=True).transformer.rotation
    for m, i in itertools.product((0, 1, 31), (0, 1, 7)):  # heads have 8 pairs
        angle = m * 10_000 ** (-2 * i / 16)
        assert cos[m, i].item() == pytest.approx(math.cos(angle), abs=1e-5)
        assert sin[m, i].item() == pytest.approx(math.sin(angle), abs=1e-5)


def test_with_qk_norm_the_size_of_a_heads_queries_and_keys_does_not_count(shaken):
    model, idx = shaken(qk_norm=True), tokens()
    before = model(idx)
    with torch.no_grad():
        for p in model.transformer.h[1].attn.c_attn.parameters():
            p[:16] *= 7  # queries of the first of two heads
            p[48:64] *= 5  # keys of the second
    close(model(idx), before, rtol=1e-4, atol=1e-4)


def test_relu2_is_the_square_of_what_is_positive(shaken):
    mlp, x = shaken(activation="relu2").transformer.h[0].mlp, torch.randn(2, 3, 32)
    close(mlp(x), mlp.c_proj(mlp.c_fc(x).clamp(min=0) ** 2))


def test_with_zero_init_every_block_begins_as_the_identity_and_learns(tiny_model):
    model, idx = tiny_model(zero_init=True), tokens()
    below = model.transformer
    close(below(idx), below.ln_f(below.wte(idx) + below.wpe.weight[:16]))
    model(idx, idx).backward()
    assert all(block.mlp.c_proj.weight.grad.norm() > 0 for block in below.h)


@pytest.mark.parametrize("loss_chunks", [1, 4])
def test_a_softcap_bounds_the_logits_of_texts_and_loss_but_padding_stays_out(shaken, loss_chunks):
    options, idx = {"real_vocab_size": 100, "loss_chunks": loss_chunks}, tokens(vocab=100)
    free, capped = shaken(**options), shaken(**options, logit_softcap=1.5)
    close(capped(idx), 1.5 * torch.tanh(free(idx) / 1.5))
    expected = F.cross_entropy(capped(idx).flatten(0, 1), idx.flatten())
    close(capped(idx, idx), expected)
    losses = capped(idx, idx), expected
    one, other = (torch.autograd.grad(loss, capped.lm_head.weight)[0] for loss in losses)
    close(one, other)


@pytest.mark.parametrize("flag", ["value_residual", "embed_shortcut"])
def test_first_values_and_embedded_tokens_reach_every_block_in_its_own_share(shaken, flag):
    model, idx = shaken(n_layer=4, **{flag: True}), tokens()
    below, first = model.transformer, None
    x = x0 = below.wte(idx) + below.wpe.weight[:16]
    if flag == "embed_shortcut":
        x = x0 = rms_norm(x0)
    for layer, block in enumerate(below.h):
        if flag == "embed_shortcut":
            block.shortcut.data += layer
            keep, add = block.shortcut
            x = keep * x + add * x0
        q, k, v = (
            block.attn.c_attn(block.ln_1(x)).unflatten(2, (3, 2, 16)).transpose(1, 3).unbind(2)
        )
        first = v if first is None else first
        if flag == "value_residual" and layer:
            block.attn.value_mix.data.fill_(layer / 5)
            v = (1 - layer / 5) * v + layer / 5 * first
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + block.attn.c_proj(y.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.ln_2(x))
    close(below(idx), below.ln_f(x), rtol=1e-4, atol=1e-4)


def test_alternate_layers_have_values_of_the_tokens_through_a_gate_per_head(shaken):
    """nanochat's: 3 sigmoid(gate of the input's first 12 channels), the last layer included."""
    model, idx = shaken(n_layer=4, value_embeds=True), tokens()
    below = model.transformer
    has = [block.attn.value_embed is not None for block in below.h]
    assert has == [False, True, False, True]
    x = below.wte(idx) + below.wpe.weight[:16]
    for block in below.h:
        attn, normed = block.attn, block.ln_1(x)
        q, k, v = attn.c_attn(normed).unflatten(2, (3, 2, 16)).unbind(2)  # (B, T, nh, hs) each
        if attn.value_embed:
            share = 3 / (1 + torch.exp(-normed[..., :12] @ attn.value_gate.weight.T))  # (B, T, nh)
            table = attn.value_embed.weight.unflatten(1, (2, 16))
            v = v + torch.einsum("bth,bthd->bthd", share, table[idx])
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + attn.c_proj(y.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.ln_2(x))
    close(below(idx), below.ln_f(x), rtol=1e-4, atol=1e-4)
    without = shaken(n_layer=4)
    gates = 2 * 12 * 2  # of two layers, 12 channels to two heads
    more = model.num_parameters() - without.num_parameters()
    assert more == gates + 2 * 128 * 32
    assert model.flops_per_token(16) - without.flops_per_token(16) == 6 * gates


def test_pairs_of_tokens_reach_every_block_by_the_hash_of_modded_nanogpt(shaken, tiny_model):
    options = {"real_vocab_size": 100, "bigram_embed": True}
    model, idx = shaken(**options), tokens(vocab=100)
    below = model.transformer
    rows = [
        [499, *(36313 * b ^ 27191 * a for a, b in itertools.pairwise(row))] for row in idx.tolist()
    ]
    pairs = below.pair_embed.weight[torch.tensor(rows) % 499 + 499 * (torch.arange(16) == 0)]
    x = below.wte(idx) + below.wpe.weight[:16]
    for layer, block in enumerate(below.h):
        block.pair_share.data += layer
        x, _ = block(x + block.pair_share * pairs, BlockInputs(idx))
    close(below(idx), below.ln_f(x))
    without = shaken(real_vocab_size=100)
    assert model.num_parameters() - without.num_parameters() == 500 * 32 + 2
    assert model.flops_per_token(16) - without.flops_per_token(16) == 6 * 2  # as of a norm
    fresh = tiny_model(**options, init="gpt2")
    assert not fresh.transformer.pair_embed.weight.any()
    assert [block.pair_share.item() for block in fresh.transformer.h] == pytest.approx([0.1] * 2)


def test_the_embedding_shortcut_begins_without_the_tokens(tiny_model):
    for block in tiny_model(embed_shortcut=True).transformer.h:
        assert block.shortcut.tolist() == [1, 0]


# ---- all work with everything else


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_text_grows_by_the_kv_cache_as_without_together_as_alone_and_past_the_context(
    flags, shaken
):
    model = shaken(**flags)
    prompts = PROMPTS[1:4]  # 1, 20 and 31 tokens
    assert grown(model, prompts, 14) == [alone(model, prompt, 14) for prompt in prompts]
    idx = tokens(T=25)
    with torch.no_grad():
        for _ in range(14):
            idx = torch.cat((idx, model(idx[:, -32:])[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert grown(model, tokens(T=25).tolist(), 14) == idx[:, 25:].tolist()


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_recomputed_chunked_compiled_and_flash_have_the_same_loss_and_gradients(flags, shaken):
    plain, idx = shaken(**flags).train(), tokens(T=15)
    # The gradient of a learned share is a sum that cancels, so it rounds more than the others.
    for other in ({"recompute": True}, {"loss_chunks": 4}, {"flash": True}):
        assert_same(plain, shaken(**flags, **other).train(), 5e-4, idx)
    backend = "aot_eager" if flags is MODERN else "eager"  # the backward pass with all at once
    whole = torch.compile(shaken(**flags).train(), backend=backend, fullgraph=True)
    assert_same(plain, whole, 1e-4, idx)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_run_saves_its_model_which_is_read_and_exported_only_if_it_is_gpt2(flags, tiny_config):
    config = tiny_config(**flags, max_steps=2, lr=1e-2)
    train(config, ALONE)
    again = tiny_config(init_from="train", run_name="again", max_steps=1)
    train(again, ALONE)
    taken_up = dataclasses.asdict(load_model("again", config.log_dir).config)
    assert {name: taken_up[name] for name in {*flags} - {"zero_init"}}.items() <= flags.items()
    if flags == {"zero_init": True}:
        exported(config)
        return
    with refused("GPT-2 in transformers cannot have") as error:
        exported(config)
    named = [name for name in flags if f"{name} {flags[name]}" in str(error.value)]
    assert named == [name for name in flags if name not in ("zero_init", "norm_weight")]
