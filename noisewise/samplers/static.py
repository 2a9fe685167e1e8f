"""Fixed densities of u, in closed form or tabulated. Cards: docs/methods/."""

import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noisewise.levels import middles
from noisewise.process_curves import bell_masses
from noisewise.processes import Process, check_process
from noisewise.samplers.base import Sampler

BINS = 1000
"""Intervals of u for tabulated densities in continuous time; a discrete process brings its own number of timesteps."""

LARGEST = 100_000
"""Of Beta's parameters: its continued fraction has converged there."""


def bins_of(process: Process) -> int:
    """How many intervals of u a tabulated density has on this process."""
    return check_process(process).steps or BINS


class Uniform(Sampler):
    """q(u) = 1: the process's own training density."""

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        return torch.ones_like(u)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return v


class LogitNormal(Sampler):
    """u = sigmoid(mean + std z), z ~ N(0, 1) (Esser et al. 2024, Eq. 19; "log-normal" in arXiv 2411.09998).

    A positive mean favours noise. diffusers' SD3 scripts index a *descending* list with the same formula, so their mean has
    the opposite sign.
    """

    def __init__(self, process: Process, mean: float = 0.0, std: float = 1.0, **common: Any) -> None:
        super().__init__(process, **common)
        if not (math.isfinite(mean) and 0 < std < math.inf):
            raise ValueError(f"mean must be finite, and std positive and finite, got {mean} and {std}")
        self.mean, self.std = mean, std

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        u = u.clamp(2.0**-24, 1 - 2.0**-24)
        z = (torch.logit(u) - self.mean) / self.std
        return torch.exp(-z * z / 2) / (self.std * math.sqrt(2 * math.pi) * u * (1 - u))

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return torch.sigmoid(self.mean + self.std * torch.special.ndtri(v)).clamp(2.0**-24, 1 - 2.0**-24)


class Mode(Sampler):
    """SD3's density with heavy tails (Esser et al. 2024, Eq. 20, with 1 - v for u there): u = v - s (sin^2(pi v / 2) - v).

    s > 0 favours the middle, s < 0 the ends.
    """

    largest = 2 / (math.pi - 2)

    def __init__(self, process: Process, scale: float = 1.29, **common: Any) -> None:
        super().__init__(process, **common)
        if not -1 <= scale < self.largest:
            raise ValueError(f"scale must lie in [-1, {self.largest:.3f}), got {scale}: outside, the map is not monotone")
        self.scale = scale
        v = torch.arange(2049, dtype=torch.float64) / 4096
        self.register_buffer("_half", torch.stack([v, self._map(v)]).float(), persistent=False)

    def _map(self, v: Tensor) -> Tensor:
        return v - self.scale * (torch.sin(math.pi * v / 2) ** 2 - v)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return self._map(v).clamp(2.0**-24, 1 - 2.0**-24)

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        """1 over the slope of the map at v, found in a table of the lower half (it is symmetric) and by Newton's steps."""
        v_known, u_known = self.get_buffer("_half").to(u)
        nearer = torch.minimum(u, 1 - u).clamp(min=2.0**-24)
        above = torch.searchsorted(u_known, nearer.contiguous()).clamp(1, len(u_known) - 1)
        low, high = v_known[above - 1], v_known[above]
        v = low + (nearer - u_known[above - 1]) / (u_known[above] - u_known[above - 1]) * (high - low)
        for _ in range(4):
            v = torch.clamp(v - (self._map(v) - nearer) / self._slope(v).clamp(min=1e-7), low, high)
        return 1 / self._slope(v)

    def _slope(self, v: Tensor) -> Tensor:
        return 1 + self.scale - self.scale * math.pi / 2 * torch.sin(math.pi * v)


class CosMap(Sampler):
    """SD3's CosMap (Esser et al. 2024, Eq. 21): gives flow matching the cosine schedule's density of log SNR."""

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        return 2 / (math.pi * (1 - 2 * u + 2 * u * u))

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        sine, cosine = torch.sin(math.pi / 2 * v), torch.cos(math.pi / 2 * v)
        return sine / (sine + cosine)


