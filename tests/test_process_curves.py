"""SpeeD's increments: the thresholds of the paper, and numpy as the reference."""

import numpy as np
import pytest
import torch

from noisewise.process_curves import gradient, noise_share, scaled_variance_increment, vanishing_point
from noisewise.processes import DDPM, PROCESSES


@pytest.mark.parametrize(("make", "tau"), [(DDPM.linear, 642), (DDPM.quadratic, 829), (DDPM.cosine, 959)])
def test_tau_of_the_paper(make, tau):
    assert abs(vanishing_point(make(1000)) - tau) <= 1


@pytest.mark.parametrize("make", [DDPM.linear, DDPM.quadratic, DDPM.cosine])
def test_tau_is_where_the_increment_falls_below_the_threshold(make):
    process = make(1000)
    increment = np.gradient(np.sqrt(1 - process.alphas_cumprod.numpy()))
    assert vanishing_point(process) == int(np.argmax(increment < 1e-4))


@pytest.mark.parametrize("steps", [100, 500, 2000])
def test_tau_keeps_its_place_at_other_numbers_of_steps(steps):
    same_curve = DDPM.linear(steps, 0.1 / steps, 20 / steps)
    assert vanishing_point(same_curve) / steps == pytest.approx(0.642, abs=0.02)


@pytest.mark.parametrize("threshold", [1e-5, 1e-3])
def test_a_lower_threshold_moves_tau_up(threshold):
    assert (vanishing_point(DDPM.linear(), threshold) > 642) == (threshold < 1e-4)


@pytest.mark.parametrize("name", PROCESSES)
def test_tau_lies_on_the_process(name):
    assert 1 <= vanishing_point(PROCESSES[name]()) <= 1000


def test_one_timestep():
    assert vanishing_point(DDPM.linear(1)) == 1
    assert scaled_variance_increment(DDPM.linear(1)).tolist() == [1.0]


def test_gradient_is_numpys():
    curve = torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(gradient(curve).numpy(), np.gradient(curve.numpy()), rtol=1e-12)


@pytest.mark.parametrize("name", PROCESSES)
def test_scaled_increment_spans_zero_to_one(name):
    increment = scaled_variance_increment(PROCESSES[name]())
    assert (increment.min().item(), increment.max().item()) == (0.0, 1.0)


@pytest.mark.parametrize("make", [DDPM.linear, DDPM.quadratic, DDPM.cosine])
def test_noise_share_is_one_minus_abar(make):
    process = make(300)
    torch.testing.assert_close(noise_share(process), 1 - process.alphas_cumprod, rtol=1e-10, atol=1e-14)
