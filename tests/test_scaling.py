"""The same batch on more ranks: real runs of a tiny model."""

import csv
import json

import pytest

from measure.interleaved import rounds
from measure.profile.scaling import batch_size_of
from tests.conftest import TINY
from tests.test_bench import command_line


@pytest.fixture
def tiny_yaml(tmp_path, corpus):
    values = TINY | {"dataset": "tiny", "data_dir": str(corpus), "seq_len": 32, "batch_size": 4}
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(values | {"device": "cpu"}))
    return path


def test_one_rank_and_two_train_the_same_batch_interleaved(
    tiny_yaml, tmp_path, monkeypatch, forked
):
    monkeypatch.setattr(rounds, "TURN_SECONDS", 0.01)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    given = ("--scaling", "2,1", "--rounds", "6", "--log_dir", tmp_path / "logs")
    command_line("--config", tiny_yaml, *given)
    (folder,) = (tmp_path / "logs/bench").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names == {"interleaved.json", "report.html", "report.md", "results.csv", "scaling.png"}

    one, two = json.loads((folder / "interleaved.json").read_text())["sides"]
    assert "--total_batch_tokens=128 --batch_size=2" in two["command"]
    # the same sequences
    assert one["turns"][0]["loss"] == pytest.approx(two["turns"][0]["loss"], abs=1e-5)
    for turn in two["turns"]:
        assert [rank["tokens"] for rank in turn["ranks"]] == [turn["tokens"]] * 2

    with (folder / "results.csv").open(newline="") as file:
        one, two = csv.DictReader(file)
    assert (one["ranks"], one["efficiency"]) == ("1", "1.0")
    assert (two["ranks"], two["batch_size"], two["micro_steps"]) == ("2", "2", "1")
    share = float(two["over_first"]) / float(two["hardware"])
    assert float(two["efficiency"]) == pytest.approx(share)


def test_a_batch_is_split_into_the_largest_micro_steps_that_fit(tiny_config):
    config = tiny_config(batch_size=8, total_batch_tokens=32 * 32)
    assert [batch_size_of(config, n) for n in (1, 2, 4, 8, 32)] == [8, 8, 8, 4, 1]
