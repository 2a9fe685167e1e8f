"""Schedulers of diffusers, read: the same noise, targets, noise levels and order as theirs."""

import inspect
import json
import math
import subprocess
import sys
import warnings

import diffusers
import pytest
import torch
from diffusers import (
    DDPMScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FlowMatchLCMScheduler,
    IPNDMScheduler,
    RePaintScheduler,
    UNet2DModel,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.schedulers import SchedulerMixin

import noisewise
from noisewise import DDPM, EDM, AdaptiveSampler
from noisewise.integrations.diffusers import ShiftedFlow, read_scheduler
from noisewise.weighting import MinSNR
from tests.samplers.specs import ALL_SPECS


def constructed():
    """Every scheduler of diffusers that can be made without arguments."""
    made = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some call numpy as it was
        for name, kind in inspect.getmembers(diffusers.schedulers, inspect.isclass):
            if issubclass(kind, SchedulerMixin) and kind is not SchedulerMixin:
                try:
                    made[name] = kind()
                except TypeError:
                    continue  # a required argument: a discrete vocabulary or a protein model
    return made


MADE = constructed()
WITH_TABLE = {name: made for name, made in MADE.items() if hasattr(made, "alphas_cumprod") and name != "RePaintScheduler"}
WITHOUT = {name: made for name, made in MADE.items() if not hasattr(made, "alphas_cumprod")}
FLOWS = (FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, FlowMatchLCMScheduler)
SHIFTS = (1.0, 3.0, 0.7, 1.15, 12.0)
TABLES = {
    "linear": {},
    "scaled_linear": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "sigmoid": {"beta_schedule": "sigmoid"},
    "zero terminal": {"beta_schedule": "scaled_linear", "rescale_betas_zero_snr": True},
    "trained": {"trained_betas": [0.01, 0.02, 0.1, 0.5], "num_train_timesteps": 4},
}


def tiny_unet():
    return UNet2DModel(8, block_out_channels=(8, 8, 8, 8), norm_num_groups=2, layers_per_block=1)


def middles(steps):
    return (torch.arange(steps) + 0.5) / steps


def test_the_module_imports_no_diffusers_of_its_own():
    wanted = "{'diffusers', 'accelerate', 'lightning'} & set(sys.modules)"
    code = f"import sys, noisewise.integrations.diffusers; print(sorted({wanted}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Schedulers with alphas_cumprod


def test_the_schedulers_with_a_table_are_many():
    assert {"DDPMScheduler", "DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"} <= set(WITH_TABLE)
    assert len(WITH_TABLE) > 20


@pytest.mark.parametrize("name", WITH_TABLE)
def test_every_scheduler_with_alphas_cumprod_is_read(name):
    objective = read_scheduler(WITH_TABLE[name])
    table = WITH_TABLE[name].alphas_cumprod.double()
    assert isinstance(objective.process, DDPM)
    assert objective.prediction == "eps"
    torch.testing.assert_close(objective.process.alphas_cumprod, table, rtol=0, atol=0)


@pytest.mark.parametrize("options", TABLES.values(), ids=list(TABLES))
def test_noise_and_targets_are_those_of_diffusers(options):
    torch.manual_seed(0)
    scheduler = DDPMScheduler(**options, prediction_type="v_prediction")
    objective = read_scheduler(scheduler)
    u = middles(objective.process.steps)
    t = objective.process.time(u)
    assert t.tolist() == list(range(len(scheduler.alphas_cumprod)))
    x0, noise = torch.randn(2, len(t), 2, 3)
    torch.testing.assert_close(objective.process.add_noise(x0, noise, u), scheduler.add_noise(x0, noise, t), rtol=0, atol=2e-6)
    torch.testing.assert_close(objective.target(x0, noise, u), scheduler.get_velocity(x0, noise, t), rtol=0, atol=2e-6)
    assert objective.prediction == "v"


@pytest.mark.parametrize(("theirs", "ours"), [("epsilon", "eps"), ("sample", "x0"), ("v_prediction", "v")])
def test_prediction_types_are_read(theirs, ours):
    scheduler = DDPMScheduler()
    scheduler.register_to_config(prediction_type=theirs)  # as scripts do with --prediction_type
    assert read_scheduler(scheduler).prediction == ours


# Flow matching


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("kind", FLOWS)
def test_flow_levels_are_the_schedulers_own_in_the_other_order(kind, shift):
    scheduler = kind(shift=shift)
    objective = read_scheduler(scheduler)
    u = middles(1000)
    alpha, sigma = objective.process.scales(u)
    assert objective.prediction == "flow"
    assert bool((objective.process.time(u) == scheduler.timesteps.flip(0)).all())
    assert bool((1000 * sigma == scheduler.timesteps.flip(0)).all())
    torch.testing.assert_close(alpha + sigma, torch.ones(1000))
    assert sigma[0] < sigma[-1] == 1  # u = 0 is the least noise
    torch.testing.assert_close(objective.process.u_of_time(objective.process.time(u)), u, rtol=0, atol=0)


@pytest.mark.parametrize("shift", [1.32, 1.57, 2.14, 4.03])
def test_a_last_level_that_the_shift_rounds_to_above_one_is_all_noise(shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    assert float(scheduler.sigmas.max()) > 1
    objective, u = read_scheduler(scheduler), middles(1000)
    assert float(objective.process.log_snr(u)[-1]) == -math.inf
    assert bool(torch.isfinite(MinSNR().weights(objective, u)).all())
    assert bool((objective.process.log_snr_rate(u) < 0).all())
    assert bool((objective.process.time(u) == scheduler.timesteps.flip(0)).all())


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_scripts_own_look_up_works_with_the_drawn_timesteps(shift):
    """Scripts find sigma where timesteps equal the drawn ones, and schedulers noise by the same look-up."""
    torch.manual_seed(0)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    objective = read_scheduler(scheduler)
    draw = AdaptiveSampler(objective.process).sample(64)
    indices = [(scheduler.timesteps == t).nonzero().item() for t in draw.time]
    sigmas = objective.process.scales(draw.u)[1]
    assert bool((scheduler.sigmas[indices] == sigmas).all())
    x0, noise = torch.randn(2, 64, 4, 2)
    expected = scheduler.scale_noise(x0, draw.time, noise)
    torch.testing.assert_close(objective.process.add_noise(x0, noise, draw.u), expected, rtol=0, atol=1e-6)


def test_uniform_draws_hit_each_level_of_the_scheduler_alike():
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=10, shift=3.0)
    process = read_scheduler(scheduler).process
    drawn = noisewise.recipe("uniform:draws=stratified", process).sampler.sample(1000).time
    assert [int((drawn == t).sum()) for t in scheduler.timesteps] == [100] * 10


@pytest.mark.parametrize("spec", [spec for spec in ALL_SPECS if "{table}" not in spec])
def test_every_sampler_draws_on_the_shifted_levels(spec):
    process = ShiftedFlow(shift=3.0)
    draw = noisewise.recipe(spec, process).sampler.sample(torch.zeros(32, 1, 2, 2))
    assert bool(torch.isin(draw.time, process.time(middles(1000))).all())
    assert bool((torch.isfinite(draw.weight) & (draw.density > 0)).all())


def test_log_snr_of_the_levels_and_its_inverse():
    process = ShiftedFlow(100, shift=2.0)
    u = middles(100)
    alpha, sigma = process.scales(u)
    torch.testing.assert_close(process.log_snr(u)[:-1], 2 * torch.log(alpha / sigma)[:-1], rtol=1e-4, atol=1e-5)
    assert process.log_snr(u)[-1] == -math.inf
    torch.testing.assert_close(process.u_of_log_snr(process.log_snr(u)), u, rtol=0, atol=0)
    rates = process.log_snr_rate(u)
    assert bool((torch.isfinite(rates) & (rates < 0)).all())
    assert bool((process.log_snr_edges(torch.linspace(0, 1, 101)).diff() < 0).all())


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_mu_gives_the_levels_that_the_pipeline_generates_with(kind):
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=kind)
    mu = calculate_shift(4096)
    process = read_scheduler(scheduler, mu=mu).process
    scheduler.set_timesteps(sigmas=(torch.arange(1000, 0, -1) / 1000).tolist(), mu=mu)
    torch.testing.assert_close(process.time(middles(1000)).flip(0), scheduler.timesteps, rtol=2e-6, atol=0)


