"""The methods of solvers, each a set of options and a loop that yields x after every step, and the way from noise to data
that they walk: levels (alpha, sigma), and what a step from one to the next is made of.

With x = alpha x0 + sigma noise at a level, an estimate of x0 fixes one of the noise, and both are all a step needs: hence the
methods hold for every process, prediction and spacing. Nothing here divides by the alpha a step starts from, which is zero at
pure noise; sigma is zero only at the very end.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from noisewise.processes import Flow, Process

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


def model_variance(now: Level, then: Level, variance: str) -> float:
    """The variance of DDPM's p(x' | x).

    "fixed_small" is beta-tilde, exact for data at a point. "fixed_large" is exact for data of unit variance: beta where the
    process keeps the variance, and the same law in other coordinates where it does not.
    """
    if variance == "fixed_small":
        return posterior_variance(now, then)
    return added_variance(now, then)[1] * (then.alpha**2 + then.sigma**2) / (now.alpha**2 + now.sigma**2)


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


# The methods ----------------------------------------------------------------------------------------------------------


NEARLY_PURE = 200.0
"""sigma / alpha that only the very last timesteps of schedules such as the cosine exceed (the linear one ends at 158)."""


@dataclass(frozen=True)
class Ancestral:
    """DDPM (Ho et al. 2020, Algorithm 2), between any two levels.

    Args:
        variance: "fixed_small" or "fixed_large", see `model_variance`.
    """

    variance: str = "fixed_small"

    def __post_init__(self) -> None:
        if self.variance not in ("fixed_small", "fixed_large"):
            raise ValueError(f"variance must be fixed_small or fixed_large, got {self.variance!r}")

    def __call__(self, path: Path, x: Tensor) -> Iterator[Tensor]:
        for step in path.steps():
            now, then = step.now, step.then
            a, added = added_variance(now, then)
            x0 = path.x0(x, step.u)
            x = a * (then.sigma / now.sigma) ** 2 * x + then.alpha * added / now.sigma**2 * x0
            if then.sigma > 0:
                x = x + math.sqrt(model_variance(now, then, self.variance)) * path.fresh(step, x)
            yield x


@dataclass(frozen=True)
class DDIM:
    """Song et al. 2021, Eq. 12 and 16.

    Args:
        eta: 0 is deterministic, 1 has the noise of "ddpm" with fixed_small.
    """

    eta: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta must be between 0 (deterministic) and 1 (as much noise as DDPM), got {self.eta}")

    def __call__(self, path: Path, x: Tensor) -> Iterator[Tensor]:
        for step in path.steps():
            fresh = self.eta**2 * posterior_variance(step.now, step.then)
            kept = math.sqrt(max(step.then.sigma**2 - fresh, 0.0))
            x = carry(x, path.x0(x, step.u), step.now, step.then, kept)
            if fresh > 0:
                x = x + math.sqrt(fresh) * path.fresh(step, x)
            yield x


@dataclass(frozen=True)
class Euler:
    """The first-order method for the probability-flow ODE; the same numbers as "ddim" with eta = 0."""

    def __call__(self, path: Path, x: Tensor) -> Iterator[Tensor]:
        for step in path.steps():
            x = carry(x, path.x0(x, step.u), step.now, step.then)
            yield x


@dataclass(frozen=True)
class DPMSolverPP:
    """DPM-Solver++ 2M (Lu et al. 2022b, Algorithm 2): the estimate of x0 extrapolated to the middle of the step in log SNR.

    The first step and the last, to zero noise, where log SNR is infinite, are of first order; so is one after pure noise.

    Args:
        order: 1 (the same numbers as "euler") or 2.
    """

    order: int = 2

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {self.order}")

    def __call__(self, path: Path, x: Tensor) -> Iterator[Tensor]:
        x0_before: Tensor | None = None
        width_before = math.inf
        for step in path.steps():
            x0 = path.x0(x, step.u)
            width = step.then.half_log_snr - step.now.half_log_snr
            middle = x0
            if self.order == 2 and x0_before is not None and math.isfinite(width) and math.isfinite(width_before):
                middle = x0 + width / (2 * width_before) * (x0 - x0_before)
            x = carry(x, middle, step.now, step.then)
            x0_before, width_before = x0, width
            yield x


@dataclass(frozen=True)
class Heun:
    """Karras et al. 2022, Algorithm 1 and, with S_churn > 0, Algorithm 2; two evaluations a step, one in the last.

    The coordinates are x / alpha against sigma / alpha; for flow, and for a step from (nearly) pure noise, where sigma / alpha
    has no bound, x / (alpha + sigma) against sigma / (alpha + sigma), which is flow's own t. On EDM use the spacing "karras":
    in evenly spaced quantiles the first step is so long that this method is worse than "euler".

    Args:
        S_churn: how much noise is put back in all; 0 makes the method deterministic.
        S_min, S_max: the range of sigma / alpha in which it is.
        S_noise: the standard deviation of that noise.
    """

    S_churn: float = 0.0
    S_min: float = 0.0
    S_max: float = math.inf
    S_noise: float = 1.0

    def __post_init__(self) -> None:
        if not (self.S_churn >= 0 and 0 <= self.S_min <= self.S_max and 0 <= self.S_noise < math.inf):
            raise ValueError(
                f"heun needs S_churn >= 0, 0 <= S_min <= S_max and S_noise >= 0, got {self.S_churn}, {self.S_min}, "
                f"{self.S_max} and {self.S_noise}"
            )

    def __call__(self, path: Path, x: Tensor) -> Iterator[Tensor]:
        for step in path.steps():
            x, u, now = self._churn(path, x, step)
            then = step.then
            x0 = path.x0(x, u)
            euler = carry(x, x0, now, then)
            if step.u_then is None:
                x = euler
            else:
                straight = isinstance(path.process, Flow) or now.sigma > NEARLY_PURE * now.alpha
                scale, place = _coordinates(now, straight)
                scale_then, place_then = _coordinates(then, straight)
                slope = (x / scale - x0) / place
                slope_then = (euler / scale_then - path.x0(euler, step.u_then)) / place_then
                x = scale_then * (x / scale + (place_then - place) * (slope + slope_then) / 2)
            yield x

    def _churn(self, path: Path, x: Tensor, step: Step) -> tuple[Tensor, Tensor, Level]:
        """x with noise put back, and its level: the nearest the process has (for timesteps that may be no change at all)."""
        unchanged = x, step.u, step.now
        ratio = math.exp(-step.now.half_log_snr) if step.now.alpha > 0 else math.inf
        if self.S_churn == 0 or not self.S_min <= ratio <= self.S_max or math.isinf(ratio):
            return unchanged
        more = 1 + min(self.S_churn / len(path.u), math.sqrt(2) - 1)
        u = path.process.u_of_log_snr(torch.tensor(-2 * math.log(ratio * more), dtype=torch.float64))
        raised = Level(*(float(s) for s in path.process.scales(u)))
        if raised.alpha == 0 or raised.half_log_snr >= step.now.half_log_snr:
            return unchanged
        a, added = added_variance(raised, step.now)
        return a * x + math.sqrt(added) * self.S_noise * path.fresh(step, x), u, raised


def _coordinates(level: Level, straight: bool) -> tuple[float, float]:
    """(scale, place): x / scale moves along a curve over `place` whose slope is (x / scale - x0) / place."""
    scale = level.alpha + level.sigma if straight else level.alpha
    return scale, level.sigma / scale
