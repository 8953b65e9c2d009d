"""GPT-2's arithmetic: against transformers, against itself with each option switched, and the traps
of its construction.
"""

import dataclasses
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from checkpoint.weights import load_model, load_weights
from config import Config, load_config
from inference.sampling import draw, seeded
from kernels import attention
from kernels.attention import blocked_attention
from model import GPT, GPTConfig
from optimizer import make_optimizers
from runtime.cli import parse
from tests.conftest import cases, grown, refused, transformers_pair

close = torch.testing.assert_close


def tokens(B=2, T=16, vocab=128, seed=0):
    return torch.randint(0, vocab, (B, T), generator=seeded(seed))


def profiled(function):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = function()
    return result, profile


def assert_same(one, other, tolerance, idx):
    """Two models have the same loss, and gradients of a multiple of it, on the same tokens."""
    results = []
    for model in (one, other):
        torch.manual_seed(0)  # for dropout
        loss = model(idx, idx.roll(1))
        results.append([loss, *torch.autograd.grad(3 * loss, [*model.parameters()])])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() <= tolerance * ours.norm() + 1e-9


# ---- against transformers


@pytest.fixture
def pair(tmp_path):
    """Ours and transformers' GPT-2 with the same random weights, which went through its files."""
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 64, "n_positions": 32, "vocab_size": 200}
    return transformers_pair(tmp_path, **sizes)


def test_names_logits_loss_and_gradients_equal_transformers_so_gelu_norms_and_transposes_are_right(
    pair,
):
    ours, theirs = pair
    idx = tokens(T=17, vocab=200)
    x, y = idx[:, :-1], idx[:, 1:]
    logits = theirs(x).logits
    close(ours(x), logits, rtol=1e-4, atol=1e-4)
    ours(x, y).backward()
    F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}  # a tied head under wte's name
    for name, p in ours.named_parameters():
        conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        close(p.grad, grads[name].t() if conv1d else grads[name], rtol=1e-4, atol=1e-4, msg=name)


OTHER_FORMS = {
    "shards": r"has no model\.safetensors; .* in Python: transformers\.Auto.*max_shard_size=",
    "pointer": r"model\.safetensors: only a pointer of git-lfs .*: git lfs pull",
    "quantized": "not all are floating-point numbers",
    "a head of its own": r"their lm_head\.weight is not their transformer\.wte",
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_weights_in_another_form_are_one_line_that_says_what_they_are_and_what_to_do(
    form, pair, tmp_path
):
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    embedding = weights["transformer.wte.weight"]
    if form == "shards":
        path.unlink()
        pair[1].save_pretrained(tmp_path, max_shard_size="100KB")
    if form == "pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548\n")
    if form == "quantized":
        save_file(weights | {"transformer.wte.weight": (100 * embedding).to(torch.int8)}, path)
    if form == "a head of its own":
        save_file(weights | {"lm_head.weight": embedding + 1}, path)
    with refused(f"^{tmp_path}.*{OTHER_FORMS[form]}"):
        load_model(str(tmp_path))


# ---- sizes


PARAMETERS = """
gpt2 => 124,439,808
gpt2 --vocab_size 50304 => 124,475,904
gpt2 --no-tie_weights => 163,037,184
gpt2-medium => 354,823,168
gpt2-large => 774,030,080
gpt2-xl => 1,557,611,200
"""


@pytest.mark.parametrize(("options", "parameters"), cases(PARAMETERS))
def test_parameter_counts(options, parameters):
    config = parse(Config, f"--config model/{options}".split(), config_file=True)
    with torch.device("meta"):
        model = GPT(GPTConfig.of(config))
    assert f"{model.num_parameters():,}" == parameters


def test_flops_count_what_is_multiplied_not_what_is_looked_up():
    with torch.device("meta"):
        tied, untied = (GPT(GPTConfig(tie_weights=tie)) for tie in (True, False))
    matmuls = 6 * (124_439_808 - 1024 * 768)
    for T, flops in ((1024, 855_166_464), (256, 770_231_808)):
        assert tied.flops_per_token(T) == untied.flops_per_token(T) == flops
        assert flops == matmuls + 12 * 12 * 768 * T


