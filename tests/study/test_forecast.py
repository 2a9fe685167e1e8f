"""What is said before measuring begins, and how many images are measured."""

import numpy as np
import pytest
import torch

from noisewise.data import Synthetic, open_data
from noisewise.metrics.distances import Network, real_statistics
from noisewise.study import forecast


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "about 1 s"), (89, "about 89 s"), (90, "about 2 minutes"), (5400, "about 2 hours")]
)
def test_times_in_words(seconds, said):
    assert forecast.about(seconds) == said


def test_an_evaluation_takes_as_many_forward_passes_as_it_makes(monkeypatch):
    monkeypatch.setattr(forecast, "forward_seconds", lambda *_: 1.0)
    monkeypatch.setattr(forecast, "feature_seconds", lambda *_: 100.0)
    source = open_data("digits")
    each, once = forecast.evaluation_seconds(None, source, 0, images=10, solver_steps=7)
    assert each == 10 * 7 + forecast.LEVELS * forecast.HELD_OUT + 10 * 100
    assert once == 0  # the digits' own classifier takes no time


def test_inception_on_a_cpu_is_only_for_images_that_are_no_digits():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    images = Synthetic((3, 32, 32), 0)
    assert forecast.needs_inception(images, cpu) == images.image
    assert not forecast.needs_inception(images, gpu)
    assert not forecast.needs_inception(open_data("digits"), cpu)
    assert not forecast.needs_inception(None, cpu)


def test_some_of_the_real_images_are_spread_over_all_and_kept_apart(tmp_path):
    pictures = np.full((30, 8, 8, 1), 100, np.uint8) + np.arange(30, dtype=np.uint8)[:, None, None, None]  # sorted, as by class
    np.save(tmp_path / "train.npy", pictures)
    source = open_data("array", str(tmp_path))
    means = Network(Brightness(), "brightness", "digits", "fid", 1)
    settings = {"cache": tmp_path / "cache", "batch": 2}
    some, everything = (real_statistics(source, means, "cpu", count=count, **settings).moments for count in (4, None))
    assert (some.count, everything.count) == (4, 30)
    assert float(some.mean) == pytest.approx(float(everything.mean), abs=0.02)
    assert real_statistics(source, means, "cpu", count=99, **settings).moments.count == 30


class Brightness(torch.nn.Module):
    def forward(self, x):
        return x.mean((1, 2, 3))[:, None]
