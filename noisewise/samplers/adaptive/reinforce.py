"""The paper's estimator: a policy gradient on the decrease of the objective (arXiv 2411.09998, Alg. 1 and 2).

Every `every` steps the loss is evaluated before and after the optimizer step, with the same noise and dropout: for one sample
of the batch at all K strata (a row of the queue from which the set S is selected), and for every sample at the strata of S
(its reward). S is the one selected at the update before, since it must be known before the step is made.

Cost of an update: 2 (K + |S| B) samples forward, in calls of at most `probe_batch` (and once more the first time, to see
whether noise is paired). Card: docs/methods/adaptive.md.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from noisewise import distributed
from noisewise.feedback import PRECISIONS, at_precision, check_pairing, evaluate
from noisewise.levels import check_size
from noisewise.precision import convolutions
from noisewise.running import LARGEST
from noisewise.samplers.adaptive.estimator import Estimator
from noisewise.samplers.adaptive.policy import Adam, BetaPolicy, beta_masses
from noisewise.samplers.adaptive.selection import get_selection
from noisewise.samplers.base import Draw, LossAt
from noisewise.streams import stream_key

if TYPE_CHECKING:
    from noisewise.samplers.adaptive.sampler import AdaptiveSampler

Probe = Callable[[Tensor, Tensor], Tensor]
"""(rows, u) -> losses."""

NOT_BUILT, GLOBAL = -2, -1  # in the `shape` buffer


class ReinforceEstimator(Estimator):
    """A Beta policy trained by likelihood ratios.

    Args:
        edges: of the strata; the policy's density is taken as constant within each.
        every: optimizer steps between two updates of the policy (f_S).
        queue: how many rows of changes to select from (|Q|).
        chosen: how many strata stand for all of them (|S|); 3, or all if there are fewer.
        selection: "f_statistic", "correlation", "grid", or an object with `fit` and `get_support`.
        policy: "beta" looks at x0; "global" has one Beta for all data.
        hidden: width of the policy's MLP.
        depth: its hidden layers.
        lr: the policy's learning rate.
        entropy: the weight of the entropy bonus, in nats of the density over u.
        normalise: subtract a running mean from the reward and divide by its running deviation. Without it (as published) the
            reward is of the order of 1e-6 and the entropy bonus decides alone.
        scale_free: reward decreases of the log-loss instead of the loss; the target then cancels.
        probe_batch: the most samples to evaluate in one call of the model; by default 8 times the training batch, which
            without gradients takes less memory than a training step.
        precision: what the model computes in when it is probed, "float32" (without TF32), "tf32" or "bf16"; by default as
            `loss_at` has it, and float32 for the settings of the paper.
    """

    strata = 100
    probes = True
    paired = True  # the same noise before and after the step
    least = 2  # rows in the queue before the policy moves: S is then selected
    usual_precision: str | None = None  # of probes; None leaves it to loss_at

    def __init__(
        self,
        edges: Tensor,
        every: int = 40,
        queue: int = 20,
        chosen: int | None = None,
        selection: str | Any = "f_statistic",
        policy: str = "beta",
        hidden: int = 128,
        depth: int = 2,
        lr: float = 1e-2,
        entropy: float = 1e-2,
        normalise: bool = True,
        scale_free: bool = False,
        probe_batch: int | None = None,
        precision: str | None = None,
    ) -> None:
        super().__init__()
        strata = len(edges) - 1
        chosen = min(3, strata) if chosen is None else chosen
        if every < 1 or queue < 2:
            raise ValueError(f"every must be >= 1 and queue >= 2, got {every} and {queue}")
        if not 1 <= chosen <= strata:
            raise ValueError(f"chosen must lie in 1 ... {strata}, the number of strata, got {chosen}")
        if policy not in ("beta", "global"):
            raise ValueError(f'policy must be "beta" or "global", got {policy!r}')
        if hidden < 1 or depth < 0 or not lr > 0 or not entropy >= 0:
            raise ValueError(
                f"hidden must be >= 1, depth >= 0, lr > 0 and entropy >= 0, got {hidden}, {depth}, {lr} and {entropy}"
            )
        check_size("queue x strata", queue * strata, 10_000_000)
        check_size("hidden", hidden, 10_000)
        check_size("depth", depth, 100)
        self.every, self.chosen, self.entropy = every, chosen, entropy
        self.hidden, self.depth, self.lr = hidden, depth, lr
        if probe_batch is not None and probe_batch < 1:
            raise ValueError(f"probe_batch must be >= 1, got {probe_batch}")
        if precision not in (None, *PRECISIONS):
            raise ValueError(f"unknown precision {precision!r} of probes: choose one of {', '.join(PRECISIONS)}")
        self.normalise, self.scale_free, self.probe_batch = normalise, scale_free, probe_batch
        self.precision = self.usual_precision if precision is None else precision
        self.select = get_selection(selection)
        self.conditional = policy == "beta"
        self.register_buffer("edges", edges.clone(), persistent=False)
        self.register_buffer("queue", torch.zeros(queue, strata, dtype=torch.float32))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("selected", torch.arange(chosen))
        self.register_buffer("reward", torch.zeros(3, dtype=torch.float32))  # running mean, square, how much is there
        self.register_buffer("shape", torch.full((8,), NOT_BUILT))
        self.edges: Tensor
        self.queue: Tensor
        self.filled: Tensor
        self.selected: Tensor
        self.reward: Tensor
        self.shape: Tensor
        self.policy: BetaPolicy | None = None
        self.adam: Adam | None = None
        self.pairing_checked = False
        if not self.conditional:
            self._build(None)

    # The policy -----------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # draws may begin in a validation, and the policy is trained later
    def _build(self, shape: tuple[int, ...] | None) -> tuple[BetaPolicy, Adam]:
        """Make the policy for data of this shape (None: for any data)."""
        self.shape.fill_(NOT_BUILT)
        code = [GLOBAL] if shape is None else [len(shape), *shape]
        if len(code) > len(self.shape):
            raise ValueError(f"data of {len(shape or ())} dimensions is not supported; use policy='global'")
        with torch.device("cpu"):
            self.shape[: len(code)] = torch.tensor(code)
            policy = BetaPolicy(shape, self.hidden, self.depth)
            adam = Adam(list(policy.parameters()), self.lr)
        self.policy, self.adam = policy.to(self.edges.device), adam.to(self.edges.device)
        return self.policy, self.adam

    def _policy_for(self, x0: Tensor) -> tuple[BetaPolicy, Adam]:
        if self.policy is None or self.adam is None:
            return self._build(tuple(x0.shape[1:]))
        policy = self.policy
        if policy.shape not in (None, tuple(x0.shape[1:])):
            raise ValueError(
                f"the policy was made for samples of shape {policy.shape}, but this batch's have {tuple(x0.shape[1:])}; "
                "use policy='global' for data of changing shape"
            )
        return policy, self.adam

    def masses(self, x0: Tensor) -> Tensor:
        """(B, K) of the policy itself; for a row of data that is not finite, uniform."""
        ab, finite = self._beta(x0)
        return torch.where(finite[:, None], beta_masses(ab, self.edges), self.edges.diff())

    def _beta(self, x0: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 2) of the policy, and which rows of the data are finite."""
        finite = torch.isfinite(x0.flatten(1)).all(1) if x0.ndim > 1 else torch.isfinite(x0)
        usable = torch.where(finite.view(-1, *[1] * (x0.ndim - 1)), x0, 0.0)
        return self._policy_for(x0)[0](usable), finite

    def reset(self) -> None:
        if self.policy is not None and self.adam is not None:
            self.policy.reset()
            self.adam.reset()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        shape = state_dict.get(prefix + "shape")
        if shape is not None and not torch.equal(shape.cpu(), self.shape.cpu()):
            code = shape.tolist()
            if (code[0] == GLOBAL) == self.conditional:
                mine, other = ("beta", "global") if self.conditional else ("global", "beta")
                raise ValueError(f"the state is of policy={other}, but this sampler has policy={mine}: build it like the other")
            if code[0] == NOT_BUILT:
                self.policy = self.adam = None
            else:
                self._build(None if code[0] == GLOBAL else tuple(code[1 : 1 + code[0]]))
        super()._load_from_state_dict(state_dict, prefix, *args)

    # One update -----------------------------------------------------------------------------------------------------

    @contextmanager
    def feedback(self, sampler: "AdaptiveSampler", draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> Iterator[None]:
        evaluated = self.check(draw, loss_at)
        if (sampler.step + 1) % self.every:
            yield
            return
        probe = self.prober(sampler, draw, evaluated)
        one, batch = self.one_at_all(sampler, draw), self.all_at_selected(draw)
        rows, u = torch.cat([one[0], batch[0]]), torch.cat([one[1], batch[1]])
        before = probe(rows, u)
        if not self.paired:
            probe = self.prober(sampler, draw, evaluated, stream=7)
        elif not self.pairing_checked:
            self.pairing_checked = True
            check_pairing(before, probe(rows, u))
        yield
        row, rewards = self.change(sampler, before, probe(rows, u), u).tensor_split([len(one[1])])
        self._learn(sampler, draw, row, self.rewards(draw, rewards))

    def check(self, draw: Draw, loss_at: LossAt | None) -> LossAt:
        """What evaluates the model, or an error that says what is missing."""
        if loss_at is None:
            raise ValueError("the reinforce estimator evaluates the model: call observe(draw, losses, loss_at)")
        if self.conditional and draw.x0 is None:
            raise ValueError("the policy looks at the data: draw with sample(x0), not with their number, or use policy=global")
        return loss_at

    def prober(self, sampler: "AdaptiveSampler", draw: Draw, loss_at: LossAt, stream: int = 5) -> Probe:
        """(rows, u) to losses, with the same noise at every call."""
        key = stream_key(sampler.seed, sampler.step, distributed.rank(), stream) >> 1
        precise = at_precision(loss_at, self.precision, sampler.model)
        return partial(evaluate, precise, most=self.probe_batch or 8 * draw.rows, seed=key, model=sampler.model)

    def one_at_all(self, sampler: "AdaptiveSampler", draw: Draw) -> tuple[Tensor, Tensor]:
        """One row of the batch at the middles of all strata."""
        one = stream_key(sampler.seed, sampler.step, distributed.rank(), 4) % draw.rows
        u = (self.edges[1:] + self.edges[:-1]) / 2
        return torch.full((len(u),), one, device=u.device), u

    def all_at_selected(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """All rows at the middles of the strata of S: first all of them at its first one."""
        u = ((self.edges[1:] + self.edges[:-1]) / 2)[self.selected.repeat_interleave(draw.rows)]
        return torch.arange(draw.rows, device=u.device).repeat(self.chosen), u

    @torch.no_grad()
    def change(self, sampler: "AdaptiveSampler", before: Tensor, after: Tensor, u: Tensor) -> Tensor:
        """delta: how much the target fell at each u."""
        change = sampler.on_target(before - after, u)
        if self.scale_free:
            change = torch.log(before.clamp(min=1e-12)) - torch.log(after.clamp(min=1e-12))
            change = torch.where(torch.isfinite(before - after), change, torch.nan)
        return torch.where(change.abs() < LARGEST, change, torch.nan)

    def rewards(self, draw: Draw, change: Tensor) -> Tensor:
        """(B,): a sample's own changes over S."""
        return change.view(self.chosen, draw.rows).mean(0)

    def _learn(self, sampler: "AdaptiveSampler", draw: Draw, row: Tensor, rewards: Tensor) -> None:
        row = distributed.gather_sum(row) / distributed.world_size()
        sampler.skipped.note(distributed.gather_sum((~torch.isfinite(rewards)).sum()) + (~torch.isfinite(row)).any())
        if int(self.filled) >= self.least:
            self._update_policy(sampler, draw, rewards)
        self.push(row)

    def push(self, row: Tensor) -> None:
        """Put a row into the queue, unless it has something that is not finite, and select S anew from two rows on."""
        if bool(torch.isfinite(row).all()):
            self.queue.copy_(torch.cat([self.queue[1:], row[None].to(self.queue)]))
            self.filled.add_(1).clamp_(max=len(self.queue))
        if int(self.filled) >= 2:
            self.selected.copy_(self.select(self.queue[-int(self.filled) :], self.chosen))

    def _update_policy(self, sampler: "AdaptiveSampler", draw: Draw, rewards: Tensor) -> None:
        """One step of the policy, unless there is nothing finite to learn from; that is decided on the device, as waiting for
        it would leave it idle."""
        finite = torch.isfinite(rewards)
        rewards = torch.where(finite, rewards, 0.0).double()
        n, total, squares = distributed.gather_sum(torch.stack([finite.double(), rewards, rewards**2]).sum(1))
        advantage = self._advantage(rewards.float(), (total / n).float(), (squares / n).float())
        x0 = draw.u.new_zeros(draw.rows, 1) if draw.x0 is None else draw.x0[-draw.rows :]
        with torch.enable_grad(), convolutions(deterministic=True):  # a resumed run goes on bit for bit
            policy, adam = self._policy_for(x0)
            policy.requires_grad_(True)  # here alone: an optimizer or DDP that finds it has nothing to train
            loss = -(finite * self.merit(sampler, draw, x0, advantage)).sum() / n.float()
            parameters = list(policy.parameters())
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            policy.requires_grad_(False)
        flat = distributed.gather_sum(torch.cat([gradient.flatten() for gradient in gradients]))
        usable = torch.isfinite(flat).all()
        sampler.skipped.note(~usable & (n > 0))
        adam.step(parameters, flat)
        with torch.no_grad():
            updated = distributed.gather_sum(self.masses(x0).double().sum(0))
            sampler.settle(torch.where(usable, updated, torch.nan))  # which is no density, and changes nothing

    def merit(self, sampler: "AdaptiveSampler", draw: Draw, x0: Tensor, advantage: Tensor) -> Tensor:
        """(B,), whose gradient the policy climbs."""
        mass = self.masses(x0)
        widths = self.edges.diff()
        drawn = sampler.table.bin(draw.u[-draw.rows :])[:, None]
        # Its gradient is that of log q where the draw came from this very density, and right up to a factor where a
        # mixture around the sampler made it.
        floored = (1 - sampler.floor) * (mass / widths).gather(1, drawn).squeeze(1) + sampler.floor
        ratio = floored / draw.density[-draw.rows :]
        entropy = -(mass * torch.log((mass / widths).clamp(min=1e-30))).sum(1)
        return advantage * ratio + self.entropy * entropy

    def _advantage(self, rewards: Tensor, mean: Tensor, square: Tensor) -> Tensor:
        if not self.normalise:
            return rewards
        rate = 0.1
        latest = torch.stack([mean, square, torch.ones_like(mean)])
        self.reward.lerp_(torch.where(torch.isfinite(latest).all(), latest, self.reward), rate)
        baseline, second = self.reward[0] / self.reward[2], self.reward[1] / self.reward[2]
        deviation = (second - baseline**2).clamp(min=0).sqrt()
        return (rewards - baseline) / deviation.clamp(min=1e-12)
