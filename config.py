"""Every option of a run, declared once: the command-line flags, the YAML keys and `--help` all come
from the classes below.

Nothing here imports torch, so `--help` and mistakes answer at once.
"""

import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from runtime.cli import ContradictionError, Name, Options, load, to_yaml

GPT2_TOKENS = 50257  # size of GPT-2's byte-pair vocabulary: 256 bytes, 50,000 merges, <|endoftext|>

# Bounds far beyond any run: a number outside them is a slip of the hand, and would overflow
# somewhere or never come to an end.
Size = Annotated[int, Field(ge=1, le=10**15)]  # tokens, sequences, units of a layer
Count = Annotated[int, Field(ge=1, le=10**9)]  # steps, seconds
ZeroIsOff = Annotated[int, Field(ge=0, le=10**9)]
Beta = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, le=1e30)]


class ModelConfig(Options):
    """model"""

    n_layer: int = Field(12, ge=1, le=10_000)
    """transformer blocks"""
    n_head: Size = 12
    """attention heads per block"""
    n_embd: Size = 768
    """width of the residual stream"""
    block_size: Size = 1024
    """longest context, in tokens: the number of learned positions"""
    vocab_size: Size = 50257
    """rows of the embedding and of the output head; 50304 pads GPT-2's 50257 to a multiple of 128,
    which is faster
    """
    real_vocab_size: Size | None = None
    """tokens that exist; the rows above are padding and take no part in loss or sampling (none:
    vocab_size, at most 50257)
    """
    bias: bool = True
    """biases in linear layers and norms"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """dropout probability"""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """normalization before attention, MLP and output head"""
    activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh"
    """the MLP's activation; GPT-2 has the tanh approximation"""
    tie_weights: bool = False
    """share one matrix between the token embedding and the output head"""
    init: Literal["torch", "gpt2"] = "torch"
    """initial weights: PyTorch's defaults, or GPT-2's N(0, 0.02)"""
    residual_scaling: bool = False
    """divide the initial std of the residual projections by sqrt(2 n_layer)"""
    init_from: Name = "scratch"
    """scratch, a run's folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl, a Hugging Face folder, or a
    .pt file of nanoGPT
    """


class DataConfig(Options):
    """data"""

    dataset: Name = "pydocs"
    """corpus: a folder of token files below data_dir; pydocs and shakespeare are prepared when
    first asked for
    """
    data_dir: Name = "data"
    """folder that holds the corpora"""
    batch_size: Size = 4
    """sequences per process and micro-step"""
    seq_len: Size = 1024
    """tokens per sequence"""
    total_batch_tokens: Size | None = None
    """tokens per step over all processes, reached by gradient accumulation (none: one micro-step)
    """
    shuffle: bool = False
    """every epoch in a fresh seeded order, without replacement (off: in the order of the text)"""
    overfit_batch: bool = False
    """repeat the first step's batch for ever"""
    val_fraction: float = Field(0.0, ge=0, lt=1)
    """share of the tokens, off the tail, kept for validation (0: the *_val_* token files, if there
    are any)
    """


class OptimizationConfig(Options):
    """optimization"""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices inside the blocks with adamw for the rest"""
    lr: float = Field(3e-4, gt=0, le=1e30)
    """learning rate (its peak, with a schedule)"""
    min_lr: NotNegative | None = None
    """learning rate that a decaying schedule goes down to (none: lr / 10)"""
    warmup_steps: ZeroIsOff = 0
    """steps of linear warm-up; the last of them has the peak rate"""
    lr_schedule: Literal["constant", "cosine", "wsd"] = "constant"
    """after the warm-up: constant, cosine decay, or wsd (warmup-stable-decay: constant, then linear
    decay)
    """
    wsd_decay_fraction: float = Field(0.2, gt=0, le=1)
    """share of max_steps over which wsd decays"""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment"""
    eps: float = Field(1e-8, gt=0, le=1)
    """AdamW's epsilon"""
    weight_decay: NotNegative = 0.01
    """decoupled weight decay"""
    muon_lr: float = Field(0.02, gt=0, le=1e30)
    """Muon's learning rate; warm-up and schedule are those of lr"""
    muon_weight_decay: NotNegative = 0.01
    """Muon's decoupled weight decay"""
    decay_matrices_only: bool = False
    """decay matrices and embeddings only, not biases and norms"""
    grad_clip: NotNegative = 0.0
    """clip the global gradient norm to this (0: off; the norm is logged all the same)"""
    max_steps: Count = 50
    """optimizer steps"""
    skip_nonfinite: ZeroIsOff = 0
    """leave out up to this many steps whose loss or gradient norm is not finite (0: stop at the
    first)
    """