def test_a_checkpoint_has_the_parameters_and_neither_mask_nor_padding_nor_unwanted_biases(
    tiny_model,
):
    model = tiny_model(real_vocab_size=100, bias=False)
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
    assert not [name for name in model.state_dict() if name.endswith("bias")]


# ---- construction


def test_tied_weights_are_one_tensor_also_after_moving_and_loading(tiny_model):
    model = tiny_model(tie_weights=True)
    model.to(torch.float64).to(torch.float32)
    model.load_state_dict(tiny_model(seed=1, tie_weights=True).state_dict())
    for same in (model, torch.compile(model)):
        assert same.transformer.wte.weight is same.lm_head.weight
    assert tiny_model().num_parameters() - model.num_parameters() == 128 * 32


def test_gpt2_init_and_residual_scaling_reach_every_layer(tiny_model):
    sizes = {"n_layer": 3, "n_embd": 96, "vocab_size": 500}
    gpt2 = tiny_model(init="gpt2", **sizes)
    for init in ("gpt2", "torch"):
        model, plain = (tiny_model(init=init, residual_scaling=on, **sizes) for on in (True, False))
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            close(p * math.sqrt(6) if name.endswith("c_proj.weight") else p, q)
    for name, p in gpt2.named_parameters():
        if p.dim() == 2:
            assert p.std().item() == pytest.approx(0.02, rel=0.05), name
        elif "ln_" not in name:
            assert not p.any(), name


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("place", ["embedding", "attention", "after attention", "MLP"])
def test_dropout_acts_in_each_of_its_places_and_in_training_only(tiny_model, place, flash):
    model = tiny_model(flash=flash, n_layer=1)
    block = model.transformer.h[0]
    modules = {
        "embedding": model.transformer.drop,
        "after attention": block.attn.resid_dropout,
        "MLP": block.mlp.dropout,
    }
    if place in modules:
        modules[place].p = 0.5
    else:
        block.attn.config = dataclasses.replace(model.config, dropout=0.5)
    for training in (True, False):
        model.train(training)
        one, other = (model(tokens(), tokens(seed=1)) for _ in range(2))
        assert (one != other) == training


def test_too_long_an_input_is_an_error_that_names_both_lengths(tiny_model):
    with pytest.raises(ValueError, match="33 tokens are more than the context, 32"):
        tiny_model()(tokens(T=33))


@pytest.mark.parametrize("recompute", [False, True])
def test_the_residual_stream_is_in_bf16_only_where_that_is_asked_for_under_autocast(
    tiny_model, recompute
):
    streams = []
    for residual_bf16 in (False, True):
        model = tiny_model(residual_bf16=residual_bf16, recompute=recompute, n_layer=1)
        block = model.transformer.h[0]
        block.register_forward_hook(lambda _, inputs, output: streams.append(output[0].dtype))
        for autocast in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                model(tokens(), tokens(seed=1))
    assert streams == [torch.float32] * 3 + [torch.bfloat16]


@pytest.mark.parametrize(
    ("norm", "kind"), [("layernorm", torch.nn.LayerNorm), ("rmsnorm", torch.nn.RMSNorm)]
)
def test_norms_whose_weights_were_gathered_in_bfloat16_compute_in_fp32(tiny_model, norm, kind):
    ours, x = tiny_model(norm=norm).transformer.ln_f, torch.randn(4, 32)
    expected = kind(32, eps=1e-5)(x)
    for dtype in (torch.float32, torch.bfloat16):  # their weights, 0 and 1, are the same in both
        y = ours.to(dtype)(x)
        assert y.dtype == torch.float32
        assert torch.equal(y, expected)


# ---- attention


def test_flash_runs_the_flash_kernel_and_naive_does_not(tiny_model):
    def operators(flash):
        model = tiny_model(flash=flash)
        _, profile = profiled(lambda: model(tokens(), tokens(seed=1)).backward())
        return " ".join(event.key for event in profile.key_averages())

    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in operators(True)
    assert "scaled_dot_product" not in operators(False)


# ---- padded vocabulary


@pytest.fixture
def padded(tiny_model):
    """A model of 100 tokens padded to 128 rows, whose padding rows shout, and the same model
    without padding.
    """
    plain, model = tiny_model(vocab_size=100), tiny_model(vocab_size=128, real_vocab_size=100)
    with torch.no_grad():
        plain.transformer.ln_f.weight.fill_(0.0)
        plain.transformer.ln_f.bias.fill_(1.0)  # every feature 1: a padded row's logit is 100 * 32
        model.lm_head.weight[100:] = 100.0
    load_weights(model, plain.state_dict(), "unpadded")
    return model, plain


