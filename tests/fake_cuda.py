"""A `cuda:0` for PyTorch's CPU build, so that code takes its CUDA branches without a GPU.

The `device` of its tensors is cuda:0, and they compute on the CPU: numbers are real. It notes each
time that the host would wait for the device, and refuses operations across devices, as CUDA does.
The process has to be started with `environment(...)`.
"""

import contextlib
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

GPU = torch.device("cuda", 0)
GIB = 2**30
NAME = "NVIDIA H200"
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def environment(folder: Path) -> dict[str, str]:
    """Compile the guard; returns the environment for the fake device."""
    home, guard = Path(torch.__file__).parent, folder / "guard.so"
    source = Path(__file__).with_name("fake_cuda_guard.cpp")
    compiler = os.environ.get("CXX", "c++")
    options = f"-std=c++20 -shared -fPIC -I{home}/include -L{home}/lib -Wl,-rpath,{home}/lib"
    files = ["-o", str(guard), str(source), "-lc10", "-ltorch_cpu"]
    subprocess.run([compiler, *options.split(), *files], check=True)
    return {"LD_PRELOAD": str(guard)}


class OnGPU(Tensor):
    """A tensor on the CPU whose `device` is cuda:0."""

    on_cpu: Tensor

    def __new__(cls, on_cpu):
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
    def __tensor_flatten__(self):
        return ["on_cpu"], None

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return OnGPU(inner["on_cpu"])

    def tolist(self):
        """Read the values, by one copy."""
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Compute outside of the mode, which alone counts waits."""
        return compute(func, args, kwargs or {})


class CountWaits(TorchDispatchMode):
    """Send operations to the fake device; `waits` names those for which the host would wait."""

    def __init__(self):
        super().__init__()
        self.waits = []
        self.queued = 0  # operations that the device was given

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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

    def __init__(self, mode):
        self._mode = mode

    def record(self, *_):
        """Note the time, and how much the device has to do until it."""
        self._queued, self._time = self._mode.queued, time.perf_counter()

    def synchronize(self):
        """Count a wait."""
        self._mode.waits.append("event" if self._mode.queued > self._queued else "synchronize")

    def elapsed_time(self, end):
        """Return milliseconds."""
        return 1e3 * (end._time - self._time)


def tensors_of(*values):
    """Return all tensors in arguments."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def is_on_gpu(args, kwargs):
    """Return True if the result of an operation is on the fake device."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type == "cuda"
    return any(isinstance(tensor, OnGPU) for tensor in tensors_of(args, kwargs))


def waits_for_device(func, args, kwargs):
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


def compute(func, args, kwargs):
    """Compute on the CPU. Raises RuntimeError for tensors on several devices, as CUDA would."""
    tensors, to_gpu = tensors_of(args, kwargs), is_on_gpu(args, kwargs)
    on_cpu = [tensor for tensor in tensors if not isinstance(tensor, OnGPU)]
    if func not in COPIES and len(on_cpu) < len(tensors) and any(t.dim() for t in on_cpu):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    known = {id(tensor.on_cpu): tensor for tensor in tensors if isinstance(tensor, OnGPU)}
    args, kwargs = tree_map_only(
        Tensor, lambda tensor: getattr(tensor, "on_cpu", tensor), (args, kwargs)
    )
    if kwargs.get("device") is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    result = func(*args, **kwargs)
    if not to_gpu:
        return result
    # an operation in place returns its own argument
    for tensor in tensors_of(result):
        known.setdefault(id(tensor), OnGPU(tensor))
    return tree_map_only(Tensor, lambda tensor: known[id(tensor)], result)


FOR_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attention(q, k, v, dropout_p=0.0, is_causal=False, fused=FOR_CPU):
    """Compute scaled_dot_product_attention by one fused operator, which autocast casts for."""
    if q.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        q, k, v = (t.to(torch.get_autocast_dtype("cuda")) for t in (q, k, v))
    return fused(q, k, v, dropout_p, is_causal)[0]


def pinned(tensor):
    """Mark a tensor as in pinned memory."""
    tensor.pinned = True
    return tensor


def answering(**answers):
    """Make torch.cuda's functions give answers, whatever they are asked."""
    functions = {name: lambda *_, a=answer, **__: a for name, answer in answers.items()}
    return patch.multiple(torch.cuda, **functions)


def fake_h200():
    """Make torch.cuda find one H200."""
    return answering(
        is_available=True,
        is_initialized=True,
        device_count=1,
        current_device=0,
        get_device_name=NAME,
        get_device_capability=(9, 0),
        get_device_properties=SimpleNamespace(name=NAME, total_memory=140 * GIB),
        is_bf16_supported=True,
        max_memory_allocated=0,
        mem_get_info=(140 * GIB, 140 * GIB),
        get_rng_state=torch.zeros(16, dtype=torch.uint8),
        set_device=None,
        set_rng_state=None,
        empty_cache=None,
        reset_peak_memory_stats=None,
        _lazy_init=None,
    )


@contextlib.contextmanager
def fake_cuda():
    """Make cuda:0 a fake H200; yields the list of host waits. torch.compile does nothing."""
    mode = CountWaits()
    stream = MagicMock(synchronize=lambda *_: mode.waits.append("synchronize"))
    streams = dict.fromkeys(("Stream", "current_stream", "default_stream"), stream)
    kinds = torch.utils._foreach_utils._foreach_supported_types
    new_event = lambda **_: Event(mode)  # noqa: E731
    with (
        fake_h200(),
        answering(**streams, stream=contextlib.nullcontext()),
        patch.multiple(torch.cuda, synchronize=stream.synchronize, Event=new_event),
        patch.object(F, "scaled_dot_product_attention", attention),
        patch.object(Tensor, "pin_memory", pinned),
        patch.object(torch, "compile", lambda function, **_: function),
        mode,
    ):
        kinds.append(OnGPU)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device) then copies
        yield mode.waits
        torch._C._set_only_lift_cpu_tensors(False)
        kinds.remove(OnGPU)
