"""Line charts as SVG for the page: its own text, its own colours in light and dark, and classes for the script to find."""

import json
from html import escape
from typing import Any

from noisewise.looking.palette import Method
from noisewise.report.axis import Axis, axis_around, tick_text
from noisewise.report.charts import Chart, Line
from noisewise.report.marks import stroke, words

WIDTH, HEIGHT = 420, 284
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 30, 44
FEW = 12  # points that get a mark each


def axes_of(chart: Chart) -> tuple[Axis, Axis]:
    """Where the numbers of a chart lie in its picture."""
    across = [point.x for line in chart.lines for point in line.points]
    levels = max(across) <= 1 and min(across) > 0  # noise levels: all of them are shown
    x = Axis(0, 1, LEFT, WIDTH - RIGHT) if levels else axis_around(across, LEFT, WIDTH - RIGHT, zero=True)
    values = chart.values + ([chart.level] if chart.level is not None else [])
    return x, axis_around(values, HEIGHT - BOTTOM, TOP, log=chart.log)


def draw(chart: Chart, name: str) -> str:
    """The chart; `name` is its own on the page."""
    x, y = axes_of(chart)
    parts = [*_frame(chart, x, y)]
    parts += [f'<g class="series" data-method="{line.method.index}">{_band(line, x, y)}</g>' for line in chart.lines]
    parts += [f'<g class="series" data-method="{line.method.index}">{_curve(line, x, y)}</g>' for line in reversed(chart.lines)]
    said = ", ".join(line.method.name for line in chart.lines)
    label = escape(f"{chart.title}. Across: {chart.x}. Up: {chart.y}. Lines: {said}.")
    return (
        f'<svg class="chart" id="{name}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'{"".join(parts)}<g class="hover"></g></svg>'
    )


def hover_data(chart: Chart) -> dict[str, Any]:
    """What the script needs to find the nearest point and to say what it is."""
    x, y = axes_of(chart)
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
    box = {key: [axis.low, axis.high, axis.start, axis.end, axis.log] for key, axis in (("x", x), ("y", y))}
    return {"axes": box, "x": chart.x, "y": chart.y.partition(" (")[0], "lines": lines}


def colour(method: Method) -> str:
    """As CSS: the grey of the baseline is another one in the dark."""
    return "var(--baseline)" if method.index == 0 else method.colour


def dashes(method: Method) -> str:
    """As SVG."""
    return " ".join(f"{length:g}" for length in method.dash)


def swatch(method: Method) -> str:
    """A short piece of the method's line."""
    return (
        f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><line x1="1" y1="5" x2="25" y2="5" '
        f'style="stroke:{colour(method)}" stroke-dasharray="{dashes(method)}"/></svg>'
    )


def _frame(chart: Chart, x: Axis, y: Axis) -> list[str]:
    right, foot = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [words("label", 2, 12, chart.y, "start"), words("label", (LEFT + right) / 2, HEIGHT - 6, chart.x)]
    for value in y.ticks():
        parts.append(stroke("grid", LEFT, y.at(value), right, y.at(value)))
        parts.append(words("tick", LEFT - 7, y.at(value) + 4, tick_text(value), "end"))
    for value in x.ticks(5):
        parts.append(stroke("axis", x.at(value), foot, x.at(value), foot + 4))
        parts.append(words("tick", x.at(value), foot + 17, tick_text(value)))
    parts.append(stroke("axis", LEFT, foot, right, foot))
    if chart.level is not None:
        parts.append(stroke("level", LEFT, y.at(chart.level), right, y.at(chart.level)))
    return parts


def _band(line: Line, x: Axis, y: Axis) -> str:
    """The range over seeds; a bar where there is one point alone."""
    if all(len(point.values) < 2 for point in line.points):
        return ""
    upper = [(x.at(point.x), y.at(max(point.values))) for point in line.points]
    lower = [(x.at(point.x), y.at(min(point.values))) for point in line.points]
    if len(line.points) == 1:
        return f'<path class="range" style="stroke:{colour(line.method)}" d="M{_place(*upper[0])}L{_place(*lower[0])}"/>'
    around = "L".join(_place(*place) for place in [*upper, *lower[::-1]])
    return f'<path class="band" style="fill:{colour(line.method)}" d="M{around}Z"/>'


def _curve(line: Line, x: Axis, y: Axis) -> str:
    places = [(x.at(point.x), y.at(point.y)) for point in line.points]
    drawn = (
        f'<path class="line" style="stroke:{colour(line.method)}" stroke-dasharray="{dashes(line.method)}" '
        f'd="M{"L".join(_place(*place) for place in places)}"/>'
    )
    if len(places) > FEW:
        return drawn
    return drawn + "".join(
        f'<circle class="mark" style="fill:{colour(line.method)}" cx="{across:.1f}" cy="{up:.1f}" r="3"/>'
        for across, up in places
    )


def _place(across: float, up: float) -> str:
    return f"{across:.1f} {up:.1f}"


def _short(value: float) -> float:
    """Enough digits for a hover label; the exact numbers are in the tables."""
    return float(f"{value:.5g}")


def as_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
