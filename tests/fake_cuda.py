"""A `cuda:0` for PyTorch's CPU build, so that code takes its CUDA branches without a GPU.

The `device` of its tensors is cuda:0, and they compute on the CPU: numbers are real. It notes each
time that the host would wait for the device, and refuses operations across devices, as CUDA does.
The process has to be started with `environment(...)`.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
GIB = 2**30
NAME = "NVIDIA H200"
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def environment(folder: Path) -> dict[str, str] | None:
    """Compile the guard; returns the environment for the fake device. None: no compiler."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))), None)
    if not compiler:
        return None
    home, guard = Path(torch.__file__).parent, folder / "guard.so"
    source = Path(__file__).with_name("fake_cuda_guard.cpp")
    libraries = [f"-L{home}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
    options: list[str | Path] = ["-std=c++20", "-shared", "-fPIC", f"-I{home}/include", "-o", guard]
    subprocess.run([compiler, *options, source, *libraries], check=True)
    return {"LD_PRELOAD": str(guard)}


class OnGPU(Tensor):
    """A tensor on the CPU whose `device` is cuda:0."""

    on_cpu: Tensor

    def __new__(cls, on_cpu: Tensor) -> "OnGPU":
        """Wrap a tensor; both have the same shape, strides and dtype."""
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            on_cpu.shape,
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=GPU,
        )
        self.on_cpu = on_cpu
        return self

    # swapped, not replaced, by nn.Module.to: a tied matrix stays one
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["on_cpu"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "OnGPU":
        return OnGPU(inner["on_cpu"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGPU({self.on_cpu})"

    def tolist(self) -> Any:
        """Read the values, by one copy."""
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute outside of the mode, which alone counts waits."""
        return compute(func, args, kwargs or {})


class CountWaits(TorchDispatchMode):
    """Send operations to the fake device; `waits` names those for which the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.queued = 0  # operations that the device was given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leave DTensors to their own class, which computes with their local tensors."""
        if any(kind not in (Tensor, torch.nn.Parameter, OnGPU) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if waits_for_device(func, args, kwargs):
            self.waits.append(func.__name__)
        self.queued += is_on_gpu(args, kwargs) and not func.is_view
        return compute(func, args, kwargs)


class Event:
    """A torch.cuda.Event.

    A wait for it is named "event" if the device has more to do after it, else "synchronize".
    """

    def __init__(self, mode: CountWaits):
        self._mode = mode

    def record(self, *_: Any) -> None:
        """Note the time, and how much the device has to do until it."""
        self._queued, self._time = self._mode.queued, time.perf_counter()

    def synchronize(self) -> None:
        """Count a wait."""
        self._mode.waits.append("event" if self._mode.queued > self._queued else "synchronize")

    def elapsed_time(self, end: "Event") -> float:
        """Return milliseconds."""
        return 1e3 * (end._time - self._time)


def each_tensor(act: Callable[[Tensor], Any], values: Any) -> Any:
    """Put what `act` returns in the place of every tensor. PyTorch's own function takes longer."""
    if isinstance(values, Tensor):
        return act(values)
    if isinstance(values, dict):
        return {name: each_tensor(act, value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)([each_tensor(act, value) for value in values])
    return values


def tensors_of(*values: Any) -> list[Tensor]:
    """Return all tensors in arguments."""
    found: list[Tensor] = []
    each_tensor(found.append, values)
    return found


def is_on_gpu(args: Any, kwargs: Any) -> bool:
    """Return True if the result of an operation is on the fake device."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type == "cuda"
    return any(isinstance(tensor, OnGPU) for tensor in tensors_of(args, kwargs))


def waits_for_device(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True for a read, a result whose shape is read, and a copy that blocks."""
    on_gpu = [isinstance(tensor, OnGPU) for tensor in tensors_of(args, kwargs)]
    if func in COPIES:
        source = tensors_of(args)[-1]
        places = {*on_gpu, is_on_gpu(args, kwargs)}
        asked = kwargs.get("non_blocking") or args[2:3] == (True,)
        pinned = isinstance(source, OnGPU) or hasattr(source, "pinned")
        return len(places) == 2 and not (asked and pinned)
    depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}
    return any(on_gpu) and bool(depends)


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on the CPU. Raises RuntimeError for tensors on several devices, as CUDA would."""
    tensors, to_gpu = tensors_of(args, kwargs), is_on_gpu(args, kwargs)
    on_cpu = [tensor for tensor in tensors if not isinstance(tensor, OnGPU)]
    if func not in COPIES and len(on_cpu) < len(tensors) and any(t.dim() for t in on_cpu):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    known = {id(tensor.on_cpu): tensor for tensor in tensors if isinstance(tensor, OnGPU)}
    args, kwargs = each_tensor(lambda tensor: getattr(tensor, "on_cpu", tensor), (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = func(*args, **kwargs)
    if not to_gpu:
        return result
    # an operation in place returns its own argument
    for tensor in tensors_of(result):
        known.setdefault(id(tensor), OnGPU(tensor))
    return each_tensor(lambda tensor: known[id(tensor)], result)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
) -> Tensor:
    """Compute scaled_dot_product_attention by one fused operator, which autocast casts for."""
    if q.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        q, k, v = (t.to(torch.get_autocast_dtype("cuda")) for t in (q, k, v))
    return fused(q, k, v, dropout_p, is_causal)[0]


def pinned(tensor: Tensor) -> Tensor:
    """Mark a tensor as in pinned memory."""
    tensor.pinned = True  # type: ignore[attr-defined]
    return tensor


def answering(**answers: Any) -> contextlib.AbstractContextManager[Any]:
    """Make torch.cuda's functions give answers, whatever they are asked."""
    functions: dict[str, Any] = {
        name: lambda *_, a=answer, **__: a for name, answer in answers.items()
    }
    return patch.multiple(torch.cuda, **functions)


def fake_h200() -> contextlib.AbstractContextManager[Any]:
    """Make torch.cuda find one H200."""
    properties = SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        multi_processor_count=132,
        warp_size=32,
        regs_per_multiprocessor=2**16,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        total_memory=140 * GIB,
        shared_memory_per_block_optin=227 * 2**10,
    )
    return answering(
        is_available=True,
        is_initialized=True,
        device_count=1,
        current_device=0,
        get_device_name=NAME,
        get_device_capability=(9, 0),
        get_arch_list=["sm_90"],
        get_device_properties=properties,
        is_bf16_supported=True,
        is_current_stream_capturing=False,
        max_memory_allocated=0,
        mem_get_info=(140 * GIB, 140 * GIB),
        get_rng_state=torch.zeros(16, dtype=torch.uint8),
        set_device=None,
        set_rng_state=None,
        empty_cache=None,
        reset_peak_memory_stats=None,
        _lazy_init=None,
        _exchange_device=0,
        _maybe_exchange_device=0,
    )


@contextlib.contextmanager
def fake_cuda() -> Iterator[list[str]]:
    """Make cuda:0 a fake H200; yields the list of host waits. torch.compile does nothing."""
    mode = CountWaits()

    def synchronize(*_: Any) -> None:
        mode.waits.append("synchronize")

    stream = MagicMock(**{"synchronize.side_effect": synchronize})
    streams = dict.fromkeys(("Stream", "current_stream", "default_stream"), stream)
    kinds: list[Any] = torch.utils._foreach_utils._foreach_supported_types
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_h200())
        stack.enter_context(answering(**streams, stream=contextlib.nullcontext()))
        new_event = lambda **_: Event(mode)  # noqa: E731
        stack.enter_context(patch.multiple(torch.cuda, synchronize=synchronize, Event=new_event))
        stack.enter_context(patch.multiple(F, scaled_dot_product_attention=attention))
        stack.enter_context(patch.multiple(Tensor, pin_memory=pinned))
        stack.enter_context(patch.multiple(torch, compile=lambda function, **_: function))
        kinds.append(OnGPU)
        stack.callback(kinds.remove, OnGPU)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device) then copies
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(mode)
        yield mode.waits
