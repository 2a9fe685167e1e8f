"""The adaptive sampler: what it costs, what it leaves untouched, what it refuses, what its parts compute."""

import copy
import warnings

import numpy as np
import pytest
import torch
from sklearn.feature_selection import SelectKBest, f_regression
from torch import nn

from noisewise import DDPM, EDM, AdaptiveSampler, Flow, Objective, build
from noisewise.feedback import Snapshot, evaluate, preserved_random_state
from noisewise.samplers import paper_celebahq, paper_cifar10, paper_imagenet
from noisewise.samplers.adaptive.policy import BetaPolicy, beta_masses
from noisewise.samplers.adaptive.selection import SELECTIONS, f_statistic
from noisewise.samplers.static import beta_cdf
from noisewise.weighting import VLB, MinSNR
from tests.samplers.toy import Toy

# What it costs -------------------------------------------------------------------------------------------------------


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


# What it leaves untouched --------------------------------------------------------------------------------------------


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
    recipe = build(spec, objective.process, **settings)
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
    "adaptive:estimator=reinforce,every=2,strata=20,floor=1,correction=none",
    "adaptive:estimator=lookahead,strata=3,horizon=2,budget=1,probe=32,warmup=1,floor=1,correction=none",
    "gradient_variance:strata=3,every=2,floor=1,correction=none",
]


@pytest.mark.parametrize("spec", PROBING)
def test_training_is_bit_for_bit_as_without_probing(spec):
    """With a floor of 1 the draws are uniform, so nothing at all may differ from training with a sampler that only watches."""
    probed = list(noisy_run(spec, 12))[-1]
    plain = list(noisy_run(f"adaptive:estimator=loss,strata={probed[2].table.bins},floor=1,correction=none", 12))[-1]
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


def test_pairing_makes_the_change_visible():
    """The spread of a paired difference is far below that of an unpaired one (methods: about 100 times)."""
    model, _, _, loss_at = list(noisy_run("uniform", 20))[-1]
    rows, u = torch.arange(32).repeat(8), torch.full((256,), 0.3)
    before = evaluate(loss_at, rows, u, most=256, seed=1, model=model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))
    paired = before - evaluate(loss_at, rows, u, most=256, seed=1, model=model)
    fresh = before - evaluate(loss_at, rows, u, most=256, seed=2, model=model)
    assert float(fresh.std() / paired.std()) > 50


def test_noise_that_cannot_be_paired_is_reported():
    sampler = AdaptiveSampler(Flow(), "reinforce", every=1, strata=10)
    own = torch.Generator().manual_seed(0)
    draw = sampler.sample(torch.zeros(8, 2))
    with (
        pytest.warns(RuntimeWarning, match="global random state"),
        sampler.observe(draw, torch.ones(8), lambda rows, u: torch.rand(len(u), generator=own)),
    ):
        pass


# What it refuses, skips and undoes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "settings", "message"),
    [
        ("reinforce", {"chosen": 30, "strata": 20}, "chosen must lie in 1 ... 20"),
        ("reinforce", {"chosen": 0}, "chosen must lie in 1"),
        ("reinforce", {"every": 0}, "every must be >= 1"),
        ("reinforce", {"queue": 1}, "queue >= 2"),
        ("reinforce", {"selection": "best"}, "unknown selection 'best'"),
        ("reinforce", {"policy": "gamma"}, "policy must be"),
        ("reinforce", {"lr": 0.0}, "lr > 0"),
        ("loss", {"every": 0}, "every must be >= 1"),
        ("loss", {"power": 0.0}, "power must be positive"),
        ("loss", {"horizon": 3}, "horizon is a setting of the lookahead estimator, not of loss"),
        ("lookahead", {"budget": 0.0}, "budget"),
        ("lookahead", {"horizon": 0}, "horizon"),
        ("lookahead", {"share": 1.5}, "share"),
        ("loss", {"floor": 1.5}, "floor must lie in"),
        ("loss", {"strata": 0}, "strata must be >= 1"),
        ("loss", {"over": "t"}, "over must be"),
        ("loss", {"collapse": 1.0}, "collapse must lie"),
        ("best", {}, "unknown estimator 'best'"),
    ],
)
def test_bad_settings_are_explained(estimator, settings, message):
    with pytest.raises(ValueError, match=message.replace("...", r"\.\.\.")):
        AdaptiveSampler(DDPM.linear(), estimator, **settings)


