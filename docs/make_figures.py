"""Draws the pictures of docs/adaptive.md, from the files in benchmarks/results and nothing else.

Run `python docs/make_figures.py` when those files have changed; it needs matplotlib.
"""

import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from tables.estimators import SCHEDULES, costs, digits, true_gains

from noisewise.looking.palette import COLOURS, GREY, PALE

DOCS = Path(__file__).parent
WIDTH, DPI = 8.4, 130  # 1092 pixels

ESTIMATORS = dict(zip(("loss", "reinforce", "lookahead"), COLOURS, strict=False))
SHOWN = {  # in the heat maps and the loss curves: an estimator has a colour, and its targets have line styles
    "loss, plain": "-",
    "loss, Min-SNR, no importance weight": "--",
    "reinforce as published (VLB)": "-",
    "reinforce, VLB": "--",
    "lookahead, VLB": "-",
    "lookahead, scale-free": "--",
}
TARGETS_OF_COST = {  # what the methods of step_cost.jsonl are in targets_digits.jsonl
    "adaptive+none": "loss, plain",
    "adaptive+minsnr": "loss, Min-SNR",
    "reinforce": "reinforce, plain",
    "paper_cifar10": "reinforce as published (VLB)",
    "lookahead": "lookahead, plain",
}


def colour(method: str) -> str:
    """That of its estimator; grey for what has none."""
    return ESTIMATORS.get(re.split("[, ]", method)[0], GREY)


def save(figure: plt.Figure, name: str) -> None:
    path = DOCS / "img" / f"{name}.png"
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    plt.close(figure)
    print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1024:.0f} KiB")


def plain_log(axis: Any, ticks: list[float]) -> None:
    """Numbers instead of powers on a logarithmic axis."""
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def draw_density() -> None:
    runs = {method: next(run for run in digits()["linear"][method] if run["seed"] == 0) for method in SHOWN}
    figure, axes = plt.subplots(2, 3, figsize=(WIDTH, 5.6), sharex=True, sharey=True, layout="constrained")
    norm = LogNorm(1 / 5, 5)
    for ax, (method, run) in zip(axes.flat, runs.items(), strict=True):
        density, steps = np.array(run["density"]), np.array(run["density_steps"], float)
        edges = np.append(steps, run["steps"])
        levels = np.linspace(0, 1, density.shape[1] + 1)
        mesh = ax.pcolormesh(edges, levels, density.T, norm=norm, cmap="PuOr_r")
        title = method.replace(", no", ",\nno").replace(" (", "\n(")
        ax.set_title(title, fontsize=9.5, color=colour(method), fontweight="bold")
        ax.set_xlim(0, edges[-1])
        ax.set_xticks(np.linspace(0, edges[-1], 5)[:-1])
    for ax in axes[-1]:
        ax.set_xlabel("training step")
    for ax in axes[:, 0]:
        ax.set_ylabel("noise level u\n(0 = no noise, 1 = all noise)")
    bar = figure.colorbar(mesh, ax=axes, extend="both", shrink=0.85, label="density of the draws over uniform's (log scale)")
    plain_log(bar.ax.yaxis, [0.2, 0.5, 1, 2, 5])
    figure.suptitle("Where training draws its noise levels (digits, linear schedule, seed 0)", fontsize=11)
    save(figure, "density")


def draw_losses() -> None:
    linear = digits()["linear"]
    figure, ax = plt.subplots(figsize=(WIDTH, 4.3), layout="constrained")
    reference = {run["seed"]: np.array(run["loss"]) for run in linear["uniform"]}
    for method, style in SHOWN.items():
        ratios = np.array([np.array(run["loss"]) / reference[run["seed"]] for run in linear[method]])
        u = (np.arange(ratios.shape[1]) + 0.5) / ratios.shape[1]
        ax.plot(u, ratios.mean(0), style, color=colour(method), label=method, lw=1.8)
        ax.fill_between(u, ratios.min(0), ratios.max(0), color=colour(method), alpha=0.15, lw=0)
    ax.axhline(1, color=GREY, lw=1, label="uniform = 1", zorder=1)
    for third in (1 / 3, 2 / 3):
        ax.axvline(third, color=PALE, lw=0.8, ls=":")
    for middle, name in ((1 / 6, "early"), (1 / 2, "middle"), (5 / 6, "late")):
        ax.text(middle, 0.985, name, transform=ax.get_xaxis_transform(), ha="center", va="top", fontsize=9, color=GREY)
    ax.set_yscale("log")
    plain_log(ax.yaxis, [0.25, 0.5, 1, 2, 4, 8, 16])
    ax.set_xlim(0, 1)
    ax.set_xlabel("noise level u (0 = no noise, 1 = all noise)")
    ax.set_ylabel("held-out loss over uniform's\n(log scale, below 1 is better)")
    title = "What it does to the loss at each noise level (digits, linear schedule; line: mean, band: range of seeds)"
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=8.5, loc="upper left", bbox_to_anchor=(0, 0.95), frameon=False)
    save(figure, "losses")


