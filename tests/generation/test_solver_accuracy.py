"""Solvers on Gaussian data, where everything is known: what they generate, and how fast the error falls with the steps.

Nothing is estimated from samples: with a linear denoiser a solver is an affine map of its noises, read off unit vectors.
"""

import math
from itertools import pairwise

import pytest
import torch

from noisewise.generation.solvers import SOLVERS, Solver, default_solver, solve, start
from noisewise.generation.spacing import grid
from noisewise.processes import DDPM, EDM, PROCESSES, VE, VP, Flow
from tests.generation.gaussian import Gaussian, affine, mean_and_covariance, moments, unit_noise

DATA = Gaussian()
MAKERS = {
    "linear": lambda: DDPM.linear(4000, 1e-4 / 4, 0.02 / 4),
    "cosine": DDPM.cosine,
    "vp": VP,
    "ve": VE,
    "edm": EDM,
    "flow": Flow,
}
FIRST_ORDER = [
    ("linear", "uniform"),
    ("cosine", "uniform"),
    ("vp", "uniform"),
    ("ve", "karras"),
    ("edm", "karras"),
    ("flow", "uniform"),
]
ORDERS = [
    *(("ddim", 1, *case) for case in FIRST_ORDER),
    *(
        ("dpmpp", 2, *case)
        for case in [("linear", "quadratic"), ("vp", "karras"), ("flow", "karras"), *FIRST_ORDER[1:2], *FIRST_ORDER[3:5]]
    ),
    *(("heun", 2, *case) for case in [*FIRST_ORDER[:1], ("cosine", "karras"), *FIRST_ORDER[2:]]),
]


@pytest.mark.parametrize(("name", "order", "process", "spacing"), ORDERS)
def test_error_falls_at_the_order_of_the_method(name, order, process, spacing):
    process = MAKERS[process]()

    def error(steps):
        u = grid(process, steps, spacing)
        moving_end = spacing == "uniform" and isinstance(process, Flow)  # at 1 / n
        exact, offset = DATA.ode(process, u[0], None if moving_end else u[-1])
        matrix, ours = affine(name, process, u, DATA.denoise(process))
        return float(((matrix - exact) * process.scales(u[0])[1]).norm() + (ours - offset).norm())

    errors = [error(steps) for steps in (32, 64, 128)]
    slopes = [math.log2(coarse / fine) for coarse, fine in pairwise(errors)]
    assert all(abs(slope - order) < 0.3 for slope in slopes), (errors, slopes)
    assert errors[-1] < (0.05 if order == 1 else 0.004)


def test_dpmpp_reaches_second_order_on_uniform_flow_too():
    """Slower to get there: near t = 0 every grid has steps of a fixed width in log SNR."""
    errors = []
    for steps in (256, 1024):
        u = grid(Flow(), steps, "uniform")
        errors.append(float((affine("dpmpp", Flow(), u, DATA.denoise(Flow()))[0] - DATA.ode(Flow(), u[0])[0]).norm()))
    assert math.log(errors[0] / errors[1], 4) > 1.7


def covariance_error(name, process, steps, spacing):
    u = grid(process, steps, spacing)
    matrix = affine(name, process, u, DATA.denoise(process))[0] * process.scales(u[0])[1]
    return float((matrix @ matrix.T - DATA.covariance).norm())


@pytest.mark.parametrize("spacing", ["uniform", "trailing", "quadratic"])
def test_heun_survives_a_first_step_from_nearly_pure_noise(spacing):
    """The cosine schedule ends at sigma / alpha = 20,000, where a step in that coordinate multiplies any error by 10,000."""
    heun, euler = (covariance_error(name, DDPM.cosine(), 16, spacing) for name in ("heun", "euler"))
    assert heun < euler / 2


@pytest.mark.parametrize("steps", [15, 25, 50])
def test_the_usual_spacing_of_dpmpp_beats_uniform(steps):
    usual = Solver.parse("dpmpp", DDPM.linear()).spacing
    assert (
        covariance_error("dpmpp", DDPM.linear(), steps, usual) < covariance_error("dpmpp", DDPM.linear(), steps, "uniform") / 2
    )


