"""Bells over log SNR, and the mass that they have in intervals of u.

A density over log SNR means the same noise levels on every process: the mass of an interval of u is the mass of its log SNRs.
Where the process does not reach (its log SNR is bounded) the bell is cut.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from noisewise.processes import Process

CDF = Callable[[Tensor], Tensor]


def laplace(z: Tensor) -> Tensor:
    """The cumulative distribution of Laplace(0, 1)."""
    return torch.where(z < 0, 0.5 * torch.exp(z.clamp(max=0)), 1 - 0.5 * torch.exp(-z.clamp(min=0)))


def normal(z: Tensor) -> Tensor:
    """The cumulative distribution of N(0, 1)."""
    return torch.special.ndtr(z)


SHAPES: dict[str, CDF] = {"laplace": laplace, "normal": normal}


def masses(process: Process, shape: CDF, location: float, scale: float, bins: int) -> Tensor:
    """(bins,) float64: the mass of the bell in each of `bins` equal intervals of u."""
    if not scale > 0:
        raise ValueError(f"the bell's scale must be positive, got {scale}")
    edges = process.log_snr_edges(torch.arange(bins + 1, dtype=torch.float64) / bins)
    mass = -shape((edges - location) / scale).diff()
    if not float(mass.sum()) > 1e-6:
        raise ValueError(
            f"a bell around log SNR {location:g} has no mass on the process, "
            f"whose log SNR runs from {float(edges[0]):.1f} to {float(edges[-1]):.1f}"
        )
    return mass.clamp(min=0)
