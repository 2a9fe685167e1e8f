"""Every preset builds and makes steps; the full-size networks have the parameters that their papers and cards name."""

import pytest
import torch

import noisewise
from noisewise.data import SOURCES, open_data
from noisewise.models import build_model
from noisewise.objective import Objective
from noisewise.spec import build_process
from noisewise.training.options import load_preset, preset_names
from noisewise.training.run import dry_run

PARAMETERS = {
    "cifar10": 35_746_307,
    "cifar10-edm": 35_746_307,
    "cifar10-flow": 35_746_307,
    "cifar10-small": 8_952_067,
    "celebahq-ldm": 274_056_163,
    "imagenet-uvit": 286_763_172,
    "digits": 163_985,
}
UNET = '--model.options={"channels": 32, "multipliers": [1, 2], "blocks": 1, "attention": [16], "dropout": 0.1}'
SHRUNK = {
    "digits": [],
    "celebahq-ldm": ['--model.options={"channels": 32, "multipliers": [1, 1, 1, 1], "blocks": 1, "attention": [8]}'],
    "imagenet-uvit": ['--model.options={"patch": 8, "width": 32, "depth": 3, "heads": 2}'],
}


def small(name: str):
    batch = [] if name == "digits" else ["--batch=4"]
    return load_preset(name, "--device=cpu", *batch, *SHRUNK.get(name, [UNET]))


def test_the_tables_of_this_file_are_complete():
    assert set(PARAMETERS) == set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_the_full_size_network_has_the_parameters_it_should(name):
    config = load_preset(name)
    classes = config.data.classes if config.model.conditional else 0
    with torch.device("meta"):
        model = build_model(config.model.name, config.model.options, shape=config.data.shape, classes=classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_the_sizes_that_the_presets_speak_of():
    in_millions = {name: round(count / 1e6, 1) for name, count in PARAMETERS.items()}
    assert in_millions["cifar10"] == 35.7
    assert in_millions["cifar10-small"] == 9.0
    assert round(in_millions["celebahq-ldm"]) == 274
    assert round(in_millions["imagenet-uvit"]) == 287


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_makes_steps_on_noise_of_the_shape_of_its_data(name):
    said = dry_run(small(name))
    config = load_preset(name)
    assert said["sample_shape"] == list(config.data.shape)
    assert said["batch"] == (192 if name == "digits" else 4)
    assert 0 < said["loss"] < 100
    assert said["parameters"] > 0
    assert said["memory_gib"] > 0
    assert said["seconds_per_step"] > 0
    assert (said["processes"], said["device"]) == (1, "cpu")


@pytest.mark.parametrize("name", preset_names())
def test_the_data_of_a_preset_are_described_as_they_are(name):
    data = load_preset(name).data
    assert data.source in SOURCES
    if data.source == "digits":
        source = open_data("digits")
        assert (source.shape, source.classes) == (tuple(data.shape), data.classes)
    else:
        assert data.path is not None  # where the comment at the top of the file says to put them
        known = {"cifar10": ((3, 32, 32), 10), "celebahq": ((3, 64, 64), 0), "imagenet": ((4, 32, 32), 1000)}
        assert (tuple(data.shape), data.classes) == known[data.path.removeprefix("data/")]


@pytest.mark.parametrize("name", preset_names())
def test_the_paper_samplers_and_others_fit_every_preset(name):
    config = load_preset(name)
    process = build_process(config.process)
    for spec in (config.sampler, "uniform", "adaptive", "paper_cifar10", "adaptive:estimator=lookahead+minsnr"):
        noisewise.recipe(spec, Objective(process, config.prediction))


def test_ldm_schedule_of_the_celebahq_preset():
    """LDM's betas are the squares of evenly spaced numbers from sqrt(0.0015) to sqrt(0.0195), 1000 of them."""
    process = build_process(load_preset("celebahq-ldm").process)
    betas = torch.linspace(0.0015**0.5, 0.0195**0.5, 1000, dtype=torch.float64) ** 2
    alpha_bar = torch.cumprod(1 - betas, 0)
    u = (torch.arange(1000) + 0.5) / 1000
    alpha, sigma = process.scales(u)
    torch.testing.assert_close(alpha.double(), alpha_bar.sqrt(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sigma.double(), (1 - alpha_bar).sqrt(), rtol=1e-5, atol=1e-6)
