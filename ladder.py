"""Climb a ladder: run its stages one after the other, each in a fresh process, and report what each is worth here.

    python ladder.py speedup                        one of the published series: speedup, a100, mps, gpu_ms
    python ladder.py baseline.yaml my.yaml          or any configs
    python ladder.py speedup -- --max_steps 10      options behind -- go to every run
    python ladder.py --plot logs/a logs/b           the loss curves of any runs in one picture
"""

import csv
import json
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from config import (
    CONFIG_DIR,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizationConfig,
    Options,
    UserError,
    exit_with,
    find_config,
    load_config,
    parse,
    parse_command_line,
    read_yaml_mapping,
)
from machine import machine

ROOT = Path(__file__).resolve().parent
REFERENCE = ROOT / "logs" / "reference"
SERIES = {
    "speedup": ["baseline", *(f"speedup{i}" for i in range(1, 6)), "speedup5_max_autotune", *(f"speedup{i}" for i in range(6, 14))],
    "a100": ["a100/baseline", *(f"a100/opt{i}" for i in range(9))],
    "mps": [f"mps/{stage}" for stage in ("overfit", "dataloader", "weight_sharing", "init", "timing", "tf32", "cuda_bf16")],
    "gpu_ms": [f"gpu_ms/{stage}" for stage in ("fp32", "tf32", "bf16", "compile", "flash", "vocab", "fused_adamw")],
}
FIRST_COMPARED, LAST_COMPARED = 11, 50  # steps over which a loss curve is compared with the published one
# The published RTX 3080 times were read without waiting for the GPU from speedup1 on: up to 1.9 million tokens/s, more than
# ten times what that card can compute.
UNSYNCHRONIZED = re.compile(r"rtx3080_speedup")


class LadderOptions(Options):
    """options"""

    stages: tuple[str, ...] = ()
    """speedup, a100, mps or gpu_ms; or config files; with --plot, folders of runs"""
    log_dir: str = "logs"
    """folder for the ladder's folder"""
    rerun: bool = False
    """run finished stages again"""
    report_only: bool = False
    """rebuild the report of what is there"""
    plot: bool = False
    """compare the loss curves of the given runs in one picture"""


@dataclass
class Stage:
    """One run of a ladder, and after it what it left behind."""

    name: str
    config: Config
    given: list[str]  # train.py's arguments
    base: str | None = None  # the stage that its file changes, as its `base:` says
    published: str | None = None  # its log in logs/reference/, if its settings are those of the published run
    twin_of: str | None = None  # the stage whose published run this one's settings are, where they differ from its note
    error: str | None = None

    @property
    def folder(self) -> Path:
        return Path(self.config.log_dir) / self.name

    def summary(self) -> dict[str, Any] | None:
        """summary.json of the finished run with these very settings; None where there is none."""
        try:
            summary = json.loads((self.folder / "summary.json").read_text())
            same = _options(load_config(str(self.folder / "config.yaml"))) == _options(self.config)
            read_log(self.folder / "log.csv")
        except (OSError, ValueError, UserError):
            return None
        return summary if same and not summary.get("interrupted") else None


# ---- the stages


def plan(names: Sequence[str], log_dir: str, extra: list[str]) -> tuple[str, list[Stage]]:
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
        if stages[-1].published and as_logged.is_file():
            published, stages[-1].published = stages[-1].published, None  # this one's settings are the note's, not the log's
            if ladder == "speedup":
                twin = _stage(f"as_logged_{name}", str(as_logged), ladder, log_dir, extra)
                # a stage before it may be the same run: nothing is run twice
                twin = next((stage for stage in stages if _options(stage.config) == _options(twin.config)), twin)
                stages.append(replace(twin, published=published, twin_of=name))
    return ladder, stages


def _stage(name: str, config: str, ladder: str, log_dir: str, extra: list[str]) -> Stage:
    try:
        path = find_config(config).resolve()
    except ConfigError as error:
        raise UserError(f"{error}; the published series are {', '.join(SERIES)}") from None
    # a ladder is climbed for its figures: no stage leaves its weights
    given = ["--config", config, "--keep_last", "0", *extra, "--log_dir", str(Path(log_dir) / ladder), "--run_name", name]
    resolved = parse(Config, given, config_file=True)
    stage = Stage(name, resolved, given, base=Path(str(read_yaml_mapping(path).get("base"))).stem)
    published = _published_log(path)
    if published and _same_training(resolved, load_config(config)):
        stage.published = published
    return stage


