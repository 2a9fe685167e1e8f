"""Small jobs for workers and launchers, and a user's model that may come to grief."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from noisewise.study.conduct import combinations
from noisewise.study.job import Job, with_budget
from noisewise.training.config import ModelConfig
from tests.training.tiny import Own, tiny

FATES = ("healthy", "nan", "hungry")
SEEDS = {"healthy": 13, "hungry": 14, "nan": 15}  # a seed for each
GIB = 1 << 30


class Fateful(Own):
    """Its fate depends on the random numbers that its weights begin with; a file named `cure` averts it."""

    def __init__(self, cure: str) -> None:
        super().__init__()
        self.fate, self.cure = FATES[int(torch.randint(3, ()))], Path(cure)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        if self.fate == "healthy" or self.cure.exists():
            return super().forward(x, time)
        if self.fate == "hungry":
            torch.zeros(4 * GIB, dtype=torch.uint8)
        return super().forward(x, time) + torch.nan


def fateful(cure: Path) -> ModelConfig:
    return ModelConfig(name="tests.study.fateful:Fateful", options={"cure": str(cure)})


def jobs_in(
    folder, samplers=("uniform",), *, schedules=("linear",), seeds=1, budget="12it", shares=(0.25, 0.5, 0.75, 1.0), **changes
):
    """Tiny jobs, as a comparison in this folder makes them."""
    config = replace(with_budget(tiny(), budget), **changes)
    return [Job(made, shares, 20) for made in combinations(config, samplers, schedules, seeds, folder)]
