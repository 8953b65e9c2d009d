"""Look up the published figures of a config, and compute factors from them."""

import csv
import functools
import statistics
from pathlib import Path

from pydantic import BaseModel

from measure.ladder.record import Positive, curve, read_columns
from runtime.cli import CONFIG_DIR
from runtime.errors import UserError, in_a_line

REFERENCE = CONFIG_DIR.parent / "logs" / "reference"
PUBLISHED = REFERENCE / "published.csv"  # the published figures of the configs here
NOT_TIMED = 5  # first steps, which published times leave out


class Published(BaseModel, frozen=True):
    """Published figures of a stage; None if there are none."""

    log: Path | None = None  # relative to logs/reference/, or absolute
    device: str | None = None  # the times were measured on it
    ms_per_step: Positive | None = None
    tokens_per_sec: Positive | None = None
    # figures for the same optimizations in the a100 series and in the list of milliseconds gpu_ms
    a100_tokens_per_sec: float | None = None
    gpu_ms: float | None = None

    @property
    def has_run(self) -> bool:
        """True if a log or a speed of this very config was published."""
        return any((self.log, self.ms_per_step, self.tokens_per_sec))


@functools.cache
def published(path: Path) -> Published:
    """Look up the published figures of a config. Raises UserError for a file that has none.

    The file of a user's own config is <stage>.csv beside it, or
    logs/reference/<series>_<stage>.csv: a log, or one row with a speed.
    """
    with open(PUBLISHED, newline="") as file:
        for row in csv.DictReader(file):
            if path == CONFIG_DIR / f"{row['config']}.yaml":
                return Published.model_validate({k: v for k, v in row.items() if v})
    for log in (path.with_suffix(".csv"), REFERENCE / f"{path.parent.name}_{path.stem}.csv"):
        if log.is_file():
            return published_by_a_user(log)
    return Published()


def published_by_a_user(path: Path) -> Published:
    """Read the published figures of a user's own config. Raises UserError."""
    try:
        rows = [*csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines(), strict=True)]
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({in_a_line(error)})") from None
    if not rows or "step" in rows[0]:
        speed = median_of(path)
        if speed is None:
            print(
                f"note: {path}: {len(rows)} steps, of which the first {NOT_TIMED} do not count, so "
                "it has no published speed; one row with ms_per_step or tokens_per_sec is enough"
            )
        return Published(log=path, device="published", tokens_per_sec=speed)
    given = {name: text for name, text in rows[0].items() if text}
    try:
        found = Published.model_validate({"device": "published"} | given)
    except ValueError:
        found = Published()
    if len(rows) > 1 or not (found.ms_per_step or found.tokens_per_sec):
        raise UserError(
            f"{path}: needs one row with a positive ms_per_step or tokens_per_sec, and perhaps a "
            "device; or the columns of log.csv"
        )
    return found


def median_of(log: Path, column: str = "tokens_per_sec") -> float | None:
    """Return the median of a log's speeds, without the first steps; None if it has none."""
    values = [*curve(read_columns(log), column).values()][NOT_TIMED:]
    return statistics.median(values) if values else None


def published_curve(stage: Published) -> dict[int, float]:
    """Return the published losses by step; empty without a log."""
    return curve(read_columns(REFERENCE / stage.log)) if stage.log else {}


def factor(ours: Published, theirs: Published, figure: str) -> float | None:
    """Return the ratio of two published speeds; None if one is missing, or both are the same.

    `figure`: `tokens_per_sec`, `ms_per_step`, or one in another published series of the same
    optimizations, `a100_tokens_per_sec` or `gpu_ms`.
    """
    a, b = getattr(ours, figure), getattr(theirs, figure)
    if not a or not b or a == b:
        return None
    return b / a if "ms" in figure else a / b


def published_factor(ours: Published, theirs: Published) -> float | None:
    """Return the ratio of two published speeds on one device; None if it is not known."""
    if ours.device != theirs.device:
        return None
    # a list of times names no batch, so it has no tokens/s
    return factor(ours, theirs, "tokens_per_sec") or factor(ours, theirs, "ms_per_step")
