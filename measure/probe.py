"""Print what a ladder needs to know of a device before it begins, as JSON: `python -m
measure.probe`.
"""

import json

from runtime.cli import Options
from runtime.start import memory_left, start


class ProbeOptions(Options):
    """options"""

    device: str = "auto"
    """auto, cuda, mps or cpu"""


if __name__ == "__main__":
    OPTIONS = start(ProbeOptions, description=__doc__)

import torch

from runtime.device import (
    NOTED_SLOWDOWN,
    bf16_slowdown,
    choose_device,
    device_name,
    matmul_tflops,
)
from runtime.errors import reported
from runtime.report import physical_memory


def matmul_rates(device: torch.device) -> dict[str, float]:
    """Measure the TFLOP/s of a large matmul in fp32 and bf16, for half a second or so."""
    dtypes = (torch.float32, torch.bfloat16)
    return {str(d).removeprefix("torch."): matmul_tflops(device, d, seconds=0.3) for d in dtypes}


def main(options: ProbeOptions) -> None:
    """Print name, number and memory (MiB) of the device, and its matmul rates, in TFLOP/s."""
    device = choose_device(options.device)
    on_gpu = device.type == "cuda"
    slowdown = bf16_slowdown(device) if device.type == "cpu" else 0.0
    left = min(physical_memory(), memory_left())
    memory = torch.cuda.mem_get_info(device)[0] if on_gpu else left
    found = {
        "device": device_name(device),
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "memory_mb": memory / 2**20,
        "bf16_slowdown": slowdown if slowdown > NOTED_SLOWDOWN else None,
        "tflops": matmul_rates(device),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    with reported("stdout"):
        main(OPTIONS)
