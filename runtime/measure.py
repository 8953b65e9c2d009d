"""What a device reaches: its matrix-product rate, what bfloat16 costs on it, its peak memory, and a
run's typical step.

python -m runtime.measure          what ladder.py asks before it begins, as JSON
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from runtime.device import choose_device, device_name, synchronize
from runtime.process import memory_left, resident_memory
from runtime.report import git_commit, machine, physical_memory
from runtime.world import World

NOTED_SLOWDOWN = 1.5  # of bfloat16; less may be noise


def peak_memory_mb(device: torch.device) -> float:
    """Most memory used so far, in MiB: tensors on the GPU on CUDA, the driver's on MPS, the
    process's on the CPU.

    0 on the CPU of Windows, which has no such account.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**20
    if sys.platform == "win32":
        return 0.0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS counts bytes, Linux KiB


def memory_before_mb(device: torch.device) -> float:
    """What of `peak_memory_mb` there is before a model is built, in MiB: Python and PyTorch on a
    CPU, elsewhere nothing.
    """
    return resident_memory() / 2**20 if device.type == "cpu" else 0.0


def matmul_seconds(n: int, device: torch.device, dtype: torch.dtype, budget: float) -> float:
    """Seconds of an n x n matrix product in `dtype`: the best of those done in `budget` seconds, at
    least two.
    """
    # random numbers, as equal ones take a GPU less power and so less time; not from the run's own
    # generators
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, dtype=dtype, generator=generator) for _ in range(2))
    begun, best = time.perf_counter(), float("inf")
    for first in (True, False):  # the first product loads the library
        while True:
            synchronize(device)
            start = time.perf_counter()
            torch.mm(a, b)
            synchronize(device)
            best = min(best, time.perf_counter() - start)
            if first or time.perf_counter() - begun >= budget:
                break
    return best


def matmul_tflops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """TFLOP/s of a square matrix product in `dtype`: the best over the sizes that fit into about
    `seconds`.

    This is what the device really reaches; a share of it says more than one of a data sheet's peak.
    Sizes double from 128 up to the one that would take longer: a CPU without instructions for
    float16 needs minutes for the largest.
    """
    begun, n, largest, rate = time.perf_counter(), 128, 8192 if device.type == "cuda" else 2048, 0.0
    while True:
        best = matmul_seconds(n, device, dtype, budget=seconds / 8)
        rate = max(rate, 2 * n**3 / best / 1e12)
        left = seconds - (time.perf_counter() - begun)
        if n >= largest or 8 * best > max(
            left, 0.25
        ):  # a product of the next size has 8 times the work
            return rate
        n *= 2


def bf16_slowdown(device: torch.device) -> float:
    """How many times longer a small matrix product takes in bfloat16 than in float32, measured in
    under 0.2 seconds.

    Below 1 where bfloat16 pays. A CPU without instructions for it emulates it.
    """
    # In turn, and on one thread, which does not wait for others: so that other programs on this
    # machine slow both sides alike.
    matrices = {
        dtype: torch.full((256, 256), 0.5, device=device, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    best = dict.fromkeys(matrices, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        begun = time.perf_counter()
        while time.perf_counter() - begun < 0.1:
            for dtype, matrix in matrices.items():
                start = time.perf_counter()
                torch.mm(matrix, matrix)
                synchronize(device)
                best[dtype] = min(best[dtype], time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return best[torch.bfloat16] / best[torch.float32]


def bf16_note(device: torch.device) -> list[str]:
    """A note for the user where bfloat16 makes matrix products slower than float32 would be: on
    some CPUs.
    """
    factor = bf16_slowdown(device) if device.type == "cpu" else 0.0
    if factor <= NOTED_SLOWDOWN:
        return []
    return [
        f"bf16 is slow here: a matrix product takes {factor:.1f} times as long as in fp32, "
        f"because this processor has no "
        f"instructions for it; --no-bf16 is faster"
    ]


class TimeLeft:
    """Estimates how long a run still takes, from its steps after the first one, which compiles."""

    def __init__(self, max_steps: int, clock: Callable[[], float]):
        self.max_steps, self.clock = max_steps, clock
        self.first: tuple[int, float] | None = None  # step, and when it ended

    def after(self, step: int) -> float | None:
        """Seconds left after a step; every step has to be told. None after the first one told, and
        after the last.
        """
        if self.first is None:
            self.first = step, self.clock()
        steps = step - self.first[0]
        return (
            None
            if not steps or step >= self.max_steps
            else (self.clock() - self.first[1]) / steps * (self.max_steps - step)
        )


def utilization(reached: float, matmul: float) -> float:
    """The share that `reached` has of what the device reaches in a matrix product, both in TFLOP/s.

    At most 1: a computation that reached more has shown that the device does too.
    """
    return reached / max(matmul, reached)


def live_figures(
    flops_per_token: int, dtype: torch.dtype, world: World
) -> Callable[[float], dict[str, float]]:
    """What tells utilization and peak memory after a step, given its tokens/s. Measures the device
    now, for half a second.
    """
    rate = matmul_tflops(world.device, dtype)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(
            world.device
        )  # the measurement's matrices are none of the run's
    return lambda tokens_per_sec: {
        "utilization": utilization(
            flops_per_token * tokens_per_sec / world.world_size / 1e12, rate
        ),
        "memory_mb": peak_memory_mb(world.device),
    }


def summarize(
    step_seconds: list[float],
    tokens_per_step: int,
    flops_per_token: int,
    dtype: torch.dtype,
    world: World,
    memory_before: float = 0.0,
) -> dict[str, Any]:
    """Figures of summary.json that follow from the times of a run's steps and from the device,
    measured in the run's own dtype; `memory_before` is as from `memory_before_mb`.

    Without any times, those that follow from them are None.
    """
    left_out = min(5, max(len(step_seconds) - 1, 0) // 2)  # the first steps compile and warm up
    median = statistics.median(step_seconds[left_out:]) if step_seconds else None
    peak = peak_memory_mb(world.device)  # before the measurement below adds to it
    rate = matmul_tflops(world.device, dtype, seconds=min(0.5, sum(step_seconds)))
    return {
        "median_dt_ms": median and median * 1e3,
        "median_tokens_per_sec": median and tokens_per_step / median,
        "median_leaves_out": left_out,
        "first_step_s": step_seconds[0] if step_seconds else None,
        "peak_memory_mb": peak,
        "memory_growth_mb": max(0.0, peak - memory_before),
        "flops_per_token": flops_per_token,
        "matmul_tflops": rate,
        "utilization": median
        and utilization(flops_per_token * tokens_per_step / median / world.world_size / 1e12, rate),
        "machine": machine(),
        "device": device_name(world.device),
        "world_size": world.world_size,
        "torch": torch.__version__,
        "git": git_commit(),
    }


def main() -> None:
    """Print what a ladder needs to know of the device `auto`, or of the one named. Memory in MiB."""
    device = choose_device(sys.argv[1] if len(sys.argv) > 1 else "auto")
    slowdown = bf16_slowdown(device) if device.type == "cpu" else 0.0
    memory = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else min(physical_memory(), memory_left())
    )
    print(
        json.dumps(
            {
                "device": device_name(device),
                "gpus": torch.cuda.device_count() if device.type == "cuda" else 0,
                "memory_mb": memory / 2**20,
                "bf16_slowdown": slowdown if slowdown > NOTED_SLOWDOWN else None,
            }
        )
    )


if __name__ == "__main__":
    main()
