"""Draw the figures of the study on CIFAR-10 that the pages show: python docs/make_cifar10_figures.py

They are those of `noisewise report --figures`, from the rows in benchmarks/results; seconds are those of steps made alone.
Images of the larger network are those of its runs, which are kept in img/runs. Three pictures of the field (quality, loss and
density) are kept as they were drawn: they show earlier versions of methods, whose specs do not build any more.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from pages import DOCS, smaller
from tables import RESULTS, rows  # makes the benchmarks known as modules
from tables.field import CONTROLS, LABELS, NAMES, objectives

from noisewise.looking.palette import COLOURS, GREY
from noisewise.report import write_figures

from rebuild import rebuild  # isort: skip

SETTING = "-time-scale=1000"  # of flow, which pictures are not named by
QUALITY = ("quality-linear", "quality-cosine", "quality-quadratic", "quality-edm", f"quality-flow{SETTING}")
SHOWN = (*QUALITY, "loss-linear", "loss-cosine", "density-linear")
WIDTH = 1000  # pixels
TO_THE_LEFT = ("uniform", "min-snr", "adaptive-min-snr, earlier", "adaptive-paper, earlier", "beta:a=0.72,b=0.85")
TO_THE_LEFT += ("adaptive-repaired, earlier",)
IMAGES = {"uniform": "uniform", "minsnr": "minsnr:gamma=5", "adaptive": "adaptive"}  # file to spec


def draw(found: list[dict[str, Any]], cost: Path, shown: tuple[str, ...], prefix: str) -> None:
    """The figures of these names of the runs in these rows, with the costs of a step from a file."""
    with tempfile.TemporaryDirectory() as folder:
        rebuild(found, Path(folder) / "runs", cost=cost)
        write_figures(Path(folder) / "runs", Path(folder) / "figures", ("png",))
        for name in shown:
            picture = prefix + name.removesuffix(SETTING).replace("-", "_")
            smaller(Path(folder) / "figures" / f"{name}.png", picture, WIDTH, 128)


def draw_objectives(path: Path) -> None:
    """FID over how much the first tenth of the noise levels counts, a point for each run of the field."""
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=125, layout="constrained")
    axes.axhline(1, color="0.85", zorder=0)
    axes.axvline(1, color="0.85", zorder=0)
    for found in objectives():
        colour = GREY if found[0].spec == "uniform" else COLOURS[1] if found[0].spec in CONTROLS else COLOURS[0]
        counted, ratio = [run.counted for run in found], [run.ratio for run in found]
        corrected = found[0].effective < 0.99  # by importance weights
        axes.plot(counted, ratio, "-", color=colour, lw=0.8, alpha=0.6)
        axes.plot(counted, ratio, "o", color=colour, ms=6, mfc="white" if corrected else colour)
        left = NAMES.get(found[0].spec, found[0].spec) in TO_THE_LEFT
        place = (found[0].counted, found[0].ratio) if left else (max(counted), statistics.fmean(ratio))
        axes.annotate(
            label(found[0].spec),
            place,
            xytext=(-8 if left else 8, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=8,
            color=colour,
        )
    axes.set(xscale="log", yscale="log", xlim=(0.03, 20))
    axes.set_xlabel("objective (draws × weight) in the first tenth of u, times uniform's")
    axes.set_ylabel("FID after 10,000 steps, times uniform's")
    axes.set_yticks((0.6, 0.8, 1, 1.2, 1.5, 2), ("0.6", "0.8", "1", "1.2", "1.5", "2"))
    axes.set_xticks((0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10), ("0.05", "0.1", "0.2", "0.5", "1", "2", "5", "10"))
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def label(spec: str) -> str:
    """What the page of results calls a method."""
    if spec == CONTROLS[1]:
        return "its policy without x0, earlier"
    return LABELS.get(NAMES.get(spec, spec), spec).replace("`", "")


def cost_of_larger(path: Path) -> Path:
    """Write what a step of the larger network takes, as measured with its throughput; returns the path."""
    speed = {row["path"]: row.get("steps_per_second") for row in rows("throughput.jsonl") if row["model"] == "paper"}
    known = {"uniform": speed["fast"], "adaptive": speed["fast, adaptive"]}
    found = [{"spec": spec, "steps_per_second": one, "ratio": known["uniform"] / one} for spec, one in known.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def draw_images(path: Path) -> None:
    """The images of each method beside each other, none of them scaled."""
    grids = {spec: plt.imread(DOCS / "img" / "runs" / f"cifar10_larger_{file}.png") for file, spec in IMAGES.items()}
    side, gap, title = 265, 20, 26
    width, height = len(grids) * (side + gap) - gap, side + title
    figure = plt.figure(figsize=(width / 100, height / 100), dpi=100)
    for k, (spec, grid) in enumerate(grids.items()):
        axes = figure.add_axes((k * (side + gap) / width, 0, side / width, side / height))
        axes.imshow(grid, interpolation="nearest")
        axes.set_title(spec, fontsize=10, family="monospace")
        axes.axis("off")
    figure.savefig(path)
    plt.close(figure)


def draw_front(path: Path) -> None:
    """The README's picture: quality over a long run, what the default draws in it, and images of the larger network."""
    figure = plt.figure(figsize=(12, 3.9), dpi=125, layout="constrained")
    quality, drawn, images = figure.subplots(1, 3, width_ratios=(1.15, 1, 1))
    looks = {"uniform": ("uniform", 6, GREY), "min-snr": ("Min-SNR", 5, COLOURS[0]), "adaptive": ("adaptive", 6, COLOURS[1])}
    found = [row for row in rows("cifar10-v2-runs.jsonl") if row["process"] == "quadratic"]
    for method, (name, seed, colour) in looks.items():
        own = {row["step"]: row["distance"] for row in found if (row["method"], row["seed"]) == (method, seed)}
        quality.plot(*zip(*sorted(own.items()), strict=True), "o-", color=colour, lw=2.2, ms=5, label=name)
    marks = [4000, 8000, 16000, 32000, 64000]
    quality.set(xscale="log", yscale="log", title="FID over training steps (lower is better)", xlabel="steps")
    quality.set_xticks(marks, [f"{mark // 1000}k" for mark in marks])
    quality.set_yticks((15, 20, 30, 40, 60, 80), (15, 20, 30, 40, 60, 80))
    quality.minorticks_off()
    quality.grid(color="0.92")
    quality.legend(frameon=False)
    last = max((row for row in found if row["method"] == "adaptive"), key=lambda row: row["step"])
    for name, label, colour in (("density_by_level", "drawn", COLOURS[1]), ("objective_by_level", "drawn × weight", GREY)):
        levels = last[name]
        drawn.stairs(levels, [k / len(levels) for k in range(len(levels) + 1)], color=colour, lw=2.2, label=label)
    drawn.axhline(1, color="0.85", zorder=0)
    drawn.set(title="What adaptive draws, times uniform", xlabel="noise level u (0: least noise)", xlim=(0, 1), ylim=(0, None))
    drawn.legend(frameon=False)
    images.imshow(plt.imread(DOCS / "img" / "runs" / "cifar10_larger_adaptive.png"), interpolation="nearest")
    images.set_title("Images of a larger network, 15k steps")
    images.axis("off")
    for axes in (quality, drawn):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    alone = RESULTS / "cifar10-v1-method-cost.jsonl"
    draw(rows("cifar10-v1-confirmation.jsonl"), alone, SHOWN, "cifar10_")
    with tempfile.TemporaryDirectory() as folder:
        draw_objectives(Path(folder) / "objectives.png")
        smaller(Path(folder) / "objectives.png", "cifar10_field_objectives", WIDTH, 64)
        cost = cost_of_larger(Path(folder) / "cost.jsonl")
        draw(rows("cifar10-v1-paper.jsonl"), cost, ("quality",), "cifar10_larger_")
        draw_front(Path(folder) / "front.png")
        smaller(Path(folder) / "front.png", "front", 1500, 128)
        draw_images(Path(folder) / "images.png")
        smaller(Path(folder) / "images.png", "cifar10_larger_images", WIDTH, 0)


if __name__ == "__main__":
    main()
