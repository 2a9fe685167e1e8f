"""The adaptive sampler: what it refuses, skips and undoes, and how it composes."""

import inspect
import warnings

import pytest
import torch
from torch import nn

from noisewise import DDPM, EDM, AdaptiveSampler, Flow, Objective
from noisewise.feedback import preserved_random_state
from noisewise.objective import PREDICTIONS
from noisewise.samplers.adaptive import ESTIMATORS, lookahead
from noisewise.weighting import MinSNR


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
        ("loss", {"power": float("inf")}, "power must be positive and finite"),
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


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_setting_of_an_estimator_is_hidden_by_one_of_the_sampler(name):
    own = inspect.signature(ESTIMATORS[name]).parameters.keys() - {"edges"}
    assert not own & inspect.signature(AdaptiveSampler).parameters.keys()


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
    with (
        pytest.raises((TypeError, ValueError), match=r"losses of loss_at\(rows, u\) must be"),
        sampler.observe(draw, torch.ones(8), answer),
    ):
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


def test_a_trial_at_the_very_edge_of_its_stratum_weighs_no_more_than_the_others(monkeypatch):
    """Rounding carries such a level to the edge, which belongs to the next stratum: its density is that of the trial."""
    sampler = AdaptiveSampler(Flow(), "lookahead", share=1.0, correction="unbiased")
    monkeypatch.setattr(lookahead, "uniforms", lambda key, n, device: torch.tensor([0.5, 1 - 2.0**-24]))
    for stratum in range(10):
        u, weight = sampler.estimator._trial_draw(sampler, stratum, 2, torch.device("cpu"), 0)
        assert float(u.max()) < 1
        torch.testing.assert_close(weight, torch.full((2,), 0.1 / 2))


def test_lookahead_without_any_gain_goes_back_to_uniform():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sampler = AdaptiveSampler(Flow(), "lookahead", strata=4, horizon=1, warmup=0, probe=16).attach(model, optimizer)
    sampler.settle(torch.tensor([0.7, 0.1, 0.1, 0.1]))
    draw = sampler.sample(8)
    with sampler.observe(draw, torch.ones(8), lambda rows, u: model(u[:, None]).squeeze(1) ** 2):
        pass
    assert torch.equal(sampler.estimator.latest, torch.zeros(4))
    torch.testing.assert_close(sampler.table.mass, torch.full((4,), 0.25))


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


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("process", [DDPM.linear, EDM, Flow])
def test_the_density_does_not_depend_on_the_prediction(prediction, process):
    """The same errors in x0, measured as each prediction's loss, must lead to the same density for the same target."""
    process = process()
    sampler = AdaptiveSampler(
        process, "loss", weighting=MinSNR(5), objective=Objective(process, prediction), warmup=0, every=1, floor=0.1
    )
    torch.manual_seed(0)
    for _ in range(5):
        draw = sampler.sample(512)
        eps_losses = 0.5 + draw.u
        k = Objective(process, prediction).per_prediction(torch.ones_like(draw.u), draw.u)
        with sampler.observe(draw, eps_losses / k):
            pass
    u = (torch.arange(4000) + 0.5) / 4000
    wanted = (MinSNR(5)(Objective(process), u) * (0.5 + u)).view(20, 200).mean(1)
    wanted = 0.9 * wanted / wanted.sum() + 0.1 / 20
    torch.testing.assert_close(sampler.table.mass, wanted, atol=0.01, rtol=0.25)
