"""The report of timed passes: columns, files and pictures."""

import csv
import datetime
import itertools
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from config import SpeedConfig, load_config
from measure.profile.timing import key_of, label_of, settings
from measure.report.pictures import draw_bars, draw_panels
from measure.report.report import PEAK_MEMORY, Figure, Row, write_report
from runtime.errors import UserError
from runtime.report import Estimate, flops_rate, git_commit, machine

Results = dict[tuple[str, ...], Row]  # rows by key
TOKENS_PER_SEC = Figure("tokens_per_sec", "tokens/s", ",.0f")
LABEL = Figure("label", "model and pass", label_of)
RATES = [
    Figure("tflops", "FLOP rate", lambda row: flops_rate(row["tflops"])),
    Figure("utilization", "MFU", ".0%", "against the measured matmul rate"),
]
COLUMNS = [
    LABEL,
    Figure("warmup_steps", "warm"),
    Figure("mean_s", "mean, s", ".4g"),
    Figure("there_s", "there, s", ".4g", "the mean in the results to compare with"),
    Figure("over_there", "here / there", ".3f"),
    *RATES,  # without a comparison, a terminal of 80 characters has room up to here
    *(Figure(f"{name}_s", name, ".4g") for name in ("median", "std", "min", "max", "total")),
    TOKENS_PER_SEC,
    PEAK_MEMORY,
]
FROM_THE_SAME_PASSES = (
    "Rows that differ only in warm-up come from the same passes: with w warm-up passes the first w "
    "are left out. std: of the population."
)


def about_machine(row: Row) -> str:
    """Describe the machine, the device and threads of `row`, the versions and the day."""
    return (
        f"{machine()}; device {row['device']}, {row['threads']} threads, "
        f"torch {version('torch')}, commit {git_commit()}, {datetime.date.today()}."
    )


# ---- files


def new_folder(log_dir: str) -> Path:
    """Make a fresh folder for the results of a call of bench.py."""
    folder = Path(log_dir) / "bench" / f"{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder.mkdir(parents=True)
    return folder


def read_results(path: Path) -> Results:
    """Read the rows of a results.csv by their keys, except failed ones. Raises UserError."""
    published = settings(load_config("timeit/small"))  # its file lacks the settings
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [published | row for row in csv.DictReader(file)]
        return {key_of(r): r | {"mean_s": float(r["mean_s"])} for r in rows if r["mean_s"]}
    except (OSError, LookupError, TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: not a results.csv of bench.py: {error!r}") from None


SPEED_OPTIONS = [name for name in SpeedConfig.model_fields if name != "bf16"]  # KEY has it


def compare(rows: Sequence[Row], earlier: Results) -> list[str]:
    """Add the means of earlier results to the rows; returns notes on settings that differ."""
    notes = dict[str, None]()  # a set in order
    for row in rows:
        if there := earlier.get(key_of(row)):
            row |= {"there_s": there["mean_s"], "over_there": row["mean_s"] / there["mean_s"]}
            for name in ("batch_size", "seq_len", "vocab_size", "device", *SPEED_OPTIONS):
                theirs = str(there.get(name, row[name])) or "None"  # an empty cell
                if str(row[name]).lower() != theirs.lower():
                    notes[f"note: {name} differs: {row[name]} here, {theirs} there"] = None
    return [*notes]


# ---- the report


def report_times(
    name: str,
    rows: list[Row],
    failed: Sequence[str],
    folder: Path,
    earlier: Results,
    there: str | None,
) -> None:
    """Report timed rows with a picture: of a scan over the option `name`, or, if there is none,
    from fast to slow.

    Adds the times of `earlier` results, which come from the file `there`.
    """
    about = [about_machine(rows[0])]
    if earlier:
        about.append(f"there: {there}")
    if name:
        rows.sort(key=label_of)
        title, picture, meaning = f"Over {name}", "scan.png", ""
        figures = [LABEL, Figure(name, name), TOKENS_PER_SEC, PEAK_MEMORY, *RATES]
        draw_scan(name, rows, folder / picture)
    else:
        rows.sort(key=lambda row: row["mean_s"])
        title, picture = "Seconds per pass: forward, backward and both", "times.png"
        figures, meaning = COLUMNS, FROM_THE_SAME_PASSES
        draw_times(rows, folder / picture)
    notes = sorted({row["notes"] for row in rows} - {""})  # each begins with "note: "
    write_report(
        folder,
        title,
        figures,
        rows,
        remarks=[*notes, *failed, *compare(rows, earlier)],
        about=about,
        meaning=meaning,
        pictures={picture: title},
    )


def draw_times(rows: Sequence[Row], path: Path) -> None:
    """Draw bars of the mean seconds, in full and in mixed precision."""
    bars = {}
    for row in rows:
        mean, std = row["mean_s"], row["std_s"]
        precision = "mixed precision" if row["mixed_precision"] else "full precision"
        bar = Estimate(mean, mean - std, mean + std)
        bars[f"{label_of(row)}, warm-up {row['warmup_steps']}"] = {precision: bar}
    draw_bars(path, bars, "seconds per pass: mean, and one standard deviation", style=".3g")


def draw_scan(name: str, rows: Sequence[Row], path: Path) -> None:
    """Draw tokens/s and peak memory over the option `name`, a line for each model.

    The rows are sorted by model.
    """
    groups = {label: [*group] for label, group in itertools.groupby(rows, label_of)}
    panels = {
        title: {label: {row[name]: row[figure] for row in group} for label, group in groups.items()}
        for title, figure in (("tokens/s", "tokens_per_sec"), ("peak memory, MB", "peak_memory_mb"))
    }
    draw_panels(path, panels, name, "")
