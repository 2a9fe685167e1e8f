"""FID along the budget of runs on CIFAR-10, and what tables make of it."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from pages import spec_now  # makes the benchmarks known as modules

from noisewise.study.reach import Point, first_reached

from rebuild import best_sessions  # isort: skip

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the budget, where runs are evaluated


def ranked(runs: dict[tuple[str, int], dict[float, float]], shares: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Specs with their lines of a table, lowest mean ratio to uniform first: values at these shares, ratio, steps saved."""
    uniform = {seed: curve[1.0] for (spec, seed), curve in runs.items() if spec == "uniform"}
    ratios = {spec: statistics.fmean(runs[spec, s][1.0] / uniform[s] for one, s in runs if one == spec) for spec, _ in runs}
    for spec in sorted(ratios, key=lambda one: ratios[one]):
        found = {seed: curve for (one, seed), curve in sorted(runs.items()) if one == spec}
        cells = [" / ".join(f"{c[share]:.1f}" if share in c else "–" for c in found.values()) for share in shares]
        cells.append(" / ".join(f"{curve[1.0] / uniform[seed]:.2f}" for seed, curve in found.items()))
        cells.append(" / ".join(reached(curve, uniform[seed]) for seed, curve in found.items()))
        yield spec, f"| `{spec}` | {' / '.join(map(str, found))} | " + " | ".join(cells) + " |"


def curves(measured: list[dict[str, Any]]) -> dict[tuple[str, int], dict[float, float]]:
    """FID by share of the budget of every run that came to its end."""
    return {name: curve for name, curve in all_curves(measured).items() if 1.0 in curve}


def all_curves(measured: list[dict[str, Any]]) -> dict[tuple[str, int], dict[float, float]]:
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
