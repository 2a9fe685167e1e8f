"""Quality and diversity apart, by nearest neighbours in feature space.

A sample's ball reaches to its k-th nearest neighbour in its own set (itself left out; a point on the surface is inside).

- precision: the share of generated samples inside some real ball; recall: the reverse (Kynkäänniemi et al. 2019, k = 3).
- density: how many real balls hold a generated sample, over k, may exceed 1; coverage: the share of real balls that hold a
  generated sample (Naeem et al. 2020, k = 5). Less moved by outliers.

Distances are formed a block of rows at a time: memory is block x samples, time samples^2 x dimensions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.metrics.frechet import check_features
from noisewise.precision import full_float32

BLOCK = 1000
OF_PRECISION, OF_DENSITY = 3, 5  # the k of the papers


@dataclass(frozen=True)
class PrecisionRecall:
    """Shares in [0, 1]."""

    precision: float
    recall: float
    k: int


@dataclass(frozen=True)
class DensityCoverage:
    """Density from 0, about 1 for equal distributions; coverage in [0, 1]."""

    density: float
    coverage: float
    k: int


def _blocks(rows: Tensor, columns: Tensor, block: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, squared distances of a block of rows to all columns)."""
    lengths = columns.square().sum(1)
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        squared = torch.addmm(lengths[None], part, columns.T, alpha=-2) + part.square().sum(1, keepdim=True)
        yield start, squared.clamp_min_(0)


def radii(features: Tensor, k: int, block: int = BLOCK) -> Tensor:
    """The squared distance of each sample to its k-th nearest neighbour, itself left out."""
    found = []
    for start, squared in _blocks(features, features, block):
        squared[torch.arange(len(squared)), torch.arange(start, start + len(squared))] = torch.inf
        found.append(squared.topk(k, largest=False).values[:, -1])
    return torch.cat(found)


def _balls_around(centres: Tensor, radius: Tensor, points: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """How many balls each point lies in, and how many points lie in each ball."""
    per_point, per_ball = [], torch.zeros(len(centres), dtype=torch.long, device=centres.device)
    for _, squared in _blocks(points, centres, block):
        inside = squared <= radius
        per_point.append(inside.sum(1))
        per_ball += inside.sum(0)
    return torch.cat(per_point), per_ball


def _prepared(real: Tensor, generated: Tensor, k: int, block: int) -> tuple[Tensor, Tensor]:
    """Both sets in float32 around the real mean, where squared lengths are small and lose few digits."""
    real = check_features(real, name="real features")
    generated = check_features(generated, real.shape[1], "generated features").to(real.device)
    if not 1 <= k < min(len(real), len(generated)):
        raise ValueError(f"k must be at least 1 and below the smaller set's {min(len(real), len(generated))} samples, got {k}")
    if block < 1:
        raise ValueError(f"block must be >= 1, got {block}")
    centre = real.mean(0)
    return (real - centre).float(), (generated - centre).float()


def precision_recall(real: Tensor, generated: Tensor, k: int = OF_PRECISION, block: int = BLOCK) -> PrecisionRecall:
    """Improved precision and recall of generated against real features."""
    real, generated = _prepared(real, generated, k, block)
    with full_float32():
        in_real, _ = _balls_around(real, radii(real, k, block), generated, block)
        in_generated, _ = _balls_around(generated, radii(generated, k, block), real, block)
    return PrecisionRecall(float((in_real > 0).double().mean()), float((in_generated > 0).double().mean()), k)


def density_coverage(real: Tensor, generated: Tensor, k: int = OF_DENSITY, block: int = BLOCK) -> DensityCoverage:
    """Density and coverage of generated against real features."""
    real, generated = _prepared(real, generated, k, block)
    with full_float32():
        balls, points = _balls_around(real, radii(real, k, block), generated, block)
    return DensityCoverage(float(balls.double().mean()) / k, float((points > 0).double().mean()), k)
