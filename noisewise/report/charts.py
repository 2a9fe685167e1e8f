"""Charts as data: what is drawn, in the page and in figures for papers."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, TypeVar

import numpy as np
import torch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from noisewise.levels import middles
from noisewise.looking.palette import DASHES, GREY, Method, moments_named
from noisewise.metrics.optimal_loss import OptimalLoss
from noisewise.report.subject import Subject
from noisewise.spec import build_process
from noisewise.study.outcome import Evaluation, Outcome
from noisewise.study.summary import judged, metric_label

Row = TypeVar("Row")
MOST_POINTS = 200  # of a curve through training
LARGEST = 1e100  # beyond it a run has diverged, and an axis would show nothing else
OPTIMAL = Method(-1, "optimal", GREY, DASHES[2])


@dataclass(frozen=True)
class Point:
    """A place on a line: the mean over seeds, and each seed's own value."""

    x: float
    values: tuple[float, ...]
    seeds: tuple[int, ...] = ()

    @property
    def y(self) -> float:
        return mean(self.values)


@dataclass(frozen=True)
class Line:
    """One method in a chart; the band around it is the range over seeds."""

    method: Method
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """Lines over one axis. `level` is a horizontal line to compare with."""

    name: str
    title: str
    x: str
    y: str
    lines: tuple[Line, ...]
    log: bool = False
    level: float | None = None
    legend: bool = False  # of its own, where the lines are no methods

    @property
    def values(self) -> list[float]:
        return [value for line in self.lines for point in line.points for value in point.values]


def quality_charts(subject: Subject, process: str) -> list[Chart]:
    """The value that runs are judged by, against steps and against time."""
    metric = subject.metric
    longest = max((found.seconds for run in subject.runs(process) for found in run.evaluations), default=0.0)
    unit, size = time_unit(longest)
    label = f"{metric_label(metric)} (lower is better)"
    axes: list[tuple[str, str, str, Callable[[Evaluation], float]]] = [
        ("steps", "training steps", "step", lambda found: found.step),
        ("time", "training time", f"training time ({unit})", lambda found: found.seconds / size),
    ]
    charts = []
    for name, title, x_label, x in axes:
        lines = [
            Line(method, tuple(_judged(subject.runs(process, method.name), metric, x)))
            for method in subject.methods_of(process)
        ]
        chart = Chart(f"quality-{name}", f"Against {title}", x_label, label, _drawn(lines))
        if chart.lines:
            charts.append(_with_scale(chart))
    return charts


def loss_charts(subject: Subject, process: str) -> list[Chart]:
    """Held-out loss by noise level at the last evaluation: plain, over the baseline's, and what is left to learn of it."""
    finals = {method: _last(subject.runs(process, method.name)) for method in subject.methods_of(process)}
    x = "noise level u (0: least noise, 1: most)"
    plain = [Line(method, tuple(_by_level(runs))) for method, runs in finals.items()]
    charts = [Chart("loss", "Held-out loss", x, "held-out loss (log scale)", _drawn(plain), log=True)]
    base = {run.seed: found for method, runs in finals.items() if method.index == 0 for run, found in runs}
    if len(subject.methods) > 1 and base:
        name = subject.baseline.name
        over = [Line(method, tuple(_by_level(runs, base))) for method, runs in finals.items()]
        title = f"The same, over the loss of {name}"
        charts.append(Chart("loss-ratio", title, x, "times the baseline (below 1: better)", _drawn(over), level=1.0))
    optimal = subject.optimal(process)
    if optimal is not None:
        left = [Line(method, _left(optimal, line.points)) for method, line in zip(finals, plain, strict=True)]
        charts.append(Chart("reducible", "What is left to learn", x, "loss − optimal loss (log scale)", _drawn(left), log=True))
    return [chart for chart in charts if chart.lines]


def training_charts(subject: Subject) -> list[Chart]:
    """For one run: the training loss as it fell, and by noise level at a few moments."""
    run = subject.comparison.outcomes[0]
    rows = [row for row in run.metrics() if row.get("loss") is not None and _drawable(row["loss"])]
    if not rows:
        return []
    points = [Point(row["step"], (row["loss"],)) for row in thinned(rows, MOST_POINTS)]
    through = Chart(
        "training", "Training loss", "step", "mean since the point before", (Line(subject.baseline, tuple(points)),)
    )
    charts = [_with_scale(through)]
    known = [row for row in rows if any(value is not None for value in row.get("loss_by_level") or [])]
    if known:
        moments = thinned(known, 4)
        lines = []
        for method, row in zip(moments_named([f"step {row['step']:,}" for row in moments]), moments, strict=True):
            levels = row["loss_by_level"]
            found = [Point((k + 0.5) / len(levels), (value,)) for k, value in enumerate(levels) if _positive(value or 0)]
            lines.append(Line(method, tuple(found)))
        optimal = subject.optimal(run.process)
        if optimal is not None:
            trusted = zip(optimal.u[~optimal.memorised].tolist(), optimal.loss[~optimal.memorised].tolist(), strict=True)
            lines.append(Line(OPTIMAL, tuple(Point(u, (value,)) for u, value in trusted if _positive(value))))
        x, y = "noise level u (0: least noise, 1: most)", "running training loss (log scale)"
        charts.append(Chart("training-levels", "Training loss by noise level", x, y, _drawn(lines), log=True, legend=True))
    return [chart for chart in charts if chart.lines]


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit that suits a length of time, and its seconds."""
    return ("s", 1.0) if seconds < 600 else ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """At most so many rows, evenly spaced, the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round((i + 1) * len(rows) / most) - 1] for i in range(most)]


