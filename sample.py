"""Text from a trained model: `python sample.py quickstart --prompt "Python is"`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from runtime.cli import ContradictionError, Name, Options, Positive
from runtime.errors import UserError, reported
from runtime.start import start


class SampleOptions(Options):
    """options"""

    run: Name
    """a run's name or folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl, a Hugging Face folder, or a
    .pt file of nanoGPT
    """
    prompt: str = ""
    """text to continue (empty: the model begins a new document)"""
    prompt_file: Name | None = None
    """UTF-8 file of prompts, one a line, an empty line being an empty prompt"""
    interactive: bool = False
    """type prompts, each of which goes on after the text so far; Ctrl-C stops an answer, Ctrl-D
    ends
    """
    max_new_tokens: int = Field(100, ge=1, le=1_000_000)
    """tokens to generate"""
    temperature: float = Field(0.8, ge=0)
    """below 1: likelier tokens, above 1: more varied tokens; 0: always the likeliest token"""
    top_k: Positive | None = 50
    """draw from the k likeliest tokens only (none: from all)"""
    top_p: float = Field(1.0, gt=0, le=1)
    """draw from the fewest likeliest tokens that together have this probability (1: from all that
    top_k leaves)
    """
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    """above 1: tokens that are in the text already become less likely, such as 1.2 (1: off)"""
    seed: int = Field(1337, ge=0, lt=2**63)
    """the same seed gives the same text; of several texts of one prompt the second has seed + 1,
    and so on
    """
    num_samples: int = Field(1, ge=1, le=10_000)
    """texts to generate, of each prompt"""
    batch_size: int = Field(16, ge=1, le=10_000)
    """texts to generate at a time, at most; changes no text but by rounding"""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """auto, cuda, mps or cpu"""
    bf16: bool = False
    """weights in bfloat16: half the memory to read for each token"""
    compile: bool = False
    """torch.compile what draws a token after the first"""
    log_dir: Name = "logs"
    """folder that holds the runs"""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        given = self.model_fields_set
        pairs = [("prompt_file", "prompt")]
        if self.interactive:
            pairs += [("prompt_file", "interactive"), ("num_samples", "interactive")]
        if problems := [
            (name, f"{name} and {other} exclude each other; leave one out")
            for name, other in pairs
            if {name, other} <= given
        ]:
            raise ContradictionError(problems)
        return self

    def notes(self) -> list[str]:
        """Return a line for each option that has no effect with the others."""
        notes, given = [], self.model_fields_set
        if self.temperature == 0:
            names = [name for name in ("top_k", "top_p", "seed") if name in given]
            notes = [f"{name} has no effect: temperature is 0" for name in names]
            if self.num_samples > 1:
                notes.append("temperature is 0: all texts of a prompt are the same")
        if self.interactive and "batch_size" in given:
            notes.append("batch_size has no effect: interactive has one text")
        return notes

    def advice(self) -> dict[str, str]:
        """Return what may help at each kind of failure that runtime/errors.py tells apart."""
        return {
            "memory": f"out of memory at batch_size {self.batch_size}; take fewer"
            + ", or --bf16" * (not self.bf16),
            "compiler": "--compile failed: {reason}; or run without --compile",
        }


if __name__ == "__main__":
    # Before torch is imported, which takes seconds: --help and mistakes answer at once.
    OPTIONS = start(SampleOptions, description=__doc__, positional="run")

import contextlib
import io
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from checkpoint.weights import load_model
from data.tokenizer import END_OF_TEXT
from inference.sampling import Decode, chooser, decode_stream, encode, next_logits, seeded, stream
from runtime.device import check_compiler, check_precision, choose_device

SEPARATOR = "\n---\n"  # between two texts


class Sampler:
    """Draw texts from the model of a command's options; count tokens and seconds."""

    def __init__(self, options: SampleOptions):
        """Raise UserError for what cannot be loaded and what this device cannot do."""
        device = choose_device(options.device)
        notes = options.notes() + check_precision(device, bf16=options.bf16)
        notes += check_compiler(device) if options.compile else []
        for note in notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
        self.options, self.tokens, self.seconds = options, 0, 0.0
        self.model = load_model(options.run, options.log_dir).to(
            device, torch.bfloat16 if options.bf16 else torch.float32
        )
        encode(self.model, "")  # fails now rather than at the first prompt
        self.compiled: dict[int, Decode] = {}  # by the number of texts

    def compile(self, batch_size: int) -> None:
        """Compile decoding for so many texts at a time, and say how long that took."""
        decode = torch.compile(next_logits, dynamic=False, fullgraph=True)
        start = time.perf_counter()
        for _ in stream(self.model, [[END_OF_TEXT]] * batch_size, 8, None, lambda *_: 0, decode):
            pass  # the second token is the first to be decoded
        seconds = time.perf_counter() - start
        print(f"note: compiled in {seconds:.0f} s", file=sys.stderr, flush=True)
        self.compiled[batch_size] = decode

    def draw(
        self, prompts: Sequence[list[int]], generators: Sequence[torch.Generator]
    ) -> Iterator[list[int | None]]:
        """Yield the tokens that continue the prompts, as `stream` does. Raises UserError."""
        o = self.options
        choose = chooser(generators, o.temperature, o.top_k, o.top_p, o.repetition_penalty)
        decode = self.compiled.get(len(prompts))
        steps = stream(self.model, prompts, o.max_new_tokens, END_OF_TEXT, choose, decode)
        start = time.perf_counter()
        for tokens in steps:
            self.seconds += time.perf_counter() - start
            self.tokens += sum(token is not None for token in tokens)
            yield tokens
            start = time.perf_counter()


