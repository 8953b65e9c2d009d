"""What a ladder needs to know of a device before it begins, as JSON: `python -m measure.probe`."""

import json
import sys

import torch

from runtime.device import NOTED_SLOWDOWN, bf16_slowdown, choose_device, device_name
from runtime.report import physical_memory
from runtime.start import memory_left


def main() -> None:
    """Print the name, number and memory (MiB) of the device `auto`, or of the one named."""
    device = choose_device(sys.argv[1] if len(sys.argv) > 1 else "auto")
    on_gpu = device.type == "cuda"
    slowdown = bf16_slowdown(device) if device.type == "cpu" else 0.0
    left = min(physical_memory(), memory_left())
    memory = torch.cuda.mem_get_info(device)[0] if on_gpu else left
    found = {
        "device": device_name(device),
        "gpus": torch.cuda.device_count() if on_gpu else 0,
        "memory_mb": memory / 2**20,
        "bf16_slowdown": slowdown if slowdown > NOTED_SLOWDOWN else None,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
