"""Climb a ladder: run its stages one after the other, each in a fresh process, and report what each is worth here.

    python ladder.py speedup                        one of the published series: speedup, a100, mps, gpu_ms
    python ladder.py baseline.yaml my.yaml          or any configs
    python ladder.py speedup -- --max_steps 10      options after -- go to every run
    python ladder.py --plot logs/a logs/b           the loss curves of any runs in one picture
"""

from runtime.interrupt import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()  # also during the imports

import contextlib
import csv
import io
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

import runtime.report as reports
from config import Config, DataConfig, ModelConfig, OptimizationConfig, load_config
from runtime.cli import CONFIG_DIR, ConfigError, Options, Positive, find_config, parse, parse_command_line, read_yaml_mapping
from runtime.errors import TrainingError, UserError, exit_with, reported
from runtime.files import BeingWrittenError, aside, sole_writer, write_whole
from runtime.report import BLUE, COLOURS, ORANGE, Column
from runtime.runlog import LOG_COLUMNS, duration, read_rows
from runtime.signals import ENDS_WITH

ROOT = Path(__file__).resolve().parent
REFERENCE = ROOT / "logs" / "reference"
SERIES = {
    "speedup": ["baseline", *(f"speedup{i}" for i in range(1, 6)), "speedup5_max_autotune", *(f"speedup{i}" for i in range(6, 14))],
    "a100": ["a100/baseline", *(f"a100/opt{i}" for i in range(9))],
    "mps": [f"mps/{stage}" for stage in ("overfit", "dataloader", "weight_sharing", "init", "timing", "tf32", "cuda_bf16")],
    "gpu_ms": [f"gpu_ms/{stage}" for stage in ("fp32", "tf32", "bf16", "compile", "flash", "vocab", "fused_adamw")],
}
FIRST_COMPARED, LAST_COMPARED = 11, 50  # steps over which a loss curve is compared with the published one
FIRST_TIMED = 6  # published times: medians from this step on
# The published RTX 3080 times were read without waiting for the GPU from speedup1 on: up to 1.9 million tokens/s, more than
# ten times what that card can compute.
UNSYNCHRONIZED = re.compile(r"rtx3080_speedup")
ON_ANOTHER_GPU = "cuda_bf16"  # than the stage it changes, which ran on an Apple GPU
OF_THE_LADDER = ("--config", "--run_name", "--log_dir", "--resume", "--print_config")  # what no run's own options may say
DDP_PUBLISHED = 211_646  # tokens/s on two RTX 4090, from the same notes as the speedup ladder; there is no log of it


class LadderOptions(Options):
    """options"""

    stages: tuple[str, ...] = ()
    """speedup, a100, mps or gpu_ms; or config files; with --plot, folders of runs"""
    log_dir: str = "logs"
    """folder for the ladder's folder"""
    nproc_per_node: Positive | None = None
    """processes of each listed config, by torchrun; with speedup, of its last stage, ddp (none: 1; in ddp one for each GPU)"""
    rerun: bool = False
    """run finished stages again"""
    report_only: bool = False
    """rebuild the report of what is there"""
    plot: bool = False
    """compare the loss curves of the given runs in one picture"""


@dataclass(frozen=True)
class Published:
    """What was published of a stage."""

    log: str | None = None  # its log's name in logs/reference/
    ms_per_step: float | None = None  # where the time was read properly
    tokens_per_sec: float | None = None  # likewise


class Summary(BaseModel, extra="allow", allow_inf_nan=False):
    """What a report needs of a run's summary.json."""

    steps: int
    median_dt_ms: float = Field(gt=0)
    median_tokens_per_sec: float = Field(gt=0)
    first_step_s: float
    peak_memory_mb: float
    utilization: float
    final_loss: float | None
    device: str
    torch: str
    git: str | None
    started: str


