"""manifest.json: what a corpus of data/documents.py is made of; while it is unfinished, also how to
resume.
"""

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path

import pydantic

from data.token_file import TokenFileError
from runtime.files import write_whole

MANIFEST = "manifest.json"


class Part(pydantic.BaseModel):
    """A part of a manifest. Unknown keys are refused."""

    model_config = pydantic.ConfigDict(extra="forbid")


class Shard(Part):
    """A token file of the corpus."""

    file: str = pydantic.Field(pattern=r"^[^/]+\.bin$")  # in the corpus's folder
    tokens: int
    sha256: str


class SourceFile(Part):
    """A file that documents are read from. What is None is not known before the file's end."""

    file: str
    bytes: int
    sha256: str | None = None
    documents: int | None = None
    skipped: int | None = None  # lines or rows without a text
    end_of_text_spelled_out: int | None = None  # how often the text contains <|endoftext|>


class CorpusOptions(Part):
    """The options that decide the tokens and how they are divided up."""

    text_column: str
    shard_tokens: int
    val_shards: int
    val_shard_tokens: int


class Unfinished(Part):
    """Where the shards that are written end, and the command that resumes."""

    command: str
    source: int = 0  # index of the source that the last of their tokens are from
    batches: int = 0  # of this source that they have tokens of (see data/sources.py)
    into: int = 0  # how many tokens of the last of these batches they have
    taken: str = ""  # digest of these batches
    seal: str = ""  # digest of the rest of the manifest: by an edited one, tokens would be lost


class Manifest(Part):
    """A corpus: its counts, its files, and the files that it was made from."""

    corpus: str
    tokenizer: str = "gpt2"
    options: CorpusOptions
    documents: int = 0
    skipped: int = 0
    tokens: int = 0
    val_tokens: int = 0
    train_tokens: int = 0
    shards: list[Shard]
    sources: list[SourceFile]
    unfinished: Unfinished | None = None

    def write(self, folder: Path) -> None:
        """Write manifest.json, whole or not at all. Raises OSError."""
        if self.unfinished:
            self.unfinished.seal = self.digest()
        write_whole(folder / MANIFEST, self.model_dump_json(exclude_none=True) + "\n")

    def digest(self) -> str:
        """Hash all but the seal of an unfinished corpus."""
        rest = self.model_dump_json(exclude={"unfinished": {"seal"}})
        return hashlib.sha256(rest.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a corpus; None where there is none. Raises TokenFileError if it is
    damaged, or that of an unfinished corpus and edited.
    """
    path = folder / MANIFEST
    with contextlib.suppress(pydantic.ValidationError):
        try:
            manifest = Manifest.model_validate_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not manifest.unfinished or manifest.unfinished.seal == manifest.digest():
            return manifest
    raise TokenFileError(
        f"{path}: damaged or edited, or not written by data/documents.py; restore it, or delete "
        "it: the token files beside it are then taken as they are, an unfinished corpus is begun "
        "anew"
    )


def check_shards(folder: Path, tokens: Mapping[str, int]) -> None:
    """Raises TokenFileError unless the token files that the manifest names are in `tokens`, with
    the numbers of tokens that it names.

    A corpus without a manifest is taken as it is.
    """
    manifest = read_manifest(folder)
    if not manifest:
        return
    if manifest.unfinished:
        raise TokenFileError(f"{folder}: {describe(manifest)}")
    for shard in manifest.shards:
        count = tokens.get(shard.file)
        if count != shard.tokens:
            problem = "is missing" if count is None else f"holds {count:,} tokens"
            raise TokenFileError(
                f"{folder / shard.file}: {problem}; {MANIFEST} names it with {shard.tokens:,} "
                f"tokens; restore it, or delete {MANIFEST} to train on the files that are there"
            )


# ---- an unfinished corpus


def unfinished_folder(folder: Path) -> Path:
    """Name the folder that holds the shards of a corpus until it is finished."""
    return folder.with_name(f"{folder.name}.unfinished.tmp")


def unfinished(folder: Path) -> Manifest | None:
    """Read the manifest of an unfinished corpus that has shards. Raises TokenFileError if it is
    damaged.
    """
    manifest = read_manifest(unfinished_folder(folder))
    return manifest if manifest and manifest.shards else None


def describe(manifest: Manifest) -> str:
    """Say how far an unfinished corpus is, and how to resume."""
    tokens, place = sum(shard.tokens for shard in manifest.shards), manifest.unfinished
    return (
        f"is not finished: {len(manifest.shards)} shards, {tokens:,} tokens; resume with: "
        f"{place.command if place else 'the command that wrote them'}"
    )
