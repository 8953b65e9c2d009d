"""What a run would take, said before anything starts: `python train.py --config gpt2_124m.yaml --estimate`."""

import shutil
from pathlib import Path

import torch

from config import Config
from data.prepare import is_there
from dataloader import open_corpus
from model import GPT, GPTConfig
from runtime.device import device_name, prepare, product_dtype
from runtime.measure import bf16_note, matmul_tflops
from runtime.report import flops_rate
from runtime.world import World
from weights import build_model

UTILIZATIONS = (0.3, 0.4, 0.5)  # shares of the measured rate that training reaches


def estimate(config: Config, world: World) -> None:
    """Print the run's tokens and compute, the hours on this device, the disk that checkpoints take, and the epochs.

    Measures the device for some seconds, and writes no run. Every process may call this; rank 0 prints. Raises UserError for
    what this device cannot do, a corpus that is bad, and weights of `init_from` that cannot be had.
    """
    if world.rank:
        return
    notes = prepare(world.device, tf32=config.tf32, bf16=config.bf16)
    if config.init_from == "scratch":
        with torch.device("meta"):  # the sizes alone
            model = GPT(GPTConfig.of(config))
    else:
        config, model = build_model(config)
    dtype = product_dtype(bf16=config.bf16, fp16=config.fp16)
    per_step = config.tokens_per_step(world.world_size)
    tokens = config.max_steps * per_step
    flops = tokens * model.flops_per_token(config.seq_len)
    rate = matmul_tflops(world.device, dtype, seconds=3.0)
    print(f"{config.run_name}: {model.num_parameters():,} parameters, on {world.world_size} x {device_name(world.device)}")
    print(f"tokens:  {tokens:,} in {config.max_steps:,} steps of {per_step:,}")
    print(corpus_in_words(config, tokens, model.config.n_vocab))
    print(f"compute: {flops:.3g} FLOPs, forward and backward; a large matrix product reaches {flops_rate(rate)} here, in "
          f"{str(dtype).removeprefix('torch.')}")
    for share in UTILIZATIONS:
        seconds = flops / (rate * 1e12 * world.world_size * share)
        print(f"at {share:.0%} of that: {hours(seconds)}, {seconds / config.max_steps:,.3f} s a step, "
              f"{tokens / seconds:,.0f} tokens/s")
    print(disk_in_words(config, model))
    for note in [*notes, *config.notes(), *(bf16_note(world.device) if config.bf16 else [])]:
        print(f"note: {note}")


def hours(seconds: float) -> str:
    """A time in hours; of more than two days, in days too."""
    text = f"{seconds / 3600:,.3g} hours" if seconds < 999.5 * 3600 else f"{seconds / 3600:,.0f} hours"
    return text + (f" ({seconds / 86400:,.0f} days)" if seconds > 2 * 86400 else "")


def corpus_in_words(config: Config, tokens: int, n_vocab: int) -> str:
    """How often the run passes over the corpus that is there. Raises TokenFileError for a bad one."""
    folder = Path(config.data_dir) / config.dataset
    if not is_there(folder):
        return f"corpus:  {folder} is not there yet"
    split, val = open_corpus(folder, config.seq_len, n_vocab, config.val_fraction)
    return (f"corpus:  {tokens / split.tokens:,.2f} epochs of the {split.tokens:,} tokens of {folder}"
            + (f", which has {val.tokens:,} more for validation" if val.tokens else ""))


def checkpoint_bytes(config: Config, model: GPT) -> int:
    """Size of a checkpoint: weights and the optimizer's averages, two of each number for AdamW and one for Muon, in 32 bits."""
    of_muon = sum(p.numel() for name, p in model.named_parameters() if ".h." in name and p.dim() == 2)
    return 4 * (3 * model.num_parameters() - (of_muon if config.optimizer == "muon" else 0))


def disk_in_words(config: Config, model: GPT) -> str:
    """What the checkpoints take, and what is free where they go."""
    if not config.keep_last:
        return "disk:    no checkpoint is saved, as keep_last is 0"
    each, saved, best = checkpoint_bytes(config, model), 1, bool(config.eval_every)
    if config.checkpoint_every:
        saved = -(-config.max_steps // config.checkpoint_every)
    if config.eval_every:  # the best so far is saved too
        saved += config.max_steps // config.eval_every
    kept = min(max(config.keep_last, 2), saved)  # the one before goes only once the new one is whole
    place = Path(config.log_dir).absolute()
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    return (f"disk:    {each / 1e9:,.3g} GB a checkpoint, at most {each * (kept + best) / 1e9:,.3g} GB for {kept} at a time"
            f"{' and the best one' if best else ''}; {free / 1e9:,.3g} GB are free in {config.log_dir}")
