"""correction=target: whatever a learning sampler draws, and whatever weighting the loop has, the target is what is trained."""

import copy
import json
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import noisewise
from noisewise import DDPM, EDM, AdaptiveSampler, Flow, Objective, Sampler, Uniform
from noisewise.looking.monitor import mean_objective
from noisewise.running import RunningLoss
from noisewise.samplers.adaptive.cut import ERROR, GROW, crossing, followed
from noisewise.samplers.correction import Correction, target_ratio
from noisewise.spec import build_process, build_weighting
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


# the cut that moves ------------------------------------------------------------------------------------------------------

VARIANCE = 0.25  # of normal data, whose best model is off by VARIANCE / (1 + VARIANCE SNR) in x0, squared
AIMED = "adaptive:warmup=0,every=1,grow=10,error=0.2"
FOUND = (1 / 0.2 - 1) / VARIANCE  # the SNR at which that is 0.2 of the variance


def perfect_losses(objective, u, alike=1, extra=0.0):
    """Of the best model of normal data, so many elements of which are equal, in what the objective predicts.

    Args:
        extra: what its squared error in x0 is larger by, at all levels.
    """
    snr = objective.process.log_snr(u).exp()
    return (VARIANCE / (1 + alike * VARIANCE * snr) + extra) * snr / objective.per_prediction(torch.ones_like(u), u)


def batch(step, seed=0):
    return VARIANCE**0.5 * torch.randn(64, 3, generator=torch.Generator().manual_seed(1000 * seed + step))


def trained_by_a_perfect_model(spec, objective, steps=150, scale=1.0, data=True, recipe=None, seed=0, **model):
    """A recipe after so many steps; one that is given goes on from where it is."""
    recipe = noisewise.recipe(spec, objective) if recipe is None else recipe
    for step in range(recipe.sampler.step, steps):
        draw = recipe.sampler.sample(batch(step, seed) if data else 64)
        with recipe.sampler.observe(draw, scale * perfect_losses(objective, draw.u, **model)):
            pass
    return recipe


def learner(recipe):
    """The part of a recipe's sampler whose gamma moves."""
    return next(part for part in recipe.sampler.modules() if isinstance(part, AdaptiveSampler))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("spec", ["", "+minsnr:gamma=2", ",target=(minsnr:gamma=1)+p2"])
