"""Sampling by gradient variance (the ablation of arXiv 2411.09998, Table 4). Card: docs/methods/gradient_variance.md."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from noisewise import distributed
from noisewise.feedback import differentiate, preserved_buffers, preserved_random_state, set_aside_gradients, squared_norm
from noisewise.levels import check_size
from noisewise.objective import Objective
from noisewise.processes import Process
from noisewise.samplers.base import Draw, LossAt
from noisewise.samplers.histogram import Histogram
from noisewise.samplers.learning import Learner, split_objective
from noisewise.streams import stream_key, uniforms


class GradientVariance(Learner):
    """q proportional to Var[grad L_u] in strata of u. A known bad idea, kept as the paper's baseline.

    One stratum is measured every `every` steps, in turn: the gradients g1, g2 of two disjoint halves of m rows give the
    unbiased estimate m / 2 * |g1 - g2|^2 of a single sample's gradient variance. Both halves go through the model in one
    batch, the second with negative weights: what comes back is g1 - g2. Cost: 2 m samples forward and backward a measurement,
    which is 2 m / (every * batch) of training (5 % with the defaults at a batch of 128).

    Needs `attach(model)` and `loss_at`.
    """

    probes = wants_model = True

    def __init__(
        self,
        process: Process | Objective,
        strata: int = 20,
        every: int = 10,
        rows: int = 32,
        decay: float = 0.9,
        floor: float = 0.01,
        **common: Any,
    ) -> None:
        if strata < 1 or every < 1 or rows < 1:
            raise ValueError(f"strata, every and rows must be >= 1, got {strata}, {every} and {rows}")
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {decay}")
        process, common["objective"] = split_objective(process, common.get("objective"))
        strata = min(check_size("strata", strata), process.steps or strata)
        super().__init__(process, Histogram(torch.ones(strata)), floor=floor, **common)
        self.every, self.rows, self.decay = every, rows, decay
        self.register_buffer("variance", torch.zeros(strata, dtype=torch.float32))
        self.register_buffer("measured", torch.zeros(strata, dtype=torch.int64))
        self.variance: Tensor
        self.measured: Tensor

    @contextmanager
    def feedback(self, draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> Iterator[None]:
        if not self._model or loss_at is None:
            raise RuntimeError(
                "GradientVariance differentiates the model: call sampler.attach(model) once, and pass loss_at to observe()"
            )
        self.count_bad(losses)
        yield
        if self.step % self.every == 0:
            self._measure(draw.rows, draw.u.device, loss_at)

    def _measure(self, batch: int, device: torch.device, loss_at: LossAt) -> None:
        stratum = (self.step // self.every) % self.table.bins
        rows = max(min(self.rows, batch // 2), 1)
        key = stream_key(self.seed, self.step, distributed.rank(), 3)
        u = (stratum + uniforms(key, 2 * rows, device)) / self.table.bins
        index = torch.arange(2 * rows, device=device) % batch
        # g1 - g2 is the gradient of the difference of the halves' losses: one pass for both
        weight = self.on_target(torch.full_like(u, 1 / rows), u)
        weight[rows:] *= -1
        model = self._model[0]
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        untouched = set_aside_gradients(parameters)
        with preserved_random_state(), preserved_buffers(model), untouched as backward, torch.enable_grad():
            differentiate(loss_at, index, u, weight, backward)
            difference = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not difference:
            raise RuntimeError("loss_at gave no gradient to any parameter of the attached model: attach the one it calls")
        with torch.no_grad():
            self._learn(stratum, squared_norm(difference) * rows / 2)

    def _learn(self, stratum: int, variance: Tensor) -> None:
        # With DDP both halves were averaged over ranks, which divides their variance by the number of ranks: the sum makes up
        # for it. Without it, the sum is of what each rank has found.
        variance = distributed.gather_sum(variance)
        finite = torch.isfinite(variance)
        self.skipped.note(~finite)
        decay = torch.where(self.measured[stratum] > 0, self.decay, torch.zeros_like(self.variance[stratum]))
        updated = self.variance[stratum] * decay + torch.where(finite, variance, 0.0) * (1 - decay)
        self.variance[stratum] = torch.where(finite, updated, self.variance[stratum])
        self.measured[stratum] += finite.long()
        self.propose(torch.where((self.measured > 0).all(), self.variance, torch.ones_like(self.variance)))
