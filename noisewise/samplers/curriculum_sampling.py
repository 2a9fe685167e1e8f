"""Curriculum Sampling (arXiv 2603.12517): logit-normal first, uniform afterwards. Card: docs/methods/curriculum_sampling.md."""

from typing import Any

import torch
from torch import Tensor

from noisewise.processes import Process
from noisewise.samplers.base import Sampler
from noisewise.samplers.static import LogitNormal


class CurriculumSampling(Sampler):
    """Logit-normal, towards noise, for the first `share` of `total` optimizer steps; uniform after that.

    Args:
        total: the optimizer steps of the whole run.
        share: when to switch; as published at 60,000 of 150,000 steps.
        mean: of logit u in the first phase; as published, more noise than data.
        std: of logit u in the first phase.
    """

    constant = False

    def __init__(
        self, process: Process, total: int, share: float = 0.4, mean: float = 0.8, std: float = 1.0, **common: Any
    ) -> None:
        super().__init__(process, **common)
        if total < 1:
            raise ValueError(f"total is the number of steps of the whole run and must be >= 1, got {total}")
        if not 0 <= share <= 1:
            raise ValueError(f"share must lie in [0, 1], got {share}")
        self.at = round(share * total)
        self.first = LogitNormal(process, mean, std)

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.first.density(u) if self.step < self.at else torch.ones_like(u)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.first.quantile(v) if self.step < self.at else v
