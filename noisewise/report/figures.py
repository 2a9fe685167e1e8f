"""The figures of a report, drawn by matplotlib: each once, for the page and for papers."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from noisewise.looking.palette import AROUND_UNIFORM, Method
from noisewise.plain_files import writing
from noisewise.report.charts import (
    Chart,
    HeatMap,
    Line,
    Panel,
    doublings,
    heat_map,
    log_snr_ticks,
    loss_charts,
    quality_charts,
    scale_texts,
    training_charts,
)
from noisewise.report.subject import Subject, read_subject
from noisewise.report.thumbnails import Picture, corner, pictures_of, read_pixels
from noisewise.words import in_lines

FORMATS = ("png", "svg", "pdf")
INK, SOFT, GRID = "#1b1f24", "#58626d", "#e9ebed"  # as in style.css
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.labelcolor": INK,
    "axes.labelpad": 5.5,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.6,
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": SOFT,
    "xtick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "ytick.color": SOFT,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "lines.markeredgewidth": 0,
    "lines.scale_dashes": False,
    "image.composite_image": False,
    "savefig.bbox": "standard",  # the page counts on the size
    "svg.fonttype": "none",
    "svg.hashsalt": "noisewise",
    "pdf.fonttype": 42,
}
FEW = 12  # points that get a mark each
ROOM = 0.06  # around the data, of their range
LEAST_RANGE = {False: 0.004, True: 0.04}  # of an axis, linear or logarithmic: no drama for differences of next to nothing
EDGE = -0.147  # the left side of the numbers of an axis, in widths of the axes
LETTER = 0.066  # inches of a letter in a legend
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
DENSITY = LinearSegmentedColormap.from_list("density", AROUND_UNIFORM, 255)


def write_figures(target: Path, folder: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw everything that a run's or comparison's folder gives into files; returns their paths."""
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        raise ValueError(f"there is no format {unknown[0]!r}: choose from {', '.join(FORMATS)}")
    subject = read_subject(Path(target))
    with mpl.rc_context(STYLE):
        drawn = all_figures(subject)
        with writing(f"--figures {folder}", Path(folder)):
            Path(folder).mkdir(parents=True, exist_ok=True)
        paths = []
        for name, figure in drawn.items():
            for kind in formats:
                paths.append(Path(folder) / f"{name}.{kind}")
                date = {"Date": None} if kind == "svg" else {"CreationDate": None} if kind == "pdf" else {}
                figure.savefig(paths[-1], dpi=200, metadata=date)
    return paths


def all_figures(subject: Subject) -> dict[str, Figure]:
    """The figures by name; with several schedules, one of each kind for each."""
    found: dict[str, Figure] = {}
    pictures = pictures_of(subject)
    if subject.single and (charts := training_charts(subject)):
        found["training"] = chart_row(charts)
    for process in subject.schedules:
        end = "-" + re.sub(r"[^A-Za-z0-9.=]+", "-", process).strip("-") if len(subject.schedules) > 1 else ""
        for name, charts in (("quality", quality_charts(subject, process)), ("loss", loss_charts(subject, process))):
            if charts:
                found[name + end] = chart_row(charts)
        heat = heat_map(subject, process)
        if heat is not None:
            found["density" + end] = panel_rows(heat, "draws")
            if all("objective" in panel.views for panel in heat.panels):
                found["objective" + end] = panel_rows(heat, "objective")
        mine = [picture for picture in pictures if picture.process == process]
        if mine:
            found["samples" + end] = sample_rows(mine)
    return found


# Charts ---------------------------------------------------------------------------------------------------------------


