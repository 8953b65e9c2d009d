"""Interleaved runs: the engine on a clock of its own, intervals, and real runs of a tiny model."""

import functools
import math
import random
import shlex
import sys
import time
from pathlib import Path

import pytest

from measure.interleaved.__main__ import InterleavedOptions, main, parse_side
from measure.interleaved.comparison import Comparison
from measure.interleaved.ratio import means_over_seeds, median_ratio, product, student_t
from measure.interleaved.rounds import Side, interleave, run_rounds, seconds_shown
from measure.interleaved.side import step_of, take_steps, without_end
from measure.report.estimate import Estimate
from run.log import read_rows
from runtime.cli import parse
from runtime.errors import TrainingError
from tests.conftest import ALONE, CPU, ROOT, cases, forks, refused, run
from train import setup, train


def test_drift_makes_no_factor():
    """On a machine that becomes a third slower in each round, and whose speed is uneven."""
    now, chance, rates = [0.0], random.Random(0), ([], [], [])

    def side(seconds, of_side):
        def train(_):
            took = seconds * (1 + 0.1 * now[0]) * chance.uniform(0.95, 1.05)
            now[0] += took
            of_side.append(1 / took)

        return train

    list(interleave([*map(side, (1.1, 1.0, 1.0), rates)], range(20), 2))
    slow, fast, same = (of_side[2:] for of_side in rates)
    ratio = median_ratio(fast, slow)
    assert 1 < ratio.low < 1.1 < ratio.high
    ratio = median_ratio(same, fast)
    assert ratio.low < 1 < ratio.high


@pytest.mark.parametrize(
    ("rates", "narrow"), [([1.0] * 9, False), ([1.0] * 10, True), ([1.0, 1.1] * 25, False)]
)
def test_rounds_end_when_the_interval_is_narrow_and_not_before_there_is_one(rates, narrow):
    sides = [
        {"name": "any", "tokens_per_sec": each, "turns": []} for each in (rates, [1.0] * len(rates))
    ]
    assert Comparison(left_out=3, sides=sides).is_narrow(0.02) == narrow


@pytest.mark.parametrize(
    ("pairs", "low", "high"),
    [(6, 1, 6), (8, 1, 8), (9, 2, 8), (20, 6, 15), (100, 40, 61)],
)
def test_the_interval_has_the_ranks_of_the_sign_tests_tables(pairs, low, high):
    found = median_ratio(random.Random(0).sample(range(1, pairs + 1), pairs), [1] * pairs)
    assert (found.low, found.high) == (low, high)


def test_an_interval_holds_the_true_ratio_19_times_in_20_however_times_are_distributed():
    chance, held, medians = random.Random(2), 0, [1.0, 2.0, 1.5]
    for _ in range(1000):
        factors = [  # far from normal
            median_ratio([true * chance.lognormvariate(0, 0.3) ** 3 for _ in range(20)], [1] * 20)
            for true in medians
        ]
        found = product(factors)
        assert found.width >= max(factor.width for factor in factors) * 0.999
        held += found.ends[0] <= math.prod(medians) <= found.ends[1]
    assert 0.94 < held / 1000 < 0.99  # of one ratio 95.9% by the table


def test_a_product_has_an_interval_only_if_each_factor_has_one_or_is_exactly_1():
    known = Estimate(2.0, 1.9, 2.1)
    assert product([known, Estimate(3.0)]) == Estimate(6.0)
    assert product([Estimate(1.0), known]).low == pytest.approx(1.9)


def test_means_over_seeds_share_their_variance_and_one_seed_has_no_interval():
    assert means_over_seeds({"a": [1.5], "b": [2.5]})["a"] == Estimate(1.5)
    found = means_over_seeds({"a": [1.0, 2.0, 3.0], "b": [5.0, 5.0, 5.0], "c": [0.0, 4.0]})
    # squares of 2, 0 and 8 over 2 + 2 + 1 degrees of freedom, at which t is 2.571
    deviation = math.sqrt((2 + 0 + 8) / 5)
    for name, mean, seeds in (("a", 2.0, 3), ("b", 5.0, 3), ("c", 2.0, 2)):
        assert found[name].value == mean
        assert found[name].high - mean == pytest.approx(2.571 * deviation / seeds**0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (9, 2.262), (10, 2.228), (22, 2.074), (100, 1.984)]
)
def test_students_t_is_the_tables(freedom, t):
    assert student_t(freedom) == pytest.approx(t, abs=5e-4)


VERDICTS = """
1.14 => 1.14
1.14 1.09 1.19 => 1.14 (1.09 to 1.19)
1.01 1.004 1.02 => 1.010 (1.004 to 1.020)
1.0 0.95 1.05 => 1.00 (0.95 to 1.05), no difference
0.998 0.9949 1.0049 => 0.998 (0.995 to 1.005), no difference
1.0 0.9499 1.0 => 1.00 (0.95 to 1.00), unclear
1.55 0.79 3.05 => 1.55 (0.79 to 3.05), unclear
"""


@pytest.mark.parametrize(("numbers", "shown"), cases(VERDICTS))
def test_a_factor_has_median_and_interval_and_one_of_three_verdicts(numbers, shown):
    assert str(Estimate(*map(float, numbers.split()))) == shown


# ---- a side that answers at once


ANSWER = "{'seconds': [0.1] * steps, 'tokens': 7 * steps, 'asleep': True}"


