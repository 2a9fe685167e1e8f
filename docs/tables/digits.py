"""Runs of the preset `digits` and its variants: what the study on CIFAR-10 tried first."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from . import rows, spec_now, table
from .curves import joined
from .long import mean_noise

from strata import correlations, gains  # isort: skip

RHOS = {"minsnr 5": "rho: Min-SNR 5", "minsnr 1": "Min-SNR 1", "p2": "P2", "plain": "plain", "log": "log", "vlb": "VLB"}


def strata() -> str:
    """The best and the worst tenth of u on each schedule, in per cent, and which target ranks them as pictures do."""
    lines = []
    for schedule in ("linear", "cosine", "quadratic"):
        measured = [row for row in rows("digits_strata.jsonl") if row["process"] == schedule]
        found, rho = gains(measured), correlations(gains(measured))
        gain = {k: one["distance"] for k, one in found.items()}
        ends = [max(gain, key=lambda k: gain[k]), min(gain, key=lambda k: gain[k])]
        cells = [cell for k in ends for cell in (f"{k / 10:.1f} to {(k + 1) / 10:.1f}", f"{100 * gain[k]:.1f}")]
        noise = statistics.stdev(math.log(row["distance"]) for row in measured if row["branch"] == "uniform")
        lines.append([schedule, *cells, f"{100 * noise:.1f}", *(f"{rho[name]:.2f}" for name in RHOS)])
    return table(["schedule", "best tenth of u", "its gain", "worst", "its gain", "noise", *RHOS.values()], lines)


def screen() -> str:
    """Distance over uniform's with the same seed after 700 steps, best first; specs as they were written then."""
    found = {(row["process"], row["seed"], row["sampler"]): row["distance"] for row in rows("digits_screen.jsonl")}
    places = [("linear", 0), ("cosine", 0), ("quadratic", 0), ("linear", 1), ("cosine", 1)]
    ratio = {run: distance / found[*run[:2], "uniform"] for run, distance in found.items()}
    specs = {spec for *_, spec in found} - {"uniform"}
    mean = {spec: statistics.fmean(value for run, value in ratio.items() if run[2] == spec) for spec in specs}
    lines = [
        [f"`{spec}`", *(f"{ratio[*place, spec]:.2f}" if (*place, spec) in ratio else "" for place in places)]
        for spec in sorted(specs, key=lambda one: mean[one])
    ]
    return table(["spec", "linear", "cosine", "quadratic", "linear, seed 1", "cosine, seed 1"], lines)


def longer() -> str:
    """Distance along 2,400 steps, two seeds in a cell, lowest end first; specs as they were written then."""
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for row in sorted(rows("digits_long.jsonl"), key=lambda row: row["seed"]):
        found.setdefault((row["process"], row["sampler"]), {}).setdefault(row["share"], []).append(row["distance"])
    order = sorted(found, key=lambda run: (run[0] != "linear", statistics.fmean(found[run][1.0])))
    shares = (0.25, 0.5, 0.75, 1.0)
    lines = [
        [process, f"`{spec}`", *(joined(f"{value:.3f}" for value in found[process, spec][share]) for share in shares)]
        for process, spec in order
    ]
    return table(["schedule", "spec", "25 %", "50 %", "75 %", "100 %"], lines)


def warmup() -> str:
    """The default and shorter warm-ups, all seeds, and the mean of the ratios to the default."""
    ends: dict[tuple[str, str, int, int], float] = {}
    for file in ("digits_bells.jsonl", "digits_default.jsonl", "digits_warmup.jsonl"):
        for row in rows(file):
            if row["share"] == 1:
                ends[spec_now(row), row["process"], row["steps"], row["seed"]] = row["distance"]
    where = [("linear", 700), ("flow", 700), ("edm", 700), ("linear", 2400), ("cosine", 2400)]
    default, shortest = "adaptive:floor=0.2", "adaptive:floor=0.2,warmup=50"  # today's default has another floor
    lines = []
    for spec in (default, "adaptive:floor=0.2,warmup=100", shortest):
        found = {one[1:]: value for one, value in ends.items() if one[0] == spec and (shortest, *one[1:]) in ends}
        cells = [joined(f"{found[one]:.2f}" for one in sorted(found) if one[:2] == place) for place in where]
        logs = [math.log(value / ends[default, *one]) for one, value in found.items()]
        error = statistics.stdev(logs) / len(logs) ** 0.5
        ratio = f"{math.exp(statistics.fmean(logs)):.2f} ± {error:.2f} ({len(logs)} runs)" if spec != default else "1"
        lines.append([f"`{spec}`", *cells, ratio])
    return table(["spec", *(f"{process}, {steps:,}" for process, steps in where), "over the default"], lines)


