"""Find figures of a step that are far from the recent steps' figures."""

import statistics
from collections import deque
from collections.abc import Iterable

import numpy as np

WINDOW = 128  # steps
NO_LIMITS = 2 * [np.finfo(np.float32).max.item()]
SIGMAS = 6.0  # standard deviations above the mean, from which a loss or norm is a spike
SLOW = 3.0  # times the median, from which a step is slow
FEWEST = 16  # times that make a median


class Recent:
    """Loss and norm of the last 128 steps, which a checkpoint keeps, and their seconds."""

    def __init__(self, figures: Iterable[tuple[float, float]] = ()):
        self.figures = deque(figures, maxlen=WINDOW)
        self._seconds = deque[float](maxlen=WINDOW)

    def limits(self) -> list[float]:
        """Return the loss and the norm above which the next step is a spike, rounded to float32.

        So a device that compares in float32 agrees with `spikes`.
        """
        if len(self.figures) < WINDOW:
            return NO_LIMITS
        means, deviations = np.mean(self.figures, axis=0), np.std(self.figures, axis=0)
        limits = np.where(deviations > 0, means + SIGMAS * deviations, NO_LIMITS)
        return limits.astype(np.float32).tolist()

    def spikes(self, loss: float, norm: float) -> list[str]:
        """Return a line for each of the two that is above its limit."""
        seen = zip(*self.figures, strict=True)
        return [
            f"{name} {value:.4f}, {(value - np.mean(others)) / np.std(others):.0f} standard "
            f"deviations above the mean {np.mean(others):.4f} of the last {WINDOW} steps"
            for name, value, limit, others in zip(
                ("loss", "norm"), (loss, norm), self.limits(), seen, strict=False
            )
            if value > limit
        ]

    def slowness(self, seconds: float) -> list[str]:
        """Return a line on a step that took far longer than the last ones."""
        median = statistics.median(self._seconds) if len(self._seconds) >= FEWEST else seconds
        if seconds <= SLOW * median:
            return []
        return [f"took {seconds:.2f} s, {seconds / median:.1f} times the median of the last steps"]

    def add(self, loss: float, norm: float, seconds: float) -> None:
        """Add a step's figures; loss and norm only if both are finite."""
        if np.isfinite(loss + norm):
            self.figures.append((loss, norm))
        self._seconds.append(seconds)
