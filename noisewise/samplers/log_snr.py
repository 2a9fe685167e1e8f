"""Densities given over log SNR, carried to u through the process."""

from typing import Any

from noisewise import bells
from noisewise.processes import Process
from noisewise.samplers.base import Sampler
from noisewise.samplers.static import bins_of


class EDMLogNormal(Sampler):
    """ln sigma ~ N(mean, std^2) (Karras et al. 2022), with sigma the noise over the signal: uniform on the EDM process."""

    def __init__(self, process: Process, mean: float = -1.2, std: float = 1.2, **common: Any) -> None:
        if not std > 0:
            raise ValueError(f"std must be positive, got {std}")
        super().__init__(process, table=bells.masses(process, bells.normal, -2 * mean, 2 * std, bins_of(process)), **common)


class Laplace(Sampler):
    """log SNR ~ Laplace(location, scale) (Hang et al. 2024, "Improved noise schedule")."""

    def __init__(self, process: Process, location: float = 0.0, scale: float = 0.5, **common: Any) -> None:
        super().__init__(process, table=bells.masses(process, bells.laplace, location, scale, bins_of(process)), **common)
