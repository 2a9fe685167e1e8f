"""How far a Fréchet distance can be trusted: its spread over resamples, and its value at infinitely many samples.

Both need the features, not only their moments. The cost of each resample or size is one covariance (n d^2) and one Fréchet
distance (about 1 s for 2,048 dimensions on two cores; `benchmarks/frechet_cost.py` measures it).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.metrics.frechet import Moments, check_features, frechet_distance

LEVEL = 0.95  # of intervals
POINTS = 15  # sizes that a line is fitted to


@dataclass(frozen=True)
class Interval:
    """A distance with its bootstrap spread."""

    value: float
    low: float
    high: float
    std: float
    level: float
    resamples: int


def _subset_distance(features: Tensor, rows: Tensor, mean: Tensor, cov: Tensor) -> float:
    moments = Moments.of(features[rows.to(features.device)])
    return frechet_distance(moments.mean, moments.cov, mean.to(moments.mean.device), cov.to(moments.mean.device))


def bootstrap(features: Tensor, mean: Tensor, cov: Tensor, resamples: int = 20, seed: int = 0) -> Interval:
    """The distance of `features` to a reference and an interval for it.

    A resample holds fewer distinct samples than the original, so its distance is biased upwards; the spread of the resamples
    is therefore taken around their own mean and laid around the original's distance. Its limits are those of Student's t: the
    outermost of so few resamples would lie too near. The reference is held fixed.
    """
    if resamples < 2:
        raise ValueError(f"resamples must be >= 2, got {resamples}")
    check_features(features, len(mean))
    value = _subset_distance(features, torch.arange(len(features)), mean, cov)
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randint(len(features), (len(features),), generator=generator) for _ in range(resamples)]
    values = torch.tensor([_subset_distance(features, rows, mean, cov) for rows in draws], dtype=torch.float64)
    deviation = float(values.std())
    reach = t_quantile(LEVEL, resamples - 1) * deviation
    return Interval(value, max(0.0, value - reach), value + reach, deviation, LEVEL, resamples)


def standard_error(features: Tensor, mean: Tensor, cov: Tensor) -> float:
    """How far other samples of the same model would move the distance of `features` to a reference: its standard error.

    From the first-order change of the distance with each sample (the delta method), so it costs about one distance where
    `bootstrap` costs many. The derivative with respect to the mean m is 2 (m - mean), with respect to the covariance S it is
    I - T, with T = S^-1/2 (S^1/2 cov S^1/2)^1/2 S^-1/2 the optimal map between the two Gaussians.
    """
    check_features(features, len(mean))
    x = features.double()
    own = x.mean(0)
    x = x - own
    values, vectors = torch.linalg.eigh(x.T @ x / (len(x) - 1))
    values = values.clamp(min=float(values[-1]) * 1e-12)  # there may be fewer samples than dimensions
    root = (vectors * values.sqrt()) @ vectors.T
    inverse = (vectors / values.sqrt()) @ vectors.T
    inner, turned = torch.linalg.eigh(root @ cov.to(x) @ root)
    there = inverse @ (turned * inner.clamp(min=0).sqrt()) @ turned.T @ inverse
    change = 2 * x @ (own - mean.to(x)) + (x * (x - x @ there)).sum(1)
    return float(change.std() / len(x) ** 0.5)


@dataclass(frozen=True)
class Extrapolation:
    """The intercept at 1/N = 0 and the points it was fitted to."""

    value: float
    slope: float
    sizes: tuple[int, ...]
    distances: tuple[float, ...]


def fid_infinity(features: Tensor, mean: Tensor, cov: Tensor, smallest: int | None = None, seed: int = 0) -> Extrapolation:
    """FID at infinitely many samples (Chong & Forsyth 2020): a line through FID against 1/N, read at 0.

    Sizes are spaced evenly from `smallest` (a tenth of the samples, but more than the dimensions, if not given) to all samples,
    each a random subset.
    """
    check_features(features, len(mean))
    n, dim = features.shape
    smallest = max(n // 10, dim + 1) if smallest is None else smallest
    if not 2 <= smallest < n:
        raise ValueError(f"sizes must grow from 2 or more to the number of samples, got {smallest} to {n}: use more samples")
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.linspace(smallest, n, POINTS, dtype=torch.float64).round().long().tolist()
    subsets = [torch.randperm(n, generator=generator)[:size] for size in sizes]
    distances = [_subset_distance(features, rows, mean, cov) for rows in subsets]
    design = torch.stack([torch.ones(POINTS, dtype=torch.float64), 1 / torch.tensor(sizes, dtype=torch.float64)], 1)
    intercept, slope = torch.linalg.lstsq(design, torch.tensor(distances, dtype=torch.float64)[:, None]).solution[:, 0].tolist()
    return Extrapolation(intercept, slope, tuple(sizes), tuple(distances))


# Student's t without scipy: the probability of its tails, and where they begin ----------------------------------------


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
