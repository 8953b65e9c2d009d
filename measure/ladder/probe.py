"""Measure the rates of a device before a ladder begins."""

import torch

from measure.ladder.record import Device
from runtime.device import (
    NOTED_SLOWDOWN,
    choose_device,
    device_name,
    has_bf16,
    matmul_tflops,
    slowdown,
    steady,
    timed,
    usable_precision,
)
from runtime.report import available_memory
from runtime.start import retain_freed_memory


def matmul_rates(device: torch.device) -> dict[str, float]:
    """Measure the TFLOP/s of a large matmul by dtype; on a GPU also of fp16, and of TF32.

    Empty if the device is too busy with other programs to measure one of them.
    """
    dtypes = ["float32", "bfloat16"]
    if device.type == "cuda":
        dtypes.append("float16")
    rates = {dtype: matmul_tflops(device, dtype, seconds=0.3) or 0.0 for dtype in dtypes}
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        rates["tf32"] = matmul_tflops(device, "float32", seconds=0.3) or 0.0
    return rates if all(rates.values()) else {}


def copy_rate(device: torch.device) -> float | None:
    """Measure the GB/s that copying a large tensor reads and writes; None if it is not steady."""
    source = torch.empty(2**26, device=device)
    target = source.clone()
    seconds = steady(lambda: timed(lambda: target.copy_(source), device), seconds=0.3)
    return 2 * source.nbytes / 1e9 / seconds if seconds else None


def launch_us(device: torch.device) -> float | None:
    """Measure the microseconds of the smallest operation; None if they are not steady."""
    one, times = torch.ones(1, device=device), 1000

    def launch() -> None:
        for _ in range(times):
            one.add_(0)

    seconds = steady(lambda: timed(launch, device), seconds=0.05)
    return 1e6 / times * seconds if seconds else None


def measure(name: str) -> Device:
    """Measure a device: auto, cuda, mps or cpu. If it is busy, its rates are missing."""
    device = choose_device(name)
    retain_freed_memory()  # runs do so too
    on_gpu, memory = device.type == "cuda", available_memory()
    if on_gpu:
        memory, _ = torch.cuda.mem_get_info(device)
    return Device(
        name=device_name(device),
        gpus=torch.cuda.device_count() if on_gpu else 0,
        memory_mb=memory / 2**20,
        tflops=matmul_rates(device),
        gigabytes_per_s=copy_rate(device),
        launch_us=launch_us(device),
        bf16=has_bf16(device),
        slow_bf16=device.type == "cpu" and slowdown(device) > NOTED_SLOWDOWN,
        medium=device.type == "cpu" and usable_precision(device, "medium") == "medium",
    )
