"""The field: every method on CIFAR-10 under the same conditions."""

import math
import statistics
from typing import Any, NamedTuple

import torch

from noisewise.analysis.predictor import spearman
from noisewise.levels import middles
from noisewise.looking.validation import Validation
from noisewise.objective import Objective
from noisewise.processes import DDPM

from . import rows, spec_now, table
from .curves import SHARES, Runs, curves, geometric, joined, ranked, with_spread

from field import EARLIER, METHODS  # isort: skip
from rebuild import best_sessions  # isort: skip
from strata import targets  # isort: skip

TARGETS = {"minsnr 5": "Min-SNR 5", "minsnr 1": "Min-SNR 1", "p2": "P2", "plain": "plain", "log": "log", "vlb": "VLB"}
CONTROLS = ("beta:a=0.72,b=0.85", spec_now({"session": "2026-11-17", "sampler": "paper_cifar10:policy=global"}))
"""Of the published method, as it was."""
LINEAR = Objective(DDPM.linear(), "eps")
NAMES = {spec: name for name, spec in (METHODS | EARLIER).items()}


def field() -> str:
    """FID-5k of each method along its budget, all seeds in a cell, lowest end first."""
    runs = curves(rows("cifar10-v1-field.jsonl"))
    heads = ["method", "spec", "seeds", "25 %", "50 %", "75 %", "100 %", "over uniform's", "steps to uniform's last"]
    return table(heads, ([NAMES.get(spec, ""), *cells] for spec, cells in ranked(runs, SHARES)))


LABELS = {  # what the page of results calls a method, where that is not its spec
    "min-snr": "`minsnr`",
    "loss-weighted-unbiased": "`adaptive`, independent draws, floor 0.2",
    "loss-weighted": "`adaptive:correction=none`, independent draws, floor 0.2",
    "adaptive-paper, earlier": "`paper_cifar10`, earlier",
    "adaptive-repaired, earlier": "`reinforce` on the VLB, earlier",
    "adaptive-min-snr, earlier": "`reinforce` on the VLB, with `minsnr`, earlier",
    "speed-released, earlier": "`speed` as released, earlier",
}


def methods() -> str:
    """The end of the same for the methods that have a name, mean over seeds; VLB and losses over uniform's."""
    runs = {(spec_now(run[-1]), run[-1]["seed"]): run[-1] for run in finished()}
    lines = []
    for spec, _ in ranked(named_runs(), ()):
        ends = of(runs, spec)
        distances, uniform = ({seed: one[seed]["distance"] for seed in ends} for one in (ends, of(runs, "uniform")))
        cells = [with_spread(distances), geometric(distances, uniform)]
        pairs = [(row, runs["uniform", seed]) for seed, row in ends.items()]
        cells.append(f"{statistics.fmean(row['vlb'] / one['vlb'] for row, one in pairs):.3f}")
        for part in (slice(5), slice(45, None)):
            ratios = [statistics.fmean(row["held_out"][part]) / statistics.fmean(one["held_out"][part]) for row, one in pairs]
            cells.append(f"{statistics.fmean(ratios):.2f}")
        lines.append([LABELS.get(NAMES[spec], f"`{spec}`"), *cells])
    return table(["method", "FID", "over `uniform`", "VLB", "loss at u < 0.1", "at u > 0.9"], lines)


def of(runs: dict[tuple[str, int], dict[str, Any]], spec: str) -> dict[int, dict[str, Any]]:
    """The runs of a spec by seed."""
    return {seed: row for (one, seed), row in runs.items() if one == spec}