def chart_row(charts: Sequence[Chart]) -> Figure:
    """Charts side by side, with one legend beneath."""
    together = [chart for chart in charts if not chart.legend]
    methods = list(dict.fromkeys(line.method for chart in together for line in chart.lines))
    width = 3.4 * len(charts)
    names = [in_lines(method.name, int((width - 0.7) / LETTER)) for method in methods]
    longest = max((len(line) for name in names for line in name.splitlines()), default=0)
    columns = max(1, min(len(methods), int(width / (0.5 + LETTER * longest))))
    rows = -(-sum(name.count("\n") + 1 for name in names) // columns) if len(methods) > 1 else 0
    figure = Figure(figsize=(width, 2.7 + 0.17 * rows), layout="constrained")
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        draw_chart(axes, chart, chart.title)
        if chart.legend:
            axes.legend([legend_line(line.method) for line in chart.lines], [line.method.name for line in chart.lines])
    if rows:
        handles = [legend_line(method) for method in methods]
        figure.legend(handles, names, loc="outside lower center", ncols=columns, handlelength=2.4)
    return figure


def draw_chart(axes: Any, chart: Chart, title: str = "") -> None:
    """One chart: lines, the range over seeds around them, and a level to compare with."""
    for line in reversed(chart.lines):  # the baseline on top
        for kind, artist in (("band", _band(axes, line)), ("line", _curve(axes, line))):
            if artist is not None:
                artist.set(gid=f"{chart.name}-method-{line.method.index}-{kind}", clip_on=False)
    if chart.level is not None:
        axes.axhline(chart.level, color=SOFT, linewidth=0.7, linestyle=(0, (1.5, 2)), clip_on=False)
    _fit(axes, chart)
    axes.grid(axis="y", clip_on=False)
    axes.set_xlabel(chart.x)
    label_above(axes, chart.y, EDGE, 12.5)
    axes.set_title(title, loc="left", x=EDGE, pad=23)


def _curve(axes: Any, line: Line) -> Any:
    x, y = [point.x for point in line.points], [point.y for point in line.points]
    (curve,) = axes.plot(x, y, marker="o" if len(x) <= FEW else None, zorder=3, **look(line.method))
    return curve


def _band(axes: Any, line: Line) -> Any:
    """The range over seeds; a bar where there is one point alone."""
    if all(len(point.values) < 2 for point in line.points):
        return None
    x = [point.x for point in line.points]
    low, high = ([pick(point.values) for point in line.points] for pick in (min, max))
    if len(x) > 1:
        return axes.fill_between(x, low, high, color=line.method.colour, alpha=0.14, linewidth=0)
    return axes.vlines(x, low, high, color=line.method.colour, alpha=0.3, linewidth=3.5)


def _fit(axes: Any, chart: Chart) -> None:
    """All data with a little room around them, and a few round numbers on the axes."""
    across = [point.x for line in chart.lines for point in line.points]
    levels = min(across) > 0 and max(across) <= 1  # noise levels: all of them are shown
    axes.set_yscale("log" if chart.log else "linear")
    axes.minorticks_off()
    axes.margins(ROOM)
    axes.set_xlim(0, 1 if levels else None)
    low, high = axes.get_ylim()
    least = LEAST_RANGE[chart.log] * max(abs(low), abs(high))
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
        axes.set_ylim(low, high)
    round_numbers(axes.xaxis, 5)
    round_numbers(axes.yaxis, 6, math.log10(high / low) if chart.log else 0)


def round_numbers(axis: Any, most: int, decades: float = 0) -> None:
    """A few round numbers on an axis, which may be logarithmic and span several decades."""
    axis.set_major_formatter(lambda value, _: tick_text(value))
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))
    if decades > 0.6:
        axis.set_major_locator(
            LogLocator(subs=(1, 2, 5) if decades < 2 else (1, 3) if decades < 3.5 else (1,), numticks=most + 1)
        )


def tick_text(value: float) -> str:
    """A number on an axis: 0.05, 20k, −2, 10⁻⁵."""
    if value <= 0:
        return "0" if value == 0 else f"−{tick_text(-value)}"
    if 1e-3 <= value < 1e9:
        size, unit = (1e6, "M") if value >= 1e6 else (1e3, "k") if value >= 1e4 else (1, "")
        return f"{value / size:,.6g}{unit}" if value < 1e3 or unit else f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    power = "10" + str(int(exponent)).translate(SUPERSCRIPTS)
    return power if float(mantissa) == 1 else f"{float(mantissa):g}·{power}"


def label_above(axes: Any, text: str, x: float, points: float) -> None:
    """What goes up, written above the numbers, where it can be read without turning the head."""
    axes.set_ylabel(text, rotation=0, ha="left", va="baseline")
    axes.yaxis.set_label_coords(x, 1, transform=axes.transAxes + _up(axes, points))


def _up(axes: Any, points: float) -> Any:
    """A way up of a fixed length."""
    return ScaledTranslation(0, points / 72, axes.figure.dpi_scale_trans)


