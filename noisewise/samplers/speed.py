"""SpeeD's asymmetric sampling (Wang et al. 2024, arXiv 2405.17403, Eq. 6). Card: docs/methods/speed.md."""

from typing import Any

import torch
from torch import Tensor

from noisewise.process_increments import vanishing_point
from noisewise.processes import Process
from noisewise.samplers.base import Sampler
from noisewise.samplers.histogram import Histogram
from noisewise.samplers.static import bins_of


class SpeeD(Sampler):
    """k times more often below tau, where the process still changes, than above it.

    Args:
        k: the ratio of the two rates.
        tau: the threshold in timesteps (thousandths of u in continuous time); derived from the process if absent.
            The authors' code fixes 700.
        mirror: draw half of the batch and mirror it at tau, as the authors' code does (t to tau - t below tau and t - tau
            above). The density then is the mean of the two halves', and `density` says so.
    """

    def __init__(self, process: Process, k: float = 5.0, tau: int | None = None, mirror: bool = False, **common: Any) -> None:
        bins = bins_of(process)
        if not k > 0:
            raise ValueError(f"k must be positive, got {k}")
        if tau is not None and not 0 < tau <= bins:
            raise ValueError(f"tau must lie in 1 ... {bins}, got {tau}")
        tau = vanishing_point(process) if tau is None else tau
        mass = torch.where(torch.arange(bins) < tau, k, torch.ones(bins, dtype=torch.float64))
        mass = mass / mass.sum()
        super().__init__(process, table=Mirrored(mass, tau) if mirror else mass, **common)
        self.k, self.tau, self.mirror = k, tau, mirror

    def _uniforms(self, n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        v = super()._uniforms(n, device, generator)
        if not self.mirror or n == 1:
            return v
        half = n // 2  # v and v + 1/2 are the same timestep and its mirror image
        return torch.cat([v[:half], (v[:half] + 0.5) % 1, v[2 * half :]])


class Mirrored(Histogram):
    """Half of the draws from these masses, half of them mirrored at tau; the density is the mean of the two."""

    def __init__(self, mass: Tensor, tau: int) -> None:
        mirrored = torch.zeros_like(mass).index_add(0, _mirror(torch.arange(len(mass)), tau, len(mass)), mass)
        super().__init__((mass + mirrored) / 2, persistent=False)
        self.drawn, self.tau = Histogram(mass, persistent=False), tau

    def draw(self, v: Tensor) -> tuple[Tensor, Tensor]:
        u = self.drawn.draw((2 * v) % 1)[0]
        place = u * self.bins
        index = place.long().clamp(max=self.bins - 1)
        mirrored = (_mirror(index, self.tau, self.bins) + (place - index)) / self.bins
        u = torch.where(v < 0.5, u, mirrored)
        return u, self.density(u)


def _mirror(index: Tensor, tau: int, bins: int) -> Tensor:
    return torch.where(index < tau, tau - index, index - tau).clamp(max=bins - 1)
