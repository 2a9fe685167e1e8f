"""Shifts by the size of the data, and one for each sample."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

import noisewise
from noisewise import Flow
from noisewise.samplers import LogitNormal, Shift, Uniform
from noisewise.samplers.shift import MODELS

SHAPES = [(4, 16, 32, 32), (4, 16, 64, 96), (4, 16, 128, 128)]


def latents(*shape):
    return torch.zeros(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "settings"), [("flux", {}), ("qwen_image", {"max_seq_len": 8192, "max_shift": 0.9})])
def test_named_shifts_are_those_of_diffusers(shape, name, settings):
    mu = calculate_shift(shape[2] * shape[3] // 4, **settings)
    sampler = noisewise.recipe(f"shift:of=uniform,shift={name}", Flow()).sampler
    assert float(sampler.shift_of(torch.Size(shape))) == pytest.approx(math.exp(mu), rel=1e-9)
    packed = (shape[0], shape[2] * shape[3] // 4, 64)
    assert float(sampler.shift_of(torch.Size(packed))) == pytest.approx(math.exp(mu), rel=1e-9)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    before = torch.linspace(0.05, 0.95, 19)
    theirs = scheduler.time_shift(mu, 1.0, before)
    torch.testing.assert_close(sampler.quantile(before, latents(*shape)), theirs)


def test_a_representation_autoencoder_is_shifted_by_its_dimension():
    sampler = noisewise.recipe("shift:of=uniform,shift=rae", Flow()).sampler
    assert float(sampler.shift_of(torch.Size((8, 768, 16, 16)))) == pytest.approx(math.sqrt(48))
    assert float(sampler.shift_of(torch.Size((8, 4, 32, 32)))) == 1.0
    assert MODELS["sd3"] == FlowMatchEulerDiscreteScheduler(shift=3.0).config.shift


def test_each_sample_has_its_own():
    shift = torch.tensor([0.5, 1.0, 3.0, 7.0])
    sampler = Shift(Flow(), LogitNormal(Flow()), shift, correction="unbiased", seed=1)
    for given in (latents(4, 3, 8, 8), 4):
        sampler.micro = 0
        draw = sampler.sample(given)
        for i, s in enumerate(shift.tolist()):
            alone = Shift(Flow(), LogitNormal(Flow()), s)
            torch.testing.assert_close(draw.density[i], alone.density(draw.u[i : i + 1])[0])
        torch.testing.assert_close(draw.weight, 1 / draw.density)
    u = torch.linspace(0.1, 0.9, 9)
    rows = torch.stack([Shift(Flow(), LogitNormal(Flow()), s).density(u) for s in shift.tolist()])
    torch.testing.assert_close(sampler.density(u), rows.mean(0))
    torch.testing.assert_close(sampler.marginal(u, latents(2, 3)), rows.mean(0))


def test_a_function_of_the_shape():
    sampler = Shift(Flow(), Uniform(Flow()), lambda shape: shape[-1] / 16, draws="stratified")
    small, large = (float(sampler.sample(latents(512, 4, size, size)).u.median()) for size in (16, 64))
    assert small == pytest.approx(0.5, abs=0.01)
    assert large == pytest.approx(0.8, abs=0.01)  # s u / (1 + (s - 1) u) at a half


def test_a_shift_set_anew_is_used():
    sampler = Shift(Flow(), Uniform(Flow()), torch.ones(4))
    sampler.shift = torch.full((6,), 2.0)
    assert sampler.sample(latents(6, 3)).u.shape == (6,)
    with pytest.raises(ValueError, match="6 entries for a batch of 4"):
        sampler.sample(latents(4, 3))
    sampler.shift = "wan_720p"
    assert sampler.shift == 5.0
    assert not sampler.conditional


@pytest.mark.parametrize(
    ("shift", "message"),
    [
        (0.0, "positive and finite"),
        (-1.0, "positive and finite"),
        (math.nan, "positive and finite"),
        (torch.tensor([1.0, 0.0]), "positive and finite"),
        (torch.ones(2, 2), "a vector"),
        (torch.ones(2, dtype=torch.long), "a vector"),
        ("fluxx", "unknown shift"),
    ],
)
def test_wrong_shifts_are_one_clear_line(shift, message):
    with pytest.raises(ValueError, match=message):
        Shift(Flow(), Uniform(Flow()), shift)


def test_what_is_missing_for_a_shift_is_said():
    sampler = noisewise.recipe("shift:of=uniform,shift=flux", Flow()).sampler
    with pytest.raises(ValueError, match="call sample\\(x0\\) with the batch"):
        sampler.sample(4)
    with pytest.raises(ValueError, match="needs latents"):
        sampler.sample(latents(4, 3))
    with pytest.raises(ValueError, match="positive and finite, got -1"):
        Shift(Flow(), Uniform(Flow()), lambda shape: -1.0).sample(latents(4, 3))
    with pytest.raises(ValueError, match="does not know for each sample"):
        noisewise.recipe("shift:of=uniform,shift=flux,correction=clipped(3)", Flow())
    with pytest.raises(ValueError, match="expected a number or"):
        noisewise.recipe("shift:of=uniform,shift=sd4", Flow())
