"""What an estimator of the adaptive sampler must offer, and the one that costs nothing. Card: docs/methods/adaptive.md."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from noisewise.running import RunningLoss
from noisewise.samplers.base import Draw, LossAt
from noisewise.samplers.histogram import RowHistogram

if TYPE_CHECKING:
    from noisewise.samplers.adaptive.sampler import AdaptiveSampler


class Rows(Protocol):
    """Densities of u, one for each row of the data."""

    def density(self, u: Tensor) -> Tensor: ...

    def quantile(self, v: Tensor) -> Tensor: ...


class Estimator(nn.Module):
    """Learns from training which noise levels deserve more of it.

    When it has learned something it calls `sampler.settle(mass)`; one that looks at the data sets `conditional`, answers
    `masses(x0)`, and settles the mean over a batch. The sampler adds the floor, draws, corrects and guards against collapse.
    """

    conditional = False
    probes = False  # needs loss_at
    wants_model = False
    strata = 20  # how many to tell apart unless told otherwise
    correction = "none"  # importance weights, unless told otherwise
    floor = 0.2  # share of uniform mass, unless told otherwise

    @contextmanager
    def feedback(self, sampler: "AdaptiveSampler", draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> Iterator[None]:
        """Wraps the optimizer step."""
        yield

    def reset(self) -> None:
        """Forget what led to a collapsed density."""

    def masses(self, x0: Tensor) -> Tensor:
        """(B, K) masses of the sampler's strata for each row of x0; only for conditional estimators."""
        raise NotImplementedError

    def rows(self, sampler: "AdaptiveSampler", x0: Tensor) -> Rows:
        """What to draw from for each row of x0, with the sampler's floor; only for conditional estimators."""
        return RowHistogram(sampler.masses(x0), sampler.table)


class LossEstimator(Estimator):
    """Kingma & Gao 2023, grown up: mass proportional to (mean target loss of the stratum)^power, from the losses that
    training produces anyway.

    Args:
        edges: of the strata.
        every: steps between two updates of the density.
        warmup: steps of uniform sampling at the start, while losses fall fastest.
        decay: what a stratum's past counts each time it is seen again.
        power: 1 follows the loss; smaller is flatter.
    """

    correction = "target"
    floor = 0.35  # on CIFAR-10 best of 0.05, 0.2, 0.35, 0.5 and 1 (benchmarks/cifar10.md)

    def __init__(self, edges: Tensor, every: int = 50, warmup: int = 250, decay: float = 0.98, power: float = 1.0) -> None:
        super().__init__()
        if every < 1 or warmup < 0:
            raise ValueError(f"every must be >= 1 and warmup >= 0, got {every} and {warmup}")
        if not 0 < power < math.inf:
            raise ValueError(f"power must be positive and finite, got {power}")
        self.every, self.warmup, self.power = every, warmup, power
        self.running = RunningLoss(edges, decay)

    @contextmanager
    def feedback(self, sampler: "AdaptiveSampler", draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> Iterator[None]:
        losses = sampler.check_losses(losses)
        yield
        with torch.no_grad():
            batch = self.running.update(draw.u, losses, sampler.target_of_plain(draw.u))
            sampler.skipped.count(batch[3].sum())
            if draw.mean_square is not None:
                sampler.see(draw.mean_square)
            if self.due(sampler.step + 1):
                sampler.settle(self.running.mean().clamp(min=0) ** self.power * sampler.table.widths)
                sampler.follow(self.running)

    def due(self, step: int) -> bool:
        """Whether the density is updated after this step."""
        return step >= self.warmup and step % self.every == 0

    def reset(self) -> None:
        self.running.sums.zero_()
