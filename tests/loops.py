"""One tiny training run, written with `sampler.observe` and through the front door; both must be the same bit for bit."""

from contextlib import nullcontext

import torch
from torch import nn

import noisewise
from noisewise import DDPM, Objective

PROCESS = DDPM.linear()
OBJECTIVE = Objective(PROCESS)
WHERE = ("after the step", "before the draw", "before the losses", "before the backward pass")


class Loop:
    """A loop over optimizer steps; `bad` steps have an infinite loss, which a GradScaler skips."""

    def __init__(
        self, spec, *, accumulate=1, bad=None, zero=WHERE[0], set_to_none=True, rank=0, wrap=lambda model: model, **adam
    ):
        self.recipe = noisewise.recipe(spec, OBJECTIVE)
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 2))
        self.model = wrap(self.inner)
        parameters = [*self.model.parameters(), *self.recipe.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-2, **adam)
        self.accumulate, self.bad, self.zero, self.set_to_none = accumulate, bad or set(), zero, set_to_none
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=bad is not None)
        self.data = torch.Generator().manual_seed(7 + rank)
        self.draws = []
        self.steps = self.noise = 0

    def predict(self, x, time):
        return self.model(torch.cat([x, time[:, None] / 1000], 1))

    def zero_grad(self, where):
        if where == self.zero:
            self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def batch(self):
        """Losses of a new batch at u, with noise that depends on the batch alone."""
        x0 = torch.randn(16, 2, generator=self.data) * torch.tensor([2.0, 0.5])
        self.noise += 1
        torch.manual_seed(self.noise)

        def loss_at(rows, u):
            return OBJECTIVE.losses(self.predict, x0[rows], u)

        return x0, loss_at

    def factor(self):
        return (torch.inf if self.steps in self.bad else 1.0) / self.accumulate

    def first(self, micro, where):
        """Gradients are zeroed before the first micro-batch alone."""
        if micro == 0:
            self.zero_grad(where)

    def run(self, steps):
        for _ in range(steps):
            self.step()
            self.steps += 1
        return self

    def results(self):
        return {
            **{f"state {name}": value for name, value in self.recipe.state_dict().items()},
            **{f"model {name}": value for name, value in self.inner.state_dict().items()},
            **{f"draw {i}": torch.stack([draw.u, draw.weight, draw.density]) for i, draw in enumerate(self.draws)},
        }


class Observed(Loop):
    """The low level: lists, and a block around each step that is really made."""

    def __init__(self, spec, **settings):
        super().__init__(spec, **settings)
        self.recipe.sampler.attach(self.model, self.optimizer)

    def step(self):
        draws, kept = [], []
        for micro in range(self.accumulate):
            x0, loss_at = self.batch()
            self.first(micro, "before the draw")
            draws.append(self.recipe.sampler.sample(x0))
            self.first(micro, "before the losses")
            losses = loss_at(slice(None), draws[-1].u)
            loss = (draws[-1].weight * self.recipe.weighting.weighted(losses, OBJECTIVE, draws[-1].u)).mean()
            self.first(micro, "before the backward pass")
            self.scaler.scale(loss * self.factor()).backward()
            kept.append(losses.detach())
        self.draws += draws
        made = self.steps not in self.bad
        with self.recipe.sampler.observe(draws, kept, loss_at) if made else nullcontext():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.zero_grad("after the step")


class Door(Loop):
    """The front door: three lines."""

    def __init__(self, spec, **settings):
        super().__init__(spec, **settings)
        self.recipe.attach(self.optimizer, self.model)

    def step(self):
        for micro in range(self.accumulate):
            x0, loss_at = self.batch()
            self.first(micro, "before the draw")
            draw = self.recipe.sample(x0)
            self.first(micro, "before the losses")
            loss = self.recipe.loss(draw, loss_at(slice(None), draw.u), loss_at)
            self.first(micro, "before the backward pass")
            self.scaler.scale(loss * self.factor()).backward()
            self.draws.append(draw)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.zero_grad("after the step")


def assert_same(one, other):
    """Two runs whose states, draws and models are equal bit for bit."""
    results, expected = one.results(), other.results()
    assert results.keys() == expected.keys()
    for name in expected:
        assert torch.equal(results[name], expected[name]), name
