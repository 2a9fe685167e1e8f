"""The samplers of arXiv 2411.09998 against small implementations of its Algorithms 1 and 2, and of the released code."""

import copy
import math

import numpy as np
import pytest
import torch
from sklearn.feature_selection import SelectKBest, f_regression
from torch import nn

import noisewise
from noisewise import DDPM, Objective
from noisewise.feedback import KeptParameters, computing_in
from noisewise.samplers.adaptive.policy import Adam

STEPS, BATCH, EVERY = 30, 8, 2


class Loop:
    """Training of a small eps-model, which keeps what the sampler asked for around the last step."""

    def __init__(self, spec, process, fixed_noise=True):
        torch.manual_seed(0)
        self.process, self.recipe = process, noisewise.recipe(spec, process)
        self.sampler, self.objective = self.recipe.sampler, Objective(process)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.sampler.attach(self.model)
        self.data = torch.Generator().manual_seed(1)
        self.noise = torch.randn(BATCH, STEPS, 3, generator=self.data) if fixed_noise else None
        self.calls = []

    def predict(self, x, time):
        return self.model(torch.cat([x, time[:, None] / STEPS], 1))

    def losses_at(self, x0, rows, u):
        """||eps - eps_theta||^2 over its 3 elements, as a mean."""
        time = self.process.time(u)
        noise = torch.randn(len(u), 3) if self.noise is None else self.noise[rows, time]
        return self.objective.losses(self.predict, x0[rows], u, noise)

    def step(self):
        """One step: the draw, x0, and parameters before and after."""
        x0 = torch.randn(BATCH, 3, generator=self.data)
        self.calls = []

        def loss_at(rows, u):
            losses = self.losses_at(x0, rows, u)
            self.calls.append((rows, u, losses.detach()))
            return losses

        draw = self.sampler.sample(x0)
        losses = loss_at(torch.arange(BATCH), draw.u)
        self.optimizer.zero_grad()
        (draw.weight * self.recipe.weighting.weighted(losses, self.objective, draw.u)).mean().backward()
        self.calls.clear()
        before = copy.deepcopy(self.model.state_dict())
        with self.sampler.observe(draw, losses.detach(), loss_at):
            self.optimizer.step()
        return draw, x0, before


def vlb(process):
    """c_t of Eq. 7 with the variance fixed-large."""
    beta, bar = process.betas, process.alphas_cumprod
    return beta**2 / (2 * beta * (1 - beta) * (1 - bar))


class Watched:
    """The policy as it was before an update, and the gradient that the update took."""

    def __init__(self, sampler, monkeypatch):
        self.sampler, self.gradients = sampler, []
        step = Adam.step

        def watched(adam, parameters, gradient):
            self.gradients.append(gradient.clone())
            step(adam, parameters, gradient)

        monkeypatch.setattr(Adam, "step", watched)

    def remember(self):
        self.policy = copy.deepcopy(self.sampler.estimator.policy)
        if self.policy is not None:
            self.policy.requires_grad_(True)
        self.gradients.clear()

    def check(self, x0, u, rewards, keep_entropy_gradient):
        """One ascent along (reward + 1e-2 H) grad log pi, in the mean over the batch."""
        a, b = self.policy(x0).double().unbind(1)
        beta = torch.distributions.Beta(a, b)
        entropy = beta.entropy() if keep_entropy_gradient else beta.entropy().detach()
        loss = -((rewards + 1e-2 * entropy) * beta.log_prob(u)).mean()
        expected = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(self.policy.parameters()))])
        (gradient,) = self.gradients
        assert float(expected.norm()) > 1e-5
        assert float((gradient - expected).norm() / expected.norm()) < 1e-3


def test_adam_is_torchs_with_the_norm_cut_to_one():
    generator = torch.Generator().manual_seed(0)
    mine = [torch.randn(3, 4, generator=generator), torch.randn(5, generator=generator)]
    theirs = [one.clone().requires_grad_() for one in mine]
    adam, reference = Adam(mine, lr=0.1), torch.optim.Adam(theirs, lr=0.1)
    for scale in (0.01, 10.0, 0.1, 3.0):
        gradient = scale * torch.randn(17, generator=generator)
        adam.step(mine, gradient)
        for one, part in zip(theirs, gradient.split([12, 5]), strict=True):
            one.grad = part.view_as(one).clone()
        nn.utils.clip_grad_norm_(theirs, 1.0)
        reference.step()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight", ["", "+minsnr:gamma=5"])
