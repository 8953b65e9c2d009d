"""Several processes train as one does: the same numbers however the work is divided, one averaging
of gradients a step, and other dropout in each process.
"""

import json

import pytest

from checkpoint.weights import load_model
from optimizer import learning_rate
from tests.conftest import (
    ALONE,
    COMPILED,
    MODERN,
    console,
    folder_of,
    run_ranks,
    tiny_run,
    write_tiny_corpus,
)
from tests.test_resume import checkpoints
from tests.test_train import column
from train import train

SMALL = {
    "n_layer": 1,
    "n_embd": 16,
    "seq_len": 16,
    "max_steps": 8,
    "total_batch_tokens": 12 * 16,
    "real_vocab_size": 100,
    "tie_weights": True,
    "shuffle": True,
    "grad_clip": 0.5,
}
COMPILES = COMPILED | {"max_steps": 8, "total_batch_tokens": 48 * 32, "shuffle": True}

# trains each of some runs; several processes do so together
TRAIN = """if True:
    import json, sys
    from pathlib import Path
    import torch
    from runtime.world import joined_world
    from tests.conftest import tiny_run
    from train import train

    with joined_world(torch.device("cpu"), timeout=100) as world:
        for options in json.loads(sys.argv[1]):
            train(tiny_run(Path.cwd(), **options), world)
"""


