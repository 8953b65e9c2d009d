"""Any text of your own: UTF-8 files, each one document after an <|endoftext|>.

python data/text.py book.txt notes.txt --name mine      writes data/mine/mine_train_000000.bin, ...
python train.py --config quickstart.yaml --dataset mine
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports are looked up in the repository, not in data/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pydantic import Field

from data.sources import BadRecords, Source, find_source, read_pieces
from data.token_file import TokenFileError, write_corpus
from data.tokenizer import END_OF_TEXT, SEPARATOR, encode_text
from runtime.cli import Name, Options
from runtime.errors import reported
from runtime.start import start

# Corpora that other scripts here write, and that published results are about.
OURS = ("pydocs", "shakespeare", "fineweb")


class TextOptions(Options):
    """options"""

    files: tuple[Name, ...] = Field(min_length=1)
    """UTF-8 text files"""
    name: Name | None = None
    """name of the corpus, for --dataset (none: the first file's name)"""
    data_dir: Name = "data"
    """folder that holds the corpora"""


def prepare(folder: Path, files: Sequence[Path]) -> int:
    """Write text files as the corpus of a new `folder`; returns the number of tokens.

    A byte order mark at a file's start is left out. Raises TokenFileError for a file that is
    missing, empty or not UTF-8, and for a folder that cannot be written, TokenizerError without
    GPT-2's vocabulary.
    """
    sources = [find_source(path, ".txt") for path in files]
    spelled_out: Counter[str] = Counter()

    def texts(source: Source) -> Iterator[str]:
        for piece in read_pieces(source, "", BadRecords(0)):
            if not piece.text:
                raise TokenFileError(f"{source.path}: is empty; give UTF-8 text files")
            spelled_out[str(source.path)] += piece.text.count(SEPARATOR)
            yield piece.text

    def tokens() -> Iterator[Sequence[int]]:
        for source in sources:
            yield [END_OF_TEXT]
            yield from encode_text(texts(source), source.size, source.path.name)

    count = write_corpus(folder, tokens())
    print_spelled_out(spelled_out)
    return count


def print_spelled_out(times: Mapping[str, int]) -> None:
    """Print a note on the files whose text contains the separator of documents, if there are any,
    given how often each does.
    """
    names = [name for name, n in times.items() if n]
    if names:
        others = f" and {len(names) - 1} more" * (len(names) > 1)
        print(
            f"note: {SEPARATOR} is in the text of {names[0]}{others}, {sum(times.values()):,} "
            "times in all: it was written as ordinary text, in 7 tokens, not as the one token that "
            "begins a document; for that, give each document as a file of its own",
            file=sys.stderr,
        )


def corpus_folder(data_dir: str, name: str) -> Path:
    """Name the folder of a corpus of the user's own. Raises TokenFileError for a name that it
    cannot have.
    """
    folder = Path(data_dir) / name
    is_plain = folder.parent == Path(data_dir) and name != ".." and name.isprintable()
    if not is_plain or name.startswith("-") or name.endswith(".tmp"):
        raise TokenFileError(
            f"--name {name!a}: must be a plain name that --dataset can take, without - at its "
            "beginning or .tmp at its end; use --data_dir for the folder that it is in"
        )
    if name in OURS:
        raise TokenFileError(
            f"--name {name}: is the corpus that data/{name}.py writes; choose another name"
        )
    return folder


def main(options: TextOptions) -> None:
    folder = corpus_folder(options.data_dir, options.name or Path(options.files[0]).stem)
    count = prepare(folder, [Path(file) for file in options.files])
    dataset = shlex.quote(folder.name)
    print(f"{count:,} tokens in {folder}; train on them with --dataset {dataset}")


if __name__ == "__main__":
    OPTIONS = start(TextOptions, description=__doc__, positional="files")
    with reported("stdout", status=1):
        main(OPTIONS)
