"""Any text of your own: UTF-8 files, each one document after an <|endoftext|>.

    python data/text.py book.txt notes.txt --name mine      writes data/mine/mine_train_000000.bin, ...
    python train.py --config quickstart.yaml --dataset mine
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found also when run as a script

from data.token_file import TokenFileError, write_corpus
from data.tokenizer import END_OF_TEXT, encode_text
from runtime.errors import reported


def prepare(folder: Path, sources: list[Path]) -> int:
    """Write the files `sources` as the corpus of a new `folder`; returns the number of tokens.

    Raises TokenFileError for a file that is missing, empty or not UTF-8, TokenizerError without GPT-2's vocabulary.
    """
    for source in sources:
        try:
            empty = source.stat().st_size == 0
        except OSError as error:
            raise TokenFileError(f"{source}: cannot be read: {error.strerror}") from None
        if empty or not source.is_file():
            raise TokenFileError(f"{source}: is empty or not a file; give UTF-8 text files")
    return write_corpus(folder, _documents(sources))


def _documents(sources: list[Path]) -> Iterator[list[int]]:
    for source in sources:
        yield [END_OF_TEXT]
        yield from encode_text(_pieces(source), source.stat().st_size, source.name)


def _pieces(source: Path) -> Iterator[str]:
    """The text a megabyte at a time, so that a file larger than memory works."""
    try:
        with open(source, encoding="utf-8", newline="") as file:
            while piece := file.read(2**20):
                yield piece
    except UnicodeDecodeError as error:
        raise TokenFileError(f"{source}: not UTF-8 text ({error.reason}); convert it, for example with iconv") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="UTF-8 text files")
    parser.add_argument("--name", help="name of the corpus, for --dataset [the first file's name]")
    parser.add_argument("--data_dir", default="data", help="folder that holds the corpora [data]")
    args = parser.parse_args()
    folder = Path(args.data_dir) / (args.name or args.files[0].stem)
    with reported(str(folder), status=1):
        if folder.parent != Path(args.data_dir):
            raise TokenFileError(f"--name {args.name}: must be a plain name; use --data_dir for the folder it lies in")
        print(f"{prepare(folder, args.files):,} tokens in {folder}; train on them with --dataset {folder.name}")


if __name__ == "__main__":
    main()
