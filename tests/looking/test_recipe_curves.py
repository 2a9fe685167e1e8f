"""Previews: the curves of known recipes, and a picture that shows something."""

import numpy as np
import pytest
import torch
from matplotlib import image
from scipy import stats

import noisewise
from noisewise.looking.recipe_curves import preview
from noisewise.objective import Objective
from noisewise.processes import DDPM, EDM, PROCESSES, Flow
from noisewise.samplers import Beta, LogitNormal, SpeeD, Uniform
from noisewise.weighting import WEIGHTINGS, MinSNR, OfLogSNR, Weighting, min_snr


@pytest.mark.parametrize("name", PROCESSES)
def test_uniform_without_weight_is_flat(name):
    process = PROCESSES[name]()
    curves = preview(Uniform(process), None, process)
    for curve in (curves.p, curves.w, curves.pw):
        np.testing.assert_allclose(curve, 1, rtol=1e-6)


@pytest.mark.parametrize("name", PROCESSES)
def test_axes_are_the_process(name):
    process = PROCESSES[name]()
    curves = preview(Uniform(process), None, process, bins=50)
    u = (torch.arange(50) + 0.5) / 50
    np.testing.assert_allclose(curves.u, u.numpy())
    np.testing.assert_allclose(curves.time, process.time(u).numpy())
    np.testing.assert_allclose(curves.log_snr, process.log_snr(u).numpy())
    np.testing.assert_allclose(curves.log_snr_rate, process.log_snr_rate(u).numpy())
    assert (curves.time_rate > 0).all()


@pytest.mark.parametrize(
    ("process", "bins"), [(DDPM.linear(1), 1), (DDPM.linear(300), 300), (DDPM.linear(4000), 1000), (Flow(), 500)]
)
def test_default_number_of_intervals(process, bins):
    assert len(preview(Uniform(process), None, process).p) == bins


def test_min_snr_weight_in_numpy():
    process = DDPM.linear()
    bar = process.alphas_cumprod.numpy()
    snr = bar / (1 - bar)
    expected = np.minimum(snr, 5) / snr
    curves = preview(Uniform(process), MinSNR(5.0), process)
    np.testing.assert_allclose(curves.w, expected / expected.mean(), rtol=1e-4)
    np.testing.assert_allclose(curves.pw, curves.w, rtol=1e-6)


def test_the_weight_is_that_of_the_eps_loss():
    process = DDPM.linear()
    bar = process.alphas_cumprod.numpy()
    curves = preview(Uniform(process), None, process, objective=Objective(process, "x0"))
    expected = (1 - bar) / bar
    np.testing.assert_allclose(curves.w, expected / expected.mean(), rtol=1e-4)


def test_speed_density():
    process, k, tau, steps = DDPM.linear(), 5, 700, 1000
    curves = preview(SpeeD(process, k=k, tau=tau), MinSNR(), process)
    high, low = k / (steps + tau * (k - 1)), 1 / (steps + tau * (k - 1))
    np.testing.assert_allclose(curves.p, np.where(np.arange(steps) < tau, high, low) * steps, rtol=1e-4)
    np.testing.assert_allclose(curves.pw, curves.p * curves.w, rtol=1e-6)


def test_a_shift_that_needs_data_has_no_preview():
    sampler = noisewise.recipe("piecewise:stages=(0=(shift:of=uniform,shift=flux),9=uniform)", Flow()).sampler
    with pytest.raises(ValueError, match="depends on the shape of the data"):
        preview(sampler, None, Flow())


