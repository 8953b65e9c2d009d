"""The embedded corpus: the language reference that ships inside every CPython, as `help()` shows
it. No download.

    python data/pydocs.py                         writes data/pydocs/pydocs_train_000000.bin

train.py does this by itself the first time it is asked for `dataset: pydocs`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports are looked up in the repository, not in data/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hashlib

from data.token_file import TokenFileError, write_corpus
from data.tokenizer import END_OF_TEXT, get_encoding
from runtime.cli import Name, Options
from runtime.errors import reported
from runtime.start import start


class PydocsOptions(Options):
    """options"""

    data_dir: Name = "data"
    """folder that holds the corpora"""


def prepare(folder: Path) -> int:
    """Write the corpus to a new `folder`, each topic after an <|endoftext|>; returns the number of
    tokens.

    A quarter of the text is in several topics; each paragraph is kept once, so that a
    validation split off the tail holds text the model has not seen. For the same reason the topics'
    order is arbitrary, though always the same. Raises TokenFileError or TokenizerError.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TokenFileError(
            "this Python lacks pydoc_data, the corpus pydocs; "
            "train on a text of your own: python data/text.py FILE"
        ) from None
    seen: set[str] = set()
    texts = []
    for name in sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest()):
        paragraphs = []
        for paragraph in topics[name].split("\n\n"):
            if paragraph not in seen:
                paragraphs.append(paragraph)
            if len(paragraph) > 80:  # shorter ones, such as "Examples:", may come again
                seen.add(paragraph)
        texts.append("\n\n".join(paragraphs))
    documents = get_encoding().encode_ordinary_batch(texts)
    return write_corpus(folder, ([END_OF_TEXT, *document] for document in documents))


def main(options: PydocsOptions) -> None:
    folder = Path(options.data_dir) / "pydocs"
    count = prepare(folder)
    print(f"{count:,} tokens in {folder}")


if __name__ == "__main__":
    OPTIONS = start(PydocsOptions, description=__doc__)
    with reported("stdout", status=1):
        main(OPTIONS)
