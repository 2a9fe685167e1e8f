"""Kernel distance, precision and recall, density and coverage, sliced Wasserstein distance."""

import pytest
import scipy.stats
import torch
from torch import nn
from torchmetrics.image.kid import KernelInceptionDistance

from noisewise.metrics.kid import kid, polynomial_mmd
from noisewise.metrics.neighbours import density_coverage, precision_recall, radii
from noisewise.metrics.sliced import sliced_wasserstein
from tests.metrics.sets import gaussian


class AsTheyAre(nn.Module):
    """Features handed to torchmetrics in place of images."""

    num_features = 10

    def forward(self, features):
        return features


def test_kid_of_whole_sets_equals_torchmetrics():
    first, second = gaussian(60, 10), gaussian(60, 10, shift=0.3, seed=1)
    metric = KernelInceptionDistance(feature=AsTheyAre(), subsets=1, subset_size=60)
    metric.update(first, real=True)
    metric.update(second, real=False)
    found = kid(first, second, subsets=1, size=60)
    assert found.mean == pytest.approx(float(metric.compute()[0]), rel=1e-3)
    assert found.mean > 0.05


def test_the_kernel_distance_is_a_sum_over_pairs():
    first, second = gaussian(5, 3).double(), gaussian(7, 3, seed=1).double()

    def k(a, b):
        return (float(a @ b) / 3 + 1) ** 3

    within = sum(k(a, b) for i, a in enumerate(first) for j, b in enumerate(first) if i != j) / 20
    within += sum(k(a, b) for i, a in enumerate(second) for j, b in enumerate(second) if i != j) / 42
    across = sum(k(a, b) for a in first for b in second) / 35
    assert float(polynomial_mmd(first, second)) == pytest.approx(within - 2 * across, rel=1e-12)


def test_kid_has_the_same_subsets_for_the_same_seed():
    first, second = gaussian(80, 4), gaussian(90, 4, seed=1)
    assert kid(first, second, 5, 20) == kid(first, second, 5, 20)
    assert kid(first, second, 5, 20) != kid(first, second, 5, 20, seed=1)
    assert kid(first, second, 5, 20).std > 0


def by_force(real, generated, k):
    """Precision, recall, density and coverage from whole float64 distance matrices."""
    real, generated = real.double(), generated.double()

    def reach(x):
        return torch.cdist(x, x).sort(1).values[:, k]

    inside = torch.cdist(generated, real) <= reach(real)
    covered = torch.cdist(real, generated) <= reach(generated)
    return (
        float(inside.any(1).double().mean()),
        float(covered.any(1).double().mean()),
        float(inside.sum(1).double().mean()) / k,
        float(inside.any(0).double().mean()),
    )


@pytest.mark.parametrize("block", [7, 1000])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_neighbour_measures_equal_brute_force(block, k):
    real, generated = gaussian(150, 6, shift=100.0), gaussian(120, 6, shift=100.7, scale=0.8, seed=1)
    precision, recall, density, coverage = by_force(real, generated, k)
    found = precision_recall(real, generated, k, block)
    assert (found.precision, found.recall, found.k) == (pytest.approx(precision), pytest.approx(recall), k)
    found = density_coverage(real, generated, k, block)
    assert (found.density, found.coverage) == (pytest.approx(density), pytest.approx(coverage))
    assert 0 < precision < 1
    assert 0 < recall < 1


def test_a_sample_is_not_its_own_neighbour():
    line = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    assert radii(line, 1).tolist() == [1, 1, 4, 16]
    assert radii(line, 2, block=3).tolist() == [9, 4, 9, 36]


@pytest.mark.parametrize(("n", "m"), [(50, 50), (50, 35), (7, 60)])
def test_along_a_line_it_is_the_transport_distance(n, m):
    first, second = gaussian(n, 1), gaussian(m, 1, shift=0.4, seed=1)
    expected = scipy.stats.wasserstein_distance(first[:, 0], second[:, 0])
    assert sliced_wasserstein(first, second, lines=3, power=1.0) == pytest.approx(expected, rel=1e-6)


def test_a_shift_is_seen_at_its_length_over_the_root_of_the_dimension():
    images = gaussian(40, 2 * 3 * 4).view(40, 2, 3, 4)
    found = sliced_wasserstein(images, images + 2.0, lines=4000)
    assert found == pytest.approx(2.0, rel=0.03)  # |shift| = 2 sqrt(24), and a line sees |shift| / sqrt(24) of it
    assert sliced_wasserstein(images, images) == 0


def test_bad_sets_say_what_is_wrong():
    x = gaussian(10, 3)
    with pytest.raises(ValueError, match="size must lie between 2 and the smaller set's 10"):
        kid(x, x)
    with pytest.raises(ValueError, match="subsets must be >= 1"):
        kid(x, x, 0, 5)
    with pytest.raises(ValueError, match="second features have 2 dimensions"):
        kid(x, x[:, :2], 1, 5)
    with pytest.raises(ValueError, match="k must be at least 1 and below"):
        precision_recall(x, x, k=10)
    with pytest.raises(ValueError, match="generated features have 2"):
        density_coverage(x, x[:, :2])
    with pytest.raises(ValueError, match="hold NaN"):
        density_coverage(x, x * float("nan"))
    with pytest.raises(ValueError, match="of one shape"):
        sliced_wasserstein(x, x[:, :2])
    with pytest.raises(ValueError, match="must not be empty"):
        sliced_wasserstein(x, x[:0])
    with pytest.raises(ValueError, match="lines and power"):
        sliced_wasserstein(x, x, lines=0)
