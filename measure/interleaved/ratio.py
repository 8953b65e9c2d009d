"""Compare speeds: a median ratio with an interval that assumes no distribution of times."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
FEWEST = 6  # pairs: all of fewer lie on one side of the true median more often than once in 20


@dataclass(frozen=True)
class Ratio:
    """Hold a median ratio and the interval that contains the true one with 95% confidence.

    Without an interval, it is the ratio of two single measurements.
    """

    median: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        low, high = self.ends
        if self.low is None:
            return f"{self.median:.2f}"
        digits = (
            2
            if high - low >= 0.02
            and (low <= 1 <= high or "1.00" not in (f"{low:.2f}", f"{high:.2f}"))
            else 3
        )
        shown = "about 1" if low <= 1 <= high else f"{self.median:.{digits}f}"
        return f"{shown} ({low:.{digits}f} to {high:.{digits}f})"

    @property
    def ends(self) -> tuple[float, float]:
        """Return the interval, which is the ratio itself where it is not known."""
        return (
            self.median if self.low is None else self.low,
            self.median if self.high is None else self.high,
        )

    @property
    def inverse(self) -> "Ratio":
        """Return the ratio of the second to the first."""
        if self.low is None or self.high is None:
            return Ratio(1 / self.median)
        return Ratio(1 / self.median, 1 / self.high, 1 / self.low)

    @property
    def width(self) -> float:
        """Return the interval's width as a share of the median."""
        low, high = self.ends
        return (high - low) / self.median


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the median ratio of independent pairs, at least six, with its interval.

    The interval is that of the sign test: each pair is above or below the true median with even
    odds, so it reaches from the k-th smallest to the k-th largest ratio, with the largest k for
    which fewer than k of them on one side is rare enough (David and Nagaraja, Order Statistics,
    section 7.1). Raises ValueError for too few pairs.
    """
    ordered = sorted(our / their for our, their in zip(ours, theirs, strict=True))
    n = len(ordered)
    if n < FEWEST:
        raise ValueError(f"{n} pairs are too few for an interval: at least {FEWEST}")
    k, tail = 0, 0.5**n  # tail: how likely it is that at most k of n are below the true median
    while 2 * tail <= 1 - CONFIDENCE:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return Ratio(statistics.median(ordered), ordered[k - 1], ordered[n - k])


def product(factors: Sequence[Ratio]) -> Ratio:
    """Return the product of ratios, with its interval, if one of them has one.

    Ratios that share the rounds of a side count as independent too. Below and above the median,
    the logarithms' distances to the ends add up as independent errors do: by the root of the sum
    of their squares.
    """
    median = math.prod(factor.median for factor in factors)
    if all(factor.low is None for factor in factors):
        return Ratio(median)
    below = math.hypot(*(math.log(factor.median / factor.ends[0]) for factor in factors))
    above = math.hypot(*(math.log(factor.ends[1] / factor.median) for factor in factors))
    return Ratio(median, median * math.exp(-below), median * math.exp(above))