def read_prompts(path: str) -> list[str]:
    """Return the lines of a file. Raises UserError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # "\r\n" becomes "\n"
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompt_file {path}: cannot be read: {error}") from None
    if not text:
        raise UserError(f"--prompt_file {path}: is empty; give a prompt on each line")
    return text.removesuffix("\n").split("\n")


def show(text: str) -> None:
    """Print a piece of text at once."""
    print(text, end="", flush=True)


def in_order(texts: Sequence[str], steps: Iterable[list[str | None]]) -> Iterator[str]:
    """Yield pieces of texts that grow together, in the order in which they are printed.

    What the first text gains comes at once; what the next has gained by then comes when the first
    has ended.
    """
    waiting, at = list(texts), 0
    nothing: list[str | None] = [""] * len(texts)
    for pieces in itertools.chain([nothing], steps):
        waiting = [text + (piece or "") for text, piece in zip(waiting, pieces, strict=True)]
        while pieces[at] is None and at + 1 < len(waiting):
            yield waiting[at] + SEPARATOR
            at += 1
        yield waiting[at]
        waiting[at] = ""
    yield SEPARATOR.join(waiting[at:])


def print_texts(sampler: Sampler, prompts: Sequence[str]) -> None:
    """Print num_samples texts of each prompt as they are drawn, in this order."""
    o = sampler.options
    texts = [(prompt, o.seed + i) for prompt in prompts for i in range(o.num_samples)]
    if o.compile:
        sampler.compile(min(o.batch_size, len(texts)))
    try:
        for first in range(0, len(texts), o.batch_size):
            batch, seeds = zip(*texts[first : first + o.batch_size], strict=True)
            show(SEPARATOR if first else "")
            encoded = [encode(sampler.model, prompt) for prompt in batch]
            tokens = sampler.draw(encoded, [seeded(seed) for seed in seeds])
            for piece in in_order(batch, decode_stream(tokens)):
                show(piece)
    finally:
        show("\n")  # also where Ctrl-C or an error ends this in the middle of a line


def converse(sampler: Sampler) -> None:
    """Continue what is typed, line by line.

    Each line continues the text so far; an empty one lets the model continue by itself. What the
    context cannot hold, with room for an answer, is forgotten.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # lets a typed line be edited
    o, context = sampler.options, list[int]()
    block_size, generator = sampler.model.config.block_size, seeded(o.seed)
    if o.compile:
        sampler.compile(1)
    given = [o.prompt] if "prompt" in o.model_fields_set else []
    while True:
        try:
            line = given.pop() if given else input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            show("\n" if sys.stdin.isatty() else "")
            return
        if not context:
            context = encode(sampler.model, line)
        elif line:
            context += encode(sampler.model, line if context[-1] == END_OF_TEXT else f"\n{line}")
        context = context[-max(block_size - o.max_new_tokens, block_size // 2, 1) :]
        with contextlib.suppress(KeyboardInterrupt):  # ends the answer
            for (piece,) in decode_stream(added_to(context, sampler.draw([context], [generator]))):
                show(piece or "")
        show("\n")


def added_to(context: list[int], steps: Iterable[list[int | None]]) -> Iterator[list[int | None]]:
    """Pass the steps of one text on, and append its tokens to the context."""
    for tokens in steps:
        context += [token for token in tokens if token is not None]
        yield tokens


def main(options: SampleOptions) -> None:
    """Print the texts. Raises UserError."""
    prompts = [options.prompt] if options.prompt_file is None else read_prompts(options.prompt_file)
    sampler = Sampler(options)
    with reported("stdout", advice=options.advice()):
        if options.interactive:
            converse(sampler)
        else:
            print_texts(sampler, prompts)
    speed = sampler.tokens / max(sampler.seconds, 1e-9)
    drawn = f"{sampler.tokens:,} tokens in {sampler.seconds:.2f} s: {speed:.1f} tokens/s"
    print(drawn, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with reported(OPTIONS.run, advice=OPTIONS.advice()):
        main(OPTIONS)
