"""A comparison in numbers: one summary for each schedule and sampler."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite, nan
from statistics import fmean
from typing import Literal, NamedTuple

from noisewise.metrics.frechet import two_sided
from noisewise.study.outcome import Comparison, Evaluation, Outcome

# Curves of evaluations: when they reached a value, and their mean over the budget -------------------------------------


Unit = Literal["steps", "seconds"]


class Point(NamedTuple):
    """One evaluation; a value that is None or not finite could not be measured, or the run had diverged."""

    steps: float
    seconds: float
    value: float | None


class Crossing(NamedTuple):
    """When a curve first had a value."""

    steps: float
    seconds: float
    at_most: bool  # it had it at the first evaluation already: perhaps earlier


def first_reached(curve: Sequence[Point], value: float) -> Crossing | None:
    """When the curve first had `value` or less; None if it never had.

    Between two evaluations the curve is a straight line; before the first there is none. Evaluations without a value are passed
    over, and a value that is not finite is never reached.
    """
    known = _known(curve) if isfinite(value) else []
    i = next((i for i, (_, _, here) in enumerate(known) if here <= value), None)
    if i is None:
        return None
    steps, seconds, here = known[i]
    if i == 0:
        return Crossing(steps, seconds, at_most=True)
    steps_before, seconds_before, before = known[i - 1]
    share = (before - value) / (before - here)
    return Crossing(_between(steps_before, steps, share), _between(seconds_before, seconds, share), at_most=False)


def mean_value(curve: Sequence[Point], unit: Unit) -> float | None:
    """The area under the curve over its length in steps or seconds: a value between its lowest and its highest.

    None if an evaluation has no value: a mean over the others would flatter a run that diverged.
    """
    known = _known(curve)
    if not known or len(known) < len(curve):
        return None
    at, values = [point[unit == "seconds"] for point in known], [point[2] for point in known]
    length = at[-1] - at[0]
    if not length > 0:
        return values[-1]
    parts = zip(pairwise(at), pairwise(values), strict=True)
    return sum((end - start) / length * (left + right) / 2 for (start, end), (left, right) in parts)


def _known(curve: Sequence[Point]) -> list[tuple[float, float, float]]:
    return [(steps, seconds, value) for steps, seconds, value in curve if value is not None and isfinite(value)]


def _between(start: float, end: float, share: float) -> float:
    """Exactly `end` at share 1, unlike start + share * (end - start)."""
    return (1 - share) * start + share * end


# Whether a difference is more than the noise between seeds: a paired t-test, and Holm's correction --------------------


# Runs with one seed share initial weights, data order and noise, so they are compared in pairs. What is tested is the logarithm
# of a pair's ratio: the size of the values drops out. Where a value has no logarithm (a Fréchet distance can come out as 0 or
# below), differences are tested instead. With a value that is not finite there is no test: leaving the pair out would reward a
# sampler for diverging.
SIGNIFICANT = 0.05  # what an adjusted p must lie below to call a sampler better or worse
SAME = 0.001  # of the value: pairs that differ by less are ties
SEEDS = 3  # pairs that it needs besides: two seeds can agree by chance


def paired_test(values: Sequence[float], baseline: Sequence[float]) -> float | None:
    """The two-sided p of a paired t-test; None with fewer than two pairs, or where a value is not finite."""
    effects = pair_effects(values, baseline)
    if effects is None or len(effects) < 2:
        return None
    mean, deviation = fmean(effects), statistics.stdev(effects)
    if deviation == 0:
        return 1.0 if mean == 0 else 0.0
    return two_sided(mean / (deviation / math.sqrt(len(effects))), len(effects) - 1)


def pair_effects(values: Sequence[float], baseline: Sequence[float]) -> list[float] | None:
    """The logarithm of each ratio, or each difference if a value is not positive; below 0 is better than the baseline."""
    pairs = list(zip(values, baseline, strict=True))
    if not all(map(isfinite, (*values, *baseline))):
        return None
    if all(value > 0 for value in (*values, *baseline)):
        return [0.0 if mine == theirs else math.log(mine) - math.log(theirs) for mine, theirs in pairs]
    return [mine - theirs for mine, theirs in pairs]


def mean_ratio(values: Sequence[float], baseline: Sequence[float]) -> float | None:
    """The geometric mean of the ratios; None without pairs, or where a value is not finite or not positive."""
    if not values or not all(0 < value < math.inf for value in (*values, *baseline)):
        return None
    return math.exp(fmean(pair_effects(values, baseline) or ()))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Each p after Holm's step-down adjustment for so many tests; None stays None and does not count as a test."""
    tests = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    adjusted: list[float | None] = [None] * len(ps)
    largest = 0.0
    for done, (p, i) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - done) * p))
        adjusted[i] = largest
    return adjusted


