"""Run a peer's side of a comparison: another project's GPT-2 in a plain training loop.

echo 3 | python -m measure.peers.side --peer transformers --init_from FOLDER --config speedup10.yaml

It answers like measure/interleaved/side.py. A peer is `transformers`, or a file with a `GPT` and
a `GPTConfig` that have nanoGPT's fields, parameter names and forward(idx, targets). Tokens, initial
weights, precision and the optimizer are the config's.
"""

from config import Config
from runtime.cli import Options
from runtime.start import parse_command_line, set_up_process


class WhichPeer(Options):
    """peer"""

    peer: str = "transformers"
    """transformers, or a nanoGPT-like Python file"""
    our_settings: bool = False
    """with the process settings that train.py makes"""


class PeerConfig(WhichPeer, Config):
    """All options of a peer's side."""


if __name__ == "__main__":
    OPTIONS = parse_command_line(PeerConfig, description=__doc__, config_file=True)
    if OPTIONS.our_settings:
        set_up_process(OPTIONS.device)

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint.weights import read_weights
from dataloader import DataLoader, prefetch
from measure.interleaved.options import without_end
from measure.interleaved.side import serve, take_stdout
from optimizer import make_optimizers
from runtime import errors
from runtime.device import choose_device, peak_memory_mb, timed, usable_precision
from runtime.errors import UserError, reported
from runtime.world import World
from train import open_data

TRANSFORMERS = "transformers"
LossOf = Callable[[Any, Tensor, Tensor], Tensor]  # model (compiled or not), inputs, targets -> loss


def build_peer(peer: str, config: Config) -> tuple[torch.nn.Module, LossOf]:
    """Build the peer's model with the weights of the folder `init_from`; returns it and its loss.

    Raises UserError.
    """
    folder = Path(config.init_from)
    return transformers_model(folder) if peer == TRANSFORMERS else nanogpt_like(peer, config)


def open_loader(config: Config) -> DataLoader:
    """Open the batches that train.py would take. Raises UserError."""
    return open_data(config, World(torch.device("cpu")), config.n_vocab)[0]


# ---- transformers


def transformers_model(folder: Path) -> tuple[torch.nn.Module, LossOf]:
    """Build GPT2LMHeadModel from a folder that its `from_pretrained` reads."""
    with in_a_line(TRANSFORMERS, "cannot be imported"):
        from transformers import GPT2LMHeadModel

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        # y is already one token ahead; transformers would shift `labels` again
        return model(input_ids=x, labels=y, shift_labels=y).loss

    # the KV cache is only for generating
    return GPT2LMHeadModel.from_pretrained(folder, use_cache=False).train(), loss_of


# ---- nanoGPT-like files


def nanogpt_like(path: str, config: Config) -> tuple[torch.nn.Module, LossOf]:
    """Build the `GPT` of a file.

    Raises UserError if the file, its options or its parameters are not like nanoGPT's.
    """
    _, shape, weights, _ = read_weights(config.init_from)
    module = load_file(path)
    # GPT-2's options under nanoGPT's names; the vocabulary is padded as in the config
    needed = {name: getattr(shape, name) for name in ("block_size", "n_layer", "n_head", "n_embd")}
    if_known = {"dropout": 0.0, "bias": True, "flash": True, "tie_weights": True}
    with in_a_line(path, "its GPT and GPTConfig cannot be used"):
        known = inspect.signature(module.GPTConfig).parameters
        if_known = {name: value for name, value in if_known.items() if name in known}
        gpt_config = module.GPTConfig(**needed, vocab_size=config.vocab_size, **if_known)
        model = module.GPT(gpt_config).train()
    copy_weights(model, weights, path)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        result = model(x, y)
        return result[1] if isinstance(result, tuple) else result

    return model, loss_of


def load_file(path: str) -> Any:
    """Import a Python file as a module. Raises UserError if it cannot be imported."""
    with in_a_line(path, "cannot be imported"):
        spec = importlib.util.spec_from_file_location("peer_file", path)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        sys.modules["peer_file"] = module  # dataclasses look their module up here
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


@contextlib.contextmanager
def in_a_line(path: str, what: str) -> Iterator[None]:
    """Raise errors of the peer's own code as one line, and keep its prints off stdout."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        raise UserError(f"{path}: {what}: {errors.in_a_line(error)}") from None


def copy_weights(model: torch.nn.Module, weights: dict[str, Tensor], path: str) -> None:
    """Copy the weights into the parameters of their names; padding rows of the vocabulary are 0.

    Raises UserError for other names, other shapes, and an output head of its own.
    """
    embedding, head = "transformer.wte.weight", "lm_head.weight"
    theirs = dict(model.named_parameters())  # a tied matrix comes once, under one of its names
    if embedding in theirs and head in theirs:
        raise UserError(f"{path}: its {head} and {embedding} are two matrices; GPT-2 has one")
    with in_a_line(path, "its parameters are not GPT-2's under nanoGPT's names"):
        padding = model.get_parameter(embedding).size(0) - len(weights[embedding])
        padded = F.pad(weights[embedding], (0, 0, 0, padding))
        weights = {**weights, embedding: padded, head: padded}
        # strict=False: buffers are missing
        missing, unexpected = model.load_state_dict(weights, strict=False)
        if wrong := [*unexpected, *(theirs.keys() & set(missing))]:
            raise KeyError(", ".join(sorted(wrong)))


# ---- the loop


def train_peer(options: PeerConfig, answers: TextIO) -> None:
    """Train the peer; stdin has the number of steps to take next. Raises UserError."""
    device, options = choose_device(options.device), without_end(options)
    torch.set_float32_matmul_precision(usable_precision(device, options.fp32_precision()))
    torch.manual_seed(options.seed)
    model, loss_of = build_peer(options.peer, options)
    model.to(device)
    trained = torch.compile(model, mode=options.compile_mode) if options.compile else model
    (optimizer,), _ = make_optimizers(model, options)
    loader = open_loader(options)
    batches = prefetch(loader, device, range(1, options.max_steps))
    losses: list[float] = []

    def training_step() -> None:
        loss = torch.zeros((), device=device)
        for _ in range(loader.accumulation):
            x, y = next(batches)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.bf16):
                micro_loss = loss_of(trained, x, y) / loader.accumulation
            micro_loss.backward()
            loss += micro_loss.detach()
        if options.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())

    def take_steps(count: int) -> dict[str, Any]:
        return {
            "seconds": [timed(training_step, device) for _ in range(count)],
            "tokens": count * options.tokens_per_step(1),
            "loss": losses[-1],
            "peak_memory_mb": peak_memory_mb(device),
        }

    serve(answers, take_steps)


@torch.no_grad()
def loss_in_fp32(name: str, model: torch.nn.Module, loss_of: LossOf, loader: DataLoader) -> float:
    """Return the loss of the first 64 tokens of the first batch, in fp32 on the CPU, uncompiled.

    In fp32 a model that computes something else differs most clearly. Raises UserError if the model
    returns no loss.
    """
    x, y = (tokens[:1, :64].contiguous() for tokens in loader.batch(1))
    with in_a_line(name, "its forward(idx, targets) gives no loss"):
        return float(loss_of(model, x, y))


if __name__ == "__main__":
    with reported(OPTIONS.peer, advice=OPTIONS.advice()):
        train_peer(OPTIONS, take_stdout())
