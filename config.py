"""Every option of a run, declared once: the command-line flags, the YAML keys and `--help` all come from the classes below.

`parse_command_line` merges defaults < YAML file (and the files it names as its `base:`) < flags, and validates the
result once. A mistake is a `ConfigError` with one line for each problem; on the command line these lines are printed
and the exit status is 2. Nothing here imports torch, so `--help` and mistakes answer at once.
"""

import argparse
import contextlib
import difflib
import io
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

CONFIG_DIR = Path(__file__).resolve().parent / "configs"
GPT2_TOKENS = 50257  # size of GPT-2's byte-pair vocabulary: 256 bytes, 50,000 merges, <|endoftext|>

Positive = Annotated[int, Field(ge=1)]
ZeroIsOff = Annotated[int, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class UserError(Exception):
    """Something the user can put right. Commands print each line of the message and exit with status 2."""


class ConfigError(UserError):
    """Mistakes in the options, one line each."""


class ContradictionError(ValueError):
    """Options that exclude each other: pairs of (option to blame, message)."""

    def __init__(self, problems: list[tuple[str, str]]):
        super().__init__("; ".join(message for _, message in problems))
        self.problems = problems


class Options(BaseModel):
    """Base of every section of options. A field's docstring is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )


class ModelConfig(Options):
    """model"""

    n_layer: Positive = 12
    """transformer blocks"""
    n_head: Positive = 12
    """attention heads per block"""
    n_embd: Positive = 768
    """width of the residual stream"""
    block_size: Positive = 1024
    """longest context, in tokens: the number of learned positions"""
    vocab_size: Positive = 50257
    """rows of the embedding and of the output head; 50304 pads GPT-2's 50257 to a multiple of 128, which is faster"""
    real_vocab_size: Positive | None = None
    """tokens that exist; the rows above are padding and take no part in loss or sampling (none: vocab_size, at most 50257)"""
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
    init_from: str = "scratch"
    """scratch, a run's folder, gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a Hugging Face model folder"""


class DataConfig(Options):
    """data"""

    dataset: str = "pydocs"
    """corpus: a folder of token files below data_dir; pydocs and shakespeare are prepared when first asked for"""
    data_dir: str = "data"
    """folder that holds the corpora"""
    batch_size: Positive = 4
    """sequences per process and micro-step"""
    seq_len: Positive = 1024
    """tokens per sequence"""
    total_batch_tokens: Positive | None = None
    """tokens per step over all processes, reached by gradient accumulation (none: one micro-step)"""
    shuffle: bool = False
    """every epoch in a fresh seeded order, without replacement (off: in the order of the text)"""
    overfit_batch: bool = False
    """repeat the first step's batch for ever"""
    val_fraction: float = Field(0.0, ge=0, lt=1)
    """share of the tokens, off the tail, kept for validation (0: the *_val_* token files, if there are any)"""


class OptimizationConfig(Options):
    """optimization"""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices inside the blocks with adamw for the rest"""
    lr: float = Field(3e-4, gt=0)
    """learning rate (its peak, with a schedule)"""
    min_lr: float | None = Field(None, ge=0)
    """learning rate that a decaying schedule goes down to (none: lr / 10)"""
    warmup_steps: ZeroIsOff = 0
    """steps of linear warm-up; the last of them has the peak rate"""
    lr_schedule: Literal["constant", "cosine", "wsd"] = "constant"
    """after the warm-up: constant, cosine decay, or wsd (warmup-stable-decay: constant, then linear decay)"""
    wsd_decay_fraction: float = Field(0.2, gt=0, le=1)
    """share of max_steps over which wsd decays"""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment"""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon"""
    weight_decay: float = Field(0.01, ge=0)
    """decoupled weight decay"""
    decay_matrices_only: bool = False
    """decay matrices and embeddings only, not biases and norms"""
    grad_clip: float = Field(0.0, ge=0)
    """clip the global gradient norm to this (0: off; the norm is logged all the same)"""
    max_steps: Positive = 50
    """optimizer steps"""
    skip_nonfinite: ZeroIsOff = 0
    """leave out up to this many steps whose loss or gradient norm is not finite (0: stop at the first)"""


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
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """mode of torch.compile"""
    flash: bool = False
    """fused scaled_dot_product_attention in place of the T x T matrix"""
    fused_adamw: bool = False
    """one kernel for the whole AdamW update"""


class RunConfig(Options):
    """run"""

    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """auto: cuda, else mps, else cpu"""
    seed: int = Field(1337, ge=0, lt=2**63)
    """seed of the weights, the order of the data, and dropout"""
    run_name: str | None = None
    """the run's folder below log_dir (none: the config file's stem, else train)"""
    log_dir: str = "logs"
    """folder that holds the runs"""
    log_every: Positive = 1
    """steps per line of the log"""
    eval_every: ZeroIsOff = 0
    """steps per evaluation of the validation loss, also before the first and after the last step (0: never)"""
    eval_tokens: Positive | None = None
    """tokens the validation loss is taken over, always the same (none: the whole validation split)"""
    sample_every: ZeroIsOff = 0
    """steps per generated sample, also after the last step (0: never)"""
    sample_prompt: str = "The"
    """prompt of these samples"""
    sample_tokens: Positive = 64
    """tokens generated per sample"""
    checkpoint_every: ZeroIsOff = 0
    """steps per checkpoint; one is always saved at the end (0: only there)"""
    keep_last: ZeroIsOff = 3
    """checkpoints to keep, the newest ones; the best by validation loss stays besides (0: save none at all)"""
    resume: str | None = None
    """auto: go on from the run's newest whole checkpoint, or begin where there is none; or a run's folder, or a checkpoint"""
    timeout: Positive = 600
    """seconds after which a process that waits for another one in vain gives up"""


class Config(RunConfig, SpeedConfig, OptimizationConfig, DataConfig, ModelConfig):
    """All options of a training run. Invalid or contradictory values raise pydantic's ValidationError."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        problems = []
        if self.n_embd % self.n_head:
            problems.append(("n_head", f"n_embd {self.n_embd} does not divide into {self.n_head} heads; "
                             f"n_head must divide n_embd"))
        if self.seq_len > self.block_size:
            problems.append(("seq_len", f"seq_len {self.seq_len} is longer than block_size {self.block_size}; "
                             f"lower seq_len or raise block_size"))
        if self.real_vocab_size is not None and self.real_vocab_size > self.vocab_size:
            problems.append(("real_vocab_size", f"real_vocab_size {self.real_vocab_size} is more than "
                             f"vocab_size {self.vocab_size}; it may be at most vocab_size"))
        if self.bf16 and self.fp16:
            problems.append(("fp16", "bf16 and fp16 exclude each other; choose one"))
        if self.min_lr is not None and self.min_lr > self.lr:
            problems.append(("min_lr", f"min_lr {self.min_lr:g} is above lr {self.lr:g}; it may be at most lr"))
        if self.run_name is not None and (Path(self.run_name).name != self.run_name or self.run_name == ".."):
            problems.append(("run_name", f"run_name {self.run_name!r} is not a plain folder name; "
                             f"use log_dir for the folder it lies in"))
        if self.sample_every and (self.real_vocab_size or min(self.vocab_size, GPT2_TOKENS)) != GPT2_TOKENS:
            problems.append(("sample_every", f"sample_every {self.sample_every} needs GPT-2's vocabulary: set vocab_size to at "
                             f"least {GPT2_TOKENS}, or sample_every to 0"))
        if self.fp16 and self.optimizer == "muon":
            problems.append(("fp16", "fp16 and optimizer muon exclude each other: at an overflow only one of its two optimizers "
                             "would skip the step; use bf16"))
        world_size = os.environ.get("WORLD_SIZE", "1")
        try:
            self.accumulation_steps(int(world_size) if world_size.isdigit() else 1)
        except ValueError as error:
            problems.append(("total_batch_tokens", str(error)))
        if problems:
            raise ContradictionError(problems)
        return self

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-steps per step that make up `total_batch_tokens` over `world_size` processes.

        Raises ValueError, naming the nearest totals that work, if it is not a multiple of a micro-step's tokens.
        """
        tokens = self.batch_size * self.seq_len * world_size
        total = self.total_batch_tokens or tokens
        steps, rest = divmod(total, tokens)
        if rest:
            nearest = " or ".join(f"{n * tokens:,}" for n in (steps, steps + 1) if n)
            raise ValueError(f"total_batch_tokens {total:,} is not a multiple of the {tokens:,} tokens of one micro-step "
                             f"(batch_size {self.batch_size} x seq_len {self.seq_len} x {world_size} processes); "
                             f"nearest that work: {nearest}")
        return steps

    def final_lr(self) -> float:
        """Learning rate of the last step of a decaying schedule: `min_lr`, or a tenth of `lr` where that is not set."""
        return self.lr / 10 if self.min_lr is None else self.min_lr

    def notes(self) -> list[str]:
        """One line for each option that is valid but has no effect, or less than one might expect, with the others."""
        notes = []
        if self.warmup_steps > self.max_steps:
            notes.append(f"warmup_steps {self.warmup_steps} > max_steps {self.max_steps}: the learning rate only warms up, "
                         f"to {self.lr * self.max_steps / self.warmup_steps:g}")
        for name, in_use, why in (
            ("min_lr", self.lr_schedule != "constant", "lr_schedule is constant"),
            ("wsd_decay_fraction", self.lr_schedule == "wsd", f"lr_schedule is {self.lr_schedule}"),
            ("decay_matrices_only", self.weight_decay, "weight_decay is 0"),
            ("checkpoint_every", self.keep_last, "keep_last is 0"),
            ("eval_tokens", self.eval_every, "eval_every is 0"),
            ("sample_tokens", self.sample_every, "sample_every is 0"),
            ("sample_prompt", self.sample_every, "sample_every is 0"),
            ("init", self.init_from == "scratch", f"the weights come from {self.init_from}"),
            ("residual_scaling", self.init_from == "scratch", f"the weights come from {self.init_from}"),
        ):
            if not in_use and getattr(self, name) != Config.model_fields[name].default:
                notes.append(f"{name} has no effect: {why}")
        if self.compile_mode != "default" and not self.compile:
            notes.append(f"compile_mode {self.compile_mode} has no effect: compile is off")
        return notes

    def to_yaml(self) -> str:
        """All options as a YAML file that `--config` takes, section by section."""
        values = self.model_dump(mode="json") | {"resume": None}  # repeating a run is not going on with it
        if self.lr_schedule != "constant":
            values["min_lr"] = self.final_lr()
        parts = ["# All options of one run. Repeat it with: python train.py --config <this file>\n"]
        for section in sections(Config):
            fields = {name: values[name] for name in section.model_fields}
            parts.append(f"\n# {section.__doc__}\n" + yaml.safe_dump(fields, sort_keys=False))
        return "".join(parts)


O = TypeVar("O", bound=Options)


def sections(options: type[Options]) -> list[type[Options]]:
    """The classes that declare fields of `options`, in the order in which `--help` shows them."""
    return [c for c in reversed(options.__mro__) if Options in c.__bases__]


def parse_command_line(options: type[O], argv: Sequence[str] | None = None, *, description: str = "",
                       positional: str | None = None, config_file: bool = False) -> O:
    """Options from the command line (default: sys.argv). Prints mistakes, one line each, and exits with status 2."""
    try:
        return parse(options, sys.argv[1:] if argv is None else argv, description=description, positional=positional,
                     config_file=config_file)
    except ConfigError as error:
        exit_with(error)


def parse(options: type[O], argv: Sequence[str], *, description: str = "", positional: str | None = None,
          config_file: bool = False) -> O:
    """Options from command-line arguments: the field `positional` without a flag, and `--config FILE` if config_file.

    Raises ConfigError with one line for each mistake.
    """
    flags, mistakes = _parse_flags(options, argv, description, positional, config_file)
    try:
        values = load(options, flags, flags.pop("config", None) if config_file else None)
    except ConfigError as error:
        raise ConfigError("\n".join([*mistakes, str(error)])) from None
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return values


def exit_with(error: Exception, status: int = 2) -> NoReturn:
    """Print each line of the error on stderr and exit.

    Under torchrun, what one process finds the others mostly find too: rank 0 speaks and ends first, whereupon torchrun ends
    the others. Another rank speaks only if it alone failed.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(5)
    prefix = "error: " if rank == "0" else f"error: rank {rank}: "
    print("\n".join(prefix + line for line in str(error).splitlines()), file=sys.stderr, flush=True)
    raise SystemExit(status)


