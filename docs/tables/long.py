"""The long protocol, `cifar10-v2`: distances at every mark, and the map of what pictures want."""

import math
from typing import Any

from . import rows, spec_now, table
from .field import NAMES


def runs() -> str:
    """FID at each mark, a line a run, and its ratio to uniform's with the same seed at the last mark both have."""
    curves: dict[tuple[int, str], dict[int, float]] = {}
    for row in rows("cifar10-v2-runs.jsonl"):
        curves.setdefault((row["seed"], NAMES.get(spec_now(row), row["method"])), {})[row["step"]] = row["distance"]
    marks = sorted({step for curve in curves.values() for step in curve})
    lines = []
    for (seed, method), curve in sorted(curves.items()):
        uniform = curves[seed, "uniform"]
        ratio = "" if method == "uniform" else f"{curve[max(curve)] / uniform[max(curve)]:.2f}"
        lines.append([str(seed), method, *(f"{curve[mark]:.1f}" if mark in curve else "–" for mark in marks), ratio])
    return table(["seed", "method", *(f"{mark:,}" for mark in marks), "last over uniform's"], lines)


def what_pictures_want() -> str:
    """The gain in FID of more training in each tenth of u, in per cent, a line for each moment of training."""
    moments: dict[int, list[dict[str, Any]]] = {}
    for row in rows("cifar10-v2-map.jsonl"):
        moments.setdefault(row["start_step"], []).append(row)
    lines = []
    for step, found in sorted(moments.items()):
        uniform = {row["seed"]: row["distance"] for row in found if row["stratum"] is None}
        gains = {row["stratum"]: 100 * math.log(uniform[row["seed"]] / row["distance"]) for row in found if row["seed"] == 0}
        noise = 100 * abs(math.log(uniform[0] / uniform[1]))
        lines.append([f"{step:,}", *(f"{gains[k]:+.1f}" for k in range(10)), f"{noise:.1f}"])
    heads = [f"{k / 10:.1f} to {(k + 1) / 10:.1f}" for k in range(10)]
    return table(["steps", *heads, "two seeds of uniform differ by"], lines)
