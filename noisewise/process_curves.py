"""Curves over the noise levels of a process: how fast x_u still changes at u, and bells over log SNR.

SpeeD (arXiv 2405.17403) looks at the increment of 1 - abar_t over the T timesteps of a DDPM; for other processes of
sigma^2 / (alpha^2 + sigma^2) on a grid of 1,000.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from noisewise.levels import middles
from noisewise.processes import Process

GRID = 1000
THRESHOLD = 1e-4  # SpeeD's, of the increment of sqrt(1 - abar) at T = 1,000


def noise_share(process: Process) -> Tensor:
    """1 - abar at the process's timesteps (or at GRID middles of u), float64."""
    return torch.sigmoid(-process.log_snr(middles(process.steps or GRID, dtype=torch.float64)))


def gradient(curve: Tensor) -> Tensor:
    """Central differences inside and one-sided ones at the ends, a unit apart."""
    return torch.gradient(curve)[0] if len(curve) > 1 else torch.zeros_like(curve)


def scaled_variance_increment(process: Process) -> Tensor:
    """The increment of 1 - abar, scaled to [0, 1]."""
    increment = gradient(noise_share(process))
    spread = increment.max() - increment.min()
    return (increment - increment.min()) / spread if spread > 0 else torch.ones_like(increment)


def noise_increment(process: Process) -> Tensor:
    """The increment of sqrt(1 - abar) a timestep, scaled as for T = 1,000."""
    return gradient(noise_share(process).sqrt()) * (process.steps or GRID) / 1000


def vanishing_point(process: Process, threshold: float = THRESHOLD) -> int:
    """tau: the timestep from which on the increment of sqrt(1 - abar) stays below the threshold (given for T = 1,000)."""
    increment = noise_increment(process)
    changing = torch.nonzero(increment >= threshold)
    return int(changing[-1]) + 1 if len(changing) else len(increment)


# Bells over log SNR: the same noise levels on every process, cut where it does not reach ---------------------------------


def _laplace(z: Tensor) -> Tensor:
    return torch.where(z < 0, 0.5 * torch.exp(z.clamp(max=0)), 1 - 0.5 * torch.exp(-z.clamp(min=0)))


BELLS: dict[str, Callable[[Tensor], Tensor]] = {"laplace": _laplace, "normal": torch.special.ndtr}
"""The cumulative distributions of Laplace(0, 1) and N(0, 1)."""


def bell_masses(process: Process, shape: str, location: float, scale: float, bins: int) -> Tensor:
    """(bins,) float64: the mass of a bell of `BELLS` in each of `bins` equal intervals of u: that of their log SNRs."""
    if not scale > 0:
        raise ValueError(f"the bell's scale must be positive, got {scale}")
    edges = process.log_snr_edges(torch.arange(bins + 1, dtype=torch.float64) / bins)
    mass = -BELLS[shape]((edges - location) / scale).diff()
    if not float(mass.sum()) > 1e-6:
        raise ValueError(
            f"a bell around log SNR {location:g} has no mass on the process, "
            f"whose log SNR runs from {float(edges[0]):.1f} to {float(edges[-1]):.1f}"
        )
    return mass.clamp(min=0)
