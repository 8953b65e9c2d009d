"""What a run would take, said before anything starts: `python train.py --config gpt2_124m.yaml
--estimate`.
"""

import bisect
import functools
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from config import Config
from data.prepare import is_there
from dataloader import open_corpus
from kernels.loss import loss_of_part, sum_of_parts
from model import GPT, GPTConfig
from optimizer import clip_gradients, make_optimizers
from runtime.device import (
    autocast_to,
    device_name,
    make_repeatable,
    matmul_dtype,
    matmul_tflops,
    set_precision,
)
from runtime.memory import Recorder, compiled_graphs, count_graph
from runtime.parallel import recompute, take_float32_input
from runtime.report import flops_rate
from runtime.start import memory_left
from runtime.world import World
from weights import build_model

UTILIZATIONS = (0.3, 0.4, 0.5)  # shares of the measured rate that training reaches


def estimate(config: Config, world: World) -> None:
    """Print the run's tokens and compute, the hours on this device, the disk that checkpoints take,
    the epochs, and the memory.

    Measures the device for some seconds, and writes no run. Every process may call this; rank 0
    prints. Raises UserError for what this device cannot do, a corpus that is bad, and weights of
    `init_from` that cannot be had.
    """
    if world.rank:
        return
    make_repeatable(world.device)
    notes = set_precision(world.device, tf32=config.tf32, bf16=config.bf16)
    if config.init_from == "scratch":
        with torch.device("meta"):  # the sizes alone
            model = GPT(GPTConfig.of(config))
    else:
        config, model = build_model(config)
    dtype = matmul_dtype(bf16=config.bf16, fp16=config.fp16)
    per_step = config.tokens_per_step(world.world_size)
    tokens = config.max_steps * per_step
    flops = tokens * model.flops_per_token(config.seq_len)
    rate = matmul_tflops(world.device, dtype, seconds=3.0)
    print(
        f"{config.run_name}: {model.num_parameters():,} parameters, on {world.world_size} x "
        f"{device_name(world.device)}"
    )
    print(f"tokens:  {tokens:,} in {config.max_steps:,} steps of {per_step:,}")
    print(describe_corpus(config, tokens, model.config.n_vocab))
    print(
        f"compute: {flops:.3g} FLOPs, forward and backward; a large matrix product reaches "
        f"{flops_rate(rate)} here, in "
        f"{str(dtype).removeprefix('torch.')}"
    )
    for share in UTILIZATIONS:
        seconds = flops / (rate * 1e12 * world.world_size * share)
        print(
            f"at {share:.0%} of that: {hours(seconds)}, {seconds / config.max_steps:,.3f} s a "
            f"step, "
            f"{tokens / seconds:,.0f} tokens/s"
        )
    print(describe_disk(config, model))
    lines, peak = describe_memory(config, world)
    print("\n".join(lines))
    for note in [*notes, *config.notes()]:
        print(f"note: {note}")
    print(f"estimated peak: {peak} MB")


def hours(seconds: float) -> str:
    """A time in hours; of more than two days, in days too."""
    text = (
        f"{seconds / 3600:,.3g} hours" if seconds < 999.5 * 3600 else f"{seconds / 3600:,.0f} hours"
    )
    return text + (f" ({seconds / 86400:,.0f} days)" if seconds > 2 * 86400 else "")


def describe_corpus(config: Config, tokens: int, n_vocab: int) -> str:
    """How often the run passes over the corpus that is there. Raises TokenFileError for a bad one."""
    folder = Path(config.data_dir) / config.dataset
    if not is_there(folder):
        return f"corpus:  {folder} is not there yet"
    split, val = open_corpus(folder, config.seq_len, n_vocab, config.val_fraction)
    return (
        f"corpus:  {tokens / split.tokens:,.2f} epochs of the {split.tokens:,} tokens of {folder}"
        + (f", which has {val.tokens:,} more for validation" if val.tokens else "")
    )


def checkpoint_bytes(config: Config, model: GPT) -> int:
    """Size of a checkpoint: weights and the optimizer's averages, two of each number for AdamW and
    one for Muon, in 32 bits.
    """
    of_muon = sum(
        p.numel() for name, p in model.named_parameters() if ".h." in name and p.dim() == 2
    )
    return 4 * (3 * model.num_parameters() - (of_muon if config.optimizer == "muon" else 0))