def every_method() -> str:
    """The end of the same for the methods that have a name: FID, VLB and held-out losses over uniform's with the same seed."""
    runs = {(spec_now(run[-1]), run[-1]["seed"]): run[-1] for run in finished()}
    heads = ["method", "spec", "FID", "over `uniform`", "VLB", "loss at u < 0.1", "at u > 0.9"]
    lines = []
    for spec, _ in ranked(named_runs(), ()):
        pairs = [(row, runs["uniform", seed]) for (one, seed), row in sorted(runs.items()) if one == spec]
        cells = [joined(f"{row['distance']:.1f}" for row, _ in pairs)]
        cells.append(joined(f"{row['distance'] / uniform['distance']:.2f}" for row, uniform in pairs))
        cells.append(joined(f"{row['vlb'] / uniform['vlb']:.3f}" for row, uniform in pairs))
        for part in (slice(5), slice(45, None)):
            ratios = [statistics.fmean(row["held_out"][part]) / statistics.fmean(one["held_out"][part]) for row, one in pairs]
            cells.append(joined(f"{ratio:.2f}" for ratio in ratios))
        lines.append([NAMES[spec], f"`{spec}`", *cells])
    return table(heads, lines)


def finished() -> list[list[dict[str, Any]]]:
    """The evaluations of each run of the field that came to its end."""
    found = [[row for row in run if "share" in row] for run in best_sessions(rows("cifar10-v1-field.jsonl"))]
    return [run for run in found if run[-1]["share"] == 1]


def named_runs() -> Runs:
    """FID by share of the methods of the field that have a name and ran to the end with each of its seeds."""
    runs = curves(rows("cifar10-v1-field.jsonl"))
    seeds = {seed for _, seed in runs}
    whole = {spec for spec in NAMES if all((spec, seed) in runs for seed in seeds)}
    return {run: curve for run, curve in runs.items() if run[0] in whole}


def field_targets() -> str:
    """Over the named methods of the field: how the ranks of their held-out objectives go with those of FID, for each seed."""
    chosen = named_runs()
    seeds = sorted({seed for _, seed in chosen})
    found = [row for run in finished() for row in run if (spec_now(row), row["seed"]) in chosen]
    lines = []
    for share in SHARES:
        rhos = [rank_correlations([row for row in found if (row["share"], row["seed"]) == (share, seed)]) for seed in seeds]
        cells = [joined(f"{rho[name]:.2f}" for rho in rhos) for name in TARGETS]
        step = next(row["step"] for row in found if row["share"] == share)
        lines.append([f"{step:,}", len(chosen) // len(seeds), *cells])
    return table(["steps", "methods", *TARGETS.values()], lines)


def rank_correlations(found: list[dict[str, Any]]) -> dict[str, float]:
    """Spearman's rho of each target with FID, over rows of one moment and seed."""
    judged = [targets(held_out(row), LINEAR) for row in found]
    return {name: rho([one[name] for one in judged], [row["distance"] for row in found]) for name in TARGETS}


def rho(first: list[float], second: list[float]) -> float:
    """Spearman's rank correlation."""
    return float(spearman(torch.tensor(first)[:, None], torch.tensor(second)[:, None])[0])


def field_objectives() -> str:
    """How much each method counts the first tenth of u, beside its FID, all seeds in a cell, lowest FID first."""
    lines = []
    for found in objectives():
        cells = [joined(f"{getattr(one, name):.2f}" for one in found) for name in ("counted", "effective", "ratio")]
        lines.append([f"`{found[0].spec}`", joined(str(one.seed) for one in found), *cells])
    return table(["spec", "seeds", "objective of u < 0.1", "effective share", "FID over uniform's"], lines)


class Counted(NamedTuple):
    """A run to the end: what it counts the least noise, times uniform's, and what came of it."""

    spec: str
    seed: int
    counted: float  # draws times weight in the first tenth of u, in the mean of the evaluations
    effective: float  # share of a batch at the end
    ratio: float  # FID over uniform's


def objectives() -> list[list[Counted]]:
    """The runs of each spec of the field that is a named method or one of its controls, lowest mean FID first."""
    wanted = {*NAMES, *CONTROLS}
    runs = {(spec_now(run[-1]), run[-1]["seed"]): run for run in finished()}
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
