"""The device that a ladder runs on, as measure/ladder/probe.py measures it."""

from pydantic import BaseModel, Field

from measure.interleaved.process import in_fresh_process


class Device(BaseModel, frozen=True):
    """A device and its measured rates. A rate is missing if it could not be measured."""

    name: str | None = None
    gpus: int = 0
    memory_mb: float | None = None  # free before the ladder begins
    tflops: dict[str, float] = {}  # rate of a large matmul by dtype; `tf32` if the device has it
    gigabytes_per_s: float | None = Field(default=None, gt=0)  # read and written by a copy
    launch_us: float | None = None  # time of the smallest operation
    bf16: bool = True
    slow_bf16: bool = False  # a CPU without instructions for it, which emulates bf16
    medium: bool = False  # a CPU on which matmul_precision `medium` is faster


def measure_device(name: str) -> Device:
    """Measure a device (auto, cuda, mps or cpu) in a fresh process; print a note if that fails."""
    found, problem = in_fresh_process("measure.ladder.probe:measure", name)
    if problem:
        print(f"note: the device could not be measured: {problem}")
    return found or Device()
