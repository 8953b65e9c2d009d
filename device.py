"""The device a run is on: choosing it, what it can do, waiting for it, its peak memory and its matrix-product rate."""

import contextlib
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend

from config import Config, SpeedConfig, UserError


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that `--device name` means for this process. Raises UserError if it is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    if not available[name]:
        here = ", ".join(kind for kind, there in available.items() if there)
        raise UserError(f"--device {name}: not available to this PyTorch ({torch.__version__}); available here: {here}")
    if name == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"--nproc_per_node: more processes than the {torch.cuda.device_count()} CUDA devices here; "
                            f"start at most one for each, or use --device cpu")
        return torch.device("cuda", local_rank)
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """The GPU's name on CUDA, else the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def set_precision(speed: SpeedConfig, device: torch.device) -> list[str]:
    """Set the process-wide precision of fp32 products; returns notes for the user.

    Raises UserError for a precision that the device lacks.
    """
    tf32 = speed.tf32 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")  # sticky, so set in every run
    if speed.bf16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"--bf16: {device_name(device)} has no bfloat16; use --fp16")
    if speed.tf32 and not tf32:
        return [f"tf32 has no effect on {device_name(device)}: fp32 products stay fp32"]
    return []


def make_repeatable(device: torch.device) -> None:
    """Let the same run give the same numbers, bit for bit, on a CPU, where that costs nothing measurable.

    Compiled, the embedding's gradient would be summed by several threads in an order that changes from run to run. On a GPU
    this would cost speed and refuse operations, so there it is off.
    """
    torch.use_deterministic_algorithms(device.type == "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # would cost time


def product_dtype(speed: SpeedConfig) -> torch.dtype:
    """What matrix products run in."""
    return torch.bfloat16 if speed.bf16 else torch.float16 if speed.fp16 else torch.float32


def autocast_for(speed: SpeedConfig, device: torch.device) -> Callable[[], contextlib.AbstractContextManager]:
    """What forward and loss run under: autocast to bf16 or fp16, or nothing. Weights stay fp32."""
    dtype = product_dtype(speed)
    if dtype == torch.float32:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=dtype)


def check_compiler(device: torch.device) -> None:
    """Raises UserError where torch.compile would find no compiler."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:  # of a class that moves between PyTorch versions
            raise UserError("--compile: no C++ compiler found; install g++ or clang++ (or set CXX to one), "
                            "or run without --compile") from error
    c_compiler = any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))
    if device.type == "cuda" and not (importlib.util.find_spec("triton") and (c_compiler or sys.platform == "win32")):
        raise UserError("--compile: needs Triton (pip install triton, on Windows triton-windows) and a C compiler (gcc or clang) "
                        "on CUDA; install what is missing, or run without --compile")


def attention_kernel(speed: SpeedConfig, device: torch.device, shape: tuple[int, int, int, int], dropout: float) -> str | None:
    """Kernel that scaled_dot_product_attention picks for training with queries of `shape` (B, nh, T, hs), such as
    flash_attention, efficient_attention, cudnn_attention; math is the T x T matrix. None where PyTorch does not tell."""
    q = torch.empty(shape, device=device, dtype=product_dtype(speed), requires_grad=True)
    try:
        return SDPBackend(torch._fused_sdp_choice(q, q, q, dropout_p=dropout, is_causal=True)).name.lower()
    except NotImplementedError:  # PyTorch 2.13 does not tell on MPS
        return None


def flash_note(config: Config, device: torch.device) -> list[str]:
    """Which attention kernel `flash` gets here, for the user; nothing without it."""
    if not config.flash:
        return []
    shape = (config.batch_size, config.n_head, config.seq_len, config.n_embd // config.n_head)
    kernel = attention_kernel(config, device, shape, config.dropout)
    if kernel == "math":
        return ["flash has no effect: PyTorch has no fused attention for this device, precision and dropout"]
    return [f"flash runs PyTorch's {kernel} kernel"] if kernel else []


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work given to it. Without this a clock measures only the handing over."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory_mb(device: torch.device) -> float:
    """Most memory used so far, in MiB: tensors on the GPU on CUDA, the driver's on MPS, the process's on the CPU.

    0 on the CPU of Windows, which has no such account.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**20
    if sys.platform == "win32":
        return 0.0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS counts bytes, Linux KiB


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device's or the system's memory ran out; each device says so in words of its own."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in (
        "out of memory", "not enough memory", "can't allocate memory"))


def matmul_tflops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """TFLOP/s of a large square matrix product in `dtype`, the best of the products done in about `seconds`.

    This is what the device really reaches; a share of it says more than one of a data sheet's peak. The product is made
    smaller where a large one takes long: a CPU without instructions for float16 needs minutes for the largest.
    """
    def matrices(n: int) -> list[torch.Tensor]:
        return [torch.randn(n, n, device=device, dtype=dtype) for _ in range(2)]

    def product(a: torch.Tensor, b: torch.Tensor) -> float:
        synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        return time.perf_counter() - start

    n, largest = 128, 8192 if device.type == "cuda" else 2048
    pair = matrices(n)
    product(*pair)  # the first product loads the library
    while n < largest and 8 * product(*pair) < 0.25:
        n *= 2
        pair = matrices(n)
    begun, best = time.perf_counter(), product(*pair)
    while time.perf_counter() - begun < seconds:
        best = min(best, product(*pair))
    return 2 * n**3 / best / 1e12
