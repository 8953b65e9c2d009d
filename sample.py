"""Generate text with a trained model: `python sample.py quickstart --prompt "Python is"`."""

from pydantic import Field

from runtime.cli import Device, Name, Options, Positive
from runtime.errors import UserError, in_a_line, reported
from runtime.start import start


class SampleOptions(Options):
    """options"""

    run: Name
    """a run's name or folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl, a Hugging Face folder, or a
    .pt file of nanoGPT
    """
    prompt: str = ""
    """text to continue; empty begins a new document, like <|endoftext|>, which is one token"""
    prompt_file: Name | None = None
    """UTF-8 file of prompts, one per line; an empty line is an empty prompt"""
    stop: str = ""
    """end each text before this string; in bash, $'\\n' is a line break"""
    max_new_tokens: int = Field(100, ge=1, le=1_000_000)
    """tokens to generate"""
    temperature: float = Field(0.8, ge=0)
    """below 1: likelier tokens; above 1: more varied tokens; 0: always the likeliest token"""
    top_k: Positive | None = 50
    """draw from the k likeliest tokens only; none draws from all"""
    top_p: float = Field(1.0, gt=0, le=1)
    """draw from the fewest likeliest tokens that together have this probability; 1 draws from all
    of top_k
    """
    seed: int = Field(1337, ge=0, lt=2**63)
    """the same seed gives the same text; the second text of a prompt has seed + 1, and so on"""
    num_samples: int = Field(1, ge=1, le=10_000)
    """texts to generate for each prompt"""
    batch_size: Positive = 16
    """maximum number of texts generated at a time; texts differ by rounding only"""
    device: Device = "auto"
    """auto, cuda, mps or cpu"""
    bf16: bool = False
    """weights in bfloat16: half the memory to read for each token"""
    log_dir: Name = "logs"
    """folder of the runs"""

    def notes(self) -> list[str]:
        """Return a line for each given option that has no effect with the others."""
        unused = {}
        if self.prompt_file:
            unused["prompt"] = "prompt_file is set"
        if self.temperature == 0:
            unused |= dict.fromkeys(("seed", "top_k", "top_p"), "temperature is 0")
        given = self.model_fields_set
        return [f"{name} has no effect: {why}" for name, why in unused.items() if name in given]


if __name__ == "__main__":
    # Read options before importing torch, which takes seconds, so that --help and errors are quick.
    OPTIONS = start(SampleOptions, positional="run")

import itertools
import time
from pathlib import Path

import torch
from tiktoken import Encoding

from checkpoint.weights import read_weights
from inference.sampling import Text, grow, seeded
from model import GPT
from runtime.console import Console, log
from runtime.device import check_precision, choose_device

SEPARATOR = "---\n"  # between two texts


def load_sampled_model(options: SampleOptions) -> tuple[GPT, Encoding]:
    """Load the model to the device, and its encoding; print notes. Raises UserError if it cannot
    be loaded.
    """
    device = choose_device(options.device)
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    weights = read_weights(options.run, options.log_dir)
    for note in options.notes():
        log.warning(note)
    check_precision(device, dtype)
    weights.note_options()
    encoding = weights.vocabulary.encoding_for(weights.config.n_vocab)
    return weights.model().to(device, dtype), encoding


def read_prompts(options: SampleOptions) -> list[str]:
    """Return the prompts. Raises UserError if their file is not UTF-8, OSError if it is missing."""
    if not options.prompt_file:
        return [options.prompt]
    try:
        # "\r\n" becomes "\n"
        text = Path(options.prompt_file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt_file {options.prompt_file}: not UTF-8 ({in_a_line(error)}); convert it, "
            f"such as by iconv -t UTF-8"
        ) from None
    return text.removesuffix("\n").split("\n")


def show(text: str) -> None:
    """Print a piece of text at once."""
    print(text, end="", flush=True)


def write(model: GPT, texts: list[Text], options: SampleOptions) -> None:
    """Continue the texts, and print them in their order while they grow. Raises UserError.

    The first unfinished text is printed as it grows; when it ends, the next one follows with its
    text so far. A line break is printed at the end, also after Ctrl-C.
    """
    settings = options.model_dump(include={"max_new_tokens", "temperature", "top_k", "top_p"})
    shown, steps = 0, grow(model, texts, **settings)
    try:
        for _ in itertools.chain([None], steps):  # the prompt is printed before the first step
            ended = list(itertools.takewhile(lambda text: text.ended, texts))
            whole = f"\n{SEPARATOR}".join(text.certain for text in texts[: len(ended) + 1])
            show(whole[shown:])
            shown = len(whole)
    finally:
        show("\n")


def main(options: SampleOptions) -> None:
    """Print num_samples texts of each prompt as they are drawn, in this order. Raises UserError."""
    prompts, (model, encoding) = read_prompts(options), load_sampled_model(options)
    texts = [
        Text(prompt, encoding, seeded(options.seed + i), options.stop)
        for prompt in prompts
        for i in range(options.num_samples)
    ]
    start = time.perf_counter()
    for first in range(0, len(texts), options.batch_size):
        if first:
            show(SEPARATOR)
        write(model, texts[first : first + options.batch_size], options)
    seconds, tokens = time.perf_counter() - start, sum(text.drawn for text in texts)
    log.info(f"{tokens:,} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s")


if __name__ == "__main__":
    advice = {"memory": "out of memory; take a smaller --batch_size, or --bf16"}
    with reported(advice=advice), Console(on_stderr=True):  # stdout is for texts
        main(OPTIONS)
