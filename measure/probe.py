"""Measure what a ladder needs to know of a device before it begins."""

import json

import torch

from runtime.device import choose_device, device_name, matmul_tflops
from runtime.report import physical_memory
from runtime.start import memory_left


def matmul_rates(device: torch.device) -> dict[str, float]:
    """Measure the TFLOP/s of a large matmul in fp32 and bf16, for half a second or so."""
    dtypes = (torch.float32, torch.bfloat16)
    return {str(d).removeprefix("torch."): matmul_tflops(device, d, seconds=0.3) for d in dtypes}


def print_findings(name: str) -> None:
    """Print name, number and memory (MiB) of the device, its matmul rates (TFLOP/s), and whether it
    has bfloat16, as JSON.

    `name`: auto, cuda, mps or cpu.
    """
    device = choose_device(name)
    on_gpu = device.type == "cuda"
    left = min(physical_memory(), memory_left())
    memory = torch.cuda.mem_get_info(device)[0] if on_gpu else left
    found = {
        "device": device_name(device),
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "memory_mb": memory / 2**20,
        "tflops": matmul_rates(device),
        "bf16": not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False),
    }
    print(json.dumps(found))