# What a comparison found, sampler by sampler --------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A number for each seed that has one, in the order of `Summary.seeds`."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def half_range(self) -> float:
        return (max(self.values) - min(self.values)) / 2 if all(map(isfinite, self.values)) else nan


@dataclass(frozen=True)
class Reached:
    """When one seed first had the value that the baseline with the same seed had in the end; None: not within its budget."""

    seed: int
    steps: float | None
    seconds: float | None
    at_most: bool = False  # already at the first evaluation: it may have been earlier


@dataclass(frozen=True)
class Summary:
    """The runs of one sampler on one schedule, over its finished seeds."""

    process: str
    sampler: str
    baseline: bool
    seeds: tuple[int, ...]  # finished
    failed: tuple[int, ...]
    unfinished: tuple[int, ...]
    metric: str | None
    steps: Spread | None  # this and the next are None if no seed is finished
    seconds: Spread | None
    steps_per_second: Spread | None
    loss: Spread | None  # held out, mean over noise levels
    distance: Spread | None
    headline: Spread | None  # the distance of more images, if it was asked for
    headline_images: int | None
    area: Spread | None  # mean of the value over the budget, from the first evaluation to the last
    ratio: float | None  # geometric mean, over seeds that the baseline finished too, of the value over the baseline's
    p: float | None  # of a paired t-test on the logarithm of those ratios, two-sided; None with fewer than two pairs
    p_adjusted: float | None  # after Holm, over all samplers compared on this schedule
    verdict: str  # "baseline", "better", "worse", or a plain description of what was seen
    reached: tuple[Reached, ...]
    speedup_steps: float | None  # geometric mean of the baseline's final step over the steps needed; None unless all reached it
    speedup_seconds: float | None  # also None unless all were trained side by side with the baseline
    side_by_side: bool

    @property
    def value(self) -> Spread | None:
        """What it is judged by."""
        return self.loss if self.metric is None else self.distance


Runs = dict[int, Outcome]  # of one sampler on one schedule, by seed in increasing order


def summarise(comparison: Comparison) -> list[Summary]:
    """A summary for each schedule and sampler, in the order of the plan, the baseline first within each schedule."""
    return [summary for samplers in by_schedule(comparison).values() for summary in _on_one_schedule(samplers, comparison)]


def budget_unit(comparison: Comparison) -> Unit:
    """What the budget counts."""
    return "seconds" if comparison.plan.budget.endswith("s") else "steps"


def by_schedule(comparison: Comparison) -> dict[str, dict[str, Runs]]:
    """The runs by schedule, by sampler with the baseline first, and by seed."""
    found: dict[str, dict[str, Runs]] = {}
    for one in comparison.outcomes:
        runs = found.setdefault(one.process, {}).setdefault(one.sampler, {})
        if one.seed in runs:
            raise ValueError(
                f"{runs[one.seed].folder} and {one.folder} are both {one.sampler} on {one.process} with seed {one.seed}: "
                "leave one of them out of comparison.json"
            )
        runs[one.seed] = one
    first = comparison.plan.baseline
    return {
        process: {name: dict(sorted(samplers[name].items())) for name in sorted(samplers, key=lambda name: name != first)}
        for process, samplers in found.items()
    }


def judged(evaluation: Evaluation, metric: str | None) -> float:
    """The value by which runs of one schedule are judged; NaN where the distance that the others have is missing."""
    if metric is None:
        return evaluation.loss
    return evaluation.distance if evaluation.distance is not None and evaluation.metric == metric else nan


def metric_label(metric: str | None) -> str:
    """What a metric is called in words and on axes."""
    return {None: "held-out loss", "fid": "FID"}.get(metric, metric or "")


def headline_images(summaries: Iterable[Summary]) -> int | None:
    """The images of the distances measured at the end besides the usual ones; None if there are none."""
    return next((one.headline_images for one in summaries if one.headline is not None), None)


class _Pair(NamedTuple):
    """Two finished runs with the same seed, at their ends."""

    seed: int
    mine: Evaluation
    theirs: Evaluation  # the baseline's
    side_by_side: bool


def _on_one_schedule(samplers: dict[str, Runs], comparison: Comparison) -> list[Summary]:
    ends = [run.final for runs in samplers.values() for run in runs.values() if run.final is not None]
    metric = next((end.metric for end in ends if end.distance is not None), None)
    base, unit = samplers.get(comparison.plan.baseline, {}), budget_unit(comparison)
    pairs = [_pairs(runs, base, comparison) for runs in samplers.values()]
    made = [_summary(runs, pair, runs is base, metric, unit) for runs, pair in zip(samplers.values(), pairs, strict=True)]
    adjusted = holm([one.p for one in made])
    unlucky = any(run.status == "failed" for run in base.values())
    return [
        replace(one, p_adjusted=p, verdict=_verdict(one, *_values(pair, metric), p, unlucky))
        for one, pair, p in zip(made, pairs, adjusted, strict=True)
    ]