def describe_disk(config: Config, model: GPT) -> str:
    """What the checkpoints take, and what is free where they go."""
    if not config.keep_last:
        return "disk:    no checkpoint is saved, as keep_last is 0"
    each, saved, best = checkpoint_bytes(config, model), 1, bool(config.eval_every)
    if config.checkpoint_every:
        saved = -(-config.max_steps // config.checkpoint_every)
    if config.eval_every:  # the best so far is saved too
        saved += config.max_steps // config.eval_every
    kept = min(
        max(config.keep_last, 2), saved
    )  # the one before goes only once the new one is whole
    place = Path(config.log_dir).absolute()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    return (
        f"disk:    {each / 1e9:,.3g} GB a checkpoint, at most {each * (kept + best) / 1e9:,.3g} "
        f"GB for {kept} at a time"
        f"{' and the best one' if best else ''}; {free / 1e9:,.3g} GB are free in {config.log_dir}"
    )


# ---- memory

MB = 2**20
PHASES = {
    "forward": "forward pass",
    "backward": "backward pass",
    "late backward": "backward pass",
    "clipping": "clipping",
    "update": "update",
}
STEPS = 2  # that are counted: the optimizer's state comes with the first
# that are compiled to graphs, which takes some seconds: more are extrapolated, as blocks are all
# alike
MOST_LAYERS = 4
# What a process on a CPU takes beside tensors, fitted to what benchmarks/memory.py measures
# (docs/results.md): code that is loaded after the model is built, and the libraries' own buffers;
# as a share of tensors, gaps among buffers of many sizes, which are kept
CODE, COMPILED_CODE, GAPS = 150 * MB, 240 * MB, 0.21


def describe_memory(config: Config, world: World) -> tuple[list[str], int]:
    """What each process's memory goes to, and the largest batch_size that fits; and the peak, in
    MiB, of what summary.json calls memory_growth_mb. Nothing is allocated.
    """
    device, each = (
        world.device,
        f"of each of {world.world_size} processes" if world.world_size > 1 else "of the process",
    )
    found = figures(config, world.world_size, device)
    tensors, moment = max((found[phase], phase) for phase in PHASES)
    peak = whole(tensors, config, device)
    parts = [
        f"{found[part] / MB:,.0f} MB {words}"
        for part, words in (
            ("parameters", "parameters"),
            ("gradients", "gradients"),
            ("optimizer", "optimizer state"),
            ("activations", "activations that the forward pass keeps for the backward pass"),
        )
    ]
    uncompiled = (
        ", counted as if not compiled"
        if config.compile and not is_one_graph(config, world.world_size)
        else ""
    )
    lines = [
        f"memory:  {each}: {', '.join(parts)}",
        f"         {tensors / MB:,.0f} MB of tensors at once at the worst moment, in the "
        f"{PHASES[moment]}{uncompiled}",
        f"         {(peak - tensors) / MB:,.0f} MB beside them: "
        + (
            "code, and gaps among buffers, which are kept for the next ones until memory runs short"
            if device.type == "cpu"
            else "the workspace of matrix products"
        ),
    ]
    left = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else memory_left() / world.world_size
    )
    if math.isfinite(left):
        largest = largest_batch(config, world.world_size, device, left, found)
        lines.append(
            f"batch:   {f'the largest batch_size that fits is {largest:,}' if largest else 'no batch_size fits'}, in the "
            f"{left / MB:,.0f} MB that are left here for a process"
        )
    return lines, round(peak / MB)


def whole(tensors: float, config: Config, device: torch.device) -> float:
    """Bytes that a process takes that has so many bytes of tensors at once, beyond what it has
    before its model is built.
    """
    if device.type == "cuda":
        return (
            tensors + (32 if torch.cuda.get_device_capability(device) >= (9, 0) else 8) * MB
        )  # cuBLAS's workspace
    if device.type != "cpu":
        return tensors
    return (1 + GAPS) * tensors + (COMPILED_CODE if config.compile else CODE)


def is_one_graph(config: Config, world_size: int) -> bool:
    """Whether the whole model is compiled: FSDP compiles each block by itself."""
    return config.compile and not (config.fsdp and world_size > 1)


