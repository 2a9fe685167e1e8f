"""What an estimator of the adaptive sampler must offer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from noisewise.samplers.base import Draw, LossAt

if TYPE_CHECKING:
    from noisewise.samplers.adaptive.sampler import AdaptiveSampler


class Estimator(nn.Module):
    """Learns from training which noise levels deserve more of it.

    An estimator of one density for all data calls `sampler.propose(mass)`; one that looks at the data sets `conditional` and
    answers `masses(x0)`. The sampler adds the floor, draws, corrects and guards against collapse.
    """

    conditional = False

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Called with the model that trains, by samplers that are attached to one."""

    @contextmanager
    def feedback(self, sampler: "AdaptiveSampler", draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> Iterator[None]:
        """Wraps the optimizer step."""
        yield

    def masses(self, x0: Tensor) -> Tensor:
        """(B, K) masses of the sampler's strata for each row of x0; only for conditional estimators."""
        raise NotImplementedError
