"""What a study consists of; and what its runs and analyses have left in their folders, as tables, charts and sentences."""

import csv
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from pathlib import Path
from statistics import fmean

import numpy as np

from noisewise.looking.palette import methods_named
from noisewise.report.charts import Chart, Line, Point
from noisewise.study.outcome import Comparison, NoneFinished, Outcome, read_comparison
from noisewise.study.summary import judged, mean_ratio, metric_label

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


Shown = tuple[str, list[Section]]
"""The same as a study `says`, of ours; and what the page shows."""


@dataclass(frozen=True)
class Scale:
    """How a study is made at one scale."""

    commands: tuple[str, ...]  # of noisewise, in order; OUT is the folder of the scale
    takes: str  # how long, and on what
    needs: str = ""  # what is not in the package
    settings: Sequence[str] = ()  # of noisewise train, for the commands that have a preset

    def words(self, folder: Path | str) -> list[list[str]]:
        """The commands as lists of words, for this folder."""
        lines = [[word.replace(PLACE, str(folder)) for word in shlex.split(line)] for line in self.commands]
        return [[*line[:-2], *self.settings, *line[-2:]] if "--preset" in line else line for line in lines]


@dataclass(frozen=True)
class Study:
    """A table or a figure of a paper."""

    source: str  # the paper, and the place in it
    title: str
    says: str  # what the paper found, in a sentence
    scales: Mapping[str, Scale]
    shown: Callable[[Path], Shown]  # of the folder of a scale
    notes: tuple[str, ...] = ()  # what the paper leaves open, and what differs here at any scale


# The paper's numbers --------------------------------------------------------------------------------------------------

Row = dict[str, str]


@dataclass(frozen=True)
class Published:
    """A table of FIDs: the paper's name of a method to its spec and its numbers as printed, the baseline first."""

    columns: str  # the steps or epochs of each, separated by commas
    rows: Mapping[str, tuple[str, str]]
    lowest: bool = False  # "the lowest FID score achieved for each training duration"

    @property
    def at(self) -> list[float]:
        """Where the columns lie, as shares of the last."""
        steps = [float(step) for step in re.findall(r"[\d.]+", self.columns)]
        return [step / steps[-1] for step in steps]

    def ends(self) -> dict[str, float]:
        """Spec to its last FID over the baseline's."""
        found = {spec: float(values.split()[-1]) for spec, values in self.rows.values()}
        return {spec: value / next(iter(found.values())) for spec, value in found.items()}


# Comparisons ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curves:
    """The finished runs of a comparison on its one schedule, by sampler and seed."""

    comparison: Comparison
    runs: Mapping[str, Mapping[int, Outcome]]
    metric: str | None

    @property
    def baseline(self) -> Mapping[int, Outcome]:
        return self.runs.get(self.comparison.plan.baseline, {})

    def values(self, run: Outcome, lowest: bool = False) -> list[float]:
        """What it is judged by at each evaluation; the lowest so far, if that is asked for."""
        found = [judged(one, self.metric) for one in run.evaluations]
        return [min(found[: i + 1]) for i in range(len(found))] if lowest else found

    def pairs(self, spec: str) -> dict[int, tuple[Outcome, Outcome]]:
        """By seed: its run, and the baseline's."""
        return {seed: (run, self.baseline[seed]) for seed, run in self.runs.get(spec, {}).items() if seed in self.baseline}

    def ratios(self, spec: str, lowest: bool = False) -> list[float]:
        """The end of each seed over the baseline's with the same seed."""
        return [self.values(run, lowest)[-1] / self.values(base, lowest)[-1] for run, base in self.pairs(spec).values()]

    def days(self, spec: str) -> dict[int, list[float]]:
        """By seed: the training time of each evaluation, in units of "1D", what the baseline of that seed took in all."""
        return {
            seed: [one.seconds / base.evaluations[-1].seconds for one in run.evaluations]
            for seed, (run, base) in self.pairs(spec).items()
        }

    def fair(self, spec: str) -> bool:
        """Whether the clock of all its runs was that of the baseline's."""
        return all(run is base or self.comparison.side_by_side(run, base) for run, base in self.pairs(spec).values())


def curves(folder: Path) -> Curves:
    """Read a comparison of one schedule; an error if the baseline, which all are compared with, has not finished."""
    comparison = read_comparison(folder)
    runs: dict[str, dict[int, Outcome]] = {}
    for run in comparison.outcomes:
        if run.final is not None:
            runs.setdefault(run.sampler, {})[run.seed] = run
    base = comparison.plan.baseline
    if base not in runs:
        raise NoneFinished(f"no run of {base} in {folder} has finished; their logs are in {folder / 'runs'}")
    ends = [run.final for seeds in runs.values() for run in seeds.values() if run.final is not None]
    return Curves(comparison, runs, next((end.metric for end in ends if end.distance is not None), None))


