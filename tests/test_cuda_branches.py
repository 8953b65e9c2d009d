"""Training on a CUDA device that is faked."""

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import train
from checkpoint.files import read_tensors
from checkpoint.names import all_checkpoints
from checkpoint.saved import read_state
from model import GPT
from runtime.errors import UserError
from runtime.world import World
from tests.conftest import CPU, ROOT, at_step, log, poisoned_at, tiny_run, write_tiny_corpus
from tests.fake_cuda import GPU, environment, fake_cuda

STEPS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "tf32": {"tf32": True},
    "fp16": {"fp16": True},
    "fp16 and fused_adamw": {"fp16": True, "fused_adamw": True},
    "fused_adamw and bf16": {"fused_adamw": True, "bf16": True, "log_every": 2, "flash": True},
    "fused_adamw and micro-steps": {"fused_adamw": True, "total_batch_tokens": 256},
    "loss_chunks": {"loss_chunks": 4, "tie_weights": True, "bf16": True},
    "without flash": {"flash": False},
    "muon": {"optimizer": "muon"},
    "grad_clip": {"grad_clip": 0.1},
    "micro-steps": {"total_batch_tokens": 256, "vocab_size": 256, "real_vocab_size": 100},
}
# In each step the host waits for the end of the step before, while the device computes gradients
# ("event"). If the optimizer cannot judge loss and norm on the device, the host reads whether both
# are sound; with fp16 its scaler reads then whether a gradient overflowed. A wait that leaves the
# device idle is READ or "synchronize".
EVENT, UPDATE, READ = "event", "update", "_local_scalar_dense.default"
WAITS = [EVENT, READ, UPDATE]
OTHER_WAITS = {
    **{name: [EVENT, UPDATE] for name in OPTIONS if "fused_adamw" in name},
    "fp16": [EVENT, READ, READ, UPDATE],
    "muon": [EVENT, READ, UPDATE, UPDATE],
}

# Runs in which something goes wrong
FAULTS: dict[str, tuple[dict[str, Any], Callable[[int, GPT], Any]]] = {
    "a step and the last one are not finite": ({"skip_nonfinite": 2}, poisoned_at(2, 8)),
    "too many are not finite": ({"skip_nonfinite": 1, "checkpoint_every": 3}, poisoned_at(4, 5)),
    "it saves and evaluates": (
        {"eval_every": 2, "checkpoint_every": 3, "val_fraction": 0.1, "log_every": 4},
        lambda *_: None,
    ),
}


def run_all(place):
    """Train with each set of options on the CPU and on the fake GPU.

    Returns the error, or the host waits of a step and the losses on both; of FAULTS, the logs and
    checkpoints of each run; of `stop`, the same after a signal in the second step.
    """
    write_tiny_corpus(place)
    options = OPTIONS | {"resume": {"optimizer": "muon", "dropout": 0.1, "flash": False}}
    results: dict[str, Any] = {
        name: run_pair(place, name, **chosen) for name, chosen in options.items()
    }
    for name, (chosen, act) in FAULTS.items():
        on_cpu = left_behind(place, f"{name} cpu", CPU, act, **chosen)
        with fake_cuda():
            results[name] = [on_cpu, left_behind(place, name, GPU, act, **chosen)]

    def stop(call, _):
        if call == 2:
            signal.raise_signal(signal.SIGTERM)

    with fake_cuda():
        results["stop"] = left_behind(place, "stop", GPU, stop)
    return results