def _judged(runs: list[Outcome], metric: str | None, x: Callable[[Evaluation], float]) -> Iterable[Point]:
    """A point for each share of the budget, over the seeds that got there (finished ones alone, if there are any)."""
    runs = [run for run in runs if run.final is not None] or runs
    by_share: dict[float, list[tuple[int, Evaluation]]] = {}
    for run in runs:
        for found in run.evaluations:
            if _drawable(judged(found, metric)):
                by_share.setdefault(found.share, []).append((run.seed, found))
    for _, found_at in sorted(by_share.items()):
        seeds, evaluations = zip(*found_at, strict=True)
        yield Point(mean(x(found) for found in evaluations), tuple(judged(found, metric) for found in evaluations), seeds)


def _last(runs: list[Outcome]) -> list[tuple[Outcome, Evaluation]]:
    """The last evaluation of each run, of finished runs if there are any."""
    runs = [run for run in runs if run.final is not None] or runs
    return [(run, run.evaluations[-1]) for run in runs if run.evaluations]


def _by_level(runs: list[tuple[Outcome, Evaluation]], base: dict[int, Evaluation] | None = None) -> Iterable[Point]:
    """Held-out losses, or their ratios to those of the baseline with the same seed."""
    pairs = [(run.seed, found) for run, found in runs if base is None or _comparable(found, base.get(run.seed))]
    levels = {len(found.held_out) for _, found in pairs}
    if len(levels) != 1:
        return
    count = levels.pop()
    for k in range(count):
        values = [found.held_out[k] / (1 if base is None else base[seed].held_out[k]) for seed, found in pairs]
        if all(map(_positive, values)):
            yield Point((k + 0.5) / count, tuple(values), tuple(seed for seed, _ in pairs))


def _left(optimal: OptimalLoss, points: Sequence[Point]) -> tuple[Point, ...]:
    """Losses less the optimal loss, where that means something and something is left."""
    u = torch.tensor([point.x for point in points], dtype=torch.float64)
    known = u >= optimal.u[~optimal.memorised].min() if not optimal.memorised.all() else u > 1
    found = []
    for point, best, trusted in zip(points, optimal.at(u).tolist(), known.tolist(), strict=True):
        values = tuple(value - best for value in point.values)
        if trusted and all(map(_positive, values)):
            found.append(Point(point.x, values, point.seeds))
    return tuple(found)


def _drawable(value: float) -> bool:
    """Finite, and of a size that an axis can show."""
    return abs(value) < LARGEST


def _positive(value: float) -> bool:
    return 1 / LARGEST < value < LARGEST


def _comparable(found: Evaluation, base: Evaluation | None) -> bool:
    return base is not None and base.share == found.share and len(base.held_out) == len(found.held_out) and all(base.held_out)


def _drawn(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.points)


def _with_scale(chart: Chart) -> Chart:
    """The chart, with a logarithmic axis if its values span a factor of more than five."""
    values = chart.values
    log = all(map(_positive, values)) and max(values) > 5 * min(values)
    y = chart.y.replace("better)", "better, log scale)") if "better)" in chart.y else f"{chart.y} (log scale)"
    return Chart(chart.name, chart.title, chart.x, y, chart.lines, log=True) if log else chart


# The density of draws through training: a panel for each method, thinned to rows of equal spans of steps --------------


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
    found = build_process(process).log_snr(middles(levels, dtype=torch.float64)).tolist()
    return [round(value, 3) if math.isfinite(value) else None for value in found]


def log_snr_ticks(process: str) -> list[tuple[float, float]]:
    """Round values of log SNR and where they are in u, no two too close to be read."""
    known = [(value, (k + 0.5) / 500) for k, value in enumerate(log_snr_of(process, 500)) if value is not None]
    found: list[tuple[float, float]] = []
    if not known or known[0][0] == known[-1][0]:
        return found
    curve, u = np.array(known).T
    for value in MaxNLocator(10).tick_values(curve.min(), curve.max())[::-1]:
        place = float(np.interp(-value, -curve, u))
        if curve.min() <= value <= curve.max() and (not found or place - found[-1][1] >= 0.11):
            found.append((float(value), place))
    return found


def scale_texts(reach: int) -> list[str]:
    """What stands at the ends and the doublings of the colour scale."""
    fractions = {-3: "⅛", -2: "¼", -1: "½"}
    texts = [fractions.get(k, str(2**k) if k >= 0 else "") for k in range(-reach, reach + 1)]
    return [f"≤ {texts[0]}", *texts[1:-1], f"≥ {texts[-1]}"]
