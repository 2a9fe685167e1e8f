"""What the pictures of analyses share: an axis of noise levels that says which end is which, and lines over it."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from noisewise.looking.palette import moment_colours
from noisewise.processes import Process

NOISE = "noise level u  (0: least noise, 1: most)"
MOST_NAMED = 8  # lines that a legend can tell apart


def new_figure(width: float, height: float) -> Figure:
    """An empty figure whose parts make room for one another."""
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))


def noise_axis(axis: Any, process: Process | None = None) -> None:
    """u from 0 to 1 below, and the timesteps it stands for above, where there are timesteps."""
    axis.set_xlim(0, 1)
    axis.set_xlabel(NOISE)
    steps = None if process is None else process.steps
    if steps is not None:
        above = axis.secondary_xaxis("top", functions=(lambda u: u * steps, lambda t: t / steps))
        above.set_xlabel("timestep t", fontsize=9)
        above.tick_params(labelsize=8)


def plain_axis(axis: Any) -> None:
    """A light grid, and no box around it."""
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines["right"].set_visible(False)


def lines_over_noise(
    axis: Any,
    u: Sequence[float],
    curves: Sequence[Sequence[float]],
    errors: Sequence[Sequence[float]] | None,
    steps: Sequence[int],
) -> None:
    """A line for each moment of training, with a band of one standard error."""
    values = np.asarray(curves, dtype=float)
    bands = np.zeros_like(values) if errors is None else np.nan_to_num(np.asarray(errors, dtype=float))
    floor = values[values > 0].min() / 3 if (values > 0).any() else 1e-12
    for colour, step, curve, band in zip(moment_colours(len(steps)), steps, values, bands, strict=True):
        axis.plot(u, curve, color=colour, linewidth=1.6, marker="o", markersize=2.5, label=f"step {step:,}")
        axis.fill_between(u, np.maximum(curve - band, floor), curve + band, color=colour, alpha=0.2, linewidth=0)


def name_moments(figure: Figure, axis: Any, axes: Sequence[Any], steps: Sequence[int]) -> None:
    """A legend of the moments, or a scale of colours where there are many."""
    if len(steps) <= MOST_NAMED:
        axis.legend(frameon=False, fontsize=8)
        return
    colours = matplotlib.colors.ListedColormap(moment_colours(len(steps)))
    scale = matplotlib.cm.ScalarMappable(matplotlib.colors.BoundaryNorm(np.arange(len(steps) + 1), len(steps)), colours)
    bar = figure.colorbar(scale, ax=list(axes), label="training step", pad=0.02)
    shown = np.unique(np.linspace(0, len(steps) - 1, MOST_NAMED).round().astype(int))
    bar.set_ticks((shown + 0.5).tolist(), labels=[f"{steps[i]:,}" for i in shown])
