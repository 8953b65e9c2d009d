"""manifest.json: the token files of a corpus. sources.jsonl: the files that were tokenized."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import pydantic

from data.token_file import TokenFileError

MANIFEST, SOURCES = "manifest.json", "sources.jsonl"


class Shard(pydantic.BaseModel):
    """A token file of the corpus."""

    file: str
    tokens: int


class Manifest(pydantic.BaseModel):
    """A corpus. Manifests of earlier versions have more fields."""

    documents: int = 0
    vocabulary: str | None = None  # its identity
    shards: list[Shard]


def read_manifest(folder: Path) -> Manifest | None:
    """Read a corpus's manifest; None if it has none. Raises TokenFileError for a damaged one."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except pydantic.ValidationError:
        raise TokenFileError(f"{path}: damaged or edited; restore or delete it") from None


def check_shards(folder: Path, tokens: Mapping[str, int]) -> None:
    """Raise TokenFileError unless `tokens` has every token file of the manifest with its number of
    tokens. A folder without a manifest is not checked.
    """
    manifest = read_manifest(folder)
    for shard in manifest.shards if manifest else []:
        if (count := tokens.get(shard.file)) != shard.tokens:
            problem = "is missing" if count is None else f"has {count:,} tokens"
            raise TokenFileError(
                f"{folder / shard.file}: {problem}; {MANIFEST} lists it with {shard.tokens:,} "
                f"tokens; restore it, or delete {MANIFEST} to train on the files that are there"
            )


class Source(pydantic.BaseModel):
    """A line of sources.jsonl: a file that was tokenized, and the corpus's counts at its end."""

    file: str = ""
    sha256: str = ""
    options: dict[str, str | int | None] = {}  # the ones that determine the tokens and token files
    documents: int = 0
    characters: int = 0
    skipped: int = 0
    tokens: dict[str, int] = {"train": 0, "val": 0}


def read_sources(folder: Path) -> list[Source]:
    """Read sources.jsonl, up to a line that a killed writer left incomplete."""
    sources = list[Source]()
    with contextlib.suppress(OSError, ValueError):  # pydantic's errors are ValueErrors
        for line in (folder / SOURCES).read_bytes().splitlines():
            sources.append(Source.model_validate_json(line))
    return sources
