"""The replacements for functions of diffusers.training_utils: the same signatures and values, finite where theirs are not."""

import inspect
import textwrap

import pytest
import torch
from accelerate import Accelerator
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler, training_utils
from scipy import stats

import noisewise
from noisewise import AdaptiveSampler, Objective, SpecError
from noisewise.integrations import diffusers as ours
from noisewise.samplers import Beta, LogitNormal
from noisewise.weighting import VLB

NAMES = ("compute_snr", "compute_density_for_timestep_sampling", "compute_loss_weighting_for_sd3")
SCHEMES = ("none", "logit_normal", "mode", "sigma_sqrt", "cosmap")
PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")
ZERO = {"beta_schedule": "scaled_linear", "rescale_betas_zero_snr": True}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_those_of_diffusers(name):
    mine, theirs = (inspect.signature(getattr(module, name)).parameters for module in (ours, training_utils))
    assert [(p.name, p.default, p.kind) for p in mine.values()] == [(p.name, p.default, p.kind) for p in theirs.values()]


# compute_snr and Min-SNR


@pytest.mark.parametrize("options", [{}, ZERO, {"beta_schedule": "squaredcos_cap_v2"}])
@pytest.mark.parametrize("kind", [DDPMScheduler, DDIMScheduler])
def test_snr_is_that_of_diffusers_to_the_bit(kind, options):
    scheduler, t = kind(**options), torch.arange(1000)
    assert bool((ours.compute_snr(scheduler, t) == training_utils.compute_snr(scheduler, t)).all())
    assert bool((ours.compute_snr(scheduler, t.int()) == training_utils.compute_snr(scheduler, t)).all())


@pytest.mark.parametrize("gamma", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("kind", PREDICTION_TYPES)
def test_min_snr_weights_are_those_of_the_scripts(kind, gamma):
    scheduler, t = DDPMScheduler(beta_schedule="squaredcos_cap_v2", prediction_type=kind), torch.arange(1000)
    snr = training_utils.compute_snr(scheduler, t)
    expected = snr.clamp(max=gamma) / {"epsilon": snr, "sample": torch.ones(1000), "v_prediction": snr + 1}[kind]
    torch.testing.assert_close(ours.min_snr_weights(scheduler, t, gamma), expected, rtol=2e-5, atol=0)


@pytest.mark.parametrize(("kind", "last"), [("epsilon", 1.0), ("sample", 0.0), ("v_prediction", 0.0)])
def test_min_snr_weights_are_finite_at_zero_terminal_snr(kind, last):
    scheduler, t = DDPMScheduler(**ZERO, prediction_type=kind), torch.arange(1000)
    weights = ours.min_snr_weights(scheduler, t)
    assert training_utils.compute_snr(scheduler, t)[-1] == 0
    assert bool(torch.isfinite(weights).all())
    assert float(weights[-1]) == pytest.approx(last, abs=1e-9)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.bool])
def test_timesteps_that_are_no_integers_are_refused(kind):
    with pytest.raises(TypeError, match="integers"):
        ours.compute_snr(DDPMScheduler(), torch.ones(4).to(kind))


def test_other_bad_input_is_named():
    t = torch.tensor([0, 1000])
    with pytest.raises(ValueError, match="0 to 999, got 0 to 1000"):
        ours.compute_snr(DDPMScheduler(), t)
    with pytest.raises(TypeError, match="read_scheduler"):
        ours.compute_snr(FlowMatchEulerDiscreteScheduler(), t)
    with pytest.raises(TypeError, match="read_scheduler"):
        ours.min_snr_weights(FlowMatchEulerDiscreteScheduler(), t)
    with pytest.raises(ValueError, match="snr_gamma"):
        ours.min_snr_weights(DDPMScheduler(), t, 0.0)
    with pytest.raises(TypeError, match="list"):
        ours.compute_snr(DDPMScheduler(), [1, 2])


# Drawing u as the flow scripts do


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_schemes_of_diffusers_draw_the_same_numbers(scheme):
    options = {"logit_mean": 0.3, "logit_std": 0.8, "mode_scale": 1.1}
    mine, theirs = (
        module.compute_density_for_timestep_sampling(scheme, 4000, **options, device="cpu", generator=seeded())
        for module in (ours, training_utils)
    )
    torch.testing.assert_close(mine, theirs, rtol=0, atol=6e-8)
    assert bool(((mine >= 0) & (mine < 1)).all())


def test_absent_settings_are_the_scripts_defaults():
    for scheme in ("logit_normal", "mode"):
        mine = ours.compute_density_for_timestep_sampling(scheme, 100, generator=seeded())
        theirs = training_utils.compute_density_for_timestep_sampling(scheme, 100, 0.0, 1.0, 1.29, generator=seeded())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=6e-8)


