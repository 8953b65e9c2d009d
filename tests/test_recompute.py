"""Activation checkpointing: the same numbers, bit for bit, from less memory."""

import dataclasses

import pytest
import torch
from torch._functorch import config as functorch_config

from config import load_config
from runtime.device import recompute_cheap_operations
from tests.conftest import ALONE, COMPILED, end_of
from train import train

BANS = ("ban_recompute_materialized_backward", "ban_recompute_used_far_apart")


def test_a_block_keeps_its_input_alone_where_it_trains_and_nothing_is_done_twice_elsewhere(
    tiny_model,
):
    x, passes, kept = torch.arange(32).view(1, 32), [], []

    def keep(tensor):
        kept.append(tensor.nbytes)
        return tensor

    def counted(action):
        passes.clear(), kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            action()
        return len(passes), sum(kept)

    def step():
        model(x, x).backward()

    model = tiny_model(n_layer=4, vocab_size=32)
    for block in model.transformer.h:
        block.ln_1.register_forward_hook(lambda *_: passes.append(1))
    count, plain = counted(step)
    assert count == 4
    model.transformer.config = dataclasses.replace(model.config, recompute=True)
    count, less = counted(step)
    assert (count, less < plain / 2) == (8, True)
    with torch.no_grad():
        assert counted(lambda: model(x, x))[0] == 4
    model.eval()
    assert counted(step)[0] == 4


@pytest.fixture(autouse=True)
def bans_restored():
    with functorch_config.patch({name: getattr(functorch_config, name) for name in BANS}):
        yield


@pytest.mark.slow
def test_compiled_runs_that_recompute_cheap_operations_or_blocks_are_the_same_run(tiny_config):
    kinds = ({"recompute_cheap": None}, {"recompute_cheap": False}, {"recompute": True})
    options = COMPILED | {"flash": True, "bf16": True, "max_steps": 3}
    little, much, blocks = (tiny_config(**options, **kind, run_name=str(kind)) for kind in kinds)
    for config in (little, much, blocks):
        train(config, ALONE)
    # the log, and the weights' hash
    ends = [(end["log"], end["tensors"][0]) for end in map(end_of, (little, much, blocks))]
    assert ends[0] == ends[1] == ends[2]


def test_compiled_runs_recompute_cheap_operations_by_default_on_a_cpu_alone():
    for device, by_default in (("cpu", True), ("cuda", False)):
        for wanted, recomputes in ((None, by_default), (not by_default, not by_default)):
            config = load_config(recompute_cheap=wanted, compile=True).on_device(device, 1)
            recompute_cheap_operations(bool(config.recompute_cheap))
            assert [getattr(functorch_config, name) for name in BANS] == [not recomputes] * 2
