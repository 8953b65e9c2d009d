"""Estimates with 95% intervals: median ratios of speeds, products of ratios, means over seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence

from measure.report.estimate import Estimate

CONFIDENCE = 0.95
FEWEST = 6  # pairs with an interval: 5 all fall on one side of the true median in 1 of 16 cases


STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 1 to 9 degrees


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


def means_over_seeds(groups: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    """Return the mean of each group, a figure of one stage with several seeds, with its interval.

    The interval is Student's with the variance pooled over the groups, as three seeds are too few
    to estimate one. Where the groups' variances differ, it is too wide for some and too narrow for
    others. No interval if every group has one value.
    """
    means = {name: statistics.fmean(values) for name, values in groups.items()}
    squares = [(value - means[name]) ** 2 for name, values in groups.items() for value in values]
    freedom = len(squares) - len(groups)
    if freedom == 0:
        return {name: Estimate(mean) for name, mean in means.items()}
    of_one = student_t(freedom) * math.sqrt(sum(squares) / freedom)  # half an interval
    halves = {name: of_one / math.sqrt(len(values)) for name, values in groups.items()}
    return {name: Estimate(m, m - halves[name], m + halves[name]) for name, m in means.items()}


def student_t(freedom: int) -> float:
    """Return the half width of a mean's 95% interval in standard errors, by degrees of freedom.

    More than the table has: the expansion about the normal distribution in Abramowitz and Stegun,
    Handbook of Mathematical Functions, 26.7.5.
    """
    if freedom <= len(STUDENT_T):
        return STUDENT_T[freedom - 1]
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + (z**3 + z) / (4 * freedom) + second + third