@pytest.mark.parametrize(
    ("processes", "common", "sequences"),
    [*((n, SMALL, 12) for n in (1, 2, 3)), (2, COMPILES, 48)],
)
def test_losses_and_norms_do_not_depend_on_how_a_step_is_divided_up(
    processes, common, sequences, tmp_path
):
    """Every accumulation that makes 12 sequences on this number of ranks, with the loss whole and
    in parts; compiled, the one that makes 48 of 4 at a time.
    """
    write_tiny_corpus(tmp_path)
    runs = []
    for n in range(1, 13):
        divided = {"batch_size": sequences // n // processes, "loss_chunks": 1 + n % 3}
        if 12 % (n * processes) == 0 and (common is SMALL or divided["batch_size"] == 4):
            runs.append(common | divided | {"run_name": f"{n} micro-steps"})
    run_ranks(processes, "-c", TRAIN, json.dumps(runs), cwd=tmp_path)
    whole = tiny_run(tmp_path, **common | {"compile": False, "batch_size": sequences})
    train(whole, ALONE)
    for options in runs:
        config = tiny_run(tmp_path, **options)
        assert len(column(config)) == 8
        for figure in ("loss", "norm"):
            expected = pytest.approx(column(whole, figure), rel=1e-5, abs=0)
            assert column(config, figure) == expected, config.run_name
        load_model(config.run_name, config.log_dir)  # saved under plain names


# notes how often all gradients had been averaged when each step ended, and by micro-step a hash and
# the dropped share
LOOK = """if True:
    import hashlib, json, sys
    from pathlib import Path
    import torch
    import train
    from runtime.world import joined_world
    from tests.conftest import at_step, tiny_run

    class Patch:
        setattr = staticmethod(setattr)

    ended, averaged, masks = [], [], []

    def look(module, _, output):
        dropped = output == 0
        digest = hashlib.sha256(dropped.numpy().tobytes()).hexdigest()
        masks.append((digest, dropped.float().mean().item()))

    def average(world, bucket):
        averaged.append(bucket.is_last())
        reduced = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return reduced.then(lambda tensors: tensors.value()[0])

    def setup(*args):
        run = real_setup(*args)
        run.model.register_comm_hook(None, average)
        run.state.model.transformer.drop.register_forward_hook(look)
        return run

    real_setup, train.setup = train.setup, setup
    at_step(Patch, lambda step, _: ended.append(averaged.count(True)))
    with joined_world(torch.device("cpu"), timeout=100) as world:
        train.train(tiny_run(Path.cwd(), **json.loads(sys.argv[1])), world)
    Path(f"rank {world.rank}.json").write_text(json.dumps([ended, masks]))
"""


def test_gradients_are_averaged_once_a_step_and_each_process_drops_other_elements(tmp_path):
    write_tiny_corpus(tmp_path)
    options = json.dumps(
        {"max_steps": 3, "total_batch_tokens": 2 * 3 * 4 * 32, "keep_last": 0, "dropout": 0.5}
    )
    run_ranks(2, "-c", LOOK, options, cwd=tmp_path)
    found = [json.loads((tmp_path / f"rank {rank}.json").read_text()) for rank in range(2)]
    assert [ended for ended, _ in found] == [[1, 2, 3]] * 2, (
        "of 3 micro-steps only the last one averages"
    )
    masks = [mask for _, masks in found for mask in masks]
    assert len(masks) == len({which for which, _ in masks}) == 2 * 9, (
        "two micro-steps or processes drop the same"
    )
    assert all(0.4 < share < 0.6 for _, share in masks)


DIFFER = """if True:
    from pathlib import Path
    import torch
    import train
    from runtime.errors import reported
    from runtime.world import joined_world
    from tests.conftest import at_step, tiny_run

    class Patch:
        setattr = staticmethod(setattr)

    def drift(step, model):
        if step == 3 and world.rank == 1:
            next(model.parameters()).data[0, 0] += 1e-3

    at_step(Patch, drift)
    with reported("here"), joined_world(torch.device("cpu"), timeout=100) as world:
        train.train(tiny_run(Path.cwd(), checkpoint_every=2), world)
"""


def test_weights_that_differ_between_ranks_are_not_saved_and_end_the_run_on_all(tmp_path, here):
    write_tiny_corpus(tmp_path)
    for done in run_ranks(2, "-c", DIFFER, cwd=tmp_path, status=1):
        assert "Traceback" not in done.stderr
    said = console(here).splitlines()[-1]
    assert said.startswith("error: step 4: rank 1 and rank 0 have different weights")
    assert checkpoints(here) == ["step_000002"]


# trains each of some runs, and notes what the ranks exchange in each
EXCHANGES = """if True:
    import itertools, json, sys, types
    from pathlib import Path
    import torch
    import runtime.clock, train as train_module
    from torch.utils._python_dispatch import TorchDispatchMode
    from runtime.world import joined_world
    from tests.conftest import tiny_run
    from tests.fake_cuda import tensors_of

    class Exchanges(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d":
                calls.append([func.__name__, [[*t.shape] for t in tensors_of(args)]])
            return func(*args, **(kwargs or {}))

    with joined_world(torch.device("cpu"), timeout=100) as world:
        for options in json.loads(sys.argv[1]):
            ticks, calls = itertools.count(1, 0.5), []
            clock = types.SimpleNamespace(perf_counter=lambda: next(ticks))
            train_module.time = runtime.clock.time = clock
            with Exchanges():
                train_module.train(tiny_run(Path.cwd(), **options), world)
            Path(f"{options['run_name']} {world.rank}.json").write_text(json.dumps(calls))
"""


def test_two_ranks_exchange_the_same_tensors_in_the_same_order_in_every_kind_of_run(tmp_path):
    """A rank whose exchange the other does not join waits for it forever. The clock of max_minutes
    is exchanged with the figures, not by itself.
    """
    write_tiny_corpus(tmp_path)
    common = {"max_steps": 5, "batch_size": 2, "eval_every": 2, "val_fraction": 0.1}
    muon = {"optimizer": "muon", "normuon": True}
    modern = MODERN | {"fsdp": True}
    kinds = {"muon": muon, "clock": {"max_minutes": 0.1}, "steps": {}}
    kinds |= {"fsdp": {"fsdp": True}, "fsdp modern": modern}
    runs = [common | options | {"run_name": name} for name, options in kinds.items()]
    run_ranks(2, "-c", EXCHANGES, json.dumps(runs), cwd=tmp_path)
    first, second = (
        {name: json.loads((tmp_path / f"{name} {rank}.json").read_text()) for name in kinds}
        for rank in range(2)
    )
    assert first == second
    assert first["clock"] == first["steps"]
    for name, own in (("muon", "allgather"), ("fsdp", "reduce_scatter"), ("steps", "allreduce_")):
        assert sum(own in call for call, _ in first[name]) >= 5, name


def test_by_the_clock_of_rank_0_all_ranks_end_after_the_same_step(tmp_path):
    """Each reading of a rank's clock is later by half a second, on rank 1 by a whole one."""
    write_tiny_corpus(tmp_path)
    clock = """
        import itertools, types, runtime.clock, train as train_module
        ticks = itertools.count(1, 0.5 * (1 + world.rank))
        clock = types.SimpleNamespace(perf_counter=lambda: next(ticks))
        train_module.time = runtime.clock.time = clock
        for options"""
    options = SMALL | {"batch_size": 6, "max_minutes": 0.1, "run_name": "clock"}
    options |= {"lr_schedule": "cosine"}
    program = TRAIN.replace("\n        for options", clock)
    run_ranks(2, "-c", program, json.dumps([options]), cwd=tmp_path, timeout=100)
    config = tiny_run(tmp_path, **options)
    seconds = [0.0, 1.0, 2.5, 4.0, 5.5]  # three readings a step, of which the second counts
    assert column(config, "lr") == [
        learning_rate(step, config, at) for step, at in enumerate(seconds, start=1)
    ]
    summary = json.loads((folder_of(config) / "summary.json").read_text())
    rate = summary["median_tokens_per_sec"]
    assert rate == pytest.approx(12 * 16 / 1.0)
    assert column(config, "tokens_per_sec") == pytest.approx([rate] * 5), "of all ranks"
    mfu = summary["flops_per_token"] * rate / 2 / 1e12  # of one rank and 1 TFLOP/s
    assert summary["utilization"] == pytest.approx(mfu)