@pytest.mark.parametrize("loss_chunks", [1, 4])
def test_padding_rows_take_no_part_in_loss_or_gradient(padded, loss_chunks):
    model, plain = padded
    model.config = dataclasses.replace(model.config, loss_chunks=loss_chunks)
    losses = [m(tokens(vocab=100), tokens(vocab=100, seed=1)) for m in (model, plain)]
    close(*losses)
    sum(losses).backward()
    assert not model.lm_head.weight.grad[100:].any()
    close(model.lm_head.weight.grad[:100], plain.lm_head.weight.grad)


def test_padding_rows_are_no_logits_and_never_sampled_and_load_into_an_unpadded_model(
    padded, tiny_model
):
    model, plain = padded
    back = tiny_model(1, vocab_size=100)
    load_weights(back, model.state_dict(), "padded")
    logits = model(tokens(vocab=100))
    assert logits.shape == (2, 16, 100)
    for same in (plain, back):
        close(logits, same(tokens(vocab=100)))
    texts = grown(model, tokens(vocab=100).tolist(), 40, temperature=5.0)
    assert max(map(max, texts)) < 100


def test_an_embedding_that_a_recipe_adds_is_no_matmul_has_embed_lr_and_is_padded(tiny_model):
    def build(**options):
        model = tiny_model(**options)
        model.transformer.h[0].table = torch.nn.Embedding(model.config.vocab_size, 8)
        return model

    model, padded = build(vocab_size=100), build(real_vocab_size=100)
    table = model.transformer.h[0].table.weight
    assert model.flops_per_token(16) == tiny_model(vocab_size=100).flops_per_token(16)
    config = load_config(optimizer="muon", embed_lr=0.3)
    groups = [group for one in make_optimizers(model, config) for group in one.param_groups]
    assert [g["lr"] for g in groups if any(p is table for p in g["params"])] == [0.3]
    load_weights(padded, model.state_dict(), "unpadded")
    assert torch.equal(padded.transformer.h[0].table.weight[:100], table)


# ---- blocked attention


def attended(attend, dtype, T, peaked=1.0):
    """Return y of one kind of attention over random tokens, and the gradients of q, k and v, each
    (3, 2, T, 24).
    """
    q, k, v, y_grad = torch.randn(4, 3, 2, T, 24, generator=seeded(0))
    inputs = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in (q * peaked, k, v)]
    y = attend(*inputs)
    return [y, *torch.autograd.grad(y, inputs, y_grad.to(torch.bfloat16).to(dtype))]


@pytest.fixture
def uncompiled(monkeypatch):
    """Run the functions between the matmuls uncompiled."""
    monkeypatch.setattr(attention, "fused", lambda function: function)


whole = functools.partial(F.scaled_dot_product_attention, is_causal=True)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("T", [2, 16, 17, 100])
def test_blocked_attention_and_its_gradients_are_those_of_the_whole(monkeypatch, T):
    monkeypatch.setattr(attention, "BLOCK", 16)
    results = (attended(attend, torch.float32, T) for attend in (blocked_attention, whole))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("uncompiled")
def test_in_bfloat16_blocked_attention_is_about_as_exact_as_pytorchs_kernel():
    """If the scores themselves were rounded to bfloat16, y would be 7 times as far off as the
    kernel's.
    """
    exact = attended(whole, torch.float64, 600, peaked=6.0)
    attends = (blocked_attention, whole)
    results = (attended(attend, torch.bfloat16, 600, peaked=6.0) for attend in attends)
    for ours, theirs, true in zip(*results, exact, strict=True):
        assert (ours.double() - true).norm() <= 3 * (theirs.double() - true).norm()


