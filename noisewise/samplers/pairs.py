"""Pairs (r, t) of noise levels, for MeanFlow and similar models. Card: docs/methods/pairs.md."""

from typing import Any, Literal

import torch
from torch import Tensor

from noisewise import distributed
from noisewise.levels import middles
from noisewise.processes import Process, check_same
from noisewise.running import wide
from noisewise.samplers.base import Sampler
from noisewise.samplers.combine import Combined, check_part
from noisewise.samplers.histogram import Histogram
from noisewise.samplers.static import bins_of
from noisewise.streams import stream_key, uniforms


class Pairs(Combined):
    """t as `draw.u` and r <= t as `draw.r`, both quantiles (u = 0: least noise); a share of them has r = t.

    Args:
        of: the density, also a learned one.
        equal: the share of samples with r = t, which train the plain velocity; they are chosen at random.
        how: "sorted": t is the larger of two draws and r the smaller, as in MeanFlow. "below": t is drawn from `of`, and r
            uniformly between 0 and t.
        r: a fixed density for r, instead of `how`: t is drawn from `of`, and r is set to t where it would be above.
    """

    table: Histogram

    def __init__(
        self,
        process: Process,
        of: Sampler,
        equal: float = 0.75,
        how: Literal["sorted", "below"] = "sorted",
        r: Sampler | None = None,
        **common: Any,
    ) -> None:
        for part in (of, *([] if r is None else [r])):
            check_part(part, "Pairs")
            if part.conditional:
                raise ValueError(f"pairs takes one density for all data, but that of {type(part).__name__} depends on the data")
        if not 0 <= equal <= 1:
            raise ValueError(f"equal must lie in [0, 1], got {equal}")
        if how not in ("sorted", "below"):
            raise ValueError(f'how must be "sorted" or "below", got {how!r}')
        if r is not None and (how != "sorted" or not r.constant):
            raise ValueError("r is a fixed density of its own: it takes neither how= nor a sampler that learns")
        super().__init__(process, [of], **common)
        if r is not None:
            check_same(process, r.process, "r of pairs")
        self.of, self.equal, self.how, self.r = of, equal, how if r is None else "own", r
        self.register_buffer("_levels", middles(bins_of(process)), persistent=False)
        self._levels: Tensor
        with torch.no_grad():
            self.single = Histogram(of.density(self._levels), persistent=False)  # of one draw
        self.table = Histogram(torch.ones_like(self._levels), persistent=False)  # of t
        self._tabulate()

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        """Of t."""
        self._refresh()
        return self.table.density(u)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        self._refresh()
        return self.table.draw(v)[0]

    def wants_mean_square(self) -> bool:
        """No: losses of r < t are no errors in x0."""
        return False

    def joint(self, r: Tensor, t: Tensor) -> Tensor:
        """p(r, t) of the pairs with r < t, with respect to area; a share of all, `equal` or more, lies on r = t besides."""
        self._refresh()
        if self.r is not None:
            below = self.r.density(r)
        else:
            below = self.single.density(r) / self._below(t) if self.how == "sorted" else 1 / t
        return torch.where(r < t, (1 - self.equal) * self.table.density(t) * below, 0.0)

    def _draw(self, v: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        self._refresh()
        return super()._draw(v, None)

    def _second(self, u: Tensor, generator: torch.Generator | None) -> Tensor:
        v, order = (self._random(stream, len(u), u.device, generator) for stream in (2, 3))
        if self.r is not None:
            r = self.r.quantile(v)
        else:
            r = self.single.draw(v * self._below(u))[0] if self.how == "sorted" else v * u
        turn = order.argsort().argsort() + self._random(4, 1, u.device, generator)  # as many as `equal` says, up to one
        return torch.where(turn < self.equal * len(u), u, torch.minimum(r, u))

    def _random(self, stream: int, n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return uniforms(stream_key(self.seed, self.step, self.micro, distributed.rank(), stream), n, device)
        return torch.rand(n, generator=generator, device=generator.device, dtype=torch.float32).to(device)

    def _below(self, t: Tensor) -> Tensor:
        """The probability that one draw is below t."""
        low, _, before, _, density = self.single.rows[self.single.bin(t)].unbind(1)
        return before + (t - low).clamp(min=0) * density

    def _refresh(self) -> None:
        if not self.constant:
            self._tabulate()

    @torch.no_grad()
    def _tabulate(self) -> None:
        """Take the density of `of` as it is now."""
        self.single.set(self.of.density(self._levels))
        mass = wide(self.single.mass)
        below = mass.cumsum(0)
        # The larger of two draws has the CDF F^2: its mass in a cell is F^2 at the end less F^2 at the start.
        self.table.set(mass * (2 * below - mass) if self.how == "sorted" else mass)
