"""The increment of a noising process: how fast x_u still changes at u (SpeeD, arXiv 2405.17403).

For DDPM the curve is 1 - abar_t over the T timesteps; for other processes sigma^2 / (alpha^2 + sigma^2) on a grid of 1,000.
"""

import torch
from torch import Tensor

from noisewise.processes import Process

GRID = 1000
THRESHOLD = 1e-4  # SpeeD's, of the increment of sqrt(1 - abar) at T = 1,000


def noise_share(process: Process) -> Tensor:
    """1 - abar at the process's timesteps (or at GRID middles of u), float64."""
    n = process.steps or GRID
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return torch.sigmoid(-process.log_snr(u))


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