@pytest.mark.usefixtures("uncompiled")
def test_blocked_attention_is_an_operator_that_the_compiler_can_trust(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 16)
    inputs = [x.requires_grad_() for x in torch.randn(3, 3, 40, 2, 16).transpose(2, 3)]
    utils = ("test_schema", "test_faketensor")
    check = torch.library.opcheck
    forward = attention.attention_forward
    check(forward, tuple(inputs), test_utils=(*utils, "test_autograd_registration"))
    kept = [x.detach() for x in forward(*inputs)]
    backward = (kept[0], *(x.detach() for x in inputs), *kept)
    check(attention.attention_backward, backward, test_utils=utils)


def test_what_is_between_the_matmuls_is_the_same_compiled(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 16)
    compiled = attended(blocked_attention, torch.bfloat16, 40)
    monkeypatch.setattr(attention, "fused", lambda function: function)
    plain = attended(blocked_attention, torch.bfloat16, 40)
    for ours, wanted in zip(compiled, plain, strict=True):
        close(ours, wanted, rtol=0.02, atol=0.02)


def test_intel_cpus_multiply_bf16_fast_only_with_amx():
    amd, intel = ({"cpu_name": name, "avx512_bf16": True} for name in ("AMD EPYC", "Intel Xeon"))
    fast = [amd, intel | {"amx_bf16": True}]
    slow = [intel, {"cpu_name": "AMD EPYC", "avx512_bf16": False}, {}]
    assert all(map(attention.multiplies_bf16_fast, fast))
    assert not any(map(attention.multiplies_bf16_fast, slow))


@pytest.mark.parametrize(
    "change", [{}, {"dropout": 0.1}, {"bf16": False}, {"T": 16}, {"fast": False}], ids=str
)
def test_compiled_models_attend_in_blocks_where_a_cpu_has_fast_bf16(
    tiny_model, monkeypatch, change
):
    calls, losses = [], []
    options = {"flash": True, "T": 32, "bf16": True, "fast": True} | change
    T, bf16, fast = (options.pop(name) for name in ("T", "bf16", "fast"))
    monkeypatch.setattr(attention, "CPU_HAS_FAST_BF16", fast)
    monkeypatch.setattr(attention, "BLOCK", 16)
    monkeypatch.setattr(attention, "fused", lambda function: calls.append(0) or function)
    model = tiny_model(**options)
    for trained in (model, torch.compile(model, backend="eager")):
        assert not calls
        torch.manual_seed(0)  # for dropout
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            losses.append(trained(tokens(T=T), tokens(T=T, seed=1)))
        losses[-1].backward()
    assert bool(calls) == (not change)
    close(*losses, rtol=2e-3, atol=0)


# ---- chunked cross-entropy


@pytest.mark.parametrize("chunks", [2, 5, 8, 1000])  # 30 tokens: 5 divides them, 8 does not
@pytest.mark.parametrize(
    "options",
    [{}, {"real_vocab_size": 100, "tie_weights": True}, {"dropout": 0.1, "flash": True}],
    ids=str,
)
def test_the_chunked_loss_and_its_gradients_are_those_of_the_whole(tiny_model, options, chunks):
    whole, chunked = (tiny_model(loss_chunks=n, **options) for n in (1, chunks))
    idx = tokens(T=15, vocab=100)
    assert_same(whole, chunked, 1e-6, idx)
    with torch.no_grad():
        close(*(model.eval()(idx, idx) for model in (whole, chunked)))


def test_no_tensor_is_as_large_as_the_logits_of_all_tokens_where_the_loss_is_chunked(tiny_model):
    def largest(chunks, compiled):
        model = tiny_model(loss_chunks=chunks, n_layer=1, vocab_size=8192, tie_weights=True)
        trained = torch.compile(model) if compiled else model

        def step():
            model.zero_grad()
            trained(tokens(4, 32), tokens(4, 32, seed=1)).backward()

        step()  # compiles
        return max(event.self_cpu_memory_usage for event in profiled(step)[1].events())

    logits = 4 * 32 * 8192 * 4
    assert largest(1, compiled=False) >= logits
    for compiled in (False, True):
        # the gradient of the head's weight, here; a chunk's logits are half of that
        assert largest(8, compiled) <= logits / 4


# ---- generating


def test_draws_follow_their_probabilities():
    p, generator = torch.tensor([0.1, 0.6, 0.2, 0.1]), seeded(0)
    drawn = torch.tensor([draw(torch.arange(4), p, generator) for _ in range(20_000)])
    close(drawn.bincount() / 20_000, p, rtol=0, atol=0.02)
