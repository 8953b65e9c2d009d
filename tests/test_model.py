"""GPT-2's arithmetic: against transformers, against itself with each option switched, and the traps
of its construction.
"""

import functools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from kernels.cache import KVCache
from safetensors.torch import load_file, save_file

from checkpoint.files import CheckpointError
from checkpoint.weights import load_model, load_weights
from kernels import attention
from model import GPT, GPTConfig, draw, scores_of
from tests.conftest import transformers_pair


def tokens(B=2, T=16, vocab=128, seed=0):
    return torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(seed))


# ---- against transformers


@pytest.fixture
def pair(tmp_path):
    """Ours and transformers' GPT-2 with the same random weights, which went through its files."""
    return transformers_pair(
        tmp_path, n_layer=3, n_head=4, n_embd=64, n_positions=32, vocab_size=200
    )


def test_logits_equal_transformers_so_gelu_norms_and_conv1d_transposes_are_right(pair):
    ours, theirs = pair
    idx = tokens(vocab=200)
    torch.testing.assert_close(ours(idx), theirs(idx).logits, rtol=1e-4, atol=1e-4)


BAD_WEIGHTS = {
    "quantized": (lambda weight: (weight * 100).to(torch.int8), "of type torch.int8"),
    "a number": (lambda weight: torch.tensor(1.0), "size mismatch"),
    "of three dimensions": (
        lambda weight: weight[None].clone(),
        "size mismatch|CheckpointError|dimension",
    ),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
@pytest.mark.parametrize("name", ["transformer.h.0.attn.c_attn.weight", "lm_head.weight"])
def test_weights_that_are_no_matrices_of_numbers_are_refused(name, case, pair, tmp_path):
    change, message = BAD_WEIGHTS[case]
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        weights | {name: change(weights.get(name, weights["transformer.wte.weight"]))},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('embeddings": true', 'embeddings": false')
    )
    with pytest.raises(CheckpointError, match=message):
        load_model(str(tmp_path))


def test_a_tied_model_with_a_head_of_its_own_is_refused_as_either_could_be_meant(pair, tmp_path):
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        weights | {"lm_head.weight": weights["transformer.wte.weight"] + 1},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        CheckpointError, match=r"has an lm_head\.weight other than its transformer\.wte"
    ):
        load_model(str(tmp_path))


def test_a_hugging_face_folder_in_several_files_says_how_to_write_one(pair, tmp_path):
    _, theirs = pair
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing or damaged: "):
        load_model(str(tmp_path / "sharded"))


@pytest.mark.parametrize(("key", "value"), [("n_embd", {}), ("model_type", "a\nb")])
def test_a_hugging_face_config_of_odd_values_is_one_line_that_shows_them_as_they_are(
    key, value, pair, tmp_path
):
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(CheckpointError) as refused:
        load_model(str(tmp_path))
    assert repr(value) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_loss_and_gradients_equal_transformers(pair):
    ours, theirs = pair
    idx = tokens(T=17, vocab=200)
    ours(idx[:, :-1], idx[:, 1:]).backward()
    F.cross_entropy(theirs(idx[:, :-1]).logits.flatten(0, 1), idx[:, 1:].flatten()).backward()
    grads = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        if name == "lm_head.weight":
            continue  # tied: it comes as transformer.wte.weight
        theirs_grad = grads[name].grad
        square_or_wide = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        torch.testing.assert_close(
            p.grad,
            theirs_grad.t() if square_or_wide else theirs_grad,
            rtol=1e-4,
            atol=1e-4,
            msg=name,
        )


def test_exact_gelu_differs_so_the_default_is_the_tanh_form(pair):
    ours, theirs = pair
    exact = GPT(GPTConfig(**{**vars(ours.config), "activation": "gelu"})).eval()
    exact.load_state_dict(ours.state_dict())
    assert (exact(tokens(vocab=200)) - theirs(tokens(vocab=200)).logits).abs().max() > 2e-4