@dataclass
class Stage:
    """One run of a ladder, and the files that it leaves."""

    name: str
    config: Config
    given: list[str]  # train.py's arguments
    base: str | None = None  # the stage that its file changes, as its `base:` says
    published: Published = field(default_factory=Published)  # empty, unless its settings are those of the published run
    twin_of: str | None = None  # the stage whose published run this one's settings are, where they differ from its note
    processes: int = 1
    error: str | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.log_dir) / self.name

    @property
    def command(self) -> list[str]:
        """What starts its run."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.processes}"]
        return [sys.executable, *(torchrun if self.processes > 1 else []), str(ROOT / "train.py"), *self.given]

    def summary(self) -> dict[str, Any] | None:
        """summary.json of the finished run with these very settings; None where there is none, or a damaged one."""
        try:
            summary = Summary.model_validate_json((self.folder / "summary.json").read_bytes()).model_dump()
            same = _options(load_config(str(self.folder / "config.yaml"))) == _options(self.config)
            read_rows(self.folder / "log.csv")
        except (OSError, ValidationError, UserError):
            return None
        return summary if same and not summary.get("interrupted") else None


# ---- the stages


def plan(names: Sequence[str], log_dir: str, extra: list[str], processes: int | None = None) -> tuple[str, list[Stage]]:
    """Name and stages of the ladder that the user asked for. Raises UserError for unknown stages or options."""
    ladder = names[0] if len(names) == 1 and names[0] in SERIES else "ladder"
    configs = SERIES.get(names[0], names) if len(names) == 1 else names
    stages: list[Stage] = []
    for config in configs:
        name = Path(config).stem
        if name in [stage.name for stage in stages]:
            name = f"{name}_{len(stages) + 1}"
        stages.append(_stage(name, config, ladder, log_dir, extra))
        as_logged = CONFIG_DIR / "as_logged" / f"{Path(config).stem}.yaml"
        if stages[-1].published.log and as_logged.is_file():
            # this stage's settings are those of the note, not of the log
            published, stages[-1].published = stages[-1].published, Published()
            if ladder == "speedup":
                twin = _stage(f"as_logged_{name}", str(as_logged), ladder, log_dir, extra)
                # a stage before it may be the same run: nothing is run twice
                twin = next((stage for stage in stages if _options(stage.config) == _options(twin.config)), twin)
                stages.append(replace(twin, published=published, twin_of=name))
    if ladder == "ladder":
        for stage in stages:
            stage.processes = processes or 1
    elif ladder == "speedup" and (processes or 1) > 1:
        stages.append(_stage("ddp", "ddp", ladder, log_dir, extra))
        stages[-1].processes = processes or 1
    return ladder, stages


def _stage(name: str, config: str, ladder: str, log_dir: str, extra: list[str]) -> Stage:
    try:
        path = find_config(config).resolve()
    except ConfigError as error:
        raise UserError(f"{error}; the published series are {', '.join(SERIES)}") from None
    if taken := [flag for flag in OF_THE_LADDER if any(word.partition("=")[0] == flag for word in extra)]:
        raise UserError(f"{taken[0]} after --: the ladder sets it for each run; configs and --log_dir are given before --")
    # a ladder is climbed for its figures: no stage leaves its weights
    given = [f"--config={config}", "--keep_last=0", *extra, f"--log_dir={Path(log_dir) / ladder}", f"--run_name={name}"]
    resolved = parse(Config, given, config_file=True)
    stage = Stage(name, resolved, given, base=Path(str(read_yaml_mapping(path).get("base"))).stem)
    if path.is_relative_to(CONFIG_DIR) and _same_training(resolved, load_config(config)):
        stage.published = _published(path.relative_to(CONFIG_DIR).with_suffix("").as_posix())
    return stage


def _published(config: str) -> Published:
    """What was published of the stage that a config in configs/ repeats, such as `speedup2` or `a100/opt3`."""
    series, _, name = config.rpartition("/")
    if series == "gpu_ms":
        with open(REFERENCE / "gpu_ms.csv", newline="") as file:
            return Published(ms_per_step={row["stage"]: float(row["dt_ms"]) for row in csv.DictReader(file)}.get(name))
    if config == "ddp":
        return Published(tokens_per_sec=DDP_PUBLISHED)
    log = name if name == "cuda_bf16" else f"{series or 'rtx3080'}_{name}"
    if not (REFERENCE / f"{log}.csv").is_file():
        return Published()
    timed = [row for step, row in published_rows(log).items() if step >= FIRST_TIMED]
    times, rates = ([value for row in timed if (value := row[key])] for key in ("dt_ms", "tokens_per_sec"))
    if UNSYNCHRONIZED.match(log) or not times:
        return Published(log)
    return Published(log, statistics.median(times), statistics.median(rates) if rates else None)


def published_rows(log: str) -> dict[int, dict[str, float | None]]:
    """The rows of a published log by step."""
    return read_rows(REFERENCE / f"{log}.csv")


def _options(config: Config) -> dict[str, Any]:
    """What makes a run another run: not what it is called or what it saves."""
    return config.model_dump(exclude={"run_name", "log_dir", "data_dir", "resume", "timeout", "checkpoint_every", "keep_last"})


def _same_training(a: Config, b: Config) -> bool:
    """Whether two configs compute the same losses, up to where the shorter run ends."""
    fields = {*ModelConfig.model_fields, *DataConfig.model_fields, *OptimizationConfig.model_fields, "seed"} - {"data_dir"}
    if a.lr_schedule == "constant":
        fields.discard("max_steps")
    return all(getattr(a, name) == getattr(b, name) for name in fields)


# ---- running


def probe(device: str) -> dict[str, Any]:
    """What a fresh process finds of the device: how many `gpus`, and `bf16_slowdown`, bfloat16's time over float32's, None where
    bfloat16 is not slow. Empty if it fails."""
    command = [sys.executable, "-m", "runtime.measure", device]
    found = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return json.loads(found.stdout) if found.returncode == 0 else {}


def bf16_warning(stages: Sequence[Stage], slowdown: float | None, command: Sequence[str]) -> str | None:
    """What to say before stages are run that bfloat16 makes slow on this machine, and how to go without it."""
    slow = [stage.name for stage in stages if stage.config.bf16]
    if slowdown is None or not slow:
        return None
    without = shlex.join(["python", "ladder.py", *command, *([] if "--" in command else ["--"]), "--no-bf16"])
    return (f"note: matrix products in bf16 take {slowdown:.1f} times as long as in fp32 on this machine, which makes "
            f"{', '.join(slow)} slow; without bf16: {without}")


@contextlib.contextmanager
def only_ladder(folder: Path) -> Iterator[None]:
    """No other ladder climbs in the folder meanwhile: it would move this one's stages aside. Raises UserError if one does."""
    try:
        with sole_writer(folder):
            yield
    except BeingWrittenError:
        raise UserError(f"{folder}: another ladder is being climbed there; wait for it, or give another --log_dir") from None


