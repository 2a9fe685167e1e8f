"""The three areas of a schedule: analytic boundaries, the thresholds of the paper, moments against a simulation."""

import math

import numpy as np
import pytest
import torch

from noisewise.analysis.increments import AREAS, draw, increments, rows_of, sentence
from noisewise.processes import DDPM, PROCESSES
from noisewise.spec import build_process


@pytest.mark.parametrize(("schedule", "tau"), [("linear", 642), ("quadratic", 829), ("cosine", 959)])
def test_convergence_begins_at_the_tau_of_the_paper(schedule, tau):
    assert abs(increments(build_process(schedule)).tau - tau) <= 1


ANALYTIC = {
    # beta' = beta^2 where beta exp(-integral of beta) is largest, beta = 0.1 + 19.9 t
    "linear": (math.sqrt(19.9) - 0.1) / 19.9,
    "vp": (math.sqrt(19.9) - 0.1) / 19.9,
    # sin^2 is steepest where its argument is pi / 4
    "cosine": 0.5 * 1.008 - 0.008,
    # u^2 / ((1 - u)^2 + u^2) is symmetric about its middle
    "flow": 0.5,
    # sigmoid(2 ln sigma) is steepest at sigma = 1, and ln sigma is linear in u
    "ve": math.log(100) / math.log(5000),
}


@pytest.mark.parametrize("schedule", ANALYTIC)
def test_acceleration_ends_where_the_slope_of_the_noise_share_is_largest(schedule):
    assert increments(build_process(schedule)).peak / 1000 == pytest.approx(ANALYTIC[schedule], abs=0.002)


@pytest.mark.parametrize("schedule", PROCESSES)
def test_the_areas_share_out_all_of_uniform_sampling(schedule):
    found = increments(build_process(schedule))
    shares = found.shares()
    assert list(shares) == list(AREAS)
    assert sum(shares.values()) == pytest.approx(1)
    areas = [row["area"] for row in rows_of(schedule, found)]
    assert {name: areas.count(name) / len(areas) for name in AREAS} == pytest.approx(shares)
    assert areas == sorted(areas, key=list(AREAS).index)


def test_a_slope_that_never_falls_is_all_acceleration():
    found = increments(build_process("edm"))
    assert found.shares() == {"acceleration": 1, "deceleration": 0, "convergence": 0}
    assert "no deceleration; no convergence" in sentence("edm", found)


@pytest.mark.parametrize("process", [DDPM.linear(50), DDPM.cosine(30), DDPM.from_alphas_cumprod(torch.linspace(0.9, 0, 10))])
def test_the_variance_along_the_chain_is_that_of_its_definition(process):
    """(1 - a') + (1 - a) - 2 Cov, with the covariance sqrt(a' / a) (1 - a)."""
    before, after = process.alphas_cumprod[:-1].numpy(), process.alphas_cumprod[1:].numpy()
    found = increments(process)
    np.testing.assert_allclose(found.variance, 2 - before - after - 2 * np.sqrt(after / before) * (1 - before), atol=1e-12)
    np.testing.assert_allclose(found.variance_independent, 2 - before - after, atol=1e-12)
    np.testing.assert_allclose(found.mean, np.sqrt(after) - np.sqrt(before), atol=1e-12)


def test_a_simulated_chain_has_these_moments():
    process = DDPM.linear(20, 0.01, 0.5)
    generator = torch.Generator().manual_seed(0)
    x0 = 3.0
    chain = [torch.full((200_000,), x0)]
    for beta in process.betas:
        noise = torch.randn(len(chain[0]), generator=generator)
        chain += [(1 - beta) ** 0.5 * chain[-1] + beta**0.5 * noise]
    change = torch.stack(chain[1:]).diff(dim=0)
    found = increments(process)
    np.testing.assert_allclose(change.var(1), found.variance, rtol=0.02)
    np.testing.assert_allclose(change.mean(1), found.mean * x0, atol=0.01)


def test_areas_keep_their_place_at_other_numbers_of_steps():
    one, other = increments(DDPM.linear(1000)), increments(DDPM.linear(250, 4e-4, 0.08))
    assert other.peak / 250 == pytest.approx(one.peak / 1000, abs=0.01)
    assert other.tau / 250 == pytest.approx(one.tau / 1000, abs=0.02)


def test_a_sentence_names_the_boundaries_in_t_u_and_log_snr():
    said = sentence("linear", increments(DDPM.linear()))
    assert "acceleration at t 0 to 218, u 0.000 to 0.219, log SNR 9.21 to 0.44: 21.9% of uniform draws" in said
    assert "convergence at t 641 to 999" in said


def test_a_schedule_without_increments_is_refused():
    with pytest.raises(ValueError, match="at least 3 timesteps"):
        increments(DDPM.linear(2))


def test_the_picture_has_a_panel_for_each_schedule_and_one_for_all():
    names = ["linear", "cosine", "edm", "flow"]
    figure = draw({name: increments(build_process(name)) for name in names})
    assert [axis.get_title().split()[0] for axis in figure.subfigs[0].axes] == names
    assert [label.get_text() for label in figure.subfigs[1].axes[0].get_yticklabels()] == names
