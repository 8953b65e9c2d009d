"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Parameter names are those of OpenAI's and Hugging Face's releases. Shapes in comments: B sequences, T tokens,
C = n_embd, nh heads of size hs = C / nh, V = vocab_size.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.loss import cross_entropy_in_chunks


class ModelError(ValueError):
    """Options that do not make a model."""


@dataclass(frozen=True)
class GPTConfig:
    """Options of the model; config.py explains each. The defaults are GPT-2 (124M) with nothing switched on."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int = 50257
    real_vocab_size: int | None = None
    bias: bool = True
    dropout: float = 0.0
    norm: str = "layernorm"
    activation: str = "gelu_tanh"
    tie_weights: bool = False
    init: str = "torch"
    residual_scaling: bool = False
    flash: bool = False
    loss_chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "loss_chunks"):
            value = getattr(self, name)
            if not _is_whole(value) or value < 1:
                raise ModelError(f"{name} {value!r} is not a positive whole number")
        if self.n_embd % self.n_head:
            raise ModelError(f"n_embd {self.n_embd} does not divide into {self.n_head} heads")
        real = self.real_vocab_size
        if real is not None and not (_is_whole(real) and 1 <= real <= self.vocab_size):
            raise ModelError(f"real_vocab_size {real!r} is not within 1 to vocab_size {self.vocab_size}, in whole numbers")
        choices = {"norm": ("layernorm", "rmsnorm"), "activation": ("gelu_tanh", "gelu"), "init": ("torch", "gpt2")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ModelError(f"{name} {getattr(self, name)!r} is not {' or '.join(allowed)}")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ModelError(f"dropout {self.dropout!r} is not a number from 0 to below 1")
        for name in ("bias", "tie_weights", "residual_scaling", "flash"):
            if not isinstance(getattr(self, name), bool):
                raise ModelError(f"{name} {getattr(self, name)!r} is not True or False")

    @classmethod
    def of(cls, options: Any) -> "GPTConfig":
        """The model's part of a run's options (config.py's Config)."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    @property
    def n_vocab(self) -> int:
        """Tokens that exist. Rows of the vocabulary above GPT-2's 50,257 are padding unless real_vocab_size says otherwise."""
        return self.real_vocab_size or min(self.vocab_size, 50257)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class KVCache:
    """Keys and values of the tokens that a model has already read, for `GPT.generate`."""

    def __init__(self, model: "GPT", batch_size: int):
        c, weight = model.config, model.lm_head.weight
        shape = (c.n_layer, 2, batch_size, c.n_head, c.block_size, c.n_embd // c.n_head)
        self.store = torch.empty(shape, device=weight.device, dtype=weight.dtype)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k and v (B, nh, T, hs) of the newest tokens; returns those of all tokens so far, (B, nh, length + T, hs)."""
        end = self.length + k.size(2)
        self.store[layer, 0, :, :, self.length:end] = k
        self.store[layer, 1, :, :, self.length:end] = v
        return self.store[layer, 0, :, :, :end], self.store[layer, 1, :, :, :end]


def make_norm(config: GPTConfig) -> nn.Module:
    """LayerNorm or RMSNorm over the last dimension, with GPT-2's epsilon."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=1e-5)
    return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


class CausalSelfAttention(nn.Module):
    mask: Tensor

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        # not persistent: checkpoints are the same with and without flash
        mask = torch.ones(0 if config.flash else config.block_size, config.block_size, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) to (B, T, C); with a cache, x are the tokens after the ones it holds."""
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.config.n_head, -1).transpose(1, 2) for t in (q, k, v))  # (B, nh, T, hs)
        past = 0
        if cache is not None:
            past = cache.length
            k, v = cache.append(self.layer, k, v)
        dropout = self.config.dropout if self.training else 0.0
        if self.config.flash:
            # queries with no past see a triangle, a single one after a cache sees everything, several need a mask
            mask = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past) if past and T > 1 else None
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=past == 0)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, nh, T, past + T)
            scores = scores.masked_fill(~self.mask[past:past + T, :past + T], float("-inf"))
            y = F.dropout(F.softmax(scores, dim=-1), dropout, self.training) @ v  # (B, nh, T, hs)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.act = nn.GELU(approximate="tanh" if config.activation == "gelu_tanh" else "none")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) to (B, T, C): attention and MLP each add to the residual stream."""
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Everything below the output head."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = make_norm(config)

    def forward(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """The normalized residual stream (B, T, C) for tokens idx (B, T), which follow those in the cache."""
        past = cache.length if cache is not None else 0
        T = idx.size(1)
        if past + T > self.config.block_size:
            raise ValueError(f"{past + T} tokens are longer than the model's context, block_size {self.config.block_size}")
        x = self.drop(self.wte(idx) + self.wpe.weight[past:past + T])  # (B, T, C)
        for block in self.h:
            x = block(x, cache)
        if cache is not None:
            cache.length += T
        return self.ln_f(x)


class GPT(nn.Module):
    """The language model: `model(idx)` gives logits, `model(idx, targets)` the loss."""

    padding: Tensor | None

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            # The head's tensor is the one kept: nn.Embedding's default, N(0, 1), would give a first loss in the hundreds.
            self.transformer.wte.weight = self.lm_head.weight
        # As the head's bias, -inf takes padding rows out of the softmax at no cost and keeps the padded width.
        padding = torch.zeros(config.vocab_size)
        padding[config.n_vocab:] = float("-inf")
        self.register_buffer("padding", padding if config.n_vocab < config.vocab_size else None, persistent=False)
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        if self.config.init == "gpt2":
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, mean=0.0, std=0.02)
                    if isinstance(module, nn.Linear) and module.bias is not None:
                        nn.init.zeros_(module.bias)
        if self.config.residual_scaling:
            # Each block adds to the residual stream twice; this keeps the sum's variance from growing with depth
            # (GPT-2 paper, section 2.3).
            for module in self.modules():
                if isinstance(module, CausalSelfAttention | MLP):
                    module.c_proj.weight /= math.sqrt(2 * self.config.n_layer)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, real vocabulary) for tokens idx (B, T), or with targets (B, T) the mean loss in nats per token.

        Raises ValueError if T is longer than block_size.
        """
        x = self.transformer(idx)
        if targets is None:
            return self.lm_head(x)[..., :self.config.n_vocab]
        if self.config.loss_chunks > 1:
            return cross_entropy_in_chunks(x, self.lm_head.weight, targets, self.config.n_vocab, self.config.loss_chunks)
        logits = F.linear(x, self.lm_head.weight, self.padding)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def num_parameters(self) -> int:
        """Number of parameters; a shared matrix counts once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward per token of a sequence.

        6 per parameter that is multiplied by, 12 n_layer n_embd T for attention (PaLM paper, appendix B). Embeddings
        are looked up, not multiplied: positions never count, an untied token embedding does not either.
        """
        lookups = self.transformer.wpe.weight.numel()
        if not self.config.tie_weights:
            lookups += self.transformer.wte.weight.numel()
        return 6 * (self.num_parameters() - lookups) + 12 * self.config.n_layer * self.config.n_embd * seq_len

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
                 generator: torch.Generator | None = None, stop_token: int | None = None) -> Tensor:
        """Continue the tokens idx (B, T) by up to max_new_tokens, drawn one after the other.

        Temperature 0 takes the most likely token; top_k keeps the k most likely (all, where k exceeds the vocabulary).
        Draws come from `generator` (on the CPU; default: a fresh one with seed 0), never from the global random state.
        Past block_size tokens, the model reads the last block_size. Stops early when every sequence has drawn
        stop_token. Returns (B, T + number of new tokens). Raises ValueError for an empty prompt or bad settings, ModelError for
        weights that make no probabilities.
        """
        if idx.size(1) == 0:
            raise ValueError("the prompt is empty: give at least one token, such as <|endoftext|>")
        if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature {temperature} must be at least 0 and finite, top_k {top_k} at least 1")
        generator = generator or torch.Generator().manual_seed(0)
        was_training = self.training
        self.eval()
        try:
            cache, new = KVCache(self, idx.size(0)), idx[:, -self.config.block_size:]
            stopped = torch.zeros(idx.size(0), dtype=torch.bool, device=idx.device)
            for _ in range(max_new_tokens):
                if cache.length + new.size(1) > self.config.block_size:
                    # positions are absolute: once the window slides, every key and value changes
                    cache, new = KVCache(self, idx.size(0)), idx[:, -self.config.block_size:]
                logits = self.lm_head(self.transformer(new, cache)[:, -1])[:, :self.config.n_vocab]
                new = _draw(logits.float().cpu(), temperature, top_k, generator).to(idx.device)
                idx = torch.cat((idx, new), dim=1)
                stopped |= new[:, 0] == stop_token
                if stop_token is not None and stopped.all():
                    break
        finally:
            self.train(was_training)
        return idx


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One token per row, (B, 1), from logits (B, V)."""
    if not logits.isfinite().all():
        raise ModelError("the model's logits are not finite: its weights are damaged or have diverged")
    if temperature < 1e-6:  # 0, or dividing by it could overflow: the likeliest token is as good as certain
        return logits.argmax(dim=-1, keepdim=True)
    scaled = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        scaled = scaled.masked_fill(logits < kth, float("-inf"))
    return torch.multinomial(F.softmax(scaled, dim=-1), 1, generator=generator)
