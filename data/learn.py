"""Learn a vocabulary from text, by Hugging Face's tokenizers."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable

from data.token_file import MAX_VOCAB
from data.vocabulary import BYTES, CHARACTERS, NAMES, WORDS, Vocabulary, to_json

LEARNED_BYTES = 20 * 10**6  # of text, at most
# tokenizers takes memory for each distinct word, and time for its length: a text without spaces is
# one word. So a text is cut before white space if that comes within 1,000 characters.
CUT = re.compile(r".{1,1000}(?!\S)|.{1,1000}", re.DOTALL)


def learn(texts: Iterable[str], size: int | None, characters: bool) -> Vocabulary:
    """Learn a vocabulary of at most `size` tokens: byte pairs, or the commonest characters.

    The 256 bytes and <|endoftext|> are among the tokens, so every text can be encoded. The same
    texts give the same vocabulary on any number of threads.
    """
    sample = every_kth(itertools.chain.from_iterable(map(CUT.findall, texts)), LEARNED_BYTES)
    if characters:
        names = commonest(sample, (size or MAX_VOCAB) - 1)
        return Vocabulary(len(names) + 1, to_json(names, [], CHARACTERS))
    names, merges = byte_pairs(sample, (size or MAX_VOCAB) - 1)
    return Vocabulary(len(names) + 1, to_json(names, merges, WORDS))


def every_kth(texts: Iterable[str], most: int) -> list[str]:
    """Keep every kth text, for the smallest power of two k that leaves at most `most` bytes.

    Half a surrogate pair, which cannot be encoded, becomes a question mark.
    """
    kept, size, k = list[bytes](), 0, 1
    for i, text in enumerate(texts):
        if i % k == 0:
            kept.append(text.encode(errors="replace"))
            size += len(kept[-1])
        if size > most:
            kept, k = kept[::2], 2 * k
            size = sum(map(len, kept))
    return [text.decode() for text in kept]


def commonest(texts: Iterable[str], size: int) -> list[str]:
    """Return the names of the 256 bytes and of the commonest characters that are no byte."""
    seen = Counter(itertools.chain.from_iterable(texts))
    characters = sorted(seen, key=lambda character: (-seen[character], character))
    longer = [character.encode() for character in characters if character > "\x7f"]
    return [*BYTES, *("".join(NAMES[byte] for byte in encoded) for encoded in longer)][:size]


def byte_pairs(texts: Iterable[str], size: int) -> tuple[list[str], list[list[str]]]:
    """Learn a byte-pair encoding of GPT-2's words; returns its tokens and merges, in order."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # no other command needs it

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # <|endoftext|> is added afterwards: here it would get the id 0.
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=[*BYTES], show_progress=False, special_tokens=[]
    )
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    return [*model["vocab"]], model["merges"]