class Table(Sampler):
    """Your own density: numbers over equal intervals of u, a function of u, or a .npy file of numbers.

    Args:
        values: non-negative numbers, one per interval (T of them for the timesteps of DDPM), or a function of u.
        file: a .npy file with such numbers.
    """

    def __init__(
        self,
        process: Process,
        values: Tensor | Sequence[float] | Callable[[Tensor], Tensor] | None = None,
        file: str | Path | None = None,
        **common: Any,
    ) -> None:
        if (values is None) == (file is None):
            raise ValueError("give either values (numbers or a function of u) or file (a .npy file), not both and not neither")
        if file is not None:
            values = _numbers_of(Path(file))
        if callable(values):
            values = values(middles(bins_of(process)))
        mass = torch.as_tensor(values, dtype=torch.float64)
        if mass.ndim != 1 or len(mass) == 0:
            raise ValueError(f"a table of densities must be a vector, got shape {tuple(mass.shape)}")
        super().__init__(process, table=mass, **common)


def _numbers_of(file: Path) -> Tensor:
    """What a .npy file holds; a name that is no file, such as a pipe or a device, is an error before it is read."""
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is not a plain file")
        return torch.from_numpy(np.load(file, allow_pickle=False).astype(np.float64))
    except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"a table is a .npy file of numbers, and {str(file)[:200]!r} cannot be read: {reason}") from None


class Beta(Sampler):
    """u ~ Beta(a, b), tabulated: the exact mass of each timestep (of 1,000 intervals in continuous time)."""

    def __init__(self, process: Process, a: float = 1.0, b: float = 1.0, **common: Any) -> None:
        if not (0 < a <= LARGEST and 0 < b <= LARGEST):
            raise ValueError(f"Beta needs a and b above 0 and at most {LARGEST:,}, got {a} and {b}")
        edges = torch.arange(bins_of(process) + 1, dtype=torch.float64) / bins_of(process)
        super().__init__(process, table=beta_cdf(edges, a, b).diff().clamp(min=0), **common)


def beta_cdf(x: Tensor, a: float, b: float) -> Tensor:
    """The regularised incomplete beta function, by its continued fraction (Abramowitz & Stegun 26.5.8), float64."""
    x = x.double()
    swap = x > (a + 1) / (a + b + 2)  # the fraction converges fast on this side of the mean only
    both = torch.tensor([a, b], dtype=torch.float64)
    a_, b_ = both[swap.long()], both[1 - swap.long()]
    x_ = torch.where(swap, 1 - x, x)
    tiny = 1e-300
    c, d = torch.ones_like(x_), 1 / _away_from_zero(1 - (a_ + b_) * x_ / (a_ + 1), tiny)
    value = d
    for m in range(1, 300):
        for numerator in (
            m * (b_ - m) * x_ / ((a_ + 2 * m - 1) * (a_ + 2 * m)),
            -(a_ + m) * (a_ + b_ + m) * x_ / ((a_ + 2 * m) * (a_ + 2 * m + 1)),
        ):
            d = 1 / _away_from_zero(1 + numerator * d, tiny)
            c = _away_from_zero(1 + numerator / c, tiny)
            value = value * c * d
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = torch.exp(torch.xlogy(a_, x_) + torch.special.xlog1py(b_, -x_) - log_beta) / a_
    result = torch.where(swap, 1 - front * value, front * value)
    return torch.where(x <= 0, 0.0, torch.where(x >= 1, 1.0, result))


def _away_from_zero(x: Tensor, tiny: float) -> Tensor:
    return torch.where(x.abs() < tiny, tiny, x)


class EDMLogNormal(Sampler):
    """ln sigma ~ N(mean, std^2) (Karras et al. 2022), where sigma is noise over signal; uniform on the EDM process."""

    def __init__(self, process: Process, mean: float = -1.2, std: float = 1.2, **common: Any) -> None:
        if not std > 0:
            raise ValueError(f"std must be positive, got {std}")
        super().__init__(process, table=bell_masses(process, "normal", -2 * mean, 2 * std, bins_of(process)), **common)


class Laplace(Sampler):
    """log SNR ~ Laplace(location, scale) (Hang et al. 2024, "Improved noise schedule")."""

    def __init__(self, process: Process, location: float = 0.0, scale: float = 0.5, **common: Any) -> None:
        super().__init__(process, table=bell_masses(process, "laplace", location, scale, bins_of(process)), **common)
