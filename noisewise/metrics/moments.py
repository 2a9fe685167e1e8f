"""Mean and covariance of features that arrive in batches, on any number of ranks, in float64.

Batches are centred by their own mean before their products are summed, and merged by the formula of Chan, Golub & LeVeque
(1979), so that no difference of large numbers is ever formed and the result hardly depends on how the samples were cut up.
"""

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
