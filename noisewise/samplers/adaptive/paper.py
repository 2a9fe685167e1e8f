"""Algorithms 1 and 2 of arXiv 2411.09998 to the letter, and what the authors' released code does instead.

The order of an update, after the step from theta_k to theta_k+1:

1. one x0 at all T timesteps, before and after the step: a row of the queue, pushed first;
2. with two rows or more, S is selected from the queue, this update's row included;
3. the reward of every x0 of the batch is measured on that S. S is known only after the step, so theta_k is kept and put back
   for the forward pass before it;
4. phi moves along (reward + entropy coefficient x H) grad log pi(u | x0), u drawn from Beta itself.

Cost of an update: 2 (T + |S| B) samples forward, as the paper counts them; one copy of the parameters during the step, a second
one while rewards are measured. Cards: docs/methods/paper_cifar10.md and released_cifar10.md.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from noisewise import distributed
from noisewise.feedback import KeptParameters, check_pairing
from noisewise.samplers.adaptive.beta import BetaRows
from noisewise.samplers.adaptive.reinforce import ReinforceEstimator
from noisewise.samplers.base import Draw, LossAt

if TYPE_CHECKING:
    from noisewise.samplers.adaptive.sampler import AdaptiveSampler


class ExactBeta(ReinforceEstimator):
    """Draws from Beta itself, its exact log-density, and probes in float32 unless told otherwise; settings are those of
    `ReinforceEstimator`."""

    usual_precision = "float32"
    entropy_gradient = False  # the paper's entropy is a number beside the reward

    def inside(self) -> tuple[float, float]:
        """Where Beta's [0, 1] lies in u."""
        return 0.0, 1.0

    def rows(self, sampler: "AdaptiveSampler", x0: Tensor) -> BetaRows:
        ab, finite = self._beta(x0)
        return BetaRows(torch.where(finite[:, None], ab, 1.0), sampler.floor, self.inside())

    def masses(self, x0: Tensor) -> Tensor:
        ab, finite = self._beta(x0)
        return BetaRows(torch.where(finite[:, None], ab, 1.0), inside=self.inside()).masses(self.edges).float()

    def merit(self, sampler: "AdaptiveSampler", draw: Draw, x0: Tensor, advantage: Tensor) -> Tensor:
        rows = self.rows(sampler, x0)
        log_density = rows.log_density(draw.u[-draw.rows :]).clamp(min=-700)  # a mixture may draw where Beta has no mass
        entropy = rows.entropy() if self.entropy_gradient else rows.entropy().detach()
        # 1, unless a mixture around the sampler made the draw
        ratio = torch.exp(log_density.detach()) / draw.density[-draw.rows :]
        low, high = self.inside()
        log_policy = log_density + math.log(high - low)  # with respect to Beta's own u
        return (ratio * (advantage + self.entropy * entropy) * log_policy).float()


class PaperEstimator(ExactBeta):
    """The paper's own order."""

    wants_model = True

    @contextmanager
    def feedback(self, sampler: "AdaptiveSampler", draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> Iterator[None]:
        evaluated = self.check(draw, loss_at)
        if sampler.model is None:
            raise RuntimeError(
                "this sampler keeps the parameters of before a step: recipe.attach(optimizer, model), or sampler.attach(model)"
            )
        if (sampler.step + 1) % self.every:
            yield
            return
        probe = self.prober(sampler, draw, evaluated)
        one = self.one_at_all(sampler, draw)
        before = probe(*one)
        if not self.pairing_checked:
            self.pairing_checked = True
            check_pairing(before, probe(*one))
        kept = KeptParameters(sampler.model)
        yield
        row = self.change(sampler, before, probe(*one), one[1])
        row = distributed.gather_sum(row) / distributed.world_size()
        sampler.skipped.note((~torch.isfinite(row)).any())
        self.push(row)
        if int(self.filled) < 2:
            return
        batch = self.all_at_selected(draw)
        after = probe(*batch)
        with kept.put_back():
            before = probe(*batch)
        rewards = self.rewards(draw, self.change(sampler, before, after, batch[1]))
        sampler.skipped.note(distributed.gather_sum((~torch.isfinite(rewards)).sum()))
        self._update_policy(sampler, draw, rewards)

    def rewards(self, draw: Draw, change: Tensor) -> Tensor:
        """The mean over S of c ||eps - eps_theta||^2: a sum over the elements, where losses are means."""
        mean = super().rewards(draw, change)
        return mean if self.scale_free or draw.x0 is None else mean * draw.x0[0].numel()


class ReleasedEstimator(ExactBeta):
    """As the authors' released code has it: fresh noise before and after the step, S of the update before (0, 1, 2 at first:
    the policy moves from the first update on), rewards that are a sum over S in bits per dimension, the entropy's own gradient
    left in, t = round(u (T - 1))."""

    least = 0
    paired = False
    entropy_gradient = True

    def inside(self) -> tuple[float, float]:
        """u (T - 1) + 1/2 within timestep round(u (T - 1)), of T strata."""
        strata = len(self.edges) - 1
        return (0.5 / strata, 1 - 0.5 / strata) if strata > 1 else (0.0, 1.0)

    def rewards(self, draw: Draw, change: Tensor) -> Tensor:
        return change.view(self.chosen, draw.rows).sum(0) / math.log(2)
