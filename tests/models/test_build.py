"""Models from names and options, models that are not ours, and the errors of both."""

import pytest
import torch
from diffusers import UNet2DModel
from torch import nn

from noisewise.models import MODELS, build_model, with_labels
from tests.models.small_models import CLASSES, SHAPE, batch, small, stirred

# Errors that teach


@pytest.mark.parametrize("name", MODELS)
def test_bad_inputs_are_named(name):
    model, (x, time) = small(name, CLASSES), batch()
    with pytest.raises(ValueError, match=r"takes samples of shape \(1, 8, 8\), got a batch of shape \(4, 2, 8, 8\)"):
        model(torch.zeros(4, 2, 8, 8), time)
    with pytest.raises(ValueError, match=r"one entry a sample, \(4,\), got \(1,\)"):
        model(x, time[:1])
    with pytest.raises(TypeError, match="too coarse for timesteps"):
        model(x, time.bfloat16())
    with pytest.raises(ValueError, match="labels must be int64"):
        model(x, time, torch.zeros(4))
    with pytest.raises(ValueError, match=r"shape \(4,\).* 10 for no class"):
        model(x, time, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="unconditional"):
        small(name)(x, time, torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("unet", {"channels": 0}, "channels must be a whole number"),
        ("unet", {"channels": "128"}, "channels must be a whole number"),
        ("unet", {"dropout": 1.0}, "dropout must be a number in"),
        ("unet", {"time_scale": -1}, "time_scale must be a positive number"),
        ("unet", {"multipliers": []}, "at least one level"),
        ("unet", {"multipliers": 2}, "multipliers must be a sequence"),
        ("unet", {"multipliers": [1, 2, 2, 2, 2], "attention": []}, "8 x 8 does not divide by 16"),
        ("unet", {"multipliers": [1, 2], "attention": [16]}, "the levels have heights 8, 4"),
        ("unet", {"multipliers": [1, 2], "attention": [4], "groups": 24}, "groups=24 must divide .* 128, 256"),
        ("unet", {"multipliers": [1, 2], "attention": [4], "head_channels": 96}, "head_channels=96 must divide"),
        ("dit", {"patch": 3}, "patches of 3 do not tile samples of 8 x 8"),
        ("dit", {"width": 32, "heads": 5}, "not a multiple of heads 5"),
        ("dit", {"width": 6}, "multiple of 4"),
        ("dit", {"mlp_ratio": 0}, "mlp_ratio"),
        ("dit", {"out_channels": 0}, "out_channels must be"),
        ("uvit", {"depth": 12}, "depth must be odd .* try 13"),
        ("uvit", {"dropout": "0.1"}, "dropout must be a number"),
        ("dit", {"depht": 3}, "did you mean 'depth'.* Known: patch, width, depth"),
        ("unet", {"zzz": 3}, "unknown option of model unet 'zzz'. Known: channels, multipliers"),
        (
            "dit",
            {"channels": 16},
            "'dit' has no option 'channels', but patch, width.*--model.name unet, .*preset.*--model.options '{}'",
        ),
        ("dit", {"classes": 3}, "comes from the data"),
        ("unett", {}, "unknown model 'unett': did you mean 'unet'"),
        ("zzz", {}, "Known: unet, dit, uvit; .*import path"),
        ("no_such_package.Model", {}, "cannot import 'no_such_package'"),
        ("noisewise.models:Dit", {}, "did you mean 'DiT'"),
        (":DiT", {}, "no import path"),
    ],
)
def test_bad_settings_are_named(name, options, message):
    if name == "dit" and "width" in options:
        options = {"heads": 1} | options
    with pytest.raises(ValueError, match=message):
        build_model(name, options, shape=SHAPE)


