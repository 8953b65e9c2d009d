"""Predict how fast a stage of a ladder is, before it is timed, and keep the prediction."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from measure.interleaved.process import in_fresh_process
from measure.ladder.stages import Stage
from runtime.files import write_json
from runtime.report import machine

FILE = "predicted.json"  # in a ladder's folder
SHARES = ("predicted_arithmetic", "predicted_memory", "predicted_launches")  # of a step


class Rates(BaseModel):
    """Hold what a device reaches. measure/ladder/probe.py measures it; a data sheet says more."""

    tflops: dict[str, float]  # of a large matmul, by dtype; `tf32` where there is one
    gigabytes_per_s: float = Field(gt=0)  # read and written by a copy
    launch_us: float  # of the smallest operation


class Prediction(BaseModel):
    """Hold the seconds that a step is predicted to take, by what limits its operations."""

    tokens: int
    arithmetic: float
    memory: float
    launches: float

    @property
    def tokens_per_sec(self) -> float:
        """Return the predicted speed."""
        return self.tokens / (self.arithmetic + self.memory + self.launches)

    def shares(self) -> dict[str, float]:
        """Return which share of the step each of SHARES is predicted to take."""
        limits = (self.arithmetic, self.memory, self.launches)
        return {name: seconds / sum(limits) for name, seconds in zip(SHARES, limits, strict=True)}


class Predicted(BaseModel):
    """Hold what a ladder's folder keeps: where its rates were measured, and all predictions."""

    where: str = ""  # before 2026-11-24 it was not kept
    rates: Rates
    stages: dict[str, Prediction]


def predict_stages(stages: Sequence[Stage], folder: Path, device: Mapping[str, Any]) -> None:
    """Predict the stages of one rank, and keep that in the folder; print each factor.

    `device`: what `probe` found. Where it found no rates, nothing is predicted. A ladder that goes
    on keeps the rates with which it began, before anything was timed.
    """
    alone = [stage for stage in stages if stage.ranks == 1]
    where, kept = f"{machine()}; {device.get('device')}", read(folder)
    if not kept or kept.where != where:
        (folder / FILE).unlink(missing_ok=True)
        try:
            kept = Predicted(where=where, rates=Rates.model_validate(device), stages={})
        except ValidationError:
            print("note: nothing is predicted, as the device's rates could not be measured")
            return
    configs = [stage.config for stage in alone]
    found, problem = in_fresh_process("measure.ladder.roofline:predict_all", configs, kept.rates)
    if problem:
        print(f"note: nothing is predicted: {problem}")
        return
    predicted = dict(zip((stage.name for stage in alone), found, strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    kept.stages |= predicted
    write_json(folder / FILE, kept.model_dump())
    for stage in alone:
        if stage.base in alone:
            base = predicted[stage.base.name]
            factor = predicted[stage.name].tokens_per_sec / base.tokens_per_sec
            print(f"predicted: {stage.name} {factor:.2f} times as fast as {stage.base.name}")


def read(folder: Path) -> Predicted | None:
    """Read what is kept in the folder; None if nothing is, or if it cannot be read."""
    try:
        return Predicted.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def predictions(folder: Path) -> dict[str, Prediction]:
    """Return what was predicted of the stages of a ladder, by name; empty if nothing was."""
    kept = read(folder)
    return kept.stages if kept else {}
