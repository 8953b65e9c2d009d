"""All of a run that changes from step to step: in memory, and as a checkpoint's JSON has it."""

import base64
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor

from checkpoint.files import STATE, Tensors, read_json, reading, verify
from config import Config
from model import GPT
from runtime.recent import Recent
from runtime.runlog import LogRow, step_of


@dataclass
class State:
    """Hold all that changes from step to step but the random states, which belong to the process.

    Between `begin_step` and `finish_step` it is that of the step before until the update begins,
    and then neither that one nor the next.
    """

    model: GPT  # without torch.compile and DDP; sharded, with FSDP
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler  # of the loss; does nothing without fp16
    memory_before: float = 0.0  # MiB that the process used before all this was built
    corpus: str = ""  # fingerprint of the training tokens
    step: int = 0  # steps taken
    skipped_steps: int = 0  # of these, left out because loss or norm was not finite
    skipped_spikes: int = 0  # of these, left out because loss or norm was far above the others'
    seconds: float = 0.0  # since the first step began, where max_minutes ends the run
    recent: Recent = field(default_factory=Recent)
    best_val_loss: float | None = None
    checkpoint: Path | None = None  # the newest one that is known to be whole
    is_updating: bool = False  # a step's update has begun and is not complete
    # of the steps that this process has taken
    step_seconds: list[float] = field(default_factory=list)
    last_loss: float = math.nan
    # when the latest step began: steps taken, and the random states of this process
    before_step: tuple[int, dict[str, Any]] | None = None

    @property
    def is_saved(self) -> bool:
        """True if there is a checkpoint of the current step."""
        return self.checkpoint is not None and step_of(self.checkpoint) == self.step

    def begin_step(self, device: torch.device) -> int:
        """Remember the random states, which the step changes; returns the step's number."""
        self.before_step = self.step, take_random_state(device)
        return self.step + 1

    def begin_update(self, metrics: Tensor, config: Config) -> bool:
        """Return whether to make a step's update; if so, weights change from here on.

        metrics: loss and norm (2,), the same on all ranks. Fused AdamW leaves an update out by
        itself where they are not finite, so nothing has to wait for the device; in fp16 the scaler
        judges.
        """
        adamw, *muon = self.optimizers
        reads_first = muon or config.fp16 or config.fsdp or config.skip_spikes
        if adamw.defaults["fused"] and not reads_first and metrics.device.type in ("cpu", "cuda"):
            # The kernel leaves all as it is where this is 1; GradScaler sets it too.
            adamw.found_inf = (~metrics.isfinite().all()).float()  # type: ignore[attr-defined]
            self.is_updating = True
        else:
            loss, norm = metrics.tolist()
            is_spike = self.skipped_spikes < config.skip_spikes and self.recent.spikes(loss, norm)
            self.is_updating = not is_spike if math.isfinite(loss + norm) else config.fp16
        return self.is_updating

    def finish_step(
        self, step: int, loss: float, norm: float, seconds: float, config: Config
    ) -> list[str]:
        """Count a step whose update is complete; returns what is unusual about it, in words."""
        unusual = self.recent.spikes(loss, norm)
        if unusual and self.skipped_spikes < config.skip_spikes:
            self.skipped_spikes += 1
            unusual[-1] += f": left out, {self.skipped_spikes} of {config.skip_spikes}"
        unusual += self.recent.slowness(seconds)
        self.recent.add(loss, norm, seconds)
        self.step_seconds.append(seconds)
        self.step, self.last_loss, self.is_updating = step, loss, False
        return [f"step {step}: {line}" for line in unusual]

    def next_steps(self, config: Config) -> range:
        """Return the numbers of the steps to come: without end where the clock ends the run."""
        return range(self.step + 1, (config.last_step or 10**9) + 1)

    def is_over(self, config: Config) -> bool:
        """True after the run's last step."""
        return config.is_over(self.step, self.seconds)

    def undo_step(self, device: torch.device) -> None:
        """Take back what a step has changed that failed before its update."""
        self.model.zero_grad()
        if self.before_step and self.before_step[0] == self.step:
            put_random_state(self.before_step[1], device)

    def optimizer_tensors(self) -> Tensors:
        """Return the optimizers' state as named tensors, `<parameter>/<name of the state>`."""
        return {
            f"{name}/{key}": value
            for optimizer in self.optimizers
            for name, p in self.model.named_parameters()
            for key, value in optimizer.state.get(p, {}).items()
        }


def _generator(device: torch.device) -> Any:
    """Return the module with the device's random state; None on a CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def take_random_state(device: torch.device) -> dict[str, Any]:
    """Return the random states of this process; PyTorch's are bytes in base64, for JSON."""
    gpu = _generator(device)
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch_cpu": _encode(torch.get_rng_state()),
        "device": device.type,
        "torch_device": gpu and _encode(gpu.get_rng_state()),
    }


def put_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Make this the random state of this process. Raises any Exception for what is none."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_decode(state["torch_cpu"]))
    gpu = _generator(device)
    if gpu and state["device"] == device.type:  # else it was saved on another kind of device
        gpu.set_rng_state(_decode(state["torch_device"]))


def _encode(state: Tensor) -> str:
    return base64.b64encode(bytes(state.numpy())).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


class SavedState(BaseModel):
    """checkpoint.json: a run's state but for the tensors, and what a resume has to agree with."""

    folder: Path = Field(exclude=True)  # of the checkpoint
    step: int = Field(ge=0)
    tokens: int  # trained on so far
    tokens_per_step: int = Field(ge=1)
    best_val_loss: float | None
    skipped_steps: int
    skipped_spikes: int = 0  # these three are not in checkpoints of an earlier version
    seconds: float = 0.0
    recent: list[tuple[float, float]] = []
    corpus: str  # the training tokens' fingerprint
    config: dict[str, Any]
    scaler: dict[str, int | float]  # state of the loss scaler; empty without fp16
    random: list[dict[str, Any]]  # of each rank
    run_id: str | None = None  # of RunFolder; None in checkpoints of an earlier version
    not_logged: LogRow | None = None  # the row of a step that log.csv did not take


def read_state(folder: Path, *parts: str) -> SavedState:
    """Read checkpoint.json, after `verify`. Raises CheckpointError."""
    verify(folder, *parts)
    with reading(folder / STATE):
        return SavedState(**read_json(folder / STATE) | {"folder": folder})
