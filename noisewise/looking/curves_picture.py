"""The picture of previews: p, w and p·w in columns, over the model's time and over log SNR in rows, a line for each recipe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from noisewise.looking.palette import COLOURS
from noisewise.looking.recipe_curves import Axis, Preview

COLUMNS = {"p": "p: how often drawn", "w": "w: how much a loss counts", "pw": "p·w: the objective"}
ROWS: dict[Axis, str] = {"time": "t, as fed to the model", "log_snr": "log SNR"}
TAIL = 0.002  # of the draws and of the objective, left out at each end of an axis that may have no end


def draw_previews(previews: Sequence[Preview], path: str | Path, title: str = "") -> Path:
    """Draw recipes on one process into a picture file, whose ending says which kind (needs matplotlib)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("drawing needs matplotlib: pip install 'noisewise[train]'") from None
    if not previews:
        raise ValueError("there is nothing to draw: give at least one preview")
    figure = Figure(figsize=(11, 5.8), layout="constrained")
    panels = figure.subplots(2, 3, sharex="row")
    for row, axis in zip(panels, ROWS, strict=True):
        for panel, name in zip(row, COLUMNS, strict=True):
            _draw(panel, previews, axis, name)
    labels = [one.title for one in previews]
    if any(labels) and labels != [title]:
        handles = panels[0][0].get_lines()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(previews), 4), frameon=False)
    if title:
        figure.suptitle(title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw(panel: Any, previews: Sequence[Preview], axis: Axis, name: str) -> None:
    low, high = limits(previews, axis)
    top = 0.0
    for index, one in enumerate(previews):
        along, curve = getattr(one, axis), one.shown(axis, name)
        shown = np.isfinite(along) & (along >= min(low, high)) & (along <= max(low, high))
        top = max(top, float(curve[shown].max(initial=0)))
        kept, colour = np.isfinite(along), COLOURS[index % len(COLOURS)]
        width = 1.6 + 0.6 * min(len(previews) - 1 - index, 4)  # where lines coincide, the lower ones can still be seen
        panel.plot(along[kept], curve[kept], color=colour, linestyle="-" if index < len(COLOURS) else "--", linewidth=width)
        if name != "w":
            panel.fill_between(along[kept], curve[kept], color=colour, alpha=0.08, linewidth=0)
    panel.set_xlim(low, high)
    panel.set_ylim(0, max(top, 1e-9) * (1.3 if name == "w" else 1.08))
    panel.set_xlabel(f"{ROWS[axis]}  (noise →)")
    panel.grid(alpha=0.25, linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    if axis == "time":
        panel.set_title(COLUMNS[name], fontsize=11)
    if name == "p":
        even = axis == "time" and previews[0].bounded_time
        panel.set_ylabel("1: all times alike" if even else f"per unit of {'t' if axis == 'time' else 'log SNR'}")


def limits(previews: Sequence[Preview], axis: Axis) -> tuple[float, float]:
    """The axis from the least noise to the most; where it has no end, without the last thousandths of draws and objective."""
    along = np.concatenate([getattr(one, axis) for one in previews])
    along = along[np.isfinite(along)]
    if axis == "log_snr" or not previews[0].bounded_time:
        ends = np.array([one.quantiles((TAIL, 1 - TAIL), axis)[name] for one in previews for name in ("p", "pw")])
        ends = np.clip(ends, along.min(), along.max())
        falling = axis == "log_snr"
        low, high = (ends[:, 0].max(), ends[:, 1].min()) if falling else (ends[:, 0].min(), ends[:, 1].max())
    else:
        low, high = along.min(), along.max()
    return (float(low) - 0.5, float(high) + 0.5) if low == high else (float(low), float(high))
