"""What an analysis shows: its progress, the axes and lines that its pictures share, and the files it leaves."""

import csv
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rich.table import Table

from noisewise.looking.palette import moment_colours
from noisewise.plain_files import writing
from noisewise.processes import Process
from noisewise.training.display import Display, clock, line
from noisewise.training.trainer import Trainer


@dataclass(frozen=True)
class Analysis:
    """A named result: a figure, the rows behind it, and what it says."""

    name: str  # of the files
    figure: Figure
    rows: list[dict[str, Any]]  # of plain numbers and words, all with the same keys
    says: list[str] = field(default_factory=list)  # sentences for the terminal: findings, with their numbers, and the cost


def write_analysis(analysis: Analysis, folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write NAME.csv and a picture in each format; returns the paths."""
    with writing(f"--out {folder}", folder):
        folder.mkdir(parents=True, exist_ok=True)
    table = folder / f"{analysis.name}.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(analysis.rows[0]))
        writer.writeheader()
        writer.writerows(analysis.rows)
    pictures = [folder / f"{analysis.name}.{kind}" for kind in formats]
    for path in pictures:
        analysis.figure.savefig(path, dpi=150)
    return [table, *pictures]


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
    errors: Sequence[Sequence[float]],
    steps: Sequence[int],
) -> None:
    """A line for each moment of training, with a band of one standard error."""
    values = np.asarray(curves, dtype=float)
    bands = np.nan_to_num(np.asarray(errors, dtype=float))
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


class Watch:
    """Told of the moments of training that are looked at, and of the work there."""

    def __init__(self) -> None:
        self.display = Display()
        self.trainer: Trainer | None = None
        self.what, self.done, self.total = "", 0, 0  # of the work at this moment; both 0 while the model trains
        self.began = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator["Watch"]:
        """Show it around a block."""
        with self.display.shown(self._drawn, transient=True):
            yield self

    def tell(self, message: str) -> None:
        """Something that the user should read."""
        self.display.say(message, "yellow")

    @contextmanager
    def moment(self, trainer: Trainer, total: int) -> Iterator[None]:
        """Around the work at one moment, of so many pieces."""
        self.trainer = trainer
        with self.work(f"looking at step {trainer.step}", total, f"step {trainer.step}: looked at"):
            yield

    @contextmanager
    def work(self, what: str, total: int, after: str | None = None) -> Iterator[None]:
        """Around work of so many pieces; a log file gets a line `after` it."""
        self.what, self.done, self.total = what, 0, total
        yield
        self.done = self.total = 0
        if not self.display.terminal:
            self.display.say(f"{after or what}, {clock(time.monotonic() - self.began)} since the start")

    def advance(self, pieces: int = 1) -> None:
        """So many pieces more are done."""
        self.done += pieces

    def _drawn(self) -> Table:
        spent = f"{clock(time.monotonic() - self.began)} spent"
        if self.total:
            return line(self.what, self.done / self.total, spent)
        if self.trainer is None:
            return line("opening data and model", spent)
        return line("training to the next moment", f"step {self.trainer.step}", spent)