def make_way(folder: Path, stages: Sequence[Stage]) -> Path | None:
    """Move a ladder of entirely other configs aside, so that each keeps its report; returns where it is now, if there was one."""
    there = {log.parent.name for log in folder.glob("*/log.csv")}
    if not there or there & {stage.name for stage in stages}:
        return None
    return folder.rename(aside(folder))


def climb(stages: list[Stage], rerun: bool) -> None:
    """Run the stages that have no finished log with the same settings from this machine. A failed one is marked, the others go on.

    Raises KeyboardInterrupt when the user stops; what is finished stays.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
               TextColumn("{task.fields[note]}", markup=False), TimeElapsedColumn())
    here = reports.machine()
    with Progress(*columns, console=reports.console()) as progress:
        for i, stage in enumerate(stages, start=1):
            task = progress.add_task(f"{i}/{len(stages)} {stage.name}", total=stage.config.max_steps, note="")
            summary = stage.summary()
            if summary and not rerun and summary.get("machine", here) == here:  # another machine's speed says nothing here
                progress.update(task, completed=summary["steps"], note="finished before")
                continue
            stage.error = _run(stage, partial(_update, progress, task))
            progress.update(task, note=f"failed: {stage.error}" if stage.error else "finished")
            if not progress.console.is_terminal:
                progress.console.print(f"{stage.name}: {'failed: ' + stage.error if stage.error else 'done'}")


def _update(progress: Any, task: Any, step: int, note: str) -> None:
    progress.update(task, completed=step, note=note)


def _run(stage: Stage, tell: Callable[[int, str], None]) -> str | None:
    """Run a stage in its own process and `tell` its last step and how it is doing; returns the error if it fails."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // stage.processes))} if stage.processes > 1 else {}
    started = time.time()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(stage.command, stdout=subprocess.DEVNULL, stderr=errors,
                                   env=threads | os.environ | {ENDS_WITH: str(os.getpid())})
        try:
            tell(0, "starting")
            told = time.monotonic()
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - told > 2:  # reading a long log more often would disturb the run that is timed
                    _tell_progress(stage, started, tell)
                    told = time.monotonic()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # it ends after its step; the Ctrl-C of a shared terminal counts as the same request
            process.wait()
            raise
        _tell_progress(stage, started, tell)
        if process.returncode == 0 and stage.summary():
            return None
        errors.seek(0)
        lines = [line.strip() for line in errors if line.strip()]
    return _why(process.returncode, lines)


