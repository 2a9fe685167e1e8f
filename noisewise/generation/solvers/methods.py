"""The methods, each a set of options and a loop that yields x after every step.

All of them are written in (alpha, sigma) and the estimate of x0, hence hold for every process, prediction and spacing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from noisewise.generation.solvers.path import Level, Path, Step, added_variance, carry, posterior_variance
from noisewise.processes import Flow

NEARLY_PURE = 200.0
"""sigma / alpha that only the very last timesteps of schedules such as the cosine exceed (the linear one ends at 158)."""


@dataclass(frozen=True)
class Ancestral:
    """DDPM (Ho et al. 2020, Algorithm 2), between any two levels.

    Args:
        variance: "fixed_small" is exact for data at a point, "fixed_large" for data of unit variance (beta where the process
            keeps the variance; the same law in other coordinates where it does not).
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
                x = x + math.sqrt(self._variance(now, then)) * path.fresh(step, x)
            yield x

    def _variance(self, now: Level, then: Level) -> float:
        if self.variance == "fixed_small":
            return posterior_variance(now, then)
        return added_variance(now, then)[1] * (then.alpha**2 + then.sigma**2) / (now.alpha**2 + now.sigma**2)


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
