"""Every preset builds and makes steps; the full-size networks have the parameters that their papers and cards name."""

import pytest
import torch
import yaml

from noisewise.commands.cli import main
from noisewise.data import SOURCES, open_data
from noisewise.generation.run_samples import evaluation_solver, quick_solver
from noisewise.models import build_model
from noisewise.training.options import dotted, load_preset, preset_names
from noisewise.training.run import dry_run

PARAMETERS = {
    "cifar10": 35_746_307,
    "cifar10-edm": 35_746_307,
    "cifar10-flow": 35_746_307,
    "cifar10-small": 8_952_067,
    "celebahq-ldm": 274_056_163,
    "imagenet-uvit": 500_832_016,
    "digits": 163_985,
}
UNET = '--model.options={"channels": 32, "multipliers": [1, 2], "blocks": 1, "attention": [16], "dropout": 0.1}'
SHRUNK = {
    "digits": [],
    "celebahq-ldm": ['--model.options={"channels": 32, "multipliers": [1, 1, 1, 1], "blocks": 1, "attention": [8]}'],
    "imagenet-uvit": ['--model.options={"patch": 8, "width": 32, "depth": 3, "heads": 2}'],
}


TABLES = {  # arXiv 2411.09998, Tables 6 to 9, and what the comments of the presets say was left open
    "cifar10": {
        "process": "linear",  # 1000 timesteps, betas from 1e-4 to .02: its defaults
        "prediction": "eps",
        "loss": "mse",
        "steps": 1_000_000,
        "epochs": None,
        "batch": 128,
        "model.options.channels": 128,
        "model.options.multipliers": [1, 2, 2, 2],
        "model.options.blocks": 2,
        "model.options.dropout": 0.1,
        "optimizer.lr": 2e-4,
        "optimizer.clip": 1.0,
        "optimizer.warmup": 5000,
        "ema.decay": 0.9999,
        "ema.ramp": False,
        "evaluation.solver": "ddpm:steps=1000,variance=fixed_large",
        "evaluation.images": 50_000,
    },
    "celebahq-ldm": {
        "process": "quadratic:beta_start=0.0015,beta_end=0.0195",
        "prediction": "eps",
        "loss": "mse",
        "epochs": 300,
        "batch": 24,
        "model.options.channels": 224,
        "model.options.multipliers": [1, 2, 3, 4],
        "model.options.blocks": 2,
        "model.options.dropout": 0.0,
        "optimizer.name": "adamw",
        "optimizer.betas": [0.9, 0.999],
        "optimizer.lr": 1.92e-4,
        "optimizer.clip": None,
        "optimizer.warmup": 0,
        "ema.decay": 0.9999,
        "ema.ramp": False,
        "evaluation.solver": "ddim:steps=200,spacing=leading",
        "evaluation.images": 50_000,
    },
    "imagenet-uvit": {
        "process": "cosine",
        "prediction": "eps",
        "loss": "mse",
        "steps": 2_100_000,
        "epochs": None,
        "batch": 256,
        "data.shape": [4, 32, 32],
        "model.name": "uvit",
        "model.options.patch": 2,
        "model.options.width": 1152,
        "model.options.heads": 16,
        "model.options.depth": 29,
        "model.conditional": True,
        "model.label_dropout": 0.15,
        "optimizer.name": "adamw",
        "optimizer.betas": [0.99, 0.99],
        "optimizer.lr": 2e-4,
        "optimizer.weight_decay": 0.03,
        "optimizer.clip": None,
        "optimizer.warmup": 0,
        "ema.decay": 0.9999,
        "ema.ramp": False,
        "evaluation.solver": "heun:steps=50,spacing=karras",
        "evaluation.images": 50_000,
    },
}


@pytest.mark.parametrize("name", TABLES)
def test_the_presets_of_the_paper_are_its_tables(name, capsys):
    assert main(["train", "--preset", name, "--print-config"]) == 0
    printed = dotted(yaml.safe_load(capsys.readouterr().out))
    assert {key: printed[key] for key in TABLES[name]} == TABLES[name]


def test_epochs_of_the_paper_in_steps():
    config = load_preset("celebahq-ldm")
    assert config.for_data(30_000).steps == config.steps == 375_000
    assert load_preset("celebahq-ldm", "--batch=96").for_data(30_000).steps == 93_750  # 24 on each of four GPUs


@pytest.mark.parametrize("name", preset_names())
def test_the_solvers_of_a_preset_fit_its_process(name):
    config = load_preset(name)
    assert quick_solver(config).steps <= evaluation_solver(config).steps


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
