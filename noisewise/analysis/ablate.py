"""One setting of a sampler at a time: what it does to the result (arXiv 2411.09998, Fig. 7).

    noisewise analyze ablate --preset digits --setting floor --values 0,0.1,0.2,0.5 --sampler adaptive --budget 10s
    noisewise analyze ablate --preset digits                                   # the five settings of the paper, one at a time

The runs are an ordinary comparison in OUT/ablate: the same command goes on where it was stopped, and more values may follow.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from noisewise.analysis.output import Analysis
from noisewise.looking.palette import COLOURS, GREY
from noisewise.samplers import SAMPLERS
from noisewise.spec import Term, parse, split_specs
from noisewise.study.conduct import combinations, conduct
from noisewise.study.job import with_budget
from noisewise.study.launch import add_launcher_options, chosen_launcher
from noisewise.study.outcome import Comparison, NoneFinished, Outcome, Plan
from noisewise.training.config import Config
from noisewise.training.options import config_parser, parse_config, with_files
from noisewise.training.signals import StopRequest

BASELINE = "uniform"
TOGETHER = 4  # runs that take turns on a machine, unless --turns says otherwise


@dataclass(frozen=True)
class Setting:
    """A setting of the paper's ablation: what it is called there, its usual value, and those to try."""

    label: str
    usual: str
    values: str


SETTINGS = {
    "chosen": Setting("|S|, levels that stand for all", "3", "1,3,10"),
    "every": Setting("f_S, steps between updates", "40", "10,40,160"),
    "queue": Setting("|Q|, rows to select from", "20", "5,20,80"),
    "floor": Setting("floor, share of uniform draws", "0.2", "0,0.1,0.2,0.5"),
    "target": Setting("target, the objective to reduce", "none", "none,minsnr,vlb:clip=5"),
}


@dataclass(frozen=True)
class Change:
    """A sampler with one setting changed."""

    setting: str
    value: str
    spec: str


def with_setting(spec: str, setting: str, value: str) -> str:
    """The spec with this setting of its sampler set to the value, and nothing else changed."""
    terms = parse(spec)
    if not any(term.name in SAMPLERS for term in terms):
        raise ValueError(f"--sampler {spec!r} names no sampler whose setting could be changed, such as adaptive")
    bracketed = value.startswith("(") and value.endswith(")")
    text = value if bracketed or not set(":,+") & set(value) else f"({value})"
    changed = [Term(term.name, {**term.options, setting: text}) if term.name in SAMPLERS else term for term in terms]
    options = [",".join(f"{key}={value}" for key, value in term.options.items()) for term in changed]
    return "+".join(f"{term.name}{':' * bool(some)}{some}" for term, some in zip(changed, options, strict=True))


def one_setting(spec: str, setting: str, values: Sequence[str]) -> list[Change]:
    """The sampler with each of the values."""
    if len(set(values)) < len(values):
        raise ValueError(f"--values names {next(v for v in values if list(values).count(v) > 1)} twice")
    return [Change(setting, value, with_setting(spec, setting, value)) for value in values]


def all_settings(spec: str) -> list[Change]:
    """The settings of the paper, each in turn; what the spec does not give is written out, so that equal runs are made once."""
    terms = parse(spec)
    given = {key for term in terms for key in term.options}
    for setting, usual in SETTINGS.items():
        weighted = setting == "target" and len(terms) > 1  # the weighting beside it is the target already
        if setting not in given and not weighted:
            spec = with_setting(spec, setting, usual.usual)
    return [change for setting, usual in SETTINGS.items() for change in one_setting(spec, setting, split_specs(usual.values))]


def rows_of(changes: Sequence[Change], comparison: Comparison) -> list[dict[str, Any]]:
    """A row for each finished run of each value, with the baseline's of the same seed beside it."""
    finished = [outcome for outcome in comparison.outcomes if outcome.final is not None]
    distance = all(outcome.final and outcome.final.distance is not None for outcome in finished)
    base = {outcome.seed: _result(outcome, distance) for outcome in finished if outcome.sampler == comparison.plan.baseline}
    return [
        {
            "setting": change.setting,
            "value": change.value,
            "sampler": change.spec,
            "seed": outcome.seed,
            "steps": outcome.final.step,
            "metric": outcome.final.metric if distance else "held-out loss",
            "result": _result(outcome, distance),
            "baseline": base.get(outcome.seed),
            "ratio": _result(outcome, distance) / base[outcome.seed] if outcome.seed in base else None,
        }
        for change in changes
        for outcome in finished
        if outcome.sampler == change.spec and outcome.final is not None
    ]


def _result(outcome: Outcome, distance: bool) -> float:
    final = outcome.final
    assert final is not None
    return final.distance if distance and final.distance is not None else final.loss


def sentences(rows: list[dict[str, Any]]) -> list[str]:
    """For each setting its best value, and whether seeds tell it from the worst."""
    said = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        of_value: dict[str, list[float]] = {}
        for row in rows:
            if row["setting"] == setting:
                of_value.setdefault(row["value"], []).append(row["result"])
        best, worst = (choose(of_value, key=lambda value: statistics.mean(of_value[value])) for choose in (min, max))
        end = f"but its seeds overlap with those at {worst}"
        if best == worst:
            end = "as at every other value" if len(of_value) > 1 else "the only value"
        elif max(of_value[best]) < min(of_value[worst]):
            end = f"highest {_range(of_value[worst])} at {worst}"
        said.append(f"{setting}: lowest {rows[0]['metric']} {_range(of_value[best])} at {best}, {end}")
    return said


