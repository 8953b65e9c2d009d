"""All results of a ladder in one file, ladder.json: runs, comparisons, predictions."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveInt

from config import MFU, Config
from measure.interleaved.comparison import Comparison, Origin
from run.log import EVAL_COLUMNS, LOG_COLUMNS, read_rows
from runtime.cli import load, show
from runtime.errors import UserError, in_a_line
from runtime.files import write_json

FILE = "ladder.json"
DIRTY = "-dirty"  # ends the commit of changed code
LONGEST_DIFF = 20_000  # characters; of a longer one only its hash is kept
LIMITS = ("arithmetic", "memory", "launches")  # an operation takes as long as the slowest
# Options that change neither the results of a run nor its speed
IRRELEVANT = {
    "run_name",
    "log_dir",
    "resume",
    "timeout",
    "sample_prompt",
    "checkpoint_every",
    "keep_last",
    "tensorboard",
    "wandb",
}
OFF = {"false", "none", "null", "0", "0.0", ""}  # values of a stored option, in lower case


Columns = dict[str, list[float | None]]  # a CSV file's; None is an empty cell
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Device(BaseModel, frozen=True):
    """A device and its measured rates. A rate is missing if it could not be measured."""

    name: str | None = None
    gpus: int = 0
    memory_mb: float | None = None  # free before the ladder begins
    tflops: dict[str, float] = {}  # rate of a large matmul by dtype; `tf32` if the device has it
    gigabytes_per_s: float | None = None  # read and written by a copy
    launch_us: float | None = None  # time of the smallest operation
    bf16: bool = True
    slow_bf16: bool = False  # a CPU whose bf16 is slower than fp32
    medium: bool = False  # a CPU on which matmul_precision `medium` has an effect

    def step_seconds(self, config: Config) -> float:
        """Estimate the seconds of a step of one rank, from the rate of a large matmul."""
        dtype = config.matmul_dtype
        if dtype == "float32" and config.fp32_precision() != "highest":
            dtype = "tf32"  # not measured on a CPU
        rate = self.tflops.get(dtype, self.tflops["float32"]) * 1e12 * MFU
        # FLOPs of a token, as GPT.flops_per_token counts them, without biases and norms
        matmuls = 12 * config.n_layer * config.n_embd**2 + config.n_embd * config.vocab_size
        flops = 6 * matmuls + 12 * config.n_layer * config.n_embd * config.seq_len
        return config.tokens_per_step(1) * flops / rate


def read_columns(path: Path, required: Sequence[str] = LOG_COLUMNS) -> Columns:
    """Read a log. Raises UserError."""
    rows = read_rows(path, required).values()
    return {name: [row[name] for row in rows] for name in next(iter(rows), required)}


def curve(log: Columns, column: str = "loss") -> dict[int, float]:
    """Return a column of a log by step, without empty cells."""
    cells = zip(log["step"], log[column], strict=True)
    return {int(step or 0): value for step, value in cells if value is not None}


class Summary(Origin, extra="allow"):
    """The figures of summary.json that a report needs; the other ones are kept."""

    median_dt_ms: Positive
    median_tokens_per_sec: Positive
    first_step_s: float
    peak_memory_mb: float
    utilization: float | None  # MFU; None if the matmul could not be timed
    final_loss: float | None
    steps: int
    world_size: int = 1
    torch: str
    started: str
    interrupted: bool = False

    @property
    def date(self) -> str:
        """The day of its start."""
        return self.started[:10]

    @property
    def about(self) -> str:
        """The machine and the versions."""
        return f"{self.machine}; device {self.device}, torch {self.torch}, commit {self.git}"


class Run(BaseModel):
    """A finished run."""

    config: dict[str, Any]  # its settings
    summary: Summary
    log: Columns
    eval: Columns = {}

    @classmethod
    def read(cls, folder: Path, config: dict[str, Any]) -> "Run":
        """Read the folder of a run with these settings."""
        evaluated = folder / "eval.csv"
        return cls(
            config=config,
            summary=Summary.model_validate_json((folder / "summary.json").read_bytes()),
            log=read_columns(folder / "log.csv"),
            eval=read_columns(evaluated, EVAL_COLUMNS) if evaluated.exists() else {},
        )


class Prediction(BaseModel):
    """The predicted seconds of a step, by the limits of its operations."""

    tokens: PositiveInt
    arithmetic: NonNegativeFloat
    memory: NonNegativeFloat
    launches: NonNegativeFloat
    settings: dict[str, Any] = {}  # of the config; ladders before 2026-11-26 lack them

    @property
    def tokens_per_sec(self) -> float:
        """The predicted speed."""
        return self.tokens / self.seconds

    @property
    def seconds(self) -> float:
        """The predicted seconds of the step."""
        return sum(getattr(self, limit) for limit in LIMITS)

    def over(self, base: "Prediction") -> float:
        """Return the predicted speed over another one."""
        return self.tokens_per_sec / base.tokens_per_sec


class Predictions(BaseModel):
    """The predictions of a ladder, and the rates behind them."""

    where: str = ""  # machine and device of the rates; not stored before 2026-11-24
    rates: Device = Device()
    stages: dict[str, Prediction] = {}


class Planned(BaseModel):
    """A stage as it was climbed; its config's path is relative to the project, if it is inside."""

    config: str
    options: list[str]
    ranks: int = 1


