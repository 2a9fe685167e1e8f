"""The standard error of a Fréchet distance against what repeated sampling shows."""

import pytest
import torch

from noisewise.metrics.frechet import Moments, bootstrap, frechet_distance, standard_error

DIM = 6


def gaussian(generator, scale):
    basis = torch.randn(DIM, DIM, generator=generator, dtype=torch.float64)
    return scale * (basis @ basis.T / DIM + 0.3 * torch.eye(DIM))


def draws(count, mean, cov, generator):
    return mean + torch.randn(count, DIM, generator=generator, dtype=torch.float64) @ torch.linalg.cholesky(cov).T


@pytest.mark.parametrize(("shift", "count"), [(0.6, 400), (0.0, 400), (0.3, 2000)])
def test_it_is_the_deviation_of_repeated_samples(shift, count):
    generator = torch.Generator().manual_seed(3)
    real, mine = gaussian(generator, 1.0), gaussian(generator, 1.5)
    mean = torch.full((DIM,), shift, dtype=torch.float64)
    distances, errors = [], []
    for _ in range(300):
        moments = Moments.of(features := draws(count, mean, mine, generator))
        distances.append(frechet_distance(moments.mean, moments.cov, torch.zeros_like(mean), real))
        errors.append(standard_error(features.float(), torch.zeros_like(mean), real))
    assert float(torch.tensor(errors).mean()) == pytest.approx(float(torch.tensor(distances).std()), rel=0.12)


def test_it_agrees_with_resampling_and_falls_with_the_number_of_samples():
    generator = torch.Generator().manual_seed(0)
    real, mine, mean = gaussian(generator, 1.0), gaussian(generator, 2.0), torch.zeros(DIM, dtype=torch.float64)
    features = draws(1000, mean, mine, generator)
    error = standard_error(features, mean, real)
    assert error == pytest.approx(bootstrap(features, mean, real, resamples=200).std, rel=0.15)
    assert standard_error(features[:250], mean, real) == pytest.approx(2 * error, rel=0.25)


def test_fewer_samples_than_dimensions_are_no_error():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(5, DIM, generator=generator)
    assert 0 < standard_error(features, torch.zeros(DIM), torch.eye(DIM)) < 100