def largest_batch(
    config: Config, world_size: int, device: torch.device, memory: float, found: dict[str, float]
) -> int:
    """The largest batch_size with which a process takes at most `memory` bytes, 0 if there is none;
    with total_batch_tokens, of those that divide it. `found` are the config's own figures.
    """
    size = config.batch_size
    changed: dict[str, int] = {"batch_size": 2 if size == 1 else 1}
    if (
        config.total_batch_tokens
    ):  # with as many micro-steps, so that the size alone makes the difference
        changed["total_batch_tokens"] = config.total_batch_tokens // size * changed["batch_size"]
    other = figures(config.model_copy(update=changed), world_size, device)

    def fits(batch_size: int) -> bool:  # each sequence adds the same
        tensors = max(
            found[phase] + (batch_size - size) * (found[phase] - other[phase]) / (size - 1 or -1)
            for phase in PHASES
        )
        return whole(tensors, config, device) <= memory

    most = (
        config.total_batch_tokens // (config.seq_len * world_size)
        if config.total_batch_tokens
        else 10**9
    )
    largest = bisect.bisect_left(range(1, most + 1), True, key=lambda size: not fits(size))
    if config.total_batch_tokens:
        largest = max((size for size in range(1, largest + 1) if most % size == 0), default=0)
    return largest


def figures(config: Config, world_size: int, device: torch.device) -> dict[str, float]:
    """Bytes of a process's parameters, gradients, optimizer state and activations, and of the most
    tensors at once by phase.
    """
    if is_one_graph(config, world_size) and config.n_layer > MOST_LAYERS:
        fewer, more = (
            count(config.model_copy(update={"n_layer": layers}), world_size, device)
            for layers in (MOST_LAYERS - 2, MOST_LAYERS)
        )
        return {
            name: more[name] + (more[name] - fewer[name]) / 2 * (config.n_layer - MOST_LAYERS)
            for name in more
        }
    return count(config, world_size, device)


def count(config: Config, world_size: int, device: torch.device) -> dict[str, float]:
    """The figures above, of steps that are taken with fake tensors: the model's, the loss's and the
    optimizers' own code, in the order of train.py's, so what they keep and for how long is what
    they do. torch.compile's graphs are traced, not compiled.
    """
    sharded, compiled = config.fsdp and world_size > 1, is_one_graph(config, world_size)
    autocast = autocast_to(matmul_dtype(bf16=config.bf16, fp16=config.fp16), device)
    accumulation = min(2, config.accumulation_steps(world_size))
    of_part = fused_part if config.compile else loss_of_part
    recorder = Recorder(
        {
            torch.ops.gpt2.summed_loss.default: lambda x, weight, y, n_vocab, chunks, train, _: (
                sum_of_parts(x, weight, y, n_vocab, chunks, train, of_part)
            )
        },
        rounded_to=512 if device.type == "cuda" else 1,
    )
    last = True  # of the micro-steps

    def loss_of(model: Any) -> Tensor:
        x, y = (torch.zeros(config.batch_size, config.seq_len, dtype=torch.long) for _ in range(2))
        with autocast():
            return model(x, y) / accumulation

    found: dict[str, float] = {}
    with FakeTensorMode(), torch.device(device):
        graphs = compiled_graphs(model_of(config), loss_of) if compiled else None
        gathered = (
            gathered_of(config) if sharded else None
        )  # its parts are counted while they are gathered
        with recorder:
            model = shards_of(config, world_size) if sharded else model_of(config)
            sharding = Sharding(gathered, model, recorder) if gathered else None
            parameters = list(model.parameters())
            found["parameters"] = found["gradients"] = float(
                sum(p.numel() * p.element_size() for p in parameters)
            )
            beside = recorder.now  # buffers too
            buckets = (
                [torch.empty_like(p) for p in parameters] if world_size > 1 and not sharded else []
            )

            def into(bucket: Tensor, p: Tensor) -> None:  # as DDP does, which sends them
                p.grad = bucket if last else p.grad

            for p, bucket in zip(parameters, buckets, strict=False):
                p.register_post_accumulate_grad_hook(functools.partial(into, bucket))
            optimizers, _ = make_optimizers(model, config.model_copy(update={"compile": False}))
            loss = None  # train.py's is freed when the next one is there
            for micro_step in range(STEPS * accumulation):
                last = micro_step % accumulation == accumulation - 1
                if sharding:
                    sharding.synchronizing = last
                before = recorder.now
                recorder.begin("forward")
                if graphs:
                    saved = count_graph(graphs[0], recorder, {})
                    found["activations"] = float(recorder.now - before)
                    recorder.begin("backward")
                    results = count_graph(
                        graphs[1], recorder, saved, lambda: recorder.begin("late backward")
                    )
                    for number in {number for numbers in results.values() for number in numbers}:
                        recorder.free(number)
                    for p, bucket in zip(parameters, buckets or parameters, strict=True):
                        if buckets and last:
                            p.grad = bucket
                        elif p.grad is None:
                            p.grad = torch.empty_like(p)
                else:
                    loss = loss_of(gathered or model)
                    found["activations"] = float(recorder.now - before)
                    recorder.begin("backward")
                    loss.backward()
                if not last:
                    continue
                recorder.begin("clipping")
                clip_gradients(model, config.grad_clip)
                recorder.begin("update")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            found["optimizer"] = float(recorder.now - beside) - (
                found["gradients"] if buckets else 0.0
            )
    return found | {phase: float(recorder.most[phase]) for phase in PHASES}


