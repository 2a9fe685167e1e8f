"""Piecewise-constant densities on [0, 1]: the one representation behind every sampler without a closed form."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from noisewise.levels import interval
from noisewise.running import even_edges, wide


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
        self.register_buffer("edges", even_edges(bins) if edges is None else edges.float(), persistent)
        self.even = edges is None
        self.register_buffer("mass", torch.empty(bins, dtype=torch.float32), persistent)
        self.register_buffer("cumulative", torch.empty(bins, dtype=torch.float32), persistent)
        self.register_buffer("rows", torch.empty(bins, 5, dtype=torch.float32), persistent)  # what a draw needs of its interval
        self.edges: Tensor
        self.mass: Tensor
        self.cumulative: Tensor
        self.rows: Tensor
        if not bool(torch.isfinite(mass).all()) or bool((mass < 0).any()) or not 0 < float(mass.sum()) < math.inf:
            raise ValueError("a density must be finite, nowhere negative and positive somewhere on this process")
        self.set(mass)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        edges = state_dict.get(prefix + "edges")
        if (
            edges is not None
            and edges.shape == self.edges.shape
            and not torch.allclose(edges.cpu(), self.edges.cpu(), atol=1e-6)
        ):
            raise ValueError(
                "the state is of intervals at other noise levels: build the sampler like the other (`over`, the process)"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

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
        cumulative = mass.cumsum(0)
        low, widths = self.edges[:-1].to(mass), self.widths.to(mass)
        high = low + widths * (1 - self.bins * 2.0**-22)  # rounding must not carry u into the next timestep
        slope = widths / mass.clamp(min=1e-30)
        self.mass.copy_(mass)
        self.cumulative.copy_(cumulative)
        self.rows.copy_(torch.stack([low, high, cumulative - mass, slope, mass / widths], 1))

    def bin(self, u: Tensor) -> Tensor:
        """The interval each u lies in."""
        if self.even:
            return interval(u, self.bins)
        return (torch.searchsorted(self.edges, u.to(self.edges).contiguous(), right=True) - 1).clamp(0, self.bins - 1)

    def density(self, u: Tensor) -> Tensor:
        """q(u), with respect to length."""
        return self.rows[self.bin(u), 4].to(u.dtype)

    def draw(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """u with CDF(u) = v, and its density; intervals without mass are never hit."""
        index = torch.searchsorted(self.cumulative, v.contiguous(), right=True).clamp(max=self.bins - 1)
        low, high, before, slope, density = self.rows[index].unbind(1)
        return torch.minimum(low + (v - before).clamp(min=0) * slope, high), density


def edges_around(inner: Tensor, fine: int) -> Tensor:
    """0, those of these numbers that lie between 0 and `fine`, over it, and 1; whatever the caller's default type is."""
    distinct = inner.double().unique()
    ends = distinct.new_tensor([0.0, fine])
    return (torch.cat([ends[:1], distinct[(distinct > 0) & (distinct < fine)], ends[1:]]) / fine).float()


class RowHistogram:
    """As `Histogram`, with masses of its own, a row, for each u and v.

    Args:
        mass: (B, K), each row with a sum of 1.
        table: whose intervals they are of.
    """

    def __init__(self, mass: Tensor, table: Histogram) -> None:
        self.mass, self.table = mass, table

    def density(self, u: Tensor) -> Tensor:
        """q(u), one u a row."""
        return (self.mass / self.table.widths).gather(1, self.table.bin(u)[:, None]).squeeze(1)

    def quantile(self, v: Tensor) -> Tensor:
        """Where v lands, one v a row."""
        mass, edges = self.mass, self.table.edges
        cumulative = mass.cumsum(1)
        target = (v * cumulative[:, -1])[:, None]
        index = torch.searchsorted(cumulative, target, right=True).clamp(max=mass.shape[1] - 1)
        hit = mass.gather(1, index)
        inside = ((target - (cumulative.gather(1, index) - hit)) / hit.clamp(min=1e-30)).clamp(0, 1 - mass.shape[1] * 2.0**-22)
        index, inside = index.squeeze(1), inside.squeeze(1)
        return edges[index] + inside * (edges[index + 1] - edges[index])
