"""A piecewise-constant density on [0, 1]: the one representation behind every sampler without a closed form."""

import torch
from torch import Tensor, nn

from noisewise.diagnostics import wide
from noisewise.processes import interval


class Histogram(nn.Module):
    """Masses of K intervals of [0, 1], with exact density and inverse CDF.

    Args:
        mass: K non-negative numbers, normalised here.
        edges: K + 1 increasing numbers from 0 to 1; equal intervals if absent.
        persistent: whether it is learned, and so belongs in a checkpoint.
    """

    def __init__(self, mass: Tensor, edges: Tensor | None = None, persistent: bool = True) -> None:
        super().__init__()
        bins = len(mass)
        even = torch.arange(bins + 1, dtype=torch.float64) / bins
        self.register_buffer("edges", (even if edges is None else edges.double()).float(), persistent)
        self.even = edges is None
        self.register_buffer("mass", torch.empty(bins), persistent)
        self.register_buffer("cumulative", torch.empty(bins), persistent)
        self.edges: Tensor
        self.mass: Tensor
        self.cumulative: Tensor
        if not bool(torch.isfinite(mass).all()) or bool((mass < 0).any()) or not float(mass.sum()) > 0:
            raise ValueError("a density must be finite, nowhere negative and positive somewhere on this process")
        self.set(mass)

    @property
    def bins(self) -> int:
        return len(self.mass)

    @property
    def widths(self) -> Tensor:
        return self.edges[1:] - self.edges[:-1]

    def set(self, mass: Tensor) -> None:
        """Take new masses, without waiting for the device."""
        mass = wide(mass)
        mass = mass / mass.sum()
        self.mass.copy_(mass)
        self.cumulative.copy_(mass.cumsum(0))

    def bin(self, u: Tensor) -> Tensor:
        """The interval each u lies in."""
        if self.even:
            return interval(u, self.bins)
        return (torch.searchsorted(self.edges, u.to(self.edges).contiguous(), right=True) - 1).clamp(0, self.bins - 1)

    def density(self, u: Tensor) -> Tensor:
        """q(u), with respect to length."""
        return (self.mass / self.widths)[self.bin(u)].to(u.dtype)

    def quantile(self, v: Tensor) -> Tensor:
        """u with CDF(u) = v; intervals without mass are never hit."""
        target = v * self.cumulative[-1]
        index = torch.searchsorted(self.cumulative, target.contiguous(), right=True).clamp(max=self.bins - 1)
        mass = self.mass[index]
        inside = (target - (self.cumulative[index] - mass)) / mass.clamp(min=1e-30)
        short_of_edge = 1 - self.bins * 2.0**-22  # rounding must not carry u into the next timestep
        return self.edges[index] + inside.clamp(0, short_of_edge) * self.widths[index]


def row_quantile(mass: Tensor, edges: Tensor, v: Tensor) -> Tensor:
    """As `Histogram.quantile`, with a density of its own (a row of `mass`) for each v."""
    cumulative = mass.cumsum(1)
    target = (v * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=mass.shape[1] - 1)
    hit = mass.gather(1, index)
    inside = ((target - (cumulative.gather(1, index) - hit)) / hit.clamp(min=1e-30)).clamp(0, 1 - mass.shape[1] * 2.0**-22)
    index, inside = index.squeeze(1), inside.squeeze(1)
    return edges[index] + inside * (edges[index + 1] - edges[index])