# ---- sizes


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({"tie_weights": True}, 124_439_808),
        ({"tie_weights": True, "vocab_size": 50304}, 124_475_904),
        ({}, 163_037_184),
        ({"tie_weights": True, "n_layer": 24, "n_head": 16, "n_embd": 1024}, 354_823_168),
        ({"tie_weights": True, "n_layer": 36, "n_head": 20, "n_embd": 1280}, 774_030_080),
        ({"tie_weights": True, "n_layer": 48, "n_head": 25, "n_embd": 1600}, 1_557_611_200),
    ],
    ids=["124M", "padded", "untied", "medium", "large", "xl"],
)
def test_parameter_counts(options, parameters):
    with torch.device("meta"):
        assert GPT(GPTConfig(**options)).num_parameters() == parameters


def test_flops_count_what_is_multiplied_not_what_is_looked_up():
    with torch.device("meta"):
        tied, untied = GPT(GPTConfig(tie_weights=True)), GPT(GPTConfig())
    assert (
        tied.flops_per_token(1024)
        == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
        == 855_166_464
    )
    assert untied.flops_per_token(1024) == tied.flops_per_token(
        1024
    )  # the same products, whatever they share


def test_the_timeit_profiles_variant_is_the_same_class(tiny_model):
    model = tiny_model(norm="rmsnorm", bias=False, activation="gelu")
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert model(tokens(), tokens(seed=1)).isfinite()


def test_parameter_names_are_openais(tiny_model):
    names = set(tiny_model().state_dict())
    assert {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.ln_1.weight",
        "transformer.h.0.attn.c_attn.weight",
        "transformer.h.1.attn.c_proj.bias",
        "transformer.h.1.mlp.c_fc.weight",
        "transformer.h.1.mlp.c_proj.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    } <= names
    assert len(names) == 2 + 2 * 12 + 2 + 1  # no mask, no padding: those are rebuilt


# ---- construction


def test_tied_weights_are_one_tensor_also_after_moving_and_loading(tiny_model):
    model = tiny_model(tie_weights=True)
    model.to(torch.float64).to(torch.float32)
    model.load_state_dict(tiny_model(seed=1, tie_weights=True).state_dict())
    assert model.transformer.wte.weight is model.lm_head.weight
    assert torch.compile(model).transformer.wte.weight is model.lm_head.weight
    assert tiny_model().num_parameters() - model.num_parameters() == 128 * 32


@pytest.mark.parametrize("init", ["torch", "gpt2"])
@pytest.mark.parametrize("tie", [True, False])
def test_first_loss_is_near_uniform_for_every_init_and_tying(tiny_model, init, tie):
    model = tiny_model(init=init, tie_weights=tie, n_embd=128)
    assert model(tokens(8, 32), tokens(8, 32, seed=1)).item() == pytest.approx(
        math.log(128), abs=0.5
    )


def test_gpt2_init_and_residual_scaling_reach_every_layer():
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            n_layer=3, n_head=2, n_embd=128, vocab_size=1000, init="gpt2", residual_scaling=True
        )
    )
    for name, p in model.named_parameters():
        if p.dim() == 2:
            expected = 0.02 / math.sqrt(2 * 3) if "c_proj" in name else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.05), name
        elif "ln_" not in name:
            assert not p.any(), name
    plain = GPT(GPTConfig(n_layer=3, n_head=2, n_embd=128, vocab_size=1000, init="gpt2"))
    assert plain.transformer.h[2].mlp.c_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_residual_scaling_divides_torchs_init_too(tiny_model):
    scaled, plain = tiny_model(residual_scaling=True), tiny_model()
    name = "transformer.h.1.attn.c_proj.weight"
    torch.testing.assert_close(
        scaled.get_parameter(name) * 2, plain.get_parameter(name)
    )  # sqrt(2 n_layer) = 2


