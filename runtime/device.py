"""The device of a run: its choice, its capabilities, its speed, and waiting for it."""

import contextlib
import functools
import inspect
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel

from runtime.console import log
from runtime.errors import UserError
from runtime.launch import launch
from runtime.start import has_nvidia_gpu

PINNED_TORCH = "2.13.0"  # the version in requirements.txt, which the tests run with
NOTED_SLOWDOWN = 1.5  # bf16 over fp32 time; less may be noise
BUILDS = "https://pytorch.org/get-started/previous-versions"
SIZES = tuple(128 * 2**i for i in range(7))  # timed matmuls, up to 8192 x 8192
AGREE = 1.1  # the fastest three samples of a measurement may differ by this factor
PATIENCE = 4  # times as long as usual that a measurement may take until they agree


def choose_device(name: str) -> torch.device:
    """Return the device that `--device name` means for this rank. Raises UserError without it."""
    kinds = ("cuda", "mps", "cpu")
    available = [kind for kind in kinds if torch.get_device_module(kind).is_available()]
    if "cuda" not in available and name in ("auto", "cuda") and has_nvidia_gpu():
        raise UserError(
            f"--device {name}: this PyTorch ({torch.__version__}, CUDA {torch.version.cuda}) finds "
            f"no GPU through NVIDIA's driver; update the driver, install another build ({BUILDS}), "
            f"or use --device cpu"
        )
    if name == "auto":
        name = available[0]
    if name not in available:
        raise UserError(
            f"--device {name}: not available to this PyTorch ({torch.__version__}); available "
            f"here: {', '.join(available)}"
        )
    if name != "cuda":
        return torch.device(name)
    ranks, gpus = launch().local_world_size, torch.cuda.device_count()
    if ranks > gpus:  # the same answer on all ranks of this machine
        raise UserError(
            f"--nproc_per_node: {ranks} ranks, but {gpus} CUDA devices; start at most one for "
            f"each, or use --device cpu"
        )
    return torch.device("cuda", launch().local_rank)


def device_name(device: torch.device) -> str:
    """Return the GPU's name on CUDA, else the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def check_version() -> None:
    """Note another PyTorch than the pinned one."""
    if torch.__version__.partition("+")[0] != PINNED_TORCH:  # after the +: cpu, or CUDA's version
        log.warning(
            f"PyTorch {torch.__version__} instead of {PINNED_TORCH}, which requirements.txt pins: "
            f"times, and the last digits of losses, may differ"
        )


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work; without this a clock times the launches only."""
    torch.get_device_module(device).synchronize()


# ---- settings of the process


