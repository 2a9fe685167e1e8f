"""Any density, cut to a window of noise levels. Card: docs/methods/window.md."""

import math
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from noisewise.levels import middles
from noisewise.processes import Process
from noisewise.samplers.base import Sampler
from noisewise.samplers.combine import Combined
from noisewise.samplers.histogram import Histogram
from noisewise.samplers.learning import Learner
from noisewise.samplers.static import BINS, Uniform

NARROWEST = 2.0**-14  # a window of u narrower than this has too few float32 numbers to draw from


class Window(Combined):
    """The density of `of` between two noise levels, and nothing outside.

    Importance weights are relative to the window: `unbiased` is uniform over it, and all have mean 1.

    Args:
        of: any sampler, also one that learns; by default uniform.
        low: the first level to draw; None for no bound.
        high: the first level not to draw; None for no bound.
        over: the unit of the bounds: "u", "time" (the model's time input, such as timesteps) or "log_snr".
    """

    table: Histogram

    def __init__(
        self,
        process: Process,
        of: Sampler | None = None,
        low: float | None = None,
        high: float | None = None,
        over: Literal["u", "time", "log_snr"] = "u",
        **common: Any,
    ) -> None:
        of = Uniform(process) if of is None else of
        if of.conditional:
            raise ValueError(f"window takes one density for all data, but that of {type(of).__name__} depends on the data")
        super().__init__(process, [of], **common)
        start, end = window_of_u(process, low, high, over)
        self.of, self.width = of, end - start
        edges = None
        u = middles(process.steps or 1).double()
        if process.steps is None:
            inner = torch.linspace(start, end, BINS + 1, dtype=torch.float64)
            edges = torch.cat([torch.zeros(1), inner, torch.ones(1)]).unique()
            u = (edges[1:] + edges[:-1]) / 2
        self.register_buffer("_levels", u.float(), persistent=False)
        self.register_buffer("_inside", ((u > start) & (u < end)).float(), persistent=False)
        self._levels: Tensor
        self._inside: Tensor
        self.table = Histogram(self._inside.clone(), edges, persistent=False)
        with torch.no_grad():
            mass = self._mass()
        if not float(mass.sum()) > 0:
            raise ValueError(f"{type(of).__name__} draws no noise level of the window, u from {start:.4g} to {end:.4g}")
        self.table.set(mass)

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        return self._cut().density(u)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return self._cut().draw(v)[0]

    def _draw(self, v: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        self._cut()
        return super()._draw(v, None)

    @torch.no_grad()
    def _cut(self) -> Histogram:
        """The table of what `of` draws now, cut to the window; uniform over it where nothing is left."""
        if not self.constant:
            mass = self._mass()
            self.table.set(torch.where(mass.sum() > 0, mass, self._inside * self.table.widths))
        return self.table

    def _mass(self) -> Tensor:
        return self.of.density(self._levels) * self._inside * self.table.widths

    # Weights: with respect to the uniform density over the window --------------------------------------------------------

    def _weight(self, u: Tensor, density: Tensor, cells: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return super()._weight(u, density * self.width, cells)

    def _cells(self, place: torch.device) -> tuple[Tensor, ...]:
        return self.table.mass, self.table.rows[:, 4] * self.width

    def target_weight(self, u: Tensor) -> Tensor:
        """The part's, scaled so that its product with the loop's weight keeps the mean that this has in the window."""
        learner = next(part for part in self.modules() if isinstance(part, Learner))
        inside = self._inside * self.table.widths
        loop = learner.in_training(torch.ones_like(self._levels), self._levels) * inside
        return super().target_weight(u) * loop.sum() / (super().target_weight(self._levels) * loop).sum()


def window_of_u(process: Process, low: float | None, high: float | None, over: str) -> tuple[float, float]:
    """A window as two quantiles u; of a discrete process the timesteps whose level is `low` or above, and below `high`."""
    given_bounds: tuple[Any, ...] = (low, high)
    for bound in given_bounds:
        if not (bound is None or isinstance(bound, Real | Tensor)):
            raise TypeError(f"the bounds of a window must be numbers or None, got {bound!r}")
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    if not bounds[0] < bounds[1]:  # also of what is not a number
        raise ValueError(f"the window is empty: low must be below high, got {low} and {high}")
    grid = middles(process.steps or 4096)
    levels = {"u": lambda u: u, "time": process.time, "log_snr": process.log_snr}
    if over not in levels:
        raise ValueError(f"over must be one of {', '.join(levels)}, got {over!r}")
    values = levels[over](grid).double()
    if process.steps is not None:
        inside = ((values >= bounds[0]) & (values < bounds[1])).nonzero().flatten()
        start, end = (int(inside[0]) / process.steps, (int(inside[-1]) + 1) / process.steps) if len(inside) else (0.0, 0.0)
    else:
        inverse = {"u": lambda u: u, "time": process.u_of_time, "log_snr": process.u_of_log_snr}[over]
        rising = bool(values[-1] > values[0])
        given = torch.tensor(bounds, dtype=torch.float64)
        ends = torch.where(given.isfinite(), inverse(given.clamp(-1e6, 1e6)).nan_to_num(0.0), (given > 0).double())
        if not rising:
            ends = torch.where(given.isfinite(), ends, 1 - ends).flip(0)
        start, end = ends.clamp(0, 1).tolist()
    if end - start < NARROWEST:
        least, most = float(values.min()), float(values.max())
        raise ValueError(
            f"the window is empty: {over} from {low} to {high} has no noise levels of this process, whose {over} runs from "
            f"{least:.4g} to {most:.4g}"
        )
    return start, end