def _published_log(path: Path) -> str | None:
    """Name in logs/reference/ of the log that a config file's stage was published with; None if there is none."""
    if not path.is_relative_to(CONFIG_DIR):
        return None
    series, name = path.parent.relative_to(CONFIG_DIR).as_posix(), path.stem
    prefix = "rtx3080_" if series == "." else f"{series}_"
    log = name if name == "cuda_bf16" else prefix + name
    return log if (REFERENCE / f"{log}.csv").is_file() else None


def _options(config: Config) -> dict[str, Any]:
    """What makes a run another run: not what it is called or what it saves."""
    return config.model_dump(exclude={"run_name", "log_dir", "data_dir", "resume", "timeout", "checkpoint_every", "keep_last"})


def _same_training(a: Config, b: Config) -> bool:
    """Whether two configs compute the same losses, up to where the shorter run ends."""
    fields = {*ModelConfig.model_fields, *DataConfig.model_fields, *OptimizationConfig.model_fields, "seed"} - {"data_dir"}
    if a.lr_schedule == "constant":
        fields.discard("max_steps")
    return all(getattr(a, field) == getattr(b, field) for field in fields)


# ---- running


def climb(stages: list[Stage], rerun: bool) -> None:
    """Run the stages that have no finished log with the same settings from this machine. A failed one is marked, the others go on.

    Raises KeyboardInterrupt when the user stops; what is finished stays.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
               TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    here = machine()
    with Progress(*columns) as progress:
        for i, stage in enumerate(stages, start=1):
            task = progress.add_task(f"{i}/{len(stages)} {stage.name}", total=stage.config.max_steps, note="")
            summary = stage.summary()
            if summary and not rerun and summary.get("machine", here) == here:  # another machine's speed says nothing here
                progress.update(task, completed=summary["steps"], note="finished before")
                continue
            stage.error = _run(stage, lambda done, note, task=task: progress.update(task, completed=done, note=note))
            progress.update(task, note=f"[red]failed: {stage.error}" if stage.error else "done")
            if not progress.console.is_terminal:
                progress.console.print(f"{stage.name}: {'failed: ' + stage.error if stage.error else 'done'}")


def _run(stage: Stage, show: Any) -> str | None:
    """Run a stage in a process of its own, passing on each step; returns the error if it fails."""
    command = [sys.executable, str(ROOT / "train.py"), *stage.given]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
    assert process.stdout is not None
    lines: list[str] = []
    try:
        show(0, "starting")
        for line in process.stdout:
            lines.append(line.rstrip())
            if step := re.match(r"step +(\d+)/\d+ \| loss ([\d.]+)(?:.*\| (\S+) left)?", line):
                show(int(step[1]), f"loss {step[2]}" + (f", {step[3]} left" if step[3] else ""))
        process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)  # it ends after its step; where it has the terminal's Ctrl-C too, that is one request
        process.wait()
        raise
    if process.returncode == 0 and stage.summary():
        return None
    errors = [line for line in lines if re.match(r"error: |\w*Error\b", line)]
    return errors[-1].removeprefix("error: ") if errors else f"exit status {process.returncode}"


# ---- comparing


@dataclass
class Row:
    """A finished stage in figures. Losses and difference in nats per token, memory in MB."""

    stage: str
    ms_per_step: float
    tokens_per_sec: float
    over_previous: float | None  # over its base, or where that is not in the ladder the stage before; None if that has not run
    over_first: float  # of the finished ones
    first_step_s: float
    peak_memory_mb: float
    utilization: float
    final_loss: float | None  # None where the last step was left out
    steps: int
    published_tokens_per_sec: float | None
    loss_difference: float | None  # from the published curve
    compared: str  # which run's steps were compared


def read_log(path: Path) -> dict[int, dict[str, float | None]]:
    """Rows of a log.csv by step; empty cells are None. Raises UserError if the file or a column is missing."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        return {int(row["step"]): {name: float(row[name]) if row[name] else None for name in
                                   ("loss", "lr", "norm", "dt_ms", "tokens_per_sec")} for row in rows}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except KeyError as error:
        raise UserError(f"{path}: has no column {error.args[0]}; a log has step,loss,lr,norm,dt_ms,tokens_per_sec") from None
    except (TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: not a log: {error}") from None


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
    own = [stage for stage in stages if not stage.twin_of]
    for i, stage in enumerate(own):
        summary = stage.summary()
        if summary is None:
            continue
        run = next((s for s in stages if s.twin_of == stage.name and s.summary()), stage)  # what ran as logged
        difference, compared, published_rate = None, "", None
        if run.published:
            published = read_log(REFERENCE / f"{run.published}.csv")
            if found := loss_difference(read_log(run.folder / "log.csv"), published):
                difference, last = found
                compared = f"{run.name}, steps {FIRST_COMPARED} to {last}"
            theirs = [t for step, row in published.items() if step > 5 and (t := row["tokens_per_sec"]) is not None]
            if theirs and not UNSYNCHRONIZED.match(run.published):
                published_rate = statistics.median(theirs)
        rates[stage.name] = rate = summary["median_tokens_per_sec"]
        base = stage.base if stage.base in [other.name for other in own] else own[max(0, i - 1)].name
        before, first = rates.get(str(base)), next(iter(rates.values()))
        rows.append(Row(
            stage.name, summary["median_dt_ms"], rate, before and rate / before, rate / first,
            summary["first_step_s"], summary["peak_memory_mb"], summary["utilization"], summary["final_loss"], summary["steps"],
            published_rate, difference, compared))
    return rows


# ---- reporting


HEADER = ["stage", "ms/step", "tokens/s", "x base", "x first", "MB", "loss", "diff.", "first step, s", "of matmul",
          "published tokens/s"]
SHOWN = 8  # columns in the terminal; the report has all


def cells(row: Row) -> list[str]:
    """A row as text, in the order of HEADER."""
    factors = ["" if factor is None else f"{factor:.2f}" for factor in (row.over_previous, row.over_first)]
    loss = "" if row.final_loss is None else f"{row.final_loss:.3f}"
    difference = "" if row.loss_difference is None else f"{row.loss_difference:.3f}"
    published = "" if row.published_tokens_per_sec is None else f"{row.published_tokens_per_sec:,.0f}"
    return [row.stage, f"{row.ms_per_step:,.0f}", f"{row.tokens_per_sec:,.0f}", *factors,
            f"{row.peak_memory_mb:,.0f}", loss, difference, f"{row.first_step_s:.1f}", f"{row.utilization:.0%}",
            published]


def report(ladder: str, stages: list[Stage], folder: Path) -> None:
    """Write report.md, results.csv, speed.png and loss.png of what is finished, and print the table."""
    rows = compare(stages)
    failed = [f"{stage.name}: {stage.error}" for stage in stages if stage.error]
    if not rows:
        raise UserError("\n".join([f"{folder}: no finished stage to report", *(f"failed: {line}" for line in failed)]))
    show(f"{ladder}: what each stage is worth here", HEADER[:SHOWN], [cells(row)[:SHOWN] for row in rows])
    for line in failed:
        print(f"failed: {line}")

    with open(folder / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(Row.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(vars(row) for row in rows)
    plot_speed(rows, folder / "speed.png")
    plotted = plot_losses(stages, folder / "loss.png")
    (folder / "report.md").write_text(markdown(ladder, stages, rows, failed, plotted))
    print(f"{folder}/ has report.md, results.csv, speed.png" + (" and loss.png" if plotted else ""))


def markdown(ladder: str, stages: list[Stage], rows: list[Row], failed: list[str], plotted: bool) -> str:
    """The report as text."""
    summaries = {stage.name: summary for stage in stages if (summary := stage.summary())}
    measured = list(dict.fromkeys(
        f"{s.get('machine', machine())}; device {s['device']}, torch {s['torch']}, commit {s['git']}, {s['started'][:10]}."
        for s in summaries.values()))
    missing = dict.fromkeys(stage.name for stage in stages if stage.name not in summaries and not stage.error)
    twins = [stage for stage in stages if stage.twin_of]
    lines = [
        f"# The {ladder} ladder" if ladder in SERIES else "# A ladder", "", *measured, "",
        *markdown_table(HEADER, [cells(row) for row in rows]), "",
        "tokens/s and ms/step: medians without the first steps, which compile and warm up (`first step` is apart). x base, "
        "x first: tokens/s over that of the stage it changes (its `base:`), and of the first in the table. MB: peak memory, of "
        "the GPU's tensors on CUDA, else of the process. loss: of the last step, nats per token. diff.: mean absolute difference "
        f"from the published curve over steps {FIRST_COMPARED} to {LAST_COMPARED}, or as many of them as ran. of matmul: share of "
        "what a large matrix product reaches on this device.", ""]
    if any(stage.published and UNSYNCHRONIZED.match(stage.published) for stage in stages):
        lines += ["Published times of speedup1 and later are not compared: they were read without waiting for the GPU.", ""]
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


def show(title: str, header: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    """Print a table; columns of figures are set to the right."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name, values in zip(header, zip(*body, strict=True), strict=True):
        is_figure = all(value[:1].isdigit() or not value for value in values)
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=is_figure)
    for line in body:
        table.add_row(*line)
    Console().print(table)


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of markdown; columns of figures are set to the right."""
    is_figure = [all(value[:1].isdigit() or not value for value in values) for values in zip(*body, strict=True)]
    return ["| " + " | ".join(header) + " |", "|" + "".join("---:|" if figure else "---|" for figure in is_figure),
            *("| " + " | ".join(line) + " |" for line in body)]


# ---- pictures: the colours are of Okabe and Ito (2008), told apart by the colour-blind too

COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]  # told apart in print too
BLUE, ORANGE = COLOURS[:2]


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files; imported only where a picture is drawn, as that takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def plot_speed(rows: list[Row], path: Path) -> None:
    """Bars of tokens/s, each labelled with its rate and its factor over the first."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.36 * len(rows)), layout="constrained")
    rates = [row.tokens_per_sec for row in rows]
    bars = axes.barh([row.stage for row in rows], rates, color=BLUE)
    axes.bar_label(bars, [f"{row.tokens_per_sec:,.0f}  ({row.over_first:.2f}x)" for row in rows], padding=4, fontsize=9)
    axes.set_xlim(0, max(rates) * 1.25)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens/s, and the factor over {rows[0].stage}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def curve(log: dict[int, dict[str, float | None]]) -> tuple[list[int], list[Any]]:
    """Steps and losses of a log."""
    return list(log), [row["loss"] for row in log.values()]


def plot_losses(stages: list[Stage], path: Path) -> bool:
    """A small picture for each stage with a published log, measured over published. Returns whether there was one."""
    plt = pyplot()
    shown = [stage for stage in stages if stage.published and stage.summary()]
    if not shown:
        return False
    columns = min(4, len(shown))
    height = -(-len(shown) // columns)
    figure, grid = plt.subplots(height, columns, figsize=(3 * columns, 2.4 * height + 0.5), layout="constrained", squeeze=False,
                                sharex=True, sharey=True)
    for axes, stage in zip(grid.flat, shown, strict=False):
        ours, published = read_log(stage.folder / "log.csv"), read_log(REFERENCE / f"{stage.published}.csv")
        axes.plot(*curve(published), color=ORANGE, linewidth=2.4, label="published")
        axes.plot(*curve(ours), color=BLUE, linewidth=1.2, label="measured")
        found = loss_difference(ours, published)
        name = f"{stage.twin_of}, as logged" if stage.twin_of else stage.name
        axes.set_title(name + (f"\ndifference {found[0]:.3f}" if found else ""), fontsize=9)
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(shown):]:
        axes.set_visible(False)
    for axes in list(grid.flat)[max(0, len(shown) - columns):len(shown)]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
    figure.supxlabel("step")
    figure.supylabel("loss, nats per token")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def plot_runs(folders: Sequence[str], path: Path) -> None:
    """The loss curves of any runs in one picture. Raises UserError for a folder without a log."""
    plt = pyplot()
    logs = {folder: read_log(Path(folder) / "log.csv") for folder in folders}
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.set_prop_cycle(color=COLOURS)
    for folder, log in logs.items():
        axes.plot(*curve(log), linewidth=1.4, label=folder)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f"wrote {path}")


def main(argv: Sequence[str]) -> None:
    at = argv.index("--") if "--" in argv else len(argv)
    options = parse_command_line(LadderOptions, argv[:at], description=__doc__, positional="stages")
    if not options.stages:
        raise UserError(f"name a series ({', '.join(SERIES)}) or config files; python ladder.py --help says more")
    if options.plot:
        if options.rerun or options.report_only or "log_dir" in options.model_fields_set or at < len(argv):
            raise UserError("--plot takes folders of runs and nothing else; it writes comparison.png here")
        plot_runs(options.stages, Path("comparison.png"))
        return
    ladder, stages = plan(options.stages, options.log_dir, list(argv[at + 1:]))
    folder = Path(options.log_dir) / ladder
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
    try:
        main(sys.argv[1:])
    except UserError as error:
        exit_with(error)
    except OSError as error:
        exit_with(UserError(f"{error.filename or 'the report'}: {error.strerror or error}"), status=1)
