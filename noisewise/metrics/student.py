"""Student's t without scipy: the probability of its tails, and where they begin."""

import math


def t_quantile(level: float, freedom: float) -> float:
    """The t with P(|T| < t) = level, by halving."""
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > 1 - level:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, freedom) > 1 - level else (low, middle)
    return high


def two_sided(t: float, freedom: float) -> float:
    """P(|T| >= |t|) for Student's t with so many degrees of freedom: the incomplete beta function I_x(freedom / 2, 1 / 2)."""
    square = t * t
    x, rest = freedom / (freedom + square), 1 / (1 + freedom / square) if square else 0.0
    a, b = freedom / 2, 0.5
    if x == 0 or rest == 0:
        return float(rest == 0)
    # the series is short below the mean of the beta distribution; on the other side, that of the complement is
    return _incomplete_beta(x, rest, a, b) if x < (a + 1) / (a + b + 2) else 1 - _incomplete_beta(rest, x, b, a)


def _incomplete_beta(x: float, rest: float, a: float, b: float) -> float:
    """I_x(a, b) by a series whose terms are all positive; `rest` is 1 - x without its rounding."""
    term = total = 1.0
    k = 0
    while term > 1e-17 * total:
        term *= (a + b + k) / (a + 1 + k) * x
        total += term
        k += 1
    log_front = a * math.log(x) + b * math.log(rest) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_front) / a * total
