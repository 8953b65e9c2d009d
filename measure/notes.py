"""Describe the device of a run, and the options that do less there than one might expect."""

from config import Config
from kernels.attention import blocked_is_faster
from runtime.device import (
    check_attention,
    check_compiler,
    check_precision,
    check_version,
    describe_device,
    matmul_dtype,
)
from runtime.world import World


def describe_options(config: Config, acting: Config, world: World) -> list[str]:
    """Return lines on the device, on what is switched on, and on what does less than one expects.

    `acting`: the options as they act on this device. Raises UserError for what it cannot do.
    """
    device, ranks = world.device, world.world_size
    notes = check_version()
    notes += check_precision(device, matmul_precision=config.fp32_precision(), bf16=config.bf16)
    if config.compile:
        notes += check_compiler(device, config.compile_mode, acting.compile_mode)
    if config.flash:
        B, T, head_size = config.batch_size, config.seq_len, config.n_embd // config.n_head
        dtype = matmul_dtype(bf16=config.bf16, fp16=config.fp16)
        blocked = config.compile and blocked_is_faster(device, dtype, T)
        shape = (B, config.n_head, T, head_size)
        notes += check_attention(device, dtype, shape, dropout=config.dropout, blocked=blocked)
    return [
        describe_device(device, ranks),
        acting.describe_optimizations(ranks),
        *(f"note: {note}" for note in notes),
    ]
