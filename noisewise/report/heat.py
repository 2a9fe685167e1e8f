"""The density of draws through training, as data: a panel for each method, thinned to rows of equal spans of steps."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from noisewise.looking.palette import Method
from noisewise.report.subject import Subject
from noisewise.spec import build_process

MOST_ROWS = 120
VIEWS = {"draws": "density_by_level", "objective": "objective_by_level"}


@dataclass(frozen=True)
class Panel:
    """One method: what it drew and what counted, rows of equal spans of steps, the first step first."""

    method: Method
    seed: int
    end: int  # the last step
    views: dict[str, NDArray[np.float64]]  # (rows, levels), 1 is uniform


@dataclass(frozen=True)
class HeatMap:
    """All panels of one schedule; colours run from 2**-reach to 2**reach times uniform."""

    process: str
    panels: tuple[Panel, ...]
    reach: int

    @property
    def end(self) -> int:
        return max(panel.end for panel in self.panels)


def heat_map(subject: Subject, process: str) -> HeatMap | None:
    """The densities on a schedule, of the first seed of each method that has any; None if none has."""
    panels = []
    for method in subject.methods_of(process):
        for run in subject.runs(process, method.name):
            rows = run.metrics()
            views = {name: regular(rows, key) for name, key in VIEWS.items()}
            known = {name: view for name, view in views.items() if view is not None}
            if "draws" in known:
                panels.append(Panel(method, run.seed, rows[-1]["step"], known))
                break
    return HeatMap(process, tuple(panels), reach_of(panels)) if panels else None


def regular(rows: list[dict[str, Any]], key: str, most: int = MOST_ROWS) -> NDArray[np.float64] | None:
    """The lists under a key as rows of equal spans of steps, each the mean of what falls into it."""
    known = [row for row in rows if row.get(key)]
    if not known or len({len(row[key]) for row in known}) != 1:
        return None
    steps = np.array([row["step"] for row in known], float)
    values = np.array([row[key] for row in known], float)
    count = min(most, len(known))
    edges = np.linspace(0, steps[-1], count + 1)
    first = np.searchsorted(steps, edges[:-1], side="right")
    last = np.maximum(np.searchsorted(steps, edges[1:], side="right"), first + 1)  # or what was measured next
    return np.stack([values[a:b].mean(0) for a, b in zip(first, last, strict=True)])


def reach_of(panels: list[Panel]) -> int:
    """Powers of two that the scale spans on either side of uniform: enough for nearly all of what is above it."""
    values = [view[np.isfinite(view)] for panel in panels for view in panel.views.values()]
    largest = max((float(np.quantile(part, 0.995)) for part in values if part.size), default=1.0)
    return min(max(math.ceil(math.log2(max(largest, 1.0)) - 0.05), 1), 3)


def doublings(values: NDArray[np.float64], reach: int) -> NDArray[np.float64]:
    """The logarithm of a density to base 2, cut off at both ends; NaN stays NaN."""
    return np.log2(np.clip(values, 2.0**-reach, 2.0**reach))


def log_snr_of(process: str, levels: int = 50) -> list[float | None]:
    """log SNR in the middle of equal intervals of u; None where it is infinite, as at the end of zero terminal SNR."""
    u = (torch.arange(levels, dtype=torch.float64) + 0.5) / levels
    found = build_process(process).log_snr(u).tolist()
    return [round(value, 3) if math.isfinite(value) else None for value in found]


def log_snr_ticks(process: str, most: int = 10) -> list[tuple[float, float]]:
    """Round values of log SNR and where they are in u, no two too close to be read."""
    known = [(value, (k + 0.5) / 500) for k, value in enumerate(log_snr_of(process, 500)) if value is not None]
    found: list[tuple[float, float]] = []
    if not known or known[0][0] == known[-1][0]:
        return found
    curve, u = np.array(known).T
    for value in MaxNLocator(most).tick_values(curve.min(), curve.max())[::-1]:
        place = float(np.interp(-value, -curve, u))
        if curve.min() <= value <= curve.max() and (not found or place - found[-1][1] >= 0.11):
            found.append((float(value), place))
    return found


def scale_texts(reach: int) -> list[str]:
    """What stands at the ends and the doublings of the colour scale."""
    fractions = {-3: "⅛", -2: "¼", -1: "½"}
    texts = [fractions.get(k, str(2**k) if k >= 0 else "") for k in range(-reach, reach + 1)]
    return [f"≤ {texts[0]}", *texts[1:-1], f"≥ {texts[-1]}"]
