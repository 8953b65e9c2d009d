"""What the processes of a run cost each other: the share of a step in which one only waits for
others, and their link's speed.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from runtime.device import synchronize
from runtime.world import World

STEP = "a step of the run"
Interval = tuple[float, float]  # when something began and ended


class StepProfile:
    """PyTorch's profiler around some steps: of each, the share spent waiting for others, and the
    time of the update.
    """

    def __init__(self, device: torch.device):
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self.profiler, self.step = profile(activities=activities), record_function(STEP)
        self.profiler.__enter__()

    def begin_step(self) -> None:
        """A step begins; the device has done all work given to it."""
        self.step = record_function(STEP)
        self.step.__enter__()

    def end_step(self) -> None:
        """It has ended; the device has done all work given to it."""
        self.step.__exit__(None, None, None)

    def figures(self) -> dict[str, list[float]]:
        """End, and return for each step the seconds it took here, those of transfers, of waiting
        for others, and of the update.
        """
        self.profiler.__exit__(None, None, None)
        return figures_of(self.profiler.events())


def figures_of(events: Iterable[Any]) -> dict[str, list[float]]:
    """What the profiler's events say of each step, in seconds: `step`, `transfer`, `waiting` and
    `update`.

    A process waits while a transfer is under way and it computes nothing: on a GPU, while no kernel
    runs but NCCL's; on a CPU, while PyTorch runs no operation. So a transfer does not count as far
    as it goes on beside the backward pass. The time of slower processes does, since a transfer
    lasts until all have come.
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
        "transfer": [length(clipped(transfers, step)) for step in steps],
        "waiting": [length(without(clipped(transfers, step), computing)) for step in steps],
        "update": [length(clipped(updates, step)) for step in steps],
    }


def is_transfer(event: Any) -> bool:
    """Whether an event is one of NCCL's kernels, or the whole of a transfer by gloo."""
    return event.name.startswith("gloo:") or (
        event.name.startswith("nccl") and not event.is_user_annotation
    )


def is_computation(event: Any) -> bool:
    """Whether an event is a kernel or an operation itself, and not one that consists of others or
    hands a transfer over.

    What torch.compile made consists of kernels of which the profiler sees only some on a CPU, so it
    counts as a whole.
    """
    if event.is_user_annotation or event.is_async or "c10d" in event.name:
        return False
    return not event.cpu_children or event.name.startswith("CompiledFunction")


def clipped(intervals: Iterable[Interval], to: Interval) -> list[Interval]:
    """The parts of intervals that lie inside of one, each moment once, in order."""
    parts: list[Interval] = []
    for start, end in sorted(intervals):
        start, end = max(start, to[0], parts[-1][1] if parts else to[0]), min(end, to[1])
        if start < end:
            parts.append((start, end))
    return parts


def without(intervals: Sequence[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What is left of separate intervals where none of the others lies."""
    left: list[Interval] = []
    others = sorted(others)
    for start, end in intervals:
        for taken in clipped(others, (start, end)):
            left.append((start, taken[0]))
            start = taken[1]
        left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """The sum of the lengths of intervals."""
    return sum(end - start for start, end in intervals)


def bus_factor(ranks: int) -> float:
    """How often a ring all-reduce sends each byte over each process's link (NCCL tests,
    PERFORMANCE.md).
    """
    return 2 * (ranks - 1) / ranks


def link_speed(world: World, message: int, seconds: float = 1.0) -> float:
    """GB/s that a process's link carries in an all-reduce of `message` bytes: what NCCL's tests
    call the bus bandwidth.

    Every process has to call this. The median of the transfers that fit into about `seconds`, at
    least five.
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
    return (
        bus_factor(world.world_size)
        * 4
        * numbers.numel()
        / statistics.median(transfer() for _ in range(count))
        / 1e9
    )
