"""Vocabularies: text to tokens and back. GPT-2's, or a corpus's own in its tokenizer.json, in the
format of Hugging Face's tokenizers.

tiktoken encodes both. Its merges are ranked by the ids of their results, so a tokenizer.json has to
have its ids in the order of its merges.
"""

import functools
import hashlib
import json
import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from data.tokenizer import END_OF_TEXT, SEPARATOR, get_encoding
from runtime.errors import UserError, in_a_line

FILE = "tokenizer.json"  # in the folder of a corpus or checkpoint; without it: GPT-2's
# GPT-2's names of the 256 bytes, in the order of their ids: printable ones are their own names.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = {chr(byte): byte for byte in PRINTABLE}
BYTES |= {chr(256 + i): byte for i, byte in enumerate(OTHERS)}
NAMES = {byte: name for name, byte in BYTES.items()}
# How tokenizer.json describes splitting by GPT-2's pattern, and into single characters
WORDS: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": True,
}
EACH: dict[str, Any] = {
    "type": "Split",
    "pattern": {"Regex": r"[\s\S]"},
    "behavior": "Isolated",
    "invert": False,
}
CHARACTERS = {"type": "Sequence", "pretokenizers": [EACH, WORDS | {"use_regex": False}]}
OF_THREAD = threading.local()


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level vocabulary. Its last token is <|endoftext|>."""

    size: int
    json: str = ""  # content of tokenizer.json; empty for GPT-2's vocabulary

    @property
    def end_of_text(self) -> int:
        """The token between documents."""
        return self.size - 1

    @functools.cached_property
    def identity(self) -> str:
        """The SHA-256 of tokenizer.json; gpt2 for GPT-2's vocabulary."""
        return hashlib.sha256(self.json.encode()).hexdigest() if self.json else "gpt2"

    def __str__(self) -> str:
        """Name the vocabulary, for messages."""
        if not self.json:
            return "GPT-2's vocabulary"
        return f"a vocabulary of {self.size:,} tokens ({self.identity[:8]})"

    def encoding_for(self, n_vocab: int) -> tiktoken.Encoding:
        """Return the encoding for a model of `n_vocab` tokens.

        Raises UserError for another number: the model's vocabulary is not known.
        """
        if n_vocab != self.size:
            raise UserError(
                f"a model of {n_vocab:,} tokens cannot have {self}, of {self.size:,}, so its text "
                "is not known; export the model with export.py, and use its own tokenizer in "
                "transformers"
            )
        return self.encoding

    @property
    def encoding(self) -> tiktoken.Encoding:
        """This thread's encoding. Raises UserError if GPT-2's vocabulary cannot be loaded.

        Two threads with an encoding each tokenize 1.2 to 2 times as fast as two that share one.
        """
        if not self.json:
            return get_encoding()
        loaded = vars(OF_THREAD)
        if self.identity not in loaded:
            loaded[self.identity] = load(self.json)
        return loaded[self.identity]

    def encode(self, text: str) -> np.ndarray:
        """Tokenize a text as ordinary text, (tokens,) uint32. tiktoken releases the GIL."""
        # encode_to_numpy saves a fifth of the time, because it makes no Python list.
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half a surrogate pair, from JSON: becomes U+FFFD
            return np.array(self.encoding.encode_ordinary(text), dtype=np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Bytes that are no UTF-8 become U+FFFD."""
        return self.encoding.decode(tokens)


GPT2 = Vocabulary(END_OF_TEXT + 1)


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read the vocabulary in a folder; without a tokenizer.json it is GPT-2's.

    Raises UserError for a tokenizer.json that another program wrote or that is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return GPT2
    try:
        content = path.read_text(encoding="utf-8")
        return Vocabulary(load(content).n_vocab, content)
    except Exception as error:  # of any kind, as the content may be anything
        raise UserError(
            f"{path}: not a vocabulary of data/text.py ({in_a_line(error)}); restore it"
        ) from None


def named_vocabulary(name: str, data_dir: str) -> Vocabulary:
    """Read the vocabulary of a corpus or run, by its name or folder, or of a checkpoint.

    Raises UserError if there is none.
    """
    for folder in (Path(data_dir, name), Path("logs", name), Path(name)):
        for pattern in ("*.bin", "checkpoint.json", "checkpoints/[!.]*/checkpoint.json"):
            if files := sorted(folder.glob(pattern)):
                return read_vocabulary(files[-1].parent)
    raise UserError(
        f"--vocabulary {name}: no corpus in {data_dir}/ or run with a checkpoint in logs/ has this "
        "name; give such a name, or a folder"
    )


def check_same(run: object, theirs: Vocabulary, corpus: Path, own: Vocabulary) -> None:
    """Raise UserError if the weights of `run` and a corpus have different vocabularies."""
    if theirs != own:
        with_theirs = f"with --vocabulary {shlex.quote(str(run))}"
        raise UserError(
            f"{run} has {theirs}, but the corpus {corpus} has {own}; write the corpus again by "
            f"data/text.py {with_theirs if theirs.json else 'without a vocabulary of its own'}"
        )


def load(content: str) -> tiktoken.Encoding:
    """Make tiktoken's encoding of a tokenizer.json that `to_json` wrote.

    Raises ValueError or the error of a lookup for one that tiktoken would encode differently.
    """
    from tiktoken_ext.openai_public import r50k_pat_str

    parsed = json.loads(content)
    splitting, merges = parsed["pre_tokenizer"], parsed["model"]["merges"]
    names = [*parsed["model"]["vocab"]]
    # tiktoken panics at a byte without a token.
    in_order = [*BYTES, *map("".join, merges), *(names[256:] if splitting == CHARACTERS else [])]
    if names != in_order or splitting not in (WORDS, CHARACTERS):
        raise ValueError("tiktoken would split its text or rank its merges in another way")
    if content != to_json(names, merges, splitting):
        raise ValueError("it was edited, or another program wrote it")
    return tiktoken.Encoding(
        FILE,
        pat_str=r50k_pat_str if splitting == WORDS else r"[\s\S]",
        mergeable_ranks={bytes(BYTES[c] for c in name): i for i, name in enumerate(names)},
        special_tokens={SEPARATOR: len(names)},
        explicit_n_vocab=len(names) + 1,
    )


def to_json(names: Sequence[str], merges: Sequence[Sequence[str]], splitting: Any) -> str:
    """Return tokenizer.json for tokens in the order of their ids, and <|endoftext|> after them."""
    end: dict[str, Any] = {"id": len(names), "content": SEPARATOR, "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {
        "type": "BPE",
        "vocab": {name: i for i, name in enumerate(names)},
        "merges": merges,
        "ignore_merges": not merges,
    }
    content = {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": splitting,
        "post_processor": None,
        "decoder": WORDS,
        "model": model,
    }
    return json.dumps(content, ensure_ascii=False) + "\n"
