"""Any text of your own: UTF-8 files, each one document after an <|endoftext|>.

    python data/text.py book.txt notes.txt --name mine      writes data/mine/mine_train_000000.bin, ...
    python train.py --config quickstart.yaml --dataset mine
"""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found also when run as a script

from runtime.signals import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()  # also during the imports

from data.token_file import TokenFileError, write_corpus
from data.tokenizer import END_OF_TEXT, encode_text
from runtime.errors import reported

SEPARATOR = "<|endoftext|>"


def prepare(folder: Path, sources: list[Path]) -> int:
    """Write the files `sources` as the corpus of a new `folder`; returns the number of tokens.

    A byte order mark at a file's start is left out. Raises TokenFileError for a file that is missing, empty or not UTF-8, and
    for a folder that cannot be written, TokenizerError without GPT-2's vocabulary.
    """
    for source in sources:
        try:
            empty = source.stat().st_size == 0
        except OSError as error:
            raise TokenFileError(f"{source}: cannot be read: {error.strerror}") from None
        if empty or not source.is_file():
            raise TokenFileError(f"{source}: is empty or not a file; give UTF-8 text files")
    spelled_out: Counter[Path] = Counter()
    count = write_corpus(folder, _documents(sources, spelled_out))
    if files := [source for source in spelled_out if spelled_out[source]]:
        times = "once" if spelled_out.total() == 1 else f"{spelled_out.total():,} times"
        others = f" and {len(files) - 1} more" if len(files) > 1 else ""
        print(f"note: {SEPARATOR} stands {times} in {files[0]}{others}: it was written as ordinary text, in 7 tokens, not as the "
              f"one token that begins a document; for that, give each document as a file of its own", file=sys.stderr)
    return count


def _documents(sources: list[Path], spelled_out: Counter[Path]) -> Iterator[list[int]]:
    """The tokens, in parts; `spelled_out` counts how often each file has the separator of documents as text."""
    for source in sources:
        yield [END_OF_TEXT]
        yield from encode_text(_counted(_pieces(source), source, spelled_out), source.stat().st_size, source.name)


def _counted(pieces: Iterable[str], source: Path, spelled_out: Counter[Path]) -> Iterator[str]:
    end = ""  # of the piece before, too short to hold a whole separator
    for piece in pieces:
        spelled_out[source] += (end + piece).count(SEPARATOR)
        end = (end + piece)[1 - len(SEPARATOR):]
        yield piece


def _pieces(source: Path) -> Iterator[str]:
    """The text a megabyte at a time, so that a file larger than memory works."""
    try:
        with open(source, encoding="utf-8-sig", newline="") as file:
            empty = True
            while piece := file.read(2**20):
                empty = False
                yield piece
        if empty:  # but for a byte order mark
            raise TokenFileError(f"{source}: is empty; give UTF-8 text files")
    except UnicodeDecodeError as error:
        raise TokenFileError(f"{source}: not UTF-8 text ({error.reason}); convert it, for example with iconv") from None
    except OSError as error:
        raise TokenFileError(f"{source}: cannot be read: {error.strerror}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="UTF-8 text files")
    parser.add_argument("--name", help="name of the corpus, for --dataset [the first file's name]")
    parser.add_argument("--data_dir", default="data", help="folder that holds the corpora [data]")
    args = parser.parse_args()
    folder = Path(args.data_dir) / (args.name or args.files[0].stem)
    with reported(str(folder), status=1):
        if folder.parent != Path(args.data_dir) or folder.name == ".." or folder.suffix == ".tmp":
            raise TokenFileError(f"--name {args.name or folder.name}: must be a plain name, not one that ends in .tmp; "
                                 f"use --data_dir for the folder it lies in")
        count = prepare(folder, args.files)
        print(f"{count:,} tokens in {folder}; train on them with --dataset {shlex.quote(folder.name)}", flush=True)


if __name__ == "__main__":
    main()
