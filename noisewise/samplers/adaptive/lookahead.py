"""Look-ahead: try a little more of each stratum for n steps, see what it does to the target, put everything back.

This answers the paper's Eq. 12 directly, and for n > 1 also what it does not ask: what a stratum gives in the long run.
Card: docs/methods/adaptive.md.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from noisewise import distributed
from noisewise.feedback import Snapshot, differentiate, evaluate, preserved_random_state, set_aside_gradients
from noisewise.levels import check_size
from noisewise.samplers.adaptive.estimator import Estimator
from noisewise.samplers.base import Draw, LossAt
from noisewise.streams import stream_key, uniforms

if TYPE_CHECKING:
    from noisewise.samplers.adaptive.sampler import AdaptiveSampler


class LookaheadEstimator(Estimator):
    """Now and then, for each stratum: n optimizer steps with extra mass on it, from the same parameters and optimizer state;
    the decrease of the target over all noise levels, with paired noise; everything restored bit for bit.

    The gains, averaged over time, become the density: proportional to max(gain, 0)^(1 / temperature), or uniform if there are
    no gains at all.

    Args:
        edges: of the strata.
        horizon: steps of a trial (n); 1 is the paper's Eq. 12.
        share: how much of a trial's batch comes from the stratum; the rest is drawn from the current density.
        budget: the cost of all trials as a share of training; it sets how often they are made (`interval`).
        probe: samples in one evaluation of the target.
        decay: what past gains count when new ones are measured.
        temperature: 1 is proportional to the gains; smaller favours the best strata more, and starves others sooner.
        warmup: steps before the first trials.
        scale_free: measure decreases of the log-loss of each stratum instead of the target loss.

    Trials train on the rows of the batch at hand, with fresh noise: the larger the batch, the less they overfit it.
    """

    strata = 10
    probes = wants_model = True

    def __init__(
        self,
        edges: Tensor,
        horizon: int = 8,
        share: float = 0.5,
        budget: float = 0.03,
        probe: int = 512,
        decay: float = 0.5,
        temperature: float = 1.0,
        warmup: int = 250,
        scale_free: bool = False,
    ) -> None:
        super().__init__()
        if horizon < 1 or probe < 1 or warmup < 0:
            raise ValueError(f"horizon and probe must be >= 1 and warmup >= 0, got {horizon}, {probe} and {warmup}")
        for name, size in (("probe", probe), ("horizon", horizon), ("warmup", warmup)):
            check_size(name, size, 2**53)
        if not 0 < share <= 1 or not budget > 0 or not 0 <= decay < 1 or not temperature > 0:
            raise ValueError(
                "share must lie in (0, 1], budget and temperature be positive and decay lie in [0, 1), "
                f"got {share}, {budget}, {temperature} and {decay}"
            )
        self.horizon, self.share, self.budget, self.probe = horizon, share, budget, probe
        self.decay, self.temperature, self.warmup, self.scale_free = decay, temperature, warmup, scale_free
        bins = len(edges) - 1
        self.register_buffer("edges", edges.clone(), persistent=False)
        self.register_buffer("gains", torch.zeros(bins, dtype=torch.float32))
        self.register_buffer("latest", torch.zeros(bins, dtype=torch.float32))
        self.register_buffer("events", torch.zeros(bins, dtype=torch.int64))
        self.register_buffer("due", torch.full((), warmup))
        self.edges: Tensor
        self.gains: Tensor
        self.latest: Tensor
        self.events: Tensor
        self.due: Tensor
        self.next_event = warmup

    def cost(self, batch: int) -> int:
        """Samples of one event, in units of a forward pass; a training sample counts three (forward and backward)."""
        bins = len(self.edges) - 1
        return 3 * bins * self.horizon * batch + (bins + 1) * self.probe

    def interval(self, batch: int) -> int:
        """Steps between two events that keep their cost within the budget."""
        return math.ceil(self.cost(batch) / (self.budget * 3 * batch))

    @contextmanager
    def feedback(self, sampler: "AdaptiveSampler", draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> Iterator[None]:
        if loss_at is None:
            raise ValueError("the lookahead estimator evaluates the model: call observe(draw, losses, loss_at)")
        sampler.attached()
        yield
        if sampler.step + 1 >= self.next_event:
            self._event(sampler, draw, loss_at)
            self.next_event = sampler.step + 1 + self.interval(distributed.largest(draw.rows, draw.u.device))
            self.due.fill_(self.next_event)

    def _event(self, sampler: "AdaptiveSampler", draw: Draw, loss_at: LossAt) -> None:
        gains = self.measure(sampler, draw.rows, draw.u.device, loss_at)
        finite = torch.isfinite(gains)
        sampler.skipped.note((~finite).sum())
        self.latest.copy_(torch.where(finite, gains, self.latest))
        decay = torch.where(self.events > 0, self.decay, torch.zeros_like(self.gains))
        self.gains.copy_(torch.where(finite, self.gains * decay + gains * (1 - decay), self.gains))
        self.events += finite
        best = self.gains.clamp(min=0)
        share = (best / best.max().clamp(min=1e-30)) ** (1 / self.temperature)
        # where extra training of any stratum does harm there is nothing to choose
        sampler.settle(torch.where(best.max() > 0, share, 1.0) * sampler.table.widths)

    def measure(self, sampler: "AdaptiveSampler", batch: int, device: torch.device, loss_at: LossAt) -> Tensor:
        """The gain of each stratum: the decrease of the target after a trial with extra mass on it."""
        model, optimizer = sampler.attached()
        key = stream_key(sampler.seed, sampler.step, distributed.rank(), 6)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        snapshot = Snapshot(model, optimizer)
        with preserved_random_state(), set_aside_gradients(parameters) as backward:
            try:
                before = self._target(sampler, batch, device, loss_at, key)
                outcomes = []
                for stratum in range(len(self.edges) - 1):
                    with preserved_random_state(key >> 1), torch.enable_grad():  # every trial sees the same noise
                        for step in range(self.horizon):
                            optimizer.zero_grad(set_to_none=True)
                            u, weight = self._trial_draw(sampler, stratum, batch, device, stream_key(key, step))
                            differentiate(loss_at, torch.arange(batch, device=device), u, weight, backward)
                            optimizer.step()
                    outcomes.append(self._target(sampler, batch, device, loss_at, key))
                    snapshot.restore()
            finally:
                snapshot.restore()
        return before - torch.stack(outcomes)

    @torch.no_grad()
    def _trial_draw(
        self, sampler: "AdaptiveSampler", stratum: int, batch: int, device: torch.device, key: int
    ) -> tuple[Tensor, Tensor]:
        """u of one step, drawn from (1 - share) q + share uniform(stratum), and what its losses count in the training loss."""
        v = uniforms(key, batch, device)
        low, high = self.edges[stratum], self.edges[stratum + 1]
        inside = (v / self.share).clamp(max=1 - 2.0**-24)
        outside = ((v - self.share) / max(1 - self.share, 1e-9)).clamp(2.0**-24, 1 - 2.0**-24)
        u = torch.where(v < self.share, low + inside * (high - low), sampler.table.draw(outside)[0]).clamp(max=1 - 2.0**-24)
        member = (v < self.share) | (sampler.table.bin(u) == stratum)  # rounding may carry u to the next stratum's edge
        density = (1 - self.share) * sampler.table.density(u) + self.share * member / (high - low)
        mass = (1 - self.share) * sampler.table.mass
        mass = mass + self.share * (torch.arange(len(mass), device=device) == stratum)
        weight = sampler._weight(u, density, (mass, mass / sampler.table.widths))
        return u, sampler.in_training(weight, u) / batch

    @torch.no_grad()
    def _target(self, sampler: "AdaptiveSampler", batch: int, device: torch.device, loss_at: LossAt, key: int) -> Tensor:
        """The target over all noise levels: stratified u, the same noise for each call with one key."""
        n = self.probe
        u = (torch.arange(n, device=device) + uniforms(key, n, device)) / n
        rows = torch.arange(n, device=device) * 7919 % batch  # neighbours in u are different rows
        losses = evaluate(loss_at, rows, u, most=8 * batch, seed=key >> 1, model=sampler.model).double()
        weighted = losses if self.scale_free else sampler.on_target(losses, u)
        if not self.scale_free:
            return (distributed.gather_sum(weighted.mean()) / distributed.world_size()).float()
        member = sampler.table.bin(u)[:, None] == torch.arange(len(self.edges) - 1, device=device)
        sums = distributed.gather_sum(torch.stack([losses, torch.ones_like(losses)]) @ member.double())
        seen = sums[1] > 0
        return (torch.where(seen, torch.log(sums[0].clamp(min=1e-30) / sums[1].clamp(min=1)), 0.0).sum() / seen.sum()).float()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.next_event = int(self.due)

    def reset(self) -> None:
        self.gains.zero_()
        self.events.zero_()
