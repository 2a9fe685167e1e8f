"""What a curve of evaluations says besides its end: when it reached a value, and its mean over the budget. Lower is better."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

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
    known = _known(curve) if math.isfinite(value) else []
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
    return [(steps, seconds, value) for steps, seconds, value in curve if value is not None and math.isfinite(value)]


def _between(start: float, end: float, share: float) -> float:
    """Exactly `end` at share 1, unlike start + share * (end - start)."""
    return (1 - share) * start + share * end