def fused_part(
    x: Tensor, weight: Tensor, targets: Tensor, n_vocab: int, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The buffers of `loss_of_part` where it is compiled: all that comes after the product is
    computed in its place.
    """
    logits = x @ weight.t()
    return logits.sum(), logits if with_gradient else None


def model_of(config: Config) -> GPT:
    """The model as train.py builds it, whose blocks compute again what they do not keep, if the
    config says so.
    """
    model = GPT(GPTConfig.of(config))
    if config.recompute:
        recompute(model.transformer.h)
    return model


def shards_of(config: Config, world_size: int) -> GPT:
    """A model of the shards that one of so many processes has of each parameter, along its first
    dimension.
    """
    model = model_of(config)
    for p in model.parameters():
        p.data = torch.empty(-(-p.size(0) // world_size), *p.shape[1:])
    return model


def gathered_of(config: Config) -> GPT:
    """The model as FSDP gathers it to compute: under bf16 its blocks are in bfloat16."""
    model = model_of(config)
    for block in model.transformer.h if config.bf16 else ():
        for p in block.parameters():
            p.data = torch.empty(p.shape, dtype=torch.bfloat16)
        take_float32_input(block, next(block.parameters()).device)
    return model


class Sharding:
    """Counts what FSDP adds to the shards: a block's parameters are whole while it computes, what
    is in no block from the forward pass to its gradients (runtime/parallel.py). Gradients are whole
    until they are summed, over the processes and in float32.
    """

    def __init__(self, gathered: GPT, shards: GPT, recorder: Recorder):
        self.recorder, self.synchronizing = recorder, True
        self.own = dict(shards.named_parameters())
        names = {id(p): name for name, p in gathered.named_parameters()}
        blocks = list(gathered.transformer.h)
        for block in blocks:
            self._follow(block, [(names[id(p)], p) for p in block.parameters()], is_block=True)
        in_blocks = {id(p) for block in blocks for p in block.parameters()}
        outside = [(name, p) for name, p in gathered.named_parameters() if id(p) not in in_blocks]
        self._follow(gathered, outside, is_block=False)

    def _follow(
        self, module: torch.nn.Module, parameters: Sequence[tuple[str, Tensor]], is_block: bool
    ) -> None:
        size, numbers = sum(p.numel() * p.element_size() for _, p in parameters), list[int]()
        waiting: set[str] = set()

        def gathered(*_: object) -> None:
            waiting.update(name for name, _ in parameters)
            if not numbers:
                flat = self.recorder.allocate(size)  # of all processes, then cut up into parameters
                numbers.append(self.recorder.allocate(size))
                self.recorder.free(flat)

        def released(*_: object) -> None:
            while numbers:
                self.recorder.free(numbers.pop())

        def has_gradient(name: str) -> None:
            waiting.discard(name)
            if waiting:
                return
            if self.synchronizing:
                flat = self.recorder.allocate(4 * sum(p.numel() for _, p in parameters))
                for other, p in parameters:
                    p.grad = None
                    if self.own[other].grad is None:
                        self.own[other].grad = torch.empty_like(self.own[other])
                self.recorder.free(flat)
            released()

        module.register_forward_pre_hook(gathered)
        if is_block:
            module.register_forward_hook(released)
            module.register_full_backward_pre_hook(gathered)
        for name, p in parameters:
            p.register_post_accumulate_grad_hook(lambda _, name=name: has_gradient(name))
