"""Train another project's GPT-2 as a side of an interleaved comparison.

python -m measure.interleaved speedup10.yaml "-m measure.peer transformers --config speedup10.yaml"

The peer is `transformers`, or a file like nanoGPT's model.py: with its GPTConfig and GPT, its names
of parameters, and its forward(idx, targets). A plain loop trains it with the same initial weights,
tokens, padded vocabulary, precision, torch.compile, AdamW groups and clipping as train.py.
--no-retain_memory starts it without the process settings of train.py, as a user would.
"""

from config import Config
from runtime.start import parse_command_line, set_up_process


class PeerConfig(Config):
    """peer"""

    peer: str
    """transformers, or a file like nanoGPT's model.py"""


if __name__ == "__main__":
    OPTIONS = parse_command_line(PeerConfig, positional="peer", config_file=True)
    if OPTIONS.retain_memory:
        set_up_process(OPTIONS.device)

import inspect
import math
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from checkpoint import hugging_face
from checkpoint.weights import adopt_architecture
from data.prepare import prepare_if_missing
from dataloader import DataLoader, prefetch
from measure.interleaved.side import Step, serve, take_stdout, without_end
from model import GPT, GPTConfig
from optimizer import make_optimizers
from runtime.device import choose_device, usable_precision
from runtime.errors import UserError, in_a_line, reported
from runtime.launch import launch
from runtime.world import World
from train import open_data

TRANSFORMERS = "transformers"  # any other peer is a file
TOLERANCE = 2e-4  # how much losses in fp32 may differ: they are sums in another order
# Options of both peers, and of a plain loop.
NEEDED: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "bias": True,
    "tie_weights": True,
    "dropout": 0.0,
    "init_from": "scratch",
    "optimizer": "adamw",
    "fp16": False,
}


def build_peer(peer: str, ours: GPT) -> torch.nn.Module:
    """Build the peer's model with our weights, padding rows included.

    Raises UserError if parameters are missing.
    """
    c, weights = ours.config, ours.state_dict()
    if peer == TRANSFORMERS:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {name: getattr(c, own) for name, own in hugging_face.OPTIONS.items()}
        # use_cache: the KV cache is only for generating
        config = GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
        model, weights = GPT2LMHeadModel(config), hugging_face.transpose_conv1d(weights)
    else:
        module = load_file(peer)
        known = inspect.signature(module.GPTConfig).parameters
        model = module.GPT(module.GPTConfig(**{n: v for n, v in vars(c).items() if n in known}))
    # strict=False: the peer's buffers have no weights here
    if unknown := model.load_state_dict(weights, strict=False).unexpected_keys:
        raise UserError(f"{peer}: has no {', '.join(unknown)}, which nanoGPT's GPT has")
    return model.train()


def load_file(path: str) -> Any:
    """Import a Python file as a module."""
    module = sys.modules["peer_file"] = ModuleType("peer_file")  # dataclasses look it up here
    SourceFileLoader("peer_file", path).exec_module(module)
    return module


def loss_of(peer: str, model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a peer's model, compiled or not, for inputs and targets."""
    if peer == TRANSFORMERS:
        # y is already one token ahead; transformers would shift `labels` again
        return model(input_ids=x, labels=y, shift_labels=y).loss
    result = model(x, y)
    return result[1] if isinstance(result, tuple) else result


def checked_peer(peer: str, config: Config, loader: DataLoader) -> torch.nn.Module:
    """Build the peer, and compare its loss of the first 64 tokens with ours, in fp32 on the CPU.

    Raises UserError for a peer that computes something else, or cannot be built.
    """
    for name, needed in NEEDED.items():
        if (value := getattr(config, name)) != needed:
            raise UserError(f"{peer}: has {name} {needed}, not {value}; choose such a config")
    torch.manual_seed(config.seed)  # train.py's weights
    ours = GPT(GPTConfig.of(config))
    x, y = (tokens[:1, :64].contiguous() for tokens in loader.batch(1))
    try:
        model = build_peer(peer, ours)
        with torch.no_grad():
            loss, our_loss = float(loss_of(peer, model, x, y)), float(ours(x, y))
    except (ImportError, SyntaxError, AttributeError, TypeError, RuntimeError) as error:
        raise UserError(f"{peer}: {in_a_line(error)}") from None
    # ours leaves padding rows out of its softmax, a peer may include them
    padding = math.log(config.vocab_size / config.n_vocab)
    count, our_count = (sum(p.numel() for p in m.parameters()) for m in (model, ours))
    if count != our_count or not -TOLERANCE <= loss - our_loss <= TOLERANCE + padding:
        raise UserError(
            f"{peer}: computes something else: from equal weights and tokens its loss is "
            f"{loss:.5f}, ours {our_loss:.5f}; it has {count:,} parameters, ours {our_count:,}"
        )
    return model


def training_step(peer: str, config: Config, device: torch.device) -> Step:
    """Return a function that takes the next step of the peer's training. Raises UserError."""
    if launch().world_size > 1:
        raise UserError("a peer trains on one rank; leave RANKS out")
    prepare_if_missing(Path(config.data_dir) / config.dataset)
    config = adopt_architecture(config).on_device(device.type, 1)
    loader, _ = open_data(config, World(device), config.n_vocab)
    model = checked_peer(peer, config, loader).to(device)
    trained = torch.compile(model, mode=config.compile_mode) if config.compile else model
    (optimizer,) = make_optimizers(model, config)
    batches = prefetch(loader, device, first_step=1)

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for _ in range(loader.accumulation):
            x, y = next(batches)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16):
                loss = loss_of(peer, trained, x, y) / loader.accumulation
            loss.backward()
            total += loss.detach()
        if config.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def main(options: PeerConfig) -> None:
    """Take steps of the peer, by their numbers on stdin. Raises UserError."""
    answers, device = take_stdout(), choose_device(options.device)
    step = training_step(options.peer, without_end(options), device)
    # not earlier: the comparison of losses takes all digits of fp32
    torch.set_float32_matmul_precision(usable_precision(device, options.fp32_precision()))
    serve(answers, step, options.tokens_per_step(1), World(device))


if __name__ == "__main__":
    with reported(OPTIONS.peer, advice=OPTIONS.advice()):
        main(OPTIONS)
