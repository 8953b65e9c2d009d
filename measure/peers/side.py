"""Run a peer's side of a comparison: another project's GPT-2 in a plain training loop.

echo 3 | python -m measure.peers.side --peer transformers --init_from FOLDER --config speedup10.yaml

It answers like measure/interleaved/side.py. A peer is `transformers`, or a file with a `GPT` and
a `GPTConfig` that have nanoGPT's fields, parameter names and forward(idx, targets). Tokens, initial
weights, precision and the optimizer are the config's. `--peer matmuls` runs the matmuls of a
training step and nothing else. With `--texts` a step generates texts.
"""

from config import Config
from measure.peers import MATMULS, OURS, TRANSFORMERS
from runtime.cli import Positive, ZeroIsOff
from runtime.start import parse_command_line, set_up_process


class PeerConfig(Config):
    """peer"""

    peer: str = "transformers"
    """transformers, a nanoGPT-like Python file, matmuls, or `ours` with --texts"""
    our_settings: bool = False
    """with the process settings that train.py makes; `ours` has them anyway"""
    texts: ZeroIsOff = 0
    """generate this number of texts at a time, instead of training; 0 disables it"""
    tokens: Positive = 100
    """tokens of each text"""


if __name__ == "__main__":
    OPTIONS = parse_command_line(PeerConfig, config_file=True)
    if OPTIONS.our_settings or OPTIONS.peer == OURS:
        set_up_process(OPTIONS.device, OPTIONS.retain_memory)

import functools
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from checkpoint.hugging_face import write_hugging_face
from checkpoint.weights import load_model, read_weights
from data.tokenizer import END_OF_TEXT
from dataloader import DataLoader, prefetch
from inference.sampling import Text, grow, pack_weights, seeded
from measure.interleaved.side import Step, serve, take_stdout, without_end
from measure.ladder.roofline import count
from model import GPT, GPTConfig
from optimizer import make_optimizers
from runtime.device import choose_device, usable_precision
from runtime.errors import UserError, in_a_line, reported
from runtime.world import World
from train import open_data

TEMPERATURE, TOP_K = 0.8, 50  # the defaults of sample.py
START = 198  # a line break: <|endoftext|> would end a text that repeats it


def write_weights(config: Config, folder: Path, std: float = 0.0) -> GPT:
    """Write the weights that all sides start from; returns a model with them.

    They are the config's own, or all N(0, std).
    """
    torch.manual_seed(config.seed)
    model = GPT(GPTConfig.of(config))
    for p in model.parameters() if std else ():
        torch.nn.init.normal_(p, std=std)
    write_hugging_face(folder, model.config, model.state_dict())
    return model


def build_peer(peer: str, config: Config) -> torch.nn.Module:
    """Build the peer's model with the weights of the folder `init_from`. Raises UserError."""
    if peer != TRANSFORMERS:
        return nanogpt_like(peer, config)
    try:
        from transformers import GPT2LMHeadModel
    except ImportError:
        raise UserError("transformers is missing: pip install -r requirements-dev.txt") from None
    # the KV cache is only for generating
    model = GPT2LMHeadModel.from_pretrained(config.init_from, use_cache=False)
    # The head's matmul gets as many columns as ours. Rows of zeros, as in `copy_weights`: unlike in
    # ours, they are in the softmax, which adds at most ln(50304 / 50257) = 0.0009 to the loss.
    real = model.config.vocab_size
    model.resize_token_embeddings(config.vocab_size, mean_resizing=False)
    model.lm_head.weight.data[real:].zero_()
    return model.train()


def loss_of(peer: str, model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a peer's model, compiled or not, for inputs and targets."""
    if peer == TRANSFORMERS:
        # y is already one token ahead; transformers would shift `labels` again
        return model(input_ids=x, labels=y, shift_labels=y).loss
    result = model(x, y)
    return result[1] if isinstance(result, tuple) else result


def open_loader(config: Config) -> DataLoader:
    """Open the batches that train.py would take. Raises UserError."""
    return open_data(config, World(torch.device("cpu")), config.n_vocab)[0]


# ---- nanoGPT-like files


def nanogpt_like(path: str, config: Config) -> torch.nn.Module:
    """Build the `GPT` of a file. Raises UserError if its parameters are not like nanoGPT's."""
    _, shape, weights, _ = read_weights(config.init_from)
    module = load_file(path)
    # GPT-2's options under nanoGPT's names; the vocabulary is padded as in the config
    options = vars(shape) | {"vocab_size": config.vocab_size, "flash": True}
    known = inspect.signature(module.GPTConfig).parameters
    given = {name: value for name, value in options.items() if name in known}
    model = module.GPT(module.GPTConfig(**given)).train()
    copy_weights(model, weights, path)
    return model


def load_file(path: str) -> Any:
    """Import a Python file as a module."""
    loader = SourceFileLoader("peer_file", path)
    module = ModuleType("peer_file")
    sys.modules["peer_file"] = module  # dataclasses look their module up here
    try:
        loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise UserError(f"{path}: {in_a_line(error)}") from None
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise UserError(f"{path}: has no GPT or no GPTConfig, as nanoGPT's model.py has")
    return module


def copy_weights(model: torch.nn.Module, weights: dict[str, Tensor], path: str) -> None:
    """Copy the weights into the parameters of their names; padding rows of the vocabulary are 0.

    Raises UserError for a parameter that is missing, and for an output head of its own.
    """
    embedding, head = "transformer.wte.weight", "lm_head.weight"
    names = {name for name, _ in model.named_parameters()}  # a tied matrix has one of its names
    if {embedding, head} <= names:
        raise UserError(f"{path}: its {head} and {embedding} are two matrices; GPT-2 has one")
    padding = model.get_parameter(embedding).size(0) - len(weights[embedding])
    padded = F.pad(weights[embedding], (0, 0, 0, padding))
    weights = {**weights, embedding: padded, head: padded}
    # strict=False: the peer's buffers have no weights here
    if unknown := model.load_state_dict(weights, strict=False).unexpected_keys:
        raise UserError(f"{path}: it has no {', '.join(unknown)}, as nanoGPT names its parameters")


# ---- the loop


def training_step(options: PeerConfig, device: torch.device) -> Step:
    """Return a function that takes the next step of the peer's training. Raises UserError."""
    config = without_end(options)
    torch.manual_seed(config.seed)
    model = build_peer(options.peer, config).to(device)
    trained = torch.compile(model, mode=config.compile_mode) if config.compile else model
    (optimizer,), _ = make_optimizers(model, config)
    loader = open_loader(config)
    batches = prefetch(loader, device, first_step=1)

    def step() -> dict[str, Any]:
        loss = torch.zeros((), device=device)
        for _ in range(loader.accumulation):
            x, y = next(batches)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.bf16):
                micro_loss = loss_of(options.peer, trained, x, y) / loader.accumulation
            micro_loss.backward()
            loss += micro_loss.detach()
        if config.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return {"tokens": config.tokens_per_step(1), "loss": loss}

    return step


