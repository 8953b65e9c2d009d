"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Parameters have the names of OpenAI's and Hugging Face's releases. Shapes in comments: B sequences,
T tokens, C = n_embd, nh heads of size hs = C / nh, V = vocab_size. Milliseconds in comments come
from logs/reference/gpu_ms.csv: a step on one GPU, before and after.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels.attention import blocked_attention, blocked_is_faster
from kernels.loss import chunked_cross_entropy, soft_cap
from options import ModelOptions

# Computes attention in place of the model's own: layer, q, k, v (B, nh, T, hs) -> (B, nh, T, hs).
# Generation passes one with a KV cache (inference/sampling.py), which holds the earlier tokens.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class GPTConfig(ModelOptions):
    """Options of the model: what it computes, which options.py explains, and how."""

    # SpeedConfig in config.py explains these four.
    flash: bool = False
    recompute: bool = False
    loss_chunks: int = 1
    residual_bf16: bool = False

    @classmethod
    def of(cls, options: ModelOptions) -> "GPTConfig":
        """Take the model's options from a run's (config.py's Config)."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


class BlockInputs(NamedTuple):
    """The inputs of every block beside the residual stream. The Transformer builds them once.

    All but the tokens are None if their option is off.
    """

    idx: Tensor  # the tokens (B, T)
    rotation: Tensor | None = None  # rope: cosines and sines (2, ..., T, 1, hs / 2)
    x0: Tensor | None = None  # embed_shortcut: the embedded tokens (B, T, C)
    first_v: Tensor | None = None  # value_residual, after the first block: its values
    pairs: Tensor | None = None  # bigram_embed: an embedding of each pair of tokens (B, T, C)
    attend: Attend | None = None  # in generation


class LayerNorm(nn.LayerNorm):
    """LayerNorm whose weights may have another dtype than x: FSDP2 gathers them in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019) whose weight may have another dtype than x."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def make_norm(config: GPTConfig) -> nn.Module:
    """Build LayerNorm or RMSNorm over the last dimension, with GPT-2's epsilon."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.n_embd, eps=1e-5, elementwise_affine=config.norm_weight)
    return LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


def rms_norm(x: Tensor) -> Tensor:
    """Scale the last dimension to a root mean square of 1."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-5).to(x.dtype)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_i+hs/2) of a head by its angle: RoPE (Su et al. 2021, sec. 3.4.2).

    x is (B, T, nh, hs), `rotation` has the cosines and sines (2, ..., T, 1, hs / 2). Afterwards
    q @ k depends on the distance between two tokens, not on their positions.
    """
    (cos, sin), (a, b) = rotation, x.float().chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1).to(x.dtype)


def hash_pairs(idx: Tensor, rows: int) -> Tensor:
    """Hash each token with the one before it to a row below rows - 1; the first has the last row.

    As modded-nanogpt does (record of 2026-01-19); tokens are (B, T).
    """
    hashes = torch.bitwise_xor(36313 * idx[:, 1:], 27191 * idx[:, :-1]) % (rows - 1)
    return F.pad(hashes, (1, 0), value=rows - 1)


class CausalSelfAttention(nn.Module):
    mask: Tensor

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        # queries, keys and values of all heads in one matmul
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        # Not persistent, so that checkpoints are the same with and without flash.
        size = 0 if config.flash else config.block_size
        mask = torch.ones(size, config.block_size, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)
        if config.value_residual and layer:
            # A tensor of one element: FSDP2 shards no scalars.
            self.value_mix = nn.Parameter(torch.full((1,), 0.5))
        self.value_embed: nn.Embedding | None = None
        if config.value_embeds and (config.n_layer - layer) % 2:  # the last one, third last, ...
            self.value_embed = nn.Embedding(config.vocab_size, config.n_embd)
            nn.init.normal_(self.value_embed.weight, std=config.n_embd**-0.5)
            # one gate per head, from a few channels of the attention's input
            self.value_gate = nn.Linear(min(12, config.n_embd), config.n_head, bias=False)

    def forward(self, x: Tensor, inputs: BlockInputs) -> tuple[Tensor, Tensor | None]:
        """Let each of the T tokens attend to itself and earlier tokens: (B, T, C) to (B, T, C).

        Also returns the first layer's values (B, T, nh, hs) if value_residual needs them.
        """
        B, T, C = x.shape
        first_v = inputs.first_v
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.config.n_head, -1) for t in (q, k, v))  # (B, T, nh, hs)
        # Additions of newer recipes, each with its own flag. GPT-2 has none of them.
        if self.config.qk_norm:
            # Scores stay within +-sqrt(hs), so softmax cannot saturate from a large q or k (Henry
            # et al. 2020; Dehghani et al. 2023, section 2).
            q, k = rms_norm(q), rms_norm(k)
        if inputs.rotation is not None:
            q, k = rotate(q, inputs.rotation), rotate(k, inputs.rotation)
        if self.config.value_residual and first_v is None:
            first_v = v
        elif first_v is not None:
            # Later layers mix in the first layer's values, which are closest to the tokens (Zhou et
            # al. 2024, section 3.2). Each learns its own share.
            v = torch.lerp(v, first_v, self.value_mix.to(v.dtype))
        if self.value_embed is not None:
            # Every other layer has values for each token: many parameters, little arithmetic.
            # The gate is that of nanochat (2026-03-09): from 0 to 3, by head and position.
            gate = 3 * self.value_gate(x[..., : self.value_gate.in_features]).sigmoid()
            own = self.value_embed(inputs.idx).to(v.dtype).view_as(v)  # (B, T, nh, hs)
            v = v + gate.unsqueeze(-1) * own
        # The transpose comes last: compiled code copies the result of a norm or rotation after it.
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, nh, T, hs)
        dropout = self.config.dropout if self.training else 0.0
        # True only in a compiled model, on a CPU with fast bf16 matmuls.
        blocked = torch.compiler.is_compiling() and blocked_is_faster(q.device, q.dtype, T)
        if inputs.attend is not None:
            y = inputs.attend(self.layer, q, k, v)
        elif self.config.flash and blocked and not dropout:
            y = blocked_attention(q, k, v)
        elif self.config.flash:
            # Flash attention (Dao et al. 2022) computes softmax block by block in the GPU's fast
            # memory and never writes the T x T scores to the slow one. 130 -> 97 ms.
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            # The baseline materializes the T x T scores; they make four round trips to memory.
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, nh, T, T)
            scores = scores.masked_fill(~self.mask[:T, :T], float("-inf"))
            y = F.dropout(F.softmax(scores, dim=-1), dropout, self.training) @ v
        y = y.transpose(1, 2).reshape(B, T, C)  # from (B, nh, T, hs): heads side by side
        return self.resid_dropout(self.c_proj(y)), first_v


class SquaredReLU(nn.Module):
    """relu(x)^2 (So et al. 2021, "Primer", section 4.2): cheaper than GELU, and often exactly 0."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


