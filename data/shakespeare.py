"""Tiny Shakespeare, the corpus of the published logs: 1,115,394 bytes, 338,025 GPT-2 tokens (public
domain).

    python data/shakespeare.py                  downloads it and writes data/shakespeare/
    python data/shakespeare.py --source FILE    the same from a copy of the text

train.py does this by itself the first time it is asked for `dataset: shakespeare`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports are looked up in the repository, not in data/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hashlib
import urllib.request
from http.client import HTTPException

from data.token_file import TokenFileError, write_corpus
from data.tokenizer import encode_text
from runtime.cli import Name, Options
from runtime.errors import in_a_line, reported
from runtime.start import start

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
HINT = "fetch that file by other means and run: python data/shakespeare.py --source FILE"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class ShakespeareOptions(Options):
    """options"""

    source: Name | None = None
    """a copy of the text, instead of downloading it"""
    data_dir: Name = "data"
    """folder that holds the corpora"""


def prepare(folder: Path, source: Path | None = None) -> int:
    """Write the corpus, downloaded or from the file `source`, to a new `folder`; returns the number
    of tokens.

    Raises TokenFileError if the text cannot be had or is another text, TokenizerError without
    GPT-2's vocabulary.
    """
    try:
        text = source.read_bytes() if source else urllib.request.urlopen(URL, timeout=20).read()
    # ValueError: a proxy or redirection that is not an address
    except (OSError, HTTPException, ValueError) as error:
        if source:
            raise TokenFileError(f"{source}: cannot be read: {in_a_line(error)}") from None
        raise TokenFileError(
            f"tiny Shakespeare could not be downloaded from {URL} ({in_a_line(error)}); {HINT}"
        ) from None
    if (digest := hashlib.sha256(text).hexdigest()) != SHA256:
        hint = "" if source else f"; {HINT}"
        raise TokenFileError(
            f"{source or URL}: not tiny Shakespeare: SHA-256 {digest}, expected {SHA256}{hint}"
        )
    return write_corpus(folder, encode_text([text.decode()], len(text), "tiny Shakespeare"))


def main(options: ShakespeareOptions) -> None:
    folder = Path(options.data_dir) / "shakespeare"
    count = prepare(folder, Path(options.source) if options.source else None)
    with reported("stdout"):
        print(f"{count:,} tokens in {folder}")


if __name__ == "__main__":
    OPTIONS = start(ShakespeareOptions, description=__doc__)
    with reported(OPTIONS.data_dir, status=1):
        main(OPTIONS)