@pytest.mark.parametrize("make", [DDPM.linear, DDPM.cosine])
def test_the_papers_settings_are_algorithms_1_and_2(make, weight, monkeypatch):
    process = make(STEPS)
    loop = Loop(f"paper_cifar10:every={EVERY},queue=4,lr=0.01{weight}", process)
    estimator = loop.sampler.estimator
    c = vlb(process)
    if weight:  # part of c_t
        snr = process.alphas_cumprod / (1 - process.alphas_cumprod)
        c = c * (5 / snr).clamp(max=1)
    watched, queue, seen = Watched(loop.sampler, monkeypatch), [], set()
    for k in range(1, 8 * EVERY + 1):
        watched.remember()
        draw, x0, before = loop.step()
        if k % EVERY:
            assert loop.calls == []
            continue
        after = copy.deepcopy(loop.model.state_dict())
        one = int(loop.calls[0][0][0])  # Algorithm 2, line 1

        def decrease(rows, time, x0=x0, before=before, after=after):
            u = (time + 0.5) / STEPS
            losses = []
            for parameters in (before, after):
                loop.model.load_state_dict(parameters)
                losses.append(3 * loop.losses_at(x0, rows, u).detach())  # a sum over the elements
            return (c[time] * (losses[0] - losses[1]).double()).float()

        queue = [*queue, decrease(torch.full((STEPS,), one), torch.arange(STEPS))][-4:]  # lines 2 and 3
        if len(queue) == 1:
            assert watched.gradients == []
            continue
        changes = torch.stack(queue).double().numpy()
        selected = set(estimator.selected.tolist())
        if len(queue) > 2:  # with two rows every column explains everything, and any choice will do
            best = SelectKBest(f_regression, k=3).fit(changes, changes.sum(1))
            assert selected == set(best.get_support(indices=True))  # lines 4 to 6
            seen.add(tuple(sorted(selected)))
        rewards = torch.stack([decrease(torch.arange(BATCH), torch.full((BATCH,), t)) for t in selected]).mean(0)  # line 7
        watched.check(x0, draw.u, rewards, keep_entropy_gradient=False)
        assert sum(len(u) for _, u, _ in loop.calls) == 2 * (STEPS + 3 * BATCH) + (STEPS if k == EVERY else 0)
    assert len(seen) > 1  # S has changed, so that another one's rewards would have shown


def released_vlb(process):
    """The code's: at t = 0 its model has the posterior variance of t = 1."""
    beta, bar = process.betas, process.alphas_cumprod
    posterior = beta[1] * (1 - bar[0]) / (1 - bar[1])
    return torch.cat([((1 - bar[0]) / bar[0] / (2 * posterior))[None], vlb(process)[1:]])


def test_the_released_settings_are_the_released_code(monkeypatch):
    process = DDPM.quadratic(STEPS)
    usual = noisewise.recipe("released_cifar10", process).sampler.estimator
    assert (usual.hidden, len(usual.queue), usual.lr) == (256, 20, 1e-2)  # train.py has --capacity 20, and no use of 5
    loop = Loop(f"released_cifar10:every={EVERY},queue=5", process, fixed_noise=False)
    estimator, c = loop.sampler.estimator, released_vlb(process)
    assert estimator.selected.tolist() == [0, 1, 2]  # until there are two rows
    watched, queue = Watched(loop.sampler, monkeypatch), []
    for k in range(1, 9 * EVERY + 1):
        watched.remember()
        selected = estimator.selected.clone()  # of the update before
        draw, x0, _ = loop.step()
        own = (draw.u.double() * STEPS - 0.5) / (STEPS - 1)  # Beta's
        assert torch.equal(draw.time, torch.round(own * (STEPS - 1)).long())
        if k % EVERY:
            continue
        (rows, u, first), (_, _, second) = loop.calls
        assert float((first - second).abs().min()) > 1e-4  # fresh noise, not a small change
        change = (c[process.time(u)] * (first - second).double()).float()
        assert torch.equal(process.time(u[STEPS:]), selected.repeat_interleave(BATCH))
        bits = change[STEPS:].view(3, BATCH).sum(0) / math.log(2)
        inside = own.clamp(2.0**-24, 1 - 2.0**-24)  # where the log-density is finite
        watched.check(x0, inside, bits, keep_entropy_gradient=True)  # from the first update on
        assert len(set(rows[:STEPS].tolist())) == 1
        queue = [*queue, change[:STEPS]][-5:]
        if len(queue) > 2:
            changes = torch.stack(queue).double().numpy()
            best = SelectKBest(f_regression, k=3).fit(changes, changes.sum(1))
            assert set(estimator.selected.tolist()) == set(best.get_support(indices=True))
    assert len(queue) == 5


@pytest.mark.parametrize("make", [DDPM.linear, DDPM.quadratic, DDPM.cosine])
def test_the_released_bound_is_the_kl_of_the_released_code(make):
    """KL(q(x_t-1 | x_t, x0) || p), its parts that do not depend on the model left out, over the squared error of eps."""
    process = make()
    beta, bar = process.betas, process.alphas_cumprod
    before = torch.cat([torch.ones(1, dtype=torch.float64), bar[:-1]])
    posterior = beta * (1 - before) / (1 - bar)
    variance = torch.cat([posterior[1:2], beta[1:]])
    of_x0 = beta * before.sqrt() / (1 - bar)  # how much of an error in x0 reaches the mean
    expected = of_x0**2 * (1 - bar) / bar / (2 * variance)
    u = (torch.arange(1000) + 0.5) / 1000
    found = noisewise.recipe("released_cifar10", process).sampler.on_target(torch.ones(1000), u)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    assert 1.8 < float(found[0] / vlb(process)[0]) < 2


