"""Look up the results of stages in a ladder's record, and explain why some are left out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from measure.interleaved.comparison import Comparison
from measure.ladder.record import DIRTY, FILE, Prediction, Record, Run, differences
from measure.ladder.stages import Stage
from measure.report.report import Report, write_report


@dataclass
class Result:
    """The finished run of a stage, its comparison with its base, and its prediction.

    None: the record has none with these very settings, and this number of ranks.
    """

    stage: Stage
    run: Run | None = None
    comparison: Comparison | None = None
    prediction: Prediction | None = None
    notes: list[str] = field(default_factory=list)  # each names a left-out result and the reason


def look_up(record: Record, stage: Stage) -> Result:
    """Return the result of a stage."""
    found, own = Result(stage), stage.config
    if run := record.runs.get(stage.name):
        ranks, differing = run.summary.world_size, differences([run.config], [own])
        if not differing and ranks != stage.ranks:
            differing = f"ranks {ranks} there, {stage.ranks} here"
        if differing:
            found.notes.append(f"note: {stage.name} is left out: {differing}")
        else:
            found.run = run
    comparison = record.comparisons.get(stage.key)
    if comparison and stage.base:
        differing = differences(comparison.settings, [stage.base.config, own])
        if differing and not found.notes:
            found.notes.append(
                f"note: the interleaved rounds of {stage.key} are left out: {differing}"
            )
        elif not differing and stage.is_interleaved:
            found.comparison = comparison
    prediction = record.predicted.stages.get(stage.name)
    # ladders before 2026-11-26 lack the settings
    if prediction and prediction.settings and differences([prediction.settings], [own]):
        prediction = None
    found.prediction = prediction if stage.ranks == 1 else None
    return found


def write_results(record: Record, results: Sequence[Result], report: Report) -> None:
    """Write a report with the failures of this climb, the results that are left out, the machines
    and the changed files.

    Raises TrainingError without rows; it has the reason.
    """
    remarks = [*record.failures, *chain(*(result.notes for result in results)), *report.remarks]
    has = [*record.runs, *(f"rounds of {name}" for name in record.comparisons)]
    if has and not report.rows and not remarks:
        lacks = [result.stage.key for result in results if not (result.run or result.comparison)]
        remarks.append(f"note: {FILE} has {shortened(has)}, but lacks {shortened(lacks)}")
    about = [*report.about, *uncommitted(record)]
    write_report(replace(report, remarks=remarks, about=about))


def uncommitted(record: Record) -> Iterator[str]:
    """Yield a line for each commit that was changed when it made results: its changed files."""
    origins = [*(run.summary for run in record.runs.values()), *record.comparisons.values()]
    for commit in dict.fromkeys(origin.git for origin in origins):
        if commit and commit.endswith(DIRTY):
            known = record.changes.get(commit, [])
            files = shortened([*dict.fromkeys(chain(*(changes.files for changes in known)))])
            yield f"{commit}: " + (
                f"with changes to {files}; the diff is in {FILE}"
                if known
                else "its changes to the commit were not kept"
            )


def shortened(names: Sequence[str], most: int = 6) -> str:
    """Return names in a line, at most `most` of them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
