"""Every option of a run, declared once.

Flags, YAML keys and `--help` come from the classes below. A field's marks show whether it is an
optimization, which option it needs, and whether a checkpoint fixes it. Nothing here imports torch,
so `--help` and errors appear at once.
"""

import os
import re
import shlex
from collections.abc import Collection, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from options import (
    FIXED,
    GPT2_TOKENS,
    INITIAL,
    LISTED,
    OF_MUON,
    OPTIMIZATION,
    PATH,
    THIS_CALL,
    Count,
    Fraction,
    ListedSwitch,
    ModelOptions,
    Needs,
    NotNegative,
    Optimization,
    Rate,
    RateOfKind,
    Size,
    Switch,
)
from runtime.cli import Device, Name, Options, ZeroIsOff, load, show, to_yaml

# Modes of torch.compile that record CUDA graphs, and the same modes without graphs
WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
GRAPHS_RECORDED = 3  # passes before CUDA graphs run: the first compiles, the next two record


class ModelConfig(Options, ModelOptions):
    """model"""

    init_from: Annotated[Name, INITIAL] = "scratch"
    """scratch, a run's folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl, a Hugging Face folder, or a
    .pt file of nanoGPT
    """


class DataConfig(Options):
    """data"""

    dataset: Name = "pydocs"
    """corpus: a folder of token files below data_dir; pydocs, pydocs4096 (4,096 tokens of its
    own) and shakespeare are prepared when first asked for
    """
    data_dir: Annotated[Name, PATH] = "data"
    """folder that holds the corpora"""
    batch_size: Size = 4
    """sequences per rank and micro-step"""
    seq_len: Annotated[Size, FIXED] = 1024
    """tokens per sequence"""
    total_batch_tokens: Size | None = None
    """tokens per step over all ranks, reached by gradient accumulation (default: one micro-step)"""
    shuffle: Annotated[Switch, FIXED] = False
    """shuffle every epoch, by the seed and without replacement; otherwise in the text's order"""
    overfit_batch: Annotated[bool, FIXED] = False
    """repeat the first step's batch in every step"""
    val_fraction: Annotated[Fraction, FIXED] = 0.0
    """share of the tokens, from the end, held out for validation; unused if the corpus has
    validation files
    """


# Options that an optimizer excludes, by its name, and why
EXCLUDED_BY = {
    "muon": {
        "fp16": "at an overflow only one of its two optimizers would skip the step; use bf16",
        "fsdp": "its matrices have to be whole; use DDP, or adamw",
    }
}


