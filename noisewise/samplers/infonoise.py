"""InfoNoise (arXiv 2602.18647): draw where noise takes most information away. Card: docs/methods/infonoise.md."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from noisewise.objective import Objective, bounded
from noisewise.processes import Process
from noisewise.running import RunningLoss
from noisewise.samplers.base import Draw, LossAt
from noisewise.samplers.histogram import Histogram, edges_around
from noisewise.samplers.learning import Learner, split_objective

GATE = 3  # the exponent of the gate, as published
ONSET = 0.002  # of the largest rate over sigma: where the rule for the pivot looks, as published
NOISE = (0.002, 80.0)  # the noise-to-signal ratios of interest, EDM's: over all of them the rate has no finite integral
TAIL = 1e-3  # the reference probability at either end that gets one stratum at least
POINTS = 16  # where a stratum's factors are averaged


class InfoNoise(Learner):
    """q proportional to (entropy rate) / (loss weight), the rate by I-MMSE from the losses of training.

    Information about x0 is lost at the rate SNR mmse / 2 per unit of log SNR. mmse, the least error in x0, is unknown; the
    running loss, as an error in x0, stands for it. The objective counts that error by w, and q w follows the rate.

    Args:
        pivot: the noise-to-signal ratio below which the rate is faded out, since noise this small removes only detail that
            no model gets back; 0 for no gate, None for the published rule (the largest ratio with 0.002 of the peak rate).
        strata: intervals in which losses are averaged, all but the first and the last of equal log SNR.
        every: steps between two updates of the density.
        warmup: steps of uniform sampling at the start.
        decay: what a stratum's past counts each time it is seen again.
        floor: the uniform share: keeps every level measured.
    """

    def __init__(
        self,
        process: Process | Objective,
        pivot: float | None = 0.15,
        strata: int = 64,
        every: int = 100,
        warmup: int = 1000,
        decay: float = 0.98,
        floor: float = 0.01,
        **common: Any,
    ) -> None:
        if pivot is not None and not pivot >= 0:
            raise ValueError(f"pivot must be >= 0, or none for the published rule, got {pivot}")
        if strata < 1 or every < 1 or warmup < 0:
            raise ValueError(f"strata and every must be >= 1 and warmup >= 0, got {strata}, {every} and {warmup}")
        process, common["objective"] = split_objective(process, common.get("objective"))
        edges = even_log_snr_edges(process, strata)
        super().__init__(process, Histogram(edges.diff(), edges), floor=floor, **common)
        if self.objective.loss != "mse":
            raise ValueError(f"infonoise reads the squared error off the losses, which {self.objective.loss} losses are not")
        self.pivot, self.every, self.warmup = pivot, every, warmup
        self.running = RunningLoss(edges, decay)  # of the squared error in x0

    @contextmanager
    def feedback(self, draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> Iterator[None]:
        losses = self.check_losses(losses)
        yield
        with torch.no_grad():
            log_snr = bounded(self.process.log_snr(draw.u))
            batch = self.running.update(draw.u, self.objective.per_prediction(losses, draw.u), (-log_snr).exp())
            self.skipped.count(batch[3].sum())
            step = self.step + 1
            if step >= self.warmup and step % self.every == 0:
                self.propose(self.masses())

    def masses(self) -> Tensor:
        """(K,): the integral over each stratum of (entropy rate x gate / loss weight)."""
        edges, places = self.table.edges.double(), torch.arange(POINTS, device=self.device) + 0.5
        u = (edges[:-1, None] + edges.diff()[:, None] * places / POINTS).float().flatten()
        log_snr = bounded(self.process.log_snr(u))
        ratio = (-log_snr / 2).exp()
        # An error in x0 is never larger than the variance of the data, if the model has learned anything.
        mmse = self.running.mean().clamp(0, self.objective.sigma_data**2)
        gate = ratio**GATE / (ratio**GATE + self._pivot(mmse, ratio.view(-1, POINTS)[:, POINTS // 2]) ** GATE)
        ones = torch.ones_like(u)
        in_x0 = self.in_training(ones, u) / self.objective.per_prediction(ones, u)  # over SNR: the weight of an error in x0
        rate = -self.process.log_snr_rate(u) * mmse.repeat_interleave(POINTS) / 2  # times SNR, which the weight has too
        drawn = (rate * gate / in_x0).nan_to_num(0.0, 0.0, 0.0)  # not where a weight is zero
        drawn = torch.where((ratio >= NOISE[0]) & (ratio <= NOISE[1]), drawn, 0.0)
        return drawn.view(-1, POINTS).mean(1) * self.table.widths

    def _pivot(self, mmse: Tensor, ratio: Tensor) -> Tensor:
        """The gate's middle, as a noise-to-signal ratio; mmse / ratio^3 is the entropy rate over the ratio."""
        if self.pivot is not None:
            return ratio.new_tensor(self.pivot)
        rate = mmse / ratio**3
        return torch.where(rate >= ONSET * rate.max(), ratio, 0.0).max()


def even_log_snr_edges(process: Process, strata: int) -> Tensor:
    """Edges in u of strata of equal log SNR, and of what lies outside of `NOISE` or in a `TAIL`; never inside a timestep."""
    fine = process.steps or 2**20
    log_snr = process.log_snr_edges(torch.arange(fine + 1, dtype=torch.float64) / fine)
    most, least = (-2 * math.log(noise) for noise in NOISE)
    ends = log_snr[[round(TAIL * fine), round((1 - TAIL) * fine)]].clamp(least, most)
    wanted = torch.linspace(float(ends[0]), float(ends[1]), max(strata - 1, 1), dtype=torch.float64)
    return edges_around(torch.searchsorted(-log_snr, -wanted), fine)
