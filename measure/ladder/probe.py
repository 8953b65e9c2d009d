"""Measure what a ladder needs to know of a device before it begins."""

import time
from collections.abc import Callable
from typing import Any

import torch

from runtime.device import (
    choose_device,
    device_name,
    matmul_rates,
    synchronize,
    usable_precision,
)
from runtime.report import physical_memory
from runtime.start import memory_left


def copy_rate(device: torch.device) -> float:
    """Measure the GB/s that copying a large tensor reads and writes."""
    source = torch.empty(2**26, device=device)
    target = source.clone()
    return 2 * source.nbytes / 1e9 / best_seconds(lambda: target.copy_(source), device)


def launch_us(device: torch.device) -> float:
    """Measure the microseconds that an operation takes which has nothing to do."""
    one, times = torch.ones(1, device=device), 1000

    def launch() -> None:
        for _ in range(times):
            one.add_(0)

    return 1e6 / times * best_seconds(launch, device)


def best_seconds(work: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Return the least seconds that the work takes, after a first time."""
    seconds = []
    for _ in range(1 + times):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def find_out(name: str) -> dict[str, Any]:
    """Return name, number and memory (MiB) of the device, its rates, as prediction.py wants
    them, and whether it has bfloat16 and, on a CPU, faster fp32 matmuls.

    `name`: auto, cuda, mps or cpu.
    """
    device = choose_device(name)
    on_gpu = device.type == "cuda"
    left = min(physical_memory(), memory_left())
    memory = torch.cuda.mem_get_info(device)[0] if on_gpu else left
    return {
        "device": device_name(device),
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "memory_mb": memory / 2**20,
        "tflops": matmul_rates(device),
        "gigabytes_per_s": copy_rate(device),
        "launch_us": launch_us(device),
        "bf16": not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False),
        "medium": device.type == "cpu" and usable_precision(device, "medium") == "medium",
    }