class OptimizationConfig(Options):
    """optimization"""

    optimizer: Annotated[Literal["adamw", "muon"], OPTIMIZATION, FIXED] = "adamw"
    """adamw, or muon for the matrices inside the blocks with adamw for the rest"""
    lr: Rate = 3e-4
    """learning rate (its peak, with a schedule)"""
    embed_lr: RateOfKind = None
    """learning rate of the embeddings, with tie_weights of the output head too; lr's warm-up and
    schedule (default: lr)
    """
    head_lr: Annotated[RateOfKind, Needs("tie_weights", (False,))] = None
    """learning rate of the output head (default: lr)"""
    scalar_lr: RateOfKind = None
    """learning rate of biases, norms' weights and learned shares (default: lr)"""
    min_lr: Annotated[NotNegative | None, Needs("lr_schedule", ("cosine", "wsd"))] = None
    """learning rate at the end of a decaying schedule (default: lr / 10)"""
    warmup_steps: Annotated[ZeroIsOff, OPTIMIZATION] = 0
    """steps of linear warm-up; the last of them has the peak rate"""
    lr_schedule: Annotated[Literal["constant", "cosine", "wsd"], LISTED] = "constant"
    """after the warm-up: constant, cosine decay, or wsd (warmup-stable-decay: constant, then linear
    decay)
    """
    wsd_decay_fraction: Annotated[float, Needs("lr_schedule", ("wsd",))] = Field(0.2, gt=0, le=1)
    """share of max_steps over which wsd decays"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment"""
    eps: float = Field(1e-8, gt=0, le=1)
    """AdamW's epsilon"""
    weight_decay: NotNegative = 0.01
    """decoupled weight decay"""
    muon_lr: Annotated[Rate, OF_MUON] = 0.02
    """Muon's learning rate, with lr's warm-up and schedule"""
    muon_weight_decay: Annotated[NotNegative, OF_MUON] = 0.01
    """Muon's decoupled weight decay"""
    normuon: Annotated[Switch, OF_MUON, FIXED] = False
    """NorMuon: divide the rows of Muon's updates by their root mean square of the last steps"""
    decay_matrices_only: Annotated[ListedSwitch, Needs("weight_decay")] = False
    """decay matrices and embeddings only, not biases and norms"""
    grad_clip: Annotated[NotNegative, LISTED] = 0.0
    """clip the global gradient norm to this; 0 is off; the norm is logged either way"""
    max_steps: Annotated[Count, Needs("max_minutes", (None,))] = 50
    """optimizer steps"""
    max_minutes: Rate | None = None
    """minutes from the first step to the end of the run, evaluations included; the schedule follows
    the clock (default: the run ends after max_steps)
    """
    skip_nonfinite: ZeroIsOff = 0
    """skip up to this many updates whose loss or gradient norm is not finite; 0 stops at the first
    one
    """


class SpeedConfig(Options):
    """speed and memory (off by default but retain_memory and, on CPUs, recompute_cheap)"""

    matmul_precision: Annotated[Literal["highest", "high", "medium"], OPTIMIZATION] = "highest"
    """precision of fp32 matmuls: highest (fp32), high (TF32, on NVIDIA GPUs since Ampere), medium
    (on CPUs with bf16 instructions: by oneDNN, with inputs rounded to bf16 if there is AMX)
    """
    tf32: ListedSwitch = False
    """short for --matmul_precision high: TF32 matmuls"""
    bf16: ListedSwitch = False
    """bfloat16 autocast; weights stay fp32"""
    fp16: Switch = False
    """float16 autocast with loss scaling, for GPUs without bfloat16"""
    compile: ListedSwitch = False
    """torch.compile the model"""
    compile_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        OPTIMIZATION,
        Needs("compile"),
    ] = "default"
    """mode of torch.compile"""
    flash: ListedSwitch = False
    """fused scaled_dot_product_attention instead of the T x T matrix"""
    fused_adamw: ListedSwitch = False
    """one kernel for the whole AdamW update"""
    fsdp: Switch = False
    """shard weights, gradients and optimizer state over the ranks (FSDP2)"""
    recompute: Switch = False
    """activation checkpointing: recompute each block in the backward pass; less memory, more
    arithmetic
    """
    recompute_cheap: Annotated[bool | None, OPTIMIZATION, Needs("compile")] = None
    """with compile: recompute norms, GELU, casts and residual sums in the backward pass to save
    memory (default: on for CPUs, at no cost in time)
    """
    residual_bf16: Annotated[Switch, Needs("bf16")] = False
    """keep the residual stream in bfloat16 too: fewer bytes, but rounded at each addition"""
    retain_memory: bool = True
    """on a CPU with glibc: retain freed memory for the next buffers, which the system would zero
    again
    """
    loss_chunks: Annotated[Count, OPTIMIZATION] = 1
    """chunked cross-entropy: compute the loss in this many parts, so that the logits of all tokens
    are never in memory at once; 8 saves most of their memory
    """


