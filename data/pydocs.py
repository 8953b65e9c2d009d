"""Write the default corpus: sentences of the installed docstrings of Python, PyTorch and NumPy.

    python data/pydocs.py                         writes data/pydocs/pydocs_train_000000.bin

train.py runs this if the corpus is missing.
"""

import sys

if __name__ == "__main__":
    sys.path[0] += "/.."  # import from the repository, not from data/

import hashlib
import importlib.util
import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from data.token_file import write_corpus
from data.vocabulary import GPT2
from runtime.cli import Name, Options
from runtime.errors import reported
from runtime.start import start


class PydocsOptions(Options):
    """options"""

    data_dir: Name = "data"
    """folder of the corpora"""


PACKAGES = ("torch", "numpy")  # required, so their sources are always installed
# Folders of other packages and of tests
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "testing"}
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
MARKUP = re.compile(r":[a-z:]+:(?=`)|[`*~]")  # such as :class:`~torch.Tensor`, **bold**
SENTENCES = re.compile(r"[A-Z][A-Za-z0-9 ,.;:'\"()/!?-]*[.!?]")


def prepare(folder: Path) -> int:
    """Write the corpus to a new `folder`, each source file after an <|endoftext|>; returns the
    number of tokens.

    Code, tables and formulas are left out, and each paragraph is kept once, so that the model has
    not seen a validation split at the tail. For the same reason the files are in a fixed random
    order. Raises UserError.
    """
    roots = {"python": Path(sysconfig.get_path("stdlib"))}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            roots[package] = Path(spec.origin).parent
    texts, seen = dict[bytes, str](), set[str]()
    for package, root in roots.items():
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if LEFT_OUT.isdisjoint(name.parts):
                new = dict.fromkeys(p for p in paragraphs(path) if p not in seen)
                seen.update(new)
                texts[hashlib.sha256(f"{package}/{name}".encode()).digest()] = "\n\n".join(new)
    documents = [text for _, text in sorted(texts.items()) if text]
    encoded = GPT2.encoding.encode_ordinary_batch(documents)
    return write_corpus(folder, ([GPT2.end_of_text, *document] for document in encoded))


def paragraphs(path: Path) -> Iterator[str]:
    """Yield the paragraphs of sentences in a Python file's docstrings, each on one line."""
    for docstring in DOCSTRING.findall(path.read_text(encoding="utf-8", errors="replace")):
        for lines in inspect.cleandoc(docstring).split("\n\n"):
            paragraph = " ".join(MARKUP.sub("", lines).split())
            is_list = " : " in paragraph or "--" in paragraph or paragraph.count(": ") > 1
            if SENTENCES.fullmatch(paragraph) and paragraph.count(" ") > 6 and not is_list:
                yield paragraph


if __name__ == "__main__":
    FOLDER = Path(start(PydocsOptions).data_dir) / "pydocs"
    with reported():
        print(f"{prepare(FOLDER):,} tokens in {FOLDER}")
