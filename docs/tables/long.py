"""The long protocol, `cifar10-v2`: distances at every mark, and the map of what pictures want."""

import math
from typing import Any

import numpy as np
import torch

from noisewise import DDPM, Objective
from noisewise.samplers.adaptive.cut import ERROR, crossing
from noisewise.spec import build_process

from . import rows, spec_now, table
from .field import NAMES

TENTHS = [f"{k / 10:.1f} to {(k + 1) / 10:.1f}" for k in range(10)]  # of u
MOVING = ("uniform", "min-snr", "adaptive", "adaptive:grow=8000,growth=1")  # whose objectives differ


def runs() -> str:
    """FID at each mark, a line a run, and its ratio to uniform's with the same seed at the last mark both have."""
    curves: dict[tuple[str, int, str], dict[int, float]] = {}
    for row in rows("cifar10-v2-runs.jsonl"):
        method = NAMES.get(spec_now(row), row["method"])
        curve = curves.setdefault((row["process"], row["seed"], method), {})
        curve.setdefault(row["step"], row["distance"])  # of its first run
    marks = sorted({step for curve in curves.values() for step in curve})
    lines = []
    for (process, seed, method), curve in sorted(curves.items()):
        uniform = curves[process, seed, "uniform"]
        last = max(curve.keys() & uniform.keys())
        ratio = "" if method == "uniform" else f"{curve[last] / uniform[last]:.2f}"
        lines.append([process, str(seed), method, *in_marks(curve, marks), ratio])
    return table(["process", "seed", "method", *(f"{mark:,}" for mark in marks), "last over uniform's"], lines)


def in_marks(curve: dict[int, float], marks: list[int]) -> list[str]:
    return [f"{curve[mark]:.1f}" if mark in curve else "–" for mark in marks]


def ratios() -> str:
    """FID over uniform's with the same seed at each mark, for the default and its growing cut-offs."""
    known = {about(row): row["distance"] for row in rows("cifar10-v2-runs.jsonl")}
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    for (process, seed, method, step), distance in known.items():
        uniform = known.get((process, seed, "uniform", step))
        if uniform and method.startswith("adaptive") and "paper" not in method:
            found.setdefault((process.partition(":")[0], method, seed), {})[step] = distance / uniform
    marks = sorted({step for curve in found.values() for step in curve})
    lines = []
    for (process, method, seed), curve in sorted(found.items()):
        cells = [f"{curve[mark]:.2f}" if mark in curve else "–" for mark in marks]
        lines.append([process, f"`{method}`", str(seed), *cells])
    return table(["process", "spec", "seed", *(f"{mark:,}" for mark in marks)], lines)


def branches() -> str:
    """FID at each mark of the runs with other settings, over uniform's and over the default's with the same seed."""
    known = {about(row): row["distance"] for row in rows("cifar10-v2-runs.jsonl")}
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in of_other_settings():
        found.setdefault(row["run"], {})[row["step"]] = row
    marks = sorted({step for curve in found.values() for step in curve})
    lines = []
    for name, curve in found.items():
        end = curve[max(curve)]
        ratios = (f"{end['distance'] / known[about(end, other)]:.2f}" for other in ("uniform", "adaptive"))
        distances = {step: row["distance"] for step, row in curve.items()}
        lines.append([f"`{name}`", *in_marks(distances, marks), *ratios])
    return table(["run", *(f"{mark:,}" for mark in marks), "last over uniform's", "over the default's"], lines)


def of_other_settings() -> list[dict[str, Any]]:
    """Without the default itself, from which some of them begin."""
    return [row for row in rows("cifar10-v2-branches.jsonl") if row["run"] != row["method"]]


def about(row: dict[str, Any], method: str | None = None) -> tuple[str, int, str, int]:
    """Which evaluation of which run: its own, or that of another method beside it."""
    return row["process"], row["seed"], method or row["method"], row["step"]


def losses_beside_uniform(process: str, seed: str) -> str:
    """Held-out loss by tenth of u over uniform's with the same seed, at every mark of every other run."""
    known = {about(row): row["held_out"] for row in rows("cifar10-v2-runs.jsonl")}
    lines = []
    for (of, own, method, step), losses in sorted(known.items()):
        if (of, str(own)) == (process, seed) and method != "uniform" and (of, own, "uniform", step) in known:
            ratios = zip(tenths(losses), tenths(known[of, own, "uniform", step]), strict=True)
            lines.append([f"`{method}`", f"{step:,}", *(f"{mine / other:.3f}" for mine, other in ratios)])
    return table(["run", "steps", *TENTHS], lines)


def losses_by_tenth() -> str:
    """Held-out loss by tenth of u at the last mark of each run with other settings, over the default's at that step."""
    known = {about(row): row["held_out"] for row in rows("cifar10-v2-runs.jsonl")}
    ends = {row["run"]: row for row in of_other_settings()}
    lines = []
    for name, row in ends.items():
        ratios = zip(tenths(row["held_out"]), tenths(known[about(row, "adaptive")]), strict=True)
        lines.append([f"`{name}`", f"{row['step']:,}", *(f"{mine / other:.3f}" for mine, other in ratios)])
    return table(["run", "steps", *TENTHS], lines)


