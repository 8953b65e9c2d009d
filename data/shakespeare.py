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

from data.download import read_known_file
from data.token_file import write_corpus
from data.tokenizer import encode
from runtime.cli import Name, Options
from runtime.errors import reported
from runtime.start import start

NAME = "tiny Shakespeare"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
HINT = f"fetch {URL} by other means and run: python data/shakespeare.py --source FILE"
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

    Raises UserError if the text cannot be had or is another text, TokenizerError without GPT-2's
    vocabulary.
    """
    text = read_known_file(NAME, str(source or URL), SHA256, HINT)
    return write_corpus(folder, [encode(text.decode())])


def main(options: ShakespeareOptions) -> None:
    folder = Path(options.data_dir) / "shakespeare"
    count = prepare(folder, Path(options.source) if options.source else None)
    print(f"{count:,} tokens in {folder}")


if __name__ == "__main__":
    OPTIONS = start(ShakespeareOptions, description=__doc__)
    with reported("stdout", status=1):
        main(OPTIONS)
