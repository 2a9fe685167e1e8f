"""correction=target: whatever a learning sampler draws, and whatever weighting the loop has, the target is what is trained."""

import copy
import pickle

import pytest
import torch

import noisewise
from noisewise import DDPM, EDM, AdaptiveSampler, Flow, Objective, Uniform
from noisewise.looking.monitor import mean_objective
from noisewise.samplers.correction import Correction, target_ratio
from noisewise.spec import build_weighting
from noisewise.weighting import P2, WEIGHTINGS, MinSNR, NoWeight, OfLogSNR, Weighting

OBJECTIVES = {
    "eps": Objective(DDPM.linear()),
    "v": Objective(DDPM.cosine(), "v"),
    "x0": Objective(DDPM.quadratic(), "x0"),
    "edm": Objective(EDM(), "edm"),
    "flow": Objective(Flow(), "flow"),
}
FINE = (torch.arange(20_000) + 0.5) / 20_000


def taught(spec, objective):
    """A recipe whose sampler has learned a density that is far from uniform."""
    recipe = noisewise.recipe(spec, objective)
    for _ in range(30):
        draw = recipe.sampler.sample(256)
        with recipe.sampler.observe(draw, 1 + 9 * draw.u):
            pass
    assert float(recipe.sampler.density(FINE).max()) > 1.2
    return recipe


def trained(recipe, objective):
    """The objective that a loop trains with a recipe, at each u, relative to its mean."""
    density = recipe.sampler.density(FINE)
    weight = recipe.sampler._weight(FINE, density) * recipe.weighting.weights(objective, FINE)
    return density * weight / (density * weight).mean()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    ("spec", "target"),
    [
        ("adaptive:warmup=0,every=1", MinSNR()),
        ("adaptive:warmup=0,every=1,correction=target", MinSNR()),
        ("adaptive:warmup=0,every=1+p2", P2()),
        ("adaptive:warmup=0,every=1+none", NoWeight()),
        ("adaptive:warmup=0,every=1,target=(p2)", P2()),
        ("adaptive:warmup=0,every=1,target=(p2)+minsnr:gamma=2", P2()),
        ("adaptive:warmup=0,every=1,target=(none)+minsnr:gamma=2", NoWeight()),
        ("mix:of=(adaptive:warmup=0,every=1),floor=0.1", MinSNR()),
    ],
)
def test_the_target_is_what_is_trained(spec, target, name):
    objective = OBJECTIVES[name]
    found = trained(taught(spec, objective), objective)
    expected = target.weights(objective, FINE)
    torch.testing.assert_close(found, expected / expected.mean(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("spec", "gamma"), [("", 10), ("+minsnr:gamma=2", 4), (",target=(minsnr:gamma=1)+p2", 2)])
def test_a_gamma_that_grows_is_what_is_trained(spec, gamma, name):
    """After 30 steps with grow=15 it is twice what it was, whatever weighting the loop has."""
    objective = OBJECTIVES[name]
    found = trained(taught(f"adaptive:warmup=0,every=1,grow=15{spec}", objective), objective)
    expected = MinSNR(gamma).weights(objective, FINE)
    torch.testing.assert_close(found, expected / expected.mean(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("spec", "growth"), [("", 1), (",growth=2", 2), (",growth=0.5", 0.5)])
def test_gamma_stays_until_its_steps_have_passed_and_never_falls(spec, growth):
    sampler = noisewise.recipe(f"adaptive:warmup=0,every=2,grow=8{spec}", OBJECTIVES["eps"]).sampler
    found = []
    for _ in range(24):
        draw = sampler.sample(16)
        with sampler.observe(draw, 1 + draw.u):
            pass
        found.append(float(sampler.gamma))
    assert found == [5.0 * max(1, (step - step % 2) / 8) ** growth for step in range(1, 25)]


def test_a_sampler_that_is_loaded_aims_where_the_saved_one_did():
    objective = OBJECTIVES["eps"]
    before = taught("adaptive:warmup=0,every=4,grow=10", objective)
    after = noisewise.recipe("adaptive:warmup=0,every=4,grow=10", objective)
    after.load_state_dict(before.state_dict())
    torch.testing.assert_close(trained(after, objective), trained(before, objective), rtol=0, atol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda recipe: pickle.loads(pickle.dumps(recipe))])
def test_a_copy_aims_where_the_state_that_it_loads_does(copied):
    objective = OBJECTIVES["eps"]
    before = taught("adaptive:warmup=0,every=4,grow=10", objective)
    untouched = noisewise.recipe("adaptive:warmup=0,every=4,grow=10", objective)
    after = copied(untouched)
    after.load_state_dict(before.state_dict())
    assert after.sampler.target.gamma == float(before.sampler.gamma) > 5
    assert untouched.sampler.target.gamma == 5


@pytest.mark.parametrize("spec", ["grow=0", "grow=8,growth=0", "grow=8+p2", "grow=8,correction=none"])
def test_what_cannot_grow_is_refused(spec):
    with pytest.raises(ValueError, match="grow"):
        noisewise.recipe(f"adaptive:{spec}", OBJECTIVES["eps"])


def test_the_monitor_shows_the_target_as_the_objective():
    objective = OBJECTIVES["eps"]
    found = mean_objective(taught("adaptive:warmup=0,every=1", objective).sampler, NoWeight(), objective, 50)
    expected = mean_objective(Uniform(objective.process), MinSNR(), objective, 50)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)