def reconfigure_output() -> None:
    """Let stdout replace what its encoding lacks: a model writes any character, a redirected stdout may be ASCII."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def load_config(config: str | None = None, **values: Any) -> Config:
    """A training run's `Config` from a YAML file (a path, or a name in configs/) and values that override it.

    Raises ConfigError.
    """
    return load(Config, values, config)


def load(options: type[O], values: Mapping[str, Any], config: str | None = None) -> O:
    """Merge `values` over the YAML file `config` and its bases, convert and validate.

    Raises ConfigError with one line for each problem: where the value came from, what is allowed, the nearest name.
    """
    merged, origin = read_yaml(find_config(config)) if config is not None else ({}, {})
    merged |= values
    origin |= {key: f"--{key}" for key in values}
    if "run_name" in options.model_fields and merged.get("run_name") in (None, "none", "null", ""):
        merged["run_name"] = Path(config).stem if config else "train"
    try:
        return options(**{key: _none_or_same(options.model_fields.get(key), value) for key, value in merged.items()})
    except ValidationError as error:
        raise ConfigError("\n".join(_error_lines(options, error, origin))) from None


# ---- YAML files


def find_config(name: str, folder: Path | None = None) -> Path:
    """The file that `--config name` or (with the naming file's `folder`) `base: name` means. Raises ConfigError."""
    for place in (folder or Path(), CONFIG_DIR):
        for path in (place / name, place / f"{name}.yaml"):
            with contextlib.suppress(OSError):  # a name too long to be a file's
                if path.is_file():
                    return path
    known = sorted(path.relative_to(CONFIG_DIR).with_suffix("").as_posix() for path in CONFIG_DIR.rglob("*.yaml"))
    hint = did_you_mean(name.removesuffix(".yaml"), known) or f"; configs/ has {', '.join(n for n in known if '/' not in n)}"
    raise ConfigError(f"{name}: no such config file, here or in configs/{hint}")


def read_yaml(path: Path, chain: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of a config file merged over its `base:` files, and the place that each value came from.

    Scalars are read as strings: the field's own type converts them. Raises ConfigError.
    """
    resolved = path.resolve()
    if resolved in chain:
        names = " -> ".join(p.name for p in (*chain[chain.index(resolved):], resolved))
        raise ConfigError(f"{path}: base: goes round in a circle: {names}")
    values = read_yaml_mapping(path)
    base = values.pop("base", None)
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base: must name one config file")
        try:
            base_path = find_config(base, path.parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: base: {error}") from None
        merged, origin = read_yaml(base_path, (*chain, resolved))
    return merged | values, origin | {key: f"{path}: {key}" for key in values}


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """What one config file says, without its `base:` merged in. Raises ConfigError."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StringLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if values is None or values == "":
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold lines of the form `option: value`, nothing else")
    return values


class _StringLoader(yaml.BaseLoader):
    """Leaves every scalar a string, and refuses what is no text and a key that stands twice."""

    def construct_scalar(self, node: yaml.ScalarNode) -> str:
        text = str(super().construct_scalar(node))
        if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
            raise yaml.constructor.ConstructorError(None, None, "an escape that is half a character", node.start_mark)
        return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", key_node.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)


# ---- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        if "expected" in message:
            message += "; a value that begins with - is written --option=VALUE"
        if "ignored explicit argument" in message:
            message = f"{message.partition(':')[0]}: takes no value"
        raise ConfigError(message)


def _parse_flags(options: type[Options], argv: Sequence[str], description: str, positional: str | None,
                 config_file: bool) -> tuple[dict[str, Any], list[str]]:
    """The options given on the command line, as strings (booleans as bool), and a line for each unknown one."""
    width = min(120, int(os.environ.get("COLUMNS", "120")) if os.environ.get("COLUMNS", "120").isdigit() else 120)
    usage = f"%(prog)s {positional or ''} {'[--config FILE]' if config_file else ''} [--option VALUE ...]"
    parser = _Parser(usage=" ".join(usage.split()), description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS,
                     formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=width))
    if config_file:
        parser.add_argument("--config", metavar="FILE", help="YAML file with options: a path, or a name in configs/")
    for section in sections(options):
        group = parser.add_argument_group(section.__doc__)
        for name, field in section.model_fields.items():
            _add_argument(group, name, field, name == positional)
    known, unknown = parser.parse_known_args(argv)
    # a value behind an unknown flag is that flag's, not a mistake of its own
    mistakes = [_unknown_argument(options, argument, config_file)
                for argument, before in zip(unknown, ["", *unknown], strict=False)
                if argument.startswith("--") or not before.startswith("--")]
    return vars(known), mistakes


def _add_argument(group: argparse._ArgumentGroup, name: str, field: FieldInfo, positional: bool) -> None:
    help_text = (field.description or "").replace("%", "%%")
    kind = _value_type(field)
    if positional:
        group.add_argument(name, help=help_text, nargs="*" if get_origin(kind) is tuple else None)
        return
    help_text += f" [{_show(field.default)}]"
    if kind is bool:
        group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=help_text)
    elif get_origin(kind) is tuple:
        if get_args(kind)[-1] is Ellipsis:  # any number, separated by commas
            group.add_argument(f"--{name}", metavar="X,Y", help=help_text)
        else:
            group.add_argument(f"--{name}", nargs=len(get_args(kind)), metavar="X", help=help_text)
    else:
        choices = get_args(kind)
        metavar = "|".join(choices) if choices else {int: "N", float: "X", str: "TEXT"}[kind]
        group.add_argument(f"--{name}", metavar=metavar, help=help_text)


