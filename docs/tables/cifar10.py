"""The study on CIFAR-10: strata, search, confirmation, costs, and U-Nets beside each other."""

import math
import statistics
from typing import Any

from . import rows, spec_now, table
from .curves import SHARES, curves, geometric, in_order, joined, ranked, with_spread
from .field import NAMES, TARGETS

from strata import correlations, gains, values  # isort: skip

PROCESSES = {"linear": "linear", "cosine": "cosine", "quadratic": "quadratic", "edm": "EDM", "flow:time_scale=1000": "flow"}
CONFIRMED = "cifar10-v1-confirmation.jsonl"


def strata() -> str:
    """The gain of each tenth of u in pictures and in targets, in per cent."""
    measured = rows("cifar10-v1-strata.jsonl")
    found, rho = gains(measured), correlations(gains(measured))
    uniform = [values(row) for row in measured if row["branch"] == "uniform"]
    found |= {"noise": {name: relative_deviation([one[name] for one in uniform]) for name in uniform[0]}}
    lines = []
    for k, gain in found.items():
        label = k if k == "noise" else f"{k / 10:.1f} to {(k + 1) / 10:.1f}"
        lines.append([label, f"{100 * gain['distance']:.1f}", *(f"{100 * gain[name]:.2f}" for name in TARGETS)])
    lines.append(["rho with FID", "", *(f"{rho[name]:.2f}" for name in TARGETS)])
    return table(["more of u in", "FID-5k", *TARGETS.values()], lines)


def relative_deviation(found: list[float]) -> float:
    """The standard deviation over the mean."""
    return statistics.stdev(found) / statistics.fmean(found)


def confirmation() -> str:
    """FID-5k of the confirmation, each process by itself, all seeds in a cell, lowest end first."""
    heads = ["process", "spec", "seeds", "50 %", "75 %", "100 %", "over uniform's", "steps to uniform's last"]
    lines = []
    for process, name in PROCESSES.items():
        runs = curves([row for row in rows(CONFIRMED) if row["process"] == process])
        lines += [[name, *cells] for _, cells in ranked(runs, SHARES[1:])]
    return table(heads, lines)


def front() -> str:
    """What the README shows: mean FID over seeds at a short and longer budgets, and its ratios, mean over the seeds of both."""
    specs = ("uniform", "minsnr:gamma=5", "adaptive")
    budgets = [[row for row in rows(CONFIRMED) if row.get("share") == 1]]
    long = rows("cifar10-v2-runs.jsonl")
    last = {row["process"]: max(one["step"] for one in long if one["process"] == row["process"]) for row in long}
    for mark in (24000, 32000, 64000):
        at = [row for row in long if row["step"] == mark]
        budgets.append([row for row in at if mark != 24000 or last[row["process"]] == mark])
    lines = []
    for process, name in PROCESSES.items():
        for found in budgets:
            ends = {(spec_now(row), row["seed"]): row["distance"] for row in found if row["process"] == process}
            seeds = {spec: {seed: end for (one, seed), end in ends.items() if one == spec} for spec in specs}
            if not seeds["adaptive"]:
                continue
            over = (geometric(seeds["adaptive"], seeds[other]) for other in ("minsnr:gamma=5", "uniform"))
            steps = next(row["step"] for row in found if row["process"] == process)
            lines.append([name, f"{steps:,}", *map(with_spread, seeds.values()), *over])
    heads = ["process", "steps", "`uniform`", "`minsnr`", "`adaptive`", "`adaptive` over `minsnr`", "over `uniform`"]
    return table(heads, lines)


def margins() -> str:
    """What the ends of the confirmation say besides: the default over the heuristics, and the loss that it pays with."""
    heads = [
        "process",
        "`adaptive` over `minsnr`",
        "`logit_normal` over `uniform`",
        "`adaptive` over `uniform`: loss at u < 0.1",
    ]
    lines = []
    for process, name in PROCESSES.items():
        ends = [row for row in rows(CONFIRMED) if (row["process"], row.get("share")) == (process, 1)]
        last = {(spec_now(row), row["seed"]): row for row in ends}
        seeds = sorted({seed for _, seed in last})
        pairs = [("adaptive", "minsnr:gamma=5"), ("logit_normal", "uniform")]
        cells = [in_order(ratios(last, *pair, lambda row: row["distance"]), seeds) for pair in pairs]
        cells.append(in_order(ratios(last, "adaptive", "uniform", lambda row: statistics.fmean(row["held_out"][:5])), seeds))
        lines.append([name, *cells])
    return table(heads, lines)


def ratios(last: dict[tuple[str, int], dict[str, Any]], one: str, other: str, value: Any) -> dict[int, str]:
    """One spec over another, seed by seed, where both came to their end."""
    both = [seed for spec, seed in last if spec == one and (other, seed) in last]
    return {seed: f"{value(last[one, seed]) / value(last[other, seed]):.2f}" for seed in both}


