"""Draw the figures of the study on CIFAR-10 that the pages show: python docs/make_cifar10_figures.py

They are those of `noisewise report --figures`, from the rows in benchmarks/results; seconds are those of steps made alone.
"""

import tempfile
from pathlib import Path

from pages import RESULTS, rows, smaller  # makes the benchmarks known as modules

from noisewise.study.report import write_figures

from rebuild import rebuild  # isort: skip

SETTING = "-time-scale=1000"  # of flow, which pictures are not named by
QUALITY = ("quality-linear", "quality-cosine", "quality-quadratic", "quality-edm", f"quality-flow{SETTING}")
SHOWN = (*QUALITY, "loss-linear", "loss-cosine", "density-linear")
WIDTH = 1000  # pixels

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rebuild(rows("cifar10-v1-confirmation.jsonl"), Path(folder) / "runs", cost=RESULTS / "cifar10-v1-method-cost.jsonl")
        write_figures(Path(folder) / "runs", Path(folder) / "figures", ("png",))
        for name in SHOWN:
            picture = "cifar10_" + name.removesuffix(SETTING).replace("-", "_")
            smaller(Path(folder) / "figures" / f"{name}.png", picture, WIDTH, 128)