class RunConfig(Options):
    """run"""

    device: Annotated[Device, THIS_CALL] = "auto"
    """auto: cuda, else mps, else cpu"""
    seed: Annotated[int, FIXED] = Field(1337, ge=0, lt=2**63)
    """seed of the weights, the order of the data, and dropout"""
    run_name: Annotated[Name | None, THIS_CALL] = None
    """the run's folder below log_dir (default: the config file's stem, or train)"""
    log_dir: Annotated[Name, THIS_CALL] = "logs"
    """folder that holds the runs"""
    log_every: Count = 1
    """steps per line of the log"""
    eval_every: ZeroIsOff = 0
    """steps between evaluations of the validation loss, also before the first and after the last
    step; 0 disables them
    """
    eval_tokens: Annotated[Size | None, Needs("eval_every")] = None
    """tokens in an evaluation, always the same ones (default: the whole validation split)"""
    reference: Annotated[Name | None, PATH, Needs("eval_every")] = None
    """validation curve to compare each evaluation with: a CSV file, or a name in configs/reference
    """
    hellaswag_every: ZeroIsOff = 0
    """steps between HellaSwag scores, also before the first and after the last step; 0 disables
    them
    """
    hellaswag_file: Annotated[Name | None, PATH, Needs("hellaswag_every")] = None
    """items in HellaSwag's format (default: data_dir/hellaswag/hellaswag_val.jsonl, which
    data/hellaswag.py downloads)
    """
    sample_every: ZeroIsOff = 0
    """steps between generated samples, also after the last step; 0 disables them"""
    sample_prompt: Annotated[str, Needs("sample_every")] = ""
    """prompt of the samples in training; empty begins a document"""
    sample_tokens: Annotated[Count, Needs("sample_every")] = 64
    """tokens generated per sample"""
    sample_temperature: Annotated[NotNegative, Needs("sample_every")] = 0.8
    """below 1: likelier tokens; 0: always the likeliest token"""
    checkpoint_every: Annotated[ZeroIsOff, Needs("keep_last")] = 0
    """steps between checkpoints; one is always saved at the end, and 0 saves only that one"""
    keep_last: ZeroIsOff = 3
    """newest checkpoints to keep; the best by validation loss is kept too; 0 saves none at all"""
    tensorboard: bool = False
    """also log to TensorBoard, in the run's folder (pip install -r requirements-track.txt)"""
    wandb: bool = False
    """also log to Weights & Biases; offline without an account (pip install -r
    requirements-track.txt)
    """
    resume: Annotated[Name | None, THIS_CALL] = None
    """auto: resume from the run's newest whole checkpoint, or start if there is none; or a run's
    folder, or a checkpoint, which is only read if log_dir is another folder
    """
    timeout: Annotated[Count, THIS_CALL] = 600
    """seconds after which a rank stops waiting for another one"""


# Names of options in nanoGPT, transformers and earlier versions, and the text to write here
OTHER_NAMES = {
    "max_iters": "max_steps",
    "num_train_epochs": "max_steps; a run prints the batches of 1 epoch",
    "learning_rate": "lr",
    "decay_lr": "lr_schedule (constant, cosine or wsd)",
    "lr_scheduler_type": "lr_schedule (constant, cosine or wsd)",
    "lr_decay_iters": "max_steps, at which the schedule ends",
    "warmup_iters": "warmup_steps",
    "beta1": "betas, with both values",
    "beta2": "betas, with both values",
    "adam_epsilon": "eps",
    "max_grad_norm": "grad_clip",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "total_batch_tokens: micro-steps x ranks x batch_size x seq_len",
    "n_ctx": "block_size, and seq_len",
    "n_positions": "block_size, and seq_len",
    "max_seq_length": "seq_len",
    "dtype": "bf16 or fp16; without them, float32",
    "gradient_checkpointing": "recompute",
    "out_dir": "run_name, a folder in log_dir",
    "output_dir": "run_name, a folder in log_dir",
    "log_interval": "log_every",
    "logging_steps": "log_every",
    "eval_interval": "eval_every",
    "eval_steps": "eval_every",
    "eval_iters": "eval_tokens: batches x batch_size x seq_len",
    "always_save_checkpoint": "checkpoint_every; one is always saved at the end",
    "save_steps": "checkpoint_every",
    "save_total_limit": "keep_last",
    "wandb_log": "wandb",
    "skip_spikes": "grad_clip, which handles spikes",
}