class SpeedConfig(Options):
    """speed (all off by default; each is one rung of the ladder)"""

    tf32: bool = False
    """TF32 matrix products (CUDA, Ampere or newer)"""
    bf16: bool = False
    """bfloat16 autocast; weights stay fp32"""
    fp16: bool = False
    """float16 autocast with loss scaling, for GPUs without bfloat16"""
    compile: bool = False
    """torch.compile the model"""
    compile_mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = "default"
    """mode of torch.compile"""
    flash: bool = False
    """fused scaled_dot_product_attention in place of the T x T matrix"""
    fused_adamw: bool = False
    """one kernel for the whole AdamW update"""
    fsdp: bool = False
    """shard weights, gradients and optimizer state over the processes (FSDP2) rather than keep all
    of them in each
    """
    recompute: bool = False
    """compute each block's activations again in the backward pass instead of keeping them: less
    memory, more arithmetic
    """
    recompute_cheap: bool | None = None
    """compiled, compute norms, GELU, casts and residual sums again instead of keeping them (none:
    on a CPU, where it is free)
    """
    loss_chunks: Count = 1
    """compute the loss in this many parts, so that the logits of all tokens never exist at once; 8
    saves most of their memory
    """


class RunConfig(Options):
    """run"""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """auto: cuda, else mps, else cpu"""
    seed: int = Field(1337, ge=0, lt=2**63)
    """seed of the weights, the order of the data, and dropout"""
    run_name: str | None = None
    """the run's folder below log_dir (none: the config file's stem, else train)"""
    log_dir: Name = "logs"
    """folder that holds the runs"""
    log_every: Count = 1
    """steps per line of the log"""
    eval_every: ZeroIsOff = 0
    """steps per evaluation of the validation loss, also before the first and after the last step
    (0: never)
    """
    eval_tokens: Size | None = None
    """tokens that the validation loss is the mean of, always the same ones (none: the whole
    validation split)
    """
    hellaswag_every: ZeroIsOff = 0
    """steps per score in HellaSwag, also before the first and after the last step (0: never)"""
    hellaswag_file: Name | None = None
    """items of HellaSwag's form (none: data_dir/hellaswag/hellaswag_val.jsonl, which
    data/hellaswag.py downloads)
    """
    sample_every: ZeroIsOff = 0
    """steps per generated sample, also after the last step (0: never)"""
    sample_prompt: str = "The"
    """prompt of the samples in training"""
    sample_tokens: int = Field(64, ge=1, le=1_000_000)
    """tokens generated per sample"""
    checkpoint_every: ZeroIsOff = 0
    """steps per checkpoint; one is always saved at the end (0: only there)"""
    keep_last: ZeroIsOff = 3
    """checkpoints to keep, the newest ones; the best by validation loss is kept too (0: save none
    at all)
    """
    tensorboard: bool = False
    """write what is logged for TensorBoard too, into the run's folder (pip install -r
    requirements-track.txt)
    """
    wandb: bool = False
    """send what is logged to Weights & Biases too; without an account it is kept offline (pip
    install -r requirements-track.txt)
    """
    resume: str | None = None
    """auto: go on from the run's newest whole checkpoint, or begin where there is none; or a run's
    folder, or a checkpoint
    """
    estimate: bool = False
    """say what the run would take (tokens, hours, disk), and end"""
    timeout: Count = 600
    """seconds after which a process gives up waiting for another one"""


