"""What the ranks of a run cost each other: the time spent waiting in a step, and their link."""

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from runtime.device import synchronize
from runtime.world import World

STEP = "a step of the run"
Interval = tuple[float, float]  # when something began and ended


def profiler(device: torch.device) -> profile:
    """Return PyTorch's profiler for steps on a device, each in `record_function(STEP)`."""
    return profile(
        activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    )


def figures_of(events: Iterable[Any]) -> dict[str, list[float]]:
    """Return the seconds of each `step` in a profile, and those of its `waiting` and `update`.

    A rank waits while a transfer is under way and it computes nothing: on a GPU, while no kernel
    runs but NCCL's; on a CPU, while PyTorch runs no operation. So a transfer beside the backward
    pass does not count. The time of slower ranks does, as a transfer lasts until all have come.
    """
    events = list(events)
    on_gpu = any(event.device_type == DeviceType.CUDA for event in events)
    steps: list[Interval] = []
    transfers: list[Interval] = []
    computing: list[Interval] = []
    updates: list[Interval] = []
    for event in events:
        interval = event.time_range.start / 1e6, event.time_range.end / 1e6  # of microseconds
        is_device = event.device_type == DeviceType.CUDA
        if event.name == STEP:  # the CPU's: the device has done its work at both ends
            steps += [] if is_device else [interval]
        elif on_gpu != is_device:
            continue
        elif event.name.startswith("Optimizer.step#"):
            updates.append(interval)
        elif is_transfer(event):
            transfers.append(interval)
        elif is_computation(event):
            computing.append(interval)
    return {
        "step": [end - start for start, end in steps],
        "waiting": [length(without(clipped(transfers, step), computing)) for step in steps],
        "update": [length(clipped(updates, step)) for step in steps],
    }


def is_transfer(event: Any) -> bool:
    """True for one of NCCL's kernels, and for the whole of a transfer by gloo."""
    is_kernel = event.name.startswith("nccl") and not event.is_user_annotation
    return is_kernel or event.name.startswith("gloo:")


def is_computation(event: Any) -> bool:
    """True for a kernel or an operation itself; not for what consists of others or communicates.

    A graph of torch.compile counts as a whole: on a CPU the profiler sees only some of its kernels.
    """
    if event.is_user_annotation or event.is_async or "c10d" in event.name:
        return False
    return not event.cpu_children or event.name.startswith("CompiledFunction")


def clipped(intervals: Iterable[Interval], to: Interval) -> list[Interval]:
    """Return the parts of intervals inside of `to`, each moment once, in order."""
    parts: list[Interval] = []
    for start, end in sorted(intervals):
        start, end = max(start, to[0], parts[-1][1] if parts else to[0]), min(end, to[1])
        if start < end:
            parts.append((start, end))
    return parts


def without(intervals: Sequence[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Return what is left of separate intervals outside of all the others."""
    left: list[Interval] = []
    others = sorted(others)
    for start, end in intervals:
        for taken in clipped(others, (start, end)):
            left.append((start, taken[0]))
            start = taken[1]
        left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths of intervals."""
    return sum(end - start for start, end in intervals)


def link_speed(world: World, message: int, seconds: float = 1.0) -> float:
    """Measure the GB/s that a rank's link carries in an all-reduce of `message` bytes.

    It is what NCCL's tests call the bus bandwidth: a ring all-reduce over N ranks sends each byte
    2 (N - 1) / N times over each link (NCCL tests, PERFORMANCE.md). The median of the transfers
    that fit into about `seconds`, at least five. All ranks have to call this.
    """
    numbers = torch.zeros(max(1, message // 4), device=world.device)

    def transfer() -> float:
        synchronize(world.device)
        start = time.perf_counter()
        dist.all_reduce(numbers)
        synchronize(world.device)
        return time.perf_counter() - start

    transfer()  # the first one connects
    count = world.broadcast(int(min(1000, max(5, seconds / transfer()))))
    sent = 2 * (world.world_size - 1) / world.world_size * 4 * numbers.numel()  # bytes
    return sent / statistics.median(transfer() for _ in range(count)) / 1e9
