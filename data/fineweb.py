"""Download FineWeb-Edu (Penedo et al. 2024), educational web pages: 10 billion GPT-2 tokens in
shards of 100 million, 200 MB each.

    python data/fineweb.py                   downloads the validation shard and 1 training shard
    python data/fineweb.py --shards 99       the whole sample
    python data/fineweb.py --source FOLDER   tokenizes parquet files of the original instead

The shards (https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2) are token files. Finished ones
are not downloaded again. The original is https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu;
see data/text.py.
"""

import sys

if __name__ == "__main__":
    sys.path[0] += "/.."  # import from the repository, not from data/

import contextlib
from pathlib import Path

from pydantic import Field

from data import text
from data.manifest import MANIFEST
from data.token_file import TokenFileError, count_tokens
from runtime.cli import Name, Options, ZeroIsOff
from runtime.errors import UserError, in_a_line, reported
from runtime.files import sole_writer
from runtime.start import start

REPOSITORY = "kjj0/finewebedu10B-gpt2"


class DownloadOptions(Options):
    """download or tokenize"""

    shards: int | None = Field(None, ge=1, le=99)
    """training shards to download, 1 to 99 (default: 1)"""
    source: tuple[Name, ...] = ()
    """parquet files of the original, or folders of them, to tokenize instead"""


class FinewebOptions(text.WritingOptions, DownloadOptions):
    """All options of this command."""

    val_every: ZeroIsOff = 100
    """keep every Nth document for validation; 0 keeps none"""


def prepare(folder: Path, shards: int) -> int:
    """Download the validation shard and the first training shards to `folder`; returns the number
    of training tokens.

    Whole shards are kept. Raises TokenFileError if a download fails or is not a whole token file,
    for a folder with shards that were tokenized here, and for one that another process is writing.
    """
    with sole_writer(folder):
        if (folder / MANIFEST).exists():
            raise TokenFileError(
                f"{folder}: holds a corpus that was written with --source; choose another place "
                "with --data_dir, or delete it first"
            )
        names = ["finewebedu_val_000000.bin"]
        names += [f"finewebedu_train_{i:06d}.bin" for i in range(1, shards + 1)]
        for i, name in enumerate(names, start=1):
            print(f"shard {i} of {len(names)}: {name}", file=sys.stderr)
            with contextlib.suppress(TokenFileError, FileNotFoundError):
                count_tokens(folder / name)
                continue
            (folder / name).unlink(missing_ok=True)  # the download would keep a damaged file
            try:
                from huggingface_hub import hf_hub_download

                hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=folder)
            except Exception as error:  # from the hub, or its HTTP library
                raise TokenFileError(
                    f"{name} could not be downloaded from the Hugging Face dataset {REPOSITORY} "
                    f"({in_a_line(error)}); run this again to resume, or train on a text of your "
                    "own: python data/text.py FILE"
                ) from None
            count_tokens(folder / name)
        return sum(count_tokens(folder / name) for name in names[1:])


def main(options: FinewebOptions) -> None:
    folder = Path(options.data_dir) / "fineweb"
    writing = set(text.WritingOptions.model_fields) - {"data_dir"}
    useless = options.model_fields_set & ({"shards"} if options.source else writing)
    if useless:
        with_or_without = "with" if options.source else "without"
        raise UserError(f"no effect {with_or_without} --source: {', '.join(sorted(useless))}")
    if options.source:
        text.prepare(folder, options.source, options)
        return
    count = prepare(folder, options.shards or 1)
    print(f"{count:,} training tokens in {folder}")


if __name__ == "__main__":
    OPTIONS = start(FinewebOptions)
    with reported(interrupted=f"interrupted; {text.RESUME_HINT}"):
        main(OPTIONS)
