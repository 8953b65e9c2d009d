"""The device of a run: choosing it, what it can do, how fast it multiplies, waiting for it."""

import contextlib
import importlib.util
import inspect
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel

from runtime.errors import UserError
from runtime.launch import Launch, launch
from runtime.start import has_nvidia_gpu, resident_memory

NOTED_SLOWDOWN = 1.5  # of bf16 against fp32; less may be noise
BUILDS = "https://pytorch.org/get-started/previous-versions"


def choose_device(name: str, started: Launch | None = None) -> torch.device:
    """Return the device that `--device name` means for this rank. Raises UserError without it."""
    started = started or launch()
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name in ("auto", "cuda") and not available["cuda"] and has_nvidia_gpu():
        raise UserError(f"--device {name}: {why_no_cuda()}, or use --device cpu")
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    if not available[name]:
        here = ", ".join(kind for kind, there in available.items() if there)
        raise UserError(
            f"--device {name}: not available to this PyTorch ({torch.__version__}); available "
            f"here: {here}"
        )
    if name == "mps" and started.world_size > 1:
        raise UserError("--device mps: several ranks cannot share it; use --device cpu or one rank")
    if name == "cuda":
        gpus = torch.cuda.device_count()
        if started.local_world_size > gpus:  # the same answer on all ranks of this machine
            raise UserError(
                f"--nproc_per_node: {started.local_world_size} ranks, but {gpus} CUDA devices; "
                f"start at most one for each, or use --device cpu"
            )
        device = torch.device("cuda", started.local_rank)
        check_has_code(device)
        return device
    return torch.device(name)


def why_no_cuda() -> str:
    """Return the reason why PyTorch cannot use an NVIDIA GPU, and the remedy, for a message."""
    if torch.version.cuda is None:
        return (
            f"there is an NVIDIA driver, but this PyTorch ({torch.__version__}) is built without "
            f"CUDA; install a build with CUDA ({BUILDS})"
        )
    version = None
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        version = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", text)
    return (
        f"PyTorch {torch.__version__} finds no GPU through NVIDIA's driver"
        f"{f' {version[1]}' if version else ''}, which may be too old for CUDA "
        f"{torch.version.cuda}; update the driver or install a PyTorch for an older CUDA ({BUILDS})"
    )


def check_has_code(device: torch.device) -> None:
    """Raise UserError if this PyTorch has no code for the GPU: `no kernel image` would follow.

    sm_86 runs on 8.6 and later GPUs of that major version. compute_86 is compiled at first use,
    for 8.6 and all later ones.
    """
    major, minor = torch.cuda.get_device_capability(device)
    known = torch.cuda.get_arch_list()
    archs = [re.match(r"(sm|compute)_(\d+)(\d)", name) for name in known]
    for arch in archs or [None]:
        if arch is None:  # unknown, as on AMD's GPUs
            return
        kind, has = arch[1], (int(arch[2]), int(arch[3]))
        if has <= (major, minor) and (kind == "compute" or has[0] == major):
            return
    raise UserError(
        f"--device cuda: this PyTorch ({torch.__version__}) has no code for {device_name(device)} "
        f"(compute capability {major}.{minor}), only for {', '.join(known)}; install another build "
        f"({BUILDS}), or use --device cpu"
    )


