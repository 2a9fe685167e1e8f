"""Pieces of the page that several of its sections use: HTML, and figures as SVG."""

import base64
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from noisewise.looking.palette import GREY, Method
from noisewise.report.charts import Chart, HeatMap, Panel, log_snr_of
from noisewise.report.figures import GRID, INK, SOFT, STYLE, draw_chart, draw_panel
from noisewise.report.subject import Subject
from noisewise.report.thumbnails import webp


@dataclass(frozen=True)
class Part:
    """A section: `name` is its anchor, `data` what the script needs by the ids of its charts."""

    name: str
    title: str
    html: str
    data: dict[str, Any] = field(default_factory=dict)
    intro: str = ""  # stands below the title, on wide screens beside the rest

    def section(self) -> str:
        head = f'<div class="head"><h2>{escape(self.title)}</h2>{self.intro}</div>'
        return f'<section id="{self.name}">{head}\n<div class="body">{self.html}</div>\n</section>'


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what is read, and the exact value behind it."""

    text: str
    value: float | int | str | None = None
    name: str = ""  # what the value is, as in results.jsonl

    def html(self, left: bool = False, more: bool = False) -> str:
        """As a cell of numbers, or of words (`left`); one with `more` than the decisive numbers is left out on a phone."""
        exact = self.value if isinstance(self.value, str) else repr(self.value)
        value = "" if self.value is None else f' data-value="{escape(exact)}"'
        name = f' data-name="{escape(self.name)}"' if self.name else ""
        return f"<td{_kinds(left, more)}{name}{value}>{escape(self.text)}</td>"


def _kinds(left: bool, more: bool) -> str:
    kinds = " ".join(["left"] * left + ["more"] * more)
    return f' class="{kinds}"' if kinds else ""


def number(value: float) -> str:
    """A number in a text: four significant digits, all digits before the point."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def table(
    headings: Sequence[str], rows: Iterable[str], kind: str = "", left: Sequence[bool] = (), more: Sequence[bool] = ()
) -> str:
    """A table that scrolls sideways on its own where it is too wide; columns of words stand `left`."""
    none = [False] * len(headings)
    marks = zip(headings, left or none, more or none, strict=True)
    head = "".join(f'<th scope="col"{_kinds(side, spare)}>{escape(heading)}</th>' for heading, side, spare in marks)
    body = "\n".join(rows)
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def per_schedule(subject: Subject, made: Sequence[str]) -> str:
    """A block for each schedule, named where there are several."""
    blocks = []
    for i, (process, html) in enumerate(zip(subject.schedules, made, strict=True)):
        name = f'<h3 class="process">{escape(process)} schedule</h3>' if len(subject.schedules) > 1 else ""
        blocks.append(f'<div class="schedule" data-schedule="{i}">{name}{html}</div>' if html else "")
    return "\n".join(blocks)


def colour(method: Method) -> str:
    """As CSS: the grey of the baseline is another one in the dark."""
    return "var(--baseline)" if method.colour == GREY else method.colour


def swatch(method: Method) -> str:
    """A short piece of the method's line."""
    dashes = " ".join(f"{length:g}" for length in method.dash)
    return (
        f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><line x1="1" y1="5" x2="25" y2="5" '
        f'style="stroke:{colour(method)}" stroke-dasharray="{dashes}"/></svg>'
    )


def legend(methods: Sequence[Method], kind: str = "") -> str:
    """Lines and their names."""
    entries = "".join(f"<span>{swatch(method)}{escape(method.name)}</span>" for method in methods)
    return f'<p class="legend {kind}">{entries}</p>'


def details(summary: str, html: str) -> str:
    """Something that is there for whoever wants it."""
    return f"<details><summary>{escape(summary)}</summary>{html}</details>"


def choice(name: str, label: str, texts: Mapping[str, str], first: str) -> str:
    """Buttons of which one is pressed, by their values."""
    buttons = "".join(
        f'<label><input type="radio" name="{name}" id="{name}-{value}" value="{value}"{" checked" * (value == first)}>'
        f"<span>{escape(text)}</span></label>"
        for value, text in texts.items()
    )
    return f'<div class="choice {name}s" role="group" aria-label="{label}">{buttons}</div>'


def method_head(method: Method) -> str:
    """The head of a table's row."""
    return f'<th scope="row"><span class="name">{swatch(method)}<span>{breakable(method.name)}</span></span></th>'


def caption(method: Method, more: str = "") -> str:
    """The head of a figure that belongs to one method."""
    end = f'<span class="seed">{escape(more)}</span>' if more else ""
    return f"<figcaption>{swatch(method)}<span>{breakable(method.name)}</span>{end}</figcaption>"


def breakable(name: str) -> str:
    """A spec that may go on in the next line where its parts end."""
    return re.sub(r"(:|,|\+|=(?=\(|\w{8}))", r"\1<wbr>", escape(name))