def noise_of_draws() -> str:
    """Noise of a step on the digits for densities of two objectives, from the measured gradients of samples."""
    found = [row for row in rows("digits_gradients.csv") if row["step"] == 800]
    loss, norm, log_snr = (np.array([row[name] for row in found]) for name in ("loss", "rms_norm", "log_snr"))
    columns = []
    for weight in (np.minimum(1, 5 / np.exp(log_snr)), np.ones_like(loss)):
        drawn = {"w ‖g‖, the best there is": (weight * norm, 0.0), "w √L": (weight * loss**0.5, 0.0)}
        drawn |= {
            f"w L, floor {floor}" + ", the default" * (floor == 0.35): (weight * loss, floor) for floor in (0.35, 0.2, 0.05)
        }
        drawn["uniform"] = np.ones_like(loss), 0.0
        noise = {name: mean_noise(weight * norm, mass, floor) for name, (mass, floor) in drawn.items()}
        columns.append({name: value / noise["uniform"] for name, value in noise.items()})
    first, second = columns
    lines = [[name, f"{value:.2f}", f"{second[name]:.2f}"] for name, value in sorted(first.items(), key=lambda one: one[1])]
    return table(["drawn by", "noise over that of uniform draws, Min-SNR's objective", "plain objective"], lines)


def mean_noise(size: "np.ndarray", mass: "np.ndarray", floor: float) -> float:
    """The mean of size² / p, where p is the mass with a floor of uniform."""
    return float((size**2 / ((1 - floor) * mass / mass.mean() + floor)).mean())


def tenths(levels: list[float]) -> list[float]:
    size = len(levels) // 10
    return [sum(levels[k * size : (k + 1) * size]) / size for k in range(10)]


def left_to_learn() -> str:
    """Held-out loss over a perfect model's, where that does not remember its data; quadratic schedule, all seeds."""
    optimal = [row for row in rows("cifar10_optimal.csv") if row["memorised"] == "False"]
    noise, best = [-row["log_snr"] for row in optimal], np.log([(row["loss"] + row["high"]) / 2 for row in optimal])
    process, found = DDPM.quadratic(), {}
    for row in rows("cifar10-v2-runs.jsonl"):
        if row["process"] == "quadratic" and row["method"] in MOVING and row["step"] in (8000, 32000, 64000):
            found[row["step"], MOVING.index(row["method"]), row["seed"]] = row["held_out"]
    levels = len(next(iter(found.values())))
    shown = [round(share * levels) for share in (0.8, 0.86, 0.92, 0.98)]
    lam = process.log_snr((torch.tensor(shown) + 0.5) / levels).numpy()
    lines = []
    for (step, method, seed), losses in sorted(found.items()):
        ratios = np.array(losses)[shown] / np.exp(np.interp(-lam, noise, best))
        lines.append([f"{step:,}", MOVING[method], seed, *(f"{ratio:.3f}" for ratio in ratios)])
    return table(["steps", "method", "seed", *(f"log SNR {one:.1f}" for one in lam)], lines)


def what_pictures_want() -> str:
    """The gain in FID of more training in each tenth of u, in per cent, a line for each moment of training."""
    moments: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows("cifar10-v2-map.jsonl"):
        moments.setdefault((row["config"]["process"], row["start_step"]), []).append(row)
    lines = []
    for (process, step), found in sorted(moments.items(), key=lambda one: one[0][1]):
        uniform = {row["seed"]: row["distance"] for row in found if row["stratum"] is None}
        gains = {row["stratum"]: 100 * math.log(uniform[row["seed"]] / row["distance"]) for row in found if row["seed"] == 0}
        noise = 100 * abs(math.log(uniform[0] / uniform[1]))
        cells = [f"{gains[k]:+.1f}" if k in gains else "–" for k in range(10)]
        lines.append([process, f"{step:,}", *cells, f"{noise:.1f}"])
    return table(["process", "steps", *TENTHS, "two seeds of uniform differ by"], lines)


def by_solver() -> str:
    """FID by the solver along the way and by ancestral steps; in brackets over uniform's after the same steps."""
    solvers = {"DDIM, 50 steps": "", "ancestral, 250 steps": "ddpm:steps=250", "ancestral, 1000 steps": "ddpm:steps=1000"}
    known: dict[str, dict[tuple[str, int, str, int], float]] = {name: {} for name in solvers.values()}
    for row in rows("cifar10-v2-runs.jsonl"):
        known[""][about(row, NAMES.get(spec_now(row), row["method"]))] = row["distance"]
    for row in rows("cifar10-v2-solvers.jsonl"):
        solver, _, variance = row["solver"].partition(",")
        assert variance == "variance=fixed_large"
        known[solver][about(row, NAMES.get(spec_now(row), row["sampler"]))] = row["fid"]
    asked = {run for solver, curve in known.items() if solver for run in curve}
    lines = []
    for process, seed, method, step in sorted(asked, key=lambda run: (run[0], run[3], run[2] != "uniform", run[2])):
        cells = []
        for curve in known.values():
            own, uniform = (curve.get((process, seed, one, step)) for one in (method, "uniform"))
            ratio = f" ({own / uniform:.2f})" if own and uniform and method != "uniform" else ""
            cells.append(f"{own:.1f}{ratio}" if own else "–")
        lines.append([process, str(seed), f"{step:,}", method, *cells])
    return table(["process", "seed", "steps", "method", *solvers], lines)


