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
    interactive: bool = False
    """type prompts, which continue the text so far; Ctrl-C stops an answer, Ctrl-D exits"""
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
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    """above 1, such as 1.2: tokens of the text so far become less likely; 1 is off"""
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
    compile: bool = False
    """torch.compile the decode step, which computes all tokens after the first"""
    log_dir: Name = "logs"
    """folder of the runs"""

    def notes(self) -> list[str]:
        """Return a line for each given option that has no effect with the others."""
        unused = {
            "temperature is 0": ("seed", "top_k", "top_p") * (self.temperature == 0),
            "prompt_file is set": ("prompt",) * bool(self.prompt_file),
            "interactive is on": ("prompt_file", "num_samples", "batch_size") * self.interactive,
        }
        return [
            f"{name} has no effect: {why}"
            for why, names in unused.items()
            for name in names
            if name in self.model_fields_set
        ]


if __name__ == "__main__":
    # Read options before importing torch, which takes seconds, so that --help and errors are quick.
    OPTIONS = start(SampleOptions, positional="run")

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.weights import read_weights
from data.tokenizer import END_OF_TEXT
from inference.sampling import (
    Text,
    encode,
    grow,
    keys_for,
    make_cache,
    next_logits,
    pack_weights,
    seeded,
)
from model import GPT
from runtime.device import check_compiler, check_precision, choose_device

SEPARATOR = "---\n"  # between two texts


class Sampler:
    """Continue texts with a model; count tokens and seconds."""

    def __init__(self, options: SampleOptions, at_once: int):
        """Load the model; with --compile, compile decoding for `at_once` texts.

        Raises UserError if the model cannot be loaded, or this device cannot do as asked.
        """
        device = choose_device(options.device)
        dtype = torch.bfloat16 if options.bf16 else torch.float32
        notes = options.notes() + check_precision(device, dtype)
        if options.compile:
            if device.type == "cpu":
                # GPT-2 (124M) in fp32, one text: a token takes 60 ms of CPU time instead of 39, and
                # 48 ms if attention reads the text's keys alone, as it does uncompiled.
                raise UserError("--compile: decoding on a CPU is slower compiled; run without it")
            notes += check_compiler(device)
        weights = read_weights(options.run, options.log_dir)
        for note in notes + weights.notes():
            print(f"note: {note}", file=sys.stderr)
        settings = {"max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty"}
        self.settings = options.model_dump(include=settings)
        self.at_once, self.tokens, self.seconds = at_once, 0, 0.0
        self.model = weights.model().to(device, dtype)
        pack_weights(self.model, at_once)
        self.decode = compile_decoding(self.model, at_once) if options.compile else None

    def write(self, texts: list[Text]) -> None:
        """Continue the texts, and print them in their order while they grow. Raises UserError.

        The first unfinished text is printed as it grows; when it ends, the next one follows with
        its text so far. A line break is printed at the end, also after Ctrl-C.
        """
        decode = self.decode if len(texts) == self.at_once else None
        start, shown = time.perf_counter(), 0
        steps = grow(self.model, texts, decode=decode, **self.settings)
        try:
            for _ in itertools.chain([None], steps):  # the prompt is printed before the first step
                ended = list(itertools.takewhile(lambda text: text.ended, texts))
                whole = f"\n{SEPARATOR}".join(text.certain for text in texts[: len(ended) + 1])
                show(whole[shown:])
                shown = len(whole)
        finally:
            show("\n")
            self.seconds += time.perf_counter() - start
            self.tokens += sum(text.drawn for text in texts)


def compile_decoding(model: GPT, at_once: int) -> Callable[..., Tensor]:
    """Compile `next_logits` for one token of each of `at_once` texts."""
    decode = torch.compile(next_logits, dynamic=False, fullgraph=True)
    start = time.perf_counter()
    context, device = model.config.block_size, model.lm_head.weight.device
    cache = make_cache(model, at_once, context)
    ones = torch.ones(at_once, dtype=torch.long, device=device)
    with torch.no_grad():
        decode(model, cache, keys_for(context, device), ones[:, None], ones)
    print(f"note: compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return decode


def show(text: str) -> None:
    """Print a piece of text at once."""
    print(text, end="", flush=True)


def print_texts(sampler: Sampler, options: SampleOptions, prompts: list[str]) -> None:
    """Print num_samples texts of each prompt as they are drawn, in this order."""
    texts = [
        Text(prompt, encode(sampler.model, prompt), seeded(options.seed + i), options.stop)
        for prompt in prompts
        for i in range(options.num_samples)
    ]
    for first in range(0, len(texts), sampler.at_once):
        show(SEPARATOR if first else "")
        sampler.write(texts[first : first + sampler.at_once])


def converse(sampler: Sampler, options: SampleOptions) -> None:
    """Read prompts from stdin, and continue each.

    Each line continues the text so far; after an empty line the model continues alone. The oldest
    text is forgotten when the context has no room left for an answer.
    """
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # makes input() editable
    context, generator, typed = list[int](), seeded(options.seed), sys.stdin.isatty()
    block_size = sampler.model.config.block_size
    room = max(block_size - options.max_new_tokens, block_size // 2, 1)
    given = [options.prompt] if options.prompt else []
    while True:
        try:
            line = given.pop() if given else input("> " if typed else "")
        except (EOFError, KeyboardInterrupt):
            show("\n" if typed else "")
            return
        line_break = "\n" if context and context[-1] != END_OF_TEXT else ""
        if line or not context:  # an empty line adds nothing
            context += encode(sampler.model, line_break + line)
        context = context[-room:]
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the answer
            sampler.write([Text("", context, generator, options.stop)])


def main(options: SampleOptions) -> None:
    """Print the texts. Raises UserError."""
    prompts = [options.prompt]
    if options.prompt_file:
        try:
            # "\r\n" becomes "\n"
            text = Path(options.prompt_file).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(
                f"--prompt_file {options.prompt_file}: not UTF-8 ({in_a_line(error)}); convert it, "
                f"such as by iconv -t UTF-8"
            ) from None
        prompts = text.removesuffix("\n").split("\n")
    if options.interactive:
        sampler = Sampler(options, 1)
        converse(sampler, options)
    else:
        sampler = Sampler(options, min(options.batch_size, len(prompts) * options.num_samples))
        print_texts(sampler, options, prompts)
    speed = sampler.tokens / max(sampler.seconds, 1e-9)
    print(
        f"{sampler.tokens:,} tokens in {sampler.seconds:.2f} s: {speed:.1f} tokens/s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    advice = {
        "memory": "out of memory; take a smaller --batch_size, or --bf16",
        "compiler": "--compile failed: {reason}; or run without --compile",
    }
    with reported(advice=advice):
        main(OPTIONS)
