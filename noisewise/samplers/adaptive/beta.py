"""Beta distributions, one a row: exact density, distribution function and quantile, which torch does not have.

In z = logit(u) a Beta's density u^a (1 - u)^b / B(a, b) is a smooth bell. It is integrated in 256 cells of z by Gauss-Legendre
rules of 4 points, between the logits of 2^-24 and 1 - 2^-24; what lies below is known in closed form. A quantile lies in the
cell that its cumulative mass says, and Newton's method finds it there. With a and b from 0.05 to 50 the distribution function
is exact to 1e-8 (tests/samplers/test_beta_rows.py), less than what a float32 u can tell apart.

Draws stay within [2^-24, 1 - 2^-24], where every density is finite: what lies beyond is drawn at that end, so the mass of a
timestep is exact too.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from noisewise.running import wide

LEAST = 2.0**-24
END = math.log((1 - LEAST) / LEAST)
CELLS = 256
NODES = ((-0.8611363115940526, 0.3478548451374538), (-0.3399810435848563, 0.6521451548625461))
NEWTON = 4
ROWS = 256  # in one evaluation of many points, to bound its memory


@lru_cache(maxsize=16)
def _rule(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes and weights of the rule on [0, 1], with the right end as a node that counts nothing; left ends of the cells."""
    both = [*NODES, *((-node, weight) for node, weight in reversed(NODES)), (1.0, 0.0)]
    nodes, weights = torch.tensor(both, dtype=torch.float64).unbind(1)
    left = torch.arange(CELLS, dtype=torch.float64) * (2 * END / CELLS) - END
    return ((nodes + 1) / 2).to(device, dtype), (weights / 2).to(device, dtype), left.to(device, dtype)


class BetaRows:
    """q(u) = (1 - floor) Beta(a, b) + floor for each row of `ab`, in double precision.

    Args:
        ab: (B, 2).
        floor: the share of uniform mass.
        inside: the interval that Beta's own [0, 1] is drawn over.
    """

    def __init__(self, ab: Tensor, floor: float = 0.0, inside: tuple[float, float] = (0.0, 1.0)) -> None:
        self.ab, self.floor, self.inside = wide(ab), floor, inside
        self.a, self.b = self.ab.unbind(1)
        self.total = self.a + self.b
        self.log_scale = torch.lgamma(self.total) - torch.lgamma(self.a) - torch.lgamma(self.b)  # -log B(a, b)

    def log_density(self, u: Tensor) -> Tensor:
        """log q(u), one u a row; its gradient reaches `ab`."""
        low, high = self.inside
        place = (wide(u) - low) / (high - low)
        x = place.clamp(LEAST, 1 - LEAST)
        log_beta = (self.a - 1) * torch.log(x) + (self.b - 1) * torch.log1p(-x) + self.log_scale - math.log(high - low)
        log_beta = torch.where((place >= 0) & (place <= 1), log_beta, -math.inf)
        return log_beta if self.floor == 0 else torch.log((1 - self.floor) * torch.exp(log_beta) + self.floor)

    def density(self, u: Tensor) -> Tensor:
        """q(u), one u a row."""
        return torch.exp(self.log_density(u)).to(u.dtype)

    def entropy(self) -> Tensor:
        """Of each Beta, in nats; without the floor."""
        a, b, total = self.a, self.b, self.total
        inner = (a - 1) * torch.digamma(a) + (b - 1) * torch.digamma(b) - (total - 2) * torch.digamma(total)
        return -self.log_scale - inner

    @torch.no_grad()
    def quantile(self, v: Tensor) -> Tensor:
        """Where v lands, one v a row: the first `floor` of the probability is uniform, the rest Beta's."""
        if self.floor == 1:
            return v
        low, high = self.inside
        u = self._quantile(((wide(v) - self.floor) / (1 - self.floor)).clamp(0, 1)).clamp(LEAST, 1 - LEAST)
        u = (low + (high - low) * u).to(v.dtype).clamp(LEAST, 1 - LEAST)
        return u if self.floor == 0 else torch.where(v < self.floor, (v / self.floor).clamp(LEAST, 1 - LEAST), u)

    def masses(self, edges: Tensor) -> Tensor:
        """(B, K) masses of q in the intervals between the edges."""
        low, high = self.inside
        places = (wide(edges) - low) / (high - low)
        parts = [BetaRows(ab)._cdf(places) for ab in self.ab.detach().split(ROWS)]
        return (1 - self.floor) * torch.cat(parts).diff().clamp(min=0) + self.floor * wide(edges).diff()

    # In z, of Beta alone --------------------------------------------------------------------------------------------

    def _bell(self, z: Tensor) -> Tensor:
        """The density of z = logit(u), exp(a z - (a + b) log(1 + exp z)) / B(a, b), in few kernels; z is (B, ...)."""
        a, total, log_scale = (one.view(-1, *[1] * (z.ndim - 1)) for one in (self.a, self.total, self.log_scale))
        return torch.addcmul(torch.addcmul(log_scale, a, z), total, torch.nn.functional.softplus(z), value=-1).exp_()

    def _integral(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Of the bell, over intervals no wider than a cell; and the bell at their right ends."""
        nodes, weights, _ = _rule(self.a.device, self.a.dtype)
        width = right - left
        values = self._bell(torch.addcmul(left[..., None], width[..., None], nodes))
        return width * (values * weights).sum(-1), values[..., -1]

    def _cumulative(self) -> tuple[Tensor, Tensor]:
        """(B, CELLS): the mass of each cell, and all that lies below its right end."""
        left = _rule(self.a.device, self.a.dtype)[2].expand(len(self.a), -1)
        mass = self._integral(left, left + 2 * END / CELLS)[0]
        below = torch.exp(self.a * math.log(LEAST) + self.log_scale) * (1 / self.a - (self.b - 1) * LEAST / (self.a + 1))
        return mass, below[:, None] + mass.cumsum(1)

    def _quantile(self, v: Tensor) -> Tensor:
        mass, cumulative = self._cumulative()
        cell = torch.searchsorted(cumulative, v[:, None].contiguous()).clamp(max=CELLS - 1)
        inside = mass.gather(1, cell).squeeze(1)
        wanted = v - (cumulative.gather(1, cell).squeeze(1) - inside)
        left = _rule(v.device, v.dtype)[2][cell.squeeze(1)]
        right = left + 2 * END / CELLS
        z = torch.lerp(left, right, (wanted / inside.clamp(min=1e-300)).clamp(0, 1))
        for _ in range(NEWTON):
            found, slope = self._integral(left, z)
            z = (z - (found - wanted) / slope.clamp(min=1e-300)).clamp(left, right)
        return torch.sigmoid(z)

    @torch.no_grad()
    def _cdf(self, u: Tensor) -> Tensor:
        """(B, K): the distribution function at K points u."""
        mass, cumulative = self._cumulative()
        z = torch.logit(u.clamp(LEAST, 1 - LEAST)).clamp(-END, END)
        cell = ((z + END) * (CELLS / (2 * END))).long().clamp(0, CELLS - 1)
        left = _rule(u.device, u.dtype)[2][cell]
        rows = len(self.a)
        value = (cumulative - mass)[:, cell] + self._integral(left.expand(rows, -1), z.expand(rows, -1))[0]
        return torch.where(u <= 0, 0.0, torch.where(u >= 1, 1.0, value.clamp(0, 1)))