def device_name(device: torch.device) -> str:
    """Return the GPU's name on CUDA, else the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe_device(device: torch.device, ranks: int) -> str:
    """Return a line on what a run computes with."""
    return (
        f"device: {device_name(device)}, ranks: {ranks}, threads of each: "
        f"{torch.get_num_threads()}, torch {torch.__version__}"
    )


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work; without this a clock times the launches only."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


# ---- what a process sets for its device


def make_repeatable(device: torch.device) -> None:
    """Make a run on a CPU give the same numbers again, bit for bit, where that costs no time.

    Compiled, the embedding's gradient would be summed by several threads in changing order. On a
    GPU this would cost speed and refuse operations, so there it is off.
    """
    torch.use_deterministic_algorithms(device.type == "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def recompute_cheap_operations(wanted: bool | None) -> None:
    """Let a compiled backward pass recompute norms, GELU, casts and residual sums, or keep them.

    This is activation checkpointing of what costs little: GPT-2 (124M) trains in a sixth less
    memory, on a CPU at the same speed, so there it is the default (docs/results.md). It has not
    been measured on GPUs. The setting is the process's.
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

    # FSDP2 warns of results that are views, such as attention's values (--value_residual), since an
    # operation in place on one would be wrong; there is none here.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
    dtype = torch.bfloat16 if bf16 else None
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    return {"mesh": init_device_mesh(device.type, (ranks,)), "mp_policy": policy}


# ---- what it can do


def matmul_dtype(*, bf16: bool = False, fp16: bool = False) -> torch.dtype:
    """Return the dtype of matmuls under these options."""
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32


def cpu_has(*instructions: str) -> bool:
    """True if the CPU has one of these instruction sets, by PyTorch's names."""
    return any(torch.cpu.get_capabilities().get(name) for name in instructions)


def usable_precision(device: torch.device, wanted: str) -> str:
    """Return the precision of fp32 matmuls that the device can offer: `wanted`, or `highest`.

    `high` is TF32 on NVIDIA GPUs since Ampere. `medium` is the same there. On a CPU with bf16
    instructions it lets oneDNN take over from MKL: with AMX it rounds the inputs to bf16; without,
    it stays in fp32, and is faster on AMD's all the same.
    """
    has_less = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu" and wanted == "medium":
        has_less = cpu_has("avx512_bf16", "amx_bf16")
    return wanted if has_less else "highest"


def check_precision(
    device: torch.device, *, matmul_precision: str = "highest", bf16: bool = False
) -> list[str]:
    """Return notes on precisions that do not pay here. Raises UserError for one that is missing."""
    on_gpu = device.type == "cuda"
    if bf16 and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(
            f"--bf16: {device_name(device)} has no bfloat16; run without it, or train with --fp16"
        )
    notes = []
    if usable_precision(device, matmul_precision) != matmul_precision:
        name = "tf32" if matmul_precision == "high" else "matmul_precision medium"
        notes.append(f"{name} has no effect on {device_name(device)}: fp32 matmuls stay fp32")
        if usable_precision(device, "medium") == "medium":
            notes[-1] += "; --matmul_precision medium makes them faster here"
    if bf16 and device.type == "cpu" and (factor := bf16_slowdown(device)) > NOTED_SLOWDOWN:
        notes.append(
            f"bf16 is slow here: a matmul takes {factor:.1f} times as long as in fp32, because "
            f"this processor has no instructions for it; --no-bf16 is faster"
        )
    return notes