def draw_frechet() -> None:
    runs = digits()
    methods = [method for method in runs["linear"] if method != "uniform"]
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, 4.7), sharex=True, sharey=True, layout="constrained")
    for ax, schedule in zip(axes, SCHEDULES, strict=True):
        ax.axvline(1, color=GREY, lw=1)
        for y, method in enumerate(methods):
            ratios = [run["frechet_ratio"] for run in runs[schedule].get(method, [])]
            if ratios:
                ax.plot(ratios, [y] * len(ratios), "o", ms=5, color=colour(method), alpha=0.65, mec="none")
                ax.plot(np.mean(ratios), y, "|", ms=13, mew=2, color=colour(method))
            else:
                ax.text(1.03, y, "not run", va="center", fontsize=7.5, color=GREY)
        ax.set_title(f"{schedule} schedule", fontsize=10)
        ax.set_xscale("log")
        plain_log(ax.xaxis, [0.6, 0.8, 1, 1.2, 1.6])
        ax.grid(axis="y", color="#E5E5E5", lw=0.7)
        ax.set_axisbelow(True)
    axes[0].set_yticks(range(len(methods)), methods, fontsize=8.5)
    axes[0].invert_yaxis()
    axes[1].set_xlabel("Fréchet distance of generated digits over uniform's (log scale, left of 1 is better)")
    figure.suptitle("Pictures against uniform's (dots: seeds, bar: their mean, line at 1: uniform)", fontsize=11)
    save(figure, "frechet")


def draw_gains() -> None:
    problems, found = true_gains()
    figure, ax = plt.subplots(figsize=(WIDTH, 3.3), layout="constrained")
    for position, (estimator, rho) in enumerate(found.items()):
        x = np.arange(len(problems)) + (position - 1) * 0.27
        values = [rho[problem] for problem in problems]
        ax.bar(x, values, 0.25, color=ESTIMATORS[estimator], label=estimator)
        for left, value in zip(x, values, strict=True):
            ax.text(left, max(value, 0) + 0.02, f"{value:.2f}", ha="center", fontsize=8.5)
    ax.axhline(0, color="black", lw=0.8)
    ax.set_xticks(range(len(problems)), [f"{problem}\n{steps} step{'s' * (steps > 1)} ahead" for problem, steps in problems])
    ax.set_ylim(min(0, *(value - 0.1 for rho in found.values() for value in rho.values())), 1.12)
    ax.set_ylabel("Spearman's rho with the true gains\n(1 = right order, 0 = no relation)")
    ax.set_title("Does the estimator rank the eight strata by what training more of them gives?", fontsize=10.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(title="estimator", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, "gains")


def draw_costs() -> None:
    found = costs()
    figure, ax = plt.subplots(figsize=(WIDTH, 0.9 + 0.45 * len(found)), layout="constrained")
    ax.axvline(1, color=GREY, lw=1)
    for y, row in enumerate(found):
        shade = colour(TARGETS_OF_COST.get(row["sampler"], "Min-SNR"))
        ax.plot(row["range"], [y, y], color=shade, lw=3, alpha=0.45, solid_capstyle="butt")
        ax.plot(row["ratio"], y, "o", color=shade, ms=7)
        ax.text(max(row["range"]) + 0.003, y, f"{row['ratio']:.3f}", va="center", fontsize=9)
    ax.set_yticks(range(len(found)), [row["name"] for row in found])
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.margins(x=0.08)
    ax.set_xlabel("time per training step over uniform's (dot: measured ratio, bar: its range, line at 1: uniform)")
    first = found[0]
    conditions = f"{first['gpu']}, UNet of {first['parameters'] / 1e6:.1f} M parameters, batch {first['batch']}, bf16, eager"
    ax.set_title(f"What a step costs ({conditions})", fontsize=10.5)
    ax.spines[["top", "right"]].set_visible(False)
    save(figure, "cost")


def main() -> None:
    plt.rcParams.update({"font.size": 9.5, "figure.facecolor": "white"})
    (DOCS / "img").mkdir(exist_ok=True)
    for draw in (draw_density, draw_losses, draw_frechet, draw_gains, draw_costs):
        draw()


if __name__ == "__main__":
    main()
