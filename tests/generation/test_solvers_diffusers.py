"""Solvers against diffusers' schedulers, with the same start, the same noise and a model that is not linear."""

import inspect
import math

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    HeunDiscreteScheduler,
)

from noisewise.generation.guidance import denoiser
from noisewise.generation.solvers import solve, start
from noisewise.generation.spacing import grid
from noisewise.levels import over_samples
from noisewise.objective import Objective
from noisewise.processes import DDPM, EDM, Flow
from tests.generation.toy import images, in_order, toy

PREDICTED = {"epsilon": "eps", "sample": "x0", "v_prediction": "v"}


def ddpm_model(scheduler):
    """The toy as an estimate of x0, turned into what the scheduler wants to be given (as eps of its own it would explode)."""
    process, prediction = DDPM.from_diffusers(scheduler), scheduler.config.prediction_type

    def model(x, time):
        x0 = toy(x, time)
        alpha, sigma = (over_samples(s, x) for s in process.scales(process.u_of_time(time.double())))
        eps = (x - alpha * x0) / sigma
        return {"epsilon": eps, "sample": x0, "v_prediction": alpha * eps - sigma * x0}[prediction]

    return model


def theirs(scheduler, x, model=None, seed=1, **options):
    if "generator" in inspect.signature(scheduler.step).parameters:
        options["generator"] = torch.Generator().manual_seed(seed)
    model = model or ddpm_model(scheduler)
    for t in scheduler.timesteps:
        output = model(scheduler.scale_model_input(x, t), t.expand(len(x)))
        x = scheduler.step(output, t, x, **options).prev_sample
    return x


def ours(name, scheduler, x, u, clip=None, **options):
    process = DDPM.from_diffusers(scheduler)
    denoise = denoiser(ddpm_model(scheduler), Objective(process, PREDICTED[scheduler.config.prediction_type]))
    return solve(name, denoise, process, x, u, noise=in_order(x), clip=clip, **options)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


def at_timesteps(timesteps, total=1000):
    return (torch.as_tensor(timesteps).double() + 0.5) / total


@pytest.mark.parametrize("prediction", PREDICTED)
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large"])
@pytest.mark.parametrize("spacing", ["uniform", "quadratic"])
def test_ddpm_equals_diffusers(spacing, variance, clip, prediction):
    scheduler = DDPMScheduler(variance_type=variance, clip_sample=clip is not None, prediction_type=prediction)
    u, x = grid(DDPM.linear(), 40, spacing), images()
    scheduler.set_timesteps(timesteps=DDPM.linear().time(u).tolist())
    close(ours("ddpm", scheduler, x, u, clip, variance=variance), theirs(scheduler, x))


def test_ddpm_with_all_timesteps_equals_diffusers():
    scheduler = DDPMScheduler(200, prediction_type="v_prediction")
    scheduler.set_timesteps(200)
    x, u = images(), grid(DDPM.linear(200), 200, "uniform")
    close(ours("ddpm", scheduler, x, u, 1.0), theirs(scheduler, x))


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("prediction", PREDICTED)
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_equals_diffusers(eta, clip, prediction, schedule):
    scheduler = DDIMScheduler(beta_schedule=schedule, clip_sample=clip is not None, prediction_type=prediction)
    scheduler.set_timesteps(50)
    x = images()
    expected = theirs(scheduler, x, eta=eta, use_clipped_model_output=True)
    close(ours("ddim", scheduler, x, grid(DDPM.linear(), 50, "leading"), clip, eta=eta), expected)


