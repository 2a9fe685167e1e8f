from importlib.resources import files

import pytest
import torch

from noisewise.data.digits import Digits
from noisewise.metrics.digits_features import (
    DIM,
    FILE,
    METRIC,
    digits_features,
    load_digits_classifier,
    read_classifier,
)
from noisewise.metrics.frechet import features_distance
from tests.metrics.sets import digits


def test_the_weights_are_small_and_say_how_good_they_are():
    assert (files("noisewise.metrics") / FILE).stat().st_size < 150_000
    _, about = read_classifier()
    network, name = load_digits_classifier()
    labels = torch.as_tensor(Digits("test").read(torch.arange(297).numpy())[1])
    with torch.no_grad():
        right = network.logits(digits_features(digits("test"))).argmax(1) == labels
    assert float(right.double().mean()) == pytest.approx(float(about["held_out_accuracy"]), abs=0.004)
    assert float(about["held_out_accuracy"]) > 0.97
    assert name.startswith("digits-classifier-")
    assert "fid" not in METRIC


def test_features_are_of_mean_zero_and_variance_one_over_the_training_digits():
    found = digits_features(digits())
    assert found.shape == (1500, DIM)
    torch.testing.assert_close(found.mean(0), torch.zeros(DIM), rtol=0, atol=0.01)
    torch.testing.assert_close(found.std(0), torch.ones(DIM), rtol=0, atol=0.01)


def test_samples_in_model_space_give_the_features_of_their_files():
    images = digits()[:20]
    assert torch.equal(digits_features(images.float() / 127.5 - 1), digits_features(images))


def test_held_out_digits_are_nearer_than_spoilt_ones():
    train, test = digits_features(digits()), digits("test")
    clean = test.float() / 127.5 - 1
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    distances = [features_distance(digits_features(clean + level * noise), train) for level in (0.0, 0.25, 0.5, 1.0)]
    assert distances == sorted(distances)
    assert distances[0] < 1
    assert distances[2] > 3 * distances[0]


def test_a_missing_class_is_seen():
    train, test = digits_features(digits()), digits_features(digits("test"))
    labels = torch.as_tensor(Digits("test").read(torch.arange(297).numpy())[1])
    assert features_distance(test[labels != 3], train) > 1.5 * features_distance(test, train)


def test_counts_and_other_sizes_are_refused():
    with pytest.raises(ValueError, match="255 / 16"):
        digits_features(torch.full((2, 1, 8, 8), 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"digits must be \(n, 1, 8, 8\)"):
        digits_features(torch.zeros(2, 1, 28, 28, dtype=torch.uint8))
    with pytest.raises(ValueError, match="no images"):
        digits_features(torch.zeros(0, 1, 8, 8))
