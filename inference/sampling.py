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
from torch import Tensor

from data.tokenizer import END_OF_TEXT, get_encoding
from model import GPT
from runtime.errors import UserError

# The number of keys is a multiple of this; the rest is masked. cuDNN's attention, which PyTorch
# takes in bf16 on GPUs since Hopper, builds a plan for each number, so 128 tokens share a plan.
# On a CPU there are no plans, and each key takes time.
MULTIPLE = 128


# ---- from logits to a token


def probabilities(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the likeliest next tokens (B, K) of texts with logits (B, V), and their probabilities
    (B, K), which may add up to less than 1.

    The options are transformers', and applied in its order.
    """
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


def prefill(model: GPT, cache: list[Tensor], texts: list[list[int]]) -> Tensor:
    """Read whole texts, and fill the cache; returns logits (B, V) after the last token of each."""
    device = model.lm_head.weight.device
    T = min(keys_for(max(map(len, texts)), device), model.config.block_size)
    idx = torch.tensor([text + [0] * (T - len(text)) for text in texts], device=device)  # (B, T)
    last = torch.tensor([len(text) - 1 for text in texts], device=device)
    rows = torch.arange(len(texts), device=device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Cache k and v, and attend causally, which hides the padding; all (B, nh, T, hs)."""
        keys, values = cache[layer]  # (B, nh, S, hs)
        keys[:, :, :T], values[:, :, :T] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return model(idx, where=(rows, last), attend=attend)


def decode_step(model: GPT, cache: list[Tensor], texts: list[list[int]]) -> Tensor:
    """Read the last token of each text, and add it to the cache, which has the earlier ones;
    returns logits (B, V) after it.
    """
    device, lengths = model.lm_head.weight.device, [len(text) for text in texts]
    idx = torch.tensor([text[-1:] for text in texts], device=device)  # (B, 1)
    last = torch.tensor(lengths, device=device) - 1
    rows, S = torch.arange(len(texts), device=device), keys_for(max(lengths), device)
    # Padding, zeros and an earlier text's entries come after a text. Without a mask it is faster.
    is_even = min(lengths) == S
    seen = None if is_even else torch.arange(S, device=device) <= last[:, None, None, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Cache k and v, and attend to all S cached positions; q, k, v are (B, nh, 1, hs)."""
        for cached, new in zip(cache[layer], (k, v), strict=True):
            cached[rows, :, last] = new[:, :, 0].to(cached.dtype)
        k, v = cache[layer][..., :S, :].to(q.dtype)  # autocast's dtype is not the cache's
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    return model(idx, where=(rows, 0 * rows), attend=attend, positions=last[:, None])


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
    **settings: Any,
) -> Iterator[None]:
    """Continue texts of any lengths together; each iteration adds a token to each unfinished text.

    Up to rounding, a text's logits are the same alone and in a batch. `settings` go to
    `probabilities`. The model has to be in evaluation mode; past block_size tokens it reads the
    last block_size. `agree` gets each drawn token and returns the one to use. Raises ValueError for
    a text without tokens, UserError if logits are not finite.
    """
    if not all(text.tokens for text in texts):
        raise ValueError("the prompt is empty: give at least one token, such as <|endoftext|>")
    context = model.config.block_size
    longest = max(len(text.tokens) for text in texts) + max_new_tokens
    cache = make_cache(model, len(texts), min(context, longest))
    for step in range(max_new_tokens):
        unfinished = [len(text.tokens) for text in texts if not text.ended]
        if not unfinished:
            return
        # Positions are absolute, so once a window slides, all keys and values change, and each step
        # is a prefill.
        read = decode_step if step > 0 and max(unfinished) <= context else prefill
        logits = read(model, cache, [text.tokens[-context:] for text in texts]).float().cpu()
        if not logits.amax().isfinite():  # NaN is the largest
            raise UserError(
                "the model's logits are not finite: its weights are damaged or have diverged"
            )
        choices = probabilities(logits, **settings)  # logits are (B, V)
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
