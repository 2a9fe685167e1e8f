"""Loss second moment (Nichol & Dhariwal 2021, improved DDPM, Eq. 18). Card: docs/methods/loss_moment.md."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from noisewise import distributed
from noisewise.levels import check_size
from noisewise.objective import Objective
from noisewise.processes import Process
from noisewise.running import RunningLoss
from noisewise.samplers.base import Draw, LossAt
from noisewise.samplers.correction import Correction
from noisewise.samplers.histogram import Histogram
from noisewise.samplers.learning import Learner, split_objective


class LossMoment(Learner):
    """q_t proportional to sqrt(E[L_t^2]) over the last losses of each timestep; uniform until every timestep has enough.

    Args:
        history: how many losses of each timestep to keep.
        floor: the uniform share.
        bins: intervals of u in continuous time, or if there are more timesteps than that.
        correction: "unbiased" as published, so that the objective does not change.
    """

    def __init__(
        self,
        process: Process | Objective,
        history: int = 10,
        floor: float = 0.001,
        bins: int = 1000,
        correction: str | Correction = "unbiased",
        **common: Any,
    ) -> None:
        if history < 1 or bins < 1:
            raise ValueError(f"history and bins must be >= 1, got {history} and {bins}")
        process, common["objective"] = split_objective(process, common.get("objective"))
        bins = min(process.steps or bins, bins)
        check_size("bins x history", bins * history, 10_000_000)
        super().__init__(process, Histogram(torch.ones(bins)), floor=floor, correction=correction, **common)
        self.running = RunningLoss(self.table.edges)  # tells what is an outlier
        self.register_buffer("losses", torch.zeros(bins, history, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.int64))
        self.losses: Tensor
        self.counts: Tensor

    @contextmanager
    def feedback(self, draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> Iterator[None]:
        losses = self.check_losses(losses)
        yield
        self._learn(draw.u, losses, self.on_target(torch.ones_like(losses), draw.u))

    @torch.no_grad()
    def _learn(self, u: Tensor, losses: Tensor, weights: Tensor) -> None:
        ordinary = self.running.ordinary(u, losses, weights)
        self.skipped.count(self.running.update(u, losses, weights)[3].sum())
        rows = distributed.gather_rows(torch.stack([u.float(), weights * losses, ordinary], 1))
        which, values, ordinary = self.table.bin(rows[:, 0]), rows[:, 1], rows[:, 2] > 0
        bins, history = self.losses.shape
        which = torch.where(ordinary, which, bins)  # one bin more, for what is not to be kept
        order = torch.argsort(which, stable=True)
        which, values = which[order], values[order]
        first = torch.searchsorted(which, torch.arange(bins + 2, device=u.device))  # of each bin, and the end
        in_batch = first.diff()
        occurrence = torch.arange(len(which), device=u.device) - first[which]
        counts = torch.cat([self.counts, self.counts.new_zeros(1)])
        slot = (counts[which] + occurrence) % history
        stale = occurrence < in_batch[which] - history  # overwritten within this very batch
        which = torch.where(stale, bins, which)
        kept = torch.cat([self.losses, self.losses.new_zeros(1, history)])
        kept[which, slot] = torch.where(which == bins, 0.0, values)
        self.losses.copy_(kept[:bins])
        self.counts += in_batch[:bins]
        warm = (self.counts >= history).all()
        self.propose(torch.where(warm, self.losses.pow(2).mean(1).sqrt(), torch.ones_like(self.table.mass)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if prefix + "usual.sums" in state_dict:  # where squares, counts and outliers used to lie
            squares, count = state_dict.pop(prefix + "usual.sums")
            state_dict[prefix + "running.sums"] = torch.stack([count, torch.zeros_like(count), squares])
            state_dict[prefix + "running.beyond"] = state_dict.pop(prefix + "usual.counts")
            state_dict[prefix + "running.edges"] = self.running.edges
        super()._load_from_state_dict(state_dict, prefix, *args)