def _why(status: int, lines: Sequence[str]) -> str:
    """Why a run is not finished, from its exit status and what it printed on stderr."""
    if named := [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]:
        return named[-1]
    if status == 0:
        return "stopped by a signal before its last step; the same command runs it again"
    if status < 0:
        return f"killed by signal {-status}" + (", as the system does when memory runs out" if status == -9 else "")
    return (lines or [f"exit status {status}"])[-1]


def _tell_progress(stage: Stage, started: float, tell: Callable[[int, str], None]) -> None:
    """Tell the last step in the stage's log, unless the log is still that of a run from before `started`."""
    log = stage.folder / "log.csv"
    try:
        rows = read_rows(log) if log.stat().st_mtime >= started else {}
    except (OSError, UserError):  # not there yet, or being moved aside
        return
    if rows:
        step = max(rows)
        # the first step compiles
        seconds = [(row["dt_ms"] or 0.0) / 1e3 for at, row in rows.items() if at > 1]
        left = f", {duration(statistics.median(seconds) * (stage.config.max_steps - step))} left" if seconds else ""
        tell(step, f"loss {rows[step]['loss']:.4f}{left}")


# ---- comparing


@dataclass
class Row:
    """A finished stage in figures. Losses and difference in nats per token, memory in MB."""

    stage: str
    ms_per_step: float
    tokens_per_sec: float
    base: str  # what it is compared with: the stage that it changes, or the stage before where that is not in the ladder
    over_base: float | None  # None if the base has not run
    published_over_base: float | None
    over_first: float  # over the first finished stage
    first_step_s: float
    peak_memory_mb: float
    utilization: float
    final_loss: float | None  # None where the last step was left out
    steps: int
    published_tokens_per_sec: float | None
    loss_difference: float | None  # from the published curve
    compared: str  # which run's steps were compared


def loss_difference(ours: dict[int, dict], published: dict[int, dict]) -> tuple[float, int] | None:
    """Mean absolute difference of two loss curves over steps 11 to 50, and the last step compared; None if they share none."""
    steps = [s for s in range(FIRST_COMPARED, LAST_COMPARED + 1) if s in ours and s in published]
    if not steps:
        return None
    return statistics.fmean(abs(ours[s]["loss"] - published[s]["loss"]) for s in steps), steps[-1]


