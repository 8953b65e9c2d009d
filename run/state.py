"""The state of a run: in memory, and as tensors and numbers in a checkpoint."""

import base64
import math
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from checkpoint.files import (
    MODEL,
    OPTIMIZER,
    Tensors,
    copy_tensors,
)
from checkpoint.saved import SavedState
from config import Config
from model import GPT
from runtime.clock import mark_time, seconds_between, slowness

# attributes of State that checkpoint.json has under the same names
COUNTS = (
    "step",
    "best_val_loss",
    "validated",
    "problem",
    "skipped_steps",
    "skipped_overflows",
    "seconds",
)


class Figures(NamedTuple):
    """Figures of a step, tensors () on the device. To add a figure, add a field."""

    loss: Tensor  # mean over all micro-steps and ranks, in nats per token
    norm: Tensor  # norm of the gradient before clipping


class TakenStep(NamedTuple):
    """A step whose figures are read."""

    step: int  # from 1
    figures: dict[str, float]  # by name: the fields of Figures, lr and dt_ms
    notes: list[str]  # lines on a skipped update or a slow step
    problem: str  # why the update was skipped; "" if it was made
    is_fatal: bool  # more updates were skipped than `skip_nonfinite` allows


@dataclass
class State:
    """Everything that changes from step to step, except the random states of the process.

    From `begin_update` to `end_step` it is inconsistent; before, it is the previous step's. On CUDA
    `settle` reads a step's figures later: in the next `begin_update`, or earlier if needed.
    """

    model: GPT  # without torch.compile and DDP; sharded, with FSDP
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler  # scales the loss in fp16, else does nothing
    memory_before: float = 0.0  # MiB that the process used before all this was built
    corpus: str = ""  # fingerprint of the training tokens
    step: int = 0  # steps taken
    skipped_steps: int = 0  # updates skipped because loss or norm was not finite
    skipped_overflows: int = 0  # skipped_steps because of an overflow in fp16
    seconds: float = 0.0  # since the first step began, counted if max_minutes is set
    best_val_loss: float | None = None
    validated: str = ""  # fingerprint and number of the tokens of validation losses
    problem: str = ""  # why the last step's update was skipped
    checkpoint: Path | None = None  # the newest one that is known to be whole
    is_updating: bool = False  # a step's update has begun and is not complete
    # these two describe the steps that this process has taken
    step_seconds: list[float] = field(default_factory=list)
    last_loss: float = math.nan
    stopping: bool = False  # a rank was asked to stop
    taken: deque[TakenStep] = field(default_factory=deque)  # counted, not logged yet
    # the latest step until `settle`: learning rate, figures, when it began and ended
    pending: tuple[float, Tensor, Any, Any] | None = None
    # the random states of this process after its latest step
    random_state: dict[str, Any] = field(default_factory=dict)

    def begin_update(self, loss: Tensor, norm: Tensor, config: Config) -> bool:
        """Return whether to make a step's update; if so, weights change from here on.

        The update is skipped if loss or norm is not finite. Fused optimizers skip it on the device,
        so nothing has to wait; for other optimizers the host waits for loss and norm. In fp16 the
        scaler skips too.
        """
        # The device computes this step's gradients meanwhile, so it is not idle.
        self.settle(config)
        is_sound = torch.isfinite(loss) & torch.isfinite(norm)
        fused = all(optimizer.defaults.get("fused") for optimizer in self.optimizers)
        if fused and not config.fsdp and loss.device.type != "mps":
            for optimizer in self.optimizers:
                # If this is 1, a fused kernel changes nothing; GradScaler sets it too.
                optimizer.found_inf = (~is_sound).float()  # type: ignore[attr-defined]
            self.is_updating = True
        else:
            self.is_updating = bool(is_sound)
        return self.is_updating

    def end_step(self, lr: float, figures: Figures, asked: Tensor, start: Any) -> None:
        """Count a step whose update is under way. `asked`: above 0 if a rank was asked to stop."""
        values = torch.stack([*figures, asked]).to("cpu", non_blocking=True)
        self.pending = lr, values, start, mark_time(asked.device)
        self.step, self.is_updating = self.step + 1, False
        self.random_state = take_random_state(asked.device)

    def settle(self, config: Config) -> None:
        """Wait for the figures of the latest step, unless they are read, and add it to `taken`."""
        if self.pending is None:
            return
        lr, values, start, end = self.pending
        self.pending, seconds = None, seconds_between(start, end)
        *numbers, asked = values.tolist()
        figures = dict(zip(Figures._fields, numbers, strict=True))
        figures |= {"lr": lr, "dt_ms": seconds * 1e3}
        loss, norm = figures["loss"], figures["norm"]
        self.stopping = self.stopping or asked > 0
        notes, problem, is_fatal = [], "", False
        if not math.isfinite(loss + norm):
            self.skipped_steps += 1
            scale = self.scaler.get_scale()
            # The scaler halves its scale at an overflow. If that does not help, the model is at
            # fault.
            if config.fp16 and math.isfinite(loss) and scale >= 0.5:
                self.skipped_overflows += 1
                problem = "its gradients overflow in fp16"
                notes = [f"fp16 overflow, update skipped; loss scale now {scale:.10g}"]
            else:
                count = self.skipped_steps - self.skipped_overflows
                problem, is_fatal = "its loss or norm is not finite", count > config.skip_nonfinite
                notes = [f"the loss is {loss}, the gradient norm {norm}, the learning rate {lr:g}"]
                if not is_fatal:
                    notes[-1] += f": skipped, {count} of at most {config.skip_nonfinite}"
        notes += slowness(seconds, self.step_seconds)
        self.step_seconds.append(seconds)
        self.last_loss = loss
        notes = [f"step {self.step}: {note}" for note in notes]
        self.taken.append(TakenStep(self.step, figures, notes, problem, is_fatal))

    def is_over(self, config: Config) -> bool:
        """True after the run's last step."""
        return config.is_over(self.step, self.seconds)

    def tensors(self) -> dict[str, Tensors]:
        """Return all tensors of the run that a checkpoint keeps, by file and name.

        Saving, resuming, check.py, the estimate and the tests go over this: another file is one
        more entry, whose tensors exist from the first step on. All ranks have to call it.
        """
        weights = self.model.state_dict()  # after an evaluation this makes FSDP shard them again
        if self.model.config.tie_weights:
            del weights["lm_head.weight"]
        moments = {
            f"{name}/{key}": value
            for optimizer in self.optimizers
            for name, p in self.model.named_parameters()
            for key, value in optimizer.state.get(p, {}).items()
        }
        return {MODEL: weights, OPTIMIZER: moments}

    def load(self, file: Path, tensors: Tensors) -> None:
        """Restore the tensors of a file. Raises CheckpointError if they do not fit.

        All ranks have to call it, each with all tensors, and keep their shards. Load the weights
        last: the optimizers create their state by a step, which may change weights.
        """
        if file.name == OPTIMIZER and tensors:  # it has none if every update was skipped
            self._create_optimizer_state()
        copy_tensors(tensors, self.tensors()[file.name], file)

    def _create_optimizer_state(self) -> None:
        """Let the optimizers create their state, by a step with zero gradients.

        All ranks have to call it, as Muon's ranks share a step.
        """
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.zeros_like(p)
            optimizer.step()
            optimizer.zero_grad()

    def validate_on(self, tokens: str) -> bool:
        """Return whether validation losses were of other tokens; if so, forget the best one."""
        were_of_others = self.validated not in ("", tokens)
        if were_of_others:
            self.best_val_loss = None
        self.validated = tokens
        return were_of_others

    def numbers(self) -> dict[str, Any]:
        """Return the rest of the state, except random states, as checkpoint.json has it."""
        counts = {name: getattr(self, name) for name in COUNTS}
        return counts | {"scaler": self.scaler.state_dict()}

    def load_numbers(self, saved: SavedState) -> None:
        """Restore `numbers`."""
        for name in COUNTS:
            setattr(self, name, getattr(saved, name))
        if saved.scaler:
            self.scaler.load_state_dict(saved.scaler)


def take_random_state(device: torch.device) -> dict[str, Any]:
    """Return the random states of this process; PyTorch's are bytes in base64, for JSON."""
    of_device = None
    if device.type != "cpu":
        of_device = _encode(torch.get_device_module(device).get_rng_state())
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch_cpu": _encode(torch.get_rng_state()),
        "device": device.type,
        "torch_device": of_device,
    }


def put_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the random states of this process."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_decode(state["torch_cpu"]))
    # The checkpoint may come from another kind of device.
    if state["torch_device"] and state["device"] == device.type:
        torch.get_device_module(device).set_rng_state(_decode(state["torch_device"]))


def _encode(state: Tensor) -> str:
    return base64.b64encode(bytes(state.numpy())).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
