"""The figures of a report as files for papers: the same data and colours, drawn by matplotlib."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from noisewise.looking.palette import Method
from noisewise.report.axis import Axis, tick_text
from noisewise.report.charts import Chart, loss_charts, quality_charts, training_charts
from noisewise.report.heat import HeatMap, Panel, colour_table, heat_map, log_snr_ticks, scale_texts
from noisewise.report.subject import Subject, read_subject
from noisewise.report.svg import FEW, axes_of
from noisewise.report.thumbnails import Picture, corner, pictures_of, read_pixels
from noisewise.training.writing import writing

FORMATS = ("png", "svg", "pdf")
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#58626d",
    "grid.color": "#e6e8ea",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "noisewise",
    "pdf.fonttype": 42,
}


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
        found["training"] = draw_charts(charts)
    for process in subject.schedules:
        end = "-" + re.sub(r"[^A-Za-z0-9.=]+", "-", process).strip("-") if len(subject.schedules) > 1 else ""
        for name, charts in (("quality", quality_charts(subject, process)), ("loss", loss_charts(subject, process))):
            if charts:
                found[name + end] = draw_charts(charts)
        heat = heat_map(subject, process)
        if heat is not None:
            found["density" + end] = draw_heat(heat, "draws")
            if all("objective" in panel.views for panel in heat.panels):
                found["objective" + end] = draw_heat(heat, "objective")
        mine = [picture for picture in pictures if picture.process == process]
        if mine:
            found["samples" + end] = draw_samples(mine)
    return found


def draw_charts(charts: Sequence[Chart]) -> Figure:
    """Charts in a row, with one legend beneath."""
    together = [chart for chart in charts if not chart.legend]
    methods = list(dict.fromkeys(line.method for chart in together for line in chart.lines))
    width = 3.4 * len(charts)
    columns = max(1, min(len(methods), int(width / (0.5 + 0.066 * max(len(method.name) for method in methods)))))
    rows = -(-len(methods) // columns) if len(methods) > 1 else 0
    figure = Figure(figsize=(width, 2.7 + 0.17 * rows), layout="constrained")
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        draw_chart(axes, chart)
    if rows:
        handles = [mpl.lines.Line2D([], [], **look(method)) for method in methods]
        names = [method.name for method in methods]
        figure.legend(handles, names, loc="outside lower center", ncols=columns, handlelength=2.4)
    return figure


def draw_chart(axes: Any, chart: Chart) -> None:
    """One chart."""
    across, up = axes_of(chart)
    for line in chart.lines:
        x = [point.x for point in line.points]
        style = look(line.method)
        axes.plot(x, [point.y for point in line.points], marker="o" if len(x) <= FEW else None, markersize=3, **style)
        if any(len(point.values) > 1 for point in line.points):
            low, high = ([pick(point.values) for point in line.points] for pick in (min, max))
            if len(x) > 1:
                axes.fill_between(x, low, high, color=line.method.colour, alpha=0.14, linewidth=0)
            else:
                axes.vlines(x, low, high, color=line.method.colour, alpha=0.3, linewidth=3)
    if chart.level is not None:
        axes.axhline(chart.level, color="#58626d", linewidth=0.7, linestyle=(0, (2, 3)))
    axes.set(xlim=(across.low, across.high), xlabel=chart.x, title=chart.title)
    if chart.log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xticks=across.ticks(5), yticks=up.ticks())
    axes.set(ylim=(up.low, up.high), ylabel=chart.y.replace(" (", "\n("))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(round(value, 12))))
    axes.grid(axis="y")
    if chart.legend:
        axes.legend([line.method.name for line in chart.lines], fontsize=7)


def look(method: Method) -> dict[str, Any]:
    """Colour and dashes of a method, in matplotlib's words."""
    return {"color": method.colour, "linewidth": 1.4, "linestyle": (0, method.dash) if method.dash else "solid"}


def folded(name: str, width: int = 24) -> str:
    """A long spec in several lines, broken where its parts end."""
    lines = [""]
    for part in re.findall(r"[^:,+]+[:,+]?|[:,+]", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def draw_panel(axes: Any, panel: Panel, view: str, reach: int) -> Any:
    """One method's density through training; the image, for a colour bar in doublings of uniform."""
    return axes.imshow(
        np.log2(np.clip(np.nan_to_num(panel.views[view], nan=1.0), 2.0**-reach, 2.0**reach)),
        cmap=ListedColormap(colour_table() / 255),
        vmin=-reach,
        vmax=reach,
        extent=(0, 1, 0, panel.end),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
    )


def draw_heat(heat: HeatMap, view: str) -> Figure:
    """A panel for each method, noise levels across, steps up, one scale of colours."""
    columns = min(4, len(heat.panels))
    rows = -(-len(heat.panels) // columns)
    figure = Figure(figsize=(2.1 * columns + 0.9, 2.5 * rows), layout="constrained")
    every = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for axes, panel in zip(every, heat.panels, strict=False):
        image = draw_panel(axes, panel, view, heat.reach)
        axes.set(ylim=(0, heat.end), yticks=Axis(0, heat.end, 0, 1).ticks(5), xlabel="noise level u (0: least)")
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.set_title(folded(panel.method.name), color=panel.method.colour, fontweight="bold")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(round(value, 12))))
        upper = axes.secondary_xaxis("top")
        ticks = log_snr_ticks(heat.process)
        upper.set_xticks([place for _, place in ticks], [tick_text(value) for value, _ in ticks], fontsize=6)
        upper.set_xlabel("log SNR", fontsize=6)
    for axes in every[len(heat.panels) :]:
        axes.set_visible(False)
    every[0].set_ylabel("step")
    what = "draws, times uniform" if view == "draws" else "draws times weights, times uniform"
    bar = figure.colorbar(image, ax=list(every), shrink=0.8 / rows, label=what)
    bar.set_ticks(range(-heat.reach, heat.reach + 1), labels=scale_texts(heat.reach))
    return figure


def draw_samples(pictures: Sequence[Picture]) -> Figure:
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
            axes.set_title(f"step {picture.step:,}", fontsize=6)
    for axes, method in zip(every[:, 0], methods, strict=True):
        axes.set_ylabel(folded(method.name, 18), color=method.colour, fontweight="bold", fontsize=7)
    return figure