def test_estimators_say_what_they_need():
    draw = AdaptiveSampler(Flow(), "lookahead").sample(8)
    with (
        pytest.raises(RuntimeError, match="attach"),
        AdaptiveSampler(Flow(), "lookahead").observe(draw, None, lambda rows, u: u),
    ):
        pass
    with pytest.raises(ValueError, match="observe"), AdaptiveSampler(Flow(), "reinforce").observe(draw):
        pass


@pytest.mark.parametrize("answer", [lambda rows, u: u.mean(), lambda rows, u: (u, u), lambda rows, u: u[:, None]])
def test_a_wrong_loss_at_is_explained(answer):
    sampler = AdaptiveSampler(Flow(), "reinforce", every=1, strata=10)
    draw = sampler.sample(torch.zeros(8, 2))
    with pytest.raises(ValueError, match="one loss for each u"), sampler.observe(draw, torch.ones(8), answer):
        pass


def test_a_policy_that_returns_nan_draws_uniformly():
    sampler = AdaptiveSampler(Flow(), "reinforce", strata=10)
    x0 = torch.zeros(64, 3)
    x0[::2] = torch.nan
    draw = sampler.sample(x0)
    assert torch.isfinite(draw.u).all()
    assert torch.isfinite(draw.weight).all()
    torch.testing.assert_close(draw.density[::2], torch.ones(32))


def test_a_collapse_is_reported_and_undone():
    sampler = AdaptiveSampler(DDPM.linear(), "reinforce", strata=1000, policy="global", floor=0.0)
    with torch.no_grad():
        sampler.estimator.policy.head.bias.copy_(torch.tensor([-3.0, 40.0]))
    collapsed = sampler.estimator.masses(torch.zeros(1, 1))[0]
    with pytest.warns(RuntimeWarning, match="collapsed"):
        sampler.settle(collapsed)
    assert int(sampler.collapses) == 1
    torch.testing.assert_close(sampler.density(torch.rand(100)), torch.ones(100))
    mass = sampler.estimator.masses(torch.zeros(1, 1))[0].detach()
    assert float((mass - 1e-3).abs().sum() / 2) < 0.02


