"""Tiny Shakespeare, the corpus of the published logs: 1,115,394 bytes, 338,025 GPT-2 tokens (public
domain).

    python data/shakespeare.py                    downloads it and writes data/shakespeare/shakespeare_train_000000.bin
    python data/shakespeare.py --source FILE      the same from a copy of the text

train.py does this by itself the first time it is asked for `dataset: shakespeare`.
"""

import os
import sys

sys.path.insert(
    0, os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
)  # found also when run as a script

from runtime.signals import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()  # first of all: imports take a moment

import argparse
import hashlib
import urllib.request
from http.client import HTTPException
from pathlib import Path

from data.token_file import TokenFileError, write_corpus
from data.tokenizer import encode_text
from runtime.errors import in_a_line, reported

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
REMEDY = "fetch that file by other means and run: python data/shakespeare.py --source FILE"
BYTES = 1_115_394
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def prepare(folder: Path, source: Path | None = None) -> int:
    """Write the corpus, downloaded or from the file `source`, to a new `folder`; returns the number
    of tokens.

    Raises TokenFileError if the text cannot be had or is another text, TokenizerError without
    GPT-2's vocabulary.
    """
    try:
        if source:
            with open(source, "rb") as file:
                text = file.read(BYTES + 1)  # no more, as a device may have no end
        else:
            text = urllib.request.urlopen(URL, timeout=20).read()
    except (
        OSError,
        HTTPException,
        ValueError,
    ) as error:  # ValueError: a proxy or redirection that is no address
        if source and isinstance(error, OSError):
            raise TokenFileError(f"{source}: cannot be read: {error.strerror}") from None
        raise TokenFileError(
            f"tiny Shakespeare could not be downloaded from {URL} ({in_a_line(error)}); {REMEDY}"
        ) from None
    digest = hashlib.sha256(text).hexdigest()
    if digest != SHA256:
        raise TokenFileError(
            f"{source or URL}: not tiny Shakespeare: SHA-256 {digest}, expected {SHA256}"
            + ("" if source else f"; {REMEDY}")
        )
    return write_corpus(folder, encode_text([text.decode()], len(text), "tiny Shakespeare"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--source", type=Path, metavar="FILE", help="a copy of the text, instead of downloading it"
    )
    parser.add_argument("--data_dir", default="data", help="folder that holds the corpora [data]")
    args = parser.parse_args()
    folder = Path(args.data_dir) / "shakespeare"
    with reported(str(folder), status=1):
        count = prepare(folder, args.source)
    with reported("stdout"):
        print(f"{count:,} tokens in {folder}", flush=True)


if __name__ == "__main__":
    main()
