"""checkpoint.json: everything in a checkpoint except tensors."""

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from checkpoint.files import STATE, CheckpointError, read_json, reading, refusing, verify
from config import Config
from data.vocabulary import GPT2, Vocabulary, read_vocabulary
from runtime.cli import ConfigError, load
from runtime.console import log


class SavedState(BaseModel):
    """checkpoint.json: the state of a run without tensors, its options and its corpus."""

    folder: Path = Field(exclude=True)  # the folder that was read
    vocabulary: Vocabulary = Field(GPT2, exclude=True)  # in a file of its own
    step: int = Field(ge=0)
    tokens: int  # trained on so far
    tokens_per_step: int
    best_val_loss: float | None
    skipped_steps: int
    validated: str = ""  # these four are not in checkpoints of an earlier version
    problem: str = ""
    skipped_overflows: int = 0
    seconds: float = 0.0
    corpus: str  # the training tokens' fingerprint
    config: dict[str, Any]
    scaler: dict[str, int | float]  # state of the loss scaler; empty without fp16
    random: list[dict[str, Any]]  # one entry per rank

    @property
    def run(self) -> Path:
        """The folder of the run that saved it."""
        return self.folder.parent.parent

    def note_unknown(self) -> None:
        """Note each option of the run that this code lacks."""
        for name in self.config:
            if name not in Config.model_fields:
                log.warning(f"{self.folder}: has {name}, an option that this code lacks")


def read_state(folder: Path, *files: str) -> SavedState:
    """Read checkpoint.json, after `verify`. Raises CheckpointError.

    Options that are not in it have their defaults.
    """
    verify(folder, *files)
    vocabulary = read_vocabulary(folder)
    with reading(folder / STATE):
        saved = SavedState(
            **read_json(folder / STATE) | {"folder": folder, "vocabulary": vocabulary}
        )
    named = re.fullmatch(r"(best|step)_(\d+)", folder.name)
    if named and int(named[2]) != saved.step:
        raise CheckpointError(
            f"{folder}: has step {saved.step}; rename it to {named[1]}_{saved.step:06d}"
        )
    known = {name: saved.config[name] for name in Config.model_fields if name in saved.config}
    with refusing(f"{folder / STATE}: its options are not valid", ConfigError):
        # With `resume`, options that contradict each other on this number of ranks may pass.
        options = load(Config, known | {"resume": "auto"})
    saved.config |= options.model_dump(mode="json", exclude={"resume"})
    return saved
