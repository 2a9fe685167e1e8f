"""What a study consists of."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from noisewise.report.charts import Chart

SCALES = {
    "toy": "the embedded digits, on two CPU cores",
    "small": "CIFAR-10 with a network of 9.0 M parameters, on one GPU",
    "paper": "the settings of the paper's own tables",
}
PLACE = "OUT"  # stands for the folder of a scale in commands


@dataclass(frozen=True)
class Table:
    """A table of the page, in words; the first column names the rows."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    lowest: Sequence[int] = ()  # columns whose lowest number stands out


@dataclass(frozen=True)
class Section:
    """A part of the page: tables, line charts, and pictures that an analysis has written."""

    title: str
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    pictures: Mapping[str, Path] = field(default_factory=dict)  # by what they show


@dataclass(frozen=True)
class Scale:
    """How a study is made at one scale."""

    commands: tuple[str, ...]  # of noisewise, in order; OUT is the folder of the scale
    takes: str  # how long, and on what
    needs: str = ""  # what is not in the package

    def words(self, folder: Path) -> list[list[str]]:
        """The commands as lists of words, for this folder."""
        return [[word.replace(PLACE, str(folder)) for word in shlex.split(line)] for line in self.commands]


@dataclass(frozen=True)
class Study:
    """A table or a figure of a paper."""

    source: str  # the paper, and the place in it
    title: str
    says: str  # what the paper found, in a sentence
    scales: Mapping[str, Scale]
    sections: Callable[[Path], list[Section]]  # what the page shows, from the folder of the scale
    found: Callable[[Path], str]  # the same as `says`, of ours
    notes: tuple[str, ...] = ()  # what the paper leaves open, and what differs here at any scale