def distances(folder: Path, published: Published, title: str) -> Section:
    """The paper's table with ours beside it."""
    found = curves(folder)
    steps = [one.step for one in next(iter(found.baseline.values())).evaluations]
    paper, ratio = published.ends(), f"last over {next(iter(published.rows)).partition(',')[0]}'s"
    heads = ["", *(f"paper, {name}" for name in published.columns.split(",")), *(f"ours, {step:,}" for step in steps)]
    numbers = range(1, len(heads))
    heads += [f"paper: {ratio}", f"ours: {ratio}, each seed"]
    heads += ["ours: the last evaluation itself, each seed"] if published.lowest else []
    rows = []
    for name, (spec, values) in published.rows.items():
        mine = [found.values(run, published.lowest) for run in found.runs.get(spec, {}).values()]
        cells = [number(fmean(column)) for column in zip(*mine, strict=True)] if mine else ["–"] * len(steps)
        kinds = (True, False) if published.lowest else (False,)
        ratios = [" / ".join(f"{value:.2f}" for value in found.ratios(spec, kind)) or "–" for kind in kinds]
        label = name if name == spec else f"{name} ({spec})"
        rows.append([label, *values.split(), *cells, f"{paper[spec]:.2f}", *ratios])
    kind = "the lowest so far" if published.lowest else "at that moment"
    seeds, images = len(found.baseline), next(iter(found.baseline.values())).evaluations[-1].images
    note = (
        f"Paper: FID of 50,000 images. Ours: {metric_label(found.metric)} of {images:,} images, at so many steps, the mean of "
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}. Both: {kind}."
    )
    if found.metric is None:
        note += " No distance of images was measured: the held-out loss stands in for it."
    return Section(title, [Table(heads, rows, note, numbers)])


def ends(folder: Path, published: Published, spec: str) -> str:
    """Where a method ended: its ratio to the baseline, and its place among all, in the paper and here."""
    found, paper = curves(folder), published.ends()
    ours = {one: mean_ratio(ratios, [1.0] * len(ratios)) for one in paper if (ratios := found.ratios(one, published.lowest))}
    if spec not in ours or ours[spec] is None:
        return f"{spec} has not finished"
    known = {one: value for one, value in ours.items() if value is not None}
    return (
        f"{spec} ends with {'a lowest' if published.lowest else 'a'} {metric_label(found.metric)} of {known[spec]:.2f} times "
        f"{found.comparison.plan.baseline}'s, {_place(known, spec)} (paper {paper[spec]:.2f}, {_place(paper, spec)})"
    )


def _place(ends: Mapping[str, float], spec: str) -> str:
    place = sum(value < ends[spec] for value in ends.values()) + 1
    return f"{ordinal(place)} of {len(ends)}"


def ordinal(place: int) -> str:
    """1st, 2nd, 3rd, 4th ..."""
    return f"{place}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(place if place < 20 else place % 10, 'th') }"


# Relative time --------------------------------------------------------------------------------------------------------

TIME = "training time (1D: the baseline's whole run)"


def relative_time(folder: Path, labels: Mapping[str, str], title: str) -> Section:
    """Quality against the time that the baseline took, as in Figs. 1 and 7."""
    found = curves(folder)
    looks = methods_named(list(labels.values()))
    lines, rows = [], []
    for spec, label in labels.items():
        days = found.days(spec)
        values = {seed: found.values(found.runs[spec][seed], lowest=True) for seed in days}
        if not days:
            rows.append([label, *["–"] * 5])
            continue
        seeds = tuple(days)
        points = [
            Point(fmean(days[seed][i] for seed in seeds), tuple(values[seed][i] for seed in seeds), seeds)
            for i in range(min(map(len, days.values())))
        ]
        lines.append(Line(looks[label], tuple(points)))
        at = [value_at(days[seed], values[seed], 1.0) for seed in seeds]
        base = [found.values(found.baseline[seed], lowest=True)[-1] for seed in seeds]
        rows.append(
            [
                label,
                f"{fmean(days[seed][-1] for seed in seeds):.2f}" + ("" if found.fair(spec) else " (not side by side)"),
                number(fmean(values[seed][-1] for seed in seeds)),
                " / ".join(f"{values[seed][-1] / end:.2f}" for seed, end in zip(seeds, base, strict=True)),
                "–" if None in at else number(fmean(value for value in at if value is not None)),
                "–" if None in at else " / ".join(f"{v / end:.2f}" for v, end in zip(at, base, strict=True) if v is not None),
            ]
        )
    quality = metric_label(found.metric)
    heads = ["", "time of its run, in D", f"lowest {quality} at its end", "over the baseline's, each seed"]
    heads += [f"lowest {quality} by 1D", "over the baseline's, each seed"]
    chart = Chart("time", "Ours", TIME, f"lowest {quality} so far", tuple(lines), log=True, legend=True)
    note = (
        "All runs have the same number of steps, so a run of more than 1D costs more a step. Lowest so far, as in the paper; "
        "at 1D on a straight line between two evaluations."
    )
    return Section(title, [Table(heads, rows, note)], [chart])


def value_at(times: Sequence[float], values: Sequence[float], time: float) -> float | None:
    """The value at a time, on a straight line between evaluations; None before the first. The last one stays."""
    if times[0] > time or not all(map(isfinite, values)):
        return None
    return float(np.interp(time, times, values))


def published_time(published: Published, slower: Mapping[str, float], title: str) -> Chart:
    """The paper's table over relative time, where a method's step costs so many times the baseline's."""
    looks = methods_named(list(published.rows))
    lines = []
    for name, (_, values) in published.rows.items():
        places = zip(published.at, values.split(), strict=True)
        lines.append(Line(looks[name], tuple(Point(slower.get(name, 1.0) * at, (float(value),)) for at, value in places)))
    return Chart("paper", title, TIME, "FID", tuple(lines), log=True, legend=True)


# Analyses -------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[Row]:
    """The rows of an analysis."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def within(rows: Iterable[Row], low: float = 0.0, high: float = inf, at: str = "u") -> list[Row]:
    """The rows whose noise level is in some range, the upper end left out."""
    return [row for row in rows if low <= float(row[at]) < high]


def mean_of(rows: Sequence[Row], column: str) -> float:
    """The mean of a column."""
    return fmean(float(row[column]) for row in rows) if rows else nan


def moments(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """The rows by step of training."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(int(row["step"]), []).append(row)
    return dict(sorted(found.items()))


def number(value: float) -> str:
    """Three digits or more, whatever the size."""
    if not isfinite(value):
        return "not finite"
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"
