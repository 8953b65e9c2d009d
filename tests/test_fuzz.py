"""Random and mutated inputs to the three readers: a clean error or a valid result, nothing else."""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint.files import CheckpointError
from checkpoint.state import read_state
from config import Config, load_config
from data.token_file import HEADER_BYTES, TokenFileError, count_tokens
from dataloader import open_corpus
from runtime.cli import ConfigError
from tests.conftest import ALONE, tiny_run, tokens_in, write_tiny_corpus
from train import train

settings.register_profile(
    "fuzz", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("fuzz")  # derandomized: the same inputs on every machine
# what a disk, a bad copy or a hand does to a file: (kind, where as a share of the file, bytes)
kinds = st.sampled_from(["cut", "insert", "replace"])
changes = st.tuples(kinds, st.floats(0, 1), st.binary(min_size=1, max_size=16))
mutations = st.lists(changes, min_size=1, max_size=4)


def mutate(content: bytes, changes) -> bytes:
    data = bytearray(content)
    for kind, share, new in changes:
        at = min(int(share * len(data)), max(0, len(data) - 1))
        if kind == "cut":
            del data[at:]
        else:
            data[at : at + len(new) * (kind == "replace")] = new
    return bytes(data)


# ---- token files


def read_tokens(path: Path) -> None:
    try:
        count = count_tokens(path)
        assert len(tokens_in(path)) == count
        train_split, _ = open_corpus(path.parent, seq_len=4, n_vocab=100)
        for window in range(len(train_split)):
            x, y = train_split.read([window])
            assert x.max() < 100
            assert y.max() < 100
    except TokenFileError as error:
        assert path.name in str(error) or path.parent.name in str(error)
        assert "\n" not in str(error)


words = st.sampled_from([20240520, 1, 0, -1, 5, 2**31 - 1]) | st.integers(-(2**31), 2**31 - 1)
headers = st.lists(words, max_size=4).map(
    lambda header: np.array(header, dtype="<i4").tobytes().ljust(HEADER_BYTES, b"\0")
)


whole = np.array([20240520, 1, 99], "<i4").tobytes().ljust(HEADER_BYTES, b"\0") + bytes(2 * 99)


@settings(max_examples=300)
@given(
    st.binary(max_size=1200)
    | st.tuples(headers, st.binary(max_size=40)).map(b"".join)
    | mutations.map(lambda changes: mutate(whole, changes))
)
def test_any_bytes_as_a_token_file(tmp_path, content):
    (tmp_path / "tokens.bin").write_bytes(content)
    read_tokens(tmp_path / "tokens.bin")


# ---- YAML configs


def read_config(path: Path) -> None:
    try:
        config = load_config(str(path))
    except ConfigError as error:
        assert str(error).strip()
        assert all(len(line) < 2000 for line in str(error).splitlines())
    else:
        config.notes()
        again = path.with_name("again.yaml")
        again.write_text(config.to_yaml(), encoding="utf-8")
        assert load_config(str(again)).to_yaml() == config.to_yaml()


VALID = b"""# a comment
base: speedup4.yaml
n_layer: 2
lr: 6e-4
betas: [0.9, 0.95]
run_name: some name
bf16: true
total_batch_tokens: none
"""


yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
names = st.sampled_from([*Config.model_fields, "base"]) | st.text(max_size=8)


@settings(max_examples=400)
@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(str.encode)
    | mutations.map(lambda changes: mutate(VALID, changes))
    # JSON is YAML
    | st.dictionaries(names, yaml_values, max_size=5).map(
        lambda values: json.dumps(values).encode()
    )
)
def test_any_bytes_as_a_config(tmp_path, content):
    (tmp_path / "fuzz.yaml").write_bytes(content)
    read_config(tmp_path / "fuzz.yaml")


# ---- checkpoints


@pytest.fixture
def copied(tmp_path):
    """Copies the only checkpoint of a tiny run; returns the copy."""
    write_tiny_corpus(tmp_path)
    train(tiny_run(tmp_path, n_layer=1, batch_size=2, max_steps=1), ALONE)
    saved, copy = tmp_path / "logs/train/checkpoints/step_000001", tmp_path / "copy"
    return lambda: Path(shutil.copytree(saved, copy, dirs_exist_ok=True))


FILES = ["model.safetensors", "optimizer.safetensors", "checkpoint.json", "SHA256SUMS"]


@settings(max_examples=60)
@given(name=st.sampled_from(FILES), change=mutations)
def test_a_mutated_checkpoint(name, change, copied):
    folder = copied()
    before = (folder / name).read_bytes()
    (folder / name).write_bytes(mutate(before, change))
    damaged = mutate(before, change) != before
    with pytest.raises(CheckpointError) if damaged else contextlib.nullcontext():
        read_state(folder)
