"""Sliced Wasserstein distance: the optimal-transport distance along random lines, averaged (Rabin et al. 2011; Bonneel 2015).

Needs no network and no Gaussian: it works on points, on pixels and on features, and on sets of any two sizes.
"""

import torch
from torch import Tensor

from noisewise.metrics.frechet import check_features

BLOCK = 64


def _transport(x: Tensor, y: Tensor, power: float) -> Tensor:
    """The mean over quantiles of |x - y|^power for samples (n, lines) and (m, lines), exactly, also where n is not m."""
    x, y = x.sort(0).values, y.sort(0).values
    n, m = len(x), len(y)
    if n == m:
        return (x - y).abs().pow(power).mean(0)
    # Both quantile functions are constant between consecutive multiples of 1/n and 1/m; in whole multiples of 1/(n m):
    steps = torch.cat([torch.arange(1, n + 1) * m, torch.arange(1, m + 1) * n]).unique().to(x.device)
    widths = torch.diff(steps, prepend=steps.new_zeros(1)).double() / (n * m)
    gaps = x[(steps - 1) // m] - y[(steps - 1) // n]
    return (gaps.abs().pow(power) * widths[:, None]).sum(0)


def sliced_wasserstein(x: Tensor, y: Tensor, lines: int = 512, power: float = 2.0, seed: int = 0) -> float:
    """The distance of two sets of samples (n, ...) and (m, ...), flattened, over `lines` random directions; in float64."""
    if x.ndim < 2 or y.ndim < 2 or x.shape[1:] != y.shape[1:]:
        raise ValueError(f"samples must be (n, ...) and (m, ...) of one shape, got {tuple(x.shape)} and {tuple(y.shape)}")
    x = check_features(x.flatten(1), name="first samples")
    y = check_features(y.flatten(1), name="second samples").to(x.device)
    if min(len(x), len(y)) < 1:
        raise ValueError(f"samples must not be empty, got {len(x)} and {len(y)}")
    if lines < 1 or power < 1:
        raise ValueError(f"lines and power must be >= 1, got {lines} and {power}")
    generator = torch.Generator().manual_seed(seed)
    directions = torch.nn.functional.normalize(torch.randn(lines, x.shape[1], generator=generator, dtype=torch.float64)).to(
        x.device
    )
    costs = [_transport(x @ part.T, y @ part.T, power) for part in directions.split(BLOCK)]
    return float(torch.cat(costs).mean() ** (1 / power))