@torch.no_grad()
def loss_in_fp32(peer: str, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the loss of the first 64 tokens of the first batch, in fp32 on the CPU, uncompiled.

    In fp32 a model that computes something else differs most clearly.
    """
    x, y = (tokens[:1, :64].contiguous() for tokens in loader.batch(1))
    return float(loss_of(peer, model, x, y))


# ---- the matmuls alone


def matmuls_of(config: Config, device: torch.device) -> list[Callable[[], object]]:
    """Return the matmuls of a training step, with their arguments: random numbers.

    Shapes, strides and types are the config's own, the kernels PyTorch's own, uncompiled. A fused
    attention kernel is not a matmul.
    """

    @functools.cache  # equal matmuls share their tensors
    def numbers(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device).normal_()

    def random(like: Tensor) -> Tensor:
        return numbers(like.size(), like.stride(), like.dtype)

    return [
        functools.partial(
            op.call.func, *tree_map_only(Tensor, random, op.call.args), **op.call.keywords
        )
        for op in count(config, device)
        if op.call and op.flops and "attention" not in op.name
    ]


def matmul_step(config: PeerConfig, device: torch.device) -> Step:
    """Return a function that runs the matmuls of a training step."""
    matmuls = matmuls_of(config, device)

    @torch.no_grad()
    def step() -> dict[str, Any]:
        for matmul in matmuls:
            matmul()
        return {"tokens": config.tokens_per_step(1)}

    return step


# ---- generated texts


def our_generate(model: GPT, texts: int, tokens: int, top_k: int) -> list[list[int]]:
    """Generate texts of our model as sample.py does, each token one of the `top_k` likeliest."""
    grown = [Text("", [START], seeded(i)) for i in range(texts)]
    list(grow(model, grown, tokens, temperature=TEMPERATURE, top_k=top_k))
    return [text.tokens[1:] for text in grown]


@torch.no_grad()
def peer_generate(model: Any, texts: int, tokens: int, top_k: int) -> list[list[int]]:
    """Generate texts by the `generate` of a peer's model."""
    start = torch.full((texts, 1), START, device=model.lm_head.weight.device)
    grown = model.generate(start, max_new_tokens=tokens, temperature=TEMPERATURE, top_k=top_k)
    return grown[:, 1:].tolist()


def generation_step(options: PeerConfig, device: torch.device) -> Step:
    """Return a function that generates texts with the weights of `init_from`. Raises UserError."""
    is_ours = options.peer == OURS
    generate = our_generate if is_ours else peer_generate
    model: Any = load_model(options.init_from) if is_ours else build_peer(options.peer, options)
    model.eval()
    if options.peer == TRANSFORMERS:
        how = model.generation_config
        how.update(do_sample=True, use_cache=True, pad_token_id=END_OF_TEXT)
        how.eos_token_id = None  # no text ends before its last token
    # In fp32, and only two: nanoGPT's exact GELU makes other choices after some tokens.
    likeliest = generate(model, 1, 2, 1)[0]
    model.to(device, torch.bfloat16 if options.bf16 else torch.float32)
    if is_ours:
        pack_weights(model, options.texts)

    def step() -> dict[str, Any]:
        texts = generate(model, options.texts, options.tokens, TOP_K)
        return {"tokens": sum(map(len, texts)), "likeliest": likeliest}

    return step


def main(options: PeerConfig) -> None:
    """Take steps of the peer, by their numbers on stdin. Raises UserError."""
    answers, device = take_stdout(), choose_device(options.device)
    torch.set_float32_matmul_precision(usable_precision(device, options.fp32_precision()))
    make_step = matmul_step if options.peer == MATMULS else training_step
    if options.texts:
        make_step = generation_step
    serve(answers, make_step(options, device), World(device))


if __name__ == "__main__":
    with reported(OPTIONS.peer, advice=OPTIONS.advice()):
        main(OPTIONS)
