"""The way from noise to data: levels (alpha, sigma), and what a step from one to the next is made of.

With x = alpha x0 + sigma noise at a level, an estimate of x0 fixes one of the noise, and both are all a step needs. Nothing
here divides by the alpha a step starts from, which is zero at pure noise; sigma is zero only at the very end.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from noisewise.processes import Process

Denoise = Callable[[Tensor, Tensor], Tensor]
"""(x, u) -> the estimate of x0; u is a float64 tensor with no dimensions, on the CPU."""


class Level(NamedTuple):
    alpha: float
    sigma: float

    @property
    def half_log_snr(self) -> float:
        """ln(alpha / sigma), infinite at pure noise and at pure data."""
        if self.alpha == 0 or self.sigma == 0:
            return math.inf if self.alpha else -math.inf
        return math.log(self.alpha) - math.log(self.sigma)


DATA = Level(1.0, 0.0)


@dataclass(frozen=True)
class Step:
    """From one level to the next, which has less noise; `number` counts from 1 and names the step's own draw of noise."""

    number: int
    u: Tensor
    now: Level
    then: Level
    u_then: Tensor | None


@dataclass(frozen=True)
class Path:
    """What a method is given besides x."""

    process: Process
    u: Tensor
    denoise: Denoise
    noise: Callable[[int], Tensor]
    clip: float | None

    @property
    def levels(self) -> list[Level]:
        """Those of `u`, and the data at the end."""
        return [*map(Level, *(s.tolist() for s in self.process.scales(self.u))), DATA]

    def steps(self) -> Iterator[Step]:
        """The steps in order; a last level without noise is the end already and has no step of its own."""
        levels = self.levels
        n = sum(level.sigma > 0 for level in levels)
        for i in range(n):
            last = i == n - 1
            yield Step(i + 1, self.u[i], levels[i], DATA if last else levels[i + 1], None if last else self.u[i + 1])

    def x0(self, x: Tensor, u: Tensor) -> Tensor:
        """The estimate of x0, clipped if asked."""
        estimate = self.denoise(x, u)
        if estimate.shape != x.shape:
            raise ValueError(f"denoise must return the shape of x, {tuple(x.shape)}, got {tuple(estimate.shape)}")
        estimate = estimate.to(x.dtype)
        return estimate if self.clip is None else estimate.clamp(-self.clip, self.clip)

    def fresh(self, step: Step, x: Tensor) -> Tensor:
        """The step's own normals, in the type and on the device of x."""
        normals = self.noise(step.number)
        if normals.shape != x.shape:
            raise ValueError(f"noise must return the shape of x, {tuple(x.shape)}, got {tuple(normals.shape)}")
        return normals.to(x)


def carry(x: Tensor, x0: Tensor, now: Level, then: Level, kept: float | None = None) -> Tensor:
    """alpha' x0 + kept * noise, with the noise that x and x0 imply; all of sigma' is kept unless fresh noise is to follow.

    It is DDIM (Song et al. 2021, Eq. 12), Euler's method in sigma / alpha as in flow's t, and DPM-Solver++ of order 1.
    """
    ratio = (then.sigma if kept is None else kept) / now.sigma
    return ratio * x + (then.alpha - now.alpha * ratio) * x0


def added_variance(now: Level, then: Level) -> tuple[float, float]:
    """(a, v) of the forward process from `then` to `now`: x = a x' + sqrt(v) noise; a step of DDPM has v = beta."""
    a = now.alpha / then.alpha
    return a, max(now.sigma**2 - (a * then.sigma) ** 2, 0.0)


def posterior_variance(now: Level, then: Level) -> float:
    """The variance of x' given x and x0 (DDPM's beta-tilde)."""
    return added_variance(now, then)[1] * (then.sigma / now.sigma) ** 2


def check_levels(levels: list[Level]) -> None:
    """Raise unless the noise falls from level to level."""
    for now, then in pairwise(levels):
        if not then.sigma * now.alpha < now.sigma * then.alpha:
            raise ValueError(
                "the noise must fall from each level of the grid to the next, but "
                f"(alpha, sigma) = ({then.alpha:.6g}, {then.sigma:.6g}) follows ({now.alpha:.6g}, {now.sigma:.6g}): "
                "sort u downwards, and leave out values that a discrete process or its ends round to the same level"
            )
    if levels[0].sigma == 0:
        raise ValueError("the grid starts without noise, so there is nothing to solve: let it start at a larger u")


def start(process: Process, u: Tensor, noise: Tensor) -> Tensor:
    """The state to start from at level u: sigma(u) * noise.

    What alpha(u) leaves of the data is not known and taken as zero; choose the first u where that is little.
    """
    return float(process.scales(torch.as_tensor(u, dtype=torch.float64))[1]) * noise