def test_a_residual_stream_grows_with_the_square_root_of_its_additions_unless_they_are_scaled():
    """The demonstration of the published mps series, which saw 9.8: 50 blocks add to the stream 100
    times.
    """
    additions = torch.randn(100, 768, generator=torch.Generator().manual_seed(0))
    assert additions.sum(dim=0).std().item() == pytest.approx(9.8, abs=0.5)
    assert (additions / math.sqrt(100)).sum(dim=0).std().item() == pytest.approx(1.0, abs=0.05)
    torch.manual_seed(0)
    shape = {"n_layer": 50, "n_head": 1, "n_embd": 48, "block_size": 8, "vocab_size": 8}
    blocks = GPT(GPTConfig(**shape, init="gpt2", residual_scaling=True)).transformer.h
    assert blocks[49].mlp.c_proj.weight.std().item() == pytest.approx(
        0.02 / math.sqrt(100), rel=0.05
    )


def test_dropout_acts_in_training_only(tiny_model):
    model = tiny_model(dropout=0.5)
    x, y = tokens(), tokens(seed=1)
    assert model(x, y) != model(x, y)
    model.eval()
    assert model(x, y) == model(x, y)


def test_too_long_an_input_is_an_error_that_names_both_lengths(tiny_model):
    with pytest.raises(
        ValueError, match="33 tokens are longer than the model's context, block_size 32"
    ):
        tiny_model()(tokens(T=33))


# ---- attention


def test_flash_and_naive_attention_give_the_same_loss_and_gradients(tiny_model):
    losses, grads = [], []
    for flash in (False, True):
        model = tiny_model(flash=flash, n_embd=64)
        loss = model(tokens(4, 32), tokens(4, 32, seed=1))
        loss.backward()
        losses.append(loss)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_flash_runs_the_flash_kernel_and_naive_does_not(tiny_model):
    def operators(flash):
        model = tiny_model(flash=flash)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(tokens(), tokens(seed=1)).backward()
        return " ".join(event.key for event in profile.key_averages())

    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in operators(True)
    assert "scaled_dot_product" not in operators(False)


def test_no_position_sees_a_later_one(tiny_model):
    for flash in (False, True):
        model = tiny_model(flash=flash).eval()
        a, b = tokens(), tokens()
        b[:, 10:] = (b[:, 10:] + 1) % 128
        torch.testing.assert_close(model(a)[:, :10], model(b)[:, :10])
        assert not torch.allclose(model(a)[:, 10:], model(b)[:, 10:])


def test_flash_and_naive_checkpoints_are_compatible_as_the_mask_is_not_saved(tiny_model):
    tiny_model(flash=True).load_state_dict(tiny_model(flash=False).state_dict(), strict=True)


# ---- padded vocabulary


@pytest.fixture
def padded(tiny_model):
    """A model of 100 tokens padded to 128 rows, whose padding rows shout, and the same model
    without padding.
    """
    plain, model = tiny_model(vocab_size=100), tiny_model(vocab_size=128, real_vocab_size=100)
    load_weights(model, plain.state_dict(), "unpadded")
    with torch.no_grad():
        model.lm_head.weight[100:] = 100.0
        model.transformer.ln_f.weight.fill_(0.0)
        model.transformer.ln_f.bias.fill_(1.0)  # every feature 1: a padded row's logit is 100 * 32
        plain.load_state_dict(
            {
                **plain.state_dict(),
                **{
                    f"transformer.ln_f.{k}": v
                    for k, v in model.transformer.ln_f.state_dict().items()
                },
            }
        )
    return model, plain


