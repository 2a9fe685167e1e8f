"""The demo, the analyses, FID's sanity figures and the cost of presets."""

from statistics import fmean
from typing import Any

from noisewise.analysis.cost_model import PAPER_STEP, published
from noisewise.analysis.density import median
from noisewise.analysis.increments import increments as areas
from noisewise.spec import build_process
from noisewise.study.summary import Point, first_reached, holm, mean_ratio, paired_test
from noisewise.training.options import load_preset

from . import rows, table
from .curves import joined


def demo_runs() -> dict[str, list[dict[str, Any]]]:
    """Sampler to its runs in the order of seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows("demo_digits.jsonl"), key=lambda row: row["seed"]):
        found.setdefault(row["sampler"], []).append(row)
    return found


def demo() -> str:
    """The table that `noisewise compare` printed."""
    runs = demo_runs()
    ends = {sampler: [run["distance"] for run in found] for sampler, found in runs.items()}
    uniform, adjusted = ends["uniform"], p_values(ends)
    lines = []
    for sampler, found in runs.items():
        curves = [[Point(one["step"], one["seconds"], one["distance"]) for one in run["curve"]] for run in found]
        there = [first_reached(curve, end).seconds for curve, end in zip(curves, uniform, strict=True)]
        sooner = mean_ratio([run["seconds"] for run in runs["uniform"]], there)
        spread = f"{fmean(ends[sampler]):.4g} ± {(max(ends[sampler]) - min(ends[sampler])) / 2:.2g}"
        lower = sum(mine < theirs for mine, theirs in zip(ends[sampler], uniform, strict=True))
        verdict = "baseline" if sampler == "uniform" else f"lower in {lower} of {len(found)} seeds"
        ratio = mean_ratio(ends[sampler], uniform)
        lines.append([sampler, spread, f"{ratio:.3f}", f"{fmean(there):.1f} ({sooner:.2f}×)", adjusted[sampler], verdict])
    return table(["sampler", "digits-frechet", "over uniform", "seconds to uniform's final", "p", "verdict"], lines)


def p_values(ends: dict[str, list[float]]) -> dict[str, str]:
    """p of each sampler against uniform, which has none."""
    others = [name for name in ends if name != "uniform"]
    found = holm([paired_test(ends[name], ends["uniform"]) for name in others])
    return {"uniform": "", **{name: f"{p:.3f}" for name, p in zip(others, found, strict=True)}}


def demo_losses() -> str:
    """The held-out losses of the demo over uniform's, in the mean of the seeds."""
    runs = demo_runs()
    lines = []
    for sampler in ("minsnr", "adaptive"):
        pairs = list(zip(runs[sampler], runs["uniform"], strict=True))
        cells = [fmean(mine["held_out"][k] / theirs["held_out"][k] for mine, theirs in pairs) for k in (0, -1)]
        lines.append([f"`{sampler}`", *(f"{cell:.2f}" for cell in cells)])
    levels = len(runs["uniform"][0]["held_out"])
    return table(["sampler", f"loss over uniform's, first of {levels} levels", "last"], lines)


def gradients() -> str:
    """The variance of gradients at each moment: at the least noise, and where it is smallest."""
    lines = []
    for step in sorted({row["step"] for row in rows("analysis_gradients.csv")}):
        found = [row for row in rows("analysis_gradients.csv") if row["step"] == step]
        first, low = found[0], min(found, key=lambda row: row["variance"])
        largest = max(row["variance"] for row in found) / low["variance"]
        cells = [f"{first['variance']:.2f}", f"{first['loss']:.2f}", f"{low['variance']:.2g} (u = {low['u']:g})"]
        lines.append([f"{step:.0f}", *cells, f"{largest:.2f}" if largest < 10 else f"{largest:.0f}"])
    heads = ["step", "variance at u = 0.025", "loss there", "smallest variance", "largest over smallest"]
    return table(heads, lines)


def interdependence() -> str:
    """How many pairs of tenths harm one another, and what the two ends do to themselves and to each other."""
    found = [row for row in rows("analysis_interdependence.csv") if row["kind"] == "stratum"]
    lines = []
    for step in sorted({row["step"] for row in found}):
        change = {(row["trained_low"], row["affected_low"]): row["relative_change"] for row in found if row["step"] == step}
        harmed = fmean(value > 0 for (trained, affected), value in change.items() if trained != affected)
        ends = [change[pair] for pair in ((0, 0), (0, 0.9), (0.9, 0), (0.9, 0.9))]
        lines.append([f"{step:.0f}", f"{100 * harmed:.0f} %", *(f"{100 * value:+.0f} %" for value in ends)])
    heads = ["step", "pairs that harm", "least noise on itself", "on the most", "most noise on the least", "on itself"]
    return table(heads, lines)