def test_the_default_draws_and_trains_as_min_snr_beside_it_does():
    objective, u = OBJECTIVES["eps"], torch.linspace(0.01, 0.99, 99)
    alone, beside = (taught(f"adaptive:warmup=0,every=1{more}", objective) for more in ("", "+minsnr:gamma=5"))
    torch.testing.assert_close(alone.sampler.density(u), beside.sampler.density(u))
    torch.testing.assert_close(trained(alone, objective), trained(beside, objective), rtol=1e-4, atol=1e-6)
    draw = beside.sampler.sample(32)
    torch.testing.assert_close(draw.weight, 1 / draw.density)


def test_before_it_is_its_turn_a_learning_part_still_sets_the_objective():
    objective = OBJECTIVES["eps"]
    recipe = noisewise.recipe("switch:first=uniform,then=adaptive,at=5", objective.process)
    expected = MinSNR().weights(objective, FINE)
    torch.testing.assert_close(trained(recipe, objective), expected / expected.mean(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("spec", ["uniform", "logit_normal", "mix:of=logit_normal"])
def test_a_sampler_that_does_not_learn_has_no_target(spec):
    with pytest.raises(ValueError, match="has no target"):
        noisewise.recipe(spec, DDPM.linear(), correction="target")


def test_a_weighting_that_is_trained_is_followed():
    objective = OBJECTIVES["eps"]
    recipe = noisewise.recipe("adaptive:target=(minsnr)+learned", objective)
    for parameter in recipe.weighting.parameters():
        parameter.requires_grad_(False)
    for value in (0.0, 2.0):
        for parameter in recipe.weighting.parameters():
            parameter.fill_(value)
        expected = MinSNR().weights(objective, FINE)
        torch.testing.assert_close(trained(recipe, objective), expected / expected.mean(), rtol=1e-3, atol=1e-5)
        together = recipe.sampler.target_weight(FINE) * recipe.weighting.weights(objective, FINE)
        assert float(together.mean()) == pytest.approx(float(recipe.weighting.weights(objective, FINE).mean()), rel=2e-3)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("loop", ["none", "minsnr:gamma=2", "p2"])
@pytest.mark.parametrize("target", ["vlb:clip=20", "simple", "p2", "minsnr"])
def test_the_learning_rate_is_that_of_the_loops_weighting(target, loop, name):
    objective = OBJECTIVES[name]
    recipe = noisewise.recipe(f"adaptive:target=({target})+{loop}", objective)
    density, own = recipe.sampler.density(FINE), recipe.weighting.weights(objective, FINE)
    found = (density * recipe.sampler._weight(FINE, density) * own).mean()
    torch.testing.assert_close(found, own.mean(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 7, 1000])
@pytest.mark.parametrize("target", ["minsnr", "vlb+soft_minsnr:gamma=1", "p2+debiased", "change_aware"])
def test_weights_that_are_looked_up_are_those_of_the_function(target, steps, kind):
    objective, weighting = Objective(DDPM.cosine(steps), "v"), build_weighting(target)
    sampler = AdaptiveSampler(objective, target=weighting)
    edges = torch.arange(steps + 1, dtype=kind) / steps
    u = torch.cat([edges, torch.nextafter(edges[1:], edges[:-1]) if kind == torch.float32 else edges[1:] - 0.3 / steps])
    losses = torch.rand(len(u), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        sampler.on_target(losses, u), weighting.weights(objective, u.float()) * losses, rtol=1e-6, atol=0
    )
    mean = weighting.weights(objective, FINE).mean()
    torch.testing.assert_close(sampler.target_weight(u), weighting.weights(objective, u.float()) / mean, rtol=1e-3, atol=1e-6)


def test_a_weighting_of_the_callers_own_code_may_change():
    objective, power = OBJECTIVES["eps"], [0.0]
    sampler = AdaptiveSampler(objective, target=OfLogSNR(lambda log_snr: torch.exp(power[0] * log_snr)))
    for power[0] in (0.0, 0.3):
        expected = torch.exp(power[0] * objective.process.log_snr(FINE))
        torch.testing.assert_close(sampler.on_target(torch.ones_like(FINE), FINE), expected)
        torch.testing.assert_close(sampler.target_weight(FINE), expected / expected.mean(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("estimator", ["loss", "reinforce", "lookahead"])
def test_a_state_of_other_strata_is_refused(estimator):
    process = DDPM.linear()
    saved = AdaptiveSampler(process, estimator, strata=10, over="log_snr").state_dict()
    with pytest.raises(ValueError, match="intervals at other noise levels"):
        AdaptiveSampler(process, estimator, strata=10).load_state_dict(saved)
    AdaptiveSampler(process, estimator, strata=10, over="log_snr").load_state_dict(saved)


def test_a_weighting_in_the_registry_that_is_trained_is_followed(monkeypatch):
    class Mine(Weighting):
        def __init__(self):
            super().__init__()
            self.log = torch.nn.Parameter(torch.zeros(()))

        def forward(self, objective, u):
            return self.log.exp().expand(len(u))

    monkeypatch.setitem(WEIGHTINGS, "mine", Mine)
    recipe = noisewise.recipe("loss_moment+mine", OBJECTIVES["eps"])
    for value in (0.5, 1.5):
        recipe.weighting.log.data.fill_(value)
        torch.testing.assert_close(recipe.sampler.on_target(torch.ones(3), FINE[:3]), torch.full((3,), value).exp())


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("none", [1, 1]),
        ("unbiased", [2.5, 0.625]),
        ("clipped(2)", [2 / 0.9, 0.625 / 0.9]),
        ("tempered(0.5)", [0.4**-0.5 / (0.2 * 0.4**-0.5 + 0.8 * 1.6**-0.5), 1.6**-0.5 / (0.2 * 0.4**-0.5 + 0.8 * 1.6**-0.5)]),
        ("target", [0.5 * 2.5, 1.5 * 0.625]),
    ],
)
def test_the_whole_weight_on_two_halves(correction, expected):
    mass, density = torch.tensor([0.2, 0.8]), torch.tensor([0.4, 1.6])
    target, loop = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0])
    t = target_ratio(target, loop, target.mean(), loop.mean())
    rule = Correction.parse(correction)
    weight = rule.weight(density, lambda: t, lambda: rule.mean(mass, density))
    torch.testing.assert_close(weight, torch.tensor(expected, dtype=torch.float32))
    assert float((mass * weight * loop).sum()) == pytest.approx(float(loop.mean()))
