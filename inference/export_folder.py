"""A model as a folder that Hugging Face's transformers loads: weights, tokenizer, model card."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from tiktoken.load import read_file_cached

from checkpoint.files import STATE
from checkpoint.hugging_face import write_hugging_face
from checkpoint.state import SavedState, read_state
from checkpoint.weights import find_weights, load_model
from config import PATH, Config
from data.tokenizer import END_OF_TEXT, SEPARATOR, find_vocabulary
from model import GPT
from runtime.cli import load
from runtime.errors import TrainingError, UserError
from runtime.files import flush_to_disk, whole_folder, write_whole
from runtime.runlog import EVAL_COLUMNS, read_rows

CARD = """\
---
{front}# license: choose one and say it here
---

# {name}

A GPT-2 with {parameters:,} parameters: {c.n_layer} layers, {c.n_head} heads, width {c.n_embd}, a
context of {c.block_size:,} tokens and a vocabulary of {c.n_vocab:,}. {history}

```python
{use}
```

It continues text; it was not trained to follow instructions, to answer questions or to be safe. It
states what is false as readily as what is true, and repeats the views, biases and mistakes of its
training text. Do not rely on it for facts, advice, or decisions about people.
"""
HISTORY = """\
It was trained from {start} on `{config.dataset}` (say here what that is, and under which terms),
for {saved.step:,} steps and {saved.tokens:,} tokens{val_loss}. Repeat it with
`{command} train.py --config config.yaml`; [`config.yaml`](config.yaml) has every option."""
USE = """\
from transformers import pipeline

generate = pipeline("text-generation", {name!r})
print(generate("The", max_new_tokens=50, do_sample=True, top_k=50)[0]["generated_text"])"""
USE_WITHOUT_TOKENIZER = """\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({name!r})  # add the tokenizer it was trained with"""


def export(source: str, folder: Path, log_dir: str = "logs") -> list[str]:
    """Write the model of `source`, as `find_weights` takes it, to a new folder, which is there
    whole or not at all; returns notes for the user.

    Raises UserError for weights that cannot be had, for a model that GPT-2 in transformers cannot
    be, and for a folder that is there already or cannot be written.
    """
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder}: is there already; choose another name or delete it first")
    path = find_weights(source, log_dir)
    model = load_model(str(path))
    saved = read_state(path) if (path / STATE).is_file() else None  # None: not of a run
    has_tokenizer = model.config.n_vocab == END_OF_TEXT + 1
    try:
        with whole_folder(folder, replace=False) as unfinished:
            write_hugging_face(unfinished, model.config, model.state_dict())
            ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END_OF_TEXT)
            write_json(unfinished / "generation_config.json", ids if has_tokenizer else {})
            if has_tokenizer:
                write_tokenizer(unfinished, model.config.block_size)
            if saved:
                write_whole(unfinished / "config.yaml", portable_config(saved).to_yaml())
            card = model_card(folder.name, model, path, saved, has_tokenizer)
            write_whole(unfinished / "README.md", card)
            for file in unfinished.iterdir():
                flush_to_disk(file)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{folder}: cannot be written: {error}") from None
    if has_tokenizer:
        return []
    return [
        f"its vocabulary of {model.config.n_vocab:,} tokens is not GPT-2's: the folder has no "
        f"tokenizer; add the one it was trained with"
    ]


def portable_config(saved: SavedState) -> Config:
    """Return a run's options without the paths of this machine."""
    of_this_machine = (*Config.names_marked(PATH), "log_dir", "resume")
    values = {name: value for name, value in saved.config.items() if name not in of_this_machine}
    start = public_name(values["init_from"])
    return load(Config, values | {"init_from": start.removeprefix("openai-community/")})


def public_name(source: str) -> str:
    """Name weights without folders of this machine: as Hugging Face does, or by the run."""
    if hub := re.search(r"models--([\w.-]+?)--([\w.-]+)", source):  # a folder of its cache
        return f"{hub[1]}/{hub[2]}"
    path = Path(source)
    return path.parent.parent.name if path.parent.name == "checkpoints" else path.name


def model_card(
    name: str, model: GPT, path: Path, saved: SavedState | None, has_tokenizer: bool
) -> str:
    """Return README.md, as Hugging Face shows it, for weights that were read from `path`."""
    c, start = model.config, public_name(str(path))
    padding = (c.vocab_size - c.n_vocab) * c.n_embd * (1 if c.tie_weights else 2)
    history = f"Its weights are those of `{start}`."
    if saved:
        start, ranks = public_name(saved.config["init_from"]), len(saved.random)
        history = HISTORY.format(
            start=start,
            config=portable_config(saved),
            saved=saved,
            val_loss=describe_val_loss(path.parent.parent / "eval.csv", saved.step),
            command="python" if ranks == 1 else f"torchrun --nproc_per_node={ranks}",
        )
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["gpt2"]}
    return CARD.format(
        front=yaml.safe_dump(front | ({"base_model": start} if "/" in start else {})),
        name=name,
        parameters=model.num_parameters() - padding,
        c=c,
        history=history,
        use=(USE if has_tokenizer else USE_WITHOUT_TOKENIZER).format(name=name),
    )


def describe_val_loss(path: Path, last_step: int) -> str:
    """Return the newest validation loss up to a step, from a run's eval.csv, if it has any."""
    rows = read_rows(path, EVAL_COLUMNS) if path.is_file() else {}
    losses = [(step, row["val_loss"]) for step, row in rows.items() if step <= last_step]
    losses = [(step, loss) for step, loss in losses if loss is not None]
    if not losses:
        return ""
    step, loss = max(losses)
    return f"; validation loss after step {step:,}: {loss:.4f} nats per token"


def write_tokenizer(folder: Path, block_size: int) -> None:
    """Write GPT-2's tokenizer as transformers keeps it. Raises TokenizerError if its vocabulary
    cannot be had.
    """
    files = {name: read_file_cached(place) for name, place in find_vocabulary().items()}
    (folder / "vocab.json").write_bytes(files["encoder.json"])
    (folder / "merges.txt").write_bytes(files["vocab.bpe"])
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    special = dict.fromkeys(flags, False) | {
        "id": END_OF_TEXT,
        "content": SEPARATOR,
        "special": True,
    }
    bpe = {
        "type": "BPE",
        "vocab": json.loads(files["encoder.json"]),
        # the first line names the format's version
        "merges": files["vocab.bpe"].decode().splitlines()[1:],
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": True,
    }
    parts = dict.fromkeys(("pre_tokenizer", "post_processor", "decoder"), byte_level)
    write_json(
        folder / "tokenizer.json",
        {"version": "1.0", "added_tokens": [special], "normalizer": None, "model": bpe} | parts,
    )
    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), SEPARATOR)
    write_json(folder / "special_tokens_map.json", tokens)
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": block_size,
    }
    write_json(folder / "tokenizer_config.json", tokens | settings)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file. Raises OSError that names it."""
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