def density() -> str:
    """Where half of the draws and half of the objective lie at the end of the demo."""
    last: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for row in rows("analysis_density.csv"):
        last.setdefault(row["sampler"], {}).setdefault(row["step"], []).append(row)
    lines = []
    for sampler, steps in last.items():
        end = steps[max(steps)]
        lines.append([f"`{sampler}`", *(f"{median([row[key] for row in end]):.3f}" for key in ("density", "objective"))])
    return table(["sampler", "half of the draws below u =", "half of the objective below u ="], lines)


def ablate() -> str:
    """The distance at each value of the floor, seed by seed."""
    found = rows("analysis_ablate.csv")
    lines = []
    for value in dict.fromkeys(row["value"] for row in found):
        runs = [row for row in found if row["value"] == value]
        cells = [joined(f"{row[key]:.2f}" for row in runs) for key in ("result", "ratio")]
        lines.append([f"{value:g}", *cells, f"{fmean(row['result'] for row in runs):.2f}"])
    return table(["floor", "distance, each seed", "over uniform's", "mean distance"], lines)


SELECTED = {
    "levels by F-statistic (published), all samples": ("f_statistic", 3, "few_pearson"),
    "evenly spaced levels, all samples": ("grid", 3, "few_pearson"),
    "the reward: levels by F-statistic, one sample": ("f_statistic", 3, "one_pearson"),
    "all levels, one sample": ("all", 40, "one_pearson"),
    "reward against the gain that the sample caused": ("credit", 3, "one_pearson"),
}


def predictor() -> str:
    """How approximate gains go with the true one at three moments."""
    found = {(row["step"], row["selection"], row["size"]): row for row in rows("analysis_predictor.csv")}
    lines = []
    for label, (selection, size, key) in SELECTED.items():
        values = [found[step, selection, size][key] for step in (0, 200, 400)]
        lines.append([label, *(f"{value:.2f}".replace("-", "−") for value in values)])
    return table(["predictor at", "step 0", "step 200", "step 400"], lines)


def overhead() -> str:
    """Predicted and measured cost of each sampler: at the middle of all settings, and with the most timesteps."""
    lines = [
        [
            f"`{row['sampler']}`",
            f"{row['T']:.0f}",
            f"{row['predicted']:.3f}",
            f"{published(row['T'], row['batch']) / PAPER_STEP:.3f}" if row["sampler"] == "paper_cifar10" else "–",
            f"{row['measured']:.3f} ({row['low']:.3f} to {row['high']:.3f})",
        ]
        for row in rows("analysis_overhead.csv")
        if row["varied"] == "none" or row["T"] == 1000
    ]
    return table(["overhead of", "T", "predicted", "the paper's account", "measured, 90 % range"], lines)


def increments() -> str:
    """SpeeD's areas of the schedules that have an end that converges."""
    lines = []
    for schedule in ("linear", "cosine", "quadratic", "flow"):
        found = areas(build_process(schedule))
        lines.append([schedule, found.peak, found.tau, *(f"{100 * share:.1f} %" for share in found.shares().values())])
    return table(["schedule", "t*", "τ", "acceleration", "deceleration", "convergence"], lines)


def fid_sanity() -> str:
    """Real images against real images."""
    (row,) = rows("fid_sanity.jsonl")
    names = [
        ("first 5,000 of the training set", "all 50,000 of it", "4.81", "first_tenth_against_train", ".4f"),
        ("10,000 of the test set", "all 50,000 of the training set", "about 3.15", "test_against_train", ".4f"),
        ("features, images a second", "", "", "images_per_s", ".0f"),
    ]
    lines = [[*words, *(format(row[kind][field], digits) for kind in ("float32", "tf32"))] for *words, field, digits in names]
    return table(["images", "reference", "protocol", "float32", "with TF32"], lines)


def preset_cost() -> str:
    """What a step of each preset takes, in the order of the page on training."""
    order = ("cifar10-small", "cifar10", "cifar10-edm", "cifar10-flow", "celebahq-ldm", "imagenet-uvit")
    found = {row["preset"]: row for row in rows("preset_cost.jsonl")}
    lines = []
    for name in order:
        row, config = found[name], load_preset(name)
        if row["batch"] != config.batch:
            continue  # measured with settings that the preset had before
        speed, memory = f"{1 / row['seconds_per_step']:.2f}", f"{row['gpu_memory_gib']:.1f} GiB"
        lines.append([f"`{name}`", row["batch"], speed, memory])
    return table(["preset", "batch", "steps a second", "GPU memory"], lines)
