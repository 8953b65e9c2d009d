"""A figure with its interval. Does not import torch."""

import math
from dataclasses import dataclass

SAME = (0.95, 1.05)  # an interval inside shows that two speeds differ by less than 5%


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval; without one it comes from a single measurement."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval; without one, the value twice."""
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return low, high

    @property
    def width(self) -> float:
        """The interval's width as a share of the value."""
        return (self.ends[1] - self.ends[0]) / self.value

    @property
    def inverse(self) -> "Estimate":
        """The reciprocal."""
        if self.low is None or self.high is None:
            return Estimate(1 / self.value)
        return Estimate(1 / self.value, 1 / self.high, 1 / self.low)

    @property
    def verdict(self) -> str:
        """The verdict on a factor: `no difference` within 0.95 to 1.05, `unclear` if it
        contains 1 and is wider; empty if it leaves 1 out, or if there is none.
        """
        low, high = self.ends
        if self.low is None or not low <= 1 <= high:
            return ""
        return "no difference" if SAME[0] <= low and high <= SAME[1] else "unclear"

    def __str__(self) -> str:
        """Format a factor, with its verdict: `1.12 (0.96 to 1.28), unclear`."""
        low, high = self.ends
        if self.low is None:
            return f"{self.value:.2f}"
        hides_one = "1.00" in (f"{low:.2f}", f"{high:.2f}") and not low <= 1 <= high
        digits = 3 if high - low < 0.02 or hides_one else 2
        verdict = self.verdict and f", {self.verdict}"
        return f"{self.value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f}){verdict}"

    def __format__(self, style: str) -> str:
        """Format as a factor, or in a style such as ".4f" as a mean: `0.3480 +- 0.0480`."""
        if not style:
            return str(self)
        low, high = self.ends
        half = "" if self.low is None else f" +- {high - self.value:{style}}"
        noise = " (within noise)" if low <= 0 <= high else ""
        return f"{self.value:{style}}{half}{noise}"


def three_digits(value: float) -> str:
    """Format a positive number with at least three digits: `2.39`, `29.2`, `1,234`."""
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"
