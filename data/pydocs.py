"""Write the default corpus: sentences of the installed docstrings of Python, PyTorch and NumPy.

    python data/pydocs.py                       writes data/pydocs, in GPT-2's vocabulary
    python data/pydocs.py --own_vocabulary      writes data/pydocs4096, in 4,096 tokens of its own

train.py runs this if one of them is missing.
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

from data.learn import learn
from data.token_file import new_corpus, write_corpus, write_token_file
from data.vocabulary import FILE as VOCABULARY
from data.vocabulary import GPT2, Vocabulary
from runtime.cli import Name, Options
from runtime.errors import reported
from runtime.files import atomic_folder
from runtime.start import start


class PydocsOptions(Options):
    """options"""

    own_vocabulary: bool = False
    """learn a vocabulary of 4,096 tokens from the text, and keep a tenth of it for validation"""
    data_dir: Name = "data"
    """folder of the corpora"""


VOCAB_SIZE = 4096
OWN = f"pydocs{VOCAB_SIZE}"  # the corpus in a vocabulary of its own
PACKAGES = ("torch", "numpy")  # required, so their sources are always installed
# Folders of other packages and of tests
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "testing"}
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
MARKUP = re.compile(r":[a-z:]+:(?=`)|[`*~]")  # such as :class:`~torch.Tensor`, **bold**
SENTENCES = re.compile(r"[A-Z][A-Za-z0-9 ,.;:'\"()/!?-]*[.!?]")


def prepare(folder: Path) -> int:
    """Write the corpus to a new `folder` in GPT-2's vocabulary; returns the number of tokens.

    Each source file is a document. Raises UserError.
    """
    return write_corpus(folder, _encoded(GPT2, documents()))


def prepare_own(folder: Path) -> int:
    """Write the corpus to a new `folder`, a tenth of its documents for validation, in a vocabulary
    learned from the others; returns the number of tokens. Raises UserError.
    """
    texts = documents()
    n_val = len(texts) // 10
    vocabulary = learn(texts[:-n_val], VOCAB_SIZE, characters=False)
    splits = {"train": texts[:-n_val], "val": texts[-n_val:]}
    with new_corpus(folder), atomic_folder(folder, replace=False) as unfinished:
        (unfinished / VOCABULARY).write_text(vocabulary.json, encoding="utf-8")
        return sum(
            write_token_file(
                unfinished / f"{folder.name}_{split}_000000.bin", _encoded(vocabulary, part)
            )
            for split, part in splits.items()
        )


def _encoded(vocabulary: Vocabulary, texts: list[str]) -> Iterator[list[int]]:
    """Yield the tokens of each text after an <|endoftext|>."""
    encoded = vocabulary.encoding.encode_ordinary_batch(texts)
    return ([vocabulary.end_of_text, *tokens] for tokens in encoded)


def documents() -> list[str]:
    """Return the sentences of each source file that has any.

    Code, tables and formulas are left out, and each paragraph is kept once, so that the model has
    not seen a validation split at the tail. For the same reason the files are in a fixed random
    order.
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
    return [text for _, text in sorted(texts.items()) if text]


def paragraphs(path: Path) -> Iterator[str]:
    """Yield the paragraphs of sentences in a Python file's docstrings, each on one line."""
    for docstring in DOCSTRING.findall(path.read_text(encoding="utf-8", errors="replace")):
        for lines in inspect.cleandoc(docstring).split("\n\n"):
            paragraph = " ".join(MARKUP.sub("", lines).split())
            is_list = " : " in paragraph or "--" in paragraph or paragraph.count(": ") > 1
            if SENTENCES.fullmatch(paragraph) and paragraph.count(" ") > 6 and not is_list:
                yield paragraph


if __name__ == "__main__":
    OPTIONS = start(PydocsOptions)
    FOLDER = Path(OPTIONS.data_dir) / (OWN if OPTIONS.own_vocabulary else "pydocs")
    with reported():
        count = (prepare_own if OPTIONS.own_vocabulary else prepare)(FOLDER)
        print(f"{count:,} tokens in {FOLDER}")