def bells() -> str:
    """Bells over log SNR, 700 steps, seed 1."""
    ends = [row for file in ("digits_bells.jsonl", "digits_screen.jsonl") for row in rows(file) if row["share"] == 1]
    found = {(spec_now(row), row["process"]): row["distance"] for row in ends if (row["seed"], row["steps"]) == (1, 700)}
    specs = {spec_now(row) for row in rows("digits_bells.jsonl") if row["steps"] == 700} | {"uniform", "minsnr:gamma=5"}
    order = sorted(specs, key=lambda one: found[one, "linear"])
    lines = ([f"`{spec}`", *(f"{found[spec, process]:.2f}" for process in ("linear", "cosine"))] for spec in order)
    return table(["spec", "linear", "cosine"], lines)


def search() -> str:
    """700 steps: variants of the default, lowest mean first."""
    return two_seeds(
        {(row["sampler"], row["seed"]): row["distance"] for row in rows("digits_search.jsonl") if row["share"] == 1}
    )


def estimators() -> str:
    """700 steps: the other estimators, and what they are to be compared with."""
    found = {(spec_now(row), row["seed"]): row["distance"] for row in rows("digits_estimators.jsonl")}
    known = [row for row in rows("digits_screen.jsonl") if (row["process"], row["share"]) == ("linear", 1)]
    alone = {(row["sampler"], row["seed"]): row["distance"] for row in known if row["sampler"] in ("uniform", "minsnr:gamma=5")}
    return two_seeds(found | alone)


def two_seeds(ends: dict[tuple[str, int], float]) -> str:
    """Distances by spec for seeds 0 and 1, lowest mean first."""
    mean = {spec: statistics.fmean(ends[spec, seed] for seed in (0, 1)) for spec, _ in ends}
    order = sorted(mean, key=lambda one: mean[one])
    return table(["spec", "seed 0", "seed 1"], ([f"`{s}`", f"{ends[s, 0]:.2f}", f"{ends[s, 1]:.2f}"] for s in order))


DENSITIES: dict[str, Callable[[float, float, float], float]] = {
    "weight × loss": lambda weight, loss, norm: weight * loss,
    "weight × √loss": lambda weight, loss, norm: weight * loss**0.5,
    "weight × norm of the gradient: the optimum": lambda weight, loss, norm: weight * norm,
}


def variance() -> str:
    """The second moment of the importance-weighted gradient of Min-SNR's objective over that of uniform draws."""
    levels = [row for row in rows("digits_gradients.csv") if row["step"] == 800]
    known = [(min(5 * math.exp(-row["log_snr"]), 1.0), row["loss"], row["rms_norm"]) for row in levels]
    size = np.array([weight * norm for weight, _, norm in known])
    floors = (0.0, 0.05, 0.2, 0.35, 0.5)
    lines = []
    for name, mass in DENSITIES.items():
        drawn = np.array([mass(*one) for one in known])
        lines.append([name, *(f"{mean_noise(size, drawn, floor) / (size**2).mean():.2f}" for floor in floors)])
    return table(["drawn in proportion to", *(f"floor {floor:g}" for floor in floors)], lines)


def finetune() -> str:
    """Distance of a short fine-tune at each mark, mean of the seeds, its ratios to uniform's at the last, and the losses."""
    found: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for row in rows("finetune_digits.jsonl"):
        found.setdefault((row["step"], row["method"]), {})[row["seed"]] = row
    marks = sorted({step for step, _ in found if step})
    lines = []
    for method in ("uniform", "logit_normal", "minsnr", "adaptive"):
        means = [f"{statistics.fmean(row['distance'] for row in found[mark, method].values()):.2f}" for mark in marks]
        ends, uniform = found[marks[-1], method], found[marks[-1], "uniform"]
        ratios = joined(f"{ends[seed]['distance'] / uniform[seed]['distance']:.2f}" for seed in sorted(ends))
        losses = [
            f"{statistics.fmean(ends[seed]['loss'][third] / uniform[seed]['loss'][third] for seed in ends):.3f}"
            for third in range(3)
        ]
        lines.append([f"`{method}`", *means, ratios, *losses])
    heads = [
        *(f"{mark:,} steps" for mark in marks),
        f"{marks[-1]:,}: over uniform's",
        "loss, least noise",
        "middle",
        "most noise",
    ]
    return table(["method", *heads], lines)
