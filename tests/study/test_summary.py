"""Every number of a summary, from planted curves whose answers can be worked out by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from noisewise.study.findings import explanation, findings
from noisewise.study.summary import (
    Crossing,
    Point,
    Reached,
    Spread,
    first_reached,
    holm,
    mean_ratio,
    mean_value,
    paired_test,
    summarise,
)
from tests.study.made import compared, curve, planted

NAN, INF = float("nan"), float("inf")
LONG = "adaptive:estimator=lookahead,target=(minsnr),correction=none"


def finals(values, process="linear", first=(60, 50)):
    """Curves with these ends, by sampler; "absent" stands for a seed without a run, None for a run without a distance."""
    return {
        (process, sampler, seed): curve(*first, end)
        for sampler, ends in values.items()
        for seed, end in enumerate(ends)
        if end != "absent"
    }


def summaries(values, **settings):
    """By sampler, on one schedule."""
    return {one.sampler: one for one in summarise(compared(finals(values), **settings))}


def verdict(mine, theirs):
    return summaries({"uniform": theirs, "adaptive": mine})["adaptive"].verdict


def test_a_spread_is_the_mean_and_half_the_range():
    assert (Spread((1.0, 2.0, 6.0)).mean, Spread((1.0, 2.0, 6.0)).half_range) == (3.0, 2.5)
    assert (Spread((1.5,)).mean, Spread((1.5,)).half_range) == (1.5, 0)
    assert math.isnan(Spread((1.0, NAN)).half_range)  # though max and min would find no difference


def test_the_numbers_of_one_sampler_read_back_from_the_disk(tmp_path):
    curves = {
        ("linear", "uniform", 0): [(0.5, 400, 5.0, 30.0), (1.0, 1000, 10.0, 20.0)],
        ("linear", "uniform", 1): [(0.5, 600, 5.0, 34.0), (1.0, 1000, 10.0, 24.0)],
        ("linear", "adaptive", 0): [(0.5, 400, 5.0, 25.0), (1.0, 800, 10.0, 15.0)],
        ("linear", "adaptive", 1): [(0.5, 400, 6.0, 28.0), (1.0, 900, 10.0, 12.0)],
    }
    uniform, adaptive = summarise(planted(tmp_path, curves, budget="10s"))
    assert (uniform.sampler, uniform.baseline, uniform.verdict, uniform.ratio) == ("uniform", True, "baseline", 1.0)
    assert (uniform.p, uniform.p_adjusted) == (None, None)
    assert (adaptive.process, adaptive.sampler, adaptive.baseline, adaptive.metric) == ("linear", "adaptive", False, "fid")
    assert (adaptive.seeds, adaptive.failed, adaptive.unfinished) == ((0, 1), (), ())
    assert adaptive.steps == Spread((800, 900))
    assert adaptive.seconds == Spread((10.0, 10.0))
    assert adaptive.steps_per_second == Spread((80.0, 90.0))
    assert adaptive.distance == Spread((15.0, 12.0))
    assert adaptive.loss.values == pytest.approx((0.15, 0.12))
    assert adaptive.area.values == pytest.approx((20.0, 20.0))
    assert adaptive.ratio == pytest.approx(math.sqrt(15 / 20 * 12 / 24))
    expected = stats.ttest_rel([math.log(15), math.log(12)], [math.log(20), math.log(24)]).pvalue
    assert adaptive.p == adaptive.p_adjusted == pytest.approx(expected)
    assert adaptive.verdict == "lower in 2 of 2 seeds"
    assert adaptive.reached == (Reached(0, 600.0, 7.5), Reached(1, 525.0, 7.0))
    assert adaptive.speedup_steps == pytest.approx(math.sqrt(1000 / 600 * 1000 / 525))
    assert adaptive.speedup_seconds == pytest.approx(math.sqrt(10 / 7.5 * 10 / 7))


def test_the_area_is_over_steps_if_the_budget_is():
    points = [(0.1, 100, 5.0, 30.0), (0.4, 400, 6.0, 10.0), (1.0, 1000, 10.0, 20.0)]
    curves = {("linear", "uniform", 0): points}
    assert summarise(compared(curves, budget="1000it"))[0].area.values == pytest.approx(((300 * 20 + 600 * 15) / 900,))
    assert summarise(compared(curves, budget="10s"))[0].area.values == pytest.approx(((1 * 20 + 4 * 15) / 5,))


def test_a_run_of_no_time_has_no_speed():
    found = summarise(
        compared({("linear", "uniform", 0): curve(30, 20, seconds=0.0), ("linear", "uniform", 1): curve(30, 20, seconds=0.5)})
    )
    assert found[0].steps_per_second == Spread((2000.0,))
    assert found[0].speedup_seconds is None
    assert found[0].speedup_steps == 1


def test_runs_without_a_distance_are_judged_by_their_held_out_loss():
    found = summaries({"uniform": [0.4, 0.5], "adaptive": [0.2, 0.3]}, metric=None)["adaptive"]
    assert (found.metric, found.distance) == (None, None)
    assert found.ratio == pytest.approx(math.sqrt(0.2 / 0.4 * 0.3 / 0.5))
    assert found.value is found.loss
    assert found.area is not None


def test_the_distance_decides_where_there_is_one():
    keys = finals({"uniform": [20, 20], "adaptive": [10, 15]})
    losses = {key: [0.1, 0.1, 0.9 if key[1] == "adaptive" else 0.1] for key in keys}
    found = summarise(compared(keys, losses=losses))[1]
    assert found.loss.mean == pytest.approx(0.9)
    assert found.verdict == "lower in 2 of 2 seeds"
    assert found.value is found.distance


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ([10, 19], [20, 20], "lower in 2 of 2 seeds"),
        ([21, 40], [20, 20], "higher in 2 of 2 seeds"),
        ([10, 25], [20, 20], "lower in 1 of 2 seeds"),
        ([10, 25, 25], [20, 20, 20], "higher in 2 of 3 seeds"),
        ([20, 20, 25], [20, 20, 20], "higher in 1 of 3 seeds"),
        ([20, 30], [20, 30], "same"),
        ([10], [20], "one seed"),
        ([10, "absent"], [20, 20], "one seed"),
        ([10.0, 10.1, 9.9, 10.05], [20, 20, 20, 20], "better"),
        ([40, 41, 39, 40.5], [20, 20, 20, 20], "worse"),
        ([10, 20], [20, 40], "lower in 2 of 2 seeds"),  # the same ratio in both, but only two
        ([10, 20, 5], [20, 40, 10], "better"),  # the same ratio in all three
        ([NAN, 10], [20, 20], "no finite FID in 1 of 2 seeds"),
        ([None, 10], [20, 20], "no finite FID in 1 of 2 seeds"),
        ([10, 10], [NAN, 20], "no finite FID in 1 of 2 seeds"),
        (["absent", 10], [20, "absent"], "no baseline to compare with"),
        ([10, 12], [], "no baseline to compare with"),
        ([0, 1, -0.5], [2, 3, 1.5], "better"),  # no logarithms: differences -2, -2, -2
    ],
)
def test_the_verdict_says_no_more_than_the_seeds_allow(mine, theirs, expected):
    assert verdict(mine, theirs) == expected


def test_holm_takes_all_samplers_of_a_schedule_and_no_others():
    good, noisy = [10.0, 12.0, 9.0, 10.5], [19.0, 22.0, 18.0, 21.0]
    values = {"uniform": [20, 20, 20, 20], "adaptive": good, "minsnr": noisy, "speed": noisy}
    both = {**finals(values), **finals({"uniform": [20] * 4, "adaptive": good}, process="cosine")}
    found = {(one.process, one.sampler): one for one in summarise(compared(both))}
    p = stats.ttest_1samp([math.log(value / 20) for value in good], 0).pvalue
    assert found["linear", "adaptive"].p == found["cosine", "adaptive"].p == pytest.approx(p)
    assert found["linear", "adaptive"].p_adjusted == pytest.approx(3 * p)
    assert found["cosine", "adaptive"].p_adjusted == pytest.approx(p)
    assert found["linear", "minsnr"].p_adjusted == pytest.approx(min(1, 2 * found["linear", "minsnr"].p))


def test_holm_can_take_back_a_small_p():
    """p = 0.03 alone, 0.06 with a second sampler."""
    mine = [15.0, 18.0, 14.0, 17.5]
    alone = summaries({"uniform": [20] * 4, "adaptive": mine})["adaptive"]
    beside = summaries({"uniform": [20] * 4, "adaptive": mine, "minsnr": [20.0, 21.0, 19.0, 20.5]})["adaptive"]
    assert 0.025 < alone.p < 0.05
    assert alone.verdict == "better"
    assert (beside.p, beside.verdict) == (alone.p, "lower in 4 of 4 seeds")


def test_a_speed_up_needs_every_common_seed():
    found = summaries({"uniform": [20, 20], "adaptive": [10, 20.5]})["adaptive"]
    assert [one.steps is None for one in found.reached] == [False, True]
    assert found.reached[1] == Reached(1, None, None)
    assert (found.speedup_steps, found.speedup_seconds) == (None, None)


def test_the_baseline_is_timed_by_the_same_rule():
    """Its curve rises: it had its final value before, at 500 + 250 (60 - 50) / (60 - 40) steps."""
    found = summarise(compared({("linear", "uniform", 0): curve(80, 60, 40, 50)}))[0]
    assert found.reached == (Reached(0, 625.0, 6.25),)
    assert found.speedup_steps == pytest.approx(1000 / 625)
    steady = summarise(compared({("linear", "uniform", 0): curve(80, 60, 40, 30)}))[0]
    assert (steady.speedup_steps, steady.speedup_seconds) == (1.0, 1.0)


def test_only_pairs_that_both_finished_count():
    curves = finals({"uniform": [20, 20, 20], "adaptive": [10, 10, 19]})
    curves["linear", "uniform", 1] = curves["linear", "uniform", 1][:2]
    curves["linear", "adaptive", 0] = curves["linear", "adaptive", 0][:1]
    failures = {("linear", "adaptive", 0): "out of memory"}
    uniform, adaptive = summarise(compared(curves, failures=failures))
    assert (uniform.seeds, uniform.failed, uniform.unfinished) == ((0, 2), (), (1,))
    assert (adaptive.seeds, adaptive.failed, adaptive.unfinished) == ((1, 2), (0,), ())
    assert adaptive.distance == Spread((10.0, 19.0))
    assert adaptive.ratio == pytest.approx(19 / 20)  # of seed 2 alone
    assert adaptive.verdict == "one seed"
    assert [one.seed for one in adaptive.reached] == [2]


@pytest.mark.parametrize(("values", "verdict"), [((10.0, 10.1, 9.9), "lower in 3 of 3 seeds"), ((40.0, 41.0, 39.0), "worse")])
def test_a_sampler_that_failed_with_some_seeds_is_never_called_better(values, verdict):
    """A run that diverges fails: without this rule, one that diverges half of the time would be judged by the other half."""
    curves = finals({"uniform": [20] * 4, "adaptive": values})
    found = summarise(compared(curves, failures={("linear", "adaptive", 3): "diverged"}))[1]
    assert found.p_adjusted < 0.05
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("values", "verdict"), [((10.0, 10.1, 9.9, 10), "better"), ((40.0, 41.0, 39.0, 40), "higher in 3 of 3 seeds")]
)
def test_nothing_is_called_worse_than_a_baseline_that_failed_with_some_seeds(values, verdict):
    """It may have finished where it happened to go well, and the other finished everywhere."""
    curves = finals({"uniform": [20, 20, 20], "adaptive": values})
    made = compared(curves, failures={("linear", "uniform", 3): "diverged"})
    found = summarise(made)[1]
    assert found.p_adjusted < 0.05
    assert found.verdict == verdict
    if verdict != "better":
        assert any("not called worse, since 1 of uniform's runs failed" in one for one in findings(made))
    assert 'Nothing is called "worse" than uniform, some of whose runs failed.' in explanation(made)


def test_clocks_are_compared_only_of_runs_that_were_trained_side_by_side(tmp_path):
    made = planted(tmp_path, finals({"uniform": [20, 20], "minsnr": [10, 10], "adaptive": [10, 10]}))
    first, second = ([name for name in made.plan.runs if ("adaptive" in name) == later] for later in (False, True))
    together = replace(made, plan=replace(made.plan, launches=((*first, *second),)))
    apart = replace(made, plan=replace(made.plan, launches=(tuple(first), tuple(second))))
    gains = {one.sampler: one.speedup_seconds for one in summarise(together)}
    assert gains == {one.sampler: one.speedup_seconds for one in summarise(made)}  # nothing is known: as it was
    assert {one.sampler: one.speedup_seconds for one in summarise(apart)} == {**gains, "adaptive": None}
    assert {one.sampler: one.speedup_steps for one in summarise(apart)} == {
        one.sampler: one.speedup_steps for one in summarise(together)
    }
    said = [one for one in findings(apart) if "not trained side by side with uniform" in one]
    assert [one.partition(":")[0] for one in said] == ["adaptive"]
    assert "% of its seconds" not in said[0]
    for outcome in made.outcomes:
        if outcome.sampler == "minsnr":
            (outcome.folder / "environment.jsonl").write_text('{"machine": "another"}\n')
    assert {one.sampler: one.speedup_seconds for one in summarise(together)} == {**gains, "minsnr": None}


def test_a_sampler_that_never_finished_has_no_numbers():
    failures = {("linear", "adaptive", seed): "diverged" for seed in range(2)}
    curves = finals({"uniform": [20, 20], "minsnr": [10, 10]})
    found = {one.sampler: one for one in summarise(compared(curves, failures=failures))}["adaptive"]
    assert (found.seeds, found.failed, found.verdict) == ((), (0, 1), "no finished run")
    for name in ("steps", "seconds", "steps_per_second", "loss", "distance", "area", "ratio", "p", "p_adjusted"):
        assert getattr(found, name) is None
    assert (found.reached, found.speedup_steps, found.speedup_seconds) == ((), None, None)


def test_a_baseline_that_never_finished_leaves_the_others_uncompared():
    curves = finals({"adaptive": [10, 12]})
    found = summarise(compared(curves, failures={("linear", "uniform", 0): "diverged"}))
    assert [(one.sampler, one.verdict) for one in found] == [
        ("uniform", "no finished run"),
        ("adaptive", "no baseline to compare with"),
    ]
    assert found[1].distance == Spread((10.0, 12.0))
    assert (found[1].ratio, found[1].p, found[1].reached) == (None, None, ())


def test_the_order_is_that_of_the_plan_with_the_baseline_first():
    curves = {**finals({"minsnr": [1], "uniform": [2], LONG: [3]}, "cosine"), **finals({"speed": [4], "uniform": [5]})}
    found = summarise(compared(curves))
    assert [(one.process, one.sampler) for one in found] == [
        ("cosine", "uniform"),
        ("cosine", "minsnr"),
        ("cosine", LONG),
        ("linear", "uniform"),
        ("linear", "speed"),
    ]


def test_seeds_are_in_order_whatever_that_of_the_runs():
    curves = dict(reversed(finals({"uniform": [20, 30, 40], "adaptive": [1, 2, 3]}).items()))
    found = {one.sampler: one for one in summarise(compared(curves))}
    assert found["adaptive"].seeds == (0, 1, 2)
    assert found["adaptive"].distance == Spread((1.0, 2.0, 3.0))


def test_each_schedule_has_its_own_baseline():
    curves = {**finals({"uniform": [20], "adaptive": [10]}), **finals({"uniform": [10], "adaptive": [20]}, "cosine")}
    found = {(one.process, one.sampler): one.ratio for one in summarise(compared(curves))}
    assert found["linear", "adaptive"] == pytest.approx(0.5)
    assert found["cosine", "adaptive"] == pytest.approx(2)


def test_one_run_twice_is_refused():
    made = compared(finals({"uniform": [20]}))
    made.outcomes.append(made.outcomes[0])
    with pytest.raises(ValueError, match=r"both uniform on linear with seed 0: leave one of them out of comparison.json"):
        summarise(made)


def test_nothing_begun_is_an_empty_summary():
    assert summarise(compared({})) == []


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=4), st.floats(0.01, 100))
def test_neither_ratio_nor_speed_up_depends_on_the_unit_of_the_value(ends, factor):
    def found(scale):
        mine, theirs = zip(*ends, strict=True)
        values = {"uniform": theirs, "adaptive": mine}
        curves = {key: [(*point[:3], point[3] * scale) for point in points] for key, points in finals(values).items()}
        return summarise(compared(curves))[1]

    one, other = found(1.0), found(factor)
    assert other.ratio == pytest.approx(one.ratio)
    assert [reached.steps for reached in other.reached] == pytest.approx([reached.steps for reached in one.reached])
    assert other.area.mean == pytest.approx(one.area.mean * factor)


# Curves of evaluations ------------------------------------------------------------------------------------------------


EXAMPLES = settings(max_examples=60, deadline=None)
VALUES = st.floats(1e-2, 1e2)
CURVES = st.lists(st.tuples(st.integers(1, 50), VALUES), min_size=1, max_size=8)


def uneven(parts):
    """A curve from the lengths of its parts."""
    points, at = [], 0
    for length, value in parts:
        at += length
        points.append(Point(at, at / 7, value))
    return points


def evaluated(*values):
    return [Point(100 * (i + 1), 2.0 * (i + 1) ** 2, value) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "target", "found"),
    [
        ((10, 8, 4), 5, (275, 8 + 0.75 * 10, False)),  # on a straight line, with the same share of steps and of seconds
        ((10, 8, 5), 5, (300, 18.0, False)),  # a tie counts
        ((10, 5, 5), 5, (200, 8.0, False)),
        ((10, 8, 5), 4.999, None),
        ((5, 8, 2), 5, (100, 2.0, True)),  # nothing is made up before the first evaluation
        ((3, 8, 2), 5, (100, 2.0, True)),
        ((10, 4, 9, 1), 7, (150, 5.0, False)),  # the first of several
        ((), 1, None),
        *(((10, 8, 4), bad, None) for bad in (NAN, INF, -INF)),
        *(((10, bad, 4), 7, (200, 10.0, False)) for bad in (NAN, None, INF, -INF)),  # passed over
        *(((bad, 4), 7, (200, 8.0, True)) for bad in (NAN, None, INF, -INF)),
        *(((10, bad), 7, None) for bad in (NAN, None, INF, -INF)),
    ],
)
def test_a_value_is_reached_where_the_curve_first_has_it(values, target, found):
    assert first_reached(evaluated(*values), target) == (None if found is None else Crossing(*found))


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
    assert mean_value(evaluated(3.25), "steps") == 3.25
    assert [mean_value(points, "steps") for points in ([], *(evaluated(10, bad, 4) for bad in (NAN, None, INF)))] == [None] * 4


@EXAMPLES
@given(CURVES, st.sampled_from(["steps", "seconds"]))
def test_the_mean_lies_between_the_lowest_and_the_highest(parts, unit):
    values = [value for _, value in parts]
    assert min(values) * (1 - 1e-9) <= mean_value(uneven(parts), unit) <= max(values) * (1 + 1e-9)


# The paired test agrees with scipy's, and knows its limits ------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("mine", "theirs", "p"),
    [
        ([], [], None),  # fewer than two pairs
        ([1.0], [1.0], None),
        ([0.1, 2.3, 7.0], [0.1, 2.3, 7.0], 1),  # no difference in any pair
        ([0.0, -1.0], [0.0, -1.0], 1),
        ([1.0, 2.0, 4.0], [2.0, 4.0, 8.0], 0),  # one difference in all
        ([1.0, 1.0], [2.0, 2.0], 0),
        ([0.0, 1.0], [1.0, 2.0], 0),
    ],
)
def test_p_where_pairs_do_not_scatter(mine, theirs, p):
    assert paired_test(mine, theirs) == (p if p is None else pytest.approx(p, abs=1e-12))


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


def test_holm_by_hand():
    """0.01 times 4; 0.02 times 3; 0.03 times 2 would be no more than that; 0.5."""
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    assert holm([None, 0.02, None, 0.03]) == [None, pytest.approx(0.04), None, pytest.approx(0.04)]  # None is no test


@EXAMPLES
@given(PS)
def test_holm_keeps_the_order_and_lies_between_p_and_bonferroni(ps):
    adjusted = holm(ps)
    for p, after in zip(ps, adjusted, strict=True):
        assert p <= after <= min(1, len(ps) * p)
    for p, after in zip(ps, adjusted, strict=True):
        assert all(after <= other_after for other, other_after in zip(ps, adjusted, strict=True) if p <= other)
