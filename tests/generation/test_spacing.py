"""Grids of noise levels against diffusers, papers and their own promises."""

import math

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, EDMEulerScheduler, FlowMatchEulerDiscreteScheduler

from noisewise.generation.spacing import SPACINGS, grid
from noisewise.processes import DDPM, EDM, PROCESSES, VE, VP, Flow

CONTINUOUS = {"vp": VP, "ve": VE, "edm": EDM, "flow": Flow}


def timesteps(steps, spacing, total=1000, **options):
    process = DDPM.linear(total)
    return process.time(grid(process, steps, spacing, **options)).tolist()


def sigmas(process, u):
    alpha, sigma = process.scales(u)
    return sigma / alpha


@pytest.mark.parametrize("steps", [2, 3, 7, 10, 50, 64, 100, 250, 333, 999, 1000])
@pytest.mark.parametrize(("ours", "theirs"), [("uniform", "linspace"), ("leading", "leading"), ("trailing", "trailing")])
def test_timesteps_equal_diffusers(ours, theirs, steps):
    scheduler = DDIMScheduler(1000, timestep_spacing=theirs)
    scheduler.set_timesteps(steps)
    expected = scheduler.timesteps.tolist()
    if len(expected) != steps:  # numpy's arange may overshoot by a last one, below zero
        assert (ours, expected.pop()) == ("trailing", -1)
    assert timesteps(steps, ours) == expected


def test_uniform_includes_both_ends_and_one_step_starts_at_the_most_noise():
    assert timesteps(5, "uniform", 11) == [10, 8, 5, 2, 0]
    for spacing in ("uniform", "trailing", "quadratic"):
        assert timesteps(1, spacing) == [999]


def test_quadratic_is_the_square_of_an_even_spacing():
    expected = np.round(999 * np.linspace(0, 1, 10) ** 2)[::-1].astype(int).tolist()
    assert timesteps(10, "quadratic") == expected == [999, 789, 604, 444, 308, 197, 111, 49, 12, 0]


@pytest.mark.parametrize("spacing", ["quadratic", "karras"])
def test_timesteps_that_coincide_are_moved_apart(spacing):
    plain = timesteps(50, spacing)
    assert len(set(plain)) == 50
    assert plain == sorted(plain, reverse=True)
    assert timesteps(1000, spacing) == list(range(999, -1, -1))
    assert timesteps(99, spacing, 100) == sorted(set(timesteps(99, spacing, 100)), reverse=True)


@pytest.mark.parametrize("steps", [1, 2, 18, 40])
def test_karras_equals_the_formula_and_diffusers(steps):
    process = EDM()
    ours = sigmas(process, grid(process, steps, "karras"))
    ramp = np.arange(steps) / max(steps - 1, 1)
    formula = (80 ** (1 / 7) + ramp * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    np.testing.assert_allclose(ours.numpy(), formula, rtol=1e-8)
    scheduler = EDMEulerScheduler()
    scheduler.set_timesteps(steps)
    torch.testing.assert_close(ours.float(), scheduler.sigmas[:-1], rtol=1e-5, atol=0)


def test_karras_takes_its_own_settings():
    process = EDM()
    ours = sigmas(process, grid(process, 4, "karras", rho=1.0, sigma_min=1.0, sigma_max=4.0))
    torch.testing.assert_close(ours, torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("name", PROCESSES)
def test_karras_stays_within_the_process(name):
    process = PROCESSES[name]()
    own = sigmas(process, torch.tensor([0.0, 1.0], dtype=torch.float64))
    ours = sigmas(process, grid(process, 20, "karras"))
    assert float(ours[0]) == pytest.approx(min(80.0, float(own[1])), rel=0.02)
    assert float(ours[-1]) == pytest.approx(max(0.002, float(own[0])), rel=1e-6)


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_flow_goes_from_one_to_just_above_zero(steps):
    expected = [1 - i / steps for i in range(steps)]
    assert grid(Flow(), steps, "uniform").tolist() == pytest.approx(expected)
    assert grid(Flow(), steps, "trailing").tolist() == pytest.approx(expected)
    assert grid(Flow(), steps, "quadratic").tolist() == pytest.approx([u**2 for u in expected])
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
    torch.testing.assert_close(grid(Flow(), steps, "uniform").float(), scheduler.sigmas[:-1])


@pytest.mark.parametrize("name", ["vp", "ve", "edm"])
def test_other_continuous_processes_include_both_ends(name):
    assert grid(CONTINUOUS[name](), 5, "uniform").tolist() == [1, 0.75, 0.5, 0.25, 0]
    assert grid(CONTINUOUS[name](), 5, "quadratic").tolist() == [1, 0.5625, 0.25, 0.0625, 0]


@pytest.mark.parametrize("steps", [1, 2, 9, 50])
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("name", PROCESSES)
def test_every_grid_has_falling_noise_and_as_many_levels_as_asked(name, spacing, steps):
    process = PROCESSES[name]()
    if spacing == "leading" and process.steps is None:
        with pytest.raises(ValueError, match="use uniform or trailing"):
            grid(process, steps, spacing)
        return
    u = grid(process, steps, spacing)
    assert u.dtype == torch.float64
    assert u.shape == (steps,)
    assert ((u >= 0) & (u <= 1)).all()
    assert (process.log_snr(u).diff() > 0).all()
    assert (process.scales(u)[1] > 0).all()


def test_zero_terminal_snr_starts_at_pure_noise_or_at_a_finite_sigma():
    process = DDPM(torch.cat([torch.linspace(1e-4, 0.02, 99), torch.ones(1)]))
    assert float(process.scales(grid(process, 10, "uniform"))[0][0]) == 0
    assert math.isfinite(float(sigmas(process, grid(process, 10, "karras"))[-1]))


@pytest.mark.parametrize(
    ("process", "steps", "spacing", "options", "message"),
    [
        (DDPM.linear(10), 11, "uniform", {}, "only 10 timesteps"),
        (DDPM.linear(10), 11, "karras", {}, "only 10 timesteps"),
        (Flow(), 0, "uniform", {}, "steps must be an integer"),
        (Flow(), 2.5, "uniform", {}, "steps must be an integer"),
        (Flow(), True, "uniform", {}, "steps must be an integer"),
        (Flow(), 5, "quadratc", {}, "did you mean 'quadratic'"),
        (Flow(), 5, "uniform", {"sigma_min": 0.1}, "belong to the spacing karras"),
        (Flow(), 5, "uniform", {"rho": 3.0}, "belong to the spacing karras"),
        (EDM(), 5, "karras", {"rho": 0.0}, "rho > 0"),
        (EDM(), 5, "karras", {"sigma_min": 3.0, "sigma_max": 2.0}, "sigma_min < sigma_max"),
        (EDM(), 5, "karras", {"sigma_max": math.nan}, "sigma_min < sigma_max"),
        (VE(0.01, 50.0), 5, "karras", {"sigma_min": 60.0, "sigma_max": 70.0}, "own range, 0.01 to 50"),
    ],
)
def test_wrong_settings_are_explained(process, steps, spacing, options, message):
    with pytest.raises(ValueError, match=message):
        grid(process, steps, spacing, **options)