def compare(stages: list[Stage]) -> list[Row]:
    """A row for each finished stage that is not another's twin."""
    rows: list[Row] = []
    rates: dict[str, float] = {}
    own = {stage.name: stage for stage in stages if not stage.twin_of}
    before: Stage | None = None
    for stage in own.values():
        base = own.get(str(stage.base), before or stage)
        before = stage
        summary = stage.summary()
        if summary is None:
            continue
        as_published = next((s for s in stages if s.twin_of == stage.name and s.summary()), stage)
        difference, compared = None, ""
        if as_published.published.log:
            found = loss_difference(read_rows(as_published.folder / "log.csv"), published_rows(as_published.published.log))
            if found:
                difference, compared = found[0], f"{as_published.name}, steps {FIRST_COMPARED} to {found[1]}"
        rates[stage.name] = rate = summary["median_tokens_per_sec"]
        base_rate, first_rate = rates.get(base.name), next(iter(rates.values()))
        rows.append(Row(
            stage.name, summary["median_dt_ms"], rate, base.name, base_rate and rate / base_rate, _published_factor(stage, base),
            rate / first_rate, summary["first_step_s"], summary["peak_memory_mb"], summary["utilization"], summary["final_loss"],
            summary["steps"], as_published.published.tokens_per_sec, difference, compared))
    return rows


def _published_factor(stage: Stage, base: Stage) -> float | None:
    """The published speed over that of the base, in tokens/s, or in steps/s for a list that names no batch."""
    ours, theirs = stage.published, base.published
    if stage is base or ours.log == ON_ANOTHER_GPU:
        return None
    if ours.tokens_per_sec and theirs.tokens_per_sec:
        return ours.tokens_per_sec / theirs.tokens_per_sec
    if ours.ms_per_step and theirs.ms_per_step and not (ours.tokens_per_sec or theirs.tokens_per_sec):
        return theirs.ms_per_step / ours.ms_per_step
    return None


# ---- reporting


STAGE = reports.field("stage", "stage")
COLUMNS = [
    STAGE, reports.field("ms/step", "ms_per_step", ",.0f"), reports.field("tokens/s", "tokens_per_sec", ",.0f"),
    reports.field("x base", "over_base", ".2f"), reports.field("published", "published_over_base", ".2f"),
    reports.field("x first", "over_first", ".2f"), reports.field("MB", "peak_memory_mb", ",.0f"),
    reports.field("loss", "final_loss", ".3f"), reports.field("diff.", "loss_difference", ".3f"),
    reports.field("base", "base"), reports.field("first step, s", "first_step_s", ".1f"),
    reports.field("of matmul", "utilization", ".0%"),
    reports.field("published tokens/s", "published_tokens_per_sec", ",.0f")]
IN_TERMINAL = COLUMNS[:9]  # as many as 80 characters hold