def test_a_shift_of_one_gives_the_levels_that_diffusers_flux_scripts_index():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    assert bool((read_scheduler(scheduler, shift=1.0).process.time(middles(1000)) == scheduler.timesteps.flip(0)).all())


def test_dynamic_shifting_without_mu_is_an_error_that_says_what_to_give():
    with pytest.raises(ValueError, match=r"dynamically.*mu=.*shift=1\.0"):
        read_scheduler(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True))


def test_other_schedulers_with_flow_sigmas_are_flows():
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)
    objective = read_scheduler(scheduler)
    assert (objective.prediction, repr(objective.process)) == ("flow", "ShiftedFlow(T=1000, shift=5)")
    scheduler.register_to_config(prediction_type="epsilon")
    with pytest.raises(ValueError, match="use_flow_sigmas"):
        read_scheduler(scheduler)
    with pytest.raises(ValueError, match="flow_prediction"):
        read_scheduler(UniPCMultistepScheduler(prediction_type="flow_prediction"))


# EDM


@pytest.mark.parametrize("kind", [EDMEulerScheduler, EDMDPMSolverMultistepScheduler])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_edm_preconditioning_is_that_of_the_scheduler(kind, prediction_type):
    torch.manual_seed(0)
    scheduler = kind(sigma_data=0.7, prediction_type=prediction_type)
    objective = read_scheduler(scheduler)
    u = torch.linspace(0.01, 0.99, 50)
    sigma = objective.process.scales(u)[1]
    x0, noise, output = torch.randn(3, 50, 4)
    x_u = objective.process.add_noise(x0, noise, u)
    column = sigma[:, None]
    torch.testing.assert_close(objective.model_input(x_u, u), scheduler.precondition_inputs(x_u, column))
    torch.testing.assert_close(objective.process.time(u), scheduler.precondition_noise(sigma))
    torch.testing.assert_close(objective.denoised(output, x_u, u), scheduler.precondition_outputs(x_u, output, column))
    perfect = scheduler.precondition_outputs(x_u, objective.target(x0, noise, u), column)
    torch.testing.assert_close(perfect, x0, rtol=0, atol=1e-4)


