"""Training on a CUDA device that is faked: the numbers of a CPU, and the host waits only where it
must.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import optimizer
import train
from checkpoint.files import read_tensors
from checkpoint.saved import read_state
from runtime.errors import UserError
from runtime.world import World
from tests.conftest import CPU, ROOT, at_step, console, poisoned_at, tiny_run, write_tiny_corpus
from tests.fake_cuda import GPU, environment, fake_cuda
from tests.test_resume import checkpoints, newest
from tests.test_train import column

# In each step the host waits for the end of the step before, while the device has more to compute
# (EVENT). If the optimizer cannot judge loss and norm on the device, the host reads whether both
# are sound; with fp16 its scaler reads then whether a gradient overflowed.
EVENT, READ = "event", "_local_scalar_dense.default"  # any other wait leaves the device idle
FUSED = {"fused_adamw": True}
RUNS: dict[str, Any] = {
    "tf32": ({"tf32": True}, [READ, EVENT]),
    "fp16": ({"fp16": True}, [READ, READ, EVENT]),
    "fp16, fused": (FUSED | {"fp16": True}, [EVENT]),
    "bf16, fused": (FUSED | {"bf16": True, "log_every": 2}, [EVENT]),
    "micro-steps, fused": (FUSED | {"total_batch_tokens": 256}, [EVENT]),
    "loss_chunks": ({"loss_chunks": 4, "tie_weights": True, "bf16": True}, [READ, EVENT]),
    "without flash": ({"flash": False}, [READ, EVENT]),
    "muon": ({"optimizer": "muon"}, [READ, EVENT]),
    "grad_clip": ({"grad_clip": 0.1}, [READ, EVENT]),
    "padded vocabulary": ({"vocab_size": 256, "real_vocab_size": 100}, [READ, EVENT]),
    "CUDA graphs": (
        {"compile": True, "compile_mode": "reduce-overhead", "total_batch_tokens": 256},
        [READ, EVENT],
    ),
}


def stop_at_2(call, _):
    if call == 2:
        signal.raise_signal(signal.SIGTERM)


# Runs in which something happens, all with FUSED
EVENTFUL: dict[str, Any] = {
    "a step and the last one are not finite": ({"skip_nonfinite": 2}, poisoned_at(2, 8)),
    "too many are not finite": ({"skip_nonfinite": 1, "checkpoint_every": 3}, poisoned_at(4, 5)),
    "it saves and evaluates": (
        {"eval_every": 2, "checkpoint_every": 3, "log_every": 4},
        lambda *_: None,
    ),
    "it is stopped and resumed": ({"flash": False, "dropout": 0.1}, stop_at_2),
}


def attempt(place, device, name, options, act=lambda *_: None):
    """Train eight steps, and resume if the run was interrupted; returns the error, and what the
    host waited for from step 2 to step 3.
    """
    options = {"eval_every": 8, "val_fraction": 0.1, "max_steps": 8, "flash": True} | options
    config = tiny_run(place, **options, device=device.type, run_name=f"{name} {device.type}")
    marks, error = [], ""

    def mark(call, model):
        marks.append(len(waits))
        return act(call, model)

    fake = fake_cuda() if device == GPU else contextlib.nullcontext([])
    with fake as waits, pytest.MonkeyPatch.context() as patch:
        at_step(patch, mark)
        patch.setattr(optimizer, "CPU_HAS_FAST_BF16", True)  # Muon in bf16 on both
        try:
            if train.train(config, World(device))["interrupted"]:
                train.train(config.model_copy(update={"resume": "auto"}), World(device))
        except UserError as raised:
            error = str(raised).partition(";")[0]
    return [error, waits[marks[1] : marks[2]]]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of all runs on the fake GPU."""
    place = tmp_path_factory.mktemp("fake_cuda")
    if torch.version.cuda:
        pytest.skip("needs a PyTorch built without CUDA, in whose place the fake device comes")
    subprocess.run(
        [sys.executable, "-m", "tests.test_cuda_branches", place],
        env=os.environ | environment(place),
        cwd=ROOT,
        check=True,
    )
    return place


def outcomes(place, name, *options):
    """The errors and the run folders of a run on the CPU and of the one on the fake GPU, and what
    the host waited for; both have the same figures.
    """
    error, _ = attempt(place, CPU, name, *options)
    error_on_gpu, waits = json.loads((place / "results.json").read_text())[name]
    assert error_on_gpu == error
    runs = [place / f"logs/{name} {device.type}" for device in (CPU, GPU)]
    for figure, file in (("step", "log"), ("loss", "log"), ("norm", "log"), ("val_loss", "eval")):
        on_cpu, on_gpu = (column(run, figure, f"{file}.csv") for run in runs)
        assert on_gpu == pytest.approx(on_cpu, abs=1e-4, nan_ok=True), figure
    return *runs, waits


@pytest.mark.parametrize("name", RUNS)
def test_on_a_gpu_a_run_has_the_figures_of_a_cpu_and_waits_only_where_it_must(name, place):
    options, expected = RUNS[name]
    _, run, waits = outcomes(place, name, options | {"compile": False})
    assert sorted(waits) == expected
    note = "note: compile_mode reduce-overhead runs as default: "
    assert (note in console(run)) == ("compile" in options)


@pytest.mark.parametrize("name", EVENTFUL)
def test_on_a_gpu_whose_figures_are_read_a_step_later_a_run_ends_as_on_a_cpu(name, place):
    options, act = EVENTFUL[name]
    *runs, _ = outcomes(place, name, FUSED | options, act)
    on_cpu, on_gpu = (read_state(newest(run)) for run in runs)
    assert checkpoints(on_gpu.run)[-1] == checkpoints(on_cpu.run)[-1]
    assert on_gpu.skipped_steps == on_cpu.skipped_steps
    ours, theirs = (read_tensors(saved.folder / "model.safetensors") for saved in (on_gpu, on_cpu))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    summary = on_gpu.run / "summary.json"
    if act is stop_at_2:  # a CPU knows it a step earlier
        assert json.loads(summary.read_text())["resumed_after_step"] == 3


if __name__ == "__main__":
    del os.environ["LD_PRELOAD"]  # git, which every run starts, would load PyTorch
    PLACE = Path(sys.argv[1])
    write_tiny_corpus(PLACE)
    RESULTS = {name: attempt(PLACE, GPU, name, options) for name, (options, _) in RUNS.items()}
    for NAME, (OPTIONS, ACT) in EVENTFUL.items():
        RESULTS[NAME] = attempt(PLACE, GPU, NAME, FUSED | OPTIONS, ACT)
    (PLACE / "results.json").write_text(json.dumps(RESULTS))