# Figures: matplotlib's SVG with the page's own font and colours, and the numbers shown on hover -----------------------


CHART, PANEL = (294, 199), (189, 180)  # width and height, in points
MARGINS = {CHART: (36, 14, 21, 31), PANEL: (31, 8, 31, 30)}  # left, right, top, bottom
VARIABLES = {INK: "--ink", SOFT: "--soft", GRID: "--grid", GREY: "--baseline"}  # colours that differ in the dark


def chart_svg(chart: Chart, name: str) -> tuple[str, dict[str, Any]]:
    """The chart and its hover data; `name` is its own on the page."""
    said = ", ".join(line.method.name for line in chart.lines)
    label = f"{chart.title}. Across: {chart.x}. Up: {chart.y}. Lines: {said}."
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        axes = _axes(CHART)
        draw_chart(axes, chart)
        lines = [
            {
                "method": line.method.index,
                "name": line.method.name,
                "colour": colour(line.method),
                "points": [
                    {"x": _short(point.x), "y": [_short(value) for value in point.values], "seeds": list(point.seeds)}
                    for point in line.points
                ],
            }
            for line in chart.lines
        ]
        data = {"box": _box(axes), "log": chart.log, "x": chart.x, "y": chart.y.partition(" (")[0], "lines": lines}
        return _svg(axes.figure, "chart", name, label), data


def panel_svg(panel: Panel, heat: HeatMap, name: str) -> tuple[str, dict[str, Any]]:
    """A method's heat map with all its views, of which the page shows one, and its hover data."""
    label = f"{panel.method.name}: how much each noise level was trained, times uniform, through {panel.end} steps"
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        axes = _axes(PANEL)
        draw_panel(axes, panel, heat, list(panel.views))
        for image in axes.images:
            image.set_interpolation("none")  # a pixel for each number
        views = {view: _deflated(values) for view, values in panel.views.items()}
        data = {"box": _box(axes), "end": panel.end, "snr": log_snr_of(heat.process), "views": views}
        return _svg(axes.figure, "heat", name, label), data


def _axes(size: tuple[int, int]) -> Any:
    """The axes of a figure of their own, at the same place in all figures of a size."""
    (width, height), (left, right, top, bottom) = size, MARGINS[size]
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    place = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    axes = figure.add_axes(place)
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    return axes


def _box(axes: Any) -> dict[str, list[float]]:
    """What the ends of the axes are, and where they lie in the SVG."""
    place, height = axes.get_window_extent(), axes.figure.bbox.height
    across, up = [place.x0, place.x1], [height - place.y0, height - place.y1]
    return {"x": [*axes.get_xlim(), *across], "y": [*axes.get_ylim(), *up]}


def _svg(figure: Figure, kind: str, name: str, label: str) -> str:
    """What matplotlib wrote, in fewer characters: classes instead of ids, variables for colours, the page's own font."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    body = file.getvalue().partition("</defs>")[2].rpartition("</svg>")[0]
    body = re.sub(r'<g id="[^"]*-method-(-?\d+)-\w+">', r'<g class="series" data-method="\1">', body)
    body = re.sub(r'<g id="[^"]*"/>', "", body)
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    body = re.sub(r' id="view-(\w+)"', r' class="\1"', body)
    body = re.sub(r" font-family: [^;\"]*;?| transform=\"rotate\(-0 [^\"]*\"", "", body)
    body = re.sub(r' (?:d|x|y)="[^"]*"', lambda match: re.sub(r"\d+\.\d{3,}", _rounded, match[0]), body)
    body = re.sub(r"data:image/png;base64,\s*([^\"]*)", _as_webp, body)
    body = re.sub("|".join(VARIABLES), lambda match: f"var({VARIABLES[match[0]]})", body)
    body = re.sub(r"\s*\n\s*", " ", body).replace("> <", "><").replace("xlink:href", "href")
    width, height = (round(72 * size) for size in figure.get_size_inches())
    return (
        f'<svg class="{kind}" id="{name}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f'{body}<g class="hover"></g></svg>'
    )


def _rounded(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}"


def _as_webp(match: re.Match[str]) -> str:
    """The same pixels in half the characters."""
    return webp(Image.open(io.BytesIO(base64.b64decode(match[1]))), lossless=True)


def _deflated(values: NDArray[np.float64]) -> str:
    """Rows of numbers as JSON, three digits each, deflated: some thousand of them for every map."""
    rows = [[float(f"{value:.3g}") if np.isfinite(value) else None for value in row] for row in values]
    return base64.b64encode(zlib.compress(as_json(rows).encode(), 9)).decode()


def _short(value: float) -> float:
    """Enough digits for a hover label; the exact numbers are in the tables."""
    return float(f"{value:.5g}")


def as_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