def answering(answer=ANSWER, kind=Side, name="two"):
    """A side that answers at once: a tenth of a second and 7 tokens a step."""
    code = f"import json\nfor steps in map(int, open(0)): print(json.dumps({answer}), flush=True)"
    return kind(name, [sys.executable, "-c", code], {})


def test_sides_start_anew_after_some_rounds_in_an_order_that_alternates():
    order, processes = [], []

    class Noted(Side):
        def __enter__(self):
            order.append("start")
            processes.append(super().__enter__().process)
            return self

        def train(self, counts=False):
            order.append(self.name)
            super().train(counts)

    found = run_rounds([answering(kind=Noted, name=name) for name in "ab"], 6, 0.0)
    assert "".join(order[2:]).split("startstart") == ["ababbaabbaabba", "abbaabba"]
    assert None not in [process.poll() for process in processes]
    # half a second's steps, once a side is warm; the second process knows how many
    for side in found.sides:
        assert [len(turn.seconds) for turn in side.turns] == [1, 1, 1, 5, 5, 5, 5, 1, 1, 5, 5]
        assert side.tokens_per_sec == pytest.approx([70] * 6)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ANSWER.replace("True", "False"), "its threads keep computing"),
        # torchrun's report of a killed rank ends so
        ("exit('traceback: Signal 9\\n======')", "traceback: Signal 9"),
    ],
)
def test_a_side_that_fails_or_does_not_sleep_is_an_error(answer, reason):
    with answering(answer) as side, pytest.raises(TrainingError, match=f"^two: {reason}"):
        side.train()


# ---- real processes

TINY = shlex.split(
    "--n_layer 1 --n_head 2 --n_embd 16 --vocab_size 128 --block_size 16 --seq_len 16 "
    "--batch_size 2 --device cpu"
)


compare = functools.partial(
    run,
    *("-m", "measure.interleaved"),
    cwd=ROOT,
    before=forks,
    OMP_NUM_THREADS="1",
    TURN_SECONDS="0.01",
)


@pytest.fixture
def config(tmp_path, corpus):
    path = tmp_path / "tiny.yaml"
    path.write_text(f"dataset: tiny\ndata_dir: {corpus}\n")
    return str(path)


def test_a_side_takes_the_steps_of_a_run_one_after_the_other(tiny_config):
    """Its losses are those of the run's own log, but for a learning rate next to 0."""
    config = tiny_config(max_steps=5, lr=1e-6)
    train(config, ALONE)
    rows = read_rows(Path(config.log_dir) / "train/log.csv")
    step = step_of(setup(without_end(tiny_config()), ALONE))
    first = take_steps(step, 2, CPU)
    last = take_steps(step, 2, CPU, frees_cache=True)  # after one that gets the memory again
    assert len(last["seconds"]) == 2
    losses = [rows[step]["loss"] for step in (2, 5)]
    assert [first["loss"], last["loss"]] == pytest.approx(losses, abs=1e-6)


@pytest.mark.usefixtures("forked")
def test_a_side_on_two_ranks_trains_the_same_batch_as_one_rank(config):
    texts = [config, f"RANKS=2 {config} --batch_size 1"]
    sides = [parse_side(text, [*TINY, "--total_batch_tokens", "32"]) for text in texts]
    for side in sides:
        with side:
            side.train()
    one, two = (side.measured.turns[0] for side in sides)
    assert [rank.tokens for rank in two.ranks] == [32, 32]
    assert (one.tokens, two.tokens) == (32, 32)
    assert two.loss == pytest.approx(one.loss, abs=1e-5)


def test_a_side_trains_with_the_code_on_its_pythonpath(tmp_path):
    (tmp_path / "measure/interleaved").mkdir(parents=True)
    (tmp_path / "measure/interleaved/side.py").write_text(
        'for _ in open(0): print(\'{"seconds": [1], "asleep": true, "tokens": 5}\', flush=True)'
    )
    texts = ["quickstart.yaml", f"PYTHONPATH={tmp_path} quickstart.yaml"]
    _, there = (parse_side(text, []) for text in texts)
    with there:
        there.train()
    assert there.measured.turns[0].tokens == 5


MISTAKES = """
nowhere.yaml => no such config file
quickstart.yaml --flush => did you mean --flash
RANKS=two quickstart.yaml => RANKS is a number of ranks, such as 2, not 'two'
"""


@pytest.mark.parametrize(("side", "message"), cases(MISTAKES))
def test_what_cannot_be_compared_is_one_error_line(side, message):
    with refused(message):
        main(parse(InterleavedOptions, ["quickstart.yaml", side], positional="sides"), [])


def test_a_side_is_a_config_or_a_module_after_its_environment_with_its_own_options_last():
    texts = (
        "quickstart.yaml",
        "A_B=1 C= quickstart.yaml --no-flash",
        "A_B=1 C= -m measure.peer transformers --config a.yaml",
    )
    here, other, program = (parse_side(text, ["--lr", "1e-4"]) for text in texts)
    assert other.environment == program.environment == here.environment | {"A_B": "1", "C": ""}
    assert other.command[3:] == ["--config=quickstart.yaml", "--lr", "1e-4", "--no-flash"]
    assert program.command[1:] == shlex.split(
        "-m measure.peer transformers --lr 1e-4 --config a.yaml"
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_seconds_are_shown_while_a_side_starts_on_a_terminal_alone(
    is_terminal, monkeypatch, capsys
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("COLUMNS", "40")
    with seconds_shown("a long name" * 9, "5 s"):
        time.sleep(1.3)
    printed = capsys.readouterr().out
    assert printed == (f"{('a long name' * 9)[:39]}\r\033[K" if is_terminal else "")
