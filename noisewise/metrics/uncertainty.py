"""How far a Fréchet distance can be trusted: its spread over resamples, and its value at infinitely many samples.

Both need the features, not only their moments. The cost of each resample or size is one covariance (n d^2) and one Fréchet
distance (about 1 s for 2,048 dimensions on two cores; `benchmarks/frechet_cost.py` measures it).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.metrics.frechet import frechet_distance
from noisewise.metrics.moments import Moments, check_features
from noisewise.metrics.student import t_quantile


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


def bootstrap(features: Tensor, mean: Tensor, cov: Tensor, resamples: int = 20, level: float = 0.95, seed: int = 0) -> Interval:
    """The distance of `features` to a reference and an interval for it.

    A resample holds fewer distinct samples than the original, so its distance is biased upwards; the spread of the resamples
    is therefore taken around their own mean and laid around the original's distance. Its limits are those of Student's t: the
    outermost of so few resamples would lie too near. The reference is held fixed.
    """
    if resamples < 2:
        raise ValueError(f"resamples must be >= 2, got {resamples}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    check_features(features, len(mean))
    value = _subset_distance(features, torch.arange(len(features)), mean, cov)
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randint(len(features), (len(features),), generator=generator) for _ in range(resamples)]
    values = torch.tensor([_subset_distance(features, rows, mean, cov) for rows in draws], dtype=torch.float64)
    deviation = float(values.std())
    reach = t_quantile(level, resamples - 1) * deviation
    return Interval(value, max(0.0, value - reach), value + reach, deviation, level, resamples)


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


def fid_infinity(
    features: Tensor, mean: Tensor, cov: Tensor, points: int = 15, smallest: int | None = None, seed: int = 0
) -> Extrapolation:
    """FID at infinitely many samples (Chong & Forsyth 2020): a line through FID against 1/N, read at 0.

    Sizes are spaced evenly from `smallest` (a tenth of the samples, but more than the dimensions, if not given) to all samples,
    each a random subset.
    """
    check_features(features, len(mean))
    n, dim = features.shape
    smallest = max(n // 10, dim + 1) if smallest is None else smallest
    if points < 2:
        raise ValueError(f"points must be >= 2: a line needs two, got {points}")
    if not 2 <= smallest < n:
        raise ValueError(f"sizes must grow from 2 or more to the number of samples, got {smallest} to {n}: use more samples")
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.linspace(smallest, n, points, dtype=torch.float64).round().long().tolist()
    subsets = [torch.randperm(n, generator=generator)[:size] for size in sizes]
    distances = [_subset_distance(features, rows, mean, cov) for rows in subsets]
    design = torch.stack([torch.ones(points, dtype=torch.float64), 1 / torch.tensor(sizes, dtype=torch.float64)], 1)
    intercept, slope = torch.linalg.lstsq(design, torch.tensor(distances, dtype=torch.float64)[:, None]).solution[:, 0].tolist()
    return Extrapolation(intercept, slope, tuple(sizes), tuple(distances))
