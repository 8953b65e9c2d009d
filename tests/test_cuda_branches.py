"""Training on a CUDA device that is faked, and on a fake process group of 8."""

import csv
import functools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from checkpoint.files import read_tensors
from checkpoint.resume import newest_whole_checkpoint
from model import GPT
from runtime import recent
from runtime.errors import UserError
from runtime.world import World
from tests.conftest import CPU, ROOT, at_step, tiny_run, write_tiny_corpus
from tests.fake_cuda import GPU, environment, fake_cuda
from tests.inductor_cuda import read_kernels

STEPS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"tf32": True},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp16 and fused_adamw": {"fp16": True, "fused_adamw": True},
    "fused_adamw": {"fused_adamw": True, "decay_matrices_only": True},
    "fused_adamw and bf16": {"fused_adamw": True, "bf16": True, "log_every": 2, "flash": True},
    "fused_adamw and micro-steps": {"fused_adamw": True, "total_batch_tokens": 256},
    "fused_adamw and skip_spikes": {"fused_adamw": True, "skip_spikes": 1},
    "loss_chunks": {"loss_chunks": 4, "tie_weights": True, "bf16": True},
    "recompute": {"recompute": True},
    "without flash": {"flash": False},
    "muon": {"optimizer": "muon"},
    "grad_clip": {"grad_clip": 0.1},
    "micro-steps": {"total_batch_tokens": 256, "vocab_size": 256, "real_vocab_size": 100},
    "compile": {"compile": True},
}
# In each step the host waits for the end of the step before, while the device computes gradients
# ("event"). If the optimizer cannot judge loss and norm on the device, the host reads both; with
# fp16 its scaler reads then whether a gradient overflowed. A wait that leaves the device idle is
# READ or "synchronize".
EVENT, UPDATE = "event", "update"
READ, SCALER = "_to_copy.default", "_local_scalar_dense.default"
WAITS = [EVENT, READ, UPDATE]
OTHER_WAITS = {
    **{name: [EVENT, UPDATE] for name in OPTIONS if "fused_adamw" in name},
    "fp16": [EVENT, READ, SCALER, UPDATE],
    "muon": [EVENT, READ, UPDATE, UPDATE],
}


def poisoned_at(*steps: int) -> Callable[[int, GPT], Any]:
    """Make the gradients of some steps nan."""

    def act(call: int, model: GPT) -> Any:
        if call not in steps:
            return None
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= float("nan")
        return torch.full((), float("nan"), device=model.lm_head.weight.device)

    return act


def large_at(*steps: int) -> Callable[[int, GPT], Any]:
    """Give some steps a large norm."""

    def act(call: int, model: GPT) -> Any:
        device = model.lm_head.weight.device
        return torch.full((), 1000.0, device=device) if call in steps else None

    return act


# Runs in which something goes wrong. The second large norm is no spike: the window has the first.
FAULTS: dict[str, tuple[dict[str, Any], Callable[[int, GPT], Any]]] = {
    "a step is not finite": ({"skip_nonfinite": 1}, poisoned_at(2)),
    "the last step is not finite": ({"skip_nonfinite": 2}, poisoned_at(7, 8)),
    "too many are not finite": ({"skip_nonfinite": 1, "checkpoint_every": 3}, poisoned_at(4, 5)),
    "a large norm twice": ({"skip_spikes": 2}, large_at(6, 7)),
    "it saves and evaluates": (
        {"eval_every": 2, "checkpoint_every": 3, "val_fraction": 0.1, "log_every": 4},
        lambda *_: None,
    ),
}


def run_all(place: Path) -> dict[str, Any]:
    """Train with each set of options on the CPU and on the fake GPU.

    Returns the error, or the host waits of a step and the losses on both; of FAULTS, what each run
    left behind; of `stop`, what a signal in the second step left.
    """
    write_tiny_corpus(place)
    options = OPTIONS | {"resume": {"optimizer": "muon", "dropout": 0.1, "flash": False}}
    results: dict[str, Any] = {
        name: run_pair(place, name, **chosen) for name, chosen in options.items()
    }
    with patch.object(recent, "WINDOW", 4):
        for name, (chosen, act) in FAULTS.items():
            on_cpu = left_behind(place, f"{name} cpu", CPU, act, **chosen)
            with fake_cuda():
                results[name] = [on_cpu, left_behind(place, name, GPU, act, **chosen)]

    def stop(call: int, _: GPT) -> None:
        if call == 2:
            signal.raise_signal(signal.SIGTERM)

    with fake_cuda():
        results["stop"] = left_behind(place, "stop", GPU, stop)
    return results


def left_behind(
    place: Path, name: str, device: torch.device, act: Callable[[int, GPT], Any], **options: Any
) -> dict[str, Any]:
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
    with (folder / "log.csv").open() as file:
        log = [
            [float(row[name]) for name in ("step", "loss", "norm")] for row in csv.DictReader(file)
        ]
    evaluated = folder / "eval.csv"
    saved = newest_whole_checkpoint(folder)[0]
    assert saved
    weights = read_tensors(saved.folder / "model.safetensors")
    return {
        "error": error,
        "log": log,
        "evaluations": evaluated.read_text().count("\n") if evaluated.exists() else 0,
        "saved": [saved.step, saved.skipped_steps, saved.skipped_spikes, len(saved.recent)],
        "weights": torch.cat([tensor.flatten()[:40] for tensor in weights.values()]).tolist(),
    }


