"""The time that a device's work takes."""

import time
from typing import Any

import torch

from runtime.device import synchronize


def mark_time(device: torch.device) -> Any:
    """Mark this moment in the device's work: on CUDA by an event, so that nothing waits here."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    synchronize(device)
    return time.perf_counter()


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two marks; waits until the device has reached `end`."""
    if not hasattr(end, "elapsed_time"):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3
