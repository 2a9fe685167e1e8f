"""The Fréchet distance of two Gaussians, |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), which on Inception features is FID.

No matrix square root is taken. With C1 = A A^T and C2 = B B^T for any factors A and B, the trace of the root is the sum of the
singular values of A^T B, so the cheapest factor will do: Cholesky's for a covariance of full rank, else eigenvectors with the
null space cut off.

Between two full factors the singular values come from the eigenvalues of their squares, in half the time. Where a factor is
narrow they are computed directly: the many zeros stay zeros, as the square roots of rounding errors would not.

`Moments` are mean and covariance of features that arrive in batches, on any number of ranks, in float64. Batches are centred by
their own mean before their products are summed, and merged by the formula of Chan, Golub & LeVeque (1979), so that no
difference of large numbers is ever formed and the result hardly depends on how the samples were cut up.
"""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise import distributed

BLOCK = 8192


def check_features(features: Tensor, dim: int | None = None, name: str = "features") -> Tensor:
    """`features` in float64, if they are finite rows of numbers (of length `dim`)."""
    if features.ndim != 2 or features.shape[1] == 0:
        raise ValueError(f"{name} must be (samples, dimensions), got {tuple(features.shape)}")
    if not features.is_floating_point():
        raise TypeError(f"{name} must be floating-point, got {features.dtype}")
    if dim is not None and features.shape[1] != dim:
        raise ValueError(
            f"{name} have {features.shape[1]} dimensions where {dim} are needed: were they made by another network?"
        )
    if not bool(torch.isfinite(features).all()):
        rows = int((~torch.isfinite(features)).any(1).sum())
        raise ValueError(f"{rows} of {len(features)} {name} hold NaN or infinite values: look for broken images")
    return features.double()


class Moments:
    """Streaming mean and covariance (with n - 1) of vectors of `dim` numbers."""

    def __init__(self, dim: int, device: torch.device | str = "cpu") -> None:
        if dim < 1:
            raise ValueError(f"dim must be >= 1, got {dim}")
        self.dim, self.count = dim, 0
        self.mean = torch.zeros(dim, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, features: Tensor) -> "Moments":
        """The moments of one set of features, taken in blocks so that no float64 copy of the whole is made."""
        if features.ndim != 2:
            raise ValueError(f"features must be (samples, dimensions), got {tuple(features.shape)}")
        moments = cls(features.shape[1], features.device)
        for block in features.split(BLOCK):
            moments.update(block)
        return moments

    def update(self, features: Tensor) -> None:
        """Take in a batch (n, dim)."""
        rows = check_features(features, self.dim).to(self.mean.device)
        if len(rows):
            mean = rows.mean(0)
            centred = rows - mean
            self._merge(len(rows), mean, centred.T @ centred)

    def merge(self, other: "Moments") -> None:
        """Take in all that another has seen."""
        if other.dim != self.dim:
            raise ValueError(f"cannot merge moments of {other.dim} dimensions into moments of {self.dim}")
        if other.count:
            self._merge(other.count, other.mean.to(self.mean.device), other.scatter.to(self.mean.device))

    def _merge(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        total = self.count + count
        shift = mean - self.mean
        self.scatter = self.scatter + scatter + torch.outer(shift, shift) * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.count = total

    def synchronised(self) -> "Moments":
        """The moments of what all ranks have seen, the same bits on every rank; without a process group a copy.

        Every rank must call it, also one that has seen nothing.
        """
        total = Moments(self.dim, self.mean.device)
        own = torch.tensor(self.count, device=self.mean.device), self.mean, self.scatter
        for count, mean, scatter in zip(*map(distributed.of_ranks, own), strict=True):
            if count:
                total._merge(int(count), mean, scatter)
        return total

    @property
    def cov(self) -> Tensor:
        """The covariance (dim, dim), divided by n - 1."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 samples, got {self.count}")
        return self.scatter / (self.count - 1)


def _factor(cov: Tensor) -> Tensor:
    """A with A A^T = cov, without columns for its null space."""
    lower, failed = torch.linalg.cholesky_ex(cov)
    if int(failed) == 0:
        return lower
    values, vectors = torch.linalg.eigh(cov)
    kept = values > values[-1].clamp_min(0) * len(cov) * torch.finfo(values.dtype).eps
    return vectors[:, kept] * values[kept].sqrt()


def _root_trace(first: Tensor, second: Tensor) -> Tensor:
    """tr (C1 C2)^(1/2) from factors (d, r1) and (d, r2)."""
    product = first.T @ second
    if product.shape == (len(first), len(first)):
        return torch.linalg.eigvalsh(product @ product.T).clamp_min(0).sqrt().sum()
    return torch.linalg.svdvals(product).sum()


def _check_gaussian(mean: Tensor, cov: Tensor, which: str) -> tuple[Tensor, Tensor]:
    if mean.ndim != 1 or cov.shape != (len(mean), len(mean)):
        shapes = f"{tuple(mean.shape)} and {tuple(cov.shape)}"
        raise ValueError(f"the {which} mean and covariance must be (d,) and (d, d), got {shapes}")
    if not bool(torch.isfinite(mean).all() and torch.isfinite(cov).all()):
        raise ValueError(f"the {which} mean or covariance holds NaN or infinite values")
    mean, cov = mean.double(), cov.double()
    size = float(cov.diagonal().abs().max())
    if float((cov - cov.T).abs().max()) > 1e-6 * size or float(cov.diagonal().min()) < -1e-6 * size:
        raise ValueError(f"the {which} covariance is not one: it must be symmetric, with no negative variance")
    return mean, (cov + cov.T) / 2


def frechet_distance(mean1: Tensor, cov1: Tensor, mean2: Tensor, cov2: Tensor) -> float:
    """The Fréchet distance of two Gaussians given by mean (d,) and covariance (d, d), in float64."""
    mean1, cov1 = _check_gaussian(mean1, cov1, "first")
    mean2, cov2 = _check_gaussian(mean2, cov2, "second")
    if len(mean1) != len(mean2):
        raise ValueError(f"the Gaussians have {len(mean1)} and {len(mean2)} dimensions: were they made by two networks?")
    trace = cov1.trace() + cov2.trace() - 2 * _root_trace(_factor(cov1), _factor(cov2))
    return max(0.0, float((mean1 - mean2).square().sum() + trace))  # clamped at 0 against rounding


def moments_distance(first: Moments, second: Moments) -> float:
    """The Fréchet distance of two sets of samples seen by `Moments`; warns where they are fewer than their dimensions."""
    for moments in (first, second):
        warn_if_few(moments.count, moments.dim)
    return frechet_distance(first.mean, first.cov, second.mean, second.cov)


def features_distance(first: Tensor, second: Tensor) -> float:
    """The Fréchet distance of two sets of features (n, d) and (m, d)."""
    first = check_features(first, name="first features")
    second = check_features(second, first.shape[1], "second features").to(first.device)
    return moments_distance(Moments.of(first), Moments.of(second))


def warn_if_few(count: int, dim: int) -> None:
    """Warn that a covariance of fewer samples than dimensions is singular and its distances biased upwards."""
    if count <= dim:
        warnings.warn(
            f"{count} samples for {dim} dimensions: the Fréchet distance is far too high at this size; compare it only "
            "with others of the same size, and use tens of thousands of samples for figures",
            stacklevel=3,
        )


# How far a distance can be trusted ------------------------------------------------------------------------------------


# Its spread over resamples, and its value at infinitely many samples, need the features, not only their moments. Each resample
# or size costs one covariance (n d^2) and one distance: about 1 s for 2,048 dimensions on two cores (benchmarks/frechet_cost).
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
