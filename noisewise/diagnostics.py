"""What happened at each noise level: running losses, counts, effective sample size, the density through training.

Memory is O(bins) however long training runs; everything is gathered over ranks, so all of them hold the same numbers.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noisewise import distributed
from noisewise.levels import check_per_sample, middles

BAD_STEPS = 100  # in a row, with losses that are not finite, that are worth a warning


def wide(tensor: Tensor) -> Tensor:
    """In double precision, where the device has it."""
    return tensor if tensor.device.type == "mps" else tensor.double()


class KeepsPrecision(nn.Module):
    """A module that moves between devices, and whose numbers `.half()` and `.to(bfloat16)` leave as they are.

    Masses, edges and running means of noise levels need float32: in bfloat16 hundreds of a thousand timesteps become one.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeepsPrecision":
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        super()._apply(moved, recurse)
        return self


def even_edges(bins: int) -> Tensor:
    """bins + 1 numbers from 0 to 1, evenly spaced."""
    if bins < 1:
        raise ValueError(f"bins must be >= 1, got {bins}")
    return torch.arange(bins + 1, dtype=torch.float64).div(bins).float()


class Skipped(nn.Module):
    """Counts losses that are not finite: `total` of them, in `run` steps in a row. Only `warn` waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))
        self.register_buffer("run", torch.zeros((), dtype=torch.int64))
        self.total: Tensor
        self.run: Tensor
        self._warned = False

    def count(self, bad: Tensor) -> None:
        """Take in one step's number of bad losses (over all ranks)."""
        self.total += bad.long()
        self.run.add_(1).mul_(bad > 0)

    def note(self, bad: Tensor) -> None:
        """Count values that are not finite outside the losses of a step (in a probe, say)."""
        self.total += bad.long()

    def warn(self) -> None:
        """Warn, once, if each of the last `BAD_STEPS` steps had some; for steps that wait for the device anyway."""
        if not self._warned and int(self.run) >= BAD_STEPS:
            self._warned = True
            warnings.warn(
                f"each of the last {int(self.run)} steps had losses that are not finite ({int(self.total)} losses in all): "
                "training has diverged. Lower the learning rate or resume from an earlier checkpoint",
                RuntimeWarning,
                stacklevel=2,
            )


class RunningLoss(KeepsPrecision):
    """Mean and second moment of the loss in intervals of u.

    Args:
        edges: K + 1 increasing numbers from 0 to 1.
        decay: what the past counts, each time an interval is seen again.

    Losses that are not finite are left out.
    """

    def __init__(self, edges: Tensor, decay: float = 0.98) -> None:
        super().__init__()
        if not 0 < decay < 1:
            raise ValueError(f"decay must lie in (0, 1), got {decay}")
        self.decay = decay
        bins = len(edges) - 1
        self.register_buffer("edges", edges.float().clone())
        self.register_buffer("sums", torch.zeros(3, bins, dtype=torch.float32))  # decayed: count, loss, loss^2
        self.register_buffer("bins", torch.arange(bins), persistent=False)
        self.register_buffer("one", torch.ones((), dtype=torch.float32), persistent=False)
        self.edges: Tensor
        self.sums: Tensor
        self.bins: Tensor
        self.one: Tensor

    def update(self, u: Tensor, losses: Tensor) -> Tensor:
        """Take in one step's losses of this rank and return what all ranks had: (4, K), the number of losses in each interval,
        their sum, the sum of their squares, and how many were not finite. A collective call that does not wait for the device.

        A masked sum, not a scatter, so that the bits are the same in every run; and few kernels, since it is made every step.
        """
        finite = torch.isfinite(losses)
        losses = torch.where(finite, losses, 0.0)
        member = torch.bucketize(u, self.edges[1:-1], right=True)[:, None] == self.bins
        rows = torch.stack([finite, losses, losses * losses, ~finite])
        batch = distributed.gather_sum(torch.where(member, rows[:, :, None], 0.0).sum(1))
        fade = torch.where(batch[0] > 0, self.decay, self.one)  # of two numbers it would be in torch's default precision
        torch.addcmul(batch[:3], self.sums, fade, out=self.sums)
        return batch

    @property
    def seen(self) -> Tensor:
        """Which intervals have had a loss yet."""
        return self.sums[0] > 0

    def mean(self) -> Tensor:
        """The mean loss in each interval (the mean of all where there was none yet)."""
        return self._moment(1)

    def second_moment(self) -> Tensor:
        """The mean squared loss in each interval."""
        return self._moment(2)

    def _moment(self, row: int) -> Tensor:
        everywhere = self.sums[row].sum() / self.sums[0].sum().clamp(min=1e-30)
        return torch.where(self.seen, self.sums[row] / self.sums[0].clamp(min=1e-30), everywhere)


class Monitor(KeepsPrecision):
    """Watches a training run at any sampler: call `update(draw, losses)` once a step and `snapshot(sampler)` now and then.

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
            "density": self.densities[: self.kept],
            "step": self.steps[: self.kept],
        }
        return {name: value.cpu().numpy() for name, value in result.items()}

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.kept, self.spacing, self.calls])

    def set_extra_state(self, state: Tensor) -> None:
        self.kept, self.spacing, self.calls = (int(value) for value in state)


def mean_density(sampler: Any, bins: int, x0: Tensor | None = None, per_bin: int = 8) -> Tensor:
    """The sampler's density in equal intervals of u, averaged within each (and over `x0`, if given)."""
    n = bins * per_bin
    u = middles(n, sampler.device)
    result: Tensor = sampler.marginal(u, x0).view(bins, per_bin).mean(1)
    return result


def mean_objective(sampler: Any, weighting: Any, objective: Any, bins: int, per_bin: int = 8) -> Tensor:
    """The objective that is really trained, in equal intervals of u: how often each is drawn, times how much the model's loss
    counts there (importance weight and loss weight), over the mean of that. What a weight does thus shows as a density would.
    """
    n = bins * per_bin
    u = middles(n, sampler.device)
    density = sampler.marginal(u)
    share = density * sampler._weight(u, density) * weighting.weights(objective, u)
    result: Tensor = share.view(bins, per_bin).mean(1)
    return result / result.mean().clamp(min=1e-30)