def make_repeatable(device: torch.device) -> None:
    """Make a run on a CPU repeatable bit for bit, at no cost in time.

    Compiled, the embedding's gradient would be summed by several threads in changing order. On a
    GPU this would cost speed and refuse operations, so there it is off.
    """
    torch.use_deterministic_algorithms(device.type == "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def recompute_cheap_operations(wanted: bool | None) -> None:
    """Let a compiled backward pass recompute norms, GELU, casts and residual sums, or keep them.

    This is activation checkpointing of cheap operations: GPT-2 (124M) trains in a seventh less
    memory, on a CPU at the same speed, so there it is the default (docs/results.md). It has not
    been measured on GPUs. The setting applies to the whole process.
    """
    from torch._functorch import config

    config.ban_recompute_materialized_backward = not wanted
    config.ban_recompute_used_far_apart = not wanted


def ddp_options(device: torch.device) -> dict[str, Any]:
    """Return DistributedDataParallel's arguments for a model on the device.

    Gradients are views of the buckets, which saves a copy of them. Buffers are constants and need
    no broadcast; that option has a new name since PyTorch 2.13.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    ids = [device.index] if device.type == "cuda" else None
    return {"device_ids": ids, "gradient_as_bucket_view": True, buffers: False}


def fsdp_options(device: torch.device, ranks: int, *, bf16: bool) -> dict[str, Any]:
    """Return fully_shard's arguments for the blocks of a model on the device.

    With bf16 there are half the bytes to gather; gradients are still summed in fp32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # FSDP2 warns of results that are views, such as attention's values (--value_residual): an
    # operation in place on one would be wrong. This model has no such operation.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
    dtype = torch.bfloat16 if bf16 else None
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    return {"mesh": init_device_mesh(device.type, (ranks,)), "mp_policy": policy}


# ---- capabilities


def cpu_has(*instructions: str) -> bool:
    """True if the CPU has one of these instruction sets, by PyTorch's names."""
    return any(torch.cpu.get_capabilities().get(name) for name in instructions)


def usable_precision(device: torch.device, wanted: str) -> str:
    """Return the precision of fp32 matmuls that the device can offer: `wanted`, or `highest`.

    `high` is TF32 on NVIDIA GPUs since Ampere. `medium` is the same there. On a CPU with bf16
    instructions it lets oneDNN take over from MKL: with AMX it rounds the inputs to bf16; without,
    it stays in fp32, which is faster on AMD's CPUs, slower on Intel's (docs/results.md).
    """
    has_less = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu" and wanted == "medium":
        has_less = cpu_has("avx512_bf16", "amx_bf16")
    return wanted if has_less else "highest"


def has_bf16(device: torch.device) -> bool:
    """True unless the device is a GPU without bfloat16, before Ampere."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def check_precision(
    device: torch.device, dtype: torch.dtype, matmul_precision: str = "highest"
) -> None:
    """Note precisions that do not help here: of autocast, and of fp32 matmuls.

    Raises UserError for a missing one.
    """
    if dtype == torch.bfloat16 and not has_bf16(device):
        raise UserError(
            f"--bf16: {device_name(device)} has no bfloat16; run without it, or train with --fp16"
        )
    if usable_precision(device, matmul_precision) != matmul_precision:
        name = "tf32" if matmul_precision == "high" else "matmul_precision medium"
        log.warning(f"{name} has no effect on {device_name(device)}: fp32 matmuls stay fp32")
    if dtype != torch.float32 and device.type == "cpu":
        name = "bf16" if dtype == torch.bfloat16 else "fp16"
        if (factor := slowdown(device, dtype)) > NOTED_SLOWDOWN:
            log.warning(
                f"{name} is slow here: a matmul takes {factor:.1f} times as long as in fp32, "
                f"because this processor has no fast instructions for it; --no-{name} is faster"
            )


def check_compiler(device: torch.device, mode: str, effective_mode: str) -> None:
    """Note what torch.compile does in this mode; `effective_mode`: as the mode acts here.

    Raises UserError on a CPU without a C++ compiler.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:  # its class moves between PyTorch versions
            raise UserError(
                "--compile: no C++ compiler found; install g++ or clang++ (or set CXX to one), "
                "or run without --compile"
            ) from error
    searches = device.type == "cuda" and "max-autotune" in effective_mode
    minutes = "five minutes" if searches else "a minute"
    log.warning(
        f"compiling takes {minutes} or more at the first start; later ones find it in {cache_dir()}"
    )
    if mode == "reduce-overhead" and device.type != "cuda":
        log.warning(f"compile_mode {mode} has no effect without CUDA: it records CUDA graphs")
    if effective_mode != mode:
        reason = "CUDA graphs are for one rank, one micro-step and one chunk of the loss"
        if "max-autotune" in mode and effective_mode == "default":
            reason = "PyTorch before 2.12 may compute 2^31 and more logits wrongly otherwise"
        log.warning(f"compile_mode {mode} runs as {effective_mode}: {reason}")


def check_attention(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    *,
    dropout: float,
    blocked: bool,
) -> None:
    """Note the kernel that `flash` gets for queries of `shape` (B, nh, T, hs).

    With `blocked` it is kernels/attention.py, unless there is dropout. Otherwise
    scaled_dot_product_attention chooses: flash_attention, efficient_attention, cudnn_attention, or
    math, the T x T matrix.
    """
    if blocked and not dropout:
        log.warning(
            "flash runs blocked attention, which is faster on this CPU than PyTorch's kernel"
        )
        return
    q = torch.empty(shape, device=device, dtype=dtype, requires_grad=True)
    try:
        choice = torch._fused_sdp_choice(q, q, q, dropout_p=dropout, is_causal=True)
    except NotImplementedError:  # not reported, as on MPS
        return
    kernel = SDPBackend(choice).name.lower()
    if kernel == "math":
        log.warning(
            "flash has no effect: PyTorch has no fused attention for this device, precision and "
            "dropout"
        )
    else:
        log.warning(f"flash runs PyTorch's {kernel} kernel")


# ---- measurements


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory so far in MiB: on CUDA of tensors, on a CPU of the process.

    On MPS it is the driver's memory now.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS: bytes, Linux: KiB


def memory_before_mb(device: torch.device) -> float:
    """Return the baseline of `peak_memory_mb` before the model exists; 0 except on a Linux CPU."""
    if device.type == "cpu":
        with contextlib.suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that one call of `work` takes; its result is freed after the time."""
    synchronize(device)
    start = time.perf_counter()
    _result = work()
    synchronize(device)
    return time.perf_counter() - start


def steady(sample: Callable[[], float], seconds: float) -> float | None:
    """Take samples for `seconds`, at least three; returns the least of them.

    Other programs make samples larger, never smaller. If the least three differ, sampling
    continues, up to PATIENCE times as long. None if they still differ, or are infinite.
    """
    begun = time.perf_counter()
    least = sorted(sample() for _ in range(3))
    while True:
        passed = time.perf_counter() - begun
        if passed >= seconds and least[-1] <= AGREE * least[0] < math.inf:
            return least[0]
        if passed >= PATIENCE * seconds:
            return None
        least = sorted([*least, sample()])[:3]


def matmul(n: int, device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a function that multiplies two n x n matrices."""
    # Random numbers, since equal ones take a GPU less power and time. They have their own
    # generator, so that the run's stays unchanged.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, dtype=dtype, generator=generator) for _ in range(2))
    return lambda: torch.mm(a, b)


def matmul_tflops(device: torch.device, dtype: str, seconds: float = 0.5) -> float | None:
    """Measure the TFLOP/s of a large square matmul in torch's `dtype`, for about `seconds`.

    This is the rate that the device reaches, not its data sheet's. None if other programs keep the
    device too busy, or its memory is too full, to measure it.
    """
    of_size = functools.cache(lambda n: matmul(n, device, getattr(torch, dtype)))

    def seconds_per_flop() -> float:
        times = list[float]()
        for n in SIZES:
            try:
                times.append(timed(of_size(n), device))
            except torch.OutOfMemoryError:  # a run's tensors leave less than these matrices take
                break
            if 8 * times[-1] > max(seconds / 2, 0.25):  # such as float16 without instructions
                break
        # Twice the size is 8 times the work. If it takes less than 4 times as long, much of that
        # time was no arithmetic: the processor was away, or the matrices are too small.
        if len(times) < 2 or times[-1] < 4 * times[-2]:
            return math.inf
        return min(taken / (2 * n**3) for n, taken in zip(SIZES, times, strict=False))

    best = steady(seconds_per_flop, seconds)
    return 1e-12 / best if best else None


def slowdown(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """Measure how many times as long a small matmul takes in a dtype as in fp32.

    The result is below 1 if the dtype is faster. A CPU without instructions for bf16 emulates it;
    Intel's avx512_bf16 has half the rate of fp32. Takes 0.1 seconds, or as long as three matmuls of
    each dtype if they take longer.
    """
    # Alternating and on one thread, so that other programs slow both alike.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pair = [matmul(256, device, dtype) for dtype in (torch.float32, dtype)]
    seconds = list[float]()
    while len(seconds) < 6 or (len(seconds) < 30 and sum(seconds) < 0.1):
        seconds += [timed(work, device) for work in pair]
    torch.set_num_threads(threads)
    return min(seconds[1::2]) / min(seconds[::2])