def _unknown_argument(options: type[Options], argument: str, config_file: bool) -> str:
    if not argument.startswith("--") or argument == "--":
        return f"{argument}: not understood; options are written --name VALUE, yes/no options --name or --no-name"
    name = argument.partition("=")[0]
    names = [f"--{name}" for name in options.model_fields] + ["--config"] * config_file
    switches = [f"--no-{name}" for name, field in options.model_fields.items() if _value_type(field) is bool]
    return f"{name}: unknown option{did_you_mean(name, names + switches) or '; --help lists them all'}"


# ---- conversions and messages


def _value_type(field: FieldInfo) -> Any:
    """The field's type without Optional and without bounds."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    kind = kinds[0] if NoneType in get_args(field.annotation) else field.annotation
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _none_or_same(field: FieldInfo | None, value: Any) -> Any:
    """None where the field may be unset and the text says so."""
    optional = field is not None and NoneType in get_args(field.annotation)
    return None if optional and isinstance(value, str) and value.lower() in ("", "none", "null", "~") else value


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, if one is near."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _error_lines(options: type[Options], error: ValidationError, origin: Mapping[str, str]) -> list[str]:
    """One line for each problem that pydantic found."""
    lines = []
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ContradictionError):
            lines += [f"{origin[name]}: {text}" if name in origin else text for name, text in cause.problems]
            continue
        name = str(problem["loc"][0])
        where = origin.get(name, name)
        if problem["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown option{did_you_mean(name, list(options.model_fields))}")
            continue
        kind = _value_type(options.model_fields[name])
        if get_origin(kind) is tuple and kind.__args__[-1] is Ellipsis:
            kind = kind.__args__[0]
        elif get_origin(kind) is tuple and (len(problem["loc"]) == 1 or problem["type"] in ("missing", "too_long")):
            lines.append(f"{where}: takes {len(get_args(kind))} values, not {problem['input']!r}")
            continue
        message = problem["msg"][0].lower() + problem["msg"][1:].partition(", unable to")[0]
        hint = ""
        if problem["type"] == "literal_error":
            hint = did_you_mean(str(problem["input"]), get_args(kind))
        lines.append(f"{where}: {message}, not {problem['input']!r}{hint}")
    return lines