@pytest.mark.parametrize(("side", "attention"), [(32, [16]), (8, [])])
def test_the_unet_attends_at_16_where_it_can_unless_told_otherwise(side, attention):
    small = {"channels": 8, "blocks": 1}
    usual, told = (build_model("unet", {**small, **more}, shape=(1, side, side)) for more in ({}, {"attention": attention}))
    assert [name for name, _ in usual.named_parameters()] == [name for name, _ in told.named_parameters()]


def test_bad_shapes_and_classes_are_named():
    with pytest.raises(ValueError, match=r"\(channels, height, width\) of one sample, got \(8, 8\)"):
        build_model("dit", {}, shape=(8, 8))
    with pytest.raises(ValueError, match="classes must be 0"):
        build_model("uvit", {}, shape=SHAPE, classes=-1)
    with pytest.raises(TypeError, match="is a dict"):
        build_model("noisewise.models.MODELS", {}, shape=SHAPE)
    with pytest.raises(TypeError, match=r"must give a torch.nn.Module, got dict"):
        build_model("tests.models.test_build.no_model", {}, shape=SHAPE)


# Models that are not ours


class Scale(nn.Module):
    """Knows its classes, takes labels as y and returns a tuple."""

    def __init__(self, classes, start=1.0):
        super().__init__()
        self.factors = nn.Parameter(torch.linspace(start, start + classes, classes + 1))

    def forward(self, x, t, y=None):
        return (x if y is None else x * self.factors[y][:, None, None, None], "and more")


def any_options(**options):
    model = nn.Identity()
    model.options = options
    return model


def no_model():
    return {}


@pytest.mark.parametrize("path", ["tests.models.test_build.Scale", "tests.models.test_build:Scale"])
def test_an_import_path_names_a_model(path):
    model = build_model(path, {"start": 2.0}, shape=SHAPE, classes=3)
    assert model.factors.tolist() == [2.0, 3.0, 4.0, 5.0]  # classes by name, shape not asked for
    with pytest.raises(ValueError, match="did you mean 'start'"):
        build_model(path, {"stat": 2.0}, shape=SHAPE, classes=3)
    assert build_model("tests.models.test_build.any_options", {"a": 1}, shape=SHAPE).options == {"a": 1}


def test_an_import_path_names_a_model_of_diffusers():
    options = {"block_out_channels": (8,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    model = build_model("diffusers.UNet2DModel", {**options, "norm_num_groups": 4}, shape=(3, 8, 8))
    assert isinstance(model, UNet2DModel)
    assert model.config.norm_num_groups == 4


@pytest.mark.parametrize("name", MODELS)
def test_with_labels_calls_our_models(name):
    model, (x, time) = stirred(small(name, CLASSES)), batch()
    labels = torch.arange(4)
    assert torch.equal(with_labels(model)(x, time, labels), model(x, time, labels))
    assert torch.equal(with_labels(model)(x, time, None), model(x, time))


def test_with_labels_calls_diffusers():
    theirs = stirred(small("unet", CLASSES)).net
    x, time = batch()
    labels = torch.arange(4)
    assert torch.equal(with_labels(theirs)(x, time, labels), theirs(x, time, class_labels=labels).sample)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel, lambda m: torch.compile(nn.DataParallel(m), backend="eager")])
def test_with_labels_finds_y_and_takes_the_first_of_a_tuple_through_wrappers(wrap):
    model, (x, time) = wrap(Scale(3)), batch()
    torch.testing.assert_close(with_labels(model)(x, time, torch.tensor([0, 1, 2, 3]))[2], 3 * x[2])


def test_with_labels_says_what_is_missing():
    class Plain(nn.Module):
        def forward(self, x, time):
            return x

    class Worded(nn.Module):
        def forward(self, x, time):
            return "x"

    x, time = batch()
    assert with_labels(Plain())(x, time, None) is x
    with pytest.raises(ValueError, match=r"Plain was given labels, but .* labels, class_labels, y"):
        with_labels(Plain())(x, time, torch.arange(4))
    with pytest.raises(TypeError, match="returned str"):
        with_labels(Worded())(x, time, None)
