"""Previews: the curves of known recipes, and a picture that shows something."""

import numpy as np
import pytest
import torch
from matplotlib import image
from scipy import stats

from noisewise.objective import Objective
from noisewise.preview import preview
from noisewise.processes import DDPM, PROCESSES, Flow
from noisewise.samplers import Beta, LogitNormal, SpeeD, Uniform
from noisewise.weighting import WEIGHTINGS, MinSNR, OfLogSNR, Weighting


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


def test_quantiles_of_uniform():
    at = (0.05, 0.25, 0.5, 0.75, 0.95)
    quantiles = preview(Uniform(Flow()), None, Flow()).quantiles(at)
    for name in ("p", "pw"):
        np.testing.assert_allclose(quantiles[name], at, atol=1e-6)


def test_quantiles_of_a_beta():
    curves = preview(Beta(Flow(), 2.0, 5.0), None, Flow(), bins=500)
    np.testing.assert_allclose(curves.quantiles((0.1, 0.5, 0.9))["p"], stats.beta(2, 5).ppf([0.1, 0.5, 0.9]), atol=1e-3)


def test_quantiles_of_the_objective_follow_the_weight():
    heavier = OfLogSNR(lambda lam: torch.where(lam < 0, 3.0, 1.0))  # three quarters of the objective lie above u = 1/2
    quantiles = preview(Uniform(Flow()), heavier, Flow()).quantiles((0.25, 0.625))
    np.testing.assert_allclose(quantiles["pw"], [0.5, 0.75], atol=1e-6)
    np.testing.assert_allclose(quantiles["p"], [0.25, 0.625], atol=1e-6)


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
    halves = np.array_split(pixels[..., :3], 2, axis=1)
    for half in halves:  # both axes hold coloured curves, not only black text on white
        assert half.var() > 1e-3
        assert (half.max(-1) - half.min(-1) > 0.3).sum() > 200


def test_zero_terminal_snr_is_drawn(tmp_path):
    process = DDPM(torch.cat([torch.full((9,), 0.1), torch.ones(1)]))
    recipe = preview(Uniform(process), MinSNR(), process)
    assert np.isinf(recipe.log_snr[-1])
    assert np.isfinite(recipe.pw).all()
    assert recipe.plot(tmp_path / "zero.png").stat().st_size > 1000


def test_preview_equals_the_weighting_itself():
    process, weighting = DDPM.cosine(), WEIGHTINGS["p2"]()
    curves = preview(LogitNormal(process), weighting, process)
    w = weighting(Objective(process), torch.from_numpy(curves.u).float()).double().numpy()
    np.testing.assert_allclose(curves.w / w, (curves.w / w)[0], rtol=1e-5)
