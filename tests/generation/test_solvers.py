"""Solvers against each other, on every process, spacing and prediction, and on everything that may go wrong."""

import math

import pytest
import torch
from diffusers import DDPMScheduler

from noisewise.generation.guidance import denoiser
from noisewise.generation.solvers import SOLVERS, Solver, default_solver, solve, start
from noisewise.generation.spacing import SPACINGS, grid
from noisewise.objective import PREDICTIONS, Objective
from noisewise.processes import DDPM, EDM, PROCESSES, VE, VP, Flow
from noisewise.streams import normals
from tests.generation.toy import images, in_order, toy

VARIANTS = [
    ("ddpm", {}),
    ("ddpm", {"variance": "fixed_large"}),
    ("ddim", {}),
    ("ddim", {"eta": 0.7}),
    ("ddim", {"eta": 1.0}),
    ("euler", {}),
    ("dpmpp", {"order": 1}),
    ("dpmpp", {}),
    ("heun", {}),
    ("heun", {"S_churn": 10.0, "S_min": 0.05, "S_max": 50.0, "S_noise": 1.003}),
]


# Against each other


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("spacing", ["uniform", "karras"])
def test_euler_ddim_and_first_order_dpmpp_are_the_same(process, spacing):
    process, x = PROCESSES[process](), images()
    denoise, u = denoiser(toy, Objective(process, "x0")), grid(process, 9, spacing)
    x = start(process, u[0], x)
    results = [
        solve(name, denoise, process, x, u, noise=in_order(x), **options)
        for name, options in [("euler", {}), ("ddim", {"eta": 0.0}), ("dpmpp", {"order": 1})]
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_rescaling_a_process_changes_nothing(name, options, shift):
    """VE in sigma and VP, at the same levels of sigma / alpha, are one process in two coordinates."""
    ve, vp = VE(0.01, 100.0), VP()
    u_ve = torch.linspace(0.95, 0.1, 12, dtype=torch.float64)
    u_vp = vp.u_of_log_snr(ve.log_snr(u_ve))
    start_noise, noise = images().double(), lambda step: images(step).double()

    def run(process, u):
        def denoise(x, u):
            alpha, sigma = process.scales(u)
            return torch.tanh(shift * x / (alpha + sigma))

        return solve(name, denoise, process, start(process, u[0], start_noise), u, noise=noise, **options)

    torch.testing.assert_close(run(ve, u_ve), run(vp, u_vp), rtol=1e-5, atol=1e-5)


def test_more_churn_is_another_image_and_none_needs_no_noise():
    process, x = EDM(), images()
    u = grid(process, 10, "karras")
    x = start(process, u[0], x)
    denoise = denoiser(toy, Objective(process, "edm"))
    plain, churned = (
        solve("heun", denoise, process, x, u, noise=in_order(x), S_churn=churn, S_max=limit)
        for churn, limit in [(0.0, math.inf), (20.0, 80.0)]
    )
    outside = solve("heun", denoise, process, x, u, noise=None, S_churn=20.0, S_min=100.0, S_max=200.0)
    assert torch.equal(plain, outside)
    assert not torch.allclose(plain, churned)


# Every solver, process, spacing, prediction and shape


def zero_terminal():
    return DDPM.from_diffusers(DDPMScheduler(100, rescale_betas_zero_snr=True))


EVERY_PROCESS = {**PROCESSES, "zero_terminal": zero_terminal}


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("process", EVERY_PROCESS)
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_nothing_is_ever_nan(name, options, process, prediction):
    process = EVERY_PROCESS[process]()
    denoise = denoiser(toy, Objective(process, prediction))
    kinds = [(7, (2, 3, 4, 4), 1.0), (2, (3, 5), None), (1, (2, 6), 1.0)]
    for spacing in SPACINGS:
        if spacing == "leading" and process.steps is None:
            continue
        for steps, shape, clip in kinds if spacing == "uniform" else kinds[:1]:
            u = grid(process, steps, spacing)
            x = start(process, u[0], images(shape=shape))
            result = solve(name, denoise, process, x, u, noise=lambda step: images(step, shape), clip=clip, **options)  # noqa: B023
            assert torch.isfinite(result).all(), (spacing, steps)
            assert result.shape == shape
            assert result.dtype == torch.float32
            if clip is not None:
                assert float(result.abs().max()) <= 1 + 1e-6


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("ends", [[1.0, 0.5, 0.0], [1.0, 0.0], [1.0], [0.7, 0.0]])
def test_flow_may_start_and_end_exactly(name, options, ends):
    """A level without noise is the end: it is not asked of the model, and changes nothing."""
    asked, x, u = [], images(), torch.tensor(ends, dtype=torch.float64)

    def denoise(x, u):
        asked.append(float(u))
        return torch.tanh(x)

    results = [solve(name, denoise, Flow(), x, levels, noise=images, **options) for levels in (u, u[u > 0])]
    assert torch.equal(*results)
    assert torch.isfinite(results[0]).all()
    assert min(asked) > 0


def test_pure_noise_says_nothing_about_x0_to_a_model_of_the_noise():
    process, x = zero_terminal(), images()
    u = grid(process, 10, "uniform")
    whole = solve("ddim", denoiser(toy, Objective(process, "eps")), process, x, u, noise=in_order(x))
    later = solve("ddim", denoiser(toy, Objective(process, "eps")), process, start(process, u[1], x), u[1:], noise=in_order(x))
    torch.testing.assert_close(whole, later)


@pytest.mark.parametrize("process", ["linear", "edm", "flow"])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_an_image_is_the_same_in_any_batch(name, options, process):
    process = PROCESSES[process]()
    solver = Solver(name, 6, "karras", options=options)

    def run(indices):
        indices = torch.tensor(indices)
        denoise = denoiser(toy, Objective(process, "v"))
        return solver.generate(denoise, process, lambda draw: normals(3, indices, draw, (3, 4, 4)), clip=1.0)

    whole = run(range(12))
    parts = torch.cat([run([5]), run([11, 0, 3])])
    torch.testing.assert_close(parts, whole[[5, 11, 0, 3]], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(whole[0], whole[1])


@pytest.mark.parametrize(("name", "evaluations"), [("ddim", 8), ("dpmpp", 8), ("heun", 15)])
def test_evaluations_and_callbacks_are_counted(name, evaluations):
    calls, seen = [], []

    def denoise(x, u):
        calls.append(u)
        assert (u.ndim, u.dtype, u.device.type) == (0, torch.float64, "cpu")
        return torch.tanh(x)

    solver = Solver(name, 8, "karras")
    noise = in_order(images())
    result = solver.generate(denoise, EDM(), noise, callback=lambda done, x: seen.append((done, x)))
    assert len(calls) == evaluations == solver.evaluations
    assert [done for done, _ in seen] == list(range(1, 9))
    assert torch.equal(seen[-1][1], result)


def test_no_graph_is_kept():
    weight = torch.ones((), requires_grad=True)
    result = Solver("ddim", 3).generate(lambda x, u: weight * x, Flow(), in_order(images()))
    assert not result.requires_grad


# Specs and mistakes


def test_defaults():
    expected = {
        **dict.fromkeys(PROCESSES, "ddim:steps=50,spacing=uniform"),
        "edm": "heun:steps=18,spacing=karras",
        "ve": "heun:steps=18,spacing=karras",
        "flow": "euler:steps=50,spacing=uniform",
    }
    assert {name: default_solver(make()).spec for name, make in PROCESSES.items()} == expected
    assert default_solver(DDPM.linear(20)).steps == 20
    assert Solver.parse("ddpm", DDPM.linear(300)).steps == 300
    assert Solver.parse("dpmpp", DDPM.linear()).spacing == "trailing"


@pytest.mark.parametrize(
    "spec",
    [
        "ddim:steps=50,spacing=quadratic,eta=0.5",
        "ddpm:steps=250,spacing=uniform,variance=fixed_large",
        "heun:steps=18,spacing=karras,rho=5.0,sigma_min=0.01,sigma_max=50.0,S_churn=40.0,S_max=inf",
        "dpmpp:steps=20,spacing=trailing,order=1",
        "euler:steps=1,spacing=uniform",
    ],
)
def test_specs_survive_a_round_trip(spec):
    solver = Solver.parse(spec, DDPM.linear())
    assert solver.spec == spec
    assert Solver.parse(solver.spec, EDM()) == solver


def test_a_spec_does_what_the_call_does():
    process, x = DDPM.linear(), images()
    denoise = denoiser(toy, Objective(process, "x0"))
    spec = Solver.parse("ddim:steps=9,eta=0.5,spacing=quadratic", process)
    draws = lambda step: images(step)  # noqa: E731
    u = grid(process, 9, "quadratic")
    expected = solve("ddim", denoise, process, start(process, u[0], x), u, noise=draws, eta=0.5)
    assert torch.equal(spec.generate(denoise, process, draws), expected)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dimm:steps=5", "unknown solver 'dimm': did you mean 'ddim'"),
        ("ddim:etaa=0.5", "unknown setting of ddim 'etaa': did you mean 'eta'"),
        ("heun:s_churn=0.5", "did you mean 'S_churn'"),
        ("ddim+heun", "one solver"),
        ("ddim:steps=five", "whole number"),
        ("ddim:steps=0", "at least 1"),
        ("ddim:eta=nan", "expected a number"),
        ("ddim:eta=2", "eta must be between 0"),
        ("ddim:spacing=karas", "did you mean 'karras'"),
        ("ddim:spacing=uniform,sigma_max=3", "belong to the spacing karras"),
        ("dpmpp:order=3", "order must be 1 or 2"),
        ("ddpm:variance=learned", "fixed_small or fixed_large"),
        ("heun:S_churn=-1", "S_churn >= 0"),
        ("euler:eta=0.5", "unknown setting of euler 'eta'"),
    ],
)
def test_wrong_specs_are_explained(spec, message):
    with pytest.raises(ValueError, match=message):
        Solver.parse(spec, DDPM.linear())