def _summary(runs: Runs, pairs: list[_Pair], baseline: bool, metric: str | None, unit: Unit) -> Summary:
    """All but what depends on the other samplers."""
    first = next(iter(runs.values()))
    ends = [run.final for run in runs.values() if run.final is not None]
    curves = {
        seed: [Point(one.step, one.seconds, judged(one, metric)) for one in run.evaluations]
        for seed, run in runs.items()
        if run.final is not None
    }
    mine, theirs = _values(pairs, metric)
    beside = all(pair.side_by_side for pair in pairs)
    reached = tuple(
        Reached(pair.seed, *(first_reached(curves[pair.seed], target) or (None, None)))
        for pair, target in zip(pairs, theirs, strict=True)
    )
    return Summary(
        process=first.process,
        sampler=first.sampler,
        baseline=baseline,
        seeds=tuple(curves),
        failed=tuple(seed for seed, run in runs.items() if run.status == "failed"),
        unfinished=tuple(seed for seed, run in runs.items() if run.status == "unfinished"),
        metric=metric,
        steps=_spread(end.step for end in ends),
        seconds=_spread(end.seconds for end in ends),
        steps_per_second=_spread(end.step / end.seconds for end in ends if end.seconds > 0),
        loss=_spread(end.loss for end in ends),
        distance=_spread(end.distance for end in ends if end.metric == metric),
        headline=_spread(end.headline for end in ends if end.metric == metric),
        headline_images=next((end.headline_images for end in ends if end.headline_images is not None), None),
        area=_spread(mean_value(curve, unit) for curve in curves.values()),
        ratio=mean_ratio(mine, theirs),
        p=None if baseline else paired_test(mine, theirs),
        p_adjusted=None,
        verdict="",
        reached=reached,
        speedup_steps=_speedup([pair.theirs.step for pair in pairs], [one.steps for one in reached]),
        speedup_seconds=_speedup([pair.theirs.seconds for pair in pairs], [one.seconds for one in reached]) if beside else None,
        side_by_side=beside,
    )


def _pairs(runs: Runs, base: Runs, comparison: Comparison) -> list[_Pair]:
    both = [(seed, run, base[seed]) for seed, run in runs.items() if seed in base]
    return [
        _Pair(seed, run.final, other.final, run is other or comparison.side_by_side(run, other))
        for seed, run, other in both
        if run.final is not None and other.final is not None
    ]


def _values(pairs: list[_Pair], metric: str | None) -> tuple[list[float], list[float]]:
    return [judged(pair.mine, metric) for pair in pairs], [judged(pair.theirs, metric) for pair in pairs]


def _speedup(theirs: Sequence[float], needed: Sequence[float | None]) -> float | None:
    known = [value for value in needed if value is not None]
    return mean_ratio(theirs, known) if len(known) == len(needed) else None


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = tuple(value for value in values if value is not None)
    return Spread(known) if known else None


def _verdict(one: Summary, mine: list[float], theirs: list[float], p: float | None, unlucky: bool) -> str:
    """ "better" and "worse" are for differences beyond the noise between seeds; else what was seen, in words.

    `unlucky` is whether a run of the baseline failed.
    """
    if not one.seeds:
        return "no finished run"
    if one.baseline:
        return "baseline"
    if not mine:
        return "no baseline to compare with"
    effects = pair_effects(mine, theirs)
    if effects is None:
        missing = sum(not (isfinite(a) and isfinite(b)) for a, b in zip(mine, theirs, strict=True))
        return f"no finite {metric_label(one.metric)} in {missing} of {len(mine)} seeds"
    if len(mine) == 1:
        return "one seed"
    if one.ratio is not None and all(abs(effect) < SAME for effect in effects):
        return "same"
    better = fmean(effects) < 0
    selected = one.failed if better else unlucky  # the runs that are left may be those that happened not to diverge
    if p is not None and p < SIGNIFICANT and len(mine) >= SEEDS and not selected:
        return "better" if better else "worse"
    lower, higher = sum(effect < 0 for effect in effects), sum(effect > 0 for effect in effects)
    if not lower and not higher:
        return "same"
    return f"lower in {lower} of {len(mine)} seeds" if lower >= higher else f"higher in {higher} of {len(mine)} seeds"
