"""manifest.json: what a corpus that data/documents.py writes is made of, and, while it is
unfinished, how to go on with it.
"""

from collections.abc import Mapping
from pathlib import Path

import pydantic

from data.token_file import TokenFileError
from runtime.files import write_whole

MANIFEST = "manifest.json"
SOURCES = (
    b',"sources":['  # as `Manifest.write` has it; in a string the quotes would have backslashes
)


class Part(pydantic.BaseModel):
    """A part of a manifest. What it does not know is refused."""

    model_config = pydantic.ConfigDict(extra="forbid")


class Shard(Part):
    """A token file of the corpus."""

    file: str
    tokens: int
    sha256: str


class SourceFile(Part):
    """A file that documents are read from. What is not known before it has been read is None until
    then.
    """

    file: str
    bytes: int
    sha256: str | None = None
    documents: int | None = None
    skipped: int | None = None  # lines or rows without a text
    end_of_text_spelled_out: int | None = (
        None  # how often the text of documents has the separator of documents
    )


class Options(Part):
    """The options that decide the tokens and how they are divided up."""

    text_column: str
    shard_tokens: int
    val_shards: int
    val_shard_tokens: int


class Unfinished(Part):
    """How to go on with a corpus after its last whole shard."""

    command: str
    place: list[int]  # see data/sources.py
    into: int  # tokens of the text that begins at `place` that are in the shards already
    taken: str  # digest of the texts that the shards have from the source at `place`
    modified: int  # when that source was last modified, in nanoseconds


class Manifest(Part):
    """A corpus: its counts, its files, and the files that it was made from."""

    corpus: str
    tokenizer: str = "gpt2"
    options: Options
    documents: int = 0
    skipped: int = 0
    tokens: int = 0
    val_tokens: int = 0
    train_tokens: int = 0
    shards: list[Shard] = []
    sources: list[SourceFile]
    unfinished: Unfinished | None = None

    def write(self, folder: Path) -> None:
        """Write manifest.json, whole or not at all. Raises OSError."""
        write_whole(folder / MANIFEST, self.model_dump_json(exclude_none=True) + "\n")


def read_manifest(folder: Path, *, with_sources: bool = True) -> Manifest | None:
    """The manifest of a corpus; None where there is none. Raises TokenFileError if it cannot be
    understood.

    The sources may be a million: without them, where the corpus is finished, it is read in no time.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(
            (b"" if with_sources else _without_sources(path)) or path.read_bytes()
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise TokenFileError(f"{path}: cannot be read: {error.strerror}") from None
    except pydantic.ValidationError:
        raise TokenFileError(
            f"{path}: damaged, or not written by data/documents.py; restore it, or delete it to "
            f"take the token "
            f"files beside it as they are"
        ) from None


def _without_sources(path: Path) -> bytes:
    """A finished corpus's manifest with its sources left out; nothing where it is not as
    `Manifest.write` writes it.
    """
    with open(path, "rb") as file:
        text, found, _ = file.read(2**24).partition(SOURCES)  # 100,000 shards
        file.seek(max(0, path.stat().st_size - 3))
        return text + found + b"]}" if found and file.read() == b"]}\n" else b""


def check_shards(folder: Path, there: Mapping[str, int]) -> None:
    """Raises TokenFileError unless all token files that the manifest names are `there`, with the
    numbers of tokens that it names.

    A corpus without a manifest is taken as it is.
    """
    manifest = read_manifest(folder, with_sources=False)
    if not manifest:
        return
    if manifest.unfinished:
        raise TokenFileError(f"{folder}: {describe(manifest)}")
    missing = [shard.file for shard in manifest.shards if shard.file not in there]
    if missing:
        others = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise TokenFileError(
            f"{folder}: {missing[0]}{others} missing: {MANIFEST} names {len(manifest.shards)} "
            f"token files; "
            f"restore what is missing, or delete {MANIFEST} to train on the files that are there"
        )
    for shard in manifest.shards:
        if there[shard.file] != shard.tokens:
            raise TokenFileError(
                f"{folder / shard.file}: holds {there[shard.file]:,} tokens, not the "
                f"{shard.tokens:,} that "
                f"{MANIFEST} names; restore it, or delete {MANIFEST} to train on the files that "
                f"are there"
            )


# ---- a corpus that is not finished


def unfinished_folder(folder: Path) -> Path:
    """Where the shards of a corpus lie until it is finished."""
    return folder.with_name(f"{folder.name}.unfinished.tmp")


def unfinished(folder: Path) -> Manifest | None:
    """The manifest of an unfinished corpus that can be gone on with. Raises TokenFileError if it
    cannot be understood.
    """
    where = unfinished_folder(folder)
    try:
        manifest = read_manifest(where)
    except TokenFileError:
        raise TokenFileError(
            f"{where / MANIFEST}: cannot be read, or is damaged; delete {where} to begin "
            f"{folder} anew"
        ) from None
    return manifest if manifest and manifest.shards else None


def describe(manifest: Manifest) -> str:
    """How far an unfinished corpus is, and how to go on."""
    shards = "1 shard is" if len(manifest.shards) == 1 else f"{len(manifest.shards)} shards are"
    command = manifest.unfinished.command if manifest.unfinished else ""
    return (
        f"is not finished: {shards} written, {sum(shard.tokens for shard in manifest.shards):,} "
        f"tokens; go on with: "
        f"{command or 'the command that wrote them'}"
    )