def left_behind(place, name, device, act, **options):
    """Train eight steps with fused AdamW; returns log, weights, and counts of skipped steps."""
    options |= {"fused_adamw": True, "max_steps": 8, "device": device.type, "run_name": name}
    config, error = tiny_run(place, **options), ""
    with pytest.MonkeyPatch.context() as monkeypatch:
        at_step(monkeypatch, act)
        try:
            train.train(config, World(device))
        except UserError as raised:
            error = str(raised).partition(";")[0]
    folder = place / "logs" / name
    evaluated = folder / "eval.csv"
    saved = read_state(all_checkpoints(folder)[-1])
    weights = read_tensors(saved.folder / "model.safetensors")
    return {
        "error": error,
        "log": [[*map(float, row)] for row in log(folder)],
        "evaluations": evaluated.read_text().count("\n") if evaluated.exists() else 0,
        "saved": [saved.step, saved.skipped_steps],
        "weights": torch.cat([tensor.flatten()[:40] for tensor in weights.values()]).tolist(),
    }


def run_pair(place, name, **options):
    """Do what `run_all` does for one set of options."""
    marks: list[int] = []
    at = functools.partial(
        tiny_run, place, max_steps=STEPS, keep_last=name == "resume", **{"flash": True, **options}
    )
    try:
        train.train(at(run_name=f"{name} cpu", compile=False), World(CPU))
        with fake_cuda() as waits:
            first: dict[str, Any] = {"run_name": name}
            if name == "resume":
                train.train(at(device="cuda", max_steps=STEPS - 1, **first), World(GPU))
                first = {"resume": name}
            real = train.train_step

            def train_step(*args):
                marks.append(len(waits))
                return real(*args)

            update = register_optimizer_step_post_hook(lambda *_: waits.append(UPDATE))
            with patch.object(train, "train_step", train_step):
                train.train(at(device="cuda", **first), World(GPU))
            update.remove()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    logs = [log(place / "logs" / run) for run in (f"{name} cpu", name)]
    losses = [[float(loss) for _, loss, *_ in rows] for rows in logs]
    start, end = [*marks, 0, 0][1:3]  # steps 2 and 3 begin there
    return {"waits": waits[start:end], "losses": losses}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("fake_cuda")
    variables = environment(place)
    if variables is None:
        pytest.skip("needs a C++ compiler, for the fake CUDA device")
    if torch.version.cuda:
        pytest.skip("needs a PyTorch built without CUDA, in whose place the fake device comes")
    with (place / "printed").open("w") as printed:
        subprocess.run(
            [sys.executable, "-m", "tests.test_cuda_branches", place],
            env=os.environ | variables,
            cwd=ROOT,
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
    result = place / "result.json"
    assert result.exists(), (place / "printed").read_text()
    return json.loads(result.read_text())


@pytest.mark.parametrize("name", [*OPTIONS, "resume"])
def test_on_a_gpu_a_run_has_the_losses_of_a_cpu_and_waits_only_where_it_must(runs, name):
    result = runs[name]
    assert "error" not in result, result["error"]
    on_cpu, on_gpu = result["losses"]
    assert on_gpu == pytest.approx(on_cpu, abs=1e-4)
    if name != "resume":
        assert result["waits"] == OTHER_WAITS.get(name, WAITS)


@pytest.mark.parametrize("name", FAULTS)
def test_on_a_gpu_whose_figures_are_read_a_step_later_a_fault_ends_as_on_a_cpu(runs, name):
    on_cpu, on_gpu = runs[name]
    for part in ("error", "evaluations", "saved"):
        assert on_gpu[part] == on_cpu[part], part
    for ours, theirs in zip(on_gpu["log"], on_cpu["log"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4, nan_ok=True)
    assert on_gpu["weights"] == pytest.approx(on_cpu["weights"], abs=1e-5)


def test_a_signal_on_a_gpu_stops_a_run_with_all_its_steps_saved_and_logged(runs):
    assert [row[0] for row in runs["stop"]["log"]] == [1, 2, 3]
    assert runs["stop"]["saved"] == [3, 0]


if __name__ == "__main__":
    del os.environ["LD_PRELOAD"]  # git, which every run starts, would load PyTorch
    Path(sys.argv[1], "result.json").write_text(json.dumps(run_all(Path(sys.argv[1]))))
