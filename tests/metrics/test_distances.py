"""Distances through the functions that the commands call: the right network, every metric, the cache."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance

from noisewise.data import Synthetic, open_data
from noisewise.data.source import ArraySource
from noisewise.metrics import distances
from noisewise.metrics.digits_features import digits_features
from noisewise.metrics.distances import METRICS, choose_network, compare_images, real_statistics, source_images
from noisewise.metrics.features import features, pytorch_fid
from noisewise.metrics.frechet import features_distance
from tests.metrics.sets import digits
from tests.metrics.test_inception import natural_images, with_weights

DIGITS = open_data("digits")


class Untouchable(ArraySource):
    """A source that may be asked who it is, but not for its images."""

    def __init__(self, source):
        self.__dict__.update(source.__dict__)
        self.inner = source

    def __len__(self):
        return len(self.inner)

    def fingerprint(self):
        return self.inner.fingerprint()

    def read(self, rows):
        raise AssertionError("the images were read although their statistics are in the cache")


@pytest.fixture(scope="module")
def network():
    return choose_network(DIGITS, "cpu")


@pytest.fixture(scope="module")
def real(network, tmp_path_factory):
    return real_statistics(DIGITS, network, "cpu", keep_features=True, cache=tmp_path_factory.mktemp("cache"))


def noisy(n=290, seed=0):
    """Digits with something wrong with them, uint8."""
    noise = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) * 60
    return (digits("test")[:n] + noise).clamp(0, 255).round().to(torch.uint8)


def test_digits_have_their_own_network_and_their_distance_another_name(network, real):
    assert (network.preprocessing, network.metric) == ("digits", "digits-frechet")
    found = compare_images([noisy()], real, network, "cpu")
    assert set(found) == {"images", "real_images", "digits-frechet"}
    assert (found["images"], found["real_images"]) == (290, len(DIGITS))
    expected = features_distance(digits_features(noisy()), digits_features(digits()))
    assert found["digits-frechet"] == pytest.approx(expected, rel=1e-4)
    held_out = compare_images([digits("test")], real, network, "cpu")["digits-frechet"]
    assert held_out < found["digits-frechet"] / 3


def test_how_the_images_are_cut_does_not_matter(network, real):
    one = compare_images([noisy()], real, network, "cpu", METRICS, real_pixels=digits())
    told = []
    other = compare_images(
        noisy().split(37), real, network, "cpu", METRICS, real_pixels=digits(), batch=50, progress=told.append
    )
    assert one["digits-frechet"] == pytest.approx(other["digits-frechet"], rel=1e-5)
    assert one["kid"] == pytest.approx(other["kid"], rel=1e-3, abs=1e-6)
    assert one["sliced_wasserstein"] == other["sliced_wasserstein"]
    assert told[-1] == 290


def test_the_pixels_that_are_compared_do_not_depend_on_the_order_of_the_images(network, real, monkeypatch):
    monkeypatch.setattr(distances, "SLICED_IMAGES", 50)
    images, pixels = noisy(), digits()
    found = [
        compare_images(cut, real, network, "cpu", ["sliced"], real_pixels=order)["sliced_wasserstein"]
        for cut, order in ((images.split(37), pixels), (images.flip(0).split(290), pixels.flip(0)))
    ]
    assert found[0] == found[1]
    brightness = distances.some_of(images[images.double().mean((1, 2, 3)).argsort()]).double().mean()
    assert float(brightness) == pytest.approx(float(images.double().mean()), rel=0.1)


def numbers(value):
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    return [number for inner in value for number in numbers(inner)] if isinstance(value, tuple | list) else [value]


def test_every_metric_is_there_and_finite(network, real):
    found = compare_images([noisy()], real, network, "cpu", METRICS, real_pixels=digits())
    names = {"kid", "precision_recall", "density_coverage", "sliced_wasserstein", "digits-frechet"}
    names |= {"digits-frechet_infinity", "digits-frechet_interval", "digits-frechet_error"}
    assert set(found) == names | {"images", "real_images"}
    assert all(math.isfinite(number) for number in numbers(found))
    interval = found["digits-frechet_interval"]
    assert interval["low"] < found["digits-frechet"] < interval["high"]
    assert interval["value"] == pytest.approx(found["digits-frechet"], rel=1e-6)
    assert found["digits-frechet_error"] == pytest.approx(interval["std"], rel=0.5)
    assert 0 < found["precision_recall"]["precision"] <= 1


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_can_be_had_alone(network, real, metric):
    found = compare_images([noisy(100)], real, network, "cpu", [metric], real_pixels=digits())
    assert len(found) == 3
    assert all(math.isfinite(number) for number in numbers(found))


def test_bad_input_says_what_is_wrong(network, real, tmp_path):
    def nothing():
        raise AssertionError("images were asked for before the settings were checked")
        yield

    with pytest.raises(ValueError, match="unknown metric 'is': choose from fid"):
        compare_images(nothing(), real, network, "cpu", ["fid", "is"])
    with pytest.raises(ValueError, match="real_pixels"):
        compare_images(nothing(), real, network, "cpu", ["sliced"])
    without = real_statistics(DIGITS, network, "cpu", cache=tmp_path)
    for metric in ("kid", "precision_recall", "density_coverage"):
        with pytest.raises(ValueError, match="keep_features=True"):
            compare_images(nothing(), without, network, "cpu", [metric])
    for few in ([], [noisy(1)]):
        with pytest.raises(ValueError, match=f"at least 2 images, got {len(few)}"):
            compare_images(few, real, network, "cpu")
    with pytest.raises(ValueError, match="holds no images"):
        real_statistics(Synthetic((4,), floats=True), network, "cpu", cache=tmp_path)
    with pytest.raises(ValueError, match="digits must be"):
        compare_images([natural_images(2)], real, network, "cpu")


def test_fewer_images_than_dimensions_warn_and_more_do_not(network, real):
    with pytest.warns(UserWarning, match="20 samples for 32 dimensions"):
        compare_images([noisy(20)], real, network, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare_images([noisy(40)], real, network, "cpu")


def test_statistics_are_kept_and_used_again_without_a_look_at_the_images(network, tmp_path):
    made = real_statistics(DIGITS, network, "cpu", keep_features=True, cache=tmp_path)
    again = real_statistics(Untouchable(DIGITS), network, "cpu", keep_features=True, cache=tmp_path)
    assert torch.equal(made.moments.cov, again.moments.cov)
    assert torch.equal(made.features, again.features)
    with pytest.raises(AssertionError, match="images were read"):
        real_statistics(Untouchable(open_data("digits", split="test")), network, "cpu", cache=tmp_path)


def test_a_source_is_read_in_order_and_up_to_a_count():
    assert torch.equal(torch.cat(list(source_images(DIGITS, 100))), digits())
    assert [len(part) for part in source_images(DIGITS, 100, count=250)] == [100, 100, 50]


def test_some_images_of_a_source_that_is_sorted_are_of_all_classes():
    pictures = np.arange(200, dtype=np.uint8).repeat(3).reshape(-1, 1, 1, 1)
    some = torch.cat(list(source_images(ArraySource("sorted", pictures, image=True), 7, count=200))).flatten()
    assert torch.equal(some, torch.arange(200, dtype=torch.uint8))


@pytest.fixture(scope="module")
def inception():
    return choose_network(Synthetic((3, 64, 64)), "cpu")


class First(nn.Module):
    """The first of the features: torchmetrics needs seconds for the root of a matrix of all 2048."""

    def __init__(self, network, dim):
        super().__init__()
        self.network, self.dim = network, dim

    def forward(self, images):
        return self.network(images)[:, : self.dim]


class Prepared(nn.Module):
    """Our preprocessing and network, as torchmetrics wants them."""

    def __init__(self, network):
        super().__init__()
        self.network, self.num_features = network.module, network.dim

    @torch.no_grad()
    def forward(self, images):
        return self.network(pytorch_fid(images))


@pytest.mark.slow
@with_weights
def test_fid_equals_torchmetrics_of_the_same_network(inception, tmp_path):
    network = replace(inception, module=First(inception.module, 256), id="the first 256", dim=256)
    real, generated = natural_images(8), 255 - natural_images(8, seed=1)
    metric = FrechetInceptionDistance(Prepared(network), input_img_size=(3, 64, 64))
    metric.update(real, real=True)
    metric.update(generated, real=False)
    source = ArraySource("crops", real.numpy(), image=True)
    statistics = real_statistics(source, network, "cpu", cache=tmp_path, batch=5)
    with pytest.warns(UserWarning, match="8 samples for 256 dimensions"):
        found = compare_images(generated.split(3), statistics, network, "cpu", batch=4)
    assert (inception.metric, inception.preprocessing, inception.dim) == ("fid", "pytorch-fid", 2048)
    assert found["fid"] == pytest.approx(float(metric.compute()), rel=1e-3)
    assert found["fid"] > 1


@pytest.mark.slow
@with_weights
def test_grey_images_count_as_images_of_three_equal_channels(inception, tmp_path):
    grey = natural_images(4).float().mean(1, keepdim=True).round().to(torch.uint8)
    source = ArraySource("grey", grey.numpy(), image=True)
    assert source.shape == (1, 64, 64)
    statistics = real_statistics(source, inception, "cpu", cache=tmp_path, keep_features=True)
    with pytest.warns(UserWarning, match="4 samples for 2048"):
        found = compare_images([255 - grey], statistics, inception, "cpu")
    assert found["fid"] > 10
    torch.testing.assert_close(statistics.features, features(grey.expand(-1, 3, -1, -1), inception.module), rtol=0, atol=1e-4)
