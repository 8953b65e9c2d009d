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
from checkpoint.resume import load_optimizers, resumed_config
from checkpoint.state import put_random_state, read_state
from checkpoint.weights import build_model, load_model, read_weights
from config import Config, load_config
from data.token_file import HEADER_BYTES, TokenFileError, count_tokens, write_token_file
from dataloader import open_corpus
from model import GPT, GPTConfig
from optimizer import make_optimizers
from runtime.cli import ConfigError
from runtime.errors import UserError
from tests.conftest import ALONE, CPU, TINY, reseal, tokens_in
from train import train

settings.register_profile(
    "fuzz",
    derandomize=True,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
settings.load_profile("fuzz")  # derandomized: the same inputs on every machine
# what a disk, a bad copy or a hand does to a file: (kind, where as a share of the file, bytes)
mutations = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "replace", "zero"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=16),
    ),
    min_size=1,
    max_size=4,
)


def mutate(content: bytes, changes) -> bytes:
    data = bytearray(content)
    for kind, share, new in changes:
        at = min(int(share * len(data)), max(0, len(data) - 1))
        if kind == "flip" and data:
            data[at] ^= new[0] or 1
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = new
        elif kind == "replace":
            data[at : at + len(new)] = new
        else:
            data[at : at + len(new)] = bytes(len(new))
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


@settings(max_examples=1000)
@given(
    content=st.one_of(
        st.binary(max_size=1200),
        st.builds(
            lambda header, body: (
                np.array(header, dtype="<i4").tobytes().ljust(HEADER_BYTES, b"\0") + body
            ),
            st.lists(
                st.one_of(
                    st.sampled_from([20240520, 1, 0, -1, 5, 2**31 - 1]),
                    st.integers(-(2**31), 2**31 - 1),
                ),
                max_size=4,
            ),
            st.binary(max_size=40),
        ),
    )
)
def test_any_bytes_as_a_token_file(content, tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    read_tokens(path)


@settings(max_examples=500)
@given(changes=mutations)
def test_a_mutated_token_file(changes, tmp_path):
    whole = tmp_path / "whole"
    if not whole.exists():
        write_token_file(whole, [range(99)])
    path = tmp_path / "tokens.bin"
    path.write_bytes(mutate(whole.read_bytes(), changes))
    read_tokens(path)


# ---- YAML configs


def read_config(path: Path) -> None:
    try:
        config = load_config(str(path))
    except ConfigError as error:
        assert str(error).strip()
        assert all(len(line) < 2000 for line in str(error).splitlines())
    else:
        assert isinstance(config, Config)
        config.notes()
        path.with_name("again.yaml").write_text(config.to_yaml(), encoding="utf-8")
        assert load_config(str(path.with_name("again.yaml"))).to_yaml() == config.to_yaml()


VALID = """# a comment
base: speedup4.yaml
n_layer: 2
lr: 6e-4
betas: [0.9, 0.95]
run_name: some name
bf16: true
total_batch_tokens: none
"""


@settings(max_examples=500)
@given(
    content=st.one_of(
        st.binary(max_size=200),
        st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")),
    )
)
def test_any_bytes_as_a_config(content, tmp_path):
    (tmp_path / "fuzz.yaml").write_bytes(content)
    read_config(tmp_path / "fuzz.yaml")


@settings(max_examples=500)
@given(changes=mutations)
def test_a_mutated_config(changes, tmp_path):
    (tmp_path / "fuzz.yaml").write_bytes(mutate(VALID.encode(), changes))
    read_config(tmp_path / "fuzz.yaml")


yaml_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
names = st.one_of(st.sampled_from([*Config.model_fields, "base"]), st.text(max_size=8))


@settings(max_examples=500)
@given(values=st.dictionaries(names, yaml_values, max_size=5))
def test_any_values_in_a_config(values, tmp_path):
    (tmp_path / "fuzz.yaml").write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    read_config(tmp_path / "fuzz.yaml")


# ---- checkpoints

SMALL = TINY | {"n_layer": 1, "seq_len": 32, "batch_size": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The only checkpoint of a tiny run."""
    place = tmp_path_factory.mktemp("fuzz")
    write_folder = place / "data/tiny"
    write_folder.mkdir(parents=True)
    write_token_file(write_folder / "tiny_train_000000.bin", [[i % 100 for i in range(2000)]])
    config = load_config(
        **SMALL,
        max_steps=1,
        dataset="tiny",
        data_dir=str(place / "data"),
        log_dir=str(place / "logs"),
        device="cpu",
    )
    train(config, ALONE)
    return place / "logs/train/checkpoints/step_000001"


def read_checkpoint(folder: Path) -> None:
    """All that resuming reads."""
    try:
        state = read_state(folder)
        config, _ = resumed_config(load_config(max_steps=5), folder, state, 1)
        _, model = build_model(config, folder)
        optimizers, _ = make_optimizers(model, config)
        load_optimizers(folder, model, optimizers)
        for process_state in state.random:
            # what restore() makes an error of
            with contextlib.suppress(
                ValueError, KeyError, IndexError, TypeError, OverflowError, RuntimeError
            ):
                put_random_state(process_state, CPU)
    except (CheckpointError, UserError) as error:
        assert "Traceback" not in str(error)
        assert str(error).strip()
    with contextlib.suppress(CheckpointError):
        load_model(str(folder))


FILES = ["model.safetensors", "optimizer.safetensors", "checkpoint.json", "SHA256SUMS"]


@settings(max_examples=200)
@given(name=st.sampled_from(FILES), changes=mutations, sealed=st.booleans())
def test_a_mutated_checkpoint(name, changes, sealed, saved, tmp_path):
    folder = tmp_path / "checkpoints" / "step_000001"
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    before = (folder / name).read_bytes()
    (folder / name).write_bytes(mutate(before, changes))
    if sealed and name != "SHA256SUMS":  # as if it had been written so
        reseal(folder)
    elif (folder / name).read_bytes() != before:
        with pytest.raises(CheckpointError):
            read_state(folder)
    read_checkpoint(folder)


@settings(max_examples=300)
@given(name=st.sampled_from(FILES[:3]), content=st.binary(max_size=300))
def test_any_bytes_in_a_checkpoint(name, content, saved, tmp_path):
    folder = tmp_path / "checkpoints" / "step_000001"
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    (folder / name).write_bytes(content)
    reseal(folder)

    def resume():
        read_state(folder)
        read_weights(folder)
        config = load_config(**SMALL)
        model = GPT(GPTConfig.of(config))
        load_optimizers(folder, model, make_optimizers(model, config)[0])

    with pytest.raises(CheckpointError):
        resume()


@settings(max_examples=250)
@given(where=st.lists(st.integers(0, 30), min_size=1, max_size=5), value=yaml_values)
def test_any_values_in_a_checkpoints_state(where, value, saved, tmp_path):
    folder = tmp_path / "checkpoints" / "step_000001"
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    state = json.loads((folder / "checkpoint.json").read_text())
    target = state
    for depth, i in enumerate(where):  # wander down and plant the value
        keys = (
            list(target)
            if isinstance(target, dict)
            else list(range(len(target)))
            if isinstance(target, list)
            else []
        )
        if not keys:
            break
        key = keys[i % len(keys)]
        if depth == len(where) - 1 or not isinstance(target[key], dict | list):
            target[key] = value
            break
        target = target[key]
    (folder / "checkpoint.json").write_text(json.dumps(state))
    reseal(folder)
    read_checkpoint(folder)