def test_no_draw_indexes_past_the_end():
    wide = {"logit_mean": 0.0, "logit_std": 50.0, "generator": seeded()}
    theirs = training_utils.compute_density_for_timestep_sampling("logit_normal", 10_000, **wide)
    assert int((theirs * 1000).long().max()) == 1000  # one past the end
    u = ours.compute_density_for_timestep_sampling("logit_normal", 10_000, **wide)
    assert int((u * 1000).long().max()) == 999
    with pytest.raises(ValueError, match="mode_scale"):
        ours.compute_density_for_timestep_sampling("mode", 4, mode_scale=2.0)


def test_a_spec_is_turned_round_for_the_scripts_list():
    """logit_normal:mean=1 favours noise; the same draws need logit_mean=-1 in diffusers, where u = 0 is the most noise."""
    u = ours.compute_density_for_timestep_sampling("logit_normal:mean=1", 20_000, generator=seeded())
    scheduler = FlowMatchEulerDiscreteScheduler()
    sigmas = scheduler.sigmas[(u * 1000).long()]
    process = ours.read_scheduler(scheduler).process
    drawn = process.scales(noisewise.recipe("logit_normal:mean=1", process).sampler.sample(20_000).u)[1]
    assert float(sigmas.median()) == pytest.approx(1 / (1 + torch.e**-1), abs=0.01)
    assert stats.ks_2samp(sigmas.numpy(), drawn.numpy()).pvalue > 0.01
    theirs = {
        mean: training_utils.compute_density_for_timestep_sampling("logit_normal", 20_000, mean, 1.0, generator=seeded(1))
        for mean in (-1.0, 1.0)
    }
    assert stats.ks_2samp(u.numpy(), theirs[-1.0].numpy()).pvalue > 0.01
    assert stats.ks_2samp(u.numpy(), theirs[1.0].numpy()).pvalue < 1e-6


