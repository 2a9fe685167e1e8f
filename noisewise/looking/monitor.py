"""What happened at each noise level: losses, counts, effective sample size, the density through training."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noisewise import distributed
from noisewise.levels import check_per_sample, middles
from noisewise.running import KeepsPrecision, RunningLoss, Skipped, even_edges, wide


class Monitor(KeepsPrecision):
    """Watches a training run with any sampler: call `update(draw, losses)` once a step and `snapshot(sampler)` now and then.

    Args:
        bins: equal intervals of u.
        snapshots: how many densities to keep; when full, every other one is dropped and the spacing doubles.
    """

    def __init__(self, bins: int = 100, decay: float = 0.999, snapshots: int = 200) -> None:
        super().__init__()
        if snapshots < 2:
            raise ValueError(f"snapshots must be >= 2, got {snapshots}")
        self.running = RunningLoss(even_edges(bins), decay)
        self.skipped = Skipped()
        self.snapshots = snapshots
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.int64))
        self.register_buffer("weights", torch.zeros(2, dtype=torch.float32))  # running means of w and w^2
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("densities", torch.zeros(snapshots, bins, dtype=torch.float32))
        self.register_buffer("steps", torch.full((snapshots,), -1, dtype=torch.int64))
        self.counts: Tensor
        self.weights: Tensor
        self.batches: Tensor
        self.densities: Tensor
        self.steps: Tensor
        self.kept = 0
        self.spacing = 1
        self.calls = 0

    @torch.no_grad()
    def update(self, draw: Any, losses: Tensor) -> None:
        """Take in one step; moves itself to the device of the losses."""
        check_per_sample(losses, draw.u)
        if self.weights.device != losses.device:
            self.to(losses.device)
        batch = self.running.update(draw.u, losses.detach().float())
        self.counts += batch[0].long()
        self.skipped.count(batch[3].sum())
        weight = wide(draw.weight)
        sums = distributed.gather_sum(torch.stack([weight.sum(), weight.square().sum(), weight.new_full((), len(weight))]))
        self.batches += 1
        self.weights += (sums[:2] / sums[2] - self.weights) / self.batches

    @torch.no_grad()
    def snapshot(self, sampler: Any, x0: Tensor | None = None) -> None:
        """Keep the sampler's density (its mean over the batch `x0`, if it looks at the data)."""
        self.calls += 1
        if (self.calls - 1) % self.spacing:
            return
        if self.kept == self.snapshots:
            half = torch.arange(0, self.snapshots, 2, device=self.steps.device)
            self.densities[: len(half)], self.steps[: len(half)] = self.densities[half].clone(), self.steps[half].clone()
            self.kept = len(half)
            self.spacing *= 2
            if (self.calls - 1) % self.spacing:
                return
        self.densities[self.kept] = mean_density(sampler, self.densities.shape[1], x0).to(self.densities)
        self.steps[self.kept] = sampler.step
        self.kept += 1

    @property
    def effective_share(self) -> Tensor:
        """Effective sample size over the number of samples, over all of training: 1 without importance weights."""
        mean, square = self.weights
        return mean**2 / square.clamp(min=1e-30)

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything as numpy arrays; `density` has a row for each snapshot, taken at the steps in `step`."""
        running = self.running
        result = {
            "edges": running.edges,
            "count": self.counts,
            "loss": torch.where(running.seen, running.mean(), torch.nan),
            "loss2": torch.where(running.seen, running.second_moment(), torch.nan),
            "effective_share": self.effective_share,
            "skipped": self.skipped.total,
            "outliers": running.outliers,
            "density": self.densities[: self.kept],
            "step": self.steps[: self.kept],
        }
        return {name: value.cpu().numpy() for name, value in result.items()}

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.kept, self.spacing, self.calls], device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        self.kept, self.spacing, self.calls = (int(value) for value in state)


POINTS = 1000  # at least so many of u: one in each of 1000 timesteps or strata, so that a density's mean is 1


def mean_density(sampler: Any, bins: int, x0: Tensor | None = None) -> Tensor:
    """The sampler's density in equal intervals of u, averaged within each (and over `x0`, if given)."""
    result: Tensor = sampler.marginal(_points(sampler, bins), x0).view(bins, -1).mean(1)
    return result


def mean_objective(sampler: Any, weighting: Any, objective: Any, bins: int) -> Tensor:
    """The objective that is really trained, in equal intervals of u: how often each is drawn, times how much the model's loss
    counts there (importance weight and loss weight), over the mean of that. What a weight does thus shows as a density would.
    """
    u = _points(sampler, bins)
    density = sampler.marginal(u)
    share = density * sampler._weight(u, density) * weighting.weights(objective, u)
    result: Tensor = share.view(bins, -1).mean(1)
    return result / result.mean().clamp(min=1e-30)


def _points(sampler: Any, bins: int) -> Tensor:
    """Evenly spaced, equally many in each of the bins."""
    return middles(bins * math.ceil(POINTS / bins), sampler.device)