def test_a_peaked_density_over_few_strata_is_no_collapse():
    sampler = AdaptiveSampler(Flow(), "loss", strata=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.settle(torch.eye(20)[3])
    assert int(sampler.collapses) == 0


def test_data_of_another_shape_is_explained():
    sampler = AdaptiveSampler(Flow(), "reinforce")
    sampler.sample(torch.zeros(4, 3, 8, 8))
    with pytest.raises(ValueError, match="policy was made for samples of shape"):
        sampler.sample(torch.zeros(4, 3, 16, 16))
    AdaptiveSampler(Flow(), "reinforce", policy="global").sample(torch.zeros(4, 3, 16, 16))


# What its parts compute ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 5, 20])
def test_f_statistic_equals_scikit_learn(n):
    generator = torch.Generator().manual_seed(n)
    columns = torch.randn(n, 200, generator=generator).double()
    columns[:, 17] = 3.0  # constant
    target = columns.sum(1)
    theirs = f_regression(columns.numpy(), target.numpy())[0]
    np.testing.assert_allclose(f_statistic(columns, target).numpy(), theirs, rtol=1e-6, atol=1e-9)
    chosen = set(SELECTIONS["f_statistic"](columns, 3).tolist())
    assert chosen == set(SelectKBest(f_regression, k=3).fit(columns.numpy(), target.numpy()).get_support(indices=True))


def test_a_selector_of_scikit_learns_serves():
    toy = Toy("uniform", DDPM.linear())
    selector = SelectKBest(f_regression, k=2)
    toy.sampler = AdaptiveSampler(DDPM.linear(), "reinforce", every=1, strata=20, chosen=2, selection=selector)
    toy.run(6)
    queue = toy.sampler.estimator.queue[-6:].double().numpy()
    expected = SelectKBest(f_regression, k=2).fit(queue, queue.sum(1)).get_support(indices=True)
    assert toy.sampler.estimator.selected.tolist() == expected.tolist()
    with pytest.raises(TypeError, match="fit"):
        AdaptiveSampler(DDPM.linear(), "reinforce", selection=object())


def test_the_fixed_grid():
    assert SELECTIONS["grid"](torch.zeros(2, 100), 4).tolist() == [12, 37, 62, 87]


@pytest.mark.parametrize(
    "shape", [(), (5,), (3, 1), (3, 7), (3, 32, 32), (4, 64, 64), (1, 8, 8), (3, 5, 40), (2, 4, 8, 8), (3, 1, 1)]
)
def test_the_policy_takes_data_of_any_shape_and_starts_almost_uniform(shape):
    state = torch.get_rng_state()
    policy = BetaPolicy(shape)
    assert torch.equal(state, torch.get_rng_state())
    ab = policy(torch.randn(6, *shape))
    torch.testing.assert_close(ab, torch.full((6, 2), 0.97407), atol=1e-4, rtol=0)


def test_the_papers_policy_has_the_papers_size():
    layers = [layer for layer in BetaPolicy((3, 32, 32)).modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert [tuple(layer.weight.shape[:2]) for layer in layers] == [
        (32, 3),
        (64, 32),
        (128, 64),
        (128, 2048),
        (128, 128),
        (2, 128),
    ]


def test_beta_masses_are_those_of_the_beta_distribution():
    edges = torch.arange(1001) / 1000
    for a, b in ((0.974, 0.974), (2.0, 5.0), (3.0, 1.5)):
        exact = beta_cdf(edges, a, b).diff().float()
        torch.testing.assert_close(beta_masses(torch.tensor([[a, b]]), edges)[0], exact, atol=2e-5, rtol=0.02)


def test_the_policy_gradient_finds_a_bandits_best_arm():
    """Rewards that depend on the drawn u itself: the likelihood-ratio update must move the mass there."""
    sampler = AdaptiveSampler(Flow(), "reinforce", strata=20, policy="global", entropy=0.0, correction="none", lr=0.05)
    for _ in range(500):
        draw = sampler.sample(64)
        sampler.estimator._update_policy(sampler, draw, -((draw.u - 0.7) ** 2))
        sampler.advance()
    mass = sampler.table.mass
    assert 0.6 < float((mass * (torch.arange(20) + 0.5) / 20).sum()) < 0.75
    assert float(mass[11:17].sum()) > 0.6


def test_a_conditional_policy_tells_data_apart():
    sampler = AdaptiveSampler(Flow(), "reinforce", strata=20, entropy=0.0, correction="none")
    x0 = torch.cat([torch.ones(32, 2), -torch.ones(32, 2)])
    for _ in range(300):
        draw = sampler.sample(x0)
        wanted = torch.where(x0[:, 0] > 0, 0.8, 0.2)
        sampler.estimator._update_policy(sampler, draw, -((draw.u - wanted) ** 2))
        sampler.advance()
    mean = (sampler.masses(x0[[0, -1]]) * (torch.arange(20) + 0.5) / 20).sum(1)
    assert float(mean[0]) > float(mean[1]) + 0.25


def test_entropy_keeps_the_policy_wide():
    def width(entropy):
        sampler = AdaptiveSampler(Flow(), "reinforce", strata=50, policy="global", entropy=entropy, correction="none")
        for _ in range(200):
            draw = sampler.sample(64)
            sampler.estimator._update_policy(sampler, draw, -(draw.u**2))
            sampler.advance()
        mass = sampler.estimator.masses(torch.zeros(1, 1))[0]
        return float(torch.exp(-(mass * torch.log(mass * 50)).sum()))

    assert width(3.0) > 2 * width(0.0)


def test_scale_free_rewards_ignore_the_target():
    def selected(target):
        toy = Toy("uniform", DDPM.linear())
        toy.sampler = AdaptiveSampler(DDPM.linear(), "reinforce", every=1, strata=20, scale_free=True, target=target)
        toy.run(5)
        return toy.sampler.estimator.queue

    assert torch.equal(selected(None), selected(VLB()))


@pytest.mark.parametrize(
    ("preset", "process", "hidden", "lr"),
    [
        (paper_cifar10, DDPM.linear, 128, 1e-2),
        (paper_cifar10, DDPM.quadratic, 128, 1e-2),
        (paper_cifar10, DDPM.cosine, 128, 1e-3),
        (paper_celebahq, DDPM.linear, 256, 1e-3),
        (paper_imagenet, DDPM.linear, 256, 1e-3),
        (paper_cifar10, EDM, 128, 1e-2),
    ],
)
def test_presets_carry_the_papers_settings(preset, process, hidden, lr):
    sampler = preset(process())
    estimator = sampler.estimator
    assert (estimator.hidden, estimator.lr, estimator.depth, estimator.every) == (hidden, lr, 2, 40)
    assert (len(estimator.queue), estimator.chosen, estimator.entropy, len(estimator.edges) - 1) == (20, 3, 1e-2, 1000)
    assert (sampler.floor, str(sampler.correction), estimator.normalise) == (0.0, "none", False)
    assert isinstance(sampler.target, VLB)


def test_the_loss_sampler_follows_weight_times_loss():
    sampler = AdaptiveSampler(DDPM.linear(), "loss", weighting=MinSNR(5), warmup=0, every=1, floor=0.1)
    for _ in range(60):
        draw = sampler.sample(512)
        with sampler.observe(draw, 1 + draw.u):
            pass
    u = (torch.arange(1000) + 0.5) / 1000
    wanted = (MinSNR(5)(Objective(DDPM.linear()), u) * (1 + u)).view(20, 50).mean(1)
    wanted = 0.9 * wanted / wanted.sum() + 0.1 / 20
    torch.testing.assert_close(sampler.table.mass, wanted, atol=2e-3, rtol=0.05)


# How it composes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["reinforce", "lookahead"])
def test_autocast_and_compile(estimator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 2))
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    objective = Objective(DDPM.linear())
    settings = {"reinforce": {"every": 2, "strata": 20}, "lookahead": {"warmup": 1, "strata": 3, "budget": 1.0, "probe": 16}}
    sampler = AdaptiveSampler(objective.process, estimator, **settings[estimator]).attach(model, optimizer)
    x0 = torch.randn(16, 2)

    def loss_at(rows, u):
        with torch.autocast("cpu", torch.bfloat16):
            return objective.losses(lambda x, t: compiled(torch.cat([x, t[:, None] / 1000], 1)), x0[rows], u)

    for _ in range(8):
        draw = sampler.sample(x0)
        losses = loss_at(slice(None), draw.u)
        (draw.weight * losses).mean().backward()
        with sampler.observe(draw, losses.detach(), loss_at):
            optimizer.step()
        optimizer.zero_grad()
    assert int(sampler.skipped.total) == 0
    assert torch.isfinite(sampler.table.mass).all()


def test_preserved_random_state_restores_after_an_error():
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="negative"), preserved_random_state(3):
        torch.rand(3), torch.rand(-1)
    assert torch.equal(state, torch.get_rng_state())
