"""A peer's side of a comparison in turn: a GPT-2 that others wrote, trained by the plain loop that
one would write around it.

    echo 3 | python benchmarks/peer_side.py --peer transformers --init_from FOLDER --config speedup10.yaml

It is asked and answers as benchmarks/side.py; benchmarks/peers.py starts it. A peer is
`transformers`, or a nanoGPT-like file: one with a `GPT` and a `GPTConfig` that have nanoGPT's
fields, parameter names and forward(idx, targets). Tokens, weights at the start, precision, and the
optimizer's settings are those of the config.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.side import Turns
from config import Config
from runtime.cli import Options, parse_command_line
from runtime.start import set_up_process


class WhichPeer(Options):
    """peer"""

    peer: str = "transformers"
    """transformers, or a nanoGPT-like Python file"""
    process_settings: bool = False
    """set the process up as train.py does for itself"""


class PeerConfig(WhichPeer, Config):
    """All options of a peer's side."""


if __name__ == "__main__":
    OPTIONS = parse_command_line(PeerConfig, description=__doc__, config_file=True)
    if OPTIONS.process_settings:
        set_up_process()
    TURNS = Turns()

import contextlib
import importlib.util
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from data.prepare import prepare_if_missing
from dataloader import DataLoader, open_corpus, prefetch
from runtime.device import (
    autocast_to,
    check_compiler,
    choose_device,
    matmul_dtype,
    peak_memory_mb,
    set_precision,
    synchronize,
)
from runtime.errors import UserError, reported
from weights import read_weights

TRANSFORMERS = "transformers"
LossOf = Callable[[Any, Tensor, Tensor], Tensor]  # of the model, compiled or not, and a batch


def build_peer(peer: str, config: Config) -> tuple[torch.nn.Module, LossOf]:
    """The peer's model with the weights of the folder `init_from`, and what gives its loss. Raises
    UserError.
    """
    folder = Path(config.init_from)
    return (
        transformers_model(folder) if peer == TRANSFORMERS else nanogpt_like(peer, folder, config)
    )


def open_loader(config: Config) -> DataLoader:
    """The batches that train.py would take. Raises UserError."""
    folder = Path(config.data_dir) / config.dataset
    prepare_if_missing(folder, lambda line: print(line, file=sys.stderr))
    stream, _ = open_corpus(folder, config.seq_len, config.n_vocab, config.val_fraction)
    return DataLoader(
        stream,
        config.batch_size,
        seed=config.seed,
        accumulation=config.accumulation_steps(1),
        shuffle=config.shuffle,
        overfit_batch=config.overfit_batch,
    )


# ---- transformers


def transformers_model(folder: Path) -> tuple[torch.nn.Module, LossOf]:
    """GPT2LMHeadModel as a folder that its `from_pretrained` reads describes it."""
    try:
        from transformers import GPT2LMHeadModel
    except ImportError:
        raise UserError(
            "transformers is not installed: pip install -r requirements-dev.txt"
        ) from None

    # shift_labels are targets that are already one token further on; from labels alone it would
    # shift them itself
    return (
        GPT2LMHeadModel.from_pretrained(
            folder, use_cache=False
        ).train(),  # keys and values are for generating
        lambda model, x, y: model(input_ids=x, labels=y, shift_labels=y).loss,
    )


# ---- nanoGPT-like files


def nanogpt_like(path: str, folder: Path, config: Config) -> tuple[torch.nn.Module, LossOf]:
    """The `GPT` of a file. Raises UserError where the file, its options or its parameters are not
    like nanoGPT's.
    """
    options, weights = read_weights(folder)
    module = load_file(path)
    # what GPT-2 is, under nanoGPT's names; the vocabulary is padded as the config says
    needed = {name: options[name] for name in ("block_size", "n_layer", "n_head", "n_embd")} | {
        "vocab_size": config.vocab_size
    }
    if_known = {"dropout": 0.0, "bias": True, "flash": True, "tie_weights": True}
    with told(path, "its GPTConfig cannot be used"):
        fields = inspect.signature(module.GPTConfig).parameters
    if lacking := [name for name in needed if name not in fields]:
        raise UserError(
            f"{path}: its GPTConfig has no {', '.join(lacking)}; nanoGPT's fields are needed: "
            f"{', '.join(needed)}"
        )
    values = needed | {name: value for name, value in if_known.items() if name in fields}
    if unknown := [
        name
        for name, field in fields.items()
        if name not in values
        and field.default is field.empty
        and field.kind is not field.VAR_KEYWORD
    ]:
        raise UserError(
            f"{path}: its GPTConfig asks for {', '.join(unknown)}, which nanoGPT's does not "
            f"have; give it a default"
        )
    with told(path, "its GPT cannot be made"), contextlib.redirect_stdout(sys.stderr):
        model = module.GPT(module.GPTConfig(**values)).train()
    copy_weights(model, weights, path)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        found = model(x, y)
        return found[1] if isinstance(found, tuple) else found

    with told(path, "its forward(idx, targets) fails"), torch.no_grad():
        loss = loss_of(
            model, torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
        )
    if not isinstance(loss, Tensor) or loss.dim():
        raise UserError(
            f"{path}: its forward(idx, targets) must return the loss, or logits and the loss"
        )
    return model, loss_of


