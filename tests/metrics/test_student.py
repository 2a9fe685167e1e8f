"""Student's t agrees with scipy's."""

import math

import pytest
from scipy import stats

from noisewise.metrics.frechet import t_quantile, two_sided


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 1000])
@pytest.mark.parametrize("t", [1e-3, 0.1, 0.7, 1.0, 2.5, 12.0, 300.0])
def test_the_tails_of_students_t_are_scipys(t, freedom):
    expected = 2 * stats.t.sf(t, freedom)
    assert two_sided(t, freedom) == pytest.approx(expected, rel=1e-9, abs=0)
    assert two_sided(-t, freedom) == two_sided(t, freedom)


def test_the_tails_of_students_t_at_the_ends():
    assert two_sided(0, 3) == 1
    assert two_sided(math.inf, 3) == 0
    assert two_sided(1e-8, 1) == pytest.approx(1 - 2 / math.pi * 1e-8, abs=1e-15)  # 1 - 2 atan(t) / pi


@pytest.mark.parametrize("freedom", [1, 2, 19, 300])
@pytest.mark.parametrize("level", [0.01, 0.5, 0.95, 0.999])
def test_quantiles_are_scipys(level, freedom):
    assert t_quantile(level, freedom) == pytest.approx(stats.t.ppf((1 + level) / 2, freedom), rel=1e-9)