class Config(RunConfig, SpeedConfig, OptimizationConfig, DataConfig, ModelConfig):
    """All options of a training run. Bad values raise pydantic's ValidationError, and `load_config`
    refuses options that exclude each other.
    """

    def mistakes(self, given: Collection[str], world_size: int) -> Iterator[tuple[str, str]]:
        """Yield wrong names and options that exclude each other, as `Options.mistakes` says."""
        yield from self._wrong_names("run_name" in given)
        # With `resume`, all other options are the checkpoint's: run/start.py merges the
        # two and validates the result.
        if self.resume is None:
            yield from self._contradictions()
            yield from self._indivisible_batch(world_size)

    def _wrong_names(self, run_name_is_given: bool) -> Iterator[tuple[str, str]]:
        """Yield mistakes in the run's name: the option to blame, and a message."""
        name, resume = str(self.run_name), self.resume
        if Path(name).name != name or name == ".." or not name.isprintable():
            yield (
                "run_name",
                f"run_name {name!r} is not a plain folder name; set log_dir to the folder above it",
            )
        if resume and resume != "auto" and run_name_is_given:
            places = f"{os.path.abspath(resume)}/{os.path.realpath(resume)}/"
            # A run that was moved aside, <run_name>.1, may have its old name in its config.yaml.
            if not re.search(rf"/{re.escape(name)}(\.\d+)?/", places):
                yield (
                    "run_name",
                    f"run_name {name} does not match resume {resume}; leave run_name "
                    f"out, or start a new run: --init_from {shlex.quote(resume)} in place of "
                    "--resume",
                )

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield options that exclude each other: the one to blame, and a message."""
        if self.n_embd % self.n_head:
            yield (
                "n_head",
                f"n_embd {self.n_embd} does not divide into {self.n_head} heads; n_head must "
                "divide n_embd",
            )
        elif self.rope and self.n_embd // self.n_head % 2:
            yield "rope", f"rope needs heads of an even size, not {self.n_embd // self.n_head}"
        if self.seq_len > self.block_size:
            yield (
                "seq_len",
                f"seq_len {self.seq_len} is longer than block_size {self.block_size}; lower "
                "seq_len, or, without trained weights, raise block_size",
            )
        if self.n_vocab > self.vocab_size:
            yield (
                "real_vocab_size",
                f"real_vocab_size {self.n_vocab} is more than vocab_size {self.vocab_size}; it may "
                "be at most vocab_size",
            )
        if self.tf32 and self.matmul_precision != "highest":
            yield "tf32", "tf32 is short for matmul_precision high; leave one of the two out"
        if self.bf16 and self.fp16:
            yield "fp16", "bf16 and fp16 exclude each other; choose one"
        if self.final_lr() > self.lr:
            yield "min_lr", f"min_lr {self.min_lr:g} is above lr {self.lr:g}; it may be at most lr"
        for name, why in EXCLUDED_BY.get(self.optimizer, {}).items():
            if getattr(self, name):
                yield "optimizer", f"{self.optimizer} excludes {name}: {why}"

    def _indivisible_batch(self, world_size: int) -> Iterator[tuple[str, str]]:
        """Yield a total_batch_tokens that no number of micro-steps makes up, and a message."""
        micro_step = self.batch_size * self.seq_len * world_size
        total = self.tokens_per_step(world_size)
        if rest := total % micro_step:
            below = total - rest
            nearest = " or ".join(f"{n:,}" for n in (below, below + micro_step) if n)
            yield (
                "total_batch_tokens",
                f"total_batch_tokens {total:,} is not a multiple of the {micro_step:,} tokens of "
                f"one micro-step (batch_size {self.batch_size} x seq_len {self.seq_len} x "
                f"{world_size} ranks); nearest that work: {nearest}",
            )

    def on_device(self, kind: str, world_size: int) -> Self:
        """Return the config as it acts on this kind of device: with its defaults for None, and a
        safe mode of torch.compile.

        CUDA graphs would overwrite accumulated gradients, and need weights that stay in place. With
        several ranks or chunks of the loss they may be wrong:
        github.com/pytorch/pytorch/issues/140395. Before PyTorch 2.12 the matmuls of max-autotune
        count the elements of a matrix in 32 bits: github.com/pytorch/pytorch/issues/189054.
        """
        mode: str = self.compile_mode
        is_cuda, cheap = kind == "cuda", self.recompute_cheap
        if cheap is None:
            cheap = kind == "cpu"
        alone = world_size == self.loss_chunks == self.accumulation_steps(world_size) == 1
        if is_cuda and not alone:
            mode = WITHOUT_GRAPHS.get(mode, mode)
        logits = self.batch_size * self.seq_len * self.vocab_size // self.loss_chunks
        if is_cuda and logits >= 2**31 and "max-autotune" in mode:
            major, minor, *_ = version("torch").split(".")
            if (int(major), int(minor)) < (2, 12):
                mode = "default"
        return self.with_options(recompute_cheap=cheap, compile_mode=mode)

    @property
    def has_graphs(self) -> bool:
        """True if torch.compile records CUDA graphs, unless `on_device` turns them off."""
        return self.compile and self.compile_mode in WITHOUT_GRAPHS

    def fp32_precision(self) -> str:
        """Return the precision of fp32 matmuls, as PyTorch names it; `tf32` is short for `high`."""
        return "high" if self.tf32 else self.matmul_precision

    @property
    def matmul_dtype(self) -> str:
        """Name of the dtype of matmuls, as in torch."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    @classmethod
    def other_names(cls) -> dict[str, str]:
        """Return OTHER_NAMES, for messages about unknown options."""
        return OTHER_NAMES

    def must_match(self) -> dict[str, Any]:
        """Return the options that must be the same on all ranks; folders may differ."""
        return self.model_dump(mode="json", exclude={"data_dir", "hellaswag_file", "log_dir"})

    def accumulation_steps(self, world_size: int) -> int:
        """Return the micro-steps per step that make up `total_batch_tokens`."""
        return self.tokens_per_step(world_size) // (self.batch_size * self.seq_len * world_size)

    def tokens_per_step(self, world_size: int) -> int:
        """Return the tokens of a step on `world_size` ranks."""
        return self.total_batch_tokens or self.batch_size * self.seq_len * world_size

    def trackers(self) -> list[str]:
        """List the trackers of the run."""
        return [name for name in ("tensorboard", "wandb") if getattr(self, name)]

    @property
    def last_step(self) -> int | None:
        """The number of the last step; None if the clock ends the run."""
        return None if self.max_minutes else self.max_steps

    def progress(self, step: int, seconds: float) -> float:
        """Return the completed share of the run after `step` steps and `seconds`."""
        return seconds / (60 * self.max_minutes) if self.max_minutes else step / self.max_steps

    def is_over(self, step: int, seconds: float) -> bool:
        """Return True if this step, `seconds` after the run's start, is the last one."""
        return self.progress(step, seconds) >= 1

    def final_lr(self) -> float:
        """Return the learning rate that a decaying schedule ends at (`min_lr`, or lr / 10)."""
        return self.lr / 10 if self.min_lr is None else self.min_lr

    def lacks(self, name: str) -> str | None:
        """Return the option whose value makes this one ineffective; None if it has an effect."""
        for needs in self.marks(name, Needs):
            value = getattr(self, needs.name)
            if value not in needs.values if needs.values else not value:
                return needs.name
        return None

    def off_value(self, name: str) -> Any:
        """Return the value with which an optimization is off."""
        return self.n_vocab if name == "vocab_size" else type(self).model_fields[name].default

    def optimizations_on(self) -> list[str]:
        """List the optimizations that are on and have an effect."""
        return [
            name
            for name in self.names_marked(Optimization)
            if getattr(self, name) not in (self.off_value(name), False) and not self.lacks(name)
        ]

    def describe_optimizations(self, world_size: int) -> str:
        """Return a line on the optimizations that are on, with their values, and on the published
        ladders' optimizations that are off.
        """
        are_on, on, off = self.optimizations_on(), [], []
        for name in self.names_marked(Optimization):
            value, (mark,) = getattr(self, name), self.marks(name, Optimization)
            label = mark.label or name
            if name in are_on:
                on.append(label if value is True else f"{label} {show(value)}")
            elif mark.listed:
                off.append(label)
        of_ranks = on if world_size > 1 else off
        of_ranks.append("several ranks")
        return f"optimizations on: {', '.join(on) or 'none'}; off: {', '.join(off) or 'none'}"

    def notes(self) -> list[str]:
        """Return a line for each option with no effect or a surprising one."""
        notes = []
        if self.warmup_steps > self.max_steps and not self.max_minutes:
            reached = self.lr * self.max_steps / self.warmup_steps
            notes.append(
                f"warmup_steps {self.warmup_steps} > max_steps {self.max_steps}: the learning rate "
                f"only warms up, to {reached:g}"
            )
        for name, value in self.model_dump(exclude_defaults=True).items():
            stays_off = not value and not type(self).model_fields[name].default
            if not stays_off and (lacking := self.lacks(name)):
                notes.append(f"{name} has no effect: {lacking} is {show(getattr(self, lacking))}")
        return notes + self.weight_notes()

    def weight_notes(self) -> list[str]:
        """Return notes on untrained embedding rows: positions from seq_len on, and padding.

        With init_from, these positions may have been trained before.
        """
        fresh = self.init_from == "scratch"
        if fresh and not self.rope and self.seq_len < self.block_size:
            return [
                f"positions {self.seq_len} to {self.block_size - 1} are never trained (seq_len "
                f"{self.seq_len} < block_size {self.block_size})"
            ]
        if not fresh and self.real_vocab_size == GPT2_TOKENS < self.vocab_size:
            return [
                f"{self.init_from}: rows above GPT-2's {GPT2_TOKENS} tokens are taken for padding"
            ]
        return []

    def advice(self) -> dict[str, str]:
        """Return a message for each kind of failure of `runtime.errors.kind_of_failure`."""
        return {
            "compiler": "--compile failed: {reason}; or run without --compile",
            "lost rank": f"another rank has died, or did not answer within --timeout "
            f"{self.timeout} s ({{reason}}); see its own message, if it left one",
            "memory": f"out of memory at batch_size {self.batch_size}, seq_len {self.seq_len}. "
            f"These lower it: a smaller --batch_size (--total_batch_tokens keeps the step as "
            f"large), --bf16, --flash, --compile, --loss_chunks 8, --recompute_cheap, "
            f"--recompute, a smaller --seq_len or model",
        }

    def to_yaml(self) -> str:
        """Return all options as a YAML file, with which `--config` repeats the run."""
        return (
            "# All options of one run. Repeat it with: python train.py --config <this file>\n\n"
            + to_yaml(self.with_options(resume=None))  # repeating does not resume
        )


def load_config(config: str | None = None, **values: Any) -> Config:
    """Load a training run's `Config` from a YAML file (a path, or a name in configs/), overridden
    by values.

    Raises ConfigError.
    """
    return load(Config, values, config)


# ---- how long steps take

# Assumed share of a large matmul's rate in training, and the range of the measured runs in
# logs/results/*/speedup/report.md.
MFU, LEAST_MFU, MOST_MFU = 0.5, 0.09, 0.82