@pytest.mark.parametrize(
    "spec", ["uniform", "beta:a=2,b=1", "mode:scale=0.5", "mix:of=(logit_normal),floor=0.2", "minsnr", "logit_normal+p2"]
)
def test_fixed_specs_draw_inside_the_list(spec):
    u = ours.compute_density_for_timestep_sampling(spec, 5000, generator=seeded())
    assert u.shape == (5000,)
    assert bool(((u >= 0) & (u < 1)).all())
    assert bool((u == ours.compute_density_for_timestep_sampling(spec, 5000, generator=seeded())).all())


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("adaptive", "needs to see the losses"),
        ("adaptive+minsnr", "needs to see the losses"),
        ("logit_normal:correction=unbiased", "importance weights"),
        ("uniform:draws=stratified", "has stratified draws"),
        ("speed:k=5", "depends on the scheduler's shift"),
        ("laplace", "depends on the scheduler's shift"),
    ],
)
def test_what_takes_more_than_u_is_an_error_that_shows_the_loop(spec, why):
    with pytest.raises(SpecError, match=why) as error:
        ours.compute_density_for_timestep_sampling(spec, 4)
    with pytest.raises(SpecError) as also:
        ours.compute_loss_weighting_for_sd3(spec, torch.rand(4))
    assert str(also.value) == str(error.value)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    model_input = torch.randn(8, 3)
    names = {
        "noisewise": noisewise,
        "accelerator": Accelerator(cpu=True),
        "read_scheduler": ours.read_scheduler,
        "noise_scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "model_input": model_input,
        "model_pred": model(model_input),
        "target": torch.zeros(8, 3),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    before = model.weight.detach().clone()
    exec(textwrap.dedent(str(error.value).partition("Use the loop:")[2]), names)  # the advice runs as it is written
    assert names["recipe"].sampler.step == 1
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("scheme", ["logitnormal", "sigma-sqrt", "logit_normal:sd=1"])
def test_misspelt_schemes_are_errors_and_not_uniform(scheme):
    with pytest.raises(SpecError):
        ours.compute_density_for_timestep_sampling(scheme, 4)
    with pytest.raises(SpecError):
        ours.compute_loss_weighting_for_sd3(scheme, torch.rand(4))


# Loss weights of the flow scripts


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_those_of_diffusers_and_finite_at_the_ends(scheme):
    sigmas = torch.linspace(0.001, 1, 1000).view(-1, 1, 1, 1)
    mine, theirs = (module.compute_loss_weighting_for_sd3(scheme, sigmas=sigmas) for module in (ours, training_utils))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    ends = ours.compute_loss_weighting_for_sd3(scheme, torch.tensor([0.0, 1.0]))
    assert bool((torch.isfinite(ends) & (ends > 0)).all())
    assert ours.compute_loss_weighting_for_sd3(scheme, sigmas.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("spec", ["minsnr:gamma=5", "logit_normal:mean=1+minsnr:gamma=5"])
def test_a_specs_weighting_is_that_of_the_flow_loss(spec):
    sigma = torch.linspace(0.01, 0.99, 99)
    snr = ((1 - sigma) / sigma) ** 2
    expected = snr.clamp(max=5) / snr * (1 - sigma) ** 2  # eps error = (1 - sigma) times the velocity's error
    weights = ours.compute_loss_weighting_for_sd3(spec, sigma.view(9, 11))
    torch.testing.assert_close(weights, expected.view(9, 11), rtol=2e-5, atol=0)


def test_specs_and_names_of_diffusers_agree():
    sigmas = torch.linspace(0.01, 0.99, 99)
    weights = {name: ours.compute_loss_weighting_for_sd3(name, sigmas) for name in ("cosmap", "cosmap_weight")}
    torch.testing.assert_close(weights["cosmap"], weights["cosmap_weight"], rtol=2e-5, atol=0)
    combined = ours.compute_loss_weighting_for_sd3("uniform+sigma_sqrt", sigmas)
    torch.testing.assert_close(combined, ours.compute_loss_weighting_for_sd3("sigma_sqrt", sigmas), rtol=2e-5, atol=0)
    assert bool((ours.compute_loss_weighting_for_sd3("logit_normal", sigmas) == 1).all())


@pytest.mark.parametrize("spec", ["learned", "vlb", "uniform+change_aware", "minsnr+learned"])
def test_weights_that_are_no_function_of_sigma_are_errors_that_show_the_loop(spec):
    with pytest.raises(SpecError, match=r"recipe\.loss"):
        ours.compute_loss_weighting_for_sd3(spec, torch.rand(4))


@pytest.mark.parametrize("sigmas", [None, torch.arange(3), 0.5])
def test_sigmas_must_be_a_floating_tensor(sigmas):
    with pytest.raises(TypeError, match="floating-point tensor"):
        ours.compute_loss_weighting_for_sd3("none", sigmas)


@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap", "minsnr"])
@pytest.mark.parametrize("sigmas", [[0.0, 500.0, 1000.0], [0.5, -0.1], [0.5, float("nan")], [[80.0]]])
def test_times_in_the_place_of_sigmas_are_refused(scheme, sigmas):
    with pytest.raises(ValueError, match=r"sigmas must lie in \[0, 1\], got .* get_sigmas"):
        ours.compute_loss_weighting_for_sd3(scheme, torch.tensor(sigmas))


def test_a_sigma_that_the_shift_has_rounded_to_above_one_has_the_weight_of_one():
    sigmas = FlowMatchEulerDiscreteScheduler(shift=1.15).sigmas
    sigmas = torch.cat([sigmas, torch.tensor([1.0000001])])
    weights = ours.compute_loss_weighting_for_sd3("minsnr", sigmas)
    assert bool(torch.isfinite(weights).all())
    assert torch.equal(weights[-1:], ours.compute_loss_weighting_for_sd3("minsnr", torch.ones(1)))
    assert ours.compute_loss_weighting_for_sd3("minsnr", torch.ones(0)).shape == (0,)


def test_sigmas_are_not_looked_at_while_they_are_traced():
    weights = torch.func.vmap(lambda sigma: ours.compute_loss_weighting_for_sd3("sigma_sqrt", sigma))
    assert weights(torch.tensor([0.5, 2.0])).tolist() == [4.0, 0.25]


# Keeping the objective of a density


def test_a_density_weight_trains_the_objective_of_that_density():
    objective = ours.read_scheduler(FlowMatchEulerDiscreteScheduler(shift=3.0))
    density = LogitNormal(objective.process, mean=0.5)
    weighting = ours.DensityWeight(density)
    u = torch.linspace(0.0005, 0.9995, 1000)
    losses = torch.rand(1000)
    torch.testing.assert_close(weighting.weighted(losses, objective, u), density.density(u) * losses)
    sampler = AdaptiveSampler(objective.process, weighting=weighting, objective=objective, warmup=1, every=1)
    draw = sampler.sample(4096)
    with sampler.observe(draw, torch.ones(4096)):
        pass
    learned = sampler.density(u) - sampler.floor
    assert float(torch.corrcoef(torch.stack([learned, density.density(u)]))[0, 1]) > 0.98


def test_a_density_weight_needs_a_fixed_density():
    process = ours.ShiftedFlow()
    with pytest.raises(ValueError, match="AdaptiveSampler"):
        ours.DensityWeight(AdaptiveSampler(process))
    with pytest.raises(ValueError, match="correction='none'"):
        ours.DensityWeight(LogitNormal(process, correction="unbiased"))


def test_a_density_weight_goes_where_the_batch_is():
    objective = ours.read_scheduler(FlowMatchEulerDiscreteScheduler())
    weighting = ours.DensityWeight(Beta(objective.process, 2, 1))  # tabulated: it has tensors
    assert weighting(objective, torch.rand(4, device="meta")).device.type == "meta"


def test_the_bound_of_a_flow_with_timesteps_is_one_weight_for_each_of_them():
    process = ours.ShiftedFlow(shift=3.0)
    objective, steps = Objective(process), process.steps
    u = (torch.arange(16 * steps) + 0.5) / (16 * steps)
    weights = VLB()(objective, u).view(steps, 16)
    assert torch.equal(weights, weights[:, :1].expand(-1, 16))
    torch.testing.assert_close(weights[:, 0], VLB()(objective, (torch.arange(steps) + 0.5) / steps))
