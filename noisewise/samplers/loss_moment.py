"""Loss second moment (Nichol & Dhariwal 2021, improved DDPM, Eq. 18). Card: docs/methods/loss_moment.md."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from noisewise import distributed
from noisewise.processes import Process
from noisewise.samplers.base import Draw, LossAt, Sampler
from noisewise.samplers.correction import Correction
from noisewise.samplers.histogram import Histogram


class LossMoment(Sampler):
    """q_t proportional to sqrt(E[L_t^2]) over each timestep's last losses; uniform until every timestep has enough.

    Args:
        history: how many losses of each timestep to keep.
        floor: the uniform share.
        bins: intervals of u for continuous processes, and for discrete ones with more timesteps than that.
        correction: "unbiased" as published, so that the objective does not change.
    """

    constant = False

    def __init__(
        self,
        process: Process,
        history: int = 10,
        floor: float = 0.001,
        bins: int = 1000,
        correction: str | Correction = "unbiased",
        **common: Any,
    ) -> None:
        super().__init__(process, correction=correction, **common)
        if history < 1 or bins < 1:
            raise ValueError(f"history and bins must be >= 1, got {history} and {bins}")
        if not 0 <= floor <= 1:
            raise ValueError(f"floor must lie in [0, 1], got {floor}")
        bins = min(process.steps or bins, bins)
        self.floor = floor
        self.table = Histogram(torch.ones(bins))
        self.register_buffer("losses", torch.zeros(bins, history))
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.int64))
        self.register_buffer("skipped", torch.zeros((), dtype=torch.int64))
        self.losses: Tensor
        self.counts: Tensor
        self.skipped: Tensor

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.table.density(u)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        return self.table.quantile(v)

    @contextmanager
    def feedback(self, draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> Iterator[None]:
        losses = self.check_losses(losses)
        yield
        self._learn(draw.u, losses)

    @torch.no_grad()
    def _learn(self, u: Tensor, losses: Tensor) -> None:
        pairs = distributed.gather_rows(torch.stack([u.float(), losses], 1))
        which, values = self.table.bin(pairs[:, 0]), pairs[:, 1]
        bins, history = self.losses.shape
        which = torch.where(torch.isfinite(values), which, bins)  # one bin more, for what is not a number
        self.skipped += (which == bins).sum()
        order = torch.argsort(which, stable=True)
        which, values = which[order], values[order]
        in_batch = (which[:, None] == torch.arange(bins + 1, device=u.device)).sum(0)
        first = in_batch.cumsum(0) - in_batch
        occurrence = torch.arange(len(which), device=u.device) - first[which]
        counts = torch.cat([self.counts, self.counts.new_zeros(1)])
        slot = (counts[which] + occurrence) % history
        stale = occurrence < in_batch[which] - history  # overwritten within this very batch
        which = torch.where(stale, bins, which)
        kept = torch.cat([self.losses, self.losses.new_zeros(1, history)])
        kept[which, slot] = torch.where(which == bins, 0.0, values)
        self.losses.copy_(kept[:bins])
        self.counts += in_batch[:bins]
        self._rebuild()

    def _rebuild(self) -> None:
        root = self.losses.pow(2).mean(1).sqrt()
        total = root.sum()
        share = torch.where(total > 0, root / total.clamp(min=1e-30), 1 / len(root))
        mass = (1 - self.floor) * share + self.floor / len(root)
        warm = (self.counts >= self.losses.shape[1]).all()
        self.table.set(torch.where(warm, mass, torch.ones_like(mass)))
