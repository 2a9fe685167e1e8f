"""Whether a difference between two samplers is more than the noise between seeds: a paired t-test, and Holm's correction.

Runs with one seed share initial weights, data order and noise, so they are compared in pairs. What is tested is the logarithm
of a pair's ratio: the size of the values drops out. If one of them has no logarithm (a Fréchet distance can come out as 0 or a
little below), the differences are tested instead. With a value that is not finite there is no test at all: leaving the pair out
would reward a sampler for diverging.
"""

import math
import statistics
from collections.abc import Sequence

from noisewise.metrics.uncertainty import two_sided

SIGNIFICANT = 0.05  # what an adjusted p must lie below to call a sampler better or worse
SAME = 0.001  # of the value: pairs that differ by less are ties
SEEDS = 3  # pairs that it needs besides: two seeds can agree by chance


def paired_test(values: Sequence[float], baseline: Sequence[float]) -> float | None:
    """The two-sided p of a paired t-test; None with fewer than two pairs, or where a value is not finite."""
    effects = pair_effects(values, baseline)
    if effects is None or len(effects) < 2:
        return None
    mean, deviation = statistics.fmean(effects), statistics.stdev(effects)
    if deviation == 0:
        return 1.0 if mean == 0 else 0.0
    return two_sided(mean / (deviation / math.sqrt(len(effects))), len(effects) - 1)


def pair_effects(values: Sequence[float], baseline: Sequence[float]) -> list[float] | None:
    """The logarithm of each ratio, or each difference if a value is not positive; below 0 is better than the baseline."""
    pairs = list(zip(values, baseline, strict=True))
    if not all(map(math.isfinite, (*values, *baseline))):
        return None
    if all(value > 0 for value in (*values, *baseline)):
        return [0.0 if mine == theirs else math.log(mine) - math.log(theirs) for mine, theirs in pairs]
    return [mine - theirs for mine, theirs in pairs]


def mean_ratio(values: Sequence[float], baseline: Sequence[float]) -> float | None:
    """The geometric mean of the ratios; None without pairs, or where a value is not finite or not positive."""
    if not values or not all(0 < value < math.inf for value in (*values, *baseline)):
        return None
    return math.exp(statistics.fmean(pair_effects(values, baseline) or ()))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Each p after Holm's step-down adjustment for so many tests; None stays None and does not count as a test."""
    tests = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    largest = 0.0
    for done, (p, i) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - done) * p))
        adjusted[i] = largest
    return adjusted