def test_logit_normal_density_is_scipys():
    curves = preview(LogitNormal(Flow(), mean=0.5, std=0.8), None, Flow(), bins=200)
    edges = np.linspace(0, 1, 201)
    with np.errstate(divide="ignore"):
        mass = np.diff(stats.norm(0.5, 0.8).cdf(np.log(edges / (1 - edges))))
    np.testing.assert_allclose(curves.p, mass * 200, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_the_objective_has_mean_one(name):
    process = DDPM.cosine()
    curves = preview(Beta(process, 2.0, 3.0), WEIGHTINGS[name](), process, objective=Objective(process, "v"))
    assert curves.p.mean() == pytest.approx(1, rel=1e-4)
    assert curves.pw.mean() == pytest.approx(1, rel=1e-4)
    assert np.isfinite(curves.w).all()


@pytest.mark.parametrize("sampler", [LogitNormal, Beta, SpeeD])
def test_an_unbiased_sampler_trains_the_weighting_alone(sampler):
    process = DDPM.linear()
    corrected = preview(sampler(process, correction="unbiased"), None, process)
    np.testing.assert_allclose(corrected.pw, 1, rtol=1e-4)
    np.testing.assert_allclose(corrected.p, preview(sampler(process), None, process).p)
    weighted = preview(sampler(process, correction="unbiased"), MinSNR(), process)
    np.testing.assert_allclose(weighted.pw, preview(Uniform(process), MinSNR(), process).pw, rtol=1e-4)


@pytest.mark.parametrize(("correction", "power"), [("none", 1), ("tempered(0.5)", 0.5), ("tempered(1)", 0)])
def test_the_objective_includes_the_importance_weight(correction, power):
    curves = preview(Beta(Flow(), 2.0, 2.0, correction=correction), None, Flow(), bins=1000)
    expected = curves.p**power
    np.testing.assert_allclose(curves.pw, expected / expected.mean(), rtol=1e-4)


def test_quantiles_of_the_objective_follow_the_weight():
    heavier = OfLogSNR(lambda lam: torch.where(lam < 0, 3.0, 1.0))  # three quarters of the objective lie above u = 1/2
    quantiles = preview(Uniform(Flow()), heavier, Flow()).quantiles((0.25, 0.625))
    np.testing.assert_allclose(quantiles["pw"], [0.5, 0.75], atol=1e-6)
    np.testing.assert_allclose(quantiles["p"], [0.25, 0.625], atol=1e-6)


def test_quantiles_of_a_logit_normal_on_every_axis():
    at, process = (0.1, 0.5, 0.9), Flow(time_scale=1000)
    curves = preview(LogitNormal(process, mean=0.5, std=0.8), None, process)
    u = stats.norm(0.5, 0.8).ppf(at)  # of logit u
    expected = 1 / (1 + np.exp(-u))
    np.testing.assert_allclose(curves.quantiles(at)["p"], expected, atol=1e-3)
    np.testing.assert_allclose(curves.quantiles(at, "time")["p"], 1000 * expected, atol=1)
    np.testing.assert_allclose(curves.quantiles(at, "log_snr")["pw"], -2 * u, atol=0.01)
    with pytest.raises(ValueError, match="unknown axis 't': choose one of u, time, log_snr"):
        curves.quantiles(at, "t")


def test_shares_by_thirds():
    process = DDPM.linear(900)
    flat = preview(Uniform(process), None, process)
    np.testing.assert_allclose([flat.shares()["p"], flat.shares()["pw"]], 1 / 3)
    halves = preview(SpeeD(process, k=3.0, tau=450), None, process).shares(2)
    np.testing.assert_allclose(halves["p"], [0.75, 0.25], rtol=1e-4)
    # thirds of 500 intervals cut some of them
    odd = preview(Beta(Flow(), 2.0, 5.0), None, Flow(), bins=500).shares(3)["p"]
    np.testing.assert_allclose(odd, np.diff(stats.beta(2, 5).cdf([0, 1 / 3, 2 / 3, 1])), atol=1e-4)
    with pytest.raises(ValueError, match="parts must be >= 1, got 0"):
        flat.shares(0)


def test_the_effective_sample_size_is_that_of_many_draws():
    process = DDPM.linear()
    assert preview(Beta(process, 2.0, 2.0), MinSNR(), process).effective_share == pytest.approx(1)
    for correction in ("unbiased", "clipped(2)", "tempered(0.5)"):
        sampler = SpeeD(process, k=5.0, tau=500, correction=correction)
        draw = sampler.sample(100_000)
        measured = float(draw.effective_sample_size()) / 100_000
        assert preview(sampler, None, process).effective_share == pytest.approx(measured, rel=0.01)
    # half of u drawn five times as often as the other half: q = 5/3 and 1/3, (E 1)^2 / E[1/q^2 q] = 1 / 1.8
    exact = preview(SpeeD(process, k=5.0, tau=500, correction="unbiased"), None, process).effective_share
    assert exact == pytest.approx(1 / 1.8, rel=1e-4)


@pytest.mark.parametrize("axis", ["time", "log_snr"])
@pytest.mark.parametrize("name", PROCESSES)
def test_densities_have_the_same_mass_on_every_axis(name, axis):
    process = PROCESSES[name]()
    curves = preview(Beta(process, 3.0, 3.0), None, process, bins=1000)
    density, along = curves.over(axis, "p"), getattr(curves, axis)
    mass = np.abs(np.diff(along)) @ (density[1:] + density[:-1]) / 2
    assert mass == pytest.approx(1, abs=0.01)
    np.testing.assert_array_equal(curves.over(axis, "w"), curves.w)


def test_a_density_over_time_does_not_show_the_staircase_of_timesteps():
    process = DDPM.linear(1500)  # three timesteps in two intervals
    curves = preview(Uniform(process), None, process, bins=1000)
    np.testing.assert_allclose(curves.shown("time", "p"), 1, rtol=1e-6)
    assert preview(Uniform(DDPM.linear(1)), None, DDPM.linear(1)).shown("time", "p").tolist() == [1.0]


def test_a_log_normal_of_sigma_is_a_normal_over_edms_time():
    curves = preview(Uniform(EDM()), None, EDM())
    inner = slice(5, -5)  # the first and last intervals of u reach far
    expected = stats.norm(-1.2 / 4, 1.2 / 4).pdf(curves.time[inner])
    np.testing.assert_allclose(curves.over("time", "p")[inner], expected, rtol=0.02)
    assert not curves.bounded_time
    assert preview(Uniform(Flow()), None, Flow()).bounded_time


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
def test_the_weight_of_the_models_own_loss(prediction):
    process = DDPM.linear()
    bar = process.alphas_cumprod.numpy()
    snr = bar / (1 - bar)
    curves = preview(Uniform(process), MinSNR(5.0), process, objective=Objective(process, prediction), weight_of="model")
    least = np.minimum(snr, 5)
    expected = {"eps": least / snr, "x0": least, "v": least / (snr + 1)}[prediction]
    np.testing.assert_allclose(curves.w, expected / expected.mean(), rtol=1e-4)
    plain = preview(Uniform(process), None, process, objective=Objective(process, prediction), weight_of="model")
    np.testing.assert_allclose(plain.pw, 1, rtol=1e-4)
    with pytest.raises(ValueError, match="unknown weight_of 'mine': choose one of eps, model"):
        preview(Uniform(process), None, process, weight_of="mine")


def test_negative_weights_are_refused():
    class Negative(Weighting):
        def forward(self, objective, u):
            return 0.25 - u

    with pytest.raises(ValueError, match=r"this weighting is negative at u = 0\.999"):
        preview(Uniform(Flow()), Negative(), Flow())


def test_previewing_disturbs_nothing():
    process = DDPM.linear()
    sampler, weighting = Uniform(process), WEIGHTINGS["learned"]()
    before = torch.get_rng_state()
    preview(sampler, weighting, process)
    assert torch.equal(torch.get_rng_state(), before)
    assert (sampler.step, sampler.micro) == (0, 0)


@pytest.mark.parametrize("process", [DDPM.cosine(), Flow()])
def test_the_picture_shows_something(process, tmp_path):
    recipe = preview(SpeeD(process), MinSNR(), process, title="speed+minsnr")
    path = recipe.plot(tmp_path / "recipe.png")
    pixels = image.imread(path)
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 1000
    for row in np.array_split(pixels[..., :3], 2, axis=0):  # all panels hold coloured curves, not only black text on white
        for panel in np.array_split(row, 3, axis=1):
            assert panel.var() > 1e-3
            assert (panel.max(-1) - panel.min(-1) > 0.3).sum() > 200


def test_zero_terminal_snr_is_drawn(tmp_path):
    process = DDPM(torch.cat([torch.full((9,), 0.1), torch.ones(1)]))
    recipe = preview(Uniform(process), MinSNR(), process)
    assert np.isinf(recipe.log_snr[-1])
    assert np.isfinite(recipe.pw).all()
    assert recipe.plot(tmp_path / "zero.png").stat().st_size > 1000


def test_a_learning_sampler_is_shown_with_what_it_takes_the_model_to_predict():
    """The weight that it carries is that of a flow's own loss; as if that were the eps-loss, the curve would be another."""
    process = Flow()
    recipe = noisewise.recipe("adaptive", process)
    curves = preview(recipe.sampler, recipe.weighting, process)
    expected = min_snr(process.log_snr(torch.from_numpy(curves.u).float())).double().numpy()
    np.testing.assert_allclose(curves.pw, expected / expected.mean(), rtol=1e-4)


@pytest.mark.parametrize("spec", ["mix:of=adaptive,floor=0", "switch:first=adaptive,then=uniform,at=5,correction=target"])
@pytest.mark.parametrize("process", [Flow(), EDM()])
def test_a_learning_sampler_inside_another_is_shown_in_the_same_way(spec, process):
    alone, inside = noisewise.recipe("adaptive", process), noisewise.recipe(spec, process)
    expected = preview(alone.sampler, alone.weighting, process).pw
    np.testing.assert_allclose(preview(inside.sampler, inside.weighting, process).pw, expected, rtol=1e-4)


def test_the_sampler_of_another_process_is_refused():
    with pytest.raises(ValueError, match="the sampler is of another process"):
        preview(Uniform(DDPM.cosine()), None, DDPM.linear())
