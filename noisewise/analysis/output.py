"""What an analysis leaves: pictures, and the numbers in them."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from noisewise.training.writing import writing


@dataclass(frozen=True)
class Analysis:
    """A named result: a figure, the rows behind it, and what it says."""

    name: str  # of the files
    figure: Figure
    rows: list[dict[str, Any]]  # of plain numbers and words, all with the same keys
    says: list[str] = field(default_factory=list)  # sentences for the terminal: findings, with their numbers, and the cost


def write_analysis(analysis: Analysis, folder: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write NAME.csv and a picture in each format; returns the paths."""
    with writing(f"--out {folder}", folder):
        folder.mkdir(parents=True, exist_ok=True)
    table = folder / f"{analysis.name}.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(analysis.rows[0]))
        writer.writeheader()
        writer.writerows(analysis.rows)
    pictures = [folder / f"{analysis.name}.{kind}" for kind in formats]
    for path in pictures:
        analysis.figure.savefig(path, dpi=150)
    return [table, *pictures]
