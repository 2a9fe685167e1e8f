"""Densities given over log SNR, carried to u through the process: the mass of an interval of u is the mass of its log SNRs.

Where the process does not reach (its log SNR is bounded) the density is cut and rescaled.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from noisewise.processes import Process
from noisewise.samplers.static import BINS, Tabulated


class OverLogSNR(Tabulated):
    """A density with a known cumulative distribution over log SNR."""

    def __init__(self, process: Process, cdf: Callable[[Tensor], Tensor], **common: Any) -> None:
        bins = process.steps or BINS
        edges = process.log_snr_edges(torch.arange(bins + 1, dtype=torch.float64) / bins)
        mass = -cdf(edges).diff()
        if not float(mass.sum()) > 1e-6:
            raise ValueError(
                "this density has no mass on the process, "
                f"whose log SNR runs from {float(edges[0]):.1f} to {float(edges[-1]):.1f}"
            )
        super().__init__(process, mass.clamp(min=0), **common)


class EDMLogNormal(OverLogSNR):
    """ln sigma ~ N(mean, std^2) (Karras et al. 2022), with sigma the noise over the signal: uniform on the EDM process."""

    def __init__(self, process: Process, mean: float = -1.2, std: float = 1.2, **common: Any) -> None:
        if not std > 0:
            raise ValueError(f"std must be positive, got {std}")
        super().__init__(process, lambda log_snr: torch.special.ndtr((log_snr + 2 * mean) / (2 * std)), **common)


class Laplace(OverLogSNR):
    """log SNR ~ Laplace(location, scale) (Hang et al. 2024, "Improved noise schedule")."""

    def __init__(self, process: Process, location: float = 0.0, scale: float = 0.5, **common: Any) -> None:
        if not scale > 0:
            raise ValueError(f"scale must be positive, got {scale}")

        def cdf(log_snr: Tensor) -> Tensor:
            z = (log_snr - location) / scale
            return torch.where(z < 0, 0.5 * torch.exp(z.clamp(max=0)), 1 - 0.5 * torch.exp(-z.clamp(min=0)))

        super().__init__(process, cdf, **common)
