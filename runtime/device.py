"""The device a run is on: choosing it, its precisions, its compiler and attention kernels, waiting
for it.
"""

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend

from runtime.errors import UserError
from runtime.world import Launch, World


def choose_device(name: str, started: Launch | None = None) -> torch.device:
    """The device that `--device name` means for a process that was started so. Raises UserError if
    it is not there.
    """
    started = started or Launch()
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    if not available[name]:
        here = ", ".join(kind for kind, there in available.items() if there)
        raise UserError(
            f"--device {name}: not available to this PyTorch ({torch.__version__}); available "
            f"here: {here}"
        )
    if name == "mps" and started.world_size > 1:
        raise UserError(
            "--device mps: several processes cannot share it; use --device cpu or start one process"
        )
    if name == "cuda":
        if started.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"--nproc_per_node: more processes than the {torch.cuda.device_count()} CUDA "
                f"devices here; "
                f"start at most one for each, or use --device cpu"
            )
        return torch.device("cuda", started.local_rank)
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """The GPU's name on CUDA, else the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe(world: World) -> str:
    """What a run computes with, for the user."""
    return (
        f"device: {device_name(world.device)}, processes: {world.world_size}, threads of each: "
        f"{torch.get_num_threads()}, "
        f"torch {torch.__version__}"
    )


def prepare(
    device: torch.device,
    *,
    tf32: bool = False,
    bf16: bool = False,
    recompute_cheap: bool | None = None,
) -> list[str]:
    """Set this process up to train on the device, in these precisions; returns notes for the user.
    What is cheap to compute is recomputed if wanted, by default on a CPU.

    Raises UserError for a precision that the device lacks.
    """
    make_repeatable(device)
    recompute_what_is_cheap(device.type == "cpu" if recompute_cheap is None else recompute_cheap)
    return set_precision(device, tf32=tf32, bf16=bf16)


def set_precision(device: torch.device, *, tf32: bool = False, bf16: bool = False) -> list[str]:
    """Set the process-wide precision of fp32 products; returns notes for the user.

    Raises UserError for a precision that the device lacks.
    """
    takes_effect = (
        tf32 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    )
    torch.set_float32_matmul_precision(
        "high" if takes_effect else "highest"
    )  # sticky, so set in every run
    if (
        bf16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UserError(
            f"--bf16: {device_name(device)} has no bfloat16; run without it, or train with --fp16"
        )
    if tf32 and not takes_effect:
        return [f"tf32 has no effect on {device_name(device)}: fp32 products stay fp32"]
    return []


def make_repeatable(device: torch.device) -> None:
    """Let the same run give the same numbers, bit for bit, on a CPU, where that costs nothing
    measurable.

    Compiled, the embedding's gradient would be summed by several threads in an order that changes
    from run to run. On a GPU this would cost speed and refuse operations, so there it is off.
    Raises UserError where PyTorch's compiler, which this imports, cannot make its cache.
    """
    try:
        torch.use_deterministic_algorithms(device.type == "cpu")
    except OSError as error:
        raise UserError(
            f"{error.filename}: PyTorch cannot make this folder, its compiler's cache: "
            f"{error.strerror}; set "
            f"TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
        ) from None
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # would cost time


def recompute_what_is_cheap(wanted: bool) -> None:
    """Let torch.compile compute norms, GELU's results, casts and sums of the residual stream again
    in the backward pass, or keep them for it, as it does by itself.

    Again: GPT-2 (124M) trains in a sixth less memory, and on a CPU no slower (docs/results.md). On
    GPUs it has not been measured.
    """
    from torch._functorch import config

    config.ban_recompute_materialized_backward = config.ban_recompute_used_far_apart = not wanted


def matmul_dtype(*, bf16: bool = False, fp16: bool = False) -> torch.dtype:
    """The dtype of matrix products under these options."""
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32


def autocast_to(
    dtype: torch.dtype, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager]:
    """The context of forward and loss: autocast to bf16 or fp16, or none for fp32. Weights stay
    fp32.

    Autocast touches only operations that gain from fewer bits and bear them, matrix products above
    all; softmax, norms and losses sum many small numbers and stay in fp32.
    """
    if dtype == torch.float32:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=dtype)


CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def check_compiler(device: torch.device, mode: str = "default", micro_steps: int = 1) -> list[str]:
    """Notes for the user on torch.compile in this mode, with `micro_steps` of gradient
    accumulation.

    Raises UserError where it would find no compiler, or would compute wrong gradients.
    """
    if mode in CUDA_GRAPH_MODES and device.type == "cuda" and micro_steps > 1:
        raise UserError(
            f"compile_mode {mode} with {micro_steps} micro-steps: its CUDA graphs would "
            f"overwrite the accumulated "
            f"gradients; use default or max-autotune-no-cudagraphs, or a batch_size that makes "
            f"one micro-step"
        )
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        if any(map(str.isspace, cache_dir())):
            raise UserError(
                f"--compile: {cache_dir()!r}: PyTorch cannot compile in a folder with white "
                f"space in its name; set "
                f"TORCHINDUCTOR_CACHE_DIR to one without, or run without --compile"
            )
        try:
            get_cpp_compiler()
        except Exception as error:  # of a class that moves between PyTorch versions
            raise UserError(
                "--compile: no C++ compiler found; install g++ or clang++ (or set CXX to one), "
                "or run without --compile"
            ) from error
    c_compiler = any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))
    if device.type == "cuda" and not (
        importlib.util.find_spec("triton") and (c_compiler or sys.platform == "win32")
    ):
        raise UserError(
            "--compile: needs Triton (pip install triton, on Windows triton-windows) and a C "
            "compiler (gcc or clang) "
            "on CUDA; install what is missing, or run without --compile"
        )
    if mode == "reduce-overhead" and device.type != "cuda":
        return ["compile_mode reduce-overhead has no effect without CUDA: it records CUDA graphs"]
    return []


def attention_kernel(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int], dropout: float
) -> str | None:
    """Kernel that scaled_dot_product_attention picks for training with queries of `shape` (B, nh,
    T, hs), such as flash_attention, efficient_attention, cudnn_attention; math is the T x T matrix.
    None where PyTorch does not tell.
    """
    q = torch.empty(shape, device=device, dtype=dtype, requires_grad=True)
    try:
        return SDPBackend(
            torch._fused_sdp_choice(q, q, q, dropout_p=dropout, is_causal=True)
        ).name.lower()
    except NotImplementedError:  # PyTorch 2.13 does not tell on MPS
        return None


def flash_note(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    dropout: float,
    in_blocks: bool,
) -> list[str]:
    """Which attention kernel `flash` gets for queries of `shape` (B, nh, T, hs), for the user.
    `in_blocks`: ours if it can.
    """
    if in_blocks and not dropout:
        return [
            "flash runs attention in blocks of queries, which this CPU computes faster than "
            "PyTorch's kernel"
        ]
    kernel = attention_kernel(device, dtype, shape, dropout)
    if kernel == "math":
        return [
            "flash has no effect: PyTorch has no fused attention for this device, precision and "
            "dropout"
        ]
    return [f"flash runs PyTorch's {kernel} kernel"] if kernel else []


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work given to it. Without this a clock measures only the
    handing over.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
