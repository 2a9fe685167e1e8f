"""What docs/migration.md calls the same is the same: densities and weights against the formulas of the other projects."""

import math

import pytest
import torch

import noisewise
from noisewise import DDPM, EDM, VE, VP, Flow, Objective
from noisewise.integrations.diffusers import read_scheduler
from noisewise.samplers import Table
from noisewise.weighting import OfLogSNR

U = (torch.arange(1000) + 0.5) / 1000
V = (torch.arange(1, 20_000) / 20_000).double()


def of(spec, process, prediction="eps"):
    return noisewise.recipe(spec, Objective(process, prediction))


def weights(weighting, process, prediction):
    return weighting.weights(Objective(process, prediction), U)


def same_density(spec, quantile_there):
    """Whether the noise levels that the other project maps ascending uniform numbers to are those of the sampler."""
    here = noisewise.recipe(spec, Flow()).sampler.quantile(V.float())
    there = quantile_there(V)
    torch.testing.assert_close(here.sort().values.double(), there.sort().values, rtol=0, atol=2e-3)


def sigmoid_normal(scale=1.0, mean=0.0):
    return lambda v: torch.sigmoid(mean + scale * torch.special.ndtri(v))


def shifted(shift, quantile):
    return lambda v: shift * quantile(v) / (1 + (shift - 1) * quantile(v))


def test_sigmoid_and_shift_sampling_of_flow_trainers():
    same_density("logit_normal:std=1.7", sigmoid_normal(1.7))
    same_density("shift:of=(logit_normal:std=1.0),shift=3.1582", shifted(3.1582, sigmoid_normal()))
    same_density("shift:of=uniform,shift=3", shifted(3.0, lambda v: v))


def test_beta_schedules_of_flow_trainers():
    same_density("beta:a=2,b=2", lambda v: 0.5 - torch.sin(torch.asin(1 - 2 * v) / 3))  # the closed form for a = b = 2


def test_the_logit_mean_of_diffusers_changes_its_sign():
    """Scripts index a list that begins with the most noise: u there is 1 - u here."""
    same_density("logit_normal:mean=-0.7,std=1.2", lambda v: 1 - sigmoid_normal(1.2, 0.7)(v))
    same_density("mode:scale=1.29", lambda v: v + 1.29 * (torch.cos(math.pi * v / 2) ** 2 - 1 + v))  # and 1 - u of theirs


def test_the_shift_of_a_scheduler_is_read_off_it():
    scheduler = pytest.importorskip("diffusers").FlowMatchEulerDiscreteScheduler(shift=3.0)
    process = read_scheduler(scheduler).process
    assert torch.equal(process.time(U).flip(0), scheduler.timesteps)
    torch.testing.assert_close(process.scales(U)[1].flip(0), scheduler.sigmas)


@pytest.mark.parametrize(
    ("scheme", "spec"), [("sigma_sqrt", "sigma_sqrt"), ("cosmap", "cosmap_weight"), ("logit_normal", "none")]
)
def test_loss_weights_of_sd3(scheme, spec):
    training_utils = pytest.importorskip("diffusers.training_utils")
    theirs = training_utils.compute_loss_weighting_for_sd3(scheme, sigmas=U)
    torch.testing.assert_close(weights(of(spec, Flow()).weighting, Flow(), "flow"), theirs, rtol=1e-4, atol=0)


def test_preconditioned_outputs_of_sd3():
    """x0 = x - sigma * output: an x0-loss of weight 1 is sigma^2 on the flow loss, and of sigma^-2 it is 1."""
    torch.testing.assert_close(weights(OfLogSNR(lambda log_snr: (-log_snr).exp()), Flow(), "flow"), U**2, rtol=1e-4, atol=0)


@pytest.mark.parametrize("prediction", ["eps", "v", "x0"])
def test_min_snr_of_diffusers_and_sd_scripts(prediction):
    process = DDPM.quadratic(beta_start=0.00085, beta_end=0.012)
    snr = process.log_snr(U).exp()
    expected = snr.clamp(max=5) / {"eps": snr, "v": snr + 1, "x0": torch.ones_like(snr)}[prediction]
    torch.testing.assert_close(weights(of("minsnr:gamma=5", process).weighting, process, prediction), expected)


def test_the_other_weights_of_sd_scripts():
    process = DDPM.quadratic(beta_start=0.00085, beta_end=0.012)
    snr = process.log_snr(U).exp()
    debiased = of("debiased", process).weighting
    torch.testing.assert_close(weights(debiased, process, "eps"), snr**-0.5)
    torch.testing.assert_close(weights(debiased, process, "v"), snr.sqrt() / (snr + 1))
    torch.testing.assert_close(weights(of("simple", process).weighting, process, "v"), snr / (snr + 1))
    c = 0.3
    like_v = OfLogSNR(lambda log_snr: 1 + c * (1 + (-log_snr).exp()))
    torch.testing.assert_close(weights(like_v, process, "eps"), 1 + c * (snr + 1) / snr)


def test_bounds_and_biases_of_timesteps():
    process, low, high, T = DDPM.linear(), 200, 800, 1000
    bounded = Table(process, values=lambda u: (u >= low / T) & (u < high / T))
    inside = (torch.arange(T) >= low) & (torch.arange(T) < high)  # torch.randint(low, high)
    torch.testing.assert_close(bounded.density(U), inside * T / (high - low), rtol=1e-4, atol=0)
    m, p = 3.0, 0.25
    later = Table(process, values=lambda u: 1 + (m - 1) * (u >= 1 - p))
    there = torch.ones(T)
    there[-int(p * T) :] *= m
    torch.testing.assert_close(later.density(U), there / there.mean(), rtol=1e-4, atol=0)


def test_edm_and_its_relatives():
    process, d = EDM(mean=-1.2, std=1.2), 0.5
    sigma = process.scales(U)[1]
    torch.testing.assert_close(sigma, torch.exp(-1.2 + 1.2 * torch.special.ndtri(U)))
    expected = (sigma**2 + d**2) / (sigma * d) ** 2
    edm = of("edm_weight:sigma_data=0.5", process).weighting
    torch.testing.assert_close(weights(edm, process, "x0"), expected)
    torch.testing.assert_close(weights(edm, process, "edm"), torch.ones_like(U))
    vp, t = VP(beta_min=0.1, beta_max=20), 1e-5 + U * (1 - 1e-5)
    alpha, sigma = vp.scales(U)
    torch.testing.assert_close(sigma / alpha, ((0.5 * 19.9 * t**2 + 0.1 * t).exp() - 1).sqrt(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(VE(0.02, 100).scales(U)[1], 0.02 * (100 / 0.02) ** U)
    for process in (vp, VE(0.02, 100)):  # weight 1 / sigma^2 on the loss of a denoiser of x / alpha
        simple = of("simple", process).weighting
        torch.testing.assert_close(weights(simple, process, "x0"), process.log_snr(U).exp())
