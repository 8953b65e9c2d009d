"""Write tiny Shakespeare, the corpus of the published logs: 338,025 GPT-2 tokens (public domain).

    python data/shakespeare.py                  downloads it and writes data/shakespeare/
    python data/shakespeare.py --source FILE    the same from a copy of the text

train.py runs this if the corpus is missing.
"""

import sys

if __name__ == "__main__":
    sys.path[0] += "/.."  # import from the repository, not from data/

from pathlib import Path

from data.download import read_known_file
from data.token_file import write_corpus
from data.vocabulary import GPT2
from runtime.cli import Name, Options
from runtime.errors import reported
from runtime.start import start

NAME = "tiny Shakespeare"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
HINT = (
    f"fetch {URL} by other means and run: python data/shakespeare.py --source FILE; or train on "
    "text that needs no network: --dataset pydocs"
)
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class ShakespeareOptions(Options):
    """options"""

    source: Name | None = None
    """a copy of the text (default: download it)"""
    data_dir: Name = "data"
    """folder of the corpora"""


def prepare(folder: Path, source: str | Path | None = None) -> int:
    """Write the corpus, downloaded or from the file `source`, to a new `folder`; returns the number
    of tokens.

    Raises UserError if the text cannot be read or is another text, or without GPT-2's vocabulary.
    """
    text = read_known_file(NAME, str(source or URL), SHA256, HINT)
    return write_corpus(folder, [GPT2.encode(text.decode())])


if __name__ == "__main__":
    OPTIONS = start(ShakespeareOptions)
    FOLDER = Path(OPTIONS.data_dir) / "shakespeare"
    with reported():
        print(f"{prepare(FOLDER, OPTIONS.source):,} tokens in {FOLDER}")
