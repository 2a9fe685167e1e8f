"""Tables of the field: every method on CIFAR-10 under the same conditions."""

import math
import statistics
from typing import Any, NamedTuple

import torch
from cifar10_curves import SHARES, curves, ranked
from pages import rows, spec_now  # makes the benchmarks known as modules

from noisewise.analysis.gain_quality import spearman
from noisewise.levels import middles
from noisewise.looking.validation import Validation
from noisewise.objective import Objective
from noisewise.processes import DDPM

from field import METHODS  # isort: skip
from rebuild import best_sessions  # isort: skip
from strata import targets  # isort: skip

TARGETS = {"minsnr 5": "Min-SNR 5", "minsnr 1": "Min-SNR 1", "p2": "P2", "plain": "plain", "log": "log", "vlb": "VLB"}
CONTROLS = ("beta:a=0.72,b=0.85", "paper_cifar10:policy=global")  # of the published method
LINEAR = Objective(DDPM.linear(), "eps")


def field_table() -> list[str]:
    """FID-5k of each method along its budget, all seeds in a cell, lowest end first."""
    names = {spec: name for name, spec in METHODS.items()}
    runs = curves(rows("cifar10-v1-field.jsonl"))
    heading = "| method | spec | seeds | 25 % | 50 % | 75 % | 100 % | over uniform's | steps to uniform's last |"
    return [heading, "|---" * 9 + "|", *(f"| {names.get(spec, '')} {line}" for spec, line in ranked(runs, SHARES))]


def every_method_table() -> list[str]:
    """The end of the same for the methods that have a name and ran with all seeds of the field, all seeds in a cell."""
    runs = named_runs()
    uniform = {seed: curve[1.0] for (spec, seed), curve in runs.items() if spec == "uniform"}
    names = {spec: name for name, spec in METHODS.items()}
    lines = ["| method | spec | FID | over `uniform` |", "|---|---|---|---|"]
    for spec, _ in ranked(runs, ()):
        ends = {seed: curve[1.0] for (one, seed), curve in sorted(runs.items()) if one == spec}
        values = " / ".join(f"{end:.1f}" for end in ends.values())
        ratios = " / ".join(f"{end / uniform[seed]:.2f}" for seed, end in ends.items())
        lines.append(f"| {names[spec]} | `{spec}` | {values} | {ratios} |")
    return lines


def named_runs() -> dict[tuple[str, int], dict[float, float]]:
    """FID by share of the methods of the field that have a name and ran to the end with each of its seeds."""
    runs = curves(rows("cifar10-v1-field.jsonl"))
    seeds = {seed for _, seed in runs}
    whole = {spec for spec in METHODS.values() if all((spec, seed) in runs for seed in seeds)}
    return {run: curve for run, curve in runs.items() if run[0] in whole}


def field_targets_table() -> list[str]:
    """Over the named methods of the field: how the ranks of their held-out objectives go with those of FID, for each seed."""
    chosen = named_runs()
    seeds = sorted({seed for _, seed in chosen})
    found = [
        row
        for run in best_sessions(rows("cifar10-v1-field.jsonl"))
        for row in run
        if (spec_now(row), row["seed"]) in chosen and "share" in row
    ]
    lines = ["| steps | methods | " + " | ".join(TARGETS.values()) + " |", "|---" * (len(TARGETS) + 2) + "|"]
    for share in SHARES:
        rhos = [rank_correlations([row for row in found if (row["share"], row["seed"]) == (share, seed)]) for seed in seeds]
        cells = [" / ".join(f"{rho[name]:.2f}" for rho in rhos) for name in TARGETS]
        step = next(row["step"] for row in found if row["share"] == share)
        lines.append(f"| {step:,} | {len(chosen) // len(seeds)} | " + " | ".join(cells) + " |")
    return lines


def rank_correlations(found: list[dict[str, Any]]) -> dict[str, float]:
    """Spearman's rho of each target with FID, over rows of one moment and seed."""
    fid = torch.tensor([[row["distance"]] for row in found])
    judged = [targets(held_out(row), LINEAR) for row in found]
    return {name: float(spearman(torch.tensor([[one[name]] for one in judged]), fid)[0]) for name in TARGETS}


def field_objectives_table() -> list[str]:
    """How much each method counts the first tenth of u, beside its FID, all seeds in a cell, lowest FID first."""
    lines = ["| spec | seeds | objective of u < 0.1 | effective share | FID over uniform's |", "|---" * 5 + "|"]
    for found in objectives():
        cells = [" / ".join(f"{getattr(one, name):.2f}" for one in found) for name in ("counted", "effective", "ratio")]
        lines.append(f"| `{found[0].spec}` | {' / '.join(str(one.seed) for one in found)} | " + " | ".join(cells) + " |")
    return lines


class Counted(NamedTuple):
    """A run to the end: what it counts the least noise, times uniform's, and what came of it."""

    spec: str
    seed: int
    counted: float  # draws times weight in the first tenth of u, in the mean of the evaluations
    effective: float  # share of a batch at the end
    ratio: float  # FID over uniform's


def objectives() -> list[list[Counted]]:
    """The runs of each spec of the field that is a named method or one of its controls, lowest mean FID first."""
    wanted = {*METHODS.values(), *CONTROLS}
    measured = [[row for row in run if "share" in row] for run in best_sessions(rows("cifar10-v1-field.jsonl"))]
    runs = {(spec_now(run[-1]), run[-1]["seed"]): run for run in measured if run[-1]["share"] == 1}
    found: dict[str, list[Counted]] = {}
    for (spec, seed), run in sorted(runs.items()):
        if spec in wanted:
            tenth = statistics.fmean(statistics.fmean(row["objective_by_level"][:5]) for row in run)
            ratio = run[-1]["distance"] / runs["uniform", seed][-1]["distance"]
            found.setdefault(spec, []).append(Counted(spec, seed, tenth, run[-1]["effective_share"], ratio))
    return sorted(found.values(), key=lambda one: statistics.fmean(run.ratio for run in one))


def held_out(row: dict[str, Any]) -> Validation:
    """The losses of a row of the linear schedule, to be weighted."""
    loss = torch.tensor(row["held_out"], dtype=torch.float64)
    return Validation(middles(len(loss)), loss, torch.full_like(loss, math.nan), 0, LINEAR)
