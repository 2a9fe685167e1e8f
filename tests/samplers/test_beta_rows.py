"""Beta distributions in a batch, against scipy's."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from noisewise.samplers.adaptive.beta import END, LEAST, BetaRows
from noisewise.samplers.adaptive.policy import BOUNDS

SHAPES = [*itertools.product((BOUNDS[0], 0.3, 0.974, 2.0, 17.0, BOUNDS[1]), repeat=2), (1.0, 1.0), (0.974, 0.9741)]
AB = torch.tensor(SHAPES)
THEIRS = [stats.beta(a, b) for a, b in AB.double().tolist()]


@pytest.mark.parametrize("v", [2.0**-24, 1e-4, 0.03, 0.3, 0.5, 0.77, 0.999, 1 - 2.0**-24])
def test_quantiles_are_scipys(v):
    u = BetaRows(AB.double()).quantile(torch.full((len(SHAPES),), v, dtype=torch.float64)).numpy()
    for mine, beta in zip(u, THEIRS, strict=True):
        bounds = np.clip(beta.ppf([max(v - 2e-8, 0), min(v + 2e-8, 1)]), LEAST, 1 - LEAST)
        assert bounds[0] * (1 - 1e-6) <= mine <= bounds[1] * (1 + 1e-6)


def test_masses_are_scipys():
    edges = np.arange(1001) / 1000
    masses = BetaRows(AB).masses(torch.from_numpy(edges)).numpy()
    for mine, beta in zip(masses, THEIRS, strict=True):
        np.testing.assert_allclose(mine, np.diff(beta.cdf(edges)), atol=2e-8)
        assert mine.sum() == pytest.approx(1, abs=1e-12)


def test_density_and_entropy_are_scipys():
    for u in (LEAST, 1e-3, 0.2, 0.5, 0.9, 1 - 1e-3):
        mine = BetaRows(AB.double()).log_density(torch.full((len(SHAPES),), u, dtype=torch.float64)).numpy()
        np.testing.assert_allclose(mine, [beta.logpdf(u) for beta in THEIRS], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(BetaRows(AB).entropy().numpy(), [beta.entropy() for beta in THEIRS], rtol=1e-6, atol=1e-6)


def test_the_gradient_of_the_log_density_is_that_of_torchs_beta():
    ab, u = AB.double().requires_grad_(), torch.linspace(0.01, 0.99, len(SHAPES), dtype=torch.float64)
    (mine,) = torch.autograd.grad(BetaRows(ab).log_density(u).sum(), ab)
    (theirs,) = torch.autograd.grad(torch.distributions.Beta(*ab.unbind(1)).log_prob(u).sum(), ab)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("floor", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("inside", [(0.0, 1.0), (0.0005, 0.9995)])
def test_draws_follow_density_and_masses(floor, inside):
    n = 40_000
    v = torch.rand(n, generator=torch.Generator().manual_seed(0))
    rows = BetaRows(torch.tensor([[0.4, 1.7]]).expand(n, 2), floor, inside)
    u = rows.quantile(v)
    assert u.dtype == torch.float32
    edges = torch.linspace(0, 1, 41)
    expected = BetaRows(torch.tensor([[0.4, 1.7]]), floor, inside).masses(edges)[0]
    counts = torch.histc(u, 40, 0, 1).double()
    assert stats.chisquare(counts.numpy(), (expected / expected.sum() * n).numpy()).pvalue > 1e-4
    middles = (torch.arange(400_000) + 0.5) / 400_000
    density = BetaRows(torch.tensor([[0.4, 1.7]]).expand(len(middles), 2), floor, inside).density(middles)
    torch.testing.assert_close(density.view(40, -1).double().mean(1)[1:] / 40, expected[1:], rtol=2e-3, atol=1e-6)


def test_draws_stay_inside_where_all_mass_is_at_the_ends():
    for a, b in ((BOUNDS[0], BOUNDS[1]), (BOUNDS[1], BOUNDS[0])):
        rows = BetaRows(torch.tensor([[a, b]]).expand(1001, 2))
        u = rows.quantile(torch.linspace(2.0**-24, 1 - 2.0**-24, 1001))
        assert bool(((u >= LEAST) & (u <= 1 - LEAST)).all())
        assert bool((u.diff() >= 0).all())
        assert bool(torch.isfinite(rows.density(u)).all())
    assert pytest.approx(math.log(1 / LEAST - 1)) == END
