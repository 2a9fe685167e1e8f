"""FID along the budget of runs on CIFAR-10, and what tables make of it."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from noisewise.study.summary import Point, first_reached

from . import spec_now

from rebuild import best_sessions  # isort: skip

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the budget, where runs are evaluated
Runs = dict[tuple[str, int], dict[float, float]]  # spec and seed to FID by share


def ranked(runs: Runs, shares: Sequence[float]) -> Iterator[tuple[str, list[str]]]:
    """Specs with their cells, lowest mean ratio to uniform first: spec, seeds, values at these shares, ratio, steps saved."""
    uniform = {seed: curve[1.0] for (spec, seed), curve in runs.items() if spec == "uniform"}
    ratios = {spec: statistics.fmean(runs[spec, s][1.0] / uniform[s] for one, s in runs if one == spec) for spec, _ in runs}
    for spec in sorted(ratios, key=lambda one: ratios[one]):
        found = {seed: curve for (one, seed), curve in sorted(runs.items()) if one == spec}
        cells = [f"`{spec}`", joined(map(str, found))]
        cells += [joined(f"{c[share]:.1f}" if share in c else "–" for c in found.values()) for share in shares]
        cells.append(joined(f"{curve[1.0] / uniform[seed]:.2f}" for seed, curve in found.items()))
        cells.append(joined(reached(curve, uniform[seed]) for seed, curve in found.items()))
        yield spec, cells


def joined(cells: Iterable[str]) -> str:
    """All seeds in a cell."""
    return " / ".join(cells)


def with_spread(ends: dict[int, float]) -> str:
    """The mean over seeds, and half of their range; a dash for none."""
    if not ends:
        return "–"
    spread = (max(ends.values()) - min(ends.values())) / 2
    return f"{statistics.fmean(ends.values()):.1f}" + (f" ± {spread:.1f}" if len(ends) > 1 else "")


def geometric(ends: dict[int, float], others: dict[int, float]) -> str:
    """The geometric mean of the ratios, over the seeds that both have; a dash for none."""
    ratios = [math.log(ends[seed] / others[seed]) for seed in ends.keys() & others.keys()]
    return f"{math.exp(statistics.fmean(ratios)):.2f}" if ratios else "–"


def in_order(found: dict[int, str], seeds: Iterable[int]) -> str:
    """What was found for each of the seeds; a dash for one that was not run, and nothing if none was."""
    return joined(found.get(seed, "–") for seed in sorted(seeds)) if found else ""


def curves(measured: list[dict[str, Any]]) -> Runs:
    """FID by share of the budget of every run that came to its end."""
    return {name: curve for name, curve in all_curves(measured).items() if 1.0 in curve}


def all_curves(measured: list[dict[str, Any]]) -> Runs:
    """FID by share of the budget of every run, however far it came."""
    return {
        (spec_now(run[0]), run[0]["seed"]): {row["share"]: row["distance"] for row in run if "share" in row}
        for run in best_sessions(measured)
    }


def reached(curve: dict[float, float], value: float) -> str:
    """The share of its budget at which a curve had that value; no more than the first at which it was measured."""
    points = [Point(share, share, one) for share, one in sorted(curve.items())]
    crossing = first_reached(points, value)
    if crossing is None:
        return "never"
    return f"{'≤ ' if points[0].value <= value else ''}{100 * crossing.steps:.0f} %"
