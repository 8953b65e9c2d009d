"""What the tests share: a tiny model, a tiny corpus, and a run of the real command line."""

import hashlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from config import Config, load_config
from data.token_file import write_corpus
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
TINY: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 128}

# a shell starts its background jobs with Ctrl-C ignored, and Python leaves it so: the tests of Ctrl-C need it heard
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skipif(True, reason="needs a CUDA GPU"))


@pytest.fixture
def tiny_model() -> Callable[..., GPT]:
    def build(seed: int = 0, **options) -> GPT:
        torch.manual_seed(seed)
        return GPT(GPTConfig(**(TINY | options)))

    return build


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder `data` with the corpus `tiny`: 4,000 tokens below 100, each of which determines the next."""
    tokens = list(itertools.accumulate(range(3999), lambda token, _: (21 * token + 7) % 100, initial=0))
    write_corpus(tmp_path / "data" / "tiny", [tokens])
    return tmp_path / "data"


@pytest.fixture
def tiny_config(corpus: Path, tmp_path: Path) -> Callable[..., Config]:
    """Options of a run that takes a fraction of a second; keywords override them."""

    def build(**options) -> Config:
        values: dict[str, Any] = {"dataset": "tiny", "data_dir": str(corpus), "log_dir": str(tmp_path / "logs"), "device": "cpu",
                                  "seq_len": 32, "batch_size": 4, "max_steps": 6, "init": "gpt2"}
        return load_config(**(TINY | values | options))

    return build


def run(*command: str | Path, cwd: Path, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """A script of this project (`train.py`, ...) or another program, as a user would start it."""
    first, *rest = map(str, command)
    program = [sys.executable, str(ROOT / first)] if first.endswith(".py") else [first]
    return subprocess.run([*program, *rest], cwd=cwd, timeout=timeout, text=True, capture_output=True, env=os.environ | env)


def flags(config: Config) -> list[str]:
    """A config as command-line flags."""
    values = []
    for name in sorted(config.model_fields_set):
        value = getattr(config, name)
        if isinstance(value, bool):
            values.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            values += [f"--{name}", *map(str, value)]
        elif value is not None:
            values += [f"--{name}", str(value)]
    return values


def reseal(folder: Path) -> None:
    """Write a checkpoint's checksums anew, as one who means harm would."""
    (folder / "SHA256SUMS").write_text("".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("model.safetensors", "optimizer.safetensors", "checkpoint.json")))
