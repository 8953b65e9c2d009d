"""A model as a folder that Hugging Face's transformers loads: `python export.py quickstart
my-gpt2`.
"""

from runtime.cli import Name, Options
from runtime.errors import TrainingError, UserError, reported
from runtime.start import reconfigure_output, start


class ExportOptions(Options):
    """options"""

    run: Name
    """a run's name or folder, one of its checkpoints, gpt2 .. gpt2-xl, a Hugging Face folder, or a
    .pt file of nanoGPT
    """
    folder: Name
    """the new folder"""
    log_dir: Name = "logs"
    """folder that holds the runs"""


if __name__ == "__main__":
    # Before torch is imported, which takes seconds: --help and mistakes answer at once.
    OPTIONS = start(ExportOptions, description=__doc__, positional="run folder")

import contextlib
import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from checkpoint.files import STATE, CheckpointError, read_json
from checkpoint.hugging_face import HUGGING_FACE, write_hugging_face
from checkpoint.state import SavedState, read_state
from checkpoint.weights import find_model
from config import PATH, Config
from data.token_file import TokenFileError, count_tokens
from data.tokenizer import END_OF_TEXT, SEPARATOR, vocabulary_files
from dataloader import is_validation
from model import GPT
from runtime.cli import ConfigError, load
from runtime.files import BeingWrittenError, flush_to_disk, sole_writer, whole_folder, write_whole
from runtime.report import draw_losses, items, markdown_table
from runtime.runlog import EVAL_COLUMNS, LOG_COLUMNS, Row, curve, duration, read_rows

OF_THIS_MACHINE = (
    *Config.names_marked(PATH),
    "log_dir",
    "resume",
)  # not told to those who get the model
KNOWN_DATA = {
    "pydocs": "the language reference that ships inside CPython (`pydoc_data.topics`)",
    "shakespeare": "tiny Shakespeare, 1.1 MB of his plays",
    "fineweb": "[FineWeb-Edu](https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu) (Penedo et al. 2024), educational web "
    "pages, in the 10-billion-token sample",
}


# ---- the tokenizer


