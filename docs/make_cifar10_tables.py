"""Fill in the tables of the study, in its record, docs/adaptive.md and README.md: python docs/make_cifar10_tables.py"""

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cifar10_curves import SHARES, all_curves, curves, ranked, reached
from digits_tables import bells_table, estimators_table, search_table, variance_table, warmup_table
from field_tables import TARGETS, every_method_table, field_objectives_table, field_table, field_targets_table
from pages import BENCHMARKS, DOCS, fill_in, rows, spec_now  # makes the benchmarks known as modules

from field import METHODS  # isort: skip
from strata import correlations, gains, values  # isort: skip


def strata_table() -> list[str]:
    """The gain of each tenth of u in pictures and in targets, in per cent."""
    measured = rows("cifar10-v1-strata.jsonl")
    found, rho = gains(measured), correlations(gains(measured))
    names = ["distance", *TARGETS]
    lines = ["| more of u in | FID-5k | " + " | ".join(TARGETS.values()) + " |", "|---" * (len(names) + 1) + "|"]
    for k, gain in found.items():
        cells = [f"{100 * gain[name]:.1f}" if name == "distance" else f"{100 * gain[name]:.2f}" for name in names]
        lines.append(f"| {k / 10:.1f} to {(k + 1) / 10:.1f} | " + " | ".join(cells) + " |")
    uniform = [values(row) for row in measured if row["branch"] == "uniform"]
    noise = {name: 100 * relative_deviation([one[name] for one in uniform]) for name in names}
    cells = [f"{noise[name]:.1f}" if name == "distance" else f"{noise[name]:.2f}" for name in names]
    lines.append("| noise | " + " | ".join(cells) + " |")
    lines.append("| rho with FID | | " + " | ".join(f"{rho[name]:.2f}" for name in TARGETS) + " |")
    return lines


def relative_deviation(found: list[float]) -> float:
    """The standard deviation over the mean."""
    return statistics.stdev(found) / statistics.fmean(found)


def in_order(found: dict[int, str], seeds: Iterable[int]) -> str:
    """What was found for each of the seeds; a dash for one that was not run, and nothing if none was."""
    return " / ".join(found.get(seed, "–") for seed in sorted(seeds)) if found else ""


PROCESSES = {"linear": "linear", "cosine": "cosine", "quadratic": "quadratic", "edm": "EDM", "flow:time_scale=1000": "flow"}


def confirmation_table() -> list[str]:
    """FID-5k of the confirmation, each process by itself, all seeds in a cell, lowest end first."""
    lines = ["| process | spec | seeds | 50 % | 75 % | 100 % | over uniform's | steps to uniform's last |", "|---" * 8 + "|"]
    measured = rows("cifar10-v1-confirmation.jsonl")
    for process, name in PROCESSES.items():
        runs = curves([row for row in measured if row["process"] == process])
        lines += [f"| {name} {line}" for _, line in ranked(runs, SHARES[1:])]
    return lines


def headline_table() -> list[str]:
    """The same at the end of the budget, a line for each process: all seeds in a cell."""
    specs = ("uniform", "logit_normal", "minsnr:gamma=5", "adaptive")
    shown = " | ".join(f"`{spec}`" for spec in specs)
    lines = [f"| process | {shown} | `adaptive` over `uniform` | its steps to `uniform`'s last FID |", "|---" * 7 + "|"]
    for process, name in PROCESSES.items():
        runs = all_curves([row for row in rows("cifar10-v1-confirmation.jsonl") if row["process"] == process])
        last = {run: curve[1.0] for run, curve in runs.items() if 1.0 in curve}
        uniform = {seed: value for (spec, seed), value in last.items() if spec == "uniform"}
        ends = {spec: {seed: last[spec, seed] for seed in uniform if (spec, seed) in last} for spec in specs}
        cells = [in_order({seed: f"{value:.1f}" for seed, value in found.items()}, uniform) for found in ends.values()]
        cells.append(in_order({seed: f"{value / uniform[seed]:.2f}" for seed, value in ends["adaptive"].items()}, uniform))
        cells.append(in_order({seed: reached(runs["adaptive", seed], value) for seed, value in uniform.items()}, uniform))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def paper_table() -> list[str]:
    """FID of 5,000 and of 50,000 images with the larger network, lowest end first."""
    measured = rows("cifar10-v1-paper.jsonl")
    more = {spec_now(row): row["headline"] for row in measured if row["share"] == 1}
    lines = ["| spec | seed | 50 % | 75 % | 100 % | over `uniform` | steps to its last | FID-50k | over `uniform` |"]
    lines.append("|---" * 9 + "|")
    lines += [
        f"{line} {more[spec]:.2f} | {more[spec] / more['uniform']:.2f} |" for spec, line in ranked(curves(measured), SHARES[1:])
    ]
    return lines


def cost_table() -> list[str]:
    """What a step with each method takes over uniform's."""
    lines = ["| method | spec | steps a second | over uniform's | lowest to highest |", "|---|---|---|---|---|"]
    names = {spec_now({"sampler": spec}): name for name, spec in METHODS.items()}
    for row in rows("cifar10-v1-method-cost.jsonl"):
        spec = spec_now({**row, "sampler": row["spec"]})
        name = names.get(spec, row["method"])
        spread = f"{row['lowest']:.3f} to {row['highest']:.3f}"
        lines.append(f"| {name} | `{spec}` | {row['steps_per_second']:.1f} | {row['ratio']:.3f} | {spread} |")
    return lines


