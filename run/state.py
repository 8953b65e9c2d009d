"""A run, and its state: in memory, and as tensors and numbers for a checkpoint."""

import base64
import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoint.files import MODEL, OPTIMIZER, Tensors, copy_tensors
from checkpoint.saved import SavedState
from config import Config
from data.vocabulary import GPT2, Vocabulary
from dataloader import TokenStream
from model import GPT
from run.expected import ExpectedLosses
from runtime.world import World

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


@dataclass
class State:
    """Everything that changes from step to step, except the random states of the process.

    From `begin_update` to `end_step` it is inconsistent; before, it is the previous step's.
    """

    model: GPT  # without torch.compile and DDP; sharded, with FSDP
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler  # scales the loss in fp16, else does nothing
    memory_before: float = 0.0  # MiB that the process used before all this was built
    corpus: str = ""  # fingerprint of the training tokens
    step: int = 0  # steps taken
    skipped_steps: int = 0  # updates skipped because loss or norm was not finite
    skipped_overflows: int = 0  # skipped_steps because of an overflow in fp16
    seconds: float = 0.0  # since the first step began, if max_minutes is set; on rank 0's clock
    best_val_loss: float | None = None
    validated: str = ""  # fingerprint and number of the tokens of validation losses
    problem: str = ""  # why the last step's update was skipped
    checkpoint: Path | None = None  # the newest one that is known to be whole
    is_updating: bool = False  # a step's update has begun and is not complete
    # these two describe the steps that this process has taken
    step_seconds: list[float] = field(default_factory=list)
    last_loss: float = math.nan

    def begin_update(self, loss: Tensor, norm: Tensor, config: Config) -> bool:
        """Return whether to make a step's update; if so, weights change from here on.

        The update is skipped if loss or norm is not finite. Fused optimizers skip it on the device,
        so nothing has to wait; for other optimizers the host waits for loss and norm. In fp16 the
        scaler skips too.
        """
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

    def end_step(self) -> None:
        """Count a step whose update is under way."""
        self.step, self.is_updating = self.step + 1, False

    def tensors(self) -> dict[str, Tensors]:
        """Return all tensors of the run that a checkpoint keeps, by file and name.

        Saving, resuming, check.py, the estimate and the tests go over this: another file is one
        more entry, whose tensors exist from the first step on. All ranks have to call it.
        """
        # After an evaluation this makes FSDP shard the weights again.
        weights = self.model.state_dict()
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


Batches = Iterator[tuple[Tensor, Tensor]]
Figures = dict[str, Any]  # a step's figures; the key is the name


@dataclass
class Run:
    """Everything that training, saving and evaluating a run need."""

    config: Config
    world: World
    state: State  # the plain model, optimizers, loss scaler, and the steps taken so far
    model: Any  # state.model as it trains: compiled, and wrapped in DDP or sharded by FSDP2
    autocast: Callable[[], contextlib.AbstractContextManager]
    batches: Batches  # inputs and targets (B, T) of every micro-step, on the device
    val: TokenStream  # the corpus's validation split; empty if `setup` was given batches
    expected: ExpectedLosses  # none if `setup` was given batches
    vocabulary: Vocabulary = GPT2  # the corpus's; with another number of tokens it is not known

    @property
    def path(self) -> Path:
        """The run's folder."""
        return Path(f"{self.config.log_dir}/{self.config.run_name}")

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a step, of all ranks."""
        return self.config.tokens_per_step(self.world.world_size)

    @property
    def is_over(self) -> bool:
        """True after the run's last step."""
        return self.config.is_over(self.state.step, self.state.seconds)


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