def small_images() -> str:
    """Distances of the runs of thumbnails.py over uniform's with the same seed and classifier; uniform's own first."""
    found: dict[tuple[str, str, int, str], dict[int, float]] = {}
    for row in rows("thumbnails.jsonl"):
        if "solver" not in row:
            run = row["process"], row.get("classifier", "earlier"), row["seed"], row["spec"]
            found.setdefault(run, {})[row["step"]] = row["distance"]
    marks = sorted({step for curve in found.values() for step in curve})
    lines = []
    for run, curve in sorted(found.items(), key=lambda one: (*one[0][:3], one[0][3] != "uniform", one[0][3])):
        process, judge, seed, spec = run
        base = dict.fromkeys(marks, 1.0) if spec == "uniform" else found.get((process, judge, seed, "uniform"), {})
        cells = [f"{curve[mark] / base[mark]:.2f}" if mark in curve and mark in base else "–" for mark in marks]
        lines.append([process, judge, str(seed), f"`{spec}`", *cells])
    return table(["process", "classifier", "seed", "spec", *(f"{mark:,}" for mark in marks)], lines)


def small_images_by_solver() -> str:
    """Distances over uniform's by the solver along the way and by others, at the marks and for the specs that others judged."""
    found: dict[tuple[str, int, str], dict[str, dict[int, float]]] = {}
    for row in rows("thumbnails.jsonl"):
        if row.get("classifier"):
            curves = found.setdefault((row["process"], row["seed"], row["spec"]), {})
            curves.setdefault(row.get("solver", ""), {})[row["step"]] = row["distance"]
    found = {run: curves for run, curves in found.items() if len(curves) > 1}
    marks = sorted({step for curves in found.values() for solver, curve in curves.items() if solver for step in curve})
    lines = []
    for process, seed, spec in sorted(found, key=lambda run: (*run[:2], run[2] != "uniform", run[2])):
        for solver, curve in sorted(found[process, seed, spec].items()):
            base = dict.fromkeys(marks, 1.0) if spec == "uniform" else found[process, seed, "uniform"][solver]
            cells = [f"{curve[mark] / base[mark]:.2f}" if mark in curve and mark in base else "–" for mark in marks]
            lines.append([process, str(seed), f"`{spec}`", f"`{solver}`" if solver else "DDIM, 30 steps", *cells])
    return table(["process", "seed", "spec", "solver", *(f"{mark:,}" for mark in marks)], lines)


def small_images_want() -> str:
    """The map of thumbnails.py: gains of branches over uniform's mean, in per cent."""
    found: dict[int, dict[Any, float]] = {}
    for row in rows("thumbnails-map.jsonl"):
        found.setdefault(row["from"], {})[row["where"]] = row["distance"]
    lines = []
    for step, distances in sorted(found.items()):
        uniform = [distances["uniform 0"], distances["uniform 1"]]
        base = math.sqrt(uniform[0] * uniform[1])
        gains = [f"{100 * math.log(base / distances[tenth]):+.1f}" for tenth in range(10)]
        lines.append([f"{step:,}", *gains, f"{100 * abs(math.log(uniform[0] / uniform[1])):.1f}"])
    return table(["steps", *TENTHS, "two seeds of uniform differ by"], lines)


def cut() -> str:
    """Where the gamma of `adaptive` goes: the SNR at which the held-out squared error in x0 is its share of the data's."""
    runs = [row for row in rows("cifar10-v1-confirmation.jsonl") if row["metric"] == "fid" and row["sampler"] == "adaptive"]
    runs += [row for row in rows("cifar10-v2-runs.jsonl") if row["method"] == "adaptive"]
    small = [row for row in rows("thumbnails.jsonl") if row["spec"] == "adaptive+minsnr:gamma=5" and row["step"] >= 2000]
    found: dict[tuple[str, str], dict[int, float]] = {}
    for data, square, its in (("32×32", 0.2576, runs), ("8×8", 0.2119, small)):  # mean squares of all pixels
        for row in its:
            process = build_process(row["process"])
            u = (torch.arange(len(row["held_out"])) + 0.5) / len(row["held_out"])
            error = Objective(process, row.get("prediction", "eps")).per_prediction(torch.tensor(row["held_out"]), u)
            place = process.log_snr(u)
            gamma = math.exp(crossing(place, torch.log(error / place.exp() / (ERROR * square))))
            found.setdefault((data, row["process"].partition(":")[0]), {})[row["step"]] = gamma
    lines = []
    for (data, process), gammas in sorted(found.items()):
        first, last = min(gammas), max(gammas)
        lines.append([data, process, f"{gammas[first]:.1f} ({first:,})", f"{gammas[last]:.1f} ({last:,})"])
    return table(["images", "process", "SNR (after steps)", "SNR (after steps)"], lines)