def check_compiler(device: torch.device, mode: str = "default", acting: str = "") -> list[str]:
    """Return notes on torch.compile in this mode, of which `acting` is what can be used here.

    Raises UserError if it would find no compiler, or folders that the compiler cannot read.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:  # of a class that moves between PyTorch versions
            raise UserError(
                "--compile: no C++ compiler found; install g++ or clang++ (or set CXX to one), "
                "or run without --compile"
            ) from error
        for place in (tempfile.gettempdir(), cache_dir()):
            if re.search(r"\s", place):
                raise UserError(
                    f"--compile: {place} has white space in its name, which PyTorch does not quote "
                    f"for the C++ compiler; set TMPDIR and TORCHINDUCTOR_CACHE_DIR to other "
                    f"folders, or run without --compile"
                )
    if device.type == "cuda":
        c_compiler = any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))
        if not (importlib.util.find_spec("triton") and c_compiler):
            raise UserError(
                "--compile: needs Triton (pip install triton) and a C compiler (gcc or clang) on "
                "CUDA; install what is missing, or run without --compile"
            )
    notes = [
        f"compiling takes a minute or more at the first start; later ones find it in {cache_dir()}"
    ]
    if mode == "reduce-overhead" and device.type != "cuda":
        notes.append(f"compile_mode {mode} has no effect without CUDA: it records CUDA graphs")
    if acting not in ("", mode):
        notes.append(
            f"compile_mode {mode} runs as {acting}: CUDA graphs are for one rank, one micro-step "
            f"and one chunk of the loss"
        )
    return notes


def check_attention(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    *,
    dropout: float = 0.0,
    blocked: bool = False,
) -> list[str]:
    """Return a note on the kernel that `flash` gets for queries of `shape` (B, nh, T, hs).

    `blocked`: the model takes kernels/attention.py's where it can. Else it is the one that
    scaled_dot_product_attention picks for training, such as flash_attention, efficient_attention
    or cudnn_attention; math is the T x T matrix.
    """
    if blocked and not dropout:
        return ["flash runs blocked attention, which is faster on this CPU than PyTorch's kernel"]
    q = torch.empty(shape, device=device, dtype=dtype, requires_grad=True)
    try:
        choice = torch._fused_sdp_choice(q, q, q, dropout_p=dropout, is_causal=True)
    except NotImplementedError:  # PyTorch does not tell, as on MPS
        return []
    kernel = SDPBackend(choice).name.lower()
    if kernel == "math":
        return [
            "flash has no effect: PyTorch has no fused attention for this device, precision and "
            "dropout"
        ]
    return [f"flash runs PyTorch's {kernel} kernel"]


# ---- what it reaches


def peak_memory_mb(device: torch.device) -> float:
    """Return the most memory used so far, in MiB.

    Of the GPU's tensors on CUDA, of the driver on MPS, of the process on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS: bytes, Linux: KiB


def memory_before_mb(device: torch.device) -> float:
    """Return what of `peak_memory_mb` is there before a model: Python and PyTorch on a CPU."""
    return resident_memory() / 2**20 if device.type == "cpu" else 0.0


def matmul_seconds(n: int, device: torch.device, dtype: torch.dtype, budget: float) -> float:
    """Time n x n matmuls for `budget` seconds, at least two; returns the seconds of the fastest."""
    # Random numbers, as equal ones take a GPU less power and so less time; with a generator of
    # their own, so that the run's is as it was.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, dtype=dtype, generator=generator) for _ in range(2))
    begun, seconds = time.perf_counter(), list[float]()
    while len(seconds) < 2 or time.perf_counter() - begun < budget:  # the first loads the library
        synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def matmul_tflops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Measure the TFLOP/s of a square matmul: the best over the sizes that fit into `seconds`.

    It is what MFU is a share of here: what the device reaches, not what its data sheet says.
    Sizes double from 128 up to the one that would take longer: a CPU without instructions for
    float16 needs minutes for the largest.
    """
    begun, n, rate = time.perf_counter(), 128, 0.0
    largest = 8192 if device.type == "cuda" else 2048
    while True:
        try:
            best = matmul_seconds(n, device, dtype, budget=seconds / 8)
        except torch.OutOfMemoryError:  # a run's tensors leave less than these matrices take
            return rate
        rate = max(rate, 2 * n**3 / best / 1e12)
        left = seconds - (time.perf_counter() - begun)
        if n >= largest or 8 * best > max(left, 0.25):  # the next size is 8 times the work
            return rate
        n *= 2


def bf16_slowdown(device: torch.device) -> float:
    """Measure how many times as long a small matmul takes in bf16 as in fp32, in 0.2 seconds.

    Below 1 where bf16 pays. A CPU without instructions for it emulates it.
    """
    # In turn and on one thread, so that other programs slow both alike.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dtypes = (torch.float32, torch.bfloat16) * 5
    seconds = [matmul_seconds(256, device, dtype, budget=0.02) for dtype in dtypes]
    torch.set_num_threads(threads)
    return min(seconds[1::2]) / min(seconds[::2])