class Config(RunConfig, SpeedConfig, OptimizationConfig, DataConfig, ModelConfig):
    """All options of a training run. Invalid or contradictory values raise pydantic's
    ValidationError.
    """

    @model_validator(mode="before")
    @classmethod
    def _name_the_run(cls, values: Any, info: ValidationInfo) -> Any:
        if isinstance(values, dict) and values.get("run_name") is None:
            return values | {"run_name": (info.context or {}).get("config") or "train"}
        return values

    @model_validator(mode="after")
    def _check_combinations(self, info: ValidationInfo) -> Self:
        problems = []
        if self.run_name is not None and (
            Path(self.run_name).name != self.run_name or self.run_name == ".."
        ):
            problems.append(
                (
                    "run_name",
                    f"run_name {self.run_name!r} is not a plain folder name; "
                    f"use log_dir for the folder it lies in",
                )
            )
        if self.estimate and self.resume is not None:
            problems.append(
                (
                    "estimate",
                    "estimate and resume exclude each other: an estimate is of a whole run",
                )
            )
        # a run moved aside, <run_name>.1, has its old name in its config.yaml
        if (
            self.resume not in (None, "auto")
            and "run_name" in (info.context or {}).get("given", ())
            and not any(
                re.fullmatch(rf"{re.escape(str(self.run_name))}(\.\d+)?", name)
                for name in _names_of_run(str(self.resume))
            )
        ):
            problems.append(
                (
                    "run_name",
                    f"run_name {self.run_name} is not the run that resume {self.resume} goes on "
                    f"with; leave "
                    f"run_name out, or begin a new run of that name: --init_from "
                    f"{shlex.quote(str(self.resume))} in place "
                    f"of --resume",
                )
            )
        # with `resume`, what is not given here is the checkpoint's: checkpoint.py merges the two
        # and has them judged then
        if self.resume is None:
            problems += self._contradictions((info.context or {}).get("world_size", 1))
        if problems:
            raise ContradictionError(problems)
        return self

    def _contradictions(self, world_size: int) -> list[tuple[str, str]]:
        """Options that exclude each other: pairs of (option to blame, message)."""
        problems = []
        if self.n_embd % self.n_head:
            problems.append(
                (
                    "n_head",
                    f"n_embd {self.n_embd} does not divide into {self.n_head} heads; "
                    f"n_head must divide n_embd",
                )
            )
        if self.seq_len > self.block_size:
            problems.append(
                (
                    "seq_len",
                    f"seq_len {self.seq_len} is longer than block_size {self.block_size}; "
                    f"lower seq_len or raise block_size",
                )
            )
        if self.real_vocab_size is not None and self.real_vocab_size > self.vocab_size:
            problems.append(
                (
                    "real_vocab_size",
                    f"real_vocab_size {self.real_vocab_size} is more than "
                    f"vocab_size {self.vocab_size}; it may be at most vocab_size",
                )
            )
        if self.bf16 and self.fp16:
            problems.append(("fp16", "bf16 and fp16 exclude each other; choose one"))
        if self.min_lr is not None and self.min_lr > self.lr:
            problems.append(
                ("min_lr", f"min_lr {self.min_lr:g} is above lr {self.lr:g}; it may be at most lr")
            )
        for name in ("sample_every", "hellaswag_every"):
            if getattr(self, name) and self.n_vocab != GPT2_TOKENS:
                problems.append(
                    (
                        name,
                        f"{name} {getattr(self, name)} needs GPT-2's vocabulary: set vocab_size "
                        f"to at least "
                        f"{GPT2_TOKENS}, or {name} to 0",
                    )
                )
        if self.fp16 and self.optimizer == "muon":
            problems.append(
                (
                    "fp16",
                    "fp16 and optimizer muon exclude each other: at an overflow only one of its "
                    "two optimizers "
                    "would skip the step; use bf16",
                )
            )
        if self.fsdp and self.optimizer == "muon":
            problems.append(
                (
                    "fsdp",
                    "fsdp and optimizer muon exclude each other: Muon's matrices have to be "
                    "whole; use adamw, or "
                    "several processes without fsdp",
                )
            )
        if self.fsdp and self.compile and self.compile_mode in ("reduce-overhead", "max-autotune"):
            problems.append(
                (
                    "fsdp",
                    f"fsdp and compile_mode {self.compile_mode} exclude each other: its CUDA "
                    f"graphs need weights "
                    "that stay where they are; use default or max-autotune-no-cudagraphs",
                )
            )
        try:
            self.accumulation_steps(world_size)
        except ContradictionError as error:
            problems += error.problems
        return problems

    @property
    def n_vocab(self) -> int:
        """Tokens that exist, as the model counts them (GPTConfig)."""
        return self.real_vocab_size or min(self.vocab_size, GPT2_TOKENS)

    def alike(self) -> dict[str, Any]:
        """The options that all processes of a run need to have alike: folders may have other places
        on another machine.
        """
        return self.model_dump(mode="json", exclude={"data_dir", "hellaswag_file", "log_dir"})

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-steps per step that make up `total_batch_tokens` over `world_size` processes.

        Raises ContradictionError, naming the nearest totals that work, if it is not a multiple of a
        micro-step's tokens.
        """
        tokens = self.batch_size * self.seq_len * world_size
        total = self.total_batch_tokens or tokens
        steps, rest = divmod(total, tokens)
        if rest:
            nearest = " or ".join(f"{n * tokens:,}" for n in (steps, steps + 1) if n)
            raise ContradictionError(
                [
                    (
                        "total_batch_tokens",
                        (
                            f"total_batch_tokens {total:,} is not a multiple of the {tokens:,} "
                            f"tokens of one micro-step (batch_size "
                            f"{self.batch_size} x seq_len {self.seq_len} x {world_size} "
                            f"processes); nearest that work: {nearest}"
                        ),
                    )
                ]
            )
        return steps

    def tokens_per_step(self, world_size: int) -> int:
        """Tokens of a step over `world_size` processes."""
        return self.total_batch_tokens or self.batch_size * self.seq_len * world_size

    def trackers(self) -> list[str]:
        """The packages that follow the run."""
        return [name for name in ("tensorboard", "wandb") if getattr(self, name)]

    def final_lr(self) -> float:
        """Learning rate that a decaying schedule goes down to: `min_lr`, or a tenth of `lr` where
        that is not set.
        """
        return self.lr / 10 if self.min_lr is None else self.min_lr

    def optimizations(self, world_size: int) -> tuple[list[str], list[str]]:
        """The optimizations of the ladder that are on, and those that are off, in words."""
        switches = [
            *self._switches(),
            (world_size > 1, f"{world_size} processes", "several processes", []),
        ]
        return [on for is_on, on, _, _ in switches if is_on and on], [
            off for is_on, on, off, _ in switches if on and not is_on
        ]

    def describe_optimizations(self, world_size: int) -> str:
        """Return a line on which optimizations are on and which are off."""
        on, off = (", ".join(names) or "none" for names in self.optimizations(world_size))
        return f"optimizations on: {on}; off: {off}"

    def switched_off(self) -> dict[str, list[str]]:
        """For each optimization that is on, in words, the flags that switch it off and nothing
        else.
        """
        return {off: flags for is_on, _, off, flags in self._switches() if is_on}

    def _switches(self) -> list[tuple[object, str, str, list[str]]]:
        """For each optimization: whether it is on, how it is called on ("": it is not told) and
        off, the flags that switch it off.
        """
        searched = self.compile and self.compile_mode != "default"
        return [
            (self.tie_weights, "", "tie_weights", ["--no-tie_weights"]),
            (self.tf32, "tf32", "tf32", ["--no-tf32"]),
            (self.bf16, "bf16", "bf16", ["--no-bf16"]),
            (self.fp16, "fp16", "fp16", ["--no-fp16"]),
            (
                self.compile,
                f"compile ({self.compile_mode})",
                "compile",
                ["--no-compile", "--compile_mode", "default"],
            ),
            (searched, "", f"compile_mode {self.compile_mode}", ["--compile_mode", "default"]),
            (self.flash, "flash", "flash", ["--no-flash"]),
            (
                self.vocab_size > self.n_vocab,
                f"vocabulary padded to {self.vocab_size}",
                "padded vocabulary",
                ["--vocab_size", str(self.n_vocab)],
            ),
            (self.fused_adamw, "fused_adamw", "fused_adamw", ["--no-fused_adamw"]),
            (self.fsdp, "fsdp", "fsdp", ["--no-fsdp"]),
            (self.recompute, "recompute", "recompute", ["--no-recompute"]),
            (
                self.loss_chunks > 1,
                f"loss_chunks {self.loss_chunks}",
                "loss_chunks",
                ["--loss_chunks", "1"],
            ),
            (self.grad_clip, f"grad_clip {self.grad_clip:g}", "grad_clip", ["--grad_clip", "0"]),
            (
                self.lr_schedule != "constant",
                f"lr_schedule {self.lr_schedule}",
                "lr_schedule",
                ["--lr_schedule", "constant"],
            ),
            (
                self.warmup_steps,
                f"warmup_steps {self.warmup_steps}",
                "warmup_steps",
                ["--warmup_steps", "0"],
            ),
            (
                self.decay_matrices_only and self.weight_decay,
                "decay_matrices_only",
                "decay_matrices_only",
                ["--no-decay_matrices_only"],
            ),
        ]

    def notes(self) -> list[str]:
        """One line for each option that is valid but has no effect, or less than one might expect,
        with the others.
        """
        notes = []
        if self.warmup_steps > self.max_steps:
            notes.append(
                f"warmup_steps {self.warmup_steps} > max_steps {self.max_steps}: the learning "
                f"rate only warms up, "
                f"to {self.lr * self.max_steps / self.warmup_steps:g}"
            )
        for name, in_use, why in (
            ("min_lr", self.lr_schedule != "constant", "lr_schedule is constant"),
            ("wsd_decay_fraction", self.lr_schedule == "wsd", f"lr_schedule is {self.lr_schedule}"),
            ("decay_matrices_only", self.weight_decay, "weight_decay is 0"),
            ("muon_lr", self.optimizer == "muon", "optimizer is adamw"),
            ("muon_weight_decay", self.optimizer == "muon", "optimizer is adamw"),
            ("recompute_cheap", self.compile, "compile is off"),
            ("checkpoint_every", self.keep_last, "keep_last is 0"),
            ("eval_tokens", self.eval_every, "eval_every is 0"),
            ("hellaswag_file", self.hellaswag_every, "hellaswag_every is 0"),
            ("sample_tokens", self.sample_every, "sample_every is 0"),
            ("sample_prompt", self.sample_every, "sample_every is 0"),
            ("init", self.init_from == "scratch", f"the weights come from {self.init_from}"),
            (
                "residual_scaling",
                self.init_from == "scratch",
                f"the weights come from {self.init_from}",
            ),
        ):
            if not in_use and getattr(self, name) != Config.model_fields[name].default:
                notes.append(f"{name} has no effect: {why}")
        if self.compile_mode != "default" and not self.compile:
            notes.append(f"compile_mode {self.compile_mode} has no effect: compile is off")
        return notes

    def advice(self) -> dict[str, str]:
        """What to say, and what may help, at each kind of failure that runtime/errors.py tells
        apart.
        """
        return {
            "compiler": "--compile failed: {reason}; run without --compile",
            "C++": "--compile failed: {reason}, or run without --compile",
            "overflow": f"a number is too large for fp32: {{reason}}; lower lr (now {self.lr:g}), weight_decay or betas",
            "other process": f"another process died or did not answer within {self.timeout} s ({{reason}})",
            "memory": f"out of memory at batch_size {self.batch_size}, seq_len {self.seq_len}. These lower it: a smaller "
            f"--batch_size (--total_batch_tokens keeps the step as large), --bf16, --flash, "
            f"--compile, "
            f"--loss_chunks 8, --recompute_cheap, --recompute, a smaller --seq_len or model",
        }

    def to_yaml(self) -> str:
        """All options as a YAML file that `--config` takes and that repeats the run."""
        changed: dict[str, Any] = {"resume": None}  # repeating a run is not going on with it
        if self.lr_schedule != "constant":
            changed["min_lr"] = self.final_lr()
        return (
            "# All options of one run. Repeat it with: python train.py --config <this file>\n\n"
            + to_yaml(self, changed)
        )


def _names_of_run(resume: str) -> set[str]:
    """What the run may be called that `resume` means: a run's folder, its checkpoints/ or one of
    these, or a link to one.
    """
    path = Path(os.path.abspath(resume.replace("\0", "")))  # no file has a NUL in its name
    paths = [
        path,
        *(folder.parent for folder in (path, path.parent) if folder.name == "checkpoints"),
    ]
    return {
        name for path in paths for name in (path.name, os.path.basename(os.path.realpath(path)))
    }


def load_config(config: str | None = None, **values: Any) -> Config:
    """A training run's `Config` from a YAML file (a path, or a name in configs/) and values that
    override it.

    Raises ConfigError.
    """
    return load(Config, values, config)