def test_padding_rows_take_no_part_in_loss_or_gradient(padded):
    model, plain = padded
    x, y = tokens(vocab=100), tokens(vocab=100, seed=1)
    losses = [m(x, y) for m in (model, plain)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    assert not model.lm_head.weight.grad[100:].any()
    torch.testing.assert_close(model.lm_head.weight.grad[:100], plain.lm_head.weight.grad)


def test_padding_rows_are_no_logits_and_never_sampled(padded):
    model, plain = padded
    assert model(tokens(vocab=100)).shape == (2, 16, 100)
    torch.testing.assert_close(model(tokens(vocab=100)), plain(tokens(vocab=100)))
    assert model.generate(tokens(vocab=100), 40, temperature=5.0).max() < 100


def test_rows_above_gpt2s_vocabulary_are_padding_by_default():
    assert GPTConfig(vocab_size=50304).n_vocab == 50257
    assert GPTConfig(vocab_size=10_000).n_vocab == 10_000
    assert GPTConfig(vocab_size=60_000, real_vocab_size=60_000).n_vocab == 60_000


def test_unpadded_weights_load_into_a_padded_model_and_back(tiny_model):
    plain, back = tiny_model(vocab_size=100), tiny_model(1, vocab_size=100)
    model = tiny_model(2, vocab_size=128, real_vocab_size=100)
    load_weights(model, plain.state_dict(), "unpadded")
    load_weights(back, model.state_dict(), "padded")
    torch.testing.assert_close(back(tokens(vocab=100)), plain(tokens(vocab=100)), rtol=0, atol=0)


# ---- attention in blocks of queries


def attended(attend, dtype, T, peaked=1.0):
    """Of one kind of attention over random tokens: y, and the gradients of q, k and v, each (3, 2,
    T, 16).
    """
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(4, 3, 2, T, 16, generator=generator) * torch.tensor(
        [peaked, 1, 1, 1]
    ).view(4, 1, 1, 1, 1)
    *inputs, y_grad = random.to(torch.bfloat16).to(dtype)
    inputs = [x.requires_grad_() for x in inputs]
    y = attend(*inputs)
    return [y, *torch.autograd.grad(y, inputs, y_grad)]


def in_blocks(q, k, v):
    return attention.attention_forward(q, k, v, False)[0]


whole_attention = functools.partial(F.scaled_dot_product_attention, is_causal=True)


@pytest.mark.parametrize("T", [2, 16, 17, 100])
def test_attention_in_blocks_and_its_gradients_are_those_of_the_whole(monkeypatch, T):
    monkeypatch.setattr(attention, "BLOCK", 16)
    for found, wanted in zip(
        attended(in_blocks, torch.float32, T),
        attended(whole_attention, torch.float32, T),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("peaked", [1.0, 6.0, 30.0])
def test_in_bfloat16_attention_in_blocks_is_about_as_exact_as_pytorchs_kernel(peaked):
    """With scores that are rounded to bfloat16 as they are, y is 7 and 20 times as far off as the
    kernel's in the last two.
    """

    def error(attend):
        return [
            (found.double() - exact).norm() / exact.norm()
            for found, exact in zip(
                attended(attend, torch.bfloat16, 600, peaked),
                attended(whole_attention, torch.float64, 600, peaked),
                strict=True,
            )
        ]

    for ours, theirs in zip(error(in_blocks), error(whole_attention), strict=True):
        assert ours <= 3 * theirs


def test_attention_in_blocks_is_an_operator_that_the_compiler_can_trust(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 16)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 3, 40, 2, 16).transpose(2, 3))
    torch.library.opcheck(
        attention.attention_forward,
        (q, k, v, False),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    kept = [x.detach() for x in attention.attention_forward(q, k, v, False)]
    torch.library.opcheck(
        attention.attention_backward,
        (kept[0], q.detach(), k.detach(), v.detach(), *kept, False),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_what_stands_between_the_products_is_the_same_compiled(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 16)
    compiled, plain = (
        attended(
            lambda q, k, v, how=how: attention.attention_forward(q, k, v, how)[0],
            torch.bfloat16,
            40,
        )
        for how in (True, False)
    )
    for found, wanted in zip(compiled, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"flash": False}, False),
        ({"dropout": 0.1}, False),
        ({"bf16": False}, False),
        ({"T": 16}, False),
    ],
    ids=str,
)
def test_compiled_models_attend_in_blocks_where_a_cpu_multiplies_in_bfloat16(
    tiny_model, monkeypatch, changes, expected
):
    calls = []
    monkeypatch.setattr(attention, "HAS_BFLOAT16", True)
    monkeypatch.setattr(attention, "BLOCK", 16)
    monkeypatch.setattr(
        attention, "fused", lambda function, compiled: calls.append(function) or function
    )
    options = {"block_size": 32, "flash": True} | changes
    T, bf16 = options.pop("T", 32), options.pop("bf16", True)
    model = tiny_model(**options)
    x, y = tokens(T=T), tokens(T=T, seed=1)
    losses = []
    for trained in (model, torch.compile(model, backend="eager")):
        assert not calls
        torch.manual_seed(0)  # for dropout
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            losses.append(trained(x, y))
        losses[-1].backward()
    assert bool(calls) == expected
    torch.testing.assert_close(*losses, rtol=2e-3, atol=0)


