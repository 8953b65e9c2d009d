"""Measure what a ladder needs to know of a device before it begins."""

from typing import Any

import torch

from runtime.device import (
    choose_device,
    device_name,
    matmul_rates,
    steady,
    timed,
    usable_precision,
)
from runtime.report import physical_memory
from runtime.start import memory_left


def copy_rate(device: torch.device) -> float | None:
    """Measure the GB/s that copying a large tensor reads and writes; None if it is not steady."""
    source = torch.empty(2**26, device=device)
    target = source.clone()
    seconds = steady(lambda: timed(lambda: target.copy_(source), device), seconds=0.3)
    return seconds and 2 * source.nbytes / 1e9 / seconds


def launch_us(device: torch.device) -> float | None:
    """Measure the microseconds of an operation that has nothing to do; None if not steady."""
    one, times = torch.ones(1, device=device), 1000

    def launch() -> None:
        for _ in range(times):
            one.add_(0)

    seconds = steady(lambda: timed(launch, device), seconds=0.05)
    return seconds and 1e6 / times * seconds


def find_out(name: str) -> dict[str, Any]:
    """Return name, number and memory (MiB) of the device, its rates, as prediction.py wants
    them, and whether it has bfloat16 and, on a CPU, faster fp32 matmuls.

    `name`: auto, cuda, mps or cpu. There is no `tflops` if the device is too busy to measure them.
    """
    device = choose_device(name)
    on_gpu = device.type == "cuda"
    left = min(physical_memory(), memory_left())
    memory = torch.cuda.mem_get_info(device)[0] if on_gpu else left
    rates = matmul_rates(device)
    return {
        "device": device_name(device),
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "memory_mb": memory / 2**20,
        "gigabytes_per_s": copy_rate(device),
        "launch_us": launch_us(device),
        "bf16": not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False),
        "medium": device.type == "cpu" and usable_precision(device, "medium") == "medium",
    } | ({"tflops": rates} if rates else {})
