"""Comparing in turn: the engine on a clock of its own, intervals, and real runs of a tiny model."""

import json
import os
import random
import statistics
import subprocess
import sys

import pytest

from benchmarks.in_turn import (
    InTurnOptions,
    Side,
    narrow_enough,
    plan,
    ratios,
    take_turns,
    training_side,
)
from runtime.errors import TrainingError
from measure.ratio import Ratio, median_ratio, product
from tests.conftest import ROOT


class DriftingMachine:
    """A machine whose clock is its own: it grows slower by `drift` with each second, and its speed
    is uneven.
    """

    def __init__(self, drift, seed=0):
        self.now, self.drift, self.chance = 0.0, drift, random.Random(seed)

    def side(self, seconds):
        """A turn of something that takes so many seconds on a fresh machine; returns turns per
        second.
        """

        def turn():
            took = seconds * (1 + self.drift * self.now) * self.chance.uniform(0.95, 1.05)
            self.now += took
            return 1 / took

        return turn


def test_drift_that_turns_the_sign_one_after_the_other_does_not_in_turn():
    slow, fast = 1.1, 1.0
    machine = DriftingMachine(drift=0.02)
    first = [machine.side(slow)() for _ in range(20)]
    second = [machine.side(fast)() for _ in range(20)]
    assert statistics.median(second) / statistics.median(first) < 0.9  # the faster one looks slower
    machine = DriftingMachine(drift=0.02)
    rates = take_turns({"slow": machine.side(slow), "fast": machine.side(fast)}, rounds=20)
    found = median_ratio(ratios(rates, "fast", "slow"))
    assert found.low < 1.1 < found.high
    assert found.low > 1


def test_a_difference_that_is_not_there_is_about_1():
    machine = DriftingMachine(drift=0.05)
    found = median_ratio(
        ratios(take_turns({"a": machine.side(1), "b": machine.side(1)}, rounds=30), "b", "a")
    )
    assert str(found).startswith("about 1 (")


def test_every_other_round_goes_backwards_and_the_first_rounds_are_left_out():
    order = []
    rates = take_turns(
        {name: lambda name=name: order.append(name) or len(order) for name in "abc"},
        rounds=2,
        left_out=1,
    )
    assert "".join(order) == "abccbaabc"
    assert rates == {"a": [6, 7], "b": [5, 8], "c": [4, 9]}


def test_rounds_end_when_the_interval_is_narrow_enough_and_not_before_there_is_one():
    rates = take_turns({"a": lambda: 1.0, "b": lambda: 1.2}, rounds=50, enough=narrow_enough(0.02))
    assert len(rates["a"]) == 10
    chance = random.Random(3)
    rates = take_turns(
        {"a": lambda: 1.0, "b": lambda: chance.uniform(1, 3)}, rounds=50, enough=narrow_enough(0.02)
    )
    assert len(rates["a"]) == 50


@pytest.mark.parametrize(
    ("pairs", "low", "high"),
    [(6, 1, 6), (8, 1, 8), (9, 2, 8), (12, 3, 10), (20, 6, 15), (100, 40, 61)],
)
def test_the_interval_has_the_ranks_of_the_sign_tests_tables(pairs, low, high):
    found = median_ratio(random.Random(0).sample(range(1, pairs + 1), pairs))
    assert (found.low, found.high) == (low, high)


def test_the_interval_holds_the_true_median_19_times_in_20_however_times_are_distributed():
    chance = random.Random(1)
    held = 0
    for _ in range(2000):
        found = median_ratio(
            [chance.lognormvariate(0, 0.3) ** 3 for _ in range(20)]
        )  # far from normal; median 1
        held += found.low <= 1 <= found.high
    assert 0.945 < held / 2000 < 0.975  # 95.9% by the table


def test_too_few_pairs_have_no_interval():
    with pytest.raises(ValueError, match="at least 6"):
        median_ratio([1.0] * 5)


def test_a_product_of_ratios_has_an_interval_that_holds_the_product_19_times_in_20():
    chance = random.Random(2)
    held = 0
    for _ in range(500):
        factors = [
            median_ratio([true * chance.lognormvariate(0, 0.2) for _ in range(20)])
            for true in (1.0, 2.0, 1.5)
        ]
        found = product(factors)
        assert found.width > max(factor.width for factor in factors)
        held += found.ends[0] <= 3.0 <= found.ends[1]
    assert 0.93 < held / 500 < 0.99
    one = Ratio(1.14, 1.09, 1.19)
    assert product([one]).ends == pytest.approx(one.ends)


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (Ratio(1.14, 1.09, 1.19), "1.14 (1.09 to 1.19)"),
        (Ratio(1.01, 0.97, 1.04), "about 1 (0.97 to 1.04)"),
        (Ratio(1.012, 1.008, 1.016), "1.012 (1.008 to 1.016)"),
        (Ratio(1.03, 1.004, 1.05), "1.030 (1.004 to 1.050)"),
        (Ratio(1.4), "1.40"),
    ],
)
def test_a_ratio_is_told_with_its_interval(ratio, text):
    assert str(ratio) == text


# ---- real processes

TINY = [
    "--n_layer",
    "1",
    "--n_head",
    "2",
    "--n_embd",
    "16",
    "--vocab_size",
    "128",
    "--seq_len",
    "16",
    "--block_size",
    "16",
    "--batch_size",
    "2",
    "--device",
    "cpu",
]