def load_file(path: str) -> Any:
    """The module in a Python file. Raises UserError if it has no GPT and GPTConfig, or cannot be
    imported.
    """
    spec = importlib.util.spec_from_file_location("peer_file", path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["peer_file"] = module  # where its dataclasses look for it
    sys.path.append(str(Path(path).resolve().parent))  # for what lies beside it
    with told(path, "cannot be imported"), contextlib.redirect_stdout(sys.stderr):
        spec.loader.exec_module(module)
    if lacking := [name for name in ("GPT", "GPTConfig") if not hasattr(module, name)]:
        raise UserError(
            f"{path}: has no {' and no '.join(lacking)}; a peer is a file with both, such as "
            f"nanoGPT's model.py"
        )
    return module


@contextlib.contextmanager
def told(path: str, what: str) -> Iterator[None]:
    """Make whatever the peer's own code raises one line."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{path}: {what}: {type(error).__name__}: {reason}") from None


@torch.no_grad()
def copy_weights(model: torch.nn.Module, weights: dict[str, Tensor], path: str) -> None:
    """Give each parameter the weights of its name; padding rows of the vocabulary become zero.

    Raises UserError for other names, other shapes, and an output head of its own.
    """
    embedding, head = "transformer.wte.weight", "lm_head.weight"
    theirs = dict(model.named_parameters())  # a tied matrix comes once, under one of its names
    if embedding in theirs and head in theirs:
        raise UserError(f"{path}: its {head} and {embedding} are two matrices; GPT-2 has one")
    tied = head if head in theirs else embedding
    ours = {
        tied if name == embedding else name: tensor
        for name, tensor in weights.items()
        if name != head
    }
    problems = [f"has no {name}" for name in ours if name not in theirs]
    problems += [f"has {name} besides" for name in theirs if name not in ours]
    for name in (name for name in theirs if name in ours):
        rows = len(ours[name]) if name == tied else None
        if theirs[name][:rows].shape != ours[name].shape:
            problems.append(
                f"has {name} of shape {tuple(theirs[name].shape)}, GPT-2 {tuple(ours[name].shape)}"
            )
        elif not problems:
            theirs[name].zero_()[:rows].copy_(ours[name])
    if problems:
        raise UserError(
            f"{path}: its parameters are not GPT-2's under nanoGPT's names: it {problems[0]}"
            + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
        )


# ---- the loop


def train_peer(options: PeerConfig, turns: Turns) -> None:
    """Train the peer for as many steps as are asked for. Raises UserError."""
    device = choose_device(options.device)
    set_precision(device, tf32=options.tf32, bf16=options.bf16)
    if options.compile:
        check_compiler(device, options.compile_mode, options.accumulation_steps(1))
    torch.manual_seed(options.seed)
    model, loss_of = build_peer(options.peer, options)
    model.to(device)
    trained = torch.compile(model, mode=options.compile_mode) if options.compile else model
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() >= 2 or not options.decay_matrices_only]
    vectors = [p for p in parameters if p.dim() < 2 and options.decay_matrices_only]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=1e-6,
        betas=options.betas,
        eps=options.eps,
        fused=True if options.fused_adamw else None,
    )  # the rate of benchmarks/side.py
    loader = open_loader(options)
    batches = prefetch(loader, device, range(1, 10**9))
    autocast = autocast_to(matmul_dtype(bf16=options.bf16), device)

    def training_step() -> float:
        loss = torch.zeros((), device=device)
        for _ in range(loader.accumulation):
            x, y = next(batches)
            with autocast():
                micro_loss = loss_of(trained, x, y) / loader.accumulation
            micro_loss.backward()
            loss += micro_loss.detach()
        if options.grad_clip:
            torch.nn.utils.clip_grad_norm_(parameters, options.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    while True:
        seconds = []
        for _ in range(turns.wait()):
            synchronize(device)
            start = time.perf_counter()
            loss = training_step()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        turns.answer(
            seconds=seconds,
            tokens=len(seconds) * options.tokens_per_step(1),
            loss=loss,
            peak_memory_mb=peak_memory_mb(device),
        )


@torch.no_grad()
def loss_in_fp32(model: torch.nn.Module, loss_of: LossOf, loader: DataLoader) -> float:
    """Loss of the first 64 tokens of the first batch, in fp32 on the CPU and uncompiled: what tells
    models apart best.
    """
    x, y = (tokens[:1, :64].contiguous() for tokens in loader.batch(1))
    return float(loss_of(model, x, y))


if __name__ == "__main__":
    with reported(OPTIONS.peer, advice=OPTIONS.advice()):
        train_peer(OPTIONS, TURNS)