def test_edm_density_is_the_papers_unless_given():
    objective = read_scheduler(EDMEulerScheduler())
    assert isinstance(objective.process, EDM)
    assert (objective.process.mean, objective.process.std, objective.sigma_data) == (-1.2, 1.2, 0.5)
    process = read_scheduler(EDMEulerScheduler(), mean=-0.4, std=1.0).process
    assert (process.mean, process.std) == (-0.4, 1.0)


def test_an_edm_range_that_the_papers_density_misses_needs_a_density():
    scheduler = EDMEulerScheduler(sigma_min=0.3, sigma_max=500.0)
    with pytest.raises(ValueError, match=r"50% of .* give the mean= and std="):
        read_scheduler(scheduler)
    assert read_scheduler(scheduler, mean=1.0, std=1.0).process.mean == 1.0


# Saved schedulers


def test_a_saved_scheduler_reads_as_the_scheduler(tmp_path):
    for i, scheduler in enumerate(
        [
            DDPMScheduler(beta_schedule="scaled_linear", rescale_betas_zero_snr=True, prediction_type="v_prediction"),
            FlowMatchEulerDiscreteScheduler(shift=3.0),
            EDMEulerScheduler(sigma_data=0.6),
        ]
    ):
        folder = tmp_path / str(i)
        scheduler.save_pretrained(folder / "scheduler")
        file = folder / "scheduler" / "scheduler_config.json"
        expected, u = read_scheduler(scheduler), torch.linspace(0, 1, 101)
        for source in (str(folder), folder / "scheduler", file, json.loads(file.read_text())):
            objective = read_scheduler(source)
            assert (objective.prediction, objective.sigma_data) == (expected.prediction, expected.sigma_data)
            for ours, theirs in zip(objective.process.scales(u), expected.process.scales(u), strict=True):
                assert bool((ours == theirs).all())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds a list"),
        ("{}", "no _class_name"),
        ('{"_class_name": "DiffusionPipeline"}', "not a scheduler of diffusers"),
        ('{"_class_name": "os.system"}', "not a scheduler of diffusers"),
        ('{"_class_name": "DDPMScheduler", "beta_schedule": "steep"}', "cannot make a DDPMScheduler"),
        ('{"_class_name": "DDPMScheduler", "num_train_timesteps": "many"}', "cannot make a DDPMScheduler"),
    ],
)
def test_a_bad_configuration_is_an_error_that_names_what_is_wrong(tmp_path, text, message):
    (tmp_path / "scheduler_config.json").write_text(text)
    with pytest.raises((TypeError, ValueError), match=message):
        read_scheduler(tmp_path)


