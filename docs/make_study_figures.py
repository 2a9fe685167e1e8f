"""Makes the pictures of the pages on comparing, reports, previews and analyses, and brings the numbers behind them.

    python docs/make_study_figures.py               what is there: out/demo (make demo), out/compared and out/analysis
    python docs/make_study_figures.py gradients     runs these analyses before, as COMMANDS says; `all` stands for all

Pictures become small ones in docs/img, tables become files in benchmarks/results. The picture of the report needs Playwright
and a Chromium.
"""

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from pages import smaller
from tables import RESULTS

from noisewise.analysis import ANALYSES
from noisewise.report.charts import heat_map, loss_charts, quality_charts
from noisewise.report.figures import STYLE, add_scale, draw_chart, draw_density, legend_line
from noisewise.report.subject import Subject, read_subject
from noisewise.report.thumbnails import corner, pictures_of, read_pixels

DEMO, COMPARED, ANALYSES_OF = Path("out/demo"), Path("out/compared"), Path("out/analysis")
COMMANDS = {  # as on docs/analyzing.md
    "increments": ["analyze increments"],
    "gradients": ["analyze gradients --preset digits --budget 800it"],
    "interdependence": ["analyze interdependence --preset digits"],
    "density": ["analyze density --comparison out/demo"],
    "ablate": [
        "analyze ablate --preset digits --sampler adaptive --setting floor --values 0,0.2,0.5 --budget 400it --images 500 "
        "--batch 64"
    ],
    "predictor": ["analyze predictor --preset digits"],
    "overhead": ["analyze overhead"],  # times: on a quiet machine
    "optimal": [
        "train --preset digits --checkpoint.keep_every 500 --out out/first",
        "evaluate out/first --metrics none --optimal",
        "analyze optimal --run out/first",
    ],
}
PREVIEW = "preview --scheduler linear --sampler uniform --compare logit_normal uniform+minsnr:gamma=5 speed:k=5+change_aware"
SIDE = 6  # rows and columns of samples
WIDTH = 1000  # pixels of a picture of an analysis
LARGE = 30_000  # bytes: a table above is written with fewer digits
COMPUTED = ("increments",)  # has no chance in it: the tests compute it again


def noisewise(command: str) -> None:
    """Run a command of ours."""
    subprocess.run([sys.executable, "-m", "noisewise", *shlex.split(command)], check=True)


def draw_preview() -> None:
    """The picture of the page on previews."""
    picture = ANALYSES_OF / "preview.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    noisewise(f"{PREVIEW} --out {picture}")
    smaller(picture, "preview", 1500, 128)


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
        axes.imshow(on_black(corner(pixels, SIDE)), interpolation="nearest")
        axes.set(xticks=[], yticks=[], frame_on=False)
        axes.set_title(method.name, color=method.colour, fontweight="bold", fontsize=10)
    panel = heat.panels[-1]
    image = draw_density(lower[0], panel, "draws", heat.reach)
    lower[0].set(xlabel="noise level u (0: least noise)", xticks=[0, 0.5, 1], ylabel="training step")
    lower[0].set_title("Draws of the last, times uniform", loc="left")
    add_scale(figure, image, heat.reach, ax=lower[0], pad=0.02)
    quality, loss = quality_charts(subject, process)[1], loss_charts(subject, process)[1]
    draw_chart(lower[1], quality, "Distance of samples to the data")
    draw_chart(lower[2], replace(loss, x="noise level u (0: least noise)", y="below 1: better"), "Held-out loss over uniform's")
    lower[1].legend([legend_line(method) for method in methods], [method.name for method in methods], fontsize=7)
    return figure


def on_black(pixels: np.ndarray) -> np.ndarray:
    """A grid of samples whose white lines are black, so that small pictures can be told from them."""
    lines = [(pixels == 255).all((axis, 2)) for axis in (1, 0)]
    return np.where((lines[0][:, None] | lines[1][None, :])[..., None], 0, pixels)


def take_demo(folder: Path) -> None:
    """The demo in one picture, and its report as a browser shows it."""
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


def main(chosen: list[str]) -> None:
    for name in COMMANDS if chosen == ["all"] else chosen:
        for command in COMMANDS[name]:
            noisewise(command)
    draw_preview()
    if (DEMO / "report.html").is_file():
        take_demo(DEMO)
    if (COMPARED / "results.jsonl").is_file():
        shutil.copy(COMPARED / "results.jsonl", RESULTS / "demo_digits.jsonl")
    take_analyses(ANALYSES_OF)


if __name__ == "__main__":
    main(sys.argv[1:])
