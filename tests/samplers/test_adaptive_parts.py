"""What the parts of the adaptive sampler compute: selection, policy, rewards, presets."""

from dataclasses import replace

import pytest
import torch
from sklearn.feature_selection import SelectKBest, f_regression
from torch import nn

import noisewise
from noisewise import DDPM, EDM, AdaptiveSampler, Flow, Objective
from noisewise.feedback import computing_in
from noisewise.precision import _switches
from noisewise.samplers import Mix, paper_celebahq, paper_cifar10, paper_imagenet
from noisewise.samplers.adaptive.policy import BetaPolicy, beta_masses
from noisewise.samplers.adaptive.selection import SELECTIONS
from noisewise.samplers.static import beta_cdf
from noisewise.weighting import VLB
from tests.samplers.toy import Toy

OBJECTIVE = Objective(DDPM.linear())


@pytest.mark.parametrize("n", [3, 5, 20])
def test_the_selection_by_f_statistic_is_scikit_learns(n):
    generator = torch.Generator().manual_seed(n)
    columns = torch.randn(n, 200, generator=generator).double()
    columns[:, 17] = 3.0  # constant
    target = columns.sum(1)
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


def test_the_policy_gradient_works_inside_a_mixture():
    """The draws then come from another density than the policy's own; the update must not mistake them for its own."""
    inner = AdaptiveSampler(Flow(), "reinforce", strata=20, policy="global", entropy=0.0, floor=0.0, lr=0.05)
    sampler = Mix(Flow(), inner, floor=0.5)
    for _ in range(500):
        draw = sampler.sample(64)
        inner.estimator._update_policy(inner, draw, -((draw.u - 0.3) ** 2))
        sampler.advance()
    assert 0.25 < float((inner.table.mass * (torch.arange(20) + 0.5) / 20).sum()) < 0.35
    assert float(inner.table.mass[3:9].sum()) > 0.6


def test_a_conditional_policy_tells_data_apart():
    sampler = AdaptiveSampler(Flow(), "reinforce", strata=20, entropy=0.0, correction="none")
    x0 = torch.cat([torch.ones(32, 2), -torch.ones(32, 2)])
    for _ in range(300):
        draw = sampler.sample(x0)
        wanted = torch.where(x0[:, 0] > 0, 0.8, 0.2)
        sampler.estimator._update_policy(sampler, draw, -((draw.u - wanted) ** 2))
        sampler.advance()
    mean = (sampler.masses(x0[[0, -1]]).detach() * (torch.arange(20) + 0.5) / 20).sum(1)
    assert float(mean[0]) > float(mean[1]) + 0.25


def test_entropy_keeps_the_policy_wide():
    def width(entropy):
        sampler = AdaptiveSampler(Flow(), "reinforce", strata=50, policy="global", entropy=entropy, correction="none")
        for _ in range(200):
            draw = sampler.sample(64)
            sampler.estimator._update_policy(sampler, draw, -(draw.u**2))
            sampler.advance()
        mass = sampler.estimator.masses(torch.zeros(1, 1))[0].detach()
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


@pytest.mark.parametrize("spec", ["paper_cifar10:every=1", "adaptive:estimator=reinforce,strata=10"])
@pytest.mark.parametrize("bad", ["rewards", "draws"])
def test_rewards_or_draws_that_are_of_no_use_leave_the_policy_bit_for_bit_as_it_was(spec, bad):
    sampler = noisewise.recipe(spec, Objective(DDPM.linear(20))).sampler
    x0 = torch.randn(8, 1, 4, 4)
    for reward in (1e-3, 1e-2):  # so that there is something to lose
        sampler.estimator._update_policy(sampler, sampler.sample(x0), torch.randn(8) * reward)
    draw, rewards = sampler.sample(x0), torch.full((8,), torch.nan)
    if bad == "draws":
        rewards, draw = torch.ones(8), replace(draw, density=torch.zeros(8))
    before = {name: value.clone() for name, value in sampler.state_dict().items()}
    sampler.estimator._update_policy(sampler, draw, rewards)
    for name, value in sampler.state_dict().items():
        if name.startswith(("estimator.policy", "estimator.adam")) or name == "table.mass":
            assert torch.equal(value, before[name]), name
        if name.startswith("table."):
            torch.testing.assert_close(value, before[name])
    assert bad == "draws" or torch.equal(sampler.estimator.reward, before["estimator.reward"])
    assert int(sampler.skipped.total) == (1 if bad == "draws" else 0)  # the others were counted where they were measured


def test_probes_compute_in_the_precision_that_is_asked_for():
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    found = {}
    for precision in (None, "float32", "tf32", "bf16"):
        sampler = noisewise.recipe("paper_cifar10" + (f":precision={precision}" if precision else ""), OBJECTIVE).sampler
        sampler.attach(model)
        probe = sampler.estimator.prober(sampler, sampler.sample(x), lambda rows, u: model(x[rows]).float().square().mean(1))
        found[precision] = probe(torch.arange(8), torch.full((8,), 0.5))
    assert torch.equal(found[None], found["float32"])
    assert torch.equal(found["tf32"], found["float32"])  # a CPU has none
    assert 0 < float((found["bf16"] - found["float32"]).abs().max()) < 0.1
    assert noisewise.recipe("adaptive:estimator=reinforce", OBJECTIVE).sampler.estimator.precision is None
    with pytest.raises(ValueError, match="unknown precision 'fp8' of probes"):
        noisewise.recipe("paper_cifar10:precision=fp8", OBJECTIVE)


@pytest.mark.parametrize(("precision", "tf32"), [("float32", False), ("tf32", True)])
def test_switches_of_products_return_after_a_probe(precision, tf32):
    def switches():
        return [getattr(where, name) for where, name, _ in _switches()]

    before = switches()
    with computing_in(precision, nn.Linear(2, 2)):
        assert switches() == [value for _, _, value in _switches(tf32)]
    assert switches() == before
    with pytest.raises(KeyError), computing_in(precision, nn.Linear(2, 2)):
        raise KeyError
    assert switches() == before
