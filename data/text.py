"""Any text of your own: UTF-8 files, each one document after an <|endoftext|>.

python data/text.py book.txt notes.txt --name mine      writes data/mine/mine_train_000000.bin, ...
python train.py --config quickstart.yaml --dataset mine
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
import io
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from data.token_file import TokenFileError, write_corpus
from data.tokenizer import END_OF_TEXT, SEPARATOR, encode_text
from runtime.errors import reported

OURS = (
    "pydocs",
    "shakespeare",
    "fineweb",
)  # corpora that other scripts here write, and that published results are about


def prepare(folder: Path, sources: list[Path]) -> int:
    """Write the files `sources` as the corpus of a new `folder`; returns the number of tokens.

    A byte order mark at a file's start is left out. Raises TokenFileError for a file that is
    missing, empty or not UTF-8, and for a folder that cannot be written, TokenizerError without
    GPT-2's vocabulary.
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
    if note := spelled_out_note({str(source): n for source, n in spelled_out.items() if n}):
        print(note, file=sys.stderr)
    return count


def spelled_out_note(times: Mapping[str, int]) -> str | None:
    """What to say of the files whose text has the separator of documents, and how often; None if
    there are none.
    """
    if not times:
        return None
    total = sum(times.values())
    others = f" and {len(times) - 1} more" if len(times) > 1 else ""
    return (
        f"note: {SEPARATOR} stands {'once' if total == 1 else f'{total:,} times'} in "
        f"{next(iter(times))}{others}: it was "
        f"written as ordinary text, in 7 tokens, not as the one token that begins a document; "
        f"for that, give each document as "
        f"a file of its own"
    )


def _documents(sources: list[Path], spelled_out: Counter[Path]) -> Iterator[list[int]]:
    """The tokens, in parts; `spelled_out` counts how often each file has the separator of documents
    as text.
    """
    for source in sources:
        yield [END_OF_TEXT]
        yield from encode_text(
            _counted(_pieces(source), source, spelled_out), source.stat().st_size, source.name
        )


def _counted(pieces: Iterable[str], source: Path, spelled_out: Counter[Path]) -> Iterator[str]:
    end = ""  # of the piece before, too short to hold a whole separator
    for piece in pieces:
        spelled_out[source] += (end + piece).count(SEPARATOR)
        end = (end + piece)[1 - len(SEPARATOR) :]
        yield piece


def _pieces(source: Path) -> Iterator[str]:
    """The text a megabyte at a time, so that a file larger than memory works."""
    try:
        with open(source, "rb") as file:
            empty, before = True, os.fstat(file.fileno())
            for piece in decoded(source, file):
                empty = False
                yield piece
            check_unchanged(source, before, os.fstat(file.fileno()))
        if empty:  # but for a byte order mark
            raise TokenFileError(f"{source}: is empty; give UTF-8 text files")
    except OSError as error:
        raise TokenFileError(f"{source}: cannot be read: {error.strerror}") from None


def decoded(source: Path, file: BinaryIO, encoding: str = "utf-8-sig") -> Iterator[str]:
    """The text of an open file a megabyte at a time; `source` is what errors name. Raises
    TokenFileError if it is no text.
    """
    text = io.TextIOWrapper(file, encoding=encoding, newline="")
    try:
        while piece := text.read(2**20):
            if "\0" in piece:
                raise TokenFileError(
                    f"{source}: not UTF-8 text (it holds NUL characters, as UTF-16 and damaged "
                    f"files do); "
                    f"convert it, for example with iconv -f UTF-16LE -t UTF-8, or leave them out "
                    f"with "
                    f"tr -d '\\0'"
                )
            yield piece
    except UnicodeDecodeError as error:
        raise TokenFileError(
            f"{source}: not UTF-8 text ({error.reason}); convert it, for example with iconv"
        ) from None
    finally:
        if not text.closed:
            text.detach()  # the file stays open


def check_unchanged(source: Path, before: os.stat_result, after: os.stat_result) -> None:
    """Raises TokenFileError if a file was changed while it was read."""
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise TokenFileError(
            f"{source}: was changed while it was read; run this again once it stays as it is"
        )


def corpus_folder(data_dir: str, name: str) -> Path:
    """The folder of a corpus of the user's own. Raises TokenFileError for a name that it cannot
    have.
    """
    folder = Path(data_dir) / name
    if folder.parent != Path(data_dir) or name == ".." or folder.suffix == ".tmp":
        raise TokenFileError(
            f"--name {name}: must be a plain name, not one that ends in .tmp; "
            f"use --data_dir for the folder it lies in"
        )
    if name.startswith("-") or not name.isprintable():
        raise TokenFileError(
            f"--name {name!a}: begins with - or has characters that cannot be printed, so that "
            f"--dataset "
            f"could not name it; choose another name"
        )
    if name in OURS:
        raise TokenFileError(
            f"--name {name}: is the corpus that data/{name}.py writes; choose another name"
        )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="UTF-8 text files")
    parser.add_argument("--name", help="name of the corpus, for --dataset [the first file's name]")
    parser.add_argument("--data_dir", default="data", help="folder that holds the corpora [data]")
    args = parser.parse_args()
    name = args.files[0].stem if args.name is None else args.name
    with reported(str(Path(args.data_dir) / name), status=1):
        folder = corpus_folder(args.data_dir, name)
        count = prepare(folder, args.files)
    with reported("stdout"):
        print(
            f"{count:,} tokens in {folder}; train on them with --dataset "
            f"{shlex.quote(folder.name)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