def in_turn(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.in_turn", *arguments],
        cwd=ROOT,
        text=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TURN_SECONDS": "0.01"},
    )


@pytest.fixture
def config(tmp_path, corpus):
    path = tmp_path / "tiny.yaml"
    path.write_text(f"dataset: tiny\ndata_dir: {corpus}\n")
    return str(path)


def test_two_configs_are_compared_by_the_steps_of_train_py(config, tmp_path, forked):
    output = tmp_path / "turns.json"
    run = in_turn(
        config,
        f"{config} --n_layer 2",
        "--rounds",
        "6",
        "--width",
        "0",
        "--output",
        str(output),
        "--",
        *TINY,
    )
    assert run.returncode == 0, run.stderr
    assert "6 rounds in turn" in run.stdout
    found = json.loads(output.read_text())
    one, two = found["sides"]
    assert "--n_layer 2" not in one["command"]
    for side in (one, two):
        assert len(side["tokens_per_sec"]) == 6
        assert len(side["turns"]) == 9
        assert [len(turn["seconds"]) for turn in side["turns"][:3]] == [1, 1, 1]
        assert len({len(turn["seconds"]) for turn in side["turns"][3:]}) == 1
        last = side["turns"][-1]
        assert last["tokens"] == 2 * 16 * len(last["seconds"])
        assert side["tokens_per_sec"][-1] == pytest.approx(last["tokens"] / sum(last["seconds"]))
        assert all(turn["peak_memory_mb"] > 50 for turn in side["turns"])
    assert one["turns"][0]["loss"] != two["turns"][0]["loss"]


def test_the_seconds_of_a_turn_are_those_in_the_log(config, tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.side",
        "--config",
        config,
        *TINY,
        "--log_dir",
        str(tmp_path),
        "--run_name",
        "side",
    ]
    run = subprocess.run(command, input="1\n3\n", cwd=ROOT, text=True, capture_output=True)
    assert run.returncode == 0, run.stderr
    turns = [json.loads(line) for line in run.stdout.splitlines()]
    rows = [
        line.split(",") for line in (tmp_path / "side" / "log.csv").read_text().splitlines()[1:]
    ]
    assert [float(row[4]) for row in rows] == pytest.approx(
        [s * 1e3 for turn in turns for s in turn["seconds"]], abs=0.01
    )
    assert turns[1]["loss"] == pytest.approx(float(rows[3][1]), abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["quickstart.yaml"], "at least two sides"),
        (["quickstart.yaml", "quickstart.yaml"], "two sides are the same"),
        (["quickstart.yaml", "nowhere.yaml"], "no such config file"),
        (["quickstart.yaml", "quickstart.yaml --flush"], "did you mean --flash"),
        (["quickstart.yaml", "--code", "/tmp"], "no copy of this code"),
        (
            ["quickstart.yaml", "speedup1.yaml", "--output", "nowhere/x.json"],
            "--output nowhere/x.json: no such folder",
        ),
        (
            ["quickstart.yaml", "quickstart.yaml --seed '1"],
            "no closing quotation; a side is quoted as a whole",
        ),
        (["quickstart.yaml", "speedup1.yaml", "--rounds", "3"], "greater than or equal to 6"),
    ],
)
def test_what_cannot_be_compared_is_one_error_line(arguments, said, forked):
    run = in_turn(*arguments)
    assert run.returncode == 2
    assert said in run.stderr
    assert "Traceback" not in run.stderr


def test_a_side_that_fails_says_which_and_why(config, tmp_path, forked):
    run = in_turn(config, f"{config} --dataset nowhere", "--rounds", "6", "--", *TINY)
    assert run.returncode == 1
    assert f"error: {config} --dataset nowhere: " in run.stderr
    assert "no such corpus" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_side_whose_threads_never_sleep_is_refused():
    busy = "import json\nfor _ in open(0): print(json.dumps({'seconds': [1], 'tokens': 1, 'asleep': False}), flush=True)"
    with (
        Side("busy", [sys.executable, "-c", busy]) as side,
        pytest.raises(TrainingError, match="keep computing"),
    ):
        side.turn()


def test_a_turn_has_as_many_steps_as_take_half_a_second():
    quick = (
        "import json\nfor steps in map(int, open(0)):"
        "print(json.dumps({'seconds': [0.1] * steps, 'tokens': 7 * steps, 'asleep': True}), "
        "flush=True)"
    )
    with Side("quick", [sys.executable, "-c", quick]) as side:
        assert [side.turn() for _ in range(4)] == pytest.approx([70] * 4)
    assert [len(turn["seconds"]) for turn in side.turns] == [1, 1, 1, 5]


def test_variables_before_a_config_are_its_environment():
    here, other = plan(
        InTurnOptions(sides=("quickstart.yaml", "A_B=1 C= quickstart.yaml --no-flash")),
        ["--lr", "1e-4"],
    )
    assert (here.environment, other.environment) == ({}, {"A_B": "1", "C": ""})
    assert other.arguments == ["--config=quickstart.yaml", "--lr", "1e-4", "--no-flash"]
    side = training_side("x", [], "logs", environment={"SEEN": "yes"})
    side.command = [
        sys.executable,
        "-c",
        "import json, os\nfor _ in open(0): print(json.dumps({'seconds': [1], 'asleep': True, "
        "'tokens': len(os.environ['SEEN'])}), flush=True)",
    ]
    with side:
        assert side.turn() == 3
