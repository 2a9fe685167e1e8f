"""The picture of a comparison: samples, density through training, loss by noise level."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from noisewise.evaluation.pictures import grid
from noisewise.study.measure import Measured
from noisewise.study.table import by_sampler
from noisewise.training.folder import read_rows

COLOURS = ("#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw_comparison(results: list[Measured], folders: list[Path], path: Path) -> None:
    """Draw a PNG: a column for each sampler, and one that compares losses."""
    grouped = by_sampler(results)
    of_sampler = {result.sampler: folder for result, folder in reversed(list(zip(results, folders, strict=True)))}
    figure = Figure(figsize=(3.1 * (len(grouped) + 1), 6.2), layout="constrained")
    axes = figure.subplots(2, len(grouped) + 1, squeeze=False)
    pictures = results[0].samples.ndim == 4 and results[0].samples.shape[1] in (1, 3)  # not latents
    histories = {
        name: [row for row in read_rows(folder / "metrics.jsonl") if "density_by_level" in row]
        for name, folder in of_sampler.items()
    }
    largest = max([2.0, *(value for rows in histories.values() for row in rows for value in row["density_by_level"])])
    for column, (sampler, runs) in enumerate(grouped.items()):
        top, bottom = axes[0, column], axes[1, column]
        if pictures:
            top.imshow(grid(runs[0].samples), interpolation="nearest")
        top.set_axis_off()
        distance = "" if runs[0].distance is None else f"\n{runs[0].metric} {np.mean([run.distance for run in runs]):.3g}"
        top.set_title(sampler + distance, fontsize=10, color=COLOURS[column % len(COLOURS)], fontweight="bold")
        draw_density(bottom, histories[sampler], largest)
    draw_losses(axes[0, -1], axes[1, -1], grouped)
    figure.savefig(path, dpi=110)


def draw_density(axis: Any, rows: list[dict[str, Any]], largest: float) -> None:
    """How often each noise level was drawn, as training went on; one scale of colours for all samplers."""
    density = np.array([row["density_by_level"] for row in rows])
    steps = [0, *(row["step"] for row in rows)]
    edges = np.linspace(0, 1, density.shape[1] + 1)
    image = axis.pcolormesh(edges, steps, density, cmap="viridis", vmin=0, vmax=largest)
    axis.set(xlabel="u (0: least noise)", ylabel="step")
    axis.set_title("draws, times uniform", fontsize=9)
    axis.figure.colorbar(image, ax=axis, fraction=0.05)


def draw_losses(top: Any, bottom: Any, grouped: dict[str, list[Measured]]) -> None:
    """Held-out loss by noise level, and over the baseline's."""
    baseline: np.ndarray | None = None
    for i, (sampler, runs) in enumerate(grouped.items()):
        loss = np.mean([run.held_out for run in runs], axis=0)
        baseline = loss if baseline is None else baseline
        u = (np.arange(len(loss)) + 0.5) / len(loss)
        top.plot(u, loss, color=COLOURS[i % len(COLOURS)], label=sampler)
        bottom.plot(u, loss / baseline, color=COLOURS[i % len(COLOURS)])
    top.set(yscale="log", xlabel="u (0: least noise)")
    top.set_title("held-out loss", fontsize=9)
    top.legend(frameon=False, fontsize=8)
    bottom.set(xlabel="u (0: least noise)")
    bottom.set_title(f"held-out loss over {next(iter(grouped))}'s", fontsize=9)