# GPT-2 was trained with the tanh approximation of GELU; the exact GELU differs by up to 5e-4. For
# the squared ReLU, see configs/recipes/relu2.yaml.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "gelu": nn.GELU,
    "relu2": SquaredReLU,
}


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        width = 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, width, bias=config.bias)
        self.act = ACTIVATIONS[config.activation]()
        self.c_proj = nn.Linear(width, config.n_embd, bias=config.bias)
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
        if config.embed_shortcut:
            self.shortcut = nn.Parameter(torch.eye(1, 2)[0])
        if config.bigram_embed:
            self.pair_share = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x: Tensor, inputs: BlockInputs) -> tuple[Tensor, Tensor | None]:
        """Let attention, then the MLP, add to the residual stream: (B, T, C) to (B, T, C).

        The second result is as in CausalSelfAttention.
        """
        if inputs.x0 is not None:
            # Every block can still read the tokens themselves (modded-nanogpt, 2024-11-06).
            keep, add = self.shortcut.to(x.dtype)
            x = keep * x + add * inputs.x0
        if inputs.pairs is not None:
            x = x + self.pair_share.to(x.dtype) * inputs.pairs
        # Pre-norm: the residual stream itself is never normalized, so gradients flow from the loss
        # to the first block unchanged. GPT-1 normalized after each addition.
        y, first_v = self.attn(self.ln_1(x), inputs)
        x = x + y
        return x + self.mlp(self.ln_2(x)), first_v


