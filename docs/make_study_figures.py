"""Brings the pictures of the README and of the pages on comparing, analysing and reports here, with the numbers behind them.

It takes what `make demo` left in out/demo and what the commands of docs/analyzing.md left in out/analysis: pictures become
small ones in docs/img, tables become files in benchmarks/results. What is not there is left as it is.

    python docs/make_study_figures.py

The picture of the report needs Playwright and a Chromium.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from pages import DOCS, smaller
from tables import RESULTS

from noisewise.analysis import ANALYSES
from noisewise.report.charts import heat_map, loss_charts, quality_charts
from noisewise.report.figures import STYLE, add_scale, draw_chart, draw_density, legend_line
from noisewise.report.subject import Subject, read_subject
from noisewise.report.thumbnails import pictures_of, read_pixels

DEMO, ANALYSES_OF = Path("out/demo"), Path("out/analysis")
WIDTH = 1000  # pixels of a picture of an analysis
LARGE = 30_000  # bytes: a table above is written with fewer digits
COMPUTED = ("increments",)  # has no chance in it: the tests compute it again


def take_analyses(folder: Path) -> None:
    """Pictures and tables of all analyses that were made."""
    for name in ANALYSES:
        if (folder / f"{name}.png").is_file():
            smaller(folder / f"{name}.png", f"analysis_{name}", WIDTH, 128)
            if name not in COMPUTED:
                (RESULTS / f"analysis_{name}.csv").write_text(short((folder / f"{name}.csv").read_text()))


def short(table: str) -> str:
    """A large table with six digits in its numbers."""
    if len(table) < LARGE:
        return table
    return "".join(",".join(map(_six_digits, line.split(","))) + "\n" for line in table.splitlines())


def _six_digits(cell: str) -> str:
    try:
        return f"{float(cell):.6g}"
    except ValueError:
        return cell


def draw_demo(subject: Subject) -> Figure:
    """Samples of each method; below, what the last one draws, quality over time, and loss by noise level."""
    (process,) = subject.schedules
    methods, heat = subject.methods, heat_map(subject, process)
    assert heat is not None
    last = {p.method.name: p for p in pictures_of(subject) if p.seed == subject.seeds[0] and p.share == 1}
    figure = Figure(figsize=(9.6, 5.5), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08)
    upper, lower = figure.subplots(2, len(methods), height_ratios=[1.25, 1])
    for axes, method in zip(upper, methods, strict=True):
        pixels = read_pixels(last[method.name].path)
        assert pixels is not None
        axes.imshow(pixels, interpolation="nearest")
        axes.set(xticks=[], yticks=[], frame_on=False)
        axes.set_title(method.name, color=method.colour, fontweight="bold", fontsize=10)
    panel = heat.panels[-1]
    image = draw_density(lower[0], panel, "draws", heat.reach)
    lower[0].set(xlabel="noise level u (0: least noise)", xticks=[0, 0.5, 1], ylabel="training step")
    lower[0].set_title(f"What {panel.method.name} draws, times uniform", loc="left")
    add_scale(figure, image, heat.reach, ax=lower[0], pad=0.02)
    quality, loss = quality_charts(subject, process)[1], loss_charts(subject, process)[1]
    draw_chart(lower[1], quality, "Distance of samples to the data")
    draw_chart(lower[2], replace(loss, x="noise level u (0: least noise)", y="below 1: better"), "Held-out loss over uniform's")
    lower[1].legend([legend_line(method) for method in methods], [method.name for method in methods], fontsize=7)
    return figure


def take_demo(folder: Path) -> None:
    """The picture of the README, its numbers, and the report as a browser shows it."""
    shutil.copy(folder / "results.jsonl", RESULTS / "demo_digits.jsonl")
    with mpl.rc_context(STYLE):
        draw_demo(read_subject(folder)).savefig(folder / "demo.png", dpi=130)
    smaller(folder / "demo.png", "demo", 1248, 256)
    photograph(folder / "report.html", folder / "report.png")
    smaller(folder / "report.png", "report", 1000, 256)


def photograph(page: Path, picture: Path) -> None:
    """The upper part of a report, on a light background."""
    from playwright.sync_api import sync_playwright

    found = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        shown = browser.new_page(viewport={"width": 1280, "height": 1500}, color_scheme="light")
        shown.goto(page.resolve().as_uri())
        shown.wait_for_timeout(300)
        shown.screenshot(path=picture)
        browser.close()


def main() -> None:
    (DOCS / "img").mkdir(exist_ok=True)
    if (DEMO / "report.html").is_file():
        take_demo(DEMO)
    take_analyses(ANALYSES_OF)


if __name__ == "__main__":
    sys.exit(main())