def write_tokenizer(folder: Path, block_size: int) -> None:
    """Write GPT-2's tokenizer as `transformers` keeps it. Raises TokenizerError if its vocabulary
    cannot be had.
    """
    files = vocabulary_files()
    (folder / "vocab.json").write_bytes(files["encoder.json"])
    (folder / "merges.txt").write_bytes(files["vocab.bpe"])
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": True,
    }
    special = {
        "id": END_OF_TEXT,
        "content": SEPARATOR,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [special],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": byte_level,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": json.loads(files["encoder.json"]),
                "merges": files["vocab.bpe"].decode().splitlines()[1:],
            },
        },
    )  # the first line names the format's version
    tokens = {"bos_token": SEPARATOR, "eos_token": SEPARATOR, "unk_token": SEPARATOR}
    write_json(folder / "special_tokens_map.json", tokens)
    write_json(
        folder / "tokenizer_config.json",
        tokens
        | {
            "tokenizer_class": "GPT2Tokenizer",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": block_size,
        },
    )


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file. Raises OSError that names it."""
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


# ---- what a run tells of its model


@dataclass
class Run:
    """A run up to the checkpoint that is exported."""

    name: str
    saved: SavedState
    config: Config  # without what belongs to this machine
    log: dict[int, Row]
    evaluations: dict[int, Row]
    summary: dict[str, Any]  # empty where it is of another step
    corpus_tokens: int | None  # where the corpus is still there
    has_validation_files: bool  # of its own, so that no share of the tokens was kept for validation


def run_of(checkpoint: Path) -> Run | None:
    """The run that a checkpoint belongs to; None where the weights come from elsewhere. Raises
    UserError.
    """
    if not (checkpoint / STATE).is_file():
        return None
    saved, checkpoint = read_state(checkpoint), checkpoint.absolute()
    values = {
        name: value
        for name, value in saved.config.items()
        if name in Config.model_fields and name not in OF_THIS_MACHINE
    }
    try:
        config = load(Config, values)
    except ConfigError as error:
        raise CheckpointError(
            f"{checkpoint}: its options are not those of a run: {str(error).splitlines()[0]}"
        ) from None
    short_names = {repository: name for name, repository in HUGGING_FACE.items()}
    if short_name := short_names.get(
        hub_name(config.init_from) or ""
    ):  # rather than their place in this machine's cache
        config = config.model_copy(update={"init_from": short_name})
    elif Path(config.init_from).is_absolute():
        config = config.model_copy(update={"init_from": Path(config.init_from).name})
    folder = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None
    log, evaluations = (
        {step: row for step, row in read_rows(folder / file, columns).items() if step <= saved.step}
        if folder and (folder / file).is_file()
        else {}
        for file, columns in (("log.csv", LOG_COLUMNS), ("eval.csv", EVAL_COLUMNS))
    )
    summary = (
        read_json(folder / "summary.json") if folder and (folder / "summary.json").is_file() else {}
    )
    corpus, corpus_tokens = (
        Path(saved.config.get("data_dir", config.data_dir)) / config.dataset,
        None,
    )
    with contextlib.suppress(OSError, TokenFileError):
        corpus_tokens = sum(map(count_tokens, corpus.glob("*.bin"))) or None
    return Run(
        folder.name if folder else checkpoint.name,
        saved,
        config,
        log,
        evaluations,
        summary if summary.get("steps") == saved.step else {},
        corpus_tokens,
        any(map(is_validation, corpus.glob("*.bin"))),
    )


# ---- the model card


def card(name: str, model: GPT, source: str, run: Run | None, has_tokenizer: bool) -> str:
    """README.md, as Hugging Face shows it beside a model. `source`: where the weights come from."""
    base = hub_name(run.config.init_from if run else source)
    front: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gpt2"],
    }
    if base:
        front["base_model"] = base
    if run and run.config.dataset == "fineweb":
        front["datasets"] = ["HuggingFaceFW/fineweb-edu"]
    c = model.config
    parameters = model.num_parameters() - (c.vocab_size - c.n_vocab) * c.n_embd * (
        1 if c.tie_weights else 2
    )  # without padding
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False).rstrip(),
        "# license: choose one and say it here",
        "---",
        "",
        f"# {name}",
        "",
        f"A GPT-2 with {parameters:,} parameters: {c.n_layer} layers, {c.n_head} heads, width "
        f"{c.n_embd}, a context of "
        f"{c.block_size:,} tokens and a vocabulary of {c.n_vocab:,}. "
        + (
            f"It was trained {origin(run)} on {run.config.dataset}, for {run.saved.step:,} steps."
            if run
            else f"Its weights are those of {base or f'`{Path(source).name}`'}."
        ),
        "",
        "## Use",
        "",
        "```python",
        *how_to_use(name, has_tokenizer),
        "```",
        "",
    ]
    if not has_tokenizer:
        lines += [
            f"It comes without a tokenizer: its vocabulary of {c.n_vocab:,} tokens is not GPT-2's.",
            "",
        ]
    if run:
        lines += [
            "## Data",
            "",
            data(run),
            "",
            "## Training",
            "",
            *markdown_table(items("", ""), recipe(run)),
            "",
            "To repeat it, with the corpus in `data/`:",
            "",
            f"    {command(run)}",
            "",
            "[`config.yaml`](config.yaml) has every option.",
            "",
        ]
        if run.log:
            lines += ["![loss of each step](loss.png)", ""]
        lines += ["## Results", "", *markdown_table(items("", ""), figures(run)), ""]
    lines += [
        "## What it is not good for",
        "",
        "It continues text; it was not trained to follow instructions, to answer questions or to "
        "be safe. It states what is "
        "false as readily as what is true, and repeats the views, biases and mistakes of its "
        "training text. Do not rely on "
        "it for facts, advice, or decisions about people.",
        "",
    ]
    if run and run.config.init_from == "scratch" and run.saved.tokens < 20 * parameters:
        lines += [
            f"It has seen {run.saved.tokens / parameters:.2g} tokens for each of its parameters, "
            f"where about 20 make the "
            f"best use of the compute (Hoffmann et al. 2022): expect little of it.",
            "",
        ]
    return "\n".join(lines)


def hub_name(source: str) -> str | None:
    """The name on Hugging Face of weights that come from there, by their short name or their place
    in its cache.
    """
    found = re.search(r"models--([\w.-]+?)--([\w.-]+)", source)
    return f"{found[1]}/{found[2]}" if found else HUGGING_FACE.get(source)


def origin(run: Run) -> str:
    """What a run began with."""
    if run.config.init_from == "scratch":
        return "from scratch"
    path = Path(run.config.init_from)
    mine = path.parent.parent.name if path.parent.name == "checkpoints" else path.name
    return f"from the weights of {hub_name(str(path)) or f'`{mine}`'}"


def how_to_use(name: str, has_tokenizer: bool) -> list[str]:
    """Lines of Python that load the model."""
    if not has_tokenizer:
        return [
            "from transformers import AutoModelForCausalLM",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({name!r})",
        ]
    return [
        "from transformers import pipeline",
        "",
        f"generate = pipeline('text-generation', {name!r})",
        "print(generate('The', max_new_tokens=50, do_sample=True, temperature=0.8, "
        "top_k=50)[0]['generated_text'])",
    ]


def data(run: Run) -> str:
    """The corpus in words."""
    name, size = run.config.dataset, f", {run.corpus_tokens:,} tokens" if run.corpus_tokens else ""
    share = 0.0 if run.has_validation_files else run.config.val_fraction
    held_out = f" The last {share:.1%} were kept for validation." if share else ""
    about = KNOWN_DATA.get(name, "say here what it is, where it comes from and under which terms")
    return f"`{name}`{size}: {about}.{held_out}"


def recipe(run: Run) -> list[tuple[str, str]]:
    """How the model was trained, as rows of a table."""
    c, saved = run.config, run.saved
    per_step, processes = saved.tokens_per_step, len(saved.random)
    schedule = (
        "constant"
        if c.lr_schedule == "constant"
        else f"{c.lr_schedule} to {c.final_lr():g} at step {c.max_steps:,}"
    )
    rows = [
        (
            "weights at the start",
            origin(run)
            + (
                f", init {c.init}" + ", residual scaling" * c.residual_scaling
                if c.init_from == "scratch"
                else ""
            ),
        ),
        ("steps", f"{saved.step:,} of {c.max_steps:,}"),
        (
            "tokens a step",
            f"{per_step:,}: sequences of {c.seq_len:,}, {c.batch_size} at a time on {processes} "
            f"process{'es' * (processes > 1)}, "
            f"{per_step // (c.batch_size * c.seq_len * processes)} times",
        ),
        ("tokens", f"{saved.tokens:,}, {'shuffled' if c.shuffle else 'in the order of the text'}"),
        (
            "learning rate",
            f"{c.lr:g}, {schedule}, {c.warmup_steps:,} steps of warm-up"
            + (f"; Muon's {c.muon_lr:g}" if c.optimizer == "muon" else ""),
        ),
        (
            "optimizer",
            f"{'Muon and AdamW' if c.optimizer == 'muon' else 'AdamW'}, betas {c.betas[0]:g} and "
            f"{c.betas[1]:g}, eps "
            f"{c.eps:g}, weight decay "
            f"{c.weight_decay:g}{' of matrices only' * c.decay_matrices_only}",
        ),
        ("gradient clipping", f"{c.grad_clip:g}" if c.grad_clip else "none"),
        ("dropout", f"{c.dropout:g}"),
        ("embedding and output head", "one matrix" if c.tie_weights else "two matrices"),
        (
            "precision",
            f"{'bfloat16' if c.bf16 else 'float16'} autocast, float32 weights"
            if c.bf16 or c.fp16
            else "float32" + ", TF32 products" * c.tf32,
        ),
        ("seed", str(c.seed)),
    ]
    if run.summary:
        rows += [
            ("machine", f"{run.summary.get('device')}; {run.summary.get('machine')}"),
            (
                "software",
                f"PyTorch {run.summary.get('torch')}, commit {run.summary.get('git') or 'unknown'}",
            ),
        ]
    return rows


def command(run: Run) -> str:
    """What to type to repeat the run."""
    processes = len(run.saved.random)
    start = "python" if processes == 1 else f"torchrun --nproc_per_node={processes}"
    return f"{start} train.py --config config.yaml"


def figures(run: Run) -> list[tuple[str, str]]:
    """What came out, as rows of a table."""
    rows = []
    if run.log:
        step, row = max(run.log.items())
        if row["loss"] is not None and math.isfinite(row["loss"]):
            rows.append((f"training loss, step {step:,}", f"{row['loss']:.4f} nats per token"))
    # the last of each: they may be of different steps
    latest = {
        column: (step, value)
        for step, row in run.evaluations.items()
        for column, value in row.items()
        if value is not None
    }
    for column, (step, value) in latest.items():
        if column == "val_loss":
            rows += [
                (f"validation loss, step {step:,}", f"{value:.4f} nats per token"),
                (f"validation perplexity, step {step:,}", f"{math.exp(min(value, 700)):,.2f}"),
            ]
        elif column != "step":
            rows.append((f"{column}, step {step:,}", f"{value:.4f}"))
    said: dict[str, tuple[str, Callable[[float], str]]] = {
        "median_tokens_per_sec": ("speed", lambda value: f"{value:,.0f} tokens/s"),
        "seconds": ("time of the last call", duration),
        "peak_memory_mb": ("peak memory", lambda value: f"{value:,.0f} MB"),
    }
    return rows + [
        (name, describe(run.summary[key]))
        for key, (name, describe) in said.items()
        if run.summary.get(key) is not None
    ]


# ---- the folder


def check_folder(folder: Path) -> None:
    """Raises UserError unless the folder can be made."""
    if folder == Path.cwd():
        raise UserError(f"{folder}: is the working directory; name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"{folder}: is there already and is not empty; choose another name or delete it first"
        )
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is there and is no folder; choose another name")


def export(source: str, folder: Path, log_dir: str = "logs") -> list[str]:
    """Write the model of `source`, as weights.py's `find_weights` takes it, to a new folder, which
    is there whole or not at all; returns notes for the user.

    Raises UserError for weights that cannot be had, for a model that GPT-2 in `transformers` cannot
    be, and for a folder that is there already or cannot be written.
    """
    folder = folder.resolve()
    check_folder(folder)
    path, model = find_model(source, log_dir)
    run, has_tokenizer = run_of(path), model.config.n_vocab == END_OF_TEXT + 1
    try:
        with sole_writer(folder), whole_folder(folder, replace=False) as unfinished:
            write_hugging_face(unfinished, model.config, model.state_dict())
            ids = (
                {
                    "bos_token_id": END_OF_TEXT,
                    "eos_token_id": END_OF_TEXT,
                    "pad_token_id": END_OF_TEXT,
                }
                if has_tokenizer
                else {}
            )
            write_json(unfinished / "generation_config.json", ids)
            if has_tokenizer:
                write_tokenizer(unfinished, model.config.block_size)
            if run:
                write_whole(unfinished / "config.yaml", run.config.to_yaml())
            if run and run.log:
                validation = (
                    {run.name: curve(run.evaluations, "val_loss")} if run.evaluations else {}
                )
                draw_losses(unfinished / "loss.png", {run.name: curve(run.log)}, validation)
            text = card(folder.name, model, str(path), run, has_tokenizer)
            write_whole(
                unfinished / "README.md", text.encode(errors="replace").decode()
            )  # a name may be no text
            for file in unfinished.iterdir():
                flush_to_disk(file)
    except BeingWrittenError:
        raise UserError(
            f"{folder}: another process is writing it; wait for it or choose another name"
        ) from None
    except FileExistsError:
        raise UserError(
            f"{folder}: is there already; choose another name or delete it first"
        ) from None
    except (OSError, SafetensorError) as error:
        reason = str(getattr(error, "strerror", None) or error).removeprefix("cannot be written: ")
        raise TrainingError(f"{folder}: cannot be written: {reason}") from None
    if has_tokenizer:
        return []
    return [
        f"its vocabulary of {model.config.n_vocab:,} tokens is not GPT-2's: the folder has no "
        f"tokenizer; add the one it was "
        f"trained with"
    ]


def main(options: ExportOptions) -> None:
    """Export, and say what is there now. Raises UserError."""
    reconfigure_output()
    folder = Path(options.folder)
    notes = export(options.run, folder, options.log_dir)
    with reported("stdout"):
        for note in notes:
            print(f"note: {note}")
        print(
            f"{shlex.quote(str(folder))} has "
            f"{', '.join(sorted(path.name for path in folder.iterdir()))}; read its model card, "
            f"README.md, and choose a license"
        )
        print(f"in Python: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})")


if __name__ == "__main__":
    with reported(
        OPTIONS.folder,
        advice={"memory": "out of memory: the model takes three times the size of its weights"},
    ):
        main(OPTIONS)
