"""Count the work of a training step, and predict its time from a device's rates.

The operations of train_step are counted on fake tensors, which have shapes but no numbers. Each
takes as long as the slowest of three: its arithmetic, its memory traffic, and its launch (the
roofline model, Williams et al. 2009). docs/why.md does it by hand for one stage. The private
parts of PyTorch that fake tensors need are used in this file alone.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from checkpoint.weights import adopt_architecture
from config import Config
from kernels.loss import summed_loss
from measure.ladder.record import LIMITS, Device, Prediction
from runtime.device import choose_device, cpu_has, usable_precision
from runtime.world import World
from train import Run, setup, train_step

# Besides matmuls and attention, torch.compile does not fuse these with their neighbours.
UNFUSED = ("embedding", "_fused", "_foreach")
NORM = ("linalg_vector_norm", "_foreach_norm")  # the gradients' norm begins the update

Bytes = dict[torch.UntypedStorage, int]  # by the tensors' storages


@dataclass
class Operation:
    """An operation. Tensors with one storage count as one."""

    name: str
    flops: float
    dtype: str  # its first floating-point input's
    reads: Bytes
    writes: Bytes

    @property
    def bytes(self) -> int:
        """The bytes that it reads and writes."""
        return sum(self.reads.values()) + sum(self.writes.values())


class Counter(TorchDispatchMode):
    """Note every operation that computes or moves something: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = bytes_of((args, kwargs)), bytes_of(result)
        arguments = zip(func._schema.arguments, args, strict=False)
        written = [value for arg, value in arguments if arg.alias_info and arg.alias_info.is_write]
        outputs |= bytes_of(written)
        if not written and outputs.keys() <= inputs.keys():
            return result  # a view
        name = func._schema.name.removeprefix("aten::")
        if name == "embedding":  # looks up rows, does not read the matrix
            inputs = outputs
        counted = "mm" if name == "matmul" else name.replace("_for_cpu", "")  # a GPU's name of it
        packet = getattr(torch.ops.aten, counted, None)
        count = flop_registry.get(packet, lambda *_, **__: 0)
        # Causal attention computes half of the scores, at about half of a matmul's rate (Dao 2023,
        # "FlashAttention-2", figure 4). PyTorch counts all of them, which comes to the same.
        flops = count(*args, **kwargs, out_val=result)
        floats = (t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point())
        dtype = str(next(floats, torch.float32)).removeprefix("torch.")
        if name == "masked_fill":
            # ATen copies the tensor, then fills the copy: native/TensorAdvancedIndexing.cpp.
            self.operations.append(Operation("clone", 0.0, dtype, bytes_of(args[0]), outputs))
            name, inputs = "masked_fill_", bytes_of(args[1]) | outputs
        self.operations.append(Operation(name, flops, dtype, inputs, outputs))
        return result


def bytes_of(values: Any) -> Bytes:
    """Return the bytes of each tensor's storage that the tensors in `values` have."""
    sizes: Bytes = {}
    for tensor in tensors_in(values):
        storage = tensor.untyped_storage()
        size = min(tensor.nbytes, storage.nbytes())  # less, if expanded
        sizes[storage] = max(size, sizes.get(storage, 0))
    return sizes


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results."""
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))


class Numberless(TorchDispatchMode):
    """Let fake tensors be read as numbers, and run the chunked loss's own code on them.

    Most operations only ask a fake tensor for its device: to answer at once saves a third of the
    time.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if func is summed_loss._opoverload:
            return summed_loss._init_fn(*args)  # its buffers count too
        return func(*args, **(kwargs or {}))


def count(config: Config, device: torch.device) -> list[Operation]:
    """Return the operations of a training step on one rank, without torch.compile."""
    # Fresh weights of the same architecture take as much arithmetic and memory traffic.
    config = config.with_options(compile=False, init_from="scratch")
    mode = FakeTensorMode()
    # nn.Module.to refuses tensors that something else refers to, such as this memo.
    mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
    with mode, device:
        ids = torch.zeros(config.batch_size, config.seq_len, dtype=torch.long)
        with Numberless():
            run = setup(config, World(device), batches=itertools.repeat((ids, ids)))
            update_as_real(run)
            train_step(run, 1)  # creates the optimizer's state
        with Counter() as counter, Numberless():
            train_step(run, 2)
    return counter.operations


def update_as_real(run: Run) -> None:
    """Let a run on fake tensors update as a real one does.

    A scaler may skip its updates, and for fake tensors PyTorch does not make its own choice on a
    GPU: foreach, whose temporary tensors are as large as the weights.
    """
    run.state.scaler = torch.amp.GradScaler(enabled=False)
    for optimizer in run.state.optimizers:
        for group in optimizer.param_groups:
            group["foreach"] = run.world.device.type == "cuda" and not group.get("fused")


def fuse(operations: list[Operation]) -> list[Operation]:
    """Fuse operations as torch.compile does: all between two matmuls become one kernel.

    It reads only tensors from outside, and writes only tensors that are read later. The update
    stays unfused. For speedup10 this comes to 13% fewer bytes than the kernels that Inductor
    generates (logs/results/counted).
    """
    last_read = {tensor: i for i, op in enumerate(operations) for tensor in op.reads}
    update = next(i for i, op in enumerate(operations) if op.name in NORM)
    is_alone = [
        i >= update or op.flops > 0 or op.name.startswith(UNFUSED)
        for i, op in enumerate(operations)
    ]
    fused: list[Operation] = []
    for alone, group in itertools.groupby(enumerate(operations), lambda item: is_alone[item[0]]):
        indices, parts = zip(*group, strict=True)
        if alone:
            fused += parts
            continue
        kernel = Operation("fused", 0.0, "float32", {}, {})
        for part in parts:
            kernel.reads |= {t: n for t, n in part.reads.items() if t not in kernel.writes}
            kernel.writes |= part.writes
        kernel.writes = {
            t: n for t, n in kernel.writes.items() if last_read.get(t, 0) > indices[-1]
        }
        fused.append(kernel)
    return fused


def predict(config: Config, rates: Device, device: torch.device) -> Prediction:
    """Predict how long a step of the config takes on one rank, at these rates."""
    bandwidth, launch = rates.gigabytes_per_s, rates.launch_us
    assert bandwidth  # predict_stages requires both
    assert launch is not None
    operations = count(config, device)
    if config.compile:
        operations = fuse(operations)
    fp32 = rate_of_fp32(config, device)
    seconds: dict[str, Any] = dict.fromkeys(LIMITS, 0.0)
    for op in operations:
        tflops = rates.tflops[fp32 if op.dtype == "float32" else op.dtype]
        takes = (op.flops / tflops / 1e12, op.bytes / bandwidth / 1e9, launch / 1e6)
        slowest, limit = max(zip(takes, LIMITS, strict=True))
        seconds[limit] += slowest
    return Prediction(tokens=config.tokens_per_step(1), **seconds)


def rate_of_fp32(config: Config, device: torch.device) -> str:
    """Return the name of the rate that fp32 matmuls reach, in the precision in effect."""
    if usable_precision(device, config.fp32_precision()) == "highest":
        return "float32"
    if device.type == "cuda":
        return "tf32"
    return "bfloat16" if cpu_has("amx_bf16") else "float32"


def predict_all(configs: list[Config], rates: Device) -> list[Prediction]:
    """Return the prediction of each config."""
    adopted = map(adopt_architecture, configs)
    return [predict(config, rates, choose_device(config.device)) for config in adopted]