# ---- the loss in parts


@pytest.mark.parametrize(
    "chunks", [2, 5, 8, 1000]
)  # 2 x 15 tokens: 5 parts divide them, 8 do not, and they are no 1000
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_weights": True},
        {"vocab_size": 128, "real_vocab_size": 100, "tie_weights": True},
        {"dropout": 0.1, "flash": True},
    ],
    ids=str,
)
def test_the_loss_in_parts_and_its_gradients_are_those_of_the_whole(tiny_model, options, chunks):
    whole, parts = tiny_model(**options), tiny_model(loss_chunks=chunks, **options)
    losses = []
    for model in (whole, parts):
        torch.manual_seed(0)  # for dropout
        losses.append(model(tokens(T=15, vocab=100), tokens(T=15, vocab=100, seed=1)))
        (3 * losses[-1]).backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for (name, p), q in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert (q.grad - p.grad).norm() <= 1e-6 * p.grad.norm() + 1e-9, name


def test_padding_rows_take_no_part_in_the_loss_in_parts(padded, tiny_model):
    shouting, plain = padded
    model = tiny_model(loss_chunks=4, vocab_size=128, real_vocab_size=100)
    model.load_state_dict(shouting.state_dict())
    x, y = tokens(vocab=100), tokens(vocab=100, seed=1)
    loss = model(x, y)
    loss.backward()
    torch.testing.assert_close(loss, plain(x, y))
    assert not model.lm_head.weight.grad[100:].any()


def test_no_tensor_is_as_large_as_the_logits_of_all_tokens_where_the_loss_is_in_parts(tiny_model):
    x, y = tokens(4, 32), tokens(4, 32, seed=1)

    def largest(chunks, compile):
        model = tiny_model(loss_chunks=chunks, n_layer=1, vocab_size=8192, tie_weights=True)
        trained = torch.compile(model) if compile else model
        trained(x, y).backward()  # compiles
        model.zero_grad()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            loss = trained(x, y)
            loss.backward()
        return (
            max(event.self_cpu_memory_usage for event in profile.events()),
            loss,
            model.lm_head.weight.grad,
        )

    logits = 4 * 32 * 8192 * 4
    whole, loss, grad = largest(1, compile=False)
    assert whole >= logits
    for compile in (False, True):
        parts, loss_of_parts, grad_of_parts = largest(8, compile)
        assert (
            parts <= logits / 4
        )  # the gradient of the head's weight, here; a part's logits are half of that
        torch.testing.assert_close(loss_of_parts, loss, rtol=1e-6, atol=0)
        assert (grad_of_parts - grad).norm() <= 1e-6 * grad.norm()


