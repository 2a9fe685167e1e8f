"""Draw the figures of the study on CIFAR-10 that the pages show: python docs/make_cifar10_figures.py

They are those of `noisewise report --figures`, from the rows in benchmarks/results; seconds are those of steps made alone. The
pictures of the larger network's images (img/cifar10_larger_uniform.png and so on) are those of its runs, as they were.
"""

import json
import tempfile
from pathlib import Path

from pages import RESULTS, rows, smaller  # makes the benchmarks known as modules

from noisewise.study.report import write_figures

from rebuild import rebuild  # isort: skip

SETTING = "-time-scale=1000"  # of flow, which pictures are not named by
QUALITY = ("quality-linear", "quality-cosine", "quality-quadratic", "quality-edm", f"quality-flow{SETTING}")
SHOWN = (*QUALITY, "loss-linear", "loss-cosine", "density-linear")
WIDTH = 1000  # pixels


def draw(file: str, cost: Path, shown: tuple[str, ...], prefix: str) -> None:
    """The figures of these names of the runs in a file, with the costs of a step from another."""
    with tempfile.TemporaryDirectory() as folder:
        rebuild(rows(file), Path(folder) / "runs", cost=cost)
        write_figures(Path(folder) / "runs", Path(folder) / "figures", ("png",))
        for name in shown:
            picture = prefix + name.removesuffix(SETTING).replace("-", "_")
            smaller(Path(folder) / "figures" / f"{name}.png", picture, WIDTH, 128)


def cost_of_larger(path: Path) -> Path:
    """Write what a step of the larger network takes, as measured with its throughput; returns the path."""
    speed = {row["path"]: row.get("steps_per_second") for row in rows("throughput.jsonl") if row["model"] == "paper"}
    known = {"uniform": speed["fast"], "adaptive": speed["fast, adaptive"]}
    found = [{"spec": spec, "steps_per_second": one, "ratio": known["uniform"] / one} for spec, one in known.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


if __name__ == "__main__":
    draw("cifar10-v1-confirmation.jsonl", RESULTS / "cifar10-v1-method-cost.jsonl", SHOWN, "cifar10_")
    with tempfile.TemporaryDirectory() as folder:
        cost = cost_of_larger(Path(folder) / "cost.jsonl")
        draw("cifar10-v1-paper.jsonl", cost, ("quality",), "cifar10_larger_")