class Changes(BaseModel):
    """Changes to a commit's files that were not committed when a ladder ran."""

    files: list[str]
    diff: str  # of a long one, its SHA-256

    @classmethod
    def of(cls, diff: str) -> "Changes":
        """Keep a diff of git's, or its hash."""
        files = re.findall(r"^diff --git a/.* b/(.*)$", diff, re.MULTILINE)
        if len(diff) > LONGEST_DIFF:
            diff = f"sha256 {hashlib.sha256(diff.encode()).hexdigest()}"
        return cls(files=files, diff=diff)


class Record(BaseModel):
    """All results of a ladder."""

    stages: dict[str, Planned] = {}
    seeds: int = 0  # 0 if only speeds are compared
    size: tuple[PositiveInt, ...] = ()  # quick.Size of a quick ladder

    runs: dict[str, Run] = {}
    comparisons: dict[str, Comparison] = {}  # each stage with its base
    predicted: Predictions = Predictions()
    changes: dict[str, list[Changes]] = {}  # by commit, such as 0a1b2c-dirty
    folder: Path = Field(default=Path(), exclude=True)
    failures: list[str] = Field(default=[], exclude=True)  # errors of this climb, a line each

    def fail(self, name: str, error: str) -> None:
        """Print and keep the error of a stage; the other stages still run."""
        self.failures.append(f"failed: {name}: {error}")
        print(self.failures[-1], flush=True)

    @classmethod
    def load(cls, folder: Path) -> "Record":
        """Read a ladder's record; without one, it is empty."""
        path = folder / FILE
        try:
            record = cls.model_validate_json(path.read_bytes()) if path.exists() else cls()
        except ValueError as error:
            raise UserError(
                f"{path}: damaged ({in_a_line(error)}); restore it, or delete it to begin again"
            ) from None
        record.folder = folder
        return record

    def keep_changes(self, commit: str | None, diff: str) -> None:
        """Keep the uncommitted changes to a commit: results name only the commit."""
        if commit and commit.endswith(DIRTY):
            changes, known = Changes.of(diff), self.changes.setdefault(commit, [])
            if changes not in known:
                known.append(changes)

    def read_again(self) -> None:
        """Take the results that another climb of this ladder may have saved since."""
        now = Record.load(self.folder)
        self.runs, self.comparisons, self.predicted = now.runs, now.comparisons, now.predicted
        self.changes = now.changes

    def save(self) -> None:
        """Write ladder.json."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / FILE, self.model_dump(mode="json", exclude_defaults=True))


# ---- settings


def settings(config: Config) -> dict[str, Any]:
    """Return the options, as in JSON, that two runs must share to count as the same run."""
    # a run's config.yaml contains the learning rate at the end of its schedule, set or not
    return config.model_dump(mode="json", exclude=IRRELEVANT) | {"min_lr": config.final_lr()}


def differences(there: Sequence[Mapping[str, Any]], here: Sequence[Config]) -> str:
    """List the settings in which stored runs differ: `batch_size 1 there, 2 here`.

    Another version of this code may have stored its options: a missing one has its default, and an
    unknown one is ignored if it is off.
    """
    if len(there) != len(here):
        return f"settings of {len(there)} sides there, {len(here)} here"
    found = dict[str, None]()  # a set in order
    for stored, config in zip(there, here, strict=True):
        known = Config.model_fields
        kept = {n: v for n, v in stored.items() if n in known or str(v).lower() not in OFF}
        try:
            ran, wanted = settings(load(Config, kept)), settings(config)
        except UserError as error:
            return str(error)
        for name, value in wanted.items():
            if ran[name] != value:
                found[f"{name} {show(ran[name])} there, {show(value)} here"] = None
    return ", ".join(found)