def test_gamma_goes_where_the_error_is_a_share_of_the_data(spec, name):
    objective = OBJECTIVES[name]
    recipe = trained_by_a_perfect_model(AIMED + spec, objective)
    gamma = float(recipe.sampler.gamma)
    assert gamma == pytest.approx(FOUND, rel=0.2)
    expected = MinSNR(gamma).weights(objective, FINE)
    torch.testing.assert_close(trained(recipe, objective), expected / expected.mean(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_in_a_long_training_gamma_goes_to_ever_smaller_errors(name):
    """At 600 steps the share is 0.2 x 75 / 600."""
    long, short = (trained_by_a_perfect_model(AIMED + ",steady=75", OBJECTIVES[name], steps) for steps in (600, 75))
    assert float(short.sampler.gamma) == pytest.approx(FOUND, rel=0.2)
    assert float(long.sampler.gamma) == pytest.approx((600 / 75 / 0.2 - 1) / VARIANCE, rel=0.2)


@pytest.mark.parametrize(
    "how",
    [
        {"steps": 9},  # before its time
        {"data": False},  # the data's size is not known
        {"scale": 100.0},  # sums, not means
        {"spec": AIMED.replace("0.2", "0.9")},  # the error is that small above gamma already
        {"spec": "adaptive:warmup=0,every=1"},  # not within 150 steps, unless asked to
    ],
)
def test_gamma_stays_where_it_began(how):
    recipe = trained_by_a_perfect_model(**{"spec": AIMED, "objective": OBJECTIVES["eps"]} | how)
    assert float(recipe.sampler.gamma) == recipe.sampler.target.gamma == 5


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("elements", [2, 3, 3072])
def test_sums_over_a_sample_do_not_move_gamma(name, elements):
    assert float(trained_by_a_perfect_model(AIMED, OBJECTIVES[name], scale=elements).sampler.gamma) == 5


@pytest.mark.parametrize("name", ["x0", "v", "flow"])
def test_sums_of_data_with_few_dimensions_do_not_move_gamma(name):
    """60 elements that are all alike are found at an SNR of 3, and with three times the losses at 10."""
    spec = AIMED.replace("0.2", "0.02")
    for scale in (1, 3):
        assert float(trained_by_a_perfect_model(spec, OBJECTIVES[name], scale=scale, alike=60).sampler.gamma) == 5


@pytest.mark.parametrize("name", ["eps", "x0", "v", "edm"])
def test_gamma_goes_no_further_than_what_the_scale_of_the_data_tells(name):
    """An error that no level is without is not followed to the least noise."""
    recipe = trained_by_a_perfect_model(AIMED.replace("0.2", "0.05"), OBJECTIVES[name], scale=0.9, extra=0.1 * VARIANCE)
    assert float(recipe.sampler.gamma) == pytest.approx((1 / 0.05 - 1) / VARIANCE, rel=0.2)


RECORDED = Path(__file__).parents[2] / "benchmarks" / "results"


def test_losses_of_recorded_runs_are_taken_for_what_they_are():
    """Held-out losses of all runs of CIFAR-10 and of its small images, after as many steps as gamma waits: no false alarm."""
    checked = 0
    for name, power in (("cifar10-v1-confirmation", 0.2576), ("cifar10-v2-runs", 0.2576), ("thumbnails", 0.2119)):
        for line in (RECORDED / f"{name}.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row.get("held_out") and row["step"] >= GROW:
                objective = Objective(build_process(row["process"]), row.get("prediction"))  # else the process's own
                losses = torch.tensor(row["held_out"])
                u, strata = (torch.arange(len(losses)) + 0.5) / len(losses), len(losses) // 2
                losses = (MinSNR().weights(objective, u) * losses).view(strata, 2).mean(1)
                running = RunningLoss(torch.arange(strata + 1) / strata)
                found = []
                for n in (1, 4, 3072):
                    running.sums[:2] = torch.stack([torch.ones(strata), n * losses])
                    found.append(followed(running, objective, 5.0, ERROR, power))
                assert 2 < found[0] < 25, row
                assert found[0] != 5 == found[1] == found[2], row
                checked += 1
    assert checked > 100


def test_gamma_moves_slowly_and_no_further_than_it_should():
    found = [float(trained_by_a_perfect_model(AIMED, OBJECTIVES["eps"], steps).sampler.gamma) for steps in range(9, 40, 5)]
    assert found == sorted(found)
    assert found[0] == 5 < found[1] < found[-1] < 1.2 * FOUND
    assert max(after / before for before, after in pairwise(found)) < (FOUND / 5) ** 0.5


WRAPPED = {
    "mix": f"mix:of=({AIMED}),floor=0.1",
    "switch": f"switch:first=uniform,then=({AIMED}),at=5",
    "piecewise": f"piecewise:stages=(0=uniform,5=({AIMED}))",
    "curriculum": f"curriculum:start=({AIMED}),end=uniform,steps=200",
    "window": f"window:of=({AIMED}),high=0.5",
    "mix of window": f"mix:of=(window:of=({AIMED}),low=0.02),floor=0.1",
}


@pytest.mark.parametrize("name", WRAPPED)
def test_gamma_moves_inside_other_samplers_and_goes_on_after_a_resume(name):
    objective = OBJECTIVES["eps"]
    whole = trained_by_a_perfect_model(WRAPPED[name], objective)
    assert learner(whole).target.gamma == float(learner(whole).gamma) == pytest.approx(FOUND, rel=0.2)
    resumed = noisewise.recipe(WRAPPED[name], objective)
    resumed.load_state_dict(trained_by_a_perfect_model(WRAPPED[name], objective, 17).state_dict())
    trained_by_a_perfect_model(WRAPPED[name], objective, recipe=resumed)
    for key, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key


class Reversed(Sampler):
    """A sampler of somebody else, made of another."""

    constant, has_target = False, True

    def __init__(self, process, of):
        super().__init__(process, correction=of.correction)
        self.of = of

    def density(self, u, x0=None):
        return self.of.density(u, x0)

    def quantile(self, v, x0=None):
        return self.of.quantile(1 - v, x0)

    def target_weight(self, u):
        return self.of.target_weight(u)

    def feedback(self, draw, losses, loss_at):
        return self.of.feedback(draw, losses, loss_at)


def test_gamma_moves_inside_a_sampler_of_your_own():
    objective = OBJECTIVES["v"]
    recipe = noisewise.Recipe(Reversed(objective.process, noisewise.recipe(AIMED, objective).sampler), objective=objective)
    trained_by_a_perfect_model(None, objective, recipe=recipe)
    assert float(learner(recipe).gamma) == pytest.approx(FOUND, rel=0.2)


@pytest.mark.parametrize(("name", "bound"), [(name, "high=0.5") for name in ("x0", "flow", "edm")] + [("flow", "low=0.3")])
def test_gamma_does_not_follow_levels_that_a_window_leaves_out(name, bound):
    objective = OBJECTIVES[name]
    recipe = trained_by_a_perfect_model(f"window:of=({AIMED}),{bound}", objective)
    most = float(objective.process.log_snr(recipe.sampler.quantile(torch.tensor([1e-4]))).exp())  # of the levels in the window
    assert float(learner(recipe).gamma) == pytest.approx(max(5, min(FOUND, most)), rel=0.2)


def test_gamma_stays_for_pairs():
    recipe = trained_by_a_perfect_model(f"pairs:of=({AIMED})", OBJECTIVES["flow"])
    assert float(learner(recipe).gamma) == 5


@pytest.mark.parametrize("spec", [AIMED, WRAPPED["mix"], WRAPPED["window"]])
def test_only_data_that_is_trained_on_counts(spec):
    """Not that of validation draws, nor that of steps that were skipped."""
    objective = OBJECTIVES["eps"]
    plain, looking = (trained_by_a_perfect_model(spec, objective, 15) for _ in range(2))
    for step in range(15, 20):
        with torch.no_grad():
            looking.sample(100 + batch(step))
        looking.sampler.quantile(torch.rand(64), 100 + batch(step))
        micro = looking.sampler.micro
        looking.sampler.sample(100 + batch(step))
        looking.sampler.micro = micro
        trained_by_a_perfect_model(spec, objective, step + 1, recipe=looking)
    trained_by_a_perfect_model(spec, objective, 20, recipe=plain)
    for key, value in plain.state_dict().items():
        assert torch.equal(looking.state_dict()[key], value), key


def test_accumulated_batches_count_as_one():
    objective, recipe = OBJECTIVES["eps"], trained_by_a_perfect_model(AIMED, OBJECTIVES["eps"], 20)
    before = float(recipe.sampler.power)
    draws = [recipe.sampler.sample(x0) for x0 in (torch.full((64, 3), 2.0), torch.zeros(64, 3))]
    with recipe.sampler.observe(draws, [perfect_losses(objective, draw.u) for draw in draws]):
        pass
    assert float(recipe.sampler.power) == pytest.approx(0.9 * before + 0.1 * (4 + 0) / 2)


def test_one_absurd_batch_hardly_moves_gamma():
    objective, spec = OBJECTIVES["eps"], AIMED.replace("error=0.2", "error=0.05")
    recipe = trained_by_a_perfect_model(spec, objective)
    before = float(recipe.sampler.gamma), float(recipe.sampler.power)
    draw = recipe.sampler.sample(255 * batch(0))
    with recipe.sampler.observe(draw, perfect_losses(objective, draw.u)):
        pass
    assert before[1] < float(recipe.sampler.power) < 2 * before[1]
    trained_by_a_perfect_model(spec, objective, 200, recipe=recipe)
    assert float(recipe.sampler.gamma) == pytest.approx(before[0], rel=0.2)


@pytest.mark.parametrize(("factor", "error"), [(0.3, 0.2), (3.0, 0.05)])
def test_gamma_follows_data_of_another_scale(factor, error):
    objective = OBJECTIVES["v"]
    recipe = trained_by_a_perfect_model(AIMED.replace("0.2", f"{error}"), objective)
    for step in range(400):
        draw = recipe.sampler.sample(factor * batch(step))
        power = VARIANCE * factor**2
        snr = objective.process.log_snr(draw.u).exp()
        with recipe.sampler.observe(draw, power / (1 + power * snr) * (1 + snr)):
            pass
    assert float(recipe.sampler.gamma) == pytest.approx((1 / error - 1) / power, rel=0.3)


def test_data_that_is_no_number_is_forgotten():
    recipe = trained_by_a_perfect_model(AIMED, OBJECTIVES["eps"], 20)
    before = float(recipe.sampler.power)
    for x0 in (torch.full((64, 3), torch.nan), torch.full((64, 3), torch.inf), torch.zeros(64, 3), torch.ones(64, 3)):
        draw = recipe.sampler.sample(x0)
        with recipe.sampler.observe(draw, perfect_losses(OBJECTIVES["eps"], draw.u)):
            pass
    assert float(recipe.sampler.power) == pytest.approx(0.9 * before + 0.1)
    assert 5 < float(recipe.sampler.gamma) < 1.2 * FOUND


@pytest.mark.parametrize("zero", [FINE < 0.3, FINE > 0.9, FINE > 0])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_of_nothing_are_taken(name, zero):
    objective, recipe = OBJECTIVES[name], noisewise.recipe(AIMED, OBJECTIVES[name])
    for step in range(30):
        draw = recipe.sampler.sample(batch(step))
        nothing = zero[(draw.u * len(FINE)).long().clamp(max=len(FINE) - 1)]
        with recipe.sampler.observe(draw, perfect_losses(objective, draw.u).masked_fill(nothing, 0.0)):
            pass
    assert 5 <= float(recipe.sampler.gamma) < 1.2 * FOUND


@pytest.mark.parametrize("data", [True, False])
def test_gamma_is_kept_in_float32_whatever_the_default_is(data):
    objective = OBJECTIVES["flow"]
    torch.set_default_dtype(torch.float64)
    try:
        recipe = trained_by_a_perfect_model(AIMED, objective, 30, data=data)
    finally:
        torch.set_default_dtype(torch.float32)
    assert recipe.sampler.gamma.dtype == recipe.sampler.power.dtype == torch.float32
    assert (float(recipe.sampler.gamma) > 5) == data


def test_gamma_goes_on_bit_for_bit_after_a_resume():
    whole = trained_by_a_perfect_model(AIMED, OBJECTIVES["eps"], 30)
    resumed = noisewise.recipe(AIMED, OBJECTIVES["eps"])
    resumed.load_state_dict(trained_by_a_perfect_model(AIMED, OBJECTIVES["eps"], 17).state_dict())
    trained_by_a_perfect_model(AIMED, OBJECTIVES["eps"], 30, recipe=resumed)
    assert float(resumed.sampler.gamma) > 5
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_a_sampler_that_is_loaded_aims_where_the_saved_one_did():
    objective = OBJECTIVES["eps"]
    before = trained_by_a_perfect_model(AIMED, objective, 30)
    after = noisewise.recipe(AIMED, objective)
    after.load_state_dict(before.state_dict())
    assert after.sampler.target.gamma > 5
    torch.testing.assert_close(trained(after, objective), trained(before, objective), rtol=0, atol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda recipe: pickle.loads(pickle.dumps(recipe))])
def test_a_copy_aims_where_the_state_that_it_loads_does(copied):
    objective = OBJECTIVES["eps"]
    before = trained_by_a_perfect_model(AIMED, objective, 30)
    untouched = noisewise.recipe(AIMED, objective)
    after = copied(untouched)
    after.load_state_dict(before.state_dict())
    assert after.sampler.target.gamma == float(before.sampler.gamma) > 5
    assert untouched.sampler.target.gamma == 5


@pytest.mark.parametrize(("first", "then", "gamma"), [("+minsnr:gamma=2", "", 5), ("", "+minsnr:gamma=2", 2), ("+p2", "", 5)])
def test_a_state_of_another_target_leaves_gamma_to_the_spec(first, then, gamma):
    before = trained_by_a_perfect_model(f"adaptive:warmup=0,every=1{first}", OBJECTIVES["eps"], 5)
    after = noisewise.recipe(f"adaptive:warmup=0,every=1{then}", OBJECTIVES["eps"])
    after.load_state_dict(before.state_dict())
    assert after.sampler.target.gamma == gamma
    assert after.sampler.step == 5


def test_a_state_from_before_gamma_moved_is_loaded():
    recipe = noisewise.recipe(AIMED, OBJECTIVES["eps"])
    state = {name: value for name, value in recipe.state_dict().items() if not name.endswith((".gamma", ".power"))}
    assert len(state) == len(recipe.state_dict()) - 2
    recipe.load_state_dict(state)
    assert float(recipe.sampler.gamma) == 5


@pytest.mark.parametrize(
    "spec",
    [
        "error=0",
        "error=2",
        "grow=0",
        "steady=0",
        "error=0.1+p2",
        "steady=9000+p2",
        "grow=8,correction=none",
        "error=0.1,estimator=reinforce,target=(minsnr)",
    ],
)
def test_a_cut_that_cannot_move_is_refused(spec):
    with pytest.raises(ValueError, match=r"error|grow|steady"):
        noisewise.recipe(f"adaptive:{spec}", OBJECTIVES["eps"])


@pytest.mark.parametrize(
    ("place", "height", "found"),
    [
        ([4.0, 2.0, 0.0, -2.0], [-2.0, -1.0, 1.0, 3.0], 1.0),
        ([4.0, 2.0, 0.0, -2.0], [-2.0, 1.0, -1.0, 3.0], -0.5),  # the last time it is below
        ([4.0, 2.0], [1.0, 2.0], 4.0),
        ([4.0, 2.0], [-2.0, -1.0], 2.0),
    ],
)
def test_where_a_height_passes_zero(place, height, found):
    assert crossing(torch.tensor(place), torch.tensor(height)) == pytest.approx(found)


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
