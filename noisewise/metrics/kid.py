"""Kernel Inception distance (Binkowski et al. 2018): the unbiased squared MMD with the kernel (x.y / d + 1)^3.

Unlike FID it has no bias in the number of samples, so small sets can be compared; it may be slightly negative.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.metrics.frechet import check_features


def polynomial_mmd(x: Tensor, y: Tensor) -> Tensor:
    """The unbiased estimate from two sets of features (n, d) and (m, d), n and m at least 2."""
    if min(len(x), len(y)) < 2:
        raise ValueError(f"the unbiased estimate needs at least 2 samples of each, got {len(x)} and {len(y)}")

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / a.shape[1] + 1) ** 3

    def off_diagonal_mean(k: Tensor) -> Tensor:
        return (k.sum() - k.trace()) / (len(k) * (len(k) - 1))

    return off_diagonal_mean(kernel(x, x)) + off_diagonal_mean(kernel(y, y)) - 2 * kernel(x, y).mean()


@dataclass(frozen=True)
class Kid:
    """Mean over subsets and standard deviation between them (of one subset, not of the mean)."""

    mean: float
    std: float
    subsets: int
    size: int


def kid(x: Tensor, y: Tensor, subsets: int = 100, size: int = 1000, seed: int = 0) -> Kid:
    """KID of two sets of features, averaged over random subsets without replacement; in float64.

    Cost: `subsets` times three products of (size, d) by (d, size).
    """
    x = check_features(x, name="first features")
    y = check_features(y, x.shape[1], "second features").to(x.device)
    if subsets < 1:
        raise ValueError(f"subsets must be >= 1, got {subsets}")
    if not 2 <= size <= min(len(x), len(y)):
        raise ValueError(f"size must lie between 2 and the smaller set's {min(len(x), len(y))} samples, got {size}")
    generator = torch.Generator().manual_seed(seed)

    def subset(features: Tensor) -> Tensor:
        return features[torch.randperm(len(features), generator=generator)[:size].to(features.device)]

    values = torch.stack([polynomial_mmd(subset(x), subset(y)) for _ in range(subsets)])
    return Kid(float(values.mean()), float(values.std(unbiased=False)), subsets, size)
