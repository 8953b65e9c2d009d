"""Generate texts of any lengths together, with a KV cache.

Prefill reads the prompts once and caches their keys and values. Each decode step then reads only
the last token of each text.
"""

import codecs
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tiktoken import Encoding
from torch import Tensor

from model import GPT
from runtime.errors import UserError

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


class KVCache:
    """Keys and values of a batch of texts.

    Attention reads a multiple of `multiple` keys, of which the last ones are masked: cuDNN's, which
    PyTorch takes in bf16 on GPUs since Hopper, builds a plan for each number of keys, so 128 tokens
    share a plan. On a CPU there are no plans, and each key takes time.
    """

    def __init__(self, model: GPT, rows: int, positions: int, multiple: int | None = None):
        c, like = model.config, model.lm_head.weight
        self.device = like.device
        self.multiple = multiple or (1 if like.device.type == "cpu" else 128)
        keys, hs = self.keys_for(positions), c.n_embd // c.n_head
        # of each layer keys and values, (n_layer, 2, B, nh, S, hs), in the model's dtype
        self.layers = torch.zeros(
            c.n_layer, 2, rows, c.n_head, keys, hs, dtype=like.dtype, device=like.device
        )

    def keys_for(self, positions: int) -> int:
        """Return the number of keys that attention reads for `positions`."""
        return -(-positions // self.multiple) * self.multiple


def prefill(model: GPT, cache: KVCache, texts: list[list[int]]) -> Tensor:
    """Read whole texts, and fill the cache; returns logits (B, V) after the last token of each."""
    T = min(cache.keys_for(max(map(len, texts))), model.config.block_size)
    idx = torch.tensor([text + [0] * (T - len(text)) for text in texts], device=cache.device)
    lengths = torch.tensor([[len(text)] for text in texts], device=cache.device)  # (B, 1)
    is_last = torch.arange(1, T + 1, device=cache.device) == lengths  # (B, T), like idx

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Cache k and v, and attend causally, which hides the padding; all (B, nh, T, hs)."""
        keys, values = cache.layers[layer]  # (B, nh, S, hs)
        keys[:, :, :T], values[:, :, :T] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return model(idx, where=is_last, attend=attend)


def decode_step(model: GPT, cache: KVCache, texts: list[list[int]]) -> Tensor:
    """Read the last token of each text, and add it to the cache, which has the earlier ones;
    returns logits (B, V) after it.
    """
    lengths = [len(text) for text in texts]
    idx = torch.tensor([text[-1:] for text in texts], device=cache.device)  # (B, 1)
    last = torch.tensor(lengths, device=cache.device)[:, None] - 1  # (B, 1)
    # Padding, zeros and an earlier text's entries come after a text, and are masked.
    S, mask = cache.keys_for(max(lengths)), None
    if min(lengths) < S:  # without a mask attention is faster
        mask = torch.arange(S, device=cache.device) <= last[..., None, None]  # (B, 1, 1, S)
    rows = torch.arange(len(texts), device=cache.device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Cache k and v, and attend to all S cached positions; q, k, v are (B, nh, 1, hs)."""
        for cached, new in zip(cache.layers[layer], (k, v), strict=True):
            cached[rows, :, last[:, 0]] = new[:, :, 0].to(cached.dtype)
        k, v = cache.layers[layer][..., :S, :].to(q.dtype)  # autocast's dtype is not the cache's
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return model(idx, attend=attend, positions=last)[:, 0]


# ---- growing texts


class Text:
    """A text that grows token by token.

    An empty prompt begins a document. <|endoftext|> is one token in a prompt, as in the tokenizer
    that export.py writes; in a corpus's texts it is ordinary text. The text ends before `stop`,
    which the prompt may contain, unless it is empty.
    """

    def __init__(self, prompt: str, encoding: Encoding, generator: torch.Generator, stop: str = ""):
        self.encoding, self.generator, self.stop = encoding, generator, stop
        self.tokens = encoding.encode(prompt, allowed_special="all") or [encoding.eot_token]
        self.string = prompt  # and the characters drawn so far
        self.prompt = len(prompt)
        self.drawn, self.ended = 0, False  # number of drawn tokens
        # A character may span tokens: its bytes wait here until it is whole, or the text ends.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token: int, is_last: bool) -> None:
        """Add a token; the text ends with the last one, with <|endoftext|>, or before the stop."""
        at_end = token == self.encoding.eot_token
        self.tokens.append(token)
        self.drawn += 1
        self.ended = at_end or is_last
        added = b"" if at_end else self.encoding.decode_single_token_bytes(token)
        self.string += self.decoder.decode(added, final=self.ended)
        if self.stop and (found := self.string.find(self.stop, self.prompt)) >= 0:
            self.string, self.ended = self.string[:found], True

    @property
    def certain(self) -> str:
        """The string without its last characters if they may be the beginning of the stop."""
        if self.ended:
            return self.string
        return self.string[: max(self.prompt, len(self.string) - len(self.stop) + 1)]


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
    last block_size. `agree` gets each drawn token and returns the one to use. Raises UserError if
    logits are not finite.
    """
    context = model.config.block_size
    longest = max(len(text.tokens) for text in texts) + max_new_tokens
    cache = KVCache(model, len(texts), min(context, longest))
    for step in range(max_new_tokens):
        unfinished = [len(text.tokens) for text in texts if not text.ended]
        if not unfinished:
            return
        # Positions are absolute, so once a window slides, all keys and values change, and each step
        # is a prefill.
        read = decode_step if step > 0 and max(unfinished) <= context else prefill
        if model.config.bigram_embed:  # the last token alone does not make a pair
            read = prefill
        logits = read(model, cache, [text.tokens[-context:] for text in texts]).float().cpu()
        if not logits.amax().isfinite():  # NaN is the largest
            raise UserError(
                "the model's logits are not finite: its weights are damaged or have diverged"
            )
        choices = probabilities(logits, **settings)
        for text, tokens, p in zip(texts, *choices, strict=True):
            if not text.ended:
                token = agree(draw(tokens, p, text.generator))
                text.append(token, is_last=step == max_new_tokens - 1)
        yield
