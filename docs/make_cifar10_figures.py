"""Draw the figures of the study on CIFAR-10 that the pages show: python docs/make_cifar10_figures.py

They are those of `noisewise report --figures`, from the rows in benchmarks/results; seconds are those of steps made alone.
Images of the larger network are those of its runs, which are kept in img/runs.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from pages import DOCS, RESULTS, rows, smaller  # makes the benchmarks known as modules

from noisewise.study.report import write_figures

from field import METHODS  # isort: skip
from rebuild import rebuild  # isort: skip

SETTING = "-time-scale=1000"  # of flow, which pictures are not named by
QUALITY = ("quality-linear", "quality-cosine", "quality-quadratic", "quality-edm", f"quality-flow{SETTING}")
SHOWN = (*QUALITY, "loss-linear", "loss-cosine", "density-linear")
WIDTH = 1000  # pixels
IMAGES = {"uniform": "uniform", "minsnr": "minsnr:gamma=5", "adaptive": "adaptive"}  # file to spec


def draw(found: list[dict[str, Any]], cost: Path, shown: tuple[str, ...], prefix: str) -> None:
    """The figures of these names of the runs in these rows, with the costs of a step from a file."""
    with tempfile.TemporaryDirectory() as folder:
        rebuild(found, Path(folder) / "runs", cost=cost)
        write_figures(Path(folder) / "runs", Path(folder) / "figures", ("png",))
        for name in shown:
            picture = prefix + name.removesuffix(SETTING).replace("-", "_")
            smaller(Path(folder) / "figures" / f"{name}.png", picture, WIDTH, 128)


def field_rows() -> list[dict[str, Any]]:
    """The methods of the field with seed 0, which is the one that all of them have, lowest end first."""
    found = [row for row in rows("cifar10-v1-field.jsonl") if row["seed"] == 0 and row["method"] in METHODS]
    ends = {row["sampler"]: row["distance"] for row in found if row.get("share") == 1}
    return sorted((row for row in found if row["sampler"] in ends), key=lambda row: ends[row["sampler"]])


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


if __name__ == "__main__":
    alone = RESULTS / "cifar10-v1-method-cost.jsonl"
    draw(field_rows(), alone, ("quality", "loss", "density"), "cifar10_field_")
    draw(rows("cifar10-v1-confirmation.jsonl"), alone, SHOWN, "cifar10_")
    with tempfile.TemporaryDirectory() as folder:
        cost = cost_of_larger(Path(folder) / "cost.jsonl")
        draw(rows("cifar10-v1-paper.jsonl"), cost, ("quality",), "cifar10_larger_")
        draw_images(Path(folder) / "images.png")
        smaller(Path(folder) / "images.png", "cifar10_larger_images", WIDTH, 0)