@pytest.mark.parametrize("prediction", PREDICTED)
@pytest.mark.parametrize("spacing", ["uniform", "trailing", "quadratic", "karras"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("steps", [6, 25])
def test_dpmpp_equals_diffusers(steps, order, spacing, prediction):
    scheduler = DPMSolverMultistepScheduler(solver_order=order, prediction_type=prediction)
    u, x = grid(DDPM.linear(), steps, spacing), images()
    scheduler.set_timesteps(timesteps=DDPM.linear().time(u).tolist())
    close(ours("dpmpp", scheduler, x, u, order=order), theirs(scheduler, x))


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("steps", [10, 28])  # which put its timesteps on integers
def test_heun_on_ddpm_equals_diffusers(steps, prediction):
    """Theirs keeps x / alpha, scales the model's input, and asks for the timesteps of a second evaluation itself."""
    scheduler = HeunDiscreteScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear", prediction_type=prediction)
    scheduler.set_timesteps(steps)
    timesteps = torch.unique(scheduler.timesteps.long()).flip(0)
    torch.testing.assert_close(timesteps.float(), scheduler.timesteps.unique().flip(0), rtol=0, atol=1e-3)
    u, x = at_timesteps(timesteps), images()
    alpha = float(DDPM.from_diffusers(scheduler).scales(u[0])[0])
    close(ours("heun", scheduler, x, u), theirs(scheduler, x / alpha))


@pytest.mark.parametrize("steps", [1, 5, 30])
@pytest.mark.parametrize("name", ["euler", "heun"])
def test_flow_equals_diffusers(name, steps):
    process, x = Flow(time_scale=1000), images()
    if name == "euler":
        scheduler = FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
        u = grid(process, steps, "uniform")
    else:
        scheduler = FlowMatchHeunDiscreteScheduler()
        scheduler.set_timesteps(steps)
        u = torch.linspace(1.0, 0.001, steps, dtype=torch.float64)
    x_ours = solve(name, denoiser(toy, Objective(process, "flow")), process, x, u, noise=in_order(x))
    for t in scheduler.timesteps:
        x = scheduler.step(toy(x, t.expand(len(x))), t, x).prev_sample
    close(x_ours, x)


@pytest.mark.parametrize(("name", "make"), [("euler", EDMEulerScheduler), ("dpmpp", EDMDPMSolverMultistepScheduler)])
@pytest.mark.parametrize("steps", [3, 18])
def test_edm_equals_diffusers(name, make, steps):
    scheduler, process, x = make(), EDM(), 80 * images()
    scheduler.set_timesteps(steps)
    denoise = denoiser(toy, Objective(process, "edm", sigma_data=0.5))
    x_ours = solve(name, denoise, process, x, grid(process, steps, "karras"), noise=in_order(x))
    close(x_ours, theirs(scheduler, x, toy))


@pytest.mark.parametrize("churn", [0.0, 15.0, 1000.0])
def test_heun_on_edm_equals_algorithm_2(churn):
    """Karras et al. 2022, written down in numpy with their names."""
    process, steps = EDM(), 18
    S_churn, S_min, S_max, S_noise = churn, 0.05, 50.0, 1.003

    def D(x, sigma):
        return np.tanh(x / np.sqrt(1 + sigma**2)) * 0.8

    def denoise(x, u):
        return torch.from_numpy(D(x.numpy(), float(process.scales(u)[1])))

    draws = {step: images(step).double() for step in range(steps + 1)}
    x = 80 * draws[0].numpy()
    t = [*(80 ** (1 / 7) + np.arange(steps) / (steps - 1) * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7, 0.0]
    for i in range(steps):
        gamma = min(S_churn / steps, math.sqrt(2) - 1) if S_min <= t[i] <= S_max else 0.0
        t_hat = t[i] + gamma * t[i]
        x_hat = x + math.sqrt(t_hat**2 - t[i] ** 2) * S_noise * draws[i + 1].numpy()
        d = (x_hat - D(x_hat, t_hat)) / t_hat
        x = x_hat + (t[i + 1] - t_hat) * d
        if t[i + 1] != 0:
            x = x_hat + (t[i + 1] - t_hat) * (d / 2 + (x - D(x, t[i + 1])) / t[i + 1] / 2)
    u = grid(process, steps, "karras")
    options = {"S_churn": S_churn, "S_min": S_min, "S_max": S_max, "S_noise": S_noise}
    result = solve("heun", denoise, process, start(process, u[0], draws[0]), u, noise=draws.__getitem__, **options)
    np.testing.assert_allclose(result.numpy(), x, rtol=1e-6, atol=1e-6)