class Transformer(nn.Module):
    """Everything below the output head."""

    rotation: Tensor

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.rope:
            # Pair i of a head rotates by position / 10,000^(2i / hs): fast pairs distinguish
            # neighbours, slow pairs distant positions.
            hs = config.n_embd // config.n_head
            speeds = 10_000.0 ** -(torch.arange(0, hs, 2) / hs)
            angles = torch.outer(torch.arange(config.block_size), speeds)
            rotation = torch.stack((angles.cos(), angles.sin()))  # (2, block_size, hs / 2)
            self.register_buffer("rotation", rotation, persistent=False)
        else:
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        if config.bigram_embed:
            # 5 rows per token: pairs that share a row are rarely both frequent. Initialized to 0.
            self.pair_embed = nn.Embedding(5 * config.n_vocab, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = make_norm(config)

    def forward(
        self, idx: Tensor, attend: Attend | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Compute the normalized residual stream (B, T, C) of tokens idx (B, T).

        `positions` (B, T): positions of the tokens in their texts (default: 0 .. T - 1).
        """
        T = idx.size(1)
        if self.config.block_size < T:
            raise ValueError(f"{T} tokens are more than the context, {self.config.block_size}")
        x, x0, rotation = self.wte(idx), None, None  # x is (B, T, C)
        if self.config.rope:
            where = slice(T) if positions is None else positions
            rotation = self.rotation[:, where].unsqueeze(-2)  # the same for all heads
        else:
            # Slice if possible: the gradient of a lookup would be a scatter.
            # Tokens and positions share the same C dimensions: they are added, not concatenated.
            x = x + (self.wpe.weight[:T] if positions is None else self.wpe(positions))
        x = self.drop(x)
        if self.config.residual_bf16 and torch.is_autocast_enabled(x.device.type):
            # Each layer reads and writes the residual stream. In bf16 a step moves 3 to 4% fewer
            # bytes (roofline.py's count), but each addition is rounded.
            x = x.to(torch.bfloat16)
        # Activation checkpointing: a block keeps only its input; the backward pass recomputes the
        # rest. A third more arithmetic, but activations of only one block at a time.
        recompute = self.config.recompute and self.training and torch.is_grad_enabled()
        if self.config.embed_shortcut:
            # Normalized, the embedding is as large as the blocks' outputs.
            x = x0 = rms_norm(x)
        inputs = BlockInputs(idx, rotation, x0, attend=attend)
        if self.config.bigram_embed:
            # Pairs of tokens need not be recognized by attention (nanochat 2026-01-27).
            pairs = self.pair_embed(hash_pairs(idx, self.pair_embed.num_embeddings)).to(x.dtype)
            inputs = inputs._replace(pairs=pairs)
        for block in self.h:
            x, first_v = (
                checkpoint(block, x, inputs, use_reentrant=False) if recompute else block(x, inputs)
            )
            inputs = inputs._replace(first_v=first_v)
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
            # Saves 38 of 163 million parameters; the shared matrix learns from both uses. Keep the
            # head's tensor: nn.Embedding's default init, N(0, 1), would start at a loss in the
            # hundreds.
            self.transformer.wte.weight = self.lm_head.weight
        # Padded vocabulary: 50,304 columns, a multiple of 128, fill the GPU's matmul tiles; 50,257
        # do not. 97 -> 93 ms. A bias of -inf removes the padding rows from the softmax, at no cost.
        padding = torch.zeros(config.vocab_size)
        padding[config.n_vocab :] = float("-inf")
        is_padded = config.n_vocab < config.vocab_size
        self.register_buffer("padding", padding if is_padded else None, persistent=False)
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        if self.config.init == "gpt2":
            # Small weights: the first logits are near 0, so the first loss is near ln V.
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, mean=0.0, std=0.02)
                    if isinstance(module, nn.Linear) and module.bias is not None:
                        nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, CausalSelfAttention | MLP):
                if self.config.residual_scaling:
                    # Each block adds to the residual stream twice; this keeps the sum's variance
                    # from growing with depth (GPT-2 paper, section 2.3).
                    module.c_proj.weight /= math.sqrt(2 * self.config.n_layer)
                if self.config.zero_init:
                    # Each block starts as the identity (Zhang et al. 2019, "Fixup").
                    for p in module.c_proj.parameters():
                        nn.init.zeros_(p)
        if self.config.bigram_embed:
            nn.init.zeros_(self.transformer.pair_embed.weight)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        where: Tensor | None = None,
        attend: Attend | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, real vocabulary) for tokens idx (B, T), or with targets (B, T) the
        mean loss in nats per token.

        `where`, a mask (B, T), selects N tokens, and the logits are then (N, real vocabulary).
        `attend` and `positions` are for generation. Raises ValueError if T is more than
        block_size.
        """
        x = self.transformer(idx, attend, positions)  # (B, T, C)
        n_vocab, cap = self.config.n_vocab, self.config.logit_softcap
        if targets is None:
            return soft_cap(self.lm_head(x if where is None else x[where])[..., :n_vocab], cap)
        if self.config.loss_chunks > 1:
            # Chunked cross-entropy: the logits of all tokens, the largest tensor, never exist.
            chunks = self.config.loss_chunks
            return chunked_cross_entropy(x, self.lm_head.weight, targets, n_vocab, chunks, cap)
        # Cross-entropy is -log of the target's probability. It needs fp32, which autocast chooses
        # on a CPU, but not on CUDA.
        logits = F.linear(x, self.lm_head.weight, None if cap else self.padding)  # (B, T, V)
        if cap:
            # Add the padding after the cap: tanh would make -inf finite.
            logits = soft_cap(logits.float(), cap)
            logits = logits if self.padding is None else logits + self.padding
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def num_parameters(self) -> int:
        """Count the parameters; a shared matrix counts once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len: int) -> int:
        """Count the floating-point operations of forward and backward per token of a sequence.

        6 per parameter of a matmul, 12 n_layer n_embd T for attention (PaLM paper, appendix B).
        Embeddings are lookups, not matmuls, and do not count, unless the output head shares them.
        """
        tables = {module.weight for module in self.modules() if isinstance(module, nn.Embedding)}
        lookups = sum(table.numel() for table in tables - {self.lm_head.weight})
        matmuls = self.num_parameters() - lookups
        return 6 * matmuls + 12 * self.config.n_layer * self.config.n_embd * seq_len