def filled(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns that have something in them."""
    return [column for column in columns if any(column.cell(row) for row in rows)]


def report(ladder: str, stages: list[Stage], folder: Path) -> None:
    """Write report.md, results.csv, speed.png and loss.png of what is finished, and print the table."""
    rows = compare(stages)
    failed = [f"{stage.name}: {stage.error}" for stage in stages if stage.error]
    if not rows:
        kind = TrainingError if failed else UserError
        raise kind("\n".join([f"{folder}: no finished stage to report", *(f"failed: {line}" for line in failed)]))
    reports.print_table(f"{ladder}: what each stage is worth here", filled(IN_TERMINAL, rows), rows)
    for line in failed:
        print(f"failed: {line}")

    lines = io.StringIO()
    writer = csv.DictWriter(lines, fieldnames=list(Row.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(vars(row) for row in rows)
    write_whole(folder / "results.csv", lines.getvalue())
    curves = with_published_curve(stages)
    write_whole(folder / "report.md", markdown(ladder, stages, rows, failed, bool(curves)))
    # the pictures last: what is wrong with matplotlib costs no figures
    rates = [row.tokens_per_sec for row in rows]
    labels = [f"{row.tokens_per_sec:,.0f}  ({row.over_first:.2f}x)" for row in rows]
    reports.draw_bars(folder / "speed.png", [row.stage for row in rows], rates, labels,
                      f"tokens/s, and the factor over {rows[0].stage}")
    if curves:
        plot_losses(curves, folder / "loss.png")
    print(f"{folder}/ has report.md, results.csv, speed.png" + (" and loss.png" if curves else ""))


def markdown(ladder: str, stages: list[Stage], rows: list[Row], failed: list[str], plotted: bool) -> str:
    """The report as text."""
    summaries = {stage.name: summary for stage in stages if (summary := stage.summary())}
    measured = list(dict.fromkeys(
        f"{s.get('machine', reports.machine())}; device {s['device']}, torch {s['torch']}, commit {s['git']}, {s['started'][:10]}."
        for s in summaries.values()))
    missing = dict.fromkeys(stage.name for stage in stages if stage.name not in summaries and not stage.error)
    twins = [stage for stage in stages if stage.twin_of]
    lines = [
        f"# The {ladder} ladder" if ladder in SERIES else "# A ladder", "", *measured, "",
        *reports.markdown_table(filled(COLUMNS, rows), rows), "",
        "tokens/s and ms/step: medians without the first steps, which compile and warm up (`first step` is apart). x base, "
        "x first: tokens/s over that of its base, the stage that it changes (or the stage before, where that is not in this "
        "ladder), and over that of the first in the table. MB: peak memory, of the GPU's tensors on CUDA, else of the process. "
        "loss: of the last step, nats per token. diff.: mean absolute difference "
        f"from the published curve over steps {FIRST_COMPARED} to {LAST_COMPARED}, or as many of them as ran. of matmul: share of "
        "what a large matrix product reaches on this device.", ""]
    if any(row.published_over_base for row in rows):
        lines += ["published: the same factor over the base in the published times, on the GPU of whoever published them.", ""]
    if any(stage.published.log and UNSYNCHRONIZED.match(stage.published.log) for stage in stages):
        lines += ["Published times of speedup1 and later are not compared: they were read without waiting for the GPU.", ""]
    if any(stage.name == "ddp" for stage in stages):
        lines += [f"ddp: {stages[-1].processes} processes; {DDP_PUBLISHED:,} tokens/s were published, of two RTX 4090.", ""]
    if twins:
        lines += [f"The published runs of {', '.join(str(t.twin_of) for t in twins)} did not do what their notes say (their "
                  "weights were not tied). Their curves are compared with runs that do as logged (`configs/as_logged/`).", ""]
    lines += [f"Failed: {line}\n" for line in failed]
    lines += [f"Not run: {', '.join(missing)}.", ""] if missing else []
    lines += ["![tokens/s of each stage](speed.png)", ""]
    lines += ["![loss curves, measured over published](loss.png)", ""] if plotted else []
    ran = {stage.name: f"`{stage.name}`: {summaries[stage.name]['steps']} steps of {stage.config.batch_size} x "
           f"{stage.config.seq_len} tokens" for stage in stages if stage.name in summaries}
    return "\n".join([*lines, "Settings: " + "; ".join(ran.values()) + "."]) + "\n"


# ---- loss curves


def curve(log: dict[int, dict[str, float | None]]) -> tuple[list[int], list[Any]]:
    """Steps and losses of a log."""
    return list(log), [row["loss"] for row in log.values()]


def with_published_curve(stages: Sequence[Stage]) -> list[tuple[Stage, str]]:
    """The finished stages with a published log, and its name."""
    return [(stage, stage.published.log) for stage in stages if stage.published.log and stage.summary()]


def plot_losses(shown: Sequence[tuple[Stage, str]], path: Path) -> None:
    """A small picture for each stage with a published log, measured over published."""
    columns = min(4, len(shown))
    height = -(-len(shown) // columns)
    figure, grid = reports.pyplot().subplots(height, columns, figsize=(3 * columns, 2.4 * height + 0.5), layout="constrained",
                                             squeeze=False, sharex=True, sharey=True)
    for axes, (stage, log) in zip(grid.flat, shown, strict=False):
        ours, published = read_rows(stage.folder / "log.csv"), published_rows(log)
        axes.plot(*curve(published), color=ORANGE, linewidth=2.4, label="published")
        axes.plot(*curve(ours), color=BLUE, linewidth=1.2, label="measured")
        found = loss_difference(ours, published)
        name = f"{stage.twin_of}, as logged" if stage.twin_of else stage.name
        axes.set_title(reports.plain(name) + (f"\ndifference {found[0]:.3f}" if found else ""), fontsize=9)
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(shown):]:
        axes.set_visible(False)
    for axes in list(grid.flat)[max(0, len(shown) - columns):len(shown)]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
    figure.supxlabel("step")
    figure.supylabel("loss, nats per token")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    reports.save_picture(figure, path)


def plot_runs(folders: Sequence[str], path: Path) -> None:
    """The loss curves of any runs in one picture. Raises UserError for a folder without a log."""
    logs = {folder: read_rows(Path(folder) / "log.csv", LOG_COLUMNS) for folder in folders}
    figure, axes = reports.pyplot().subplots(figsize=(8, 5), layout="constrained")
    axes.set_prop_cycle(color=COLOURS)
    for folder, log in logs.items():
        axes.plot(*curve(log), linewidth=1.4, label=reports.plain(folder))
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    reports.save_picture(figure, path)
    print(f"wrote {path}")


def main(argv: Sequence[str]) -> None:
    """Do what the command line asks for. Raises UserError."""
    at = argv.index("--") if "--" in argv else len(argv)
    runs_option = "is an option of the runs, and goes after --: python ladder.py speedup -- --max_steps 5"
    options = parse_command_line(LadderOptions, argv[:at], description=__doc__, positional="stages",
                                 elsewhere=dict.fromkeys({"config", *Config.model_fields} - {"log_dir"}, runs_option))
    if not options.stages:
        raise UserError(f"name a series ({', '.join(SERIES)}) or config files; python ladder.py --help says more")
    if options.plot:
        if options.rerun or options.report_only or "log_dir" in options.model_fields_set or at < len(argv):
            raise UserError("--plot takes folders of runs and nothing else; it writes comparison.png here")
        plot_runs(options.stages, Path("comparison.png"))
        return
    extra, processes = list(argv[at + 1:]), options.nproc_per_node
    ladder, stages = plan(options.stages, options.log_dir, extra, processes)
    if not options.report_only and (ladder == "speedup" or any(stage.config.bf16 for stage in stages)):
        found = probe(stages[0].config.device)
        if warning := bf16_warning(stages, found.get("bf16_slowdown"), argv):
            print(warning, flush=True)
        if ladder == "speedup" and processes is None and found.get("gpus", 0) > 1:
            ladder, stages = plan(options.stages, options.log_dir, extra, found["gpus"])
            ddp = stages[-1].config
            if not any((Path(ddp.data_dir) / ddp.dataset).glob("*.bin")):
                stages.pop()
                print(f"note: the stage ddp is left out: its corpus {ddp.data_dir}/{ddp.dataset} is not there; write it with: "
                      f"python data/fineweb.py", flush=True)
    folder = Path(options.log_dir) / ladder
    with contextlib.nullcontext() if options.report_only else only_ladder(folder):
        if ladder == "ladder" and not options.report_only and (moved := make_way(folder, stages)):
            print(f"note: the ladder of other configs that was {folder} is now {moved}", flush=True)
        runs = [stage for i, stage in enumerate(stages) if stage.name not in [earlier.name for earlier in stages[:i]]]
        if not options.report_only:
            try:
                climb(runs, options.rerun)
            except KeyboardInterrupt:
                finished = sum(stage.summary() is not None for stage in runs)
                exit_with(UserError(f"interrupted; {finished} of {len(runs)} stages are finished and kept, "
                                    f"the same command goes on"), status=130)
        report(ladder, stages, folder)
    if any(stage.error for stage in stages):
        raise SystemExit(1)


if __name__ == "__main__":
    with reported("the report", interrupted="interrupted; finished stages are kept, the same command goes on"):
        main(sys.argv[1:])
