"""The time that a device's work takes, and whether it is unusually long."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from runtime.device import synchronize

SLOW = 3.0  # times the median, from which a step is slow
WINDOW, FEWEST = 128, 16  # the most and the fewest earlier steps that make a median


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


def slowness(seconds: float, before: Sequence[float]) -> list[str]:
    """Return a line on a step that took far longer than the last ones."""
    median = statistics.median(before[-WINDOW:]) if len(before) >= FEWEST else seconds
    if seconds <= SLOW * median:
        return []
    return [f"took {seconds:.2f} s, {seconds / median:.1f} times the median of the last steps"]
