"""The test agrees with scipy's, and knows its limits."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from noisewise.study.paired import holm, mean_ratio, paired_test

NAN, INF = float("nan"), float("inf")
EXAMPLES = settings(max_examples=60, deadline=None)
VALUES = st.floats(0.01, 100)
PAIRS = st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=10)
PS = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@EXAMPLES
@given(PAIRS)
def test_p_is_scipys_for_the_logarithms(pairs):
    mine, theirs = zip(*pairs, strict=True)
    logs = [[math.log(value) for value in values] for values in (mine, theirs)]
    differences = [a - b for a, b in zip(*logs, strict=True)]
    if max(differences) - min(differences) > 1e-6:  # else scipy, too, loses all digits
        assert paired_test(mine, theirs) == pytest.approx(stats.ttest_rel(*logs).pvalue, rel=1e-6, abs=1e-12)


def test_values_without_a_logarithm_are_tested_by_their_differences():
    mine, theirs = [0.0, 1.5, -0.1], [1.0, 2.0, 0.3]
    assert paired_test(mine, theirs) == pytest.approx(stats.ttest_rel(mine, theirs).pvalue, rel=1e-9)
    assert mean_ratio(mine, theirs) is None


def test_no_difference_in_any_pair_is_certain_to_be_none():
    assert paired_test([0.1, 2.3, 7.0], [0.1, 2.3, 7.0]) == 1
    assert paired_test([0.0, -1.0], [0.0, -1.0]) == 1


def test_one_difference_in_all_pairs_leaves_no_doubt():
    assert paired_test([1.0, 2.0, 4.0], [2.0, 4.0, 8.0]) == pytest.approx(0, abs=1e-12)
    assert paired_test([1.0, 1.0], [2.0, 2.0]) == 0
    assert paired_test([0.0, 1.0], [1.0, 2.0]) == 0


@pytest.mark.parametrize("values", [[], [1.0]])
def test_fewer_than_two_pairs_give_no_p(values):
    assert paired_test(values, values) is None


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_value_that_is_not_finite_gives_neither_p_nor_ratio(bad):
    for mine, theirs in (([1.0, bad, 3.0], [1.0, 2.0, 3.5]), ([1.0, 2.0, 3.5], [1.0, bad, 3.0])):
        assert paired_test(mine, theirs) is None
        assert mean_ratio(mine, theirs) is None


def test_pairs_must_be_pairs():
    with pytest.raises(ValueError, match="argument"):
        paired_test([1.0, 2.0], [1.0])


def test_the_mean_ratio_is_geometric():
    assert mean_ratio([1.0, 8.0], [2.0, 4.0]) == pytest.approx(1.0)  # 1/2 and 2
    assert mean_ratio([3.0], [3.0]) == 1
    assert mean_ratio([], []) is None


@EXAMPLES
@given(PAIRS, st.floats(1e-3, 1e3))
def test_neither_ratio_nor_p_depends_on_the_unit(pairs, factor):
    mine, theirs = zip(*pairs, strict=True)
    scaled = [value * factor for value in mine], [value * factor for value in theirs]
    assert mean_ratio(*scaled) == pytest.approx(mean_ratio(mine, theirs), rel=1e-9)
    differences = [math.log(a / b) for a, b in pairs]
    if max(differences) - min(differences) > 1e-6:
        assert paired_test(*scaled) == pytest.approx(paired_test(mine, theirs), rel=1e-5, abs=1e-12)


@EXAMPLES
@given(PAIRS)
def test_changing_sides_turns_the_ratio_over_and_keeps_p(pairs):
    mine, theirs = zip(*pairs, strict=True)
    assert mean_ratio(theirs, mine) == pytest.approx(1 / mean_ratio(mine, theirs))
    assert paired_test(theirs, mine) == pytest.approx(paired_test(mine, theirs))


def test_holm_by_hand():
    """0.01 times 4; 0.02 times 3; 0.03 times 2 would be no more than that; 0.5."""
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_counts_only_tests_that_were_made():
    assert holm([None, 0.02, None, 0.03]) == [None, pytest.approx(0.04), None, pytest.approx(0.04)]


@EXAMPLES
@given(PS)
def test_holm_keeps_the_order_and_lies_between_p_and_bonferroni(ps):
    adjusted = holm(ps)
    for p, after in zip(ps, adjusted, strict=True):
        assert p <= after <= min(1, len(ps) * p)
    for p, after in zip(ps, adjusted, strict=True):
        assert all(after <= other_after for other, other_after in zip(ps, adjusted, strict=True) if p <= other)


@EXAMPLES
@given(PS, st.integers(0, 7), st.floats(0, 1))
def test_holm_is_monotone_in_every_p(ps, i, larger):
    i %= len(ps)
    raised = [*ps[:i], max(ps[i], larger), *ps[i + 1 :]]
    assert all(before <= after for before, after in zip(holm(ps), holm(raised), strict=True))
