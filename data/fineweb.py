"""FineWeb-Edu (Penedo et al. 2024), educational web pages: 10 billion GPT-2 tokens in shards of 100
million, 200 MB each.

    python data/fineweb.py                        downloads the validation shard and 1 training shard to data/fineweb
    python data/fineweb.py --shards 99            the whole sample
    python data/fineweb.py --source FOLDER        tokenizes parquet files of the original instead: any part of it, of any size

The shards are token files already (https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2). What
is there is not downloaded again. The original is
https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu; see data/documents.py.
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
import contextlib
from pathlib import Path

from data.documents import AGAIN, add_options, write
from data.manifest import MANIFEST
from data.token_file import TokenFileError, corpus_writer, count_tokens
from runtime.errors import in_a_line, reported

REPOSITORY = "kjj0/finewebedu10B-gpt2"
COLUMN = "text"  # of the original


def prepare(folder: Path, shards: int) -> int:
    """Download the validation shard and the first training shards to `folder`; returns the number
    of training tokens.

    A shard that is there and whole is kept. Raises TokenFileError if one cannot be had or is not a
    whole token file, and for a folder with shards that were tokenized here, or that another process
    is writing.
    """
    with corpus_writer(folder):
        if (folder / MANIFEST).exists():
            raise TokenFileError(
                f"{folder}: holds a corpus that was written with --source; choose another place "
                f"with "
                f"--data_dir, or delete it first"
            )
        names = [
            "finewebedu_val_000000.bin",
            *(f"finewebedu_train_{i:06d}.bin" for i in range(1, shards + 1)),
        ]
        for i, name in enumerate(names, start=1):
            print(f"shard {i} of {len(names)}: {name}", file=sys.stderr)
            if is_whole(folder / name):
                continue
            with contextlib.suppress(OSError):
                (folder / name).unlink()  # what is damaged would be kept
            try:
                from huggingface_hub import hf_hub_download

                hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=folder)
            except Exception as error:  # its HTTP library's, or its own
                raise TokenFileError(
                    f"{name} could not be downloaded from the Hugging Face dataset {REPOSITORY} "
                    f"({in_a_line(error)}); run this again to go on, or train on a text of your "
                    f"own: "
                    f"python data/text.py FILE"
                ) from None
            count_tokens(folder / name)
        return sum(count_tokens(folder / name) for name in names[1:])


def is_whole(path: Path) -> bool:
    """Whether a token file is there, with the size that its header says."""
    try:
        return count_tokens(path) > 0
    except TokenFileError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--shards",
        type=int,
        choices=range(1, 100),
        metavar="N",
        help="training shards to download, 1 to 99 [1]",
    )
    parser.add_argument(
        "--source",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="parquet files of the original, or folders of them, to tokenize; the options below are about this",
    )
    add_options(parser)
    args = parser.parse_args()
    if args.source and args.shards:
        parser.error("--shards is how many ready shards to download: it has no effect on --source")
    if not args.source and (
        args.shard_tokens or args.val_shards != 1 or args.workers or args.skip_bad
    ):
        parser.error(
            "--shard_tokens, --val_shards, --workers and --skip_bad have no effect without --source"
        )
    folder = Path(args.data_dir) / "fineweb"
    with reported(str(folder), status=1, interrupted=f"interrupted; {AGAIN}"):
        if args.source:
            write(folder, args.source, COLUMN, args, "data/fineweb.py")
            return
        count = prepare(folder, args.shards or 1)
    with reported("stdout"):
        print(f"{count:,} training tokens in {folder}", flush=True)


if __name__ == "__main__":
    main()
