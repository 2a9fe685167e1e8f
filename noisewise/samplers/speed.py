"""SpeeD's asymmetric sampling (Wang et al. 2024, arXiv 2405.17403, Eq. 6). Card: docs/methods/speed.md."""

from typing import Any

import torch
from torch import Tensor

from noisewise.process_curves import THRESHOLD, noise_increment, vanishing_point
from noisewise.processes import Process
from noisewise.samplers.base import Sampler
from noisewise.samplers.histogram import Histogram
from noisewise.samplers.static import bins_of
from noisewise.weighting import P2


class SpeeD(Sampler):
    """k times more often below tau, where the process still changes, than above it.

    Args:
        k: the ratio of the two rates.
        tau: the threshold in timesteps (thousandths of u in continuous time); by default derived from the process. The
            authors' later code fixes it at 700.
        mirror: draw half of the batch and mirror it at m, as the authors' code does: t becomes m - t below m and t - m above,
            where m is the derived tau plus 1, even if `tau` is given. `density` is then the mean of both halves.
    """

    def __init__(self, process: Process, k: float = 5.0, tau: int | None = None, mirror: bool = False, **common: Any) -> None:
        bins = bins_of(process)
        if not k > 0:
            raise ValueError(f"k must be positive, got {k}")
        if tau is not None and not 0 < tau <= bins:
            raise ValueError(f"tau must lie in 1 ... {bins}, got {tau}")
        derived = vanishing_point(process)
        tau = derived if tau is None else tau
        mass = torch.where(torch.arange(bins) < tau, k, torch.ones(bins, dtype=torch.float64))
        mass = mass / mass.sum()
        super().__init__(process, table=Mirrored(mass, derived + 1) if mirror else mass, **common)
        self.k, self.tau, self.mirror = k, tau, mirror

    def _uniforms(self, n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        v = super()._uniforms(n, device, generator)
        if not self.mirror or n == 1:
            return v
        half = n // 2  # v and v + 1/2 are the same timestep and its mirror image
        return torch.cat([v[:half], (v[:half] + 0.5) % 1, v[2 * half :]])


class PublishedSpeeD(Sampler):
    """SpeeD as first released, the baseline of arXiv 2411.09998's tables. In a spec it is weighted by P2 by default.

    p is proportional to tanh(1e6 (increment of sqrt(1 - abar) - 1e-4)) + 1.5: 5 to 1, except at a few timesteps. A
    batch of n is n // 2 + 1 draws, then their mirrors, cut to n.
    """

    table: "Mirrored"
    comes_with = P2

    def __init__(self, process: Process, **common: Any) -> None:
        bins_of(process)  # an error if it is no process
        mass = torch.tanh(1e6 * (noise_increment(process) - THRESHOLD)) + 1.5
        super().__init__(process, table=Mirrored(mass / mass.sum(), vanishing_point(process) + 1), **common)

    def _uniforms(self, n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        v = super()._uniforms(n // 2 + 1, device, generator)
        return torch.cat([v, v])[:n]

    def _draw(self, v: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        u = self.table.drawn.draw(v)[0]
        first = len(v) // 2 + 1
        u = torch.cat([u[:first], self.table.mirror(u[first:])])
        density = self.density(u)
        return u, density, self._weight(u, density)


class Mirrored(Histogram):
    """Half of the draws from these masses, half of them mirrored at m; the density is the mean of the two."""

    def __init__(self, mass: Tensor, m: int) -> None:
        mirrored = torch.zeros_like(mass).index_add(0, _mirror(torch.arange(len(mass), device=mass.device), m, len(mass)), mass)
        super().__init__((mass + mirrored) / 2, persistent=False)
        self.drawn, self.m = Histogram(mass, persistent=False), m

    def draw(self, v: Tensor) -> tuple[Tensor, Tensor]:
        u = self.drawn.draw((2 * v) % 1)[0]
        u = torch.where(v < 0.5, u, self.mirror(u))
        return u, self.density(u)

    def mirror(self, u: Tensor) -> Tensor:
        """The mirror image of u's timestep, at the same place within it."""
        place = u * self.bins
        index = place.long().clamp(max=self.bins - 1)
        return (_mirror(index, self.m, self.bins) + (place - index)) / self.bins


def _mirror(index: Tensor, m: int, bins: int) -> Tensor:
    return torch.where(index < m, m - index, index - m).clamp(max=bins - 1)
