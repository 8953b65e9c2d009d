"""Text from a model: choosing tokens, and growing texts of any lengths together."""

import codecs
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.tokenizer import END_OF_TEXT, get_encoding
from inference.kv_cache import KVCache
from inference.validation import Autocast, evaluating
from model import GPT
from runtime.errors import UserError

# Chooses a token, given the logits (V,) on the CPU, the number of the text, and its tokens so far.
Choose = Callable[[Tensor, int, list[int]], int]
# Computes the logits (B, V) of the next tokens, see `next_logits`.
Decode = Callable[[GPT, Tensor, KVCache, Tensor, Tensor], Tensor]


# ---- from logits to a token


def filter_logits(
    logits: Tensor,
    text: list[int],
    temperature: float,
    top_k: int | None,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Return the scores (V,) of what follows a text, -inf for tokens that are not drawn from.

    Each option is as transformers defines it, in the order in which transformers applies them.
    """
    # Keskar et al. 2019 ("CTRL", section 4.1) divide by the penalty. Like transformers this
    # multiplies a negative logit by it, as dividing would make its token likelier.
    if repetition_penalty != 1:
        seen = torch.tensor(list(set(text)))
        of_seen, penalty = logits[seen], repetition_penalty
        penalized = torch.where(of_seen > 0, of_seen / penalty, of_seen * penalty)
        logits = logits.index_copy(0, seen, penalized)
    if temperature < 1e-6:  # dividing by it could overflow: only the likeliest token stays
        return torch.full_like(logits, -math.inf).index_fill(0, logits.argmax(), 0.0)
    scores = logits / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        scores = scores.masked_fill(logits < least, -math.inf)
    # Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1: the fewest
    # likeliest tokens, at least one, whose probabilities add up to top_p.
    if top_p < 1:
        ordered = scores[scores > -math.inf].sort(descending=True).values
        p = F.softmax(ordered, dim=-1)
        n = int((p.cumsum(-1) - p < top_p).sum())  # tokens before which top_p is not reached
        scores = scores.masked_fill(scores < ordered[max(n, 1) - 1], -math.inf)
    return scores


def draw(scores: Tensor, generator: torch.Generator) -> int:
    """Draw a token with the probabilities that the softmax of the scores (V,) gives."""
    return int(torch.multinomial(F.softmax(scores, dim=-1), 1, generator=generator))


def seeded(seed: int) -> torch.Generator:
    """Make a random state of its own: sampling never touches the global one."""
    return torch.Generator().manual_seed(seed)


def chooser(generators: Sequence[torch.Generator], **settings: Any) -> Choose:
    """Make a `Choose` that draws each text from its own generator: it is what it would be alone.

    `settings`: those of `filter_logits`.
    """
    return lambda logits, row, text: draw(filter_logits(logits, text, **settings), generators[row])


# ---- growing texts


def next_logits(model: GPT, idx: Tensor, cache: KVCache, positions: Tensor, ends: Tensor) -> Tensor:
    """Return logits (B, V) after the token `ends` (B,) of each row of idx (B, T).

    The rows' tokens are at `positions` (B, T) of their texts.
    """
    cache.begin(positions)
    rows = torch.arange(len(idx), device=idx.device)
    return model(idx, where=(rows, ends), attend=cache.attend, positions=positions)


@torch.no_grad()
def stream(
    model: GPT,
    texts: Sequence[list[int]],
    max_new_tokens: int,
    stop_token: int | None,
    choose: Choose,
    decode: Decode | None = None,
) -> Iterator[list[int | None]]:
    """Continue prompts of any lengths together: yield a token for each, step after step, and
    append it to its prompt.

    None for texts that have ended, at stop_token. Each text gets the logits that it gets alone.
    Past block_size tokens, the model, which is in evaluation mode, reads the last block_size.
    `decode`: a compiled `next_logits`, for one token of each text and always the same shapes.
    Raises ValueError for an empty prompt, UserError for weights that make no probabilities.
    """
    if not all(texts):
        raise ValueError("the prompt is empty: give at least one token, such as <|endoftext|>")
    context, device = model.config.block_size, model.lm_head.weight.device
    longest = max(map(len, texts)) + max_new_tokens
    cache = KVCache(model, len(texts), context if decode else min(context, longest))
    unfinished = list(range(len(texts)))
    for step in range(max_new_tokens):
        windows = [text[-context:] for text in texts]
        # Prefill reads the windows, decoding the last tokens. Positions are absolute: once a
        # window slides, every key and value changes, and each step is a prefill.
        decoding = step > 0 and max(len(texts[row]) for row in unfinished) <= context
        compute = decode if decode and decoding else next_logits
        cache.attend_to(context if compute is decode else max(map(len, windows)))
        idx, positions, ends = ragged_batch(windows, decoding, device)
        logits = compute(model, idx, cache, positions, ends).float().cpu()  # (B, V)
        if not logits.isfinite().all():
            raise UserError(
                "the model's logits are not finite: its weights are damaged or have diverged"
            )
        new = {row: choose(logits[row], row, texts[row]) for row in unfinished}
        for row, token in new.items():
            texts[row].append(token)
        yield [new.get(row) for row in range(len(texts))]
        unfinished = [row for row, token in new.items() if token != stop_token]
        if not unfinished:
            return


def ragged_batch(
    windows: list[list[int]], only_last: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return texts of different lengths, or only their last tokens, for `next_logits`: tokens (B,
    T), padded at the end, their positions (B, T), and the column of each row's last (B,).
    """
    last = torch.tensor([len(window) - 1 for window in windows], device=device)
    if only_last:
        idx = torch.tensor([window[-1:] for window in windows], device=device)
        return idx, last[:, None], torch.zeros_like(last)
    idx = pad_sequence([torch.tensor(window) for window in windows], batch_first=True).to(device)
    return idx, torch.arange(idx.size(1), device=device).expand_as(idx), last


# ---- text


def encode(model: GPT, prompt: str) -> list[int]:
    """Return the tokens of a prompt; an empty one is the beginning of a document.

    Raises UserError if the model's vocabulary is not that of GPT-2's tokenizer.
    """
    encoding = get_encoding()
    if model.config.n_vocab != encoding.n_vocab:
        raise UserError(
            f"a vocabulary of {model.config.n_vocab} is not that of GPT-2's tokenizer, "
            f"{encoding.n_vocab}"
        )
    return encoding.encode_ordinary(prompt) or [END_OF_TEXT]


def decode_stream(steps: Iterable[list[int | None]]) -> Iterator[list[str | None]]:
    """Yield what each step's tokens add to their texts, None for texts that have ended.

    Bytes of a character that is not whole yet are held back, until the text ends.
    """
    encoding = get_encoding()
    decoders: list[codecs.IncrementalDecoder] = []

    def piece(token: int | None, decoder: codecs.IncrementalDecoder) -> str | None:
        if token is None:
            return None
        if token == END_OF_TEXT:
            return decoder.decode(b"", final=True)
        return decoder.decode(encoding.decode_single_token_bytes(token))

    for tokens in steps:
        decoders = decoders or [codecs.getincrementaldecoder("utf-8")("replace") for _ in tokens]
        yield list(map(piece, tokens, decoders))
    yield [decoder.decode(b"", final=True) for decoder in decoders]


def sample_text(
    model: GPT,
    prompt: str,
    max_new_tokens: int,
    seed: int,
    agree: Callable[[int], int] = int,
    autocast: Autocast = nullcontext,
) -> str:
    """Return a text that begins with the prompt and ends at its <|endoftext|>, if it gets there.

    `agree` is given each token and returns the one that counts: ranks that share a model by FSDP
    have to draw the same text, and on different processors rounding may let them draw others.
    Raises UserError.
    """
    own, text = chooser([seeded(seed)], temperature=0.8, top_k=50), encode(model, prompt)
    with evaluating(model), autocast():
        steps = stream(
            model, [text], max_new_tokens, END_OF_TEXT, lambda *given: agree(own(*given))
        )
        return prompt + "".join(piece or "" for (piece,) in decode_stream(steps))
