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

import warnings

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
        counts = distributed.gather_rows(torch.tensor([self.count], device=self.mean.device))
        means = distributed.gather_rows(self.mean[None])
        total = Moments(self.dim, self.mean.device)
        for rank, scatter in enumerate(distributed.gather_rows(self.scatter[None])):
            if counts[rank]:
                total._merge(int(counts[rank]), means[rank], scatter)
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