@pytest.mark.parametrize("process", PROCESSES)
def test_the_default_solver_generates_the_mean_and_the_covariance(process):
    process = PROCESSES[process]()
    solver = default_solver(process)
    u = solver.grid(process)
    matrix, offset = affine(solver.name, process, u, DATA.denoise(process), **solver.options)
    matrix = matrix * process.scales(u[0])[1]
    torch.testing.assert_close(offset, DATA.mean, rtol=0, atol=0.03)
    torch.testing.assert_close(matrix @ matrix.T, DATA.covariance, rtol=0, atol=0.1)


@pytest.mark.parametrize(("variance", "tolerance"), [("fixed_small", 0.01), ("fixed_large", 0.003)])
@pytest.mark.parametrize("process", ["linear", "ve", "edm", "flow"])
def test_ancestral_sampling_with_all_steps_generates_the_mean_and_the_covariance(process, variance, tolerance):
    process = PROCESSES[process]()
    u = grid(process, 1000, "uniform")
    mean, covariance = moments("ddpm", process, u, DATA.denoise(process), variance=variance)
    torch.testing.assert_close(mean, DATA.mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(covariance, DATA.covariance, rtol=0, atol=tolerance)


@pytest.mark.parametrize("spacing", ["uniform", "quadratic", "karras"])
@pytest.mark.parametrize("process", PROCESSES)
def test_fixed_large_is_exact_for_unit_variance_with_any_steps(process, spacing):
    """Down to the last step, which adds no noise and so keeps only what is known at the last level."""
    process, data = PROCESSES[process](), Gaussian(mean=torch.zeros(6).double(), variances=torch.ones(6).double())
    u = grid(process, 6, spacing)
    covariance = moments("ddpm", process, u, data.denoise(process), variance="fixed_large")[1]
    first, last = ((alpha**2, sigma**2) for alpha, sigma in (process.scales(u[0]), process.scales(u[-1])))
    known = last[0] / (last[0] + last[1])
    tolerance = float(first[0] / first[1])  # the data left in the first level is not in the start
    torch.testing.assert_close(covariance, known * torch.eye(6).double(), rtol=0, atol=1.1 * tolerance + 1e-12)


@pytest.mark.parametrize("spacing", ["uniform", "quadratic", "karras"])
@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize(("name", "options"), [("ddpm", {}), ("ddim", {}), ("ddim", {"eta": 0.4}), ("dpmpp", {}), ("heun", {})])
def test_data_at_a_point_passes_every_level_with_its_own_variance(name, options, process, spacing):
    """x at a level is alpha x0 + sigma noise: exact for every solver, however few the steps."""
    process, point, seen = PROCESSES[process](), torch.tensor([0.5, -2.0, 1.0]).double(), []
    u, noise = grid(process, 5, spacing), unit_noise(5, 3)
    x = start(process, u[0], noise(0)) + float(process.scales(u[0])[0]) * point
    solve(name, lambda x, u: point.expand_as(x), process, x, u, noise=noise, callback=lambda _, x: seen.append(x), **options)
    levels = [*(tuple(map(float, process.scales(v))) for v in u[1:]), (1.0, 0.0)]
    for (alpha, sigma), x in zip(levels, seen, strict=True):
        mean, covariance = mean_and_covariance(x)
        torch.testing.assert_close(mean, alpha * point, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(covariance, sigma**2 * torch.eye(3).double(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("process", PROCESSES)
def test_eta_one_has_the_law_of_ancestral_sampling(process):
    process = PROCESSES[process]()
    u = grid(process, 12, "quadratic")
    ours, theirs = (
        moments(name, process, u, DATA.denoise(process), **options) for name, options in [("ddim", {"eta": 1.0}), ("ddpm", {})]
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_churn_repairs_a_wrong_start():
    """Noise put back forgets where x came from: started with a tenth of the noise, the covariance recovers only with churn."""
    process, noise = EDM(), unit_noise(120, 6)
    u = grid(process, 120, "karras")

    def error(**options):
        x = start(process, u[0], noise(0)) / 10
        covariance = mean_and_covariance(solve("heun", DATA.denoise(process), process, x, u, noise=noise, **options))[1]
        return float((covariance - DATA.covariance).norm() / DATA.covariance.norm())

    assert error() > 0.9
    assert error(S_churn=40.0) < 0.1


def test_every_solver_is_judged_here():
    assert set(SOLVERS) == {"ddpm", "euler", *(case[0] for case in ORDERS)}
