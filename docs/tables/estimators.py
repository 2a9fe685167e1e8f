"""The estimators of `adaptive`: known answers, an MLP on digits, and what a step costs in an eager loop."""

from typing import Any

import numpy as np

from . import rows, table

SCHEDULES = ("linear", "cosine", "quadratic")
BASELINES = ("uniform", "Min-SNR")


def digits() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Schedule to method to its runs, in the order of the file."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {schedule: {} for schedule in SCHEDULES}
    for run in rows("targets_digits.jsonl"):
        found[run["schedule"]].setdefault(run["method"], []).append(run)
    return found


def true_gains() -> tuple[list[tuple[str, int]], dict[str, dict[tuple[str, int], float]]]:
    """The problems with their steps, and each estimator's Spearman's rho on them."""
    found: dict[str, dict[tuple[str, int], float]] = {"loss": {}, "reinforce": {}, "lookahead": {}}
    for row in rows("known_answers.jsonl"):
        if "spearman" in row:
            found[row["estimator"].split(" ")[0]][row["problem"], row["horizon"]] = row["spearman"]
    return list(found["loss"]), found


def costs() -> list[dict[str, Any]]:
    """What was measured, with the names of today: `adaptive` had no target of its own then."""
    found = []
    for row in rows("step_cost.jsonl"):
        today = {key: "adaptive+none" if row[key] == "adaptive" else row[key] for key in ("sampler", "spec")}
        found.append(row | today | {"name": today["sampler"] + (", compiled" if row["compile"] else "")})
    return found


def thirds(estimator: str = "") -> str:
    """Draws and losses in the thirds of u on the linear schedule: of an estimator, of the `baselines`, or of all methods."""
    lines = []
    for method, runs in digits()["linear"].items():
        of = "baselines" if method in BASELINES else method.replace(",", "").split()[0]
        if not estimator or of == estimator:
            frechet = np.mean([run["frechet_ratio"] for run in runs])
            cells = [_triple([run["drawn"] for run in runs]), _triple([run["loss_ratio"] for run in runs]), f"{frechet:.2f}"]
            lines.append([method, *cells])
    parts = "early / middle / late"
    heads = ["method", f"share of draws, {parts}", f"loss over uniform's, {parts}", "Fréchet distance over uniform's"]
    return table(heads, lines)


def _triple(values: Any) -> str:
    return " / ".join(f"{value:.2f}" for value in np.mean(values, 0))


def frechet() -> str:
    """Distances over uniform's of the methods that were run on all schedules: mean, and range of the seeds."""
    runs, lines = digits(), []
    for method in runs["linear"]:
        if method != "uniform" and all(method in runs[schedule] for schedule in SCHEDULES):
            found = [[run["frechet_ratio"] for run in runs[schedule][method]] for schedule in SCHEDULES]
            lines.append([method, *(f"{np.mean(one):.2f} ({min(one):.2f} to {max(one):.2f})" for one in found)])
    return table(["method", *SCHEDULES], lines)


def gains(estimator: str = "") -> str:
    """Spearman's rho with the true gains: of one estimator a line for each problem, else a line for each estimator."""
    problems, found = true_gains()
    if estimator:
        lines = [[f"`{problem}`", steps, f"{found[estimator][problem, steps]:.2f}"] for problem, steps in problems]
        return table(["problem", "steps", "Spearman's rho"], lines)
    heads = [f"{problem}, {steps} step{'s' * (steps > 1)}" for problem, steps in problems]
    lines = [[f"`{name}`", *(f"{rho[problem]:.2f}" for problem in problems)] for name, rho in found.items()]
    return table(["estimator", *heads], lines)


def outcomes() -> str:
    """Mean excess loss over uniform's on the known problems."""
    found: dict[str, dict[tuple[str, float], float]] = {}
    for row in rows("known_answers.jsonl"):
        if "sampler" in row:
            found.setdefault(row["sampler"], {})[row["problem"], row["lr"]] = row["mean excess"]
    uniform = found.pop("uniform")
    lines = [[name, *(f"{excess[key] / uniform[key]:.2f}" for key in uniform)] for name, excess in found.items()]
    return table(["sampler", *(f"{problem}, lr {lr:g}" for problem, lr in uniform)], lines)


def cost() -> str:
    """The same with what was timed."""
    lines = []
    for row in costs():
        if "event_ms" in row:
            timed = f"an event of {row['event_ms'] / 1e3:.1f} s every {row['interval']} steps"
        else:
            timed = f"an update every {row['every']} steps"
        spec = f"`{row['spec']}`" + (", compiled" if row["compile"] else "")
        lines.append([spec, f"{row['ratio']:.3f}", f"{row['range'][0]:.3f} to {row['range'][1]:.3f}", timed])
    return table(["spec", "time over uniform's", "range", "timed"], lines)
