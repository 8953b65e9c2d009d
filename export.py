"""Export a model to a folder that Hugging Face's transformers loads: `python export.py quickstart
my-gpt2`.
"""

from runtime.cli import Name, Options, load
from runtime.errors import UserError, reported
from runtime.start import start


class ExportOptions(Options):
    """options"""

    run: Name
    """a run's name or folder, one of its checkpoints, gpt2 .. gpt2-xl, a Hugging Face folder, or a
    .pt file of nanoGPT
    """
    folder: Name
    """the new folder"""
    log_dir: Name = "logs"
    """folder of the runs"""


if __name__ == "__main__":
    # Read options before importing torch, which takes seconds, so that --help and errors are quick.
    OPTIONS = start(ExportOptions, positional="run folder")

import re
from pathlib import Path
from typing import Any

from checkpoint.hugging_face import write_hugging_face
from checkpoint.names import run_and_checkpoint
from checkpoint.weights import read_weights
from config import PATH, Config
from data.tokenizer import SEPARATOR, vocab_and_merges
from data.vocabulary import FILE, GPT2, Vocabulary
from runtime.console import Console, log
from runtime.files import atomic_folder, sole_writer, write_atomic, write_json

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
# license: choose one
---

# {name}

A GPT-2 with {c.n_layer} layers, {c.n_head} heads, width {c.n_embd}, a context of {c.block_size:,}
tokens and a vocabulary of {c.n_vocab:,}. {history}

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({name!r})
```

It continues text; it was not trained to follow instructions, to answer questions or to be safe. It
states what is false as readily as what is true, and repeats the views, biases and mistakes of its
training text. Do not rely on it for facts, advice, or decisions about people.
"""
HISTORY = """\
It was trained from {c.init_from} on `{c.dataset}` (say here what it is, and its terms),
for {saved.step:,} steps and {saved.tokens:,} tokens (ranks: {ranks}). On the same number of
ranks, `train.py --config config.yaml` repeats it; [`config.yaml`](config.yaml) has every option."""


def export(source: str, folder: Path, log_dir: str = "logs") -> None:
    """Write the model of `source` (see `find_weights`) to a new folder, which appears whole or not
    at all.

    Raises UserError for missing weights, for a model that transformers' GPT-2 cannot represent, and
    for a folder that exists already; OSError for one that cannot be written.
    """
    folder = folder.resolve()
    if folder.is_file() or any(folder.glob("*")):
        raise UserError(f"{folder}: is there already; choose another name or delete it first")
    weights = read_weights(source, log_dir)
    model, c, saved = weights.model(), weights.config, weights.saved
    vocabulary = weights.vocabulary
    weights.note_options()
    history = f"Its weights are those of `{public_name(str(weights.path))}`."
    with sole_writer(folder), atomic_folder(folder, replace=False) as unfinished:
        is_known = vocabulary.size == c.n_vocab
        end_of_text = vocabulary.end_of_text if is_known else None
        write_hugging_face(unfinished, c, model.state_dict(), end_of_text)
        if is_known:
            write_tokenizer(unfinished, vocabulary, c.block_size)
        else:
            log.warning(
                f"its vocabulary of {c.n_vocab:,} tokens is not known: the folder has no "
                "tokenizer; add the one it was trained with"
            )
        if saved:
            config = portable_config(saved.config)
            write_atomic(unfinished / "config.yaml", config.to_yaml())
            history = HISTORY.format(c=config, saved=saved, ranks=len(saved.random))
        write_atomic(unfinished / "README.md", CARD.format(name=folder.name, c=c, history=history))


def portable_config(values: dict[str, Any]) -> Config:
    """Return a run's options without the paths of this machine."""
    # without the options of a newer version of this code, which `Weights.note_options` names
    kept = Config.model_fields.keys() - {*Config.names_marked(PATH), "log_dir", "resume"}
    values = {name: value for name, value in values.items() if name in kept}
    names = {"init_from": public_name(values["init_from"]), "dataset": Path(values["dataset"]).name}
    return load(Config, values | names)


def public_name(source: str) -> str:
    """Name weights without this machine's folders: OpenAI's name, the run's or the file's."""
    if cached := re.search(r"models--[\w.-]+?--([\w.-]+)", source):  # Hugging Face's cache
        return cached[1]
    return run_and_checkpoint(Path(source))[0].name


def write_tokenizer(folder: Path, vocabulary: Vocabulary, block_size: int) -> None:
    """Write the tokenizer for transformers. Raises UserError without GPT-2's vocabulary."""
    from transformers import GPT2Tokenizer

    if vocabulary == GPT2:
        vocab, merges = vocab_and_merges()
        tokenizer = GPT2Tokenizer(vocab=vocab, merges=merges, model_max_length=block_size)
        tokenizer.save_pretrained(folder)
        return
    options: dict[str, Any] = {
        # transformers would split text by another pattern in its class for GPT-2
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
    }
    options |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), SEPARATOR)
    write_atomic(folder / FILE, vocabulary.json)
    write_json(folder / "tokenizer_config.json", options)


def main(options: ExportOptions) -> None:
    """Export, and print how to use the folder. Raises UserError."""
    folder = Path(options.folder)
    export(options.run, folder, options.log_dir)
    print(f"wrote {folder}; read its model card, README.md, and choose a license")
    print(f"in Python: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})")


if __name__ == "__main__":
    advice = {"memory": "out of memory: the model takes three times the size of its weights"}
    with reported(OPTIONS.folder, advice=advice), Console():
        main(OPTIONS)
