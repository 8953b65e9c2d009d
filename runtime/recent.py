"""Tell which figures of a step are far from those of the steps before it."""

import statistics
from collections import deque
from collections.abc import Iterable

import numpy as np

WINDOW = 128  # steps
SIGMAS = 6.0  # standard deviations above the mean, from which a loss or norm is a spike
SLOW = 3.0  # times the median, from which a step is slow
FEWEST = 16  # times that make a median


class Recent:
    """Hold loss and norm of the last 128 steps, which a checkpoint keeps, and their seconds."""

    def __init__(self, figures: Iterable[tuple[float, float]] = ()):
        self.figures = deque(figures, maxlen=WINDOW)
        self._seconds = deque[float](maxlen=WINDOW)

    def spikes(self, loss: float, norm: float) -> list[str]:
        """Return in words which of the two is far above those of the last 128 steps."""
        if len(self.figures) < WINDOW:
            return []
        means, deviations = np.mean(self.figures, axis=0), np.std(self.figures, axis=0)
        return [
            f"{name} {value:.4f}, {(value - mean) / deviation:.0f} standard deviations above the "
            f"mean {mean:.4f} of the last {WINDOW} steps"
            for name, value, mean, deviation in zip(
                ("loss", "norm"), (loss, norm), means, deviations, strict=True
            )
            if value - mean > SIGMAS * deviation > 0
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
