"""Samplers made of samplers: a floor, a weight turned into a density, a shift, a change over training."""

import math
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
    """A sampler that passes feedback on to its learning part, and corrects and draws as its parts do unless told otherwise."""

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

    def active(self) -> Sampler:
        """The part that learns from this step."""
        raise NotImplementedError

    def target_weight(self, u: Tensor) -> Tensor:
        parts = (part for part in (self.active(), *self.children()) if isinstance(part, Sampler))
        return next(part for part in parts if part.has_target).target_weight(u)

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
    """A floor: with probability `floor` uniform, else `of`. 1 / q, the weight of `unbiased`, is at most 1 / floor."""

    def __init__(self, process: Process, of: Sampler, floor: float = 0.1, **common: Any) -> None:
        super().__init__(process, [of], **common)
        if not 0 <= floor <= 1:
            raise ValueError(f"floor must lie in [0, 1], got {floor}")
        self.of, self.floor = of, floor

    def active(self) -> Sampler:
        return self.of

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.floor + (1 - self.floor) * self.of.density(u, x0)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return _split(v, self.floor, lambda v: v, lambda v: self.of.quantile(v, x0))


def _split(v: Tensor, share: float, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Tensor:
    """The quantile of a mixture: the first `share` of the probability goes to one part, the rest to the other."""
    if share in (0, 1):
        return first(v) if share else second(v)
    low, high = v / share, (v - share) / (1 - share)
    inside = (2.0**-24, 1 - 2.0**-24)
    return torch.where(v < share, first(low.clamp(*inside)), second(high.clamp(*inside)))


class Product(Sampler):
    """q proportional to (the density of `of`) x (a weighting): draw more often what a weight would count more.

    With `correction="unbiased"` and the same weighting on the loss the objective keeps its weight, at a lower variance.
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


class Curriculum(Combined):
    """One density morphing into another over `steps` steps, and staying there: (1 - s) start + s end.

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
        return _split(v, 1 - self.progress, lambda v: self.start.quantile(v, x0), lambda v: self.end.quantile(v, x0))


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
        active = self.active()
        self.step, self.micro = self.step + 1, 0
        active.advance()  # the other one's time, and so its warm-up, stands still

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.active().density(u, x0)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.active().quantile(v, x0)
