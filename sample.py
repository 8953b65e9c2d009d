"""Text from a trained model: `python sample.py quickstart --prompt "Python is"`."""

from runtime.interrupt import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()  # first of all: imports take a moment

from typing import Literal

from pydantic import Field

from runtime.cli import Name, Options, Positive, parse_command_line, reconfigure_output
from runtime.errors import UserError, reported


class SampleOptions(Options):
    """options"""

    run: Name
    """a run's name or folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl, a Hugging Face folder, or a .pt file of nanoGPT"""
    prompt: str = ""
    """text to continue (empty: the model begins a new document)"""
    max_new_tokens: int = Field(100, ge=1, le=1_000_000)
    """tokens to generate"""
    temperature: float = Field(0.8, ge=0)
    """below 1: likelier tokens, above 1: more varied tokens; 0: always the likeliest token"""
    top_k: Positive | None = 50
    """draw from the k likeliest tokens only (none: from all)"""
    seed: int = Field(1337, ge=0, lt=2**63)
    """the same seed gives the same text"""
    num_samples: int = Field(1, ge=1, le=10_000)
    """texts to generate"""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """auto, cuda, mps or cpu"""
    log_dir: Name = "logs"
    """folder that holds the runs"""


if __name__ == "__main__":
    # before torch is imported, which takes seconds: --help, mistakes and Ctrl-C answer at once
    OPTIONS = parse_command_line(SampleOptions, description=__doc__, positional="run")
    end_at_ctrl_c()  # again: reading the options ended it

import torch

from data.tokenizer import END_OF_TEXT, get_encoding
from model import GPT, ModelError
from runtime.device import choose_device
from weights import load_model


def sample_text(model: GPT, prompt: str, max_new_tokens: int, temperature: float = 0.8, top_k: int | None = 50, seed: int = 0,
                num_samples: int = 1) -> list[str]:
    """Continuations of the prompt, which they begin with, each up to its <|endoftext|>.

    Raises UserError if the model's vocabulary is not that of GPT-2's tokenizer, which makes the prompt, or if it cannot go on.
    """
    encoding = get_encoding()
    tokens = encoding.encode_ordinary(prompt) or [END_OF_TEXT]
    if model.config.n_vocab != encoding.n_vocab:
        raise UserError(f"a vocabulary of {model.config.n_vocab} is not that of GPT-2's tokenizer, {encoding.n_vocab}")
    device = model.lm_head.weight.device
    idx = torch.tensor([tokens] * num_samples, device=device)
    generator = torch.Generator().manual_seed(seed)
    try:
        rows = model.generate(idx, max_new_tokens, temperature, top_k, generator, stop_token=END_OF_TEXT)
    except ModelError as error:
        raise UserError(str(error)) from None
    texts = []
    for row in rows[:, len(tokens):].tolist():
        end = row.index(END_OF_TEXT) if END_OF_TEXT in row else len(row)
        texts.append(prompt + encoding.decode(row[:end]))
    return texts


def main(options: SampleOptions) -> None:
    """Print the texts. Raises UserError."""
    reconfigure_output()
    model = load_model(options.run, options.log_dir).to(choose_device(options.device))
    texts = sample_text(model, options.prompt, options.max_new_tokens, options.temperature, options.top_k, options.seed,
                        options.num_samples)
    with reported("stdout"):
        print("\n---\n".join(texts))


if __name__ == "__main__":
    with reported(OPTIONS.run, advice={"memory": f"out of memory at num_samples {OPTIONS.num_samples}; take fewer"}):
        main(OPTIONS)
