"""Crossings and areas of curves whose answers can be worked out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noisewise.study.summary import Crossing, Point, first_reached, mean_value

NAN, INF = float("nan"), float("inf")
EXAMPLES = settings(max_examples=60, deadline=None)
VALUES = st.floats(1e-3, 1e3)
CURVES = st.lists(st.tuples(st.integers(1, 50), VALUES), min_size=1, max_size=8)


def curve(*values, every=100, seconds=2.0):
    return [Point(every * (i + 1), seconds * (i + 1), value) for i, value in enumerate(values)]


def uneven(parts):
    """A curve from the lengths of its parts."""
    points, at = [], 0
    for length, value in parts:
        at += length
        points.append(Point(at, at / 7, value))
    return points


def test_a_crossing_lies_on_the_line_between_the_two_evaluations_around_it():
    assert first_reached(curve(10, 8, 4), 5) == Crossing(275, 5.5, at_most=False)


def test_the_line_has_the_same_share_of_steps_and_of_seconds():
    points = [Point(100, 1.0, 10), Point(200, 5.0, 6)]
    assert first_reached(points, 9) == Crossing(125, 2.0, at_most=False)


@pytest.mark.parametrize("value", [5, 4.999, 0, -1])
def test_a_value_below_all_others_is_not_reached(value):
    assert (first_reached(curve(10, 8, 5), value) is None) == (value < 5)


def test_a_tie_counts_as_reached():
    assert first_reached(curve(10, 8, 5), 5) == Crossing(300, 6.0, at_most=False)
    assert first_reached(curve(10, 5, 5), 5) == Crossing(200, 4.0, at_most=False)


@pytest.mark.parametrize("first", [5, 3])
def test_nothing_is_made_up_before_the_first_evaluation(first):
    assert first_reached(curve(first, 8, 2), 5) == Crossing(100, 2.0, at_most=True)


def test_the_first_of_several_crossings_counts():
    assert first_reached(curve(10, 4, 9, 1), 7) == Crossing(150, 3.0, at_most=False)


@pytest.mark.parametrize("bad", [NAN, None, -INF, INF])
def test_evaluations_without_a_value_are_passed_over(bad):
    assert first_reached(curve(10, bad, 4), 7) == Crossing(200, 4.0, at_most=False)
    assert first_reached(curve(bad, 4), 7) == Crossing(200, 4.0, at_most=True)
    assert first_reached(curve(10, bad), 7) is None
    assert first_reached(curve(bad, bad), 7) is None


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_is_never_reached(value):
    assert first_reached(curve(10, 8, 4), value) is None


def test_no_evaluation_reaches_nothing_and_has_no_mean():
    assert first_reached([], 1) is None
    assert mean_value([], "steps") is None


@EXAMPLES
@given(CURVES)
def test_every_curve_reaches_its_own_end_and_not_after_it(parts):
    points = uneven(parts)
    found = first_reached(points, points[-1].value)
    assert points[0].steps <= found.steps <= points[-1].steps
    assert found.seconds == pytest.approx(found.steps / 7)
    assert found.at_most == (points[0].value <= points[-1].value)


@EXAMPLES
@given(CURVES, VALUES, VALUES)
def test_a_lower_value_is_not_reached_earlier(parts, one, other):
    points = uneven(parts)
    easy, hard = first_reached(points, max(one, other)), first_reached(points, min(one, other))
    assert hard is None or easy.steps <= hard.steps * (1 + 1e-12)


def test_the_mean_is_the_area_of_trapezoids_over_the_length():
    points = [Point(100, 1.0, 10), Point(200, 5.0, 6), Point(600, 6.0, 2)]
    assert mean_value(points, "steps") == pytest.approx((100 * 8 + 400 * 4) / 500)
    assert mean_value(points, "seconds") == pytest.approx((4 * 8 + 1 * 4) / 5)


def test_the_mean_of_one_evaluation_is_its_value():
    assert mean_value(curve(3.25), "steps") == 3.25


@pytest.mark.parametrize("bad", [NAN, None, INF])
def test_a_curve_with_a_hole_has_no_mean(bad):
    assert mean_value(curve(10, bad, 4), "steps") is None


@EXAMPLES
@given(CURVES, st.sampled_from(["steps", "seconds"]))
def test_the_mean_lies_between_the_lowest_and_the_highest(parts, unit):
    values = [value for _, value in parts]
    assert min(values) * (1 - 1e-9) <= mean_value(uneven(parts), unit) <= max(values) * (1 + 1e-9)


@EXAMPLES
@given(CURVES, st.floats(0.01, 100))
def test_the_mean_scales_with_the_values(parts, factor):
    larger = [(length, value * factor) for length, value in parts]
    assert mean_value(uneven(larger), "steps") == pytest.approx(mean_value(uneven(parts), "steps") * factor)
