"""What an estimator of the adaptive sampler must offer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

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
