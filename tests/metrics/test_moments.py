from pathlib import Path

import numpy as np
import pytest
import torch

from noisewise.metrics.digits_features import digits_features
from noisewise.metrics.frechet import Moments
from tests.metrics.sets import digits, gaussian
from tests.torchrun import run_ranks

WORKER = Path(__file__).parent.parent / "workers" / "moments.py"


def in_batches(features, size):
    moments = Moments(features.shape[1])
    for part in features.split(size):
        moments.update(part)
    return moments


def assert_same(found, expected, tolerance=1e-10):
    assert found.count == expected.count
    torch.testing.assert_close(found.mean, expected.mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.cov, expected.cov, rtol=tolerance, atol=tolerance)


def test_moments_equal_numpys():
    features = gaussian(200, 7).double()
    moments = in_batches(features, 33)
    np.testing.assert_allclose(moments.mean, features.numpy().mean(0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(moments.cov, np.cov(features.numpy(), rowvar=False), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 64, 500])
def test_batch_size_does_not_matter(size):
    features = gaussian(500, 5, shift=3.0)
    assert_same(in_batches(features, size), Moments.of(features))


def test_order_does_not_matter():
    features = gaussian(500, 5, shift=3.0)
    shuffled = features[torch.randperm(500, generator=torch.Generator().manual_seed(1))]
    assert_same(in_batches(shuffled, 50), in_batches(features, 50))


def test_a_mean_a_million_deviations_away_costs_no_digits():
    near = gaussian(300, 4).double()
    # 2^20 added to multiples of 2^-24 is exact in float64, so the covariance must stay the same
    near = (near * 2**24).round() / 2**24
    torch.testing.assert_close(in_batches(near + 2**20, 17).cov, in_batches(near, 17).cov, rtol=1e-9, atol=1e-9)


def test_merged_parts_are_the_whole():
    features = gaussian(90, 3)
    whole, left = Moments.of(features), Moments.of(features[:20])
    left.merge(Moments(3))
    left.merge(Moments.of(features[20:]))
    assert_same(left, whole)
    empty = Moments(3)
    empty.merge(whole)
    assert_same(empty, whole)


def test_without_a_process_group_synchronising_changes_nothing():
    moments = Moments.of(gaussian(20, 3))
    assert_same(moments.synchronised(), moments, tolerance=0)


def test_two_ranks_see_what_one_sees(tmp_path):
    first, second = run_ranks(WORKER, tmp_path)
    assert first == second
    features = digits_features(digits()[:120])
    expected = {"features": Moments.of(gaussian(100, 6)), "digits": Moments.of(features)}
    expected |= {"empty": expected["features"], "digits_empty": expected["digits"], "kept": expected["digits"]}
    for name, moments in expected.items():
        tolerance = 1e-5 if moments.dim == 32 else 1e-10  # float32 features of other batch sizes differ in the last bits
        assert first[name]["count"] == moments.count
        np.testing.assert_allclose(first[name]["mean"], moments.mean, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(first[name]["cov"], moments.cov, rtol=tolerance, atol=tolerance)
    for rows in first["rows"]:
        np.testing.assert_allclose(rows, features, rtol=0, atol=1e-5)


def test_bad_features_say_what_is_wrong():
    moments = Moments(3)
    with pytest.raises(ValueError, match="4 dimensions where 3 are needed"):
        moments.update(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"must be \(samples, dimensions\)"):
        moments.update(torch.zeros(3))
    with pytest.raises(TypeError, match="uint8"):
        moments.update(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="1 of 2 features hold NaN"):
        moments.update(torch.tensor([[0.0, 1.0, 2.0], [0.0, float("nan"), float("inf")]]))
    with pytest.raises(ValueError, match="cannot merge moments of 2"):
        moments.merge(Moments(2))
    with pytest.raises(ValueError, match="dim must be >= 1"):
        Moments(0)
    moments.update(torch.ones(1, 3))
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        _ = moments.cov
