"""Fill in the tables of benchmarks/cifar10.md from the rows of the study: python docs/make_cifar10_tables.py"""

import statistics
import sys
from pathlib import Path
from typing import Any

from pages import fill_in, rows

from noisewise.study.reach import Point, first_reached

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from field import METHODS  # noqa: E402
from rebuild import best_sessions  # noqa: E402
from strata import correlations, gains, values  # noqa: E402

TARGETS = {"minsnr 5": "Min-SNR 5", "minsnr 1": "Min-SNR 1", "p2": "P2", "plain": "plain", "log": "log", "vlb": "VLB"}
SHARES = (0.25, 0.5, 0.75, 1.0)


def strata_table() -> list[str]:
    """The gain of each tenth of u in pictures and in targets, in per cent."""
    measured = rows("cifar10-v1-strata.jsonl")
    found, rho = gains(measured), correlations(gains(measured))
    names = ["distance", *TARGETS]
    lines = ["| more of u in | FID-5k | " + " | ".join(TARGETS.values()) + " |", "|---" * (len(names) + 1) + "|"]
    for k, gain in found.items():
        cells = [f"{100 * gain[name]:.1f}" if name == "distance" else f"{100 * gain[name]:.2f}" for name in names]
        lines.append(f"| {k / 10:.1f} to {(k + 1) / 10:.1f} | " + " | ".join(cells) + " |")
    uniform = [values(row) for row in measured if row["branch"] == "uniform"]
    noise = {name: 100 * relative_deviation([one[name] for one in uniform]) for name in names}
    cells = [f"{noise[name]:.1f}" if name == "distance" else f"{noise[name]:.2f}" for name in names]
    lines.append("| noise | " + " | ".join(cells) + " |")
    lines.append("| rho with FID | | " + " | ".join(f"{rho[name]:.2f}" for name in TARGETS) + " |")
    return lines


def relative_deviation(found: list[float]) -> float:
    """The standard deviation over the mean."""
    return statistics.stdev(found) / statistics.fmean(found)


def field_table() -> list[str]:
    """FID-5k of each method along its budget, all seeds in a cell, lowest end first."""
    runs = curves(rows("cifar10-v1-field.jsonl"))
    uniform = {seed: curve[1.0] for (method, seed), curve in runs.items() if method == "uniform"}
    methods = sorted({method for method, _ in runs}, key=lambda one: runs[one, min(s for m, s in runs if m == one)][1.0])
    lines = ["| method | spec | 25 % | 50 % | 75 % | 100 % | over uniform's | steps to uniform's last |", "|---" * 8 + "|"]
    for method in methods:
        seeds = sorted(seed for name, seed in runs if name == method)
        found = [runs[method, seed] for seed in seeds]
        cells = [" / ".join(f"{curve[share]:.1f}" for curve in found) for share in SHARES]
        cells.append(" / ".join(f"{curve[1.0] / uniform[seed]:.2f}" for seed, curve in zip(seeds, found, strict=True)))
        cells.append(" / ".join(reached(curve, uniform[seed]) for seed, curve in zip(seeds, found, strict=True)))
        lines.append(f"| {method} | `{METHODS[method]}` | " + " | ".join(cells) + " |")
    return lines


def curves(measured: list[dict[str, Any]]) -> dict[tuple[str, int], dict[float, float]]:
    """FID by share of the budget of every run that came to its end."""
    found = {
        (run[0]["method"], run[0]["seed"]): {row["share"]: row["distance"] for row in run if "share" in row}
        for run in best_sessions(measured)
    }
    return {name: curve for name, curve in found.items() if 1.0 in curve}


def reached(curve: dict[float, float], value: float) -> str:
    """The share of its budget at which a curve had that value."""
    crossing = first_reached([Point(share, share, one) for share, one in sorted(curve.items())], value)
    return "never" if crossing is None else f"{100 * crossing.steps:.0f} %"


TABLES = {"CIFAR-10 strata": strata_table, "CIFAR-10 field": field_table}

if __name__ == "__main__":
    fill_in(BENCHMARKS / "cifar10.md", TABLES)