def _range(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.4g}"
    return f"{mean} ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else f"{mean} (one seed)"


def draw(rows: list[dict[str, Any]], baseline: str = BASELINE) -> Figure:
    """A panel for each setting: the result at each value with its range over seeds, the baseline's as a band."""
    names = list(dict.fromkeys(row["setting"] for row in rows))
    columns = min(len(names), 3)
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.5 * columns + 0.6, 3.1 * lines + 0.5), layout="constrained")
    shared = None
    for place, name in enumerate(names, 1):
        shared = axis = figure.add_subplot(lines, columns, place, sharey=shared)
        _panel(axis, name, [row for row in rows if row["setting"] == name], baseline)
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _panel(axis: Any, name: str, rows: list[dict[str, Any]], baseline: str) -> None:
    values = list(dict.fromkeys(row["value"] for row in rows))
    base = {row["seed"]: row["baseline"] for row in rows if row["baseline"] is not None}
    if base:
        axis.axhspan(min(base.values()), max(base.values()), color=GREY, alpha=0.2, linewidth=0)
        axis.axhline(statistics.mean(base.values()), color=GREY, label=f"{baseline}: mean, and a band for its range")
    results = [[row["result"] for row in rows if row["value"] == value] for value in values]
    means = [statistics.mean(found) for found in results]
    reach = [[mean - min(found) for mean, found in zip(means, results, strict=True)]]
    reach += [[max(found) - mean for mean, found in zip(means, results, strict=True)]]
    places = range(len(values))
    axis.errorbar(
        places, means, reach, color=COLOURS[0], marker="o", linestyle="-", linewidth=1, capsize=4, label="mean and range"
    )
    dots = [(place, result) for place, found in zip(places, results, strict=True) for result in found]
    axis.scatter(*zip(*dots, strict=True), s=12, color=COLOURS[1], zorder=3, label="each seed")
    axis.set_xticks(places, values)
    axis.margins(x=0.15)
    axis.set(xlabel=SETTINGS[name].label if name in SETTINGS else name, ylabel=f"{rows[0]['metric']} (lower is better)")


# The command ----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset", action="append", default=[], help="settings to start from; any setting of noisewise train may follow"
    )
    parser.add_argument("--sampler", default="adaptive:estimator=reinforce", help="the spec whose setting is varied")
    parser.add_argument("--setting", default="all", help=f"name of the setting, or all: {', '.join(SETTINGS)} in turn")
    parser.add_argument("--values", help="values of the setting, separated by commas; the paper's five settings have a default")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each value")
    parser.add_argument("--budget", default="25s", help="of each run: seconds (30s) or steps (1000it)")
    parser.add_argument("--images", type=int, default=1000, help="images to generate for each run")
    add_launcher_options(parser)


def chosen_changes(sampler: str, setting: str, values: str | None) -> list[Change]:
    """What the options ask for."""
    if setting == "all":
        if values is not None:
            raise ValueError("--values needs the one --setting that it is for")
        return all_settings(sampler)
    if values is None and setting not in SETTINGS:
        raise ValueError(
            f"--setting {setting} needs --values, such as --values 1,2,5; only {', '.join(SETTINGS)} have a default"
        )
    if values is not None and not values.strip():
        raise ValueError(f"--values is empty: give values of {setting}, separated by commas")
    return one_setting(sampler, setting, split_specs(SETTINGS[setting].values if values is None else values))


def chosen_config(options: argparse.Namespace, rest: list[str]) -> Config:
    """What every run trains, but for its sampler and seed."""
    if any(word.partition("=")[0] == "--seed" for word in rest):
        raise ValueError("ablate takes --seeds, not --seed")
    own = ["--sampler", "--setting", "--values", "--seeds", "--budget", "--images", "--preset", "--out"]
    config = parse_config(config_parser(prog="noisewise analyze"), with_files(rest, options.preset or ["digits"]), own)
    return with_budget(config, options.budget)


def analyse(options: argparse.Namespace, rest: list[str]) -> Analysis:
    changes = chosen_changes(options.sampler, options.setting, options.values)
    config, folder = chosen_config(options, rest), Path(options.out) / "ablate"
    samplers = list(dict.fromkeys([BASELINE, *(change.spec for change in changes)]))
    configs = combinations(config, samplers, [config.process], options.seeds, folder)
    plan = Plan("ablate", BASELINE, options.budget, (1.0,), options.images, command=options.words)
    launcher = chosen_launcher(options, folder, min(TOGETHER, len(samplers)))
    with StopRequest() as stop:
        comparison = conduct(plan, configs, launcher, stop=stop)
    asked = {Path(config.out or "").name for config in configs}  # the folder may hold those of earlier commands too
    comparison = replace(comparison, outcomes=[one for one in comparison.outcomes if one.folder.name in asked])
    rows = rows_of(changes, comparison)
    missing = [one for one in comparison.outcomes if one.final is None]
    if not rows:
        why = next((f": {one.failure.message}" for one in missing if one.failure), "")
        raise NoneFinished(f"no run in {folder} has finished yet{why}; {launcher.farewell()}")
    says = [f"{one.status}: {one.sampler}, seed {one.seed}; the same command goes on with it" for one in missing]
    return Analysis("ablate", draw(rows), rows, [*says, *sentences(rows)])
