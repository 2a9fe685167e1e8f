import statistics
import warnings

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance

from noisewise.metrics.digits_features import digits_features
from noisewise.metrics.frechet import Moments, bootstrap, features_distance, fid_infinity, frechet_distance, moments_distance
from tests.metrics.sets import digits, gaussian
from tests.metrics.test_inception import natural_images
from tests.torchrun import fork_ranks
from tests.workers.moments import main


def rotation(dim, seed=0):
    return torch.linalg.qr(gaussian(dim, dim, seed=seed).double()).Q


def covariance(variances, turned):
    return turned @ torch.diag(torch.as_tensor(variances, dtype=torch.float64)) @ turned.T


def test_commuting_covariances_differ_by_their_deviations():
    turned = rotation(30)
    first, second = torch.logspace(2, -6, 30).double(), torch.logspace(-5, 3, 30).double()
    mean = torch.arange(30.0)
    found = frechet_distance(mean, covariance(first, turned), mean + 1, covariance(second, turned))
    assert found == pytest.approx(30 + float((first.sqrt() - second.sqrt()).square().sum()), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("kept", "other"), [(10, 10), (10, 40), (40, 10), (0, 40), (0, 0)])
def test_singular_covariances_keep_their_zeros(kept, other):
    turned = rotation(40)
    first = torch.linspace(1, 9, 40).double() * (torch.arange(40) < kept)
    second = torch.linspace(4, 1, 40).double() * (torch.arange(40) >= 40 - other)
    found = frechet_distance(torch.zeros(40), covariance(first, turned), torch.zeros(40), covariance(second, turned))
    assert found == pytest.approx(float((first.sqrt() - second.sqrt()).square().sum()), abs=1e-6)


@pytest.mark.parametrize("n", [20, 49, 50, 51, 200])
def test_a_set_is_at_no_distance_from_itself(n):
    rows = gaussian(n, 50, scale=5.0)
    moments = Moments.of(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for found in (frechet_distance(moments.mean, moments.cov, moments.mean, moments.cov), features_distance(rows, rows)):
            assert 0 <= found < 1e-6


def test_the_distance_equals_the_textbook_formula():
    first, second = (Moments.of(gaussian(60, 20, seed=seed) @ gaussian(20, 20, seed=seed + 5)) for seed in (0, 1))
    root = scipy.linalg.sqrtm(first.cov.numpy() @ second.cov.numpy())
    expected = (
        float((first.mean - second.mean).square().sum()) + float((first.cov + second.cov).trace()) - 2 * np.trace(root.real)
    )
    assert moments_distance(first, second) == pytest.approx(expected, rel=1e-9)
    assert moments_distance(second, first) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("n", "m"), [(10, 15), (10, 400), (400, 10)])
def test_few_features_give_the_distance_of_their_covariances(n, m):
    first, second = gaussian(n, 40, scale=3.0), gaussian(m, 40, shift=1.0, seed=1)
    one, two = Moments.of(first), Moments.of(second)
    with pytest.warns(UserWarning, match="10 samples for 40 dimensions"):
        found = features_distance(first, second)
    assert found == pytest.approx(frechet_distance(one.mean, one.cov, two.mean, two.cov), rel=1e-9)


class Small(nn.Module):
    """A fixed random network over raw images, as torchmetrics wants one."""

    num_features = 24

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 24, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images):
        return self.layers(images.float() / 255)


def theirs(feature, real, generated):
    metric = FrechetInceptionDistance(feature=feature, normalize=False, input_img_size=(3, 64, 64))
    metric.update(real, real=True)
    metric.update(generated, real=False)
    return float(metric.compute())


def test_the_distance_equals_torchmetrics_of_the_same_network():
    real, generated = natural_images(200), 255 - natural_images(200, seed=1)
    network = Small()
    with torch.no_grad():
        found = features_distance(network(real), network(generated))
    assert found == pytest.approx(theirs(network, real, generated), rel=1e-3)
    assert found > 0.01


def test_resamples_spread_as_new_samples_do():
    reference = Moments.of(gaussian(5000, 8, seed=9))
    found = bootstrap(gaussian(300, 8, shift=0.5, seed=1), reference.mean, reference.cov, resamples=40)
    fresh = [gaussian(300, 8, shift=0.5, seed=seed) for seed in range(10, 50)]
    spread = float(torch.tensor([moments_distance(Moments.of(rows), reference) for rows in fresh]).std())
    assert found.low < found.value < found.high
    assert found.std == pytest.approx(spread, rel=0.4)
    assert found == bootstrap(gaussian(300, 8, shift=0.5, seed=1), reference.mean, reference.cov, resamples=40)


def test_an_interval_of_few_resamples_holds_what_it_says():
    """The outermost of 20 resamples lie nearer than the limits of 95 %, and would hold it less often."""
    reference = Moments.of(gaussian(20_000, 4, seed=9))
    sets = [gaussian(200, 4, shift=0.5, seed=seed) for seed in range(100, 400)]
    found = [bootstrap(rows, reference.mean, reference.cov, seed=number) for number, rows in enumerate(sets)]
    expected = statistics.fmean(one.value for one in found)  # of sets of this size
    assert 0.92 < statistics.fmean(one.low < expected < one.high for one in found) < 0.98


def test_the_distance_at_infinitely_many_samples_is_free_of_bias():
    dim, n = 16, 1000
    mean, cov = torch.zeros(dim), torch.eye(dim)
    found = fid_infinity(gaussian(n, dim), mean, cov, smallest=50)
    plain = found.distances[-1]
    assert found.sizes[0] == 50
    assert found.sizes[-1] == n
    assert plain > 0.05  # the truth is 0
    assert abs(found.value) < plain / 2
    assert found.slope > 0


def test_bad_gaussians_say_what_is_wrong():
    mean, cov = torch.zeros(3), torch.eye(3)
    with pytest.raises(ValueError, match=r"first mean and covariance must be \(d,\) and \(d, d\)"):
        frechet_distance(mean, torch.eye(2), mean, cov)
    with pytest.raises(ValueError, match="3 and 2 dimensions"):
        frechet_distance(mean, cov, torch.zeros(2), torch.eye(2))
    with pytest.raises(ValueError, match="second mean or covariance holds NaN"):
        frechet_distance(mean, cov, mean * float("nan"), cov)
    with pytest.raises(ValueError, match="symmetric"):
        frechet_distance(mean, cov, mean, torch.ones(3, 3).triu())
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        features_distance(torch.zeros(1, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="second features have 2 dimensions where 3"):
        features_distance(torch.zeros(4, 3), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="resamples must be >= 2"):
        bootstrap(torch.zeros(4, 3), mean, cov, resamples=1)
    with pytest.raises(ValueError, match="use more samples"):
        fid_infinity(torch.zeros(3, 3), mean, cov)


# Moments --------------------------------------------------------------------------------------------------------------


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


def test_two_ranks_see_what_one_sees(tmp_path):
    first, second = fork_ranks(main, tmp_path)
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
