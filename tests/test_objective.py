"""Objectives: targets, preconditioning, and the same weight meaning the same thing for every prediction."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDPMScheduler

from noisewise.objective import LOSS_KINDS, PREDICTIONS, Objective, eps_error_per_prediction_error
from noisewise.processes import DDPM, EDM, PROCESSES, VE, Flow
from noisewise.samplers import Uniform
from noisewise.weighting import WEIGHTINGS

SHAPES = {"vectors": (8, 5), "sequences": (8, 7, 3), "images": (8, 3, 4, 4), "scalars": (8,)}
ELEMENT = {
    "mse": lambda error: error**2,
    "l1": abs,
    "huber": lambda error: error**2 / 2 if abs(error) <= 0.7 else 0.7 * (abs(error) - 0.35),
}


def zero_terminal():
    return DDPM.from_diffusers(DDPMScheduler(rescale_betas_zero_snr=True))


def data(shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype), torch.randn(shape, generator=generator, dtype=dtype)


def levels(n, low=0.02, high=0.98):
    return torch.linspace(low, high, n, dtype=torch.float64)


def columns(per_sample, like):
    return per_sample.reshape(-1, *[1] * (like.ndim - 1))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("loss", LOSS_KINDS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_losses_are_the_mean_over_each_sample(prediction, loss, shape):
    x0, noise = data(shape, dtype=torch.float32)
    objective, u = Objective(DDPM.linear(), prediction, loss, huber_delta=0.7), levels(8).float()
    error = torch.linspace(-2, 2, x0.numel()).view(shape)
    target = objective.target(x0, noise, u)
    losses = objective.losses(lambda x, t: target + error, x0, u, noise)
    expected = [sum(ELEMENT[loss](e) for e in row) / len(row) for row in error.reshape(8, -1).tolist()]
    assert losses.shape == (8,)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("process", PROCESSES)
def test_a_perfect_model_has_no_loss_and_gets_the_right_inputs(process, prediction):
    x0, noise = data((8, 3, 4, 4), dtype=torch.float32)
    objective, u = Objective(PROCESSES[process](), prediction), levels(8).float()
    seen = {}

    def model(x, time, label, scale):
        seen.update(x=x, time=time, label=label, scale=scale)
        return objective.target(x0, noise, u)

    losses = objective.losses(model, x0, u, noise, "label", scale=2)
    assert losses.tolist() == [0.0] * 8
    torch.testing.assert_close(seen["time"], objective.process.time(u))
    torch.testing.assert_close(seen["x"], objective.model_input(objective.process.add_noise(x0, noise, u), u))
    assert (seen["label"], seen["scale"]) == ("label", 2)


def test_noise_is_drawn_from_the_callers_generator_when_absent():
    x0, u = torch.zeros(4, 3), torch.full((4,), 0.5)
    torch.manual_seed(3)
    losses = Objective(Flow()).losses(lambda x, t: torch.zeros_like(x), x0, u)
    torch.manual_seed(3)
    torch.testing.assert_close(losses, (torch.randn(4, 3) ** 2).mean(1))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("process", PROCESSES)
def test_denoised_target_is_x0(process, prediction, shape):
    x0, noise = data(shape)
    objective, u = Objective(PROCESSES[process](), prediction), levels(8, 0.0, 0.999)
    x_u = objective.process.add_noise(x0, noise, u)
    torch.testing.assert_close(objective.denoised(objective.target(x0, noise, u), x_u, u), x0, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("make", [*PROCESSES.values(), zero_terminal])
def test_targets_and_inputs_are_finite_at_both_ends(make, prediction):
    x0, noise = data((2, 3), dtype=torch.float32)
    objective, u = Objective(make(), prediction), torch.tensor([0.0, 1.0])
    target = objective.target(x0, noise, u)
    model_input = objective.model_input(objective.process.add_noise(x0, noise, u), u)
    assert bool(torch.isfinite(target).all())
    assert bool(torch.isfinite(model_input).all())


@pytest.mark.parametrize("prediction", [p for p in PREDICTIONS if p != "eps"])  # eps says nothing about x0 without a signal
@pytest.mark.parametrize("make", [Flow, zero_terminal])
def test_denoised_without_any_signal(make, prediction):
    x0, noise = data((2, 3), dtype=torch.float32)
    objective, u = Objective(make(), prediction), torch.ones(2)
    x_u = objective.process.add_noise(x0, noise, u)
    torch.testing.assert_close(objective.denoised(objective.target(x0, noise, u), x_u, u), x0)


def test_edm_preconditioning_is_karras():
    x0, noise = data((50, 6))
    d, u = 0.7, levels(50)
    objective = Objective(EDM(), "edm", sigma_data=d)
    sigma = torch.exp(4 * objective.process.time(u))[:, None]
    c_skip, c_out = d**2 / (sigma**2 + d**2), sigma * d / torch.sqrt(sigma**2 + d**2)
    c_in = 1 / torch.sqrt(sigma**2 + d**2)
    noisy, output = x0 + sigma * noise, torch.sin(x0)
    torch.testing.assert_close(objective.model_input(noisy, u), c_in * noisy)
    torch.testing.assert_close(objective.denoised(output, noisy, u), c_skip * noisy + c_out * output)
    torch.testing.assert_close(objective.target(x0, noise, u), (x0 - c_skip * noisy) / c_out)


@pytest.mark.parametrize("process", PROCESSES)
def test_edm_input_and_target_have_unit_variance(process):
    x0, noise = data((20, 40_000), dtype=torch.float32)
    objective, u = Objective(PROCESSES[process](), "edm", sigma_data=0.5), levels(20).float()
    x0 = 0.5 * x0
    for tensor in (
        objective.model_input(objective.process.add_noise(x0, noise, u), u),
        objective.target(x0, noise, u),
    ):
        torch.testing.assert_close(tensor.var(1), torch.ones(20), rtol=0, atol=0.04)


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_v_target_is_diffusers_velocity(schedule):
    scheduler = DDPMScheduler(beta_schedule=schedule)
    x0, noise = data((64, 3, 4, 4), dtype=torch.float32)
    t = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(1))
    process = DDPM.from_diffusers(scheduler)
    target = Objective(process, "v").target(x0, noise, process.u_of_time(t))
    torch.testing.assert_close(target, scheduler.get_velocity(x0, noise, t), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prediction", [None, "eps", "x0", "v", "flow"])
def test_the_direction_of_time_turns_the_velocity_alone(prediction):
    x0, noise, u = torch.randn(8, 3), torch.randn(8, 3), levels(8).float()
    turned, plain = (Objective(Flow(data_at=at), prediction) for at in (1, 0))
    sign = -1 if turned.prediction == "flow" else 1
    assert torch.equal(turned.target(x0, noise, u), sign * plain.target(x0, noise, u))
    x_u = turned.process.add_noise(x0, noise, u)
    torch.testing.assert_close(turned.denoised(turned.target(x0, noise, u), x_u, u), x0, rtol=1e-3, atol=1e-3)
    assert torch.equal(turned.per_prediction(torch.ones(8), u), plain.per_prediction(torch.ones(8), u))


def test_the_turned_velocity_is_the_slope_in_time():
    """x moves by velocity * dt, whichever way time runs."""
    x0, noise, h = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64), 1e-6
    for at in (0, 1):
        process, u = Flow(data_at=at), levels(5)
        ahead = process.u_of_time(process.time(u) + h)
        slope = (process.add_noise(x0, noise, ahead) - process.add_noise(x0, noise, u)) / h
        torch.testing.assert_close(Objective(process).target(x0, noise, u), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("word", "meant"), [("epsilon", "eps"), ("sample", "x0"), ("v_prediction", "v")])
def test_the_words_of_diffusers_are_understood(word, meant):
    process = DDPM.linear()
    assert Objective(process, word) == Objective(process, meant)


def output_for(objective, x0_guess, x_u, u):
    """What a model that believes in x0_guess would return."""
    alpha, sigma = (columns(scale, x_u) for scale in objective.process.scales(u))
    return objective.target(x0_guess, (x_u - alpha * x0_guess) / sigma, u)


def errors_at(process, n=12):
    """A problem whose x0-error is given, with sizes that float32 resolves for every prediction."""
    (x0, noise), (error, _), u = data((n, 64)), data((n, 64), seed=1), levels(n, 0.03, 0.97)
    alpha, sigma = process.scales(u)
    guess = x0 + 0.5 * columns(torch.sqrt(sigma / alpha), x0) * error
    return x0, noise, guess, u


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("process", PROCESSES)
def test_eps_error_per_prediction_error(process, prediction):
    objective = Objective(PROCESSES[process](), prediction)
    eps = Objective(objective.process, "eps")
    x0, noise, guess, u = errors_at(objective.process)
    x_u = objective.process.add_noise(x0, noise, u)
    ours = (output_for(objective, guess, x_u, u) - objective.target(x0, noise, u)).square().mean(1)
    theirs = (output_for(eps, guess, x_u, u) - noise).square().mean(1)
    k = eps_error_per_prediction_error(objective.process.log_snr(u), prediction)
    torch.testing.assert_close(k * ours, theirs, rtol=1e-8, atol=0)


@pytest.mark.parametrize("loss", ["mse", "l1"])
@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("weighting", [name for name in WEIGHTINGS if name != "none"])
def test_same_weight_same_objective_for_every_prediction(weighting, process, loss):
    process, weigh = PROCESSES[process](), WEIGHTINGS[weighting]()
    for parameter in weigh.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(0))
    x0, noise, guess, u = errors_at(process)
    x_u = process.add_noise(x0, noise, u)
    totals = {}
    for prediction in PREDICTIONS:
        objective = Objective(process, prediction, loss)
        losses = objective.compare(output_for(objective, guess, x_u, u), x0, noise, u)
        totals[prediction] = weigh.weighted(losses.double(), objective, u).detach()
    for one, other in itertools.combinations(PREDICTIONS, 2):
        torch.testing.assert_close(totals[one], totals[other], rtol=1e-4, atol=1e-7, msg=lambda m, p=(one, other): f"{p}: {m}")


@pytest.mark.parametrize("loss", LOSS_KINDS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_no_weighting_leaves_the_loss_alone(prediction, loss):
    objective, u = Objective(DDPM.cosine(), prediction, loss), levels(9)
    torch.testing.assert_close(WEIGHTINGS["none"]().weighted(u + 1, objective, u), u + 1)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_low_precision_outputs_give_float32_losses(prediction):
    x0, noise = data((4, 3, 4, 4), dtype=torch.float32)
    objective, u = Objective(DDPM.linear(), prediction), levels(4).float()
    losses = objective.losses(lambda x, t: torch.zeros_like(x), x0.bfloat16(), u, noise.bfloat16())
    exact = objective.losses(lambda x, t: torch.zeros_like(x), x0, u, noise)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, exact, rtol=0.03, atol=0)
    assert objective.compare(torch.zeros_like(x0).half(), x0, noise, u).dtype == torch.float32


def test_diffusers_outputs_are_unwrapped():
    x0, noise = data((4, 3), dtype=torch.float32)
    losses = Objective(Flow(), "eps").losses(lambda x, t: SimpleNamespace(sample=noise), x0, levels(4).float(), noise)
    assert losses.tolist() == [0.0] * 4


def test_tuples_are_refused_with_advice():
    x0, noise = data((4, 3), dtype=torch.float32)
    with pytest.raises(TypeError, match=r"returned tuple.*output\[0\]"):
        Objective(Flow()).losses(lambda x, t: (x,), x0, levels(4).float(), noise)


@pytest.mark.parametrize("shape", [(4, 1), (4,), (1, 3), (4, 3, 1)])
def test_outputs_of_another_shape_are_refused(shape):
    x0, noise = data((4, 3), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"the shape of x0, \(4, 3\), got"):
        Objective(Flow()).losses(lambda x, t: torch.zeros(shape), x0, levels(4).float(), noise)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prediction": "noise"}, "unknown prediction 'noise': choose one of eps, x0, v, flow, edm"),
        ({"loss": "mae"}, "unknown loss 'mae': choose one of mse, l1, huber"),
        ({"huber_delta": 0.0}, "must be positive"),
        ({"sigma_data": -1.0}, "must be positive"),
        ({"sigma_data": math.nan}, "must be positive"),
    ],
)
def test_unknown_settings(options, message):
    with pytest.raises(ValueError, match=message):
        Objective(Flow(), **options)


@pytest.mark.parametrize(("process", "prediction"), [(DDPM.linear(), "eps"), (VE(), "eps"), (Flow(), "flow"), (EDM(), "edm")])
def test_without_a_prediction_the_usual_one_of_the_process_is_meant(process, prediction):
    objective = Objective(process, loss="l1")
    assert objective == Objective(process, prediction, "l1") == Objective(process, None, "l1")
    assert objective.prediction == prediction
    assert replace(objective, prediction="x0").prediction == "x0"


def test_a_draw_in_the_place_of_u_is_refused():
    objective = Objective(DDPM.linear())
    draw = Uniform(objective.process).sample(4)
    with pytest.raises(TypeError, match=r"u must be a tensor of noise levels, got Draw: hand over draw\.u"):
        objective.losses(lambda x, t: x, torch.zeros(4, 2), draw)
    with pytest.raises(TypeError, match=r"got Draw: hand over draw\.u"):
        WEIGHTINGS["minsnr"]().weighted(torch.ones(4), objective, draw)


def test_integer_images_are_refused():
    with pytest.raises(TypeError, match="scale images"):
        Objective(DDPM.linear()).losses(lambda x, t: x, torch.zeros(4, 2, dtype=torch.uint8), torch.rand(4))


@pytest.mark.parametrize(("process", "prediction"), [(EDM(0.7, 1.6), "edm"), (VE(sigma_max=378.0), "v")])
def test_much_noise_does_not_overflow_in_float16(process, prediction):
    objective, u = Objective(process, prediction, sigma_data=1.0), torch.tensor([0.5, 0.9999], dtype=torch.float32)
    torch.manual_seed(0)
    x0, noise = torch.randn(2, 2, 500)
    assert process.scales(u)[1].max() > 256, "whose square float16 does not hold"
    x_u = process.add_noise(x0, noise, u)
    output = objective.target(x0, noise, u)
    for found, expected in [
        (objective.target(x0.half(), noise.half(), u), output),
        (objective.model_input(x_u.half(), u), objective.model_input(x_u, u)),
        (objective.denoised(output.half(), x_u.half(), u), x0),
    ]:
        torch.testing.assert_close(found.float()[:, :20], expected[:, :20], atol=0.4 if expected is x0 else 4e-3, rtol=4e-3)


@pytest.mark.parametrize("process", [DDPM.linear(), Flow()])
@pytest.mark.parametrize("u", [[500.0, 7.0], [0.5, -0.1], [0.5, math.nan]])
def test_times_in_the_place_of_u_are_refused(process, u):
    """As timesteps they would all be the last one, and nothing but noise would be trained."""
    with pytest.raises(ValueError, match=r"u must lie in \[0, 1\], got .* process.u_of_time"):
        Objective(process).losses(lambda x, time: x, torch.randn(2, 3), torch.tensor(u))


def test_u_is_not_looked_at_while_it_is_traced():
    objective, x0, u = Objective(DDPM.linear()), torch.randn(4, 3), torch.rand(4)
    noise = torch.randn_like(x0)
    expected = objective.losses(lambda x, time: x, x0, u, noise)

    def one(x0, noise, u):
        return objective.losses(lambda x, time: x, x0[None], u[None], noise[None])[0]

    torch.testing.assert_close(torch.func.vmap(one)(x0, noise, u), expected)
    process = DDPM.linear()  # whose tables are not on the device yet
    compiled = torch.compile(lambda u: process.add_noise(x0, noise, u), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(u), objective.process.add_noise(x0, noise, u))