def run_pair(place: Path, name: str, **options: Any) -> dict[str, Any]:
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

            def train_step(*args: Any) -> Any:
                marks.append(len(waits))
                return real(*args)

            update = register_optimizer_step_post_hook(lambda *_: waits.append(UPDATE))
            with patch.object(train, "train_step", train_step):
                train.train(at(device="cuda", **first), World(GPU))
            update.remove()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    logs = [place / "logs" / run / "log.csv" for run in (f"{name} cpu", name)]
    losses = [[float(row["loss"]) for row in csv.DictReader(log.open())] for log in logs]
    start, end = [*marks, 0, 0][1:3]  # steps 2 and 3 begin there
    return {"waits": waits[start:end], "losses": losses}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
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
def test_on_a_gpu_a_run_has_the_losses_of_a_cpu_and_waits_only_where_it_must(
    runs: dict[str, Any], name: str
) -> None:
    result = runs[name]
    if name == "compile" and "needs Triton" in result.get("error", ""):
        pytest.skip("needs the package triton")
    assert "error" not in result, result["error"]
    on_cpu, on_gpu = result["losses"]
    assert on_gpu == pytest.approx(on_cpu, abs=1e-4)
    if name != "resume":
        assert result["waits"] == OTHER_WAITS.get(name, WAITS)


@pytest.mark.parametrize("name", FAULTS)
def test_on_a_gpu_whose_figures_are_read_a_step_later_a_fault_ends_as_on_a_cpu(
    runs: dict[str, Any], name: str
) -> None:
    on_cpu, on_gpu = runs[name]
    for part in ("error", "evaluations", "saved"):
        assert on_gpu[part] == on_cpu[part], part
    assert len(on_gpu["log"]) == len(on_cpu["log"])
    for ours, theirs in zip(on_gpu["log"], on_cpu["log"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4, nan_ok=True)
    assert on_gpu["weights"] == pytest.approx(on_cpu["weights"], abs=1e-5)


def test_a_signal_on_a_gpu_stops_a_run_with_all_its_steps_saved_and_logged(
    runs: dict[str, Any],
) -> None:
    assert [row[0] for row in runs["stop"]["log"]] == [1, 2, 3]
    assert runs["stop"]["saved"] == [3, 0, 0, 3]


# The head's matmul in the forward pass, launches of Triton kernels in the forward and the backward
# pass, and the GB that they and all kernels move, at 64 x 1024. The second has all newer flags.
COUNTED = {
    ("speedup10", 2): ("addmm", 28, 41, 36.3, 68.8),
    ("gpt2_124m_fast", 2): ("mm", 22, 32, 37.1, 69.9),
    ("speedup10", 12): ("addmm", 138, 221, 108.7, 202.1),
    ("gpt2_124m_fast", 12): ("mm", 112, 182, 124.6, 217.9),
}


@pytest.mark.parametrize(
    ("config", "n_layer"),
    [pytest.param(*key, marks=pytest.mark.slow) if key[1] > 2 else key for key in COUNTED],
)
def test_code_for_an_h200_has_one_matmul_as_head_fused_attention_and_no_more_traffic(
    tmp_path: Path, config: str, n_layer: int
) -> None:
    pytest.importorskip("triton", reason="needs the package triton")
    if not torch.__version__.startswith("2.13"):
        pytest.skip("the figures are those of PyTorch 2.13")
    kernels = read_kernels(tmp_path, config, "batch_size=64", f"n_layer={n_layer}")
    if kernels is None:
        pytest.skip("needs a C++ compiler, for the fake CUDA device")
    first, *expected = COUNTED[config, n_layer]
    head = [k["name"] for k in kernels if k["flops"] == 2 * 64 * 1024 * 768 * 50304]
    assert head == [f"extern_kernels.{name}" for name in (first, "mm", "mm")]
    names = Counter((k["pass"], k["name"]) for k in kernels)
    flash = "torch.ops.aten._scaled_dot_product_flash_attention"
    assert names["forward", f"{flash}.default"] == n_layer
    assert names["backward", f"{flash}_backward.default"] == n_layer
    triton = sum(k["bytes"] for k in kernels if k["name"] == "triton")
    counted = [names[way, "triton"] for way in ("forward", "backward")]
    counted += [size / 1e9 for size in (triton, sum(k["bytes"] for k in kernels))]
    assert counted == pytest.approx(expected, rel=0.03)


class OfEight(World):
    """Rank 0 of eight alike, of which only this one is there."""

    def gather(self, value: Any) -> list[Any]:
        """Return what all would give."""
        return [value] * self.world_size


def all_reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over the ranks, as DDP does."""
    dist.all_reduce(bucket.buffer())
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(bucket.buffer())
    return done


@pytest.mark.parametrize("options", [{}, {"total_batch_tokens": 2048}, {"fsdp": True}], ids=str)
def test_ddp_and_fsdp_take_steps_among_eight_ranks(tiny_config, options: dict[str, Any]) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        run = train.setup(tiny_config(**options), OfEight(CPU, 0, 8))
        if isinstance(run.model, DistributedDataParallel):
            run.model.register_comm_hook(None, all_reduce)  # the fake group's own gives no result
        before = [p.detach().clone() for p in run.state.model.parameters()]
        results = [[*map(float, train.train_step(run, step))] for step in (1, 2)]
    finally:
        dist.destroy_process_group()
    after: list[Any] = list(run.state.model.parameters())
    # With FSDP a gradient is what the fake group leaves in memory, of any size.
    assert np.isfinite(results)[:, 0].all()
    if options.get("fsdp"):
        assert sum(p.to_local().numel() for p in after) < run.state.model.num_parameters() / 7
        assert isinstance(run.model, FSDPModule)
    else:
        assert np.isfinite(results).all()
        assert isinstance(run.model, DistributedDataParallel)
        assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))


if __name__ == "__main__":
    with patch("summary.matmul_tflops", lambda *_, **__: 700.0):
        Path(sys.argv[1], "result.json").write_text(json.dumps(run_all(Path(sys.argv[1]))))