LONG = ("digits_long.jsonl", "digits_bells.jsonl", "digits_default.jsonl")
CONTINUOUS = ("digits_continuous.jsonl", "digits_default.jsonl")
CONFIRMED = ("cifar10-v1-confirmation.jsonl",)
UNETS = {  # row to files, process and steps
    "digits, linear": (LONG, "linear", 2400),
    "digits, cosine": (LONG, "cosine", 2400),
    "digits, quadratic": (("digits_screen.jsonl", "digits_default.jsonl"), "quadratic", 700),
    "digits, EDM": (CONTINUOUS, "edm", 700),
    "digits, flow": (CONTINUOUS, "flow", 700),
    "CIFAR-10, linear": (("cifar10-v1-field.jsonl", *CONFIRMED), "linear", 10000),
    "CIFAR-10, cosine": (CONFIRMED, "cosine", 10000),
    "CIFAR-10, quadratic": (CONFIRMED, "quadratic", 10000),
    "CIFAR-10, EDM": (CONFIRMED, "edm", 10000),
    "CIFAR-10, flow": (CONFIRMED, "flow:time_scale=1000", 10000),
    "CIFAR-10, linear, 35.7 M parameters": (("cifar10-v1-paper.jsonl",), "linear", 15000),
}
INDEPENDENT = "adaptive:draws=independent,floor=0.2"
SPECS = {  # column to the specs that stand for it
    "`adaptive`": ("adaptive",),
    "`adaptive:floor=0.2`": ("adaptive:floor=0.2",),
    "the same, `draws=independent`": (INDEPENDENT, f"{INDEPENDENT}+minsnr:gamma=5"),
    "that, `+none`": (f"{INDEPENDENT}+none",),
    "`minsnr`": ("minsnr:gamma=5",),
    "`logit_normal`": ("logit_normal",),
}


def unets_table() -> list[str]:
    """The distance over uniform's with the same seed at the end of the budget, for U-Nets."""
    lines = ["| | " + " | ".join(SPECS) + " |", "|---" * (len(SPECS) + 1) + "|"]
    for name, where in UNETS.items():
        lines.append(f"| {name} | " + " | ".join(over_uniform(*where, specs) for specs in SPECS.values()) + " |")
    return lines


def over_uniform(files: tuple[str, ...], process: str, steps: int, specs: tuple[str, ...]) -> str:
    """The ratios of all seeds, in their order; a dash for one that was not run."""
    found = [row for file in files for row in rows(file) if row.get("share") == 1]
    ends = [row for row in found if (row["process"], row["steps"]) == (process, steps)]
    uniform = {row["seed"]: row["distance"] for row in ends if row["sampler"] == "uniform"}
    wanted = {row["seed"]: row["distance"] for row in ends if spec_now(row) in specs}
    return in_order({seed: f"{value / uniform[seed]:.2f}" for seed, value in wanted.items()}, uniform)


def cifar10_search_table() -> list[str]:
    """FID-5k with seed 0 after 2,500 and 5,000 steps: what the search ran, and the same moments of the field's runs."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in linear_rows():
        if row["seed"] == 0 and row.get("step") in (2500, 5000):
            found.setdefault(spec_now(row), {2500: [], 5000: []})[row["step"]].append(row["distance"])
    lines = ["| spec | 2,500 steps | 5,000 steps |", "|---|---|---|"]
    for spec, curve in sorted(found.items(), key=lambda one: statistics.fmean(one[1][5000])):
        cells = [" / ".join(f"{value:.1f}" for value in curve[step]) for step in (2500, 5000)]
        lines.append(f"| `{spec}` | {cells[0]} | {cells[1]} |")
    return lines


def linear_rows() -> list[dict[str, Any]]:
    """Evaluations of the field and the search; a run that repeated bit for bit counts once."""
    found = {
        (spec_now(row), row["seed"], row["steps"], row["step"], row["distance"]): row
        for name in ("field", "search")
        for row in rows(f"cifar10-v1-{name}.jsonl")
        if row["process"] == "linear" and "share" in row
    }
    return list(found.values())


def levels_table() -> list[str]:
    """How the loss in each tenth of u goes with FID over runs of the same length: the correlation of their logarithms."""
    lines = [
        "| steps | runs | " + " | ".join(f"{k / 10:.1f} to {(k + 1) / 10:.1f}" for k in range(10)) + " |",
        "|---" * 12 + "|",
    ]
    for step in (2500, 5000, 10000):
        found = [row for row in linear_rows() if row.get("step") == step]
        fid = [math.log(row["distance"]) for row in found]
        tenths = [[math.log(statistics.fmean(row["held_out"][5 * k : 5 * k + 5])) for row in found] for k in range(10)]
        cells = [f"{statistics.correlation(tenth, fid):.2f}" for tenth in tenths]
        lines.append(f"| {step:,} | {len(found)} | " + " | ".join(cells) + " |")
    return lines


PAGES: dict[Path, dict[str, Callable[[], list[str]]]] = {
    BENCHMARKS / "cifar10.md": {
        "CIFAR-10 strata": strata_table,
        "CIFAR-10 field": field_table,
        "CIFAR-10 field targets": field_targets_table,
        "CIFAR-10 field objectives": field_objectives_table,
        "CIFAR-10 search": cifar10_search_table,
        "CIFAR-10 confirmation": confirmation_table,
        "CIFAR-10 paper model": paper_table,
        "CIFAR-10 cost": cost_table,
        "levels": levels_table,
        "warm-up": warmup_table,
        "bells": bells_table,
        "search": search_table,
        "estimators": estimators_table,
        "variance": variance_table,
    },
    DOCS / "adaptive.md": {"unets": unets_table},
    DOCS / "results.md": {"quality": headline_table, "field": every_method_table, "larger": paper_table},
    DOCS.parent / "README.md": {"quality": headline_table},
}

if __name__ == "__main__":
    for page, tables in PAGES.items():
        fill_in(page, tables)
