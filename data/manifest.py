"""manifest.json: the token files of a corpus. sources.jsonl: the files that were tokenized."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import pydantic

from data.token_file import TokenFileError

MANIFEST, SOURCES = "manifest.json", "sources.jsonl"
UNFINISHED = ".unfinished.tmp"


class Shard(pydantic.BaseModel):
    """A token file of the corpus."""

    file: str
    tokens: int


class Manifest(pydantic.BaseModel):
    """A corpus. Manifests of earlier versions have more fields."""

    documents: int = 0
    shards: list[Shard]


def check_shards(folder: Path, tokens: Mapping[str, int]) -> None:
    """Raise TokenFileError unless `tokens` has every token file of the manifest with its number of
    tokens. A folder without a manifest is not checked.
    """
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return
    except pydantic.ValidationError:
        raise TokenFileError(f"{path}: damaged or edited; restore or delete it") from None
    for shard in manifest.shards:
        if (count := tokens.get(shard.file)) != shard.tokens:
            problem = "is missing" if count is None else f"has {count:,} tokens"
            raise TokenFileError(
                f"{folder / shard.file}: {problem}; {MANIFEST} lists it with {shard.tokens:,} "
                f"tokens; restore it, or delete {MANIFEST} to train on the files that are there"
            )


# ---- an unfinished corpus


class Begun(pydantic.BaseModel):
    """First line of sources.jsonl: how the corpus is written."""

    command: str
    options: dict[str, str | int | None]  # the ones that determine the tokens and token files


class Source(pydantic.BaseModel):
    """A further line: a file that was read to its end, and the corpus's counts up to there."""

    file: str = ""
    sha256: str = ""
    documents: int = 0
    characters: int = 0
    skipped: int = 0
    tokens: dict[str, int] = {"train": 0, "val": 0}


def unfinished_folder(folder: Path) -> Path:
    """Return the folder of a corpus's token files until it is finished."""
    return folder.with_name(folder.name + UNFINISHED)


def read_progress(folder: Path) -> tuple[Begun, list[Source]] | None:
    """Read sources.jsonl of an unfinished corpus; None if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):  # pydantic's errors are ValueErrors
        first, *lines = (folder / SOURCES).read_bytes().split(b"\n")[:-1]
        return Begun.model_validate_json(first), [*map(Source.model_validate_json, lines)]
    return None


def how_to_finish(folder: Path) -> str | None:
    """Return how to resume an unfinished corpus; None if it was not begun."""
    progress = read_progress(unfinished_folder(folder))
    return f"is not finished; resume with: {progress[0].command}" if progress else None
