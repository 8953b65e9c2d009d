"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Parameter names are those of OpenAI's and Hugging Face's releases. Shapes in comments: B sequences,
T tokens, C = n_embd, nh heads of size hs = C / nh, V = vocab_size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import blocked_attention, blocked_is_faster
from kernels.cache import KVCache
from kernels.loss import chunked_cross_entropy


class ModelError(ValueError):
    """Options that do not make a model."""


@dataclass(frozen=True)
class GPTConfig:
    """Options of the model; config.py explains each. The defaults are GPT-2 (124M) with nothing
    switched on.
    """

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
            raise ModelError(
                f"real_vocab_size {real!r} is not within 1 to vocab_size {self.vocab_size}, in "
                f"whole numbers"
            )
        choices = {
            "norm": ("layernorm", "rmsnorm"),
            "activation": ("gelu_tanh", "gelu"),
            "init": ("torch", "gpt2"),
        }
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
        """Tokens that exist. Rows of the vocabulary above GPT-2's 50,257 are padding unless
        real_vocab_size says otherwise.
        """
        return self.real_vocab_size or min(self.vocab_size, 50257)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
        mask = torch.ones(
            0 if config.flash else config.block_size, config.block_size, dtype=torch.bool
        ).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """(B, T, C) to (B, T, C); with a cache, x also see the tokens that it holds before them."""
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (
            t.view(B, T, self.config.n_head, -1).transpose(1, 2) for t in (q, k, v)
        )  # (B, nh, T, hs)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        dropout = self.config.dropout if self.training else 0.0
        in_blocks = torch.compiler.is_compiling() and blocked_is_faster(q.device, q.dtype, T)
        if self.config.flash and in_blocks and cache is None and not dropout:
            y = blocked_attention(q, k, v)
        elif self.config.flash:
            y = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=cache.mask if cache else None,
                dropout_p=dropout,
                is_causal=cache is None,
            )
        else:
            scores = (
                q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
            )  # (B, nh, T, T), or the cache's span in place of the last T
            scores = scores.masked_fill(
                ~(cache.mask if cache else self.mask[:T, :T]), float("-inf")
            )
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

    def forward(
        self, idx: Tensor, cache: KVCache | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """The normalized residual stream (B, T, C) for tokens idx (B, T). With a cache they stand
        at `positions` (B, T), and see what it holds before them.
        """
        T = idx.size(1)
        if self.config.block_size < T:
            raise ValueError(
                f"{T} tokens are longer than the model's context, block_size "
                f"{self.config.block_size}"
            )
        if cache is not None and positions is not None:
            cache.begin(positions)
        x = self.drop(
            self.wte(idx) + (self.wpe.weight[:T] if positions is None else self.wpe(positions))
        )  # (B, T, C)
        for block in self.h:
            x = block(x, cache)
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
            # The head's tensor is the one kept: nn.Embedding's default, N(0, 1), would give a first
            # loss in the hundreds.
            self.transformer.wte.weight = self.lm_head.weight
        # As the head's bias, -inf takes padding rows out of the softmax at no cost and keeps the
        # padded width.
        padding = torch.zeros(config.vocab_size)
        padding[config.n_vocab :] = float("-inf")
        self.register_buffer(
            "padding", padding if config.n_vocab < config.vocab_size else None, persistent=False
        )
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
            # Each block adds to the residual stream twice; this keeps the sum's variance from
            # growing with depth (GPT-2 paper, section 2.3).
            for module in self.modules():
                if isinstance(module, CausalSelfAttention | MLP):
                    module.c_proj.weight /= math.sqrt(2 * self.config.n_layer)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        where: Any = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, real vocabulary) for tokens idx (B, T), or with targets (B, T) the mean
        loss in nats per token.

        `where` picks the tokens, N of them, whose logits (N, real vocabulary) are wanted: a mask
        (B, T), or rows and columns. Cache and positions as for Transformer. Raises ValueError if T
        is longer than block_size.
        """
        x = self.transformer(idx, cache, positions)
        if targets is None:
            return self.lm_head(x if where is None else x[where])[..., : self.config.n_vocab]
        if self.config.loss_chunks > 1:
            return chunked_cross_entropy(
                x, self.lm_head.weight, targets, self.config.n_vocab, self.config.loss_chunks
            )
        logits = F.linear(x, self.lm_head.weight, self.padding)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def num_parameters(self) -> int:
        """Number of parameters; a shared matrix counts once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward per token of a sequence.

        6 per parameter that is multiplied by, 12 n_layer n_embd T for attention (PaLM paper,
        appendix B). Embeddings are looked up, not multiplied: positions never count, an untied
        token embedding does not either.
        """
        lookups = self.transformer.wpe.weight.numel()
        if not self.config.tie_weights:
            lookups += self.transformer.wte.weight.numel()
        return (
            6 * (self.num_parameters() - lookups)
            + 12 * self.config.n_layer * self.config.n_embd * seq_len
        )

    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        stop_token: int | None = None,
    ) -> Tensor:
        """Continue the tokens idx (B, T) by up to max_new_tokens, drawn from the scores that
        `scores_of` makes with `generator` (on the CPU; default: a fresh one with seed 0), never
        from the global random state.

        Ends early when every row has drawn stop_token; those that are first are filled with it.
        Returns (B, T + number of new tokens). The rest as for `stream`.
        """
        generator = generator or torch.Generator().manual_seed(0)
        steps = list(
            self.stream(
                idx.tolist(),
                max_new_tokens,
                stop_token,
                lambda logits, row, text: draw(scores_of(logits, temperature, top_k), generator),
            )
        )
        new = idx.new_tensor(
            [[stop_token if token is None else token for token in step] for step in steps]
        )
        return torch.cat((idx, new.view(len(steps), len(idx)).T), dim=1)

    @torch.no_grad()
    def stream(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        stop_token: int | None,
        choose: Callable[[Tensor, int, list[int]], int],
        decode: Callable[..., Tensor] | None = None,
    ) -> Iterator[list[int | None]]:
        """Continue prompts of any lengths together: yields a token for each, time after time; None
        for those that have ended, at stop_token. `choose` takes the logits (V,) on the CPU, the
        number of the prompt and its text so far; each gets the logits that it gets alone.

        Past block_size tokens, the model reads the last block_size. `decode` is a compiled
        `next_logits`, for one token of each and always the same shapes. Raises ValueError for an
        empty prompt, ModelError for weights that make no probabilities.
        """
        if not all(prompts):
            raise ValueError("the prompt is empty: give at least one token, such as <|endoftext|>")
        c, weight, was_training = self.config, self.lm_head.weight, self.training
        texts, unfinished = [list(prompt) for prompt in prompts], list(range(len(prompts)))
        size = c.block_size if decode else min(c.block_size, max(map(len, texts)) + max_new_tokens)
        cache = KVCache(weight, c.n_layer, (len(texts), c.n_head, size, c.n_embd // c.n_head))
        self.eval()
        try:
            for step in range(max_new_tokens):
                windows = [text[-c.block_size :] for text in texts]
                # positions are absolute: once a window slides, every key and value changes
                is_read = step > 0 and max(len(texts[row]) for row in unfinished) <= c.block_size
                unread = [window[-1:] for window in windows] if is_read else windows
                next_logits = decode if decode and is_read else self.next_logits
                cache.span = size if decode and is_read else max(map(len, windows))
                T = max(map(len, unread))
                idx = torch.tensor(
                    [tokens + [0] * (T - len(tokens)) for tokens in unread], device=weight.device
                )  # (B, T)
                ends = torch.tensor(
                    [len(tokens) - 1 for tokens in unread], device=weight.device
                )  # beyond is padding
                starts = [
                    len(window) - len(tokens)
                    for window, tokens in zip(windows, unread, strict=True)
                ]
                positions = torch.tensor(
                    [range(start, start + T) for start in starts], device=weight.device
                )
                logits = next_logits(idx, cache, positions, ends).float().cpu()
                if not logits.isfinite().all():
                    raise ModelError(
                        "the model's logits are not finite: its weights are damaged or have "
                        "diverged"
                    )
                new = {row: choose(logits[row], row, texts[row]) for row in unfinished}
                for row, token in new.items():
                    texts[row].append(token)
                yield [new.get(row) for row in range(len(texts))]
                unfinished = [row for row, token in new.items() if token != stop_token]
                if not unfinished:
                    break
        finally:
            self.train(was_training)

    def next_logits(self, idx: Tensor, cache: KVCache, positions: Tensor, ends: Tensor) -> Tensor:
        """Logits (B, real vocabulary) after the token `ends` (B,) of each row of idx (B, T), which
        stands at `positions` (B, T).
        """
        return self(
            idx,
            where=(torch.arange(len(idx), device=idx.device), ends),
            cache=cache,
            positions=positions,
        )


def scores_of(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """Logits (V,) divided by the temperature, and -inf for all but the top_k likeliest tokens; at
    temperature 0 for all but one.

    Raises ValueError for bad settings.
    """
    if not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
        raise ValueError(
            f"temperature {temperature} must be at least 0 and finite, top_k {top_k} at least 1"
        )
    if (
        temperature < 1e-6
    ):  # 0, or dividing by it could overflow: the likeliest token is as good as certain
        return torch.full_like(logits, -math.inf).index_fill(0, logits.argmax(), 0.0)
    scores = logits / temperature
    return (
        scores
        if top_k is None
        else scores.masked_fill(logits < logits.topk(min(top_k, len(logits))).values[-1], -math.inf)
    )


def draw(scores: Tensor, generator: torch.Generator) -> int:
    """A token, with the probabilities that the softmax of the scores (V,) gives."""
    return int(torch.multinomial(F.softmax(scores, dim=-1), 1, generator=generator))
