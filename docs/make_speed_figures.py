"""Draws the pictures of docs/speed.md, from the files in benchmarks/results and nothing else.

Run `python docs/make_speed_figures.py` when those files have changed; it needs matplotlib.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from tables.speed import BASELINE, FAST, MODELS, OTHER, PLAIN, curves, millions, speeds

from noisewise.looking.palette import COLOURS

DOCS = Path(__file__).parent
WIDTH, DPI = 8.4, 130  # 1092 pixels
SLOW, RECORDED, OURS = "#9a9a9a", COLOURS[5], COLOURS[0]
PATHS = {"graphs": RECORDED, "fast": OURS, "fast, adaptive": OURS}


def save(figure: plt.Figure, name: str) -> None:
    path = DOCS / "img" / f"{name}.png"
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    plt.close(figure)
    print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1024:.0f} KiB")


def draw_paths() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.3), sharey=True, layout="constrained")
    for ax, model in zip(axes, MODELS, strict=True):
        found = speeds(model)
        rates = {row["path"]: row["steps_per_second"] for row in found}
        ax.barh(range(len(rates)), list(rates.values()), 0.7, color=[PATHS.get(path, SLOW) for path in rates])
        for y, (path, rate) in enumerate(rates.items()):
            ratio = "" if path == BASELINE else f"  ({rate / rates[BASELINE]:.2f}×)"
            ax.text(rate + 0.01 * max(rates.values()), y, f"{rate:.1f}{ratio}", va="center", fontsize=9)
        ax.set_xlim(0, 1.38 * max(rates.values()))
        ax.set_title(f"U-Net of {millions(found[0]['parameters'])} parameters", fontsize=10)
        ax.set_yticks(range(len(rates)), list(rates))
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    row = speeds(MODELS[0])[0]
    figure.suptitle(f"Training steps a second, and how many times the fp32 script's ({row['machine']}, batch {row['batch']})")
    save(figure, "speed_paths")


def draw_losses() -> None:
    found = curves()
    plain = found[PLAIN]
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(WIDTH, 4.8), sharex=True, height_ratios=[1.2, 1], layout="constrained")
    upper.plot(list(plain), list(plain.values()), color="black", lw=1.2, label="plain path")
    upper.plot(list(found[FAST]), list(found[FAST].values()), "o", color=OURS, ms=3.5, label="fast path, same seed")
    upper.set_yscale("log")
    upper.yaxis.set_major_locator(FixedLocator([0.03, 0.05, 0.1, 0.2, 0.5, 1]))
    upper.yaxis.set_minor_locator(NullLocator())
    upper.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    upper.set_ylabel("training loss (log scale)")
    upper.set_title("9.0 M network on CIFAR-10, uniform sampling; means of 50 steps", fontsize=10.5)
    upper.legend(frameon=False)
    for path, colour, label in ((OTHER, SLOW, "plain path, another seed"), (FAST, OURS, "fast path, same seed")):
        difference = [100 * (loss / plain[step] - 1) for step, loss in found[path].items()]
        lower.plot(list(found[path]), difference, "o-", color=colour, ms=3, lw=1, label=label)
    lower.axhline(0, color="black", lw=0.8)
    lower.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g} %" if value else "0"))
    lower.set_ylabel("loss over that of the\nplain path, less 1")
    lower.set_xlabel("training step")
    lower.set_xlim(0, max(plain) + 30)
    lower.legend(frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.2))
    for ax in (upper, lower):
        ax.spines[["top", "right"]].set_visible(False)
    save(figure, "speed_losses")


def main() -> None:
    plt.rcParams.update({"font.size": 9.5, "figure.facecolor": "white"})
    (DOCS / "img").mkdir(exist_ok=True)
    draw_paths()
    draw_losses()


if __name__ == "__main__":
    main()