def larger() -> str:
    """FID of 5,000 and of 50,000 images with the larger network, lowest end first."""
    measured = rows("cifar10-v1-paper.jsonl")
    more = {spec_now(row): row["headline"] for row in measured if row["share"] == 1}
    heads = ["spec", "seed", "50 %", "75 %", "100 %", "over `uniform`", "steps to its last", "FID-50k", "over `uniform`"]
    found = ranked(curves(measured), SHARES[1:])
    return table(heads, ([*cells, f"{more[spec]:.2f}", f"{more[spec] / more['uniform']:.2f}"] for spec, cells in found))


def method_cost() -> str:
    """What a step with each method takes over uniform's."""
    names = {spec_now({"sampler": spec}): name for spec, name in NAMES.items()}
    lines = []
    for row in rows("cifar10-v1-method-cost.jsonl"):
        spec = spec_now({**row, "sampler": row["spec"]})
        spread = f"{row['lowest']:.3f} to {row['highest']:.3f}"
        name = names.get(spec, row["method"])
        lines.append([name, f"`{spec}`", f"{row['steps_per_second']:.1f}", f"{row['ratio']:.3f}", spread])
    return table(["method", "spec", "steps a second", "over uniform's", "lowest to highest"], lines)


LONG = ("digits_long.jsonl", "digits_bells.jsonl", "digits_default.jsonl")
CONTINUOUS = ("digits_continuous.jsonl", "digits_default.jsonl")
UNETS = {  # row to files, process and steps
    "digits, linear": (LONG, "linear", 2400),
    "digits, cosine": (LONG, "cosine", 2400),
    "digits, quadratic": (("digits_screen.jsonl", "digits_default.jsonl"), "quadratic", 700),
    "digits, EDM": (CONTINUOUS, "edm", 700),
    "digits, flow": (CONTINUOUS, "flow", 700),
    "CIFAR-10, linear": (("cifar10-v1-field.jsonl", CONFIRMED), "linear", 10000),
    "CIFAR-10, cosine": ((CONFIRMED,), "cosine", 10000),
    "CIFAR-10, quadratic": ((CONFIRMED,), "quadratic", 10000),
    "CIFAR-10, EDM": ((CONFIRMED,), "edm", 10000),
    "CIFAR-10, flow": ((CONFIRMED,), "flow:time_scale=1000", 10000),
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


def unets() -> str:
    """The distance over uniform's with the same seed at the end of the budget, for U-Nets."""
    lines = [[name, *(over_uniform(*where, specs) for specs in SPECS.values())] for name, where in UNETS.items()]
    return table(["", *SPECS], lines)


def over_uniform(files: tuple[str, ...], process: str, steps: int, specs: tuple[str, ...]) -> str:
    """The ratios of all seeds, in their order; a dash for one that was not run."""
    found = [row for file in files for row in rows(file) if row.get("share") == 1]
    ends = [row for row in found if (row["process"], row["steps"]) == (process, steps)]
    uniform = {row["seed"]: row["distance"] for row in ends if row["sampler"] == "uniform"}
    wanted = {row["seed"]: row["distance"] for row in ends if spec_now(row) in specs}
    return in_order({seed: f"{value / uniform[seed]:.2f}" for seed, value in wanted.items()}, uniform)


def search() -> str:
    """FID-5k with seed 0 after 2,500 and 5,000 steps: what the search ran, and the same moments of the field's runs."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in linear_rows():
        if row["seed"] == 0 and row.get("step") in (2500, 5000):
            found.setdefault(spec_now(row), {2500: [], 5000: []})[row["step"]].append(row["distance"])
    lines = [
        [f"`{spec}`", *(joined(f"{value:.1f}" for value in curve[step]) for step in (2500, 5000))]
        for spec, curve in sorted(found.items(), key=lambda one: statistics.fmean(one[1][5000]))
    ]
    return table(["spec", "2,500 steps", "5,000 steps"], lines)


def linear_rows() -> list[dict[str, Any]]:
    """Evaluations of the field and the search; a run that repeated bit for bit counts once."""
    found = {
        (spec_now(row), row["seed"], row["steps"], row["step"], row["distance"]): row
        for name in ("field", "search")
        for row in rows(f"cifar10-v1-{name}.jsonl")
        if row["process"] == "linear" and "share" in row
    }
    return list(found.values())


def levels() -> str:
    """How the loss in each tenth of u goes with FID over runs of the same length: the correlation of their logarithms."""
    lines = []
    for step in (2500, 5000, 10000):
        found = [row for row in linear_rows() if row.get("step") == step]
        fid = [math.log(row["distance"]) for row in found]
        tenths = [[math.log(statistics.fmean(row["held_out"][5 * k : 5 * k + 5])) for row in found] for k in range(10)]
        lines.append([f"{step:,}", len(found), *(f"{statistics.correlation(tenth, fid):.2f}" for tenth in tenths)])
    return table(["steps", "runs", *(f"{k / 10:.1f} to {(k + 1) / 10:.1f}" for k in range(10))], lines)
