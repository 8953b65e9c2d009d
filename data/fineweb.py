"""FineWeb-Edu (Penedo et al. 2024), educational web pages: 10 billion GPT-2 tokens in shards of 100 million, 200 MB each.

    python data/fineweb.py                        downloads the validation shard and 1 training shard to data/fineweb
    python data/fineweb.py --shards 99            the whole sample

The shards are token files already (https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2). What is there is not
downloaded again.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # found also when run as a script

from runtime.interrupt import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()  # first of all: imports take a moment

import argparse
from pathlib import Path

from data.token_file import TokenFileError, count_tokens
from runtime.errors import in_a_line, reported

REPOSITORY = "kjj0/finewebedu10B-gpt2"


def prepare(folder: Path, shards: int) -> int:
    """Download the validation shard and the first training shards to `folder`; returns the number of training tokens.

    Raises TokenFileError if a shard cannot be had or is not a whole token file.
    """
    names = ["finewebedu_val_000000.bin", *(f"finewebedu_train_{i:06d}.bin" for i in range(1, shards + 1))]
    for i, name in enumerate(names, start=1):
        print(f"shard {i} of {len(names)}: {name}", file=sys.stderr)
        try:
            from huggingface_hub import hf_hub_download

            hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=folder)
        except Exception as error:  # its HTTP library's, or its own
            raise TokenFileError(f"{name} could not be downloaded from the Hugging Face dataset {REPOSITORY} "
                                 f"({in_a_line(error)}); run this again to go on, or train on a text of your own: "
                                 f"python data/text.py FILE") from None
        count_tokens(folder / name)
    return sum(count_tokens(folder / name) for name in names[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shards", type=int, default=1, choices=range(1, 100), metavar="N", help="training shards, 1 to 99 [1]")
    parser.add_argument("--data_dir", default="data", help="folder that holds the corpora [data]")
    args = parser.parse_args()
    folder = Path(args.data_dir) / "fineweb"
    with reported(str(folder), status=1):
        count = prepare(folder, args.shards)
    with reported("stdout"):
        print(f"{count:,} training tokens in {folder}", flush=True)


if __name__ == "__main__":
    main()