@pytest.mark.parametrize(
    ("name", "u", "options", "message"),
    [
        ("dimm", [1.0], {}, "unknown solver 'dimm'"),
        ("ddim", [1.0], {"order": 2}, "unknown option of ddim 'order'.*Known: eta"),
        ("euler", [1.0], {"eta": 0.0}, "It has none"),
        ("ddim", [], {}, "vector of floats"),
        ("ddim", [0.5, 1.0], {}, "noise must fall"),
        ("ddim", [0.5, 0.5], {}, "noise must fall"),
        ("ddim", [math.nan], {}, r"lie in \[0, 1\]"),
        ("ddim", [1.5], {}, r"lie in \[0, 1\]"),
        ("ddim", [0.0], {}, "starts without noise"),
        ("ddim", [1.0], {"clip": 0.0}, "clip must be positive"),
    ],
)
def test_wrong_calls_are_explained(name, u, options, message):
    with pytest.raises(ValueError, match=message):
        solve(name, lambda x, u: x, Flow(), images(), torch.tensor(u, dtype=torch.float64), noise=images, **options)


def test_timesteps_that_round_to_one_are_refused():
    with pytest.raises(ValueError, match="noise must fall"):
        solve("ddim", lambda x, u: x, DDPM.linear(10), images(), torch.tensor([0.57, 0.53]), noise=images)


def test_wrong_shapes_are_explained():
    u = torch.tensor([1.0, 0.5])
    with pytest.raises(ValueError, match="denoise must return the shape"):
        solve("ddim", lambda x, u: x[:1], Flow(), images(), u, noise=images)
    with pytest.raises(ValueError, match="noise must return the shape"):
        solve("ddpm", lambda x, u: x, Flow(), images(), u, noise=lambda step: images(step)[:1])


def test_every_solver_is_under_test():
    assert {name for name, _ in VARIANTS} == set(SOLVERS)
