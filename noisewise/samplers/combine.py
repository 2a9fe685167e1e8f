"""Samplers made of samplers: their base class, a floor, and a weight turned into a density."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from noisewise.levels import middles
from noisewise.objective import Objective
from noisewise.processes import Process, check_same
from noisewise.samplers.base import Draw, LossAt, Sampler
from noisewise.samplers.correction import Correction
from noisewise.samplers.learning import check_weighting
from noisewise.samplers.static import Uniform, bins_of
from noisewise.weighting import Weighting


class Combined(Sampler):
    """A sampler made of others. Its learning part learns; by default it corrects and draws as its parts do."""

    def __init__(
        self,
        process: Process,
        parts: list[Sampler],
        correction: str | Correction | None = None,
        draws: str | None = None,
        **common: Any,
    ) -> None:
        for part in parts:
            check_part(part, type(self).__name__)
        if correction is None:
            wanted = {part.correction for part in parts if not isinstance(part, Uniform)}
            if len(wanted) > 1:
                names = " and ".join(sorted(map(str, wanted)))
                raise ValueError(f"the parts of {type(self).__name__} are corrected differently ({names}): give correction=")
            correction = wanted.pop() if wanted else "none"
        if draws is None:
            draws = next((part.draws for part in parts if part.draws != "independent"), "independent")
        self.has_target = any(part.has_target for part in parts)
        super().__init__(process, correction=correction, draws=draws, **common)
        for part in parts:
            check_same(process, part.process, f"a part of {type(self).__name__}")
        self.constant = all(part.constant for part in parts)
        self.conditional = any(part.conditional for part in parts)
        self._check_mean_is_known()

    def feedback(self, draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> AbstractContextManager[None]:
        return self.active().feedback(draw, losses, loss_at)

    def wants_mean_square(self) -> bool:
        return self.active().wants_mean_square()

    def active(self) -> Sampler:
        """The part that learns from this step: `of`, unless there are several."""
        part = self.get_submodule("of")
        assert isinstance(part, Sampler)
        return part

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.active().density(u, x0)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.active().quantile(v, x0)

    def target_weight(self, u: Tensor) -> Tensor:
        return next(part for part in (self.active(), *self._parts()) if part.has_target).target_weight(u)

    def _kept(self, x0: Tensor | None) -> Tensor | None:
        return self.active()._kept(x0)


def check_part(part: Any, whole: str) -> None:
    """An error if this cannot be a part of another sampler."""
    if not isinstance(part, Sampler):
        raise TypeError(f"{whole} is made of samplers, such as Uniform(process), got {type(part).__name__}")
    if type(part)._second is not Sampler._second:
        raise ValueError(
            f"{whole} would hand on t of the pairs and lose r: put pairs outermost, as in pairs:of=({whole.lower()}:...)"
        )


class Mix(Combined):
    """A floor: uniform with probability `floor`, else `of`. Unbiased weights are at most 1 / floor."""

    def __init__(self, process: Process, of: Sampler, floor: float = 0.1, **common: Any) -> None:
        super().__init__(process, [of], **common)
        if not 0 <= floor <= 1:
            raise ValueError(f"floor must lie in [0, 1], got {floor}")
        self.of, self.floor = of, floor

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.floor + (1 - self.floor) * self.of.density(u, x0)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return split_quantile(v, self.floor, lambda v: v, lambda v: self.of.quantile(v, x0))


def split_quantile(v: Tensor, share: float, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Tensor:
    """The quantile of a mixture: the first `share` of the probability goes to one part, the rest to the other."""
    if share in (0, 1):
        return first(v) if share else second(v)
    low, high = v / share, (v - share) / (1 - share)
    inside = (2.0**-24, 1 - 2.0**-24)
    return torch.where(v < share, first(low.clamp(*inside)), second(high.clamp(*inside)))


class Product(Sampler):
    """q proportional to (the density of `of`) x (a weighting): draws more often what the weight would count more.

    With `correction="unbiased"` and the same weighting on the loss, the objective is the weighted one, with less variance.
    """

    def __init__(
        self, process: Process, of: Sampler, weight: Weighting, objective: Objective | None = None, **common: Any
    ) -> None:
        check_part(of, type(self).__name__)
        if not of.constant:
            raise ValueError(f"product takes a fixed density, but {type(of).__name__} changes during training")
        check_same(process, of.process, "what product is made of")
        u = middles(bins_of(process))
        with torch.no_grad():
            mass = of.density(u) * check_weighting(weight, "weight").weights(objective or Objective(process), u)
        super().__init__(process, table=mass, **{"correction": of.correction, "draws": of.draws, **common})