@pytest.mark.parametrize("spec", ["paper_cifar10", "released_cifar10"])
def test_draws_given_the_data_follow_the_density_that_they_say(spec):
    sampler = noisewise.recipe(spec, DDPM.linear()).sampler
    x0 = torch.randn(1, 3, generator=torch.Generator().manual_seed(0)).expand(50_000, 3)
    sampler.sample(x0[:2])
    with torch.no_grad():
        sampler.estimator.policy.head.bias.copy_(torch.tensor([-0.7, 1.3]))
    draw = sampler.sample(x0)
    torch.testing.assert_close(draw.density, sampler.density(draw.u, x0))
    a, b = sampler.estimator.policy(x0[:1]).detach().double()[0].tolist()
    own = draw.u.double() if spec == "paper_cifar10" else (draw.u.double() * 1000 - 0.5) / 999
    scale = 1 if spec == "paper_cifar10" else 1000 / 999
    exact = torch.distributions.Beta(a, b).log_prob(own.clamp(2.0**-24, 1 - 2.0**-24)).exp() * scale
    torch.testing.assert_close(draw.density.double(), exact, rtol=1e-4, atol=0)
    masses = sampler.masses(x0[:1])[0].double()
    counts = torch.bincount(draw.time, minlength=1000).view(50, 20).sum(1)
    spread = (counts - 50_000 * masses.view(50, 20).sum(1)) / (50_000 * masses.view(50, 20).sum(1)).sqrt()
    assert float(spread.abs().max()) < 4.5


def test_the_exact_beta_differs_from_bins_where_it_rises_without_bound():
    """Bins of the density at their middles have a third less in the first timestep at a = 1/2."""
    sampler = noisewise.recipe("paper_cifar10:policy=global", DDPM.linear()).sampler
    with torch.no_grad():
        sampler.estimator.policy.head.bias.copy_(torch.full((2,), math.log(math.exp(0.5 - 1e-5) - 1)))
    first = float(sampler.estimator.masses(torch.zeros(1, 1))[0, 0])
    assert first == pytest.approx(2 / math.pi * math.asin(math.sqrt(1e-3)), rel=1e-5)


def test_a_weighting_that_is_named_as_the_target_stands_alone():
    u, objective = (torch.arange(1000) + 0.5) / 1000, Objective(DDPM.linear())
    for spec, expected in (
        ("paper_cifar10", noisewise.recipe("vlb:normalise=false", DDPM.linear())),
        ("paper_cifar10+none", noisewise.recipe("vlb:normalise=false", DDPM.linear())),
        ("paper_cifar10+p2", noisewise.recipe("vlb:normalise=false+p2", DDPM.linear())),
        ("paper_cifar10:target=(vlb:clip=5)+p2", noisewise.recipe("vlb:clip=5", DDPM.linear())),
    ):
        target = noisewise.recipe(spec, DDPM.linear()).sampler.on_target(torch.ones(1000), u)
        torch.testing.assert_close(target, expected.weighting.weights(objective, u).float())


def test_the_model_must_be_attached():
    sampler = noisewise.recipe("paper_cifar10", DDPM.linear()).sampler
    draw = sampler.sample(torch.zeros(4, 2))
    with (
        pytest.raises(RuntimeError, match=r"recipe\.attach\(optimizer, model\)"),
        sampler.observe(draw, torch.ones(4), lambda rows, u: u),
    ):
        pass


def test_kept_parameters_come_back_and_go():
    model = nn.Linear(3, 2)
    first = model.weight.detach().clone()
    kept = KeptParameters(model)
    with torch.no_grad():
        model.weight += 1
    second = model.weight.detach().clone()
    with kept.put_back():
        assert torch.equal(model.weight, first)
    assert torch.equal(model.weight, second)
    with pytest.raises(KeyError), kept.put_back():
        raise KeyError
    assert torch.equal(model.weight, second)


def test_probes_are_in_float32_under_autocast():
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    attached = nn.Sequential(model)  # of which the loss may call a part
    exact = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(x)
    with computing_in("float32", attached), torch.autocast("cpu", torch.bfloat16):
        inside = model(x)
        assert torch.equal(attached(x), exact)
        assert torch.mm(x, x.T).dtype == torch.bfloat16  # the caller's own is back after the model
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), rounded)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, exact)
    assert not torch.equal(rounded.float(), exact)


def test_rewards_do_not_depend_on_autocast():
    def queue(autocast):
        loop = Loop("paper_cifar10:every=1", DDPM.linear(STEPS))
        plain = loop.losses_at
        found = []

        def losses_at(x0, rows, u):
            training = len(u) == BATCH and not found  # the training step itself is the same in both
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast and not training):
                return plain(x0, rows, u)

        loop.losses_at = losses_at
        loop.step()
        return loop.sampler.estimator.queue[-1]

    np.testing.assert_array_equal(queue(True).numpy(), queue(False).numpy())
