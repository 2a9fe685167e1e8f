"""How many samples each estimator sends through the model: counted, not timed."""

import pytest
import torch
from torch import nn

from noisewise import DDPM, AdaptiveSampler
from noisewise.samplers import paper_cifar10


class Counting:
    """Training with a loss that counts the samples sent through the model, forward only and for gradients."""

    def __init__(self, sampler, batch=16):
        self.sampler, self.batch, self.forward, self.backward = sampler, batch, 0, 0
        self.parameter = nn.Parameter(torch.zeros(3))
        self.model = nn.Module()
        self.model.parameter = self.parameter
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        sampler.attach(self.model, self.optimizer)

    def loss_at(self, rows, u):
        if torch.is_grad_enabled():
            self.backward += len(u)
        else:
            self.forward += len(u)
        return ((self.parameter.sum() - u + 0.1 * torch.randn(len(u))) ** 2) + 0.01

    def step(self):
        """Samples through the model for the sampler alone, in one step."""
        draw = self.sampler.sample(torch.zeros(self.batch, 3))
        losses = self.loss_at(slice(None), draw.u)
        losses.mean().backward()
        self.forward = self.backward = 0
        with self.sampler.observe(draw, losses.detach(), self.loss_at):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return self.forward, self.backward


@pytest.mark.parametrize(("strata", "chosen", "batch"), [(1000, 3, 128), (100, 3, 16), (20, 1, 7), (10, 10, 64)])
def test_cost_of_reinforce(strata, chosen, batch):
    sampler = AdaptiveSampler(DDPM.linear(), "reinforce", strata=strata, chosen=chosen, every=3, policy="global")
    counting = Counting(sampler, batch)
    n = strata + chosen * batch
    calls = -(-n // (8 * batch))
    n = calls * -(-n // calls)  # the last call is filled up
    costs = [counting.step() for _ in range(9)]
    assert costs == [(0, 0), (0, 0), (3 * n, 0)] + 2 * [(0, 0), (0, 0), (2 * n, 0)]


def test_probes_are_sent_in_calls_of_a_limited_size():
    sampler = AdaptiveSampler(DDPM.linear(), "reinforce", strata=100, every=1, policy="global", probe_batch=64)
    counting = Counting(sampler, 16)
    assert [counting.step() for _ in range(2)] == [(3 * 3 * 50, 0), (2 * 3 * 50, 0)]


def test_cost_of_the_papers_settings():
    """2 |S| |B| + 2 T samples an update."""
    counting = Counting(paper_cifar10(DDPM.linear()), 128)
    costs = [counting.step() for _ in range(80)]
    assert costs[79] == (2 * (3 * 128 + 1000), 0)
    assert sum(forward for forward, _ in costs[40:]) == costs[79][0]


@pytest.mark.parametrize(("strata", "horizon", "probe", "batch"), [(4, 1, 16, 16), (5, 3, 40, 16)])
def test_cost_of_lookahead_keeps_its_budget(strata, horizon, probe, batch):
    sampler = AdaptiveSampler(DDPM.linear(), "lookahead", strata=strata, horizon=horizon, probe=probe, budget=0.25, warmup=1)
    counting = Counting(sampler, batch)
    interval = sampler.estimator.interval(batch)
    costs = [counting.step() for _ in range(1 + 3 * interval)]
    events = [i for i, cost in enumerate(costs) if cost != (0, 0)]
    assert events == [0, interval, 2 * interval, 3 * interval]
    forward, backward = costs[0]
    assert (forward, backward) == ((strata + 1) * probe, strata * horizon * batch)
    assert forward + 3 * backward == sampler.estimator.cost(batch)
    assert (forward + 3 * backward) / (interval * 3 * batch) <= 0.25


def test_the_default_costs_nothing():
    counting = Counting(AdaptiveSampler(DDPM.linear()))
    assert {counting.step() for _ in range(300)} == {(0, 0)}
