"""What probing and look-ahead leave as it was: random state, gradients, buffers, parameters, optimizer."""

import copy

import pytest
import torch
from torch import nn

import noisewise
from noisewise import DDPM, AdaptiveSampler, Flow, Objective
from noisewise.feedback import Snapshot, evaluate


class Noisy(nn.Module):
    """A model with dropout and running statistics, which probing must neither see change nor change."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x, time):
        return self.layers(torch.cat([x, time[:, None].float() / 1000], 1))


def noisy_run(spec, steps, **settings):
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    objective = Objective(DDPM.linear())
    recipe = noisewise.recipe(spec, objective.process, **settings)
    sampler = recipe.sampler.attach(model, optimizer)
    data = torch.Generator().manual_seed(0)
    for step in range(steps):
        x0 = torch.randn(32, 3, generator=data)

        def loss_at(rows, u, x0=x0):
            return objective.losses(model, x0[rows], u)

        torch.manual_seed(step)
        draw = sampler.sample(x0)
        losses = loss_at(slice(None), draw.u)
        optimizer.zero_grad()
        (draw.weight * losses).mean().backward()
        with sampler.observe(draw, losses.detach(), loss_at):
            optimizer.step()
        yield model, optimizer, sampler, loss_at


PROBING = [
    "paper_cifar10:every=2,floor=1",
    "released_cifar10:every=2,floor=1",
    "adaptive:estimator=reinforce,every=2,strata=20,floor=1,correction=none",
    "adaptive:estimator=lookahead,strata=3,horizon=2,budget=1,probe=32,warmup=1,floor=1,correction=none",
    "gradient_variance:strata=3,every=2,floor=1,correction=none",
]


@pytest.mark.parametrize("spec", PROBING)
def test_training_is_bit_for_bit_as_without_probing(spec):
    """With a floor of 1 the draws are uniform, so nothing at all may differ from training with a sampler that only watches."""
    probed = list(noisy_run(spec, 12))[-1]
    watching = f"adaptive:estimator=loss,strata={probed[2].table.bins},floor=1,correction=none,draws={probed[2].draws}"
    plain = list(noisy_run(watching, 12))[-1]
    for key, value in plain[0].state_dict().items():
        assert torch.equal(value, probed[0].state_dict()[key]), key
    for first, second in zip(plain[1].state.values(), probed[1].state.values(), strict=True):
        assert first["step"] == second["step"]


def test_a_trial_is_taken_back_bit_for_bit():
    model, optimizer, sampler, loss_at = list(
        noisy_run("adaptive:estimator=lookahead,strata=3,horizon=3,budget=1,probe=32,warmup=100", 5)
    )[-1]
    model.layers[0].weight.grad = torch.ones_like(model.layers[0].weight)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    gains = sampler.estimator.measure(sampler, 32, torch.device("cpu"), loss_at)
    assert bool((gains != 0).all())
    after = (model.state_dict(), optimizer.state_dict(), torch.get_rng_state())
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])
    for index, entries in before[1]["state"].items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(after[1]["state"][index][key]))
            for key, value in entries.items()
        )
    assert torch.equal(before[2], after[2])
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())


class Counting(torch.optim.SGD):
    """Keeps what it has learned in its parameter groups, as Prodigy, D-Adaptation and schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["trust"] = 0.9 * group.get("trust", 1.0)
            group["counts"] = [*group.get("counts", []), len(group["params"])]
        super().step(closure)


def test_what_an_optimizer_keeps_in_its_groups_is_put_back():
    model = Noisy()
    rate = torch.tensor(0.1)
    optimizer = Counting(model.parameters(), lr=rate)
    for one in (optimizer.step, optimizer.step):
        one()
    snapshot = Snapshot(model, optimizer)
    for _ in range(2):
        optimizer.step()
        optimizer.param_groups[0]["lr"].mul_(2)
        snapshot.restore()
        (group,) = optimizer.param_groups
        assert group["trust"] == pytest.approx(0.81)
        assert group["counts"] == [len(group["params"])] * 2
        assert group["lr"] is rate
        assert float(rate) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "spec", ["adaptive:estimator=lookahead,strata=3,horizon=2,probe=32,warmup=1", "gradient_variance:every=1"]
)
def test_gradients_of_what_the_loss_reaches_besides_the_model_are_left_alone(spec):
    """A text encoder, say, with an optimizer of its own that steps later."""
    torch.manual_seed(0)
    model, encoder, frozen = Noisy(), nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
    optimizer, objective = torch.optim.SGD(model.parameters(), lr=1e-2), Objective(DDPM.linear())
    sampler, x0 = noisewise.recipe(spec, objective).sampler.attach(model, optimizer), torch.randn(32, 3)

    def loss_at(rows, u):
        return objective.losses(lambda x, time: model(x, time) + encoder(frozen(x)), x0[rows], u)

    draw = sampler.sample(x0)
    losses = loss_at(slice(None), draw.u)
    losses.mean().backward()
    gradient, before = encoder.weight.grad, encoder.weight.grad.clone()
    with sampler.observe(draw, losses.detach(), loss_at):
        optimizer.step()
    assert encoder.weight.grad is gradient
    assert torch.equal(gradient, before)


def test_a_trial_before_the_first_step_leaves_no_optimizer_state():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    snapshot = Snapshot(model, optimizer)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert optimizer.state
    snapshot.restore()
    assert not optimizer.state


def test_noise_and_dropout_are_paired():
    model, _, _, loss_at = list(noisy_run(PROBING[0], 1))[-1]
    rows, u = torch.arange(32).repeat(3), torch.rand(96)
    settings = {"most": 32, "seed": 5, "model": model}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    first, again = (evaluate(loss_at, rows, u, **settings) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, evaluate(loss_at, rows, u, most=32, seed=6, model=model))
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_noise_that_cannot_be_paired_is_reported():
    sampler = AdaptiveSampler(Flow(), "reinforce", every=1, strata=10)
    own = torch.Generator().manual_seed(0)
    draw = sampler.sample(torch.zeros(8, 2))
    with (
        pytest.warns(RuntimeWarning, match="global random state"),
        sampler.observe(draw, torch.ones(8), lambda rows, u: torch.rand(len(u), generator=own)),
    ):
        pass