def test_a_missing_file_says_how_to_write_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="save_pretrained"):
        read_scheduler(tmp_path / "nothing")


# What cannot be read


@pytest.mark.parametrize("name", [name for name in WITHOUT if not name.startswith(("FlowMatch", "EDM"))])
def test_an_unknown_scheduler_is_an_error_that_names_the_supported_ones_and_the_fix(name):
    with pytest.raises(TypeError, match=rf"a {name}\. Supported: .*DDPMScheduler.*DDPM\(betas="):
        read_scheduler(WITHOUT[name])


def test_wrong_objects_are_named():
    with pytest.raises(TypeError, match=r"class DDPMScheduler.*DDPMScheduler\(\)"):
        read_scheduler(DDPMScheduler)
    pipeline = diffusers.DDPMPipeline(tiny_unet(), DDPMScheduler())
    with pytest.raises(TypeError, match=r"DDPMPipeline.*pipeline\.scheduler"):
        read_scheduler(pipeline)
    with pytest.raises(ValueError, match="hand over the scheduler itself"):
        read_scheduler(DDPMScheduler().config)
    with pytest.raises(TypeError, match="NoneType"):
        read_scheduler(None)


@pytest.mark.parametrize(
    ("scheduler", "options", "message"),
    [
        (DDPMScheduler(), {"shift": 3.0}, "shift does not apply to DDPMScheduler"),
        (DDPMScheduler(), {"mean": 0.0}, "mean does not apply"),
        (EDMEulerScheduler(), {"mu": 1.0}, "mu does not apply"),
        (FlowMatchEulerDiscreteScheduler(), {"std": 1.0}, "std does not apply"),
        (FlowMatchEulerDiscreteScheduler(), {"mu": 1.0}, "give shift="),
        (FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), {"mu": 1.0, "shift": 2.0}, "not both"),
        (FlowMatchEulerDiscreteScheduler(), {"shift": 0.0}, "shift must be positive"),
        (FlowMatchEulerDiscreteScheduler(invert_sigmas=True), {}, "invert_sigmas"),
        (EulerDiscreteScheduler(timestep_type="continuous", prediction_type="v_prediction"), {}, "continuous"),
        (RePaintScheduler(), {}, "register_to_config"),
        (IPNDMScheduler(), {}, "IPNDMScheduler"),
    ],
)
def test_what_does_not_fit_is_refused(scheduler, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        read_scheduler(scheduler, **options)


def test_timesteps_of_low_precision_are_refused():
    for process in (read_scheduler(DDPMScheduler()).process, ShiftedFlow()):
        with pytest.raises(TypeError, match="bfloat16"):
            process.u_of_time(torch.ones(2, dtype=torch.bfloat16))
