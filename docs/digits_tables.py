"""Tables of runs on the digits, for the record of the study; make_cifar10_tables.py fills them in."""

import csv
import math
import statistics
from collections.abc import Callable

from pages import RESULTS, rows, spec_now


def warmup_table() -> list[str]:
    """The digits with the default and with shorter warm-ups, all seeds, and the mean of the ratios to the default."""
    ends: dict[tuple[str, str, int, int], float] = {}
    for file in ("digits_bells.jsonl", "digits_default.jsonl", "digits_warmup.jsonl"):
        for row in rows(file):
            if row["share"] == 1:
                ends[spec_now(row), row["process"], row["steps"], row["seed"]] = row["distance"]
    where = [("linear", 700), ("flow", 700), ("edm", 700), ("linear", 2400), ("cosine", 2400)]
    lines = ["| spec | " + " | ".join(f"{process}, {steps:,}" for process, steps in where) + " | over the default |"]
    lines.append("|---" * (len(where) + 2) + "|")
    default, shortest = "adaptive:floor=0.2", "adaptive:floor=0.2,warmup=50"  # today's default has another floor
    for spec in (default, "adaptive:floor=0.2,warmup=100", shortest):
        found = {one[1:]: value for one, value in ends.items() if one[0] == spec and (shortest, *one[1:]) in ends}
        cells = [" / ".join(f"{found[one]:.2f}" for one in sorted(found) if one[:2] == place) for place in where]
        logs = [math.log(value / ends[default, *one]) for one, value in found.items()]
        error = statistics.stdev(logs) / len(logs) ** 0.5
        ratio = f"{math.exp(statistics.fmean(logs)):.2f} ± {error:.2f} ({len(logs)} runs)" if spec != default else "1"
        lines.append(f"| `{spec}` | " + " | ".join(cells) + f" | {ratio} |")
    return lines


def bells_table() -> list[str]:
    """The digits with bells over log SNR, 700 steps, seed 1."""
    ends = [row for file in ("digits_bells.jsonl", "digits_screen.jsonl") for row in rows(file) if row["share"] == 1]
    found = {(spec_now(row), row["process"]): row["distance"] for row in ends if (row["seed"], row["steps"]) == (1, 700)}
    bells = {spec_now(row) for row in rows("digits_bells.jsonl") if row["steps"] == 700} | {"uniform", "minsnr:gamma=5"}
    lines = ["| spec | linear | cosine |", "|---|---|---|"]
    lines += [
        f"| `{spec}` | {found[spec, 'linear']:.2f} | {found[spec, 'cosine']:.2f} |"
        for spec in sorted(bells, key=lambda one: found[one, "linear"])
    ]
    return lines


def search_table() -> list[str]:
    """The digits, 700 steps: variants of the default, lowest mean first."""
    return two_seeds(
        {(row["sampler"], row["seed"]): row["distance"] for row in rows("digits_search.jsonl") if row["share"] == 1}
    )


def estimators_table() -> list[str]:
    """The digits, 700 steps: the other estimators, and what they are to be compared with."""
    found = {(spec_now(row), row["seed"]): row["distance"] for row in rows("digits_estimators.jsonl")}
    known = [row for row in rows("digits_screen.jsonl") if (row["process"], row["share"]) == ("linear", 1)]
    alone = {(row["sampler"], row["seed"]): row["distance"] for row in known if row["sampler"] in ("uniform", "minsnr:gamma=5")}
    return two_seeds(found | alone)


def two_seeds(ends: dict[tuple[str, int], float]) -> list[str]:
    """Distances by spec for seeds 0 and 1, lowest mean first."""
    mean = {spec: statistics.fmean(ends[spec, seed] for seed in (0, 1)) for spec, _ in ends}
    lines = ["| spec | seed 0 | seed 1 |", "|---|---|---|"]
    lines += [f"| `{spec}` | {ends[spec, 0]:.2f} | {ends[spec, 1]:.2f} |" for spec in sorted(mean, key=lambda one: mean[one])]
    return lines


DENSITIES: dict[str, Callable[[float, float, float], float]] = {
    "weight × loss": lambda weight, loss, norm: weight * loss,
    "weight × √loss": lambda weight, loss, norm: weight * loss**0.5,
    "weight × norm of the gradient: the optimum": lambda weight, loss, norm: weight * norm,
}


def variance_table() -> list[str]:
    """The second moment of the importance-weighted gradient of Min-SNR's objective over that of uniform draws."""
    with (RESULTS / "analysis_gradients.csv").open() as file:
        levels = [row for row in csv.DictReader(file) if row["step"] == "800"]
    known = [(min(5 * math.exp(-float(r["log_snr"])), 1.0), float(r["loss"]), float(r["rms_norm"])) for r in levels]
    floors = (0.0, 0.05, 0.2, 0.35, 0.5)
    lines = [
        "| drawn in proportion to | " + " | ".join(f"floor {floor:g}" for floor in floors) + " |",
        "|---" * (len(floors) + 1) + "|",
    ]
    for name, mass in DENSITIES.items():
        total = sum(mass(*one) for one in known)
        cells = []
        for floor in floors:
            density = [(1 - floor) * mass(*one) / total * len(known) + floor for one in known]
            found = sum((w * norm) ** 2 / q for (w, _, norm), q in zip(known, density, strict=True))
            cells.append(f"{found / sum((w * norm) ** 2 for w, _, norm in known):.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines
