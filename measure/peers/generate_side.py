"""Run one side of a comparison of generated tokens/s: sample.py's way, or a peer's `generate`.

echo 1 | python -m measure.peers.generate_side --folder FOLDER --peer transformers

It answers like measure/interleaved/side.py; a step is `texts` texts of `tokens` tokens.
"""

from measure.peers.generate import GenerateOptions
from runtime.cli import Options
from runtime.start import parse_command_line, set_up_process


class WhichSide(Options):
    """side"""

    folder: str = ""
    """Hugging Face folder of the weights"""
    peer: str = ""
    """transformers, or a nanoGPT-like Python file; empty is this project"""


class SideOptions(GenerateOptions, WhichSide):
    """All options of a side."""


if __name__ == "__main__":
    OPTIONS = parse_command_line(SideOptions, description=__doc__)
    if not OPTIONS.peer:
        set_up_process(OPTIONS.device)  # sample.py does this too; a peer runs as users start it

from collections.abc import Callable
from typing import Any

import torch

from checkpoint.weights import load_model
from config import Config
from data.tokenizer import END_OF_TEXT
from inference.sampling import Text, grow, pack_weights, seeded
from measure.interleaved.side import serve_timed, take_stdout
from measure.peers.side import TRANSFORMERS, build_peer
from runtime.device import choose_device
from runtime.errors import reported

# Generates the tokens of several texts: of how many, how many each, drawn from the k likeliest.
Generate = Callable[[int, int, int], list[list[int]]]
TEMPERATURE, TOP_K = 0.8, 50  # the defaults of sample.py
START = 198  # a line break: <|endoftext|> would end a text that repeats it


def our_generate(folder: str) -> tuple[Any, Generate]:
    """Load the model of a folder as sample.py does; returns it too. Raises UserError."""
    model = load_model(folder)

    def generate(texts: int, tokens: int, top_k: int) -> list[list[int]]:
        grown = [Text("", [START], seeded(i)) for i in range(texts)]
        list(grow(model, grown, tokens, temperature=TEMPERATURE, top_k=top_k))
        return [text.tokens[1:] for text in grown]

    return model, generate


def peer_generate(folder: str, peer: str) -> tuple[Any, Generate]:
    """Build a peer's model with the weights of a folder; returns it too. Raises UserError."""
    model: Any = build_peer(peer, Config.model_validate({"init_from": folder}))[0].eval()
    how: dict[str, Any] = {"temperature": TEMPERATURE}
    if peer == TRANSFORMERS:
        model.generation_config.eos_token_id = None  # no text ends before its last token
        how |= {"do_sample": True, "use_cache": True, "pad_token_id": END_OF_TEXT}

    def generate(texts: int, tokens: int, top_k: int) -> list[list[int]]:
        start = torch.full((texts, 1), START, device=model.lm_head.weight.device)
        with torch.no_grad():
            grown = model.generate(start, max_new_tokens=tokens, top_k=top_k, **how)
        return grown[:, 1:].tolist()

    return model, generate


def main(options: SideOptions) -> None:
    """Generate as often as is asked for. Raises UserError."""
    answers, folder, peer = take_stdout(), options.folder, options.peer
    device = choose_device(options.device)
    model, generate = peer_generate(folder, peer) if peer else our_generate(folder)
    # In fp32, and only two: nanoGPT's exact GELU makes other choices after some tokens.
    likeliest = generate(1, 2, 1)[0]
    model.to(device, torch.bfloat16 if options.bf16 else torch.float32)
    if not peer:
        pack_weights(model, options.texts)

    def step() -> dict[str, Any]:
        texts = generate(options.texts, options.tokens, TOP_K)
        return {"tokens": sum(map(len, texts)), "likeliest": likeliest}

    serve_timed(answers, step, device)


if __name__ == "__main__":
    with reported("stdout"):
        main(OPTIONS)
