"""Densities that change over training: one morphs into another, or samplers follow one another. Cards: docs/methods/."""

import math
from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor

from noisewise.processes import Process
from noisewise.samplers.base import Sampler
from noisewise.samplers.combine import Combined, split_quantile
from noisewise.samplers.static import LogitNormal


class Curriculum(Combined):
    """One density turns into another over `steps` steps, and stays there: (1 - s) start + s end.

    Args:
        shape: how s grows from 0 to 1: "linear" or "cosine".
    """

    def __init__(
        self, process: Process, start: Sampler, end: Sampler, steps: int = 10_000, shape: str = "linear", **common: Any
    ) -> None:
        super().__init__(process, [start, end], **common)
        self.constant = False
        if not (start.constant or end.constant):
            raise ValueError("only one of a curriculum's two parts may change by itself; use switch for one after the other")
        if steps < 1:
            raise ValueError(f"steps must be >= 1, got {steps}")
        if shape not in ("linear", "cosine"):
            raise ValueError(f'shape must be "linear" or "cosine", got {shape!r}')
        self.start, self.end, self.steps, self.shape = start, end, steps, shape

    @property
    def progress(self) -> float:
        """s, clamped at 1 after the last step."""
        share = min(self.step / self.steps, 1.0)
        return share if self.shape == "linear" else (1 - math.cos(math.pi * share)) / 2

    def active(self) -> Sampler:
        return self.end if self.start.constant else self.start

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        s = self.progress
        return (1 - s) * self.start.density(u, x0) + s * self.end.density(u, x0)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return split_quantile(v, 1 - self.progress, lambda v: self.start.quantile(v, x0), lambda v: self.end.quantile(v, x0))


class Switch(Combined):
    """`first` for the first `at` optimizer steps, `then` after that."""

    def __init__(self, process: Process, first: Sampler, then: Sampler, at: int, **common: Any) -> None:
        super().__init__(process, [first, then], **common)
        self.constant = False
        if at < 0:
            raise ValueError(f"at must be >= 0, got {at}")
        self.first, self.then, self.at = first, then, at

    def active(self) -> Sampler:
        return self.first if self.step < self.at else self.then

    def advance(self) -> None:
        advance_active(self)


class Piecewise(Combined):
    """One sampler after another: each from its optimizer step on.

    Args:
        stages: the first step of each sampler, such as {0: Uniform(process), 5000: LogitNormal(process)}.
    """

    def __init__(self, process: Process, stages: dict[int, Sampler], **common: Any) -> None:
        starts = list(stages) if isinstance(stages, dict) else []
        if not isinstance(stages, dict) or not all(isinstance(start, int) for start in starts):
            raise TypeError(
                f"stages must be a dict, as in {{0: first, 5000: second}}, whose keys are whole steps, got {stages!r}"
            )
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"stages must begin at step 0 and rise from there, got {', '.join(map(str, starts)) or 'none'}")
        super().__init__(process, list(stages.values()), **common)
        self.constant = False
        self.starts = starts
        for start, stage in stages.items():
            self.add_module(f"from_{start}", stage)

    def active(self) -> Sampler:
        stage = self.get_submodule(f"from_{self.starts[bisect_right(self.starts, self.step) - 1]}")
        assert isinstance(stage, Sampler)
        return stage

    def advance(self) -> None:
        advance_active(self)


def advance_active(sampler: Combined) -> None:
    """Count a step of samplers that take turns: the time of those that rest, and so their warm-up, stands still."""
    active = sampler.active()
    sampler.step, sampler.micro = sampler.step + 1, 0
    active.advance()


class CurriculumSampling(Sampler):
    """Logit-normal, towards noise, for the first `share` of `total` optimizer steps; uniform after that (arXiv 2603.12517).

    Args:
        total: the optimizer steps of the whole run.
        share: when to switch; published: 60,000 of 150,000 steps.
        mean: of logit u in the first phase; the published one favours noise.
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
