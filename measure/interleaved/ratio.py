"""Estimates with 95% intervals: median ratios of speeds, products of ratios, means over seeds."""

import math
import statistics
from collections.abc import Sequence

from runtime.report import Estimate

CONFIDENCE = 0.95
FEWEST = 6  # pairs with an interval: 5 all fall on one side of the true median in 1 of 16 cases


# Student's t: half width of a mean's 95% interval in standard errors, for 1 to 9 degrees of freedom
# (one less than the seeds). More degrees use the last, which is a little too wide.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Return the median ratio of independent pairs, at least six, with its interval.

    The interval inverts the sign test: each pair is above or below the true median with even odds,
    so the interval reaches from the k-th smallest to the k-th largest ratio, with the largest k for
    which fewer than k of them on one side is rare enough (David and Nagaraja, Order Statistics,
    section 7.1).
    """
    ordered = sorted(our / their for our, their in zip(ours, theirs, strict=True))
    n = len(ordered)
    k, tail = 0, 0.5**n  # tail: the probability that at most k of n are below the true median
    while 2 * tail <= 1 - CONFIDENCE:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return Estimate(statistics.median(ordered), ordered[k - 1], ordered[n - k])


def product(factors: Sequence[Estimate]) -> Estimate:
    """Multiply ratios; the product has an interval if each has one (exactly 1 needs none).

    Ratios that share a side's rounds are treated as independent too. The logarithms' distances from
    the value to each end add up as independent errors do: the root of the sum of their squares.
    """
    value = math.prod(factor.value for factor in factors)
    inexact = [factor for factor in factors if factor != Estimate(1.0)]
    if not inexact or any(factor.low is None for factor in inexact):
        return Estimate(value)
    below = math.hypot(*(math.log(factor.value / factor.ends[0]) for factor in factors))
    above = math.hypot(*(math.log(factor.ends[1] / factor.value) for factor in factors))
    return Estimate(value, value * math.exp(-below), value * math.exp(above))


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value; its interval is Student's, none for one value."""
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return Estimate(mean)
    t = STUDENT_T[min(n, len(STUDENT_T) + 1) - 2]
    half = t * statistics.stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half)
