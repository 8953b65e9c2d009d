"""The life of a step, from the device to the log: started, read, judged, logged."""

import contextlib
import math
import statistics
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from run.log import RunLog
from run.save import hint, save
from run.state import Figures, Run
from runtime.clock import mark_time, seconds_between
from runtime.console import log
from runtime.errors import TrainingError

SLOW = 3.0  # times the median, from which a step is slow
WINDOW, FEWEST = 128, 16  # the most and the fewest earlier steps that make a median


class PendingStep(NamedTuple):
    """A step that has been started; a GPU may still compute it."""

    step: int  # from 1
    figures: Figures  # numbers, and tensors () on the device
    values: Tensor  # those tensors' values, on the CPU; complete at `end`
    start: Any  # marks in the device's work, see `mark_time`
    end: Any


class StepRow(NamedTuple):
    """A step whose figures are read."""

    step: int  # from 1
    figures: dict[str, float]  # the key is the name in the log
    loss_scale: float  # fp16's, after the update
    seconds: float  # since the run's first step began, when this one had been started
    asked: bool  # a rank was asked to stop


def pending_step(step: int, figures: Figures, start: Any) -> PendingStep:
    """Start to copy a step's figures from the device, without waiting for them."""
    tensors = [figure for figure in figures.values() if isinstance(figure, Tensor)]
    values = torch.stack(tensors).to("cpu", non_blocking=True)
    return PendingStep(step, figures, values, start, mark_time(tensors[0].device))


def read_step(pending: PendingStep, tokens: int) -> StepRow:
    """Wait until the step is complete; returns its figures. `tokens`: the step's, of all ranks."""
    dt_ms = seconds_between(pending.start, pending.end) * 1e3
    values = iter(pending.values.tolist())
    figures = {
        name: next(values) if isinstance(figure, Tensor) else figure
        for name, figure in pending.figures.items()
    }
    loss_scale, asked = figures.pop("loss_scale", 1.0), figures.pop("asked") > 0
    seconds = figures.pop("seconds")
    figures |= {"dt_ms": dt_ms, "tokens_per_sec": tokens / dt_ms * 1e3}
    return StepRow(pending.step, figures, loss_scale, seconds, asked)


def judge(row: StepRow, run: Run) -> list[str]:
    """Count a step in the run's state, and why its update was skipped; returns notes on it.

    Raises TrainingError after more updates with a loss or norm that is not finite than
    `skip_nonfinite`. An overflow in fp16 does not count: the scaler halves its scale. If that does
    not help, the model is at fault.
    """
    config, state, figures = run.config, run.state, row.figures
    loss, norm, seconds = figures["loss"], figures["norm"], figures["dt_ms"] / 1e3
    notes = slowness(seconds, state.step_seconds)
    state.step_seconds.append(seconds)
    state.last_loss, state.problem = loss, ""
    if config.max_minutes:  # a GPU's run knows the time of the step before the latest one
        state.seconds = row.seconds
    if math.isfinite(loss + norm):
        return notes
    state.skipped_steps += 1
    if config.fp16 and math.isfinite(loss) and row.loss_scale >= 0.5:
        state.skipped_overflows += 1
        state.problem = "its gradients overflow in fp16"
        return [f"fp16 overflow, update skipped; loss scale now {row.loss_scale:.10g}", *notes]
    count = state.skipped_steps - state.skipped_overflows
    state.problem = "its loss or norm is not finite"
    found = f"the loss is {loss}, the gradient norm {norm}, the learning rate {figures['lr']:g}"
    if count > config.skip_nonfinite:
        instead = ", or bf16 instead of fp16" if config.fp16 else ""
        raise TrainingError(f"step {row.step}: {found}; {hint(run)}{instead}")
    return [f"{found}: skipped, {count} of at most {config.skip_nonfinite}", *notes]


def slowness(seconds: float, before: Sequence[float]) -> list[str]:
    """Return a note on a step that took far longer than the last ones."""
    median = statistics.median(before[-WINDOW:]) if len(before) >= FEWEST else seconds
    if seconds <= SLOW * median:
        return []
    return [f"took {seconds:.2f} s, {seconds / median:.1f} times the median of the last steps"]


def finish_step(pending: PendingStep, run: Run, runlog: RunLog) -> bool:
    """Read a step, judge it and log it if it is due; returns whether a rank was asked to stop.

    Raises TrainingError if training cannot continue.
    """
    row = read_step(pending, run.tokens_per_step)
    notes = judge(row, run)
    ends = row.step == run.state.step and (row.asked or run.is_over)
    if ends or run.state.problem or row.step == 1 or row.step % run.config.log_every == 0:
        runlog.log(row.step, row.figures)
        for line in run.expected.add(row.step, row.figures["loss"]):
            log.info(line)
    for note in notes:
        log.info(f"step {row.step}: {note}")
    return row.asked


def rescue(
    error: Exception,
    pending: PendingStep | None,
    random_state: dict[str, Any],
    run: Run,
    runlog: RunLog,
) -> None:
    """Log and save the last complete step after an error, which gets a note if that fails.

    `random_state`: this process's after that step. Nothing is saved if the step's update has begun,
    or on one of several ranks, as the others may be gone: then the last checkpoint counts.
    """
    if run.state.is_updating or run.world.distributed:
        return
    try:
        # The traceback holds the step's activations, and memory may be short.
        traceback.clear_frames(error.__traceback__)
        with contextlib.suppress(OSError):  # the disk may be full
            if pending:
                finish_step(pending, run, runlog)
        save(run, random_state)
    except Exception as another:
        error.add_note(f"the state after step {run.state.step} could not be saved: {another}")