def test_a_loss_in_parts_without_gradients_computes_none(tiny_model):
    model, plain = tiny_model(loss_chunks=4).eval(), tiny_model().eval()
    x, y = tokens(), tokens(seed=1)
    with (
        torch.no_grad(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        loss = model(x, y)
    torch.testing.assert_close(loss, plain(x, y))
    products = sum(event.count for event in profile.key_averages() if event.key == "aten::mm")
    assert products == 4
    assert not loss.requires_grad


# ---- generate


def test_the_key_value_cache_changes_nothing_also_past_the_context(tiny_model):
    for flash in (False, True):
        model = tiny_model(flash=flash, init="gpt2").eval()
        idx = tokens(T=5)
        with torch.no_grad():
            for _ in range(40):
                idx = torch.cat((idx, model(idx[:, -32:])[:, -1].argmax(-1, keepdim=True)), dim=1)
        assert torch.equal(model.generate(tokens(T=5), 40, temperature=0), idx)


def test_several_tokens_behind_a_cache_do_not_see_later_ones(tiny_model):
    for flash in (False, True):
        model = tiny_model(flash=flash).eval()
        cache, idx = KVCache(model.lm_head.weight, 2, (2, 2, 32, 16)), tokens(T=9)
        at = torch.arange(9).expand(2, 9)
        parts = torch.cat(
            [
                model.transformer(idx[:, a:b], cache, at[:, a:b])
                for a, b in ((0, 4), (4, 8), (8, 9))
            ],
            dim=1,
        )
        torch.testing.assert_close(parts, model.transformer(idx), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_head": 3}, "n_embd 32 does not divide into 3 heads"),
        ({"n_layer": 0}, "n_layer 0 is not a positive whole number"),
        ({"n_head": "2"}, "n_head '2' is not a positive whole number"),
        ({"real_vocab_size": 129}, "not within 1 to vocab_size 128"),
    ],
)
def test_options_that_make_no_model_are_errors(tiny_model, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(**options)


def test_the_same_generator_seed_gives_the_same_tokens_and_the_global_random_state_is_untouched(
    tiny_model,
):
    model = tiny_model(dropout=0.5)
    before = torch.get_rng_state()
    draws = [
        model.generate(tokens(), 20, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training  # restored


def test_a_prompt_longer_than_the_context_is_kept_and_continued(tiny_model):
    out = tiny_model().generate(tokens(T=50), 3, temperature=0)
    assert out.shape == (2, 53)
    assert torch.equal(out[:, :50], tokens(T=50))


def test_top_k_above_the_vocabulary_draws_from_all_and_top_k_1_is_greedy(tiny_model):
    model = tiny_model(init="gpt2")
    assert model.generate(tokens(), 5, top_k=10**6).shape == (2, 21)
    assert torch.equal(
        model.generate(tokens(), 20, top_k=1), model.generate(tokens(), 20, temperature=0)
    )


def test_draws_follow_temperature_and_top_k():
    scores, generator = (
        scores_of(torch.tensor([0.0, 1.0, 2.0, -5.0]), 0.5, 2),
        torch.Generator().manual_seed(0),
    )
    share = (
        torch.tensor([draw(scores, generator) for _ in range(20_000)]).bincount(minlength=4)
        / 20_000
    )
    expected = torch.tensor([0.0, math.exp(2.0), math.exp(4.0), 0.0])
    torch.testing.assert_close(share, expected / expected.sum(), rtol=0, atol=0.02)


def test_generation_ends_at_the_stop_token(tiny_model):
    model = tiny_model()
    greedy = model.generate(tokens(1), 30, temperature=0)
    stop = greedy[0, 20].item()
    ended = model.generate(tokens(1), 30, temperature=0, stop_token=stop)
    first = greedy[0, 16:].tolist().index(stop)
    assert ended.tolist() == greedy[:, : 16 + first + 1].tolist()


def test_a_sequence_that_has_ended_is_filled_with_its_stop_token(tiny_model):
    model = tiny_model(init="gpt2")
    both = model.generate(tokens(), 12, temperature=0)
    stop = next(
        token for token in both[0, 16:].tolist() if token not in both[1, 16:]
    )  # of the first one only
    ended = model.generate(tokens(), 12, temperature=0, stop_token=stop)
    at = both[0, 16:].tolist().index(stop)
    assert ended[0, 16:].tolist() == both[0, 16 : 16 + at].tolist() + [stop] * (12 - at)
    assert torch.equal(ended[1], both[1])


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (0, {}, "the prompt is empty"),
        (3, {"temperature": -1.0}, "temperature -1.0 must be at least 0"),
        (3, {"top_k": 0}, "top_k 0 at least 1"),
    ],
)
def test_bad_generation_settings_are_errors(tiny_model, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(tokens(T=prompt), 5, **options)
