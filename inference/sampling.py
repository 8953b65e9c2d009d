"""Generate texts of any lengths together, with a KV cache.

Prefill reads the prompts once and caches their keys and values. Each decode step then reads only
the last token of each text.
"""

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from data.tokenizer import END_OF_TEXT, get_encoding
from model import GPT
from runtime.errors import UserError

# The number of keys is a multiple of this; the rest is masked. cuDNN's attention, which PyTorch
# takes in bf16 on GPUs since Hopper, builds a plan for each number, so 128 tokens share a plan.
# On a CPU there are no plans, and each key takes time.
MULTIPLE = 128


# ---- from logits to a token


def probabilities(
    logits: Tensor,
    texts: list[list[int]],
    temperature: float,
    top_k: int | None,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the likeliest next tokens (B, K) of texts with logits (B, V), and their probabilities
    (B, K), which may add up to less than 1.

    The options are transformers', and applied in its order.
    """
    # Keskar et al. 2019 ("CTRL", section 4.1) divide by the penalty. Like transformers, this
    # multiplies negative logits by it, because dividing would make their tokens likelier.
    if repetition_penalty != 1:
        logits = logits.clone()
        for row, text in zip(logits, texts, strict=True):
            seen = row[text]
            row[text] = torch.where(seen > 0, seen / repetition_penalty, seen * repetition_penalty)
    if temperature < 1e-6:  # dividing by it could overflow, so keep only the likeliest token
        temperature, top_k = 1.0, 1
    n_vocab = logits.size(-1)
    likeliest, tokens = logits.topk(min(top_k or n_vocab, n_vocab))
    p = (likeliest / temperature).softmax(-1)
    # Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1: the fewest
    # likeliest tokens, at least one, whose probabilities add up to top_p.
    if top_p < 1:
        before = p.cumsum(-1) - p
        p[(before > 0) & (before >= top_p)] = 0
    return tokens, p


def draw(tokens: Tensor, p: Tensor, generator: torch.Generator) -> int:
    """Draw one of the tokens (K,), with probabilities in proportion to `p` (K,)."""
    return int(tokens[torch.multinomial(p, 1, generator=generator)])


def seeded(seed: int) -> torch.Generator:
    """Make a generator, so that sampling never touches the global random state."""
    return torch.Generator().manual_seed(seed)


# ---- the KV cache


def keys_for(positions: int, device: torch.device) -> int:
    """Return the number of keys that attention reads for `positions`: fewer are faster."""
    multiple = 1 if device.type == "cpu" else MULTIPLE
    return (positions + multiple - 1) // multiple * multiple


def make_cache(model: GPT, rows: int, positions: int) -> list[Tensor]:
    """Allocate the keys and values (2, B, nh, S, hs) of each layer, in the model's dtype."""
    c, like = model.config, model.lm_head.weight
    shape = (2, rows, c.n_head, keys_for(positions, like.device), c.n_embd // c.n_head)
    return [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(c.n_layer)]


def next_logits(
    model: GPT, cache: list[Tensor], keys: int, idx: Tensor, lengths: Tensor, masked: bool = True
) -> Tensor:
    """Return logits (B, V) after texts of the given lengths (B,).

    idx (B, T): whole prompts, padded at the end (prefill), or each text's last token, T = 1
    (decode). Their keys and values enter the cache. Each token attends causally to the first `keys`
    positions; padding, zeros and an earlier text's entries come after it, and are masked. Without
    `masked`, which is faster, every text must have `keys` positions.
    """
    B, T = idx.shape
    rows = torch.arange(B, device=idx.device)
    first = lengths - 1 if T == 1 else 0 * lengths  # position of the first column
    positions = first[:, None] + torch.arange(T, device=idx.device)  # (B, T)
    seen = None
    if masked:
        seen = torch.arange(keys, device=idx.device) <= positions[:, None, :, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Add k and v to the cache, and attend to the cached ones; all (B, nh, T, hs)."""
        for cached, new in zip(cache[layer], (k, v), strict=True):
            if masked:
                cached[rows[:, None], :, positions] = new.transpose(1, 2).to(cached.dtype)
            else:
                cached[:, :, keys - T : keys] = new
        k, v = cache[layer][..., :keys, :].to(q.dtype)  # autocast's dtype is not the cache's
        causal = not masked and T > 1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal)

    return model(idx, where=(rows, lengths - 1 - first), attend=attend, positions=positions)


# ---- weights of a CPU


class PackedLinear(nn.Module):
    """A linear layer with its weight in the layout in which oneDNN multiplies it by `rows` rows."""

    def __init__(self, linear: nn.Linear, rows: int):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute x (..., in) times the weight, plus the bias: (..., out)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack_weights(model: GPT, rows: int) -> None:
    """Pack the weights of a model in fp32 on a CPU, if it decodes several texts at a time.

    Decoding 16 texts takes a quarter less time then, and prefill a tenth more. One text would not
    gain. The model can be neither saved nor trained afterwards.
    """
    head = model.lm_head.weight
    usable = torch.backends.mkldnn.is_available() and head.device.type == "cpu"
    if rows == 1 or head.dtype != torch.float32 or not usable:
        return
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, PackedLinear(module, rows))


# ---- growing texts


@dataclass
class Text:
    """A text that grows token by token."""

    string: str  # the prompt, and the characters drawn so far
    tokens: list[int]
    generator: torch.Generator  # draws the next token
    stop: str = ""  # the text ends before this, if it is not empty; the prompt may contain it
    drawn: int = 0  # number of drawn tokens
    ended: bool = False
    # A character may span tokens: its bytes wait here until it is whole, or the text ends.
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def __post_init__(self) -> None:
        self.prompt = len(self.string)  # number of characters

    def append(self, token: int, is_last: bool) -> None:
        """Add a token; the text ends with the last one, with <|endoftext|>, or before the stop."""
        at_end = token == END_OF_TEXT
        self.tokens.append(token)
        self.drawn += 1
        self.ended = at_end or is_last
        added = b"" if at_end else get_encoding().decode_single_token_bytes(token)
        before = len(self.string)
        self.string += self.decoder.decode(added, final=self.ended)
        # The stop may begin in earlier tokens.
        found = self.string.find(self.stop, max(self.prompt, before - len(self.stop) + 1))
        if self.stop and found >= 0:
            self.string, self.ended = self.string[:found], True

    @property
    def certain(self) -> str:
        """The string without its last characters if they may be the beginning of the stop."""
        last = len(self.string)
        for start in range(max(self.prompt, last - len(self.stop) + 1), last):
            if not self.ended and self.stop.startswith(self.string[start:]):
                return self.string[:start]
        return self.string


@torch.no_grad()
def grow(
    model: GPT,
    texts: list[Text],
    max_new_tokens: int,
    agree: Callable[[int], int] = int,
    decode: Callable[..., Tensor] | None = None,
    **settings: Any,
) -> Iterator[None]:
    """Continue texts of any lengths together; each iteration adds a token to each unfinished text.

    Up to rounding, a text's logits are the same alone and in a batch. `settings` go to
    `probabilities`. The model has to be in evaluation mode; past block_size tokens it reads the
    last block_size. `agree` gets each drawn token and returns the one to use. `decode`: a compiled
    `next_logits`, for one token of each text, always in the same shapes. Raises ValueError for a
    text without tokens, UserError if logits are not finite.
    """
    if not all(text.tokens for text in texts):
        raise ValueError("the prompt is empty: give at least one token, such as <|endoftext|>")
    context, device = model.config.block_size, model.lm_head.weight.device
    longest = max(len(text.tokens) for text in texts) + max_new_tokens
    cache = make_cache(model, len(texts), context if decode else min(context, longest))
    for step in range(max_new_tokens):
        unfinished = [len(text.tokens) for text in texts if not text.ended]
        if not unfinished:
            return
        windows = [text.tokens[-context:] for text in texts]
        lengths = [len(window) for window in windows]
        # Prefill reads the windows, decoding their last tokens. Positions are absolute, so once a
        # window slides, all keys and values change, and each step is a prefill.
        decoding = step > 0 and max(unfinished) <= context
        rows = [torch.tensor(window[-1:] if decoding else window) for window in windows]
        idx = pad_sequence(rows, batch_first=True).to(device)
        compute = decode if decode and decoding else next_logits
        keys = keys_for(context if compute is decode else max(lengths), device)
        # Texts of equal lengths need no mask, and neither does prefill, because padding comes last.
        # Compiled code always has one: without it, it would be compiled again.
        masked = compute is decode or keys > (min if decoding else max)(lengths)
        logits = compute(model, cache, keys, idx, torch.tensor(lengths, device=device), masked)
        logits = logits.float().cpu()  # (B, V)
        if not logits.amax().isfinite():  # NaN is the largest
            raise UserError(
                "the model's logits are not finite: its weights are damaged or have diverged"
            )
        choices = probabilities(logits, [text.tokens for text in texts], **settings)
        for text, tokens, p in zip(texts, *choices, strict=True):
            if not text.ended:
                token = agree(draw(tokens, p, text.generator))
                text.append(token, is_last=step == max_new_tokens - 1)
        yield


# ---- text


def encode(model: GPT, prompt: str) -> list[int]:
    """Return the tokens of a prompt; an empty one begins a document.

    <|endoftext|> is one token here, as in the tokenizer that export.py writes; in a corpus's texts
    it is ordinary text. Raises UserError unless the model's vocabulary is GPT-2's.
    """
    encoding = get_encoding()
    if model.config.n_vocab != encoding.n_vocab:
        raise UserError(
            f"a vocabulary of {model.config.n_vocab} is not that of GPT-2's tokenizer, "
            f"{encoding.n_vocab}; export the model with export.py, and use its own tokenizer in "
            "transformers"
        )
    return encoding.encode(prompt, allowed_special="all") or [END_OF_TEXT]
