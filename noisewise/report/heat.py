"""The density of draws through training: thinned, coloured, and drawn as one panel for each method."""

import base64
import io
import math
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from noisewise.looking.palette import Method
from noisewise.report.axis import Axis, tick_text
from noisewise.report.marks import stroke, words
from noisewise.report.subject import Subject
from noisewise.spec import build_process

MOST_ROWS = 120
VIEWS = {"draws": "density_by_level", "objective": "objective_by_level"}
ANCHORS = ("#0b3c5d", "#5497c4", "#f1efe9", "#e39350", "#7a2a08")  # far below uniform, uniform, far above
WIDTH, HEIGHT = 270, 256
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 44, 42


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


def colour_table(count: int = 255) -> NDArray[np.uint8]:
    """(count, 3) colours, the middle one for uniform, blended so that equal steps look equal (in OKLab)."""
    anchors = np.array([[int(text[i : i + 2], 16) for i in (1, 3, 5)] for text in ANCHORS]) / 255
    lab = np.cbrt(_linear(anchors) @ TO_CONES.T)
    places = np.linspace(0, 1, len(ANCHORS))
    blended = np.stack([np.interp(np.linspace(0, 1, count), places, column) for column in lab.T], 1)
    light = np.clip(blended**3 @ np.linalg.inv(TO_CONES).T, 0, 1)
    return np.round(255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)).astype(np.uint8)


# linear sRGB to the cone responses of OKLab (Ottosson 2020); what follows them there is linear and makes no difference
TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)


def _linear(colours: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)


def indices(values: NDArray[np.float64], reach: int, count: int = 255) -> NDArray[np.uint8]:
    """Places in the colour table: the logarithm of the density, cut off at both ends."""
    scaled = np.log2(np.clip(np.nan_to_num(values, nan=1.0), 2.0**-reach, 2.0**reach)) / reach
    return np.round((scaled + 1) / 2 * (count - 1)).astype(np.uint8)


def as_png(values: NDArray[np.float64], reach: int) -> str:
    """The picture of a panel as a data address, the first row lowest."""
    picture = Image.fromarray(indices(values, reach)[::-1].copy(), "P")
    picture.putpalette(colour_table().tobytes())
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def log_snr_of(process: str, levels: int = 50) -> list[float | None]:
    """log SNR in the middle of equal intervals of u; None where it is infinite, as at the end of zero terminal SNR."""
    u = (torch.arange(levels, dtype=torch.float64) + 0.5) / levels
    found = build_process(process).log_snr(u).tolist()
    return [round(value, 3) if math.isfinite(value) else None for value in found]


def log_snr_ticks(process: str, most: int = 5) -> list[tuple[float, float]]:
    """Round values of log SNR and where they are in u, no two too close to be read."""
    known = [(value, (k + 0.5) / 500) for k, value in enumerate(log_snr_of(process, 500)) if value is not None]
    found: list[tuple[float, float]] = []
    if not known or known[0][0] == known[-1][0]:
        return found
    curve, u = np.array(known).T
    for value in Axis(curve.min(), curve.max(), 0, 1).ticks(2 * most)[::-1]:
        place = float(np.interp(-value, -curve, u))
        if not found or place - found[-1][1] >= 0.11:
            found.append((value, place))
    return found


def draw_panel(panel: Panel, heat: HeatMap, name: str) -> str:
    """One panel as SVG: noise levels across, steps up."""
    x, y = Axis(0, 1, LEFT, WIDTH - RIGHT), Axis(0, heat.end, HEIGHT - BOTTOM, TOP)
    right, foot, top = WIDTH - RIGHT, HEIGHT - BOTTOM, y.at(panel.end)
    parts = [
        f'<image class="{view}" href="{as_png(values, heat.reach)}" x="{LEFT}" y="{top:.1f}" width="{right - LEFT}" '
        f'height="{foot - top:.1f}" preserveAspectRatio="none"/>'
        for view, values in panel.views.items()
    ]
    for value in x.ticks(5):
        parts.append(stroke("axis", x.at(value), foot, x.at(value), foot + 4))
        parts.append(words("tick", x.at(value), foot + 17, tick_text(value)))
    for value, place in log_snr_ticks(heat.process):
        parts.append(stroke("axis", x.at(place), TOP - 4, x.at(place), TOP))
        parts.append(words("tick", x.at(place), TOP - 9, tick_text(value)))
    for value in y.ticks(5):
        parts.append(stroke("axis", LEFT - 4, y.at(value), LEFT, y.at(value)))
        parts.append(words("tick", LEFT - 7, y.at(value) + 4, tick_text(value), "end"))
    parts.append(f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{foot - TOP}"/>')
    middle = (LEFT + right) / 2
    parts.append(words("label", 2, TOP - 26, "step", "start"))
    parts.append(words("label", middle, TOP - 26, "log SNR"))
    parts.append(words("label", middle, HEIGHT - 6, "noise level u (0: least noise)"))
    label = escape(f"{panel.method.name}: how often each noise level was drawn, times uniform, through {panel.end} steps")
    return (
        f'<svg class="heat" id="{name}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'data-box="{LEFT} {top:.1f} {right} {foot}" data-end="{panel.end}">{"".join(parts)}</svg>'
    )


def scale_texts(reach: int) -> list[str]:
    """What stands at the ends and the doublings of the colour scale."""
    fractions = {-3: "⅛", -2: "¼", -1: "½"}
    texts = [fractions.get(k, str(2**k) if k >= 0 else "") for k in range(-reach, reach + 1)]
    return [f"≤ {texts[0]}", *texts[1:-1], f"≥ {texts[-1]}"]
