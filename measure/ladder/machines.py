"""Write the ladders of several machines beside each other, as a page of Markdown."""

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from measure.ladder.explain import what_ran
from measure.ladder.quick import SUFFIX
from measure.ladder.record import Record
from measure.ladder.report import rows_of
from measure.ladder.results import look_up
from measure.ladder.stages import planned_before, with_bases
from measure.ladder.staircase import Staircase, staircase_of
from measure.report.estimate import three_digits
from measure.report.tables import markdown_table
from runtime.errors import UserError
from runtime.files import write_atomic

PAGE = "machines.md"
ABOUT = """# Machines

The speed of each stage over that of the stage that it changes, by machine. In brackets: the
interval of [interleaved runs](measuring.md#interleaved-runs); a factor without one compares single
runs. The last rows are of the fastest stage. [CONTRIBUTING.md](../CONTRIBUTING.md) explains how to
add yours.
"""


def write_machines(folders: Sequence[str], out: Path) -> None:
    """Write machines.md: a table for each ladder, with a column for each of its folders.

    A machine is named after the parent of its ladder's folder. Raises UserError.
    """
    ladders = dict[str, dict[str, Staircase]]()
    sizes = dict[str, str]()
    for folder in map(Path, folders):
        place = Path(os.path.relpath(folder, out))
        heading = f"[{place.parent.name}]({place})"
        ladders.setdefault(folder.name, {})[heading], sizes[heading] = climbed(folder)
    parts = [ABOUT]
    for ladder, machines in ladders.items():
        command = f"python ladder.py {ladder.replace(SUFFIX, ' --quick')}"
        parts.append(f"\n## `{command}`\n\n{table_of(machines, sizes)}\n")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / PAGE, "".join(parts))
    print(f"wrote {out / PAGE}")


def climbed(folder: Path) -> tuple[Staircase, str]:
    """Return the finished stages in a ladder's folder, and the sizes of the fastest.

    Raises UserError if there are none.
    """
    record = Record.load(folder)
    stages = with_bases(planned_before(record))
    results = [look_up(record, stage) for stage in stages]
    if not any(result.run for result in results):
        raise UserError(f"{folder}: no finished stage, so no speed")
    stairs = staircase_of(record, results, rows_of(results))
    return stairs, ", ".join(what_ran(stairs.fastest.stage))


def table_of(machines: Mapping[str, Staircase], sizes: Mapping[str, str]) -> str:
    """Return a table: a column for each machine and the published factors, a row for each stage,
    and below them each machine's fastest stage and `sizes`.
    """
    columns = {name: factors_of(stairs) for name, stairs in machines.items()}
    stages = dict.fromkeys(chain(*columns.values()))
    for name, stairs in machines.items():
        columns[name] |= totals_of(stairs) | {"model, run": sizes[name]}
        for stair in [stair for stair in stairs.stairs if stair.base and stair.published]:
            column = columns.setdefault("published, another GPU", {})
            column[stair.row.title] = f"{stair.published:.2f}"
    rows = dict.fromkeys([*stages, *chain(*columns.values())])
    cells = [[row, *(column.get(row, "") for column in columns.values())] for row in rows]
    return markdown_table(["stage", *columns], cells)


def factors_of(stairs: Staircase) -> dict[str, str]:
    """Return the speed of each stage over its base, by its title."""
    return {stair.row.title: str(stair.factor) for stair in stairs.stairs if stair.base}


def totals_of(stairs: Staircase) -> dict[str, str]:
    """Return figures of the fastest stage beside the first, and of its run."""
    first, best = stairs.stairs[0], stairs.fastest
    values, summary = best.row.values, best.run.summary
    memory = [f"{stair.row.values['peak_memory_mb']:,.0f}" for stair in (first, best)]
    return {
        "fastest over first": str(stairs.total or values["over_first"]),
        stairs.unit: f"{three_digits(first.ms)} to {three_digits(best.ms)}",
        "tokens/s": f"{values['tokens_per_sec']:,.0f}",
        "MFU": f"{values['utilization']:.0%}" if values["utilization"] else "",
        "peak memory, MiB": " to ".join(memory),
        "device": summary.machine if summary.device in (None, "cpu") else str(summary.device),
        "PyTorch, date": f"{summary.torch.partition('+')[0]}, {summary.date}",
    }