def look(method: Method) -> dict[str, Any]:
    """Colour and dashes of a method, in matplotlib's words."""
    return {"color": method.colour, "linestyle": (0, method.dash) if method.dash else "solid"}


def legend_line(method: Method) -> Any:
    """A piece of a method's line, for a legend."""
    return mpl.lines.Line2D([], [], **look(method))


# Heat maps and samples ------------------------------------------------------------------------------------------------


def panel_rows(heat: HeatMap, view: str) -> Figure:
    """A panel for each method, with one scale of colours."""
    columns = min(4, len(heat.panels))
    rows = -(-len(heat.panels) // columns)
    figure = Figure(figsize=(2.1 * columns + 0.9, 2.5 * rows), layout="constrained")
    every = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for i, (axes, panel) in enumerate(zip(every, heat.panels, strict=False)):
        draw_panel(axes, panel, heat, [view])
        axes.set_title(folded(panel.method.name), color=panel.method.colour, pad=31)
        if i % columns:
            axes.set_ylabel("")
    for axes in every[len(heat.panels) :]:
        axes.set_visible(False)
    what = "draws, times uniform" if view == "draws" else "draws times weights, times uniform"
    add_scale(figure, every[0].images[0], heat.reach, ax=list(every), shrink=0.8 / rows, label=what)
    return figure


def draw_panel(axes: Any, panel: Panel, heat: HeatMap, views: Sequence[str]) -> None:
    """One method's density through training, noise levels across and steps up; log SNR stands above."""
    for view in views:
        draw_density(axes, panel, view, heat.reach).set(gid=f"view-{view}", clip_on=False)
    axes.set(ylim=(0, heat.end), xlabel="noise level u (0: least noise)")
    round_numbers(axes.xaxis, 5)
    round_numbers(axes.yaxis, 5)
    label_above(axes, "step", -0.2, 19)
    top = axes.get_xaxis_transform()
    axes.text(0.5, 1, "log SNR", ha="center", transform=top + _up(axes, 19))
    for value, place in log_snr_ticks(heat.process):
        axes.text(place, 1, tick_text(value), ha="center", color=SOFT, transform=top + _up(axes, 5.5))


def draw_density(axes: Any, panel: Panel, view: str, reach: int) -> Any:
    """A panel's densities as an image, in doublings of uniform."""
    values, extent = doublings(panel.views[view], reach), (0, 1, 0, panel.end)
    settings = {"extent": extent, "origin": "lower", "aspect": "auto", "interpolation": "nearest"}
    return axes.imshow(values, cmap=DENSITY, vmin=-reach, vmax=reach, **settings)


def add_scale(figure: Figure, image: Any, reach: int, **settings: Any) -> None:
    """The scale of an image of densities, with what its colours stand for."""
    bar = figure.colorbar(image, **settings)
    bar.set_ticks(list(range(-reach, reach + 1)), labels=scale_texts(reach))


def sample_rows(pictures: Sequence[Picture]) -> Figure:
    """Samples of the first seed: a row for each method, a column for each moment."""
    seed = min(picture.seed for picture in pictures)
    moments = sorted({picture.share for picture in pictures})
    methods = list(dict.fromkeys(picture.method for picture in pictures))
    figure = Figure(figsize=(1.5 * len(moments), 1.75 * len(methods)), layout="constrained")
    every = figure.subplots(len(methods), len(moments), squeeze=False)
    for axes in every.ravel():
        axes.set(xticks=[], yticks=[], frame_on=False)
    for picture in pictures:
        pixels = read_pixels(picture.path)
        if picture.seed == seed and pixels is not None:
            axes = every[methods.index(picture.method), moments.index(picture.share)]
            axes.imshow(corner(pixels, 5), interpolation="nearest")
            axes.set_title(f"step {picture.step:,}", fontsize=6, fontweight="normal")
    for axes, method in zip(every[:, 0], methods, strict=True):
        axes.set_ylabel(folded(method.name, 18), color=method.colour, fontweight="bold", fontsize=7)
    return figure


def folded(name: str, width: int = 24) -> str:
    """A long spec in several lines, broken where its parts end."""
    lines = [""]
    for part in re.findall(r"[^:,+]+[:,+]?|[:,+]", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
